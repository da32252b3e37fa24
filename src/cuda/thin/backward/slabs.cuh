// What one block computes for a sample between its passes: slabs' sums, and scales of f16 operands.
#pragma once

#include "thin/backward/backward.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Slabs {
  const Thread thread;

  // By one block, when the slabs' sums are known: the scale of dh of the sample. |xhat| is at most the root
  // of the number of a slab's elements.
  __device__ __forceinline__ void find_scale(int64 n, uint32 peak) const {
    constexpr float most_xhat = root_above(static_cast<float>(Tail::group_channels) * Tail::spatial);
    __syncthreads();
    if (threadIdx.x == 0) thread.s.most = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < groups; i += threads) {
      const int64 slab = n * groups + i;
      const float sum = load_shared_by_blocks(thread.p.slab_sums + 2 * slab);
      const float product = load_shared_by_blocks(thread.p.slab_sums + 2 * slab + 1);
      atomicMax(&thread.s.most, finite_magnitude(thread.p.statistics[2 * slab + 1] *
                                                 fmaf(fabsf(product), most_xhat, fabsf(sum))));
    }
    __syncthreads();
    if (threadIdx.x == 0)
      thread.p.scales[2 * n + 1] =
          scale_for_halves(Numbers::steepness * (__uint_as_float(peak) + __uint_as_float(thread.s.most)));
  }
  static constexpr __device__ float root_above(float x) {
    float root = 1.0f;
    while (root * root < x) root *= 2.0f;
    return root;
  }

  // By one block: the scale of x of a sample.
  __device__ __forceinline__ void measure(int64 n) const {
    constexpr int elements =
        static_cast<int>(C::in_channels * C::input_size(0) * C::input_size(1) * C::input_size(2));
    constexpr int in_vector = 16 / Input::bytes;
    __syncthreads();
    if (threadIdx.x == 0) thread.s.most = 0;
    __syncthreads();
    const char* sample = static_cast<const char*>(thread.p.input) + n * C::input_stride(0) * Input::bytes;
    uint32 most = 0;
    const auto take_one = [&](const void* from, int64 index) {
      const uint32 own = finite_magnitude(load_one<Input>(from, index));
      most = most > own ? most : own;
    };
    if (Numbers::dense_input && reinterpret_cast<uint64>(sample) % 16 == 0) {
      const auto* vectors = reinterpret_cast<const uint4*>(sample);
#pragma unroll 8
      for (int i = threadIdx.x; i < elements / in_vector; i += threads) {
        const uint4 own = __ldg(vectors + i);
#pragma unroll
        for (int k = 0; k < in_vector; ++k) take_one(&own, k);
      }
      for (int i = elements / in_vector * in_vector + threadIdx.x; i < elements; i += threads)
        take_one(sample, i);
    } else {
#pragma unroll 4
      for (int i = threadIdx.x; i < elements; i += threads) {
        const int i2 = i % static_cast<int>(C::input_size(2));
        int rest = i / static_cast<int>(C::input_size(2));
        const int i1 = rest % static_cast<int>(C::input_size(1));
        rest /= static_cast<int>(C::input_size(1));
        const int i0 = rest % static_cast<int>(C::input_size(0));
        take_one(sample, (rest / static_cast<int>(C::input_size(0))) * C::input_stride(1) +
                             i0 * C::input_stride(2) + i1 * C::input_stride(3) + i2 * C::input_stride(4));
      }
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (thread.lane == 0) atomicMax(&thread.s.most, most);
    __syncthreads();
    if (threadIdx.x == 0) thread.p.scales[2 * n] = scale_for_halves(__uint_as_float(thread.s.most));
    __syncthreads();
  }

  // By the last block of a sample: the slabs' means of gamma dz and gamma dz xhat.
  __device__ __forceinline__ void finish_slabs(int64 n) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::group_channels * Tail::spatial);
    float* of_channel = &thread.s.passes.sum[0][0][0];
    for (int i = threadIdx.x; i < channels * 2; i += threads) {
      double total = 0.0;
      for (int segment = 0; segment < Numbers::segments; ++segment) {
        total += load_shared_by_blocks(thread.p.first_parts +
                                       ((n * Numbers::segments + segment) * channels + i / 2) * first_sums +
                                       i % 2);
      }
      of_channel[i] = static_cast<float>(total);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < groups * 2; i += threads) {
      float total = 0.0f;
      for (int k = 0; k < Tail::group_channels; ++k) {
        const int c = i / 2 * Tail::group_channels + k;
        total = fmaf(Tail::weight(thread.p, c), of_channel[c * 2 + i % 2], total);
      }
      thread.p.slab_sums[n * groups * 2 + i] = total * per_element;
    }
    if constexpr (halves) find_scale(n, __ldcg(thread.p.peaks + n));
  }

  // With a mean directly after the norm, the slabs' means follow from the output: dz is dy over the
  // positions, the mean of gamma xhat is y - beta. Rounding y moves the sum of dz xhat by at most a rounding
  // of the sum of |dy y|. That is accurate enough where it is small beside the sum of |gamma dy|, of which dh
  // is made.
  __device__ __forceinline__ bool output_is_enough(int64 n) const {
    constexpr float most = is_same<typename Tail::Output, f32> ? 1024.0f : 2.0f;
    bool is_enough = true;
    for (int i = threadIdx.x; i < groups; i += threads) {
      float moved = 0.0f, all = 0.0f;
      for (int c = i * Tail::group_channels; c < (i + 1) * Tail::group_channels; ++c) {
        const float dy = load_one<typename Tail::OutputGradient>(
            thread.p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride);
        moved =
            fmaf(fabsf(dy), fabsf(load_one<typename Tail::Output>(thread.p.output, n * channels + c)), moved);
        all = fmaf(fabsf(dy), fabsf(Tail::weight(thread.p, c)), all);
      }
      is_enough = is_enough && moved <= most * all;
    }
    return __syncthreads_and(is_enough) != 0;
  }
  __device__ __forceinline__ void finish_slabs_by_output(int64 n) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::group_channels * Tail::spatial);
    for (int i = threadIdx.x; i < groups; i += threads) {
      float sum = 0.0f, product = 0.0f;
      for (int c = i * Tail::group_channels; c < (i + 1) * Tail::group_channels; ++c) {
        const float dy = load_one<typename Tail::OutputGradient>(
            thread.p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride);
        const float y = load_one<typename Tail::Output>(thread.p.output, n * channels + c);
        sum = fmaf(Tail::weight(thread.p, c), dy, sum);
        product = fmaf(dy, y - Tail::bias(thread.p, c), product);
      }
      thread.p.slab_sums[(n * groups + i) * 2] = sum * per_element;
      thread.p.slab_sums[(n * groups + i) * 2 + 1] = product * per_element;
    }
    if constexpr (halves) {
      uint32 peak = 0;
      for (int c = 0; c < channels; ++c) {
        const float dz = load_one<typename Tail::OutputGradient>(
            thread.p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride);
        const float rstd = thread.p.statistics[2 * (n * groups + c / Tail::group_channels) + 1];
        const uint32 own = finite_magnitude(dz * Tail::weight(thread.p, c) * rstd *
                                            (1.0f / static_cast<float>(Tail::spatial)));
        peak = peak > own ? peak : own;
      }
      find_scale(n, peak);
    }
  }
};

}  // namespace onepass
