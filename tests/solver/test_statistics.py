"""Running statistics of BatchNorm belong to the weights: a failed iteration leaves them alone."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import DataError
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.blob import Array
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.binary import blob_to_array, read_net
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Action, Solver, sidecar
from tests.nets import library
from tests.parallel.cases import net
from tests.solver.cases import AskAt, solver_of

WRONG, BATCH = 61, 4

NET = library.linear_classifier(
    library.records("db", 4, "transform_param { scale: 0.01 }")
    + library.layer("BatchNorm", "bn", "data", top="normal"),
    5,
    "normal",
)


def saved(folder: Path, device: Device, size: int, **how: bool) -> dict[str, list[Array]]:
    """The blobs in the last snapshot of a run on records of which one has a wrong label."""
    settings = (
        'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 random_seed: 3 snapshot: 1000 '
        f'max_iter: {60 // BATCH // size} iter_size: {size} snapshot_prefix: "{folder}/s" '
    )
    text = NET.replace('"db"', f'"{folder}/db"')
    param = text_format.Parse(f"{settings} net_param {{ {text} }}", SolverParameter())
    param.max_iter += 40 * how.pop("wrong")
    solver = Solver(param, device=device, precision="fp32")
    for name, value in how.items():
        setattr(solver, name, value)
    if param.max_iter > 40:
        with pytest.raises(DataError, match="label"):
            solver.solve()
    else:
        solver.solve()
    path = f"{folder}/s_iter_{solver.iter}.caffemodel"
    solver.close()
    return {
        layer.name: [blob_to_array(blob) for blob in layer.blobs]
        for layer in read_net(path).layer
        if layer.blobs
    }


def compare(tmp_path: Path, device: type[Device], size: int, **how: bool) -> None:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (200, 3, 5, 5), np.uint8)
    with write_database(str(tmp_path / "db")) as writer:
        for i, image in enumerate(images):
            writer.put(f"{i:08d}", array_to_datum(image, 70 if i == WRONG else i % 5))
    failed = saved(tmp_path, device(), size, wrong=True, **how)
    ended = saved(tmp_path, device(), size, wrong=False, **how)
    assert failed.keys() == ended.keys() == {"bn", "ip"}
    for name, blobs in ended.items():
        for own, other in zip(failed[name], blobs, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3])
def test_on_the_cpu(size: int, tmp_path: Path) -> None:
    compare(tmp_path, Device, size)


def test_an_iteration_that_a_callback_ends_adds_nothing(tmp_path: Path) -> None:
    class Failing:
        def on_start(self) -> None:
            pass

        def on_gradients_ready(self) -> None:
            raise ValueError("mine")

    with write_database(str(tmp_path / "db")) as writer:
        for i in range(8):
            writer.put(f"{i:08d}", array_to_datum(np.full((3, 5, 5), 30 * i, np.uint8), i % 5))
    text = NET.replace('"db"', f'"{tmp_path}/db"')
    settings = f'base_lr: 0.1 lr_policy: "fixed" net_param {{ {text} }}'
    with closing(Solver(text_format.Parse(settings, SolverParameter()))) as solver:
        solver.step(2)
        (bn,) = (layer for layer in solver.net.layers if layer.type == "BatchNorm")
        before = [blob.host_data.copy() for blob in bn.blobs]
        solver.add_callback(Failing())
        with pytest.raises(ValueError, match="mine"):
            solver.step(1)
        for blob, values in zip(bn.blobs, before, strict=True):
            np.testing.assert_array_equal(blob.host_data, values)


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_in_the_last_test_saves_what_was_trained(size: int, tmp_path: Path) -> None:
    """Not the statistics, nor the random numbers, of the pass that shows the last loss."""
    text = net(3, library.small_convolution(library.digits("BATCH", 7))).replace(
        'layer { name: "pool"',
        library.layer("BatchNorm", "bn", "conv", top="conv")
        + library.in_place("Dropout", "drop", "conv")
        + 'layer { name: "pool"',
    )
    settings = "base_lr: 0.01 max_iter: 4 display: 2 test_iter: 4 test_interval: 4 "
    contents = []
    for name in "whole", "stopped":
        (tmp_path / name).mkdir()
        more = f'test_initialization: false snapshot_prefix: "{tmp_path / name}/s" '
        root = solver_of(f"{settings} {more} snapshot_after_train: false ", text)
        devices = [root.device, *(Device(seed=rank) for rank in range(1, size))]
        with p2p_manager(root, devices, SyncOptions("flat")):
            if name == "whole":
                root.step(4)
                root.snapshot()
            else:
                root.action = AskAt(6, Action.STOP | Action.SNAPSHOT)  # 4 iterations, 2 batches
                root.solve()
                assert root.stopped
        root.close()
        content = sidecar.read(str(tmp_path / name / "s_iter_4.caffepystate"))
        assert content
        contents.append({key: content.get(key) for key in ("positions", "statistics", "model")})
        contents[-1]["positions"].pop("test_nets")
    np.testing.assert_equal(*contents)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("size", [1, 3])
def test_on_a_gpu(size: int, capture: bool, tmp_path: Path) -> None:
    compare(tmp_path, CudaDevice, size, capture=capture)
