// Update rules over flat arrays of parameters: normalize, regularize and update in one pass.
//
// In all formulas r = scale * g + decay * w (L2), or scale * g + decay * sign(w) (L1), is the regularized gradient.
// Segment s of the arrays ends before ends[s] and has its own factors of rate and decay. w, the histories and g are
// written; g becomes what was subtracted from w. If `go` is 0 nothing is written.

#include "pack.cuh"

#define NUMBER(name) double name, const void *name##_at, i64 name##_kind
#define VALUE(name) A(number(name, name##_at, name##_kind))

template <typename T> struct Segments {
  using A = Wide<T>;
  const i64* ends;
  const A *rates, *decays;
  int count;
  bool l1;
  A scale, rate, decay;
};

// The segment of consecutive elements: searches once, then steps on.
template <typename T> struct Position {
  using A = Wide<T>;
  Segments<T> segments;
  int s;
  __device__ Position(Segments<T> segments) : segments(segments), s(-1) {}
  __device__ void move(i64 i) {
    if (s < 0) {
      int hi = segments.count - 1;
      s = 0;
      while (s < hi) {
        const int middle = (s + hi) / 2;
        if (segments.ends[middle] > i)
          hi = middle;
        else
          s = middle + 1;
      }
    } else {
      while (s < segments.count - 1 && segments.ends[s] <= i) ++s;
    }
  }
  __device__ bool inside(i64 i) const { return i < segments.ends[s]; }
  __device__ A rate() const { return segments.rate * segments.rates[s]; }
  __device__ A regularized(A w, A g) const {
    const A sign = A(w > 0) - A(w < 0);
    return segments.scale * g + segments.decay * segments.decays[s] * (segments.l1 ? sign : w);
  }
};

#define ARGUMENTS                                                                                                 \
  i64 n, const i64 *ends, const Wide<T>*rates, const Wide<T>*decays, i64 count, i64 l1, NUMBER(scale), NUMBER(rate), \
      NUMBER(decay), NUMBER(go), NUMBER(a), NUMBER(b), NUMBER(c), NUMBER(d)
#define PREPARE                                                                        \
  using A = Wide<T>;                                                                   \
  if (VALUE(go) == 0) return;                                                          \
  const A a_ = VALUE(a), b_ = VALUE(b), c_ = VALUE(c), d_ = VALUE(d);                  \
  Position<T> at(Segments<T>{ends, rates, decays, int(count), l1 != 0, VALUE(scale), VALUE(rate), VALUE(decay)});
#define PACK (16 / sizeof(T))

// h = momentum*h + rate*r; w -= h
template <typename T>
__global__ void sgd(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  const A momentum = a_;
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& h) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A v = momentum * A(h) + at.rate() * at.regularized(A(w), A(g));
        h = T(v);
        g = T(v);
        w = T(A(w) - v);
      },
      both(w), both(g), both(h));
}

// h' = momentum*h + rate*r; w -= (1 + momentum)*h' - momentum*h; h = h'
template <typename T>
__global__ void nesterov(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  const A momentum = a_;
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& h) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A before = A(h), after = momentum * before + at.rate() * at.regularized(A(w), A(g));
        const A v = (1 + momentum) * after - momentum * before;
        h = T(after);
        g = T(v);
        w = T(A(w) - v);
      },
      both(w), both(g), both(h));
}

// RMSProp: h = rms_decay*h + take*r^2 with take = 1 - rms_decay; AdaGrad: both are 1. w -= rate*r/(sqrt(h) + delta)
template <typename T>
__global__ void rms(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  const A rms_decay = a_, take = b_, delta = c_;
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& h) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A r = at.regularized(A(w), A(g)), mean = rms_decay * A(h) + take * r * r;
        const A v = at.rate() * r / (sqrt(mean) + delta);
        h = T(mean);
        g = T(v);
        w = T(A(w) - v);
      },
      both(w), both(g), both(h));
}

// h = momentum*h + (1 - momentum)*r^2; v = r*sqrt((u + delta)/(h + delta)); u = momentum*u + (1 - momentum)*v^2;
// w -= rate*v
template <typename T>
__global__ void adadelta(T* w, T* g, T* h, T* u, ARGUMENTS) {
  PREPARE
  const A momentum = a_, delta = b_;
  const A take = 1 - momentum;
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& h, T& u) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A r = at.regularized(A(w), A(g)), mean = momentum * A(h) + take * r * r;
        const A v = r * sqrt((A(u) + delta) / (mean + delta)), step = at.rate() * v;
        h = T(mean);
        u = T(momentum * A(u) + take * v * v);
        g = T(step);
        w = T(A(w) - step);
      },
      both(w), both(g), both(h), both(u));
}

// m = beta1*m + (1 - beta1)*r; v = beta2*v + (1 - beta2)*r^2; w -= rate*correction*m/(sqrt(v) + delta)
template <typename T>
__global__ void adam(T* w, T* g, T* m, T* v, ARGUMENTS) {
  PREPARE
  const A beta1 = a_, beta2 = b_, delta = c_, correction = d_;
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& m, T& v) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A r = at.regularized(A(w), A(g));
        const A first = beta1 * A(m) + (1 - beta1) * r, second = beta2 * A(v) + (1 - beta2) * r * r;
        const A step = at.rate() * correction * first / (sqrt(second) + delta);
        m = T(first);
        v = T(second);
        g = T(step);
        w = T(A(w) - step);
      },
      both(w), both(g), both(m), both(v));
}
