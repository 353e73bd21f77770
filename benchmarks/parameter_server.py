"""Accuracy and speed of workers that train by a parameter server; the workers are threads.

python -m benchmarks.parameter_server accuracy [--seeds 6] [--rate 0.1] [--plot FILE] | stragglers

`accuracy`: digits by four workers, as many images as one solver takes in its 500 iterations.
`stragglers`: images/s of four workers that sleep in each iteration, one of them, by turns of 20
or 5 iterations, twice as long.
"""

import argparse
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import click
import numpy as np

from caffepy import models, ops
from caffepy.core.events import Reporter
from caffepy.device.device import Device
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.messages import COORDINATOR, Rule, slack_of
from caffepy.parallel.parameter_server.worker import ServedWorkers
from caffepy.proto.text import read_solver
from caffepy.solver import Solver
from tests.parallel.parameter_server.test_servers import run
from tests.parallel.parameter_server.threads_engine import ThreadsEngine

WORKERS = 4
CASES = [(c, every) for every in (1, 25) for c in ("sync", "ssp:1", "ssp:4", "async")]


class Scores(Reporter):
    """Keeps the outputs of the last test."""

    def test_done(self, iteration: int, k: int, outputs: Any, loss: float | None) -> None:
        self.outputs = {name: float(values.mean()) for name, values, _ in outputs}


def train(
    consistency: str,
    every: int,
    seed: int,
    rate: float,
    sleep: Callable[[int, int], object] = lambda number, iteration: None,
) -> tuple[float, float]:
    """Return the accuracy of digits trained so, and the images/s from the first push on; `sleep` is
    called in each iteration of each worker.
    """
    slack, engine, scores = slack_of(consistency), ThreadsEngine(), Scores()
    rule = Rule(slack, gradients=slack == 0 and every == 1)
    engine.spawn(COORDINATOR, lambda: Coordinator(engine, 2, 1))
    path = models.path("digits", "solver")
    seconds = [0.0] * WORKERS

    def worker(number: int) -> None:
        param = read_solver(path)
        param.random_seed, param.base_lr = seed, rate
        param.max_iter //= WORKERS
        param.stepsize = -(-param.stepsize // WORKERS)
        param.snapshot = param.display = 0
        param.test_interval = param.max_iter + 1
        param.snapshot_after_train = param.test_initialization = False
        device = Device()
        device.follows = number > 0
        ops.backend(device).set_num_threads(1)
        reporter = Reporter() if number else scores
        solver = Solver(param, device=device, path=path, rank=number, reporter=reporter)
        solver.add_callback(Sleep(lambda: sleep(number, solver.iter)))
        with ServedWorkers(solver, Client(engine, number), rule, every, WORKERS):
            solver.step(every)
            begun = time.monotonic()
            solver.step(param.max_iter - every)
            seconds[number] = time.monotonic() - begun
            if number == 0:
                solver.test_all()
        solver.close()

    def of(number: int) -> Callable[[], None]:
        return lambda: worker(number)

    try:
        run([of(number) for number in range(WORKERS)], 300)
    finally:
        engine.close()
    images = WORKERS * 50 * (500 // WORKERS - every)
    return 100 * scores.outputs["accuracy"], images / max(seconds)


class Sleep:
    """Calls a function at the start of each iteration."""

    def __init__(self, on_start: Callable[[], object]) -> None:
        self.on_start = on_start

    def on_gradients_ready(self) -> None:
        """Nothing."""


def accuracies(seeds: int, rate: float, plot: str) -> None:
    found = dict[tuple[str, int], list[float]]()
    for consistency, every in CASES:
        own = [train(consistency, every, seed, rate)[0] for seed in range(seeds)]
        found[consistency, every] = own
        click.echo(
            f"{consistency:6} every {every:2}: {np.mean(own):5.2f} % +- "
            f"{np.std(own, ddof=1) / seeds**0.5:.2f}, the worst {min(own):.1f}"
        )
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
    axes.set_ylabel("accuracy on digits, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(plot, bbox_inches="tight")


def stragglers() -> None:
    for turn in (20, 5):

        def sleep(number: int, iteration: int, turn: int = turn) -> None:
            time.sleep(0.2 if iteration // turn % WORKERS == number else 0.1)

        speeds = {c: train(c, 1, 0, 0.05, sleep)[1] for c in ("sync", "ssp:4", "async")}
        for consistency, speed in speeds.items():
            ratio = speed / speeds["sync"]
            click.echo(f"turns of {turn}, {consistency}: {speed:.0f} images/s, {ratio:.2f}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["accuracy", "stragglers"])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--plot", default="")
    options = parser.parse_args()
    if options.what == "accuracy":
        accuracies(options.seeds, options.rate, options.plot)
    else:
        stragglers()
