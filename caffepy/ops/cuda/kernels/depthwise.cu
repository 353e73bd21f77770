// Convolutions of each channel by itself with a kernel of 3 x 3, channels last, weights float32 (C, 1, 3, 3):
//   y[n, i, j, c] = sum over r, s of x[n, i * S + r - p, j * S + s - q, c] * w[c, r, s]
// A thread takes V channels, whose weights follow each other in memory and stay in its registers, of COLUMNS pixels of
// some lines. Sums are in a fixed order.

#include "pack.cuh"

constexpr int COLUMNS = 4;
constexpr int TAPS = 9;

struct Sizes {
  i64 images, height, width, channels;  // of the target
  i64 lines, columns;                   // of the source
  i64 top, left;                        // padding
  i64 run;                              // lines of a thread
};

#define SIZES                                                                                                  \
  i64 images, i64 height, i64 width, i64 channels, i64 lines, i64 columns, i64 top, i64 left, i64 run
#define GIVEN {images, height, width, channels, lines, columns, top, left, run}

template <int V> struct Weights {
  float v[V][TAPS];
  __device__ Weights(const float* w, i64 channel) {
#pragma unroll
    for (int k = 0; k < V; ++k)
#pragma unroll
      for (int t = 0; t < TAPS; ++t) v[k][t] = w[(channel + k) * TAPS + t];
  }
};

template <typename T, int V>
__device__ bool load(const T* source, const Sizes& z, i64 n, i64 line, i64 column, i64 channel, float (&to)[V]) {
  if (line < 0 || line >= z.lines || column < 0 || column >= z.columns) return false;
  const i64 at = ((n * z.lines + line) * z.columns + column) * z.channels + channel;
  const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(source + at);
#pragma unroll
  for (int k = 0; k < V; ++k) to[k] = float(pack.v[k]);
  return true;
}

// f(n, first line, first column, channel) for the part of the target of each thread.
template <int V, typename F> __device__ void parts(const Sizes& z, F f) {
  const i64 packs = z.channels / V, across = (z.width + COLUMNS - 1) / COLUMNS, down = (z.height + z.run - 1) / z.run;
  FOR_EACH(k, z.images * down * across * packs) {
    const unsigned pack = unsigned(k % packs), place = unsigned(k / packs);
    const unsigned column = place % unsigned(across), rest = place / unsigned(across);
    f(i64(rest / unsigned(down)), i64(rest % unsigned(down)) * z.run, i64(column) * COLUMNS, i64(pack) * V);
  }
}

template <typename T, int V>
__device__ void store(T* target, const Sizes& z, i64 n, i64 line, i64 column, i64 channel, const float (&sum)[V]) {
  Pack<T, V> pack;
#pragma unroll
  for (int k = 0; k < V; ++k) pack.v[k] = T(sum[k]);
  *reinterpret_cast<Pack<T, V>*>(target + ((n * z.height + line) * z.width + column) * z.channels + channel) = pack;
}

// FLIP: the gradient of the source for a stride of 1 is the same with the kernel turned around.
template <typename T, int V, int STRIDE, int FLIP>
__global__ void __launch_bounds__(256)
depthwise(const T* x, const float* w, const float* b, T* y, i64 relu, SIZES) {
  const Sizes z GIVEN;
  parts<V>(z, [&](i64 n, i64 first, i64 column, i64 channel) {
    const Weights<V> weights(w, channel);
    const i64 end = min(first + z.run, z.height);
    for (i64 line = first; line < end; ++line) {
      float sum[COLUMNS][V];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
        for (int k = 0; k < V; ++k) sum[j][k] = b ? b[channel + k] : 0.0f;
#pragma unroll
      for (int r = 0; r < 3; ++r) {
#pragma unroll
        for (int at = 0; at < (COLUMNS - 1) * STRIDE + 3; ++at) {
          float values[V];
          if (!load<T, V>(x, z, n, line * STRIDE + r - z.top, column * STRIDE + at - z.left, channel, values)) continue;
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) {
            const int s = at - j * STRIDE;
            if (s < 0 || s > 2) continue;
#pragma unroll
            for (int k = 0; k < V; ++k) sum[j][k] += values[k] * weights.v[k][FLIP ? 8 - (3 * r + s) : 3 * r + s];
          }
        }
      }
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        if (column + j >= z.width) break;
#pragma unroll
        for (int k = 0; k < V; ++k) sum[j][k] = relu && sum[j][k] < 0 ? 0.0f : sum[j][k];
        store<T, V>(y, z, n, line, column + j, channel, sum[j]);
      }
    }
  });
}

