"""The model of many nodes, held to the figures that were worked out for three nets and four links.

Those are rounded: of exposed milliseconds to two digits, of efficiencies to hundredths.
"""

import json
from pathlib import Path

import pytest

from caffepy import models
from caffepy.cli import main
from caffepy.collectives.synchronizer import WIRES
from caffepy.commands.bench.simulate import (
    KAPPA,
    Cluster,
    Load,
    Point,
    all_reduce,
    exposed,
    parse,
    point,
    simulate,
)
from caffepy.core.errors import ConfigError, UsageError
from caffepy.proto.text import read_net

NODES = (1, 2, 4, 16, 64, 256)
LOADS = {
    "CaffeNet": Load(4 * 61e6, 4.2e-3, 2.4e-3, 0.5),
    "ResNet-50": Load(4 * 25.6e6, 16e-3, 10e-3, 0.15),
    "VGG16": Load(4 * 138e6, 12.9e-3, 8e-3, 0.6),
}
LINKS = {
    "8x400 Gb/s": (45e9, 5e-6),
    "1x400 Gb/s": (45e9 / 8, 5e-6),
    "100 GbE": (10e9 / 8, 25e-6),
    "10 GbE": (1.15e9 / 8, 40e-6),
}
FIGURES = {
    ("8x400 Gb/s", "CaffeNet"): ".59/.88 .63/.87 .64/.87 .76/.85 .77/.85 .78/.84",
    ("8x400 Gb/s", "ResNet-50"): ".08/1.00 .08/.99 .08/.99 .10/.99 .10/.99 .11/.99",
    ("8x400 Gb/s", "VGG16"): "1.58/.89 1.68/.89 1.72/.88 1.97/.87 2.03/.86 2.05/.86",
    ("1x400 Gb/s", "CaffeNet"): ".59/.88 3.2/.57 5.9/.42 8.0/.34 8.6/.33 8.6/.33",
    ("1x400 Gb/s", "ResNet-50"): ".08/1.00 .35/.98 .52/.97 .67/.96 .70/.96 .70/.96",
    ("1x400 Gb/s", "VGG16"): "1.58/.89 7.5/.63 11/.53 15/.46 17/.43 17/.43",
    ("100 GbE", "CaffeNet"): ".59/.88 22/.16 34/.11 44/.09 47/.08 47/.08",
    ("100 GbE", "ResNet-50"): ".08/1.00 1.6/.91 5.6/.74 10/.62 11/.60 11/.59",
    ("100 GbE", "VGG16"): "1.58/.89 48/.21 75/.15 97/.12 103/.11 103/.11",
    ("10 GbE", "ResNet-50"): ".08/1.00 79/.17 124/.11 158/.09 169/.09 169/.09",
}


@pytest.mark.parametrize(("link", "net"), FIGURES)
def test_the_model_gives_the_figures_that_were_worked_out(link: str, net: str) -> None:
    for nodes, cell in zip(NODES, FIGURES[link, net].split(), strict=True):
        ms, efficiency = cell.split("/")
        found = point(LOADS[net], Cluster(nodes, 8, *LINKS[link]), 1)
        digit = 10.0 ** -len(ms.partition(".")[2])
        assert found.exposed_ms == pytest.approx(float(ms), abs=0.501 * digit), nodes
        assert found.efficiency == pytest.approx(float(efficiency), abs=0.00501), nodes
        assert found.images_per_s == pytest.approx(
            8 * nodes / LOADS[net].seconds * found.efficiency
        )


ROUNDED = {  # efficiency in bf16
    ("1x400 Gb/s", "CaffeNet"): (0.88, 0.75, 0.67, 0.59, 0.57, 0.57),
    ("1x400 Gb/s", "ResNet-50"): (1.00, 0.99, 0.98, 0.98, 0.98, 0.98),
    ("1x400 Gb/s", "VGG16"): (0.89, 0.77, 0.69, 0.64, 0.63, 0.63),
    ("100 GbE", "CaffeNet"): (0.88, 0.30, 0.21, 0.16, 0.16, 0.16),
    ("100 GbE", "ResNet-50"): (1.00, 0.95, 0.93, 0.91, 0.91, 0.91),
    ("100 GbE", "VGG16"): (0.89, 0.39, 0.28, 0.22, 0.21, 0.21),
    ("10 GbE", "ResNet-50"): (1.00, 0.32, 0.21, 0.18, 0.17, 0.17),
}


