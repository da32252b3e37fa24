// Panels: pointwise steps, running statistics and the ways to and from tensors, compiled once per SIMD
// target.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/panel.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "block/convert.h"
#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/math-inl.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

// ---------------------------------------------------------------------------------------------- steps

// The sigmoid that a step's formula calls.
template <Affine kAffine>
struct Sigmoid {
  template <class Vector>
  HWY_INLINE auto operator()(Vector x) const {
    if constexpr (kAffine == Affine::narrow) {
      return math::narrow::sigmoid(x);
    } else {
      return math::deferred::sigmoid(x);
    }
  }
};

// And the ramp.
template <Affine kAffine>
struct Ramp {
  template <class Vector>
  HWY_INLINE Vector operator()(Vector x) const {
    if constexpr (kAffine == Affine::raised) {
      return math::raised::ramp(x);
    } else {
      return math::ramp(x);
    }
  }
};

// The formula of each row of pointwise.def over vectors; the last entry is the identity.
template <int kStep, Affine kAffine>
struct Formula {
  static HWY_INLINE V value(V x, V, V, V) { return x; }
};
#define K(number) math::constant<V>(number)
#define ONEPASS_POINTWISE(name, constants, default_a, default_b, argument, formula, ...)               \
  template <Affine kAffine>                                                                            \
  struct Formula<static_cast<int>(Op::name), kAffine> {                                                \
    static HWY_INLINE V value(V x, [[maybe_unused]] V a, [[maybe_unused]] V b, [[maybe_unused]] V p) { \
      using namespace math;                                                                            \
      [[maybe_unused]] constexpr Sigmoid<kAffine> sigmoid;                                             \
      [[maybe_unused]] constexpr Ramp<kAffine> ramp;                                                   \
      return formula;                                                                                  \
    }                                                                                                  \
  };
#include "onepass/pointwise.def"
#undef ONEPASS_POINTWISE
#undef K

// The steps for which it makes a difference that x is near 0: those with a sigmoid.
constexpr bool has_sigmoid(int step) {
  return step == static_cast<int>(Op::swish) || step == static_cast<int>(Op::sigmoid);
}
// Vectors of a step in flight: the registers hold six of a sigmoid, seven of its form without clamps (swish
// 0.50 ns an element instead of 0.51), four of a longer function (tanh 10% slower with six), and ten of a
// cheap step where all share their coefficients and there are 32 registers (norm and hardswish 2.4 cycles a
// vector instead of 2.9).
constexpr int in_flight_of(int step, Affine affine, Orientation orientation) {
  for (const Op op : {Op::elu, Op::gelu, Op::gelu_tanh, Op::tanh, Op::mish, Op::softplus}) {
    if (step == static_cast<int>(op)) return in_flight;
  }
  if (!HWY_ARCH_ARM || orientation != Orientation::planar) return 6;
  if (has_sigmoid(step)) return affine == Affine::narrow ? 7 : 6;
  return 10;
}

template <int kStep, Affine kAffine>
HWY_INLINE V value_of(const Coefficients<kStep, kAffine>& coefficients, V x, V a, V b, V panel_operand) {
  return Formula<kStep, kAffine>::value(coefficients.input(x), a, b, coefficients.argument(panel_operand));
}

// One row of a panel and its panel operand.
struct StepRow {
  const float* src;
  float* dst;
  const float* operand;

  StepRow(const StepArguments& s, int64_t r)
      : src(s.src + r * s.src_stride),
        dst(s.dst + r * s.dst_stride),
        operand(s.operand + r * s.operand_stride) {}
};

// kVectors vectors of a row from column c on. Planar rows have one set of coefficients, interleaved ones a
// set for each vector.
template <int kStep, Affine kAffine, Orientation kOrientation, int kVectors>
HWY_INLINE void step_vectors(const StepRow& row, int64_t c, V a, V b,
                             const Coefficients<kStep, kAffine>* coefficients) {
  const D d;
  V x[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    V p = hn::Zero(d);
    if constexpr (argument_of[kStep] == ArgumentKind::tensor) p = hn::LoadU(d, row.operand + c + v * lanes);
    const int set = kOrientation == Orientation::planar ? 0 : v;
    x[v] = value_of(coefficients[set], hn::LoadU(d, row.src + c + v * lanes), a, b, p);
  }
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) hn::StoreU(x[v], d, row.dst + c + v * lanes);
}

