"""Batch k of a shared data layer goes to rank k mod n, in train and test nets, whatever the layer."""

from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import cv2
import h5py
import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.collectives.topology import all_joined
from caffepy.core.errors import ConfigError
from caffepy.data.reader import Reader, deal_of
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.blob import Array
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.parallel.manager import P2PManager, p2p_manager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.caffe_pb2 import (
    AnnotatedDatum,
    Annotation,
    AnnotationGroup,
    Datum,
    NormalizedBBox,
    SolverParameter,
)
from caffepy.solver import Solver
from tests.nets import library
from tests.parallel.faulty import this_rank
from tests.solver.cases import SETTINGS

RECORDS, BATCH = 20, 2

LAYERS = {
    "Data": 'data_param { source: "db" batch_size: 2 backend: LMDB prefetch: 3 } '
    "transform_param { crop_size: 4 mirror: true mean_value: 7 scale: 0.5 }",
    "HDF5Data": 'hdf5_data_param { source: "h5.txt" batch_size: 2 shuffle: true }',
    "ImageData": 'image_data_param { source: "images.txt" batch_size: 2 shuffle: true } '
    "transform_param { mirror: true }",
    "WindowData": 'window_data_param { source: "windows.txt" batch_size: 2 fg_fraction: 0.5 } '
    "transform_param { crop_size: 4 mirror: true }",
    "AnnotatedData": 'data_param { source: "boxes" batch_size: 2 backend: LMDB prefetch: 3 } '
    "transform_param { mirror: true mean_value: 7 expand_param { max_expand_ratio: 2 prob: 0.5 } "
    "resize_param { height: 4 width: 5 interp_mode: LINEAR interp_mode: AREA } } "
    "annotated_data_param { batch_sampler { max_sample: 1 sampler { min_scale: 0.3 } } }",
    "ImageSegData": 'image_data_param { source: "pairs.txt" batch_size: 2 shuffle: true '
    "label_type: PIXEL } transform_param { mirror: true crop_size: 5 scale_factors: 1 "
    "scale_factors: 0.5 mean_value: 7 }",
    "DenseImageData": 'dense_image_data_param { source: "pairs.txt" batch_size: 2 mirror: true '
    "crop_height: 3 crop_width: 4 shuffle: true }",
    "ImageLabelmapData": 'image_data_param { source: "pairs.txt" batch_size: 2 shuffle: true } '
    "transform_param { mirror: true crop_size: 5 }",
    "MemoryData": "memory_data_param { batch_size: 2 channels: 3 height: 6 width: 6 }",
    "DummyData": "dummy_data_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } shape { dim: 2 } "
    'data_filler { type: "gaussian" } data_filler { type: "uniform" } }',
    "Python": 'python_param { module: "counting" layer: "Counting" share_in_parallel: true }',
}
TESTED = 5
"""Batches of a test."""
IMAGES = ("AnnotatedData", "DenseImageData", "ImageLabelmapData", "ImageSegData")
"""Their labels are boxes or images."""
ONCE = ("Data", "HDF5Data", "ImageData", "MemoryData", "Python")  # their labels tell the records

