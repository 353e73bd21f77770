"""Batches made ahead, by one thread or several, are those that a loader makes alone.

What is shown:

- the same batches in the same order, whatever the speed of the threads and the size of the queue;
- the state is that before the next batch that is taken, so a resumed run repeats none and skips none;
- a bad record is named to who takes its batch, after the good batches before it;
- threads start with the first batch; they end when the reader is closed, is no longer referred to,
  or the process ends.
"""

import gc
import logging
import re
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.core.errors import DataError
from caffepy.data import reader as reader_module
from caffepy.data.loader import Batch, SequentialLoader, tolerating
from caffepy.data.reader import FILL_THREADS, Reader
from caffepy.data.sources import open_database
from caffepy.data.transformer import Transformer
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.device import Device
from caffepy.ops import cpu
from caffepy.proto.caffe_pb2 import TRAIN, Datum, TransformationParameter

pytestmark = pytest.mark.usefixtures("several")

SHAPE = (2, 4, 5)


def images(count, shape=SHAPE):
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


def write(folder, records):
    with write_database(str(folder / "db")) as writer:
        for i, record in enumerate(records):
            writer.put(f"{i:04d}", record)
    return str(folder / "db")


@pytest.fixture
def ten(tmp_path):
    return write(tmp_path, [array_to_datum(image, i) for i, image in enumerate(images(10))])


class ShownReader(Reader):
    """A Reader of which tests see the loader."""

    def __init__(self, loader, *how):
        super().__init__(loader, *how)
        self.loader = loader


def reader(path, batch_size=3, depth=2, transform="", seed=5, phase=TRAIN):
    transformer = Transformer(
        text_format.Parse(transform, TransformationParameter()), phase, Device(seed=seed)
    )
    source = open_database(path)
    source.mode = transformer.decode_mode
    loader = SequentialLoader(source, transformer, batch_size)
    return ShownReader(loader, depth, np.float32, cpu.Staging)


def take(reader, count=1):
    """Transform the next batches as a data layer does: images and labels."""
    batches = []
    for _ in range(count):
        batch = reader.take()
        images, *crops, labels = batch.staging.take()
        data = np.empty(batch.shape, np.float32)
        cpu.transform_batch(images, data, crops, reader.loader.mean, reader.loader.scale)
        batches.append((data, labels.copy()))
        batch.staging.done()
        reader.give_back(batch)
    return batches


def same(a, b):
    assert len(a) == len(b)
    for (data, label), (data_b, label_b) in zip(a, b, strict=True):
        np.testing.assert_array_equal(data, data_b)
        np.testing.assert_array_equal(label, label_b)


def data_threads(name="caffepy-data"):
    return [t for t in threading.enumerate() if t.name == name]


def before_each_fill(monkeypatch, reader, do):
    """Call `do` on the threads before they fill a batch."""
    reserve, load = reader.loader.reserve, reader.loader.load

    def reserve_late(batch):
        fill = reserve(batch)
        return lambda: (do(), fill())[1]

    monkeypatch.setattr(reader.loader, "reserve", reserve_late)
    monkeypatch.setattr(reader.loader, "load", lambda batch: (do(), load(batch)))


def test_batches_in_order_and_around_again(ten):
    r = reader(ten)
    for k, (data, label) in enumerate(take(r, 7)):
        records = [(3 * k + i) % 10 for i in range(3)]
        np.testing.assert_array_equal(label, records)
        np.testing.assert_array_equal(data, images(10)[records])
    r.close()


@pytest.mark.parametrize("depth", [1, 2, 9])
@pytest.mark.parametrize("consumed", [0, 1, 5])
def test_resume_is_exact(ten, consumed, depth):
    transform = "crop_size: 3 mirror: true"
    r = reader(ten, depth=depth, transform=transform)
    take(r, consumed)
    state = r.state()
    other = reader(ten, transform=transform, seed=77)
    other.set_state(state)
    expected = take(r, 6)
    same(take(other, 6), expected)
    r.set_state(state)
    same(take(r, 6), expected)
    r.close()
    other.close()


def test_stopping_drops_nothing(ten):
    r, whole = reader(ten, transform="mirror: true"), reader(ten, transform="mirror: true")
    parts = []
    for _ in range(4):
        parts += take(r, 2)
        r.stop()
    same(parts, take(whole, 8))
    r.close()
    whole.close()


