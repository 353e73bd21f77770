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
