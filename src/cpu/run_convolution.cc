// The numbers of a convolution by runs, and running it.
#include "cpu/run_convolution.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <sstream>

namespace onepass::cpu {
namespace {

// More outputs fill lanes by themselves.
constexpr int64_t max_outputs = 64;
constexpr int64_t task_positions = 512;
constexpr int64_t tile_positions = 6, tile_channels = 4;
// Of an accumulator of four lanes; the weights of eight channels are 32 KiB. Half as many take 1.1 to 1.3
// times as long (AVX-512, seven convolutions).
constexpr int64_t chunk_terms = 4 * max_chain_terms;
// What a task turns stays in L2, if rows are short enough.
constexpr int64_t window_floats = 128 * 1024, max_window_floats = 1024 * 1024;
constexpr int64_t turned_pixels = 32;
constexpr int64_t panel_floats = 8 * 1024, min_panel_pixels = 96;
// Of all kinds of positions, 3 MB: seven taps in each of three dimensions with padding have 118 thousand.
constexpr int64_t max_runs = int64_t{1} << 17;
constexpr int64_t piece_floats = 16;  // runs are cut at multiples of the widest vector
constexpr int64_t floats_per_pointer = 2;

bool is_in_place(const TensorMap& map) { return map.dtype == DType::f32 && map.channel_stride == 1; }

// The first axis that has more than one position.
size_t outer_axis(const std::array<Axis, 3>& axes) {
  size_t i = 0;
  while (i < 2 && axes[i].in == 1 && axes[i].out == 1) ++i;
  return i;
}

int64_t inner_inputs(const std::array<Axis, 3>& axes) {
  int64_t inner = 1;
  for (size_t i = outer_axis(axes) + 1; i < 3; ++i) inner *= axes[i].in;
  return inner;
}

// Kinds of outputs along an axis: one for each class, and those that a border cuts.
int64_t most_kinds(const Axis& axis) {
  if (axis.transposed) return std::min(axis.out, axis.classes() + 2 * axis.kernel);
  const int64_t behind =
      (axis.out - 1) * axis.stride - axis.padding + (axis.kernel - 1) * axis.dilation - (axis.in - 1);
  const int64_t cut = ceil_div(std::max<int64_t>(0, axis.padding), axis.stride) +
                      ceil_div(std::max<int64_t>(0, behind), axis.stride);
  return std::min(axis.out, 1 + cut);
}

}  // namespace

std::string RunConvolution::refusal(const Problem& problem) {
  const Conv& conv = *problem.block.conv();
  if (conv.out_channels / conv.groups > max_outputs) {
    return "a group has more than " + std::to_string(max_outputs) + " output channels";
  }
  const auto axes =
      make_axes(conv, problem.input.sizes, problem.block.conv_output_shape(problem.input.sizes));
  int64_t runs = 1;  // at most
  for (const Axis& axis : axes) {
    runs *= axis.kernel * most_kinds(axis);
    if (runs > max_runs) return "the kernel has too many taps";
  }
  const Axis& outer = axes[outer_axis(axes)];
  const int64_t rows = std::min(outer.in, (outer.kernel - 1) * outer.dilation + 1);
  const int64_t floats = rows * inner_inputs(axes) * (conv.in_channels / conv.groups);
  if (!is_in_place(TensorMap(problem.input)) && floats > max_window_floats) {
    return "the input is not f32 in channels last, and a row of outputs reads more than " +
           std::to_string(max_window_floats) + " elements of a group";
  }
  return "";
}

RunConvolution::RunConvolution(const Problem& problem, const Isa& isa, int64_t cut)
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
  in_place_ = is_in_place(input_);
  outer_ = outer_axis(axes_);
  segments_ = segments_of(group_count_, group_outputs_, cut, max_outputs);
  max_segment_channels_ = most_channels(segments_);
  segments_per_task_ = ceil_div(std::ssize(segments_), group_count_);
  build_outputs();
  choose_blocks(cut);
  build_kinds();
  count_work();
  lay_out_worker();
}

