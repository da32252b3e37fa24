// The norm over panels of whole slabs: statistics, coefficients and the step after it, compiled once per SIMD
// target.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/slab_norm.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/dispatch.h"
#include "cpu/formula-inl.h"
#include "cpu/isa.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

// ------------------------------------------------------------------------------------------ statistics

// Elements whose distances are added in f32 before they go to double. Equal ones round alike: a chain of n is
// off by up to n / 2 ulp, and these are chains of 32 on NEON.
constexpr int64_t most_sum = 512;

struct SlabSums {
  double sum = 0;
  double squares = 0;
};

// Distances of one slab from a centre.
HWY_INLINE SlabSums slab_distances(const SlabStatisticsArguments& s, const float* x, float centre) {
  SlabSums total;
  for (int64_t r = 0; r < s.rows; ++r, x += s.stride) {
    for (int64_t c = 0; c < s.width; c += most_sum) {
      const RowSums part = planar_distances(x + c, s.width - c < most_sum ? s.width - c : most_sum, centre);
      total.sum += part.sum;
      total.squares += part.squares;
    }
  }
  return total;
}

// The mean of the first vector: exact where its elements are equal.
HWY_INLINE float first_mean(const float* x, int64_t width) {
  if (width < lanes) return x[0];
  return lane_sum(hn::Mul(hn::LoadU(D(), x), hn::Set(D(), 1.0f / static_cast<float>(lanes))));
}

// Distances are taken from the mean of the slab's first elements, in one pass. Where that is too far from the
// slab's mean, a second pass takes them from there. Equal elements have no distances: their variance is 0.
void slab_statistics(const SlabStatisticsArguments& arguments) {
  const SlabStatisticsArguments s = arguments;
  const double share = 1 / static_cast<double>(s.rows * s.width);
  for (int64_t slab = 0; slab < s.slabs; ++slab) {
    const float* x = s.src + slab * s.width;
    const float first = first_mean(x, s.width);
    SlabSums sums = slab_distances(s, x, first);
    float mean = static_cast<float>(first + sums.sum * share);
    double m2 = sums.squares - sums.sum * (sums.sum * share);
    if (HWY_UNLIKELY(!(m2 >= least_spread * sums.squares))) {
      const float plain =
          std::isfinite(mean) ? mean : static_cast<float>(slab_distances(s, x, 0).sum * share);
      sums = slab_distances(s, x, plain);
      const double correction = sums.sum * share;
      mean = std::isfinite(correction) ? static_cast<float>(plain + correction) : plain;
      m2 = sums.squares - sums.sum * correction;
    }
    s.statistics[2 * slab] = mean;
    s.statistics[2 * slab + 1] = 1.0f / std::sqrt(static_cast<float>(m2 * share) + s.eps);
  }
}

// ---------------------------------------------------------------------------------------- coefficients

// Columns of one slab. Vectors behind its last column are those of the next slab, or slack.
HWY_INLINE void fill_columns(const ColumnNormArguments& s, int64_t slab) {
  const D d;
  const int64_t at = slab * s.width;
  const V mean = hn::Set(d, s.statistics[2 * slab]);
  const V rstd = hn::Set(d, s.statistics[2 * slab + 1]);
  for (int64_t c = at; c < at + s.width; c += lanes) {
    hn::StoreU(mean, d, s.centre + c);
    hn::StoreU(s.weight != nullptr ? hn::Mul(rstd, hn::LoadU(d, s.weight + c)) : rstd, d, s.scale + c);
  }
}

// What the norm does to each column, from the statistics of its slab.
void column_coefficients(const ColumnNormArguments& arguments) {
  const ColumnNormArguments s = arguments;
  for (int64_t slab = 0; slab < s.slabs; ++slab) fill_columns(s, slab);
}

// The same where a slab is a column.
HWY_INLINE void single_columns(const ColumnNormArguments& s) {
  const D d;
  const V share = hn::Set(d, 1.0f / static_cast<float>(s.rows));
  const V eps = hn::Set(d, s.eps);
  for (int64_t c = 0; c < s.slabs; c += lanes) {
    const V mean = hn::LoadU(d, s.mean + c);
    const V rstd = hn::Div(hn::Set(d, 1.0f), hn::Sqrt(hn::MulAdd(hn::LoadU(d, s.m2 + c), share, eps)));
    hn::StoreU(mean, d, s.centre + c);
    hn::StoreU(s.weight != nullptr ? hn::Mul(rstd, hn::LoadU(d, s.weight + c)) : rstd, d, s.scale + c);
    HWY_ALIGN float pairs[2 * lanes];
    hn::StoreInterleaved2(mean, rstd, d, pairs);
    const int64_t count = s.slabs - c < lanes ? s.slabs - c : lanes;
    std::memcpy(s.statistics + 2 * c, pairs, static_cast<size_t>(2 * count) * sizeof(float));
  }
}

