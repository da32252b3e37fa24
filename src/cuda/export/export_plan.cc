// Plans as source text. A plan is run into a Recording, for its own batch and for others, and its formulas
// must give the numbers of all.
#include <algorithm>
#include <cstdint>
#include <optional>

#include "cuda/export/record_plan.h"
#include "cuda/runtime/cut_for.h"
#include "cuda/runtime/device_code.h"
#include "cuda/runtime/recording.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "plan/choice.h"

namespace onepass::cuda {
namespace {

// The problem with another batch.
Problem with_batch(Problem problem, int64_t batch) {
  problem.input.sizes[0] = batch;
  problem.output.sizes[0] = batch;
  const std::vector<Parameter> parameters = problem.block.parameters(problem.input.sizes);
  for (size_t i = 0; i < parameters.size(); ++i) problem.parameters[i].sizes = parameters[i].sizes;
  return problem;
}

BackwardProblem with_batch(const BackwardProblem& problem, int64_t batch) {
  BackwardProblem changed = problem;
  changed.forward = with_batch(problem.forward, batch);
  changed.output_gradient.sizes[0] = batch;
  changed.input_gradient.sizes[0] = batch;
  for (size_t i = 0; i < changed.parameter_gradients.size(); ++i)
    changed.parameter_gradients[i].sizes = changed.forward.parameters[i].sizes;
  return changed;
}

int64_t batch_of(const Problem& problem) { return problem.input.sizes[0]; }
int64_t batch_of(const BackwardProblem& problem) { return batch_of(problem.forward); }

class Checker {
 public:
  Checker(const std::string& strategy, const Recording& recording, Number workspace_bytes)
      : strategy_(strategy), recording_(recording), workspace_bytes_(std::move(workspace_bytes)) {}

  // Whether the row takes these kernels for other batches too: it may have faster ones for few samples, but
  // its kernels are right for all.
  bool has_kernels_of(const Recording& other) const { return other.kernels() == recording_.kernels(); }

  // What a plan for this batch recorded.
  void check(const Recording& other, const Number& workspace_bytes, int64_t batch) const {
    require(other.steps().size() == recording_.steps().size(), "the number of launches", batch);
    for (size_t i = 0; i < other.steps().size(); ++i) {
      const Recording::Step& step = recording_.steps()[i];
      const Recording::Step& wanted = other.steps()[i];
      require(step.kernel == wanted.kernel, "the order of launches", batch);
      require(same(step.blocks, wanted.blocks, batch), "the number of blocks", batch);
      require(same(step.memory, wanted.memory, batch) && same(step.bytes, wanted.bytes, batch),
              "what is cleared", batch);
      require(step.words.size() == wanted.words.size(), "the number of words", batch);
      for (size_t k = 0; k < step.words.size(); ++k) {
        const std::string what = "word " + std::to_string(k) + " of launch " + std::to_string(i);
        require(same(step.words[k], wanted.words[k], batch), what, batch);
      }
    }
    require(same(workspace_bytes_, workspace_bytes, batch), "the workspace", batch);
  }

 private:
  static bool same(const Number& formula, const Number& wanted, int64_t batch) {
    return formula.value_at(batch) == wanted.value();
  }

  void require(bool so, const std::string& what, int64_t batch) const {
    if (so) return;
    throw Error(strategy_ + " cannot be exported: " + what +
                " depends on the batch, and its formula does not (" + std::to_string(batch) + ")");
  }

