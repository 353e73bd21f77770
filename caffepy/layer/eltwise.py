"""Eltwise: sums, products and maxima of blobs of one shape; Axpy: scaled channels and a sum;
ChannelScale: scaled places.
"""

import logging
from collections.abc import Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Blobs, Kept, Layer, layer
from caffepy.layer.neuron import is_in_place
from caffepy.proto.caffe_pb2 import TRAIN, EltwiseParameter, FillerParameter

log = logging.getLogger(__name__)


@layer("Eltwise")
class Eltwise(Layer):
    """y = sum of coeff_i * x_i, product of x_i or maximum of x_i over bottoms of one shape; one
    alone needs a coeff (FlowNet2).

    In place, the gradient of bottom 0 is written last, over that of the top, and the product keeps
    a copy of what it overwrites. The gradient of a maximum goes to one bottom: of the first two, if
    they are equal, to the second; to a later one only if it is larger.
    """

    on_gpu = only_launches = can_replay = True
    can_recompute = True
    in_place = True
    bottoms = (1, None)
    takes_preferred_layout = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.eltwise_param
        self.operation = param.operation
        self.backward_reads_bottom = self.operation == EltwiseParameter.PROD
        if self.operation == EltwiseParameter.MAX:
            self.in_place_keeps = Kept.ACTIVE
        if param.coeff and self.operation == EltwiseParameter.PROD:
            raise ConfigError("eltwise_param: coeff is for SUM, not for PROD")
        if len(bottom) == 1 and not (param.coeff and self.operation == EltwiseParameter.SUM):
            raise ConfigError("Eltwise takes 2 or more bottom blob(s), not 1, or one and its coeff")
        if param.coeff and len(param.coeff) != len(bottom):
            raise ConfigError(
                f"eltwise_param: {len(param.coeff)} coeff do not fit {len(bottom)} bottoms"
            )
        self.coefficients = list(param.coeff) or [1.0] * len(bottom)
        self.can_fuse = self.operation == EltwiseParameter.SUM and set(self.coefficients) == {1}

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for i, b in enumerate(bottom):
            if b.shape != bottom[0].shape:
                raise ConfigError(
                    f"bottom {i} has shape {list(b.shape)}, bottom 0 has {list(bottom[0].shape)}: "
                    "they must be equal"
                )
        top[0].reshape_like(bottom[0])
        if self.operation == EltwiseParameter.MAX:
            self.winner = self.buffer(bottom[0].shape, np.int32)
        product = self.operation == EltwiseParameter.PROD
        self.kept = [
            self.buffer_like(b) if product and is_in_place(b, top[0]) else b for b in bottom
        ]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for b, kept in zip(bottom, self.kept, strict=True):
            if kept is not b:
                self.ops.copy(b.data, kept.data)
        xs, y = [kept.data for kept in self.kept], top[0].data
        if len(xs) == 1:
            self.ops.scaled(self.coefficients[0], xs[0], y)
        elif self.operation == EltwiseParameter.SUM:
            self.ops.eltwise_sum(xs, self.coefficients, y)
        elif self.operation == EltwiseParameter.MAX:
            self.ops.eltwise_max(xs, y, self.winner.data)
        else:
            self.ops.multiply(xs[0], xs[1], y)
            for x in xs[2:]:
                self.ops.multiply(y, x, y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """SUM: dx_i = coeff_i * dy. PROD: dy times the other x. MAX: dy where x_i won, else 0."""
        dy = top[0].diff
        for i in reversed(range(len(bottom))):
            if not propagate_down[i]:
                continue
            dx = bottom[i].diff
            if self.operation == EltwiseParameter.MAX:
                self.ops.eltwise_select(self.winner.data, i, dy, dx)
            elif self.operation == EltwiseParameter.PROD:
                first, *others = (b.data for k, b in enumerate(self.kept) if k != i)
                self.ops.multiply(dy, first, dx)
                for x in others:
                    self.ops.multiply(dx, x, dx)
            elif self.coefficients[i] != 1:
                self.ops.scaled(self.coefficients[i], dy, dx)
            elif dx is not dy:
                self.ops.copy(dy, dx)


class _Broadcast(Layer):
    """Base of layers that combine two blobs, axes from the last on, those of size 1 repeated; the
    second is a bottom, or a parameter.
    """

    on_gpu = True
    can_recompute = True
    bottoms = (1, 2)
    backward_reads_top = False

    def other(self, bottom: Blobs) -> Blob:
        """Return the second."""
        return bottom[1] if len(bottom) > 1 else self.blobs[0]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = [b.shape for b in (bottom[0], self.other(bottom))]
        try:
            top[0].reshape(np.broadcast_shapes(*shapes))
        except ValueError as error:
            raise ConfigError(
                f"shapes {list(shapes[0])} and {list(shapes[1])} must agree from their last axes "
                "on, but where one is 1"
            ) from error

    def gradient(self, dy: Array, factor: Array | None, blob: Blob, add: bool = False) -> None:
        """Write to the blob's diff, or add, dy times the factor, summed where it was repeated."""
        d = dy if factor is None else dy * factor
        shape = (1,) * (d.ndim - len(blob.shape)) + tuple(blob.shape)
        repeated = tuple(i for i, n in enumerate(shape) if n == 1 and d.shape[i] != 1)
        total = (d.sum(axis=repeated) if repeated else d).reshape(blob.shape)
        if add:
            blob.diff[...] += total
        else:
            blob.diff[...] = total

    def factors(self, a: Array, b: Array) -> tuple[Array | None, Array | None]:
        """Return what dy is multiplied by for each."""
        raise NotImplementedError

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        other, dy = self.other(bottom), top[0].diff
        of_a, of_b = self.factors(bottom[0].data, other.data)
        if len(bottom) == 1 and self.param_propagate_down[0]:
            self.gradient(dy, of_b, other, add=True)
        elif len(bottom) > 1 and propagate_down[1]:
            self.gradient(dy, of_b, other)
        if propagate_down[0]:
            self.gradient(dy, of_a, bottom[0])


@layer("Add")
class Add(_Broadcast):
    """a + b, each repeated along axes of size 1 (Synopsys)."""

    bottoms = (2, 2)
    backward_reads_bottom = False

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        np.add(bottom[0].data, bottom[1].data, out=top[0].data)

    def factors(self, a: Array, b: Array) -> tuple[Array | None, Array | None]:
        return None, None


@layer("Mul")
class Mul(_Broadcast):
    """a * b, each repeated along axes of size 1; b is a parameter of `mul_shape` where there is no
    second bottom (Synopsys).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom) == 1:
            zeros = FillerParameter(type="constant")
            self.make_params({"factor": tuple(self.param.mul_param.mul_shape)}, [zeros])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        np.multiply(bottom[0].data, self.other(bottom).data, out=top[0].data)

    def factors(self, a: Array, b: Array) -> tuple[Array | None, Array | None]:
        return b, a


@layer("Axpy")
class Axpy(Layer):
    """z = a * x + y (SENet); x, y, z (N, C, ...), a (N, C) or (N, C, 1, ...)."""

    on_gpu = True
    can_recompute = True
    bottoms = 3
    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        a, x, y = (b.shape for b in bottom)
        if len(x) < 2 or a[:2] != x[:2] or prod(a[2:]) != 1:
            raise ConfigError(
                f"bottom 0 has shape {list(a)}: one number for each image and channel of "
                f"bottom 1, {list(x)}, is needed"
            )
        if y != x:
            raise ConfigError(f"bottom 2 has shape {list(y)}, bottom 1 has {list(x)}")
        top[0].reshape(x)
        self.view = (1, prod(x[:2]), prod(x[2:]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, x, y = (b.data for b in bottom)
        z = top[0].data
        self.ops.scale_forward(x.reshape(self.view), a.reshape(-1), None, z.reshape(self.view))
        self.ops.add(y, z)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = sum of dz * x over what follows the channels, dx = dz * a, dy = dz."""
        dz, (a, x, y) = top[0].diff, bottom
        da = dx = None
        if propagate_down[0]:
            a.diff.fill(0)
            da = a.diff.reshape(-1)
        if propagate_down[1]:
            dx = x.diff.reshape(self.view)
        if propagate_down[0] or propagate_down[1]:
            scale, view = a.data.reshape(-1), x.data.reshape(self.view)
            self.ops.scale_backward(view, scale, dz.reshape(self.view), dx, da, None)
        if propagate_down[2]:
            self.ops.copy(dz, y.diff)


@layer("ChannelScale")
class ChannelScale(Layer):
    """y = x * s; x (N, C, ...), s (N, 1, ...), one number for all channels of a place (happynear's
    NormFace).

    With global_scale y = x * g instead: g, the only parameter (1) and the optional top 1, begins as
    the mean of |s| in the first TRAIN pass and then moves by 0.01 towards that of each pass, within
    min_global_scale and max_global_scale. do_forward, do_backward_feature and do_backward_scale as
    false leave out the scale of y, of dx, and ds. The gradient of x is dy * s with global_scale,
    too, as in the fork.
    """

    on_gpu = True
    can_recompute = True
    bottoms = 2
    tops = (1, 2)
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.channel_scale_param
        if len(top) > 1 and not param.global_scale:
            raise ConfigError("a second top, the scale, goes with global_scale: true")
        if not param.global_scale:
            return
        if param.do_backward_feature:
            log.info("%s: gradients are scaled place by place, as the fork's", self.type)
        self.make_params({"scale": (1,)}, [FillerParameter(value=-1)])
        self.statistics = self.blobs
        spec = self.param.param[0] if self.param.param else self.param.param.add()
        if spec.HasField("lr_mult") and spec.lr_mult:
            raise ConfigError("the scale of global_scale is a statistic; its lr_mult must be 0")
        spec.lr_mult = spec.decay_mult = 0

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, scale = (blob.shape for blob in bottom)
        if len(x) < 2 or scale[:1] != x[:1] or prod(scale) != x[0] * prod(x[2:]):
            raise ConfigError(
                f"bottom 1 has shape {list(scale)}: one number for each place of each image of "
                f"bottom 0, {list(x)}, is needed"
            )
        top[0].reshape(x)
        for blob in top[1:]:
            blob.reshape((1,))
        self.view = (x[0], x[1], prod(x[2:]))

    def moved(self, scale: Array) -> Array:
        """Return g (1), in TRAIN moved towards the mean of |scale|."""
        param, stored = self.settings, self.blobs[0].data
        if self.phase == TRAIN and not self.recomputes and scale.size:
            mean = np.abs(scale).mean()
            moved = np.where(stored < 0, mean, stored * 0.99 + mean * 0.01)
            stored[...] = np.clip(moved, param.min_global_scale, param.max_global_scale)
        return stored

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = (blob.data.reshape(self.view) for blob in (bottom[0], top[0]))
        scale = bottom[1].data.reshape(self.view[0], 1, self.view[2])
        if not self.settings.do_forward:
            self.ops.copy(x, y)
            return
        if self.settings.global_scale:
            scale = self.moved(scale)
            for blob in top[1:]:
                blob.data[...] = scale
        np.multiply(x, scale, out=y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * s, ds = sum over the channels of dy * x."""
        param, dy = self.settings, top[0].diff.reshape(self.view)
        places = self.view[0], 1, self.view[2]
        if propagate_down[1]:
            ds = bottom[1].diff.reshape(places)
            if param.do_backward_scale:
                np.sum(bottom[0].data.reshape(self.view) * dy, axis=1, keepdims=True, out=ds)
            else:
                ds.fill(0)
        if propagate_down[0]:
            scale = bottom[1].data.reshape(places) if param.do_backward_feature else 1
            np.multiply(dy, scale, out=bottom[0].diff.reshape(self.view))