MODULE = """
    class Counting:
        def setup(self, bottom, top):
            self.at = 0
        def reshape(self, bottom, top):
            top[0].reshape(2, 3, 6, 6)
            top[1].reshape(2)
        def forward(self, bottom, top):
            top[1].data[...] = self.at % 20, (self.at + 1) % 20
            top[0].data[...] = self.at
            self.at += 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty records of each kind; the label tells which it is."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (RECORDS, 3, 6, 6), np.uint8)
    np.save("images.npy", images)
    with write_database("db") as writer:
        for i, image in enumerate(images):
            writer.put(f"{i:08d}", array_to_datum(image, i))
    with h5py.File("rows.h5", "w") as file:
        file["data"], file["label"] = images.astype(np.float32), np.arange(RECORDS)
    Path("h5.txt").write_text("rows.h5\n")
    for i, image in enumerate(images):
        cv2.imwrite(f"{i}.png", image.transpose(1, 2, 0))
    Path("images.txt").write_text("".join(f"{i}.png {i}\n" for i in range(RECORDS)))
    Path("pairs.txt").write_text("".join(f"{i}.png {19 - i}.png\n" for i in range(RECORDS)))
    box = Annotation(bbox=NormalizedBBox(xmin=0.25, ymin=0.25, xmax=0.75, ymax=0.75))
    with write_database("boxes") as writer:
        for i in range(RECORDS):
            datum = Datum(data=Path(f"{i}.png").read_bytes(), encoded=True)
            groups = [AnnotationGroup(group_label=i, annotation=[box] * (1 + i % 3))]
            record = AnnotatedDatum(datum=datum, type=AnnotatedDatum.BBOX, annotation_group=groups)
            writer.put(f"{i:08d}", record.SerializeToString())
    block = "# {i}\n{i}.png\n3\n6\n6\n2\n{label} 0.9 0 0 4 4\n0 0.1 1 1 5 5\n"
    Path("windows.txt").write_text("".join(block.format(i=i, label=i + 1) for i in range(RECORDS)))
    Path("counting.py").write_text(dedent(MODULE))
    return tmp_path


def root_solver(kind: str, folder: Path, interval: int, more: str) -> Solver:
    text = (
        f'layer {{ name: "in" type: "{kind}" top: "data" top: "label" {LAYERS[kind]} }} {more} '
        'layer { name: "end" type: "Silence" bottom: "data" bottom: "label" }'
    )
    settings = f"{SETTINGS} iter_size: 2 test_iter: {TESTED} test_interval: {interval} net_param {{ {text} }}"
    param = text_format.Parse(settings, SolverParameter())
    solver = Solver(param, device=Device(seed=1), path=str(folder / "solver.prototxt"))
    give_images(solver, kind, folder)
    return solver


def give_images(solver: Solver, kind: str, folder: Path) -> None:
    """Give a MemoryData layer its arrays."""
    if kind == "MemoryData":
        for net in (solver.net, *solver.test_nets):
            images, labels = np.load(folder / "images.npy").astype(np.float32), np.arange(RECORDS)
            net.layers[0].reset(images, labels)  # type: ignore[attr-defined]


Batch = list[Array]


def watch(net: Net) -> list[Batch]:
    """Collect what the data layer of the net gives from now on."""
    batches: list[Batch] = []

    def keep(index: int) -> None:
        if index == 0:
            batches.append([top.host_data.copy() for top in net.nodes[0].tops])

    net.after_forward.append(keep)
    return batches


def batches_of(
    size: int, kind: str, folder: Path, iterations: int, interval: int = 3, more: str = ""
) -> tuple[list[Batch], list[Batch]]:
    """The batches of a run of so many solvers, in their order: those of the train and of the test
    net, each test of which begins with the root.
    """
    root = root_solver(kind, folder, interval, more)
    devices = [root.device, *(Device() for _ in range(size - 1))]
    with P2PManager(root, devices, all_joined(size), SyncOptions("flat")) as manager:
        solvers = [root, *manager.workers]
        seen = [[watch(s.net) for s in solvers], [watch(s.test_nets[0]) for s in solvers]]
        root.step(iterations)
    root.close()
    train, test = ([iter(batches) for batches in per] for per in seen)
    return (
        [next(train[k % size]) for k in range(sum(map(len, seen[0])))],
        [next(test[k % TESTED % size]) for k in range(sum(map(len, seen[1])))],
    )


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("size", [2, 3])
def test_batches_go_round(kind: str, size: int, folder: Path) -> None:
    train, test = batches_of(size, kind, folder, 5)
    alone_train, alone_test = batches_of(1, kind, folder, 5 * size, 3 * size)
    assert len(train) == len(alone_train) == 5 * 2 * size
    assert len(test) == 2 * 5
    for own, other in zip(train + test, alone_train + alone_test, strict=False):
        for a, b in zip(own, other, strict=True):
            np.testing.assert_array_equal(a, b)
    if kind in ONCE:
        epoch = RECORDS // BATCH
        for batches in (train[:epoch], test[:epoch]):
            assert sorted(
                int(label) for _, labels in batches for label in labels.reshape(-1)
            ) == list(range(RECORDS))


@pytest.mark.parametrize("kind", LAYERS)
def test_solvers_get_what_they_are_dealt(kind: str, folder: Path) -> None:
    (alone, _) = batches_of(1, kind, folder, 20)
    root = root_solver(kind, folder, 3, "")
    with P2PManager(root, [root.device, Device()], all_joined(2), SyncOptions("flat")) as manager:
        solvers = [root, *manager.workers]
        for layer in root.net.shared_layers:
            layer.serve([solver.device for solver in solvers], deal_of(1, 2, 4))
        seen = [watch(solver.net) for solver in solvers]
        root.step(5)
    root.close()
    for rank, batches in enumerate(seen, 1):
        assert len(batches) == 10
        for own, expected in zip(batches, alone[rank::4], strict=True):
            for a, b in zip(own, expected, strict=True):
                np.testing.assert_array_equal(a, b)


def test_constants_and_what_is_drawn_once_reach_every_solver(folder: Path) -> None:
    text = """
    name: "in" type: "DummyData" top: "data" top: "label" dummy_data_param { shape { dim: 2 dim: 3 }
      data_filler { type: "constant" value: 5 } data_filler { type: "gaussianstatic" } }
    """
    param = text_format.Parse(f"{SETTINGS} net_param {{ layer {{ {text} }} }}", SolverParameter())
    root = Solver(param, device=Device(seed=1))
    with P2PManager(root, [root.device, Device()], all_joined(2), SyncOptions()) as manager:
        seen = [watch(s.net) for s in (root, *manager.workers)]
        root.step(3)
    for batches in seen:
        for data, drawn in batches:
            np.testing.assert_array_equal(data, np.full((2, 3), 5, np.float32))
            np.testing.assert_array_equal(drawn, batches[0][1])
            assert drawn.any()


@pytest.mark.parametrize("shared", [False, True])
def test_a_data_layer_that_is_not_shared_is_told_of(
    shared: bool, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        own = LAYERS["Python"].replace("share_in_parallel: true ", "")
        monkeypatch.setitem(LAYERS, "Python", own)
    batches_of(1, "Python", folder, 1)
    assert "Each device" not in caplog.text
    train, _ = batches_of(2, "Python", folder, 1)
    labels = [int(labels[0]) for _, labels in train]
    assert labels == ([0, 2, 4, 6] if shared else [0, 0, 2, 2])
    told = [record for record in caplog.records if "Each device" in record.getMessage()]
    assert len(told) == (0 if shared else 2)  # for the train net and the test net


@pytest.mark.parametrize("kind", ["Data", "HDF5Data", "Python"])
def test_a_script_may_run_the_nets_of_the_root_between_steps(kind: str, folder: Path) -> None:
    root = root_solver(kind, folder, 100, "")
    root.param.test_initialization = False
    options = SyncOptions("flat", deadlines={"step": 60.0, "test": 60.0})
    with P2PManager(root, [root.device, Device(), Device()], all_joined(3), options) as manager:
        solvers = [root, *manager.workers]
        seen = [[watch(s.net) for s in solvers], [watch(s.test_nets[0]) for s in solvers]]
        root.net.forward()
        for _ in range(2):
            root.test(0)
            root.step(1)
            for _ in range(2):
                root.test_nets[0].forward()
                root.net.forward()
                root.net.backward()
    root.close()
    train, test = ([[int(b[1].flat[0]) for b in batches] for batches in per] for per in seen)
    if kind == "HDF5Data":  # shuffled
        assert [list(map(len, per)) for per in (train, test)] == [[9, 4, 4], [8, 4, 2]]
        return
    # each step takes two batches a solver, each test five
    own = [[0, 2, 8, 14, 16, 18, 4, 10, 12], [4, 10, 0, 6], [6, 12, 2, 8]]
    assert train == own
    assert test == [[0, 6, 10, 12, 14, 0, 4, 6], [2, 8, 16, 2], [4, 18]]


@pytest.mark.parametrize("net", ["net", "test_net"])
@pytest.mark.parametrize("when", ["start", "gradients_ready", "before_forward", "after_forward"])
def test_a_callback_may_only_run_layers_that_are_not_shared(
    when: str, net: str, folder: Path
) -> None:
    root = root_solver("Data", folder, 100, "")
    ran = root.net if net == "net" else root.test_nets[0]
    first, runs = 0, 0

    def run(_: int = 0) -> None:
        nonlocal runs
        if runs == root.iter:  # once an iteration: a net's callbacks are called by this pass, too
            runs += 1
            ran.forward(first)

    if when.endswith("forward"):
        getattr(root.net, when).append(run)
    else:
        calls = {"on_start": lambda: None, "on_gradients_ready": lambda: None}
        root.add_callback(SimpleNamespace(**{**calls, f"on_{when}": run}))
    options = SyncOptions("flat", deadlines={"step": 60.0})

    def train() -> None:
        nonlocal first
        with P2PManager(root, [root.device, Device()], all_joined(2), options):
            ran.forward()
            first = 1
            root.step(2)
            first = 0
            root.step(1)

    with pytest.raises(
        ConfigError, match=r'"in" \(Data\): .* a callback cannot run it during a step; run the net'
    ):
        train()
    assert runs == root.iter + 1 == 3
    root.close()


@pytest.mark.parametrize("sync", ["tree", "flat"])
@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpus(2))])
def test_what_a_script_writes_reaches_all_solvers(place: str, sync: str) -> None:
    text = library.inputs(x=(4, 3)) + library.dummies("y", 'type: "constant"', y=(4, 2))
    settings = f"{SETTINGS} net_param {{ {library.regression(text)} }}"
    written = np.random.default_rng(0).standard_normal((3, 4, 3)).astype(np.float32)

    def made(device: Device) -> Solver:
        param = text_format.Parse(settings, SolverParameter())
        return Solver(param, device=device, precision="fp32")

    def script(root: Solver) -> Array:
        root.param.base_lr = 0.05
        (weight, _), y = root.net.learnable_params, root.net.blobs["y"]
        for x in written:
            root.net.blobs["x"].host_data[...] = x
            y.host_data[...] += 1
            root.step(1)
            weight.host_data[...] *= 0.5
        root.device.flush()
        return np.array(root.device.on_host(root.params.data))

    alone = script(made(Device(seed=1)))
    on_gpus = place == "gpu"
    devices = [CudaDevice(i) for i in range(2)] if on_gpus else [Device() for _ in range(3)]
    root = made(devices[0])
    deadlines = {"set-up": 300.0, "step": 60.0}
    with p2p_manager(root, devices, SyncOptions(sync, deadlines=deadlines)):
        with pytest.raises(ConfigError, match="apply_update updates one solver"):
            root.apply_update()
        np.testing.assert_allclose(script(root), alone, rtol=1e-5, atol=1e-6)


def test_batches_lie_where_they_are_taken_after_a_restore_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, places = Reader.take, list[tuple[int, int]]()

    def noting(reader: Reader) -> Any:
        batch = take(reader)
        places.append((this_rank(), batch.rank))
        return batch

    monkeypatch.setattr(Reader, "take", noting)
    root = root_solver("Data", folder, 3, "")
    root.param.snapshot_prefix = f"{folder}/s"
    with P2PManager(root, [root.device, Device(), Device()], all_joined(3), SyncOptions("flat")):
        root.step(2)
        root.snapshot()
        root.restore(f"{folder}/s_iter_2.solverstate")
        root.step(2)
    root.close()
    assert len(places) == 4 * 2 * 3 + 2 * 5
    assert all(rank == batch_rank for rank, batch_rank in places)


@pytest.mark.parametrize("kind", [kind for kind in ONCE if kind != "Python"])
@pytest.mark.parametrize("sizes", [(4, 3), (2, 4), (3, 1), (1, 2)])
def test_another_number_of_solvers_goes_on_with_the_batches_that_nobody_had(
    sizes: tuple[int, int], kind: str, folder: Path
) -> None:
    labels: list[float] = []
    state = ""
    for size in sizes:
        root = root_solver(kind, folder, 100, "")
        root.param.snapshot_prefix = f"{folder}/s"
        if state:
            root.restore(state)
        devices = [root.device, *(Device() for _ in range(size - 1))]
        together = p2p_manager(root, devices, SyncOptions("flat" if size > 1 else "auto"))
        with together as manager:
            seen = [watch(s.net) for s in (root, *(manager.workers if manager else ()))]
            root.step(2)
            root.snapshot()
        state = str(root.resume_state.saved_now)
        root.close()
        for k in range(2 * 2 * size):
            labels += seen[k % size][k // size][1].reshape(-1).tolist()
    (alone, _) = batches_of(1, kind, folder, 2 * sum(sizes), 100)
    assert labels == [label for _, batch in alone for label in batch.reshape(-1).tolist()]


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_written_in_the_order_of_batches(size: int, folder: Path) -> None:
    more = """
    layer { name: "out" type: "HDF5Output" bottom: "data" bottom: "label" include { phase: TRAIN }
      hdf5_output_param { file_name: "out.h5" } }
    """
    written: list[dict[str, Any]] = []
    for n, iterations in ((size, 4), (1, 4 * size)):
        batches_of(n, "HDF5Data", folder, iterations, more=more)
        with h5py.File("out.h5") as file:
            written.append({name: item[()] for name, item in file.items()})
    for name, array in written[0].items():
        np.testing.assert_array_equal(array, written[1][name])


def test_a_shared_layer_serves_one_solver_at_a_time(folder: Path) -> None:
    (folder / "counting.py").write_text(
        "import threading\nfrom time import sleep\n"
        + dedent(MODULE)
        .replace(
            "        self.at += 2\n",
            "        assert not self.busy.locked()\n"
            "        with self.busy: sleep(0.005)\n"
            "        self.at += 2\n",
        )
        .replace(
            "        self.at = 0\n",
            "        self.at, self.busy = 0, threading.Lock()\n",
        )
    )
    batches_of(4, "Python", folder, 6)


OUTPUT = """
layer { name: "out" type: "HDF5Output" bottom: "data" bottom: "label"
  hdf5_output_param { file_name: "out.h5" } }
