// The row "thin_backward": all gradients of a thin convolution with what follows it. Nothing of the
// convolution's size is read or written but dy; dh of a few samples waits in a ring that the second-level
// cache holds.
#include <algorithm>
#include <optional>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/thin/thin.h"
#include "onepass/cuda.h"

namespace onepass {
namespace cuda {
namespace {

// The least number from `least` on that is `rest` more than a multiple of 32: rows of shared memory so far
// apart begin in different banks.
int64_t apart(int64_t least, int64_t rest) { return least + (rest - least % 32 + 32) % 32; }

// Whether the elements of a sample lie side by side, in whatever order.
bool is_dense(const TensorSpec& input) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (size_t d = 1; d < input.sizes.size(); ++d) {
    if (input.sizes[d] > 1) dimensions.emplace_back(input.strides[d], input.sizes[d]);
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t next = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride != next) return false;
    next *= size;
  }
  return true;
}

bool is_16_bits(DType type) { return type == DType::f16 || type == DType::bf16; }

using Three = std::array<int64_t, 3>;

int64_t product(const Three& sizes) { return sizes[0] * sizes[1] * sizes[2]; }

// What is asked of the kernel.
struct ThinWork {
  BackwardWork tail;
  bool input = false, weight = false, bias = false;
  bool first = false, second = false, sums = false;
  bool may_read_output = false;  // the output makes pass 1 superfluous

  ThinWork(const BackwardProblem& problem, const TailParts& parts)
      : tail(problem, parts), input(problem.wants_input()), weight(problem.wants_parameter(0)) {
    bias = problem.forward.block.conv()->bias && problem.wants_parameter(1);
    second = tail.second || weight || bias;
    first = parts.norm != nullptr && (second || tail.third);
    sums = tail.third || weight || bias;
    // Strict f32 asks for more than a rounded output tells. One of 16 bits tells too little: gradients of
    // s27's weights were off by 1.5%.
    may_read_output = parts.mean_follows_norm() && second && problem.forward.precision == Precision::tf32;
  }
  int first_sums() const { return tail.first_sums; }
  int second_sums() const { return tail.second_sums + (bias ? 1 : 0) + (may_read_output ? 1 : 0); }
};

// How a sample is cut into tiles; nothing here depends on the batch.
struct ThinBackwardNumbers {
  static constexpr int64_t threads = 256;
  static constexpr int64_t warps = threads / 32;
  static constexpr int64_t most_parts = 4;
  static constexpr int64_t slices = 16;
  static constexpr int64_t most_buffers = 4;  // of planes of dh
  int64_t blocks = 2;                         // of a multiprocessor
  int64_t spans = 4, chunk_rows = 1;
  int64_t vector = 4;  // input channels that lie together in a window
  int64_t steps = 0, fragments = 0, jobs = 0, units = 0, job_parts = 1;
  bool splits = false;
  // Operands are f16, scaled by powers of two, where that has as many bits: in half of the room.
  bool halves = false;
  bool stages = false;  // dy of a chunk comes by way of shared memory
  Three tile{1, 1, 1}, tiles{1, 1, 1}, window{1, 1, 1}, low{0, 0, 0};
  int64_t dh_pitch = 0, segments = 1, segment_tiles = 1;
  Three back_tile{1, 1, 1}, back_tiles{1, 1, 1}, back_window{1, 1, 1};
  int64_t back_live = 1, back_buffers = 1, back_columns = 1, back_spans = 1, back_spans_at_once = 1,
          back_pitch = 16, product_pitch = 8;
  Three conv_stride{1, 1, 1}, conv_padding{0, 0, 0}, conv_dilation{1, 1, 1};
  int64_t shared_bytes = 0;  // 0 where nothing fits

  ThinBackwardNumbers(const BackwardProblem& problem, const ThinShape& shape, const ThinWork& work,
                      const Gpu& gpu)
      : shape_(shape), work_(work) {
    const Problem& forward = problem.forward;
    // Strict numerics keep gradients between the products as exact as f32 in 16 bits too.
    splits = forward.numerics == Numerics::strict ||
             (forward.precision != Precision::tf32 &&
              !(is_16_bits(forward.input.dtype) && is_16_bits(forward.parameters[0].dtype)));
    const Conv& conv = *forward.block.conv();
    transposed_ = conv.transposed;
    const auto rank = static_cast<size_t>(conv.rank);
    for (size_t d = 0; d < rank; ++d) {
      const size_t at = max_spatial_rank - rank + d;
      conv_stride[at] = conv.stride[d];
      conv_padding[at] = conv.padding_before[d];
      conv_dilation[at] = conv.dilation[d];
    }
    row_tiles_ = divide_up(shape.channels, 16);
    halves = may_halve();
    cut_chunks();
    stages = may_stage(problem);
    find_terms();
    back_pitch = row_tiles_ % 2 == 0 ? row_tiles_ * 16 + 16 : row_tiles_ * 16;
    for (blocks = 2; blocks > 0; --blocks) {
      const int64_t budget =
          std::min(gpu.shared_bytes_per_block, gpu.shared_bytes_per_multiprocessor / blocks - 1024 - 128);
      if (cut(budget)) return;
    }
    blocks = 1;
  }

