"""HDF5Output: the file it leaves."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from caffepy.cli import main
from caffepy.core.errors import CaffeError, ConfigError, DataError
from caffepy.data.sources.hdf5 import append_rows, new_file
from tests.nets import library

from .harness import Single, random

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}


def output(path, data, label, dtype=np.float32):
    text = f'type: "HDF5Output" hdf5_output_param {{ file_name: "{path}" }}'
    return Single(text, data, label, tops=0, dtype=dtype)


def contents(path):
    with h5py.File(path) as file:
        return {name: item[()] for name, item in file.items()}


def test_the_file_is_there_and_empty_from_the_start(tmp_path):
    path = tmp_path / "out.h5"
    path.write_text("what was there goes")
    output(path, random(2, 3), random(2))
    assert contents(path) == {}


LOOKS = {
    "check": ["check", "--model"],
    "check --gpu": ["check", "--gpu", "--model"],
    "summarize": ["summarize"],
    "draw": ["draw", "--shapes", "net.svg"],
    "time": ["time", "--iterations", "1", "--model"],
}


@pytest.mark.parametrize("command", LOOKS)
def test_a_net_that_is_looked_at_leaves_the_file_alone(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = 'hdf5_output_param { file_name: "thesis.txt" }'
    layer = library.layer("HDF5Output", "o", "x y", output, top="")
    Path("net.prototxt").write_text(library.dummies(x=(2, 3), y=(2,)) + layer)
    Path("thesis.txt").write_text("my thesis")
    words = LOOKS[command]
    at = 1 if command == "draw" else len(words)
    assert main.run([*words[:at], "net.prototxt", *words[at:]]) == 0
    assert Path("thesis.txt").read_text() == "my thesis"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_forward_gives_the_file_of_caffe(dtype, tmp_path):
    path = tmp_path / "out.h5"
    data, label = random(4, 3, 2).astype(dtype), random(4).astype(dtype)
    output(path, data, label, dtype).forward()
    found = contents(path)
    assert list(found) == ["data", "label"]
    assert all(array.dtype == dtype for array in found.values())
    np.testing.assert_array_equal(found["data"], data[..., None])
    np.testing.assert_array_equal(found["label"], label[:, None, None, None])


def test_later_forwards_append(tmp_path):
    path = tmp_path / "out.h5"
    single = output(path, random(2, 3, 4, 5), random(2))
    batches = [[random(n, 3, 4, 5, seed=n), random(n, seed=n)] for n in (2, 2, 1, 3)]
    for batch in batches:
        for blob, array in zip(single.bottom, batch, strict=True):
            blob.reshape(array.shape)
            blob.data[...] = array
        single.layer.reshape(single.bottom, single.top)
        single.layer.forward(single.bottom, single.top)
    found = contents(path)
    for name, arrays in zip(("data", "label"), zip(*batches, strict=True), strict=True):
        np.testing.assert_array_equal(
            found[name].squeeze(), np.concatenate(arrays).astype(np.float32)
        )


def test_backward_leaves_the_bottoms_alone(tmp_path):
    single = output(tmp_path / "out.h5", random(2, 3), random(2))
    single.bottom[0].diff.fill(7)
    single.layer.backward(single.top, [True, False], single.bottom)
    assert (single.bottom[0].diff == 7).all()


def test_rows_of_another_shape(tmp_path):
    path = tmp_path / "out.h5"
    single = output(path, random(2, 3), random(2))
    single.forward()
    single.bottom[0].reshape((2, 4))
    with pytest.raises(
        DataError,
        match=r"out.h5: rows of /data have shape 3 1 1 \(3\), those to be added 4 1 1 \(4\)",
    ):
        single.layer.forward(single.bottom, single.top)


REFUSED = {
    "no name": ("", (2, 3), ConfigError, "hdf5_output_param needs a file_name"),
    "no folder": (
        "{}/nowhere/out.h5",
        (2, 3),
        DataError,
        "nowhere/out.h5 cannot be written: no such file or directory$",
    ),
    "a device": ("/dev/null", (2, 3), DataError, "/dev/null cannot be written: it is a pipe or a"),
    "NUL": ("a\\000b", (2, 3), DataError, "cannot be written: no path holds a NUL"),
    "row counts": ("{}/out.h5", (3, 3), ConfigError, "same number of rows, not 3 and 2"),
    "axes": ("{}/out.h5", (2, 1, 1, 1, 1), ConfigError, "a blob of at most 4 axes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    path, shape, error, message = REFUSED[case]
    with pytest.raises(CaffeError, match=message) as caught:
        output(path.format(tmp_path), random(*shape), random(2))
    assert isinstance(caught.value, error)


def test_no_rows_and_large_rows(tmp_path):
    path = tmp_path / "out.h5"
    new_file(str(path))
    append_rows(str(path), {"none": np.zeros((0, 3)), "wide": random(1, 200_000)})
    append_rows(str(path), {"none": random(2, 3), "wide": random(2, 200_000)})
    assert {name: array.shape for name, array in contents(path).items()} == {
        "none": (2, 3),
        "wide": (3, 200_000),
    }


def test_a_full_disk_is_an_error_and_leaves_the_rows_before(tmp_path):
    path = str(tmp_path / "out.h5")
    program = """
import resource, signal, sys
import numpy as np
from caffepy.data.sources.hdf5 import append_rows, new_file
from caffepy.core.errors import DataError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
new_file(sys.argv[1])
try:
    for i in range(100):
        append_rows(sys.argv[1], {"data": np.full((1000, 100), i, np.float32)})
except DataError as error:
    print(i, error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program, path],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    written, message = run.stdout.split(" ", 1)
    assert message == f"{path} cannot be written: file too large\n"
    (rows,) = contents(path).values()
    assert len(rows) == 1000 * int(written) > 0
    np.testing.assert_array_equal(rows[:, 0], np.repeat(np.arange(int(written)), 1000))
