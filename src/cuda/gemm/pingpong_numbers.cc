// The numbers of the row "gemm_pingpong": a search over boxes, by predicted clocks.
#include "cuda/gemm/pingpong_numbers.h"

#include <algorithm>

namespace onepass::cuda {
namespace {

constexpr int64_t most_columns = 528 / GemmPingpongNumbers::groups;  // of a warpgroup
constexpr int64_t most_steps = 6;   // of a converting warp for a copy, four registers each
constexpr int64_t most_bands = 16;  // of a window: each has two barriers

}  // namespace

GemmPingpongNumbers::GemmPingpongNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  const FlatGeometry flat(shape);
  const auto fits = [&](const Box& tried) { return columns_of(flat, tried) <= most_columns; };
  double least = 0;
  for (const Box& tried : FlatGeometry::boxes(shape, fits)) {
    const GemmPingpongNumbers numbers(problem, shape, gpu, flat, tried);
    if (numbers.columns == 0) continue;
    const double clocks = numbers.clocks_of_tile * static_cast<double>(numbers.position_tiles) /
                          static_cast<double>(numbers.blocks_at_once(gpu));
    if (columns > 0 && clocks >= least) continue;
    *this = numbers;
    least = clocks;
  }
}

GemmPingpongNumbers::GemmPingpongNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                                         const FlatGeometry& flat, const Box& tried)
    : box(tried) {
  const int64_t bytes = byte_size(problem.input.dtype);
  const int64_t vector = 16 / bytes;
  for (const ThinAxis& axis : shape.axes) taps *= axis.classes[0].count;
  for (size_t d = 0; d < box.size(); ++d) {
    boxes[d] = divide_up(shape.axes[d].classes[0].positions, box[d]);
    position_tiles *= boxes[d];
  }
  if (position_tiles > gpu.multiprocessors - mergers) return;
  pitch = flat.pitch_of(box);
  plane = flat.plane_of(box);
  window_y = box[1] + flat.high[1] - flat.low[1];
  window_z = box[0] + flat.high[0] - flat.low[0];
  // 16-bit elements outside of the window go to eight spare positions behind it.
  window = window_z * window_y * pitch + (bytes == 2 ? 8 : 0);
  chunks = divide_up(shape.in_channels, 16);
  // A copied row begins at a vector of x. 16-bit rows of neighbouring channels begin in different banks:
  // ldmatrix reads them together.
  raw_vectors = divide_up(pitch + vector - 1, vector);
  raw_pitch = (bytes == 2 && raw_vectors % 2 == 0 ? raw_vectors + 1 : raw_vectors) * vector;
  constexpr int64_t most_of_box = 256;
  if (std::max({raw_pitch, window_y, window_z}) > most_of_box) return;
  const int64_t own = columns_of(flat, box);
  store_rows =
      pitch % 8 == 0 && own % pitch == 0 && box[2] % 2 == 0 && shape.axes[2].classes[0].positions % 2 == 0;
  // Channels of a staged row have the same alignment modulo 16 bytes as in memory.
  const int64_t out_bytes = byte_size(problem.output.dtype);
  row_pitch = pitch * out_bytes / 4;
  while (store_rows && bytes == 2 && (problem.output.strides[1] * out_bytes / 4 - row_pitch) % 4 != 0)
    ++row_pitch;
  const int64_t held = bytes == 2 ? own / 4 : own / 16 * 5 + own / 2 % 8 / 4 * 3;
  const int64_t most_own = bytes == 2 ? 34 : 38;
  int64_t least_waiting = std::max<int64_t>(0, held - most_own);
  // f32 rows are staged over held words, in two parts (RowRing). The first part fills all lanes of a store.
  if (bytes == 4) {
    const int64_t eights = pitch / 8;
    const int64_t first = eights > 16 ? 16 : eights > 8 ? 8 : eights > 4 ? 4 : 2;
    row_pitch = 8 * std::min(first, eights - 1) + 8;
    // Places in a sample's outputs are counted in 32 bits.
    const bool is_near = problem.output.strides[1] < (int64_t{1} << 31) / (tile_channels * out_bytes);
    store_rows = store_rows && eights > 1 && eights <= 2 * first && problem.output.strides[1] % 4 == 0 &&
                 is_near && row_pitch / 4 < held;
    if (store_rows) least_waiting = std::max(least_waiting, row_pitch / 4);
  }
  // The offsets of columns lie there first; where rows are short they do not fit.
  store_rows = store_rows && (bytes == 2 ? 4 * staged_words(out_bytes) : 128 * least_waiting) >= own;
  const int64_t warp_slabs = round_up(16 * shape.groups / shape.channels, 2);
  // An upper bound: the number of bands is not known yet.
  const int64_t fixed =
      round_up(chunks * 2 * window * 16, 128) + weight_bytes() + groups * 16 * staged_words(out_bytes) +
      (least_waiting > 0 ? 0 : groups * 64) + (store_rows ? 2 : groups * own) * 4 + 64 * 16 +
      (2 * std::min(most_bands, window_z * window_y) + 1 + groups) * 8 +
      groups * (2 * shape.groups * 8 + 4 * 8 + 4 * 8 * warp_slabs) + groups * (own / pitch + 1) * 8 + 168;
  // Each converting warp has three stages for copies, or two, if need be of fewer rows: prefetched copies
  // keep the mainloop from waiting for memory. Held values without room in registers beside the sums are in
  // shared memory.
  const int64_t word_bytes = groups * 128 * 4;
  int64_t left = -1;
  for (copy_y = window_y; left < 0 && copy_y > 0; --copy_y) {
    if (window_y % copy_y != 0 || copy_y * steps_of_row(bytes) > most_steps) continue;
    copies = window_z * window_y / copy_y;
    if (chunks * 2 * copies < converting_warps) continue;  // each warp has copies of every tile
    const int64_t raw_bytes = round_up(copy_y * 8 * raw_pitch * bytes, 128);
    for (raw_slots = 3 * converting_warps; raw_slots > converting_warps; raw_slots -= converting_warps) {
      left = gpu.shared_bytes_per_block - fixed - raw_slots * (raw_bytes + 8) - least_waiting * word_bytes;
      if (left >= 0) break;
    }
    if (left >= 0) break;
  }
  if (left < 0) return;
  // Registers are short during the mainloop: as many more held words as fit are in shared memory.
  const int64_t few_own = bytes == 2 ? 27 : 35;
  const int64_t more = std::min(left / word_bytes, std::max<int64_t>(0, std::min(held, most_own) - few_own));
  held_shared_words = least_waiting + more;
  // A band has as many rows as a warpgroup computes: smaller bands would not be released earlier.
  band_copies = std::max({own / pitch / copy_y, divide_up(copies, most_bands), int64_t{1}});
  // One band where a converting warp would have copies of a band in one tile and none in the next: it would
  // miss a phase of the band's barriers.
  if (chunks == 1 && copies % 2 != 0) band_copies = copies;
  bands = divide_up(copies, band_copies);
  held_words = held;
  columns = own;
  shared_bytes = bytes_of_shared(problem, shape);
  if (shared_bytes > gpu.shared_bytes_per_block) columns = 0;
  clocks_of_tile = predict(shape, bytes);
}

