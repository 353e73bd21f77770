"""Gradients of weights that every rank makes from the factors of all, which are smaller than the gradients.

The gradient of a fully connected layer's weight is dy.T @ x: (O, K) elements made of (M, O) and (M, K), of a batch of
M. The sum over the batches of all ranks is the same product of their factors, laid one below the other: exact, and the
same on all ranks. This is sufficient factor broadcasting (Xie et al., 2016; Zhang et al., "Poseidon", 2017).
"""

from collections.abc import Callable, Sequence
from functools import partial

from caffepy.blob import Array, Blob
from caffepy.layer.inner_product import InnerProduct
from caffepy.net import Net
from caffepy.net.gradients import large_products

WORTH = {"fp32": 80, "tf32": 250, "bf16": 1000, "fp16": 1000}
"""Operations that hold up a GPU as long as a byte of an all-reduce beside the backward pass, by precision.

Tensor cores do twice as many in the time of a byte on wires of 300 GB/s, which other work hides in part.
"""

LANE = "factors"
"""Where a device multiplies, beside the backward pass and what other ranks are waited for."""

FIXED = frozenset({"Data", "DummyData", "HDF5Data", "ImageData", "WindowData"})
"""Layers whose batches keep their size, as they must, to be the same in all ranks."""


def factored(net: Net, size: int, precision: str) -> dict[int, InnerProduct]:
    """The layers whose weight's gradient `size` ranks had better make so, by the number of the learnable parameter."""
    if any(layer.always_reshape or (layer.is_data and layer.type not in FIXED) for layer in net.layers):
        return {}
    return {
        number: layer
        for number, layer in large_products(net).items()
        if pays(layer.rows, layer.outputs, layer.inputs, layer.narrow_dy.dtype.itemsize, size, precision)
    }


def pays(rows: int, outputs: int, inputs: int, itemsize: int, size: int, precision: str) -> bool:
    """Whether the operations that every rank does for the others cost less than the bytes that need not be sent."""
    gradient = 4 * outputs * inputs
    reduced = 2 * (size - 1) * gradient // size
    gathered = (size - 1) * rows * (outputs + inputs) * itemsize
    operations = 2 * (size - 1) * rows * outputs * inputs
    return operations < WORTH[precision] * (reduced - gathered)


class Factors:
    """One rank's side for these layers of a net, in its order.

    `gather` lets arrays whose rank-th part is this rank's be all ranks' parts. It is called once in a backward pass, as
    what waits for other ranks keeps a GPU from other work.
    """

    def __init__(
        self, layers: Sequence[InnerProduct], rank: int, size: int, gather: Callable[[Sequence[Array]], None]
    ) -> None:
        self._layers, self._rank, self._size, self._gather = layers, rank, size, gather
        self._all: dict[InnerProduct, tuple[Blob, Blob]] = {}  # dy and x of all ranks
        for layer in layers:
            layer.factors = partial(self._take, layer)

    def _take(self, layer: InnerProduct, dy: Array, x: Array) -> None:
        """Keep a layer's factors; those of the first layer are the last that are missing."""
        if layer not in self._all:
            dys, xs = (layer.buffer((self._size, *a.shape), a.dtype) for a in (dy, x))
            self._all[layer] = dys, xs
        for blob, mine in zip(self._all[layer], (dy, x), strict=True):
            blob.data[self._rank] = mine
        if layer is self._layers[0]:
            with layer.device.aside("sync"):
                self._gather([blob.data for factors in self._all.values() for blob in factors])
            with layer.device.aside(LANE, after="sync"):
                self._multiply()

    def _multiply(self) -> None:
        """Add the mean over all ranks of dy.T @ x to the gradient of each layer."""
        for layer, factors in self._all.items():
            dys, xs = (blob.data.reshape(-1, blob.shape[-1]) for blob in factors)
            layer.add_gradient(dys, xs, 1 / self._size)

    def close(self) -> None:
        """Let the layers make their gradients by themselves again."""
        for layer in self._layers:
            layer.factors = None
