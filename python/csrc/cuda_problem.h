// From the CUDA tensors of a call to the problem its plan is made for.
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace onepass::torch_binding {

// The problem of a block without convolution, and which tensors must be copied for it. Kernels read all
// tensors of the input's size in one order, channels before or after space: the input's, by PyTorch's rule
// for strides. Those that do not lie dense in it are copied, as are vectors that are not contiguous.
struct CudaProblem {
  Problem problem;
  Layout layout = Layout::nchw;
  std::vector<bool> copied;  // the input, then each parameter

  // Throws Error for a block with a convolution (PyTorch's runs before the operator) and for f64. `numerics`:
  // as in a problem string, "" or "strict".
  CudaProblem(const std::string& block, const CallSpecs& specs, DType out_dtype, const std::string& numerics,
              int device);
};

// The problem of a block with its convolution. The input is read where it lies; the output lies as PyTorch's
// convolution would leave its own, tensors of the output's size that do not are copied, as are weights that
// are not contiguous.
struct WholeProblem {
  Problem problem;
  std::vector<Layout> layouts;  // of each parameter, where it is copied
  std::vector<bool> copied;     // each parameter

  // `numerics`: as in a problem string, "", "tf32", "tf32_away", "near_f32", "tf32 fast" or "strict".
  WholeProblem(const std::string& block, const CallSpecs& specs, const std::string& numerics, int device);
};

// The problem of its gradients: that of the output is read where it lies if it lies as the output does.
struct WholeBackwardProblem {
  BackwardProblem problem;
  std::vector<Layout> layouts;
  std::vector<bool> copied;
  Layout output_layout = Layout::nchw;
  bool copies_output_gradient = false;

  WholeBackwardProblem(const std::string& block, const CallSpecs& specs, const std::string& numerics,
                       const TensorSpec& output_gradient, std::vector<bool> wanted, int device);

 private:
  WholeBackwardProblem(WholeProblem whole, const CallSpecs& specs, const TensorSpec& output_gradient,
                       std::vector<bool> wanted);
};

// The problem of a tail's gradients; those of tensors of the input's size lie in its order.
struct CudaBackwardProblem {
  BackwardProblem problem;
  Layout layout = Layout::nchw;
  std::vector<bool> copied;
  bool copies_output_gradient = false;
};

CudaBackwardProblem cuda_backward_problem(const std::string& block, const CallSpecs& specs,
                                          const TensorSpec& output_gradient, std::vector<bool> wanted,
                                          const std::string& numerics, int device);

// Of tensors dense in this layout. `mode` is that of a problem string: "f32", "tf32 fast", "bf16 strict".
Problem described_problem(const std::string& block, const std::vector<int64_t>& sizes,
                          const std::string& mode, const std::string& layout, const std::string& device);

// A dense copy in this layout.
Tensor dense_copy(const Tensor& tensor, Layout layout);

}  // namespace onepass::torch_binding
