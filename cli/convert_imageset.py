"""caffepy convert-imageset"""

import logging
from typing import Any

import click

from caffepy.cli import options

log = logging.getLogger(__name__)


@click.command(short_help="Write a list of images to a database.")
@click.argument("root", metavar="ROOTFOLDER/")
@click.argument("listfile")
@click.argument("database", metavar="DB_NAME")
@options.to_database
@options.threads
@options.progress
@options.logged()
def convert_imageset(
    root: str,
    listfile: str,
    database: str,
    gray: bool,
    resize_width: int,
    resize_height: int,
    encoded: bool,
    encode_type: str,
    **values: Any,
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
    from caffepy.commands.data.convert_imageset import Recipe
    from caffepy.commands.data.convert_imageset import convert_imageset as convert

    if encode_type and not encoded:
        log.info("encode_type specified, assuming encoded=true.")
    recipe = Recipe(gray, resize_width, resize_height, encode_type or (None if encoded else ""))
    convert(root, listfile, database, recipe=recipe, **values)
