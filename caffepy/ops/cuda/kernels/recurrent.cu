// Units of recurrent layers, for the N streams and H units of one step.

#include "pack.cuh"

template <typename A> __device__ A sigmoid(A x) { return 1 / (1 + exp(-x)); }

// kept = cont * h
template <typename T> __global__ void keep(const T* h, const T* cont, T* kept, i64 streams, i64 size) {
  using A = Wide<T>;
  FOR_EACH(i, streams * size) kept[i] = T(A(h[i]) * A(cont[i / size]));
}

// c = f c_before + i g, h = o tanh(c); a (N, 4H): sums of gates in, activations i, f, o, g out, f times cont. Where
// there is a next step, kept = next_cont * h.
template <typename T>
__global__ void lstm_unit(T* a, const T* c_before, const T* cont, T* c, T* h, const T* next_cont, T* kept, i64 streams,
                          i64 size) {
  using A = Wide<T>;
  FOR_EACH(k, streams * size) {
    const i64 n = k / size;
    T* gates = a + n * 4 * size + (k - n * size);
    const A i = sigmoid(A(gates[0])), o = sigmoid(A(gates[2 * size])), g = tanh(A(gates[3 * size]));
    const A going = A(cont[n]), f = going == 0 ? A(0) : sigmoid(A(gates[size])) * going;
    const A state = f * A(c_before[k]) + i * g, y = o * tanh(state);
    gates[0] = T(i);
    gates[size] = T(f);
    gates[2 * size] = T(o);
    gates[3 * size] = T(g);
    c[k] = T(state);
    h[k] = T(y);
    if (kept) kept[k] = T(y * A(next_cont[n]));
  }
}

// da = gradient in the sums of the gates, dc = that in c_before (before: in c); the gradient in h is dh, plus
// next_cont * rest where there is a next step.
template <typename T>
__global__ void lstm_unit_gradient(const T* a, const T* c_before, const T* c, const T* dh, const T* next_cont,
                                   const T* rest, T* dc, T* da, i64 streams, i64 size) {
  using A = Wide<T>;
  FOR_EACH(k, streams * size) {
    const i64 n = k / size, at = n * 4 * size + (k - n * size);
    const A i = A(a[at]), f = A(a[at + size]), o = A(a[at + 2 * size]), g = A(a[at + 3 * size]);
    const A dy = A(dh[k]) + (rest ? A(rest[k]) * A(next_cont[n]) : A(0));
    const A t = tanh(A(c[k])), d = A(dc[k]) + dy * o * (1 - t * t);
    da[at] = T(d * g * i * (1 - i));
    da[at + size] = T(d * A(c_before[k]) * f * (1 - f));
    da[at + 2 * size] = T(dy * t * o * (1 - o));
    da[at + 3 * size] = T(d * i * (1 - g * g));
    dc[k] = T(d * f);
  }
}

// h = tanh(h); where there is a next step, kept = next_cont * h
template <typename T> __global__ void rnn_unit(T* h, const T* next_cont, T* kept, i64 streams, i64 size) {
  using A = Wide<T>;
  FOR_EACH(k, streams * size) {
    const A y = tanh(A(h[k]));
    h[k] = T(y);
    if (kept) kept[k] = T(y * A(next_cont[k / size]));
  }
}

// dh = (dh + next_cont * rest) * (1 - h^2), without rest in the last step
template <typename T>
__global__ void rnn_unit_gradient(const T* h, T* dh, const T* next_cont, const T* rest, i64 streams, i64 size) {
  using A = Wide<T>;
  FOR_EACH(k, streams * size) {
    const A dy = A(dh[k]) + (rest ? A(rest[k]) * A(next_cont[k / size]) : A(0));
    dh[k] = T(dy * (1 - A(h[k]) * A(h[k])));
  }
}
