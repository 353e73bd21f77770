"""caffepy bench allreduce"""

import click

from caffepy.cli import options


@click.command(short_help="Measure each way to synchronize solvers.")
@options.gpus_measured
@click.option(
    "--cpu", type=options.SOLVERS, metavar="N", help="N threads of the CPU, instead of GPUs."
)
@click.option(
    "--sync",
    default="",
    metavar="LIST",
    help="Some of nccl,tree,muji,flat. Default: all that are available.",
)
@click.option(
    "--sizes",
    default="64K..512M",
    show_default=True,
    metavar="LIST",
    help="Bytes, separated by commas; first..last doubles each time.",
)
@options.wire
@options.as_json
@click.option(
    "--plot", type=click.Path(), metavar="FILE.png", help="Draw the bandwidths; needs matplotlib."
)
@options.logged(least=1)
def allreduce(
    gpu: str | None,
    cpu: int | None,
    sync: str,
    sizes: str,
    wire: str,
    as_json: bool,
    plot: str | None,
) -> None:
    """Sum buffers of all GPUs (or threads) into each of them, by every way; print times and bus
    bandwidths. The processes that mpirun or srun started do it together.

    \b
    Examples:
      caffepy bench allreduce
      caffepy bench allreduce --gpu 0,1 --sync nccl,tree --sizes 64K,244M --plot sync.png
      caffepy bench allreduce --cpu 4 --sizes 64K..16M --json
      mpirun -n 2 caffepy bench allreduce --gpu all --wire bf16
    """
    if gpu and cpu:
        raise click.UsageError("Give --gpu or --cpu, not both.")
    from caffepy.commands.bench.allreduce import bench_allreduce
    from caffepy.core.files import check_writable
    from caffepy.report.plot import format_of

    if plot:
        format_of(plot)
        check_writable(plot)
    result = bench_allreduce(gpu, cpu or 0, sync, sizes, wire)
    if plot and options.is_first():
        result.plot(plot)
    options.show(result, as_json)
