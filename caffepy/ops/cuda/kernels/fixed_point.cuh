// Sums in whole numbers, whose order does not matter: values in units of the largest one.

constexpr double ONE = 1ll << 40;  // of the sums, in units of the largest: 2^23 of these fit

__device__ double fixed_unit(const double* largest) { return *largest > 0 ? ONE / *largest : 0; }

__device__ void add(unsigned long long* sum, double value) { atomicAdd(sum, (unsigned long long)__double2ll_rn(value)); }

template <typename T>
__global__ void take_sums(const long long* sums, const double* largest, T* dx, i64 count) {
  FOR_EACH(k, count) dx[k] = T(double(sums[k]) * (*largest / ONE));
}
