// Columns of a convolution whose kernel reads an image x (C, H, W) at places of its own: tap (i, j) of output (p, q) in
// channel c reads, bilinearly, at (p sh - ph + i dh, q sw - pw + j dw) + offsets[c / (C / G), tap, :, p, q]; 0 outside.
// columns (C, taps, Ho, Wo), offsets (G, taps, 2, Ho, Wo).

#include "pack.cuh"
#include "fixed_point.cuh"

struct Window {
  i64 channels, h, w, groups, taps, ho, wo, width, sh, sw, ph, pw, dh, dw;
};

#define WINDOW i64 channels, i64 h, i64 w, i64 groups, i64 taps, i64 ho, i64 wo, i64 width, i64 sh, i64 sw, i64 ph, i64 pw, i64 dh, i64 dw
#define AS_WINDOW Window{channels, h, w, groups, taps, ho, wo, width, sh, sw, ph, pw, dh, dw}

// The two elements of an axis around a place in it, and the share of the second one.
template <typename A> struct Around {
  i64 low, high;
  A share;
  __device__ Around(A place, i64 size) {
    low = i64(place);
    high = min(low + 1, size - 1);
    share = high > low ? place - A(low) : A(0);
  }
};

// Where a tap of an output reads.
template <typename T> struct Place {
  Wide<T> u, v;
  bool inside;
  __device__ Place(const T* offsets, i64 group, i64 tap, i64 p, i64 q, const Window& n) {
    const T* move = offsets + (((group * n.taps + tap) * 2) * n.ho + p) * n.wo + q;
    u = Wide<T>(move[0]) + Wide<T>(p * n.sh - n.ph + tap / n.width * n.dh);
    v = Wide<T>(move[n.ho * n.wo]) + Wide<T>(q * n.sw - n.pw + tap % n.width * n.dw);
    inside = u >= 0 && v >= 0 && u < Wide<T>(n.h) && v < Wide<T>(n.w);
  }
};

template <typename T> __global__ void columns(const T* x, const T* offsets, T* col, WINDOW) {
  const Window n = AS_WINDOW;
  FOR_EACH(k, channels * taps * ho * wo) {
    const i64 q = k % wo, p = k / wo % ho, tap = k / wo / ho % taps, c = k / wo / ho / taps;
    const Place<T> at(offsets, c / (channels / groups), tap, p, q, n);
    if (!at.inside) {
      col[k] = T(0);
      continue;
    }
    const Around<Wide<T>> i(at.u, h), j(at.v, w);
    const T* plane = x + c * h * w;
    const Wide<T> s = j.share, t = i.share;
    const Wide<T> upper = (1 - s) * Wide<T>(plane[i.low * w + j.low]) + s * Wide<T>(plane[i.low * w + j.high]);
    const Wide<T> lower = (1 - s) * Wide<T>(plane[i.high * w + j.low]) + s * Wide<T>(plane[i.high * w + j.high]);
    col[k] = T((1 - t) * upper + t * lower);
  }
}

// The sums of dx in whole numbers.
template <typename T>
__global__ void columns_back(const T* dcol, const T* offsets, unsigned long long* sums, const double* largest, WINDOW) {
  const Window n = AS_WINDOW;
  const double unit = fixed_unit(largest);
  FOR_EACH(k, channels * taps * ho * wo) {
    const i64 q = k % wo, p = k / wo % ho, tap = k / wo / ho % taps, c = k / wo / ho / taps;
    const Place<T> at(offsets, c / (channels / groups), tap, p, q, n);
    if (!at.inside) continue;
    const Around<Wide<T>> i(at.u, h), j(at.v, w);
    unsigned long long* plane = sums + c * h * w;
    const Wide<T> d = dcol[k], s = j.share, t = i.share;
    add(plane + i.low * w + j.low, unit * d * (1 - s) * (1 - t));
    add(plane + i.low * w + j.high, unit * d * s * (1 - t));
    add(plane + i.high * w + j.low, unit * d * (1 - s) * t);
    add(plane + i.high * w + j.high, unit * d * s * t);
  }
}

// A thread for each tap of an output sums over the channels of its group.
template <typename T>
__global__ void offsets_back(const T* dcol, const T* x, const T* offsets, T* doffsets, WINDOW) {
  const Window n = AS_WINDOW;
  const i64 size = channels / groups;
  FOR_EACH(k, groups * taps * ho * wo) {
    const i64 q = k % wo, p = k / wo % ho, tap = k / wo / ho % taps, group = k / wo / ho / taps;
    const Place<T> at(offsets, group, tap, p, q, n);
    Wide<T> down = 0, across = 0;
    if (at.inside) {
      const Around<Wide<T>> i(at.u, h), j(at.v, w);
      const Wide<T> s = j.share, t = i.share;
      for (i64 c = group * size; c < (group + 1) * size; ++c) {
        const T* plane = x + c * h * w;
        const Wide<T> d = dcol[((c * taps + tap) * ho + p) * wo + q];
        const Wide<T> a = plane[i.low * w + j.low], b = plane[i.low * w + j.high];
        const Wide<T> e = plane[i.high * w + j.low], f = plane[i.high * w + j.high];
        down += d * ((1 - s) * (e - a) + s * (f - b));
        across += d * ((1 - t) * (b - a) + t * (f - e));
      }
    }
    T* out = doffsets + (((group * taps + tap) * 2) * ho + p) * wo + q;
    out[0] = T(down);
    out[ho * wo] = T(across);
  }
}
