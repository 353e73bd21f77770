// MAX pooling of what LRN makes of x (lrn.cu), which is not written, and both gradients with ReLU's mask: numbers of
// images whose channels lie last, beta = 3/4, windows of K x K with stride S and padding P, none of which begins beyond
// the plane. A thread takes V channels of a pixel at a time.

#include "pack.cuh"
#include "pairs.cuh"
#include "lrn.cuh"
#include "ahead.cuh"

constexpr int V = 8, ROWS = 2, THREADS = 128;

// V numbers, those of 16 bits by words of two: the compiler makes more instructions of each by itself.
template <typename T> struct Row {
  static __device__ void widen(float* to, const Pack<T, V>& from) {
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = from.v[v];
  }
  static __device__ Pack<T, V> narrow(const float (&from)[V]) {
    Pack<T, V> to;
#pragma unroll
    for (int v = 0; v < V; ++v) to.v[v] = from[v];
    return to;
  }
};

#define ROW(type, name, low, high)                                                                        \
  template <> struct Row<type> {                                                                          \
    static __device__ void widen(float* to, const Pack<type, V>& from) {                                  \
      const unsigned* words = reinterpret_cast<const unsigned*>(&from);                                   \
      _Pragma("unroll") for (int v = 0; v < V; v += 2) {                                                  \
        to[v] = low(words[v / 2]);                                                                        \
        to[v + 1] = high(words[v / 2]);                                                                   \
      }                                                                                                   \
    }                                                                                                     \
    static __device__ Pack<type, V> narrow(const float (&from)[V]) {                                      \
      Pack<type, V> to;                                                                                   \
      unsigned* words = reinterpret_cast<unsigned*>(&to);                                                 \
      _Pragma("unroll") for (int v = 0; v < V; v += 2)                                                    \
        asm("cvt.rn." name ".f32 %0, %1, %2;" : "=r"(words[v / 2]) : "f"(from[v + 1]), "f"(from[v]));     \
      return to;                                                                                          \
    }                                                                                                     \
  };
__device__ inline float low_bf16(unsigned word) { return __int_as_float(int(word << 16)); }
__device__ inline float high_bf16(unsigned word) { return __int_as_float(int(word & 0xffff0000u)); }
__device__ inline float half_of(unsigned short bits) {
  half_t half;
  half.bits = bits;
  return half;
}
__device__ inline float low_half(unsigned word) { return half_of((unsigned short)(word)); }
__device__ inline float high_half(unsigned word) { return half_of((unsigned short)(word >> 16)); }
ROW(bf16_t, "bf16x2", low_bf16, high_bf16)
ROW(half_t, "f16x2", low_half, high_half)

// V channels of a pixel, and HALF or more to either side of them.
template <typename T, int HALF> struct Around {
  static constexpr int NEAR = HALF > 2 ? 4 : HALF;
  Pack<T, V> own;
  Pack<T, NEAR> before, after;
  __device__ void load(const T* at, bool first, bool last) {  // without branches, so that all loads are under way at once
    own = *reinterpret_cast<const Pack<T, V>*>(at);
    before = *reinterpret_cast<const Pack<T, NEAR>*>(first ? at : at - NEAR);
    after = *reinterpret_cast<const Pack<T, NEAR>*>(last ? at : at + V);
  }
  // LRN of these channels, two numbers of 16 bits to a word; channels before the first and behind the last are 0
  __device__ Pack<unsigned, V / 2> normalized(bool first, bool last, float alpha, float k) const {
    float u[V + 2 * HALF], squares[V + 2 * HALF], y[V];
    Row<T>::widen(u + HALF, own);
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      u[i] = first ? 0.f : float(before.v[NEAR - HALF + i]);
      u[HALF + V + i] = last ? 0.f : float(after.v[i]);
    }
#pragma unroll
    for (int i = 0; i < V + 2 * HALF; ++i) squares[i] = u[i] * u[i];
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = u[HALF + v] * Roots(k + alpha * window<HALF>(squares, HALF + v)).of;
    const Pack<T, V> result = Row<T>::narrow(y);
    return reinterpret_cast<const Pack<unsigned, V / 2>&>(result);
  }
};

