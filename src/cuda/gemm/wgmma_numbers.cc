// The numbers of the row "gemm_wgmma": a search over tiles, by predicted clocks.
#include "cuda/gemm/wgmma_numbers.h"

#include <algorithm>

namespace onepass::cuda {
namespace {

constexpr int64_t staging_threads = 128;
constexpr int64_t converting_threads = 96;
constexpr int64_t most_columns = 304;        // of a warpgroup: sums of 152 registers a thread
constexpr int64_t most_split_columns = 176;  // a second set of sums takes as many registers

int64_t taps_of(const ThinShape& shape) {
  int64_t taps = 1;
  for (const ThinAxis& axis : shape.axes) taps *= axis.classes[0].count;
  return taps;
}

}  // namespace

GemmWgmmaNumbers::GemmWgmmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  double least = 0;
  const auto take = [&](const GemmWgmmaNumbers& tried) {
    if (tried.columns == 0) return;
    const double clocks = tried.clocks_of_tile * static_cast<double>(tried.tiles()) /
                          static_cast<double>(tried.blocks_at_once(gpu));
    if (columns > 0 && clocks >= least) return;
    *this = tried;
    least = clocks;
  };
  const FlatGeometry flat(shape);
  for (const bool share : {false, true}) {
    for (int64_t most = most_columns; most >= 64; most -= 8)
      take(GemmWgmmaNumbers(problem, shape, gpu, share, most, Box{}));
    if (flat.has_stride(shape)) continue;
    const int64_t most = splits_operands(problem) ? most_split_columns : most_columns;
    const int64_t positions = most * (share ? 1 : 2);
    const auto fits = [&](const Box& tried) { return flat.positions_of(tried) <= positions; };
    for (const Box& tried : FlatGeometry::boxes(shape, fits))
      take(GemmWgmmaNumbers(problem, shape, gpu, share, most, tried));
  }
}

