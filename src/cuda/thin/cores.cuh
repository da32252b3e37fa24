// The mainloop of a thin convolution on CUDA cores: any kernel, stride, padding, dilation, transposed or not.
//
//   y[o, q] = bias[o] + sum over input channels c of (sum over taps t  w[o, c, t] x[c, i(q, t)])
//
// A thread computes `channels_at_once` output channels of one position at a time. The weights lie in shared
// memory as f32, [chunk of channels][c][t][channel], or, of a wide convolution, come from memory as x does,
// by way of the first-level cache. Taps that meet no input are left out of the sum.
#pragma once

#include "thin/thin.cuh"

namespace onepass {

template <class Convolution, class Tail, class Numbers>
struct CoresMainloop {
  using C = Convolution;
  static constexpr int at_once = Numbers::channels_at_once;
  static constexpr int chunks = (C::channels + at_once - 1) / at_once;
  static constexpr int samples = 1;
  static constexpr int team = 32;  // each lane has all channels of a chunk
  static constexpr bool in_shared = Numbers::weights_in_shared;
  static constexpr int weight_floats = in_shared ? chunks * at_once * C::in_channels * C::taps : 0;
  static constexpr int shared_floats = in_shared ? weight_floats + chunks * at_once : 0;  // with the bias

  const float* weights;  // shared

  // Of a group of channels.
  template <class Parameters>
  static __device__ __forceinline__ float weight(const Parameters& p, int group, int o, int c, int t) {
    const int64 index = group * group_weights<C> +
                        (C::transposed ? (static_cast<int64>(c) * C::channels + o) * C::taps + t
                                       : (static_cast<int64>(o) * C::in_channels + c) * C::taps + t);
    const float value = o < C::channels ? load_one<typename C::Weight>(p.parameter[0], index) : 0.0f;
    return C::rounds_to_tf32 ? round_operand<C>(value) : value;
  }
  template <class Parameters>
  static __device__ __forceinline__ float bias(const Parameters& p, int64 n, int o) {
    if constexpr (C::has_bias) {
      if (o < C::channels) return load_one<typename C::Bias>(p.parameter[1], Tail::channel(n, o));
    }
    return 0.0f;
  }

  template <class Parameters>
  static __device__ __forceinline__ void load_weights(const Parameters& p, float* weights) {
    if constexpr (!in_shared) return;
    static_assert(!in_shared || C::groups == 1);
    for (int i = threadIdx.x; i < weight_floats; i += Numbers::threads) {
      const int o = i / (at_once * C::in_channels * C::taps) * at_once + i % at_once;
      const int term = i / at_once % (C::in_channels * C::taps);
      weights[i] = weight(p, 0, o, term / C::taps, term % C::taps);
    }
    for (int o = threadIdx.x; o < chunks * at_once; o += Numbers::threads)
      weights[weight_floats + o] = bias(p, 0, o);
    __syncthreads();
  }

  // The sums of the channels of a chunk at one position.
  template <class Parameters>
  __device__ __forceinline__ void convolve(const Parameters& p, int64 n, const ThinClass<C>& of_class,
                                           const int (&j)[3], int chunk, float (&sum)[at_once]) const {
    const int64 sample = input_origin<C>(n);
    const int group = group_of<C>(n);
    const float* own = weights + (in_shared ? chunk * at_once * C::in_channels * C::taps : 0);
    int begin[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) begin[d] = j[d] * static_cast<int>(C::step(d)) + of_class.base[d];
#pragma unroll 1
    for (int c = 0; c < C::in_channels; ++c) {
      float part[at_once] = {};
#pragma unroll 1
      for (int m0 = 0; m0 < of_class.count[0]; ++m0) {
        const int i0 = begin[0] + m0 * static_cast<int>(C::delta(0));
        if (static_cast<unsigned>(i0) >= static_cast<unsigned>(C::input_size(0))) continue;
        const int t0 = of_class.first[0] + m0 * static_cast<int>(C::tap_step(0));
#pragma unroll 1
        for (int m1 = 0; m1 < of_class.count[1]; ++m1) {
          const int i1 = begin[1] + m1 * static_cast<int>(C::delta(1));
          if (static_cast<unsigned>(i1) >= static_cast<unsigned>(C::input_size(1))) continue;
          const int t1 = of_class.first[1] + m1 * static_cast<int>(C::tap_step(1));
          const int64 row =
              sample + c * C::input_stride(1) + i0 * C::input_stride(2) + i1 * C::input_stride(3);
          const int first_tap =
              (t0 * static_cast<int>(C::kernel(1)) + t1) * static_cast<int>(C::kernel(2)) + of_class.first[2];
#pragma unroll 4
          for (int m2 = 0; m2 < of_class.count[2]; ++m2) {
            const int i2 = begin[2] + m2 * static_cast<int>(C::delta(2));
            if (static_cast<unsigned>(i2) >= static_cast<unsigned>(C::input_size(2))) continue;
            float x = load_one<typename Tail::Input>(p.input, row + i2 * C::input_stride(4));
            if constexpr (C::rounds_to_tf32) x = round_operand<C>(x);
            const int t = first_tap + m2 * static_cast<int>(C::tap_step(2));
#pragma unroll
            for (int k = 0; k < at_once; ++k) {
              const float w = in_shared ? own[(c * C::taps + t) * at_once + k]
                                        : weight(p, group, chunk * at_once + k, c, t);
              part[k] = fmaf(w, x, part[k]);
            }
          }
        }
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) sum[k] += part[k];
    }
  }

  template <class Parameters>
  __device__ __forceinline__ void finish_samples(const Parameters&, int64) const {}

  template <class Parameters, class Epilogue>
  __device__ __forceinline__ void run(const Parameters& p, int64 n, int tile, Epilogue& epilogue) const {
    constexpr int tiles_of_class = Numbers::tiles_of_class;
    const ThinClass<C> of_class(tile / tiles_of_class);
    const int first = tile % tiles_of_class * Numbers::tile_positions;
    const int all = of_class.all_positions();
    const int last = first + Numbers::tile_positions < all ? first + Numbers::tile_positions : all;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      int slot[at_once];
      bool in_range[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        in_range[k] = C::channels % at_once == 0 || chunk * at_once + k < C::channels;
        slot[k] = in_range[k] ? chunk * at_once + k : 0;
      }
      auto rows = begin_rows(epilogue, slot, in_range);
#pragma unroll 1
      for (int flat = first + static_cast<int>(threadIdx.x); flat < last; flat += Numbers::threads) {
        int j[3];
        of_class.split(flat, j);
        float sum[at_once] = {};
        convolve(p, n, of_class, j, chunk, sum);
        float h[at_once][1];
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
          const int o = chunk * at_once + k;
          h[k][0] = sum[k] + (in_shared ? weights[weight_floats + o] : bias(p, n, o));
        }
        const int offset[1] = {of_class.output_offset(j)};
        epilogue.take(rows, h, offset, All{});
      }
      epilogue.template finish<team>(rows);
    }
  }
};

}  // namespace onepass
