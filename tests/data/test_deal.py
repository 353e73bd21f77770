"""Processes that are dealt batches get together what one process gets, whatever they skip.

Process by process a layer stands for its node; all of them start with one seed. Batch b belongs to
universal rank b mod N.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caffepy.core.errors import RecordError
from caffepy.data.loader import tolerating
from caffepy.data.reader import Turn, deal_of
from caffepy.data.sources.databases import Database
from caffepy.data.sources.hdf5 import HDF5Rows
from caffepy.data.sources.image_list import ImageList
from caffepy.data.window_loader import WindowLoader
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.blob import Array, Blob
from caffepy.device.device import Device
from caffepy.layer.base import Layer
from caffepy.layer.feed import Prefetching
from caffepy.proto.caffe_pb2 import Datum
from tests.data import test_resume as resume
from tests.layer.test_data import Feed
from tests.parallel.test_data import LAYERS, folder  # noqa: F401  # a fixture

pytestmark = pytest.mark.usefixtures("several")

Batch = list[Array]

STATIC = LAYERS["DummyData"].replace('"uniform"', '"uniformstatic"')
KINDS = {
    **resume.SOURCES,
    "Python": LAYERS["Python"],
    "several files": 'hdf5_data_param { source: "files.txt" batch_size: 3 shuffle: true }',
    "static": STATIC,
}
TYPES = {"several files": "HDF5Data", "static": "DummyData"}
READ_AHEAD = ["Data", "LevelDB", "ImageData", "WindowData"]
SPLITS = {"1x4": [4], "2x2": [2, 2], "4x1": [1, 1, 1, 1], "3+1": [3, 1]}


def feed(kind: str, place: Path, seed: int = 1) -> Feed:
    if kind in resume.SOURCES:
        return resume.feed(kind, place, seed)
    if kind == "several files":
        for number, rows in enumerate((5, 1, 7)):
            with h5py.File(place / f"{number}.h5", "w") as file:
                file["label"] = np.arange(rows) + 100 * number
                file["data"] = np.arange(rows) + 100.0 * number
        (place / "files.txt").write_text("0.h5\n1.h5\n2.h5\n")
    text = f'layer {{ type: "{TYPES.get(kind, kind)}" top: "data" top: "label" {KINDS[kind]} }}'
    return Feed(text, path=f"{place}/net.prototxt", seed=seed)


class Node:
    """A process with its layer, which has tops for each of the process's ranks."""

    def __init__(
        self, made: Feed, first: int, own: int, ranks: int, batches: int | None = None
    ) -> None:
        self.layer: Layer = made.layer
        self.deal = deal_of(first, own, ranks, batches)
        shapes = [top.shape for top in made.top]
        self.tops = [made.top, *([Blob(shape) for shape in shapes] for _ in range(own - 1))]
        self.layer.serve([Device() for _ in range(own)], self.deal)

    def deal_out(self) -> list[Batch]:
        """The batches of a whole deal."""
        return [self.take(turn.rank) for turn in self.deal]

    def take(self, rank: int) -> Batch:
        """The next batch, which is a rank's."""
        tops = self.tops[rank]
        self.layer.begin_turn()
        self.layer.forward([], tops)
        found = [top.host_data.copy() for top in tops]
        self.layer.end_turn()
        same(found, [top.host_data for top in tops])
        return found


def nodes(kind: str, place: Path, split: Sequence[int], batches: int | None = None) -> list[Node]:
    firsts = np.cumsum([0, *split[:-1]]).tolist()
    return [
        Node(feed(kind, place), first, own, sum(split), batches)
        for first, own in zip(firsts, split, strict=True)
    ]


def alone(kind: str, place: Path, ranks: int = 1) -> Node:
    """One process, whose ranks are all there are."""
    return Node(feed(kind, place), 0, ranks, ranks)


def together(made: Sequence[Node], ranks: int, batches: int | None = None) -> list[Batch]:
    """The batches of all processes, in their order."""
    dealt = [iter(node.deal_out()) for node in made]
    owners = [k for k, node in enumerate(made) for _ in node.tops]
    count = ranks if batches is None else batches
    found = [next(dealt[owners[b % ranks]]) for b in range(count)]
    assert not any(list(rest) for rest in dealt)
    return found


def run(node: Node, deals: int) -> None:
    for _ in range(deals):
        node.deal_out()