@pytest.mark.parametrize(("link", "net"), ROUNDED)
def test_bf16_gives_the_figures_that_were_worked_out(link: str, net: str) -> None:
    """Those leave out the casts, and send float32 in a node."""
    for nodes, efficiency in zip(NODES, ROUNDED[link, net], strict=True):
        found = point(LOADS[net], Cluster(nodes, 8, *LINKS[link]), 1, "bf16")
        assert found.efficiency == pytest.approx(efficiency, abs=0.025), nodes


def test_bf16_costs_casts_where_the_wire_is_fast() -> None:
    load = LOADS["CaffeNet"]
    fast = [point(load, Cluster(2, 8, *LINKS["8x400 Gb/s"]), 1, wire) for wire in WIRES]
    assert fast[1].all_reduce_ms == pytest.approx(
        1e3
        * (all_reduce(load.bytes / 2, Cluster(2, 8, 45e9, 5e-6)).seconds + load.bytes * 5 / 4e12)
    )
    alone = [point(load, Cluster(1, 8, *LINKS["8x400 Gb/s"]), 1, wire) for wire in WIRES]
    assert alone[0] == alone[1]


def test_the_measured_kappas_are_those_of_the_figures() -> None:
    assert {name: load.kappa for name, load in LOADS.items()} == KAPPA


def test_a_ring_or_a_tree_whichever_is_faster() -> None:
    small = all_reduce(1e3, Cluster(256, 8, 45e9, 5e-6))
    assert small.outside == pytest.approx(2 * 8 * 5e-6 + 2e3 / (8 * 45e9))
    assert small.waiting == pytest.approx(80e-6)
    large = all_reduce(1e9, Cluster(4, 8, 45e9, 5e-6))
    assert large.outside == pytest.approx(2 * 3 / 4 * 1e9 / (8 * 45e9) + 2 * 3 * 5e-6)
    alone = all_reduce(1e9, Cluster(1, 1, 45e9, 5e-6))
    assert alone.seconds == 0
    assert exposed(alone.seconds, 0.001, 0.5) == 0


def test_what_limits_is_named() -> None:
    caffenet, resnet = LOADS["CaffeNet"], LOADS["ResNet-50"]
    assert point(resnet, parse("nodes=64 gpus=8 nic=8x400"), 1).bottleneck == "computing"
    assert point(caffenet, parse("nodes=1 gpus=8 nic=8x400"), 1).bottleneck == (
        "bandwidth in the node"
    )
    assert point(caffenet, parse("nodes=4 gpus=8 nic=1x100"), 1).bottleneck == (
        "bandwidth between nodes"
    )
    tiny = Load(1e5, 1e-4, 0.0, 1.0)
    assert point(tiny, parse("nodes=64 gpus=8 nic=8x400"), 1).bottleneck == "latency between nodes"


def test_clusters_are_parsed() -> None:
    assert parse("nodes=64 gpus=8 nic=8x400") == (64, 8, pytest.approx(45e9), 5e-6)
    assert parse("nic=1x400,gpus=8, nodes=2") == (2, 8, pytest.approx(45e9 / 8), 5e-6)
    assert parse("nodes=1 gpus=8 nic=1x100") == (1, 8, pytest.approx(10e9 / 8), 25e-6)
    assert parse("nodes=1 gpus=1 nic=1x100rdma") == (1, 1, pytest.approx(0.9 * 12.5e9), 5e-6)
    assert parse("nodes=2 gpus=1 nic=1x3.2measured latency=62.5us") == (
        *(2, 1, pytest.approx(0.4e9)),
        pytest.approx(62.5e-6),
    )
    assert parse("latency=7us nodes=2 gpus=2 nic=1x100tcp") == (
        *(2, 2, pytest.approx(5e9)),
        pytest.approx(7e-6),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nodes=64",
        "nodes=0 gpus=8 nic=8x400",
        "nodes=2 gpus=8 nic=400",
        "nodes=2 gpus=8 nic=1x0",
        "nodes=2 gpus=8 nic=8x400 disks=3",
        "nodes=2 nodes=2 gpus=8 nic=8x400",
        "nodes=-1 gpus=8 nic=8x400",
        "nodes=2 gpus=8 nic=8x400 latency=3",
        "nodes=2 gpus=8 nic=8x400 latency=us",
    ],
)
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"--simulate: .*nodes=64 gpus=8 nic=8x400|carries nothing"
    ):
        parse(text)


