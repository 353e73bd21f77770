// Convolutions of images of few channels whose outputs only MAX pooling reads, so that they are never written: forward
// y = maxima of w * x + b, and the gradients of w and b from that of the maxima. Channels last, elements of 16 bits,
// weights float32 in Caffe's order (O, C, kh, kw). Compute capability 9.0.
//
// The elements under a row of a kernel lie side by side. A block keeps lines of an image in shared memory, so that
// element (r, e) of any window is at (start of the window) + (offset of row r) + e, and multiplies by tensor cores
// (mma.cuh). All sizes are constants. Sums have a fixed order.

#include "pack.cuh"
#include "mma.cuh"
#include "lines.cuh"
#include "pairs.cuh"
#include "shares.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }

// So many words in as few turns of a block as with eight words of a thread at a time, and no more at a time than that needs.
__device__ constexpr int words_at_once(int words) {
  const int of_thread = (words + THREADS - 1) / THREADS, turns = (of_thread + 7) / 8;
  return (of_thread + turns - 1) / turns;
}

// A convolution of images H x W, C channels, to O outputs, by kernels KH x KW with strides and padding.
template <int CHANNELS, int HEIGHT, int WIDTH, int OUTPUTS, int KH, int KW, int SH, int SW, int PH, int PW> struct Filter {
  static constexpr int C = CHANNELS, H = HEIGHT, W = WIDTH, O = OUTPUTS, kh = KH, kw = KW, sh = SH, sw = SW, ph = PH, pw = PW;
  static constexpr int ho = (H + 2 * ph - kh) / sh + 1, wo = (W + 2 * pw - kw) / sw + 1;
  static constexpr int row = kw * C;       // elements under a row of a kernel
  static constexpr int step = sw * C;      // elements from a window to its neighbour
  static constexpr int line = (W + 2 * pw) * C;  // elements of a padded line of an image
  static constexpr int tiles = (O + 7) / 8;      // of 8 outputs
  static constexpr int pitch = 4 * (tiles | 1);  // words from a position to the next one in shared memory
};

// y = maxima of w * x + b, index = where in its window, of ROWS lines of windows of an image: grid (images * pieces). b may
// be missing. R: 0 instead of what is not above 0, which is nowhere (255).
//
// A warp makes 16 positions x all outputs, with all weights in registers. A word of the image is an element and its
// neighbour.
template <typename T, typename F, typename P, int ROWS, bool R>
__global__ void __launch_bounds__(THREADS, 2)
pooled_convolution(const T* __restrict__ x, const float* __restrict__ w, const float* __restrict__ b, T* __restrict__ y,
                   unsigned char* __restrict__ index) {
  constexpr int ACROSS = (F::row + 1) / 2, DEPTH = F::kh * ACROSS, STEPS = (DEPTH + 7) / 8, N = F::tiles;
  constexpr int MOST = least((ROWS - 1) * P::sh + P::kh, F::ho);  // lines of outputs
  constexpr int LINES = (MOST - 1) * F::sh + F::kh, PITCH = F::line, PIECES = (P::ho + ROWS - 1) / ROWS;
  constexpr int OF_WEIGHTS = STEPS * 8 + 4, PLACE = MOST * F::wo * F::pitch, WEIGHTS = N * 8 * OF_WEIGHTS;
  extern __shared__ __align__(16) unsigned room[];
  unsigned *outputs = room, *piece = room + (PLACE > WEIGHTS ? PLACE : WEIGHTS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int image = blockIdx.x / PIECES, first = blockIdx.x % PIECES * ROWS;
  const int begin = max(first * P::sh - P::ph, 0);
  const int lines = min((first + ROWS - 1) * P::sh - P::ph + P::kh, F::ho) - begin;

  const T* from = x + i64(image) * (F::H * F::W * F::C);
  constexpr int SEEN = LINES * PITCH;
  fill_lines<words_at_once(SEEN)>(piece, SEEN, PITCH, Constant<PITCH>(), from, F::H, F::W * F::C, begin * F::sh - F::ph,
                                   F::pw * F::C, 1);
#pragma unroll 8
  for (int i = threadIdx.x; i < WEIGHTS; i += THREADS) {
    const int o = i / OF_WEIGHTS, j = i % OF_WEIGHTS, r = j / ACROSS, e = j % ACROSS * 2;
    unsigned word = 0;
    if (o < F::O && r < F::kh) {
      const float* of = w + (o * F::C * F::kh + r) * F::kw;
      word = T(of[e % F::C * (F::kh * F::kw) + e / F::C]).bits;
      if (e + 1 < F::row) word |= unsigned(T(of[(e + 1) % F::C * (F::kh * F::kw) + (e + 1) / F::C]).bits) << 16;
    }
    outputs[i] = word;
  }
  __syncthreads();

  unsigned right[STEPS][N][2];
  int offsets[STEPS][2];
  float bias[N][2];
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = step * 8 + half * 4 + t;
      offsets[step][half] = j < DEPTH ? j / ACROSS * PITCH + j % ACROSS * 2 : 0;
#pragma unroll
      for (int n = 0; n < N; ++n) right[step][n][half] = outputs[(n * 8 + g) * OF_WEIGHTS + j];
    }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int o = n * 8 + 2 * t + i;
      bias[n][i] = b && o < F::O ? b[o] : 0;
    }
  __syncthreads();

  const int positions = lines * F::wo;
  for (int tile = warp; tile * 16 < positions; tile += WARPS) {
    const unsigned* at[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = min(tile * 16 + half * 8 + g, positions - 1);
      at[half] = piece + position / F::wo * (F::sh * PITCH) + position % F::wo * F::step;
    }
    float sums[N][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const unsigned left[4] = {at[0][offsets[step][0]], at[1][offsets[step][0]],
                                at[0][offsets[step][1]], at[1][offsets[step][1]]};
#pragma unroll
      for (int n = 0; n < N; ++n) multiply<T>(sums[n], left, right[step][n]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = tile * 16 + half * 8 + g;
      if (position >= positions) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const unsigned low = T(sums[n][half * 2] + bias[n][0]).bits, high = T(sums[n][half * 2 + 1] + bias[n][1]).bits;
        outputs[position * F::pitch + n * 4 + t] = high << 16 | low;
      }
    }
  }
  __syncthreads();

  constexpr int V = F::O % 8 ? 4 : 8, WORDS = V / 2, PACKS = F::O / V;
  using Words = Pack<unsigned, WORDS>;
  for (int i = threadIdx.x; i < ROWS * P::wo * PACKS; i += THREADS) {
    const int pack = i % PACKS, column = i / PACKS % P::wo, row = first + i / PACKS / P::wo;
    if (row >= P::ho) break;
    const auto output = [&](int r, int c) {
      return *reinterpret_cast<const Words*>(outputs + ((r - begin) * F::wo + c) * F::pitch + pack * WORDS);
    };
    Words largest;
    Pack<unsigned char, V> places;
    largest_of_window<T, P, F::ho, F::wo, R>(output, row, column, largest, places);
    const i64 to = (i64(image) * P::ho + row) * (P::wo * PACKS) + column * PACKS + pack;
    reinterpret_cast<Words*>(y)[to] = largest;
    reinterpret_cast<Pack<unsigned char, V>*>(index)[to] = places;
  }
}

