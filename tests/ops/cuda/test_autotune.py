"""Which of several candidates is taken, by times that are told."""

from itertools import cycle

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy")

from caffepy.ops.cuda import autotune  # noqa: E402

CASES = {
    "the fastest": (0.98, [3.0, 2.0, 2.5], [], 1),
    "of two alike the earlier one": (0.98, [2.01, 2.0], [[2.01], [2.0]], 0),
    "by its median": (0.98, [2.0, 2.1], [[2.0], [1.5, 2.1, 1.9]], 1),
    "a third": (0.98, [2.0, 1.95, 1.9], [[2.0], [1.95], [1.9]], 2),
    "a later one although it takes more": (1.2, [2.0, 2.3], [[2.0], [2.3]], 1),
    "an earlier one although it takes more": (0.8, [2.0, 1.8], [[2.0], [1.8]], 0),
}
"""`better`, first times, times of later turns for each candidate, and the choice."""


@pytest.mark.parametrize("case", CASES)
def test_choice(case, monkeypatch):
    better, times, turns, want = CASES[case]
    calls = [cycle(turn).__next__ for turn in turns]
    monkeypatch.setattr(autotune, "_timed", lambda call, count, launches: call())
    assert autotune.choice(calls, times, better=better) == want
