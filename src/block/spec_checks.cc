// Checks of the tensor specs of a problem.
#include "block/spec_checks.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "onepass/error.h"

namespace onepass {
namespace {

[[noreturn]] void fail(std::string_view tensor, const std::string& sentence) {
  throw Error(std::string(tensor) + ": " + sentence);
}

// A stride that is never stepped along may be anything, as in PyTorch.
bool is_dense(const TensorSpec& spec, Layout layout) {
  const Shape dense = TensorSpec::dense(spec.dtype, spec.sizes, layout).strides;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (spec.sizes[d] != 1 && spec.strides[d] != dense[d]) return false;
  }
  return true;
}

}  // namespace

bool is_tensor_operand(const Block& block, const Parameter& parameter) {
  const auto* pointwise = std::get_if<Pointwise>(&block.stages()[parameter.stage]);
  return pointwise && argument_kind(pointwise->op) == ArgumentKind::tensor;
}

void check_spec(std::string_view tensor, const TensorSpec& spec, const Shape& sizes) {
  if (spec.sizes != sizes) {
    fail(tensor, "the sizes are " + to_string(spec.sizes) + ", must be " + to_string(sizes));
  }
  if (spec.strides.size() != sizes.size()) {
    fail(tensor, std::to_string(spec.strides.size()) + " strides, must be " + std::to_string(sizes.size()));
  }
  for (const int64_t stride : spec.strides) {
    if (stride < 0) fail(tensor, "stride " + std::to_string(stride) + " must not be negative");
  }
  spec.byte_span();
}

// Strides in ascending order must each clear what the smaller ones reach. An interleaving that this
// simple rule does not see is refused too.
void check_no_overlap(std::string_view tensor, const TensorSpec& spec) {
  if (spec.byte_span() == 0) return;
  std::vector<std::pair<int64_t, int64_t>> stride_and_size;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (spec.sizes[d] > 1) stride_and_size.emplace_back(spec.strides[d], spec.sizes[d]);
  }
  std::sort(stride_and_size.begin(), stride_and_size.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : stride_and_size) {
    if (stride <= reach) {
      fail(tensor, "the strides " + to_string(spec.strides) + " of sizes " + to_string(spec.sizes) +
                       " overlap, each element must have its own place");
    }
    reach += (size - 1) * stride;
  }
}

void check_contiguous(std::string_view tensor, const TensorSpec& spec) {
  if (spec.byte_span() == 0 || is_dense(spec, Layout::nchw)) return;
  fail(tensor, "the strides are " + to_string(spec.strides) +
                   ", must be contiguous: " + to_string(TensorSpec::dense(spec.dtype, spec.sizes).strides));
}

bool lies_channels_last(const TensorSpec& spec) {
  return spec.byte_span() > 0 && is_dense(spec, Layout::nhwc) && !is_dense(spec, Layout::nchw);
}

}  // namespace onepass
