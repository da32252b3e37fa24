// A convolution on the CPU, cut into blocks of pixels and segments of channels. Input rows are staged in f32,
// and sums are handed on as panels while in cache.
//
// A task is one block of one segment of one sample. A task takes the input channels in chunks of at most
// about 256 terms of a sum, which also bounds rounding. For each chunk it copies the block's input window
// into f32 rows without borders. Then it runs register tiles over them. Strides become phases: every s-th
// input position of a row is stored contiguously, so that neighbouring outputs always read neighbouring
// floats.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cpu/axis.h"
#include "cpu/convolver.h"
#include "cpu/isa.h"
#include "cpu/tensor_map.h"
#include "onepass/plan.h"
#include "onepass/problem.h"

namespace onepass::cpu {

class ConvolutionStage final : public Convolver {
 public:
  // `cut`: segments may not cross a multiple of this many channels (the channels of a slab, or all).
  // `wants_bound`: panels come with a bound of their magnitude, which costs a look at each input.
  ConvolutionStage(const Problem& problem, const Isa& isa, Lanes lanes, int64_t cut, bool wants_bound);

  // Why the stage cannot be built; empty where it can.
  static std::string refusal(const Problem& problem);

  Lanes lanes() const override { return lanes_; }
  int64_t block_count() const override { return block_counts_[0] * block_counts_[1] * block_counts_[2]; }
  int64_t block_pixels(int64_t block) const override;
  int64_t max_segment_channels() const override { return max_segment_channels_; }
  int64_t max_panel_pixels() const override { return max_panel_pixels_; }
  int64_t padded_channels(int64_t channels) const override;
  int64_t segments_per_task() const override { return segments_per_task_; }

  int64_t packed_floats() const override { return packed_floats_; }
  int64_t worker_floats() const override { return window_floats_ + sum_floats_; }
  double padded_multiply_adds() const override;
  double read_weights() const override;
  double staged_elements() const override;
  bool in_place() const override { return false; }
  // Parts of input rows that are staged, one for each channel and phase, for the cost.
  double staged_rows() const;
  // Rows of outputs that channel tiles are called for, for the cost.
  double row_calls() const;
  // Sums that are stored one by one, for the cost: rows of pixel lanes whose classes do not alternate.
  double scattered_sums() const;
  // Bytes between input elements that staging reads one at a time; 0 where it reads vectors.
  int64_t staged_stride_bytes() const;
  std::string describe() const override;

  void pack(const void* weights, const float* bias, float* packed, Executor& executor) const override;
  bool share_window(size_t segment, size_t other) const override {
    return chunk_count_ == 1 && segments_[segment].group == segments_[other].group;
  }
  void run(const Arguments& arguments, const float* packed, float* worker, const ConvolutionTask& task,
           const std::function<void(const Panel&)>& consume) const override;

 private:
  // Terms that share what they are multiplied for: one class of outputs, or two of them. A width tap meets
  // the same input for each. Terms come in the order [depth tap][height tap][input channel of a chunk][width
  // tap]. Taps of a row outside the input are so left out as whole ranges.
  struct TermList {
    struct WidthTap {
      int64_t offset = 0;                               // in a staged row
      std::array<int64_t, max_pixel_tile_classes> k{};  // of each class, into the kernel
    };
    std::vector<WidthTap> taps;
    size_t class_count = 1;
    // Staged floats from the row's base, for chunks of the larger and of the smaller size.
    std::array<std::vector<int32_t>, 2> offsets;
  };
  // The outputs of one call of the tiles: all of a dense convolution, those of one residue class, or those of
  // two classes that alternate along rows. Two have terms of both, of the first and of the second alone, so
  // that an input they both meet is loaded once.
  struct OutputClass {
    std::array<int64_t, 3> index{};        // of the first one
    std::array<std::vector<Tap>, 2> taps;  // of depth and height
    std::vector<TermList> lists;
    int64_t base = 0;  // what was taken off the offsets to make them non-negative

    // No output has a tap.
    bool is_bare() const {
      bool bare = true;
      for (const TermList& list : lists) bare &= list.taps.empty();
      return bare || taps[0].empty() || taps[1].empty();
    }
    int64_t tap_count(const TermList& list) const {
      return static_cast<int64_t>(taps[0].size() * taps[1].size() * list.taps.size());
    }
  };
  struct Window {
    std::array<Range, 3> inputs;  // input positions it covers, padding included
  };
  struct Tile {
    int64_t first = 0;  // column of the panel
    int64_t width = 0;  // columns
    int vectors = 0;
  };
  struct Block {
    std::array<Range, 3> outputs;
  };
  struct Task {
    const Segment& segment;
    size_t segment_index;
    const Block& block;
    Window window;
  };
  // Where the sums of a panel go.
  struct Sums {
    float* data = nullptr;
    int64_t pixel_stride = 0;
    int64_t channel_stride = 0;
  };

  // Rows of outputs that meet the same taps, and where their sums go.
  struct Rows {
    const OutputClass* output_class = nullptr;
    const float* staged = nullptr;                            // of the first output
    std::array<const float*, max_pixel_term_lists> packed{};  // weights of the tile's lists from the chunk on
    int64_t count = 0;
    int64_t pixels = 0;           // of a row
    const float* bias = nullptr;  // of the tile
    float* to = nullptr;
    int64_t pixel_stride = 0;  // of `to`, in floats
    int64_t row_stride = 0;
    int64_t staged_row_stride = 0;
  };