// Threads must not change blocks: statistics are merged block by block.
void RunConvolution::choose_blocks(int64_t cut) {
  const Axis& outer = axes_[outer_];
  const int64_t row_floats = inner_inputs(axes_) * group_inputs_;
  const int64_t most = in_place_ ? pixels_ : outer.out;
  block_count_ = std::clamp<int64_t>(ceil_div(pixels_, task_positions), 1, std::max<int64_t>(1, most));
  while (!in_place_ && block_count_ < outer.out && window_of(0).size() * row_floats > window_floats) {
    block_count_ = std::min(outer.out, 2 * block_count_);
  }
  const bool whole = block_count_ == 1 && cut >= group_count_ * group_outputs_;
  const int64_t samples = whole ? task_positions / std::max<int64_t>(1, pixels_) : 1;
  samples_per_task_ = std::clamp<int64_t>(samples, 1, std::max<int64_t>(1, batch_));
}

Range RunConvolution::window_of(int64_t block) const {
  const AxisOutputs& outputs = outputs_[outer_];
  Range window;
  const Range rows = even_part(axes_[outer_].out, block_count_, block);
  for (int64_t o = rows.begin; o < rows.end; ++o) {
    const AxisKind& kind = outputs.kinds[static_cast<size_t>(outputs.kind[static_cast<size_t>(o)])];
    if (kind.taps.size() == 0) continue;
    const std::vector<Tap>& taps = outputs.taps[static_cast<size_t>(kind.output_class)];
    const int64_t first = outputs.first[static_cast<size_t>(o)];
    const int64_t last = first + taps[static_cast<size_t>(kind.taps.end - 1)].offset -
                         taps[static_cast<size_t>(kind.taps.begin)].offset;
    if (window.size() == 0) window = {first, last + 1};
    window = {std::min(window.begin, first), std::max(window.end, last + 1)};
  }
  return window;
}

// What is read in place is cut anywhere; what is turned, along the outermost axis.
Range RunConvolution::pixels_of(int64_t block) const {
  if (in_place_) return even_part(pixels_, block_count_, block);
  const Range rows = even_part(axes_[outer_].out, block_count_, block);
  const int64_t inner = axes_[outer_].out > 0 ? pixels_ / axes_[outer_].out : 0;
  return {rows.begin * inner, rows.end * inner};
}

// Floats between neighbouring positions of what is read.
std::array<int64_t, 3> RunConvolution::strides() const {
  if (in_place_) return input_.strides;
  return {axes_[1].in * axes_[2].in * group_inputs_, axes_[2].in * group_inputs_, group_inputs_};
}

RunConvolution::AxisOutputs RunConvolution::outputs_along(const Axis& axis) {
  AxisOutputs outputs;
  for (int64_t c = 0; c < axis.classes(); ++c) {
    std::vector<Tap> taps = axis.taps(c);
    std::sort(taps.begin(), taps.end(), [](const Tap& a, const Tap& b) { return a.offset < b.offset; });
    outputs.taps.push_back(std::move(taps));
  }
  std::map<std::array<int64_t, 3>, int64_t> found;       // class and taps
  std::vector<int64_t> latest(outputs.taps.size(), -1);  // kind of each class: most outputs are of it
  for (int64_t o = 0; o < axis.out; ++o) {
    const int64_t of_class = o % axis.class_stride();
    const int64_t first = o / axis.class_stride() * axis.step();
    const std::vector<Tap>& taps = outputs.taps[static_cast<size_t>(of_class)];
    const auto is_before = [&](const Tap& tap) { return first + tap.offset < 0; };
    const auto is_inside = [&](const Tap& tap) { return first + tap.offset < axis.in; };
    const auto begin = std::partition_point(taps.begin(), taps.end(), is_before);
    const auto end = std::partition_point(begin, taps.end(), is_inside);
    const Range met{begin - taps.begin(), end - taps.begin()};
    int64_t& kind = latest[static_cast<size_t>(of_class)];
    if (kind < 0 || !(outputs.kinds[static_cast<size_t>(kind)].taps == met)) {
      const auto [at, is_new] =
          found.insert({{of_class, met.begin, met.end}, static_cast<int64_t>(found.size())});
      if (is_new) outputs.kinds.push_back({of_class, met});
      kind = at->second;
    }
    outputs.kind.push_back(kind);
    outputs.first.push_back(met.size() > 0 ? first + begin->offset : 0);
  }
  return outputs;
}

