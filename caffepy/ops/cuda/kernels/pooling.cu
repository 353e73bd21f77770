// Pooling over windows of images (N, H, W, C), in packs of V channels; planes (N, C, H, W) are N * C images of one
// channel. Window (i, j) begins at row i * stride - pad, column likewise. An index tells the element of a window that
// has its maximum: unsigned char its number in the window, int its number in the plane; -1 (255) names none. W elements of
// a row are loaded at a time, the last one again where there are fewer. R: relu.

#include "pack.cuh"
#include "reduce.cuh"
#include "random.cuh"

struct Windows {
  int packs, h, w, ho, wo, kh, kw, sh, sw, ph, pw;
  Divisor by_packs, by_columns, by_rows, by_sh, by_sw;
  __device__ i64 large() const { return i64(h) * w * packs; }   // packs of an image
  __device__ i64 small() const { return i64(ho) * wo * packs; }  // packs of its windows
};

#define WINDOWS                                                                                                     \
  i64 images, i64 packs, i64 h, i64 w, i64 ho, i64 wo, i64 kh, i64 kw, i64 sh, i64 sw, i64 ph, i64 pw, i64 by_packs, \
      i64 by_columns, i64 by_rows, i64 by_sh, i64 by_sw
#define NUMBERS                                                                                                       \
  Windows {                                                                                                           \
    int(packs), int(h), int(w), int(ho), int(wo), int(kh), int(kw), int(sh), int(sw), int(ph), int(pw), {by_packs},     \
        {by_columns}, {by_rows}, {by_sh}, {by_sw}                                                                     \
  }

// Pack number e of what is written: images of so many rows and columns.
struct Place {
  i64 image;
  int row, column, pack;
  __device__ Place(const Windows& s, i64 e, int rows, int columns) {
    const unsigned at = s.by_packs.quotient(unsigned(e)), line = s.by_columns.quotient(at);
    pack = int(unsigned(e) - at * unsigned(s.packs));
    column = int(at - line * unsigned(columns));
    image = s.by_rows.quotient(line);
    row = int(line - unsigned(image) * unsigned(rows));
  }
};

// Rows or columns [lo, hi) of a window that lie in the plane; `full` of its divisor lie in the plane or its padding.
struct Span {
  int start, lo, hi, full;
  __device__ Span(int at, int kernel, int stride, int pad, int size) {
    start = at * stride - pad;
    const int end = start + kernel;
    full = max(min(end, size + pad) - start, 1);
    lo = max(start, 0);
    hi = min(end, size);
  }
};

// Windows [lo, hi) over a row or column; `reached` is hi with those that begin beyond the plane counted to its end,
// since their maximum is there.
struct Cover {
  int lo, hi, reached;
  __device__ Cover(int at, int kernel, const Divisor& by_stride, int pad, int size, int windows) {
    lo = at + pad < kernel ? 0 : int(by_stride.quotient(at + pad - kernel)) + 1;
    hi = min(int(by_stride.quotient(at + pad)) + 1, windows);
    reached = at == size - 1 ? windows : hi;
  }
};

template <typename I> __device__ int index_of(const Windows& s, int row, int column, int top, int left) {
  return sizeof(I) == 1 ? max(row - top, 0) * s.kw + max(column - left, 0) : row * s.w + column;
}

