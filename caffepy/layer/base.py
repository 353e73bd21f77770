"""The layer contract, the same for built-in and for user-written layers, and the registry of types.

`forward` writes the tops' data. `backward` writes bottom diffs and adds to parameter diffs. Arrays
are allocated in `reshape` and stay where they are until shapes change.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from caffepy import ops
from caffepy.core.errors import CaffeError, ConfigError
from caffepy.core.registry import Registry
from caffepy.data.reader import ALONE, Turn
from caffepy.device.blob import PLAIN, Array, Blob, Layout, on_host, shape_string
from caffepy.device.device import Device, ErrorFlag
from caffepy.device.recording import draw_seed
from caffepy.layer.filler import fill, fill_beside
from caffepy.ops.protocol.types import Seed
from caffepy.proto.caffe_pb2 import TRAIN, FillerParameter, LayerParameter
from caffepy.proto.forks import fork_of_layer, refused_setting
from caffepy.proto.text import where

Blobs = Sequence[Blob]


class Kept(IntEnum):
    """Values that an in-place layer preserves: none; of those with a gradient the signs, that is
    which are above 0; those with a gradient; all.
    """

    NOTHING = 0
    SIGNS = 1
    ACTIVE = 2
    ALL = 3


class Layer:
    """One layer of a net.

    A subclass states how many blobs it takes (`bottoms`, `tops`: a number, or (least, most) with
    None for no bound) and overrides `setup` (once), `reshape` (whenever a bottom's shape changed),
    `forward` and `backward`.

    `blobs` are the learnable parameters, `param_propagate_down[i]` says whether parameter i wants
    its gradient, `loss_weights[i]` is the weight of top i in the net's loss.
    """

    bottoms: ClassVar[int | tuple[int, int | None]] = 1
    tops: ClassVar[int | tuple[int, int | None]] = 1
    same_count: ClassVar[bool] = False  # as many tops as bottoms
    auto_top_blobs: ClassVar[bool] = False  # missing tops are created, up to the least number
    in_place: ClassVar[bool] = False  # a top may be the bottom itself
    is_view: ClassVar[bool] = False  # the tops hold the bottom's values and share its memory
    is_input: ClassVar[bool] = False  # the tops are the net's inputs, filled by the user
    # Feeds the net from outside; runs before the captured part of a step.
    is_data: ClassVar[bool] = False
    reads_files: ClassVar[bool] = False  # reads its batches from files
    data_stay: bool = False  # a data layer whose forward changes nothing after the first time
    # The number of items is the same in every batch if that of the bottoms is.
    fixed_batch: ClassVar[bool] = True
    share_in_parallel: bool = False  # workers use the root net's instance, under its forward_lock
    # Reshape before every forward, not only when bottom shapes change.
    always_reshape: bool = False
    # The tops are choices or boxes through which nothing learns: no bottom gets a gradient, and
    # what reads the tops is asked for none.
    stops_gradient: bool = False
    # The bottoms that can have no gradient, each with the error for asking for one.
    constant_bottoms: Mapping[int, str] = {}
    # Computes on arrays of a GPU too; otherwise on the host, on copies of the blobs.
    on_gpu: ClassVar[bool] = False
    # Takes bottoms in the preferred layout of a GPU, whatever it is.
    takes_preferred_layout: bool = False
    # Writes its tops in Caffe's layout, in whatever layout it takes its bottoms.
    plain_tops: bool = False
    # Reads the shapes of its bottoms alone, so that their layout does not matter.
    reads_shapes_only: ClassVar[bool] = False
    # Gains from the preferred layout so much that bottoms in another are converted.
    seeks_preferred_layout: ClassVar[bool] = False
    # Multiplies the bottom, as a matrix, by a weight: a bottom with one position or one channel
    # needs no certain order, and products of 16-bit numbers can be written as float32.
    is_matrix_product: ClassVar[bool] = False
    # Backward reads the data of bottoms and of tops. False lets the net reuse their memory.
    backward_reads_bottom: bool = True
    backward_reads_top: bool = True
    # What backward needs of those data, and what forward leaves of the bottom's in place.
    backward_needs: ClassVar[Kept] = Kept.ALL
    in_place_keeps: Kept = Kept.NOTHING
    # In a fused group backward reads the top instead of a bottom that lies inside the group.
    fused_backward_reads_top: ClassVar[bool] = False
    # Forward may run again before backward, with `recomputes` set, and then writes what it wrote
    # before: random numbers and statistics are those of the first time, no state changes.
    can_recompute: ClassVar[bool] = False
    recomputes: bool = False
    is_recomputed: bool = False  # forward will run again before backward
    can_fuse: bool = False  # the layer with its settings can belong to the fused groups of its type
    # On the CPU forward and backward compute by what a graph replays (`device/recording.py`) and by
    # nothing else, with the same arrays and numbers until a blob gets another array or shape.
    can_replay: bool = False
    # Runs code of the user, which may change any gradient of the net.
    may_modify_gradients: ClassVar[bool] = False
    # The running statistics: blobs that forward computes, not the solver.
    statistics: Sequence[Blob] = ()
    length: int | None = None  # number of items in an epoch, None if it is not known
    deal: Sequence[Turn] = ALONE  # see `serve`
    turn = 0  # the number in `deal` of the next turn

    def __init__(
        self,
        param: LayerParameter,
        phase: int,
        device: Device,
        dtype: DTypeLike = np.float32,
        path: str | None = None,
    ) -> None:
        self.param = param
        self.type = param.type  # as the prototxt writes it
        self.phase = phase
        self.on_host = device.is_cuda and not self.on_gpu
        self.device = device.host if self.on_host else device
        self.dtype = np.dtype(dtype)
        self.path = path  # the file that defines the layer; relative names may lie beside it
        self.ops = ops.backend(self.device)
        self._param_device = device
        self.blobs: list[Blob] = []
        self.param_propagate_down: list[bool] = []
        self.loss_weights: list[float] = []
        self.forward_lock = threading.Lock()
        self._leased: Iterator[Turn] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Read and check the parameters, create `blobs`; called once, before the first reshape."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Set the shapes of tops and buffers from those of the bottoms; ConfigError if these do not
        fit.
        """

    def read_ahead(self) -> None:
        """Start to read, in a thread, the data for which the first forward would wait."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Compute the tops' data from the bottoms'."""

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Write the diffs of bottoms with propagate_down, add to those of wanted parameters."""
        if any(propagate_down):
            raise ConfigError(
                f"{self.type} layers cannot be differentiated; give their bottoms "
                "propagate_down: false"
            )

    def side_stream(self, propagate_down: bool) -> AbstractContextManager[object]:
        """Return a block for weight gradients: on the side stream if a bottom gradient follows."""
        return self.device.side_stream() if propagate_down else nullcontext()

    def layout_for(self, preferred: Layout) -> Layout:
        """Return the layout in which the layer takes blobs on a GPU if they come in `preferred`.
        Its tops have the same layout, or Caffe's with `plain_tops`.

        Blobs in another layout are converted before it runs, and back afterwards.
        """
        return preferred if self.takes_preferred_layout else PLAIN

    def allow_force_backward(self, index: int) -> bool:
        """True if `force_backward` of the net applies to bottom `index`."""
        return index not in self.constant_bottoms and type(self).backward is not Layer.backward

    def require_channels(self, bottom: Blobs) -> None:
        """Raise ConfigError if the first bottom has no second axis, that of channels."""
        if len(bottom[0].shape) < 2:
            shape = list(bottom[0].shape)
            raise ConfigError(f"{self.type} needs a bottom of at least 2 axes, not {shape}")

    def refuse_constants(self, propagate_down: Sequence[bool]) -> None:
        """Raise ConfigError if one of the `constant_bottoms` is asked for a gradient."""
        for index, message in self.constant_bottoms.items():
            if index < len(propagate_down) and propagate_down[index]:
                raise ConfigError(message.format(type=self.type))

    @property
    def only_launches(self) -> bool:
        """True if forward and backward on a GPU change state by kernels only: a call whose kernels
        are not launched changes nothing.
        """
        return False

    def error_flag(self, error: Callable[[float], CaffeError]) -> ErrorFlag:
        """Return a flag for values that the layer cannot use. Its error names the layer's
        definition; it is raised at once on the CPU, and on a GPU when the host next checks.
        """
        return self.device.error_flag(lambda value: error(value).at(where(self.path, self.param)))

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        """Return the number of multiply-adds of a forward pass, for these element counts of bottoms
        and tops; 0 for layers that take little time compared with convolutions and matrix products.
        """
        return 0

    @property
    def buffers(self) -> Blobs:
        """Large blobs of the layer whose data are written by each forward and read by the backward
        of that pass only, so that others may use their memory between passes.
        """
        return ()

    def tops_of_user(self, top: Blobs) -> Blobs:
        """The tops that forward never writes, so that they keep what a user writes to them."""
        return top if self.is_input else ()

    def serve(self, devices: Sequence[Device], deal: Sequence[Turn] | None = None) -> None:
        """Prepare for calls of forward by nets on these devices, in turn: the layer is shared.

        With a `deal` it skips the batches of other processes, so that their layers and this one are
        in the same state at the end of each deal. `set_state` starts the deal anew.
        """
        self.deal = deal or [Turn(0, rank, 0) for rank in range(len(devices))]
        self.turn, self._leased = 0, None

    def lease(self, turns: Callable[[int], Iterator[Turn]]) -> None:
        """Take turns from `turns(taken)`, the turns after the first `taken`, until `serve` is
        called: a deal that is made during the run.
        """
        self._leased = turns(0)

    def begin_turn(self) -> None:
        """Skip the batches that the deal skips before the next forward, if nets take turns."""
        turn = self.deal[self.turn] if self._leased is None else next(self._leased)
        if turn.before:
            self.skip(turn.before)

    def end_turn(self) -> None:
        """Skip the batches that the deal skips after the last forward."""
        if self._leased is not None:
            return
        if after := self.deal[self.turn].after:
            self.skip(after)
        self.turn = (self.turn + 1) % len(self.deal)

    def skip(self, batches: int) -> None:
        """Skip `batches` batches of data, without making them if possible.

        A layer with bottoms skips nothing: it takes what they hold.
        """

    def extent(self) -> str:
        """Return the size of the data that the layer reads, with its first and last name, as text
        that must be the same on all nodes; empty if it reads none.
        """
        return ""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs besides parameters: numbers, strings, lists, arrays."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.turn = 0

    def close(self) -> None:
        """Stop threads and release files."""

    def buffer(self, shape: Sequence[int] = (0,), dtype: DTypeLike | None = None) -> Blob:
        """Return a blob for the layer's own use: forward writes it, backward reads it."""
        return Blob(shape, dtype or self.dtype, self.device)

    def buffer_like(self, blob: Blob) -> Blob:
        """Return a buffer of the blob's shape and layout."""
        buffer = self.buffer(blob.shape)
        if buffer.layout != blob.layout:
            buffer.set_layout(blob.layout)
        return buffer

    def add_blob(self, shape: Sequence[int]) -> Blob:
        """Append a learnable parameter of this shape, zero-filled, and return it."""
        blob = Blob(shape, self.dtype, self._param_device)
        if self.on_host:
            (blob,) = on_host([blob])
        self.blobs.append(blob)
        return blob

    def make_params(
        self, shapes: Mapping[str, Sequence[int]], fillers: Iterable[FillerParameter]
    ) -> None:
        """Create the parameters of these names and shapes and fill each by its filler; ConfigError
        if the prototxt brought parameters of other shapes.
        """
        if not self.blobs:
            for shape, filler in zip(shapes.values(), fillers, strict=False):
                blob = self.add_blob(shape)
                if not self.device.runs and len(shape) > 1:  # only the filler is checked
                    array = np.empty((shape[0], 1, *shape[2:]), self.dtype)
                    fill(array, filler, self.device.rng)
                else:
                    fill_beside(blob, filler, self.device.random)
        if len(self.blobs) != len(shapes):
            raise ConfigError(
                f"incorrect number of weight blobs: {len(self.blobs)}, not {len(shapes)}"
            )
        for (name, shape), blob in zip(shapes.items(), self.blobs, strict=True):
            if blob.shape != tuple(shape):
                raise ConfigError(
                    f"incorrect {name} shape: expected shape {shape_string(shape)}; "
                    f"instead, shape was {shape_string(blob.shape)}"
                )


class Weighted(Layer):
    """Base of layers that learn a weight and, with bias_term, a bias (O,)."""

    def make_weight(self, shape: Sequence[int], outputs: int, param: Any) -> None:
        """Create the weight of this shape, and a bias for each output, as the layer's message
        `param` says.
        """
        shapes = {"weight": shape} | ({"bias": (outputs,)} if param.bias_term else {})
        self.make_params(shapes, (param.weight_filler, param.bias_filler))

    @property
    def bias(self) -> Array | None:
        """b, None if there is none."""
        return self.blobs[1].data if len(self.blobs) > 1 else None

    @property
    def weight_diff(self) -> Array | None:
        """dw, None if it is not wanted."""
        return self.blobs[0].diff if self.param_propagate_down[0] else None

    @property
    def bias_diff(self) -> Array | None:
        """db, None if it is not wanted."""
        return self.blobs[1].diff if len(self.blobs) > 1 and self.param_propagate_down[1] else None


registry: Registry[Callable[..., Layer]] = Registry("layer type")


def layer(*types: str) -> Callable[[type[Layer]], type[Layer]]:
    """Return a class decorator that registers a layer under these types."""

    def register(cls: type[Layer]) -> type[Layer]:
        registry(*types)(cls)
        return cls

    return register


def create_layer(
    param: LayerParameter,
    phase: int,
    device: Device,
    dtype: DTypeLike = np.float32,
    path: str | None = None,
) -> Layer:
    """Return a layer of `param.type`; ConfigError for an unknown type, or one of a fork."""
    fork = fork_of_layer(param.type)
    if fork and param.type not in registry:
        raise ConfigError(
            f'layer type "{param.type}" is one of {fork}, which caffepy does not have'
        )
    if refused := refused_setting(param):
        setting, fork = refused
        raise ConfigError(f"{setting} is a field of {fork}, which caffepy does not have")
    return registry[param.type](param, phase, device, dtype, path)


def check_counts(layer: Layer, bottoms: int, tops: int) -> None:
    """Raise ConfigError unless the layer takes this many bottoms and tops."""
    for what, have, want in (("bottom", bottoms, layer.bottoms), ("top", tops, layer.tops)):
        least, most = want if isinstance(want, tuple) else (want, want)
        if have < least or (most is not None and have > most):
            wanted = f"{least} or more" if most is None else f"{least} to {most}"
            wanted = f"{least}" if least == most else wanted
            raise ConfigError(f"{layer.type} takes {wanted} {what} blob(s), not {have}")
    if layer.same_count and bottoms != tops:
        raise ConfigError(f"{layer.type} takes as many tops as bottoms, not {tops} for {bottoms}")


class LossLayer(Layer):
    """Base of the losses: predictions and labels, a scalar top, a loss weight by default."""

    bottoms: ClassVar[int | tuple[int, int | None]] = 2
    tops: ClassVar[int | tuple[int, int | None]] = 1
    auto_top_blobs = True
    on_gpu = True
    constant_bottoms: Mapping[int, str] = {
        1: "{type} cannot differentiate its labels; the layer that makes them needs no gradient"
    }

    @property
    def default_weight(self) -> float:
        """The weight of the first top where the prototxt gives none."""
        return 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.param.loss_weight:
            self.param.loss_weight.append(self.default_weight)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, label = bottom[0].shape, bottom[1].shape
        if x[:1] != label[:1]:
            raise ConfigError(
                "predictions and labels must agree in their first axis: "
                f"{list(x)} and {list(label)}"
            )
        top[0].reshape(())


class Drawing(Layer):
    """Base of layers that draw random numbers in forward.

    On a device with a step counter all numbers come from one seed and the counter; else each pass
    draws a new seed.
    """

    # Drawn by the first pass, so that fillers get the same numbers on any device.
    seed: int | None = None
    drawn: tuple[Seed, Array | None] = 0, None  # what `draw` returned last
    counter_of_pass: Array | None = None  # of a layer that is recomputed
    seed_of_pass: Array | None = None  # of a device without a step counter

    @property
    def draws(self) -> bool:
        """True if forward draws, in this phase and with these settings."""
        return self.phase == TRAIN

    def draw(self) -> tuple[Seed, Array | None]:
        """Return the seed of the next numbers and the step counter, None if the device has none;
        then the seed is an array. If forward is recomputed, they are those of the first time.

        The solver counts a pass during its backward, so a layer that is recomputed there keeps a
        copy of the counter.
        """
        if self.recomputes:
            return self.drawn
        counter = self.device.step_counter
        if counter is None:
            if self.seed_of_pass is None:
                self.seed_of_pass = np.zeros((), np.int64)
            draw_seed(self.device, self.seed_of_pass)
            self.drawn = self.seed_of_pass, None
            return self.drawn
        if self.seed is None:
            self.seed = self.device.draw_seed()
        if self.is_recomputed:
            if self.counter_of_pass is None:
                self.counter_of_pass = self.device.zeros(1, counter.dtype).reshape(())
            self.counter_of_pass[...] = counter
            counter = self.counter_of_pass
        self.drawn = self.seed, counter
        return self.drawn

    def state(self) -> dict[str, Any]:
        return {"seed": self.seed} if self.draws and self.device.step_counter is not None else {}

    def set_state(self, state: dict[str, Any]) -> None:
        if self.seed != state["seed"]:
            self.device.allocation_version += 1  # captured graphs contain the old one
        self.seed = state["seed"]
