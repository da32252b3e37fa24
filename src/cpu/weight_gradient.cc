// Segments, windows and sums of the gradient of a convolution's weights.
#include "cpu/weight_gradient.h"

#include <algorithm>
#include <sstream>

#include "block/convert.h"
#include "cpu/grid.h"

namespace onepass::cpu {
namespace {

// Positions of a block: the terms of one chain of additions, as the forward has them.
constexpr int64_t max_block_terms = 256;
// A window stays in L2 while the tiles of a segment pass over it.
constexpr int64_t window_budget_floats = 96 * 1024;
constexpr int64_t max_window_floats = int64_t{1} << 28;
// Channels of a segment. A convolution of few taps does little with what is staged, so its segments are
// larger. A 1x1 with 64 and 16 channels would stage for as long as it multiplies.
constexpr int64_t least_fine_channels = 16;
constexpr int64_t most_fine_channels = 128;
constexpr int64_t coarse_channels = 64;
constexpr int64_t coarse_channels_of_few_taps = 128;
constexpr int64_t few_taps = 8;
// Parts: as many tasks as keep any machine busy, as long as what they leave to be summed stays small.
constexpr int64_t wanted_tasks = 64;
constexpr int64_t most_partial_floats = 1024 * 1024;
constexpr int64_t blocks_of_part = 64;  // sums of blocks that are added in f32
constexpr double least_task_multiply_adds = 5e5;
constexpr int64_t floats_per_word = 2;  // of 64 bits

}  // namespace

// ----------------------------------------------------------------------------------------- the numbers

Range WeightGradient::Span::met_by(int64_t k) const {
  const int64_t shift = padding - k * dilation;  // fine = q * stride - shift
  const int64_t begin = shift <= 0 ? 0 : ceil_div(shift, stride);
  const int64_t last = fine - 1 + shift;
  return {begin, last < 0 ? begin : std::clamp(last / stride + 1, begin, std::max(begin, coarse))};
}

bool WeightGradient::Span::is_used(int64_t relative) const {
  for (int64_t k = 0; k < kernel; ++k) {
    if ((relative - k * dilation) % stride == 0) return true;
  }
  return false;
}

WeightGradient::WeightGradient(const BackwardProblem& problem, const Isa& isa) : isa_(isa) {
  const Conv& conv = *problem.forward.block.conv();
  const TensorSpec& coarse = conv.transposed ? problem.forward.input : problem.output_gradient;
  const TensorSpec& fine = conv.transposed ? problem.output_gradient : problem.forward.input;
  coarse_ = TensorMap(coarse);
  fine_ = TensorMap(fine);
  gradient_dtype_ = problem.parameter_gradients[0].dtype;
  threads_ = problem.forward.device.threads;
  batch_ = coarse.sizes[0];
  groups_ = conv.groups;
  group_coarse_ = coarse.sizes[1] / groups_;
  group_fine_ = fine.sizes[1] / groups_;
  const auto rank = static_cast<size_t>(conv.rank);
  for (size_t i = 0; i < rank; ++i) {
    spans_[3 - rank + i] = {coarse.sizes[2 + i], fine.sizes[2 + i],      conv.kernel[i],
                            conv.stride[i],      conv.padding_before[i], conv.dilation[i]};
  }
  choose_segments();
  choose_windows();
  choose_parts();
  lay_out_workspace();
}

std::string WeightGradient::refusal(const BackwardProblem& problem) {
  const Conv& conv = *problem.forward.block.conv();
  int64_t pixels = std::max(least_fine_channels, most_fine_channels);
  for (size_t i = 0; i < static_cast<size_t>(conv.rank); ++i) {
    const int64_t reach = (conv.kernel[i] - 1) * conv.dilation[i] + 1;
    const int64_t rows = i + 1 == static_cast<size_t>(conv.rank) ? max_block_terms * conv.stride[i] : 0;
    if (pixels > max_window_floats / (reach + rows)) return "the kernel reaches too far for a window";
    pixels *= reach + rows;
  }
  return "";
}

void WeightGradient::choose_segments() {
  const int64_t taps = outer_taps() * spans_[2].kernel;
  const int64_t fine_parts =
      ceil_div(group_fine_, std::clamp(most_fine_channels / taps, least_fine_channels, most_fine_channels));
  const int64_t tiles = ceil_div(group_coarse_, tile_width());
  const int64_t most = taps < few_taps ? coarse_channels_of_few_taps : coarse_channels;
  const int64_t coarse_parts = ceil_div(tiles, std::max<int64_t>(1, most / tile_width()));
  for (int64_t group = 0; group < groups_; ++group) {
    for (int64_t i = 0; i < coarse_parts; ++i) {
      const Range part = even_part(tiles, coarse_parts, i);
      const Range coarse{group * group_coarse_ + part.begin * tile_width(),
                         group * group_coarse_ + std::min(group_coarse_, part.end * tile_width())};
      for (int64_t j = 0; j < fine_parts; ++j) {
        const Range fine = even_part(group_fine_, fine_parts, j);
        segments_.push_back({coarse, {group * group_fine_ + fine.begin, group * group_fine_ + fine.end}});
      }
      max_coarse_ = std::max(max_coarse_, round_up(coarse.size(), isa_.lanes));
    }
  }
  max_fine_ = ceil_div(group_fine_, fine_parts);
  // Pixels a power of two apart would share a few sets of L1: 1x1 of 256 and 64 channels took 1.27 times
  // as long.
  const bool one_tap = spans_[2].kernel == 1 || spans_[2].dilation > 1;
  pitch_ = one_tap && max_fine_ > least_fine_channels ? max_fine_ + alignment_floats : max_fine_;
}

void WeightGradient::choose_windows() {
  const auto& [depth, height, width] = spans_;
  col_parts_ = std::max<int64_t>(1, ceil_div(width.coarse, max_block_terms));
  const int64_t cols = ceil_div(width.coarse, col_parts_);
  row_pixels_ = width.window(cols);
  slots_ = std::min(depth.reach(), depth.fine);
  const int64_t rows = window_budget_floats / (slots_ * row_pixels_ * pitch_);  // of the fine side
  const int64_t coarse_rows = std::max<int64_t>(1, (rows - height.reach()) / height.stride + 1);
  row_parts_ = std::max<int64_t>(1, ceil_div(height.coarse, coarse_rows));
  plane_pixels_ = height.window(ceil_div(height.coarse, row_parts_)) * row_pixels_;
  for (size_t narrower = 0; narrower < 2; ++narrower) {
    const int64_t count = cols - static_cast<int64_t>(narrower);
    const int64_t terms = count <= 0 ? 0 : count * block_rows(count);
    for (int64_t t = 0; t < terms; ++t) {
      const int64_t pixel = t / count * height.stride * row_pixels_ + t % count * width.stride;
      offsets_[narrower].push_back(static_cast<int32_t>(pixel * pitch_));
    }
    offsets_[narrower].push_back(0);  // read ahead by the tile
  }
}

void WeightGradient::choose_parts() {
  const auto segments = static_cast<int64_t>(segments_.size());
  partial_floats_ = outer_taps() * max_coarse_ * spans_[2].kernel * max_fine_;
  multiply_adds_ = static_cast<double>(batch_ * groups_ * group_coarse_ * group_fine_ * outer_taps() *
                                       spans_[2].kernel * coarse_.pixels());
  const int64_t blocks = batch_ * ceil_div(coarse_.pixels(), max_block_terms);
  const int64_t wanted = std::max(ceil_div(wanted_tasks, segments), ceil_div(blocks, blocks_of_part));
  const auto worthwhile =
      static_cast<int64_t>(multiply_adds_ / static_cast<double>(segments) / least_task_multiply_adds);
  const int64_t most =
      std::min({unit_count(), worthwhile, most_partial_floats / (segments * partial_floats_)});
  parts_ = std::max<int64_t>(1, std::min(wanted, most));
}

void WeightGradient::lay_out_workspace() {
  const auto segments = static_cast<int64_t>(segments_.size());
  workers_at_ = round_up(parts_ * segments * partial_floats_, alignment_floats);
  // A tile reads up to a vector past the last pixel.
  window_floats_ = round_up(slots_ * plane_pixels_ * pitch_ + isa_.lanes, alignment_floats);
  block_floats_ = round_up(max_block_terms * max_coarse_, alignment_floats);
  const int64_t totals = outer_taps() * spans_[2].kernel * max_fine_ * tile_width() * floats_per_word;
  const int64_t staging = window_floats_ + block_floats_ + slots_ * floats_per_word;
  worker_floats_ = round_up(std::max(staging, totals), alignment_floats);
  workspace_floats_ = workers_at_ + threads_ * worker_floats_;
}

double WeightGradient::padded_multiply_adds() const {
  const int64_t row = spans_[2].dilation == 1 ? spans_[2].kernel * max_fine_ : max_fine_;
  double padded = 0;
  for (const Segment& segment : segments_) {
    for (int64_t tile = 0; tile < tile_count(segment); ++tile) {
      const int64_t width = width_of_tile(segment, tile);
      // A tile of few sums waits for each: the full one has just enough in flight.
      const int64_t sums = width / isa_.lanes * row;
      const int64_t full = isa_.max_tile_vectors * isa_.tile_pixels * 2 / 3;
      const double waiting = std::max(1.0, static_cast<double>(full) / static_cast<double>(sums));
      padded += waiting * static_cast<double>(width * max_fine_);
    }
  }
  return padded * static_cast<double>(outer_taps() * spans_[2].kernel * batch_ * coarse_.pixels());
}

double WeightGradient::staged_elements() const {
  const double windows = static_cast<double>(plane_pixels_ * row_parts_ * col_parts_ * max_fine_) *
                         static_cast<double>(std::min(spans_[0].fine, spans_[0].window(spans_[0].coarse)));
  const double blocks = static_cast<double>(coarse_.pixels() * max_coarse_);
  return (windows + blocks) * static_cast<double>(batch_) * static_cast<double>(segments_.size());
}

std::string WeightGradient::describe() const {
  std::ostringstream out;
  out << "weight gradient: segments of " << max_coarse_ << " x " << max_fine_ << " channels, "
      << segments_.size() << " of them; " << parts_ << (parts_ == 1 ? " part" : " parts")
      << " of the positions, summed in order\n";
  return out.str();
}

// ------------------------------------------------------------------------------------- units and memory

int64_t WeightGradient::unit_count() const {
  return coarse_.pixels() == 0 ? 0 : batch_ * row_parts_ * col_parts_ * spans_[0].coarse;
}

// Depth runs fastest: neighbouring planes of a window stay staged.
WeightGradient::Unit WeightGradient::unit_at(int64_t index) const {
  Unit unit;
  unit.depth = index % spans_[0].coarse;
  index /= spans_[0].coarse;
  unit.cols = even_part(spans_[2].coarse, col_parts_, index % col_parts_);
  index /= col_parts_;
  unit.rows = even_part(spans_[1].coarse, row_parts_, index % row_parts_);
  unit.sample = index / row_parts_;
  return unit;
}

int64_t WeightGradient::width_of_tile(const Segment& segment, int64_t tile) const {
  return std::min(tile_width(), round_up(segment.coarse.size() - tile * tile_width(), isa_.lanes));
}

int64_t WeightGradient::block_rows(int64_t width) const {
  return std::max<int64_t>(1, max_block_terms / width);
}

float* WeightGradient::partial(const Call& call, int64_t part, int64_t segment) const {
  return call.floats + (part * static_cast<int64_t>(segments_.size()) + segment) * partial_floats_;
}

WeightGradient::Worker WeightGradient::worker_at(const Call& call, int worker) const {
  float* floats = call.floats + workers_at_ + worker * worker_floats_;
  return {floats, floats + window_floats_,
          reinterpret_cast<int64_t*>(floats + window_floats_ + block_floats_)};
}

// --------------------------------------------------------------------------------------------- running

void WeightGradient::run(const void* coarse, const void* fine, void* gradient, float* workspace,
                         Executor& executor) const {
  const Call call{coarse, fine, workspace};
  const auto segments = static_cast<int64_t>(segments_.size());
  executor.for_each(parts_ * segments, [&](int64_t task, int worker) {
    run_task(call, task / segments, task % segments, worker_at(call, worker));
  });
  const int64_t tiles = tile_count(segments_[0]);
  executor.for_each(segments * tiles, [&](int64_t task, int worker) {
    const int64_t segment = task / tiles;
    if (task % tiles >= tile_count(segments_[static_cast<size_t>(segment)])) return;
    auto* totals = reinterpret_cast<double*>(worker_at(call, worker).window);
    reduce(call, segment, task % tiles, totals, gradient);
  });
}

void WeightGradient::run_task(const Call& call, int64_t part, int64_t segment_index,
                              const Worker& worker) const {
  const Segment& segment = segments_[static_cast<size_t>(segment_index)];
  float* sums = partial(call, part, segment_index);
  std::fill_n(worker.block, block_floats_, 0.0f);  // lanes without a channel are never written
  const Range units = even_part(unit_count(), parts_, part);
  if (units.size() == 0) std::fill_n(sums, partial_floats_, 0.0f);
  for (int64_t index = units.begin; index < units.end; ++index) {
    const Unit unit = unit_at(index);
    if (index == units.begin || unit.depth == 0) std::fill_n(worker.staged, slots_, int64_t{-1});
    stage_window(call, segment, unit, worker);
    const int64_t step = block_rows(unit.cols.size());
    for (int64_t row = unit.rows.begin; row < unit.rows.end; row += step) {
      const Range rows{row, std::min(unit.rows.end, row + step)};
      stage_block(call, segment, unit, rows, worker);
      const bool add = index > units.begin || row > unit.rows.begin;
      add_block(segment, unit, rows, worker, add, sums);
    }
  }
}

// The planes that the unit's depth meets, unless the one before it left them.
void WeightGradient::stage_window(const Call& call, const Segment& segment, const Unit& unit,
                                  const Worker& worker) const {
  const Span& depths = spans_[0];
  for (int64_t k = 0; k < depths.kernel; ++k) {
    const int64_t depth = depths.first_fine(unit.depth) + k * depths.dilation;
    if (!depths.is_inside(depth) || worker.staged[depth % slots_] == depth) continue;
    stage_plane(call, segment, unit, depth, worker.window + depth % slots_ * plane_pixels_ * pitch_);
    worker.staged[depth % slots_] = depth;
  }
}

// The rows of one plane, zero beside them; rows outside are left as they are, for no tap reads them.
void WeightGradient::stage_plane(const Call& call, const Segment& segment, const Unit& unit, int64_t depth,
                                 float* to) const {
  const auto& [_, heights, widths] = spans_;
  const int64_t first_row = heights.first_fine(unit.rows.begin);
  const Range rows{std::max<int64_t>(0, first_row),
                   std::min(heights.fine, first_row + heights.window(unit.rows.size()))};
  const int64_t first_col = widths.first_fine(unit.cols.begin);
  const int64_t window_cols = widths.window(unit.cols.size());
  const Range cols{std::clamp<int64_t>(first_col, 0, widths.fine),
                   std::clamp<int64_t>(first_col + window_cols, 0, widths.fine)};
  // Whole rows one behind another are one run.
  const bool run = cols.size() == widths.fine && row_pixels_ == widths.fine && heights.stride == 1 &&
                   fine_.strides[1] == widths.fine * fine_.strides[2];
  if (run && rows.size() > 0) {
    stage_pixels(call, segment, unit, depth, rows.begin, cols, rows.size() * widths.fine,
                 to + (rows.begin - first_row) * row_pixels_ * pitch_);
    return;
  }
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    if (!heights.is_used(row - first_row)) continue;
    float* at = to + (row - first_row) * row_pixels_ * pitch_;
    std::fill_n(at, (cols.begin - first_col) * pitch_, 0.0f);
    std::fill(at + (cols.end - first_col) * pitch_, at + window_cols * pitch_, 0.0f);
    if (cols.size() > 0) {
      stage_pixels(call, segment, unit, depth, row, cols, cols.size(),
                   at + (cols.begin - first_col) * pitch_);
    }
  }
}

