// Parts, chunks and sums of the gradient of weights in groups of few channels.
#include "cpu/group_weight_gradient.h"

#include <algorithm>
#include <sstream>

#include "block/convert.h"
#include "cpu/convolver.h"
#include "cpu/grid.h"

namespace onepass::cpu {
namespace {

// Parts: as many tasks as keep any machine busy, as long as what they leave to be summed stays small.
constexpr int64_t wanted_tasks = 64;
constexpr int64_t most_partial_floats = 1024 * 1024;
constexpr int64_t chains_of_part = 64;  // sums of chains that are added in f32
constexpr double least_task_multiply_adds = 5e5;

const TensorSpec& coarse_of(const BackwardProblem& problem) {
  return problem.forward.block.conv()->transposed ? problem.forward.input : problem.output_gradient;
}

const TensorSpec& fine_of(const BackwardProblem& problem) {
  return problem.forward.block.conv()->transposed ? problem.output_gradient : problem.forward.input;
}

// Those of the ordinary convolution that takes the fine side to the coarse one.
std::array<Axis, 3> axes_of(const BackwardProblem& problem) {
  Conv conv = *problem.forward.block.conv();
  conv.transposed = false;
  return make_axes(conv, fine_of(problem).sizes, coarse_of(problem).sizes);
}

GroupSizes sizes_of(const BackwardProblem& problem) {
  const int64_t groups = problem.forward.block.conv()->groups;
  return {groups, coarse_of(problem).sizes[1] / groups, fine_of(problem).sizes[1] / groups};
}

}  // namespace

std::string GroupWeightGradient::refusal(const BackwardProblem& problem) {
  return GroupWindows::refusal(axes_of(problem), sizes_of(problem));
}

GroupWeightGradient::GroupWeightGradient(const BackwardProblem& problem, const Isa& isa)
    : isa_(isa),
      coarse_(coarse_of(problem)),
      gradient_dtype_(problem.parameter_gradients[0].dtype),
      batch_(coarse_of(problem).sizes[0]),
      windows_(axes_of(problem), TensorMap(fine_of(problem)), sizes_of(problem), coarse_of(problem).sizes[1],
               isa) {
  for (const Axis& axis : windows_.axes()) taps_ *= axis.kernel;
  partial_floats_ = taps_ * windows_.sizes().fine * windows_.channel_pitch();
  choose_parts();
  const auto segments = static_cast<int64_t>(windows_.segments().size());
  workers_at_ = round_up(parts_ * segments * partial_floats_, alignment_floats);
  const int64_t gradients = max_chain_terms * windows_.channel_pitch();
  worker_floats_ = round_up(windows_.floats() + gradients, alignment_floats);
  workspace_floats_ = workers_at_ + problem.forward.device.threads * worker_floats_;
}

void GroupWeightGradient::choose_parts() {
  const auto segments = static_cast<int64_t>(windows_.segments().size());
  const int64_t chains = batch_ * ceil_div(coarse_.pixels(), max_chain_terms);
  const int64_t wanted = std::max(ceil_div(wanted_tasks, segments), ceil_div(chains, chains_of_part));
  const auto worthwhile =
      static_cast<int64_t>(padded_multiply_adds() / static_cast<double>(segments) / least_task_multiply_adds);
  const int64_t most =
      std::min({unit_count(), worthwhile, most_partial_floats / (segments * partial_floats_)});
  parts_ = std::max<int64_t>(1, std::min(wanted, most));
}

double GroupWeightGradient::padded_multiply_adds() const {
  return static_cast<double>(batch_ * coarse_.pixels()) *
         static_cast<double>(round_up(windows_.lanes_of_all(), isa_.lanes) * windows_.sizes().fine * taps_);
}

double GroupWeightGradient::staged_elements() const {
  const auto gradients = static_cast<double>(coarse_.pixels() * windows_.lanes_of_all());
  return static_cast<double>(batch_) * (windows_.staged_elements() + gradients);
}

std::string GroupWeightGradient::describe() const {
  std::ostringstream out;
  out << "weight gradient: lanes of several groups, segments of " << windows_.max_segment() << " channels, "
      << windows_.segments().size() << " of them; " << parts_ << (parts_ == 1 ? " part" : " parts")
      << " of the positions, summed in order\n";
  return out.str();
}

float* GroupWeightGradient::partial(float* workspace, int64_t part, int64_t segment) const {
  const auto segments = static_cast<int64_t>(windows_.segments().size());
  return workspace + (part * segments + segment) * partial_floats_;
}

void GroupWeightGradient::run(const void* coarse, const void* fine, void* gradient, float* workspace,
                              Executor& executor) const {
  const auto segments = static_cast<int64_t>(windows_.segments().size());
  executor.for_each(parts_ * segments, [&](int64_t task, int worker) {
    run_task(coarse, fine, task / segments, task % segments,
             partial(workspace, task / segments, task % segments),
             workspace + workers_at_ + worker * worker_floats_);
  });
  executor.for_each(segments, [&](int64_t segment, int) { reduce(workspace, segment, gradient); });
}

void GroupWeightGradient::run_task(const void* coarse, const void* fine, int64_t part, int64_t segment,
                                   float* sums, float* worker) const {
  std::fill_n(sums, partial_floats_, 0.0f);
  const Range channels = windows_.segments()[static_cast<size_t>(segment)];
  float* gradients = worker + windows_.floats();
  const auto& [_, heights, widths] = windows_.axes();
  const Range units = even_part(unit_count(), parts_, part);
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t sample = unit / windows_.block_count();
    const GroupBlock block = windows_.block_at(unit % windows_.block_count());
    windows_.stage(fine, sample, channels, block, worker);
    const int64_t col_parts = std::max<int64_t>(1, ceil_div(block[2].size(), max_chain_terms));
    const bool whole = block[2].size() == widths.out;
    const int64_t rows = whole ? std::max<int64_t>(1, max_chain_terms / std::max<int64_t>(1, widths.out)) : 1;
    for (int64_t d = block[0].begin; d < block[0].end; ++d) {
      for (int64_t h = block[1].begin; h < block[1].end; h += rows) {
        for (int64_t i = 0; i < col_parts; ++i) {
          const Range cols = even_part(block[2].size(), col_parts, i);
          const Chunk chunk{d,
                            {h, std::min(block[1].end, h + rows)},
                            {block[2].begin + cols.begin, block[2].begin + cols.end}};
          const int64_t pixel = (d * heights.out + h) * widths.out + chunk.cols.begin;
          const Region region{sample, channels, {pixel, pixel + chunk.rows.size() * chunk.cols.size()}};
          transfer(isa_, Direction::load, coarse_, coarse, region, Orientation::interleaved, gradients,
                   windows_.channel_pitch());
          add_chunk(chunk, block, channels, worker, gradients, sums);
        }
      }
    }
  }
}

