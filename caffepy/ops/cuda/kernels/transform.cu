// A batch of images: crop, subtract a mean, scale, mirror.
// y[n, c, i, j] = (x[n, c, h_off_n + i, w] - mean[c, h_off_n + i, w]) * scale, w = w_off_n + j or, mirrored,
// w_off_n + width - 1 - j; a mean (C, 1, 1) stands for every pixel.

#include "pack.cuh"

template <typename R, typename T>
__global__ void transform(const R* x, T* y, const i64* h_off, const i64* w_off, const unsigned char* mirror,
                          const Wide<T>* mean, i64 n, i64 channels, i64 rows, i64 columns, i64 height, i64 width,
                          i64 mean_rows, i64 mean_columns, double scale) {
  using A = Wide<T>;
  const A s = A(scale);
  unsigned image = 0, c = 0, i = 0, j = 0;  // of the element at hand
  bool started = false;
  each<16 / sizeof(T)>(
      n * channels * height * width,
      [=](i64 e, T& y) mutable {
        if (!started) {
          const unsigned row = unsigned(e / width), plane = row / unsigned(height);
          j = unsigned(e - row * width);
          i = row - plane * unsigned(height);
          image = plane / unsigned(channels);
          c = plane - image * unsigned(channels);
          started = true;
        } else if (++j == width) {
          j = 0;
          if (++i == height) {
            i = 0;
            if (++c == channels) {
              c = 0;
              ++image;
            }
          }
        }
        const i64 h = h_off[image] + i, w = w_off[image] + (mirror[image] ? width - 1 - j : j);
        A m = 0;
        if (mean) m = mean[mean_rows == 1 && mean_columns == 1 ? c : (c * mean_rows + h) * mean_columns + w];
        y = T((A(x[((image * channels + c) * rows + h) * columns + w]) - m) * s);
      },
      out(y));
}
