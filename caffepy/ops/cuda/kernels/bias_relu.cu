// What goes with a convolution: y = relu(y + b) and its gradient, of arrays (outer, O, inner); inner is 1 where channels
// lie last, and outer then counts pixels. All sums in a fixed order: shares of a channel's sum first, then their sum.

#include "pack.cuh"
#include "reduce.cuh"
#include "columns.cuh"

// y = relu(y + b_o); b and the relu may be missing
template <typename T>
__global__ void bias_relu(T* values, const Wide<T>* b, i64 outer, i64 outputs, i64 inner, i64 relu) {
  using A = Wide<T>;
  Channel channel(outputs, inner);
  each<PACK>(
      outer * outputs * inner,
      [=](i64 i, T& y) mutable {
        const A sum = A(y) + (b ? b[channel.at(i)] : A(0));
        y = T(relu && sum <= 0 ? A(0) : sum);
      },
      both(values));
}

// dy = 0 where y <= 0, unless there is no y, for packs of V elements that lie `step` apart, two at a time; their sums.
template <int V, typename T> __device__ void mask(const T* y, T* dy, i64 first, i64 end, i64 step, Wide<T> (&sum)[V]) {
  using A = Wide<T>;
  constexpr int U = 2;
  for (i64 i = first; i < end; i += U * step) {
    Pack<T, V> d[U], above[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + u * step < end) {
        d[u] = in(dy).template load<V>(i + u * step);
        if (y) above[u] = in(y).template load<V>(i + u * step);
      }
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (i + u * step < end) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (y && A(above[u].v[v]) <= 0) d[u].v[v] = T(0.0f);
          sum[v] += A(d[u].v[v]);
        }
        if (y) both(dy).template store<V>(i + u * step, d[u]);
      }
  }
}

// The sums of a block's threads over its lines of `width` packs, for those of line 0; `sums` holds 256 packs.
template <int V, typename A>
__device__ const A* sum_of_lines(const A (&sum)[V], A* sums, unsigned column, unsigned line, unsigned width) {
  const unsigned lines = 256 / width;
  A* mine = sums + (line * width + column) * V;
  if (line < lines)
    for (int v = 0; v < V; ++v) mine[v] = sum[v];
  __syncthreads();
  for (unsigned left = lines; left > 1;) {
    const unsigned half = (left + 1) / 2;
    if (line + half < left)
      for (int v = 0; v < V; ++v) mine[v] += mine[half * width * V + v];
    left = half;
    __syncthreads();
  }
  return mine;
}

// Channels last. A block takes up to 256 packs of V columns, of the rows of a share as many at a time as it has threads
// for, so that it reads whole stretches of memory.
template <int V, typename T>
__device__ void mask_rows(const T* y, T* dy, Sums<Wide<T>> to, Wide<T>* sums, i64 rows, i64 outputs) {
  using A = Wide<T>;
  const unsigned across = unsigned(outputs / V), first = blockIdx.x * 256, width = min(256u, across - first);
  const unsigned column = threadIdx.x % width, line = threadIdx.x / width, lines = 256 / width;
  const i64 lo = rows * blockIdx.y / to.shares, hi = rows * (blockIdx.y + 1) / to.shares;
  A sum[V] = {};
  if (line < lines) {
    const i64 start = (lo + line) * across + first + column;
    mask<V>(y, dy, start, hi * across, i64(lines) * across, sum);
  }
  if (!to.db) return;
  const A* total = sum_of_lines(sum, sums, column, line, width);
  if (line == 0)
    for (int v = 0; v < V; ++v) to.add((first + column) * V + v, total[v]);
}

template <int V, typename T>
__device__ void mask_rows_by(i64 pack, const T* y, T* dy, Sums<Wide<T>> to, Wide<T>* sums, i64 rows, i64 outputs) {
  if (pack == V)
    mask_rows<V>(y, dy, to, sums, rows, outputs);
  else if constexpr (V > 1)
    mask_rows_by<V / 2>(pack, y, dy, to, sums, rows, outputs);
}