ON_FOUR = {  # on H200 (BENCHMARKS.md): milliseconds on one; images/s by number of GPUs, in each run
    ("caffenet", "tf32"): (8.938, 0.06, {2: [55_449], 4: [109_195]}),
    ("caffenet", "bf16"): (4.220, 0.06, {2: [115_902, 110_895], 4: [224_776]}),
    ("vgg16", "tf32"): (28.67, 0.07, {2: [4_393], 4: [8_694]}),
    ("vgg16", "bf16"): (13.07, 0.09, {2: [9_575], 4: [19_011]}),
    ("resnet50", "bf16"): (16.07, 0.11, {2: [15_634, 15_318], 4: [31_069]}),
    ("googlenet", "tf32"): (17.11, 0.12, {4: [29_483, 29_484]}),
    ("googlenet", "bf16"): (9.033, 0.07, {4: [55_381, 55_535]}),
    ("lenet", "tf32"): (0.142, 0.05, {4: [425_755, 622_868]}),
    ("lenet", "bf16"): (0.1406, 0.05, {2: [524_548, 518_860], 4: [533_988, 367_986]}),
    ("cifar10_quick", "tf32"): (0.406, 0.05, {4: [1_675_317]}),
    ("cifar10_quick", "bf16"): (0.3006, 0.05, {4: [2_228_009, 1_791_698]}),
}
BATCHES = {"lenet": 64, "vgg16": 64, "googlenet": 128, "resnet50": 128}
BOUND = 0.3


EIGHT_AS_ONE = {  # the same in bf16 since eight short iterations are one graph
    "lenet": (0.0986, 0.0117, {2: [1_093_691, 1_108_555, 1_114_493], 4: [1_937_773]}),
    "cifar10_quick": (0.2242, 0.0133, {2: [2_141_333, 2_148_118], 4: [4_133_085]}),
    "caffenet": (3.714, 0.07, {2: [130_003], 4: [246_263]}),
    "alexnet": (3.849, 0.094, {2: [123_664], 4: [237_264]}),
    "googlenet": (6.24, 0.072, {2: [39_659], 4: [78_154]}),
    "resnet50": (12.68, 0.085, {2: [19_676, 19_693], 4: [38_914]}),
    "vgg16": (11.21, 0.09, {4: [21_978]}),
}


def modelled(
    name: str, precision: str, ms: float, host_ms: float, gpus: int, folder: Path
) -> Point:
    """Return what the model says of GPUs of one node, of which one takes these milliseconds."""
    batch, file = BATCHES.get(name, 256), folder / "one.json"
    image = (1, 28, 28) if name == "lenet" else (3, 32, 32) if name == "cifar10_quick" else None
    path = models.path(name, "train_val")
    assert path
    told = {"net": read_net(path).name, "batch": batch, "ms": ms, "host_ms": host_ms}
    file.write_text(json.dumps({**MEASURED, **told, "precision": precision}))
    cluster = f"nodes=1 gpus={gpus} nic=1x100"
    return simulate(solver(name), cluster, measured=str(file), image=image).asked


@pytest.mark.parametrize(("name", "precision"), ON_FOUR)
def test_what_was_measured_on_gpus_of_one_node(name: str, precision: str, tmp_path: Path) -> None:
    ms, host_ms, of_counts = ON_FOUR[name, precision]
    for gpus, measured in of_counts.items():
        found = modelled(name, precision, ms, host_ms, gpus, tmp_path)
        for rate in measured:
            assert abs(found.images_per_s / rate - 1) < BOUND, (gpus, rate)
        assert (found.bottleneck == "the host") == (ms < 0.5)


@pytest.mark.parametrize("name", EIGHT_AS_ONE)
def test_what_was_measured_where_iterations_are_one_graph(name: str, tmp_path: Path) -> None:
    ms, host_ms, of_counts = EIGHT_AS_ONE[name]
    for gpus, measured in of_counts.items():
        found = modelled(name, "bf16", ms, host_ms, gpus, tmp_path)
        for rate in measured:
            assert abs(found.images_per_s / rate - 1) < 0.15, (gpus, rate)


