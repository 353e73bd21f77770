// Gradients of biases, which are in the type of sums.

#include "pack.cuh"
#include "columns.cuh"

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
