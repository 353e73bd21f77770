// Biases and their gradients, which are in the type of sums; arrays are (N, O, P) as they lie, with P 1 for the rows of
// a matrix and for channels that lie last. All sums in a fixed order.

#include "pack.cuh"
#include "reduce.cuh"
#include "columns.cuh"

#define PACK (16 / sizeof(T))

// out += x
template <typename T> __global__ void accumulate(const T* x, T* out, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T x, T& y) { y = T(A(y) + A(x)); }, in(x), both(out));
}

// y[n, o, p] += b[o]
template <typename T> __global__ void add_bias(T* y, const Wide<T>* b, i64 images, i64 outputs, i64 positions) {
  Channel channel(outputs, positions);
  each<PACK>(
      images * outputs * positions, [=](i64 i, T& y) mutable { y = T(Wide<T>(y) + b[channel.at(i)]); }, both(y));
}

// Column sums of dy (M, O), see columns.cuh.
template <typename T>
__global__ void __launch_bounds__(512)
bias_gradient_rows(const T* dy, i64 rows, i64 columns, Wide<T>* db, Wide<T>* part, i64 shares) {
  const T* none = nullptr;
  over_columns(dy, none, nullptr, Wide<T>(1), (T*)nullptr, Sums<Wide<T>>{db, part, shares}, rows, columns);
}

// Likewise of float32 dy, and out = dy in another type
template <typename T>
__global__ void __launch_bounds__(512)
bias_gradient_narrowing(const float* dy, T* out, i64 rows, i64 columns, float* db, float* part, i64 shares) {
  const float* none = nullptr;
  over_columns(dy, none, nullptr, 1.0f, out, Sums<float>{db, part, shares}, rows, columns);
}

// What a lane of a warp adds of x[0 .. size).
template <typename T> __device__ Wide<T> lane_sum(const T* x, int size) {
  const int lane = threadIdx.x % 32;
  Wide<T> sum = 0;
  if (size % PACK == 0 && in(x).template fits<PACK>()) {
#pragma unroll 4
    for (int i = lane; i < size / int(PACK); i += 32) {
      const Pack<T, PACK> a = in(x).template load<PACK>(i);
#pragma unroll
      for (int j = 0; j < PACK; ++j) sum += Wide<T>(a.v[j]);
    }
  } else {
#pragma unroll 4
    for (int i = lane; i < size; i += 32) sum += Wide<T>(x[i]);
  }
  return sum;
}

// Sums over the lines of a share of dy[n, o, ...]; a plane makes ceil(P / length) lines, lines go round over the
// shares' images in order. Grid (O, shares), 256 threads: a warp takes every eighth line of its share.
template <typename T>
__global__ void bias_gradient_planes(const T* dy, i64 images, i64 outputs, i64 positions, i64 length,
                                     Wide<T>* db, Wide<T>* part, i64 shares) {
  __shared__ Wide<T> parts[8];
  const i64 o = blockIdx.x, share = blockIdx.y, lines = (positions + length - 1) / length, total = images * lines;
  const i64 lo = total * share / shares, hi = total * (share + 1) / shares;
  Wide<T> sum = 0;
  for (i64 line = lo + threadIdx.x / 32; line < hi; line += 8) {
    const i64 n = line / lines, p = line % lines * length;
    sum += lane_sum(dy + (n * outputs + o) * positions + p, int(min(length, positions - p)));
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < 8; ++warp) sum += parts[warp];
    Sums<Wide<T>>{db, part, shares}.add(o, sum);
  }
}

// db[o] += sum over s of part[o, s]; a warp for each o.
template <typename T> __global__ void bias_gradient_finish(const Wide<T>* part, Wide<T>* db, i64 outputs, i64 shares) {
  const i64 o = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32;
  if (o >= outputs) return;
  Wide<T> sum = 0;
  for (i64 s = threadIdx.x % 32; s < shares; s += 32) sum += part[o * shares + s];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) db[o] += sum;
}