// The last columns of a row, fewer than a vector.
template <int kStep, Affine kAffine>
HWY_INLINE void step_rest(const StepRow& row, int64_t c, int64_t rest, V a, V b,
                          const Coefficients<kStep, kAffine>& coefficients) {
  V p = hn::Zero(D());
  if constexpr (argument_of[kStep] == ArgumentKind::tensor) p = load_some(row.operand + c, rest);
  store_some(value_of(coefficients, load_some(row.src + c, rest), a, b, p), row.dst + c, rest);
}

// A planar row from column c on.
template <int kStep, Affine kAffine>
HWY_INLINE void step_row(const StepRow& row, int64_t c, int64_t cols, V a, V b,
                         const Coefficients<kStep, kAffine>& coefficients) {
  constexpr int vectors = in_flight_of(kStep, kAffine, Orientation::planar);
  for (; c + vectors * lanes <= cols; c += vectors * lanes) {
    step_vectors<kStep, kAffine, Orientation::planar, vectors>(row, c, a, b, &coefficients);
  }
  for (; c + lanes <= cols; c += lanes) {
    step_vectors<kStep, kAffine, Orientation::planar, 1>(row, c, a, b, &coefficients);
  }
  if (c < cols) step_rest(row, c, cols - c, a, b, coefficients);
}

// Arguments are copied in these functions: a vector store may alias them, and reloading them in every
// iteration takes a quarter of the time of a cheap step.
template <int kStep, Affine kAffine>
void planar_step(const StepArguments& arguments) {
  const StepArguments s = arguments;
  const V a = hn::Set(D(), s.a);
  const V b = hn::Set(D(), s.b);
  Coefficients<kStep, kAffine> coefficients;
  for (int64_t r = 0; r < s.rows; ++r) {
    coefficients.broadcast(s, r);
    step_row<kStep, kAffine>(StepRow(s, r), 0, s.cols, a, b, coefficients);
  }
}

// -------------------------------------------------------------------------------- steps with a polynomial

HWY_INLINE float lane_sum(V v) { return hn::GetLane(hn::SumOfLanes(D(), v)); }

template <bool kCentred = true>
RowSums planar_distances(const float* x, int64_t count, float mean = 0);

// Elements of a row between two looks at how far from 0 the arguments were.
constexpr int64_t near_strip_floats = 8 * near_in_flight * lanes;

// Columns [c, end) of a row by the exponential; their sums are added.
template <int kStep>
HWY_NOINLINE void far_columns(const StepRow& row, int64_t c, int64_t end, RowSums& sums) {
  const V zero = hn::Zero(D());
  step_row<kStep, Affine::narrow>(row, c, end, zero, zero, Coefficients<kStep, Affine::narrow>());
  const RowSums part = planar_distances<false>(row.dst + c, end - c);
  sums.sum += part.sum;
  sums.squares += part.squares;
}

// Strip by strip by the polynomial. A strip that turns out to have an argument too far from 0 is done over by
// the exponential; so is the rest of a row more than half of whose strips did, and a row that is stepped in
// place, where nothing can be done over.
template <int kStep, Affine kAffine>
void planar_near_step(const StepArguments& arguments) {
  const StepArguments s = arguments;
  if (kAffine == Affine::small && s.src == s.dst) return planar_step<kStep, Affine::narrow>(s);
  const int64_t whole = s.cols - s.cols % lanes;
  for (int64_t r = 0; r < s.rows; ++r) {
    const StepRow row(s, r);
    HWY_ALIGN float totals[2 * lanes] = {};
    RowSums sums;
    int64_t c = 0;
    for (int balance = 0; c < whole && balance >= 0;) {
      const int64_t end = whole - c < near_strip_floats ? whole : c + near_strip_floats;
      if (near_strip(static_cast<Op>(kStep), kAffine, row.src + c, row.dst + c, end - c, totals)) {
        ++balance;
      } else {
        far_columns<kStep>(row, c, end, sums);
        --balance;
      }
      c = end;
    }
    if (c < s.cols) far_columns<kStep>(row, c, s.cols, sums);
    if (s.sums == nullptr) continue;
    *s.sums = {sums.sum + lane_sum(hn::Load(D(), totals)),
               sums.squares + lane_sum(hn::Load(D(), totals + lanes)), true};
  }
}

