// Gradients of pointwise steps and of the norm over panels, compiled once per SIMD target.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/gradient.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <utility>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/math-inl.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

// The gradients of each row of pointwise.def over vectors.
template <int kStep>
struct GradientFormula;
#define K(number) math::constant<V>(number)
#define ONEPASS_POINTWISE(name, constants, default_a, default_b, kind, value, of_x, of_argument)     \
  template <>                                                                                        \
  struct GradientFormula<static_cast<int>(Op::name)> {                                               \
    static HWY_INLINE V gradient([[maybe_unused]] V x, [[maybe_unused]] V a, [[maybe_unused]] V b,   \
                                 [[maybe_unused]] V p, V g) {                                        \
      using namespace math;                                                                          \
      return of_x;                                                                                   \
    }                                                                                                \
    static HWY_INLINE V argument([[maybe_unused]] V x, [[maybe_unused]] V p, [[maybe_unused]] V g) { \
      using namespace math;                                                                          \
      return of_argument;                                                                            \
    }                                                                                                \
  };
#include "onepass/pointwise.def"
#undef ONEPASS_POINTWISE
#undef K

// --------------------------------------------------------------------------------- loops over a panel

// A Body holds the coefficients of the channels at hand and their sums:
//   channel(r), channels(v, c)       coefficients of row r's channel, or of the vector v of channels at
//   column c vectors<kVectors, kPlanar>(r, c), rest(r, c, count)   elements of row r from column c on
//   flush()                          ends the chains of additions
//   row_sums(r), column_sums(v, c)   what was summed since
// Sums of vector v lie in element v of an array: chains that do not wait on one another.

// Additions in one chain. Equal terms round alike, so a chain of n is off by up to n / 2 ulp (1e-6 for 256
// equal gradients behind a mean).
constexpr int64_t chain_length = 32;

template <class Body, class Arguments>
void planar_loop(const Arguments& arguments) {
  Body body(arguments);
  const int64_t rows = body.rows();
  const int64_t cols = body.cols();
  for (int64_t r = 0; r < rows; ++r) {
    body.channel(r);
    int64_t c = 0;
    while (c + in_flight * lanes <= cols) {
      const int64_t left = (cols - c) / (in_flight * lanes);
      const int64_t end = c + (left < chain_length ? left : chain_length) * in_flight * lanes;
      for (; c < end; c += in_flight * lanes) body.template vectors<in_flight, true>(r, c);
      body.flush();
    }
    for (; c + lanes <= cols; c += lanes) body.template vectors<1, true>(r, c);
    if (c < cols) body.rest(r, c, cols - c);
    body.flush();
    body.row_sums(r);
  }
}

// f(r) for each row, with the chains ended now and then.
template <class Body, class F>
HWY_INLINE void for_rows(Body& body, int64_t rows, F&& f) {
  for (int64_t r = 0; r < rows;) {
    const int64_t end = rows - r < chain_length ? rows : r + chain_length;
    for (; r < end; ++r) f(r);
    body.flush();
  }
}

// Columns outside, rows inside: the coefficients of a few channels stay in registers. A Body without any
// takes rows as they lie.
template <class Body, class Arguments>
HWY_INLINE void all_columns(const Arguments& arguments) {
  Body body(arguments);
  const int64_t rows = body.rows();
  const int64_t cols = body.cols();
  int64_t c = 0;
  for (; c + in_flight * lanes <= cols; c += in_flight * lanes) {
    ONEPASS_UNROLL for (int v = 0; v < in_flight; ++v) body.channels(v, c + v * lanes);
    for_rows(body, rows, [&](int64_t r) HWY_ATTR { body.template vectors<in_flight, false>(r, c); });
    ONEPASS_UNROLL for (int v = 0; v < in_flight; ++v) body.column_sums(v, c + v * lanes);
  }
  for (; c + lanes <= cols; c += lanes) {
    body.channels(0, c);
    for_rows(body, rows, [&](int64_t r) HWY_ATTR { body.template vectors<1, false>(r, c); });
    body.column_sums(0, c);
  }
  if (c == cols) return;
  body.channels(0, c);
  for_rows(body, rows, [&](int64_t r) HWY_ATTR { body.rest(r, c, cols - c); });
  body.column_sums(0, c);
}

