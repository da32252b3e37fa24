// The pointwise stages on a GPU: the formulas of pointwise.def over the functions below, in f32.
//
// Errors, absolute, of values up to a few units: sigmoid 2e-7, normal_cdf 2e-7; the others are within some
// ulp. sigmoid is 4 instructions and normal_cdf 15, where CUDA's expf and division, or erff, take 20
// to 30. Where results are rounded to 16 bits (`Bits`, else 32), sigmoid is 3 instructions and 4e-6,
// normal_cdf 8 and 6e-6, one of each a special function (H200; PTX promises 2^-12 of it); so too where f32 is
// rounded to less on its way (gemm_pingpong.cuh in tf32).
#pragma once

#include "device/types.cuh"

namespace onepass::pointwise {

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ float log1p(float x) { return ::log1pf(x); }

// In 16 bits 2^y - 1, and a series near zero, where that loses bits: 10 instructions for 20, within 4e-7.
template <int Bits>
__device__ __forceinline__ float expm1(float x) {
  if constexpr (Bits != 16) return ::expm1f(x);
  float p = fmaf(x, 1.0f / 720.0f, 1.0f / 120.0f);
  p = fmaf(p, x, 1.0f / 24.0f);
  p = fmaf(p, x, 1.0f / 6.0f);
  p = fmaf(p, x, 0.5f);
  const float far = exp2_fast(x * 1.4426950408889634f) - 1.0f;
  return fabsf(x) < 0.35f ? fmaf(x * x, p, x) : far;
}

// In 16 bits 1 - 2 / (1 + e^2|x|), and a series near zero: 14 instructions and no branch, within 3e-7.
template <int Bits>
__device__ __forceinline__ float tanh(float x) {
  if constexpr (Bits != 16) return ::tanhf(x);
  const float u = x * x;
  float p = fmaf(u, 62.0f / 2835.0f, -17.0f / 315.0f);
  p = fmaf(p, u, 2.0f / 15.0f);
  p = fmaf(p, u, -1.0f / 3.0f);
  const float e = exp2_fast(fabsf(x) * 2.8853900817779268f);
  const float far = copysignf(fmaf(-2.0f, reciprocal_fast(1.0f + e), 1.0f), x);
  return fabsf(x) < 0.35f ? fmaf(u * x, p, x) : far;
}

__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int Bits>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (Bits == 16) return fmaf(0.5f, tanh_fast(0.5f * x), 0.5f);
  return reciprocal_fast(1.0f + exp2_fast(x * -1.4426950408889634f));
}

