import json
import logging
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from caffepy import models
from caffepy.cli.check import check
from caffepy.commands.check import LayerOnGpu, NetInfo, as_json, inspect, is_solver, outer_fields
from caffepy.commands.largest_batch import LargestBatch, largest_batch
from caffepy.core.errors import ConfigError, UsageError
from caffepy.layer.norm_groups import NormGroup
from caffepy.net import memory
from caffepy.net.memory import Usage
from caffepy.net.recompute import OVERHEAD
from caffepy.proto.text import read_solver
from caffepy.solver import Solver
from tests.nets import library

NET = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "c" %s
  convolution_param { num_output: 4 kernel_size: 3 group: 1 } }
layer { name: "relu" type: "ReLU" bottom: "c" top: "c" }
layer { name: "flat" type: "Flatten" bottom: "c" top: "f" }
layer { name: "ip" type: "InnerProduct" bottom: "f" top: "y" inner_product_param { num_output: 5 bias_term: false } }
"""


def write(folder: Path, text: str) -> str:
    path = folder / "file.prototxt"
    path.write_text(text)
    return str(path)


def test_shapes_parameters_memory_and_operations(tmp_path: Path) -> None:
    (net,) = inspect(write(tmp_path, NET % ""))
    assert net.role == "TEST net"
    rows = {row.name: row for row in net.layers}
    assert [row.type for row in net.layers] == [
        "Input",
        "Convolution",
        "ReLU",
        "Flatten",
        "InnerProduct",
    ]
    assert rows["conv"].tops == {"c": (2, 4, 6, 6)}
    assert (rows["conv"].parameters, rows["ip"].parameters, net.parameters) == (112, 720, 832)
    # nothing for what works in place or looks at the same memory
    assert [row.memory for row in net.layers] == [4 * 384, 4 * 288, 0, 0, 4 * 10]
    assert rows["conv"].flops == 2 * (3 * 3 * 3) * 288 + 288
    assert rows["ip"].flops == 2 * 144 * 10
    assert net.flops == rows["conv"].flops + rows["ip"].flops


def test_table_and_json(tmp_path: Path) -> None:
    nets = inspect(write(tmp_path, NET % ""))
    lines = nets[0].table().splitlines()
    assert lines[0] == "TEST net"
    assert len({len(line) for line in lines[1:-1]}) == 1
    assert lines[3].split() == [
        "conv",
        "Convolution",
        "2",
        "4",
        "6",
        "6",
        "(288)",
        "112",
        "0.00",
        "MiB",
        "15.84",
        "k",
    ]
    assert lines[-2].split()[:2] == ["all", "832"]
    assert lines[-1] == "on the CPU: data take 0.00 MiB"
    (told,) = json.loads(as_json(nets))
    assert told["memory"] == nets[0].memory
    assert told["layers"][1]["tops"] == {"c": [2, 4, 6, 6]}


def test_a_net_whose_layers_speak_of_phases_is_built_in_both(tmp_path: Path) -> None:
    train, test = inspect(write(tmp_path, NET % "exclude { phase: TEST stage: 'a' }"))
    assert (train.role, test.role) == ("TRAIN net", "TEST net")
    with pytest.raises(ConfigError, match="c"):  # the TEST net of this stage lacks the blob
        inspect(write(tmp_path, NET % "exclude { phase: TEST stage: 'a' }"), stages=["a"])


def test_a_solver_shows_all_its_nets() -> None:
    path = models.path("digits", "solver")
    assert path
    train, test = inspect(path)
    assert (train.role, test.role) == ("train net", "test net #0")
    assert (train.name, train.parameters) == ("digits", 13706)
    assert "accuracy" in [row.name for row in test.layers]
    assert train.layers[0].tops == {"data": (50, 1, 8, 8), "label": (50,)}


def test_random_images_in_the_place_of_data() -> None:
    path = models.path("cifar10_quick", "train_val")
    assert path
    train, _test = inspect(path, synthetic=True, image=(3, 32, 32))
    assert train.layers[0].tops["data"] == (100, 3, 32, 32)


def test_solver_settings_that_cannot_work(tmp_path: Path) -> None:
    text = f"net: '{models.path('digits', 'train_val')}' base_lr: 0.1 lr_policy: 'fixd' max_iter: 1"
    with pytest.raises(ConfigError, match='did you mean "fixed"'):
        inspect(write(tmp_path, text))


def test_a_folder_for_snapshots_that_is_not_there_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"net: '{models.path('digits', 'train_val')}' base_lr: 0.1 max_iter: 1 lr_policy: 'fixed'\nsnapshot_prefix: '%s/x'"
    for folder, told in (
        (tmp_path, []),
        (tmp_path / "none", [f"the folder {tmp_path}/none of snapshot_prefix"]),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "caffepy"):
            assert len(inspect(write(tmp_path, text % folder))) == 1
        assert [message.split(" does not exist")[0] for message in caplog.messages] == [
            f"{tmp_path}/file.prototxt:2:1: {message}" for message in told
        ]


KINDS = {
    "solver": ('net: "a.prototxt" base_lr: 0.1 # layer { }\nmax_iter: 3', True),
    "solver with a net in it": (
        'net_param { layer { name: "a" } layer { } } base_lr: 1 max_iter: 1',
        True,
    ),
    "net": ('name: "x" layer { name: "net" type: "base_lr" } # net: "x"', False),
    "net with angle brackets": ('layer < name: "momentum" > layer < >', False),
    "old net": ("input: 'data' input_dim: 1 layers { }", False),
    "empty": ("", False),
}


@pytest.mark.parametrize(("text", "solver"), KINDS.values(), ids=KINDS.keys())
def test_solver_or_net(text: str, solver: bool) -> None:
    assert is_solver(text) is solver


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        inspect("/nowhere/solver.prototxt")


@pytest.mark.parametrize(
    "text", [NET % "", f"net_param {{ {NET % ''} }} base_lr: 1 lr_policy: 'fixed' max_iter: 1"]
)
def test_pipes_are_read_once(text: str) -> None:
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    try:
        (net,) = inspect(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert net.parameters == 832


@pytest.mark.parametrize("shares", [False, True])
def test_memory_on_the_cpu_is_what_a_run_takes(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: the arrays that three iterations of training have made."""
    monkeypatch.setattr(memory, "WORTH", 1 if shares else 1 << 40)
    path = str(models.path("digits", "solver"))
    param = read_solver(path)
    del param.test_iter[:]
    param.test_interval, param.snapshot, param.snapshot_after_train = 0, 0, False
    solver = Solver(param, path=path)
    solver.fuse = True
    solver.save_memory()
    solver.step(3)
    net = solver.net
    blobs = [top for node in net.nodes for top in node.tops]
    blobs += [b for step in net.steps for b in (step.group or net.layers[step.last]).buffers]
    made = {m for blob in blobs for m in (blob.data_memory, blob.diff_memory) if m.touched}
    arrays = [m.array if m.array.base is None else m.array.base for m in made]
    train, _ = inspect(path)
    assert train.on_cpu == sum({id(array): array.nbytes for array in arrays}.values())
    assert "on the CPU: data and gradients take 0." in train.table()