// Few columns: rows of several pixels (Fold).
template <class Body>
void folded_columns(const GradientArguments& arguments, const Fold& fold) {
  HWY_ALIGN float values[4][most_folded];
  HWY_ALIGN float sums[most_folded];
  GradientArguments g = arguments;
  const int64_t cols = g.step.cols;
  const auto repeat = [&](const float*& from, float* to) {
    fold.repeat(from, cols, to);
    from = to;
  };
  if constexpr (Body::has_norm) repeat(g.step.centre, values[0]);
  if constexpr (Body::has_norm) repeat(g.step.scale, values[1]);
  if constexpr (Body::has_norm) repeat(g.step.shift, values[2]);
  if constexpr (Body::has_channel_operand) repeat(g.step.operand, values[3]);
  g.step.src_stride = g.step.dst_stride = g.gradient_stride = fold.cols;
  if constexpr (Body::reads_tensor) g.step.operand_stride = fold.cols;
  if constexpr (Body::stores_argument) g.argument_stride = fold.cols;
  if constexpr (Body::sums_argument) g.argument = sums;
  for (const Fold::Part& part : fold.parts(arguments.step.rows, cols)) {
    g.step.rows = part.rows;
    g.step.cols = part.cols;
    g.step.src = arguments.step.src + part.begin;
    g.step.dst = arguments.step.dst + part.begin;
    g.gradient = arguments.gradient + part.begin;
    if constexpr (Body::reads_tensor) g.step.operand = arguments.step.operand + part.begin;
    if constexpr (Body::stores_argument) g.argument = arguments.argument + part.begin;
    all_columns<Body>(g);
    if constexpr (Body::sums_argument) Fold::add(part, sums, cols, arguments.argument);
  }
}

// Whether no gap is between rows.
template <class Body>
bool is_dense(const GradientArguments& g) {
  const int64_t cols = g.step.cols;
  bool dense = g.step.src_stride == cols && g.step.dst_stride == cols && g.gradient_stride == cols;
  if constexpr (Body::reads_tensor) dense &= g.step.operand_stride == cols;
  if constexpr (Body::stores_argument) dense &= g.argument_stride == cols;
  return dense;
}

// Nothing per channel: rows are one where no gap is between them. Two channels in channels last fill no
// vector: swish | group_norm(2) @ 164x2x88x56, forward and back, takes 2.4 ms on two threads of a Xeon with
// AVX-512, row by row 5.3.
template <class Body>
void plain_loop(const GradientArguments& arguments) {
  GradientArguments g = arguments;
  if (is_dense<Body>(g)) {
    g.step.cols *= g.step.rows;
    g.step.rows = 1;
  }
  planar_loop<Body>(g);
}

template <class Body>
void planar_gradient(const GradientArguments& g) {
  if constexpr (!Body::per_channel) return plain_loop<Body>(g);
  planar_loop<Body>(g);
}

template <class Body>
void interleaved_gradient(const GradientArguments& g) {
  if constexpr (!Body::per_channel) return plain_loop<Body>(g);
  if (const Fold fold(g.step.rows, g.step.cols); fold && is_dense<Body>(g)) {
    return folded_columns<Body>(g, fold);
  }
  all_columns<Body>(g);
}

// Sums of up to in_flight vectors, kept apart while elements come in.
struct Sums {
  V parts[in_flight];   // the chains under way
  V totals[in_flight];  // those that have ended

