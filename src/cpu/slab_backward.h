// Gradients of a tail of small slabs on the CPU: panels of whole slabs of x and dy, which L1 holds from the
// first step to the input's gradient.
//
// With h the norm's input, z its output, xhat = (h - mean) rstd and M elements in a slab:
//   steps recomputed -> dz -> S1 = sum of gamma dz and S2 = sum of gamma dz xhat over a slab
//   dh = rstd (gamma dz - S1 / M - xhat S2 / M) -> back through the steps before the norm to dx
// x and dy are read once, dx is written once. Gradients of parameters are summed for each column in f32 over
// the few samples of a task, beyond it in double and in a fixed order.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cpu/slabs.h"
#include "plan/strategy.h"

namespace onepass::cpu {

class SlabBackward final : public BackwardKernel {
 public:
  SlabBackward(const BackwardProblem& problem, const Isa& isa);

  static std::string refusal(const Problem& forward) { return Slabs::refusal(forward, limits_of(forward)); }

  size_t workspace_bytes() const override { return static_cast<size_t>(workspace_floats_) * sizeof(float); }
  bool reads_statistics() const override { return slabs_.norm; }
  // The last step reads an element of x and writes the same one of dx.
  bool may_overwrite_input() const override { return problem_.input_gradient == problem_.forward.input; }
  std::string describe() const override;
  void run(const BackwardArguments& arguments, void* workspace, Executor& executor) const override;

  const Slabs& slabs() const { return slabs_; }

 private:
  // A L2 of 1 MiB holds a slab of x, its gradients and what waits between the steps.
  static constexpr int64_t held_floats = 48 * 1024;
  // A norm alone keeps nothing between steps. Its larger slabs are read twice from memory, as everywhere.
  static SlabLimits limits_of(const Problem& forward) {
    const int64_t most = (forward.block.stages().size() == 1 ? 4 : 1) * held_floats;
    return {most, most, held_floats, held_floats / 2};
  }

  // The gradient of a parameter: a sum over pixels for each channel.
  struct Sum {
    size_t parameter = 0;
    bool per_sample = false;
  };
  // What is asked of a step besides the gradient of its input.
  struct StepArgument {
    std::optional<size_t> sum;        // index into sums_
    std::optional<size_t> parameter;  // of a tensor
    SlabTensor tensor;                // that tensor's gradient
  };
  // Values of a worker for each column of a panel, or for each channel (Slabs::by_channel). `zeros` is the
  // shift of a norm without a bias.
  enum Row : int { centre, inverse, scale, zeros, offset, slope, sums, products, row_count };
  // Panels of a worker behind the inputs of the steps.
  enum Extra : size_t { gradient_panel, operand_panel, argument_panel, extra_panels };
  struct Work {
    const BackwardArguments& arguments;
    float* floats;  // the workspace
    float* own;     // the worker's part of it
    int64_t chunk = 0;
    bool first_of_chunk = true;
    SlabRegion region;
    PanelView x;
    PanelView gradient;  // of what the steps taken back so far got
  };

  void choose_steps();
  void choose_sums();
  void lay_out_workspace();
  std::optional<size_t> wanted(int vector) const;
  size_t add_sum(size_t parameter, bool per_sample);

  float* panel(const Work& work, size_t index) const;
  float* row(const Work& work, Row which) const;
  int64_t reduced_channels() const;
  // Values of a parameter, and the region's first, in the layout of parameters.
  int64_t values_of(int64_t columns) const { return columns / slabs_.repeat * slabs_.parameter_repeat(); }
  float* partial(float* floats, int64_t chunk, size_t sum) const;

  void run_panel(Work& work) const;
  const float* shift(const Work& work) const;
  void prepare_norm(const Work& work) const;
  PanelView input_of(const Work& work, size_t step) const;
  StepArguments arguments_of(const Work& work, size_t step) const;
  int orientation_of_step(const Step& step) const;
  PanelView output_gradient(const Work& work) const;
  PanelView destination(const Work& work, bool last) const;
  void step_back(Work& work, size_t step) const;
  void slab_norm_back(Work& work) const;
  void sum_for_norm(const Work& work) const;
  void norm_back(Work& work) const;
  NormGradientArguments norm_arguments(const Work& work) const;
  void add_to_sum(const Work& work, size_t sum, const float* values) const;
  void store_sum(float* floats, const BackwardArguments& arguments, size_t sum, int64_t block) const;

  BackwardProblem problem_;
  const Isa& isa_;
  Slabs slabs_;
  Chain chain_;
  std::vector<Step> steps_;
  size_t norm_at_ = 0;  // the first step after the norm; without one the number of steps
  size_t begin_ = 0;    // steps are taken back down to this one
  bool through_norm_ = false;
  SlabTensor input_;
  SlabTensor output_gradient_;
  SlabTensor input_gradient_;
  TensorMap mean_gradient_;          // of the output of a block with a mean
  std::vector<SlabTensor> tensors_;  // operands, as Chain::tensors
  std::vector<StepArgument> arguments_;
  std::vector<Sum> sums_;
  std::optional<size_t> weight_sum_;
  std::optional<size_t> bias_sum_;
  bool mean_ = false;
  // A task has the samples of a chunk of the batch and the panels of a strip.
  int64_t chunks_ = 1, strips_ = 1;

  // Offsets into the workspace and sizes, in floats.
  int64_t row_floats_ = 0, partials_at_ = 0, workers_at_ = 0, worker_floats_ = 0, workspace_floats_ = 0;
};

}  // namespace onepass::cpu
