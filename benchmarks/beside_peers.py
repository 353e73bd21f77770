"""caffepy beside PyTorch and JAX on one GPU or on the CPU: training steps on data that lies on the
device, in alternating windows.

usage: python benchmarks/beside_peers.py --out FOLDER [--device gpu|cpu] [--nets lenet:64,vgg16:64]
           [--modes tf32,bf16] [--kinds eager,reduce-overhead,jax] [--peer FILE] [--windows 5]
           [--seconds 0.3] [--python PATH]

A kind is a way in which a peer's users train: `eager`, `channels-last` (eager in this layout, which
bf16 has on a GPU anyway), the modes of torch.compile `default`, `reduce-overhead` and
`max-autotune`, and of JAX `jax` (a step a call) and `jax-100` (100 steps a call, for small nets).
PyTorch runs TF32 or autocast, cuDNN's timing and fused SGD. peer_torch.py and peer_jax.py have the
nets; a file given as --peer takes the place of the former: its NETS is a table of functions that
give (module, image shape, classes), loss_of(outputs, labels) their loss, and compiled(module, mode),
if there is one, takes the place of torch.compile.

All contenders of a net and precision are warmed up one after the other, then take turns by windows
of --seconds, while the others wait. Medians are printed as a table, whose ratio is to the
best of the peers; FOLDER keeps it as table.md and all figures as results.json.

Memory is what PyTorch's and caffepy's allocators hold on a GPU, the peak of the process on the CPU.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from statistics import median
from time import perf_counter
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
NETS = {
    "gpu": "lenet:64,cifar10_quick:256,caffenet:256,alexnet:256,googlenet:128,vgg16:64,"
    "resnet50:128,mobilenet_v2:96",
    "cpu": "lenet:64,cifar10_quick:100,caffenet:32,alexnet:32,googlenet:8,vgg16:4,resnet50:8,"
    "mobilenet_v2:8",
}
MODES = {"gpu": "tf32,bf16", "cpu": "fp32"}
KINDS = {
    "gpu": "eager,default,reduce-overhead,max-autotune,jax,jax-100",
    "cpu": "eager,channels-last,default",
}
SECONDS = {"gpu": 0.3, "cpu": 3.0}
OWN = "caffepy"
EAGER = ("eager", "channels-last")
JAX = {"jax": 1, "jax-100": 100}
"""Kinds of JAX, and the steps of a call."""
MIB = 1 << 20
WARM_UP = {"gpu": 8, "cpu": 3}
GROUP = {"gpu": 10, "cpu": 1}
"""Steps between looks at the clock."""
Answer = dict[str, Any]
Window = Callable[[float], Answer]
Memory = Callable[[], Answer]


def ours(job: Answer) -> tuple[Window, Memory]:
    """caffepy's contender: what runs a window of some seconds, and what tells its memory at the
    end.
    """
    from caffepy import models, ops
    from caffepy.commands.bench.train import Trainer
    from caffepy.commands.devices import choose_device
    from caffepy.models.synthetic import image_shape

    device = choose_device("0" if job["device"] == "gpu" else None)
    ops.set_precision(device, job["mode"] if job["device"] == "gpu" else None)
    solver = models.path(job["net"], "solver")
    assert solver, f"no bundled model {job['net']}"
    trainer = Trainer(solver, device=device, batch=job["batch"], image=image_shape(job["net"]))
    counts: list[int] = []

    def window(seconds: float) -> Answer:
        if not counts:
            counts.append(trainer.iterations_in(seconds))
        done = trainer.window(counts[0])
        return {"ms": done.seconds / done.iterations * 1000, "host_ms": done.host_ms}

    def memory() -> Answer:
        used = trainer.memory()
        return {"memory": used.pool if used else peak(), "shares": trainer.shares()}

    return window, memory


def peak() -> int:
    """The most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def by_torch(job: Answer) -> tuple[Window, Memory]:
    """PyTorch's contender."""
    import peer_torch
    import torch

    spec = spec_from_file_location("peer", job["peer"])
    assert spec is not None
    assert spec.loader is not None
    peer = sys.modules["peer"] = module_from_spec(spec)  # where torch.compile looks for its classes
    spec.loader.exec_module(peer)
    on_gpu, kind = job["device"] == "gpu", job["kind"]
    device = torch.device("cuda" if on_gpu else "cpu")
    net, shape, classes = peer.NETS[job["net"]]()
    net = net.to(device)
    x = torch.randn(job["batch"], *shape, device=device)
    y = torch.randint(classes, (job["batch"],), device=device)
    if job["mode"] in ("bf16", "fp16") or (not on_gpu and kind != "eager"):
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    run = net if kind in EAGER else getattr(peer, "compiled", torch.compile)(net, mode=kind)
    step = peer_torch.training_step(run, x, y, job["mode"], peer.loss_of)

    def steps(count: int) -> None:
        for _ in range(count):
            step()
        if on_gpu:
            torch.cuda.synchronize()

    def memory() -> Answer:
        return {"memory": torch.cuda.max_memory_reserved() if on_gpu else peak()}

    steps(WARM_UP[job["device"]])
    return windows_of(steps, GROUP[job["device"]]), memory


