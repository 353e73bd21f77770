// Products of pixels and weights, which are convolutions with a kernel of 1 and the channels last, in numbers of 16 bits;
// with what is needed of the results by a normalization, while they are at hand: the sums of each channel. Forward may
// have a larger kernel: a line of its taps lies side by side in the image, too.
//
//   product (rows, outputs) = a (rows, depth) * b (depth, outputs)
//
// A block of 256 threads has 128 * E / 8 sums of E = 64 or 128 outputs; it goes through tiles of 128 rows, `streams` of
// them apart, from the last to the first: the pass before wrote the last rows last, and the pass after begins with the
// first, so both find them in the cache. Pieces of DEEP channels of a and b come by cp.async into a ring of STAGES, also
// those of the next tile while one is finished. A warp makes 32 x E/2 sums by mma, or four warps 64 x E by wgmma, where
// the code is compiled for it (compute capability 9.0a).
//
// A finished tile goes through shared memory, so that a thread gets packs of 8 outputs of a row, and the sums of a
// channel over the tile are added up in a fixed order: packs of a thread, threads of a warp, warps, tiles; in the end
// partial (2, streams, outputs), as finish_channels wants it.

#include "pack.cuh"
#include "mma.cuh"
#include "rectify.cuh"

constexpr int ROWS = 128, DEEP = 32, STAGES = 4, THREADS = 256, WARPS = THREADS / 32;

// Where the rows of an array are: side by side, or, if stride is not 0, every stride-th pixel of each stride-th line of
// images.
struct Pixels {
  int stride, width, line, image, plane;  // rows of a line, pixels of a line and of an image, rows of an image
  Divisor by_plane, by_width;
  __device__ i64 at(int row) const {
    if (stride == 0) return row;
    const unsigned n = by_plane.quotient(row), rest = row - n * plane, h = by_width.quotient(rest);
    return i64(n) * image + (h * line + (rest - h * width)) * stride;
  }
};

#define PIXELS int stride, int width, int line, int image, int plane, i64 by_plane, i64 by_width
#define OF_PIXELS \
  Pixels { stride, width, line, image, plane, Divisor(by_plane), Divisor(by_width) }

// The depth of a row of a: the channels of so many lines of taps, each `run` numbers from its pixel on; `skip` are from the
// end of one to the next.
struct Taps {
  int channels, skip;
  Divisor by_run;
  __device__ int at(int k) const { return k + int(by_run.quotient(k)) * skip; }
};

// 16 bytes to shared memory; zeros unless they are there. Those beside them are soon wanted from the cache.
__device__ inline void fetch(unsigned to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Byte of a chunk of 8 numbers in a piece whose rows have DEEP numbers (a, and b as (outputs, depth)), and in one of b as
// (depth, outputs), which lies in blocks of 64 outputs: chunks change places so that eight of a column lie in different
// banks, as in the swizzles of 64 and of 128 bytes.
__device__ inline int in_rows(int row, int chunk) { return row * (DEEP * 2) + ((chunk ^ (row / 2 % 4)) * 16); }
__device__ inline int in_columns(int row, int chunk) {
  return chunk / 8 * (DEEP * 128) + row * 128 + ((chunk ^ row) % 8 * 16);
}

template <typename T, int E> struct Tile {
  static constexpr int PITCH = E + 8;
  static constexpr int A = ROWS * DEEP * 2, B = E * DEEP * 2, STAGE = A + B;
  static constexpr int RESULT = STAGES * STAGE, SUMS = RESULT + ROWS * PITCH * 2;
  static constexpr int BYTES = SUMS + WARPS * 2 * E * 4;
};

// The same number, of which the compiler does not know that: what is computed with it for the end of a tile is not kept
// in registers meanwhile.
__device__ inline int anew(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// The sums of a warp, in tiles of 8 columns: product() adds those of a piece, each(f) calls f(row, column, two sums
// side by side).
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// How wgmma finds a matrix: its first byte, bytes from one block of 64 columns to the next (where rows are depth) and
// from one group of 8 rows to the next, and the swizzle: 1 of 128 bytes, 2 of 64.
__device__ inline unsigned long long matrix(unsigned at, int blocks, int rows, int swizzle) {
  return (unsigned long long)(at >> 4) | (unsigned long long)(blocks >> 4) << 16 |
         (unsigned long long)(rows >> 4) << 32 | (unsigned long long)(swizzle) << 62;
}

#define SUMS_8(s, n)                                                                                              \
  "+f"(s[n][0]), "+f"(s[n][1]), "+f"(s[n][2]), "+f"(s[n][3]), "+f"(s[n + 1][0]), "+f"(s[n + 1][1]), \
      "+f"(s[n + 1][2]), "+f"(s[n + 1][3])
#define SUMS_32(s, n) SUMS_8(s, n), SUMS_8(s, n + 2), SUMS_8(s, n + 4), SUMS_8(s, n + 6)
#define WGMMA_64(kind, turned)                                                                                     \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind  \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, " turned "; }"       \
               : SUMS_32(sum, 0)                                                                                   \
               : "l"(a), "l"(b))
#define WGMMA_128(kind, turned)                                                                                      \
  asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind   \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "   \
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "     \
               "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "     \
               "%59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, " turned "; }"                                       \
               : SUMS_32(sum, 0), SUMS_32(sum, 8)                                                                    \
               : "l"(a), "l"(b))

