"""NVIDIA GPUs as a topology: which reach each other's memory, and how fast.

Copies between any two devices are CUDA's `memcpyPeerAsync`, which goes through the host where there
is no peer access.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np

from caffepy.collectives.topology import Topology
from caffepy.core.errors import DeviceError, SyncError
from caffepy.device.gpus import gpu_properties, import_cupy

log = logging.getLogger(__name__)

PATTERN = 1 << 20
"""Bytes of the pattern that is sent to test a peer copy."""

LARGE, TIMES = 256 << 20, 5
"""Bytes of a copy and number of copies, to measure bandwidth."""

SMALL, MANY = 4, 200
"""The same, to measure latency."""

MOST_RANKS = 8
"""Most GPUs: CUDA lets one use the memory of 8 others."""

Gather = Callable[[Any], list[Any]]
"""All-gather of Python objects, called in each rank's thread."""


class Speed(NamedTuple):
    """Bandwidth and latency from the device at place `source` to the one at `destination`."""

    source: int
    destination: int
    gigabytes_per_s: float
    microseconds: float


def query(devices: Sequence[int]) -> Topology:
    """Return the topology of these GPUs, the root first; DeviceError if one does not exist."""
    properties = [gpu_properties(device) for device in devices]
    boards = [
        int(each["multiGpuBoardGroupID"]) if each.get("isMultiGpuBoard") else None
        for each in properties
    ]
    runtime = import_cupy().cuda.runtime
    access = tuple(
        tuple(a != b and bool(runtime.deviceCanAccessPeer(a, b)) for b in devices) for a in devices
    )
    return Topology(tuple(devices), tuple(boards), access)


def enable(device: int, others: Iterable[int]) -> list[int]:
    """Allow a GPU the memory of others; return those whose memory it could not use before.

    DeviceError if CUDA refuses: without NVSwitch a GPU has 8 such peers at most.
    """
    cupy, new = import_cupy(), []
    runtime = cupy.cuda.runtime
    with cupy.cuda.Device(device):
        for other in others:
            try:
                runtime.deviceEnablePeerAccess(other)
                new.append(other)
            except runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise DeviceError(
                        f"GPU {device} cannot use the memory of GPU {other} ({error}); --sync nccl "
                        "needs no such access, tree little"
                    ) from error
    return new


@contextmanager
def _enabled(a: int, b: int) -> Iterator[None]:
    """Allow two GPUs each other's memory in the block, unless they have it anyhow."""
    cupy = import_cupy()
    with ExitStack() as stack:
        for device, other in ((a, b), (b, a)):
            for peer in enable(device, [other]):
                stack.enter_context(cupy.cuda.Device(device))
                stack.callback(cupy.cuda.runtime.deviceDisablePeerAccess, peer)
        yield


def prepare(topology: Topology) -> Topology:
    """Test peer access pair by pair; warn of what does not work, return the topology without it.

    It is enabled for the test only: each schedule enables what it needs.
    """
    access = [list(row) for row in topology.access]
    for a, b in combinations(range(topology.size), 2):
        if not topology.reaches(a, b):
            continue
        first, second = topology.devices[a], topology.devices[b]
        with _enabled(first, second):
            for pair in ((first, second), (second, first)):
                try:
                    verify(*pair)
                except SyncError as error:
                    log.warning("%s", error)
                    access[a][b] = access[b][a] = False
    found = replace(topology, access=tuple(map(tuple, access)))
    if found != topology:
        os.environ.setdefault("NCCL_P2P_DISABLE", "1")
    return found


class _Ends:
    """A buffer on each of two devices, and a stream of the first."""

    def __init__(self, source: int, destination: int, size: int) -> None:
        self.cupy: Any = import_cupy()
        self.source, self.destination = source, destination
        with self.cupy.cuda.Device(destination):
            self.there = self.cupy.zeros(size, np.uint8)
        with self.cupy.cuda.Device(source):
            self.here = self.cupy.zeros(size, np.uint8)
            self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for other streams' work on the buffers, which the own stream does not wait for."""
        for device in (self.source, self.destination):
            self.cupy.cuda.Device(device).synchronize()

    def send(self, size: int) -> None:
        to, here = (self.there.data.ptr, self.destination), (self.here.data.ptr, self.source)
        self.cupy.cuda.runtime.memcpyPeerAsync(*to, *here, size, self.stream.ptr)

    def seconds(self, size: int, times: int) -> float:
        """Return the mean time of one copy of `size` bytes."""
        with self.cupy.cuda.Device(self.source):
            self.send(size)
            start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            start.record(self.stream)
            for _ in range(times):
                self.send(size)
            stop.record(self.stream)
            stop.synchronize()
            return float(self.cupy.cuda.get_elapsed_time(start, stop)) / times / 1e3


def verify(source: int, destination: int) -> None:
    """Send a random pattern from one GPU to the other; SyncError if it arrives damaged."""
    ends = _Ends(source, destination, PATTERN)
    sent = np.random.default_rng(source * 64 + destination).integers(0, 256, PATTERN, np.uint8)
    with ends.cupy.cuda.Device(source):
        ends.here.set(sent)
        ends.synchronize()
        ends.send(PATTERN)
        ends.stream.synchronize()
    with ends.cupy.cuda.Device(destination):
        arrived = ends.there.get()
    wrong = int(np.count_nonzero(arrived != sent))
    if wrong:
        raise SyncError(
            f"{wrong} of {PATTERN} bytes sent from GPU {source} to GPU {destination} arrived "
            "damaged: peer-to-peer copies do not work on this machine (an IOMMU or ACS setting is "
            "the usual cause); such pairs synchronize through the host"
        )


def measure(topology: Topology) -> list[Speed]:
    """Measure bandwidth and latency between each two devices, in both directions."""
    found = []
    for a, b in permutations(range(topology.size), 2):
        pair = topology.devices[a], topology.devices[b]
        with _enabled(*pair) if topology.reaches(a, b) else nullcontext():
            ends = _Ends(*pair, LARGE)
            fast, slow = ends.seconds(LARGE, TIMES), ends.seconds(SMALL, MANY)
        found.append(Speed(a, b, LARGE / fast / 1e9, slow * 1e6))
    return found
