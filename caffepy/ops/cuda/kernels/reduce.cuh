// Sums and maxima in a fixed order, so that results do not depend on scheduling.

// The result goes to all threads of a warp: a butterfly over distances 16, 8, 4, 2, 1.
template <typename A> __device__ A warp_sum(A x) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

template <typename A> __device__ A warp_max(A x) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) {
    const A other = __shfl_xor_sync(0xffffffffu, x, offset);
    x = x > other ? x : other;
  }
  return x;
}

// Words have an instruction of their own.
__device__ inline unsigned warp_sum(unsigned x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, x);
#else
  return warp_sum<unsigned>(x);
#endif
}

__device__ inline unsigned warp_max(unsigned x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  return warp_max<unsigned>(x);
#endif
}

__device__ inline unsigned long long warp_max(unsigned long long x) {
  const unsigned high = warp_max(unsigned(x >> 32));
  const unsigned low = warp_max(unsigned(x >> 32) == high ? unsigned(x) : 0u);
  return static_cast<unsigned long long>(high) << 32 | low;
}

// The result goes to all threads of a block of whole warps.
template <typename A> __device__ A block_sum(A x) {
  __shared__ A parts[32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int i = 0; i < blockDim.x / 32; ++i) x += parts[i];
  return x;
}

template <typename A> __device__ A block_max(A x) {
  __shared__ A parts[32];
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(parts[min(threadIdx.x % 32, blockDim.x / 32 - 1)]);
}

// Where sums go: to db, or if there are several shares of them to part (O, shares); nowhere without db.
template <typename A> struct Sums {
  A *db, *part;
  i64 shares;
  __device__ void add(i64 o, A sum) const {
    if (shares == 1)
      db[o] += sum;
    else
      part[o * shares + blockIdx.y] = sum;
  }
};

// Threads of the block before this one for which it is true, and of all of them.
struct Rank {
  unsigned before = 0, all = 0;
  __device__ explicit Rank(bool is) {
    __shared__ unsigned parts[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const unsigned votes = __ballot_sync(0xffffffffu, is);
    __syncthreads();
    if (lane == 0) parts[warp] = __popc(votes);
    __syncthreads();
    const unsigned of_lane = lane < warps ? parts[lane] : 0;
    all = warp_sum(of_lane);
    before = warp_sum(lane < warp ? of_lane : 0) + __popc(votes & ((1u << lane) - 1));
  }
};