// Every row of taps over the rows of positions at which it lies inside.
void GroupWeightGradient::add_chunk(const Chunk& chunk, const GroupBlock& block, const Range& channels,
                                    const float* window, const float* gradients, float* sums) const {
  const auto& [depths, heights, widths] = windows_.axes();
  const int64_t pitch = windows_.channel_pitch();
  GroupGradientArguments t;
  t.coarse_stride = pitch;
  t.coarse_row = chunk.cols.size() * pitch;
  t.fine_stride = widths.stride * windows_.pixel_pitch();
  t.fine_row = heights.stride * windows_.row_pitch();
  t.tap_stride = widths.dilation * windows_.pixel_pitch();
  t.taps = widths.kernel;
  t.pixels = chunk.cols.size();
  t.channels = channels.size();
  t.sums = sums;
  t.sums_stride = pitch;
  // Windows begin at the first tap of a block's first position.
  const int64_t column = (chunk.cols.begin - block[2].begin) * widths.stride;
  for (int64_t kd = 0; kd < depths.kernel; ++kd) {
    const int64_t plane = (chunk.depth - block[0].begin) * depths.stride + kd * depths.dilation;
    const int64_t depth = plane + block[0].begin * depths.stride - depths.padding;
    for (int64_t kh = 0; kh < heights.kernel; ++kh) {
      const auto is_inside = [&, heights = heights](int64_t h) {
        const int64_t at = h * heights.stride - heights.padding + kh * heights.dilation;
        return at >= 0 && at < heights.in;
      };
      Range rows = chunk.rows;
      while (rows.size() > 0 && !is_inside(rows.begin)) ++rows.begin;
      while (rows.size() > 0 && !is_inside(rows.end - 1)) --rows.end;
      const bool meets = depth >= 0 && depth < depths.in && rows.size() > 0;
      const int64_t line = (rows.begin - block[1].begin) * heights.stride + kh * heights.dilation;
      t.rows = rows.size();
      t.coarse = gradients + (rows.begin - chunk.rows.begin) * t.coarse_row;
      for (int64_t i = 0; i < windows_.sizes().fine; ++i, t.sums += t.taps * pitch) {
        if (!meets) continue;
        t.fine = window + plane * windows_.plane_pitch() + line * windows_.row_pitch() +
                 column * windows_.pixel_pitch() + i * pitch;
        isa_.group_gradient(t);
      }
    }
  }
}

// The parts in order, then to where the weights lie.
void GroupWeightGradient::reduce(float* workspace, int64_t segment, void* gradient) const {
  const Range channels = windows_.segments()[static_cast<size_t>(segment)];
  const int64_t row_taps = windows_.axes()[2].kernel;
  const int64_t fine = windows_.sizes().fine;
  for (int64_t c = channels.begin; c < channels.end; ++c) {
    for (int64_t i = 0; i < fine; ++i) {
      for (int64_t k = 0; k < taps_; ++k) {
        const int64_t row = (k / row_taps * fine + i) * row_taps + k % row_taps;
        const int64_t at = row * windows_.channel_pitch() + c - channels.begin;
        double total = 0;
        for (int64_t part = 0; part < parts_; ++part) total += partial(workspace, part, segment)[at];
        const int64_t element = (c * fine + i) * taps_ + k;
        store_element(gradient_dtype_, total,
                      static_cast<char*>(gradient) + element * byte_size(gradient_dtype_));
      }
    }
  }
}

}  // namespace onepass::cpu
