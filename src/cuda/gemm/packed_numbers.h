// The numbers of the row "gemm_packed": tiles, stages and predicted clocks.
#pragma once

#include "cuda/gemm/gemm.h"

namespace onepass::cuda {

// How positions are cut into tiles and shared memory into stages.
struct GemmPackedNumbers {
  static constexpr int64_t pack_threads = WeightPieces::threads;

  int64_t columns = 0;  // positions of a warpgroup; 0 where nothing fits
  // How the two warpgroups of a block share work: halves of 128 channels, two runs of positions, or tiles of
  // their own in turn (ping-pong).
  enum class Groups { channels, positions, turns };
  Groups shared_by = Groups::positions;
  int64_t tile_channels = 64, tile_positions = 0;
  int64_t pitch = 1, plane = 1, sample = 1;
  int64_t margin = 0, behind = 0;  // positions before the first sample and behind the last tile
  int64_t taps = 1, group_taps = 1;
  int64_t input_channels = 16;  // a multiple of 16
  int64_t chunk_channels = 16;
  int64_t conv_groups = 1;     // input channels and rows are those of each
  int64_t rows = 1;            // of the product: channels of the output, for each class that is not apart
  bool mixes_classes = false;  // stored runs have outputs of several classes
  // Classes of a transposed convolution that meet different elements: a tile has rows of one of them, and a
  // stage has one tap.
  bool classes_apart = false;
  int64_t classes = 1;    // that are apart
  double class_taps = 1;  // of a class, the mean
  int64_t window = 0;
  int64_t stages = 0;
  WeightPieces pieces;
  int64_t last_positions = 1;  // of the last sample
  double clocks = 0;

  GemmPackedNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu);

  int64_t groups() const { return taps / group_taps; }
  int64_t chunks() const { return input_channels / chunk_channels; }
  int64_t steps() const { return groups() * chunks(); }
  int64_t channel_tiles() const { return conv_groups * classes * divide_up(rows, tile_channels); }
  int64_t padded_channels() const { return channel_tiles() * tile_channels; }
  int64_t x_bytes() const { return window * chunk_channels * 2; }
  int64_t weight_stage_bytes() const { return group_taps * chunk_channels * tile_channels * 2; }
  int64_t weight_bytes() const { return padded_channels() * input_channels * taps * 2; }
  // sizeof(PackedGemm::Shared) with so many stages.
  int64_t shared_bytes(int64_t count) const;
  Number tiles(const Number& batch) const {
    return divide_up(batch * sample - (sample - last_positions), tile_positions);
  }
  Number length(const Number& batch) const { return margin + tiles(batch) * tile_positions + behind; }

 private:
  static int64_t taps_of(const ThinShape& shape, size_t d);  // of the class with most

  void set_index(const ThinShape& shape, const FlatGeometry& flat);

  void take_better(const GemmPackedNumbers& other) {
    if (other.columns > 0 && (columns == 0 || other.clocks < clocks)) *this = other;
  }

  // The fastest tiles for this number of samples.
  GemmPackedNumbers cut_best(const ThinShape& shape, const FlatGeometry& flat, const Gpu& gpu, int64_t group,
                             int64_t samples) const;

  void cut(const ThinShape& shape, const FlatGeometry& flat, const Gpu& gpu, int64_t group, Groups by,
           int64_t own, int64_t samples);

  // Clocks of the whole GPU: tensor cores, or traffic through L2 of at most 46 bytes a clock to each
  // multiprocessor (320 channels at 8^3). Where both are near their limits, each is a little slower (2560
  // channels at 16 x 16 pixels: 26 bytes a clock, 97% of the tensor cores' rate).
  double predict(int64_t samples, const Gpu& gpu) const;
};

}  // namespace onepass::cuda