// Columns outside, rows inside: the coefficients of a few channels stay in registers.
template <int kStep, Affine kAffine>
void interleaved_step(const StepArguments& arguments) {
  constexpr int vectors = in_flight_of(kStep, kAffine, Orientation::interleaved);
  const StepArguments s = arguments;
  const V a = hn::Set(D(), s.a);
  const V b = hn::Set(D(), s.b);
  Coefficients<kStep, kAffine> coefficients[vectors];
  int64_t c = 0;
  for (; c + vectors * lanes <= s.cols; c += vectors * lanes) {
    ONEPASS_UNROLL for (int v = 0; v < vectors; ++v) coefficients[v].load(s, c + v * lanes);
    for (int64_t r = 0; r < s.rows; ++r) {
      step_vectors<kStep, kAffine, Orientation::interleaved, vectors>(StepRow(s, r), c, a, b, coefficients);
    }
  }
  for (; c + lanes <= s.cols; c += lanes) {
    coefficients[0].load(s, c);
    for (int64_t r = 0; r < s.rows; ++r) {
      step_vectors<kStep, kAffine, Orientation::interleaved, 1>(StepRow(s, r), c, a, b, coefficients);
    }
  }
  if (c == s.cols) return;
  coefficients[0].load(s, c);
  for (int64_t r = 0; r < s.rows; ++r) step_rest(StepRow(s, r), c, s.cols - c, a, b, coefficients[0]);
}

template <int kStep, Affine kAffine>
void add_step(Isa& isa) {
  StepFunction(&functions)[2] = isa.steps[kStep][static_cast<int>(kAffine)];
  functions[static_cast<int>(Orientation::planar)] = &planar_step<kStep, kAffine>;
  functions[static_cast<int>(Orientation::interleaved)] = &interleaved_step<kStep, kAffine>;
}

// The forms for arguments of which something is known.
template <int kStep>
void add_near_steps(Isa& isa) {
  auto& functions = isa.steps[kStep];
  if constexpr (kStep == static_cast<int>(Op::hardswish)) add_step<kStep, Affine::raised>(isa);
  if constexpr (has_sigmoid(kStep)) add_step<kStep, Affine::narrow>(isa);
  for (int i = 0; i < 2; ++i) {
    StepFunction& raised = functions[static_cast<int>(Affine::raised)][i];
    if (raised == nullptr) raised = functions[static_cast<int>(Affine::norm)][i];
    StepFunction& narrow = functions[static_cast<int>(Affine::narrow)][i];
    if (narrow == nullptr) narrow = functions[static_cast<int>(Affine::none)][i];
    functions[static_cast<int>(Affine::small)][i] = narrow;
    functions[static_cast<int>(Affine::tiny)][i] = narrow;
  }
  if constexpr (has_sigmoid(kStep)) {
    constexpr int planar = static_cast<int>(Orientation::planar);
    functions[static_cast<int>(Affine::small)][planar] = &planar_near_step<kStep, Affine::small>;
    functions[static_cast<int>(Affine::tiny)][planar] = &planar_near_step<kStep, Affine::tiny>;
  }
}

template <int... kSteps>
void add_steps(Isa& isa, std::integer_sequence<int, kSteps...>) {
  (add_step<kSteps, Affine::none>(isa), ...);
  (add_step<kSteps, Affine::norm>(isa), ...);
  (add_near_steps<kSteps>(isa), ...);
}

// ----------------------------------------------------------------------------------------- statistics

// Weights of the merge of nb new values into na old ones (Chan): the counts are known, so one division each.
struct Merge {
  float toward_new;  // nb / (na + nb)
  float spread;      // na * nb / (na + nb)

  Merge(int64_t na, int64_t nb)
      : toward_new(static_cast<float>(static_cast<double>(nb) / static_cast<double>(na + nb))),
        spread(static_cast<float>(static_cast<double>(na) * static_cast<double>(nb) /
                                  static_cast<double>(na + nb))) {}
};

