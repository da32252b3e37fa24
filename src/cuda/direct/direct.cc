// The row "direct": every block on a GPU, with any strides. A plain convolution, or a copy where there is
// none, writes a dense f32 workspace. A tail kernel runs on it, and a last copy writes an output of other
// strides. It is the fallback: correct for everything, fast for nothing.
#include <algorithm>
#include <optional>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "cuda/tail/tail.h"
#include "direct/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

// One launch of the kernel in direct.cuh: a convolution, or a copy where there is none.
class DirectStep {
 public:
  DirectStep(const Conv* conv, const TensorSpec& input, const TensorSpec& output, const TensorSpec* weight,
             const TensorSpec* bias, const Device& device, Precision precision = Precision::f32)
      : batch_(Number::batch(input.sizes[0])),
        elements_(batch_ * element_count({output.sizes.begin() + 1, output.sizes.end()})),
        function_(source(conv, input, output, weight, bias, precision), device, launch_numbers(elements_)) {}

  void launch(const void* input, void* output, const void* weight, const void* bias, Stream stream) const {
    if (elements_ == 0) return;
    DirectParameters p;
    p.input = input;
    p.output = output;
    p.weight = weight;
    p.bias = bias;
    p.batch = batch_;
    p.launch(function_, stream);
  }

  std::string describe() const { return describe_blocks(function_.numbers().blocks, function_); }

 private:
  static constexpr int64_t threads = 256;

  static Launch launch_numbers(const Number& elements) {
    constexpr int64_t most_blocks = 1 << 20;
    return {clamp(divide_up(elements, threads), 1, most_blocks), static_cast<uint32_t>(threads), 1, 0};
  }

  // A function of the dimension: `values` by index, `otherwise` beyond.
  static std::string table(const char* name, const std::vector<int64_t>& values, int64_t otherwise) {
    std::ostringstream out;
    out << "  static constexpr __device__ int64 " << name << "(int d) { return ";
    for (size_t d = 0; d < values.size(); ++d) out << "d == " << d << " ? " << values[d] << "ll : ";
    out << otherwise << "ll; }\n";
    return out.str();
  }

  // Spatial numbers stand at the end: a block of rank 1 has two neutral dimensions before its own.
  static std::vector<int64_t> spatial(const std::vector<int64_t>& values, size_t first, int64_t neutral) {
    std::vector<int64_t> list(values.begin() + static_cast<std::ptrdiff_t>(first), values.end());
    list.insert(list.begin(), 3 - list.size(), neutral);
    return list;
  }

  static std::vector<int64_t> spatial(const Extents& values, int rank, int64_t neutral) {
    return spatial(std::vector<int64_t>(values.begin(), values.begin() + rank), 0, neutral);
  }

  static std::vector<int64_t> strides(const TensorSpec& spec) {
    std::vector<int64_t> list{spec.strides[0], spec.strides[1]};
    const std::vector<int64_t> inner = spatial(spec.strides, 2, 0);
    list.insert(list.end(), inner.begin(), inner.end());
    return list;
  }

