"""Text prototxts of NVCaffe: the number formats of nets and layers."""

import logging

import pytest

from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.nvcaffe import choose_precision, keeps_float32
from caffepy.proto.text import parse

NVCAFFE = """
default_forward_type: FLOAT16 default_backward_type: FLOAT16
default_forward_math: FLOAT default_backward_math: FLOAT
global_grad_scale: 1000 global_grad_scale_adaptive: true default_cudnn_math_override: 0
layer { name: "conv" type: "Convolution" forward_math: FLOAT16 backward_math: FLOAT16 }
layer { name: "bn" type: "BatchNorm" forward_type: FLOAT backward_type: FLOAT }
layer { name: "loss" type: "SoftmaxWithLoss" forward_type: FLOAT }
"""
SAID = "without effect; values have one format forwards and backwards, sums are float32"


def net(text: str) -> NetParameter:
    return parse(text, NetParameter())


@pytest.mark.parametrize(
    ("text", "asked", "chosen", "lines"),
    [
        ("", None, None, []),
        ("", "bf16", "bf16", []),
        ("default_forward_type: FLOAT default_backward_type: FLOAT", None, None, []),
        ("default_forward_type: FLOAT16 default_backward_type: FLOAT16", None, "fp16", []),
        ("default_forward_type: FLOAT16 default_backward_type: FLOAT16", "fp16", "fp16", []),
        (
            "default_forward_type: FLOAT16 default_backward_type: FLOAT16",
            "fp32",
            "fp32",
            ["The precision fp32 goes before the net's default_forward_type: FLOAT16"],
        ),
        ("default_forward_type: DOUBLE", None, None, [f"default_forward_type: {SAID}"]),
        (
            "default_forward_type: FLOAT16 default_backward_type: FLOAT",
            None,
            "fp16",
            [f"default_backward_type: {SAID}"],
        ),
        (
            NVCAFFE,
            None,
            "fp16",
            [f"default_forward_math, default_backward_math, forward_math, backward_math: {SAID}"],
        ),
        (
            "layer { forward_type: FLOAT16 backward_type: FLOAT16 }",
            None,
            None,
            [f"forward_type: {SAID}"],
        ),
        ("layer { forward_type: FLOAT16 backward_type: FLOAT16 }", "bf16", "bf16", []),
        (
            "layer { forward_type: FLOAT } layer { backward_type: FLOAT16 }",
            None,
            None,
            [f"backward_type: {SAID}"],
        ),
    ],
)
def test_the_precision_of_a_net(
    text: str,
    asked: str | None,
    chosen: str | None,
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_precision(net(text), asked) == chosen
    assert caplog.messages == lines


def test_layers_that_keep_to_float32() -> None:
    assert [keeps_float32(layer) for layer in net(NVCAFFE).layer] == [False, True, True]
