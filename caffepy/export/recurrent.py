"""Recurrent layers: the inputs' product for all steps, then a Scan over the steps.

ONNX's own LSTM and RNN cannot begin a sequence within a batch, as `cont` does.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from caffepy.export.graph import Body, Shape, Site, writers


@writers("ContinuationIndicator")
def continuation_indicator(site: Site) -> None:
    """A constant: 0 in the first step, then 1."""
    value = np.ones(site.top_shapes[0])
    value[0] = 0
    site.finish("Identity", site.constant(value))


@writers("LSTM")
def lstm(site: Site) -> None:
    """gates = sums_t + w_h (cont_t h); c = f cont_t c + i g; h = o tanh(c)."""
    scan = _Scan(site, 2, site.layer.state_weight)
    _run(site, scan, _lstm_step(scan), out=site.tops[0])


@writers("Lstm")
def lstm_of_ctpn(site: Site) -> None:
    """Write an LSTM of bottoms (T, N, ...) or (T * N, ...)."""
    layer = site.layer
    whole = layer.steps, layer.streams
    scan = _Scan(site, 2, weight=1)
    h, c = _lstm_step(scan)
    x = site.reshape(site.bottoms[0], (layer.steps * layer.streams, layer.inputs))
    product = site.node("Gemm", x, site.param(0), site.param(2), transB=1)
    sums = site.reshape(product, (*whole, 4 * layer.size))
    if len(site.bottoms) > 1:
        cont = site.reshape(site.bottoms[1], whole)
        site.note("begins each run with a state of 0")
    else:
        cont = site.constant(np.ones(whole))
    y, _ = scan.run([h, c], scan.step.node("Identity", h), sums, cont)
    site.reshape(y, site.top_shapes[0], out=site.tops[0])


@writers("RNN")
def rnn(site: Site) -> None:
    """h = tanh(sums_t + w_h (cont_t h)); the top is tanh(w_o h + b_o)."""
    scan = _Scan(site, 1, site.layer.state_weight, gates=1)
    step = scan.step
    h, sums, cont = scan.inputs
    product = step.node("Gemm", step.node("Mul", cont, h), scan.weight, sums, transB=1)
    all_h = _run(site, scan, [step.node("Tanh", product)])
    first = site.layer.state_weight + 1
    flat = site.node("Flatten", all_h, axis=2)  # (T N, H)
    product = site.node("Gemm", flat, site.param(first), site.param(first + 1), transB=1)
    site.reshape(site.node("Tanh", product), site.top_shapes[0], out=site.tops[0])


@writers("LSTMUnit")
def lstm_unit(site: Site) -> None:
    """One step of an LSTM, gates and states with an axis of 1 before them."""
    c, gates, cont = site.bottoms
    cont = site.node("Unsqueeze", cont, site.integers([2], "axes"))
    i, f, o, g = _gates(site, gates, 2)
    kept = site.node("Mul", site.node("Mul", f, cont), c)
    site.node("Add", kept, site.node("Mul", i, g), out=site.tops[0])
    site.node("Mul", o, site.node("Tanh", site.tops[0]), out=site.tops[1])


def _gates(site: Site, gates: str, axis: int) -> list[str]:
    """The activations i, f, o, g of the gates' sums."""
    parts = [site.between(what) for what in ("i", "f", "o", "g")]
    number = {"num_outputs": 4} if site.graph.opset >= 18 else {}
    site.node("Split", gates, out=parts, axis=axis, **number)
    ops = ("Sigmoid", "Sigmoid", "Sigmoid", "Tanh")
    return [site.node(op, part) for op, part in zip(ops, parts, strict=True)]


class _Scan:
    """A Scan: its body, `step`, takes `inputs`, the states, the inputs' sums and cont of a step;
    `weight` is that of the states.
    """

    def __init__(self, site: Site, states: int, weight: int, gates: int = 4) -> None:
        self.site, layer = site, site.layer
        # operators of the body are apart, its names and constants are the graph's
        self.step = replace(site, graph=replace(site.graph, nodes=[]))
        streams, size = layer.streams, layer.size
        self.state: Shape = (streams, size)
        self.weight = site.param(weight)
        self.inputs = [site.between(what) for what in [*("h", "c")[:states], "sums", "cont"]]
        shapes: list[Shape] = [*[self.state] * states, (streams, gates * size), (streams, 1)]
        self.typed = list(zip(self.inputs, shapes, strict=True))

    def run(
        self,
        states: Sequence[str],
        given: str,
        sums: str,
        cont: str,
        first: Sequence[str] = (),
        out: str | None = None,
    ) -> tuple[str, list[str]]:
        """Close the body with these states and output, add the Scan over sums (T, N, G) and cont
        (T, N); return all steps' outputs and the last states. It begins with `first`, or 0.
        """
        site = self.site
        outputs = [(name, self.state) for name in (*states, given)]
        body = Body(self.step.graph.nodes, self.typed, outputs)
        first = first or [site.constant(np.zeros(self.state), what="first")] * len(states)
        cont = site.node("Unsqueeze", cont, site.integers([2], "axes"))
        last = [site.between("last") for _ in states]
        y = out or site.between("steps")
        site.node("Scan", *first, sums, cont, out=[*last, y], body=body, num_scan_inputs=2)
        return y, last


def _lstm_step(scan: _Scan) -> tuple[str, str]:
    """The states h and c after a step."""
    step = scan.step
    h, c, sums, cont = scan.inputs
    gates = step.node("Gemm", step.node("Mul", cont, h), scan.weight, sums, transB=1)
    i, f, o, g = _gates(step, gates, 1)
    kept = step.node("Mul", step.node("Mul", f, cont), c)
    c = step.node("Add", kept, step.node("Mul", i, g))
    return step.node("Mul", o, step.node("Tanh", c)), c


def _run(site: Site, scan: _Scan, states: Sequence[str], out: str | None = None) -> str:
    """Run a Scan of Caffe's LSTM or RNN, with the states that go in and out; return all steps."""
    exposed = site.layer.exposed
    first = [site.reshape(x, scan.state) for x in site.bottoms[-exposed:]] if exposed else []
    if not exposed:
        site.note("begins each run with a state of 0; with expose_hidden the state goes in and out")
    given = scan.step.node("Identity", states[0])
    y, last = scan.run(states, given, _sums(site), site.bottoms[1], first, out)
    for state, top, shape in zip(last, site.tops[1:], site.top_shapes[1:], strict=False):
        site.reshape(state, shape, out=top)
    return y


def _sums(site: Site) -> str:
    """x w_x + b and the static input's product, for all steps: (T, N, G)."""
    layer = site.layer
    x = site.node("Flatten", site.bottoms[0], axis=2)  # (T N, D)
    product = site.node("Gemm", x, site.param(0), site.param(1), transB=1)
    sums = site.reshape(product, (layer.steps, layer.streams, layer.gates * layer.size))
    if not layer.static:
        return sums
    static = site.node("Flatten", site.bottoms[2], axis=1)
    return site.node("Add", sums, site.node("Gemm", static, site.param(2), transB=1))
