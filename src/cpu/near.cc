// Sigmoids of arguments near 0 by polynomials, with sums of their results, compiled once per SIMD target.
//
// Apart from steps.cc because instructions here stay in the order of the source. Every vector in flight takes
// one step of the polynomial, then all take the next. GCC's first scheduler would keep more values than there
// are registers. Swish with its sums would take 5.2 cycles a vector instead of 4.3.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/near.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "cpu/dispatch.h"
#include "cpu/math-inl.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {
namespace {

template <Affine kAffine>
constexpr auto& slope_coefficients = math::small::kSlope;
template <>
constexpr auto& slope_coefficients<Affine::tiny> = math::tiny::kSlope;
static_assert(tiny_limit <= math::tiny::kLimit, "nothing looks at the arguments of the tiny form");

struct Sums {
  V sum, squares[2], most;
};

// kVectors vectors.
template <bool kSwish, Affine kAffine, int kVectors>
HWY_INLINE void vectors(const float* HWY_RESTRICT src, float* HWY_RESTRICT dst, Sums& sums) {
  const D d;
  V x[kVectors];
  V u[kVectors];
  V slope[kVectors];
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    x[v] = hn::LoadU(d, src + v * lanes);
    u[v] = hn::Mul(x[v], x[v]);
  }
  math::centred_slopes(u, slope, slope_coefficients<kAffine>);
  if constexpr (kAffine == Affine::small) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) sums.most = hn::Max(sums.most, u[v]);
  }
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    const math::Centred<V> sigmoid{x[v], slope[v]};
    x[v] = kSwish ? x[v] * sigmoid : V(sigmoid);
  }
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) hn::StoreU(x[v], d, dst + v * lanes);
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    sums.squares[v % 2] = hn::MulAdd(x[v], x[v], sums.squares[v % 2]);
    sums.sum = hn::Add(sums.sum, x[v]);
  }
}

template <bool kSwish, Affine kAffine>
HWY_INLINE bool strip(const float* HWY_RESTRICT src, float* HWY_RESTRICT dst, int64_t count, float* totals) {
  const D d;
  const V zero = hn::Zero(d);
  Sums sums{zero, {zero, zero}, zero};
  int64_t c = 0;
  for (; c + near_in_flight * lanes <= count; c += near_in_flight * lanes) {
    vectors<kSwish, kAffine, near_in_flight>(src + c, dst + c, sums);
  }
  for (; c < count; c += lanes) vectors<kSwish, kAffine, 1>(src + c, dst + c, sums);
  if constexpr (kAffine == Affine::small) {
    constexpr float limit = math::small::kLimit * math::small::kLimit;
    if (!(hn::GetLane(hn::MaxOfLanes(d, sums.most)) <= limit)) return false;
  }
  hn::Store(hn::Add(hn::Load(d, totals), sums.sum), d, totals);
  const V squares = hn::Add(sums.squares[0], sums.squares[1]);
  hn::Store(hn::Add(hn::Load(d, totals + lanes), squares), d, totals + lanes);
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
