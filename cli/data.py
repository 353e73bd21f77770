"""caffepy data"""

import click

from caffepy.cli import options
from caffepy.cli.group import Commands
from caffepy.core.errors import DataError


@click.command(short_help="Print the content of a source of data.")
@click.argument("path")
@click.option("--root", default="", help="Folder of the files in a list of images.")
@click.option(
    "--first",
    type=click.IntRange(1),
    metavar="N",
    help="Look only at the first N records. Default: all.",
)
@click.option(
    "--sheet",
    type=click.Path(),
    metavar="FILE.png",
    help="Draw a contact sheet of 100 images from all over the data, or of all if there are fewer.",
)
@options.threads
@options.progress
@options.as_json
@options.logged(least=1)
def show(
    path: str,
    root: str,
    first: int | None,
    sheet: str | None,
    threads: int | None,
    progress: bool | None,
    as_json: bool,
) -> None:
    """Print the number of records in PATH, their shapes, encoding and labels, and which cannot be
    read.

    PATH is an LMDB, a LevelDB, an HDF5 file, a list of such files or of images, a window file or a
    mean file, recognized by its content. The exit code is 4 if none of its records can be
    read.

    \b
    Examples:
      caffepy data show train_lmdb --sheet train.png
      caffepy data show train.txt --root images/ --first 1000
      caffepy data show mean.binaryproto --json
    """
    from caffepy.commands.data.show import show as show_source

    info = show_source(
        path, root=root, first=first, sheet_path=sheet, threads=threads, progress=progress
    )
    click.echo(info.json() if as_json else info.table())
    if info.bad_records == info.seen > 0:
        raise DataError(f"{path}: no record can be read")


@click.group(
    cls=Commands,
    commands=(show,),
    invoke_without_command=True,
    short_help="Show the content of a source of data.",
)
@click.pass_context
def data(context: click.Context) -> None:
    """Sources of data, without a net.

    \b
    Examples:
      caffepy data show train_lmdb --sheet train.png
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
