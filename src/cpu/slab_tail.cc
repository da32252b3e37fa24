// Tails of small slabs: the way of one panel, and the statistics of its slabs.
#include "cpu/slab_tail.h"

#include <algorithm>
#include <cmath>

namespace onepass::cpu {
namespace {

constexpr int interleaved = static_cast<int>(Orientation::interleaved);
constexpr int planar = static_cast<int>(Orientation::planar);

// Panels of a worker: values, and a tensor operand.
enum Buffer : int { values_buffer, operand_buffer, buffer_count };

}  // namespace

SlabTail::SlabTail(const Problem& problem, const Isa& isa)
    : problem_(problem),
      isa_(isa),
      slabs_(problem, 2, row_count),
      chain_(problem, slabs_.repeat),
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
  sums_whole_slabs_ = slabs_.rows == 1 || (slabs_.slab_columns >= 4 * slabs_.rows && !mean_of_norm_);
  task_panels_ = std::max<int64_t>(1, stream_task_elements / slabs_.panel_floats);
  WorkspaceLayout layout(chain_.workspace_floats);
  worker_floats_ = buffer_count * slabs_.panel_floats + row_count * slabs_.column_floats;
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
    Work work{arguments, floats, floats + workers_at_ + worker * worker_floats_, {}, {}, nullptr, nullptr};
    std::fill_n(row(work, zeros), slabs_.column_floats, 0.0f);
    const int64_t end = std::min(count, (task + 1) * task_panels_);
    for (int64_t i = task * task_panels_; i < end; ++i) {
      begin(work, slabs_.region(i / slabs_.panels, i % slabs_.panels));
      run_panel(work);
    }
  });
}

float* SlabTail::row(const Work& work, Row which) const {
  return work.own + buffer_count * slabs_.panel_floats + which * slabs_.column_floats;
}

void SlabTail::begin(Work& work, const SlabRegion& region) const {
  const auto values = [&](int vector, const float* otherwise) {
    if (vector < 0) return otherwise;
    return chain_.values(vector, region.sample, work.floats) + region.columns.begin;
  };
  work.region = region;
  work.values = input_.view(isa_, region, work.arguments.input, work.own);
  work.weight = values(chain_.norm_weight, nullptr);
  work.shift = values(chain_.norm_bias, row(work, zeros));
}

void SlabTail::run_panel(Work& work) const {
  const bool writes = !mean_ && output_.in_place();
  const size_t before = chain_.before.size();
  const size_t count = before + chain_.after.size();
  for (size_t i = 0; i < count; ++i) {
    if (i == before) normalise(work);
    if (i == before && mean_of_norm_) break;
    apply(work, i < before ? chain_.before[i] : chain_.after[i - before], writes && i + 1 == count);
  }
  if (mean_) {
    store_means(work);
  } else if (!writes || count == 0) {
    output_.store(isa_, work.region, work.arguments.output, work.values);
  }
}

void SlabTail::apply(Work& work, const Step& step, bool last) const {
  const StepContext context{work.floats,
                            &work.arguments.parameters,
                            {work.region.columns.begin, row(work, centre), row(work, scale), work.shift},
                            nullptr};
  StepArguments s = chain_.column_arguments(step, context, work.region.sample, work.region.columns.begin);
  s.src = work.values.data;
  s.src_stride = work.values.stride;
  s.rows = slabs_.rows;
  s.cols = work.region.columns.size();
  bind_operand(s, step, chain_, tensors_, isa_, work.region, work.arguments.parameters,
               work.own + operand_buffer * slabs_.panel_floats);
  const PanelView to = last ? output_.place(work.region, work.arguments.output) : PanelView{work.own, s.cols};
  s.dst = const_cast<float*>(to.data);
  s.dst_stride = to.stride;
  isa_.steps[step.function][static_cast<int>(step.affine)][interleaved](s);
  work.values = to;
}

