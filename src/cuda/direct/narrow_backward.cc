// The row "narrow_backward": the gradients of a convolution whose groups have few channels, with nothing
// after it, on CUDA cores (direct/narrow_backward.cuh). dx is the row "narrow" of the adjoint convolution.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>

#include "block/adjoint.h"
#include "cuda/direct/narrow_backward_numbers.h"
#include "cuda/direct/row_copy.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "direct/backward_parameters.cuh"

namespace onepass {

extern const Strategy cuda_narrow;

namespace cuda {
namespace {

constexpr int64_t most_channels = 64;  // of a group, of inputs and of outputs
constexpr int64_t most_taps_x = 48;

bool wants_weight(const BackwardProblem& problem) { return problem.wants_parameter(0); }
bool wants_bias(const BackwardProblem& problem) {
  return problem.forward.block.conv()->bias && problem.wants_parameter(1);
}

// dx as a convolution of dy.
Problem input_gradient_problem(const BackwardProblem& problem) {
  Problem other = problem.forward;
  other.block = Block(
      {adjoint(*problem.forward.block.conv(), problem.forward.input.sizes, problem.output_gradient.sizes)});
  other.input = problem.output_gradient;
  other.output = problem.input_gradient;
  other.parameters.resize(1);
  return other;
}

class NarrowBackward final : public BackwardKernel {
 public:
  explicit NarrowBackward(const BackwardProblem& problem)
      : problem_(problem), own_(weight_gradient_problem(problem)), shape_(own_) {
    const Device& device = problem.forward.device;
    const int64_t channels = own_channels();
    positions_ = (shape_.samples * shape_.spatial).called("positions");
    bias_positions_ = shape_.samples * spatial_elements(problem.output_gradient.sizes);
    if (wants_weight(problem)) {
      numbers_ = narrow_gradient_numbers(problem);
      const NarrowGradientNumbers& n = *numbers_;
      chunks_ = (shape_.samples * n.chunks_of_sample()).called("chunks");
      part_chunks_ = divide_up(chunks_, clamp(chunks_, 1, n.wanted_splits)).called("part_chunks");
      splits_ = divide_up(chunks_, maximum(1, part_chunks_)).called("splits");
      weight_.emplace(weight_source(), device,
                      Launch{maximum(1, splits_ * n.channel_tiles()), static_cast<uint32_t>(n.threads), 1,
                             static_cast<uint32_t>(n.shared_bytes())});
    }
    if (wants_bias(problem) && !sums_bias()) {
      const int64_t part_positions = Numbers::bias_threads / bias_lanes() * Numbers::bias_terms;
      bias_splits_ = divide_up(bias_positions_, part_positions).called("bias_splits");
      bias_.emplace(bias_source(), device,
                    Launch{maximum(1, bias_splits_ * divide_up(channels, bias_lanes())),
                           static_cast<uint32_t>(Numbers::bias_threads)});
    } else if (wants_bias(problem)) {
      bias_splits_ = splits_;
    }
    if (weight_ || wants_bias(problem)) {
      const int64_t sums = (weight_ ? weights_of(shape_) : 0) + (wants_bias(problem) ? channels : 0);
      sum_.emplace(sum_source(), device,
                   Launch{divide_up(sums, 32), static_cast<uint32_t>(Numbers::sum_threads)});
    }
    parts_ = regions_.add(when(weight_.has_value(), splits_ * (weights_of(shape_) * 4)));
    bias_parts_ = regions_.add(when(wants_bias(problem), bias_splits_ * (channels * 4)));
    if (problem.wants_input()) input_ = cuda_narrow.build(input_gradient_problem(problem), {});
  }

  size_t workspace_bytes() const override {
    return std::max(static_cast<size_t>(regions_.total().value()), input_ ? input_->workspace_bytes() : 0);
  }
  bool reads_statistics() const override { return false; }

  std::string describe() const override {
    if (!sum_ && !input_) return "passes: none, no gradient is wanted\n";
    std::ostringstream out;
    if (weight_) describe_weight(out);
    if (bias_) out << "bias's gradient: a pass of its own, " << bias_splits_.value() << " parts\n";
    if (input_) out << "input's gradient: narrow\n" << input_->describe();
    out << "saved by forward: the input\n"
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return sum_ || input_ ? notes_of_rounding(problem_.forward) : std::vector<std::string>{};
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    if (!sum_ && !input_) return;
    if (shape_.samples == 0) {
      clear_gradients(problem_, arguments, stream);
      return;
    }
    if (weight_) launch_weight(arguments, workspace, stream);
    if (bias_) launch_bias(arguments, workspace, stream);
    if (sum_) launch_sum(arguments, workspace, stream);
    if (!input_) return;
    Arguments of_input;
    of_input.input = arguments.output_gradient;
    of_input.output = arguments.input_gradient;
    of_input.parameters = {arguments.parameters[0]};
    input_->launch(of_input, workspace, stream);
  }