// The statistics of a slab from the moments of its columns.
HWY_INLINE void merge_columns(const ColumnNormArguments& s, int64_t slab) {
  const D d;
  const float* means = s.mean + slab * s.width;
  const float* spreads = s.m2 + slab * s.width;
  const auto width = static_cast<double>(s.width);
  const auto rows = static_cast<double>(s.rows);
  const auto mean = static_cast<float>(means[0] + planar_distances(means, s.width, means[0]).sum / width);
  V between = hn::Zero(d);
  V within = hn::Zero(d);
  const V centre = hn::Set(d, mean);
  int64_t c = 0;
  for (; c + lanes <= s.width; c += lanes) {
    const V distance = hn::Sub(hn::LoadU(d, means + c), centre);
    between = hn::MulAdd(distance, distance, between);
    within = hn::Add(within, hn::LoadU(d, spreads + c));
  }
  double m2 = lane_sum(within) + lane_sum(between) * rows;
  for (; c < s.width; ++c) {
    const double distance = means[c] - mean;
    m2 += spreads[c] + distance * distance * rows;
  }
  s.statistics[2 * slab] = mean;
  s.statistics[2 * slab + 1] = 1.0f / std::sqrt(static_cast<float>(m2 / (width * rows)) + s.eps);
}

// Statistics of slabs and coefficients of columns, from the moments of the columns.
void column_norm(const ColumnNormArguments& arguments) {
  const ColumnNormArguments s = arguments;
  if (s.width == 1) return single_columns(s);
  for (int64_t slab = 0; slab < s.slabs; ++slab) {
    merge_columns(s, slab);
    fill_columns(s, slab);
  }
}

// --------------------------------------------------------------------------------- the step of the norm

// Everything is in local variables: what vectors are stored to may alias members of an object.

template <int kStep>
HWY_INLINE V norm_value(V x, V centre, V scale, V shift, V a, V b, V p) {
  return Formula<kStep, Affine::norm>::value(hn::MulAdd(hn::Sub(x, centre), scale, shift), a, b, p);
}

template <int kStep>
inline constexpr bool takes_channel = Coefficients<kStep, Affine::norm>::has_channel_operand;

// A vector of the tensor that the operation reads, or nothing.
template <int kStep>
HWY_INLINE V operand_at(const float* operand, int64_t at) {
  if constexpr (takes_tensor<kStep>) return hn::LoadU(D(), operand + at);
  return hn::Zero(D());
}

// Channels of at least a vector of pixels: each has one set of coefficients. A last vector that pixels do not
// fill begins among those before it. It is loaded before they are overwritten.
template <int kStep>
void channel_slab_step(const SlabStepArguments& s) {
  constexpr int in_row = in_flight_of(kStep, Affine::norm, Orientation::planar);
  const D d;
  const V a = hn::Set(d, s.step.a);
  const V b = hn::Set(d, s.step.b);
  const float one = 1;
  const float zero = 0;
  const float* weight = s.weights != nullptr ? s.weights : &one;
  const float* bias = s.biases != nullptr ? s.biases : &zero;
  const int64_t weight_step = s.weights != nullptr ? 1 : 0;
  const int64_t bias_step = s.biases != nullptr ? 1 : 0;
  const float* operand = s.step.operand;
  const float* src = s.step.src;
  float* dst = s.step.dst;
  const float* statistics = s.statistics;
  const int64_t pixels = s.pixels;
  const int64_t channels = s.channels;
  const int64_t slabs = s.slabs;
  const int64_t whole = pixels - pixels % lanes;
  for (int64_t slab = 0; slab < slabs; ++slab, statistics += 2) {
    const V centre = hn::Set(d, statistics[0]);
    const float rstd = statistics[1];
    for (int64_t channel = 0; channel < channels; ++channel) {
      const V scale = hn::Set(d, rstd * *weight);
      const V shift = hn::Set(d, *bias);
      V p = hn::Zero(d);
      if constexpr (takes_channel<kStep>) p = hn::Set(d, *operand++);
      const auto value = [&](V x, V added, int64_t at) HWY_ATTR {
        if constexpr (takes_tensor<kStep>) p = operand_at<kStep>(operand, at);
        return norm_value<kStep>(x, centre, scale, added, a, b, p);
      };
      const int64_t last = pixels - lanes;
      const V last_x = hn::LoadU(d, src + last);
      const V last_value = value(last_x, shift, last);
      int64_t i = 0;
      if (pixels >= in_row * lanes) {
        HWY_ALIGN float repeated[lanes];
        hn::Store(shift, d, repeated);
        for (; i + in_row * lanes <= pixels; i += in_row * lanes) {
          V x[in_row];
          ONEPASS_UNROLL for (int v = 0; v < in_row; ++v) {
            x[v] = hn::LoadU(d, src + i + v * lanes);
            x[v] = value(x[v], math::addend(repeated, x[v]), i + v * lanes);
          }
          ONEPASS_UNROLL for (int v = 0; v < in_row; ++v) hn::StoreU(x[v], d, dst + i + v * lanes);
        }
      }
      for (; i < whole; i += lanes) hn::StoreU(value(hn::LoadU(d, src + i), shift, i), d, dst + i);
      if (whole < pixels) hn::StoreU(last_value, d, dst + last);
      src += pixels;
      dst += pixels;
      if constexpr (takes_tensor<kStep>) operand += pixels;
      weight += weight_step;
      bias += bias_step;
    }
  }
}

