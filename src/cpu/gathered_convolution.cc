// Gathering the terms of positions, and multiplying them with weights in place.
#include "cpu/gathered_convolution.h"

#include <algorithm>
#include <limits>
#include <sstream>

namespace onepass::cpu {
namespace {

// Four chains of NEON lanes; wider lanes have shorter ones.
constexpr int64_t max_chunk_terms = 4 * max_chain_terms;
// Positions whose gathered terms stay in L2 beside the weights of a tile: 96 x 1024 floats are 384 KiB.
constexpr int64_t task_positions = 96;
constexpr int64_t max_pixels = 256;
// Channels of a row that are copied together, where its pixels lie apart.
constexpr int64_t line_channels = 16;
// Turning a weight takes as long as gathering four terms from runs of taps instead of runs of channels.
constexpr int64_t gathers_of_weight = 4;
// Terms are gathered once for each segment: 256 channels take ten times as long as gathering.
constexpr int64_t max_task_channels = 256, min_task_channels = 32;

// Copies runs of kWidth floats, or of `width` where it is 0.
template <int64_t kWidth>
float* copy_runs(const float* from, const std::vector<int64_t>& runs, int64_t width, float* to) {
  const int64_t count = kWidth > 0 ? kWidth : width;
  for (const int64_t run : runs) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[run + i];
    to += count;
  }
  return to;
}

}  // namespace

std::string GatheredConvolution::refusal(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  if (conv.transposed) return "the convolution is transposed";
  const Shape output = problem.block.conv_output_shape(problem.input.sizes);
  int64_t pixels = 1;
  int64_t taps = 1;
  for (size_t i = 2; i < output.size(); ++i) pixels *= output[i];
  for (const int64_t k : conv.kernel) taps *= k;
  if (pixels > max_pixels && !reads_in_place(problem))
    return "a sample has more than " + std::to_string(max_pixels) + " output pixels";
  if (taps > max_chunk_terms) return "the kernel has more than " + std::to_string(max_chunk_terms) + " taps";
  return "";
}

// A kernel of one tap over a dense f32 input in channels last.
bool GatheredConvolution::reads_in_place(const Problem& problem) {
  const Shape output = problem.block.conv_output_shape(problem.input.sizes);
  for (const Axis& axis : make_axes(*problem.block.conv(), problem.input.sizes, output)) {
    if (!axis.is_identity()) return false;
  }
  const TensorMap map(problem.input);
  return map.dtype == DType::f32 && map.is_panel(Orientation::interleaved) && map.channel_stride == 1;
}

GatheredConvolution::GatheredConvolution(const Problem& problem, const Isa& isa, int64_t cut)
    : isa_(isa),
      input_(problem.input),
      weight_dtype_(problem.parameters[0].dtype),
      batch_(problem.input.sizes[0]),
      group_count_(problem.block.conv()->groups) {
  const Conv& conv = *problem.block.conv();
  const Shape output = problem.block.conv_output_shape(problem.input.sizes);
  group_inputs_ = conv.in_channels / conv.groups;
  group_outputs_ = conv.out_channels / conv.groups;
  axes_ = make_axes(conv, problem.input.sizes, output);
  pixels_ = axes_[0].out * axes_[1].out * axes_[2].out;
  for (const Axis& axis : axes_) taps_ *= axis.kernel;
  terms_ = group_inputs_ * taps_;
  chunk_count_ = ceil_div(group_inputs_, std::max<int64_t>(1, max_chunk_terms / taps_));
  samples_per_task_ =
      std::clamp<int64_t>(task_positions / std::max<int64_t>(1, pixels_), 1, std::max<int64_t>(1, batch_));
  in_place_ = reads_in_place(problem);
  if (in_place_) block_count_ = std::max<int64_t>(1, ceil_div(pixels_, 2 * task_positions));
  choose_segments(cut, problem.device.threads);
  channel_runs_ = taps_ > 1 && input_.dtype == DType::f32 && input_.channel_stride == 1 &&
                  group_outputs_ <= gathers_of_weight * pixels_;
  choose_window();
  choose_runs();
  row_pitch_ = round_up(chunk_channels(0).size() * taps_, 16);
  const int64_t positions = samples_per_task_ * max_panel_pixels();
  gathered_floats_ = in_place_ ? 0 : round_up(positions * row_pitch_, 16);
  sum_floats_ = round_up(positions * padded_channels(max_segment_channels()), 16);
  if (weight_dtype_ != DType::f32 || channel_runs_) bias_at_ = group_count_ * group_outputs_ * terms_;
  packed_floats_ = bias_at_ + group_count_ * group_outputs_;
}

