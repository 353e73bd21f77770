import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.core.errors import UsageError
from caffepy.core.events import Displayed, Served
from caffepy.device.blob import Array
from caffepy.report import TensorBoard, open_report, tensorboard
from tests.report import golden
from tests.report.events import events, scalars, values

pytest.importorskip("tensorboardX")


class Weights:
    """Weights of a solver; counts the readings."""

    def __init__(self, filters: Array | None = None) -> None:
        self.asked = 0
        self._filters = filters

    def parameters(self) -> Iterator[tuple[str, Array, Array | None]]:
        self.asked += 1
        yield (
            "ip/0",
            np.arange(100, dtype=np.float32).reshape(10, 10),
            np.full((10, 10), 0.5, np.float32),
        )
        yield "ip/1", np.float32([np.nan, np.inf, 3]), None

    def filters(self) -> tuple[str, Array] | None:
        return None if self._filters is None else ("conv1", self._filters)


def run(folder: Path, first: int, last: int, every: int = 0, watch: Weights | None = None) -> None:
    with TensorBoard(str(folder), every) as board:
        board.watch = watch
        board.solving("net", "fixed")
        for i in range(first, last):
            if i % 4 == 0:
                board.test_started(i, 0)
                board.test_done(i, 0, [("accuracy", np.float32(i / 100), 0.0)], None)
            if i % 2 == 0:
                board.displayed(Displayed(i, i / 10, [("loss", np.float32(i), 1.0)], 1, 1, 2))
                board.lr(i, 0.01)
            board.iterated(i, i / 10, 0.01, 50)
        board.finished(last, 1.5)
        board.done(False)


def test_what_a_parameter_server_tells(tmp_path: Path) -> None:
    with TensorBoard(str(tmp_path)) as board:
        board.served(Served(20, {0: 4, 1: 3}, {0: 6, 2: 1}, 8_000_000, 4_000_000, 1.5, 2))
    shown = {tag: steps[20] for tag, steps in values(tmp_path).items()}
    assert {
        tag: value.simple_value for tag, value in shown.items() if not value.HasField("histo")
    } == {
        "servers/pushes/0": 4,
        "servers/pushes/1": 3,
        "servers/mb_sent": 8,
        "servers/mb_on_wire": 4,
        "servers/seconds_waited": 1.5,
        "servers/replicas_behind": 2,
    }
    assert list(shown["servers/staleness"].histo.bucket) == [6, 0, 1]


def test_the_digits_run(tmp_path: Path) -> None:
    with TensorBoard(str(tmp_path)) as board:
        golden.replay(board, golden.messages())
    assert set(values(tmp_path)) == {
        "loss",
        "lr",
        "images_per_s",
        "train/loss",
        "test/accuracy",
        "test/loss",
    }
    assert list(scalars(tmp_path, "loss")) == [*range(0, 500, 20), 500]
    assert scalars(tmp_path, "test/accuracy")[500] == pytest.approx(0.983165)
    assert scalars(tmp_path, "lr")[100] == pytest.approx(0.0465506)
    assert scalars(tmp_path, "train/loss")[0] == pytest.approx(2.32759)
    assert all(speed > 0 for speed in scalars(tmp_path, "images_per_s").values())
    assert events(tmp_path)[0].file_version == "brain.Event:2"


def test_outputs_of_several_values_and_nets(tmp_path: Path) -> None:
    with TensorBoard(str(tmp_path)) as board:
        board.test_done(
            8,
            1,
            [("p", np.float32([1, 2]), 0.0), ("many", np.arange(21, dtype=np.float32), 0.0)],
            None,
        )
    assert {*values(tmp_path)} == {"test1/p[0]", "test1/p[1]", "test1/many"}
    assert values(tmp_path)["test1/many"][8].histo.num == 21


def test_a_resumed_run_goes_on_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    run(tmp_path, 0, 8)
    run(tmp_path, 4, 6)
    assert list(scalars(tmp_path, "loss")) == [0, 2, 4, 6]
    assert scalars(tmp_path, "loss")[6] == 1.5  # the last loss of the second run, not the first's
    assert list(scalars(tmp_path, "test/accuracy")) == [0, 4]
    run(tmp_path, 0, 2)
    assert list(scalars(tmp_path, "loss")) == [0, 2]
    assert len(list(tmp_path.iterdir())) == 3


