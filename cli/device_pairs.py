"""caffepy device-pairs"""

import click

from caffepy.cli import options


@click.command(short_help="Show the links between GPUs, and the schedules.")
@options.gpus_measured
@click.option("--measure", is_flag=True, help="Measure bandwidth and latency of each pair of GPUs.")
@click.option(
    "--simulate",
    type=click.Path(),
    metavar="FILE",
    help='Devices of another machine: {"devices": [0, 1], "access": [[0, 1], [1, 0]]}, also '
    '"boards", "links".',
)
@options.as_json
@options.logged(least=1)
def device_pairs(gpu: str | None, measure: bool, simulate: str | None, as_json: bool) -> None:
    """Print the tree of device pairs, the peer access between GPUs, and the schedule of each way to
    synchronize, to stdout.

    Links have the names of nvidia-smi, if the driver reports them.

    \b
    Examples:
      caffepy device-pairs
      caffepy device-pairs --gpu 0,1,2,3 --measure
      caffepy device-pairs --simulate machine.json --json
    """
    from caffepy.commands.device_pairs import of_this_machine, simulated

    if simulate and (gpu or measure):
        raise click.UsageError(
            "--simulate is for devices that are not here; leave out --gpu and --measure"
        )
    found = simulated(simulate) if simulate else of_this_machine(gpu or "all", measure)
    click.echo(found.json() if as_json else found.text())
