"""Databases: order, wrapping, positions, sharing, and everything that can be wrong with a path."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import pytest

from caffepy.core.errors import DataError
from caffepy.core.files import temporary
from caffepy.data import datum_fields, datum_kernels
from caffepy.data.sources import databases, open_database
from caffepy.data.sources.databases import printable
from caffepy.data.sources.lmdb import READ_AHEAD
from caffepy.data.write import write_database

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
KEYS = [f"0000000{i}_im{i}.{'png' if i % 2 else 'jpg'}".encode() for i in range(10)]


def make(path, count, size=20):
    with write_database(str(path)) as writer:
        for i in range(count):
            writer.put(f"{i:08d}", bytes([i % 256]) * size)
    return str(path)


def keys(source, count):
    return [bytes(source.read()[0]) for _ in range(count)]


@pytest.fixture(params=["folder", "file", "LevelDB"])
def source(request, tmp_path):
    if request.param == "LevelDB":
        pytest.importorskip("plyvel", reason="plyvel is not installed")
        path = shutil.copytree(GOLDEN / "raw_leveldb", tmp_path / "db")
    else:
        path = GOLDEN / "raw_lmdb" / ("data.mdb" if request.param == "file" else "")
    source = open_database(str(path))
    yield source
    source.close()


def test_key_order_and_around_again(source, caplog):
    caplog.set_level(logging.INFO, "caffepy")
    assert len(source) == 10
    assert keys(source, 23) == KEYS + KEYS + KEYS[:3]
    assert [r.message for r in caplog.records].count("Restarting data prefetching from start.") == 2


def test_peek_consumes_nothing(source):
    key, value = source.peek()
    assert source.read() == (key, value)
    assert bytes(source.read()[0]) == KEYS[1]


def position(source):
    state = source.state()
    return state["record"], state["key"].tobytes()


@pytest.mark.parametrize("count", [1, 3, 10, 25])
def test_taking_is_reading(source, count, caplog):
    caplog.set_level(logging.INFO, "caffepy")
    other = open_database(source.path)
    for _ in range(4):
        records = source.take(count)
        assert len(records) == count
        assert [(bytes(k), bytes(v)) for k, v in records] == [
            (bytes(k), bytes(v)) for k, v in (other.read() for _ in range(count))
        ]
        assert position(source) == position(other)
    assert caplog.messages.count("Restarting data prefetching from start.") == 2 * (4 * count // 10)
    other.close()


@pytest.mark.parametrize("read", [0, 4, 9, 10, 17])
def test_position_and_seek(source, read):
    keys(source, read)
    index, key = position(source)
    assert (index, key) == (read % 10, KEYS[read % 10])
    source.seek(0)
    assert keys(source, 1) == KEYS[:1]
    source.seek(index, key)
    assert position(source) == (index, key)
    source.seek(index)
    assert position(source) == (index, key)
    assert keys(source, 2) == (KEYS + KEYS)[index : index + 2]


def test_seek_to_a_key_that_is_gone_goes_by_number(source, caplog):
    source.seek(3, b"no such key")
    assert position(source) == (3, KEYS[3])
    assert 'no longer holds record "no such key"' in caplog.text


def test_taking_goes_on_at_the_key_when_its_number_has_changed(tmp_path):
    source = open_database(make(tmp_path / "db", 10))
    source.seek(2, b"00000005")
    assert [bytes(key) for key, _ in source.take(7)] == [b"%08d" % i for i in (5, 6, 7, 8, 9, 0, 1)]
    assert [bytes(key) for key, _ in source.take(12)] == [b"%08d" % (i % 10) for i in range(2, 14)]


@pytest.mark.parametrize("count", [3, 7, 12])
def test_skipping_goes_on_at_the_key_when_its_number_has_changed(count, tmp_path):
    source, other = (open_database(make(tmp_path / name, 10)) for name in ("a", "b"))
    for one in (source, other):
        one.seek(2, b"00000005")
    source.skip(count)
    other.take(count)
    assert position(source) == position(other)


def test_the_system_reads_ahead_what_is_taken_alone_after_skips(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args[1:3]))
    source = open_database(make(tmp_path / "db", 1000, 3000))  # a page each
    source.take(10)
    source.take(10)
    assert [size for _, size in asked] == [READ_AHEAD]
    del asked[:]
    for _ in range(3):
        source.skip(80)
        records = source.take(10)
        first, last = records.rows[0, 2], records.rows[-1, 2]
        assert asked.pop() == (first, last - first + 3000)
    assert not asked


def test_taking_many_small_records(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "caffepy.data.sources.lmdb_pages.KEPT", 3000
    )  # so that some places are forgotten
    source = open_database(make(tmp_path / "db", 20_000))
    for start in range(0, 45_000, 900):
        assert [bytes(key) for key, _ in source.take(900)] == [
            b"%08d" % (i % 20_000) for i in range(start, start + 900)
        ]


def test_several_sources_of_one_environment():
    first, second = (open_database(str(GOLDEN / "raw_lmdb")) for _ in range(2))
    third = open_database(str(GOLDEN / "raw_lmdb" / "data.mdb"))
    assert keys(first, 3) == KEYS[:3]
    first.close()
    assert keys(second, 2) == KEYS[:2]
    assert keys(third, 1) == KEYS[:1]
    second.close()
    third.close()


def test_what_is_forgotten_is_free_for_others(tmp_path):
    """A script that let its net go opens the database by itself: lmdb refuses to do that twice in a
    process.
    """
    path = make(tmp_path / "db", 3)
    first, second = open_database(path), open_database(path)
    del first
    assert keys(second, 1) == [b"00000000"]
    del second
    with lmdb.open(path, readonly=True, lock=False) as database:
        assert database.stat()["entries"] == 3


def test_sources_come_and_go_in_many_threads():
    path, errors = str(GOLDEN / "raw_lmdb"), []

    def open_and_forget(close):
        try:
            for _ in range(100):
                source = open_database(path)
                assert keys(source, 2) == KEYS[:2]
                if close:
                    source.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=open_and_forget, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_closing_twice_is_fine():
    source, other = (open_database(str(GOLDEN / "raw_lmdb")) for _ in range(2))
    source.close()
    source.close()
    assert keys(other, 1) == KEYS[:1]
    other.close()


def test_a_new_database_under_an_old_name(tmp_path):
    old = open_database(make(tmp_path / "db", 3))
    os.rename(tmp_path / "db", tmp_path / "old")
    new = open_database(make(tmp_path / "db", 5))
    assert (len(old), len(new)) == (3, 5)


def test_read_only_folder(tmp_path):
    shutil.copytree(GOLDEN / "raw_lmdb", tmp_path / "db")
    os.chmod(tmp_path / "db" / "data.mdb", 0o444)
    os.chmod(tmp_path / "db", 0o555)
    source = open_database(str(tmp_path / "db"))
    assert keys(source, 10) == KEYS
    source.close()
    os.chmod(tmp_path / "db", 0o755)
    assert os.listdir(tmp_path / "db") == ["data.mdb"]


def test_a_leveldb_stays_as_it_is_and_others_may_read_it_at_the_same_time(tmp_path):
    pytest.importorskip("plyvel", reason="plyvel is not installed")
    path = GOLDEN / "raw_leveldb"
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
    source = open_database(str(path))
    program = f"from caffepy.data.sources import open_database; assert len(open_database({str(path)!r})) == 10"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
    assert keys(source, 12) == KEYS + KEYS[:2]
    source.close()
    assert {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()
    } == before


DROPPED = """
import shutil, sys, time
import caffepy

