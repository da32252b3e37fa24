// What mainloops by wgmma share.
#pragma once

#include "device/barrier.cuh"

namespace onepass::wgmma {

// The descriptor of an operand in shared memory without swizzle: rows of 16 bytes, eight of them together.
// The next eight channels are `leading` bytes on.
__device__ __forceinline__ uint64 descriptor(uint32 address, uint32 leading) {
  return static_cast<uint64>(address >> 4) | static_cast<uint64>(leading >> 4) << 16 |
         static_cast<uint64>(128 >> 4) << 32;
}

// The threads from `consumers` on give registers to those before, and one of them runs `send`.
template <int consumers, int producer_registers, int consumer_registers, class Send, class Multiply>
__device__ __forceinline__ void split_roles(Send&& send, Multiply&& multiply) {
  if (threadIdx.x >= consumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(producer_registers));
    if (threadIdx.x == consumers) send();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(consumer_registers));
    multiply();
  }
}

// A barrier for each stage of a ring buffer that one thread fills and `consumers` threads read.
template <int consumers, int stages>
__device__ __forceinline__ void initialise_ring(uint64 (&full)[stages], uint64 (&empty)[stages]) {
  for (int i = 0; i < stages; ++i) {
    barrier::initialise(&full[i], 1);
    barrier::initialise(&empty[i], consumers / 32);
  }
}

}  // namespace onepass::wgmma