def test_histograms_every_so_often(tmp_path: Path) -> None:
    weights = Weights()
    run(tmp_path, 0, 7, 3, weights)
    shown = values(tmp_path)
    assert weights.asked == 3
    assert list(shown["weights/ip/0"]) == list(shown["gradients/ip/0"]) == [0, 3, 6]
    histogram = shown["weights/ip/0"][3].histo
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (0, 99, 100, 4950)
    assert histogram.sum_squares == sum(i * i for i in range(100))
    assert sum(histogram.bucket) == 100
    assert len(histogram.bucket) == len(histogram.bucket_limit)
    assert histogram.bucket_limit[-1] == 99
    assert sum(shown["gradients/ip/0"][0].histo.bucket) == 100  # all in one place
    assert shown["weights/ip/1"][0].histo.num == 1  # what is not finite is left out
    assert "gradients/ip/1" not in shown


def test_no_histograms_unless_they_are_wanted(tmp_path: Path) -> None:
    weights = Weights()
    run(tmp_path, 0, 7, 0, weights)
    assert weights.asked == 0
    assert not any(tag.startswith("weights") for tag in values(tmp_path))


def test_a_histogram_of_nothing_finite() -> None:
    assert tensorboard._histogram("t", np.float32([np.nan])) == []
    assert tensorboard._histogram("t", np.zeros((0, 2), np.float32)) == []
    (wide,) = tensorboard._histogram("t", np.float32([-3e38, 3e38]))
    assert sum(wide["histo"]["bucket"]) == 2


def test_filters_are_a_picture(tmp_path: Path) -> None:
    filters = np.zeros((4, 3, 5, 5), np.float32)
    filters[0, 2] = 1  # red
    run(tmp_path, 0, 4, 2, Weights(filters))
    shown = values(tmp_path)["filters/conv1"]
    assert list(shown) == [0, 2, 4]  # and at the end
    image = shown[4].image
    picture = cv2.imdecode(np.frombuffer(image.encoded_image_string, np.uint8), cv2.IMREAD_COLOR)
    assert picture.shape == (image.height, image.width, 3)
    assert picture[2, 2].tolist() == [0, 0, 255]
    assert picture[2, -2].tolist() == [0, 0, 0]


def test_events_are_in_the_file_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "FLUSH_S", 0)
    board = TensorBoard(str(tmp_path))
    board.test_done(0, 0, [("accuracy", np.float32(1), 0.0)], None)
    board.iterated(0, 1.0, 0.1, 5)
    assert scalars(tmp_path, "loss") == {0: 1.0}
    board.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_trouble_with_the_disk_costs_the_file_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TensorBoard(str(tmp_path / "run")) as board:
        board.iterated(0, 1.0, 0.1, 5)
        board._writer.close()
        board._writer._writer = open("/dev/full", "wb", 0)  # noqa: SIM115 (the board closes it)
        for i in (1, 2):
            board.lr(i, 0.1)
            board.iterated(i, 1.0, 0.1, 5)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "No space left on device); the run continues without them" in warning.getMessage()


def test_a_folder_that_went_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TensorBoard(str(tmp_path / "run")) as board:
        (tmp_path / "run").rmdir()
        board.iterated(0, 1.0, 0.1, 5)
        board.finished(1, 1.0)
    assert "the run continues without them" in caplog.text


def test_no_file_before_there_is_something_to_tell(tmp_path: Path) -> None:
    TensorBoard(str(tmp_path / "run")).close()
    assert list((tmp_path / "run").iterdir()) == []


def test_what_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write events in .*file"):
        TensorBoard(str(tmp_path / "file"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'caffepy\[tensorboard\]'"):
        TensorBoard(str(tmp_path / "run"))


def test_it_hears_what_the_other_reporters_hear(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path / "run"))
    with open_report(None, 10, False, [board]) as report:
        golden.replay(report, golden.messages())
    assert 500 in scalars(tmp_path / "run", "loss")


def test_events_stay_where_the_run_began_wherever_layers_change_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    with TensorBoard("events") as board:
        os.chdir("there")
        board.displayed(Displayed(0, 0.5, [], 1, 1, 2))
        board.iterated(0, 0.5, 0.01, 50)
    assert len(list((tmp_path / "events").iterdir())) == 1
