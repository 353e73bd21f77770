// Products of pixels and weights that have few channels on one side, in numbers of 16 bits, normalized at once, and their
// gradient:
//
//   y (rows, outputs) = x (rows, depth) * w (outputs, depth) * factor + shift, with a ReLU after it
//   y (rows, outputs) = what a normalization makes of x (rows, depth) * w (outputs, depth), with the sums of its channels
//   dx (rows, inputs) = g (rows, depth) * w (depth, inputs) + x (rows, inputs) * m (inputs, inputs) + base [+ more]
//   dw (depth, outputs) = dy (rows, depth)^T * y (rows, outputs), beside dx, where dy is the gradient of a normalization
//
// A tile of 16 rows is so little work that its way through shared memory, as in pointwise.cu, takes longer than its product.
// Here a warp has 16 rows by two groups of 32 outputs in registers throughout. Which depth and which output a number of a
// fragment is (mma.cuh) is free as long as both factors agree: thread (g, t) has the depths from 4 t (8 t if K is 32) on of
// rows g and g + 8, which lie side by side, and of their products the outputs from 8 t on of each group.

#include "pack.cuh"
#include "mma.cuh"
#include "rectify.cuh"

constexpr int GROUP = 32, GROUPS = 2, TILE = 16;

// K / 4 numbers of a row from a depth on, as words; zeros from its end on.
template <int K> struct alignas(K / 2) Words { unsigned of[K / 8]; };

template <int K, typename T> __device__ Words<K> take_row(const T* row, int from, int depth, bool there) {
  Words<K> words = {};
  if (there && from < depth) words = *reinterpret_cast<const Words<K>*>(row + from);
  return words;
}

// Partial sums (2, gridDim.x, outputs) of a block, from those of its warps, of outputs from the first on.
template <int WARPS, int N, typename A>
__device__ void add_warps(const A (&parts)[WARPS][2][N], double* partial, int first, int outputs) {
  __syncthreads();
  const int which = threadIdx.x / N, channel = first + threadIdx.x % N;
  if (which > 1 || channel >= outputs) return;
  double all = 0;
  for (int warp = 0; warp < WARPS; ++warp) all += double(parts[warp][which][threadIdx.x % N]);
  partial[(i64(which) * gridDim.x + blockIdx.x) * outputs + channel] = all;
}

template <typename T, int K, int AFTER> __global__ void __launch_bounds__(256, 2)
narrow_normalized(const T* x, const T* w, const float* factor, const float* shift, double ceiling, T* y, i64 rows,
                  i64 outputs, i64 depth) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, from = t * (K / 4);
  const int first = blockIdx.y * (GROUP * GROUPS), warps = blockDim.x / 32 * gridDim.x;
  const int tiles = int((rows + TILE - 1) / TILE);
  const float most = float(ceiling);
  unsigned of_w[GROUPS][4][K / 8];
  float by[GROUPS][8], plus[GROUPS][8];
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    const int base = first + group * GROUP;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int output = base + g / 2 * 8 + 2 * j + g % 2;
      const Words<K> words = take_row<K>(w + i64(output) * depth, from, int(depth), output < outputs);
