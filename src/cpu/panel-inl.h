// Building blocks of functions over panels: vectors, coefficients of a step, partial vectors, row sums.
// Compiled once per SIMD target.

#if defined(ONEPASS_CPU_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_CPU_PANEL_INL_H_
#undef ONEPASS_CPU_PANEL_INL_H_
#else
#define ONEPASS_CPU_PANEL_INL_H_
#endif

#include <hwy/highway.h>

#include <array>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/math-inl.h"
#include "cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {
namespace math = onepass::HWY_NAMESPACE;

constexpr int64_t lanes = static_cast<int64_t>(hn::MaxLanes(D()));

// Vectors in flight. One exponential is a chain of 45 cycles and the scheduler holds about 60 operations, so
// GCC interleaves these. A longer swish took 0.77 ns an element with four, 0.97 with one.
constexpr int in_flight = 4;

// Of a polynomial: three registers each.
constexpr int near_in_flight = HWY_TARGET == HWY_AVX2 ? 4 : 8;

// A step with a sigmoid over `count` elements (whole vectors) by the polynomial of its form (small or tiny).
// Adds the results and their squares to totals, two vectors. False where an argument is too far from 0 for
// the polynomial: the results are then invalid, and nothing was added. Defined in near.cc.
bool near_strip(Op op, Affine affine, const float* src, float* dst, int64_t count, float* totals);

constexpr ArgumentKind argument_of[step_count] = {
#define none ArgumentKind::none
#define slope ArgumentKind::slope
#define channel ArgumentKind::channel
#define tensor ArgumentKind::tensor
#define ONEPASS_POINTWISE(name, constants, default_a, default_b, argument, ...) argument,
#include "onepass/pointwise.def"
#undef ONEPASS_POINTWISE
    none,
#undef none
#undef slope
#undef channel
#undef tensor
};

template <int kStep>
inline constexpr bool takes_tensor = argument_of[kStep] == ArgumentKind::tensor;

// What a step reads per channel, for one channel (planar) or a vector of channels (interleaved).
template <int kStep, Affine kAffine>
struct Coefficients {
  static constexpr bool has_channel_operand =
      argument_of[kStep] == ArgumentKind::slope || argument_of[kStep] == ArgumentKind::channel;
  static constexpr bool has_norm = kAffine == Affine::norm || kAffine == Affine::raised;
  static constexpr bool any = has_norm || has_channel_operand;
  V centre, scale, operand;
  const float* shift;  // a vector of it in memory, for math::addend: the panel's array or `repeated`
  HWY_ALIGN float repeated[lanes];

  HWY_INLINE Coefficients() {}  // GCC does not give an implicit one the target's attributes
  Coefficients(const Coefficients&) = delete;
  Coefficients& operator=(const Coefficients&) = delete;
  HWY_INLINE void broadcast(const StepArguments& s, int64_t channel) {
    const D d;
    if constexpr (has_norm) centre = hn::Set(d, s.centre[channel]);
    if constexpr (has_norm) scale = hn::Set(d, s.scale[channel]);
    if constexpr (has_norm) hn::Store(hn::Set(d, s.shift[channel]), d, repeated);
    if constexpr (has_norm) shift = repeated;
    if constexpr (has_channel_operand) operand = hn::Set(d, s.operand[channel]);
  }
  HWY_INLINE void load(const StepArguments& s, int64_t channel) {
    const D d;
    if constexpr (has_norm) centre = hn::LoadU(d, s.centre + channel);
    if constexpr (has_norm) scale = hn::LoadU(d, s.scale + channel);
    if constexpr (has_norm) shift = s.shift + channel;
    if constexpr (has_channel_operand) operand = hn::LoadU(d, s.operand + channel);
  }
  // What the operation gets: x after the affine part, and its own argument or that of the panel.
  HWY_INLINE V input(V x) const {
    if constexpr (has_norm) x = hn::MulAdd(hn::Sub(x, centre), scale, math::addend(shift, x));
    return x;
  }
  HWY_INLINE V argument(V panel_operand) const {
    if constexpr (has_channel_operand) return operand;
    return panel_operand;
  }
};

// Dense interleaved rows of fewer columns than a vector has lanes, taken as rows of several pixels that are
// whole vectors: `cols` columns are the same channels for each of `pixels`. A norm of two channels in
// channels last takes 8.9 ns an element by partial vectors in memory, 0.3 so (AVX-512).
constexpr int64_t most_folded = lanes * lanes;
struct Fold {
  // Rows of `cols` columns from the element `begin` on.
  struct Part {
    int64_t begin, rows, cols;
  };

  int64_t pixels = 1;
  int64_t cols = 0;

