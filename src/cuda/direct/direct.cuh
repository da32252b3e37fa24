// Any convolution of the language, one thread an output element: plain, correct for all strides, never fast.
//
//   y[n, o, q] = bias[o] + sum over c of the group, taps t:  w[o, c, t] x[n, c, q s - p + t d]
// and for a transposed one  w[c, o, t] x[n, c, i]  over the inputs with  i s - p + t d = q.
// Terms of one input channel are summed apart, which keeps a chain of additions below 256 for all usual
// kernels. Without a convolution it copies: from any strides and type to any others.
#pragma once

#include "device/types.cuh"
#include "direct/parameters.cuh"

namespace onepass {

template <class Convolution>
struct Direct {
  using C = Convolution;
  const DirectParameters& p;

  // The inputs that tap `t` of dimension `d` takes to output position `q`: at most one; -1 where there is
  // none.
  static __device__ __forceinline__ int64 input_position(int d, int64 q, int64 t) {
    if constexpr (C::transposed) {
      const int64 scaled = q + C::padding(d) - t * C::dilation(d);
      if (scaled < 0 || scaled % C::stride(d) != 0) return -1;
      const int64 i = scaled / C::stride(d);
      return i < C::input_size(d) ? i : -1;
    } else {
      const int64 i = q * C::stride(d) - C::padding(d) + t * C::dilation(d);
      return i >= 0 && i < C::input_size(d) ? i : -1;
    }
  }

  __device__ __forceinline__ float taps(int64 n, int64 o, int64 c, int64 q0, int64 q1, int64 q2) const {
    float sum = 0.0f;
    const int64 group = o / C::group_outputs;
    const int64 plane = n * C::input_stride(0) + (group * C::group_inputs + c) * C::input_stride(1);
    const int64 weights = C::transposed ? (group * C::group_inputs + c) * C::weight_stride(0) +
                                              o % C::group_outputs * C::weight_stride(1)
                                        : o * C::weight_stride(0) + c * C::weight_stride(1);
    for (int64 t0 = 0; t0 < C::kernel(0); ++t0) {
      const int64 i0 = input_position(0, q0, t0);
      if (i0 < 0) continue;
      for (int64 t1 = 0; t1 < C::kernel(1); ++t1) {
        const int64 i1 = input_position(1, q1, t1);
        if (i1 < 0) continue;
        for (int64 t2 = 0; t2 < C::kernel(2); ++t2) {
          const int64 i2 = input_position(2, q2, t2);
          if (i2 < 0) continue;
          const float x = load_one<typename C::Input>(
              p.input, plane + i0 * C::input_stride(2) + i1 * C::input_stride(3) + i2 * C::input_stride(4));
          const float w =
              load_one<typename C::Weight>(p.weight, weights + t0 * C::weight_stride(2) +
                                                         t1 * C::weight_stride(3) + t2 * C::weight_stride(4));
          sum = C::rounds_to_tf32 ? fmaf(round_operand<C>(w), round_operand<C>(x), sum) : fmaf(w, x, sum);
        }
      }
    }
    return sum;
  }

  __device__ __forceinline__ void run() const {
    constexpr int64 space = C::output_size(0) * C::output_size(1) * C::output_size(2);
    const int64 total = p.batch * C::output_channels * space;
    for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
         i += static_cast<int64>(gridDim.x) * blockDim.x) {
      int64 rest = i;
      const int64 q2 = rest % C::output_size(2);
      rest /= C::output_size(2);
      const int64 q1 = rest % C::output_size(1);
      rest /= C::output_size(1);
      const int64 q0 = rest % C::output_size(0);
      rest /= C::output_size(0);
      const int64 o = rest % C::output_channels;
      const int64 n = rest / C::output_channels;
      float value = 0.0f;
      if constexpr (C::convolves) {
        for (int64 c = 0; c < C::group_inputs; ++c) value += taps(n, o, c, q0, q1, q2);
        if constexpr (C::has_bias) value += load_one<typename C::Bias>(p.bias, o * C::bias_stride);
      } else {
        value = load_one<typename C::Input>(p.input, n * C::input_stride(0) + o * C::input_stride(1) +
                                                         q0 * C::input_stride(2) + q1 * C::input_stride(3) +
                                                         q2 * C::input_stride(4));
      }
      store_one<typename C::Output>(p.output,
                                    n * C::output_stride(0) + o * C::output_stride(1) +
                                        q0 * C::output_stride(2) + q1 * C::output_stride(3) +
                                        q2 * C::output_stride(4),
                                    value);
    }
  }
};

}  // namespace onepass
