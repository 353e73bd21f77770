"""pycaffe's `caffe.io`: images (H, W, K) and as nets take them (C, H, W), blobs and datums."""

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from caffepy.core.errors import CaffeError, DataError, reason
from caffepy.core.files import AnyPath, read_regular
from caffepy.data.datum import decode_image, opened
from caffepy.proto import caffe_pb2

Array = NDArray[Any]
GREY = 0.2125, 0.7154, 0.0721
"""Weights of red, green and blue in a grey pixel, as in scikit-image (ITU-R BT.709)."""

_LENT = {
    "resize": ("skimage.transform", "scikit-image"),
    "skimage": ("", "scikit-image"),
    "zoom": ("scipy.ndimage", "scipy"),
}
"""Names that Caffe's module has from others: their modules and packages."""


def __getattr__(name: str) -> Any:
    if name not in _LENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package = _LENT[name]
    try:
        return getattr(import_module(module), name) if module else import_module(name)
    except ImportError:
        raise AttributeError(
            f"caffe.io.{name} is that of {package}: pip install {package}"
        ) from None


def blobproto_to_array(blob: caffe_pb2.BlobProto, return_diff: bool = False) -> Array:
    """Return the values (or diffs) of a blob message, float64; 4-D if it has num, channels, ...

    ValueError if the shape does not fit the number of values.
    """
    values = (blob.diff or blob.double_diff) if return_diff else (blob.data or blob.double_data)
    if any(blob.HasField(name) for name in ("num", "channels", "height", "width")):
        shape = [blob.num, blob.channels, blob.height, blob.width]
    else:
        shape = list(blob.shape.dim)
    return np.array(values, np.float64).reshape(shape)


def array_to_blobproto(arr: ArrayLike, diff: ArrayLike | None = None) -> caffe_pb2.BlobProto:
    """Return a blob message of the array's shape and values, and of these diffs."""
    array = np.asarray(arr)
    blob = caffe_pb2.BlobProto(data=array.ravel().astype(float))
    blob.shape.dim.extend(array.shape)
    if diff is not None:
        blob.diff.extend(np.asarray(diff).ravel().astype(float))
    return blob


def arraylist_to_blobprotovector_str(arraylist: Iterable[ArrayLike]) -> bytes:
    """Return a serialized BlobProtoVector of these arrays, of any shapes."""
    blobs = map(array_to_blobproto, arraylist)
    return caffe_pb2.BlobProtoVector(blobs=blobs).SerializeToString()


def blobprotovector_str_to_arraylist(str: bytes) -> list[Array]:
    """Return the arrays of a serialized BlobProtoVector, each in its shape."""
    return [blobproto_to_array(blob) for blob in caffe_pb2.BlobProtoVector.FromString(str).blobs]


def array_to_datum(arr: Array, label: int | None = None) -> caffe_pb2.Datum:
    """Return a datum of an image (C, H, W): bytes if it is uint8, else float_data.

    ValueError for other numbers of axes.
    """
    if arr.ndim != 3:
        raise ValueError(
            f"Incorrect array shape. A datum holds an image (C, H, W), not {arr.shape}."
        )
    channels, height, width = arr.shape
    datum = caffe_pb2.Datum(channels=channels, height=height, width=width)
    if arr.dtype == np.uint8:
        datum.data = arr.tobytes()
    else:
        datum.float_data.extend(arr.ravel().astype(float))
    if label is not None:
        datum.label = label
    return datum


def datum_to_array(datum: caffe_pb2.Datum) -> Array:
    """Return the image (C, H, W) of a datum: uint8 from bytes, else float64.

    An encoded image file is decoded; its channels are BGR.
    """
    if datum.encoded:
        return np.ascontiguousarray(decode_image(datum.data))
    shape = datum.channels, datum.height, datum.width
    if datum.data:
        return np.frombuffer(datum.data, np.uint8).reshape(shape).copy()
    return np.array(datum.float_data, np.float64).reshape(shape)


def load_image(filename: AnyPath | BinaryIO, color: bool = True) -> Array:
    """Read an image file as float32 in [0, 1], RGB (H, W, 3) or, without `color`, grey (H, W, 1).

    A grey file fills all three channels, transparency is dropped. `filename` may be an open file.
    DataError if it cannot be read.
    """
    import cv2

    if isinstance(filename, (str, bytes, os.PathLike)):
        name = os.fsdecode(filename)
        try:
            content = read_regular(name)
        except OSError as error:
            raise DataError(f"{name}: cannot be read: {reason(error)}") from None
    else:
        name, content = str(getattr(filename, "name", "the image")), filename.read()
    try:
        image = opened(content, cv2.IMREAD_UNCHANGED)
    except DataError as error:
        raise error.at(name) from None
    if image is None:
        raise DataError(f"{name}: not an image that can be decoded ({len(content)} bytes)")
    scale = 1.0 / (2 ** (8 * image.dtype.itemsize) - 1) if image.dtype.kind == "u" else 1.0
    # BGR(A) -> RGB; a single channel stays
    pixels = np.atleast_3d(image)[..., 2::-1] * np.float64(scale)
    if color:
        return np.broadcast_to(pixels, (*pixels.shape[:2], 3)).astype(np.float32)
    return (pixels @ GREY if pixels.shape[2] == 3 else pixels[..., 0]).astype(np.float32)[..., None]


