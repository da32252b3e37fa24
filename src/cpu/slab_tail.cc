// Tails of small slabs: the way of one panel, and the statistics of its slabs.
#include "cpu/slab_tail.h"

#include <algorithm>

namespace onepass::cpu {
namespace {

constexpr int interleaved = static_cast<int>(Orientation::interleaved);
constexpr int planar = static_cast<int>(Orientation::planar);

// Panels of a worker: values, and a tensor operand.
enum Buffer : int { values_buffer, operand_buffer, buffer_count };

// It follows from the channels alone, not from the panel, which follows from the batch too.
constexpr int64_t block_floats = stream_panel_floats;
constexpr int64_t least_block_rows = 16;

PanelView from_row(PanelView panel, int64_t row) { return {panel.data + row * panel.stride, panel.stride}; }

}  // namespace

SlabTail::SlabTail(const Problem& problem, const Isa& isa)
    : problem_(problem),
      isa_(isa),
      slabs_(problem, limits, 2, 2, isa.lanes),
      chain_(problem, slabs_.parameter_repeat()),
      input_(problem.input, slabs_),
      mean_(problem.block.has_mean()) {
  if (mean_) {
    means_ = TensorMap(problem.output);
  } else {
    output_ = SlabTensor(problem.output, slabs_);
  }
  for (const TensorOperand& operand : chain_.tensors) {
    tensors_.emplace_back(problem.parameters[operand.parameter], slabs_);
  }
  if (slabs_.norm) eps_ = problem.block.norm()->eps;
  mean_of_norm_ =
      mean_ && slabs_.norm && chain_.after.size() == 1 && chain_.after[0].function == identity_step;
  sums_whole_slabs_ = slabs_.rows == 1 || (slabs_.slab_columns >= 8 * slabs_.rows && !mean_of_norm_);
  waits_in_output_ = slabs_.panel_floats > stream_panel_floats && !mean_ && output_.in_place();
  const bool whole = slabs_.rows == 1 || sums_whole_slabs_ || !chain_.tensors.empty();
  block_rows_ = whole ? slabs_.rows : std::max(least_block_rows, block_floats / slabs_.channels);
  task_panels_ = std::max<int64_t>(1, stream_task_elements / slabs_.panel_floats);
  WorkspaceLayout layout(chain_.workspace_floats);
  const int64_t values = slabs_.panel_slabs * slabs_.slab_columns / slabs_.repeat;
  row_floats_ = round_up(values + Chain::slack(), alignment_floats);
  worker_floats_ = buffer_count * slabs_.panel_floats + row_count * row_floats_ +
                   round_up(2 * slabs_.panel_slabs, alignment_floats);
  workers_at_ = layout.take(worker_floats_ * problem.device.threads);
  workspace_floats_ = layout.floats();
}

std::string SlabTail::describe() const {
  return slabs_.describe(isa_) +
         "copies: " + (input_.in_place() ? "none, the input is read in place" : "input panels are gathered") +
         "\nworkspace: " + std::to_string(workspace_bytes()) + " bytes, of which " +
         std::to_string(worker_floats_ * 4) + " per thread\n";
}

void SlabTail::run(const Arguments& arguments, void* workspace, Executor& executor) const {
  auto* floats = static_cast<float*>(workspace);
  chain_.load_parameters(problem_, arguments.parameters, floats);
  const int64_t count = slabs_.batch * slabs_.panels;
  executor.for_each(ceil_div(count, task_panels_), [&](int64_t task, int worker) {
    Work work{arguments, floats, floats + workers_at_ + worker * worker_floats_, {}, {}, {},
              nullptr,   nullptr};
    std::fill_n(row(work, zeros), row_floats_, 0.0f);
    const int64_t end = std::min(count, (task + 1) * task_panels_);
    for (int64_t i = task * task_panels_; i < end; ++i) {
      begin(work, slabs_.region(i / slabs_.panels, i % slabs_.panels));
      run_panel(work);
    }
  });
}

float* SlabTail::row(const Work& work, Row which) const {
  return work.own + buffer_count * slabs_.panel_floats + which * row_floats_;
}

// Mean and rstd of the panel's slabs: what the call asks for, or the worker's.
float* SlabTail::statistics_of(const Work& work) const {
  float* statistics = work.arguments.statistics;
  if (statistics == nullptr) return row(work, row_count);
  return statistics + 2 * (work.region.sample * slabs_.groups + work.region.slabs.begin);
}

void SlabTail::begin(Work& work, const SlabRegion& region) const {
  const auto values = [&](int vector, const float* otherwise) {
    if (vector < 0) return otherwise;
    return chain_.values(vector, region.sample, work.floats) + first_value(region);
  };
  work.region = region;
  work.weight = values(chain_.norm_weight, nullptr);
  work.shift = values(chain_.norm_bias, row(work, zeros));
}

void SlabTail::run_panel(Work& work) const {
  const bool writes = !mean_ && output_.in_place();
  const PanelView input = input_.view(isa_, work.region, work.arguments.input, work.own);
  const auto blocks = [&](PanelView from, auto&& f) {
    PanelView first = from;
    for (int64_t r = 0; r < slabs_.rows; r += block_rows_) {
      work.rows = {r, std::min(slabs_.rows, r + block_rows_)};
      work.values = from_row(from, r);
      f();
      if (r == 0) first = work.values;
    }
    return first;
  };
  PanelView values = blocks(input, [&] {
    for (size_t i = 0; i < chain_.before.size(); ++i) {
      apply(work, chain_.before[i], writes && chain_.after.empty() && i + 1 == chain_.before.size());
    }
    if (slabs_.norm) add_statistics(work);
  });
  if (slabs_.norm) finish_statistics(work, values);
  if (!mean_of_norm_ && !chain_.after.empty()) {
    values = blocks(values, [&] {
      for (size_t i = 0; i < chain_.after.size(); ++i) {
        apply(work, chain_.after[i], writes && i + 1 == chain_.after.size());
      }
    });
  }
  if (mean_) {
    store_means(work, values);
  } else if (!writes || (chain_.before.empty() && chain_.after.empty())) {
    output_.store(isa_, work.region, work.arguments.output, values);
  }
}

void SlabTail::apply(Work& work, const Step& step, bool last) const {
  const int64_t first = first_value(work.region);
  const StepContext context{work.floats,
                            &work.arguments.parameters,
                            {first, row(work, centre), row(work, scale), work.shift},
                            nullptr};
  StepArguments s = chain_.column_arguments(step, context, work.region.sample, first);
  s.src = work.values.data;
  s.src_stride = work.values.stride;
  s.rows = work.rows.size();
  s.cols = work.region.columns.size();
  bind_operand(s, step, chain_, tensors_, isa_, work.region, work.arguments.parameters,
               work.own + operand_buffer * slabs_.panel_floats);
  const bool to_output = last || (waits_in_output_ && step.affine == Affine::none);
  const PanelView panel =
      to_output ? output_.place(work.region, work.arguments.output) : PanelView{work.own, s.cols};
  const PanelView to = from_row(panel, work.rows.begin);
  s.dst = const_cast<float*>(to.data);
  s.dst_stride = to.stride;
  work.values = to;
  if (step.affine == Affine::norm && slabs_.rows == 1) return apply_norm(work, step, s);
  int orientation = interleaved;
  if (slabs_.by_channel && step.vector >= 0) {
    orientation = planar;
    s.rows = s.cols / slabs_.pixels;
    s.cols = s.src_stride = s.dst_stride = slabs_.pixels;
  }
  isa_.steps[step.function][static_cast<int>(step.affine)][orientation](s);
}

// The norm where slabs are runs of columns.
void SlabTail::apply_norm(const Work& work, const Step& step, const StepArguments& arguments) const {
  SlabStepArguments s;
  s.step = arguments;
  s.slabs = work.region.slabs.size();
  s.channels = slabs_.slab_columns / slabs_.repeat;
  s.pixels = slabs_.pixels;
  s.statistics = statistics_of(work);
  s.weights = work.weight;
  s.biases = chain_.norm_bias < 0 ? nullptr : work.shift;
  s.repeated = !slabs_.by_channel;
  isa_.slab_steps[step.function](s);
}

// Moments of each column, so far.
void SlabTail::add_statistics(const Work& work) const {
  if (sums_whole_slabs_) return;
  isa_.statistics[interleaved]({work.values.data, work.values.stride, work.rows.size(),
                                work.region.columns.size(), row(work, mean), row(work, m2), work.rows.begin,
                                nullptr});
}

// Statistics of the panel's slabs, and what the norm does to each column.
void SlabTail::finish_statistics(const Work& work, PanelView values) const {
  ColumnNormArguments c;
  c.slabs = work.region.slabs.size();
  c.width = slabs_.slab_columns;
  c.rows = slabs_.rows;
  c.eps = static_cast<float>(eps_);
  c.weight = work.weight;
  c.statistics = statistics_of(work);
  c.mean = row(work, mean);
  c.m2 = row(work, m2);
  c.centre = row(work, centre);
  c.scale = row(work, scale);
  if (sums_whole_slabs_) {
    isa_.slab_statistics({values.data, values.stride, slabs_.rows, c.width, c.slabs, c.eps, c.statistics});
    if (slabs_.rows > 1) isa_.column_coefficients(c);
  } else {
    isa_.column_norm(c);
  }
  if (!mean_of_norm_) return;
  for (int64_t i = 0; i < c.slabs; ++i) finish_means(work, values, i, c.statistics + 2 * i);
}

// Means over the pixels of the norm's output, in row(scale): one for each channel of the slab.
void SlabTail::finish_means(const Work& work, PanelView values, int64_t slab, const float* statistics) const {
  const int64_t width = slabs_.slab_columns;
  const int64_t channels = width / slabs_.repeat;
  float* means = row(work, scale) + slab * channels;
  if (slabs_.rows == 1) {
    isa_.row_means(values.data + slab * width, channels, slabs_.repeat, statistics[0], means);
  } else {
    const float* of_columns = row(work, mean) + slab * width;
    for (int64_t c = 0; c < channels; ++c) means[c] = of_columns[c] - statistics[0];
  }
  const float factor = statistics[1];
  if (work.weight == nullptr) {
    for (int64_t c = 0; c < channels; ++c) means[c] *= factor;
    return;
  }
  const int64_t repeat = slabs_.parameter_repeat();
  const float* weight = work.weight + slab * channels * repeat;
  const float* bias = work.shift + slab * channels * repeat;
  for (int64_t c = 0; c < channels; ++c) means[c] = means[c] * factor * weight[c * repeat] + bias[c * repeat];
}

void SlabTail::store_means(const Work& work, PanelView values) const {
  const Range channels{work.region.columns.begin / slabs_.repeat, work.region.columns.end / slabs_.repeat};
  float* means = row(work, scale);
  if (!mean_of_norm_ && slabs_.rows == 1) {
    isa_.row_means(values.data, channels.size(), slabs_.repeat, 0, means);
  } else if (!mean_of_norm_) {
    isa_.statistics[interleaved](
        {values.data, values.stride, slabs_.rows, channels.size(), means, row(work, m2), 0, nullptr});
  }
  transfer(isa_, Direction::store, means_, work.arguments.output, {work.region.sample, channels, {0, 1}},
           Orientation::interleaved, means, channels.size());
}

}  // namespace onepass::cpu
