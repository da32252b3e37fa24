// The row "gemm_backward": the gradients of a wide convolution of stride 1 with nothing after it, as matrix
// products on Hopper's tensor cores (gemm/backward/gradients.cuh). Both tensors are packed first, as 16-bit
// elements in the order in which products read them.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>

#include "cuda/gemm/backward/sources.h"
#include "cuda/notes.h"
#include "cuda/row_numbers.h"
#include "cuda/runtime/parameters.h"
#include "gemm/backward/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

// One tensor's packing: a launch, or three for f32 elements, whose scale has to be found.
class PackStep {
 public:
  PackStep(const Source& source, const TensorSpec& spec, const GradientNumbers& numbers, const Device& device,
           const Number& batch, const Number& length)
      : numbers_(spec, numbers),
        scales_(spec.dtype == DType::f32),
        batch_(batch),
        length_(length),
        function_(source, device, Launch{1, static_cast<uint32_t>(PackNumbers::threads)}) {}

  // `sums`: of channels, null where none are wanted.
  void launch(const void* tensor, void* packed, void* largest, void* sums, Stream stream) const {
    constexpr int64_t again_blocks = 512;  // mostly they find nothing to do
    const Number parts = numbers_.parts(length_);
    const Number blocks = parts * (numbers_.octets / numbers_.lanes);
    GemmPackTensorParameters p;
    p.tensor = tensor;
    p.packed = packed;
    p.largest = largest;
    p.sums = sums;
    p.batch = batch_;
    p.length = length_;
    p.parts = parts;
    const auto launch_pass = [&](GemmPackPass pass, const Number& of_pass) {
      p.pass = static_cast<int64_t>(pass);
      p.launch(function_, stream, of_pass);
    };
    if (scales_) launch_pass(pack_probe, Number(PackNumbers::probes / 64));
    launch_pass(pack_all, blocks);
    if (scales_) launch_pass(pack_again, minimum(blocks, again_blocks));
  }

 private:
  PackNumbers numbers_;
  bool scales_;
  Number batch_, length_;
  Function function_;
};

class GemmBackward final : public BackwardKernel {
 public:
  GemmBackward(const BackwardProblem& problem, std::shared_ptr<const GradientNumbers> numbers)
      : problem_(problem), batch_(ThinShape(problem.forward).samples), numbers_(std::move(numbers)) {
    if (!wants_weight() && !wants_bias() && !problem.wants_input()) return;
    const GradientNumbers& n = *numbers_;
    const GradientSources sources(problem_, n);
    const Device& device = problem.forward.device;
    const Number positions = batch_ * n.sample;
    length_ = (n.margin + n.positions_behind() + round_up(positions, n.tile_positions)).called("length");
    chunks_ = divide_up(positions, n.chunk);
    tiles_ = divide_up(positions, n.tile_positions);
    bias_parts_ = PackNumbers(problem.output_gradient, n).parts(length_).called("bias_parts");
    splits_ = n.splits(chunks_, gpu_of(device)).called("splits");
    compile_all(sources);
    pack_gradient_.emplace(sources.pack_gradient(), problem.output_gradient, n, device, batch_, length_);
    largest_ = regions_.add(4 * 4);
    packed_gradient_ = regions_.add(length_ * (n.octets(n.out_channels) * 16));
    bias_sums_ = regions_.add(when(wants_bias(), bias_parts_ * (n.octets(n.out_channels) * 8 * 4)));
    if (wants_weight()) {
      pack_input_.emplace(sources.pack_input(), problem.forward.input, n, device, batch_, length_);
      weight_.emplace(sources.weight_gradient(), device,
                      Launch{1, static_cast<uint32_t>(n.weight_threads), 1,
                             static_cast<uint32_t>(n.weight_shared_bytes(n.stages))});
      weight_blocks_ = minimum(splits_ * n.weight_tiles(), weight_->resident_clusters());
    }
    if (wants_weight() || wants_bias()) {
      sum_.emplace(sources.weight_sum(), device,
                   Launch{1, static_cast<uint32_t>(GradientSources::sum_threads)});
      sum_blocks_ = sources.weight_sum_blocks() + n.conv_groups * n.out_channels;
    }
    packed_input_ =
        regions_.add(when(wants_weight() && !packs_into_gradient(), length_ * (n.octets(n.channels) * 16)));
    parts_ = regions_.add(when(wants_weight(), splits_ * (n.weight_tiles() * n.tile_sums() * 4)));
    if (problem.wants_input()) {
      pack_adjoint_.emplace(
          sources.pack_adjoint(), device,
          Launch{n.channel_tiles() * 64, static_cast<uint32_t>(GradientSources::sum_threads)});
      input_.emplace(sources.input_gradient(), device,
                     Launch{1, static_cast<uint32_t>(n.input_threads), 1,
                            static_cast<uint32_t>(n.input_shared_bytes(n.input_stages))});
      input_blocks_ = minimum(tiles_ * n.channel_tiles(), input_->resident_clusters());
    }
    packed_weights_ = regions_.add(when(problem.wants_input(), n.packed_weight_bytes()));
    scales_ = regions_.add(when(problem.wants_input(), n.channel_tiles() * 64 * 4));
  }