def same(a: Sequence[Array], b: Sequence[Array]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def same_state(layer: Layer, other: Layer) -> None:
    a, b = layer.state(), other.state()
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], name)
    if layer.type == "Python":
        assert layer.instance.at == other.instance.at  # type: ignore[attr-defined]


def close(*made: Node) -> None:
    for node in made:
        node.layer.close()


def test_turns_of_a_round() -> None:
    assert deal_of(0, 1, 1) == [Turn(0, 0, 0)]
    assert deal_of(0, 2, 2) == [Turn(0, 0, 0), Turn(0, 1, 0)]
    assert deal_of(2, 1, 4) == [Turn(2, 0, 1)]
    assert deal_of(2, 3, 6) == [Turn(2, 0, 0), Turn(0, 1, 0), Turn(0, 2, 1)]


def test_turns_of_a_test() -> None:
    assert deal_of(1, 2, 4, 7) == [Turn(1, 0, 0), Turn(0, 1, 0), Turn(2, 0, 0), Turn(0, 1, 0)]
    assert deal_of(1, 2, 4, 6) == [Turn(1, 0, 0), Turn(0, 1, 0), Turn(2, 0, 0)]
    assert deal_of(3, 1, 4, 6) == [Turn(3, 0, 2)]
    assert deal_of(3, 1, 4, 3) == []


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_those_of_one_process(kind: str, split: str, folder: Path) -> None:  # noqa: F811
    made, whole = nodes(kind, folder, SPLITS[split]), alone(kind, folder, 4)
    for _ in range(6):
        for found, expected in zip(together(made, 4), whole.deal_out(), strict=True):
            same(found, expected)
        for node in made:
            same_state(node.layer, whole.layer)
    close(*made, whole)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", resume.SOURCES)
@pytest.mark.parametrize("batches", [5, 2])
def test_tests_are_those_of_one_process(
    kind: str,
    split: str,
    batches: int,
    folder: Path,  # noqa: F811
) -> None:
    made, whole = nodes(kind, folder, SPLITS[split], batches), alone(kind, folder)
    for _ in range(4):
        for node in made:
            if not node.deal:  # takes no part
                node.layer.skip(batches)
        for found in together(made, 4, batches):
            same(found, *whole.deal_out())
        for node in made:
            same_state(node.layer, whole.layer)
    close(*made, whole)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", resume.SOURCES)
def test_another_number_of_processes_goes_on(kind: str, split: str, folder: Path) -> None:  # noqa: F811
    before, whole = nodes(kind, folder, [2, 1]), alone(kind, folder)
    for _ in range(3):
        for found in together(before, 3):
            same(found, *whole.deal_out())
    state = before[1].layer.state()
    after = nodes(kind, folder, SPLITS[split])
    for node in after:
        node.layer.set_state(state)
    for _ in range(3):
        for found in together(after, 4):
            same(found, *whole.deal_out())
    state = whole.layer.state()
    before[0].take(0)  # leaves the deal unfinished
    for node in before:
        node.layer.set_state(state)
    for found in together(before, 3):
        same(found, *whole.deal_out())
    close(*before, *after, whole)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "static"])