def test_what_is_loaded_anew_reads_no_further(tmp_path):
    records = [array_to_datum(np.full((1, 30, 30), i % 251, np.uint8)) for i in range(3000)]
    path = write(tmp_path, [b"\xff\xff" if i == 5 else record for i, record in enumerate(records)])
    content = bytearray(Path(path, "data.mdb").read_bytes())
    page = content.find(b"2900") // 4096 * 4096
    content[page + 10 : page + 12] = b"\xff\xff"  # damages a leaf that no batch reaches
    Path(path, "data.mdb").write_bytes(content)
    with tolerating(1):
        made = reader(path, 4)
    firsts = [int(images[0].flat[0]) for images, _ in take(made, 100)]
    assert firsts == [4 * batch % 251 for batch in range(100)]
    made.close()


def test_what_is_passed_over_is_said_once(tmp_path, caplog):
    pytest.importorskip("plyvel", reason="plyvel is not installed")
    with write_database(f"{tmp_path}/db", "leveldb") as writer:
        for i in range(9):
            writer.put(f"{i}", b"\xff\xff" if i in (1, 3, 7) else datum(SHAPE))
    with tolerating(2):
        made = reader(f"{tmp_path}/db", 9)
    with pytest.raises(DataError, match="2 bad records were skipped before"):
        take(made)
    made.close()
    assert [m[:12] for m in caplog.messages if m.startswith("Bad record")] == [
        "Bad record 1",
        "Bad record 2",
    ]


def test_a_thread_that_cannot_begin_says_so(ten, monkeypatch):
    monkeypatch.setattr("caffepy.data.reader.num_threads", lambda: 1 // 0)
    made = reader(ten)
    with pytest.raises(ZeroDivisionError):
        made.take()
    made.close()


def test_an_error_that_nobody_takes_is_forgotten(tmp_path):
    made = reader(write(tmp_path, [datum(SHAPE), b"\xff\xff"]), 1)
    take(made)
    loader = weakref.ref(made.loader)
    made.close()
    del made
    for thread in data_threads("caffepy-fill"):
        thread.join(60)
    gc.collect()
    assert loader() is None


def test_the_thread_starts_at_the_first_batch_and_ends_at_close(ten):
    before = data_threads()
    r = reader(ten)
    assert data_threads() == before
    take(r)
    (thread,) = set(data_threads()) - set(before)
    helpers = data_threads("caffepy-fill")
    assert len(helpers) == (FILL_THREADS if reader_module.MIN_THREADS == 1 else 0)
    assert all(t.daemon for t in (thread, *helpers))
    r.close()
    for t in (thread, *helpers):
        t.join(60)
        assert not t.is_alive()


def test_helpers_fill_several_batches_at_a_time(ten, monkeypatch):
    monkeypatch.setattr(reader_module, "MIN_THREADS", 1)
    made, whole = reader(ten, depth=FILL_THREADS), reader(ten)
    together = threading.Barrier(FILL_THREADS)
    before_each_fill(
        monkeypatch, made, lambda: together.wait(60)
    )  # breaks, and with it the batch, if one is alone
    same(take(made, FILL_THREADS), take(whole, FILL_THREADS))
    together.abort()
    made.close()
    whole.close()


def kinds(i):
    """A raw record, an encoded one, one that is larger, one of floats, and what is no record."""
    return (
        array_to_datum(images(20)[i], i).SerializeToString(),
        png((1, 4, 5), label=i),
        datum((2, 6, 5), i),
        array_to_datum(images(20)[i].astype(np.float32), i).SerializeToString(),
        b"\xff\xff",
    )


@settings(deadline=None)  # the first example may compile
@given(
    records=st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, 2, 2, 3, 1, 4]), min_size=1, max_size=20),
    most=st.integers(0, 4),
    crop=st.sampled_from(["crop_size: 3 mirror: true", "mirror: true"]),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(1, 3)),
    pauses=st.sets(st.integers(0, 11)),
)
def test_batches_are_those_of_a_loader_alone(tmp_path_factory, records, most, crop, sizes, pauses):
    path = write(tmp_path_factory.mktemp("any"), [kinds(i)[kind] for i, kind in enumerate(records)])
    batch_size, depth, ranks = sizes
    with tolerating(most):
        made, alone = (
            reader(path, batch_size, depth, crop),
            reader(path, batch_size, transform=crop).loader,
        )
    made.serve([nullcontext] * ranks)
    batch = Batch(batch_size, np.float32, cpu.Staging())
    for k in range(12):
        try:
            alone.load(batch)
        except DataError as error:
            with pytest.raises(DataError, match=f"^{re.escape(str(error))}$"):
                made.take()
            break
        found = made.take()
        assert found.shape == batch.shape
        for a, b in zip(found.staging.take(), batch.staging.take(), strict=True):
            np.testing.assert_array_equal(a, b)
        assert found.state.keys() == batch.state.keys() == made.state().keys()
        for name, value in batch.state.items():
            np.testing.assert_array_equal(found.state[name], value)
        made.give_back(found)
        if k in pauses and (k + 1) % ranks == 0:
            made.stop()
    made.close()
    alone.close()


