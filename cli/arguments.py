"""Caffe's ways to write a command line, turned into click's.

Caffe's flags are `-solver x`, `-solver=x`, `--solver x` and `--solver=x`, booleans `-flag`,
`-noflag` and `-flag=false`, and may stand before the command; dashes and underscores are the same.
gflags' `-flagfile` stands for the flags in a file, a line each, and `-undefok` names flags that may
be unknown.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence

from caffepy.core.errors import UsageError, reason

TRUE = ("1", "t", "true", "y", "yes")
NO = ("", "no")
FALSE = ("0", "f", "false", "n", "no")
ALIASES = {
    "upgrade-net-proto-text": "upgrade-net",
    "upgrade-net-proto-binary": "upgrade-net",
    "upgrade-solver-proto-text": "upgrade-solver",
}
"""Caffe's names of commands."""


def command_name(word: str) -> str:
    """Return the command that is typed like this."""
    name = word.replace("_", "-")
    return ALIASES.get(name, name)


def normalize(
    arguments: Sequence[str], takes_value: Mapping[str, bool | None], groups: Container[str] = ()
) -> list[str]:
    """Return the command and other words first, then `--name=value` and `--flag`.

    `takes_value` has the names of all flags, without dashes. Flags with None take a number, if one
    follows; a word must not come after them, since click would take it. `groups` are the commands
    with subcommands, which keep their first two words in front. Unknown flags are kept for click's
    message. Nothing after `--` changes. UsageError if a flagfile cannot be read.
    """
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    flags: list[str] = []
    words: list[str] = []
    may_be_unknown: set[str] = set()
    rest = deque(arguments[:cut])
    while rest:
        argument = rest.popleft()
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in ("flagfile", "undefok"):
            values = (value if equals or not rest else rest.popleft()).split(",")
            if name == "undefok":
                may_be_unknown.update(f"{no}{n}".replace("_", "-") for n in values for no in NO)
            else:
                rest.extendleft(reversed([flag for path in values for flag in _read_flags(path)]))
        elif argument.startswith("-") and len(argument) > 1:
            flags += _flag(argument, rest, takes_value)
        else:
            words.append(argument)
    may_be_unknown -= takes_value.keys()
    flags = [flag for flag in flags if flag[2:].partition("=")[0] not in may_be_unknown]
    length = 2 if words and command_name(words[0]) in groups else 1
    command = [command_name(word) for word in words[:length]]
    return [*command, *words[length:], *flags, *arguments[cut:]]


def _read_flags(path: str) -> list[str]:
    """Return the flags in a file: a line each, but for blank ones and comments."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--flagfile {path}: cannot be read: {why}") from None
    flags = [line for line in lines if line and not line.startswith("#")]
    if others := [line for line in flags if not line.startswith("-")]:
        raise UsageError(f"--flagfile {path}: {others[0]!r} is no flag; a line is --name=value")
    return flags


def _flag(argument: str, rest: deque[str], takes_value: Mapping[str, bool | None]) -> list[str]:
    """Return click's form of a flag: nothing for one that is switched off and has no negative
    form."""
    name, equals, value = argument.lstrip("-").partition("=")
    name = name.replace("_", "-")
    if name == "h":
        name = "help"
    takes = takes_value.get(name, False)
    if takes is None:
        takes = bool(equals or (rest and rest[0].isdecimal()))
    if takes:
        if not equals:
            return [f"--{name}={rest.popleft()}" if rest else f"--{name}"]
        return [f"--{name}={value}"]
    positive = name if name in takes_value else name.removeprefix("no")
    if takes_value.get(positive) is not False or (equals and value.lower() not in TRUE + FALSE):
        return [f"--{name}{equals}{value}"]
    if (positive == name) == (not equals or value.lower() in TRUE):
        return [f"--{positive}"]
    return [f"--no-{positive}"] if f"no-{positive}" in takes_value else []
