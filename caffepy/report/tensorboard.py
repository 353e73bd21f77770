"""Event files for TensorBoard: metrics, outputs of the train net, histograms, pictures of filters.

Tags: `loss`, smoothed as shown; `lr`; `images_per_s`; `train/NAME` and `test/NAME` (`test1/NAME`
for the second test net and so on), `NAME[i]` if an output has several scalars, a histogram if it
has many; `weights/LAYER/i` and `gradients/LAYER/i`, histograms; `filters/LAYER`, those of the first
convolution; `servers/...`, see `Served`: `pushes/WORKER`, `mb_sent`, `mb_on_wire`,
`seconds_waited`, `replicas_behind` and `staleness`, a histogram. A
step is the number of an iteration.
"""

import errno
import importlib.util
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from caffepy.core.errors import UsageError, install, reason
from caffepy.core.events import Served
from caffepy.core.files import working_directory
from caffepy.device.blob import Array
from caffepy.report.display_record import DisplayCollector, DisplayRecord, elements
from caffepy.report.grid import filter_tiles, grid

log = logging.getLogger(__name__)

Value = dict[str, Any]
"""The fields of a Summary.Value of TensorBoard."""

BINS = 64
WIDEST = float(np.finfo(np.float32).max)
CHUNK = 1 << 20
"""Values that are squared at a time."""

MOST_SCALARS = 20
"""Most scalars of an output that get a curve each; larger outputs get a histogram."""

FLUSH_S = 5.0
"""Most seconds that events wait before they are written."""


class WeightSource(Protocol):
    """The source of histograms and filters, read right after an iteration and at the end."""

    def parameters(self) -> Iterable[tuple[str, Array, Array | None]]:
        """Yield name, values and, if there is one, last gradient of each parameter."""

    def filters(self) -> tuple[str, Array] | None:
        """Return name and weights (outputs, channels, height, width) of the first convolution."""


