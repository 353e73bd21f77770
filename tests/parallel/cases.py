"""Solvers that train as one on the CPU, for tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.collectives.topology import all_joined
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.solver import Solver
from tests.nets import library
from tests.solver.cases import AskAt, Recorder, solver_of

NET = library.small_convolution(library.digits("BATCH", 7))
SETTINGS = (
    'base_lr: 0.05 lr_policy: "step" gamma: 0.5 stepsize: 20 momentum: 0.9 weight_decay: 0.001 clip_gradients: 2 '
    "iter_size: 2 display: 1 test_iter: 5 test_interval: 20 average_loss: 3 "
)
ITERATIONS = 50


def net(batch: int, text: str = NET) -> str:
    return text.replace("BATCH", str(batch))


LOSSY = net(3).replace(
    'layer { name: "ip"',
    library.in_place("Dropout", "drop", "pool") + 'layer { name: "ip"',
)
LOSSY = LOSSY.replace("scale: 0.004", "scale: 0.004 mirror: true crop_size: 7")
"""A net that draws random numbers, for its data and its dropout."""


class Run:
    """Trains a root solver and `size` - 1 workers together; has their state at the end."""

    def __init__(
        self,
        size: int,
        text: str,
        sync: str = "auto",
        *,
        settings: str = SETTINGS,
        until: int = ITERATIONS,
        state: str | None = None,
        ask: AskAt | None = None,
        **sync_options: Any,
    ) -> None:
        self.recorder = Recorder()
        self.root = solver_of(settings, text, reporter=self.recorder)
        if state:
            self.root.restore(state)
        devices = [self.root.device, *(Device(seed=rank) for rank in range(1, size))]
        with P2PManager(
            self.root, devices, all_joined(size), SyncOptions(sync, **sync_options)
        ) as manager:
            self.root.action = ask or self.root.action
            self.root.step(until - self.root.iter)
            if "snapshot_prefix" in settings and not self.root.resume_state.saved_now:
                self.root.snapshot()
            elif not ask and self.root.test_nets:
                self.root.test_all()
            self.solvers: Sequence[Solver] = [self.root, *manager.workers]
            self.data: list[Array] = [solver.params.data.copy() for solver in self.solvers]
            self.history = np.concatenate(self.root.history)
        self.root.close()

    @property
    def losses(self) -> list[float]:
        return self.recorder.losses

    @property
    def tests(self) -> list[dict[str, Array]]:
        return self.recorder.tests
