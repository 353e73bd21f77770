"""caffepy bench scaling"""

from typing import Any

import click

from caffepy.cli import options


@click.command(short_help="Compare the speed of several devices with one.")
@options.solver
@click.option("--model", metavar="NAME", default="", help="A bundled model, instead of a solver.")
@options.gpus_if_named
@click.option(
    "--cpu", type=options.SOLVERS, default=None, metavar="N", help="N solvers on the CPU."
)
@options.precision
@click.option(
    "--batch", type=click.IntRange(min=1), help="Images of each device. Default: the net's."
)
@click.option(
    "--sync",
    type=click.Choice(["auto", "nccl", "tree", "muji", "flat"]),
    default="auto",
    show_default=True,
    help="How they average gradients.",
)
@options.windows
@options.image
@options.as_json
@options.logged(least=1)
def scaling(
    solver: options.Definition | None,
    model: str,
    gpu: str | None,
    cpu: int | None,
    image: tuple[int, ...] | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Train a net on synthetic data with 1, 2, 4... devices; print images/s and what
    synchronization adds. The processes that mpirun or srun started do that each by itself, then all
    together.

    \b
    Examples:
      caffepy bench scaling --model resnet50 --gpu 0,1,2,3 --precision bf16
      caffepy bench scaling --model lenet --cpu 2 --json
      mpirun -n 4 caffepy bench scaling --model resnet50 --gpu all
    """
    definition = options.trained(solver, model, gpu, cpu)
    from caffepy.commands.bench.scaling import bench_scaling

    image = image or options.image_of(definition, True)
    result = bench_scaling(definition.path, gpu=gpu, cpu=cpu or 0, image=image, **values)
    options.show(result, as_json)
