// Sigmoids of arguments near 0 by polynomials, with the sums of their results, compiled once per SIMD target.
//
// Apart from panel.cc because the order of the instructions here is that of the source: every vector in flight
// takes one step of the polynomial, then all take the next. GCC's first scheduler would keep more values at a
// time than there are registers.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/near.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <iterator>

#include "cpu/dispatch.h"
#include "cpu/math-inl.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {
namespace {

template <Affine kAffine>
struct Polynomial {
  static constexpr auto& slope = math::small::kSlope;
  static constexpr float limit = math::small::kLimit;
};
template <>
struct Polynomial<Affine::tiny> {
  static constexpr auto& slope = math::tiny::kSlope;
  static constexpr float limit = math::tiny::kLimit;
};

template <bool kSwish, Affine kAffine>
HWY_INLINE bool strip(const float* HWY_RESTRICT src, float* HWY_RESTRICT dst, int64_t count, float* totals) {
  const D d;
  constexpr auto& coefficients = Polynomial<kAffine>::slope;
  constexpr int degree = static_cast<int>(std::size(coefficients)) - 1;
  const V highest = math::constant<V>(coefficients[degree].values[0]);
  V sum = hn::Zero(d);
  V squares[2] = {hn::Zero(d), hn::Zero(d)};
  V most = hn::Zero(d);
  for (int64_t c = 0; c < count; c += near_in_flight * lanes) {
    V x[near_in_flight];
    V u[near_in_flight];
    V slope[near_in_flight];
    ONEPASS_UNROLL for (int v = 0; v < near_in_flight; ++v) {
      x[v] = hn::LoadU(d, src + c + v * lanes);
      u[v] = hn::Mul(x[v], x[v]);
    }
    ONEPASS_UNROLL for (int v = 0; v < near_in_flight; ++v) {
      slope[v] = hn::MulAdd(u[v], highest, math::addend(coefficients[degree - 1].values, u[v]));
    }
    ONEPASS_UNROLL for (int i = degree - 2; i >= 0; --i) {
      ONEPASS_UNROLL for (int v = 0; v < near_in_flight; ++v) {
        slope[v] = hn::MulAdd(slope[v], u[v], math::addend(coefficients[i].values, slope[v]));
      }
    }
    if constexpr (kAffine == Affine::small) {
      ONEPASS_UNROLL for (int v = 0; v < near_in_flight; ++v) most = hn::Max(most, u[v]);
    }
    ONEPASS_UNROLL for (int v = 0; v < near_in_flight; ++v) {
      const math::Centred<V> sigmoid{x[v], slope[v]};
      x[v] = kSwish ? x[v] * sigmoid : V(sigmoid);
    }
    ONEPASS_UNROLL for (int v = 0; v < near_in_flight; ++v) hn::StoreU(x[v], d, dst + c + v * lanes);
    ONEPASS_UNROLL for (int v = 0; v < near_in_flight; ++v) {
      squares[v % 2] = hn::MulAdd(x[v], x[v], squares[v % 2]);
      sum = hn::Add(sum, x[v]);
    }
  }
  if constexpr (kAffine == Affine::small) {
    constexpr float limit = Polynomial<kAffine>::limit;
    if (!(hn::GetLane(hn::MaxOfLanes(d, most)) <= limit * limit)) return false;
  }
  hn::Store(hn::Add(hn::Load(d, totals), sum), d, totals);
  hn::Store(hn::Add(hn::Load(d, totals + lanes), hn::Add(squares[0], squares[1])), d, totals + lanes);
  return true;
}

}  // namespace

bool near_strip(Op op, Affine affine, const float* src, float* dst, int64_t count, float* totals) {
  if (op == Op::swish) {
    return affine == Affine::tiny ? strip<true, Affine::tiny>(src, dst, count, totals)
                                  : strip<true, Affine::small>(src, dst, count, totals);
  }
  return affine == Affine::tiny ? strip<false, Affine::tiny>(src, dst, count, totals)
                                : strip<false, Affine::small>(src, dst, count, totals);
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif
