// What the rows for tails share.
#include "cuda/tail/tail.h"

#include <algorithm>
#include <sstream>

#include "cuda/device/aligned.cuh"
#include "plan/choice.h"

namespace onepass::cuda {
namespace {

// Whether a tensor lies dense in this order, whatever the strides of dimensions of one element are.
bool lies(const TensorSpec& spec, Order order) {
  const Layout layout = order == Order::planar ? Layout::nchw : Layout::nhwc;
  const Shape strides = TensorSpec::dense(spec.dtype, spec.sizes, layout).strides;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (spec.sizes[d] > 1 && spec.strides[d] != strides[d]) return false;
  }
  return true;
}

bool all_lie(const std::vector<const TensorSpec*>& specs, Order order) {
  return std::all_of(specs.begin(), specs.end(),
                     [order](const TensorSpec* spec) { return lies(*spec, order); });
}

// The tensors of the input's size.
std::vector<const TensorSpec*> large_tensors(const Problem& problem, const TailParts& parts) {
  std::vector<const TensorSpec*> specs{&problem.input};
  if (!parts.mean) specs.push_back(&problem.output);
  for (const int index : parts.tensor_parameters())
    specs.push_back(&problem.parameters[static_cast<size_t>(index)]);
  return specs;
}

bool has_f64(const Problem& problem) {
  const auto is_f64 = [](const TensorSpec& spec) { return spec.dtype == DType::f64; };
  return is_f64(problem.input) || is_f64(problem.output) ||
         std::any_of(problem.parameters.begin(), problem.parameters.end(), is_f64);
}

std::string order_refusal(const std::vector<const TensorSpec*>& specs) {
  if (all_lie(specs, Order::planar) || all_lie(specs, Order::interleaved)) return "";
  return "the tensors are not all dense with channels before, or all with channels after, space";
}

// 16 bytes of the narrowest tensor.
int widest_vector(const std::vector<const TensorSpec*>& specs) {
  int width = 4;
  for (const TensorSpec* spec : specs) {
    width = std::max<int>(width, static_cast<int>(16 / byte_size(spec->dtype)));
  }
  return width;
}

// Where vectors lie within rows, or within the channels of a position.
int vector_width(int widest, Order order, int64_t channels, int64_t spatial) {
  if (order == Order::planar) {
    // Rows shorter than this are mostly beginnings and ends.
    constexpr int64_t least_vectors = 16;
    return spatial >= least_vectors * widest || spatial % widest == 0 ? widest : 1;
  }
  int width = widest;
  while (width > 1 && channels % width != 0) width /= 2;
  return width;
}

}  // namespace

std::vector<const TensorSpec*> large_gradients(const BackwardProblem& problem, const TailParts& parts) {
  std::vector<const TensorSpec*> specs;
  if (!parts.mean) specs.push_back(&problem.output_gradient);
  if (problem.wants_input()) specs.push_back(&problem.input_gradient);
  for (const int index : parts.tensor_parameters()) {
    const auto i = static_cast<size_t>(index);
    if (problem.wants_parameter(i)) specs.push_back(&problem.parameter_gradients[i]);
  }
  return specs;
}

TailShape::TailShape(const Problem& problem) : TailShape(problem, {}) {}

TailShape::TailShape(const Problem& problem, const std::vector<const TensorSpec*>& gradients)
    : parts(problem.block, problem.input.sizes) {
  std::vector<const TensorSpec*> specs = large_tensors(problem, parts);
  for (const TensorSpec* spec : specs) element_bytes += byte_size(spec->dtype);
  specs.insert(specs.end(), gradients.begin(), gradients.end());
  order = all_lie(specs, Order::planar) ? Order::planar : Order::interleaved;
  batch = Number::batch(problem.input.sizes[0]);
  channels = problem.input.sizes[1];
  groups = parts.norm ? parts.norm->group_count(channels) : 1;
  spatial = spatial_elements(problem.input.sizes);
  const int widest = widest_vector(specs);
  width = vector_width(widest, order, channels, spatial);
  slab_width = slab_elements() >= 4 * widest ? widest : 1;
}

TailShape TailShape::by_slabs(const Problem& problem) {
  TailShape shape(problem);
  shape.width = shape.slab_width;
  return shape;
}

std::string tail_refusal(const Problem& problem) {
  if (problem.block.conv() != nullptr) return "the block has a convolution";
  if (has_f64(problem)) return "f64 is not computed on the GPU";
  const TailParts parts(problem.block, problem.input.sizes);
  if (parts.mean && !lies(problem.output, Order::planar)) return "the means are not dense";
  return order_refusal(large_tensors(problem, parts));
}

std::string slab_refusal(const Problem& problem, Order order, Means means) {
  std::string reason = tail_refusal(problem);
  if (!reason.empty()) return reason;
  const TailShape shape(problem);
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.parts.mean && means == Means::refused) return "the block ends in a mean";
  // Sums of equal outputs are not exact, so that the mean of a slab of equal values would not be beta.
  if (shape.parts.mean_follows_norm()) return "the mean follows the norm: that of x gives it in one pass";
  if (shape.order == order) return "";
  return order == Order::planar ? "channels lie after space: a slab is not contiguous"
                                : "channels lie before space: they are no strips";
}