template <typename T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16_t> = true;

template <typename T, int E, bool TURNED> struct Sums {
  float sum[E / 8][4] = {};
  __device__ void multiply_16(unsigned long long a, unsigned long long b) {
    if constexpr (E == 64 && TURNED && IS_BF16<T>) WGMMA_64("bf16", "1");
    if constexpr (E == 64 && TURNED && !IS_BF16<T>) WGMMA_64("f16", "1");
    if constexpr (E == 64 && !TURNED && IS_BF16<T>) WGMMA_64("bf16", "0");
    if constexpr (E == 64 && !TURNED && !IS_BF16<T>) WGMMA_64("f16", "0");
    if constexpr (E == 128 && TURNED && IS_BF16<T>) WGMMA_128("bf16", "1");
    if constexpr (E == 128 && TURNED && !IS_BF16<T>) WGMMA_128("f16", "1");
    if constexpr (E == 128 && !TURNED && IS_BF16<T>) WGMMA_128("bf16", "0");
    if constexpr (E == 128 && !TURNED && !IS_BF16<T>) WGMMA_128("f16", "0");
  }
  __device__ void product(unsigned at_a, unsigned at_b) {
    at_a += threadIdx.x / 128 * (64 * DEEP * 2);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < DEEP / 16; ++k) {
      const unsigned long long b = TURNED ? matrix(at_b + k * 16 * 128, DEEP * 128, 8 * 128, 1)
                                          : matrix(at_b + k * 32, 16, 8 * DEEP * 2, 2);
      multiply_16(matrix(at_a + k * 32, 16, 8 * DEEP * 2, 2), b);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < E / 8; n += 2) asm volatile("" : SUMS_8(sum, n)::"memory");
  }
  template <typename F> __device__ void each(const F& f) const {
    const int t = anew(threadIdx.x), row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
#pragma unroll
    for (int n = 0; n < E / 8; ++n) {
      f(row, n * 8 + column, sum[n][0], sum[n][1]);
      f(row + 8, n * 8 + column, sum[n][2], sum[n][3]);
    }
  }
};

#else

template <typename T, int E, bool TURNED> struct Sums {
  static constexpr int N = E / 16;
  float sum[2][N][4] = {};
  __device__ void product(unsigned at_a, unsigned at_b) {
    const int lane_id = threadIdx.x % 32, down = threadIdx.x / 32 % 4 * 32, right = threadIdx.x / 128 * (E / 2);
#pragma unroll
    for (int k = 0; k < DEEP / 16; ++k) {
      unsigned x[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        matrices<false>(x[m], at_a + in_rows(down + m * 16 + lane_id % 16, k * 2 + lane_id / 16));
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        unsigned w[4];
        if (TURNED)
          matrices<true>(w, at_b + in_columns(k * 16 + lane_id % 16, right / 8 + n + lane_id / 16));
        else
          matrices<false>(w, at_b + in_rows(right + n * 8 + lane_id % 8 + lane_id / 16 * 8, k * 2 + lane_id / 8 % 2));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned of[2] = {w[2 * j], w[2 * j + 1]};
#pragma unroll
          for (int m = 0; m < 2; ++m) multiply<T>(sum[m][n + j], x[m], of);
        }
      }
    }
  }
  template <typename F> __device__ void each(const F& f) const {
    const int t = anew(threadIdx.x), row = t / 32 % 4 * 32 + t % 32 / 4, column = t / 128 * (E / 2) + t % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        f(row + m * 16, column + n * 8, sum[m][n][0], sum[m][n][1]);
        f(row + m * 16 + 8, column + n * 8, sum[m][n][2], sum[m][n][3]);
      }
  }
};

