// Tickets of a launch: each warp draws tiles in an order in which it waits only for lower tickets.
#pragma once

#include "thin/mma/window.cuh"

namespace onepass {

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

}  // namespace onepass
