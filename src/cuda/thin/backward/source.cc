// The numbers of the row "thin_backward" as constants of its kernels.
#include <algorithm>
#include <array>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda/thin/backward/numbers.h"
#include "onepass/cuda.h"

namespace onepass::cuda {
namespace {

// The elements of a sample are contiguous, in whatever order.
bool is_dense(const TensorSpec& input) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (size_t d = 1; d < input.sizes.size(); ++d) {
    if (input.sizes[d] > 1) dimensions.emplace_back(input.strides[d], input.sizes[d]);
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t next = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != next) return false;
    next *= size;
  }
  return true;
}

// A function of the dimension.
template <class Values>
std::string table(const char* type, const char* name, const Values& values) {
  std::ostringstream out;
  out << "  static constexpr __device__ " << type << ' ' << name << "(int d) { return ";
  for (size_t d = 0; d + 1 < std::size(values); ++d) out << "d == " << d << " ? " << values[d] << " : ";
  out << values[std::size(values) - 1] << "; }\n";
  return out.str();
}

}  // namespace

std::string ThinBackwardNumbers::source(const BackwardProblem& problem) const {
  std::array<int64_t, 5> strides{};
  if (work.input) {
    const Shape& own = problem.input_gradient.strides;
    strides[0] = own[0];
    strides[1] = own[1];
    for (size_t d = 2; d < own.size(); ++d) strides[5 - own.size() + d] = own[d];
  }
  std::string text = Constants()
                         .add("threads", threads)
                         .add("warps", warps)
                         .add("slices", slices)
                         .add("spans", spans)
                         .add("vector", vector)
                         .add("steps", steps)
                         .add("jobs", jobs)
                         .add("job_parts", job_parts)
                         .add("fragments", fragments)
                         .add("units", units)
                         .add("chunk_rows", chunk_rows)
                         .add("dh_pitch", dh_pitch)
                         .add("segments", segments)
                         .add("segment_tiles", segment_tiles)
                         .add("all_tiles", all_tiles())
                         .add("window_vectors", window_vectors())
                         .add("back_columns", back_columns)
                         .add("back_elements", back_elements())
                         .add("back_live", back_live)
                         .add("back_buffers", back_buffers)
                         .add("product_pitch", product_pitch)
                         .add("back_spans", back_spans)
                         .add("back_spans_at_once", back_spans_at_once)
                         .add("back_pitch", back_pitch)
                         .flag("splits", splits)
                         .flag("halves", halves)
                         .flag("stages_gradient", stages_gradient)
                         .flag("slides", slides())
                         .flag("row_per_warp", work.input && has_row_per_warp())
                         .flag("dense_input", is_dense(problem.forward.input))
                         .flag("has_first", work.first)
                         .flag("has_second", work.second)
                         .flag("wants_input", work.input)
                         .flag("wants_weight", work.weight)
                         .flag("wants_bias", work.bias)
                         .flag("may_read_output", work.may_read_output)
                         .flag("has_tensors", !shape.parts.tensor_parameters().empty())
                         .flag("compensates_weights", shape.parts.mean && dithers_weights(problem.forward))
                         .text();
  text += table("int", "tile", tile) + table("int", "tiles", tiles) + table("int", "window", window) +
          table("int", "low", low) + table("int", "back_tile", back_tile) +
          table("int", "back_tiles", back_tiles) + table("int", "back_window", back_window) +
          table("int", "conv_stride", conv_stride) + table("int", "conv_padding", conv_padding) +
          table("int", "conv_dilation", conv_dilation) + table("int64", "gradient_stride", strides);
  const auto type = [&](size_t index) {
    return std::string(name(
        index < problem.parameter_gradients.size() ? problem.parameter_gradients[index].dtype : DType::f32));
  };
  std::ostringstream steep;
  TailParts before = shape.parts;
  before.after.clear();
  steep << "  static constexpr float steepness = " << std::showpoint << steepness(before) << "f;\n";
  text += steep.str() + "  using WeightGradient = onepass::" + type(0) +
          ";\n  using BiasGradient = onepass::" + type(1) + ";\n";
  return "using onepass::int64;\nstruct Numbers {\n" + text + "};\n";
}

}  // namespace onepass::cuda
