"""caffepy server"""

import click

from caffepy.cli import options, parsing


@click.command(short_help="Start servers on which nets are trained by run after run.")
@click.option(
    "--cluster",
    metavar="local|auto|HOST:PORT",
    help="The cluster of Ray. local: one on this machine, which ends with this process.",
)
@click.option("--name", metavar="NAME", help="Name by which runs find the servers.")
@click.option(
    "--servers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Servers among which the parameters are divided.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Servers that hold each parameter; all but one may die.",
)
@click.option(
    "--snapshot-prefix",
    type=click.Path(),
    default="",
    metavar="PREFIX",
    help="Prefix of the snapshots. Default: the name.",
)
@click.option(
    "--snapshot-every",
    type=parsing.NumberRange(min=0),
    default=0.0,
    metavar="S",
    help="Seconds between two snapshots of what the servers hold, while a run trains. Default: "
    "only one, at the end.",
)
@click.option(
    "--display",
    type=parsing.NumberRange(min=0),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Seconds between two lines of progress.",
)
@click.option(
    "--grace",
    type=parsing.NumberRange(min=0),
    default=25.0,
    show_default=True,
    metavar="S",
    help="Seconds from a signal to the snapshot in which the run that trains may stop; after that "
    "the command ends with an error.",
)
@click.option(
    "--stop",
    "stops",
    is_flag=True,
    help="End the servers of this name with a snapshot, by the process that started them, or by "
    "this one where that was killed.",
)
@click.option("--list", "lists", is_flag=True, help="List the servers of a cluster.")
@options.as_json
@options.logged()
def server(
    cluster: str | None,
    name: str | None,
    servers: int,
    replicas: int,
    snapshot_prefix: str,
    snapshot_every: float,
    display: float,
    grace: float,
    stops: bool,
    lists: bool,
    as_json: bool,
) -> int:
    """Start the servers of a parameter server, which outlive the runs that train with them.

    They hold what the first run brings. Each run goes on where the one before it has ended, with
    the values, the momentum of its workers and the pushes of the servers. The command stays and
    shows what they do. SIGINT, SIGTERM and SIGHUP end the run that trains, then the servers, with a
    snapshot of what they hold (exit code 75); caffepy train --snapshot goes on from it. Servers
    whose command was killed go on: the same command takes them up, and --stop ends them.

    \b
    Examples:
      caffepy server --cluster auto --name digits --servers 3 --replicas 2 --snapshot-every 600
      caffepy train --cluster auto --name digits --solver solver.prototxt --nodes 4 --every 25
      caffepy server --cluster auto --list
      caffepy server --cluster auto --name digits --stop
    """
    if cluster is None or not (name or lists):
        raise click.UsageError("Need a cluster and a name: give --cluster auto --name NAME.")
    if lists and (name or stops):
        raise click.UsageError("--list shows all of a cluster: leave out --name and --stop.")
    if (stops or lists) and cluster == "local":
        raise click.UsageError(
            "--cluster local starts another cluster: give the address that caffepy server shows."
        )
    from caffepy.commands.server import ServerOptions, running_servers, serve, stop

    if lists:
        options.show(running_servers(cluster), as_json)
        return 0
    given = ServerOptions(
        cluster, name or "", servers, replicas, snapshot_prefix, snapshot_every, display, grace
    )
    result = (stop if stops else serve)(given)
    return result.exit_code
