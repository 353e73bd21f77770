// Convolutions of small images of many channels, channels last, elements of 16 bits, weights float32 in Caffe's order: y
// from x, or dx from dy by the weights turned round, with stride 1. Compute capability 8.0 and later.
//
// A block keeps pieces of images in shared memory, channels padded to a multiple of 16 by zeros, and the weights of 8 * N
// outputs. The depth is (tap, channel); a step of it are 16 channels under one tap, which matrices() takes from where
// they lie. Words (mma.cuh) of a pixel are pitch = 4 (mod 8) apart, so that neighbours lie in different banks; those of
// a tap an odd number, since weights come tap by tap. All sizes are constants. Sums have a fixed order.

#include "pack.cuh"
#include "mma.cuh"
#include "ahead.cuh"
#include "shares.cuh"
#include "pairs.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// A correlation of images H x W, C channels, to O outputs, by kernels KH x KW with strides and padding. TURNED: weights
// are (C, O, KH, KW), taps in reverse.
template <int CHANNELS, int HEIGHT, int WIDTH, int OUTPUTS, int KH, int KW, int SH, int SW, int PH, int PW, bool TURN>
struct Filter {
  static constexpr int C = CHANNELS, H = HEIGHT, W = WIDTH, O = OUTPUTS, kh = KH, kw = KW, sh = SH, sw = SW, ph = PH, pw = PW;
  static constexpr int ho = (H + 2 * ph - kh) / sh + 1, wo = (W + 2 * pw - kw) / sw + 1, taps = kh * kw;
  static constexpr bool turned = TURN;
  static constexpr int blocks = (C + 15) / 16;  // of 16 channels
  static constexpr int pitch = blocks * 8 + 4;  // words from a pixel to the next one
  static constexpr int of_tap = blocks * 8 + 1, of_output = (taps * of_tap + 3) / 8 * 8 + 4;  // words of weights
  static constexpr int columns = (wo - 1) * sw + kw;
};

using NoPool = Pool<0, 0, 1, 1, 0, 0, 0, 0>;

// Begin to copy pixels of images `from` on, lines `top` on, to shared memory: `lines` of each image, F::columns of a line.
template <typename F, typename T>
__device__ void load_pixels(unsigned* piece, const T* x, int from, int images, int top, int lines, int number) {
  constexpr int V = F::C % 8 == 0 ? 8 : F::C % 4 == 0 ? 4 : 2, PACKS = F::blocks * 16 / V;
#pragma unroll 4
  for (int i = threadIdx.x; i < images * lines * F::columns * PACKS; i += THREADS) {
    const int c = i % PACKS * V, pixel = i / PACKS, column = pixel % F::columns - F::pw, line = pixel / F::columns;
    const int image = from + line / lines, row = top + line % lines;
    const bool there = c < F::C && image < number && row >= 0 && row < F::H && column >= 0 && column < F::W;
    copy_ahead<2 * V>(piece + pixel * F::pitch + c / 2,
                      x + (there ? ((i64(image) * F::H + row) * F::W + column) * F::C + c : 0), there);
  }
  close_group();
}

// The weights of so many outputs, 8 * N at most, from `first` on to shared memory, words of two channels. Column n of a tile
// is an output such that a thread has 2 * N neighbours.
template <typename T, typename F, int N>
__device__ void fill_weights(unsigned* weights, const float* w, int first, int outputs) {
  constexpr int AT_ONCE = 12, PAIRS = F::C / 2;
  const int words = PAIRS * outputs * F::taps;
  for (int begin = threadIdx.x; begin < words; begin += AT_ONCE * THREADS) {
    float low[AT_ONCE], high[AT_ONCE];
    int places[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const int i = begin + u * THREADS, tap = i % F::taps, row = i / F::taps;  // neighbours of a row are in turn
      const int pair = F::turned ? row / outputs : row % PAIRS, o = F::turned ? row - pair * outputs : row / PAIRS;
      const int from = F::turned ? (2 * pair * F::O + first + o) * F::taps : ((first + o) * F::C + 2 * pair) * F::taps;
      const int column = o / 2 % N * 8 + o / (2 * N) * 2 + o % 2;
      places[u] = column * F::of_output + (F::turned ? F::taps - 1 - tap : tap) * F::of_tap + pair;
      if (i < words) {
        low[u] = w[from + tap];
        high[u] = w[from + tap + (F::turned ? F::O : 1) * F::taps];
      }
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u)
      if (begin + u * THREADS < words) weights[places[u]] = unsigned(T(high[u]).bits) << 16 | T(low[u]).bits;
  }
}

