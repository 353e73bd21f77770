"""Gradients of weights that every rank makes from the factors of all, which are smaller than the
gradients.

The gradient of a fully connected layer's weight is dy.T @ x: (O, K) elements made of (M, O) and (M,
K), of a batch of M. The sum over the batches of all ranks is the same product of their factors,
laid one below the other: exact, and the same on all ranks. This is sufficient factor broadcasting
(Xie et al., 2016; Zhang et al., "Poseidon", 2017).
"""

from collections.abc import Callable, Sequence
from functools import partial

from caffepy.core.errors import SyncError
from caffepy.device.blob import Array, Blob
from caffepy.layer.inner_product import InnerProduct
from caffepy.net import Net
from caffepy.net.gradients import large_products

WORTH = {"fp32": 80, "tf32": 250, "bf16": 1000, "fp16": 1000}
"""Operations that hold up a GPU as long as a byte of an all-reduce beside the backward pass, by
precision.

So that on four H200 those nets exchange factors that gain by it: caffenet and vgg16 in bf16, vgg16
in tf32.
"""

LANE = "factors"
"""Where a device multiplies factors, beside the backward pass and beside what waits for other
ranks.
"""


def factored(net: Net, size: int, precision: str) -> dict[int, InnerProduct]:
    """The layers whose weight's gradient `size` ranks had better make so, by the number of the
    learnable parameter.
    """
    batches = {
        tops[0].shape[:1]
        for layer, tops in zip(net.layers, net.tops, strict=True)
        if layer.is_data and tops
    }
    if len(batches) != 1 or any(
        layer.always_reshape or not layer.fixed_batch for layer in net.layers
    ):
        return {}
    return {
        number: layer
        for number, layer in large_products(net).items()
        if layer.axis == 1
        and (layer.rows,) in batches
        and pays(
            layer.rows, layer.outputs, layer.inputs, layer.narrow_dy.dtype.itemsize, size, precision
        )
    }


def pays(rows: int, outputs: int, inputs: int, itemsize: int, size: int, precision: str) -> bool:
    """Whether the operations that every rank does for the others cost less than the bytes that need
    not be sent.
    """
    gradient = 4 * outputs * inputs
    reduced = 2 * (size - 1) * gradient // size
    gathered = (size - 1) * rows * (outputs + inputs) * itemsize
    operations = 2 * (size - 1) * rows * outputs * inputs
    return operations < WORTH[precision] * (reduced - gathered)


class Factors:
    """One rank's side for these layers of a net, which are in the same order in all ranks.

    `gather` lets arrays whose rank-th part is this rank's be all ranks' parts.
    """

    def __init__(
        self,
        layers: Sequence[InnerProduct],
        rank: int,
        size: int,
        gather: Callable[[Sequence[Array]], None],
    ) -> None:
        self._layers, self._rank, self._size, self._gather = layers, rank, size, gather
        self._all: dict[InnerProduct, tuple[Blob, Blob]] = {}  # dy and x of all ranks
        for layer in layers:
            layer.factors = partial(self._take, layer)

    def _take(self, layer: InnerProduct, dy: Array, x: Array) -> None:
        """Keep this rank's factors of a layer; SyncError if they are not as many as those before."""
        if layer not in self._all:
            dys, xs = (layer.buffer((self._size, *a.shape), a.dtype) for a in (dy, x))
            self._all[layer] = dys, xs
        for blob, mine in zip(self._all[layer], (dy, x), strict=True):
            _, *before = blob.shape
            if before != [*mine.shape]:
                raise SyncError(
                    f'layer "{layer.param.name}": a batch of {mine.shape[0]} follows one of {before[0]}, but solvers '
                    "that train together need batches of one size"
                )
            blob.data[self._rank] = mine

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of dy and x of all layers that have run backward, which must be the same in all
        ranks.
        """
        return [blob.shape for layer in self._layers for blob in self._all.get(layer, ())]

    def exchange(self) -> None:
        """When all layers have run backward, their gradients become the mean over all ranks of dy.T
        @ x.

        In one call for all, as what waits for other ranks keeps a GPU from other work. LANE is to
        be joined after that.
        """
        device = self._layers[0].device
        with device.side_stream("sync"):
            self._gather([blob.data for layer in self._layers for blob in self._all[layer]])
        with device.side_stream(LANE, after="sync"):
            for layer in self._layers:
                dys, xs = (blob.data.reshape(-1, blob.shape[-1]) for blob in self._all[layer])
                layer.weight_gradient(dys, xs, False, 1 / self._size)

    def close(self) -> None:
        """Let the layers make their gradients by themselves again."""
        for layer in self._layers:
            layer.factors = None
