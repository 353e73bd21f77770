"""A trainer's attachment to servers that outlive it."""

import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from caffepy.core.errors import CaffeError, ConfigError, UsageError
from caffepy.core.names import nearest
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.kept import Held, check_same_net, write
from caffepy.parallel.parameter_server.messages import COORDINATOR, Nesterov, Rule
from caffepy.parallel.parameter_server.ray_cluster import connect
from caffepy.parallel.parameter_server.ray_engine import DETACHED, RayEngine
from caffepy.solver import Solver

log = logging.getLogger(__name__)

GOODBYE = 5.0
"""Seconds that a coordinator may take to note that its trainer has gone."""


def this_process(task: str) -> str:
    """Return what to call this process, which has this task since now."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {platform.node()}, which {task} since {now}"


def check_running(engine: RayEngine, cluster: str, name: str) -> None:
    """Raise UsageError unless a cluster has servers of this name."""
    running = engine.detached()
    if name not in running:
        known = f" (there: {', '.join(sorted(running))})" if running else ""
        raise UsageError(
            f'no servers "{name}" on --cluster {cluster}{nearest(name, running)}{known}: start '
            f"them with caffepy server --cluster {cluster} --name {name}"
        )


@dataclass(frozen=True)
class Attachment:
    """Servers that `trainer`, this process, has until it ends; `held` is what they held, if any."""

    engine: RayEngine
    name: str
    trainer: str
    held: Held | None

    def restore(self, solver: Solver, rule: Rule) -> None:
        """Bring a solver to where the last trainer has left the servers; UsageError and ConfigError
        say what it does otherwise.
        """
        held = self.held
        assert held
        others = f'start servers under another name than "{self.name}" for other settings'
        try:
            check_same_net(held.kept, solver)
        except ConfigError as error:
            raise ConfigError(
                f'the servers "{self.name}" hold another net: {error}; {others}', solver.path
            ) from None
        for flag, own, there in (
            ("--consistency", rule.name, held.rule.name),
            ("--server-update", _text(rule), _text(held.rule)),
        ):
            if own != there:
                raise UsageError(
                    f'{flag} {own}: the servers "{self.name}" train with {there}: give '
                    f"{flag} {there}, or {others}"
                )
        with tempfile.TemporaryDirectory(prefix="caffepy-") as folder:
            path = write(held, os.path.join(folder, "servers"))
            solver.resume_state.restore(path, stays=False)
        message = 'Going on with the servers "%s" from iteration %d, after %d pushes of each worker'
        log.info(message, self.name, solver.iter, held.clock)


def _text(rule: Rule) -> str:
    update = rule.update
    if isinstance(update, Nesterov):
        return f"nesterov:{update.momentum:g}:{update.rate:g}"
    return "another" if update else "add"


@contextmanager
def attached(cluster: str, name: str, path: str | None) -> Iterator[Attachment]:
    """Return a block in which this process is the trainer of the servers of this name; `path` is
    the solver file. UsageError and SyncError say why it cannot be.
    """
    engine = connect(cluster, DETACHED + name)
    try:
        engine.store.start()
        check_running(engine, cluster, name)
        trainer = this_process(f"trains {path or 'a net'}")
        try:
            held = Client(engine, 0, poll=engine.store.check).attach(trainer)
        except CaffeError as error:
            raise error.at(f"--name {name}") from None
        try:
            yield Attachment(engine, name, trainer, held)
        finally:
            with suppress(CaffeError, TimeoutError):
                engine.call(COORDINATOR, "release", trainer).result(GOODBYE)
    finally:
        engine.close()