#endif

struct Sizes {
  int rows, outputs, depth, streams;
};

// TURNED: b lies as (depth, outputs), else as (outputs, depth).
template <typename T, int E, bool TURNED, typename Op>
__device__ void product(const T* a, const T* b, const Sizes s, const Pixels pixels, const Taps taps, const Op op,
                        double* partial) {
  using At = Tile<T, E>;
  constexpr int CHUNKS = E * DEEP / 8 / THREADS;   // of b for each thread
  constexpr int PACKS = E / 8, STEP = THREADS / PACKS, EACH = ROWS / STEP;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned base = shared_address(memory);
  const int t = threadIdx.x;
  const int across = (s.outputs + E - 1) / E, first = int(blockIdx.x) % across * E, stream = int(blockIdx.x) / across;
  const int tiles = (s.rows + ROWS - 1) / ROWS, steps = (s.depth + DEEP - 1) / DEEP;
  const int total = stream < tiles ? ((tiles - 1 - stream) / s.streams + 1) * steps : 0;

  // What this thread fetches: a chunk of rows t / 4 and t / 4 + 64 of a, CHUNKS chunks of b.
  int fetched = 0, fetch_step = 0, fetch_tile = tiles - 1 - stream;
  const T* rows_of_a[2];
  bool there[2];
  auto begin_tile = [&]() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = fetch_tile * ROWS + t / 4 + 64 * i;
      there[i] = row < s.rows;
      rows_of_a[i] = a + (there[i] ? pixels.at(row) : 0) * taps.channels;
    }
  };
  auto fetch_next = [&]() {
    if (fetched < total) {
      const unsigned stage = base + fetched % STAGES * At::STAGE;
      const int k = fetch_step * DEEP, from = k + t % 4 * 8;
      if (fetch_step == 0) begin_tile();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool in = there[i] && from < s.depth;
        fetch(stage + in_rows(t / 4 + 64 * i, t % 4), in ? rows_of_a[i] + taps.at(from) : a, in);
      }
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        const int chunk = t + i * THREADS;
        if (TURNED) {
          const int row = chunk / PACKS, column = chunk % PACKS;
          const bool in = k + row < s.depth && first + column * 8 < s.outputs;
          const T* from = b + i64(k + row) * s.outputs + first + column * 8;
          fetch(stage + At::A + in_columns(row, column), in ? from : b, in);
        } else {
          const int row = chunk / 4, column = chunk % 4;
          const bool in = k + column * 8 < s.depth && first + row < s.outputs;
          const T* from = b + i64(first + row) * s.depth + k + column * 8;
          fetch(stage + At::A + in_rows(row, column), in ? from : b, in);
        }
      }
      ++fetched;
      if (++fetch_step == steps) {
        fetch_step = 0;
        fetch_tile -= s.streams;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };

  double result = 0, other = 0;  // of channel t % E: its first sum if t < E, else the second
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_next();
  for (int tile = tiles - 1 - stream, i = 0; tile >= 0; tile -= s.streams) {
    Sums<T, E, TURNED> of_tile;
    for (int step = 0; step < steps; ++step, ++i) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
      __syncthreads();
      fetch_next();
      const unsigned stage = base + i % STAGES * At::STAGE;
      of_tile.product(stage, stage + At::A);
    }

    // The tile is finished: to shared memory, then in packs to where they belong, with their sums.
    T* results = reinterpret_cast<T*>(memory + At::RESULT);
    of_tile.each([=](int row, int column, float one, float two) {
      Pack<T, 2> pair;
      pair.v[0] = T(one);
      pair.v[1] = T(two);
      *reinterpret_cast<Pack<T, 2>*>(results + row * At::PITCH + column) = pair;
    });
    __syncthreads();
    const int t = anew(threadIdx.x), lane_id = t % 32, warp = t / 32;
    const int column = t % PACKS * 8, channel = anew(first) + column, row = tile * ROWS + t / PACKS;
    float a_sum[8] = {}, b_sum[8] = {};
    if (channel < s.outputs)
      op.template tile<EACH, STEP, At::PITCH>(results + column, t / PACKS, row, s.rows, s.outputs, channel, a_sum, b_sum);
    if constexpr (!Op::SUMS) continue;
