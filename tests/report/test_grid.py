import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.core.errors import UsageError
from caffepy.report import grid


def test_grey_filters_stand_in_a_square() -> None:
    weights = np.linspace(-1, 1, 5 * 3 * 2).reshape(5, 1, 3, 2).astype(np.float32)
    tiles, columns = grid.filter_tiles(weights)
    assert (tiles.shape, columns) == ((5, 3, 2, 1), 3)
    picture = grid.grid(tiles, columns)
    factor = grid.LARGEST
    assert picture.shape == (2 * (3 * factor + 1) - 1, 3 * (2 * factor + 1) - 1, 3)
    for i in range(5):
        y, x = i // 3 * (3 * factor + 1), i % 3 * (2 * factor + 1)
        for row in range(3):
            for column in range(2):
                expected = round((weights[i, 0, row, column] + 1) / 2 * 255)
                part = picture[
                    y + row * factor : y + (row + 1) * factor,
                    x + column * factor : x + (column + 1) * factor,
                ]
                assert np.all(np.abs(part.astype(int) - expected) <= 1)
    assert np.all(picture[3 * factor] == 255), "a line"
    assert np.all(picture[3 * factor + 1 :, -2 * factor :] == 255), "no sixth filter"


def test_filters_of_three_channels_are_in_colour_blue_first() -> None:
    weights = np.zeros((2, 3, 1, 1))
    weights[0, 0], weights[1, 2] = 1, 1
    picture = grid.grid(*grid.filter_tiles(weights))
    np.testing.assert_array_equal(picture[0, [0, -1]], [[255, 0, 0], [0, 0, 255]])


def test_other_filters_have_a_row_each() -> None:
    weights = np.zeros((4, 5, 1, 1))
    weights[2, 3] = 1
    tiles, columns = grid.filter_tiles(weights)
    assert columns == 5
    step = grid.LARGEST + 1
    assert np.argwhere(grid.grid(tiles, columns)[::step, ::step, 0]).tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("shape", "tiles", "columns"),
    [
        ((7, 4, 5), (7, 4, 5, 1), 3),
        ((10,), (10, 1, 1, 1), 4),
        ((), (1, 1, 1, 1), 1),
        ((4, 5), (1, 4, 5, 1), 1),
        ((2, 3, 4, 5), (6, 4, 5, 1), 3),
    ],
    ids=str,
)
def test_values_of_any_shape(shape: tuple[int, ...], tiles: tuple[int, ...], columns: int) -> None:
    found, across = grid.blob_tiles(np.zeros(shape))
    assert (found.shape, across) == (tiles, columns)


def test_values_that_are_not_finite_are_red_and_equal_ones_grey() -> None:
    picture = grid.grid(*grid.blob_tiles(np.array([[[0.0, np.nan], [1.0, np.inf]]])))
    step = grid.LARGEST
    assert picture[::step, ::step].tolist() == [
        [[0, 0, 0], [0, 0, 255]],
        [[255, 255, 255], [0, 0, 255]],
    ]
    assert np.unique(grid.grid(*grid.blob_tiles(np.full((1, 2, 2), 7.0)))).tolist() == [128]
    assert np.unique(grid.grid(*grid.blob_tiles(np.full((1, 1, 1), np.nan)))).tolist() == [0, 255]


def test_a_picture_that_would_be_too_large_is_cut(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "MOST_PIXELS", 1 << 20)
    tiles = np.zeros((300, 100, 100, 1), np.float32)
    picture = grid.grid(tiles, 3)
    assert picture.shape[0] * picture.shape[1] <= grid.MOST_PIXELS
    assert re.search("Only the first [0-9]+ of 100 rows fit into the picture", caplog.text)


def test_saved_pictures(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    grid.save(picture, str(tmp_path / "x.PNG"))
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "x.PNG")), picture)
    with pytest.raises(UsageError, match=r'the extension of "x.gif" must name the format: .png, '):
        grid.save(picture, "x.gif")
    with pytest.raises(UsageError, match="cannot write"):
        grid.save(picture, str(tmp_path / "no" / "x.png"))
