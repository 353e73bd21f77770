// What the losses of YOLO compare: boxes of cells and anchors with true boxes, x, y, w, h of the centre and the size,
// all in units of the image. Arrays are (N, A, 5 + K, H, W), truths (N, T, 5) = class, x, y, w, h.

#include "pack.cuh"

enum { IOU, GIOU, MSE, DIOU, CIOU };  // as in ops/overlap.py
enum { PLAIN, RESCORE, SMOOTH };
constexpr float PI = 3.14159265358979f;

struct Box {
  float x, y, w, h;
  __device__ float left() const { return x - w / 2; }
  __device__ float right() const { return x + w / 2; }
  __device__ float top() const { return y - h / 2; }
  __device__ float bottom() const { return y + h / 2; }
};

__device__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ float square(float x) { return x * x; }

// How far the ratios of width to height differ, 0 to 1.
__device__ float ratio_term(const Box& a, const Box& b) { return 4 / (PI * PI) * square(atanf(b.w / b.h) - atanf(a.w / a.h)); }

__device__ float overlap(const Box& a, const Box& b, i64 kind) {
  const float wide = fminf(a.right(), b.right()) - fmaxf(a.left(), b.left());
  const float high = fminf(a.bottom(), b.bottom()) - fmaxf(a.top(), b.top());
  const float both = wide < 0 || high < 0 ? 0 : wide * high;
  const float united = a.w * a.h + b.w * b.h - both;
  const float iou = both / united;
  const float cw = fmaxf(a.right(), b.right()) - fminf(a.left(), b.left());
  const float ch = fmaxf(a.bottom(), b.bottom()) - fminf(a.top(), b.top());
  const float away = square(a.x - b.x) + square(a.y - b.y), hull = cw * ch, diagonal = cw * cw + ch * ch;
  if (kind == GIOU && hull != 0) return iou - (hull - united) / hull;
  if (kind == DIOU && diagonal != 0) return iou - powf(away / diagonal, 0.6f);
  if (kind == CIOU && diagonal != 0) {
    const float term = ratio_term(a, b);
    return iou - (away / diagonal + term / (1 - iou + term + 0.000001f) * term);
  }
  return iou;
}

// What darknet takes for the derivatives of the overlap by x, y, w and h of box a.
__device__ Box slope(const Box& a, const Box& b, i64 kind) {
  const float al = a.left(), ar = a.right(), at = a.top(), ab = a.bottom();
  const float bl = b.left(), br = b.right(), bt = b.top(), bb = b.bottom();
  const float wide = ar - al, high = ab - at;
  const float iw = fminf(ar, br) - fmaxf(al, bl), ih = fminf(ab, bb) - fmaxf(at, bt);
  const float both = iw * ih, united = wide * high + (br - bl) * (bb - bt) - both;
  const float cw = fmaxf(ar, br) - fminf(al, bl), ch = fmaxf(ab, bb) - fminf(at, bt), hull = cw * ch;
  // by the left, right, top and bottom end: intersection, union, hull
  const float il = al > bl ? -ih : 0, ir = ar < br ? ih : 0, it = at > bt ? -iw : 0, ib = ab < bb ? iw : 0;
  const float ul = -high - il, ur = high - ir, ut = -wide - it, ub = wide - ib;
  const float hl = al < bl ? -ch : 0, hr = ar > br ? ch : 0, ht = at < bt ? -cw : 0, hb = ab > bb ? cw : 0;
  const bool apart = iw <= 0 || ih <= 0;
  float dl = 0, dr = 0, dt = 0, db = 0;
  if (united > 0 && !(apart && kind == GIOU)) {
    const float s = united * united;
    dl = (united * il - both * ul) / s;
    dr = (united * ir - both * ur) / s;
    dt = (united * it - both * ut) / s;
    db = (united * ib - both * ub) / s;
  }
  if (kind == GIOU && (hull > 0 || apart)) {
    const float s = hull * hull;
    dl += (hull * ul - united * hl) / s;
    dr += (hull * ur - united * hr) / s;
    dt += (hull * ut - united * ht) / s;
    db += (hull * ub - united * hb) / s;
  }
  Box d{dl + dr, dt + db, dr - dl, db - dt};
  if (kind != DIOU && kind != CIOU) return d;
  const float away = square(a.x - b.x) + square(a.y - b.y), diagonal = cw * cw + ch * ch;
  const float left = al < bl, right = ar > br, top = at < bt, bottom = ab > bb;
  if (apart) d = Box{0, 0, 0, 0};
  if (diagonal > 0 || apart) {
    const float s = diagonal * diagonal;
    d.x += (2 * (b.x - a.x) * diagonal - 2 * cw * (right - left) * away) / s;
    d.y += (2 * (b.y - a.y) * diagonal - 2 * ch * (bottom - top) * away) / s;
    d.w += cw * (right + left) * away / s;
    d.h += ch * (bottom + top) * away / s;
    if (kind == CIOU) {
      const float term = ratio_term(a, b), alpha = term / (1 - both / united + term + 0.000001f);
      const float turn = 8 / (PI * PI) * (atanf(b.w / b.h) - atanf(a.w / a.h));
      d.w += alpha * turn * a.h;
      d.h -= alpha * turn * a.w;
    }
  }
  return d;
}

