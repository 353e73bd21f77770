import os
import stat
from pathlib import Path

import numpy as np
import pytest

from caffepy.core.errors import DataError
from caffepy.data.write import new_npy, open_writer, write_database


@pytest.mark.parametrize("counts", [[], [3], [1, 4, 0, 2], [1234567, 8000000]])
def test_rows_come_one_after_the_other(counts: list[int], tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    rows = np.arange(2 * max(counts, default=0), dtype=np.float32).reshape(-1, 2)
    with new_npy(str(path)) as add:
        for count in counts:
            add(rows[:count])
    array = np.load(path)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(
        array, np.concatenate([rows[:0], *(rows[:n] for n in counts)]).reshape(array.shape)
    )


def test_rows_have_one_shape(tmp_path: Path) -> None:
    with new_npy(str(tmp_path / "x")) as add:
        add(np.zeros((4, 2)))
        with pytest.raises(DataError, match=r"rows of 3 \(3\) follow rows of 2 \(2\)"):
            add(np.zeros((4, 3)))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o002, 0o775), (0o077, 0o700)])
def test_others_may_read_a_database_as_the_umask_says(
    umask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        with write_database(str(tmp_path / "db")) as writer:
            writer.put("0", b"x")
        with open_writer("made", str(tmp_path / "made"), "lmdb"):
            pass
    finally:
        os.umask(before)
    for name in "db", "made":
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
