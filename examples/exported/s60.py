# ModelNew: the Model of s60.py, fused for sm_90a by onepass 0.1.0:
#   python -m onepass export s60.py -o s60.py --arch sm_90a
# It needs PyTorch and a CUDA toolkit: load_inline builds the kernels at the first call on a GPU.
#   block_1_tf32: thin_mma, conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
#   block_1_tf32_away: thin_mma, conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
#   block_1_f32: thin_mma, conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
#   block_1_f32: thin_mma, conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
#   block_1_tail: tail_staged, swish | group_norm(4) | hardswish
#
# The original file follows, then the kernels, then ModelNew at the end.


"""Workload s60: ConvTranspose3d -> Swish -> GroupNorm -> HardSwish."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, groups, eps, bias=True):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias
        )
        self.group_norm = nn.GroupNorm(num_groups=groups, num_channels=out_channels, eps=eps)

    def forward(self, x):
        x = self.conv_transpose(x)
        x = torch.sigmoid(x) * x
        x = self.group_norm(x)
        return F.hardswish(x)


batch_size, in_channels, out_channels = 128, 3, 16
depth, height, width = 16, 32, 32
kernel_size, stride, padding, groups, eps = 3, 2, 1, 4, 1e-5


def get_inputs():
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, padding, groups, eps]


# ----------------------------------------------------------------------------------------------------
# The kernels
import functools
import sys
import threading
import warnings

import torch
import torch.utils.cpp_extension


_CUDA_HEAD = r"""
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
"""


_DEVICE_CODE = r"""
// --------------------------------------------------------------------------------------------------
// Which bit of a launch's `aligned` belongs to which tensor; shared by host and device.

namespace onepass {

// Set where vectors of the grid that fits the input lie on 16 bytes in this tensor too.
enum AlignedBit {
  aligned_input = 0,
  aligned_output = 1,
  aligned_output_gradient = 2,
  aligned_input_gradient = 3,
  aligned_parameter = 8,  // the first 24 of them; of others no bit is ever set
  aligned_gradient = 32,
  aligned_all = 63  // every tensor of the launch
};

// --------------------------------------------------------------------------------------------------
// Integers, element types, and vectors of elements between memory and registers. Arithmetic is always f32.

// Of kernels in a row (LaunchChain): nothing that another one writes is read, and nothing is written that
// another one reads, before it is waited for; what was written by all before is seen then. Elsewhere both do
// nothing.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next one's blocks come as soon as all of this one have called it and there is room.
__device__ __forceinline__ void allow_kernel_after() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

template <class A, class B>
constexpr bool is_same = false;

template <class A>
constexpr bool is_same<A, A> = true;

template <bool, class Yes, class>
struct Conditional {
  using Type = Yes;
};

template <class Yes, class No>
struct Conditional<false, Yes, No> {
  using Type = No;
};

template <bool condition, class Yes, class No>
using conditional = typename Conditional<condition, Yes, No>::Type;

// Element types: how wide, and how 32 bits of storage become floats and back. Halves go in pairs.
struct f32 {
  static constexpr int bytes = 4;
};

struct f16 {
  static constexpr int bytes = 2;
  static __device__ __forceinline__ void unpack(uint32 bits, float& low, float& high) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high)
        : "r"(bits));
  }
  static __device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
  // x y + z of pairs, rounded once.
  static __device__ __forceinline__ uint32 multiply_add(uint32 x, uint32 y, uint32 z) {
    uint32 bits;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(x), "r"(y), "r"(z));
    return bits;
  }
};

struct bf16 {
  static constexpr int bytes = 2;
  static __device__ __forceinline__ void unpack(uint32 bits, float& low, float& high) {
    low = __uint_as_float(bits << 16);
    high = __uint_as_float(bits & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
};

// One element at an index.
template <class T>
__device__ __forceinline__ float load_one(const void* base, int64 index) {
  if constexpr (T::bytes == 4) {
    return static_cast<const float*>(base)[index];
  } else {
    float low, high;
    T::unpack(static_cast<const uint16*>(base)[index], low, high);
    return low;
  }
}

template <class T>
__device__ __forceinline__ void store_one(void* base, int64 index, float value) {
  if constexpr (T::bytes == 4) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16*>(base)[index] = static_cast<uint16>(T::pack(value, 0.0f));
  }
}

// To nearest, ties to even, at 10 bits; what is not finite stays.
__device__ __forceinline__ float round_to_tf32(float x) {
#if __CUDA_ARCH__ >= 900
  uint32 bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
#else
  const uint32 bits = __float_as_uint(x);
  const uint32 rounded = (bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu;
  return (bits & 0x7f800000u) == 0x7f800000u ? x : __uint_as_float(rounded);
#endif
}

// To nearest, ties away from zero, at 10 bits; what is not finite stays.
__device__ __forceinline__ float round_to_tf32_away(float x) {
  uint32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// An operand of a convolution that rounds them (C::rounds_to_tf32).
template <class C>
__device__ __forceinline__ float round_operand(float x) {
  if constexpr (C::ties_away) {
    return round_to_tf32_away(x);
  } else {
    return round_to_tf32(x);
  }
}

// `Width` neighbours as they lie in memory: loaded early, converted when they are needed.
template <class T, int Width>
struct Packed {
  static constexpr int words = Width * T::bytes / 4;
  static_assert(Width == 1 || words * 4 == Width * T::bytes);
  uint32 word[words > 0 ? words : 1];

  // `aligned`: the address is a multiple of the vector's bytes, up to 16. `last_use`: nobody reads it again
  // soon, so that the caches give it up first.
  template <bool last_use = false>
  __device__ __forceinline__ void load(const void* base, int64 index, bool aligned) {
    if constexpr (Width == 1) {
      word[0] =
          T::bytes == 4 ? static_cast<const uint32*>(base)[index] : static_cast<const uint16*>(base)[index];
    } else if (aligned) {
      load_words<last_use>(static_cast<const char*>(base) + index * T::bytes);
    } else if constexpr (T::bytes == 4) {
#pragma unroll
      for (int i = 0; i < Width; ++i) word[i] = static_cast<const uint32*>(base)[index + i];
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) {
        const uint16* pair = static_cast<const uint16*>(base) + index + 2 * i;
        word[i] = pair[0] | static_cast<uint32>(pair[1]) << 16;
      }
    }
  }

  __device__ __forceinline__ void store(void* base, int64 index, bool aligned) const {
    if constexpr (Width == 1) {
      if constexpr (T::bytes == 4) {
        static_cast<uint32*>(base)[index] = word[0];
      } else {
        static_cast<uint16*>(base)[index] = static_cast<uint16>(word[0]);
      }
    } else if (aligned) {
      store_words(static_cast<char*>(base) + index * T::bytes);
    } else if constexpr (T::bytes == 4) {
#pragma unroll
      for (int i = 0; i < Width; ++i) static_cast<uint32*>(base)[index + i] = word[i];
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) {
        uint16* pair = static_cast<uint16*>(base) + index + 2 * i;
        pair[0] = static_cast<uint16>(word[i]);
        pair[1] = static_cast<uint16>(word[i] >> 16);
      }
    }
  }

  // From shared memory, always aligned.
  __device__ __forceinline__ void load_shared(const void* address) {
    static_assert(words % 4 == 0 || words == 2 || words == 1);
    if constexpr (words % 4 == 0) {
#pragma unroll
      for (int i = 0; i < words; i += 4) {
        const uint4 v = static_cast<const uint4*>(address)[i / 4];
        word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) word[i] = static_cast<const uint32*>(address)[i];
    }
  }

  __device__ __forceinline__ void store_shared(void* address) const {
    if constexpr (words % 4 == 0) {
#pragma unroll
      for (int i = 0; i < words; i += 4) {
        static_cast<uint4*>(address)[i / 4] = uint4{word[i], word[i + 1], word[i + 2], word[i + 3]};
      }
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) static_cast<uint32*>(address)[i] = word[i];
    }
  }

  __device__ __forceinline__ void unpack(float (&value)[Width]) const {
    if constexpr (T::bytes == 4) {
#pragma unroll
      for (int i = 0; i < Width; ++i) value[i] = __uint_as_float(word[i]);
    } else if constexpr (Width == 1) {
      float high;
      T::unpack(word[0], value[0], high);
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) T::unpack(word[i], value[2 * i], value[2 * i + 1]);
    }
  }

  // One of them; `k` is a constant after unrolling.
  __device__ __forceinline__ float at(int k) const {
    if constexpr (T::bytes == 4) {
      return __uint_as_float(word[k]);
    } else {
      float low, high;
      T::unpack(word[k / 2], low, high);
      return k % 2 == 0 ? low : high;
    }
  }

  __device__ __forceinline__ void pack(const float (&value)[Width]) {
    if constexpr (T::bytes == 4) {
#pragma unroll
      for (int i = 0; i < Width; ++i) word[i] = __float_as_uint(value[i]);
    } else if constexpr (Width == 1) {
      word[0] = T::pack(value[0], 0.0f);
    } else {
#pragma unroll
      for (int i = 0; i < words; ++i) word[i] = T::pack(value[2 * i], value[2 * i + 1]);
    }
  }

 private:
  template <bool last_use>
  __device__ __forceinline__ void load_words(const char* address) {
    if constexpr (words % 4 == 0) {
#pragma unroll
      for (int i = 0; i < words; i += 4) {
        const uint4* from = reinterpret_cast<const uint4*>(address) + i / 4;
        const uint4 v = last_use ? __ldcs(from) : *from;
        word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
      }
    } else if constexpr (words == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(address);
      word[0] = v.x, word[1] = v.y;
    } else {
      word[0] = *reinterpret_cast<const uint32*>(address);
    }
  }

  __device__ __forceinline__ void store_words(char* address) const {
    if constexpr (words % 4 == 0) {
#pragma unroll
      for (int i = 0; i < words; i += 4) {
        __stcs(reinterpret_cast<uint4*>(address) + i / 4,
               uint4{word[i], word[i + 1], word[i + 2], word[i + 3]});
      }
    } else if constexpr (words == 2) {
      *reinterpret_cast<uint2*>(address) = uint2{word[0], word[1]};
    } else {
      *reinterpret_cast<uint32*>(address) = word[0];
    }
  }
};

}  // namespace onepass

// --------------------------------------------------------------------------------------------------
// The pointwise stages on a GPU: the formulas of pointwise.def over the functions below, in f32.
//
// Errors, absolute, of values up to a few units: sigmoid 2e-7, normal_cdf 2e-7; the others are within some
// ulp. sigmoid is 4 instructions and normal_cdf 15, where CUDA's expf and division, or erff, take 20
// to 30. Where results are rounded to 16 bits (`Bits`, else 32), sigmoid is 3 instructions and 4e-6,
// normal_cdf 8 and 6e-6, one of each a special function (H200; PTX promises 2^-12 of it); so too where f32 is
// rounded to less on its way (gemm_pingpong.cuh in tf32).

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

__device__ __forceinline__ float ramp(float x) { return __saturatef(fmaf(x, 1.0f / 6.0f, 0.5f)); }

template <int Bits>
struct swish_stage {
  static __device__ __forceinline__ float value(float x, float p, float a, float b) {
    return x * sigmoid<Bits>(x);
  }
};

template <int Bits>
struct hardswish_stage {
  static __device__ __forceinline__ float value(float x, float p, float a, float b) {
    return x * ramp(x);
  }
};

}  // namespace onepass::pointwise

// --------------------------------------------------------------------------------------------------
// Sums over lanes, warps and blocks, and moments (count, mean, M2), always in the same order.

namespace onepass {

// The sum over `Lanes` neighbouring lanes (a power of two), in each of them.
template <int Lanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Elements seen so far as their count, mean and sum of squared distances from it.
struct Moments {
  float count = 0.0f;
  float mean = 0.0f;
  float m2 = 0.0f;

  __device__ __forceinline__ float distance(float from) const { return mean - from; }

  // Takes in `n` elements of this mean and M2 (Chan). The quotient is a weight: its error of 1 ulp moves the
  // mean by that part of the distance between the two means. The first mean is taken as it is. Its square may
  // be more than f32 has room for.
  __device__ __forceinline__ void merge(float n, float other_mean, float other_m2) {
    const float total = count + n;
    float weight;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(total));
    weight = count > 0.0f ? weight * n : 1.0f;
    const float distance = other_mean - mean;
    mean = fmaf(distance, weight, mean);
    m2 = fmaf(distance * (count * weight), distance, m2 + other_m2);
    count = total;
  }
};

// a + b, and what rounding took from it (Knuth).
__device__ __forceinline__ float sum_and_rest(float a, float b, float& rest) {
  const float sum = a + b;
  const float of_b = sum - a;
  rest = (a - (sum - of_b)) + (b - of_b);
  return sum;
}

// Moments whose mean is two numbers: `low` is what rounding took from it.
struct ExactMoments {
  float count = 0.0f;
  float mean = 0.0f;
  float m2 = 0.0f;
  float low = 0.0f;

  __device__ __forceinline__ float distance(float from) const { return (mean - from) + low; }

  __device__ __forceinline__ void merge(const ExactMoments& other) {
    if (count == 0.0f) {
      *this = other;
      return;
    }
    const float total = count + other.count;
    float weight;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(total));
    weight *= other.count;
    const float distance = (other.mean - mean) + (other.low - low);
    mean = sum_and_rest(mean, fmaf(distance, weight, low), low);
    m2 = fmaf(distance * (count * weight), distance, m2 + other.m2);
    count = total;
  }
};

// How far a value is from a mean, or from a pivot. Never fused with the product that the value may be: a
// value that is rounded in one place and not in another differs from itself.
__device__ __forceinline__ float distance_from(float value, float mean) { return __fsub_rn(value, mean); }

// What a norm multiplies distances from its mean by, given 1 / deviation: 0 where all values of the slab are
// the same number, as M2 says. x * scale + shift is then the shift, which is the norm's bias exactly. Without
// an eps the result is no number, as PyTorch's.
template <class Tail>
__device__ __forceinline__ float norm_factor(float rstd, float mean, float m2) {
  const float least = mean * 0x1p-25f;  // less than half of what two numbers near the mean differ by
  // Below 2^-35 squares of what they differ by are no normal numbers, and M2 says nothing.
  const bool is_known = Tail::eps > 0.0f && fabsf(mean) > 0x1p-35f;
  return is_known && m2 <= least * least ? 0.0f : rstd;
}

// A norm that knows its mean and deviation alone. An instruction more than x * scale + shift, and exact where
// x is the mean.
__device__ __forceinline__ float normalise(float x, float mean, float scale, float bias) {
  return fmaf(distance_from(x, mean), scale, bias);
}

// Sums of distances from a pivot, the mean of some first values, and of their squares. Those of
// equal values are 0.
template <int Lines>
struct PivotSums {
  float pivot = 0.0f;
  float sum[Lines] = {};
  float square[Lines] = {};

  // The mean of values, exactly if they are equal.
  template <int Count>
  static __device__ __forceinline__ float mean_of(const float (&value)[Count]) {
    float all = 0.0f;
#pragma unroll
    for (int k = 1; k < Count; ++k) all += distance_from(value[k], value[0]);
    return fmaf(all, 1.0f / Count, value[0]);
  }

  __device__ __forceinline__ void add_distance(float distance, int k) {
    sum[k % Lines] += distance;
    square[k % Lines] = fmaf(distance, distance, square[k % Lines]);
  }
  // The value's distance.
  __device__ __forceinline__ float add(float value, int k) {
    const float distance = distance_from(value, pivot);
    add_distance(distance, k);
    return distance;
  }

  // Those of `Lanes` neighbouring lanes that have the same pivot, in each of them.
  template <int Lanes>
  __device__ __forceinline__ void sum_lanes() {
#pragma unroll
    for (int k = 1; k < Lines; ++k) {
      sum[0] += sum[k];
      square[0] += square[k];
      sum[k] = square[k] = 0.0f;
    }
    sum[0] = lanes_sum<Lanes>(sum[0]);
    square[0] = lanes_sum<Lanes>(square[0]);
  }

  // The mean's distance from the pivot, and M2.
  __device__ __forceinline__ void finish(float count, float& moved, float& m2) const {
    float all = sum[0], squares = square[0];
#pragma unroll
    for (int k = 1; k < Lines; ++k) {
      all += sum[k];
      squares += square[k];
    }
    float per_element;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(per_element) : "f"(count));
    moved = count > 0.0f ? all * per_element : 0.0f;
    // Not below zero: what is left of equal values. NaN stays.
    const float left = fmaf(-all, moved, squares);
    m2 = left < 0.0f ? 0.0f : left;
  }
};

// Of `Lanes` neighbouring lanes the mean of the first one that has elements.
template <int Lanes>
__device__ __forceinline__ float first_mean(float count, float mean) {
  const uint32 first = threadIdx.x % 32 & ~(Lanes - 1u);
  const uint32 team = Lanes == 32 ? 0xffffffffu : ((1u << (Lanes % 32)) - 1u) << first;
  const uint32 have = __ballot_sync(0xffffffffu, count > 0.0f) & team;
  return __shfl_sync(0xffffffffu, mean, have == 0 ? first : __ffs(static_cast<int>(have)) - 1);
}

// The moments of `Lanes` neighbouring lanes together, in each of them: the mean first, as its distance
// `moved` from one of theirs (`from`), then every M2 moved to it. Two sums instead of a tree of merges. Equal
// means stay what they are, and large ones lose nothing.
template <int Lanes, class Own>
__device__ __forceinline__ void lanes_moments(const Own& own, float per_element, float& from, float& moved,
                                              float& m2) {
  from = first_mean<Lanes>(own.count, own.mean);
  const float distance = own.distance(from);
  moved = lanes_sum<Lanes>(own.count * distance) * per_element;
  m2 = lanes_sum<Lanes>(fmaf(own.count * (distance - moved), distance - moved, own.m2));
}

// The moments of the elements of `Threads` threads together; `elements` is their number. Lanes is 32 or less
// for a team inside a warp, else Threads. `scratch` holds 4 * Threads / 32 floats. `low` is what the mean has
// no bits for.
template <int Lanes, int Threads, class Own>
__device__ __forceinline__ void team_moments(const Own& own, float elements, float* scratch, float& mean,
                                             float& low, float& m2) {
  float from, moved;
  const float per_element = elements > 0.0f ? 1.0f / elements : 0.0f;
  if constexpr (Lanes <= 32) {
    lanes_moments<Lanes>(own, per_element, from, moved, m2);
  } else {
    constexpr int warps = Threads / 32;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    ExactMoments part{lanes_sum<32>(own.count), 0.0f, 0.0f, 0.0f};
    lanes_moments<32>(own, part.count > 0.0f ? 1.0f / part.count : 0.0f, from, moved, part.m2);
    part.mean = sum_and_rest(from, moved, part.low);
    __syncthreads();
    if (lane == 0) {
      scratch[warp] = part.count;
      scratch[warps + warp] = part.mean;
      scratch[2 * warps + warp] = part.m2;
      scratch[3 * warps + warp] = part.low;
    }
    __syncthreads();
    part = {};
    if (lane < warps) {
      part = {scratch[lane], scratch[warps + lane], scratch[2 * warps + lane], scratch[3 * warps + lane]};
    }
    lanes_moments<32>(part, per_element, from, moved, m2);
  }
  mean = sum_and_rest(from, moved, low);
}

template <int Lanes, int Threads>
__device__ __forceinline__ void team_moments(const Moments& own, float elements, float* scratch, float& mean,
                                             float& m2) {
  float low;
  team_moments<Lanes, Threads>(own, elements, scratch, mean, low, m2);
}

// --------------------------------------------------------------------------------------------------
// What the tail's kernels share: parameters, per-channel values, and the two ways to walk over a tile.
//
// A tail is  before-chain -> norm -> after-chain -> mean, each part optional. `Tail` is the problem,
// generated: types, sizes and the chains as structs (src/cuda/source.cc). A *row* is one channel of one
// sample. A *unit* is what shares a synchronisation: a slab where tensors are planar (channels before space),
// a sample where they are interleaved.

// A kernel's AlignedBits; none where its parameters do not say them.
template <class Parameters>
__device__ __forceinline__ auto aligned_bits_of(const Parameters& p, int) -> decltype(p.aligned) {
  return p.aligned;
}

template <class Parameters>
__device__ __forceinline__ uint64 aligned_bits_of(const Parameters&, long) {
  return 0;
}

// Whether vectors of a tensor lie on 16 bytes, by its AlignedBit. Others are loaded element by element.
template <class Parameters>
__device__ __forceinline__ bool is_aligned(const Parameters& p, int bit) {
  return (aligned_bits_of(p, 0) >> bit) & 1;
}

// Loads and stores that other blocks of the same launch wrote or will read: past the first-level cache.
__device__ __forceinline__ float load_shared_by_blocks(const float* address) { return __ldcg(address); }

__device__ __forceinline__ void wait_for(const uint32* flag, uint32 value) {
  uint32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (seen < value);
}

// Adds one to a counter of the launch and says what it was. What this block wrote before its last barrier is
// visible to the one that sees the new count, and the other way round.
__device__ __forceinline__ uint32 count_up(uint32* counter) {
  uint32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Whether this block is the last of `count` to arrive; what the others wrote before is then visible.
__device__ __forceinline__ bool arrives_last(uint32* counter, uint32 count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(counter) == count - 1;
  __syncthreads();
  return last;
}

// Lets those that wait for the flag go on: what this thread wrote is visible to them.
__device__ __forceinline__ void release(uint32* flag, uint32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// The same for a block.
__device__ __forceinline__ void publish(uint32* flag, uint32 value) {
  __syncthreads();
  if (threadIdx.x == 0) release(flag, value);
}

// A block's tickets, drawn one at a time. Drawing the next one early would save its wait, but a ticket that
// is held back takes the place of a tile in flight: 1.25 times the time of s60's backward.
class Tickets {
 public:
  explicit __device__ __forceinline__ Tickets(uint32* counter) : counter_(counter) {}

  // The next ticket, in every thread.
  __device__ __forceinline__ int64 take() {
    __shared__ uint32 ticket;
    __syncthreads();  // all have read the one before
    if (threadIdx.x == 0) ticket = atomicAdd(counter_, 1u);
    __syncthreads();
    return ticket;
  }

 private:
  uint32* counter_;
};

// The channel values of one row, or of `Width` neighbouring rows where a vector runs over channels.
template <class Chain, int Rows>
struct ChannelValues {
  float value[Rows][Chain::channel_operands > 0 ? Chain::channel_operands : 1];

  template <class Parameters>
  __device__ __forceinline__ void load(const Parameters& p, int64 n, int64 c) {
#pragma unroll
    for (int i = 0; i < Rows; ++i) Chain::load_channel(p, n, c + i, value[i]);
  }
};

// Lanes of a warp that share `count` pieces of work.
constexpr __device__ int lanes_for(int count) {
  int lanes = 1;
  while (lanes < 32 && lanes < count) lanes *= 2;
  return lanes;
}

// The whole chunk, where a number of vectors is asked for.
struct All {};

// --------------------------------------------------------------------------------------------------
// What the forward kernels of thin convolutions are given.

// Of thin/mma.cuh where values are recomputed, or wait in memory.
template <int Count>
struct ThinMmaParameters {
  const void* input;
  void* output;
  float* statistics;  // [batch][groups][2]: mean, 1 / deviation
  uint32* control;    // zero: a ticket, then two counters and a flag for each sample
  uint32* sets;       // zero: finished tiles of each set of tiles of a sample
  float* parts;       // moments of groups, for each tile: count, mean, M2
  float* ring;        // values that do not wait in the output
  int64 ring_samples;
  int64 batch;
  int64 lag;  // between the passes: samples where values are recomputed, else tiles
  const void* parameter[Count > 0 ? Count : 1];
};

// --------------------------------------------------------------------------------------------------
// A thin convolution with its chains, norm and mean in one launch, on a mainloop that computes sums. The
// convolution's output is never in memory.
//
//   pass 1   x -> convolution -> before-chain -> moments of each channel's tiles; the last block of a sample
//            merges them
//   pass 2   x -> convolution -> before-chain -> norm -> after-chain -> y, or sums of y for a mean
//
// Pass 1 is left out without a norm, pass 2 where a mean follows the norm directly. Work is taken by ticket
// as in tail/streamed.cuh: pass 1 of a wave of samples, then pass 2 of the wave before. Moves x once or twice
// and y once.
//
// `Convolution` is the problem's, generated (src/cuda/thin/thin.cc); so is `Tail`. Three parts make a kernel:
//   Mainloop   computes a tile of sums and hands them to an epilogue, fragment by fragment. Mainloop::team
//              neighbouring lanes have the same rows (channels of samples). A tile has Mainloop::samples
//              samples.
//   Epilogue   MomentsEpilogue or ApplyEpilogue: the chain, then moments, sums or stores.
//   Thin       the tickets, and the merges by the last block of a sample.

// The positions of a fragment that belong to the tile: all, or those with a bit set.
struct Mask {
  uint32 bits;
};

__device__ __forceinline__ bool has(int i, Mask mask) { return mask.bits >> i & 1u; }

__device__ __forceinline__ bool has(int, All) { return true; }

// The norm of a channel of a sample.
template <class Tail>
struct ChannelNorm {
  float mean = 0.0f;
  float scale = 1.0f;
  float bias = 0.0f;

  template <class Parameters>
  __device__ __forceinline__ void load(const Parameters& p, int64 n, int channel) {
    if constexpr (Tail::has_norm) {
      constexpr int groups = Tail::channels / Tail::group_channels;
      const float* slab = p.statistics + 2 * (n * groups + channel / Tail::group_channels);
      const int own = Tail::channel(n, channel);
      mean = load_shared_by_blocks(slab);
      scale = Tail::weight(p, own) * load_shared_by_blocks(slab + 1);
      bias = Tail::bias(p, own);
    }
  }
  __device__ __forceinline__ float apply(float x) const {
    return Tail::has_norm ? normalise(x, mean, scale, bias) : x;
  }
};

// body(row, position) for the values of a thread that count.
template <int Rows, int Count, class Which, class Body>
__device__ __forceinline__ void for_each_value(Which which, Body&& body) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (has(i, which)) body(r, i);
    }
  }
}

// --------------------------------------------------------------------------------------------------
// The terms of each class in groups of four, one for each lane of a quad. A group has four input channels of
// a tap. With one or two input channels it has four or two taps. (Not with many taps: a thread has an address
// for each pattern of four taps.)

template <int Value>
struct Constant {
  static constexpr int value = Value;
  constexpr __device__ operator int() const { return Value; }
};

// body(Constant<0>{}), ..., body(Constant<Count - 1>{}).
template <int Count, int First = 0, class Body>
__device__ __forceinline__ void for_constant(Body&& body) {
  if constexpr (First < Count) {
    body(Constant<First>{});
    for_constant<Count, First + 1>(body);
  }
}

// D = A B + C, A 16 x 8 (or 16 x 4) of tf32 by rows, B by columns.
__device__ __forceinline__ void mma_k8(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                                       const float* c) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
}

__device__ __forceinline__ void mma_k4(float (&d)[4], const uint32 (&a)[4], uint32 b0, const float* c) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %8, %9, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The terms of each class in groups of four, a lane of a quad each: what the products of one warp are. A
// group has four input channels of a tap; where there are one or two, those of four or two taps (not of many:
// a thread has an address for each way in which four taps lie).
template <class C>
struct ThinTerms {
  static constexpr int vectors = (C::in_channels + 3) / 4;  // of four input channels
  static constexpr int taps_at_once = C::in_channels == 1 && C::taps <= 64 ? 4 : C::in_channels == 2 ? 2 : 1;

  struct Term {
    bool exists;
    int z, y, x;  // of the window, from the cell's first position
    int tap;
    int channel;
  };
  static constexpr __device__ int classes(int d) { return static_cast<int>(C::classes(d)); }
  static constexpr __device__ int count(int d, int r) { return static_cast<int>(C::count(d, r)); }
  static constexpr __device__ int offset(int d, int r, int m) {
    return static_cast<int>(C::base(d, r) + m * C::delta(d));
  }
  static constexpr __device__ int tap(int d, int r, int m) {
    return static_cast<int>(C::first(d, r) + m * C::tap_step(d));
  }
  // The lowest offset of all classes, and how far it is to the highest.
  static constexpr __device__ int low(int d) {
    int least = 1 << 30;
    for (int r = 0; r < classes(d); ++r) {
      for (int m = 0; m < count(d, r); ++m) least = offset(d, r, m) < least ? offset(d, r, m) : least;
    }
    return least == 1 << 30 ? 0 : least;
  }
  static constexpr __device__ int reach(int d) {
    int most = low(d);
    for (int r = 0; r < classes(d); ++r) {
      for (int m = 0; m < count(d, r); ++m) most = offset(d, r, m) > most ? offset(d, r, m) : most;
    }
    return most - low(d);
  }
  static constexpr __device__ int taps(int rz, int ry, int rx) {
    return count(0, rz) * count(1, ry) * count(2, rx);
  }
  // Of the class that has most.
  static constexpr __device__ int most_taps() {
    int most = 0;
    for (int i = 0; i < classes(0) * classes(1) * classes(2); ++i) {
      const int own = taps(i / (classes(1) * classes(2)), i / classes(2) % classes(1), i % classes(2));
      most = own > most ? own : most;
    }
    return most;
  }
  static constexpr __device__ int groups(int rz, int ry, int rx) {
    return (taps(rz, ry, rx) + taps_at_once - 1) / taps_at_once * vectors;
  }
  // The term of a lane of a quad. A term that does not exist reads the element of another term of its group:
  // it is finite, and its weight is zero.
  static constexpr __device__ Term term(int rz, int ry, int rx, int group, int lane) {
    const int first = group / vectors * taps_at_once;
    int i = first + (taps_at_once > 1 ? lane / static_cast<int>(C::in_channels) : 0);
    int channel = taps_at_once > 1 ? lane % static_cast<int>(C::in_channels) : group % vectors * 4 + lane;
    const bool exists = i < taps(rz, ry, rx) && channel < C::in_channels;
    if (i >= taps(rz, ry, rx)) i = first;
    if (channel >= C::in_channels) channel = static_cast<int>(C::in_channels) - 1;
    // The two groups of a product are in neighbouring registers. With several classes, a pair of planes gives
    // such groups in most of them.
    const bool planes_first = taps_at_once == 1 && classes(0) * classes(1) * classes(2) > 1;
    const int before_x = planes_first ? count(0, rz) : 1;
    const int x = i / before_x % count(2, rx);
    const int y = i / before_x / count(2, rx) % count(1, ry);
    const int z = planes_first ? i % count(0, rz) : i / count(2, rx) / count(1, ry);
    return {
        exists,
        offset(0, rz, z) - low(0),
        offset(1, ry, y) - low(1),
        offset(2, rx, x) - low(2),
        (tap(0, rz, z) * static_cast<int>(C::kernel(1)) + tap(1, ry, y)) * static_cast<int>(C::kernel(2)) +
            tap(2, rx, x),
        channel};
  }
  // Products of all classes before this one.
  static constexpr __device__ int products_before(int rz, int ry, int rx) {
    int sum = 0;
    for (int i = 0; i < (rz * classes(1) + ry) * classes(2) + rx; ++i) {
      sum += (groups(i / (classes(1) * classes(2)), i / classes(2) % classes(1), i % classes(2)) + 1) / 2;
    }
    return sum;
  }
  static constexpr int products = products_before(classes(0), 0, 0);
};