// y = the first largest element, index = where; of a window without numbers above -inf its first element.
// R: 0 instead of what is not above 0, which is nowhere.
template <typename T, typename I, int V, int W, bool R>
__global__ void max_pool_forward(const T* __restrict__ x, T* __restrict__ y, I* __restrict__ index, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  const A least = -__int_as_float(0x7f800000);
  FOR_EACH(e, images * s.small()) {
    const Place at(s, e, s.ho, s.wo);
    const Span rows(at.row, s.kh, s.sh, s.ph, s.h), columns(at.column, s.kw, s.sw, s.pw, s.w);
    const Pack<T, V>* image = reinterpret_cast<const Pack<T, V>*>(x) + at.image * s.large() + at.pack;
    const int corner_row = min(rows.lo, s.h - 1), corner_column = min(columns.lo, s.w - 1);
    A best[V];
    int where[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      best[v] = least;
      where[v] = index_of<I>(s, corner_row, corner_column, rows.start, columns.start);
    }
    for (int r = rows.lo; r < rows.hi; ++r) {
      const int line = index_of<I>(s, r, 0, rows.start, 0) - (sizeof(I) == 1 ? columns.start : 0);
      for (int c = columns.lo; c < columns.hi; c += W) {
        Pack<T, V> taken[W];
#pragma unroll
        for (int k = 0; k < W; ++k) taken[k] = image[(r * s.w + min(c + k, columns.hi - 1)) * s.packs];
#pragma unroll
        for (int k = 0; k < W; ++k)  // an element that comes again is not larger
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const A number = A(taken[k].v[v]);
            if (number > best[v]) {
              best[v] = number;
              where[v] = line + c + k;
            }
          }
      }
    }
    const T* corner = image[(corner_row * s.w + corner_column) * s.packs].v;
    Pack<T, V> largest;
    Pack<I, V> places;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      largest.v[v] = best[v] == least ? corner[v] : T(best[v]);
      places.v[v] = I(where[v]);
      if (R && A(largest.v[v]) <= 0) {
        largest.v[v] = T(A(0));
        places.v[v] = I(-1);
      }
    }
    reinterpret_cast<Pack<T, V>*>(y)[e] = largest;
    reinterpret_cast<Pack<I, V>*>(index)[e] = places;
  }
}

// dx = sum of the dy of those windows whose index names the element, in the order of the windows
template <typename T, typename I, int V, int W>
__global__ void max_pool_backward(const T* __restrict__ dy, const I* __restrict__ index, T* __restrict__ dx, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  FOR_EACH(e, images * s.large()) {
    const Place at(s, e, s.h, s.w);
    const Cover rows(at.row, s.kh, s.by_sh, s.ph, s.h, s.ho), columns(at.column, s.kw, s.by_sw, s.pw, s.w, s.wo);
    const i64 image = at.image * s.small() + at.pack;
    const Pack<T, V>* gradients = reinterpret_cast<const Pack<T, V>*>(dy) + image;
    const Pack<I, V>* indices = reinterpret_cast<const Pack<I, V>*>(index) + image;
    A sum[V] = {};
    for (int i = rows.lo; i < rows.reached; ++i)
      for (int j = columns.lo; j < columns.reached; j += W) {
        Pack<T, V> gradient[W];
        Pack<I, V> named[W];
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const int window = (i * s.wo + min(j + k, columns.reached - 1)) * s.packs;
          gradient[k] = gradients[window];
          named[k] = indices[window];
        }
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const int place = index_of<I>(s, at.row, at.column, i * s.sh - s.ph, (j + k) * s.sw - s.pw);
          const int here = j + k < columns.reached ? place : -2;
#pragma unroll
          for (int v = 0; v < V; ++v)
            if (named[k].v[v] == here) sum[v] += A(gradient[k].v[v]);
        }
      }
    Pack<T, V> total;
#pragma unroll
    for (int v = 0; v < V; ++v) total.v[v] = T(sum[v]);
    reinterpret_cast<Pack<T, V>*>(dx)[e] = total;
  }
}

template <bool R, typename T> __device__ T rectified(T y) {
  return R && Wide<T>(y) <= 0 ? T(Wide<T>(0)) : y;
}

