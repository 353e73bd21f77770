import sys
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import pytest

import caffepy as caffe
from caffepy.device.blob import Array
from tests.pycaffe.test_classifier import MEAN, files, scores  # noqa: F401 # a fixture

SWAP = {"mean": MEAN, "raw_scale": 255, "channel_swap": (2, 1, 0)}
SETTINGS = {**SWAP, "input_scale": 0.5}


@pytest.fixture
def photo(tmp_path: Path) -> tuple[str, Array]:
    file = str(tmp_path / "photo.png")
    cv2.imwrite(file, np.random.default_rng(2).integers(0, 256, (40, 50, 3), np.uint8))
    return file, caffe.io.load_image(file)


def test_windows_are_scored(files: tuple[str, str], photo: tuple[str, Array]) -> None:  # noqa: F811
    file, image = photo
    windows = [(3, 4, 11, 10), np.array([0.0, 0.0, 40.0, 50.0])]
    found = caffe.Detector(*files, **SETTINGS).detect_windows(
        [(file, windows), (file, []), (file, windows[:1])]
    )
    crops = [image[3:11, 4:10], caffe.io.resize_image(image, (8, 6)), image[3:11, 4:10]]
    np.testing.assert_allclose(
        [one["prediction"] for one in found], scores(files, crops), rtol=1e-5
    )
    assert [one["filename"] for one in found] == [file] * 3
    assert found[1]["window"] is windows[1]
    assert caffe.Detector(*files).detect_windows([]) == []


def test_the_surroundings_of_a_window(files: tuple[str, str]) -> None:  # noqa: F811
    """Of a window that is as large as the net's input without its margin, each pixel is shown as it
    is.
    """
    detector = caffe.Detector(*files, context_pad=1, **SWAP)
    y, x = np.mgrid[:40, :50]
    image = np.stack([y, x, y + x], axis=-1) / 90
    crop = detector.crop(image, (10, 20, 15, 23))
    assert crop.shape == (8, 6, 3)
    rows, columns = (crop[..., 0] * 90)[:, 0], (crop[..., 1] * 90)[0]
    assert 9 <= rows[0] < rows[-1] <= 16.5
    assert 18.5 <= columns[0] < columns[-1] <= 25
    np.testing.assert_allclose(np.diff(rows), np.diff(rows)[0], atol=1e-3)


def test_beyond_the_image_the_mean_is_shown(files: tuple[str, str]) -> None:  # noqa: F811
    detector = caffe.Detector(*files, context_pad=2, **SWAP)
    crop = detector.crop(np.ones((40, 50, 3), np.float32), (0, 0, 8, 8))
    corner, rest = crop[:2, :2], crop[2:, 2:]
    np.testing.assert_allclose(corner, np.broadcast_to(MEAN[::-1] / 255, (2, 2, 3)), rtol=1e-6)
    assert (rest == 1).all()
    plain = caffe.Detector(*files, context_pad=2)
    assert (plain.crop(np.ones((40, 50, 3), np.float32), (0, 0, 8, 8))[0] == 0).all()


def test_windows_that_show_nothing_are_named(files: tuple[str, str]) -> None:  # noqa: F811
    image = np.zeros((40, 50, 3))
    with pytest.raises(ValueError, match=r"window \(5, 5, 5, 9\) is empty in an image of 40x50"):
        caffe.Detector(*files).crop(image, (5, 5, 5, 9))
    with pytest.raises(
        ValueError, match=r"window \(90, 90, 95, 95\) lies outside of an image of 40x50"
    ):
        caffe.Detector(*files, context_pad=1).crop(image, (90, 90, 95, 95))
    with pytest.raises(
        ValueError, match="context_pad must be less than half of the net's input of 8x6, not 3"
    ):
        caffe.Detector(*files, context_pad=3)


def test_selective_search_is_somebody_elses(
    files: tuple[str, str],  # noqa: F811
    photo: tuple[str, Array],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    detector = caffe.Detector(*files, **SETTINGS)
    with pytest.raises(RuntimeError, match="needs the package selective_search_ijcv_with_python"):
        detector.detect_selective_search([photo[0]])
    search = ModuleType("selective_search_ijcv_with_python")
    search.get_windows = lambda names, cmd: [[(0, 0, 9, 9)] for _ in names]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, search.__name__, search)
    (found,) = detector.detect_selective_search([photo[0]])
    assert found["window"] == (0, 0, 9, 9)
