"""Caffe's well-known nets as JAX's users write them, for beside_peers.py: functions of a tree of
parameters, compiled by XLA, channels last, float32 weights with bfloat16 activations (or float32
with TF32 products).

`trainer` gives what trains a net of NETS on data that lie on the device. BatchNorm keeps its
running averages.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from jax import lax
from jax import numpy as jnp

jax.config.update("jax_default_prng_impl", "rbg")
RATE, MOMENTUM, DECAY = 0.001, 0.9, 5e-4
AXES = ("NHWC", "HWIO", "NHWC")
Array = Any


class Scope:
    """Names parameters in the order in which a net asks for them: makes them the first time, reads
    them afterwards.
    """

    def __init__(self, parameters: list[Array] | None, averages: list[Array], key: Array) -> None:
        self.made: list[Array] = []
        self.parameters = parameters
        self.averages = averages
        self.next_averages: list[Array] = []
        self.key = key
        self.dtype: Any = jnp.float32

    def split(self) -> Array:
        self.key, key = jax.random.split(self.key)
        return key

    def weight(self, shape: tuple[int, ...], fan_in: int) -> Array:
        """Return a weight: Gaussian when it is made; zeros where `fan_in` is 0."""
        if self.parameters is None:
            deviation = (2 / fan_in) ** 0.5 if fan_in else 0.0
            self.made.append(jax.random.normal(self.split(), shape) * deviation)
            return self.made[-1]
        self.made.append(self.parameters[len(self.made)])
        return self.made[-1]

    def convolution(
        self, x: Array, outputs: int, size: int, stride: int = 1, pad: int = 0, **options: Any
    ) -> Array:
        groups, bias = options.get("groups", 1), options.get("bias", True)
        inputs = x.shape[-1] // groups
        shape = (size, size, inputs, outputs)
        w = self.weight(shape, size * size * inputs).astype(self.dtype)
        y = lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            [(pad, pad)] * 2,
            dimension_numbers=AXES,
            feature_group_count=groups,
        )
        return y + self.weight((outputs,), 0).astype(self.dtype) if bias else y

    def inner_product(self, x: Array, outputs: int) -> Array:
        x = x.reshape(x.shape[0], -1)
        w = self.weight((x.shape[-1], outputs), x.shape[-1]).astype(self.dtype)
        return x @ w + self.weight((outputs,), 0).astype(self.dtype)

    def batch_norm(self, x: Array) -> Array:
        channels = x.shape[-1]
        scale, shift = self.weight((channels,), 0) + 1, self.weight((channels,), 0)
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        kept = jnp.stack([mean, variance])
        if len(self.averages) > len(self.next_averages):
            kept = 0.999 * self.averages[len(self.next_averages)] + 0.001 * kept
        self.next_averages.append(lax.stop_gradient(kept))
        return ((wide - mean) * lax.rsqrt(variance + 1e-5) * scale + shift).astype(self.dtype)

    def dropout(self, x: Array, ratio: float = 0.5) -> Array:
        kept = jax.random.bernoulli(self.split(), 1 - ratio, x.shape)
        return jnp.where(kept, x / (1 - ratio), 0).astype(x.dtype)


def pooled(x: Array, size: int, stride: int, pad: int = 0, average: bool = False) -> Array:
    """Caffe's pooling, whose output is rounded up."""
    outputs = -(-(x.shape[1] + 2 * pad - size) // stride) + 1
    if pad and (outputs - 1) * stride >= x.shape[1] + pad:
        outputs -= 1
    behind = max(0, (outputs - 1) * stride + size - x.shape[1] - pad)
    window, steps = (1, size, size, 1), (1, stride, stride, 1)
    pads = ((0, 0), (pad, behind), (pad, behind), (0, 0))
    if average:
        return (lax.reduce_window(x, 0.0, lax.add, window, steps, pads) / size**2).astype(x.dtype)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, steps, pads)


def local_response(x: Array) -> Array:
    squares = jnp.square(x.astype(jnp.float32))
    sums = lax.reduce_window(squares, 0.0, lax.add, (1, 1, 1, 5), (1, 1, 1, 1), "SAME")
    return (x * (1 + 1e-4 / 5 * sums) ** -0.75).astype(x.dtype)


relu = jax.nn.relu


