"""`caffepy bench train`: what it trains, on which data, and what it says."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy import models
from caffepy.cli import main
from caffepy.commands.bench.train import Trainer, bench_train
from caffepy.core.errors import ConfigError
from caffepy.device.cuda import CudaDevice
from caffepy.models.synthetic import image_shape

DIGITS = Path(models.__file__).parent / "digits"


def solver(name: str) -> str:
    path = models.path(name, "solver")
    assert path
    return path


def test_the_figures_of_a_run() -> None:
    result = bench_train(
        solver("lenet"), image=image_shape("lenet"), batch=4, iterations=2, windows=3
    )
    assert (result.net, result.batch, result.iterations, len(result.windows)) == ("LeNet", 4, 2, 3)
    assert min(result.windows) <= result.images_per_s <= max(result.windows)
    assert result.ms == pytest.approx(4000 / result.images_per_s)
    assert result.spread == pytest.approx(
        (max(result.windows) - min(result.windows)) / result.images_per_s
    )
    assert list(result.shares) == ["data", "forward", "backward", "update"]
    assert sum(result.shares.values()) == pytest.approx(1)
    assert (result.precision, result.memory, result.host_ms, result.captured) == (
        "fp32",
        None,
        None,
        False,
    )
    assert np.isfinite(result.loss)


def test_lines_and_json() -> None:
    result = bench_train(
        solver("lenet"), image=image_shape("lenet"), batch=2, iterations=1, windows=1
    )
    first, second, *_ = result.table().splitlines()
    assert first == "LeNet on the CPU, fp32, batch 2, synthetic data"
    assert second.startswith(
        f"{result.images_per_s:.0f} images/s, the median of 1 windows of 1 iterations ("
    )
    assert json.loads(result.json())["windows"] == result.windows


def test_synthetic_data_stay_and_the_batch_is_the_nets() -> None:
    trainer = Trainer(solver("lenet"), image=image_shape("lenet"))
    data, label = (trainer.net.blobs[name].host_data.copy() for name in ("data", "label"))
    trainer.window(1)
    assert trainer.batch == 64
    np.testing.assert_array_equal(trainer.net.blobs["data"].host_data, data)
    np.testing.assert_array_equal(trainer.net.blobs["label"].host_data, label)
    assert data.std() > 0.5
    assert len(set(label.astype(int))) > 5
    trainer.close()


def test_a_database_with_the_nets_own_transformation(tmp_path: Path) -> None:
    trainer = Trainer(solver("digits"), batch=3, data=str(DIGITS / "digits_train_lmdb"))
    assert trainer.batch == 3
    before = trainer.net.blobs["data"].host_data.copy()
    trainer.window(1)
    after = trainer.net.blobs["data"].host_data
    assert not np.array_equal(before, after)
    assert 0.5 < after.max() < 1.01  # it has a scale
    trainer.close()


def test_a_list_of_images_keeps_the_nets_folder_and_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net" / "images").mkdir(parents=True)
    cv2.imwrite(str(tmp_path / "net" / "images" / "a.png"), np.full((9, 7, 3), 50, np.uint8))
    (tmp_path / "list.txt").write_text("a.png 1\n")
    (tmp_path / "net" / "net.prototxt").write_text(
        'layer { name: "d" type: "ImageData" top: "x" top: "y" image_data_param { batch_size: 2 '
        'source: "none.txt" root_folder: "images/" new_height: 6 new_width: 5 } }'
        'layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { '
        'num_output: 2 } } layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "y" }'
    )
    path = tmp_path / "net" / "solver.prototxt"
    path.write_text('net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed"')
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(str(path), data="list.txt")
    trainer.window(1)
    assert trainer.net.blobs["x"].shape == (2, 3, 6, 5)
    assert (trainer.net.blobs["x"].host_data == 50).all()
    trainer.close()


def test_tests_snapshots_and_weights_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "solver.prototxt").write_text(
        f'net: "{DIGITS}/train_val.prototxt" test_iter: 1 test_interval: 1 snapshot: 1 '
        f'snapshot_prefix: "nowhere/x" '
        'weights: "none.caffemodel" base_lr: 100 lr_policy: "poly" power: 1 max_iter: 3 display: 1'
    )
    path = str(tmp_path / "solver.prototxt")
    result = bench_train(
        path, batch=2, iterations=3, windows=2, data=str(DIGITS / "digits_train_lmdb")
    )
    assert np.isfinite(result.loss)
    assert [p.name for p in tmp_path.iterdir()] == ["solver.prototxt"]


def test_a_net_without_a_data_layer_takes_no_database(tmp_path: Path) -> None:
    (tmp_path / "solver.prototxt").write_text(
        'base_lr: 1 lr_policy: "fixed" net_param { layer { name: "d" type: "DummyData" top: "x" '
        "dummy_data_param { shape { dim: 1 } } } }"
    )
    with pytest.raises(ConfigError, match="no Data layer that could read a database"):
        Trainer(str(tmp_path / "solver.prototxt"), data="some_lmdb")


def test_a_net_without_data_has_no_images_to_count(tmp_path: Path) -> None:
    (tmp_path / "solver.prototxt").write_text(
        'base_lr: 1 lr_policy: "fixed" net_param { layer { name: "x" type: "Input" top: "x" '
        "input_param { shape { dim: 1 } } } }"
    )
    with pytest.raises(ConfigError, match="no data layer, so there are no images to count"):
        bench_train(str(tmp_path / "solver.prototxt"))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "bench",
        "train",
        "--model",
        "lenet",
        "--batch",
        "2",
        "--iterations",
        "1",
        "--windows",
        "2",
    ]
    assert main.run([*line, "--json"]) == 0
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["windows"]) == 2
    assert shown.err == ""
    assert (
        main.run(
            [
                "bench",
                "train",
                "-solver",
                "lenet",
                "-batch=2",
                "-iterations=1",
                "-nocapture",
                "-nofuse",
            ]
        )
        == 0
    )
    assert (
        capsys.readouterr().out.splitlines()[0] == "LeNet on the CPU, fp32, batch 2, synthetic data"
    )
    assert main.run(["bench", "train"]) == 2
    assert "give --model NAME or --solver FILE" in capsys.readouterr().err
    assert main.run(["bench", "train", "--model", "lenet", "--gpu", "0", "--cpu"]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_on_a_gpu(capture: bool) -> None:
    result = bench_train(
        solver("lenet"),
        gpu="0",
        image=image_shape("lenet"),
        iterations=12,
        windows=2,
        precision="bf16",
        capture=capture,
    )
    assert (result.precision, result.captured, result.batch) == ("bf16", capture, 64)
    assert result.device == CudaDevice(0).name
    assert result.host_ms
    assert result.memory
    assert result.memory.pool > 0
    assert np.isfinite(result.loss)
    assert "MiB of GPU memory" in result.table()
    assert f"{'' if capture else 'not '}captured, fused" in result.table().splitlines()[0]
