// Products of tiles by tensor cores (compute capability 8.0 and later), in words of 32 bits: a word is a tf32 number or
// two numbers of 16 bits, the one of lower depth in the lower half.
//
// multiply: c (16 x 8, float) += a (16 x 8 words) * b (8 words x 8). With i the number of a thread in its warp, g = i / 4 and
// t = i % 4, it holds
//   a[0] (g, t)   a[1] (g + 8, t)    a[2] (g, t + 4)   a[3] (g + 8, t + 4)
//   b[0] (t, g)   b[1] (t + 4, g)
//   c[0] (g, 2t)  c[1] (g, 2t + 1)   c[2] (g + 8, 2t)  c[3] (g + 8, 2t + 1)
// which are the layouts of mma.m16n8k8 for tf32 and of mma.m16n8k16 for 16 bits in the PTX ISA. All threads of the
// warp take part.

template <typename T> __device__ void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

template <> __device__ inline void multiply<float>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <> __device__ inline void multiply<half_t>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <> __device__ inline void multiply<bf16_t>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The nearest tf32 number, in a word
__device__ inline unsigned tf32(float x) {
  unsigned word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
  return word;
}

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// Four matrices of 8 x 8 numbers of 16 bits in shared memory, whose rows begin where the threads 0 to 7, 8 to 15 and so on
// say: a thread gets words (g, t), or of the transposed matrices if TURNED.
template <bool TURNED> __device__ inline void matrices(unsigned (&words)[4], unsigned from) {
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
}
