"""Solvers that train as one resume from a snapshot as if they had never stopped, to the last bit.

What is shown:

- weights, losses and tests are the same, wherever all were stopped, also within a test;
- workers restore with the root, their random numbers and positions too;
- nothing can be restored within an iteration;
- the statistics of BatchNorm do not depend on how often the run was tested, saved or stopped;
- with another number of solvers the run goes on, with other random numbers.
"""

import logging
from pathlib import Path

import numpy as np
import pytest

from caffepy.collectives.topology import all_joined
from caffepy.core.errors import ConfigError
from caffepy.device.device import Device
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.solver import Action
from tests.nets import library
from tests.parallel.cases import LOSSY, SETTINGS, Run
from tests.solver.cases import AskAt, solver_of

EVERY = SETTINGS.replace("test_interval: 20", "test_interval: 4")
NORMALIZED = LOSSY.replace(
    'layer { name: "pool"',
    library.layer("BatchNorm", "bn", "conv", top="conv") + 'layer { name: "pool"',
)


def train(
    folder: Path,
    size: int,
    sync: str,
    until: list[int],
    ask: AskAt | None = None,
    *,
    text: str = LOSSY,
    settings: str = EVERY,
    **options: str,
) -> list[Run]:
    """Train up to each of `until` in turn, each part by a new manager that resumes from the one
    before.
    """
    folder.mkdir(exist_ok=True)
    runs: list[Run] = []
    settings = f'{settings} snapshot_prefix: "{folder}/s" '
    for end in until:
        state = runs[-1].root.resume_state.saved_now if runs else None
        runs.append(
            Run(
                size,
                text,
                sync,
                settings=settings,
                until=end,
                state=state,
                ask=None if runs else ask,
                **options,
            )
        )
    return runs


def compare(whole: Run, parts: list[Run]) -> None:
    assert_same_state(whole, parts[-1])
    assert whole.losses == [loss for part in parts for loss in part.losses]
    tests = [test for part in parts for test in part.tests]
    assert [float(test["loss"]) for test in whole.tests] == [float(test["loss"]) for test in tests]


def assert_same_state(a: Run, b: Run, solvers: slice = slice(None)) -> None:
    for own, other in zip(
        [*a.data[solvers], a.history], [*b.data[solvers], b.history], strict=True
    ):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("sync", ["tree", "flat"])
@pytest.mark.parametrize("size", [2, 3])
def test_stop_and_resume_changes_nothing(size: int, sync: str, tmp_path: Path) -> None:
    (whole,) = train(tmp_path, size, sync, [13])
    compare(whole, train(tmp_path, size, sync, [3, 8, 13]))


@pytest.mark.parametrize("bn_stats", ["average", "root", "sync"])
@pytest.mark.parametrize("size", [2, 3])
def test_statistics_do_not_depend_on_tests_and_stops(
    size: int, bn_stats: str, tmp_path: Path
) -> None:
    rarely = EVERY.replace("test_interval: 4", "test_interval: 100")
    models = []
    for sync in "tree", "flat":
        runs = [
            train(
                tmp_path / name, size, sync, until, text=NORMALIZED, settings=of, bn_stats=bn_stats
            )
            for name, of, until in (
                ("whole", rarely, [13]),
                ("tested", EVERY, [13]),
                ("stopped", rarely, [3, 8, 13]),
            )
        ]
        for other in runs[1:]:
            # the workers' statistics count for nothing if they test with the root's
            which = slice(1) if bn_stats == "root" else slice(None)
            assert_same_state(runs[0][0], other[-1], which)
        models += [path.read_bytes() for path in tmp_path.glob("*/s_iter_13.caffemodel")]
        assert len({*models[-3:]}) == 1


@pytest.mark.parametrize("action", [Action.STOP, Action.STOP | Action.SNAPSHOT])
@pytest.mark.parametrize("poll", [8, 9])
@pytest.mark.parametrize("text", [LOSSY, NORMALIZED], ids=["", "BatchNorm"])
def test_stop_in_a_test_repeats_that_test(
    text: str, poll: int, action: Action, tmp_path: Path
) -> None:
    (whole,) = train(tmp_path, 2, "flat", [9], text=text)
    # polls: 3 rounds of the test at 0, 4 iterations, then the first or second round of the test at
    # 4
    parts = train(tmp_path, 2, "flat", [9, 9], AskAt(poll, action), text=text)
    assert parts[0].root.iter == 4
    compare(whole, parts)


@pytest.mark.parametrize("sync", ["tree", "flat"])
@pytest.mark.parametrize("text", [LOSSY, NORMALIZED], ids=["", "BatchNorm"])
def test_a_team_restores_as_one(text: str, sync: str, tmp_path: Path) -> None:
    settings = f'{EVERY} snapshot_prefix: "{tmp_path}/s" '
    root = solver_of(settings, text)
    with P2PManager(
        root, [Device() for _ in range(3)], all_joined(3), SyncOptions(sync)
    ) as manager:
        ends = []
        for start in (0, 4):
            if start:
                root.restore(f"{tmp_path}/s_iter_4.solverstate")
            for end in range(4, 11, 3):
                root.step(end - root.iter)
                root.snapshot()
            ends.append([solver.params.data.copy() for solver in (root, *manager.workers)])
    root.close()
    np.testing.assert_array_equal(*ends)


def test_nothing_is_restored_within_an_iteration(tmp_path: Path) -> None:
    (saved,) = train(tmp_path, 2, "flat", [2])
    root = solver_of(EVERY, LOSSY)

    class Restorer:
        def on_start(self) -> None:
            root.restore(str(saved.root.resume_state.saved_now))

        def on_gradients_ready(self) -> None:
            pass

    root.add_callback(Restorer())
    with (
        pytest.raises(
            ConfigError, match="no state can be restored during a step of several solvers"
        ),
        P2PManager(root, [Device(), Device()], all_joined(2), SyncOptions()),
    ):
        root.step(1)
    root.close()


def test_a_team_of_another_size_goes_on_with_other_random_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = train(tmp_path, 3, "flat", [4])
    with caplog.at_level(logging.WARNING, "caffepy"):
        Run(2, LOSSY, settings=EVERY, until=6, state=first.root.resume_state.saved_now)
    assert (
        "The snapshot is of 3 solvers, not 2: random numbers of the workers start anew"
        in caplog.messages
    )


def test_in_the_second_test_workers_stand_where_they_stood_before_the_first() -> None:
    both = f'{EVERY} test_iter: 1 test_state {{ stage: "a" }} test_state {{ stage: "b" }} '
    root = solver_of(both, LOSSY)
    found = []
    with P2PManager(
        root, [root.device, Device(seed=1)], all_joined(2), SyncOptions("flat")
    ) as manager:
        (worker,) = manager.workers
        before = worker.device.random.state

        def draw() -> Action:
            found.append(manager.positions()[0]["rng"])
            worker.device.draw_seed()
            return Action.NONE

        root.action = draw
        root.test_all()
        assert len(found) == 3 + 1  # rounds of both tests
        for state in found:
            np.testing.assert_equal(state, before)
        np.testing.assert_equal(manager.positions()[0]["rng"], worker.device.random.state)
    root.close()