GemmWgmmaNumbers::GemmWgmmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, bool share,
                                   int64_t most, const Box& tried)
    : conv_groups(shape.conv_groups), groups_share_positions(share), box(tried), taps(taps_of(shape)) {
  const FlatGeometry flat(shape);
  parts = splits_operands(problem) ? 2 : 1;
  if (parts == 2 && most > most_split_columns) return;
  tile_channels = share ? 128 : 64;
  if (share && rows_of(shape) <= 64) return;
  const int64_t at_most = share ? most : 2 * most;
  position_tiles = divide_up(flat.positions, at_most);
  const int64_t wanted_positions =
      is_empty(box) ? divide_up(flat.positions, position_tiles) : flat.positions_of(box);
  int64_t own = round_up(divide_up(wanted_positions, share ? 1 : 2), 8);
  if (own > 256) own = round_up(own, 16);  // two products
  if (own > most) return;
  tile_positions = share ? own : 2 * own;
  pitch = flat.pitch;
  plane = flat.plane;
  position_tiles = divide_up(flat.positions, tile_positions);
  windows = flat.windows(shape, tile_positions);
  if (!is_empty(box)) {
    pitch = flat.pitch_of(box);
    plane = flat.plane_of(box);
    position_tiles = 1;
    for (size_t d = 0; d < box.size(); ++d) {
      boxes[d] = divide_up(shape.axes[d].classes[0].positions, box[d]);
      position_tiles *= boxes[d];
    }
    windows = {0, 1, (box[0] + flat.high[0] - flat.low[0]) * plane};
  }
  const int64_t runs = is_empty(box) ? windows.count : windows.positions / pitch;
  channel_tiles = divide_up(rows_of(shape), tile_channels);
  const int64_t group_rows = rows_of(shape) / shape.groups;
  unit_channel_tiles = shape.parts.norm && tile_channels % group_rows != 0 ? channel_tiles : 1;
  // Each thread of the staging warps keeps the addresses of its positions in registers.
  constexpr int64_t most_rounds = 16;
  if (windows.all() > most_rounds * staging_threads) return;
  constexpr int64_t most_converting_rounds = 20;
  copies = lies_for_copies(problem) && !flat.has_stride(shape) &&
           windows.all() <= most_converting_rounds * converting_threads;
  // Staging by loads needs more registers than so many sums leave.
  if (!copies && own > 256) return;
  if (copies) {
    const int64_t vector = 16 / byte_size(problem.input.dtype);
    raw_pitch = round_up((is_empty(box) ? windows.positions : pitch) + 2 * (vector - 1), vector);
    constexpr int64_t most_vectors = 512;  // of a box: what the lanes of a warp keep in registers
    by_vectors = !is_empty(box) && runs * raw_pitch / vector <= most_vectors;
    if (!is_empty(box) && !by_vectors && runs > 48) return;
    raw_slot_bytes = round_up(8 * runs * raw_pitch * byte_size(problem.input.dtype), 128);
  }
  held = shape.parts.norm && !shape.parts.mean_follows_norm() && unit_tiles() <= gpu.multiprocessors &&
         parts_of_tile(shape) <= 16384;
  stored = !held && shape.passes() == 2 && !shape.parts.mean && lies_dense(problem.output);
  // Held tiles wait for each other: s19 takes 2.80 ms instead of 2.60. Split operands are summed outside of
  // the tensor cores after every group, which overlaps with the other warpgroup: 6.28 ms instead of 5.03.
  apart = stored && !share && parts == 1;
  group_taps = 1;
  // Split operands: at most 64 terms in the tensor cores.
  for (int64_t divisor = 2; divisor <= (parts == 2 ? 4 : 9); ++divisor) {
    if (taps % divisor == 0 && divisor * tile_channels <= 9 * 64) group_taps = divisor;
  }
  // An upper bound for moments, statistics, staged values, offsets and barriers.
  const int64_t fixed =
      2 * 64 * 16 + 2 * tile_channels * 8 + 8 * 8 * 40 * 4 + tile_positions * 4 + taps * 4 + 1024;
  const int64_t budget = gpu.shared_bytes_per_block - fixed;
  // Few taps make a chunk of 16 channels a short one: more channels at a time.
  const int64_t channels = round_up(shape.in_channels, 16);
  for (const int64_t wanted : {taps >= 4 ? 16 : 64, taps >= 4 ? 16 : 32, 16}) {
    chunk_channels = std::min<int64_t>(wanted, channels);
    if (parts == 2) chunk_channels = std::min(chunk_channels, 64 / group_taps / 16 * 16);
    chunks = divide_up(shape.in_channels, chunk_channels);
    if (set_stages(budget)) break;
  }
  if (x_stages < 2) return;
  if (apart) set_stagger();
  columns = own;
  clocks_of_tile = predict(problem, shape);
  // Held tiles have long epilogues, after which the mainloop waits for x: more stages of x help.
  if (held && copies && parts == 1 && weights_stay && x_stages < chunks && set_streamed_stages(budget)) {
    clocks_of_tile *= 0.94;  // s19: 2.43 ms for 2.59, in bf16 2.13 for 2.24
  }
  if (held && rows_fit_vectors(problem, shape)) set_late_stages(gpu.shared_bytes_per_block);
  shared_bytes = bytes_of_shared(problem, shape);
  if (shared_bytes > gpu.shared_bytes_per_block) columns = 0;
}

bool GemmWgmmaNumbers::rows_fit_vectors(const Problem& problem, const ThinShape& shape) const {
  const TensorSpec& output = problem.output;
  return byte_size(output.dtype) == 2 && !shape.parts.mean && is_contiguous(problem, shape) &&
         output.strides[1] % 8 == 0 && output.strides[0] % 8 == 0 && shape.spatial % 8 == 0;
}

void GemmWgmmaNumbers::set_late_stages(int64_t available) {
  constexpr int64_t most_kept = 12;  // vectors of a row, in two registers each
  if (!copies || parts != 1) return;
  int64_t x = 2, raw = 2, weights = weights_stay ? weight_stages : std::min<int64_t>(weight_stages, 5);
  int64_t vectors = columns / 16 * 2;
  // Rows begin in different banks.
  const auto pitch_of = [](int64_t count) { return 16 * (count % 4 == 0 ? count + 1 : count); };
  const auto bytes = [&](int64_t more) {
    // Statistics, taps and barriers; moments lie where values will.
    const int64_t fixed = round_up(tile_channels * 8 + taps * 4 + 16 * (weights + x + raw + 1) + 48, 128);
    return fixed + weights * weight_stage_bytes() + x * x_stage_bytes() + raw * raw_slot_bytes +
           8 * 16 * pitch_of(vectors) + more;
  };
  while (vectors > 0 && bytes(0) > available) vectors -= 2;
  if (columns / 8 - vectors > std::min(most_kept, vectors)) return;
  while (x < x_stages && bytes(x_stage_bytes()) <= available) ++x;
  while (weights < weight_stages && bytes(weight_stage_bytes()) <= available) ++weights;
  while (raw < raw_slots && bytes(raw_slot_bytes) <= available) ++raw;
  late_vectors = vectors;
  late_pitch = pitch_of(vectors);
  weight_stages = weights;
  x_stages = x;
  raw_slots = raw;
  clocks_of_tile *= 0.95;  // s61 in bf16: 0.441 ms for 0.463
}

