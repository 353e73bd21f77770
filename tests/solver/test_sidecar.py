import copy
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy.core.errors import CaffeError, ConfigError
from caffepy.solver import sidecar
from tests.solver.cases import FORMATS, fed, solver_of, state_of, trained


def test_sidecar_keeps_trees_and_arrays(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    tree = {
        "a": [1, 2.5, "t", None, True],
        "b": {"c": np.arange(6, dtype=np.uint32).reshape(2, 3), "d": 1 << 100},
    }
    sidecar.write(path, tree)
    back = sidecar.read(path)
    assert back is not None
    np.testing.assert_array_equal(back["b"].pop("c"), tree["b"].pop("c"))  # type: ignore[attr-defined]
    assert back == {"format": 1, **tree}
    assert sidecar.read(str(tmp_path / "y")) is None
    with pytest.raises(ConfigError, match=r"numbers, text and arrays: .* set"):
        sidecar.write(path, {"kept": {1, 2}})
    assert sidecar.read(path).keys() == back.keys()


WRONG_CONTENT: list[Any] = [
    None,
    -1,
    1e30,
    "x",
    [],
    {},
    10**30,
    [1, 2],
    {"a": 1},
    float("nan"),
    np.zeros(3),
]


def test_sidecars_of_wrong_content_are_named_and_change_nothing(tmp_path: Path) -> None:
    """Every entry replaced or removed: it is taken up or refused, and after that the solver still
    works.
    """
    fed(tmp_path).solve()
    path, state = str(tmp_path / "s_iter_8.caffepystate"), state_of(tmp_path, 8)
    content = sidecar.read(path)
    assert content
    solver = fed(tmp_path)
    rng = np.random.default_rng(6)
    for keys in list(_entries(content)):
        broken = copy.deepcopy(content)
        inner: Any = broken
        for key in keys[:-1]:
            inner = inner[key]
        if rng.random() < 0.3:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = WRONG_CONTENT[rng.integers(len(WRONG_CONTENT))]
        broken.pop("format", None)
        sidecar.write(path, broken)
        before = solver.iter, solver.params.data.copy(), solver.net.state()
        try:
            solver.restore(state)
        except CaffeError:
            assert solver.iter == before[0]
            np.testing.assert_array_equal(solver.params.data, before[1])
            np.testing.assert_equal(solver.net.state(), before[2])
        solver.step(1)


def test_a_sidecar_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    trained(tmp_path)
    path = tmp_path / "s_iter_3.caffepystate"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be read: it is a pipe or a device"):
        solver_of("max_iter: 100 ").restore(state_of(tmp_path, 3))


@pytest.mark.parametrize("workers", [1, [1], [{"net": {}}], ["x"]])
def test_workers_positions_are_checked_before_any_worker_takes_them(
    workers: Any, tmp_path: Path
) -> None:
    trained(tmp_path)
    path, state = str(tmp_path / "s_iter_3.caffepystate"), state_of(tmp_path, 3)
    content = sidecar.read(path)
    assert content
    content["positions"]["workers"] = workers
    del content["format"]
    sidecar.write(path, content)
    with pytest.raises(ConfigError, match=r"this \.caffepystate file is damaged"):
        solver_of("max_iter: 100 ").restore(state)


def _entries(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, item in items:
        yield (*keys, key)
        yield from _entries(item, (*keys, key))


def test_sidecar_of_another_format_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path)
    trained(tmp_path, FORMATS["hdf5"])
    with caplog.at_level(logging.WARNING):
        solver_of("").restore(state_of(tmp_path, 3))
    assert "it is ignored" in caplog.text
