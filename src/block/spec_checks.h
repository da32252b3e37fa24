// Checks of the tensor specs of a problem. Each throws Error that begins with the tensor's name.
#pragma once

#include <string_view>

#include "onepass/block.h"
#include "onepass/tensor.h"

namespace onepass {

// Sizes as expected, one stride for each that is not negative, and a span that can be addressed.
void check_spec(std::string_view tensor, const TensorSpec& spec, const Shape& sizes);
// For what is written: each element has its own place.
void check_no_overlap(std::string_view tensor, const TensorSpec& spec);
// For weights and vectors: dense in the order of their sizes.
void check_contiguous(std::string_view tensor, const TensorSpec& spec);

// Whether the tensor is dense in channels last and in no other order.
bool lies_channels_last(const TensorSpec& spec);

// Whether the parameter is a tensor of the activation's shape, which may lie anyhow.
bool is_tensor_operand(const Block& block, const Parameter& parameter);

}  // namespace onepass
