"""Readers of Caffe's training log that ask of a line what Caffe's own three parsers ask of it."""

import re
from datetime import datetime

TRAIN = re.compile(r"Train net output #(\d+): (\S+) = ([\d.e+-]+)")
TEST = re.compile(r"Test net output #(\d+): (\S+) = ([\d.e+-]+)")
ITERATION = re.compile(r"Iteration (\d+)")
RATE = re.compile(r"lr = ([-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)")


def when(line: str, year: int = 2026) -> datetime:
    """The time of a line: month and day in the first field after the letter, clock in the
    second."""
    date, clock = line.split()[:2]
    hour, minute, second = clock.split(":")
    whole, micros = second.split(".")
    return datetime(
        year, int(date[1:3]), int(date[3:]), int(hour), int(minute), int(whole), int(micros)
    )


def tables(text: str) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Rows of train and test outputs as parse_log.py makes them."""
    train: list[dict[str, float]] = []
    test: list[dict[str, float]] = []
    start = next(when(line) for line in text.splitlines() if "Solving" in line)
    iteration, rate = -1, float("nan")
    for line in text.splitlines():
        if found := ITERATION.search(line):
            iteration = int(found[1])
        if iteration < 0:
            continue
        try:
            seconds = (when(line) - start).total_seconds()
        except ValueError:
            continue
        if found := RATE.search(line):
            rate = float(found[1])
        for rows, pattern in ((train, TRAIN), (test, TEST)):
            if found := pattern.search(line):
                if not rows or rows[-1]["NumIters"] != iteration:
                    rows.append({"NumIters": iteration, "Seconds": seconds, "LearningRate": rate})
                rows[-1][found[2]] = float(found[3])
    for rows in (train, test):
        if len(rows) > 1:
            rows[0]["LearningRate"] = rows[1]["LearningRate"]
    return train, test


def fields(text: str) -> dict[str, list[str]]:
    """Return the values that parse_log.sh cuts out by field number and by the first equals sign."""
    lines = text.splitlines()
    return {
        "start": [line.split()[1] for line in lines if "] Solving " in line],
        "accuracy": [line.split()[10] for line in lines if "Test net output #0" in line],
        "test loss": [line.split()[10] for line in lines if "Test net output #1" in line],
        "loss": [line.split("=")[1].strip() for line in lines if ", loss = " in line],
        "rate": [line.split()[8] for line in lines if ", lr = " in line],
    }


def seconds(text: str) -> list[float]:
    """Elapsed time of each line with an iteration, as extract_seconds.py counts."""
    lines = text.splitlines()
    start = next(when(line) for line in lines if "Solving" in line)
    return [(when(line) - start).total_seconds() for line in lines if "Iteration" in line]
