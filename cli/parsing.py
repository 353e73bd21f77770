"""Conversion of options' strings to values: types of click's, and callbacks of its options.

A callback takes (context, parameter, value) and raises BadParameter for what it cannot read.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import click

PHASES = ("set-up", "step", "test", "snapshot")


class Number(click.types.FloatParamType):
    """A finite number."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; BadParameter for what is none, or not finite."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not finite", param, ctx)
        return number


class NumberRange(Number, click.FloatRange):
    """A finite number in a range, which --help shows."""

    name = "float"


def names(context: click.Context, parameter: click.Parameter, value: Any) -> tuple[str, ...]:
    """Return the names in a value with commas, or in several."""
    parts = (value if isinstance(value, str) else ",".join(value)).split(",")
    return tuple(part.strip() for part in parts if part.strip())


def stages(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Return the names in a value with commas, as they stand."""
    return tuple(value.split(","))


def numbers(
    kind: type[int] | type[float],
) -> Callable[[click.Context, click.Parameter, str], tuple[float, ...]]:
    """Return a callback for a list of finite numbers with commas."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
        try:
            numbers = tuple(kind(part) for part in value.split(",")) if value else ()
        except ValueError:
            raise click.BadParameter(
                f"{value!r} is not a list of numbers separated by commas"
            ) from None
        if not all(map(math.isfinite, numbers)):
            raise click.BadParameter(f"{value!r} has a number that is not finite")
        return numbers

    return parse


integers = numbers(int)


def shape(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Return (channels, height, width); BadParameter for anything but three sizes."""
    if value is None:
        return None
    sizes = value.split(",")
    if len(sizes) != 3 or not all(size.strip().isdigit() for size in sizes):
        raise click.BadParameter(f"{value!r} is not three sizes: channels,height,width")
    return tuple(map(int, sizes))


def range_of_nodes(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, int] | None:
    """Return the least and the most of N or MIN:MAX; BadParameter for anything else."""
    if value is None:
        return None
    parts = value.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{value!r} is neither N nor MIN:MAX, numbers from 1")
    fewest, most = int(parts[0]), int(parts[-1])
    if fewest > most:
        raise click.BadParameter(f"{value!r}: the first number is the least, the second the most")
    return fewest, most


def deadlines(context: click.Context, parameter: click.Parameter, value: str) -> dict[str, float]:
    """Return the seconds of each phase in PHASE=S,...; BadParameter for anything else."""
    given = {}
    for part in filter(None, value.split(",")):
        name, _, seconds = part.partition("=")
        try:
            given[name.strip()] = float(seconds)
        except ValueError:
            raise click.BadParameter(f"{part!r} is not PHASE=SECONDS") from None
        if name.strip() not in PHASES:
            raise click.BadParameter(f"{name!r} is no phase (phases: {', '.join(PHASES)})")
        if not given[name.strip()] > 0:
            raise click.BadParameter(f"{part!r} is no number of seconds above 0")
    return given


def devices(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return "all", "local" or numbers with commas as given; BadParameter for anything else."""
    tokens = value.split(",") if value and value not in ("all", "local") else []
    if not all(token.strip().isdigit() for token in tokens):
        raise click.BadParameter(
            f'{value!r} is neither "all" nor device numbers separated by commas'
        )
    return value


def auto_or_number(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | str | None:
    """Return "auto" or the number, 1 or more; BadParameter for anything else."""
    if value is None or value == "auto":
        return value
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither auto nor a number of 1 or more", ctx, param)
    return int(value)


def size_of_memory(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes of a size such as 80GB or 24GiB; BadParameter for what is none above 0."""
    if value is None:
        return None
    size = 0
    if found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) *([KMGT])(i?)B", value.strip()):
        base = 1024 if found[3] else 1000
        size = int(float(found[1]) * base ** (1 + "KMGT".index(found[2])))
    if not size:
        message = f"{value!r} is no size of a memory, such as 80GB or 24GiB"
        raise click.BadParameter(message, ctx, param)
    return size