// Distances between the terms of a group in shared memory, given the pitches of channels, planes and rows.
// There are few different patterns.
template <class C, int Plane, int RowsOfPlane, int Row>
struct ThinPatterns {
  using Terms = ThinTerms<C>;
  static constexpr int most = 32;
  static constexpr __device__ int word(const typename Terms::Term& t) {
    return t.channel * Plane + (t.z * RowsOfPlane + t.y) * Row + t.x;
  }
  struct Table {
    int count = 0;
    int distance[most][4] = {};

    constexpr __device__ int find(int rz, int ry, int rx, int group) const {
      const int first = word(Terms::term(rz, ry, rx, group, 0));
      for (int i = 0; i < count; ++i) {
        bool same = true;
        for (int lane = 1; lane < 4; ++lane)
          same &= distance[i][lane] == word(Terms::term(rz, ry, rx, group, lane)) - first;
        if (same) return i;
      }
      return count;
    }
  };
  static constexpr __device__ Table make() {
    Table table;
    for (int i = 0; i < Terms::classes(0) * Terms::classes(1) * Terms::classes(2); ++i) {
      const int rz = i / (Terms::classes(1) * Terms::classes(2));
      const int ry = i / Terms::classes(2) % Terms::classes(1);
      const int rx = i % Terms::classes(2);
      for (int group = 0; group < Terms::groups(rz, ry, rx); ++group) {
        const int at = table.find(rz, ry, rx, group);
        if (at < table.count || at == most) continue;
        const int first = word(Terms::term(rz, ry, rx, group, 0));
        for (int lane = 0; lane < 4; ++lane)
          table.distance[at][lane] = word(Terms::term(rz, ry, rx, group, lane)) - first;
        ++table.count;
      }
    }
    return table;
  }
};
template <class Owner>
__device__ constexpr auto table_of = Owner::make();

// --------------------------------------------------------------------------------------------------
// A thin convolution with its chains and norm in one launch, by tensor cores.
//
// A *hold* says where values wait until the statistics of the norm are known, and schedules the passes:
//   HoldByRecomputing   nowhere: every output is computed twice (hold/recompute.cuh)
//   HoldInOutput        in the output, or in a ring of the workspace (hold/in_output.cuh)
//   HoldInCluster       in the shared memory of a cluster (hold/in_cluster.cuh)
//
// A *cell* is one output position of every class (thin.h). A tile is `tile_y` rows of `tile_x` cells of a
// plane, and the work of one warp: its window of x lies in shared memory, channel by channel. A product has
// M = 16 output channels, N = 8 neighbouring cells and K = twice a *group* of four terms, of each class only
// its own taps; 16 output channels of the whole tile come before the next 16. A lane then holds neighbours of
// a row in all its classes. Rows are put together in shared memory, with the 16-byte phase of where they go,
// and stored as vectors. Where four neighbouring lanes have whole sectors of a row, or eight have those of a
// position (channels after space), they store them at once. Warps wait for each other only for statistics.
//
// ThinMma has the kernel's types, sizes and shared memory. Its pieces are nested classes, each defined in its
// own file of mma/ or hold/: they use these names as they are. They are plain objects, each with a copy of
// the warp's state (Warp).
//
// Products of tf32 operands are exact. Operands of 16 bits are tf32 numbers; f32 ones are rounded to it in
// that mode, and else split into two, which leaves 2^-22 of a term. Tiles with an element that is not finite,
// or so large that what follows might overflow, are summed term by term instead ("careful").

template <class C, class Tail, class Numbers, class P>
struct ThinMma {
  // --- Pieces ---
  struct Chains;       // mma/chains.cuh: the before-chain, and how exactly a tile is computed
  struct Weights;      // mma/weights.cuh
  struct Window;       // mma/window.cuh
  struct Products;     // mma/products.cuh
  struct TileMoments;  // mma/moments.cuh
  struct Outputs;      // mma/outputs.cuh
  struct Send;         // mma/send.cuh
  struct Careful;      // mma/careful.cuh
  struct Statistics;   // mma/statistics.cuh
  struct Tickets;      // mma/tickets.cuh

  // --- What pieces hand to each other ---
  template <class Chain>
  struct Operands;   // of a lane's channels
  struct Fragments;  // weights of 16 channels
  struct Limits;     // of |x|, for each way
  template <int rz>
  struct Held;       // weights of one class of z in registers
  struct Columns;    // elements of the window
  struct Distances;  // sums of distances from a pivot
  // How a tile is computed, by the largest |x| of its window: by short forms of the chain, by exact ones, or
  // output by output.
  enum Way { narrow, wide, careful };

  // --- Holds ---
  struct Recompute;  // hold/recompute.cuh
  struct InOutput;   // hold/in_output.cuh
  struct InCluster;  // hold/in_cluster.cuh
  struct Cluster;    // hold/cluster_layout.cuh: sizes of InCluster

  using Parameters = P;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Output = typename Tail::Output;
  using Terms = ThinTerms<C>;
  using Term = typename Terms::Term;
  using Patterns = ThinPatterns<C, Numbers::plane, Numbers::window_y, Numbers::row_pitch>;

  static constexpr int threads = Numbers::threads;
  static constexpr int warps = Numbers::warps;
  static constexpr int channels = C::channels;
  static constexpr int row_tiles = Numbers::row_tiles;  // tiles of 16 channels in a block
  static constexpr int vectors = Terms::vectors;
  static constexpr int products = Terms::products;
  static constexpr int groups = channels / Tail::group_channels;
  static constexpr int classes_z = Terms::classes(0);
  static constexpr int classes_y = Terms::classes(1);
  static constexpr int classes_x = Terms::classes(2);
  static constexpr int out_z = static_cast<int>(C::output_size(0));
  static constexpr int out_y = static_cast<int>(C::output_size(1));
  static constexpr int out_x = static_cast<int>(C::output_size(2));
  static constexpr int cells_y = (out_y + classes_y - 1) / classes_y;
  static constexpr int cells_x = (out_x + classes_x - 1) / classes_x;
  static constexpr int tile_y = Numbers::tile_y;
  static constexpr int tile_x = Numbers::tile_x;
  // An item is `spans` times 8 cells: neighbours of one row, or of several rows.
  static constexpr int spans_y = Numbers::spans_y;
  static constexpr int spans_x = Numbers::spans_x;
  static constexpr int spans = spans_y * spans_x;
  static constexpr int columns = tile_x / (8 * spans_x);
  static constexpr int halves = channels > 8 ? 2 : 1;  // of a product's 16 rows
  // A lane has row `quad` of each half. Where channels lie after space, the two rows are neighbouring
  // channels.
  static constexpr bool interleaved = Numbers::interleaved;
  static constexpr __device__ int row_channel(int half, int quad) {
    return interleaved && halves == 2 ? 2 * quad + half : half * 8 + quad;
  }
  // The window: rows begin `lead` elements early, at a vector of the input.
  static constexpr int window_y = Numbers::window_y;
  static constexpr int lead = Numbers::lead;
  static constexpr int row_pitch = Numbers::row_pitch;
  static constexpr int plane = Numbers::plane;
  static constexpr int window_words = C::in_channels * plane;
  static constexpr int input_width = 16 / Tail::Input::bytes;
  // 16-bit elements are copied asynchronously as vectors and converted afterwards. With `prefetches` the next
  // window has a place of its own and arrives while a pass runs. Otherwise it arrives after the pass, 16-bit
  // elements in the stage of the outputs.
  static constexpr bool prefetches = Numbers::prefetches;
  static constexpr bool is_short = Tail::Input::bytes == 2;
  static constexpr int raw_plane = Numbers::window_z * window_y * row_pitch;
  static constexpr int raw_elements = is_short && Numbers::rows_are_vectors ? C::in_channels * raw_plane : 0;
  static_assert(prefetches || raw_elements * 2 <= Numbers::stage_bytes);
  static constexpr int windows = prefetches && !is_short ? 2 : 1;
  static constexpr int patterns = table_of<Patterns>.count > 0 ? table_of<Patterns>.count : 1;
  static_assert(patterns < Patterns::most);
  static_assert(plane % 8 == 0 && row_pitch % input_width == 0);
  static constexpr bool in_registers = Numbers::weights_in_registers;
  static constexpr bool splits = Numbers::splits;
  // Shared memory holds the weights, unless one set of registers holds them all, then the low parts of split
  // weights.
  static constexpr bool shares_weights = !in_registers || row_tiles > 1;
  static constexpr int first_rest = shares_weights ? products * row_tiles : 0;
  static constexpr int shared_weights = first_rest + (splits ? products * row_tiles : 0);

  // The stage of rows: one class of z, all classes of y and x, `stage_y` rows of cells, 16 channels. A chunk
  // is what is contiguous in the output: the whole stage where tiles have whole rows, else a row of one class
  // of y.
  static constexpr bool whole_rows = Numbers::tiles_x == 1;
  static constexpr int stage_y = Numbers::stage_y;
  static_assert(stage_y % spans_y == 0 && tile_y % stage_y == 0);
  static constexpr bool is_direct = Numbers::piece > 0;  // without a stage
  static constexpr int width = 16 / Output::bytes;
  static constexpr int sector = 32 / Output::bytes;
  // The earlier tile writes a sector that two tiles share, and recomputes the later tile's part of it.
  static constexpr bool overlaps = Numbers::overlaps;
  static constexpr int chunk_elements = whole_rows ? stage_y * classes_y * out_x : tile_x * classes_x;
  static constexpr int chunk_pitch = Numbers::chunk_pitch;
  static constexpr int channel_pitch = Numbers::channel_pitch;
  static constexpr int staged_channels = channels < 16 ? channels : 16;

  struct alignas(16) WarpShared {
    alignas(16) unsigned char stage[Numbers::stage_bytes];
    alignas(16) float x[windows * window_words];
    alignas(16) uint16 raw[prefetches && raw_elements > 0 ? raw_elements : 8];
    float moments[row_tiles * 16][3];
  };
  struct alignas(16) Shared {
    WarpShared warp[warps];
    alignas(16) uint32 weights[shared_weights > 0 ? shared_weights : 1][32][4];
    uint32 drawn;
  };
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);

  struct Tile {
    int64 n;
    int index;    // within the sample
    int z, y, x;  // its first cell

    explicit __device__ __forceinline__ Tile(int64 i)
        : n(i / Numbers::tiles),
          index(static_cast<int>(i % Numbers::tiles)),
          z(index / (Numbers::tiles_x * Numbers::tiles_y)),
          y(index / Numbers::tiles_x % Numbers::tiles_y * tile_y),
          x(index % Numbers::tiles_x * tile_x) {}
    __device__ __forceinline__ Tile(int64 sample, int first_z, int first_y, int first_x)
        : n(sample), index(0), z(first_z), y(first_y), x(first_x) {}
  };

  template <class Body>
  static __device__ __forceinline__ void for_each_class(Body&& body) {
    for_constant<classes_z>([&](auto rz) {
      for_constant<classes_y>([&](auto ry) { for_constant<classes_x>([&](auto rx) { body(rz, ry, rx); }); });
    });
  }

  static __device__ __forceinline__ float weight(const Parameters& p, int channel, int input, int tap) {
    if (channel >= channels || input >= C::in_channels) return 0.0f;
    const int index = C::transposed ? (input * channels + channel) * C::taps + tap
                                    : (channel * C::in_channels + input) * C::taps + tap;
    return load_one<typename C::Weight>(p.parameter[0], index);
  }
  static __device__ __forceinline__ float bias(const Parameters& p, int channel) {
    if constexpr (C::has_bias) return load_one<typename C::Bias>(p.parameter[1], channel);
    return 0.0f;
  }

  static __device__ __forceinline__ int64 output_index(int64 n, int channel, int z, int y, int x) {
    return n * C::stride(0) + channel * C::stride(1) + z * C::stride(2) + y * C::stride(3) + x * C::stride(4);
  }

  // Sums are the convolution's times this factor. For a swish they are halved, which is exact: x sigmoid(x) =
  // h tanh(h) + h with h = x / 2.
  static constexpr float log2_e = 1.4426950408889634f;
  static constexpr float scale = Numbers::begins_with_swish ? 0.5f : 1.0f;

  // Sums of 16 channels of the classes (rz, ry, all of x): [class][8 cells], four a lane.
  using Sums = float[classes_x][spans][4];

  // The state of a warp; every piece has a copy. A hold makes it in place. Where a function returned it, nvcc
  // 13.0 turned the choice by `in_quad` in Products::columns_of into a switch and left it in the loops over
  // items: 7 more of 110 to 190 instructions, s60 took 2 to 4% longer.
  struct Warp {
    const Parameters& p;
    Shared& shared;
    const int first_channel = 0;  // of the block
    WarpShared& area = shared.warp[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const int quad = lane / 4;  // output channel of a product; the lane has the one 8 further too
    const int in_quad = lane % 4;
  };
};

// --------------------------------------------------------------------------------------------------
// The chains of a kernel on the values of a lane, and the ways to compute a tile: small sums need fewer
// instructions for a swish.

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

// --------------------------------------------------------------------------------------------------
// Tiles whose elements are too large for sums on tensor cores, or not finite: every output by itself.

// Such tiles are rare. Functions are static: the address of an object would make all its shared memory
// generic.
template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Careful {
  // An output after the before-chain, summed term by term over the taps that meet an input.
  static __device__ __noinline__ float value(const Parameters& p, int64 n, int channel, int z, int y, int x) {
    const int out[3] = {z, y, x};
    float sum = bias(p, channel);
#pragma unroll 1
    for (int input = 0; input < C::in_channels; ++input) {
      float part = 0.0f;
#pragma unroll 1
      for (int tap = 0; tap < C::taps; ++tap) {
        int at_tap = tap;
        int64 at = n * C::input_stride(0) + input * C::input_stride(1);
        bool meets = true;
#pragma unroll
        for (int d = 2; d >= 0; --d) {
          const int kernel = static_cast<int>(C::kernel(d));
          const int step = static_cast<int>(C::tap_step(d));
          const int r = out[d] % Terms::classes(d);
          const int m = (at_tap % kernel - static_cast<int>(C::first(d, r))) / step;
          meets &= at_tap % kernel == static_cast<int>(C::first(d, r)) + m * step && m >= 0 &&
                   m < Terms::count(d, r);
          const int position = out[d] / Terms::classes(d) * static_cast<int>(C::step(d)) +
                               static_cast<int>(C::base(d, r)) + m * static_cast<int>(C::delta(d));
          meets &= position >= 0 && position < C::input_size(d);
          at += position * C::input_stride(d + 2);
          at_tap /= kernel;
        }
        if (!meets) continue;
        float a = weight(p, channel, input, tap);
        float b = load_one<typename Tail::Input>(p.input, at);
        if constexpr (C::rounds_to_tf32) a = round_operand<C>(a), b = round_operand<C>(b);
        part = fmaf(a, b, part);
      }
      sum += part;
    }
    ChannelValues<Before, 1> before;
    before.load(p, n, channel);
    return Chains::template apply<Before>(sum, before);
  }

  // body(z, y, x) for the lane's outputs of a channel of the tile.
  template <class Body>
  static __device__ __forceinline__ void for_each_output(const Tile& tile, Body&& body) {
    const int first_y = tile.y * classes_y, first_x = tile.x * classes_x;
    const int rows = out_y - first_y < tile_y * classes_y ? out_y - first_y : tile_y * classes_y;
    const int row = out_x - first_x < tile_x * classes_x ? out_x - first_x : tile_x * classes_x;
    const int planes = out_z - tile.z * classes_z < classes_z ? out_z - tile.z * classes_z : classes_z;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < planes * rows * row; i += 32)
      body(tile.z * classes_z + i / (rows * row), first_y + i / row % rows, first_x + i % row);
  }

  // Leaves the moments of a channel, of which every lane has a part.
  static __device__ __forceinline__ void store_moments(WarpShared& area, int channel, Moments& own) {
    const float elements = lanes_sum<32>(own.count);
    float mean, m2;
    team_moments<32, threads>(own, elements, nullptr, mean, m2);
    if (threadIdx.x % 32 == 0) {
      area.moments[channel][0] = elements;
      area.moments[channel][1] = mean;
      area.moments[channel][2] = m2;
    }
  }

  static __device__ __noinline__ void measure(const Parameters& p, WarpShared& area, const Tile tile) {
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel) {
      Moments all;
      for_each_output(
          tile, [&](int z, int y, int x) { all.merge(1.0f, value(p, tile.n, channel, z, y, x), 0.0f); });
      store_moments(area, channel, all);
    }
  }

  // body(z, y, x) for the lane's outputs of a channel that the tile stores in `sample`. Where tiles overlap
  // these are whole sectors, as in Send. A run (all rows of a plane, or a row) then starts at the
  // first sector that begins in it. It ends where the next run starts. The first and the last run of a plane,
  // or row, have its ends.
  template <class Body>
  static __device__ __forceinline__ void for_each_stored(const char* sample, const Tile& tile, int channel,
                                                         Body&& body) {
    const int first_y = tile.y * classes_y, first_x = tile.x * classes_x;
    const int rows = out_y - first_y < tile_y * classes_y ? out_y - first_y : tile_y * classes_y;
    const int row = out_x - first_x < tile_x * classes_x ? out_x - first_x : tile_x * classes_x;
    const int planes = out_z - tile.z * classes_z < classes_z ? out_z - tile.z * classes_z : classes_z;
    const int length = whole_rows ? rows * out_x : row;
    const bool is_first = whole_rows ? first_y == 0 : first_x == 0;
    const bool is_last = whole_rows ? first_y + rows == out_y : first_x + row == out_x;
#pragma unroll 1
    for (int run = 0; run < planes * (whole_rows ? 1 : rows); ++run) {
      const int z = tile.z * classes_z + (whole_rows ? run : run / rows);
      const int y = first_y + (whole_rows ? 0 : run % rows);
      const int64 first = output_index(0, channel, z, y, first_x);
      // Elements up to the next sector.
      const auto left = [&](int64 index) {
        const uint64 at = reinterpret_cast<uint64>(sample) / Output::bytes + static_cast<uint64>(index);
        return static_cast<int>((sector - at % sector) % sector);
      };
      const int begin = overlaps && !is_first ? left(first) : 0;
      const int end = length + (overlaps && !is_last ? left(first + length) : 0);
#pragma unroll 1
      for (int i = begin + threadIdx.x % 32; i < end; i += 32)
        body(z, y + (first_x + i) / out_x, (first_x + i) % out_x);
    }
  }
};

// --------------------------------------------------------------------------------------------------
// Weights as the products read them, and how large x may be for each way to compute a tile.

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

// --------------------------------------------------------------------------------------------------
// The window of x that a warp has in shared memory for its tile.

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Window {
  const Warp warp;

  // Where a window begins in the input.
  struct Origin {
    int z, y, x;       // of the window's first row, behind `lead`
    const char* from;  // its address in channel 0; may lie outside the input
  };
  __device__ __forceinline__ Origin origin_of(const Tile& tile) const {
    const int z = tile.z * static_cast<int>(C::step(0)) + Terms::low(0);
    const int y = tile.y * static_cast<int>(C::step(1)) + Terms::low(1);
    const int x = tile.x * static_cast<int>(C::step(2)) + Terms::low(2);
    return {z, y, x,
            static_cast<const char*>(warp.p.input) + (tile.n * C::input_stride(0) + z * C::input_stride(2) +
                                                      y * C::input_stride(3) + x * C::input_stride(4)) *
                                                         Tail::Input::bytes};
  }
  static __device__ __forceinline__ bool has(int position, int64 size) {
    return static_cast<unsigned>(position) < static_cast<unsigned>(size);
  }

  // body(place in channel 0 of the window, whether it lies in the input, address) for the lane's positions of
  // the window. Rows go 32 neighbours at a time, then the remainders of all rows together.
  template <class Body>
  __device__ __forceinline__ void for_each_position(const Tile& tile, Body&& body) const {
    constexpr int bytes = Tail::Input::bytes;
    constexpr int left = Numbers::window_x % 32;
    const Origin o = origin_of(tile);
#pragma unroll
    for (int x = 0; x < Numbers::window_x - left; x += 32) {
      const bool has_x = has(o.x + x + warp.lane, C::input_size(2));
      const char* from = o.from + (x + warp.lane) * C::input_stride(4) * bytes;
      int i = lead + x + warp.lane;
#pragma unroll 1
      for (int z = o.z; z < o.z + Numbers::window_z; ++z) {
        const bool has_z = has_x && has(z, C::input_size(0));
#pragma unroll 4
        for (int y = 0; y < window_y; ++y) {
          body(i, has_z && has(o.y + y, C::input_size(1)), from);
          i += row_pitch;
          from += C::input_stride(3) * bytes;
        }
        from += (C::input_stride(2) - window_y * C::input_stride(3)) * bytes;
      }
    }
#pragma unroll 1
    for (int k = warp.lane; k < Numbers::window_z * window_y * left; k += 32) {
      const int row = k / (left > 0 ? left : 1);
      const int x = Numbers::window_x - left + (k - row * left);
      const int y = row % window_y, z = row / window_y;
      const int64 at = z * C::input_stride(2) + y * C::input_stride(3) + x * C::input_stride(4);
      body(row * row_pitch + lead + x,
           has(o.x + x, C::input_size(2)) && has(o.y + y, C::input_size(1)) && has(o.z + z, C::input_size(0)),
           o.from + at * bytes);
    }
  }

  // body(place in the window, bytes of it in the input, address) for the lane's vectors of the window,
  // several rows at a time. Channels are `plane_to` elements apart.
  template <int plane_to, class Body>
  __device__ __forceinline__ void for_each_vector(const Tile& tile, Body&& body) const {
    constexpr int bytes = Tail::Input::bytes;
    constexpr int of_row = row_pitch / input_width;
    constexpr int lanes = of_row < 32 ? of_row : 32;  // of a row
    constexpr int rows = 32 / lanes;
    const Origin o = origin_of(tile);
    const int own_row = warp.lane / lanes, own = warp.lane - own_row * lanes;
    if (own_row >= rows) return;
    // With few vectors all loops are unrolled: the bounds of a row are tested once for all channels.
    constexpr int rows_at_once = (window_y + rows - 1) / rows;
    constexpr bool all_at_once =
        (of_row + lanes - 1) / lanes * rows_at_once * Numbers::window_z * C::in_channels <= 32;
#pragma unroll
    for (int v = 0; v < of_row; v += lanes) {
      if (of_row % lanes != 0 && own + v >= of_row) break;
      const int x = o.x - lead + (own + v) * input_width;
      const int left = static_cast<int>(C::input_size(2)) - x;
      const int of_vector = x < 0 || left <= 0 ? 0 : left < input_width ? left * bytes : 16;
      const char* channel = o.from + ((own + v) * input_width - lead + own_row * C::input_stride(3)) * bytes;
      const int to = own_row * row_pitch + (own + v) * input_width;
#pragma unroll(all_at_once ? static_cast <int>(C::in_channels) : 1)
      for (int c = 0; c < C::in_channels; ++c) {
#pragma unroll(all_at_once ? Numbers::window_z : 1)
        for (int z = 0; z < Numbers::window_z; ++z) {
          const int of_plane = has(o.z + z, C::input_size(0)) ? of_vector : 0;
#pragma unroll(all_at_once ? rows_at_once : 4)
          for (int i = 0; i < rows_at_once; ++i) {
            const int y = i * rows;
            if (y + rows > window_y && y + own_row >= window_y) continue;
            body(
                to + c * plane_to + (z * window_y + y) * row_pitch,
                has(o.y + y + own_row, C::input_size(1)) ? of_plane : 0,
                channel + (c * C::input_stride(1) + z * C::input_stride(2) + y * C::input_stride(3)) * bytes);
          }
        }
      }
    }
  }
  static __device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
  }
  // Whether rows of the input are vectors: the same in all threads.
  __device__ __forceinline__ bool by_vectors() const {
    return Numbers::rows_are_vectors && reinterpret_cast<uint64>(warp.p.input) % 16 == 0;
  }

  // Padding of the window is zero at all times.
  __device__ __forceinline__ void clear() const {
    for (int i = warp.lane; i < windows * window_words; i += 32) warp.area.x[i] = 0.0f;
    __syncwarp();
  }

  __device__ __forceinline__ unsigned char* raw() const {
    return prefetches ? reinterpret_cast<unsigned char*>(warp.area.raw) : warp.area.stage;
  }

  // Starts the copy of a tile's window; no lane reads the old one any more. Positions outside the input
  // become zeros.
  __device__ __forceinline__ void send_for(const Tile& tile, float* x) const {
    if (by_vectors()) {
      for_each_vector<is_short ? raw_plane : plane>(tile, [&](int to, int bytes, const char* from) {
        const void* place = is_short ? static_cast<const void*>(raw() + to * 2) : x + to;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(place)), "l"(from),
                     "r"(bytes)
                     : "memory");
      });
    } else if constexpr (!is_short) {
      for_each_position(tile, [&](int to, bool inside, const char* from) {
        const int bytes = inside ? 4 : 0;
#pragma unroll
        for (int c = 0; c < C::in_channels; ++c) {
          asm volatile(
              "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(x + c * plane + to)),
              "l"(from + c * C::input_stride(1) * 4), "r"(bytes)
              : "memory");
        }
      });
    }
  }

  // Waits for the window, converts it, and says how the tile is computed.
  __device__ __forceinline__ Way take(const Tile& tile, const Limits& limits, float* x) const {
    float largest = 0.0f;
    if (is_short && !by_vectors()) {
      for_each_position(tile, [&](int to, bool inside, const char* from) {
#pragma unroll
        for (int c = 0; c < C::in_channels; ++c) {
          float value = 0.0f;
          if (inside) value = load_one<typename Tail::Input>(from, c * C::input_stride(1));
          largest = pointwise::maximum(fabsf(value), largest);
          x[c * plane + to] = value;
        }
      });
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncwarp();
      const auto take = [&](const void* from, float* to) {
        float v[input_width];
        Packed<typename Tail::Input, input_width> packed;
        packed.load_shared(from);
        packed.unpack(v);
#pragma unroll
        for (int k = 0; k < input_width; ++k) {
          largest = pointwise::maximum(fabsf(v[k]), largest);
          if constexpr (C::rounds_to_tf32) v[k] = round_operand<C>(v[k]);
        }
        if constexpr (is_short || C::rounds_to_tf32) {
#pragma unroll
          for (int k = 0; k < input_width; k += 4)
            *reinterpret_cast<float4*>(to + k) = float4{v[k], v[k + 1], v[k + 2], v[k + 3]};
        }
      };
      if constexpr (is_short && plane == raw_plane) {
        // Lanes behind the end take the last vector again: no branches.
        constexpr int last = window_words - input_width;
#pragma unroll 1
        for (int first = 0; first < window_words; first += 32 * input_width) {
          const int i = first + warp.lane * input_width < last ? first + warp.lane * input_width : last;
          take(raw() + i * 2, x + i);
        }
      } else if constexpr (is_short) {
#pragma unroll 1
        for (int c = 0; c < C::in_channels; ++c) {
#pragma unroll 2
          for (int i = warp.lane * 8; i < raw_plane; i += 32 * 8)
            take(raw() + (c * raw_plane + i) * 2, x + c * plane + i);
        }
      } else {
#pragma unroll 2
        for (int i = warp.lane * 4; i < window_words; i += 32 * 4) take(x + i, x + i);
      }
    }
    __syncwarp();
    if (Chains::narrows && __all_sync(0xffffffffu, largest <= limits.narrow)) return narrow;
    return __all_sync(0xffffffffu, largest <= limits.wide) ? wide : careful;
  }
};

// --------------------------------------------------------------------------------------------------
// Products by mma.sync: columns of the window times weights, and the outputs that their sums belong to.

