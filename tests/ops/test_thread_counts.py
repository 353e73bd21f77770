"""Results do not depend on the number of threads, whichever kernels BLAS takes for the processor.

The kernels are chosen when the library is loaded, so each kind is tried in a process of its own:
this file run as a program. It computes everything with 1, 2, 3 and 8 threads and prints what
differs.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from llvmlite.binding import get_host_cpu_features
from threadpoolctl import threadpool_info

import caffepy as caffe
from caffepy.ops import cpu

THREADS = (1, 2, 3, 8)
KERNELS = ("Haswell", "Zen", "SkylakeX", "Nehalem")

# What is cut into pieces must be larger than a piece: sizes are odd, and large enough for eight
# threads.
LAYERS = """
layer { name: "data" type: "DummyData" top: "data" top: "label"
  dummy_data_param { shape { dim: 9 dim: 6 dim: 61 dim: 67 } shape { dim: 9 }
    data_filler { type: "gaussian" } data_filler { type: "constant" value: 3 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 22 kernel_size: 3 pad: 1 group: 2
    weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "norm" }
layer { name: "scale" type: "Scale" bottom: "norm" top: "scale" scale_param { bias_term: true } }
layer { name: "prelu" type: "PReLU" bottom: "scale" top: "prelu" }
layer { name: "lrn" type: "LRN" bottom: "prelu" top: "lrn" }
layer { name: "within" type: "LRN" bottom: "prelu" top: "within"
  lrn_param { norm_region: WITHIN_CHANNEL local_size: 3 alpha: 0.1 } }
layer { name: "depthwise" type: "Convolution" bottom: "lrn" top: "depthwise"
  convolution_param { num_output: 22 kernel_size: 3 stride: 2 group: 22
    weight_filler { type: "xavier" } } }
layer { name: "strided" type: "Convolution" bottom: "within" top: "strided"
  convolution_param { num_output: 22 kernel_size: 3 stride: 2 weight_filler { type: "xavier" } } }
layer { name: "pointwise" type: "Convolution" bottom: "strided" top: "pointwise"
  convolution_param { num_output: 22 kernel_size: 1 weight_filler { type: "xavier" } } }
layer { name: "sum" type: "Eltwise" bottom: "depthwise" bottom: "pointwise" top: "sum"
  eltwise_param { coeff: 0.7 coeff: 1.3 } }
layer { name: "max" type: "Eltwise" bottom: "depthwise" bottom: "strided"
  top: "max" eltwise_param { operation: MAX } }
layer { name: "product" type: "Eltwise" bottom: "sum" bottom: "max"
  top: "product" eltwise_param { operation: PROD } }
layer { name: "elu" type: "ELU" bottom: "product" top: "elu" }
layer { name: "tanh" type: "TanH" bottom: "elu" top: "tanh" }
layer { name: "swish" type: "Swish" bottom: "tanh" top: "swish" }
layer { name: "sigmoid" type: "Sigmoid" bottom: "swish" top: "sigmoid" }
layer { name: "bnll" type: "BNLL" bottom: "sigmoid" top: "bnll" }
layer { name: "power" type: "Power" bottom: "bnll"
  top: "power" power_param { power: 1.3 scale: 0.9 shift: 0.1 } }
layer { name: "exp" type: "Exp" bottom: "power" top: "exp" exp_param { scale: 0.1 } }
layer { name: "mvn" type: "MVN" bottom: "exp" top: "mvn" }
layer { name: "concat" type: "Concat" bottom: "mvn" bottom: "power" top: "concat" }
layer { name: "pool" type: "Pooling" bottom: "concat"
  top: "pool" pooling_param { kernel_size: 3 stride: 2 } }
layer { name: "many" type: "Convolution" bottom: "pool" top: "many"
  convolution_param { num_output: 44 kernel_size: 3 pad: 1 weight_filler { type: "xavier" } } }
layer { name: "average" type: "Pooling" bottom: "many"
  top: "average" pooling_param { pool: AVE kernel_size: 2 } }
layer { name: "up" type: "Deconvolution" bottom: "average" top: "up"
  convolution_param { num_output: 5 kernel_size: 4 stride: 2 weight_filler { type: "xavier" } } }
layer { name: "drop" type: "Dropout" bottom: "up" top: "drop" }
layer { name: "softmax" type: "Softmax" bottom: "drop" top: "softmax" }
layer { name: "fc1" type: "InnerProduct" bottom: "softmax" top: "fc1"
  inner_product_param { num_output: 515 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "fc1" top: "fc1" }
layer { name: "fc2" type: "InnerProduct" bottom: "fc1" top: "fc2"
  inner_product_param { num_output: 129 weight_filler { type: "xavier" } } }
layer { name: "rows" type: "Scale" bottom: "fc2" top: "rows" scale_param { bias_term: true } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "rows" bottom: "label" top: "loss" }
layer { name: "targets" type: "DummyData" top: "targets"
  dummy_data_param { shape { dim: 9 dim: 129 } data_filler { type: "constant" value: 0.3 } } }
layer { name: "sigmoid_loss" type: "SigmoidCrossEntropyLoss" bottom: "rows" bottom: "targets"
  top: "sigmoid_loss" }
layer { name: "steps" type: "DummyData" top: "steps" top: "cont"
  dummy_data_param { shape { dim: 7 dim: 19 dim: 45 } shape { dim: 7 dim: 19 }
    data_filler { type: "gaussian" } data_filler { type: "constant" value: 1 } } }
layer { name: "lstm" type: "LSTM" bottom: "steps" bottom: "cont" top: "lstm"
  recurrent_param { num_output: 37 weight_filler { type: "xavier" } } }
layer { name: "rnn" type: "RNN" bottom: "lstm" bottom: "cont" top: "rnn"
  recurrent_param { num_output: 23 weight_filler { type: "xavier" } } }
layer { name: "total" type: "Reduction" bottom: "rnn" top: "total" loss_weight: 0.01
  reduction_param { operation: SUMSQ } }
"""
SOLVER = """net: "%s" type: "%s" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9
weight_decay: 0.01 max_iter: 9 random_seed: 5"""
SHAPES = [
    (64, 800, 500),
    (500, 64, 800),
    (37, 1153, 290),
    (1001, 16, 1153),
    (1, 900, 700),
    (700, 900, 1),
    (300, 70, 200),
]


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def products() -> Iterator[tuple[str, str]]:
    rng = np.random.default_rng(0)
    for m, k, n in SHAPES:
        for dtype in (np.float32, np.float64):
            a, b, c = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n), (m, n)))
            for name, x, y in (
                ("plain", a, b),
                ("a turned", a.T.copy().T, b),
                ("b turned", a, b.T.copy().T),
            ):
                for accumulate in (False, True):
                    out = c.copy()
                    with cpu.blas_scope():
                        cpu.matmul(x, y, out, accumulate, 0.7)
                    yield (
                        f"{m}x{k} @ {k}x{n} {dtype.__name__} {name} accumulate={accumulate}",
                        digest(out),
                    )


def training(folder: Path, rules: Sequence[str]) -> Iterator[tuple[str, str]]:
    net = folder / "net.prototxt"
    net.write_text(LAYERS)
    for rule in rules:
        path = folder / "solver.prototxt"
        path.write_text(SOLVER % (net, rule))
        solver = caffe.get_solver(str(path))
        solver.step(2)
        for name, blob in solver.net.blobs.items():
            yield f"{rule}: blob {name}", digest(blob.data, blob.diff)
        for name, blobs in solver.net.params.items():
            yield (
                f"{rule}: parameters of {name}",
                digest(*(x for blob in blobs for x in (blob.data, blob.diff))),
            )


def differences(what: Callable[[], Iterator[tuple[str, str]]]) -> Iterator[str]:
    expected: dict[str, str] = {}
    for threads in THREADS:
        cpu.set_num_threads(threads)
        found = dict(what())
        expected = expected or found
        assert found.keys() == expected.keys()
        assert len(found) > 20
        yield from (
            f"{name}: {threads} threads differ from {THREADS[0]}"
            for name in found
            if found[name] != expected[name]
        )


@pytest.mark.parametrize("kernels", KERNELS)
def test_results_are_the_same(kernels: str) -> None:
    if kernels == "SkylakeX" and not get_host_cpu_features().get("avx512f"):
        pytest.skip("this processor has no AVX-512")
    run = subprocess.run(
        [sys.executable, __file__, kernels],
        env=os.environ | {"OPENBLAS_CORETYPE": kernels},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "all the same\n"), run.stdout + run.stderr


def main() -> None:
    blas = [
        info
        for info in threadpool_info()
        if info["user_api"] == "blas" and "numpy" in info["filepath"]
    ]
    if blas and blas[0]["internal_api"] == "openblas":
        given = (
            {sys.argv[1], "Haswell"} if sys.argv[1] == "Zen" else {sys.argv[1]}
        )  # builds may use one for both
        assert blas[0]["architecture"] in given, blas
    # No rule computes by BLAS, so that one kind of its kernels is enough for all.
    rules = ("SGD", "Adam", "AdaDelta") if sys.argv[1] == KERNELS[0] else ("SGD",)
    with tempfile.TemporaryDirectory() as folder:
        found = [*differences(products), *differences(lambda: training(Path(folder), rules))]
    sys.stdout.write("\n".join(found or ["all the same"]) + "\n")


if __name__ == "__main__":
    main()