#pragma unroll
    for (int between = PACKS; between < 32; between *= 2)
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        a_sum[v] += __shfl_xor_sync(0xffffffffu, a_sum[v], between);
        b_sum[v] += __shfl_xor_sync(0xffffffffu, b_sum[v], between);
      }
    float* sums = reinterpret_cast<float*>(memory + At::SUMS);
    if (lane_id < PACKS)
#pragma unroll
      for (int v = 0; v < 8; v += 4) {
        *reinterpret_cast<float4*>(sums + warp * 2 * E + column + v) =
            make_float4(a_sum[v], a_sum[v + 1], a_sum[v + 2], a_sum[v + 3]);
        *reinterpret_cast<float4*>(sums + warp * 2 * E + E + column + v) =
            make_float4(b_sum[v], b_sum[v + 1], b_sum[v + 2], b_sum[v + 3]);
      }
    __syncthreads();
    if (t < E) {
      float first_sum = 0, second_sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        first_sum += sums[w * 2 * E + t];
        second_sum += sums[w * 2 * E + E + t];
      }
      const int count = min(ROWS, s.rows - tile * ROWS);
      op.add(double(first_sum), double(second_sum), count, float(results[t]), result, other);
    }
  }
  if (Op::SUMS && t < E && first + t < s.outputs) {
    partial[i64(stream) * s.outputs + first + t] = result;
    partial[i64(s.streams + stream) * s.outputs + first + t] = other;
  }
}

// The product of rows that lie side by side, and the weights turned.
template <typename T, int E, typename Op>
__device__ void product_of_rows(const T* a, const T* b, const Sizes s, const Op op, double* partial) {
  const Pixels side_by_side{0, 0, 0, 0, 0, Divisor(0), Divisor(0)};
  product<T, E, true>(a, b, s, side_by_side, Taps{s.depth, 0, Divisor(0)}, op, partial);
}

// y = product; sums of y and y^2, from those of y - k and (y - k)^2 with k the first y of the tile: no cancellation
template <typename T> struct Moments {
  static constexpr bool SUMS = true;
  T* y;
  template <int EACH, int STEP, int PITCH>
  __device__ void tile(const T* results, int line, int row, int rows, int outputs, int channel, float (&first)[8],
                       float (&second)[8]) const {
    float k[8];
    const Pack<T, 8> of_first = *reinterpret_cast<const Pack<T, 8>*>(results);
#pragma unroll
    for (int v = 0; v < 8; ++v) k[v] = float(of_first.v[v]);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (row + i * STEP >= rows) break;
      const Pack<T, 8> pack = *reinterpret_cast<const Pack<T, 8>*>(results + (line + i * STEP) * PITCH);
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const float d = float(pack.v[v]) - k[v];
        first[v] += d;
        second[v] += d * d;
      }
      *reinterpret_cast<Pack<T, 8>*>(y + i64(row + i * STEP) * outputs + channel) = pack;
    }
  }
  __device__ void add(double d, double squares, int count, float first, double& sum, double& sum_of_squares) const {
    const double k = double(first);
    sum += d + count * k;
    sum_of_squares += squares + (2 * d + count * k) * k;
  }
};

template <typename T, int E> __global__ void __launch_bounds__(THREADS, 2)
pointwise_moments(const T* x, const T* w, T* y, double* partial, int rows, int outputs, int depth, int streams,
                  PIXELS, int channels, int skip, i64 by_run) {
  const Taps taps{channels, skip, Divisor(by_run)};
  product<T, E, false>(x, w, Sizes{rows, outputs, depth, streams}, OF_PIXELS, taps, Moments<T>{y}, partial);
}

