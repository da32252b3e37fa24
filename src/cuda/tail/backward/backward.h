// What the rows for gradients of tails share.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cuda/runtime/parameters.h"
#include "cuda/tail/tail.h"
#include "tail/backward/parameters.cuh"

namespace onepass::cuda {

// The shape, with the gradients of the input's size.
TailShape backward_shape(const BackwardProblem& problem);

// Why no kernel that holds a slab of tensors in this order on the chip can take the problem; empty where one
// can.
std::string held_slab_refusal(const BackwardProblem& problem, Order order = Order::planar);

// A kernel for the gradients of a tail: what all rows have alike.
class TailGradientKernel : public BackwardKernel {
 public:
  size_t workspace_bytes() const override { return static_cast<size_t>(regions_.total().value()); }
  bool reads_statistics() const override { return true; }
  std::vector<std::string> numerics() const override;

 protected:
  TailGradientKernel(const BackwardProblem& problem, TailShape shape)
      : problem_(problem), shape_(std::move(shape)) {}

  // Pointers into the workspace are null. False for an empty tensor, whose gradients it clears.
  bool set_arguments(TailBackwardParameters& p, const BackwardArguments& arguments, Stream stream) const;
  // The lines of `describe` that are the same.
  std::string describe_memory() const;

  BackwardProblem problem_;
  TailShape shape_;
  Regions regions_;
};

}  // namespace onepass::cuda