// y = sum of the window / its area, padding included; R: 0 if it is not above 0
template <typename T, int V, int W, bool R>
__global__ void ave_pool_forward(const T* __restrict__ x, T* __restrict__ y, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  FOR_EACH(e, images * s.small()) {
    const Place at(s, e, s.ho, s.wo);
    const Span rows(at.row, s.kh, s.sh, s.ph, s.h), columns(at.column, s.kw, s.sw, s.pw, s.w);
    const Pack<T, V>* image = reinterpret_cast<const Pack<T, V>*>(x) + at.image * s.large() + at.pack;
    A sum[V] = {};
    for (int r = rows.lo; r < rows.hi; ++r)
      for (int c = columns.lo; c < columns.hi; c += W) {
        Pack<T, V> taken[W];
#pragma unroll
        for (int k = 0; k < W; ++k) taken[k] = image[(r * s.w + min(c + k, columns.hi - 1)) * s.packs];
#pragma unroll
        for (int k = 0; k < W; ++k)
          if (c + k < columns.hi)
#pragma unroll
            for (int v = 0; v < V; ++v) sum[v] += A(taken[k].v[v]);
      }
    const A share = A(1) / (A(rows.full) * A(columns.full));
    Pack<T, V> mean;
#pragma unroll
    for (int v = 0; v < V; ++v) mean.v[v] = rectified<R>(T(sum[v] * share));
    reinterpret_cast<Pack<T, V>*>(y)[e] = mean;
  }
}

// The same for large windows of planes, a warp each.
template <typename T, bool R>
__global__ void ave_pool_forward_wide(const T* __restrict__ x, T* __restrict__ y, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  const i64 warps = gridDim.x * i64(blockDim.x / 32);
  for (i64 e = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32; e < images * s.small(); e += warps) {
    const Place at(s, e, s.ho, s.wo);
    const Span rows(at.row, s.kh, s.sh, s.ph, s.h), columns(at.column, s.kw, s.sw, s.pw, s.w);
    const T* plane = x + at.image * s.large();
    const int width = max(columns.hi - columns.lo, 0), count = width * max(rows.hi - rows.lo, 0);
    A sum = 0;
    for (int k = threadIdx.x % 32; k < count; k += 32)
      sum += A(plane[(rows.lo + k / width) * s.w + columns.lo + k % width]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) y[e] = rectified<R>(T(sum / (A(rows.full) * A(columns.full))));
  }
}

// dx = sum over the windows that hold an element of dy / area; R: of those windows whose y is above 0
template <typename T, int V, int W, bool R>
__global__ void ave_pool_backward(const T* __restrict__ dy, T* __restrict__ dx, const T* __restrict__ y, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  FOR_EACH(e, images * s.large()) {
    const Place at(s, e, s.h, s.w);
    const Cover rows(at.row, s.kh, s.by_sh, s.ph, s.h, s.ho), columns(at.column, s.kw, s.by_sw, s.pw, s.w, s.wo);
    const i64 image = at.image * s.small() + at.pack;
    const Pack<T, V>* gradients = reinterpret_cast<const Pack<T, V>*>(dy) + image;
    const Pack<T, V>* results = reinterpret_cast<const Pack<T, V>*>(y) + image;
    A sum[V] = {};
    for (int i = rows.lo; i < rows.hi; ++i) {
      const A height = A(Span(i, s.kh, s.sh, s.ph, s.h).full);
      for (int j = columns.lo; j < columns.hi; j += W) {
        Pack<T, V> gradient[W], result[W];
#pragma unroll
        for (int k = 0; k < W; ++k) {
          const int window = (i * s.wo + min(j + k, columns.hi - 1)) * s.packs;
          gradient[k] = gradients[window];
          if (R) result[k] = results[window];
        }
#pragma unroll
        for (int k = 0; k < W; ++k)
          if (j + k < columns.hi) {
            const A share = A(1) / (height * A(Span(j + k, s.kw, s.sw, s.pw, s.w).full));
#pragma unroll
            for (int v = 0; v < V; ++v)
              if (!R || !(A(result[k].v[v]) <= 0)) sum[v] += A(gradient[k].v[v]) * share;
          }
      }
    }
    Pack<T, V> total;
#pragma unroll
    for (int v = 0; v < V; ++v) total.v[v] = T(sum[v]);
    reinterpret_cast<Pack<T, V>*>(dx)[e] = total;
  }
}