def test_a_layer_alone_skips(kind: str, folder: Path) -> None:  # noqa: F811
    made, whole = alone(kind, folder), alone(kind, folder)
    for count in (0, 1, 7, 2):
        made.layer.skip(count)
        run(whole, count)
        same_state(made.layer, whole.layer)
        for _ in range(3):
            same(*made.deal_out(), *whole.deal_out())
    close(made, whole)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for each image that is decoded from now on."""
    seen = list[object]()

    def note(decode: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            seen.append(args)
            return decode(*args)

        return noting

    for owner, name in ((Database, "decode"), (ImageList, "decode"), (WindowLoader, "_warp")):
        monkeypatch.setattr(owner, name, note(getattr(owner, name)))
    return seen


@pytest.mark.parametrize("kind", READ_AHEAD)
def test_what_others_take_is_not_decoded(
    kind: str,
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Node(feed(kind, folder), 20, 1, 40)
    seen = counted(monkeypatch)
    run(made, 5)
    close(made)
    size, ahead = 2, 4  # of data_param's prefetch
    assert 5 <= len(seen) <= (5 + ahead) * size


@pytest.mark.parametrize("kind", ["Data", "LevelDB", "ImageData"])
def test_only_own_items_are_taken_from_the_source(kind: str, folder: Path) -> None:  # noqa: F811
    made = feed(kind, folder)
    assert isinstance(made.layer, Prefetching)
    assert made.layer._reader
    source, taken = made.layer._reader._loader.source, list[int]()  # type: ignore[attr-defined]
    take = source.take

    def taking(count: int) -> Any:
        taken.append(count)
        return take(count)

    source.take = taking
    node = Node(made, 20, 2, 40)
    run(node, 5)
    close(node)
    assert sum(taken) <= (5 * 2 + 2 * 4) * 2


@pytest.mark.parametrize("failing", ["false", "error"])
@pytest.mark.parametrize("kind", READ_AHEAD)
def test_after_a_batch_that_could_not_be_filled_the_deal_goes_on(
    kind: str,
    failing: str,
    folder: Path,  # noqa: F811
) -> None:
    made, whole = nodes(kind, folder, [1, 2]), alone(kind, folder)
    failures = []
    for node in made:
        assert isinstance(node.layer, Prefetching)
        assert node.layer._reader
        loader = node.layer._reader._loader
        reserve, numbers = loader.reserve, iter(range(100))

        def reserved(
            batch: Any, reserve: Any = reserve, numbers: Any = numbers
        ) -> Callable[[], bool]:
            number, fill = next(numbers), reserve(batch)
            if number % 3 != 1:
                return fill  # type: ignore[no-any-return]

            def fail() -> bool:
                failures.append(number)
                if failing == "error":
                    raise MemoryError
                return False

            if failing == "error" and number % 2:
                raise MemoryError
            return fail

        loader.reserve = reserved  # type: ignore[method-assign]
    for _ in range(8):
        for found in together(made, 3):
            same(found, *whole.deal_out())
        for node in made:
            same_state(node.layer, whole.layer)
    close(*made, whole)


def test_files_of_rows_that_others_take_are_not_loaded(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, loaded = feed("several files", folder), list[str]()
    load = HDF5Rows._load

    def loading(rows: HDF5Rows, file: str) -> list[Array]:
        loaded.append(file)
        return load(rows, file)

    monkeypatch.setattr(HDF5Rows, "_load", loading)
    node = Node(made, 50, 1, 100)
    run(node, 20)
    assert len(loaded) < 30  # for 20 batches, of which some are of two files
    close(node)


@pytest.mark.parametrize("kind", READ_AHEAD)
def test_bad_records_change_no_batch_of_other_machines(
    kind: str,
    folder: Path,  # noqa: F811
) -> None:
    """Each machine replaces those that it meets, as one machine does."""
    spoil(kind, folder)
    with tolerating(6):
        whole = alone(kind, folder)
        made, other = nodes(kind, folder, [1, 2, 1]), nodes(kind, folder, [2, 1])
    for _ in range(6):
        for found in together(made, 4):
            same(found, *whole.deal_out())
    state = made[1].layer.state()
    for node in other:
        node.layer.set_state(state)
    for _ in range(6):
        for found in together(other, 3):
            same(found, *whole.deal_out())
    for node in (*made, *other):
        assert 0 < len(bad_names(node)) <= len(bad_names(whole))
    close(*made, *other, whole)


@pytest.mark.parametrize("kind", READ_AHEAD)
def test_each_machine_counts_the_bad_records_that_it_meets(kind: str, folder: Path) -> None:  # noqa: F811
    spoil(kind, folder)
    with tolerating(1):
        (made,) = nodes(kind, folder, [1, 1])[1:]
    with pytest.raises(
        RecordError, match=r"cannot be decoded.*; 1 bad records were skipped before"
    ):
        run(made, 100)
    close(made)


def bad_names(node: Node) -> list[str]:
    return list(node.layer.state().get("bad", []))


def spoil(kind: str, place: Path) -> None:
    """Make some records unreadable, of which two follow each other and one is the last."""
    bad = (3, 4, 19)
    for number in bad:
        (place / f"{number}.png").write_bytes(b"x")
    if kind in ("Data", "LevelDB"):
        if kind == "LevelDB":
            pytest.importorskip("plyvel", reason="plyvel is not installed")
        path, backend = {"Data": ("db", "lmdb"), "LevelDB": ("leveldb", "leveldb")}[kind]
        shutil.rmtree(place / path, ignore_errors=True)
        broken = Datum(encoded=True, data=b"x")
        with write_database(f"{place}/{path}", backend) as writer:
            for i, image in enumerate(np.load(place / "images.npy")):
                writer.put(f"{i:08d}", broken if i in bad else array_to_datum(image, i))
