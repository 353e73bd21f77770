"""A run that diverges goes on from its last snapshot, with a lower learning rate.

The net has one weight w, and its loss is w^2 / 2: an update multiplies w by 1 - rate. With a rate
of 1e5 the loss of iteration 4 is not finite.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy.cli import main
from caffepy.commands.rollback import on_divergence
from caffepy.commands.train import TrainOptions, TrainResult, train
from caffepy.core.errors import DivergenceError, UsageError
from caffepy.report.metrics import read_rows
from caffepy.solver import sidecar
from tests.nets import library
from tests.parallel.faults import caffepy, weights

ONE = 'type: "constant" value: 1'
DATA = library.dummies("in", ONE, 'type: "constant"', x=(2, 1), y=(2, 1))
LEARNING = library.inner_product("ip", "x", 1, "bias_term: false", filler=ONE)
LEARNING += library.euclidean_loss("ip", "y")
SOLVER = 'net: "net.prototxt" lr_policy: "fixed" display: 1 snapshot_prefix: "s" random_seed: 1 '


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(DATA + LEARNING)
    return tmp_path


def run(
    reaction: str, every: int, solvers: int = 1, until: int = 10, rate: float = 1e5, **options: Any
) -> TrainResult:
    """Train with a snapshot `every` iterations."""
    settings = f"base_lr: {rate} max_iter: {until} snapshot: {every}"
    Path("solver.prototxt").write_text(f"{SOLVER}{settings}\n")
    return train(TrainOptions("solver.prototxt", cpu=solvers, on_divergence=reaction, **options))


def rollbacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [message.split("; ")[-1] for message in caplog.messages if "; rollback" in message]
    caplog.clear()
    return found


@pytest.mark.parametrize("solvers", [1, 2])
def test_it_goes_on_from_the_last_snapshot_with_a_lower_rate(
    solvers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "caffepy"):
        result = run("rollback:0.001", 2, solvers)
    assert (result.iteration, result.exit_code) == (10, 0)
    # 1e10 at iteration 2, times -99 in each of 5 iterations, is too large; that at 6 is not
    assert rollbacks(caplog) == [
        "rollback 1 of 3: training goes on from s_iter_2.solverstate with base_lr 100000 x 0.001 "
        "= 100",
        "rollback 2 of 3: training goes on from s_iter_6.solverstate with base_lr 100000 x 1e-06 "
        "= 0.1",
    ]
    expected = (1 - 1e5) ** 2 * (1 - 100) ** 4 * (1 - 0.1) ** 4
    np.testing.assert_allclose(weights("s_iter_10.caffemodel"), expected, rtol=1e-5)
    rows = {int(row["iteration"]): float(row["lr"] or 0) for row in read_rows("s_metrics.csv")[1]}
    assert list(rows.items())[:10] == [
        *((i, 1e5) for i in range(2)),
        *((i, 100) for i in range(2, 6)),
        *((i, 0.1) for i in range(6, 10)),
    ]


@pytest.mark.parametrize("solvers", [1, 2])
def test_a_snapshot_keeps_the_rate(solvers: int, caplog: pytest.LogCaptureFixture) -> None:
    run("rollback:1e-6", 2, solvers)
    content = sidecar.read("s_iter_10.caffepystate")
    assert content
    assert content["rate_factor"] == 1e-6
    assert "base_lr: 100000" in content["settings"]
    with caplog.at_level(logging.INFO, "caffepy"):
        run("stop", 2, solvers, until=12, snapshot="auto")
    told = "s_iter_10.solverstate has a learning rate of 1e-06 times the solver's"
    assert [message for message in caplog.messages if message.startswith(told)]
    before, after = (weights(f"s_iter_{i}.caffemodel") for i in (10, 12))
    np.testing.assert_allclose(after, before * 0.9**2, rtol=1e-6)


@pytest.mark.parametrize("solvers", [1, 2])
def test_without_a_snapshot_it_starts_again_from_its_weights(
    solvers: int, caplog: pytest.LogCaptureFixture
) -> None:
    run("stop", 1, until=1, rate=3)  # w is -2
    Path("s_iter_1.caffemodel").rename("w.caffemodel")
    caplog.clear()
    result = run("rollback:5e-6", 100, solvers, weights=["w.caffemodel"])
    assert result.exit_code == 0
    assert caplog.text.count("This run starts at iteration 0") == 1  # the state still lies there
    assert rollbacks(caplog) == [
        "rollback 1 of 3: training goes on from the beginning with base_lr 100000 x 5e-06 = 0.5"
    ]
    np.testing.assert_allclose(weights("s_iter_10.caffemodel"), -2 * 0.5**10)


def test_a_resumed_run_goes_back_to_where_it_began(caplog: pytest.LogCaptureFixture) -> None:
    run("stop", 3, until=3)
    caplog.clear()
    result = run("rollback:1e-6", 100, snapshot="s_iter_3.solverstate")
    assert result.exit_code == 0
    (told,) = rollbacks(caplog)
    assert "from s_iter_3.solverstate" in told


@pytest.mark.parametrize("solvers", [1, 2])
def test_it_gives_up_after_that_many(solvers: int, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DivergenceError, match=r"rollbacks before this: 2, the last to .* x 0\.25$"):
        run("rollback:0.5:2", 2, solvers)
    assert [told.split(" = ")[1] for told in rollbacks(caplog)] == ["50000", "25000"]


def damage(monkeypatch: pytest.MonkeyPatch, files: str) -> None:
    """Damage files of these names when a run diverges, before it goes back."""

    def damage_now() -> list[str]:
        for path in Path().glob(files):
            path.write_bytes(b"damaged")
        return []

    monkeypatch.setattr("caffepy.commands.rollback.at_work", damage_now)


@pytest.mark.parametrize("solvers", [1, 2])
@pytest.mark.parametrize("kind", ["solverstate", "caffemodel", "caffepystate"])
def test_a_damaged_snapshot_is_passed_over(
    kind: str, solvers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damage(monkeypatch, f"s_iter_3.{kind}")
    assert run("rollback:1e-6", 1, solvers).exit_code == 0
    (told,) = rollbacks(caplog)
    assert "from s_iter_2.solverstate" in told


def test_without_a_whole_snapshot_it_does_not_begin_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    damage(monkeypatch, "s_iter_*.caffemodel")
    with pytest.raises(DivergenceError, match=r"iteration 4: .*no earlier snapshot is whole$"):
        run("rollback:0.1", 2)
    assert not rollbacks(caplog)


def test_the_first_iteration_has_nothing_to_go_back_to(folder: Path) -> None:
    net = (DATA + LEARNING).replace('"constant" value: 1', '"constant" value: 3e38')
    (folder / "net.prototxt").write_text(net)
    with pytest.raises(DivergenceError, match=r"iteration 0: .*there is no earlier snapshot$"):
        run("rollback:0.1", 2)


FILLING = """
import resource
class Filling:
    calls = 0
    def setup(self, bottom, top): pass
    def reshape(self, bottom, top): top[0].reshape(*bottom[0].shape)
    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data
        most = {3: 10, 7: resource.RLIM_INFINITY}.get(Filling.calls)
        if most:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        Filling.calls += 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("every", [1, 3])
