// A tail of small slabs on the CPU: a panel of whole slabs goes through all steps while a core's cache holds
// it.
//   steps up to the norm -> mean and variance of each slab -> norm and the steps after it -> output or means
// The input is read once and the output written once. A slab that L1 does not hold is held by L2.
#pragma once

#include <string>
#include <vector>

#include "cpu/slabs.h"
#include "plan/strategy.h"

namespace onepass::cpu {

class SlabTail final : public Kernel {
 public:
  SlabTail(const Problem& problem, const Isa& isa);

  static std::string refusal(const Problem& problem) { return Slabs::refusal(problem, limits); }

  size_t workspace_bytes() const override { return static_cast<size_t>(workspace_floats_) * sizeof(float); }
  std::string describe() const override;
  void run(const Arguments& arguments, void* workspace, Executor& executor) const override;

  const Slabs& slabs() const { return slabs_; }

 private:
  // A L2 of 1 MiB holds a slab and its output. Panels of channels last are smaller.
  static constexpr int64_t held_floats = 96 * 1024;
  static constexpr SlabLimits limits{held_floats, held_floats, held_floats, 64 * 1024};

  // Values of a worker for each column of a panel, in contiguous tensors for each of its channels. `zeros` is
  // the shift of a norm without a bias.
  enum Row : int { centre, scale, zeros, mean, m2, row_count };
  struct Work {
    const Arguments& arguments;
    float* floats;  // the workspace
    float* own;     // the worker's part of it
    SlabRegion region;
    Range rows;           // those at hand
    PanelView values;     // of these rows, as far as they are
    const float* weight;  // the norm's, of the panel's columns; null: none
    const float* shift;
  };

  float* row(const Work& work, Row which) const;
  float* statistics_of(const Work& work) const;
  // Of the region's first value of a parameter.
  int64_t first_value(const SlabRegion& region) const {
    return region.columns.begin / slabs_.repeat * slabs_.parameter_repeat();
  }
  void run_panel(Work& work) const;
  void apply(Work& work, const Step& step, bool last) const;
  void apply_norm(const Work& work, const Step& step, const StepArguments& arguments) const;
  void begin(Work& work, const SlabRegion& region) const;
  void add_statistics(const Work& work) const;
  void finish_statistics(const Work& work, PanelView values) const;
  void finish_means(const Work& work, PanelView values, int64_t slab, const float* statistics) const;
  void store_means(const Work& work, PanelView values) const;

  Problem problem_;
  const Isa& isa_;
  Slabs slabs_;
  Chain chain_;
  SlabTensor input_;
  SlabTensor output_;
  std::vector<SlabTensor> tensors_;  // operands, as Chain::tensors
  TensorMap means_;                  // the output of a block with a mean
  bool mean_ = false;
  bool mean_of_norm_ = false;  // the mean of a norm's output follows from the statistics
  // Statistics are taken of each row of a slab at once, not of its columns. That takes 8 ns a row of a slab
  // instead of 1 a column.
  bool sums_whole_slabs_ = false;
  // Values before the norm wait in the output: L1 holds no panel.
  bool waits_in_output_ = false;
  // Rows that go through the steps of a pass at a time: L1 holds them, and they are few streams from memory
  // (a norm of 512 channels, 2688 pixels: 2.0 ms with 16 rows, 3.0 with 64).
  int64_t block_rows_ = 1;
  double eps_ = 0;
  int64_t task_panels_ = 1;
  int64_t row_floats_ = 0;
  int64_t workers_at_ = 0, worker_floats_ = 0, workspace_floats_ = 0;
};

}  // namespace onepass::cpu
