// Pooling of regions of interest: rois (R, 5) = image, x1, y1, x2, y2. Places are reckoned in float, as on the CPU, each
// operation rounded by itself. In backward each input looks for the boxes that read it, so that sums have one order.

#include "pack.cuh"

__device__ i64 cut(float place, i64 size) { return min(max(i64(place), i64(0)), size); }

// Cells begin to end - 1 of a bin.
struct Cells {
  i64 begin, end;
};

// A box of ROIPooling along an axis, cut into bins.
struct Span {
  float first, bin;
  __device__ Span(float begin, float end, float scale, i64 bins) {
    first = roundf(__fmul_rn(begin, scale));
    bin = __fdiv_rn(fmaxf(roundf(__fmul_rn(end, scale)) - first + 1, 1.0f), float(bins));
  }
  __device__ Cells cells(i64 i, i64 size) const {
    return {cut(floorf(__fmul_rn(float(i), bin)) + first, size), cut(ceilf(__fmul_rn(float(i + 1), bin)) + first, size)};
  }
};

// A box of PSROIPooling along an axis, which is rounded before it is scaled.
struct Part {
  float start, bin;
  __device__ Part(float begin, float end, float scale, i64 bins) {
    start = __fmul_rn(roundf(begin), scale);
    const float stop = __fmul_rn(roundf(end) + 1, scale);
    bin = __fdiv_rn(fmaxf(__fsub_rn(stop, start), 0.1f), float(bins));
  }
  __device__ Cells cells(i64 i, i64 size) const {
    return {cut(floorf(__fadd_rn(__fmul_rn(float(i), bin), start)), size),
            cut(ceilf(__fadd_rn(__fmul_rn(float(i + 1), bin), start)), size)};
  }
};

template <typename T>
__global__ void roi_pool_forward(const T* x, const T* rois, T* y, int* index, i64 boxes, i64 channels, i64 rows,
                                 i64 columns, i64 h, i64 w, double scale) {
  FOR_EACH(k, boxes * channels * rows * columns) {
    const i64 j = k % columns, i = k / columns % rows, c = k / columns / rows % channels;
    const T* roi = rois + k / columns / rows / channels * 5;
    const Cells down = Span(float(roi[2]), float(roi[4]), float(scale), rows).cells(i, h);
    const Cells across = Span(float(roi[1]), float(roi[3]), float(scale), columns).cells(j, w);
    const T* plane = x + (i64(float(roi[0])) * channels + c) * h * w;
    Wide<T> best = 0;
    int place = -1;
    for (i64 a = down.begin; a < down.end; ++a)
      for (i64 b = across.begin; b < across.end; ++b) {
        const Wide<T> value = plane[a * w + b];
        if (place < 0 || value > best) {
          best = value;
          place = int(a * w + b);
        }
      }
    y[k] = T(best);
    index[k] = place;
  }
}

template <typename T>
__global__ void roi_pool_backward(const T* dy, const T* rois, const int* index, T* dx, i64 images, i64 channels, i64 h,
                                  i64 w, i64 rows, i64 columns, i64 boxes, double scale) {
  FOR_EACH(k, images * channels * h * w) {
    const i64 b = k % w, a = k / w % h, c = k / w / h % channels, n = k / w / h / channels;
    Wide<T> sum = 0;
    for (i64 r = 0; r < boxes; ++r) {
      const T* roi = rois + r * 5;
      if (i64(float(roi[0])) != n) continue;
      const Span down(float(roi[2]), float(roi[4]), float(scale), rows);
      const Span across(float(roi[1]), float(roi[3]), float(scale), columns);
      const i64 base = (r * channels + c) * rows * columns;
      for (i64 i = 0; i < rows; ++i) {
        const Cells vertical = down.cells(i, h);
        if (a < vertical.begin || a >= vertical.end) continue;
        for (i64 j = 0; j < columns; ++j)
          if (index[base + i * columns + j] == a * w + b) sum += Wide<T>(dy[base + i * columns + j]);
      }
    }
    dx[k] = T(sum);
  }
}

