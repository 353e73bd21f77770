"""caffepy upgrade-net"""

import click

from caffepy.cli import options

MISPLACED = 1


@click.command(short_help="Write a net of an old format in the current one.")
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option(
    "--binary/--text", "as_binary", default=None, help="Form of OUT. Default: that of IN."
)
@options.logged()
def upgrade_net(source: str, target: str, as_binary: bool | None) -> int:
    """Read the net IN, a prototxt or a binary caffemodel of any age, and write it to OUT, which may
    be the same file.

    A net in the current format is written too. Exit code 1: some settings have no place in that
    format; the log names them.

    \b
    Examples:
      caffepy upgrade-net train_val.prototxt new.prototxt
      caffepy upgrade-net old.caffemodel new.caffemodel
      caffepy upgrade-net --text old.caffemodel weights.prototxt
    """
    from caffepy.commands import upgrade

    return 0 if upgrade.upgrade_net(source, target, as_binary=as_binary) else MISPLACED
