import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy.commands.test import Score
from caffepy.commands.test import test as score
from caffepy.core.errors import ConfigError, DataError, SyncError, UsageError
from caffepy.device.gpus import count_gpus
from caffepy.proto.caffe_pb2 import NetParameter
from tests.nets import library
from tests.solver.cases import ENVIRONMENT

DIGITS = Path(__file__).parents[1] / "golden" / "digits"
MODEL, WEIGHTS = str(DIGITS / "train_val.prototxt"), str(DIGITS / "digits_iter_500.caffemodel")
DEADLINES = {"set-up": 60.0, "test": 60.0}
NUMBER = re.compile(r"(?<== )[\d.e+-]+|(?<=Loss: )[\d.e+-]+|(?<=\* 1 = )[\d.e+-]+")
Nodes = Callable[[int, Callable[[int], Any]], list[Any]]
FAULTY = (
    library.records(DIGITS / "digits_test_lmdb", 7)
    + library.layer(
        "Python",
        "faulty",
        "data",
        """python_param { module: "tests.parallel.faulty" layer: "Faulty" param_str: 'ORDERS' }""",
    )
    + library.layer("Reduction", "mean", "faulty", "reduction_param { operation: MEAN }")
)


def test_caffes_weights_score_as_caffe_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy.commands.devices")
    caplog.set_level(logging.INFO, "caffepy.commands.test")
    result = score(MODEL, [WEIGHTS], iterations=3)
    lines = result.table().splitlines()
    assert lines[0] == "accuracy = 0.983165"
    assert result.loss == pytest.approx(0.0564856, rel=1e-4)
    told = json.loads(result.json())
    assert told["iterations"] == 3
    assert told["outputs"]["accuracy"] == pytest.approx(0.983165, abs=1e-6)

    logged = [record.getMessage() for record in caplog.records]
    assert logged[:2] == ["Use CPU.", "Running for 3 iterations."]
    for batch in range(3):
        accuracy, loss = logged[2 + 2 * batch : 4 + 2 * batch]
        assert accuracy.startswith(f"Batch {batch}, accuracy = ")
        assert loss.startswith(f"Batch {batch}, loss = ")
    assert logged[8] == f"Loss: {result.loss:.6g}"
    assert logged[9:] == lines
    assert lines[1] == f"loss = {result.loss:.6g} (* 1 = {result.loss:.6g} loss)"


def test_no_iterations_are_refused() -> None:
    with pytest.raises(UsageError, match="iterations must be 1 or more, not 0"):
        score(MODEL, [WEIGHTS], iterations=0)


def test_weights_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"digits_iter_250.solverstate"):
        score(MODEL, [str(DIGITS / "digits_iter_250.solverstate")])


def logged_by(caplog: pytest.LogCaptureFixture, **where: Any) -> tuple[Score, list[str]]:
    caplog.clear()
    result = score(MODEL, [WEIGHTS], iterations=7, **where)
    return result, [
        record.getMessage() for record in caplog.records if record.name == "caffepy.commands.test"
    ]


def test_a_caffemodel_without_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.caffemodel"
    path.write_bytes(NetParameter(name="empty").SerializeToString())
    with pytest.raises(ConfigError) as caught:
        score(MODEL, [str(path)], iterations=1)
    assert str(caught.value) == f"{path} gives no weights to this net: none of its layers has any"


def test_weights_of_another_net_are_refused(tmp_path: Path) -> None:
    text = re.sub('name: "(conv|ip)', r'name: "my_\1', Path(MODEL).read_text())
    text = text.replace('source: "', f'source: "{DIGITS}/')
    (tmp_path / "net.prototxt").write_text(text)
    with pytest.raises(ConfigError) as caught:
        score(str(tmp_path / "net.prototxt"), [WEIGHTS], iterations=1)
    assert str(caught.value) == (
        f'{WEIGHTS} gives no weights to this net: its layers are "conv1", "conv2", "ip1", ..., '
        'those of the net "my_conv1", "my_conv2", "my_ip1", ...; names must agree'
    )
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("count", [2, 3, 8])
def test_several_nets_give_what_one_does(count: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy.commands.test")
    alone, expected = logged_by(caplog)
    together, logged = logged_by(caplog, cpu=count)
    assert logged == expected
    assert together.json() == alone.json()
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("caffepy rank")
    ]


