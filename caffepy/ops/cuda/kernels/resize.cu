// Bilinear resizing of planes with aligned corners, and its transpose. Places are reckoned in float, as on the CPU.
// Bilinear resizing of 8-bit images as OpenCV does it, in whole numbers.

#include "pack.cuh"

// The step in an input of n elements for a step in an output of m.
__device__ float ratio(i64 n, i64 m) { return m > 1 ? __fdiv_rn(float(n - 1), float(m - 1)) : 0.0f; }

// Where an output reads: between elements first and second, `share` of the second.
template <typename A> struct Read {
  i64 first, second;
  A share;
  __device__ Read(i64 i, float step, i64 n) {
    const float place = __fmul_rn(step, float(i));
    first = i64(place);
    second = first < n - 1 ? first + 1 : first;
    share = A(__fsub_rn(place, float(first)));
  }
  // The weight of element k in it.
  __device__ A weight(i64 k) const { return (k == first ? 1 - share : A(0)) + (k == second ? share : A(0)); }
};

template <typename T>
__global__ void interp_forward(const T* x, T* y, i64 planes, i64 h, i64 w, i64 out_h, i64 out_w) {
  using A = Wide<T>;
  const float down = ratio(h, out_h), right = ratio(w, out_w);
  FOR_EACH(k, planes * out_h * out_w) {
    const i64 j = k % out_w, i = k / out_w % out_h;
    const T* u = x + k / out_w / out_h * h * w;
    const Read<A> row(i, down, h), column(j, right, w);
    const auto along = [&](i64 r) {
      return (1 - column.share) * A(u[r * w + column.first]) + column.share * A(u[r * w + column.second]);
    };
    y[k] = T((1 - row.share) * along(row.first) + row.share * along(row.second));
  }
}

// The first and the last output that may read element k of n, by a step of the input for each of m outputs.
__device__ i64 first_reader(i64 k, float step) {
  return step > 0 ? max(i64(floorf(float(k - 1) / step)) - 1, i64(0)) : 0;
}
__device__ i64 last_reader(i64 k, float step, i64 m) {
  return step > 0 ? min(i64(ceilf(float(k + 1) / step)) + 1, m - 1) : m - 1;
}

// Each input sums what its readers give back, in the order of the outputs.
template <typename T>
__global__ void interp_backward(const T* dy, T* dx, i64 planes, i64 h, i64 w, i64 out_h, i64 out_w) {
  using A = Wide<T>;
  const float down = ratio(h, out_h), right = ratio(w, out_w);
  FOR_EACH(k, planes * h * w) {
    const i64 j = k % w, i = k / w % h;
    const T* v = dy + k / w / h * out_h * out_w;
    const i64 begin = first_reader(j, right), end = last_reader(j, right, out_w);
    A sum = 0;
    for (i64 r = first_reader(i, down); r <= last_reader(i, down, out_h); ++r) {
      const A by_row = Read<A>(r, down, h).weight(i);
      if (by_row == 0) continue;
      A along = 0;
      for (i64 c = begin; c <= end; ++c) along += Read<A>(c, right, w).weight(j) * A(v[r * out_w + c]);
      sum += by_row * along;
    }
    dx[k] = T(sum);
  }
}

// Where an output reads along an axis of n pixels: between first and second, with weights of 2048 in all. Centres lie at
// halves. Beyond the first and the last column one weight is all; beyond the first and the last row that row is read twice,
// which rounds otherwise.
struct Tap {
  int first, second, a, b;
  __device__ Tap(i64 i, i64 n, i64 m, bool of_rows) {
    const double step = double(n) / double(m);
    const float place = float(__dadd_rn(__dmul_rn(double(i) + 0.5, step), -0.5));
    const int before = int(floorf(place)), last = int(n - 1);
    const float share = of_rows || (before >= 0 && before < last) ? place - float(before) : 0.0f;
    first = min(max(before, 0), last);
    second = of_rows ? min(max(before + 1, 0), last) : min(first + 1, last);
    a = __float2int_rn((1 - share) * 2048);
    b = __float2int_rn(share * 2048);
  }
};

// images (n, 4): the address of three planes, their height and width, and the image of y (N, 3, out_h, out_w) to write.
__global__ void resize_images(const i64* images, unsigned char* y, i64 n, i64 out_h, i64 out_w) {
  const i64 plane = out_h * out_w;
  FOR_EACH(k, n * plane) {
    const i64* image = images + k / plane * 4;
    const unsigned char* x = reinterpret_cast<const unsigned char*>(image[0]);
    const i64 h = image[1], w = image[2], i = k % plane / out_w, j = k % out_w;
    const Tap row(i, h, out_h, true), column(j, w, out_w, false);
    for (i64 c = 0; c < 3; ++c) {
      const auto along = [&](i64 r) {
        const unsigned char* line = x + (c * h + r) * w;
        return (line[column.first] * column.a + line[column.second] * column.b) >> 4;
      };
      const int sum = ((along(row.first) * row.a) >> 16) + ((along(row.second) * row.b) >> 16);
      y[(image[3] * 3 + c) * plane + i * out_w + j] = static_cast<unsigned char>((sum + 2) >> 2);
    }
  }
}