// Elements of the window for a group's terms, of the lane's cells.
template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Columns {
  static constexpr int box_z = Terms::reach(0) + 1, box_y = Terms::reach(1) + 1, box_x = Terms::reach(2) + 1;
  static constexpr bool preloads =
      classes_z * classes_y > 1 && Terms::taps_at_once == 1 && vectors* box_z* box_y* box_x* spans <= 32;
  const float* base[patterns];  // where the lane's terms of a group lie that begins with the window
  float value[preloads ? vectors * box_z * box_y * box_x : 1][spans];

  static __device__ __forceinline__ constexpr int place(const Term& t) {
    return ((t.channel / 4 * box_z + t.z) * box_y + t.y) * box_x + t.x;
  }
  static __device__ __forceinline__ constexpr int word_of(const Term& t, int span) {
    return Patterns::word(t) + span / spans_x * static_cast<int>(C::step(1)) * row_pitch +
           span % spans_x * 8 * static_cast<int>(C::step(2));
  }
  template <int rz, int ry, int rx, int group>
  __device__ __forceinline__ float at(int span) const {
    constexpr Term t = Terms::term(rz, ry, rx, group, 0);
    if constexpr (preloads) {
      return value[place(t)][span];
    } else {
      constexpr int pattern = table_of<Patterns>.find(rz, ry, rx, group);
      return base[pattern][word_of(t, span)];
    }
  }
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Products {
  const Warp warp;
  const Weights weights{warp};

  __device__ __forceinline__ Columns columns_of(const Fragments& w, int y, int column) const {
    Columns c;
    const float* base = w.window + lead + y * static_cast<int>(C::step(1)) * row_pitch +
                        (column * spans_x * 8 + warp.quad) * static_cast<int>(C::step(2));
    for_constant<patterns>([&](auto i_) {
      constexpr int i = decltype(i_)::value;
      c.base[i] = base + (warp.in_quad == 0   ? 0
                          : warp.in_quad == 1 ? table_of<Patterns>.distance[i][1]
                          : warp.in_quad == 2 ? table_of<Patterns>.distance[i][2]
                                              : table_of<Patterns>.distance[i][3]);
    });
    if constexpr (Columns::preloads) {
      for_constant<vectors * Columns::box_z * Columns::box_y * Columns::box_x>([&](auto i_) {
        constexpr int i = decltype(i_)::value;
        constexpr int vector = i / (Columns::box_x * Columns::box_y * Columns::box_z);
        constexpr int all = C::in_channels;
        // The last group of input channels may have fewer than four, at other distances.
        constexpr int pattern = vector == vectors - 1 && all % 4 != 0 ? patterns - 1 : 0;
#pragma unroll
        for (int span = 0; span < spans; ++span)
          c.value[i][span] = c.base[pattern][Columns::word_of(
              Term{true, i / (Columns::box_x * Columns::box_y) % Columns::box_z,
                   i / Columns::box_x % Columns::box_y, i % Columns::box_x, 0, vector * 4},
              span)];
      });
    }
    return c;
  }

  template <int rz, int ry, class HeldWeights = NotHeld>
  __device__ __forceinline__ void convolve(Sums& sum, const Fragments& w, const Columns& c,
                                           const HeldWeights& held = {}) const {
    for_constant<classes_x>([&](auto rx_) {
      constexpr int rx = decltype(rx_)::value;
      constexpr int first = Terms::products_before(rz, ry, rx);
      constexpr int groups = Terms::groups(rz, ry, rx);
      if constexpr (groups == 0) {
#pragma unroll
        for (int k = 0; k < spans * 4; ++k) sum[rx][k / 4][k % 4] = w.bias[k % 4];
      } else if constexpr (splits) {
        convolve_split<rz, ry, rx>(sum, w, c, held);
      } else {
        for_constant<(groups + 1) / 2>([&](auto i_) {
          constexpr int i = decltype(i_)::value;
          constexpr bool both = 2 * i + 1 < groups;
          uint32 b[spans][2];
#pragma unroll
          for (int span = 0; span < spans; ++span) {
            b[span][0] = __float_as_uint(c.template at<rz, ry, rx, 2 * i>(span));
            if constexpr (both) b[span][1] = __float_as_uint(c.template at<rz, ry, rx, 2 * i + 1>(span));
          }
          uint32 a[4];
          weights.template take_weights<false>(a, w, held, first + i);
#pragma unroll
          for (int span = 0; span < spans; ++span) {
            float(&d)[4] = sum[rx][span];
            if constexpr (both) {
              mma_k8(d, a, b[span][0], b[span][1], i == 0 ? w.bias : d);
            } else {
              mma_k4(d, a, b[span][0], i == 0 ? w.bias : d);
            }
          }
        });
      }
    });
  }

  // The same where x = x1 + x2 and w = w1 + w2. Small products are added before large ones where columns are
  // in registers, else in sums of their own. The tensor core truncates its sums: it adds at most 64 terms.
  template <int rz, int ry, int rx, class HeldWeights>
  __device__ __forceinline__ void convolve_split(Sums& sum, const Fragments& w, const Columns& c,
                                                 const HeldWeights& held) const {
    constexpr int first = Terms::products_before(rz, ry, rx);
    constexpr int groups = Terms::groups(rz, ry, rx);
    constexpr int count = (groups + 1) / 2;
    constexpr int at_once = 8;
    constexpr bool in_turn = Columns::preloads;
    const float zero[4] = {};
    for_constant<(count + at_once - 1) / at_once>([&](auto part_) {
      constexpr int part = decltype(part_)::value;
      constexpr int here = count - part * at_once < at_once ? count - part * at_once : at_once;
      float large[spans][4], small[spans][4];
      for_constant<(in_turn ? 2 : 1) * here>([&](auto j_) {
        constexpr int j = decltype(j_)::value % here;
        constexpr bool takes_small = decltype(j_)::value < here;
        constexpr bool takes_large = !in_turn || !takes_small;
        constexpr int i = part * at_once + j;
        constexpr bool both = 2 * i + 1 < groups;
        uint32 a[4], a_rest[4];
        weights.template take_weights<false>(a, w, held, first + i);
        if constexpr (takes_small) weights.template take_weights<true>(a_rest, w, held, first + i);
#pragma unroll
        for (int span = 0; span < spans; ++span) {
          uint32 b[2], b_rest[2];
          b[0] = Weights::operand(c.template at<rz, ry, rx, 2 * i>(span));
          b_rest[0] = Weights::rest(c.template at<rz, ry, rx, 2 * i>(span));
          if constexpr (both) {
            b[1] = Weights::operand(c.template at<rz, ry, rx, 2 * i + 1>(span));
            b_rest[1] = Weights::rest(c.template at<rz, ry, rx, 2 * i + 1>(span));
          }
          float(&d)[4] = large[span];
          float(&e)[4] = in_turn ? large[span] : small[span];
          const auto multiply = [&](float(&to)[4], const uint32(&weights)[4], const uint32(&x)[2],
                                    const float* from) {
            if constexpr (both) {
              mma_k8(to, weights, x[0], x[1], from);
            } else {
              mma_k4(to, weights, x[0], from);
            }
          };
          const float* start = part == 0 ? w.bias : zero;
          if constexpr (takes_small) {
            multiply(e, a, b_rest, j > 0 ? e : in_turn ? start : zero);
            multiply(e, a_rest, b, e);
          }
          if constexpr (takes_large) multiply(d, a, b, j > 0 || in_turn ? d : start);
        }
      });
#pragma unroll
      for (int k = 0; k < spans * 4; ++k) {
        const float both = in_turn ? large[k / 4][k % 4] : large[k / 4][k % 4] + small[k / 4][k % 4];
        float& to = sum[rx][k / 4][k % 4];
        to = part == 0 ? both : to + both;
      }
    });
  }

  // The first of the lane's two neighbouring cells in a span of an item.
  __device__ __forceinline__ int cell_of(const Tile& tile, int column, int span) const {
    return tile.x + (column * spans_x + span % spans_x) * 8 + 2 * warp.in_quad;
  }
  // Whether the lane's element (cell 2 in_quad + i of the last span, class rx) can lie beyond the row's end.
  static constexpr __device__ bool may_end(int i, int rx) {
    return ((Numbers::tiles_x * columns * spans_x - 1) * 8 + 6 + i) * classes_x + rx >= out_x;
  }
  static __device__ __forceinline__ bool ends(int cell, int i, int rx) {
    return may_end(i, rx) && (cell + i) * classes_x + rx >= out_x;
  }
  // Whether the output has a class of a plane, and of a row of cells.
  static __device__ __forceinline__ bool has_plane(const Tile& tile, int rz) {
    return out_z % classes_z == 0 || tile.z * classes_z + rz < out_z;
  }
  static __device__ __forceinline__ bool has_row(const Tile& tile, int y, int ry) {
    if (out_y % classes_y == 0 && cells_y % spans_y == 0) return true;
    return (ry == 0 && spans_y == 1) || (tile.y + y) * classes_y + ry < out_y;
  }
  static __device__ __forceinline__ int rows_of(const Tile& tile) {
    return cells_y - tile.y < tile_y ? cells_y - tile.y : tile_y;
  }
  static __device__ __forceinline__ int items_of(int rows) {
    return (rows + spans_y - 1) / spans_y * columns;
  }

  // body(half of the 16 channels, class of x, span, sums of two neighbouring cells) for all of a lane's sums.
  template <class Body>
  static __device__ __forceinline__ void for_each_pair(Sums& sum, Body&& body) {
    for_constant<spans * classes_x * halves>([&](auto k_) {
      constexpr int k = decltype(k_)::value;
      constexpr int half = k % halves;
      constexpr int rx = k / halves % classes_x;
      constexpr int span = k / halves / classes_x;
      body(Constant<half>{}, Constant<rx>{}, Constant<span>{}, sum[rx][span] + half * 2);
    });
  }

  // body(class of y, half, class of x, span, sums of two cells, whether their row exists) for all sums of an
  // item of one class of z.
  template <int rz, class Body>
  __device__ __forceinline__ void for_each_sum(const Fragments& w, const Held<rz>& held, const Tile& tile,
                                               int y, int column, Body&& body) const {
    const Columns c = columns_of(w, y, column);
    for_constant<classes_y>([&](auto ry) {
      bool exists[spans_y];
#pragma unroll
      for (int i = 0; i < spans_y; ++i) exists[i] = has_row(tile, y + i, ry);
      Sums sum;
      convolve<rz, decltype(ry)::value>(sum, w, c, held);
      for_each_pair(sum, [&](auto half, auto rx, auto span, float* pair) {
        body(ry, half, rx, span, pair, exists[span / spans_x]);
      });
    });
  }
};

// --------------------------------------------------------------------------------------------------
// The moments of a tile's channels, by sums of distances from a pivot.

// Sums of distances from a pivot, which is the quad's first value of the channel.
template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Distances {
  float pivot[halves] = {};
  float sum[halves] = {};
  float square[halves] = {};

  __device__ __forceinline__ void add(int half, float distance) {
    sum[half] += distance;
    square[half] = fmaf(distance, distance, square[half]);
  }
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::TileMoments {
  const Warp warp;
  const Weights weights{warp};
  const Products products{warp};

  template <Way way>
  __device__ __forceinline__ void begin(Distances& own, const Fragments& w, const Columns& c,
                                        const Operands<Before>& operands) const {
    Sums sum;
    products.template convolve<0, 0>(sum, w, c);
    for_constant<halves>([&](auto half) {
      float* pair = sum[0][0] + half * 2;
      Chains::template before<way, Chains::swish_terms(0, 0, 0)>(pair[0], pair[1], operands.row[half]);
      own.pivot[half] = __shfl_sync(0xffffffffu, pair[0], warp.lane & ~3);
    });
  }

  // An item's outputs of one class of z.
  template <Way way, int rz>
  __device__ __forceinline__ void add(Distances& own, const Fragments& w, const Held<rz>& held,
                                      const Operands<Before>& operands, const Tile& tile, int y,
                                      int column) const {
    products.for_each_sum(w, held, tile, y, column,
                          [&](auto ry, auto half, auto rx, auto span, float* pair, bool exists) {
                            Chains::template before<way, Chains::swish_terms(rz, ry, rx)>(
                                pair[0], pair[1], operands.row[half], own.pivot[half]);
#pragma unroll
                            for (int i = 0; i < 2; ++i) {
                              Chains::compute_here(pair[i]);
                              if (!exists || Products::ends(products.cell_of(tile, column, span), i, rx))
                                continue;
                              own.add(half, pair[i]);
                            }
                          });
  }

  // How many outputs of a channel the lane has in a tile.
  __device__ __forceinline__ int count_of(const Tile& tile) const {
    int of_row = 0;
#pragma unroll 1
    for (int column = 0; column < columns; ++column) {
#pragma unroll
      for (int k = 0; k < spans_x * classes_x * 2; ++k)
        of_row +=
            !Products::ends(products.cell_of(tile, column, k / 2 / classes_x), k % 2, k / 2 % classes_x);
    }
    const int left_z = out_z - tile.z * classes_z, left_y = out_y - tile.y * classes_y;
    return (left_z < classes_z ? left_z : classes_z) *
           (left_y < tile_y * classes_y ? left_y : tile_y * classes_y) * of_row;
  }

  template <Way way>
  __device__ __forceinline__ void measure(const Tile& tile, Fragments& w) const {
    const int items = Products::items_of(Products::rows_of(tile));
    const float count = lanes_sum<4>(static_cast<float>(count_of(tile)));
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (row_tiles > 1) weights.load_weights(w, m);
      Operands<Before> operands;
      operands.load(warp.p, tile.n, m, warp.quad);
      Distances own;
      begin<way>(own, w, products.columns_of(w, 0, 0), operands);
      for_constant<classes_z>([&](auto rz_) {
        constexpr int rz = decltype(rz_)::value;
        if (!Products::has_plane(tile, rz)) return;
        const Held<rz> held = weights.template hold_weights<rz>(w);
#pragma unroll 1
        for (int item = 0; item < items; ++item)
          add<way, rz>(own, w, held, operands, tile, item / columns * spans_y, item % columns);
      });
      store_moments(own, m, count);
    }
  }

  __device__ __forceinline__ void store_moments(const Distances& own, int m, float count) const {
    const float per_element = 1.0f / count;
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      const float sum = lanes_sum<4>(own.sum[half]);
      const float square = lanes_sum<4>(own.square[half]);
      if (warp.in_quad == 0) {
        float* to = warp.area.moments[m * 16 + row_channel(half, warp.quad)];
        to[0] = count;
        to[1] = fmaf(sum, per_element, own.pivot[half]);
        to[2] = fmaf(-sum, sum * per_element, square);
      }
    }
  }
};

// --------------------------------------------------------------------------------------------------
// Stores rows that a warp has put together in shared memory, in whole sectors.

// The bits of an element.
template <int Bytes>
struct Bits {
  using Type = uint32;
};

template <>
struct Bits<2> {
  using Type = uint16;
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Send {
  const Warp warp;

  // The phase of a channel whose channel 0 goes to `to`: elements from the last 16-byte boundary.
  static __device__ __forceinline__ int phase(const char* to, int channel) {
    return static_cast<int>((static_cast<uint32>(reinterpret_cast<uint64>(to)) / Output::bytes +
                             static_cast<uint32>(channel) * static_cast<uint32>(Tail::spatial % width)) %
                            width);
  }

  // The sector at either end of a chunk:
  // own     part of a sector that no other chunk writes; stored element by element
  // others  another chunk writes it
  // shared  written here as a whole: the rest is kept from the chunk before, or computed as well
  enum Side { own, others, shared };

  // Sends a chunk: `lanes_of_chunk` lanes for each channel, a vector a lane, whole sectors. (L2 takes several
  // times as long for parts of a sector.) The chunk lies one vector behind the begin of the stage, where the
  // rest of the chunk before is kept.
  static constexpr int most_vectors = (sector - 1 + chunk_elements) / sector * 2;
  static constexpr int lanes_of_chunk = 8;
  static constexpr int at_once = 32 / lanes_of_chunk;
  // Phases repeat after `period` channels: few addresses serve all channels.
  static constexpr int period = Tail::spatial % sector == 0       ? 1
                                : Tail::spatial * 2 % sector == 0 ? 2
                                : Tail::spatial * 4 % sector == 0 ? 4
                                : Tail::spatial * 8 % sector == 0 ? 8
                                                                  : 16;
  static constexpr int residues = period > at_once ? period / at_once : 1;

  // The vectors of a chunk, counted from the one in which it begins.
  struct Vectors {
    int odd;    // the first is the second of its sector
    int shift;  // elements before the chunk's first
    int end;    // elements up to the chunk's end
    __device__ __forceinline__ Vectors(uint64 at, int length)
        : odd(static_cast<int>(at / 16 % 2)),
          shift(static_cast<int>(at % 16) / Output::bytes),
          end(shift + length) {}
    // Vector of the first sector that begins in the chunk.
    __device__ __forceinline__ int first_whole() const { return shift == 0 && odd == 0 ? 0 : 2 - odd; }
    // Vector behind the last sector that ends in the chunk.
    __device__ __forceinline__ int last_whole() const { return ((odd + end / width) & ~1) - odd; }
    __device__ __forceinline__ bool ends_within() const { return (odd * width + end) % sector != 0; }
  };

  // `count`: channels.
  template <class Values>
  __device__ __forceinline__ void send(unsigned char* stage, char* to, int count, int length, Side begin,
                                       Side end) const {
    const int sub = warp.lane / lanes_of_chunk;
    const int vector = warp.lane % lanes_of_chunk;  // from the sector in which the chunk begins
    const char* first = to + sub * Tail::spatial * Output::bytes;
    const unsigned char* from = stage + sub * channel_pitch * Output::bytes + 16 + vector * 16;
    // A lane stores its sector where it ends within the chunk: where the phase is at least this.
    const int least = (vector / 2 + 1) * 32 - length * Output::bytes;
    const bool takes_first = begin == shared || vector >= 2;
#pragma unroll
    for (int j = 0; j < residues; ++j) {
      const uint64 at = reinterpret_cast<uint64>(first + j * at_once * Tail::spatial * Output::bytes);
      const int phase = static_cast<int>(at) & 31;
      uint64 place = at - phase + vector * 16;
      asm volatile("" : "+l"(place));  // keeps one address in registers instead of one for each offset
      const unsigned char* from_vector = from - (phase & 16);
      const bool takes = takes_first || phase == 0;
      constexpr int in_flight = 4;
#pragma unroll
      for (int first_v = 0; first_v * lanes_of_chunk < most_vectors; first_v += in_flight) {
#pragma unroll
        for (int k = j * at_once; k < staged_channels; k += residues * at_once) {
          if (channels % (row_tiles > 1 ? 16 : at_once) != 0 && k + sub >= count) continue;
          const int64 ahead = static_cast<int64>(k - j * at_once) * Tail::spatial * Output::bytes;
          // Loads all vectors, also those that are not stored: it is the warp's own memory, and loads do not
          // wait for the test.
          uint4 data[in_flight];
#pragma unroll
          for (int i = 0; i < in_flight; ++i) {
            if ((first_v + i) * lanes_of_chunk < most_vectors)
              data[i] = *reinterpret_cast<const uint4*>(from_vector + k * channel_pitch * Output::bytes +
                                                        (first_v + i) * lanes_of_chunk * 16);
          }
#pragma unroll
          for (int i = 0; i < in_flight; ++i) {
            const int v = first_v + i;
            if (v * lanes_of_chunk >= most_vectors || phase < least + v * lanes_of_chunk * 16 ||
                (v == 0 && !takes))
              continue;
            Values::store(reinterpret_cast<void*>(place + ahead + v * lanes_of_chunk * 16), data[i]);
          }
        }
      }
    }
    // Two lanes for each channel store the ends.
    const int channel = warp.lane / 2;
    const uint64 at = reinterpret_cast<uint64>(to + channel * Tail::spatial * Output::bytes);
    const Vectors vectors(at, length);
    unsigned char* of_channel = stage + channel * channel_pitch * Output::bytes + 16;
    const int behind = vectors.last_whole();
    if (begin == own || end == own) {
      if (channel < count) {
        const bool is_end = warp.lane % 2 == 1;
        const int least = begin == shared ? -vectors.odd * width : vectors.shift;
        int i = is_end ? behind * width : vectors.shift;
        int stop = is_end ? vectors.end : vectors.first_whole() * width;
        if (i < least) i = least;
        if (stop > vectors.end) stop = vectors.end;
        if (is_end && begin == own && i < vectors.first_whole() * width) i = vectors.first_whole() * width;
        if ((is_end ? end : begin) != own) stop = i;
        using Element = typename Bits<Output::bytes>::Type;
        const auto* source = reinterpret_cast<const Element*>(of_channel);
        auto* goal = reinterpret_cast<Element*>(at) - vectors.shift;
#pragma unroll 1
        for (; i < stop; ++i) goal[i] = source[i];
      }
    }
    if (end == shared && overlaps) {
      const int vector = behind + warp.lane % 2;
      if (channel < count && vectors.ends_within())
        Values::store(reinterpret_cast<void*>((at & ~static_cast<uint64>(15)) + vector * 16),
                      *reinterpret_cast<const uint4*>(of_channel + vector * 16));
    } else if (end == others) {
      __syncwarp();
      uint4 rest;
      // The next chunk begins in the vector in which this one ends, or in the one behind.
      const int vector = vectors.end / width - warp.lane % 2;
      if (channel < count) rest = *reinterpret_cast<const uint4*>(of_channel + vector * 16);
      __syncwarp();
      if (channel < count) *reinterpret_cast<uint4*>(of_channel - warp.lane % 2 * 16) = rest;
    }
  }
};

// --------------------------------------------------------------------------------------------------
// The outputs of a tile, from products to memory: stored as they are computed, or put together as rows first.
//
// `Values` says what becomes of a value behind the before-chain (HoldByRecomputing, HoldInOutput):
//   before                          operands of the before-chain
//   begin<way, rz, ry>(sums)        sees an item's sums before the chain
//   finish(half, x, is_own)         the value to store. `is_own` marks values that are the tile's: once each.
//                                   Values of a neighbouring tile, or beyond the output, are computed too.
//   sample(p, n), index(channel, z, y, x), row_stride, channel_stride: where values go
//   store_piece(packed, to, index, aligned), store(to, vector): how they are stored

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Outputs {
  const Warp warp;
  const Weights weights{warp};
  const Products products{warp};
  const Send send{warp};

  // body(half, class of x, span, values before the norm of two cells) for an item's sums of a class of z and
  // y.
  template <Way way, int rz, int ry, class Values, class Body>
  __device__ __forceinline__ void for_each_value(Sums& sum, const Fragments& w, const Columns& c,
                                                 const Held<rz>& held, Values& values, Body&& body) const {
    products.template convolve<rz, ry>(sum, w, c, held);
    values.template begin<way, rz, ry>(sum);
    Products::for_each_pair(sum, [&](auto half, auto rx, auto span, float* pair) {
      Chains::template before<way, Chains::swish_terms(rz, ry, rx)>(pair[0], pair[1],
                                                                    values.before.row[half]);
      body(half, rx, span, pair);
    });
  }

  // Stores an item's outputs as they are computed. `to`: channel 16 m in the tile's first row and column.
  // `piece` neighbours of a lane are one vector of memory where `aligned`.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void store(const Tile& tile, const Fragments& w, const Held<rz>& held,
                                        Values& values, int y, int column, char* to, int count,
                                        bool aligned) const {
    const Columns c = products.columns_of(w, y, column);
    char* lane_to = to + (warp.quad * Values::channel_stride + y * classes_y * Values::row_stride +
                          (column * spans_x * 8 + 2 * warp.in_quad) * classes_x) *
                             Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      Sums sum;
      products.template convolve<rz, ry>(sum, w, c, held);
      values.template begin<way, rz, ry>(sum);
      for_constant<spans * halves>([&](auto k_) {
        constexpr int span = decltype(k_)::value / halves;
        constexpr int half = decltype(k_)::value % halves;
        constexpr int neighbours = 2 * classes_x;
        float value[neighbours];
        const bool exists = Products::has_row(tile, y + span / spans_x, ry);
        for_constant<classes_x>([&](auto rx) {
          float* pair = sum[rx][span] + half * 2;
          Chains::template before<way, Chains::swish_terms(rz, ry, rx)>(pair[0], pair[1],
                                                                        values.before.row[half]);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            value[i * classes_x + rx] = values.finish(
                half, pair[i], exists && !Products::ends(products.cell_of(tile, column, span), i, rx));
        });
        const bool in_range = (channels % 16 == 0 || half * 8 + warp.quad < count) && exists;
        char* place = lane_to + (half * 8 * Values::channel_stride +
                                 (span / spans_x * classes_y + ry) * Values::row_stride +
                                 span % spans_x * 8 * classes_x) *
                                    Output::bytes;
        constexpr int piece = Numbers::piece > 0 ? Numbers::piece : 1;
#pragma unroll
        for (int k = 0; k < neighbours; k += piece) {
          float own[piece];
#pragma unroll
          for (int i = 0; i < piece; ++i) own[i] = value[k + i];
          Packed<Output, piece> packed;
          packed.pack(own);
          if (in_range && !Products::ends(products.cell_of(tile, column, span), k / classes_x, k % classes_x))
            Values::store_piece(packed, place, k, aligned);
        }
      });
    });
  }

  // The same where channels lie after space. A lane's two channels of a position are neighbours, and eight
  // lanes have whole sectors.
  template <Way way, int rz, bool aligned, class Values>
  __device__ __forceinline__ void store_interleaved(const Tile& tile, const Fragments& w,
                                                    const Held<rz>& held, Values& values, int y, int column,
                                                    char* to, int count) const {
    const Columns c = products.columns_of(w, y, column);
    char* lane_to =
        to + ((y * classes_y * out_x + (column * spans_x * 8 + 2 * warp.in_quad) * classes_x) * channels +
              row_channel(0, warp.quad)) *
                 Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      Sums sum;
      for_each_value<way, rz, ry>(sum, w, c, held, values, [&](auto half, auto rx, auto span, float* pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          pair[i] = values.finish(half, pair[i],
                                  Products::has_row(tile, y + span / spans_x, ry) &&
                                      !Products::ends(products.cell_of(tile, column, span), i, rx));
          Chains::compute_here(pair[i]);
        }
      });
      for_constant<spans * 2 * classes_x>([&](auto k_) {
        constexpr int k = decltype(k_)::value;
        constexpr int rx = k % classes_x;
        constexpr int i = k / classes_x % 2;
        constexpr int span = k / classes_x / 2;
        constexpr int piece = Numbers::piece > 0 ? Numbers::piece : 1;  // of the halves
        const bool has_position = Products::has_row(tile, y + span / spans_x, ry) &&
                                  !Products::ends(products.cell_of(tile, column, span), i, rx);
        char* place = lane_to + ((span / spans_x * classes_y + ry) * out_x +
                                 (span % spans_x * 8 + i) * classes_x + rx) *
                                    channels * Output::bytes;
#pragma unroll
        for (int half = 0; half < halves; half += piece) {
          float own[piece];
#pragma unroll
          for (int j = 0; j < piece; ++j) own[j] = sum[rx][span][(half + j) * 2 + i];
          Packed<Output, piece> packed;
          packed.pack(own);
          if (!has_position || (channels % 16 != 0 && row_channel(half, warp.quad) >= count)) continue;
          if constexpr (piece == 2 && aligned) {
            if constexpr (Output::bytes == 4) {
              Values::store(place, uint2{packed.word[0], packed.word[1]});
            } else {
              Values::store(place, packed.word[0]);
            }
            continue;
          }
          packed.store(place, row_channel(half, 0), aligned);
        }
      });
    });
  }

  // Puts an item's outputs of one class of z into the warp's stage, from row `row` of cells on. `start` is
  // the phase of the lane's channel in the stage's first row. It is the same 8 channels further: a vector has
  // 4 or 8 elements.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void put(const Tile& tile, const Fragments& w, const Held<rz>& held,
                                      Values& values, int y, int column, int row, int start) const {
    const Columns c = products.columns_of(w, y, column);
    const bool is_own = !overlaps || whole_rows || column < columns;
    unsigned char* lane_stage =
        warp.area.stage +
        (warp.quad * channel_pitch + (column * spans_x * 8 + 2 * warp.in_quad) * classes_x) * Output::bytes;
    for_constant<classes_y>([&](auto ry_) {
      constexpr int ry = decltype(ry_)::value;
      unsigned char* to[spans_y];
#pragma unroll
      for (int i = 0; i < spans_y; ++i) {
        const int chunk = (row + i) * classes_y + ry;
        to[i] = lane_stage + (width + (whole_rows ? start + chunk * out_x
                                                  : (start + chunk * out_x) % width + chunk * chunk_pitch)) *
                                 Output::bytes;
      }
      Sums sum;
      for_each_value<way, rz, ry>(sum, w, c, held, values, [&](auto half, auto rx, auto span, float* pair) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool ends_before = Products::ends(products.cell_of(tile, column, span), i, rx);
          float value = values.finish(
              half, pair[i], is_own && Products::has_row(tile, y + span / spans_x, ry) && !ends_before);
          Chains::compute_here(value);
          // A row of cells that lies partly beyond the output is the last of its chunk. Elements behind the
          // end of a chunk and channels beyond the last are not sent.
          const bool in_range = staged_channels % 8 == 0 || half * 8 + warp.quad < staged_channels;
          if (in_range && !ends_before)
            store_one<Output>(to[span / spans_x],
                              half * 8 * channel_pitch + (span % spans_x * 8 + i) * classes_x + rx, value);
        }
      });
    });
  }

  // Items that cover a sector.
  static constexpr int more_columns = (sector + 8 * spans_x * classes_x - 1) / (8 * spans_x * classes_x);

  // The first outputs of the row of cells after the tile, for the sector in which its last row ends.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void put_next(const Fragments& w, const Held<rz>& held, Values& values, int rows,
                                           int start) const {
    unsigned char* to =
        warp.area.stage +
        (warp.quad * channel_pitch + width + start + rows * classes_y * out_x) * Output::bytes;
#pragma unroll 1
    for (int column = 0; column < more_columns; ++column) {
      Sums sum;
      products.template convolve<rz, 0>(sum, w, products.columns_of(w, tile_y, column), held);
      for_constant<spans_x * classes_x * halves>([&](auto k_) {
        constexpr int half = decltype(k_)::value % halves;
        constexpr int rx = decltype(k_)::value / halves % classes_x;
        constexpr int span = decltype(k_)::value / halves / classes_x;
        float* pair = sum[rx][span] + half * 2;
        Chains::template before<way, Chains::swish_terms(rz, 0, rx)>(pair[0], pair[1],
                                                                     values.before.row[half]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float value = values.finish(half, pair[i], false);
          Chains::compute_here(value);
          const bool in_range = staged_channels % 8 == 0 || half * 8 + warp.quad < staged_channels;
          const int x = ((column * spans_x + span) * 8 + 2 * warp.in_quad + i) * classes_x + rx;
          if (in_range && x < sector - 1) store_one<Output>(to, half * 8 * channel_pitch + x, value);
        }
      });
    }
  }

  // One class of z, channels 16 m and on.
  template <Way way, int rz, class Values>
  __device__ __forceinline__ void write_plane(const Tile& tile, const Fragments& w, Values& values,
                                              int m) const {
    const int z = tile.z * classes_z + rz;
    char* to = Values::sample(warp.p, tile.n) +
               Values::index(m * 16, z, tile.y * classes_y, tile.x * classes_x) * Output::bytes;
    const int count = row_tiles == 1 || channels - m * 16 < 16 ? channels - m * 16 : 16;
    const int all_rows = Products::rows_of(tile);
    const Held<rz> held = weights.template hold_weights<rz>(w);
    if constexpr (is_direct) {
      const bool aligned =
          reinterpret_cast<uint64>(Values::sample(warp.p, tile.n)) % (Numbers::piece * Output::bytes) == 0;
      const int items = Products::items_of(all_rows);
      if constexpr (!interleaved) {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store<way, rz>(tile, w, held, values, i / columns * spans_y, i % columns, to, count, aligned);
      } else if (aligned) {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store_interleaved<way, rz, true>(tile, w, held, values, i / columns * spans_y, i % columns, to,
                                           count);
      } else {
#pragma unroll 1
        for (int i = 0; i < items; ++i)
          store_interleaved<way, rz, false>(tile, w, held, values, i / columns * spans_y, i % columns, to,
                                            count);
      }
      return;
    }
    // Consecutive rows share a sector where a row has at least a sector of elements.
    constexpr bool carries = whole_rows && out_x >= sector;
    const bool is_last = whole_rows ? tile.y + tile_y >= cells_y : tile.x + tile_x >= cells_x;
    const bool is_first = whole_rows ? tile.y == 0 : tile.x == 0;
    const typename Send::Side head = overlaps && !is_first ? Send::others : Send::own;
    const typename Send::Side tail = overlaps && !is_last ? Send::shared : Send::own;
    const int all_columns = columns + (overlaps && !whole_rows && !is_last ? more_columns : 0);
#pragma unroll 1
    for (int y = 0; y < all_rows; y += stage_y) {
      const int start = Send::phase(to, warp.quad);
      const int rows = all_rows - y < stage_y ? all_rows - y : stage_y;
#pragma unroll 1
      for (int row = 0, column = 0; row < rows;) {
        put<way, rz>(tile, w, held, values, y + row, column, row, start);
        if (++column == all_columns) column = 0, row += spans_y;
      }
      const bool ends_tile = y + stage_y >= all_rows;
      if constexpr (overlaps && whole_rows) {
        if (ends_tile && !is_last) put_next<way, rz>(w, held, values, rows, start);
      }
      __syncwarp();
      const int out_row = (tile.y + y) * classes_y;
      const int out_rows = out_y - out_row < rows * classes_y ? out_y - out_row : rows * classes_y;
      if constexpr (whole_rows) {
        send.template send<Values>(warp.area.stage, to, count, out_rows * out_x,
                                   carries && y > 0 ? Send::shared
                                   : y > 0          ? Send::own
                                                    : head,
                                   ends_tile ? tail
                                   : carries ? Send::others
                                             : Send::own);
      } else {
        const int left = out_x - tile.x * classes_x;
#pragma unroll 1
        for (int i = 0; i < out_rows; ++i)
          send.template send<Values>(warp.area.stage + i * chunk_pitch * Output::bytes,
                                     to + i * out_x * Output::bytes, count,
                                     left < chunk_elements ? left : chunk_elements, head, tail);
      }
      __syncwarp();
      to += stage_y * classes_y * out_x * Output::bytes;
    }
  }

  // All classes of z.
  template <Way way, class Values>
  __device__ __forceinline__ void write(const Tile& tile, const Fragments& w, Values& values, int m) const {
    for_constant<classes_z>([&](auto rz) {
      if (Products::has_plane(tile, rz)) write_plane<way, decltype(rz)::value>(tile, w, values, m);
    });
  }
};

