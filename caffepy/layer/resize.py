"""Layers of forks that make images larger or smaller: Interp, the two Upsample, Unpooling, and
those of nets from TensorFlow and ONNX.
"""

import logging
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import MAX_COUNT, Array, Blob
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import ResizingParameter, UnpoolingParameter, UpsampleParameter

log = logging.getLogger(__name__)


@layer("Interp")
class Interp(Layer):
    """(N, C, H, W) -> (N, C, Ho, Wo), bilinear with aligned corners (PSPNet, DeepLab).

    pad_beg and pad_end, 0 or less, crop both axes first. The size is height and width, or
    (size - 1) / shrink_factor + 1, then size + (size - 1) * (zoom_factor - 1), or with
    use_blob_size that of a second bottom.
    """

    on_gpu = True
    can_recompute = True
    bottoms = (1, 2)
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.interp_param
        if param.pad_beg > 0 or param.pad_end > 0:
            raise ConfigError("interp_param: pad_beg and pad_end crop; they must be 0 or less")
        if param.shrink_factor < 1 or param.zoom_factor < 1:
            raise ConfigError("interp_param: shrink_factor and zoom_factor must be 1 or more")
        if param.use_blob_size != (len(bottom) > 1):
            raise ConfigError("interp_param: use_blob_size goes with a second bottom")
        factor = param.HasField("shrink_factor") or param.HasField("zoom_factor")
        sized = factor or param.use_blob_size
        if not sized and not (param.HasField("height") and param.HasField("width")):
            raise ConfigError(
                "interp_param needs height and width, a shrink_factor or a zoom_factor"
            )

    def target(self, size: int, given: int) -> int:
        """Return the size of the top for this size of the cropped bottom."""
        param = self.param.interp_param
        shrinks, zooms = param.HasField("shrink_factor"), param.HasField("zoom_factor")
        if param.HasField("height") and param.HasField("width") and shrinks == zooms:
            return given
        if shrinks:
            size = (size - 1) // param.shrink_factor + 1
        return size + (size - 1) * (param.zoom_factor - 1) if zooms else size

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.interp_param
        if len(bottom[0].shape) != 4:
            raise ConfigError(f"Interp needs (N, C, H, W), not {list(bottom[0].shape)}")
        n, c, *size = bottom[0].shape
        self.cropped = [s + param.pad_beg + param.pad_end for s in size]
        given = param.height, param.width
        out = [self.target(*pair) for pair in zip(self.cropped, given, strict=True)]
        if param.use_blob_size:
            out = list(bottom[1].shape[2:])
            if len(out) != 2:
                raise ConfigError(f"Interp needs the size (N, C, H, W), not {bottom[1].shape}")
        if min(*self.cropped, *out) < 1:
            raise ConfigError(
                f"interp_param makes {out[0]}x{out[1]} of {size[0]}x{size[1]}, cropped to "
                f"{self.cropped[0]}x{self.cropped[1]}"
            )
        top[0].reshape((n, c, *out))
        self.crops = self.cropped != size
        if self.crops:
            self.inside = self.buffer((n, c, *self.cropped))
            start = -param.pad_beg
            self.window: tuple[Any, ...] = (
                ...,
                *(slice(start, start + s) for s in self.cropped),
            )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = bottom[0].data, top[0].data
        if self.crops:
            self.ops.copy(x[self.window], self.inside.data)
            x = self.inside.data
        if x.shape == y.shape:
            self.ops.copy(x, y)
        else:
            self.ops.interp_forward(self.planes(x), self.planes(y))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is the transpose of forward; the size has no gradient."""
        if any(propagate_down[1:]):
            bottom[1].diff.fill(0)
        if not propagate_down[0]:
            return
        dy, dx = top[0].diff, bottom[0].diff
        inside = self.inside.data if self.crops else dx
        if inside.shape == dy.shape:
            self.ops.copy(dy, inside)
        else:
            self.ops.interp_backward(self.planes(dy), self.planes(inside))
        if self.crops:
            dx.fill(0)
            self.ops.copy(inside, dx[self.window])

    @staticmethod
    def planes(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])


def planes(x: Array) -> Array:
    """Return the planes of x (N, C, H, W) as rows (N * C, H * W)."""
    return x.reshape(prod(x.shape[:2]), prod(x.shape[2:]))


@layer("Upsample")
class Upsample(Layer):
    """(N, C, H, W) -> (N, C, Ho, Wo).

    With one bottom each element becomes scale x scale (MobileNet-YOLO), or with `mode: NEAREST`
    height_scale x width_scale, 2 unless given (yolov5_caffe). With two, SegNet's: the second has
    the place h * Wo + w of each value in its plane, as the second top of a Pooling layer gives it;
    the rest is 0. Ho x Wo is upsample_h x upsample_w, or scale * size - pad_out.
    """

    on_gpu = True
    can_recompute = True
    bottoms = (1, 2)
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.upsample_param
        self.by_place = self.backward_reads_bottom = len(bottom) > 1
        named, scale = ("scale_h", "scale_w"), 2 if self.by_place else 1
        if any(param.HasField(name) for name in ("height_scale", "width_scale", "mode")):
            if self.by_place or param.mode != UpsampleParameter.NEAREST:
                raise ConfigError(
                    "upsample_param: height_scale and width_scale are for one bottom and mode: "
                    "NEAREST; for others write an Interp layer"
                )
            named, scale = ("height_scale", "width_scale"), 2
        scale = param.scale if param.HasField("scale") else scale
        self.scales = [getattr(param, name) if param.HasField(name) else scale for name in named]
        if min(self.scales) < 1:
            raise ConfigError("upsample_param: scale must be 1 or more")
        given = (param.upsample_h, param.upsample_w)
        self.given = list(given) if self.by_place and min(given) > 1 else None
        self.pads = [int(param.pad_out_h), int(param.pad_out_w)]
        if any(self.pads) and (self.scales != [2, 2] or not self.by_place):
            raise ConfigError(
                "upsample_param: pad_out_h and pad_out_w are for a scale of 2 and two bottoms"
            )
        self.outside = self.error_flag(
            lambda place: DataError(f"place {place:g} lies outside the plane of the top")
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4:
            raise ConfigError(f"Upsample needs (N, C, H, W), not {list(shape)}")
        n, c, *size = shape
        if self.by_place and bottom[1].shape != shape:
            raise ConfigError(
                f"bottom 1 has shape {list(bottom[1].shape)}, bottom 0 has {list(shape)}"
            )
        scaled = [s * f - p for s, f, p in zip(size, self.scales, self.pads, strict=True)]
        top[0].reshape((n, c, *(self.given or scaled)))
        if self.by_place:
            planes = n * c
            self.rows = self.buffer((planes, 1), np.int64)
            self.rows.host_data[...] = np.arange(planes)[:, None]

    def places(self, bottom: Blobs) -> tuple[Array, Array]:
        """Return (rows, places) of the values in planes, to index the flat planes of the top."""
        rows = self.rows.data
        return rows, planes(bottom[1].data).astype(np.int64)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = bottom[0].data, top[0].data
        if not self.by_place:
            n, c, h, w = x.shape
            down, right = self.scales
            y.reshape(n, c, h, down, w, right)[...] = x[:, :, :, None, :, None]
            return
        places, end = bottom[1].data, prod(y.shape[2:])
        self.outside.set_where(~((places >= 0) & (places < end)), places)
        self.outside.check()
        y.fill(0)
        rows, columns = self.places(bottom)
        planes(y)[rows, np.clip(columns, 0, end - 1)] = planes(x)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is dy at the value's place, also where two values share one, as SegNet's; 0 for the
        places. With one bottom it is the sum over the block.
        """
        if self.by_place and propagate_down[1]:
            bottom[1].diff.fill(0)
        if not propagate_down[0]:
            return
        dy, dx = top[0].diff, bottom[0].diff
        if self.by_place:
            rows, columns = self.places(bottom)
            planes(dx)[...] = planes(dy)[rows, columns]
        else:
            n, c, h, w = dx.shape
            down, right = self.scales
            np.sum(dy.reshape(n, c, h, down, w, right), axis=(3, 5), out=dx)


