// A consumer thread of gemm/wgmma.cuh: its rows and columns of a tile, and the group of threads it works
// with.
#pragma once

#include "gemm/hold/slabs.cuh"
#include "gemm/store/columns.cuh"

namespace onepass {

// A thread has two rows of the tile, and every fourth pair of columns in each.
template <class C, class Tail, class Numbers>
struct GemmConsumer {
  using Parameters = GemmParameters<Tail::parameters>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Shared = GemmShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  static constexpr int sums = Numbers::columns / 2;
  static constexpr int pairs = Numbers::columns / 8;  // of columns, in each row of a thread
  using Columns = GemmColumns<Geometry, 2 * pairs>;
  static constexpr int classes = Geometry::classes;
  static constexpr int rows = Geometry::rows;
  using Slabs = GemmSlabs<C, Tail, Numbers>;
  static constexpr int group_rows = Slabs::group_rows;
  static constexpr int slabs_of_sample = Slabs::slabs_of_sample;

  const Parameters& p;
  Shared& s;
  const Slabs slabs{p};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp / 4;

  // An agent merges the moments of a tile: the block, or each warpgroup where they work independently.
  static constexpr bool apart = Numbers::apart;
  static constexpr int agent_threads = apart ? 128 : gemm::consumer_threads;
  static constexpr int agent_warps = agent_threads / 32;
  static constexpr int agents = Slabs::agents;
  static constexpr uint32 unit_parts = Item::unit_tiles * agents;
  const int agent = apart ? group : 0;
  const int agent_thread = static_cast<int>(threadIdx.x) % agent_threads;
  const int agent_warp = warp % agent_warps;
  __device__ __forceinline__ void sync() const {
    if constexpr (apart) {
      gemm::group_sync(group);
    } else {
      gemm::consumers_sync();
    }
  }
  __device__ __forceinline__ int position_part(const Item& item) const {
    return item.position_tile * agents + agent;
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
  static __device__ __forceinline__ int first_slab(const Item& item) {
    return item.channel_tile * Numbers::tile_channels / group_rows;
  }
  // Slabs with channels in this tile.
  static __device__ __forceinline__ int slab_count(const Item& item) {
    const int end = (item.channel_tile + 1) * Numbers::tile_channels;
    const int last = ((end < rows ? end : rows) - 1) / group_rows;
    return last - first_slab(item) + 1;
  }
};

}  // namespace onepass
