"""caffepy convert-annoset"""

import logging
from typing import Any

import click

from caffepy.cli import options

log = logging.getLogger(__name__)

ANNO_TYPES, LABEL_TYPES = ("classification", "detection"), ("xml", "json", "txt")


@click.command(short_help="Write images with boxes to a database.")
@click.argument("root", metavar="ROOTFOLDER/")
@click.argument("listfile")
@click.argument("database", metavar="DB_NAME")
@click.option(
    "--anno-type",
    type=click.Choice(ANNO_TYPES),
    default="classification",
    help="What stands behind an image: a label, or a file of boxes. Default: classification.",
)
@click.option(
    "--label-map",
    "--label-map-file",
    "label_map",
    type=click.Path(),
    help="Prototxt of a LabelMap: the labels of names.",
)
@click.option(
    "--label-type",
    type=click.Choice(LABEL_TYPES),
    default="xml",
    help="Type of annotation files: PASCAL VOC's XML, COCO's JSON of an image, or lines of label, "
    "xmin, ymin, xmax, ymax. Default: xml.",
)
@click.option(
    "--check-label/--no-check-label", help="Refuse a label map with a name or label twice."
)
@click.option(
    "--min-dim",
    type=click.IntRange(0),
    default=0,
    help="Resize images whose shorter side is less to this, with their aspect.",
)
@click.option(
    "--max-dim",
    type=click.IntRange(0),
    default=0,
    help="Resize images whose longer side is more to this, with their aspect.",
)
@options.to_database
@options.threads
@options.progress
@options.logged()
def convert_annoset(
    root: str,
    listfile: str,
    database: str,
    label_type: str,
    gray: bool,
    min_dim: int,
    max_dim: int,
    resize_width: int,
    resize_height: int,
    encoded: bool,
    encode_type: str,
    **values: Any,
) -> None:
    """Write the images of LISTFILE, with their boxes, to the new database DB_NAME, as SSD's
    convert_annoset does; the layer AnnotatedData reads it.

    A line of LISTFILE is the path of an image below ROOTFOLDER/, a blank and that of its annotation
    file; or a name alone, if ROOTFOLDER/ is a folder of PASCAL VOC. LISTFILE may also be COCO's
    instances_*.json: its categories have labels from 1 on, in the order of their ids, or those that
    --label-map gives their names or ids. An annotation that cannot be read ends the run with its
    place. Images that cannot be read are left out, each with a message; those without an annotation
    file have no boxes.

    \b
    Examples:
      caffepy convert-annoset --anno-type detection --label-map labelmap_voc.prototxt \\
        --encode-type jpg VOC2007/ VOC2007/ImageSets/Main/train.txt train_lmdb
      caffepy convert-annoset --encoded train2017/ instances_train2017.json coco_lmdb
    """
    from caffepy.commands.data.convert_annoset import AnnotatedRecipe
    from caffepy.commands.data.convert_annoset import convert_annoset as convert

    if encode_type and not encoded:
        log.info("encode_type specified, assuming encoded=true.")
    recipe = AnnotatedRecipe(
        gray,
        resize_width,
        resize_height,
        min_dim,
        max_dim,
        encode_type or (None if encoded else ""),
        label_type,
    )
    convert(root, listfile, database, recipe=recipe, **values)
