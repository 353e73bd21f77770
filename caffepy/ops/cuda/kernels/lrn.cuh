// Powers of s and sums over windows of channels, for lrn.cu and lrn_pooling.cu.

// s^-beta and 1/s; one root of the other for the usual beta of 3/4
template <bool THREE_QUARTERS, typename A> struct Power {
  A of, inverse;
  __device__ Power(A s, A beta) {
    if (THREE_QUARTERS) {
      const A root = rsqrt(s);
      inverse = root * root;
      of = inverse * rsqrt(root);
    } else {
      inverse = 1 / s;
      of = pow(s, -beta);
    }
  }
};

// sum of the 2*HALF + 1 terms around `at`
template <int HALF, typename A, int COUNT> __device__ A window(const A (&terms)[COUNT], int at) {
  A total = terms[at - HALF];
#pragma unroll
  for (int i = 1 - HALF; i <= HALF; ++i) total += terms[at + i];
  return total;
}

// s^-3/4 and 1/s of an s that is not subnormal: the numbers of Power, without its care for those
struct Roots {
  float of, inverse;
  __device__ explicit Roots(float s) {
    const float root = inverse_root(s);
    inverse = root * root;
    of = inverse * inverse_root(root);
  }
  static __device__ float inverse_root(float s) {
    float root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(s));
    return root;
  }
};
