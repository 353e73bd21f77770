// Copies from device to shared memory that a block does not wait for (compute capability 8.0 and later).

// Copies 4, 8 or 16 bytes, aligned so, or writes zeros if there is nothing.
template <int BYTES> __device__ void copy_ahead(void* to, const void* from, bool there) {
  const unsigned at = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0)
               : "memory");
}

// The copies of a thread since its last group are one group.
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but so many of the thread's last groups.
template <int GROUPS> __device__ void wait_for_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory"); }