@layer("Unpooling")
class Unpooling(Layer):
    """(N, C, H, W) -> (N, C, Ho, Wo), DeconvNet's (Noh et al. 2015).

    MAX puts each value at the place h * Wo + w of its plane that the second bottom gives, as the
    second top of a Pooling layer does, or at its own place times the stride; the rest is 0. TILE
    adds it to each element of its window, AVE its share of that. Ho x Wo is unpool_h x unpool_w, or
    the largest of (H - 1) * stride + kernel and H * stride + 1, as in the fork.
    """

    on_gpu = True
    bottoms = (1, 2)
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.unpooling_param
        pairs = {"kernel": (param.kernel_h, param.kernel_w), "stride": (1, 1)}
        if param.HasField("kernel_size") == (min(pairs["kernel"]) > 0):
            raise ConfigError("unpooling_param needs a kernel_size, or a kernel_h and a kernel_w")
        self.kernel = [param.kernel_size] * 2 if param.kernel_size else list(pairs["kernel"])
        by_axis = param.HasField("stride_h") or param.HasField("stride_w")
        self.stride = [param.stride_h, param.stride_w] if by_axis else [param.stride] * 2
        if min(*self.kernel, *self.stride) < 1:
            raise ConfigError("unpooling_param: kernel and stride must be 1 or more")
        if param.pad or param.pad_h or param.pad_w:
            raise ConfigError("unpooling_param: only a pad of 0 is known, as in the fork")
        size = [param.unpool_size] * 2 if param.unpool_size else [param.unpool_h, param.unpool_w]
        self.given = size if min(size) > 0 else None
        self.method = param.unpool
        self.moves = self.method == UnpoolingParameter.MAX
        self.backward_reads_bottom = len(bottom) > 1
        if self.method == UnpoolingParameter.TILE:
            log.info("Unpooling: its gradient is the mean over the window, as in the fork")
        self.outside = self.error_flag(
            lambda place: DataError(f"place {place:g} lies outside the plane of the top")
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4:
            raise ConfigError(f"Unpooling needs (N, C, H, W), not {list(shape)}")
        if len(bottom) > 1 and bottom[1].shape != shape:
            raise ConfigError(
                f"bottom 1 has shape {list(bottom[1].shape)}, bottom 0 has {list(shape)}"
            )
        n, c, *size = shape
        whole = zip(size, self.kernel, self.stride, strict=True)
        out = self.given or [max((s - 1) * by + k, s * by + 1) for s, k, by in whole]
        top[0].reshape((n, c, *out))
        starts = [
            np.minimum(np.arange(s) * by, o - 1)
            for s, by, o in zip(size, self.stride, out, strict=True)
        ]
        if self.moves:
            self.rows, self.places = (
                self.buffer(x, np.int64) for x in ((n * c, 1), (1, prod(size)))
            )
            self.rows.host_data[...] = np.arange(n * c)[:, None]
            own = np.add.outer(starts[0] * out[1], starts[1]).reshape(1, -1)
            self.places.host_data[...] = own
            _, last = np.unique(own[0, ::-1], return_index=True)  # of those that share a place
            self.kept = self.buffer(last.shape, np.int64)
            self.kept.host_data[...] = prod(size) - 1 - last
            return
        # the elements of the window of each value: the first of them, and how many there are
        counts = [
            np.maximum(np.minimum(np.arange(s) * by + k, o) - np.arange(s) * by, 0)
            for s, k, by, o in zip(size, self.kernel, self.stride, out, strict=True)
        ]
        self.share = self.buffer(size)
        self.share.host_data[...] = 1 / np.maximum(np.multiply.outer(*counts), 1)

    def indices(self, bottom: Blobs, end: int) -> tuple[Array, Array]:
        """Return rows (N C, 1) and places (N C or 1, H W) in the top's planes (N C, `end`)."""
        rows = self.rows.data
        if len(bottom) == 1:
            return rows, self.places.data
        places = planes(bottom[1].data)
        return rows, np.clip(places, 0, end - 1).astype(np.int64)

    def windows(self, y: Array, x: Array) -> Iterator[tuple[Array, Array]]:
        """Yield, for each place in a window, the elements of y (N, C, Ho, Wo) that lie there, and
        the values of x (N, C, H, W) they are of; what lies outside y is left out.
        """
        (kh, kw), (down, right) = self.kernel, self.stride
        for i, j in np.ndindex(kh, kw):
            part = y[:, :, i::down, j::right][:, :, : x.shape[2], : x.shape[3]]
            yield part, x[:, :, : part.shape[2], : part.shape[3]]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = bottom[0].data, top[0].data
        y.fill(0)
        if not self.moves:
            values = x * self.share.data if self.method == UnpoolingParameter.AVE else x
            for part, of in self.windows(y, values):
                np.add(part, of, out=part)
            return
        end = prod(y.shape[2:])
        if len(bottom) > 1:
            places = bottom[1].data
            self.outside.set_where(~((places >= 0) & (places < end)), places)
            self.outside.check()
        rows, columns = self.indices(bottom, end)
        values = planes(x)
        if len(bottom) == 1:
            columns, values = columns[:, self.kept.data], values[:, self.kept.data]
        planes(y)[rows, columns] = values

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is dy at the value's place, also where two values share one, or the mean of dy over
        its window: of TILE, too, as in the fork. Places get 0.
        """
        if len(bottom) > 1 and propagate_down[1]:
            bottom[1].diff.fill(0)
        if not propagate_down[0]:
            return
        dy, dx = top[0].diff, bottom[0].diff
        if self.moves:
            rows, columns = self.indices(bottom, prod(dy.shape[2:]))
            planes(dx)[...] = planes(dy)[rows, columns]
            return
        dx.fill(0)
        for part, of in self.windows(dy, dx):
            np.add(of, part, out=of)
        np.multiply(dx, self.share.data, out=dx)


class _Table:
    """Sums of elements along an axis: output i is the sum of share[k, i] * x[place[k, i]] over k.

    The transpose is a table, too, of as many terms as the most that read one element.
    """

    def __init__(self, layer: Layer, terms: Sequence[tuple[Array, Array]], size: int) -> None:
        """Make both of (places, shares), a term each, of an axis of this size."""
        places, shares = (np.stack(column) for column in zip(*terms, strict=True))
        self.forward = self._upload(layer, places, shares)
        readers: list[list[tuple[int, float]]] = [[] for _ in range(size)]
        for k, i in np.ndindex(*places.shape):
            readers[places[k, i]].append((i, float(shares[k, i])))
        most = max(map(len, readers))
        rows = [row + [(0, 0.0)] * (most - len(row)) for row in readers]
        table = np.array(rows).reshape(size, most, 2).transpose(2, 1, 0)
        self.backward = self._upload(layer, table[0].astype(np.int64), table[1])

    def _upload(self, layer: Layer, places: Array, shares: Array) -> list[tuple[Blob, Blob]]:
        terms = []
        for place, share in zip(places, shares, strict=True):
            blobs = layer.buffer(place.shape, np.int64), layer.buffer(share.shape)
            blobs[0].host_data[...], blobs[1].host_data[...] = place, share
            terms.append(blobs)
        return terms


class _Resizing(Layer):
    """Base of layers that resize two axes, each separately; gradients are exact."""

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False

    def settings(self) -> ResizingParameter:
        raise NotImplementedError

    def terms(self, size: int, out: int) -> list[tuple[Array, Array]]:
        """Return the places that each output reads along an axis, and their shares."""
        raise NotImplementedError

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings()
        names = ("align_corners", "half_pixel_centers", "pytorch_half_pixel", "half_pixel_onnx")
        if sum(getattr(param, name) for name in names) > 1:
            raise ConfigError(f"{', '.join(names)} exclude each other")
        if param.data_format not in ("NHWC", "NCHW"):
            raise ConfigError(f"data_format must be NHWC or NCHW, not {param.data_format!r}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.settings(), list(bottom[0].shape)
        if len(shape) != 4:
            raise ConfigError(f"{self.type} needs a bottom with 4 axes, not {shape}")
        self.axes = (1, 2) if param.data_format == "NHWC" else (2, 3)
        out = list(shape)
        for axis, name in zip(self.axes, ("height", "width"), strict=True):
            scale = getattr(param, f"scale_{name}")
            if not abs(scale) < MAX_COUNT:
                raise ConfigError(f"scale_{name} {scale:g} is too large")
            scaled = int(np.float32(shape[axis]) * np.float32(scale))
            given = param.HasField(f"output_{name}")
            out[axis] = getattr(param, f"output_{name}") if given else scaled
        if min(out) < 1:
            raise ConfigError(f"{out[self.axes[0]]}x{out[self.axes[1]]} is no size of an image")
        top[0].reshape(out)
        sizes = [(shape[axis], out[axis]) for axis in self.axes]
        self.tables = [_Table(self, self.terms(*size), size[0]) for size in sizes]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        down, right = self.tables
        rows = self.summed(bottom[0].data, down.forward, self.axes[0])
        top[0].data[...] = self.summed(rows, right.forward, self.axes[1])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            down, right = self.tables
            rows = self.summed(top[0].diff, right.backward, self.axes[1])
            bottom[0].diff[...] = self.summed(rows, down.backward, self.axes[0])

    @staticmethod
    def summed(x: Array, terms: Sequence[tuple[Blob, Blob]], axis: int) -> Array:
        """Return the sum of the terms along an axis of x."""
        behind = (1,) * (x.ndim - 1 - axis)
        parts = (x.take(p.data, axis) * s.data.reshape(-1, *behind) for p, s in terms)
        total = next(parts)
        for part in parts:
            total += part
        return total


@layer("ResizeBilinear")
class ResizeBilinear(_Resizing):
    """(N, H, W, C) -> (N, Ho, Wo, C), or NCHW by data_format: bilinear, as TensorFlow and ONNX
    do it.

    An output i reads at i * H / Ho, with half_pixel_centers (or pytorch_half_pixel) at (i + 0.5) *
    H / Ho - 0.5, with align_corners at i * (H - 1) / (Ho - 1). Ho is output_height or
    scale_height * H.
    """

    def settings(self) -> ResizingParameter:
        return self.param.resize_bilinear_param

    def terms(self, size: int, out: int) -> list[tuple[Array, Array]]:
        param, i = self.settings(), np.arange(out, dtype=np.float32)
        half = np.float32(0.5)
        step = _step(size, out, param.align_corners)
        places = i * step
        if param.half_pixel_centers or param.pytorch_half_pixel:
            places = (i + half) * step - half
            if param.pytorch_half_pixel and out == 1:
                places[:] = -half
        first = np.floor(places)
        low = np.maximum(first, 0).astype(np.int64)
        high = np.minimum(np.ceil(places), size - 1).astype(np.int64)
        share = places - first
        return [(low, 1 - share), (high, share)]


@layer("ResizeNearestNeighbor")
class ResizeNearestNeighbor(_Resizing):
    """(N, H, W, C) -> (N, Ho, Wo, C), or NCHW by data_format: nearest elements, as TensorFlow and
    ONNX have them.

    An output i is element floor(i * H / Ho), with half_pixel_centers floor((i + 0.5) * H / Ho),
    with half_pixel_onnx floor((i + 0.5) * H / Ho - 0.5), with align_corners the nearest to
    i * (H - 1) / (Ho - 1). Ho is output_height or scale_height * H.
    """

    def settings(self) -> ResizingParameter:
        return self.param.resize_nearest_neighbor_param

    def terms(self, size: int, out: int) -> list[tuple[Array, Array]]:
        param, i = self.settings(), np.arange(out, dtype=np.float32)
        half = np.float32(0.5)
        step = _step(size, out, param.align_corners)
        if param.align_corners:
            places = np.floor(i * step + half)
        elif param.half_pixel_centers:
            places = np.floor((i + half) * step)
        elif param.half_pixel_onnx:
            places = np.floor((i + half) * step - half)
        else:
            places = np.floor(i * step)
        return [(np.clip(places, 0, size - 1).astype(np.int64), np.ones(out))]


def _step(size: int, out: int, align_corners: bool) -> np.float32:
    """Return the step in the input for one in the output."""
    if align_corners and out > 1:
        return np.float32(size - 1) / np.float32(out - 1)
    return np.float32(size) / np.float32(out)


@layer("UpsampleDarknet")
class UpsampleDarknet(Upsample):
    """(N, C, H, W) -> (N, C, stride * H, stride * W): blocks of equal values (Synopsys)."""

    bottoms = (1, 1)
    backward_reads_bottom = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        stride = self.param.upsample_darknet_param.stride
        if stride < 1:
            raise ConfigError(f"upsample_darknet_param: stride must be 1 or more, not {stride}")
        self.by_place, self.given = False, None
        self.scales, self.pads = [stride, stride], [0, 0]