void RunConvolution::build_outputs() {
  for (size_t i = 0; i < 3; ++i) outputs_[i] = outputs_along(axes_[i]);
  class_terms_ = {0};
  for (const auto& depth : outputs_[0].taps) {
    for (const auto& height : outputs_[1].taps) {
      for (const auto& width : outputs_[2].taps) {
        class_terms_.push_back(class_terms_.back() +
                               std::ssize(depth) * std::ssize(height) * std::ssize(width) * group_inputs_);
      }
    }
  }
  terms_ = class_terms_.back();
}

void RunConvolution::build_kinds() {
  for (size_t d = 0; d < outputs_[0].kinds.size(); ++d) {
    for (size_t h = 0; h < outputs_[1].kinds.size(); ++h) {
      for (size_t w = 0; w < outputs_[2].kinds.size(); ++w) kinds_.push_back(make_kind({d, h, w}));
    }
  }
}

RunConvolution::Kind RunConvolution::make_kind(const std::array<size_t, 3>& of_axes) const {
  std::array<const std::vector<Tap>*, 3> taps{};
  std::array<Range, 3> met{};
  int64_t output_class = 0;
  for (size_t i = 0; i < 3; ++i) {
    const AxisKind& kind = outputs_[i].kinds[of_axes[i]];
    taps[i] = &outputs_[i].taps[static_cast<size_t>(kind.output_class)];
    met[i] = kind.taps;
    output_class = output_class * axes_[i].classes() + kind.output_class;
  }
  const auto tap_of = [&](size_t i, int64_t tap) { return (*taps[i])[static_cast<size_t>(tap)]; };
  const auto shift = [&](size_t i, int64_t tap) {
    return (tap_of(i, tap).offset - tap_of(i, met[i].begin).offset) * strides()[i];
  };
  Kind kind;
  int64_t in_chunk = 0;
  const auto add = [&](DotRun run) {
    const int64_t parts = ceil_div(run.terms, chunk_terms);
    const int64_t most = round_up(ceil_div(run.terms, parts), piece_floats);
    for (int64_t left = run.terms; left > 0; left -= run.terms, run.x += run.terms, run.weight += run.terms) {
      run.terms = std::min(left, most);
      if (kind.chunks.empty() || in_chunk + run.terms > chunk_terms) {
        const int64_t begin = std::ssize(kind.runs);
        kind.chunks.push_back({begin, begin});
        in_chunk = 0;
      }
      kind.runs.push_back(run);
      ++kind.chunks.back().end;
      in_chunk += run.terms;
      kind.padded_terms += round_up(run.terms, isa_.lanes);
      if (run.terms % isa_.lanes != 0) ++kind.partial_runs;
    }
  };
  // Neighbouring taps are one run where it fits a chunk. Else a chunk has some channels of all of them, which
  // neighbouring positions find in L1 again.
  const int64_t parts = met[2].size() > 1 ? ceil_div(met[2].size() * group_inputs_, chunk_terms) : 1;
  const bool joins = strides()[2] == group_inputs_ && parts == 1;
  const int64_t part_channels = round_up(ceil_div(group_inputs_, parts), piece_floats);
  for (int64_t c = 0; c < group_inputs_; c += part_channels) {
    const int64_t channels = std::min(part_channels, group_inputs_ - c);
    for (int64_t d = met[0].begin; d < met[0].end; ++d) {
      for (int64_t h = met[1].begin; h < met[1].end; ++h) {
        for (int64_t w = met[2].begin; w < met[2].end;) {
          int64_t next = w + 1;
          while (joins && next < met[2].end && tap_of(2, next).offset == tap_of(2, next - 1).offset + 1)
            ++next;
          const int64_t tap = (d * std::ssize(*taps[1]) + h) * std::ssize(*taps[2]) + w;
          add({shift(0, d) + shift(1, h) + shift(2, w) + c,
               class_terms_[static_cast<size_t>(output_class)] + tap * group_inputs_ + c,
               (next - w) * channels});
          w = next;
        }
      }
    }
  }
  return kind;
}

