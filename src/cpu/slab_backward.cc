// Gradients of tails of small slabs: what is wanted of each step, the way of a panel back, and the sums.
#include "cpu/slab_backward.h"

#include <algorithm>

#include "block/convert.h"

namespace onepass::cpu {
namespace {

constexpr int interleaved = static_cast<int>(Orientation::interleaved);
constexpr int planar = static_cast<int>(Orientation::planar);

// Samples whose sums are added in one chain of f32.
constexpr int64_t most_chunk_samples = 16;
// Columns whose sums over the batch are taken at a time.
constexpr int64_t reduced_columns = 1024;
// Tasks of a call, where there are as many. More of them have more sums to keep apart.
constexpr int64_t wanted_tasks = 16;
// Elements of a sample that a task takes in a row. Single panels of each sample would be short streams from
// memory (group_norm(64) @ 69x2048x2x2: 3.3 ns an element).
constexpr int64_t strip_elements = 16 * 1024;

// Panels that one panel's way touches: the inputs of the steps, dy and the gradient under way.
int64_t live_panels(const Problem& problem) {
  return static_cast<int64_t>(problem.block.stages().size()) + 2;
}

}  // namespace

SlabBackward::SlabBackward(const BackwardProblem& problem, const Isa& isa)
    : problem_(problem),
      isa_(isa),
      slabs_(problem.forward, limits_of(problem.forward), live_panels(problem.forward), row_count, isa.lanes),
      chain_(problem.forward, slabs_.parameter_repeat()),
      steps_(chain_.before),
      norm_at_(chain_.before.size()),
      input_(problem.forward.input, slabs_),
      mean_(problem.forward.block.has_mean()) {
  steps_.insert(steps_.end(), chain_.after.begin(), chain_.after.end());
  if (mean_) {
    mean_gradient_ = TensorMap(problem.output_gradient);
  } else {
    output_gradient_ = SlabTensor(problem.output_gradient, slabs_);
  }
  if (problem.wants_input()) input_gradient_ = SlabTensor(problem.input_gradient, slabs_);
  for (const TensorOperand& operand : chain_.tensors) {
    tensors_.emplace_back(problem.forward.parameters[operand.parameter], slabs_);
  }
  choose_sums();
  choose_steps();
  const int64_t chunks = ceil_div(slabs_.batch, most_chunk_samples);
  strips_ = ceil_div(slabs_.panels, std::max<int64_t>(1, strip_elements / slabs_.panel_floats));
  chunks_ = std::max<int64_t>(1, std::min(slabs_.batch, std::max(chunks, wanted_tasks / strips_)));
  lay_out_workspace();
}

std::optional<size_t> SlabBackward::wanted(int vector) const {
  if (vector < 0) return {};
  const size_t parameter = chain_.vectors[static_cast<size_t>(vector)].parameter;
  return problem_.wants_parameter(parameter) ? std::optional(parameter) : std::nullopt;
}

size_t SlabBackward::add_sum(size_t parameter, bool per_sample) {
  sums_.push_back({parameter, per_sample});
  return sums_.size() - 1;
}

void SlabBackward::choose_sums() {
  if (const auto parameter = wanted(chain_.norm_bias)) bias_sum_ = add_sum(*parameter, false);
  if (const auto parameter = wanted(chain_.norm_weight)) weight_sum_ = add_sum(*parameter, false);
  for (const Step& step : steps_) {
    StepArgument argument;
    if (const auto parameter = wanted(step.vector)) {
      argument.sum = add_sum(*parameter, chain_.vectors[static_cast<size_t>(step.vector)].per_sample);
    } else if (step.tensor >= 0) {
      const size_t tensor = chain_.tensors[static_cast<size_t>(step.tensor)].parameter;
      if (problem_.wants_parameter(tensor)) {
        argument.parameter = tensor;
        argument.tensor = SlabTensor(problem_.parameter_gradients[tensor], slabs_);
      }
    }
    arguments_.push_back(argument);
  }
}

// How far back the way goes, from what is wanted.
void SlabBackward::choose_steps() {
  if (!problem_.wants_input()) {
    const auto is_wanted = [](const StepArgument& argument) { return argument.sum || argument.parameter; };
    const auto first = std::find_if(arguments_.begin(), arguments_.end(), is_wanted);
    begin_ = static_cast<size_t>(first - arguments_.begin());
  }
  through_norm_ = slabs_.norm && (problem_.wants_input() || begin_ < norm_at_);
  if (weight_sum_ || bias_sum_) begin_ = std::min(begin_, norm_at_);
}

void SlabBackward::lay_out_workspace() {
  WorkspaceLayout layout(chain_.workspace_floats);
  const auto count = static_cast<int64_t>(sums_.size());
  partials_at_ = layout.take(chunks_ * count * values_of(slabs_.columns));
  const auto panels = static_cast<int64_t>(steps_.size() + 1 + extra_panels);
  row_floats_ =
      round_up(values_of(slabs_.panel_slabs * slabs_.slab_columns) + Chain::slack(), alignment_floats);
  worker_floats_ = panels * slabs_.panel_floats + row_count * row_floats_;
  workers_at_ = layout.take(worker_floats_ * problem_.forward.device.threads);
  workspace_floats_ = layout.floats();
}

std::string SlabBackward::describe() const {
  return slabs_.describe(isa_) + "passes over the input and the output's gradient: 1\nsaved by forward: " +
         (slabs_.norm ? "mean and rstd of each slab\n" : "nothing\n") +
         (problem_.wants_input() ? std::string("the input's gradient may overwrite the input: ") +
                                       (may_overwrite_input() ? "yes\n" : "no\n")
                                 : "") +
         "parts of the batch, summed apart: " + std::to_string(chunks_) +
         "\nworkspace: " + std::to_string(workspace_bytes()) + " bytes, of which " +
         std::to_string(worker_floats_ * 4) + " per thread\n";
}

// --------------------------------------------------------------------------------------------- running

// Panel `index` of a worker: the gathered input, the inputs of the steps behind the first, then the extra
// ones.
float* SlabBackward::panel(const Work& work, size_t index) const {
  return work.own + static_cast<int64_t>(index) * slabs_.panel_floats;
}

float* SlabBackward::row(const Work& work, Row which) const {
  return panel(work, steps_.size() + 1 + extra_panels) + which * row_floats_;
}

int64_t SlabBackward::reduced_channels() const { return reduced_columns / slabs_.parameter_repeat(); }

// A sum over the samples of a chunk, for each column or channel.
float* SlabBackward::partial(float* floats, int64_t chunk, size_t sum) const {
  const int64_t index = chunk * static_cast<int64_t>(sums_.size()) + static_cast<int64_t>(sum);
  return floats + partials_at_ + index * values_of(slabs_.columns);
}

void SlabBackward::run(const BackwardArguments& arguments, void* workspace, Executor& executor) const {
  auto* floats = static_cast<float*>(workspace);
  chain_.load_parameters(problem_.forward, arguments.parameters, floats);
  const int64_t tasks = slabs_.batch == 0 ? 0 : chunks_ * strips_;
  executor.for_each(tasks, [&](int64_t task, int worker) {
    Work work{arguments, floats, floats + workers_at_ + worker * worker_floats_, 0, true, {}, {}, {}};
    std::fill_n(row(work, zeros), row_floats_, 0.0f);
    work.chunk = task / strips_;
    const Range samples = even_part(slabs_.batch, chunks_, work.chunk);
    const Range panels = even_part(slabs_.panels, strips_, task % strips_);
    for (int64_t sample = samples.begin; sample < samples.end; ++sample) {
      work.first_of_chunk = sample == samples.begin;
      for (int64_t i = panels.begin; i < panels.end; ++i) {
        work.region = slabs_.region(sample, i);
        run_panel(work);
      }
    }
  });
  const int64_t blocks = ceil_div(slabs_.channels, reduced_channels());
  executor.for_each(static_cast<int64_t>(sums_.size()) * blocks, [&](int64_t index, int) {
    store_sum(floats, arguments, static_cast<size_t>(index / blocks), index % blocks);
  });
}

void SlabBackward::run_panel(Work& work) const {
  work.x = input_.view(isa_, work.region, work.arguments.input, panel(work, 0));
  const bool steps_after = norm_at_ < steps_.size() && steps_[norm_at_].function != identity_step;
  if (slabs_.norm && (slabs_.rows > 1 || steps_after)) prepare_norm(work);
  // A norm's input is needed even where no step follows it.
  const size_t inputs = slabs_.norm ? std::max(steps_.size(), norm_at_ + 1) : steps_.size();
  for (size_t i = 0; i + 1 < inputs; ++i) {
    StepArguments s = arguments_of(work, i);
    const PanelView to = input_of(work, i + 1);
    s.dst = const_cast<float*>(to.data);
    s.dst_stride = to.stride;
    const int orientation = orientation_of_step(steps_[i]);
    if (orientation == planar) s.dst_stride = slabs_.pixels;
    isa_.steps[steps_[i].function][static_cast<int>(steps_[i].affine)][orientation](s);
  }
  work.gradient = output_gradient(work);
  for (size_t i = steps_.size(); i-- > std::max(begin_, norm_at_);) step_back(work, i);
  if (through_norm_ || weight_sum_ || bias_sum_) {
    if (slabs_.rows == 1) {
      slab_norm_back(work);
    } else {
      sum_for_norm(work);
      if (through_norm_) norm_back(work);
    }
  }
  for (size_t i = std::min(norm_at_, steps_.size()); i-- > begin_;) step_back(work, i);
  if (!problem_.wants_input()) return;
  const bool stored =
      input_gradient_.in_place() &&
      input_gradient_.place(work.region, work.arguments.input_gradient).data == work.gradient.data;
  if (!stored) input_gradient_.store(isa_, work.region, work.arguments.input_gradient, work.gradient);
}

const float* SlabBackward::shift(const Work& work) const {
  if (chain_.norm_bias < 0) return row(work, zeros);
  return chain_.values(chain_.norm_bias, work.region.sample, work.floats) +
         values_of(work.region.columns.begin);
}

// What the norm does to each column, from the statistics of its slab.
void SlabBackward::prepare_norm(const Work& work) const {
  const SlabRegion& region = work.region;
  const int64_t width = values_of(slabs_.slab_columns);
  const int64_t values = values_of(region.columns.size());
  const float* statistics =
      work.arguments.statistics + 2 * (region.sample * slabs_.groups + region.slabs.begin);
  const float* weight = chain_.values_or_null(chain_.norm_weight, region.sample, work.floats);
  float* centres = row(work, centre);
  float* inverses = row(work, inverse);
  float* scales = row(work, scale);
  for (int64_t at = 0; at < values; at += width, statistics += 2) {
    std::fill_n(centres + at, width, statistics[0]);
    std::fill_n(inverses + at, width, statistics[1]);
    if (weight == nullptr) {
      std::fill_n(scales + at, width, statistics[1]);
      continue;
    }
    const float* weights = weight + values_of(region.columns.begin) + at;
    const float rstd = statistics[1];
    for (int64_t c = 0; c < width; ++c) scales[at + c] = rstd * weights[c];
  }
}

// -------------------------------------------------------------------------------------------- one panel

PanelView SlabBackward::input_of(const Work& work, size_t step) const {
  if (step == 0) return work.x;
  return {panel(work, step), work.region.columns.size()};
}

// Steps with a coefficient for each channel have rows of pixels.
int SlabBackward::orientation_of_step(const Step& step) const {
  return slabs_.by_channel && (step.vector >= 0 || step.affine == Affine::norm) ? planar : interleaved;
}

StepArguments SlabBackward::arguments_of(const Work& work, size_t i) const {
  const Step& step = steps_[i];
  const int64_t first = values_of(work.region.columns.begin);
  const StepContext context{work.floats,
                            &work.arguments.parameters,
                            {first, row(work, centre), row(work, scale), shift(work)},
                            nullptr};
  StepArguments s = chain_.column_arguments(step, context, work.region.sample, first);
  const PanelView source = input_of(work, i);
  s.src = source.data;
  s.src_stride = source.stride;
  s.rows = slabs_.rows;
  s.cols = work.region.columns.size();
  bind_operand(s, step, chain_, tensors_, isa_, work.region, work.arguments.parameters,
               panel(work, steps_.size() + 1 + operand_panel));
  if (orientation_of_step(step) == planar) {
    s.rows = s.cols / slabs_.pixels;
    s.cols = s.src_stride = s.operand_stride = slabs_.pixels;
  }
  return s;
}

// dy; that of a mean is spread over its pixels.
PanelView SlabBackward::output_gradient(const Work& work) const {
  float* scratch = panel(work, steps_.size() + 1 + gradient_panel);
  const SlabRegion& region = work.region;
  if (!mean_) return output_gradient_.view(isa_, region, work.arguments.output_gradient, scratch);
  const Range channels{region.columns.begin / slabs_.repeat, region.columns.end / slabs_.repeat};
  const char* from =
      address(mean_gradient_, work.arguments.output_gradient, {region.sample, channels, {0, 1}});
  const int64_t stride = mean_gradient_.channel_stride * byte_size(mean_gradient_.dtype);
  const double share = 1 / static_cast<double>(slabs_.pixels);
  float* to = scratch;
  for (int64_t c = 0; c < channels.size(); ++c) {
    const double gradient = load_element(mean_gradient_.dtype, from + c * stride) * share;
    to = std::fill_n(to, slabs_.repeat, static_cast<float>(gradient));
  }
  const int64_t columns = region.columns.size();
  for (int64_t r = 1; r < slabs_.rows; ++r) std::copy_n(scratch, columns, scratch + r * columns);
  return {scratch, columns};
}

// Where the next gradient goes: a panel of the worker, or the input's gradient itself for the last one.
PanelView SlabBackward::destination(const Work& work, bool last) const {
  if (last && problem_.wants_input() && input_gradient_.in_place()) {
    return input_gradient_.place(work.region, work.arguments.input_gradient);
  }
  return {panel(work, steps_.size() + 1 + gradient_panel), work.region.columns.size()};
}

// The gradient of what step `i` computed becomes that of what its operation got.
void SlabBackward::step_back(Work& work, size_t i) const {
  const Step& step = steps_[i];
  if (step.function == identity_step) return;
  const StepArgument& argument = arguments_[i];
  const bool of_argument = argument.sum || argument.parameter;
  const PanelView to = destination(work, i == 0 && !(slabs_.norm && norm_at_ == 0));
  GradientArguments g;
  g.step = arguments_of(work, i);
  g.step.dst = const_cast<float*>(to.data);
  g.step.dst_stride = to.stride;
  g.gradient = work.gradient.data;
  g.gradient_stride = work.gradient.stride;
  g.argument = argument.sum ? row(work, sums) : panel(work, steps_.size() + 1 + argument_panel);
  g.argument_stride = work.region.columns.size();
  const int orientation = orientation_of_step(step);
  if (orientation == planar) g.step.dst_stride = g.gradient_stride = g.argument_stride = slabs_.pixels;
  isa_.gradients[step.function][step.affine == Affine::norm][orientation][of_argument](g);
  work.gradient = to;
  if (argument.sum) add_to_sum(work, *argument.sum, g.argument);
  if (argument.parameter) {
    argument.tensor.store(isa_, work.region, work.arguments.parameter_gradients[*argument.parameter],
                          {g.argument, work.region.columns.size()});
  }
}

NormGradientArguments SlabBackward::norm_arguments(const Work& work) const {
  NormGradientArguments n = norm_over(input_of(work, norm_at_), work.gradient);
  n.rows = slabs_.rows;
  n.cols = work.region.columns.size();
  n.centre = row(work, centre);
  n.inverse = row(work, inverse);
  n.scale = row(work, scale);
  n.offset = row(work, offset);
  n.slope = row(work, slope);
  n.sums = row(work, sums);
  n.products = row(work, products);
  return n;
}

// The sums and the gradient where a slab is one run of columns.
void SlabBackward::slab_norm_back(Work& work) const {
  const SlabRegion& region = work.region;
  const PanelView to = destination(work, norm_at_ == 0);
  const float* weight = chain_.values_or_null(chain_.norm_weight, region.sample, work.floats);
  SlabGradientArguments s;
  s.x = input_of(work, norm_at_).data;
  s.gradient = work.gradient.data;
  s.slabs = region.slabs.size();
  s.width = slabs_.slab_columns;
  s.pixels = slabs_.by_channel ? slabs_.pixels : 0;
  s.statistics = work.arguments.statistics + 2 * (region.sample * slabs_.groups + region.slabs.begin);
  const int64_t first = values_of(region.columns.begin);
  s.weights = weight != nullptr ? weight + first : nullptr;
  s.sums = bias_sum_ ? partial(work.floats, work.chunk, *bias_sum_) + first : nullptr;
  s.products = weight_sum_ ? partial(work.floats, work.chunk, *weight_sum_) + first : nullptr;
  s.add = !work.first_of_chunk;
  s.dst = through_norm_ ? const_cast<float*>(to.data) : nullptr;
  isa_.slab_norm_back(s);
  if (through_norm_) work.gradient = to;
}

// The sums of each column, and the two means of each slab as what is taken off each of its elements.
void SlabBackward::sum_for_norm(const Work& work) const {
  isa_.norm_sums[interleaved](norm_arguments(work));
  if (bias_sum_) add_to_sum(work, *bias_sum_, row(work, sums));
  if (weight_sum_) add_to_sum(work, *weight_sum_, row(work, products));
  if (!through_norm_) return;
  const int64_t width = slabs_.slab_columns;
  const float* weight = chain_.values_or_null(chain_.norm_weight, work.region.sample, work.floats);
  const double share = 1 / static_cast<double>(slabs_.slab_elements());
  const auto weighted = [&](const float* values, const float* weights) {
    if (weights == nullptr) return sum_of(width, [&](int64_t c) -> double { return values[c]; });
    return sum_of(width, [&](int64_t c) { return static_cast<double>(values[c]) * weights[c]; });
  };
  const NormGradientArguments n = norm_arguments(work);
  float* offsets = row(work, offset);
  float* slopes = row(work, slope);
  for (int64_t at = 0; at < n.cols; at += width) {
    const float* weights = weight != nullptr ? weight + work.region.columns.begin + at : nullptr;
    const double factor = n.inverse[at] * share;
    std::fill_n(offsets + at, width, static_cast<float>(factor * weighted(n.sums + at, weights)));
    std::fill_n(slopes + at, width, static_cast<float>(factor * weighted(n.products + at, weights)));
  }
}

void SlabBackward::norm_back(Work& work) const {
  const PanelView to = destination(work, norm_at_ == 0);
  NormGradientArguments n = norm_arguments(work);
  n.dst = const_cast<float*>(to.data);
  n.dst_stride = to.stride;
  isa_.norm_gradient[interleaved](n);
  work.gradient = to;
}

// ------------------------------------------------------------------------------------------------ sums

void SlabBackward::add_to_sum(const Work& work, size_t sum, const float* values) const {
  const Sum& which = sums_[sum];
  const int64_t columns = values_of(work.region.columns.size());
  const int64_t repeat = slabs_.parameter_repeat();
  if (!which.per_sample) {
    float* to = partial(work.floats, work.chunk, sum) + values_of(work.region.columns.begin);
    if (work.first_of_chunk) {
      std::copy_n(values, columns, to);
    } else {
      for (int64_t c = 0; c < columns; ++c) to[c] += values[c];
    }
    return;
  }
  const DType dtype = problem_.parameter_gradients[which.parameter].dtype;
  char* to = static_cast<char*>(work.arguments.parameter_gradients[which.parameter]);
  const int64_t first = work.region.sample * slabs_.channels + work.region.columns.begin / slabs_.repeat;
  for (int64_t c = 0; c < columns / repeat; ++c) {
    double total = 0;
    for (int64_t i = 0; i < repeat; ++i) total += values[c * repeat + i];
    store_element(dtype, total, to + (first + c) * byte_size(dtype));
  }
}

// One block of a sum's channels: over the chunks of the batch, then over the columns of a channel, in order.
// A single slope gets the sum over all channels, with its first block.
void SlabBackward::store_sum(float* floats, const BackwardArguments& arguments, size_t sum,
                             int64_t block) const {
  const Sum& which = sums_[sum];
  const TensorSpec& spec = problem_.parameter_gradients[which.parameter];
  const bool single = element_count(spec.sizes) == 1;
  if (which.per_sample || (single && block > 0)) return;
  char* to = static_cast<char*>(arguments.parameter_gradients[which.parameter]);
  const int64_t bytes = byte_size(spec.dtype);
  const int64_t repeat = slabs_.parameter_repeat();
  const int64_t begin = block * reduced_channels();
  const int64_t end = single ? slabs_.channels : std::min(slabs_.channels, begin + reduced_channels());
  double all = 0;
  for (int64_t first = begin; first < end; first += reduced_channels()) {
    const int64_t channels = std::min(end - first, reduced_channels());
    const int64_t columns = channels * repeat;
    double totals[reduced_columns] = {};
    for (int64_t chunk = 0; chunk < (slabs_.batch == 0 ? 0 : chunks_); ++chunk) {
      const float* values = partial(floats, chunk, sum) + first * repeat;
      for (int64_t c = 0; c < columns; ++c) totals[c] += values[c];
    }
    for (int64_t c = 0; c < channels; ++c) {
      double total = 0;
      for (int64_t i = 0; i < repeat; ++i) total += totals[c * repeat + i];
      if (!single) store_element(spec.dtype, total, to + (first + c) * bytes);
      all += total;
    }
  }
  if (single) store_element(spec.dtype, all, to);
}

}  // namespace onepass::cpu
