// The end of narrow_backward.cuh: parts of dweight and dbias are added in their order.
#pragma once

#include "direct/narrow/weight_gradient.cuh"

namespace onepass {

// Parts of dbias, where the kernel of dweight does not add them. `S` is the gradient's side: a tensor that
// could be staged. A block has `bias_lanes` neighbouring channels.
template <class S, class Tail, class N>
struct NarrowBiasGradient {
  using Parameters = NarrowBiasGradientParameters;
  static constexpr int threads = N::bias_threads;
  static constexpr int rows = threads / N::bias_lanes;
  static constexpr int channels = S::groups * S::in_channels;
  static constexpr auto sample =
      static_cast<unsigned>(S::input_size(0) * S::input_size(1) * S::input_size(2));

  const Parameters& p;

  __device__ __forceinline__ float load(unsigned at, int channel) const {
    const unsigned n = at / sample;
    unsigned rest = at - n * sample;
    int64 index = n * S::input_stride(0) + channel * S::input_stride(1);
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const auto size = static_cast<unsigned>(S::input_size(d));
      index += static_cast<int>(rest % size) * S::input_stride(d + 2);
      rest /= size;
    }
    return load_one<typename Tail::Input>(p.gradient, index);
  }

  __device__ __forceinline__ void run() const {
    __shared__ float scratch[threads];
    constexpr int channel_tiles = (channels + N::bias_lanes - 1) / N::bias_lanes;
    const int part = static_cast<int>(blockIdx.x) / channel_tiles;
    const int channel = static_cast<int>(blockIdx.x) % channel_tiles * N::bias_lanes +
                        static_cast<int>(threadIdx.x) % N::bias_lanes;
    const unsigned first = static_cast<unsigned>(part) * (rows * N::bias_terms) + threadIdx.x / N::bias_lanes;
    float sums[8] = {};  // short chains
    if (channel < channels) {
#pragma unroll 1
      for (int i = 0; i < N::bias_terms; i += 8) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const unsigned at = first + static_cast<unsigned>((i + k) * rows);
          if (at < p.positions) sums[k] += load(at, channel);
        }
      }
    }
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
#pragma unroll
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    scratch[threadIdx.x] = sums[0];
#pragma unroll
    for (int half = rows / 2; half > 0; half /= 2) {
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < half * N::bias_lanes)
        scratch[threadIdx.x] += scratch[threadIdx.x + half * N::bias_lanes];
    }
    if (static_cast<int>(threadIdx.x) < N::bias_lanes && channel < channels)
      p.bias_parts[static_cast<int64>(part) * channels + channel] = scratch[threadIdx.x];
  }
};

// The warps of a block share the parts of 32 sums. A sum of dweight that is not finite is computed again one
// by one: what lies beside the border must not meet the zeros outside, nor those that fill a box.
template <class C, class Tail, class N>
struct NarrowGradientSum {
  using Parameters = NarrowGradientSumParameters;
  static constexpr int threads = N::sum_threads;
  static constexpr int ways = threads / 32;
  static constexpr int64 weights = N::wants_weight ? N::weights : 0;
  static constexpr int channels = N::bias_channels;
  static constexpr int64 all = weights + (N::wants_bias ? channels : 0);

  const Parameters& p;

  static __device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 3.402823466e+38f; }

  __device__ __forceinline__ void run() const {
    __shared__ float scratch[ways][32];
    __shared__ bool again[32];
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int way = static_cast<int>(threadIdx.x) / 32;
    const int64 first = static_cast<int64>(blockIdx.x) * 32;
    const int64 element = first + lane;
    float sum = 0.0f;
    if (element < weights) {
      sum = add(p.parts + element, weights, p.splits, way);
    } else if (element < all) {
      sum = add(p.bias_parts + (element - weights), channels, p.bias_splits, way);
    }
    scratch[way][lane] = sum;
    __syncthreads();
    if (way == 0) {
#pragma unroll
      for (int i = 1; i < ways; ++i) sum += scratch[i][lane];
      again[lane] = element < weights && !is_finite(sum);
      if (element < weights) {
        if constexpr (N::wants_weight) store_one<typename C::Weight>(p.weight, element, sum);
      } else if (element < all) {
        if constexpr (N::wants_bias) store_one<typename C::Weight>(p.bias, element - weights, sum);
      }
    }
    __syncthreads();
    if constexpr (N::wants_weight) {
#pragma unroll 1
      for (int i = 0; i < 32; ++i) {
        if (!again[i]) continue;
        const float careful = careful_sum(first + i, scratch[0]);
        if (threadIdx.x == 0) store_one<typename C::Weight>(p.weight, first + i, careful);
      }
    }
  }

 private:
  static __device__ __forceinline__ float add(const float* from, int64 step, int64 splits, int way) {
    float sum = 0.0f;
#pragma unroll 8
    for (int64 s = way; s < splits; s += ways) sum += from[s * step];
    return sum;
  }

  // The product of a position of u and one of v; none where v has no such position.
  __device__ float product(unsigned position, int group, int u, int v, const int (&tap)[3]) const {
    constexpr auto sample = static_cast<unsigned>(C::output_size(0) * C::output_size(1) * C::output_size(2));
    const unsigned n = position / sample;
    unsigned rest = position - n * sample;
    int64 at_u = n * C::stride(0) + (static_cast<int64>(group) * C::channels + u) * C::stride(1);
    int64 at_v =
        n * C::input_stride(0) + (static_cast<int64>(group) * C::in_channels + v) * C::input_stride(1);
    bool is_inside = true;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const auto size = static_cast<unsigned>(C::output_size(d));
      const auto q = static_cast<int>(rest % size);
      rest /= size;
      const auto at = static_cast<int>(q * C::step(d) + C::base(d, 0) + tap[d] * C::delta(d));
      is_inside &= static_cast<unsigned>(at) < static_cast<unsigned>(C::input_size(d));
      at_u += q * C::stride(d + 2);
      at_v += at * C::input_stride(d + 2);
    }
    if (!is_inside) return 0.0f;
    const float x = load_one<typename Tail::Input>(p.v, at_v);
    const float y = load_one<typename Tail::Input>(p.u, at_u);
    return C::rounds_to_tf32 ? round_operand<C>(x) * round_operand<C>(y) : x * y;
  }

  __device__ float careful_sum(int64 element, float* scratch) const {
    constexpr int chain = 256;
    const auto tap_index = static_cast<int>(element % C::taps);
    const int64 row = element / C::taps;
    const auto v = static_cast<int>(row % C::in_channels);
    const auto u = static_cast<int>(row / C::in_channels % C::channels);
    const auto group = static_cast<int>(row / C::in_channels / C::channels);
    int tap[3];
#pragma unroll
    for (int d = 0; d < 3; ++d)
      tap[d] = tap_index / static_cast<int>(C::tap_stride(d)) % static_cast<int>(C::kernel(d));
    float sum[1] = {};
#pragma unroll 1
    for (int64 first = 0; first < p.positions; first += threads * chain) {
      float part = 0.0f;
#pragma unroll 1
      for (int i = 0; i < chain; ++i) {
        const int64 position = first + i * threads + static_cast<int>(threadIdx.x);
        if (position < p.positions) part += product(static_cast<unsigned>(position), group, u, v, tap);
      }
      sum[0] += part;
      if (__syncthreads_or(sum[0] != sum[0])) break;  // it stays so
    }
    block_sum<threads>(sum, scratch);
    return sum[0];
  }
};

}  // namespace onepass
