// Running a convolution: packing its weights, staging its input, passing its tiles over the rows.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "block/convert.h"
#include "cpu/convolution_stage.h"

namespace onepass::cpu {
namespace {

constexpr size_t max_tile_channels = 64;  // of any target: four vectors of 16
constexpr int64_t phase_group_floats = 4 * 1024;

bool contains(const Axis& axis, int64_t position) { return position >= 0 && position < axis.in; }

// The taps at class index j that meet the input: a range, because positions change by one sign along the
// taps.
Range taps_inside(const Axis& axis, const std::vector<Tap>& taps, int64_t j) {
  const auto inside = [&](size_t i) { return contains(axis, j * axis.step() + taps[i].offset); };
  size_t begin = 0;
  while (begin < taps.size() && !inside(begin)) ++begin;
  size_t end = begin;
  while (end < taps.size() && inside(end)) ++end;
  return {static_cast<int64_t>(begin), static_cast<int64_t>(end)};
}

// How many class indices from j on meet all of the taps.
int64_t run_inside(const Axis& axis, const std::vector<Tap>& taps, int64_t j) {
  int64_t run = std::numeric_limits<int64_t>::max();
  for (const Tap& tap : taps) {
    const int64_t position = j * axis.step() + tap.offset;
    run = std::min(run, contains(axis, position) ? ceil_div(axis.in - position, axis.step()) : 0);
  }
  return run;
}

float weight_at(const void* weights, DType dtype, int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(weights)[index];
  return static_cast<float>(
      load_element(dtype, static_cast<const char*>(weights) + index * byte_size(dtype)));
}

float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

}  // namespace

// ------------------------------------------------------------------------------------------------ weights

void ConvolutionStage::pack(const void* weights, const float* bias, float* packed, Executor& executor) const {
  const int64_t out_channels = group_count_ * out_channels_per_group_;
  std::fill(packed + bias_at_, packed + packed_floats_, 0.0f);
  if (bias != nullptr) std::copy_n(bias, out_channels, packed + bias_at_);
  const auto class_total = static_cast<int64_t>(classes_.size());
  const int64_t tiles = max_tile_count();
  const auto count = static_cast<int64_t>(segments_.size()) * class_total * tiles;
  executor.for_each(count, [&](int64_t index, int) {
    const Segment& segment = segments_[static_cast<size_t>(index / tiles / class_total)];
    const OutputClass& output_class = classes_[static_cast<size_t>(index / tiles % class_total)];
    if (index % tiles >= tile_count(segment)) return;
    const auto first_list = static_cast<size_t>(index / tiles) * max_pixel_term_lists;
    // Sums of magnitudes for each class and channel; the third list is of the second class alone.
    const Tile tile = tile_at(segment, index % tiles);
    std::array<float, 2 * max_tile_channels> reach{};
    for (size_t i = 0; i < output_class.lists.size(); ++i) {
      pack_tile(weights, segment, output_class, output_class.lists[i], tile,
                packed + weight_offsets_[first_list + i], reach.data() + (i == 2 ? tile.width : 0));
    }
    packed[reach_at_ + index] = isa_.largest(reach.data(), 0, 1, 2 * tile.width);
  });
}

// [chunk][term][class][output channel of the tile], zero where a lane has no channel: those sums go nowhere.
void ConvolutionStage::pack_tile(const void* weights, const Segment& segment, const OutputClass& output_class,
                                 const TermList& list, const Tile& tile, float* packed, float* reach) const {
  const int64_t term_floats = tile.width * static_cast<int64_t>(list.class_count);
  float* to = packed + tile.first * static_cast<int64_t>(list.class_count) * in_channels_per_group_ *
                           output_class.tap_count(list);
  for (int64_t chunk = 0; chunk < chunk_count_; ++chunk) {
    const Range channels = even_part(in_channels_per_group_, chunk_count_, chunk);
    if (transposed_) {
      gather_chunk(weights, segment, output_class, list, tile, channels, to);
    } else {
      turn_chunk(weights, segment, output_class, list, tile, channels, to);
    }
    for (int64_t i = channels.size() * output_class.tap_count(list); i > 0; --i, to += term_floats) {
      for (int64_t j = 0; j < term_floats; ++j) reach[j] += std::abs(to[j]);
    }
  }
}

// The weights of an output channel are contiguous, in the order [input channel][tap]. They are turned as a
// matrix in L1; its rows are then copied in the order of the terms, where that is another. Gathering
// them term by term took 3 to 6 ns a weight: 16 channels that lie 4 KiB apart share four sets of L1.
void ConvolutionStage::turn_chunk(const void* weights, const Segment& segment,
                                  const OutputClass& output_class, const TermList& list, const Tile& tile,
                                  Range channels, float* to) const {
  const int64_t first = segment.channels.begin + tile.first;
  const int64_t rows = channels.size() * kernel_elements_;
  const int64_t taps = static_cast<int64_t>(list.taps.size());
  const bool in_order = taps == kernel_elements_;
  std::vector<float> turned(in_order ? 0 : static_cast<size_t>(rows * tile.width));
  TransferArguments t;
  t.panel = in_order ? to : turned.data();
  t.panel_stride = tile.width;
  t.rows = rows;
  t.cols = std::min(tile.width, segment.channels.end - first);
  t.dtype = weight_dtype_;
  t.row_stride = 1;
  t.col_stride = in_channels_per_group_ * kernel_elements_;
  const int64_t element = (first * in_channels_per_group_ + channels.begin) * kernel_elements_;
  t.tensor = const_cast<char*>(static_cast<const char*>(weights)) + element * byte_size(weight_dtype_);
  if (t.cols < tile.width) std::fill_n(t.panel, rows * tile.width, 0.0f);
  isa_.load(t);
  if (in_order) return;
  for (const Tap& depth : output_class.taps[0]) {
    for (const Tap& height : output_class.taps[1]) {
      const int64_t k = (depth.k * axes_[1].kernel + height.k) * axes_[2].kernel;
      for (int64_t i = 0; i < channels.size(); ++i) {
        for (const TermList::WidthTap& width : list.taps) {
          const float* row = turned.data() + (i * kernel_elements_ + k + width.k[0]) * tile.width;
          to = std::copy_n(row, tile.width, to);
        }
      }
    }
  }
}

// Of a transposed convolution the output channels of an input channel lie beside each other.
void ConvolutionStage::gather_chunk(const void* weights, const Segment& segment,
                                    const OutputClass& output_class, const TermList& list, const Tile& tile,
                                    Range channels, float* to) const {
  const int64_t first = segment.channels.begin + tile.first;
  const int64_t count = std::min(tile.width, segment.channels.end - first);
  const int64_t in_group = first - segment.group * out_channels_per_group_;
  for (const Tap& depth : output_class.taps[0]) {
    for (const Tap& height : output_class.taps[1]) {
      for (int64_t i = channels.begin; i < channels.end; ++i) {
        const int64_t row = (segment.group * in_channels_per_group_ + i) * out_channels_per_group_ + in_group;
        for (const TermList::WidthTap& width : list.taps) {
          for (size_t c = 0; c < list.class_count; ++c, to += tile.width) {
            const int64_t k = (depth.k * axes_[1].kernel + height.k) * axes_[2].kernel + width.k[c];
            const int64_t element = row * kernel_elements_ + k;
            if (weight_dtype_ == DType::f32) {  // 1 ns a weight; by the call below it is 3
              const float* from = static_cast<const float*>(weights) + element;
              for (int64_t o = 0; o < count; ++o) to[o] = from[o * kernel_elements_];
            } else {
              for (int64_t o = 0; o < count; ++o) {
                to[o] = weight_at(weights, weight_dtype_, element + o * kernel_elements_);
              }
            }
            std::fill(to + count, to + tile.width, 0.0f);
          }
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ staging

// Whether any tap meets the staged position this far behind the window's start: a 1x1 convolution of stride 2
// reads every other row only.
bool ConvolutionStage::row_is_used(int axis, int64_t relative) const {
  const Axis& a = axes_[static_cast<size_t>(axis)];
  if (a.transposed || a.stride == 1) return true;
  for (int64_t k = 0; k < a.kernel; ++k) {
    if ((relative - k * a.dilation) % a.stride == 0) return true;
  }
  return false;
}

// Rows outside the input are left as they are: no tap reads them. Where rows have phases, channels go in
// groups whose row stays in L1 between them.
float ConvolutionStage::stage(const void* input, int64_t sample, const Segment& segment, Range channels,
                              const Window& window, float* staged) const {
  float most = 0;
  const int64_t width = std::max<int64_t>(1, window.inputs[2].size());
  const int64_t group =
      phase_count_ == 1 ? channels.size() : round_up(std::max<int64_t>(1, phase_group_floats / width), 4);
  for (int64_t d = 0; d < window.inputs[0].size(); ++d) {
    if (!row_is_used(0, d) || !contains(axes_[0], window.inputs[0].begin + d)) continue;
    for (int64_t h = 0; h < window.inputs[1].size(); ++h) {
      if (!row_is_used(1, h) || !contains(axes_[1], window.inputs[1].begin + h)) continue;
      float* row = staged + d * depth_pitch_ + h * row_pitch_;
      for (int64_t c = channels.begin; c < channels.end; c += group, row += group * channel_pitch_) {
        most = larger_or_nan(most,
                             stage_row(input, sample, segment, {c, std::min(channels.end, c + group)}, window,
                                       window.inputs[0].begin + d, window.inputs[1].begin + h, row));
      }
    }
  }
  return most;
}

// One row of the window for some channels of a chunk, its phases one after another, zero beside the input.
float ConvolutionStage::stage_row(const void* input, int64_t sample, const Segment& segment, Range channels,
                                  const Window& window, int64_t depth, int64_t height, float* row) const {
  float most = 0;
  const Range wanted = window.inputs[2];
  const int64_t rows = channels.size();
  for (int64_t phase = 0; phase < phase_count_; ++phase) {
    if (!row_is_used(2, phase)) continue;
    const int64_t count = ceil_div(wanted.size() - phase, phase_count_);
    if (count <= 0) continue;
    const int64_t start = wanted.begin + phase;  // input position of the phase's first float
    const int64_t first = std::min(count, start >= 0 ? 0 : ceil_div(-start, phase_count_));
    int64_t last = axes_[2].in <= start ? 0 : ceil_div(axes_[2].in - start, phase_count_);
    last = std::clamp(last, first, count);
    float* to = row + phase * phase_pitch_;
    for (int64_t c = 0; c < rows && last - first < count; ++c) {
      std::fill(to + c * channel_pitch_, to + c * channel_pitch_ + first, 0.0f);
      std::fill(to + c * channel_pitch_ + last, to + c * channel_pitch_ + count, 0.0f);
    }
    if (last == first) continue;
    TransferArguments t;
    t.panel = to + first;
    t.panel_stride = channel_pitch_;
    t.rows = rows;
    t.cols = last - first;
    const int64_t channel = segment.group * in_channels_per_group_ + channels.begin;
    const int64_t element = sample * input_.sample_stride + channel * input_.channel_stride +
                            depth * input_.strides[0] + height * input_.strides[1] +
                            (start + first * phase_count_) * input_.strides[2];
    t.tensor = const_cast<char*>(static_cast<const char*>(input)) + element * byte_size(input_.dtype);
    t.dtype = input_.dtype;
    t.row_stride = input_.channel_stride;
    t.col_stride = input_.strides[2] * phase_count_;
    isa_.load(t);
    if (wants_bound_) most = larger_or_nan(most, isa_.largest(t.panel, t.panel_stride, t.rows, t.cols));
  }
  return most;
}

// ------------------------------------------------------------------------------------------------ running

// A range of the rows' depth and height taps, as terms in chains of bounded length.
void ConvolutionStage::convolve_terms(const Sums& sums, const Rows& rows, Range channels, const Tile& tile,
                                      Range taps, bool add) const {
  const bool larger = channels.size() == chunk_channels();
  const std::vector<TermList>& lists = rows.output_class->lists;
  std::array<int64_t, max_pixel_term_lists> terms_of_tap{};
  for (size_t i = 0; i < lists.size(); ++i) {
    terms_of_tap[i] = channels.size() * static_cast<int64_t>(lists[i].taps.size());
  }
  const int64_t most = taps.size() * (terms_of_tap[0] + std::max(terms_of_tap[1], terms_of_tap[2]));
  const int64_t parts = ceil_div(most, max_chain_terms + max_chain_terms / 2);
  for (int64_t i = 0; i < parts; ++i) {
    std::array<PixelTerms, max_pixel_term_lists> terms;
    for (size_t k = 0; k < lists.size(); ++k) {
      const Range range = even_part(taps.size() * terms_of_tap[k], parts, i);
      const int64_t first = taps.begin * terms_of_tap[k] + range.begin;
      terms[k] = {lists[k].offsets[larger ? 0 : 1].data() + first, range.size(),
                  rows.packed[k] + first * tile.width * static_cast<int64_t>(lists[k].class_count)};
    }
    const bool more = add || i > 0;
    if (lanes_ == Lanes::pixels) {
      isa_.pixel_tile({rows.staged,
                       {terms[0], terms[1], terms[2]},
                       static_cast<int>(interleaved_classes()),
                       rows.to,
                       sums.channel_stride,
                       rows.pixel_stride,
                       rows.pixels,
                       rows.count,
                       rows.staged_row_stride,
                       rows.row_stride,
                       static_cast<int>(tile.width),
                       more,
                       rows.bias});
      continue;
    }
    for (int64_t row = 0; row < rows.count; ++row) {
      isa_.channel_tile({rows.staged + row * rows.staged_row_stride, terms[0].offsets, terms[0].terms,
                         terms[0].weights, rows.to + row * rows.row_stride, rows.pixel_stride, rows.pixels,
                         tile.vectors, more, rows.bias});
    }
  }
}

// Rows of one tile: the terms of the taps that meet the input, as few ranges.
void ConvolutionStage::convolve_rows(const Sums& sums, const Rows& rows, Range channels, const Tile& tile,
                                     Range depth_taps, Range height_taps) const {
  bool add = channels.begin > 0;
  if (depth_taps.size() == 0 || height_taps.size() == 0) {
    if (!add) clear_rows(sums, rows, tile);
    return;
  }
  const auto heights = static_cast<int64_t>(rows.output_class->taps[1].size());
  if (height_taps.size() == heights) {
    convolve_terms(sums, rows, channels, tile, {depth_taps.begin * heights, depth_taps.end * heights}, add);
    return;
  }
  for (int64_t d = depth_taps.begin; d < depth_taps.end; ++d) {
    const Range taps{d * heights + height_taps.begin, d * heights + height_taps.end};
    convolve_terms(sums, rows, channels, tile, taps, add);
    add = true;
  }
}

// No tap meets the input: the bias alone.
void ConvolutionStage::clear_rows(const Sums& sums, const Rows& rows, const Tile& tile) const {
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t p = 0; p < rows.pixels; ++p) {
      float* to = rows.to + row * rows.row_stride + p * rows.pixel_stride;
      for (int64_t c = 0; c < tile.width; ++c) to[c * sums.channel_stride] = rows.bias[c];
    }
  }
}

// What one call of the tiles computes, over some rows of a block and one strip of their pixels; the sums
// begin at row `panel_row`.
void ConvolutionStage::convolve_class(const Task& task, size_t class_index, const float* packed,
                                      Range channels, int64_t panel_row, Range rows, int64_t strip,
                                      const float* staged, const Sums& sums) const {
  const OutputClass& lead = classes_[class_index];
  if (lead.is_bare()) return;  // filled before
  const int64_t height = task.block.outputs[1].size();
  const int64_t first_plane = task.block.outputs[0].begin + rows.begin / height;
  const bool one_plane = (rows.end - 1) / height == rows.begin / height;
  if (one_plane && first_plane % axes_[0].class_stride() != lead.index[0]) return;
  const Range along = task.block.outputs[2];
  const int64_t stride = axes_[2].class_stride();
  // The row's first output of the class and, from there, the strip's share of those that follow. Where
  // classes alternate, rows of a block begin with the first.
  const int64_t index = lead.index[2];
  const int64_t row_first = index + round_up(std::max<int64_t>(0, along.begin - index), stride);
  if (row_first >= along.end) return;
  // Strips are whole tiles: one that ends inside a tile runs the slower, narrower ones (s19: 2%).
  const int64_t tile_pixels = lanes_ == Lanes::channels ? isa_.tile_pixels : isa_.pixel_tile_pixels;
  const int64_t count = ceil_div(along.end - row_first, stride);
  const Range tiles = even_part(ceil_div(count, tile_pixels), strips_, strip);
  const Range pixels{tiles.begin * tile_pixels, std::min(count, tiles.end * tile_pixels)};
  if (pixels.size() <= 0) return;
  const int64_t first = row_first + pixels.begin * stride;
  const bool alternate = interleaved_classes() > 1;
  Rows part;
  part.output_class = &lead;
  part.pixels = alternate ? std::min(along.end - first, pixels.size() * stride) : pixels.size();
  part.pixel_stride = (alternate ? 1 : stride) * sums.pixel_stride;
  part.row_stride = axes_[1].class_stride() * along.size() * sums.pixel_stride;
  part.staged_row_stride = axes_[1].step() * row_pitch_;
  const int64_t column =
      axes_[2].transposed ? first / stride - task.window.inputs[2].begin : first - along.begin;
  const float* const row_start = staged + column + lead.base;
  for (int64_t t = 0; t < tile_count(task.segment); ++t) {
    const Tile tile = tile_at(task.segment, t);
    part.bias = packed + bias_at_ + task.segment.channels.begin + tile.first;
    for (size_t k = 0; k < lead.lists.size(); ++k) {
      const TermList& list = lead.lists[k];
      part.packed[k] = packed_list(packed, task.segment_index, class_index, k) +
                       (tile.first * in_channels_per_group_ + channels.begin * tile.width) *
                           lead.tap_count(list) * static_cast<int64_t>(list.class_count);
    }
    for (int64_t row = rows.begin; row < rows.end;) {
      // The rows of one plane, and of those the ones of the class.
      const int64_t plane = row / height;
      const int64_t plane_end = std::min(rows.end, (plane + 1) * height);
      const int64_t d = task.block.outputs[0].begin + plane;
      const int64_t h = task.block.outputs[1].begin + row - plane * height;
      const int64_t row_step = axes_[1].class_stride();
      const int64_t skip = (lead.index[1] - h) % row_step;
      int64_t r = row + (skip < 0 ? skip + row_step : skip);
      row = plane_end;
      if (d % axes_[0].class_stride() != lead.index[0]) continue;
      const int64_t jd = d / axes_[0].class_stride();
      const Range depth_taps = taps_inside(axes_[0], lead.taps[0], jd);
      const int64_t depth = jd * axes_[0].step() - task.window.inputs[0].begin;
      int64_t jh = (task.block.outputs[1].begin + r - plane * height) / row_step;
      while (r < plane_end) {
        const Range height_taps = taps_inside(axes_[1], lead.taps[1], jh);
        const int64_t line = jh * axes_[1].step() - task.window.inputs[1].begin;
        part.staged = row_start + depth * depth_pitch_ + line * row_pitch_;
        const int64_t pixel = (r - panel_row) * along.size() + first - along.begin;
        part.to = sums.data + pixel * sums.pixel_stride + tile.first * sums.channel_stride;
        part.count = 0;
        const int64_t inside = run_inside(axes_[1], lead.taps[1], jh);
        if (inside > 0) {
          part.count = std::min(inside, ceil_div(plane_end - r, row_step));
          jh += part.count;
          r += part.count * row_step;
        } else {
          do {
            ++part.count;
            ++jh;
            r += row_step;
          } while (r < plane_end && taps_inside(axes_[1], lead.taps[1], jh) == height_taps);
        }
        convolve_rows(sums, part, channels, tile, depth_taps, height_taps);
      }
    }
  }
}

// The stride of a transposed convolution is larger than its kernel: outputs without a tap are the bias.
void ConvolutionStage::fill_with_bias(const Task& task, const float* packed, int64_t pixels,
                                      const Sums& sums) const {
  const float* bias = packed + bias_at_ + task.segment.channels.begin;
  if (lanes_ == Lanes::pixels) {
    for (int64_t c = 0; c < task.segment.channels.size(); ++c)
      std::fill_n(sums.data + c * sums.channel_stride, pixels, bias[c]);
    return;
  }
  // A pixel, then as many as there are.
  const int64_t floats = pixels * sums.pixel_stride;
  std::copy_n(bias, sums.pixel_stride, sums.data);
  for (int64_t done = sums.pixel_stride; done < floats; done *= 2) {
    std::copy_n(sums.data, std::min(done, floats - done), sums.data + done);
  }
}

void ConvolutionStage::convolve(const Task& task, const float* packed, Range channels, Range rows,
                                const float* staged, const Sums& sums) const {
  if (has_bare_classes_ && channels.begin == 0) {
    fill_with_bias(task, packed, rows.size() * task.block.outputs[2].size(), sums);
  }
  for (int64_t row = rows.begin; row < rows.end; row += rows_per_cache_block_) {
    const Range part{row, std::min(rows.end, row + rows_per_cache_block_)};
    for (int64_t strip = 0; strip < strips_; ++strip) {
      for (size_t c = 0; c < classes_.size(); ++c) {
        convolve_class(task, c, packed, channels, rows.begin, part, strip, staged, sums);
      }
    }
  }
}

// Of the magnitude of a segment's sums with their bias, where inputs have at most this magnitude.
float ConvolutionStage::bound_of(const Task& task, const float* packed, float largest_input) const {
  const auto tiles_of_segment = static_cast<int64_t>(classes_.size()) * max_tile_count();
  const float* reach = packed + reach_at_ + static_cast<int64_t>(task.segment_index) * tiles_of_segment;
  const float* bias = packed + bias_at_ + task.segment.channels.begin;
  return isa_.largest(reach, 0, 1, tiles_of_segment) * largest_input +
         isa_.largest(bias, 0, 1, task.segment.channels.size());
}

ConvolutionStage::Sums ConvolutionStage::sums_at(float* data, const Task& task, int64_t pixels) const {
  if (lanes_ == Lanes::pixels) return {data, 1, pixels};
  return {data, padded_channels(task.segment.channels.size()), 1};
}

void ConvolutionStage::run(const Arguments& arguments, const float* packed, float* worker,
                           const ConvolutionTask& of,
                           const std::function<void(const Panel&)>& consume) const {
  const int64_t sample = of.samples.begin;
  const size_t segment_index = of.segment;
  const Block block = block_at(of.block);
  Task task{segments_[segment_index], segment_index, block, {}};
  for (size_t i = 0; i < 3; ++i) task.window.inputs[i] = axes_[i].window(block.outputs[i]);
  float* staged = worker;
  float* data = worker + window_floats_;
  const int64_t row_total = block.outputs[0].size() * block.outputs[1].size();
  const int64_t width = block.outputs[2].size();
  const bool one_chunk = chunk_count_ == 1;
  const Sums all = sums_at(data, task, row_total * width);
  float bound = wants_bound_ ? 0 : std::numeric_limits<float>::infinity();
  for (int64_t c = 0; c < chunk_count_; ++c) {
    const Range channels = even_part(in_channels_per_group_, chunk_count_, c);
    float& largest_input = staged[window_floats_ - 1];
    if (!of.window_is_staged) {
      largest_input = stage(arguments.input, sample, task.segment, channels, task.window, staged);
    }
    if (wants_bound_) bound += bound_of(task, packed, largest_input);
    if (!one_chunk) convolve(task, packed, channels, {0, row_total}, staged, all);
  }
  for (Range rows = panel_rows(block, 0); rows.begin < row_total; rows = panel_rows(block, rows.end)) {
    Sums sums = all;
    if (one_chunk) {
      sums = sums_at(data, task, rows.size() * width);
      convolve(task, packed, {0, in_channels_per_group_}, rows, staged, sums);
    } else {
      sums.data += rows.begin * width * sums.pixel_stride;
    }
    const int64_t pixel = first_pixel(block, rows.begin);
    const Region region{sample, task.segment.channels, {pixel, pixel + rows.size() * width}};
    consume({sums.data, lanes_ == Lanes::pixels ? sums.channel_stride : sums.pixel_stride, region, bound});
  }
}

}  // namespace onepass::cpu