  HWY_INLINE Sums() { clear(); }
  HWY_INLINE void clear(int v) { parts[v] = totals[v] = hn::Zero(D()); }
  HWY_INLINE void clear() { ONEPASS_UNROLL for (int v = 0; v < in_flight; ++v) clear(v); }
  HWY_INLINE void flush() {
    ONEPASS_UNROLL for (int v = 0; v < in_flight; ++v) {
      totals[v] = hn::Add(totals[v], parts[v]);
      parts[v] = hn::Zero(D());
    }
  }
  HWY_INLINE float total() const {
    const V sum = hn::Add(hn::Add(totals[0], totals[1]), hn::Add(totals[2], totals[3]));
    return hn::GetLane(hn::SumOfLanes(D(), sum));
  }
};

HWY_INLINE V first_lanes(V v, int64_t count) {
  return hn::IfThenElseZero(hn::FirstN(D(), static_cast<size_t>(count)), v);
}

// ------------------------------------------------------------------------------------ pointwise steps

template <int kStep, Affine kAffine, bool kArgument>
class StepBack {
 public:
  static constexpr bool per_channel =
      Coefficients<kStep, kAffine>::any || (kArgument && !takes_tensor<kStep>);
  static constexpr bool has_norm = Coefficients<kStep, kAffine>::has_norm;
  static constexpr bool has_channel_operand = Coefficients<kStep, kAffine>::has_channel_operand;
  static constexpr bool reads_tensor = takes_tensor<kStep>;
  static constexpr bool sums_argument = kArgument && !reads_tensor;
  static constexpr bool stores_argument = kArgument && reads_tensor;

  HWY_INLINE explicit StepBack(const GradientArguments& arguments)
      : g_(arguments), a_(hn::Set(D(), arguments.step.a)), b_(hn::Set(D(), arguments.step.b)) {}

  HWY_INLINE int64_t rows() const { return g_.step.rows; }
  HWY_INLINE int64_t cols() const { return g_.step.cols; }

  HWY_INLINE void channel(int64_t r) {
    coefficients_[0].broadcast(g_.step, r);
    if constexpr (sums_argument) sums_.clear();
  }
  HWY_INLINE void channels(int v, int64_t c) {
    coefficients_[v].load(g_.step, c);
    if constexpr (sums_argument) sums_.clear(v);
  }
  HWY_INLINE void row_sums(int64_t r) {
    if constexpr (sums_argument) g_.argument[r] = sums_.total();
  }
  HWY_INLINE void column_sums(int v, int64_t c) {
    if constexpr (sums_argument) hn::StoreU(sums_.totals[v], D(), g_.argument + c);
  }
  HWY_INLINE void flush() {
    if constexpr (sums_argument) sums_.flush();
  }

  template <int kVectors, bool kPlanar>
  HWY_INLINE void vectors(int64_t r, int64_t c) {
    const D d;
    const float* x = g_.step.src + r * g_.step.src_stride + c;
    const float* gradient = g_.gradient + r * g_.gradient_stride + c;
    const float* operand = g_.step.operand + r * g_.step.operand_stride + c;
    V result[kVectors];
    V argument[kVectors];
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      V p = hn::Zero(d);
      if constexpr (reads_tensor) p = hn::LoadU(d, operand + v * lanes);
      const V g = hn::LoadU(d, gradient + v * lanes);
      evaluate(kPlanar ? 0 : v, hn::LoadU(d, x + v * lanes), p, g, result[v], argument[v]);
    }
    float* dst = g_.step.dst + r * g_.step.dst_stride + c;
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) hn::StoreU(result[v], d, dst + v * lanes);
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      if constexpr (sums_argument) sums_.parts[v] = hn::Add(sums_.parts[v], argument[v]);
      if constexpr (stores_argument) {
        hn::StoreU(argument[v], d, g_.argument + r * g_.argument_stride + c + v * lanes);
      }
    }
  }

  HWY_INLINE void rest(int64_t r, int64_t c, int64_t count) {
    V p = hn::Zero(D());
    if constexpr (reads_tensor) p = load_some(g_.step.operand + r * g_.step.operand_stride + c, count);
    const V x = load_some(g_.step.src + r * g_.step.src_stride + c, count);
    const V g = load_some(g_.gradient + r * g_.gradient_stride + c, count);
    V result = p;
    V argument = p;
    evaluate(0, x, p, g, result, argument);
    store_some(result, g_.step.dst + r * g_.step.dst_stride + c, count);
    if constexpr (sums_argument) sums_.parts[0] = hn::Add(sums_.parts[0], first_lanes(argument, count));
    if constexpr (stores_argument) store_some(argument, g_.argument + r * g_.argument_stride + c, count);
  }

 private:
  HWY_INLINE void evaluate(int set, V x, V panel_operand, V g, V& result, V& argument) const {
    const V input = coefficients_[set].input(x);
    const V p = coefficients_[set].argument(panel_operand);
    result = GradientFormula<kStep>::gradient(input, a_, b_, p, g);
    if constexpr (kArgument) argument = GradientFormula<kStep>::argument(input, p, g);
  }

  GradientArguments g_;
  V a_;
  V b_;
  Coefficients<kStep, kAffine> coefficients_[in_flight];
  Sums sums_;
};