  int64_t all_tiles() const { return product(tiles); }
  int64_t tickets_of_sample() const {
    return (halves ? 1 : 0) + (work_.first ? segments : 0) + (work_.second ? segments : 0) +
           (work_.input ? product(back_tiles) : 0);
  }
  int64_t ring_bytes() const {
    return operand_bytes() * row_tiles_ * 16 * shape_.axes[0].out * shape_.axes[1].out * shape_.axes[2].out;
  }

  std::string source(const BackwardProblem& problem) const {
    const auto function = [](const char* type, const char* name, const auto& values) {
      std::ostringstream out;
      out << "  static constexpr __device__ " << type << ' ' << name << "(int d) { return ";
      for (size_t d = 0; d + 1 < std::size(values); ++d) out << "d == " << d << " ? " << values[d] << " : ";
      out << values[std::size(values) - 1] << "; }\n";
      return out.str();
    };
    std::array<int64_t, 5> strides{};
    if (work_.input) {
      const Shape& own = problem.input_gradient.strides;
      strides[0] = own[0];
      strides[1] = own[1];
      for (size_t d = 2; d < own.size(); ++d) strides[5 - own.size() + d] = own[d];
    }
    std::string text =
        Constants()
            .add("threads", threads)
            .add("warps", warps)
            .add("slices", slices)
            .add("spans", spans)
            .add("vector", vector)
            .add("steps", steps)
            .add("jobs", jobs)
            .add("job_parts", job_parts)
            .add("fragments", fragments)
            .add("units", units)
            .add("chunk_rows", chunk_rows)
            .add("dh_pitch", dh_pitch)
            .add("segments", segments)
            .add("segment_tiles", segment_tiles)
            .add("all_tiles", all_tiles())
            .add("window_vectors", window_vectors())
            .add("back_columns", back_columns)
            .add("back_elements", back_elements())
            .add("back_live", back_live)
            .add("back_buffers", back_buffers)
            .add("product_pitch", product_pitch)
            .add("back_spans", back_spans)
            .add("back_spans_at_once", back_spans_at_once)
            .add("back_pitch", back_pitch)
            .flag("splits", splits)
            .flag("halves", halves)
            .flag("stages", stages)
            .flag("slides", slides())
            .flag("alone", work_.input && is_alone())
            .flag("dense_input", is_dense(problem.forward.input))
            .flag("has_first", work_.first)
            .flag("has_second", work_.second)
            .flag("wants_input", work_.input)
            .flag("wants_weight", work_.weight)
            .flag("wants_bias", work_.bias)
            .flag("may_read_output", work_.may_read_output)
            .flag("has_tensors", !shape_.parts.tensor_parameters().empty())
            .flag("makes_up_for_weights", shape_.parts.mean && dithers_weights(problem.forward))
            .text();
    text += function("int", "tile", tile) + function("int", "tiles", tiles) +
            function("int", "window", window) + function("int", "low", low) +
            function("int", "back_tile", back_tile) + function("int", "back_tiles", back_tiles) +
            function("int", "back_window", back_window) + function("int", "conv_stride", conv_stride) +
            function("int", "conv_padding", conv_padding) + function("int", "conv_dilation", conv_dilation) +
            function("int64", "gradient_stride", strides);
    const auto type = [&](size_t index) {
      return std::string(name(index < problem.parameter_gradients.size()
                                  ? problem.parameter_gradients[index].dtype
                                  : DType::f32));
    };
    std::ostringstream steep;
    TailParts before = shape_.parts;
    before.after.clear();
    steep << "  static constexpr float steepness = " << std::showpoint << steepness(before) << "f;\n";
    text += steep.str() + "  using WeightGradient = onepass::" + type(0) +
            ";\n  using BiasGradient = onepass::" + type(1) + ";\n";
    return "using onepass::int64;\nstruct Numbers {\n" + text + "};\n";
  }

