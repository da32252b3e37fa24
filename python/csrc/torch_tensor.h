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

// A device as PyTorch counts them.
struct Place {
  int32_t type = aoti_torch_device_type_cpu();
  int32_t index = 0;

  bool operator==(const Place&) const = default;
};

Place place_of(const Tensor& tensor);

// Throws std::runtime_error unless the tensor is an ordinary one in the CPU's memory.
void require_cpu(const Tensor& tensor);
// Throws std::runtime_error unless the tensor is where the block's input is.
void require_place(const Tensor& tensor, const Place& input);

// A new tensor with these sizes and strides, its memory not written. Throws std::runtime_error where the
// device's memory does not suffice.
Tensor empty(const TensorSpec& spec, const Place& place = {});
Tensor empty_bytes(size_t bytes, const Place& place);

}  // namespace onepass::torch_binding