def test_a_forgotten_reader_ends_its_thread(ten):
    before = data_threads()
    r = reader(ten)
    take(r)
    (thread,) = set(data_threads()) - set(before)
    gone = weakref.ref(r)
    del r
    gc.collect()
    assert gone() is None
    thread.join(60)
    assert not thread.is_alive()


def test_batches_are_read_before_the_first_is_taken(ten, monkeypatch):
    r, other = reader(ten), reader(ten)
    filling = threading.Event()
    before_each_fill(monkeypatch, r, filling.set)
    r.begin()
    assert filling.wait(60)
    same(take(r, 4), take(other, 4))
    r.close()
    other.close()


def test_every_thousandth_wait_is_logged(ten, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "caffepy")
    gate = threading.Semaphore(
        1
    )  # a batch is made only once the consumer waits for it; the first one before

    def waits():
        for number in (0, 1, 1000):
            gate.release()
            yield number

    monkeypatch.setattr("caffepy.data.reader._waits", waits())
    r = reader(ten)
    before_each_fill(monkeypatch, r, gate.acquire)
    take(r, 4)
    assert caplog.messages.count("Waiting for data") == 2
    gate.release(3)
    r.close()


def datum(shape, label=0):
    return array_to_datum(images(1, shape)[0], label).SerializeToString()


def png(shape, **fields):
    _, data = cv2.imencode(".png", np.ascontiguousarray(images(1, shape)[0].transpose(1, 2, 0)))
    return Datum(data=data.tobytes(), encoded=True, **fields).SerializeToString()


