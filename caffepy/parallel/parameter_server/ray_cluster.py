"""The connection of this process to a cluster of Ray: on this machine, HOST:PORT or "auto"."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from caffepy.core.errors import CaffeError, SyncError, UsageError, reason
from caffepy.device.threads import num_threads
from caffepy.parallel.parameter_server.embedded_ray import EmbeddedRay
from caffepy.parallel.parameter_server.ray_calls import import_ray
from caffepy.parallel.parameter_server.ray_engine import ANSWERS, NAMESPACE, RayEngine

log = logging.getLogger(__name__)

LOCAL = "local"
"""The cluster that is started on this machine, and ends with this process."""

STORE = 256 << 20
"""Least bytes of the object store of a local cluster."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_health_check_period_ms": "1000",  # these hear of a host that is cut off within 4 s
    "RAY_health_check_failure_threshold": "3",
    "RAY_grpc_client_keepalive_time_ms": "1000",
    "RAY_grpc_client_keepalive_timeout_ms": "2000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",  # of this process, which Ray ends after 60
    "RAY_free_objects_period_milliseconds": "0",  # else the store takes new memory for a second
    "RAY_worker_niceness": "0",  # 15 by default: less CPU time for them than for the first worker
}
"""Variables that Ray reads from the environment; `ray start` needs the same on each host."""


def check_address(cluster: str) -> None:
    """Raise UsageError unless this is "local", "auto" or "HOST:PORT"."""
    host, _, port = cluster.rpartition(":")
    is_address = host and port.isdecimal() and 0 < int(port) < 1 << 16
    if cluster not in (LOCAL, "auto") and not is_address:
        raise UsageError(f"--cluster {cluster} is none of local, auto and HOST:PORT")


def connect(cluster: str, name: str, size: int = 0, shared: bool = False) -> RayEngine:
    """Return the engine of the training `name` on a cluster: "local", "HOST:PORT" or "auto".

    A local cluster has one node that listens on 127.0.0.1 only, and an object store for parameters
    of `size` bytes; if it is `shared`, processes that have the token may train on it. UsageError if
    Ray is not installed, or the cluster wants a token that this process does not have; SyncError if
    nobody answers.
    """
    check_address(cluster)
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    ray, embedded = import_ray(f"--cluster {cluster}"), None
    # Ray's switch for systems on which it serves one host only: if off, it is on 127.0.0.1
    loopback = cluster == LOCAL or cluster.startswith("127.")
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = not loopback
    if cluster == LOCAL:
        if shared:
            _use_token(cluster)
        elif not _has_token():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        _set_token_mode()
        embedded = EmbeddedRay(num_threads() if shared else 1, max(STORE, 8 * size))
        address = embedded.address
    else:
        _use_token(cluster)
        address = _reach(cluster)
    try:
        with _own_signals():
            ray.init(
                address,
                namespace=f"{NAMESPACE}{name}",
                configure_logging=False,
                log_to_driver=False,
            )
    except BaseException as error:
        if embedded:
            embedded.close()
        if isinstance(error, OSError | RuntimeError | ValueError | ray.exceptions.RayError):
            raise _refusal(cluster, error) from error
        raise
    return RayEngine(embedded)


def _reach(cluster: str) -> str:
    """Return the address of a cluster that answers, and takes this process's token: Ray itself
    tries for minutes.
    """
    ray = import_ray()
    address = _found() if cluster == "auto" else cluster
    try:
        address = str(ray._private.services.canonicalize_bootstrap_address(address))
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), ANSWERS) as connection:
            host = connection.getpeername()[0]  # Ray asks a name server first of all
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    except socket.gaierror as error:
        raise SyncError(f"--cluster {cluster}: no host has the name {host}") from error
    except OSError as error:
        raise SyncError(
            f"--cluster {cluster}: nobody answers at {address} ({reason(error)}): is it where "
            "`ray start --head` runs, with this --port, and open to this host?"
        ) from error

    answered: Future[None] = Future()

    def ask() -> None:
        try:
            ray._raylet.GcsClient(address=address)
            answered.set_result(None)
        except BaseException as error:
            answered.set_exception(error)

    threading.Thread(target=ask, name="caffepy-reach", daemon=True).start()
    with _quiet():
        try:
            answered.result(ANSWERS)
        except Exception as error:
            raise _refusal(cluster, error) from error
    return address


def _found() -> str:
    """Return the address of the cluster that "auto" is: that of RAY_ADDRESS, or of this host."""
    try:
        found: str = import_ray()._private.services.canonicalize_bootstrap_address("auto")
    except ConnectionError as error:
        raise SyncError(
            "--cluster auto: no Ray runs on this host: start it with `ray start --head`, or with "
            "`ray start --address=HOST:PORT` where it runs on another; or give --cluster HOST:PORT"
        ) from error
    return found


def _refusal(cluster: str, error: BaseException) -> CaffeError:
    """Return the message for an error of Ray's while a process connects."""
    ray = import_ray()
    if isinstance(error, ray.exceptions.AuthenticationError):
        return UsageError(f"--cluster {cluster}: Ray refuses this process's token: {TOKEN}")
    reason = " ".join(str(error.__cause__ or error).split())
    if isinstance(error, TimeoutError):
        reason = f"no answer for {ANSWERS:g} s"
    return SyncError(f"--cluster {cluster}: no cluster of Ray takes this process ({reason})")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Return a block in which what Ray writes to the descriptor of stderr goes to the log, as
    debug.
    """
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                log.debug("Ray: %s", line)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Return a block in which, and after which, SIGTERM does what it did before: Ray's handler,
    which it sets as it starts, ends the process at once.
    """
    utils, before = import_ray()._private.utils, signal.getsignal(signal.SIGTERM)
    set_handler, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


TOKEN = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN (or ~/.ray/auth_token, which `ray get-auth-token "
    "--generate` writes), to the same on all hosts before `ray start`, and here"
)


def _use_token(cluster: str) -> None:
    """Make Ray ask for a token, unless the environment says on purpose that there is none."""
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and not _has_token():
        raise UsageError(
            f"--cluster {cluster} needs a token, else anybody who reaches it may run code on it: "
            f"{TOKEN}; RAY_AUTH_MODE=disabled goes on without"
        )
    _set_token_mode()


def _set_token_mode() -> None:
    """Use the token, unless the environment says something else: Ray has read both already."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    raylet = import_ray()._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _has_token() -> bool:
    named = any(os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").exists()