std::string tail_refusal(const BackwardProblem& problem) {
  std::string reason = tail_refusal(problem.forward);
  if (!reason.empty()) return reason;
  const TailParts parts(problem.forward.block, problem.forward.input.sizes);
  std::vector<const TensorSpec*> specs = large_tensors(problem.forward, parts);
  if (!parts.mean) specs.erase(specs.begin() + 1);  // the output itself is not read
  const auto gradients = large_gradients(problem, parts);
  specs.insert(specs.end(), gradients.begin(), gradients.end());
  bool f64 = problem.output_gradient.dtype == DType::f64;
  for (const TensorSpec* spec : gradients) f64 |= spec->dtype == DType::f64;
  return f64 ? "f64 is not computed on the GPU" : order_refusal(specs);
}

Alignment::Alignment(const TailShape& shape, const TensorSpec& input, const void* pointer)
    : width_(shape.width),
      phase_(shape.order == Order::planar
                 ? static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) /
                                        static_cast<uintptr_t>(byte_size(input.dtype))) %
                       shape.width
                 : 0) {
  if (recording_ && shape.order == Order::planar) {
    phase_text_ = "phase_of(" + recording_->address(pointer).text() + ", " +
                  std::to_string(byte_size(input.dtype)) + ", " + std::to_string(shape.width) + ")";
  }
  add(aligned_input, input, pointer);
}

Alignment::Alignment(const TailShape& shape, const Problem& problem, const Arguments& arguments)
    : Alignment(shape, problem.input, arguments.input) {
  add(aligned_output, problem.output, arguments.output);
  for (const int i : shape.parts.tensor_parameters()) {
    const auto index = static_cast<size_t>(i);
    add_parameter(aligned_parameter, i, problem.parameters[index], arguments.parameters[index]);
  }
}

Alignment::Alignment(const TailShape& shape, const BackwardProblem& problem,
                     const BackwardArguments& arguments)
    : Alignment(shape, problem.forward.input, arguments.input) {
  add(aligned_output_gradient, problem.output_gradient, arguments.output_gradient);
  if (problem.wants_input()) add(aligned_input_gradient, problem.input_gradient, arguments.input_gradient);
  for (const int i : shape.parts.tensor_parameters()) {
    const auto index = static_cast<size_t>(i);
    add_parameter(aligned_parameter, i, problem.forward.parameters[index], arguments.parameters[index]);
    add_parameter(aligned_gradient, i, problem.parameter_gradients[index],
                  arguments.parameter_gradients[index]);
  }
}

void Alignment::add_parameter(int bit, int index, const TensorSpec& spec, const void* pointer) {
  constexpr int most = aligned_gradient - aligned_parameter;  // others count as not aligned
  if (index < most) {
    add(bit + index, spec, pointer);
  } else {
    all_ = false;
  }
}

Number Alignment::bits() const {
  const auto value = static_cast<int64_t>(bits_ | (all_ ? uint64_t{1} << aligned_all : 0));
  if (!recording_) return value;
  return Number::named(value,
                       "aligned_bits({" + tensors_text_ + "}, " + phase().text() + (all_ ? ")" : ", false)"));
}

Number Alignment::phase() const {
  return phase_text_.empty() ? Number(phase_) : Number::named(phase_, phase_text_);
}

void Alignment::add(int bit, const TensorSpec& spec, const void* pointer) {
  const auto bytes = static_cast<uintptr_t>(byte_size(spec.dtype));
  const auto elements = std::min<uintptr_t>(static_cast<uintptr_t>(width_), 16 / bytes);
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  const bool aligned =
      address % bytes == 0 && address / bytes % elements == static_cast<uintptr_t>(phase_) % elements;
  if (recording_) {
    tensors_text_ += (tensors_text_.empty() ? "{" : ", {") + std::to_string(bit) + ", " +
                     recording_->address(pointer).text() + ", " + std::to_string(bytes) + ", " +
                     std::to_string(elements) + "}";
  }
  if (aligned) bits_ |= uint64_t{1} << bit;
  all_ &= aligned;
}

namespace {

// Of a stage: its value, or its gradient. Values of 16 bits have shorter forms of some.
double instructions_of(Op op, int bits, bool is_short) {
  switch (op) {
    case Op::sigmoid:
    case Op::swish:
      return bits == 16 ? 5 : 7;
    case Op::gelu:
    case Op::gelu_tanh:
      return bits == 16 ? 12 : 20;
    case Op::tanh:
    case Op::elu:
      return is_short ? 14 : 22;
    case Op::mish:
      return is_short ? 12 : 28;
    case Op::softplus:
      return is_short ? 13 : 26;
    default:
      return 2;
  }
}

double instructions_of(const std::vector<TailParts::Stage>& stages, int bits, bool is_short) {
  double sum = 0;
  for (const TailParts::Stage& stage : stages) sum += instructions_of(stage.pointwise.op, bits, is_short);
  return sum;
}

}  // namespace