template <typename T>
__global__ void psroi_pool_forward(const T* x, const T* rois, T* y, i64 boxes, i64 outputs, i64 bins, i64 h, i64 w,
                                   double scale) {
  FOR_EACH(k, boxes * outputs * bins * bins) {
    const i64 j = k % bins, i = k / bins % bins, o = k / bins / bins % outputs;
    const T* roi = rois + k / bins / bins / outputs * 5;
    const Cells down = Part(float(roi[2]), float(roi[4]), float(scale), bins).cells(i, h);
    const Cells across = Part(float(roi[1]), float(roi[3]), float(scale), bins).cells(j, w);
    const i64 channel = i64(float(roi[0])) * outputs * bins * bins + (o * bins + i) * bins + j;
    const T* plane = x + channel * h * w;
    Wide<T> sum = 0;
    for (i64 a = down.begin; a < down.end; ++a)
      for (i64 b = across.begin; b < across.end; ++b) sum += Wide<T>(plane[a * w + b]);
    const i64 area = max(down.end - down.begin, i64(0)) * max(across.end - across.begin, i64(0));
    y[k] = T(sum / Wide<T>(max(area, i64(1))));
  }
}

template <typename T>
__global__ void psroi_pool_backward(const T* dy, const T* rois, T* dx, i64 images, i64 channels, i64 h, i64 w,
                                    i64 outputs, i64 bins, i64 boxes, double scale) {
  FOR_EACH(k, images * channels * h * w) {
    const i64 b = k % w, a = k / w % h, c = k / w / h % channels, n = k / w / h / channels;
    const i64 j = c % bins, i = c / bins % bins, o = c / bins / bins;
    Wide<T> sum = 0;
    for (i64 r = 0; r < boxes; ++r) {
      const T* roi = rois + r * 5;
      if (i64(float(roi[0])) != n) continue;
      const Cells down = Part(float(roi[2]), float(roi[4]), float(scale), bins).cells(i, h);
      const Cells across = Part(float(roi[1]), float(roi[3]), float(scale), bins).cells(j, w);
      if (a < down.begin || a >= down.end || b < across.begin || b >= across.end) continue;
      const i64 area = (down.end - down.begin) * (across.end - across.begin);
      sum += Wide<T>(dy[((r * outputs + o) * bins + i) * bins + j]) / Wide<T>(area);
    }
    dx[k] = T(sum);
  }
}

// A box of ROIAlign, or of PSROIAlign (`sensitive`), along an axis of `size` pixels, cut into bins.
constexpr int MOST = 1024;  // samples of a part in a direction, whatever the size of its box

struct Samples {
  float start, bin;
  i64 size, n;
  bool sensitive;
  __device__ Samples(float begin, float end, float scale, i64 bins, i64 size, i64 samples, i64 beyond, bool sensitive)
      : size(size), sensitive(sensitive) {
    start = __fmul_rn(begin, scale);
    const float length = __fsub_rn(__fmul_rn(__fadd_rn(end, float(beyond)), scale), start);
    bin = __fdiv_rn(fmaxf(length, sensitive ? 0.1f : 1.0f), float(bins));
    n = samples > 0 ? samples : i64(fminf(ceilf(bin), float(MOST)));
  }
  // Where sample i of bin p lies, in pixels; -1 if it does not count.
  __device__ float at(i64 p, i64 i) const {
    const float first = __fadd_rn(__fmul_rn(float(p), bin), start);
    if (sensitive) {
      const float most = float(size - 1), last = __fadd_rn(__fmul_rn(float(p + 1), bin), start);
      const float step = __fmul_rn(float(i + 1), __fdiv_rn(bin, float(n + 1)));
      const float place = __fadd_rn(fminf(fmaxf(first, 0.0f), most), step);
      return place < fminf(fmaxf(last, 0.0f), most) ? place : -1.0f;
    }
    const float place = __fadd_rn(first, __fdiv_rn(__fmul_rn(float(i) + 0.5f, bin), float(n)));
    return place >= -1.0f && place <= float(size) ? fmaxf(place, 0.0f) : -1.0f;
  }
  // The weight of a pixel in all samples of bin p that give it a gradient.
  template <typename A> __device__ A weight(i64 p, i64 pixel) const {
    A sum = 0;
    const bool learns = !sensitive || float(pixel) < ceilf(__fadd_rn(__fmul_rn(float(p + 1), bin), start));
    for (i64 i = 0; i < n; ++i) {
      const float place = at(p, i);
      if (place < 0) continue;
      const i64 low = min(i64(place), size - 1);
      const A share = low >= size - 1 ? A(0) : A(__fsub_rn(place, float(low)));
      if (pixel == low) sum += 1 - share;
      if (pixel == low + 1 && learns) sum += share;
    }
    return sum;
  }
  // The first bin of which a sample may read a pixel, and the one behind the last.
  __device__ i64 first_bin(i64 pixel) const { return max(i64(floorf((float(pixel) - 2 - start) / bin)) - 1, i64(0)); }
  __device__ i64 behind_bin(i64 pixel, i64 bins) const {
    return pixel == 0 || pixel == size - 1 ? bins : min(i64(ceilf((float(pixel) + 2 - start) / bin)) + 1, bins);
  }
};