// Lanes are channels: pixels are rows. kVectors vectors of channels at a time, so that sums do not wait on
// one another. Two passes over the panel, which is in L1: a mean, then the distances from it and their own
// mean, which takes the rounding of the first back out (a constant slab has variance 0, not its ulp squared).
template <int kVectors>
HWY_INLINE void interleaved_statistics_of(const StatisticsArguments& arguments, int64_t c,
                                          const Merge& merge) {
  const StatisticsArguments s = arguments;
  const D d;
  V sum[kVectors];
  V rest[kVectors];
  V m2[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = rest[v] = m2[v] = hn::Zero(d);
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* x = s.src + r * s.stride + c;
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Add(sum[v], hn::LoadU(d, x + v * lanes));
  }
  const V per_row = hn::Set(d, 1.0f / static_cast<float>(s.rows));
  for (int v = 0; v < kVectors; ++v) sum[v] = hn::Mul(sum[v], per_row);
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* x = s.src + r * s.stride + c;
    for (int v = 0; v < kVectors; ++v) {
      const V distance = hn::Sub(hn::LoadU(d, x + v * lanes), sum[v]);
      rest[v] = hn::Add(rest[v], distance);
      m2[v] = hn::MulAdd(distance, distance, m2[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    // Around an infinite mean there are no distances: it stays as it is.
    const V correction = hn::Mul(rest[v], per_row);
    sum[v] = hn::Add(sum[v], hn::IfThenElseZero(hn::IsFinite(correction), correction));
    m2[v] = hn::NegMulAdd(correction, rest[v], m2[v]);
  }
  for (int v = 0; v < kVectors; ++v) {
    float* mean_at = s.mean + c + v * lanes;
    float* m2_at = s.m2 + c + v * lanes;
    if (s.pixels_before == 0) {
      hn::StoreU(sum[v], d, mean_at);
      hn::StoreU(m2[v], d, m2_at);
      continue;
    }
    const V old_mean = hn::LoadU(d, mean_at);
    const V delta = hn::Sub(sum[v], old_mean);
    const V merged = hn::MulAdd(delta, hn::Set(d, merge.toward_new), old_mean);
    hn::StoreU(hn::IfThenElse(hn::IsFinite(delta), merged, hn::Add(sum[v], old_mean)), d, mean_at);
    const V between = hn::Mul(hn::Mul(delta, delta), hn::Set(d, merge.spread));
    hn::StoreU(hn::Add(hn::Add(hn::LoadU(d, m2_at), m2[v]), between), d, m2_at);
  }
}

// The last vector of a panel whose columns are no multiple of a vector goes through a copy: what lies behind
// the last column belongs to another tensor.
void interleaved_statistics_rest(const StatisticsArguments& s, int64_t c, const Merge& merge) {
  constexpr int64_t rows_at_once = 64;
  HWY_ALIGN float copy[rows_at_once * lanes] = {};
  const int64_t rest = s.cols - c;
  StatisticsArguments part = s;
  part.src = copy;
  part.stride = lanes;
  part.mean = s.mean + c;
  part.m2 = s.m2 + c;
  if (s.rows <= rows_at_once) {
    for (int64_t r = 0; r < s.rows; ++r) {
      std::memcpy(copy + r * lanes, s.src + r * s.stride + c, static_cast<size_t>(rest) * sizeof(float));
    }
    return interleaved_statistics_of<1>(part, 0, merge);
  }
  for (int64_t first = 0; first < s.rows; first += rows_at_once) {
    StatisticsArguments strip = s;
    strip.src = s.src + first * s.stride;
    strip.rows = first + rows_at_once < s.rows ? rows_at_once : s.rows - first;
    strip.pixels_before = s.pixels_before + first;
    interleaved_statistics_rest(strip, c, Merge(strip.pixels_before, strip.rows));
  }
}

void interleaved_statistics(const StatisticsArguments& s) {
  const Merge merge(s.pixels_before, s.rows);
  int64_t c = 0;
  for (; c + 4 * lanes <= s.cols; c += 4 * lanes) interleaved_statistics_of<4>(s, c, merge);
  for (; c + lanes <= s.cols; c += lanes) interleaved_statistics_of<1>(s, c, merge);
  if (c < s.cols) interleaved_statistics_rest(s, c, merge);
}

HWY_INLINE float planar_sum(const float* x, int64_t count) {
  const D d;
  V sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  int64_t c = 0;
  for (; c + 4 * lanes <= count; c += 4 * lanes) {
    for (int v = 0; v < 4; ++v) sum[v] = hn::Add(sum[v], hn::LoadU(d, x + c + v * lanes));
  }
  for (; c + lanes <= count; c += lanes) sum[0] = hn::Add(sum[0], hn::LoadU(d, x + c));
  if (c < count) sum[1] = hn::Add(sum[1], load_some(x + c, count - c));
  return lane_sum(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])));
}

