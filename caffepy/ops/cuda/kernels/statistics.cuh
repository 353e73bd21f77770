// What a normalization makes of mean and variance of a channel.

// numbers (4, C): mean, inverse = 1 / sqrt(variance + eps), factor = scale * inverse, shift = bias - mean * factor
template <typename A>
__device__ inline void write_numbers(A* numbers, i64 c, i64 channels, double mean, double variance, double eps,
                              const A* scale, const A* bias) {
  const double inverse = 1 / sqrt(variance + eps);
  const A factor = A(scale ? double(scale[c]) * inverse : inverse);
  numbers[c] = A(mean);
  numbers[channels + c] = A(inverse);
  numbers[2 * channels + c] = factor;
  numbers[3 * channels + c] = A((bias ? double(bias[c]) : 0.0) - mean * double(factor));
}

// What the variance of so many elements is multiplied by, to be that of all that they are taken of.
__device__ inline double unbiased(double count) { return count > 1 ? count / (count - 1) : 1.0; }

// Running sums: mean * fraction + mean, variance * fraction + unbiased, weight * fraction + 1.
template <typename A>
__device__ void update_running(A* mean, A* variance, A* weight, i64 c, double of_mean, double of_unbiased,
                               double fraction) {
  mean[c] = A(double(mean[c]) * fraction + of_mean);
  variance[c] = A(double(variance[c]) * fraction + of_unbiased);
  if (c == 0) *weight = A(double(*weight) * fraction + 1);
}
