// Sums and products of arrays of one shape.

#include "pack.cuh"
#include "reduce.cuh"

#define PACK (16 / sizeof(T))
#define NUMBER(name) double name, const void *name##_at, i64 name##_kind
#define VALUE(name) A(number(name, name##_at, name##_kind))

// y = alpha * x
template <typename T>
__global__ void scaled(const T* x, T* y, i64 n, NUMBER(alpha)) {
  using A = Wide<T>;
  const A a = VALUE(alpha);
  each<PACK>(n, [=](i64, T x, T& y) { y = T(a * A(x)); }, in(x), out(y));
}

// y += alpha * x
template <typename T>
__global__ void axpy(const T* x, T* y, i64 n, NUMBER(alpha)) {
  using A = Wide<T>;
  const A a = VALUE(alpha);
  each<PACK>(n, [=](i64, T x, T& y) { y = T(A(y) + a * A(x)); }, in(x), both(y));
}

// z = x * y
template <typename T>
__global__ void multiply(const T* x, const T* y, T* z, i64 n) {
  using A = Wide<T>;
  each<PACK>(n, [=](i64, T x, T y, T& z) { z = T(A(x) * A(y)); }, in(x), in(y), out(z));
}

// y = a0 * x0 + a1 * x1
template <typename T>
__global__ void sum_2(const T* x0, const T* x1, T* y, i64 n, NUMBER(a0), NUMBER(a1)) {
  using A = Wide<T>;
  const A a = VALUE(a0), b = VALUE(a1);
  each<PACK>(n, [=](i64, T x0, T x1, T& y) { y = T(a * A(x0) + b * A(x1)); }, in(x0), in(x1), out(y));
}

// y = a0 * x0 + a1 * x1 + a2 * x2
template <typename T>
__global__ void sum_3(const T* x0, const T* x1, const T* x2, T* y, i64 n, NUMBER(a0), NUMBER(a1), NUMBER(a2)) {
  using A = Wide<T>;
  const A a = VALUE(a0), b = VALUE(a1), c = VALUE(a2);
  each<PACK>(
      n, [=](i64, T x0, T x1, T x2, T& y) { y = T(a * A(x0) + b * A(x1) + c * A(x2)); }, in(x0), in(x1), in(x2), out(y));
}

// y = a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
template <typename T>
__global__ void sum_4(const T* x0, const T* x1, const T* x2, const T* x3, T* y, i64 n, NUMBER(a0), NUMBER(a1),
                      NUMBER(a2), NUMBER(a3)) {
  using A = Wide<T>;
  const A a = VALUE(a0), b = VALUE(a1), c = VALUE(a2), d = VALUE(a3);
  each<PACK>(
      n, [=](i64, T x0, T x1, T x2, T x3, T& y) { y = T(a * A(x0) + b * A(x1) + c * A(x2) + d * A(x3)); }, in(x0), in(x1),
      in(x2), in(x3), out(y));
}

// y = the larger of x0 and x1, index = which; x1 where neither is larger
template <typename T>
__global__ void first_max(const T* x0, const T* x1, T* y, int* index, i64 n) {
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
template <typename T>
__global__ void next_max(const T* x, T* y, int* index, i64 n, i64 rank) {
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
template <typename T>
__global__ void select(const int* index, const T* dy, T* dx, i64 n, i64 rank) {
  each<PACK>(n, [=](i64, int index, T dy, T& dx) { dx = index == int(rank) ? dy : T(0.0f); }, in(index), in(dy), out(dx));
}

// partial_b = sum over block b's share of x * y, in double precision
template <typename T>
__global__ void __launch_bounds__(256) dot(const T* x, const T* y, double* partial, i64 n) {
  double sum = 0;
  each<PACK>(n, [&sum](i64, T x, T y) { sum += double(x) * double(y); }, in(x), in(y));
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// sum = partial_0 + partial_1 + ..., by one block
template <typename T>
__global__ void dot_finish(const double* partial, double* sum, i64 n) {
  double part = 0;
  for (i64 i = threadIdx.x; i < n; i += blockDim.x) part += partial[i];
  part = block_sum(part);
  if (threadIdx.x == 0) *sum = part;
}
