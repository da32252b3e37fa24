// A thin convolution with its chains and norm in one launch, by tensor cores.
//
// `Hold` says where values wait until the statistics of the norm are known, and schedules the passes:
//   HoldByRecomputing   nowhere: every output is computed twice (hold/recompute.cuh)
//   HoldInOutput    in the output, or in a ring of the workspace (hold/in_output.cuh)
//   HoldInCluster   in the shared memory of a cluster (hold/in_cluster.cuh)
//
// A *cell* is one output position of every class (thin.h). A tile is `tile_y` rows of `tile_x` cells of a
// plane, and the work of one warp: its window of x lies in shared memory, channel by channel. A product has
// M = 16 output channels, N = 8 neighbouring cells and K = twice a *group* of four terms, of each class only
// its own taps; 16 output channels of the whole tile come before the next 16. A lane then holds neighbours of
// a row in all its classes. Rows are put together in shared memory, with the 16-byte phase of where they go,
// and stored as vectors. Where four neighbouring lanes have whole sectors of a row, or eight have those of a
// position (channels after space), they store them at once. Warps wait for each other only for statistics.
//
// The pieces in mma/ are plain objects, each with a copy of the warp's state (ThinMmaWarp): layout and terms
// (sizes), chains, weights, window, products, moments, outputs and send, careful, statistics, tickets.
//
// Products of tf32 operands are exact. Operands of 16 bits are tf32 numbers; f32 ones are rounded to it in
// that mode, and else split into two, which leaves 2^-22 of a term. Tiles with an element that is not finite,
// or so large that what follows might overflow, are summed term by term instead ("careful").
#pragma once

#include "thin/mma/layout.cuh"

namespace onepass {

template <class Hold>
struct ThinMma {
  using Parameters = typename Hold::Parameters;

  static __device__ __forceinline__ void run(const Parameters& p, unsigned char* bytes) {
    Hold::run(p, *reinterpret_cast<typename Hold::Shared*>(bytes));
  }
};

}  // namespace onepass
