// Runs a block on the CPU: waves of tasks, the panels of a task, and the statistics between the passes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "block/convert.h"
#include "cpu/block_kernel.h"

namespace onepass::cpu {
namespace {

// Rows of planar panels from this length on are worth a call of their own for each step.
constexpr int64_t least_row_floats = 512;
constexpr float unbounded = std::numeric_limits<float>::infinity();

// Channels whose statistics or means one task merges: handing out a task takes as long as a few of them, and
// two threads that write means side by side move a cache line (16 to 96 channels and a mean @ 256x16x6x3:
// 1.9 ms on one thread and 2.4 on two with a task for each channel, now 0.85 and 0.54).
constexpr int64_t finished_channels = 256;

// The form of a step for arguments of at most this magnitude.
Affine form_within(float bound) {
  if (bound <= tiny_limit) return Affine::tiny;
  if (bound <= small_limit) return Affine::small;
  return bound <= narrow_limit ? Affine::narrow : Affine::none;
}

}  // namespace

// ------------------------------------------------------------------------------------- units and memory

// Pixels of the block whose statistics stand at this index.
int64_t BlockKernel::block_pixels(const Pass& pass, int64_t block) const {
  if (&pass == &first_ && convolution_) return convolution_->block_pixels(block);
  return even_part(pixels_, pass.grid.pixel_parts, block).size();
}

// Means of a unit's channels in one block, then as many sums of squared distances.
float* BlockKernel::statistics_of(const Call& call, int64_t unit, int64_t block) const {
  const int64_t blocks = std::max(first_.statistics_blocks, second_.statistics_blocks);
  return call.floats + statistics_at_ + ((unit - call.first_unit) * blocks + block) * 2 * units_.channels;
}

// Centre, scale and shift of a unit's channels.
float* BlockKernel::coefficients_of(const Call& call, int64_t unit) const {
  return call.floats + coefficients_at_ + (unit - call.first_unit) * 3 * (units_.channels + Chain::slack());
}

// Two panels, running statistics, and what the convolution needs.
float* BlockKernel::worker_floats(const Call& call, int worker) const {
  return call.floats + workers_at_ + worker * worker_floats_;
}

BlockKernel::Running BlockKernel::running_of(const Call& call, int worker) const {
  float* mean = worker_floats(call, worker) + 2 * panel_floats_;
  return {mean, mean + units_.channels + Chain::slack(), 0};
}

BlockKernel::Endpoint BlockKernel::middle_of(const Call& call, int64_t unit) const {
  if (middle_ == Middle::output) return {&output_, call.arguments.output};
  if (middle_ == Middle::input) return {&input_, call.arguments.input};
  if (middle_ == Middle::none) return {};
  const float* slab = call.floats + slab_at_ + (unit - call.first_unit) * units_.channels * pixels_;
  return {&slab_, slab, units_.at(unit).channels.begin};
}

// --------------------------------------------------------------------------------------------- running

void BlockKernel::run(const Arguments& arguments, void* workspace, Executor& executor) const {
  if (batch_ == 0) return;
  if (copied_weights_ == 0) return run_waves(arguments, workspace, executor);
  Arguments copied = arguments;
  if (arguments.packed != nullptr) {
    copied.parameters[0] = static_cast<const float*>(arguments.packed) + kept_weights_at();
  } else {
    float* weights = static_cast<float*>(workspace) + weights_at_;
    copy_weights(arguments.parameters[0], weights, executor);
    copied.parameters[0] = weights;
  }
  run_waves(copied, workspace, executor);
}

void BlockKernel::pack(const std::vector<const void*>& parameters, void* packed, Executor& executor) const {
  std::vector<float> vectors(static_cast<size_t>(chain_.workspace_floats));
  chain_.load_parameters(problem_, parameters, vectors.data());
  const void* weights = parameters[0];
  if (copied_weights_ > 0) {
    float* const copy = static_cast<float*>(packed) + kept_weights_at();
    copy_weights(weights, copy, executor);
    weights = copy;
  }
  const float* bias = chain_.values_or_null(chain_.conv_bias, 0, vectors.data());
  convolution_->pack(weights, bias, static_cast<float*>(packed), executor);
}

// [tap][channel] becomes [channel][tap] for each of the outermost channels.
void BlockKernel::copy_weights(const void* weights, float* to, Executor& executor) const {
  const TensorSpec& spec = problem_.parameters[0];
  const int64_t outer = spec.sizes[0];
  const int64_t inner = spec.sizes[1];
  const int64_t taps = copied_weights_ / outer / inner;
  executor.for_each(outer, [&](int64_t i, int) {
    TransferArguments t;
    t.panel = to + i * inner * taps;
    t.panel_stride = taps;
    t.rows = inner;
    t.cols = taps;
    t.tensor =
        const_cast<char*>(static_cast<const char*>(weights)) + i * inner * taps * byte_size(spec.dtype);
    t.dtype = spec.dtype;
    t.row_stride = 1;
    t.col_stride = inner;
    isa_.load(t);
  });
}

void BlockKernel::run_waves(const Arguments& arguments, void* workspace, Executor& executor) const {
  Call call{arguments, static_cast<float*>(workspace), 0};
  chain_.load_parameters(problem_, arguments.parameters, call.floats);
  if (convolution_ && arguments.packed == nullptr) {
    const float* bias = chain_.values_or_null(chain_.conv_bias, 0, call.floats);
    convolution_->pack(arguments.parameters[0], bias, call.floats + packed_at_, executor);
  }
  const int64_t groups = group_count_ / units_.per_sample;  // slabs of a unit
  const int64_t finish_parts = std::clamp<int64_t>(units_.channels / finished_channels, 1, groups);
  const int64_t mean_parts = ceil_div(units_.channels, finished_channels);
  const int64_t tasks = first_tasks();
  const int64_t second_tasks = second_.grid.count();
  const auto second = [&](const Call& of, int64_t index, int worker) {
    second_pass(of, of.first_unit + index / second_tasks, index % second_tasks, worker);
  };
  // Threads that run out of first-pass tasks take the second pass of the previous wave; its last quarter is
  // kept for them. Tasks of a convolution are long: otherwise a thread would idle at the end of each wave
  // (s60 on two threads: 0.3 of 11.2 ms).
  const bool overlaps = convolution_ && middle_ == Middle::output && executor.concurrency() > 1;
  Call before = call;
  int64_t waiting = 0;  // tasks of that second pass
  for (int64_t first = 0; first < unit_count(); first += wave_units_) {
    call.first_unit = first;
    const int64_t units = std::min(wave_units_, unit_count() - first);
    const int64_t early = waiting - waiting / 4;
    const int64_t parts = ceil_div(units, units_per_task());
    const int64_t late = early + parts * tasks;
    executor.for_each(parts * tasks + waiting, [&](int64_t index, int worker) {
      if (index < early) return second(before, index, worker);
      if (index >= late) return second(before, early + index - late, worker);
      const Range part = even_part(units, parts, (index - early) / tasks);
      first_pass(call, {first + part.begin, first + part.end}, (index - early) % tasks, worker);
    });
    if (!statistics_) continue;
    executor.for_each(units * finish_parts, [&](int64_t index, int) {
      finish(call, first + index / finish_parts, even_part(groups, finish_parts, index % finish_parts));
    });
    if (middle_ == Middle::none) continue;
    before.first_unit = first;
    waiting = units * second_tasks;
    if (overlaps) continue;
    executor.for_each(waiting, [&](int64_t index, int worker) { second(call, index, worker); });
    waiting = 0;
    if (!mean_) continue;
    executor.for_each(units * mean_parts, [&](int64_t index, int) {
      store_means(call, second_, first + index / mean_parts,
                  even_part(units_.channels, mean_parts, index % mean_parts));
    });
  }
  if (waiting == 0) return;
  executor.for_each(waiting, [&](int64_t index, int worker) { second(before, index, worker); });
}

int64_t BlockKernel::first_tasks() const {
  if (!convolution_) return first_.grid.count();
  size_t segments = 0;
  for (size_t i = 0; i + 1 < unit_segments_.size(); ++i) {
    segments = std::max(segments, unit_segments_[i + 1] - unit_segments_[i]);
  }
  return ceil_div(static_cast<int64_t>(segments), convolution_->segments_per_task()) *
         convolution_->block_count();
}

void BlockKernel::first_pass(const Call& call, Range units, int64_t task, int worker) const {
  if (convolution_) return convolve_task(call, units, task, worker);
  Endpoint sink;
  if (middle_ == Middle::output || !statistics_) sink = {&output_, call.arguments.output};
  stream_task(call, first_, units.begin, task, worker, {&input_, call.arguments.input}, sink, statistics_);
}

// Several units are those of samples that are not cut.
void BlockKernel::convolve_task(const Call& call, Range units, int64_t task, int worker) const {
  const auto part = static_cast<size_t>(units.begin % units_.per_sample);
  const int64_t block = task % convolution_->block_count();
  const auto count = static_cast<size_t>(convolution_->segments_per_task());
  const size_t begin = unit_segments_[part] + static_cast<size_t>(task / convolution_->block_count()) * count;
  const size_t end = std::min(begin + count, unit_segments_[part + 1]);
  const int64_t first_sample = units_.at(units.begin).sample;
  for (size_t segment = begin; segment < end; ++segment) {
    Running running = running_of(call, worker);
    float* scratch = running.m2 + units_.channels + Chain::slack();
    int64_t unit = units.begin;
    const auto keep = [&] {
      if (!statistics_) return;
      keep_statistics(call, unit, convolution_->segments()[segment].channels, block, running);
    };
    const auto consume = [&](const Panel& sums) {
      const int64_t next = units.begin + sums.region.sample - first_sample;
      if (next != unit) {
        keep();
        unit = next;
        running = running_of(call, worker);
      }
      const Panel panel = oriented(sums, worker_floats(call, worker));
      const Endpoint sink = statistics_ ? middle_of(call, unit) : Endpoint{&output_, call.arguments.output};
      process(call, first_, unit, worker, panel.region, {panel.data, panel.stride}, panel.bound, panel.data,
              panel.stride, sink, statistics_ ? &running : nullptr);
    };
    const float* const packed = call.arguments.packed != nullptr
                                    ? static_cast<const float*>(call.arguments.packed)
                                    : call.floats + packed_at_;
    const bool window_is_staged = segment > begin && convolution_->share_window(segment - 1, segment);
    const Range samples{first_sample, first_sample + units.size()};
    convolution_->run(call.arguments, packed, scratch, {samples, segment, block, window_is_staged}, consume);
    keep();
  }
}

// A panel of the convolution in the orientation of the first pass.
Panel BlockKernel::oriented(const Panel& panel, float* scratch) const {
  if (first_.orientation == convolution_->orientation()) return panel;
  const int64_t pixels = panel.region.pixels.size();
  TransferArguments t;
  t.panel = panel.data;
  t.panel_stride = panel.stride;
  t.rows = pixels;
  t.cols = panel.region.channels.size();
  t.tensor = reinterpret_cast<char*>(scratch);
  t.row_stride = 1;
  t.col_stride = pixels;
  isa_.store(t);
  return {scratch, pixels, panel.region, panel.bound};
}

void BlockKernel::second_pass(const Call& call, int64_t unit, int64_t task, int worker) const {
  const Endpoint sink = mean_ ? Endpoint{} : Endpoint{&output_, call.arguments.output};
  stream_task(call, second_, unit, task, worker, middle_of(call, unit), sink, mean_);
}

// The panels of one task, from a tensor through the steps of the pass.
void BlockKernel::stream_task(const Call& call, const Pass& pass, int64_t unit, int64_t task, int worker,
                              const Endpoint& source, const Endpoint& sink, bool statistics) const {
  const Unit whole = units_.at(unit);
  const Range part = pass.grid.channel_range(task);
  const Range channels{whole.channels.begin + part.begin, whole.channels.begin + part.end};
  const Range pixels = pass.grid.pixel_range(task);
  const PanelExtent panel(pass.cut, channels.size(), pixels.size(), stream_panel_floats);
  float* scratch = worker_floats(call, worker);
  for (int64_t c = channels.begin; c < channels.end; c += panel.channels) {
    Region region{whole.sample, {c, std::min(channels.end, c + panel.channels)}, {}};
    Running running = running_of(call, worker);
    for (int64_t p = pixels.begin; p < pixels.end; p += panel.pixels) {
      region.pixels = {p, std::min(pixels.end, p + panel.pixels)};
      const PanelView view =
          panel_view(isa_, *source.map, source.base, source.local(region), pass.orientation, scratch);
      process(call, pass, unit, worker, region, view, unbounded, scratch, region.cols(pass.orientation), sink,
              statistics ? &running : nullptr);
    }
    if (statistics) keep_statistics(call, unit, region.channels, task % pass.grid.pixel_parts, running);
  }
}

void BlockKernel::process(const Call& call, const Pass& pass, int64_t unit, int worker, const Region& region,
                          PanelView source, float bound, float* scratch, int64_t scratch_stride,
                          const Endpoint& sink, Running* running) const {
  const bool in_place = sink.map != nullptr && sink.map->is_panel(pass.orientation);
  // Channel by channel where rows are long: what reads a row finds it in L1, whatever else the
  // panel holds (s60: 0.4 of 24 ms). Channels that are turned are stored together.
  if (pass.orientation == Orientation::planar && region.channels.size() > 1 &&
      region.pixels.size() >= least_row_floats && (sink.map == nullptr || in_place)) {
    const int64_t pixels_before = running != nullptr ? running->pixels : 0;
    for (int64_t c = 0; c < region.channels.size(); ++c) {
      const int64_t channel = region.channels.begin + c;
      Running of_channel;
      if (running != nullptr) of_channel = {running->mean + c, running->m2 + c, pixels_before};
      process(call, pass, unit, worker, {region.sample, {channel, channel + 1}, region.pixels},
              {source.data + c * source.stride, source.stride}, bound, scratch + c * scratch_stride,
              scratch_stride, sink, running != nullptr ? &of_channel : nullptr);
    }
    if (running != nullptr) running->pixels += region.pixels.size();
    return;
  }
  RowSums sums;
  for (size_t i = 0; i < pass.steps.size(); ++i) {
    float* to = scratch;
    int64_t to_stride = scratch_stride;
    const bool last = i + 1 == pass.steps.size();
    if (in_place && last) {
      to = reinterpret_cast<float*>(address(*sink.map, sink.base, sink.local(region)));
      to_stride = sink.map->panel_stride(pass.orientation);
    }
    apply_step(call, pass.steps[i], unit, worker, region, pass.orientation, source, bound, to, to_stride,
               last && region.rows(pass.orientation) == 1 ? &sums : nullptr);
    source = {to, to_stride};
    bound = unbounded;
  }
  if (running != nullptr) {
    const int64_t rows = region.rows(pass.orientation);
    const int64_t cols = region.cols(pass.orientation);
    isa_.statistics[static_cast<int>(pass.orientation)](
        {source.data, source.stride, rows, cols, running->mean, running->m2, running->pixels, &sums});
    running->pixels += region.pixels.size();
  }
  const bool stored = in_place && !pass.steps.empty();
  if (sink.map != nullptr && !stored) {
    transfer(isa_, Direction::store, *sink.map, sink.base, sink.local(region), pass.orientation,
             const_cast<float*>(source.data), source.stride);
  }
}

void BlockKernel::apply_step(const Call& call, const Step& step, int64_t unit, int worker,
                             const Region& region, Orientation orientation, PanelView source, float bound,
                             float* to, int64_t to_stride, RowSums* sums) const {
  StepContext context{
      call.floats, &call.arguments.parameters, {}, worker_floats(call, worker) + panel_floats_};
  if (step.affine == Affine::norm) {
    context.norm.first_column = units_.at(unit).channels.begin;
    context.norm.centre = coefficients_of(call, unit);
    context.norm.scale = context.norm.centre + units_.channels + Chain::slack();
    context.norm.shift = context.norm.scale + units_.channels + Chain::slack();
  }
  StepArguments s = chain_.step_arguments(isa_, step, context, region, orientation, source);
  s.dst = to;
  s.dst_stride = to_stride;
  s.sums = sums;
  Affine affine = step.affine;
  if (affine == Affine::none) affine = form_within(bound);
  if (affine == Affine::norm && norm_stays_raised(s, region.channels.size())) affine = Affine::raised;
  isa_.steps[step.function][static_cast<int>(affine)][static_cast<int>(orientation)](s);
}

// Whether the norm leaves all of these channels above raised_limit. Values with a lower bound, such as those
// of swish, seldom fall below the cut-off of hardswish after the norm.
bool BlockKernel::norm_stays_raised(const StepArguments& step, int64_t channels) const {
  constexpr float most = 1e4f;  // of what is added up: it rounds by less than raised_limit is from -3
  for (int64_t c = 0; c < channels; ++c) {
    const float least = (chain_.least_before_norm - step.centre[c]) * step.scale[c];
    const bool increases = step.scale[c] >= 0;
    if (!(increases && least >= -most && least + step.shift[c] >= raised_limit)) return false;
  }
  return true;
}

// ------------------------------------------------------------------------------------------ statistics

void BlockKernel::keep_statistics(const Call& call, int64_t unit, const Range& channels, int64_t block,
                                  const Running& running) const {
  const int64_t first = channels.begin - units_.at(unit).channels.begin;
  float* mean = statistics_of(call, unit, block) + first;
  std::copy_n(running.mean, channels.size(), mean);
  std::copy_n(running.m2, channels.size(), mean + units_.channels);
}

// All blocks of one channel, in order; in double, so that many blocks lose nothing. `first`: of block 0.
BlockKernel::Moments BlockKernel::channel_moments(const Pass& pass, const float* first) const {
  Moments total{first[0], first[units_.channels]};
  if (pass.statistics_blocks > 1) join_blocks(pass, first, total);
  return total;
}

void BlockKernel::join_blocks(const Pass& pass, const float* first, Moments& total) const {
  for (int64_t block = 1; block < pass.statistics_blocks; ++block) {
    const float* at = first + block * 2 * units_.channels;
    const Pass::Join& join = pass.joins[static_cast<size_t>(block)];
    const double delta = at[0] - total.mean;
    total.mean += std::isfinite(delta) ? delta * join.share : at[0];
    total.m2 += at[units_.channels] + delta * delta * join.spread;
  }
}

// Slabs of a unit: the mean and deviation of each from those of its channels, then what the norm does to each
// channel. Without a norm, the means of their channels.
void BlockKernel::finish(const Call& call, int64_t unit, Range groups) const {
  const int64_t count = channels_ / group_count_;
  const Range channels{groups.begin * count, groups.end * count};  // of the unit
  if (problem_.block.norm() == nullptr) return store_means(call, first_, unit, channels);
  const Unit whole = units_.at(unit);
  const int64_t first_channel = whole.channels.begin + channels.begin;
  const float* statistics = statistics_of(call, unit, 0) + channels.begin;
  SlabNorms norms;
  norms.channel_share = 1 / static_cast<double>(count);
  norms.element_share = norms.channel_share / static_cast<double>(pixels_);
  norms.weight = chain_.values_or_null(chain_.norm_weight, whole.sample, call.floats);
  norms.bias = chain_.values_or_null(chain_.norm_bias, whole.sample, call.floats);
  if (norms.weight != nullptr) norms.weight += first_channel;
  if (norms.bias != nullptr) norms.bias += first_channel;
  const int64_t pitch = units_.channels + Chain::slack();
  norms.centre = coefficients_of(call, unit) + channels.begin;
  norms.scale = norms.centre + pitch;
  norms.shift = norms.scale + pitch;
  if (mean_of_norm_) norms.means = means_of(call, unit, channels.begin);
  if (call.arguments.statistics != nullptr)
    norms.statistics = call.arguments.statistics + 2 * (whole.sample * group_count_ + first_channel / count);
  std::vector<Moments> moments(static_cast<size_t>(count));
  for (int64_t slab = 0; slab < groups.size(); ++slab, statistics += count) {
    for (int64_t c = 0; c < count; ++c)
      moments[static_cast<size_t>(c)] = channel_moments(first_, statistics + c);
    finish_slab(norms, slab, moments);
  }
}

void BlockKernel::finish_slab(const SlabNorms& norms, int64_t slab,
                              const std::vector<Moments>& moments) const {
  const auto pixels = static_cast<double>(pixels_);
  double mean = 0;
  for (const Moments& of_channel : moments) mean += of_channel.mean;
  mean *= norms.channel_share;
  double m2 = 0;
  for (const Moments& of_channel : moments) {
    const double distance = of_channel.mean - mean;
    m2 += of_channel.m2 + distance * distance * pixels;
  }
  const double rstd = 1 / std::sqrt(m2 * norms.element_share + eps_);
  if (norms.statistics != nullptr) {
    norms.statistics[2 * slab] = static_cast<float>(mean);
    norms.statistics[2 * slab + 1] = static_cast<float>(rstd);
  }
  int64_t c = slab * std::ssize(moments);
  for (const Moments& of_channel : moments) {
    const double gamma = norms.weight != nullptr ? norms.weight[c] : 1;
    const double beta = norms.bias != nullptr ? norms.bias[c] : 0;
    norms.centre[c] = static_cast<float>(mean);
    norms.scale[c] = static_cast<float>(rstd * gamma);
    norms.shift[c] = static_cast<float>(beta);
    if (mean_of_norm_) norms.means.store(c, (of_channel.mean - mean) * rstd * gamma + beta);
    ++c;
  }
}

// Means over the pixels of these channels of a unit, from what a pass has summed.
void BlockKernel::store_means(const Call& call, const Pass& pass, int64_t unit, Range channels) const {
  const float* const statistics = statistics_of(call, unit, 0) + channels.begin;
  const Means means = means_of(call, unit, channels.begin);
  for (int64_t c = 0; c < channels.size(); ++c) means.store(c, channel_moments(pass, statistics + c).mean);
}

// Where the means of a unit's channels go, from this one on.
BlockKernel::Means BlockKernel::means_of(const Call& call, int64_t unit, int64_t channel) const {
  const Unit whole = units_.at(unit);
  const int64_t absolute = whole.channels.begin + channel;
  const Region region{whole.sample, {absolute, absolute + 1}, {0, 1}};
  return {output_.dtype, address(output_, call.arguments.output, region),
          output_.channel_stride * byte_size(output_.dtype)};
}

void BlockKernel::Means::store(int64_t channel, double value) const {
  store_element(dtype, value, first + channel * stride_bytes);
}

}  // namespace onepass::cpu
