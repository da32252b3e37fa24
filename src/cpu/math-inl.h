// Vector exp, expm1, log1p, tanh, erf and sigmoid for f32, and the other primitives of pointwise.def,
// compiled once for each Highway target.
//
// Right for every float: infinities, NaN, denormal arguments and denormal results (a zero may lose its sign).
// The errors given with each function are the largest over all 2^32 floats, measured on NEON; AVX2 and
// AVX-512 have the same fused multiply-add. Where it rounds twice (Highway's scalar fallback) every 251st
// float gave at most 1.9 ulp, tanh's. The polynomials are minimax fits made for this file.
//
// The times are for one Neoverse-V1 core at 2.6 GHz, four vectors an iteration (sigmoid six), argument and
// result in L1. The scheduler holds about 60 vector instructions, too few to cover the latency of a chain of
// 45 cycles. The four vectors have to be interleaved, which GCC's first scheduler does. With
// -fno-schedule-insns, or one vector an iteration, all of these take 1.2 to 1.4 times as long.

#if defined(ONEPASS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_CPU_MATH_INL_H_
#undef ONEPASS_CPU_MATH_INL_H_
#else
#define ONEPASS_CPU_MATH_INL_H_
#endif

#include <hwy/highway.h>

#include "cpu/dispatch.h"

HWY_BEFORE_NAMESPACE();
namespace onepass {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class V>
HWY_INLINE V constant(double value) {
  return hn::Set(hn::DFromV<V>(), static_cast<float>(value));
}

// A constant as the widest vector of it.
struct alignas(64) Repeated {
  float values[16];
  constexpr explicit Repeated(float value) : values{} {
    for (float& v : values) v = value;
  }
};

// The vector of constants at this address, for a product with x to be added to. AArch64's fused
// multiply-add overwrites its addend, so a constant in a register is copied before each use. A load saves
// that instruction (hardswish on Neoverse-V1: 1.6 instead of 1.9 cycles a vector). Naming x keeps the
// compiler from loading only once.
template <class V>
HWY_INLINE V addend(const float* at, [[maybe_unused]] V x) {
#if HWY_ARCH_ARM_A64 && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
  V loaded;
  asm("ldr %q0, %1" : "=w"(loaded.raw) : "m"(*reinterpret_cast<const float(*)[4]>(at)), "w"(x.raw));
  return loaded;
#else
  return hn::LoadU(hn::DFromV<V>(), at);
#endif
}

// minimum and maximum give NaN where a is NaN. Highway's Min and Max do not promise that. On AArch64 they are
// fminnm and fmaxnm, which drop a NaN, as does the scalar fallback. On x86 they give the second operand.
template <class V>
HWY_INLINE V minimum(V a, V b) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
  return hn::Min(b, a);
#elif HWY_ARCH_ARM && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(a.raw) == 16) {
    return V(vminq_f32(a.raw, b.raw));
  } else {
    return V(vmin_f32(a.raw, b.raw));
  }
#else
  return hn::IfThenElse(hn::Lt(b, a), b, a);
#endif
}

template <class V>
HWY_INLINE V maximum(V a, V b) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
  return hn::Max(b, a);
#elif HWY_ARCH_ARM && HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(a.raw) == 16) {
    return V(vmaxq_f32(a.raw, b.raw));
  } else {
    return V(vmax_f32(a.raw, b.raw));
  }
#else
  return hn::IfThenElse(hn::Lt(a, b), b, a);
#endif
}

template <class V>
HWY_INLINE V where_positive(V t, V yes, V no) {
  return hn::IfThenElse(hn::Gt(t, hn::Zero(hn::DFromV<V>())), yes, no);
}

template <class V>
HWY_INLINE V where_at_most(V t, V limit, V yes, V no) {
  return hn::IfThenElse(hn::Le(t, limit), yes, no);
}