 private:
  // Where pass 1 can bound dh: no parameter makes the chain before the norm steep. Rows are cut into 16
  // positions at a time, of which few may be filled up.
  bool may_halve() const {
    if (splits || !work_.first || !work_.second) return false;
    if (std::any_of(shape_.parts.before.begin(), shape_.parts.before.end(),
                    [](const TailParts::Stage& stage) { return stage.parameter >= 0; }))
      return false;
    return round_up(shape_.axes[2].classes[0].positions, 16) * 4 <=
           std::max<int64_t>(1, shape_.axes[2].classes[0].positions) * 5;
  }
  // Rows of 32 neighbouring elements of dy for each of at most 16 channels. Split operands leave too little
  // room: tiles become so small that s60 takes 2.76 ms in f32 instead of 2.61.
  bool may_stage(const BackwardProblem& problem) const {
    return !splits && row_tiles_ == 1 && chunk_rows == 1 && spans * 8 * classes_x() == 32 &&
           !shape_.parts.mean && problem.output_gradient.dtype == DType::f32 &&
           problem.output_gradient.strides.back() == 1;
  }
  // Tiles of one plane follow each other along the first dimension and keep planes of the window.
  bool slides() const { return tile[0] == 1 && tiles[0] > 1 && shape_.axes[0].step < window[0]; }
  int64_t operand_bytes() const { return halves ? 2 : 4; }
  int64_t products() const { return halves ? 1 : vector / 2; }

  // Steps and jobs, as thin/backward/backward.cuh counts them.
  void find_terms() {
    vector = !halves && shape_.in_channels <= 2 ? 2 : 4;
    for (const ThinAxis::Class& z : shape_.axes[0].classes) {
      for (const ThinAxis::Class& y : shape_.axes[1].classes) {
        for (const ThinAxis::Class& x : shape_.axes[2].classes) {
          const int64_t row_taps = chunk_rows > 1 ? y.count : 1;
          const int64_t outer = divide_up(shape_.in_channels, vector) * z.count * x.count;
          const int64_t entries = chunk_rows > 1 && y.count > 0 ? outer : outer * y.count;
          steps += divide_up(entries, 4);
          fragments += divide_up(entries, 4) * row_taps * products();
          jobs += divide_up(entries, 8) * row_tiles_;
          units += divide_up(entries, 8) * row_tiles_ * row_taps * components();
        }
      }
    }
    job_parts = std::clamp<int64_t>(jobs > 0 ? warps / jobs : 1, 1, most_parts);
    for (size_t d = 0; d < 3; ++d) {
      std::optional<int64_t> least, most;
      for (const ThinAxis::Class& own : shape_.axes[d].classes) {
        for (int64_t m = 0; m < own.count; ++m) {
          const int64_t offset = own.base + m * shape_.axes[d].delta;
          least = std::min(least.value_or(offset), offset);
          most = std::max(most.value_or(offset), offset);
        }
      }
      low[d] = least.value_or(0);
      reach_[d] = most.value_or(0) - low[d];
    }
  }

  // Where rows of outputs meet the same rows of x, a chunk has several rows; else spans of one row, of all
  // classes. Registers decide how many of both, and neither may fill up too much.
  void cut_chunks() {
    const ThinAxis& between = shape_.axes[1];
    const ThinAxis& last = shape_.axes[2];
    const auto fits = [](int64_t cells, int64_t unit) {
      return round_up(cells, unit) * 4 <= std::max<int64_t>(1, cells) * 5;
    };
    chunk_rows = 1;
    if (!splits && shape_.classes() == 1 && between.kernel > 1 && between.kernel <= 8 &&
        between.step < between.kernel)
      chunk_rows = row_tiles_ == 1 && between.kernel <= 4 && shape_.parts.mean ? 8 : row_tiles_ <= 2 ? 4 : 2;
    while (chunk_rows > 1 && !fits(between.classes[0].positions, chunk_rows)) chunk_rows /= 2;
    spans = chunk_rows > 1 ? std::max<int64_t>(1, 4 / chunk_rows)
                           : std::max<int64_t>(1, (row_tiles_ > 2 ? 2 : 4) / classes_x());
    while (spans > 1 && !fits(round_up(last.classes[0].positions, 8), 8 * spans)) spans /= 2;
  }

  int64_t classes_x() const { return std::ssize(shape_.axes[2].classes); }
  int64_t components() const { return std::min(shape_.in_channels, vector); }
  int64_t window_vectors() const { return divide_up(shape_.in_channels, vector) * product(window); }
  // Bytes of everything but what passes and pass 3 have in turns.
  int64_t fixed_bytes() const {
    const int64_t parts = splits ? 2 : 1;
    const int64_t back_steps = shape_.axes[0].kernel * shape_.axes[1].kernel * row_tiles_ * (halves ? 1 : 2);
    const int64_t rows = row_tiles_ * 16;
    return parts * 512 *
               (std::max<int64_t>(1, fragments * row_tiles_) +
                (work_.input ? back_steps * column_tiles() : 1)) +
           12 * (steps * 4 + 1 + jobs * 8 + 1) + 8 + 28 * shape_.classes() +
           rows * (32 + 4 + (halves ? 8 : 0)) + 16 + 16 * most_buffers + 24;
  }