// dy = 0 where y <= 0, unless there is no y; db_o += sum of dy, unless there is no db. `pack` divides O.
// Grid (ceil(O / pack / 256), shares), 256 threads.
template <typename T> __global__ void __launch_bounds__(256)
relu_bias_rows(const T* y, T* dy, Wide<T>* db, Wide<T>* part, i64 rows, i64 outputs, i64 shares, i64 pack) {
  constexpr int V = PACK;
  __shared__ Wide<T> sums[256 * V];
  mask_rows_by<V>(pack, y, dy, Sums<Wide<T>>{db, part, shares}, sums, rows, outputs);
}

// Up to MOST arrays, as arguments of a kernel.
constexpr int MOST = 8;
#define ARRAYS(type, name) type name##0, type name##1, type name##2, type name##3, type name##4, type name##5, type name##6, type name##7
#define OF(name) {name##0, name##1, name##2, name##3, name##4, name##5, name##6, name##7}

// Which of several parts side by side in a line a column belongs to: that which begins there, up to `end`.
struct PartOf {
  int number = 0;
  unsigned start = 0, end;
  __device__ PartOf(unsigned column, const i64 (&ends)[MOST]) : end(unsigned(ends[0])) {
#pragma unroll
    for (int i = 1; i < MOST; ++i)
      if (column >= end) {
        number = i;
        start = end;
        end = unsigned(ends[i]);
      }
  }
};

template <typename P> __device__ P chosen(int number, P const (&of)[MOST]) {
  P found = of[0];
#pragma unroll
  for (int i = 1; i < MOST; ++i)
    if (number == i) found = of[i];
  return found;
}

// Channels last. dx of each part = the sum of N arrays of all parts side by side, `across` packs in a line, where its y > 0,
// else 0; shares (columns, shares) of the sums of dx. Blocks as for relu_bias_rows.
template <typename T, int N> __global__ void __launch_bounds__(256, 3)
cut_relu_rows(ARRAYS(const T*, dy), ARRAYS(const T*, y), ARRAYS(T*, dx), ARRAYS(i64, end), Wide<T>* part, i64 rows,
              i64 across, i64 shares) {
  using A = Wide<T>;
  constexpr int V = PACK, U = 2;
  __shared__ A sums[256 * V];
  const unsigned first = blockIdx.x * 256, width = min(256u, unsigned(across) - first);
  const unsigned column = threadIdx.x % width, line = threadIdx.x / width, lines = 256 / width;
  const T* const dys[MOST] = OF(dy);
  const T* const ys[MOST] = OF(y);
  T* const dxs[MOST] = OF(dx);
  const i64 ends[MOST] = OF(end);
  const PartOf of(first + column, ends);
  const i64 pitch = of.end - of.start, at = first + column - of.start;
  const T* const above = chosen(of.number, ys);
  T* const to = chosen(of.number, dxs);
  const i64 lo = rows * blockIdx.y / shares, hi = rows * (blockIdx.y + 1) / shares;
  A sum[V] = {};
  for (i64 row = line < lines ? lo + line : hi; row < hi; row += U * lines) {
    Pack<T, V> taken[U][N], of_y[U];
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (const i64 r = row + u * lines; r < hi) {
#pragma unroll
        for (int n = 0; n < N; ++n) taken[u][n] = in(dys[n]).template load<V>(r * across + first + column);
        of_y[u] = in(above).template load<V>(r * pitch + at);
      }
#pragma unroll
    for (int u = 0; u < U; ++u)
      if (const i64 r = row + u * lines; r < hi) {
        Pack<T, V> d;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          A total = A(taken[u][0].v[v]);
#pragma unroll
          for (int n = 1; n < N; ++n) total += A(taken[u][n].v[v]);
          d.v[v] = A(of_y[u].v[v]) <= 0 ? T(0.0f) : T(total);
          sum[v] += A(d.v[v]);
        }
        out(to).template store<V>(r * pitch + at, d);
      }
  }
  const A* total = sum_of_lines(sum, sums, column, line, width);
  if (line == 0)
    for (int v = 0; v < V; ++v) part[((first + column) * V + v) * shares + blockIdx.y] = total[v];
}