def test_names_stay_on_their_lines(tmp_path: Path) -> None:
    (net,) = inspect(write(tmp_path, (NET % "").replace('"conv"', '"co\\nnv"')))
    assert len(net.table().splitlines()) == 9
    assert net.table().splitlines()[3].startswith("co\\nnv  Convolution")


def test_outer_fields_skip_blocks_comments_and_strings() -> None:
    assert list(outer_fields('a: "x { \\" y" b { c: \'d\' } # e: 1\nf <g: 2>')) == ["a", "b", "f"]


def on_gpu(folder: Path, text: str, precision: str | None = None) -> NetInfo:
    (net,) = inspect(write(folder, text), gpu=True, precision=precision)
    return net


def gpu_of(net: NetInfo, name: str) -> LayerOnGpu:
    (layer,) = [layer for layer in net.layers if layer.name == name]
    assert layer.gpu is not None
    return layer.gpu


def test_what_a_gpu_would_do_is_told_without_one(tmp_path: Path) -> None:
    net = on_gpu(tmp_path, NET % "", "bf16")
    assert net.gpu is not None
    assert (net.gpu.precision, net.gpu.obstacle) == ("bf16", None)
    assert net.gpu.memory >= 2 * 288
    assert gpu_of(net, "conv").run == gpu_of(net, "relu").run == ["conv", "relu"]
    assert gpu_of(net, "conv").formats == {"c": "bfloat16 NHWC"}
    assert gpu_of(net, "ip").formats == {"y": "float32"}
    assert not gpu_of(net, "ip").on_host
    table = net.table().splitlines()
    assert table[-2:] == [
        "on a GPU: bf16; data take 0.00 MiB",
        "a step is captured as one graph",
    ]
    (line,) = [line.split() for line in table if line.startswith("relu") and "with" in line]
    assert line == ["relu", "ReLU", "with", "conv", "bfloat16", "NHWC"]
    (line,) = [line.split() for line in table if line.startswith("conv") and "with" in line]
    assert line[:4] == ["conv", "Convolution", "with", "relu"]


