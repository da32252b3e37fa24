// The numbers of a tail's gradients on the CPU: passes, sums, panels, waves and the parts of the workspace.
#include "cpu/tail_backward.h"

#include <algorithm>
#include <sstream>

#include "cpu/cost.h"

namespace onepass::cpu {
namespace {

// Floats of all panels that one gradient step touches: what a L1 of 64 KiB has left beside the streams. For
// relu | group_norm of 128 interleaved channels, twice as much takes 1.7 times as long, a third of it 3%
// longer.
constexpr int64_t live_panel_floats = 12 * 1024;
constexpr int64_t least_panel_floats = 1024;
// Partial sums of a wave.
constexpr int64_t wave_sum_doubles = 512 * 1024;
constexpr int64_t floats_per_double = 2;

}  // namespace

TailBackward::TailBackward(const BackwardProblem& problem, const Isa& isa)
    : problem_(problem),
      isa_(isa),
      chain_(problem.forward),
      input_(problem.forward.input),
      output_gradient_(problem.output_gradient),
      input_gradient_(problem.wants_input() ? TensorMap(problem.input_gradient) : TensorMap()),
      orientation_(step_orientation(input_, chain_.channels, isa.lanes)),
      steps_(chain_.before),
      norm_at_(chain_.before.size()),
      norm_(problem.forward.block.norm() != nullptr),
      mean_(problem.forward.block.has_mean()),
      batch_(chain_.batch),
      channels_(chain_.channels),
      pixels_(input_.pixels()) {
  steps_.insert(steps_.end(), chain_.after.begin(), chain_.after.end());
  if (norm_) group_count_ = problem.forward.block.norm()->group_count(channels_);
  // Slabs are units where their channels lie together.
  units_.per_sample = norm_ && orientation_of(input_) == Orientation::planar ? group_count_ : 1;
  units_.channels = channels_ / units_.per_sample;
  grid_ = make_grid(units_.channels, pixels_, cut_orientation(input_, orientation_));
  choose_passes();
  choose_sums();
  choose_panels();
  lay_out_workspace();
}

// Which passes run and how far back they go, from what is wanted.
void TailBackward::choose_passes() {
  const auto wants_argument = [this](size_t i) {
    const Step& step = steps_[i];
    if (step.vector >= 0) return wants(chain_.vectors[static_cast<size_t>(step.vector)].parameter);
    return step.tensor >= 0 && wants(chain_.tensors[static_cast<size_t>(step.tensor)].parameter);
  };
  const auto first_wanted = [&](size_t begin, size_t end) {
    while (begin < end && !wants_argument(begin)) ++begin;
    return begin;
  };
  const bool input = problem_.wants_input();
  second_.end = norm_at_;
  second_.begin = input ? 0 : first_wanted(0, norm_at_);
  second_.runs = input || second_.begin < norm_at_;
  if (!norm_) return;
  const bool affine = chain_.norm_weight >= 0;
  const auto parameter = [this](int vector) { return chain_.vectors[static_cast<size_t>(vector)].parameter; };
  sums_for_norm_ = second_.runs ||
                   (affine && (wants(parameter(chain_.norm_weight)) || wants(parameter(chain_.norm_bias))));
  first_.end = steps_.size();
  first_.begin = sums_for_norm_ ? norm_at_ : first_wanted(norm_at_, steps_.size());
  first_.runs = sums_for_norm_ || first_.begin < steps_.size();
  if (input && input_gradient_.is_panel(orientation_)) kept_ = worth_keeping();
}

// Recomputing an exponential or reading another tensor again costs more than a round trip to a cache. So dz
// is kept to spare the steps after the norm, or else h to spare the last step before it.
Kept TailBackward::worth_keeping() const {
  const auto is_dear = [](const Step& step) {
    return step.tensor >= 0 || (step.function != identity_step && !is_cheap(static_cast<Op>(step.function)));
  };
  if (std::any_of(chain_.after.begin(), chain_.after.end(), is_dear)) return Kept::norm_gradient;
  return norm_at_ > 0 && is_dear(steps_[norm_at_ - 1]) ? Kept::norm_input : Kept::nothing;
}

size_t TailBackward::add_sum(Pass& pass, Sum sum) {
  sum.total = total_count_++;
  pass.sums.push_back(sum);
  return pass.sums.size() - 1;
}

void TailBackward::choose_sums() {
  const auto wanted = [this](int vector) -> std::optional<size_t> {
    if (vector < 0) return {};
    const size_t parameter = chain_.vectors[static_cast<size_t>(vector)].parameter;
    return wants(parameter) ? std::optional(parameter) : std::nullopt;
  };
  if (sums_for_norm_) {
    add_sum(first_, {wanted(chain_.norm_bias)});
    add_sum(first_, {wanted(chain_.norm_weight)});
  }
  for (size_t i = 0; i < steps_.size(); ++i) {
    StepArgument argument;
    if (const auto parameter = wanted(steps_[i].vector)) {
      const bool per_sample = chain_.vectors[static_cast<size_t>(steps_[i].vector)].per_sample;
      Pass& pass = norm_ && i >= norm_at_ ? first_ : second_;
      argument.sum = add_sum(pass, {parameter, per_sample});
    } else if (steps_[i].tensor >= 0) {
      const size_t tensor = chain_.tensors[static_cast<size_t>(steps_[i].tensor)].parameter;
      if (wants(tensor)) {
        argument.parameter = tensor;
        argument.map = TensorMap(problem_.parameter_gradients[tensor]);
      }
    }
    arguments_.push_back(argument);
  }
}

void TailBackward::choose_panels() {
  const auto panels = static_cast<int64_t>(steps_.size() + 1 + (chain_.tensors.empty() ? 0 : 1));
  panel_elements_ = std::clamp(live_panel_floats / panels, least_panel_floats, stream_panel_floats);
  if (orientation_ == Orientation::interleaved) {
    // A few pixels at least, so that a panel's coefficients are not loaded for each of them.
    panel_elements_ = std::max(panel_elements_, std::min(8 * units_.channels, stream_panel_floats));
  }
  const int64_t unit_floats = std::max<int64_t>(1, units_.channels * pixels_);
  const auto sums = static_cast<int64_t>(std::max(first_.sums.size(), second_.sums.size()));
  int64_t units = std::max<int64_t>(1, unit_count());
  const int64_t partials = std::max<int64_t>(1, sums * grid_.pixel_parts * units_.channels);
  units = std::min(units, wave_sum_doubles / partials);
  // x, dy and dx of a wave.
  if (pass_count() == 2) units = std::min(units, wave_cache_floats / (3 * unit_floats));
  wave_units_ = std::max<int64_t>(1, units);
}

void TailBackward::lay_out_workspace() {
  WorkspaceLayout layout(chain_.workspace_floats);
  const int64_t vector_floats = units_.channels + Chain::slack();
  const auto sums = static_cast<int64_t>(std::max(first_.sums.size(), second_.sums.size()));
  if (norm_ || mean_) rows_at_ = layout.take(wave_units_ * row_count * vector_floats);
  partials_at_ = layout.take(wave_units_ * grid_.pixel_parts * sums * units_.channels * floats_per_double);
  totals_at_ = layout.take(static_cast<int64_t>(total_count_) * channels_ * floats_per_double);
  panel_floats_ = round_up(std::max(panel_elements_, units_.channels), alignment_floats);
  const auto panels = static_cast<int64_t>(steps_.size() + 1 + extra_panels);
  worker_floats_ = round_up(panels * panel_floats_ + 2 * vector_floats, alignment_floats);
  workers_at_ = layout.take(worker_floats_ * problem_.forward.device.threads);
  workspace_floats_ = layout.floats();
}

std::string TailBackward::describe() const {
  std::ostringstream out;
  out << "lanes: " << (orientation_ == Orientation::planar ? "pixels" : "channels") << " (" << isa_.name
      << ", " << isa_.lanes << ")\n";
  out << "passes over the input and the output's gradient: " << pass_count() << '\n';
  out << "saved by forward: " << (norm_ ? "mean and rstd of each slab\n" : "nothing\n");
  if (first_.runs && second_.runs) {
    static constexpr const char* kept[] = {"nothing, all is computed again",
                                           "the norm's input waits in the input's gradient",
                                           "the gradient of the norm's output waits in the input's gradient"};
    out << "between the passes: " << kept[static_cast<int>(kept_)] << '\n';
    out << "units in a wave: " << wave_units_ << (units_.per_sample == 1 ? " samples\n" : " slabs\n");
  }
  if (problem_.wants_input()) {
    out << "the input's gradient may overwrite the input: " << (may_overwrite_input() ? "yes\n" : "no\n");
  }
  out << "panels: " << panel_elements_ << " elements\n";
  out << "workspace: " << workspace_bytes() << " bytes, of which " << worker_floats_ * 4 << " per thread\n";
  return out.str();
}

}  // namespace onepass::cpu
