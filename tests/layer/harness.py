"""One layer outside a net, held to numerical gradients and to the figures that Caffe gave."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from google.protobuf import text_format

import caffepy.layer
from caffepy.device.blob import Array, Blob
from caffepy.device.device import Device
from caffepy.layer.base import check_counts, create_layer
from caffepy.proto.binary import blob_to_array
from caffepy.proto.caffe_pb2 import TEST, TRAIN, LayerParameter, NetParameter

GOLDEN = Path(__file__).parents[1] / "golden" / "layers"
FORKS = GOLDEN.parent / "forks" / "layers"
__all__ = ["FORKS", "GOLDEN", "Single", "check_golden", "check_gradient", "random", "seeded"]

assert caffepy.layer  # imported so that every type is registered


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def random(*shape: int, seed: int = 0) -> Array:
    """Values of a normal distribution; the same for the same shape and seed."""
    return seeded(seed).standard_normal(shape)


class Single:
    """A layer built from prototxt text (`type: "ReLU" ...`) on bottoms that hold the given arrays.

    `tops` counts the tops, `in_place` makes each top its bottom, `weights` are the loss weights
    that a net would have put into the tops' diffs.
    """

    def __init__(
        self,
        text: str | LayerParameter,
        *bottoms: Array,
        tops: int = 1,
        in_place: bool = False,
        phase: int = TRAIN,
        dtype: type = np.float64,
        seed: int = 1,
    ) -> None:
        param = (
            text if isinstance(text, LayerParameter) else text_format.Parse(text, LayerParameter())
        )
        self.seed, self.device, self.dtype = seed, Device(seed=seed), dtype
        self.inputs = [np.array(b, dtype) for b in bottoms]
        self.bottom = [Blob(b.shape, dtype) for b in self.inputs]
        self.top = [self.bottom[i] if in_place else Blob(dtype=dtype) for i in range(tops)]
        self.layer = create_layer(param, phase, self.device, dtype)
        check_counts(self.layer, len(self.bottom), tops)
        self.load()
        for array in map(blob_to_array, self.layer.param.blobs):
            self.layer.add_blob(array.shape).data[...] = array
        self.layer.setup(self.bottom, self.top)
        self.layer.reshape(self.bottom, self.top)
        self.layer.param_propagate_down = [True] * len(self.layer.blobs)
        self.weights = list(self.layer.param.loss_weight) or [0.0] * tops
        assert len(self.weights) == tops
        self.layer.loss_weights = self.weights
        for top, weight in zip(self.top, self.weights, strict=True):
            if weight:
                top.diff.fill(weight)

    @property
    def params(self) -> list[Array]:
        """The data of the layer's parameters."""
        return [blob.data for blob in self.layer.blobs]

    @property
    def tops(self) -> list[Array]:
        """The data of the tops."""
        return [t.data for t in self.top]

    def load(self) -> None:
        """Put the inputs into the bottoms."""
        for blob, array in zip(self.bottom, self.inputs, strict=True):
            blob.data[...] = array

    def forward(self) -> list[Array]:
        """Copies of the tops, from the inputs and from the same random state each time."""
        self.load()
        self.device.seed(self.seed)
        if self.layer.always_reshape:
            self.layer.reshape(self.bottom, self.top)
        self.layer.forward(self.bottom, self.top)
        return [t.copy() for t in self.tops]

    def backward(
        self,
        top_diffs: Sequence[Array | float] | None = None,
        propagate_down: Sequence[bool] | None = None,
    ) -> tuple[list[Array | None], list[Array]]:
        """Copies of the bottoms' and the parameters' diffs.

        Bottom diffs are full of NaN before, so that what is not written shows; parameter diffs
        start at 1 and lose it afterwards, so that what is overwritten shows.
        """
        wanted = [True] * len(self.bottom) if propagate_down is None else list(propagate_down)
        for blob in self.bottom:
            blob.diff.fill(np.nan)
        for i, top in enumerate(self.top):
            top.diff[...] = self.weights[i] if top_diffs is None else top_diffs[i]
        for blob in self.layer.blobs:
            blob.diff.fill(1)
        self.layer.backward(self.top, wanted, self.bottom)
        diffs = [
            blob.diff.copy() if want else None
            for blob, want in zip(self.bottom, wanted, strict=True)
        ]
        return diffs, [blob.diff - 1 for blob in self.layer.blobs]


