import json

import pytest

from caffepy.cli import main

Captured = pytest.CaptureFixture[str]


def test_a_bundled_net(capsys: Captured) -> None:
    assert main.run(["summarize", "lenet", "--synthetic", "-phase", "TRAIN", "-w", "20"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "TRAIN net of 'LeNet'"
    assert out.splitlines()[-1] == "read by no layer: loss"
    assert "\033" not in out  # no terminal, no colours
    assert err == ""


def test_json(capsys: Captured) -> None:
    assert main.run(["summarize", "cifar10_quick", "--json", "--image", "3,32,32"]) == 0
    train, test = json.loads(capsys.readouterr().out)
    assert train["parameters"] == test["parameters"] == 145578


def test_without_the_data(capsys: Captured) -> None:
    assert main.run(["summarize", "lenet", "--phase", "TEST"]) == 0
    out, err = capsys.readouterr()
    assert "conv1  " in out
    assert "the TEST net is shown without shapes" in err


WRONG = {
    "no net": ("nte.prototxt", 3, 'could not open "nte.prototxt"'),
    "phase": ("lenet --phase DEPLOY", 2, "'DEPLOY' is not one of"),
    "width": ("lenet --max-width 0", 2, "0 is not in the range"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case: str, capsys: Captured) -> None:
    line, code, message = WRONG[case]
    assert main.run(["summarize", *line.split()]) == code
    assert message in capsys.readouterr().err
