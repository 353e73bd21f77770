"""caffepy beside PyTorch on one GPU: training steps on data that lies on the device, in alternating
windows.

usage: python benchmarks/beside_torch_gpu.py --peer peer_torch.py --out FOLDER [--nets lenet:64,caffenet:256]
           [--modes tf32,bf16] [--kinds eager,compiled] [--windows 5] [--seconds 0.3] [--python PATH]

The file given as --peer defines PyTorch's nets: NETS, a table of functions that give (module, image
shape, classes), and loss_of(outputs, labels). PyTorch runs them as its users would: TF32 or
autocast with channels_last, cuDNN's timing, fused SGD; eager, and compiled with mode
reduce-overhead. All contenders of a net and precision are warmed up one after the other, then take
turns by windows of so many seconds, while the others wait; medians are printed as a table, which
FOLDER keeps as table.md and all figures as results.json.

Memory is PyTorch's max_memory_allocated and max_memory_reserved, caffepy's what the driver counts
for it, and its pool.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from statistics import median
from time import perf_counter
from typing import Any

NETS = "lenet:64,cifar10_quick:256,caffenet:256,googlenet:128,vgg16:64,resnet50:128"
MIB = 1 << 20
WARM_UP = 8
GROUP = 10  # steps between looks at the clock
Answer = dict[str, Any]


def ours(job: Answer) -> tuple[Callable[[float], Answer], Callable[[], Answer]]:
    """caffepy's contender: what runs a window of so many seconds, and what tells its memory at the
    end.
    """
    from caffepy import models, ops
    from caffepy.commands.bench.train import Trainer
    from caffepy.device.cuda import CudaDevice
    from caffepy.models.synthetic import image_shape

    device = CudaDevice(0)
    ops.set_precision(device, job["mode"])
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
        assert used
        return {"allocated": used.pool, "reserved": used.driver, "shares": trainer.shares()}

    return window, memory


def theirs(job: Answer) -> tuple[Callable[[float], Answer], Callable[[], Answer]]:
    """PyTorch's contender."""
    import torch

    spec = spec_from_file_location("peer", job["peer"])
    assert spec is not None
    assert spec.loader is not None
    peer = module_from_spec(spec)
    spec.loader.exec_module(peer)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job["mode"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = job["mode"] != "fp32"
    torch.backends.cudnn.benchmark = True
    net, shape, classes = peer.NETS[job["net"]]()
    net = net.to("cuda")
    x = torch.randn(job["batch"], *shape, device="cuda")
    y = torch.randint(classes, (job["batch"],), device="cuda")
    if narrow is not None:
        net, x = (
            net.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    update = torch.optim.SGD(net.parameters(), 0.001, 0.9, weight_decay=5e-4, fused=True)
    run = torch.compile(net, mode="reduce-overhead") if job["kind"] == "compiled" else net

    def step() -> None:
        update.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=narrow or torch.bfloat16, enabled=narrow is not None):
            loss = peer.loss_of(run(x), y)
        loss.backward()
        update.step()

    def window(seconds: float) -> Answer:
        count, begin = 0, perf_counter()
        while perf_counter() - begin < seconds:
            for _ in range(GROUP):
                step()
            torch.cuda.synchronize()
            count += GROUP
        return {"ms": (perf_counter() - begin) / count * 1000}

    def memory() -> Answer:
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    return window, memory


def work(job: Answer) -> None:
    """Be a contender: say when ready, then answer each line of stdin, seconds or `memory`, by one
    of stdout.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    window, memory = (ours if job["kind"] == "caffepy" else theirs)(job)
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(
            json.dumps(memory() if line.strip() == "memory" else window(float(line))) + "\n"
        )
        answers.flush()


class Contender:
    """A process that trains when it is told to."""

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
    for kind in (*filter(None, args.kinds.split(",")), "caffepy"):
        job = {"kind": kind, "net": net, "batch": batch, "mode": mode, "peer": args.peer}
        try:
            contenders[kind] = Contender(job, sys.executable if kind == "caffepy" else args.python)
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


HEAD = (
    "| net | batch | mode | eager | compiled | caffepy images/s | ratio | ms | host ms | spread "
    "| PyTorch MiB | caffepy MiB |\n" + "|---" * 12 + "|\n"
)


def line_of(result: Answer) -> str:
    """A line of the table; the ratio is to PyTorch's best, the memory of PyTorch that of its eager
    mode if it ran.
    """
    peers = [result[kind] for kind in ("eager", "compiled") if "ms" in result.get(kind, {})]
    own = result["caffepy"]

    def rate(kind: str) -> str:
        return f"{result[kind]['images_per_s']:,.0f}" if "ms" in result.get(kind, {}) else ""

    cells = [
        result["net"],
        str(result["batch"]),
        result["mode"],
        rate("eager"),
        rate("compiled"),
        rate("caffepy"),
    ]
    if "ms" not in own:
        return "| " + " | ".join([*cells, *[""] * 6]) + " |"
    cells.append(
        f"{own['images_per_s'] / max(peer['images_per_s'] for peer in peers):.2f}" if peers else ""
    )
    cells += [
        f"{own['ms']:.3f}",
        f"{own['host_ms']:.3f}" if own["host_ms"] else "",
        f"{own['spread']:.1%}",
    ]
    cells.append(
        f"{peers[0]['allocated'] / MIB:.0f} / {peers[0]['reserved'] / MIB:.0f}" if peers else ""
    )
    cells.append(f"{own['allocated'] / MIB:.0f} / {own['reserved'] / MIB:.0f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run all contests and keep what they gave."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--nets", default=NETS)
    parser.add_argument("--modes", default="tf32,bf16")
    parser.add_argument("--kinds", default="eager,compiled")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(json.loads(args.work))
    os.makedirs(args.out, exist_ok=True)
    results = []
    with open(os.path.join(args.out, "table.md"), "w") as table:
        for to in (table, sys.stdout):
            to.write(HEAD)
        for net in args.nets.split(","):
            name, batch = net.split(":")
            for mode in args.modes.split(","):
                results.append(contest(args, name, int(batch), mode))
                for to in (table, sys.stdout):
                    to.write(line_of(results[-1]) + "\n")
                    to.flush()
                with open(os.path.join(args.out, "results.json"), "w") as file:
                    json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