// Of all positions, by their kinds. Each kind of a task reads its weights anew.
void RunConvolution::count_work() {
  std::array<std::vector<double>, 3> counts;
  for (size_t i = 0; i < 3; ++i) {
    counts[i].resize(outputs_[i].kinds.size());
    for (const int64_t kind : outputs_[i].kind) ++counts[i][static_cast<size_t>(kind)];
  }
  const auto tiles = static_cast<double>(ceil_div(group_outputs_, tile_channels));
  size_t at = 0;
  for (const double depth : counts[0]) {
    for (const double height : counts[1]) {
      for (const double width : counts[2]) {
        const Kind& kind = kinds_[at++];
        const double positions = depth * height * width;
        const double tile_count = positions / tile_positions * tiles;
        tile_runs_ += tile_count * static_cast<double>(kind.runs.size());
        partial_runs_ += tile_count * static_cast<double>(kind.partial_runs);
        chunk_sums_ += positions * tiles * static_cast<double>(kind.chunks.size());
        padded_terms_ += positions * static_cast<double>(kind.padded_terms);
        const double blocks = std::min(positions, static_cast<double>(block_count_));
        read_weights_ += blocks * static_cast<double>(kind.padded_terms * group_outputs_);
      }
    }
  }
}

void RunConvolution::lay_out_worker() {
  const int64_t positions = samples_per_task_ * block_pixels(0);
  if (!in_place_) {
    int64_t rows = 0;
    for (int64_t block = 0; block < block_count_; ++block) rows = std::max(rows, window_of(block).size());
    window_floats_ = round_up(samples_per_task_ * rows * inner_inputs(axes_) * group_inputs_, piece_floats);
  }
  const int64_t padded = padded_channels(max_segment_channels_);
  sum_floats_ = round_up((positions + 1) * padded, piece_floats);
  worker_floats_ =
      window_floats_ + sum_floats_ + round_up(positions * (floats_per_pointer + 1) + floats_per_pointer, 16);
  max_panel_pixels_ = std::min(block_pixels(0), std::max(min_panel_pixels, panel_floats / padded));
  bias_at_ = group_count_ * group_outputs_ * terms_;
  packed_floats_ = bias_at_ + group_count_ * group_outputs_;
}

RunConvolution::Memory RunConvolution::memory_of(float* worker) const {
  const int64_t positions = samples_per_task_ * block_pixels(0);
  Memory memory;
  memory.window = worker;
  memory.sums = memory.window + window_floats_;
  void* end = memory.sums + sum_floats_;
  const size_t bytes = static_cast<size_t>(positions) * sizeof(const float*);
  size_t room = bytes + sizeof(const float*);
  memory.pointers = static_cast<const float**>(std::align(alignof(const float*), bytes, end, room));
  memory.rows = reinterpret_cast<int32_t*>(memory.pointers + positions);
  return memory;
}

// -------------------------------------------------------------------------------------------- the cost

double RunConvolution::padded_multiply_adds() const {
  return static_cast<double>(group_count_ * batch_ * group_outputs_) * padded_terms_;
}

double RunConvolution::read_weights() const {
  return static_cast<double>(ceil_div(batch_, samples_per_task_) * group_count_) * read_weights_;
}

double RunConvolution::staged_elements() const {
  if (in_place_) return 0;
  int64_t rows = 0;
  for (int64_t block = 0; block < block_count_; ++block) rows += window_of(block).size();
  return static_cast<double>(batch_ * group_count_ * rows) *
         static_cast<double>(inner_inputs(axes_) * group_inputs_);
}

