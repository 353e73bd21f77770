"""Bad records that may be skipped: which come instead, how many, and the same again when a run
goes on.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.cli import main
from caffepy.core.errors import DataError, RecordError
from caffepy.data.loader import BadRecords, tolerating
from caffepy.data.write import write_database
from caffepy.proto.caffe_pb2 import Datum
from tests.layer.test_data import Feed
from tests.nets import library

pytestmark = pytest.mark.usefixtures("several")

COUNT = 12
BAD = (0, 5, 6, 11)
Make = Callable[..., Feed]


def image(i: int) -> bytes:
    return cv2.imencode(".png", np.full((4, 5, 3), i, np.uint8))[1].tobytes()


@pytest.fixture(params=["lmdb", "leveldb", "images", "shuffled"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a feed of twelve images, those in `bad` broken, with this limit of bad records."""
    if request.param == "leveldb":
        pytest.importorskip("plyvel", reason="plyvel is not installed")

    def feed(most: int, bad: tuple[int, ...] = BAD, seed: int = 1, batch: int = 5) -> Feed:
        contents = [b"x" if i in bad else image(i) for i in range(COUNT)]
        if request.param in ("lmdb", "leveldb"):
            if not (tmp_path / "db").exists():
                with write_database(f"{tmp_path}/db", request.param) as writer:
                    for i, content in enumerate(contents):
                        writer.put(f"{i:02d}", Datum(encoded=True, data=content, label=i))
            layer = f'type: "Data" data_param {{ source: "db" backend: {request.param.upper()} batch_size: {batch} }}'
        else:
            for i, content in enumerate(contents):
                (tmp_path / f"{i}.png").write_bytes(content)
            (tmp_path / "list.txt").write_text("".join(f"{i}.png {i}\n" for i in range(COUNT)))
            shuffle = str(request.param == "shuffled").lower()
            layer = f'type: "ImageData" image_data_param {{ source: "list.txt" batch_size: {batch} shuffle: {shuffle} }}'
        with tolerating(most):
            return Feed(
                f"layer {{ {layer} transform_param {{ mirror: true }} }}",
                path=f"{tmp_path}/net.prototxt",
                seed=seed,
            )

    return feed


def labels(feed: Feed, count: int) -> list[int]:
    found = []
    for _ in range(count):
        data, label = feed.forward()
        assert [int(image.mean()) for image in data] == [int(x) for x in label]
        found += [int(x) for x in label]
    return found


def order_of(feed: Feed, count: int) -> list[int]:
    """The numbers of the next images, bad ones included."""
    source = feed.layer._reader._loader.source  # type: ignore[attr-defined]
    state = source.state()
    numbers = [int(Path(source.key(item)).stem) for item in source.take(count)]
    source.set_state(state)
    return numbers