// ----------------------------------------------------------------------------------------------- norm

class NormSums {
 public:
  static constexpr bool per_channel = true;

  HWY_INLINE explicit NormSums(const NormGradientArguments& arguments) : n_(arguments) {}
  HWY_INLINE int64_t rows() const { return n_.rows; }
  HWY_INLINE int64_t cols() const { return n_.cols; }

  HWY_INLINE void channel(int64_t r) {
    centre_[0] = hn::Set(D(), n_.centre[r]);
    inverse_[0] = hn::Set(D(), n_.inverse[r]);
    sums_.clear();
    products_.clear();
  }
  HWY_INLINE void channels(int v, int64_t c) {
    centre_[v] = hn::LoadU(D(), n_.centre + c);
    inverse_[v] = hn::LoadU(D(), n_.inverse + c);
    sums_.clear(v);
    products_.clear(v);
  }
  HWY_INLINE void row_sums(int64_t r) {
    n_.sums[r] = sums_.total();
    n_.products[r] = products_.total();
  }
  HWY_INLINE void column_sums(int v, int64_t c) {
    hn::StoreU(sums_.totals[v], D(), n_.sums + c);
    hn::StoreU(products_.totals[v], D(), n_.products + c);
  }
  HWY_INLINE void flush() {
    sums_.flush();
    products_.flush();
  }

  template <int kVectors, bool kPlanar>
  HWY_INLINE void vectors(int64_t r, int64_t c) {
    const D d;
    const float* x = n_.x + r * n_.x_stride + c;
    const float* gradient = n_.gradient + r * n_.gradient_stride + c;
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      add(v, kPlanar ? 0 : v, hn::LoadU(d, x + v * lanes), hn::LoadU(d, gradient + v * lanes));
    }
  }
  HWY_INLINE void rest(int64_t r, int64_t c, int64_t count) {
    const V g = load_some(n_.gradient + r * n_.gradient_stride + c, count);
    const V x = load_some(n_.x + r * n_.x_stride + c, count);
    // The lanes behind the last element add nothing, whatever the centre is.
    const V xhat = first_lanes(hn::Mul(hn::Sub(x, centre_[0]), inverse_[0]), count);
    sums_.parts[0] = hn::Add(sums_.parts[0], g);
    products_.parts[0] = hn::MulAdd(xhat, g, products_.parts[0]);
  }

 private:
  HWY_INLINE void add(int v, int set, V x, V g) {
    sums_.parts[v] = hn::Add(sums_.parts[v], g);
    const V xhat = hn::Mul(hn::Sub(x, centre_[set]), inverse_[set]);
    products_.parts[v] = hn::MulAdd(xhat, g, products_.parts[v]);
  }

  NormGradientArguments n_;
  V centre_[in_flight];
  V inverse_[in_flight];
  Sums sums_;
  Sums products_;
};

class NormBack {
 public:
  static constexpr bool per_channel = true;

  HWY_INLINE explicit NormBack(const NormGradientArguments& arguments) : n_(arguments) {}
  HWY_INLINE int64_t rows() const { return n_.rows; }
  HWY_INLINE int64_t cols() const { return n_.cols; }