// --------------------------------------------------------------------------------------------------
// Merges the moments of a sample's tiles. Channels are merged to groups, 32 tiles to a set, and sets to the
// sample. The warp that arrives last merges: a sample's second pass does not wait for a chain of loads.

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Statistics {
  const Warp warp;

  static constexpr int tiles_of_set = 32;
  static constexpr int sets = (Numbers::tiles + tiles_of_set - 1) / tiles_of_set;

  __device__ __forceinline__ float* part_of(int64 n, int index) const {
    return warp.p.parts + (n * Numbers::tiles + index) * groups * 3;
  }

  // Whether this warp is the last of `count` to arrive.
  __device__ __forceinline__ bool arrives_last(uint32* counter, uint32 count) const {
    __syncwarp();
    uint32 before = 0;
    if (warp.lane == 0) before = count_up(counter);
    return __shfl_sync(0xffffffffu, before, 0) == count - 1;
  }

  // body(group, elements, mean, M2) of the parts that lie `step` tiles apart.
  template <int step, class Body>
  __device__ __forceinline__ void merge_parts(int64 n, int first, int count, Body&& body) const {
    constexpr int at_once = groups < 4 ? groups : 4;
#pragma unroll 1
    for (int group = 0; group < groups; group += at_once) {
      Moments all[at_once];
#pragma unroll 2
      for (int i = warp.lane; i < count; i += 32) {
        const float* from = part_of(n, first + i * step) + group * 3;
        float part[at_once][3];
#pragma unroll
        for (int k = 0; k < at_once * 3; ++k)
          part[k / 3][k % 3] = group + k / 3 < groups ? load_shared_by_blocks(from + k) : 0.0f;
#pragma unroll
        for (int k = 0; k < at_once; ++k) all[k].merge(part[k][0], part[k][1], part[k][2]);
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const float elements = lanes_sum<32>(all[k].count);
        float mean, m2;
        team_moments<32, threads>(all[k], elements, nullptr, mean, m2);
        if (group + k < groups) body(group + k, elements, mean, m2);
      }
    }
  }

  __device__ __forceinline__ void merge(const Tile& tile) const {
    __syncwarp();
    for (int group = warp.lane; group < groups; group += 32) {
      Moments all;
#pragma unroll 1
      for (int i = 0; i < Tail::group_channels; ++i) {
        const float* from = warp.area.moments[group * Tail::group_channels + i];
        all.merge(from[0], from[1], from[2]);
      }
      float* to = part_of(tile.n, tile.index) + group * 3;
      to[0] = all.count;
      to[1] = all.mean;
      to[2] = all.m2;
    }
    const int first = tile.index / tiles_of_set * tiles_of_set;
    const int left = Numbers::tiles - first;
    const int count = left < tiles_of_set ? left : tiles_of_set;
    if (!arrives_last(warp.p.sets + tile.n * sets + tile.index / tiles_of_set, count)) return;
    uint32* counters = warp.p.control + 4 + tile.n * 4;
    if constexpr (sets > 1) {
      merge_parts<1>(tile.n, first, count, [&](int group, float elements, float mean, float m2) {
        if (warp.lane == 0) {
          float* to = part_of(tile.n, first) + group * 3;
          to[0] = elements;
          to[1] = mean;
          to[2] = m2;
        }
      });
      if (!arrives_last(counters, sets)) return;
    }
    merge_parts<(sets > 1 ? tiles_of_set : 1)>(
        tile.n, 0, sets > 1 ? sets : count, [&](int group, float, float mean, float m2) {
          constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
          if (warp.lane == 0) {
            const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
            float* to = warp.p.statistics + 2 * (tile.n * groups + group);
            to[0] = mean;
            to[1] = rstd;
            // Pass 2 reads it where the first part was. All lanes have read that part.
            float* norm = part_of(tile.n, 0) + group * 3;
            norm[0] = mean;
            norm[1] = norm_factor<Tail>(rstd, mean, m2);
          }
        });
    if (warp.lane == 0) release(counters + 2, 1u);  // lane 0 wrote all of them
  }
};

// --------------------------------------------------------------------------------------------------
// Tickets of a launch: each warp draws tiles in an order in which it waits only for lower tickets.

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Tickets {
  const Warp warp;

  const int64 count;  // of tickets
  const int64 of_block = count / gridDim.x;
  const uint32 neighbours = of_block < 1 ? 1 : of_block < warps ? static_cast<uint32>(of_block) : warps;
  const bool any_block = of_block >= 4 * warps;

  // The prologue of a launch.
  static __device__ __forceinline__ void prepare(const Warp& warp, const Weights& weights,
                                                 const Window& window) {
    if (threadIdx.x == 0) warp.shared.drawn = 0;
    weights.share_weights();
    window.clear();
    __syncthreads();
  }

  // Draws the next ticket, in lane 0. The warps of a block take `neighbours` consecutive tickets, whose rows
  // and windows lie beside each other. With few tickets every multiprocessor gets some. With many
  // (`any_block`), tickets after the first of each warp go to whichever warp is free. An atomic of the whole
  // GPU takes longer, but the load is balanced. A ticket waits only for lower ones: those of this block are
  // taken before it, those of other blocks are or will be taken.
  __device__ __forceinline__ uint32 draw() const {
    if (warp.lane != 0) return 0;
    const uint32 turn = atomicAdd(&warp.shared.drawn, 1u);
    if (any_block && turn >= warps) return gridDim.x * warps + atomicAdd(warp.p.control, 1u);
    return (turn / neighbours * gridDim.x + blockIdx.x) * neighbours + turn % neighbours;
  }
};

// --------------------------------------------------------------------------------------------------
// HoldByRecomputing: no value waits for the norm; every output is computed twice. The row "thin_mma".
//
//   pass 1   x -> convolution -> before-chain -> moments of a tile; the last tile of a sample merges them
//   pass 2   x -> convolution -> before-chain -> norm -> after-chain -> y
//
// A ticket is pass 1 of one tile, then pass 2 of the tile `lag` tickets before, so that stores run beside
// arithmetic at all times. Moves x twice (the second time from the second-level cache), y once.

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Recompute {
  using Parameters = P;
  const Warp warp;
  const Weights weights{warp};
  const Outputs outputs{warp};

  static __device__ __forceinline__ void run(const Parameters& p, unsigned char* bytes) {
    Recompute{{p, *reinterpret_cast<Shared*>(bytes)}}.run();
  }

  // --- Pass 2: values through the norm and the after-chain ---
  struct Normalised {
    Operands<Before> before;
    Operands<After> after;
    // The norm as one multiply-add.
    struct {
      float scale = 1.0f, shift = 0.0f;
    } norm[halves];

    // Of a lane's channels from 16 m on.
    __device__ __forceinline__ void load_norm(const Parameters& p, int64 n, int m, int quad) {
      if constexpr (Tail::has_norm) {
#pragma unroll
        for (int half = 0; half < halves; ++half) {
          const int channel = m * 16 + row_channel(half, quad);
          const int existing = channel < channels ? channel : 0;
          // Statistics leaves mean and factor of a slab where its first part was.
          const float* slab = p.parts + (n * Numbers::tiles * groups + existing / Tail::group_channels) * 3;
          const int own = Tail::channel(n, existing);
          norm[half].scale = Tail::weight(p, own) * load_shared_by_blocks(slab + 1);
          norm[half].shift = fmaf(-load_shared_by_blocks(slab), norm[half].scale, Tail::bias(p, own));
        }
      }
    }

    // Where values go: strides of rows and channels.
    static constexpr int row_stride = out_x;
    static constexpr int64 channel_stride = Tail::spatial;
    static __device__ __forceinline__ int64 index(int channel, int z, int y, int x) {
      return output_index(0, channel, z, y, x);
    }
    static __device__ __forceinline__ char* sample(const Parameters& p, int64 n) {
      return static_cast<char*>(p.output) + n * C::stride(0) * Output::bytes;
    }
    template <Way way, int rz, int ry>
    __device__ __forceinline__ void begin(const Sums&) {}
    __device__ __forceinline__ float finish(int half, float x, bool) const {
      if constexpr (Tail::has_norm) x = fmaf(x, norm[half].scale, norm[half].shift);
      return Chains::template apply<After>(x, after.row[half]);
    }
    template <class Pieces>
    static __device__ __forceinline__ void store_piece(const Pieces& pieces, void* to, int index,
                                                       bool aligned) {
      pieces.store(to, index, aligned);
    }
    // Not read again soon: evict first.
    template <class Vector>
    static __device__ __forceinline__ void store(void* to, Vector value) {
      __stcs(static_cast<Vector*>(to), value);
    }
  };

  template <Way way>
  __device__ __forceinline__ void write(const Tile& tile, Fragments& w) const {
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (row_tiles > 1) weights.load_weights(w, m);
      Normalised values;
      values.before.load(warp.p, tile.n, m, warp.quad);
      values.after.load(warp.p, tile.n, m, warp.quad);
      values.load_norm(warp.p, tile.n, m, warp.quad);
      outputs.template write<way>(tile, w, values, m);
    }
  }

  static __device__ __noinline__ void write_carefully(const Parameters& p, const Tile tile) {
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel) {
      ChannelValues<After, 1> after;
      after.load(p, tile.n, channel);
      ChannelNorm<Tail> norm;
      norm.load(p, tile.n, channel);
      Careful::for_each_stored(Normalised::sample(p, tile.n), tile, channel, [&](int z, int y, int x) {
        const float value = norm.apply(Careful::value(p, tile.n, channel, z, y, x));
        store_one<Output>(p.output, output_index(tile.n, channel, z, y, x),
                          Chains::template apply<After>(value, after));
      });
    }
  }

  // A pass of a ticket: pass 1 of its tile, or pass 2 of the tile `lag` before, each where there is such a
  // tile.
  struct Pass {
    int64 ticket;
    bool is_second;
  };

  __device__ __forceinline__ void run() const {
    const Window window{warp};
    const TileMoments moments{warp};
    const Statistics statistics{warp};
    Tickets::prepare(warp, weights, window);
    const int64 tiles = warp.p.batch * Numbers::tiles;
    const int64 lag = Tail::has_norm ? warp.p.lag * Numbers::tiles : 0;
    const auto first_pass = [&](uint32 drawn) {
      const uint32 ticket = __shfl_sync(0xffffffffu, drawn, 0);
      return Pass{ticket, !Tail::has_norm || ticket >= tiles};
    };
    const auto tile_of = [&](const Pass& pass) {
      return Tile(pass.is_second ? pass.ticket - lag : pass.ticket);
    };
    const Tickets tickets{warp, tiles + lag};
    Pass pass = first_pass(tickets.draw());
    if (pass.ticket >= tiles + lag) return;
    float* place = warp.area.x;
    window.send_for(tile_of(pass), place);
    Fragments w;
    Limits limits;
    bool has_weights = false;
#pragma unroll 1
    while (true) {
      // Loaded again after a careful tile: registers are not saved across its calls.
      if (!has_weights) limits = weights.input_limits(w);
      const Tile tile = tile_of(pass);
      if (Tail::has_norm && pass.is_second) {
        if (warp.lane == 0) wait_for(warp.p.control + 4 + tile.n * 4 + 2, 1u);
        __syncwarp();
      }
      const bool stays = !pass.is_second && pass.ticket >= lag;
      const uint32 drawn = stays ? 0 : tickets.draw();
      const Way way = window.take(tile, limits, place);
      const Pass next = stays ? Pass{pass.ticket, true} : first_pass(drawn);
      const bool ends = next.ticket >= tiles + lag;
      w.window = place;
      if (windows > 1) place = warp.area.x + (window_words - (place - warp.area.x));
      if (prefetches && !ends) window.send_for(tile_of(next), place);
      if (Chains::narrows && way == narrow) {
        if (pass.is_second) {
          write<narrow>(tile, w);
        } else {
          moments.template measure<narrow>(tile, w);
        }
      } else if (way != careful) {
        if (pass.is_second) {
          write<wide>(tile, w);
        } else {
          moments.template measure<wide>(tile, w);
        }
      }
      __syncwarp();
      if (!prefetches && !ends) window.send_for(tile_of(next), place);
      if (pass.is_second) {
        if (way == careful) write_carefully(warp.p, tile);
      } else {
        if (way == careful) Careful::measure(warp.p, warp.area, tile);
        statistics.merge(tile);
      }
      has_weights = !in_registers || way != careful;
      if (ends) return;
      pass = next;
    }
  }
};

template <class C, class Tail, class Numbers>
using HoldByRecomputing = typename ThinMma<C, Tail, Numbers, ThinMmaParameters<Tail::parameters>>::Recompute;

// --------------------------------------------------------------------------------------------------
// Two numbers in one word of memory that says whether it is there: blocks that wait for it need no flag, and
// nothing is released or counted, which would queue trips to L2 behind the stores of outputs.

// Memory is cleared before. The second number is not negative; its sign bit marks the pair valid.
struct MarkedPair {
  static constexpr uint32 sign = 0x80000000u;

  static __device__ __forceinline__ uint64 encode(float low, float high) {
    return static_cast<uint64>(__float_as_uint(high) | sign) << 32 | __float_as_uint(low);
  }
  static __device__ __forceinline__ bool is_valid(uint64 pair) { return pair >> 63 != 0; }
  static __device__ __forceinline__ float low(uint64 pair) {
    return __uint_as_float(static_cast<uint32>(pair));
  }
  static __device__ __forceinline__ float high(uint64 pair) {
    return __uint_as_float(static_cast<uint32>(pair >> 32) & ~sign);
  }
  static __device__ __forceinline__ void publish(uint64* to, uint64 pair) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(pair) : "memory");
  }
  // Polls until it is there.
  static __device__ __forceinline__ uint64 wait(const uint64* from, uint64 pair = 0) {
    while (!is_valid(pair))
      asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(pair) : "l"(from) : "memory");
    return pair;
  }
};

// --------------------------------------------------------------------------------------------------
// What the forward kernels of tails, and the kernel before them, are given.

// Words of TailParameters::control that count blocks where tail_staged exchanges moments through memory; the
// moments of each slab's blocks are behind them.
constexpr int exchange_counters = 64;

template <int Count>
struct TailParameters {
  const void* input;
  void* output;
  float* statistics;  // [batch][groups][2]: mean, 1 / deviation
  uint32* control;    // zero: a ticket, then two counters and a flag for each unit
  float* parts;       // moments of rows, one set for each piece
  float* sums;        // sums of rows, one for each piece
  uint64 aligned;     // bits of AlignedBit
  int64 phase;        // elements from the last 16-byte boundary to the input's first
  int64 batch;
  int64 wave_units;
  const void* parameter[Count > 0 ? Count : 1];
};

}  // namespace onepass

// --------------------------------------------------------------------------------------------------
// Bulk copies that arrive in shared memory, what waits for them, and clusters.

namespace onepass::barrier {

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A phase of the barrier ends with `arrivals` of them, and all bytes they expect.
__device__ __forceinline__ void initialise(uint64* barrier, uint32 arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What this thread wrote before is visible to those that wait.
__device__ __forceinline__ void arrive(uint64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void expect(uint64* barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(uint64* barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy(void* to, const void* from, uint32 bytes, uint64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// What this thread has read of shared memory is read before a bulk copy that is asked for later overwrites
// it.
__device__ __forceinline__ void release_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Lanes may come apart from each other: the barrier takes whole warps.
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Sends two floats to another block of the cluster, to the place of this block's own, and counts their eight
// bytes at its barrier.
__device__ __forceinline__ void send(float* own, float x, float y, uint64* barrier, uint32 block) {
  uint32 address, remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(barrier)), "r"(block));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
      "f"(x), "f"(y), "r"(remote)
      : "memory");
}

// The same of four floats and their sixteen bytes.
__device__ __forceinline__ void send(float4* own, float4 v, uint64* barrier, uint32 block) {
  uint32 address, remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(barrier)), "r"(block));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote)
      : "memory");
}

#endif

}  // namespace onepass::barrier

// --------------------------------------------------------------------------------------------------
// What kernels share that hold a slab on the chip: the rows that vectors lie in, and the slab's norm.

namespace onepass {

// The row (channel) of a slab that a thread is in. `load(row)` is called where the row changes; a thread's
// positions go upwards, so that this is rare. `wraps`: positions also go back to the beginning.
template <int spatial, bool wraps, class Load>
struct RowCursor {
  int row;
  int end;  // the position where the row ends
  Load load;

  __device__ __forceinline__ void find(int position) {
    row = position / spatial;
    end = row * spatial + spatial;
    load(row);
  }
  __device__ __forceinline__ void enter(int position) {
    if (position >= end || (wraps && position < end - spatial)) find(position);
  }
  // Whether the positions from `begin` to `last` lie in one row, which is entered.
  __device__ __forceinline__ bool covers(int begin, int last) {
    enter(begin);
    return last <= end;
  }

  // Calls f(first, last) for the parts [first, last) of the vector at `position` that lie in one row.
  template <int Width, class F>
  __device__ __forceinline__ void visit(int position, F&& f) {
    if (position + Width > end || (wraps && position < end - spatial)) {
      find(position);
      if (Width > 1 && position + Width > end) {
#pragma unroll
        for (int k = 0; k < Width; ++k) {
          if (position + k >= end) {
            ++row;
            end += spatial;
            load(row);
          }
          f(k, k + 1);
        }
        return;
      }
    }
    f(0, Width);
  }
};

template <int spatial, bool wraps = false, class Load>
__device__ __forceinline__ RowCursor<spatial, wraps, Load> row_cursor(Load load) {
  return {0, 0, load};
}

// Statistics of a slab as a thread applies them to distances from its pivot.
struct SlabNorm {
  float mean;
  float rstd;
  float moved;   // the mean's distance from the thread's pivot
  float factor;  // of the norm's weight

  // The slab's mean is `from + moved_from`.
  template <class Tail>
  static __device__ __forceinline__ SlabNorm of(float from, float moved_from, float m2, float pivot) {
    constexpr float per_element =
        1.0f / static_cast<float>(static_cast<int>(Tail::group_channels) * static_cast<int>(Tail::spatial));
    SlabNorm norm;
    norm.mean = from + moved_from;
    norm.rstd = rsqrtf(m2 * per_element + Tail::eps);
    norm.moved = (from - pivot) + moved_from;
    norm.factor = norm_factor<Tail>(norm.rstd, norm.mean, m2);
    return norm;
  }
};

// --------------------------------------------------------------------------------------------------
// What both schedules of tail_staged share: sizes, and the exchange of moments within a cluster.

// Sizes of a slab and of the cluster that holds it.
template <class Tail, class Numbers>
struct StagedSizes {
  static constexpr int width = Numbers::width;
  static constexpr int threads = Numbers::threads;
  static constexpr int vectors = Numbers::vectors;  // of a thread
  static constexpr int blocks = Numbers::blocks;    // of the cluster
  // More blocks than a cluster has, which exchange their moments through memory. They are called one too.
  static constexpr bool by_memory = Numbers::by_memory;
  static constexpr int warps = threads / 32;  // of a block
  static constexpr int all_warps = warps * blocks;
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int slab_elements = static_cast<int>(Tail::group_channels) * spatial;
  static constexpr int groups = Tail::channels / Tail::group_channels;
  static constexpr int line = 32 * width;  // elements of a warp's vectors beside each other
  // A warp's part of a slab lies in two rows at most.
  static constexpr bool few_rows = vectors * line <= spatial;
  static constexpr bool before_by_row = Tail::Before::channel_operands > 0;
  static constexpr bool after_by_row =
      Tail::has_affine || Tail::After::channel_operands > 0 || Tail::has_mean;
  static constexpr int accumulators = 4;  // of a thread: additions that do not wait for each other

  // How `vectors` vectors are spread over the cluster's warps, by lines of 32.
  struct Spread {
    int each;  // lines of every warp, and one more of the first `more` warps
    int more;

    static constexpr __device__ __forceinline__ Spread of(int vectors) {
      return {(vectors + 31) / 32 / all_warps, (vectors + 31) / 32 % all_warps};
    }
    constexpr __device__ __forceinline__ int first_vector(int warp) const {
      return (warp * each + (warp < more ? warp : more)) * 32;
    }
    __device__ __forceinline__ int warp_of(int line) const {
      const int of_longer = more * (each + 1);
      return line < of_longer ? line / (each + 1) : more + (line - of_longer) / each;
    }
  };
};

// The barriers of a schedule's Shared that count the moments of its warps and of the cluster's blocks, two by
// parity of the round. Two buffers suffice: a warp gives its moments of the next round when it has read those
// of this one, and of the round after that when all have given theirs of the next. By one thread.
template <int warps, class Shared>
__device__ __forceinline__ void initialise_exchange(Shared& shared) {
#if __CUDA_ARCH__ >= 900
  for (int parity = 0; parity < 2; ++parity) {
    barrier::initialise(&shared.warps_given[parity], warps);
    barrier::initialise(&shared.received[parity]);
  }
#endif
}

// All threads of the cluster are here, and see what the others wrote. Nothing is sent to a block before.
template <class S>
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (S::blocks > 1 && !S::by_memory) {
    barrier::cluster_sync();
  } else {
    __syncthreads();
  }
#endif
}

// No block leaves while others may write to it.
template <class S>
__device__ __forceinline__ void leave_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (S::blocks > 1 && !S::by_memory) barrier::cluster_sync();
#endif
}

// Mean (as its distance `moved` from one of the parts', `from`) and M2 of `count` parts together, the same in
// every lane. Returns the number of their elements.
template <int count>
__device__ __forceinline__ float merge_parts(const float4* parts, float& from, float& moved, float& m2) {
  static_assert((count & (count - 1)) == 0 && count <= 32);
  const float4 own = parts[threadIdx.x % count];
  const float elements = lanes_sum<count>(own.x);
  lanes_moments<count>(Moments{own.x, own.y, own.z}, elements > 0.0f ? 1.0f / elements : 0.0f, from, moved,
                       m2);
  return elements;
}

// --------------------------------------------------------------------------------------------------
// tail_staged with more blocks than a cluster has: what they tell each other goes through memory. All of them
// are resident.

// The moments of a block, given and left in `from`, `moved` and `m2`, become those of all blocks that have
// the slab; count_of(block) is the number of a block's elements. By one warp. Every slab has words of its
// own.
template <class S, class Parameters, class CountOf>
__device__ __forceinline__ void exchange_by_memory(const Parameters& p, int slab, int block,
                                                   CountOf&& count_of, float& from, float& moved, float& m2) {
  constexpr int of_lane = (S::blocks + 31) / 32;
  const int lane = threadIdx.x % 32;
  auto* const words =
      reinterpret_cast<uint64*>(p.control + exchange_counters) + static_cast<int64>(slab) * S::blocks;
  if (lane == 0) MarkedPair::publish(words + block, MarkedPair::encode(from + moved, m2));
  float count[of_lane], distance[of_lane], own_m2[of_lane];
#pragma unroll
  for (int i = 0; i < of_lane; ++i) {
    const int other = lane + i * 32;
    count[i] = distance[i] = own_m2[i] = 0.0f;
    if (other < S::blocks) {
      const uint64 word = MarkedPair::wait(words + other);
      count[i] = count_of(other);
      distance[i] = MarkedPair::low(word);
      own_m2[i] = MarkedPair::high(word);
    }
  }
  // As lanes_moments adds them up. The first block has elements.
  from = __shfl_sync(0xffffffffu, distance[0], 0);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < of_lane; ++i) {
    distance[i] = count[i] > 0.0f ? distance_from(distance[i], from) : 0.0f;
    sum = fmaf(count[i], distance[i], sum);
  }
  moved = lanes_sum<32>(sum) * (1.0f / static_cast<float>(S::slab_elements));
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < of_lane; ++i) {
    distance[i] -= moved;
    squares += fmaf(count[i] * distance[i], distance[i], own_m2[i]);
  }
  m2 = lanes_sum<32>(squares);
}

// All threads of these blocks are here, and see what the others wrote. Once in a launch.
template <class S, class Parameters>
__device__ __forceinline__ void sync_by_memory(const Parameters& p) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32* const arrived = p.control + blockIdx.x / S::blocks;
    count_up(arrived);
    wait_for(arrived, S::blocks);
  }
  __syncthreads();
}

// --------------------------------------------------------------------------------------------------
// Means over rows in tail_staged, where a row may be spread over vectors, warps and blocks of a cluster.
//
// A warp goes over its part of a slab in one run or in several, each upwards. Of every row that a run meets
// it leaves a sum in the workspace, in a place of its own. When a cluster has done all of its slabs, it adds
// up the sums of each row, in the order of warps and runs.

// A warp's part as one run.
template <int vectors>
struct OneRun {
  static constexpr int count = 1;
  static constexpr __device__ __forceinline__ int first(int) { return 0; }
  static constexpr __device__ __forceinline__ int lines(int) { return vectors; }
};

// `Runs`: their number, and the first line of each and its lines.
template <class Tail, class Numbers, class Runs>
struct StagedMeans {
  using S = StagedSizes<Tail, Numbers>;
  static_assert(!Tail::has_mean || S::line <= S::spatial);  // a line lies in two rows at most

  // Rows that a run may meet.
  static constexpr __device__ __forceinline__ int rows_of(int run) {
    return Runs::lines(run) > 0 ? (Runs::lines(run) * S::line + S::spatial - 2) / S::spatial + 1 : 0;
  }
  // The places of a warp; those of its first runs.
  static constexpr __device__ __forceinline__ int places_before(int run) {
    int places = 0;
    for (int i = 0; i < run; ++i) places += rows_of(i);
    return places;
  }
  static constexpr int warp_places = places_before(Runs::count);
  // Of a slab: those of the cluster's warps, then sums of the elements before the vectors and after them.
  static constexpr int slab_places = S::all_warps * warp_places + 2;

  template <class Parameters>
  static __device__ __forceinline__ float* places_of(const Parameters& p, int slab) {
    return p.sums + static_cast<int64>(slab) * slab_places;
  }

  // The sums of a thread in a run: of the row that the run is in, and of the next one.
  class Sums {
   public:
    // Begins a run at this position of the slab. All lanes call what is no sum of a lane's own.
    template <class Parameters>
    __device__ __forceinline__ void begin(const Parameters& p, int slab, int warp, int run, int position) {
      if constexpr (Tail::has_mean) {
        end_ = (position / S::spatial + 1) * S::spatial;
        place_ = places_of(p, slab) + warp * warp_places + places_before(run);
        row_ = next_ = 0.0f;
      }
    }
    // The next line, or several that lie in one row, begins at this position.
    __device__ __forceinline__ void enter(int position) {
      if constexpr (Tail::has_mean && !S::few_rows) {
        if (position >= end_) leave_row();
      }
    }
    // A vector that lies in the row of the position that was entered.
    __device__ __forceinline__ void add_whole(int position, const float (&value)[S::width]) {
      if constexpr (Tail::has_mean) {
        float sum[S::width / 2];
#pragma unroll
        for (int k = 0; k < S::width / 2; ++k) sum[k] = value[k] + value[k + S::width / 2];
#pragma unroll
        for (int count = S::width / 4; count > 0; count /= 2) {
#pragma unroll
          for (int k = 0; k < count; ++k) sum[k] += sum[k + count];
        }
        if (S::few_rows && position >= end_) {
          next_ += sum[0];
        } else {
          row_ += sum[0];
        }
      }
    }
    // A vector at `position`, wherever a row ends.
    __device__ __forceinline__ void add(int position, const float (&value)[S::width]) {
      if constexpr (Tail::has_mean) {
#pragma unroll
        for (int k = 0; k < S::width; ++k) {
          if (position + k < end_) {
            row_ += value[k];
          } else {
            next_ += value[k];
          }
        }
      }
    }
    // Ends a run that has elements before this position.
    __device__ __forceinline__ void finish(int position) {
      if constexpr (Tail::has_mean) {
        leave_row();
        if (position > end_ - S::spatial) leave_row();
      }
    }

   private:
    __device__ __forceinline__ void leave_row() {
      const float sum = lanes_sum<32>(row_);
      if (threadIdx.x % 32 == 0) __stcg(place_, sum);
      ++place_;
      row_ = next_;
      next_ = 0.0f;
      end_ += S::spatial;
    }

    float row_, next_;
    int end_;  // of the row, in the slab
    float* place_;
  };

  // The elements outside of vectors: those of the first `head` lanes lie in the first row, the others' in the
  // last one. By the warp that has them.
  template <class Parameters>
  static __device__ __forceinline__ void leave_edges(const Parameters& p, int slab, int head, bool has_edge,
                                                     float value) {
    const int lane = threadIdx.x % 32;
    const float before = lanes_sum<32>(has_edge && lane < head ? value : 0.0f);
    const float after = lanes_sum<32>(has_edge && lane >= head ? value : 0.0f);
    if (lane == 0) {
      float* const places = places_of(p, slab) + S::all_warps * warp_places;
      __stcg(places, before);
      __stcg(places + 1, after);
    }
  }

  // Lanes of a warp that add up a row: of every warp that has elements of it, its runs.
  static constexpr int least_lines =
      S::slab_elements / S::line > S::all_warps ? S::slab_elements / S::line / S::all_warps : 1;
  static constexpr int team = lanes_for(Runs::count * (S::spatial / (least_lines * S::line) + 2));

