"""Detection: windows of images are scored, and of those that overlap the best is kept."""

import cv2
import numpy as np
import pytest
from google.protobuf import text_format

import caffepy as caffe
from caffepy.device.blob import Array
from caffepy.proto import caffe_pb2
from tests.tutorials.material import GOLDEN, MODELS, digits, written

SIDE, APART = 16, 24  # digits are shown twice as large, with room between them
PLACES = [(y, x) for y in range(6, 48, APART) for x in range(5, 90, APART)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digits net that Caffe trained, behind a layer that makes grey of blue, green and red."""
    folder = tmp_path_factory.mktemp("detector")
    param = text_format.Parse(
        (MODELS / "digits" / "deploy.prototxt").read_text(), caffe_pb2.NetParameter()
    )
    param.layer[0].input_param.shape[0].dim[:] = [10, 3, 8, 8]
    layers = list(param.layer)
    grey = caffe_pb2.LayerParameter(name="grey", type="Convolution", bottom=["data"], top=["grey"])
    grey.convolution_param.num_output = 1
    grey.convolution_param.kernel_size.append(1)
    grey.convolution_param.bias_term = False
    layers[1].bottom[0] = "grey"
    del param.layer[:]
    param.layer.extend([layers[0], grey, *layers[1:]])
    model = written(folder / "deploy.prototxt", param)
    net = caffe.Net(model, str(GOLDEN / "digits" / "digits_iter_500.caffemodel"), caffe.TEST)
    net.params["grey"][0].data[0, :, 0, 0] = [0.1, 0.6, 0.3]
    net.save(str(folder / "weights.caffemodel"))
    return model, str(folder / "weights.caffemodel")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Array, Array]]:
    """Image files with eight digits each, their pixels (54, 101, 3), RGB, and the digits in the
    order of PLACES.
    """
    folder = tmp_path_factory.mktemp("scenes")
    images, labels = digits("test")
    made = []
    for k in range(2):
        scene = np.zeros((54, 101), np.uint8)
        shown = slice(len(PLACES) * k, len(PLACES) * (k + 1))
        for (y, x), image in zip(PLACES, images[shown], strict=True):
            scene[y : y + SIDE, x : x + SIDE] = image.repeat(2, axis=0).repeat(2, axis=1)
        path = str(folder / f"{k}.png")
        cv2.imwrite(path, np.dstack([scene] * 3))
        made.append((path, np.dstack([scene] * 3), labels[shown]))
    return made


def detector_of(files: tuple[str, str], context_pad: int | None = None) -> "caffe.Detector":
    return caffe.Detector(
        *files,
        mean=np.array([1.0, 2.0, 3.0]),
        input_scale=1 / 240,
        raw_scale=255,
        channel_swap=(2, 1, 0),
        context_pad=context_pad,
    )


def prepared(crop: Array) -> Array:
    """Turn a crop (H, W, 3) in [0, 1] into the net's input."""
    bgr = caffe.io.resize_image(crop, (8, 8))[..., ::-1].transpose(2, 0, 1)
    return ((bgr * 255 - np.array([1.0, 2.0, 3.0])[:, None, None]) / 240).astype(np.float32)


def best_of_overlapping(windows: Array, scores: Array, most: float) -> list[int]:
    """Numbers of windows, the best first, without those that share more than `most` with a better
    one.
    """
    tops, lefts, bottoms, rights = windows.T
    areas = (bottoms - tops) * (rights - lefts)
    left = list(np.argsort(-scores))
    kept: list[int] = []
    while left:
        first = left.pop(0)
        kept.append(first)
        height = np.minimum(bottoms[first], bottoms[left]) - np.maximum(tops[first], tops[left])
        width = np.minimum(rights[first], rights[left]) - np.maximum(lefts[first], lefts[left])
        shared = np.maximum(0, height) * np.maximum(0, width)
        apart = shared / (areas[first] + areas[left] - shared) <= most
        left = [i for i, alone in zip(left, apart, strict=True) if alone]
    return kept


def test_windows_are_scored_and_the_best_kept(
    files: tuple[str, str], scenes: list[tuple[str, Array, Array]]
) -> None:
    windows = np.array(
        [(y, x, y + SIDE, x + SIDE) for y in range(0, 38, 3) for x in range(2, 85, 3)]
    )
    detector = detector_of(files)
    found = detector.detect_windows([(path, windows) for path, _, _ in scenes])
    assert len(found) == 2 * len(windows)
    scores = np.stack([one["prediction"] for one in found])
    assert scores.shape == (2 * len(windows), 10)

    net = caffe.Net(*files, caffe.TEST)
    for k, (path, pixels, _) in enumerate(scenes):
        part = slice(k * len(windows), (k + 1) * len(windows))
        assert {one["filename"] for one in found[part]} == {path}
        np.testing.assert_array_equal([one["window"] for one in found[part]], windows)
        image = (pixels / 255).astype(np.float32)
        crops = np.stack(
            [prepared(image[top:bottom, left:right]) for top, left, bottom, right in windows]
        )
        np.testing.assert_allclose(
            scores[part], net.forward_all(data=crops)["prob"], rtol=1e-4, atol=1e-6
        )

    exact = detector.detect_windows(
        [(path, [(y, x, y + SIDE, x + SIDE) for y, x in PLACES]) for path, _, _ in scenes]
    )
    read = np.array([one["prediction"].argmax() for one in exact])
    labels = np.concatenate([labels for _, _, labels in scenes])
    assert (read == labels).mean() > 0.8

    path, pixels, _ = scenes[0]
    ink = np.array([pixels[top:bottom, left:right].mean() for top, left, bottom, right in windows])
    strength = scores[: len(windows)].max(axis=1) * ink
    kept = best_of_overlapping(windows, strength, 0.1)[: len(PLACES)]
    assert all(np.diff(strength[kept]) <= 0)
    nearest = {int(np.abs(np.array(PLACES) - windows[i, :2]).sum(1).argmin()) for i in kept}
    assert nearest == set(range(len(PLACES)))  # each digit has its window


PADS = {
    "inside": (20, 30, 36, 46),
    "over a corner": (-2, -3, 10, 12),
    "over the other": (42, 88, 54, 101),
}


@pytest.mark.parametrize("window", PADS.values(), ids=PADS)
def test_context_is_shown_around_windows(
    window: tuple[int, int, int, int],
    files: tuple[str, str],
    scenes: list[tuple[str, Array, Array]],
) -> None:
    """As R-CNN warps: the window fills what the padding leaves of the net's input."""
    detector = detector_of(files, context_pad=2)
    path, pixels, _ = scenes[1]
    image = (pixels / 255).astype(np.float32)
    top, left, bottom, right = window
    expected = np.empty((8, 8, 3), np.float32)
    expected[...] = np.array([3.0, 2.0, 1.0]) / 255  # the mean, RGB
    spans = []
    for low, high, length in ((top, bottom, 54), (left, right, 101)):
        half = (high - low + 1) / 2
        first, last = (
            round(low + half - 2 * half),
            round(low + half + 2 * half),
        )  # 8 / (8 - 2 * 2) times as wide
        scale = 8 / (last - first + 1)
        begin, end = max(first, 0), min(last, length)
        start = round(max(0, -first) * scale)
        spans.append((begin, end, start, min(round((end - begin + 1) * scale), 8 - start)))
    (y0, y1, row, rows), (x0, x1, column, columns) = spans
    part = caffe.io.resize_image(image[y0:y1, x0:x1], (rows, columns))
    expected[row : row + rows, column : column + columns] = part
    np.testing.assert_allclose(detector.crop(image, np.array(window)), expected, atol=1e-7)
    (found,) = detector.detect_windows([(path, [np.array(window)])])
    net = caffe.Net(*files, caffe.TEST)
    scores = net.forward_all(data=prepared(expected)[np.newaxis])["prob"][0]
    np.testing.assert_allclose(found["prediction"], scores, rtol=1e-4, atol=1e-6)