// Segments do not change the bits of a sum: there are as many as the threads want. They are whole vectors:
// statistics of a partial one may differ in the last bit.
void GatheredConvolution::choose_segments(int64_t cut, int64_t threads) {
  const int64_t parts = ceil_div(batch_, samples_per_task_) * block_count_ * group_count_;
  int64_t limit = max_task_channels;
  while (limit > min_task_channels && parts * ceil_div(group_outputs_, limit) < 2 * threads && threads > 1) {
    limit /= 2;
  }
  segments_ = segments_of(group_count_, group_outputs_, cut, limit, isa_.lanes);
  segments_of_one_thread_ = segments_of(group_count_, group_outputs_, cut, max_task_channels, isa_.lanes);
  max_segment_channels_ = most_channels(segments_);
}

// Without a border the planes are those of the input.
void GatheredConvolution::choose_window() {
  for (const Axis& axis : axes_) {
    const Range window = axis.window({0, axis.out});
    has_border_ |= window.begin < 0 || window.end > axis.in;
  }
  channel_pitch_ = 1;
  for (size_t i = 0; i < 3; ++i) {
    window_[i] = has_border_ ? axes_[i].window({0, axes_[i].out}).size() : axes_[i].in;
    channel_pitch_ *= window_[i];
  }
  if (taps_ == 1) {
    window_floats_ = in_place_ ? 0 : round_up(line_channels * axes_[2].out, 16);
    return;
  }
  if (channel_runs_) return;
  const int64_t channels = chunk_channels(0).size();
  bordered_at_ = round_up(channels * input_.pixels(), 16);
  window_floats_ = bordered_at_ + (has_border_ ? round_up(channels * channel_pitch_, 16) : 0);
}

// Taps side by side are one run; rows of taps that fill the window's rows are too.
void GatheredConvolution::choose_runs() {
  const auto& [depth, height, width] = axes_;
  std::vector<int64_t> offsets;
  for (int64_t d = 0; d < depth.kernel; ++d) {
    for (int64_t h = 0; h < height.kernel; ++h) {
      for (int64_t w = 0; w < width.kernel; ++w) {
        offsets.push_back((d * depth.dilation * window_[1] + h * height.dilation) * window_[2] +
                          w * width.dilation);
      }
    }
  }
  const auto contiguous = [&](int64_t count) {
    for (size_t i = 0; i < offsets.size(); ++i) {
      const auto within = static_cast<int64_t>(i) % count;
      if (offsets[i] != offsets[i - static_cast<size_t>(within)] + within) return false;
    }
    return true;
  };
  for (const int64_t count : {taps_, height.kernel * width.kernel, width.kernel, int64_t{1}}) {
    if (!contiguous(count)) continue;
    run_width_ = count;
    break;
  }
  for (size_t i = 0; i < offsets.size(); i += static_cast<size_t>(run_width_)) runs_.push_back(offsets[i]);
}

// A tile of few positions waits for its sums: four channels take four cycles a term. Fewer than four channels
// load as much for each. Adding the lanes of sums takes as long as 8 terms, a partial vector as long as 32.
double GatheredConvolution::padded_multiply_adds() const {
  constexpr int64_t least_positions = 4;
  constexpr int64_t tile_channels = 4;
  const int64_t positions = std::max(least_positions, samples_per_task_ * pixels_);
  const double tasks = static_cast<double>(batch_) / static_cast<double>(samples_per_task_);
  const int64_t outputs = group_outputs_ + group_outputs_ % tile_channels / 2;
  const int64_t more = 8 + (chunk_channels(0).size() * taps_ % isa_.lanes != 0 ? 32 : 0);
  return tasks * static_cast<double>(positions * group_count_ * outputs) *
         static_cast<double>(terms_ + chunk_count_ * more);
}

double GatheredConvolution::read_weights() const {
  return static_cast<double>(ceil_div(batch_, samples_per_task_) * group_count_ * group_outputs_) *
         static_cast<double>(terms_);
}

double GatheredConvolution::staged_elements() const {
  const auto segments = static_cast<int64_t>(segments_of_one_thread_.size());
  return static_cast<double>(batch_ * pixels_) * static_cast<double>(segments * terms_);
}

double GatheredConvolution::passes_from_l2() const {
  constexpr int64_t channels_of_pass = 8;
  const int64_t passes = ceil_div(std::min(group_outputs_, max_task_channels), channels_of_pass);
  return static_cast<double>(std::max<int64_t>(0, passes - 2));
}

