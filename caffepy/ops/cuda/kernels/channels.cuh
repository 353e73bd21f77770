// Two sums for each channel of (outer, C, inner), in two stages: every block adds up a share of a channel, or, where
// inner is 1, of 32 channels; then a warp adds up the shares of a channel. Blocks have 256 threads.

struct Shape {
  i64 outer, channels, inner, splits;
  __device__ i64 total() const { return outer * inner; }
};

// f for packs [lo, hi) of the outer * inner / V of channel c.
template <int V, typename F, typename... A>
__device__ void each_of_channel(Shape s, i64 c, i64 lo, i64 hi, F f, A... a) {
  const unsigned inner = unsigned(s.inner / V), e = unsigned(lo + threadIdx.x);
  const unsigned dn = blockDim.x / inner, dp = blockDim.x % inner;
  unsigned n = e / inner, p = e % inner;
  for (i64 i = lo + threadIdx.x; i < hi; i += blockDim.x) {
    group<V>((i64(n) * s.channels + c) * inner + p, f, a...);
    p += dp;
    n += dn;
    if (p >= inner) {
      p -= inner;
      ++n;
    }
  }
}

template <typename F> struct OfChannel {
  F& f;
  i64 c;
  double &first, &second;
  template <typename... X> __device__ void operator()(i64 i, X&... x) { f(c, first, second, i, x...); }
};

// partial (2, C, splits): sums that f(channel, first, second, index, elements...) adds to.
template <int V, typename F, typename... A>
__device__ void channel_sums(Shape s, double* partial, F f, A... a) {
  const i64 split = blockIdx.x % s.splits, which = blockIdx.x / s.splits;
  double first = 0, second = 0;
  if (s.inner == 1) {
    __shared__ double parts[2][8][32];
    const int column = threadIdx.x % 32, row = threadIdx.x / 32;
    const i64 c = which * 32 + column, size = (s.outer + s.splits - 1) / s.splits;
    const i64 lo = split * size, hi = lo + size < s.outer ? lo + size : s.outer;
    if (c < s.channels) {
      OfChannel<F> g{f, c, first, second};
      for (i64 n = lo + row; n < hi; n += 8) group<1>(n * s.channels + c, g, a...);
    }
    parts[0][row][column] = first;
    parts[1][row][column] = second;
    __syncthreads();
    if (row == 0 && c < s.channels) {
      for (int r = 1; r < 8; ++r) {
        first += parts[0][r][column];
        second += parts[1][r][column];
      }
      partial[c * s.splits + split] = first;
      partial[(s.channels + c) * s.splits + split] = second;
    }
    return;
  }
  const i64 c = which;
  OfChannel<F> g{f, c, first, second};
  const bool whole = s.inner % V == 0 && (a.template fits<V>() && ...);
  const i64 packs = whole ? s.total() / V : s.total(), size = (packs + s.splits - 1) / s.splits;
  const i64 lo = split * size, hi = lo + size < packs ? lo + size : packs;
  if (whole)
    each_of_channel<V>(s, c, lo, hi, g, a...);
  else
    each_of_channel<1>(s, c, lo, hi, g, a...);
  first = block_sum(first);
  second = block_sum(second);
  if (threadIdx.x == 0) {
    partial[c * s.splits + split] = first;
    partial[(s.channels + c) * s.splits + split] = second;
  }
}

// f(channel, first sum, second sum) once for each channel, by a warp each.
template <typename F> __device__ void finish_channels(const double* partial, i64 channels, i64 splits, F f) {
  const i64 c = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32;
  if (c >= channels) return;
  double first = 0, second = 0;
  for (i64 i = threadIdx.x % 32; i < splits; i += 32) {
    first += partial[c * splits + i];
    second += partial[(channels + c) * splits + i];
  }
  first = warp_sum(first);
  second = warp_sum(second);
  if (threadIdx.x % 32 == 0) f(c, first, second);
}
