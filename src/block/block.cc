// Construction of a Block: normalises every stage, checks its values and its place in the order.
#include "onepass/block.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "block/checked.h"
#include "block/stages.h"
#include "block/text.h"
#include "onepass/error.h"

namespace onepass {
namespace {

constexpr size_t max_stages = 256;

[[noreturn]] void fail(const Stage& stage, const std::string& sentence) {
  throw Error(Block::text(stage) + ": " + sentence);
}

// What the text form cannot say is set to its neutral value, so that equal meanings are equal values.
void canonicalise(Conv& conv) {
  if (conv.rank < 1 || conv.rank > max_spatial_rank) {
    throw Error("a convolution of rank " + std::to_string(conv.rank) + ": must be 1, 2 or 3");
  }
  for (size_t d = static_cast<size_t>(conv.rank); d < max_spatial_rank; ++d) {
    conv.kernel[d] = conv.stride[d] = conv.dilation[d] = 1;
    conv.padding_before[d] = conv.padding_after[d] = conv.output_padding[d] = 0;
  }
}

void canonicalise(Pointwise& pointwise) {
  if (static_cast<int>(pointwise.op) >= op_count) throw Error("an unknown pointwise operation");
  const int constants = constant_count(pointwise.op);
  // Adding 0 turns -0 into 0.
  pointwise.a = constants > 0 ? pointwise.a + 0.0 : 0.0;
  pointwise.b = constants > 1 ? pointwise.b + 0.0 : 0.0;
}

void canonicalise(Norm& norm) {
  if (norm.kind == Norm::Kind::instance) norm.groups = 1;
  norm.eps += 0.0;
}

void canonicalise(Mean&) {}

bool in_range(int64_t value, int64_t least) { return value >= least && value <= max_number; }

std::string range_rule(int64_t value, int64_t least) {
  return value < least ? ", must be at least " + std::to_string(least)
                       : ", must be at most " + std::to_string(max_number);
}

void check_range(const Stage& stage, const std::string& key, int64_t value, int64_t least) {
  if (in_range(value, least)) return;
  fail(stage, key + " is " + std::to_string(value) + range_rule(value, least));
}

void check_range(const Conv& conv, const std::string& key, const Extents& extents, int64_t least) {
  for (const int64_t extent : extents) {
    if (in_range(extent, least)) continue;
    fail(conv, key + " is " + extents_text(extents, conv.rank) + range_rule(extent, least));
  }
}

void check_span(const Conv& conv) {
  for (size_t d = 0; d < max_spatial_rank; ++d) {
    const int64_t span = kernel_span(conv, d);
    if (span <= max_number) continue;
    fail(conv,
         "k and d span " + std::to_string(span) + " elements, must be at most " + std::to_string(max_number));
  }
}

void check_padding(const Conv& conv) {
  if (conv.padding_before == conv.padding_after) return;
  const SamePadding same = same_padding(conv);
  if (conv.transposed || conv.stride != Extents{1, 1, 1} || conv.padding_before != same.before ||
      conv.padding_after != same.after) {
    fail(conv, "padding before is " + extents_text(conv.padding_before, conv.rank) + " and after " +
                   extents_text(conv.padding_after, conv.rank) +
                   ", may differ only as p=same of an ordinary convolution of stride 1");
  }
}

void check_output_padding(const Conv& conv) {
  const std::string value = "op is " + extents_text(conv.output_padding, conv.rank) + ", ";
  for (size_t d = 0; d < max_spatial_rank; ++d) {
    if (conv.output_padding[d] == 0) continue;
    if (!conv.transposed) fail(conv, value + "must be 0: only a transposed convolution has output padding");
    if (conv.output_padding[d] >= std::max(conv.stride[d], conv.dilation[d])) {
      fail(conv, value + "must be less than the stride or the dilation");
    }
  }
}

void check_groups(const Conv& conv) {
  for (const int64_t channels : {conv.in_channels, conv.out_channels}) {
    if (channels % conv.groups == 0) continue;
    fail(conv, std::to_string(channels) + (channels == conv.in_channels ? " input" : " output") +
                   " channels are not divisible into " + std::to_string(conv.groups) + " groups");
  }
}

void check(const Conv& conv) {
  check_range(conv, "in", conv.in_channels, 1);
  check_range(conv, "out", conv.out_channels, 1);
  check_range(conv, "k", conv.kernel, 1);
  check_range(conv, "s", conv.stride, 1);
  check_range(conv, "p", conv.padding_before, 0);
  check_range(conv, "p", conv.padding_after, 0);
  check_range(conv, "d", conv.dilation, 1);
  check_range(conv, "groups", conv.groups, 1);
  check_range(conv, "op", conv.output_padding, 0);
  check_span(conv);
  check_padding(conv);
  check_output_padding(conv);
  check_groups(conv);
}

void check(const Norm& norm) {
  check_range(norm, "groups", norm.groups, 1);
  if (!(norm.eps >= 0) || !std::isfinite(norm.eps)) {
    fail(norm, "eps is " + number_text(norm.eps) + ", must be finite and at least 0");
  }
}

void check(const Pointwise& pointwise) {
  for (const double constant : {pointwise.a, pointwise.b}) {
    if (has_limits(pointwise.op) && std::isnan(constant))
      fail(pointwise, "the limit is nan, must be a number, inf or -inf");
    if (!has_limits(pointwise.op) && !std::isfinite(constant))
      fail(pointwise, "the constant " + number_text(constant) + " must be finite");
  }
  // PyTorch's hardtanh refuses them as well, where its clamp gives the upper limit.
  if (pointwise.op == Op::hardtanh && pointwise.a > pointwise.b) {
    fail(pointwise, "the lower limit is " + number_text(pointwise.a) + ", must be at most the upper limit " +
                        number_text(pointwise.b));
  }
  const ArgumentKind argument = argument_kind(pointwise.op);
  const Per usual = default_per(argument);
  const bool accepted = pointwise.per == usual ||
                        (argument == ArgumentKind::slope && pointwise.per == Per::channel) ||
                        (argument == ArgumentKind::channel && pointwise.per == Per::sample);
  if (accepted) return;
  const std::string_view rule = argument == ArgumentKind::slope     ? "tensor or channel"
                                : argument == ArgumentKind::channel ? "channel or sample"
                                                                    : "tensor (it takes no vector)";
  fail(pointwise, "per is " + std::string(per_name(pointwise.per)) + ", must be " + std::string(rule));
}

void check(const Mean&) {}

void check_conv_is_first(const std::vector<Stage>& stages) {
  for (size_t i = 1; i < stages.size(); ++i) {
    if (!std::holds_alternative<Conv>(stages[i])) continue;
    if (std::holds_alternative<Conv>(stages[0])) {
      throw Error("a block has at most one convolution: " + Block::text(stages[i]) + " follows " +
                  Block::text(stages[0]));
    }
    throw Error(stage_name(stages[i]) + " must be the first stage: " + stage_name(stages[0]) +
                " precedes it");
  }
}

void check_one_norm(const std::vector<Stage>& stages) {
  const Stage* first = nullptr;
  for (const Stage& stage : stages) {
    if (!std::holds_alternative<Norm>(stage)) continue;
    if (first) {
      throw Error("a block has at most one norm: " + Block::text(stage) + " follows " + Block::text(*first));
    }
    first = &stage;
  }
}

void check_mean_is_last(const std::vector<Stage>& stages) {
  for (size_t i = 0; i + 1 < stages.size(); ++i) {
    if (!std::holds_alternative<Mean>(stages[i])) continue;
    throw Error("mean must be the last stage: " + stage_name(stages[i + 1]) + " follows it");
  }
}

}  // namespace

SamePadding same_padding(const Conv& conv) {
  SamePadding same;
  for (size_t d = 0; d < max_spatial_rank; ++d) {
    const int64_t total = kernel_span(conv, d) - 1;
    same.before[d] = total / 2;
    same.after[d] = total - same.before[d];
  }
  return same;
}

void check_norm_groups(const Norm& norm, int64_t channels) {
  if (channels % norm.group_count(channels) == 0) return;
  fail(norm, std::to_string(channels) + " channels are not divisible into " + std::to_string(norm.groups) +
                 " groups");
}

Block::Block(std::vector<Stage> stages) : stages_(std::move(stages)) {
  if (stages_.empty()) throw Error("a block needs at least one stage, as in \"conv2d(3,8) | relu\"");
  if (stages_.size() > max_stages) {
    throw Error("a block of " + std::to_string(stages_.size()) + " stages: must be at most " +
                std::to_string(max_stages));
  }
  for (Stage& stage : stages_) std::visit([](auto& typed) { canonicalise(typed); }, stage);
  for (const Stage& stage : stages_) std::visit([](const auto& typed) { check(typed); }, stage);
  check_conv_is_first(stages_);
  check_mean_is_last(stages_);
  check_one_norm(stages_);
  if (conv() && norm()) check_norm_groups(*norm(), conv()->out_channels);
}

const Conv* Block::conv() const { return std::get_if<Conv>(&stages_.front()); }

const Norm* Block::norm() const {
  for (const Stage& stage : stages_) {
    if (const Norm* found = std::get_if<Norm>(&stage)) return found;
  }
  return nullptr;
}

bool Block::has_mean() const { return std::holds_alternative<Mean>(stages_.back()); }

// The canonical text is equal exactly where the stages are.
size_t Block::hash() const { return std::hash<std::string>{}(text()); }

}  // namespace onepass