@pytest.mark.parametrize("solvers", [(1, 1), (2, 1), (1, 1, 2), (1,) * 9])
def test_several_nodes_give_what_one_process_does(
    solvers: tuple[int, ...], as_nodes: Nodes
) -> None:
    """Seven batches: 9 nodes have none for two of them. Only the first has the weights."""

    def node(number: int) -> Score:
        weights = [WEIGHTS] if number == 0 else ["elsewhere.caffemodel"]
        return score(MODEL, weights, iterations=7, cpu=solvers[number], threads=1)

    alone = score(MODEL, [WEIGHTS], iterations=7)
    for result in as_nodes(len(solvers), node):
        assert isinstance(result, Score), result
        assert result.loss == pytest.approx(alone.loss, rel=1e-6)
        assert [name for name, _, _ in result.outputs] == [name for name, _, _ in alone.outputs]
        for (_, values, _), (_, expected, _) in zip(result.outputs, alone.outputs, strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_each_node_takes_its_batches(as_nodes: Nodes, tmp_path: Path) -> None:
    """A layer that counts: the batches of all nodes are those of one process, each once."""
    (tmp_path / "counting.py").write_text(
        "class Counting:\n"
        "    share_in_parallel = True\n"
        "    def setup(self, bottom, top): self.passes = 0\n"
        "    def reshape(self, bottom, top): top[0].reshape(1)\n"
        "    def forward(self, bottom, top):\n"
        "        top[0].data[...] = 10.0 ** self.passes\n"
        "        self.passes += 1\n"
    )
    text = 'layer { name: "c" type: "Python" top: "c" python_param { module: "counting" layer: "Counting" share_in_parallel: true } }'
    (tmp_path / "net.prototxt").write_text(text)

    def node(number: int) -> Score:
        return score(str(tmp_path / "net.prototxt"), [], iterations=5, threads=1)

    for result in as_nodes(3, node):
        assert json.loads(result.json())["outputs"] == {"c": [pytest.approx(11111 / 5)]}


def test_an_error_on_one_node_ends_all(as_nodes: Nodes, tmp_path: Path) -> None:
    """The last node's root meets it; one more solver of the first waits for the rest."""
    (tmp_path / "failing.py").write_text(
        "import threading\n"
        "class Failing:\n"
        "    passes = 0\n"
        "    def reshape(self, bottom, top): top[0].reshape(1)\n"
        "    def forward(self, bottom, top):\n"
        "        self.passes += 1\n"
        "        if self.passes == 2 and threading.current_thread().name == 'node 1': 1 / 0\n"
    )
    text = library.records(DIGITS / "digits_test_lmdb", 7) + library.layer(
        "Python", "f", "data", 'python_param { module: "failing" layer: "Failing" }'
    )
    (tmp_path / "net.prototxt").write_text(text)

    def node(number: int) -> Score:
        cpu = 2 - number
        return score(str(tmp_path / "net.prototxt"), [], iterations=9, cpu=cpu, threads=1)

    first, second = as_nodes(2, node)
    assert re.search(r'rank 2 \(host host1\).*layer "f".*division by zero', str(first)), first
    assert isinstance(second, SystemExit) or "division by zero" in str(second)


def test_nodes_must_be_given_the_same(as_nodes: Nodes) -> None:
    results = as_nodes(2, lambda number: score(MODEL, [WEIGHTS], iterations=3 + number, threads=1))
    assert (
        "the number of iterations of node 1 (host host1) is not that of node 0: 4 instead of 3"
        in str(results[0])
    )


def test_a_net_that_writes_is_for_one_process(as_nodes: Nodes, tmp_path: Path) -> None:
    text = library.records(DIGITS / "digits_test_lmdb", 7) + library.layer(
        "HDF5Output",
        "save",
        "data label",
        f'hdf5_output_param {{ file_name: "{tmp_path}/out.h5" }}',
        top="",
    )
    (tmp_path / "net.prototxt").write_text(text)
    results = as_nodes(2, lambda number: score(str(tmp_path / "net.prototxt"), [], threads=1))
    assert "an HDF5Output layer writes the batches of one process" in str(results[0])


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.gpus(4))])
@pytest.mark.gpus(2)
@pytest.mark.usefixtures("exact")
def test_several_gpus_give_what_one_does(count: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy.commands.test")
    alone, expected = logged_by(caplog, gpu="0")
    together, logged = logged_by(caplog, gpu=",".join(map(str, range(count))), deadlines=DEADLINES)
    assert [NUMBER.sub("", line) for line in logged] == [NUMBER.sub("", line) for line in expected]
    for line, other in zip(
        logged, expected, strict=True
    ):  # sums of atomic additions are rounded as they come
        own, others = (list(map(float, NUMBER.findall(text))) for text in (line, other))
        assert own == pytest.approx(others, rel=1e-4), line
    for (name, values, weight), (other_name, others, other_weight) in zip(
        together.outputs, alone.outputs, strict=True
    ):
        assert (name, weight) == (other_name, other_weight)
        np.testing.assert_allclose(values, others, rtol=1e-4)


@pytest.mark.gpus(2)
@pytest.mark.usefixtures("exact")
def test_all_gpus_test(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy.commands.devices")
    logged_by(caplog, gpu="all", deadlines=DEADLINES)
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name == "caffepy.commands.devices"
    ]
    assert messages[0].startswith("Using GPUs 0, 1")
    assert len(messages) == 1 + count_gpus()


def test_either_gpus_or_the_cpu() -> None:
    with pytest.raises(UsageError, match="not both"):
        score(MODEL, [WEIGHTS], gpu="0", cpu=2)


def faulty(folder: Path, **orders: Any) -> str:
    """A net of which a layer goes wrong in a rank and one of its passes."""
    path = folder / "faulty.prototxt"
    path.write_text(FAULTY.replace("ORDERS", json.dumps({"phase": 1, **orders})))
    return str(path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_in_one_ends_all(rank: int, tmp_path: Path) -> None:
    name = f"rank {rank}: " if rank else ""
    with pytest.raises(
        ConfigError, match=rf'^{name}[^:]*faulty.prototxt:\d+:\d+: layer "faulty".*it went wrong'
    ):
        score(faulty(tmp_path, what="raise", rank=rank, at=2), [], iterations=9, cpu=3)
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("caffepy rank")
    ]


def test_an_output_that_changes_its_shape_has_no_mean(tmp_path: Path) -> None:
    (tmp_path / "growing.py").write_text(
        "class Growing:\n"
        "    passes = 0\n"
        "    def reshape(self, bottom, top): top[0].reshape(1 + self.passes)\n"
        "    def forward(self, bottom, top): self.passes += 1\n"
    )
    text = 'layer { name: "g" type: "Python" top: "g" python_param { module: "growing" layer: "Growing" } }'
    (tmp_path / "net.prototxt").write_text(text)
    with pytest.raises(
        DataError, match=r'output "g" changed its shape between batches, from 1 \(1\) to 2 \(2\)'
    ):
        score(str(tmp_path / "net.prototxt"), [], iterations=3)


def test_json_of_what_is_not_finite() -> None:
    result = Score(1, float("nan"), [("a", np.array([np.inf, 1], np.float32), 0.0)])
    assert json.loads(result.json()) == {"iterations": 1, "loss": None, "outputs": {"a": [None, 1]}}
    assert "NaN" not in result.json()


DETECTIONS = """
import numpy as np

class Found:
    batches = 0
    def reshape(self, bottom, top):
        top[0].reshape(1, 1, 3, 7), top[1].reshape(1, 1, 2, 8)
    def forward(self, bottom, top):
        move = 0.011 * self.batches
        top[0].data[0, 0] = [
            [0, 1, 0.9, 0.1, 0.1, 0.5, 0.5 + move], [0, 1, 0.8, 0.2, 0.6, 0.4, 0.9],
            [1, 1, 0.5, 0.5, 0.5, 0.9, 0.9 + 10 * move]]
        top[1].data[0, 0] = [[0, 1, 0, 0.1, 0.1, 0.5, 0.5, 0], [1, 1, 0, 0.5, 0.5, 0.9, 0.9, 0]]
        self.batches += 1
"""
EVALUATED = """
layer { name: "f" type: "Python" top: "found" top: "truth"
  python_param { module: "found" layer: "Found" share_in_parallel: true } }
layer { name: "e" type: "DetectionEvaluate" bottom: "found" bottom: "truth" top: "eval"
  detection_evaluate_param { num_classes: 2 } }
"""


@pytest.mark.parametrize("cpu", [None, 3])
def test_cocos_figures_of_all_batches(cpu: int | None, tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text(DETECTIONS)
    (tmp_path / "net.prototxt").write_text(EVALUATED)
    result = score(str(tmp_path / "net.prototxt"), [], iterations=4, cpu=cpu, ap_version="COCO")
    said = json.loads(result.json())
    figures = said["coco"]["eval"]
    assert said["outputs"] == {"eval": pytest.approx(figures["AP"])}
    # eight true boxes; of scores 0.9 all four are true up to an overlap of 0.9, then four are false,
    # then those of 0.5 with overlaps 1, 0.78, 0.65, 0.55
    for name, true in (("AP50", 4), ("AP75", 2)):
        ends = [(4 + k) / (8 + k) for k in range(1, true + 1)]
        curve = [1.0] * 51 + [
            max(ends[k:]) for level in range(51, 101) if (k := -(-level * 8 // 100) - 5) < true
        ]
        assert figures[name] == pytest.approx(sum(curve) / 101)
    assert figures["AR_1"] == pytest.approx(np.mean([8, 7, 7, 6, 6, 6, 5, 5, 5, 3]) / 8)
    assert figures["AP_small"] is None
    one = score(str(tmp_path / "net.prototxt"), [], iterations=4, ap_version="101point")
    assert "coco" not in json.loads(one.json())


def test_precision_is_averaged_as_the_solver_beside_the_net_says(tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text(DETECTIONS)
    net, solver = tmp_path / "net.prototxt", tmp_path / "solver.prototxt"
    net.write_text(EVALUATED)
    plain = score(str(net), [], iterations=4)
    assert plain.table().splitlines()[1:] == [
        "average precision: Integral (unless --ap-version says another)"
    ]
    solver.write_text('net: "other.prototxt" ap_version: "11point"')
    assert score(str(net), [], iterations=4).ap_version == "Integral"
    solver.write_text('net: "net.prototxt" ap_version: "11point"')
    beside, given = (score(str(net), [], iterations=4, ap_version=v) for v in (None, "11point"))
    assert beside.outputs == given.outputs != plain.outputs
    assert beside.table().splitlines()[1] == f"average precision: 11point (as {solver} says)"
    assert json.loads(given.json())["ap_version"] == "11point"
    solver.write_text('train_net: "gone.prototxt" test_net: "net.prototxt" ap_version: "11point"')
    assert score(str(net), [], iterations=4).ap_version == "11point"


def test_a_data_layer_that_is_not_shared_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "constant.py").write_text(
        "class Constant:\n"
        "    def reshape(self, bottom, top): top[0].reshape(1)\n"
        "    def forward(self, bottom, top): top[0].data[...] = 3\n"
    )
    text = 'layer { name: "c" type: "Python" top: "c" python_param { module: "constant" layer: "Constant" SHARED } }'
    for shared, told in (("", 1), ("share_in_parallel: true", 0)):
        caplog.clear()
        (tmp_path / "net.prototxt").write_text(text.replace("SHARED", shared))
        result = score(str(tmp_path / "net.prototxt"), [], iterations=3, cpu=2)
        assert json.loads(result.json())["outputs"] == {"c": [3]}
        assert (
            sum("share_in_parallel: true" in record.getMessage() for record in caplog.records)
            == told
        )


def caffepy(model: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    weights = ["--weights", WEIGHTS]
    command = [
        sys.executable,
        "-m",
        "caffepy",
        "test",
        "--model",
        model,
        *weights,
        "--cpu",
        "3",
        *arguments,
    ]
    return subprocess.run(
        command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=300, check=False
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_ends_all(rank: int, tmp_path: Path) -> None:
    run = caffepy(faulty(tmp_path, what="SIGINT", rank=rank, at=2))
    assert run.returncode == 130, run.stderr[-2000:]


@pytest.mark.parametrize(
    ("rank", "how"), [(0, "the main thread does not answer"), (2, "Still at work.*: rank 2")]
)
def test_one_that_hangs_is_found_and_named(rank: int, how: str, tmp_path: Path) -> None:
    run = caffepy(faulty(tmp_path, what="hang", rank=rank, at=2), "--deadlines", "test=5")
    assert run.returncode == SyncError.exit_code
    assert f"rank {rank} made no progress for 5 s (test)" in run.stderr
    assert re.search(how, run.stderr), run.stderr[-2000:]
