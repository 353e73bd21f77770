// Vectors across the channels of (outer, C, inner), divided by their norms:
// y = x / n, n = sqrt(sum of x^2 + eps) or sum of |x| + eps;  dx = (dy - s * sum of y * dy) / n + s * dn, s = y or sign(y).
// With LINES a block takes a vector, whose elements follow each other; else a thread does.

#include "pack.cuh"
#include "reduce.cuh"

// The elements of a vector that a thread takes: from `first` in steps, `stride` apart in memory.
template <bool LINES> struct Vector {
  i64 start, stride, channels;
  __device__ Vector(i64 vector, i64 channels, i64 inner)
      : start(vector / inner * channels * inner + vector % inner), stride(inner), channels(channels) {}
  template <typename F> __device__ void each(F f) const {
    for (i64 c = LINES ? threadIdx.x : 0; c < channels; c += LINES ? blockDim.x : 1) f(start + c * stride);
  }
  // The sum of f over the whole vector, for all its threads.
  template <typename A, typename F> __device__ A sum(F f) const {
    A total = 0;
    each([&](i64 at) { total += f(at); });
    return LINES ? block_sum(total) : total;
  }
};

// f(number of the vector, its elements) for the vectors of a thread.
template <bool LINES, typename F> __device__ void vectors(i64 outer, i64 channels, i64 inner, F f) {
  if constexpr (LINES) {
    for (i64 i = blockIdx.x; i < outer; i += gridDim.x) f(i, Vector<LINES>(i, channels, 1));
  } else {
    FOR_EACH(i, outer * inner) f(i, Vector<LINES>(i, channels, inner));
  }
}

template <typename T, bool LINES>
__global__ void normalize_forward(const T* x, T* y, Wide<T>* norm, double eps, i64 absolute, i64 outer, i64 channels,
                                  i64 inner) {
  using A = Wide<T>;
  vectors<LINES>(outer, channels, inner, [=](i64 i, const Vector<LINES>& vector) {
    const A total = A(eps) + vector.template sum<A>([=](i64 at) {
      const A v = A(x[at]);
      return absolute ? abs(v) : v * v;
    });
    const A n = absolute ? total : sqrt(total);
    if (!LINES || threadIdx.x == 0) norm[i] = n;
    vector.each([=](i64 at) { y[at] = T(A(x[at]) / n); });
  });
}

template <typename T, bool LINES>
__global__ void normalize_backward(const T* y, const Wide<T>* norm, const T* dy, const Wide<T>* dnorm, T* dx,
                                   i64 absolute, i64 outer, i64 channels, i64 inner) {
  using A = Wide<T>;
  vectors<LINES>(outer, channels, inner, [=](i64 i, const Vector<LINES>& vector) {
    const A n = norm[i];
    const A total = vector.template sum<A>([=](i64 at) { return A(y[at]) * A(dy[at]); }) / n - (dnorm ? dnorm[i] : A(0));
    vector.each([=](i64 at) {
      const A v = A(y[at]);
      const A slope = absolute ? A(v > 0) - A(v < 0) : v;
      dx[at] = T(A(dy[at]) / n - slope * total);
    });
  });
}

// With a scale for each channel, channels last: y = x / n * scale; dx = scale * (dy - x * sum of x * dy / n^2) / n,
// dscale = sum of dy * x / n. A warp takes a vector and holds it, in packs of V channels, H of them a lane.
template <typename T, int V, int H> struct Held {
  Pack<T, V> packs[H];
  __device__ Held(const T* x, i64 vector, int channels) {
    each(channels, [&](int h, int c) {
      packs[h] = *reinterpret_cast<const Pack<T, V>*>(x + vector * channels + c);
    });
  }
  // f(pack, its first channel) for the packs of a lane.
  template <typename F> static __device__ void each(int channels, F f) {
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const int c = (h * 32 + int(threadIdx.x % 32)) * V;
      if (c < channels) f(h, c);
    }
  }
};