// `count` pixels of the fine side from the first of `cols` on, channels last.
void WeightGradient::stage_pixels(const Call& call, const Segment& segment, const Unit& unit, int64_t depth,
                                  int64_t row, Range cols, int64_t count, float* to) const {
  const int64_t element = unit.sample * fine_.sample_stride + segment.fine.begin * fine_.channel_stride +
                          depth * fine_.strides[0] + row * fine_.strides[1] + cols.begin * fine_.strides[2];
  TransferArguments t;
  t.panel = to;
  t.panel_stride = pitch_;
  t.rows = count;
  t.cols = segment.fine.size();
  t.tensor = const_cast<char*>(static_cast<const char*>(call.fine)) + element * byte_size(fine_.dtype);
  t.dtype = fine_.dtype;
  t.row_stride = fine_.strides[2];
  t.col_stride = fine_.channel_stride;
  if (pitch_ == 1) {  // a row, not a column
    std::swap(t.rows, t.cols);
    std::swap(t.row_stride, t.col_stride);
  }
  isa_.load(t);
}

// The coarse side of some rows as [tile][position][channel].
void WeightGradient::stage_block(const Call& call, const Segment& segment, const Unit& unit, Range rows,
                                 const Worker& worker) const {
  const int64_t first = (unit.depth * spans_[1].coarse + rows.begin) * spans_[2].coarse + unit.cols.begin;
  const int64_t terms = rows.size() * unit.cols.size();
  float* to = worker.block;
  for (int64_t tile = 0; tile < tile_count(segment); ++tile) {
    const int64_t channel = segment.coarse.begin + tile * tile_width();
    const Region region{
        unit.sample, {channel, std::min(segment.coarse.end, channel + tile_width())}, {first, first + terms}};
    const int64_t width = width_of_tile(segment, tile);
    transfer(isa_, Direction::load, coarse_, call.coarse, region, Orientation::interleaved, to, width);
    to += max_block_terms * width;
  }
}