class TensorBoard(DisplayCollector):
    """Writes an event file into a folder, which may hold files of earlier runs.

    Earlier events from the first iteration of this run on are hidden: a resumed run continues its
    curves, a new one starts over. Every `every` iterations (0: never) it adds histograms and
    filters from `watch`; filters also at the end. A disk error costs the file, not the run;
    UsageError if the file cannot be created.
    """

    def __init__(self, folder: str, every: int = 0) -> None:
        super().__init__()
        if importlib.util.find_spec("tensorboardX") is None:
            raise UsageError(
                "events for TensorBoard are written by tensorboardX, which is not installed: "
                f"{install('tensorboard')}"
            )
        self.folder = folder
        self._absolute = os.path.join(working_directory(), folder)  # wherever layers change to
        self.every = every
        self.watch: WeightSource | None = None
        self._writer: Any = None
        self._flushed = time.monotonic()
        try:
            os.makedirs(folder, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise UsageError(f'cannot write events in "{folder}": {reason(error)}') from None

    @property
    def takes_several(self) -> bool:
        return not self.every

    def begin(self, iteration: int) -> None:
        """Create a file, and hide what earlier runs wrote from here on."""
        from tensorboardX.record_writer import RecordWriter

        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        host = socket.gethostname()
        name = f"events.out.tfevents.{seconds}.{host}.{nanoseconds:09d}.{os.getpid()}"
        try:
            self._writer = RecordWriter(os.path.join(self._absolute, name))
        except OSError as error:
            self._stop_writing(error)
        self._write(0, file_version="brain.Event:2")
        self._write(iteration, session_log={"status": "START"})

    def show(self, record: DisplayRecord) -> None:
        named = {"loss": record.loss, "lr": record.lr, "images_per_s": record.images_per_s}
        values = [_scalar(name, value) for name, value in named.items() if value is not None]
        nets = {"train": record.outputs}
        nets |= {f"test{k or ''}": outputs for k, outputs in record.tests.items()}
        for net, outputs in nets.items():
            for output in outputs:
                name, array, _ = output
                if array.size > MOST_SCALARS:
                    values += _histogram(f"{net}/{name}", array)
                else:
                    values += [
                        _scalar(f"{net}/{part}", value) for part, value in elements([output])
                    ]
        self._write_values(record.iteration, values)

    def served(self, counts: Served) -> None:
        values = [_scalar(f"servers/pushes/{w}", n) for w, n in sorted(counts.pushes.items())]
        values += [
            _scalar("servers/mb_sent", counts.sent / 1e6),
            _scalar("servers/mb_on_wire", counts.on_wire / 1e6),
            _scalar("servers/seconds_waited", counts.waited),
            _scalar("servers/replicas_behind", counts.behind),
            *_counts("servers/staleness", counts.staleness),
        ]
        self._begin_once(counts.iteration)
        self._write_values(counts.iteration, values)

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        """Write the record if it is complete, and histograms if they are due."""
        super().iterated(iteration, loss, rate, images)
        self._begin_once(iteration)
        if self.every and iteration % self.every == 0 and self.watch and self._writer:
            values: list[Value] = []
            for name, weights, gradients in self.watch.parameters():
                values += _histogram(f"weights/{name}", weights)
                if gradients is not None:
                    values += _histogram(f"gradients/{name}", gradients)
            self._write_values(iteration, values + self._filters())

    def finished(self, iteration: int, loss: float | None) -> None:
        super().finished(iteration, loss)
        self._begin_once(iteration)
        self._write_values(iteration, self._filters())

    def close(self, complete: bool = True) -> None:
        self.show_pending()
        if self._writer:
            try:
                self._writer.close()
                log.info("Events for TensorBoard are in %s", self.folder)
            except OSError as error:
                self._stop_writing(error)

    def _filters(self) -> list[Value]:
        first = self.watch.filters() if self.watch and self._writer else None
        if not first:
            return []
        import cv2

        name, weights = first
        picture = grid(*filter_tiles(weights))
        height, width, _ = picture.shape
        content = cv2.imencode(".png", picture)[1].tobytes()
        size = {"height": height, "width": width, "colorspace": 3}
        return [{"tag": f"filters/{name}", "image": {**size, "encoded_image_string": content}}]

    def _write_values(self, iteration: int, values: Sequence[Value]) -> None:
        if values:
            self._write(iteration, summary={"value": values})

    def _write(self, iteration: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        if not self._writer:
            return
        try:
            event = Event(wall_time=time.time(), step=iteration, **what)
            self._writer.write(event.SerializeToString())
            if time.monotonic() - self._flushed > FLUSH_S:
                self._flushed = time.monotonic()
                self._writer.flush()
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        writer, self._writer = self._writer, None
        with suppress(OSError):
            if writer:
                writer.close()
        text = "cannot write events in %s (%s); the run continues without them"
        log.warning(text, self.folder, error.strerror)


def _scalar(tag: str, value: float) -> Value:
    return {"tag": tag, "simple_value": value}


def _counts(tag: str, counts: Mapping[int, int]) -> list[Value]:
    """Return a histogram of whole numbers by how often each came; none if there are none."""
    numbers = sorted(counts)
    if not numbers:
        return []
    histogram = {
        "min": numbers[0],
        "max": numbers[-1],
        "num": sum(counts.values()),
        "sum": sum(number * times for number, times in counts.items()),
        "sum_squares": sum(number**2 * times for number, times in counts.items()),
        "bucket_limit": [number + 0.5 for number in range(numbers[-1] + 1)],
        "bucket": [counts.get(number, 0) for number in range(numbers[-1] + 1)],
    }
    return [{"tag": tag, "histo": histogram}]


def _histogram(tag: str, values: Array) -> list[Value]:
    """Return one histogram of the finite values in bins of equal width; none if there are none."""
    flat = values.reshape(-1)
    finite = np.isfinite(flat)
    if not finite.all():
        flat = flat[finite]
    if not flat.size:
        return []
    low, high = float(flat.min()), float(flat.max())
    if high - low > WIDEST:
        flat = flat.astype(np.float64)
    counts, edges = np.histogram(flat, BINS, (low, high))
    chunks = (flat[i : i + CHUNK] for i in range(0, flat.size, CHUNK))
    histogram = {
        "min": low,
        "max": high,
        "num": flat.size,
        "sum": flat.sum(dtype=np.float64),
        "sum_squares": sum(float(np.square(part, dtype=np.float64).sum()) for part in chunks),
        "bucket_limit": edges[1:],
        "bucket": counts,
    }
    return [{"tag": tag, "histo": histogram}]