// The gradient of the source for a stride of 2: of the taps only those with an output between.
template <typename T, int V>
__global__ void __launch_bounds__(256) depthwise_spread(const T* dy, const float* w, T* dx, SIZES) {
  const Sizes z GIVEN;
  parts<V>(z, [&](i64 n, i64 first, i64 column, i64 channel) {
    const Weights<V> weights(w, channel);
    const i64 end = min(first + z.run, z.height);
    for (i64 line = first; line < end; ++line) {
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        if (column + j >= z.width) break;
        float sum[V] = {};
#pragma unroll
        for (int r = 0; r < 3; ++r) {
          const i64 down = line + z.top - r;
          if (down & 1) continue;
#pragma unroll
          for (int s = 0; s < 3; ++s) {
            const i64 across = column + j + z.left - s;
            float values[V];
            if ((across & 1) || !load<T, V>(dy, z, n, down >> 1, across >> 1, channel, values)) continue;
#pragma unroll
            for (int k = 0; k < V; ++k) sum[k] += values[k] * weights.v[k][3 * r + s];
          }
        }
        store<T, V>(dx, z, n, line, column + j, channel, sum);
      }
    }
  });
}

// Sums over a share of the lines of dy: part (shares, 10, C), of the nine weights and of the bias. A block takes
// blockDim.x packs of channels, and its threads in y take lines in turn.
template <typename T, int V, int STRIDE>
__global__ void __launch_bounds__(256) depthwise_gradient(const T* x, const T* dy, float* part, SIZES) {
  const Sizes z GIVEN;
  extern __shared__ float sums[];  // (blockDim.y, blockDim.x * V)
  const i64 channel = (blockIdx.x * i64(blockDim.x) + threadIdx.x) * V;
  const bool active = channel < z.channels;
  float total[TAPS + 1][V] = {};
  const i64 step = i64(gridDim.y) * blockDim.y;
  for (i64 k = blockIdx.y * i64(blockDim.y) + threadIdx.y; active && k < z.images * z.height; k += step) {
    const i64 n = k / z.height, line = k % z.height;
    for (i64 column = 0; column < z.width; ++column) {
      float d[V];
      const i64 at = (k * z.width + column) * z.channels + channel;
      const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(dy + at);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        d[v] = float(pack.v[v]);
        total[TAPS][v] += d[v];
      }
#pragma unroll
      for (int r = 0; r < 3; ++r)
#pragma unroll
        for (int s = 0; s < 3; ++s) {
          float values[V];
          if (!load<T, V>(x, z, n, line * STRIDE + r - z.top, column * STRIDE + s - z.left, channel, values)) continue;
#pragma unroll
          for (int v = 0; v < V; ++v) total[3 * r + s][v] += d[v] * values[v];
        }
    }
  }
  const int across = blockDim.x * V, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int t = 0; t <= TAPS; ++t) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) sums[threadIdx.y * across + threadIdx.x * V + v] = total[t][v];
    __syncthreads();
    for (int c = thread; c < across; c += blockDim.x * blockDim.y) {
      const i64 to = blockIdx.x * i64(across) + c;
      if (to >= z.channels) continue;
      float sum = 0;
      for (int row = 0; row < blockDim.y; ++row) sum += sums[row * across + c];
      part[(blockIdx.y * i64(TAPS + 1) + t) * z.channels + to] = sum;
    }
  }
}

// Adds the shares to the gradients of the weights and, unless it is null, of the bias.
__global__ void add_depthwise(const float* part, float* dw, float* db, i64 shares, i64 channels) {
  FOR_EACH(k, (TAPS + 1) * channels) {
    const i64 t = k / channels, c = k % channels;
    float* to = t < TAPS ? dw + c * TAPS + t : db ? db + c : nullptr;
    if (!to) continue;
    float sum = 0;
    for (i64 share = 0; share < shares; ++share) sum += part[share * (TAPS + 1) * channels + k];
    *to += sum;
  }
}
