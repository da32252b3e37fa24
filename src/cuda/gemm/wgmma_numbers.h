// The numbers of the row "gemm_wgmma": tiles, stages of its rings, and predicted clocks.
#pragma once

#include <vector>

#include "cuda/gemm/gemm.h"

namespace onepass::cuda {

// How a sample is cut into tiles and shared memory into rings. Nothing here depends on the batch.
struct GemmWgmmaNumbers {
  using Box = FlatGeometry::Box;

  int64_t columns = 0;      // positions of a warpgroup; 0 where nothing fits
  int64_t conv_groups = 1;  // each with weights of its own
  bool groups_share_positions = false;
  int64_t tile_positions = 0, tile_channels = 64;
  int64_t position_tiles = 1, channel_tiles = 1, unit_channel_tiles = 1;
  FlatGeometry::Windows windows;
  int64_t pitch = 1, plane = 1;  // of the index of positions
  Box box{};                     // outputs of a tile; zeros where it is a run of the sample's index
  Box boxes{1, 1, 1};            // of a sample
  int64_t chunk_channels = 16, chunks = 1;
  int64_t taps = 1, group_taps = 1;
  int64_t parts = 1;  // 16-bit numbers that make an operand
  int64_t x_stages = 0, weight_stages = 0;
  bool weights_stay = false;
  bool by_vectors = false;  // x of a box is copied by vectors of 16 bytes
  bool copies = false;      // x is copied to shared memory as it is, and converted there
  int64_t slot_channels = 8;
  int64_t raw_slots = 1, raw_pitch = 0, raw_slot_bytes = 16;
  bool apart = false;        // warpgroups are independent agents
  int64_t stagger = 0;       // chunks that the second warpgroup starts after the first
  bool held = false;         // values stay in registers until the statistics are known
  bool stored = false;       // values are stored in memory between the passes
  int64_t late_vectors = 0;  // of 16 bytes of a row, staged for the next tile's mainloop to store
  int64_t late_pitch = 16;   // bytes of a staged row
  int64_t shared_bytes = 0;
  double clocks_of_tile = 0;  // of a multiprocessor, all passes together

  GemmWgmmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu);

  int64_t tiles() const { return position_tiles * channel_tiles; }
  int64_t unit_tiles() const { return position_tiles * unit_channel_tiles; }
  int64_t x_stage_bytes() const { return round_up(windows.all() * chunk_channels * 2 * parts, 128); }
  int64_t weight_stage_bytes() const { return group_taps * chunk_channels * tile_channels * 2 * parts; }
  int64_t weight_bytes() const { return padded_channels() * chunks * chunk_channels * taps * 2 * parts; }
  int64_t padded_channels() const { return conv_groups * channel_tiles * tile_channels; }
  int passes(const ThinShape& shape) const { return held ? 1 : shape.passes(); }

  // Multiprocessors with a block. Held units run whole.
  int64_t blocks_at_once(const Gpu& gpu) const {
    return held ? gpu.multiprocessors / unit_tiles() * unit_tiles() : gpu.multiprocessors;
  }

  // Tiles that a multiprocessor computes one after the other, for all samples.
  double rounds(const ThinShape& shape, const Gpu& gpu) const {
    return static_cast<double>(divide_up(shape.batch * tiles(), blocks_at_once(gpu)));
  }

  // Rows of the product: a channel has one for each class.
  static int64_t rows_of(const ThinShape& shape) { return shape.channels * shape.classes(); }
  static bool is_empty(const Box& box) { return box[2] == 0; }

 private:
  GemmWgmmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, bool share, int64_t most,
                   const Box& tried);

  // Whether a tile's rows lie in the output as 16-bit elements in vectors of 16 bytes.
  bool rows_fit_vectors(const Problem& problem, const ThinShape& shape) const;

  // Makes room to stage the 16-bit values of a tile: as many vectors of each row as fit, if registers suffice
  // for the others. It may take stages of x beyond two, of weights beyond five and of copies beyond two.
  // Copies of four channels instead of eight would make room for all, but x arrives late: s61 takes 0.487 ms
  // instead of 0.458.
  void set_late_stages(int64_t available);

  // Parts of slabs that each tile of a held unit reads.
  int64_t parts_of_tile(const ThinShape& shape) const {
    const int64_t group_rows = rows_of(shape) / shape.groups;
    return divide_up(tile_channels, group_rows) * divide_up(group_rows, tile_channels) * position_tiles;
  }

  // Dense, with channels before space, each a multiple of 16 bytes.
  static bool lies_for_copies(const Problem& problem);

  // Two stages of everything, and as many of weights as arrive while two groups are multiplied. Then stages
  // of x, up to a whole tile, which fill during the epilogue. Then the others.
  bool set_stages(int64_t budget);

  // The stagger is as large as the rings allow. The first warpgroup must not be two tiles ahead: the named
  // barrier would merge two arrivals into one.
  void set_stagger();

  // Streams weights that could stay, a few taps at a time, and gives the room to x. Changes nothing where
  // that does not fit.
  bool set_streamed_stages(int64_t budget);

  // sizeof(GemmShared).
  int64_t bytes_of_shared(const Problem& problem, const ThinShape& shape) const;
  // Whether the flat index is the output's own (GemmGeometry::contiguous).
  bool is_contiguous(const Problem& problem, const ThinShape& shape) const;

  // Clocks of an H200, calibrated on s19, s61 and layers of real models.
  double predict(const Problem& problem, const ThinShape& shape) const;
};

}  // namespace onepass::cuda
