"""Caffe's ways to write a command line, turned into click's.

Caffe's flags are `-solver x`, `-solver=x`, `--solver x` and `--solver=x`, booleans `-flag`,
`-noflag` and `-flag=false`, and may stand before the command; dashes and underscores are the same.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence

TRUE = ("1", "t", "true", "y", "yes")
FALSE = ("0", "f", "false", "n", "no")


def normalize(
    arguments: Sequence[str], takes_value: Mapping[str, bool | None], groups: Container[str] = ()
) -> list[str]:
    """Return the command and other words first, then `--name=value` and `--flag`.

    `takes_value` has the names of all flags, without dashes. Flags with None take a number, if one
    follows; a word must not come after them, since click would take it. `groups` are the commands
    with subcommands, which keep their first two words in front. Unknown flags are kept for click's
    message. Nothing after `--` changes.
    """
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    flags: list[str] = []
    words: list[str] = []
    rest = deque(arguments[:cut])
    while rest:
        argument = rest.popleft()
        if argument.startswith("-") and len(argument) > 1:
            flags += _flag(argument, rest, takes_value)
        else:
            words.append(argument)
    length = 2 if words and words[0].replace("_", "-") in groups else 1
    command = [word.replace("_", "-") for word in words[:length]]
    return [*command, *words[length:], *flags, *arguments[cut:]]


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
