// Boxes that a region proposal network proposes: x1, y1, x2, y2 in pixels, both ends inside. Each operation is rounded
// by itself, as on the CPU: which box wins must not depend on it.

#include "pack.cuh"

using u64 = unsigned long long;

// The ends of a box along an axis after its deltas, cut to the image.
struct Ends {
  float low, high;
  __device__ Ends(float begin, float end, float shift, float grow, float size) {
    const float length = __fadd_rn(__fsub_rn(end, begin), 1.0f);
    const float centre = __fadd_rn(__fadd_rn(begin, __fmul_rn(0.5f, length)), __fmul_rn(shift, length));
    const float reach = __fmul_rn(0.5f, __fmul_rn(expf(grow), length));
    const float most = size - 1.0f;
    low = fmaxf(fminf(__fsub_rn(centre, reach), most), 0.0f);
    high = fmaxf(fminf(__fadd_rn(centre, reach), most), 0.0f);
  }
  __device__ float length() const { return __fadd_rn(__fsub_rn(high, low), 1.0f); }
};

// boxes (N, H W A, 4) and objects (N, H W A) from scores (N, 2A, H, W), deltas (N, 4A, H, W), anchors (A, 4); info holds
// height, width and scale of the image, or a scale for each direction
template <typename T>
__global__ void decode_proposals(const T* scores, const T* deltas, const float* anchors, const T* info, T* boxes,
                                 T* objects, i64 images, i64 h, i64 w, i64 count, i64 numbers, i64 stride,
                                 double least) {
  FOR_EACH(k, images * h * w * count) {
    const i64 a = k % count, j = k / count % w, i = k / count / w % h, n = k / count / w / h;
    const T* d = deltas + ((n * count + a) * 4 * h + i) * w + j;
    const float* anchor = anchors + 4 * a;
    const float x = float(j * stride), y = float(i * stride);
    const Ends across(x + anchor[0], x + anchor[2], float(d[0]), float(d[2 * h * w]), float(info[1]));
    const Ends down(y + anchor[1], y + anchor[3], float(d[h * w]), float(d[3 * h * w]), float(info[0]));
    T* box = boxes + 4 * k;
    box[0] = T(across.low);
    box[1] = T(down.low);
    box[2] = T(across.high);
    box[3] = T(down.high);
    const float scale = float(info[numbers > 3 ? 3 : 2]);
    const bool fits = across.length() >= __fmul_rn(float(least), scale) &&
                      down.length() >= __fmul_rn(float(least), float(info[2]));
    objects[k] = fits ? scores[((n * 2 + 1) * count + a) * h * w + i * w + j] : T(0);
  }
}

template <typename T> __device__ bool overlaps(const T* a, const T* b, float threshold, float unit) {
  const float ax = float(a[0]), ay = float(a[1]), bx = float(b[0]), by = float(b[1]);
  const float aX = float(a[2]), aY = float(a[3]), bX = float(b[2]), bY = float(b[3]);
  const float wide = __fadd_rn(__fsub_rn(fminf(aX, bX), fmaxf(ax, bx)), unit);
  const float high = __fadd_rn(__fsub_rn(fminf(aY, bY), fmaxf(ay, by)), unit);
  const float both = __fmul_rn(fmaxf(wide, 0.0f), fmaxf(high, 0.0f));
  const float first = __fmul_rn(__fadd_rn(__fsub_rn(aX, ax), unit), __fadd_rn(__fsub_rn(aY, ay), unit));
  const float second = __fmul_rn(__fadd_rn(__fsub_rn(bX, bx), unit), __fadd_rn(__fsub_rn(bY, by), unit));
  return __fdiv_rn(both, __fsub_rn(__fadd_rn(first, second), both)) > threshold;
}

// Bit b of word (n, p, q): box 64 q + b, which comes after p, overlaps it.
template <typename T>
__global__ void find_overlaps(const T* boxes, u64* words, i64 images, i64 count, i64 columns, double threshold,
                              double unit) {
  FOR_EACH(k, images * count * columns) {
    const i64 q = k % columns, p = k / columns % count, n = k / columns / count;
    const T* all = boxes + n * count * 4;
    u64 bits = 0;
    for (i64 b = 0; b < 64; ++b) {
      const i64 other = 64 * q + b;
      if (other > p && other < count && overlaps(all + 4 * p, all + 4 * other, float(threshold), float(unit)))
        bits |= u64(1) << b;
    }
    words[k] = bits;
  }
}

// A block for each image takes the boxes in turn: those that no earlier one of the kept overlaps, until `most` are kept.
// removed (N, columns) starts at 0.
template <typename T>
__global__ void keep_boxes(const T*, const u64* words, u64* removed, int* kept, int* counts, i64 count, i64 columns,
                           i64 most) {
  const i64 n = blockIdx.x;
  u64* gone = removed + n * columns;
  i64 found = 0;
  for (i64 p = 0; p < count && found < most; ++p) {
    if (gone[p / 64] >> (p % 64) & 1) continue;
    if (threadIdx.x == 0) kept[n * most + found] = int(p);
    ++found;
    __syncthreads();
    for (i64 q = p / 64 + threadIdx.x; q < columns; q += blockDim.x) gone[q] |= words[(n * count + p) * columns + q];
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[n] = int(found);
}