#pragma unroll
      for (int k = 0; k < K / 8; ++k) of_w[group][j][k] = words.of[k];
    }
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      const bool there = base + 8 * t < outputs;
      by[group][v] = there ? factor[base + 8 * t + v] : 0.0f;
      plus[group][v] = there ? shift[base + 8 * t + v] : 0.0f;
    }
  }
  const auto fetch = [&](int tile, int row) {
    const i64 at = i64(tile) * TILE + row;
    return take_row<K>(x + at * depth, from, int(depth), at < rows);
  };
  int tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  Words<K> upper = fetch(tile, g), lower = fetch(tile, g + 8);
  for (; tile < tiles; tile += warps) {
    const Words<K> next_upper = fetch(tile + warps, g), next_lower = fetch(tile + warps, g + 8);
    const i64 row = i64(tile) * TILE + g;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int base = first + group * GROUP;
      if (base >= outputs) break;
      float sum[4][4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int k = 0; k < K / 8; k += 2) {
          const unsigned a[4] = {upper.of[k], lower.of[k], upper.of[k + 1], lower.of[k + 1]};
          const unsigned b[2] = {of_w[group][j][k], of_w[group][j][k + 1]};
          multiply<T>(sum[j], a, b);
        }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Pack<T, 8> pack;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          float z = fmaf(sum[v / 2][2 * half + v % 2], by[group][v], plus[group][v]);
          if (AFTER && z <= 0) z = 0;
          if (AFTER == CLIPPED && z > most) z = most;
          pack.v[v] = T(z);
        }
        if (row + 8 * half < rows && base + 8 * t < outputs)
          *reinterpret_cast<Pack<T, 8>*>(y + (row + 8 * half) * outputs + base + 8 * t) = pack;
      }
    }
    upper = next_upper;
    lower = next_lower;
  }
}

// dx, and partial sums (2, blocks, inputs) of it and of dx * (of - mean), of (rows, inputs). m follows w in memory; its words
// for each step of 16 depths and 8 inputs lie in shared memory as a warp needs them. A step of 32 depths that begins
// behind those of w is of x and m.
template <typename T, int N, int MORE> __global__ void __launch_bounds__(256, 2)
narrow_gradient(const T* g, const T* w, const T* x, const float* base, const T* of, const float* mean, const T* more, T* dx,
                double* partial, i64 rows, i64 inputs, i64 depth) {
  constexpr int TILES = N / 8, DEEP = 32;
  extern __shared__ uint2 of_w[];  // (steps, 2, TILES, 32)
  __shared__ float parts[8][2][N];
  const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4, warp = threadIdx.x / 32, warps = gridDim.x * 8;
  const int of_g = int(depth + DEEP - 1) / DEEP, steps = of_g + 1;
  const int tiles = int((rows + TILE - 1) / TILE);
  const unsigned short* const weights = reinterpret_cast<const unsigned short*>(w);
  for (int i = threadIdx.x; i < steps * 2 * TILES * 32; i += 256) {
    const int step = i / (2 * TILES * 32), half = i / (TILES * 32) % 2, column = i / 32 % TILES * 8 + i % 32 / 4;
    const int last = step < of_g ? int(depth) : int(depth + inputs);
    const int from = (step < of_g ? step * DEEP : int(depth)) + i % 4 * 8 + half * 4;
    unsigned short of[4];
    for (int k = 0; k < 4; ++k)
      of[k] = from + k < last && column < inputs ? weights[i64(from + k) * inputs + column] : (unsigned short)(0);
    of_w[i] = make_uint2(of[0] | unsigned(of[1]) << 16, of[2] | unsigned(of[3]) << 16);
  }
  float plus[TILES][2], mu[TILES][2], first[TILES][2] = {}, second[TILES][2] = {};
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int channel = j * 8 + 2 * t + v;
      plus[j][v] = channel < inputs ? base[channel] : 0.0f;
      mu[j][v] = channel < inputs ? mean[channel] : 0.0f;
    }
  __syncthreads();
  for (int tile = blockIdx.x * 8 + warp; tile < tiles; tile += warps) {
    const i64 at[2] = {i64(tile) * TILE + row, i64(tile) * TILE + row + 8};
    const auto fetch = [&](int step, int half) {
      const bool there = at[half] < rows;
      return step < of_g ? take_row<DEEP>(g + at[half] * depth + step * DEEP, 8 * t, int(depth) - step * DEEP, there)
                         : take_row<DEEP>(x + at[half] * inputs, 8 * t, step == of_g ? int(inputs) : 0, there);
    };
    float sum[TILES][4] = {};
    Pack<T, 2> of_x[2][TILES], others[2][TILES];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        const bool there = at[half] < rows && j * 8 + 2 * t < inputs;
        const i64 where = there ? at[half] * inputs + j * 8 + 2 * t : 0;
        of_x[half][j] = *reinterpret_cast<const Pack<T, 2>*>(of + where);
        if (MORE) others[half][j] = *reinterpret_cast<const Pack<T, 2>*>(more + where);
      }
    Words<DEEP> upper = fetch(0, 0), lower = fetch(0, 1), upper_1 = fetch(1, 0), lower_1 = fetch(1, 1);