"""


def learned(
    kind: str, folder: Path, devices: list[Device], passes: int, more: str = ""
) -> tuple[Array, dict[str, Array]]:
    """Weights after three iterations of solvers on these devices, and the rows that were written."""
    text = f'layer {{ name: "in" type: "{kind}" top: "data" top: "label" {LAYERS[kind]} }} {more}'
    text += library.inner_product("ip", "data", 21) + library.softmax_loss("ip")
    settings = f"{SETTINGS} iter_size: {passes} net_param {{ {text} }}"
    param = text_format.Parse(settings, SolverParameter())
    param.base_lr = 1e-4
    path = str(folder / "solver.prototxt")
    root = Solver(param, device=devices[0], path=path, precision="fp32")
    give_images(root, kind, folder)
    deadlines = {"set-up": 300.0, "step": 60.0}
    with p2p_manager(root, devices, SyncOptions(deadlines=deadlines)):
        root.step(3)
    root.device.flush()
    weights = np.array(root.device.on_host(root.params.data))
    root.close()
    rows: dict[str, Array] = {}
    if more:
        with h5py.File("out.h5") as file:
            rows = {name: item[()] for name, item in file.items()}
    return weights, rows


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("more", ["", OUTPUT], ids=["", "HDF5Output"])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in IMAGES])
@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpus(2))])
def test_two_solvers_learn_from_any_data_what_one_learns(
    place: str, kind: str, more: str, passes: int, folder: Path
) -> None:
    alone, rows = learned(kind, folder, [Device()], 2 * passes, more)
    devices = [CudaDevice(i) for i in range(2)] if place == "gpu" else [Device(), Device()]
    weights, written = learned(kind, folder, devices, passes, more)
    np.testing.assert_allclose(weights, alone, rtol=1e-3, atol=1e-5)
    assert written.keys() == rows.keys()
    for name, array in rows.items():
        np.testing.assert_allclose(written[name], array, rtol=1e-5)
