"""The contract of a back end: what `caffepy.ops.cpu` and `caffepy.ops.cuda` both are.

mypy holds both modules to `Ops` (see `backend`), a test compares names, parameters and defaults in
both directions. A file here holds the functions of one family, as a base of `Ops`; objects.py
describes the classes. To add a function: its method with shapes and formula, one function in each
package, the name in both `__init__.py`, a test in `tests/ops` and one in `tests/ops/cuda`.

What holds for all functions:
- The caller makes all arrays; a function writes its outputs, returns nothing and keeps nothing.
  `out`, `y`, `dx` are written; `dw`, `db` and the like are added to.
- Arrays do not overlap; where "dx may be dy" stands, it must then be the same object.
- Arrays are C-contiguous on the CPU. On a GPU the arrays (N, C, ...) of one call may also have
  their channels last, all in the same order. Arrays of (outer, C, inner) are (N, C, ...) with axes
  merged.
- On the CPU elements are float32 or float64. On a GPU activations and their gradients may also be
  float16 or bfloat16, which numpy lacks and uint16 stands for; parameters, their gradients, sums
  and numbers of channels stay float32 (float64 for doubles).
- On a GPU work is enqueued on the current stream, and nothing is read back.
- Labels and indices are whole floating-point numbers, truncated as C does. A function that finds an
  invalid one writes 1 and the first of them to `wrong` (2), and the caller raises the error.
- A loss is divided by `norm`, an array that the function writes: `divisor`, or where that is None
  the number of labels that count, at least 1. `weight` is an array whose first element is the loss
  weight.
"""
