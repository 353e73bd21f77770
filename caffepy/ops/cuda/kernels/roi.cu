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
