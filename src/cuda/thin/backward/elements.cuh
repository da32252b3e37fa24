// The chains of one element in passes 1 and 2, and the sums of each channel.
#pragma once

#include "thin/backward/backward.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Elements {
  const Thread thread;

  // Values of each channel of the sample.
  template <bool second>
  __device__ __forceinline__ void load_rows(int64 n, const SampleScales& scales) const {
    for (int c = threadIdx.x; c < rows; c += threads) {
      if constexpr (halves)
        thread.s.unscale[c] = inverse_of_power(scales.x) * inverse_of_power(thread.s.weight_scale[c]);
      RowValues own{0.0f, 1.0f, 1.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
      if (c < channels) {
        if constexpr (Tail::has_norm) {
          const int64 slab = n * groups + c / Tail::group_channels;
          own.mean = thread.p.statistics[2 * slab];
          own.rstd = thread.p.statistics[2 * slab + 1];
          own.gamma = Tail::weight(thread.p, c);
          own.beta = Tail::bias(thread.p, c);
          if constexpr (second) {
            own.scale = own.rstd * own.gamma;
            own.sum = -own.rstd * load_shared_by_blocks(thread.p.slab_sums + 2 * slab);
            own.product = -own.rstd * load_shared_by_blocks(thread.p.slab_sums + 2 * slab + 1);
            if constexpr (halves) {  // dh, and what follows from it, is linear in these
              own.scale *= scales.dh;
              own.sum *= scales.dh;
              own.product *= scales.dh;
            }
          }
        }
        if constexpr (Tail::has_mean) {
          constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
          const int64 index = n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride;
          own.dy = load_one<typename Tail::OutputGradient>(thread.p.output_gradient, index) * per_element;
        }
      }
      thread.s.row[c] = own;
    }
  }

  template <int Count>
  struct RowSums {
    float value[row_tiles][2][Count > 0 ? Count : 1] = {};
    float peak[row_tiles][2] = {};  // of |dz|, in pass 1 with f16 operands
  };

  // Adds an element to the sums of its channel. Pass 2 returns dh. An element that is not valid adds nothing
  // and has a dh of 0.
  template <bool second, int Count>
  __device__ __forceinline__ float element(const RowValues& row, const float* before_values,
                                           const float* after_values, float x, float g, bool valid,
                                           int64 index, float (&sum)[Count], float& peak) const {
    x = valid ? x : 0.0f;
    g = valid ? g : 0.0f;
    typename Before::template Tensors<1> before;
    typename After::template Tensors<1> after;
    before.load(thread.p, index);
    after.load(thread.p, index);
    typename Before::template TensorGradients<1> before_gradients;
    typename After::template TensorGradients<1> after_gradients;
    float of_after[After::channel_operands > 0 ? After::channel_operands : 1];
    float of_before[Before::channel_operands > 0 ? Before::channel_operands : 1];
    float dh;
    if constexpr (!Tail::has_norm) {
      dh = After::gradient(x, after_values, after, 0, g, of_after, after_gradients);
#pragma unroll
      for (int i = 0; i < chain_sums; ++i) sum[i] += of_after[i];
    } else {
      const float h = Before::value(x, before_values, before, 0);
      const float xhat = (h - row.mean) * row.rstd;
      const float z = fmaf(xhat, row.gamma, row.beta);
      const float dz = After::gradient(z, after_values, after, 0, g, of_after, after_gradients);
      if constexpr (!second) {
        sum[0] += dz;
        sum[1] = fmaf(dz, xhat, sum[1]);
        if constexpr (halves) peak = fmaxf(peak, fabsf(dz));
#pragma unroll
        for (int i = 0; i < after_sums; ++i) sum[2 + i] += of_after[i];
        return 0.0f;
      }
      if constexpr (Numbers::may_read_output) sum[second_sums - 1] += valid ? xhat : 0.0f;
      const float to_chain = valid ? fmaf(xhat, row.product, fmaf(row.scale, dz, row.sum)) : 0.0f;
      dh = Before::gradient(x, before_values, before, 0, to_chain, of_before, before_gradients);
#pragma unroll
      for (int i = 0; i < chain_sums; ++i) sum[i] += of_before[i];
    }
    if constexpr (second) {
      if constexpr (Numbers::wants_bias) sum[chain_sums] += dh;
      before_gradients.store(thread.p, index);
      after_gradients.store(thread.p, index);
    }
    return dh;
  }

  // Pass 2 is the last to read dy: it leaves the cache to the ring buffer of dh.
  template <bool second>
  __device__ __forceinline__ float load_gradient(int64 index) const {
    using Gradient = typename Tail::OutputGradient;
    if constexpr (!second) return load_one<Gradient>(thread.p.output_gradient, index);
    if constexpr (Gradient::bytes == 4)
      return __ldcs(static_cast<const float*>(thread.p.output_gradient) + index);
    const uint16 bits = __ldcs(static_cast<const uint16*>(thread.p.output_gradient) + index);
    return load_one<Gradient>(&bits, 0);
  }

  template <int Count, class Sums>
  __device__ __forceinline__ void store_sums(Sums& sums, float* to) const {
    if constexpr (Count > 0) {
#pragma unroll
      for (int i = 0; i < row_tiles * 2; ++i) {
#pragma unroll
        for (int k = 0; k < Count; ++k) {
          const float sum = lanes_sum<4>(sums.value[i / 2][i % 2][k]);
          if (thread.in_quad == 0) thread.s.passes.sum[thread.warp][i * 8 + thread.quad][k] = sum;
        }
      }
      __syncthreads();
      for (int i = threadIdx.x; i < channels * Count; i += threads) {
        float total = 0.0f;
        for (int w = 0; w < warps; ++w) total += thread.s.passes.sum[w][i / Count][i % Count];
        to[i] = total;
      }
    }
  }

  // Raises the sample's bound to the block's largest |rstd gamma dz|.
  template <class Sums>
  __device__ __forceinline__ void record_peak(int64 n, const Sums& sums) const {
    uint32 most = 0;
#pragma unroll
    for (int i = 0; i < row_tiles * 2; ++i) {
      const RowValues& row = thread.s.row[i * 8 + thread.quad];
      const uint32 own = finite_magnitude(sums.peak[i / 2][i % 2] * row.rstd * row.gamma);
      most = most > own ? most : own;
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (thread.lane == 0) atomicMax(thread.p.peaks + n, most);
  }
};

}  // namespace onepass