// y = w * x + b and perhaps the relu of it. A block makes outputs 8 * N * blockIdx.y on, of LINES lines of IMAGES images
// (all lines if there are several); DOWN warps have M tiles of 16 positions each, and WARPS / DOWN share the depth of
// these. P: in place of y the maxima of windows, which begin within the plane, and where they are (compute capability 9.0);
// then LINES are all.
template <typename T, typename F, int IMAGES, int LINES, int M, int N, int DOWN, bool R, typename P>
__global__ void __launch_bounds__(THREADS, 2)
image_convolution(const T* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b, T* __restrict__ y,
                  unsigned char* __restrict__ index, int number) {
  constexpr bool POOLED = P::kh > 0;
  constexpr int SPLIT = WARPS / DOWN, STEPS = F::taps * F::blocks, PIECES = (F::ho + LINES - 1) / LINES;
  constexpr int ROWS = (LINES - 1) * F::sh + F::kh, WEIGHTS = 8 * N * F::of_output, GIVEN = M - M / SPLIT;
  extern __shared__ __align__(16) unsigned room[];
  unsigned *weights = room, *piece = room + WEIGHTS;
  constexpr int OF_POSITION = 4 * (N | 1);  // words of outputs, where their maxima are taken
  float* parts = reinterpret_cast<float*>(piece);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int down = warp % DOWN, share = warp / DOWN, first = blockIdx.y * 8 * N;
  const int outputs = F::O % (8 * N) ? min(8 * N, F::O - first) : 8 * N;
  // Where sums (m, n, j) of a warp with this share lie that it gives to another one: those of tile m are added by that
  // whose share is m % SPLIT.
  const auto place = [&](int k, int m, int n, int j) {
    const int given = m - (m + SPLIT - 1 - k) / SPLIT;
    return (((k * DOWN + down) * GIVEN + given) * N + n) * 128 + j * 32 + lane;
  };

  const auto load = [&](int which) {
    load_pixels<F>(piece, x, which / PIECES * IMAGES, IMAGES, which % PIECES * LINES * F::sh - F::ph, ROWS, number);
  };
  load(blockIdx.x);  // on their way while weights are converted
  if (F::C % 16 || F::O % (8 * N)) {
    for (int i = threadIdx.x; i < WEIGHTS / 4; i += THREADS) reinterpret_cast<Pack<unsigned, 4>*>(weights)[i] = {};
    __syncthreads();
  }
  fill_weights<T, F, N>(weights, w, first, outputs);
  unsigned at[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const int position = min((down * M + m) * 16 + lane % 16, IMAGES * LINES * F::wo - 1);
    const int line = position / F::wo, pixel = (line / LINES * ROWS + line % LINES * F::sh) * F::columns;
    at[m] = shared_address(piece + (pixel + position % F::wo * F::sw) * F::pitch + lane / 16 * 4);
  }
  float bias[2 * N];
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) bias[i] = b && t * 2 * N + i < outputs ? b[first + t * 2 * N + i] : 0;

  const int pieces = (number + IMAGES - 1) / IMAGES * PIECES;
  for (int which = blockIdx.x; which < pieces; which += gridDim.x) {
    const int image = which / PIECES * IMAGES, begin = which % PIECES * LINES;
    wait_for_groups<0>();
    __syncthreads();
    float sums[M][N][4] = {};
#pragma unroll 2
    for (int step = share; step < STEPS; step += SPLIT) {
      const int tap = step / F::blocks, block = step % F::blocks;
      const int pixel = (tap / F::kw * F::columns + tap % F::kw) * F::pitch + block * 8;
      const unsigned* depth = weights + tap * F::of_tap + block * 8 + t;
      unsigned right[N][2];
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) right[n][half] = depth[(n * 8 + g) * F::of_output + half * 4];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        unsigned left[4];
        matrices<false>(left, at[m] + pixel * 4);
#pragma unroll
        for (int n = 0; n < N; ++n) multiply<T>(sums[m][n], left, right[n]);
      }
    }
    __syncthreads();
    if (SPLIT > 1) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
        if (m % SPLIT == share) continue;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) parts[place(share, m, n, j)] = sums[m][n][j];
      }
      __syncthreads();
    }
    const int lines = IMAGES > 1 ? min(IMAGES, number - image) * LINES : min(LINES, F::ho - begin);
    if (SPLIT > 1) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
        if (m % SPLIT != share) continue;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float sum = 0;
