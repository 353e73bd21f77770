"""Pooling of any geometry that Caffe takes: overhanging windows, padding, sizes that differ between
the axes.
"""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from caffepy.core.errors import ConfigError

from .models import compare, inputs, written

TEXT = """layer { name: "it" type: "Pooling" bottom: "x0" top: "y" pooling_param {
    pool: %s kernel_h: %d kernel_w: %d stride_h: %d stride_w: %d pad_h: %d pad_w: %d
    round_mode: %s } }"""


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much],
)
@given(
    method=st.sampled_from(["MAX", "AVE"]),
    size=st.tuples(*[st.integers(1, 12)] * 2),
    kernel=st.tuples(*[st.integers(1, 5)] * 2),
    stride=st.tuples(*[st.integers(1, 5)] * 2),
    pad=st.tuples(*[st.integers(0, 3)] * 2),
    rounding=st.sampled_from(["CEIL", "FLOOR"]),
)
def test_any_geometry(
    method: str,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    pad: tuple[int, int],
    rounding: str,
) -> None:
    assume(all(p < k for p, k in zip(pad, kernel, strict=True)))
    try:
        model = written(inputs((2, 3, *size)) + TEXT % (method, *kernel, *stride, *pad, rounding))
    except ConfigError as error:
        assume("does not fit" not in str(error))
        assert "last windows lie outside the image" in str(error)  # noqa: PT017 # assume raises, too
        assert any(s > k for s, k in zip(stride, kernel, strict=True))
        return
    compare(model, relative=1e-6)


@pytest.mark.parametrize(("pad", "operators"), [(0, ["AveragePool"]), (1, ["Pad", "AveragePool"])])
def test_a_mean_with_overhang(pad: int, operators: list[str]) -> None:
    model = written(inputs((1, 1, 8, 8)) + TEXT % ("AVE", 3, 3, 2, 2, pad, pad, "CEIL"))
    windows = (8 - 3 + 2 * pad + 1) // 2 + 1
    assert model.net.blobs["y"].shape == (1, 1, windows, windows)
    assert [node.op_type for node in model.proto.graph.node] == operators
    compare(model)
