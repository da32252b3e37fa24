// Weights and panels of a convolution in groups of few channels.
#include "cpu/group_convolution.h"

#include <algorithm>
#include <limits>
#include <sstream>

#include "block/convert.h"

namespace onepass::cpu {
namespace {

constexpr int64_t panel_floats = 4 * 1024;  // a quarter of L1, beside the rows that taps meet
constexpr int64_t pack_channels = 64;       // of a task
// Fewer positions than this wait for their sums: rows are taken together.
constexpr int64_t least_sums = 16;

std::array<Axis, 3> axes_of(const Problem& problem) {
  return make_axes(*problem.block.conv(), problem.input.sizes,
                   problem.block.conv_output_shape(problem.input.sizes));
}

GroupSizes sizes_of(const Conv& conv) {
  return {conv.groups, conv.out_channels / conv.groups, conv.in_channels / conv.groups};
}

// The first output of this class from `begin` on.
int64_t first_of_class(int64_t begin, int64_t output_class, int64_t stride) {
  return output_class + round_up(std::max<int64_t>(0, begin - output_class), stride);
}

}  // namespace

std::string GroupConvolution::refusal(const Problem& problem) {
  return GroupWindows::refusal(axes_of(problem), sizes_of(*problem.block.conv()));
}

GroupConvolution::GroupConvolution(const Problem& problem, const Isa& isa, int64_t cut)
    : isa_(isa),
      weight_dtype_(problem.parameters[0].dtype),
      transposed_(problem.block.conv()->transposed),
      batch_(problem.input.sizes[0]),
      axes_(axes_of(problem)),
      windows_(axes_, TensorMap(problem.input), sizes_of(*problem.block.conv()), cut, isa,
               GroupWindows::RowParts::where_faster) {
  in_place_ = windows_.in_place();
  const int64_t parts = windows_.row_parts();
  for (const Range& channels : windows_.segments()) {
    lane_of_segment_.push_back(channels.begin * parts);
    segments_.push_back({0, channels});
  }
  weight_pitch_ = round_up(windows_.lanes_of_all() * parts + isa.lanes, 16);
  int64_t at = 0;
  const auto sorted_taps = [](const Axis& axis, int64_t output_class) {
    std::vector<Tap> taps = axis.taps(output_class);
    std::sort(taps.begin(), taps.end(), [](const Tap& a, const Tap& b) { return a.offset < b.offset; });
    return taps;
  };
  for (int64_t d = 0; d < axes_[0].classes(); ++d) {
    for (int64_t h = 0; h < axes_[1].classes(); ++h) {
      for (int64_t w = 0; w < axes_[2].classes(); ++w) {
        classes_.push_back(
            {{sorted_taps(axes_[0], d), sorted_taps(axes_[1], h), sorted_taps(axes_[2], w)}, at});
        int64_t taps = windows_.sizes().fine;
        for (const std::vector<Tap>& along : classes_.back().taps) taps *= static_cast<int64_t>(along.size());
        at += taps * weight_pitch_;
      }
    }
  }
  const int64_t terms = at / weight_pitch_;
  dense_panels_ = parts > 1 || (classes_.size() == 1 && terms <= max_chain_terms);
  bias_at_ = at;
  packed_floats_ = at + weight_pitch_;
  // A panel is one row of a block at least. Pixels of a panel have no gaps: more are rows of the output.
  const GroupBlock block = windows_.block_at(0);
  const int64_t width = std::max<int64_t>(1, block[2].size());
  const int64_t lines = std::max<int64_t>(1, block[1].size());
  const int64_t padded = padded_channels(max_segment_channels());
  const int64_t rows = std::clamp<int64_t>(panel_floats / (padded * width), 1, lines);
  rows_at_once_ = std::max(rows, std::min(lines, least_sums / width));
  const bool whole = parts > 1 || width == axes_[2].out;
  max_panel_pixels_ = whole ? rows_at_once_ * axes_[2].out : width;
  tile_floats_ = round_up(rows_at_once_ * width * padded, 16);
  sum_floats_ = tile_floats_ + (parts > 1 ? round_up(max_panel_pixels_ * max_segment_channels(), 16) : 0);
}

int64_t GroupConvolution::block_pixels(int64_t block) const {
  const GroupBlock at = windows_.block_at(block);
  return at[0].size() * at[1].size() * (windows_.row_parts() > 1 ? axes_[2].out : at[2].size());
}

// Few outputs wait for their sums: two vectors of one output take as long as those of four.
double GroupConvolution::padded_multiply_adds() const {
  constexpr int64_t least_positions = 4;
  const int64_t lines = std::min(rows_at_once_, std::max<int64_t>(1, axes_[1].out / axes_[1].classes()));
  const int64_t positions = std::max<int64_t>(1, axes_[2].out / axes_[2].classes()) * lines;
  double products = static_cast<double>(batch_ * windows_.sizes().fine);
  for (const Axis& axis : axes_) products *= static_cast<double>(axis.products(true));
  products *= static_cast<double>(std::max(positions, least_positions)) / static_cast<double>(positions);
  int64_t lanes = 0;
  for (const Segment& segment : segments_) lanes += padded_channels(segment.channels.size());
  return products * static_cast<double>(lanes) / static_cast<double>(windows_.row_parts());
}

double GroupConvolution::staged_elements() const {
  return static_cast<double>(batch_) * windows_.staged_elements();
}

std::string GroupConvolution::describe() const {
  int64_t most = 0;
  for (int64_t block = 0; block < block_count(); ++block) most = std::max(most, block_pixels(block));
  std::ostringstream out;
  out << "lanes: channels of several groups (" << isa_.name << ", " << isa_.lanes << ")\n";
  out << "segments: " << segments_.size() << " of at most " << max_segment_channels() << " channels\n";
  out << "blocks: " << block_count() << " of at most " << most << " pixels\n";
  out << "input: " << (in_place_ ? "in place" : "windows are staged in f32") << '\n';
  if (windows_.row_parts() > 1) out << "vectors: of " << windows_.row_parts() << " parts of a row\n";
  out << "packed weights: " << packed_floats_ * 4 << " bytes\n";
  out << "per thread: window " << windows_.floats() * 4 << " bytes, sums " << sum_floats_ * 4 << " bytes\n";
  return out.str();
}

void GroupConvolution::pack(const void* weights, const float* bias, float* packed, Executor& executor) const {
  const int64_t lanes = windows_.lanes_of_all();
  const auto [_, coarse, fine] = windows_.sizes();
  const int64_t taps = axes_[0].kernel * axes_[1].kernel * axes_[2].kernel;
  std::fill_n(packed + bias_at_, weight_pitch_, 0.0f);
  // Each part of a row has lanes of its own.
  const auto for_copies = [&](int64_t lane, auto&& pack) {
    const auto after = std::upper_bound(segments_.begin(), segments_.end(), lane,
                                        [](int64_t at, const Segment& s) { return at < s.channels.begin; });
    const auto segment = static_cast<size_t>(after - segments_.begin()) - 1;
    const Range& channels = segments_[segment].channels;
    for (int64_t part = 0; part < windows_.row_parts(); ++part) {
      pack(lane_of_segment_[segment] + part * channels.size() + lane - channels.begin);
    }
  };
  for (int64_t lane = 0; lane < lanes && bias != nullptr; ++lane) {
    for_copies(lane, [&](int64_t at) { packed[bias_at_ + at] = bias[lane]; });
  }
  const auto pack_at = [&, coarse = coarse, fine = fine](int64_t lane, int64_t at, auto&& value) {
    for (const OutputClass& output_class : classes_) {
      float* to = packed + output_class.packed_at + at;
      for (const Tap& d : output_class.taps[0]) {
        for (const Tap& h : output_class.taps[1]) {
          const int64_t row = (d.k * axes_[1].kernel + h.k) * axes_[2].kernel;
          for (int64_t i = 0; i < fine; ++i) {
            const int64_t first =
                transposed_ ? (lane / coarse * fine + i) * coarse + lane % coarse : lane * fine + i;
            for (const Tap& w : output_class.taps[2]) {
              *to = value(first * taps + row + w.k);
              to += weight_pitch_;
            }
          }
        }
      }
    }
  };
  const auto pack_lane = [&](int64_t lane, auto&& value) {
    for_copies(lane, [&](int64_t at) { pack_at(lane, at, value); });
  };
  executor.for_each(ceil_div(lanes, pack_channels), [&](int64_t part, int) {
    const int64_t end = std::min(lanes, (part + 1) * pack_channels);
    for (int64_t lane = part * pack_channels; lane < end; ++lane) {
      if (weight_dtype_ == DType::f32) {
        pack_lane(lane, [from = static_cast<const float*>(weights)](int64_t i) { return from[i]; });
      } else {
        pack_lane(lane, [&](int64_t i) {
          const char* from = static_cast<const char*>(weights) + i * byte_size(weight_dtype_);
          return static_cast<float>(load_element(weight_dtype_, from));
        });
      }
    }
  });
}

// One class of some rows, from column `first` on. In place, outputs that miss a tap are computed one by one.
void GroupConvolution::convolve_class(const Task& task, const std::vector<Tap>& taps, int64_t first,
                                      float* acc, GroupTileArguments& tile) const {
  const Axis& widths = axes_[2];
  const int64_t stride = widths.class_stride();
  const int64_t count = ceil_div(task.columns.end - first, stride);
  tile.taps = static_cast<int64_t>(taps.size());
  if (!in_place_ || taps.empty()) {
    tile.acc = acc;
    tile.pixels = count;
    isa_.group_tile(tile);
    return;
  }
  const auto met = [&](int64_t j, const Tap& tap) {
    return (first / stride + j) * widths.step() + tap.offset;
  };
  for (int64_t j = 0; j < count; j += tile.pixels) {
    size_t begin = 0;
    size_t end = taps.size();
    while (begin < end && met(j, taps[begin]) < 0) ++begin;
    while (end > begin && met(j, taps[end - 1]) >= widths.in) --end;
    const bool whole = begin == 0 && end == taps.size();
    const int64_t left = widths.in - 1 - met(j, taps.back());
    tile.pixels = whole ? std::min(count - j, left / widths.step() + 1) : 1;
    tile.taps = static_cast<int64_t>(end - begin);
    tile.x_shift = j * tile.x_stride + static_cast<int64_t>(begin) * tile.tap_stride;
    tile.weight_shift = static_cast<int64_t>(begin) * weight_pitch_;
    tile.acc = acc + j * tile.acc_stride;
    isa_.group_tile(tile);
  }
  tile.x_shift = tile.weight_shift = 0;
}

// Some rows of outputs: class by class, those of a class together.
void GroupConvolution::convolve_rows(const Task& task, int64_t depth, Range heights,
                                     std::vector<GroupTapRow>& rows) const {
  const int64_t stride = axes_[1].class_stride();
  const bool overlaps = task.sums_stride < padded_channels(task.channels.size());
  const bool one_by_one = overlaps && task.columns.size() > isa_.group_tile_pixels;
  for (int64_t c = 0; c < axes_[1].classes(); ++c) {
    const int64_t first = first_of_class(heights.begin, c, stride);
    const int64_t count = ceil_div(heights.end - first, stride);
    const int64_t step = one_by_one ? 1 : count;
    for (int64_t i = 0; i < count; i += step) convolve_width(task, depth, first + i * stride, step, rows);
  }
}

// `count` rows of a class from `height` on: class by class along the width.
void GroupConvolution::convolve_width(const Task& task, int64_t depth, int64_t height, int64_t count,
                                      std::vector<GroupTapRow>& rows) const {
  const auto& [depths, heights, widths] = axes_;
  const int64_t fine = windows_.sizes().fine;
  const auto position = [](const Axis& axis, int64_t output, const Tap& tap) {
    return output / axis.class_stride() * axis.step() + tap.offset;
  };
  const int64_t first_class =
      (depth % depths.class_stride() * heights.classes() + height % heights.class_stride()) *
      widths.classes();
  const int64_t first_line = position(heights, height, Tap{});
  GroupTileArguments t;
  const auto [plane_pitch, row_pitch, pixel_pitch] = task.view.pitches;
  t.x_stride = widths.step() * pixel_pitch;
  t.row_step = heights.step() * row_pitch;
  t.weight_stride = weight_pitch_;
  t.bias = task.packed + bias_at_ + task.first_lane;
  t.acc_stride = widths.class_stride() * task.sums_stride;
  t.acc_row = heights.class_stride() * task.sums_row;
  t.out_rows = count;
  t.channels = task.lanes;
  for (int64_t c = 0; c < widths.classes(); ++c) {
    const OutputClass& output_class = classes_[static_cast<size_t>(first_class + c)];
    const int64_t first = first_of_class(task.columns.begin, c, widths.class_stride());
    if (first >= task.columns.end) continue;
    const std::vector<Tap>& taps = output_class.taps[2];
    const auto tap_count = static_cast<int64_t>(taps.size());
    const int64_t column = taps.empty() ? 0 : position(widths, first, taps[0]) - task.view.first[2];
    t.tap_stride = taps.size() < 2 ? 0 : (taps[1].offset - taps[0].offset) * pixel_pitch;
    const float* weights = task.packed + output_class.packed_at + task.first_lane;
    const int64_t row_weights = tap_count * weight_pitch_;
    rows.clear();
    rows.reserve(output_class.taps[0].size() * output_class.taps[1].size() * static_cast<size_t>(fine));
    for (const Tap& d : output_class.taps[0]) {
      const int64_t plane = position(depths, depth, d);
      for (const Tap& h : output_class.taps[1]) {
        // The rows of outputs that meet the input.
        const int64_t top = first_line + h.offset;
        const int64_t step = heights.step();
        const int64_t begin = top < 0 ? ceil_div(-top, step) : 0;
        const int64_t end = top + (count - 1) * step < heights.in
                                ? count
                                : ceil_div(std::max<int64_t>(0, heights.in - top), step);
        if (plane < 0 || plane >= depths.in || begin >= end || tap_count == 0) {
          weights += fine * row_weights;
          continue;
        }
        const float* x = task.view.data + (plane - task.view.first[0]) * plane_pitch +
                         (top + begin * step - task.view.first[1]) * row_pitch + column * pixel_pitch;
        for (int64_t i = 0; i < fine; ++i, weights += row_weights, x += windows_.channel_pitch()) {
          rows.push_back({x, weights, begin, end});
        }
      }
    }
    t.rows = rows.data();
    t.row_count = static_cast<int64_t>(rows.size());
    t.rows_of_chain = std::max<int64_t>(1, max_chain_terms / std::max<int64_t>(1, tap_count));
    float* const sums = task.sums + (height - task.first_height) * task.sums_row +
                        (first - task.columns.begin) * task.sums_stride;
    convolve_class(task, taps, first, sums, t);
  }
}

// The parts of rows one behind another, without gaps.
void GroupConvolution::join_parts(const Task& task, int64_t rows, float* panel) const {
  const int64_t columns = task.columns.size();
  const int64_t channels = task.channels.size();
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = task.sums + row * task.sums_row;
    for (int64_t first = 0; first < axes_[2].out; first += columns, from += channels) {
      const int64_t count = std::min(columns, axes_[2].out - first);
      copy_pixels(from, task.sums_stride, panel + (row * axes_[2].out + first) * channels, channels, count,
                  channels);
    }
  }
}

