// The numbers of the row "gemm_pingpong": boxes, stages and predicted clocks.
#pragma once

#include "cuda/gemm/gemm.h"

namespace onepass::cuda {

// How a sample is cut into boxes, and what shared memory holds. Nothing here depends on the batch.
struct GemmPingpongNumbers {
  using Box = FlatGeometry::Box;
  static constexpr int64_t groups = 3;  // consumer warpgroups
  static constexpr int64_t converting_warps = 4;
  static constexpr int64_t threads = (4 * groups + converting_warps) * 32;
  static constexpr int64_t mergers = 1;  // blocks without a tile
  static constexpr int64_t tile_channels = 64;

  int64_t columns = 0;            // of a warpgroup; 0 where nothing fits
  bool store_rows = false;        // outputs are stored by rows of the box, else by columns
  int64_t held_words = 0;         // of a thread
  int64_t held_shared_words = 0;  // of those, in shared memory
  int64_t row_pitch = 0;          // of staged rows, in words
  Box box{1, 1, 1};               // outputs of a tile
  Box boxes{1, 1, 1};             // of a sample
  int64_t position_tiles = 1;
  int64_t pitch = 1, plane = 1;  // of the box's flat index
  int64_t window_y = 1, window_z = 1;
  int64_t copies = 1, copy_y = 1;      // of eight channels, and the rows of each
  int64_t bands = 1, band_copies = 1;  // rows that are staged and released together
  int64_t window = 1;                  // positions of x
  int64_t chunks = 1, taps = 1;
  int64_t raw_pitch = 1, raw_vectors = 1, raw_slots = 2 * converting_warps;
  int64_t shared_bytes = 0;
  double clocks_of_tile = 0;

  GemmPingpongNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu);

  int64_t weight_bytes() const { return chunks * taps * tile_channels * 32; }
  int64_t blocks_at_once(const Gpu& gpu) const {
    return (gpu.multiprocessors - mergers) / position_tiles * position_tiles;
  }
  double rounds(const ThinShape& shape, const Gpu& gpu) const {
    return static_cast<double>(divide_up(shape.batch * position_tiles, blocks_at_once(gpu)));
  }

 private:
  // Words that each warp stages: eight channels of a row of the box, or of 64 columns.
  int64_t staged_words(int64_t bytes) const {
    if (bytes == 4) return 4;
    return store_rows ? round_up(8 * row_pitch + 3, 4) : 8 * (16 * bytes + 4);
  }
  // Steps of a converting warp for a row: 32 bytes of eight channels, or 32 positions.
  int64_t steps_of_row(int64_t bytes) const {
    return bytes == 2 ? divide_up(raw_vectors, 4) : divide_up(raw_pitch, 32);
  }
  static int64_t columns_of(const FlatGeometry& flat, const Box& box) {
    return round_up(divide_up(flat.positions_of(box), groups), 8);
  }

  GemmPingpongNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                      const FlatGeometry& flat, const Box& tried);

  // sizeof(pingpong::Shared).
  int64_t bytes_of_shared(const Problem& problem, const ThinShape& shape) const;

  // Clocks of an H200, without traffic through L2: a warpgroup's mainloop and epilogue, or the conversion of
  // x. With one band, x is converted only after the last warpgroup has multiplied. `seconds` calibrates this.
  double predict(const ThinShape& shape, int64_t bytes) const;
};

}  // namespace onepass::cuda