  HWY_INLINE void channel(int64_t r) {
    const D d;
    centre_[0] = hn::Set(d, n_.centre[r]);
    inverse_[0] = hn::Set(d, n_.inverse[r]);
    scale_[0] = hn::Set(d, n_.scale[r]);
    offset_[0] = hn::Set(d, n_.offset[r]);
    slope_[0] = hn::Set(d, n_.slope[r]);
  }
  HWY_INLINE void channels(int v, int64_t c) {
    const D d;
    centre_[v] = hn::LoadU(d, n_.centre + c);
    inverse_[v] = hn::LoadU(d, n_.inverse + c);
    scale_[v] = hn::LoadU(d, n_.scale + c);
    offset_[v] = hn::LoadU(d, n_.offset + c);
    slope_[v] = hn::LoadU(d, n_.slope + c);
  }
  HWY_INLINE void row_sums(int64_t) {}
  HWY_INLINE void column_sums(int, int64_t) {}
  HWY_INLINE void flush() {}

  template <int kVectors, bool kPlanar>
  HWY_INLINE void vectors(int64_t r, int64_t c) {
    const D d;
    const float* x = n_.x + r * n_.x_stride + c;
    const float* gradient = n_.gradient + r * n_.gradient_stride + c;
    float* dst = n_.dst + r * n_.dst_stride + c;
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const V g = hn::LoadU(d, gradient + v * lanes);
      hn::StoreU(result(kPlanar ? 0 : v, hn::LoadU(d, x + v * lanes), g), d, dst + v * lanes);
    }
  }
  HWY_INLINE void rest(int64_t r, int64_t c, int64_t count) {
    const V x = load_some(n_.x + r * n_.x_stride + c, count);
    const V g = load_some(n_.gradient + r * n_.gradient_stride + c, count);
    store_some(result(0, x, g), n_.dst + r * n_.dst_stride + c, count);
  }

 private:
  HWY_INLINE V result(int set, V x, V g) const {
    const V xhat = hn::Mul(hn::Sub(x, centre_[set]), inverse_[set]);
    return hn::MulSub(g, scale_[set], hn::MulAdd(xhat, slope_[set], offset_[set]));
  }

  NormGradientArguments n_;
  V centre_[in_flight];
  V inverse_[in_flight];
  V scale_[in_flight];
  V offset_[in_flight];
  V slope_[in_flight];
};

// ---------------------------------------------------------------------------------------- the tables

constexpr int planar_index = static_cast<int>(Orientation::planar);
constexpr int interleaved_index = static_cast<int>(Orientation::interleaved);

template <int kStep, Affine kAffine, bool kArgument>
void add_gradient(Isa& isa) {
  GradientFunction(&functions)[2][2] = isa.gradients[kStep][kAffine == Affine::norm];
  using Body = StepBack<kStep, kAffine, kArgument>;
  functions[planar_index][kArgument] = &planar_gradient<Body>;
  functions[interleaved_index][kArgument] = &interleaved_gradient<Body>;
}

template <int kStep>
void add_gradients_of(Isa& isa) {
  add_gradient<kStep, Affine::none, false>(isa);
  add_gradient<kStep, Affine::norm, false>(isa);
  if constexpr (argument_of[kStep] != ArgumentKind::none) {
    add_gradient<kStep, Affine::none, true>(isa);
    add_gradient<kStep, Affine::norm, true>(isa);
  }
}

template <int... kSteps>
void add_gradients(Isa& isa, std::integer_sequence<int, kSteps...>) {
  (add_gradients_of<kSteps>(isa), ...);
}

void fill_gradient(Isa& isa) {
  add_gradients(isa, std::make_integer_sequence<int, op_count>());
  isa.norm_sums[planar_index] = &planar_loop<NormSums, NormGradientArguments>;
  isa.norm_gradient[planar_index] = &planar_loop<NormBack, NormGradientArguments>;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif
