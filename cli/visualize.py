"""caffepy visualize"""

from typing import Any

import click

from caffepy.cli import options


@click.command(short_help="Draw the filters of a layer, or what it makes of an image.")
@click.argument("out")
@options.pretrained
@click.option(
    "--layer", default="", help="Whose filters to draw. Default: the first convolution's."
)
@options.deploy
@click.option(
    "--image",
    type=click.Path(),
    default="",
    help="What the net takes. Default: the data of its data layer.",
)
@click.option(
    "--blob", default="", help="What to draw of the net. Default: the top of the first convolution."
)
@click.option(
    "--item",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Which of a batch of data.",
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
    item: int,
    preparation: Any,
    gpu: str | None,
    precision: str | None,
    threads: int | None,
) -> None:
    """Draw filters, or with --model the values of a blob, side by side into the picture OUT (.png,
    .jpg and others).

    Filters need only the weights. Those of three channels are in colour; of others each channel
    stands by itself, a row a filter. The smallest value is black, the largest white, and what is
    not finite is red.

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
        shown = show_blob(
            model.path,
            weights,
            out,
            blob=blob,
            image=image,
            item=item,
            preparation=preparation,
            gpu=gpu,
            precision=precision,
            threads=threads,
        )
    click.echo(str(shown))