template <class V>
HWY_INLINE V where_below(V t, V limit, V yes, V no) {
  return hn::IfThenElse(hn::Lt(t, limit), yes, no);
}

namespace math {

template <class V>
HWY_INLINE V clamp(V x, double low, double high) {
  return minimum(maximum(x, constant<V>(low)), constant<V>(high));
}

// c_n x^n + ... + c_1 x + c_0, highest coefficient first.
template <class V>
HWY_INLINE V horner(V, V sum) {
  return sum;
}
template <class V, class... C>
HWY_INLINE V horner(V x, V sum, double next, C... rest) {
  return horner(x, hn::MulAdd(sum, x, constant<V>(next)), rest...);
}
template <class V, class... C>
HWY_INLINE V polynomial(V x, double highest, C... rest) {
  return horner(x, constant<V>(highest), rest...);
}

// Adding 1.5 * 2^23 rounds to the nearest integer, which is then also the low bits of the sum. With the
// exponent bias of 127 added, those bits shifted into the exponent field give 2^n. That is 0 for n = -127 and
// infinity for n = 128.
constexpr double kRound = 12582912.0;
constexpr double kRoundBiased = kRound + 127.0;

template <class V>
HWY_INLINE V shift_into_exponent(V rounded) {
  const hn::DFromV<V> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  return hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(bits, rounded)));
}

// ln 2 in two floats, the first of 16 bits, so that n * kLn2High is exact. So x - n ln 2 is right without a
// fused multiply-add too (64 ulp at x = 83 if it is not exact).
constexpr double kLog2E = 1.44269504088896341;
constexpr double kLn2High = 45426.0 / 65536.0;
constexpr double kLn2Low = 1.42860682030941723e-6;

// p 2^n for n in [-254, 254], rounded once where it is denormal. AVX-512 has an instruction for it. Elsewhere
// the factor is two, 2^a 2^b, made of the sum that rounded n, which is n + 254 in its low bits.
template <class V>
HWY_INLINE V scaled(V p, [[maybe_unused]] V n, [[maybe_unused]] V rounded) {
#if HWY_TARGET == HWY_AVX3
  return V{_mm512_scalef_ps(p.raw, n.raw)};
#else
  const hn::DFromV<V> d;
  const hn::RebindToUnsigned<decltype(d)> bits;
  const auto sum = hn::BitCast(bits, rounded);  // a + b + 254
  const auto a = hn::ShiftRight<1>(sum);
  const auto b = hn::Sub(sum, a);
  const V scale_a = hn::BitCast(d, hn::ShiftLeft<23>(a));
  const V scale_b = hn::BitCast(d, hn::ShiftLeft<23>(b));
  return hn::Mul(hn::Mul(p, scale_a), scale_b);
#endif
}

// e^x for -104 <= x <= 89: x = n ln 2 + r, e^r a polynomial, -150 <= n <= 128.
template <class V>
HWY_INLINE V bounded_exp(V x) {
  const V round = constant<V>(kRound + 254.0);
  const V rounded = hn::MulAdd(x, constant<V>(kLog2E), round);
  const V n = hn::Sub(rounded, round);
  V r = hn::NegMulAdd(n, constant<V>(kLn2High), x);
  r = hn::NegMulAdd(n, constant<V>(kLn2Low), r);
  // e^r for |r| <= 0.35, relative error 3.3e-9
  const V p = polynomial(r, 0.00138131441288, 0.00836941878121, 0.0416684567918, 0.16666514792,
                         0.499999930507, 1.0, 1.0);
  return scaled(p, n, rounded);
}

}  // namespace math

// e^x; e^-104 is 0 and e^89 is infinity.
// 0.90 ulp; 25 instructions, on AVX-512 five fewer; 0.90 ns an element.
template <class V>
HWY_INLINE V exp(V x) {
  return math::bounded_exp(math::clamp(x, -104.0, 89.0));
}

