"""`caffepy classify`: the best classes of images."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from caffepy.commands.preprocess import (
    EXTENSIONS,
    PREPARATION,
    READERS,
    ImageResults,
    Preparation,
    image_net,
    load,
    names_in,
    read_array,
    read_lines,
)
from caffepy.core.errors import ConfigError, DataError
from caffepy.core.files import written
from caffepy.data.prefetch import mapped
from caffepy.data.write import new_npy
from caffepy.device.blob import Array, shape_string
from caffepy.pycaffe.classifier import CROPS, Classifier
from caffepy.report import counting
from caffepy.report.text import as_json, columns, number

USUAL_DIMS = 256, 256  # to which Caffe's script resizes images, for nets that take somewhat less


@dataclass(frozen=True)
class Guess:
    """A class, its label if labels are known, and its score."""

    number: int
    label: str | None
    score: float


@dataclass(frozen=True)
class Classified:
    """An image and its best classes, the best first; `error` says why there are none."""

    image: str
    guesses: Sequence[Guess]
    error: str | None = None


@dataclass(frozen=True)
class Classification(ImageResults):
    """The classes of all images."""

    images: Sequence[Classified]

    def table(self) -> str:
        """Return a line a guess: image, score, class, label."""
        rows = [["image", "score", "class", "label"]]
        for image in self.images:
            guesses = [
                [number(guess.score), str(guess.number), guess.label or ""]
                for guess in image.guesses
            ]
            first, *others = guesses or [["-", "-", "unreadable"]]
            rows += [[image.image, *first], *(["", *cells] for cells in others)]
        if not any(row[3] for row in rows[1:]):
            rows = [row[:3] for row in rows]
        return "\n".join(columns(rows, left=4))

    def json(self) -> str:
        """Return a list of objects: image, predictions (class, label, score or null) or error."""
        objects: list[dict[str, Any]] = []
        for image in self.images:
            predictions = [
                {"class": guess.number, "label": guess.label, "score": guess.score}
                for guess in image.guesses
            ]
            found = {"error": image.error} if image.error else {"predictions": predictions}
            objects.append({"image": image.image, **found})
        return as_json(objects)


Item = tuple[str, Callable[[], Array]]
"""The name of an image, and the function that reads it."""


def classify(
    inputs: Sequence[str],
    model: str,
    weights: Sequence[str],
    *,
    preparation: Preparation = PREPARATION,
    images_dim: Sequence[int] = (),
    oversample: bool | None = None,
    labels: str = "",
    top: int = 5,
    extensions: Sequence[str] = EXTENSIONS,
    output: str = "",
    batch: int | None = None,
    gpu: str | None = None,
    precision: str | None = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> Classification:
    """Return the `top` best classes of images, by the deploy net of `model` with these weights.

    `inputs` are image files, folders, and .npy arrays (N, H, W, K) or (H, W, K) of values in 0 to
    1. Images are resized to `images_dim` (height, width). With `oversample` a score is the mean
    over ten crops and mirror images, without it that of the centre; None oversamples images larger
    than the net's input. `output` is a .npy file for all scores, (N, classes), NaN for images that
    cannot be read, which the result lists. Errors say what does not fit.
    """
    net = image_net(Classifier, model, weights, batch, gpu, precision, threads)
    input_name = net.inputs[0]
    n, channels, *crop = net.blobs[input_name].shape
    net.transformer = preparation.transformer(input_name, net.blobs[input_name].shape)
    preparation.warn_of_missing(model)
    net.image_dims = tuple(images_dim) or usual_dims(crop)
    if any(np.less(net.image_dims, crop)):
        own, taken = ("x".join(map(str, dims)) for dims in (net.image_dims, crop))
        raise ConfigError(f"images of {own} are smaller than the net's input of {taken}", model)
    if oversample is None:
        oversample = any(np.greater(net.image_dims, crop))
    at_once = max(1, n // (CROPS if oversample else 1))
    classes = _scores_per_image(net, n, model, per_place=bool(output))
    names = _labels(labels, classes) if labels else None
    items = [item for path in inputs for item in _items(path, channels, extensions)]
    found = list[Classified]()
    with ExitStack() as stack:
        add = stack.enter_context(new_npy(stack.enter_context(written(output)))) if output else None
        done = stack.enter_context(counting(len(items), "images", progress))
        loaded = stack.enter_context(closing(mapped(_read, items, READERS)))
        while part := list(islice(loaded, at_once)):
            scores = np.full((len(part), classes), np.nan, np.float32)
            read = {i: image for i, (_, image) in enumerate(part) if isinstance(image, np.ndarray)}
            if read:
                predicted = net.predict(list(read.values()), oversample)
                scores[list(read)] = predicted.reshape(len(read), -1)
            if add:
                add(scores)
            for (name, image), row in zip(part, scores, strict=True):
                if isinstance(image, DataError):
                    found.append(Classified(name, [], str(image)))
                else:
                    found.append(Classified(name, _best(row, top, names)))
            done(len(part))
    return Classification(found)


def _scores_per_image(net: Classifier, images: int, model: str, per_place: bool) -> int:
    """Return the number of scores that the net's first output has for each of its images.

    ConfigError if it has none, or unless `per_place`, scores for each place of an image.
    """
    name = net.outputs[0]
    shape = net.blobs[name].shape
    if len(shape) < 2 or shape[0] != images:
        raise ConfigError(
            f'output "{name}" of {shape_string(shape)} has no scores for each of {images} '
            "images; boxes are found by caffepy detect",
            model,
        )
    if prod(shape[2:]) > 1 and not per_place:
        raise ConfigError(
            f'output "{name}" of {shape_string(shape)} has scores for each place of an '
            "image, which is no class of the whole; a .npy as --output gets them",
            model,
        )
    return prod(shape[1:])


def _best(scores: Array, top: int, names: Sequence[str] | None) -> list[Guess]:
    """Return the `top` classes of the highest scores, the best first."""
    best = map(int, np.argsort(-scores, kind="stable")[:top])
    return [Guess(i, names[i] if names else None, float(scores[i])) for i in best]


def holds_images(path: str) -> bool:
    """True if this is a .npy file of an image or of images, not of scores."""
    try:
        return os.path.exists(path) and read_array(path).ndim > 2
    except DataError:
        return False


def usual_dims(crop: Sequence[int]) -> Sequence[int]:
    """Return the size to which images are resized for a net that takes this one."""
    between = all(usual // 2 < size <= usual for size, usual in zip(crop, USUAL_DIMS, strict=True))
    return USUAL_DIMS if between else tuple(crop)


def _labels(path: str, classes: int) -> list[str]:
    labels = read_lines(path)
    if len(labels) != classes:
        raise ConfigError(
            f"{path}: {len(labels)} labels, a line each, for the {classes} classes of the net"
        )
    return labels


def _items(path: str, channels: int, extensions: Sequence[str]) -> Iterator[Item]:
    if os.path.isdir(path):
        for name in names_in(path, extensions):
            yield name, partial(load, name, channels)
    elif path.lower().endswith(".npy"):
        array = read_array(path)
        if array.ndim not in (3, 4) or array.shape[-1] != channels:
            raise DataError(
                f"{path}: an array (N, H, W, {channels}) or (H, W, {channels}) is needed, not "
                f"{shape_string(array.shape)}"
            )
        if array.ndim == 3:
            yield path, partial(np.array, array, np.float32)
            return
        for i, image in enumerate(array):
            yield f"{path}[{i}]", partial(np.array, image, np.float32)
    else:
        yield path, partial(load, path, channels)


def _read(item: Item) -> tuple[str, Array | DataError]:
    name, read = item
    try:
        return name, read()
    except DataError as error:
        return name, error