bool GemmWgmmaNumbers::lies_for_copies(const Problem& problem) {
  const TensorSpec dense = TensorSpec::dense(problem.input.dtype, problem.input.sizes);
  const int64_t vector = 16 / byte_size(problem.input.dtype);
  return problem.input.strides == dense.strides && dense.strides[1] % vector == 0;
}

bool GemmWgmmaNumbers::set_stages(int64_t budget) {
  const int64_t x = x_stage_bytes();
  const int64_t w = weight_stage_bytes();
  int64_t raw = raw_slot_bytes;
  const int64_t all = chunks * (taps / group_taps);
  raw_slots = copies ? 2 : 1;
  weights_stay = conv_groups * channel_tiles == 1 && all * w + 2 * x + raw_slots * raw <= budget && all <= 64;
  weight_stages = weights_stay ? all : 2;
  int64_t left = budget - weight_stages * w - raw_slots * raw;
  if (!weights_stay) {
    const int64_t more = std::clamp<int64_t>((left - 2 * x) / w, 0, 3);
    weight_stages += more;
    left -= more * w;
  }
  x_stages = std::min(std::clamp<int64_t>(chunks, 2, 4), left / x);
  if (x_stages < 2) return false;
  // Smaller slots for one stage more: the warpgroups are further apart.
  const int64_t smaller = round_up(raw / 2, 128);
  if (apart && copies && x_stages < chunks && slot_channels == 8 &&
      left + 2 * (raw - smaller) >= (x_stages + 1) * x) {
    slot_channels = 4;
    left += raw_slots * (raw - smaller);
    raw = smaller;
    raw_slot_bytes = smaller;
    ++x_stages;
  }
  left -= x_stages * x;
  if (!weights_stay) {
    const int64_t more = std::min<int64_t>(3, left / w);
    weight_stages += more;
    left -= more * w;
  }
  if (copies) {
    const int64_t more = std::min<int64_t>(4, left / raw);
    raw_slots += more;
    left -= more * raw;
  }
  x_stages += std::min<int64_t>(4, left / x);
  return true;
}

void GemmWgmmaNumbers::set_stagger() {
  const int64_t steps = taps / group_taps;
  const int64_t alone = weights_stay ? chunks : (weight_stages - 1) / steps;
  stagger = std::max<int64_t>(0, std::min({x_stages - 1, alone, chunks}));
  const int64_t weight_chunks = weights_stay ? x_stages : weight_stages / steps;
  if (std::min(x_stages, weight_chunks) < chunks + stagger) return;
  if (chunks > 1) {
    x_stages = chunks + stagger - 1;
  } else {
    stagger = 0;
  }
}

bool GemmWgmmaNumbers::set_streamed_stages(int64_t budget) {
  int64_t few_taps = 1;
  for (int64_t divisor = 2; divisor <= 3; ++divisor) {
    if (taps % divisor == 0 && divisor * tile_channels <= 3 * 64) few_taps = divisor;
  }
  const int64_t w = weight_stage_bytes() / group_taps * few_taps;
  const int64_t more_x = std::min<int64_t>(chunks, 3);
  constexpr int64_t stages = 4;
  const int64_t left = budget - stages * w - more_x * x_stage_bytes() - 2 * raw_slot_bytes;
  if (left < 0) return false;
  weights_stay = false;
  group_taps = few_taps;
  weight_stages = stages;
  x_stages = more_x;
  raw_slots = 2 + std::min<int64_t>(4, left / raw_slot_bytes);
  return true;
}