template <typename T>
__global__ void yolo_scores(const T* x, const T* truths, const float* sizes, T* p, T* delta, i64 images, i64 anchors,
                            i64 length, i64 h, i64 w, i64 most, i64 softmax, i64 kind, double scale, double threshold) {
  const i64 plane = h * w;
  FOR_EACH(k, images * anchors * plane) {
    const i64 j = k % w, i = k / w % h, a = k / plane % anchors, n = k / plane / anchors;
    const i64 base = (n * anchors + a) * length * plane + i * w + j;
    const T* v = x + base;
    T *q = p + base, *d = delta + base;
    const auto value = [=](i64 c) { return float(v[c * plane]); };
    const float u0 = sigmoid(value(0)), u1 = sigmoid(value(1)), o = sigmoid(value(4));
    q[0] = softmax ? v[0] : T(u0);
    q[plane] = softmax ? v[plane] : T(u1);
    q[2 * plane] = v[2 * plane];
    q[3 * plane] = v[3 * plane];
    q[4 * plane] = T(o);
    if (softmax) {
      float largest = value(5), total = 0;
      for (i64 c = 6; c < length; ++c) largest = fmaxf(largest, value(c));
      for (i64 c = 5; c < length; ++c) total += expf(value(c) - largest);
      for (i64 c = 5; c < length; ++c) q[c * plane] = T(expf(value(c) - largest) / total);
    } else {
      for (i64 c = 5; c < length; ++c) q[c * plane] = T(sigmoid(value(c)));
    }
    const Box box{(j + u0) / w, (i + u1) / h, expf(value(2)) * sizes[2 * a], expf(value(3)) * sizes[2 * a + 1]};
    float best = 0;
    for (i64 t = 0; t < most; ++t) {
      const T* b = truths + (n * most + t) * 5;
      if (float(b[1]) == 0) break;
      const float share = overlap(box, Box{float(b[1]), float(b[2]), float(b[3]), float(b[4])}, kind);
      if (share > best) best = share;
    }
    for (i64 c = 0; c < length; ++c) d[c * plane] = T(0);
    if (best <= float(threshold)) d[4 * plane] = T(softmax ? float(scale) * o * o * (1 - o) : o);
  }
}

__device__ i64 cell(float place, i64 size) { return min(max(i64(place * size), i64(0)), size - 1); }