// Distances from a mean, or from 0 (kCentred false), which saves an instruction of three.
template <bool kCentred>
HWY_INLINE RowSums planar_distances(const float* x, int64_t count, float mean) {
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
  RowSums rest;
  for (; c < count; ++c) {
    rest.sum += x[c] - mean;
    rest.squares += (x[c] - mean) * (x[c] - mean);
  }
  rest.sum += lane_sum(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3])));
  rest.squares += lane_sum(hn::Add(hn::Add(squares[0], squares[1]), hn::Add(squares[2], squares[3])));
  return rest;
}

// A panel's values around their own mean take from the squares around 0 at most this share: the difference
// keeps all but two bits.
constexpr float least_spread = 0.25f;

// Lanes are pixels: one channel a row. Around 0 where neither what came before nor the panel itself has a
// mean that outweighs its deviation, and where that takes no pass or only one. Else the first panel of a
// block takes two passes, a mean and the distances from it, and the others one around the running mean:
// should that be far from theirs, the distance between the two dominates what is merged.
void planar_statistics(const StatisticsArguments& s) {
  const Merge merge(s.pixels_before, s.cols);
  const float per_pixel = 1.0f / static_cast<float>(s.cols);
  const bool known = s.sums != nullptr && s.sums->known;
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* x = s.src + r * s.stride;
    const auto merge_with = [&](float mean, float m2) HWY_ATTR {
      if (s.pixels_before == 0) {
        s.mean[r] = mean;
        s.m2[r] = m2;
        return;
      }
      const float delta = mean - s.mean[r];
      s.mean[r] += std::isfinite(delta) ? delta * merge.toward_new : mean;
      s.m2[r] += m2 + delta * delta * merge.spread;
    };
    const bool first_panel = s.pixels_before == 0;
    const auto spread_before = [&]() HWY_ATTR {
      const float of_mean = s.mean[r] * s.mean[r] * static_cast<float>(s.pixels_before);
      return s.m2[r] >= least_spread * (s.m2[r] + of_mean);
    };
    if (first_panel ? known : spread_before()) {
      const RowSums around = known ? *s.sums : planar_distances<false>(x, s.cols);
      const float m2 = around.squares - around.sum * (around.sum * per_pixel);
      if (m2 >= least_spread * around.squares && std::isfinite(m2)) {
        merge_with(around.sum * per_pixel, m2);
        continue;
      }
    }
    if (!first_panel) {
      const RowSums around = planar_distances(x, s.cols, s.mean[r]);
      const float delta = around.sum * per_pixel;
      const float m2 = around.squares - around.sum * delta + delta * delta * merge.spread;
      if (std::isfinite(m2)) {
        s.mean[r] += delta * merge.toward_new;
        s.m2[r] += m2;
        continue;
      }
    }
    const float first = planar_sum(x, s.cols) * per_pixel;
    const RowSums distances = planar_distances(x, s.cols, first);
    const float correction = distances.sum * per_pixel;
    merge_with(std::isfinite(correction) ? first + correction : first,
               distances.squares - distances.sum * correction);
  }
}

// Magnitudes compare as integers, NaN above infinity.
float largest(const float* panel, int64_t stride, int64_t rows, int64_t cols) {
  const D d;
  const hn::RebindToSigned<D> bits;
  const auto magnitude = [&](V x) { return hn::BitCast(bits, hn::Abs(x)); };
  auto most = hn::Zero(bits);
  auto other = most;
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = panel + r * stride;
    int64_t c = 0;
    for (; c + 2 * lanes <= cols; c += 2 * lanes) {
      most = hn::Max(most, magnitude(hn::LoadU(d, x + c)));
      other = hn::Max(other, magnitude(hn::LoadU(d, x + c + lanes)));
    }
    for (; c + lanes <= cols; c += lanes) most = hn::Max(most, magnitude(hn::LoadU(d, x + c)));
    if (c < cols) other = hn::Max(other, magnitude(load_some(x + c, cols - c)));
  }
  return hn::GetLane(hn::BitCast(d, hn::MaxOfLanes(bits, hn::Max(most, other))));
}

