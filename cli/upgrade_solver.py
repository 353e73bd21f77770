"""caffepy upgrade-solver"""

import click

from caffepy.cli import options


@click.command(short_help="Write a solver of an old format in the current one.")
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@options.logged()
def upgrade_solver(source: str, target: str) -> None:
    """Read the solver prototxt IN and write it to OUT, which may be the same file.

    The nets that it names are not changed: see upgrade-net. A solver in the current format is
    written too.

    \b
    Examples:
      caffepy upgrade-solver solver.prototxt new.prototxt
    """
    from caffepy.commands import upgrade

    upgrade.upgrade_solver(source, target)