// dx = product, in the pixels whose rows they are; the others are not written
template <typename T> struct Spread {
  static constexpr bool SUMS = false;
  T* dx;
  Pixels pixels;
  template <int EACH, int STEP, int PITCH>
  __device__ void tile(const T* results, int line, int row, int rows, int outputs, int channel, float (&)[8],
                       float (&)[8]) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (row + i * STEP >= rows) break;
      *reinterpret_cast<Pack<T, 8>*>(dx + pixels.at(row + i * STEP) * outputs + channel) =
          *reinterpret_cast<const Pack<T, 8>*>(results + (line + i * STEP) * PITCH);
    }
  }
  __device__ void add(double, double, int, float, double&, double&) const {}
};

template <typename T, int E> __global__ void __launch_bounds__(THREADS, 2)
pointwise_spread(const T* dy, const T* w, T* dx, double*, int rows, int outputs, int depth, int streams, PIXELS) {
  product_of_rows<T, E>(dy, w, Sizes{rows, outputs, depth, streams}, Spread<T>{dx, OF_PIXELS}, nullptr);
}

// g = (product [+ more]) * mask in the pixels whose rows they are, and the sums of g and of g * (x - mean); x as the
// normalization got it. The other pixels are not written.
template <typename T, int MASK, int AFTER, int MORE> struct Gradient {
  static constexpr bool SUMS = true;
  const T* x;
  const float *mean, *factor, *shift;
  float ceiling;
  const T* more;
  const unsigned char* bits;
  T* g;
  Pixels pixels;

  template <int EACH, int STEP, int PITCH>
  __device__ void tile(const T* results, int line, int row, int rows, int outputs, int channel, float (&first)[8],
                       float (&second)[8]) const {
    float mu[8], f[8], s[8];
#pragma unroll
    for (int v = 0; v < 8; v += 4) {
      *reinterpret_cast<float4*>(mu + v) = *reinterpret_cast<const float4*>(mean + channel + v);
      if (MASK == BY_X) {
        *reinterpret_cast<float4*>(f + v) = *reinterpret_cast<const float4*>(factor + channel + v);
        *reinterpret_cast<float4*>(s + v) = *reinterpret_cast<const float4*>(shift + channel + v);
      }
    }
    constexpr int U = 4;  // rows at a time, all of which are loaded before any is used
#pragma unroll 1
    for (int i = 0; i < EACH; i += U) {
      uint4 of_x[U], of_more[U];
      unsigned masks[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const i64 from = pixels.at(min(row + (i + u) * STEP, rows - 1)) * outputs + channel;
        of_x[u] = *reinterpret_cast<const uint4*>(x + from);
        if (MORE) of_more[u] = *reinterpret_cast<const uint4*>(more + from);
        if (MASK == BY_BITS) masks[u] = bits[from / 8];
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int at = row + (i + u) * STEP;
        if (at >= rows) break;
        Pack<T, 8> pack = *reinterpret_cast<const Pack<T, 8>*>(results + (line + (i + u) * STEP) * PITCH);
        const Pack<T, 8>&xs = reinterpret_cast<const Pack<T, 8>&>(of_x[u]),
                        &mores = reinterpret_cast<const Pack<T, 8>&>(of_more[u]);
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          float d = float(pack.v[v]);
          if (MORE) d += float(mores.v[v]);
          if (MASK == BY_X && passes_nothing<AFTER>(fmaf(float(xs.v[v]), f[v], s[v]), ceiling)) d = 0;
          if (MASK == BY_BITS && !(masks[u] >> v & 1)) d = 0;
          first[v] += d;
          second[v] += d * (float(xs.v[v]) - mu[v]);
          pack.v[v] = T(d);
        }
        *reinterpret_cast<Pack<T, 8>*>(g + pixels.at(at) * outputs + channel) = pack;
      }
    }
  }
  __device__ void add(double first, double second, int, float, double& sum, double& other) const {
    sum += first;
    other += second;
  }
};

template <typename T, int E, int MASK, int AFTER, int MORE> __global__ void __launch_bounds__(THREADS, 2)
pointwise_gradient(const T* dy, const T* w, const T* x, const float* mean, const float* factor, const float* shift,
                   double ceiling, const T* more, const unsigned char* bits, T* g, double* partial, int rows,
                   int outputs, int depth, int streams, PIXELS) {
  const Gradient<T, MASK, AFTER, MORE> op{x, mean, factor, shift, float(ceiling), more, bits, g, OF_PIXELS};
  product_of_rows<T, E>(dy, w, Sizes{rows, outputs, depth, streams}, op, partial);
}