  void choose_segments(int64_t cut);
  void choose_blocks();
  void choose_chunks();
  void choose_window();
  void build_classes();
  void choose_panels();
  void choose_cache_blocks();

  Block block_at(int64_t index) const;
  int64_t tile_count(const Segment& segment) const;
  int64_t max_tile_count() const { return tile_count({0, {0, max_segment_channels_}}); }
  Tile tile_at(const Segment& segment, int64_t index) const;
  Range panel_rows(const Block& block, int64_t first) const;
  int64_t first_pixel(const Block& block, int64_t row) const;
  int64_t chunk_channels() const { return ceil_div(in_channels_per_group_, chunk_count_); }
  int64_t offset_in_row(const Tap& tap) const;
  std::vector<int32_t> make_offsets(const OutputClass& output_class, const TermList& list,
                                    int64_t channels) const;
  std::vector<TermList> make_lists(int64_t width_class) const;
  // One of the parts that blocks cut an axis into, and the most outputs of one.
  Range block_range(size_t axis, int64_t part) const;
  int64_t block_extent(size_t axis) const { return block_range(axis, 0).size(); }
  // Classes along the width that one pixel tile computes: both of a stride of two, else one at a time.
  int64_t interleaved_classes() const {
    const bool two = axes_[2].classes() == 2 && axes_[2].class_stride() == 2;
    return lanes_ == Lanes::pixels && two ? 2 : 1;
  }
  bool row_is_used(int axis, int64_t relative) const;
  double staged_positions(size_t axis) const;
  double staged_windows() const;

  // Both return the largest magnitude they staged.
  float stage(const void* input, int64_t sample, const Segment& segment, Range channels, const Window& window,
              float* staged) const;
  float stage_row(const void* input, int64_t sample, const Segment& segment, Range channels,
                  const Window& window, int64_t depth, int64_t height, float* row) const;
  void convolve(const Task& task, const float* packed, Range channels, Range rows, const float* staged,
                const Sums& sums) const;
  void convolve_class(const Task& task, size_t class_index, const float* packed, Range channels,
                      int64_t panel_row, Range rows, int64_t strip, const float* staged,
                      const Sums& sums) const;
  void convolve_rows(const Sums& sums, const Rows& rows, Range channels, const Tile& tile, Range depth_taps,
                     Range height_taps) const;
  void convolve_terms(const Sums& sums, const Rows& rows, Range channels, const Tile& tile, Range taps,
                      bool add) const;
  void clear_rows(const Sums& sums, const Rows& rows, const Tile& tile) const;
  void fill_with_bias(const Task& task, const float* packed, int64_t pixels, const Sums& sums) const;
  float bound_of(const Task& task, const float* packed, float largest_input) const;
  Sums sums_at(float* data, const Task& task, int64_t pixels) const;
  const float* packed_list(const float* packed, size_t segment, size_t class_index, size_t list) const {
    return packed + weight_offsets_[(segment * classes_.size() + class_index) * max_pixel_term_lists + list];
  }
  // Adds the magnitudes of the weights over the terms to reach[class of the list][channel of the tile].
  void pack_tile(const void* weights, const Segment& segment, const OutputClass& output_class,
                 const TermList& list, const Tile& tile, float* packed, float* reach) const;
  void turn_chunk(const void* weights, const Segment& segment, const OutputClass& output_class,
                  const TermList& list, const Tile& tile, Range channels, float* to) const;
  void gather_chunk(const void* weights, const Segment& segment, const OutputClass& output_class,
                    const TermList& list, const Tile& tile, Range channels, float* to) const;

  const Isa& isa_;
  Lanes lanes_;
  bool wants_bound_;
  TensorMap input_;
  DType weight_dtype_;
  int64_t batch_ = 0;
  int64_t group_count_ = 1;
  int64_t in_channels_per_group_ = 0, out_channels_per_group_ = 0;
  int64_t kernel_elements_ = 0;
  bool transposed_ = false;
  std::array<Axis, 3> axes_;

  std::vector<int64_t> weight_offsets_;  // [segment][class][list]
  std::vector<OutputClass> classes_;
  bool has_bare_classes_ = false;
  std::array<int64_t, 3> block_counts_{1, 1, 1};
  int64_t max_segment_channels_ = 0, max_block_pixels_ = 0, max_panel_pixels_ = 0;
  int64_t segments_per_task_ = 1;
  int64_t chunk_count_ = 1;
  int64_t rows_per_panel_ = 1;
  // Rows and parts of a row whose window stays in L1 while the tiles of all channels pass over it.
  int64_t rows_per_cache_block_ = 1;
  int64_t strips_ = 1;

  int64_t phase_count_ = 1;  // of a staged row
  int64_t phase_pitch_ = 0;  // floats between phases
  int64_t row_pitch_ = 0, depth_pitch_ = 0, channel_pitch_ = 0;
  int64_t window_floats_ = 0;  // the last is the window's largest magnitude
  int64_t sum_floats_ = 0;
  int64_t bias_at_ = 0;   // in what is packed
  int64_t reach_at_ = 0;  // largest sum of a channel's magnitudes, for each segment, class and tile
  int64_t packed_floats_ = 0;
};

}  // namespace onepass::cpu
