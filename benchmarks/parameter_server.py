"""Accuracy and speed of workers that train by a parameter server.

python -m benchmarks.parameter_server accuracy [--net lenet] [--seeds 6] [--batch 25] [--rate 0.1]
    [--clip 1] [--plot FILE] | stragglers [--cluster local]

`accuracy`: four workers of this batch take 25,000 images, with a base_lr that grows as the batch of
all does (or --rate), and a tenth of it after 70 % of the images; beside them one solver with the
net's own batch and rate, and one with the batch and rate of the four. `--net lenet` has the same
digits, enlarged to 28 x 28 pixels.
`stragglers`: images/s of four workers that sleep 100 ms in each iteration, one of them, by turns of
5 or 20 iterations, 200 ms.
Workers and servers are threads, or processes of a cluster of Ray.
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
import lmdb
import numpy as np

from caffepy import models, ops
from caffepy.core.events import Reporter
from caffepy.data.datum import decode
from caffepy.data.write import array_to_datum, write_database
from caffepy.device.device import Device
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.messages import COORDINATOR, Rule, slack_of
from caffepy.parallel.parameter_server.ray_cluster import connect
from caffepy.parallel.parameter_server.worker import ServedWorkers
from caffepy.proto.text import read_net, read_solver
from caffepy.solver import Solver
from tests.parallel.parameter_server.test_servers import run
from tests.parallel.parameter_server.threads_engine import ThreadsEngine

WORKERS = 4
CASES = [(c, every) for every in (1, 25) for c in ("sync", "ssp:1", "ssp:4", "async")]
IMAGES = 25_000
TRAIN, TEST = "digits_train_lmdb", "digits_test_lmdb"


class Scores(Reporter):
    """Keeps the accuracy of the last test."""

    accuracy = 0.0

    def test_done(self, iteration: int, k: int, outputs: Any, loss: float | None) -> None:
        self.accuracy = next(float(v.mean()) for name, v, _ in outputs if name == "accuracy")


@dataclass(frozen=True)
class Recipe:
    """Settings of a training: `batch` is a solver's, or 0 for the net's own; so is `rate`, the base_lr.

    data: folder of the images.
    """

    net: str = "digits"
    data: str = str(models.path("digits", "solver")).removesuffix("solver.prototxt")
    batch: int = 0
    rate: float = 0.0
    clip: float = -1.0
    seed: int = 0

    def of(self, workers: int, batch: int, rate: float) -> "Recipe":
        """Return the recipe of `workers` workers with this batch, with this rate or, if it is 0, one
        that grows as the batch of all does.
        """
        own = self.solver(1, 0, Reporter())
        size = own.net.blobs["label"].shape[0]
        own.close()
        return replace(self, batch=batch, rate=rate or own.param.base_lr * workers * batch / size)

    def solver(self, workers: int, number: int, reporter: Reporter) -> Solver:
        """Return the solver of a worker."""
        param = read_solver(str(models.path(self.net, "solver")))
        net = read_net(str(models.path(self.net, "train_val")))
        batch = self.batch
        for layer in net.layer:
            if layer.type == "Data":
                test = "test" in layer.data_param.source
                layer.data_param.source = self.data + (TEST if test else TRAIN)
                batch = batch or layer.data_param.batch_size
                layer.data_param.batch_size = 99 if test else batch
        param.ClearField("net")
        param.net_param.CopyFrom(net)
        param.random_seed, param.clip_gradients = self.seed, self.clip
        param.base_lr = self.rate or param.base_lr
        param.max_iter = IMAGES // (workers * batch)
        param.lr_policy, param.gamma = "step", 0.1
        param.stepsize = -(-IMAGES * 7 // (10 * workers * batch))
        param.snapshot = param.display = 0
        param.test_iter[:], param.test_interval = [3], param.max_iter + 1
        param.snapshot_after_train = param.test_initialization = False
        device = Device()
        device.follows = number > 0
        ops.backend(device).set_num_threads(1)
        return Solver(param, device=device, rank=number, reporter=reporter)


def enlarged(folder: str) -> str:
    """Write the digits with 28 x 28 pixels, each of theirs three times in both directions within a
    border of two, and return the folder.
    """
    for name in (TRAIN, TEST):
        with (
            closing(lmdb.open(Recipe.data + name, readonly=True, lock=False)) as database,
            database.begin() as transaction,
            write_database(f"{folder}/{name}") as writer,
        ):
            for key, record in transaction.cursor():
                image, label, _ = decode(record)
                large = np.pad(image[0].repeat(3, 0).repeat(3, 1), 2)[np.newaxis]
                writer.put(key.decode(), array_to_datum(large, label).SerializeToString())
    return f"{folder}/"


class Sleep:
    """Sleeps at the start of each iteration of a worker, twice as long when it is its turn."""

    def __init__(self, solver: Solver, number: int, turn: int) -> None:
        self._solver, self._number, self._turn = solver, number, turn

    def on_start(self) -> None:
        is_slow = self._solver.iter // self._turn % WORKERS == self._number
        time.sleep(0.2 if is_slow else 0.1)

    def on_gradients_ready(self) -> None:
        """Nothing."""


def work(
    engine: Any, number: int, recipe: Recipe, consistency: str, every: int, turn: int
) -> tuple[float, float]:
    """Train as a worker; return the accuracy, if it is the first, and the images/s of all from the
    first push on. With a turn it sleeps in each iteration.
    """
    scores, reporter = Scores(), Reporter()
    solver = recipe.solver(WORKERS, number, reporter if number else scores)
    if turn:
        solver.add_callback(Sleep(solver, number, turn))
    slack = slack_of(consistency)
    rule = Rule(slack, gradients=slack == 0 and every == 1)
    iterations = solver.param.max_iter - every
    with (
        closing(solver),
        ServedWorkers(solver, Client(engine, number), rule, every, WORKERS),
    ):
        solver.step(every)
        begun = time.monotonic()
        solver.step(iterations)
        rate = WORKERS * recipe.batch * iterations / (time.monotonic() - begun)
        if number == 0:
            solver.test_all()
    return scores.accuracy, rate


def train(
    recipe: Recipe, consistency: str, every: int, turn: int = 0, cluster: str = ""
) -> tuple[float, float]:
    """Return the accuracy, in %, of a net trained by workers in threads or on a cluster, and the
    images/s.
    """
    options = recipe, consistency, every, turn
    if cluster:
        engine = connect(cluster, f"benchmark-{os.getpid()}")
        engine.spawn_coordinator(2, 1)
        others = [engine.spawn_worker(i, work, i, *options) for i in range(1, WORKERS)]
        found = [work(engine, 0, *options), *(other.result(600) for other in others)]
        engine.close()
    else:
        threads = ThreadsEngine()
        threads.spawn(COORDINATOR, lambda: Coordinator(threads, 2, 1))
        try:
            found = run([partial(work, threads, i, *options) for i in range(WORKERS)], 600)
        finally:
            threads.close()
    return 100 * found[0][0], min(rate for _, rate in found)


def alone(recipe: Recipe) -> float:
    """Return the accuracy of a net trained by one solver."""
    scores = Scores()
    with closing(recipe.solver(1, 0, scores)) as solver:
        solver.step(solver.param.max_iter)
        solver.test_all()
    return 100 * scores.accuracy


def accuracies(recipe: Recipe, seeds: int, plot: str) -> None:
    found = dict[tuple[str, int], list[float]]()

    def show(name: str, accuracy: Callable[[Recipe], float]) -> list[float]:
        own = [accuracy(replace(recipe, seed=seed)) for seed in range(seeds)]
        click.echo(
            f"{name}: {np.mean(own):5.2f} % +- {np.std(own, ddof=1) / seeds**0.5:.2f}, of three "
            f"{np.mean(own[:3]):5.2f}, the worst {min(own):.1f}"
        )
        return own

    show("one solver", lambda r: alone(replace(r, batch=0, rate=0, clip=-1)))
    batch = WORKERS * recipe.batch
    show(
        f"one solver, batch {batch}, rate {recipe.rate:g}", lambda r: alone(replace(r, batch=batch))
    )
    for consistency, every in CASES:

        def accuracy(own: Recipe, consistency: str = consistency, every: int = every) -> float:
            return train(own, consistency, every)[0]

        found[consistency, every] = show(f"{consistency:6} every {every:2}", accuracy)
    if plot:
        draw(found, plot)


def draw(found: Mapping[tuple[str, int], list[float]], plot: str) -> None:
    """Draw the accuracies and their standard errors against the slack."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    names = list(dict.fromkeys(consistency for consistency, _ in found))
    for every in sorted({every for _, every in found}):
        own = {names.index(c): values for (c, e), values in found.items() if e == every}
        means = [np.mean(values) for values in own.values()]
        errors = [np.std(values, ddof=1) / len(values) ** 0.5 for values in own.values()]
        axes.errorbar(list(own), means, errors, marker="o", capsize=3, label=f"--every {every}")
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("--consistency")
    axes.set_ylabel("accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(plot, bbox_inches="tight", metadata={"Date": None})


def stragglers(cluster: str) -> None:
    recipe, speeds = Recipe(batch=50), dict[str, float]()
    for turn in (5, 20):
        for consistency in ("sync", "ssp:4", "async"):
            speed = speeds[consistency] = train(recipe, consistency, 1, turn, cluster)[1]
            ratio = speed / speeds["sync"]
            click.echo(f"turns of {turn}, {consistency}: {speed:.0f} images/s, {ratio:.2f}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["accuracy", "stragglers"])
    parser.add_argument("--net", choices=["digits", "lenet"], default="digits")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=25, help="of each worker")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=-1.0, help="clip_gradients; -1 for none")
    parser.add_argument("--plot", default="")
    parser.add_argument("--cluster", default="", help="local, auto or HOST:PORT, of Ray")
    options = parser.parse_args()
    if options.what == "stragglers":
        stragglers(options.cluster)
    else:
        with tempfile.TemporaryDirectory() as folder:
            data = Recipe.data if options.net == "digits" else enlarged(folder)
            recipe = Recipe(options.net, data, clip=options.clip)
            recipe = recipe.of(WORKERS, options.batch, options.rate)
            accuracies(recipe, options.seeds, options.plot)
