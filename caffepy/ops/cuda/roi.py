"""Pooling of regions of interest."""

from caffepy.ops.cuda.launch import Array, launch


def roi_pool_forward(x: Array, rois: Array, y: Array, index: Array, scale: float) -> None:
    arguments = (x, rois, y, index, *y.shape, *x.shape[2:], float(scale))
    launch("roi", "roi_pool_forward", y, y.size, *arguments)


def roi_pool_backward(dy: Array, rois: Array, index: Array, dx: Array, scale: float) -> None:
    arguments = (dy, rois, index, dx, *dx.shape, *dy.shape[2:], len(dy), float(scale))
    launch("roi", "roi_pool_backward", dx, dx.size, *arguments)


def psroi_pool_forward(x: Array, rois: Array, y: Array, scale: float) -> None:
    arguments = (x, rois, y, *y.shape[:3], *x.shape[2:], float(scale))
    launch("roi", "psroi_pool_forward", y, y.size, *arguments)


def psroi_pool_backward(dy: Array, rois: Array, dx: Array, scale: float) -> None:
    arguments = (dy, rois, dx, *dx.shape, dy.shape[1], dy.shape[2], len(dy), float(scale))
    launch("roi", "psroi_pool_backward", dx, dx.size, *arguments)


def roi_align_forward(
    x: Array, rois: Array, y: Array, scale: float, samples: int, beyond: int, sensitive: bool
) -> None:
    arguments = (x, rois, y, *y.shape, *x.shape[1:], float(scale), samples, beyond, int(sensitive))
    launch("roi", "roi_align_forward", y, y.size, *arguments)


def roi_align_backward(
    dy: Array, rois: Array, dx: Array, scale: float, samples: int, beyond: int, sensitive: bool
) -> None:
    sizes = (*dx.shape, *dy.shape[1:], len(dy))
    arguments = (dy, rois, dx, *sizes, float(scale), samples, beyond, int(sensitive))
    launch("roi", "roi_align_backward", dx, dx.size, *arguments)