// The scales of a lane's channels.
template <typename A, int V, int H> struct Scales {
  A of[H][V];
  template <typename T> __device__ Scales(const A* scale, int channels, T) {
    Held<T, V, H>::each(channels, [&](int h, int c) {
#pragma unroll
      for (int v = 0; v < V; ++v) of[h][v] = scale[c + v];
    });
  }
};

template <typename T, int V, int H>
__global__ void __launch_bounds__(256)
scaled_norm_forward(const T* x, const Wide<T>* scale, T* y, Wide<T>* norm, double eps, i64 vectors, i64 count) {
  using A = Wide<T>;
  using Lane = Held<T, V, H>;
  const int channels = int(count);
  const Scales<A, V, H> scales(scale, channels, T());
  for (i64 i = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32; i < vectors; i += gridDim.x * i64(blockDim.x) / 32) {
    Lane lane(x, i, channels);
    A total = 0;
    Lane::each(channels, [&](int h, int) {
#pragma unroll
      for (int v = 0; v < V; ++v) total += A(lane.packs[h].v[v]) * A(lane.packs[h].v[v]);
    });
    const A n = sqrt(A(eps) + warp_sum(total)), inverse = 1 / n;
    if (threadIdx.x % 32 == 0) norm[i] = n;
    Lane::each(channels, [&](int h, int c) {
      Pack<T, V> pack;
#pragma unroll
      for (int v = 0; v < V; ++v) pack.v[v] = T(A(lane.packs[h].v[v]) * inverse * scales.of[h][v]);
      *reinterpret_cast<Pack<T, V>*>(y + i * channels + c) = pack;
    });
  }
}

// part (blocks, C) gets the sums of each block for dscale; dx may be dy, or null.
template <typename T, int V, int H>
__global__ void __launch_bounds__(256)
scaled_norm_backward(const T* x, const Wide<T>* scale, const Wide<T>* norm, const T* dy, T* dx, Wide<T>* part,
                     i64 vectors, i64 count) {
  using A = Wide<T>;
  using Lane = Held<T, V, H>;
  extern __shared__ double shared[];  // (warps, C)
  const int channels = int(count), warps = blockDim.x / 32;
  const Scales<A, V, H> scales(scale, channels, T());
  A sums[H][V] = {};
  for (i64 i = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32; i < vectors; i += gridDim.x * i64(blockDim.x) / 32) {
    const Lane a(x, i, channels), b(dy, i, channels);
    const A inverse = 1 / norm[i];
    A total = 0;
    Lane::each(channels, [&](int h, int) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const A product = A(a.packs[h].v[v]) * A(b.packs[h].v[v]);
        total += product;
        sums[h][v] += product * inverse;
      }
    });
    const A slope = warp_sum(total) * inverse * inverse;
    if (!dx) continue;
    Lane::each(channels, [&](int h, int c) {
      Pack<T, V> pack;
#pragma unroll
      for (int v = 0; v < V; ++v)
        pack.v[v] = T(scales.of[h][v] * (A(b.packs[h].v[v]) - A(a.packs[h].v[v]) * slope) * inverse);
      *reinterpret_cast<Pack<T, V>*>(dx + i * channels + c) = pack;
    });
  }
  A* own = reinterpret_cast<A*>(shared);
  Lane::each(channels, [&](int h, int c) {
#pragma unroll
    for (int v = 0; v < V; ++v) own[threadIdx.x / 32 * channels + c + v] = sums[h][v];
  });
  __syncthreads();
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    A sum = 0;
    for (int w = 0; w < warps; ++w) sum += own[w * channels + c];
    part[blockIdx.x * i64(channels) + c] = sum;
  }
}

// dscale += the sums of all blocks, by blocks of (32, 8) threads.
template <typename T>
__global__ void add_scales(const T* part, T* dscale, i64 blocks, i64 channels) {
  __shared__ double sums[8][32];
  const i64 c = blockIdx.x * i64(32) + threadIdx.x;
  double sum = 0;
  if (c < channels)
    for (i64 block = threadIdx.y; block < blocks; block += 8) sum += double(part[block * channels + c]);
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || c >= channels) return;
  for (int row = 1; row < 8; ++row) sum += sums[row][threadIdx.x];
  dscale[c] += T(sum);
}
