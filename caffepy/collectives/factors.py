"""Weight gradients that every rank computes from the factors of all ranks, which are smaller.

The gradient of a fully connected layer's weight is dy.T @ x: (O, K) elements made of (M, O) and (M,
K), of a batch of M. The sum over the batches of all ranks is the same product of their factors,
laid one below the other: exact, and the same on all ranks. This is sufficient factor broadcasting
(Xie et al., 2016; Zhang et al., "Poseidon", 2017).

Both ways take time in a host and between hosts, one beside the other. With M hosts of G ranks, a
gradient of n bytes, f bytes of a rank's factors, B and b bytes a second of a GPU in its host and to
others:

                in a host          between hosts
    all-reduce  2 (G - 1)/G n/B    2 (M - 1)/M n/(G b)
    all-gather  (G M - 1) f/B      (M - 1) f/b
    together    the longer of both and a tenth of the shorter

Factors of few hosts are much smaller than the gradient, those of many are larger.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from caffepy.core.errors import SyncError
from caffepy.device.blob import Array, Blob
from caffepy.layer.inner_product import InnerProduct
from caffepy.net import Net
from caffepy.net.gradients import large_products

WORTH = {"fp32": 80, "tf32": 250, "bf16": 1000, "fp16": 1000}
"""Operations that cost a GPU as much time as a byte of an all-reduce during the backward pass, by
precision.

Chosen on four H200, so that the nets that gain by it exchange factors: caffenet and vgg16 in bf16,
vgg16 in tf32.
"""

IN_HOST = 370e9
"""Bytes a second of an all-reduce to and from each GPU of a host: NVLink of an H200."""

STREAM = "factors"
"""The stream that multiplies factors: not the backward pass's, nor the one that waits for ranks."""


def together(inside: float, outside: float) -> float:
    """Return the seconds of what takes `inside` in a host and `outside` between hosts, one beside
    the other: the longer of both and a tenth of the shorter.
    """
    both = inside, outside
    return max(both) + 0.1 * min(both)


class Ranks(NamedTuple):
    """`size` ranks on `hosts` hosts; `bandwidth` is in bytes a second from a GPU to other hosts
    while all of a host send, `width` the bytes of an element of gradients in an all-reduce.
    """

    size: int
    hosts: int = 1
    bandwidth: float = IN_HOST
    width: int = 4

    def seconds(self, inside: float, outside: float) -> float:
        """Return the seconds of `inside` bytes of a GPU in its host and `outside` to others."""
        return together(inside / IN_HOST, outside / self.bandwidth)


def factored(net: Net, ranks: Ranks, precision: str) -> dict[int, InnerProduct]:
    """Return the layers whose factors the ranks should exchange, by learnable parameter."""
    batches = {node.tops[0].shape[:1] for node in net.nodes if node.layer.is_data and node.tops}
    if len(batches) != 1 or any(
        layer.always_reshape or not layer.fixed_batch for layer in net.layers
    ):
        return {}
    found = {}
    for number, layer in large_products(net).items():
        rows, itemsize = layer.rows, layer.narrow_dy.dtype.itemsize
        one_each = layer.axis == 1 and (rows,) in batches
        if one_each and pays(rows, layer.outputs, layer.inputs, itemsize, ranks, precision):
            found[number] = layer
    return found


def pays(rows: int, outputs: int, inputs: int, itemsize: int, ranks: Ranks, precision: str) -> bool:
    """True if the operations that each rank does for the others take less time than is saved."""
    size, hosts = ranks.size, ranks.hosts
    gpus = size / hosts
    gradient = ranks.width * outputs * inputs
    own = rows * (outputs + inputs) * itemsize
    reduced = ranks.seconds(
        2 * (gpus - 1) / gpus * gradient, 2 * (hosts - 1) / hosts * gradient / gpus
    )
    gathered = ranks.seconds((size - 1) * own, (hosts - 1) * own)
    operations = 2 * (size - 1) * rows * outputs * inputs
    return operations < WORTH[precision] * IN_HOST * (reduced - gathered)


class Factors:
    """One rank's factors of these layers, which all ranks have in the same order.

    `gather` begins an all-gather in place, of arrays of which this rank has written its own part;
    after `arrive` the others' are there.
    """

    def __init__(
        self,
        layers: Sequence[InnerProduct],
        rank: int,
        size: int,
        gather: Callable[[Sequence[Array]], None],
        arrive: Callable[[], None],
    ) -> None:
        self._layers, self._rank, self._size = layers, rank, size
        self._gather, self._arrive = gather, arrive
        self._all: dict[InnerProduct, tuple[Blob, Blob]] = {}  # dy and x of all ranks
        for layer in layers:
            layer.factors = partial(self._take, layer)

    def _take(self, layer: InnerProduct, dy: Array, x: Array) -> None:
        """Keep this rank's factors of a layer; SyncError if the batch has changed its size."""
        if layer not in self._all:
            dys, xs = (layer.buffer((self._size, *a.shape), a.dtype) for a in (dy, x))
            self._all[layer] = dys, xs
        for blob, mine in zip(self._all[layer], (dy, x), strict=True):
            _, *before = blob.shape
            if before != [*mine.shape]:
                raise SyncError(
                    f'layer "{layer.param.name}": a batch of {mine.shape[0]} follows one of '
                    f"{before[0]}, but solvers that train together need batches of one size"
                )
            blob.data[self._rank] = mine

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of dy and x of the layers that have run backward; equal in all ranks."""
        return [blob.shape for layer in self._layers for blob in self._all.get(layer, ())]

    def exchange(self) -> None:
        """Make the gradients of all layers, which have run backward, the mean of dy.T @ x; layers
        that `update` updates need none.

        All factors go in one launch, since a GPU that waits for other ranks does nothing else. The
        caller waits for STREAM.
        """
        device = self._layers[0].device
        with device.side_stream("sync", "layer"):
            self._gather([blob.data for layer in self._layers for blob in self._all[layer]])
        with device.side_stream(STREAM, "sync"):
            self._arrive()
            for layer in self._layers:
                if layer.update is None:
                    layer.weight_gradient(*self._of_all(layer), False, 1 / self._size)

    def update(self) -> None:
        """Update weights of layers that have `InnerProduct.update`, with the sum of dy.T @ x."""
        for layer in self._layers:
            if layer.update is not None:
                layer.update(*layer.gradient_factors(*self._of_all(layer)))

    def _of_all(self, layer: InnerProduct) -> tuple[Array, Array]:
        """Return dy and x of all ranks, one below the other."""
        dys, xs = (blob.data.reshape(-1, blob.shape[-1]) for blob in self._all[layer])
        return dys, xs

    def close(self) -> None:
        """Make the layers compute their own gradients again."""
        for layer in self._layers:
            layer.factors = None
