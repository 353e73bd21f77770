// A batch of images: crop, subtract a mean, scale, mirror.
// y[n, c, i, j] = (x[n, c, h, w] - mean[c, h, w]) * scale, h = h_off_n + i, w = w_off_n + j or, mirrored,
// w_off_n + width - 1 - j. y lies in the order of its indices or with its channels last; mean has a stride of 0 along
// axes on which it is constant.

#include "pack.cuh"

// The indices of consecutive elements of y: divides once, then counts.
struct Pixel {
  unsigned channels, height, width, image, c, i, j;

  __device__ void at(unsigned e, bool channels_last) {
    const unsigned a = channels_last ? channels : width, b = channels_last ? width : height;
    const unsigned d = channels_last ? height : channels;
    const unsigned first = e / a, second = first / b;
    image = second / d;
    const unsigned x = e - first * a, y = first - second * b, z = second - image * d;
    c = channels_last ? x : z;
    i = channels_last ? z : y;
    j = channels_last ? y : x;
  }

  __device__ void next(bool channels_last) {
    if (channels_last) {
      if (++c < channels) return;
      c = 0;
    }
    if (++j < width) return;
    j = 0;
    if (++i < height) return;
    i = 0;
    if (channels_last || ++c == channels) {
      c = 0;
      ++image;
    }
  }
};

template <typename R, typename T>
__global__ void transform(const R* x, T* y, const i64* h_off, const i64* w_off, const unsigned char* mirror,
                          const Wide<T>* mean, i64 n, i64 channels, i64 rows, i64 columns, i64 height, i64 width,
                          i64 mean_c, i64 mean_h, i64 mean_w, i64 channels_last, double scale) {
  using A = Wide<T>;
  const A s = A(scale);
  const unsigned line = unsigned(columns), plane = unsigned(rows * columns);
  const unsigned mc = unsigned(mean_c), mh = unsigned(mean_h), mw = unsigned(mean_w);
  const bool last = channels_last;
  Pixel pixel{unsigned(channels), unsigned(height), unsigned(width)};
  unsigned image = ~0u, top = 0, left = 0;  // of the pixel before
  bool turned = false;
  const R* picture = x;
  each<PACK>(
      n * channels * height * width,
      [=](i64 e, T& y) mutable {
        if (image == ~0u) {
          pixel.at(unsigned(e), last);
        } else {
          pixel.next(last);
        }
        if (image != pixel.image) {
          image = pixel.image;
          picture = x + i64(image) * channels * plane;
          top = unsigned(h_off[image]);
          left = unsigned(w_off[image]);
          turned = mirror[image];
        }
        const unsigned h = top + pixel.i, w = left + (turned ? pixel.width - 1 - pixel.j : pixel.j);
        const A m = mean ? mean[pixel.c * mc + h * mh + w * mw] : A(0);
        y = T((A(picture[pixel.c * plane + h * line + w]) - m) * s);
      },
      out(y));
}