  size_t workspace_bytes() const override { return static_cast<size_t>(regions_.total().value()); }
  bool reads_statistics() const override { return false; }

  std::string describe() const override {
    if (!pack_gradient_) return "passes: none, no gradient is wanted\n";
    const GradientNumbers& n = *numbers_;
    std::ostringstream out;
    out << "operands: " << (scales() ? "rounded to f16, as to tf32, and scaled" : "as they are")
        << ", packed first: " << length_.value() << " positions"
        << (n.conv_groups == 1 ? "" : ", in each of " + std::to_string(n.conv_groups) + " groups") << '\n';
    if (weight_) {
      out << "weights' gradient: tiles of 64 x " << n.columns << " channels, " << n.block_taps() << " taps, "
          << n.weight_tiles() << " of them in " << splits_.value() << " parts; " << n.stages << " stages of "
          << n.chunk << " positions\n"
          << "blocks: " << describe_blocks(weight_blocks_, *weight_);
    }
    if (input_) {
      out << "input's gradient: tiles of 64 channels, " << n.tile_positions << " positions, "
          << n.tap_groups() << (n.tap_groups() == 1 ? " window" : " windows") << " of " << n.window
          << " positions, " << n.input_stages << " stages of 16 channels, weights "
          << (n.weights_resident ? "all in shared memory\n" : "with them\n")
          << "blocks: " << describe_blocks(input_blocks_, *input_);
    }
    out << "saved by forward: the input\n"
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(pack_gradient_ && scales(), note::operands_rounded);
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    if (!pack_gradient_) return;
    if (batch_ == 0) {
      clear_gradients(problem_, arguments, stream);
      return;
    }
    clear(at(workspace, largest_), 4 * 4, stream, problem_.forward.device);
    pack_gradient_->launch(arguments.output_gradient, at(workspace, packed_gradient_),
                           gradient_largest(workspace), at(workspace, bias_sums_), stream);
    if (weight_) launch_weight(arguments, workspace, stream);
    if (sum_) launch_sum(arguments, workspace, stream);
    if (input_) launch_input(arguments, workspace, stream);
  }

 private:
  bool scales() const { return problem_.forward.input.dtype == DType::f32; }
  bool wants_weight() const { return problem_.wants_parameter(0); }
  bool wants_bias() const { return problem_.forward.block.conv()->bias && problem_.wants_parameter(1); }

  // The packed input lies where its gradient is written afterwards: packed f32 takes half as much. Checked
  // for one sample, true for all.
  bool packs_into_gradient() const {
    if (!wants_weight() || !problem_.wants_input()) return false;
    const GradientNumbers& n = *numbers_;
    const int64_t positions = n.margin + n.positions_behind() + n.tile_positions + n.sample;
    return positions * n.octets(n.channels) * 16 + 16 <=
           TensorGeometry(problem_.input_gradient).elements() * byte_size(problem_.input_gradient.dtype);
  }
  static void* align_to_vector(void* pointer) {
    const uintptr_t behind = reinterpret_cast<uintptr_t>(pointer) % 16;
    return static_cast<unsigned char*>(pointer) + (16 - behind) % 16;
  }

  // Two words each: gradients::Scale.
  void* gradient_largest(void* workspace) const { return at(workspace, Region{largest_.begin, 8}); }
  void* input_largest(void* workspace) const { return at(workspace, Region{largest_.begin + 8, 8}); }

