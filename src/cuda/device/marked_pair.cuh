// Two numbers in one word of memory that says whether it is there: blocks that wait for it need no flag, and
// nothing is released or counted, which would queue trips to L2 behind the stores of outputs.
#pragma once

#include "device/types.cuh"

namespace onepass {

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

}  // namespace onepass
