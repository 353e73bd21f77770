"""Connectionist temporal classification: labels of sequences without places (Graves 2012)."""

from functools import partial
from math import exp, inf, log, log1p

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import EXACT, inlined, kernel

_kernel, _inlined = partial(kernel, fastmath=EXACT), partial(inlined, fastmath=EXACT)


@_inlined
def _plus(a: float, b: float) -> float:
    """Return log(exp(a) + exp(b))."""
    most, least = (a, b) if a > b else (b, a)
    return most if least == -inf else most + log1p(exp(least - most))


@_kernel
def _forward(
    x: Array,
    steps: Array,
    labels: Array,
    blank: int,
    merge: bool,
    delay: int,
    path: Array,
    sizes: Array,
    normalizers: Array,
    states: Array,
    losses: Array,
    lo: int,
    hi: int,
) -> None:
    times, _, classes = x.shape
    for n in range(lo, hi):
        p, s, end = path[n], states[n], steps[n]
        size, repeats, last = 0, 0, -1
        for i in range(labels.shape[1]):
            c = labels[n, i]
            if c >= 0:
                p[size], p[size + 1] = blank, c
                size += 2
                repeats += c == last
                last = c
        p[size] = blank
        needed = size // 2 + (repeats if merge else 0)
        size += 1
        sizes[n], losses[n] = 0, 0
        if end - delay < max(needed, 1):
            continue
        sizes[n] = size
        for t in range(delay, end):
            row = x[t, n]
            most, total = row[0], 0.0
            for c in range(classes):
                most = max(most, row[c])
            for c in range(classes):
                total += exp(row[c] - most)
            normalizers[t, n] = most + log(total)
        for t in range(delay, end):
            for u in range(size):
                before = -inf
                if t == delay:
                    before = 0.0 if u < 2 else -inf
                else:
                    if merge or u % 2 == 0:
                        before = s[t - 1, u]
                    if u > 0:
                        before = _plus(before, s[t - 1, u - 1])
                    if u > 1 and u % 2 and not (merge and p[u] == p[u - 2]):
                        before = _plus(before, s[t - 1, u - 2])
                s[t, u] = before + x[t, n, p[u]] - normalizers[t, n]
        total = s[end - 1, size - 1]
        if size > 1:
            total = _plus(total, s[end - 1, size - 2])
        losses[n] = -total
        after, now = s[times], s[times + 1]
        for u in range(size):
            now[u] = 0.0 if u >= size - 2 else -inf
        for t in range(end - 1, delay - 1, -1):
            for u in range(size):
                s[t, u] = exp(s[t, u] + now[u] - total)
            after, now = now, after
            for u in range(size):
                after[u] += x[t, n, p[u]] - normalizers[t, n]
            for u in range(size):
                ways = after[u] if merge or u % 2 == 0 else -inf
                if u + 1 < size:
                    ways = _plus(ways, after[u + 1])
                if u + 2 < size and u % 2 and not (merge and p[u] == p[u + 2]):
                    ways = _plus(ways, after[u + 2])
                now[u] = ways


@_kernel
def _backward(
    x: Array,
    steps: Array,
    delay: int,
    path: Array,
    sizes: Array,
    normalizers: Array,
    states: Array,
    scale: Array,
    dx: Array,
    lo: int,
    hi: int,
) -> None:
    factor = scale[()]
    for n in range(lo, hi):
        for t in range(x.shape[0]):
            row = dx[t, n]
            if sizes[n] == 0 or t < delay or t >= steps[n]:
                row[:] = 0
                continue
            for c in range(x.shape[2]):
                row[c] = factor * exp(x[t, n, c] - normalizers[t, n])
            for u in range(sizes[n]):
                row[path[n, u]] -= factor * states[n, t, u]


def ctc_forward(
    x: Array,
    steps: Array,
    labels: Array,
    blank: int,
    merge: bool,
    delay: int,
    path: Array,
    sizes: Array,
    normalizers: Array,
    states: Array,
    losses: Array,
) -> None:
    given = x, steps, labels, blank, merge, delay, path, sizes, normalizers, states, losses
    parallel(partial(_forward, *given), x.shape[1])


def ctc_backward(
    x: Array,
    steps: Array,
    delay: int,
    path: Array,
    sizes: Array,
    normalizers: Array,
    states: Array,
    scale: Array,
    dx: Array,
) -> None:
    given = x, steps, delay, path, sizes, normalizers, states, scale, dx
    parallel(partial(_backward, *given), x.shape[1])
