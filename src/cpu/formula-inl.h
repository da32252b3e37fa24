// The formulas of pointwise steps over vectors, and how many vectors of a step are in flight. Compiled once
// per SIMD target.

#if defined(ONEPASS_CPU_FORMULA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_CPU_FORMULA_INL_H_
#undef ONEPASS_CPU_FORMULA_INL_H_
#else
#define ONEPASS_CPU_FORMULA_INL_H_
#endif

#include <hwy/highway.h>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/math-inl.h"
#include "cpu/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

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

// And the exponential: softplus takes a logarithm of it.
template <int kStep>
struct Exp {
  template <class Vector>
  HWY_INLINE auto operator()(Vector x) const {
    if constexpr (kStep == static_cast<int>(Op::softplus)) {
      return math::Exponential<Vector>{x};
    } else {
      return math::exp(x);
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
      [[maybe_unused]] constexpr Exp<static_cast<int>(Op::name)> exp;                                  \
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
// Vectors of a step in flight, as many as registers hold. A sigmoid has six, its form without clamps seven
// (swish 0.50 ns an element instead of 0.51). A longer function has four (tanh is 10% slower with six). A
// cheap step whose vectors share coefficients has ten where there are 32 registers (norm and hardswish 2.4
// cycles a vector instead of 2.9). Interleaved ones have eight, two cache lines: rows that lie apart by a
// power of two share sets of L1, which loses a line before its second half is written (a norm of 1024
// channels, 384 pixels 0.39 ms instead of 0.51 with four or six).
constexpr int in_flight_of(int step, Affine affine, Orientation orientation) {
  for (const Op op : {Op::elu, Op::gelu, Op::gelu_tanh, Op::tanh, Op::mish, Op::softplus}) {
    if (step == static_cast<int>(op)) return in_flight;
  }
  if (!HWY_ARCH_ARM) return 6;
  if (has_sigmoid(step)) return affine == Affine::narrow && orientation == Orientation::planar ? 7 : 6;
  return orientation == Orientation::planar ? 10 : 8;
}

template <int kStep, Affine kAffine>
HWY_INLINE V value_of(const Coefficients<kStep, kAffine>& coefficients, V x, V a, V b, V panel_operand) {
  return Formula<kStep, kAffine>::value(coefficients.input(x), a, b, coefficients.argument(panel_operand));
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();

#endif  // ONEPASS_CPU_FORMULA_INL_H_