double GatheredConvolution::turned_weights() const {
  return channel_runs_ ? static_cast<double>(group_count_ * group_outputs_ * terms_) : 0;
}

double GatheredConvolution::copied_elements() const {
  if (taps_ == 1 || channel_runs_) return 0;
  const auto segments = static_cast<int64_t>(segments_of_one_thread_.size());
  const bool planar = input_.is_panel(Orientation::planar) && input_.channel_stride == input_.pixels();
  const int64_t copies = (planar ? 0 : 1) + (has_border_ ? 2 : 0);
  return static_cast<double>(batch_ * segments * group_inputs_) *
         static_cast<double>(copies * channel_pitch_);
}

double GatheredConvolution::copied_rows() const {
  if (taps_ == 1 || channel_runs_ || !has_border_) return 0;
  const auto segments = static_cast<int64_t>(segments_of_one_thread_.size());
  return static_cast<double>(batch_ * segments * group_inputs_) *
         static_cast<double>(axes_[0].in * axes_[1].in);
}

std::string GatheredConvolution::describe() const {
  std::ostringstream out;
  out << "lanes: terms of a sum (" << isa_.name << ", " << isa_.lanes << ")\n";
  out << "samples in a task: " << samples_per_task_ << " of " << max_panel_pixels() << " pixels\n";
  out << "segments: " << segments_.size() << " of at most " << max_segment_channels() << " channels\n";
  out << "chunks of input channels: " << chunk_count_ << '\n';
  out << "packed weights: "
      << (channel_runs_                 ? "channels of a tap together"
          : weight_dtype_ == DType::f32 ? "none"
                                        : "as f32")
      << '\n';
  out << "per thread: window " << window_floats_ * 4 << " bytes, terms " << gathered_floats_ * 4
      << " bytes, sums " << sum_floats_ * 4 << " bytes\n";
  return out.str();
}

void GatheredConvolution::pack(const void* weights, const float* bias, float* packed,
                               Executor& executor) const {
  const int64_t outputs = group_count_ * group_outputs_;
  if (bias != nullptr) {
    std::copy_n(bias, outputs, packed + bias_at_);
  } else {
    std::fill_n(packed + bias_at_, outputs, 0.0f);
  }
  if (weight_dtype_ == DType::f32 && !channel_runs_) return;
  executor.for_each(outputs, [&](int64_t output, int) { pack_weights(weights, output, packed); });
}

// Those of one output channel: as they lie in memory, or [chunk][output][tap][channel].
void GatheredConvolution::pack_weights(const void* weights, int64_t output, float* packed) const {
  TransferArguments t;
  t.dtype = weight_dtype_;
  const auto address_of = [&](int64_t term) {
    return const_cast<char*>(static_cast<const char*>(weights)) +
           (output * terms_ + term) * byte_size(weight_dtype_);
  };
  if (!channel_runs_) {
    t.panel = packed + output * terms_;
    t.panel_stride = t.cols = terms_;
    t.rows = 1;
    t.tensor = address_of(0);
    t.row_stride = terms_;
    t.col_stride = 1;
    isa_.load(t);
    return;
  }
  for (int64_t chunk = 0; chunk < chunk_count_; ++chunk) {
    const Range channels = chunk_channels(chunk);
    t.panel = packed + taps_ * (group_count_ * group_outputs_ * channels.begin + output * channels.size());
    t.panel_stride = t.cols = channels.size();
    t.rows = taps_;
    t.tensor = address_of(channels.begin * taps_);
    t.row_stride = 1;
    t.col_stride = taps_;
    isa_.load(t);
  }
}

const float* GatheredConvolution::stage(const void* input, int64_t sample, int64_t first_channel,
                                        int64_t channels, float* planes) const {
  const Region region{sample, {first_channel, first_channel + channels}, {0, input_.pixels()}};
  const float* from = planes;
  if (input_.is_panel(Orientation::planar) && input_.channel_stride == input_.pixels()) {
    from = reinterpret_cast<const float*>(address(input_, input, region));
  } else {
    transfer(isa_, Direction::load, input_, input, region, Orientation::planar, planes, input_.pixels());
  }
  if (!has_border_) return from;
  const auto& [depth, height, width] = axes_;
  float* to = planes + bordered_at_;
  std::fill_n(to, channels * channel_pitch_, 0.0f);
  // The part of the input that the window covers.
  const auto covered = [&](size_t i) { return std::min(axes_[i].in, window_[i] - axes_[i].padding); };
  if (covered(2) <= 0) return to;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t d = 0; d < covered(0); ++d) {
      for (int64_t h = 0; h < covered(1); ++h) {
        const int64_t row = ((d + depth.padding) * window_[1] + h + height.padding) * window_[2];
        std::copy_n(from + ((c * depth.in + d) * height.in + h) * width.in, covered(2),
                    to + c * channel_pitch_ + row + width.padding);
      }
    }
  }
  return to;
}

