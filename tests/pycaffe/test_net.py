import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

import caffepy as caffe
from caffepy.data.reader import Reader
from caffepy.data.write import array_to_datum, write_database
from tests.net.nets import INPUT, LOSS, ip
from tests.nets import library

TEXT = (
    "force_backward: true "
    + INPUT
    + ip("a", "x", "a")
    + 'layer { name: "r" type: "ReLU" bottom: "a" top: "a" } '
    + ip("b", "a", "b")
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "net.prototxt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def net(path: Path) -> "caffe.Net":
    caffe.set_random_seed(3)
    return caffe.Net(str(path), caffe.TRAIN)


def test_names(net: "caffe.Net") -> None:
    assert net.inputs == ["x", "y"]
    assert net.outputs == ["b", "y"]
    assert list(net.blobs) == ["x", "y", "a", "b"]
    assert list(net.params) == ["a", "b"]
    assert list(net.layer_dict) == ["in", "a", "r", "b"]
    assert net.layer_dict["a"].type == "InnerProduct"
    assert net.top_names["r"] == net.bottom_names["r"] == ["a"]
    assert [len(layer.blobs) for layer in net.layers] == [0, 2, 0, 2]
    assert list(net.params["a"][0].shape) == [5, 3]
    assert net.blobs["x"].count == 12
    assert net.blobs["y"].num == 4
    assert net.blobs["y"].width == 1


def test_a_pass_that_ends_before_it_starts_does_nothing(net: "caffe.Net") -> None:
    net.forward()
    before = net.blobs["b"].data.copy()
    net.params["a"][0].data[...] *= 2
    for _ in range(3):  # also where passes are replayed
        net.forward(start="b", end="a")
        net.backward(start="a", end="b")
    np.testing.assert_array_equal(net.blobs["b"].data, before)
    np.testing.assert_array_equal(net.params["b"][0].diff, 0)


def test_forward_and_backward(net: "caffe.Net") -> None:
    x = np.random.default_rng(0).standard_normal((4, 3))
    out = net.forward(x=x, y=np.zeros(4), blobs=["a"])
    assert list(out) == ["b", "y", "a"]
    (wa, ba), (wb, bb) = ([p.data for p in net.params[name]] for name in "ab")
    hidden = np.maximum(x @ wa.T + ba, 0)
    np.testing.assert_allclose(out["b"], hidden @ wb.T + bb, rtol=1e-5, atol=1e-6)
    net.clear_param_diffs()
    dy = np.ones((4, 5))
    grads = net.backward(b=dy, y=np.zeros(4))
    assert list(grads) == ["x", "y"]
    np.testing.assert_allclose(grads["x"], ((dy @ wb) * (hidden > 0)) @ wa, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(net.params["b"][0].diff, dy.T @ hidden, rtol=1e-4, atol=1e-5)


def test_parts_of_the_net(net: "caffe.Net") -> None:
    net.blobs["x"].data[...] = 1
    assert list(net.forward(end="a")) == ["a"]
    before = net.blobs["b"].data.copy()
    net.forward(start="r", end="r")
    assert (net.blobs["b"].data == before).all()
    net.blobs["b"].diff[...] = 1
    assert list(net.backward(end="b")) == ["a"]


def test_inputs_are_checked(net: "caffe.Net") -> None:
    named = r"do not match net inputs\. The net has x, y; given: x$"
    with pytest.raises(Exception, match=named):
        net.forward(x=np.zeros((4, 3)))
    sized = r'^Input is not batch sized: "x" is \[5, 3\] for a blob of \[4, 3\]$'
    with pytest.raises(Exception, match=sized):
        net.forward(x=np.zeros((5, 3)), y=np.zeros(5))
    with pytest.raises(Exception, match="do not match net outputs"):
        net.backward(a=np.zeros((4, 5)))


def test_lists_and_scalars_are_arrays_too(net: "caffe.Net") -> None:
    x = np.random.default_rng(0).standard_normal((4, 3))
    expected = net.forward(x=x, y=np.zeros(4))["b"].copy()
    np.testing.assert_array_equal(net.forward(x=x.tolist(), y=[0] * 4)["b"], expected)
    with pytest.raises(Exception, match="not batch sized"):
        net.forward(x=0, y=np.zeros(4))


def test_the_diff_of_a_loss_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(INPUT + ip("a", "x", "a") + LOSS % "a")
    net = caffe.Net(str(tmp_path / "net.prototxt"), caffe.TRAIN)
    net.forward()
    net.backward(loss=1)
    diff = net.params["a"][0].diff.copy()
    net.clear_param_diffs()
    net.backward(loss=np.float32(2))
    np.testing.assert_allclose(net.params["a"][0].diff, 2 * diff)


def test_unknown_layers_are_named(net: "caffe.Net") -> None:
    for run in (net.forward, net.backward):
        for end in ("start", "end"):
            with pytest.raises(ValueError, match=r'the net has no layer "A", did you mean "a"\?'):
                run(**{end: "A"})


@pytest.mark.parametrize(
    ("things", "told"),
    [
        ("blobs", 'the net has no blob "bb", did you mean "b".; it has x, y, a, b'),
        ("params", 'the net has no layer with parameters "bb", did you mean "b".; it has a, b'),
        ("layer_dict", 'the net has no layer "bb", did you mean "b".; it has in, a, r, b'),
        ("top_names", 'the net has no layer "bb"'),
        ("blob_loss_weights", 'the net has no blob "bb"'),
    ],
)
def test_an_unknown_name_comes_with_those_that_there_are(
    things: str, told: str, net: "caffe.Net"
) -> None:
    named = getattr(net, things)
    with pytest.raises(KeyError, match=told):
        named["bb"]
    assert "bb" not in named
    assert named.get("bb") is None
    assert list(named.copy()) == list(copy.copy(named)) == list(named)
    with pytest.raises(KeyError, match=r'no .* "3"; it has'):
        named[3]


def test_of_many_names_some_are_listed(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(
        INPUT + "".join(ip(f"l{i}", "x", f"l{i}") for i in range(60))
    )
    net = caffe.Net(str(tmp_path / "net.prototxt"), caffe.TEST)
    with pytest.raises(KeyError, match=r'no blob "z"; it has x, y, l0, .*l37 and 22 more'):
        net.blobs["z"]


def test_all_of_nothing_is_refused(net: "caffe.Net") -> None:
    for run in (net.forward_all, net.forward_backward_all):
        with pytest.raises(Exception, match="do not match net inputs"):
            run()


def test_a_net_is_neither_copied_nor_pickled(net: "caffe.Net") -> None:
    for to_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"neither copied nor pickled: .* share_with"):
            to_copy(net)


@pytest.mark.parametrize(
    "set_mode", [caffe.set_mode_cpu, pytest.param(caffe.set_mode_gpu, marks=pytest.mark.gpu)]
)
def test_copies_of_parameters_are_their_own(set_mode: Callable[[], None], path: Path) -> None:
    set_mode()
    try:
        net = caffe.Net(path, caffe.TRAIN)
    finally:
        caffe.set_mode_cpu()
    weight = net.params["a"][0].data.copy()
    net.params["a"][0].diff[...] = 3
    for params in (copy.deepcopy(net.params), pickle.loads(pickle.dumps(net.params))):
        net.params["a"][0].data[...] = 0
        np.testing.assert_array_equal(params["a"][0].data, weight)
        assert (params["a"][0].diff == 3).all()
        assert len(params["a"]) == 2
        net.params["a"][0].data[...] = weight


def test_paths_may_be_bytes(net: "caffe.Net", path: Path, tmp_path: Path) -> None:
    weights = bytes(tmp_path / "w.caffemodel")
    net.save(weights)
    for other in (
        caffe.Net(bytes(path), weights, caffe.TRAIN),
        caffe.Net(path, caffe.TRAIN, weights=weights),
    ):
        assert (other.params["a"][0].data == net.params["a"][0].data).all()


def test_forward_all_pads_the_last_batch(net: "caffe.Net") -> None:
    x = np.random.default_rng(0).standard_normal((10, 3))
    out = net.forward_all(x=x, y=np.zeros(10))
    assert out["b"].shape == (10, 5)
    np.testing.assert_allclose(
        out["b"][9], net.forward_all(x=x[9:], y=np.zeros(1))["b"][0], rtol=1e-5
    )


def test_batches_as_scripts_cut_them(net: "caffe.Net") -> None:
    batches = list(net._batch({"x": np.ones((6, 3)), "y": np.ones(6)}))
    assert [batch["x"].sum() for batch in batches] == [12, 6]
    assert [batch["y"].tolist() for batch in batches] == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_vectors_grow(net: "caffe.Net") -> None:
    from caffepy.pycaffe import BlobVec, IntVec, RawBlobVec

    vector = RawBlobVec()
    vector.append(net.blobs["x"])
    vector.extend([net.blobs["a"]])
    net.layer_dict["a"].reshape(vector[:1], vector[1:])
    params = net.params["b"]
    assert isinstance(params, BlobVec)
    assert isinstance(net._inputs, IntVec)
    extra = net.params["a"]
    params.append(extra[0])
    params.extend(extra[1:])
    assert [blob.shape for blob in params] == [(5, 5), (5,), (5, 3), (5,)]
    extra[1].data[...] = 7
    assert params[3].data.tolist() == [7] * 5


def test_save_and_load(net: "caffe.Net", path: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "w.caffemodel")
    net.save(file)
    again = caffe.Net(str(path), caffe.TEST, weights=file)
    np.testing.assert_array_equal(again.params["a"][0].data, net.params["a"][0].data)
    old_style = caffe.Net(str(path), file, caffe.TEST)
    np.testing.assert_array_equal(old_style.params["a"][0].data, net.params["a"][0].data)
    net.save_hdf5(str(tmp_path / "w.h5"))
    fresh = caffe.Net(str(path), caffe.TEST)
    fresh.load_hdf5(str(tmp_path / "w.h5"))
    np.testing.assert_array_equal(fresh.params["b"][0].data, net.params["b"][0].data)


def test_share_with(net: "caffe.Net", path: Path) -> None:
    other = caffe.Net(str(path), caffe.TEST)
    other.share_with(net)
    net.params["a"][0].data[...] = 5
    assert (other.params["a"][0].data == 5).all()


def test_missing_files(tmp_path: Path, path: Path) -> None:
    with pytest.raises(RuntimeError, match="Could not open file"):
        caffe.Net(str(tmp_path / "no.prototxt"), caffe.TEST)
    with pytest.raises(RuntimeError, match="Could not open file"):
        caffe.Net(str(path), caffe.TEST, weights=str(tmp_path / "no.caffemodel"))


def test_phase_level_and_stages(tmp_path: Path) -> None:
    file = tmp_path / "net.prototxt"
    file.write_text(
        INPUT
        + ip("train", "x", "t", "include { phase: TRAIN }")
        + ip("high", "x", "h", "include { min_level: 2 }")
        + ip("staged", "x", "s", 'include { stage: "deploy" }')
    )
    assert list(caffe.Net(str(file), caffe.TRAIN).params) == ["train"]
    assert list(caffe.Net(str(file), caffe.TEST, level=2, stages=["deploy"]).params) == [
        "high",
        "staged",
    ]
    assert list(caffe.Net(str(file), caffe.TEST, stages="deploy").params) == ["staged"]
    assert list(caffe.Net(str(file), None, caffe.TRAIN).params) == ["train"]


def test_the_same_seed_gives_the_same_weights(path: Path) -> None:
    weights = []
    for _ in range(2):
        caffe.set_random_seed(11)
        weights.append(caffe.Net(str(path), caffe.TRAIN).params["a"][0].data.copy())
    np.testing.assert_array_equal(*weights)


def test_blobs_reshape(net: "caffe.Net") -> None:
    net.blobs["x"].reshape(2, 3)
    net.reshape()
    assert net.blobs["b"].data.shape == (2, 5)


def test_loss_weights(tmp_path: Path) -> None:
    file = tmp_path / "net.prototxt"
    file.write_text(INPUT + ip("a", "x", "a") + LOSS % "a")
    net = caffe.Net(str(file), caffe.TRAIN)
    assert net.blob_loss_weights["loss"] == 1
    assert net.blob_loss_weights["a"] == 0


def test_layer_type_list() -> None:
    types = caffe.layer_type_list()
    assert types == sorted(types)
    assert {"Data", "Convolution", "SoftmaxWithLoss"} <= set(types)


def test_ids_are_places_among_the_blobs(net: "caffe.Net") -> None:
    assert net._blob_names == ["x", "y", "a", "b"]
    assert (net._inputs, net._outputs) == ([0, 1], [3, 1])
    assert [net._top_ids(i) for i in range(4)] == [[0, 1], [2], [2], [3]]
    assert [net._bottom_ids(i) for i in range(4)] == [[], [0], [2], [2]]


def test_unknown_phases_and_seeds_are_refused(path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"there is no phase 7; give one of TRAIN \(0\), TEST \(1\)"
    ):
        caffe.Net(str(path), 7)
    for arguments in (
        ("w.caffemodel",),
        (None,),
    ):  # weights without a phase do not mean the first one
        with pytest.raises(RuntimeError, match="there is no phase "):
            caffe.Net(str(path), *arguments)
    with pytest.raises(RuntimeError, match="a random seed is 0 or more, not -1"):
        caffe.set_random_seed(-1)


@pytest.mark.parametrize("method", ["save", "save_hdf5"])
def test_bad_paths_are_named(method: str, net: "caffe.Net", tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"gone/w: cannot be written: no such file or directory"):
        getattr(net, method)(tmp_path / "gone" / "w")


MEMORY = """
layer { name: "in" type: "MemoryData" top: "x" top: "y" memory_data_param {
  batch_size: 2 channels: 1 height: 1 width: 3 } }
"""


def test_set_input_arrays(net: "caffe.Net", tmp_path: Path) -> None:
    (tmp_path / "memory.prototxt").write_text(MEMORY)
    memory = caffe.Net(str(tmp_path / "memory.prototxt"), caffe.TRAIN)
    data, labels = (
        np.arange(12, dtype=np.float32).reshape(4, 1, 1, 3),
        np.arange(4, dtype=np.float32),
    )
    memory.set_input_arrays(data, labels)
    data += 1
    memory._set_input_arrays(data, labels)
    for i in (0, 2, 0):
        out = memory.forward()
        np.testing.assert_array_equal(out["x"], data[i : i + 2])
        np.testing.assert_array_equal(out["y"].ravel(), labels[i : i + 2])
    wrong = {
        "float64": (data.astype(float), labels),
        "not of <class 'list'>": (data.tolist(), labels),
        "not .* of shape": (data[0], labels),
        "C-contiguous": (data[..., ::-1], labels),
        "labels must have one number": (data, data),
        "multiple of the batch size 2": (data[:3], labels[:3]),
        "for a layer of": (np.zeros((2, 1, 1, 4), np.float32), labels[:2]),
    }
    for message, arrays in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            memory.set_input_arrays(*arrays)
    with pytest.raises(RuntimeError, match="first layer is a MemoryData"):
        net.set_input_arrays(data, labels)


@pytest.mark.gpu
def test_a_gpu_tells_of_wrong_labels_at_once(tmp_path: Path) -> None:
    file = tmp_path / "net.prototxt"
    file.write_text(
        'layer { name: "in" type: "Input" top: "x" top: "y" '
        "input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }\n"
        'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "x" bottom: "y" top: "loss" }'
    )
    caffe.set_mode_gpu()
    try:
        net = caffe.Net(str(file), caffe.TRAIN)
    finally:
        caffe.set_mode_cpu()
    with pytest.raises(
        RuntimeError,
        match=r'net\.prototxt:2:1: layer "loss" \(SoftmaxWithLoss\): label 3 is not one',
    ):
        net.forward(x=np.zeros((2, 3)), y=np.array([1, 3]))
    assert net.forward(x=np.zeros((2, 3)), y=np.array([1, 2]))["loss"] == pytest.approx(np.log(3))


def test_raw_vectors_and_passes_by_number(net: "caffe.Net", tmp_path: Path) -> None:
    assert [blob.shape for blob in net._blobs] == [(4, 3), (4,), (4, 5), (4, 5)]
    assert net._layer_names == ["in", "a", "r", "b"]
    assert net._blob_loss_weights == [0, 0, 0, 0]
    assert net.layers[1] is net.layers[1] is net.layer_dict["a"]
    file = tmp_path / "net.prototxt"
    file.write_text("force_backward: true " + INPUT + ip("a", "x", "a") + LOSS % "a")
    lossy = caffe.Net(str(file), caffe.TRAIN)
    lossy.blobs["x"].data[...] = np.random.default_rng(0).standard_normal((4, 3))
    assert lossy._forward(0, 2) == pytest.approx(float(lossy.blobs["loss"].data))
    assert lossy._forward(0, 1) == 0
    assert lossy._blob_loss_weights == [0, 0, 0, 1]
    lossy._backward(2, 1)
    assert lossy.params["a"][0].diff.any()


def test_setup_and_reshape_of_a_layer(net: "caffe.Net") -> None:
    x, a = net.blobs["x"], net.blobs["a"]
    x.reshape(7, 3)
    net.layer_dict["a"].reshape([x], [a])
    assert a.shape == (7, 5)
    net.layer_dict["r"].setup([a], [a])


def test_callbacks_get_the_number_of_each_layer(net: "caffe.Net") -> None:
    calls: dict[str, list[int]] = {name: [] for name in ("before", "after", "under", "over")}
    net.before_forward(calls["before"].append)
    net.after_forward(calls["after"].append)
    net.before_backward(calls["under"].append)
    net.after_backward(calls["over"].append)
    net.forward()
    net.backward()
    assert calls["before"] == calls["after"] == [0, 1, 2, 3]
    assert calls["under"] == calls["over"] == [3, 2, 1, 0]
    with pytest.raises(RuntimeError, match="a function of the layer's index, or an NCCL"):
        net.after_backward(3)  # type: ignore[arg-type]


def test_a_blob_of_the_host_has_no_address_on_a_gpu(net: "caffe.Net") -> None:
    with pytest.raises(RuntimeError, match="this blob lies in the host's memory"):
        _ = net.blobs["x"]._gpu_data_ptr


def test_data_outlives_the_net(path: Path) -> None:
    net = caffe.Net(str(path), caffe.TRAIN)
    blobs, weight = list(net.blobs.values()), net.params["a"][0].data
    total = weight.sum()
    del net
    assert weight.sum() == total
    assert all(blob.data.shape == blob.shape for blob in blobs)


def test_forward_backward_all(tmp_path: Path) -> None:
    file = tmp_path / "net.prototxt"
    file.write_text(
        'force_backward: true layer { name: "in" type: "Input" top: "x" input_param { shape '
        "{ dim: 4 dim: 3 } } } " + ip("a", "x", "a") + ip("b", "a", "b")
    )
    net = caffe.Net(str(file), caffe.TRAIN)
    rng = np.random.default_rng(0)
    x, b = rng.standard_normal((6, 3)), rng.standard_normal((6, 5))
    outs, diffs = net.forward_backward_all(["a"], ["a"], x=x, b=b)
    assert (outs["b"].shape, outs["a"].shape, diffs["x"].shape, diffs["a"].shape) == (
        (6, 5),
        (6, 5),
        (6, 3),
        (6, 5),
    )
    np.testing.assert_allclose(outs["b"], net.forward_all(None, x=x)["b"], rtol=1e-6)
    wa, wb = (net.params[name][0].data for name in "ab")
    np.testing.assert_allclose(diffs["x"], b @ wb @ wa, rtol=1e-4, atol=1e-5)


def test_ctrl_c_takes_no_batches_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with write_database(str(tmp_path / "db")) as writer:
        for i in range(20):
            writer.put(f"{i:08d}", array_to_datum(np.full((1, 1, 1), i, np.uint8), i))
    file = tmp_path / "net.prototxt"
    file.write_text(
        'layer { name: "d" type: "Data" top: "x" data_param { source: "db" backend: LMDB '
        "batch_size: 1 prefetch: 2 } }"
    )
    net = caffe.Net(file, caffe.TEST)
    take = Reader.take

    def interrupted(reader: Reader) -> None:
        take(reader)
        raise KeyboardInterrupt

    for i in range(8):
        with monkeypatch.context() as patch:
            patch.setattr(Reader, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                net.forward()
        assert net.forward()["x"].ravel() == 2 * i + 1
    net.close()
    with pytest.raises(
        RuntimeError, match=r'net.prototxt:1:1: layer "d" \(Data\): the layer is closed'
    ):
        net.forward()


def test_a_database_is_open_once_in_a_process(tmp_path: Path) -> None:
    """py-lmdb sees to that."""
    folder, file = str(tmp_path / "db"), tmp_path / "net.prototxt"
    file.write_text(
        f"layer "
        f'{{ name: "d" type: "Data" top: "x" data_param {{ source: "{folder}" backend: LMDB batch_size: 1 }} }}'
    )
    with lmdb.open(folder, map_size=1 << 20) as env, env.begin(write=True) as records:
        records.put(b"0", caffe.io.array_to_datum(np.ones((1, 2, 2), np.uint8)).SerializeToString())
    if lmdb.__version__ >= "3":
        with (
            lmdb.open(folder, readonly=True),
            pytest.raises(RuntimeError, match="close the one that the script has opened first"),
        ):
            caffe.Net(str(file), caffe.TEST)
    net = caffe.Net(str(file), caffe.TEST)
    assert (net.forward()["x"] == 1).all()
    net.close()
    lmdb.open(folder, readonly=True).close()
    solver = tmp_path / "solver.prototxt"
    solver.write_text(f'net: "{file}" base_lr: 0 lr_policy: "fixed" snapshot_after_train: false')
    caffe.SGDSolver(str(solver)).close()
    lmdb.open(folder, readonly=True).close()


@pytest.mark.gpu
def test_a_blob_of_a_gpu_has_an_address(path: Path) -> None:
    caffe.set_mode_gpu()
    try:
        net = caffe.Net(str(path), caffe.TRAIN)
    finally:
        caffe.set_mode_cpu()
    assert net.blobs["a"]._gpu_data_ptr != net.blobs["a"]._gpu_diff_ptr > 0


def test_passes_are_replayed_and_what_a_script_writes_counts(tmp_path: Path) -> None:
    text = library.small_convolution(library.inputs("in", data=(2, 1, 8, 8), label=(2,)))
    path = tmp_path / "net.prototxt"
    path.write_text(f"force_backward: true {text}")
    nets = [caffe.Net(str(path), caffe.TEST) for _ in range(2)]
    nets[1].share_with(nets[0])
    rng = np.random.default_rng(5)
    for run in range(6):
        seen = []
        for net, watched in zip(nets, (True, False), strict=True):
            layers: list[str] = []
            if watched and not run:  # a callback that looks at layers prevents it
                net.before_forward(lambda layer, layers=layers: layers.append(layer))
                net.before_backward(lambda layer, layers=layers: layers.append(layer))
            rng_of_run = np.random.default_rng(run)
            net.blobs["data"].data[...] = rng_of_run.standard_normal((2, 1, 8, 8))
            net.blobs["label"].data[...] = rng_of_run.integers(0, 10, 2)
            loss = float(net.forward(end="loss")["loss"])
            net.clear_param_diffs()
            gradient = net.backward()["data"].copy()
            seen.append((loss, gradient, net.params["conv"][0].diff.copy()))
        assert seen[0][0] == seen[1][0]
        np.testing.assert_array_equal(seen[0][1], seen[1][1])
        np.testing.assert_array_equal(seen[0][2], seen[1][2])
        nets[0].params["ip"][0].data[...] += rng.standard_normal((10, 36)).astype(np.float32) / 9
    replays = [net._passes._replays for net in nets]
    assert not replays[0]
    assert all(replay._replayed >= 3 for replay in replays[1].values())
