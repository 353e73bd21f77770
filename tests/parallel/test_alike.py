"""Nodes whose data or libraries differ are named before they train."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.world import World
from caffepy.core.errors import CaffeError, ConfigError, DataError, DeviceError
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.device import Device
from caffepy.parallel import nodes
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import parse
from caffepy.solver import Solver
from tests.collectives.threads_world import run_nodes
from tests.solver import cases

NET = """layer {{ name: "images" type: "Data" top: "data" top: "label"
  data_param {{ source: "{}" batch_size: 2 backend: LMDB }} }}
  layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param {{ num_output: 2 }} }}
  layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}"""


def database(path: Path, first: int, last: int) -> str:
    with write_database(str(path)) as writer:
        for i in range(first, last + 1):
            writer.put(f"{i:05d}", array_to_datum(np.full((1, 2, 2), i, np.uint8), i % 2))
    return str(path)


def train(*paths: str) -> list[Any]:
    """Train on as many nodes, each with its data; return their iterations or errors."""

    def node(world: World) -> int:
        world.join(1)
        text = f"{cases.SETTINGS} net_param {{ {NET.format(paths[world.node])} }}"
        device = Device(seed=1)
        device.follows = world.node > 0
        root = Solver(parse(text, SolverParameter()), device=device, rank=world.node)
        failed = True
        try:
            with p2p_manager(root, [device], SyncOptions(), world=world):
                root.step(3)
            failed = False
            return root.iter
        finally:
            world.close(failed)
            root.close()

    return run_nodes(len(paths), node)


@contextmanager
def telling(world: World) -> Iterator[None]:
    """A block whose error goes to the other nodes."""
    try:
        yield
    except CaffeError as error:
        world.send_failure(error)
        raise


@pytest.mark.parametrize("ends", [(0, 8), (1, 9), (0, 10)])
def test_the_node_with_other_data_is_named(ends: tuple[int, int], tmp_path: Path) -> None:
    """Fewer or more records, or others of the same number: of the third node."""
    same = database(tmp_path / "a", 0, 9)
    assert train(same, database(tmp_path / "b", 0, 9)) == [3, 3]
    count, (first, last) = ends[1] - ends[0] + 1, ends
    told = train(same, same, database(tmp_path / "other", *ends))
    for error in told:
        assert isinstance(error, DataError)
        assert (
            "the data of node 2 (host host2, universal rank 2) is not that of node 0: "
            f'{count} records, from "{first:05d}" to "{last:05d}" instead of 10 records, from '
            '"00000" to "00009"'
        ) in str(error)
        assert 'layer "images" (Data)' in str(error)


def test_the_node_with_another_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int:
        return 22809 if threading.current_thread().name == "node 0" else 22205

    def node(world: World) -> None:
        world.join(2)
        gpu: Any = SimpleNamespace(is_cuda=True)
        group = RankGroup(2, world=world)
        group.watch_nodes()
        with telling(world):
            nodes.check_data([], gpu, group)

    monkeypatch.setattr(nodes, "nccl_version", version)
    for error in run_nodes(2, node):
        assert isinstance(error, DeviceError)
        assert str(error) == (
            "the version of NCCL of node 1 (host host1, universal ranks 2 to 3) is not that of "
            "node 0: 22205 instead of 22809"
        )


@pytest.mark.parametrize(
    ("first", "other", "told"),
    {
        "long texts": (
            ['layer {\n  name: "a"\n}\n' * 99, "force_backward: true\n"],
            ['layer {\n  name: "a"\n}\n' * 99, "force_backward: false\n"],
            "force_backward: false instead of force_backward: true",
        ),
        "a line more": ("a\nb", "a\nb\nc", "c instead of nothing"),
        "a flag": ("auto", "tree", "tree instead of auto"),
        "a flag not given": (None, "fp16", "fp16 instead of None"),
    }.values(),
)
def test_settings_are_compared_by_name_and_line(first: Any, other: Any, told: str) -> None:
    def node(world: World) -> None:
        world.join(1)
        with telling(world):
            nodes.check_alike(world, {"--cpu": "1", "net": other if world.node else first})

    for error in run_nodes(2, node):
        assert isinstance(error, ConfigError)
        named = "the net of node 1 (host host1, universal rank 1) is not that of node 0: "
        assert str(error) == named + told
