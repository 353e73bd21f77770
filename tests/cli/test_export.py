"""caffepy export"""

import json
from pathlib import Path

import pytest

from caffepy.cli import main

pytestmark = pytest.mark.usefixtures("folder")

pytest.importorskip("onnx")
DIGITS = Path(__file__).parents[1] / "golden" / "digits"
NET, WEIGHTS = str(DIGITS / "train_val.prototxt"), str(DIGITS / "digits_iter_500.caffemodel")
Captured = pytest.CaptureFixture[str]


def test_a_bundled_net(capsys: Captured) -> None:
    assert main.run(["export", "--onnx", "digits", WEIGHTS, "-o", "net.onnx"]) == 0
    shown = capsys.readouterr()
    size = Path("net.onnx").stat().st_size
    assert shown.out.splitlines() == [
        f"net.onnx: opset 17, 11 nodes, 13,706 parameters, {size:,} bytes",
        "input data: 1 x 1 x 8 x 8",
        "output prob: 1 x 10",
    ]
    assert shown.err == ""


def test_flags_and_json(capsys: Captured) -> None:
    pytest.importorskip("onnxruntime")
    line = [
        "export",
        NET,
        WEIGHTS,
        "-onnx",
        "-output=net.onnx",
        "-batch",
        "dynamic",
        "-opset",
        "18",
        "-check",
    ]
    assert main.run([*line, "--probabilities", "--image", "1,8,8", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["file"], done["opset"], done["outputs"]) == ("net.onnx", 18, {"prob": ["N", 10]})
    assert done["differences"]["prob"] < 1e-5


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ([NET, WEIGHTS], 2, "--output"),
        ([NET, "-o", "net.onnx"], 2, "WEIGHTS"),
        (
            [NET, WEIGHTS, "-o", "net.onnx", "--batch", "many"],
            2,
            "'many' is neither a number of 1 or more",
        ),
        ([NET, WEIGHTS, "-o", "net.onnx", "--opset", "9"], 2, "13<=x<=21"),
        (["no.prototxt", WEIGHTS, "-o", "net.onnx"], 3, '"no.prototxt"'),
        ([NET, "no.caffemodel", "-o", "net.onnx"], 3, '"no.caffemodel"'),
        ([NET, WEIGHTS, "-o", "nowhere/net.onnx"], 2, 'cannot write "nowhere/net.onnx"'),
    ],
)
def test_mistakes(line: list[str], code: int, message: str, capsys: Captured) -> None:
    assert main.run(["export", *line]) == code
    assert message in capsys.readouterr().err
    assert not Path("net.onnx").exists()


def test_random_weights_are_not_exported(capsys: Captured) -> None:
    text = Path(NET).read_text()
    for name in ("conv", "ip"):
        text = text.replace(f'name: "{name}', f'name: "my_{name}')
    Path("net.prototxt").write_text(text)
    line = ["export", "net.prototxt", WEIGHTS, "-o", "net.onnx", "--image", "1,8,8"]
    assert main.run(line) == 3
    assert f"error: {WEIGHTS} gives no weights to this net" in capsys.readouterr().err
    assert not Path("net.onnx").exists()


def test_what_to_do_without_data(capsys: Captured) -> None:
    net = 'layer { name: "d" type: "Data" top: "data" data_param { source: "none" batch_size: 1 } }'
    Path("net.prototxt").write_text(
        net + 'layer { name: "r" type: "ReLU" bottom: "data" top: "y" }'
    )
    assert main.run(["export", "net.prototxt", WEIGHTS, "-o", "net.onnx"]) == 4
    assert (
        "(to go without the data, give --image C,H,W, or a deploy net)" in capsys.readouterr().err
    )
    assert main.run(["export", "net.prototxt", WEIGHTS, "-o", "net.onnx", "--image", "1,2,3"]) == 0
    assert "input data: 1 x 1 x 2 x 3" in capsys.readouterr().out
