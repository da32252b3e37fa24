// Cutting a convolution in groups of few channels into windows, and staging them.
#include "cpu/group_windows.h"

#include <algorithm>
#include <cstring>

namespace onepass::cpu {
namespace {

// Rows that the taps of one row of outputs meet stay in L1: 32 KiB, beside a panel of sums.
constexpr int64_t rows_floats = 8 * 1024;
constexpr int64_t least_channels = 16;
// Fewer positions of a plane wait for their sums: two vectors of channels are in flight then.
constexpr int64_t least_plane = 8;
constexpr int64_t most_channels = 256;
// A window stays in L2. CPUs with AVX-512 have 1 MiB and more: conv3d(32,32,k=5,p=2,groups=32) @
// 8x32x16x16x16 nhwc 2.4 ms, with the smaller window 3.2. Each sample has some tasks all the same.
constexpr int64_t window_budget_floats = 64 * 1024;
constexpr int64_t wide_window_budget_floats = 192 * 1024;
constexpr int64_t wide_lanes = 16;
constexpr int64_t least_tasks = 4;
constexpr int64_t max_fine = 16;
// Outputs that miss a tap are computed one by one in place: rows have so many outputs for each.
constexpr int64_t outputs_per_edge = 12;
// Pixels so far apart share a few sets of L1.
constexpr int64_t conflict_floats = 1024;
constexpr int64_t most_channels_in_place = 256;
constexpr int64_t least_columns_in_place = 16;
// Parts of a row copy each position twice more, which takes as long as so many taps of a whole row.
constexpr int64_t taps_of_parts = 16;
constexpr int64_t max_position_floats = int64_t{1} << 22;

// What so many outputs meet. The first of them may meet nothing: a stride can be longer than the kernel.
int64_t extent(const Axis& axis, int64_t outputs) {
  return std::max<int64_t>(1, axis.window({0, outputs}).size());
}

template <size_t kChannels>
void copy_pixels_of(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t pixels) {
  for (int64_t i = 0; i < pixels; ++i, from += from_stride, to += to_stride) {
    std::memcpy(to, from, kChannels * sizeof(float));
  }
}

}  // namespace

void copy_pixels(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t pixels,
                 int64_t channels) {
  using Copy = void (*)(const float*, int64_t, float*, int64_t, int64_t);
  constexpr std::array<Copy, 8> copies{copy_pixels_of<1>, copy_pixels_of<2>, copy_pixels_of<3>,
                                       copy_pixels_of<4>, copy_pixels_of<5>, copy_pixels_of<6>,
                                       copy_pixels_of<7>, copy_pixels_of<8>};
  copies[static_cast<size_t>(channels - 1)](from, from_stride, to, to_stride, pixels);
}

std::string GroupWindows::refusal(const std::array<Axis, 3>& axes, GroupSizes sizes) {
  if (sizes.groups == 1) return "the convolution has one group";
  if (sizes.fine > max_fine) return "a group has more than " + std::to_string(max_fine) + " input channels";
  double window = static_cast<double>(sizes.fine);
  for (const Axis& axis : axes) window *= static_cast<double>(extent(axis, 1));
  return window > static_cast<double>(max_position_floats) ? "one output pixel meets too wide a window" : "";
}

GroupWindows::GroupWindows(const std::array<Axis, 3>& axes, const TensorMap& fine, GroupSizes sizes,
                           int64_t cut, const Isa& isa, RowParts parts)
    : isa_(isa), axes_(axes), fine_(fine), sizes_(sizes) {
  choose_place(cut);
  choose_segments(cut);
  if (parts == RowParts::where_faster) choose_row_parts();
  choose_blocks();
  if (row_parts_ > 1 && counts_[2] > 1) {  // a block has whole rows, or parts of one
    row_parts_ = 1;
    axes_[2].out = axes[2].out;
    choose_blocks();
  }
}

void GroupWindows::choose_blocks() {
  cut_blocks(isa_.lanes < wide_lanes ? window_budget_floats : wide_window_budget_floats);
  if (block_count() * static_cast<int64_t>(segments_.size()) < least_tasks) cut_blocks(window_budget_floats);
}

// Parts of a row begin with the same class.
void GroupWindows::choose_row_parts() {
  const int64_t taps = axes_[0].kernel * axes_[1].kernel * axes_[2].kernel;
  const int64_t most = isa_.lanes / max_segment_;
  if (!is_copy() || in_place_ || most < 2 || taps * (most - 1) < taps_of_parts * most) return;
  const int64_t columns = round_up(ceil_div(axes_[2].out, most), axes_[2].class_stride());
  if (columns >= axes_[2].out) return;
  row_parts_ = ceil_div(axes_[2].out, columns);
  axes_[2].out = columns;
}

// Vectors must not reach behind the last channel.
void GroupWindows::choose_place(int64_t cut) {
  const Axis& width = axes_[2];
  const Range met = width.window({0, width.out});
  const int64_t edges = std::max<int64_t>(0, -met.begin) + std::max<int64_t>(0, met.end - width.in);
  in_place_ = is_copy() && fine_.dtype == DType::f32 && has_channels_last() && cut % isa_.lanes == 0 &&
              width.out >= edges * outputs_per_edge && fine_.strides[2] % conflict_floats != 0;
}

// In place a task takes all channels and few columns, so that memory is read and written in long runs.
// Windows take few channels and whole rows, so that columns beside a block are not staged twice.
void GroupWindows::choose_segments(int64_t cut) {
  const auto& [depth, height, width] = axes_;
  const int64_t rows = depth.kernel * height.kernel * extent(width, width.out) * sizes_.fine;
  const bool few = height.out * width.out < least_plane;
  const int64_t least = few ? std::max(least_channels, 2 * isa_.lanes) : least_channels;
  const int64_t limit = in_place_ ? most_channels_in_place
                                  : std::clamp(rows_floats / rows / least * least, least, most_channels);
  const int64_t parts = ceil_div(cut, limit);
  for (int64_t first = 0; first < lanes_of_all(); first += cut) {
    for (int64_t i = 0; i < parts; ++i) {
      // Whole vectors but for the last part.
      const Range vectors = even_part(ceil_div(cut, isa_.lanes), parts, i);
      const Range channels{first + vectors.begin * isa_.lanes,
                           first + std::min(cut, vectors.end * isa_.lanes)};
      if (channels.size() <= 0) continue;
      segments_.push_back(channels);
      max_segment_ = std::max(max_segment_, channels.size());
    }
  }
  channel_pitch_ = round_up(max_segment_, isa_.lanes);
  pixel_pitch_ = channel_pitch_ * sizes_.fine;
}

// The cut that stages the fewest pixels twice.
void GroupWindows::cut_blocks(int64_t window_floats) {
  const auto& [depth, height, width] = axes_;
  const int64_t budget = std::max<int64_t>(1, window_floats / pixel_pitch_);  // pixels
  const int64_t corner = extent(depth, 1) * extent(height, 1);
  int64_t columns = std::max<int64_t>(1, width.out);
  while (columns > 1 && corner * extent(width, columns) > budget) columns = ceil_div(columns, 2);
  if (in_place_) {
    const int64_t pixels = rows_floats / (depth.kernel * height.kernel * pixel_pitch_);
    const int64_t most = std::max(least_columns_in_place, pixels / width.step());
    columns = ceil_div(columns, ceil_div(columns, most));
  }
  const int64_t column_parts = std::max<int64_t>(1, ceil_div(width.out, columns));
  counts_ = {std::max<int64_t>(1, depth.out), std::max<int64_t>(1, height.out), column_parts};
  double best = 0;
  for (int64_t planes = 1; planes <= depth.out; ++planes) {
    const int64_t along_rows = budget / (extent(depth, planes) * extent(width, columns));
    int64_t lines = 0;
    while (lines < height.out && extent(height, lines + 1) <= along_rows) ++lines;
    if (lines == 0) break;
    const double staged = static_cast<double>(extent(depth, planes) * extent(height, lines)) /
                          static_cast<double>(planes * lines);
    if (planes > 1 && staged >= best) continue;
    best = staged;
    counts_ = {ceil_div(depth.out, planes), ceil_div(height.out, lines), column_parts};
  }
  std::array<int64_t, 3> most{};
  for (size_t i = 0; i < 3; ++i) {
    most[i] = 1;
    for (int64_t part = 0; part < counts_[i]; ++part) {
      most[i] = std::max(most[i], axes_[i].window(even_part(axes_[i].out, counts_[i], part)).size());
    }
  }
  row_pitch_ = most[2] * pixel_pitch_;
  plane_pitch_ = most[1] * row_pitch_;
  // Spreading reads up to a vector behind a row.
  window_floats_ = round_up(most[0] * plane_pitch_, 16);
  const int64_t raw_channels = (max_segment_ / sizes_.coarse + 2) * sizes_.fine;
  raw_floats_ = is_copy() ? 0 : round_up(most[2] * raw_channels + isa_.lanes, 16);
}

GroupBlock GroupWindows::block_at(int64_t index) const {
  GroupBlock block;
  for (const size_t i : {2, 1, 0}) {
    block[i] = even_part(axes_[i].out, counts_[i], index % counts_[i]);
    index /= counts_[i];
  }
  return block;
}

double GroupWindows::staged_elements() const {
  auto pixels = static_cast<double>(lanes_of_all() * sizes_.fine * row_parts_);
  for (size_t i = 0; i < 3; ++i) {
    pixels *= static_cast<double>(extent(axes_[i], ceil_div(axes_[i].out, counts_[i])) * counts_[i]);
  }
  return pixels;
}

GroupView GroupWindows::in_place_view(const void* fine, int64_t sample, const Range& segment) const {
  return {static_cast<const float*>(fine) + sample * fine_.sample_stride + segment.begin, {}, fine_.strides};
}

GroupView GroupWindows::staged_view(const GroupBlock& block, const float* window) const {
  GroupView view{window, {}, {plane_pitch_, row_pitch_, pixel_pitch_}};
  for (size_t i = 0; i < 3; ++i) view.first[i] = axes_[i].window(block[i]).begin;
  return view;
}

// Of a window of plain copies, part by part. `element`: column 0 of the row.
void GroupWindows::stage_row(TransferArguments t, const void* fine, int64_t element, Range met,
                             float* row) const {
  const int64_t shift = axes_[2].out / axes_[2].class_stride() * axes_[2].step();
  for (int64_t part = 0; part < row_parts_; ++part, row += t.cols, met.begin += shift, met.end += shift) {
    const Range inside{std::clamp<int64_t>(met.begin, 0, axes_[2].in),
                       std::clamp<int64_t>(met.end, 0, axes_[2].in)};
    for (int64_t column = met.begin; column < met.end; ++column) {
      if (column == inside.begin) column = inside.end;
      if (column < met.end) std::fill_n(row + (column - met.begin) * pixel_pitch_, t.cols, 0.0f);
    }
    t.rows = inside.size();
    if (t.rows == 0) continue;
    t.tensor = const_cast<char*>(static_cast<const char*>(fine)) +
               (element + inside.begin * t.row_stride) * byte_size(fine_.dtype);
    t.panel = row + (inside.begin - met.begin) * pixel_pitch_;
    if (fine_.dtype == DType::f32 && has_channels_last()) {
      copy_pixels(reinterpret_cast<const float*>(t.tensor), t.row_stride, t.panel, pixel_pitch_, t.rows,
                  t.cols);
    } else {
      isa_.load(t);
    }
  }
}

void GroupWindows::stage(const void* fine, int64_t sample, const Range& segment, const GroupBlock& block,
                         float* window) const {
  std::array<Range, 3> met;     // by taps
  std::array<Range, 3> inside;  // of those
  for (size_t i = 0; i < 3; ++i) {
    met[i] = axes_[i].window(block[i]);
    inside[i] = {std::clamp<int64_t>(met[i].begin, 0, axes_[i].in),
                 std::clamp<int64_t>(met[i].end, 0, axes_[i].in)};
  }
  const int64_t first_group = segment.begin / sizes_.coarse;
  const int64_t end_group = ceil_div(segment.end, sizes_.coarse);
  TransferArguments t;
  t.dtype = fine_.dtype;
  t.rows = inside[2].size();
  t.cols = is_copy() ? segment.size() : (end_group - first_group) * sizes_.fine;
  t.row_stride = fine_.strides[2];
  t.col_stride = fine_.channel_stride;
  t.panel_stride = is_copy() ? pixel_pitch_ : t.cols;
  SpreadArguments spread;
  spread.from = window + window_floats_;
  spread.from_stride = t.cols;
  spread.to_stride = pixel_pitch_;
  spread.channel_stride = channel_pitch_;
  spread.pixels = t.rows;
  spread.first_lane = segment.begin - first_group * sizes_.coarse;
  spread.lanes = segment.size();
  spread.group_lanes = sizes_.coarse;
  spread.group_channels = sizes_.fine;
  const int64_t first_channel = is_copy() ? segment.begin : first_group * sizes_.fine;
  const int64_t before = inside[2].begin - met[2].begin;
  for (int64_t d = inside[0].begin; d < inside[0].end; ++d) {
    for (int64_t h = inside[1].begin; h < inside[1].end; ++h) {
      float* row = window + (d - met[0].begin) * plane_pitch_ + (h - met[1].begin) * row_pitch_;
      const int64_t line = sample * fine_.sample_stride + first_channel * fine_.channel_stride +
                           d * fine_.strides[0] + h * fine_.strides[1];
      if (row_parts_ > 1) {
        stage_row(t, fine, line, met[2], row);
        continue;
      }
      std::fill_n(row, before * pixel_pitch_, 0.0f);
      std::fill(row + (before + t.rows) * pixel_pitch_, row + met[2].size() * pixel_pitch_, 0.0f);
      if (t.rows == 0) continue;
      const int64_t element = line + inside[2].begin * t.row_stride;
      t.tensor = const_cast<char*>(static_cast<const char*>(fine)) + element * byte_size(fine_.dtype);
      float* to = row + before * pixel_pitch_;
      t.panel = is_copy() ? to : window + window_floats_;
      isa_.load(t);
      if (is_copy()) continue;
      spread.to = to;
      isa_.spread(spread);
    }
  }
}

}  // namespace onepass::cpu