std::string RunConvolution::describe() const {
  size_t runs = 0;
  for (const Kind& kind : kinds_) runs = std::max(runs, kind.runs.size());
  std::ostringstream out;
  out << "lanes: terms of a sum (" << isa_.name << ", " << isa_.lanes
      << "), in runs that are read in place\n";
  out << "positions: " << kinds_.size() << " kinds of at most " << runs << " runs\n";
  out << "blocks per sample: " << block_count() << " of at most " << block_pixels(0) << " pixels, "
      << samples_per_task_ << " samples in a task\n";
  out << "segments: " << segments_.size() << " of at most " << max_segment_channels_ << " channels\n";
  out << "packed weights: " << packed_floats_ * 4 << " bytes\n";
  out << "per thread: window " << window_floats_ * 4 << " bytes, sums " << sum_floats_ * 4 << " bytes\n";
  return out.str();
}

// ------------------------------------------------------------------------------------------------ running

// [output][class][tap, by rising offsets][input channel]
void RunConvolution::pack(const void* weights, const float* bias, float* packed, Executor& executor) const {
  const int64_t outputs = group_count_ * group_outputs_;
  if (bias != nullptr) {
    std::copy_n(bias, outputs, packed + bias_at_);
  } else {
    std::fill_n(packed + bias_at_, outputs, 0.0f);
  }
  executor.for_each(outputs, [&](int64_t output, int) {
    const int64_t first = weights_.first_of(output);
    TransferArguments t;
    t.dtype = weight_dtype_;
    t.cols = t.panel_stride = group_inputs_;
    t.col_stride = weights_.input;
    t.row_stride = weights_.tap;
    float* to = packed + output * terms_;
    const auto load = [&](int64_t tap, int64_t rows) {
      t.tensor = const_cast<char*>(static_cast<const char*>(weights)) +
                 (first + tap * weights_.tap) * byte_size(weight_dtype_);
      t.panel = to;
      t.rows = rows;
      isa_.load(t);
      to += rows * group_inputs_;
    };
    if (!transposed_) return load(0, kernel_elements_);
    for (const auto& depth : outputs_[0].taps) {
      for (const auto& height : outputs_[1].taps) {
        for (const auto& width : outputs_[2].taps) {
          for (const Tap& d : depth) {
            for (const Tap& h : height) {
              for (const Tap& w : width) load((d.k * axes_[1].kernel + h.k) * axes_[2].kernel + w.k, 1);
            }
          }
        }
      }
    }
  });
}

void RunConvolution::stage(const Arguments& arguments, const ConvolutionTask& task, float* window) const {
  const int64_t first = segments_[task.segment].group * group_inputs_;
  const Range rows = window_of(task.block);
  const int64_t inner = inner_inputs(axes_);
  for (int64_t sample = task.samples.begin; sample < task.samples.end; ++sample) {
    for (int64_t p = rows.begin * inner; p < rows.end * inner; p += turned_pixels) {
      const Range pixels{p, std::min(rows.end * inner, p + turned_pixels)};
      transfer(isa_, Direction::load, input_, arguments.input,
               {sample, {first, first + group_inputs_}, pixels}, Orientation::interleaved, window,
               group_inputs_);
      window += pixels.size() * group_inputs_;
    }
  }
}

