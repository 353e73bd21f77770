// The ReLU that may follow a normalization, and what tells where its gradient is 0.

// What follows: nothing, a ReLU, or one with a ceiling (ReLU6).
enum After { NO_RELU, RELU, CLIPPED };

// True where the gradient of a ReLU, whose argument or result is z, is 0.
template <int AFTER, typename A> __device__ bool passes_nothing(A z, A ceiling) {
  return AFTER && (z <= 0 || (AFTER == CLIPPED && z >= ceiling));
}

// What tells where a gradient is 0 for the ReLU: nothing, its argument x * factor + shift, its result y, or the bits that
// forward kept.
enum Mask { NO_MASK, BY_X, BY_Y, BY_BITS };

// A bit for each element of an array, 1 where the gradient of its ReLU passes: a byte for each pack of 16 bytes. An Access
// for whole packs only.
template <Use USE> struct Bits {
  using Element = bool;
  unsigned char* p;
  template <int V> __device__ bool fits() const { return true; }
  template <int V> __device__ Pack<bool, V> load(i64 i) const {
    Pack<bool, V> pack = {};
    if constexpr (USE & READ) {
      const unsigned byte = p[i];
#pragma unroll
      for (int v = 0; v < V; ++v) pack.v[v] = byte >> v & 1;
    }
    return pack;
  }
  template <int V> __device__ void store(i64 i, const Pack<bool, V>& pack) const {
    if constexpr (USE & WRITE) {
      unsigned byte = 0;
#pragma unroll
      for (int v = 0; v < V; ++v) byte |= unsigned(pack.v[v]) << v;
      p[i] = byte;
    }
  }
};