remove = shutil.rmtree

def slowly(*args, **kwargs):
    time.sleep(0.3)
    remove(*args, **kwargs)

shutil.rmtree = slowly
for _ in range(2):
    net = caffepy.Net(sys.argv[1], caffepy.TRAIN)
    net.forward()
del net
"""


def test_links_to_a_leveldb_go_with_the_process_or_with_the_next(tmp_path):
    """A thread that reads ahead is the last user of a net's data."""
    pytest.importorskip("plyvel", reason="plyvel is not installed")
    (tmp_path / "temporary").mkdir()
    (tmp_path / "net.prototxt").write_text(
        'layer { name: "d" type: "Data" top: "x" top: "y" data_param { batch_size: 2 '
        f'source: "{GOLDEN}/raw_leveldb" backend: LEVELDB }} }}'
    )
    environment = {**os.environ, "TMPDIR": f"{tmp_path}/temporary", "CAFFEPY_NUM_THREADS": "4"}
    call = [sys.executable, "-c", DROPPED, f"{tmp_path}/net.prototxt"]
    root = Path(__file__).parents[3]
    subprocess.run(call, check=True, cwd=root, env=environment)
    assert not os.listdir(tmp_path / "temporary")
    killed = (
        "import os; from caffepy.data.sources import open_database\n"
        f"source = open_database('{GOLDEN}/raw_leveldb'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed], check=False, cwd=root, env=environment)
    assert len(os.listdir(tmp_path / "temporary")) == 1
    subprocess.run(call, check=True, cwd=root, env=environment)
    assert not os.listdir(tmp_path / "temporary")


@pytest.mark.parametrize("missing", ["CURRENT", "MANIFEST-000002"])
def test_a_damaged_leveldb_is_told_by_its_name(missing, tmp_path):
    pytest.importorskip("plyvel", reason="plyvel is not installed")
    shutil.copytree(GOLDEN / "raw_leveldb", tmp_path / "db")
    os.remove(tmp_path / "db" / missing)
    if missing == "CURRENT":
        with pytest.raises(DataError, match="db is no database"):
            open_database(str(tmp_path / "db"))
    else:
        with pytest.raises(DataError, match="db cannot be read as a LevelDB: ") as raised:
            open_database(str(tmp_path / "db"))
        assert "caffepy-leveldb" not in str(raised.value)


@pytest.mark.parametrize("kind", [".log", ".ldb"])
def test_damage_in_a_leveldb_is_met(kind, tmp_path, monkeypatch):
    pytest.importorskip("plyvel", reason="plyvel is not installed")
    monkeypatch.setattr("caffepy.data.write.WRITE_BUFFER", 1 << 16)
    with write_database(f"{tmp_path}/db", "leveldb") as writer:
        for i in range(3000):
            writer.put(f"{i:08d}", os.urandom(200))
    for file in sorted((tmp_path / "db").glob(f"*{kind}")):
        content = bytearray(file.read_bytes())
        if len(content) > 1000:
            content[900] ^= 255
            file.write_bytes(content)
    with pytest.raises(
        DataError, match=r"db (cannot be read as a LevelDB|is damaged near record \d+): .*checksum"
    ):
        open_database(f"{tmp_path}/db").take(3000)


def test_a_truncated_leveldb_is_told_by_its_name(tmp_path, monkeypatch):
    pytest.importorskip("plyvel", reason="plyvel is not installed")
    monkeypatch.setattr("caffepy.data.write.WRITE_BUFFER", 1 << 16)
    with write_database(f"{tmp_path}/db", "leveldb") as writer:
        for i in range(9000):
            writer.put(f"{i:08d}", os.urandom(200))
    tables = sorted((tmp_path / "db").glob("*.ldb"))
    for i in 0, 1:
        shutil.copytree(tmp_path / "db", tmp_path / f"{i}")
        os.truncate(tmp_path / f"{i}" / tables[i].name, tables[i].stat().st_size // 2)
        with pytest.raises(
            DataError, match=rf"{i} (is damaged|cannot be read as a LevelDB): "
        ) as raised:
            len(open_database(f"{tmp_path}/{i}"))
        assert "caffepy-leveldb" not in str(raised.value)


KEYS_SHOWN = {
    b"a b": '"a b"',
    "ä".encode(): '"ä"',
    b"\xff\0a": r'"\xff\x00a"',
    b"a\n\x1b[1m": r'"a\n\x1b[1m"',
}


@pytest.mark.parametrize("key", KEYS_SHOWN)
def test_keys_in_messages(key):
    assert printable(key) == KEYS_SHOWN[key]


def test_all_records_once(source):
    source.read()
    for size in (1, 3, 10, 99):
        runs = [[bytes(key) for key, _ in records] for records in source.once(size)]
        assert [key for run in runs for key in run] == KEYS
        assert {len(run) for run in runs[:-1]} <= {size}


def test_larger_than_the_default_map(tmp_path):
    source = open_database(make(tmp_path / "db", 300, 100_000))
    assert len(source) == 300
    assert bytes(source.read()[1]) == bytes(100_000)


def test_backend_of_the_wrong_name_warns_once(tmp_path, caplog):
    path = make(tmp_path / "db", 1)
    for _ in range(2):
        open_database(path, "LEVELDB")
    open_database(path, "LMDB")
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"{path} is opened as the LMDB it is; write backend: LMDB"
    ]


def test_opened_line(caplog, tmp_path):
    caplog.set_level(logging.INFO, "caffepy")
    path = make(tmp_path / "db", 1)
    open_database(path, "LMDB")
    assert f"Opened lmdb {path}" in caplog.messages


def test_leveldb_without_plyvel_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plyvel", None)
    with pytest.raises(
        DataError, match=r"raw_leveldb is a LevelDB; .* pip install 'caffepy\[leveldb\]'"
    ):
        open_database(str(GOLDEN / "raw_leveldb"), "LMDB")


def damaged(tmp_path, content):
    (tmp_path / "db").mkdir(parents=True)
    (tmp_path / "db" / "data.mdb").write_bytes(content)
    return str(tmp_path / "db")


BYTES = (GOLDEN / "raw_lmdb" / "data.mdb").read_bytes()
DAMAGED = {
    "empty": (b"", "is not an LMDB: .*data.mdb is empty"),
    "text": (b"name: 'lenet'\n" * 1000, "is not an LMDB: .*data.mdb looks like text"),
    "short text": (b"hello", "is not an LMDB: .*data.mdb looks like text"),
    "zeros": (bytes(20000), "is not an LMDB: .*data.mdb looks like zero bytes"),
    "within the first lines": (BYTES[:100], "truncated LMDB: .* has 100 of at least 8192 bytes"),
    "within the first page": (BYTES[:1000], "truncated LMDB: .* has 1000 of at least 8192 bytes"),
    "one page": (BYTES[:4096], "truncated LMDB: .* has 4096 of at least 8192 bytes"),
    "two pages": (BYTES[:8192], "truncated LMDB: .* has 8192 of at least 24576 bytes"),
    "within a page": (BYTES[:12000], "truncated LMDB: .* has 12000 of at least 24576 bytes"),
    "last byte": (BYTES[:-1], "truncated LMDB: .* has 24575 of at least 24576 bytes"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file(case, tmp_path):
    content, message = DAMAGED[case]
    with pytest.raises(DataError, match=message) as raised:
        open_database(damaged(tmp_path, content))
    assert raised.value.exit_code == 4


def read_until_error(path, at_a_time):
    records = 0
    try:
        source = open_database(path)
        while True:
            if at_a_time == "skipped":
                source.skip(50)
                records += 50
            else:
                records += len(source.take(at_a_time)) if at_a_time else bool(source.read())
    except DataError as error:
        return records, error


@pytest.mark.parametrize("at_a_time", [0, 50, "skipped"])
@pytest.mark.parametrize("leaf", [3, 500])
def test_a_damaged_page_is_met_before_it_is_read(leaf, at_a_time, tmp_path):
    """LMDB itself would crash on it; the first leaves are checked at once."""
    make(tmp_path / "db", 20_000, 120)
    content = bytearray((tmp_path / "db" / "data.mdb").read_bytes())
    leaves = [p for p in range(2, len(content) // 4096) if content[p * 4096 + 10] == 2]
    page = leaves[leaf]
    content[4096 * page : 4096 * (page + 1)] = bytes(4096)
    path = damaged(tmp_path / "copy", bytes(content))
    records, error = read_until_error(path, at_a_time)
    assert f"copy/db is damaged at page {page} of {len(content) // 4096}; copy it anew" in str(
        error
    )
    assert (records > 1000) == (leaf > 100)


def test_random_damage_never_crashes(tmp_path):
    """In a child process, which a crash would end."""
    make(tmp_path / "small", 500)
    make(tmp_path / "large", 20, 10_000)
    program = f"""
import os, random
from caffepy.data.sources import open_database
from caffepy.core.errors import DataError
random.seed(1)
for i in range(200):
    content = bytearray(open(f"{tmp_path}/{{('small', 'large')[i % 2]}}/data.mdb", "rb").read())
    for _ in range(3):
        page = random.randrange(len(content) // 4096)
        content[page * 4096 + random.randrange(150)] = random.randrange(256)
    os.makedirs(f"{tmp_path}/{{i}}")
    open(f"{tmp_path}/{{i}}/data.mdb", "wb").write(content)
    try:
        source = open_database(f"{tmp_path}/{{i}}")
        count = len(source) % 1000
        for records in ([source.read() for _ in range(count)], source.take(count)):
            records = [(bytes(k), bytes(v)) for k, v in records]
        source.skip(2 * count)
        source.seek(5, b"00000005")
        print("read")
    except DataError:
        print("refused")
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    assert len(lines) == 200
    assert lines.count("refused") > 20


def test_an_lmdb_of_several_values_a_key_is_refused(tmp_path):
    """LMDB crashes on damaged pages of values, which nothing checks."""
    make(tmp_path / "db", 3)
    content = bytearray((tmp_path / "db" / "data.mdb").read_bytes())
    for page in range(2):  # the flags of the main database
        content[page * 4096 + 92] |= 0x04
    with pytest.raises(DataError, match=r"may have several values a key \(DUPSORT\)"):
        open_database(damaged(tmp_path / "copy", content))


# what a damaged byte of both meta pages, of the root or of its first node makes LMDB believe
UNCHECKED = {
    "depth 0": [(94, b"\0\0")],
    "another page size in the later transaction": [(4096 + 40, b"\0\0\1\0")],
    "equal transactions": [(144, bytes(8)), (128, (1 << 60).to_bytes(8, "little"))],
    "a root behind the end": [(128, (1 << 63).to_bytes(8, "little"))],
}


@pytest.mark.parametrize("case", UNCHECKED)
def test_a_damaged_meta_page_is_no_way_around_the_checks(case, tmp_path):
    make(tmp_path / "db", 3)
    content = bytearray((tmp_path / "db" / "data.mdb").read_bytes())
    for place, value in UNCHECKED[case]:
        for start in (0, 4096) if place < 4096 else (0,):
            content[start + place : start + place + len(value)] = value
    content[2 * 4096 :] = b"\xff" * len(content[2 * 4096 :])  # so that nothing is read in peace
    with pytest.raises(DataError, match=r"is damaged(: .* pages of| at page)|cannot be read as"):
        keys(open_database(damaged(tmp_path / "copy", content)), 3)


@pytest.mark.parametrize("flags", [0x04, 0x06])
def test_a_node_that_claims_to_be_a_page_of_values_is_damage(flags, tmp_path):
    make(tmp_path / "db", 3)
    content = bytearray((tmp_path / "db" / "data.mdb").read_bytes())
    root = int.from_bytes(content[4096 + 128 :][:8], "little")
    node = 4096 * root + int.from_bytes(content[4096 * root + 16 :][:2], "little")
    content[node + 4] = flags
    with pytest.raises(DataError, match=f"is damaged at page {root}"):
        open_database(damaged(tmp_path / "copy", content))


def test_a_database_that_is_written_to_while_it_is_read(tmp_path):
    path = Path(make(tmp_path / "db", 500)) / "data.mdb"
    content = path.read_bytes()
    source = open_database(str(tmp_path / "db"))
    source.take(3)
    path.touch()
    assert len(source.take(3)) == 3
    path.write_bytes(Path(make(tmp_path / "other", 20), "data.mdb").read_bytes())
    for use in (
        lambda: source.take(3),
        lambda: source.seek(5),
        lambda: source.seek(5, b"00000005"),
    ):
        with pytest.raises(DataError, match="was written to while it was read; write another file"):
            use()
    path.write_bytes(content)
    assert len(source.take(3)) == 3
    path.rename(tmp_path / "old")
    path.write_bytes(b"")
    assert len(source.take(3)) == 3
    source.close()


def test_a_database_that_is_removed_while_it_is_read(tmp_path):
    source = open_database(make(tmp_path / "db", 1000, 3000))
    source.take(10)
    shutil.rmtree(tmp_path / "db")
    source.skip(10)  # from now on each `take` asks the system to read ahead
    assert [bytes(key) for key, _ in source.take(2)] == [b"00000020", b"00000021"]
    source.seek(5, b"00000005")
    assert keys(source, 1) == [b"00000005"]
    assert source.extent() == '1,000 records, from "00000000" to "00000999"'
    source.close()


def test_a_database_is_read_ahead_wherever_the_process_changes_to(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args[2]))
    make(tmp_path / "db", 20)
    monkeypatch.chdir(tmp_path)
    source = open_database("db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    source.take(3)
    assert asked == [READ_AHEAD]
    source.close()


def test_a_file_system_that_refuses_to_read_ahead_costs_no_descriptors(tmp_path, monkeypatch):
    opened, closed, close = [], [], os.close

    def refuse(descriptor, *_):
        opened.append(descriptor)
        raise OSError(errno.EINVAL, "no advice")

    def close_one(descriptor):
        closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(os, "close", close_one)
    source = open_database(make(tmp_path / "db", 20))
    source.take(3)
    assert opened
    assert set(opened) <= set(closed)
    source.close()


def test_an_lmdb_whose_path_is_not_utf_8(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    source = open_database(make(folder, 2))
    assert keys(source, 2) == [b"00000000", b"00000001"]
    source.close()


def test_missing_and_foreign_paths(tmp_path):
    with pytest.raises(
        DataError, match=r'source "nowhere_lmdb" does not exist \(the working directory is /'
    ):
        open_database("nowhere_lmdb")
    with pytest.raises(DataError, match=r"neither data.mdb \(LMDB\) nor CURRENT \(LevelDB\)"):
        open_database(str(tmp_path))
    (tmp_path / "train_lmdb").touch()
    with pytest.raises(DataError, match='train_lmbd" does not exist, did you mean "train_lmdb"'):
        open_database(f"{tmp_path}/train_lmbd")
    with pytest.raises(DataError, match="no source is given"):
        open_database("")


def test_database_without_records(tmp_path):
    with pytest.raises(DataError, match="is an LMDB without records"):
        open_database(make(tmp_path / "db", 0))


def test_writer_leaves_nothing_when_the_block_raises(tmp_path):
    def stop_in_the_middle():
        with write_database(str(tmp_path / "db")) as writer:
            writer.put("a", b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stop_in_the_middle()
    assert os.listdir(tmp_path) == []


def test_writer_refuses_what_exists(tmp_path):
    make(tmp_path / "db", 1)
    with pytest.raises(DataError, match="exists already"):
        make(tmp_path / "db", 1)


def test_writer_refuses_what_another_process_made_meanwhile(tmp_path):
    def write():
        with write_database(str(tmp_path / "db")) as writer:
            writer.put("a", b"x")
            shutil.copytree(GOLDEN / "raw_lmdb", tmp_path / "db")

    with pytest.raises(DataError, match="exists already"):
        write()
    assert os.listdir(tmp_path) == ["db"]


def test_writer_removes_what_a_killed_run_has_left(tmp_path):
    for name in (".db.0123456789abcdef.tmp", ".db.1.0123abcd.tmp", ".db2.0123456789abcdef.tmp"):
        shutil.copytree(GOLDEN / "raw_lmdb", tmp_path / name)
    with temporary(str(tmp_path / "db"), is_folder=True) as alive:
        make(tmp_path / "db", 1)
        left = sorted(os.listdir(tmp_path))
    assert left == sorted([os.path.basename(alive), ".db2.0123456789abcdef.tmp", "db"])


def test_writer_names_an_impossible_key(tmp_path):
    with (
        pytest.raises(DataError, match="cannot be written"),
        write_database(str(tmp_path / "db")) as writer,
    ):
        writer.put("k" * 600, b"x")
    assert os.listdir(tmp_path) == []


def test_another_process_reads_at_the_same_time(tmp_path):
    path = make(tmp_path / "db", 4)
    source = open_database(path)
    program = (
        f"from caffepy.data.sources import open_database; assert len(open_database({path!r})) == 4"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
    assert len(source) == 4


class Broken:
    """A cursor of a database whose pages are damaged where only LMDB looks."""

    def __init__(self, cursor):
        self.cursor = cursor

    def __getattr__(self, name):
        if name in ("set_key", "item"):
            raise lmdb.CorruptedError("Located page was wrong type")
        return getattr(self.cursor, name)


@pytest.mark.parametrize(
    "use",
    [
        lambda s: s.take(5),
        lambda s: s.peek(),
        lambda s: position(s),
        lambda s: s.seek(2, b"00000002_im2.jpg"),
    ],
)
def test_damage_that_lmdb_finds(use, tmp_path):
    source = open_database(str(GOLDEN / "raw_lmdb"))
    source._cursor = Broken(source._cursor)
    with pytest.raises(
        DataError, match=r"raw_lmdb is damaged (near|before) record \d: Located page"
    ):
        use(source)
    source.close()


@pytest.mark.parametrize("claimed", [0, 11, 5000, 1 << 63, (1 << 64) - 1])
def test_a_wrong_number_of_records_is_damage(claimed, tmp_path):
    path = Path(make(tmp_path / "db", 10)) / "data.mdb"
    content = bytearray(path.read_bytes())
    for page in range(2):  # the entries of the main database stand before its root
        content[page * 4096 + 120 : page * 4096 + 128] = claimed.to_bytes(8, "little")
    path.write_bytes(content)
    source = open_database(str(tmp_path / "db"))
    assert keys(source, 12)[10:] == [b"00000000", b"00000001"]
    with pytest.raises(DataError, match=r"is damaged: it (claims|has fewer records than)"):
        source.seek(claimed - 1 if claimed < 1 << 60 else 3)
    source.close()


def test_kernels_look_through_records_where_there_are_others_or_there_were_many(monkeypatch):
    assert databases._loops(0) is datum_kernels
    monkeypatch.setattr(databases, "_records", 0)
    monkeypatch.delitem(sys.modules, "caffepy.ops.cpu")
    assert databases._loops(databases.MANY - 1) is datum_fields
    assert databases._loops(0) is datum_fields
    assert databases._loops(1) is datum_kernels


def test_a_file_that_may_not_be_read_is_told_in_plain_words(tmp_path, monkeypatch):
    path = make(tmp_path / "db", 1)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", f"{path}/data.mdb")

    monkeypatch.setattr("caffepy.data.sources.lmdb.Pages", refuse)
    with pytest.raises(DataError, match=r"/db cannot be read as an LMDB: permission denied$"):
        open_database(path)