void GroupConvolution::run(const Arguments& arguments, const float* packed, float* worker,
                           const ConvolutionTask& of,
                           const std::function<void(const Panel&)>& consume) const {
  const GroupBlock block = windows_.block_at(of.block);
  const bool in_parts = windows_.row_parts() > 1;
  Task task;
  task.packed = packed;
  task.columns = block[2];
  task.channels = segments_[of.segment].channels;
  task.lanes = task.channels.size() * windows_.row_parts();
  task.first_lane = lane_of_segment_[of.segment];
  const int64_t padded = padded_channels(task.channels.size());
  task.sums_stride = dense_panels_ && !in_parts ? task.channels.size() : padded;
  const int64_t sample = of.samples.begin;
  if (in_place_) {
    task.view = windows_.in_place_view(arguments.input, sample, task.channels);
  } else {
    windows_.stage(arguments.input, sample, task.channels, block, worker);
    task.view = windows_.staged_view(block, worker);
  }
  task.sums = worker + windows_.floats();
  task.sums_row = block[2].size() * task.sums_stride;
  float* const panel = in_parts ? task.sums + tile_floats_ : task.sums;
  const int64_t panel_stride = in_parts ? task.channels.size() : task.sums_stride;
  const int64_t width = in_parts ? axes_[2].out : block[2].size();
  const int64_t panel_rows = width < axes_[2].out ? 1 : rows_at_once_;
  std::vector<GroupTapRow> rows;
  for (int64_t d = block[0].begin; d < block[0].end; ++d) {
    for (int64_t first = block[1].begin; first < block[1].end; first += rows_at_once_) {
      const int64_t end = std::min(block[1].end, first + rows_at_once_);
      task.first_height = first;
      convolve_rows(task, d, {first, end}, rows);
      if (in_parts) join_parts(task, end - first, panel);
      for (int64_t h = first; h < end; h += panel_rows) {
        const int64_t pixel = (d * axes_[1].out + h) * axes_[2].out + block[2].begin;
        const int64_t count = std::min(panel_rows, end - h) * width;
        const Region region{sample, task.channels, {pixel, pixel + count}};
        consume({panel + (h - first) * width * panel_stride, panel_stride, region,
                 std::numeric_limits<float>::infinity()});
      }
    }
  }
}

}  // namespace onepass::cpu
