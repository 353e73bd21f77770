// Products of pixels and weights of up to N channels on either side, in numbers of 16 bits, between normalizations:
//
//   y (rows, outputs) = a (rows, inputs) * w (outputs, inputs)^T, with the sums of its channels
//   dx (rows, inputs) = dy (rows, outputs) * w (outputs, inputs), 0 where a ReLU after x * factor + shift passes nothing
//   part (blocks, outputs, inputs) = sums of dy^T * a over the rows of a block
//
// a is what a normalization makes of x, relu(x * factor + shift), if NORMALIZED, else x. dy = factors * g + slope * z + rest is
// what a normalization of z would write; neither is in memory. If NORMALIZED there are the sums of dx and of dx * (x - mean).
//
// A block of 512 threads goes through tiles of rows, which come as they lie in memory, by cp.async, into a ring of STAGES.
// From there dy and a go to rows of N + 8 channels, zeros behind the last one, as ldmatrix wants them; what is made of a
// tile lies as in memory again before it goes there, 16 bytes at a time. Channels are even, and all rows together whole packs
// of 16 bytes.

#include "pack.cuh"
#include "mma.cuh"
#include "rectify.cuh"
#include "pointwise.cuh"
#include "shares.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32, STAGES = 3;

template <int N> constexpr int OF_TILE = 64 * 128 / N;  // rows

// A pair of numbers as a word, and back.
template <typename T> __device__ inline unsigned word_of(float one, float two) {
  Pack<T, 2> pair;
  pair.v[0] = T(one);
  pair.v[1] = T(two);
  return reinterpret_cast<const unsigned&>(pair);
}
template <typename T> __device__ inline float2 pair_of(unsigned word) {
  const Pack<T, 2>& pair = reinterpret_cast<const Pack<T, 2>&>(word);
  return make_float2(float(pair.v[0]), float(pair.v[1]));
}

// What a normalization makes of a pair, with what follows it.
template <typename T, int AFTER> __device__ inline unsigned normalized(unsigned pair, float2 by, float2 plus, float most) {
  const auto after = [&](float value) {
    if (AFTER && value <= 0) value = 0;
    return AFTER == CLIPPED && value > most ? most : value;
  };
  const float2 x = pair_of<T>(pair);
  return word_of<T>(after(fmaf(x.x, by.x, plus.x)), after(fmaf(x.y, by.y, plus.y)));
}

// f(i, element, there) for each i-th 8 numbers of a tile of an array (rows, channels), some of which are not there in the last
// tile.
template <int N, typename F> __device__ inline void each_chunk(int tile, int rows, int channels, const F& f) {
  constexpr int ROWS = OF_TILE<N>;
  const i64 from = i64(tile) * ROWS * channels;
  const int of_all = ROWS * channels / 8, limit = min(ROWS, rows - tile * ROWS) * channels / 8;
#pragma unroll
  for (int j = 0; j < ROWS * N / 8 / THREADS; ++j) {
    const int i = threadIdx.x + j * THREADS;
    if (i < of_all) f(i, from + i * 8, i < limit);
  }
}

// A tile from memory, zeros behind the last row, and to memory.
template <int N, typename T> __device__ inline void fetch_tile(unsigned to, const T* from, int tile, int rows, int channels) {
  each_chunk<N>(tile, rows, channels,
                [&](int i, i64 at, bool there) { fetch(to + i * 16, there ? from + at : from, there); });
}
template <int N, typename T>
__device__ inline void write_tile(T* to, const uint4* from, int tile, int rows, int channels) {
  each_chunk<N>(tile, rows, channels, [&](int i, i64 at, bool there) {
    if (there) *reinterpret_cast<uint4*>(to + at) = from[i];
  });
}