 private:
  using Numbers = NarrowGradientNumbers;

  bool transposed() const { return problem_.forward.block.conv()->transposed; }
  bool sums_bias() const { return numbers_ && numbers_->sums_bias; }
  int64_t own_channels() const { return problem_.output_gradient.sizes[1]; }
  const void* u(const BackwardArguments& a) const { return transposed() ? a.input : a.output_gradient; }
  const void* v(const BackwardArguments& a) const { return transposed() ? a.output_gradient : a.input; }

  // Threads that have neighbouring channels.
  int64_t bias_lanes() const {
    if (!lies_interleaved(problem_.output_gradient)) return 1;
    int64_t lanes = 1;
    while (lanes < 32 && lanes < own_channels()) lanes *= 2;
    return lanes;
  }

  void describe_weight(std::ostringstream& out) const {
    const Numbers& n = *numbers_;
    const auto box = n.box();
    out << "weights' gradient: " << weights_of(shape_) << " sums, a thread has " << n.u << " x " << n.v
        << " channels and " << n.taps_z << "x" << n.taps_y << "x" << shape_.axes[2].kernel << " taps of "
        << n.step_rows << "x" << n.positions << " positions\n"
        << "tile: " << n.groups << " groups, " << n.u_box.channels << " x " << n.v_box.channels
        << " channels each, a box of " << box[0] << "x" << box[1] << "x" << box[2] << " positions, "
        << splits_.value() << " parts of " << part_chunks_.value() << " boxes\n"
        << "window: " << n.v_box.size[0] << "x" << n.v_box.size[1] << "x" << n.v_box.size[2]
        << ", vectors of " << n.u_box.vector << " and " << n.v_box.vector << " elements\n"
        << "blocks: " << describe_blocks(weight_->numbers().blocks, *weight_);
  }

  std::string structs() const { return whole_tail_source(own_) + thin_source(own_, shape_); }

  static std::string text(const std::string& structs) {
    return "#include \"direct/narrow_backward.cuh\"\n" + structs;
  }

  Source weight_source() const {
    return agent_kernel("onepass_narrow_weight_gradient", text(structs() + numbers_->source(shape_)),
                        "NarrowWeightGradient<onepass::Convolution, onepass::Tail, Numbers, OutputNumbers>",
                        std::to_string(numbers_->threads) + ", " + std::to_string(numbers_->blocks_wanted),
                        SharedAs::bytes);
  }

  Source bias_source() const {
    const std::string numbers = Constants()
                                    .add("bias_threads", Numbers::bias_threads)
                                    .add("bias_lanes", bias_lanes(), "bias_terms", Numbers::bias_terms)
                                    .numbers();
    const std::string side =
        transposed() ? "onepass::Convolution" : "onepass::NarrowOutputSide<onepass::Convolution>";
    return agent_kernel("onepass_narrow_bias_gradient", text(structs() + numbers),
                        "NarrowBiasGradient<" + side + ", onepass::Tail, Numbers>",
                        std::to_string(Numbers::bias_threads), SharedAs::none);
  }

