// Pooling over planes of (N, C, H, W). Window (i, j) begins at row i * stride - pad, column likewise.

#include "pack.cuh"
#include "reduce.cuh"

struct Windows {
  i64 planes, h, w, ho, wo, kh, kw, sh, sw, ph, pw;
};

#define WINDOWS i64 planes, i64 h, i64 w, i64 ho, i64 wo, i64 kh, i64 kw, i64 sh, i64 sw, i64 ph, i64 pw
#define NUMBERS Windows{planes, h, w, ho, wo, kh, kw, sh, sw, ph, pw}

// Rows or columns [lo, hi) of a window that lie in the plane; `full` of its divisor lie in the plane or its padding.
struct Span {
  int start, lo, hi, full;
  __device__ Span(i64 at, i64 kernel, i64 stride, i64 pad, i64 size) {
    start = int(at * stride - pad);
    const int end = start + int(kernel), limit = int(size + pad);
    full = max(min(end, limit) - start, 1);
    lo = max(start, 0);
    hi = min(end, int(size));
  }
};

// Output number i of all planes.
struct Place {
  i64 plane;
  Span rows, columns;
  __device__ Place(const Windows& s, unsigned plane, unsigned o)
      : plane(plane),
        rows(o / unsigned(s.wo), s.kh, s.sh, s.ph, s.h),
        columns(o % unsigned(s.wo), s.kw, s.sw, s.pw, s.w) {}
  __device__ Place(const Windows& s, unsigned i)
      : Place(s, i / unsigned(s.ho * s.wo), i % unsigned(s.ho * s.wo)) {}
};

#define FOR_EACH(i, n) \
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < (n); i += gridDim.x * i64(blockDim.x))

// y = the first largest element, index = where; of a window without numbers above -inf its first element
template <typename T>
__global__ void max_pool_forward(const T* __restrict__ x, T* __restrict__ y, int* __restrict__ index, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  FOR_EACH(i, s.planes * s.ho * s.wo) {
    const Place at(s, unsigned(i));
    const T* plane = x + at.plane * s.h * s.w;
    A best = -__int_as_float(0x7f800000);
    int where = -1;
    for (int r = at.rows.lo; r < at.rows.hi; ++r)
      for (int c = at.columns.lo; c < at.columns.hi; ++c) {
        const A v = A(plane[r * int(s.w) + c]);
        if (v > best) {
          best = v;
          where = r * int(s.w) + c;
        }
      }
    if (where < 0) where = min(at.rows.lo, int(s.h) - 1) * int(s.w) + min(at.columns.lo, int(s.w) - 1);
    y[i] = plane[where];
    index[i] = where;
  }
}

// dx = sums of the dy whose index names an element. A warp owns `band` elements of a plane, goes through all indices of
// the plane in order, and adds in order what falls into its band, so every sum has one order.
template <typename T>
__global__ void __launch_bounds__(128) max_pool_backward(const T* __restrict__ dy, const int* __restrict__ index,
                                                         T* __restrict__ dx, i64 planes, i64 size, i64 windows,
                                                         i64 band, i64 bands) {
  using A = Wide<T>;
  constexpr int BAND = 8192 / sizeof(A), AHEAD = 4;
  __shared__ A sums[4][BAND];
  A* sum = sums[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, outputs = int(windows);
  for (i64 job = blockIdx.x * 4ll + threadIdx.x / 32; job < planes * bands; job += gridDim.x * 4ll) {
    const i64 plane = job / bands;
    const int lo = int(job % bands * band), room = int(min(band, size - lo));
    for (int e = lane; e < room; e += 32) sum[e] = 0;
    __syncwarp();
    const int* indices = index + plane * windows;
    const T* gradients = dy + plane * windows;
    for (int first = 0; first < outputs; first += 32 * AHEAD) {
      int at[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        const int o = first + k * 32 + lane;
        at[k] = o < outputs ? indices[o] - lo : -1;
      }
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        const bool mine = at[k] >= 0 && at[k] < room;
        if (!__any_sync(0xffffffffu, mine)) continue;
        const A g = mine ? A(gradients[first + k * 32 + lane]) : A(0);
        // lanes of one element take turns, the lowest first
        unsigned same = __match_any_sync(0xffffffffu, mine ? at[k] : -1 - lane) & ((1u << lane) - 1);
        int turn = mine ? __popc(same) : -1;
        for (int round = 0; __any_sync(0xffffffffu, turn >= round); ++round) {
          if (turn == round) sum[at[k]] += g;
          __syncwarp();
        }
      }
    }
    T* target = dx + plane * size + lo;
    for (int e = lane; e < room; e += 32) target[e] = T(sum[e]);
    __syncwarp();
  }
}

// y = sum of the window / its area, padding included
template <typename T>
__global__ void ave_pool_forward(const T* __restrict__ x, T* __restrict__ y, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  FOR_EACH(i, s.planes * s.ho * s.wo) {
    const Place at(s, unsigned(i));
    const T* plane = x + at.plane * s.h * s.w;
    A total = 0;
    for (int r = at.rows.lo; r < at.rows.hi; ++r)
      for (int c = at.columns.lo; c < at.columns.hi; ++c) total += A(plane[r * int(s.w) + c]);
    y[i] = T(total / A(at.rows.full * at.columns.full));
  }
}

// The same for large windows, a warp each.
template <typename T>
__global__ void ave_pool_forward_wide(const T* __restrict__ x, T* __restrict__ y, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  const i64 warps = gridDim.x * i64(blockDim.x / 32);
  for (i64 i = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32; i < s.planes * s.ho * s.wo; i += warps) {
    const Place at(s, unsigned(i));
    const T* plane = x + at.plane * s.h * s.w;
    const int width = max(at.columns.hi - at.columns.lo, 0), count = width * max(at.rows.hi - at.rows.lo, 0);
    A total = 0;
    for (int e = threadIdx.x % 32; e < count; e += 32)
      total += A(plane[(at.rows.lo + e / width) * int(s.w) + at.columns.lo + e % width]);
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) y[i] = T(total / A(at.rows.full * at.columns.full));
  }
}

// dx = sum over the windows that hold an element of dy / area
template <typename T>
__global__ void ave_pool_backward(const T* __restrict__ dy, T* __restrict__ dx, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  FOR_EACH(i, s.planes * s.h * s.w) {
    const i64 plane = unsigned(i) / unsigned(s.h * s.w);
    const unsigned e = unsigned(i - plane * s.h * s.w);
    const int r = int(e / unsigned(s.w) + s.ph), c = int(e % unsigned(s.w) + s.pw);  // counted from the padding
    const int first_row = r < s.kh ? 0 : (r - int(s.kh)) / int(s.sh) + 1, rows = min(r / int(s.sh) + 1, int(s.ho));
    const int first_column = c < s.kw ? 0 : (c - int(s.kw)) / int(s.sw) + 1;
    const int columns = min(c / int(s.sw) + 1, int(s.wo));
    const T* gradients = dy + plane * s.ho * s.wo;
    A total = 0;
    for (int m = first_row; m < rows; ++m) {
      const int height = Span(m, s.kh, s.sh, s.ph, s.h).full;
      for (int j = first_column; j < columns; ++j)
        total += A(gradients[m * int(s.wo) + j]) / A(height * Span(j, s.kw, s.sw, s.pw, s.w).full);
    }
    dx[i] = T(total);
  }
}