template <typename T>
__global__ void roi_align_forward(const T* x, const T* rois, T* y, i64 boxes, i64 outputs, i64 rows, i64 columns,
                                  i64 channels, i64 h, i64 w, double scale, i64 samples, i64 beyond, i64 sensitive) {
  FOR_EACH(k, boxes * outputs * rows * columns) {
    const i64 j = k % columns, i = k / columns % rows, o = k / columns / rows % outputs;
    const T* roi = rois + k / columns / rows / outputs * 5;
    const Samples down(float(roi[2]), float(roi[4]), float(scale), rows, h, samples, beyond, sensitive);
    const Samples across(float(roi[1]), float(roi[3]), float(scale), columns, w, samples, beyond, sensitive);
    const i64 c = sensitive ? (o * rows + i) * columns + j : o;
    const T* plane = x + (i64(float(roi[0])) * channels + c) * h * w;
    Wide<T> sum = 0;
    for (i64 s = 0; s < down.n; ++s) {
      const float v = down.at(i, s);
      if (v < 0) continue;
      const i64 a = min(i64(v), h - 1), below = min(a + 1, h - 1);
      const Wide<T> q = a == below ? Wide<T>(0) : Wide<T>(__fsub_rn(v, float(a)));
      for (i64 t = 0; t < across.n; ++t) {
        const float u = across.at(j, t);
        if (u < 0) continue;
        const i64 b = min(i64(u), w - 1), behind = min(b + 1, w - 1);
        const Wide<T> p = b == behind ? Wide<T>(0) : Wide<T>(__fsub_rn(u, float(b)));
        const auto along = [&](i64 r) {
          return (1 - p) * Wide<T>(plane[r * w + b]) + p * Wide<T>(plane[r * w + behind]);
        };
        sum += (1 - q) * along(a) + q * along(below);
      }
    }
    y[k] = T(sum / Wide<T>(down.n * across.n));
  }
}

template <typename T>
__global__ void roi_align_backward(const T* dy, const T* rois, T* dx, i64 images, i64 channels, i64 h, i64 w, i64 outputs,
                                   i64 rows, i64 columns, i64 boxes, double scale, i64 samples, i64 beyond,
                                   i64 sensitive) {
  FOR_EACH(k, images * channels * h * w) {
    const i64 b = k % w, a = k / w % h, c = k / w / h % channels, n = k / w / h / channels;
    const i64 o = sensitive ? c / columns / rows : c;
    Wide<T> sum = 0;
    for (i64 r = 0; r < boxes; ++r) {
      const T* roi = rois + r * 5;
      if (i64(float(roi[0])) != n) continue;
      const Samples down(float(roi[2]), float(roi[4]), float(scale), rows, h, samples, beyond, sensitive);
      const Samples across(float(roi[1]), float(roi[3]), float(scale), columns, w, samples, beyond, sensitive);
      // PSROIAlign's channel belongs to one bin.
      const i64 i0 = sensitive ? c / columns % rows : down.first_bin(a), i1 = sensitive ? i0 + 1 : down.behind_bin(a, rows);
      const i64 j0 = sensitive ? c % columns : across.first_bin(b);
      const i64 j1 = sensitive ? j0 + 1 : across.behind_bin(b, columns);
      for (i64 i = i0; i < i1; ++i) {
        const Wide<T> by_row = down.weight<Wide<T>>(i, a);
        if (by_row == 0) continue;
        Wide<T> along = 0;
        for (i64 j = j0; j < j1; ++j)
          along += across.weight<Wide<T>>(j, b) * Wide<T>(dy[((r * outputs + o) * rows + i) * columns + j]);
        sum += by_row * along / Wide<T>(down.n * across.n);
      }
    }
    dx[k] = T(sum);
  }
}