// A warp for each image: its truths come one after the other, its lanes share the classes.
template <typename T>
__global__ void region_truths(const T* p, const T* truths, const float* sizes, T* delta, i64 anchors, i64 length, i64 h,
                              i64 w, i64 most, i64 by_bias, i64 rule, double object_scale, double class_scale,
                              double coord_scale) {
  const i64 n = blockIdx.x, plane = h * w, whole = anchors * length * plane;
  for (i64 t = 0; t < most; ++t) {
    const T* b = truths + (n * most + t) * 5;
    const Box truth{float(b[1]), float(b[2]), float(b[3]), float(b[4])};
    if (truth.w == 0) break;
    const i64 i = cell(truth.y, h), j = cell(truth.x, w);
    float best = 0;
    i64 chosen = 0, place = 0;
    for (i64 a = 0; a < anchors; ++a) {
      const T* q = p + n * whole + a * length * plane + i * w + j;
      Box box{0, 0, sizes[2 * a], sizes[2 * a + 1]};
      if (!by_bias) {
        box.w *= expf(float(q[2 * plane]));
        box.h *= expf(float(q[3 * plane]));
      }
      const float share = overlap(box, Box{0, 0, truth.w, truth.h}, MSE);
      if (share > best) {
        best = share;
        chosen = a;
        place = i * w + j;
      }
    }
    const i64 base = n * whole + chosen * length * plane + place;
    const T* q = p + base;
    T* d = delta + base;
    if (threadIdx.x == 0) {
      const float sx = sigmoid(float(q[0])), sy = sigmoid(float(q[plane]));
      const float tw = float(q[2 * plane]), th = float(q[3 * plane]), o = float(q[4 * plane]);
      const float bw = sizes[2 * chosen], bh = sizes[2 * chosen + 1];
      const float c = float(coord_scale) * (rule == PLAIN ? 2 - truth.w * truth.h : 1);
      const auto move = [=](float x) { return rule == SMOOTH ? fminf(fmaxf(x, -1), 1) : x; };
      d[0] = T(-c * move(truth.x * w - j - sx) * sx * (1 - sx));
      d[plane] = T(-c * move(truth.y * h - i - sy) * sy * (1 - sy));
      d[2 * plane] = T(-c * move(logf(truth.w / bw) - tw));
      d[3 * plane] = T(-c * move(logf(truth.h / bh) - th));
      const Box box{(j + sx) / w, (i + sy) / h, expf(tw) * bw, expf(th) * bh};
      const float goal = rule == RESCORE ? overlap(box, truth, MSE) : 1;
      const float away = rule == SMOOTH ? 2 * (1 - o) * (1 - o) * (1 - o) : goal - o;
      d[4 * plane] = T(-float(object_scale) * away * o * (1 - o));
    }
    for (i64 k = 5 + threadIdx.x; k < length; k += blockDim.x)
      d[k * plane] = T(-float(class_scale) * ((k - 5 == i64(float(b[0]))) - float(q[k * plane])));
    __syncwarp();
  }
}

// A warp for each image: its lanes look at 32 rows at a time.
template <typename T> __global__ void sort_truths(const T* rows, T* truths, i64 count) {
  T* out = truths + blockIdx.x * count * 5;
  i64 known = 0;
  for (i64 first = 0; first < count; first += 32) {
    const i64 g = first + threadIdx.x;
    const T* row = rows + 8 * g;
    const bool mine = g < count && float(row[0]) >= 0 && i64(float(row[0])) == blockIdx.x;
    const unsigned lanes = __ballot_sync(0xffffffffu, mine);
    if (mine) {
      T* b = out + 5 * (known + __popc(lanes & ((1u << threadIdx.x) - 1)));
      b[0] = T(row[1] - 1);
      b[1] = T((row[3] + row[5]) / 2);
      b[2] = T((row[4] + row[6]) / 2);
      b[3] = T(row[5] - row[3]);
      b[4] = T(row[6] - row[4]);
    }
    known += __popc(lanes);
  }
  for (i64 k = 5 * known + threadIdx.x; k < 5 * count; k += 32) out[k] = T(0);
}

__device__ float bounded(float value, float most) { return isfinite(value) ? fminf(fmaxf(value, -most), most) : 0; }

