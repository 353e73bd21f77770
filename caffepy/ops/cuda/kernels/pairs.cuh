// Maxima of numbers of 16 bits, two to a word (compute capability 9.0).

// Of two words the larger numbers; all bits of those that are equal, or not above.
template <typename T> struct Pair;
#define PAIR(type, name)                                                                 \
  template <> struct Pair<type> {                                                        \
    static __device__ unsigned largest(unsigned a, unsigned b) {                         \
      unsigned c;                                                                        \
      asm("max." name " %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));                        \
      return c;                                                                          \
    }                                                                                    \
    static __device__ unsigned equal(unsigned a, unsigned b) {                           \
      unsigned c;                                                                        \
      asm("set.eq.u32." name " %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));                 \
      return c;                                                                          \
    }                                                                                    \
    static __device__ unsigned at_most(unsigned a, unsigned b) {                         \
      unsigned c;                                                                        \
      asm("set.le.u32." name " %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));                 \
      return c;                                                                          \
    }                                                                                    \
  };
PAIR(bf16_t, "bf16x2")
PAIR(half_t, "f16x2")

// Words of -inf
template <typename T, int WORDS> __device__ Pack<unsigned, WORDS> lowest() {
  const unsigned bits = T(-__int_as_float(0x7f800000)).bits;
  Pack<unsigned, WORDS> words;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) words.v[w] = bits << 16 | bits;
  return words;
}

// The first largest elements of a window KH x KW that begins at (top, left) of a plane, and where they are in it: of
// words of_window(row, column), -inf outside the plane; of a window without numbers above -inf its first element
// of_plane(row, column). R: 0 instead of what is not above 0, which is nowhere. It looks where maxima came from, last
// element first.
template <typename T, int KH, int KW, bool R, int WORDS, int V, typename F, typename G>
__device__ void find_largest(F of_window, G of_plane, int top, int left, Pack<unsigned, WORDS>& largest,
                             Pack<unsigned char, V>& places) {
  const unsigned corner = max(-top, 0) * KW + max(-left, 0);
  const Pack<unsigned, WORDS> least = lowest<T, WORDS>();
  Pack<unsigned, WORDS> where;
  unsigned odd = 0;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    unsigned best = of_window(0, 0).v[w], place = corner << 16 | corner;
#pragma unroll
    for (int r = 0; r < KH; ++r)
#pragma unroll
      for (int c = 0; c < KW; ++c) best = Pair<T>::largest(best, of_window(r, c).v[w]);
#pragma unroll
    for (int r = KH - 1; r >= 0; --r)
#pragma unroll
      for (int c = KW - 1; c >= 0; --c) {
        const unsigned here = Pair<T>::equal(of_window(r, c).v[w], best);
        place = (here & (r * KW + c) * 0x10001u) | (~here & place);
      }
    odd |= Pair<T>::equal(best, least.v[w]);
    largest.v[w] = best;
    where.v[w] = place;
  }
  if (odd) {
    const Pack<unsigned, WORDS> start = of_plane(max(top, 0), max(left, 0));
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const unsigned none = Pair<T>::equal(largest.v[w], least.v[w]);
      largest.v[w] = (none & start.v[w]) | (~none & largest.v[w]);
      where.v[w] = (none & (corner << 16 | corner)) | (~none & where.v[w]);
    }
  }
  if (R) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const unsigned none = Pair<T>::at_most(largest.v[w], 0);
      largest.v[w] &= ~none;
      where.v[w] |= none;
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) places.v[v] = (unsigned char)(where.v[v / 2] >> 16 * (v % 2));
}

// Windows KH x KW over a plane, HO x WO of them.
template <int KH, int KW, int SH, int SW, int PH, int PW, int HEIGHT, int WIDTH> struct Pool {
  static constexpr int kh = KH, kw = KW, sh = SH, sw = SW, ph = PH, pw = PW, ho = HEIGHT, wo = WIDTH;
};

// The same of window (row, column) over a plane H x W, where WORDS of two channels lie at element(row, column).
template <typename T, typename P, int H, int W, bool R, int WORDS, int V, typename F>
__device__ void largest_of_window(F element, int row, int column, Pack<unsigned, WORDS>& largest,
                                  Pack<unsigned char, V>& places) {
  const int top = row * P::sh - P::ph, left = column * P::sw - P::pw;
  Pack<unsigned, WORDS> taken[P::kh][P::kw];
#pragma unroll
  for (int r = 0; r < P::kh; ++r)
#pragma unroll
    for (int c = 0; c < P::kw; ++c) {
      const bool inside = top + r >= 0 && top + r < H && left + c >= 0 && left + c < W;
      taken[r][c] = inside ? element(top + r, left + c) : lowest<T, WORDS>();
    }
  const auto of_window = [&](int r, int c) { return taken[r][c]; };
  find_largest<T, P::kh, P::kw, R>(of_window, element, top, left, largest, places);
}
