"""caffepy detect"""

from typing import Any

import click

from caffepy.cli import options


@click.command(short_help="Score windows of images.")
@click.argument("source", metavar="INPUT")
@click.argument("output", required=False, metavar="[OUTPUT]")
@options.deploy
@options.pretrained
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
    "--batch", type=click.IntRange(min=1), help="Number of windows at once. Default: the net's."
)
@options.gpu_if_any
@options.precision
@options.threads
@options.progress
@options.as_json
@options.logged(least=1)
def detect(
    source: str,
    output: str | None,
    model: options.Definition | None,
    weights: tuple[str, ...],
    as_json: bool,
    **values: Any,
) -> None:
    """Score windows of images with a deploy net, and write all scores to OUTPUT (.csv, .h5 or
    .json).

    INPUT is a CSV with the columns filename,xmin,ymin,xmax,ymax, or a text file with an image a
    line and --windows. Images are prepared as by caffepy classify; of a mean image the mean of each
    channel is taken.

    \b
    Examples:
      caffepy detect windows.csv scores.csv --model deploy.prototxt --weights net.caffemodel
      caffepy detect images.txt --windows grid.csv --model deploy.prototxt \\
        --weights net.caffemodel --json
      caffepy detect windows.csv scores.h5 --model_def deploy.prototxt \\
        --pretrained_model net.caffemodel --gpu 0
    """
    net = options.need_weights(model, weights)
    from caffepy.commands.detect import check_output
    from caffepy.commands.detect import detect as run

    if output:
        check_output(output)
    result = run(source, net.path, weights, **values)
    if output:
        result.save(output)
    if as_json or not output:
        click.echo(result.json() if as_json else result.table())