// e^x - 1 = 2^n (e^r - 1) + (2^n - 1), computed as halves so that n = 128 does not overflow.
// 1.61 ulp; 24 instructions, 0.89 ns an element.
template <class V>
HWY_INLINE V expm1(V x) {
  const V near = x;
  x = math::clamp(x, -87.0, 89.0);
  const V round = constant<V>(math::kRoundBiased - 1.0);
  const V rounded = hn::MulAdd(x, constant<V>(math::kLog2E), round);
  const V n = hn::Sub(rounded, round);
  V r = hn::NegMulAdd(n, constant<V>(math::kLn2High), x);
  r = hn::NegMulAdd(n, constant<V>(math::kLn2Low), r);
  const V half_scale = math::shift_into_exponent(rounded);
  // e^r - 1 = r + r^2 q(r) for |r| <= 0.35, relative error 1.4e-8
  const V q = math::polynomial(r, 0.00138823958996, 0.00836718085398, 0.0416672212659, 0.166665386826,
                               0.499999980418);
  const V e = hn::MulAdd(q, hn::Mul(r, r), r);
  const V half = hn::MulAdd(e, half_scale, hn::Sub(half_scale, constant<V>(0.5)));
  // Halving would lose the last bit of a denormal and the sign of -0: there e^x - 1 is x.
  return hn::IfThenElse(hn::Lt(hn::Abs(near), constant<V>(0x1p-25)), near, hn::Add(half, half));
}

// log(1 + x) = k ln 2 + log(1 + f), 1 + f = 2^-k (1 + x) in [0.75, 1.5).
// 1.27 ulp; 35 instructions, 1.38 ns an element.
template <class V>
HWY_INLINE V log1p(V x) {
  const hn::DFromV<V> d;
  const hn::RebindToUnsigned<decltype(d)> bits;  // of a NaN wrap around
  const hn::RebindToSigned<decltype(d)> integers;
  const V one = constant<V>(1.0);
  // k shifted into the exponent field
  const auto k = hn::And(hn::Sub(hn::BitCast(bits, hn::Add(x, one)), hn::Set(bits, 0x3F400000u)),
                         hn::Set(bits, 0xFF800000u));
  // 4 * 2^-k is representable for k = 128, 2^-k is not; x is far from denormal where k is not 0
  const V scale = hn::BitCast(d, hn::Sub(hn::Set(bits, 0x40800000u), k));
  const V scaled_x = hn::BitCast(d, hn::Sub(hn::BitCast(bits, x), k));
  const V f = hn::Add(hn::MulSub(scale, constant<V>(0.25), one), scaled_x);
  // log(1 + f) = f + f^2 q(f) for -0.25 <= f <= 0.5, relative error 4.8e-9
  const V q =
      math::polynomial(f, -0.0449163347624, 0.104497838993, -0.131631086687, 0.144821380732, -0.166476954053,
                       0.199905934732, -0.250000560345, 0.333334547139, -0.500000008162);
  const V near = hn::MulAdd(q, hn::Mul(f, f), f);
  const V kf = hn::Mul(hn::ConvertTo(d, hn::BitCast(integers, k)), constant<V>(0x1p-23));
  const V y = hn::MulAdd(kf, constant<V>(0.69314718055994531), near);
  const V inf = hn::Inf(d);
  const V edge = hn::IfThenElse(hn::Eq(x, hn::Neg(one)), hn::Neg(inf), hn::NaN(d));
  return hn::IfThenElse(hn::Gt(x, hn::Neg(one)), hn::IfThenElse(hn::Lt(x, inf), y, x), edge);
}

