"""What a command with commands of its own is made of."""

from typing import Any

import click

from caffepy.core.registry import nearest


class Commands(click.Group):
    """The group of commands; an unknown one comes with the nearest known name."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """The command that the first argument names; UsageError if there is none."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            ctx.fail(
                f'no such command "{name}"{nearest(name, known)} (commands: {", ".join(known)})'
            )
        return super().resolve_command(ctx, args)
