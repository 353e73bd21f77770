"""Numbers and outputs as Caffe prints them, and as JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from caffepy.core.errors import UsageError
from caffepy.core.events import Output


def number(value: Any) -> str:
    """Return six digits of the float32 value as a C++ stream: `2.30259`, `1e-05`, `-nan`, `inf`."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
    if np.isnan(single):
        return "-nan" if np.signbit(single) else "nan"
    return f"{float(single):.6g}"


def scalars(outputs: Sequence[Output]) -> Iterator[str]:
    """Yield `name = v` for each element, with ` (* w = w*v loss)` if the output has a weight."""
    for name, values, weight in outputs:
        for value in np.asarray(values, np.float32).reshape(-1):
            loss = number(np.float32(weight) * value)
            weighted = f" (* {number(weight)} = {loss} loss)" if weight else ""
            yield f"{name} = {number(value)}{weighted}"


def as_json(content: object) -> str:
    """Return the content as ASCII JSON; numbers that are not finite, which JSON lacks, are null."""
    return json.dumps(_finite(content))


class AsJson:
    """Base of dataclasses that commands print."""

    def json(self) -> str:
        """Return an object of the same fields."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]


def _finite(content: object) -> object:
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return content


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that it stays on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the rows as lines with aligned columns: the first `left` to the left, others to the
    right.

    Characters that are not printable are escaped.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    justify = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    return [
        "  ".join(
            to(cell, width) for to, cell, width in zip(justify, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def extension_of(path: str, formats: Sequence[str]) -> str:
    """Return the format that a file name has by its extension; UsageError if it is unknown."""
    extension = path.rpartition(".")[2].lower()
    if extension not in formats:
        known = ", ".join(f".{name}" for name in formats)
        raise UsageError(f'the extension of "{path}" must name the format: {known}')
    return extension
