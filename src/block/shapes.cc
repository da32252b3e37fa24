// The shapes of a block: what input it takes, what comes out, and the sizes of its parameters.
#include <map>

#include "block/checked.h"
#include "block/stages.h"
#include "onepass/error.h"

namespace onepass {
namespace {

[[noreturn]] void fail_input(const Stage& stage, const Shape& input, const std::string& sentence) {
  throw Error(Block::text(stage) + ": the input " + to_string(input) + ' ' + sentence);
}

void check_dimensions(const Block& block, const Shape& input) {
  constexpr size_t leading = 2;
  if (const Conv* conv = block.conv()) {
    const size_t wanted = leading + static_cast<size_t>(conv->rank);
    if (input.size() == wanted) return;
    fail_input(*conv, input,
               "has " + std::to_string(input.size()) + " dimensions, must have " + std::to_string(wanted) +
                   ": batch, channels and " + std::to_string(conv->rank) + " of space");
  }
  if (input.size() < leading || input.size() > leading + max_spatial_rank) {
    fail_input(
        block.stages().front(), input,
        "has " + std::to_string(input.size()) + " dimensions, must have 2 to 5: batch, channels and space");
  }
  if (block.has_mean() && input.size() == leading) {
    fail_input(Mean{}, input, "has no spatial dimension, must have at least one");
  }
}

void check_sizes(const Block& block, const Shape& input) {
  for (size_t d = 0; d < input.size(); ++d) {
    const int64_t least = d == 0 ? 0 : 1;
    if (input[d] >= least && input[d] <= max_number) continue;
    fail_input(block.stages().front(), input,
               "has size " + std::to_string(input[d]) + " in dimension " + std::to_string(d) + ", must be " +
                   std::to_string(least) + " to " + std::to_string(max_number));
  }
}

void check_input(const Block& block, const Shape& input) {
  check_dimensions(block, input);
  check_sizes(block, input);
  element_count(input);
  const Conv* conv = block.conv();
  if (conv && input[1] != conv->in_channels) {
    fail_input(
        *conv, input,
        "has " + std::to_string(input[1]) + " channels, must have " + std::to_string(conv->in_channels));
  }
}

// PyTorch's sizes. All numbers are at most max_number, so that no term overflows.
int64_t conv_output_size(const Conv& conv, size_t d, int64_t size) {
  const int64_t span = kernel_span(conv, d);
  if (conv.transposed) {
    const int64_t cut = conv.padding_before[d] + conv.padding_after[d];
    return (size - 1) * conv.stride[d] + span + conv.output_padding[d] - cut;
  }
  const int64_t padded = size + conv.padding_before[d] + conv.padding_after[d];
  return padded < span ? 0 : (padded - span) / conv.stride[d] + 1;
}

[[noreturn]] void fail_empty_output(const Conv& conv, size_t d, int64_t size) {
  const int64_t padding = conv.padding_before[d] + conv.padding_after[d];
  const std::string span = std::to_string(kernel_span(conv, d));
  const std::string where = "the output is empty in spatial dimension " + std::to_string(d) + ": ";
  if (conv.transposed) {
    throw Error(Block::text(conv) + ": " + where + "the padding cuts off " + std::to_string(padding) +
                " of " + std::to_string(conv_output_size(conv, d, size) + padding) + " elements (input " +
                std::to_string(size) + ", kernel span " + span + ")");
  }
  throw Error(Block::text(conv) + ": " + where + "the padded input has " + std::to_string(size + padding) +
              " elements, the kernel spans " + span);
}

Shape operand_sizes(const Pointwise& pointwise, const Shape& shape) {
  if (argument_kind(pointwise.op) == ArgumentKind::tensor) return shape;
  switch (pointwise.per) {
    case Per::tensor:
      return {1};
    case Per::channel:
      return {shape[1]};
    case Per::sample:
      break;
  }
  return {shape[0], shape[1]};
}

Shape weight_sizes(const Conv& conv) {
  Shape sizes = conv.transposed ? Shape{conv.in_channels, conv.out_channels / conv.groups}
                                : Shape{conv.out_channels, conv.in_channels / conv.groups};
  sizes.insert(sizes.end(), conv.kernel.begin(), conv.kernel.begin() + conv.rank);
  return sizes;
}

// Collects the parameters of each stage; `shape` is the tensor's after the convolution.
struct ParameterLister {
  const Shape& shape;
  std::vector<Parameter> parameters{};
  std::map<Op, int> seen{};

  void add(size_t stage, const Conv& conv) {
    parameters.push_back({"conv_weight", Parameter::Role::conv_weight, stage, weight_sizes(conv)});
    if (conv.bias)
      parameters.push_back({"conv_bias", Parameter::Role::conv_bias, stage, {conv.out_channels}});
  }

  void add(size_t stage, const Norm& norm) {
    if (!norm.affine) return;
    parameters.push_back({"norm_weight", Parameter::Role::norm_weight, stage, {shape[1]}});
    parameters.push_back({"norm_bias", Parameter::Role::norm_bias, stage, {shape[1]}});
  }

  void add(size_t stage, const Pointwise& pointwise) {
    if (argument_kind(pointwise.op) == ArgumentKind::none) return;
    const int occurrence = ++seen[pointwise.op];
    std::string label(name(pointwise.op));
    if (occurrence > 1) label += '_' + std::to_string(occurrence);
    parameters.push_back({label, Parameter::Role::operand, stage, operand_sizes(pointwise, shape)});
  }

  void add(size_t, const Mean&) {}
};

}  // namespace

Shape Block::conv_output_shape(const Shape& input) const {
  check_input(*this, input);
  const Conv* convolution = conv();
  if (!convolution) return input;
  Shape output{input[0], convolution->out_channels};
  for (size_t d = 0; d < static_cast<size_t>(convolution->rank); ++d) {
    const int64_t size = conv_output_size(*convolution, d, input[d + 2]);
    if (size < 1) fail_empty_output(*convolution, d, input[d + 2]);
    if (size > max_number) {
      throw Error(Block::text(*convolution) + ": the output has size " + std::to_string(size) +
                  " in spatial dimension " + std::to_string(d) + ", must be at most " +
                  std::to_string(max_number));
    }
    output.push_back(size);
  }
  element_count(output);
  return output;
}

Shape Block::output_shape(const Shape& input) const {
  Shape shape = conv_output_shape(input);
  if (norm()) check_norm_groups(*norm(), shape[1]);
  if (has_mean()) shape.resize(2);
  return shape;
}

std::vector<Parameter> Block::parameters(const Shape& input) const {
  output_shape(input);
  const Shape shape = conv_output_shape(input);
  ParameterLister lister{shape};
  for (size_t i = 0; i < stages_.size(); ++i) {
    std::visit([&](const auto& stage) { lister.add(i, stage); }, stages_[i]);
  }
  return std::move(lister.parameters);
}

}  // namespace onepass