// e^x where log1p takes it.
template <class V>
struct Exponential {
  V x;
};

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x| in [0, 1]: no exponent to split.
// 1.87 ulp; 0.6 ns an element on a Xeon with AVX-512, log1p(exp(x)) 1.14.
template <class V>
HWY_INLINE V log1p(Exponential<V> e) {
  const V u = math::bounded_exp(maximum(hn::Neg(hn::Abs(e.x)), constant<V>(-104.0)));
  // log(1 + u) = u + u^2 q(u) for 0 <= u <= 1, relative error 5.2e-9; each coefficient was rounded to a float
  // before the next was fitted
  const V q =
      math::polynomial(u, -0.0032910797745, 0.0200884696096, -0.0574604868889, 0.106613710523,
                       -0.153449773788, 0.196921214461, -0.249580204487, 0.333304643631, -0.499999314547);
  const V rest = hn::MulAdd(q, hn::Mul(u, u), u);
  return hn::Add(maximum(e.x, constant<V>(0.0)), rest);
}

namespace math {

// 1 / (1 + 2^(x scale)) for -127.5 < x scale < 127.5. With x scale = n + r and c = r coth(r ln 2 / 2), 2^r is
// (c + r) / (c - r): its quotient joins the one division, 17 instructions where a polynomial of degree 5 for
// 2^r takes 20, 1.1 times as long, and has a relative error of 7.5e-8 instead of 2e-9; and (c - r) /
// (something + (c - r)) cannot exceed 1. A division: the reciprocal estimate with two Newton steps is 1.25
// times slower.
template <class V>
HWY_INLINE V logistic(V x, double scale) {
  const V round = constant<V>(kRoundBiased);
  const V rounded = hn::MulAdd(x, constant<V>(scale), round);
  const V r = hn::MulAdd(x, constant<V>(scale), hn::Sub(round, rounded));
  const V power = shift_into_exponent(rounded);
  // c for |r| <= 0.5, relative error 1.8e-9
  const V c = polynomial(hn::Mul(r, r), -0.000921109904002, 0.11552415926, 2.88539008692);
  const V below = hn::Sub(c, r);
  return hn::Div(below, hn::MulAdd(power, hn::Add(c, r), below));
}

}  // namespace math

// A value that is divided where it is used: a factor joins the numerator, and x sigmoid(x) has one value less
// to keep until the end (6% less time with six vectors in flight).
template <class V>
struct Quotient {
  V numerator;
  V denominator;
  HWY_INLINE operator V() const { return hn::Div(numerator, denominator); }
};
template <class V>
HWY_INLINE V operator*(V x, Quotient<V> q) {
  return hn::Div(hn::Mul(x, q.numerator), q.denominator);
}

namespace narrow {

inline constexpr Repeated kSlope(-0.5f);
inline constexpr Repeated kBelow(0.721352031f);

// 1 / (1 + e^-x) for |x| <= 88. As logistic, with half of its argument, rounded to a multiple of 1/2, and a
// quarter of its c: for r half of what it is there, (c + r) / 4 is (c - r) / 4 with this r added. A numerator
// below 1 cannot overflow a product. c of degree one in r^2 leaves a relative error of 4.3e-7 in the
// exponential, a quarter of that here. What limits Neoverse-V1 is how many registers are read that were
// written long ago, constants above all: four a cycle. Of the forms tried this one reads the fewest.
template <class V>
HWY_INLINE Quotient<V> sigmoid(V x) {
  const V round = constant<V>(0.5 * math::kRoundBiased);
  const V scale = constant<V>(-0.5 * math::kLog2E);
  const V rounded = hn::MulAdd(x, scale, round);
  const V r = hn::MulAdd(x, scale, hn::Sub(round, rounded));
  const V power = math::shift_into_exponent(rounded);
  const V slope = hn::MulAdd(r, constant<V>(0.115236065), addend(kSlope.values, r));
  const V below = hn::MulAdd(slope, r, addend(kBelow.values, slope));
  return {below, hn::MulAdd(power, hn::Add(below, r), below)};
}

}  // namespace narrow