void GatheredConvolution::gather(const float* window, int64_t channels, float* rows) const {
  const auto& [depth, height, width] = axes_;
  const auto copy = run_width_ == 2   ? copy_runs<2>
                    : run_width_ == 3 ? copy_runs<3>
                    : run_width_ == 4 ? copy_runs<4>
                    : run_width_ == 5 ? copy_runs<5>
                    : run_width_ == 7 ? copy_runs<7>
                    : run_width_ == 9 ? copy_runs<9>
                                      : copy_runs<0>;
  for (int64_t d = 0; d < depth.out; ++d) {
    for (int64_t h = 0; h < height.out; ++h) {
      for (int64_t w = 0; w < width.out; ++w, rows += row_pitch_) {
        const float* from =
            window + (d * depth.stride * window_[1] + h * height.stride) * window_[2] + w * width.stride;
        if (run_width_ == channel_pitch_) {  // one position whose taps are the window
          std::copy_n(from, channels * channel_pitch_, rows);
          continue;
        }
        float* to = rows;
        for (int64_t c = 0; c < channels; ++c) to = copy(from + c * channel_pitch_, runs_, run_width_, to);
      }
    }
  }
}

void GatheredConvolution::gather_channels(const void* input, int64_t sample, int64_t first_channel,
                                          int64_t channels, float* rows) const {
  const auto& [depth, height, width] = axes_;
  const float* from = static_cast<const float*>(input) + sample * input_.sample_stride + first_channel;
  // The input position that output `o` meets with tap `k`; negative where it is outside.
  const auto met = [](const Axis& axis, int64_t o, int64_t k) {
    const int64_t position = o * axis.stride - axis.padding + k * axis.dilation;
    return position < axis.in ? position : int64_t{-1};
  };
  for (int64_t pixel = 0; pixel < pixels_; ++pixel, rows += row_pitch_) {
    const int64_t w = pixel % width.out;
    const int64_t h = pixel / width.out % height.out;
    const int64_t d = pixel / width.out / height.out;
    float* to = rows;
    for (int64_t kd = 0; kd < depth.kernel; ++kd) {
      const int64_t plane = met(depth, d, kd);
      for (int64_t kh = 0; kh < height.kernel; ++kh) {
        const int64_t line = met(height, h, kh);
        for (int64_t kw = 0; kw < width.kernel; ++kw, to += channels) {
          const int64_t column = met(width, w, kw);
          if (plane < 0 || line < 0 || column < 0) {
            std::fill_n(to, channels, 0.0f);
            continue;
          }
          std::copy_n(
              from + plane * input_.strides[0] + line * input_.strides[1] + column * input_.strides[2],
              channels, to);
        }
      }
    }
  }
}

void GatheredConvolution::gather_pixels(const void* input, int64_t sample, int64_t first_channel,
                                        int64_t channels, float* rows, float* line) const {
  const auto& [depth, height, width] = axes_;
  if (has_border_) std::fill_n(rows, pixels_ * row_pitch_, 0.0f);
  // The outputs that meet the input, along a dimension.
  const auto inside = [](const Axis& axis) {
    return Range{ceil_div(axis.padding, axis.stride),
                 std::min(axis.out, ceil_div(axis.in + axis.padding, axis.stride))};
  };
  const Range columns = inside(width);
  if (columns.size() <= 0) return;
  // Rows of pixels that lie apart are first copied without gaps. The memory of few channels is read at a
  // time.
  const bool apart = copies_rows();
  const int64_t step = apart ? line_channels : channels;
  for (int64_t c = 0; c < channels; c += step) {
    const int64_t count = std::min(step, channels - c);
    for (int64_t d = inside(depth).begin; d < inside(depth).end; ++d) {
      for (int64_t h = inside(height).begin; h < inside(height).end; ++h) {
        const int64_t element = sample * input_.sample_stride + (first_channel + c) * input_.channel_stride +
                                (d * depth.stride - depth.padding) * input_.strides[0] +
                                (h * height.stride - height.padding) * input_.strides[1] +
                                (columns.begin * width.stride - width.padding) * input_.strides[2];
        TransferArguments t;
        t.tensor = const_cast<char*>(static_cast<const char*>(input)) + element * byte_size(input_.dtype);
        t.dtype = input_.dtype;
        if (apart) {
          t.panel = line;
          t.panel_stride = t.cols = columns.size();
          t.rows = count;
          t.row_stride = input_.channel_stride;
          t.col_stride = width.stride * input_.strides[2];
          isa_.load(t);
          t.tensor = reinterpret_cast<char*>(line);
          t.dtype = DType::f32;
        }
        t.panel = rows + ((d * height.out + h) * width.out + columns.begin) * row_pitch_ + c;
        t.panel_stride = row_pitch_;
        t.rows = columns.size();
        t.cols = count;
        t.row_stride = apart ? 1 : width.stride * input_.strides[2];
        t.col_stride = apart ? columns.size() : input_.channel_stride;
        isa_.load(t);
      }
    }
  }
}

