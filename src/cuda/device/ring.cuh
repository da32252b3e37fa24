// A place in a ring buffer of stages, as producers and consumers step through it.
#pragma once

#include "device/types.cuh"

namespace onepass {

template <int Stages>
struct Ring {
  int stage = 0;
  uint32 round = 0;  // parity of the phase of the stage's barriers

  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      round ^= 1u;
    }
  }
  __device__ __forceinline__ void skip(int count) {
    stage += count;
    round ^= static_cast<uint32>(stage / Stages) & 1u;
    stage %= Stages;
  }
};

}  // namespace onepass
