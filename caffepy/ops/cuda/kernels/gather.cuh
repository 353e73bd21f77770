// Writes n units, in packs of 16 bytes where they lie so: read(i) gives what tells unit i, then those after it.
template <typename U, typename F> __device__ void gather(U* to, unsigned n, F read) {
  constexpr int V = 16 / sizeof(U);
  const unsigned packs = aligned(to, 16) ? n / V : 0;
  FOR_EACH(i, packs) {
    auto next = read(unsigned(i) * V);
    Pack<U, V> pack;
#pragma unroll
    for (int v = 0; v < V; ++v) pack.v[v] = next();
    reinterpret_cast<Pack<U, V>*>(to)[i] = pack;
  }
  FOR_EACH(i, n - packs * V) to[packs * V + i] = read(packs * V + unsigned(i))();
}

// Places of lines of `line` units one after the other.
struct Along {
  unsigned row, at, line;
  __device__ Along(unsigned i, const Divisor& by, unsigned line) : row(by.quotient(i)), at(i - row * line), line(line) {}
  __device__ void step() {
    if (++at < line) return;
    at = 0;
    ++row;
  }
};
