"""caffepy detect"""

from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from caffepy.cli import options, parsing

OF_WINDOWS = ("windows", "crop_mode", "context_pad")
OF_BOXES = ("labels", "threshold", "draw", "sides", "extensions")


@click.command(short_help="Find boxes in images, or score windows of them.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT... [OUTPUT]")
@options.deploy
@options.pretrained
@click.option(
    "--labels",
    type=click.Path(),
    default="",
    help="Names of the classes: a label map (.prototxt), or a text file with one in each line.",
)
@click.option(
    "--threshold",
    type=parsing.NumberRange(0, 1),
    default=0.5,
    show_default=True,
    help="Least score of a box.",
)
@click.option(
    "--draw",
    type=click.Path(),
    default="",
    metavar="FOLDER",
    help="Write the images with their boxes into this folder.",
)
@click.option(
    "--sides",
    default="600,1000",
    show_default=True,
    callback=parsing.integers,
    metavar="SHORT,LONG",
    help="Nets of regions: the shorter side that images are resized to, and most of the longer.",
)
@click.option(
    "--ext",
    "extensions",
    default="",
    callback=parsing.names,
    help="Extensions of the files of a folder. Default: all images.",
)
@click.option(
    "--windows",
    type=click.Path(),
    default="",
    help="A CSV with xmin,ymin,xmax,ymax: the windows of every image in a text list.",
)
@click.option(
    "--crop-mode",
    type=click.Choice(["list", "selective_search"]),
    default="list",
    show_default=True,
    help="Windows from lists, or proposed by selective search: an external package, which "
    "needs MATLAB.",
)
@click.option(
    "--context-pad",
    type=click.IntRange(min=0),
    default=16,
    show_default=True,
    help="Pixels of the net's input around a window.",
)
@options.prepared
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Number of images or windows at once. Default: the net's; 1 for YOLO's layers.",
)
@options.gpu_if_any
@options.precision
@options.threads
@options.progress
@options.as_json
@options.logged(least=1)
def detect(
    inputs: tuple[str, ...],
    model: options.Definition | None,
    weights: tuple[str, ...],
    as_json: bool,
    **values: Any,
) -> None:
    """Find boxes in images with a net of SSD or YOLO, whose layer DetectionOutput,
    YoloDetectionOutput or Yolov3DetectionOutput gives them, or of Faster R-CNN or R-FCN, with
    cls_prob and bbox_pred of the regions that its layer proposes; print a table of them, and
    write them to OUTPUT (.json).

    INPUT is an image or a folder. Images are prepared as by caffepy classify, and resized to the
    net's input or, for a net of regions, to --sides; boxes are in pixels of the image. Images that
    cannot be read are named; the exit code is 4 then.

    With any other net, as Caffe's detect.py: score windows of images, and write all scores to
    OUTPUT (.csv, .h5 or .json). INPUT is a CSV with the columns filename,xmin,ymin,xmax,ymax, or a
    text file with an image a line and --windows. Of a mean image the mean of each channel is taken.

    \b
    Examples:
      caffepy detect street.jpg photos/ boxes.json --model ssd/deploy.prototxt \\
        --weights ssd.caffemodel --mean-values 104,117,123 \\
        --labels labelmap_voc.prototxt --draw drawn/
      caffepy detect windows.csv scores.csv --model deploy.prototxt --weights net.caffemodel
      caffepy detect images.txt --windows grid.csv --model deploy.prototxt \\
        --weights net.caffemodel --json
      caffepy detect windows.csv scores.h5 --model_def deploy.prototxt \\
        --pretrained_model net.caffemodel --gpu 0
    """
    net = options.need_weights(model, weights)
    from caffepy.commands import detect as of_windows
    from caffepy.commands import detect_boxes as of_boxes
    from caffepy.commands.preprocess import EXTENSIONS

    result: of_boxes.BoxDetections | of_windows.Detections
    if of_boxes.finders(net.path):
        _leave_out(values, OF_WINDOWS, "is for nets that score windows, and this one finds boxes")
        if len(values["sides"]) != 2 or not 0 < values["sides"][0] <= values["sides"][1]:
            raise click.UsageError("--sides: give a shorter and a longer side, such as 600,1000.")
        images, output = of_boxes.split_output(inputs)
        if output:
            of_boxes.check_output(output)
        values["extensions"] = values["extensions"] or EXTENSIONS
        result = of_boxes.detect_boxes(images, net.path, weights, **values)
    else:
        if len(inputs) > 2 or of_boxes.is_image(inputs[0]):
            raise click.UsageError(
                f"{net.path} has no layer that finds boxes in images "
                f"({', '.join(of_boxes.FINDERS)}, or one that proposes regions), so it scores "
                "windows: give a CSV of windows, or a text file and --windows, and at most one "
                "OUTPUT."
            )
        _leave_out(values, OF_BOXES, "is for nets that find boxes, and this one scores windows")
        source, output, *_ = *inputs, ""
        if output:
            of_windows.check_output(output)
        result = of_windows.detect(source, net.path, weights, **values)
    if output:
        result.save(output)
    shows = result.has_read if isinstance(result, of_boxes.BoxDetections) else not output
    if as_json or shows:
        click.echo(result.json() if as_json else result.table())
    if isinstance(result, of_boxes.BoxDetections):
        result.check()


def _leave_out(values: dict[str, Any], names: Sequence[str], why: str) -> None:
    """Remove the values of these options; UsageError if one was given."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in names:
            del values[option.name]
            if context.get_parameter_source(option.name) is not ParameterSource.DEFAULT:
                raise click.UsageError(f"{option.opts[0]} {why}.")
