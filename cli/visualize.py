"""caffepy visualize"""

from typing import Any

import click

from caffepy.cli import options


@click.command(short_help="Draw the filters of a layer, or the values of a blob.")
@click.argument("out")
@options.pretrained
@click.option(
    "--layer", default="", help="Layer whose filters are drawn. Default: the first convolution."
)
@options.deploy
@click.option(
    "--image",
    type=click.Path(),
    default="",
    help="Image for the net. Default: the data of its data layer.",
)
@click.option("--blob", default="", help="Blob to draw. Default: the top of the first convolution.")
@click.option(
    "--item",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Index in a batch of data.",
)
@options.prepared
@options.gpu
@options.precision
@options.threads
@options.logged(least=1)
def visualize(
    out: str,
    weights: tuple[str, ...],
    layer: str,
    model: options.Definition | None,
    image: str,
    blob: str,
    **values: Any,
) -> None:
    """Draw filters, or with --model the values of a blob, side by side into the picture OUT (.png,
    .jpg and others).

    Filters need only the weights. Those of three channels are in colour; of others each channel
    is a tile, and each filter a row. The smallest value is black, the largest white, and values
    that are not finite are red.

    \b
    Examples:
      caffepy visualize filters.png --weights digits_iter_500.caffemodel
      caffepy visualize filters.png --weights net.caffemodel --layer conv2
      caffepy visualize conv1.png --weights net.caffemodel --model deploy.prototxt --image cat.jpg
      caffepy visualize pool5.png --weights net.caffemodel --model train_val.prototxt --blob pool5
    """
    if not weights:
        raise click.UsageError("Need trained weights: give --weights FILE.")
    if layer and model:
        raise click.UsageError(
            "Give --layer for filters, or --model and --blob for what a net computes."
        )
    if (image or blob) and not model:
        raise click.UsageError("Need the net that takes the image: give --model FILE.")
    from caffepy.commands.visualize import show_blob, show_filters

    if model is None:
        shown = show_filters(weights[-1], out, layer=layer)
    else:
        shown = show_blob(model.path, weights, out, blob=blob, image=image, **values)
    click.echo(str(shown))
