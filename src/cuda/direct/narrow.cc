// The row "narrow": a convolution whose groups have few inputs, on CUDA cores, with the chain after it. Where
// a norm or a mean follows, the convolution's output waits in f32 and a tail runs on it.
#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "cuda/direct/narrow_numbers.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "direct/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t most_inputs = 64;  // of a group

class NarrowKernel final : public Kernel {
 public:
  explicit NarrowKernel(const Problem& problem)
      : convolution_(narrow_problem(problem)),
        shape_(convolution_),
        numbers_(*narrow_numbers(convolution_)),
        function_(source(), problem.device,
                  Launch{maximum(1, shape_.samples * numbers_.tiles_of_sample()),
                         static_cast<uint32_t>(numbers_.threads), 1,
                         static_cast<uint32_t>(numbers_.shared_bytes(shape_))}) {
    if (convolution_.block.stages().size() == problem.block.stages().size()) return;
    tail_problem_ = tail_after_convolution(problem);
    tail_ = build_tail(*tail_problem_);
    const Shape& sizes = tail_problem_->input.sizes;
    values_ = regions_.add(shape_.samples * (element_count({sizes.begin() + 1, sizes.end()}) * 4));
  }

  Accuracy accuracy() const override { return tail_ ? tail_->kernel->accuracy() : Accuracy{}; }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + (tail_ ? tail_->kernel->workspace_bytes() : 0);
  }

  std::string describe() const override {
    const NarrowNumbers& n = numbers_;
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms";
    if (shape_.conv_groups > 1) out << " in each of " << shape_.conv_groups << " groups";
    out << ", a thread has " << n.outputs << " channels of " << n.rows << "x" << n.positions << " cells\n"
        << "tile: " << n.groups << " groups, " << n.tile_outputs() << " channels each, a box of "
        << n.cells(0) << "x" << n.cells(1) << "x" << n.cells(2) << " cells, " << n.tiles_of_sample()
        << " tiles a sample\n"
        << "window: " << n.window[0] << "x" << n.window[1] << "x" << n.window[2] << " of " << n.inputs
        << " input channels a group, vectors of " << n.input_vector << " and " << n.output_vector
        << " elements\n"
        << "blocks: " << describe_blocks(function_.numbers().blocks, function_);
    if (tail_) {
      out << "then: " << tail_->row << '\n'
          << "workspace: " << workspace_bytes() << " bytes\n"
          << tail_->kernel->describe();
    }
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_rounding(convolution_) + (tail_ ? tail_->kernel->numerics() : Notes{});
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.samples == 0) return;
    const LaunchChain chain;
    void* const values = tail_ ? at(workspace, values_) : arguments.output;
    NarrowParameters p;
    p.input = arguments.input;
    p.output = values;
    p.batch = shape_.samples;
    p.parameter = std::vector<const void*>(
        arguments.parameters.begin(), arguments.parameters.begin() + std::ssize(convolution_.parameters));
    p.launch(function_, stream);
    if (!tail_) return;
    Arguments tail;
    tail.input = values;
    tail.output = arguments.output;
    tail.statistics = arguments.statistics;
    tail.parameters.assign(arguments.parameters.end() - std::ssize(tail_problem_->parameters),
                           arguments.parameters.end());
    tail_->kernel->launch(tail, at(workspace, Region{regions_.total(), 0}), stream);
  }

 private:
  Source source() const {
    return agent_kernel("onepass_narrow",
                        "#include \"direct/narrow.cuh\"\n" + whole_tail_source(convolution_) +
                            thin_source(convolution_, shape_) + numbers_.source(shape_),
                        "Narrow<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(numbers_.threads) + ", " + std::to_string(numbers_.blocks_wanted),
                        SharedAs::bytes);
  }

  Problem convolution_;  // with the chain after it where that is all
  ThinShape shape_;
  NarrowNumbers numbers_;
  Function function_;
  std::optional<Problem> tail_problem_;
  std::optional<BuiltTail> tail_;
  Regions regions_;
  Region values_;
};

std::string refusal(const Problem& problem) {
  const Conv* conv = problem.block.conv();
  if (conv == nullptr) return "the block has no convolution";
  const int64_t inputs = conv->in_channels / conv->groups;
  if (inputs > most_inputs) return "a group of more than " + std::to_string(most_inputs) + " input channels";
  const Problem convolution = narrow_problem(problem);
  std::string reason = whole_block_refusal(convolution);
  if (!reason.empty()) return reason;
  const ThinShape shape(convolution);
  const std::shared_ptr<const NarrowNumbers> numbers = narrow_numbers(convolution);
  if (numbers->threads == 0) return "the window of a tile is too large";
  constexpr int64_t most = int64_t{1} << 31;
  if (shape.samples.value() > 0 && numbers->tiles_of_sample() >= most / shape.samples.value())
    return "2^31 tiles or more";
  if (convolution.block.stages().size() < problem.block.stages().size() &&
      tail_row(*tail_after_convolution(problem)) == nullptr) {
    return "no row takes what follows the convolution";
  }
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const Gpu& gpu = gpu_of(problem.device);
  const Problem convolution = narrow_problem(problem);
  const std::shared_ptr<const NarrowNumbers> numbers = narrow_numbers(convolution);
  double seconds = 4e-6 + numbers->seconds(convolution, ThinShape(convolution), gpu);
  if (convolution.block.stages().size() < problem.block.stages().size()) {
    const Problem tail = *tail_after_convolution(problem);
    seconds += 2e-6 + tail_row(tail)->seconds(tail, {});  // from one launch to the next
  }
  return seconds;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_narrow = cuda::row_of<cuda::NarrowKernel>("narrow", cuda::refusal, cuda::seconds);

}  // namespace onepass