  void set_window() {
    for (size_t d = 0; d < 3; ++d) window[d] = (tile[d] - 1) * shape_.axes[d].step + reach_[d] + 1;
    // Rows of taps that lie side by side are read together: an odd number of vectors from one to the other.
    const bool has_rows = product({window[0], window[1], shape_.in_channels}) > 1;
    if (halves && has_rows) {
      window[2] += (8 - window[2] % 16 + 16) % 16;  // eight positions are half of the banks
    } else if (window[2] % 2 == 0 && has_rows) {
      ++window[2];
    }
    dh_pitch = work_.weight ? apart(2 * product(tile), 16) : 8;
  }
  int64_t pass_bytes() const {
    const int64_t sums = std::max<int64_t>(1, std::max(work_.first_sums(), work_.second_sums()));
    const int64_t gradients = work_.weight ? shape_.classes() * row_tiles_ * 8 : 1;
    const int64_t window_bytes = round_up(window_vectors() * vector * operand_bytes(), 16);
    const int64_t dh_bytes =
        halves ? 16 + 512 * (work_.weight ? shape_.classes() * row_tiles_ * divide_up(product(tile), 16) : 1)
               : 4 * gradients * dh_pitch + 512;
    return std::max(window_bytes, 4 * warps * row_tiles_ * 16 * sums) + dh_bytes +
           (work_.weight ? units : 1) * 512 + (stages ? warps * 2 * 16 * 32 * 4 : 32);
  }

  bool cut(int64_t budget) {
    shared_bytes = 0;
    if (!cut_passes(budget) || !cut_back(budget)) return false;
    shared_bytes = fixed_bytes() + std::max(pass_bytes(), work_.input ? back_bytes() : 0);
    return shared_bytes <= budget;
  }

  // The cut with the least work, in instructions of a lane: those of positions that fill up a round of all
  // warps, and those that load windows.
  bool cut_passes(int64_t budget) {
    const int64_t most_positions = halves ? 1024 : 512;
    Three cells;
    for (size_t d = 0; d < 3; ++d) cells[d] = std::max<int64_t>(1, shape_.axes[d].classes[0].positions);
    double best = 0;
    Three best_tile{0, 0, 0};
    // Rows as long as they fit: dy is read and dh written along them.
    for (int64_t x = divide_up(cells[2], 128); x <= cells[2] && best_tile[0] == 0; ++x) {
      tile[2] = divide_up(cells[2], x);
      tile[2] = round_up(tile[2], std::max<int64_t>(8 * spans, halves ? 16 : 8));
      for (int64_t y = 1; y <= std::min(round_up(cells[1], chunk_rows), most_positions); ++y) {
        tile[1] = round_up(divide_up(cells[1], divide_up(cells[1], y)), chunk_rows);
        if (tile[1] != y) continue;
        for (int64_t z = 1; z <= std::min<int64_t>(cells[0], 8); ++z) {
          tile[0] = divide_up(cells[0], divide_up(cells[0], z));
          if (tile[0] != z || product(tile) > most_positions) continue;
          set_window();
          tiles[0] = divide_up(cells[0], z);
          if (fixed_bytes() + pass_bytes() > budget) continue;
          const double cost =
              tile_cost() * static_cast<double>(divide_up(cells[0], z) * divide_up(cells[1], tile[1]) *
                                                divide_up(cells[2], tile[2]));
          if (best_tile[0] == 0 || cost < best) {
            best = cost;
            best_tile = tile;
          }
        }
      }
    }
    if (best_tile[0] == 0) return false;
    tile = best_tile;
    set_window();
    for (size_t d = 0; d < 3; ++d) tiles[d] = divide_up(cells[d], tile[d]);
    // A ticket leaves sums of all weights in memory: so many tiles that this is a twelfth of what reading f32
    // elements of the output takes.
    const int64_t outputs = product(tile) * shape_.classes() * shape_.channels;
    segment_tiles = std::max<int64_t>(1, divide_up(units * 512 * 12, outputs * 4));
    // The first window of a ticket is loaded whole: several tiles where that takes long.
    if (slides() && 10 * window_cost() > tile_cost())
      segment_tiles = std::max(segment_tiles, divide_up(tiles[0], 4));
    segment_tiles = std::min(all_tiles(), segment_tiles);
    segments = divide_up(all_tiles(), segment_tiles);
    segment_tiles = divide_up(all_tiles(), segments);
    segments = divide_up(all_tiles(), segment_tiles);
    return true;
  }
  // In instructions of a warp: chunks that fill up a round of all warps, windows, and what a tile costs once.
  double tile_cost() const {
    const int64_t rows_of_classes = shape_.classes() / classes_x();
    const int64_t items = rows_of_classes * product(tile) / (8 * spans * chunk_rows);
    const double terms = static_cast<double>(steps * vector) / static_cast<double>(shape_.classes());
    const double of_item =
        static_cast<double>(classes_x() * spans * chunk_rows * row_tiles_) * (4 * 35 + 1.5 * terms) + 60;
    const int64_t steps_of_job = product(tile) / (8 * job_parts);
    const double of_job = static_cast<double>(steps_of_job) * 7 + 30;
    return static_cast<double>(divide_up(items, warps)) * of_item +
           (work_.weight ? static_cast<double>(divide_up(jobs * job_parts, warps)) * of_job : 0.0) +
           window_cost() * fresh_part() + 250;
  }