double instructions_of_value(const TailParts& parts, int bits, double times) {
  const bool is_short = bits == 16;
  return times * instructions_of(parts.before, bits, is_short) + instructions_of(parts.after, bits, is_short);
}

double instructions_of_gradient(const TailParts& parts, int bits) {
  const double again = bits == 16 ? 2 : 1;  // dz is computed in both parts
  return 3 * instructions_of(parts.before, bits, false) + again * instructions_of(parts.after, bits, false);
}

double backward_bytes(const BackwardProblem& problem, const TailShape& shape) {
  int64_t bytes = byte_size(problem.forward.input.dtype) + byte_size(problem.input_gradient.dtype);
  if (!shape.parts.mean) bytes += byte_size(problem.output_gradient.dtype);
  for (const int i : shape.parts.tensor_parameters()) {
    const auto index = static_cast<size_t>(i);
    bytes += byte_size(problem.forward.parameters[index].dtype);
    if (problem.wants_parameter(index)) bytes += byte_size(problem.parameter_gradients[index].dtype);
  }
  return static_cast<double>(shape.elements().value()) * static_cast<double>(bytes);
}

void clear_gradients(const BackwardProblem& problem, const BackwardArguments& arguments, Stream stream) {
  for (size_t i = 0; i < problem.parameter_gradients.size(); ++i) {
    const auto bytes = static_cast<size_t>(problem.parameter_gradients[i].byte_span());
    if (problem.wants_parameter(i) && bytes > 0) {
      clear(arguments.parameter_gradients[i], bytes, stream, problem.forward.device);
    }
  }
}

std::string describe_blocks(int64_t blocks, const Function& function) {
  std::ostringstream out;
  out << blocks << " of " << function.numbers().threads << " threads, " << function.cubin().registers
      << " registers";
  if (function.cubin().spilled_bytes > 0)
    out << " and " << function.cubin().spilled_bytes << " spilled bytes";
  if (function.numbers().shared_bytes > 0)
    out << ", " << function.numbers().shared_bytes << " bytes of shared memory";
  out << '\n';
  return out.str();
}

namespace {

// The rows for a tail inside another row, with their cost for 8 samples.
std::vector<Candidate> tail_candidates(const Problem& tail) {
  Shape sizes = tail.input.sizes;
  sizes[0] = 8;
  const Layout layout = tail.input.strides[1] == 1 && sizes[1] > 1 ? Layout::nhwc : Layout::nchw;
  Problem some(tail.block, sizes, tail.output.dtype, tail.device, layout);
  some.input.dtype = tail.input.dtype;
  some.numerics = tail.numerics;
  std::vector<Candidate> candidates;
  for (const Strategy* row : strategies(Device::Kind::cuda)) {
    if (!row->takes_tails || !row->refusal(tail).empty() || !row->refusal(some).empty()) continue;
    candidates.push_back({std::string(row->name), row->seconds(some, {}), ""});
  }
  return candidates;
}

}  // namespace

const Strategy* tail_row(const Problem& tail) {
  const std::vector<Candidate> candidates = tail_candidates(tail);
  if (candidates.empty()) return nullptr;
  return &find_row(strategies(Device::Kind::cuda), choose(candidates, "").strategy);
}

double tail_seconds_of_eight(const Problem& tail) {
  double least = 0;
  for (const Candidate& row : tail_candidates(tail))
    least = least == 0 ? row.seconds : std::min(least, row.seconds);
  return least;
}

BuiltTail build_tail(const Problem& tail) {
  std::vector<Candidate> candidates = tail_candidates(tail);
  BuiltTail built{choose(candidates, "").strategy, nullptr};
  built.kernel = build_chosen(strategies(Device::Kind::cuda), tail, PlanOptions{}, candidates, built.row);
  return built;
}

Layout layout_of_values(const Problem& problem) {
  const Shape sizes = problem.block.conv_output_shape(problem.input.sizes);
  const TensorSpec& like = problem.output.sizes == sizes ? problem.output : problem.input;
  return like.strides[1] == 1 && like.sizes[1] > 1 ? Layout::nhwc : Layout::nchw;
}

std::optional<Problem> tail_after_convolution(const Problem& problem) {
  const std::vector<Stage>& all = problem.block.stages();
  if (all.size() == 1) return std::nullopt;
  const Shape sizes = problem.block.conv_output_shape(problem.input.sizes);
  const Layout layout = layout_of_values(problem);
  Problem tail(Block(std::vector<Stage>(all.begin() + 1, all.end())), sizes, problem.input.dtype,
               problem.device, layout);
  tail.input = TensorSpec::dense(DType::f32, sizes, layout);
  tail.output = problem.output;
  tail.numerics = tail_numerics(problem);
  tail.parameters.assign(problem.parameters.end() - std::ssize(tail.parameters), problem.parameters.end());
  return tail;
}

Problem convolution_before_tail(const Problem& problem) {
  Problem convolution = problem;
  convolution.block = Block({problem.block.stages().front()});
  convolution.output = tail_after_convolution(problem)->input;
  convolution.parameters.resize(problem.block.conv()->bias ? 2 : 1);
  return convolution;
}

}  // namespace onepass::cuda
