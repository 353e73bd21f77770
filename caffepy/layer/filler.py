"""Fillers: how a parameter or a made-up input gets its first values.

A filler is a function `(array, FillerParameter, rng)` that writes the whole array.
"""

from collections.abc import Callable
from math import ceil, prod, sqrt

import numpy as np
from google.protobuf.message import Message

from caffepy.core.errors import ConfigError
from caffepy.core.registry import Registry
from caffepy.device.blob import Array, Blob, HostView, behind, shape_string
from caffepy.device.random_numbers import RandomNumbers
from caffepy.proto.caffe_pb2 import FillerParameter
from caffepy.proto.forks import fork_of_filler

Filler = Callable[[Array, FillerParameter, np.random.Generator], None]
fillers: Registry[Filler] = Registry("filler name")

MANY = 1 << 15
"""Elements that another thread fills: they take 0.2 ms."""

_UNUSED = np.random.Generator(np.random.MT19937(0))
"""Random numbers of fillers where what they write is not used."""


def fill(target: Blob | HostView | Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """Write the first values that `param` describes; ConfigError for impossible ones."""
    array = target.host_data if isinstance(target, Blob | HostView) else target
    filler = _filler(param.type)
    if array.size == 0:
        raise ConfigError(f"a blob of shape {shape_string(array.shape)} has nothing to fill")
    if param.sparse != -1 and filler is not gaussian:
        raise ConfigError(f'sparse is for the filler "gaussian", not for "{param.type}"')
    filler(array, param, rng)


def filler_of(param: Message, name: str, value: float) -> FillerParameter:
    """Return this filler of a layer's parameters, by default one that fills with the value."""
    given: FillerParameter = getattr(param, name)
    return given if param.HasField(name) else FillerParameter(value=value)


def _filler(name: str) -> Filler:
    if name not in fillers and (fork := fork_of_filler(name)):
        raise ConfigError(
            f'filler "{name}" is one of {fork}, which caffepy does not have '
            f"(known: {', '.join(fillers)})"
        )
    return fillers[name]


def fill_beside(blob: Blob, param: FillerParameter, random: RandomNumbers) -> None:
    """`fill`, in a block of `random.drawing_beside` by another thread where that takes a while.

    The numbers are those of fillers one after the other. ConfigError at once for impossible values.
    """
    filler = _filler(param.type)
    at_once = not blob.count or (blob.count < MANY and not random.at_work)
    if filler is constant or at_once:
        fill(blob, param, _UNUSED if filler is constant else random.generator)
        return
    fill(np.empty((*blob.shape[:1], 1, *blob.shape[2:]), blob.dtype), param, _UNUSED)  # checks
    memory, shape = behind(blob).data_memory, blob.shape  # the blob may share another's later
    random.beside(lambda rng: filler(memory.host_of(shape), param, rng))


@fillers("constant")
def constant(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """Every element is `value`."""
    array[...] = param.value


@fillers("uniform", "uniformstatic")
def uniform(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """U[min, max); ConfigError for min > max."""
    if param.min > param.max:
        raise ConfigError(
            f"a uniform filler needs min <= max, not min {param.min:g} and max {param.max:g}"
        )
    _uniform(array, param.min, param.max, rng)


@fillers("gaussian", "gaussianstatic")
def gaussian(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """N(mean, std); with `sparse` s an element is kept with probability s / shape(0), else 0.

    ConfigError for std < 0, or s > shape(0).
    """
    if param.std < 0:
        raise ConfigError(f"a gaussian filler needs a std of 0 or more, not {param.std:g}")
    _gaussian(array, param.mean, param.std, rng)
    if param.sparse >= 0:
        outputs = _rows(array)
        if param.sparse > outputs:
            raise ConfigError(
                f"sparse {param.sparse} asks for more non-zero weights than {outputs} outputs"
            )
        array *= rng.random(array.shape, np.float32) < param.sparse / outputs


@fillers("positive_unitball", "positive_unitballstatic")
def positive_unitball(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """U[0, 1), then each row (first axis) divided by its sum."""
    _uniform(array, 0.0, 1.0, rng)
    rows = array.reshape(_rows(array), -1)
    rows /= rows.sum(axis=1, keepdims=True)


@fillers("gaussian_unitball")
def gaussian_unitball(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """N(0, 1), then each row (first axis) divided by its length (happynear)."""
    _gaussian(array, 0.0, 1.0, rng)
    rows = array.reshape(_rows(array), -1)
    rows /= np.sqrt((rows * rows).sum(axis=1, keepdims=True) + 1e-12)


@fillers("xavier", "xavierstatic")
def xavier(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """U(-s, s), s = sqrt(3 / n), n by variance_norm (Glorot and Bengio 2010)."""
    s = sqrt(3 / fan(array.shape, param))
    _uniform(array, -s, s, rng)


@fillers("msra", "msrastatic")
def msra(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """N(0, sqrt(2 / n)), n by variance_norm (He et al. 2015); sqrt(2 / n / (1 + alpha^2)) before a
    PReLU with slope alpha (happynear's).
    """
    _gaussian(array, 0.0, sqrt(2 / fan(array.shape, param) / (1 + param.alpha**2)), rng)


@fillers("bilinear", "bilinearstatic")
def bilinear(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """Bilinear interpolation by Deconvolution with k x k kernels: (1 - |x/f - c|) (1 - |y/f - c|).

    f = ceil(k/2), c = (k - 1) / (2f). ConfigError unless `array` is (_, _, k, k).
    """
    if array.ndim != 4 or array.shape[2] != array.shape[3]:
        raise ConfigError(
            f"a bilinear filler needs 4 axes and square kernels, not {shape_string(array.shape)}"
        )
    f = ceil(array.shape[3] / 2)
    c = (array.shape[3] - 1) / (2 * f)
    hat = 1 - np.abs(np.arange(array.shape[3]) / f - c)
    array[...] = np.outer(hat, hat)


@fillers("truthsstatic")
def truths(array: Array, param: FillerParameter, rng: np.random.Generator) -> None:
    """Made-up true boxes with whole classes of min to max, in the rows that detectors read.

    Rows of 8 are AnnotatedData's, spread over `value` images: image, class, instance, corners in
    parts of the image, difficult. Rows of 5 are RoIDataLayer's: corners in an image of `value` x
    `value` pixels, class; with a `value` of 1 YOLO's: class, centre and sides in parts of the
    image, two boxes of each item and then zeros; with one below 0 regions: image 0, corners in
    -`value` x -`value` pixels. Rows of 3 are that image's height, width and scale. Sides are 0.1 to
    0.6 of the image's.
    """
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    sides = rng.uniform(0.1, 0.6, (len(rows), 2))
    low = rng.uniform(0, 1 - sides)
    classes = rng.integers(int(param.min), int(param.max), len(rows), endpoint=True)
    if rows.shape[1] == 8:
        rows[:] = 0
        rows[:, 0] = np.arange(len(rows)) * int(param.value) // len(rows)
        rows[:, 1], rows[:, 3:5], rows[:, 5:7] = classes, low, low + sides
    elif rows.shape[1] == 5 and param.value == 1:
        rows[:, 0], rows[:, 1:3], rows[:, 3:] = classes, low + sides / 2, sides
        array.reshape(-1, *array.shape[-2:])[:, 2:] = 0
    elif rows.shape[1] == 5 and param.value < 0:
        rows[:, 0], rows[:, 1:3], rows[:, 3:] = 0, low, low + sides
        rows[:, 1:] *= -param.value - 1
    elif rows.shape[1] == 5:
        rows[:, :2], rows[:, 2:4], rows[:, 4] = low, low + sides, classes
        rows[:, :4] *= param.value - 1
    elif rows.shape[1] == 3:
        rows[:] = param.value, param.value, 1
    else:
        raise ConfigError(
            'the filler "truthsstatic" has rows of 8, 5 or 3 numbers, not '
            f"{shape_string(array.shape)}"
        )


def fan(shape: tuple[int, ...], param: FillerParameter) -> float:
    """Inputs of one output, outputs of one input or their mean, as variance_norm says.

    fan_in = count / shape(0), fan_out = count / shape(1), or the count where there is one axis.
    """
    count = prod(shape)
    fan_in = count / shape[0] if shape else count
    fan_out = count / shape[1] if len(shape) > 1 else count
    if param.variance_norm == FillerParameter.AVERAGE:
        return (fan_in + fan_out) / 2
    return fan_out if param.variance_norm == FillerParameter.FAN_OUT else fan_in


def _rows(array: Array) -> int:
    return int(array.shape[0]) if array.ndim else 1


def _uniform(array: Array, low: float, high: float, rng: np.random.Generator) -> None:
    rng.random(out=array, dtype=array.dtype)
    array *= high - low
    array += low


def _gaussian(array: Array, mean: float, std: float, rng: np.random.Generator) -> None:
    rng.standard_normal(out=array, dtype=array.dtype)
    array *= std
    array += mean
