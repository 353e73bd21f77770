// Copies in units of up to 16 bytes.

#include "pack.cuh"

// target[i3, i2, i1, i0] = source[i3, i2, i1, i0] for AXES of these axes; n sizes, s and t strides in units of U, the
// last axis first
template <typename U, int AXES>
__global__ void copy(const U* source, U* target, i64 n0, i64 n1, i64 n2, i64 n3, i64 s0, i64 s1, i64 s2, i64 s3,
                     i64 t0, i64 t1, i64 t2, i64 t3) {
  const i64 n = n0 * n1 * n2 * n3;
  FOR_EACH(i, n) {
    unsigned rest = unsigned(i);
    i64 from = 0, to = 0;
    const auto along = [&](i64 n, i64 s, i64 t) {
      const unsigned next = rest / unsigned(n), at = rest - next * unsigned(n);
      from += at * s;
      to += at * t;
      rest = next;
    };
    along(n0, s0, t0);
    if constexpr (AXES > 1) along(n1, s1, t1);
    if constexpr (AXES > 2) along(n2, s2, t2);
    if constexpr (AXES > 3) along(n3, s3, t3);
    target[to] = source[from];
  }
}

// Lines of up to eight arrays side by side in the lines of one: copied there (JOIN), or from there to those that are
// not null. Part k holds places end_(k-1) to end_k of each line of the whole.
template <typename U, bool JOIN>
__global__ void side_by_side(U* whole, i64 lines, i64 line, i64 by_end, U* p0, U* p1, U* p2, U* p3, U* p4, U* p5, U* p6,
                             U* p7, i64 e0, i64 e1, i64 e2, i64 e3, i64 e4, i64 e5, i64 e6, i64 e7) {
  const Divisor by{by_end};
  const unsigned n = unsigned(lines * e7);
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const unsigned row = by.quotient(i), at = i - row * unsigned(e7);
    U* part = p0;
    unsigned start = 0, end = unsigned(e0);
    const auto or_else = [&](U* p, i64 e) {
      if (at >= end) {
        part = p;
        start = end;
        end = unsigned(e);
      }
    };
    or_else(p1, e1);
    or_else(p2, e2);
    or_else(p3, e3);
    or_else(p4, e4);
    or_else(p5, e5);
    or_else(p6, e6);
    or_else(p7, e7);
    if (!part) continue;
    U &here = part[row * (end - start) + (at - start)], &there = whole[i64(row) * line + at];
    if (JOIN)
      there = here;
    else
      here = there;
  }
}

// Where each of consecutive elements of y comes from: channel k * parts + p of y is channel p * (C / parts) + k of x,
// both (outer, C, inner). Divides once, then counts.
struct Dealt {
  unsigned channels, inner, parts, hand;
  unsigned place, part, k;
  i64 image;
  bool started;
  __device__ Dealt(i64 channels, i64 inner, i64 parts)
      : channels(unsigned(channels)), inner(unsigned(inner)), parts(unsigned(parts)), hand(unsigned(channels / parts)),
        started(false) {}
  __device__ i64 from(i64 i) {
    if (!started) {
      const unsigned plane = unsigned(i) / inner, c = plane % channels;
      place = unsigned(i) - plane * inner;
      part = c % parts;
      k = c / parts;
      image = i64(plane - c) * inner;
      started = true;
    } else if (++place == inner) {
      place = 0;
      if (++part == parts) {
        part = 0;
        if (++k == hand) {
          k = 0;
          image += i64(channels) * inner;
        }
      }
    }
    return image + i64(part * hand + k) * inner + place;
  }
};

template <typename T> __global__ void deal_channels(const T* x, T* y, i64 n, i64 channels, i64 inner, i64 parts) {
  Dealt dealt(channels, inner, parts);
  each<PACK>(n, [=](i64 i, T& to) mutable { to = x[dealt.from(i)]; }, out(y));
}
