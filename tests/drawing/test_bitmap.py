import cv2
import numpy as np
import pytest

from caffepy.drawing.bitmap import MOST, bitmap, encoded
from caffepy.drawing.svg import Graph, Node

RED, BLUE = "#ff0000", "#0000ff"


def graph(rankdir: str = "LR") -> Graph:
    made = Graph("it", rankdir)
    made.nodes = {"a": Node("first", "box", RED), "b": Node("second\nline", "octagon", BLUE)}
    made.edges = [("a", "b", "64")]
    return made


def spot(pixels: np.ndarray, bgr: tuple[int, int, int]) -> tuple[float, float]:  # type: ignore[type-arg]
    """The middle (y, x) of what has this colour."""
    ys, xs = np.nonzero((pixels == bgr).all(axis=2))
    assert len(ys) > 100
    return ys.mean(), xs.mean()


@pytest.mark.parametrize("rankdir", ["LR", "RL", "TB", "BT"])
def test_nodes_lie_in_the_direction_of_the_arrows(rankdir: str) -> None:
    pixels = bitmap(graph(rankdir))
    (ay, ax), (by, bx) = spot(pixels, (0, 0, 255)), spot(pixels, (255, 0, 0))
    ahead = {"LR": bx - ax, "RL": ax - bx, "TB": by - ay, "BT": ay - by}[rankdir]
    assert ahead > 20
    assert abs({"LR": ay - by, "RL": ay - by}.get(rankdir, ax - bx)) < 3


def test_an_arrow_leads_to_its_end() -> None:
    pixels = bitmap(graph())
    black = (pixels < 60).all(axis=2)
    (y, ax), (_, bx) = spot(pixels, (0, 0, 255)), spot(pixels, (255, 0, 0))
    row = black[round(y) - 12 : round(y) + 12, round(ax) : round(bx)].sum(axis=0)
    left, right = np.nonzero(row)[0][[0, -1]] + round(ax)
    between = row[
        (np.arange(len(row)) > len(row) // 2 - 5) & (np.arange(len(row)) < len(row) // 2 + 5)
    ]
    assert (between >= 1).all()  # the line
    assert row[: right - round(ax)].max() >= 8  # its head
    assert left < right


def test_labels_are_written() -> None:
    without = graph()
    without.nodes = {
        name: node._replace(label="x\nx" if "\n" in node.label else "x")
        for name, node in without.nodes.items()
    }
    assert (bitmap(graph()) == 0).sum() > (bitmap(without) == 0).sum()
    strange = graph()
    strange.nodes["a"] = Node("größe", "box", RED)
    assert bitmap(strange).size


def test_large_graphs_are_drawn_smaller() -> None:
    large = Graph("it", "LR")
    large.nodes = {str(i): Node("n" * 40, "box", RED) for i in range(700)}
    large.edges = [(str(i), str(i + 1), "") for i in range(60)]
    pixels = bitmap(large)
    assert pixels.shape[0] * pixels.shape[1] <= MOST * 1.01


def test_empty_graphs_and_files() -> None:
    assert bitmap(Graph("none")).ndim == 3
    content = encoded(graph(), "png")
    np.testing.assert_array_equal(
        cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR), bitmap(graph())
    )


def test_no_side_is_too_long_for_viewers() -> None:
    graph = Graph("long")
    for i in range(200):
        graph.nodes[f"n{i}"] = Node("a label of a node", "box", "#ffffff")
        if i:
            graph.edges.append((f"n{i - 1}", f"n{i}", ""))
    assert bitmap(graph).shape[1] == 16_000
