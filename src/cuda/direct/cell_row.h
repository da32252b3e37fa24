// What the hosts of the rows "narrow" and "banded" share: a convolution in tiles of cells with the chain
// after it, in one launch. Where a norm or a mean follows, the convolution's output waits in f32 and a tail
// runs on it.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cuda/direct/cell_tile.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "direct/parameters.cuh"

namespace onepass::cuda {

// What the row's kernel computes: the block, or its convolution alone where a norm or a mean follows.
Problem cell_problem(const Problem& problem);

// `Row` has the tile's `Numbers`, found once for a problem by `numbers`, and the `shape` that they are for;
// its `kernel` and the `agent` of `header`; its `accuracy`, `refusal` and `describe`.
template <class Row>
class CellKernel final : public Kernel {
 public:
  explicit CellKernel(const Problem& problem)
      : convolution_(cell_problem(problem)),
        shape_(Row::shape(convolution_)),
        numbers_(*Row::numbers(convolution_)),
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

  Accuracy accuracy() const override {
    Accuracy own = tail_ ? tail_->kernel->accuracy() : accuracy_of_chains(convolution_);
    own.cut_terms = Row::cut_terms(convolution_, shape_);
    return own;
  }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + (tail_ ? tail_->kernel->workspace_bytes() : 0);
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms";
    if (shape_.conv_groups > 1) out << " in each of " << shape_.conv_groups << " groups";
    Row::describe(out, numbers_);
    out << "blocks: " << describe_blocks(function_.numbers().blocks, function_);
    if (tail_) {
      out << "then: " << tail_->row << '\n'
          << "workspace: " << workspace_bytes() << " bytes\n"
          << tail_->kernel->describe();
    }
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_rounding(convolution_) +
           notes_of_chains(convolution_.block, bits_of(convolution_, convolution_.output.dtype)) +
           (tail_ ? tail_->kernel->numerics() : Notes{});
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

  static std::string refusal(const Problem& problem) {
    const Conv* conv = problem.block.conv();
    if (conv == nullptr) return "the block has no convolution";
    constexpr int64_t most_inputs = 64;
    if (conv->in_channels / conv->groups > most_inputs)
      return "a group of more than " + std::to_string(most_inputs) + " input channels";
    const Problem convolution = cell_problem(problem);
    std::string reason = whole_block_refusal(convolution);
    if (reason.empty()) reason = Row::refusal(convolution);
    if (!reason.empty()) return reason;
    const ThinShape shape = Row::shape(convolution);
    const auto numbers = Row::numbers(convolution);
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

  static double seconds(const Problem& problem, const PlanOptions&) {
    const Gpu& gpu = gpu_of(problem.device);
    const Problem convolution = cell_problem(problem);
    double seconds = 4e-6 + Row::numbers(convolution)->seconds(convolution, Row::shape(convolution), gpu);
    if (convolution.block.stages().size() < problem.block.stages().size()) {
      const Problem tail = *tail_after_convolution(problem);
      seconds += 2e-6 + tail_row(tail)->seconds(tail, {});  // from one launch to the next
    }
    return seconds;
  }

 private:
  Source source() const {
    return agent_kernel(
        Row::kernel,
        "#include \"" + std::string(Row::header) + "\"\n" +
            whole_tail_source(convolution_, bits_of(convolution_, convolution_.output.dtype)) +
            thin_source(convolution_, shape_) + numbers_.source(shape_),
        std::string(Row::agent) + "<onepass::Convolution, onepass::Tail, Numbers>",
        std::to_string(numbers_.threads) + ", " + std::to_string(numbers_.blocks_wanted), SharedAs::bytes);
  }

  Problem convolution_;  // with the chain after it where that is all
  ThinShape shape_;
  typename Row::Numbers numbers_;
  Function function_;
  std::optional<Problem> tail_problem_;
  std::optional<BuiltTail> tail_;
  Regions regions_;
  Region values_;
};

}  // namespace onepass::cuda