  static Source source(const Conv* conv, const TensorSpec& input, const TensorSpec& output,
                       const TensorSpec* weight, const TensorSpec* bias, Precision precision) {
    const Conv none{.rank = static_cast<int>(input.sizes.size()) - 2};
    const Conv& c = conv ? *conv : none;
    std::ostringstream out;
    out << "#include \"direct/direct.cuh\"\nnamespace onepass {\nstruct Convolution {\n"
        << "  using Input = " << name(input.dtype) << ";\n  using Output = " << name(output.dtype) << ";\n"
        << "  using Weight = " << name(weight ? weight->dtype : DType::f32) << ";\n"
        << "  using Bias = " << name(bias ? bias->dtype : DType::f32) << ";\n"
        << Constants("int64")
               .flag("convolves", conv != nullptr)
               .flag("transposed", c.transposed)
               .flag("has_bias", bias != nullptr)
               .flag("rounds_to_tf32", precision == Precision::tf32 || precision == Precision::tf32_away)
               .flag("ties_away", precision == Precision::tf32_away)
               .add("output_channels", output.sizes[1])
               .add("group_inputs", c.in_channels / c.groups)
               .add("group_outputs", c.out_channels / c.groups)
               .add("bias_stride", bias ? bias->strides[0] : 0)
               .text()
        << table("kernel", spatial(c.kernel, c.rank, 1), 1)
        << table("stride", spatial(c.stride, c.rank, 1), 1)
        << table("padding", spatial(c.padding_before, c.rank, 0), 0)
        << table("dilation", spatial(c.dilation, c.rank, 1), 1)
        << table("input_size", spatial(input.sizes, 2, 1), 1)
        << table("output_size", spatial(output.sizes, 2, 1), 1) << table("input_stride", strides(input), 0)
        << table("output_stride", strides(output), 0)
        << table("weight_stride", weight ? strides(*weight) : std::vector<int64_t>{}, 0)
        << "};\n}  // namespace onepass\n"
        << "extern \"C\" __global__ void onepass_direct(const __grid_constant__ onepass::DirectParameters p) "
           "{\n"
        << "  onepass::Direct<onepass::Convolution>{p}.run();\n}\n";
    return {"onepass_direct", out.str()};
  }

  Number batch_;
  Number elements_;
  Function function_;
};

// The block without its convolution, from and to dense planar tensors.
Problem tail_problem(const Problem& problem, const TensorSpec& input, const TensorSpec& output) {
  std::vector<Stage> stages = problem.block.stages();
  if (problem.block.conv() != nullptr) stages.erase(stages.begin());
  Problem tail(Block(std::move(stages)), input.sizes, DType::f32, problem.device);
  const size_t conv_parameters = problem.parameters.size() - tail.parameters.size();
  tail.input = input;
  tail.output = output;
  tail.numerics = tail_numerics(problem);
  tail.parameters.assign(problem.parameters.begin() + static_cast<std::ptrdiff_t>(conv_parameters),
                         problem.parameters.end());
  return tail;
}

bool has_tail(const Block& block) { return block.stages().size() > (block.conv() ? 1u : 0u); }

class DirectKernel final : public Kernel {
 public:
  explicit DirectKernel(const Problem& problem) : problem_(problem) {
    const Conv* conv = problem.block.conv();
    conv_parameters_ = conv ? 1 + (conv->bias ? 1u : 0u) : 0;
    const TensorSpec* weight = conv ? &problem.parameters[0] : nullptr;
    const TensorSpec* bias = conv && conv->bias ? &problem.parameters[1] : nullptr;
    if (!has_tail(problem.block)) {
      first_.emplace(conv, problem.input, problem.output, weight, bias, problem.device, problem.precision);
      return;
    }
    const TensorSpec middle =
        TensorSpec::dense(DType::f32, problem.block.conv_output_shape(problem.input.sizes));
    first_.emplace(conv, problem.input, middle, weight, bias, problem.device, problem.precision);
    middle_ = regions_.add(middle.byte_span());
    plan_tail(middle);
  }

  Accuracy accuracy() const override { return tail_ ? tail_->kernel->accuracy() : Accuracy{}; }
  size_t workspace_bytes() const override { return static_cast<size_t>(regions_.total().value()); }

  std::string describe() const override {
    std::ostringstream out;
    out << (problem_.block.conv() ? "convolution" : "copy") << ": one thread an output element\n"
        << "blocks: " << first_->describe();
    if (tail_) out << "then: " << tail_->row << " on a dense f32 copy\n";
    if (!copies_.empty()) out << "copies: " << copies_.size() << " tensors that lie in another order\n";
    if (last_) out << "last: a copy to where the output lies\n";
    out << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_rounding(problem_) + (tail_ ? tail_->kernel->numerics() : Notes{});
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    const auto parameter = [&](size_t i) { return i < conv_parameters_ ? arguments.parameters[i] : nullptr; };
    void* first = tail_ ? at(workspace, middle_) : arguments.output;
    first_->launch(arguments.input, first, parameter(0), parameter(1), stream);
    if (!tail_) return;
    Arguments tail{first, last_ ? at(workspace, result_) : arguments.output, {}, arguments.statistics};
    tail.parameters.assign(arguments.parameters.begin() + static_cast<std::ptrdiff_t>(conv_parameters_),
                           arguments.parameters.end());
    for (const Copy& copy : copies_) {
      copy.step.launch(tail.parameters[copy.parameter], at(workspace, copy.offset), nullptr, nullptr, stream);
      tail.parameters[copy.parameter] = at(workspace, copy.offset);
    }
    tail_->kernel->launch(tail, at(workspace, tail_workspace_), stream);
    if (last_) last_->launch(at(workspace, result_), arguments.output, nullptr, nullptr, stream);
  }

