// Pooling over windows (windows.cuh). An index tells which element has the maximum. W elements of a row are loaded at a
// time, the last one again where there are fewer. R: relu.

#include "pack.cuh"
#include "reduce.cuh"
#include "random.cuh"
#include "windows.cuh"
#include "pairs.cuh"

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

// max_pool_forward for numbers of 16 bits (compute capability 9.0), index in bytes, windows of K x K with stride S and
// padding P, none of which begins beyond the plane. A thread takes 8 channels of NEXT neighbours of a row, loads each
// element under them once, two channels to a word; then it looks where the maxima came from, last element first.
template <typename T, int K, int S, int P, bool R>
__global__ void max_pool_forward_tiles(const T* __restrict__ x, T* __restrict__ y, unsigned char* __restrict__ index,
                                       WINDOWS) {
  constexpr int V = 8, WORDS = 4, NEXT = 4 / S, COLUMNS = (NEXT - 1) * S + K;
  using Words = Pack<unsigned, WORDS>;
  const Windows s = NUMBERS;
  const int tiles = (s.wo + NEXT - 1) / NEXT;
  FOR_EACH(e, images * s.ho * tiles * s.packs) {
    const Place at(s, e, s.ho, tiles);  // by_columns divides by the tiles of a row
    const int top = at.row * S - P, left = at.column * NEXT * S - P;
    const Words* image = reinterpret_cast<const Words*>(x) + at.image * s.large() + at.pack;
    Words taken[K][COLUMNS];
#pragma unroll
    for (int r = 0; r < K; ++r)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const int row = top + r, column = left + c;
        const bool inside = row >= 0 && row < s.h && column >= 0 && column < s.w;
        taken[r][c] = inside ? image[(row * s.w + column) * s.packs] : lowest<T, WORDS>();
      }
    const i64 first = at.image * s.small() + (i64(at.row) * s.wo + at.column * NEXT) * s.packs + at.pack;
#pragma unroll
    for (int u = 0; u < NEXT; ++u) {
      if (at.column * NEXT + u >= s.wo) break;
      const auto of_window = [&](int r, int c) { return taken[r][u * S + c]; };
      const auto of_plane = [&](int row, int column) { return image[(row * s.w + column) * s.packs]; };
      Words largest;
      Pack<unsigned char, V> places;
      find_largest<T, K, K, R>(of_window, of_plane, top, left + u * S, largest, places);
      reinterpret_cast<Words*>(y)[first + u * s.packs] = largest;
      reinterpret_cast<Pack<unsigned char, V>*>(index)[first + u * s.packs] = places;
    }
  }
}

// dx = sum of the dy of those windows whose index names the element, in the order of the windows
template <typename T, typename I, int V, int W>
__global__ void max_pool_backward(const T* __restrict__ dy, const I* __restrict__ index, T* __restrict__ dx, WINDOWS) {
  const Windows s = NUMBERS;
  FOR_EACH(e, images * s.large()) reinterpret_cast<Pack<T, V>*>(dx)[e] = of_maxima<V, W>(s, e, dy, index);
}

// The quotient of a compile-time number that may be negative, rounded down.
__device__ constexpr int floor_of(int n, int d) { return n >= 0 ? n / d : -((d - 1 - n) / d); }

// The same for windows of K x K with stride S, which divides TILE, and padding P, none of which begins beyond the plane:
// a thread makes TILE neighbours of a row, and takes each of the windows over them once.
constexpr int TILE = 4;

// part (channels, blocks): with SUMS the shares of dx in blocks, all of whose threads keep to their channels.
template <typename T, int K, int S, int P, bool SUMS>
__global__ void __launch_bounds__(256, SUMS ? 3 : 4)
max_pool_backward_tiles(const T* __restrict__ dy, const unsigned char* __restrict__ index, T* __restrict__ dx, WINDOWS,
                        Wide<T>* part) {
  using A = Wide<T>;
  constexpr int V = PACK;
  constexpr int FIRST = -floor_of(K - 1 - P, S), COUNT = floor_of(TILE - 1 + P, S) - FIRST + 1;
  const Windows s = NUMBERS;
  const int tiles = (s.w + TILE - 1) / TILE;
  A all[V] = {};
  FOR_EACH(e, images * s.h * tiles * s.packs) {
    const Place at(s, e, s.h, tiles);  // by_columns divides by the tiles of a row
    const Cover rows(at.row, K, s.by_sh, P, s.h, s.ho);
    const int left = at.column * TILE, first = left / S + FIRST;
    const Pack<T, V>* gradients = reinterpret_cast<const Pack<T, V>*>(dy) + at.image * s.small() + at.pack;
    const Pack<unsigned char, V>* indices =
        reinterpret_cast<const Pack<unsigned char, V>*>(index) + at.image * s.small() + at.pack;
    A sum[TILE][V] = {};
    for (int i = rows.lo; i < rows.hi; ++i) {
      const int line = (at.row - (i * S - P)) * K;
      Pack<T, V> gradient[COUNT];
      Pack<unsigned char, V> named[COUNT];
#pragma unroll
      for (int n = 0; n < COUNT; ++n) {
        const int j = min(max(first + n, 0), s.wo - 1), window = (i * s.wo + j) * s.packs;
        gradient[n] = gradients[window];
        named[n] = indices[window];
      }
#pragma unroll
      for (int n = 0; n < COUNT; ++n) {
        const bool there = first + n >= 0 && first + n < s.wo;
#pragma unroll
        for (int u = 0; u < TILE; ++u) {
          const int across = u - ((FIRST + n) * S - P);
          if (across < 0 || across >= K) continue;
          const int here = there ? line + across : -1;
#pragma unroll
          for (int v = 0; v < V; ++v)
            if (named[n].v[v] == here) sum[u][v] += A(gradient[n].v[v]);
        }
      }
    }
    Pack<T, V>* to = reinterpret_cast<Pack<T, V>*>(dx) + at.image * s.large() + (at.row * s.w + left) * s.packs + at.pack;
#pragma unroll
    for (int u = 0; u < TILE; ++u) {
      if (left + u >= s.w) break;
      Pack<T, V> total;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        total.v[v] = T(sum[u][v]);
        if (SUMS) all[v] += A(total.v[v]);
      }
      to[u * s.packs] = total;
    }
  }
  if constexpr (SUMS) {
    __shared__ A sums[256][V];
#pragma unroll
    for (int v = 0; v < V; ++v) sums[threadIdx.x][v] = all[v];
    __syncthreads();
    const unsigned packs_of_line = unsigned(s.packs), first = blockIdx.x * 256 % packs_of_line;
    for (unsigned c = threadIdx.x; c < packs_of_line * V; c += 256) {
      A total = 0;
      for (unsigned i = (c / V + packs_of_line - first) % packs_of_line; i < 256; i += packs_of_line) total += sums[i][c % V];
      part[c * gridDim.x + blockIdx.x] = total;
    }
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

// dx = sum over the windows that hold an element of dy / area; R: of those windows whose y is above 0. X: y is an array
// like dx; of the elements whose y is above 0
template <typename T, int V, int W, bool R, bool X>
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
    Pack<T, V> total, mask;
    if (X) mask = reinterpret_cast<const Pack<T, V>*>(y)[e];
#pragma unroll
    for (int v = 0; v < V; ++v) total.v[v] = T(X && A(mask.v[v]) <= 0 ? A(0) : sum[v]);
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
