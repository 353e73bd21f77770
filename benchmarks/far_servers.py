"""A parameter server on another host: rates of pushes and pulls, and what training over a slow link
gains by pushing every 25 iterations.

usage: python benchmarks/two_hosts.py [--rate MBIT] [--delay MS] \\
           python benchmarks/far_servers.py rate [--mb 244] | train [--batch 16]

`rate`: a worker pushes and pulls at three servers on hosts with Ray's resource "far"; beside it Ray
by itself takes an array of this size to an actor there and back.
`train`: images/s of lenet, random images, by two workers, one on each host, with two servers.
"""

import argparse
import functools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

import caffepy as caffe
from caffepy import models
from caffepy.device.blob import Array
from caffepy.models.synthetic import synthetic
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.messages import COORDINATOR, Rule
from caffepy.parallel.parameter_server.ranges import Blob, key_ranges
from caffepy.parallel.parameter_server.ray_cluster import connect
from caffepy.parallel.parameter_server.ray_engine import RayEngine
from caffepy.parallel.parameter_server.server import Server
from caffepy.proto.text import format as format_text
from caffepy.proto.text import read_net, read_solver

TIMES = 8
FAR = {"far": 1}


class FarEngine(RayEngine):
    """Starts servers on hosts with the resource."""

    def spawn_server(self, name: str) -> None:
        make = functools.partial(Server, name)
        self.spawn(name, make, lifetime="detached", resources=FAR)


def coordinator(engine: RayEngine) -> Coordinator:
    return Coordinator(FarEngine(), servers=3, replicas=1)


class Keeper:
    """An actor with an array, for Ray by itself."""

    def push(self, change: Array) -> None:
        self.values = change

    def pull(self) -> Array:
        return self.values


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def measure(name: str, mb: int, push: Callable[[], Any], pull: Callable[[], Any]) -> None:
    seconds = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        push()
        pushed = time.perf_counter()
        pull()
        seconds.append((pushed - begun, time.perf_counter() - pushed))
    there, back = np.median(seconds[1:], axis=0)
    say(
        f"{name}, {mb} MB, load {os.getloadavg()[0]:.0f}: push {mb / there:.0f} MB/s, pull "
        f"{mb / back:.0f} MB/s, both {2 * mb / (there + back):.0f} MB/s"
    )


def rate(cluster: str, mb: int) -> None:
    engine = connect(cluster, "rate")
    keeper = ray.remote(Keeper).options(num_cpus=0, resources=FAR).remote()
    array = np.ones(mb * 250_000, np.float32)
    measure(
        "Ray by itself",
        mb,
        lambda: ray.get(keeper.push.remote(array)),
        lambda: ray.get(keeper.pull.remote()),
    )
    ray.kill(keeper)

    ranges = key_ranges([Blob("fc", 0, array.size)])
    parts = [array[r.start : r.stop] for r in ranges]
    engine.spawn(COORDINATOR, coordinator)
    engine.call(COORDINATOR, "start", ranges, parts, Rule(slack=4)).result(200)
    client = Client(engine, 0)
    client.join(1)
    measure("three servers", mb, lambda: client.push(parts), client.pull)
    client.leave()
    for server in client.view.servers:
        engine.kill(server)
    engine.close()


def train(cluster: str, batch: int) -> None:
    speeds = {}
    for consistency, every, iterations in (("sync", 1, 20), ("sync", 25, 100), ("ssp:1", 25, 100)):
        param = read_solver(str(models.path("lenet", "solver")))
        net = synthetic(read_net(str(models.path("lenet", "train_val"))), batch, (1, 28, 28))
        for field in ("net", "test_iter"):
            param.ClearField(field)
        param.net_param.CopyFrom(net)
        param.test_interval = param.display = param.snapshot = 0
        param.snapshot_after_train = False
        param.max_iter = iterations + every
        with tempfile.NamedTemporaryFile("w", suffix=".prototxt") as file:
            file.write(format_text(param))
            file.flush()
            solver = caffe.get_solver(file.name)
        with solver.served(cluster, 2, consistency=consistency, every=every, replicas=1):
            solver.step(every)
            begun = time.perf_counter()
            solver.step(iterations)
            speed = 2 * batch * iterations / (time.perf_counter() - begun)
        name = f"{consistency}, every {every}"
        speeds[name] = speed
        say(f"{name}: {speed:.0f} images/s, {speed / speeds['sync, every 1']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["rate", "train"])
    parser.add_argument("--cluster", default="10.98.0.1:6379")
    parser.add_argument("--mb", type=int, default=244)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.what == "rate":
        rate(options.cluster, options.mb)
    else:
        train(options.cluster, options.batch)


if __name__ == "__main__":
    main()
