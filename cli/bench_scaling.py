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
@options.wire
@options.iterations_of_window
@options.windows
@options.measured_data
@options.decode
@options.image
@click.option(
    "--simulate",
    default="",
    metavar="CLUSTER",
    help="Model a cluster instead, such as 'nodes=64 gpus=8 nic=8x400' (NICs of a node and Gb/s; "
    "'nic=1x3.2measured latency=60us' if measured), and others of 1 to 1024 nodes, from the speed "
    "of one device. With sync=ps simulate a parameter server and its parts: consistency=ssp:4 "
    "every=25 servers=16 replicas=2 straggler=0.2 (random variation of a clock) slow=2:1.5 (two "
    "nodes 1.5 times slower) filters=bf16+significant:1.6.",
)
@click.option(
    "--measured",
    type=click.Path(),
    metavar="FILE",
    help="For --simulate: the speed of one device, from bench train --json. Default: measure it.",
)
@click.option(
    "--plot",
    type=click.Path(),
    metavar="FILE.png",
    help="For --simulate: draw images/s over nodes; needs matplotlib.",
)
@options.as_json
@options.logged(least=1)
def scaling(
    solver: options.Definition | None,
    model: str,
    gpu: str | None,
    cpu: int | None,
    image: tuple[int, ...] | None,
    simulate: str,
    measured: str | None,
    plot: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Train a net with 1, 2, 4... devices; print images/s and what synchronization adds. Processes
    that mpirun or srun started each do that at the same time, then all together.

    \b
    Examples:
      caffepy bench scaling --model resnet50 --gpu 0,1,2,3 --precision bf16
      caffepy bench scaling --model lenet --cpu 2 --json
      caffepy bench scaling --model resnet50 --gpu all --data train_lmdb --decode gpu
      mpirun -n 4 caffepy bench scaling --model resnet50 --gpu all
      caffepy bench scaling --model resnet50 --gpu 0 --simulate 'nodes=64 gpus=8 nic=8x400'
      caffepy bench scaling --model vgg16 --gpu 0 --simulate 'nodes=9 gpus=8 nic=1x10 sync=ps'
    """
    definition = options.trained(solver, model, gpu, cpu)
    image = image or options.image_of(definition, True)
    if simulate:
        own = values.pop("iterations"), values.pop("data"), values.pop("decode")
        if own != (None, "synthetic", "threads"):
            raise click.UsageError(
                "--simulate goes without --iterations, --data and --decode: what fetching data "
                "costs is not in the model."
            )
        _simulate(simulate, definition, measured, plot, as_json, gpu=gpu, image=image, **values)
        return
    if measured or plot:
        raise click.UsageError("--measured and --plot are for --simulate.")
    from caffepy.commands.bench.scaling import bench_scaling

    result = bench_scaling(definition.path, gpu=gpu, cpu=cpu or 0, image=image, **values)
    options.show(result, as_json)


def _simulate(
    cluster: str,
    definition: options.Definition,
    measured: str | None,
    plot: str | None,
    as_json: bool,
    *,
    sync: str,
    **values: Any,
) -> None:
    if sync != "auto":
        raise click.UsageError("--simulate models NCCL, or sync=ps: it goes without --sync.")
    from caffepy.collectives.launch import check_single
    from caffepy.commands.bench.simulate import Simulation, simulate
    from caffepy.commands.bench.simulate_servers import ServedSimulation, asks, simulate_servers
    from caffepy.core.files import check_writable
    from caffepy.report.plot import format_of

    check_single("caffepy bench scaling --simulate")
    if plot:
        format_of(plot)
        check_writable(plot)
    result: Simulation | ServedSimulation
    if asks(cluster):
        result = simulate_servers(definition.path, cluster, measured=measured, **values)
    else:
        result = simulate(definition.path, cluster, measured=measured, **values)
    if plot:
        result.plot(plot)
    options.show(result, as_json)
