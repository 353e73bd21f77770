// Pooling over windows (windows.cuh). An index tells which element has the maximum. W elements of a row are loaded at a
// time, the last one again where there are fewer. R: relu.

#include "pack.cuh"
#include "reduce.cuh"
#include "random.cuh"
#include "windows.cuh"

// y = the first largest element, index = where; of a window without numbers above -inf its first element.
// R: 0 instead of what is not above 0, which is nowhere. NORM: elements are x * factor + shift, rounded, with a number of
// each channel of images, or of each of so many planes.
template <typename T, typename I, int V, int W, bool R, bool NORM>
__global__ void max_pool_forward(const T* __restrict__ x, T* __restrict__ y, I* __restrict__ index, WINDOWS,
                                 const Wide<T>* factor, const Wide<T>* shift, i64 planes) {
  using A = Wide<T>;
  const Windows s = NUMBERS;
  const A least = -__int_as_float(0x7f800000);
  FOR_EACH(e, images * s.small()) {
    const Place at(s, e, s.ho, s.wo);
    const Span rows(at.row, s.kh, s.sh, s.ph, s.h), columns(at.column, s.kw, s.sw, s.pw, s.w);
    const Pack<T, V>* image = reinterpret_cast<const Pack<T, V>*>(x) + at.image * s.large() + at.pack;
    const int corner_row = min(rows.lo, s.h - 1), corner_column = min(columns.lo, s.w - 1);
    A factors[V], shifts[V];
    if (NORM) {
      const i64 channel = planes ? at.image % planes : i64(at.pack) * V;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        factors[v] = factor[channel + v];
        shifts[v] = shift[channel + v];
      }
    }
    const auto value = [&](T number, int v) { return NORM ? A(T(fma(A(number), factors[v], shifts[v]))) : A(number); };
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
            const A number = value(taken[k].v[v], v);
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
      largest.v[v] = T(best[v] == least ? value(corner[v], v) : best[v]);
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

template <typename T, typename I, int V, int W>
__global__ void max_pool_backward(const T* __restrict__ dy, const I* __restrict__ index, T* __restrict__ dx, WINDOWS) {
  const Windows s = NUMBERS;
  FOR_EACH(e, images * s.large()) reinterpret_cast<Pack<T, V>*>(dx)[e] = of_maxima<V, W>(s, e, dy, index);
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