// Weights (outputs, inputs) as N rows of N + 8 numbers of 16 bits, zeros behind the last ones. They lie where two arrays of a
// tile will, until each warp has its own in registers.
template <typename T, int N>
__device__ inline void take_weights(unsigned* to, const float* w, int outputs, int inputs) {
  constexpr int PAIRS = N / 2, LINES = THREADS / PAIRS;
  const int pair = threadIdx.x % PAIRS, first = threadIdx.x / PAIRS;
  float2 of[N / LINES];
#pragma unroll
  for (int i = 0; i < N / LINES; ++i) {
    const int o = first + i * LINES;
    const bool there = o < outputs && 2 * pair < inputs;
    of[i] = there ? *reinterpret_cast<const float2*>(w + o * inputs + 2 * pair) : make_float2(0, 0);
  }
#pragma unroll
  for (int i = 0; i < N / LINES; ++i) to[(first + i * LINES) * (N / 2 + 4) + pair] = word_of<T>(of[i].x, of[i].y);
}

// y, and partial sums (2, blocks, outputs) of y and y^2, from those of y - k and (y - k)^2 with k the first y of the thread: no
// cancellation in float.
template <typename T, int N, int NORMALIZED, int AFTER> __global__ void __launch_bounds__(THREADS, 1)
few_moments(const T* x, const float* w, const float* factor, const float* shift, double ceiling, T* y, double* partial,
            i64 of_all, i64 across, i64 deep) {
  constexpr int ROWS = OF_TILE<N>, PITCH = N + 8, PAIRS = N / 2, LINES = THREADS / PAIRS;
  constexpr int BESIDE = N / 16, DEEP = N / 16;  // warps side by side, steps of 16 channels
  constexpr int STAGE = ROWS * N * 2, A = STAGES * STAGE, RESULTS = A + ROWS * PITCH * 2;
  extern __shared__ __align__(16) unsigned char memory[];
  const unsigned ring = shared_address(memory);
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, pair = t % PAIRS, mine = t / PAIRS;
  const int outputs = int(across), inputs = int(deep), rows = int(of_all), tiles = (rows + ROWS - 1) / ROWS;
  const float most = float(ceiling);

  int next = blockIdx.x, fetched = 0;
  const auto fetch_next = [&] {
    if (next < tiles) fetch_tile<N>(ring + fetched % STAGES * STAGE, x, next, rows, inputs);
    next += gridDim.x;
    ++fetched;
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_next();

  const bool in = 2 * pair < inputs;
  const float2 none = make_float2(0, 0);
  const float2 by = NORMALIZED && in ? *reinterpret_cast<const float2*>(factor + 2 * pair) : none;
  const float2 plus = NORMALIZED && in ? *reinterpret_cast<const float2*>(shift + 2 * pair) : none;
  // A warp has 32 rows by 16 outputs, and keeps the weights of these.
  const int down = warp / BESIDE * 32, right = warp % BESIDE * 16;
  take_weights<T, N>(reinterpret_cast<unsigned*>(memory + A), w, outputs, inputs);
  __syncthreads();
  unsigned of_w[DEEP][4];
#pragma unroll
  for (int k = 0; k < DEEP; ++k) {
    const int at = (right + lane / 16 * 8 + lane % 8) * PITCH + k * 16 + lane / 8 % 2 * 8;
    matrices<false>(of_w[k], ring + A + at * 2);
  }

  float of_first[2][2] = {}, first[2][2] = {}, second[2][2] = {};
  int seen = 0;
  for (int tile = blockIdx.x, i = 0; tile < tiles; tile += gridDim.x, ++i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    fetch_next();
    const unsigned* const of_x = reinterpret_cast<const unsigned*>(memory + i % STAGES * STAGE) + mine * (inputs / 2) + pair;
    unsigned* const a = reinterpret_cast<unsigned*>(memory + A) + mine * (PITCH / 2) + pair;
#pragma unroll
    for (int j = 0; j < ROWS / LINES; ++j) {
      unsigned word = of_x[j * LINES * (inputs / 2)];
      if (NORMALIZED) word = normalized<T, AFTER>(word, by, plus, most);
      a[j * LINES * (PITCH / 2)] = in ? word : 0;
    }
    __syncthreads();

    float sum[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < DEEP; ++k)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        unsigned of_a[4];
        matrices<false>(of_a, ring + A + ((down + m * 16 + lane % 16) * PITCH + k * 16 + lane / 16 * 8) * 2);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const unsigned b[2] = {of_w[k][2 * n], of_w[k][2 * n + 1]};
          multiply<T>(sum[m][n], of_a, b);
        }
      }
    unsigned* const results = reinterpret_cast<unsigned*>(memory + RESULTS);
    const int there = rows - tile * ROWS;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = down + m * 16 + half * 8 + lane / 4;
        if (row >= there) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int channel = right + n * 8 + lane % 4 * 2;
          const unsigned word = word_of<T>(sum[m][n][2 * half], sum[m][n][2 * half + 1]);
          const float2 two = pair_of<T>(word);
          const float of[2] = {two.x, two.y};
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            if (seen == 0) of_first[n][v] = of[v];
            const float d = of[v] - of_first[n][v];
            first[n][v] += d;
            second[n][v] += d * d;
          }
          if (channel < outputs) results[(row * outputs + channel) / 2] = word;
        }
        ++seen;
      }
    __syncthreads();
    write_tile<N>(y, reinterpret_cast<const uint4*>(memory + RESULTS), tile, rows, outputs);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();

  double* const sums = reinterpret_cast<double*>(memory);  // (WARPS / BESIDE, 2, N)
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const double k = double(of_first[n][v]), d = double(first[n][v]);
      double total = d + seen * k, squares = double(second[n][v]) + (2 * d + seen * k) * k;
