// Cutting a convolution into tasks: segments of channels, blocks of pixels, chunks of terms, windows.
#include "cpu/convolution_stage.h"

#include <algorithm>
#include <limits>
#include <sstream>

namespace onepass::cpu {
namespace {

// Sums of a block wait in L2 between chunks of input channels: 400 KiB leave room for the window and the
// weights.
constexpr int64_t block_sum_floats = 100 * 1024;
// A finished panel is turned and read three to five times by the steps that follow: 32 KiB, half of L1. Where
// pixels are contiguous the steps take one channel at a time, and each channel may have this much. Fewer
// panels cost less to hand on (s60: 21.0 ms instead of 22.0 with 32 KiB for four channels).
constexpr int64_t panel_floats = 8 * 1024;
// Fewer pixels than this in a panel and the weights, not the sums, would stream through L1.
constexpr int64_t min_panel_pixels = 96;
constexpr int64_t max_task_channels = 256;
// A sample is cut into at least this many tasks where it is big enough, so that batch 1 uses all threads.
constexpr int64_t tasks_per_sample = 16;
// Below this many multiply-adds, a task costs more to hand out than to compute.
constexpr double min_task_multiply_adds = 2e5;
// Input rows that a tile of channels passes over: half of L1, the other half is for weights and sums.
constexpr int64_t cache_block_floats = 8 * 1024;
constexpr int64_t max_classes = 4096;
constexpr int64_t max_window_floats = int64_t{1} << 28;

// Two neighbouring dimensions that are not convolved become one long row where the input's pixels are evenly
// spaced. A 1x1 convolution of 8x8 pixels so runs over rows of 64.
void merge_identity_axes(std::array<Axis, 3>& axes, TensorMap& input) {
  for (size_t outer : {size_t{1}, size_t{0}}) {
    const size_t inner = 2;
    if (outer == 0 && axes[1].out != 1) break;
    const bool even = axes[outer].in == 1 || input.strides[outer] == axes[inner].in * input.strides[inner];
    if (!axes[outer].is_identity() || !axes[inner].is_identity() || !even) break;
    axes[inner].in *= axes[outer].in;
    axes[inner].out = axes[inner].in;
    axes[outer] = Axis{};
    input.sizes[inner] = axes[inner].in;
    input.sizes[outer] = 1;
  }
}

int64_t class_count(const std::array<Axis, 3>& axes) {
  int64_t count = 1;
  for (const Axis& axis : axes) {
    if (axis.classes() > max_classes) return max_classes + 1;
    count *= axis.classes();
  }
  return count;
}

// Cuts depth and height into blocks of at most `rows` rows so that the fewest input rows are staged twice.
std::array<int64_t, 3> cheapest_cut(const Axis& depth, const Axis& height, int64_t rows) {
  double best = 0;
  std::array<int64_t, 3> counts{depth.out, height.out, 1};
  for (int64_t planes = 1; planes <= std::min(depth.out, rows); ++planes) {
    const int64_t lines = std::min(height.out, rows / planes);
    const auto staged =
        static_cast<double>(depth.window({0, planes}).size() * height.window({0, lines}).size());
    const double per_row = staged / static_cast<double>(planes * lines);
    if (planes > 1 && per_row >= best) continue;
    best = per_row;
    counts = {ceil_div(depth.out, planes), ceil_div(height.out, lines), 1};
  }
  return counts;
}

// Cuts into whole planes, or a plane into runs of lines. Where a channel's pixels are contiguous, long panels
// save more than the input rows that are staged twice cost.
std::array<int64_t, 3> plane_cut(const Axis& depth, const Axis& height, int64_t rows) {
  if (rows < height.out) return {depth.out, ceil_div(height.out, rows), 1};
  int64_t planes = rows / height.out;
  const int64_t period = depth.class_stride();
  if (planes > period) planes -= planes % period;
  if (planes < period && 2 * planes >= period) planes = period;
  return {ceil_div(depth.out, planes), 1, 1};
}

}  // namespace

std::string ConvolutionStage::refusal(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  const Shape output = problem.block.conv_output_shape(problem.input.sizes);
  const std::array<Axis, 3> axes = make_axes(conv, problem.input.sizes, output);
  if (class_count(axes) > max_classes) {
    return "the strides of the transposed convolution make more than " + std::to_string(max_classes) +
           " sub-convolutions";
  }
  double taps = 1;
  double window = 1;
  for (const Axis& axis : axes) {
    taps *= static_cast<double>(axis.kernel);
    window *= static_cast<double>(axis.window({0, 1}).size());
  }
  if (taps > 65536) return "the kernel has more than 65536 taps";
  if (window > static_cast<double>(max_window_floats) / 64) return "one output pixel meets too wide a window";
  return "";
}

ConvolutionStage::ConvolutionStage(const Problem& problem, const Isa& isa, Lanes lanes, int64_t cut,
                                   bool wants_bound)
    : isa_(isa),
      lanes_(lanes),
      wants_bound_(wants_bound),
      input_(problem.input),
      weight_dtype_(problem.parameters[0].dtype) {
  const Conv& conv = *problem.block.conv();
  const Shape output = problem.block.conv_output_shape(problem.input.sizes);
  batch_ = output[0];
  group_count_ = conv.groups;
  in_channels_per_group_ = conv.in_channels / conv.groups;
  out_channels_per_group_ = conv.out_channels / conv.groups;
  kernel_elements_ = conv.kernel[0] * conv.kernel[1] * conv.kernel[2];
  transposed_ = conv.transposed;
  axes_ = make_axes(conv, problem.input.sizes, output);
  merge_identity_axes(axes_, input_);
  choose_segments(cut);
  choose_blocks();
  choose_chunks();
  choose_panels();
  choose_window();
  choose_cache_blocks();
  build_classes();
  // Looking at an input costs as much as the shorter form of an output's step saves.
  wants_bound_ &= staged_elements() <= static_cast<double>(element_count(output));
}

// Segments lie within a group of the convolution, do not cross a multiple of `cut`, and are small enough for
// a task.
void ConvolutionStage::choose_segments(int64_t cut) {
  const int64_t group_channels = out_channels_per_group_;
  const int64_t pixels = axes_[0].out * axes_[1].out * axes_[2].out;
  const int64_t unit = lanes_ == Lanes::channels ? isa_.lanes : 1;
  int64_t limit = lanes_ == Lanes::channels ? max_task_channels : max_pixel_tile_channels;
  // A small image has few blocks: more segments make up for it.
  while (lanes_ == Lanes::channels && limit > 32 &&
         ceil_div(pixels, 4 * min_panel_pixels) * ceil_div(group_channels, limit) < tasks_per_sample) {
    limit /= 2;
  }
  int64_t first = 0;
  while (first < group_channels * group_count_) {
    const int64_t stop = std::min((first / group_channels + 1) * group_channels, (first / cut + 1) * cut);
    const int64_t units = ceil_div(stop - first, unit);
    const int64_t parts = ceil_div(stop - first, limit);
    for (int64_t i = 0; i < parts; ++i) {
      const Range part = even_part(units, parts, i);
      const Range range{first + part.begin * unit, std::min(stop, first + part.end * unit)};
      segments_.push_back({first / group_channels, range});
      max_segment_channels_ = std::max(max_segment_channels_, range.size());
    }
    first = stop;
  }
}

void ConvolutionStage::choose_blocks() {
  const int64_t depth = axes_[0].out;
  const int64_t height = axes_[1].out;
  const int64_t width = axes_[2].out;
  const int64_t pixels = depth * height * width;
  int64_t budget = std::max(min_panel_pixels, block_sum_floats / padded_channels(max_segment_channels_));
  budget = std::min(budget, std::max(2 * min_panel_pixels, ceil_div(pixels, tasks_per_sample)));
  if (width > budget + budget / 2) {
    block_counts_ = {depth, height, ceil_div(width, budget)};
  } else {
    const int64_t rows = std::max<int64_t>(1, budget / width);
    block_counts_ = lanes_ == Lanes::pixels ? plane_cut(axes_[0], axes_[1], rows)
                                            : cheapest_cut(axes_[0], axes_[1], rows);
  }
  max_block_pixels_ = 1;
  for (size_t i = 0; i < 3; ++i) max_block_pixels_ *= block_extent(i);
  const double per_segment = static_cast<double>(max_block_pixels_ * max_segment_channels_) *
                             static_cast<double>(in_channels_per_group_ * kernel_elements_);
  segments_per_task_ = 1;
  if (per_segment < min_task_multiply_adds) {
    segments_per_task_ = static_cast<int64_t>(min_task_multiply_adds / per_segment) + 1;
  }
  if (lanes_ == Lanes::pixels) {  // those of a group share a window
    const int64_t channels = std::min(out_channels_per_group_, max_task_channels);
    segments_per_task_ = std::max(segments_per_task_, ceil_div(channels, max_pixel_tile_channels));
  }
}

void ConvolutionStage::choose_chunks() {
  int64_t taps = 1;
  for (const Axis& axis : axes_) {
    size_t most = 1;
    for (int64_t c = 0; c < axis.classes(); ++c) most = std::max(most, axis.taps(c).size());
    taps *= static_cast<int64_t>(most);
  }
  const int64_t channels = std::max<int64_t>(1, max_chain_terms / taps);
  chunk_count_ = ceil_div(in_channels_per_group_, channels);
}

// With one chunk a panel is finished as soon as its rows are convolved, so only a panel of sums is kept.
void ConvolutionStage::choose_panels() {
  const int64_t block_width = block_extent(2);
  const int64_t padded = padded_channels(max_segment_channels_);
  const int64_t together = lanes_ == Lanes::pixels ? 1 : padded;  // channels that are stepped at once
  const int64_t pixels = std::max(min_panel_pixels, panel_floats / together);
  // Whole periods of the classes: an odd row out costs a pass over all weights (s60: 40.7 ms with 3 rows).
  const int64_t period = std::min(axes_[1].classes(), std::max<int64_t>(1, pixels / block_width));
  rows_per_panel_ = std::max<int64_t>(1, pixels / block_width / period * period);
  max_panel_pixels_ = std::min(max_block_pixels_, rows_per_panel_ * block_width);
  // Pixel tiles write back what is behind a row: a vector.
  const int64_t floats = (chunk_count_ == 1 ? max_panel_pixels_ : max_block_pixels_) * padded;
  sum_floats_ = round_up(floats + isa_.lanes, 16);
}

void ConvolutionStage::choose_window() {
  std::array<int64_t, 3> extent{};
  for (size_t i = 0; i < 3; ++i) {
    for (int64_t part = 0; part < block_counts_[i]; ++part) {
      extent[i] = std::max(extent[i], axes_[i].window(block_range(i, part)).size());
    }
  }
  phase_count_ = axes_[2].step();
  phase_pitch_ = ceil_div(extent[2], phase_count_);
  row_pitch_ = phase_count_ * phase_pitch_;
  depth_pitch_ = extent[1] * row_pitch_;
  channel_pitch_ = extent[0] * depth_pitch_;
  // Channels a multiple of 256 bytes apart would share a few sets of L1.
  if (channel_pitch_ % 64 == 0) channel_pitch_ += 16;
  window_floats_ =
      round_up(ceil_div(in_channels_per_group_, chunk_count_) * channel_pitch_ + isa_.lanes * 2 + 1, 16);
}

void ConvolutionStage::choose_cache_blocks() {
  const auto taps = [this](size_t i) { return axes_[i].window({0, axes_[i].class_stride()}).size(); };
  const auto floats = [&](int64_t rows, int64_t pixels) {
    const int64_t lines = axes_[1].window({0, rows}).size();
    return chunk_channels() * std::min(axes_[0].kernel, taps(0)) * lines *
           axes_[2].window({0, pixels}).size();
  };
  const int64_t width = block_extent(2);
  rows_per_cache_block_ = block_extent(1);
  while (rows_per_cache_block_ > 4 && floats(rows_per_cache_block_, width) > cache_block_floats) {
    rows_per_cache_block_ = ceil_div(rows_per_cache_block_, 2);
  }
  strips_ = 1;
  while (width / strips_ > 48 && floats(rows_per_cache_block_, width / strips_) > cache_block_floats)
    ++strips_;
}

std::vector<int32_t> ConvolutionStage::make_offsets(const OutputClass& output_class, const TermList& list,
                                                    int64_t channels) const {
  std::vector<int32_t> offsets;
  for (const Tap& depth : output_class.taps[0]) {
    for (const Tap& height : output_class.taps[1]) {
      for (int64_t c = 0; c < channels; ++c) {
        for (const TermList::WidthTap& width : list.taps) {
          const int64_t offset =
              depth.offset * depth_pitch_ + height.offset * row_pitch_ + c * channel_pitch_ + width.offset;
          offsets.push_back(static_cast<int32_t>(offset - output_class.base));
        }
      }
    }
  }
  offsets.push_back(0);  // read ahead by the last term
  return offsets;
}

// Phases make the taps of a strided convolution contiguous: position p of a row lies in phase p % s at p / s.
int64_t ConvolutionStage::offset_in_row(const Tap& tap) const {
  if (axes_[2].transposed) return tap.offset;
  const int64_t position = tap.offset + axes_[2].padding;
  return position % phase_count_ * phase_pitch_ + position / phase_count_;
}

// The width taps of a class, or of it and the next one: those that meet the same input go together.
std::vector<ConvolutionStage::TermList> ConvolutionStage::make_lists(int64_t width_class) const {
  if (interleaved_classes() == 1) {
    TermList list;
    for (const Tap& tap : axes_[2].taps(width_class)) list.taps.push_back({offset_in_row(tap), {tap.k}});
    return {list};
  }
  TermList both;
  TermList first;
  TermList second;
  both.class_count = 2;
  std::vector<Tap> others = axes_[2].taps(width_class + 1);
  for (const Tap& tap : axes_[2].taps(width_class)) {
    const auto same = std::find_if(others.begin(), others.end(),
                                   [&](const Tap& other) { return other.offset == tap.offset; });
    if (same == others.end()) {
      first.taps.push_back({offset_in_row(tap), {tap.k}});
    } else {
      both.taps.push_back({offset_in_row(tap), {tap.k, same->k}});
      others.erase(same);
    }
  }
  for (const Tap& tap : others) second.taps.push_back({offset_in_row(tap), {tap.k}});
  return {both, first, second};
}

void ConvolutionStage::build_classes() {
  for (int64_t d = 0; d < axes_[0].classes(); ++d) {
    for (int64_t h = 0; h < axes_[1].classes(); ++h) {
      for (int64_t w = 0; w < axes_[2].classes(); w += interleaved_classes()) {
        OutputClass result;
        result.index = {d, h, w};
        result.taps = {axes_[0].taps(d), axes_[1].taps(h)};
        result.lists = make_lists(w);
        int64_t lowest = std::numeric_limits<int64_t>::max();  // along a row
        for (const TermList& list : result.lists) {
          for (const TermList::WidthTap& tap : list.taps) lowest = std::min(lowest, tap.offset);
        }
        const auto meets = [](const std::vector<Tap>& taps) { return !taps.empty(); };
        if (meets(result.taps[0]) && meets(result.taps[1]) && lowest < std::numeric_limits<int64_t>::max()) {
          const auto least = [](const std::vector<Tap>& taps) {
            return std::min_element(taps.begin(), taps.end(),
                                    [](const Tap& a, const Tap& b) { return a.offset < b.offset; })
                ->offset;
          };
          result.base = least(result.taps[0]) * depth_pitch_ + least(result.taps[1]) * row_pitch_ + lowest;
        }
        for (TermList& list : result.lists) {
          list.offsets[0] = make_offsets(result, list, chunk_channels());
          list.offsets[1] = make_offsets(result, list, in_channels_per_group_ / chunk_count_);
        }
        has_bare_classes_ |= result.is_bare();
        classes_.push_back(std::move(result));
      }
    }
  }
  for (const Segment& segment : segments_) {
    for (const OutputClass& output_class : classes_) {
      for (size_t i = 0; i < max_pixel_term_lists; ++i) {
        weight_offsets_.push_back(packed_floats_);
        if (i >= output_class.lists.size()) continue;
        const TermList& list = output_class.lists[i];
        packed_floats_ += padded_channels(segment.channels.size()) * in_channels_per_group_ *
                          output_class.tap_count(list) * static_cast<int64_t>(list.class_count);
      }
    }
  }
  bias_at_ = packed_floats_;
  packed_floats_ += group_count_ * out_channels_per_group_ + isa_.lanes;  // read by whole vectors
  reach_at_ = packed_floats_;
  packed_floats_ += static_cast<int64_t>(segments_.size() * classes_.size()) * max_tile_count();
}

int64_t ConvolutionStage::padded_channels(int64_t channels) const {
  return lanes_ == Lanes::channels ? round_up(channels, isa_.lanes) : channels;
}

ConvolutionStage::Block ConvolutionStage::block_at(int64_t index) const {
  const int64_t w = index % block_counts_[2];
  const int64_t h = index / block_counts_[2] % block_counts_[1];
  const int64_t d = index / block_counts_[2] / block_counts_[1];
  return {{block_range(0, d), block_range(1, h), block_range(2, w)}};
}

// Along a row every part begins with the first of the classes that alternate.
Range ConvolutionStage::block_range(size_t axis, int64_t part) const {
  const int64_t unit = axis == 2 ? interleaved_classes() : 1;
  const Range units = even_part(ceil_div(axes_[axis].out, unit), block_counts_[axis], part);
  return {units.begin * unit, std::min(axes_[axis].out, units.end * unit)};
}

int64_t ConvolutionStage::block_pixels(int64_t index) const {
  const Block block = block_at(index);
  return block.outputs[0].size() * block.outputs[1].size() * block.outputs[2].size();
}

// Flat index of the first pixel of a row of the block.
int64_t ConvolutionStage::first_pixel(const Block& block, int64_t row) const {
  const int64_t d = block.outputs[0].begin + row / block.outputs[1].size();
  const int64_t h = block.outputs[1].begin + row % block.outputs[1].size();
  return (d * axes_[1].out + h) * axes_[2].out + block.outputs[2].begin;
}

// Rows of a block from `first` on whose pixels are contiguous, as many as a panel holds.
Range ConvolutionStage::panel_rows(const Block& block, int64_t first) const {
  const int64_t height = block.outputs[1].size();
  int64_t end = std::min(block.outputs[0].size() * height, first + rows_per_panel_);
  if (block_counts_[1] > 1) end = std::min(end, (first / height + 1) * height);
  return {first, block_counts_[2] > 1 ? first + 1 : end};
}

int64_t ConvolutionStage::tile_count(const Segment& segment) const {
  if (lanes_ == Lanes::pixels) return ceil_div(segment.channels.size(), max_pixel_tile_channels);
  return ceil_div(ceil_div(segment.channels.size(), isa_.lanes), isa_.max_tile_vectors);
}

ConvolutionStage::Tile ConvolutionStage::tile_at(const Segment& segment, int64_t index) const {
  const int64_t count = tile_count(segment);
  if (lanes_ == Lanes::pixels) {
    const Range channels = even_part(segment.channels.size(), count, index);
    return {channels.begin, channels.size(), 0};
  }
  const Range vectors = even_part(ceil_div(segment.channels.size(), isa_.lanes), count, index);
  return {vectors.begin * isa_.lanes, vectors.size() * isa_.lanes, static_cast<int>(vectors.size())};
}

double ConvolutionStage::padded_multiply_adds() const {
  double channels = 0;
  for (const Segment& segment : segments_) {
    channels += static_cast<double>(padded_channels(segment.channels.size()));
  }
  // Outputs of a dimension times the taps they meet, over its classes. Rows leave out taps beside the input.
  double total = channels * static_cast<double>(in_channels_per_group_);
  for (size_t i = 0; i < 3; ++i) total *= static_cast<double>(axes_[i].products(i < 2));
  if (lanes_ == Lanes::pixels) {
    const int64_t width = ceil_div(axes_[2].out, axes_[2].class_stride());
    total *= static_cast<double>(round_up(width, isa_.lanes)) / static_cast<double>(width);
    // Rows of few vectors wait for their sums: of one or two, tiles run at 0.4 to 0.7 of the rate.
    const int64_t vectors = ceil_div(std::min(width, block_extent(2)), isa_.lanes) * interleaved_classes();
    if (vectors <= 3) total *= vectors == 3 ? 1.2 : 1.7;
  } else {
    // A tile of few sums waits for each: two thirds of the full one are just enough in flight.
    const int64_t vectors = tile_at(segments_[0], 0).vectors;
    const int64_t full = isa_.max_tile_vectors * isa_.tile_pixels;
    const int64_t width = ceil_div(block_extent(2), axes_[2].class_stride());
    const int64_t sums = vectors * std::min(width, full / vectors);
    const int64_t enough = full * 2 / 3;
    total *= std::max(1.0, static_cast<double>(enough) / static_cast<double>(sums));
  }
  return total * static_cast<double>(batch_);
}

double ConvolutionStage::read_weights() const {
  return static_cast<double>(packed_floats_) * static_cast<double>(batch_ * block_count());
}

// Input positions of an axis in the windows of all its blocks.
double ConvolutionStage::staged_positions(size_t axis) const {
  double positions = 0;
  for (int64_t part = 0; part < block_counts_[axis]; ++part) {
    positions += static_cast<double>(axes_[axis].window(block_range(axis, part)).size());
  }
  return positions;
}

// Each of them is staged for a channel this many times.
double ConvolutionStage::staged_windows() const {
  const auto segments = static_cast<int64_t>(segments_.size());
  const int64_t windows =
      chunk_count_ == 1 ? std::max(group_count_, ceil_div(segments, segments_per_task_)) : segments;
  return static_cast<double>(batch_ * windows);
}

double ConvolutionStage::staged_elements() const {
  return staged_windows() * static_cast<double>(in_channels_per_group_) * staged_positions(0) *
         staged_positions(1) * staged_positions(2);
}

double ConvolutionStage::staged_rows() const {
  double parts = staged_windows() * static_cast<double>(in_channels_per_group_ * block_counts_[2]);
  for (size_t i = 0; i < 2; ++i) {
    parts *= std::min(staged_positions(i), static_cast<double>(axes_[i].out * axes_[i].kernel));
  }
  return parts * static_cast<double>(std::min(phase_count_, axes_[2].kernel));
}

// Pixel tiles take all rows in one call.
double ConvolutionStage::row_calls() const {
  if (lanes_ == Lanes::pixels) return 0;
  int64_t tiles = 0;
  for (const Segment& segment : segments_) tiles += tile_count(segment);
  const int64_t rows = axes_[0].out * axes_[1].out * block_counts_[2] * axes_[2].classes();
  return static_cast<double>(batch_ * rows) * static_cast<double>(tiles * chunk_count_);
}

double ConvolutionStage::scattered_sums() const {
  if (lanes_ != Lanes::pixels || axes_[2].class_stride() == interleaved_classes()) return 0;
  const int64_t pixels = axes_[0].out * axes_[1].out * axes_[2].out;
  return static_cast<double>(batch_ * group_count_ * out_channels_per_group_) * static_cast<double>(pixels);
}

int64_t ConvolutionStage::staged_stride_bytes() const {
  constexpr int64_t turned_at_once = 4;  // channels, in registers
  constexpr int64_t most_picked = 4;     // strides whose elements are picked from vectors
  const int64_t stride = input_.strides[2] * phase_count_;
  // A chunk of one channel reads a line for each element. With two and more, lines stay in a cache.
  const bool lone = chunk_count_ == in_channels_per_group_;
  const bool turned = input_.channel_stride == 1 && in_channels_per_group_ >= turned_at_once && !lone;
  const bool picked = input_.dtype == DType::f32 && stride <= most_picked;
  return stride == 1 || turned || picked ? 0 : stride * byte_size(input_.dtype);
}

std::string ConvolutionStage::describe() const {
  std::ostringstream out;
  out << "lanes: " << (lanes_ == Lanes::channels ? "output channels" : "pixels") << " (" << isa_.name << ", "
      << isa_.lanes << ")\n";
  out << "sub-convolutions: " << class_count(axes_) << '\n';
  out << "blocks per sample: " << block_count() << " of at most " << max_block_pixels_ << " pixels\n";
  out << "segments: " << segments_.size() << " of at most " << max_segment_channels_ << " channels\n";
  out << "chunks of input channels: " << chunk_count_ << '\n';
  out << "packed weights: " << packed_floats_ * 4 << " bytes\n";
  out << "per thread: window " << window_floats_ * 4 << " bytes, sums " << sum_floats_ * 4 << " bytes\n";
  return out.str();
}

}  // namespace onepass::cpu