def check_gradient(
    text: str,
    *bottoms: Array,
    tops: int = 1,
    propagate_down: Sequence[bool] | None = None,
    params: Sequence[int] | None = None,
    in_place: bool = False,
    phase: int = TRAIN,
    step: float = 1e-5,
    tolerance: float = 1e-6,
    seed: int = 1,
) -> None:
    """Hold backward to central differences of the sum of data * diff over the tops, in float64.

    Every element of every bottom with `propagate_down` and of every parameter (or those numbered in
    `params`) is moved by `step`; the difference may be `tolerance` times the size of the larger of
    the two and 1. Parameters whose filler is constant are moved to random values first, so that
    zeros hide nothing.
    """
    single = Single(text, *bottoms, tops=tops, in_place=in_place, phase=phase, seed=seed)
    wanted = [True] * len(bottoms) if propagate_down is None else list(propagate_down)
    checked = range(len(single.params)) if params is None else params
    rng = seeded(seed)
    for k in checked:
        if np.ptp(single.params[k]) == 0:
            single.params[k][...] = rng.standard_normal(single.params[k].shape)
    single.forward()
    is_loss = any(single.weights)
    top_diffs = [
        np.full(t.shape, w) if is_loss else rng.standard_normal(t.shape)
        for t, w in zip(single.tops, single.weights, strict=True)
    ]
    bottom_diffs, param_diffs = single.backward(top_diffs, wanted)

    def objective() -> float:
        return sum(float((t * d).sum()) for t, d in zip(single.forward(), top_diffs, strict=True))

    def compare(what: str, array: Array, diff: Array) -> None:
        for index in np.ndindex(array.shape):
            value = array[index]
            array[index] = value + step
            above = objective()
            array[index] = value - step
            below = objective()
            array[index] = value
            numeric = (above - below) / (2 * step)
            allowed = tolerance * max(1.0, abs(numeric), abs(diff[index]))
            assert abs(diff[index] - numeric) <= allowed, (
                f"{single.layer.type}: d/d {what}{list(index)}: backward "
                f"{diff[index]:.6g}, numeric {numeric:.6g}"
            )

    for i, diff in enumerate(bottom_diffs):
        if diff is not None:
            compare(f"bottom {i}", single.inputs[i], diff)
    for k in checked:
        compare(f"param {k}", single.params[k], param_diffs[k])


def check_golden(case: str, dtype: type = np.float32, folder: Path = GOLDEN) -> None:
    """Replay CASE.npz of the folder through the layer `it` and compare tops, parameters and diffs."""
    golden = np.load(folder / f"{case}.npz")
    net = text_format.Parse(str(golden["prototxt"]), NetParameter())
    (param,) = (p for p in net.layer if p.name == "it")
    # A bottom `c0` is `b0` behind a Scale layer of factor 1, there so that the net of the case
    # computes its gradient.
    bottoms = [golden["in:b" + name[1:]] for name in param.bottom]
    phase = {"TRAIN": TRAIN, "TEST": TEST}[str(golden["phase"])]
    single = Single(param, *bottoms, tops=len(param.top), phase=phase, dtype=dtype)
    for k, array in enumerate(single.params):
        array[...] = golden[f"param:{k}"]
    single.forward()
    answers = dict(zip((f"out:{name}" for name in param.top), single.tops, strict=True))
    answers |= {f"param_after:{k}": p for k, p in enumerate(single.params)}
    for key, answer in answers.items():
        _compare(case, key, answer, golden)
    wanted = [f"indiff:{name}" in golden.files for name in param.bottom]
    # Without a loss and without force_backward Caffe's net had nothing to do in backward.
    if net.force_backward or any(single.weights):
        given = [
            f"topdiff:{name}" for name in param.top
        ]  # absent where a top, such as a mask, takes no gradient
        top_diffs = (
            [golden[k] if k in golden.files else 0 for k in given]
            if not any(single.weights)
            else None
        )
        bottom_diffs, param_diffs = single.backward(top_diffs, wanted)
        for name, diff in zip(param.bottom, bottom_diffs, strict=True):
            if diff is not None:
                _compare(case, f"indiff:{name}", diff, golden)
        for k, diff in enumerate(param_diffs):
            _compare(case, f"paramdiff:{k}", diff, golden)


def _compare(case: str, key: str, answer: Array, golden: "np.lib.npyio.NpzFile") -> None:
    if key not in golden.files:
        return
    expected = golden[key]
    assert answer.shape == expected.shape, (
        f"{case}: {key} has shape {answer.shape}, Caffe's has {expected.shape}"
    )
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    wrong = ~np.isclose(answer, expected, rtol=2e-4, atol=2e-5 * scale)
    if wrong.any():
        index = tuple(np.argwhere(wrong)[0])
        at = [int(i) for i in index]
        raise AssertionError(
            f"{case}: {key}{at} is {answer[index]:.7g}, Caffe's {expected[index]:.7g}"
        )
