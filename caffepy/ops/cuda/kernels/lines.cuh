// Lines of an image of few channels, numbers of 16 bits, in shared memory as the words that tensor cores read: one for each
// number, of it and another one behind it.

// Division by a constant; see Divisor.
template <int N> struct Constant {
  __device__ unsigned quotient(unsigned n) const { return n / N; }
};

// So many words, `pitch` of a line, from line `top` on: word j has number j - before of its line, which has `numbers` of
// them, and the one `next` behind it; zeros where there is none. A block has 256 threads, which load AT_ONCE words each at
// a time.
template <int AT_ONCE, typename T, typename By>
__device__ void fill_lines(unsigned* piece, int words, int pitch, By by_pitch, const T* image, int height, int numbers, int top,
                           int before, int next) {
  for (int i0 = threadIdx.x; i0 < words; i0 += AT_ONCE * 256) {
    unsigned short lows[AT_ONCE], highs[AT_ONCE];
    unsigned keeps[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {  // without branches, so that all loads are under way at once
      const int i = i0 + u * 256, line = by_pitch.quotient(i), at = i - line * pitch - before, row = top + line;
      const bool inside = i < words && row >= 0 && row < height;
      const bool low = inside && at >= 0 && at < numbers, high = inside && at + next >= 0 && at + next < numbers;
      lows[u] = image[low ? row * numbers + at : 0].bits;
      highs[u] = image[high ? row * numbers + at + next : 0].bits;
      keeps[u] = (high ? 0xffff0000u : 0) | (low ? 0xffffu : 0);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u)
      if (i0 + u * 256 < words) piece[i0 + u * 256] = (unsigned(highs[u]) << 16 | lows[u]) & keeps[u];
  }
}
