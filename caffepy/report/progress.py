"""A progress line for a run, or for a number of things to do, on terminals only."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from caffepy.core.events import Output, Reporter, asked_to_end
from caffepy.report.speed import Speed

if TYPE_CHECKING:
    from tqdm import tqdm

REDRAW_S = 0.1
SPEED_S = 1.0
WIDE = 100  # columns
PIECE = 1000  # characters, which fit in a pipe that is ready
PATIENCE = 1.0
_unread = False  # nothing has read the last line from stderr
FORMAT = "Iteration {n_fmt}/{total_fmt} |{bar}| {percentage:.0f}%{postfix}, {remaining} left"


def wanted(progress: bool | None) -> bool:
    """True if a progress line is to be drawn: on a terminal, if `progress` is not False.

    None also excludes a terminal that TERM calls dumb.
    """
    capable = os.environ.get("TERM") != "dumb" if progress is None else progress
    return capable and sys.stderr is not None and sys.stderr.isatty()


def write_line(line: str) -> None:
    """Write a line to stderr, above the progress bar if one is drawn."""
    if sys.stderr is None:
        return
    if sys.stderr.isatty():
        from tqdm import tqdm

        if _takes_more():
            tqdm.write(line, file=sys.stderr)
        return
    text = line + "\n"
    for start in range(0, len(text), PIECE):
        if not _takes_more():
            return
        sys.stderr.write(text[start : start + PIECE])
        sys.stderr.flush()


def _takes_more() -> bool:
    """Wait until the reader of stderr has room for a piece; a run that was asked to end waits for
    PATIENCE, then no more, and this is false: the line is lost.
    """
    global _unread
    polls = 0
    with suppress(OSError, ValueError, AttributeError):  # no file, or not of a kind that can wait
        descriptor = sys.stderr.fileno()
        while not select.select([], [descriptor], [], 0 if _unread else PATIENCE / 4)[1]:
            polls += asked_to_end.is_set()
            _unread = polls > 0 and (_unread or polls > 4)
            if _unread:
                return False
    _unread = False
    return True


def _columns() -> int | None:
    """Return the terminal's width, None if it is unknown or 0."""
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):
        return None
    return size.columns if all(size) else None


@contextmanager
def counting(
    total: int | None, unit: str, progress: bool | None = None, done: int = 0
) -> Iterator[Callable[[int], object]]:
    """Yield a function that adds to the number of things that are done; a bar shows it if `wanted`.

    `total` None is unknown.
    """
    if not wanted(progress):
        yield lambda count: None
        return
    with _bar(initial=done, total=total, unit=f" {unit}", mininterval=REDRAW_S) as bar:
        yield bar.update


def _bar(**settings: Any) -> "tqdm[None]":
    """Return a bar that follows the terminal's size if it is known."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # no thread that watches the bar

    size = {"dynamic_ncols": True} if _columns() else {"ncols": 79, "nrows": 24}
    return Bar(**settings, **size, file=sys.stderr)


class Progress(Reporter):
    """Iteration, loss, learning rate, images a second and time left, redrawn every 0.1 s at most.

    A narrow terminal shows no learning rate. `iterations` is the number of the last iteration.
    """

    takes_several = True

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._bar: tqdm[None] | None = None
        self._speed = Speed()
        self._images_per_s = self._status = ""
        self._due = 0.0
        self._begun = False

    def solving(self, net_name: str, lr_policy: str) -> None:
        self._speed.read()

    def test_started(self, iteration: int, k: int) -> None:
        self._speed.pause()
        self._open(iteration).set_postfix_str(f"testing net #{k}")

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
        self._speed.resume()
        self._open(iteration).set_postfix_str(self._status)

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        """Redraw if it is due. The first iteration, which may compile, does not count as speed."""
        if not self._begun:
            self._begun = True
            self._speed.read()
            if self._bar is not None:
                self._bar.leave = False
                self._bar.close()
                self._bar = None
            return
        self._speed.add(images)
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + REDRAW_S
        bar = self._open(iteration)
        if self._speed.seconds >= SPEED_S or not self._images_per_s:
            images_per_s = self._speed.read()
            self._images_per_s = f", {images_per_s:.0f} images/s" if images_per_s else ""
        parts = [] if loss is None else [f"loss {loss:.4g}"]
        if not parts or (_columns() or 0) >= WIDE:
            parts.append(f"lr {rate:.4g}")
        self._status = ", ".join(parts) + self._images_per_s
        bar.set_postfix_str(self._status, refresh=False)
        bar.update(iteration + 1 - bar.n)

    def finished(self, iteration: int, loss: float | None) -> None:
        bar = self._open(iteration)
        bar.update(iteration - bar.n)

    def close(self, complete: bool = True) -> None:
        """Leave the line as it is and go to the next."""
        if self._bar is not None:
            self._bar.close()

    def _open(self, iteration: int) -> "tqdm[None]":
        if self._bar is None:
            drawn = {"bar_format": FORMAT, "mininterval": 0, "miniters": 1, "smoothing": 0.1}
            self._bar = _bar(initial=iteration, total=self.iterations, **drawn)
        return self._bar
