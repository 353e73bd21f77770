// Convolutions with a kernel of 1 whose output x = y * w (rows, O) a normalization reads, without that x: what is needed of
// it follows from the input y (rows, K), with fewer channels, and from products of the input with itself and with the
// gradient g (rows, O) of what the normalization gives. With m rows, s = means of y, C = (y - s)^T (y - s) / m:
//
//   mean of x = w s,  variance of x = diag(w C w^T)
//   p = sums of g,  P = g^T y - p s^T (O, K)
//   q = sums of g * (x - mean) = diag(P w^T)
//   dx = factor * g + slope * x + rest,  slope = -factor * inverse^2 * q / m,  rest so that sums of dx are 0
//   dw = factor * P + slope * m * w C
//   dy = g (factor * w) + y M + base,  M = w^T (slope * w) (K, K),  base = -p / m (factor * w) - s M
//
// w is (O, K) here. C is wrong by a millionth of the squares of the means: inputs whose deviations are below a hundredth of
// their means give variances that are wrong by a hundredth. Sums are added up in a fixed order. factor * w and M are rounded to T before base is computed with them:
// their errors multiply g and y without their means.

#include "pack.cuh"
#include "reduce.cuh"
#include "statistics.cuh"

// Kernels have blocks of MANY threads: thread t is of channel t % K of the input and has every MANY / K-th of
// what it adds up, the part t / K. K is at most LARGEST; blocks over outputs have EACH of them.
constexpr int MANY = 1024, LARGEST = 128, EACH = 2;

// means (K) = s, covariance (K, K) = C; a block for each row of C.
template <typename T> __global__ void __launch_bounds__(MANY, 1)
covariance_finish(const float* products, const float* sums, float* covariance, float* means, int rows, int inputs,
                  int streams) {
  __shared__ double parts[2][MANY], mean[LARGEST];
  const int t = threadIdx.x, part = t / inputs, channel = t % inputs, count = MANY / inputs, row = blockIdx.x;
  double product = 0, sum = 0;
  if (part < count)
#pragma unroll 4
    for (int stream = part; stream < streams; stream += count) {
      product += double(products[(i64(stream) * inputs + row) * inputs + channel]);
      sum += double(sums[i64(stream) * inputs + channel]);
    }
  parts[0][t] = product;
  parts[1][t] = sum;
  __syncthreads();
  if (part == 0) {
    for (int other = 1; other < count; ++other) {
      product += parts[0][other * inputs + channel];
      sum += parts[1][other * inputs + channel];
    }
    mean[channel] = sum / rows;
  }
  __syncthreads();
  if (part) return;
  covariance[i64(row) * inputs + channel] = float(product / rows - mean[row] * mean[channel]);
  if (channel == row) means[row] = float(mean[row]);
}

// What blocks of EACH outputs have of w: rows of it, zeros behind the last.
template <typename T>
__device__ void take_weights(float (&of_w)[EACH][LARGEST], const T* w, int first, int outputs, int inputs) {
  for (int at = threadIdx.x; at < EACH * inputs; at += MANY) {
    const int each = at / inputs, channel = at % inputs;
    of_w[each][channel] = first + each < outputs ? float(w[i64(first + each) * inputs + channel]) : 0.f;
  }
}

// by_w (O, K) = w C; numbers and running sums of the normalization as by prepare_finish.
template <typename T> __global__ void __launch_bounds__(MANY, 1)
covariance_prepare(const T* w, const float* covariance, const float* means, float* by_w, float* mean, float* variance,
                   float* weight, const float* scale, const float* bias, float* numbers, double fraction, double eps,
                   int rows, int outputs, int inputs) {
  __shared__ float of_w[EACH][LARGEST], by[EACH][LARGEST], parts[EACH][MANY];
  const int t = threadIdx.x, part = t / inputs, channel = t % inputs, count = MANY / inputs;
  const int first = blockIdx.x * EACH, warp = t / 32;
  take_weights(of_w, w, first, outputs, inputs);
  __syncthreads();
  float sum[EACH] = {};
  if (part < count)
#pragma unroll 4
    for (int i = part; i < inputs; i += count) {
      const float c = covariance[i64(i) * inputs + channel];
#pragma unroll
      for (int each = 0; each < EACH; ++each) sum[each] += of_w[each][i] * c;
    }
#pragma unroll
  for (int each = 0; each < EACH; ++each) parts[each][t] = sum[each];
  __syncthreads();
  for (int at = t; at < EACH * inputs; at += MANY) {
    const int each = at / inputs, i = at % inputs;
    float all = 0;
    for (int other = 0; other < count; ++other) all += parts[each][other * inputs + i];
    by[each][i] = all;
    if (first + each < outputs) by_w[i64(first + each) * inputs + i] = all;
  }
  __syncthreads();
  if (warp >= EACH || first + warp >= outputs) return;
  double of_x = 0, spread = 0;
  for (int i = t % 32; i < inputs; i += 32) {
    of_x += double(of_w[warp][i]) * double(means[i]);
    spread += double(of_w[warp][i]) * double(by[warp][i]);
  }
  of_x = warp_sum(of_x);
  spread = warp_sum(spread);
  if (t % 32) return;
  const int o = first + warp;
  if (spread < 0) spread = 0;
  write_numbers(numbers, o, outputs, of_x, spread, eps, scale, bias);
  update_running(mean, variance, weight, o, of_x, spread * unbiased(double(rows)), fraction);
}

