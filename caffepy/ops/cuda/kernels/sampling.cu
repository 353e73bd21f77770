// Sampling of images at affine places, between the pixels. Each place is reckoned in the element type and rounded at each
// step, as on the CPU: at whole pixels it decides which neighbours count.

#include "pack.cuh"
#include "reduce.cuh"

__device__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ double product(double a, double b) { return __dmul_rn(a, b); }
__device__ float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ double sum(double a, double b) { return __dadd_rn(a, b); }

// The coordinate of output i of an axis: from -1 up to, without, 1.
__device__ double grid(i64 i, i64 size) { return __dadd_rn(__dmul_rn(__ddiv_rn(double(i), double(size)), 2.0), -1.0); }

// Where an output reads along an axis, in pixels: theta is that axis' row of the matrix.
template <typename T, typename A> __device__ A place(const T* theta, A row, A column, i64 size) {
  const A at = sum(sum(product(A(theta[0]), row), product(A(theta[1]), column)), A(theta[2]));
  return product(sum(at, A(1)) / A(2), A(size));
}

// Where output (s, t) of an image reads: (u, v), between pixels (a, b) and (a + 1, b + 1).
template <typename T> struct Reading {
  using A = Wide<T>;
  A u, v;
  i64 a, b;
  bool inside;
  __device__ Reading(const T* theta, i64 s, i64 t, i64 rows, i64 columns, i64 h, i64 w) {
    const A row = A(grid(s, rows)), column = A(grid(t, columns));
    u = place(theta, row, column, h);
    v = place(theta + 3, row, column, w);
    inside = u > -1 && u < A(h) && v > -1 && v < A(w);
    a = inside ? i64(floor(u)) : 0;
    b = inside ? i64(floor(v)) : 0;
  }
  // The weight of a pixel, which is one of the four.
  __device__ A weight(i64 i, i64 j) const {
    const A below = u - A(a), behind = v - A(b);
    return (i == a ? 1 - below : below) * (j == b ? 1 - behind : behind);
  }
};

template <typename T>
__global__ void affine_sample_forward(const T* x, const T* theta, T* y, i64 images, i64 channels, i64 h, i64 w, i64 rows,
                                      i64 columns) {
  FOR_EACH(k, images * channels * rows * columns) {
    const i64 t = k % columns, s = k / columns % rows, plane = k / columns / rows;
    const Reading<T> at(theta + plane / channels * 6, s, t, rows, columns, h, w);
    Wide<T> sum = 0;
    if (at.inside)
      for (i64 i = max(at.a, i64(0)); i < min(at.a + 2, h); ++i)
        for (i64 j = max(at.b, i64(0)); j < min(at.b + 2, w); ++j)
          sum += at.weight(i, j) * Wide<T>(x[(plane * h + i) * w + j]);
    y[k] = T(sum);
  }
}

// Columns of a row of outputs.
struct Columns {
  i64 begin, end;
};

// Which columns t of a row may read the pixel at `pixel` of an axis: |start + step * t - pixel| < 1, and one more at each
// end for what rounding does.
__device__ Columns readers(double start, double step, double pixel, i64 columns) {
  if (step == 0) return {0, fabs(start - pixel) < 1.5 ? columns : 0};
  const double one = (pixel - 1 - start) / step, other = (pixel + 1 - start) / step;
  const double low = fmin(fmax(floor(fmin(one, other)) - 1, 0.0), double(columns));
  const double high = fmin(fmax(ceil(fmax(one, other)) + 2, 0.0), double(columns));
  return {i64(low), i64(high)};
}

// Each pixel sums what its readers give back, in the order of the outputs.
template <typename T>
__global__ void affine_sample_backward(const T* dy, const T* theta, T* dx, i64 images, i64 channels, i64 h, i64 w,
                                       i64 rows, i64 columns) {
  FOR_EACH(k, images * channels * h * w) {
    const i64 j = k % w, i = k / w % h, plane = k / w / h;
    const T* matrix = theta + plane / channels * 6;
    Wide<T> sum = 0;
    for (i64 s = 0; s < rows; ++s) {
      const double row = grid(s, rows), down = double(matrix[1]) * h, right = double(matrix[4]) * w;
      const double u = (double(matrix[0]) * row - double(matrix[1]) + double(matrix[2]) + 1) / 2 * h;
      const double v = (double(matrix[3]) * row - double(matrix[4]) + double(matrix[5]) + 1) / 2 * w;
      const Columns by_row = readers(u, down / columns, double(i), columns);
      const Columns by_column = readers(v, right / columns, double(j), columns);
      for (i64 t = max(by_row.begin, by_column.begin); t < min(by_row.end, by_column.end); ++t) {
        const Reading<T> at(matrix, s, t, rows, columns, h, w);
        if (at.inside && (i == at.a || i == at.a + 1) && (j == at.b || j == at.b + 1))
          sum += at.weight(i, j) * Wide<T>(dy[(plane * rows + s) * columns + t]);
      }
    }
    dx[k] = T(sum);
  }
}

// The derivative of 1 - |distance| by the place, of a pixel so far behind it; 0 from 1 on.
template <typename A> __device__ A slope(A distance) {
  return fabs(distance) >= 1 ? A(0) : distance >= 0 ? A(1) : A(-1);
}

// A block for each image.
template <typename T>
__global__ void affine_theta_gradient(const T* dy, const T* x, const T* theta, T* dtheta, i64 images, i64 channels, i64 h,
                                      i64 w, i64 rows, i64 columns) {
  const i64 n = blockIdx.x;
  double sums[6] = {0, 0, 0, 0, 0, 0};
  for (i64 k = threadIdx.x; k < rows * columns; k += blockDim.x) {
    const i64 s = k / columns, t = k % columns;
    const Reading<T> at(theta + n * 6, s, t, rows, columns, h, w);
    if (!at.inside) continue;
    double du = 0, dv = 0;
    for (i64 i = max(at.a, i64(0)); i < min(at.a + 2, h); ++i)
      for (i64 j = max(at.b, i64(0)); j < min(at.b + 2, w); ++j) {
        const double p = double(Wide<T>(i) - at.u), q = double(Wide<T>(j) - at.v);
        double value = 0;
        for (i64 c = n * channels; c < (n + 1) * channels; ++c)
          value += double(x[(c * h + i) * w + j]) * double(dy[(c * rows + s) * columns + t]);
        du += slope(p) * fmax(1 - fabs(q), 0.0) * value;
        dv += slope(q) * fmax(1 - fabs(p), 0.0) * value;
      }
    const double by[3] = {grid(s, rows), grid(t, columns), 1};
#pragma unroll
    for (int e = 0; e < 3; ++e) {
      sums[e] += du * by[e];
      sums[3 + e] += dv * by[e];
    }
  }
#pragma unroll
  for (int e = 0; e < 6; ++e) {
    const double total = block_sum(sums[e]);
    if (threadIdx.x == 0) dtheta[n * 6 + e] = T(total * double(e < 3 ? h : w) / 2);
  }
}
