"""caffepy convert-imageset"""

import logging

import click

from caffepy.cli import options

log = logging.getLogger(__name__)


@click.command(short_help="Write a list of images to a database.")
@click.argument("root", metavar="ROOTFOLDER/")
@click.argument("listfile")
@click.argument("database", metavar="DB_NAME")
@click.option("--gray/--no-gray", help="Store grey images, not colour.")
@click.option("--shuffle/--no-shuffle", help="Shuffle the lines of the list.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Seed of --shuffle. Default: a new one each time, which is logged.",
)
@options.backend
@click.option(
    "--resize-width",
    type=click.IntRange(0),
    default=0,
    help="Width to resize images to; 0: as they are.",
)
@click.option(
    "--resize-height",
    type=click.IntRange(0),
    default=0,
    help="Height to resize images to; 0: as they are.",
)
@click.option(
    "--check-size/--no-check-size", help="Stop at an image whose size differs from the first."
)
@click.option(
    "--encoded/--no-encoded", help="Store image files instead of pixels, unchanged if possible."
)
@click.option("--encode-type", default="", help="Store image files of this type: jpg, png...")
@click.option("--resume", is_flag=True, help="Continue an interrupted run from DB_NAME.partial.")
@click.option(
    "--check",
    is_flag=True,
    help="Compare all records with the images at the end; if DB_NAME exists, do only that.",
)
@options.threads
@options.progress
@options.logged()
def convert_imageset(
    root: str,
    listfile: str,
    database: str,
    gray: bool,
    shuffle: bool,
    seed: int | None,
    backend: str,
    resize_width: int,
    resize_height: int,
    check_size: bool,
    encoded: bool,
    encode_type: str,
    resume: bool,
    check: bool,
    threads: int | None,
    progress: bool | None,
) -> None:
    """Write the images of LISTFILE to the new database DB_NAME, with the keys and bytes of Caffe's
    tool.

    A line of LISTFILE is the path of an image below ROOTFOLDER/, a blank and a label. Images that
    cannot be read are left out, each with a message; the exit code is 0 if at least one could be
    read.

    \b
    Examples:
      caffepy convert-imageset -resize_width 256 -resize_height 256 -shuffle \\
        train/ train.txt train_lmdb
      caffepy convert-imageset -encoded train/ train.txt train_lmdb --resume
      caffepy convert-imageset -gray -backend leveldb images/ list.txt list_leveldb --check
    """
    if (resize_width > 0) != (resize_height > 0):
        raise click.UsageError("Give both --resize-width and --resize-height, or neither.")
    from caffepy.commands.data.convert_imageset import Recipe
    from caffepy.commands.data.convert_imageset import convert_imageset as convert

    if encode_type and not encoded:
        log.info("encode_type specified, assuming encoded=true.")
    recipe = Recipe(gray, resize_width, resize_height, encode_type or (None if encoded else ""))
    convert(
        root,
        listfile,
        database,
        backend=backend,
        shuffle=shuffle,
        seed=seed,
        check_size=check_size,
        recipe=recipe,
        resume=resume,
        check=check,
        threads=threads,
        progress=progress,
    )
