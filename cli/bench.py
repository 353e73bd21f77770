"""caffepy bench"""

from typing import Any

import click

from caffepy.cli import options
from caffepy.cli.bench_allreduce import allreduce
from caffepy.cli.bench_scaling import scaling
from caffepy.cli.group import Commands


@click.group(
    cls=Commands, invoke_without_command=True, short_help="Measure how fast this machine trains."
)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure the speed of this machine.

    \b
    Examples:
      caffepy bench train --model lenet
      caffepy bench train --model caffenet --gpu 0 --precision bf16
      caffepy bench scaling --model resnet50 --gpu all
      caffepy bench allreduce --gpu all
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@bench.command(short_help="Measure the training speed of a net in images/s.")
@options.solver
@click.option("--model", metavar="NAME", default="", help="A bundled model, instead of a solver.")
@options.gpu
@click.option("--cpu", is_flag=True, help="Compute on the CPU, which is the default.")
@options.precision
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    help="Images of an iteration. Default: the net's.",
)
@options.iterations_of_window
@options.windows
@options.measured_data
@options.image
@options.capture
@options.fuse
@options.recompute
@options.decode
@options.threads
@options.as_json
@options.logged(least=1)
def train(
    solver: options.Definition | None,
    model: str,
    gpu: str | None,
    cpu: bool,
    image: tuple[int, ...] | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Train a net for a few windows of iterations; print the median speed, its spread, the memory,
    and where the time goes.

    \b
    Examples:
      caffepy bench train --model lenet
      caffepy bench train --model caffenet --gpu 0 --precision bf16 --json
      caffepy bench train --solver solver.prototxt --gpu 0 --data train_lmdb
    """
    definition = options.trained(solver, model, gpu, cpu)
    options.open_gpu(gpu)
    from caffepy.commands.bench.train import bench_train

    image = image or options.image_of(definition, True)
    result = bench_train(definition.path, gpu=gpu, image=image, **values)
    click.echo(result.json() if as_json else result.table())


bench.add_command(allreduce)
bench.add_command(scaling)
