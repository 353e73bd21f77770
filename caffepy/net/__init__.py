"""Nets: from a definition to layers that run forward and backward.

Start with `net`: class Net and its two loops. On the way to it a definition goes through `build`
(filter, divide, split) and `wiring`, which makes a `node` of each layer and decides which run
backward. `fusion` finds fused groups, `layouts` chooses how blobs lie on a GPU, `memory` lets blobs
share an arena, `gradients` knows which layers add to which gradient. `weights` reads and writes
caffemodels, those of NVCaffe with `nvcaffe`; `debug` logs debug_info.
"""

from caffepy.net.build import filter_state, insert_splits
from caffepy.net.net import Net

__all__ = ["Net", "filter_state", "insert_splits"]