  double window_cost() const { return static_cast<double>(divide_up(window_vectors(), threads)) * 25; }
  // Of a window, on the average over the tiles of a ticket.
  double fresh_part() const {
    if (!slides()) return 1;
    const double count = static_cast<double>(divide_up(tiles[0], 4));
    return (1 + (count - 1) * static_cast<double>(shape_.axes[0].step) / static_cast<double>(window[0])) /
           count;
  }

  // The outputs that so many neighbouring inputs meet.
  int64_t met(size_t d, int64_t inputs) const {
    const int64_t reach = (shape_.axes[d].kernel - 1) * conv_dilation[d];
    const int64_t all =
        transposed_ ? (inputs - 1) * conv_stride[d] + reach + 1 : (inputs - 1 + reach) / conv_stride[d] + 1;
    return all;
  }

  int64_t column_tiles() const { return divide_up(shape_.in_channels * shape_.axes[2].kernel, 16); }
  int64_t back_items() const {
    return back_tile[1] * divide_up(back_spans, back_spans_at_once) * column_tiles();
  }
  // Whether a warp has a row to itself and rows of a plane arrive at once.
  bool is_alone() const {
    return back_buffers > 1 && back_spans_at_once >= back_spans && column_tiles() == 1 &&
           back_columns == shape_.axes[2].out && back_pitch == row_tiles_ * 16;
  }
  // A row's last columns of products may be read from the row behind it.
  int64_t back_elements() const {
    return ((back_window[1] - 1) * back_columns + std::max(back_columns, back_spans * 8)) * back_pitch;
  }
  int64_t back_bytes() const {
    return back_buffers * operand_bytes() * back_elements() +
           4 * 2 * back_tile[1] * shape_.in_channels * shape_.axes[2].kernel * product_pitch;
  }

  // The cut of pass 3 with the least work: rows loaded, and what warps wait for each other.
  bool cut_back(int64_t budget) {
    if (!work_.input) return true;
    const auto in = [&](size_t d) { return std::max<int64_t>(1, shape_.axes[d].in); };
    const int64_t reach = (shape_.axes[0].kernel - 1) * conv_dilation[0];
    back_live = transposed_ ? reach / conv_stride[0] + 1 : reach + 1;
    // Registers for sums of all planes; split ones take twice as many.
    const int64_t most_spans = (splits ? 8 : 16) / back_live;
    if (most_spans == 0) return false;
    double best = 0;
    std::array<int64_t, 4> best_cut{};
    const int64_t least_parts = divide_up(in(2), 256);
    for (int64_t parts = least_parts; parts <= std::min(in(2), least_parts + 7); ++parts) {
      for (int64_t rows = 1; rows <= std::min<int64_t>(in(1), warps); ++rows) {
        for (int64_t at_once = 1; at_once <= most_spans; ++at_once) {
          for (int64_t buffers = 1; buffers <= most_buffers; ++buffers) {
            set_back(parts, rows, at_once, buffers);
            if (buffers > 2 && !is_alone()) continue;
            if (at_once > back_spans || back_items() > warps || fixed_bytes() + back_bytes() > budget)
              continue;
            const auto count = static_cast<double>(divide_up(in(1), rows) * parts);
            // Instructions of a warp for a plane: those that load it, products, and what it costs once.
            const double loads =
                static_cast<double>(back_window[1] * back_columns * row_tiles_) * 16 / threads;
            const double taps = static_cast<double>(shape_.axes[1].kernel * row_tiles_) /
                                static_cast<double>(transposed_ ? 1 : conv_stride[1]);
            const auto of_span = static_cast<double>(at_once);
            const double products = taps * (of_span + 2 * static_cast<double>(back_live) * (1 + of_span));
            // Warps wait for each other at every plane, or only for planes.
            const double waits = buffers == 1   ? 250
                                 : !is_alone()  ? 100
                                 : buffers == 2 ? 80
                                 : buffers == 3 ? 62
                                                : 60;
            const double cost = count * (loads + products + waits);
            if (best == 0 || cost < best) {
              best = cost;
              best_cut = {parts, rows, at_once, buffers};
            }
          }
        }
      }
    }
    if (best == 0) return false;
    set_back(best_cut[0], best_cut[1], best_cut[2], best_cut[3]);
    back_tiles[1] = divide_up(in(1), back_tile[1]);
    back_tiles[2] = divide_up(in(2), back_tile[2]);
    // Planes are cut as finely as loading those that two parts need costs little: the last tickets of a
    // launch are these.
    int64_t best_parts = 1;
    for (int64_t count = 2; count <= 8 && count <= in(0); count *= 2) {
      if (count * met(0, divide_up(in(0), count)) * 10 <= met(0, in(0)) * 11) best_parts = count;
    }
    back_tile[0] = divide_up(in(0), best_parts);
    back_tiles[0] = divide_up(in(0), back_tile[0]);
    return true;
  }
  void set_back(int64_t parts, int64_t rows, int64_t at_once, int64_t buffers) {
    back_tile[1] = rows;
    back_tile[2] = divide_up(std::max<int64_t>(1, shape_.axes[2].in), parts);
    back_window[1] = met(1, rows);
    const int64_t out = shape_.axes[2].out;
    back_columns = parts == 1 ? out : std::min(met(2, back_tile[2]), out);
    back_spans = divide_up(back_columns, 8);
    back_spans_at_once = at_once;
    back_buffers = buffers;
    product_pitch = back_spans * 8 + 4;
  }

