import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from caffepy.cli import main

pytestmark = pytest.mark.usefixtures("folder")

GOLDEN = Path(__file__).parents[1] / "golden"
LOG, DIGITS = str(GOLDEN / "logs" / "two_nets.log"), str(GOLDEN / "digits" / "caffe_train.log")
Captured = pytest.CaptureFixture[str]


PICTURES = {
    "one run": (DIGITS, "caffe_train.png"),
    "two runs": (
        f"{LOG} {DIGITS} --curves loss,lr -x seconds -smooth 5 --names a,b --output ab.svg",
        "ab.svg",
    ),
    "two parts": (f"{LOG},{LOG} --log-loss", "two_nets.png"),
    "two of one name": (f"{DIGITS} {DIGITS}", "caffe_train.log.png"),
    "chart": (f"--chart 7 {LOG} {DIGITS} --output=c.png", "c.png"),
}


@pytest.mark.parametrize("case", PICTURES)
def test_pictures(case: str, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    line, name = PICTURES[case]
    assert main.run(["plot", *line.split()]) == 0
    assert capsys.readouterr() == (f"{name}\n", "")
    assert [path.name for path in Path().iterdir()] == [name]


def test_json_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main.run(["plot", LOG, DIGITS, "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert (one["name"], two["curves"]["test accuracy"]["iteration"]) == (
        "two_nets",
        [0, 100, 200, 300, 400, 500],
    )
    assert main.run(["plot", LOG]) == 2
    assert "pip install 'caffepy[plot]'" in capsys.readouterr().err
    assert not list(Path().iterdir())


WRONG = {
    "nothing": ("", 2, "Need a log to draw"),
    "no log": ("none.log", 3, 'could not open "none.log"'),
    "no run": (str(GOLDEN / "logs" / "README.md"), 3, "neither a metrics file nor a training log"),
    "format": (f"{LOG} --output a.bmp", 2, 'the extension of "a.bmp" must name the format'),
    "chart and curves": (f"{LOG} --chart 1 --curves loss", 2, "--chart goes without"),
    "no such chart": (f"{LOG} --chart 8", 2, "8 is not in the range 0<=x<=7"),
    "no folder": (f"{LOG} --output no/a.png", 2, 'cannot write "no/a.png"'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case: str, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    line, code, message = WRONG[case]
    assert main.run(["plot", *line.split()]) == code
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a pipe with a name")
def test_a_log_may_be_a_pipe(capsys: Captured) -> None:
    assert main.run(["plot", LOG, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)[0]["curves"]
    os.mkfifo("pipe")
    with ThreadPoolExecutor() as pool:
        pool.submit(Path("pipe").write_bytes, Path(LOG).read_bytes())
        assert main.run(["plot", "pipe", "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)[0]["curves"]["loss"]["value"] == whole["loss"]["value"]
    )
