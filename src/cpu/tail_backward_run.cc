// Runs a tail's gradients on the CPU: waves of tasks, the way of a panel back, and the sums of each pass.
#include <algorithm>

#include "block/convert.h"
#include "cpu/tail_backward.h"

namespace onepass::cpu {

// ------------------------------------------------------------------------------------- units and memory

float* TailBackward::row(const Call& call, int64_t unit, Row row) const {
  const int64_t index = (unit - call.first_unit) * row_count + row;
  return call.floats + rows_at_ + index * (units_.channels + Chain::slack());
}

double* TailBackward::partial_sums(const Call& call, int64_t unit, int64_t block, size_t sum) const {
  const size_t sums = std::max(first_.sums.size(), second_.sums.size());
  const int64_t place = (unit - call.first_unit) * grid_.pixel_parts + block;
  const int64_t index = (place * static_cast<int64_t>(sums) + static_cast<int64_t>(sum)) * units_.channels;
  return reinterpret_cast<double*>(call.floats + partials_at_) + index;
}

double* TailBackward::totals(const Call& call, size_t total) const {
  return reinterpret_cast<double*>(call.floats + totals_at_) + static_cast<int64_t>(total) * channels_;
}

// Panel `index` of a worker: the gathered input, the inputs of the steps behind the first, then the extra
// ones.
float* TailBackward::panel(const Call& call, int worker, size_t index) const {
  return call.floats + workers_at_ + worker * worker_floats_ + static_cast<int64_t>(index) * panel_floats_;
}

// The sums of one panel, of two kinds.
float* TailBackward::channel_sums(const Call& call, int worker, int index) const {
  return panel(call, worker, steps_.size() + 1 + extra_panels) + index * (units_.channels + Chain::slack());
}

// Mean and rstd of a channel's slab.
const float* TailBackward::statistics_of(const Call& call, int64_t sample, int64_t channel) const {
  const int64_t slab = sample * group_count_ + channel / (channels_ / group_count_);
  return call.arguments.statistics + 2 * slab;
}

// --------------------------------------------------------------------------------------------- running

void TailBackward::run(const BackwardArguments& arguments, void* workspace, Executor& executor) const {
  Call call{arguments, static_cast<float*>(workspace), 0};
  chain_.load_parameters(problem_.forward, arguments.parameters, call.floats);
  std::fill_n(totals(call, 0), static_cast<int64_t>(total_count_) * channels_, 0.0);
  const int64_t tasks = grid_.count();
  const int64_t groups = group_count_ / units_.per_sample;  // slabs of a unit
  for (int64_t begin = 0; begin < unit_count(); begin += wave_units_) {
    call.first_unit = begin;
    const int64_t units = std::min(wave_units_, unit_count() - begin);
    executor.for_each(units, [&](int64_t unit, int) { prepare(call, begin + unit); });
    for (const Pass* pass : {&first_, &second_}) {
      if (!pass->runs) continue;
      executor.for_each(units * tasks, [&](int64_t index, int worker) {
        run_task(call, *pass, begin + index / tasks, index % tasks, worker);
      });
      const auto sums = static_cast<int64_t>(pass->sums.size());
      executor.for_each(sums * channels_, [&](int64_t index, int) {
        reduce(call, *pass, units, static_cast<size_t>(index / channels_), index % channels_);
      });
      if (pass == &second_ || !second_.runs) continue;
      executor.for_each(units * groups, [&](int64_t index, int) {
        finish_norm(call, begin + index / groups, index % groups);
      });
    }
  }
  for (const Pass* pass : {&first_, &second_}) store_totals(call, *pass);
}

// What the norm does to the unit's channels, and the mean's share of the output's gradient.
void TailBackward::prepare(const Call& call, int64_t unit) const {
  const Unit whole = units_.at(unit);
  const float* weight = chain_.values_or_null(chain_.norm_weight, whole.sample, call.floats);
  const float* bias = chain_.values_or_null(chain_.norm_bias, whole.sample, call.floats);
  for (int64_t c = whole.channels.begin; c < whole.channels.end; ++c) {
    const int64_t i = c - whole.channels.begin;
    if (norm_) {
      const float* statistics = statistics_of(call, whole.sample, c);
      row(call, unit, centre)[i] = statistics[0];
      row(call, unit, inverse)[i] = statistics[1];
      row(call, unit, scale)[i] = weight != nullptr ? statistics[1] * weight[c] : statistics[1];
      row(call, unit, shift)[i] = bias != nullptr ? bias[c] : 0;
    }
    if (mean_) {
      const char* at =
          address(output_gradient_, call.arguments.output_gradient, {whole.sample, {c, c + 1}, {0, 1}});
      const double gradient = load_element(output_gradient_.dtype, at);
      row(call, unit, mean_gradient)[i] = static_cast<float>(gradient / static_cast<double>(pixels_));
    }
  }
}

void TailBackward::run_task(const Call& call, const Pass& pass, int64_t unit, int64_t task,
                            int worker) const {
  const Unit whole = units_.at(unit);
  const Range part = grid_.channel_range(task);
  const Range channels{whole.channels.begin + part.begin, whole.channels.begin + part.end};
  const Range pixels = grid_.pixel_range(task);
  const PanelExtent extent(cut_orientation(input_, orientation_), channels.size(), pixels.size(),
                           panel_elements_);
  Work work{call, pass, unit, task % grid_.pixel_parts, worker, true, {whole.sample, {}, {}}, {}, {}, {}};
  work.context.floats = call.floats;
  work.context.parameters = &call.arguments.parameters;
  work.context.operand_scratch = panel(call, worker, steps_.size() + 1 + operand_panel);
  if (norm_) {
    work.context.norm = {whole.channels.begin, row(call, unit, centre), row(call, unit, scale),
                         row(call, unit, shift)};
  }
  for (int64_t c = channels.begin; c < channels.end; c += extent.channels) {
    work.region.channels = {c, std::min(channels.end, c + extent.channels)};
    for (int64_t p = pixels.begin; p < pixels.end; p += extent.pixels) {
      work.region.pixels = {p, std::min(pixels.end, p + extent.pixels)};
      work.first_of_block = p == pixels.begin;
      work.x =
          panel_view(isa_, input_, call.arguments.input, work.region, orientation_, panel(call, worker, 0));
      &pass == &first_ ? first_pass(work) : second_pass(work);
    }
  }
}

// From dy to dz.
void TailBackward::first_pass(Work& work) const {
  recompute(work, first_.end);
  work.gradient = source_gradient(work);
  for (size_t i = first_.end; i-- > first_.begin;) {
    step_back(work, i, kept_ == Kept::norm_gradient && i == norm_at_);
  }
  if (sums_for_norm_) sum_for_norm(work);
}

// From dy or from dz to dx.
void TailBackward::second_pass(Work& work) const {
  const bool from_output = norm_ && kept_ != Kept::norm_gradient;
  const size_t end = from_output ? steps_.size() : norm_at_;
  recompute(work, norm_ ? std::max(end, norm_at_ + 1) : end);
  work.gradient = source_gradient(work);
  for (size_t i = end; i-- > norm_at_;) step_back(work, i, false);
  if (norm_) norm_back(work, problem_.wants_input() && norm_at_ == 0);
  for (size_t i = norm_at_; i-- > second_.begin;) step_back(work, i, problem_.wants_input() && i == 0);
  if (problem_.wants_input()) store_input_gradient(work);
}

// -------------------------------------------------------------------------------------------- one panel

PanelView TailBackward::input_of(const Work& work, size_t step) const {
  if (step == 0) return work.x;
  if (kept_ == Kept::norm_input && step == norm_at_) return input_gradient_panel(work);
  return {panel(work.call, work.worker, step), work.region.cols(orientation_)};
}

// The inputs of steps [0, end).
void TailBackward::recompute(const Work& work, size_t end) const {
  for (size_t i = 0; i + 1 < end; ++i) {
    const bool waits = kept_ == Kept::norm_input && i + 1 == norm_at_ && &work.pass == &second_;
    if (waits) continue;
    const Step& step = steps_[i];
    StepArguments s =
        chain_.step_arguments(isa_, step, work.context, work.region, orientation_, input_of(work, i));
    const PanelView to = input_of(work, i + 1);
    s.dst = const_cast<float*>(to.data);
    s.dst_stride = to.stride;
    isa_.steps[step.function][static_cast<int>(step.affine)][static_cast<int>(orientation_)](s);
  }
}

// The gradient that a pass starts from: dz where it was kept, else dy, spread over the pixels of a mean.
PanelView TailBackward::source_gradient(const Work& work) const {
  float* scratch = panel(work.call, work.worker, steps_.size() + 1 + gradient_panel);
  if (kept_ == Kept::norm_gradient && &work.pass == &second_) return input_gradient_panel(work);
  if (!mean_) {
    return panel_view(isa_, output_gradient_, work.call.arguments.output_gradient, work.region, orientation_,
                      scratch);
  }
  const int64_t rows = work.region.rows(orientation_);
  const int64_t cols = work.region.cols(orientation_);
  const float* gradient = row(work.call, work.unit, mean_gradient) + work.region.channels.begin -
                          units_.at(work.unit).channels.begin;
  for (int64_t r = 0; r < rows; ++r) {
    if (orientation_ == Orientation::planar) {
      std::fill_n(scratch + r * cols, cols, gradient[r]);
    } else {
      std::copy_n(gradient, cols, scratch + r * cols);
    }
  }
  return {scratch, cols};
}

// The region of the input's gradient, where it lies as a panel.
PanelView TailBackward::input_gradient_panel(const Work& work) const {
  const char* at = address(input_gradient_, work.call.arguments.input_gradient, work.region);
  return {reinterpret_cast<const float*>(at), input_gradient_.panel_stride(orientation_)};
}

// Where the next gradient goes: a panel of the worker, or the input's gradient itself for the last one.
PanelView TailBackward::destination(const Work& work, bool last) const {
  if (last && input_gradient_.is_panel(orientation_)) return input_gradient_panel(work);
  return {panel(work.call, work.worker, steps_.size() + 1 + gradient_panel), work.region.cols(orientation_)};
}

// The gradient of what step `i` computed becomes that of what its operation got. Arguments get theirs in the
// pass that meets the step first.
void TailBackward::step_back(Work& work, size_t i, bool last) const {
  const Step& step = steps_[i];
  if (step.function == identity_step) return;
  const StepArgument& argument = arguments_[i];
  const bool meets = i >= work.pass.begin && i < work.pass.end;
  const bool of_argument = meets && (argument.sum || argument.parameter);
  const PanelView to = destination(work, last);
  GradientArguments g;
  g.step = chain_.step_arguments(isa_, step, work.context, work.region, orientation_, input_of(work, i));
  g.step.dst = const_cast<float*>(to.data);
  g.step.dst_stride = to.stride;
  g.gradient = work.gradient.data;
  g.gradient_stride = work.gradient.stride;
  g.argument = argument.sum ? channel_sums(work.call, work.worker, 0)
                            : panel(work.call, work.worker, steps_.size() + 1 + argument_panel);
  g.argument_stride = work.region.cols(orientation_);
  const bool after_norm = step.affine == Affine::norm;
  isa_.gradients[step.function][after_norm][static_cast<int>(orientation_)][of_argument](g);
  work.gradient = to;
  if (!of_argument) return;
  if (argument.sum) return add_to_sum(work, *argument.sum, g.argument);
  transfer(isa_, Direction::store, argument.map, work.call.arguments.parameter_gradients[*argument.parameter],
           work.region, orientation_, g.argument, g.argument_stride);
}

NormGradientArguments TailBackward::norm_arguments(const Work& work) const {
  const int64_t first = work.region.channels.begin - units_.at(work.unit).channels.begin;
  NormGradientArguments n = norm_over(input_of(work, norm_at_), work.gradient);
  n.rows = work.region.rows(orientation_);
  n.cols = work.region.cols(orientation_);
  n.centre = row(work.call, work.unit, centre) + first;
  n.inverse = row(work.call, work.unit, inverse) + first;
  n.scale = row(work.call, work.unit, scale) + first;
  n.offset = row(work.call, work.unit, offset) + first;
  n.slope = row(work.call, work.unit, slope) + first;
  return n;
}

void TailBackward::sum_for_norm(const Work& work) const {
  NormGradientArguments n = norm_arguments(work);
  n.sums = channel_sums(work.call, work.worker, 0);
  n.products = channel_sums(work.call, work.worker, 1);
  isa_.norm_sums[static_cast<int>(orientation_)](n);
  add_to_sum(work, 0, n.sums);
  add_to_sum(work, 1, n.products);
}

void TailBackward::norm_back(Work& work, bool last) const {
  const PanelView to = destination(work, last);
  NormGradientArguments n = norm_arguments(work);
  n.dst = const_cast<float*>(to.data);
  n.dst_stride = to.stride;
  isa_.norm_gradient[static_cast<int>(orientation_)](n);
  work.gradient = to;
}

// Unless the last step wrote it there.
void TailBackward::store_input_gradient(const Work& work) const {
  const bool in_place = input_gradient_.is_panel(orientation_);
  if (in_place && input_gradient_panel(work).data == work.gradient.data) return;
  transfer(isa_, Direction::store, input_gradient_, work.call.arguments.input_gradient, work.region,
           orientation_, const_cast<float*>(work.gradient.data), work.gradient.stride);
}

void TailBackward::add_to_sum(const Work& work, size_t sum, const float* values) const {
  const int64_t first = work.region.channels.begin - units_.at(work.unit).channels.begin;
  double* to = partial_sums(work.call, work.unit, work.block, sum) + first;
  const int64_t count = work.region.channels.size();
  if (work.first_of_block) std::fill_n(to, count, 0.0);
  for (int64_t c = 0; c < count; ++c) to[c] += values[c];
}

// ------------------------------------------------------------------------------------------------ sums

// One slab: the two means of the norm's gradient, as what is taken off each element.
void TailBackward::finish_norm(const Call& call, int64_t unit, int64_t group) const {
  const Unit whole = units_.at(unit);
  const int64_t count = channels_ / group_count_;
  const int64_t begin = group * count;  // channel of the unit
  const float* weight = chain_.values_or_null(chain_.norm_weight, whole.sample, call.floats);
  double sum = 0;
  double product = 0;
  for (int64_t c = begin; c < begin + count; ++c) {
    const double gamma = weight != nullptr ? weight[whole.channels.begin + c] : 1;
    for (int64_t block = 0; block < grid_.pixel_parts; ++block) {
      sum += gamma * partial_sums(call, unit, block, 0)[c];
      product += gamma * partial_sums(call, unit, block, 1)[c];
    }
  }
  const double rstd = statistics_of(call, whole.sample, whole.channels.begin + begin)[1];
  const double elements = static_cast<double>(count) * static_cast<double>(pixels_);
  std::fill_n(row(call, unit, offset) + begin, count, static_cast<float>(rstd * (sum / elements)));
  std::fill_n(row(call, unit, slope) + begin, count, static_cast<float>(rstd * (product / elements)));
}

// The blocks of a channel, then the samples of the wave, in order.
void TailBackward::reduce(const Call& call, const Pass& pass, int64_t units, size_t sum,
                          int64_t channel) const {
  const Sum& which = pass.sums[sum];
  if (!which.parameter) return;
  const int64_t part = channel / units_.channels;
  const int64_t first =
      call.first_unit + (part - call.first_unit % units_.per_sample + units_.per_sample) % units_.per_sample;
  for (int64_t unit = first; unit < call.first_unit + units; unit += units_.per_sample) {
    const int64_t sample = unit / units_.per_sample;
    double value = 0;
    for (int64_t block = 0; block < grid_.pixel_parts; ++block) {
      value += partial_sums(call, unit, block, sum)[channel % units_.channels];
    }
    if (!which.per_sample) {
      totals(call, which.total)[channel] += value;
      continue;
    }
    const DType dtype = problem_.parameter_gradients[*which.parameter].dtype;
    char* to = static_cast<char*>(call.arguments.parameter_gradients[*which.parameter]);
    store_element(dtype, value, to + (sample * channels_ + channel) * byte_size(dtype));
  }
}

// The sums over all samples; a single slope gets that over all channels.
void TailBackward::store_totals(const Call& call, const Pass& pass) const {
  for (const Sum& sum : pass.sums) {
    if (!sum.parameter || sum.per_sample) continue;
    const TensorSpec& spec = problem_.parameter_gradients[*sum.parameter];
    char* to = static_cast<char*>(call.arguments.parameter_gradients[*sum.parameter]);
    const double* values = totals(call, sum.total);
    if (element_count(spec.sizes) == 1) {
      double all = 0;
      for (int64_t c = 0; c < channels_; ++c) all += values[c];
      store_element(spec.dtype, all, to);
      continue;
    }
    for (int64_t c = 0; c < channels_; ++c) {
      store_element(spec.dtype, values[c], to + c * byte_size(spec.dtype));
    }
  }
}

}  // namespace onepass::cpu
