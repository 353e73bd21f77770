// Sums over the rows of (M, O), for each column, of elements that may be changed and written on the way.
// Blocks have 512 threads, a grid is (ceil(O / 32), shares): a block has 32 columns of a share of the rows.

constexpr int STRIP = 32, LINES = 16;

// x = dy * (keep ? scale : 0) * (y > 0 ? 1 : 0), with the factors of which there is an array; out = x unless there is
// no out; sums of x unless there is no db. V elements at a time, which must divide the columns.
template <int V, typename T, typename U>
__device__ void pass_over_columns(const T* dy, const T* y, const unsigned char* keep, Wide<T> scale, U* out,
                                  Sums<Wide<T>> sums, i64 rows, i64 columns) {
  using A = Wide<T>;
  constexpr int ACROSS = STRIP / V;
  __shared__ A parts[LINES][STRIP];
  const int lane_id = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 column = blockIdx.x * i64(STRIP) + lane_id % ACROSS * V, across = columns / V;
  const i64 lo = rows * blockIdx.y / sums.shares, hi = rows * (blockIdx.y + 1) / sums.shares;
  A sum[V] = {};
  if (column < columns) {
#pragma unroll 4
    for (i64 m = lo + threadIdx.x / ACROSS; m < hi; m += blockDim.x / ACROSS) {
      const i64 i = m * across + column / V;
      const Pack<T, V> from = in(dy).template load<V>(i);
      Pack<T, V> above;
      Pack<unsigned char, V> kept;
      Pack<U, V> to;
      if (y) above = in(y).template load<V>(i);
      if (keep) kept = in(keep).template load<V>(i);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        A x = A(from.v[v]);
        if (keep) x *= kept.v[v] ? scale : A(0);
        if (y) x *= A(above.v[v]) <= 0 ? A(0) : A(1);
        sum[v] += x;
        to.v[v] = U(x);
      }
      if (out) both(out).template store<V>(i, to);
    }
  }
  if (!sums.db) return;
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int offset = 16; offset >= ACROSS; offset /= 2) sum[v] += __shfl_xor_sync(0xffffffffu, sum[v], offset);
    if (lane_id < ACROSS) parts[warp][lane_id * V + v] = sum[v];
  }
  __syncthreads();
  const i64 o = blockIdx.x * i64(STRIP) + threadIdx.x;
  if (threadIdx.x < STRIP && o < columns) {
    A total = parts[0][threadIdx.x];
    for (int line = 1; line < LINES; ++line) total += parts[line][threadIdx.x];
    sums.add(o, total);
  }
}

template <typename T, typename U>
__device__ void over_columns(const T* dy, const T* y, const unsigned char* keep, Wide<T> scale, U* out,
                             Sums<Wide<T>> sums, i64 rows, i64 columns) {
  constexpr int V = 16 / (sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U));
  const bool whole = columns % V == 0 && in(dy).template fits<V>() && in(y).template fits<V>() &&
                     in(keep).template fits<V>() && both(out).template fits<V>();
  if (whole)
    pass_over_columns<V>(dy, y, keep, scale, out, sums, rows, columns);
  else
    pass_over_columns<1>(dy, y, keep, scale, out, sums, rows, columns);
}
