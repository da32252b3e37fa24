// What mainloops by wgmma share.
#pragma once

#include "device/types.cuh"

namespace onepass::wgmma {

// The descriptor of an operand in shared memory without swizzle: rows of 16 bytes, eight of them together.
// The next eight channels are `leading` bytes on.
__device__ __forceinline__ uint64 descriptor(uint32 address, uint32 leading) {
  return static_cast<uint64>(address >> 4) | static_cast<uint64>(leading >> 4) << 16 |
         static_cast<uint64>(128 >> 4) << 32;
}

}  // namespace onepass::wgmma