// The taps of each row of the kernel over the rows of positions at which it lies inside.
void WeightGradient::add_block(const Segment& segment, const Unit& unit, Range rows, const Worker& worker,
                               bool add, float* sums) const {
  const auto& [depths, heights, widths] = spans_;
  const int64_t width = unit.cols.size();
  const bool narrower = width < ceil_div(widths.coarse, col_parts_);
  const int64_t row_floats = row_pixels_ * pitch_;
  const int64_t tap_floats = max_coarse_ * widths.kernel * max_fine_;
  for (int64_t tap = 0; tap < outer_taps(); ++tap, sums += tap_floats) {
    const int64_t kh = tap % heights.kernel;
    const int64_t depth = depths.first_fine(unit.depth) + tap / heights.kernel * depths.dilation;
    const Range met = heights.met_by(kh);
    const Range inside{std::clamp(met.begin, rows.begin, rows.end),
                       std::clamp(met.end, rows.begin, rows.end)};
    if (!depths.is_inside(depth) || inside.size() <= 0) {
      if (!add) std::fill_n(sums, tap_floats, 0.0f);
      continue;
    }
    const int64_t row = (rows.begin - unit.rows.begin) * heights.stride + kh * heights.dilation;
    const float* window = worker.window + depth % slots_ * plane_pixels_ * pitch_ + row * row_floats;
    const Range terms{(inside.begin - rows.begin) * width, (inside.end - rows.begin) * width};
    add_row_of_taps(segment, window, offsets_[narrower ? 1 : 0].data(), terms, worker.block, add, sums);
  }
}

