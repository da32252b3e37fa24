// Weights as the products read them, and how large x may be for each way to compute a tile.
#pragma once

#include "thin/mma/chains.cuh"

namespace onepass {

// The weights of 16 channels.
template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Fragments {
  uint32 a[in_registers ? products : 1][4];
  const uint32 (*shared)[32][4];  // of these channels
  const float* window;            // of the tile
  float bias[4];                  // as sums lie: two cells of a channel, two of that 8 further
};

// The weights of one class of z in registers during a pass, where they fit.
template <class C, class Tail, class Numbers, class P>
template <int rz>
struct ThinMma<C, Tail, Numbers, P>::Held {
  static constexpr int most = 10;
  static constexpr int first = Terms::products_before(rz, 0, 0);
  static constexpr int count = Terms::products_before(rz + 1, 0, 0) - first;
  static constexpr bool fits = !in_registers && spans_y == 1 && count > 0 && count*(splits ? 2 : 1) <= most;
  uint32 a[fits ? count : 1][4];
  uint32 rest[fits && splits ? count : 1][4];
};
struct NotHeld {
  static constexpr bool fits = false;
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Limits {
  float narrow, wide;  // NaN where there is none
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Weights {
  const Warp warp;

  // An operand as the tensor core reads it, and its low part where it is split.
  static __device__ __forceinline__ uint32 operand(float x) {
    return __float_as_uint(C::rounds_to_tf32 || splits ? round_operand<C>(x) : x);
  }
  static __device__ __forceinline__ uint32 rest(float x) {
    return __float_as_uint(x - round_to_tf32(x));  // 12 bits, of which the product takes 11
  }

  // body(product, first of two of its four registers, tap, input channel of the lane) for all terms. The
  // channel is C::in_channels where the lane has no term.
  template <class Body>
  __device__ __forceinline__ void for_each_term(Body&& body) const {
    for_each_class([&](auto rz_, auto ry_, auto rx_) {
      constexpr int rz = decltype(rz_)::value;
      constexpr int ry = decltype(ry_)::value;
      constexpr int rx = decltype(rx_)::value;
      constexpr int first = Terms::products_before(rz, ry, rx);
      for_constant<Terms::groups(rz, ry, rx)>([&](auto i_) {
        constexpr int i = decltype(i_)::value;
        int tap = 0, input = 0;
        for_constant<4>([&](auto lane_) {
          constexpr Term t = Terms::term(rz, ry, rx, i, decltype(lane_)::value);
          if (warp.in_quad == lane_)
            tap = t.tap, input = t.exists ? t.channel : static_cast<int>(C::in_channels);
        });
        body(Constant<first + i / 2>{}, Constant<i % 2 * 2>{}, tap, input);
      });
    });
  }

  // Loads the weights of the block's channels from 16 m on.
  __device__ __forceinline__ void load_weights(Fragments& w, int m) const {
    w.shared = warp.shared.weights + m * products;
    if constexpr (in_registers && !shares_weights) {
      for_each_term([&](auto product, auto place, int tap, int input) {
        for_constant<2>([&](auto half) {
          w.a[product][place + half] =
              operand(scale * weight(warp.p, warp.first_channel + row_channel(half, warp.quad), input, tap));
        });
      });
    } else if constexpr (in_registers) {
#pragma unroll
      for (int i = 0; i < products; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(w.shared[i][warp.lane]);
        w.a[i][0] = v.x, w.a[i][1] = v.y, w.a[i][2] = v.z, w.a[i][3] = v.w;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = warp.first_channel + m * 16 + row_channel(half, warp.quad);
      const float value = channel < channels ? scale * bias(warp.p, channel) : 0.0f;
      // The first product reads four consecutive registers. Of two equal registers the compiler would keep
      // one and copy it for each product, one instruction an output. It does not know that the neighbouring
      // lane's value is equal.
      w.bias[half * 2] = value;
      w.bias[half * 2 + 1] = __shfl_xor_sync(0xffffffffu, value, 1);
    }
  }

  __device__ __forceinline__ void share_weights() const {
    if constexpr (shared_weights > 0) {
      int turn = threadIdx.x / 32;
      for_each_term([&](auto product, auto place, int tap, int input) {
        if (turn-- == 0) {
          turn = warps - 1;
#pragma unroll 1
          for (int half = 0; half < 2 * row_tiles; ++half) {
            const int channel = warp.first_channel + half / 2 * 16 + row_channel(half % 2, warp.quad);
            const float value = scale * weight(warp.p, channel, input, tap);
            const int to = half / 2 * products + product;
            if constexpr (shares_weights)
              warp.shared.weights[to][warp.lane][place + half % 2] = operand(value);
            if constexpr (splits)
              warp.shared.weights[first_rest + to][warp.lane][place + half % 2] = rest(value);
          }
        }
      });
    }
  }

  // The same with loads of several halves of products in flight: a block begins 2 us earlier with 25
  // products. (With it the recomputing kernel of s60 in strict f32 spills 126 bytes and is 2% slower.)
  __device__ __forceinline__ void share_weights_at_once() const {
    if constexpr (shared_weights > 0) {
      constexpr int at_once = 4;
      constexpr int own = (2 * products + warps - 1) / warps;
      const int own_warp = threadIdx.x / 32;
      for_constant<(own + at_once - 1) / at_once>([&](auto part_) {
        constexpr int first = decltype(part_)::value * at_once;
        int taps[at_once] = {}, inputs[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) inputs[i] = static_cast<int>(C::in_channels);
        for_each_term([&](auto product, auto place, int tap, int input) {
          constexpr int index = 2 * decltype(product)::value + decltype(place)::value / 2;
          constexpr int i = index / warps - first;
          if constexpr (i >= 0 && i < at_once) {
            if (index % warps == own_warp) taps[i] = tap, inputs[i] = input;
          }
        });
#pragma unroll 1
        for (int half = 0; half < 2 * row_tiles; ++half) {
          const int channel = warp.first_channel + half / 2 * 16 + row_channel(half % 2, warp.quad);
          float values[at_once];
#pragma unroll
          for (int i = 0; i < at_once; ++i) values[i] = scale * weight(warp.p, channel, inputs[i], taps[i]);
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            const int index = (first + i) * warps + own_warp;
            if (index >= 2 * products) continue;
            const int to = half / 2 * products + index / 2, place = index % 2 * 2 + half % 2;
            if constexpr (shares_weights) warp.shared.weights[to][warp.lane][place] = operand(values[i]);
            if constexpr (splits) warp.shared.weights[first_rest + to][warp.lane][place] = rest(values[i]);
          }
        }
      });
    }
  }

  template <bool of_rest>
  __device__ __forceinline__ void take_weights(uint32 (&a)[4], const Fragments& w, int index) const {
    if constexpr (in_registers && !of_rest) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = w.a[index][i];
    } else {
      const uint4 v =
          *reinterpret_cast<const uint4*>(w.shared[(of_rest ? first_rest : 0) + index][warp.lane]);
      a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
  }

  template <int rz>
  __device__ __forceinline__ Held<rz> hold_weights(const Fragments& w) const {
    Held<rz> held;
    if constexpr (Held<rz>::fits) {
#pragma unroll
      for (int i = 0; i < Held<rz>::count; ++i) {
        take_weights<false>(held.a[i], w, Held<rz>::first + i);
        if constexpr (splits) take_weights<true>(held.rest[i], w, Held<rz>::first + i);
      }
    }
    return held;
  }
  // Weights of a product, from held registers or from shared memory.
  template <bool of_rest, class HeldWeights>
  __device__ __forceinline__ void take_weights(uint32 (&a)[4], const Fragments& w, const HeldWeights& held,
                                               int index) const {
    if constexpr (HeldWeights::fits) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        a[k] = of_rest ? held.rest[index - HeldWeights::first][k] : held.a[index - HeldWeights::first][k];
    } else {
      take_weights<of_rest>(a, w, index);
    }
  }

  // Limits of |x| for the narrow and the wide way. Leaves the weights of the last channels in `w`.
  __device__ __forceinline__ Limits input_limits(Fragments& w) const {
    float largest[Chains::most_terms + 1] =
        {};                     // sum of a class's |w|, of those with so many terms of a swish
    float largest_bias = 0.0f;  // NaN stays
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      load_weights(w, m);
      for_each_class([&](auto rz, auto ry, auto rx) {
        constexpr int groups = Terms::groups(rz, ry, rx);
        constexpr int first = Terms::products_before(rz, ry, rx);
        float sum[2] = {};
        for_constant<(groups + 1) / 2>([&](auto i) {
          uint32 a[4];
          take_weights<false>(a, w, first + i);
#pragma unroll
          for (int k = 0; k < (i * 2 + 1 < groups ? 4 : 2); ++k) sum[k % 2] += fabsf(__uint_as_float(a[k]));
        });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& of_terms = largest[Chains::swish_terms(rz, ry, rx)];
          of_terms = pointwise::maximum(lanes_sum<4>(sum[half]), of_terms);
        }
      });
#pragma unroll
      for (int half = 0; half < 2; ++half)
        largest_bias = pointwise::maximum(fabsf(w.bias[half * 2]), largest_bias);
    }
#pragma unroll
    for (int offset = 16; offset >= 4; offset /= 2) {
#pragma unroll
      for (int i = 0; i <= Chains::most_terms; ++i) {
        if (Chains::has_swish_terms(i))
          largest[i] = pointwise::maximum(__shfl_xor_sync(0xffffffffu, largest[i], offset), largest[i]);
      }
      largest_bias = pointwise::maximum(__shfl_xor_sync(0xffffffffu, largest_bias, offset), largest_bias);
    }
    // Rounded weights may be smaller than they were by 2^-11.
    const auto limit = [&](float most, float of_weights) {
      return of_weights <= 1e30f ? (most * (scale < 0.0f ? -scale : scale) - largest_bias) /
                                       pointwise::maximum(of_weights, 1e-30f) * 0.998f
                                 : __int_as_float(0x7fffffff);
    };
    Limits limits = {limit(Chains::most_narrow(Chains::most_terms), largest[Chains::most_terms]),
                     limit(Chains::most_wide, largest[Chains::most_terms])};
#pragma unroll
    for (int i = 0; i < Chains::most_terms; ++i) {
      if (!Chains::has_swish_terms(i)) continue;
      limits.narrow = pointwise::minimum(limit(Chains::most_narrow(i), largest[i]), limits.narrow);
      limits.wide = pointwise::minimum(limit(Chains::most_wide, largest[i]), limits.wide);
    }
    return limits;
  }
};

}  // namespace onepass
