// The chains of a kernel on the values of a lane, and the ways to compute a tile: small sums need fewer
// instructions for a swish.
#pragma once

#include "thin/mma.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class P>
template <class Chain>
struct ThinMma<C, Tail, Numbers, P>::Operands {
  ChannelValues<Chain, 1> row[halves];
  // Of a lane's channels from 16 m on.
  __device__ __forceinline__ void load(const Parameters& p, int64 n, int m, int quad) {
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const int channel = m * 16 + row_channel(half, quad);
      row[half].load(p, n, channel < channels ? channel : 0);
    }
  }
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Chains {
  // --- Chains ---

  template <class Chain>
  static __device__ __forceinline__ float apply(float x, const ChannelValues<Chain, 1>& own) {
    const typename Chain::template Tensors<1> none;
    return Chain::value(x, own.value[0], none, 0);
  }

  // Two values of a channel through the before-chain. A special function takes as long as eight other
  // instructions. In the narrow way a swish, h + h tanh(h) with h = x / 2, has one of them or none.
  // f32: h tanh(h) is h^2 times a polynomial of h^2. Small sums need fewer terms, and classes with fewer taps
  // have smaller sums. Classes with at most half of the most taps have three terms, up to |x| = 0.6. Those
  // with at most a quarter (an eighth where operands are split) have two, up to 0.3 (0.2). Others have four,
  // up to 1. Errors are at most 1e-7, and 3e-7 of the swish; 7e-7 with two terms up to 0.3.
  // 16 bits: tanh.approx is off by 2^-11 of its value, so that a swish is off by at most x^2 2^-13. Rounding
  // to the output's type takes more where |x| is at most 1 (f16) or 2.5 (bf16). Classes with few taps have
  // one term: with at most a quarter of the most taps in bf16, up to 0.3 and off by 3.2e-4 of the swish (a
  // sixth of what rounding takes); with at most an eighth in f16, up to 0.2 and off by 9.3e-5 (two fifths).
  // Strict numerics use the forms of f32.
  static constexpr bool narrows = Numbers::begins_with_swish;
  static constexpr bool takes_tanh = Output::bytes == 2 && !Numbers::strict;
  static constexpr int most_terms = 4;
  static constexpr __device__ int swish_terms(int rz, int ry, int rx) {
    const int taps = Terms::taps(rz, ry, rx);
    if (taps == 0 || taps * 2 > Terms::most_taps()) return 4;
    if (takes_tanh) return taps * (is_same<Output, bf16> ? 4 : 8) <= Terms::most_taps() ? 1 : 4;
    return taps * (splits ? 8 : 4) > Terms::most_taps() ? 3 : 2;
  }
  static constexpr __device__ bool has_swish_terms(int terms) {
    bool found = terms == most_terms;
    for (int i = 0; i < classes_z * classes_y * classes_x; ++i)
      found |= swish_terms(i / (classes_y * classes_x), i / classes_x % classes_y, i % classes_x) == terms;
    return found;
  }
  // The largest |x| for so many terms.
  static constexpr __device__ float most_narrow(int terms) {
    if (terms == 4) return takes_tanh && is_same<Output, bf16> ? 2.5f : 1.0f;
    if (terms == 1) return is_same<Output, bf16> ? 0.3f : 0.2f;
    return terms == 3 ? 0.6f : splits && terms == 2 ? 0.2f : 0.3f;
  }
  static constexpr float most_wide = Numbers::pairs ? 1e5f : 1e30f;

  static constexpr float one_term = is_same<Output, bf16> ? 0.9943f : 0.9975f;
  template <int terms>
  static __device__ __forceinline__ float narrow_swish(float h) {
    if constexpr (terms == 1) {
      return fmaf(h * one_term, h, h);
    } else if constexpr (takes_tanh) {
      float tanh_h;
      asm("tanh.approx.f32 %0, %1;" : "=f"(tanh_h) : "f"(h));
      return fmaf(h, tanh_h, h);
    } else {
      constexpr float factors[3][4] = {
          {splits ? 0.99999577f : 0.9999784f, splits ? -0.33166003f : -0.32957235f},
          {0.9999955f, -0.3329557f, 0.12506282f},
          {0.9999971f, -0.33318973f, 0.13132429f, -0.04309195f}};
      const float square = h * h;
      float sum = factors[terms - 2][terms - 1];
#pragma unroll
      for (int i = terms - 2; i >= 0; --i) sum = fmaf(sum, square, factors[terms - 2][i]);
      return fmaf(sum, square, h);
    }
  }

  // Forces the value to be computed here. Otherwise the compiler moves the computation behind a rarely
  // skipped branch.
  static __device__ __forceinline__ void compute_here(float& x) { asm volatile("" : "+f"(x)); }

  static __device__ __forceinline__ float wide_sigmoid(float x) {
    constexpr float factor = -log2_e / scale;
    return pointwise::reciprocal_fast(fmaf(pointwise::exp2_fast(x * factor), scale, scale));
  }
  template <Way way, int terms>
  static __device__ __forceinline__ void before(float& a, float& b, const ChannelValues<Before, 1>& own) {
    if constexpr (!Numbers::pairs) {
      a = apply<Before>(a, own);
      b = apply<Before>(b, own);
    } else {
      using Rest = typename Numbers::Rest;
      if constexpr (way == narrow) {
        a = narrow_swish<terms>(a);
        b = narrow_swish<terms>(b);
      } else {
        const float of_a = wide_sigmoid(a), of_b = wide_sigmoid(b);
        a = Numbers::begins_with_swish ? a * of_a : of_a;
        b = Numbers::begins_with_swish ? b * of_b : of_b;
      }
      const typename Rest::template Tensors<1> none;
      a = Rest::value(a, own.value[0], none, 0);
      b = Rest::value(b, own.value[0], none, 0);
    }
  }
  // Distances of the two values from the pivot. For a swish alone they are one instruction everywhere: equal
  // values have equal distances, though not always 0.
  template <Way way, int terms>
  static __device__ __forceinline__ void before(float& a, float& b, const ChannelValues<Before, 1>& own,
                                                float pivot) {
    if constexpr (Numbers::pairs && Numbers::swish_alone && way != narrow) {
      const float of_a = wide_sigmoid(a), of_b = wide_sigmoid(b);
      a = fmaf(a, of_a, -pivot);
      b = fmaf(b, of_b, -pivot);
    } else if constexpr (Numbers::pairs && Numbers::swish_alone && terms == 1) {
      a = fmaf(a, fmaf(a, one_term, 1.0f), -pivot);
      b = fmaf(b, fmaf(b, one_term, 1.0f), -pivot);
    } else {
      before<way, terms>(a, b, own);
      a = distance_from(a, pivot);
      b = distance_from(b, pivot);
    }
  }
};

}  // namespace onepass
