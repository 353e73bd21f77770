import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.device.blob import (
    Array,
    Blob,
    HostView,
    Layout,
    Memory,
    SyncedMemory,
    behind,
    from_bfloat16,
    on_host,
    shape_string,
    to_bfloat16,
)
from caffepy.device.device import Device


class FakeGpu(Device):
    """A GPU whose device arrays are numpy's too, and which counts copies."""

    is_cuda = True

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

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
    with pytest.raises(
        ConfigError, match=r"axis 2 is out of range for a blob with 2 axes \(2 3 \(6\)\)"
    ):
        Blob((2, 3)).axis(2)


def test_shape_string_is_caffes() -> None:
    assert shape_string((64, 3, 7, 7)) == "64 3 7 7 (9408)"
    assert shape_string(()) == "(1)"


def test_a_gpus_blob_copies_only_when_the_other_side_was_asked_for() -> None:
    gpu = FakeGpu()
    blob = Blob((2, 2), device=gpu)
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
    memory.host_of((2,))[...] = 1
    assert memory.touched
    memory.bind(np.full(2, 9, np.float32))
    assert memory.host_of((2,)).tolist() == [9, 9]


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4), (2, 3), (2, 1, 1, 1), ()])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_format_changes_what_the_device_has_and_nothing_the_host_sees(
    dtype, shape, channels_last
) -> None:
    gpu = FakeGpu()
    blob = Blob(shape, device=gpu)
    blob.set_layout(Layout(np.dtype(dtype), channels_last))
    values = np.arange(blob.count, dtype=np.float32).reshape(
        shape
    )  # small whole numbers are exact in every type
    blob.host_data[...] = values
    assert blob.data.shape == shape
    assert blob.data.dtype == dtype
    if channels_last and len(shape) > 2:
        assert blob.data.strides[1] == blob.data.itemsize
    as_numbers = from_bfloat16(blob.data) if dtype == "uint16" else blob.data
    assert np.array_equal(as_numbers, values)
    blob.diff[...] = blob.data
    assert np.array_equal(blob.host_diff, values)
    assert blob.host_diff.dtype == np.float32


def test_what_the_host_writes_after_a_new_shape_lies_in_that_shape() -> None:
    blob = Blob((1, 3, 4, 4), device=FakeGpu())
    blob.set_layout(Layout(np.dtype(np.float32), True))
    assert not blob.host_data.any()
    for shape in ((1, 3, 2, 2), (1, 3, 4, 4)):
        blob.reshape(shape)
        values = np.arange(blob.count, dtype=np.float32).reshape(shape)
        blob.host_data[...] = values
        if shape == (1, 3, 2, 2):
            assert np.array_equal(blob.data, values)
            assert np.array_equal(blob.host_data, values)
    assert np.array_equal(blob.data, values)


def test_another_format_is_for_one_blob_alone() -> None:
    a, b = (Blob((2, 3, 4, 4), device=FakeGpu()) for _ in range(2))
    b.share_data(a)
    a.set_layout(Layout(np.dtype(np.float16), True))
    b.set_layout(Layout(np.dtype(np.float32), True))
    assert (a.data.dtype, b.data.dtype) == (np.float16, np.float32)
    assert a.data_memory is not b.data_memory
    memory = a.data_memory
    a.set_layout(a.layout)
    assert a.data_memory is memory


def test_bfloat16_rounds_to_the_nearest_and_to_even() -> None:
    values = np.array(
        [1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.1, 3.4e38, np.inf, -np.inf, np.nan],
        "f4",
    )
    expected = [1, 1, 1 + 2**-6, 1 + 2**-7, -3.09375, np.inf, np.inf, -np.inf, np.nan]
    np.testing.assert_array_equal(from_bfloat16(to_bfloat16(values)), np.array(expected, "f4"))


def test_a_gpu_knows_which_memories_are_newer_on_the_host_and_when_arrays_moved() -> None:
    gpu = FakeGpu()
    blob = Blob((2,), device=gpu)
    array, epoch = blob.data, gpu.allocation_version
    blob.host_data[...] = 5
    assert gpu.dirty == {blob.data_memory}
    for memory in list(gpu.dirty):
        memory.flush()
    assert not gpu.dirty
    assert array.tolist() == [5, 5]
    assert gpu.allocation_version == epoch
    blob.reshape((3,))
    assert blob.data.tolist() == [0, 0, 0]
    assert gpu.allocation_version > epoch


def test_a_layer_on_the_host_sees_host_arrays() -> None:
    gpu = FakeGpu()
    a, b = Blob((2, 3), device=gpu), Blob((6,), device=gpu)
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