// sums is [tile][tap of the row][fine channel][coarse channel].
void WeightGradient::add_row_of_taps(const Segment& segment, const float* window, const int32_t* offsets,
                                     Range terms, const float* block, bool add, float* sums) const {
  const Span& widths = spans_[2];
  const bool contiguous = widths.dilation == 1;
  const int64_t calls = contiguous ? 1 : widths.kernel;
  const int64_t pixels = contiguous ? widths.kernel * max_fine_ : max_fine_;
  for (int64_t tile = 0; tile < tile_count(segment); ++tile) {
    const int64_t width = width_of_tile(segment, tile);
    for (int64_t i = 0; i < calls; ++i) {
      isa_.channel_tile({window + i * widths.dilation * pitch_, offsets + terms.begin, terms.size(),
                         block + terms.begin * width, sums, width, pixels,
                         static_cast<int>(width / isa_.lanes), add});
      sums += pixels * width;
    }
    block += max_block_terms * width;
  }
}

// One tile: the parts in order, then to where the weights lie. All taps at once, so that they are written as
// runs of memory.
void WeightGradient::reduce(const Call& call, int64_t segment_index, int64_t tile, double* totals,
                            void* gradient) const {
  const Segment& segment = segments_[static_cast<size_t>(segment_index)];
  const int64_t row_taps = spans_[2].kernel;
  const int64_t width = width_of_tile(segment, tile);
  const int64_t count = row_taps * max_fine_ * width;  // of a row of taps
  const int64_t row_stride = max_coarse_ * row_taps * max_fine_;
  const int64_t at = tile * tile_width() * row_taps * max_fine_;
  std::fill_n(totals, outer_taps() * count, 0.0);
  for (int64_t part = 0; part < parts_; ++part) {
    const float* sums = partial(call, part, segment_index) + at;
    for (int64_t row = 0; row < outer_taps(); ++row) {
      double* to = totals + row * count;
      for (int64_t i = 0; i < count; ++i) to[i] += static_cast<double>(sums[row * row_stride + i]);
    }
  }
  const int64_t first = segment.coarse.begin + tile * tile_width();
  const int64_t channels = std::min(width, segment.coarse.end - first);
  const int64_t fine = segment.fine.begin % group_fine_;
  const int64_t taps = outer_taps() * row_taps;
  const auto store_all = [&](auto&& store) {
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t element = ((first + c) * group_fine_ + fine) * taps;
      for (int64_t f = 0; f < segment.fine.size(); ++f) {
        const double* from = totals + f * width + c;
        for (int64_t k = 0; k < taps; ++k) store(element + f * taps + k, from[k * max_fine_ * width]);
      }
    }
  };
  if (gradient_dtype_ == DType::f32) {
    store_all([to = static_cast<float*>(gradient)](int64_t element, double value) {
      to[element] = static_cast<float>(value);
    });
  } else {
    store_all([&](int64_t element, double value) {
      store_element(gradient_dtype_, value,
                    static_cast<char*>(gradient) + element * byte_size(gradient_dtype_));
    });
  }
}

}  // namespace onepass::cpu
