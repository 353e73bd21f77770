"""caffepy classify"""

from typing import Any

import click

from caffepy.cli import options, parsing


@click.command(short_help="Classify images.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT... [OUTPUT.npy]")
@options.deploy
@options.pretrained
@click.option(
    "--labels",
    type=click.Path(),
    default="",
    help="A text file with the name of a class in each line.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of classes to show.",
)
@click.option(
    "--oversample/--center-only",
    default=None,
    help="Mean over ten crops and mirror images, or only the centre of an image. Default: "
    "ten, unless images are "
    "resized to the net's input.",
)
@click.option(
    "--images-dim",
    default="",
    callback=parsing.integers,
    metavar="H,W",
    help="Size to resize images to. Default: 256,256 for nets that take 129 to 256, else the "
    "net's input.",
)
@options.prepared
@click.option(
    "--ext",
    "extensions",
    default="",
    callback=parsing.names,
    help="Extensions of the files of a folder. Default: all images.",
)
@click.option(
    "--output", type=click.Path(), default="", help="A .npy file for all scores, images x classes."
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Number of images, or crops, at once. Default: the net's.",
)
@options.gpu_if_any
@options.precision
@options.threads
@options.progress
@options.as_json
@options.logged(least=1)
def classify(
    inputs: tuple[str, ...],
    model: options.Definition | None,
    weights: tuple[str, ...],
    images_dim: tuple[int, ...],
    extensions: tuple[str, ...],
    output: str,
    as_json: bool,
    **values: Any,
) -> None:
    """Print the best classes of images: files, folders, or .npy arrays (N, H, W, channels) of
    values from 0 to 1.

    The net is a deploy net. Images are prepared as by Caffe's classify.py: RGB values of 0 to 1
    are resized, turned to BGR and multiplied by --raw-scale; then the mean is subtracted, and
    --input-scale applied. As there, scores go to a second argument that ends in .npy, and replace
    those of an earlier run; a .npy file of images stays an input. Images that cannot be read are
    named; the exit code is 4 then.

    \b
    Examples:
      caffepy classify cat.jpg --model deploy.prototxt --weights net.caffemodel \\
        --mean-values 104,117,123
      caffepy classify photos/ --model caffenet --weights net.caffemodel \\
        --labels synset_words.txt --json --gpu 0
      caffepy classify cat.jpg scores.npy --model_def deploy.prototxt \\
        --pretrained_model net.caffemodel --center_only
    """
    net = options.need_weights(model, weights)
    if images_dim and (len(images_dim) != 2 or min(images_dim) < 1):
        raise click.UsageError("--images-dim: give a height and a width, such as 256,256.")
    from caffepy.commands.classify import classify as run
    from caffepy.commands.classify import holds_images
    from caffepy.commands.preprocess import EXTENSIONS

    if len(inputs) == 2 and inputs[1].endswith(".npy") and not (output or holds_images(inputs[1])):
        output, inputs = inputs[1], inputs[:1]
    result = run(
        inputs,
        net.path,
        weights,
        images_dim=images_dim,
        extensions=extensions or EXTENSIONS,
        output=output,
        **values,
    )
    if as_json or result.has_read:
        click.echo(result.json() if as_json else result.table())
    result.check()
