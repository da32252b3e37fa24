// A convolution of one tap over contiguous planes on the CPU, with lanes along pixels: the input is read in
// place.
//
// A task takes a block of pixels of a segment of output channels. It passes over the planes of a few input
// channels at a time, so that memory is read as few streams, and adds their products to the block's sums.
#pragma once

#include <array>

#include "cpu/convolver.h"

namespace onepass::cpu {

class PlaneConvolution final : public Convolver {
  // Planes that are read together, one stream of memory each.
  static constexpr int64_t streams = 16;

 public:
  PlaneConvolution(const Problem& problem, const Isa& isa, int64_t cut);

  Lanes lanes() const override { return Lanes::planes; }
  int64_t block_count() const override { return block_count_; }
  int64_t block_pixels(int64_t block) const override { return pixels_of(block).size(); }
  int64_t max_segment_channels() const override { return max_segment_channels_; }
  int64_t max_panel_pixels() const override { return block_pixels(0); }
  int64_t padded_channels(int64_t channels) const override { return channels; }

  int64_t packed_floats() const override { return bias_at_ + group_count_ * group_outputs_; }
  int64_t worker_floats() const override { return edge_floats_ + sum_floats_; }
  double padded_multiply_adds() const override;
  // Nothing is staged; these are the elements that the segments read.
  double staged_elements() const override;
  bool in_place() const override { return true; }
  bool has_one_chunk() const { return chunk_count_ == 1; }
  // Calls of tiles, for the cost.
  double calls() const;
  std::string describe() const override;

  void pack(const void* weights, const float* bias, float* packed, Executor& executor) const override;
  void run(const Arguments& arguments, const float* packed, float* worker, const ConvolutionTask& task,
           const std::function<void(const Panel&)>& consume) const override;
  static std::string refusal(const Problem& problem);

 private:
  Range pixels_of(int64_t block) const { return even_part(pixels_, block_count_, block); }
  Range inputs_of(int64_t chunk) const { return even_part(group_inputs_, chunk_count_, chunk); }
  int64_t tile_count(const Segment& segment) const {
    return ceil_div(segment.channels.size(), max_pixel_tile_channels);
  }
  // The pixels behind the last whole vector of some planes, with zeros.
  void copy_edge(const float* from, int64_t planes, int64_t count, float* edge) const;

  const Isa& isa_;
  TensorMap input_;
  DType weight_dtype_;
  bool transposed_ = false;
  int64_t batch_ = 0;
  int64_t pixels_ = 0;
  int64_t group_count_ = 1;
  int64_t group_inputs_ = 0, group_outputs_ = 0;

  int64_t max_segment_channels_ = 1;
  int64_t block_count_ = 1;
  int64_t chunk_count_ = 1;
  // Of the planes of a chunk, in place and in the edge; an entry behind the last is read ahead.
  std::array<int32_t, streams + 1> offsets_{};
  std::array<int32_t, streams + 1> edge_offsets_{};
  int64_t edge_floats_ = 0, sum_floats_ = 0;
  int64_t bias_at_ = 0;  // in what is packed
};

}  // namespace onepass::cpu