  HWY_INLINE Fold(int64_t rows, int64_t columns) {
    if (columns >= lanes) return;
    while (pixels < lanes && pixels * columns % lanes != 0) pixels *= 2;  // lanes are a power of two
    cols = pixels * columns;
    if (rows < 4 * pixels) pixels = 1;
  }
  HWY_INLINE explicit operator bool() const { return pixels > 1; }
  // Whole rows, then the pixels that fill none: a shorter one, which may be empty.
  HWY_INLINE std::array<Part, 2> parts(int64_t rows, int64_t columns) const {
    const int64_t whole = rows / pixels;
    const int64_t left = rows % pixels * columns;
    return {{{0, whole, cols}, {whole * cols, left > 0 ? 1 : 0, left}}};
  }
  // Values of columns, again for each pixel.
  HWY_INLINE void repeat(const float* values, int64_t columns, float* to) const {
    std::memcpy(to, values, static_cast<size_t>(columns) * sizeof(float));
    for (int64_t done = columns; done < cols; done *= 2) {  // `pixels` is a power of two
      std::memcpy(to + done, to, static_cast<size_t>(done) * sizeof(float));
    }
  }
  // Sums of a part's columns as sums of channels. The first part's replace what is there.
  static HWY_INLINE void add(const Part& part, const float* sums, int64_t columns, float* to) {
    if (part.rows == 0) return;
    for (int64_t c = 0; c < part.cols; ++c) {
      const bool first = part.begin == 0 && c < columns;
      to[c % columns] = first ? sums[c] : to[c % columns] + sums[c];
    }
  }
};

// Whether loads and stores take a mask and touch nothing beyond it. Through a buffer in memory the rows of a
// norm of 8 channels take 16 ns each, forward (AVX-512).
constexpr bool has_masked_access = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3;

// Fewer than a vector of floats at `from`, in a vector.
HWY_INLINE V load_some(const float* from, int64_t count) {
  const D d;
  if constexpr (has_masked_access) return hn::MaskedLoad(hn::FirstN(d, static_cast<size_t>(count)), d, from);
  HWY_ALIGN float buffer[lanes] = {};
  std::memcpy(buffer, from, static_cast<size_t>(count) * sizeof(float));
  return hn::Load(d, buffer);
}

HWY_INLINE void store_some(V v, float* to, int64_t count) {
  const D d;
  if constexpr (has_masked_access)
    return hn::BlendedStore(v, hn::FirstN(d, static_cast<size_t>(count)), d, to);
  HWY_ALIGN float buffer[lanes];
  hn::Store(v, d, buffer);
  std::memcpy(to, buffer, static_cast<size_t>(count) * sizeof(float));
}

// The last vector of `count` floats at `from`, a vector at least.
HWY_INLINE V load_last(const float* from, int64_t count) { return hn::LoadU(D(), from + count - lanes); }
// All but the last `rest` lanes become 0.
HWY_INLINE V last_lanes(V v, int64_t rest) {
  return hn::IfThenZeroElse(hn::FirstN(D(), static_cast<size_t>(lanes - rest)), v);
}

HWY_INLINE float lane_sum(V v) { return hn::GetLane(hn::SumOfLanes(D(), v)); }

// Sums around a value are exact enough where the values' spread is this share of their squares around it: the
// difference keeps all but two bits.
constexpr float least_spread = 0.25f;

// Distances from a mean, or from 0 (kCentred false), which saves an instruction of three.
template <bool kCentred = true>
HWY_INLINE RowSums planar_distances(const float* x, int64_t count, float mean = 0) {
  const D d;
  const V centre = hn::Set(d, mean);
  V sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  V squares[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t c = 0;
  for (; c + 4 * lanes <= count; c += 4 * lanes) {
    for (int v = 0; v < 4; ++v) {
      V distance = hn::LoadU(d, x + c + v * lanes);
      if constexpr (kCentred) distance = hn::Sub(distance, centre);
      sum[v] = hn::Add(sum[v], distance);
      squares[v] = hn::MulAdd(distance, distance, squares[v]);
    }
  }
  const auto add = [&](int v, V distance) HWY_ATTR {
    sum[v] = hn::Add(sum[v], distance);
    squares[v] = hn::MulAdd(distance, distance, squares[v]);
  };
  for (; c + lanes <= count; c += lanes) add(0, hn::Sub(hn::LoadU(d, x + c), centre));
  RowSums result;
  if (c < count && count > lanes) {
    add(1, last_lanes(hn::Sub(load_last(x, count), centre), count - c));
  } else {
    for (; c < count; ++c) {
      result.sum += x[c] - mean;
      result.squares += (x[c] - mean) * (x[c] - mean);
    }
  }
  result.sum += lane_sum(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])));
  result.squares += lane_sum(hn::Add(hn::Add(squares[0], squares[1]), hn::Add(squares[2], squares[3])));
  return result;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();

#endif  // ONEPASS_CPU_PANEL_INL_H_
