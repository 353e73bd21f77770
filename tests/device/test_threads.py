import os
import threading
import time
import weakref

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from caffepy.device import control_groups, threads


@pytest.fixture
def four_threads():
    before = threads.num_threads()
    threads.set_num_threads(4)
    yield
    threads.set_num_threads(before)


@pytest.mark.parametrize(
    ("n", "grain"), [(0, 1), (1, 1), (3, 1), (4, 1), (1000, 7), (10, 100), (16, 4)]
)
def test_pieces_make_up_the_range(four_threads, n, grain):
    seen = []
    threads.parallel(lambda lo, hi: seen.append((lo, hi)), n, grain)
    assert sorted(i for lo, hi in seen for i in range(lo, hi)) == list(range(n))
    assert len(seen) <= max(1, min(4, n // grain))
    assert all(hi - lo >= min(grain, n) for lo, hi in seen)


def test_there_are_so_many_pieces_at_most(four_threads):
    seen = []
    threads.parallel(lambda lo, hi: seen.append((lo, hi)), 10, most=3)
    assert sorted(seen) == [(0, 3), (3, 6), (6, 10)]


def test_works_on_several_threads(four_threads):
    meeting, met = threading.Barrier(4, timeout=60), set()

    def meet(lo, hi):
        meeting.wait()
        met.add(threading.get_ident())

    threads.parallel(meet, 4)
    assert len(met) == 4


def test_the_first_exception_reaches_the_caller(four_threads):
    def fail(lo, hi):
        if lo > 0:
            time.sleep(0.03 * (4 - lo))  # the last piece fails first
            raise ValueError(f"piece {lo}")

    with pytest.raises(ValueError, match="piece 1"):
        threads.parallel(fail, 4)
    seen = []
    threads.parallel(lambda lo, hi: seen.append(lo), 4)
    assert len(seen) == 4


def test_what_a_call_holds_is_freed_after_it(four_threads):
    array = np.ones(10)
    freed = threading.Event()
    weakref.finalize(array, freed.set)

    def work(lo, hi, array=array):
        time.sleep(0.01)  # so that all threads get a piece

    threads.parallel(work, 4)
    del work, array
    assert freed.wait(10)


def test_a_call_inside_a_piece_runs_at_once(four_threads):
    inner = []

    def outer(lo, hi):
        me = threading.get_ident()
        threads.parallel(lambda a, b: inner.append((threading.get_ident() == me, a, b)), 8)

    threads.parallel(outer, 4)
    assert inner == [(True, 0, 8)] * 4


def test_several_callers_share_the_pool(four_threads):
    sums = np.zeros((6, 64))

    def caller(i):
        def add(lo, hi):
            sums[i, lo:hi] += 1

        for _ in range(200):
            threads.parallel(add, 64)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(6)]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert (sums == 200).all()


@pytest.mark.parametrize(("value", "want"), [("3", 3), ("", None), ("0", None), ("many", None)])
def test_the_environment_sets_the_number(monkeypatch, value, want):
    monkeypatch.setenv("CAFFEPY_NUM_THREADS", value)
    assert threads._available() == (want or threads.cores())


@pytest.mark.parametrize(
    ("of_process", "files", "want"),
    {
        "none": ("", {}, 64),
        "version 2": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        "version 2 without a limit": ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        "part of a core": ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        "two and a half": ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        "a group above": ("0::/a/b\n", {"a/b/cpu.max": "max 9", "a/cpu.max": "4000 1000"}, 4),
        "a path outside": ("0::/docker/x\n", {"cpu.max": "3000 1000"}, 3),
        "version 1": (
            "5:memory:/m\n4:cpu,cpuacct:/d\n0::/\n",
            {
                "cpu,cpuacct/d/cpu.cfs_quota_us": "700000\n",
                "cpu,cpuacct/d/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            7,
        ),
        "above the machine": ("0::/\n", {"cpu.max": "9900000 100000\n"}, 64),
    }.values(),
)
def test_a_containers_limit_counts(monkeypatch, tmp_path, of_process, files, want):
    groups = tmp_path / "groups"
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    if of_process:
        (tmp_path / "process").write_text(of_process)
    monkeypatch.setattr(control_groups, "PROCESS_GROUPS", tmp_path / "process")
    monkeypatch.setattr(control_groups, "GROUPS", groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert threads.cores() == want


def blas_threads():
    """Of the library that numpy uses; others (OpenCV's) may have been loaded since."""
    return [
        i["num_threads"]
        for i in threadpool_info()
        if i["user_api"] == "blas" and "numpy" in i["filepath"]
    ]


def test_blas_scope_nests_and_restores():
    before = blas_threads()
    with threads.blas_scope():
        with threads.blas_scope():
            assert set(blas_threads()) <= {1}
        assert set(blas_threads()) <= {1}
    assert blas_threads() == before


def test_a_share_of_the_threads(four_threads):
    seen = []
    for part, expected in ((0, 2), (1, 1), (2, 1)):
        with threads.share(part, 3):
            seen.clear()
            threads.parallel(lambda lo, hi: seen.append((lo, hi)), 100)
            assert len(seen) == expected
    threads.parallel(lambda lo, hi: seen.append((lo, hi)), 100)
    assert len(seen) == 5
