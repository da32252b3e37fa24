// From the tensors of a call to the problem its plan is made for.
#pragma once

#include <string>
#include <vector>

#include "onepass/backward.h"
#include "onepass/problem.h"
#include "torch_tensor.h"

namespace onepass::torch_binding {

// The tensors of a call as they lie in memory.
struct CallSpecs {
  TensorSpec input;
  std::vector<TensorSpec> parameters;

  // Throws std::runtime_error where a tensor is not on the input's device or not of a floating type.
  CallSpecs(const Tensor& input, const std::vector<Tensor>& parameters);
};

// A problem, and which parameters must be copied for it: weights are read contiguous (they are small), while
// the input and tensors of its size are read where they lie.
struct CallProblem {
  Problem problem;
  std::vector<bool> copied;

  // For one thread. The output lies as PyTorch's own convolution and norm would leave it: channels last where
  // the input or the convolution's weight is.
  CallProblem(const std::string& block, const CallSpecs& specs, DType out_dtype);
};

// The backward problem of a call: gradients lie as what they belong to would if it were dense.
BackwardProblem backward_problem(Problem forward, const CallSpecs& specs, const TensorSpec& output_gradient,
                                 std::vector<bool> wanted);

// The sizes of mean and reciprocal deviation per slab: f32 [batch, groups, 2]. Empty where there is no norm.
TensorSpec statistics_spec(const Problem& problem);

// The parameters as the problem wants them.
std::vector<Tensor> with_copies(std::vector<Tensor> parameters, const std::vector<bool>& copied);

}  // namespace onepass::torch_binding
