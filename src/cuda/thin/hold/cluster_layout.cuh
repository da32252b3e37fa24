// Sizes of HoldInCluster: parts of a sample, shared memory of a block, runs of held values.
#pragma once

#include "thin/mma.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Cluster {
  static constexpr int blocks = Numbers::blocks;
  static constexpr int unit_channels = Numbers::unit_channels;
  static constexpr int sets = (channels + unit_channels - 1) / unit_channels;
  static constexpr int group_channels = Tail::group_channels;
  static constexpr int unit_groups = unit_channels / group_channels;
  static constexpr bool channels_last = Numbers::channels_last;
  static constexpr int tiles_x = Numbers::tiles_x;
  static constexpr int tiles_y = Numbers::tiles_y;
  static constexpr int cells_z = (out_z + classes_z - 1) / classes_z;
  static constexpr int part_z = Numbers::part_z;
  static constexpr int part_y = Numbers::part_y;
  static constexpr int part_x =
      Numbers::part_x;  // tiles: less than a row of them only where there is one row
  static constexpr int parts_y = (tiles_y + part_y - 1) / part_y;
  static constexpr int parts_x = (tiles_x + part_x - 1) / part_x;
  static_assert(parts_x == 1 || out_y == 1);
  static constexpr int most_planes = part_z * classes_z;  // of a part's outputs
  static constexpr int most_rows = part_y * tile_y * classes_y < out_y ? part_y * tile_y * classes_y : out_y;
  static constexpr int most_of_row = parts_x > 1 ? part_x* tile_x* classes_x : out_x;
  static constexpr int run_pitch = Numbers::run_pitch;    // in elements
  static constexpr int held_pitch = Numbers::held_pitch;  // of a channel
  static_assert(channels_last || run_pitch >= most_rows * most_of_row + width - 1);

  // A *strip*: a row of tiles; of one row, a tile.
  static constexpr bool by_row = out_y > 1;
  static constexpr int strip_tiles = by_row ? tiles_x : 1;
  static constexpr int part_strips = part_z * part_y * (by_row ? 1 : part_x);
  static constexpr int all_strips = cells_z * tiles_y * (by_row ? 1 : tiles_x);
  static constexpr int slots = part_z * part_y * part_x;  // for the part's tiles

  struct alignas(16) Shared {
    typename ThinMma::Shared mma;
    // Count, mean and M2: of the part's strips, of this sample and the one before; of its tiles.
    float4 strips[2][part_strips][unit_groups];
    float tiles[slots][unit_groups][3];
    float affine[unit_channels][2];  // the norm's weight and bias
    float norm[unit_channels][2];    // scale and shift
    alignas(16) float held[Numbers::held_floats];
  };
  static_assert(sizeof(Shared) <= Numbers::all_bytes);

  // The part of a sample that a block has.
  struct Part {
    int z, y, x;         // its first cell
    int planes, length;  // of its outputs: planes, elements of a run

    explicit __device__ __forceinline__ Part(int index)
        : z(index / (parts_x * parts_y) * part_z),
          y(index / parts_x % parts_y * part_y * tile_y),
          x(index % parts_x * part_x * tile_x),
          planes(least(most_planes, out_z - z * classes_z)),
          length(parts_x > 1 ? least(most_of_row, out_x - x * classes_x)
                             : least(part_y * tile_y * classes_y, out_y - y * classes_y) * out_x) {}

    __device__ __forceinline__ Tile tile(int64 n, int slot) const {
      return Tile(n, z + slot / (part_x * part_y), y + slot / part_x % part_y * tile_y,
                  x + slot % part_x * tile_x);
    }
    // The first slot from this one on, in steps of the block's warps, that has a tile; at least `slots` where
    // there is none.
    __device__ __forceinline__ int from(int slot) const {
      constexpr bool has_all = cells_z % part_z == 0 && tiles_y % part_y == 0 && tiles_x % part_x == 0;
      if constexpr (!has_all) {
        while (slot < slots && !exists(tile(0, slot))) slot += warps;
      }
      return slot;
    }
    static __device__ __forceinline__ bool exists(const Tile& tile) {
      return tile.z < cells_z && tile.y < cells_y && tile.x < cells_x;
    }
    static __device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
  };

  // Channels of the unit that exist.
  static __device__ __forceinline__ int channels_from(int first) {
    return channels % unit_channels == 0 || channels - first > unit_channels ? unit_channels
                                                                             : channels - first;
  }

  // Index of a run's first element in the output. Channel and plane count from the block's first.
  static __device__ __forceinline__ int64 run_index(const Part& part, int64 n, int channel, int plane) {
    return n * C::stride(0) + channel * C::stride(1) + (part.z * classes_z + plane) * C::stride(2) +
           part.y * classes_y * C::stride(3) + part.x * classes_x * C::stride(4);
  }
  // Elements from the last 16-byte boundary to there.
  static __device__ __forceinline__ int phase(const Parameters& p, int64 index) {
    if constexpr (channels_last) return 0;
    return static_cast<int>((static_cast<uint32>(reinterpret_cast<uint64>(p.output) / Output::bytes) +
                             static_cast<uint32>(index)) %
                            width);
  }
  // Where the run is held.
  static __device__ __forceinline__ float* run_of(const Parameters& p, Shared& all, const Part& part, int64 n,
                                                  int first, int channel, int plane) {
    return all.held + channel * held_pitch + plane * run_pitch +
           phase(p, run_index(part, n, first + channel, plane));
  }
};

}  // namespace onepass
