"""Run a command on the first of two hosts with Ray: network namespaces of one machine.

usage (as root): python benchmarks/two_hosts.py [--rate MBIT] [--delay MS] COMMAND ...

The hosts are 10.98.0.1, where Ray's head listens on port 6379, and 10.98.0.2, which has the
resource "far" and one CPU for workers. The link carries --rate Mbit/s in each direction, or what
the machine can. With --delay each frame arrives that many ms late; the link goes through this program
then, since not every kernel delays by itself.
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

HOSTS = {f"ps{i}-{os.getpid()}": f"10.98.0.{i}" for i in (1, 2)}
FIRST, SECOND = HOSTS
LINK = "wire"  # the interface of each host
QUEUE = 4 << 20  # bytes that wait for the link; what comes then is dropped

IFF_TAP, IFF_NO_PI, TUNSETIFF, CLONE_NEWNET = 0x0002, 0x1000, 0x400454CA, 0x40000000


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def within(host: str, command: Sequence[str]) -> list[str]:
    return ["ip", "netns", "exec", host, *command]


@contextmanager
def hosts() -> Iterator[None]:
    """Two namespaces without a link."""
    for host in HOSTS:
        ip(f"netns add {host}")
        ip(f"-n {host} link set lo up")
    try:
        yield
    finally:
        for host in HOSTS:
            ip(f"netns del {host}")


def set_up() -> None:
    """Give the ends of the link their addresses; Ray finds its own by the default route."""
    for host, address in HOSTS.items():
        ip(f"-n {host} addr add {address}/24 dev {LINK}")
        ip(f"-n {host} link set {LINK} up")
        ip(f"-n {host} route add default dev {LINK}")


def join_directly(rate: float) -> None:
    ip(f"link add {LINK} netns {FIRST} type veth peer name {LINK} netns {SECOND}")
    for host in HOSTS if rate else ():
        shaper = f"tc qdisc add dev {LINK} root tbf rate {rate}mbit burst 1mb latency 50ms"
        subprocess.run(within(host, shaper.split()), check=True)
    set_up()


def end_of_link(host: str) -> int:
    """Return the file of a new interface in this namespace: it gives and takes frames."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{host}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no namespace {host}")
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH14x", LINK.encode(), IFF_TAP | IFF_NO_PI)
        fcntl.ioctl(file, TUNSETIFF, request)
        libc.setns(here.fileno(), CLONE_NEWNET)
    return file


@contextmanager
def joined_late(rate: float, delay: float) -> Iterator[None]:
    """Join the hosts by a thread that delays all frames by `delay` seconds."""
    ends = [end_of_link(host) for host in HOSTS]
    set_up()
    over = threading.Event()
    thread = threading.Thread(target=carry, args=(ends, rate, delay, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for file in ends:
            os.close(file)


def carry(ends: Sequence[int], rate: float, delay: float, over: threading.Event) -> None:
    """Take frames at each end and give them to the other: at `rate` Mbit/s, or at once if it is 0,
    and `delay` seconds later.
    """
    queue: list[tuple[float, int, int, bytes]] = []
    free, waiting, count = [0.0, 0.0], [0, 0], 0
    while not over.is_set():
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, _, to, frame = heapq.heappop(queue)
            waiting[to] -= len(frame)
            os.write(ends[to], frame)
        wait = queue[0][0] - time.monotonic() if queue else 0.1
        for file in select.select(ends, [], [], min(max(wait, 0.0), 0.1))[0]:
            to, frame = 1 - ends.index(file), os.read(file, 1 << 16)
            if waiting[to] + len(frame) <= QUEUE:
                sent = max(time.monotonic(), free[to])
                free[to] = sent + (len(frame) * 8e-6 / rate if rate else 0)
                waiting[to], count = waiting[to] + len(frame), count + 1
                heapq.heappush(queue, (free[to] + delay, count, to, frame))


@contextmanager
def ray(folder: str) -> Iterator[None]:
    """Ray on both hosts."""
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.urandom(16).hex(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_free_objects_period_milliseconds": "0",
        "RAY_worker_niceness": "0",
    }
    start = [os.path.join(os.path.dirname(sys.executable), "ray"), "start"]
    start += ["--object-store-memory=2000000000"]
    address = HOSTS[FIRST]
    head = ["--head", "--port=6379", "--include-dashboard=false", "--num-cpus=1"]
    starts = {
        FIRST: [*start, *head, f"--node-ip-address={address}", f"--temp-dir={folder}"],
        SECOND: [
            *(*start, f"--address={address}:6379", f"--node-ip-address={HOSTS[SECOND]}"),
            *("--num-cpus=1", '--resources={"far": 1000}'),
        ],
    }
    try:
        for host, command in starts.items():
            subprocess.run(within(host, command), check=True, stdout=subprocess.DEVNULL)
        yield
    finally:
        for host in HOSTS:
            pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True)
            subprocess.run(["kill", "-9", *pids.stdout.split()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=0)
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir="/tmp"))
        stack.enter_context(hosts())
        if options.delay:
            stack.enter_context(joined_late(options.rate, options.delay / 1e3))
        else:
            join_directly(options.rate)
        stack.enter_context(ray(folder))
        done = subprocess.run(within(FIRST, options.command))
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
