// Pointwise steps over panels, compiled once per SIMD target.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/steps.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <utility>

#include "cpu/dispatch.h"
#include "cpu/formula-inl.h"
#include "cpu/isa.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

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
    if constexpr (takes_tensor<kStep>) p = hn::LoadU(d, row.operand + c + v * lanes);
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
  if constexpr (takes_tensor<kStep>) p = load_some(row.operand + c, rest);
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

// Arguments are copied in these functions, because a vector store may alias them. Reloading them in every
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

// Strip by strip by the polynomial. A strip with an argument too far from 0 is redone by the exponential.
// Once more than half of a row's strips were redone, its rest takes the exponential at once. So does a row
// that is stepped in place, where nothing can be redone.
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

// Whether no gap is between rows.
template <int kStep>
HWY_INLINE bool is_dense(const StepArguments& s) {
  return s.src_stride == s.cols && s.dst_stride == s.cols &&
         (!takes_tensor<kStep> || s.operand_stride == s.cols);
}

// Nothing per channel: rows are taken as they lie, as one where no gap is between them.
template <int kStep, Affine kAffine>
void plain_step(const StepArguments& arguments) {
  StepArguments s = arguments;
  if (is_dense<kStep>(s)) {
    s.cols *= s.rows;
    s.rows = 1;
  }
  planar_step<kStep, kAffine>(s);
}

// Rows whose columns are taken together: few streams from memory.
constexpr int64_t block_rows = 8;

// Columns outside, rows inside: the coefficients of a few channels stay in registers.
template <int kStep, Affine kAffine>
HWY_INLINE void interleaved_rows(const StepArguments& s, int64_t begin, int64_t end) {
  constexpr int vectors = in_flight_of(kStep, kAffine, Orientation::interleaved);
  const V a = hn::Set(D(), s.a);
  const V b = hn::Set(D(), s.b);
  Coefficients<kStep, kAffine> coefficients[vectors];
  int64_t c = 0;
  for (; c + vectors * lanes <= s.cols; c += vectors * lanes) {
    ONEPASS_UNROLL for (int v = 0; v < vectors; ++v) coefficients[v].load(s, c + v * lanes);
    for (int64_t r = begin; r < end; ++r) {
      step_vectors<kStep, kAffine, Orientation::interleaved, vectors>(StepRow(s, r), c, a, b, coefficients);
    }
  }
  for (; c + lanes <= s.cols; c += lanes) {
    coefficients[0].load(s, c);
    for (int64_t r = begin; r < end; ++r) {
      step_vectors<kStep, kAffine, Orientation::interleaved, 1>(StepRow(s, r), c, a, b, coefficients);
    }
  }
  if (c == s.cols) return;
  coefficients[0].load(s, c);
  for (int64_t r = begin; r < end; ++r) step_rest(StepRow(s, r), c, s.cols - c, a, b, coefficients[0]);
}

template <int kStep, Affine kAffine>
HWY_INLINE void interleaved_blocks(const StepArguments& s) {
  for (int64_t r = 0; r < s.rows; r += block_rows) {
    interleaved_rows<kStep, kAffine>(s, r, s.rows - r < block_rows ? s.rows : r + block_rows);
  }
}

// Few columns: rows of several pixels (Fold). Pixels that fill no row are one that is shorter.
template <int kStep, Affine kAffine>
void folded_step(const StepArguments& arguments, const Fold& fold) {
  using Values = Coefficients<kStep, kAffine>;
  HWY_ALIGN float centre[most_folded], scale[most_folded], shift[most_folded], operand[most_folded];
  StepArguments s = arguments;
  const int64_t columns = s.cols;
  const auto repeat = [&](const float*& values, float* to) {
    fold.repeat(values, columns, to);
    values = to;
  };
  if constexpr (Values::has_norm) repeat(s.centre, centre);
  if constexpr (Values::has_norm) repeat(s.scale, scale);
  if constexpr (Values::has_norm) repeat(s.shift, shift);
  if constexpr (Values::has_channel_operand) repeat(s.operand, operand);
  s.src_stride = s.dst_stride = fold.cols;
  if constexpr (takes_tensor<kStep>) s.operand_stride = fold.cols;
  for (const Fold::Part& part : fold.parts(arguments.rows, columns)) {
    s.rows = part.rows;
    s.cols = part.cols;
    s.src = arguments.src + part.begin;
    s.dst = arguments.dst + part.begin;
    if constexpr (takes_tensor<kStep>) s.operand = arguments.operand + part.begin;
    interleaved_blocks<kStep, kAffine>(s);
  }
}

template <int kStep, Affine kAffine>
void interleaved_step(const StepArguments& arguments) {
  if constexpr (!Coefficients<kStep, kAffine>::any) return plain_step<kStep, kAffine>(arguments);
  const StepArguments s = arguments;
  if (const Fold fold(s.rows, s.cols); fold && is_dense<kStep>(s))
    return folded_step<kStep, kAffine>(s, fold);
  interleaved_blocks<kStep, kAffine>(s);
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

void fill_steps(Isa& isa) {
  isa.lanes = lanes;
  add_steps(isa, std::make_integer_sequence<int, step_count>());
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif
