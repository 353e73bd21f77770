"""pycaffe's Net: a net built from a file, with blobs and parameters by name."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import zip_longest
from typing import Any, NoReturn, ParamSpec, Protocol, SupportsIndex, TypeVar

import numpy as np

from caffepy.core.errors import CaffeError, UsageError, UserCodeError
from caffepy.core.files import AnyPath
from caffepy.core.names import listed, nearest
from caffepy.device.blob import Array, on_host
from caffepy.layer import Layer as InnerLayer
from caffepy.layer.base import Blobs
from caffepy.layer.memory_data import MemoryData
from caffepy.layer.python import Python
from caffepy.layer.python_blob import Blob, BlobVec, unwrap_all
from caffepy.net import Net as Inner
from caffepy.net import weights
from caffepy.net.replay import Passes
from caffepy.proto import text
from caffepy.proto.caffe_pb2 import NetState, Phase
from caffepy.pycaffe import mode
from caffepy.pycaffe.log import heed_environment

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def raising_originals(function: Callable[P, R]) -> Callable[P, R]:
    """Raise what a Python layer raised itself, as Caffe does; a note of it names the layer."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except UserCodeError as error:
            original, note = error.original, str(error)
        if note not in getattr(original, "__notes__", ()):
            original.add_note(note)
        raise original  # out here, where it keeps its own context

    return run


class ByName(OrderedDict[str, T]):
    """Things of a net by their names; KeyError for another name says which there are, but for those
    of splits.
    """

    def __init__(self, items: Iterable[tuple[str, T]] = (), *, of: str = "entry") -> None:
        super().__init__(items)
        self._of = of

    def __missing__(self, name: str) -> NoReturn:
        names = [known for known in self if "_split_" not in known]
        near = nearest(name, names) if isinstance(name, str) else ""
        raise KeyError(
            f'the net has no {self._of} "{name}"{near}; it has {listed(names, str(name)) or "none"}'
        )


class Averager(Protocol):
    """An NCCL, in the place of a callback: it has a collective that averages gradients."""

    synchronizer: Any


class Layer:
    """A layer of a net: its type and its parameter blobs. The net calls `setup` and `reshape`."""

    def __init__(self, inner: InnerLayer) -> None:
        self._inner = inner

    @property
    def type(self) -> str:
        """The type string of the prototxt."""
        return self._inner.type

    @property
    def blobs(self) -> BlobVec:
        """The parameters."""
        return BlobVec(self._inner.blobs, self._inner.dtype)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Read the layer's parameters and make its blobs, for these bottoms and tops."""
        self._call(self._inner.setup, bottom, top)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        """Shape the tops by the bottoms."""
        self._call(self._inner.reshape, bottom, top)

    def _call(
        self, method: Callable[[Blobs, Blobs], None], bottom: Sequence[Blob], top: Sequence[Blob]
    ) -> None:
        blobs = [unwrap_all(b) for b in (bottom, top)]
        with self._inner.device.scope():
            method(*(map(on_host, blobs) if self._inner.on_host else blobs))


