import numpy as np
import pytest

from caffepy.report.text import as_json, columns, number, printable, scalars

NUMBERS = {
    "six digits": (2.302585093, "2.30259"),
    "small": (1e-5, "1e-05"),
    "not so small": (1e-4, "0.0001"),
    "large": (1234567, "1.23457e+06"),
    "whole": (1, "1"),
    "log of the least float": (87.33654, "87.3365"),
    "nan": (float("nan"), "nan"),
    "negative nan": (np.copysign(np.float32("nan"), -1), "-nan"),
    "infinite": (float("inf"), "inf"),
    "negative infinite": (float("-inf"), "-inf"),
    "beyond float32": (1e300, "inf"),
    "rounded to float32 first": (0.00992565049999, "0.00992565"),
    "negative zero": (-0.0, "-0"),
}


@pytest.mark.parametrize(("value", "text"), NUMBERS.values(), ids=NUMBERS.keys())
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_scalars_count_over_all_outputs_and_name_the_weight() -> None:
    outputs = [("accuracy", np.float32(0.5), 0.0), ("loss", np.array([[2.0, 3.0]]), 0.3)]
    assert list(scalars(outputs)) == [
        "accuracy = 0.5",
        "loss = 2 (* 0.3 = 0.6 loss)",
        "loss = 3 (* 0.3 = 0.9 loss)",
    ]


def test_cells_stay_on_their_lines() -> None:
    assert printable("a\nb\x1b[1m\u2028\udc80 é") == r"a\nb\x1b[1m\u2028\udc80 é"
    assert columns([["a\nb", "c"], ["d", "e"]], left=1) == [r"a\nb  c", "d     e"]


def test_json_is_ascii_and_has_finite_numbers_only() -> None:
    content = {
        "é": [1.5, float("nan")],
        "b": (float("-inf"), {"c": float("inf")}),
        "n": [3, True, None, "x"],
    }
    assert (
        as_json(content)
        == r'{"\u00e9": [1.5, null], "b": [null, {"c": null}], "n": [3, true, null, "x"]}'
    )