def resize_image(im: Array, new_dims: Sequence[int] | Array, interp_order: int = 1) -> Array:
    """Return an image (H, W, K) in another height and width, float32.

    Without smoothing, as in Caffe: for 1 or 3 channels the corners of the image stay where they are
    and pixels beyond its edge have its smallest value, as in scikit-image's
    `resize(mode="constant", anti_aliasing=False)`; for other numbers of channels the centres of the
    corner pixels stay where they are, as in SciPy's `zoom`. `interp_order` is 0 (nearest), 1
    (linear) or, with SciPy installed, that of a spline up to 5. ValueError unless `im` has three
    axes.
    """
    im = np.asarray(im)
    if im.ndim != 3:
        raise ValueError(f"an image has axes (H, W, K), not shape {im.shape}")
    height, width = (int(size) for size in new_dims)
    if im.shape[2] not in (1, 3):
        zoomed = _interpolated(im, (height, width), interp_order, False)
        if im.dtype.kind in "iu":  # SciPy's zoom keeps the type, and rounds halves away from 0
            limits = np.iinfo(im.dtype)
            zoomed = np.trunc(zoomed + np.copysign(0.5, zoomed)).clip(limits.min, limits.max)
        return zoomed.astype(np.float32)
    low, high = im.min(), im.max()
    if low == high:
        return np.full((height, width, im.shape[2]), low, np.float32)
    normal = (im - low) / (high - low)
    resized = _interpolated(normal, (height, width), interp_order, True).clip(0, 1)
    resized *= high - low
    resized += low
    return resized.astype(np.float32)


def _interpolated(im: Array, dims: tuple[int, int], order: int, by_corners: bool) -> Array:
    """Return an image in another height and width, float64; 0 beyond its edges.

    The corners of the image stay where they are, or the centres of its corner pixels.
    """
    if order > 1:
        try:
            from scipy import ndimage
        except ImportError:
            raise CaffeError(
                f"interpolation of order {order} needs SciPy: install it (pip install scipy), or "
                f"take order 0 or 1"
            ) from None
        factors = dims[0] / im.shape[0], dims[1] / im.shape[1], 1
        mode = "grid-constant" if by_corners else "constant"
        zoomed = ndimage.zoom(im, factors, np.float64, order, mode, grid_mode=by_corners)
        return np.asarray(zoomed)
    places = [
        (np.arange(size) + 0.5) * (n / size) - 0.5
        if by_corners
        else np.arange(size) * ((n - 1) / max(size - 1, 1))
        for n, size in zip(im.shape[:2], dims, strict=True)
    ]
    if order == 0:
        y, x = (np.floor(place + 0.5).astype(int) for place in places)
        return np.asarray(im[y][:, x], np.float64)
    (rows, down), (columns, across) = map(_taps, places, im.shape[:2])
    values = np.zeros((*dims, im.shape[2]))
    for row, share in zip(rows, down[..., np.newaxis, np.newaxis], strict=True):
        lines = im[row] * share  # rows before columns, and sums in this order: SciPy's bits
        for column, part in zip(columns, across[..., np.newaxis], strict=True):
            values += lines.take(column, 1) * part
    return values


def _taps(places: Array, n: int) -> tuple[Array, Array]:
    """Return the pixels (2, places) on both sides of each place in a row of `n`, and their weights,
    which are 0 beyond it.
    """
    first = np.floor(places)
    index = np.stack([first, first + 1]).astype(int)
    share = np.stack([1 - (places - first), places - first])
    share[(index < 0) | (index >= n)] = 0
    return index.clip(0, n - 1), share


def oversample(images: Sequence[Array], crop_dims: Sequence[int]) -> Array:
    """Return ten crops (10 N, height, width, K) of N images (H, W, K) of one size, float32.

    Of each image: the corners (upper left, upper right, lower left, lower right) and the centre,
    then their mirror images in the same order.
    """
    image_height, image_width, channels = images[0].shape
    height, width = (int(size) for size in crop_dims)
    if height > image_height or width > image_width:
        raise ValueError(
            f"crops of {height}x{width} cannot be taken from images of {image_height}x{image_width}"
        )
    bottom, right = image_height - height, image_width - width
    corners = [(0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2)]
    crops = np.empty((len(images), 2, 5, height, width, channels), np.float32)
    for image, of_image in zip(images, crops, strict=True):
        for (y, x), crop in zip(corners, of_image[0], strict=True):
            crop[...] = image[y : y + height, x : x + width]
    crops[:, 1] = crops[:, 0, :, :, ::-1]
    return crops.reshape(-1, height, width, channels)


class Transformer:
    """Converts images (H, W, K) to a net's inputs and back.

    `inputs` has the shapes of the inputs by name, as in `{"data": net.blobs["data"].data.shape}`.
    `preprocess` resizes, transposes, swaps channels, scales, subtracts the mean, and scales again,
    each if it was set for the input. ValueError for an unknown input or a wrong shape.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = inputs
        self.transpose: dict[str, Sequence[int]] = {}
        self.channel_swap: dict[str, Sequence[int]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, Array] = {}
        self.input_scale: dict[str, float] = {}

    def _shape(self, in_: str) -> tuple[int, ...]:
        if in_ not in self.inputs:
            raise ValueError(f"{in_} is not one of the net inputs: {', '.join(self.inputs)}")
        return tuple(int(size) for size in self.inputs[in_])

    def preprocess(self, in_: str, data: ArrayLike) -> Array:
        """Return an image (H, W, K) as input `in_` takes it, a new array of float32."""
        shape = self._shape(in_)
        image = np.array(data, np.float32)
        if image.shape[:2] != shape[2:]:
            image = resize_image(image, shape[2:])
        if (order := self.transpose.get(in_)) is not None:
            image = image.transpose(order)
        if (swap := self.channel_swap.get(in_)) is not None:
            image = image[list(swap), :, :]
        if (raw_scale := self.raw_scale.get(in_)) is not None:
            image *= raw_scale
        if (mean := self.mean.get(in_)) is not None:
            image -= mean
        if (input_scale := self.input_scale.get(in_)) is not None:
            image *= input_scale
        return image

    def deprocess(self, in_: str, data: ArrayLike) -> Array:
        """Invert `preprocess` of an item (C, H, W), but for the size: return (H, W, C).

        Axes of size 1 are dropped first.
        """
        self._shape(in_)
        image = np.array(data).squeeze()
        if (input_scale := self.input_scale.get(in_)) is not None:
            image /= input_scale
        if (mean := self.mean.get(in_)) is not None:
            image += mean
        if (raw_scale := self.raw_scale.get(in_)) is not None:
            image /= raw_scale
        if (swap := self.channel_swap.get(in_)) is not None:
            image = image[np.argsort(swap), :, :]
        if (order := self.transpose.get(in_)) is not None:
            image = image.transpose(np.argsort(order))
        return image

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """Set the order of the image's axes: (2, 0, 1) turns (H, W, K) into (K, H, W).

        ValueError unless it names each axis of an item of the input.
        """
        axes = len(self._shape(in_)) - 1
        if len(order) != axes:
            raise ValueError(
                f"Transpose order needs to name the {axes} axes of an item, not {len(order)}."
            )
        self.transpose[in_] = order

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """Set the order of the channels, then the first axis: (2, 1, 0) turns RGB into BGR.

        ValueError unless it names each channel of the input.
        """
        channels = self._shape(in_)[1]
        if len(order) != channels:
            raise ValueError(
                f"Channel swap needs to name the {channels} channels of the input, not "
                f"{len(order)}."
            )
        self.channel_swap[in_] = order

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """Set the factor before the mean: 255 for images in [0, 1] and means in [0, 255]."""
        self._shape(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: ArrayLike) -> None:
        """Set the mean to subtract: a number a channel (C,), or an image (C, H, W) or (H, W), which
        is resized to the input. ValueError for other shapes.
        """
        _, channels, *dims = self._shape(in_)
        mean = np.asarray(mean)
        if mean.ndim == 1:
            if len(mean) != channels:
                raise ValueError(
                    f"Mean channels incompatible with input: {len(mean)} for {channels} channels."
                )
            self.mean[in_] = mean[:, np.newaxis, np.newaxis]
            return
        image = mean[np.newaxis] if mean.ndim == 2 else mean
        if image.ndim != 3:
            raise ValueError(f"Mean shape invalid: (C,), (H, W) or (C, H, W), not {mean.shape}.")
        if image.shape != (channels, *dims):
            low, high = image.min(), image.max()
            spread = high - low if high > low else 1
            normal = resize_image(((image - low) / spread).transpose(1, 2, 0), dims)
            image = normal.transpose(2, 0, 1) * spread + low
        self.mean[in_] = image

    def set_input_scale(self, in_: str, scale: float) -> None:
        """Set the factor after the mean is subtracted."""
        self._shape(in_)
        self.input_scale[in_] = scale
