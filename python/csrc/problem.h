// From the tensors of a call to the problem its plan is made for.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "onepass/backward.h"
#include "onepass/problem.h"
#include "plan_cache.h"
#include "torch_tensor.h"

namespace onepass::torch_binding {

// The tensors of a call as they lie in memory.
struct CallSpecs {
  TensorSpec input;
  std::vector<TensorSpec> parameters;
};

// The tensors of a call, all on one device. A plan's key is read off them: only a new plan needs the specs.
struct CallTensors {
  const Tensor& input;
  std::span<const Tensor> parameters;
  Place place;

  // Throws std::runtime_error where a parameter is not on the input's device.
  CallTensors(const Tensor& input, std::span<const Tensor> parameters);

  void add_to(PlanKey& key) const;
  // Throws std::runtime_error where a tensor is not of a floating type.
  CallSpecs specs() const;
};

// Whether weights in channels last are copied too: the rows of a CPU read them.
enum class Copies : uint8_t { few, all };

// A problem, and which parameters must be copied for it: weights are read contiguous, while the input and
// tensors of its size are read where they lie.
struct CallProblem {
  Problem problem;
  std::vector<bool> copied;

  // For one thread. The output lies as PyTorch's own convolution and norm would leave it: channels last where
  // the input or the convolution's weight is.
  CallProblem(const std::string& block, const CallSpecs& specs, DType out_dtype, Copies copies);
};

// The backward problem of a call: gradients lie as what they belong to would if it were dense.
BackwardProblem backward_problem(Problem forward, const CallSpecs& specs, const TensorSpec& output_gradient,
                                 std::vector<bool> wanted);

// The sizes of mean and reciprocal deviation per slab: f32 [batch, groups, 2]. Empty where there is no norm.
TensorSpec statistics_spec(const Problem& problem);

// The parameters as the problem wants them: where they lie, or copied.
class ReadParameters {
 public:
  ReadParameters(std::span<const Tensor> parameters, const std::vector<bool>& copied);
  // Once; the copies live as long as this does.
  std::vector<const void*> take_addresses() { return std::move(addresses_); }

 private:
  std::vector<Tensor> copies_;
  std::vector<const void*> addresses_;
};

}  // namespace onepass::torch_binding
