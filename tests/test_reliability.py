"""The attacks of benchmarks/reliability, a few trials of each: the program works, and nothing is
found.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRIALS = {"kills": 2, "signals": 2, "disks": 1, "tmpfs": 1, "text": 20, "binary": 2, "lmdb": 20}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_few_attacks_find_nothing() -> None:
    program = ROOT / "benchmarks" / "reliability" / "attack.py"
    command = [sys.executable, program, *(f"--{name}={n}" for name, n in TRIALS.items())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    found = re.findall(r"^(\w+): (\d+) trials, 0 found", done.stdout, re.MULTILINE)
    left_out = {"tmpfs"} if "tmpfs: left out" in done.stdout else set()
    assert {name: int(n) for name, n in found} == {
        name: n for name, n in TRIALS.items() if name not in left_out
    }
