"""Training of nets that know their data by Input layers: the data are made here, each iteration
anew, from a seed.
"""

from collections.abc import Callable, Mapping

import numpy as np
from google.protobuf import text_format

from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver

Batch = Mapping[str, Array]
Source = Callable[[np.random.Generator], Batch]


class Training:
    """A net and its solver; `source` makes the arrays of the inputs for each iteration."""

    def __init__(self, net: str, settings: str, source: Source) -> None:
        param = text_format.Parse(f"random_seed: 1 {settings}", SolverParameter())
        text_format.Parse(net, param.net_param)
        self.solver = Solver(param, device=Device())
        self.source = source
        self.rng = np.random.default_rng(1)

    @property
    def net(self) -> Net:
        """The net that trains."""
        return self.solver.net

    def feed(self, net: Net | None = None) -> Batch:
        """Put the next arrays into the inputs of the net (that in training, unless another is
        given).
        """
        batch = self.source(self.rng)
        for name, array in batch.items():
            (net or self.net).blobs[name].data[...] = array
        return batch

    def run(self, iterations: int, *names: str) -> Array:
        """Train; the values of the named scalar blobs, a row for each iteration."""
        rows = []
        for _ in range(iterations):
            self.feed()
            self.solver.step(1)
            rows.append([float(self.net.blobs[name].data) for name in names])
        return np.array(rows)


def fall(losses: Array) -> float:
    """The last losses as a share of the first: means of five iterations."""
    return float(losses[-5:].mean() / losses[:5].mean())


def gratings(rng: np.random.Generator, count: int, size: int) -> tuple[Array, Array]:
    """Images (N, 1, size, size) of waves in four directions, with noise, and the directions (N)."""
    label = rng.integers(0, 4, count)
    y, x = np.mgrid[:size, :size]
    angle, phase = (label * np.pi / 4)[:, None, None], rng.uniform(0, 2 * np.pi, (count, 1, 1))
    waves = np.sin(1.6 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
    return (waves + 0.3 * rng.standard_normal(waves.shape))[:, None], label