#pragma unroll 2
    for (int step = 0; step < steps; ++step) {
      const Words<DEEP> upper_2 = fetch(step + 2, 0), lower_2 = fetch(step + 2, 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned a[4] = {upper.of[2 * half], lower.of[2 * half], upper.of[2 * half + 1], lower.of[2 * half + 1]};
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
          const uint2 words = of_w[((step * 2 + half) * TILES + j) * 32 + lane];
          const unsigned b[2] = {words.x, words.y};
          multiply<T>(sum[j], a, b);
        }
      }
      upper = upper_1, lower = lower_1;
      upper_1 = upper_2, lower_1 = lower_2;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        if (at[half] >= rows || j * 8 + 2 * t >= inputs) continue;
        Pack<T, 2> pair;
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          float d = sum[j][2 * half + v] + plus[j][v];
          if (MORE) d += float(others[half][j].v[v]);
          first[j][v] += d;
          second[j][v] += d * (float(of_x[half][j].v[v]) - mu[j][v]);
          pair.v[v] = T(d);
        }
        *reinterpret_cast<Pack<T, 2>*>(dx + at[half] * inputs + j * 8 + 2 * t) = pair;
      }
  }
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int between = 4; between < 32; between *= 2) {
        first[j][v] += __shfl_xor_sync(0xffffffffu, first[j][v], between);
        second[j][v] += __shfl_xor_sync(0xffffffffu, second[j][v], between);
      }
      if (row == 0) {
        parts[warp][0][j * 8 + 2 * t + v] = first[j][v];
        parts[warp][1][j * 8 + 2 * t + v] = second[j][v];
      }
    }
  add_warps(parts, partial, 0, int(inputs));
}

// g = dy (rows, depth) * w (depth, outputs), 0 where a ReLU after x * factor + shift passes nothing, and partial sums (2,
// gridDim.x, outputs) of g and of g * (x - mean), x as a normalization got it. A warp has 16 rows by a group of outputs.
template <typename T, int K, int AFTER> __global__ void __launch_bounds__(256, 2)
narrow_sums(const T* dy, const T* w, const T* x, const float* mean, const float* factor, const float* shift, double ceiling,
            T* g, double* partial, i64 rows, i64 outputs, i64 depth) {
  __shared__ float parts[8][2][GROUP];
  const int row = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32, warps = gridDim.x * 8;
  const int from = t * (K / 4), first_output = blockIdx.y * GROUP, channel = first_output + 8 * t;
  const int tiles = int((rows + TILE - 1) / TILE);
  const bool inside = channel < outputs;
  const float most = float(ceiling);
  const unsigned short* const weights = reinterpret_cast<const unsigned short*>(w);
  unsigned of_w[4][K / 8];
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int k = 0; k < K / 8; ++k) {
      const int output = first_output + row / 2 * 8 + 2 * j + row % 2;
      unsigned word = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = from + 2 * k + i;
        if (at < depth && output < outputs) word |= unsigned(weights[at * outputs + output]) << 16 * i;
      }
      of_w[j][k] = word;
    }
  float mu[8], by[8], plus[8], first[8] = {}, second[8] = {};