// Statistics of the panel's slabs, and what the norm does to each column.
void SlabTail::normalise(const Work& work) const {
  const int64_t slabs = work.region.slabs.size();
  const int64_t width = slabs_.slab_columns;
  float* means = row(work, mean);
  float* spreads = row(work, m2);
  if (sums_whole_slabs_) {
    for (int64_t r = 0; r < slabs_.rows; ++r) {
      const float* values = work.values.data + r * work.values.stride;
      isa_.statistics[planar]({values, width, slabs, width, means, spreads, r * width, nullptr});
    }
    for (int64_t i = 0; i < slabs; ++i) finish_slab(work, i, {means[i], spreads[i]});
    return;
  }
  isa_.statistics[interleaved]({work.values.data, work.values.stride, slabs_.rows, work.region.columns.size(),
                                means, spreads, 0, nullptr});
  for (int64_t i = 0; i < slabs; ++i) finish_slab(work, i, merge(means + i * width, spreads + i * width));
}

// The columns of a slab.
SlabTail::Moments SlabTail::merge(const float* means, const float* spreads) const {
  const int64_t width = slabs_.slab_columns;
  const double middle =
      sum_of(width, [&](int64_t c) -> double { return means[c]; }) / static_cast<double>(width);
  const auto rows = static_cast<double>(slabs_.rows);
  const double m2_of_slab = sum_of(width, [&](int64_t c) {
    const double distance = means[c] - middle;
    return spreads[c] + distance * distance * rows;
  });
  return {middle, m2_of_slab};
}

void SlabTail::finish_slab(const Work& work, int64_t slab, const Moments& moments) const {
  const double variance = moments.m2 / static_cast<double>(slabs_.slab_elements());
  const double rstd = 1 / std::sqrt(variance + eps_);
  if (work.arguments.statistics != nullptr) {
    const int64_t index = work.region.sample * slabs_.groups + work.region.slabs.begin + slab;
    work.arguments.statistics[2 * index] = static_cast<float>(moments.mean);
    work.arguments.statistics[2 * index + 1] = static_cast<float>(rstd);
  }
  if (mean_of_norm_) return finish_means(work, slab, moments, rstd);
  const int64_t width = slabs_.slab_columns;
  const int64_t at = slab * width;
  float* __restrict centres = row(work, centre) + at;
  float* __restrict scales = row(work, scale) + at;
  const auto middle = static_cast<float>(moments.mean);
  const auto factor = static_cast<float>(rstd);
  if (work.weight == nullptr) {
    std::fill_n(centres, width, middle);
    std::fill_n(scales, width, factor);
    return;
  }
  const float* __restrict weight = work.weight + at;
  for (int64_t c = 0; c < width; ++c) {
    centres[c] = middle;
    scales[c] = factor * weight[c];
  }
}

// Means over the pixels of the norm's output, in row(scale): one for each channel of the slab.
void SlabTail::finish_means(const Work& work, int64_t slab, const Moments& moments, double rstd) const {
  const int64_t width = slabs_.slab_columns;
  const int64_t channels = width / slabs_.repeat;
  float* means = row(work, scale) + slab * channels;
  if (slabs_.rows == 1) {
    isa_.row_means(work.values.data + slab * width, channels, slabs_.repeat, static_cast<float>(moments.mean),
                   means);
  } else {
    const float* of_columns = row(work, mean) + slab * width;
    for (int64_t c = 0; c < channels; ++c) means[c] = static_cast<float>(of_columns[c] - moments.mean);
  }
  const auto factor = static_cast<float>(rstd);
  if (work.weight == nullptr) {
    for (int64_t c = 0; c < channels; ++c) means[c] *= factor;
    return;
  }
  const float* weight = work.weight + slab * width;
  const float* bias = work.shift + slab * width;
  for (int64_t c = 0; c < channels; ++c) {
    means[c] = means[c] * factor * weight[c * slabs_.repeat] + bias[c * slabs_.repeat];
  }
}

void SlabTail::store_means(const Work& work) const {
  const Range channels{work.region.columns.begin / slabs_.repeat, work.region.columns.end / slabs_.repeat};
  float* means = row(work, scale);
  if (!mean_of_norm_ && slabs_.rows == 1) {
    isa_.row_means(work.values.data, channels.size(), slabs_.repeat, 0, means);
  } else if (!mean_of_norm_) {
    isa_.statistics[interleaved]({work.values.data, work.values.stride, slabs_.rows, channels.size(), means,
                                  row(work, m2), 0, nullptr});
  }
  transfer(isa_, Direction::store, means_, work.arguments.output, {work.region.sample, channels, {0, 1}},
           Orientation::interleaved, means, channels.size());
}

}  // namespace onepass::cpu
