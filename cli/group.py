"""A command that has commands of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from caffepy.core.registry import nearest


class Commands(click.Group):
    """A group of commands; an unknown one comes with the nearest known name.

    Its help lists them in `sections`, if they are given.
    """

    def __init__(
        self, *, sections: Mapping[str, Sequence[click.Command]] | None = None, **settings: Any
    ) -> None:
        self.sections = sections or {}
        super().__init__(**settings)
        for commands in self.sections.values():
            for command in commands:
                self.add_command(command)

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