// 1 / (1 + e^-x) near 0, as 1/2 + x slope(x^2): x sigmoid(x) is x / 2 + x^2 slope. The product with x is
// rounded once, and 0 where x is.
template <class V>
struct Centred {
  V x;
  V slope;
  HWY_INLINE operator V() const { return hn::MulAdd(x, slope, constant<V>(0.5)); }
};
template <class V>
HWY_INLINE V operator*(V y, Centred<V> s) {
  return hn::MulAdd(hn::Mul(y, s.x), s.slope, hn::Mul(y, constant<V>(0.5)));
}

// The slopes of a few vectors of u = x^2, all of them a step of the polynomial further at a time. The
// constant coefficient comes first; each was rounded to a float before the next was fitted.
template <class V, int kVectors, int kCount>
HWY_INLINE void centred_slopes(const V (&u)[kVectors], V (&slope)[kVectors],
                               const Repeated (&coefficients)[kCount]) {
  const V highest = constant<V>(coefficients[kCount - 1].values[0]);
  ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
    slope[v] = hn::MulAdd(u[v], highest, addend(coefficients[kCount - 2].values, u[v]));
  }
  ONEPASS_UNROLL for (int i = kCount - 3; i >= 0; --i) {
    ONEPASS_UNROLL for (int v = 0; v < kVectors; ++v) {
      slope[v] = hn::MulAdd(slope[v], u[v], addend(coefficients[i].values, slope[v]));
    }
  }
}

template <class V, int kCount>
HWY_INLINE Centred<V> centred_sigmoid(V x, const Repeated (&coefficients)[kCount]) {
  const V u[1] = {hn::Mul(x, x)};
  V slope[1];
  centred_slopes(u, slope, coefficients);
  return {x, slope[0]};
}

namespace tiny {

inline constexpr float kLimit = 1;
inline constexpr Repeated kSlope[] = {Repeated(0.249999419f), Repeated(-0.0208254084f),
                                      Repeated(0.00205392716f), Repeated(-0.000169422827f)};

// For |x| <= kLimit: absolute error and that of x sigmoid(x) 1.1e-7; x sigmoid(x) in 6 instructions.
template <class V>
HWY_INLINE Centred<V> sigmoid(V x) {
  return centred_sigmoid(x, kSlope);
}

}  // namespace tiny

namespace small {

inline constexpr float kLimit = 2;
inline constexpr Repeated kSlope[] = {Repeated(0.24999921f),     Repeated(-0.0208274908f),
                                      Repeated(0.00207084999f),  Repeated(-0.000199106027f),
                                      Repeated(1.57349659e-05f), Repeated(-6.93097718e-07f)};

// For |x| <= kLimit: absolute error and that of x sigmoid(x), relative to max(1, |x|), 1.8e-7; x sigmoid(x)
// in 8 instructions. |x| <= 4 would ask for a degree of ten, which takes as long as exponential and division.
template <class V>
HWY_INLINE Centred<V> sigmoid(V x) {
  return centred_sigmoid(x, kSlope);
}

}  // namespace small

namespace deferred {

// For every x: n = -127 and 2^n = 0 above 87.7, n = 128 and the denominator is infinite below -88.4.
template <class V>
HWY_INLINE Quotient<V> sigmoid(V x) {
  return narrow::sigmoid(math::clamp(x, -89.0, 88.0));
}

}  // namespace deferred

// 1 / (1 + e^-x). Absolute error and that of x sigmoid(x), relative to max(1, |x|), 1.9e-7; 15
// instructions, x sigmoid(x) in 0.57 ns an element, without the clamps in 0.50.
template <class V>
HWY_INLINE V sigmoid(V x) {
  return deferred::sigmoid(x);
}