#pragma unroll
      for (int between = 4; between < 32; between *= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, between);
        squares += __shfl_xor_sync(0xffffffffu, squares, between);
      }
      if (lane < 4) {
        double* const to = sums + warp / BESIDE * 2 * N + right + n * 8 + lane * 2 + v;
        to[0] = total;
        to[N] = squares;
      }
    }
  __syncthreads();
  if (t < 2 * N && t % N < outputs) {
    double all = 0;
#pragma unroll
    for (int k = 0; k < WARPS / BESIDE; ++k) all += sums[k * 2 * N + t];
    partial[(t / N * i64(gridDim.x) + blockIdx.x) * outputs + t % N] = all;
  }
}

// dx, its partial sums (2, blocks, inputs), and part.
template <typename T, int N, int NORMALIZED, int AFTER> __global__ void __launch_bounds__(THREADS, 1)
few_both(const T* g, const T* z, const float* factors, const float* line, const float* w, const T* x, const float* mean,
         const float* factor, const float* shift, double ceiling, T* dx, double* partial, float* part, i64 of_all,
         i64 across, i64 deep) {
  constexpr int ROWS = OF_TILE<N>, PITCH = N + 8, PAIRS = N / 2, LINES = THREADS / PAIRS;
  constexpr int ARRAY = ROWS * N * 2, STAGE = 3 * ARRAY;  // g, z and x
  constexpr int DY = STAGES * STAGE, Y = DY + ROWS * PITCH * 2, NUMBERS = Y + ROWS * PITCH * 2;
  constexpr int BESIDE = N / 16, DEEP = N / 16;                 // of dx: warps side by side, steps of 16 channels
  constexpr int GRID = N / 32, SPLITS = WARPS / (GRID * GRID);  // of part: warps side by side, and those that share rows out
  extern __shared__ __align__(16) unsigned char memory[];
  const unsigned ring = shared_address(memory);
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int inputs = int(across), outputs = int(deep), rows = int(of_all), tiles = (rows + ROWS - 1) / ROWS;
  const float most = float(ceiling);
  float* const numbers = reinterpret_cast<float*>(memory + NUMBERS);

  int next = blockIdx.x, fetched = 0;
  const auto fetch_next = [&] {
    if (next < tiles) {
      const unsigned stage = ring + fetched % STAGES * STAGE;
      fetch_tile<N>(stage, g, next, rows, outputs);
      fetch_tile<N>(stage + ARRAY, z, next, rows, outputs);
      fetch_tile<N>(stage + 2 * ARRAY, x, next, rows, inputs);
    }
    next += gridDim.x;
    ++fetched;
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) fetch_next();

  if (t < N) {
    const bool out = t < outputs, in = NORMALIZED && t < inputs;
    numbers[t] = out ? factors[t] : 0.0f;
    numbers[N + t] = out ? line[t] : 0.0f;
    numbers[2 * N + t] = out ? line[outputs + t] : 0.0f;
    numbers[3 * N + t] = in ? mean[t] : 0.0f;
    numbers[4 * N + t] = in ? factor[t] : 1.0f;
    numbers[5 * N + t] = in ? shift[t] : 0.0f;
  }

  // dx: a warp has 32 rows by 16 channels, and keeps the weights of these.
  const int down = warp / BESIDE * 32, right = warp % BESIDE * 16;
  take_weights<T, N>(reinterpret_cast<unsigned*>(memory + DY), w, outputs, inputs);
  __syncthreads();
  unsigned of_w[DEEP][4];
#pragma unroll
  for (int k = 0; k < DEEP; ++k) {
    const int at = (k * 16 + lane / 8 % 2 * 8 + lane % 8) * PITCH + right + lane / 16 * 8;
    matrices<true>(of_w[k], ring + DY + at * 2);
  }

  // part: a warp has 32 outputs by 32 inputs.
  const int of_grid = warp % (GRID * GRID), split = warp / (GRID * GRID);
  const int output = of_grid / GRID * 32, input = of_grid % GRID * 32;
  float product[2][4][4] = {}, first[2][2] = {}, second[2][2] = {};

  for (int tile = blockIdx.x, i = 0; tile < tiles; tile += gridDim.x, ++i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
    fetch_next();
    unsigned char* const stage = memory + i % STAGES * STAGE;
    const unsigned* const of_g = reinterpret_cast<const unsigned*>(stage);
    const unsigned* const of_z = reinterpret_cast<const unsigned*>(stage + ARRAY);
    const unsigned* const of_x = reinterpret_cast<const unsigned*>(stage + 2 * ARRAY);

    {  // two channels of every LINES-th row
      const int pair = t % PAIRS, mine = t / PAIRS, there = rows - tile * ROWS;
      const bool out = 2 * pair < outputs, in = 2 * pair < inputs;
      const auto of = [&](int number) { return *reinterpret_cast<const float2*>(numbers + number * N + 2 * pair); };
      const float2 by = of(0), slope = of(1), rest = of(2), by_x = of(4), plus = of(5);
      const int from = mine * (outputs / 2) + pair, from_x = mine * (inputs / 2) + pair, to = mine * (PITCH / 2) + pair;
      unsigned* const dy = reinterpret_cast<unsigned*>(memory + DY) + to;
      unsigned* const y = reinterpret_cast<unsigned*>(memory + Y) + to;
#pragma unroll
      for (int j = 0; j < ROWS / LINES; ++j) {
        const float2 gs = pair_of<T>(of_g[from + j * LINES * (outputs / 2)]);
        const float2 zs = pair_of<T>(of_z[from + j * LINES * (outputs / 2)]);
        const float one = fmaf(by.x, gs.x, fmaf(slope.x, zs.x, rest.x)), two = fmaf(by.y, gs.y, fmaf(slope.y, zs.y, rest.y));
        unsigned other = of_x[from_x + j * LINES * (inputs / 2)];
        if (NORMALIZED) other = normalized<T, AFTER>(other, by_x, plus, most);
        dy[j * LINES * (PITCH / 2)] = out && mine + j * LINES < there ? word_of<T>(one, two) : 0;
        y[j * LINES * (PITCH / 2)] = in ? other : 0;
      }
    }
    __syncthreads();

    float sum[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < DEEP; ++k)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        unsigned a[4];
        const int at = (down + m * 16 + lane % 16) * PITCH + k * 16 + lane / 16 * 8;
        matrices<false>(a, ring + DY + at * 2);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const unsigned b[2] = {of_w[k][2 * n], of_w[k][2 * n + 1]};
          multiply<T>(sum[m][n], a, b);
        }
      }
    unsigned* const results = reinterpret_cast<unsigned*>(stage);  // where g was
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int channel = right + n * 8 + lane % 4 * 2, at = ((down + lane / 4) * inputs + channel) / 2;
      const auto of = [&](int number) { return *reinterpret_cast<const float2*>(numbers + number * N + channel); };
      const float2 mu = of(3), by_x = of(4), plus = of(5);
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) {  // of rows
        float one = sum[eight / 2][n][eight % 2 * 2], two = sum[eight / 2][n][eight % 2 * 2 + 1];
        if (NORMALIZED) {
          const float2 xs = pair_of<T>(of_x[at + eight * 4 * inputs]);
          if (passes_nothing<AFTER>(fmaf(xs.x, by_x.x, plus.x), most)) one = 0;
          if (passes_nothing<AFTER>(fmaf(xs.y, by_x.y, plus.y), most)) two = 0;
          first[n][0] += one;
          first[n][1] += two;
          second[n][0] += one * (xs.x - mu.x);
          second[n][1] += two * (xs.y - mu.y);
        }
        if (channel < inputs) results[at + eight * 4 * inputs] = word_of<T>(one, two);
      }
    }