  const ThinShape& shape_;
  const ThinWork& work_;
  bool transposed_ = false;
  int64_t row_tiles_ = 1;
  Three reach_{0, 0, 0};
};

// The forward problem with the output where its gradient lies: the output itself is not read but in a mean.
Problem as_read(const BackwardProblem& problem, const TailParts& parts) {
  Problem forward = problem.forward;
  if (!parts.mean && parts.tensor_parameters().empty())
    forward.output.strides = problem.output_gradient.strides;
  return forward;
}

class ThinBackward final : public BackwardKernel {
 public:
  explicit ThinBackward(const BackwardProblem& problem)
      : problem_(problem),
        shape_(problem.forward),
        work_(problem, shape_.parts),
        numbers_(problem, shape_, work_, gpu_of(problem.forward.device)) {
    if (!work_.first && !work_.second) return;
    const std::string structs = "#include \"thin/backward/reduce.cuh\"\n" + tail_source(problem_) +
                                thin_source(as_read(problem_, shape_.parts), shape_) +
                                numbers_.source(problem_);
    function_.emplace(
        source(structs), problem.forward.device,
        Launch{1, static_cast<uint32_t>(numbers_.threads), 1, static_cast<uint32_t>(numbers_.shared_bytes)});
    if (work_.sums) {
      reduce_blocks_ = (work_.weight ? numbers_.units * 4 * numbers_.slices : 0) + shape_.channels + 1;
      reduce_.emplace(reduce_source(structs), problem.forward.device,
                      Launch{1, static_cast<uint32_t>(numbers_.threads), 1, 0});
    }
    const Number resident = function_->resident_clusters();
    const int64_t of_sample = numbers_.tickets_of_sample();
    const Number& batch = shape_.batch;
    // Lower tickets by as many as run at a time: what is waited for is mostly done. Some take longer than
    // others, though: where the output spares pass 1 (which then takes no time), pass 3 is half as many again
    // behind pass 2. s27 takes 1.35 ms then, 1.61 with as many; others are not measured.
    const bool spares = work_.may_read_output;
    const bool lags_more = spares && work_.input;
    const int64_t slow =
        of_sample - (spares ? numbers_.segments : 0) - (lags_more && numbers_.halves ? 1 : 0);
    const Number lag = (divide_up(resident, slow) + 1).called("lag");
    first_lag_ = lags_more ? lag / 2 : lag;
    second_lag_ = (lags_more ? 3 * lag / 2 : lag).called("second_lag");
    ring_samples_ = minimum(batch, 2 * second_lag_ + 1).called("ring_samples");
    blocks_ = clamp(batch * of_sample, 1, resident);
    const Number tickets = batch * numbers_.segments;
    control_ = regions_.add((batch + 1) * 4 * 4);
    columns_ = regions_.add(numbers_.units * 4 * 4);
    peaks_ = regions_.add(when(numbers_.halves, batch * 4));
    cleared_bytes_ = regions_.total();
    scales_ = regions_.add(when(numbers_.halves, batch * 2 * 4));
    first_parts_ = regions_.add(tickets * shape_.channels * work_.first_sums() * 4);
    second_parts_ = regions_.add(tickets * shape_.channels * work_.second_sums() * 4);
    slab_sums_ = regions_.add(shape_.slabs() * 2 * 4);
    const bool merges = work_.weight && numbers_.segments > 1;
    weight_parts_ = regions_.add(when(merges, ring_samples_ * numbers_.segments * numbers_.units * 512));
    weight_samples_ = regions_.add(when(work_.weight, batch * numbers_.units * 512));
    slices_ = regions_.add(work_.weight ? numbers_.units * 128 * numbers_.slices * 8 : 0);
    ring_ = regions_.add(when(work_.input, ring_samples_ * numbers_.ring_bytes()));
  }

