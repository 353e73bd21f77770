// Boxes of maps at one size (MNC): y (R, C, h, w) is x (N, C, H, W), bilinear, at corner i of `parts` along each axis,
//   start + i * (end - start) / parts, with start and end = round(x1 * scale), round(x2 * scale),
// 0 more than half a pixel outside the map. Gradients are MNC's, which takes end - start + 1 for the length: a pixel takes
// from fewer corners, and a corner p behind the start moves by 1 - p / length with the start, by p / length with the end.

#include "pack.cuh"
#include "reduce.cuh"

// a + b * c, each operation rounded by itself, as on the CPU: whether a corner lies in the map must not depend on it.
__device__ float placed(float a, float b, float c) { return __fadd_rn(a, __fmul_rn(b, c)); }
__device__ double placed(double a, double b, double c) { return __dadd_rn(a, __dmul_rn(b, c)); }

// A box along an axis.
template <typename A> struct Side {
  A start, end, step, length;
  i64 parts, size;
  template <typename T>
  __device__ Side(T begin, T stop, double scale, i64 parts, i64 size)
      : start(round(A(begin) * A(scale))), end(round(A(stop) * A(scale))), parts(parts), size(size) {
    step = max(end - start, A(0)) / A(parts);
    length = max(end - start + 1, A(1));
  }
  // Whether MNC's gradient of a pixel looks at corners from `first` on, before `last`.
  __device__ void corners(i64 pixel, i64& first, i64& last) const {
    const A bin = length / A(parts), behind = A(pixel) - start;
    first = max(i64(floor((behind - 1) / bin - 1)), i64(0));
    last = min(i64(ceil((behind + 1) / bin)), parts);
  }
};

// Corner k: the two pixels around it, and the share of the second one.
template <typename A> struct Corner {
  bool inside;
  i64 low, high;
  A share;
  __device__ Corner(const Side<A>& side, i64 k) {
    const A place = placed(side.start, A(k), side.step), at = max(place, A(0));
    inside = !(place < A(-0.5) || place > A(side.size) - A(0.5));
    low = inside ? min(i64(at), side.size - 1) : 0;
    high = min(low + 1, side.size - 1);
    share = high > low ? at - A(low) : A(0);
  }
  __device__ A share_of(i64 pixel) const {
    if (!inside) return 0;
    return pixel == low ? 1 - share : pixel == high ? share : A(0);
  }
};

template <typename T>
__global__ void
warp(const T* x, const T* rois, T* y, i64 count, i64 channels, i64 h, i64 w, i64 rows, i64 columns, double scale) {
  FOR_EACH(k, count) {
    const i64 j = k % columns, i = k / columns % rows, c = k / columns / rows % channels, r = k / columns / rows / channels;
    const T* box = rois + 5 * r;
    const Corner<T> a(Side<T>(box[2], box[4], scale, rows, h), i), b(Side<T>(box[1], box[3], scale, columns, w), j);
    T value = 0;
    if (a.inside && b.inside) {
      const T* plane = x + (i64(box[0]) * channels + c) * h * w;
      const T upper = (1 - b.share) * plane[a.low * w + b.low] + b.share * plane[a.low * w + b.high];
      const T lower = (1 - b.share) * plane[a.high * w + b.low] + b.share * plane[a.high * w + b.high];
      value = (1 - a.share) * upper + a.share * lower;
    }
    y[k] = value;
  }
}

// A thread for each element of dx, which looks at all boxes in order.
template <typename T>
__global__ void to_map(const T* dy, const T* rois, T* dx, i64 count, i64 boxes, i64 channels, i64 h, i64 w, i64 rows,
                       i64 columns, double scale) {
  FOR_EACH(k, count) {
    const i64 v = k % w, u = k / w % h, c = k / w / h % channels, n = k / w / h / channels;
    T sum = 0;
    for (i64 r = 0; r < boxes; ++r) {
      const T* box = rois + 5 * r;
      if (i64(box[0]) != n) continue;
      const Side<T> down(box[2], box[4], scale, rows, h), across(box[1], box[3], scale, columns, w);
      if (u < down.start || u > down.end || v < across.start || v > across.end) continue;
      i64 i, i1, j0, j1;
      down.corners(u, i, i1);
      across.corners(v, j0, j1);
      for (; i < i1; ++i) {
        const T part = Corner<T>(down, i).share_of(u);
        if (part == 0) continue;
        const T* line = dy + ((r * channels + c) * rows + i) * columns;
        for (i64 j = j0; j < j1; ++j) sum += part * Corner<T>(across, j).share_of(v) * line[j];
      }
    }
    dx[k] = sum;
  }
}

// A block for each box.
template <typename T>
__global__ void to_boxes(const T* dy, const T* x, const T* rois, T* drois, i64 channels, i64 h, i64 w, i64 rows,
                         i64 columns, double scale) {
  const T* box = rois + blockIdx.x * i64(5);
  const Side<T> vertical(box[2], box[4], scale, rows, h), horizontal(box[1], box[3], scale, columns, w);
  T sums[4] = {0, 0, 0, 0};
  for (i64 k = threadIdx.x; k < channels * rows * columns; k += blockDim.x) {
    const i64 j = k % columns, i = k / columns % rows, c = k / columns / rows;
    const Corner<T> a(vertical, i), b(horizontal, j);
    if (!a.inside || !b.inside || a.low == a.high || b.low == b.high) continue;
    const T* plane = x + (i64(box[0]) * channels + c) * h * w;
    const T p = plane[a.low * w + b.low], q = plane[a.low * w + b.high];
    const T u = plane[a.high * w + b.low], v = plane[a.high * w + b.high];
    const T d = dy[blockIdx.x * channels * rows * columns + k] * T(scale);
    const T across = d * ((1 - a.share) * (q - p) + a.share * (v - u));
    const T down = d * ((1 - b.share) * (u - p) + b.share * (v - q));
    const T right = (T(b.low) + b.share - horizontal.start) / horizontal.length;
    const T below = (T(a.low) + a.share - vertical.start) / vertical.length;
    sums[0] += (1 - right) * across;
    sums[1] += (1 - below) * down;
    sums[2] += right * across;
    sums[3] += below * down;
  }
  for (int s = 0; s < 4; ++s) {
    const T all = block_sum(sums[s]);
    if (threadIdx.x == 0) drois[blockIdx.x * i64(5) + 1 + s] = all;
  }
  if (threadIdx.x == 0) drois[blockIdx.x * i64(5)] = 0;
}
