// The gradients of a convolution alone.
#include "cpu/conv_backward.h"

#include <algorithm>
#include <sstream>

#include "block/adjoint.h"
#include "block/convert.h"
#include "cpu/chain.h"
#include "cpu/group_weight_gradient.h"
#include "cpu/weight_gradient.h"

namespace onepass::cpu {
namespace {

constexpr int64_t floats_per_double = 2;

// The forward problem whose output is the input's gradient.
Problem input_problem(const BackwardProblem& problem) {
  const Problem& forward = problem.forward;
  const Conv back = adjoint(*forward.block.conv(), forward.input.sizes, forward.output.sizes);
  Problem adjoint_problem(Block({back}), forward.output.sizes, forward.input.dtype, forward.device);
  adjoint_problem.input = problem.output_gradient;
  adjoint_problem.output = problem.input_gradient;
  adjoint_problem.parameters = {forward.parameters[0]};
  return adjoint_problem;
}

std::unique_ptr<const WeightSums> make_weight_sums(const BackwardProblem& problem, const Isa& isa,
                                                   Lanes lanes) {
  if (lanes == Lanes::groups) return std::make_unique<GroupWeightGradient>(problem, isa);
  return std::make_unique<WeightGradient>(problem, isa);
}

}  // namespace

// ------------------------------------------------------------------------------------ sums of channels

ChannelSums::ChannelSums(const TensorSpec& tensor, const Isa& isa)
    : isa_(isa),
      map_(tensor),
      orientation_(step_orientation(map_, tensor.sizes[1], isa.lanes)),
      batch_(tensor.sizes[0]),
      channels_(tensor.sizes[1]) {
  grid_ = make_grid(channels_, map_.pixels(), orientation_);
  const int64_t sums = batch_ * grid_.pixel_parts * channels_ * floats_per_double;
  worker_floats_at_ = round_up(sums, alignment_floats);
  // A panel, then centre and inverse (both zero), sums and products of its channels.
  const int64_t panel = std::max(stream_panel_floats, channels_);
  worker_floats_ = round_up(panel + 4 * (channels_ + Chain::slack()), alignment_floats);
}

double* ChannelSums::partial(float* workspace, int64_t block) const {
  return reinterpret_cast<double*>(workspace) + block * channels_;
}

void ChannelSums::run(const void* tensor, DType dtype, void* sums, float* workspace,
                      Executor& executor) const {
  const int64_t vector_floats = channels_ + Chain::slack();
  const int64_t tasks = grid_.count();
  executor.for_each(batch_ * tasks, [&](int64_t index, int worker) {
    float* panel = workspace + worker_floats_at_ + worker * worker_floats_;
    float* zeros = panel + worker_floats_ - 4 * vector_floats;
    std::fill_n(zeros, 4 * vector_floats, 0.0f);
    const int64_t sample = index / tasks;
    const int64_t task = index % tasks;
    const Range channels = grid_.channel_range(task);
    const Range pixels = grid_.pixel_range(task);
    double* to = partial(workspace, sample * grid_.pixel_parts + task % grid_.pixel_parts);
    std::fill(to + channels.begin, to + channels.end, 0.0);
    const PanelExtent extent(orientation_, channels.size(), pixels.size(), stream_panel_floats);
    for (int64_t c = channels.begin; c < channels.end; c += extent.channels) {
      for (int64_t p = pixels.begin; p < pixels.end; p += extent.pixels) {
        const Region region{sample,
                            {c, std::min(channels.end, c + extent.channels)},
                            {p, std::min(pixels.end, p + extent.pixels)}};
        const PanelView view = panel_view(isa_, map_, tensor, region, orientation_, panel);
        NormGradientArguments n;
        n.x = n.gradient = view.data;
        n.x_stride = n.gradient_stride = view.stride;
        n.rows = region.rows(orientation_);
        n.cols = region.cols(orientation_);
        n.centre = n.inverse = zeros;
        n.sums = zeros + 2 * vector_floats;
        n.products = zeros + 3 * vector_floats;
        isa_.norm_sums[static_cast<int>(orientation_)](n);
        for (int64_t i = 0; i < region.channels.size(); ++i) to[c + i] += n.sums[i];
      }
    }
  });
  const int64_t blocks = batch_ * grid_.pixel_parts;
  for (int64_t c = 0; c < channels_; ++c) {
    double total = 0;
    for (int64_t block = 0; block < blocks; ++block) total += partial(workspace, block)[c];
    store_element(dtype, total, static_cast<char*>(sums) + c * byte_size(dtype));
  }
}

// ------------------------------------------------------------------------------------ the convolution

ConvBackward::ConvBackward(const BackwardProblem& problem, const Isa& isa, Lanes lanes) : isa_(isa) {
  const Conv& conv = *problem.forward.block.conv();
  transposed_ = conv.transposed;
  int64_t floats = 0;
  if (problem.wants_parameter(0)) {
    weight_ = make_weight_sums(problem, isa, lanes);
    floats = weight_->workspace_floats();
  }
  if (conv.bias && problem.wants_parameter(1)) {
    bias_dtype_ = problem.parameter_gradients[1].dtype;
    bias_.emplace(problem.output_gradient, isa);
    floats =
        std::max(floats, bias_->workspace_floats() + problem.forward.device.threads * bias_->worker_floats());
  }
  workspace_bytes_ = static_cast<size_t>(floats) * sizeof(float);
  if (problem.wants_input()) {
    input_.emplace(plan(input_problem(problem), {"", isa.name}));
    workspace_bytes_ = std::max(workspace_bytes_, input_->workspace_bytes());
  }
}

std::string ConvBackward::refusal(const BackwardProblem& problem, Lanes lanes) {
  const Conv& conv = *problem.forward.block.conv();
  std::string reason = problem.wants_input() ? adjoint_refusal(conv) : "";
  if (!reason.empty()) return "no convolution gives the input's gradient: " + reason;
  if (lanes == Lanes::groups) {
    return problem.wants_parameter(0) ? GroupWeightGradient::refusal(problem)
                                      : "no weight gradient is wanted";
  }
  return problem.wants_parameter(0) ? WeightGradient::refusal(problem) : "";
}

std::string ConvBackward::describe() const {
  std::ostringstream out;
  out << "lanes: channels (" << isa_.name << ", " << isa_.lanes << ")\n";
  if (input_) {
    out << "input gradient: " << input_->problem().block.text() << " by " << input_->strategy() << '\n';
  }
  if (weight_) out << weight_->describe();
  if (bias_) out << "bias gradient: sums over the output's gradient\n";
  out << "saved by forward: nothing\n";
  out << "workspace: " << workspace_bytes() << " bytes\n";
  return out.str();
}

void ConvBackward::run(const BackwardArguments& arguments, void* workspace, Executor& executor) const {
  auto* floats = static_cast<float*>(workspace);
  if (input_) {
    input_->run({arguments.output_gradient, arguments.input_gradient, {arguments.parameters[0]}}, workspace,
                executor);
  }
  if (weight_) {
    const void* coarse = transposed_ ? arguments.input : arguments.output_gradient;
    const void* fine = transposed_ ? arguments.output_gradient : arguments.input;
    weight_->run(coarse, fine, arguments.parameter_gradients[0], floats, executor);
  }
  if (bias_) {
    bias_->run(arguments.output_gradient, bias_dtype_, arguments.parameter_gradients[1], floats, executor);
  }
}

}  // namespace onepass::cpu
