// What the operators need of PyTorch's tensors: how they lie in memory, and new ones.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "onepass/tensor.h"

namespace onepass::torch_binding {

using Tensor = torch::stable::Tensor;

// Throws std::runtime_error for a type the library does not compute with.
DType dtype_of(const Tensor& tensor);
DType dtype_of(torch::headeronly::ScalarType type);
TensorSpec spec_of(const Tensor& tensor);

// Whether strides mean channels_last or channels_last_3d, by PyTorch's own rule.
bool is_channels_last(const TensorSpec& spec);

// Throws std::runtime_error unless the tensor is an ordinary one in the CPU's memory.
void require_cpu(const Tensor& tensor);

// A new tensor of the CPU with these sizes and strides, its memory not written.
Tensor empty(const TensorSpec& spec);
Tensor empty_bytes(size_t bytes);

}  // namespace onepass::torch_binding
