// Gradients of a block without a convolution on the CPU. One pass over input and output gradient, two with a
// norm.
//
// With h the norm's input, z its output, xhat = (h - mean) rstd and M elements in a slab:
//   first pass   panels of x and dy -> steps recomputed -> dz; sums of dz and of dz xhat for each channel
//   finish       S1 = sum of gamma dz and S2 = sum of gamma dz xhat over the slab
//   second pass  dh = rstd (gamma dz - S1 / M - xhat S2 / M), then back through the steps before the norm to
//   dx
// Gradients of arguments are summed in the pass that meets them: per panel in f32, beyond it in double and in
// a fixed order. The work goes in waves of units (slabs or samples). The second pass finds x and the gradient
// of its wave in a cache.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cpu/chain.h"
#include "cpu/grid.h"
#include "cpu/isa.h"
#include "cpu/tensor_map.h"
#include "plan/strategy.h"

namespace onepass::cpu {

// What waits for the second pass in the memory of the input's gradient, so that it is not computed again.
enum class Kept : uint8_t { nothing, norm_input, norm_gradient };

class TailBackward final : public BackwardKernel {
 public:
  TailBackward(const BackwardProblem& problem, const Isa& isa);

  size_t workspace_bytes() const override { return static_cast<size_t>(workspace_floats_) * sizeof(float); }
  bool reads_statistics() const override { return norm_; }
  // The last step of the last pass reads an element of x and writes the same one of dx.
  bool may_overwrite_input() const override {
    return kept_ == Kept::nothing && problem_.input_gradient == problem_.forward.input;
  }
  std::string describe() const override;
  void run(const BackwardArguments& arguments, void* workspace, Executor& executor) const override;

  int pass_count() const { return (first_.runs ? 1 : 0) + (second_.runs ? 1 : 0); }
  int64_t unit_count() const { return batch_ * units_.per_sample; }
  Kept kept() const { return kept_; }

 private:
  // A sum over pixels for each channel of a unit. The norm's are the first two of the first pass: dz and dz
  // xhat.
  struct Sum {
    std::optional<size_t> parameter;  // whose gradient it is; none where only the norm's finish reads it
    bool per_sample = false;
    size_t total = 0;  // index of its totals over the samples
  };
  // What is asked of a step besides the gradient of its input.
  struct StepArgument {
    std::optional<size_t> sum;        // index into the sums of the pass that meets the step
    std::optional<size_t> parameter;  // of a tensor
    TensorMap map;                    // of that tensor's gradient
  };
  struct Pass {
    bool runs = false;
    size_t begin = 0;  // steps taken back: end - 1 down to begin
    size_t end = 0;
    std::vector<Sum> sums;
  };
  // The parts of the workspace of one call.
  struct Call {
    const BackwardArguments& arguments;
    float* floats;
    int64_t first_unit = 0;  // of the wave
  };
  // One panel whose gradient is computed.
  struct Work {
    const Call& call;
    const Pass& pass;
    int64_t unit = 0;
    int64_t block = 0;
    int worker = 0;
    bool first_of_block = true;
    Region region;
    StepContext context;
    PanelView x;
    PanelView gradient;  // of what the steps taken back so far got
  };
  // Panels of a worker behind the inputs of the steps.
  enum Extra : size_t { gradient_panel, operand_panel, argument_panel, extra_panels };
  // What a unit holds per channel.
  enum Row : int { centre, inverse, scale, shift, offset, slope, mean_gradient, row_count };

  void choose_sums();
  void choose_passes();
  Kept worth_keeping() const;
  void choose_panels();
  void lay_out_workspace();
  bool wants(size_t parameter) const { return problem_.wants_parameter(parameter); }
  size_t add_sum(Pass& pass, Sum sum);

  float* row(const Call& call, int64_t unit, Row row) const;
  double* partial_sums(const Call& call, int64_t unit, int64_t block, size_t sum) const;
  double* totals(const Call& call, size_t total) const;
  float* panel(const Call& call, int worker, size_t index) const;
  float* channel_sums(const Call& call, int worker, int index) const;
  const float* statistics_of(const Call& call, int64_t sample, int64_t channel) const;

  void prepare(const Call& call, int64_t unit) const;
  void run_task(const Call& call, const Pass& pass, int64_t unit, int64_t task, int worker) const;
  void first_pass(Work& work) const;
  void second_pass(Work& work) const;
  PanelView input_of(const Work& work, size_t step) const;
  void recompute(const Work& work, size_t end) const;
  PanelView source_gradient(const Work& work) const;
  PanelView input_gradient_panel(const Work& work) const;
  PanelView destination(const Work& work, bool last) const;
  void step_back(Work& work, size_t step, bool last) const;
  NormGradientArguments norm_arguments(const Work& work) const;
  void sum_for_norm(const Work& work) const;
  void norm_back(Work& work, bool last) const;
  void store_input_gradient(const Work& work) const;
  void add_to_sum(const Work& work, size_t sum, const float* values) const;

  void finish_norm(const Call& call, int64_t unit, int64_t group) const;
  void reduce(const Call& call, const Pass& pass, int64_t units, size_t sum, int64_t channel) const;
  void store_totals(const Call& call, const Pass& pass) const;

  BackwardProblem problem_;
  const Isa& isa_;
  Chain chain_;
  TensorMap input_;
  TensorMap output_gradient_;
  TensorMap input_gradient_;
  Orientation orientation_ = Orientation::planar;
  Grid grid_;  // of a unit
  std::vector<Step> steps_;
  std::vector<StepArgument> arguments_;  // of each step
  size_t norm_at_ = 0;                   // the first step after the norm; without one the number of steps
  Pass first_;
  Pass second_;
  bool norm_ = false;
  bool mean_ = false;
  bool sums_for_norm_ = false;
  Kept kept_ = Kept::nothing;
  int64_t group_count_ = 1;
  int64_t batch_ = 0, channels_ = 0, pixels_ = 0;
  Units units_;
  int64_t wave_units_ = 1;
  int64_t panel_elements_ = 0;
  size_t total_count_ = 0;

  // Offsets into the workspace and sizes, in floats.
  int64_t rows_at_ = 0, partials_at_ = 0, totals_at_ = 0;
  int64_t workers_at_ = 0, worker_floats_ = 0;
  int64_t panel_floats_ = 0;
  int64_t workspace_floats_ = 0;
};

}  // namespace onepass::cpu