def test_in_fp32_blobs_lie_as_in_caffe(tmp_path: Path) -> None:
    net = on_gpu(tmp_path, NET % "", "fp32")
    assert gpu_of(net, "conv").formats == {"c": "float32 NCHW"}
    assert not any(layer.gpu and layer.gpu.converts for layer in net.layers)


SUM = """
layer { name: "labels" type: "Input" top: "t" input_param { shape { dim: 2 } } }
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 8 dim: 6 dim: 6 } } }
layer { name: "a" type: "Convolution" bottom: "x" top: "a"
        convolution_param { num_output: 16 kernel_size: 1 bias_term: false } }
layer { name: "b" type: "Convolution" bottom: "x" top: "b"
        convolution_param { num_output: 16 kernel_size: 1 bias_term: false } }
layer { name: "norm" type: "BatchNorm" bottom: "b" top: "b" }
layer { name: "sum" type: "Eltwise" bottom: "a" bottom: "b" top: "y" }
layer { name: "relu" type: "ReLU" bottom: "y" top: "y" }
layer { name: "ip" type: "InnerProduct" bottom: "y" top: "z" inner_product_param { num_output: 2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "z" bottom: "t" top: "l" }
"""


def test_bits_of_a_normalization_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of the elements of its ReLU, if that is one of a sum, in 16 bits."""
    counted = {}
    for precision in ("bf16", "fp32"):
        seen: list[int] = []

        def plan(usage: Usage, seen: list[int] = seen) -> int:
            groups = [s.group for s in usage.steps if isinstance(s.group, NormGroup)]
            seen.extend(group.bits.count for group in groups)
            return 0

        monkeypatch.setattr("caffepy.commands.check.taken", plan)
        on_gpu(tmp_path, SUM, precision)
        counted[precision] = seen[0]
    assert counted == {"bf16": 2 * 16 * 6 * 6 // 8, "fp32": 0}


def test_the_net_may_ask_for_a_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAFFEPY_PRECISION", raising=False)
    text = (
        "default_forward_type: FLOAT16 default_backward_type: FLOAT16" + NET % "forward_type: FLOAT"
    )
    net = on_gpu(tmp_path, text)
    assert net.gpu is not None
    assert net.gpu.precision == "fp16"
    assert gpu_of(net, "in").formats == {"x": "float32 NCHW"}
    assert gpu_of(net, "conv").formats == {"c": "float32 NHWC"}
    told = on_gpu(tmp_path, NET % "").gpu
    assert told is not None
    assert told.precision == "tf32"


def test_what_is_computed_on_the_host_is_told(tmp_path: Path) -> None:
    keep = 'layer { name: "keep" type: "Filter" bottom: "x" bottom: "s" top: "x_kept" }'
    text = NET.replace('bottom: "x" top: "c"', 'bottom: "x_kept" top: "c"') % ""
    selector = 'layer { name: "s" type: "Input" top: "s" input_param { shape { dim: 2 } } }'
    first, rest = text.strip().split("\n", 1)
    net = on_gpu(tmp_path, "\n".join([first, selector, keep, rest]), "tf32")
    assert net.gpu is not None
    assert net.gpu.obstacle == 'layer "keep" (Filter) computes on the host'
    assert gpu_of(net, "keep").on_host
    lines = net.table().splitlines()
    assert lines[-1] == 'a step is not captured: layer "keep" (Filter) computes on the host'
    assert gpu_of(net, "conv").converts == {"x_kept": "float32 NCHW to float32 NHWC"}


SOLVER = "base_lr: 0.1 max_iter: 1 lr_policy: 'fixed' snapshot_prefix: 'x' %s net_param {%s}"


def test_what_a_solver_does_to_capturing_is_told(tmp_path: Path) -> None:
    def told(settings: str) -> list[str]:
        text = SOLVER % (settings, NET % "")
        nets = inspect(write(tmp_path, text), gpu=True, precision="bf16")
        return [line for net in nets for line in net.table().splitlines() if "captured" in line]

    assert told("") == ["a step is captured as one graph"]
    three = "a step is captured as three graphs, since iter_size is above 1: begin, pass and close"
    assert told("iter_size: 2") == [three]
    displayed = "a step that is displayed is not captured: debug_info shows each layer"
    assert told("debug_info: true display: 1") == ["a step is captured as one graph", displayed]
    assert told("debug_info: true") == ["a step is captured as one graph"]
    with_test = "test_iter: 1 test_interval: 1 debug_info: true"
    assert told(with_test)[1:] == ["a step is not captured: debug_info shows each layer"]


def test_a_gpu_that_is_not_here_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("caffepy.device.gpus.cuda_of_driver", lambda: 0)
    assert len(inspect(write(tmp_path, SOLVER % ("solver_mode: GPU", NET % "")))) == 1
    (told,) = caplog.messages
    assert "solver_mode: GPU asks for GPU 0, but no NVIDIA driver is found" in told


def test_json_has_what_a_gpu_would_do_where_that_was_asked(tmp_path: Path) -> None:
    (plain,) = json.loads(as_json(inspect(write(tmp_path, NET % ""))))
    assert plain["gpu"] is None
    (told,) = json.loads(as_json([on_gpu(tmp_path, NET % "", "fp16")]))
    assert told["gpu"].pop("memory") >= 2 * 288
    assert told["gpu"] == {
        "precision": "fp16",
        "obstacle": None,
        "graphs": 1,
        "when_displayed": None,
        "recompute": [],
        "largest": None,
        "largest_recomputing": None,
    }
    assert told["layers"][1]["gpu"] == {
        "on_host": False,
        "run": ["conv", "relu"],
        "formats": {"c": "float16 NHWC"},
        "converts": {"x": "float32 NCHW to float16 NHWC"},
    }


def test_images_that_a_net_does_not_state_have_a_size_that_fits(tmp_path: Path) -> None:
    data = 'layer { name: "d" type: "Data" top: "x" top: "y" data_param { source: "nowhere" batch_size: 2 } }'
    window = 'layer { name: "c" type: "Convolution" bottom: "x" top: "z" convolution_param { num_output: 1 kernel_size: %d } }'
    path = write(tmp_path, data + window % 250)
    (net,) = inspect(path, synthetic=True)
    assert net.layers[0].tops["x"] == (2, 3, 299, 299)
    with pytest.raises(ConfigError, match="224"):  # the first guess says what is wrong
        inspect(write(tmp_path, data + window % 999), synthetic=True)


def test_batches_too_large_for_the_first_guess_of_sizes(tmp_path: Path) -> None:
    data = 'layer { name: "d" type: "Data" top: "x" data_param { source: "nowhere" batch_size: 20000 } }'
    (net,) = inspect(write(tmp_path, data), synthetic=True)
    assert net.layers[0].tops["x"] == (20000, 3, 32, 32)


def test_the_layer_is_told_that_no_guess_of_sizes_gets_past(tmp_path: Path) -> None:
    """The first guess, 224, fails before it, at two paths of a net for multiples of 64."""
    path = write(
        tmp_path,
        """
        layer { name: "d" type: "Data" top: "x" top: "y" data_param { source: "nowhere" batch_size: 2 } }
        layer { name: "p" type: "Pooling" bottom: "x" top: "p" pooling_param { kernel_size: 64 stride: 64 } }
        layer { name: "u" type: "Upsample" bottom: "p" top: "u" upsample_param { scale: 64 } }
        layer { name: "e" type: "Eltwise" bottom: "x" bottom: "u" top: "e" }
        layer { name: "own" type: "Python" bottom: "e" top: "z" python_param { module: "absent" layer: "A" } }
        """,
    )
    with pytest.raises(ConfigError, match=r':6:\d+: layer "own" .*no Python module "absent"'):
        inspect(path, synthetic=True)


def test_a_layer_behind_a_loss_is_told_whose_labels_had_to_fit(tmp_path: Path) -> None:
    """No guess of labels fits the loss; the prediction's shape does."""
    path = write(
        tmp_path,
        """
        layer { name: "d" type: "Data" top: "x" top: "y" data_param { source: "nowhere" batch_size: 2 } }
        layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 4 kernel_size: 1 } }
        layer { name: "l" type: "EuclideanLoss" bottom: "c" bottom: "y" top: "l" }
        layer { name: "own" type: "Python" bottom: "c" top: "z" python_param { module: "absent" layer: "A" } }
        """,
    )
    with pytest.raises(ConfigError, match=r':5:\d+: layer "own" .*no Python module "absent"'):
        inspect(path, synthetic=True)


