// Copies in units of up to 16 bytes.

#include "pack.cuh"
#include "gather.cuh"

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

// whole (lines, line) from place 0 on: the lines of up to eight arrays, or of two (MANY 0), side by side. Part k holds places
// end_(k-1) to end_k of each line.
template <typename U, int MANY>
__global__ void join(U* whole, i64 lines, i64 line, i64 by_end, const U* p0, const U* p1, const U* p2, const U* p3,
                     const U* p4, const U* p5, const U* p6, const U* p7, i64 e0, i64 e1, i64 e2, i64 e3, i64 e4, i64 e5,
                     i64 e6, i64 e7) {
  const Divisor by{by_end};
  const unsigned all = unsigned(e7);
  const auto find = [=](unsigned row, unsigned at) {
    const U* part = p0;
    unsigned start = 0, end = unsigned(e0);
    const auto or_else = [&](const U* p, i64 e) {
      if (at >= end) {
        part = p;
        start = end;
        end = unsigned(e);
      }
    };
    or_else(p1, e1);
    if (MANY) {
      or_else(p2, e2);
      or_else(p3, e3);
      or_else(p4, e4);
      or_else(p5, e5);
      or_else(p6, e6);
      or_else(p7, e7);
    }
    return part[row * (end - start) + (at - start)];
  };
  const auto read = [=](unsigned i) {
    return [=, place = Along(i, by, all)]() mutable {
      const U found = find(place.row, place.at);
      place.step();
      return found;
    };
  };
  if (all == line) {
    gather(whole, unsigned(lines * line), read);
    return;
  }
  FOR_EACH(i, lines * all) {
    const Along place(unsigned(i), by, all);
    whole[i64(place.row) * line + place.at] = find(place.row, place.at);
  }
}

// part (lines, width): from place `start` of each line of whole on.
template <typename U> __global__ void cut(const U* whole, U* part, i64 lines, i64 line, i64 start, i64 width, i64 by_width) {
  const Divisor by{by_width};
  gather(part, unsigned(lines * width), [=](unsigned i) {
    return [=, place = Along(i, by, unsigned(width))]() mutable {
      const U found = whole[i64(place.row) * line + start + place.at];
      place.step();
      return found;
    };
  });
}

constexpr int LONG = 8;  // packs of a thread that has them of one line

// A part of a line: where it lies, and its packs.
template <typename P> struct PartOf {
  P* part;
  unsigned start, end;
  __device__ PartOf(P* const (&parts)[8], const i64 (&ends)[8]) : part(parts[0]), start(0), end(unsigned(ends[0])) {}
  __device__ void next(P* to, i64 ends) {
    part = to;
    start = end;
    end = unsigned(ends);
  }
};

template <bool IS, typename A, typename B> struct Either { using type = A; };
template <typename A, typename B> struct Either<false, A, B> { using type = B; };

template <typename X, typename Y, int V> __device__ Pack<Y, V> converted(const Pack<X, V>& x) {
  Pack<Y, V> y;
#pragma unroll
  for (int v = 0; v < V; ++v) y.v[v] = Y(x.v[v]);
  return y;
}

