// A convolution in groups of few channels on the CPU, with lanes along channels: the input lies channels
// last.
//
// A task stages the window of a block of pixels for a segment of channels (GroupWindows) and multiplies taps
// with vectors of weights, [tap][channel]. Panels of sums are handed on while in cache.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/convolver.h"
#include "cpu/group_windows.h"

namespace onepass::cpu {

class GroupConvolution final : public Convolver {
 public:
  GroupConvolution(const Problem& problem, const Isa& isa, int64_t cut);
  static std::string refusal(const Problem& problem);

  Lanes lanes() const override { return Lanes::groups; }
  int64_t block_count() const override { return windows_.block_count(); }
  int64_t block_pixels(int64_t block) const override;
  int64_t max_segment_channels() const override { return windows_.max_segment(); }
  int64_t max_panel_pixels() const override { return max_panel_pixels_; }
  int64_t padded_channels(int64_t channels) const override { return round_up(channels, isa_.lanes); }

  int64_t packed_floats() const override { return packed_floats_; }
  int64_t worker_floats() const override { return windows_.floats() + sum_floats_; }
  double padded_multiply_adds() const override;
  double staged_elements() const override;
  bool in_place() const override { return in_place_; }
  std::string describe() const override;
  const GroupWindows& windows() const { return windows_; }

  void pack(const void* weights, const float* bias, float* packed, Executor& executor) const override;
  void run(const Arguments& arguments, const float* packed, float* worker, const ConvolutionTask& task,
           const std::function<void(const Panel&)>& consume) const override;

 private:
  // Outputs that meet the same taps: all of them, or those of a residue class.
  struct OutputClass {
    std::array<std::vector<Tap>, 3> taps;  // in order of what they meet
    int64_t packed_at = 0;                 // weights of [depth][height][channel of a group][width][lane]
  };
  // What the rows of a panel share. `sums` are those of row `first_height`.
  struct Task {
    const float* packed = nullptr;
    GroupView view;
    Range columns;
    Range channels;
    int64_t lanes = 0;       // of all parts of a row
    int64_t first_lane = 0;  // in what is packed
    float* sums = nullptr;
    int64_t sums_stride = 0, sums_row = 0;
    int64_t first_height = 0;
  };

  void convolve_class(const Task& task, const std::vector<Tap>& taps, int64_t first, float* acc,
                      GroupTileArguments& tile) const;
  void join_parts(const Task& task, int64_t rows, float* panel) const;
  void convolve_rows(const Task& task, int64_t depth, Range heights, std::vector<GroupTapRow>& rows) const;
  void convolve_width(const Task& task, int64_t depth, int64_t height, int64_t count,
                      std::vector<GroupTapRow>& rows) const;

  const Isa& isa_;
  DType weight_dtype_;
  bool transposed_ = false;
  int64_t batch_ = 0;
  std::array<Axis, 3> axes_;
  GroupWindows windows_;
  bool in_place_ = false;  // nothing is staged
  // Panels have no gaps between pixels, so that steps take them as one row.
  bool dense_panels_ = false;
  std::vector<int64_t> lane_of_segment_;  // in what is packed
  std::vector<OutputClass> classes_;      // [depth][height][width]
  int64_t rows_at_once_ = 1;              // of outputs
  int64_t max_panel_pixels_ = 0;
  int64_t weight_pitch_ = 0;  // floats between taps
  int64_t tile_floats_ = 0;   // sums of tiles, before parts of a row are joined
  int64_t sum_floats_ = 0;
  int64_t bias_at_ = 0;  // in what is packed
  int64_t packed_floats_ = 0;
};

}  // namespace onepass::cpu
