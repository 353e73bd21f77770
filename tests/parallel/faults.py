"""Runs with an injected fault, and what must be left after it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.cli import main
from caffepy.device.blob import Array
from caffepy.parallel.worker import WorkerSolver
from caffepy.proto.binary import blob_to_array, read_net
from tests.parallel.cases import net
from tests.solver.cases import ENVIRONMENT

FAULTY = """
layer { name: "faulty" type: "Python" bottom: "pool" top: "faulty"
  python_param { module: "faulty" layer: "Faulty" param_str: 'ORDERS' } }
layer { name: "ip" """
EVERY = 'base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 display: 2 test_iter: 4 test_interval: 3 random_seed: 3 '
NOTHING = {"what": "raise", "rank": 0, "at": -1}


def write(
    folder: Path, orders: dict[str, Any], settings: str = "snapshot: 100 max_iter: 8"
) -> None:
    """Write a solver and a net with a layer that fails as `orders` say."""
    text = net(3).replace('layer { name: "ip" ', FAULTY.replace("ORDERS", json.dumps(orders)))
    text = text.replace(
        'name: "ip" type: "InnerProduct" bottom: "pool"',
        'name: "ip" type: "InnerProduct" bottom: "faulty"',
    )
    (folder / "net.prototxt").write_text(text)
    (folder / "solver.prototxt").write_text(
        f'net: "net.prototxt" {EVERY} snapshot_prefix: "s" {settings}\n'
    )


LONGEST = {"--cpu": 300, "--gpu": 60}
"""Seconds that a run may take at most."""


def caffepy(
    *arguments: str, on: str = "--cpu 3", code: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run `caffepy train` on these devices, after some Python code; assert that no process is left.

    Autotuning is off: many processes at once would take longer for it than a deadline.
    """
    program = (
        ["-c", f"{code}\nfrom caffepy.cli.main import main\nmain()"] if code else ["-m", "caffepy"]
    )
    command = [
        sys.executable,
        *program,
        "train",
        "--solver",
        "solver.prototxt",
        *on.split(),
        *arguments,
    ]
    pipe = subprocess.PIPE
    environment = ENVIRONMENT | {"CAFFEPY_AUTOTUNE": "0"}
    with subprocess.Popen(
        command, stderr=pipe, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            _, said = process.communicate(timeout=LONGEST[on.split()[0]])
        finally:
            left = still_there(process.pid)
    assert not left, said
    return subprocess.CompletedProcess(command, process.returncode, stderr=said)


def still_there(group: int) -> bool:
    """True if a process of this process group runs; kill the group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def weights(path: str) -> Array:
    return np.concatenate(
        [blob_to_array(blob).ravel() for layer in read_net(path).layer for blob in layer.blobs]
    )


def goes_on_exactly(folder: Path, on: str = "--cpu 3") -> None:
    """Assert that a run resumed from the snapshot ends like one without a fault; both run here."""
    write(folder, NOTHING)
    command = ["train", "--solver", "solver.prototxt", *on.split()]
    *_, state = sorted(
        folder.glob("*.solverstate")
    )  # not "auto": the net without the fault is another
    assert main.run([*command, "--snapshot", state.name]) == 0
    resumed = weights("s_iter_8.caffemodel")
    for path in folder.glob("s_iter_*"):
        path.unlink()
    assert main.run(command) == 0
    np.testing.assert_array_equal(weights("s_iter_8.caffemodel"), resumed)


class KilledError(Exception):
    """Ends a thread's work."""


class Killer:
    """A callback of a worker or its net that raises in an iteration."""

    def __init__(self, worker: WorkerSolver, iteration: int, place: str) -> None:
        self._worker, self._iteration, self._place = worker, iteration, place
        if place in ("on_start", "on_gradients_ready"):
            worker.add_callback(self)
        else:
            getattr(worker.net, place).append(lambda _: self._at(place))

    def _at(self, place: str) -> None:
        if (place, self._worker.iter) == (self._place, self._iteration):
            raise KilledError

    def on_start(self) -> None:
        self._at("on_start")

    def on_gradients_ready(self) -> None:
        self._at("on_gradients_ready")


PLACES = (
    "before_forward",
    "after_forward",
    "before_backward",
    "after_backward",
    "on_start",
    "on_gradients_ready",
)
