// Update rules. An object of a rule is called with an element's rate, its regularized gradient r and its histories, which
// it changes, and returns what is to be subtracted from w. A rule is made of up to four numbers.

// r = scale * g + decay * w (L2), or scale * g + decay * sign(w) (L1)
template <typename A> __device__ A regularized(A scale, A decay, bool l1, A w, A g) {
  const A sign = A(w > 0) - A(w < 0);
  return scale * g + decay * (l1 ? sign : w);
}

// A product that no sum takes in: w - rate * v has the same bits wherever it is computed.
__device__ inline float times(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double times(double a, double b) { return __dmul_rn(a, b); }

// h = momentum*h + rate*r; w -= h
template <typename A> struct Sgd {
  static constexpr int HISTORIES = 1;
  A momentum;
  __device__ Sgd(A a, A, A, A) : momentum(a) {}
  template <typename T> __device__ A operator()(A rate, A r, T& h) const {
    const A v = momentum * A(h) + rate * r;
    h = T(v);
    return v;
  }
};

// h' = momentum*h + rate*r; w -= (1 + momentum)*h' - momentum*h; h = h'
template <typename A> struct Nesterov {
  static constexpr int HISTORIES = 1;
  A momentum;
  __device__ Nesterov(A a, A, A, A) : momentum(a) {}
  template <typename T> __device__ A operator()(A rate, A r, T& h) const {
    const A before = A(h), after = momentum * before + rate * r;
    h = T(after);
    return (1 + momentum) * after - momentum * before;
  }
};

// RMSProp: h = rms_decay*h + take*r^2 with take = 1 - rms_decay; AdaGrad: both are 1. w -= rate*r/(sqrt(h) + delta)
template <typename A> struct Rms {
  static constexpr int HISTORIES = 1;
  A rms_decay, take, delta;
  __device__ Rms(A a, A b, A c, A) : rms_decay(a), take(b), delta(c) {}
  template <typename T> __device__ A operator()(A rate, A r, T& h) const {
    const A mean = rms_decay * A(h) + take * r * r;
    h = T(mean);
    return rate * r / (sqrt(mean) + delta);
  }
};

// h = momentum*h + (1 - momentum)*r^2; v = r*sqrt((u + delta)/(h + delta)); u = momentum*u + (1 - momentum)*v^2;
// w -= rate*v
template <typename A> struct Adadelta {
  static constexpr int HISTORIES = 2;
  A momentum, delta, take;
  __device__ Adadelta(A a, A b, A, A) : momentum(a), delta(b), take(1 - a) {}
  template <typename T> __device__ A operator()(A rate, A r, T& h, T& u) const {
    const A mean = momentum * A(h) + take * r * r, v = r * sqrt((A(u) + delta) / (mean + delta));
    h = T(mean);
    u = T(momentum * A(u) + take * v * v);
    return times(rate, v);
  }
};

// m = beta1*m + (1 - beta1)*r; v = beta2*v + (1 - beta2)*r^2; w -= rate*correction*m/(sqrt(v) + delta)
template <typename A> struct Adam {
  static constexpr int HISTORIES = 2;
  A beta1, beta2, delta, correction;
  __device__ Adam(A a, A b, A c, A d) : beta1(a), beta2(b), delta(c), correction(d) {}
  template <typename T> __device__ A operator()(A rate, A r, T& m, T& v) const {
    const A first = beta1 * A(m) + (1 - beta1) * r, second = beta2 * A(v) + (1 - beta2) * r * r;
    m = T(first);
    v = T(second);
    return rate * correction * first / (sqrt(second) + delta);
  }
};