// The sums to where they belong: db of each part, whose columns end before `end`, unless there is none.
template <typename T>
__global__ void add_shares_of_parts(const Wide<T>* part, ARRAYS(Wide<T>*, db), ARRAYS(i64, end), i64 outputs, i64 shares) {
  const i64 o = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32;
  if (o >= outputs) return;
  Wide<T>* const dbs[MOST] = OF(db);
  const i64 ends[MOST] = OF(end);
  const PartOf of{unsigned(o), ends};
  Wide<T>* const db = chosen(of.number, dbs);
  if (!db) return;
  Wide<T> sum = 0;
#pragma unroll 8
  for (i64 s = threadIdx.x % 32; s < shares; s += 32) sum += part[o * shares + s];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) db[o - of.start] += sum;
}

// relu_bias_rows for planes: `lines` pieces of up to `length` elements make a plane; a warp takes every eighth of a share.
// Grid (O, shares), 256 threads.
template <typename T> __global__ void __launch_bounds__(256)
relu_bias_planes(const T* y, T* dy, Wide<T>* db, Wide<T>* part, i64 images, i64 outputs, i64 positions, i64 shares,
                 i64 length) {
  using A = Wide<T>;
  constexpr int V = PACK;
  const bool whole = positions % V == 0 && in(y).template fits<V>() && in(dy).template fits<V>();
  const i64 o = blockIdx.x, lines = (positions + length - 1) / length, lane_id = threadIdx.x % 32;
  const i64 lo = images * lines * blockIdx.y / shares, hi = images * lines * (blockIdx.y + 1) / shares;
  A sum[V] = {};
  for (i64 line = lo + threadIdx.x / 32; line < hi; line += 8) {
    const i64 p = line % lines * length, start = (line / lines * outputs + o) * positions + p;
    const i64 end = start + min(length, positions - p);
    if (whole) {
      mask<V>(y, dy, start / V + lane_id, end / V, 32, sum);
    } else {
      A one[1] = {};
      mask<1>(y, dy, start + lane_id, end, 32, one);
      sum[0] += one[0];
    }
  }
  if (!db) return;
  for (int v = 1; v < V; ++v) sum[0] += sum[v];
  const A total = block_sum(sum[0]);
  if (threadIdx.x == 0) Sums<A>{db, part, shares}.add(o, total);
}

// db_o += sum of part[o, ...]; a warp for each o
template <typename T> __global__ void add_shares(const Wide<T>* part, Wide<T>* db, i64 outputs, i64 shares) {
  const i64 o = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32;
  if (o >= outputs) return;
  Wide<T> sum = 0;
#pragma unroll 8
  for (i64 s = threadIdx.x % 32; s < shares; s += 32) sum += part[o * shares + s];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) db[o] += sum;
}

// Column sums of dy (M, O), see columns.cuh.
template <typename T> __global__ void __launch_bounds__(512)
bias_gradient_rows(const T* dy, i64 rows, i64 columns, Wide<T>* db, Wide<T>* part, i64 shares) {
  const T* none = nullptr;
  over_columns(dy, none, nullptr, Wide<T>(1), (T*)nullptr, Sums<Wide<T>>{db, part, shares}, rows, columns);
}

// Likewise of float32 dy, and out = dy in another type
template <typename T> __global__ void __launch_bounds__(512)
bias_gradient_narrowing(const float* dy, T* out, i64 rows, i64 columns, float* db, float* part, i64 shares) {
  const float* none = nullptr;
  over_columns(dy, none, nullptr, 1.0f, out, Sums<float>{db, part, shares}, rows, columns);
}
