"""Costs of waiting for other nodes, and how fast arrays go between them.

usage: mpirun -n 2 python benchmarks/world.py [--rounds 2000] [--mb 244] [--repeat 5]
(more processes than cores: mpirun --oversubscribe)

It prints the time of a barrier of all nodes; the part of a core that a node takes while it waits
3 s for another; and MB/s of an array that World.exchange carries from node 0 to node 1, and in both
directions at once, and that solvers on the CPU average (HostSync), beside mpi4py's blocking Send,
Sendrecv and Allreduce. Medians; of the barrier the 99th percentile, too.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import numpy as np

from caffepy.collectives import mpi
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.sync import choose
from caffepy.collectives.synchronizer import FlatParams
from caffepy.collectives.topology import all_joined
from caffepy.collectives.world import World
from caffepy.device.device import Device

WAITS = 3.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--mb", type=float, default=244, help="of caffenet's gradients")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    transport = mpi.start()
    mpi.widen_affinity(transport.processes_on_host, transport.rank_on_host)
    from mpi4py import MPI

    world, comm = World(transport), MPI.COMM_WORLD
    node = world.node

    def say(text: str) -> None:
        if node == 0:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def seconds(call: Callable[[], object], repeat: int) -> list[float]:
        """Seconds of each call, after one that does not count."""
        found = []
        for _ in range(repeat + 1):
            comm.Barrier()
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        return found[1:]

    say(f"{world.nodes} nodes on {', '.join(sorted(set(world.hosts)))}")
    for name, barrier in {"World.barrier": world.barrier, "MPI_Barrier": comm.Barrier}.items():
        found = seconds(barrier, args.rounds)
        last = quantiles(found, n=100)[-1]
        say(f"{name}: {median(found) * 1e6:.0f} us, 99 % under {last * 1e6:.0f} us")

    world.barrier()
    begin, used = time.perf_counter(), time.process_time()
    if node == 0:
        time.sleep(WAITS)
    world.barrier()
    waited, used = time.perf_counter() - begin, time.process_time() - used
    most = max(world.gather(used / waited)[1:])
    say(f"waiting {WAITS:g} s: {100 * most:.1f} % of a core")

    mine = np.full(int(args.mb * 1e6 / 4), node + 1, np.float32)
    came = np.empty_like(mine)
    pair, other = node < 2, 1 - node
    world.join(1)
    way = choose("auto", all_joined(world.size), gpu=False)
    together = way.join(RankGroup(1, {}, world), 0, FlatParams(Device(), came, came))

    def one_way() -> None:
        if node == 0:
            world.exchange([(1, mine)], [])
        elif node == 1:
            world.exchange([], [(0, came)])

    def send() -> None:
        if node == 0:
            comm.Send(mine, 1)
        elif node == 1:
            comm.Recv(came, 0)

    for name, call in {
        "World.exchange, 0 to 1": one_way,
        "MPI_Send": send,
        "World.exchange, both ways": lambda: (
            pair and world.exchange([(other, mine)], [(other, came)])
        ),
        "MPI_Sendrecv": lambda: pair and comm.Sendrecv(mine, other, recvbuf=came, source=other),
        "HostSync, all nodes": lambda: together.reduce(came.size),
        "MPI_Allreduce, all nodes": lambda: comm.Allreduce(mine, came),
    }.items():
        slowest = [
            max(times) for times in zip(*comm.allgather(seconds(call, args.repeat)), strict=True)
        ]
        say(f"{name}: {args.mb / median(slowest):.0f} MB/s")
    world.barrier()
    transport.close(failed=False)


if __name__ == "__main__":
    main()
