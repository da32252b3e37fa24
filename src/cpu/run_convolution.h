// A convolution of few outputs on the CPU, lanes along the terms of a sum, which are read where they lie.
//
// With channels last, the taps of a row of the kernel meet one run of floats: neighbouring positions of the
// input with all of their channels. A sum is a dot product of such runs with rows of weights, so no lane
// waits for an output channel that is not there, and nothing is gathered. At a border runs are shorter: no
// zero is multiplied. Other inputs are first turned into channels last, block by block.
//
// A task is one segment of output channels and a block of positions. Positions that meet the same taps are a
// kind. Dot tiles take the positions of a kind together, in chunks of about 1024 terms, whose weights stay in
// L1. A sum has the same order of additions whichever positions share a tile.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/axis.h"
#include "cpu/convolver.h"
#include "cpu/weight_strides.h"

namespace onepass::cpu {

class RunConvolution final : public Convolver {
 public:
  RunConvolution(const Problem& problem, const Isa& isa, int64_t cut);
  static std::string refusal(const Problem& problem);

  Lanes lanes() const override { return Lanes::runs; }
  int64_t block_count() const override { return block_count_; }
  int64_t block_pixels(int64_t block) const override { return pixels_of(block).size(); }
  int64_t max_segment_channels() const override { return max_segment_channels_; }
  int64_t max_panel_pixels() const override { return max_panel_pixels_; }
  int64_t padded_channels(int64_t channels) const override { return round_up(channels, isa_.lanes); }
  int64_t segments_per_task() const override { return segments_per_task_; }
  int64_t samples_per_task() const override { return samples_per_task_; }

  int64_t packed_floats() const override { return packed_floats_; }
  int64_t worker_floats() const override { return worker_floats_; }
  double padded_multiply_adds() const override;
  double read_weights() const override;
  double staged_elements() const override;
  bool in_place() const override { return in_place_; }
  // For the cost: runs that tiles begin, and sums that chunks add up.
  bool has_one_tap() const { return kernel_elements_ == 1; }
  double tile_runs() const { return static_cast<double>(group_count_ * batch_) * tile_runs_; }
  double partial_runs() const { return static_cast<double>(group_count_ * batch_) * partial_runs_; }
  double chunk_sums() const { return static_cast<double>(group_count_ * batch_) * chunk_sums_; }
  double positions() const { return static_cast<double>(group_count_ * batch_ * pixels_); }
  std::string describe() const override;

  void pack(const void* weights, const float* bias, float* packed, Executor& executor) const override;
  bool share_window(size_t segment, size_t other) const override {
    return segments_[segment].group == segments_[other].group;
  }
  void run(const Arguments& arguments, const float* packed, float* worker, const ConvolutionTask& task,
           const std::function<void(const Panel&)>& consume) const override;

 private:
  // Outputs along an axis that meet the same taps of their class inside the input.
  struct AxisKind {
    int64_t output_class = 0;
    Range taps;  // of the class, in the order of their offsets
  };
  struct AxisOutputs {
    std::vector<std::vector<Tap>> taps;  // of each class, by rising offset
    std::vector<AxisKind> kinds;
    std::vector<int64_t> kind;   // of each output
    std::vector<int64_t> first;  // input position that its first tap meets
  };
  // What the positions of a kind read: chunks of runs.
  struct Kind {
    std::vector<DotRun> runs;
    std::vector<Range> chunks;  // of the runs
    int64_t padded_terms = 0;   // of whole vectors
    int64_t partial_runs = 0;   // that end in a part of one
  };
  struct Memory {
    float* window = nullptr;
    float* sums = nullptr;
    const float** pointers = nullptr;
    int32_t* rows = nullptr;
  };

  static AxisOutputs outputs_along(const Axis& axis);
  void choose_blocks(int64_t cut);
  void build_outputs();
  void build_kinds();
  Kind make_kind(const std::array<size_t, 3>& of_axes) const;
  void count_work();
  void lay_out_worker();
  Memory memory_of(float* worker) const;

  // The input positions along the outermost axis that a block reads.
  Range window_of(int64_t block) const;
  Range pixels_of(int64_t block) const;
  std::array<int64_t, 3> strides() const;
  void stage(const Arguments& arguments, const ConvolutionTask& task, float* window) const;
  std::vector<int64_t> point(const Arguments& arguments, const ConvolutionTask& task,
                             const Memory& memory) const;

  const Isa& isa_;
  TensorMap input_;
  DType weight_dtype_;
  bool transposed_ = false;
  int64_t batch_ = 0, pixels_ = 0;
  int64_t group_count_ = 1, group_inputs_ = 0, group_outputs_ = 0;
  int64_t kernel_elements_ = 1;
  WeightStrides weights_;
  std::array<Axis, 3> axes_;
  bool in_place_ = false;
  size_t outer_ = 2;  // the axis that blocks of a turned input cut
  int64_t block_count_ = 1, samples_per_task_ = 1, segments_per_task_ = 1;
  int64_t max_segment_channels_ = 1, max_panel_pixels_ = 1;
  std::array<AxisOutputs, 3> outputs_;
  std::vector<int64_t> class_terms_;  // where the terms of each class begin, and the end
  std::vector<Kind> kinds_;
  int64_t terms_ = 0;  // of a row of weights: of all classes
  double tile_runs_ = 0, partial_runs_ = 0, chunk_sums_ = 0, padded_terms_ = 0,
         read_weights_ = 0;  // of a sample and a group

  int64_t bias_at_ = 0, packed_floats_ = 0;
  int64_t window_floats_ = 0, sum_floats_ = 0, worker_floats_ = 0;
};

}  // namespace onepass::cpu