#pragma unroll
  for (int v = 0; v < 8; ++v) {
    mu[v] = inside ? mean[channel + v] : 0.0f;
    by[v] = AFTER && inside ? factor[channel + v] : 0.0f;
    plus[v] = AFTER && inside ? shift[channel + v] : 0.0f;
  }
  const auto fetch = [&](int tile, int half) {
    const i64 at = i64(tile) * TILE + row + 8 * half;
    return take_row<K>(dy + at * depth, from, int(depth), at < rows);
  };
  int tile = blockIdx.x * 8 + warp;
  Words<K> upper = fetch(tile, 0), lower = fetch(tile, 1);
  for (; tile < tiles; tile += warps) {
    const i64 at = i64(tile) * TILE + row;
    uint4 of_x[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 place = inside && at + 8 * half < rows ? (at + 8 * half) * outputs + channel : 0;
      of_x[half] = *reinterpret_cast<const uint4*>(x + place);
    }
    const Words<K> next_upper = fetch(tile + warps, 0), next_lower = fetch(tile + warps, 1);
    float sum[4][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int k = 0; k < K / 8; k += 2) {
        const unsigned a[4] = {upper.of[k], lower.of[k], upper.of[k + 1], lower.of[k + 1]};
        const unsigned b[2] = {of_w[j][k], of_w[j][k + 1]};
        multiply<T>(sum[j], a, b);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!inside || at + 8 * half >= rows) continue;
      const Pack<T, 8>& xs = reinterpret_cast<const Pack<T, 8>&>(of_x[half]);
      Pack<T, 8> pack;
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const float of = float(xs.v[v]);
        float d = sum[v / 2][2 * half + v % 2];
        if (passes_nothing<AFTER>(fmaf(of, by[v], plus[v]), most)) d = 0;
        first[v] += d;
        second[v] += d * (of - mu[v]);
        pack.v[v] = T(d);
      }
      *reinterpret_cast<Pack<T, 8>*>(g + (at + 8 * half) * outputs + channel) = pack;
    }
    upper = next_upper;
    lower = next_lower;
  }
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int between = 4; between < 32; between *= 2) {
      first[v] += __shfl_xor_sync(0xffffffffu, first[v], between);
      second[v] += __shfl_xor_sync(0xffffffffu, second[v], between);
    }
    if (row == 0) {
      parts[warp][0][8 * t + v] = first[v];
      parts[warp][1][8 * t + v] = second[v];
    }
  }
  add_warps(parts, partial, first_output, int(outputs));
}

