"""Bytes that a worker pushes and pulls of an Embed layer of which only some rows are used.

python -m benchmarks.sparse_rows

Two workers in threads embed words of a vocabulary of 20,000 in 128 numbers each, of which the first
10, 100 or 1,000 come. What is shown is of a push and of a pull in the mean, without the first pull,
which is of all rows.
"""

import logging

import click

from caffepy.parallel.parameter_server.messages import Rule
from caffepy.parallel.parameter_server.worker import ServedWorkers
from caffepy.solver import Solver
from tests.nets import library
from tests.parallel.parameter_server.test_worker import Served

VOCABULARY, WIDTH, BATCH, PUSHES = 20_000, 128, 256, 10
SETTINGS = 'base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 '


def net(used: int) -> str:
    sizes = f"input_dim: {VOCABULARY} num_output: {WIDTH} bias_term: false"
    filler = f"weight_filler {{ {library.NARROW} }}"
    noise = 'type: "gaussian"', 'type: "uniform"'
    return (
        library.dummies("in", *noise, x=(BATCH, used), y=(BATCH, 2))
        + library.layer("ArgMax", "word", "x", "argmax_param { axis: 1 }")
        + library.layer("Embed", "embed", "word", f"embed_param {{ {sizes} {filler} }}")
        + library.inner_product("ip", "embed", 2, filler=library.NARROW, top="o")
        + library.euclidean_loss("o", "y")
    )


def sent(used: int, rule: Rule, every: int, filters: str) -> tuple[float, float]:
    """Return the kilobytes of a push and of a pull."""
    found = list[tuple[float, float]]()

    def work(served: Served, solver: Solver, number: int) -> None:
        group = solver.workers
        assert isinstance(group, ServedWorkers)
        if number == 0:
            whole = 4 * VOCABULARY * WIDTH // (2 if "bf16" in filters else 1)
            pulled = group.client.pulled.bytes_after - whole
            found.append((group.filters.bytes_after / PUSHES / 1e3, pulled / PUSHES / 1e3))

    until = PUSHES * every
    Served(2, net(used), rule, every, SETTINGS, until=until, work=work, filters=filters)
    return found[0]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    click.echo(f"all rows: {4 * VOCABULARY * WIDTH / 1e3:,.0f} kB")
    cases = {
        "gradients": (Rule(0, gradients=True), 1, ""),
        "sync, every 5": (Rule(0), 5, ""),
        "ssp:1, every 5": (Rule(1), 5, ""),
        "ssp:1, every 5, bf16": (Rule(1), 5, "bf16"),
        "ssp:1, every 5, significant:1.6": (Rule(1), 5, "significant:1.6"),
    }
    for name, case in cases.items():
        for used in (10, 100, 1000):
            push, pull = sent(used, *case)
            click.echo(f"{name}, {used} words: push {push:,.1f} kB, pull {pull:,.1f} kB")