  size_t workspace_bytes() const override { return static_cast<size_t>(regions_.total().value()); }
  bool reads_statistics() const override { return shape_.parts.norm != nullptr && function_.has_value(); }

  std::string describe() const override {
    if (!function_) return "passes: none, no gradient is wanted\n";
    const auto by = [](const Three& sizes) {
      return std::to_string(sizes[0]) + "x" + std::to_string(sizes[1]) + "x" + std::to_string(sizes[2]);
    };
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms in " << numbers_.steps << " steps of "
        << shape_.classes() << (shape_.classes() == 1 ? " class" : " classes") << ", computed "
        << (work_.first && work_.second ? "twice" : "once") << ", "
        << (numbers_.splits                                 ? "operands split in two"
            : numbers_.halves                               ? "operands rounded to f16 and scaled"
            : problem_.forward.precision == Precision::tf32 ? "operands rounded to tf32"
                                                            : "gradients rounded to tf32")
        << '\n'
        << "tile: " << by(numbers_.tile) << " positions, " << numbers_.all_tiles() << " tiles and "
        << numbers_.segments << " tickets a sample\n";
    if (work_.input) {
      out << "input's gradient: tiles of " << by(numbers_.back_tile) << ", " << product(numbers_.back_tiles)
          << " a sample; ring of " << ring_samples_.value() << " samples, " << ring_.bytes.value()
          << " bytes\n";
    }
    out << "blocks: " << describe_blocks(blocks_.value(), *function_)
        << "passes: " << (work_.first ? 1 : 0) + (work_.second ? 1 : 0) + (work_.input ? 1 : 0)
        << (work_.may_read_output ? ", one less with the output" : "")
        << (reduce_ ? ", then sums over the batch" : "") << '\n'
        << "saved by forward: the input" << (shape_.parts.norm ? " and the statistics of each slab" : "")
        << '\n'
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return !function_ || numbers_.splits                   ? Notes{}
           : problem_.forward.precision == Precision::tf32 ? Notes{note::operands_rounded}
                                                           : Notes{note::gradients_rounded};
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    if (!function_) return;
    const Device& device = problem_.forward.device;
    if (shape_.batch.value() == 0) {
      clear_gradients(arguments, stream);
      return;
    }
    Words words;
    words.add(arguments.input);
    words.add(arguments.output_gradient);
    words.add(arguments.output);
    words.add(arguments.statistics);
    for (const Region& region : {control_, columns_, peaks_, scales_, first_parts_, second_parts_, slab_sums_,
                                 weight_parts_, weight_samples_, slices_, ring_})
      words.add(at(workspace, region));
    words.add(arguments.input_gradient);
    words.add(shape_.batch);
    words.add(first_lag_);
    words.add(second_lag_);
    words.add(ring_samples_);
    words.add(arguments.parameters);
    words.add(arguments.parameter_gradients);
    clear(at(workspace, control_), cleared_bytes_, stream, device);
    words.launch(*function_, stream, blocks_);
    if (reduce_) words.launch(*reduce_, stream, reduce_blocks_);
  }