MEASURED = {
    "net": "CaffeNet",
    "device": "NVIDIA H200",
    "precision": "bf16",
    "data": "synthetic",
    "batch": 256,
    "captured": True,
    "fused": True,
    "iterations": 70,
    "windows": [60000.0],
    "images_per_s": 60952.0,
    "spread": 0.0,
    "ms": 4.2,
    "host_ms": None,
    "shares": {"data": 0.0, "forward": 0.35, "backward": 0.57, "update": 0.08},
    "memory": {"driver": 1, "pool": 1},
    "loss": 6.9,
}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(MEASURED))
    return path


def solver(name: str) -> str:
    path = models.path(name, "solver")
    assert path
    return path


def test_a_net_from_its_definition_and_measured_times(measured: Path) -> None:
    found = simulate(solver("caffenet"), "nodes=48 gpus=8 nic=8x400", measured=str(measured))
    assert found.gradient_mb == pytest.approx(4 * 60.965224)
    assert found.kappa == 0.5
    assert [p.nodes for p in found.points] == [1, 2, 4, 8, 16, 32, 48, *(64 << i for i in range(5))]
    assert found.asked == found.points[6]
    assert found.points[4].efficiency == pytest.approx(0.85, abs=0.005)
    assert found.points[0].gpus == 8
    lines = found.table().splitlines()
    assert lines[0] == (
        "CaffeNet, bf16, batch 256 each, as measured on one NVIDIA H200: 4.200 ms an iteration"
    )
    assert lines[-1].startswith("48 nodes: ")
    assert lines[1].endswith("45.00 GB/s from each GPU to other nodes, 5 us a message")
    assert len(lines) == 4 + 12 + 1


def test_the_cpu_is_no_device_of_many(measured: Path) -> None:
    measured.write_text(json.dumps({**MEASURED, "device": "the CPU"}))
    found = simulate(solver("caffenet"), "nodes=2 gpus=8 nic=8x400", measured=str(measured))
    assert "as measured on the CPU: 4.200 ms an iteration" in found.table()


def test_kappa_of_another_net_is_by_its_fully_connected_layers(measured: Path) -> None:
    measured.write_text(json.dumps({**MEASURED, "net": "AlexNet"}))
    found = simulate(solver("alexnet"), "nodes=2 gpus=8 nic=8x400", measured=str(measured))
    assert found.kappa == pytest.approx(0.1 + 0.5 * 58631144 / 60965224)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"net": 1}', json.dumps({**MEASURED, "ms": "x"})]
)
def test_a_file_of_something_else_is_refused(text: str, measured: Path) -> None:
    measured.write_text(text)
    with pytest.raises(ConfigError, match=r"one\.json: this is no output of caffepy bench train"):
        simulate(solver("caffenet"), "nodes=2 gpus=8 nic=8x400", measured=str(measured))


def test_times_of_another_net_are_refused(measured: Path) -> None:
    with pytest.raises(ConfigError, match='the times are of the net "CaffeNet", not of "LeNet"'):
        simulate(
            solver("lenet"), "nodes=2 gpus=8 nic=8x400", measured=str(measured), image=(1, 28, 28)
        )
    with pytest.raises(ConfigError, match="cannot read the measured times: no such file"):
        simulate(solver("caffenet"), "nodes=2 gpus=8 nic=8x400", measured="none.json")


def test_the_command(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "nodes=64 gpus=8 nic=8x400"
    command = ["bench", "scaling", "--model", "caffenet", "--simulate", cluster]
    assert main.run([*command, "--measured", str(measured), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["asked"]["nodes"] == 64
    assert told["asked"]["exposed_ms"] == pytest.approx(0.77, abs=0.01)
    assert main.run([*command, "--measured", str(measured), "--wire", "bf16"]) == 0
    assert (
        "at least 50% of it does not; bf16 where there are several nodes" in capsys.readouterr().out
    )
    assert main.run([*command, "--sync", "tree"]) == 2
    assert main.run(["bench", "scaling", "--model", "lenet", "--plot", "x.png"]) == 2
    pytest.importorskip("matplotlib")
    picture = tmp_path / "model.png"
    assert main.run([*command, "--measured", str(measured), "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 1000


def test_without_a_file_one_device_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "scaling", "--model", "lenet", "--batch", "2", "--windows", "1", "--json"]
    assert main.run([*command, "--simulate", "nodes=2 gpus=2 nic=1x10"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["net"], told["device"], told["batch"]) == ("LeNet", "the CPU", 2)
    assert 0 < told["overlap_ms"] < told["ms"]
