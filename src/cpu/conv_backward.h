// The gradients of a convolution alone on the CPU. The input's is another convolution; those of weights and
// bias are sums over positions.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cpu/grid.h"
#include "cpu/isa.h"
#include "cpu/weight_sums.h"
#include "onepass/plan.h"
#include "plan/strategy.h"

namespace onepass::cpu {

// Sums over samples and positions for each channel: per panel in f32, over panels in double and in order.
class ChannelSums {
 public:
  ChannelSums(const TensorSpec& tensor, const Isa& isa);

  int64_t workspace_floats() const { return worker_floats_at_; }
  int64_t worker_floats() const { return worker_floats_; }
  void run(const void* tensor, DType dtype, void* sums, float* workspace, Executor& executor) const;

 private:
  double* partial(float* workspace, int64_t block) const;

  const Isa& isa_;
  TensorMap map_;
  Orientation orientation_;
  Grid grid_;
  int64_t batch_ = 0, channels_ = 0;
  int64_t worker_floats_at_ = 0, worker_floats_ = 0;
};

class ConvBackward final : public BackwardKernel {
 public:
  // `lanes` of the weights' gradient: channels, or those of several groups.
  ConvBackward(const BackwardProblem& problem, const Isa& isa, Lanes lanes);

  // Why it cannot be built; empty where it can.
  static std::string refusal(const BackwardProblem& problem, Lanes lanes);

  size_t workspace_bytes() const override { return workspace_bytes_; }
  bool reads_statistics() const override { return false; }
  std::string describe() const override;
  void run(const BackwardArguments& arguments, void* workspace, Executor& executor) const override;

  // Null where it is not wanted.
  const WeightSums* weight() const { return weight_.get(); }
  const std::optional<Plan>& input() const { return input_; }

 private:
  const Isa& isa_;
  bool transposed_ = false;
  DType bias_dtype_ = DType::f32;
  std::unique_ptr<const WeightSums> weight_;
  std::optional<ChannelSums> bias_;
  std::optional<Plan> input_;  // the adjoint convolution of the output's gradient
  size_t workspace_bytes_ = 0;
};

}  // namespace onepass::cpu