// Samples one behind another are one run of positions.
void GatheredConvolution::multiply_in_place(const Arguments& arguments, const ConvolutionTask& task,
                                            Range channels, DotTileArguments t) const {
  const Range pixels = even_part(pixels_, block_count_, task.block);
  const int64_t first = segments_[task.segment].group * group_inputs_ + channels.begin;
  t.x_stride = input_.pixel_stride;
  const bool run = block_count_ == 1 && input_.sample_stride == pixels_ * input_.pixel_stride;
  const int64_t step = run ? task.samples.size() : 1;
  t.positions = step * pixels.size();
  for (int64_t sample = task.samples.begin; sample < task.samples.end; sample += step) {
    t.x = static_cast<const float*>(arguments.input) + sample * input_.sample_stride + first +
          pixels.begin * input_.pixel_stride;
    isa_.dot_tile(t);
    t.sums += t.positions * t.sums_stride;
  }
}

void GatheredConvolution::run(const Arguments& arguments, const float* packed, float* worker,
                              const ConvolutionTask& task,
                              const std::function<void(const Panel&)>& consume) const {
  const Segment& segment = segments_[task.segment];
  float* window = worker;
  float* rows = worker + window_floats_;
  const bool unpacked = weight_dtype_ == DType::f32 && !channel_runs_;
  const float* weights = unpacked ? static_cast<const float*>(arguments.parameters[0]) : packed;
  DotTileArguments t;
  t.x = rows;
  t.x_stride = row_pitch_;
  t.weight_stride = terms_;
  t.sums = rows + gathered_floats_;
  t.sums_stride = padded_channels(segment.channels.size());
  t.positions = task.samples.size() * pixels_;
  t.channels = segment.channels.size();
  t.bias = packed + bias_at_ + segment.channels.begin;
  for (int64_t chunk = 0; chunk < chunk_count_; ++chunk) {
    const Range channels = chunk_channels(chunk);
    const int64_t first = segment.group * group_inputs_ + channels.begin;
    t.terms = channels.size() * taps_;
    t.weights = weights + segment.channels.begin * terms_ + channels.begin * taps_;
    if (channel_runs_) {
      t.weight_stride = t.terms;
      t.weights =
          weights + group_count_ * group_outputs_ * taps_ * channels.begin + segment.channels.begin * t.terms;
    }
    t.add = chunk > 0;
    if (in_place_) {
      multiply_in_place(arguments, task, channels, t);
      continue;
    }
    float* to = rows;
    for (int64_t sample = task.samples.begin; sample < task.samples.end;
         ++sample, to += pixels_ * row_pitch_) {
      if (taps_ == 1) {
        gather_pixels(arguments.input, sample, first, channels.size(), to, window);
        continue;
      }
      if (channel_runs_) {
        gather_channels(arguments.input, sample, first, channels.size(), to);
        continue;
      }
      gather(stage(arguments.input, sample, first, channels.size(), window), channels.size(), to);
    }
    isa_.dot_tile(t);
  }
  float* sums = t.sums;
  const Range pixels = even_part(pixels_, block_count_, task.block);
  for (int64_t sample = task.samples.begin; sample < task.samples.end; ++sample) {
    consume(
        {sums, t.sums_stride, {sample, segment.channels, pixels}, std::numeric_limits<float>::infinity()});
    sums += pixels.size() * t.sums_stride;
  }
}

}  // namespace onepass::cpu
