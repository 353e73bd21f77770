"""TestPass: a test net and its mean outputs over batches, or of detections their precision."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from caffepy import ops
from caffepy.core.average_precision import COCO, VERSIONS, mean_average_precision
from caffepy.core.errors import DataError
from caffepy.core.events import Output
from caffepy.device.blob import Array, Blob, shape_string
from caffepy.layer.detection import DetectionEvaluate
from caffepy.net import Net
from caffepy.net.node import Node
from caffepy.net.target_units import share_trained_layers
from caffepy.solver.capture import GraphRunner
from caffepy.solver.step import losses

Shape = tuple[int, ...]


class Totals(NamedTuple):
    """Sums over a number of batches: of the outputs, in double precision, and of the loss. Rows of
    DetectionEvaluate follow each other instead.
    """

    batches: int
    outputs: list[Array]
    loss: float


class Evaluation:
    """An output of a DetectionEvaluate layer, and what is averaged of it: its rows, or COCO's."""

    def __init__(self, net: Net, node: Node, version: str, sizes: bool) -> None:
        self._top, self._layer = node.tops[0], cast(DetectionEvaluate, node.layer)
        if version == COCO:
            made_by = {name: other for other in net.nodes for name in other.top_names}
            maker = made_by[node.bottom_names[0]]
            while maker.layer.type == "Split":
                maker = made_by[maker.bottom_names[0]]
            known = sizes and maker.layer.type == "DetectionOutput"
            self._layer.keep_coco_rows((lambda: maker.bottoms[0].shape[0]) if known else None)

    def rows(self) -> Array:
        """Return those of the last batch, (R, columns)."""
        if self._layer.coco_rows is not None:
            return self._layer.coco_rows
        return self._top.host_data.reshape(-1, 5).copy()


def evaluations(net: Net, version: str, sizes: bool = False) -> dict[str, Evaluation]:
    """Return the outputs of a net that DetectionEvaluate layers made; `sizes`: the net sees all
    batches in their order, so that a name_size_file gives COCO's sizes of boxes.
    """
    return {
        name: Evaluation(net, node, version, sizes)
        for node in net.nodes
        if isinstance(node.layer, DetectionEvaluate)
        for name in node.top_names
        if name in net.outputs
    }


class TestPass:
    """A test net and the sums of its outputs, and of its loss if asked for: `begin`, `batch` for
    each batch, `totals`; then `average` of the totals of all solvers.
    """

    def __init__(
        self,
        net: Net,
        what: str,
        fuse: bool,
        with_loss: bool,
        ap_version: str = VERSIONS[0],
        show_classes: bool = False,
    ) -> None:
        self.net = net
        self._evaluations = evaluations(net, ap_version)
        self._version, self._show = ap_version, show_classes
        self._names = [name for name in net.outputs if name not in self._evaluations]
        self.graphs = GraphRunner(net, fuse, what)
        with net.device.scope():
            outputs = [net.blobs[name] for name in self._names]
            weighted = losses(net) if with_loss else []
            self._sums = ops.backend(net.device).Sums(outputs, weighted, net.device)
        self._with_loss = with_loss
        self.last_outputs: list[Output] = []  # the means of the last test
        self._batches = 0
        self._shapes: list[Shape] = []
        self._rows: dict[str, list[Array]] = {}
        self._copies: dict[str, list[Blob]] = {}  # of parameters in other units than those learned

    def begin(self, train_net: Net) -> None:
        """Zero the totals and share the parameters of this train net."""
        share_trained_layers(self.net, train_net, self._copies)
        self._batches = 0
        self._rows = {name: [] for name in self._evaluations}

    def batch(self, replay: bool) -> None:
        """Run a batch, captured if `replay`; DataError if the shape of an output changes."""
        self.graphs.forward(replay)
        for name, rows in self._rows.items():
            rows.append(self._evaluations[name].rows())
        shapes = [self.net.blobs[name].shape for name in self._names]
        if not self._batches:
            self._shapes = shapes
            self._sums.clear()
        self._compare(self._shapes, shapes)
        self._sums.add()
        self._batches += 1

    def _compare(self, shapes: Sequence[Shape], others: Sequence[Shape]) -> None:
        for name, shape, other in zip(self._names, shapes, others, strict=True):
            if other != shape:
                raise DataError(
                    f'output "{name}" of a test net changed its shape between batches, from '
                    f"{shape_string(shape)} to {shape_string(other)}, so there is no mean"
                )

    def totals(self) -> Totals:
        """Return the sums; DataError if a GPU found bad data."""
        sums, loss = self._sums.read() if self._batches else ([], 0.0)
        self.net.device.check_errors()
        found = dict(zip(self._names, sums, strict=bool(self._batches)))
        found |= {name: np.concatenate(rows) for name, rows in self._rows.items() if rows}
        outputs = [found[name] for name in self.net.outputs if self._batches]
        return Totals(self._batches, outputs, loss)

    def average(self, parts: Sequence[Totals]) -> float | None:
        """Average the totals of all solvers into `last_outputs`; return the mean loss, if any."""
        parts = [part for part in parts if part.batches]
        batches = sum(part.batches for part in parts)
        weights = self.net.blob_loss_weights
        of_parts = [dict(zip(self.net.outputs, part.outputs, strict=True)) for part in parts]
        shapes = [[found[name].shape for name in self._names] for found in of_parts]
        for others in shapes[1:]:
            self._compare(shapes[0], others)
        self.last_outputs = []
        for name in self.net.outputs:
            values = [found[name] for found in of_parts]
            if name in self._evaluations:
                rows = np.concatenate(values)
                mean = np.asarray(mean_average_precision(rows, self._version, self._show))
            else:
                mean = np.asarray(sum(values) / batches)
            self.last_outputs.append((name, mean.astype(np.float32), weights[name]))
        return sum(part.loss for part in parts) / batches if self._with_loss else None