// Pointers to the positions of a task, kind by kind, and for each its row of sums. Returns where the
// positions of each kind begin, and the end.
std::vector<int64_t> RunConvolution::point(const Arguments& arguments, const ConvolutionTask& task,
                                           const Memory& memory) const {
  const Range pixels = pixels_of(task.block);
  const std::array<int64_t, 3> stride = strides();
  // Calls f(kind, floats from the input's first position) for each pixel.
  const auto for_each_pixel = [&](auto&& f) {
    Range row{pixels.begin, pixels.begin};  // or the part of it in the block
    for (; row.begin < pixels.end; row.begin = row.end) {
      const int64_t line = row.begin / axes_[2].out;
      row.end = std::min(pixels.end, (line + 1) * axes_[2].out);
      const auto d = static_cast<size_t>(line / axes_[1].out);
      const auto h = static_cast<size_t>(line % axes_[1].out);
      const auto lines = static_cast<size_t>(outputs_[0].kind[d]) * outputs_[1].kinds.size() +
                         static_cast<size_t>(outputs_[1].kind[h]);
      const int64_t at = outputs_[0].first[d] * stride[0] + outputs_[1].first[h] * stride[1];
      for (int64_t p = row.begin; p < row.end; ++p) {
        const auto w = static_cast<size_t>(p - line * axes_[2].out);
        f(lines * outputs_[2].kinds.size() + static_cast<size_t>(outputs_[2].kind[w]),
          at + outputs_[2].first[w] * stride[2]);
      }
    }
  };
  std::vector<int64_t> begin(kinds_.size() + 1, 0);
  for_each_pixel([&](size_t kind, int64_t) { begin[kind + 1] += task.samples.size(); });
  for (size_t i = 1; i < begin.size(); ++i) begin[i] += begin[i - 1];
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  const Range rows = in_place_ ? Range() : window_of(task.block);
  const int64_t row_floats = inner_inputs(axes_) * group_inputs_;
  int32_t row = 0;
  for (int64_t sample = task.samples.begin; sample < task.samples.end; ++sample) {
    const int64_t staged = (sample - task.samples.begin) * rows.size() - rows.begin;
    const float* const base = in_place_ ? static_cast<const float*>(arguments.input) +
                                              sample * input_.sample_stride +
                                              segments_[task.segment].group * group_inputs_
                                        : memory.window + staged * row_floats;
    for_each_pixel([&](size_t kind, int64_t at) {
      const int64_t to = next[kind]++;
      memory.pointers[to] = base + at;
      memory.rows[to] = row++;
    });
  }
  return begin;
}

void RunConvolution::run(const Arguments& arguments, const float* packed, float* worker,
                         const ConvolutionTask& task,
                         const std::function<void(const Panel&)>& consume) const {
  const Segment& segment = segments_[task.segment];
  const Range pixels = pixels_of(task.block);
  const Memory memory = memory_of(worker);
  if (!in_place_ && !task.window_is_staged) stage(arguments, task, memory.window);
  const std::vector<int64_t> begin = point(arguments, task, memory);
  const int64_t channels = segment.channels.size();
  DotRunArguments t;
  t.channels = channels;
  t.weights = packed + segment.channels.begin * terms_;
  t.weight_stride = terms_;
  t.sums = memory.sums;
  // Rows of few channels have no gaps: steps take them together.
  t.sums_stride = channels < isa_.lanes ? channels : padded_channels(channels);
  t.bias = packed + bias_at_ + segment.channels.begin;
  for (size_t k = 0; k < kinds_.size(); ++k) {
    t.x = memory.pointers + begin[k];
    t.rows = memory.rows + begin[k];
    t.positions = begin[k + 1] - begin[k];
    for (int64_t i = 0; kinds_[k].chunks.empty() && i < t.positions; ++i)
      std::copy_n(t.bias, channels, t.sums + t.rows[i] * t.sums_stride);
    t.add = false;
    for (const Range& chunk : kinds_[k].chunks) {
      t.runs = kinds_[k].runs.data() + chunk.begin;
      t.run_count = chunk.size();
      isa_.dot_runs(t);
      t.add = true;
    }
  }
  for (int64_t s = 0; s < task.samples.size(); ++s) {
    for (int64_t p = 0; p < pixels.size(); p += max_panel_pixels_) {
      const int64_t end = std::min(pixels.size(), p + max_panel_pixels_);
      const Region region{task.samples.begin + s, segment.channels, {pixels.begin + p, pixels.begin + end}};
      consume({memory.sums + (s * pixels.size() + p) * t.sums_stride, t.sums_stride, region,
               std::numeric_limits<float>::infinity()});
    }
  }
}

}  // namespace onepass::cpu