// Columns with coefficients of their own.
template <int kStep, bool kWeights, bool kBiases>
void column_slab_step(const SlabStepArguments& s) {
  const D d;
  const V a = hn::Set(d, s.step.a);
  const V b = hn::Set(d, s.step.b);
  const V zero = hn::Zero(d);
  const float* weights = s.weights;
  const float* biases = s.biases;
  const float* operand = s.step.operand;
  const float* src = s.step.src;
  float* dst = s.step.dst;
  const float* statistics = s.statistics;
  const int64_t width = s.channels * s.pixels;
  const int64_t slabs = s.slabs;
  for (int64_t slab = 0; slab < slabs; ++slab, statistics += 2) {
    const V centre = hn::Set(d, statistics[0]);
    const V rstd = hn::Set(d, statistics[1]);
    const auto value = [&](V x, V p, int64_t at) HWY_ATTR {
      const V scale = kWeights ? hn::Mul(rstd, hn::LoadU(d, weights + at)) : rstd;
      const V shift = kBiases ? hn::LoadU(d, biases + at) : zero;
      if constexpr (takes_channel<kStep>) p = hn::LoadU(d, operand + at);
      return norm_value<kStep>(x, centre, scale, shift, a, b, p);
    };
    if (width < lanes) {
      const V p = takes_tensor<kStep> ? load_some(operand, width) : zero;
      store_some(value(load_some(src, width), p, 0), dst, width);
    } else {
      const int64_t last = width - lanes;
      const V last_value = value(hn::LoadU(d, src + last), operand_at<kStep>(operand, last), last);
      int64_t i = 0;
      for (; i + 4 * lanes <= width; i += 4 * lanes) {
        V x[4];
        ONEPASS_UNROLL for (int v = 0; v < 4; ++v) {
          const int64_t at = i + v * lanes;
          x[v] = value(hn::LoadU(d, src + at), operand_at<kStep>(operand, at), at);
        }
        ONEPASS_UNROLL for (int v = 0; v < 4; ++v) hn::StoreU(x[v], d, dst + i + v * lanes);
      }
      for (; i + lanes <= width; i += lanes) {
        hn::StoreU(value(hn::LoadU(d, src + i), operand_at<kStep>(operand, i), i), d, dst + i);
      }
      if (i < width) hn::StoreU(last_value, d, dst + last);
    }
    src += width;
    dst += width;
    if constexpr (takes_tensor<kStep> || takes_channel<kStep>) operand += width;
    if constexpr (kWeights) weights += width;
    if constexpr (kBiases) biases += width;
  }
}

template <int kStep>
void slab_step(const SlabStepArguments& s) {
  if (!s.repeated) return channel_slab_step<kStep>(s);
  if (s.weights != nullptr) return column_slab_step<kStep, true, true>(s);
  column_slab_step<kStep, false, false>(s);
}

template <int... kSteps>
void add_slab_steps(Isa& isa, std::integer_sequence<int, kSteps...>) {
  ((isa.slab_steps[kSteps] = &slab_step<kSteps>), ...);
}

void fill_slab_norm(Isa& isa) {
  isa.slab_statistics = &slab_statistics;
  isa.column_coefficients = &column_coefficients;
  isa.column_norm = &column_norm;
  add_slab_steps(isa, std::make_integer_sequence<int, step_count>());
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif
