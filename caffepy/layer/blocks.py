"""Layers that move blocks of places to the batch or to the channels, and back, in nets from
TensorFlow and ONNX (Synopsys).
"""

from collections.abc import Sequence
from math import prod

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import BatchToSpaceNDParameter, SpaceToBatchNDParameter

# Of (N, H, b, W, b, C) and of (N, C, H, b, W, b) the axes that make (N, H, W, b, b, C) and
# (N, b, b, C, H, W), or (N, C, b, b, H, W).
TO_DEPTH = {
    "NHWC": (0, 1, 3, 2, 4, 5),
    "NCHW": (0, 3, 5, 1, 2, 4),
    "DCR": (0, 3, 5, 1, 2, 4),
    "CRD": (0, 1, 3, 5, 2, 4),
}


class _Blocks(Layer):
    """Base: the elements of `space`, whose blocks lie side by side, in another order in `apart`."""

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False
    blocks: tuple[int, ...]  # the shape of `space`, its axes parted into blocks and places
    order: tuple[int, ...]  # of the axes of `blocks`, those of `apart`

    def move(self, space: Array, apart: Array, to_apart: bool) -> None:
        """Copy in one direction; both are of equal sizes."""
        parts = space.reshape(self.blocks).transpose(self.order)
        there = apart.reshape(parts.shape)
        self.ops.copy(*((parts, there) if to_apart else (there, parts)))


class _OverBatch(_Blocks):
    """Base of the layers that move places (i, j) of blocks to images i * b + j times N."""

    def read(
        self,
        param: SpaceToBatchNDParameter | BatchToSpaceNDParameter,
        given: Sequence[int],
        axes: int,
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the block and the places before and behind each of its axes; ConfigError for other
        numbers of them than the bottom's axes take.
        """
        block = list(param.block_shape)
        if (
            not block
            or min(block) < 1
            or len(block) >= axes
            or len(given) not in (0, 2 * len(block))
        ):
            raise ConfigError(
                f"block_shape {block} must name sizes of some of the {axes - 1} axes behind the "
                f"first, and {list(given)} two numbers for each or none"
            )
        margins = list(given) or [0] * 2 * len(block)
        return block, list(zip(margins[::2], margins[1::2], strict=True))

    def plan(
        self, images: int, size: Sequence[int], block: Sequence[int], rest: Sequence[int]
    ) -> tuple[int, ...]:
        """Plan for `images` images of this size with their margins; return the shape apart."""
        if any(n < 1 or n % b for n, b in zip(size, block, strict=True)):
            raise ConfigError(f"planes of {list(size)} cannot be cut into blocks of {list(block)}")
        cut = [(n // b, b) for n, b in zip(size, block, strict=True)]
        self.blocks = (images, *(n for pair in cut for n in pair), *rest)
        axes = range(len(block))
        within, across = (2 * i + 2 for i in axes), (2 * i + 1 for i in axes)
        end = 2 * len(block) + 1
        self.order = (*within, 0, *across, *range(end, end + len(rest)))
        return (images * prod(block), *(n for n, _ in cut), *rest)

    def inside(self, size: Sequence[int], margins: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """Return where places of this size lie within their margins."""
        starts = zip(size, margins, strict=True)
        return (slice(None), *(slice(before, before + n) for n, (before, _) in starts))


@layer("SpaceToBatchND")
class SpaceToBatchND(_OverBatch):
    """(N, S.., ...) -> (b.. * N, (S + paddings) / b.., ...): every place of blocks of `block_shape`
    in images of its own, zeros around them.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.space_to_batch_nd_param, bottom[0].shape
        block, margins = self.read(param, param.paddings, len(shape))
        size, rest = shape[1 : len(block) + 1], shape[len(block) + 1 :]
        padded = [n + sum(margin) for n, margin in zip(size, margins, strict=True)]
        top[0].reshape(self.plan(shape[0], padded, block, rest))
        self.around = self.inside(size, margins)
        self.padded = None if list(size) == padded else self.buffer((shape[0], *padded, *rest))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x = bottom[0].data
        if self.padded is not None:
            self.ops.copy(x, self.padded.data[self.around])
            x = self.padded.data
        self.move(x, top[0].data, True)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        if self.padded is None:
            self.move(bottom[0].diff, top[0].diff, False)
        else:
            self.move(self.padded.diff, top[0].diff, False)
            self.ops.copy(self.padded.diff[self.around], bottom[0].diff)


@layer("BatchToSpaceND")
class BatchToSpaceND(_OverBatch):
    """(b.. * N, S.., ...) -> (N, S * b.. - crops, ...): the way back from SpaceToBatchND."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.batch_to_space_nd_param, bottom[0].shape
        block, margins = self.read(param, param.crops, len(shape))
        if shape[0] % prod(block):
            raise ConfigError(f"{shape[0]} images cannot be cut into blocks of {block}")
        images, rest = shape[0] // prod(block), shape[len(block) + 1 :]
        whole = [n * b for n, b in zip(shape[1:], block, strict=False)]
        self.plan(images, whole, block, rest)
        size = [n - sum(margin) for n, margin in zip(whole, margins, strict=True)]
        if min(size) < 1:
            raise ConfigError(f"crops {list(param.crops)} leave nothing of {whole}")
        top[0].reshape((images, *size, *rest))
        self.around = self.inside(size, margins)
        self.whole = None if size == whole else self.buffer((images, *whole, *rest))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.whole is None:
            self.move(top[0].data, bottom[0].data, False)
        else:
            self.move(self.whole.data, bottom[0].data, False)
            self.ops.copy(self.whole.data[self.around], top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        dy = top[0].diff
        if self.whole is not None:
            self.ops.copy(dy, self.whole.diff[self.around])
            dy = self.whole.diff
        self.move(dy, bottom[0].diff, True)


class _OverChannels(_Blocks):
    """Base of the layers that move the places of blocks to channels, in the order data_format."""

    def plan(self, shape: Sequence[int], size: int, format_: str) -> tuple[int, ...]:
        """Plan for images of this shape; return their shape apart."""
        channels_last = format_ == "NHWC"
        n, *rest = shape
        h, w, c = rest if channels_last else (*rest[1:], rest[0])
        if h % size or w % size:
            raise ConfigError(f"planes of {h}x{w} cannot be cut into blocks of {size}x{size}")
        h, w, self.order = h // size, w // size, TO_DEPTH[format_]
        planes = (h, size, w, size)
        self.blocks = (n, *planes, c) if channels_last else (n, c, *planes)
        deep = c * size * size
        return (n, h, w, deep) if channels_last else (n, deep, h, w)

    def check(self, bottom: Blobs, size: int, format_: str) -> None:
        """ConfigError for what is no image, block or order."""
        if len(bottom[0].shape) != 4 or size < 1 or format_ not in TO_DEPTH:
            raise ConfigError(
                f"{self.type} needs a bottom with 4 axes, not {list(bottom[0].shape)}, a "
                f"block_size of 1 or more, not {size}, and as data_format one of "
                f"{', '.join(TO_DEPTH)}, not {format_!r}"
            )


@layer("SpaceToDepth")
class SpaceToDepth(_OverChannels):
    """(N, H, W, C) -> (N, H / b, W / b, b * b * C), or with data_format NCHW, or DCR, (N, C, H, W)
    -> (N, b * b * C, H / b, W / b), with CRD (N, C * b * b, ...).
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.space_to_depth_param
        self.check(bottom, param.block_size, param.data_format)
        top[0].reshape(self.plan(bottom[0].shape, param.block_size, param.data_format))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.move(bottom[0].data, top[0].data, True)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.move(bottom[0].diff, top[0].diff, False)


@layer("DepthToSpace")
class DepthToSpace(_OverChannels):
    """(N, H, W, b * b * C) -> (N, H * b, W * b, C), or as data_format says: the way back from
    SpaceToDepth.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.depth_to_space_param
        size, format_ = param.block_size, param.data_format
        self.check(bottom, size, format_)
        n, *rest = bottom[0].shape
        h, w, deep = rest if format_ == "NHWC" else (*rest[1:], rest[0])
        if deep % size**2:
            raise ConfigError(f"{deep} channels cannot be laid out as blocks of {size}x{size}")
        h, w, c = h * size, w * size, deep // size**2
        top[0].reshape((n, h, w, c) if format_ == "NHWC" else (n, c, h, w))
        self.plan(top[0].shape, size, format_)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.move(top[0].data, bottom[0].data, False)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.move(top[0].diff, bottom[0].diff, True)