// tanh x: an odd polynomial up to 0.55, beyond it 1 - 2 / (1 + e^(2|x|)).
// 1.77 ulp; 33 instructions, 1.20 ns an element.
template <class V>
HWY_INLINE V tanh(V x) {
  const V magnitude = hn::Abs(x);
  const V u = hn::Mul(x, x);
  // tanh(x) = x + x^3 q(x^2) for |x| <= 0.55, relative error 3.7e-8
  const V q = math::polynomial(u, 0.0164375806796, -0.052671813289, 0.133207250525, -0.333329466364);
  const V near = hn::MulAdd(hn::Mul(x, u), q, x);
  // 1 - tanh(9.1) is 2.5e-8, which rounds away
  const V rest = math::logistic(hn::Min(magnitude, constant<V>(9.1)), 2.0 * math::kLog2E);
  const V far = hn::CopySign(hn::NegMulAdd(constant<V>(2.0), rest, constant<V>(1.0)), x);
  return hn::IfThenElse(hn::Gt(magnitude, constant<V>(0.55)), far, near);
}

// erf x: an odd polynomial up to 1.15, beyond it 1 - p(|x|)^8. The power keeps p flat, so that degree 6 is
// enough up to 4, and its three squarings cost one instruction each; it multiplies the rounding of p, which
// would count too much below 1.15 (2.2 ulp with the limit at 1).
// 1.71 ulp, and gelu(x) within 1.2e-7 of max(1, |x|); 38 instructions, 1.17 ns an element.
template <class V>
HWY_INLINE V erf(V x) {
  const V magnitude = hn::Abs(x);
  // erf(x) / x - 1 for |x| <= 1.15, relative error of erf(x) 7.8e-9
  const V q = math::polynomial(hn::Mul(x, x), 6.85635605e-05, -0.000768884493, 0.00514947344, -0.0268321596,
                               0.1128304, -0.376125753, 0.128379151);
  const V near = hn::MulAdd(x, q, x);
  // (1 - erf(x))^(1/8) for 1.15 <= x <= 3.94, error of p^8 5.6e-9; p(4)^8 is 1.5e-8, so that erf(4) is 1.
  // Each coefficient was rounded to a float before the next was fitted: rounding the real ones costs 0.5 ulp.
  V p = math::polynomial(hn::Min(magnitude, constant<V>(4.0)), 0.000164788595, -0.00263195508, 0.0136443377,
                         -0.0130357826, -0.0593061298, -0.146475434, 1.00122094);
  p = hn::Mul(p, p);
  p = hn::Mul(p, p);
  const V far = hn::CopySign(hn::NegMulAdd(p, p, constant<V>(1.0)), x);
  return hn::IfThenElse(hn::Gt(magnitude, constant<V>(1.15)), far, near);
}

inline constexpr Repeated kRampStart(0.5f);
// x / 6 + 1 / 2 between 0 and 1; hardswish, its one user, multiplies it by x, so that NaN comes out there.
template <class V>
HWY_INLINE V ramp(V x) {
  const V line = hn::MulAdd(x, constant<V>(1.0 / 6.0), addend(kRampStart.values, x));
  return hn::Min(hn::Max(line, constant<V>(0.0)), constant<V>(1.0));
}

namespace raised {

// The same for x that is not near or below -3.
template <class V>
HWY_INLINE V ramp(V x) {
  const V line = hn::MulAdd(x, constant<V>(1.0 / 6.0), addend(kRampStart.values, x));
  return hn::Min(line, constant<V>(1.0));
}

}  // namespace raised

// The normal distribution function, (1 + erf(x / sqrt(2))) / 2.
template <class V>
HWY_INLINE V normal_cdf(V x) {
  return hn::MulAdd(constant<V>(0.5), erf(hn::Mul(x, constant<V>(0.70710678118654752440))), constant<V>(0.5));
}

// Its derivative, e^(-x^2 / 2) / sqrt(2 pi).
template <class V>
HWY_INLINE V normal_density(V x) {
  return hn::Mul(constant<V>(0.39894228040143267794), exp(hn::Mul(hn::Mul(x, x), constant<V>(-0.5))));
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass
HWY_AFTER_NAMESPACE();

#endif  // ONEPASS_CPU_MATH_INL_H_