SHOTS = """
layer { name: "d" type: "Data" top: "x" top: "y" transform_param { crop_size: 4 } data_param { source: "nowhere" batch_size: %d } }
layer { name: "c" type: "InnerProduct" bottom: "x" top: "c" inner_product_param { num_output: 10 } }
layer { name: "r" type: "Reshape" bottom: "c" top: "r" reshape_param { shape { dim: [%s] } } }
layer { name: "p" type: "Pooling" bottom: "r" top: "p" pooling_param { pool: AVE kernel_h: 3 kernel_w: 1 } }
layer { name: "f" type: "Flatten" bottom: "p" top: "f" }
layer { name: "l" type: "SoftmaxWithLoss" bottom: "f" bottom: "y" top: "l" }
"""


@pytest.mark.parametrize(
    ("batch", "dims", "data", "labels"),
    [
        (4, "-1, 1, 3, 10", 12, 4),
        (1, "2, 1, 3, 10", 6, 2),
    ],
)
def test_data_are_as_many_as_a_reshape_and_a_loss_want(
    tmp_path: Path, batch: int, dims: str, data: int, labels: int
) -> None:
    (net,) = inspect(write(tmp_path, SHOTS % (batch, dims)), synthetic=True)
    assert net.layers[0].tops == {"x": (data, 3, 4, 4), "y": (labels,)}


