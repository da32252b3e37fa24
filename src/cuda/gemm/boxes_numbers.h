// The numbers of the row "gemm_boxes": boxes, windows, stages and predicted clocks.
#pragma once

#include "cuda/gemm/gemm.h"

namespace onepass::cuda {

// Whether tensor maps can read x as it lies; else it is copied.
bool maps_read(const Problem& problem, const ThinShape& shape);

// How output positions are cut into boxes, and shared memory into stages.
struct GemmBoxesNumbers {
  static constexpr int64_t pack_threads = WeightPieces::threads;
  static constexpr int64_t copied_elements = 4096;  // of an item (gemm/boxes/copy.cuh)

  int64_t tile_channels = 0;  // columns of a product; 0 where nothing fits
  int64_t products = 1;       // of 64 positions, of each of two warpgroups
  FlatGeometry::Box box{1, 1, 1}, window{1, 1, 1};
  int64_t box_n = 1;
  int64_t split = 0;                                 // dimensions whose taps have windows of their own
  int64_t taps = 1, group_taps = 1, stage_taps = 1;  // of the class with most
  int64_t conv_groups = 1;                           // input channels and rows are those of each
  int64_t rows = 1;             // channels of the output, for each class that is not apart
  int64_t input_channels = 16;  // a multiple of 16
  int64_t chunk_channels = 16;
  int64_t stage_positions = 0;  // of x, those that products read beyond the window too
  int64_t x_stages = 2, weight_stages = 0;
  WeightPieces pieces;

  int64_t copied_channels = 0;  // of a position of x's copy; 0 where x is read as it lies
  int64_t classes = 1;          // that are apart
  // Classes of a transposed convolution that meet different elements: a tile is of one of them.
  bool classes_apart = false;
  bool patches = false;  // rows of a product are 8 x 8 positions, else 64 neighbours of the window
  bool guards = false;   // f32 operands are rounded to f16
  // What lies side by side where values go (gemm/boxes/geometry.cuh).
  enum class Stored : uint8_t { vectors, channels, positions, sums };
  Stored stored = Stored::vectors;

  std::array<int64_t, max_spatial_rank> boxes{1, 1, 1};
  // Values stay in registers until all tiles of their slabs have left moments; or they are computed twice;
  // else a tail reads them.
  bool held = false, twice = false;
  int64_t group_channels = 0;  // of a slab
  double clocks = 0;

  GemmBoxesNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu);

  int64_t chunks() const { return divide_up(input_channels, chunk_channels); }
  int64_t channel_tiles() const { return conv_groups * classes * divide_up(rows, tile_channels); }
  int64_t padded_channels() const { return channel_tiles() * tile_channels; }
  int64_t weight_items() const { return pieces.count(padded_channels(), input_channels); }
  bool copies() const { return copied_channels > 0; }
  // Blocks that copy a group of a sample of so many positions.
  int64_t copied_items(int64_t positions) const {
    return copies() ? divide_up(positions, copied_elements / chunk_channels) *
                          divide_up(copied_channels, chunk_channels)
                    : 0;
  }
  // Shared memory of the launches besides the product.
  int64_t step_bytes() const;
  int64_t weight_bytes() const { return padded_channels() * chunks() * chunk_channels * taps * 2; }
  int64_t sample_boxes() const { return boxes[0] * boxes[1] * boxes[2]; }
  // Channel tiles that share a slab; a unit's tiles have the same slabs.
  int64_t unit_channel_tiles() const { return std::max<int64_t>(1, group_channels / tile_channels); }
  int64_t unit_tiles() const { return sums_of_row() * unit_channel_tiles(); }
  int64_t sums_of_row() const { return sample_boxes() * classes; }
  // Whether a norm and a mean are here, or there are none.
  bool has_tail(const ThinShape& shape) const {
    return !held && !twice && stored != Stored::sums && (shape.parts.norm != nullptr || shape.parts.mean);
  }
  int64_t units_of_sample() const { return held ? channel_tiles() / unit_channel_tiles() : 0; }
  Number tiles(const Number& samples) const { return divide_up(samples, box_n) * sample_boxes(); }
  // As the tensor map has it: 1 to 3 for positions of 32, 64 and 128 bytes.
  int64_t swizzle() const;
  // sizeof(BoxesGemm::Shared).
  int64_t shared_bytes() const;

 private:
  int64_t x_bytes() const { return stage_positions * chunk_channels * 2; }
  int64_t weight_stage_bytes() const { return stage_taps * chunk_channels * tile_channels * 2; }
  int64_t window_positions() const { return window[0] * window[1] * window[2] * box_n; }
  int64_t first_place(int64_t product) const;

  // The best cut for so many samples; no clocks where nothing fits.
  GemmBoxesNumbers cut(const ThinShape& shape, const Gpu& gpu, int64_t samples) const;
  // Tries all boxes of so many products with taps cut after `split` dimensions.
  void try_boxes(const ThinShape& shape, const Gpu& gpu, int64_t samples, GemmBoxesNumbers& best) const;
  // Cuts shared memory; false where it does not suffice.
  bool fit_stages(const Gpu& gpu);
  // Clocks of the whole GPU: tensor cores, or traffic through L2 of at most 46 bytes a clock to each
  // multiprocessor (docs/lab/gemm_packed.md), and the epilogue.
  double predict(const ThinShape& shape, const Gpu& gpu, int64_t samples) const;
  // Taps and groups of them of a class, the mean.
  double class_taps(const ThinShape& shape) const;
  double class_groups(const ThinShape& shape) const;
  int64_t stored_bytes() const;  // of shared memory, that values pass through
  void set_stored(const TensorSpec& to, const ThinShape& shape);
  void put_classes_apart(const ThinShape& shape);

  int64_t reach_positions = 0;  // the largest shift of a tap
  int64_t value_bytes = 4;      // that leave the kernel for each output
};

}  // namespace onepass::cuda
