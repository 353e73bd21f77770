"""`caffepy summarize`: a net's layers in a table, like Caffe's, with shapes and costs."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from caffepy.commands.check import LayerInfo, definitions, layers_of, mebibytes, si
from caffepy.core.errors import CaffeError, DataError
from caffepy.drawing.labels import arguments
from caffepy.models.synthetic import synthetic as without_data
from caffepy.net import Net
from caffepy.net.build import filter_state
from caffepy.ops.shapes_only import ShapesOnlyDevice
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.report.text import printable

log = logging.getLogger(__name__)

COLOURS = ("92", "93", "94", "95", "96", "32", "33", "34", "35", "36")  # of blobs, in turn
UNKNOWN, UNCONSUMED, PLAIN = "41", "1;4", "\033[0m"
MARKS = re.compile(r"\033\[[\d;]+m")
HEAD = "layer", "type", "", "bottoms", "", "tops", "arguments", "top shapes"
SPEC = "name", "lr_mult", "decay_mult"
NUMBERS = "parameters", "MACs", "memory"  # columns at the end, aligned to the right


@dataclass(frozen=True)
class LayerSummary:
    """A layer's definition, and its `shapes` and counts, None if it was not built.

    `params` have the SPEC of each parameter, `memory` is in bytes, `macs` are of a forward pass.
    """

    name: str
    type: str
    params: Sequence[dict[str, Any]]
    bottoms: Sequence[str]
    tops: Sequence[str]
    loss_weights: Sequence[float]
    arguments: str
    shapes: Sequence[tuple[int, ...]] | None
    parameters: int | None
    macs: int | None
    memory: int | None


@dataclass
class NetSummary:
    """A net: tops that no layer takes, bottoms that none makes, and why it could not be built."""

    role: str
    name: str
    layers: list[LayerSummary] = field(default_factory=list)
    unconsumed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    parameters: int | None = None
    problem: str | None = None

    @property
    def macs(self) -> int:
        """Multiply-adds of a forward pass of the batch."""
        return sum(layer.macs or 0 for layer in self.layers)

    @property
    def memory(self) -> int:
        """Bytes of the data of all blobs between the layers; training needs as many for diffs."""
        return sum(layer.memory or 0 for layer in self.layers)

    def table(self, max_width: int = 30) -> str:
        """Return a line a layer, totals and unconnected blobs, in the colours of a terminal.

        Columns are at most `max_width` wide; wider cells shift the rest as little as possible.
        """
        tops = dict.fromkeys(name for layer in self.layers for name in layer.tops)
        styles = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(tops)}
        rows = [[*HEAD, *NUMBERS]]
        rows += [self._row(layer, styles) for layer in self.layers]
        if self.parameters is None:
            rows = [row[: len(HEAD) - 1] for row in rows]
        else:
            counts = [f"{self.parameters:,}", si(self.macs), mebibytes(self.memory)]
            rows.append(["all", *[""] * (len(HEAD) - 1), *counts])
        lines = [
            f"{self.role}{f' of {self.name!r}' if self.name else ''}",
            *_aligned(rows, max_width),
        ]
        for what, names in (("read", self.unconsumed), ("written", self.unknown)):
            if names:
                lines.append(f"{what} by no layer: {', '.join(map(printable, names))}")
        return "\n".join(lines)

    def _row(self, layer: LayerSummary, styles: dict[str, str]) -> list[str]:
        bottoms, tops = [], []
        for name in layer.bottoms:
            style = UNKNOWN if name in self.unknown else styles[name]
            bottoms.append(f"\033[{style}m{printable(name)}{PLAIN}")
        for i, name in enumerate(layer.tops):
            weight = f"{layer.loss_weights[i]:g} * " if i < len(layer.loss_weights) else ""
            loose = f";{UNCONSUMED}" if name in self.unconsumed else ""
            tops.append(f"{weight}\033[{styles[name]}{loose}m{printable(name)}{PLAIN}")
        params = []
        for param in layer.params:
            rate = f"x{param['lr_mult']:g}" if param["lr_mult"] != 1 else ""
            decay = f"Dx{param['decay_mult']:g}" if param["decay_mult"] != 1 else ""
            params.append(" ".join(filter(None, (param["name"], rate, decay))))
        return [
            printable(layer.name),
            printable(layer.type),
            printable(f"({', '.join(params)})") if any(params) else "",
            ", ".join(bottoms),
            "->",
            ", ".join(tops),
            layer.arguments,
            ", ".join(" ".join(map(str, shape)) or "()" for shape in layer.shapes or ()),
            f"{layer.parameters:,}" if layer.parameters else "",
            si(layer.macs) if layer.macs else "",
            mebibytes(layer.memory) if layer.memory else "",
        ]


def _width(cell: str) -> int:
    return len(MARKS.sub("", cell))


def _aligned(rows: Sequence[Sequence[str]], max_width: int) -> Iterator[str]:
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    ends = len(HEAD)
    for row in rows:
        line, edge = "", 0
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            edge += min(width, max_width)
            room = " " * max(edge - _width(line) - _width(cell), 0)
            line += (room + cell if i >= ends else cell + room) + "  "
            edge += 2
        yield line.rstrip()


def as_json(nets: Sequence[NetSummary]) -> str:
    """Return a list with an object for each net, and in it one for each layer; memory in bytes."""
    return json.dumps([asdict(net) | {"macs": net.macs, "memory": net.memory} for net in nets])


def summarize(
    path: str,
    *,
    phase: int | None = None,
    level: int = 0,
    stages: Sequence[str] = (),
    synthetic: bool = False,
    image: Sequence[int] | None = None,
) -> list[NetSummary]:
    """Return all nets of a solver, or a net in one phase or in each that its layers name.

    A net that cannot be built, such as one without its data, has no shapes, and the log says why;
    `synthetic` replaces data by random images, of the shape `image` (C, H, W) if the net does not
    state it. ConfigError says what is wrong with the prototxt itself.
    """
    nets = []
    for role, param, origin, _ in definitions(path, level, stages, phase):
        param = without_data(param, image=image) if synthetic else param
        nets.append(_summary(role, param, origin))
    return nets


def _summary(role: str, param: NetParameter, path: str | None) -> NetSummary:
    summary = NetSummary(role, param.name)
    built: Iterator[LayerInfo] = iter(())
    try:
        with closing(Net(param, device=ShapesOnlyDevice(seed=0), path=path)) as net:
            summary.parameters = sum(blob.count for blob in net.learnable_params)
            built = iter(list(layers_of(net)))
    except CaffeError as error:
        summary.problem = str(error)
        way_out = "; --synthetic goes without the data" if isinstance(error, DataError) else ""
        log.warning("the %s is shown without shapes: %s%s", role, error, way_out)
    given: set[str] = set()
    loose: dict[str, None] = {}
    for layer in filter_state(param, path).layer:
        for name in layer.bottom:
            loose.pop(name, None)
            if name not in given and name not in summary.unknown:
                summary.unknown.append(name)
        given.update(layer.top)
        loose.update(dict.fromkeys(layer.top))
        # Caffe's own splits lie in between
        info = next((info for info in built if info.name == layer.name), None)
        costs = (
            (list(info.tops.values()), info.parameters, info.macs, info.memory)
            if info
            else (None,) * 4
        )
        python = layer.python_param
        summary.layers.append(
            LayerSummary(
                layer.name,
                f"{python.module}.{python.layer}" if layer.HasField("python_param") else layer.type,
                [{key: getattr(spec, key) for key in SPEC} for spec in layer.param],
                list(layer.bottom),
                list(layer.top),
                list(layer.loss_weight),
                arguments(layer),
                *costs,
            )
        )
    summary.unconsumed = list(loose)
    return summary
