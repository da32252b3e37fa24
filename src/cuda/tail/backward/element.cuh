// Gradients of a tail, element by element, for kernels that hold a slab on the chip.
//
// With h the norm's input, d = h - mean, xhat = d rstd and z the norm's output:
//   first    x, dy -> dz, and for each row the sums of dz, dz d, d and of what the after-chain reads
//   second   dh = rstd (gamma dz - mean(gamma dz) - xhat mean(gamma dz xhat)), back to dx
#pragma once

#include "tail/backward/parameters.cuh"
#include "tail/tail.cuh"

namespace onepass {

template <class Tail>
struct TailBackwardElement {
  using Parameters = TailBackwardParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Folded = pointwise::Folded<typename After::Only>;
  static constexpr int rows = Tail::group_channels;
  static constexpr int groups = Tail::channels / rows;
  // Of a row: dz, dz xhat, the after-chain's, the before-chain's.
  static constexpr int after_sums = Tail::after_sums;
  static constexpr int before_sums = Tail::before_sums;
  static constexpr int total_sums = 2 + after_sums + before_sums;

  // What a slab's row brings.
  struct Row {
    float before[Before::channel_operands > 0 ? Before::channel_operands : 1];
    float after[After::channel_operands > 0 ? After::channel_operands : 1];
    float gamma, beta, mean, rstd;
    float dy;  // where the block ends in a mean
  };

  // dh = scale dz + slope d + offset
  struct Affine {
    float scale, slope, offset;
  };

  struct Sums {
    float dz = 0.0f, product = 0.0f, distance = 0.0f;
    float after[after_sums > 0 ? after_sums : 1] = {};
  };

  static __device__ __forceinline__ Row row_values(const Parameters& p, int64 n, int group, int of_slab) {
    Row row;
    const int64 c = group * rows + of_slab;
    Before::load_channel(p, n, c, row.before);
    After::load_channel(p, n, c, row.after);
    row.gamma = Tail::weight(p, c);
    row.beta = Tail::bias(p, c);
    row.mean = p.statistics[2 * (n * groups + group)];
    row.rstd = p.statistics[2 * (n * groups + group) + 1];
    if constexpr (Tail::has_mean) {
      constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
      row.dy = load_one<typename Tail::OutputGradient>(
                   p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride) *
               per_element;
    }
    return row;
  }

  // The slab's means of gamma dz and gamma dz xhat, as far as `mean` was right, and of xhat. The stored mean
  // is rounded: by how much is the mean of xhat, `shift`, and products are moved by it. Where the mean is a
  // hundred deviations from zero, gradients of weights are twenty times as exact.
  static __device__ __forceinline__ Affine affine_of(const Row& row, float sum, float product, float shift) {
    product = fmaf(-shift, sum, product);
    Affine affine;
    affine.scale = row.rstd * row.gamma;
    affine.slope = -row.rstd * row.rstd * product;
    affine.offset = row.rstd * fmaf(shift, product, -sum);
    return affine;
  }

  // dz of an element of distance d, and what the after-chain's operands get.
  template <class Tensors, class Gradients>
  static __device__ __forceinline__ float normed_gradient(const Row& row, float d, const Tensors& tensors,
                                                          int k, float dy, float* channel_gradients,
                                                          Gradients& gradients) {
    if constexpr (Folded::exists) {
      const float scale = row.rstd * row.gamma * Folded::scale;
      return Folded::gradient(fmaf(d, scale, fmaf(row.beta, Folded::scale, Folded::shift)), dy);
    }
    const float z = fmaf(d, row.rstd * row.gamma, row.beta);
    return After::gradient(z, row.after, tensors, k, dy, channel_gradients, gradients);
  }

  static __device__ __forceinline__ void add(Sums& sums, float dz, float d, const float* channel_gradients) {
    sums.dz += dz;
    sums.product = fmaf(dz, d, sums.product);
    sums.distance += d;
#pragma unroll
    for (int s = 0; s < after_sums; ++s) sums.after[s] += channel_gradients[s];
  }

  // dx of an element; `given` is dz where `holds`, else dy.
  template <int Width, bool holds>
  static __device__ __forceinline__ float second(const Row& row, const Affine& affine, float x, float given,
                                                 const typename Before::template Tensors<Width>& before,
                                                 const typename After::template Tensors<Width>& after, int k,
                                                 typename Before::template TensorGradients<Width>& gradients,
                                                 float* before_totals) {
    const float d = Before::value(x, row.before, before, k) - row.mean;
    float dh;
    if constexpr (Tail::mean_follows_norm) {
      dh = fmaf(d, affine.slope, fmaf(affine.scale, row.dy, affine.offset));
    } else {
      float dz = given;
      if constexpr (!holds) {
        float unused[After::channel_operands > 0 ? After::channel_operands : 1];
        typename After::template TensorGradients<Width> ignored;
        dz = normed_gradient(row, d, after, k, given, unused, ignored);
      }
      dh = fmaf(affine.scale, dz, fmaf(d, affine.slope, affine.offset));
    }
    float channel_gradients[Before::channel_operands > 0 ? Before::channel_operands : 1];
    const float dx = Before::gradient(x, row.before, before, k, dh, channel_gradients, gradients);
#pragma unroll
    for (int s = 0; s < before_sums; ++s) before_totals[s] += channel_gradients[s];
    return dx;
  }
};

}  // namespace onepass
