import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy.core.errors import UsageError
from caffepy.report import plot
from caffepy.report.series import Run

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures instead of saving them."""
    saved: list[Any] = []
    monkeypatch.setattr(plot, "save", lambda figure, path: saved.append(figure))
    return saved


def run(name: str = "a", **curves: list[float]) -> Run:
    it = Run(name)
    for curve, values in ({"loss": [4.0, 2.0, 1.0], "lr": [0.1, 0.1, 0.001]} | curves).items():
        for i, value in enumerate(values):
            it.add(curve.replace("_", " "), 10 * i, float(i), value)
    return it


def labels(axes: Any) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def test_a_panel_for_each_kind(figures: list[Any]) -> None:
    plot.draw([run(test_accuracy=[0.1, 0.5], test_loss=[3.0, 2.0])], "a.png", x="seconds")
    panels = figures[0].axes
    assert [axes.get_ylabel() for axes in panels] == ["loss", "accuracy", "lr"]
    assert labels(panels[0]) == ["loss", "test loss"]
    assert list(panels[0].get_lines()[0].get_xdata()) == [0, 1, 2]
    assert [axes.get_yscale() for axes in panels] == [
        "linear",
        "linear",
        "log",
    ]  # the rate fell to a hundredth
    assert panels[-1].get_xlabel() == "seconds"
    assert panels[-1].get_legend() is None


def test_several_runs_have_a_colour_each(figures: list[Any]) -> None:
    plot.draw([run("a", test_loss=[3.0]), run("b")], "a.png", wanted=["loss"], log_loss=True)
    (axes,) = figures[0].axes
    assert labels(axes) == ["a: loss", "a: test loss", "b: loss"]
    a, a_test, b = axes.get_lines()
    assert a.get_color() == a_test.get_color() != b.get_color()
    assert a.get_linestyle() == b.get_linestyle() != a_test.get_linestyle()
    assert axes.get_yscale() == "log"


def test_an_output_that_only_repeats_the_loss_is_left_out(figures: list[Any]) -> None:
    it = run(train_loss=[4.0, 2.00001, 1.0], train_loss1=[4.0, 2.5, 1.0])
    plot.draw([it], "a.png")
    assert labels(figures[0].axes[0]) == ["loss", "train loss1"]
    plot.draw([it], "a.png", wanted=["train loss"])
    assert [line.get_label() for line in figures[1].axes[0].get_lines()] == ["train loss"]


def test_what_is_not_finite_is_a_gap_and_a_cross(figures: list[Any]) -> None:
    plot.draw([run(loss=[4.0, math.inf, 2.0, math.nan])], "a.png", wanted=["loss"])
    line, crosses = figures[0].axes[0].get_lines()
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False, True]
    assert crosses.get_xdata().tolist() == [10, 30]
    assert crosses.get_label() == "loss: not finite"


def test_smoothing() -> None:
    values = np.array([1.0, 3.0, math.nan, 5.0, 7.0])
    np.testing.assert_array_equal(plot.smoothed(values, 2), [1, 2, math.nan, 5, 6])
    np.testing.assert_array_equal(plot.smoothed(values, 9), [1, 2, math.nan, 3, 4])
    assert plot.smoothed(values, 1) is values


def test_smoothed_curves_show_the_values_behind_them(figures: list[Any]) -> None:
    plot.draw([run()], "a.png", smooth=2)
    pale, line = figures[0].axes[0].get_lines()
    assert (pale.get_ydata().tolist(), line.get_ydata().tolist()) == ([4, 2, 1], [4, 3, 1.5])
    assert pale.get_alpha() < 1
    assert len(figures[0].axes[1].get_lines()) == 1  # rates are not smoothed


def test_names_are_no_formulas(figures: list[Any]) -> None:
    plot.draw([run("_a", **{"test $": [1.0]}), run("b\udcf6")], "a.png", wanted=["loss", "outputs"])
    assert labels(figures[0].axes[0]) == [" _a", "b\ufffd"]
    figures[0].savefig("/dev/null", format="png")


def test_caffes_charts(figures: list[Any]) -> None:
    it = run(test_prob=[0.3], test_accuracy=[0.5, 0.6], test_loss=[3.0, 2.0])
    shown = []
    for number in range(8):
        plot.draw_chart([it], number, "a.png")
        (axes,) = figures[-1].axes
        (line,) = axes.get_lines()
        shown.append(
            (
                axes.get_title(),
                axes.get_xlabel(),
                line.get_xdata()[1].item(),
                line.get_ydata()[1].item(),
            )
        )
    assert shown == [
        ("Test accuracy vs. Iters", "Iters", 10, 0.6),
        ("Test accuracy vs. Seconds", "Seconds", 1, 0.6),
        ("Test loss vs. Iters", "Iters", 10, 2.0),
        ("Test loss vs. Seconds", "Seconds", 1, 2.0),
        ("Train learning rate vs. Iters", "Iters", 10, 0.1),
        ("Train learning rate vs. Seconds", "Seconds", 1, 0.1),
        ("Train loss vs. Iters", "Iters", 10, 2.0),
        ("Train loss vs. Seconds", "Seconds", 1, 2.0),
    ]
    with pytest.raises(UsageError, match=r"a has no curve for 'Test loss' \(curves: loss, lr\)"):
        plot.draw_chart([run()], 2, "a.png")


def test_a_run_without_times_is_not_drawn_over_seconds() -> None:
    it = Run("a")
    it.add("loss", 0, math.nan, 1.0)
    for draw in (
        lambda: plot.draw([it], "a.png", x="seconds"),
        lambda: plot.draw_chart([it], 7, "a.png"),
    ):
        with pytest.raises(UsageError, match="a has no times"):
            draw()


@pytest.mark.parametrize("values", [[math.nan, math.inf], [0.0, -1.0], [1.0]])
def test_losses_that_a_logarithmic_axis_cannot_show(values: list[float], tmp_path: Path) -> None:
    plot.draw([run(loss=values)], str(tmp_path / "a.png"), log_loss=True)
    assert (tmp_path / "a.png").exists()


def test_wanted_curves_that_nobody_has() -> None:
    with pytest.raises(
        UsageError,
        match=r'no run has curves of "los", did you mean "loss"\? \(there are: loss, lr\)',
    ):
        plot.draw([run()], "a.png", wanted=["los"])


@pytest.mark.parametrize(
    ("ext", "start"), [("png", b"\x89PNG"), ("SVG", b"<?xml"), ("pdf", b"%PDF")]
)
def test_formats(ext: str, start: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"it.{ext}"
    plot.draw([run()], str(path))
    assert path.read_bytes().startswith(start)
    assert list(tmp_path.iterdir()) == [path]


def test_formats_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r'extension of "a\.jpg" must name the format: \.png, \.svg, \.pdf'
    ):
        plot.draw([run()], "a.jpg")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'caffepy\[plot\]'"):
        plot.draw([run()], "a.png")