// dw += its gradient, dscale += q * inverse, dbias += p; the line (2, O) is slope and p, joined (O + K, K) begins with
// factor * w.
template <typename T> __global__ void __launch_bounds__(MANY, 1)
covariance_gradient(const float* products, const float* sums, const T* w, const float* by_w, const float* means,
                    const float* inverse, const float* factor, float* dw, float* dscale, float* dbias, float* line,
                    T* joined, int rows, int outputs, int inputs, int streams) {
  __shared__ double parts[EACH][MANY], of_g[EACH];
  __shared__ float of_w[EACH][LARGEST], of_p[EACH][LARGEST], slopes[EACH];
  const int t = threadIdx.x, part = t / inputs, channel = t % inputs, count = MANY / inputs;
  const int first = blockIdx.x * EACH, warp = t / 32, there = min(EACH, outputs - first);
  take_weights(of_w, w, first, outputs, inputs);
  double sum[EACH] = {};
  if (part < count)
#pragma unroll 2
    for (int stream = part; stream < streams; stream += count)
#pragma unroll
      for (int each = 0; each < EACH; ++each)
        if (each < there) sum[each] += double(products[(i64(stream) * outputs + first + each) * inputs + channel]);
#pragma unroll
  for (int each = 0; each < EACH; ++each) parts[each][t] = sum[each];
  if (warp < there) {
    double p = 0;
    for (int stream = t % 32; stream < streams; stream += 32) p += double(sums[i64(stream) * outputs + first + warp]);
    p = warp_sum(p);
    if (t % 32 == 0) of_g[warp] = p;
  }
  __syncthreads();
  for (int at = t; at < there * inputs; at += MANY) {
    const int each = at / inputs, i = at % inputs;
    double all = 0;
    for (int other = 0; other < count; ++other) all += parts[each][other * inputs + i];
    of_p[each][i] = float(all - of_g[each] * double(means[i]));
  }
  __syncthreads();
  if (warp < there) {
    double q = 0;
    for (int i = t % 32; i < inputs; i += 32) q += double(of_w[warp][i]) * double(of_p[warp][i]);
    q = warp_sum(q);
    if (t % 32 == 0) {
      const int o = first + warp;
      const double r = double(inverse[o]), p = of_g[warp];
      if (dscale) dscale[o] = float(double(dscale[o]) + q * r);
      if (dbias) dbias[o] = float(double(dbias[o]) + p);
      slopes[warp] = line[o] = float(-double(factor[o]) * r * r * q / rows);
      line[outputs + o] = float(p);
    }
  }
  __syncthreads();
  for (int at = t; at < there * inputs; at += MANY) {
    const int each = at / inputs, i = at % inputs;
    const i64 to = i64(first + each) * inputs + i;
    const float f = factor[first + each];
    if (dw) dw[to] += f * of_p[each][i] + slopes[each] * float(rows) * by_w[to];
    joined[to] = T(f * of_w[each][i]);
  }
}

// joined goes on with M, and base; a block for each row of M, which is symmetric to the last bit.
template <typename T> __global__ void __launch_bounds__(MANY, 1)
covariance_factors(const T* w, const float* line, const float* means, T* joined, float* base, int rows, int outputs,
                   int inputs) {
  __shared__ float parts[MANY], of_g[MANY / 8];
  __shared__ double by_mean[LARGEST];
  const int t = threadIdx.x, part = t / inputs, channel = t % inputs, count = MANY / inputs, row = blockIdx.x;
  float sum = 0, p = 0;
  if (part < count)
#pragma unroll 8
    for (int o = part; o < outputs; o += count) {
      const i64 at = i64(o) * inputs;
      sum += line[o] * (float(w[at + row]) * float(w[at + channel]));
      if (channel == 0) p += line[outputs + o] * float(joined[at + row]);
    }
  parts[t] = sum;
  if (part < count && channel == 0) of_g[part] = p;
  __syncthreads();
  if (part == 0) {
    for (int other = 1; other < count; ++other) sum += parts[other * inputs + channel];
    const T m(sum);
    joined[i64(outputs + row) * inputs + channel] = m;
    by_mean[channel] = double(means[channel]) * double(float(m));
  }
  __syncthreads();
  if (t >= 32) return;
  double all = 0;
  for (int i = t; i < inputs; i += 32) all += by_mean[i];
  all = warp_sum(all);
  if (t) return;
  double of_all = 0;
  for (int other = 0; other < count; ++other) of_all += double(of_g[other]);
  base[row] = float(-of_all / rows - all);
}
