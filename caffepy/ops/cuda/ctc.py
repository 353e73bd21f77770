"""Connectionist temporal classification."""

from caffepy.ops.cuda.launch import THREADS, Array, launch, launch_blocks


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
    times, items, classes = x.shape
    threads = min(THREADS, -(-classes // 32) * 32)
    rows = times * items
    launch_blocks("ctc", "ctc_normalizers", x, rows, x, normalizers, classes, threads=threads)
    shape = times, items, classes, labels.shape[1], blank, int(merge), delay
    given = x, steps, labels, normalizers, path, sizes, states, losses
    threads = min(THREADS, -(-path.shape[1] // 32) * 32)
    launch_blocks("ctc", "ctc_states", x, items, *given, *shape, threads=threads)


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
    given = x, steps, sizes, normalizers, scale, dx, *x.shape, delay
    launch("ctc", "ctc_softmax", x, x.size, *given)
    times, items, classes = x.shape
    given = steps, path, sizes, states, scale, dx, times, items, classes, path.shape[1], delay
    launch("ctc", "ctc_subtract", x, times * items, *given)
