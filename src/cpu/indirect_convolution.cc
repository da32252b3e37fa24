// Cutting an indirect convolution into tasks, and what its plan says and costs.
#include "cpu/indirect_convolution.h"

#include <algorithm>
#include <map>
#include <memory>
#include <sstream>

namespace onepass::cpu {
namespace {

// Positions of a task: their sums stay in L2 beside the weights of a chunk. Those of a transposed convolution
// have several classes.
constexpr int64_t task_positions = 192;
constexpr int64_t task_sum_floats = 192 * 1024;
constexpr int64_t max_task_channels = 256, min_task_channels = 32;
// As in ConvolutionStage: a panel stays in L1 through the steps that follow.
constexpr int64_t panel_floats = 8 * 1024;
constexpr int64_t min_panel_pixels = 96;
// A sample that is turned as a whole stays in L3.
constexpr int64_t max_window_floats = 1024 * 1024;
constexpr int64_t max_pointers = int64_t{1} << 22;
// Chains of this many terms are as long as the longest of ConvolutionStage.
constexpr int64_t max_run_terms = max_chain_terms + max_chain_terms / 2;
constexpr int64_t max_classes = 4096;
constexpr int64_t floats_per_pointer = 2;

bool is_in_place(const TensorMap& map) { return map.dtype == DType::f32 && map.channel_stride == 1; }

bool are_identities(const std::array<Axis, 3>& axes) {
  return std::all_of(axes.begin(), axes.end(), [](const Axis& axis) { return axis.is_identity(); });
}

int64_t class_total(const std::array<Axis, 3>& axes) {
  return axes[0].classes() * axes[1].classes() * axes[2].classes();
}

}  // namespace

std::string IndirectConvolution::refusal(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  const Shape output = problem.block.conv_output_shape(problem.input.sizes);
  const std::array<Axis, 3> axes = make_axes(conv, problem.input.sizes, output);
  int64_t taps = 1;
  for (const Axis& axis : axes) taps *= axis.kernel;
  if (class_total(axes) > max_classes) {
    return "the strides of the transposed convolution make more than " + std::to_string(max_classes) +
           " sub-convolutions";
  }
  if (taps * task_positions * class_total(axes) > max_pointers) return "the kernel has too many taps";
  const TensorMap input(problem.input);
  const int64_t floats = conv.in_channels / conv.groups * input.pixels();
  if (!is_in_place(input) && !are_identities(axes) && floats > max_window_floats) {
    return "the input is not f32 in channels last, and a sample has more than " +
           std::to_string(max_window_floats) + " elements in a group";
  }
  return "";
}

IndirectConvolution::IndirectConvolution(const Problem& problem, const Isa& isa, int64_t cut)
    : isa_(isa),
      input_(problem.input),
      weight_dtype_(problem.parameters[0].dtype),
      transposed_(problem.block.conv()->transposed),
      batch_(problem.input.sizes[0]),
      group_count_(problem.block.conv()->groups) {
  const Conv& conv = *problem.block.conv();
  group_inputs_ = conv.in_channels / conv.groups;
  group_outputs_ = conv.out_channels / conv.groups;
  axes_ = make_axes(conv, problem.input.sizes, problem.block.conv_output_shape(problem.input.sizes));
  pixels_ = axes_[0].out * axes_[1].out * axes_[2].out;
  for (const Axis& axis : axes_) kernel_elements_ *= axis.kernel;
  weights_ = WeightStrides(problem);
  outputs_are_rows_ = transposed_ && weights_.output == 1 && weight_dtype_ == DType::f32;
  in_place_ = is_in_place(input_);
  is_identity_ = are_identities(axes_);
  for (const Axis& axis : axes_) {
    const Range window = axis.window({0, axis.out});
    has_border_ |= window.begin < 0 || window.end > axis.in;
  }
  channel_parts_ = ceil_div(group_inputs_, max_run_terms);
  choose_blocks(cut);
  choose_segments(cut, problem.device.threads);
  build_classes();
  build_kinds();
  lay_out_worker();
}

void IndirectConvolution::choose_blocks(int64_t cut) {
  const int64_t width = padded_channels(std::min(group_outputs_, max_task_channels));
  const int64_t positions =
      std::clamp(task_sum_floats / width, task_positions, task_positions * class_total(axes_));
  block_count_ = std::max<int64_t>(1, ceil_div(pixels_, positions));
  // A task takes several samples as a whole, or a part of one.
  const bool whole = block_count_ == 1 && cut >= group_count_ * group_outputs_;
  const int64_t samples = whole ? positions / std::max<int64_t>(1, pixels_) : 1;
  samples_per_task_ = std::clamp<int64_t>(samples, 1, std::max<int64_t>(1, batch_));
  packs_at_use_ = block_count_ == 1 && samples_per_task_ >= batch_;
}

// Segments of whole tiles do not change the bits of a sum: there are as many as the threads want.
void IndirectConvolution::choose_segments(int64_t cut, int64_t threads) {
  const int64_t parts = ceil_div(batch_, samples_per_task_) * block_count_ * group_count_;
  int64_t limit = max_task_channels;
  while (threads > 1 && limit > min_task_channels && parts * ceil_div(group_outputs_, limit) < 2 * threads) {
    limit /= 2;
  }
  const int64_t unit = isa_.lanes * isa_.max_tile_vectors;
  segments_ = segments_of(group_count_, group_outputs_, cut, limit, unit);
  segments_of_one_thread_ = segments_of(group_count_, group_outputs_, cut, max_task_channels, unit);
  max_segment_channels_ = most_channels(segments_);
  // They share pointers and what is staged, unless threads want them.
  int64_t of_group = 0;
  while (of_group < static_cast<int64_t>(segments_.size()) &&
         segments_[static_cast<size_t>(of_group)].group == 0) {
    ++of_group;
  }
  segments_per_task_ = threads == 1 || parts >= 2 * threads ? of_group : 1;
}

void IndirectConvolution::build_classes() {
  for (int64_t d = 0; d < axes_[0].classes(); ++d) {
    for (int64_t h = 0; h < axes_[1].classes(); ++h) {
      for (int64_t w = 0; w < axes_[2].classes(); ++w) {
        OutputClass result;
        result.index = {d, h, w};
        result.taps = {axes_[0].taps(d), axes_[1].taps(h), axes_[2].taps(w)};
        for (const Tap& depth : result.taps[0]) {
          for (const Tap& height : result.taps[1]) {
            for (const Tap& width : result.taps[2]) {
              result.kernel.push_back((depth.k * axes_[1].kernel + height.k) * axes_[2].kernel + width.k);
            }
          }
        }
        result.first_term = terms_;
        terms_ += result.tap_count() * group_inputs_;
        most_taps_ = std::max(most_taps_, result.tap_count());
        classes_.push_back(std::move(result));
      }
    }
  }
  for (const Segment& segment : segments_) {
    segment_at_.push_back(packed_floats_);
    if (!packs_at_use_) packed_floats_ += padded_channels(segment.channels.size()) * terms_;
  }
  bias_at_ = packed_floats_;
  packed_floats_ += group_count_ * group_outputs_ + isa_.lanes * isa_.max_tile_vectors;  // read by tiles
}

void IndirectConvolution::build_kinds() {
  for (size_t i = 0; i < 3; ++i) {
    const Axis& axis = axes_[i];
    AxisOutputs& outputs = outputs_[i];
    std::map<std::array<int64_t, 3>, int64_t> found;  // class and taps
    for (int64_t o = 0; o < axis.out; ++o) {
      const int64_t of_class = o % axis.class_stride();
      const int64_t first = o / axis.class_stride() * axis.step();
      const std::vector<Tap> taps = axis.taps(of_class);
      int64_t begin = 0;
      int64_t inside = 0;
      for (const Tap& tap : taps) {
        const int64_t position = first + tap.offset;
        if (position >= 0 && position < axis.in) ++inside;
        if (inside == 0) ++begin;
      }
      const auto count = static_cast<int64_t>(found.size());
      const auto [at, is_new] = found.insert({{of_class, begin, inside}, count});
      if (is_new) outputs.class_of_kind.push_back(of_class);
      outputs.kind.push_back(at->second);
      outputs.first.push_back(first);
    }
  }
  kinds_.resize(classes_.size());
  size_t kind = 0;
  for (const int64_t d : outputs_[0].class_of_kind) {
    for (const int64_t h : outputs_[1].class_of_kind) {
      for (const int64_t w : outputs_[2].class_of_kind) {
        kinds_[static_cast<size_t>((d * axes_[1].classes() + h) * axes_[2].classes() + w)].push_back(kind++);
      }
    }
  }
}

void IndirectConvolution::lay_out_worker() {
  const int64_t positions = samples_per_task_ * block_pixels(0);
  if (!in_place_) {
    const int64_t sample = is_identity_ ? block_pixels(0) : input_.pixels();
    window_pitch_ = round_up(group_inputs_, isa_.lanes);
    // Positions a multiple of 1 KiB apart would share a few sets of L1.
    if (window_pitch_ % 256 == 0) window_pitch_ += 16;
    window_floats_ = round_up(samples_per_task_ * sample * window_pitch_, 16);
  }
  if (has_border_) zero_floats_ = round_up(std::min(group_inputs_, max_run_terms), 16);
  sum_floats_ = round_up(positions * padded_channels(max_segment_channels_), 16);
  const int64_t widest = std::min(padded_channels(max_segment_channels_), isa_.lanes * isa_.max_tile_vectors);
  if (packs_at_use_) {
    const int64_t of_chunk = max_run_terms * padded_channels(max_segment_channels_);
    tile_floats_ = round_up(outputs_are_rows_ ? of_chunk : terms_ * widest, 16);
  }
  pointer_count_ = positions * most_taps_;
  row_count_ = positions;
  worker_floats_ = window_floats_ + zero_floats_ + sum_floats_ + tile_floats_ +
                   round_up((pointer_count_ + positions + 1) * floats_per_pointer + 2 * row_count_, 16);
  // Threads must not change panels: statistics are merged panel by panel.
  const int64_t channels = padded_channels(most_channels(segments_of_one_thread_));
  max_panel_pixels_ = std::min(block_pixels(0), std::max(min_panel_pixels, panel_floats / channels));
}

IndirectConvolution::Memory IndirectConvolution::memory_of(float* worker) const {
  Memory memory;
  memory.window = worker;
  memory.zeros = memory.window + window_floats_;
  memory.sums = memory.zeros + zero_floats_;
  memory.tile = memory.sums + sum_floats_;
  void* end = memory.tile + tile_floats_;
  const auto bytes = static_cast<size_t>(pointer_count_ + row_count_) * sizeof(const float*);
  size_t room = bytes + sizeof(const float*);
  memory.pointers = static_cast<const float**>(std::align(alignof(const float*), bytes, end, room));
  memory.met_pointers = memory.pointers + pointer_count_;
  memory.rows = reinterpret_cast<int32_t*>(memory.met_pointers + row_count_);
  memory.met_rows = memory.rows + row_count_;
  return memory;
}

int64_t IndirectConvolution::tile_count(const Segment& segment) const {
  return ceil_div(ceil_div(segment.channels.size(), isa_.lanes), isa_.max_tile_vectors);
}

IndirectConvolution::Tile IndirectConvolution::tile_at(const Segment& segment, int64_t index) const {
  const int64_t all = ceil_div(segment.channels.size(), isa_.lanes);
  const Range vectors = even_part(all, tile_count(segment), index);
  return {vectors.begin * isa_.lanes, static_cast<int>(vectors.size())};
}

// Channels of a tap in parts that differ by a vector, or several taps with all of theirs.
int64_t IndirectConvolution::chunk_count(const OutputClass& output_class) const {
  if (channel_parts_ > 1) return output_class.tap_count() * channel_parts_;
  return ceil_div(output_class.tap_count(), std::max<int64_t>(1, max_chain_terms / group_inputs_));
}

IndirectConvolution::Chunk IndirectConvolution::chunk_at(const OutputClass& output_class,
                                                         int64_t index) const {
  if (channel_parts_ == 1) {
    const Range taps = even_part(output_class.tap_count(), chunk_count(output_class), index);
    return {taps, {0, group_inputs_}, taps.begin * group_inputs_};
  }
  const int64_t tap = index / channel_parts_;
  const Range vectors =
      even_part(ceil_div(group_inputs_, isa_.lanes), channel_parts_, index % channel_parts_);
  const Range channels{vectors.begin * isa_.lanes, std::min(group_inputs_, vectors.end * isa_.lanes)};
  return {{tap, tap + 1}, channels, tap * group_inputs_ + channels.begin};
}

// -------------------------------------------------------------------------------------------- the cost

// Tiles of fewer vectors load more for each product. Tiles of few positions wait for their sums.
double IndirectConvolution::padded_multiply_adds() const {
  constexpr int64_t enough_sums = 16;
  constexpr int64_t tile_positions = 5;
  const int64_t positions = std::max<int64_t>(1, samples_per_task_ * block_pixels(0) / class_total(axes_));
  double channels = 0;
  for (const Segment& segment : segments_of_one_thread_) {
    for (int64_t i = 0; i < tile_count(segment); ++i) {
      const int64_t vectors = tile_at(segment, i).vectors;
      const double share = static_cast<double>(vectors) / static_cast<double>(isa_.max_tile_vectors);
      const int64_t sums = vectors * std::min(positions, tile_positions * isa_.max_tile_vectors / vectors);
      const double waits = std::max(1.0, static_cast<double>(enough_sums) / static_cast<double>(sums));
      channels += static_cast<double>(vectors * isa_.lanes) / (0.6 + 0.4 * share) * waits;
    }
  }
  double total = channels * static_cast<double>(batch_ * group_inputs_);
  for (const Axis& axis : axes_) total *= static_cast<double>(axis.products(true));
  return total;
}

double IndirectConvolution::packed_weights() const {
  double channels = 0;
  for (const Segment& segment : segments_of_one_thread_) {
    channels += static_cast<double>(padded_channels(segment.channels.size()));
  }
  return channels * static_cast<double>(terms_);
}

double IndirectConvolution::read_weights() const {
  return packed_weights() * static_cast<double>(ceil_div(batch_, samples_per_task_) * block_count_);
}

double IndirectConvolution::staged_elements() const {
  if (in_place_) return 0;
  const int64_t positions = is_identity_ ? pixels_ : block_count_ * input_.pixels();
  return static_cast<double>(batch_ * group_count_ * group_inputs_) * static_cast<double>(positions);
}

double IndirectConvolution::pointers() const {
  double taps = static_cast<double>(batch_ * group_count_);
  for (const Axis& axis : axes_) taps *= static_cast<double>(axis.products(false));
  return taps;
}

double IndirectConvolution::tile_runs() const {
  constexpr double tile_positions = 5;
  double tiles = 0;
  for (const Segment& segment : segments_of_one_thread_) tiles += static_cast<double>(tile_count(segment));
  return pointers() / static_cast<double>(group_count_) / tile_positions * tiles *
         static_cast<double>(channel_parts_);
}

std::string IndirectConvolution::describe() const {
  std::ostringstream out;
  out << "lanes: output channels (" << isa_.name << ", " << isa_.lanes << "), positions by pointers\n";
  out << "sub-convolutions: " << classes_.size() << '\n';
  out << "blocks per sample: " << block_count() << " of at most " << block_pixels(0) << " pixels, "
      << samples_per_task_ << " samples in a task\n";
  out << "segments: " << segments_.size() << " of at most " << max_segment_channels_ << " channels\n";
  out << "weights: " << (packs_at_use_ ? "packed by the tile that uses them" : "packed before") << ", "
      << packed_floats_ * 4 << " bytes\n";
  out << "per thread: window " << window_floats_ * 4 << " bytes, sums " << sum_floats_ * 4 << " bytes, "
      << pointer_count_ << " pointers\n";
  return out.str();
}

}  // namespace onepass::cpu