// y = z * w, with the weights (outputs, depth) and z what a normalization makes of x (rows, depth), with what follows it; and
// partial sums (2, gridDim.x, outputs) of y and y^2, from those of y - k and (y - k)^2 with k the first y of the thread: no
// cancellation in float. A warp goes through steps of 32 depths of its tiles, the next two of which are on their way.
template <typename T, int N, int AFTER> __global__ void __launch_bounds__(256, 2)
narrow_moments(const T* x, const T* w, const float* factor, const float* shift, double ceiling, T* y, double* partial,
               i64 of_all, i64 across, i64 deep) {
  constexpr int TILES = N / 8, DEEP = 32;
  extern __shared__ uint2 of_w[];  // (steps, 2, TILES, 32), then factors and shifts of depths
  __shared__ double parts[8][2][N];
  const int rows = int(of_all), outputs = int(across), depth = int(deep), steps = (depth + DEEP - 1) / DEEP;
  const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4, warp = threadIdx.x / 32, warps = gridDim.x * 8;
  const int tiles = (rows + TILE - 1) / TILE;
  const float most = float(ceiling);
  const unsigned short* const weights = reinterpret_cast<const unsigned short*>(w);
  float* const by = reinterpret_cast<float*>(of_w + steps * 2 * TILES * 32);
  float* const plus = by + steps * DEEP;
  for (int i = threadIdx.x; i < steps * 2 * TILES * 32; i += 256) {
    const int half = i / (TILES * 32) % 2, column = i / 32 % TILES * 8 + i % 32 / 4;
    const int from = i / (2 * TILES * 32) * DEEP + i % 4 * 8 + half * 4;
    of_w[i] = from < depth && column < outputs ? *reinterpret_cast<const uint2*>(weights + column * depth + from)
                                               : make_uint2(0, 0);
  }
  for (int i = threadIdx.x; i < steps * DEEP; i += 256) {
    by[i] = i < depth ? factor[i] : 0.0f;
    plus[i] = i < depth ? shift[i] : 0.0f;
  }
  __syncthreads();
  int next_tile = blockIdx.x * 8 + warp, next_step = 0;
  struct Both { Words<DEEP> of[2]; };
  const auto fetch = [&] {
    Both both;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = next_tile * TILE + row + 8 * half;
      both.of[half] = take_row<DEEP>(x + at * depth + next_step * DEEP, 8 * t, depth - next_step * DEEP, at < rows);
    }
    if (++next_step == steps) {
      next_step = 0;
      next_tile += warps;
    }
    return both;
  };
  float sum[TILES][4] = {}, k[TILES][2], first[TILES][2] = {}, second[TILES][2] = {};
  int step = 0, seen = 0;
  Both now = fetch(), soon = fetch();
  for (int tile = blockIdx.x * 8 + warp; tile < tiles;) {
    const Both later = fetch();
    const int from = step * DEEP + 8 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Pack<T, 2> pair = reinterpret_cast<const Pack<T, 2>&>(now.of[half].of[i]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          float z = fmaf(float(pair.v[v]), by[from + 2 * i + v], plus[from + 2 * i + v]);
          if (AFTER && z <= 0) z = 0;
          if (AFTER == CLIPPED && z > most) z = most;
          pair.v[v] = T(z);
        }
        now.of[half].of[i] = reinterpret_cast<const unsigned&>(pair);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned a[4] = {now.of[0].of[2 * half], now.of[1].of[2 * half], now.of[0].of[2 * half + 1],
                             now.of[1].of[2 * half + 1]};
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        const uint2 words = of_w[((step * 2 + half) * TILES + j) * 32 + lane];
        const unsigned b[2] = {words.x, words.y};
        multiply<T>(sum[j], a, b);
      }
    }
    now = soon;
    soon = later;
    if (++step < steps) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = tile * TILE + row + 8 * half;
      if (at >= rows) continue;
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        Pack<T, 2> pair;
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          pair.v[v] = T(sum[j][2 * half + v]);
          const float value = float(pair.v[v]);
          if (seen == 0) k[j][v] = value;
          const float d = value - k[j][v];
          first[j][v] += d;
          second[j][v] += d * d;
        }
        if (j * 8 + 2 * t < outputs) *reinterpret_cast<Pack<T, 2>*>(y + at * outputs + j * 8 + 2 * t) = pair;
      }
      ++seen;
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][i] = 0;
    step = 0;
    tile += warps;
  }
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const double start = seen ? double(k[j][v]) : 0.0, d = double(first[j][v]);
      double total = d + seen * start, squares = double(second[j][v]) + (2 * d + seen * start) * start;
#pragma unroll
      for (int between = 4; between < 32; between *= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, between);
        squares += __shfl_xor_sync(0xffffffffu, squares, between);
      }
      if (row == 0) {
        parts[warp][0][j * 8 + 2 * t + v] = total;
        parts[warp][1][j * 8 + 2 * t + v] = squares;
      }
    }
  add_warps(parts, partial, 0, outputs);
}

// The transpose of a matrix of 8 x 8 numbers of 16 bits, of which thread (g, t) has two of row g, from column 2 t on.
__device__ inline unsigned transposed(unsigned words) {
  unsigned turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(words));
  return turned;
}