double GemmPingpongNumbers::predict(const ThinShape& shape, int64_t bytes) const {
  const auto n = static_cast<double>(columns);
  const double multiplied = static_cast<double>(chunks * taps) * n / 2 * 1.05;
  const double instructions =
      gemm_chain_instructions(shape.parts.before) + gemm_chain_instructions(shape.parts.after);
  // Outputs by columns are stored 4 bytes at a time.
  const double own =
      multiplied + n / 2 * (3.6 * instructions + (store_rows ? 91 : 120) + (bytes == 4 ? 78 : 0)) + 1500;
  const auto steps = static_cast<double>(copy_y * steps_of_row(bytes));
  const auto all = static_cast<double>(divide_up(chunks * 2 * copies, converting_warps));
  return std::max(own, all * (550 + 75 * steps) + (bands > 1 ? 0 : 2 * multiplied));
}

int64_t GemmPingpongNumbers::bytes_of_shared(const Problem& problem, const ThinShape& shape) const {
  constexpr int64_t warps = 4 * groups;
  const int64_t raw_bytes = copy_y * 8 * raw_pitch * byte_size(problem.input.dtype);
  const int64_t warp_slabs = (16 * shape.groups / shape.channels + 1) / 2 * 2;
  return StructBytes()
      .add(chunks * 2 * window * 16, 128)
      .add(weight_bytes(), 128)
      .add(raw_slots * round_up(raw_bytes, 128), 128)
      .add(warps * staged_words(byte_size(problem.output.dtype)) * 4, 16)
      .add(warps * (held_shared_words > 0 ? 32 * held_shared_words : 4) * 4, 16)
      .add(groups * divide_up(columns, pitch) * 8, 8)
      .add((store_rows ? 2 : groups * columns) * 4, 8)
      .add(2 * groups * shape.groups * 8, 8)
      .add(warps * warp_slabs * 8, 16)
      .add(warps * 8, 8)
      .add(tile_channels * 16, 16)
      .add((2 * bands + 1 + raw_slots + groups) * 8, 8)
      .add(4, 8)
      .total();
}

}  // namespace onepass::cuda
