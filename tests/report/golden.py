"""Caffe's own log of the digits run, and the events that a solver would have sent for it."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from caffepy.core.events import Displayed, Reporter

LOG = Path(__file__).parents[1] / "golden" / "digits" / "caffe_train.log"
PREFIX = re.compile(r"^[IWEF]\d+ [\d:.]+ +\d+ [\w.]+:\d+\] ")
OUTPUT = re.compile(r" {4}T\w+ net output #\d+: (\S+) = (\S+?)(?: \(\* (\S+) = .*)?$")


def messages() -> list[str]:
    """The messages of Caffe's training loop, without the prefix and without what the data layers
    say in between.
    """
    bare = [PREFIX.sub("", line) for line in LOG.read_text().splitlines()]
    begin, end = bare.index("Solving digits"), bare.index("Optimization Done.")
    return [message for message in bare[begin : end + 1] if not message.startswith("Restarting")]


def replay(reporter: Reporter, lines: list[str]) -> None:
    """Send the events that lead to these messages."""
    rest = iter(lines)
    reporter.solving(
        next(rest).removeprefix("Solving "), next(rest).removeprefix("Learning Rate Policy: ")
    )
    for number, line in enumerate(lines):
        outputs = list(_outputs(lines[number + 1 :]))
        if found := re.fullmatch(r"Iteration (\d+), Testing net \(#(\d+)\)", line):
            iteration, k = map(int, found.groups())
            reporter.test_started(iteration, k)
            reporter.test_done(iteration, k, outputs, None)
        elif found := re.fullmatch(
            r"Iteration (\d+) \((\S+) iter/s, (\S+)s/(\d+) iters\), loss = (\S+)", line
        ):
            iteration, display = int(found[1]), int(found[4])
            speed, seconds, loss = float(found[2]), float(found[3]), float(found[5])
            reporter.displayed(Displayed(iteration, loss, outputs, speed, seconds, display))
        elif found := re.fullmatch(r"Iteration (\d+), lr = (\S+)", line):
            reporter.lr(int(found[1]), float(found[2]))
            reporter.iterated(int(found[1]), 0.0, float(found[2]), 50)
        elif found := re.fullmatch(r"Snapshotting (.*) file (\S+)", line):
            reporter.snapshotted(found[1], found[2])
        elif found := re.fullmatch(r"Iteration (\d+), loss = (\S+)", line):
            reporter.finished(int(found[1]), float(found[2]))
    reporter.done(False)


def _outputs(lines: list[str]) -> Iterator[tuple[str, np.ndarray, float]]:
    for line in lines:
        found = OUTPUT.fullmatch(line)
        if not found:
            return
        yield found[1], np.float32(found[2]).reshape(()), float(found[3] or 0)