  // The sum of one row of a slab, in all lanes of its team.
  template <class Parameters, class SpreadOf>
  static __device__ __forceinline__ float sum_row(const Parameters& p, int slab, int row, bool exists,
                                                  SpreadOf&& spread_of) {
    const int64 first = static_cast<int64>(slab) * S::slab_elements;
    const int head = static_cast<int>(-(first + p.phase) & (S::width - 1));
    const int count = (S::slab_elements - head) / S::width;
    const int vectors_end = head + count * S::width;
    const typename S::Spread spread = spread_of(count);
    const int begin = row * S::spatial, end = begin + S::spatial;
    const int first_warp = spread.warp_of((begin > head ? begin - head : 0) / S::line);
    const int last_warp = spread.warp_of(((end < vectors_end ? end : vectors_end) - 1 - head) / S::line);
    const int parts = exists ? (last_warp - first_warp + 1) * Runs::count : 0;
    const float* const places = places_of(p, slab);
    float sum = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x % team; i < parts; i += team) {
      const int warp = first_warp + i / Runs::count;
      const int run = i % Runs::count;
      const int line = spread.first_vector(warp) / 32 + Runs::first(run);
      const int last = spread.first_vector(warp + 1) / 32;
      const int last_of_run = line + Runs::lines(run) < last ? line + Runs::lines(run) : last;
      const int from = head + line * S::line;
      const int to = head + last_of_run * S::line < vectors_end ? head + last_of_run * S::line : vectors_end;
      if (from < to && from < end && to > begin) {
        sum +=
            load_shared_by_blocks(places + warp * warp_places + places_before(run) + row - from / S::spatial);
      }
    }
    if (exists && threadIdx.x % team == 0) {
      const float* const edges = places + S::all_warps * warp_places;
      if (row == 0 && head > 0) sum += load_shared_by_blocks(edges);
      if (end == S::slab_elements && vectors_end < end) sum += load_shared_by_blocks(edges + 1);
    }
    return lanes_sum<team>(sum);
  }

  // The means of the cluster's slabs. spread_of(vectors): how they are spread over warps.
  template <class Parameters, class SpreadOf>
  static __device__ __forceinline__ void write(const Parameters& p, int block, int slabs, int clusters,
                                               SpreadOf&& spread_of) {
    constexpr int rows = Tail::group_channels;
    constexpr float per_element = 1.0f / static_cast<float>(S::spatial);
    constexpr int teams = S::threads / team;
    if constexpr (S::by_memory) {
      sync_by_memory<S>(p);
    } else {
      sync_cluster<S>();
    }
    const int first_slab = static_cast<int>(blockIdx.x) / S::blocks;
    const int own_slabs = first_slab < slabs ? (slabs - first_slab + clusters - 1) / clusters : 0;
    const int64 all = static_cast<int64>(own_slabs) * rows;
#pragma unroll 1
    for (int64 i = block * teams; i < all; i += S::blocks * teams) {
      const int64 own = i + threadIdx.x / team;
      const bool exists = own < all;
      const int64 index = exists ? own : 0;
      const int slab = first_slab + static_cast<int>(index / rows) * clusters;
      const int row = static_cast<int>(index % rows);
      const float sum = sum_row(p, slab, row, exists, spread_of);
      if (exists && threadIdx.x % team == 0) {
        store_one<typename Tail::Output>(p.output, static_cast<int64>(slab) * rows + row, sum * per_element);
      }
    }
  }
};

// --------------------------------------------------------------------------------------------------
// The schedule "overlapped" of tail_staged: what of a slab a warp has, and how it arrives.

template <class Tail, class Numbers>
struct StagedOverlapped {
  struct Pieces;      // the pieces of a warp's part of a slab in shared memory
  struct Statistics;  // staged/overlapped_moments.cuh
  struct Kernel;      // staged/overlapped.cuh

  using S = StagedSizes<Tail, Numbers>;
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  // Distances from the mean of the warp's first vectors, the warp's pivot.
  using Sums = PivotSums<S::accumulators>;

  // Vectors of a thread, and of each piece.
  static constexpr int doubled = Numbers::doubled;
  static constexpr int single = Numbers::single;
  static constexpr int raw = doubled + single;
  static constexpr int kept = S::vectors - raw;
  static_assert(doubled > 0 && kept > 1);
  // The last vectors of a thread, all of them kept, that some lanes may not have.
  static constexpr int uncertain = 2;
  static constexpr int at_once = Numbers::at_once;                // in the loops over what is not kept
  static constexpr int row_bytes = 32 * S::width * Input::bytes;  // of a warp's vectors beside each other
  // Results of the before-chain of bf16, less the warp's pivot, wait as f16: that adds a quarter of the
  // error of the output's rounding. Where they overflow f16, x is read again (see `fits_f16`).
  static constexpr bool holds_f16 = Numbers::holds_f16;
  static_assert(!holds_f16 || Input::bytes == f16::bytes);

  // Where a warp's pieces lie: the doubled one of even and of odd rounds, the single one, the kept one.
  enum Piece { even_piece, odd_piece, single_piece, kept_piece, all_pieces };
  static constexpr int first_of(int piece) { return piece < 2 ? 0 : piece == single_piece ? doubled : raw; }
  static constexpr int count_of(int piece) {
    return piece < 2 ? doubled : piece == single_piece ? single : kept;
  }
  static constexpr int offset_of(int piece) {
    return (piece == even_piece     ? 0
            : piece == odd_piece    ? doubled
            : piece == single_piece ? 2 * doubled
                                    : 2 * doubled + single) *
           row_bytes;
  }

  struct Shared {
    alignas(128) unsigned char stage[S::warps][(S::vectors + doubled) * row_bytes];
    uint64 arrived[S::warps][all_pieces];
    float4 of_warps[2][S::warps];  // by parity of the round: elements, mean, M2
    float4 of_blocks[2][S::blocks];
    uint64 warps_given[2];
    uint64 received[2];
    uint32 warps_counted;  // of all rounds: the last warp of each sends the block's moments
  };

  // How a slab is spread over warps: the same for every slab. Only the last warps' counts differ.
  static constexpr __device__ __forceinline__ typename S::Spread spread() {
    return S::Spread::of(S::slab_elements / S::width);
  }
  // The first vector of a warp of the cluster.
  static __device__ __forceinline__ int first_vector(int warp) {
    constexpr typename S::Spread all = spread();
    return all.first_vector(warp);
  }

  // A mean's runs: the pieces, or all of them as one where they lie in few rows.
  struct PieceRuns {
    static constexpr int count = S::few_rows ? 1 : 3;
    static constexpr __device__ __forceinline__ int first(int run) {
      return S::few_rows || run == 0 ? 0 : run == 1 ? doubled : raw;
    }
    static constexpr __device__ __forceinline__ int lines(int run) {
      return S::few_rows ? S::vectors : run == 0 ? doubled : run == 1 ? single : kept;
    }
  };
  using Means = StagedMeans<Tail, Numbers, PieceRuns>;
  static constexpr int run_of(int piece) { return piece < 2 ? 0 : piece == single_piece ? 1 : 2; }

  // The warp's part of a slab.
  struct Part {
    int64 begin;   // the slab's first element
    int head;      // elements before its first vector
    int position;  // of the warp's first vector in the slab
    int count;     // vectors of the warp

    __device__ __forceinline__ int line_of(int i) const { return position + i * S::line; }
    __device__ __forceinline__ int position_of(int i) const {
      return line_of(i) + static_cast<int>(threadIdx.x % 32) * S::width;
    }
    // One base for all vectors: from `position_of` it spills.
    __device__ __forceinline__ int64 index_of(int i) const {
      return begin + position + (i * 32 + static_cast<int>(threadIdx.x % 32)) * S::width;
    }
    // The position after the warp's vectors, those before vector `i` of a lane alone.
    __device__ __forceinline__ int end_of(int i) const {
      return position + (i * 32 < count ? i * 32 : count) * S::width;
    }
    // All vectors but the uncertain ones are there in every lane.
    __device__ __forceinline__ bool full() const { return count >= (S::vectors - uncertain) * 32; }
    __device__ __forceinline__ bool has(int i) const {
      return i * 32 + static_cast<int>(threadIdx.x % 32) < count;
    }
  };
};

template <class Tail, class Numbers>
struct StagedOverlapped<Tail, Numbers>::Pieces {
  const Parameters& p;
  Shared& shared;
  int block;  // of the cluster

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

  __device__ __forceinline__ Part part_of(int slab) const {
    Part part;
    part.begin = static_cast<int64>(slab) * S::slab_elements;
    const int head = static_cast<int>(-(part.begin + p.phase) & (S::width - 1));
    part.head = head < S::slab_elements ? head : S::slab_elements;
    const int all = (S::slab_elements - part.head) / S::width;
    const int cluster_warp = block * S::warps + warp();
    const int first = first_vector(cluster_warp);
    const int end = first_vector(cluster_warp + 1);
    part.position = part.head + first * S::width;
    part.count = (end < all ? end : all) - (first < all ? first : all);
    return part;
  }

  // The element outside of vectors that a thread has; -1 where it has none.
  __device__ __forceinline__ int edge_of(const Part& part) const {
    const int all = (S::slab_elements - part.head) / S::width;
    const int thread = threadIdx.x;
    if (block != 0 || thread >= S::slab_elements - all * S::width) return -1;
    return thread < part.head ? thread : thread + all * S::width;
  }
  // Whether the warp has elements outside of vectors.
  __device__ __forceinline__ bool has_edges(const Part& part) const {
    return block == 0 && warp() == 0 && (part.head > 0 || (S::slab_elements - part.head) % S::width > 0);
  }
  __device__ __forceinline__ int elements_of(const Part& part) const {
    const int all = (S::slab_elements - part.head) / S::width;
    return part.count * S::width + (block == 0 && warp() == 0 ? S::slab_elements - all * S::width : 0);
  }

  // Requests a piece of a slab's part; by one lane.
  __device__ __forceinline__ void request(const Part& part, int piece) const {
#if __CUDA_ARCH__ >= 900
    if (lane() != 0) return;
    const int left = part.count - first_of(piece) * 32;
    const int most = count_of(piece) * 32;
    const int own = left < 0 ? 0 : left < most ? left : most;
    const auto bytes = static_cast<uint32>(own * S::width * Input::bytes);
    uint64* arrived = &shared.arrived[warp()][piece];
    barrier::expect(arrived, bytes);  // a phase of 0 bytes is waited for too
    if (own > 0) {
      barrier::copy(shared.stage[warp()] + offset_of(piece),
                    static_cast<const char*>(p.input) + part.index_of(first_of(piece)) * Input::bytes, bytes,
                    arrived);
    }
#endif
  }
  // The same where the warp has read before.
  __device__ __forceinline__ void request_again(const Part& part, int piece) const {
#if __CUDA_ARCH__ >= 900
    // With a barrier of the warp alone loads may still be in flight when the copy begins.
    barrier::release_to_copies();
#endif
    __syncwarp();
    request(part, piece);
  }
  __device__ __forceinline__ void wait(int piece, uint32 phase) const {
#if __CUDA_ARCH__ >= 900
    barrier::wait(&shared.arrived[warp()][piece], phase);
#endif
  }
  // The lane's vector i of a piece.
  __device__ __forceinline__ unsigned char* vector_of(int piece, int i) const {
    return shared.stage[warp()] + offset_of(piece) + (i - first_of(piece)) * row_bytes +
           lane() * S::width * Input::bytes;
  }
};

// --------------------------------------------------------------------------------------------------
// The schedule "overlapped" of tail_staged: the moments of a slab, from a thread's sums to the cluster's.

template <class Tail, class Numbers>
struct StagedOverlapped<Tail, Numbers>::Statistics {
  template <int count>
  static __device__ __forceinline__ float merge(const float4* parts, float& mean, float& m2) {
    float from, moved;
    const float elements = merge_parts<count>(parts, from, moved, m2);
    mean = from + moved;
    return elements;
  }

  // The warp's elements, mean and M2 go to the block; the last warp sends the block's to the cluster. Returns
  // the warp's sum of squared distances from its pivot.
  static __device__ __forceinline__ float send(const Pieces& pieces, const Part& part, const Sums& sums,
                                               int round) {
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int k = 0; k < S::accumulators; ++k) sum += sums.sum[k], square += sums.square[k];
    sum = lanes_sum<32>(sum);
    square = lanes_sum<32>(square);
    float elements = static_cast<float>(pieces.elements_of(part));
    const float distance = sum * (elements > 0.0f ? pointwise::reciprocal_fast(elements) : 0.0f);
    float mean = sums.pivot + distance;
    // Not below zero: what is left of a constant slab.
    float m2 = pointwise::maximum(fmaf(-distance, sum, square), 0.0f);
#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    // Sent with a count of its bytes: a barrier of the cluster would first wait for all that was stored.
    if (S::blocks > 1 && threadIdx.x == 0) barrier::expect(&pieces.shared.received[parity], S::blocks * 16);
    uint32 before = 0;
    if (pieces.lane() == 0) {
      pieces.shared.of_warps[parity][pieces.warp()] = float4{elements, mean, m2, 0.0f};
      barrier::arrive(&pieces.shared.warps_given[parity]);
      if constexpr (S::blocks > 1) before = atomicAdd(&pieces.shared.warps_counted, 1u);
    }
    if constexpr (S::blocks > 1) {
      before = __shfl_sync(0xffffffffu, before, 0);
      if (before % S::warps == S::warps - 1) {
        barrier::wait(&pieces.shared.warps_given[parity], round / 2 & 1);  // a short wait: all have counted
        elements = merge<S::warps>(pieces.shared.of_warps[parity], mean, m2);
        if (pieces.lane() < S::blocks) {
          barrier::send(&pieces.shared.of_blocks[parity][pieces.block], float4{elements, mean, m2, 0.0f},
                        &pieces.shared.received[parity], pieces.lane());
        }
      }
    }
#endif
    return square;
  }

  // Whether f16 holds all distances of a warp whose squares have this sum. Small distances are rounded by
  // 2^-25 at most, which the norm may make 2^-12.
  static __device__ __forceinline__ bool fits_f16(float square, float rstd) {
    constexpr float largest = 65504.0f;
    return square <= largest * largest && rstd <= 8192.0f;
  }

  // The slab's mean, 1 / deviation, and what the norm's weight is multiplied by.
  static __device__ __forceinline__ void receive(Shared& shared, int round, float& mean, float& rstd,
                                                 float& factor) {
    float m2 = 0.0f;
    constexpr float per_element = 1.0f / static_cast<float>(S::slab_elements);
#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    const uint32 phase = round / 2 & 1;
    if constexpr (S::blocks == 1) {
      barrier::wait(&shared.warps_given[parity], phase);
      merge<S::warps>(shared.of_warps[parity], mean, m2);
    } else {
      barrier::wait(&shared.received[parity], phase);
      merge<S::blocks>(shared.of_blocks[parity], mean, m2);
    }
#endif
    rstd = rsqrtf(m2 * per_element + Tail::eps);
    factor = norm_factor<Tail>(rstd, mean, m2);
  }
};

// --------------------------------------------------------------------------------------------------
// The schedule "overlapped" of tail_staged, for 16-bit elements: the moments of one slab are exchanged while
// the next one is begun.
//
// A warp's part of a slab arrives by bulk copies, in three pieces:
//   doubled   has two places, for slabs in turn: that of the next slab is summed while the moments of this
//   one
//             are exchanged. It stays as it arrived, and the before-chain is computed again for the output;
//             or its result is computed once and waits in the same place (see `holds_f16`).
//   single    has one place, which is requested again as soon as the output is written
//   kept      results of the before-chain wait in registers: as one vector's output is written, the next
//             slab's takes its place
// Elements before the first vector and after the last one are kept by the first block, one a thread. Where
// the block ends in a mean, values are added up instead of stored.

template <class Tail, class Numbers>
struct StagedOverlapped<Tail, Numbers>::Kernel {
  using Parameters = typename StagedOverlapped::Parameters;
  using Shared = typename StagedOverlapped::Shared;
  using Means = typename StagedOverlapped::Means;

  // The kernel's one copy of what it is given: with a second one registers are allocated differently.
  Pieces pieces;

  // A warp's part lies in two rows at most: the values of both are loaded at the beginning.
  static constexpr bool few_rows = S::vectors * 32 * S::width <= S::spatial;
  // Stands for a RowCursor then. `row` is what the current one has.
  template <class Values>
  struct TwoRows {
    int end;  // of the first
    const Values& first;
    const Values& second;
    Values& row;

    __device__ __forceinline__ bool covers(int begin, int last) {
      row = begin >= end ? second : first;
      return last <= end || begin >= end;
    }
    template <int Width, class F>
    __device__ __forceinline__ void visit(int position, F&& f) {
#pragma unroll
      for (int k = 0; k < Width; ++k) {
        row = position + k >= end ? second : first;
        f(k, k + 1);
      }
    }
  };

  // Whether the vectors [from, to) of the part are all there, the last of a full part aside, in one row.
  template <bool by_row, class R>
  static __device__ __forceinline__ bool is_plain(const Part& part, int from, int to, R& rows) {
    bool plain = part.full();
    if constexpr (by_row) {
      const bool covered = rows.covers(part.line_of(from), part.end_of(to));
      plain = plain && covered;
    }
    return plain;
  }
  // After lanes may have gone on to different rows.
  template <bool by_row, class R>
  static __device__ __forceinline__ void forget(R& rows) {
    if constexpr (by_row && !few_rows) rows.end = 0;
  }
  // The parts of vector i for f.
  template <bool by_row, class R, class F>
  static __device__ __forceinline__ void visit(const Part& part, int i, R& rows, F&& f) {
    if constexpr (by_row) {
      rows.template visit<S::width>(part.position_of(i), f);
    } else {
      f(0, S::width);
    }
  }

  // What the norm gets of vector i: the before-chain of what arrived. parts(f) calls f for parts in one row.
  template <class Parts>
  __device__ __forceinline__ void activate(const unsigned char* from, const Part& part, int i,
                                           const float* operands, Parts&& parts,
                                           float (&value)[S::width]) const {
    Packed<Input, S::width> packed;
    packed.load_shared(from);
    packed.unpack(value);
    typename Before::template Tensors<S::width> tensors;
    tensors.load(pieces.p, part.index_of(i));
    parts([&](int first, int last) {
#pragma unroll
      for (int k = 0; k < S::width; ++k) {
        if (k >= first && k < last) value[k] = Before::value(value[k], operands, tensors, k);
      }
    });
  }

  // Adds a vector to the sums. Its values become distances where those are held.
  static __device__ __forceinline__ void add(float (&value)[S::width], Sums& sums) {
#pragma unroll
    for (int k = 0; k < S::width; ++k) {
      const float distance = sums.add(value[k], k);
      if constexpr (holds_f16) value[k] = distance;
    }
  }
  // The same of a piece in shared memory, where it waits for the output.
  __device__ __forceinline__ void sum_vector(int piece, int i, float (&value)[S::width], Sums& sums) const {
    add(value, sums);
    if constexpr (holds_f16) {
      Packed<f16, S::width> packed;
      packed.pack(value);
      packed.store_shared(pieces.vector_of(piece, i));
    }
  }

  // Sums of a piece that is not kept.
  template <bool is_first, class R>
  __device__ __forceinline__ void sum_piece(const Part& part, int piece, R& rows, const float* operands,
                                            Sums& sums) const {
    const int from = first_of(piece), to = from + count_of(piece);
    const auto whole = [](auto&& f) { f(0, S::width); };
    const bool plain = is_plain<S::before_by_row>(part, from, to, rows);
    const auto careful = [&](int i, float(&value)[S::width]) {
      activate(
          pieces.vector_of(piece, i), part, i, operands,
          [&](auto&& f) { visit<S::before_by_row>(part, i, rows, f); }, value);
    };
    if constexpr (is_first) {
      float value[S::width] = {};
      if (plain) {
        activate(pieces.vector_of(piece, 0), part, 0, operands, whole, value);
      } else if (part.has(0)) {
        careful(0, value);
      }
      // As distances from the first one: of equal values the mean is that value.
      const float first = __shfl_sync(0xffffffffu, value[0], 0);
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < S::width; ++k) sum += distance_from(value[k], first);
      if (!plain && !part.has(0)) sum = 0.0f;
      const auto elements = static_cast<float>((part.count < 32 ? part.count : 32) * S::width);
      sums.pivot =
          fmaf(lanes_sum<32>(sum), part.count > 0 ? pointwise::reciprocal_fast(elements) : 0.0f, first);
      if (plain || part.has(0)) sum_vector(piece, 0, value, sums);
    }
    if (plain) {
#pragma unroll(at_once)
      for (int i = from + (is_first ? 1 : 0); i < to; ++i) {
        float value[S::width];
        activate(pieces.vector_of(piece, i), part, i, operands, whole, value);
        sum_vector(piece, i, value, sums);
      }
    } else {
#pragma unroll 1
      for (int i = from + (is_first ? 1 : 0); i < to; ++i) {
        if (!part.has(i)) continue;
        float value[S::width];
        careful(i, value);
        sum_vector(piece, i, value, sums);
      }
      forget<S::before_by_row>(rows);
    }
  }

  // What a row brings to the sums, and to the output.
  struct BeforeValues {
    float before[Before::channel_operands > 0 ? Before::channel_operands : 1];
  };
  struct RowValues : BeforeValues {
    float after[After::channel_operands > 0 ? After::channel_operands : 1];
    float scale, shift;  // of the norm; before its statistics are known, its weight and bias

    __device__ __forceinline__ void norm(float mean, float factor) {
      scale *= factor;
      shift = fmaf(-mean, scale, shift);
    }
  };
  __device__ __forceinline__ void load_before(int slab, int row, BeforeValues& values) const {
    const int channel = slab % S::groups * static_cast<int>(Tail::group_channels) + row;
    Before::load_channel(pieces.p, slab / S::groups, channel, values.before);
  }
  __device__ __forceinline__ void load_row(int slab, int row, RowValues& values) const {
    const int channel = slab % S::groups * static_cast<int>(Tail::group_channels) + row;
    values.scale = Tail::weight(pieces.p, channel);
    values.shift = Tail::bias(pieces.p, channel);
    After::load_channel(pieces.p, slab / S::groups, channel, values.after);
    Before::load_channel(pieces.p, slab / S::groups, channel, values.before);
  }
  static __device__ __forceinline__ int row_after(int row) {
    return row + 1 < static_cast<int>(Tail::group_channels) ? row + 1 : row;
  }

  // What waits for the output in shared memory.
  using Waiting = conditional<holds_f16, f16, Input>;
  using RowSums = typename Means::Sums;

  // Output of vector i, or what it adds to the sums for a mean. Raw: `value` is what arrived, else what the
  // norm gets. Plain: it lies in the row that the sums have entered, and on 16 bytes.
  template <bool is_raw, bool is_plain, class Parts>
  __device__ __forceinline__ void finish(const Part& part, int i, const RowValues& row, bool aligned,
                                         Parts&& parts, float (&value)[S::width], RowSums& means) const {
    const int64 index = part.index_of(i);
    typename Before::template Tensors<S::width> before;
    if constexpr (is_raw) before.load(pieces.p, index);
    typename After::template Tensors<S::width> after;
    after.load(pieces.p, index);
    parts([&](int first, int last) {
#pragma unroll
      for (int k = 0; k < S::width; ++k) {
        if (k >= first && k < last) {
          if constexpr (is_raw) value[k] = Before::value(value[k], row.before, before, k);
          value[k] = After::value(fmaf(value[k], row.scale, row.shift), row.after, after, k);
        }
      }
    });
    if constexpr (!Tail::has_mean) {
      Packed<typename Tail::Output, S::width> y;
      y.pack(value);
      y.store(pieces.p.output, index, is_plain || aligned);
    } else if constexpr (is_plain) {
      means.add_whole(part.line_of(i), value);
    } else {
      means.add(part.position_of(i), value);
    }
  }

  __device__ __forceinline__ bool output_is_aligned() const {
    return Tail::has_mean || is_aligned(pieces.p, aligned_output);
  }
  // A warp's part is one run, or each piece of it.
  template <bool of_part>
  __device__ __forceinline__ void begin_run(const Part& part, int slab, int piece, RowSums& means) const {
    if constexpr (of_part == S::few_rows) {
      const int warp = pieces.block * S::warps + pieces.warp();
      means.begin(pieces.p, slab, warp, of_part ? 0 : run_of(piece),
                  part.line_of(of_part ? 0 : first_of(piece)));
    }
  }
  template <bool of_part>
  __device__ __forceinline__ void finish_run(const Part& part, int piece, RowSums& means) const {
    if constexpr (of_part == S::few_rows)
      means.finish(part.end_of(of_part ? S::vectors : first_of(piece) + count_of(piece)));
  }

  // Output of a piece that is not kept. Halves: distances from `shift`, where they fit.
  template <class R>
  __device__ __forceinline__ void finish_piece(const Part& part, int slab, int piece, R& rows,
                                               const RowValues& row, float shift, bool fits,
                                               RowSums& means) const {
    constexpr bool by_row = S::after_by_row || S::before_by_row;
    const int from = first_of(piece), to = from + count_of(piece);
    const bool aligned = output_is_aligned();
    begin_run<false>(part, slab, piece, means);
    const bool plain = is_plain<by_row>(part, from, to, rows);
    const auto waiting = [&](int i, float(&value)[S::width]) {
      Packed<Waiting, S::width> packed;
      packed.load_shared(pieces.vector_of(piece, i));
      packed.unpack(value);
    };
    if (plain && aligned && (!holds_f16 || fits)) {
      means.enter(part.line_of(from));
#pragma unroll(at_once)
      for (int i = from; i < to; ++i) {
        float value[S::width];
        waiting(i, value);
        finish<!holds_f16, true>(
            part, i, row, true, [](auto&& f) { f(0, S::width); }, value, means);
      }
    } else {
#pragma unroll 1
      for (int i = from; i < to; ++i) {
        means.enter(part.line_of(i));
        if (!part.has(i)) continue;
        float value[S::width];
        if (!holds_f16 || fits) {
          waiting(i, value);
        } else {
          Packed<Input, S::width> packed;
          packed.load(pieces.p.input, part.index_of(i), true);
          packed.unpack(value);
          typename Before::template Tensors<S::width> tensors;
          tensors.load(pieces.p, part.index_of(i));
          visit<by_row>(part, i, rows, [&](int first, int last) {
#pragma unroll
            for (int k = 0; k < S::width; ++k) {
              if (k >= first && k < last) value[k] = Before::value(value[k], row.before, tensors, k) - shift;
            }
          });
          forget<by_row>(rows);
        }
        finish<!holds_f16, false>(
            part, i, row, aligned, [&](auto&& f) { visit<by_row>(part, i, rows, f); }, value, means);
      }
      forget<by_row>(rows);
    }
    finish_run<false>(part, piece, means);
  }

  __device__ __forceinline__ void run() const {
    const int slabs = static_cast<int>(pieces.p.batch) * S::groups;
    const int clusters = static_cast<int>(gridDim.x) / S::blocks;
    int slab = static_cast<int>(blockIdx.x) / S::blocks;  // the one that is summed
#if __CUDA_ARCH__ >= 900
    if (pieces.lane() == 0) {
      for (int i = 0; i < all_pieces; ++i) barrier::initialise(&pieces.shared.arrived[pieces.warp()][i]);
    }
    __syncwarp();
    Part next = pieces.part_of(slab);
    if (slab < slabs) {
      pieces.request(next, even_piece);
      if constexpr (single > 0) pieces.request(next, single_piece);
      pieces.request(next, kept_piece);
    }
    if (slab + clusters < slabs) pieces.request(pieces.part_of(slab + clusters), odd_piece);
    if (threadIdx.x == 0) {
      initialise_exchange<S::warps>(pieces.shared);
      pieces.shared.warps_counted = 0;
    }
    sync_cluster<S>();

    float h[kept][S::width];
#pragma unroll
    for (int i = 0; i < kept; ++i) {
#pragma unroll
      for (int k = 0; k < S::width; ++k) h[i][k] = 0.0f;
    }
    float edge = 0.0f;
    // Of the warp's part of the slab whose output is due: what its values were moved by, and their squares.
    float shift = 0.0f, square = 0.0f;
    Part part = next;
#pragma unroll 1
    for (int round = 0;; ++round, slab += clusters) {
      const bool has_current = round > 0;
      const bool more = slab < slabs;
      const int current = slab - clusters;
      const uint32 parity = round & 1;
      constexpr bool by_row = S::after_by_row || S::before_by_row;
      const int own_row = part.position / S::spatial;
      const int edge_position = has_current ? pieces.edge_of(part) : -1;
      RowValues row, row_0, row_1, edge_row;
      row.scale = row_0.scale = row_1.scale = edge_row.scale = 1.0f;
      row.shift = row_0.shift = row_1.shift = edge_row.shift = 0.0f;
      // The values of the warp's rows are on their way while sums are.
      if (by_row && has_current) {
        load_row(current, own_row, row_0);
        if (few_rows) load_row(current, row_after(own_row), row_1);
        if (edge_position >= 0) load_row(current, edge_position / S::spatial, edge_row);
      }
      Sums sums;
      BeforeValues before, before_0, before_1;
      auto next_rows = [&] {
        if constexpr (few_rows) {
          const int next_row = next.position / S::spatial;
          if (S::before_by_row && more) {
            load_before(slab, next_row, before_0);
            load_before(slab, row_after(next_row), before_1);
          }
          return TwoRows<BeforeValues>{(next_row + 1) * S::spatial, before_0, before_1, before};
        } else {
          return row_cursor<S::spatial, true>([&](int r) { load_before(slab, r, before); });
        }
      }();
      // Converted where it is used: the sums of all warps would wait for the one that waits for it.
      Packed<Input, 1> next_edge;
      if (more) {
        const int position = pieces.edge_of(next);
        if (position >= 0) next_edge.load(pieces.p.input, next.begin + position, false);
        const int piece = parity == 0 ? even_piece : odd_piece;
        pieces.wait(piece, round / 2 & 1);
        sum_piece<true>(next, piece, next_rows, before.before, sums);
      }

      float mean = 0.0f, rstd = 0.0f, factor = 0.0f;
      float moved_mean = 0.0f;  // from the shift
      auto rows = [&] {
        if constexpr (few_rows) {
          return TwoRows<RowValues>{(own_row + 1) * S::spatial, row_0, row_1, row};
        } else {
          return row_cursor<S::spatial, true>([&](int r) {
            load_row(current, r, row);
            row.norm(moved_mean, factor);
          });
        }
      }();
      RowSums means;
      Part second = next;  // the slab after the next
      if (slab + clusters < slabs) second = pieces.part_of(slab + clusters);
      if (has_current) {
        Statistics::receive(pieces.shared, round - 1, mean, rstd, factor);
        if (pieces.p.statistics != nullptr && pieces.block == 0 && threadIdx.x == 0) {
          pieces.p.statistics[2 * static_cast<int64>(current)] = mean;
          pieces.p.statistics[2 * static_cast<int64>(current) + 1] = rstd;
        }
        moved_mean = mean - shift;
        const bool fits = Statistics::fits_f16(square, rstd);
        row_0.norm(moved_mean, factor);
        row_1.norm(moved_mean, factor);
        row = row_0;
        if constexpr (!few_rows) {
          rows.row = own_row;
          rows.end = (own_row + 1) * S::spatial;
        }
        if (edge_position >= 0) {
          edge_row.norm(mean, factor);
          typename After::template Tensors<1> tensors;
          tensors.load(pieces.p, part.begin + edge_position);
          const float y =
              After::value(fmaf(edge, edge_row.scale, edge_row.shift), edge_row.after, tensors, 0);
          if constexpr (Tail::has_mean)
            edge = y;
          else
            store_one<typename Tail::Output>(pieces.p.output, part.begin + edge_position, y);
        }
        if constexpr (Tail::has_mean) {
          if (pieces.has_edges(part))
            Means::leave_edges(pieces.p, current, part.head, edge_position >= 0, edge);
        }
        begin_run<true>(part, current, kept_piece, means);
        if constexpr (single > 0) {
          finish_piece(part, current, single_piece, rows, row, shift, fits, means);
          if (more) pieces.request_again(next, single_piece);
        }
        const int piece = parity == 0 ? odd_piece : even_piece;
        finish_piece(part, current, piece, rows, row, shift, fits, means);
        begin_run<false>(part, current, kept_piece, means);
        if (slab + clusters < slabs) pieces.request_again(second, piece);
      }
      // Output of what is kept, and what takes its place.
      if (more) pieces.wait(kept_piece, parity);
      {
        const bool aligned = output_is_aligned();
        bool plain = aligned && has_current && more;
        if (has_current) plain = is_plain<S::after_by_row>(part, raw, S::vectors, rows) && plain;
        if (more) plain = is_plain<S::before_by_row>(next, raw, S::vectors, next_rows) && plain;
        const auto whole = [](auto&& f) { f(0, S::width); };
        if (plain) {
          means.enter(part.line_of(raw));
#pragma unroll
          for (int i = raw; i < S::vectors; ++i) {
            if (i < S::vectors - uncertain || part.has(i))
              finish<false, true>(part, i, row, true, whole, h[i - raw], means);
            if (i < S::vectors - uncertain || next.has(i)) {
              activate(pieces.vector_of(kept_piece, i), next, i, before.before, whole, h[i - raw]);
              add(h[i - raw], sums);
            }
          }
        } else {
#pragma unroll
          for (int i = raw; i < S::vectors; ++i) {
            if (has_current) means.enter(part.line_of(i));
            if (has_current && part.has(i)) {
              finish<false, false>(
                  part, i, row, aligned, [&](auto&& f) { visit<S::after_by_row>(part, i, rows, f); },
                  h[i - raw], means);
            }
            if (more && next.has(i)) {
              activate(
                  pieces.vector_of(kept_piece, i), next, i, before.before,
                  [&](auto&& f) { visit<S::before_by_row>(next, i, next_rows, f); }, h[i - raw]);
              add(h[i - raw], sums);
            }
          }
          forget<S::before_by_row>(next_rows);
        }
      }
      if (has_current) {
        finish_run<false>(part, kept_piece, means);
        finish_run<true>(part, kept_piece, means);
      }
      if (slab + clusters < slabs) pieces.request_again(second, kept_piece);
      if (!more) break;
      if constexpr (single > 0) {
        pieces.wait(single_piece, parity);
        sum_piece<false>(next, single_piece, next_rows, before.before, sums);
      }
      const int position = pieces.edge_of(next);
      if (position >= 0) {
        if constexpr (S::before_by_row) load_before(slab, position / S::spatial, before);
        typename Before::template Tensors<1> tensors;
        tensors.load(pieces.p, next.begin + position);
        edge = Before::value(next_edge.at(0), before.before, tensors, 0);
        sums.add(edge, 0);
      }
      const float own_square = Statistics::send(pieces, next, sums, round);
      if constexpr (holds_f16) {
        shift = sums.pivot;
        square = own_square;
      }
      part = next;
      next = second;
    }
    if constexpr (Tail::has_mean) {
      Means::write(pieces.p, pieces.block, slabs, clusters, [](int) { return spread(); });
    } else {
      leave_cluster<S>();
    }
#endif
  }
};

