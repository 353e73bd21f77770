// Random numbers that are hashes of a seed, of the number of a pass and of a place: they come in any order.

// The finalizer of MurmurHash3: every bit of the result hangs on every bit of h.
__device__ inline unsigned mix(unsigned h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// 32 bits for place i: mix(mix(seed + i) + mix(seed)). A step_counter, the number of a pass, makes a seed of its own of each.
struct Draw {
  unsigned start, second;
  __device__ Draw(i64 seed, const i64* step_counter) : start(unsigned(seed)) {
    if (step_counter) start = mix(start + mix(unsigned(*step_counter)));
    second = mix(start);
  }
  __device__ unsigned operator()(i64 i) const { return mix(mix(start + unsigned(i)) + second); }
};