// Copies up to eight parts from the lines of the whole, those that are not null, or JOIN to them, in packs of V elements, in
// which sizes and ends are given: those of the lines in turn; or for long lines (COUNT > 0) blocks (of packs, of the COUNT
// parts of each line).
template <typename P, typename W, int V, int COUNT, bool JOIN>
__device__ void copy_parts(W* whole, i64 lines, i64 line, i64 by_end, P* const (&parts)[8], const i64 (&ends)[8]) {
  const Divisor by{by_end};
  const unsigned all = unsigned(ends[7]);
  using Source = typename Either<JOIN, P, W>::type;
  using Target = typename Either<JOIN, W, P>::type;
  const auto between = [](P* part, i64 place, W* whole, i64 at, auto f) {
    if constexpr (JOIN)
      f(reinterpret_cast<const Pack<P, V>*>(part) + place, reinterpret_cast<Pack<W, V>*>(whole) + at);
    else
      f(reinterpret_cast<const Pack<W, V>*>(whole) + at, reinterpret_cast<Pack<P, V>*>(part) + place);
  };
  if constexpr (COUNT > 0) {
    PartOf<P> found(parts, ends);
#pragma unroll
    for (int k = 1; k < COUNT; ++k)
      if (blockIdx.y % COUNT >= k) found.next(parts[k], ends[k]);
    if (!found.part) return;
    const unsigned row = blockIdx.y / COUNT, width = found.end - found.start;
    const unsigned first = blockIdx.x * (LONG * blockDim.x) + threadIdx.x;
    between(found.part, i64(row) * width, whole, i64(row) * line + found.start, [=](const auto* from, auto* to) {
      Pack<Source, V> got[LONG];
#pragma unroll
      for (int u = 0; u < LONG; ++u)
        if (first + u * blockDim.x < width) got[u] = from[first + u * blockDim.x];
#pragma unroll
      for (int u = 0; u < LONG; ++u)
        if (first + u * blockDim.x < width) to[first + u * blockDim.x] = converted<Source, Target, V>(got[u]);
    });
    return;
  }
  FOR_EACH(i, lines * all) {
    const Along place(unsigned(i), by, all);
    PartOf<P> found(parts, ends);
#pragma unroll
    for (int k = 1; k < 8; ++k)
      if (place.at >= found.end) found.next(parts[k], ends[k]);
    const i64 in_part = i64(place.row) * (found.end - found.start) + place.at - found.start;
    if (found.part)
      between(found.part, in_part, whole, i64(place.row) * line + place.at,
              [](const auto* from, auto* to) { *to = converted<Source, Target, V>(*from); });
  }
}

// join of parts P to a whole of another type W.
template <typename P, typename W, int V, int COUNT>
__global__ void join_parts(W* whole, i64 lines, i64 line, i64 by_end, P* p0, P* p1, P* p2, P* p3, P* p4, P* p5, P* p6,
                           P* p7, i64 e0, i64 e1, i64 e2, i64 e3, i64 e4, i64 e5, i64 e6, i64 e7) {
  copy_parts<P, W, V, COUNT, true>(whole, lines, line, by_end, {p0, p1, p2, p3, p4, p5, p6, p7},
                                   {e0, e1, e2, e3, e4, e5, e6, e7});
}

// The other way.
template <typename P, typename W, int V, int COUNT>
__global__ void cut_parts(W* whole, i64 lines, i64 line, i64 by_end, P* p0, P* p1, P* p2, P* p3, P* p4, P* p5, P* p6,
                          P* p7, i64 e0, i64 e1, i64 e2, i64 e3, i64 e4, i64 e5, i64 e6, i64 e7) {
  copy_parts<P, W, V, COUNT, false>(whole, lines, line, by_end, {p0, p1, p2, p3, p4, p5, p6, p7},
                                    {e0, e1, e2, e3, e4, e5, e6, e7});
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

// The same of numbers of 16 bits with the channels last, an even number of them to each of two parts, in words of two:
// channels 2 k and 2 k + 1 of y are k and hand + k of x; or back (BACK), k and k + 1 of y are 2 k and 2 k + 2 of x.
template <int BACK>
__global__ void deal_pairs(const unsigned* x, unsigned* y, i64 n, i64 channels, i64 by_words) {
  const Divisor by{by_words};
  const unsigned words = unsigned(channels / 2), hand = words / 2;
  gather(y, unsigned(n), [=](unsigned i) {
    return [=, place = Along(i, by, words)]() mutable {
      const unsigned* line = x + i64(place.row) * words;
      const unsigned at = place.at, half = at & 1, second = at >= hand;
      place.step();
      if (BACK) {
        const unsigned* from = line + 2 * (at - second * hand);
        return __byte_perm(from[0], from[1], second ? 0x7632 : 0x5410);
      }
      return __byte_perm(line[at / 2], line[hand + at / 2], half ? 0x7632 : 0x5410);
    };
  });
}
