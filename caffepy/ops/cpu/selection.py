"""Gather and scatter-add of rows, and the largest values."""

import numpy as np

from caffepy.device.blob import Array


def take_rows(x: Array, index: Array, cut: bool, y: Array, wrong: Array) -> None:
    bad = ~((index > -1 if cut else index >= 0) & (index < x.shape[0]))
    if bad.any():
        wrong[:] = 1, index[bad][0]
    else:
        np.take(x, index.astype(np.intp), axis=0, out=y, mode="clip")


def add_rows(dy: Array, index: Array, dx: Array) -> None:
    good = (index > -1) & (index < dx.shape[0])
    if not good.all():
        dy, index = dy[good], index[good]
    np.add.at(dx, index.astype(np.intp), dy)


def top_values(x: Array, top_k: int, places: bool, values: bool, y: Array) -> None:
    rows = np.moveaxis(x, 1, -1)  # (outer, inner, C)
    order = np.argsort(rows, axis=-1, kind="stable")[..., : -top_k - 1 : -1]
    if places:
        y[:, :top_k] = np.moveaxis(order, -1, 1)
    if values:
        y[:, -top_k:] = np.moveaxis(np.take_along_axis(rows, order, axis=-1), -1, 1)
