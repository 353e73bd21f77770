"""A team goes on from a snapshot as if it had never stopped: to the last bit, workers' random numbers and all."""

import logging
from pathlib import Path

import numpy as np
import pytest

from caffepy.solver import Action
from tests.solver.cases import AskAt
from tests.team.cases import SETTINGS, Run, net

LOSSY = net(3).replace(
    'layer { name: "ip"', 'layer { name: "drop" type: "Dropout" bottom: "pool" top: "pool" } layer { name: "ip"'
)
LOSSY = LOSSY.replace("scale: 0.004", "scale: 0.004 mirror: true crop_size: 7")
EVERY = SETTINGS.replace("test_interval: 20", "test_interval: 4")


def train(folder: Path, size: int, sync: str, until: list[int], ask: AskAt | None = None) -> list[Run]:
    """Train up to each of `until` in turn, each part by a team of its own that goes on from the one before."""
    runs: list[Run] = []
    for end in until:
        settings = f'{EVERY} snapshot_prefix: "{folder}/s" '
        state = runs[-1].root.saved_now if runs else None
        runs.append(Run(size, LOSSY, sync, settings=settings, until=end, state=state, ask=None if runs else ask))
    return runs


def compare(whole: Run, parts: list[Run]) -> None:
    for a, b in zip([*whole.data, whole.history], [*parts[-1].data, parts[-1].history], strict=True):
        np.testing.assert_array_equal(a, b)
    assert whole.losses == [loss for part in parts for loss in part.losses]
    tests = [test for part in parts for test in part.tests]
    assert [float(test["loss"]) for test in whole.tests] == [float(test["loss"]) for test in tests]


@pytest.mark.parametrize("sync", ["tree", "flat"])
@pytest.mark.parametrize("size", [2, 3])
def test_stop_and_resume_changes_nothing(size: int, sync: str, tmp_path: Path) -> None:
    (whole,) = train(tmp_path, size, sync, [13])
    compare(whole, train(tmp_path, size, sync, [3, 8, 13]))


@pytest.mark.parametrize("poll", [8, 9])
def test_stop_in_a_test_repeats_that_test(poll: int, tmp_path: Path) -> None:
    (whole,) = train(tmp_path, 2, "flat", [9])
    # polls: 3 rounds of the test at 0, 4 iterations, then the first or second round of the test at 4
    parts = train(tmp_path, 2, "flat", [9, 9], AskAt(poll, Action.STOP | Action.SNAPSHOT))
    assert parts[0].root.iter == 4
    compare(whole, parts)


def test_a_team_of_another_size_goes_on_with_other_random_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = train(tmp_path, 3, "flat", [4])
    with caplog.at_level(logging.WARNING, "caffepy"):
        Run(2, LOSSY, settings=EVERY, until=6, state=first.root.saved_now)
    assert "The snapshot is of 3 solvers, not 2: random numbers of the workers start anew" in caplog.messages
