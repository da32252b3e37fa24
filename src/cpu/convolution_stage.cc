// Cutting a convolution into tasks, staging its input and running its tiles.
#include "cpu/convolution_stage.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "block/convert.h"

namespace onepass::cpu {
namespace {

// Terms of one accumulator: one chain over K = 1728 has 6-7x PyTorch's error, chains of about 200 have 1.2-1.6x.
constexpr int64_t max_chain_terms = 256;
// Sums of a block wait in L2 between chunks of input channels: 384 KiB leave room for the window and the weights.
constexpr int64_t block_sum_floats = 96 * 1024;
// A finished panel is read three to five times by the steps that follow: 48 KiB stay in a 64 KiB L1.
constexpr int64_t panel_floats = 12 * 1024;
// Fewer pixels than this in a panel and the weights, not the sums, would stream through L1.
constexpr int64_t min_panel_pixels = 96;
constexpr int64_t max_task_channels = 256;
// A sample is cut into at least this many tasks where it is big enough, so that batch 1 uses all threads.
constexpr int64_t tasks_per_sample = 32;
// Below this many multiply-adds, a task costs more to hand out than to compute.
constexpr double min_task_multiply_adds = 2e5;
constexpr int64_t max_classes = 4096;
constexpr int64_t max_window_floats = int64_t{1} << 28;

std::array<Axis, 3> make_axes(const Conv& conv, const Shape& input, const Shape& output) {
  std::array<Axis, 3> axes;
  const auto rank = static_cast<size_t>(conv.rank);
  for (size_t i = 0; i < rank; ++i) {
    Axis& axis = axes[3 - rank + i];
    axis.in = input[2 + i];
    axis.out = output[2 + i];
    axis.kernel = conv.kernel[i];
    axis.stride = conv.stride[i];
    axis.padding = conv.padding_before[i];
    axis.dilation = conv.dilation[i];
    axis.transposed = conv.transposed;
  }
  return axes;
}

// Where neither of two neighbouring dimensions is convolved and the input's pixels lie evenly, they are one long
// row: a 1x1 convolution of 8x8 pixels runs over rows of 64.
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

float weight_at(const void* weights, DType dtype, int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(weights)[index];
  return static_cast<float>(
      load_element(dtype, static_cast<const char*>(weights) + index * byte_size(dtype)));
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

ConvolutionStage::ConvolutionStage(const Problem& problem, const Isa& isa, Lanes lanes, int64_t cut)
    : isa_(isa), lanes_(lanes), input_(problem.input), weight_dtype_(problem.parameters[0].dtype) {
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
  build_classes();
}

// Segments lie within a group of the convolution, do not cross a multiple of `cut`, and are small enough for a task.
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
  } else if (width * height > budget) {
    block_counts_ = {depth, ceil_div(height, std::max<int64_t>(1, budget / width)), 1};
  } else {
    block_counts_ = {ceil_div(depth, std::max<int64_t>(1, budget / (width * height))), 1, 1};
  }
  max_block_pixels_ = 1;
  for (size_t i = 0; i < 3; ++i) max_block_pixels_ *= ceil_div(axes_[i].out, block_counts_[i]);
  const double per_segment = static_cast<double>(max_block_pixels_ * max_segment_channels_) *
                             static_cast<double>(in_channels_per_group_ * kernel_elements_);
  segments_per_task_ = 1;
  if (per_segment < min_task_multiply_adds) {
    segments_per_task_ = static_cast<int64_t>(min_task_multiply_adds / per_segment) + 1;
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
  const int64_t block_width = ceil_div(axes_[2].out, block_counts_[2]);
  const int64_t padded = padded_channels(max_segment_channels_);
  const int64_t pixels = std::max(min_panel_pixels, panel_floats / padded);
  rows_per_panel_ = std::max<int64_t>(1, pixels / block_width);
  max_panel_pixels_ = std::min(max_block_pixels_, rows_per_panel_ * block_width);
  sum_floats_ = round_up((chunk_count_ == 1 ? max_panel_pixels_ : max_block_pixels_) * padded, 16);
}

void ConvolutionStage::choose_window() {
  std::array<int64_t, 3> extent{};
  for (size_t i = 0; i < 3; ++i) {
    for (int64_t part = 0; part < block_counts_[i]; ++part) {
      extent[i] = std::max(extent[i], axes_[i].window(even_part(axes_[i].out, block_counts_[i], part)).size());
    }
  }
  phase_count_ = axes_[2].step();
  phase_pitch_ = ceil_div(extent[2], phase_count_);
  row_pitch_ = phase_count_ * phase_pitch_;
  depth_pitch_ = extent[1] * row_pitch_;
  channel_pitch_ = extent[0] * depth_pitch_;
  // Channels a multiple of 256 bytes apart would share a few sets of L1.
  if (channel_pitch_ % 64 == 0) channel_pitch_ += 16;
  window_floats_ = round_up(ceil_div(in_channels_per_group_, chunk_count_) * channel_pitch_ + isa_.lanes * 2, 16);
}

void ConvolutionStage::build_classes() {
  const int64_t chunk_channels = ceil_div(in_channels_per_group_, chunk_count_);
  for (int64_t d = 0; d < axes_[0].classes(); ++d) {
    for (int64_t h = 0; h < axes_[1].classes(); ++h) {
      for (int64_t w = 0; w < axes_[2].classes(); ++w) {
        OutputClass result;
        result.index = {d, h, w};
        std::vector<int64_t> taps;
        for (const Tap& td : axes_[0].taps(d)) {
          for (const Tap& th : axes_[1].taps(h)) {
            for (const Tap& tw : axes_[2].taps(w)) {
              result.kernel_positions.push_back((td.k * axes_[1].kernel + th.k) * axes_[2].kernel + tw.k);
              const int64_t along = tw.offset + (axes_[2].transposed ? 0 : axes_[2].padding);
              const int64_t in_row = along % phase_count_ * phase_pitch_ + along / phase_count_;
              taps.push_back(td.offset * depth_pitch_ + th.offset * row_pitch_ +
                             (axes_[2].transposed ? tw.offset : in_row));
            }
          }
        }
        if (!taps.empty()) result.base = *std::min_element(taps.begin(), taps.end());
        for (int64_t c = 0; c < chunk_channels; ++c) {
          for (const int64_t tap : taps) {
            result.offsets.push_back(static_cast<int32_t>(c * channel_pitch_ + tap - result.base));
          }
        }
        classes_.push_back(std::move(result));
      }
    }
  }
  for (const Segment& segment : segments_) {
    for (const OutputClass& output_class : classes_) {
      weight_offsets_.push_back(packed_floats_);
      packed_floats_ += padded_channels(segment.channels.size()) * in_channels_per_group_ *
                        static_cast<int64_t>(output_class.kernel_positions.size());
    }
  }
}

int64_t ConvolutionStage::padded_channels(int64_t channels) const {
  return lanes_ == Lanes::channels ? round_up(channels, isa_.lanes) : channels;
}

ConvolutionStage::Block ConvolutionStage::block_at(int64_t index) const {
  const int64_t w = index % block_counts_[2];
  const int64_t h = index / block_counts_[2] % block_counts_[1];
  const int64_t d = index / block_counts_[2] / block_counts_[1];
  return {{even_part(axes_[0].out, block_counts_[0], d), even_part(axes_[1].out, block_counts_[1], h),
           even_part(axes_[2].out, block_counts_[2], w)}};
}

Range ConvolutionStage::block_pixels(int64_t index) const {
  const Block block = block_at(index);
  const auto flat = [this](int64_t d, int64_t h, int64_t w) {
    return (d * axes_[1].out + h) * axes_[2].out + w;
  };
  return {flat(block.outputs[0].begin, block.outputs[1].begin, block.outputs[2].begin),
          flat(block.outputs[0].end - 1, block.outputs[1].end - 1, block.outputs[2].end - 1) + 1};
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

int64_t ConvolutionStage::weight_offset(size_t segment_index, size_t class_index) const {
  return weight_offsets_[segment_index * classes_.size() + class_index];
}

double ConvolutionStage::padded_multiply_adds() const {
  double total = 0;
  for (const OutputClass& output_class : classes_) {
    double pixels = 1;
    for (size_t i = 0; i < 3; ++i) {
      const int64_t stride = axes_[i].class_stride();
      pixels *= static_cast<double>(ceil_div(axes_[i].out - output_class.index[i], stride));
    }
    double channels = 0;
    for (const Segment& segment : segments_) {
      channels += static_cast<double>(padded_channels(segment.channels.size()));
    }
    total += pixels * channels * static_cast<double>(in_channels_per_group_) *
             static_cast<double>(output_class.kernel_positions.size());
  }
  if (lanes_ == Lanes::pixels) {
    const int64_t width = ceil_div(axes_[2].out, axes_[2].class_stride());
    total *= static_cast<double>(round_up(width, isa_.lanes)) / static_cast<double>(width);
  }
  return total * static_cast<double>(batch_);
}

std::string ConvolutionStage::describe() const {
  std::ostringstream out;
  out << "lanes: " << (lanes_ == Lanes::channels ? "output channels" : "pixels") << " (" << isa_.name << ", "
      << isa_.lanes << ")\n";
  out << "sub-convolutions: " << classes_.size() << '\n';
  out << "blocks per sample: " << block_count() << " of at most " << max_block_pixels_ << " pixels\n";
  out << "segments: " << segments_.size() << " of at most " << max_segment_channels_ << " channels\n";
  out << "chunks of input channels: " << chunk_count_ << '\n';
  out << "packed weights: " << packed_floats_ * 4 << " bytes\n";
  out << "per thread: window " << window_floats_ * 4 << " bytes, sums " << sum_floats_ * 4 << " bytes\n";
  return out.str();
}

// ------------------------------------------------------------------------------------------------ weights

void ConvolutionStage::pack_weights(const void* weights, float* packed, Executor& executor) const {
  const auto class_total = static_cast<int64_t>(classes_.size());
  const int64_t tiles = tile_count({0, {0, max_segment_channels_}});
  const auto count = static_cast<int64_t>(segments_.size()) * class_total * tiles;
  executor.for_each(count, [&](int64_t index, int) {
    const auto segment_index = static_cast<size_t>(index / tiles / class_total);
    const auto class_index = static_cast<size_t>(index / tiles % class_total);
    const Segment& segment = segments_[segment_index];
    if (index % tiles >= tile_count(segment)) return;
    pack_tile(weights, segment, classes_[class_index], tile_at(segment, index % tiles),
              packed + weight_offset(segment_index, class_index));
  });
}

// [input channel][tap][output channel of the tile], zero where a lane has no channel: those sums go nowhere.
void ConvolutionStage::pack_tile(const void* weights, const Segment& segment, const OutputClass& output_class,
                                 const Tile& tile, float* packed) const {
  const auto taps = static_cast<int64_t>(output_class.kernel_positions.size());
  float* to = packed + tile.first * in_channels_per_group_ * taps;
  for (int64_t i = 0; i < in_channels_per_group_; ++i) {
    for (int64_t t = 0; t < taps; ++t) {
      const int64_t k = output_class.kernel_positions[static_cast<size_t>(t)];
      for (int64_t o = 0; o < tile.width; ++o) {
        const int64_t channel = segment.channels.begin + tile.first + o;
        if (channel >= segment.channels.end) {
          *to++ = 0;
          continue;
        }
        const int64_t in_group = channel - segment.group * out_channels_per_group_;
        const int64_t in_channel = segment.group * in_channels_per_group_ + i;
        const int64_t row = transposed_ ? in_channel * out_channels_per_group_ + in_group
                                        : channel * in_channels_per_group_ + i;
        *to++ = weight_at(weights, weight_dtype_, row * kernel_elements_ + k);
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

void ConvolutionStage::stage(const void* input, int64_t sample, const Segment& segment, Range channels,
                             const Window& window, float* staged) const {
  for (int64_t d = 0; d < window.inputs[0].size(); ++d) {
    if (!row_is_used(0, d)) continue;
    for (int64_t h = 0; h < window.inputs[1].size(); ++h) {
      if (!row_is_used(1, h)) continue;
      stage_row(input, sample, segment, channels, window, window.inputs[0].begin + d, window.inputs[1].begin + h,
                staged + d * depth_pitch_ + h * row_pitch_);
    }
  }
}

// One row of the window for all channels of a chunk, its phases one after another, zero outside the input.
void ConvolutionStage::stage_row(const void* input, int64_t sample, const Segment& segment, Range channels,
                                 const Window& window, int64_t depth, int64_t height, float* row) const {
  const bool inside = depth >= 0 && depth < axes_[0].in && height >= 0 && height < axes_[1].in;
  const Range wanted = window.inputs[2];
  const int64_t rows = channels.size();
  for (int64_t phase = 0; phase < phase_count_; ++phase) {
    if (!row_is_used(2, phase)) continue;
    const int64_t count = ceil_div(wanted.size() - phase, phase_count_);
    if (count <= 0) continue;
    const int64_t start = wanted.begin + phase;  // input position of the phase's first float
    int64_t first = inside ? std::min(count, start >= 0 ? 0 : ceil_div(-start, phase_count_)) : count;
    int64_t last = axes_[2].in <= start ? 0 : ceil_div(axes_[2].in - start, phase_count_);
    last = std::clamp(last, first, count);
    float* to = row + phase * phase_pitch_;
    for (int64_t c = 0; c < rows; ++c) {
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
  }
}

// ------------------------------------------------------------------------------------------------ running

void ConvolutionStage::convolve_row(const Sums& sums, const OutputClass& output_class, const float* packed,
                                    Range channels, const Tile& tile, int64_t pixels, const float* staged,
                                    float* to) const {
  const auto taps = static_cast<int64_t>(output_class.kernel_positions.size());
  const int64_t terms = channels.size() * taps;
  const int64_t pixel_stride = axes_[2].class_stride() * sums.pixel_stride;
  const int64_t parts = ceil_div(terms, max_chain_terms + max_chain_terms / 2);
  packed += tile.first * in_channels_per_group_ * taps + channels.begin * taps * tile.width;
  for (int64_t i = 0; i < parts; ++i) {
    const Range part = even_part(terms, parts, i);
    const float* weights = packed + part.begin * tile.width;
    const int32_t* offsets = output_class.offsets.data() + part.begin;
    const bool add = channels.begin > 0 || i > 0;
    if (lanes_ == Lanes::channels) {
      isa_.channel_tile({staged, offsets, part.size(), weights, to, pixel_stride, pixels, tile.vectors, add});
    } else {
      isa_.pixel_tile({staged, offsets, part.size(), weights, to, sums.channel_stride, pixel_stride, pixels,
                       static_cast<int>(tile.width), add});
    }
  }
}

// A class without taps (the stride is larger than the kernel): its outputs are zero before the bias.
void ConvolutionStage::clear_row(const Sums& sums, const Tile& tile, int64_t pixels, float* to) const {
  const int64_t pixel_stride = axes_[2].class_stride() * sums.pixel_stride;
  for (int64_t p = 0; p < pixels; ++p) {
    for (int64_t c = 0; c < tile.width; ++c) to[p * pixel_stride + c * sums.channel_stride] = 0;
  }
}

void ConvolutionStage::convolve_class(const Task& task, const OutputClass& output_class, const float* packed,
                                      Range channels, Range rows, const float* staged, const Sums& sums) const {
  const Block& block = task.block;
  const Axis& along = axes_[2];
  const int64_t width = block.outputs[2].size();
  const int64_t height = block.outputs[1].size();
  const int64_t stride = along.class_stride();
  // The first output of the row that belongs to the class, and the staged float its j stands for.
  const int64_t first = output_class.index[2] + round_up(std::max<int64_t>(0, block.outputs[2].begin -
                                                                                  output_class.index[2]),
                                                         stride);
  if (first >= block.outputs[2].end) return;
  const int64_t pixels = ceil_div(block.outputs[2].end - first, stride);
  const int64_t column = along.transposed ? first / stride - task.window.inputs[2].begin : 0;
  for (int64_t t = 0; t < tile_count(task.segment); ++t) {
    const Tile tile = tile_at(task.segment, t);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const int64_t d = block.outputs[0].begin + row / height;
      const int64_t h = block.outputs[1].begin + row % height;
      if (d % axes_[0].class_stride() != output_class.index[0] % axes_[0].class_stride() ||
          h % axes_[1].class_stride() != output_class.index[1] % axes_[1].class_stride()) {
        continue;
      }
      const int64_t depth = d / axes_[0].class_stride() * axes_[0].step() - task.window.inputs[0].begin;
      const int64_t line = h / axes_[1].class_stride() * axes_[1].step() - task.window.inputs[1].begin;
      const float* from = staged + depth * depth_pitch_ + line * row_pitch_ + column + output_class.base;
      const int64_t pixel = (row - rows.begin) * width + first - block.outputs[2].begin;
      float* to = sums.data + pixel * sums.pixel_stride + tile.first * sums.channel_stride;
      if (output_class.kernel_positions.empty()) {
        if (channels.begin == 0) clear_row(sums, tile, pixels, to);
      } else {
        convolve_row(sums, output_class, packed, channels, tile, pixels, from, to);
      }
    }
  }
}

void ConvolutionStage::convolve(const Task& task, const float* packed, Range channels, Range rows,
                                const float* staged, const Sums& sums) const {
  for (size_t c = 0; c < classes_.size(); ++c) {
    convolve_class(task, classes_[c], packed + weight_offset(task.segment_index, c), channels, rows, staged, sums);
  }
}

ConvolutionStage::Sums ConvolutionStage::sums_at(float* data, const Task& task, int64_t pixels) const {
  if (lanes_ == Lanes::pixels) return {data, 1, pixels};
  return {data, padded_channels(task.segment.channels.size()), 1};
}

void ConvolutionStage::run(const void* input, const float* packed, float* worker, int64_t sample,
                           size_t segment_index, int64_t block_index,
                           const std::function<void(const Panel&)>& consume) const {
  const Block block = block_at(block_index);
  Task task{segments_[segment_index], segment_index, block, {}};
  for (size_t i = 0; i < 3; ++i) task.window.inputs[i] = axes_[i].window(block.outputs[i]);
  float* staged = worker;
  float* data = worker + window_floats_;
  const int64_t row_total = block.outputs[0].size() * block.outputs[1].size();
  const int64_t width = block.outputs[2].size();
  const bool one_chunk = chunk_count_ == 1;
  const Sums all = sums_at(data, task, row_total * width);
  for (int64_t c = 0; c < chunk_count_; ++c) {
    const Range channels = even_part(in_channels_per_group_, chunk_count_, c);
    stage(input, sample, task.segment, channels, task.window, staged);
    if (!one_chunk) convolve(task, packed, channels, {0, row_total}, staged, all);
  }
  const int64_t first_pixel = block_pixels(block_index).begin;
  for (int64_t row = 0; row < row_total; row += rows_per_panel_) {
    const Range rows{row, std::min(row_total, row + rows_per_panel_)};
    Sums sums = all;
    if (one_chunk) {
      sums = sums_at(data, task, rows.size() * width);
      convolve(task, packed, {0, in_channels_per_group_}, rows, staged, sums);
    } else {
      sums.data += row * width * sums.pixel_stride;
    }
    const Region region{sample, task.segment.channels,
                        {first_pixel + rows.begin * width, first_pixel + rows.end * width}};
    consume({sums.data, lanes_ == Lanes::pixels ? sums.channel_stride : sums.pixel_stride, region});
  }
}

}  // namespace onepass::cpu
