// The second launch of the row "thin_backward": sums over the batch, in double and in a fixed order.
#pragma once

#include "thin/backward/backward.cuh"

namespace onepass {

// The first blocks have 32 elements of dweight and a slice of the batch each. Then there is a block for each
// channel, and one for slopes that all channels share.
template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Reduce {
  static constexpr int slices = Numbers::slices;
  static constexpr int units = Numbers::units;
  static constexpr int columns = Numbers::wants_weight ? units * 4 : 0;
  static constexpr int weight_blocks = columns * slices;

  const Parameters& p;

  // The sum of `count` values: first those of each thread, then over the threads.
  template <class Value>
  __device__ __forceinline__ double sum_of(int64 count, Value&& value) const {
    __shared__ double all[threads];
    double own = 0.0;
#pragma unroll 4
    for (int64 i = threadIdx.x; i < count; i += threads) own += value(i);
    __syncthreads();
    all[threadIdx.x] = own;
    for (int half = threads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) all[threadIdx.x] += all[threadIdx.x + half];
    }
    __syncthreads();
    return all[0];
  }

  // Sum `i` of a channel in one part of a sample: those of pass 1, then those of pass 2.
  __device__ __forceinline__ float part(int64 index, int c, int i) const {
    const float* second = p.second_parts + (index * channels + c) * second_sums;
    if (i >= first_sums) return __ldg(second + i - first_sums);
    if constexpr (Numbers::may_read_output) {
      constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
      const int64 n = index / Numbers::segments;
      const float dy = load_one<typename Tail::OutputGradient>(
          p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride);
      if (i == 0) return index % Numbers::segments == 0 ? dy : 0.0f;
      return dy * per_element * __ldg(second + second_sums - 1);
    }
    return __ldg(p.first_parts + (index * channels + c) * first_sums + i);
  }

  __device__ __forceinline__ float channel_total(int c, int i) const {
    return static_cast<float>(sum_of(p.batch * Numbers::segments, [&](int64 k) { return part(k, c, i); }));
  }

  __device__ __forceinline__ void channel(int c) const {
    const auto of_sample = [&](int64 n, int i) {
      double sum = 0.0;
      for (int segment = 0; segment < Numbers::segments; ++segment)
        sum += part(n * Numbers::segments + segment, c, i);
      return static_cast<float>(sum);
    };
    Tail::store_channel_gradients(
        p, c, [&](int i) { return channel_total(c, i); }, of_sample);
    if constexpr (Numbers::wants_bias) {
      const float sum = channel_total(c, first_sums + chain_sums);
      if (threadIdx.x == 0) store_one<typename Numbers::BiasGradient>(p.gradient[1], c, sum);
    }
  }

  __device__ __forceinline__ void singles() const {
    Tail::for_each_single([&](int i, auto store) {
      const double sum = sum_of(p.batch * Numbers::segments * channels, [&](int64 k) {
        return part(k / channels, static_cast<int>(k % channels), i);
      });
      if (threadIdx.x == 0) store(static_cast<float>(sum), p);
    });
  }

  // Element `e`: [unit][lane][4].
  __device__ __forceinline__ void store_weight(int e, double sum) const {
    __shared__ typename Terms::Class of_class[Terms::classes];
    __syncwarp();
    if (threadIdx.x == 0) Terms::find_classes(of_class);
    __syncwarp();
    const int unit = e / 128;
    const int lane = e / 4 % 32;
    const int r = e % 4;
    const int index = Terms::class_of_unit(of_class, unit);
    const typename Terms::Class own = of_class[index];
    const int within = unit - own.unit;
    const int row_tap = within / components % own.row_taps;
    const int job = within / components / own.row_taps;
    const int o = job / own.groups * 16 + lane / 4 + r / 2 * 8;
    const auto entry = Terms::entry(index, job % own.groups * 8 + lane % 4 * 2 + r % 2, row_tap);
    const int of_weight = Terms::weight_index(entry, within % components);
    if (o < channels && of_weight >= 0)
      store_one<typename Numbers::WeightGradient>(p.gradient[0], o * Terms::weight_stride + of_weight,
                                                  static_cast<float>(sum));
  }

  __device__ __forceinline__ void weights(int column, int slice) const {
    __shared__ double all[warps][32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int64 first = p.batch * slice / slices;
    const int64 last = p.batch * (slice + 1) / slices;
    double sum = 0.0;
#pragma unroll 4
    for (int64 i = first + warp; i < last; i += warps)
      sum += __ldg(p.weight_samples + (i * units * 128 + column * 32 + lane));
    all[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
      double total = 0.0;
      for (int w = 0; w < warps; ++w) total += all[w][lane];
      p.slices[(column * slices + slice) * 32 + lane] = total;
    }
    if (arrives_last(p.columns + column, slices) && warp == 0) {
      double total = 0.0;
      for (int i = 0; i < slices; ++i) total += __ldcg(p.slices + (column * slices + i) * 32 + lane);
      store_weight(column * 32 + lane, total);
    }
  }

  __device__ __forceinline__ void run() const {
    const int block = static_cast<int>(blockIdx.x);
    if (block < weight_blocks) {
      if constexpr (weight_blocks > 0) weights(block / slices, block % slices);
    } else if (block < weight_blocks + channels) {
      channel(block - weight_blocks);
    } else {
      singles();
    }
  }
};

}  // namespace onepass
