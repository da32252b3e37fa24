// The canonical text of stages and blocks: defaults left out, k always given, equal extents given once.
#include <algorithm>
#include <limits>

#include "block/stages.h"
#include "block/text.h"

namespace onepass {
namespace {

constexpr double REQUIRED = std::numeric_limits<double>::quiet_NaN();

constexpr std::array<PointwiseRow, op_count> pointwise_rows{{
#define ONEPASS_POINTWISE(name, constants, a, b, argument, value, ...) \
  {#name, constants, {a, b}, ArgumentKind::argument},
#include "onepass/pointwise.def"
#undef ONEPASS_POINTWISE
}};

// "name(argument,argument)", and the bare name where there is none.
std::string call(const std::string& name, const std::vector<std::string>& arguments) {
  if (arguments.empty()) return name;
  std::string text = name + '(';
  for (size_t i = 0; i < arguments.size(); ++i) text += (i > 0 ? "," : "") + arguments[i];
  return text + ')';
}

std::string padding_text(const Conv& conv) {
  if (conv.padding_before != conv.padding_after) return "same";
  return extents_text(conv.padding_before, conv.rank);
}

std::string stage_text(const Conv& conv) {
  std::vector<std::string> arguments{std::to_string(conv.in_channels), std::to_string(conv.out_channels)};
  const auto add = [&](std::string_view key, const std::string& value, std::string_view default_value) {
    if (value != default_value) arguments.push_back(std::string(key) + '=' + value);
  };
  add("k", extents_text(conv.kernel, conv.rank), "");
  add("s", extents_text(conv.stride, conv.rank), "1");
  add("p", padding_text(conv), "0");
  add("d", extents_text(conv.dilation, conv.rank), "1");
  add("groups", std::to_string(conv.groups), "1");
  add("op", extents_text(conv.output_padding, conv.rank), "0");
  add("bias", conv.bias ? "true" : "false", "true");
  return call(conv_name(conv), arguments);
}

std::string stage_text(const Norm& norm) {
  const bool group = norm.kind == Norm::Kind::group;
  std::vector<std::string> arguments;
  if (group) arguments.push_back(std::to_string(norm.groups));
  if (norm.eps != Norm{}.eps) arguments.push_back("eps=" + number_text(norm.eps));
  if (norm.affine != group) arguments.emplace_back(norm.affine ? "affine=true" : "affine=false");
  return call(group ? "group_norm" : "instance_norm", arguments);
}

std::string stage_text(const Pointwise& pointwise) {
  const PointwiseRow& row = pointwise_row(pointwise.op);
  const std::array<double, 2> constants{pointwise.a, pointwise.b};
  size_t given = static_cast<size_t>(row.constants);
  while (given > 0 && constants[given - 1] == row.defaults[given - 1]) --given;
  std::vector<std::string> arguments;
  for (size_t i = 0; i < given; ++i) arguments.push_back(number_text(constants[i]));
  if (pointwise.per != default_per(row.argument)) {
    arguments.push_back("per=" + std::string(per_name(pointwise.per)));
  }
  return call(std::string(row.name), arguments);
}

std::string stage_text(const Mean&) { return "mean"; }

}  // namespace

const PointwiseRow& pointwise_row(Op op) { return pointwise_rows[static_cast<size_t>(op)]; }

std::string_view name(Op op) { return pointwise_row(op).name; }

ArgumentKind argument_kind(Op op) { return pointwise_row(op).argument; }

int constant_count(Op op) { return pointwise_row(op).constants; }

Per default_per(ArgumentKind argument) {
  return argument == ArgumentKind::channel ? Per::channel : Per::tensor;
}

std::string_view per_name(Per per) {
  constexpr std::array<std::string_view, 3> names{"tensor", "channel", "sample"};
  return names[static_cast<size_t>(per)];
}

std::string conv_name(const Conv& conv) {
  return (conv.transposed ? "conv_transpose" : "conv") + std::to_string(conv.rank) + 'd';
}

std::string stage_name(const Stage& stage) {
  const std::string text = Block::text(stage);
  return text.substr(0, text.find('('));
}

std::string extents_text(const Extents& extents, int rank) {
  const auto end = extents.begin() + std::clamp(rank, 1, max_spatial_rank);
  if (std::all_of(extents.begin(), end, [&](int64_t extent) { return extent == extents.front(); })) {
    return std::to_string(extents.front());
  }
  return to_string(Shape(extents.begin(), end));
}

std::string Block::text(const Stage& stage) {
  return std::visit([](const auto& typed) { return stage_text(typed); }, stage);
}

std::string Block::text() const {
  std::string text;
  for (const Stage& stage : stages_) text += (text.empty() ? "" : " | ") + Block::text(stage);
  return text;
}

}  // namespace onepass
