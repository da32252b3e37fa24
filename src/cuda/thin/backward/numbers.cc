// How the row "thin_backward" cuts a sample into tiles and tickets.
#include "cuda/thin/backward/numbers.h"

#include <algorithm>
#include <optional>

#include "cuda/struct_bytes.h"

namespace onepass::cuda {
namespace {

constexpr int64_t most_parts = 4;    // of a job
constexpr int64_t most_buffers = 4;  // of planes of dh

// The least number from `least` on that is `rest` more than a multiple of 32: rows of shared memory at this
// pitch begin in different banks.
int64_t bank_pitch(int64_t least, int64_t rest) { return least + (rest - least % 32 + 32) % 32; }

bool is_16_bits(DType type) { return type == DType::f16 || type == DType::bf16; }

int64_t product(const ThinBackwardNumbers::Three& sizes) { return sizes[0] * sizes[1] * sizes[2]; }

// Padding to a multiple of `unit` adds at most a quarter.
bool pads_little(int64_t cells, int64_t unit) {
  return round_up(cells, unit) * 4 <= std::max<int64_t>(1, cells) * 5;
}

}  // namespace

ThinBackwardWork::ThinBackwardWork(const BackwardProblem& problem, const TailParts& parts)
    : tail(problem, parts), input(problem.wants_input()), weight(problem.wants_parameter(0)) {
  bias = problem.forward.block.conv()->bias && problem.wants_parameter(1);
  second = tail.second || weight || bias;
  first = parts.norm != nullptr && (second || tail.third);
  sums = tail.third || weight || bias;
  // A rounded output is not exact enough for strict f32. One of 16 bits is not either: gradients of s27's
  // weights were off by 1.5%.
  may_read_output = parts.mean_follows_norm() && second && problem.forward.precision == Precision::tf32;
}

ThinBackwardNumbers::ThinBackwardNumbers(const BackwardProblem& problem)
    : shape(problem.forward), work(problem, shape.parts) {
  const Gpu& gpu = gpu_of(problem.forward.device);
  const Problem& forward = problem.forward;
  // Strict numerics keep gradients between the products as exact as f32, for 16-bit tensors too.
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
  stages_gradient = may_stage(problem);
  find_terms();
  back_pitch = row_tiles_ % 2 == 0 ? row_tiles_ * 16 + 16 : row_tiles_ * 16;
  for (blocks = 2; blocks > 0; --blocks) {
    const int64_t budget =
        std::min(gpu.shared_bytes_per_block, gpu.shared_bytes_per_multiprocessor / blocks - 1024 - 128);
    if (cut(budget)) return;
  }
  blocks = 1;
}

int64_t ThinBackwardNumbers::all_tiles() const { return product(tiles); }

int64_t ThinBackwardNumbers::all_back_tiles() const { return product(back_tiles); }

int64_t ThinBackwardNumbers::tickets_of_sample() const {
  return (halves ? 1 : 0) + (work.first ? segments : 0) + (work.second ? segments : 0) +
         (work.input ? all_back_tiles() : 0);
}

int64_t ThinBackwardNumbers::ring_bytes() const {
  return operand_bytes() * row_tiles_ * 16 * shape.axes[0].out * shape.axes[1].out * shape.axes[2].out;
}

// Pass 1 has to bound dh: no parameter may make the chain before the norm steep. Rows are cut into multiples
// of 16 positions, which may pad little.
bool ThinBackwardNumbers::may_halve() const {
  if (splits || !work.first || !work.second) return false;
  if (std::any_of(shape.parts.before.begin(), shape.parts.before.end(),
                  [](const TailParts::Stage& stage) { return stage.parameter >= 0; }))
    return false;
  return pads_little(shape.axes[2].classes[0].positions, 16);
}

// Rows of 32 neighbouring elements of dy for each of at most 16 channels. Split operands leave too little
// space: tiles become so small that s60 takes 2.76 ms in f32 instead of 2.61.
bool ThinBackwardNumbers::may_stage(const BackwardProblem& problem) const {
  return !splits && row_tiles_ == 1 && chunk_rows == 1 && spans * 8 * classes_x() == 32 &&
         !shape.parts.mean && problem.output_gradient.dtype == DType::f32 &&
         problem.output_gradient.strides.back() == 1;
}

// Tiles of one plane follow each other along the first dimension and keep planes of the window.
bool ThinBackwardNumbers::slides() const {
  return tile[0] == 1 && tiles[0] > 1 && shape.axes[0].step < window[0];
}

int64_t ThinBackwardNumbers::window_vectors() const {
  return divide_up(shape.in_channels, vector) * product(window);
}

// Steps and jobs, as thin/backward/terms.cuh counts them.
void ThinBackwardNumbers::find_terms() {
  vector = !halves && shape.in_channels <= 2 ? 2 : 4;
  for (const ThinAxis::Class& z : shape.axes[0].classes) {
    for (const ThinAxis::Class& y : shape.axes[1].classes) {
      for (const ThinAxis::Class& x : shape.axes[2].classes) {
        const int64_t row_taps = chunk_rows > 1 ? y.count : 1;
        const int64_t outer = divide_up(shape.in_channels, vector) * z.count * x.count;
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
    for (const ThinAxis::Class& own : shape.axes[d].classes) {
      for (int64_t m = 0; m < own.count; ++m) {
        const int64_t offset = own.base + m * shape.axes[d].delta;
        least = std::min(least.value_or(offset), offset);
        most = std::max(most.value_or(offset), offset);
      }
    }
    low[d] = least.value_or(0);
    reach_[d] = most.value_or(0) - low[d];
  }
}

// A chunk has several rows where rows of outputs read the same rows of x; else spans of one row, of all
// classes. Registers limit both, and neither may pad much.
void ThinBackwardNumbers::cut_chunks() {
  const ThinAxis& between = shape.axes[1];
  const ThinAxis& last = shape.axes[2];
  chunk_rows = 1;
  if (!splits && shape.classes() == 1 && between.kernel > 1 && between.kernel <= 8 &&
      between.step < between.kernel)
    chunk_rows = row_tiles_ == 1 && between.kernel <= 4 && shape.parts.mean ? 8 : row_tiles_ <= 2 ? 4 : 2;
  while (chunk_rows > 1 && !pads_little(between.classes[0].positions, chunk_rows)) chunk_rows /= 2;
  spans = chunk_rows > 1 ? std::max<int64_t>(1, 4 / chunk_rows)
                         : std::max<int64_t>(1, (row_tiles_ > 2 ? 2 : 4) / classes_x());
  while (spans > 1 && !pads_little(round_up(last.classes[0].positions, 8), 8 * spans)) spans /= 2;
}

void ThinBackwardNumbers::set_window() {
  for (size_t d = 0; d < 3; ++d) window[d] = (tile[d] - 1) * shape.axes[d].step + reach_[d] + 1;
  // Neighbouring rows of taps are read together: an odd pitch in vectors avoids bank conflicts.
  const bool has_rows = product({window[0], window[1], shape.in_channels}) > 1;
  if (halves && has_rows) {
    window[2] += (8 - window[2] % 16 + 16) % 16;  // eight positions are half of the banks
  } else if (window[2] % 2 == 0 && has_rows) {
    ++window[2];
  }
  dh_pitch = work.weight ? bank_pitch(2 * product(tile), 16) : 8;
}

int64_t ThinBackwardNumbers::pass_bytes() const {
  const int64_t sums = std::max<int64_t>(1, std::max(work.first_sums(), work.second_sums()));
  const int64_t classes = shape.classes();
  const int64_t fragments_of_dh = halves && work.weight ? classes * row_tiles_ * (product(tile) / 16) : 1;
  const int64_t window_bytes = window_vectors() * vector * operand_bytes();
  const bool has_dh = work.weight && !halves;
  return StructBytes()
      .add(round_up(std::max(window_bytes, warps * row_tiles_ * 16 * sums * 4), 16), 16)  // window or sum
      .add((has_dh ? classes * row_tiles_ * 8 : 1) * (halves ? 4 : dh_pitch) * 4, 16)     // dh
      .add(fragments_of_dh * 512, 16)                                                     // half_dh
      .add((work.weight ? units : 1) * 512, 16)                                           // weight
      .add((stages_gradient ? warps : 1) * 2 * (stages_gradient ? 16 * 32 : 4) * 4, 16)   // staged
      .total();
}

int64_t ThinBackwardNumbers::back_bytes() const {
  const int64_t column_rows = shape.in_channels * shape.axes[2].kernel;
  return StructBytes()
      .add(back_buffers * back_elements() * operand_bytes(), 16)    // ring
      .add(2 * back_tile[1] * column_rows * product_pitch * 4, 16)  // product
      .total();
}

int64_t ThinBackwardNumbers::shared_bytes_with(int64_t bytes) const {
  const int64_t parts = splits ? 2 : 1;
  const int64_t rows = row_tiles_ * 16;
  const int64_t back_steps = shape.axes[0].kernel * shape.axes[1].kernel * row_tiles_ * (halves ? 1 : 2);
  return StructBytes()
      .add(parts * std::max<int64_t>(1, fragments * row_tiles_) * 512, 16)    // weight
      .add(parts * (work.input ? back_steps * column_tiles() : 1) * 512, 16)  // back
      .add((steps * 4 + 1) * 4, 4)                                            // step_window
      .add((jobs * 8 + 1) * 4, 4)                                             // group_window
      .add((slides() ? steps * 4 : 1) * 8, 8)                                 // step_entry
      .add((slides() ? jobs * 8 : 1) * 8, 8)                                  // group_entry
      .add(shape.classes() * 28, 4)                                           // of_class
      .add(rows * 32, 16)                                                     // row
      .add(rows * 4, 4)                                                       // bias
      .add((halves ? rows : 1) * 2 * 4, 4)                                    // weight_scale, unscale
      .add(2 * 4, 4)                                                          // back_scale, most
      .add(back_buffers * 2 * 8, 8)                                           // arrived, released
      .add(bytes, 16)                                                         // passes or back_window
      .total();
}

bool ThinBackwardNumbers::cut(int64_t budget) {
  back_buffers = work.input ? most_buffers : 1;  // as many barriers as there may be
  if (!cut_passes(budget) || !cut_back(budget)) return false;
  const int64_t bytes = shared_bytes_with(std::max(pass_bytes(), back_bytes()));
  if (bytes <= budget) shared_bytes = bytes;
  return bytes <= budget;
}

// The cut with the least work, in instructions of a lane: chunks, padded to rounds of all warps, and windows.
bool ThinBackwardNumbers::cut_passes(int64_t budget) {
  const int64_t most_positions = halves ? 1024 : 512;
  Three cells;
  for (size_t d = 0; d < 3; ++d) cells[d] = std::max<int64_t>(1, shape.axes[d].classes[0].positions);
  double best = 0;
  Three best_tile{0, 0, 0};
  // Rows are as long as fits: dy is read and dh written along them.
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
        if (shared_bytes_with(pass_bytes()) > budget) continue;
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
  // A ticket stores sums of all weights. It has so many tiles that this is a twelfth of reading its outputs
  // as f32.
  const int64_t outputs = product(tile) * shape.classes() * shape.channels;
  segment_tiles = std::max<int64_t>(1, divide_up(units * 512 * 12, outputs * 4));
  // The first window of a ticket is loaded whole: a ticket has several tiles where that takes long.
  if (slides() && 10 * window_cost() > tile_cost())
    segment_tiles = std::max(segment_tiles, divide_up(tiles[0], 4));
  segment_tiles = std::min(all_tiles(), segment_tiles);
  segments = divide_up(all_tiles(), segment_tiles);
  segment_tiles = divide_up(all_tiles(), segments);
  segments = divide_up(all_tiles(), segment_tiles);
  return true;
}

// In instructions of a warp: chunks that fill a round of all warps, windows, and what a tile costs once.
double ThinBackwardNumbers::tile_cost() const {
  const int64_t rows_of_classes = shape.classes() / classes_x();
  const int64_t items = rows_of_classes * product(tile) / (8 * spans * chunk_rows);
  const double terms = static_cast<double>(steps * vector) / static_cast<double>(shape.classes());
  const double of_item =
      static_cast<double>(classes_x() * spans * chunk_rows * row_tiles_) * (4 * 35 + 1.5 * terms) + 60;
  const int64_t steps_of_job = product(tile) / (8 * job_parts);
  const double of_job = static_cast<double>(steps_of_job) * 7 + 30;
  return static_cast<double>(divide_up(items, warps)) * of_item +
         (work.weight ? static_cast<double>(divide_up(jobs * job_parts, warps)) * of_job : 0.0) +
         window_cost() * fresh_part() + 250;
}

double ThinBackwardNumbers::window_cost() const {
  return static_cast<double>(divide_up(window_vectors(), threads)) * 25;
}

// The part of a window that a tile loads, averaged over the tiles of a ticket.
double ThinBackwardNumbers::fresh_part() const {
  if (!slides()) return 1;
  const double count = static_cast<double>(divide_up(tiles[0], 4));
  return (1 + (count - 1) * static_cast<double>(shape.axes[0].step) / static_cast<double>(window[0])) / count;
}

// The outputs that so many neighbouring inputs meet.
int64_t ThinBackwardNumbers::met(size_t d, int64_t inputs) const {
  const int64_t reach = (shape.axes[d].kernel - 1) * conv_dilation[d];
  return transposed_ ? (inputs - 1) * conv_stride[d] + reach + 1 : (inputs - 1 + reach) / conv_stride[d] + 1;
}

int64_t ThinBackwardNumbers::back_items() const {
  return back_tile[1] * divide_up(back_spans, back_spans_at_once) * column_tiles();
}

// Each warp has a row of dx, and the rows of a plane arrive by one copy.
bool ThinBackwardNumbers::has_row_per_warp() const {
  return back_buffers > 1 && back_spans_at_once >= back_spans && column_tiles() == 1 &&
         back_columns == shape.axes[2].out && back_pitch == row_tiles_ * 16;
}

// The last columns of a row's products may be read from the next row.
int64_t ThinBackwardNumbers::back_elements() const {
  return ((back_window[1] - 1) * back_columns + std::max(back_columns, back_spans * 8)) * back_pitch;
}

// The cut of pass 3 with the least work: rows that are loaded, and waits.
bool ThinBackwardNumbers::cut_back(int64_t budget) {
  if (!work.input) return true;
  const auto in = [&](size_t d) { return std::max<int64_t>(1, shape.axes[d].in); };
  const int64_t reach = (shape.axes[0].kernel - 1) * conv_dilation[0];
  back_live = transposed_ ? reach / conv_stride[0] + 1 : reach + 1;
  // Registers hold the sums of all planes; split operands take twice as many.
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
          if (buffers > 2 && !has_row_per_warp()) continue;
          if (at_once > back_spans || back_items() > warps || shared_bytes_with(back_bytes()) > budget)
            continue;
          const auto count = static_cast<double>(divide_up(in(1), rows) * parts);
          const double cost = count * plane_cost();
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
  // Planes are cut finely, since these are the last tickets of a launch. Loading planes that two parts share
  // may cost a tenth.
  int64_t best_parts = 1;
  for (int64_t count = 2; count <= 8 && count <= in(0); count *= 2) {
    if (count * met(0, divide_up(in(0), count)) * 10 <= met(0, in(0)) * 11) best_parts = count;
  }
  back_tile[0] = divide_up(in(0), best_parts);
  back_tiles[0] = divide_up(in(0), back_tile[0]);
  return true;
}

// Instructions of a warp for a plane of pass 3: loads, products, and waits.
double ThinBackwardNumbers::plane_cost() const {
  const double loads = static_cast<double>(back_window[1] * back_columns * row_tiles_) * 16 / threads;
  const double taps = static_cast<double>(shape.axes[1].kernel * row_tiles_) /
                      static_cast<double>(transposed_ ? 1 : conv_stride[1]);
  const auto of_span = static_cast<double>(back_spans_at_once);
  const double products = taps * (of_span + 2 * static_cast<double>(back_live) * (1 + of_span));
  // Warps wait for each other at every plane, or only for planes of dh.
  const double waits = back_buffers == 1     ? 250
                       : !has_row_per_warp() ? 100
                       : back_buffers == 2   ? 80
                       : back_buffers == 3   ? 62
                                             : 60;
  return loads + products + waits;
}

void ThinBackwardNumbers::set_back(int64_t parts, int64_t rows, int64_t at_once, int64_t buffers) {
  back_tile[1] = rows;
  back_tile[2] = divide_up(std::max<int64_t>(1, shape.axes[2].in), parts);
  back_window[1] = met(1, rows);
  const int64_t out = shape.axes[2].out;
  back_columns = parts == 1 ? out : std::min(met(2, back_tile[2]), out);
  back_spans = divide_up(back_columns, 8);
  back_spans_at_once = at_once;
  back_buffers = buffers;
  product_pitch = back_spans * 8 + 4;
}

}  // namespace onepass::cuda
