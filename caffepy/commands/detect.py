"""`caffepy detect`: the scores of windows of images."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import numpy as np

from caffepy.commands.preprocess import PREPARATION, Preparation, image_net
from caffepy.core.errors import ConfigError, DataError, UsageError, reason
from caffepy.core.files import check_writable, locate, written
from caffepy.device.blob import Array
from caffepy.net.weights import new_hdf5
from caffepy.pycaffe.detector import Detector
from caffepy.report import counting
from caffepy.report.text import as_json, columns, extension_of, number

SIDES = ("ymin", "xmin", "ymax", "xmax")  # of a window, in pycaffe's order
OUTPUTS = ("csv", "h5", "hdf5", "json")

Windows = tuple[str, list[tuple[float, ...]]]  # of an image file


@dataclass(frozen=True)
class Detection:
    """A window (ymin, xmin, ymax, xmax) of an image and its scores for all classes."""

    image: str
    window: tuple[float, ...]
    scores: Array


@dataclass(frozen=True)
class Detections:
    """The scores of all windows."""

    found: Sequence[Detection]

    def table(self) -> str:
        """Return a line a window, with its best class."""
        rows = [["image", *SIDES, "score", "class"]]
        for one in self.found:
            best = int(np.argmax(one.scores))
            window = [f"{side:g}" for side in one.window]
            rows.append([one.image, *window, number(one.scores[best]), str(best)])
        return "\n".join(columns(rows, left=1))

    def json(self) -> str:
        """Return a list of objects with filename, ymin, xmin, ymax, xmax, prediction (scores)."""
        rows = []
        for one in self.found:
            window = dict(zip(SIDES, one.window, strict=True))
            rows.append({"filename": one.image, **window, "prediction": one.scores.tolist()})
        return as_json(rows)

    def save(self, path: str) -> None:
        """Write a .csv, .json or .h5 file; UsageError if that fails.

        A CSV has columns filename, ymin, xmin, ymax, xmax, class0, class1, ... An HDF5 file has the
        datasets filename, window (N, 4) in that order, and prediction (N, classes).
        """
        kind = check_output(path)
        with written(path) as temporary:
            if kind == "json":
                with open(temporary, "w", encoding="utf-8") as file:
                    file.write(self.json() + "\n")
            elif kind == "csv":
                with open(temporary, "w", encoding="utf-8", newline="") as file:
                    rows = csv.writer(file, lineterminator="\n")
                    classes = len(self.found[0].scores) if self.found else 0
                    rows.writerow(["filename", *SIDES, *(f"class{i}" for i in range(classes))])
                    for one in self.found:
                        window = [f"{side:g}" for side in one.window]
                        rows.writerow([one.image, *window, *one.scores.tolist()])
            else:
                names = [one.image.encode() for one in self.found] or np.zeros(0, "S1")
                windows = np.array([one.window for one in self.found]).reshape(-1, 4)
                scores = [one.scores for one in self.found] or np.zeros((0, 0), np.float32)
                with new_hdf5(temporary) as hdf5:
                    hdf5.create_dataset("filename", data=names)
                    hdf5.create_dataset("window", data=windows).attrs["columns"] = SIDES
                    hdf5.create_dataset("prediction", data=np.array(scores))


def check_output(path: str) -> str:
    """Return the format of a file of detections, or raise UsageError."""
    kind = extension_of(path, OUTPUTS)
    check_writable(path)
    return kind


def detect(
    source: str,
    model: str,
    weights: Sequence[str],
    *,
    windows: str = "",
    crop_mode: str = "list",
    context_pad: int = 16,
    preparation: Preparation = PREPARATION,
    batch: int | None = None,
    gpu: str | None = None,
    precision: str | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> Detections:
    """Score windows of images with the deploy net of `model` and these weights.

    `source` is a CSV with the columns filename, xmin, ymin, xmax, ymax; or a text list of image
    files, whose windows are those of the CSV `windows`, or with `crop_mode` "selective_search" the
    proposals of an external package. ConfigError and DataError say what does not fit.
    """
    net = image_net(Detector, model, weights, batch, gpu, precision, threads)
    name = net.inputs[0]
    at_once, channels, *_ = shape = net.blobs[name].shape
    if channels != 3:
        raise ConfigError(
            f"takes images of {channels} channels; windows are cut from colour images, of three",
            model,
        )
    net.transformer = preparation.transformer(name, shape, by_channel=True)
    preparation.warn_of_missing(model)
    try:
        net.configure_crop(context_pad)
    except ValueError as error:
        raise ConfigError(str(error), model) from None
    if crop_mode == "selective_search":
        found = net.detect_selective_search(_names(source))
    else:
        found = []
        images = read_windows(source, windows)
        with counting(sum(len(own) for _, own in images), "windows", progress) as done:
            group: list[Windows] = []
            for image in images:
                group.append(image)
                size = sum(len(own) for _, own in group)
                if size >= at_once or image is images[-1]:
                    found += _scored(net, group)
                    done(size)
                    group = []
    detections = []
    for one in found:
        window, scores = tuple(map(float, one["window"])), np.ravel(one["prediction"])
        detections.append(Detection(one["filename"], window, scores))
    return Detections(detections)


def _scored(net: Detector, group: Sequence[Windows]) -> list[dict[str, Any]]:
    try:
        return net.detect_windows(group)
    except ValueError as error:
        if len(group) == 1:
            raise DataError(f"{group[0][0]}: {error}") from None
        return [found for image in group for found in _scored(net, [image])]


def read_windows(source: str, windows: str = "") -> list[Windows]:
    """Return the images of a CSV with their windows, or of a text list with the CSV `windows` each.

    Images lie beside the source if not in the working directory. DataError names the line of a
    wrong number.
    """
    if source.lower().endswith(".csv"):
        if windows:
            raise UsageError(
                f"{source} has windows of its own; a separate file of windows goes with a text list"
            )
        found: dict[str, list[tuple[float, ...]]] = {}
        for name, window in _rows(source, ("filename", *SIDES)):
            found.setdefault(locate(name, source), []).append(window)
        return list(found.items())
    if not windows:
        raise UsageError(
            f"{source} has no windows: give a CSV with the columns filename, "
            "xmin, ymin, xmax, ymax instead, or a file of windows for all"
        )
    own = [window for _, window in _rows(windows, SIDES)]
    return [(name, own) for name in _names(source)]


def _names(source: str) -> list[str]:
    names = [locate(line.strip(), source) for line in _lines(source) if line.strip()]
    if not names:
        raise DataError(f"{source}: no images are named here")
    return names


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not a text file") from None


def _rows(path: str, needed: Sequence[str]) -> list[tuple[str, tuple[float, ...]]]:
    lines = csv.DictReader(_lines(path), skipinitialspace=True)
    missing = [name for name in needed if name not in (lines.fieldnames or ())]
    if missing:
        head = ", ".join(lines.fieldnames or ()) or "empty"
        raise DataError(f"{path}:1: no column {', '.join(missing)} (the first line is: {head})")
    rows = []
    for row in lines:
        try:
            window = tuple(float(row[side]) for side in SIDES)
        except (TypeError, ValueError):
            window = (nan,)
        if not all(map(isfinite, window)):
            given = ", ".join(str(row[side]) for side in SIDES)
            raise DataError(f"{path}:{lines.line_num}: {', '.join(SIDES)} are not numbers: {given}")
        rows.append((row.get("filename") or "", window))
    if not rows:
        raise DataError(f"{path}: no windows are given here")
    return rows