#pragma unroll
    for (int step = 0; step < ROWS / 16 / SPLITS; ++step) {
      const int row = (split * (ROWS / 16 / SPLITS) + step) * 16 + lane % 8;
      unsigned a[2][4], b[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int at = (row + lane / 16 * 8) * PITCH + output + m * 16 + lane / 8 % 2 * 8;
        matrices<true>(a[m], ring + DY + at * 2);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int at = (row + lane / 8 % 2 * 8) * PITCH + input + n * 16 + lane / 16 * 8;
        matrices<true>(b[n], ring + Y + at * 2);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const unsigned of[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
          multiply<T>(product[m][n], a[m], of);
        }
    }
    __syncthreads();
    write_tile<N>(dx, reinterpret_cast<const uint4*>(stage), tile, rows, inputs);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();

  if (NORMALIZED) {  // threads of a warp that have the same channel, then the warps below each other
    float* const sums = reinterpret_cast<float*>(memory + DY);  // (WARPS / BESIDE, 2, N)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int between = 4; between < 32; between *= 2) {
          first[n][v] += __shfl_xor_sync(0xffffffffu, first[n][v], between);
          second[n][v] += __shfl_xor_sync(0xffffffffu, second[n][v], between);
        }
        if (lane < 4) {
          float* const mine = sums + warp / BESIDE * 2 * N + right + n * 8 + lane * 2 + v;
          mine[0] = first[n][v];
          mine[N] = second[n][v];
        }
      }
    __syncthreads();
    if (t < 2 * N && t % N < inputs) {
      double all = 0;
#pragma unroll
      for (int k = 0; k < WARPS / BESIDE; ++k) all += double(sums[k * 2 * N + t]);
      partial[(t / N * i64(gridDim.x) + blockIdx.x) * inputs + t % N] = all;
    }
  }

  float* const shares = reinterpret_cast<float*>(memory);  // (SPLITS, N, N)
  float* const mine = part + i64(blockIdx.x) * outputs * inputs;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int o = output + m * 16 + half * 8 + lane / 4, c = input + n * 8 + lane % 4 * 2;
        const float2 pair = make_float2(product[m][n][2 * half], product[m][n][2 * half + 1]);
        if (SPLITS > 1)
          *reinterpret_cast<float2*>(shares + (split * N + o) * N + c) = pair;
        else if (o < outputs && c < inputs)
          *reinterpret_cast<float2*>(mine + o * inputs + c) = pair;
      }
  if (SPLITS == 1) return;
  __syncthreads();
  for (int i = t; i < N * N; i += THREADS) {
    float all = 0;
#pragma unroll
    for (int k = 0; k < SPLITS; ++k) all += shares[k * N * N + i];
    if (i / N < outputs && i % N < inputs) mine[i / N * inputs + i % N] = all;
  }
}

// to (size) += the sums of shares of part, by blocks of 1,024 threads.
__global__ void __launch_bounds__(1024) add_products(const float* part, float* to, i64 shares, i64 size) {
  const i64 mine = blockIdx.x * 32ll + threadIdx.x / 32;
  const float sum = sum_of_all(part, shares, size, blockIdx.x * 32ll, size);
  if (threadIdx.x % 32 == 0 && mine < size) to[mine] += sum;
}