def test_a_disk_that_is_full_meanwhile_is_no_obstacle(folder: Path, every: int) -> None:
    """It is full from iteration 3 to some while after the rollback."""
    (folder / "filling.py").write_text(FILLING)
    settings = 'python_param { module: "filling" layer: "Filling" }'
    filling = library.layer("Python", "x2", "x", settings)
    (folder / "net.prototxt").write_text(DATA + filling + LEARNING.replace('"x"', '"x2"'))
    Path("solver.prototxt").write_text(f"{SOLVER} base_lr: 1e5 max_iter: 10 snapshot: {every}\n")
    ended = caffepy("--on-divergence", "rollback:1e-6", on="--cpu 1")
    assert ended.returncode == 0
    assert "; rollback 1 of 3" in ended.stderr
    assert Path("s_iter_10.solverstate").exists()


def test_it_needs_the_snapshot_before_the_last_one() -> None:
    with pytest.raises(UsageError, match="rollback needs --keep 2 or more"):
        run("rollback:0.1", 1, keep=1)
    assert run("rollback:1e-6", 1, keep=2).exit_code == 0


def test_by_default_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DivergenceError):
        run("stop", 2)
    assert not rollbacks(caplog)
    assert TrainOptions("solver.prototxt").on_divergence == "stop"


def test_a_run_that_was_asked_to_stop_does_not_begin_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("caffepy.commands.rollback.asked_to_end.is_set", lambda: True)
    with pytest.raises(DivergenceError):
        run("rollback:0.1", 2)
    assert not rollbacks(caplog)


WRONG = (
    "go, rollback, rollback:, rollback:1, rollback:0, rollback:nan, rollback:0.1:0, rollback:0.1:x,"
    " rollback:0.1:1:1, halve:0.5, stop:0.5"
)


@pytest.mark.parametrize("text", ["", *WRONG.split(", ")])
def test_what_it_cannot_do_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is neither stop nor rollback:FACTOR"):
        on_divergence(text)


def test_the_exit_code_of_a_command_line() -> None:
    Path("solver.prototxt").write_text(f"{SOLVER} base_lr: 1e5 max_iter: 10 snapshot: 2\n")
    command = ["train", "--solver", "solver.prototxt"]
    assert main.run([*command, "--on-divergence", "rollback:0.5:1"]) == 5
    assert main.run([*command, "--on-divergence", "rollback:1e-6"]) == 0
    assert main.run([*command, "--on-divergence", "rollback:2"]) == 2
    ended = caffepy("--max-restarts", "2", "--on-divergence", "rollback:0.5:1", on="--cpu 1")
    assert ended.returncode == 5
    assert ended.stderr.count("; rollback 1 of 1") == 1
    assert "restart" not in ended.stderr


MOVING = """
import os
class Moving:
    def setup(self, bottom, top): pass
    def reshape(self, bottom, top): top[0].reshape(*bottom[0].shape)
    def forward(self, bottom, top):
        top[0].data[...] = bottom[0].data
        os.chdir(self.param_str)
"""


def test_a_layer_that_changes_the_working_directory_is_no_obstacle(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "there").mkdir()
    (folder / "moving.py").write_text(MOVING)
    settings = f'python_param {{ module: "moving" layer: "Moving" param_str: "{folder}/there" }}'
    moving = library.layer("Python", "moved", "x", settings)
    (folder / "net.prototxt").write_text(DATA + moving + LEARNING.replace('"x"', '"moved"'))
    assert run("rollback:1e-6", 2).exit_code == 0
    (told,) = rollbacks(caplog)
    assert "from s_iter_2.solverstate" in told
    assert not list((folder / "there").iterdir())
    assert not (folder / ".s.lock").exists()
