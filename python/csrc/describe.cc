// JSON of a block. All strings are names of the block language: nothing needs escaping but the text's quotes.
#include "describe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "onepass/plan.h"

namespace onepass::torch_binding {
namespace {

// {"key": value, ...} in the order of the calls.
class Object {
 public:
  Object& text(std::string_view key, std::string_view value) {
    return raw(key, '"' + std::string(value) + '"');
  }
  Object& number(std::string_view key, int64_t value) { return raw(key, std::to_string(value)); }
  Object& truth(std::string_view key, bool value) { return raw(key, value ? "true" : "false"); }
  Object& real(std::string_view key, double value) {
    // As Python's json reads them.
    if (std::isinf(value)) return raw(key, value > 0 ? "Infinity" : "-Infinity");
    std::ostringstream out;
    out.precision(std::numeric_limits<double>::max_digits10);
    out << value;
    return raw(key, out.str());
  }
  Object& raw(std::string_view key, const std::string& value) {
    members_ += (members_.empty() ? "\"" : ", \"") + std::string(key) + "\": " + value;
    return *this;
  }
  std::string str() const { return '{' + members_ + '}'; }

 private:
  std::string members_;
};

template <class Values, class Print>
std::string list(const Values& values, Print print) {
  std::string items;
  for (const auto& value : values) items += (items.empty() ? "" : ", ") + print(value);
  return '[' + items + ']';
}

std::string extents(const Conv& conv, const Extents& values) {
  return list(Shape(values.begin(), values.begin() + conv.rank), [](int64_t n) { return std::to_string(n); });
}

std::string_view text(ArgumentKind kind) {
  switch (kind) {
    case ArgumentKind::slope:
      return "slope";
    case ArgumentKind::channel:
      return "channel";
    case ArgumentKind::tensor:
      return "tensor";
    case ArgumentKind::none:
      break;
  }
  return "none";
}

std::string_view text(Per per) {
  return per == Per::tensor ? "tensor" : per == Per::channel ? "channel" : "sample";
}

std::string stage_json(const Conv& conv) {
  return Object()
      .text("kind", "conv")
      .number("rank", conv.rank)
      .truth("transposed", conv.transposed)
      .number("in_channels", conv.in_channels)
      .number("out_channels", conv.out_channels)
      .raw("kernel", extents(conv, conv.kernel))
      .raw("stride", extents(conv, conv.stride))
      .raw("padding_before", extents(conv, conv.padding_before))
      .raw("padding_after", extents(conv, conv.padding_after))
      .raw("dilation", extents(conv, conv.dilation))
      .raw("output_padding", extents(conv, conv.output_padding))
      .number("groups", conv.groups)
      .truth("bias", conv.bias)
      .text("text", Block::text(conv))
      .str();
}

std::string stage_json(const Pointwise& pointwise) {
  return Object()
      .text("kind", "pointwise")
      .text("op", name(pointwise.op))
      .real("a", pointwise.a)
      .real("b", pointwise.b)
      .text("argument", text(argument_kind(pointwise.op)))
      .text("per", text(pointwise.per))
      .text("text", Block::text(pointwise))
      .str();
}

std::string stage_json(const Norm& norm) {
  return Object()
      .text("kind", norm.kind == Norm::Kind::instance ? "instance_norm" : "group_norm")
      .number("groups", norm.groups)
      .real("eps", norm.eps)
      .truth("affine", norm.affine)
      .text("text", Block::text(norm))
      .str();
}

std::string stage_json(const Mean& mean) {
  return Object().text("kind", "mean").text("text", Block::text(mean)).str();
}

// The smallest input the block surely takes: what its parameters are called does not depend on sizes.
Shape example_input(const Block& block) {
  const Norm* norm = block.norm();
  const Conv* conv = block.conv();
  if (!conv) return {1, norm && norm->kind == Norm::Kind::group ? norm->groups : 1, 1};
  Shape sizes{1, conv->in_channels};
  for (size_t d = 0; d < static_cast<size_t>(conv->rank); ++d) {
    const int64_t span = conv->dilation[d] * (conv->kernel[d] - 1) + 1;
    sizes.push_back(span + conv->padding_before[d] + conv->padding_after[d]);
  }
  return sizes;
}

std::string_view text(Parameter::Role role) {
  switch (role) {
    case Parameter::Role::conv_weight:
      return "conv_weight";
    case Parameter::Role::conv_bias:
      return "conv_bias";
    case Parameter::Role::norm_weight:
      return "norm_weight";
    case Parameter::Role::norm_bias:
      return "norm_bias";
    case Parameter::Role::operand:
      break;
  }
  return "operand";
}

std::string parameter_json(const Parameter& parameter) {
  return Object()
      .text("name", parameter.name)
      .number("stage", static_cast<int64_t>(parameter.stage))
      .text("role", text(parameter.role))
      .str();
}

}  // namespace

std::string describe(const Block& block) {
  const auto stage = [](const Stage& any) {
    return std::visit([](const auto& one) { return stage_json(one); }, any);
  };
  return Object()
      .text("text", block.text())
      .raw("stages", list(block.stages(), stage))
      .raw("parameters", list(block.parameters(example_input(block)), parameter_json))
      .str();
}

std::string describe_library() {
  const auto quoted = [](const std::string& target) { return '"' + target + '"'; };
  return Object().text("version", ONEPASS_VERSION).raw("cpu_targets", list(cpu_targets(), quoted)).str();
}

}  // namespace onepass::torch_binding
