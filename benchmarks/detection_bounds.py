"""Bounds of operations of detectors on one GPU: kernels that do one part of an operation alone.

usage: python benchmarks/detection_bounds.py [--rounds 7] [--only PATTERN]

Timed as detection_ops.py does, in a captured graph and on arrays that come from memory, us a part:
launches of kernels that do nothing; kernels that read and write as many bytes as an operation, and
compute nothing; and kernels that do, with as many blocks and as much shared memory as an operation,
nothing of it but what each way to do it must.
"""

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from detection_ops import (
    CACHE,
    CLASSES,
    COUNT,
    IMAGES,
    TRUE,
    Work,
    time_of,
)

from caffepy.device.cuda import CudaDevice

PARTS = r"""
typedef long long i64;
extern "C" __global__ void nothing() {}
extern "C" __global__ void moves(const int4* from, int4* to, i64 reads, i64 writes) {
  const i64 first = blockIdx.x * 256ll + threadIdx.x, step = gridDim.x * 256ll;
  int4 sum = {};
#pragma unroll 8
  for (i64 i = first; i < reads; i += step) {
    const int4 x = from[i];
    sum.x ^= x.x; sum.y ^= x.y; sum.z ^= x.z; sum.w ^= x.w;
  }
#pragma unroll 8
  for (i64 i = first; i < writes; i += step) to[i] = sum;
  if (sum.x == 0x12345678) to[0] = sum;
}

// Whether this is the last of a number of blocks to come here, which reads what the others wrote before.
__device__ bool is_last(unsigned* arrived, unsigned blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    last = before == blocks - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  return last;
}

// Every number that a block found before reaches the last block to arrive, a warp of which takes turns without barriers: each
// waits for what it read from shared memory in the one before.
__device__ void hand_over(unsigned found, unsigned* to, unsigned* arrived, i64 turns) {
  __shared__ unsigned words[1024];
  if (threadIdx.x % 32 == 0) to[blockIdx.x * 32 + threadIdx.x / 32] = found;
  if (!is_last(arrived, gridDim.x)) return;
  for (unsigned i = threadIdx.x; i < gridDim.x * 32; i += 1024) found ^= __ldcg(to + i);
  words[threadIdx.x] = found;
  __syncthreads();
  for (int t = 0; threadIdx.x < 32 && t < turns; ++t) {
    found ^= *reinterpret_cast<volatile unsigned*>(words + (found + t) % 1024);
    atomicOr(words + found % 1024, found);
  }
  __syncthreads();
  to[threadIdx.x] = words[threadIdx.x];
}

// Pairs of boxes: whether their centres are as far apart as they reach, along both axes, from the signs of sums.
extern "C" __global__ void __launch_bounds__(1024, 1)
compares(const float4* boxes, unsigned* to, unsigned* arrived, i64 count, i64 pairs, i64 turns) {
  __shared__ float4 all[32][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 units = pairs / 2048;  // of 64 boxes beside 32
  unsigned found = 0;
  for (i64 u = blockIdx.x + gridDim.x * warp; u < units; u += gridDim.x * 32) {
    const float4 own[2] = {boxes[(u * 64 + lane) % count], boxes[(u * 64 + 32 + lane) % count]};
    all[warp][lane] = boxes[(u * 32 + lane) % count];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      unsigned level = 0, vertical = 0;
#pragma unroll
      for (int b = 0; b < 32; ++b) {
        const float4 x = all[warp][b];
        level = __funnelshift_l(__float_as_uint(fabsf(x.x - own[r].x) - x.y - own[r].y), level, 1);
        vertical = __funnelshift_l(__float_as_uint(fabsf(x.z - own[r].z) - x.w - own[r].w), vertical, 1);
      }
      found ^= level & vertical;
    }
    __syncwarp();
  }
  hand_over(__ballot_sync(0xffffffffu, found & 1), to, arrived, turns);
}

// Four planes into shared memory, side by side; then of each bin nine cells, at no two threads' banks at once, their largest
// and its place, written.
extern "C" __global__ void __launch_bounds__(512, 4)
maxima(const float* x, float* y, int* index, i64 plane, i64 channels, i64 boxes, i64 bins) {
  extern __shared__ float4 cells[];
  float* words = reinterpret_cast<float*>(cells);
  const float* from = x + blockIdx.x * 4 * plane;
  for (int p = threadIdx.x; p < plane; p += 512)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(unsigned(__cvta_generic_to_shared(words + 4 * p + k))),
                   "l"(from + k * plane + p) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  const int all = int(boxes * bins);
  for (int k = threadIdx.x; k < all; k += 512) {
    float best[4], place[4] = {};
    const int start = k % 2048;
    const float4 first = cells[start];
    best[0] = first.x; best[1] = first.y; best[2] = first.z; best[3] = first.w;
#pragma unroll
    for (int i = 1; i < 9; ++i) {
      const float4 next = cells[start + 32 * i];
      const float of[4] = {next.x, next.y, next.z, next.w};
#pragma unroll
      for (int c = 0; c < 4; ++c)
        asm("{ .reg .pred larger; setp.gt.f32 larger, %2, %0; @larger add.f32 %0, %2, 0f80000000; "
            "@larger fma.rn.f32 %1, %1, 0f00000000, %3; }" : "+f"(best[c]), "+f"(place[c]) : "f"(of[c]), "f"(float(i)));
    }
    const int b = k / int(bins);
    const i64 to = ((blockIdx.y * boxes + b) * channels + blockIdx.x * 4) * bins + (k - b * int(bins));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      y[to + c * bins] = best[c];
      index[to + c * bins] = int(place[c]);
    }
  }
}

// A plane into shared memory, 16 bytes at a time; then of each bin nine cells, at no two threads' banks at once, added up and
// written.
extern "C" __global__ void __launch_bounds__(256, 8)
means(const float* x, float* y, i64 plane, i64 channels, i64 boxes) {
  extern __shared__ float4 cells[];
  const float4* from = reinterpret_cast<const float4*>(x) + blockIdx.x * plane / 4;
  for (int p = threadIdx.x; p < plane / 4; p += 256)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(cells + p))), "l"(from + p) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  const float* words = reinterpret_cast<const float*>(cells);
  for (int b = threadIdx.x; b < boxes; b += 256) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 9; ++i) sum += words[b + 64 * i];
    y[b * channels + blockIdx.x] = sum;
  }
}

// What boxes give the bins of three channels, read into shared memory; then every cell of these, with one of them for a third of
// the cells, written.
extern "C" __global__ void __launch_bounds__(512, 3)
spreads(const float* dy, float* dx, i64 plane, i64 channels, i64 boxes, i64 square) {
  __shared__ float4 shares[512];
  const int first = int(blockIdx.x / square * 3 * square + blockIdx.x % square);
  if (threadIdx.x < boxes) {
    const float* of = dy + threadIdx.x * channels + first;
    shares[threadIdx.x] = {of[0], of[square], of[2 * square], 1};
  }
  __syncthreads();
  for (int p = threadIdx.x; p < plane; p += 512) {
    float4 sum = {};
    if (p % 3 == 0) sum = shares[p % boxes];
    float* to = dx + first * plane + p;
    to[0] = sum.x;
    to[square * plane] = sum.y;
    to[2 * square * plane] = sum.z;
  }
}

// What MultiBoxLoss does before it chooses boxes, without its arithmetic: blocks of 256 threads read priors and true boxes of an
// image, and write a number for each warp and true box; the last of these of an image reads them, and writes a match for each.
// Meanwhile others read 256 rows of scores each, and write three words a row; the last of all of an image reads `fixed` rows
// again, and writes theirs.
extern "C" __global__ void __launch_bounds__(256, 4)
matches_and_rows(const float4* priors, const float4* truths, const float4* scores, unsigned long long* tops, unsigned* to,
                 unsigned* arrived, i64 images, i64 boxes, i64 known, i64 classes, i64 fixed) {
  const int tiles = int(boxes + 1023) / 1024, parts = int(boxes + 255) / 256, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool of_match = blockIdx.x < tiles * images;
  const int block = int(blockIdx.x) - (of_match ? 0 : tiles * int(images)), n = block / (of_match ? tiles : parts);
  const int own = block - n * (of_match ? tiles : parts), each = int(known / images);
  const float4* rows = scores + n * boxes * classes / 4;
  unsigned* words = to + n * boxes;
  if (of_match) {
    float4 sum = {};
    for (int e = 0; e < 4; ++e) {
      const float4 x = priors[min(own * 1024 + int(threadIdx.x) * 4 + e, int(boxes) - 1)];
      sum.x += x.x; sum.y += x.y; sum.z += x.z; sum.w += x.w;
    }
    for (int t = threadIdx.x; t < 2 * known; t += 256) sum.x += truths[t].x;
    const unsigned long long found = __ballot_sync(0xffffffffu, sum.x + sum.y + sum.z + sum.w > 1);
    if (lane < each) tops[(n * each + lane) * tiles * 8 + own * 8 + warp] = found;
    if (!is_last(arrived + n, tiles)) return;
    for (int t = warp; t < each; t += 8) {
      unsigned long long most = 0;
      for (int i = lane; i < tiles * 8; i += 32) most = max(most, __ldcg(tops + (n * each + t) * tiles * 8 + i));
      words[t] = __reduce_max_sync(0xffffffffu, unsigned(most));
    }
  } else {
    const int first = own * 256, here = min(256, int(boxes) - first);
    float sum = 0;
#pragma unroll 6
    for (int p = threadIdx.x; p < here * classes / 4; p += 256) {
      const float4 x = rows[first * classes / 4 + p];
      sum += x.x + x.y + x.z + x.w;
    }
    if (threadIdx.x < here)
      for (int a = 0; a < 3; ++a) words[a * images * boxes + first + threadIdx.x] = __float_as_uint(sum);
  }
  if (!is_last(arrived + images + n, parts + 1)) return;
  float sum = 0;
  const int start = int(__ldcg(words) & 1);
  for (int p = threadIdx.x; p < fixed * classes / 4; p += 256) sum += rows[start + p].x;
  if (threadIdx.x < fixed)
    for (int a = 0; a < 3; ++a) words[a * images * boxes + threadIdx.x] = __float_as_uint(sum);
}

// By a block for an image, 1024 threads: three arrays with a word for each box read, one of them counted in bins of shared
// memory, the bins added up, and a word for each box written; each step waits for all of the one before.
extern "C" __global__ void __launch_bounds__(1024)
counts(const int4* from, int4* to, unsigned* total, unsigned* arrived, i64 count, i64 size) {
  __shared__ unsigned bins[2048], parts[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int4 x[3] = {};
#pragma unroll
  for (int i = 0; i < 3; ++i)
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int p = threadIdx.x + 1024 * i;
      if (p >= count) continue;
      const int4 other = from[a * size + blockIdx.x * count + p];
      x[i].x ^= other.x; x[i].y ^= other.y; x[i].z ^= other.z; x[i].w ^= other.w;
    }
  bins[threadIdx.x] = bins[threadIdx.x + 1024] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (threadIdx.x + 1024 * i < count)
      for (int word : {x[i].x, x[i].y, x[i].z, x[i].w}) atomicAdd(bins + (word + 5 * threadIdx.x & 2047), 1u);
  __syncthreads();
  unsigned sum = __reduce_add_sync(0xffffffffu, bins[threadIdx.x] + bins[threadIdx.x + 1024]);
  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = __reduce_add_sync(0xffffffffu, parts[lane]);
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (threadIdx.x + 1024 * i < count) to[blockIdx.x * count + threadIdx.x + 1024 * i] = {int(sum), x[i].y, x[i].z, x[i].w};
  if (threadIdx.x == 0) total[blockIdx.x] = sum;
  if (!is_last(arrived, gridDim.x)) return;
  sum = warp == 0 && lane < gridDim.x ? __ldcg(total + lane) : 0;
  sum = __reduce_add_sync(0xffffffffu, sum);
  if (threadIdx.x == 0) total[0] = sum;
}

// The gradients of MultiBoxLoss without its arithmetic: a warp reads the labels of 32 rows, writes zeros to all rows, 16 bytes at
// a time, and then reads and writes a row for which its labels ask; others read matches and write the locations' zeros.
extern "C" __global__ void __launch_bounds__(128)
zeros(const float* x, const int* labels, const int* matches, float4* to, float* dx, i64 rows, i64 classes) {
  const int lane = threadIdx.x % 32, of_locations = int((rows + 511) / 512);
  if (blockIdx.x < of_locations) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const i64 i = blockIdx.x * 512ll + e * 128 + threadIdx.x;
      if (i < rows && matches[i] <= 0) to[i] = {};
    }
    return;
  }
  const i64 first = (blockIdx.x - of_locations) * 128ll + threadIdx.x / 32 * 32;
  if (first >= rows) return;
  const int label = first + lane < rows ? labels[first + lane] : -1;
  const unsigned learn = __ballot_sync(0xffffffffu, label >= 0);
  const int row = learn ? __ffs(learn) - 1 : 0;
  const float own = lane < classes ? x[(first + row) * classes + lane] : 0;
  const int packs = int(min(rows - first, 32ll) * classes / 4);
  for (int p = lane; p < packs; p += 32) reinterpret_cast<float4*>(dx + first * classes)[p] = {};
  __syncwarp();
  if (lane < classes) dx[(first + row) * classes + lane] = own;
}

// What each bin gives, added to a sum in shared memory, as if no two of 32 were at one place; then the sums of four warps.
extern "C" __global__ void __launch_bounds__(128, 5)
adds(const float* dy, const int* index, float* dx, i64 plane, i64 channels, i64 boxes, i64 bins) {
  extern __shared__ float sums[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  volatile float* own = sums + warp * plane;
  for (int p = lane; p < plane; p += 32) own[p] = 0;
  __syncwarp();
  const int each = int(bins);
  for (int b = warp; b < boxes; b += 16) {
    int place[4][2];
    float by[4][2];
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const i64 at = ((b + 4 * u) * channels + blockIdx.x) * bins + 32 * e + lane;
        place[u][e] = -1;
        if (b + 4 * u < boxes && 32 * e + lane < each) {
          place[u][e] = index[at];
          by[u][e] = dy[at];
        }
      }
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (unsigned(place[u][e]) < unsigned(plane)) own[place[u][e]] += by[u][e];
  }
  __syncthreads();
  for (int p = threadIdx.x; p < plane; p += 128)
    dx[blockIdx.x * plane + p] = (sums[p] + sums[plane + p]) + (sums[2 * plane + p] + sums[3 * plane + p]);
}
"""