// y = maxima of LRN of x, index as of max_pool_forward. A thread makes `length` neighbours of ROWS rows each, and LRN of
// each element under them once.
template <typename T, int HALF, int K, int S, int P>
__global__ void __launch_bounds__(THREADS, 3)
lrn_max_pool_forward(const T* __restrict__ x, T* __restrict__ y, unsigned char* __restrict__ index, i64 images,
                     i64 channels, i64 h, i64 w, i64 ho, i64 wo, i64 length, double alpha, double k) {
  constexpr int TALL = (ROWS - 1) * S + K, KEPT = K > S ? K - S : 0;
  using Words = Pack<unsigned, V / 2>;
  const unsigned packs = unsigned(channels / V), groups = unsigned(ho + ROWS - 1) / ROWS;
  const unsigned parts = unsigned((wo + length - 1) / length), total = unsigned(images) * groups * parts * packs;
  for (unsigned e = blockIdx.x * THREADS + threadIdx.x; e < total; e += gridDim.x * THREADS) {
    const unsigned run = e / packs, pack = e - run * packs, line = run / parts, image = line / groups;
    const int row = int(line - image * groups) * ROWS, top = row * S - P;
    const int begin = int(run - line * parts) * int(length), end = min(int(wo), begin + int(length));
    const T* plane = x + i64(image) * h * w * channels + pack * V;
    const bool first = pack == 0, last = pack == packs - 1;
    const auto pixel = [&](int r, int at) { return plane + (r * int(w) + at) * int(channels); };
    const auto of_plane = [&](int r, int at) {
      Around<T, HALF> around;
      around.load(pixel(r, at), first, last);
      return around.normalized(first, last, float(alpha), float(k));
    };
    Words held[TALL][K];
    Around<T, HALF> around[TALL][K];
    const auto load = [&](int from, int to, int left) {  // columns from .. to - 1 of a window at `left`
#pragma unroll
      for (int a = 0; a < K; ++a)
#pragma unroll
        for (int r = 0; r < TALL; ++r)
          if (a >= from && a < to)
            around[r][a].load(pixel(min(max(top + r, 0), int(h) - 1), min(max(left + a, 0), int(w) - 1)), first, last);
    };
    const auto normalize = [&](int from, int to, int left) {  // these; -inf outside the plane
#pragma unroll
      for (int a = 0; a < K; ++a)
#pragma unroll
        for (int r = 0; r < TALL; ++r) {
          if (a < from || a >= to) continue;
          const bool inside = top + r >= 0 && top + r < int(h) && left + a >= 0 && left + a < int(w);
          const Words words = around[r][a].normalized(first, last, float(alpha), float(k));
#pragma unroll
          for (int i = 0; i < V / 2; ++i) held[r][a].v[i] = inside ? words.v[i] : lowest<T, V / 2>().v[i];
        }
    };
    load(0, KEPT, begin * S - P);
    normalize(0, KEPT, begin * S - P);
    load(KEPT, K, begin * S - P);
    for (int column = begin; column < end; ++column) {
      const int left = column * S - P;
      normalize(KEPT, K, left);
      load(KEPT, K, left + S);  // for the next window
#pragma unroll
      for (int u = 0; u < ROWS; ++u) {
        if (row + u >= int(ho)) break;
        const auto of_window = [&](int r, int a) { return held[u * S + r][a]; };
        Words largest;
        Pack<unsigned char, V> places;
        find_largest<T, K, K, false>(of_window, of_plane, top + u * S, left, largest, places);
        const i64 to = ((i64(image) * ho + row + u) * wo + column) * packs + pack;
        reinterpret_cast<Words*>(y)[to] = largest;
        reinterpret_cast<Pack<unsigned char, V>*>(index)[to] = places;
      }
#pragma unroll
      for (int r = 0; r < TALL; ++r)
#pragma unroll
        for (int a = 0; a < KEPT; ++a) held[r][a] = held[r][a + S];
    }
  }
}