def lenet(s: Scope, x: Array) -> list[Array]:
    x = pooled(s.convolution(x, 20, 5), 2, 2)
    x = pooled(s.convolution(x, 50, 5), 2, 2)
    return [s.inner_product(relu(s.inner_product(x, 500)), 10)]


def cifar10_quick(s: Scope, x: Array) -> list[Array]:
    x = relu(pooled(s.convolution(x, 32, 5, pad=2), 3, 2))
    x = pooled(relu(s.convolution(x, 32, 5, pad=2)), 3, 2, average=True)
    x = pooled(relu(s.convolution(x, 64, 5, pad=2)), 3, 2, average=True)
    return [s.inner_product(s.inner_product(x, 64), 10)]


def fully_connected(s: Scope, x: Array) -> list[Array]:
    for _ in range(2):
        x = s.dropout(relu(s.inner_product(x, 4096)))
    return [s.inner_product(x, 1000)]


def five_convolutions(s: Scope, x: Array, reduce: Callable[[Array], Array]) -> list[Array]:
    x = reduce(relu(s.convolution(x, 96, 11, 4)))
    x = reduce(relu(s.convolution(x, 256, 5, pad=2, groups=2)))
    x = relu(s.convolution(x, 384, 3, pad=1))
    x = relu(s.convolution(x, 384, 3, pad=1, groups=2))
    return fully_connected(s, pooled(relu(s.convolution(x, 256, 3, pad=1, groups=2)), 3, 2))


def caffenet(s: Scope, x: Array) -> list[Array]:
    return five_convolutions(s, x, lambda y: local_response(pooled(y, 3, 2)))


def alexnet(s: Scope, x: Array) -> list[Array]:
    return five_convolutions(s, x, lambda y: pooled(local_response(y), 3, 2))


def vgg16(s: Scope, x: Array) -> list[Array]:
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = relu(s.convolution(x, width, 3, pad=1))
        x = pooled(x, 2, 2)
    return fully_connected(s, x)


def googlenet(s: Scope, x: Array) -> list[Array]:
    def inception(
        x: Array, one: int, three: tuple[int, int], five: tuple[int, int], last: int
    ) -> Array:
        branches = [
            s.convolution(x, one, 1),
            s.convolution(relu(s.convolution(x, three[0], 1)), three[1], 3, pad=1),
            s.convolution(relu(s.convolution(x, five[0], 1)), five[1], 5, pad=2),
            s.convolution(pooled(x, 3, 1, 1), last, 1),
        ]
        return jnp.concatenate([relu(branch) for branch in branches], -1)

    def auxiliary(x: Array) -> Array:
        x = relu(s.convolution(pooled(x, 5, 3, average=True), 128, 1))
        return s.inner_product(s.dropout(relu(s.inner_product(x, 1024)), 0.7), 1000)

    x = local_response(pooled(relu(s.convolution(x, 64, 7, 2, 3)), 3, 2))
    x = relu(s.convolution(relu(s.convolution(x, 64, 1)), 192, 3, pad=1))
    x = pooled(local_response(x), 3, 2)
    x = inception(x, 64, (96, 128), (16, 32), 32)
    x = pooled(inception(x, 128, (128, 192), (32, 96), 64), 3, 2)
    x = inception(x, 192, (96, 208), (16, 48), 64)
    first = auxiliary(x)
    x = inception(x, 160, (112, 224), (24, 64), 64)
    x = inception(x, 128, (128, 256), (24, 64), 64)
    x = inception(x, 112, (144, 288), (32, 64), 64)
    second = auxiliary(x)
    x = pooled(inception(x, 256, (160, 320), (32, 128), 128), 3, 2)
    x = inception(x, 256, (160, 320), (32, 128), 128)
    x = inception(x, 384, (192, 384), (48, 128), 128)
    return [s.inner_product(s.dropout(x.mean((1, 2)), 0.4), 1000), first, second]


