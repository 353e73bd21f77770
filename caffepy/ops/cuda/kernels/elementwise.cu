// Sums and products of arrays of one shape.

#include "pack.cuh"
#include "reduce.cuh"

// y = alpha * x
template <typename T> __global__ void scaled(const T* x, T* y, i64 n, NUMBER(alpha)) {
  using A = Wide<T>;
  const A a = A(VALUE(alpha));
  each<PACK>(n, [=](i64, T x, T& y) { y = T(a * A(x)); }, in(x), out(y));
}

// y += alpha * x
template <typename T> __global__ void axpy(const T* x, T* y, i64 n, NUMBER(alpha)) {
  using A = Wide<T>;
  const A a = A(VALUE(alpha));
  each<PACK>(n, [=](i64, T x, T& y) { y = T(A(y) + a * A(x)); }, in(x), both(y));
}

// z = x * y
template <typename T> __global__ void multiply(const T* x, const T* y, T* z, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T x, T y, T& z) { z = T(A(x) * A(y)); }, in(x), in(y), out(z));
}

template <typename T, int K> struct Sum {
  const T* x[8];
  Wide<T> a[8];
  T* y;

  // packs [lo, hi) of V elements
  template <int V> __device__ void write(i64 lo, i64 hi) const {
    for (i64 i = lo + blockIdx.x * i64(blockDim.x) + threadIdx.x; i < hi; i += gridDim.x * i64(blockDim.x)) {
      Pack<T, V> terms[K], sum;
#pragma unroll
      for (int k = 0; k < K; ++k) terms[k] = reinterpret_cast<const Pack<T, V>*>(x[k])[i];
#pragma unroll
      for (int v = 0; v < V; ++v) {
        Wide<T> total = a[0] * Wide<T>(terms[0].v[v]);
#pragma unroll
        for (int k = 1; k < K; ++k) total += a[k] * Wide<T>(terms[k].v[v]);
        sum.v[v] = T(total);
      }
      reinterpret_cast<Pack<T, V>*>(y)[i] = sum;
    }
  }
};

// y = a0 * x0 + a1 * x1 + ... for the first K of them
template <typename T, int K>
__global__ void eltwise_sum(T* y, i64 n, const T* x0, const T* x1, const T* x2, const T* x3, const T* x4, const T* x5,
                            const T* x6, const T* x7, double a0, double a1, double a2, double a3, double a4, double a5,
                            double a6, double a7) {
  using A = Wide<T>;
  const Sum<T, K> sum{{x0, x1, x2, x3, x4, x5, x6, x7}, {A(a0), A(a1), A(a2), A(a3), A(a4), A(a5), A(a6), A(a7)}, y};
  bool whole = aligned(y, 16);
#pragma unroll
  for (int k = 0; k < K; ++k) whole = whole && aligned(sum.x[k], 16);
  const i64 packs = whole ? n / PACK : 0;
  sum.template write<PACK>(0, packs);
  sum.template write<1>(packs * PACK, n);
}

// y = the larger of x0 and x1, index = which; x1 where neither is larger
template <typename T> __global__ void first_max(const T* x0, const T* x1, T* y, i64 n, int* index) {
  using A = Wide<T>;
  each<PACK>(
      n,
      [=](i64, T x0, T x1, T& y, int& index) {
        const bool first = A(x0) > A(x1);
        y = first ? x0 : x1;
        index = first ? 0 : 1;
      },
      in(x0), in(x1), out(y), out(index));
}

// y = x, index = rank where x is larger than y
template <typename T> __global__ void next_max(const T* x, T* y, i64 n, int* index, i64 rank) {
  using A = Wide<T>;
  each<PACK>(
      n,
      [=](i64, T x, T& y, int& index) {
        if (A(x) > A(y)) {
          y = x;
          index = int(rank);
        }
      },
      in(x), both(y), both(index));
}

// dx = index == rank ? dy : 0
template <typename T> __global__ void select(const T* dy, T* dx, i64 n, const int* index, i64 rank) {
  each<PACK>(n, [=](i64, int index, T dy, T& dx) { dx = index == int(rank) ? dy : T(0.0f); }, in(index), in(dy), out(dx));
}

// partial_b = sum over block b's share of x * y, in double precision
template <typename T> __global__ void __launch_bounds__(256) dot(const T* x, const T* y, double* partial, i64 n) {
  double sum = 0;
  each<PACK>(n, [&sum](i64, T x, T y) { sum += double(x) * double(y); }, in(x), in(y));
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// sum = partial_0 + partial_1 + ..., by one block
template <typename T> __global__ void dot_finish(const double* partial, double* sum, i64 n) {
  double part = 0;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) part += partial[i];
  part = block_sum(part);
  if (threadIdx.x == 0) *sum = part;
}
