// Copies between arrays of up to four axes with strides, in units of up to 16 bytes.

#include "pack.cuh"

// target[i3, i2, i1, i0] = source[i3, i2, i1, i0]; n sizes, s and t strides in units of T, the last axis first
template <typename T>
__global__ void copy(const T* source, T* target, i64 n0, i64 n1, i64 n2, i64 n3, i64 s0, i64 s1, i64 s2, i64 s3,
                     i64 t0, i64 t1, i64 t2, i64 t3) {
  const i64 n = n0 * n1 * n2 * n3;
  for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * i64(blockDim.x)) {
    const unsigned r1 = unsigned(i) / unsigned(n0), i0 = unsigned(i) - r1 * unsigned(n0);
    const unsigned r2 = r1 / unsigned(n1), i1 = r1 - r2 * unsigned(n1);
    const unsigned i3 = r2 / unsigned(n2), i2 = r2 - i3 * unsigned(n2);
    target[i0 * t0 + i1 * t1 + i2 * t2 + i3 * t3] = source[i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3];
  }
}