  Source sum_source() const {
    const std::string numbers = Constants()
                                    .add("sum_threads", Numbers::sum_threads)
                                    .add("weights", weights_of(shape_), "bias_channels", own_channels())
                                    .flag("wants_weight", wants_weight(problem_))
                                    .flag("wants_bias", wants_bias(problem_))
                                    .numbers();
    return agent_kernel("onepass_narrow_gradient_sum", text(structs() + numbers),
                        "NarrowGradientSum<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(Numbers::sum_threads), SharedAs::none);
  }

  void launch_weight(const BackwardArguments& arguments, void* workspace, Stream stream) const {
    NarrowWeightGradientParameters p;
    p.u = u(arguments);
    p.v = v(arguments);
    p.parts = at(workspace, parts_);
    p.bias_parts = at(workspace, bias_parts_);
    p.chunks = chunks_;
    p.part_chunks = part_chunks_;
    p.launch(*weight_, stream);
  }

  void launch_bias(const BackwardArguments& arguments, void* workspace, Stream stream) const {
    NarrowBiasGradientParameters p;
    p.gradient = arguments.output_gradient;
    p.bias_parts = at(workspace, bias_parts_);
    p.positions = bias_positions_;
    p.launch(*bias_, stream);
  }

  void launch_sum(const BackwardArguments& arguments, void* workspace, Stream stream) const {
    NarrowGradientSumParameters p;
    p.u = u(arguments);
    p.v = v(arguments);
    p.parts = at(workspace, parts_);
    p.bias_parts = at(workspace, bias_parts_);
    p.weight = wants_weight(problem_) ? arguments.parameter_gradients[0] : nullptr;
    p.bias = wants_bias(problem_) ? arguments.parameter_gradients[1] : nullptr;
    p.splits = splits_;
    p.bias_splits = bias_splits_;
    p.positions = positions_;
    p.launch(*sum_, stream);
  }

  BackwardProblem problem_;
  Problem own_;  // what the sums are taken over
  ThinShape shape_;
  std::shared_ptr<const Numbers> numbers_;
  std::optional<Function> weight_, bias_, sum_;
  Number positions_, bias_positions_, chunks_, part_chunks_, splits_, bias_splits_;
  std::shared_ptr<const Kernel> input_;
  Regions regions_;
  Region parts_, bias_parts_;
};

std::shared_ptr<const BackwardKernel> build(const BackwardProblem& problem, const PlanOptions&) {
  return std::make_shared<const NarrowBackward>(problem);
}

std::string types_refusal(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  const DType type = forward.input.dtype;
  bool is_one = problem.output_gradient.dtype == type;
  is_one &= !problem.wants_input() || problem.input_gradient.dtype == type;
  for (size_t i = 0; i < forward.parameters.size(); ++i) {
    is_one &= forward.parameters[i].dtype == type;
    is_one &= !problem.wants_parameter(i) || problem.parameter_gradients[i].dtype == type;
  }
  return is_one ? "" : "the tensors are not all of one type";
}

std::string refusal(const BackwardProblem& problem) {
  constexpr int64_t most = int64_t{1} << 31;
  const Problem& forward = problem.forward;
  std::string reason = whole_block_refusal(forward);
  if (!reason.empty()) return reason;
  if (forward.block.stages().size() > 1) return "stages follow the convolution";
  const Conv& conv = *forward.block.conv();
  if (std::min(conv.in_channels, conv.out_channels) / conv.groups > most_channels)
    return "a group of more than " + std::to_string(most_channels) + " input and output channels";
  reason = types_refusal(problem);
  if (reason.empty() && (problem.wants_input() || conv.transposed)) reason = adjoint_refusal(conv);
  if (reason.empty() && problem.wants_input()) reason = cuda_narrow.refusal(input_gradient_problem(problem));
  if (!reason.empty()) return reason;
  const Problem own = weight_gradient_problem(problem);
  if (conv.transposed) reason = whole_block_refusal(own);
  if (!reason.empty()) return reason;
  const ThinShape shape(own);
  if (std::max(element_count(forward.input.sizes), element_count(problem.output_gradient.sizes)) /
          std::max<int64_t>(1, std::min(conv.in_channels, conv.out_channels)) >=
      most)
    return "2^31 positions or more";
  if (!wants_weight(problem)) return "";
  if (shape.axes[2].kernel > most_taps_x)
    return "a kernel of more than " + std::to_string(most_taps_x) + " taps along x";
  if (narrow_gradient_numbers(problem)->threads == 0) return "the window of a tile is too large";
  return "";
}

double seconds(const BackwardProblem& problem, const PlanOptions&) {
  const Gpu& gpu = gpu_of(problem.forward.device);
  double seconds = 3e-6;
  if (wants_weight(problem)) seconds += narrow_gradient_numbers(problem)->seconds;
  if (wants_bias(problem) && !(wants_weight(problem) && narrow_gradient_numbers(problem)->sums_bias)) {
    constexpr double share = 0.22;  // of memory's rate, measured: elements are loaded one by one
    const TensorSpec& spec = problem.output_gradient;
    seconds += 1e-5 + static_cast<double>(element_count(spec.sizes) * byte_size(spec.dtype)) /
                          (share * gpu.bytes_per_second);
  }
  // 32 drawn adjoints took 0.8 to 2.0 times as long as predicted, 1.1 on average.
  if (problem.wants_input()) seconds += 1.1 * cuda_narrow.seconds(input_gradient_problem(problem), {});
  return seconds;
}

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_narrow_backward{"narrow_backward", cuda::refusal, cuda::seconds,
                                                   cuda::build};

}  // namespace onepass
