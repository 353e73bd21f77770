"""caffepy convert-annoset"""

import logging

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
@click.option("--gray/--no-gray", help="Store grey images, not colour.")
@click.option("--shuffle/--no-shuffle", help="Shuffle the lines of the list.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Seed of --shuffle. Default: a new one each time, which is logged.",
)
@options.backend
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
def convert_annoset(
    root: str,
    listfile: str,
    database: str,
    anno_type: str,
    label_map: str | None,
    label_type: str,
    check_label: bool,
    gray: bool,
    shuffle: bool,
    seed: int | None,
    backend: str,
    min_dim: int,
    max_dim: int,
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
    if (resize_width > 0) != (resize_height > 0):
        raise click.UsageError("Give both --resize-width and --resize-height, or neither.")
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
    convert(
        root,
        listfile,
        database,
        anno_type=anno_type,
        label_map=label_map,
        check_label=check_label,
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
