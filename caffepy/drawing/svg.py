"""Directed graphs as SVG pictures, if graphviz is not installed.

Nodes lie in ranks, each after all that lead to it; within a rank they are ordered, then shifted, to
lie close to their neighbours (after Sugiyama, Tagawa and Toda 1981). `along` is the direction of
the arrows, `across` the other one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

FONT, LINE, LETTER = 12, 15, 7.0
"""Pixels: size of letters, height of a line, width of a letter."""

MARGIN, GAP, ROOM = 12, 14, 34
"""Pixels: around the picture and inside a node, between nodes of a rank, between ranks."""

SWEEPS = 12

INKS = ("#000000", "#1f5fa8", "#a83232", "#2f7d32", "#7a4ca0", "#a86a00")
"""Colours of edges: black from a rank to the next one, else the others in turn by their start."""


class Node(NamedTuple):
    """The look of a node; `shape` is "box" or "octagon"."""

    label: str
    shape: str
    colour: str


@dataclass
class Graph:
    """Nodes by name and edges (from, to, label), drawn from left to right (LR), RL, TB or BT."""

    name: str
    rankdir: str = "LR"
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[tuple[str, str, str]] = field(default_factory=list)


class _Bend(NamedTuple):
    """A place in a rank where an edge passes."""

    edge: int
    rank: int


_Place = str | _Bend
_Point = tuple[float, float]
_Sizes = Mapping[str, _Point]  # along and across
_Rows = Sequence[list[_Place]]  # by rank
_Chains = Mapping[int, list[_Place]]  # by edge: its start, bends and end


def svg(graph: Graph) -> str:
    """Return the picture."""
    lies = graph.rankdir in ("LR", "RL")
    sizes = {name: _size(node, lies) for name, node in graph.nodes.items()}
    forward = _without_cycles(graph)
    ranks = _ranks(graph, forward)
    chains: dict[int, list[_Place]] = {}
    for i in forward:
        start, end, _ = graph.edges[i]
        bends = (_Bend(i, rank) for rank in range(ranks[start] + 1, ranks[end]))
        chains[i] = [start, *bends, end]
    rows = _ordered(graph, ranks, chains)
    across = _across(rows, chains, sizes)
    rooms = [float(ROOM)] * len(rows)
    for start, end, label in graph.edges if lies else ():
        rank = min(ranks[start], ranks[end])
        rooms[rank] = max(rooms[rank], ROOM + len(label) * LETTER * 0.85)
    along, length = _along(rows, sizes, rooms)
    ends = (across[place] + _half(place, sizes) for row in rows for place in row)
    width = max(ends, default=0.0) + MARGIN

    def point(u: float, v: float) -> _Point:
        u = length - u if graph.rankdir in ("RL", "BT") else u
        return (u, v) if lies else (v, u)

    shown = point(length, width) if graph.rankdir in ("LR", "TB") else point(0, width)
    parts: list[str] = []
    labels: list[str] = []
    far = dict.fromkeys(graph.edges[i][0] for i, chain in chains.items() if len(chain) > 2)
    inks = {start: INKS[1 + i % (len(INKS) - 1)] for i, start in enumerate(far)}
    for i, (start, end, label) in enumerate(graph.edges):
        sign, beside = (1, 0.0) if i in chains else (-1, GAP / 2)  # back, beside the way there
        stops = [(along[ranks[start]] + sign * sizes[start][0] / 2, across[start] + beside)]
        for bend in chains.get(i, ()):
            if isinstance(bend, _Bend):
                stops.append((along[bend.rank], across[bend]))
        stops.append((along[ranks[end]] - sign * sizes[end][0] / 2, across[end] + beside))
        parts.append(_arrow(stops, point, inks[start] if len(stops) > 2 else INKS[0]))
        if label:
            labels.append(_label(stops, label, point, lies))
    for name, node in graph.nodes.items():
        parts.append(_box(node, sizes[name], point(along[ranks[name]], across[name]), lies))
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{shown[0]:.0f}" height="{shown[1]:.0f}" '
        f'font-family="sans-serif" font-size="{FONT}" text-anchor="middle">\n'
        f"<title>{_text(graph.name)}</title>\n"
        f"<defs>{''.join(map(_tip, INKS))}</defs>\n"
        '<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts + labels)
        + "\n</svg>\n"
    )


def _tip(ink: str) -> str:
    return (
        f'<marker id="tip{ink[1:]}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{ink}"/></marker>'
    )


def _text(label: str) -> str:
    return escape("".join(c if c.isprintable() else "\ufffd" for c in label))


def _size(node: Node, lies: bool) -> _Point:
    """Return the length of a node along and across the ranks."""
    lines = node.label.split("\n")
    wide, high = max(map(len, lines)) * LETTER + 2 * MARGIN, len(lines) * LINE + MARGIN
    return (wide, high) if lies else (high, wide)


def _half(place: _Place, sizes: _Sizes) -> float:
    return sizes[place][1] / 2 if isinstance(place, str) else 0.0


def _without_cycles(graph: Graph) -> list[int]:
    """Return the edges without those that close a cycle, by a depth-first search."""
    leaving: dict[str, list[int]] = defaultdict(list)
    for i, (start, *_) in enumerate(graph.edges):
        leaving[start].append(i)
    kept: list[int] = []
    done: set[str] = set()
    open_: set[str] = set()  # on the way from the root to here
    for root in graph.nodes:
        stack = [(root, iter(leaving[root]))] if root not in done else []
        open_.update(name for name, _ in stack)
        while stack:
            name, rest = stack[-1]
            edge = next(rest, None)
            if edge is None:
                stack.pop()
                open_.discard(name)
                done.add(name)
                continue
            end = graph.edges[edge][1]
            if end not in open_:
                kept.append(edge)
                if end not in done:
                    open_.add(end)
                    stack.append((end, iter(leaving[end])))
    return sorted(kept)


def _ranks(graph: Graph, forward: Sequence[int]) -> dict[str, int]:
    """Return the longest paths to the nodes; sources lie just before their first successor."""
    ends: dict[str, list[str]] = defaultdict(list)
    waits = dict.fromkeys(graph.nodes, 0)
    for i in forward:
        start, end, _ = graph.edges[i]
        ends[start].append(end)
        waits[end] += 1
    first = [name for name, count in waits.items() if not count]
    ranks, ready = dict.fromkeys(graph.nodes, 0), list(first)
    for name in ready:
        for end in ends[name]:
            ranks[end] = max(ranks[end], ranks[name] + 1)
            waits[end] -= 1
            if not waits[end]:
                ready.append(end)
    for name in first:
        ranks[name] = min((ranks[end] for end in ends[name]), default=1) - 1
    return ranks


def _sweeps(
    rows: _Rows, chains: _Chains
) -> Iterator[tuple[list[_Place], Mapping[_Place, list[_Place]]]]:
    """Yield each row with the places next to its places: those before them on the way down, those
    after them on the way up, SWEEPS times.
    """
    before: dict[_Place, list[_Place]] = defaultdict(list)
    after: dict[_Place, list[_Place]] = defaultdict(list)
    for chain in chains.values():
        for a, b in pairwise(chain):
            before[b].append(a)
            after[a].append(b)
    for sweep in range(SWEEPS):
        is_down = sweep % 2 == 0
        for row in rows if is_down else reversed(rows):
            yield row, before if is_down else after


def _ordered(graph: Graph, ranks: Mapping[str, int], chains: _Chains) -> _Rows:
    """Order the places of each rank so that few edges cross."""
    rows: list[list[_Place]] = [[] for _ in range(max(ranks.values(), default=-1) + 1)]
    for name in graph.nodes:
        rows[ranks[name]].append(name)
    for chain in chains.values():
        for bend in chain:
            if isinstance(bend, _Bend):
                rows[bend.rank].append(bend)
    index = {place: float(i) for row in rows for i, place in enumerate(row)}
    for row, near in _sweeps(rows, chains):
        wanted = {
            place: fmean(index[n] for n in near[place]) if near[place] else index[place]
            for place in row
        }
        row.sort(key=wanted.__getitem__)
        index.update((place, float(i)) for i, place in enumerate(row))
    return rows


def _across(rows: _Rows, chains: _Chains, sizes: _Sizes) -> dict[_Place, float]:
    """Return the middle of each place across: as near to its neighbours as its rank allows."""
    at: dict[_Place, float] = {}
    for row in rows:
        at.update(zip(row, _apart(row, [0.0] * len(row), sizes), strict=True))
    for row, near in _sweeps(rows, chains):
        wanted = [fmean(at[n] for n in near[place]) if near[place] else at[place] for place in row]
        at.update(zip(row, _apart(row, wanted, sizes), strict=True))
    low = min((at[place] - _half(place, sizes) for row in rows for place in row), default=0.0)
    return {place: v - low + MARGIN for place, v in at.items()}


def _apart(row: Sequence[_Place], wanted: Sequence[float], sizes: _Sizes) -> list[float]:
    """Return positions near the wanted ones, with room between the places."""
    halves = [_half(place, sizes) for place in row]
    rooms = [a + b + GAP for a, b in pairwise(halves)]
    right, left = list(wanted), list(wanted)
    for i, room in enumerate(rooms):
        right[i + 1] = max(right[i + 1], right[i] + room)
    for i, room in reversed(list(enumerate(rooms))):
        left[i] = min(left[i], left[i + 1] - room)
    return [(a + b) / 2 for a, b in zip(left, right, strict=True)]


def _along(rows: _Rows, sizes: _Sizes, rooms: Sequence[float]) -> tuple[list[float], float]:
    """Return the middle of each rank along the arrows, and the length of all of them; `rooms` is
    the room behind each.
    """
    middles, end, room = [], float(MARGIN), 0.0
    for row, room in zip(rows, rooms, strict=True):
        size = max((sizes[place][0] for place in row if isinstance(place, str)), default=0.0)
        middles.append(end + size / 2)
        end += size + room
    return middles, max(end - room, 0) + MARGIN


def _arrow(stops: Sequence[_Point], point: Callable[[float, float], _Point], ink: str) -> str:
    """Return a curve through these points."""
    path = "M%.1f %.1f" % point(*stops[0])
    for (u, v), (x, y) in pairwise(stops):
        middle = (u + x) / 2
        corners = (*point(middle, v), *point(middle, y), *point(x, y))
        path += "C%.1f %.1f %.1f %.1f %.1f %.1f" % corners
    return f'<path d="{path}" fill="none" stroke="{ink}" marker-end="url(#tip{ink[1:]})"/>'


def _label(
    stops: Sequence[_Point], label: str, point: Callable[[float, float], _Point], lies: bool
) -> str:
    """Return a label beside the first stretch, with white around its letters."""
    (u, v), (x, y) = stops[:2]
    x, y = point((u + x) / 2, (v + y) / 2)
    beside = (x, y - 3, "middle") if lies else (x + 5, y + 3, "start")
    style = 'x="%.1f" y="%.1f" text-anchor="%s"' % beside
    halo = 'stroke="white" stroke-width="4" paint-order="stroke"'
    return f'<text {style} font-size="{FONT - 2}" {halo}>{_text(label)}</text>'


def _box(node: Node, size: _Point, middle: _Point, lies: bool) -> str:
    wide, high = size if lies else size[::-1]
    (x, y), (w, h) = middle, (wide / 2, high / 2)
    cut = min(w, h) / 2 if node.shape == "octagon" else 0
    # the left side from below; mirrored it is the right one
    left = [(cut - w, h), (-w, h - cut), (-w, cut - h), (cut - w, -h)]
    corners = left[1:] + [(-dx, dy) for dx, dy in reversed(left)] + left[:1]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    lines = node.label.split("\n")
    top = y - (len(lines) - 1) * LINE / 2 + FONT / 3
    texts = (
        f'<tspan x="{x:.1f}" y="{top + i * LINE:.1f}">{_text(line)}</tspan>'
        for i, line in enumerate(lines)
    )
    shape = f'<polygon points="{points}" fill="{escape(node.colour)}" stroke="black"/>'
    return f"{shape}<text>{''.join(texts)}</text>"
