"""caffepy device-pairs"""

import click

from caffepy.cli import options


@click.command(short_help="Show how GPUs are linked, and how they synchronize.")
@options.gpus_measured
@click.option(
    "--cpu", type=options.SOLVERS, metavar="N", help="Show N solvers on the CPU instead of GPUs."
)
@click.option("--measure", is_flag=True, help="Measure bandwidth and latency of each pair of GPUs.")
@click.option(
    "--simulate",
    type=click.Path(),
    metavar="FILE",
    help="Read the devices from a JSON file instead of asking this machine, which then needs no "
    "GPU. Devices 0 and 1 that reach each other's memory are "
    '{"devices": [0, 1], "access": [[0, 1], [1, 0]]}: a row and a column of access for each '
    'device. Optional: "boards", "links", as --json prints them.',
)
@options.as_json
@options.logged(least=1)
def device_pairs(
    gpu: str | None, cpu: int | None, measure: bool, simulate: str | None, as_json: bool
) -> None:
    """Print how GPUs are paired and joined, the schedule of each way to synchronize (train --sync),
    and which of them --sync auto takes, to stdout.

    Links have nvidia-smi's names, if the driver reports them. Of the processes that mpirun or srun
    started it prints the hosts, and bandwidth and latency between each two.

    \b
    Examples:
      caffepy device-pairs
      caffepy device-pairs --gpu 0,1,2,3 --measure
      caffepy device-pairs --cpu 4
      caffepy device-pairs --simulate machine.json --json
      mpirun -n 4 caffepy device-pairs
    """
    from caffepy.commands.device_pairs import of_cpu, of_nodes, of_this_machine, simulated

    if sum(map(bool, (gpu or measure, cpu, simulate))) > 1:
        raise click.UsageError("Give one of --gpu (with --measure), --cpu and --simulate.")
    if simulate:
        found = simulated(simulate)
    elif of_all := of_nodes(gpu, cpu):
        if options.is_first():
            click.echo(of_all.json() if as_json else of_all.text())
        return
    else:
        found = of_cpu(cpu) if cpu else of_this_machine(gpu or "all", measure)
    click.echo(found.json() if as_json else found.text())
