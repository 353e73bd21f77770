// Update rules over flat arrays of parameters: normalise, regularise and update in one pass.
// r = scale * g + decay * w, with l1 scale * g + decay * sign(w); segment s of the arrays ends before ends[s] and has
// its own factors of rate and decay. w, the histories and g are written; g is then what was subtracted from w. Nothing
// is written where `go` is 0.

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

// h = a*h + rate*r; w -= h
template <typename T>
__global__ void sgd(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& h) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A v = a_ * A(h) + at.rate() * at.regularized(A(w), A(g));
        h = T(v);
        g = T(v);
        w = T(A(w) - v);
      },
      both(w), both(g), both(h));
}

// h' = a*h + rate*r; w -= (1 + a)*h' - a*h; h = h'
template <typename T>
__global__ void nesterov(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& h) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A before = A(h), after = a_ * before + at.rate() * at.regularized(A(w), A(g));
        const A v = (1 + a_) * after - a_ * before;
        h = T(after);
        g = T(v);
        w = T(A(w) - v);
      },
      both(w), both(g), both(h));
}

// h = a*h + b*r^2; w -= rate*r/(sqrt(h) + c)
template <typename T>
__global__ void rms(T* w, T* g, T* h, ARGUMENTS) {
  PREPARE
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& h) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A r = at.regularized(A(w), A(g)), mean = a_ * A(h) + b_ * r * r;
        const A v = at.rate() * r / (sqrt(mean) + c_);
        h = T(mean);
        g = T(v);
        w = T(A(w) - v);
      },
      both(w), both(g), both(h));
}

// h = a*h + (1 - a)*r^2; v = r*sqrt((u + b)/(h + b)); u = a*u + (1 - a)*v^2; w -= rate*v
template <typename T>
__global__ void adadelta(T* w, T* g, T* h, T* u, ARGUMENTS) {
  PREPARE
  const A take = 1 - a_;
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& h, T& u) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A r = at.regularized(A(w), A(g)), mean = a_ * A(h) + take * r * r;
        const A v = r * sqrt((A(u) + b_) / (mean + b_)), step = at.rate() * v;
        h = T(mean);
        u = T(a_ * A(u) + take * v * v);
        g = T(step);
        w = T(A(w) - step);
      },
      both(w), both(g), both(h), both(u));
}

// m = a*m + (1 - a)*r; v = b*v + (1 - b)*r^2; w -= rate*d*m/(sqrt(v) + c), d the correction
template <typename T>
__global__ void adam(T* w, T* g, T* m, T* v, ARGUMENTS) {
  PREPARE
  each<PACK>(
      n,
      [=](i64 i, T& w, T& g, T& m, T& v) mutable {
        at.move(i);
        if (!at.inside(i)) return;
        const A r = at.regularized(A(w), A(g));
        const A first = a_ * A(m) + (1 - a_) * r, second = b_ * A(v) + (1 - b_) * r * r;
        const A step = at.rate() * d_ * first / (sqrt(second) + c_);
        m = T(first);
        v = T(second);
        g = T(step);
        w = T(A(w) - step);
      },
      both(w), both(g), both(m), both(v));
}