// dx as g of narrow_sums for dy = factors * g + slope * z + rest (rows, depth), which a normalization of z would write; the
// line (2, depth) is slope and rest. And part (gridDim.x, depth, outputs), sums of dy^T * y over the rows of a block, where
// y is what the normalization of x gave. Both factors of these sums are at hand by rows, and are transposed for the mma.
template <typename T, int K, int AFTER> __global__ void __launch_bounds__(128, 3)
narrow_both(const T* g, const T* z, const float* factors, const float* line, const T* w, const T* x, const float* mean,
            const float* factor, const float* shift, double ceiling, T* dx, double* partial, float* part, i64 of_all,
            i64 across, i64 deep) {
  constexpr int WORDS = K / 8, DEPTHS = K / 16, WARPS = 4;
  __shared__ float parts[WARPS][2][GROUP], products[WARPS][K * GROUP];
  __shared__ __align__(16) float of_dy[3][K], of_x[3][GROUP];
  __shared__ __align__(16) unsigned of_w[4][32][WORDS];
  const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4, warp = threadIdx.x / 32, warps = gridDim.x * WARPS;
  const int from = t * (K / 4), first_output = blockIdx.y * GROUP, channel = first_output + 8 * t;
  const int rows = int(of_all), outputs = int(across), depth = int(deep), tiles = (rows + TILE - 1) / TILE;
  const bool inside = channel < outputs;
  const float most = float(ceiling);
  const unsigned short* const weights = reinterpret_cast<const unsigned short*>(w);
  for (int i = threadIdx.x; i < 4 * 32 * WORDS; i += 32 * WARPS) {
    const int j = i / (32 * WORDS), of = i / WORDS % 32, k = i % WORDS;
    const int output = first_output + of / 8 * 8 + 2 * j + of / 4 % 2, depth_of = of % 4 * (K / 4) + 2 * k;
    unsigned word = 0;
    for (int v = 0; v < 2; ++v)
      if (depth_of + v < depth && output < outputs)
        word |= unsigned(weights[(depth_of + v) * outputs + output]) << 16 * v;
    of_w[j][of][k] = word;
  }
  if (threadIdx.x < K) {
    const int d = threadIdx.x;
    of_dy[0][d] = d < depth ? factors[d] : 0.0f;
    of_dy[1][d] = d < depth ? line[d] : 0.0f;
    of_dy[2][d] = d < depth ? line[depth + d] : 0.0f;
  }
  if (threadIdx.x < GROUP) {
    const int c = first_output + threadIdx.x;
    of_x[0][threadIdx.x] = c < outputs ? mean[c] : 0.0f;
    of_x[1][threadIdx.x] = c < outputs ? factor[c] : 0.0f;
    of_x[2][threadIdx.x] = c < outputs ? shift[c] : 0.0f;
  }
  __syncthreads();
  const auto fetch = [&](const T* of, int tile, int half) {
    const int at = tile * TILE + row + 8 * half;
    return take_row<K>(of + at * depth, from, depth, at < rows);
  };
  const auto fetch_x = [&](int tile, int half) {
    const int at = tile * TILE + row + 8 * half;
    return inside && at < rows ? *reinterpret_cast<const uint4*>(x + at * outputs + channel) : make_uint4(0, 0, 0, 0);
  };
  float first[8] = {}, second[8] = {}, product[DEPTHS][4][4] = {};
  int tile = blockIdx.x * WARPS + warp;
  Words<K> of_g[2] = {fetch(g, tile, 0), fetch(g, tile, 1)}, of_z[2] = {fetch(z, tile, 0), fetch(z, tile, 1)};
  uint4 xs[2] = {fetch_x(tile, 0), fetch_x(tile, 1)};
  for (; tile < tiles; tile += warps) {
    const int at = tile * TILE + row;
    int thread = lane;  // of which the compiler does not know that, so that it keeps no numbers of channels in registers
    asm volatile("" : "+r"(thread));
    const int depths = thread % 4 * (K / 4), channels = thread % 4 * 8;
    Words<K> dy[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int k = 0; k < WORDS; ++k) {
        const Pack<T, 2> gs = reinterpret_cast<const Pack<T, 2>&>(of_g[half].of[k]);
        const Pack<T, 2> zs = reinterpret_cast<const Pack<T, 2>&>(of_z[half].of[k]);
        Pack<T, 2> pair;
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int d = depths + 2 * k + v;
          const float value = fmaf(of_dy[0][d], float(gs.v[v]), fmaf(of_dy[1][d], float(zs.v[v]), of_dy[2][d]));
          pair.v[v] = T(at + 8 * half < rows ? value : 0.0f);
        }
        dy[half].of[k] = reinterpret_cast<const unsigned&>(pair);
      }
    const uint4 now[2] = {xs[0], xs[1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_g[half] = fetch(g, tile + warps, half);
      of_z[half] = fetch(z, tile + warps, half);
      xs[half] = fetch_x(tile + warps, half);
    }
    float sum[4][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Words<K> words = *reinterpret_cast<const Words<K>*>(of_w[j][thread]);
#pragma unroll
      for (int k = 0; k < WORDS; k += 2) {
        const unsigned a[4] = {dy[0].of[k], dy[1].of[k], dy[0].of[k + 1], dy[1].of[k + 1]};
        const unsigned b[2] = {words.of[k], words.of[k + 1]};
        multiply<T>(sum[j], a, b);
      }
    }
    unsigned ys[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pack<T, 8>& pack = reinterpret_cast<const Pack<T, 8>&>(now[half]);
      Pack<T, 8> of_y, of_dx;
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const float value = float(pack.v[v]);
        float y = fmaf(value, of_x[1][channels + v], of_x[2][channels + v]), d = sum[v / 2][2 * half + v % 2];
        if (passes_nothing<AFTER>(y, most)) d = 0;
        if (AFTER && y <= 0) y = 0;
        if (AFTER == CLIPPED && y > most) y = most;
        first[v] += d;
        second[v] += d * (value - of_x[0][channels + v]);
        of_dx.v[v] = T(d);
        of_y.v[v] = T(y);
      }
      if (inside && at + 8 * half < rows)
        *reinterpret_cast<Pack<T, 8>*>(dx + (at + 8 * half) * outputs + channel) = of_dx;
#pragma unroll
      for (int j = 0; j < 4; ++j) ys[half][j] = transposed(reinterpret_cast<const unsigned*>(of_y.v)[j]);
    }
#pragma unroll
    for (int m = 0; m < DEPTHS; ++m) {
      const unsigned a[4] = {transposed(dy[0].of[2 * m]), transposed(dy[0].of[2 * m + 1]), transposed(dy[1].of[2 * m]),
                             transposed(dy[1].of[2 * m + 1])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned b[2] = {ys[0][j], ys[1][j]};
        multiply<T>(product[m][j], a, b);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < 8; ++v) {
#pragma unroll
    for (int between = 4; between < 32; between *= 2) {
      first[v] += __shfl_xor_sync(0xffffffffu, first[v], between);
      second[v] += __shfl_xor_sync(0xffffffffu, second[v], between);
    }
    if (row == 0) {
      parts[warp][0][8 * t + v] = first[v];
      parts[warp][1][8 * t + v] = second[v];
    }
  }
#pragma unroll
  for (int m = 0; m < DEPTHS; ++m)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = row / 2 * (K / 4) + 2 * (2 * m + i / 2) + row % 2, c = 8 * t + 2 * j + i % 2;
        products[warp][d * GROUP + c] = product[m][j][i];
      }
  add_warps(parts, partial, first_output, outputs);
  for (int i = threadIdx.x; i < K * GROUP; i += 32 * WARPS) {
    const int d = i / GROUP, c = first_output + i % GROUP;
    float all = 0;
    for (int other = 0; other < WARPS; ++other) all += products[other][i];
    if (d < depth && c < outputs) part[(i64(blockIdx.x) * depth + d) * outputs + c] = all;
  }
}
