// What products need besides.

#include "pack.cuh"

// out += scale * x
template <typename T> __global__ void accumulate(const T* x, T* out, i64 n, double scale) {
  const Wide<T> s = Wide<T>(scale);
  each<PACK>(n, [=](i64, T x, T& y) { y = T(Wide<T>(y) + s * Wide<T>(x)); }, in(x), both(out));
}