def test_a_loss_without_labels_is_told(tmp_path: Path) -> None:
    absent = SHOTS.replace('bottom: "y"', 'bottom: "absent"') % (4, "-1, 1, 3, 10")
    with pytest.raises(ConfigError, match="Unknown bottom blob 'absent'"):
        inspect(write(tmp_path, absent), synthetic=True)
    absent = SHOTS.replace('bottom: "c"', 'bottom: "absent"') % (4, "-1, 1, 3, 10")
    with pytest.raises(ConfigError, match="Unknown bottom blob 'absent'"):
        inspect(write(tmp_path, absent), synthetic=True)


def test_a_reshape_that_is_larger_than_any_blob_is_told(tmp_path: Path) -> None:
    dims = f"{2**40 - 1}, {2**40}, 1, -1"
    with pytest.raises(ConfigError, match="10 elements of the bottom"):
        inspect(write(tmp_path, SHOTS % (1, dims)), synthetic=True)


def test_a_reshape_that_no_number_of_items_fills_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="7 elements of 10"):
        inspect(write(tmp_path, SHOTS % (1, "7, 1, 1, 1")), synthetic=True)


def test_a_phase_without_data_is_left_out(tmp_path: Path) -> None:
    only = NET.replace('type: "Input"', 'type: "Input" include { phase: TEST }') % ""
    assert [net.role for net in inspect(write(tmp_path, only))] == ["TEST net"]


