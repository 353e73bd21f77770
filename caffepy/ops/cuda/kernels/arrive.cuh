// Blocks that tell the last of them to arrive what they found. One thread of a block orders memory, which a barrier before or
// behind passes on to the others; it orders no more than it must, unlike __threadfence(). What other blocks wrote is read by
// __ldcg, past the cache of a multiprocessor.

// Orders what was written or read before, by other blocks as far as this one knows of it, before what comes behind.
__device__ inline void order_memory() {
#if __CUDA_ARCH__ >= 700
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#else
  __threadfence();
#endif
}

// Adds to a counter, and returns what it was; what those wrote who added before can be read behind it.
__device__ inline unsigned long long arrive(unsigned long long* counter, unsigned long long by) {
#if __CUDA_ARCH__ >= 700
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(counter)), "l"(by)
               : "memory");
  return before;
#else
  __threadfence();
  const unsigned long long before = atomicAdd(counter, by);
  __threadfence();
  return before;
#endif
}
