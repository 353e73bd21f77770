// What a kernel notes of wrong data, for the error that is raised later (ErrorFlag).

// The largest value that is bad, or what is no number.
struct Bad {
  bool any = false, none = false;
  float most = -__uint_as_float(0x7f800000u);
  __device__ void add(bool bad, float value) {
    any |= bad;
    none |= bad && value != value;
    if (bad) most = fmaxf(most, value);
  }
  // flag (2) = 1, value, if any of a block is.
  __device__ void put_down(double* flag) const {
    const bool found = __syncthreads_or(any), no_number = __syncthreads_or(none);
    const float value = block_max(most);
    if (threadIdx.x || !found) return;
    flag[1] = no_number ? double(__uint_as_float(0x7fffffffu)) : double(value);
    flag[0] = 1;
  }
};
