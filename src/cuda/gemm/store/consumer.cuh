// A consumer thread of gemm/wgmma.cuh: its rows and columns of a tile, and the group of threads it works
// with.
#pragma once

#include "gemm/hold/slabs.cuh"
#include "gemm/store/columns.cuh"

namespace onepass {

// A thread has two rows of the tile, and every fourth pair of columns in each.
template <class C, class Tail, class Numbers>
struct GemmConsumer {
  using Slabs = GemmSlabs<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  static constexpr int rows = GemmGeometry<C, Numbers>::rows;

  const GemmParameters<Tail::parameters>& p;
  GemmShared<C, Tail, Numbers>& s;
  const Slabs slabs{p};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp / 4;

  // An agent merges the moments of a tile: the block, or each warpgroup where they work independently.
  static constexpr int agent_threads = Numbers::apart ? 128 : gemm::consumer_threads;
  static constexpr int agent_warps = agent_threads / 32;
  static constexpr uint32 unit_parts = Item::unit_tiles * Slabs::agents;
  const int agent = Numbers::apart ? group : 0;
  const int agent_thread = static_cast<int>(threadIdx.x) % agent_threads;
  const int agent_warp = warp % agent_warps;
  __device__ __forceinline__ void sync() const {
    if constexpr (Numbers::apart) {
      gemm::group_sync(group);
    } else {
      gemm::consumers_sync();
    }
  }
  __device__ __forceinline__ int position_part(const Item& item) const {
    return item.position_tile * Slabs::agents + agent;
  }

  // Rows beyond the output only fill a tile.
  static __device__ __forceinline__ bool exists(int row) {
    return rows % Numbers::tile_channels == 0 || row < rows;
  }
  __device__ __forceinline__ int row(int h) const {
    return (Numbers::groups_share_positions ? group * 64 : 0) + warp % 4 * 16 + lane / 4 + 8 * h;
  }
  // The first of the tile's positions that this warpgroup has.
  __device__ __forceinline__ int first_column() const {
    return Numbers::groups_share_positions ? 0 : group * Numbers::columns;
  }
  static __device__ __forceinline__ int tile_position(const Item& item) {
    return item.position_tile * Numbers::tile_positions;
  }
  // The warp's first row and first position.
  __device__ __forceinline__ int first_row(const Item& item) const {
    return item.channel_tile * Numbers::tile_channels + row(0) - lane / 4;
  }
  __device__ __forceinline__ int first_position(const Item& item) const {
    return tile_position(item) + first_column();
  }
  static __device__ __forceinline__ int first_slab(const Item& item) {
    return item.channel_tile * Numbers::tile_channels / Slabs::group_rows;
  }
  // Slabs with channels in this tile.
  static __device__ __forceinline__ int slab_count(const Item& item) {
    const int end = (item.channel_tile + 1) * Numbers::tile_channels;
    const int last = ((end < rows ? end : rows) - 1) / Slabs::group_rows;
    return last - first_slab(item) + 1;
  }
};

}  // namespace onepass
