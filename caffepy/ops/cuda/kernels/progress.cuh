// Counters in the memory of several GPUs, by which kernels of one wait for those of others.

typedef long long i64;
typedef unsigned long long u64;

__device__ inline u64 acquire(const u64* p) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

__device__ inline void release(u64* p, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// The progress, when it is `value` or more; less if the abort flag was set meanwhile.
__device__ inline u64 reach(const u64* progress, u64 value, const volatile int* abort_flag) {
  u64 seen = acquire(progress);
  for (unsigned spin = 1; seen < value; ++spin) {
    if (spin % 1024 == 0 && *abort_flag) break;
    seen = acquire(progress);
  }
  return seen;
}
