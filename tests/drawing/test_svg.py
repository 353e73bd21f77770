import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from caffepy.drawing.svg import Graph, Node, svg

NAME = "{http://www.w3.org/2000/svg}%s"
Box = tuple[float, float, float, float]


def graph_of(edges: str, rankdir: str = "LR") -> Graph:
    """A graph of edges such as `a>b b>c`."""
    graph = Graph("it", rankdir)
    for edge in edges.split():
        start, end = edge.split(">")
        for name in (start, end):
            graph.nodes.setdefault(
                name,
                Node(f"{name}\nsecond line", "box" if name.islower() else "octagon", "#ffffff"),
            )
        graph.edges.append((start, end, f"{start}-{end}"))
    return graph


def boxes(picture: ElementTree.Element) -> dict[str, Box]:
    """Left, top, right and bottom of each node."""
    found = {}
    texts = [text for text in picture.iter(NAME % "text") if len(text)]
    for polygon, text in zip(picture.iter(NAME % "polygon"), texts, strict=True):
        points = [tuple(map(float, point.split(","))) for point in polygon.attrib["points"].split()]
        xs, ys = zip(*points, strict=True)
        found[str(text[0].text)] = (min(xs), min(ys), max(xs), max(ys))
    return found


def middle(box: Box) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


GRAPHS = {
    "chain": "a>B B>c c>D",
    "diamond": "a>B a>C B>d C>d",
    "skips": "a>B B>c c>D D>e B>e B>f f>G D>g a>H H>g",
    "in place": "a>B B>c c>B B>d d>E",
    "long circle": "a>B B>c c>D D>e e>B e>f",
    "two parts": "a>B c>D",
}


@pytest.mark.parametrize("rankdir", ["LR", "RL", "TB", "BT"])
@pytest.mark.parametrize("case", GRAPHS)
def test_nodes_lie_apart_and_arrows_lead_on(case: str, rankdir: str) -> None:
    graph = graph_of(GRAPHS[case], rankdir)
    picture = ElementTree.fromstring(svg(graph))
    found = boxes(picture)
    assert found.keys() == graph.nodes.keys()
    for one, other in combinations(found.values(), 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    assert all(
        left >= 0 and top >= 0 and right <= width and bottom <= height
        for left, top, right, bottom in found.values()
    )
    axis, sign = {"LR": (0, 1), "RL": (0, -1), "TB": (1, 1), "BT": (1, -1)}[rankdir]
    on = [sign * (middle(found[b])[axis] - middle(found[a])[axis]) > 0 for a, b, _ in graph.edges]
    assert on.count(False) == (case in ("in place", "long circle"))


def test_an_edge_ends_at_its_nodes() -> None:
    picture = ElementTree.fromstring(svg(graph_of("a>B B>c a>c")))
    found = boxes(picture)
    paths = [
        path.attrib["d"] for path in picture.iter(NAME % "path") if "marker-end" in path.attrib
    ]
    x, y = map(float, re.findall(r"[\d.]+", paths[2])[:2])
    end_x, end_y = map(float, re.findall(r"[\d.]+", paths[2])[-2:])
    assert (x, y) == pytest.approx((found["a"][2], middle(found["a"])[1]), abs=0.1)
    assert (end_x, end_y) == pytest.approx((found["c"][0], middle(found["c"])[1]), abs=0.1)
    assert paths[2].count("C") == 2  # around the node between


def test_labels_lie_on_edges_with_white_around_them() -> None:
    elements = list(ElementTree.fromstring(svg(graph_of("a>B B>c c>D B>D"))))
    kinds = [element.tag.rpartition("}")[2] for element in elements]
    labels = [i for i, element in enumerate(elements) if element.get("paint-order") == "stroke"]
    assert len(labels) == 4
    assert min(labels) > max(i for i, kind in enumerate(kinds) if kind in ("path", "polygon"))
    assert {elements[i].attrib["stroke"] for i in labels} == {"white"}


def test_long_edges_are_told_apart_by_colours() -> None:
    picture = ElementTree.fromstring(svg(graph_of("a>B B>c c>D D>e a>D B>e")))
    inks = [p.attrib["stroke"] for p in picture.iter(NAME % "path") if "marker-end" in p.attrib]
    assert inks[:4] == ["#000000"] * 4
    assert len({*inks}) == 3


def test_a_long_label_makes_room_only_where_it_is() -> None:
    graph = graph_of("a>B B>c c>D")
    narrow = float(ElementTree.fromstring(svg(graph)).attrib["width"])
    graph.edges[0] = ("a", "B", "a-B" + "x" * 100)
    wide = float(ElementTree.fromstring(svg(graph)).attrib["width"])
    assert wide - narrow == pytest.approx(100 * 7 * 0.85, abs=1)


def test_labels_are_shown_and_escaped() -> None:
    graph = graph_of("a>b")
    graph.name = "<it>"
    graph.nodes["a"] = Node('<&"\x07', "box", "#ffffff")
    text = svg(graph)
    picture = ElementTree.fromstring(text)
    assert '<&"\ufffd' in [span.text for span in picture.iter(NAME % "tspan")]
    assert "a-b" in [element.text for element in picture.iter(NAME % "text")]
    assert "<title>&lt;it&gt;</title>" in text


def test_an_empty_graph_is_a_picture() -> None:
    assert ElementTree.fromstring(svg(Graph("nothing"))).attrib["width"] != "0"
