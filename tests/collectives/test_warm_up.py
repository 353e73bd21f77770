"""When ranks on GPUs meet at barriers around a schedule, without GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from caffepy.collectives.gpu import ScheduleSync


def test_barriers_surround_what_runs_until_an_iteration_has_loaded_its_kernels() -> None:
    """A test before the first iteration brings parameters, too. If the next copy of parameters ran
    without barriers, a GPU would wait in it while its rank loads the iteration's kernels.
    """
    bracketed = []

    @contextmanager
    def synchronized(rank: int, name: str, done: object) -> Iterator[None]:
        bracketed[-1] = True
        yield

    sync = object.__new__(ScheduleSync)
    part = SimpleNamespace(run=lambda count: None)
    sync.__dict__.update(
        group=SimpleNamespace(synchronized=synchronized),
        rank=1,
        device=SimpleNamespace(stream=SimpleNamespace(synchronize=None)),
        _warm=False,
        _down=[part],
        _up=[part],
        _data=np.zeros(1),
        _diff=np.zeros(1),
    )
    for call in (sync.on_start, sync.on_start, sync.on_gradients_ready) + 2 * (
        sync.on_start,
        sync.on_gradients_ready,
    ):
        bracketed.append(False)
        call()
    assert bracketed == [True, True, True, False, False, False, False]