def test_those_that_follow_come_instead(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """They come again in their turn: no batch depends on what was found in those before it."""
    feed = make(4)
    order = order_of(feed, 75)
    for k in range(0, 60, 5):
        kept = [i for i in order[k : k + 5] if i not in BAD]
        following = [i for i in order[k + 5 :] if i not in BAD]
        assert labels(feed, 1) == [*kept, *following[: 5 - len(kept)]]
    told = [m for m in caplog.messages if m.startswith("Bad record ")]
    assert len(told) == len(BAD)
    assert "Bad record 1 of at most 4 is skipped: " in told[0]
    assert "its image cannot be decoded (1 bytes) (" in told[0]
    numbers = sorted(int(text.rpartition(" ")[2].rstrip(")")) for text in told)
    assert numbers in ([*BAD], [i + 1 for i in BAD])
    feed.layer.close()


def test_one_too_many_is_named(make: Make) -> None:
    feed = make(3)
    with pytest.raises(
        RecordError, match=r"its image cannot be decoded .*; 3 bad records were skipped before"
    ):
        labels(feed, 4)
    feed.layer.close()


def test_none_may_be_passed_over_without_the_flag(make: Make) -> None:
    feed = make(0, bad=(7,), batch=12)
    with pytest.raises(RecordError, match=r"cannot be decoded \(1 bytes\) \((line 8|number 7)\)$"):
        feed.forward()
    feed.layer.close()


@pytest.mark.parametrize("before", [0, 1, 3, 6])
def test_a_resumed_run_gets_the_same_and_counts_no_record_twice(
    before: int, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    whole, first, second = (make(4, seed=seed) for seed in (1, 1, 2))
    labels(first, before)
    second.layer.set_state(first.layer.state())
    labels(whole, before)
    for _ in range(10):
        for a, b in zip(whole.forward(), second.forward(), strict=True):
            np.testing.assert_array_equal(a, b)
    for feed in (whole, first, second):
        feed.layer.close()


@pytest.mark.parametrize("batch", [1, 5, 30])
def test_a_source_of_bad_records_only_ends(
    make: Make, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = make(COUNT, batch=batch)
    source = feed.layer._reader._loader.source  # type: ignore[attr-defined]

    def fail(item: object) -> None:
        raise DataError("no image")

    monkeypatch.setattr(source, "decode", fail)
    with pytest.raises(DataError, match="so are all others, bad"):
        feed.forward()
    feed.layer.close()


def test_one_good_record_is_enough(make: Make) -> None:
    feed = make(COUNT, bad=tuple(i for i in range(COUNT) if i != 7), batch=30)
    assert labels(feed, 2) == [7] * 60
    feed.layer.close()


def test_a_source_of_bad_records_only_is_refused_at_once(make: Make) -> None:
    with pytest.raises(RecordError, match="cannot be decoded"):
        make(COUNT, bad=tuple(range(COUNT)))


def test_windows_of_bad_images_are_drawn_anew(tmp_path: Path) -> None:
    for i in range(4):
        cv2.imwrite(f"{tmp_path}/{i}.png", np.full((20, 20, 3), 10 * i, np.uint8))
    (tmp_path / "2.png").write_bytes(b"x")
    os.remove(tmp_path / "3.png")
    block = "# {0}\n{0}.png\n3\n20\n20\n2\n{1} 0.9 0 0 9 9\n0 0.1 2 2 11 11\n"
    (tmp_path / "windows.txt").write_text("".join(block.format(i, i + 1) for i in range(4)))

    def make(most: int, cached: str = "", seed: int = 1) -> Feed:
        text = (
            f'window_data_param {{ source: "windows.txt" batch_size: 8 fg_fraction: 0.5 {cached} }}'
        )
        text = (
            f'layer {{ type: "WindowData" {text} transform_param {{ crop_size: 8 mirror: true }} }}'
        )
        with tolerating(most):
            return Feed(text, path=f"{tmp_path}/net.prototxt", seed=seed)

    with pytest.raises(RecordError, match="; 1 bad records were skipped before"):
        make(1).forward()
    with pytest.raises(RecordError, match=r"3\.png cannot be read"):
        make(0, "cache_images: true")
    for cached in ("", "cache_images: true"):
        feed, again = make(2, cached), make(2, cached, seed=2)
        for k in range(12):
            data, label = feed.forward()
            assert set(label[4:].astype(int)) <= {1, 2}
            assert not label[:4].any()
            assert {float(crop.max()) for crop in data} <= {0.0, 10.0}
            if k == 5:
                again.layer.set_state(feed.layer.state())
            elif k > 5:
                np.testing.assert_array_equal(again.forward()[0], data)
        feed.layer.close()
        again.layer.close()


def test_all_windows_of_a_kind_are_bad(tmp_path: Path) -> None:
    (tmp_path / "windows.txt").write_text(
        "# 0\n0.png\n3\n20\n20\n2\n1 0.9 0 0 9 9\n0 0.1 2 2 11 11\n"
    )
    text = (
        'window_data_param { source: "windows.txt" batch_size: 2 } transform_param { crop_size: 8 }'
    )
    with tolerating(5):
        feed = Feed(f'layer {{ type: "WindowData" {text} }}', path=f"{tmp_path}/net.prototxt")
    with pytest.raises(
        DataError,
        match=r"0\.png cannot be read: .*; all other images with windows of its kind are bad, too",
    ):
        feed.forward()
    feed.layer.close()


NET = library.linear_classifier(library.records("db", 4), 3)


def test_the_flag_and_what_is_said_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with write_database("db", "lmdb") as writer:
        for i in range(10):
            writer.put(
                f"{i:02d}", Datum(encoded=True, data=b"x" if i in (3, 7) else image(i), label=i % 3)
            )
    Path("net.prototxt").write_text(NET)
    solver = 'net: "net.prototxt" base_lr: 0.0001 lr_policy: "fixed" max_iter: %d random_seed: 1 snapshot_prefix: "%s"'
    Path("solver.prototxt").write_text(solver % (9, "s"))
    assert main.run(["train", "-solver", "solver.prototxt"]) == 4
    error = capsys.readouterr().err
    assert 'db: record "03": its image cannot be decoded (1 bytes) (number 3)' in error
    assert error.endswith("(to skip some such records, add --max-bad-records N)\n")
    assert main.run(["train", "-solver", "solver.prototxt", "-max_bad_records", "2"]) == 0
    assert capsys.readouterr().err.count("] Bad record ") == 2
    for iterations in (4, 9):
        Path("solver.prototxt").write_text(solver % (iterations, "parts"))
        assert (
            main.run(
                ["train", "-solver", "solver.prototxt", "-max_bad_records=2", "-snapshot", "auto"]
            )
            == 0
        )
    assert Path("s_iter_9.caffemodel").read_bytes() == Path("parts_iter_9.caffemodel").read_bytes()
    capsys.readouterr()
    line = ["test", "-model", "net.prototxt", "-weights", "s_iter_9.caffemodel", "-iterations", "3"]
    assert main.run(line) == 4
    assert main.run([*line, "-max-bad-records", "1"]) == 4
    assert "; 1 bad records were skipped before" in capsys.readouterr().err
    assert main.run([*line, "-max-bad-records", "2"]) == 0


def test_the_limit_is_that_of_the_block() -> None:
    with tolerating(3):
        assert BadRecords().most == 3
    assert BadRecords().most == 0


def test_warnings_have_their_level(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    feed = make(4)
    labels(feed, 4)
    assert {r.levelno for r in caplog.records if r.getMessage().startswith("Bad")} == {
        logging.WARNING
    }
    feed.layer.close()