  void launch_weight(const BackwardArguments& arguments, void* workspace, Stream stream) const {
    void* const gradient = at(workspace, packed_gradient_);
    void* const input =
        packs_into_gradient() ? align_to_vector(arguments.input_gradient) : at(workspace, packed_input_);
    pack_input_->launch(arguments.input, input, input_largest(workspace), nullptr, stream);
    GemmWeightGradientParameters p;
    p.u = numbers_->transposed ? input : gradient;
    p.v = numbers_->transposed ? gradient : input;
    p.parts = at(workspace, parts_);
    p.length = length_;
    p.chunks = chunks_;
    p.splits = splits_;
    p.launch(*weight_, stream, weight_blocks_);
  }

  void launch_sum(const BackwardArguments& arguments, void* workspace, Stream stream) const {
    GemmWeightSumParameters p;
    p.parts = at(workspace, parts_);
    p.sums = at(workspace, bias_sums_);
    p.gradient_largest = gradient_largest(workspace);
    p.input_largest = input_largest(workspace);
    p.weight = wants_weight() ? arguments.parameter_gradients[0] : nullptr;
    p.bias = wants_bias() ? arguments.parameter_gradients[1] : nullptr;
    p.splits = splits_;
    p.sum_parts = bias_parts_;
    p.launch(*sum_, stream, sum_blocks_);
  }

  void launch_input(const BackwardArguments& arguments, void* workspace, Stream stream) const {
    GemmPackAdjointParameters pack;
    pack.weights = arguments.parameters[0];
    pack.packed = at(workspace, packed_weights_);
    pack.scales = at(workspace, scales_);
    pack.launch(*pack_adjoint_, stream);
    GemmInputGradientParameters p;
    p.packed = at(workspace, packed_gradient_);
    p.weights = at(workspace, packed_weights_);
    p.scales = at(workspace, scales_);
    p.largest = gradient_largest(workspace);
    p.output = arguments.input_gradient;
    p.batch = batch_;
    p.length = length_;
    p.tiles = tiles_;
    p.launch(*input_, stream, input_blocks_);
  }

  // All kernels at once; each is found in the cache when its function is made.
  void compile_all(const GradientSources& sources) const {
    std::vector<Source> all{sources.pack_gradient()};
    if (wants_weight()) {
      all.push_back(sources.pack_input());
      all.push_back(sources.weight_gradient());
    }
    if (wants_weight() || wants_bias()) all.push_back(sources.weight_sum());
    if (problem_.wants_input()) {
      all.push_back(sources.pack_adjoint());
      all.push_back(sources.input_gradient());
    }
    compile(all, gpu_of(problem_.forward.device).architecture);
  }

  BackwardProblem problem_;
  Number batch_;
  std::shared_ptr<const GradientNumbers> numbers_;
  std::optional<PackStep> pack_gradient_, pack_input_;
  std::optional<Function> weight_, sum_, pack_adjoint_, input_;
  Number length_, chunks_, tiles_, bias_parts_, splits_ = 1;
  Number weight_blocks_ = 1, input_blocks_ = 1;
  int64_t sum_blocks_ = 1;
  Regions regions_;
  Region largest_, packed_gradient_, bias_sums_, packed_input_, parts_, packed_weights_, scales_;
};

bool is_dense(const TensorSpec& spec) {
  for (const Layout layout : {Layout::nchw, Layout::nhwc}) {
    const Shape strides = TensorSpec::dense(spec.dtype, spec.sizes, layout).strides;
    bool same = true;
    for (size_t d = 0; d < spec.sizes.size(); ++d)
      same = same && (spec.sizes[d] <= 1 || spec.strides[d] == strides[d]);
    if (same) return true;
  }
  return false;
}

std::shared_ptr<const BackwardKernel> build(const BackwardProblem& problem, const PlanOptions&) {
  return std::make_shared<const GemmBackward>(problem, numbers_of<GradientNumbers>(problem));
}