class Net:
    """A net in one phase: `Net("net.prototxt", caffe.TEST, weights="net.caffemodel")`.

    `level` and `stages` join the net's state; the older `Net("net.prototxt", "net.caffemodel",
    caffe.TEST)` works too. RuntimeError (a CaffeError) for files that are missing or do not fit;
    what a Python layer raises comes as it is.
    """

    @raising_originals
    def __init__(
        self,
        network_file: AnyPath,
        phase: int | AnyPath | None,
        level: int | None = None,
        stages: Sequence[str] | None = None,
        weights: AnyPath | None = None,
    ) -> None:
        heed_environment()
        if phase is None or isinstance(phase, (str, bytes, os.PathLike)):
            weights, phase, level = phase, level, None
        if phase not in Phase.values():
            known = ", ".join(f"{name} ({number})" for name, number in Phase.items())
            raise CaffeError(f"there is no phase {phase!r}; give one of {known}")
        path = os.fsdecode(network_file)
        if not os.path.isfile(path):
            raise CaffeError(f"Could not open file {path}")
        if weights is not None and not os.path.isfile(weights):
            raise CaffeError(f"Could not open file {os.fsdecode(weights)}")
        param = text.read_net(path)
        chosen = [stages] if isinstance(stages, str) else stages
        param.state.MergeFrom(NetState(phase=Phase.Name(phase), level=level or 0, stage=chosen))
        self._attach(Inner(param, device=mode.new_device(), path=path))
        if weights is not None:
            self.copy_from(weights)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a net can be neither copied nor pickled: build another one and let it share_with this "
            "one, or copy_from what this one has saved"
        )

    @classmethod
    def of(cls, inner: Inner) -> "Net":
        """Wrap an existing net of a solver."""
        net = cls.__new__(cls)
        net._attach(inner)
        return net

    def _attach(self, inner: Inner) -> None:
        self._net = inner
        self._passes = Passes(inner)
        self._by_name = ByName(
            ((name, Blob(blob)) for name, blob in inner.blobs.items()), of="blob"
        )
        self._params = ByName(
            (
                (name, BlobVec(layer.blobs, layer.dtype))
                for name, layer in zip(inner.layer_names, inner.layers, strict=True)
                if layer.blobs
            ),
            of="layer with parameters",
        )
        self._layers = [
            layer.instance if isinstance(layer, Python) else Layer(layer) for layer in inner.layers
        ]

    @property
    def blobs(self) -> "OrderedDict[str, Blob]":
        """Blobs by name, in the order in which layers make them."""
        return self._by_name

    @property
    def params(self) -> "OrderedDict[str, BlobVec]":
        """Parameter blobs by layer name, of the layers that have any."""
        return self._params

    @property
    def blob_loss_weights(self) -> "OrderedDict[str, float]":
        """Loss weights by blob name."""
        return ByName(self._net.blob_loss_weights.items(), of="blob")

    @property
    def layers(self) -> list[Any]:
        """All layers in order; a Python layer is the object of the user's class."""
        return self._layers

    @property
    def layer_dict(self) -> "OrderedDict[str, Any]":
        """Layers by name."""
        return ByName(zip(self._net.layer_names, self.layers, strict=True), of="layer")

    @property
    def inputs(self) -> list[str]:
        """Names of the tops of Input layers."""
        return list(self._net.inputs)

    @property
    def outputs(self) -> list[str]:
        """Names of the blobs that no layer consumes, sorted."""
        return list(self._net.outputs)

    @property
    def top_names(self) -> "OrderedDict[str, list[str]]":
        """Names of each layer's tops."""
        return ByName(((node.name, node.top_names) for node in self._net.nodes), of="layer")

    @property
    def bottom_names(self) -> "OrderedDict[str, list[str]]":
        """Names of each layer's bottoms."""
        return ByName(((node.name, node.bottom_names) for node in self._net.nodes), of="layer")

    @property
    def _layer_names(self) -> list[str]:
        return list(self._net.layer_names)

    @property
    def _inputs(self) -> list[int]:
        return self._ids(self._net.inputs)

    @property
    def _outputs(self) -> list[int]:
        return self._ids(self._net.outputs)

    def _top_ids(self, layer: int) -> list[int]:
        return self._ids(self._net.nodes[layer].top_names)

    def _bottom_ids(self, layer: int) -> list[int]:
        return self._ids(self._net.nodes[layer].bottom_names)

    def _ids(self, names: Iterable[str]) -> list[int]:
        """Return the indices of blobs in `_blob_names`."""
        places = {name: i for i, name in enumerate(self._net.blobs)}
        return [places[name] for name in names]

    def _place(self, layer: str) -> int:
        names = self._net.layer_names
        if layer not in names:
            raise ValueError(f'the net has no layer "{layer}"{nearest(layer, names)}')
        return names.index(layer)

    @property
    def _blob_names(self) -> list[str]:
        return list(self._net.blobs)

    @property
    def _blobs(self) -> list[Blob]:
        return list(self.blobs.values())

    @property
    def _blob_loss_weights(self) -> list[float]:
        return list(self._net.blob_loss_weights.values())

    @raising_originals
    def _forward(self, start: int, end: int) -> float:
        """Run layers `start` to `end` by number and return their loss."""
        self._passes.forward(start, end)
        self._net.device.count_step()
        self._net.device.check_errors()
        return self._net.loss(start, end)

    @raising_originals
    def _backward(self, start: int, end: int) -> None:
        self._passes.backward(start, end)

    def forward(
        self,
        blobs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **inputs: Any,
    ) -> dict[str, Array]:
        """Run the net, or the layers from `start` to `end` (names, inclusive).

        Keyword arguments are arrays for exactly the net's inputs. Returns views of the outputs (or
        of the tops of `end`) and of the blobs named in `blobs`.
        """
        first = self._place(start) if start is not None else 0
        last = self._place(end) if end is not None else len(self._net.layers) - 1
        outputs = _each(self._net.nodes[last].top_names if end is not None else self.outputs, blobs)
        if inputs:
            _compare("Input blob arguments do not match net inputs.", inputs, self.inputs)
            for name, array in inputs.items():
                _check_batch("Input", name, array, self.blobs[name])
                self.blobs[name].data[...] = array
        self._forward(first, last)
        return {name: self.blobs[name].data for name in outputs}

    def backward(
        self,
        diffs: Sequence[str] | None = None,
        start: str | None = None,
        end: str | None = None,
        **tops: Any,
    ) -> dict[str, Array]:
        """Run the net backward, or the layers from `start` down to `end` (names, inclusive).

        Keyword arguments are diffs for exactly the net's outputs. Returns views of the diffs of the
        inputs (or of the bottoms of `end`) and of the blobs named in `diffs`.
        """
        first = self._place(start) if start is not None else len(self._net.layers) - 1
        last = self._place(end) if end is not None else 0
        bottoms = self._net.nodes[last].bottom_names if end is not None else self.inputs
        wanted = _each(bottoms, diffs)
        if tops:
            _compare("Top diff arguments do not match net outputs.", tops, self.outputs)
            for name, array in tops.items():
                _check_batch("Diff", name, array, self.blobs[name])
                self.blobs[name].diff[...] = array
        self._backward(first, last)
        return {name: self.blobs[name].diff for name in wanted}

    def forward_all(self, blobs: Sequence[str] | None = None, **inputs: Any) -> dict[str, Array]:
        """Run any number of items in batches; return the outputs and `blobs`, a row an item.

        `inputs` are an array a net input, (items, ...); an Exception if they are not the net's.
        """
        count = _count(inputs)
        outs: dict[str, list[Array]] = {name: [] for name in _each(self.outputs, blobs)}
        for batch in self._batch(inputs):
            for name, out in self.forward(blobs, **batch).items():
                outs[name].extend(out.copy())
        return _joined(outs, count)

    def forward_backward_all(
        self, blobs: Sequence[str] | None = None, diffs: Sequence[str] | None = None, **inputs: Any
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run any number of items both ways in batches; `inputs` may have diffs of outputs.

        Return what `forward_all` does, and the diffs of net inputs and `diffs`, a row an item.
        """
        count = _count(inputs)
        outs: dict[str, list[Array]] = {name: [] for name in _each(self.outputs, blobs)}
        grads: dict[str, list[Array]] = {name: [] for name in _each(self.inputs, diffs)}
        forward_batches = self._batch({k: v for k, v in inputs.items() if k in self.inputs})
        backward_batches = self._batch({k: v for k, v in inputs.items() if k in self.outputs})
        for data, tops in zip_longest(forward_batches, backward_batches):
            for name, out in self.forward(blobs, **(data or {})).items():
                outs[name].extend(out.copy())
            for name, grad in self.backward(diffs, **(tops or {})).items():
                grads[name].extend(grad.copy())
        return _joined(outs, count), _joined(grads, count)

    def _batch(self, arrays: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Yield the batches of these arrays, the last one filled with zeros."""
        if not arrays:
            return
        count = _count(arrays)
        size = next(iter(self.blobs.values())).shape[0]
        for start in range(0, count, size):
            batch = {}
            for name, whole in arrays.items():
                array = np.asarray(whole[start : start + size])
                if short := size - len(array):
                    zeros = np.zeros((short, *array.shape[1:]), array.dtype)
                    array = np.concatenate([array, zeros])
                batch[name] = array
            yield batch

    @raising_originals
    def reshape(self) -> None:
        """Propagate the shapes of reshaped inputs through the net."""
        self._net.reshape()

    def clear_param_diffs(self) -> None:
        """Set all parameter diffs to zero."""
        self._net.clear_param_diffs()

    def copy_from(self, path: AnyPath) -> None:
        """Load the weights of a caffemodel (binary or HDF5) by layer name."""
        weights.load_weights(self._net, os.fsdecode(path))

    def share_with(self, other: "Net") -> None:
        """Use the parameter data of the other net's layers of the same names."""
        self._net.share_trained_layers_with(other._net)

    def save(self, path: AnyPath) -> None:
        """Write a binary caffemodel."""
        weights.save_binary(self._net, os.fsdecode(path))

    def save_hdf5(self, path: AnyPath) -> None:
        """Write an HDF5 caffemodel."""
        weights.save_hdf5(self._net, os.fsdecode(path))

    def load_hdf5(self, path: AnyPath) -> None:
        """Load an HDF5 caffemodel."""
        weights.load_hdf5(self._net, os.fsdecode(path))

    def close(self) -> None:
        """Stop the threads of data layers and close their files, so that a script can open them."""
        self._net.close()

    def set_input_arrays(self, data: Array, labels: Array) -> None:
        """Set the data of the first layer, a MemoryData; the arrays are not copied.

        They are float32, (N, C, H, W) and (N,) or (N, 1, 1, 1); N is a multiple of its batch size.
        CaffeError for others, or another first layer.
        """
        layer = self._net.layers[0]
        if not isinstance(layer, MemoryData):
            raise CaffeError(
                "set_input_arrays may only be called if the first layer is a MemoryData layer"
            )
        for name, array, axes in (("data", data, (4,)), ("labels", labels, (1, 4))):
            needed = f"{name} must be a C-contiguous float32 array"
            if not isinstance(array, np.ndarray):
                raise CaffeError(f"{needed}, not of {type(array)}")
            if array.dtype != np.float32 or array.ndim not in axes or not array.flags.c_contiguous:
                count = " or ".join(map(str, axes))
                raise CaffeError(
                    f"{needed} of {count} axes, not {array.dtype} of shape {array.shape}"
                )
        if labels.size != len(labels):
            raise CaffeError(f"labels must have one number for each item, not shape {labels.shape}")
        layer.reset(data, labels)

    _set_input_arrays = set_input_arrays

    def before_forward(self, callback: Callable[[int], object]) -> None:
        """Call `callback(layer index)` before each layer's forward."""
        self._net.before_forward.append(callback)

    def after_forward(self, callback: Callable[[int], object]) -> None:
        """Call `callback(layer index)` after each layer's forward."""
        self._net.after_forward.append(callback)

    def before_backward(self, callback: Callable[[int], object]) -> None:
        """Call `callback(layer index)` before each layer's backward."""
        self._net.before_backward.append(callback)

    def after_backward(self, callback: Callable[[int], object] | Averager) -> None:
        """Call `callback(layer index)` after each layer's backward.

        With an NCCL there is nothing to do: a solver that has it as a callback averages gradients
        while the backward pass runs. UsageError for anything else.
        """
        if callable(callback):
            self._net.after_backward.append(callback)
        elif not hasattr(callback, "synchronizer"):
            raise UsageError("after_backward takes a function of the layer's index, or an NCCL")


def _each(names: Iterable[str], more: Iterable[str] | None) -> list[str]:
    """Return the names, each once, in this order."""
    return list(dict.fromkeys([*names, *(more or ())]))


def _compare(message: str, given: Iterable[str], wanted: Iterable[str]) -> None:
    """Raise an Exception, which begins as pycaffe's does, unless these are the same names."""
    lists = [", ".join(sorted(names)) or "none" for names in (wanted, given)]
    if lists[0] != lists[1]:
        raise Exception(f"{message} The net has {lists[0]}; given: {lists[1]}")


def _check_batch(what: str, name: str, array: Any, blob: Blob) -> None:
    """Raise an Exception, which begins as pycaffe's does, unless the first axes are alike."""
    if np.shape(array)[:1] != blob.shape[:1]:
        shapes = f"{list(np.shape(array))} for a blob of {list(blob.shape)}"
        raise Exception(f'{what} is not batch sized: "{name}" is {shapes}')


def _count(inputs: dict[str, Any]) -> int:
    if not inputs:
        raise Exception("Input blob arguments do not match net inputs.")
    return len(next(iter(inputs.values())))


def _joined(collected: dict[str, list[Array]], count: int) -> dict[str, Array]:
    return {name: np.asarray(items[:count]) for name, items in collected.items()}
