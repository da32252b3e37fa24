// The operands of an affine stage from a batch norm's statistics, in f32: one thread for a channel.
//
//   scale = weight / sqrt(variance + eps), shift = bias - mean * scale
#pragma once

#include "device/types.cuh"
#include "tail/parameters.cuh"

namespace onepass {

template <class Element>
struct ScaleAndShift {
  using Parameters = ScaleAndShiftParameters;
  const Parameters& p;

  __device__ __forceinline__ void run() const {
    const int64 c = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (c >= p.channels) return;
    const float variance = load_one<Element>(p.variance, c);
    const float weight = p.weight ? load_one<Element>(p.weight, c) : 1.0f;
    const float bias = p.bias ? load_one<Element>(p.bias, c) : 0.0f;
    const float scale = weight / sqrtf(variance + static_cast<float>(p.eps));
    p.scale[c] = scale;
    p.shift[c] = bias - load_one<Element>(p.mean, c) * scale;
  }
};

}  // namespace onepass
