"""What Caffe's solvers did in twenty steps, for tests of one solver and of several as one."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.solver import Solver
from tests.solver.cases import SOLVERS

CASES = sorted(path.stem for path in SOLVERS.glob("*.npz"))


def known(solver: Solver, case: Any, when: str) -> Iterator[tuple[str, Blob, Array]]:
    """Yield the parameters that Caffe had at this time: key, the solver's blob, Caffe's values."""
    layers = dict(zip(solver.net.layer_names, solver.net.layers, strict=True))
    for key in case.files:
        time, _, rest = key.partition(":")
        if time == when:
            layer, _, index = rest.partition(":")
            yield key, layers[layer].blobs[int(index)], case[key]


def begin(solver: Solver, case: Any) -> None:
    """Give the parameters their first values."""
    for _, blob, values in known(solver, case, "init"):
        blob.host_data[...] = values


def compare(solver: Solver, case: Any, loss: float) -> None:
    """Compare the loss of the last iteration, and the parameters after it where they are known."""
    done, theirs = solver.iter, case["losses"][solver.iter - 1]
    assert abs(loss - theirs) <= 1e-3 * max(1, abs(theirs)), f"loss {done}"
    for key, blob, values in known(solver, case, f"after{done}"):
        np.testing.assert_allclose(blob.host_data, values, 1e-3, 1e-4, err_msg=key)
