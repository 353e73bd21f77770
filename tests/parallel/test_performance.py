"""Phase timers: the parts of an iteration on several GPUs, by the GPUs' clocks."""

import logging
import re
from contextlib import closing
from pathlib import Path

import pytest
from google.protobuf import text_format

from caffepy.collectives import peers
from caffepy.commands.train import _baseline
from caffepy.device.cuda import CudaDevice
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from tests.parallel.cases import SETTINGS, net

pytestmark = pytest.mark.gpus(2)

LINE = r"    [\d.]+ images/s, [\d.]+ per solver; (data .*, forward .*, backward .*, synchronization .*, update .*, host.*)"


@pytest.mark.parametrize("capture", [True, False], ids=["replayed", "layer by layer"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("sync", ["nccl", "tree"])
def test_every_part_has_its_share(
    sync: str, passes: int, capture: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SETTINGS.replace("iter_size: 2", f"iter_size: {passes}").replace(
        "display: 1", "display: 6"
    )
    devices = [CudaDevice(rank) for rank in range(2)]
    text = f"random_seed: 3 {settings} max_iter: 13 snapshot_after_train: false net_param {{ {net(3)} }}"
    root = Solver(text_format.Parse(text, SolverParameter()), device=devices[0])
    root.capture = capture
    deadlines = {"step": 60.0, "set-up": 60.0, "test": 60.0}
    manager = P2PManager(
        root, devices, peers.prepare(peers.query(range(2))), SyncOptions(sync, deadlines=deadlines)
    )
    with caplog.at_level(logging.INFO, "caffepy"), manager:
        root.solve()
        for solver in manager.seconds():
            assert all(
                0 < solver[part] < 100
                for part in ("forward", "backward", "synchronization", "update")
            ), solver
            assert solver["data"] + solver["host"] > 0
    shown = [found for message in caplog.messages if (found := re.fullmatch(LINE, message))]
    assert len(shown) >= 1
    shares = [int(share) for share in re.findall(r"(\d+)%", shown[-1][1].partition(";")[0])]
    assert sum(shares) == pytest.approx(100, abs=4)
    assert any(re.match(r"    mean +[\d.]+%", message) for message in caplog.messages)
    assert any("the time." in message for message in caplog.messages)
    root.close()


def test_the_speed_of_one_gpu_is_that_of_a_run_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def solver(batch: int) -> Solver:
        text = f"random_seed: 3 base_lr: 0.1 lr_policy: 'fixed' net_param {{ {net(batch)} }} test_iter: 1 "
        return Solver(
            text_format.Parse(text + "test_interval: 9", SolverParameter()), device=CudaDevice(0)
        )

    now = 0.0
    with closing(solver(3)) as one, closing(solver(3)) as another, closing(solver(4)) as other:
        assert _baseline(one, 1) is None
        with monkeypatch.context() as clock:  # threads that wait need the real one
            clock.setattr("time.monotonic", lambda: now)
            for iteration in range(40):
                now += 1.0
                one.reporter.iterated(iteration, None, 0.1, 3)
            one.reporter.done(False)
        assert _baseline(another, 2) == pytest.approx(3)
        assert _baseline(other, 2) is None
