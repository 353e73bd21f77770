"""caffepy train"""

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from caffepy.cli import options, parsing
from caffepy.cli.group import Sectioned

if TYPE_CHECKING:
    from caffepy.parallel.parameter_server.cluster import ClusterOptions

SECTIONS = {
    "gpu": "Devices",
    "batch_mode": "Several devices or machines",
    "cluster": "Parameter server (with --cluster)",
    "decode": "Data",
    "sigint_effect": "Signals and errors",
    "progress": "Output",
}
"""Titles of sections of the help, by their first options."""
EFFECTS = click.Choice(["stop", "snapshot", "none"])


@click.command(
    cls=Sectioned, sections=SECTIONS, short_help="Train a net, from scratch or from a snapshot."
)
@options.solver
@options.weights
@click.option(
    "--snapshot",
    type=click.Path(),
    default="",
    help="A .solverstate to resume from; auto: this run's newest complete one under "
    "snapshot_prefix, or a start from scratch if there is none.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep only the last N snapshots of this run; by default all.",
)
@options.level
@options.stage
@options.deterministic
@options.gpus
@options.cpus
@options.threads
@options.precision
@options.capture
@options.fuse
@options.recompute
@options.batch_mode
@options.bn_stats
@options.sync
@options.wire
@options.nodes
@click.option(
    "--cluster",
    metavar="local|auto|HOST:PORT",
    help="Train by a parameter server on this cluster of Ray with --nodes N workers: each trains "
    "by itself, with the GPUs of --gpu or the solvers of --cpu in step, and pushes what it learned "
    "to servers. local: N processes of this machine, which share its GPUs.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Use the servers that caffepy server started under this name, and leave them what was "
    "learned. If they hold a net already, the run goes on with it.",
)
@click.option(
    "--consistency",
    metavar="sync|ssp:S|async",
    help="How many pushes a worker may be ahead of the slowest: none (sync, the default), S, or "
    "any number (async).",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    metavar="H",
    help="Iterations between pushes. With 1 and sync gradients are pushed, which gives the same "
    "numbers as training in step. Default: 1.",
)
@click.option(
    "--servers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Servers among which the parameters are divided. Default: 2.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    metavar="N",
    help="Servers that hold each parameter; all but one may die. Default: 2.",
)
@click.option(
    "--filters",
    metavar="bf16,significant:T,zlib",
    help="Send fewer bytes: bf16 halves them; significant:T holds small changes back, with T = 1.6 "
    "five sixths of all; zlib compresses without loss. Default: none of these.",
)
@click.option(
    "--server-update",
    metavar="add|nesterov:M[:RATE]",
    help="How servers apply the mean of the workers' changes: add it, or with Nesterov momentum M "
    "and RATE (0.7). Default: add.",
)
@options.decode
@options.max_bad_records
@click.option(
    "--sigint-effect", type=EFFECTS, default="stop", show_default=True, help="What Ctrl-C does."
)
@click.option(
    "--sighup-effect", type=EFFECTS, default="snapshot", show_default=True, help="What SIGHUP does."
)
@click.option(
    "--sigusr1-effect",
    type=EFFECTS,
    default="stop",
    show_default=True,
    help="What SIGUSR1 does; stop takes a snapshot first, as SIGTERM does.",
)
@click.option(
    "--grace",
    type=parsing.NumberRange(min=0),
    default=25.0,
    show_default=True,
    metavar="S",
    help="Most seconds from a signal that stops the run to its snapshot; an iteration or a wait "
    "for data that takes longer is abandoned.",
)
@options.deadlines
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Restart a run that crashes, hangs or loses a device from its newest snapshot, up to "
    "N times without a new snapshot in between.",
)
@click.option(
    "--on-divergence",
    default="stop",
    show_default=True,
    metavar="stop|rollback:FACTOR[:N]",
    help="If the loss is not finite, stop with exit code 5, or go on from the run's last snapshot "
    "(without one, anew) with the learning rate times FACTOR, such as 0.1: up to N (3) times.",
)
@options.progress
@click.option(
    "--tensorboard",
    type=click.Path(),
    default="",
    metavar="DIR",
    help="Folder for TensorBoard's events.",
)
@click.option(
    "--tensorboard-histograms",
    type=click.IntRange(min=0),
    default=1000,
    show_default=True,
    metavar="N",
    help="Histograms of weights and gradients for TensorBoard every N iterations; 0: never.",
)
@options.logged()
@options.ignoring("model", "phase", "iterations")
def train(solver: options.Definition | None, max_restarts: int, **values: Any) -> int:
    """Train the net of a solver prototxt, or of a bundled model.

    Without --gpu and --cpu, the solver's solver_mode says where to compute, by default on the CPU.
    Several GPUs train as one with a larger batch; the data is read once for all of them. SIGTERM,
    SIGUSR1, SIGUSR2, SIGXCPU and SIGQUIT take a snapshot and stop; a second signal ends the run at
    once. A stopped run ends with exit code 75; --snapshot auto resumes it. A run also writes
    PREFIX_metrics.csv and, if matplotlib is installed, PREFIX_curve.png when all iterations are
    done; of a run that ended early, caffepy plot draws it.

    \b
    Examples:
      caffepy train --solver digits
      caffepy train --solver solver.prototxt --gpu 0
      caffepy train --solver solver.prototxt --gpu all --batch-mode global
      caffepy train --solver solver.prototxt --weights caffenet.caffemodel
      caffepy train --solver solver.prototxt --snapshot auto --log-dir logs --tensorboard events
    """
    if solver is None:
        raise click.UsageError(
            "Need a solver definition to train: give --solver FILE or the name of a bundled model."
        )
    import faulthandler

    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, AttributeError):  # a stderr that is no file
            faulthandler.enable()  # a process that aborts prints the stacks of its threads
    if max_restarts:
        from caffepy.commands.restart import supervise
        from caffepy.solver import Signals

        effects = Signals(*(values[f"{name}_effect"] for name in ("sigint", "sighup", "sigusr1")))
        arguments = [*sys.argv[1:], "--max-restarts", "0"]
        return supervise(arguments, solver.path, max_restarts, effects.effects)
    if "CAFFEPY_SUPERVISOR" in os.environ:
        from caffepy.commands.restart import end_with_supervisor

        end_with_supervisor()
    cluster = _cluster(values)
    if not cluster:
        options.open_gpu(values["gpu"])
    from caffepy.commands.train import TrainOptions
    from caffepy.commands.train import train as run

    result = run(TrainOptions(solver.path, cluster=cluster, last_resort=options.leave, **values))
    return result.exit_code


def _cluster(values: dict[str, Any]) -> "ClusterOptions | None":
    """Take the options of a parameter server out of these values."""
    cluster = values.pop("cluster")
    names = ("name", "consistency", "every", "servers", "replicas", "filters", "server_update")
    given = {name: value for name in names if (value := values.pop(name)) is not None}
    if cluster is None:
        if given or values["sync"] == "ps":
            flag = f"--{next(iter(given)).replace('_', '-')}" if given else "--sync ps"
            raise click.UsageError(
                f"{flag} is for a parameter server: give --cluster local --nodes N, or the address "
                "of a cluster of Ray"
            )
        return None
    if values["nodes"] is None:
        raise click.UsageError("--cluster needs the number of workers: --nodes N, or MIN:MAX")
    for flag in {"servers", "replicas"} & given.keys() if "name" in given else ():
        raise click.UsageError(
            f"--{flag} is for caffepy server, which has started the servers of --name"
        )
    if values["sync"] not in ("auto", "ps"):
        raise click.UsageError(f"--cluster trains by --sync ps, not {values['sync']}")
    from caffepy.parallel.parameter_server.cluster import ClusterOptions

    return ClusterOptions(cluster, values["nodes"], **given)
