// What the strategies for thin convolutions share.
#include "cuda/thin/thin.h"
#include "cuda/notes.h"

#include <algorithm>
#include <numeric>
#include <sstream>

namespace onepass::cuda {
namespace {

constexpr int64_t most_terms = 512;
constexpr int64_t most_channels = 64;
constexpr int64_t most_elements = int64_t{1} << 31;  // that a sample's tensors span: indices are 32 bits

// The tensors of the output's size, which kernels index alike.
std::vector<const TensorSpec*> large_tensors(const Problem& problem, const TailParts& parts) {
  std::vector<const TensorSpec*> specs;
  if (!parts.mean) specs.push_back(&problem.output);
  for (const int index : parts.tensor_parameters())
    specs.push_back(&problem.parameters[static_cast<size_t>(index)]);
  return specs;
}

bool lie_alike(const TensorSpec& a, const TensorSpec& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.sizes[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

int64_t elements_spanned(const TensorSpec& spec) {
  int64_t last = 0;
  for (size_t d = 1; d < spec.sizes.size(); ++d) last += (spec.sizes[d] - 1) * spec.strides[d];
  return last;
}

std::string layout_refusal(const Problem& problem, const TailParts& parts) {
  const std::vector<const TensorSpec*> specs = large_tensors(problem, parts);
  for (const TensorSpec* spec : specs) {
    if (!lie_alike(*spec, *specs[0])) return "the output and the tensors that stages read lie differently";
    if (elements_spanned(*spec) >= most_elements) return "a sample of the output has 2^31 elements or more";
  }
  if (elements_spanned(problem.input) >= most_elements)
    return "a sample of the input has 2^31 elements or more";
  const Shape dense = TensorSpec::dense(problem.output.dtype, problem.output.sizes).strides;
  if (parts.mean && problem.output.strides != dense) return "the means are not dense";
  return "";
}

// A function of the dimension: `values` by index, `otherwise` beyond.
std::string table(const char* name, const std::vector<int64_t>& values, int64_t otherwise) {
  std::ostringstream out;
  out << "  static constexpr __device__ int64 " << name << "(int d) { return ";
  for (size_t d = 0; d < values.size(); ++d) out << "d == " << d << " ? " << values[d] << "ll : ";
  out << otherwise << "ll; }\n";
  return out.str();
}

std::string axis_table(const char* name, const ThinShape& shape, int64_t ThinAxis::*member) {
  std::vector<int64_t> values;
  for (const ThinAxis& axis : shape.axes) values.push_back(axis.*member);
  return table(name, values, 0);
}

// A function of the dimension and the class.
std::string class_table(const char* name, const ThinShape& shape, int64_t ThinAxis::Class::*member) {
  std::ostringstream out;
  out << "  static constexpr __device__ int64 " << name << "(int d, int r) {\n    return ";
  for (size_t d = 0; d < shape.axes.size(); ++d) {
    for (size_t r = 0; r < shape.axes[d].classes.size(); ++r) {
      out << "d == " << d << " && r == " << r << " ? " << shape.axes[d].classes[r].*member << "ll : ";
    }
  }
  out << "0ll;\n  }\n";
  return out.str();
}

// Batch and channel, then the three spatial dimensions as the shape has them.
std::vector<int64_t> five_strides(const TensorSpec& spec, const ThinShape& shape) {
  std::vector<int64_t> strides(spec.strides.begin(), spec.strides.begin() + 2);
  for (const size_t d : shape.order) strides.push_back(shape.spatial_stride(spec, d));
  return strides;
}

// How far neighbouring taps of a dimension are apart in a filter.
std::vector<int64_t> tap_strides(const Conv& conv, const ThinShape& shape) {
  std::vector<int64_t> strides;
  for (const size_t d : shape.order) {
    int64_t stride = 1;
    const size_t neutral = max_spatial_rank - static_cast<size_t>(conv.rank);
    for (size_t later = d + 1; later < max_spatial_rank; ++later)
      stride *= later < neutral ? 1 : conv.kernel[later - neutral];
    strides.push_back(stride);
  }
  return strides;
}

}  // namespace

ThinAxis::ThinAxis() : classes(1, Class{0, 0, 1, 1}) {}

ThinAxis::ThinAxis(const Conv& conv, size_t d, int64_t in_size, int64_t out_size)
    : in(in_size), out(out_size), kernel(conv.kernel[d]) {
  const int64_t padding = conv.padding_before[d];
  if (!conv.transposed) {
    step = conv.stride[d];
    delta = conv.dilation[d];
    classes.push_back({0, -padding, kernel, out});
    return;
  }
  // Tap k meets outputs with (r + padding - k dilation) divisible by the stride: every tap_step-th, or none.
  const int64_t stride = conv.stride[d];
  const int64_t common = std::gcd(stride, conv.dilation[d]);
  tap_step = stride / common;
  delta = -(conv.dilation[d] / common);
  for (int64_t r = 0; r < stride; ++r) {
    Class own{0, 0, 0, r < out ? divide_up(out - r, stride) : 0};
    for (int64_t k = 0; k < std::min(kernel, tap_step); ++k) {
      const int64_t distance = r + padding - k * conv.dilation[d];
      if (distance % stride != 0) continue;
      own.first = k;
      own.base = distance / stride;
      own.count = divide_up(kernel - k, tap_step);
    }
    classes.push_back(own);
  }
}

ThinShape::ThinShape(const Problem& problem) : parts(problem.block, problem.input.sizes) {
  const Conv& conv = *problem.block.conv();
  const Shape out = problem.block.conv_output_shape(problem.input.sizes);
  const auto rank = static_cast<size_t>(conv.rank);
  for (size_t d = 0; d < rank; ++d) {
    axes[max_spatial_rank - rank + d] = ThinAxis(conv, d, problem.input.sizes[d + 2], out[d + 2]);
    taps *= conv.kernel[d];
  }
  conv_groups = conv.groups;
  samples = Number::batch(out[0]);
  batch = conv_groups == 1 ? samples : samples * conv_groups;
  in_channels = conv.in_channels / conv_groups;
  channels = out[1] / conv_groups;
  groups = parts.norm ? parts.norm->group_count(out[1]) / conv_groups : 1;
  spatial = spatial_elements(out);
}

ThinShape ThinShape::reordered(const Order& by) const {
  ThinShape other = *this;
  for (size_t d = 0; d < by.size(); ++d) {
    other.axes[d] = axes[by[d]];
    other.order[d] = order[by[d]];
  }
  return other;
}

int64_t ThinShape::spatial_stride(const TensorSpec& spec, size_t d) {
  const size_t neutral = 2 + max_spatial_rank - spec.strides.size();
  return d < neutral ? 0 : spec.strides[2 + d - neutral];
}

int64_t ThinShape::classes() const {
  int64_t count = 1;
  for (const ThinAxis& axis : axes) count *= std::ssize(axis.classes);
  return count;
}

int64_t ThinShape::class_positions() const {
  int64_t count = 1;
  for (const ThinAxis& axis : axes) count *= axis.classes[0].positions;
  return count;
}

ThinWorkspace::ThinWorkspace(const ThinShape& shape, int64_t samples, int64_t tiles, int64_t guard_words,
                             const Number& kept_bytes)
    : batch_(shape.batch), guard_words_(guard_words) {
  const Number parts = shape.rows() * tiles;
  control_ = regions_.add((divide_up(batch_, samples) + 1) * 4 * 4);
  marks_ = regions_.add(when(guard_words > 0, (batch_ + 1) * 4));
  guard_ = regions_.add(batch_ * guard_words * 4);
  cleared_bytes_ = regions_.total();
  parts_ = regions_.add(when(shape.parts.norm, parts * 3 * 4));
  sums_ = regions_.add(shape.parts.mean ? parts * 4 : kept_bytes);
  statistics_ = regions_.add(when(shape.parts.norm, shape.slabs() * 2 * 4));
}

template <class Parameters>
void ThinWorkspace::fill_common(Parameters& p, const Arguments& arguments, void* workspace) const {
  p.input = arguments.input;
  p.output = arguments.output;
  p.statistics = arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
  p.control = at(workspace, control_);
  p.parts = at(workspace, parts_);
  p.batch = batch_;
  p.parameter = arguments.parameters;
}

void ThinWorkspace::fill(ThinParameters& p, const Arguments& arguments, void* workspace) const {
  fill_common(p, arguments, workspace);
  p.sums = at(workspace, sums_);
  p.only = nullptr;
  p.guard = at(workspace, guard_);
  p.wave_units = 1;
  p.only_words = 1;
  p.redone = arguments.redone;
}

void ThinWorkspace::fill(ThinMmaParameters& p, const Arguments& arguments, void* workspace) const {
  fill_common(p, arguments, workspace);
  p.sets = at(workspace, guard_);
  p.ring = at(workspace, sums_);
}

void ThinWorkspace::clear(void* workspace, Stream stream, const Device& device) const {
  cuda::clear(at(workspace, control_), cleared_bytes_, stream, device);
}

// near_f32 rounds x alone where enough positions are averaged. Errors of x are random, 1.3e-5 of s27's means;
// those of weights are the same at every position (3e-4).
OperandParts::OperandParts(const Problem& problem, const ThinShape& shape) {
  constexpr int64_t least_positions = 512;
  if (problem.input.dtype != DType::f32 || problem.rounds_to_tf32()) return;
  weight = 2;
  input = problem.precision == Precision::near_f32 && shape.spatial >= least_positions ? 1 : 2;
}

std::vector<std::string> parts_notes(const Problem& problem, const ThinShape& shape) {
  const OperandParts parts(problem, shape);
  if (problem.input.dtype != DType::f32 || parts.input == 2) return {};
  return {parts.weight == 2 ? note::input_rounded : rounding_note(problem)};
}

bool is_thin(const ThinShape& shape) {
  return shape.terms() <= most_terms && shape.channels <= most_channels;
}

std::string whole_block_refusal(const Problem& problem) {
  const Conv* conv = problem.block.conv();
  if (conv == nullptr) return "the block has no convolution";
  const TailParts parts(problem.block, problem.input.sizes);
  if (parts.norm && parts.norm->group_count(conv->out_channels) % conv->groups != 0)
    return "a group of the norm has channels of several groups of the convolution";
  const auto is_f64 = [](const TensorSpec& spec) { return spec.dtype == DType::f64; };
  if (is_f64(problem.input) || is_f64(problem.output) ||
      std::any_of(problem.parameters.begin(), problem.parameters.end(), is_f64)) {
    return "f64 is not computed on the GPU";
  }
  return layout_refusal(problem, parts);
}

std::string thin_refusal(const Problem& problem) {
  const Conv* conv = problem.block.conv();
  if (conv == nullptr) return whole_block_refusal(problem);
  if (conv->groups != 1) return "the convolution has groups";
  int64_t terms = conv->in_channels;
  for (size_t d = 0; d < static_cast<size_t>(conv->rank) && terms <= most_terms; ++d)
    terms *= conv->kernel[d];
  if (terms > most_terms) return "a sum has more than " + std::to_string(most_terms) + " terms";
  if (conv->out_channels > most_channels)
    return "more than " + std::to_string(most_channels) + " output channels";
  return whole_block_refusal(problem);
}

std::string ties_refusal(const Problem& problem) {
  return problem.precision == Precision::tf32_away ? "tf32_away: it rounds ties to even" : "";
}

std::string thin_source(const Problem& problem, const ThinShape& shape) {
  const Conv& conv = *problem.block.conv();
  std::ostringstream out;
  out << "namespace onepass {\nstruct Convolution {\n"
      << "  using Weight = " << name(problem.parameters[0].dtype) << ";\n"
      << "  using Bias = " << name(conv.bias ? problem.parameters[1].dtype : DType::f32) << ";\n";
  out << Constants()
             .flag("has_bias", conv.bias)
             .flag("transposed", conv.transposed)
             .flag("rounds_to_tf32", problem.rounds_to_tf32())
             .flag("ties_away", problem.precision == Precision::tf32_away)
             .add("groups", shape.conv_groups)
             .add("in_channels", shape.in_channels)
             .add("channels", shape.channels)
             .add("taps", shape.taps)
             .text();
  out << axis_table("kernel", shape, &ThinAxis::kernel) << axis_table("input_size", shape, &ThinAxis::in)
      << axis_table("output_size", shape, &ThinAxis::out) << axis_table("step", shape, &ThinAxis::step)
      << axis_table("delta", shape, &ThinAxis::delta) << axis_table("tap_step", shape, &ThinAxis::tap_step)
      << table("tap_stride", tap_strides(conv, shape), 0);
  std::vector<int64_t> classes;
  for (const ThinAxis& axis : shape.axes) classes.push_back(std::ssize(axis.classes));
  out << table("classes", classes, 1) << class_table("first", shape, &ThinAxis::Class::first)
      << class_table("base", shape, &ThinAxis::Class::base)
      << class_table("count", shape, &ThinAxis::Class::count)
      << class_table("positions", shape, &ThinAxis::Class::positions)
      << table("input_stride", five_strides(problem.input, shape), 0);
  const std::vector<const TensorSpec*> large = large_tensors(problem, shape.parts);
  const TensorSpec none = TensorSpec::dense(DType::f32, Shape(problem.input.sizes.size(), 0));
  out << "  // Of the output and of tensors that stages read.\n"
      << table("stride", five_strides(large.empty() ? none : *large[0], shape), 0)
      << "};\n}  // namespace onepass\n\n";
  return out.str();
}

}  // namespace onepass::cuda
