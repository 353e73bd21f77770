"""Deaths and rates of a parameter server over an embedded Ray, on one machine.

python benchmarks/servers.py rate [--mb 244] | kills [--count 20]

`rate`: a worker pushes and pulls at three servers, with one copy of each range and with two.
`kills`: three workers push while servers are killed at random, one at a time; every push must count
once, and the longest time that a push with its pull took is told.
"""

import argparse
import contextlib
import os
import random
import signal
import time

import click
import numpy as np

from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.messages import COORDINATOR, DeadPeerError, Rule
from caffepy.parallel.parameter_server.ranges import Blob, KeyRange, key_ranges
from caffepy.parallel.parameter_server.ray_engine import RayEngine, connect

STEPS = 8


def start(ranges: list[KeyRange], replicas: int) -> RayEngine:
    size = ranges[-1].stop
    engine = connect("local", "benchmark", 12 * size)
    engine.spawn_coordinator(servers=3, replicas=replicas)
    zeros = [np.zeros(r.stop - r.start, np.float32) for r in ranges]
    engine.call(COORDINATOR, "start", ranges, zeros, Rule(slack=4)).result(200)
    engine.call(COORDINATOR, "watch")
    return engine


def rate(mb: int) -> None:
    ranges = key_ranges([Blob("fc", 0, mb * 250_000)])
    for replicas in (1, 2):
        engine = start(ranges, replicas)
        client = Client(engine, 0)
        client.join(1)
        change = [np.ones(r.stop - r.start, np.float32) for r in ranges]
        seconds = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            client.push(change)
            pushed = time.perf_counter()
            client.pull()
            seconds.append((pushed - begun, time.perf_counter() - pushed))
        push, pull = np.median(seconds[1:], axis=0)
        click.echo(
            f"{mb} MB, 3 servers, {replicas} copies: push {mb / push / 1e3:.2f} GB/s, pull "
            f"{mb / pull / 1e3:.2f} GB/s, both {2 * mb / (push + pull) / 1e3:.2f} GB/s"
        )
        client.leave()
        engine.close()


def push_for(engine: RayEngine, worker: int, until: float) -> tuple[int, int, float]:
    """Push ones until this time; return the pushes, those sent again, and the longest pause."""
    client = Client(engine, worker)
    client.join(1)
    client.await_members(3)
    clocks, longest = 0, 0.0
    while time.time() < until:
        begun = time.monotonic()
        client.push([np.full(r.stop - r.start, 3, np.float32) for r in client.view.ranges])
        client.pull()
        clocks, longest = clocks + 1, max(longest, time.monotonic() - begun)
    client.pull(slack=np.inf)
    return clocks, client.again, longest


def kills(count: int) -> None:
    ranges = key_ranges([Blob(f"blob{i}", 1000 * i, 1000) for i in range(12)])
    engine = start(ranges, replicas=2)
    until = time.time() + 6 * count + 10
    workers = [engine.spawn_worker(i, push_for, i, until) for i in range(3)]
    killed = 0
    while killed < count and time.time() < until - 5:
        servers = engine.call(COORDINATOR, "current").result(60).servers
        with contextlib.suppress(DeadPeerError):
            processes = [engine.call(s, "ping").result(60)[1] for s in servers]
            if len(processes) == 3:
                time.sleep(random.random())
                os.kill(random.choice(processes), signal.SIGKILL)
                killed += 1
        time.sleep(0.2)
    results = [worker.result(600) for worker in workers]
    values = np.concatenate(engine.call(COORDINATOR, "cut").result(60)[0])
    pushes = sum(clocks for clocks, _, _ in results)
    click.echo(
        f"{killed} servers killed; {pushes} pushes, counted {values.min():g} to {values.max():g} "
        f"times; {sum(again for _, again, _ in results)} sent again; longest pause "
        f"{max(longest for _, _, longest in results):.2f} s"
    )
    engine.close()
    assert values.min() == values.max() == pushes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["rate", "kills"])
    parser.add_argument("--mb", type=int, default=244)
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    rate(options.mb) if options.what == "rate" else kills(options.count)