def by_jax(job: Answer) -> tuple[Window, Memory]:
    """JAX's contender."""
    from peer_jax import trainer

    steps_a_call = JAX[job["kind"]]
    run = trainer(job["net"], job["batch"], job["mode"], steps_a_call)

    def calls(count: int) -> None:
        for _ in range(count):
            wait = run()
        wait()

    calls(WARM_UP[job["device"]])
    several = steps_a_call == 1
    return windows_of(calls, GROUP[job["device"]] if several else 1, steps_a_call), dict


def windows_of(steps: Callable[[int], None], group: int, steps_a_call: int = 1) -> Window:
    """A runner of groups of calls for a window of some seconds."""

    def window(seconds: float) -> Answer:
        count, begin = 0, perf_counter()
        while count == 0 or perf_counter() - begin < seconds:
            steps(group)
            count += group
        return {"ms": (perf_counter() - begin) / count / steps_a_call * 1000}

    return window


def work(job: Answer) -> None:
    """Be a contender: say when ready, then answer each line of stdin, seconds or `memory`, by one
    of stdout.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    make = ours if job["kind"] == OWN else by_jax if job["kind"] in JAX else by_torch
    window, memory = make(job)
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        answer = memory() if line.strip() == "memory" else window(float(line))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Contender:
    """A process that trains on request."""

    def __init__(self, job: Answer, python: str) -> None:
        command = [python, __file__, "--work", json.dumps(job)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> Answer:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contender ended with code {self._process.wait()}")
        answer: Answer = json.loads(line)
        return answer

    def ask(self, line: str) -> Answer:
        """Return its answer."""
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def contest(args: argparse.Namespace, net: str, batch: int, mode: str) -> Answer:
    """The figures of all contenders, each by its name."""
    contenders: dict[str, Contender] = {}
    results: dict[str, Answer] = {}
    for kind in (*args.kinds, OWN):
        job = {"kind": kind, "net": net, "batch": batch, "mode": mode}
        job |= {"peer": args.peer, "device": args.device}
        try:
            contenders[kind] = Contender(job, sys.executable if kind == OWN else args.python)
            contenders[kind].ask(str(args.seconds))
        except RuntimeError as error:
            contenders.pop(kind, None)
            results[kind] = {"error": str(error)}
    windows: dict[str, list[Answer]] = {kind: [] for kind in contenders}
    for _ in range(args.windows):
        for kind, contender in contenders.items():
            windows[kind].append(contender.ask(str(args.seconds)))
    for kind, contender in contenders.items():
        ms = [window["ms"] for window in windows[kind]]
        hosts = [window["host_ms"] for window in windows[kind] if window.get("host_ms")]
        results[kind] = {
            "images_per_s": batch / median(ms) * 1000,
            "ms": median(ms),
            "spread": (max(ms) - min(ms)) / median(ms),
            "host_ms": median(hosts) if hosts else None,
            **contender.ask("memory"),
        }
        contender.close()
    return {"net": net, "batch": batch, "mode": mode, **results}


def head_of(kinds: list[str]) -> str:
    """The head of the table: images a second of each kind, then the figures of the best and of
    caffepy.
    """
    cells = ["net", "batch", "mode", *kinds, OWN, "best peer", "ratio", "ms", "host ms", "spread"]
    cells += ["best peer's MiB", f"{OWN} MiB"]
    return row(cells) + row(["---"] * len(cells))


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def line_of(result: Answer, kinds: list[str]) -> str:
    """A line of the table."""

    def rate(kind: str) -> str:
        answer = result[kind]
        return f"{answer['images_per_s']:,.0f}" if "ms" in answer else "fails"

    def mebibytes(answer: Answer) -> str:
        return f"{answer['memory'] / MIB:.0f}" if "memory" in answer else ""

    cells = [result["net"], str(result["batch"]), result["mode"], *map(rate, (*kinds, OWN))]
    peers = {kind: result[kind]["images_per_s"] for kind in kinds if "ms" in result[kind]}
    best, own = max(peers, key=peers.__getitem__, default=""), result[OWN]
    if "ms" not in own:
        return row([*cells, best, *[""] * 6])
    cells += [best, f"{own['images_per_s'] / peers[best]:.2f}" if best else ""]
    cells += [f"{own['ms']:.3f}", f"{own['host_ms']:.3f}" if own["host_ms"] else ""]
    cells += [f"{own['spread']:.1%}", mebibytes(result[best]) if best else "", mebibytes(own)]
    return row(cells)


def main() -> None:
    """Run all contests and keep what they gave."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--nets")
    parser.add_argument("--modes")
    parser.add_argument("--kinds", help="empty: none but caffepy")
    parser.add_argument("--peer", default=os.path.join(HERE, "peer_torch.py"))
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the peers")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(json.loads(args.work))
    nets = (args.nets or NETS[args.device]).split(",")
    modes = (args.modes or MODES[args.device]).split(",")
    kinds = KINDS[args.device] if args.kinds is None else args.kinds
    args.kinds = [kind for kind in kinds.split(",") if kind]
    args.seconds = args.seconds or SECONDS[args.device]
    os.makedirs(args.out, exist_ok=True)
    results = []
    with open(os.path.join(args.out, "table.md"), "w") as table:
        for to in (table, sys.stdout):
            to.write(head_of(args.kinds))
        for net in nets:
            name, batch = net.split(":")
            for mode in modes:
                results.append(contest(args, name, int(batch), mode))
                for to in (table, sys.stdout):
                    to.write(line_of(results[-1], args.kinds))
                    to.flush()
                with open(os.path.join(args.out, "results.json"), "w") as file:
                    json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