BAD = {
    "other shape": (
        datum((2, 4, 6)),
        "",
        r'record "0005" has shape 2 4 6 \(48\) in a batch that starts with 2 4 5 \(40\); '
        "resize all images to one size, or set crop_size$",
    ),
    "other channels": (
        datum((3, 4, 5)),
        "crop_size: 3",
        r"shape 3 4 5 \(60\) in a batch that starts with 2 4 5 \(40\)$",
    ),
    "too small to crop": (
        datum((2, 2, 5)),
        "crop_size: 3",
        'record "0005": crop_size 3 is larger than the image, 2 x 5',
    ),
    "not a Datum": (b"\xff\xff", "", 'record "0005": not a Datum'),
    "no image": (
        Datum(encoded=True, data=b"x").SerializeToString(),
        "",
        'record "0005": its image cannot be decoded',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_named_after_the_good_batches(case, tmp_path):
    record, transform, message = BAD[case]
    path = write(tmp_path, [datum(SHAPE)] * 5 + [record])
    r = reader(path, batch_size=2, transform=transform)
    take(r, 2)
    for _ in range(2):
        with pytest.raises(DataError, match=message) as raised:
            take(r, 2)
        assert path in str(raised.value)
        assert raised.value.exit_code == 4
    r.close()


def test_of_several_bad_records_the_first_is_named(tmp_path):
    good, bad = png((3, 40, 50)), Datum(encoded=True, data=b"x").SerializeToString()
    path = write(tmp_path, [good if i in (0, 1, 2, 4, 8) else bad for i in range(16)])
    for _ in range(5):
        r = reader(path, batch_size=16)
        with pytest.raises(DataError, match='record "0003": its image cannot be decoded'):
            take(r)
        r.close()


def test_encoded_records_are_decoded_in_their_order(tmp_path):
    path = write(tmp_path, [png((1, 3, 4 + i % 2), label=i) for i in range(30)])
    r = reader(path, batch_size=30, transform="crop_size: 3")
    ((data, label),) = take(r)
    np.testing.assert_array_equal(label, range(30))
    assert data.shape == (30, 1, 3, 3)
    r.close()


def test_a_bad_first_record_is_named_each_time(tmp_path):
    r = reader(
        write(tmp_path, [datum(SHAPE), datum((2, 2, 2))]), batch_size=1, transform="crop_size: 3"
    )
    take(r)
    for _ in range(3):
        with pytest.raises(
            DataError, match='record "0001": crop_size 3 is larger than the image, 2 x 2'
        ):
            take(r)
    r.close()


def test_the_first_record_of_a_batch_decides_its_shape(tmp_path):
    path = write(tmp_path, [datum((1, 2, 2), 1), datum((1, 3, 3), 2), datum((2, 3, 3), 3)])
    r = reader(path, batch_size=1)
    assert [data.shape for data, _ in take(r, 4)] == [
        (1, 1, 2, 2),
        (1, 1, 3, 3),
        (1, 2, 3, 3),
        (1, 1, 2, 2),
    ]
    r.close()


def test_images_of_any_size_are_cropped_to_one(tmp_path):
    shapes = [(3, 6, 7), (3, 5, 5), (3, 9, 6), (3, 6, 7)]
    r = reader(
        write(tmp_path, [png(s, label=i) for i, s in enumerate(shapes)]),
        4,
        transform="crop_size: 4",
        phase=1,
    )
    ((data, label),) = take(r)
    np.testing.assert_array_equal(label, range(4))
    for result, (c, h, w) in zip(data, shapes, strict=True):
        top, left = (h - 4) // 2, (w - 4) // 2
        np.testing.assert_array_equal(
            result, images(1, (c, h, w))[0][:, top : top + 4, left : left + 4]
        )
    r.close()


def test_float_records_and_raw_ones_mix(tmp_path):
    values = np.linspace(-1, 1, 40, dtype=np.float32).reshape(SHAPE)
    path = write(tmp_path, [array_to_datum(values, 1), datum(SHAPE, 2), array_to_datum(values, 3)])
    ((data, label),) = take(reader(path, 3))
    np.testing.assert_array_equal(data, [values, images(1)[0], values])
    np.testing.assert_array_equal(label, [1, 2, 3])


def test_force_flags_on_raw_records_are_said_once(ten, caplog):
    r = reader(ten, transform="force_gray: true")
    take(r, 3)
    r.close()
    assert caplog.messages == ["force_color and force_gray only for encoded datum"]


def test_a_process_ends_with_a_reader_at_work(ten):
    program = f"""
import tests.data.test_reader as t
r = t.reader({ten!r}, depth=4)
t.take(r, 3)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_absurd_depth_is_bounded(ten, caplog):
    made = reader(ten, depth=(1 << 32) - 1)
    same(take(made, 3), take(reader(ten), 3))
    made.close()
    assert "100 batches are read ahead, not 4294967295" in caplog.messages


@pytest.mark.parametrize("ranks", [2, 3])
def test_devices_get_batches_in_turn(ten, ranks):
    whole, made = reader(ten, transform="mirror: true"), reader(ten, transform="mirror: true")
    entered = []

    @contextmanager
    def scope(rank):
        entered.append(rank)
        yield

    made.serve([partial(scope, rank) for rank in range(ranks)])
    assert entered == list(range(ranks))
    same(take(whole, 20), take(made, 20))
    state = made.state()
    expected = take(made, 5)
    made.set_state(state)
    found = []
    for k in range(5):
        batch = made.take()
        assert batch.rank == k % ranks
        made.give_back(batch)
        found.append(batch.state["record"])
    assert found == [(int(state["record"]) + 3 * k) % 10 for k in range(1, 6)]
    assert len(expected) == 5
    whole.close()
    made.close()


def test_close_does_not_wait_for_a_thread_that_hangs(ten, monkeypatch, caplog):
    monkeypatch.setattr("caffepy.data.reader.EXIT_WAIT", 0.1)
    r, begun, go = reader(ten), threading.Event(), threading.Event()
    before_each_fill(monkeypatch, r, lambda: (begun.set(), go.wait()))
    before = data_threads()
    r._start()
    begun.wait()
    (thread,) = set(data_threads()) - set(before)
    r.close()
    assert thread.is_alive()
    assert "Reading data hangs" in caplog.messages
    go.set()
    thread.join()
    r.loader.close()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interruption_while_the_thread_begins_loses_nothing(ten, monkeypatch, moment):
    start = threading.Thread.start

    def interrupted(thread):
        if moment == "after":
            start(thread)
        raise KeyboardInterrupt

    read, untouched = reader(ten), reader(ten)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read.take()
    same(take(read, 3), take(untouched, 3))
    read.close()
    untouched.close()
