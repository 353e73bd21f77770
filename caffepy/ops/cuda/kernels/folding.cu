// Weights of products of several pixels at once, and numbers and sums of their channels; see folding.py. With f pixels
// folded into one, channel j * C + c of that is channel c of pixel j.

#include "pack.cuh"

// folded (f O, f C) = w (O, C) in f places of the diagonal. The rest is not written.
template <typename T> __global__ void __launch_bounds__(256)
fold_weights(const float* w, T* folded, i64 outputs, i64 inputs, i64 pixels) {
  FOR_EACH(i, outputs * inputs) {
    const unsigned o = unsigned(i) / unsigned(inputs), c = unsigned(i) % unsigned(inputs);
    const T value(w[i]);
    for (unsigned j = 0; j < pixels; ++j) folded[(j * outputs + o) * (pixels * inputs) + j * inputs + c] = value;
  }
}

// w (O, C) += the places of the diagonal of folded (f O, f C)
__global__ void __launch_bounds__(256)
add_folded(const float* folded, float* w, i64 outputs, i64 inputs, i64 pixels) {
  FOR_EACH(i, outputs * inputs) {
    const unsigned o = unsigned(i) / unsigned(inputs), c = unsigned(i) % unsigned(inputs);
    float sum = 0;
    for (unsigned j = 0; j < pixels; ++j) sum += folded[(j * outputs + o) * (pixels * inputs) + j * inputs + c];
    w[i] += sum;
  }
}