// Gets the HALF values to either side of a lane's own from the lanes beside it, 0 for the first and last pack of a line.
template <int HALF> __device__ void surround(float (&values)[V + 2 * HALF], bool first, bool last) {
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    const float before = __shfl_up_sync(~0u, values[V + i], 1), after = __shfl_down_sync(~0u, values[HALF + i], 1);
    values[i] = first ? 0.f : before;
    values[HALF + V + i] = last ? 0.f : after;
  }
}

// dx = LRN's gradient of that of the maxima, 0 where x <= 0; part (channels, blocks) = shares of its sums, if there is
// one. dx may be x. A thread makes the pixels of a tile of S x S, which (K - 1) / S + 1 windows in a row cover; what it
// needs comes to its place in shared memory while it makes the tile before. A warp takes `step` packs of whole tiles one
// after the other: all its lanes do if lines of packs end with a warp, else the first and the last only lend their
// neighbours what these need; a block takes whole lines in both cases.
template <typename T, int HALF, int K, int S, int P>
__global__ void __launch_bounds__(THREADS, 4)
lrn_max_pool_backward(const T* x, const T* __restrict__ dy, const unsigned char* __restrict__ index, T* dx, i64 images,
                      i64 channels, i64 h, i64 w, i64 ho, i64 wo, i64 rows, i64 columns, i64 step, i64 by_packs,
                      i64 by_columns, i64 by_rows, double alpha, double factor, double k, float* part) {
  constexpr int SIDE = (K - 1) / S + 1, OVER = SIDE * SIDE, PIXELS = S * S, WARPS = THREADS / 32;
  using Eight = Pack<T, V>;
  using Names = Pack<unsigned char, V>;
  extern __shared__ __align__(32) unsigned char room[];
  Eight* rows_ahead = reinterpret_cast<Eight*>(room);  // of windows, then of pixels, twice, for each thread
  Names* names_ahead = reinterpret_cast<Names*>(rows_ahead + 2 * (OVER + PIXELS) * THREADS);
  const int packs = int(channels / V), lane = threadIdx.x % 32, chunk = int(step) * WARPS;
  const bool lends = step < 32;
  const int own = int(threadIdx.x / 32) * int(step) + lane - lends, pack = (own + packs) % packs;
  const bool mine = !lends || (lane > 0 && lane < 31), first = pack == 0, last = pack == packs - 1;
  const Divisor of_packs(by_packs), of_columns(by_columns), of_rows(by_rows);
  const unsigned total = unsigned(images) * unsigned(rows) * unsigned(columns) * unsigned(packs);
  const float a = float(alpha), by = float(factor), start = float(k);

  struct Tile {
    bool there;
    int row, column;
    i64 windows, plane;
  };
  const auto tile_at = [&](unsigned base) {
    const unsigned e = base + unsigned(own);
    const bool there = own >= 0 && own < chunk && e < total;
    const unsigned tile = of_packs.quotient(there ? e : 0), line = of_columns.quotient(tile);
    const unsigned image = of_rows.quotient(line);
    return Tile{there, int(line - image * unsigned(rows)), int(tile - line * unsigned(columns)),
                i64(image) * ho * wo * packs + pack, i64(image) * h * w * packs + pack};
  };
  const auto within = [&](const Tile& tile, int r, int s) {
    const int row = tile.row * S - P + r, column = tile.column * S - P + s;
    return tile.there && row >= 0 && row < int(h) && column >= 0 && column < int(w);
  };
  const auto place = [&](const Tile& tile, int r, int s) {
    return tile.plane + ((tile.row * S - P + r) * int(w) + tile.column * S - P + s) * packs;
  };
  const auto load = [&](unsigned base, int stage) {
    Eight* to = rows_ahead + stage * (OVER + PIXELS) * THREADS + threadIdx.x;
    Names* names = names_ahead + stage * OVER * THREADS + threadIdx.x;
    const Tile tile = tile_at(base < total ? base : 0);
    const auto copy = [&](Eight* row, const T* from, bool there) {
#pragma unroll
      for (int i = 0; i < int(sizeof(Eight)); i += 16)
        copy_ahead<16>(reinterpret_cast<char*>(row) + i, reinterpret_cast<const char*>(from) + i, there);
    };
#pragma unroll
    for (int m = 0; m < SIDE; ++m)
#pragma unroll
      for (int n = 0; n < SIDE; ++n) {
        const int i = tile.row - m, j = tile.column - n;
        const bool there = base < total && tile.there && i >= 0 && i < int(ho) && j >= 0 && j < int(wo);
        const i64 at = there ? (tile.windows + (i * int(wo) + j) * packs) * V : 0;
        copy(to + (m * SIDE + n) * THREADS, dy + at, there);
        copy_ahead<8>(names + (m * SIDE + n) * THREADS, index + at, there);
      }
#pragma unroll
    for (int r = 0; r < S; ++r)
#pragma unroll
      for (int s = 0; s < S; ++s) {
        const bool there = base < total && within(tile, r, s);
        copy(to + (OVER + r * S + s) * THREADS, x + (there ? place(tile, r, s) * V : 0), there);
      }
    close_group();
  };

  float sum[V] = {};
  load(blockIdx.x * unsigned(chunk), 0);
  int stage = 0;
  for (unsigned base = blockIdx.x * unsigned(chunk); base < total; base += gridDim.x * unsigned(chunk), stage ^= 1) {
    load(base + gridDim.x * unsigned(chunk), stage ^ 1);
    wait_for_groups<1>();
    if (lends) __syncthreads();  // what another warp lends is there before it is overwritten
    const Tile tile = tile_at(base);
    const Eight* gradient = rows_ahead + stage * (OVER + PIXELS) * THREADS + threadIdx.x;
    const Names* named = names_ahead + stage * OVER * THREADS + threadIdx.x;
    const Eight* given = gradient + OVER * THREADS;
#pragma unroll
    for (int r = 0; r < S; ++r)
#pragma unroll
      for (int s = 0; s < S; ++s) {
        float u[V + 2 * HALF], squares[V + 2 * HALF], terms[V + 2 * HALF], du[V] = {}, result[V];
        bool none = true;
#pragma unroll
        for (int m = SIDE - 1; m >= 0; --m)
#pragma unroll
          for (int n = SIDE - 1; n >= 0; --n) {
            if (r + m * S >= K || s + n * S >= K) continue;
            float of_window[V];
            Row<T>::widen(of_window, gradient[(m * SIDE + n) * THREADS]);
            const Names names = named[(m * SIDE + n) * THREADS];
#pragma unroll
            for (int v = 0; v < V; ++v)
              if (names.v[v] == (r + m * S) * K + s + n * S) du[v] = none ? of_window[v] : du[v] + of_window[v];
            none = false;
          }
        Row<T>::widen(u + HALF, given[(r * S + s) * THREADS]);
        surround<HALF>(u, first, last);
#pragma unroll
        for (int i = 0; i < V + 2 * HALF; ++i) squares[i] = u[i] * u[i];
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const Roots roots(start + a * window<HALF>(squares, HALF + v));
          du[v] *= roots.of;
          terms[HALF + v] = du[v] * u[HALF + v] * roots.inverse;
        }
        surround<HALF>(terms, first, last);
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float d = du[v] - by * u[HALF + v] * window<HALF>(terms, HALF + v);
          result[v] = u[HALF + v] <= 0 ? 0.f : d;  // what lies outside is 0
          sum[v] += result[v];
        }
        if (mine && within(tile, r, s)) reinterpret_cast<Eight*>(dx)[place(tile, r, s)] = Row<T>::narrow(result);
      }
  }
  if (!part) return;
  __shared__ float sums[THREADS * V];
  if (mine)
    for (int v = 0; v < V; ++v) sums[own * V + v] = sum[v];  // lines of channels one after the other
  __syncthreads();
  for (unsigned c = threadIdx.x; c < unsigned(channels); c += THREADS) {
    float all = 0;
    for (unsigned i = c; i < unsigned(chunk * V); i += unsigned(channels)) all += sums[i];
    part[c * gridDim.x + blockIdx.x] = all;
  }
}
