// Products of pixels and weights, which are convolutions with a kernel of 1 and the channels last, in numbers of 16 bits;
// with what is needed of the results by a normalization, while they are at hand: the sums of each channel. Forward may
// have a larger kernel: a line of its taps lies side by side in the image, too.
//
//   product (rows, outputs) = a (rows, depth) * b (depth, outputs)
//
// A block of 256 threads has 128 * E / 8 sums of E = 32, 64 or 128 outputs; it goes through tiles of 128 rows, `streams` of
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
#include "pointwise.cuh"

constexpr int ROWS = 128, DEEP = 32, STAGES = 4, THREADS = 256, WARPS = THREADS / 32;

// Blocks of tiles of E outputs that a multiprocessor holds at a time.
template <int E> constexpr int HELD = E == 32 ? 4 : E == 64 ? 3 : 2;

// The depth of a row of a: the channels of so many lines of taps, each `run` numbers from its pixel on; `skip` are from the
// end of one to the next.
struct Taps {
  int channels, skip;
  Divisor by_run;
  __device__ int at(int k) const { return k + int(by_run.quotient(k)) * skip; }
};

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

template <typename T, int E, bool TURNED> struct Sums {
  float sum[E / 8][4] = {};
  __device__ void product(unsigned at_a, unsigned at_b) {
    at_a += threadIdx.x / 128 * (64 * DEEP * 2);
    before_products();
#pragma unroll
    for (int k = 0; k < DEEP / 16; ++k) {
      const unsigned long long b = TURNED ? matrix(at_b + k * 16 * 128, DEEP * 128, 8 * 128, 1)
                                          : matrix(at_b + k * 32, 16, 8 * DEEP * 2, 2);
      multiply_16<T, false, TURNED>(sum, matrix(at_a + k * 32, 16, 8 * DEEP * 2, 2), b);
    }
    begin_products();
    end_products(sum);
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

// What a row of a goes on with where JOINED, so many numbers at the pixel of the row; b has rows for them, too. The base
// is added to every row of the product. The depth before it is a multiple of 8.
template <typename T> struct Behind {
  const T* a;
  int depth;
  const float* base;
  Pixels pixels;
};

// TURNED: b lies as (depth, outputs), else as (outputs, depth).
template <typename T, int E, bool TURNED, bool JOINED, typename Op>
__device__ void product(const T* a, const T* b, const Sizes s, const Pixels pixels, const Taps taps,
                        const Behind<T> behind, const Op op, double* partial) {
  using At = Tile<T, E>;
  constexpr int OF_B = E * DEEP / 8, CHUNKS = (OF_B + THREADS - 1) / THREADS;  // chunks of b, and for each thread
  constexpr int PACKS = E / 8, STEP = THREADS / PACKS, EACH = ROWS / STEP;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned base = shared_address(memory);
  const int t = threadIdx.x;
  const int across = (s.outputs + E - 1) / E, first = int(blockIdx.x) % across * E, stream = int(blockIdx.x) / across;
  const int tiles = (s.rows + ROWS - 1) / ROWS, depth = s.depth + (JOINED ? behind.depth : 0);
  const int steps = (depth + DEEP - 1) / DEEP;
  const int total = stream < tiles ? ((tiles - 1 - stream) / s.streams + 1) * steps : 0;

  // What this thread fetches: a chunk of rows t / 4 and t / 4 + 64 of a, CHUNKS chunks of b.
  int fetched = 0, fetch_step = 0, fetch_tile = tiles - 1 - stream;
  const T* rows_of_a[2];
  int pixels_behind[2];
  bool there[2];
  auto begin_tile = [&]() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = fetch_tile * ROWS + t / 4 + 64 * i;
      there[i] = row < s.rows;
      rows_of_a[i] = a + (there[i] ? pixels.at(row) : 0) * taps.channels;
      if (JOINED) pixels_behind[i] = there[i] ? int(behind.pixels.at(row)) : 0;
    }
  };
  auto fetch_next = [&]() {
    if (fetched < total) {
      const unsigned stage = base + fetched % STAGES * At::STAGE;
      const int k = fetch_step * DEEP, from = k + t % 4 * 8;
      if (fetch_step == 0) begin_tile();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool in = there[i] && from < depth;
        const T* of_a = JOINED && from >= s.depth ? behind.a + i64(pixels_behind[i]) * behind.depth + (from - s.depth)
                                               : rows_of_a[i] + taps.at(from);
        fetch(stage + in_rows(t / 4 + 64 * i, t % 4), in ? of_a : a, in);
      }
#pragma unroll
      for (int i = 0; i < CHUNKS; ++i) {
        const int chunk = t + i * THREADS;
        if (OF_B % THREADS && chunk >= OF_B) break;
        if (TURNED) {
          const int row = chunk / PACKS, column = chunk % PACKS;
          const bool in = k + row < depth && first + column * 8 < s.outputs;
          const T* from = b + i64(k + row) * s.outputs + first + column * 8;
          fetch(stage + At::A + in_columns(row, column), in ? from : b, in);
        } else {
          const int row = chunk / 4, column = chunk % 4;
          const bool in = k + column * 8 < depth && first + row < s.outputs;
          const T* from = b + i64(first + row) * depth + k + column * 8;
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
      if (JOINED && first + column < s.outputs) {
        const float2 base = *reinterpret_cast<const float2*>(behind.base + first + column);
        one += base.x;
        two += base.y;
      }
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
template <typename T, int E, bool JOINED, typename Op>
__device__ void product_of_rows(const T* a, const T* b, const Sizes s, const Behind<T> behind, const Op op,
                                double* partial) {
  const Pixels side_by_side{0, 0, 0, 0, 0, Divisor(0), Divisor(0)};
  product<T, E, true, JOINED>(a, b, s, side_by_side, Taps{s.depth, 0, Divisor(0)}, behind, op, partial);
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

template <typename T, int E> __global__ void __launch_bounds__(THREADS, HELD<E>)
pointwise_moments(const T* x, const T* w, T* y, double* partial, int rows, int outputs, int depth, int streams,
                  PIXELS, int channels, int skip, i64 by_run) {
  const Taps taps{channels, skip, Divisor(by_run)};
  const Pixels pixels = OF_PIXELS;
  const Behind<T> nothing{nullptr, 0, nullptr, pixels};
  product<T, E, false, false>(x, w, Sizes{rows, outputs, depth, streams}, pixels, taps, nothing, Moments<T>{y}, partial);
}

// y = product * factor + shift [+ other], with a ReLU, whose bits may be kept, as in normalization.cu.
template <typename T, int OTHER, int AFTER, int KEEPS> struct Normalized {
  static constexpr bool SUMS = false;
  const float *factor, *shift;
  float ceiling;
  const T* other;
  T* y;
  unsigned char* bits;

  template <int EACH, int STEP, int PITCH>
  __device__ void tile(const T* results, int line, int row, int rows, int outputs, int channel, float (&)[8],
                       float (&)[8]) const {
    float f[8], s[8];
#pragma unroll
    for (int v = 0; v < 8; v += 4) {
      *reinterpret_cast<float4*>(f + v) = *reinterpret_cast<const float4*>(factor + channel + v);
      *reinterpret_cast<float4*>(s + v) = *reinterpret_cast<const float4*>(shift + channel + v);
    }
    constexpr int U = PITCH < 128 ? 2 : 4;  // rows at a time, all of which are loaded before any is used
#pragma unroll 1
    for (int i = 0; i < EACH; i += U) {
      uint4 of_other[U];
#pragma unroll
      for (int u = 0; u < U; ++u)
        if (OTHER)
          of_other[u] =
              *reinterpret_cast<const uint4*>(other + i64(min(row + (i + u) * STEP, rows - 1)) * outputs + channel);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (row + (i + u) * STEP >= rows) break;
        const i64 at = i64(row + (i + u) * STEP) * outputs + channel;
        Pack<T, 8> pack = *reinterpret_cast<const Pack<T, 8>*>(results + (line + (i + u) * STEP) * PITCH);
        const Pack<T, 8>& others = reinterpret_cast<const Pack<T, 8>&>(of_other[u]);
        unsigned passes = 0;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          float z = fmaf(float(pack.v[v]), f[v], s[v]);
          if (OTHER) z += float(others.v[v]);
          if (AFTER && z <= 0) z = 0;
          if (AFTER == CLIPPED && z > ceiling) z = ceiling;
          pack.v[v] = T(z);
          passes |= unsigned(!passes_nothing<AFTER>(float(pack.v[v]), ceiling)) << v;
        }
        *reinterpret_cast<Pack<T, 8>*>(y + at) = pack;
        if (KEEPS) bits[at / 8] = passes;
      }
    }
  }
  __device__ void add(double, double, int, float, double&, double&) const {}
};

template <typename T, int E, int OTHER, int AFTER, int KEEPS> __global__ void __launch_bounds__(THREADS, HELD<E>)
pointwise_normalized(const T* x, const T* w, const float* factor, const float* shift, double ceiling, const T* other, T* y,
                     unsigned char* bits, double*, int rows, int outputs, int depth, int streams, PIXELS) {
  const Pixels pixels = OF_PIXELS;
  const Behind<T> nothing{nullptr, 0, nullptr, pixels};
  const Normalized<T, OTHER, AFTER, KEEPS> op{factor, shift, float(ceiling), other, y, bits};
  product<T, E, false, false>(x, w, Sizes{rows, outputs, depth, streams}, pixels, Taps{depth, 0, Divisor(0)}, nothing, op,
                              nullptr);
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

#define BEHIND const T *behind, int behind_depth, const float* base
#define WHAT_IS_BEHIND \
  Behind<T> { behind, behind_depth, base, OF_PIXELS }

template <typename T, int E, int JOINED> __global__ void __launch_bounds__(THREADS, HELD<E>)
pointwise_spread(const T* dy, const T* w, T* dx, double*, int rows, int outputs, int depth, int streams, PIXELS, BEHIND) {
  const Spread<T> op{dx, OF_PIXELS};
  product_of_rows<T, E, JOINED>(dy, w, Sizes{rows, outputs, depth, streams}, WHAT_IS_BEHIND, op, nullptr);
}

// g = (product [+ more]) * mask in the pixels whose rows they are, and if SUMMED the sums of g and of g * (x - mean); x as
// the normalization got it. The other pixels are not written. Numbers of channels repeat after `period` if FOLDED.
template <typename T, int MASK, int AFTER, int MORE, int SUMMED, int FOLDED> struct Gradient {
  static constexpr bool SUMS = SUMMED, READS = SUMMED || MASK == BY_X;
  const T* x;
  const float *mean, *factor, *shift;
  float ceiling;
  const T* more;
  const unsigned char* bits;
  T* g;
  Pixels pixels;
  int period;

  // Numbers of 8 channels from one on.
  __device__ void take(float (&to)[8], const float* from, int channel) const {
    if constexpr (FOLDED) {
      int c = channel % period;
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        to[v] = from[c];
        if (++c == period) c = 0;
      }
    } else {
#pragma unroll
      for (int v = 0; v < 8; v += 4)
        *reinterpret_cast<float4*>(to + v) = *reinterpret_cast<const float4*>(from + channel + v);
    }
  }

  template <int EACH, int STEP, int PITCH>
  __device__ void tile(const T* results, int line, int row, int rows, int outputs, int channel, float (&first)[8],
                       float (&second)[8]) const {
    float mu[8], f[8], s[8];
    if (SUMMED) take(mu, mean, channel);
    if (MASK == BY_X) {
      take(f, factor, channel);
      take(s, shift, channel);
    }
    constexpr int U = PITCH < 128 ? 2 : 4;  // rows at a time, all of which are loaded before any is used
#pragma unroll 1
    for (int i = 0; i < EACH; i += U) {
      uint4 of_x[U], of_more[U];
      unsigned masks[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const i64 from = pixels.at(min(row + (i + u) * STEP, rows - 1)) * outputs + channel;
        if (READS) of_x[u] = *reinterpret_cast<const uint4*>(x + from);
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
          if (SUMMED) first[v] += d;
          if (SUMMED) second[v] += d * (float(xs.v[v]) - mu[v]);
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

template <typename T, int E, int MASK, int AFTER, int MORE, int SUMMED, int JOINED, int FOLDED>
__global__ void __launch_bounds__(THREADS, HELD<E>)
pointwise_gradient(const T* dy, const T* w, const T* x, const float* mean, const float* factor, const float* shift,
                   double ceiling, const T* more, const unsigned char* bits, T* g, double* partial, int rows,
                   int outputs, int depth, int streams, PIXELS, BEHIND, int period) {
  const Gradient<T, MASK, AFTER, MORE, SUMMED, FOLDED> op{x,    mean, factor, shift,     float(ceiling),
                                                          more, bits, g,      OF_PIXELS, period};
  product_of_rows<T, E, JOINED>(dy, w, Sizes{rows, outputs, depth, streams}, WHAT_IS_BEHIND, op, partial);
}