// ------------------------------------------------------------------------------------------- transfers

// Loads, stores and single elements of each type, as f32 vectors of the tag's size.
struct F32 {
  using Element = float;
  template <class Tag>
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const Element* from) {
    return hn::LoadU(d, from);
  }
  template <class Tag>
  static HWY_INLINE void store(hn::Vec<Tag> v, Tag d, Element* to) {
    hn::StoreU(v, d, to);
  }
  static HWY_INLINE float get(const Element* from) { return *from; }
  static HWY_INLINE void put(float value, Element* to) { *to = value; }
};

struct F16 {
  using Element = uint16_t;
  template <class Tag>
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const Element* from) {
    const hn::Rebind<hwy::float16_t, Tag> half;
    return hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(from)));
  }
  template <class Tag>
  static HWY_INLINE void store(hn::Vec<Tag> v, Tag, Element* to) {
    const hn::Rebind<hwy::float16_t, Tag> half;
    hn::StoreU(hn::DemoteTo(half, v), half, reinterpret_cast<hwy::float16_t*>(to));
  }
  static HWY_INLINE float get(const Element* from) { return f16_value(*from); }
  static HWY_INLINE void put(float value, Element* to) { *to = f16_bits(value); }
};

struct Bf16 {
  using Element = uint16_t;
  template <class Tag>
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const Element* from) {
    const hn::Rebind<uint16_t, Tag> half;
    const hn::RebindToUnsigned<Tag> wide;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(wide, hn::LoadU(half, from))));
  }
  // Rounds to nearest even (Highway 1.0.3 truncates); NaN stays NaN.
  template <class Tag>
  static HWY_INLINE void store(hn::Vec<Tag> v, Tag d, Element* to) {
    const hn::Rebind<uint16_t, Tag> half;
    const hn::RebindToUnsigned<Tag> wide;
    const hn::RebindToSigned<Tag> signed_wide;
    const auto bits = hn::BitCast(wide, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(wide, 1u));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(wide, 0x7fffu)));
    const auto quiet = hn::Or(bits, hn::Set(wide, 0x00400000u));
    const auto chosen = hn::IfThenElse(hn::RebindMask(wide, hn::IsNaN(v)), quiet, rounded);
    hn::StoreU(hn::DemoteTo(half, hn::BitCast(signed_wide, hn::ShiftRight<16>(chosen))), half, to);
    (void)d;
  }
  static HWY_INLINE float get(const Element* from) { return bf16_value(*from); }
  static HWY_INLINE void put(float value, Element* to) { *to = bf16_bits(value); }
};

using D4 = hn::FixedTag<float, 4>;
using V4 = hn::Vec<D4>;

HWY_INLINE void transpose(V4 (&v)[4]) {
  const D4 d;
  const V4 ab_low = hn::InterleaveLower(d, v[0], v[1]);
  const V4 ab_high = hn::InterleaveUpper(d, v[0], v[1]);
  const V4 cd_low = hn::InterleaveLower(d, v[2], v[3]);
  const V4 cd_high = hn::InterleaveUpper(d, v[2], v[3]);
  v[0] = hn::ConcatLowerLower(d, cd_low, ab_low);
  v[1] = hn::ConcatUpperUpper(d, cd_low, ab_low);
  v[2] = hn::ConcatLowerLower(d, cd_high, ab_high);
  v[3] = hn::ConcatUpperUpper(d, cd_high, ab_high);
}

template <class Type>
using Pointer = typename Type::Element*;

template <class Type>
HWY_INLINE void load_element_at(const TransferArguments& t, int64_t r, int64_t c) {
  t.panel[r * t.panel_stride + c] =
      Type::get(reinterpret_cast<Pointer<Type>>(t.tensor) + r * t.row_stride + c * t.col_stride);
}

template <class Type>
HWY_INLINE void store_element_at(const TransferArguments& t, int64_t r, int64_t c) {
  Type::put(t.panel[r * t.panel_stride + c],
            reinterpret_cast<Pointer<Type>>(t.tensor) + r * t.row_stride + c * t.col_stride);
}

