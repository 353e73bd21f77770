"""Numbers and outputs as Caffe prints them, and as JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from caffepy.core.events import Output


def number(value: Any) -> str:
    """The six significant digits that a C++ stream gives of the float32 value: `2.30259`, `1e-05`,
    `-nan`, `inf`.
    """
    with np.errstate(over="ignore"):
        single = np.float32(value)
    if np.isnan(single):
        return "-nan" if np.signbit(single) else "nan"
    return f"{float(single):.6g}"


def scalars(outputs: Sequence[Output]) -> Iterator[str]:
    """`name = v` for each element of each output, with ` (* w = w*v loss)` if the output has a loss
    weight.
    """
    for name, values, weight in outputs:
        for value in np.asarray(values, np.float32).reshape(-1):
            loss = (
                f" (* {number(weight)} = {number(np.float32(weight) * value)} loss)"
                if weight
                else ""
            )
            yield f"{name} = {number(value)}{loss}"


def as_json(content: object) -> str:
    """The content as JSON, in ASCII whatever names are in it; numbers that are not finite, which it
    lacks, are null.
    """
    return json.dumps(_finite(content))


def _finite(content: object) -> object:
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return content


def printable(text: str) -> str:
    """The text with control characters and the like escaped, so that it stays on its line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The rows as lines with columns of equal width; the first `left` columns lie to the left,
    others to the right.

    What is not printable is escaped.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
