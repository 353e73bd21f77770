"""Every source goes on where a snapshot was taken: order, shuffling, position, random numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy.data.write import array_to_datum, write_database
from caffepy.layer.memory_data import MemoryData
from caffepy.solver import sidecar
from tests.layer.test_data import Feed
from tests.parallel.test_data import LAYERS, folder  # noqa: F401  # a fixture

pytestmark = pytest.mark.usefixtures("several")

SOURCES = {
    **{kind: text for kind, text in LAYERS.items() if kind != "Python"},
    "LevelDB": LAYERS["Data"].replace('"db"', '"leveldb"').replace("LMDB", "LEVELDB"),
    "skipping": 'image_data_param { source: "images.txt" batch_size: 2 rand_skip: 11 }',
    "rows in order": 'hdf5_data_param { source: "h5.txt" batch_size: 3 }',
}
TYPES = {"LevelDB": "Data", "skipping": "ImageData", "rows in order": "HDF5Data"}


def feed(kind: str, place: Path, seed: int) -> Feed:
    if kind == "LevelDB" and not (place / "leveldb").exists():
        pytest.importorskip("plyvel", reason="plyvel is not installed")
        with write_database(f"{place}/leveldb", "leveldb") as writer:
            for i, image in enumerate(np.load(place / "images.npy")):
                writer.put(f"{i:08d}", array_to_datum(image, i))
    text = f'layer {{ type: "{TYPES.get(kind, kind)}" top: "data" top: "label" {SOURCES[kind]} }}'
    made = Feed(text, path=f"{place}/net.prototxt", seed=seed)
    if kind == "MemoryData":
        give(made, place)
    return made


def give(made: Feed, place: Path) -> None:
    assert isinstance(made.layer, MemoryData)
    made.layer.reset(np.load(place / "images.npy").astype(np.float32), np.arange(20))


def saved(made: Feed, place: Path) -> dict[str, Any]:
    """The layer's state and the device's random numbers, as a snapshot's sidecar gives them back."""
    sidecar.write(
        f"{place}/sidecar", {"layer": made.layer.state(), "rng": made.device.random.state}
    )
    content = sidecar.read(f"{place}/sidecar")
    assert content
    return content


@pytest.mark.parametrize("before", [0, 1, 4, 13])
@pytest.mark.parametrize("kind", SOURCES)
def test_goes_on_exactly(kind: str, before: int, folder: Path) -> None:  # noqa: F811
    first, second = feed(kind, folder, 1), feed(kind, folder, 2)
    for _ in range(before):
        first.forward()
    state = saved(first, folder)
    second.layer.set_state(state["layer"])
    second.device.random.state = state["rng"]
    for _ in range(25):
        for a, b in zip(first.forward(), second.forward(), strict=True):
            np.testing.assert_array_equal(a, b)
    for made in (first, second):
        made.layer.close()


def test_images_in_memory_that_come_after_the_state(folder: Path) -> None:  # noqa: F811
    text = """layer { type: "MemoryData" memory_data_param { batch_size: 2 channels: 3 height: 4 width: 4 }
      transform_param { mirror: true crop_size: 4 } }"""
    first, second = (Feed(text, seed=seed) for seed in (1, 2))
    images = np.load(folder / "images.npy")
    for made in (first, second):
        assert isinstance(made.layer, MemoryData)
    for _ in range(2):
        first.layer.add(images, np.arange(20))  # type: ignore[attr-defined]
        for _ in range(10):
            first.forward()
    first.layer.add(images, np.arange(20))  # type: ignore[attr-defined]
    for _ in range(3):
        first.forward()
    second.layer.set_state(saved(first, folder)["layer"])
    second.layer.add(images, np.arange(20))  # type: ignore[attr-defined]
    for k in range(14):
        if k == 7:
            for made in (first, second):
                made.layer.add(images, np.arange(20))  # type: ignore[attr-defined]
        for a, b in zip(first.forward(), second.forward(), strict=True):
            np.testing.assert_array_equal(a, b)
