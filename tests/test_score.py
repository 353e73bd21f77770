import json
import logging
from pathlib import Path

import pytest

from caffepy.errors import ConfigError
from caffepy.score import score

DIGITS = Path(__file__).parent / "golden" / "digits"


def test_caffes_weights_score_as_caffe_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "caffepy.device")
    caplog.set_level(logging.INFO, "caffepy.score")
    result = score(str(DIGITS / "train_val.prototxt"), [str(DIGITS / "digits_iter_500.caffemodel")], iterations=3)
    lines = result.table().splitlines()
    assert lines[0] == "accuracy = 0.983165"
    assert result.loss == pytest.approx(0.0564856, rel=1e-4)
    told = json.loads(result.json())
    assert told["iterations"] == 3
    assert told["outputs"]["accuracy"] == pytest.approx(0.983165, abs=1e-6)

    logged = [record.getMessage() for record in caplog.records]
    assert logged[:2] == ["Use CPU.", "Running for 3 iterations."]
    for batch in range(3):
        accuracy, loss = logged[2 + 2 * batch : 4 + 2 * batch]
        assert accuracy.startswith(f"Batch {batch}, accuracy = ")
        assert loss.startswith(f"Batch {batch}, loss = ")
    assert logged[8] == f"Loss: {result.loss:.6g}"
    assert logged[9:] == lines
    assert lines[1] == f"loss = {result.loss:.6g} (* 1 = {result.loss:.6g} loss)"


def test_weights_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"digits_iter_250.solverstate"):
        score(str(DIGITS / "train_val.prototxt"), [str(DIGITS / "digits_iter_250.solverstate")])
