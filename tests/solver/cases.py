"""Solvers for tests: from text, with a reporter that keeps what it hears."""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.events import Displayed, Output, Reporter, Served
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.ops.cpu.update_state import UpdateState
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Action, Solver
from caffepy.solver.capture import GraphRunner
from tests.nets import library

GOLDEN = Path(__file__).parent.parent / "golden"
SOLVERS = GOLDEN / "solvers"
FORMATS = {"binary": "", "hdf5": "snapshot_format: HDF5 "}
ENVIRONMENT = os.environ | {  # for Python processes that tests start
    "PYTHONPATH": os.pathsep.join([str(GOLDEN.parent.parent), os.environ.get("PYTHONPATH", "")])
}

# x is random noise, y random zeros and ones
NOISE = library.dummies("in", 'type: "gaussian"', 'type: "uniform"', x=(4, 3), y=(4, 2))
NET = library.regression(NOISE)
# x and y come from HDF5 files in the folder of `fed`, shuffled
FED = library.regression(
    library.layer(
        "HDF5Data",
        "in",
        "",
        'hdf5_data_param { source: "SOURCE" batch_size: 2 shuffle: true }',
        top="x y",
    )
)
SETTINGS = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 random_seed: 3 '


class Recorder(Reporter):
    """Keeps every event as a line and every displayed loss."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.tests: list[dict[str, Array]] = []
        self.reports: list[Served] = []

    def solving(self, net_name: str, lr_policy: str) -> None:
        self.events.append(f"solving {net_name} {lr_policy}")

    def test_started(self, iteration: int, k: int) -> None:
        self.events.append(f"{iteration} test {k}")

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
        self.tests.append({name: values for name, values, _ in outputs})
        self.events.append(f"{iteration} tested {k}" + (" with loss" if loss is not None else ""))

    def displayed(self, shown: Displayed) -> None:
        self.losses.append(shown.loss)
        names = " ".join(name for name, _, _ in shown.outputs)
        self.events.append(f"{shown.iteration} displayed {names}")

    def lr(self, iteration: int, rate: float) -> None:
        self.rates.append(rate)
        self.events.append(f"{iteration} lr")

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        self.events.append(f"{iteration} done {images}")

    def served(self, told: Served) -> None:
        self.reports.append(told)

    def snapshotted(self, kind: str, path: str) -> None:
        self.events.append(f"snapshotting {kind} {Path(path).name}")

    def finished(self, iteration: int, loss: float | None) -> None:
        self.events.append(f"{iteration} finished" + (" with loss" if loss is not None else ""))

    def done(self, stopped_early: bool) -> None:
        self.events.append("stopped" if stopped_early else "done")


def change_numbers(param: SolverParameter) -> None:
    """Change all numbers that update rules take from their settings, but weight_decay."""
    param.momentum /= 2
    param.momentum2 /= 2
    param.rms_decay /= 2
    param.delta *= 1000


def solver_of(settings: str, net: str = NET, **kwargs: Any) -> Solver:
    """A solver of these settings, on this net where they name none."""
    if "net" not in settings:
        settings += f'net_param {{ name: "noise" {net} }}'
    param = text_format.Merge(settings, text_format.Parse(SETTINGS, SolverParameter()))
    return Solver(param, device=Device(seed=1), **kwargs)


class Graphs(list[str]):
    """While it is used, solvers on the CPU run parts as a GPU replays graphs, and rows of
    hyperparameters wait for their iterations; the names of the parts, in order.
    """

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known = dict[tuple[int, str], Hashable]()
        rows: defaultdict[UpdateState, deque[tuple[float, float, float]]] = defaultdict(deque)
        set_hyperparams, check = UpdateState.set_hyperparams, UpdateState.check_and_scale

        def run(
            runner: GraphRunner, name: str, work: Callable[[], None], *conditions: Hashable
        ) -> None:
            self.append(name)
            known[id(runner), name] = conditions
            work()

        def keep(
            state: UpdateState, rate: float, decay: float, correction: float, ahead: int = 0
        ) -> None:
            assert ahead == len(rows[state])
            rows[state].append((rate, decay, correction))

        def check_and_scale(state: UpdateState, diff: Array, *averages: Any) -> None:
            set_hyperparams(state, *rows[state].popleft())
            check(state, diff, *averages)

        monkeypatch.setattr(GraphRunner, "run", run)
        monkeypatch.setattr(GraphRunner, "can_capture", lambda runner: True)
        monkeypatch.setattr(
            GraphRunner,
            "has_captured",
            lambda runner, name, *conditions: known.get((id(runner), name)) == conditions,
        )
        monkeypatch.setattr(UpdateState, "set_hyperparams", keep)
        monkeypatch.setattr(UpdateState, "check_and_scale", check_and_scale)
        monkeypatch.setattr("caffepy.solver.iteration.TIMED", 3)
        monkeypatch.setattr("caffepy.solver.iteration.LONGEST", float("inf"))


class Several(Recorder):
    """Hears of several iterations after the last of them."""

    takes_several = True


STAYING = library.regression(
    library.dummies("in", 'type: "gaussianstatic"', 'type: "uniformstatic"', x=(4, 3), y=(4, 2))
)
"""A net whose data stay."""


def no_signal() -> Action:
    """An `action` that need not be asked after each iteration."""
    return Action.NONE


no_signal.takes_several = True  # type: ignore[attr-defined]


def ask() -> Action:
    """An `action` that is to be asked after each iteration."""
    return Action.NONE


class AskAt:
    """An `action` that asks for something at its n-th poll (counted from 1)."""

    def __init__(self, n: int, action: Action) -> None:
        self.n, self.asked, self.polls = n, action, 0

    def __call__(self) -> Action:
        self.polls += 1
        return self.asked if self.polls == self.n else Action.NONE


def trained(folder: Path, settings: str = "", steps: int = 3) -> Solver:
    """A solver that wrote a snapshot after so many steps."""
    solver = solver_of(f'snapshot_prefix: "{folder}/s" max_iter: 100 {settings}')
    solver.step(steps)
    solver.snapshot()
    return solver


def state_of(folder: Path, iteration: int, settings: str = "") -> str:
    """The path of the state that such a solver wrote."""
    return str(folder / f"s_iter_{iteration}.solverstate") + (".h5" if "HDF5" in settings else "")


def fed(folder: Path, settings: str = "", net: str = FED) -> Solver:
    """A solver of three HDF5 files, which are written anew."""
    for i in range(3):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["x"], file["y"] = np.random.default_rng(i).random((4, 3)), np.zeros((4, 2))
    (folder / "list").write_text("".join(f"{folder}/{i}.h5\n" for i in range(3)))
    return solver_of(
        f'snapshot_prefix: "{folder}/s" max_iter: 8 {settings}',
        net.replace("SOURCE", f"{folder}/list"),
    )


def damage(path: Path, how: str) -> None:
    """Flip a bit of a file, truncate or empty it, or remove it ("gone")."""
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes(
        {"flipped": content, "truncated": content[: len(content) // 2], "empty": b""}[how]
    )
