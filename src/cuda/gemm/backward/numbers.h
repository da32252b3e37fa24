// The numbers of the row "gemm_backward": the flat index of positions, and how products are cut into tiles.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cuda/gemm/gemm.h"

namespace onepass::cuda {

// Sizes and strides of a tensor, with dimensions of one element before its own.
struct TensorGeometry {
  using Three = std::array<int64_t, max_spatial_rank>;

  int64_t channels = 1;
  Three sizes{1, 1, 1}, strides{0, 0, 0};
  int64_t sample_stride = 0, channel_stride = 0;

  explicit TensorGeometry(const TensorSpec& spec);
  // Of a sample.
  int64_t elements() const { return channels * sizes[0] * sizes[1] * sizes[2]; }
  // With the channels of one of `groups` groups.
  void add_to(Constants& constants, int64_t groups) const;
};

// Nothing here depends on the batch.
struct GradientNumbers {
  using Three = TensorGeometry::Three;

  static constexpr int64_t warpgroups = 3;  // that multiply for the weights' gradient
  static constexpr int64_t weight_threads = (warpgroups + 1) * 128;
  static constexpr int64_t input_threads = 384;
  static constexpr int64_t chunk = 128;          // positions of a stage of the weights' gradient
  static constexpr int64_t input_columns = 256;  // positions of a warpgroup, for the input's gradient
  static constexpr int64_t tile_positions = 2 * input_columns;

  bool transposed = false;
  Three kernel{1, 1, 1}, dilation{1, 1, 1}, padding{0, 0, 0};
  int64_t taps = 1;
  int64_t pitch = 1, plane = 1, sample = 1;
  int64_t margin = 0;  // zeros before the first sample; as many after the last
  // Each group of a convolution is a product of its own; channels are those of one group.
  int64_t conv_groups = 1;
  int64_t channels = 1, out_channels = 1;
  // The weights' gradient: 64 channels of u by `columns` of v for each tap of a warpgroup. Groups of few
  // channels are merged into one product; what a group has with another's v is not stored.
  int64_t merged_groups = 1;
  int64_t u_channels = 1, v_channels = 1;
  int64_t warpgroup_taps = 1, columns = 8, stages = 0;
  int64_t lag = 0;  // chunks that a tile's taps of v reach beyond its chunk of u
  // The input's gradient: `window` positions of dh serve `group_taps` taps.
  int64_t group_taps = 1, window = 0, input_stages = 0;
  bool weights_resident = false;

  explicit GradientNumbers(const BackwardProblem& problem);

  // Both products have at least two stages.
  bool fits() const { return stages >= 2 && input_stages >= 2; }
  // Taps are ordered in the flat index as in the kernel. They are not if a row of the kernel is longer than
  // one of x.
  bool taps_in_order() const;
  int64_t shift(int64_t tap) const;

  // Of the weights' gradient.
  int64_t block_taps() const { return warpgroups * warpgroup_taps; }
  int64_t weight_tiles() const;
  int64_t tile_sums() const { return 64 * columns * block_taps(); }
  // sizeof(GemmWeightGradient::Shared) with so many stages.
  int64_t weight_shared_bytes(int64_t count) const;
  // Parts of a tile's positions: short enough for sums in the tensor cores, and as many as keep all
  // multiprocessors busy to the end.
  Number splits(const Number& all_chunks, const Gpu& gpu) const;

  // Of the input's gradient.
  int64_t tap_groups() const { return taps / group_taps; }
  int64_t chunks() const { return divide_up(out_channels, 16); }
  int64_t channel_tiles() const { return conv_groups * divide_up(channels, 64); }
  // Steps that one warpgroup runs behind the other: half a tile, or what the ring buffer has room for.
  int64_t input_lag() const { return std::min(tap_groups() * chunks() / 2, input_stages - 2); }
  int64_t window_bytes() const { return 2 * window * 16; }
  int64_t group_bytes() const { return group_taps * 2 * 64 * 16; }
  int64_t packed_weight_bytes() const { return channel_tiles() * tap_groups() * chunks() * group_bytes(); }
  // sizeof(GemmInputGradient::Shared) with so many stages.
  int64_t input_shared_bytes(int64_t count) const;

  // Packed octets of channels: a multiple of two for each group, as products take 16 terms.
  int64_t octets(int64_t group_channels) const { return conv_groups * divide_up(group_channels, 16) * 2; }
  // Positions after the last sample's that are read: by a tap, by the end of a tile, by a window's last
  // chunks.
  int64_t positions_behind() const { return margin + tile_positions + (lag + 1) * chunk; }

  // Clocks that the tiles of a multiprocessor take.
  double weight_clocks(int64_t positions, const Gpu& gpu) const;
  double input_clocks(int64_t positions, const Gpu& gpu) const;

  // Constants of kernels.
  Constants geometry() const;
  void add_pitches(Constants& constants) const;

 private:
  void set_pitches(const Three& input, const Three& output, int64_t element_bytes);
  void cut_weight(const Gpu& gpu);
  void cut_input(const Gpu& gpu);
};

}  // namespace onepass::cuda