// --------------------------------------------------------------------------------------------------
// The schedule "ring" of tail_staged: what of a slab a warp and a thread have.

template <class Tail, class Numbers>
struct RingShares {
  using S = StagedSizes<Tail, Numbers>;

  // Where a slab's vectors lie.
  struct Range {
    int64 begin;  // the slab's first element
    int head;     // elements before its first vector
    int count;    // vectors
    int edges;    // elements outside of vectors
    typename S::Spread spread;

    // The first vector of a warp of the cluster.
    __device__ __forceinline__ int first(int warp) const {
      const int vector = spread.first_vector(warp);
      return vector < count ? vector : count;
    }
  };

  template <class Parameters>
  static __device__ __forceinline__ Range range_of(const Parameters& p, int slab) {
    Range range;
    range.begin = static_cast<int64>(slab) * S::slab_elements;
    const int head = static_cast<int>(-(range.begin + p.phase) & (S::width - 1));
    range.head = head < S::slab_elements ? head : S::slab_elements;
    range.count = (S::slab_elements - range.head) / S::width;
    range.edges = S::slab_elements - range.count * S::width;
    range.spread = S::Spread::of(range.count);
    return range;
  }

  // What of a slab this thread keeps.
  struct Share {
    int warp;      // of the cluster
    int begin;     // position of the warp's first element in the slab
    int end;       // of the first one that is the next warp's
    int position;  // of the thread's first vector
    int mine;      // vectors of the thread
    int elements;  // of the warp; the first one has the edges
    bool full;     // all vectors but the last are there in every lane

    __device__ __forceinline__ Share(const Range& range, int block) {
      warp = block * S::warps + static_cast<int>(threadIdx.x / 32);
      const int lane = threadIdx.x % 32;
      const int first = range.first(warp);
      const int count = range.first(warp + 1) - first;
      begin = range.head + first * S::width;
      end = begin + count * S::width;
      position = begin + lane * S::width;
      mine = (count - lane + 31) / 32;
      elements = count * S::width + (warp == 0 ? range.edges : 0);
      full = count >= (S::vectors - 1) * 32;
    }

    __device__ __forceinline__ int position_of(int i) const { return position + i * S::line; }
    __device__ __forceinline__ int line_of(int i) const { return begin + i * S::line; }
    __device__ __forceinline__ int end_of(int c) const {
      const int chunk_end = begin + (c + 1) * Numbers::chunk * S::line;
      return chunk_end < end ? chunk_end : end;
    }
  };
};

// --------------------------------------------------------------------------------------------------
// The schedule "ring" of tail_staged.
//
// A warp's part of a slab arrives by bulk copies, chunk after chunk. After the before-chain values wait for
// the statistics in registers (`kept` vectors of a thread). Their chunks come through a ring of slots: a slot
// that was read makes room for the next slab. Where registers do not hold the slab, the first `held` vectors
// wait where they arrived, as f32. They make room for those of the next slab when the output is written. So
// the next slab arrives while this one is summed and while it is written. Moments go from warps to their
// block and from blocks to the cluster, past the stores of the slab before. Elements before the first vector
// and after the last one are kept by the first block, one a thread. Where the block ends in a mean, values
// are added up instead of stored.

template <class Tail, class Numbers>
struct StagedRing {
  using S = StagedSizes<Tail, Numbers>;
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  using Shares = RingShares<Tail, Numbers>;
  using Range = typename Shares::Range;
  using Share = typename Shares::Share;
  using Means = StagedMeans<Tail, Numbers, OneRun<S::vectors>>;

  // Vectors of a thread: the first `held` of them wait in shared memory, the others in registers.
  static constexpr int held = Numbers::held;
  static constexpr int kept = S::vectors - held;
  // They arrive by chunks of `chunk`; each warp has a ring of `slots` chunks.
  static constexpr int chunk = Numbers::chunk;
  static constexpr int chunks = (S::vectors + chunk - 1) / chunk;
  static constexpr int held_chunks = held / chunk;
  static constexpr int slots = Numbers::slots;
  static constexpr int chunk_bytes = chunk * 32 * S::width * Input::bytes;
  static_assert(kept > 0 && held % chunk == 0 && S::width % 4 == 0);
  // Held are results of the before-chain, or of 16 bits what arrived: the chain is computed again then.
  static constexpr bool holds_raw = Input::bytes != 4;
  using Waiting = conditional<holds_raw, Input, f32>;
  template <bool is>
  struct Flag {
    static constexpr bool value = is;
  };
  static constexpr bool finishes_raw = holds_raw && held > 0;
  static constexpr bool finishes_by_row = S::after_by_row || (finishes_raw && S::before_by_row);

  struct Shared {
    // A warp's ring, then its places of what is held.
    alignas(128) unsigned char stage[S::warps][slots + held_chunks][chunk_bytes];
    uint64 arrived[S::warps][slots + held_chunks];
    float4 of_warps[2][S::warps];  // by parity of the round: elements, mean, M2
    float4 of_blocks[2][S::by_memory ? 1 : S::blocks];
    uint64 warps_given[2];
    uint64 received[2];
  };

  const Parameters& p;
  Shared& shared;
  int block;  // of the cluster

  // A warp's way through the kept chunks of its slabs, in order: the next one to request, and the next one
  // to read.
  struct Ring {
    int slab;                // of the next chunk to request
    const char* from;        // that chunk
    int left;                // vectors of the slab from there on
    int next = held_chunks;  // which chunk it is
    int slot = 0;            // of the next chunk to read
    uint32 parity = 0;       // of that slot's phase
  };

  // The chunks of the warp's part of a slab from `first_chunk` on.
  __device__ __forceinline__ const char* chunks_of(int slab, int first_chunk, int& left) const {
    const Range range = Shares::range_of(p, slab);
    const int warp = block * S::warps + threadIdx.x / 32;
    const int first = range.first(warp);
    left = range.first(warp + 1) - first - first_chunk * chunk * 32;
    return static_cast<const char*>(p.input) +
           (range.begin + range.head + static_cast<int64>(first) * S::width) * Input::bytes +
           first_chunk * chunk_bytes;
  }

  __device__ __forceinline__ void enter(Ring& ring, int slabs) const {
    if (ring.slab < slabs) ring.from = chunks_of(ring.slab, held_chunks, ring.left);
  }

  // Requests a chunk of which `left` vectors are there, into a slot. By one lane.
  __device__ __forceinline__ void request(int slot, const char* from, int left) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 != 0) return;
    const int own = left < 0 ? 0 : left < chunk * 32 ? left : chunk * 32;
    const auto bytes = static_cast<uint32>(own * S::width * Input::bytes);
    const int warp = threadIdx.x / 32;
    // Every chunk is one phase of its barrier, one of 0 bytes too.
    barrier::expect(&shared.arrived[warp][slot], bytes);
    if (own > 0) barrier::copy(shared.stage[warp][slot], from, bytes, &shared.arrived[warp][slot]);
#endif
  }

  // Requests the next chunk of the ring, into the slot that was read last. All lanes count.
  __device__ __forceinline__ void request(Ring& ring, int slot, int slabs, int clusters) const {
    if (ring.slab >= slabs) return;
    request(slot, ring.from, ring.left);
    ring.from += chunk_bytes;
    ring.left -= chunk * 32;
    if (++ring.next == chunks) {
      ring.next = held_chunks;
      ring.slab += clusters;
      enter(ring, slabs);
    }
  }

  // The warp has read what a copy that is requested now overwrites.
  static __device__ __forceinline__ void release() {
#if __CUDA_ARCH__ >= 900
    // With a barrier of the warp alone loads may still be in flight when the copy begins.
    barrier::release_to_copies();
#endif
    __syncwarp();
  }

  // Where a slab lies, and what of it is this thread's. Made again for each phase: registers that would keep
  // it hold values of the slab.
  struct Place {
    Range range;
    Share share;
    int n;
    int first_channel;
    bool has_edge;
    int edge_position;
  };
  __device__ __forceinline__ Place place_of(int slab) const {
    asm volatile("" : "+r"(slab));  // the compiler does not see that it is the same slab
    const Range range = Shares::range_of(p, slab);
    const int thread = threadIdx.x;
    return {range,
            Share(range, block),
            slab / S::groups,
            slab % S::groups * static_cast<int>(Tail::group_channels),
            block == 0 && thread < range.edges,
            thread < range.head ? thread : thread + range.count * S::width};
  }

  // Chunk `c` of the thread's vectors through f; only the last vector of a full share can be missing. Before
  // those of a share that is not, enter(position) in all lanes.
  template <bool full, class F, class Enter>
  static __device__ __forceinline__ void for_each_vector(const Share& share, int c, F&& f, Enter&& enter) {
#pragma unroll
    for (int j = 0; j < chunk; ++j) {
      const int i = c * chunk + j;
      if (!full && i < S::vectors) enter(share.line_of(i));
      if (i < S::vectors && ((full && i < S::vectors - 1) || i < share.mine)) f(i, j);
    }
  }

  // One chunk of vectors through f(vector, its place in the chunk, plain, parts), where parts(g) calls
  // g(first, last) for parts of the vector in one row. Nearly all chunks are plain, full and in one row: no
  // bound is asked for and no row looked up, so that the compiler has one long block to order.
  // enter(position) in all lanes where a plain chunk begins, or a line of another one.
  template <bool by_row, class R, class F, class Enter>
  __device__ __forceinline__ void for_each_part(const Share& share, int c, bool aligned, R& rows, F&& f,
                                                Enter&& enter) const {
    bool plain = share.full && aligned;
    if constexpr (by_row) {
      rows.enter(share.line_of(c * chunk));
      plain = plain && share.end_of(c) <= rows.end;
    }
    if (plain) {
      enter(share.line_of(c * chunk));
      const auto whole = [](auto&& g) { g(0, S::width); };
      for_each_vector<true>(
          share, c, [&](int i, int j) { f(i, j, true, whole); }, enter);
    } else {
      const auto one = [&](int i, int j) {
        f(i, j, false, [&](auto&& g) {
          if constexpr (by_row) {
            rows.template visit<S::width>(share.position_of(i), g);
          } else {
            g(0, S::width);
          }
        });
      };
      for_each_vector<false>(share, c, one, enter);
      if constexpr (by_row) rows.end = 0;  // lanes may have gone on to different rows
    }
  }

  // Where vector `i` of the thread arrives and waits, one of those that are held.
  __device__ __forceinline__ unsigned char* held_vector(int i) const {
    return shared.stage[threadIdx.x / 32][slots] + (i * 32 + threadIdx.x % 32) * (S::width * Input::bytes);
  }

  // Sums of a thread: distances from the mean of a vector of its own, and their squares. That vector is one
  // of 37 at most: whatever the values are, their mean is no more than 6 deviations away from it. Distances
  // stand for the values then.
  using Sums = PivotSums<S::accumulators>;

  // The norm from each thread's sums: of the warp, of the block, of the cluster.
  __device__ __forceinline__ SlabNorm reduce(const Sums& sums, const Place& place, int slab,
                                             int round) const {
    const Share& share = place.share;
    const bool has_edge = place.has_edge;
    const int lane = threadIdx.x % 32;
    float elements = static_cast<float>(share.elements);
    Moments own{static_cast<float>(share.mine * S::width + (has_edge ? 1 : 0)), 0.0f, 0.0f};
    float from, moved, m2;
    sums.finish(own.count, moved, own.m2);
    own.mean = sums.pivot + moved;
    lanes_moments<32>(own, elements > 0.0f ? pointwise::reciprocal_fast(elements) : 0.0f, from, moved, m2);

#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    const uint32 phase = round / 2 & 1;
    const int warp = threadIdx.x / 32;
    if (lane == 0) shared.of_warps[parity][warp] = float4{elements, from + moved, m2, 0.0f};
    if constexpr (S::blocks == 1) {
      __syncthreads();
    } else if (lane == 0) {
      barrier::arrive(&shared.warps_given[parity]);
    }
    if (S::blocks == 1 || warp == 0) {
      if constexpr (S::blocks > 1) barrier::wait(&shared.warps_given[parity], phase);
      elements = merge_parts<S::warps>(shared.of_warps[parity], from, moved, m2);
    }
    if constexpr (S::by_memory) {
      if (warp == 0) {
        const auto count_of = [&](int b) {
          const int vectors = place.range.first((b + 1) * S::warps) - place.range.first(b * S::warps);
          return static_cast<float>(vectors * S::width + (b == 0 ? place.range.edges : 0));
        };
        exchange_by_memory<S>(p, slab, block, count_of, from, moved, m2);
        if (lane == 0) {
          shared.of_blocks[parity][0] = float4{from, moved, m2, 0.0f};
          barrier::arrive(&shared.received[parity]);
        }
      }
      barrier::wait(&shared.received[parity], phase);
      const float4 all = shared.of_blocks[parity][0];
      from = all.x, moved = all.y, m2 = all.z;
    } else if constexpr (S::blocks > 1) {
      // Sent with a count of its bytes: a barrier of the cluster would first wait for all that was stored.
      if (threadIdx.x == 0) barrier::expect(&shared.received[parity], S::blocks * 16);
      if (threadIdx.x < S::blocks) {
        barrier::send(&shared.of_blocks[parity][block], float4{elements, from + moved, m2, 0.0f},
                      &shared.received[parity], lane);
      }
      barrier::wait(&shared.received[parity], phase);
      merge_parts<S::blocks>(shared.of_blocks[parity], from, moved, m2);
    }
#endif
    return SlabNorm::of<Tail>(from, moved, m2, sums.pivot);
  }

  // A whole vector goes past the first-level cache, but not out of the second at once: 1% of s60, 2% of s61.
  static __device__ __forceinline__ void store(const Packed<typename Tail::Output, S::width>& y, void* output,
                                               int index, bool aligned) {
    if constexpr (Packed<typename Tail::Output, S::width>::words == 4) {
      if (aligned) {
        __stcg(reinterpret_cast<uint4*>(static_cast<char*>(output) + index * Tail::Output::bytes),
               uint4{y.word[0], y.word[1], y.word[2], y.word[3]});
        return;
      }
    }
    y.store(output, index, aligned);
  }

  // The before-chain of the thread's values and their sums.
  __device__ __forceinline__ void activate(const Place& place, int slabs, int clusters, int round, Ring& ring,
                                           float (&h)[kept][S::width], float& edge, Sums& sums) const {
    const Share& share = place.share;
    const int64 begin = place.range.begin;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float operands[Before::channel_operands > 0 ? Before::channel_operands : 1];
    const auto load_row = [&](int row) {
      Before::load_channel(p, place.n, place.first_channel + row, operands);
    };
    auto rows = row_cursor<S::spatial>(load_row);
    // A chunk that lies at `stage`.
    const auto take = [&](int c, const unsigned char* stage, auto&& keep) {
      const auto one = [&](int i, int j, bool, auto&& parts) {
        Packed<Input, S::width> packed;
        packed.load_shared(stage + (j * 32 + lane) * S::width * Input::bytes);
        float value[S::width];
        packed.unpack(value);
        typename Before::template Tensors<S::width> tensors;
        tensors.load(p, begin + share.position_of(i));
        parts([&](int from, int to) {
#pragma unroll
          for (int k = 0; k < S::width; ++k) {
            if (k >= from && k < to) value[k] = Before::value(value[k], operands, tensors, k);
          }
        });
        if (i == held || (i == 0 && share.mine <= held)) sums.pivot = Sums::mean_of(value);
#pragma unroll
        for (int k = 0; k < S::width; ++k) value[k] = sums.add(value[k], k);
        keep(i, value);
      };
      for_each_part<S::before_by_row>(share, c, true, rows, one, [](int) {});
    };
    // Vectors that are not there are set too: else their registers are taken from one slab to the next.
#pragma unroll
    for (int i = 0; i < kept; ++i) {
#pragma unroll
      for (int k = 0; k < S::width; ++k) h[i][k] = 0.0f;
    }
    // Chunks of the ring were requested before those that are held: they are taken first.
#pragma unroll
    for (int c = held_chunks; c < chunks; ++c) {
#if __CUDA_ARCH__ >= 900
      barrier::wait(&shared.arrived[warp][ring.slot], ring.parity);
#endif
      take(c, shared.stage[warp][ring.slot], [&](int i, const float(&value)[S::width]) {
#pragma unroll
        for (int k = 0; k < S::width; ++k) h[i - held][k] = value[k];
      });
      release();
      request(ring, ring.slot, slabs, clusters);
      if (++ring.slot == slots) {
        ring.slot = 0;
        ring.parity ^= 1;
      }
    }
    rows.end = 0;
#pragma unroll 1
    for (int c = 0; c < held_chunks; ++c) {
#if __CUDA_ARCH__ >= 900
      barrier::wait(&shared.arrived[warp][slots + c], round & 1);
#endif
      take(c, shared.stage[warp][slots + c], [&](int i, const float(&value)[S::width]) {
        if constexpr (!holds_raw) {
          Packed<f32, S::width> packed;
          packed.pack(value);
          packed.store_shared(held_vector(i));
        }
      });
    }
    if (place.has_edge) {
      load_row(place.edge_position / S::spatial);
      typename Before::template Tensors<1> tensors;
      tensors.load(p, begin + place.edge_position);
      edge = Before::value(load_one<Input>(p.input, begin + place.edge_position), operands, tensors, 0);
    }
    if (place.has_edge) {
      if (share.mine == 0) sums.pivot = edge;
      edge = sums.add(edge, 0);
    }
  }

  __device__ __forceinline__ void run_slab(int slab, int slabs, int clusters, int round, Ring& ring) const {
    float h[kept][S::width];
    float edge = 0.0f;
    Sums sums;
    activate(place_of(slab), slabs, clusters, round, ring, h, edge, sums);
    SlabNorm norm;
    float weight = 1.0f, bias = 0.0f;
    float operands[After::channel_operands > 0 ? After::channel_operands : 1];
    float again[Before::channel_operands > 0 ? Before::channel_operands : 1];  // of the before-chain
    const auto fetch_row = [&](const Place& place, int row) {
      weight = Tail::weight(p, place.first_channel + row);
      bias = Tail::bias(p, place.first_channel + row);
      After::load_channel(p, place.n, place.first_channel + row, operands);
      if constexpr (finishes_raw) Before::load_channel(p, place.n, place.first_channel + row, again);
    };
    {
      const Place place = place_of(slab);
      // The values of the warp's first row are loaded while sums are exchanged.
      if constexpr (finishes_by_row) fetch_row(place, place.share.begin / S::spatial);
      norm = reduce(sums, place, slab, round);
    }
    if (p.statistics != nullptr && block == 0 && threadIdx.x == 0) {
      p.statistics[2 * static_cast<int64>(slab)] = norm.mean;
      p.statistics[2 * static_cast<int64>(slab) + 1] = norm.rstd;
    }

    const Place place = place_of(slab);
    const Share& share = place.share;
    const int64 begin = place.range.begin;
    float scale, shift;
    const auto scale_row = [&] {
      scale = weight * norm.factor;
      shift = fmaf(-norm.moved, scale, bias);
    };
    scale_row();
    auto rows = row_cursor<S::spatial>([&](int row) {
      fetch_row(place, row);
      scale_row();
    });
    rows.row = share.begin / S::spatial;
    rows.end = (rows.row + 1) * S::spatial;
    void* const output = static_cast<char*>(p.output) + (begin + share.position) * Tail::Output::bytes;
    const bool aligned = Tail::has_mean || is_aligned(p, aligned_output);
    typename Means::Sums means;
    means.begin(p, slab, share.warp, 0, share.begin);
    // `raw`: what waits is what arrived.
    const auto finish = [&](int c, auto raw, auto&& value_of) {
      constexpr bool is_raw = decltype(raw)::value;
      const auto one = [&](int i, int, bool plain, auto&& parts) {
        typename Before::template Tensors<S::width> before;
        if constexpr (is_raw) before.load(p, begin + share.position_of(i));
        typename After::template Tensors<S::width> tensors;
        tensors.load(p, begin + share.position_of(i));
        float value[S::width];
        value_of(i, value);
        parts([&](int from, int to) {
#pragma unroll
          for (int k = 0; k < S::width; ++k) {
            if (k >= from && k < to) {
              if constexpr (is_raw)
                value[k] = distance_from(Before::value(value[k], again, before, k), sums.pivot);
              value[k] = After::value(fmaf(value[k], scale, shift), operands, tensors, k);
            }
          }
        });
        if constexpr (!Tail::has_mean) {
          Packed<typename Tail::Output, S::width> y;
          y.pack(value);
          store(y, output, i * S::line, plain || aligned);
        } else if (plain) {
          means.add_whole(share.line_of(i), value);
        } else {
          means.add(share.position_of(i), value);
        }
      };
      for_each_part<finishes_by_row>(share, c, aligned, rows, one,
                                     [&](int position) { means.enter(position); });
    };
    if constexpr (held > 0) {
      const bool more = slab + clusters < slabs;
      int left = 0;
      const char* next = more ? chunks_of(slab + clusters, 0, left) : nullptr;
#pragma unroll 1
      for (int c = 0; c < held_chunks; ++c) {
        finish(c, Flag<finishes_raw>{}, [&](int i, float(&value)[S::width]) {
          Packed<Waiting, S::width> packed;
          packed.load_shared(held_vector(i));
          packed.unpack(value);
        });
        if (more) {
          release();
          request(slots + c, next, left);
          next += chunk_bytes;
          left -= chunk * 32;
        }
      }
    }
#pragma unroll
    for (int c = held_chunks; c < chunks; ++c) {
      finish(c, Flag<false>{}, [&](int i, float(&value)[S::width]) {
#pragma unroll
        for (int k = 0; k < S::width; ++k) value[k] = h[i - held][k];
      });
    }
    if (place.has_edge) {
      fetch_row(place, place.edge_position / S::spatial);
      scale_row();
      typename After::template Tensors<1> tensors;
      tensors.load(p, begin + place.edge_position);
      edge = After::value(fmaf(edge, scale, shift), operands, tensors, 0);
      if constexpr (!Tail::has_mean) {
        store_one<typename Tail::Output>(p.output, begin + place.edge_position, edge);
      }
    }
    if constexpr (Tail::has_mean) {
      means.finish(share.end);
      if (share.warp == 0 && place.range.edges > 0)
        Means::leave_edges(p, slab, place.range.head, place.has_edge, edge);
    }
  }

  __device__ __forceinline__ void run() const {
    const int slabs = static_cast<int>(p.batch) * S::groups;
    const int clusters = static_cast<int>(gridDim.x) / S::blocks;
    int slab = static_cast<int>(blockIdx.x) / S::blocks;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < slots + held_chunks; ++slot)
        barrier::initialise(&shared.arrived[threadIdx.x / 32][slot]);
    }
    __syncwarp();
    Ring ring{slab};
    enter(ring, slabs);
    for (int slot = 0; slot < slots; ++slot) request(ring, slot, slabs, clusters);
    if (held > 0 && slab < slabs) {
      int left;
      const char* from = chunks_of(slab, 0, left);
      for (int c = 0; c < held_chunks; ++c) request(slots + c, from + c * chunk_bytes, left - c * chunk * 32);
    }
    if (threadIdx.x == 0) initialise_exchange<S::warps>(shared);
    sync_cluster<S>();
    int round = 0;
#pragma unroll 1
    for (; slab < slabs; slab += clusters, ++round) run_slab(slab, slabs, clusters, round, ring);
    if constexpr (Tail::has_mean) {
      Means::write(p, block, slabs, clusters, [](int vectors) { return S::Spread::of(vectors); });
    } else {
      leave_cluster<S>();
    }
#endif
  }
};

// --------------------------------------------------------------------------------------------------
// A tail whose slab stays on the chip between its statistics and its output, in persistent clusters: x is
// read once, y written once.
//
// A slab of a planar tensor is a contiguous range. Each warp of a cluster has its part of it, which bulk
// copies bring to the warp's own shared memory. Clusters take slab after slab, and the next one arrives while
// this one is computed. Two schedules:
//   ring        values wait for the statistics in registers and, as f32, in shared memory
//   overlapped  for 16 bits: half of the next slab is summed while the moments of this one are exchanged

template <bool overlapped, class Tail, class Numbers>
struct StagedSchedule {
  using Type = StagedRing<Tail, Numbers>;
};

template <class Tail, class Numbers>
struct StagedSchedule<true, Tail, Numbers> {
  using Type = typename StagedOverlapped<Tail, Numbers>::Kernel;
};

template <class Tail, class Numbers>
using TailStaged = typename StagedSchedule<Numbers::overlapped, Tail, Numbers>::Type;

}  // namespace onepass
"""


_HOST_CODE = r"""
// Host code that all launches share. Plain pointers: nothing here knows of PyTorch.
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t clamp(int64_t value, int64_t low, int64_t high) { return std::min(std::max(value, low), high); }

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

// A kernel with the numbers of its launches. Attributes are set when a GPU first meets it.
class Kernel {
 public:
  // A cooperative kernel's blocks wait for each other: a launch fails where they cannot all run at once.
  Kernel(const char* name, const void* function, int threads, int cluster, int shared_bytes, bool cooperative)
      : name_(name),
        function_(function),
        threads_(threads),
        cluster_(cluster),
        shared_bytes_(shared_bytes),
        cooperative_(cooperative) {}

  // How many clusters (blocks, where the cluster is 1) the GPU runs at a time.
  int64_t resident(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int& count = resident_[device];
    if (count == 0) count = prepare(device);
    return count;
  }

  // `parameters` are the bytes of the kernel's one parameter.
  void launch(const void* parameters, int64_t blocks, int device, cudaStream_t stream) {
    resident(device);
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = configuration(blocks, stream, attribute);
    void* arguments[] = {const_cast<void*>(parameters)};
    check(cudaLaunchKernelExC(&config, function_, arguments), name_);
    check(cudaPeekAtLastError(), name_);
  }

 private:
  cudaLaunchConfig_t configuration(int64_t blocks, cudaStream_t stream,
                                   cudaLaunchAttribute& attribute) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads_);
    config.dynamicSmemBytes = shared_bytes_;
    config.stream = stream;
    if (cooperative_) {
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    } else {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = cluster_;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    config.attrs = &attribute;
    config.numAttrs = cluster_ > 1 || cooperative_ ? 1 : 0;
    return config;
  }

  int prepare(int device) {
    constexpr int portable_cluster = 8;
    check(cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_), name_);
    int count = 0;
    if (cluster_ > 1) {
      if (cluster_ > portable_cluster)
        check(cudaFuncSetAttribute(function_, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name_);
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = configuration(cluster_, nullptr, attribute);
      check(cudaOccupancyMaxActiveClusters(&count, function_, &config), name_);
    } else {
      int multiprocessors = 0;
      check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), name_);
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, function_, threads_, shared_bytes_), name_);
      count *= multiprocessors;
    }
    if (count == 0) throw std::runtime_error(std::string(name_) + ": a block does not fit this GPU");
    return count;
  }

  const char* name_;
  const void* function_;
  int threads_;
  int cluster_;
  int shared_bytes_;
  bool cooperative_;
  std::mutex mutex_;
  std::map<int, int> resident_;  // by GPU
};

