// The product of the row "gemm_packed": everything in it is bulk copies and wgmma.
#pragma once

#include "gemm/packed/weights.cuh"
#include "gemm/product/wgmma.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct PackedGemm {
  using Parameters = PackedGemmParameters<Tail::parameters>;
  using Geometry = PackedGemmGeometry<C, Numbers>;
  using Product = typename Numbers::Product;
  static constexpr int columns = Numbers::columns;  // positions of a warpgroup
  static constexpr bool share = Numbers::groups_share_positions;
  // Ping-pong: each warpgroup has every second tile, and one stores while the other multiplies.
  static constexpr bool turns = Numbers::groups_take_turns;
  static constexpr int tile_positions = share || turns ? columns : 2 * columns;
  static constexpr int tile_channels = Numbers::tile_channels;
  static constexpr int channel_tiles = Numbers::padded_channels / tile_channels;
  static constexpr int stages = Numbers::stages;
  static constexpr int halves = Numbers::chunk_channels / 8;
  static constexpr int window_bytes = Numbers::window * 16;  // of eight channels
  static constexpr int x_bytes = halves * window_bytes;
  static constexpr int weight_bytes = Numbers::group_taps * halves * tile_channels * 16;
  static constexpr int sums = columns / 2;
  static constexpr int value_pitch = 40;
  struct Shared {
    alignas(128) unsigned char x[stages][(x_bytes + 127) / 128 * 128];
    alignas(128) unsigned char weights[stages][weight_bytes];
    alignas(16) float values[8][8][value_pitch];
    int offsets[share ? columns : 2 * columns];
    uint64 full[stages];
    uint64 empty[stages];
  };
  static_assert(sizeof(Shared) == Numbers::shared_bytes);

  const Parameters& p;
  Shared& s;

  // Every `step`-th of the block's tiles, from the `first` on.
  template <class Body>
  __device__ __forceinline__ void for_each_tile(int first, int step, Body&& body) const {
    const int64 count = p.tiles * channel_tiles;
#pragma unroll 1
    for (int64 i = blockIdx.x + static_cast<int64>(first) * gridDim.x; i < count;
         i += static_cast<int64>(step) * gridDim.x) {
      const int64 tile = i / channel_tiles;
      body(tile * tile_positions, Geometry::in_turn(static_cast<int>(i - tile * channel_tiles), tile));
    }
  }

  // By one thread: the copies of all tiles.
  __device__ __forceinline__ void send() const {
    Ring<stages> ring;
    for_each_tile(0, 1, [&](int64 position, int channel_tile) {
      const int own = Geometry::class_of_tile(channel_tile);
      int64 step = static_cast<int64>(channel_tile) * Numbers::steps;
      const int first_eight = channel_tile / Geometry::group_tiles * (Numbers::input_channels / 8);
#pragma unroll 1
      for (int group = 0; group < Geometry::groups(own); ++group) {
        const auto* from = static_cast<const uint4*>(p.packed_input) + Numbers::margin + position +
                           Geometry::first_shift(group, own);
#pragma unroll 1
        for (int chunk = 0; chunk < Numbers::chunks; ++chunk, ++step) {
          barrier::wait(&s.empty[ring.stage], ring.round ^ 1u);
          barrier::expect(&s.full[ring.stage], x_bytes + weight_bytes);
          barrier::copy(s.weights[ring.stage],
                        static_cast<const unsigned char*>(p.packed_weights) + step * weight_bytes,
                        weight_bytes, &s.full[ring.stage]);
#pragma unroll
          for (int half = 0; half < halves; ++half) {
            barrier::copy(s.x[ring.stage] + half * window_bytes,
                          from + (first_eight + chunk * halves + half) * p.length, window_bytes,
                          &s.full[ring.stage]);
          }
          ring.next();
        }
      }
    });
  }

  // By a warp: marks all samples where a 16-bit weight is not finite.
  __device__ __forceinline__ void gather_marks() const {
    uint32 any = redo_none;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x % 32); i < PackedGemmWeightPieces<C, Numbers>::items; i += 32)
      any |= p.piece_marks[i];
    any = __reduce_or_sync(0xffffffffu, any);
    if (threadIdx.x % 32 == 0) p.only[p.batch] = any;
  }

  // By a warp: frees a stage.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) barrier::arrive(&s.empty[stage]);
  }

  // Between the warpgroups that share a tile.
  static __device__ __forceinline__ void sync(int warpgroup) {
    if constexpr (turns) {
      gemm::group_sync(warpgroup);
    } else {
      gemm::consumers_sync();
    }
  }

  __device__ __forceinline__ void multiply() const {
    Ring<stages> ring;
    const int thread = static_cast<int>(threadIdx.x);
    const int warpgroup = thread / 128;
    const uint32 x_begin = barrier::shared_address(s.x[0]) + (share || turns ? 0 : warpgroup * columns * 16);
    const uint32 w_begin = barrier::shared_address(s.weights[0]) + (share ? warpgroup * 64 * 16 : 0);
    if (turns && warpgroup == 1) ring.skip(Numbers::steps);
    // Tiles of the block, from this warpgroup's next one on.
    int left =
        static_cast<int>((p.tiles * channel_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x) - warpgroup;
    bool is_first = warpgroup == 0;
    for_each_tile(turns ? warpgroup : 0, turns ? 2 : 1, [&](int64 position, int channel_tile) {
      const int own_class = Geometry::class_of_tile(channel_tile);
      if constexpr (turns) {
        for (int i = thread % 128; i < columns; i += 128)
          s.offsets[warpgroup * columns + i] = offset(position + i, 0);
      } else {
        for (int i = thread; i < tile_positions; i += gemm::consumer_threads)
          s.offsets[i] = offset(position + i, own_class);
      }
      // A barrier tells a phase only from the next, so a warpgroup must not wait further ahead.
      if (turns && !is_first) gemm::wait_for_turn(warpgroup);
      is_first = false;
      float d[sums];
      int scale = 0, before = -1;
#pragma unroll 1
      for (int group = 0; group < Geometry::groups(own_class); ++group) {
#pragma unroll 1
        for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
          barrier::wait(&s.full[ring.stage], ring.round);
          const uint32 x = x_begin + ring.stage * static_cast<uint32>(sizeof s.x[0]);
          const uint32 w = w_begin + ring.stage * weight_bytes;
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int t = 0; t < Numbers::group_taps; ++t) {
            // The shifts within a group are the same in every group.
            const uint32 own = Geometry::apart ? 0 : Geometry::shift(t) - Geometry::first_shift(0);
#pragma unroll
            for (int k = 0; k < halves / 2; ++k) {
              Product::run(
                  d, wgmma::descriptor(w + (t * halves + 2 * k) * tile_channels * 16, tile_channels * 16),
                  wgmma::descriptor(x + own * 16 + 2 * k * window_bytes, window_bytes), scale);
              scale = 1;
            }
          }
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          // The products before have finished: their stage is free.
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (before >= 0) release(before);
          before = ring.stage;
          ring.next();
        }
      }
      if (turns && left > 1) gemm::hand_over_turn(warpgroup);
      left -= 2;
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(d[i])::"memory");
      release(before);
      if (turns) ring.skip(Numbers::steps);
      sync(warpgroup);
      store(channel_tile * tile_channels, d);
      sync(warpgroup);
    });
  }

  // Offset of a class's position in a channel of the values, from the first sample on; -1: outside.
  __device__ __forceinline__ int offset(int64 position, int own) const {
    const FlatPosition<Numbers> at(static_cast<uint32>(position));
    const bool inside = at.n < Geometry::samples(p) && at.z < Geometry::positions(0, own) &&
                        at.y < Geometry::positions(1, own) && at.x < Geometry::positions(2, own);
    return inside ? static_cast<int>(at.n * Numbers::value_stride_n +
                                     at.z * (Numbers::value_stride0 * C::classes(0)) +
                                     at.y * (Numbers::value_stride1 * C::classes(1)) +
                                     at.x * (Numbers::value_stride2 * C::classes(2)))
                  : -1;
  }

  // Eight rows by 32 columns at a time through shared memory, so that a warp writes whole lines.
  __device__ __forceinline__ void store(int first_channel, const float (&d)[sums]) const {
    constexpr int pairs = columns / 8;
    constexpr bool channels_last = Numbers::value_stride_c == 1 && Numbers::value_stride2 != 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    float(&stage)[8][value_pitch] = s.values[warp];
    const int first_row = first_channel + (share ? warp / 4 * 64 : 0) + warp % 4 * 16;
    const int* const offsets = s.offsets + (share ? 0 : warp / 4 * columns);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = first_row + 8 * h + lane / 4;
      const bool has = Geometry::exists(own);
      const float scale = Numbers::guards && has ? __ldg(p.scales + own) : 1.0f;
      float bias = 0.0f;
      if constexpr (C::has_bias) {
        if (has) bias = load_one<typename C::Bias>(p.parameter[1], Geometry::channel(own));
      }
#pragma unroll
      for (int j = 0; j < pairs; j += 4) {
        const int count = (pairs - j) * 8 < 32 ? (pairs - j) * 8 : 32;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < count / 8; ++k) {
          const int at = (j + k) * 4 + h * 2;
          *reinterpret_cast<float2*>(&stage[lane / 4][8 * k + 2 * (lane % 4)]) =
              float2{fmaf(d[at], scale, bias), fmaf(d[at + 1], scale, bias)};
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          // A lane has a column; a row where channels are neighbours; the classes of a column where those
          // are.
          constexpr int side_by_side =
              !Geometry::apart && 8 % C::classes(2) == 0 ? static_cast<int>(C::classes(2)) : 1;
          const int of_rows = (i * 32 + lane) % (32 * side_by_side);
          const int column = channels_last ? lane / 8 + 4 * i : of_rows / side_by_side;
          const int r = channels_last ? lane % 8 : i / side_by_side * side_by_side + of_rows % side_by_side;
          const int row = first_row + 8 * h + r;
          const int to = column < count ? offsets[j * 8 + column] : -1;
          if (to >= 0 && Geometry::exists(row)) p.values[to + Geometry::value_offset(row)] = stage[r][column];
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) {
        barrier::initialise(&s.full[i], 1);
        barrier::initialise(&s.empty[i], turns ? gemm::consumer_warps / 2 : gemm::consumer_warps);
      }
    }
    __syncthreads();
    allow_kernel_after();
    wait_for_kernel_before();
    if (threadIdx.x >= gemm::consumer_threads) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      if (threadIdx.x == gemm::consumer_threads) send();
      if (!Numbers::guards && blockIdx.x == 0 && threadIdx.x / 32 == gemm::consumer_warps + 1) gather_marks();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      multiply();
    }
  }
};

}  // namespace onepass