double GemmWgmmaNumbers::predict(const Problem& problem, const ThinShape& shape) const {
  const auto n = static_cast<double>(columns);
  const bool reads_halves = byte_size(problem.input.dtype) == 2;
  const auto in_channels = static_cast<double>(shape.in_channels);
  const double elements = n * 128;  // of a tile
  const double existing =
      elements * static_cast<double>(rows_of(shape)) / static_cast<double>(channel_tiles * tile_channels);
  const auto output_bytes = static_cast<double>(byte_size(problem.output.dtype));
  // A product of 64 x n x 16; sums of split operands leave the tensor cores, which wait.
  const int64_t steps = 2 * chunks * (chunk_channels / 16) * taps * (parts == 2 ? 3 : 1);
  const double products = static_cast<double>(steps) * n / 2 * (parts == 2 ? 1.4 : 1.05);
  // Through L2, and by the converting warps: eight channels of 96 positions at a time.
  const auto x_bytes =
      static_cast<double>(windows.all() * shape.in_channels * byte_size(problem.input.dtype));
  const double weights =
      weights_stay ? 0.0
                   : static_cast<double>(weight_bytes()) / static_cast<double>(conv_groups * channel_tiles);
  const auto rounds = static_cast<double>(divide_up(windows.all(), converting_threads));
  double staging = x_bytes / 7;
  double copying = 0;
  if (copies) {
    staging = rounds * (in_channels / 8 * (reads_halves ? 90 : 120) * static_cast<double>(parts) + 380);
    // A bulk copy takes 75 clocks, whatever its size; vectors come at 6 bytes a clock.
    const int64_t runs = is_empty(box) ? windows.count : windows.positions / pitch;
    copying = by_vectors
                  ? in_channels * static_cast<double>(raw_slot_bytes) / static_cast<double>(slot_channels) / 6
                  : static_cast<double>(runs) * in_channels * 75;
  }
  const double moved = std::max((x_bytes + weights) / 18, copying);
  const double late = 1 - std::min(1.0, static_cast<double>(x_stages) / static_cast<double>(chunks));  // of x
  const double multiplied = std::max(products + std::max(0.0, staging - products) * late, moved) + 1500;
  const bool fits_flat = is_empty(box) && pitch == shape.axes[2].out;
  const double before = n * (1 + gemm_chain_instructions(shape.parts.before)) +
                        (shape.parts.norm ? n * (fits_flat ? 7 : 20) : 0.0);
  // A tile that is a unit by itself waits for nobody.
  const double exchanged = held ? (unit_tiles() == 1 ? 3000 : 7700) : shape.parts.norm ? 6000 : 500;
  const double after = n * (3 + gemm_chain_instructions(shape.parts.after));
  // Outputs of neighbouring classes leave one by one.
  const double written = existing * output_bytes / (shape.classes() > 1 ? 3 : 15);
  double all;
  if (stored) {
    all = multiplied + before + exchanged + existing * 4 / 12.5 + existing * (4 + output_bytes) / 17;
  } else {
    all = multiplied + before + exchanged + after + (shape.parts.mean ? 0.0 : written);
  }
  // What layers of real models took besides; s19 and s61 take less.
  all = (reads_halves && !(held && copies) ? 1.25 : 1.12) * std::max({all, staging, moved});
  return passes(shape) == 1 || stored ? all : 2 * all;
}

int64_t GemmWgmmaNumbers::bytes_of_shared(const Problem& problem, const ThinShape& shape) const {
  constexpr int64_t warps = 8;
  const bool keeps_values = late_vectors > 0;
  const int64_t offsets = is_contiguous(problem, shape) ? 2 : tile_positions;
  return StructBytes()
      .add(x_stages * x_stage_bytes(), 128)
      .add(weight_stages * weight_stage_bytes(), 128)
      .add(raw_slots * raw_slot_bytes, 128)
      .add(warps * (keeps_values ? 16 * late_pitch : 8 * 40 * 4), 16)
      .add((keeps_values ? 1 : 2 * 64) * 16, 16)
      .add(offsets * 4, 8)
      .add((apart ? 2 : 1) * tile_channels * 8, 8)
      .add(2 * (x_stages + weight_stages + raw_slots) * 8, 8)
      .add(taps * 4, 4)
      .add(2 * 4, 4)
      .total();
}

bool GemmWgmmaNumbers::is_contiguous(const Problem& problem, const ThinShape& shape) const {
  const auto stride = [&](size_t d) { return ThinShape::spatial_stride(problem.output, shape.order[d]); };
  return is_empty(box) && shape.classes() == 1 && pitch == shape.axes[2].out &&
         plane == pitch * shape.axes[1].out && stride(2) == 1 && stride(1) == pitch &&
         (shape.axes[0].out == 1 || stride(0) == plane);
}

}  // namespace onepass::cuda
