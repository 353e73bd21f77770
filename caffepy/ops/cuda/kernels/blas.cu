// What products need besides.

#include "pack.cuh"

// out += x
template <typename T> __global__ void accumulate(const T* x, T* out, i64 n) {
  each<16 / sizeof(T)>(n, [=](i64, T x, T& y) { y = T(Wide<T>(y) + Wide<T>(x)); }, in(x), both(out));
}