// Shares of the gradients of w and b, from dy, that of the maxima. A block takes every gridDim.x-th piece of LINES lines of
// outputs; it makes their gradient from dy as max_pool_backward does, (position, output), rounded, in shared memory.
//
// The sums are of words of two neighbouring positions, left (elements under a kernel x positions) times right (positions x
// outputs). Left has one more row, of ones, for b. A word of the image is an element and that under the neighbour.
// Part (gridDim.x, sums) gets the block's sums as a warp has them.
template <typename T, typename F, typename P, int LINES>
__global__ void __launch_bounds__(THREADS, 2)
pooled_gradient(const T* __restrict__ x, const T* __restrict__ dy, const unsigned char* __restrict__ index,
                float* __restrict__ part, int images) {
  constexpr int ROWS = F::kh * F::row, M = (ROWS + 1 + 15) / 16, N = F::tiles, SUMS = M * N * 128;
  constexpr int ACROSS = (F::wo + 1) / 2 * 2, POSITIONS = (LINES * ACROSS + 15) / 16 * 16;
  constexpr int OF_IMAGE = (LINES - 1) * F::sh + F::kh, PITCH = F::line + F::step, PIECES = (F::ho + LINES - 1) / LINES;
  constexpr int PLACE = POSITIONS * F::pitch + 4, V = 4, PACKS = F::O / V;
  constexpr int BACK = (P::kh + P::sh - 1) / P::sh, BACK_W = (P::kw + P::sw - 1) / P::sw;
  constexpr int DOWN = (LINES + P::sh - 2) / P::sh + 1, WIDE = (ACROSS - 1 + P::pw) / P::sw + 1;
  extern __shared__ __align__(16) unsigned room[];
  unsigned *gradients = room, *piece = room + (PLACE > WARPS * SUMS ? PLACE : WARPS * SUMS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const unsigned one = T(1.0f).bits, ones = one << 16 | one;

  int offsets[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = m * 16 + half * 8 + g;
      offsets[m][half] = k < ROWS ? k / F::row * PITCH + k % F::row : 0;
    }
  float sums[M][N][4] = {};
  for (int i = LINES * ACROSS * F::pitch + threadIdx.x; i < PLACE; i += THREADS) gradients[i] = 0;

  for (int which = blockIdx.x; which < images * PIECES; which += gridDim.x) {
    const int image = which / PIECES, begin = which % PIECES * LINES;
    const T* from = x + i64(image) * (F::H * F::W * F::C);
    fill_lines<words_at_once(OF_IMAGE * PITCH)>(piece, OF_IMAGE * PITCH, PITCH, Constant<PITCH>(), from, F::H, F::W * F::C,
                                                begin * F::sh - F::ph, F::pw * F::C, F::step);
    // A thread makes the gradient of the elements from a window's begin to that of the next ones, from the windows over
    // them, which begin there or before.
    const i64 start = i64(image) * (P::ho * P::wo * PACKS);
    const int above = (begin + P::ph) / P::sh;
    for (int i = threadIdx.x; i < DOWN * WIDE * PACKS; i += THREADS) {
      const int pack = i % PACKS, down = i / PACKS / WIDE + above, right = i / PACKS % WIDE;
      Pack<T, V> gradient[BACK][BACK_W];
      Pack<unsigned char, V> named[BACK][BACK_W];
#pragma unroll
      for (int r = 0; r < BACK; ++r)
#pragma unroll
        for (int c = 0; c < BACK_W; ++c) {
          const bool there = down - r >= 0 && down - r < P::ho && right - c >= 0 && right - c < P::wo;
          const i64 window = start + (there ? ((down - r) * P::wo + right - c) * PACKS + pack : 0);
          gradient[r][c] = reinterpret_cast<const Pack<T, V>*>(dy)[window];
          named[r][c] = reinterpret_cast<const Pack<unsigned char, V>*>(index)[window];
#pragma unroll
          for (int v = 0; v < V; ++v) named[r][c].v[v] = there ? named[r][c].v[v] : 255;
        }
#pragma unroll
      for (int r = 0; r < P::sh; ++r)
#pragma unroll
        for (int c = 0; c < P::sw; ++c) {
          const int line = down * P::sh - P::ph + r - begin, column = right * P::sw - P::pw + c;
          if (line < 0 || line >= LINES || column < 0 || column >= ACROSS) continue;
          Pack<T, V> total;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float sum = 0;
#pragma unroll
            for (int k = BACK - 1; k >= 0; --k)
#pragma unroll
              for (int l = BACK_W - 1; l >= 0; --l) {
                const int row = r + k * P::sh, at = c + l * P::sw;
                if (row < P::kh && at < P::kw && named[k][l].v[v] == row * P::kw + at) sum += float(gradient[k][l].v[v]);
              }
            total.v[v] = T(sum);
          }
          *reinterpret_cast<Pack<T, V>*>(gradients + (line * ACROSS + column) * F::pitch + pack * (V / 2)) = total;
        }
    }
    __syncthreads();
    for (int step = warp; step < POSITIONS / 16; step += WARPS) {
      unsigned right[(N + 1) / 2][4];
#pragma unroll
      for (int n = 0; n < (N + 1) / 2; ++n)
        matrices<true>(right[n], shared_address(gradients + (step * 16 + lane % 16) * F::pitch + n * 8 + lane / 16 * 4));
      const unsigned* at[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = min(step * 16 + half * 8 + 2 * t, LINES * ACROSS - 2);
        at[half] = piece + position / ACROSS * (F::sh * PITCH) + position % ACROSS * F::step;
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        unsigned left[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          left[i] = m * 16 + i % 2 * 8 + g == ROWS ? ones : at[i / 2][offsets[m][i % 2]];
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const unsigned columns[2] = {right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]};
          multiply<T>(sums[m][n], left, columns);
        }
      }
    }
    __syncthreads();
  }

  float* parts = reinterpret_cast<float*>(room);
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) parts[warp * SUMS + ((m * N + n) * 4 + j) * 32 + lane] = sums[m][n][j];
  __syncthreads();
  for (int i = threadIdx.x; i < SUMS; i += THREADS) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) sum += parts[k * SUMS + i];
    part[i64(blockIdx.x) * SUMS + i] = sum;
  }
}

// dw += sums of what pooled_gradient made, db likewise unless there is none.
template <typename F> __global__ void add_pooled_gradient(const float* part, float* dw, float* db, int shares) {
  constexpr int ROWS = F::kh * F::row, M = (ROWS + 1 + 15) / 16, N = F::tiles, SUMS = M * N * 128;
  const int lane = threadIdx.x % 32, i = blockIdx.x * 32 + lane, j = i / 32 % 4, tile = i / 128;
  const float sum = sum_of_shares(part, shares, SUMS, true);
  if (threadIdx.x >= 32) return;
  const int k = tile / N * 16 + lane / 4 + j / 2 * 8, o = tile % N * 8 + lane % 4 * 2 + j % 2;
  if (o >= F::O || k > ROWS) return;
  if (k == ROWS) {
    if (db) db[o] += sum;
  } else {
    const int r = k / F::row, e = k % F::row;
    dw[((o * F::C + e % F::C) * F::kh + r) * F::kw + e / F::C] += sum;
  }
}
