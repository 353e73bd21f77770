"""caffepy check"""

import click

from caffepy.cli import options


@click.command(short_help="Check a solver or net and show its layers, without training.")
@click.argument("file", default="", metavar="[FILE|NAME]")
@options.solver
@options.model
@options.level
@options.stage
@options.synthetic
@click.option(
    "--gpu",
    is_flag=True,
    help="Also show the plan for a GPU, in the given --precision; the machine needs none.",
)
@options.precision
@options.as_json
@options.logged(least=1)
def check(
    file: str,
    solver: options.Definition | None,
    model: options.Definition | None,
    level: int,
    stages: tuple[str, ...],
    synthetic: bool,
    image: tuple[int, ...] | None,
    gpu: bool,
    precision: str | None,
    as_json: bool,
) -> None:
    """Build the nets of a solver, or a net in its phases, and print a table of their layers to
    stdout.

    For each layer: name, type, shapes of its tops, parameters, memory of the tops, operations of a
    forward pass (convolutions and inner products only). FILE is recognized as a solver or a net by
    its fields. The code of Python layers runs; no file that a layer names is written.

    With --gpu also: the layers that run on the host, fused layers, the formats of the tops and
    their conversions, the memory of data and gradients, and whether a training step can be captured
    as a CUDA graph.

    \b
    Examples:
      caffepy check solver.prototxt
      caffepy check --model vgg16 --synthetic
      caffepy check --solver resnet50 --synthetic --gpu --precision bf16
    """
    if precision and not gpu:
        raise click.UsageError("--precision is for --gpu.")
    given = [definition for definition in (solver, model) if definition is not None]
    if file:
        given.append(options.find_definition(file, "solver"))
    if len(given) != 1:
        raise click.UsageError("Need one definition to check: FILE, --solver FILE or --model FILE.")
    from caffepy.commands.check import as_json as to_json
    from caffepy.commands.check import inspect

    nets = inspect(
        given[0].path,
        level=level,
        stages=stages,
        synthetic=synthetic or image is not None,
        image=image or options.image_of(given[0], synthetic),
        gpu=gpu,
        precision=precision,
    )
    click.echo(to_json(nets) if as_json else "\n\n".join(net.table() for net in nets))
