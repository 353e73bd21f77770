"""caffepy weights"""

import click

from caffepy.cli import options
from caffepy.cli.group import Commands


@click.command(short_help="Print the content of a file of weights.")
@click.argument("file")
@options.as_json
@options.logged(least=1)
def show(file: str, as_json: bool) -> None:
    """Print names, shapes and statistics (of finite values) of the blobs in FILE to stdout.

    FILE is a caffemodel of any age or a solver state, each binary or HDF5, a mean file, or a file
    of safetensors, recognized by its content.

    \b
    Examples:
      caffepy weights show digits_iter_500.caffemodel
      caffepy weights show run_iter_500.solverstate.h5 --json
    """
    from caffepy.commands.weights import show as show_weights

    info = show_weights(file)
    click.echo(info.json() if as_json else info.table())


@click.command(short_help="Write weights in another form: binary, HDF5, safetensors.")
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option(
    "--fork",
    help="Write for this fork of Caffe (ssd, nvcaffe, intel, segnet, ...); IN is of it, too, "
    "unless it shows another.",
)
@click.option(
    "--map",
    "names",
    metavar="FILE",
    help="Names of tensors and their blobs, for files of safetensors: in each line TENSOR "
    "LAYER.weight (or .bias, .2; - leaves it out) and perhaps its axes in the blob's order, as "
    "3,2,0,1. A * stands for any text. It serves both directions.",
)
@options.logged()
def convert(source: str, target: str, fork: str | None, names: str | None) -> None:
    """Write the weights in IN to OUT: as HDF5 if OUT ends in .h5, as tensors if it ends in
    .safetensors, else as a binary caffemodel.

    IN is a caffemodel of any age, binary or HDF5, or a file of safetensors, recognized by its
    content. Forks of Caffe have numbers of their own in binary files; OUT is of the same fork as
    IN, or of --fork.

    \b
    Examples:
      caffepy weights convert caffenet.caffemodel caffenet.caffemodel.h5
      caffepy weights convert run_iter_500.caffemodel.h5 run_iter_500.caffemodel
      caffepy weights convert trained.caffemodel for_nnie.caffemodel --fork ssd
      caffepy weights convert model.safetensors model.caffemodel --map names.txt
    """
    from caffepy.commands.weights import convert as convert_weights

    convert_weights(source, target, fork, names)


@click.group(
    cls=Commands,
    commands=(show, convert),
    invoke_without_command=True,
    short_help="Show the content of a caffemodel, or convert it.",
)
@click.pass_context
def weights(context: click.Context) -> None:
    """Files of weights, without a net.

    \b
    Examples:
      caffepy weights show digits_iter_500.caffemodel
      caffepy weights convert caffenet.caffemodel caffenet.caffemodel.h5
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