STAGED = NET.replace('type: "Input"', 'type: "Input" include { phase: TRAIN } %s') % ("%s", "")


def test_data_in_stages_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, STAGED % 'include { phase: TEST stage: "on-test" }')
    assert [net.role for net in inspect(path)] == ["TRAIN net"]
    assert "no TEST net: it has data only with --stage on-test" in caplog.text
    both = inspect(path, stages=["on-test"])
    assert [net.role for net in both] == ["TRAIN net", "TEST net"]


def test_a_deploy_net_with_rules_is_a_test_net(tmp_path: Path) -> None:
    text = NET % "" + ' layer { name: "s" type: "Silence" bottom: "y" include { phase: TEST } }'
    assert [net.role for net in inspect(write(tmp_path, text))] == ["TEST net"]


NEEDS = {
    "a line": lambda batch: 1000 + 7 * batch,
    "steps": lambda batch: 1000 + 64 * (batch // 10),
    "a bend": lambda batch: 1000 + batch + max(0, batch - 90) * 20,
    "a jump": lambda batch: 1000 + batch + (batch > 77) * 10**6,
    "nothing to add": lambda batch: 1500 + (batch > 5000),
}


@pytest.mark.parametrize("given", [1, 32, 400])
@pytest.mark.parametrize("name", NEEDS)
def test_the_largest_batch_is_found_in_few_steps(name: str, given: int) -> None:
    asked = []

    def need(batch: int) -> int:
        asked.append(batch)
        return NEEDS[name](batch)

    found = largest_batch(need, 1500, given)
    assert need(found.batch) == found.memory <= 1500 < need(found.batch + 1)
    assert len(asked) < 40
    assert largest_batch(need, 999, given) == LargestBatch(999, 0, need(1))


def test_a_batch_that_no_net_can_have_is_told() -> None:
    def need(batch: int) -> int:
        if batch > 1234:
            raise ConfigError("too many", "here")
        return batch

    found = largest_batch(need, 10**9, 10)
    assert (found.batch, found.limit) == (1234, "here: too many")


def test_the_largest_batch_of_a_solver_and_what_recomputation_saves(tmp_path: Path) -> None:
    layers = library.inputs(data=(4, 3, 32, 32), label=(4,))
    for bottom, name in pairwise(["data", *"abcdefgh"]):
        layers += library.convolution(name, bottom, 16, 3, "pad: 1") + library.relu(
            f"{name}r", name
        )
    layers += library.inner_product("ip", "h", 5) + library.softmax_loss("ip")
    path = write(tmp_path, SOLVER % ("test_iter: 1 test_interval: 1", layers))
    room = OVERHEAD + (96 << 20)
    train, test = inspect(path, gpu=True, precision="fp32", batch="auto", memory=room)
    assert train.gpu
    assert test.gpu
    assert test.gpu.largest is None
    plain, saving = train.gpu.largest, train.gpu.largest_recomputing
    assert plain
    assert saving
    assert saving.batch > 1.4 * plain.batch > 140
    assert max(plain.memory, saving.memory) <= room
    lines = [line for line in train.table().splitlines() if "the largest batch" in line]
    need = f"{plain.memory / 2**30:.2f} GiB"
    assert lines[0].endswith(f"fits into 2.09 GiB: {plain.batch:,}, with {need}")
    assert "2.09 GiB with --recompute auto" in lines[1]
    again, _ = inspect(path, gpu=True, precision="fp32", batch=plain.batch)
    assert again.layers[0].tops["data"][0] == plain.batch
    assert again.gpu
    (one, *_) = again.gpu.recompute
    assert one.memory < again.gpu.memory
    assert 0 < one.layers < len(again.layers)
    told = f"with --recompute {one.segments}: {one.memory / 2**20:.2f} MiB, {one.layers} of"
    assert told in again.table()
    nothing = inspect(path, gpu=True, batch="auto", memory=OVERHEAD)[0]
    assert "no batch fits into 2.00 GiB: one image takes" in nothing.table()


def test_a_largest_batch_needs_a_memory_and_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    path = write(tmp_path, NET % "")
    with pytest.raises(UsageError, match="as --memory 80GB"):
        inspect(path, gpu=True, batch="auto")
    (net,) = inspect(path, batch=9)
    assert net.layers[0].tops["x"] == (9, 3, 8, 8)
    fixed = NET.replace('"Input"', '"Parameter"').replace("input_param", "parameter_param")
    with pytest.raises(ConfigError, match="states a batch"):
        inspect(write(tmp_path, fixed % ""), batch=9)


WRONG = {
    "a batch that is none": ("--gpu --batch many", "neither auto nor a number of 1 or more"),
    "a batch of nothing": ("--batch 0", "neither auto nor a number of 1 or more"),
    "no unit": ("--gpu --batch auto --memory 80", "no size of a memory, such as 80GB or 24GiB"),
    "no memory": ("--gpu --batch auto --memory 0GB", "no size of a memory"),
    "memory alone": ("--gpu --memory 80GB", "--memory is for --batch auto"),
    "no GPU": ("--batch auto", "--batch auto is for --gpu"),
}


@pytest.mark.parametrize(("flags", "told"), WRONG.values(), ids=WRONG)
def test_flags_of_batch_and_memory(tmp_path: Path, flags: str, told: str) -> None:
    path = write(tmp_path, NET % "")
    result = CliRunner().invoke(check, [path, *flags.split()])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_the_largest_batch_on_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, NET % "")
    result = CliRunner().invoke(check, [path, "--gpu", "--batch", "auto", "--memory", "2.5 GiB"])
    assert "the largest batch that fits into 2.50 GiB: " in result.output
    assert "--recompute" not in result.output  # a net that does not learn