#pragma unroll
            for (int k = 0; k < SPLIT; ++k) sum += k == share ? sums[m][n][j] : parts[place(k, m, n, j)];
            sums[m][n][j] = sum;
          }
      }
      __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if (m % SPLIT != share) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = (down * M + m) * 16 + half * 8 + g;
        if (position >= lines * F::wo) continue;
        unsigned words[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
          float low = sums[m][n][half * 2] + bias[2 * n], high = sums[m][n][half * 2 + 1] + bias[2 * n + 1];
          if (R && !POOLED) {
            low = low <= 0 ? 0 : low;
            high = high <= 0 ? 0 : high;
          }
          words[n] = unsigned(T(high).bits) << 16 | T(low).bits;
        }
        if constexpr (POOLED) {
#pragma unroll
          for (int n = 0; n < N; ++n) piece[position * OF_POSITION + t * N + n] = words[n];
          continue;
        }
        const int o = first + t * 2 * N;
        T* to = y + ((i64(image) * F::ho + begin) * F::wo + position) * F::O + o;
        if constexpr (F::O % 8 == 0 && N == 4) {
          if (o < F::O) *reinterpret_cast<Pack<unsigned, 4>*>(to) = {words[0], words[1], words[2], words[3]};
        } else {
#pragma unroll
          for (int n = 0; n < N; ++n)
            if (o + 2 * n < F::O) reinterpret_cast<unsigned*>(to)[n] = words[n];
        }
      }
    }
    if constexpr (POOLED) {
      constexpr int V = F::O % 8 == 0 ? 8 : F::O % 4 == 0 ? 4 : 2, WORDS = V / 2, PACKS = 8 * N / V;
      using Words = Pack<unsigned, WORDS>;
      __syncthreads();
      for (int i = threadIdx.x; i < lines / F::ho * P::ho * P::wo * PACKS; i += THREADS) {
        const int pack = i % PACKS, window = i / PACKS, line = window / P::wo, which = line / P::ho;
        if (first + pack * V >= F::O) continue;
        const auto output = [&](int r, int c) {
          const int position = (which * F::ho + r) * F::wo + c;
          return *reinterpret_cast<const Words*>(piece + position * OF_POSITION + pack * WORDS);
        };
        Words largest;
        Pack<unsigned char, V> places;
        largest_of_window<T, P, F::ho, F::wo, R>(output, line % P::ho, window % P::wo, largest, places);
        const i64 to = (i64(image) * P::ho * P::wo + window) * F::O + first + pack * V;
        *reinterpret_cast<Words*>(y + to) = largest;
        *reinterpret_cast<Pack<unsigned char, V>*>(index + to) = places;
      }
      __syncthreads();
    }
    if (which + gridDim.x < pieces) load(which + gridDim.x);
  }
}

