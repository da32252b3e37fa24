// A tail whose slab stays on the chip between its statistics and its output, in persistent clusters: x is
// read once, y written once.
//
// A slab of a planar tensor is a contiguous range. Each warp of a cluster has its part of it, which bulk
// copies bring to the warp's own shared memory. Clusters take slab after slab, and the next one arrives while
// this one is computed. Two schedules:
//   ring        values wait for the statistics in registers and, as f32, in shared memory
//   overlapped  for 16 bits: half of the next slab is summed while the moments of this one are exchanged
#pragma once

#include "tail/staged/overlapped.cuh"
#include "tail/staged/ring.cuh"

namespace onepass {

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
