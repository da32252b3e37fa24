// Integers, element types, and vectors of elements between memory and registers. Arithmetic is always f32.
#pragma once

namespace onepass {

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

using int32 = int;
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

// The integer with the bits of an element.
template <class Type>
using ElementBits = conditional<Type::bytes == 2, uint16, uint32>;

// The structs that a row generates for a problem. The pieces of a kernel are templates of one type that has
// them and what follows from them.
template <class Convolution, class TailOfBlock, class NumbersOfRow>
struct KernelTypes {
  using C = Convolution;
  using Tail = TailOfBlock;
  using Numbers = NumbersOfRow;
};

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

// Two operands as a pair of 16-bit elements. f16 rounds as tf32 does: ties to even, unless the convolution
// rounds them away from zero.
template <class C, class Operand>
__device__ __forceinline__ uint32 pack_operands(float a, float b) {
  if constexpr (C::ties_away) {
    return Operand::pack(round_to_tf32_away(a), round_to_tf32_away(b));
  } else {
    return Operand::pack(a, b);
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
