"""caffepy export"""

import click

from caffepy.cli import options


def _batch(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | str | None:
    if value is None or value == "dynamic":
        return value
    if not value.isdigit() or int(value) < 1:
        raise click.BadParameter(f'{value!r} is neither a number of 1 or more nor "dynamic"')
    return int(value)


@click.command(short_help="Write a trained net as an ONNX model.")
@click.argument("net", metavar="NET")
@click.argument("weights", nargs=-1, required=True)
@click.option(
    "--onnx",
    is_flag=True,
    default=True,
    help="Write ONNX, the default and the only format so far.",
)
@click.option(
    "--output",
    "--o",
    "output",
    type=click.Path(),
    required=True,
    metavar="FILE",
    help="The model to write.",
)
@click.option(
    "--opset",
    type=click.IntRange(13, 21),
    default=17,
    show_default=True,
    help="Version of ONNX's operators.",
)
@click.option(
    "--batch",
    callback=_batch,
    metavar="N|dynamic",
    help="Size of the inputs' first axis, or any. Default: what the net says.",
)
@click.option(
    "--phase",
    type=click.Choice(["TEST", "TRAIN"]),
    default="TEST",
    show_default=True,
    help="Phase of the net.",
)
@options.level
@options.stage
@options.input_image
@click.option(
    "--probabilities",
    is_flag=True,
    help="Put Softmax in the place of SoftmaxWithLoss, Sigmoid in that of SigmoidCrossEntropyLoss.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Compare with what onnxruntime, which must be installed, computes.",
)
@options.as_json
@options.logged(least=1)
def export(
    net: str,
    weights: tuple[str, ...],
    onnx: bool,
    output: str,
    opset: int,
    batch: int | str | None,
    phase: str,
    level: int,
    stages: tuple[str, ...],
    image: tuple[int, ...] | None,
    probabilities: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Write NET, a prototxt or a bundled model, with trained WEIGHTS as an ONNX model; print what
    was written.

    Blobs keep their names, parameters are named after layer and index: conv1.0, conv1.1. Data
    layers become inputs; losses, Accuracy and labels are left out. Layers that ONNX cannot express
    are all named, and nothing is written.

    \b
    Examples:
      caffepy export --onnx deploy.prototxt run_iter_500.caffemodel -o net.onnx
      caffepy export --onnx deploy.prototxt run.caffemodel -o net.onnx --batch dynamic --check
      caffepy export --onnx train_val.prototxt run.caffemodel.h5 -o net.onnx --probabilities \\
        --image 3,227,227
    """
    from caffepy.commands.export import export_onnx

    definition = options.find_definition(net, "deploy")
    done = export_onnx(
        definition.path,
        weights,
        output,
        opset=opset,
        batch=batch,
        phase=phase,
        level=level,
        stages=stages,
        image=image,
        probabilities=probabilities,
        check=check,
    )
    click.echo(done.json() if as_json else done.text())
