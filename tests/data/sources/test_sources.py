"""The contract of every source of items: one order, positions that can be taken up again, and
`caffepy data show`. A new source needs a case.
"""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from caffepy.commands.data.show import show
from caffepy.data.sources import SOURCES, find
from caffepy.data.sources.base import Source
from caffepy.data.write import array_to_datum, write_database

IMAGES = np.random.default_rng(0).integers(0, 256, (10, 3, 4, 5), np.uint8)


def database(backend: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        if backend == "leveldb":
            pytest.importorskip("plyvel", reason="plyvel is not installed")
        with write_database(f"{folder}/db", backend) as writer:
            for i, image in enumerate(IMAGES):
                writer.put(f"{i:04d}", array_to_datum(image, i))
        return f"{folder}/db"

    return write


def image_list(folder: Path) -> str:
    for i, image in enumerate(IMAGES):
        cv2.imwrite(f"{folder}/{i}.png", image.transpose(1, 2, 0))
    (folder / "list.txt").write_text("".join(f"{i}.png {i}\n" for i in range(10)))
    return f"{folder}/list.txt"


CASES: dict[str, Callable[[Path], str]] = {
    "LMDB": database("lmdb"),
    "LevelDB": database("leveldb"),
    "ImageList": image_list,
}
"""By class: write the ten IMAGES with labels 0 to 9 and return the path."""


def test_every_source_of_items_has_a_case() -> None:
    assert {cls.__name__ for cls in SOURCES if issubclass(cls, Source)} == set(CASES)


@pytest.fixture(params=CASES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return CASES[request.param](tmp_path)


def opened(path: str) -> Source:
    cls = find(path)
    assert cls
    source = cls.open(path)
    assert isinstance(source, Source)
    return source


def labels(source: Source, items: Any) -> list[int]:
    decode = source.decoder(items)
    found = [decode(i) for i in range(len(items))]
    for (image, label), item in zip(found, items, strict=True):
        np.testing.assert_array_equal(image, IMAGES[label])
        np.testing.assert_array_equal(source.decode(item)[0], image)
    return [label for _, label in found]


def test_items_come_in_order_and_around_again(path: str) -> None:
    source = opened(path)
    assert len(source) == 10
    assert source.decode(source.peek())[1] == 0
    assert labels(source, source.take(7)) == list(range(7))
    items = source.take(16)
    assert labels(source, items) == [i % 10 for i in range(7, 23)]
    chosen = source.join([items[[0, 5]], items[2:3], items[[]]])
    assert labels(source, chosen) == [7, 2, 9]
    assert [source.place(items, i) for i in (0, 10)] == [source.place(items, 10)] * 2
    assert len({source.name(item) for item in items}) == 10
    source.close()


@pytest.mark.parametrize("taken", [0, 3, 10, 14])
def test_a_position_can_be_taken_up_again(taken: int, path: str) -> None:
    source, other = opened(path), opened(path)
    if taken:
        source.take(taken)
    state = source.state()
    assert source.state_keys <= state.keys()
    other.set_state(state)
    for one in (source, other):
        assert labels(one, one.take(4)) == [i % 10 for i in range(taken, taken + 4)]
        one.close()


@pytest.mark.parametrize("count", [1, 3, 10, 27])
def test_skipping_leads_where_taking_does(count: int, path: str) -> None:
    source, other = opened(path), opened(path)
    for _ in range(3):
        source.take(count)
        other.skip(count)
        ours, theirs = source.state(), other.state()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])
        assert labels(source, source.take(4)) == labels(other, other.take(4))
    for one in (source, other):
        one.close()


def test_all_items_once(path: str) -> None:
    source = opened(path)
    parts = [labels(source, items) for items in source.once(4)]
    assert list(chain.from_iterable(parts)) == list(range(10))
    assert max(map(len, parts)) == 4
    source.close()


def test_raw_images_are_copied_or_left_to_decoding(path: str) -> None:
    source = opened(path)
    items = source.take(10)
    images, numbers = np.zeros_like(IMAGES), np.zeros(10)
    done = source.copy(items, images, numbers)
    np.testing.assert_array_equal(images[done], IMAGES[done])
    np.testing.assert_array_equal(numbers[done], np.arange(10)[done])
    assert not images[~done].any()
    source.close()


def test_data_show_tells_of_it(path: str) -> None:
    info = show(path)
    assert (info.records, info.seen, info.bad_records) == (10, 10, 0)
    assert info.labels == dict.fromkeys(range(10), 1)
    assert list(info.shapes) == ["3 4 5 (60)"]
    assert len(info.first) == 5