// Shares of the gradients of w and b, from x and dy, that of y. A block goes through every gridDim.x-th piece of IMAGES whole
// images, the next of which is on its way meanwhile; of the tiles (tap, 16 channels) x 8 outputs it makes WIDE * M * N, those
// of outputs 8 * N * blockIdx.y on, a warp M * N. The depth are positions. Both operands lie by positions, hence are taken
// transposed. Part (gridDim.x, blocks, sums) gets the sums as threads have them; then those for b, which are those of ones.
template <typename T, typename F, int IMAGES, int WIDE, int M, int N>
__global__ void __launch_bounds__(32 * WIDE, M * N > 8 ? 1 : 2)
image_gradient(const T* __restrict__ x, const T* __restrict__ dy, float* __restrict__ part, int number) {
  constexpr int PLANE = F::ho * F::wo, POSITIONS = (IMAGES * PLANE + 15) / 16 * 16, TILES = F::taps * F::blocks;
  constexpr int ROWS = (F::ho - 1) * F::sh + F::kh, PIXELS = IMAGES * ROWS * F::columns * F::pitch;
  constexpr int OF_POSITION = 4 * (N | 1), BUFFER = PIXELS + POSITIONS * OF_POSITION + 4;
  constexpr int SUMS = WIDE * M * N * 128, OF_BLOCK = SUMS + 8 * N;
  extern __shared__ __align__(16) unsigned room[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.y * 8 * N;
  const unsigned one = T(1.0f).bits, ones = one << 16 | one;

  for (int i = threadIdx.x; i < 2 * BUFFER / 4; i += 32 * WIDE) reinterpret_cast<Pack<unsigned, 4>*>(room)[i] = {};
  __syncthreads();

  const auto fetch = [&](int image, unsigned* to) {
    constexpr int V = F::C % 8 == 0 ? 8 : F::C % 4 == 0 ? 4 : 2, PACKS = F::C / V;
    for (int i = threadIdx.x; i < IMAGES * F::H * F::W * PACKS; i += 32 * WIDE) {
      const int c = i % PACKS * V, pixel = i / PACKS, column = pixel % F::W + F::pw, line = pixel / F::W % F::H + F::ph;
      const int which = pixel / F::W / F::H;
      if (image + which < number && line < ROWS && column < F::columns)
        copy_ahead<2 * V>(to + ((which * ROWS + line) * F::columns + column) * F::pitch + c / 2,
                          x + (i64(image) * F::H * F::W + pixel) * F::C + c, true);
    }
    constexpr int U = F::O % 8 == 0 ? 8 : F::O % 4 == 0 ? 4 : 2, ACROSS = 8 * N / U;
    for (int i = threadIdx.x; i < IMAGES * PLANE * ACROSS; i += 32 * WIDE) {
      const int o = i % ACROSS * U, position = i / ACROSS;
      const bool there = image + position / PLANE < number;
      if (first + o < F::O)
        copy_ahead<2 * U>(to + PIXELS + position * OF_POSITION + o / 2,
                          dy + (there ? (i64(image) * PLANE + position) * F::O + first + o : 0), there);
    }
    close_group();
  };

  int offsets[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const int tile = (blockIdx.z * WIDE + warp) * M + m, tap = tile / F::blocks;
    offsets[m] = tile < TILES ? ((tap / F::kw * F::columns + tap % F::kw) * F::pitch + tile % F::blocks * 8) * 4 : 0;
  }
  float sums[M][N][4] = {}, bias[4] = {};
  const int pieces = (number + IMAGES - 1) / IMAGES;
  fetch(blockIdx.x * IMAGES, room);
  int which = 0;
  for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x, ++which) {
    const unsigned *pixels = room + which % 2 * BUFFER, *gradients = pixels + PIXELS;
    fetch((piece + gridDim.x) * IMAGES, room + (which + 1) % 2 * BUFFER);
    wait_for_groups<1>();
    __syncthreads();
#pragma unroll 2
    for (int step = 0; step < POSITIONS / 16; ++step) {
      const int position = min(step * 16 + lane % 8 + lane / 16 * 8, IMAGES * PLANE - 1);
      const int line = position / F::wo, row = line / F::ho * ROWS + line % F::ho * F::sh;
      const int pixel = row * F::columns + position % F::wo * F::sw;
      const unsigned at = shared_address(pixels + pixel * F::pitch + lane / 8 % 2 * 4);
      unsigned right[(N + 1) / 2][4];
#pragma unroll
      for (int n = 0; n < (N + 1) / 2; ++n)
        matrices<true>(right[n], shared_address(gradients + (step * 16 + lane % 16) * OF_POSITION + n * 8 + lane / 16 * 4));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        unsigned left[4];
        matrices<true>(left, at + offsets[m]);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const unsigned columns[2] = {right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]};
          multiply<T>(sums[m][n], left, columns);
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (warp == n) {
          const unsigned left[4] = {ones, ones, ones, ones};
          const unsigned columns[2] = {right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]};
          multiply<T>(bias, left, columns);
        }
    }
    __syncthreads();
  }
  wait_for_groups<0>();

  const int block = blockIdx.z * gridDim.y + blockIdx.y, blocks = gridDim.y * gridDim.z;
  float* to = part + (i64(blockIdx.x) * blocks + block) * OF_BLOCK;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) to[((warp * M + m) * N + n) * 128 + j * 32 + lane] = sums[m][n][j];
  if (warp < N && lane < 4) {
    to[SUMS + warp * 8 + 2 * lane] = bias[0];
    to[SUMS + warp * 8 + 2 * lane + 1] = bias[1];
  }
}

// dw += sums of what image_gradient made, in `across` blocks of outputs, db likewise unless there is none.
template <typename F, int WIDE, int M, int N>
__global__ void add_image_gradient(const float* part, float* dw, float* db, int shares, int across, int all) {
  constexpr int SUMS = WIDE * M * N * 128, OF_BLOCK = SUMS + 8 * N;
  const int i = blockIdx.x * 32 + threadIdx.x % 32;
  const int block = i / OF_BLOCK, rest = i % OF_BLOCK, first = block % across * 8 * N, from = rest % 32, j = rest / 32 % 4;
  const int tile = block / across * WIDE * M + rest / (N * 128), tap = tile / F::blocks;
  const int c = tile % F::blocks * 16 + from / 4 + j / 2 * 8, o = first + rest / 128 % N * 8 + from % 4 * 2 + j % 2;
  const bool of_bias = rest >= SUMS;
  const bool wanted = i < all && (of_bias ? db && block < across && first + rest - SUMS < F::O
                                          : tap < F::taps && c < F::C && o < F::O);
  const float sum = sum_of_shares(part, shares, all, wanted);
  if (threadIdx.x >= 32 || !wanted) return;
  if (of_bias)
    db[first + rest - SUMS] += sum;
  else
    dw[(o * F::C + c) * F::taps + tap] += sum;
}