 private:
  Source source(const std::string& structs) const {
    return {"onepass_thin_backward",
            structs +
                "using Agent = onepass::ThinBackward<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "static_assert(sizeof(Agent::Shared) <= " +
                std::to_string(numbers_.shared_bytes) +
                ");\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads) + ", " + std::to_string(numbers_.blocks) +
                ") onepass_thin_backward(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char shared[];\n"
                "  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();\n"
                "}\n"};
  }
  Source reduce_source(const std::string& structs) const {
    return {"onepass_thin_reduce",
            structs +
                "using Agent = onepass::ThinReduce<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads) +
                ") onepass_thin_reduce(const __grid_constant__ Agent::Parameters p) {\n"
                "  Agent{p}.run();\n"
                "}\n"};
  }

  // An empty batch has no gradient for its weights but zero.
  void clear_gradients(const BackwardArguments& arguments, Stream stream) const {
    for (size_t i = 0; i < problem_.parameter_gradients.size(); ++i) {
      const auto bytes = static_cast<size_t>(problem_.parameter_gradients[i].byte_span());
      if (problem_.wants_parameter(i) && bytes > 0)
        clear(arguments.parameter_gradients[i], bytes, stream, problem_.forward.device);
    }
  }

  BackwardProblem problem_;
  ThinShape shape_;
  ThinWork work_;
  ThinBackwardNumbers numbers_;
  std::optional<Function> function_;
  std::optional<Function> reduce_;
  Number first_lag_ = 1, second_lag_ = 1;
  Number ring_samples_ = 1;
  Number blocks_ = 1;
  Number reduce_blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region control_, columns_, peaks_, scales_, first_parts_, second_parts_, slab_sums_, weight_parts_,
      weight_samples_, slices_, ring_;
};

bool lie_alike(const TensorSpec& a, const TensorSpec& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.sizes[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

std::string gradient_refusal(const BackwardProblem& problem, const TailParts& parts) {
  const Problem& forward = problem.forward;
  if (problem.output_gradient.dtype == DType::f64 ||
      (problem.wants_input() && problem.input_gradient.dtype == DType::f64))
    return "f64 is not computed on the GPU";
  for (size_t i = 0; i < forward.parameters.size(); ++i) {
    if (problem.wants_parameter(i) && problem.parameter_gradients[i].dtype == DType::f64)
      return "f64 is not computed on the GPU";
  }
  if (!parts.tensor_parameters().empty() && !lie_alike(problem.output_gradient, forward.output))
    return "the output's gradient lies otherwise than the tensors that stages read";
  for (const int i : parts.tensor_parameters()) {
    const auto index = static_cast<size_t>(i);
    if (problem.wants_parameter(index) &&
        !lie_alike(problem.parameter_gradients[index], forward.parameters[index]))
      return "the gradient of a tensor that a stage reads lies otherwise than the tensor";
  }
  return "";
}

std::string refusal(const BackwardProblem& problem) {
  std::string reason = thin_refusal(problem.forward);
  if (reason.empty()) reason = ties_refusal(problem.forward);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem.forward);
  reason = gradient_refusal(problem, shape.parts);
  if (!reason.empty()) return reason;
  const ThinWork work(problem, shape.parts);
  const ThinBackwardNumbers numbers(problem, shape, work, gpu_of(problem.forward.device));
  if (numbers.shared_bytes == 0) return "weights, a window and a tile of gradients do not fit shared memory";
  constexpr int64_t most_tickets = int64_t{1} << 31;
  if (shape.batch.value() > most_tickets / 16 / std::max<int64_t>(1, numbers.tickets_of_sample()))
    return "the batch has more tiles than tickets can count";
  return "";
}

double seconds(const BackwardProblem& problem, const PlanOptions&) {
  const ThinShape shape(problem.forward);
  const ThinWork work(problem, shape.parts);
  const Gpu& gpu = gpu_of(problem.forward.device);
  const ThinBackwardNumbers numbers(problem, shape, work, gpu);
  const auto outputs = static_cast<double>((shape.rows() * shape.spatial).value());
  const auto multiply_adds = static_cast<double>(problem.forward.conv_multiply_adds());
  const double passes = (work.first && !work.may_read_output ? 1 : 0) + (work.second ? 1 : 0);
  const double weight = work.weight ? 1 : 0;
  const double input = work.input ? 1 : 0;
  // H200, s60 and s27 in tf32, operands as halves: 0.49 and 0.55 ms a pass, 0.20 and 0.36 more for dweight,
  // 0.27 and 0.69 for dx; as tf32 0.46, 0.85, 0.35, 0.56, 0.71 and 1.02; in f32 2.6 and 9.8 ms.
  double of_output = (1.65 * passes + 1.3 * weight + 2.65 * input) * (numbers.splits ? 1.2 : 1);
  double of_product = (0.016 * passes + 0.01 * weight + 0.016 * input) * (numbers.splits ? 4 : 1);
  if (numbers.halves) {
    of_output = 1.86 * passes + 0.72 * weight + 0.91 * input;
    of_product = 0.0063 * passes + 0.0067 * weight + 0.0153 * input;
  }
  return 2e-5 + 1e-12 * (outputs * of_output + multiply_adds * of_product) * 66.9e12 / gpu.flops;
}

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_thin_backward{
    "thin_backward", [](const BackwardProblem& problem) { return cuda::refusal(problem); }, cuda::seconds,
    [](const BackwardProblem& problem, const PlanOptions&) -> std::shared_ptr<const BackwardKernel> {
      return std::make_shared<const cuda::ThinBackward>(problem);
    }};

}  // namespace onepass