  const std::string& strategy_;
  const Recording& recording_;
  Number workspace_bytes_;
};

ExportedPlan text_of(const std::string& strategy, const Recording& recording, const Number& workspace_bytes) {
  FormulaTexts texts;
  texts.expect(workspace_bytes);
  for (const Recording::Step& step : recording.steps()) {
    texts.expect(step.blocks);
    texts.expect(step.memory);
    texts.expect(step.bytes);
    for (const Number& word : step.words) texts.expect(word);
  }
  ExportedPlan plan;
  plan.workspace_bytes = texts.text(workspace_bytes);
  for (const Recording::Kernel& kernel : recording.kernels()) {
    plan.kernels.push_back({kernel.source.name, kernel.source.text, kernel.threads, kernel.cluster,
                            kernel.shared_bytes, kernel.cooperative, kernel.resident});
  }
  for (const Recording::Step& step : recording.steps()) {
    ExportedStep text{step.kernel, texts.text(step.blocks), {},
                      step.names,  texts.text(step.memory), texts.text(step.bytes)};
    for (const Number& word : step.words) {
      text.words.push_back(texts.text(word));
      // A constant that is one of the addresses was never named.
      if (text.words.back() == std::to_string(word.value()) && word.value() >= first_address)
        throw Error(strategy + " cannot be exported: a launch is given an address that has no name");
    }
    plan.steps.push_back(std::move(text));
  }
  for (const auto& [name, formula] : texts.constants()) plan.constants.push_back({name, formula});
  return plan;
}

constexpr int64_t other_batches[] = {1, 2, 3, 5, 8, 9, 17, 64, 100, 257, 1000, 4099};

// The most samples that a row takes, which has a limit if it does not take 2^24.
template <class Takes>
std::optional<int64_t> most_samples(int64_t taken, const Takes& takes_batch) {
  int64_t refused = int64_t{1} << 24;
  if (taken >= refused || takes_batch(refused)) return std::nullopt;
  while (refused - taken > 1) {
    const int64_t middle = taken + (refused - taken) / 2;
    (takes_batch(middle) ? taken : refused) = middle;
  }
  return taken;
}

// The fewest multiprocessors that one sample has blocks on: of kernels whose blocks wait for each other some
// take a sample only whole.
int64_t least_multiprocessors(const Recording& recording) {
  constexpr int64_t most = 1024;
  int64_t least = 1;
  for (const Recording::Step& step : recording.steps()) {
    if (step.kernel < 0) continue;
    const Recording::Kernel& kernel = recording.kernels()[static_cast<size_t>(step.kernel)];
    int64_t clusters = 1;
    while (clusters < most && step.blocks.value_at(1, kernel.resident, clusters) <= 0) ++clusters;
    if (clusters > 1) least = std::max(least, clusters * kernel.cluster);
  }
  return least;
}

// `record_plan(plan, recording, workspace)` runs a plan; `takes_batch(batch)` says whether the same row takes
// so many samples, `plan_for(batch)` makes its plan for them.
template <class AnyPlan, class Record, class Takes, class PlanFor>
ExportedPlan export_any(const AnyPlan& plan, const Record& record_plan, const Takes& takes_batch,
                        const PlanFor& plan_for) {
  void* workspace = nullptr;
  Recording recording;
  const CutFor cut(batch_of(plan.problem()));
  record_plan(plan, recording, workspace);
  const Number bytes = recording.end_of(workspace);
  recording.stop();
  const Checker checker(plan.strategy(), recording, bytes);
  int checked = 0;
  for (const int64_t batch : other_batches) {
    if (!takes_batch(batch)) continue;
    const AnyPlan other_plan = plan_for(batch);
    Recording other;
    record_plan(other_plan, other, workspace);
    if (!checker.has_kernels_of(other)) continue;
    checker.check(other, other.end_of(workspace), batch);
    ++checked;
  }
  constexpr int enough = 2;
  if (checked < enough)
    throw Error(plan.strategy() + " cannot be exported: its kernels' source depends on the batch");
  ExportedPlan text = text_of(plan.strategy(), recording, bytes);
  if (const auto most = most_samples(batch_of(plan.problem()), takes_batch))
    text.constants.push_back({"most_samples", std::to_string(*most)});
  if (const int64_t least = least_multiprocessors(recording); least > 1)
    text.constants.push_back({"least_multiprocessors", std::to_string(least)});
  return text;
}

}  // namespace

ExportedPlan export_plan(const Plan& plan, bool with_statistics) {
  return export_any(
      plan,
      [&](const Plan& any, Recording& recording, void*& workspace) {
        record(any, with_statistics, recording, workspace);
      },
      [&](int64_t batch) {
        const Strategy& row = find_row(strategies(Device::Kind::cuda), plan.strategy());
        return row.refusal(with_batch(plan.problem(), batch)).empty();
      },
      [&](int64_t batch) {
        return onepass::plan(with_batch(plan.problem(), batch), PlanOptions{plan.strategy(), {}});
      });
}

ExportedPlan export_plan(const BackwardPlan& plan) {
  return export_any(
      plan,
      [](const BackwardPlan& any, Recording& recording, void*& workspace) {
        record(any, recording, workspace);
      },
      [&](int64_t batch) {
        const BackwardStrategy& row = find_row(backward_strategies(Device::Kind::cuda), plan.strategy());
        return row.refusal(with_batch(plan.problem(), batch)).empty();
      },
      [&](int64_t batch) {
        return plan_backward(with_batch(plan.problem(), batch), PlanOptions{plan.strategy(), {}});
      });
}

std::vector<DeviceText> device_code() {
  std::vector<DeviceText> files;
  for (const DeviceFile& file : device_files())
    files.push_back({std::string(file.name), std::string(file.text)});
  return files;
}

}  // namespace onepass::cuda