std::string convolution_refusal(const Conv& conv) {
  constexpr int64_t least_taps = 3;
  if (std::min(conv.in_channels, conv.out_channels) / conv.groups < least_wide_channels) {
    return "fewer than " + std::to_string(least_wide_channels) + " channels" +
           (conv.groups == 1 ? "" : " in a group");
  }
  int64_t taps = 1;
  for (size_t d = 0; d < static_cast<size_t>(conv.rank); ++d) {
    if (conv.stride[d] != 1) return "the convolution has a stride";
    if (conv.padding_before[d] != conv.padding_after[d]) return "the padding is uneven";
    if (conv.output_padding[d] != 0) return "the convolution has output padding";
    if (conv.padding_before[d] > conv.dilation[d] * (conv.kernel[d] - 1)) return "padding beyond the kernel";
    taps *= conv.kernel[d];
  }
  return taps < least_taps ? "a kernel of fewer than " + std::to_string(least_taps) + " taps" : "";
}

constexpr int64_t most_positions = int64_t{1} << 31;  // of a launch, and elements of a sample

std::string tensors_refusal(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  const DType type = forward.input.dtype;
  if (type == DType::f32 && forward.precision != Precision::tf32)
    return "strict f32: products of f16 are not as exact";
  std::vector<const TensorSpec*> large{&forward.input, &problem.output_gradient};
  if (problem.wants_input()) large.push_back(&problem.input_gradient);
  std::vector<const TensorSpec*> all = large;
  for (size_t i = 0; i < forward.parameters.size(); ++i) {
    all.push_back(&forward.parameters[i]);
    if (problem.wants_parameter(i)) all.push_back(&problem.parameter_gradients[i]);
  }
  for (const TensorSpec* spec : all) {
    if (spec->dtype != type) return "the tensors are not all of one type";
  }
  for (const TensorSpec* spec : large) {
    if (!is_dense(*spec)) return "a tensor of the input's or the output's size is not dense";
    if (TensorGeometry(*spec).elements() >= most_positions) return "a sample is too large";
  }
  return "";
}

std::string refusal(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  std::string reason = whole_block_refusal(forward);
  if (reason.empty()) reason = ties_refusal(forward);
  if (!reason.empty()) return reason;
  if (gpu_of(forward.device).architecture != "sm_90a") return "it needs wgmma, which sm_90a alone has";
  if (forward.block.stages().size() > 1) return "stages follow the convolution";
  reason = convolution_refusal(*forward.block.conv());
  if (reason.empty()) reason = tensors_refusal(problem);
  if (!reason.empty()) return reason;
  const auto numbers = numbers_of<GradientNumbers>(problem);
  if (!numbers->taps_in_order()) return "the kernel reaches beyond rows of the input";
  if (!numbers->fits()) return "the window of a tile is too large";
  if (numbers->sample * (forward.input.sizes[0] + 1) + 2 * numbers->margin >= most_positions)
    return "more than 2^31 positions";
  return "";
}

double seconds(const BackwardProblem& problem, const PlanOptions&) {
  const Problem& forward = problem.forward;
  const Gpu& gpu = gpu_of(forward.device);
  const auto numbers = numbers_of<GradientNumbers>(problem);
  const GradientNumbers& n = *numbers;
  const int64_t positions = n.sample * forward.input.sizes[0];
  const auto moved = [&](const TensorSpec& spec, int64_t channels) {
    return static_cast<double>(spec.byte_span()) +
           static_cast<double>(2 * positions * n.conv_groups * channels);
  };
  double bytes = moved(problem.output_gradient, n.out_channels);
  double clocks = 0;
  if (problem.wants_parameter(0)) {
    bytes += moved(forward.input, n.channels);
    clocks += n.weight_clocks(positions, gpu);
    const int64_t splits = n.splits(Number(divide_up(positions, n.chunk)), gpu);
    bytes += static_cast<double>((2 * splits + 1) * n.weight_tiles() * n.tile_sums() * 4);
  }
  if (problem.wants_input()) clocks += n.input_clocks(positions, gpu);
  const double clock = gpu.flops / 256 / gpu.multiprocessors;
  // Launches: packing f32 takes two more for each tensor.
  const double launches = forward.input.dtype == DType::f32 ? 8e-5 : 4.5e-5;
  return launches + 1.2 * bytes / gpu.bytes_per_second + clocks / clock;
}

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_gemm_backward{"gemm_backward", cuda::refusal, cuda::seconds, cuda::build};

}  // namespace onepass
