// A convolution of few output pixels on the CPU: the terms of each position are gathered, and the positions
// of several samples are multiplied with weights as they lie in memory.
//
// A task is one segment of channels and some samples. It takes the input channels in chunks of at most 1024
// terms. For each chunk it stages a sample's input as f32 planes with borders of zeros. Then it copies the
// terms of each output position into a row, in the order of the weights. Dot tiles multiply rows of terms
// with rows of weights. The weights are so read once for the positions of all samples of a task, and none are
// packed. A sum has the same order of additions whichever samples share a task.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/axis.h"
#include "cpu/convolver.h"

namespace onepass::cpu {

class GatheredConvolution final : public Convolver {
 public:
  GatheredConvolution(const Problem& problem, const Isa& isa, int64_t cut);
  static std::string refusal(const Problem& problem);

  Lanes lanes() const override { return Lanes::terms; }
  int64_t block_count() const override { return block_count_; }
  int64_t block_pixels(int64_t block) const override {
    return even_part(pixels_, block_count_, block).size();
  }
  int64_t max_segment_channels() const override { return max_segment_channels_; }
  int64_t max_panel_pixels() const override { return block_pixels(0); }
  int64_t padded_channels(int64_t channels) const override { return round_up(channels, isa_.lanes); }
  int64_t samples_per_task() const override { return samples_per_task_; }

  int64_t packed_floats() const override { return packed_floats_; }
  int64_t worker_floats() const override { return window_floats_ + gathered_floats_ + sum_floats_; }
  double padded_multiply_adds() const override;
  double read_weights() const override;
  double staged_elements() const override;
  const std::vector<Segment>& segments_of_one_thread() const override { return segments_of_one_thread_; }
  bool in_place() const override { return in_place_; }
  // Of copies before terms are gathered, for the cost: elements, and rows of a channel.
  double copied_elements() const;
  double copied_rows() const;
  // Weights that are packed in another order, for the cost.
  double turned_weights() const;
  // Floats of a run of terms.
  int64_t run_width() const { return channel_runs_ ? chunk_channels(0).size() : run_width_; }
  // How often the outputs of a segment read positions again, for the cost.
  double passes_from_l2() const;
  bool has_one_tap() const { return taps_ == 1; }
  // Pixels of a row that lie apart are copied without gaps first.
  bool copies_rows() const { return input_.channel_stride != 1 && axes_[2].stride * input_.strides[2] != 1; }
  std::string describe() const override;

  void pack(const void* weights, const float* bias, float* packed, Executor& executor) const override;
  void run(const Arguments& arguments, const float* packed, float* worker, const ConvolutionTask& task,
           const std::function<void(const Panel&)>& consume) const override;

 private:
  void choose_segments(int64_t cut, int64_t threads);
  void choose_window();
  void choose_runs();
  static bool reads_in_place(const Problem& problem);
  void pack_weights(const void* weights, int64_t output, float* packed) const;

  Range chunk_channels(int64_t chunk) const { return even_part(group_inputs_, chunk_count_, chunk); }
  // The input channels of one sample as f32 planes with zeros beside the input: in place where they lie so.
  const float* stage(const void* input, int64_t sample, int64_t first_channel, int64_t channels,
                     float* planes) const;
  // The terms of all positions of one sample, a row each.
  void gather(const float* window, int64_t channels, float* rows) const;
  // The same where terms are runs of channels, straight from the input.
  void gather_channels(const void* input, int64_t sample, int64_t first_channel, int64_t channels,
                       float* rows) const;
  // The same for a kernel of one tap, straight from the input; `line`: room for a row of some channels.
  void gather_pixels(const void* input, int64_t sample, int64_t first_channel, int64_t channels, float* rows,
                     float* line) const;
  void multiply_in_place(const Arguments& arguments, const ConvolutionTask& task, Range channels,
                         DotTileArguments t) const;

  const Isa& isa_;
  TensorMap input_;
  DType weight_dtype_;
  int64_t batch_ = 0;
  int64_t group_count_ = 1;
  int64_t group_inputs_ = 0, group_outputs_ = 0;
  std::vector<Segment> segments_of_one_thread_;
  int64_t taps_ = 1, terms_ = 0;
  int64_t pixels_ = 0;
  std::array<Axis, 3> axes_;

  int64_t max_segment_channels_ = 0;
  bool channel_runs_ = false;  // terms are [tap][channel of a chunk], and weights are packed so
  bool in_place_ = false;      // a position's channels are its terms, as they lie in memory
  int64_t block_count_ = 1;
  int64_t samples_per_task_ = 1;
  int64_t chunk_count_ = 1;
  bool has_border_ = false;          // of zeros, around the input
  std::array<int64_t, 3> window_{};  // extents of a channel's planes with their border
  int64_t channel_pitch_ = 0;
  int64_t bordered_at_ = 0;  // in the worker's window
  // The taps of a channel as runs of contiguous floats in the window.
  int64_t run_width_ = 1;
  std::vector<int64_t> runs_;
  int64_t row_pitch_ = 0;  // floats of a position's gathered terms
  int64_t window_floats_ = 0, gathered_floats_ = 0, sum_floats_ = 0;
  int64_t bias_at_ = 0;  // in what is packed
  int64_t packed_floats_ = 0;
};

}  // namespace onepass::cpu