// Kernels take one struct of eight-byte members.
template <class T>
uint64_t word(T* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
inline uint64_t word(int64_t number) { return static_cast<uint64_t>(number); }
template <class Parameters>
constexpr size_t parameter_bytes(void (*)(Parameters)) {
  return sizeof(Parameters);
}

// Elements from the last boundary of a vector to the tensor's first.
int64_t phase_of(const void* tensor, int64_t element_bytes, int64_t vector_elements) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor) / element_bytes % vector_elements);
}

struct Vectors {
  int bit;  // of the result
  const void* tensor;
  int64_t element_bytes;
  int64_t elements;
};

// A bit for each tensor whose vectors lie on their boundaries where the input's do; bit 63: all of them.
int64_t aligned_bits(std::initializer_list<Vectors> tensors, int64_t phase, bool all = true) {
  uint64_t bits = 0;
  for (const Vectors& tensor : tensors) {
    const int64_t own = phase_of(tensor.tensor, tensor.element_bytes, tensor.elements);
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.tensor) % tensor.element_bytes == 0 &&
                         own == phase % tensor.elements;
    if (aligned) bits |= uint64_t{1} << tensor.bit;
    all = all && aligned;
  }
  return static_cast<int64_t>(bits | uint64_t{all} << 63);
}

}  // namespace
"""


_KERNELS_TF32 = r"""
// ==================================================================================================
// block_1_tf32: forward
//
// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 tf32
//
// plan: thin_mma
//   convolution: 81 terms, 14 products of 8 classes, operands rounded to tf32, weights in shared memory
//   tile: 4 rows of 32 cells, 128 tiles a sample, 1 row stored at a time
//   passes: 2
//   numerics: operands of the convolution are rounded to tf32
// ==================================================================================================

namespace block_1_tf32_thin_mma {
namespace onepass {
using namespace ::onepass;
}

namespace onepass {

struct Before {
  static constexpr int channel_operands = 0;
  using Only = pointwise::swish_stage<32>;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::swish_stage<32>::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

struct After {
  static constexpr int channel_operands = 0;
  using Only = pointwise::hardswish_stage<32>;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::hardswish_stage<32>::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 123039;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = false;
  static constexpr bool mean_follows_norm = false;
  static constexpr float eps = 9.99999975e-06f;
  static __device__ __forceinline__ int channel(int64 n, int c) { return c; }
  template <class P>
  static __device__ __forceinline__ float weight(const P& p, int64 c) {
    return load_one<f32>(p.parameter[2], c * 1);
  }
  template <class P>
  static __device__ __forceinline__ float bias(const P& p, int64 c) {
    return load_one<f32>(p.parameter[3], c * 1);
  }
};

}  // namespace onepass

namespace onepass {

struct BeforeRest {
  static constexpr int channel_operands = 0;
  using Only = void;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    return x0;
  }
};

}  // namespace onepass

namespace onepass {
struct Convolution {
  using Weight = f32;
  using Bias = f32;
  static constexpr bool has_bias = true;
  static constexpr bool transposed = true;
  static constexpr bool rounds_to_tf32 = true;
  static constexpr bool ties_away = false;
  static constexpr int groups = 1;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 27;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 3ll : d == 1 ? 3ll : d == 2 ? 3ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 31ll : d == 1 ? 63ll : d == 2 ? 63ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? -1ll : d == 1 ? -1ll : d == 2 ? -1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 0ll; }
  static constexpr __device__ int64 tap_stride(int d) { return d == 0 ? 9ll : d == 1 ? 3ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 0ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 0ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 0 && r == 1 ? 1ll : d == 1 && r == 0 ? 0ll : d == 1 && r == 1 ? 1ll : d == 2 && r == 0 ? 0ll : d == 2 && r == 1 ? 1ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 2ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 2ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 2ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 16ll : d == 0 && r == 1 ? 15ll : d == 1 && r == 0 ? 32ll : d == 1 && r == 1 ? 31ll : d == 2 && r == 0 ? 32ll : d == 2 && r == 1 ? 31ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1968624ll : d == 1 ? 123039ll : d == 2 ? 3969ll : d == 3 ? 63ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  using Rest = onepass::BeforeRest;
  static constexpr int threads = 512;
  static constexpr int warps = 16;
  static constexpr int spans_y = 1;
  static constexpr int spans_x = 1;
  static constexpr int tile_y = 4;
  static constexpr int tile_x = 32;
  static constexpr int tiles_y = 8;
  static constexpr int tiles_x = 1;
  static constexpr int tiles = 128;
  static constexpr int row_tiles = 1;
  static constexpr int piece = 0;
  static constexpr bool interleaved = false;
  static constexpr bool overlaps = true;
  static constexpr bool prefetches = false;
  static constexpr int stage_y = 1;
  static constexpr int chunk_pitch = 140;
  static constexpr int channel_pitch = 140;
  static constexpr int stage_bytes = 8960;
  static constexpr int shared_bytes = 222992;
  static constexpr int window_z = 2;
  static constexpr int window_y = 5;
  static constexpr int window_x = 33;
  static constexpr int lead = 0;
  static constexpr int row_pitch = 36;
  static constexpr int plane = 360;
  static constexpr bool rows_are_vectors = true;
  static constexpr bool weights_in_registers = false;
  static constexpr bool splits = false;
  static constexpr bool pairs = true;
  static constexpr bool begins_with_swish = true;
  static constexpr bool swish_alone = true;
  static constexpr bool strict = false;
};
using Agent = onepass::HoldByRecomputing<onepass::Convolution, onepass::Tail, Numbers>;
__global__ void __launch_bounds__(512, 1) onepass_thin_mma(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Agent::run(p, shared);
}

}  // namespace block_1_tf32_thin_mma
"""


_LAUNCHES_TF32 = r"""
namespace {

Kernel block_1_tf32_thin_mma_kernel("block_1_tf32_thin_mma",
    reinterpret_cast<const void*>(&block_1_tf32_thin_mma::onepass_thin_mma), 512, 1, 222992, false);

}  // namespace

int64_t block_1_tf32_workspace_bytes(int64_t batch, int device) {
  const int64_t offset_2 = divide_up((batch + 1) * 16, 256) * 256 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 24576, 256) * 256;
  return offset_4 + divide_up(batch * 32, 256) * 256;
}

void block_1_tf32(const void* input, void* output, const void* const* parameters,
                  char* workspace, int64_t batch, int device, cudaStream_t stream) {
  const int64_t resident = block_1_tf32_thin_mma_kernel.resident(device);
  const int64_t offset_2 = divide_up((batch + 1) * 16, 256) * 256 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 24576, 256) * 256;
  const int64_t number = resident * 16;
  const int64_t lag_samples = std::min<int64_t>(batch, divide_up((batch + std::min<int64_t>(batch, 1 + divide_up(number, 128))) * 128, number) * number / 128 - batch);
  check(cudaMemsetAsync(workspace, 0, offset_3, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                 // input
        word(output),                // output
        word(workspace + offset_4),  // statistics
        word(workspace),             // control
        word(workspace + offset_2),  // sets
        word(workspace + offset_3),  // parts
        word(workspace + offset_4),  // ring
        0,                           // ring_samples
        word(batch),                 // batch
        word(lag_samples),           // lag
        word(parameters[0]),         // parameter[0]
        word(parameters[1]),         // parameter[1]
        word(parameters[2]),         // parameter[2]
        word(parameters[3]),         // parameter[3]
    };
    static_assert(sizeof words == parameter_bytes(&block_1_tf32_thin_mma::onepass_thin_mma));
    const int64_t blocks = clamp((batch + lag_samples) * 128, 1, resident);
    block_1_tf32_thin_mma_kernel.launch(words, blocks, device, stream);
  }
}
"""


_KERNELS_TF32_AWAY = r"""
// ==================================================================================================
// block_1_tf32_away: forward
//
// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 tf32_away
//
// plan: thin_mma
//   convolution: 81 terms, 14 products of 8 classes, operands rounded to tf32, weights in shared memory
//   tile: 4 rows of 32 cells, 128 tiles a sample, 1 row stored at a time
//   passes: 2
//   numerics: operands of the convolution are rounded to tf32, ties away from zero
// ==================================================================================================

namespace block_1_tf32_away_thin_mma {
namespace onepass {
using namespace ::onepass;
}

namespace onepass {

struct Before {
  static constexpr int channel_operands = 0;
  using Only = pointwise::swish_stage<32>;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::swish_stage<32>::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

struct After {
  static constexpr int channel_operands = 0;
  using Only = pointwise::hardswish_stage<32>;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::hardswish_stage<32>::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 123039;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = false;
  static constexpr bool mean_follows_norm = false;
  static constexpr float eps = 9.99999975e-06f;
  static __device__ __forceinline__ int channel(int64 n, int c) { return c; }
  template <class P>
  static __device__ __forceinline__ float weight(const P& p, int64 c) {
    return load_one<f32>(p.parameter[2], c * 1);
  }
  template <class P>
  static __device__ __forceinline__ float bias(const P& p, int64 c) {
    return load_one<f32>(p.parameter[3], c * 1);
  }
};

}  // namespace onepass

namespace onepass {

struct BeforeRest {
  static constexpr int channel_operands = 0;
  using Only = void;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    return x0;
  }
};

}  // namespace onepass

namespace onepass {
struct Convolution {
  using Weight = f32;
  using Bias = f32;
  static constexpr bool has_bias = true;
  static constexpr bool transposed = true;
  static constexpr bool rounds_to_tf32 = true;
  static constexpr bool ties_away = true;
  static constexpr int groups = 1;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 27;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 3ll : d == 1 ? 3ll : d == 2 ? 3ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 31ll : d == 1 ? 63ll : d == 2 ? 63ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? -1ll : d == 1 ? -1ll : d == 2 ? -1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 0ll; }
  static constexpr __device__ int64 tap_stride(int d) { return d == 0 ? 9ll : d == 1 ? 3ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 0ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 0ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 0 && r == 1 ? 1ll : d == 1 && r == 0 ? 0ll : d == 1 && r == 1 ? 1ll : d == 2 && r == 0 ? 0ll : d == 2 && r == 1 ? 1ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 2ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 2ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 2ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 16ll : d == 0 && r == 1 ? 15ll : d == 1 && r == 0 ? 32ll : d == 1 && r == 1 ? 31ll : d == 2 && r == 0 ? 32ll : d == 2 && r == 1 ? 31ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1968624ll : d == 1 ? 123039ll : d == 2 ? 3969ll : d == 3 ? 63ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  using Rest = onepass::BeforeRest;
  static constexpr int threads = 512;
  static constexpr int warps = 16;
  static constexpr int spans_y = 1;
  static constexpr int spans_x = 1;
  static constexpr int tile_y = 4;
  static constexpr int tile_x = 32;
  static constexpr int tiles_y = 8;
  static constexpr int tiles_x = 1;
  static constexpr int tiles = 128;
  static constexpr int row_tiles = 1;
  static constexpr int piece = 0;
  static constexpr bool interleaved = false;
  static constexpr bool overlaps = true;
  static constexpr bool prefetches = false;
  static constexpr int stage_y = 1;
  static constexpr int chunk_pitch = 140;
  static constexpr int channel_pitch = 140;
  static constexpr int stage_bytes = 8960;
  static constexpr int shared_bytes = 222992;
  static constexpr int window_z = 2;
  static constexpr int window_y = 5;
  static constexpr int window_x = 33;
  static constexpr int lead = 0;
  static constexpr int row_pitch = 36;
  static constexpr int plane = 360;
  static constexpr bool rows_are_vectors = true;
  static constexpr bool weights_in_registers = false;
  static constexpr bool splits = false;
  static constexpr bool pairs = true;
  static constexpr bool begins_with_swish = true;
  static constexpr bool swish_alone = true;
  static constexpr bool strict = false;
};
using Agent = onepass::HoldByRecomputing<onepass::Convolution, onepass::Tail, Numbers>;
__global__ void __launch_bounds__(512, 1) onepass_thin_mma(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Agent::run(p, shared);
}

}  // namespace block_1_tf32_away_thin_mma
"""


_LAUNCHES_TF32_AWAY = r"""
namespace {

Kernel block_1_tf32_away_thin_mma_kernel("block_1_tf32_away_thin_mma",
    reinterpret_cast<const void*>(&block_1_tf32_away_thin_mma::onepass_thin_mma), 512, 1, 222992, false);

}  // namespace

int64_t block_1_tf32_away_workspace_bytes(int64_t batch, int device) {
  const int64_t offset_2 = divide_up((batch + 1) * 16, 256) * 256 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 24576, 256) * 256;
  return offset_4 + divide_up(batch * 32, 256) * 256;
}

void block_1_tf32_away(const void* input, void* output, const void* const* parameters,
                       char* workspace, int64_t batch, int device, cudaStream_t stream) {
  const int64_t resident = block_1_tf32_away_thin_mma_kernel.resident(device);
  const int64_t offset_2 = divide_up((batch + 1) * 16, 256) * 256 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 24576, 256) * 256;
  const int64_t number = resident * 16;
  const int64_t lag_samples = std::min<int64_t>(batch, divide_up((batch + std::min<int64_t>(batch, 1 + divide_up(number, 128))) * 128, number) * number / 128 - batch);
  check(cudaMemsetAsync(workspace, 0, offset_3, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                 // input
        word(output),                // output
        word(workspace + offset_4),  // statistics
        word(workspace),             // control
        word(workspace + offset_2),  // sets
        word(workspace + offset_3),  // parts
        word(workspace + offset_4),  // ring
        0,                           // ring_samples
        word(batch),                 // batch
        word(lag_samples),           // lag
        word(parameters[0]),         // parameter[0]
        word(parameters[1]),         // parameter[1]
        word(parameters[2]),         // parameter[2]
        word(parameters[3]),         // parameter[3]
    };
    static_assert(sizeof words == parameter_bytes(&block_1_tf32_away_thin_mma::onepass_thin_mma));
    const int64_t blocks = clamp((batch + lag_samples) * 128, 1, resident);
    block_1_tf32_away_thin_mma_kernel.launch(words, blocks, device, stream);
  }
}
"""


_KERNELS_F32 = r"""
// ==================================================================================================
// block_1_f32: forward
//
// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 f32
//
// plan: thin_mma
//   convolution: 81 terms, 14 products of 8 classes, operands split in two, weights in shared memory
//   tile: 4 rows of 32 cells, 128 tiles a sample, 1 row stored at a time
//   passes: 2
// ==================================================================================================

namespace block_1_near_f32_thin_mma {
namespace onepass {
using namespace ::onepass;
}

namespace onepass {

struct Before {
  static constexpr int channel_operands = 0;
  using Only = pointwise::swish_stage<32>;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::swish_stage<32>::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

struct After {
  static constexpr int channel_operands = 0;
  using Only = pointwise::hardswish_stage<32>;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::hardswish_stage<32>::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 123039;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = false;
  static constexpr bool mean_follows_norm = false;
  static constexpr float eps = 9.99999975e-06f;
  static __device__ __forceinline__ int channel(int64 n, int c) { return c; }
  template <class P>
  static __device__ __forceinline__ float weight(const P& p, int64 c) {
    return load_one<f32>(p.parameter[2], c * 1);
  }
  template <class P>
  static __device__ __forceinline__ float bias(const P& p, int64 c) {
    return load_one<f32>(p.parameter[3], c * 1);
  }
};

}  // namespace onepass

namespace onepass {

struct BeforeRest {
  static constexpr int channel_operands = 0;
  using Only = void;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    return x0;
  }
};

}  // namespace onepass

namespace onepass {
struct Convolution {
  using Weight = f32;
  using Bias = f32;
  static constexpr bool has_bias = true;
  static constexpr bool transposed = true;
  static constexpr bool rounds_to_tf32 = false;
  static constexpr bool ties_away = false;
  static constexpr int groups = 1;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 27;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 3ll : d == 1 ? 3ll : d == 2 ? 3ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 31ll : d == 1 ? 63ll : d == 2 ? 63ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? -1ll : d == 1 ? -1ll : d == 2 ? -1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 0ll; }
  static constexpr __device__ int64 tap_stride(int d) { return d == 0 ? 9ll : d == 1 ? 3ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 0ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 0ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 0 && r == 1 ? 1ll : d == 1 && r == 0 ? 0ll : d == 1 && r == 1 ? 1ll : d == 2 && r == 0 ? 0ll : d == 2 && r == 1 ? 1ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 2ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 2ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 2ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 16ll : d == 0 && r == 1 ? 15ll : d == 1 && r == 0 ? 32ll : d == 1 && r == 1 ? 31ll : d == 2 && r == 0 ? 32ll : d == 2 && r == 1 ? 31ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1968624ll : d == 1 ? 123039ll : d == 2 ? 3969ll : d == 3 ? 63ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  using Rest = onepass::BeforeRest;
  static constexpr int threads = 512;
  static constexpr int warps = 16;
  static constexpr int spans_y = 1;
  static constexpr int spans_x = 1;
  static constexpr int tile_y = 4;
  static constexpr int tile_x = 32;
  static constexpr int tiles_y = 8;
  static constexpr int tiles_x = 1;
  static constexpr int tiles = 128;
  static constexpr int row_tiles = 1;
  static constexpr int piece = 0;
  static constexpr bool interleaved = false;
  static constexpr bool overlaps = true;
  static constexpr bool prefetches = false;
  static constexpr int stage_y = 1;
  static constexpr int chunk_pitch = 140;
  static constexpr int channel_pitch = 140;
  static constexpr int stage_bytes = 8960;
  static constexpr int shared_bytes = 230160;
  static constexpr int window_z = 2;
  static constexpr int window_y = 5;
  static constexpr int window_x = 33;
  static constexpr int lead = 0;
  static constexpr int row_pitch = 36;
  static constexpr int plane = 360;
  static constexpr bool rows_are_vectors = true;
  static constexpr bool weights_in_registers = false;
  static constexpr bool splits = true;
  static constexpr bool pairs = true;
  static constexpr bool begins_with_swish = true;
  static constexpr bool swish_alone = true;
  static constexpr bool strict = false;
};
using Agent = onepass::HoldByRecomputing<onepass::Convolution, onepass::Tail, Numbers>;
__global__ void __launch_bounds__(512, 1) onepass_thin_mma(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Agent::run(p, shared);
}

}  // namespace block_1_near_f32_thin_mma
"""


_LAUNCHES_F32 = r"""
namespace {

Kernel block_1_near_f32_thin_mma_kernel("block_1_near_f32_thin_mma",
    reinterpret_cast<const void*>(&block_1_near_f32_thin_mma::onepass_thin_mma), 512, 1, 230160, false);

}  // namespace

int64_t block_1_f32_workspace_bytes(int64_t batch, int device) {
  const int64_t offset_2 = divide_up((batch + 1) * 16, 256) * 256 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 24576, 256) * 256;
  return offset_4 + divide_up(batch * 32, 256) * 256;
}

void block_1_f32(const void* input, void* output, const void* const* parameters,
                 char* workspace, int64_t batch, int device, cudaStream_t stream) {
  const int64_t resident = block_1_near_f32_thin_mma_kernel.resident(device);
  const int64_t offset_2 = divide_up((batch + 1) * 16, 256) * 256 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 24576, 256) * 256;
  const int64_t number = resident * 16;
  const int64_t lag_samples = std::min<int64_t>(batch, divide_up((batch + std::min<int64_t>(batch, 1 + divide_up(number, 128))) * 128, number) * number / 128 - batch);
  check(cudaMemsetAsync(workspace, 0, offset_3, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                 // input
        word(output),                // output
        word(workspace + offset_4),  // statistics
        word(workspace),             // control
        word(workspace + offset_2),  // sets
        word(workspace + offset_3),  // parts
        word(workspace + offset_4),  // ring
        0,                           // ring_samples
        word(batch),                 // batch
        word(lag_samples),           // lag
        word(parameters[0]),         // parameter[0]
        word(parameters[1]),         // parameter[1]
        word(parameters[2]),         // parameter[2]
        word(parameters[3]),         // parameter[3]
    };
    static_assert(sizeof words == parameter_bytes(&block_1_near_f32_thin_mma::onepass_thin_mma));
    const int64_t blocks = clamp((batch + lag_samples) * 128, 1, resident);
    block_1_near_f32_thin_mma_kernel.launch(words, blocks, device, stream);
  }
}
"""


_KERNELS = r"""
// ==================================================================================================
// block_1_tail: forward
//
// swish | group_norm(4) | hardswish @ 128x16x31x63x63 f32
//
// plan: tail_staged
//   slab: 492156 elements in 8 blocks of a cluster
//   schedule: ring
//   thread: 31 vectors of 4 elements, 16 of them in shared memory
//   staging: 3 chunks of 4 vectors a thread
// ==================================================================================================

