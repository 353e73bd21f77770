import numpy as np
import pytest

from caffepy.blob import Array, Blob, HostView, Memory, SyncedMemory, behind, on_host, shape_string
from caffepy.errors import ConfigError


class FakeGpu:
    """A store whose device arrays are numpy's too, and which counts copies."""

    def __init__(self) -> None:
        self.copies: list[str] = []

    def zeros(self, count: int, dtype: np.dtype) -> Array:
        return np.zeros(count, dtype)

    def upload(self, host: Array, array: Array) -> None:
        self.copies.append("up")
        array[...] = host

    def download(self, array: Array, host: Array) -> None:
        self.copies.append("down")
        host[...] = array


def test_memory_is_allocated_and_zeroed_on_first_touch() -> None:
    memory = Memory(np.float32)
    memory.reserve(5)
    assert not memory.touched
    assert memory.array.tolist() == [0] * 5
    assert memory.touched


def test_shrinking_keeps_the_memory_and_growing_renews_it() -> None:
    blob = Blob((2, 3))
    blob.data[...] = 7
    place = blob.data.ctypes.data
    blob.reshape((3,))
    assert blob.data.tolist() == [7] * 3
    assert blob.data.ctypes.data == place
    blob.reshape((2, 3))
    assert blob.data.ctypes.data == place
    blob.reshape((2, 4))
    assert not blob.data.any()


def test_sharing_follows_the_others_memory() -> None:
    a, b = Blob((2, 3)), Blob((3, 2))
    b.share_data(a)
    a.data[0, 1] = 5
    assert b.data[0, 1] == 5
    a.data_memory.bind(np.arange(6, dtype=np.float32))
    assert b.data.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert not np.shares_memory(a.diff, b.diff)


def test_limits() -> None:
    with pytest.raises(ConfigError, match="at most 32 axes"):
        Blob((1,) * 33)
    with pytest.raises(ConfigError, match=r"65536 65536 \(4294967296\)"):
        Blob((65536, 65536))
    with pytest.raises(ConfigError, match="not possible"):
        Blob((2, -1))
    with pytest.raises(ConfigError, match=r"axis 2 is out of range for a blob with 2 axes \(2 3 \(6\)\)"):
        Blob((2, 3)).axis(2)


def test_shape_string_is_caffes() -> None:
    assert shape_string((64, 3, 7, 7)) == "64 3 7 7 (9408)"
    assert shape_string(()) == "(1)"


def test_a_gpus_blob_copies_only_when_the_other_side_was_asked_for() -> None:
    gpu = FakeGpu()
    blob = Blob((2, 2), store=gpu)
    blob.host_data[...] = 3  # nothing on the device yet
    assert gpu.copies == []
    assert blob.data.tolist() == [[3, 3], [3, 3]]
    assert gpu.copies == ["up"]
    blob.data[...] = 4
    assert blob.host_data.tolist() == [[4, 4], [4, 4]]
    assert blob.host_data[0, 0] == 4
    assert gpu.copies == ["up", "down"]
    assert blob.data[0, 0] == 4
    assert gpu.copies == ["up", "down", "up"]


def test_binding_a_gpus_memory_forgets_the_host() -> None:
    memory = SyncedMemory(np.float32, FakeGpu())
    memory.reserve(2)
    memory.host[...] = 1
    assert memory.touched
    memory.bind(np.full(2, 9, np.float32))
    assert memory.host.tolist() == [9, 9]


def test_a_layer_on_the_host_sees_host_arrays() -> None:
    gpu = FakeGpu()
    a, b = Blob((2, 3), store=gpu), Blob((6,), store=gpu)
    va, vb = on_host([a, b])
    assert isinstance(va, HostView)
    va.data[...] = 2
    va.diff[...] = 1
    assert a.data.sum() == 12
    assert a.diff.sum() == 6
    vb.share_data(va)
    assert b.data.tolist() == [2] * 6
    va.reshape((1,))
    assert a.shape == va.shape == (1,)
    assert behind(va) is a
    assert behind(b) is b