def resnet50(s: Scope, x: Array) -> list[Array]:
    def normalized(x: Array, outputs: int, size: int = 1, stride: int = 1) -> Array:
        return s.batch_norm(s.convolution(x, outputs, size, stride, size // 2, bias=False))

    x = pooled(relu(normalized(x, 64, 7, 2)), 3, 2)
    for width, count, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            stride = first_stride if i == 0 else 1
            y = relu(normalized(relu(normalized(x, width, 1, stride)), width, 3))
            y = normalized(y, 4 * width)
            x = relu(y + (normalized(x, 4 * width, 1, stride) if i == 0 else x))
    return [s.inner_product(x.mean((1, 2)), 1000)]


def mobilenet_v2(s: Scope, x: Array) -> list[Array]:
    def normalized(x: Array, outputs: int, size: int, stride: int = 1, groups: int = 1) -> Array:
        pad = size // 2
        y = s.convolution(x, outputs, size, stride, pad, groups=groups, bias=False)
        return s.batch_norm(y)

    x = jax.nn.relu6(normalized(x, 32, 3, 2))
    plan = (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1)
    for expansion, width, count, first_stride in (*plan, (6, 160, 3, 2), (6, 320, 1, 1)):
        for i in range(count):
            stride, inner = first_stride if i == 0 else 1, x.shape[-1] * expansion
            y = jax.nn.relu6(normalized(x, inner, 1)) if expansion > 1 else x
            y = jax.nn.relu6(normalized(y, inner, 3, stride, groups=inner))
            y = normalized(y, width, 1)
            x = x + y if x.shape == y.shape else y
    return [s.inner_product(jax.nn.relu6(normalized(x, 1280, 1)).mean((1, 2)), 1000)]


NETS: dict[str, tuple[Callable[[Scope, Array], list[Array]], tuple[int, int, int], int]] = {
    "lenet": (lenet, (28, 28, 1), 10),
    "cifar10_quick": (cifar10_quick, (32, 32, 3), 10),
    "caffenet": (caffenet, (227, 227, 3), 1000),
    "alexnet": (alexnet, (227, 227, 3), 1000),
    "googlenet": (googlenet, (224, 224, 3), 1000),
    "vgg16": (vgg16, (224, 224, 3), 1000),
    "resnet50": (resnet50, (224, 224, 3), 1000),
    "mobilenet_v2": (mobilenet_v2, (224, 224, 3), 1000),
}


def trainer(name: str, batch: int, mode: str, steps: int) -> Callable[[], Callable[[], None]]:
    """Return a function that enqueues `steps` training steps as one call of what XLA compiled, and
    returns what waits for them.
    """
    net, shape, classes = NETS[name]
    dtype = jnp.bfloat16 if mode == "bf16" else jnp.float32
    precision = {"bf16": "default", "fp32": "float32"}.get(mode, "tensorfloat32")
    jax.config.update("jax_default_matmul_precision", precision)
    key = jax.random.key(0)
    x = jax.random.normal(key, (batch, *shape)).astype(dtype)
    y = jax.random.randint(key, (batch,), 0, classes)
    first = Scope(None, [], key)
    net(first, jax.random.normal(key, (2, *shape)))
    parameters, averages = first.made, first.next_averages
    momenta = [jnp.zeros_like(w) for w in parameters]

    def loss(parameters: list[Array], averages: list[Array], key: Array) -> tuple[Array, Any]:
        scope = Scope(parameters, averages, key)
        scope.dtype = dtype
        losses = []
        for scores in net(scope, x):
            chances = jax.nn.log_softmax(scores.astype(jnp.float32))
            losses.append(-jnp.take_along_axis(chances, y[:, None], 1).mean())
        return losses[0] + 0.3 * sum(losses[1:]), scope.next_averages

    def step(state: Any, _: Any) -> Any:
        parameters, momenta, averages, key = state
        key, drawn = jax.random.split(key)
        (value, averages), gradients = jax.value_and_grad(loss, has_aux=True)(
            parameters, averages, drawn
        )
        pairs = zip(momenta, gradients, parameters, strict=True)
        momenta = [MOMENTUM * m + g + DECAY * w for m, g, w in pairs]
        parameters = [w - RATE * m for w, m in zip(parameters, momenta, strict=True)]
        return (parameters, momenta, averages, key), value

    def many(state: Any) -> Any:
        return lax.scan(step, state, None, length=steps) if steps > 1 else step(state, None)

    compiled = jax.jit(many, donate_argnums=0)
    state: Any = (parameters, momenta, averages, key)

    def run() -> Callable[[], None]:
        nonlocal state
        state, value = compiled(state)
        return lambda: jax.block_until_ready(value)

    return run
