// Tickets of a launch: each warp draws tiles in an order in which it waits only for lower tickets.
#pragma once

#include "thin/mma/layout.cuh"

namespace onepass {

template <class L>
struct ThinMmaTickets {
  const ThinMmaWarp<L> warp;

  // The next ticket, in lane 0. A block's warps take `neighbours` of them, whose rows and windows lie beside
  // each other; where there are few, all multiprocessors have some. Where there are many (`any_block`) those
  // behind the first of each warp go to whichever is free: it takes longer to ask all multiprocessors, but
  // none is left with more than others. What a ticket waits for has lower ones: those of this block are taken
  // before it, those of others are or will be.
  __device__ __forceinline__ uint32 draw(uint32 neighbours, bool any_block) const {
    if (warp.lane != 0) return 0;
    const uint32 turn = atomicAdd(&warp.shared.drawn, 1u);
    if (any_block && turn >= L::warps) return gridDim.x * L::warps + atomicAdd(warp.p.control, 1u);
    return (turn / neighbours * gridDim.x + blockIdx.x) * neighbours + turn % neighbours;
  }
};

}  // namespace onepass