LABELS = {
    "maps": ("EuclideanLoss", "p", "z", [2, 6, 8, 8]),
    "maps that a layer changes": ("EuclideanLoss", "p", "log", [2, 6, 8, 8]),
    "first": ("SmoothL1Loss", "z", "p", [2, 6, 8, 8]),
    "classes of pixels": ("SoftmaxWithLoss", "p", "z", [2, 1, 8, 8]),
}


@pytest.mark.parametrize("case", LABELS)
def test_labels_take_the_shape_of_what_they_are_compared_with(case: str, tmp_path: Path) -> None:
    loss, first, second, shape = LABELS[case]
    path = write(
        tmp_path,
        f"""
        layer {{ name: "d" type: "HDF5Data" top: "x" hdf5_data_param {{ batch_size: 2 }} }}
        layer {{ name: "l" type: "HDF5Data" top: "z" hdf5_data_param {{ batch_size: 2 }} }}
        layer {{ name: "p" type: "Convolution" bottom: "x" top: "p"
          convolution_param {{ num_output: 6 kernel_size: 3 }} }}
        layer {{ name: "log" type: "Power" bottom: "z" top: "log" power_param {{ power: 2 }} }}
        layer {{ name: "loss" type: "{loss}" bottom: "{first}" bottom: "{second}" top: "loss" }}
        """,
    )
    (net,) = inspect(path, synthetic=True, image=(3, 10, 10))
    (label,) = (one for one in net.layers if one.name == "l")
    assert list(label.tops["z"]) == shape


@pytest.mark.parametrize("wrong", ['type: "Power" top: "q"', 'type: "Sigmoid" bottom: "label"'])
def test_a_layer_without_bottom_or_top_is_the_users_error(wrong: str, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"""
        layer {{ name: "d" type: "HDF5Data" top: "x" top: "label"
          hdf5_data_param {{ batch_size: 2 }} }}
        layer {{ name: "wrong" {wrong} }}
        layer {{ name: "loss" type: "EuclideanLoss" bottom: "x" bottom: "label" top: "loss" }}
        """,
    )
    with pytest.raises(ConfigError, match="wrong"):
        inspect(path, synthetic=True, image=(3, 10, 10))
