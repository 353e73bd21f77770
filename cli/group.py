"""Groups of commands, help in sections, and which commands several processes may run."""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import click

from caffepy.core.names import nearest

OVER_NODES = {"train", "test", "time", "bench allreduce", "bench scaling", "device-pairs"}
"""Commands that the processes of mpirun or srun run as one."""

WRITES_NOTHING = {"check", "summarize", "weights show", "device-query", "doctor"}
"""Commands that each of them may run separately. All others are for one process."""


class Commands(click.Group):
    """A group of commands; an unknown one comes with the nearest known name.

    Its help lists them in `sections`, if they are given. Commands that are for one process raise
    UsageError in one of several.
    """

    def __init__(
        self,
        *,
        commands: Sequence[click.Command] = (),
        sections: Mapping[str, Sequence[click.Command]] | None = None,
        **settings: Any,
    ) -> None:
        self.sections = sections or {}
        super().__init__(**settings)
        for command in chain(commands, *self.sections.values()):
            self.add_command(command)

    def add_command(self, command: click.Command, name: str | None = None) -> None:
        """Add a command."""
        if command.callback and not isinstance(command, click.Group):
            command.callback = _checked(command.callback)
        super().add_command(command, name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that the first argument names; UsageError if there is none."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            ctx.fail(
                f'no such command "{name}"{nearest(name, known)} (commands: {", ".join(known)})'
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of commands for each section."""
        if not self.sections:
            return super().format_commands(ctx, formatter)
        width = max(map(len, self.commands))
        room = formatter.width - width - 6
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{c.name:{width}}", c.get_short_help_str(room)) for c in commands]
                )


class Sectioned(click.Command):
    """A command whose help lists its options in sections, which begin at the options of these
    names.
    """

    def __init__(self, *, sections: Mapping[str, str], **settings: Any) -> None:
        self.sections = sections
        super().__init__(**settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each section, the first under the title "Options"."""
        lists: dict[str, list[tuple[str, str]]] = {}
        title = "Options"
        for parameter in self.get_params(ctx):
            title = self.sections.get(parameter.name or "", title)
            if row := parameter.get_help_record(ctx):
                lists.setdefault(title, []).append(row)
        for title, rows in lists.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _checked(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return what checks that the current command may run in this process, then calls this."""

    @functools.wraps(callback)
    def run(**values: Any) -> Any:
        context, names = click.get_current_context(), list[str]()
        while context.parent:
            names.insert(0, context.command.name or "")
            context = context.parent
        name = " ".join(names)
        if name not in OVER_NODES | WRITES_NOTHING:
            from caffepy.collectives.launch import check_single

            check_single(f"caffepy {name}")
        return callback(**values)

    return run