// y = an element of the window, each with the probability of its share of their sum: the first up to which they add up
// to a random part of it; index = where. The first element if there is none such.
template <typename T, typename I, int V>
__global__ void stochastic_pool_forward(const T* __restrict__ x, T* __restrict__ y, I* __restrict__ index, WINDOWS,
                                        i64 seed, const i64* step_counter) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  const Draw draw(seed, step_counter);
  FOR_EACH(e, images * s.small()) {
    const Place at(s, e, s.ho, s.wo);
    const Span rows(at.row, s.kh, s.sh, s.ph, s.h), columns(at.column, s.kw, s.sw, s.pw, s.w);
    const Pack<T, V>* image = reinterpret_cast<const Pack<T, V>*>(x) + at.image * s.large() + at.pack;
    const int corner_row = min(rows.lo, s.h - 1), corner_column = min(columns.lo, s.w - 1);
    A sum[V] = {};
    for (int r = rows.lo; r < rows.hi; ++r)
      for (int c = columns.lo; c < columns.hi; ++c) {
        const Pack<T, V> taken = image[(r * s.w + c) * s.packs];
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += A(taken.v[v]);
      }
    Pack<T, V> chosen = image[(corner_row * s.w + corner_column) * s.packs];
    Pack<I, V> places;
    A bound[V], part[V] = {};
    bool found[V] = {};
#pragma unroll
    for (int v = 0; v < V; ++v) {
      places.v[v] = I(index_of<I>(s, corner_row, corner_column, rows.start, columns.start));
      bound[v] = (A(draw(e * V + v)) + A(0.5)) * A(1.0 / 4294967296.0) * sum[v];
    }
    for (int r = rows.lo; r < rows.hi; ++r)
      for (int c = columns.lo; c < columns.hi; ++c) {
        const Pack<T, V> taken = image[(r * s.w + c) * s.packs];
        const I here = I(index_of<I>(s, r, c, rows.start, columns.start));
#pragma unroll
        for (int v = 0; v < V; ++v) {
          part[v] += A(taken.v[v]);
          if (!found[v] && part[v] >= bound[v]) {
            found[v] = true;
            chosen.v[v] = taken.v[v];
            places.v[v] = here;
          }
        }
      }
    reinterpret_cast<Pack<T, V>*>(y)[e] = chosen;
    reinterpret_cast<Pack<I, V>*>(index)[e] = places;
  }
}

// y = what stochastic_pool_forward gives on average: sum of squares / sum, 0 if that is not above 0
template <typename T, int V> __global__ void stochastic_pool_mean(const T* __restrict__ x, T* __restrict__ y, WINDOWS) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  FOR_EACH(e, images * s.small()) {
    const Place at(s, e, s.ho, s.wo);
    const Span rows(at.row, s.kh, s.sh, s.ph, s.h), columns(at.column, s.kw, s.sw, s.pw, s.w);
    const Pack<T, V>* image = reinterpret_cast<const Pack<T, V>*>(x) + at.image * s.large() + at.pack;
    A sum[V] = {}, squares[V] = {};
    for (int r = rows.lo; r < rows.hi; ++r)
      for (int c = columns.lo; c < columns.hi; ++c) {
        const Pack<T, V> taken = image[(r * s.w + c) * s.packs];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          sum[v] += A(taken.v[v]);
          squares[v] += A(taken.v[v]) * A(taken.v[v]);
        }
      }
    Pack<T, V> mean;
#pragma unroll
    for (int v = 0; v < V; ++v) mean.v[v] = T(sum[v] > 0 ? squares[v] / sum[v] : A(0));
    reinterpret_cast<Pack<T, V>*>(y)[e] = mean;
  }
}
