// Sums of shares that blocks made, in the order of blocks.

constexpr int ADDING = 8;  // warps of a block that adds shares

// Of each of 32 sums, a block's number blockIdx.x * 32 + lane, the total, in the first warp: warps add every ADDING-th
// share each. Shares lie `all` floats apart; the sums of threads where it is not `wanted` are 0.
__device__ inline float sum_of_shares(const float* part, int shares, int all, bool wanted) {
  __shared__ float partial[ADDING][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = blockIdx.x * 32 + lane;
  float sum = 0;
  if (wanted) {
#pragma unroll 8
    for (int k = warp; k < shares; k += ADDING) sum += part[i64(k) * all + i];
  }
  partial[warp][lane] = sum;
  __syncthreads();
  if (warp == 0)
    for (int k = 1; k < ADDING; ++k) sum += partial[k][lane];
  return sum;
}

// Of number first + t / 32, with t the thread of a block of 1,024, the sum over shares, which lie `pitch` floats apart, for all
// threads of a warp; 0 from the size on.
__device__ inline float sum_of_all(const float* part, i64 shares, i64 pitch, i64 first, i64 size) {
  __shared__ float sums[32][33];
  const int t = threadIdx.y * blockDim.x + threadIdx.x, lane = t % 32, warp = t / 32;
  float sum = 0;
  if (first + lane < size) {
#pragma unroll 8
    for (i64 share = warp; share < shares; share += 32) sum += part[share * pitch + first + lane];
  }
  sums[lane][warp] = sum;
  __syncthreads();
  sum = sums[warp][lane];
#pragma unroll
  for (int other = 16; other; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  return sum;
}