// Element by element over part of the panel: strided tensors and the edges of transposed ones.
template <class Type, bool kLoad>
void transfer_elements(const TransferArguments& t, int64_t first_row, int64_t first_col) {
  for (int64_t r = first_row; r < t.rows; ++r) {
    for (int64_t c = first_col; c < t.cols; ++c) {
      kLoad ? load_element_at<Type>(t, r, c) : store_element_at<Type>(t, r, c);
    }
  }
}

// The tensor's columns are contiguous, as the panel's are.
template <class Type, bool kLoad>
void transfer_rows(const TransferArguments& arguments) {
  const TransferArguments t = arguments;
  const D d;
  for (int64_t r = 0; r < t.rows; ++r) {
    float* panel = t.panel + r * t.panel_stride;
    Pointer<Type> tensor = reinterpret_cast<Pointer<Type>>(t.tensor) + r * t.row_stride;
    int64_t c = 0;
    for (; c + lanes <= t.cols; c += lanes) {
      if constexpr (kLoad) {
        hn::StoreU(Type::load(d, tensor + c), d, panel + c);
      } else {
        Type::store(hn::LoadU(d, panel + c), d, tensor + c);
      }
    }
    for (; c < t.cols; ++c) {
      if constexpr (kLoad) {
        panel[c] = Type::get(tensor + c);
      } else {
        Type::put(panel[c], tensor + c);
      }
    }
  }
}

// The tensor's rows are contiguous: blocks of 4 x 4 change orientation in registers.
template <class Type, bool kLoad>
void transfer_transposed(const TransferArguments& arguments) {
  const TransferArguments t = arguments;
  const D4 d;
  const int64_t rows = t.rows & ~int64_t{3};
  const int64_t cols = t.cols & ~int64_t{3};
  for (int64_t c = 0; c < cols; c += 4) {
    Pointer<Type> tensor[4];
    for (int i = 0; i < 4; ++i)
      tensor[i] = reinterpret_cast<Pointer<Type>>(t.tensor) + (c + i) * t.col_stride;
    float* panel = t.panel + c;
    for (int64_t r = 0; r < rows; r += 4, panel += 4 * t.panel_stride) {
      V4 v[4];
      if constexpr (kLoad) {
        ONEPASS_UNROLL for (int i = 0; i < 4; ++i) v[i] = Type::load(d, tensor[i] + r);
        transpose(v);
        ONEPASS_UNROLL for (int i = 0; i < 4; ++i) hn::StoreU(v[i], d, panel + i * t.panel_stride);
      } else {
        ONEPASS_UNROLL for (int i = 0; i < 4; ++i) v[i] = hn::LoadU(d, panel + i * t.panel_stride);
        transpose(v);
        ONEPASS_UNROLL for (int i = 0; i < 4; ++i) Type::store(v[i], d, tensor[i] + r);
      }
    }
  }
  transfer_elements<Type, kLoad>(t, rows, 0);
  TransferArguments top = t;
  top.rows = rows;
  transfer_elements<Type, kLoad>(top, 0, cols);
}

template <class Type, bool kLoad>
void transfer_of(const TransferArguments& t) {
  if (t.col_stride == 1 || t.cols == 1) return transfer_rows<Type, kLoad>(t);
  if (t.row_stride == 1) return transfer_transposed<Type, kLoad>(t);
  transfer_elements<Type, kLoad>(t, 0, 0);
}

template <bool kLoad>
void transfer(const TransferArguments& t) {
  if (t.dtype == DType::f16) return transfer_of<F16, kLoad>(t);
  if (t.dtype == DType::bf16) return transfer_of<Bf16, kLoad>(t);
  transfer_of<F32, kLoad>(t);
}

void fill_panel(Isa& isa) {
  isa.lanes = lanes;
  add_steps(isa, std::make_integer_sequence<int, step_count>());
  isa.statistics[static_cast<int>(Orientation::planar)] = &planar_statistics;
  isa.statistics[static_cast<int>(Orientation::interleaved)] = &interleaved_statistics;
  isa.largest = &largest;
  isa.load = &transfer<true>;
  isa.store = &transfer<false>;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace onepass::cpu {

void add_panel_functions(int64_t target, Isa& isa) { ONEPASS_FOR_TARGET(target, fill_panel(isa)); }

}  // namespace onepass::cpu
#endif