namespace block_1_tail_tail_staged {
namespace onepass {
using namespace ::onepass;
}

namespace onepass {

struct Before {
  static constexpr int channel_operands = 0;
  using Only = pointwise::swish_stage<32>;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::swish_stage<32>::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

struct After {
  static constexpr int channel_operands = 0;
  using Only = pointwise::hardswish_stage<32>;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::hardswish_stage<32>::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

// swish | group_norm(4) | hardswish
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 2;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 123039;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = false;
  static constexpr bool mean_follows_norm = false;
  static constexpr float eps = 9.99999975e-06f;
  static __device__ __forceinline__ int channel(int64 n, int c) { return c; }
  template <class P>
  static __device__ __forceinline__ float weight(const P& p, int64 c) {
    return load_one<f32>(p.parameter[0], c * 1);
  }
  template <class P>
  static __device__ __forceinline__ float bias(const P& p, int64 c) {
    return load_one<f32>(p.parameter[1], c * 1);
  }
};

}  // namespace onepass

struct Numbers {
  static constexpr int threads = 512;
  static constexpr int width = 4;
  static constexpr int blocks = 8;
  static constexpr int vectors = 31;
  static constexpr bool overlapped = false;
  static constexpr bool by_memory = false;
  static constexpr int held = 16;
  static constexpr int chunk = 4;
  static constexpr int slots = 3;
};
using Agent = onepass::TailStaged<onepass::Tail, Numbers>;
static_assert(sizeof(Agent::Shared) == 231168);
__global__ void __launch_bounds__(512, 1) onepass_tail_staged(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ __align__(128) unsigned char memory[];
  onepass::allow_kernel_after();
  onepass::wait_for_kernel_before();
  Agent{p, *reinterpret_cast<Agent::Shared*>(memory), static_cast<int>(blockIdx.x % 8)}.run();
}

}  // namespace block_1_tail_tail_staged
"""


_LAUNCHES = r"""
namespace {

Kernel block_1_tail_tail_staged_kernel("block_1_tail_tail_staged",
    reinterpret_cast<const void*>(&block_1_tail_tail_staged::onepass_tail_staged), 512, 8, 231168, false);

}  // namespace

int64_t block_1_tail_workspace_bytes(int64_t batch, int device) {
  return 0;
}

void block_1_tail(const void* input, void* output, const void* const* parameters,
                  char* workspace, int64_t batch, int device, cudaStream_t stream) {
  const int64_t resident = block_1_tail_tail_staged_kernel.resident(device);
  {
    const uint64_t words[] = {
        word(input),                  // input
        word(output),                 // output
        0,                            // statistics
        0,                            // control
        0,                            // parts
        0,                            // sums
        word(aligned_bits({{0, input, 4, 4}, {1, output, 4, 4}}, phase_of(input, 4, 4))),  // aligned
        word(phase_of(input, 4, 4)),  // phase
        word(batch),                  // batch
        word(1),                      // wave_units
        word(parameters[0]),          // parameter[0]
        word(parameters[1]),          // parameter[1]
    };
    static_assert(sizeof words == parameter_bytes(&block_1_tail_tail_staged::onepass_tail_staged));
    const int64_t blocks = std::min<int64_t>(batch * 4, resident) * 8;
    block_1_tail_tail_staged_kernel.launch(words, blocks, device, stream);
  }
}
"""


_BINDING_TF32 = r"""
// What PyTorch calls: checks, memory from its allocator, its current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

int64_t block_1_tf32_workspace_bytes(int64_t batch, int device);
void block_1_tf32(const void* input, void* output, const void* const* parameters,
                  char* workspace, int64_t batch, int device, cudaStream_t stream);

namespace {

constexpr int64_t any = -1;  // the batch

// Without streams: where several copies of the standard library are loaded, printing a number may crash.
[[noreturn]] void refuse(const char* op, const std::string& why) {
  throw std::runtime_error(std::string(op) + ": " + why);
}

std::string listed(at::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

void check_tensor(const char* op, const char* what, const at::Tensor& tensor, at::IntArrayRef sizes,
                  at::ScalarType type, at::MemoryFormat format, const at::Device& device) {
  bool fits = tensor.device() == device && tensor.scalar_type() == type &&
              tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous(format);
  for (size_t d = 0; fits && d < sizes.size(); ++d) fits = sizes[d] == any || tensor.size(d) == sizes[d];
  if (fits) return;
  const std::string wanted = std::string(c10::toString(type)) + " tensor on the input's GPU of sizes ";
  refuse(op, std::string(what) + " must be a dense " + wanted + listed(sizes) + " (-1: any), is " +
                 c10::toString(tensor.scalar_type()) + " of sizes " + listed(tensor.sizes()) +
                 " and strides " + listed(tensor.strides()));
}

void check_cuda(const char* op, const at::Tensor& input) {
  if (!input.is_cuda()) refuse(op, "the input must be on a GPU");
}

at::Tensor run_block_1_tf32(const at::Tensor& input, at::TensorList parameters) {
  check_cuda("block_1_tf32", input);
  check_tensor("block_1_tf32", "the input", input, {any, 3, 16, 32, 32}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  if (parameters.size() != 4) {
    refuse("block_1_tf32", "takes 4 parameters");
  }
  check_tensor("block_1_tf32", "parameter 0", parameters[0], {3, 16, 3, 3, 3}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32", "parameter 1", parameters[1], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32", "parameter 2", parameters[2], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32", "parameter 3", parameters[3], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  std::array<const void*, 4> addresses{};
  for (size_t i = 0; i < 4; ++i) addresses[i] = parameters[i].const_data_ptr();
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t batch = input.size(0);
  at::Tensor output = at::empty({batch, 16, 31, 63, 63}, input.options());
  if (batch == 0) return output;
  const int device = input.device().index();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const int64_t workspace_bytes = block_1_tf32_workspace_bytes(batch, device);
  const at::Tensor workspace = at::empty({workspace_bytes}, input.options().dtype(at::kByte));
  block_1_tf32(input.const_data_ptr(), output.mutable_data_ptr(), addresses.data(),
               static_cast<char*>(workspace.mutable_data_ptr()), batch, device, stream);
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(onepass_s60_8e6d900d, CUDA, library) {
  library.impl("block_1_tf32", run_block_1_tf32);
}
"""


_BINDING_TF32_AWAY = r"""
// What PyTorch calls: checks, memory from its allocator, its current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

int64_t block_1_tf32_away_workspace_bytes(int64_t batch, int device);
void block_1_tf32_away(const void* input, void* output, const void* const* parameters,
                       char* workspace, int64_t batch, int device, cudaStream_t stream);

namespace {

constexpr int64_t any = -1;  // the batch

// Without streams: where several copies of the standard library are loaded, printing a number may crash.
[[noreturn]] void refuse(const char* op, const std::string& why) {
  throw std::runtime_error(std::string(op) + ": " + why);
}

std::string listed(at::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

void check_tensor(const char* op, const char* what, const at::Tensor& tensor, at::IntArrayRef sizes,
                  at::ScalarType type, at::MemoryFormat format, const at::Device& device) {
  bool fits = tensor.device() == device && tensor.scalar_type() == type &&
              tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous(format);
  for (size_t d = 0; fits && d < sizes.size(); ++d) fits = sizes[d] == any || tensor.size(d) == sizes[d];
  if (fits) return;
  const std::string wanted = std::string(c10::toString(type)) + " tensor on the input's GPU of sizes ";
  refuse(op, std::string(what) + " must be a dense " + wanted + listed(sizes) + " (-1: any), is " +
                 c10::toString(tensor.scalar_type()) + " of sizes " + listed(tensor.sizes()) +
                 " and strides " + listed(tensor.strides()));
}

void check_cuda(const char* op, const at::Tensor& input) {
  if (!input.is_cuda()) refuse(op, "the input must be on a GPU");
}

at::Tensor run_block_1_tf32_away(const at::Tensor& input, at::TensorList parameters) {
  check_cuda("block_1_tf32_away", input);
  check_tensor("block_1_tf32_away", "the input", input, {any, 3, 16, 32, 32}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  if (parameters.size() != 4) {
    refuse("block_1_tf32_away", "takes 4 parameters");
  }
  check_tensor("block_1_tf32_away", "parameter 0", parameters[0], {3, 16, 3, 3, 3}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32_away", "parameter 1", parameters[1], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32_away", "parameter 2", parameters[2], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32_away", "parameter 3", parameters[3], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  std::array<const void*, 4> addresses{};
  for (size_t i = 0; i < 4; ++i) addresses[i] = parameters[i].const_data_ptr();
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t batch = input.size(0);
  at::Tensor output = at::empty({batch, 16, 31, 63, 63}, input.options());
  if (batch == 0) return output;
  const int device = input.device().index();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const int64_t workspace_bytes = block_1_tf32_away_workspace_bytes(batch, device);
  const at::Tensor workspace = at::empty({workspace_bytes}, input.options().dtype(at::kByte));
  block_1_tf32_away(input.const_data_ptr(), output.mutable_data_ptr(), addresses.data(),
                    static_cast<char*>(workspace.mutable_data_ptr()), batch, device, stream);
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(onepass_s60_8e6d900d, CUDA, library) {
  library.impl("block_1_tf32_away", run_block_1_tf32_away);
}
"""


_BINDING_F32 = r"""
// What PyTorch calls: checks, memory from its allocator, its current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

int64_t block_1_f32_workspace_bytes(int64_t batch, int device);
void block_1_f32(const void* input, void* output, const void* const* parameters,
                 char* workspace, int64_t batch, int device, cudaStream_t stream);

namespace {

constexpr int64_t any = -1;  // the batch

// Without streams: where several copies of the standard library are loaded, printing a number may crash.
[[noreturn]] void refuse(const char* op, const std::string& why) {
  throw std::runtime_error(std::string(op) + ": " + why);
}

std::string listed(at::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

void check_tensor(const char* op, const char* what, const at::Tensor& tensor, at::IntArrayRef sizes,
                  at::ScalarType type, at::MemoryFormat format, const at::Device& device) {
  bool fits = tensor.device() == device && tensor.scalar_type() == type &&
              tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous(format);
  for (size_t d = 0; fits && d < sizes.size(); ++d) fits = sizes[d] == any || tensor.size(d) == sizes[d];
  if (fits) return;
  const std::string wanted = std::string(c10::toString(type)) + " tensor on the input's GPU of sizes ";
  refuse(op, std::string(what) + " must be a dense " + wanted + listed(sizes) + " (-1: any), is " +
                 c10::toString(tensor.scalar_type()) + " of sizes " + listed(tensor.sizes()) +
                 " and strides " + listed(tensor.strides()));
}

void check_cuda(const char* op, const at::Tensor& input) {
  if (!input.is_cuda()) refuse(op, "the input must be on a GPU");
}

at::Tensor run_block_1_f32(const at::Tensor& input, at::TensorList parameters) {
  check_cuda("block_1_f32", input);
  check_tensor("block_1_f32", "the input", input, {any, 3, 16, 32, 32}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  if (parameters.size() != 4) {
    refuse("block_1_f32", "takes 4 parameters");
  }
  check_tensor("block_1_f32", "parameter 0", parameters[0], {3, 16, 3, 3, 3}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_f32", "parameter 1", parameters[1], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_f32", "parameter 2", parameters[2], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_f32", "parameter 3", parameters[3], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  std::array<const void*, 4> addresses{};
  for (size_t i = 0; i < 4; ++i) addresses[i] = parameters[i].const_data_ptr();
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t batch = input.size(0);
  at::Tensor output = at::empty({batch, 16, 31, 63, 63}, input.options());
  if (batch == 0) return output;
  const int device = input.device().index();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const int64_t workspace_bytes = block_1_f32_workspace_bytes(batch, device);
  const at::Tensor workspace = at::empty({workspace_bytes}, input.options().dtype(at::kByte));
  block_1_f32(input.const_data_ptr(), output.mutable_data_ptr(), addresses.data(),
              static_cast<char*>(workspace.mutable_data_ptr()), batch, device, stream);
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(onepass_s60_8e6d900d, CUDA, library) {
  library.impl("block_1_f32", run_block_1_f32);
}
"""


_BINDING = r"""
// What PyTorch calls: checks, memory from its allocator, its current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

int64_t block_1_tail_workspace_bytes(int64_t batch, int device);
void block_1_tail(const void* input, void* output, const void* const* parameters,
                  char* workspace, int64_t batch, int device, cudaStream_t stream);

namespace {

constexpr int64_t any = -1;  // the batch

// Without streams: where several copies of the standard library are loaded, printing a number may crash.
[[noreturn]] void refuse(const char* op, const std::string& why) {
  throw std::runtime_error(std::string(op) + ": " + why);
}

std::string listed(at::IntArrayRef sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

void check_tensor(const char* op, const char* what, const at::Tensor& tensor, at::IntArrayRef sizes,
                  at::ScalarType type, at::MemoryFormat format, const at::Device& device) {
  bool fits = tensor.device() == device && tensor.scalar_type() == type &&
              tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous(format);
  for (size_t d = 0; fits && d < sizes.size(); ++d) fits = sizes[d] == any || tensor.size(d) == sizes[d];
  if (fits) return;
  const std::string wanted = std::string(c10::toString(type)) + " tensor on the input's GPU of sizes ";
  refuse(op, std::string(what) + " must be a dense " + wanted + listed(sizes) + " (-1: any), is " +
                 c10::toString(tensor.scalar_type()) + " of sizes " + listed(tensor.sizes()) +
                 " and strides " + listed(tensor.strides()));
}

void check_cuda(const char* op, const at::Tensor& input) {
  if (!input.is_cuda()) refuse(op, "the input must be on a GPU");
}

at::Tensor run_block_1_tail(const at::Tensor& input, at::TensorList parameters) {
  check_cuda("block_1_tail", input);
  check_tensor("block_1_tail", "the input", input, {any, 16, 31, 63, 63}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  if (parameters.size() != 2) {
    refuse("block_1_tail", "takes 2 parameters");
  }
  check_tensor("block_1_tail", "parameter 0", parameters[0], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tail", "parameter 1", parameters[1], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  std::array<const void*, 2> addresses{};
  for (size_t i = 0; i < 2; ++i) addresses[i] = parameters[i].const_data_ptr();
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t batch = input.size(0);
  at::Tensor output = at::empty({batch, 16, 31, 63, 63}, input.options());
  if (batch == 0) return output;
  const int device = input.device().index();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const int64_t workspace_bytes = block_1_tail_workspace_bytes(batch, device);
  const at::Tensor workspace = at::empty({workspace_bytes}, input.options().dtype(at::kByte));
  block_1_tail(input.const_data_ptr(), output.mutable_data_ptr(), addresses.data(),
               static_cast<char*>(workspace.mutable_data_ptr()), batch, device, stream);
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(onepass_s60_8e6d900d, CUDA, library) {
  library.impl("block_1_tail", run_block_1_tail);
}
"""


_NAMESPACE = "onepass_s60_8e6d900d"
# What each extension is built of, when one of its operators is first called.
_EXTENSIONS = {
    "tf32": (_BINDING_TF32, [_CUDA_HEAD, _DEVICE_CODE, _KERNELS_TF32, _HOST_CODE, _LAUNCHES_TF32]),
    "tf32_away": (_BINDING_TF32_AWAY, [_CUDA_HEAD, _DEVICE_CODE, _KERNELS_TF32_AWAY, _HOST_CODE, _LAUNCHES_TF32_AWAY]),
    "f32": (_BINDING_F32, [_CUDA_HEAD, _DEVICE_CODE, _KERNELS_F32, _HOST_CODE, _LAUNCHES_F32]),
    "common": (_BINDING, [_CUDA_HEAD, _DEVICE_CODE, _KERNELS, _HOST_CODE, _LAUNCHES]),
}
_OPERATORS = {  # name: (extension, schema)
    "block_1_tf32": ("tf32", "block_1_tf32(Tensor input, Tensor[] parameters) -> Tensor"),
    "block_1_tf32_away": ("tf32_away", "block_1_tf32_away(Tensor input, Tensor[] parameters) -> Tensor"),
    "block_1_f32": ("f32", "block_1_f32(Tensor input, Tensor[] parameters) -> Tensor"),
    "block_1_tail": ("common", "block_1_tail(Tensor input, Tensor[] parameters) -> Tensor"),
}
# What each block takes: type, sizes after the batch, order in memory; and of its parameters.
_FITTING = {
    "block_1": (torch.float32, (3, 16, 32, 32), torch.contiguous_format, [
        ((3, 16, 3, 3, 3), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
    ]),
    "block_1_tail": (torch.float32, (16, 31, 63, 63), torch.contiguous_format, [
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
    ]),
}
_MOST_SAMPLES = {}  # of those that do not take any batch
_LEAST_MULTIPROCESSORS = {}  # of those that do not run on any such GPU
_NVCC = ["-O3", "-gencode=arch=compute_90a,code=sm_90a"]


def _check_devices(input, parameters):
    """A parameter on the meta device brings a call of real tensors here."""
    for parameter in parameters:
        if parameter.device != input.device:
            raise RuntimeError(f"a parameter is on {parameter.device}, the input on {input.device}")


def _fake_block_1_tf32(input, parameters):
    _check_devices(input, parameters)
    return torch.empty((input.shape[0], 16, 31, 63, 63), dtype=input.dtype, device=input.device)


def _fake_block_1_tf32_away(input, parameters):
    _check_devices(input, parameters)
    return torch.empty((input.shape[0], 16, 31, 63, 63), dtype=input.dtype, device=input.device)


def _fake_block_1_f32(input, parameters):
    _check_devices(input, parameters)
    return torch.empty((input.shape[0], 16, 31, 63, 63), dtype=input.dtype, device=input.device)


def _fake_block_1_tail(input, parameters):
    _check_devices(input, parameters)
    return torch.empty((input.shape[0], 16, 31, 63, 63), dtype=input.dtype, device=input.device)


_building = threading.RLock()
_built = {}  # extension: why it could not be built, or "" where it was


def _build(extension):
    """Compiles and loads an extension, which registers its operators for CUDA; why that failed, or ""."""
    with _building:
        if extension not in _built:
            binding, cuda = _EXTENSIONS[extension]
            try:
                torch.utils.cpp_extension.load_inline(
                    name=f"{_NAMESPACE}_{extension}",
                    cpp_sources=[binding],
                    cuda_sources=list(cuda),
                    extra_cuda_cflags=_NVCC,
                    is_python_module=False,
                    no_implicit_headers=True,
                )
                _built[extension] = ""
            except Exception as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                _built[extension] = f"the kernels could not be built ({lines[0]})"
        return _built[extension]


def _register():
    """Declares the operators, so that torch.compile knows them before they are built.

    NAME_recomputed is for compiled code that wants gradients: its backward pass is the original's.
    """
    namespace = getattr(torch.ops, _NAMESPACE)
    if hasattr(namespace, "exported"):  # the same file, imported under another name
        return
    namespace.exported = library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # kept
    for name, (_, schema) in _OPERATORS.items():
        library.define(schema)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", globals()[f"_fake_{name}"], lib=library)
        if name in _STAGES:
            _register_recomputed(library, name)


def _register_recomputed(library, name):
    def run(x, parameters):
        return getattr(getattr(torch.ops, _NAMESPACE), name)(x, parameters)

    def keep(ctx, inputs, output):
        x, parameters = inputs
        ctx.wanted = [tensor.requires_grad for tensor in (x, *parameters)]
        ctx.save_for_backward(x, *parameters)

    def backward(ctx, output_gradient):
        first, *others = _recomputed_gradients(
            _STAGES[name], ctx.saved_tensors, ctx.wanted, output_gradient
        )
        return first, others

    recomputed = f"{name}_recomputed"
    library.define(f"{recomputed}(Tensor input, Tensor[] parameters) -> Tensor")
    library.impl(recomputed, run, "CompositeExplicitAutograd")
    qualified = f"{_NAMESPACE}::{recomputed}"
    torch.library.register_fake(qualified, globals()[f"_fake_{name}"], lib=library)
    torch.library.register_autograd(qualified, backward, setup_context=keep, lib=library)


# ----------------------------------------------------------------------------------------------------
# When a kernel runs. Every other call runs the original code and says why.

_reasons = {}  # why calls ran the original code: how many did


def _note(block, why):
    """Counts a call that runs the original code; the first of its kind warns."""
    sentence = f"ModelNew: {block} runs the original code: {why}"
    _reasons[sentence] = _reasons.get(sentence, 0) + 1
    if _reasons[sentence] == 1:
        warnings.warn(sentence, RuntimeWarning, stacklevel=4)


_note_compiled = torch.compiler.assume_constant_result(_note)  # while a compiler traces


def _say(block, why):
    if torch.compiler.is_compiling():
        _note_compiled(block, why)
    else:
        _note(block, why)


def _shown(tensor):
    """Its sizes; a compiler may have symbols for them."""
    return "" if torch.compiler.is_compiling() else f" {tuple(tensor.shape)}"


def _wants_gradients(x, parameters):
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))


def _unusual(x, parameters):
    """Why no kernel may run now, whatever it computes; a compiler knows its own tensors and modes."""
    if torch.compiler.is_compiling():
        return "a torch.func transform is active" if torch._C._are_functorch_transforms_active() else ""
    for tensor in (x, *parameters):
        if type(tensor) not in _PLAIN:
            return f"a tensor is a {type(tensor).__name__}"
    if x.layout != torch.strided:
        return f"the input is {x.layout}"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if torch._C._is_tracing():
        return "torch.jit traces the call"
    return ""


def _unlike(block, x, parameters):
    """Why these are not tensors that the kernels of the block are for; "" where they are."""
    dtype, sizes, memory_format, wanted = _FITTING[block]
    why = _unusual(x, parameters)
    if why:
        return why
    if not x.is_cuda:
        return "the input is not on a GPU"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if x.dtype != dtype:
        return f"the input is {x.dtype}, not {dtype}"
    if x.shape[1:] != sizes:
        return f"the input's sizes{_shown(x)} are not the {(-1, *sizes)} it was written for"
    if not x.is_contiguous(memory_format=memory_format):
        return f"the input is not dense in {memory_format}"
    for index, (parameter, (shape, order)) in enumerate(zip(parameters, wanted)):
        first = x.shape[:1] if shape[:1] == (-1,) else shape[:1]
        if parameter.shape[:1] != first or parameter.shape[1:] != shape[1:]:
            return f"parameter {index} has the sizes{_shown(parameter)}, not {shape}"
        if parameter.dtype != dtype or parameter.device != x.device:
            return f"parameter {index} is {parameter.dtype} on {parameter.device}, unlike the input"
        if not parameter.is_contiguous(memory_format=order):
            return f"parameter {index} is not dense"
    return ""


_gpus = {}  # by index


@torch.compiler.assume_constant_result
def _unable(name, device):
    """Why the operator does not run on this GPU; "" where it does, and is built."""
    if device not in _gpus:
        _gpus[device] = torch.cuda.get_device_properties(device)
    gpu = _gpus[device]
    if (gpu.major, gpu.minor) != (9, 0):
        return f"the GPU is sm_{gpu.major}{gpu.minor}, the kernels are for sm_90a"
    least = _LEAST_MULTIPROCESSORS.get(name, 1)
    if gpu.multi_processor_count < least:
        return f"the GPU has {gpu.multi_processor_count} multiprocessors, the kernel needs {least}"
    return _build(_OPERATORS[name][0])


def _too_many(name, x):
    if name in _MOST_SAMPLES and x.shape[0] > _MOST_SAMPLES[name]:
        return f"the batch has more than {_MOST_SAMPLES[name]} samples"
    return ""


def _way(block, x, parameters, gradients):
    """Names of the operators that run the block, of a training step both; why there are none, "" where
    PyTorch's convolution is the plan; and whether the next such call has the same answer.
    """
    why = _unlike(block, x, parameters)
    if why:
        return (), why, False
    mode, settled = _mode(block, x, gradients)
    name, pair, wants_input = _WAYS[block].get(mode, ("", (), True))
    device = x.device.index
    if gradients and pair and (wants_input or not x.requires_grad):
        why = _too_many(pair[0], x) or _unable(pair[0], device) or _unable(pair[1], device)
        if not why:
            return pair, "", settled
    elif gradients and block in _TRAINED_TAILS:
        return (), "", settled
    if not name:
        return (), why, settled and not why
    why = _too_many(name, x) or _unable(name, device)
    return ((), why, False) if why else ((name,), "", settled)


def _attempt(block, x, parameters):
    """The block by its kernels, and ""; or None and why not: "" where PyTorch's convolution is the plan."""
    if torch.compiler.is_compiling():
        return _attempt_compiled(block, x, parameters)
    if type(x) not in _PLAIN or x.is_nested:
        return None, f"the input is a {'nested tensor' if type(x) in _PLAIN else type(x).__name__}"
    key = _key(block, x, parameters)
    run = _known.get(key)
    if run is None:
        gradients = _wants_gradients(x, parameters)
        names, why, settled = _way(block, x, parameters, gradients)
        run = _runner(names, gradients, parameters)
        if not settled:
            return (run(x, parameters), "") if names else (None, why)
        _known[key] = run
    try:
        return run(x, parameters), ""
    except RuntimeError:  # the operators look at what the key has not: types, sizes and order in memory
        why = _unlike(block, x, parameters)
        if not why:
            raise
        return None, why


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_known = {}  # by _key: what runs such calls


def _key(block, x, parameters):
    """What decides how a call runs, besides what the operators look at."""
    gradients = torch.is_grad_enabled()
    if gradients:
        gradients = x.requires_grad
        for parameter in parameters:
            gradients = gradients or parameter.requires_grad
    return (
        block,
        x.shape,
        x.stride(),
        x.dtype,
        x.get_device(),
        gradients,
        x.requires_grad,
        torch.is_autocast_enabled(),
        torch._C._are_functorch_transforms_active(),
        torch._C._is_tracing(),
        torch.autograd.forward_ad._current_level,
        *map(type, parameters),
        *_settings(block),
    )


def _runner(names, gradients, parameters):
    """A function of x and the parameters that runs these operators; none of them: it gives None."""
    if not names:
        return _left_to_pytorch
    if not gradients:
        return _operator(names[0])
    function = _Recomputed if len(names) == 1 else _Trained
    # Function.apply without its Python part (5 us), which is for transforms; what that does for tensors that
    # outlived a transform is done for the input, and a torch.nn.Parameter is none.
    quick = super(torch.autograd.Function, function).apply
    if any(type(parameter) is not torch.nn.Parameter for parameter in parameters):
        quick = function.apply
    unwrapped = torch._C._functorch.unwrap_if_dead
    if len(names) == 1:
        return _launched_first(*names, quick, unwrapped)
    forward, backward = names
    return lambda x, parameters: quick(forward, backward, unwrapped(x), *parameters)


def _launched_first(name, attach, unwrapped):
    """Launches the kernels, then tells autograd of them, which takes as long again."""
    operator = _operator(name)

    def run(x, parameters):
        x = unwrapped(x)
        torch._C._set_grad_enabled(False)
        try:
            output = operator(x, parameters)
        finally:
            torch._C._set_grad_enabled(True)
        return attach(name, output, x, *parameters)

    return run


@functools.cache
def _operator(name):
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _left_to_pytorch(x, parameters):
    return None


def _attempt_compiled(block, x, parameters):
    gradients = _wants_gradients(x, parameters)
    names, why, _ = _way(block, x, parameters, gradients)
    if not names:
        return None, why
    if len(names) == 2:
        return _Trained.apply(*names, x, *parameters), ""
    name = f"{names[0]}_recomputed" if gradients else names[0]
    return getattr(getattr(torch.ops, _NAMESPACE), name)(x, parameters), ""


def _recomputed_gradients(stages, tensors, wanted, output_gradient):
    """Of these tensors: runs the original stages once more and differentiates them."""
    again = torch.is_grad_enabled()  # gradients of the gradients are wanted
    with torch.enable_grad():
        if again:  # views: one of the tensors may have been computed from another
            tensors = [tensor.view_as(tensor) for tensor in tensors]
        else:
            tensors = [tensor.detach().requires_grad_(want) for tensor, want in zip(tensors, wanted)]
        asked = [tensor for tensor, want in zip(tensors, wanted) if want]
        output = stages(*tensors)
        found = torch.autograd.grad(output, asked, output_gradient, create_graph=again, allow_unused=True)
    gradients = iter(found)
    return [next(gradients) if want else None for want in wanted]


class _Recomputed(torch.autograd.Function):
    """A block's output whose gradients are wanted: keeps the tensors, its backward pass is the original's."""

    @staticmethod
    def forward(ctx, name, output, *tensors):
        ctx.name = name
        ctx.mark_dirty(output)  # no copy, and no view
        ctx.save_for_backward(*tensors)
        return output

    @staticmethod
    def backward(ctx, output_gradient):
        stages, wanted = _STAGES[ctx.name], ctx.needs_input_grad[2:]
        return None, None, *_recomputed_gradients(stages, ctx.saved_tensors, wanted, output_gradient)


_global_forward_hooks = torch.nn.modules.module._global_forward_hooks
_global_forward_pre_hooks = torch.nn.modules.module._global_forward_pre_hooks
_global_backward_hooks = torch.nn.modules.module._global_backward_hooks
_global_backward_pre_hooks = torch.nn.modules.module._global_backward_pre_hooks
_module_class = torch.nn.Module
_module_call = _module_class.__call__


def _replaced(path, module, cls):
    if torch.compiler.is_compiling():
        return f"{path} was replaced"
    return f"{path} is {'None' if module is None else type(module).__name__}, not {cls.__name__}"


def _differs(name, value, wanted):
    if torch.compiler.is_compiling():  # which may have a symbol for the value
        return f"{name} was changed"
    return f"{name} is {value!r}, not {wanted!r}"


# For each part of a block, by the precision of its convolution ("": there is one): the
# operator, those of a training step, and whether they give the input's gradient.
_WAYS = {
    "block_1": {
        "tf32": ('block_1_tf32', (), True),
        "tf32_away": ('block_1_tf32_away', (), True),
        "near_f32": ('block_1_f32', (), True),
        "f32": ('block_1_f32', (), True),
    },
    "block_1_tail": {
        "": ('block_1_tail', (), True),
    },
}
_TRAINED_TAILS = []  # of these blocks the part after PyTorch's convolution


def _convolve_1(x, weight):
    return torch.conv_transpose3d(x, weight, None, (2, 2, 2), (1, 1, 1), (0, 0, 0), 1, (1, 1, 1))


_CONVOLUTIONS = {"block_1": _convolve_1}
_BATCHES = {'block_1': 128}
_IS_TRANSPOSED = {'block_1': True}


_asked = {}  # how PyTorch's convolution rounds its operands


def _precision(block, batch, device, gradients):
    """How PyTorch's own convolution of the block rounds its operands: "tf32", "tf32_away", "other", or
    "near_f32" where it, or one of its gradients that are computed here, does not. cuDNN decides that for
    every size by how fast it expects its kernels to be, so it is asked; "" where it cannot be now.
    """
    flags = torch.backends.cudnn
    key = (block, batch, device, gradients, flags.benchmark, flags.deterministic, flags.enabled)
    if key not in _asked:
        if batch == 0 or torch.cuda.is_current_stream_capturing():
            return ""
        try:
            _asked[key] = _ask(block, batch, torch.device("cuda", device), gradients)
        except torch.OutOfMemoryError:
            return ""
    return _asked[key]


_precision_compiled = torch.compiler.assume_constant_result(_precision)


def _rounding_of(convolve, input, weight, transposed, gradients):
    """How operands are rounded: in the forward pass, then for the gradients of the input and the weight.

    "fp32": not at all. "tf32": to nearest, ties to even. "tf32_away": to nearest, ties away from zero.
    "other": otherwise. `input` and `weight` are of the convolution's sizes and are overwritten. Factors that
    lie between two values of TF32 tell. All weights but those of one input channel are zero, and so is the
    output's gradient but at one position: sums of few terms keep the factor.
    """
    results = []
    for factor in (1.0, 1.0 + 2.0 ** (-11), 1.0 + 3.0 * 2.0 ** (-11)):
        x, w = (input.fill_(1.0), weight.zero_())
        (w[:1] if transposed else w[:, :1]).fill_(factor)
        with torch.no_grad():
            found = [convolve(x, w).amax()]
        if gradients:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (x, w)]
                y = convolve(*leaves)
                direction = torch.zeros_like(y)
                centre = (0, slice(None), *(size // 2 for size in y.shape[2:]))
                direction[centre] = 1.0
                dx, = torch.autograd.grad(y, leaves[:1], direction, retain_graph=True)
                dw, = torch.autograd.grad(y, leaves[1:], direction * factor)
            found += [dx.amax(), dw.amax()]
        results.append(torch.stack(found))
    ulps = ((torch.stack(results[1:]) / results[0] - 1.0) * 2.0 ** 11).T.tolist()
    kinds = {'fp32': (1, 3), 'tf32': (0, 4), 'tf32_away': (2, 4)}
    return [next((k for k, own in kinds.items() if all((abs(a - b) < 0.3 for a, b in zip(pair, own)))), 'other') for pair in ulps]


def _ask(block, batch, device, gradients):
    _, sizes, memory_format, parameters = _FITTING[block]
    with torch.no_grad():
        x = torch.empty((batch, *sizes), device=device, memory_format=memory_format)
        w = torch.empty(parameters[0][0], device=device)
        answers = _rounding_of(_CONVOLUTIONS[block], x, w, _IS_TRANSPOSED[block], gradients)
    return "near_f32" if "fp32" in answers else answers[0]


@torch.compiler.assume_constant_result
def _allows_tf32():
    """PyTorch's switch at the call; torch.compile keeps what it is at the trace."""
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


def _mode(block, x, gradients):
    """The precision of the block's convolution, and whether the next such call has the same."""
    if block not in _CONVOLUTIONS:
        return "", True
    if not _allows_tf32():
        return "f32", True
    trained = gradients and any(pair for _, pair, _ in _WAYS[block].values())
    if torch.compiler.is_compiling():  # decided once, for the batch that get_inputs() gives
        return _precision_compiled(block, _BATCHES[block], x.device.index, trained) or "near_f32", True
    precision = _precision(block, x.shape[0], x.device.index, trained)
    return precision or "near_f32", bool(precision)


def _settings(block):
    """What decides the precision besides sizes. The properties of torch.backends.cudnn take 4 us, these 1."""
    if block not in _CONVOLUTIONS:
        return ()
    return (
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_enabled(),
    )


def _stages_1(x, p0, p1, p2, p3):
    conv_transpose3d = torch.conv_transpose3d(x, p0, p1, (2, 2, 2), (1, 1, 1), (0, 0, 0), 1, (1, 1, 1))
    sigmoid = torch.sigmoid(conv_transpose3d)
    mul = sigmoid * conv_transpose3d
    group_norm = torch.nn.functional.group_norm(mul, 4, p2, p3, 1e-05)
    return torch.nn.functional.hardswish(group_norm, inplace = False)


def _stages_2(x, p0, p1):
    sigmoid = torch.sigmoid(x)
    mul = sigmoid * x
    group_norm = torch.nn.functional.group_norm(mul, 4, p0, p1, 1e-05)
    return torch.nn.functional.hardswish(group_norm, inplace = False)


# The original code of each operator.
_STAGES = {
    "block_1_tf32": _stages_1,
    "block_1_tf32_away": _stages_1,
    "block_1_f32": _stages_1,
    "block_1_tail": _stages_2,
}
_register()


def _run_1(self, x):
    """conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish"""
    try:
        parameters = [
            self._modules["conv_transpose"]._parameters["weight"],
            self._modules["conv_transpose"]._parameters["bias"],
            self._modules["group_norm"]._parameters["weight"],
            self._modules["group_norm"]._parameters["bias"],
        ]
    except KeyError:
        parameters = [
            self.conv_transpose.weight,
            self.conv_transpose.bias,
            self.group_norm.weight,
            self.group_norm.bias,
        ]
    result, why = _attempt("block_1", x, parameters)
    if result is not None:
        return result
    conv_transpose = self.conv_transpose(x)
    result, why_no_tail = _attempt("block_1_tail", conv_transpose, parameters[2:])
    if result is not None:
        return result
    _say('block_1', why or why_no_tail)
    sigmoid = torch.sigmoid(conv_transpose)
    mul = sigmoid * conv_transpose
    group_norm = self.group_norm(mul)
    return torch.nn.functional.hardswish(group_norm, inplace = False)


# The classes, methods and functions that the kernels stand for, as this file found them.
_Model_class = Model
_ConvTranspose3d_class = torch.nn.modules.conv.ConvTranspose3d
_GroupNorm_class = torch.nn.modules.normalization.GroupNorm
_Model_forward = _Model_class.forward
_ConvTranspose3d_forward = _ConvTranspose3d_class.forward
_ConvTranspose3d__output_padding = getattr(_ConvTranspose3d_class, "_output_padding", None)
_GroupNorm_forward = _GroupNorm_class.forward


def _patched():
    """What was changed for all modules; "" where nothing was."""
    if (
        _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return "a hook on all modules is registered"
    if _module_class.__call__ is not _module_call:
        return "torch.nn.Module.__call__ was replaced"
    if _Model_class.forward is not _Model_forward:
        return "Model.forward was replaced"
    if _ConvTranspose3d_class.forward is not _ConvTranspose3d_forward:
        return "ConvTranspose3d.forward was replaced"
    if getattr(_ConvTranspose3d_class, "_output_padding", None) is not _ConvTranspose3d__output_padding:
        return "ConvTranspose3d._output_padding was replaced"
    if _GroupNorm_class.forward is not _GroupNorm_forward:
        return "GroupNorm.forward was replaced"
    return ""


def _changed_1(self):
    """What is not as the fused code has it, or ""."""
    try:
        own = self.__dict__
        module = own["_modules"].get("conv_transpose")
        if type(module) is not _ConvTranspose3d_class:
            return _replaced("conv_transpose", module, _ConvTranspose3d_class)
        own_conv_transpose = module.__dict__
        if (
            own_conv_transpose["_forward_hooks"]
            or own_conv_transpose["_forward_pre_hooks"]
            or own_conv_transpose["_backward_hooks"]
            or own_conv_transpose["_backward_pre_hooks"]
        ):
            return "a hook is on conv_transpose"
        if "forward" in own_conv_transpose or "_output_padding" in own_conv_transpose:
            return "a method of conv_transpose is set on the object"
        if own_conv_transpose["_parameters"].get("weight") is None and own_conv_transpose.get("weight") is None:
            return "conv_transpose.weight was removed"
        if own_conv_transpose["_parameters"].get("bias") is None and own_conv_transpose.get("bias") is None:
            return "conv_transpose.bias was removed"
        if own_conv_transpose["dilation"] != (1, 1, 1):
            return _differs("conv_transpose.dilation", own_conv_transpose["dilation"], (1, 1, 1))
        if own_conv_transpose["groups"] != 1:
            return _differs("conv_transpose.groups", own_conv_transpose["groups"], 1)
        if own_conv_transpose["kernel_size"] != (3, 3, 3):
            return _differs("conv_transpose.kernel_size", own_conv_transpose["kernel_size"], (3, 3, 3))
        if own_conv_transpose["output_padding"] != (0, 0, 0):
            return _differs("conv_transpose.output_padding", own_conv_transpose["output_padding"], (0, 0, 0))
        if own_conv_transpose["padding"] != (1, 1, 1):
            return _differs("conv_transpose.padding", own_conv_transpose["padding"], (1, 1, 1))
        if own_conv_transpose["padding_mode"] != 'zeros':
            return _differs("conv_transpose.padding_mode", own_conv_transpose["padding_mode"], 'zeros')
        if own_conv_transpose["stride"] != (2, 2, 2):
            return _differs("conv_transpose.stride", own_conv_transpose["stride"], (2, 2, 2))
        module = own["_modules"].get("group_norm")
        if type(module) is not _GroupNorm_class:
            return _replaced("group_norm", module, _GroupNorm_class)
        own_group_norm = module.__dict__
        if (
            own_group_norm["_forward_hooks"]
            or own_group_norm["_forward_pre_hooks"]
            or own_group_norm["_backward_hooks"]
            or own_group_norm["_backward_pre_hooks"]
        ):
            return "a hook is on group_norm"
        if "forward" in own_group_norm:
            return "a method of group_norm is set on the object"
        if own_group_norm["_parameters"].get("weight") is None and own_group_norm.get("weight") is None:
            return "group_norm.weight was removed"
        if own_group_norm["_parameters"].get("bias") is None and own_group_norm.get("bias") is None:
            return "group_norm.bias was removed"
        if own_group_norm["eps"] != 1e-05:
            return _differs("group_norm.eps", own_group_norm["eps"], 1e-05)
        if own_group_norm["num_groups"] != 4:
            return _differs("group_norm.num_groups", own_group_norm["num_groups"], 4)
    except KeyError:
        return "an attribute was removed"
    return _patched()


class ModelNew(Model):
    """Model with its block in one pass over memory: same parameters, same results."""

    def forward(self, x):
        why = _changed_1(self)
        if why:
            _say("forward", why)
            return super().forward(x)
        if not isinstance(x, torch.Tensor):
            _say("forward", "x is no tensor")
            return super().forward(x)
        return _run_1(self, x)

    @staticmethod
    def why():
        """Why calls of this file's models ran the original code, and how many did."""
        return dict(_reasons)