// A warp for each image, as above. The fork leaves out the anchor whose number is the slot of the best one.
template <typename T>
__global__ void yolo_truths(const T* p, const T* truths, const float* anchors, const int* slots, T* delta, T* stats,
                            i64 boxes, i64 length, i64 h, i64 w, i64 most, i64 count, i64 kind, double coord,
                            double object, double label, double smooth, i64 focal, double normalizer, double limit,
                            i64 accumulate, double least) {
  const i64 n = blockIdx.x, plane = h * w;
  float missing = 0, trained = 0;
  for (i64 t = 0; t < most; ++t) {
    const T* b = truths + (n * most + t) * 5;
    const Box truth{float(b[1]), float(b[2]), float(b[3]), float(b[4])};
    if (truth.w == 0) break;
    const i64 i = cell(truth.y, h), j = cell(truth.x, w);
    const auto likeness = [&](i64 a) {
      return overlap(Box{0, 0, anchors[2 * a], anchors[2 * a + 1]}, Box{0, 0, truth.w, truth.h}, kind);
    };
    float best = 0;
    i64 chosen = -1;
    for (i64 a = 0; a < count; ++a)
      if (likeness(a) > best) {
        best = likeness(a);
        chosen = a;
      }
    const i64 found = chosen >= 0 ? slots[chosen] : -1, excluded = found >= 0 ? found : chosen;
    for (i64 turn = -1; turn < count; ++turn) {
      const i64 a = turn < 0 ? chosen : turn, slot = a >= 0 ? slots[a] : -1;
      if (slot < 0) continue;
      if (turn >= 0 && (turn == excluded || least >= 1 || !(likeness(a) > float(least)))) continue;
      const i64 base = (n * boxes + slot) * length * plane + i * w + j;
      const T* q = p + base;
      T* d = delta + base;
      const float tw = float(q[2 * plane]), th = float(q[3 * plane]);
      const float bw = anchors[2 * a], bh = anchors[2 * a + 1];
      const Box box{(j + float(q[0])) / w, (i + float(q[plane])) / h, expf(tw) * bw, expf(th) * bh};
      const i64 true_class = 5 + min(max(i64(float(b[0])), i64(0)), length - 6);
      const bool known = float(d[true_class * plane]) != 0;
      __syncwarp();
      if (threadIdx.x == 0) {
        if (kind == MSE) {
          const float c = -float(coord) * (2 - truth.w * truth.h);
          d[0] = T(c * (truth.x * w - j - float(q[0])));
          d[plane] = T(c * (truth.y * h - i - float(q[plane])));
          d[2 * plane] = T(c * (logf(truth.w / bw) - tw));
          d[3 * plane] = T(c * (logf(truth.h / bh) - th));
        } else {
          const Box s = slope(box, truth, kind);
          const float moves[4] = {s.x, s.y, s.w * expf(tw), s.h * expf(th)};
          for (i64 c = 0; c < 4; ++c) {
            const float before = accumulate ? float(d[c * plane]) : 0;
            d[c * plane] = T(before - bounded(moves[c] * float(normalizer), float(limit)));
          }
        }
        d[4 * plane] = T(-float(object) * (1 - float(q[4 * plane])));
        if (known) d[true_class * plane] = T(-float(label) * (1 - float(smooth) / 2 - float(q[true_class * plane])));
      }
      missing += 1 - overlap(box, truth, kind == IOU ? i64(DIOU) : kind);
      trained += 1;
      if (!known) {
        float factor = float(label), low = float(smooth) / 2, high = 1 - low;
        if (focal) {
          const float u = float(q[true_class * plane]) + 1e-15f;
          factor *= -0.5f * (1 - u) * (2 * u * logf(u) + u - 1);
          low = 0;
          high = 1;
        }
        for (i64 k = 5 + threadIdx.x; k < length; k += blockDim.x)
          d[k * plane] = T(-factor * ((k == true_class ? high : low) - float(q[k * plane])));
      }
      __syncwarp();
    }
  }
  if (threadIdx.x == 0) {
    stats[2 * n] = T(missing);
    stats[2 * n + 1] = T(trained);
  }
}