X, Y = 4 * 512 * 38 * 63, 4 * 128 * 512 * 49
PARTS_X, PARTS_Y = 4 * 1029 * 38 * 63, 4 * 128 * 1029
SCORES, PLACES = 4 * 21 * IMAGES * COUNT, 4 * IMAGES * COUNT

BYTES = {
    "ROIPooling forward": (X, 2 * Y),
    "ROIPooling backward": (2 * Y, X),
    "PSROIPooling forward": (PARTS_X, PARTS_Y),
    "PSROIPooling backward": (PARTS_Y, PARTS_X),
    "MultiBoxLoss forward": (SCORES + PLACES, 2 * PLACES),
    "losses of MultiBoxLoss": (SCORES + PLACES, 3 * PLACES),
    "MultiBoxLoss backward": (2 * PLACES + SCORES // 25, SCORES + 4 * PLACES),
    "mining": (4 * PLACES, PLACES),
}
"""Bytes that are read, and written."""

LOOKS = {
    "NMS of 6,000": [(1280 * 1280 // 2, 3), (0, 0)],
    "NMS of 12,000": [(4000 * 4000 // 2, 5), (0, 0), (0, 0)],
    "NMS of 12,000 in a crowd": [
        (4000 * 4000 // 2, 5),
        (4000 * 4000 // 2 + 4000 * 1510, 4),
        (0, 0),
    ],
}
"""Pairs of boxes that are compared, and how many that wait for each other are decided about one
after the other, in each launch; for the boxes of detection_ops.py. The last launches of a
suppression find that enough boxes are kept.
"""

Make = Callable[[], Work]


def part(name: str) -> Any:
    return cupy.RawModule(code=PARTS, options=("-std=c++17",)).get_function(name)


def moves(reads: int, writes: int) -> Make:
    """A function that makes a kernel that reads `reads` and writes `writes` bytes."""
    run = part("moves")

    def make() -> Work:
        source, to = (cupy.zeros(max(n, 16) // 4, np.float32) for n in (reads, writes))
        blocks = min(132 * 8, -(-max(reads, writes) // 16 // 256))
        return lambda: run((blocks,), (256,), (source, to, reads // 16, writes // 16))

    return make


def nothing() -> Work:
    run = part("nothing")
    return lambda: run((132,), (256,), ())


def looks(given: list[tuple[int, int]]) -> Make:
    """A function that makes the comparisons and the chains of decisions of a suppression."""
    run, idle = part("compares"), nothing()

    def make() -> Work:
        boxes, to = cupy.ones((12000, 4), np.float32), cupy.zeros(1 << 14, np.uint32)
        arrived = cupy.zeros(1, np.uint32)

        def work() -> None:
            for pairs, turns in given:
                if pairs:
                    run((132,), (1024,), (boxes, to, arrived, len(boxes), pairs, turns))
                else:
                    idle()

        return work

    return make


def maxima() -> Work:
    run = part("maxima")
    run.max_dynamic_shared_size_bytes = 48 << 10
    x, y, index = cupy.zeros(X // 4, np.float32), *(cupy.zeros(Y // 4, t) for t in ("f", "i"))
    arguments = x, y, index, 38 * 63, 512, 32, 49
    return lambda: run((128, 4), (512,), arguments, shared_mem=16 * 38 * 63)


def adds() -> Work:
    run = part("adds")
    rng = np.random.default_rng(0)
    dy, dx = (cupy.zeros(n // 4, np.float32) for n in (Y, X))
    index = cupy.asarray(rng.integers(0, 38 * 63, Y // 4).astype(np.int32))
    arguments = dy, index, dx, 38 * 63, 512, 128, 49
    return lambda: run((512,), (128,), arguments, shared_mem=16 * 38 * 63)


def means() -> Work:
    run, plane = part("means"), 38 * 63 + 2  # whole packs
    x, y = cupy.zeros(1029 * plane, np.float32), cupy.zeros(PARTS_Y // 4, np.float32)
    return lambda: run((1029,), (256,), (x, y, plane, 1029, 128), shared_mem=4 * plane)


def spreads() -> Work:
    run = part("spreads")
    dy, dx = (cupy.zeros(n // 4, np.float32) for n in (PARTS_Y, PARTS_X))
    return lambda: run((343,), (512,), (dy, dx, 38 * 63, 1029, 128, 49))


def rows_then_counts() -> Work:
    """Matches and losses, and then, in a launch of its own, the choice of boxes."""
    first, second = part("matches_and_rows"), part("counts")
    known, fixed = IMAGES * TRUE, 96
    priors, truths = cupy.ones((COUNT, 4), np.float32), cupy.ones((known, 8), np.float32)
    x, words = cupy.ones(IMAGES * COUNT * CLASSES, np.float32), cupy.zeros((3, IMAGES * COUNT), "i")
    tiles, parts = -(-COUNT // 1024), -(-COUNT // 256)
    tops, total = cupy.zeros(known * tiles * 8, np.uint64), cupy.zeros(IMAGES, np.uint32)
    arrived, to = cupy.zeros(2 * IMAGES, np.uint32), cupy.zeros((IMAGES, COUNT), np.int32)
    given = priors, truths, x, tops, words, arrived, IMAGES, COUNT, known, CLASSES, fixed

    def work() -> None:
        first((IMAGES * (tiles + parts),), (256,), given)
        second((IMAGES,), (1024,), (words, to, total, arrived, COUNT // 4, IMAGES * COUNT // 4))

    return work


def zeros() -> Work:
    run, rows = part("zeros"), IMAGES * COUNT
    labels = np.where(np.random.default_rng(0).uniform(size=rows) < 0.04, 1, -1).astype(np.int32)
    x, dx = (cupy.zeros((rows, CLASSES), np.float32) for _ in range(2))
    matches, to = cupy.zeros(rows, np.int32), cupy.zeros((rows, 4), np.float32)
    given = x, cupy.asarray(labels), matches, to, dx, rows, CLASSES
    return lambda: run((-(-rows // 512) + -(-rows // 128),), (128,), given)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="parts in whose name this is found")
    args = parser.parse_args()
    device = CudaDevice(0)
    with device.scope():
        parts: list[tuple[str, float, Make]] = [("a launch", 0, nothing)]
        parts += [(f"bytes of {n}", sum(b), moves(*b)) for n, b in BYTES.items()]
        parts += [(f"pairs and turns of {n}", 0, looks(g)) for n, g in LOOKS.items()]
        parts += [("maxima of ROIPooling forward", X + 2 * Y, maxima)]
        parts += [("sums of ROIPooling backward", X + 2 * Y, adds)]
        parts += [("means of PSROIPooling forward", PARTS_X + PARTS_Y, means)]
        parts += [("shares of PSROIPooling backward", PARTS_X + PARTS_Y, spreads)]
        parts += [("matches and rows, then choice of MultiBoxLoss", SCORES, rows_then_counts)]
        parts += [("zeros and rows of MultiBoxLoss backward", SCORES, zeros)]
    sys.stdout.write("| part | us | MB |\n|---|---|---|\n")
    for name, size, make in parts:
        if not re.search(args.only, name):
            continue
        sets = int(min(24, max(2, -(-CACHE // size)))) if size else 2
        with device.scope():
            works = [make() for _ in range(sets)]
        us = time_of(device, works, args.rounds)
        sys.stdout.write(f"| {name} | {us:.2f} | {size / 1e6:.1f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
