"""Recurrent layers: T steps of N independent streams, (T, N, ...), with `cont` (T, N) 0 where a
sequence begins.

The state after the last step is where the next batch begins; no gradient crosses from batch to
batch. Each layer is a matrix product over the inputs of all steps, one loop of the back end, and
products for the gradients afterwards.
"""

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob, shape_string
from caffepy.layer.base import Blobs, Layer, layer

log = logging.getLogger(__name__)


class Recurrent(Layer):
    """Bottoms x (T, N, ...), cont (T, N), perhaps x_static (N, ...); with expose_hidden then the
    states (1, N, H).

    Tops (T, N, H) and with expose_hidden the states after the last step. Weights (G, D), bias (G)
    of the inputs, perhaps weights (G, D_static) of the static input, weights (G, H) of the state,
    then what the type adds. States get and give no gradient. `own` is LSTM's c or RNN's o of all
    steps: a layer in place may overwrite the top.
    """

    on_gpu = True
    backward_reads_top = False
    bottoms: ClassVar[int | tuple[int, int | None]] = (2, 5)
    tops: ClassVar[int | tuple[int, int | None]] = (1, 3)
    states: ClassVar[int] = 1
    gates: ClassVar[int] = 1  # G = gates * H
    input_name: ClassVar[str]
    # Names of the further parameters: (H, H) for a W, (H) for a b.
    added: ClassVar[Sequence[str]] = ()
    constant_bottoms: Mapping[int, str] = {
        1: "Cannot backpropagate to sequence indicators (bottom 1); they need propagate_down: false"
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.recurrent_param
        self.exposed = self.states if param.expose_hidden else 0
        least = 2 + self.exposed
        if len(bottom) not in (least, least + 1) or len(top) != 1 + self.exposed:
            raise ConfigError(
                f"{self.type} with expose_hidden: {str(param.expose_hidden).lower()} takes {least} "
                f"bottoms, one more for a static input, and {1 + self.exposed} top(s), "
                f"not {len(bottom)} and {len(top)}"
            )
        if param.num_output < 1:
            raise ConfigError("num_output must be positive")
        self.static = len(bottom) > least
        self.check_axes(bottom)
        self.size, self.steps = param.num_output, bottom[0].shape[0]
        self.inputs = prod(bottom[0].shape[2:])
        assumed = "input batch contains %d timesteps of %d independent streams."
        log.info("Initializing recurrent layer: assuming " + assumed, *bottom[0].shape[:2])
        rows = self.gates * self.size
        shapes = {f"W_{self.input_name}": (rows, self.inputs), f"b_{self.input_name[-1]}": (rows,)}
        if self.static:
            self.static_inputs = prod(bottom[2].shape[1:])
            shapes[f"W_{self.input_name}_static"] = (rows, self.static_inputs)
        shapes[f"W_h{self.input_name[-1]}"] = (rows, self.size)
        shapes |= {name: (self.size,) * (2 if name.startswith("W") else 1) for name in self.added}
        by_axes = {1: param.bias_filler, 2: param.weight_filler}
        self.make_params(shapes, [by_axes[len(shape)] for shape in shapes.values()])
        for i, name in enumerate(shapes):
            log.info("Adding parameter %d: %s", i, name)
        self.state_weight = 2 + self.static  # its index in blobs
        blobs = [self.buffer((1, 0, self.size)) for _ in range(2 * self.states)]
        self.first, self.last = blobs[: self.states], blobs[self.states :]
        self.sums, self.static_sums, self.kept, self.own = (self.buffer() for _ in range(4))

    def check_axes(self, bottom: Blobs) -> None:
        """ConfigError if bottoms disagree in steps or streams."""
        x, cont = bottom[0].shape, bottom[1].shape
        if x[:1] == (0,):
            raise ConfigError(f"{self.type} needs 1 timestep or more; bottom[0] is {list(x)}")
        if len(x) < 2:
            raise ConfigError(
                f"bottom[0] must have at least 2 axes -- (#timesteps, #streams, ...), not {list(x)}"
            )
        if cont != x[:2]:
            raise ConfigError(
                "bottom[1] must have exactly 2 axes -- (#timesteps, #streams), those of bottom[0]: "
                f"{list(cont)} and {list(x)}"
            )
        if self.static and bottom[2].shape[:1] != x[1:2]:
            raise ConfigError(
                f"the static input must have the {x[1]} streams of bottom[0] as its first axis: "
                f"{list(bottom[2].shape)}"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Shape tops and buffers. Only the number of streams may differ from that at set-up."""
        self.check_axes(bottom)
        steps, self.streams, *rest = bottom[0].shape
        if steps != self.steps:
            raise ConfigError(
                f"input number of timesteps changed: {steps}, at set-up it was {self.steps}"
            )
        sizes = [(self.inputs, prod(rest))]
        if self.static:
            sizes.append((self.static_inputs, prod(bottom[2].shape[1:])))
        for before, now in sizes:
            if before != now:
                raise ConfigError(
                    "Input size incompatible with the weights: "
                    f"they are for {before} inputs, not {now}"
                )
        state = (1, self.streams, self.size)
        for i in range(len(bottom) - self.exposed, len(bottom)):
            if bottom[i].shape != state:
                raise ConfigError(
                    f"bottom[{i}] shape must match hidden state input shape: "
                    f"{shape_string(state)}, not {shape_string(bottom[i].shape)}"
                )
        for blob in [*self.first, *self.last, *top[1:]]:
            blob.reshape(state)
        top[0].reshape((steps, self.streams, self.size))
        self.sums.reshape((steps, self.streams, self.gates * self.size))
        self.static_sums.reshape((self.streams, self.gates * self.size))
        self.kept.reshape((steps, self.streams, self.size))
        self.own.reshape((steps, self.streams, self.size))

    def begin_states(self, bottom: Blobs) -> list[Array]:
        """Return the states (N, H) that this batch begins with: those after the last batch."""
        if not self.exposed:
            for first, last in zip(self.first, self.last, strict=True):
                self.ops.copy(last.data, first.data)
        return self.first_states(bottom)

    def first_states(self, bottom: Blobs) -> list[Array]:
        """The states that `begin_states` returned."""
        return [blob.data[0] for blob in (bottom[-self.exposed :] if self.exposed else self.first)]

    def end(self, top: Blobs, *states: Array) -> None:
        """Keep the states after the last step, or write them to the tops."""
        for blob, state in zip(top[1:] if self.exposed else self.last, states, strict=True):
            self.ops.copy(state, blob.data[0])

    def sum_inputs(self, bottom: Blobs) -> None:
        """sums = x @ w.T + b, and the static input's product in every step."""
        sums = self.sums.data
        flat = sums.reshape(-1, self.gates * self.size)  # (T N, G)
        self.ops.matmul(bottom[0].data.reshape(-1, self.inputs), self.blobs[0].data.T, flat)
        self.ops.add_bias(flat, self.blobs[1].data)
        if self.static:
            x = bottom[2].data.reshape(self.streams, self.static_inputs)
            # (N, D_static) @ (D_static, G)
            self.ops.matmul(x, self.blobs[2].data.T, self.static_sums.data)
            sums += self.static_sums.data

    def spread_gradient(self, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Compute the gradients of the inputs and of their weights from those of the sums."""
        wanted = self.param_propagate_down
        dsums = self.sums.diff
        flat = dsums.reshape(-1, self.gates * self.size)
        if wanted[0]:
            x = bottom[0].data.reshape(-1, self.inputs)
            self.ops.matmul(flat.T, x, self.blobs[0].diff, accumulate=True)  # (G, T N) @ (T N, D)
        if wanted[1]:
            self.ops.bias_gradient(flat, self.blobs[1].diff)
        if wanted[self.state_weight]:
            kept, dw_h = self.kept.data.reshape(-1, self.size), self.blobs[self.state_weight].diff
            self.ops.matmul(flat.T, kept, dw_h, accumulate=True)  # (G, T N) @ (T N, H)
        if propagate_down[0]:
            dx = bottom[0].diff.reshape(-1, self.inputs)
            self.ops.matmul(flat, self.blobs[0].data, dx)  # (T N, G) @ (G, D)
        if self.static and (wanted[2] or propagate_down[2]):
            w, shape = self.blobs[2], (self.streams, self.static_inputs)
            x, dx = bottom[2].data.reshape(shape), bottom[2].diff.reshape(shape)
            total = dsums.sum(axis=0, out=self.static_sums.diff)
            if wanted[2]:
                self.ops.matmul(total.T, x, w.diff, accumulate=True)  # (G, N) @ (N, D_static)
            if propagate_down[2]:
                self.ops.matmul(total, w.data, dx)  # (N, G) @ (G, D_static)
        for i in range(2 + self.static, len(bottom)):
            if propagate_down[i]:
                bottom[i].diff[...] = 0

    def state(self) -> dict[str, Any]:
        return {} if self.exposed else {"last": [blob.host_data.copy() for blob in self.last]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Begin the next batch with these states, whatever their number of streams."""
        _refill(self.last, state)


def _refill(last: Sequence[Blob], state: Mapping[str, Any]) -> None:
    for blob, array in zip(last, state.get("last", ()), strict=True):
        shape = blob.shape
        blob.reshape(array.shape)
        blob.host_data[...] = array
        blob.reshape(shape)


@layer("LSTM")
class LSTM(Recurrent):
    """i, f, o, g = w_x x_t + b + w_static x_static + w_h (cont_t h_{t-1}); c_t = f c_{t-1} + i g;
    h_t = o tanh(c_t).

    i, o and f / cont_t are sigmoids, g is tanh. States h, then c. Parameters W_xc (4H, D), b_c
    (4H), [W_xc_static (4H, D_static),] W_hc (4H, H) (Hochreiter and Schmidhuber 1997).
    """

    states = 2
    gates = 4
    input_name = "xc"

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.loop = self.ops.LSTM(self.steps, self.streams, self.size, self.dtype)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        h, c, w = top[0].data, self.own.data, self.blobs[self.state_weight].data
        first = self.begin_states(bottom)
        self.sum_inputs(bottom)
        self.loop.forward(self.sums.data, w, bottom[1].data, first, self.kept.data, h, c)
        self.end(top, h[-1], c[-1])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        self.refuse_constants(propagate_down)
        w, (_, c_first) = self.blobs[self.state_weight].data, self.first_states(bottom)
        a, da = self.sums.data, self.sums.diff
        self.loop.backward(a, w, bottom[1].data, c_first, self.own.data, top[0].diff, da)
        self.spread_gradient(propagate_down, bottom)


@layer("RNN")
class RNN(Recurrent):
    """h_t = tanh(w_x x_t + b + w_static x_static + w_h (cont_t h_{t-1})); the top is o_t = tanh(w_o
    h_t + b_o).

    State h. Parameters W_xh (H, D), b_h (H), [W_xh_static (H, D_static),] W_hh (H, H), W_ho (H, H),
    b_o (H).
    """

    input_name = "xh"
    added = ("W_ho", "b_o")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.loop = self.ops.RNN(self.steps, self.streams, self.size, self.dtype)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        w_h, w_o, b_o = (blob.data for blob in self.blobs[self.state_weight :])
        (h_first,) = self.begin_states(bottom)
        self.sum_inputs(bottom)
        h, o = self.sums.data, self.own.data.reshape(-1, self.size)
        self.loop.forward(h, w_h, bottom[1].data, h_first, self.kept.data)
        self.ops.matmul(h.reshape(-1, self.size), w_o.T, o)  # (T N, H) @ (H, H)
        self.ops.add_bias(o, b_o)
        self.ops.tanh_forward(o, o)
        self.ops.copy(self.own.data, top[0].data)
        self.end(top, h[-1])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        self.refuse_constants(propagate_down)
        w_h, w_o, b_o = self.blobs[self.state_weight :]
        wanted = self.param_propagate_down[self.state_weight :]
        h, dh = (a.reshape(-1, self.size) for a in (self.sums.data, self.sums.diff))
        do = self.own.diff.reshape(-1, self.size)
        self.ops.tanh_backward(self.own.data, top[0].diff, self.own.diff)
        if wanted[1]:
            self.ops.matmul(do.T, h, w_o.diff, accumulate=True)  # (H, T N) @ (T N, H)
        if wanted[2]:
            self.ops.bias_gradient(do, b_o.diff)
        self.ops.matmul(do, w_o.data, dh)  # (T N, H) @ (H, H)
        self.loop.backward(self.sums.data, w_h.data, bottom[1].data, self.sums.diff)
        self.spread_gradient(propagate_down, bottom)


@layer("LSTMUnit")
class LSTMUnit(Layer):
    """c_prev (1, N, H), gates (1, N, 4H) in the order i, f, o, g, cont (1, N) -> c, h, both (1, N,
    H).

    c = f c_prev + i g, h = o tanh(c); i, o sigmoids, g tanh, f a sigmoid times cont.
    """

    on_gpu = True
    bottoms = 3
    tops = 2
    constant_bottoms: Mapping[int, str] = {
        2: "Cannot backpropagate to sequence indicators (bottom 2); they need propagate_down: false"
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.activations = self.buffer()

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = [b.shape for b in bottom]
        if len(shapes[0]) != 3 or shapes[0][0] != 1:
            raise ConfigError(f"the cell state must be (1, N, H), not {list(shapes[0])}")
        _, n, size = shapes[0]
        if shapes[1:] != [(1, n, 4 * size), (1, n)]:
            raise ConfigError(
                f"the gates must be {[1, n, 4 * size]} and the sequence indicators {[1, n]}, "
                f"not {list(shapes[1])} and {list(shapes[2])}"
            )
        for blob in top:
            blob.reshape(shapes[0])
        self.activations.reshape(shapes[1])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        c_before, _, cont = (blob.data[0] for blob in bottom)
        c, h = (blob.data[0] for blob in top)
        self.ops.copy(bottom[1].data, self.activations.data)
        self.ops.lstm_unit_forward(self.activations.data[0], c_before, cont, c, h)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        self.refuse_constants(propagate_down)
        if any(propagate_down):
            (c_before, gates, _), (c, h) = bottom, top
            a, dc, da = self.activations.data[0], c_before.diff[0], gates.diff[0]
            self.ops.copy(c.diff, c_before.diff)
            self.ops.lstm_unit_backward(a, c_before.data[0], c.data[0], h.diff[0], dc, da)


@layer("ContinuationIndicator")
class ContinuationIndicator(Layer):
    """The top (time_step, batch_size) is 0 in the first step and 1 in the others: each item of a
    batch is a sequence of its own (crnn.caffe). With a bottom its `axis` gives the batch_size
    (deepdetect).
    """

    on_gpu = True
    bottoms = (0, 1)
    reads_shapes_only = True
    stops_gradient = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.continuation_indicator_param
        items = bottom[0].shape[bottom[0].axis(param.axis)] if bottom else param.batch_size
        if not param.time_step or not (bottom or items):
            raise ConfigError("continuation_indicator_param needs a time_step and a batch_size")
        top[0].reshape((param.time_step, items))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        top[0].data[:1] = 0
        top[0].data[1:] = 1


@layer("Lstm")
class Lstm(Layer):
    """x (T, N, ...), perhaps cont (T, N) -> h (T, N, H), an LSTM as `LSTM` but for its parameters
    W_x (4H, D), W_h (4H, H), b (4H) (junhyukoh's, CTPN).

    Bottoms of two axes, and all with a batch_size, are (T * N, ...), as is then the top, with N =
    batch_size. Without cont each batch begins with states of 0, with it where the last one ended.
    Gradients of the gates of each step are cut to +-clipping_threshold, unless that is 0.
    """

    on_gpu = True
    bottoms = (1, 2)
    backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {
        1: "Cannot backpropagate to sequence indicators (bottom 1); they need propagate_down: false"
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.lstm_param, bottom[0].shape
        if param.num_output < 1 or not param.clipping_threshold >= 0:
            raise ConfigError(
                "lstm_param: num_output must be 1 or more and clipping_threshold 0 or more, not "
                f"{param.num_output} and {param.clipping_threshold:g}"
            )
        if param.batch_size < 1:
            raise ConfigError("lstm_param: batch_size must be 1 or more, not 0")
        if len(shape) < 2:
            raise ConfigError(f"Lstm needs (T, N, ...) or (T * N, ...), not {list(shape)}")
        self.flat = len(shape) == 2 or param.HasField("batch_size")
        self.size, self.inputs = param.num_output, prod(shape[1 if self.flat else 2 :])
        rows = 4 * self.size
        shapes = {"W_x": (rows, self.inputs), "W_h": (rows, self.size), "b": (rows,)}
        fillers = param.weight_filler, param.weight_filler, param.bias_filler
        self.make_params(shapes, fillers)
        self.sums, self.kept, self.h, self.c = (self.buffer() for _ in range(4))
        self.first, self.last = ([self.buffer((0, self.size)) for _ in range(2)] for _ in range(2))
        self.cont, self.step = self.buffer(), self.buffer()

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, param = bottom[0].shape, self.param.lstm_param
        if self.flat and shape[0] % param.batch_size:
            raise ConfigError(
                f"{shape[0]} items cannot be divided into sequences of a batch of "
                f"{param.batch_size}"
            )
        self.steps, self.streams = (
            (shape[0] // param.batch_size, param.batch_size) if self.flat else shape[:2]
        )
        if not self.steps:
            raise ConfigError(f"Lstm needs 1 step or more, which {list(shape)} do not have")
        if prod(shape[1 if self.flat else 2 :]) != self.inputs:
            raise ConfigError(f"the weights are for {self.inputs} inputs, not {list(shape)}")
        if len(bottom) > 1 and bottom[1].count != self.steps * self.streams:
            raise ConfigError(
                f"{self.steps} steps of {self.streams} sequences need as many indicators, not "
                f"{list(bottom[1].shape)}"
            )
        whole = (self.steps, self.streams, self.size)
        top[0].reshape((shape[0], self.size) if self.flat else whole)
        self.sums.reshape((*whole[:2], 4 * self.size))
        for blob in (self.kept, self.h, self.c):
            blob.reshape(whole)
        for blob in (*self.first, *self.last):
            blob.reshape(whole[1:])
        self.cont.reshape(whole[:2])
        self.step.reshape(whole[1:])
        self.loop = self.ops.LSTM(*whole, self.dtype)

    def indicators(self, bottom: Blobs) -> Array:
        """Return cont (T, N); without one 0 in the first step, 1 in the others."""
        if len(bottom) > 1:
            given: Array = bottom[1].data.reshape(self.steps, self.streams)
            return given
        self.cont.data[:1] = 0
        self.cont.data[1:] = 1
        return self.cont.data

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        w_x, w_h, bias = (blob.data for blob in self.blobs)
        for first, last in zip(self.first, self.last, strict=True):
            if len(bottom) > 1:
                self.ops.copy(last.data, first.data)
            else:
                first.data.fill(0)
        sums = self.sums.data
        rows = sums.reshape(-1, 4 * self.size)
        self.ops.matmul(bottom[0].data.reshape(-1, self.inputs), w_x.T, rows)  # (T N, D) @ (D, 4H)
        self.ops.add_bias(rows, bias)
        begun = [blob.data for blob in self.first]
        h, c = self.h.data, self.c.data
        self.loop.forward(sums, w_h, self.indicators(bottom), begun, self.kept.data, h, c)
        for last, state in zip(self.last, (h, c), strict=True):
            self.ops.copy(state[-1], last.data)
        self.ops.copy(h.reshape(top[0].shape), top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        self.refuse_constants(propagate_down)
        a, da, dy = self.sums.data, self.sums.diff, top[0].diff.reshape(self.h.shape)
        cont, w_h, c_first = self.indicators(bottom), self.blobs[1].data, self.first[1].data
        if self.param.lstm_param.clipping_threshold:
            self.cut_gradients(cont, dy)
        else:
            self.loop.backward(a, w_h, cont, c_first, self.c.data, dy, da)
        rows, wanted = da.reshape(-1, 4 * self.size), self.param_propagate_down
        x = bottom[0].data.reshape(-1, self.inputs)
        for i, read in enumerate((x, self.kept.data.reshape(-1, self.size))):
            if wanted[i]:  # (4H, T N) @ (T N, D or H)
                self.ops.matmul(rows.T, read, self.blobs[i].diff, accumulate=True)
        if wanted[2]:
            self.ops.bias_gradient(rows, self.blobs[2].diff)
        if propagate_down[0]:
            dx = bottom[0].diff.reshape(-1, self.inputs)
            self.ops.matmul(rows, self.blobs[0].data, dx)  # (T N, 4H) @ (4H, D)

    def cut_gradients(self, cont: Array, dy: Array) -> None:
        """Compute the gradients of the sums, step by step, each cut before it goes on."""
        most = self.param.lstm_param.clipping_threshold
        dc, dh, back = self.c.diff[-1], self.h.diff[-1], self.step.data
        dc.fill(0)
        back.fill(0)
        for t in range(self.steps - 1, -1, -1):
            np.add(dy[t], back, out=dh)
            da = self.sums.diff[t]
            before = self.c.data[t - 1] if t else self.first[1].data
            self.ops.lstm_unit_backward(self.sums.data[t], before, self.c.data[t], dh, dc, da)
            np.clip(da, -most, most, out=da)
            self.ops.matmul(da, self.blobs[1].data, back)  # (N, 4H) @ (4H, H)
            back *= cont[t][:, None]

    def state(self) -> dict[str, Any]:
        return {"last": [blob.host_data.copy() for blob in self.last]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Begin the next batch with these states, whatever their number of sequences."""
        _refill(self.last, state)
