// Windows of a convolution in groups of few channels, with lanes along channels of several groups.
//
// Each lane is a channel of the coarse side: of the output, or of what plays its role in a gradient. The fine
// side, which taps move over, is staged as f32 pixels of [channel of a group][lane]. A lane so finds the
// first channel of its own group, then the second. Where a group has one channel on both sides this is a
// copy. Columns beside the fine side are zero. Rows and planes beside it are left out of sums. Windows that
// would be plain copies may be left in place: then no tap may meet what is beside.
//
// Rows of few channels may be cut into parts: lanes behind the channels have the same channels further along
// the width, so that a vector has positions of several parts of a row.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/axis.h"
#include "cpu/isa.h"
#include "cpu/tensor_map.h"

namespace onepass::cpu {

// The coarse positions of a task: some planes, rows and columns.
using GroupBlock = std::array<Range, 3>;

struct GroupSizes {
  int64_t groups = 1;
  int64_t coarse = 1, fine = 1;  // channels of a group
};

// What a block's taps meet: position `first` is at `data`.
struct GroupView {
  const float* data = nullptr;
  std::array<int64_t, 3> first{};
  std::array<int64_t, 3> pitches{};  // floats between planes, rows and pixels
};

// Pixels of few channels, at most eight: moves of a fixed size are faster than partial vectors.
void copy_pixels(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t pixels,
                 int64_t channels);

class GroupWindows {
 public:
  enum class RowParts : uint8_t { never, where_faster };

  // `cut`: segments may not cross a multiple of this many channels.
  GroupWindows(const std::array<Axis, 3>& axes, const TensorMap& fine, GroupSizes sizes, int64_t cut,
               const Isa& isa, RowParts parts = RowParts::never);

  // Why there are none; empty where there are.
  static std::string refusal(const std::array<Axis, 3>& axes, GroupSizes sizes);

  const std::array<Axis, 3>& axes() const { return axes_; }
  const GroupSizes& sizes() const { return sizes_; }
  int64_t lanes_of_all() const { return sizes_.groups * sizes_.coarse; }
  // Channels of the coarse side that a task takes.
  const std::vector<Range>& segments() const { return segments_; }
  int64_t max_segment() const { return max_segment_; }
  int64_t block_count() const { return counts_[0] * counts_[1] * counts_[2]; }
  GroupBlock block_at(int64_t index) const;
  // Parts of a row that share vectors. Blocks have the columns of the first part.
  int64_t row_parts() const { return row_parts_; }

  // Floats between pixels, rows and planes of a window.
  int64_t pixel_pitch() const { return pixel_pitch_; }
  int64_t row_pitch() const { return row_pitch_; }
  int64_t plane_pitch() const { return plane_pitch_; }
  // Floats between the channels of a group.
  int64_t channel_pitch() const { return channel_pitch_; }
  // Of a window, with what staging needs besides.
  int64_t floats() const { return window_floats_ + raw_floats_; }
  // Elements of all windows of one sample, for the cost.
  double staged_elements() const;
  bool is_copy() const { return sizes_.coarse == 1 && sizes_.fine == 1; }
  bool has_channels_last() const { return fine_.channel_stride == 1; }

  // Whether the fine side may be read as it lies.
  bool in_place() const { return in_place_; }
  GroupView in_place_view(const void* fine, int64_t sample, const Range& segment) const;
  GroupView staged_view(const GroupBlock& block, const float* window) const;
  // Fills a window with what the block's taps meet.
  void stage(const void* fine, int64_t sample, const Range& segment, const GroupBlock& block,
             float* window) const;

 private:
  void choose_place(int64_t cut);
  void choose_segments(int64_t cut);
  void choose_row_parts();
  void choose_blocks();
  void cut_blocks(int64_t window_floats);
  void stage_row(TransferArguments t, const void* fine, int64_t element, Range met, float* row) const;

  const Isa& isa_;
  std::array<Axis, 3> axes_;
  TensorMap fine_;
  GroupSizes sizes_;
  bool in_place_ = false;
  int64_t row_parts_ = 1;
  std::vector<Range> segments_;
  int64_t max_segment_ = 0;
  std::array<int64_t, 3> counts_{1, 1, 1};  // of blocks along an axis
  int64_t channel_pitch_ = 0, pixel_pitch_ = 0, row_pitch_ = 0, plane_pitch_ = 0;
  int64_t window_floats_ = 0;
  int64_t raw_floats_ = 0;  // a row of the fine side as it is
};

}  // namespace onepass::cpu