// NaN in the first operand comes out.
__device__ __forceinline__ float maximum(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float minimum(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float where_positive(float t, float yes, float no) { return t > 0.0f ? yes : no; }
__device__ __forceinline__ float where_at_most(float t, float limit, float yes, float no) {
  return t <= limit ? yes : no;
}
__device__ __forceinline__ float where_below(float t, float limit, float yes, float no) {
  return t < limit ? yes : no;
}

// The normal distribution function. In 16 bits (1 + tanh(x p(x^2))) / 2, p fitted with the weight of the
// result: 1.5e-6. x p(x^2) grows with x, to infinity. Else 2^q(|x|) below zero and 1 - 2^q(|x|) above, q
// fitted to log2(erfc(t / sqrt(2)) / 2) with the weight of its value: 5e-8. Its leading coefficient is
// negative. So both have tails that end in 0, and gelu(-inf) = -inf * 0 in NaN.
template <int Bits>
__device__ __forceinline__ float normal_cdf(float x) {
  if constexpr (Bits == 16) {
    const float u = x * x;
    float p = 1.4185306e-06f;
    p = fmaf(p, u, -3.6600019e-05f);
    p = fmaf(p, u, -8.8219580e-05f);
    p = fmaf(p, u, 3.6392809e-02f);
    p = fmaf(p, u, 7.9786956e-01f);
    return fmaf(0.5f, tanh_fast(x * p), 0.5f);
  }
  const float t = fabsf(x);
  float q = -1.1736173064491595e-06f;
  q = fmaf(q, t, 2.1615800505969673e-05f);
  q = fmaf(q, t, -1.1198675929335877e-04f);
  q = fmaf(q, t, -2.9152806382626295e-04f);
  q = fmaf(q, t, 7.2333719581365585e-03f);
  q = fmaf(q, t, -5.2591834217309950e-02f);
  q = fmaf(q, t, -4.5918384194374084e-01f);
  q = fmaf(q, t, -1.1511071920394897f);
  const float below = exp2_fast(fmaf(q, t, -1.0f));
  return x > 0.0f ? 1.0f - below : below;
}

// Its derivative, e^(-x^2 / 2) / sqrt(2 pi), as a power of two: within 1e-7.
__device__ __forceinline__ float normal_density(float x) {
  return exp2_fast(fmaf(x * x, -0.72134752044448170f, -1.3257480647361594f));
}

__device__ __forceinline__ float ramp(float x) { return __saturatef(fmaf(x, 1.0f / 6.0f, 0.5f)); }

#define K(number) static_cast<float>(number)
#define sigmoid(x) sigmoid<Bits>(x)
#define normal_cdf(x) normal_cdf<Bits>(x)
#define expm1(x) expm1<Bits>(x)
#define tanh(x) tanh<Bits>(x)
#define ONEPASS_POINTWISE(NAME, CONSTANTS, A, B, ARGUMENT, VALUE, GRADIENT, ARGUMENT_GRADIENT)               \
  template <int Bits>                                                                                        \
  struct NAME##_stage {                                                                                      \
    static __device__ __forceinline__ float value(float x, float p, float a, float b) { return VALUE; }      \
    template <class X>                                                                                       \
    static __device__ __forceinline__ float gradient(X x, float p, float a, float b, float g) {              \
      return GRADIENT;                                                                                       \
    }                                                                                                        \
    static __device__ __forceinline__ float argument_gradient(float x, float p, float a, float b, float g) { \
      return ARGUMENT_GRADIENT;                                                                              \
    }                                                                                                        \
  };
#include "pointwise.def"
#undef ONEPASS_POINTWISE
#undef tanh
#undef expm1
#undef normal_cdf
#undef sigmoid
#undef K

// a / b within an ulp, of b between 1 and 1e30: 4 instructions, where a division is 8 and a branch.
__device__ __forceinline__ float quotient(float a, float b) {
  const float r = reciprocal_fast(b);
  const float q = a * r;
  return fmaf(fmaf(-q, b, a), r, q);
}

// The formulas of the table with such quotients: three divisions and their branches were most of a gradient.
struct ShortMish {
  static __device__ __forceinline__ float value(float x, float, float, float) {
    const float e = exp(minimum(x, 20.0f));
    const float n = e * (e + 2.0f);
    return where_positive(x - 20.0f, x, x * quotient(n, n + 2.0f));
  }
  static __device__ __forceinline__ float gradient(float x, float, float, float, float g) {
    const float e = exp(minimum(x, 20.0f));
    const float n = e * (e + 2.0f);
    const float r = quotient(2.0f, n + 2.0f);
    const float inner = fmaf(x * quotient(e, e + 1.0f), 2.0f - r, 0.5f * n) * r;
    return g * where_positive(x - 20.0f, 1.0f + x * 0.0f, inner);
  }
  static __device__ __forceinline__ float argument_gradient(float, float, float, float, float) {
    return 0.0f;
  }
};
// Values that are rounded to 16 bits: the plain quotient and power, 11 instructions for 19.
template <>
struct mish_stage<16> : ShortMish {
  static __device__ __forceinline__ float value(float x, float, float, float) {
    const float e = exp2_fast(minimum(x, 20.0f) * 1.4426950408889634f);
    const float n = e * (e + 2.0f);
    return where_positive(x - 20.0f, x, x * (n * reciprocal_fast(n + 2.0f)));
  }
};
template <>
struct mish_stage<32> : ShortMish {};

// softplus(x) = max(x, 0) + log1p(e), e = e^-|x|, with log1p(e) = 2 atanh(t) of t = e / (2 + e), at most 1/3:
// its series ends 1e-8 before the sum. Beyond 20 the second part rounds away.
template <int Bits>
struct ShortSoftplus {
  static __device__ __forceinline__ float value(float x, float, float, float) {
    const float e = exp(-fabsf(x));
    const float t = quotient(e, 2.0f + e);
    const float u = t * t;
    float p = fmaf(u, 1.0f / 13.0f, 1.0f / 11.0f);
    p = fmaf(p, u, 1.0f / 9.0f);
    p = fmaf(p, u, 1.0f / 7.0f);
    p = fmaf(p, u, 1.0f / 5.0f);
    p = fmaf(p, u, 1.0f / 3.0f);
    return maximum(x, 0.0f) + fmaf(2.0f * t * u, p, 2.0f * t);
  }
  static __device__ __forceinline__ float gradient(float x, float, float, float, float g) {
    return where_positive(x - 20.0f, g, g * sigmoid<Bits>(x));
  }
  static __device__ __forceinline__ float argument_gradient(float, float, float, float, float) {
    return 0.0f;
  }
};
// Values that are rounded to 16 bits: log1p(e) by the logarithm of 1 + e, or by a series where that has lost
// e's bits: 13 instructions for 24, within 5e-6 of the result.
template <>
struct softplus_stage<16> : ShortSoftplus<16> {
  static __device__ __forceinline__ float value(float x, float, float, float) {
    const float e = exp2_fast(fabsf(x) * -1.4426950408889634f);
    float p = fmaf(e, -0.25f, 1.0f / 3.0f);
    p = fmaf(p, e, -0.5f);
    const float far = fmaf(e * e, p, e);
    return maximum(x, 0.0f) + (e < 0.0625f ? far : 0.69314718055994531f * log2_fast(1.0f + e));
  }
};
template <>
struct softplus_stage<32> : ShortSoftplus<32> {};

// A stage's input x, given as t = scale x + shift with a scale above 0: what gradients may do with it. All
// but the comparisons is done at compile time.
struct Along {
  float t;
  float scale;
  float shift;

  struct Multiple {
    float t;
    float scale;
    float shift;
    float factor;
    __device__ __forceinline__ float operator+(float addend) const {
      const bool is_given = factor == scale && addend == shift;
      return is_given ? t : fmaf(t - shift, factor / scale, addend);
    }
  };
  __device__ __forceinline__ Multiple operator*(float factor) const { return {t, scale, shift, factor}; }

  __device__ __forceinline__ float at(float limit) const { return limit * scale + shift; }
  friend __device__ __forceinline__ float where_at_most(Along x, float limit, float yes, float no) {
    return pointwise::where_at_most(x.t, x.at(limit), yes, no);
  }
  friend __device__ __forceinline__ float where_below(Along x, float limit, float yes, float no) {
    return pointwise::where_below(x.t, x.at(limit), yes, no);
  }
};

// A gradient in fewer instructions where the stage's input x is itself an affine function: given that line of
// x which the gradient has, t = scale x + shift.
template <class Stage>
struct Folded {
  static constexpr bool exists = false;
};
template <int Bits>
struct Folded<hardswish_stage<Bits>> {
  static constexpr bool exists = true;
  static constexpr float scale = 1.0f / 3.0f;
  static constexpr float shift = 0.5f;
  static __device__ __forceinline__ float gradient(float t, float g) {
    return hardswish_stage<Bits>::gradient(Along{t, scale, shift}, 0.0f, 0.0f, 0.0f, g);
  }
};

}  // namespace onepass::pointwise