 private:
  struct Copy {
    size_t parameter;
    Region offset;
    DirectStep step;
  };

  void plan_tail(const TensorSpec& middle) {
    const TensorSpec dense = TensorSpec::dense(problem_.output.dtype, problem_.output.sizes);
    const bool in_place_order = dense.strides == problem_.output.strides;
    Problem tail = tail_problem(problem_, middle, dense);
    for (const int index : TailParts(tail.block, middle.sizes).tensor_parameters()) {
      const auto i = static_cast<size_t>(index);
      const TensorSpec& given = tail.parameters[i];
      const TensorSpec wanted = TensorSpec::dense(given.dtype, given.sizes);
      if (given.strides == wanted.strides) continue;
      copies_.push_back({i, regions_.add(wanted.byte_span()),
                         DirectStep(nullptr, given, wanted, nullptr, nullptr, problem_.device)});
      tail.parameters[i] = wanted;
    }
    tail_ = build_tail(tail);
    tail_workspace_ = regions_.add(static_cast<int64_t>(tail_->kernel->workspace_bytes()));
    if (in_place_order) return;
    result_ = regions_.add(dense.byte_span());
    last_.emplace(nullptr, dense, problem_.output, nullptr, nullptr, problem_.device);
  }

  Problem problem_;
  size_t conv_parameters_ = 0;
  Regions regions_;
  std::optional<DirectStep> first_;
  std::vector<Copy> copies_;
  std::optional<BuiltTail> tail_;
  std::optional<DirectStep> last_;
  Region middle_, tail_workspace_, result_;
};

std::string refusal(const Problem& problem) {
  const auto is_f64 = [](const TensorSpec& spec) { return spec.dtype == DType::f64; };
  const bool f64 = is_f64(problem.input) || is_f64(problem.output) ||
                   std::any_of(problem.parameters.begin(), problem.parameters.end(), is_f64);
  return f64 ? "f64 is not computed on the GPU" : "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const Gpu& gpu = gpu_of(problem.device);
  const auto elements =
      static_cast<double>(element_count(problem.block.conv_output_shape(problem.input.sizes)));
  double terms = 0;  // of a sum; taps that meet no input are looked at too
  if (const Conv* conv = problem.block.conv()) {
    const int64_t inputs = conv->in_channels / conv->groups;
    terms = static_cast<double>(inputs);
    for (size_t d = 0; d < static_cast<size_t>(conv->rank); ++d)
      terms *= static_cast<double>(conv->kernel[d]);
  }
  // With channels last a thread goes through a slab alone: the tails of s60 and s19 took 5.4 and 16 ms, 6 and
  // 8 times as long as they move.
  const double apart = problem.block.norm() != nullptr && problem.input.strides[1] == 1 ? 8 : 1;
  // A term with its two loads and its address takes ten instructions' time; tensors move four times.
  // Launches, and as much again: a row that is made for the block comes before this one.
  // A thread waits for loads of long sums: those of 40,960 terms took 3.2 ms for 0.57, of 160,000 8.5
  // for 2.0. With channels last neighbouring threads meet a sector each: 512 terms 1303 us for 93, 320 terms
  // 1552 for 254.
  const bool interleaved = problem.input.strides.size() > 1 && problem.input.strides[1] == 1;
  const double waits = terms < 128 ? 1 : interleaved ? 8 : terms < 4096 ? 1.5 : 4;
  return 4e-5 + 20 * waits * terms * elements / gpu.flops + 16 * apart * elements / gpu.bytes_per_second;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_direct{
    "direct", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::DirectKernel>(problem);
    }};

}  // namespace onepass
