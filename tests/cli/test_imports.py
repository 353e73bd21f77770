"""Commands that compute nothing load neither numba nor CuPy, which take their time."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "models" / "digits"
PROGRAM = """
import sys
from caffepy.cli.main import run
code = run(sys.argv[1:])
assert code == 0, code
print([name for name in ("numba", "cupy") if name in sys.modules], file=sys.stderr)
"""

COMMANDS = {
    "help": ["--help"],
    "train help": ["train", "--help"],
    "check": ["check", "--model", "googlenet", "--synthetic"],
    "check on a GPU": ["check", "--solver", "resnet50", "--synthetic", "--gpu"],
    "check with data": ["check", str(DIGITS / "solver.prototxt")],
    "check recurrent": ["check", "recurrent.prototxt"],
    "summarize": ["summarize", str(DIGITS / "train_val.prototxt")],
    "data show": ["data", "show", str(DIGITS / "digits_test_lmdb")],
    "mean": ["compute-image-mean", str(DIGITS / "digits_test_lmdb")],
}
RECURRENT = """
input: "x" input_shape { dim: 5 dim: 2 dim: 3 } input: "cont" input_shape { dim: 5 dim: 2 }
layer { name: "lstm" type: "LSTM" bottom: "x" bottom: "cont" top: "h" recurrent_param { num_output: 4 } }
layer { name: "rnn" type: "RNN" bottom: "h" bottom: "cont" top: "o" recurrent_param { num_output: 4 } }
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_what_computes_nothing_starts_without_numba(command: str, tmp_path: Path) -> None:
    (tmp_path / "recurrent.prototxt").write_text(RECURRENT)
    call = [sys.executable, "-c", PROGRAM, *COMMANDS[command]]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
