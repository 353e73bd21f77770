"""`caffepy train --cluster` on a cluster that `ray start` began, with a token, and with its store on
Redis if there is a redis-server.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from caffepy.cli import main
from caffepy.core.errors import STOPPED
from caffepy.parallel.parameter_server.ray_cluster import ENVIRONMENT
from caffepy.parallel.parameter_server.worker import ServedWorkers
from tests.cli.test_cluster import SOLVER

pytest.importorskip("ray", reason="Ray has no wheels for this Python")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
REDIS = shutil.which("redis-server")
SERVED = ("--nodes", "2", "--cpu")
SELDOM = ("--consistency", "ssp:1", "--every", "5")


class Head(NamedTuple):
    address: str
    session: int  # of the processes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def of_session(session: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(status.parent.name))
    return found


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """Ray's head, for two workers; its processes are a session."""
    port, store = free_port(), free_port()
    ray = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--head"]
    given = f"--port={port} --num-cpus=2 --object-store-memory=100000000 --include-dashboard=false"
    environment = {**os.environ, **ENVIRONMENT, **TOKEN}
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(dir="/tmp")  # names of sockets are short
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if REDIS:
            redis = [REDIS, "--port", str(store), "--bind", "127.0.0.1", "--save", ""]
            process = stack.enter_context(subprocess.Popen(redis, stdout=subprocess.DEVNULL))
            stack.callback(process.kill)
            environment["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{store}"
        started = subprocess.Popen(
            [*ray, *given.split(), "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        stack.callback(end, started.pid)
        told, _ = started.communicate(timeout=60)
        if started.returncode:
            pytest.skip(f"`ray start` did not start: {told[-300:]}")
        yield Head(f"127.0.0.1:{port}", started.pid)


def end(session: int) -> None:
    while left := of_session(session):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    for key, value in TOKEN.items():
        monkeypatch.setenv(key, value)
    return tmp_path


def train(*arguments: str) -> int:
    return main.run(["train", "--solver", "solver.prototxt", *arguments])


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ("", 2, "Ray refuses this process's token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN"),
        ("127.0.0.1:1", 7, "nobody answers at .*:1 .connection refused.: is it where `ray start"),
        ("host.invalid:6379", 7, "no host has the name host.invalid"),
    ],
)
def test_why_a_run_cannot_join_a_cluster_is_told_at_once(
    head: Head,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    given: str,
    code: int,
    told: str,
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    assert train("--cluster", given or head.address, *SERVED, *SELDOM) == code
    *_, last = capfd.readouterr().err.splitlines()
    assert re.match(f"caffepy: error: --cluster {given or head.address}.*{told}", last)


def test_a_name_that_no_name_server_has_is_enough(
    head: Head, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    resolve, cluster = socket.getaddrinfo, head.address.replace("127.0.0.1", "head.invalid")

    def of_hosts_file(host: str, *given: Any, **named: Any) -> Any:
        return resolve("127.0.0.1" if host == "head.invalid" else host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", of_hosts_file)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 64)
    assert train("--cluster", cluster, *SERVED, *SELDOM) == 2
    assert f"--cluster {cluster}: Ray refuses this process's token" in capfd.readouterr().err


def test_gradients_give_the_bits_of_training_in_step_also_after_a_stop(
    head: Head, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run begins on a local cluster, is stopped there, and ends on another."""
    iterated = ServedWorkers.iterated

    def stop_at_9(workers: ServedWorkers) -> None:
        iterated(workers)
        if workers.solver.iter == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ServedWorkers, "iterated", stop_at_9)
    (folder / "solver.prototxt").write_text(SOLVER.replace("max_iter: 40", "max_iter: 16"))
    assert train("--cpu", "4", "--sync", "tree", "--threads", "1") == 0
    want = (folder / "run_iter_16.caffemodel").read_bytes()
    for path in folder.glob("run*"):
        path.unlink()
    assert train("--cluster", "local", *SERVED, "2") == STOPPED  # solvers of each worker
    assert (folder / "run_iter_9.solverstate").exists()
    assert train("--cluster", head.address, *SERVED, "2", "--snapshot", "auto") == 0
    assert (folder / "run_iter_16.caffemodel").read_bytes() == want
    assert re.search(r"Worker 1: 7 pushes, [\d.]+ % of the time waiting", capsys.readouterr().err)


def test_a_run_goes_on_while_rays_store_is_away(
    head: Head, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (store,) = (
        process
        for process in of_session(head.session)
        if Path(f"/proc/{process}/comm").read_text().strip() == "gcs_server"
    )
    command = Path(f"/proc/{store}/cmdline").read_text().split("\0")[:-1]
    variables = Path(f"/proc/{store}/environ").read_text().split("\0")[:-1]
    environment = dict(variable.split("=", 1) for variable in variables)
    iterated, back = ServedWorkers.iterated, list[subprocess.Popen[bytes]]()

    def iterate(workers: ServedWorkers) -> None:
        iterated(workers)
        if workers.solver.iter == 10 and REDIS:
            os.kill(store, signal.SIGKILL)
        if workers.solver.iter == 30 and REDIS:
            time.sleep(4)  # so that it is missed
            back.append(subprocess.Popen(command, env=environment))

    monkeypatch.setattr(ServedWorkers, "iterated", iterate)
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    try:
        assert train("--cluster", "auto", *SERVED, *SELDOM) == 0
    finally:
        for process in back:
            process.kill()
            process.wait()
    assert (folder / "run_iter_40.caffemodel").exists()
    shown = capfd.readouterr().err
    assert "Worker 1: 8 pushes" in shown
    assert "Failed to connect" not in shown  # which Ray would say
    if not REDIS:
        pytest.skip("there is no redis-server: the store was not taken away")
    assert "Ray's head does not answer; the run goes on without it for 40 s" in shown
