"""Wall and CPU time of whole processes of `caffepy`, of several versions in turns.

    python benchmarks/starts.py --trees before=FOLDER,after=FOLDER --runs 9 train --solver digits

Each tree is a checkout; each run is a process in a new folder. The first run of each, which may
compile kernels, is not counted. CPU time is that of the process and of those that it has waited
for, such as the one that draws the curve; other work on the machine disturbs it less.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence


def run(tree: str, arguments: Sequence[str]) -> tuple[float, float]:
    """Return seconds by the clock and of CPU time of a process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": tree}
        begun = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "caffepy", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{tree}: exit code {process.returncode}")
    return seconds, used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", required=True)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    trees = dict(part.split("=") for part in options.trees.split(","))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for i in range(options.runs + 1):
        for name, tree in trees.items():
            times = run(os.path.abspath(tree), options.arguments)
            if i:
                found[name].append(times)
    for name, all_times in found.items():
        figures = [
            f"{what} {statistics.median(t):.2f} ({min(t):.2f} to {max(t):.2f}) s"
            for what, t in zip(("wall", "CPU"), zip(*all_times, strict=True), strict=True)
        ]
        sys.stdout.write(f"{name}: {', '.join(figures)}\n")


if __name__ == "__main__":
    main()
