// The numbers of the row "gemm_packed": a search over tiles, by predicted clocks.
#include "cuda/gemm/packed_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace onepass::cuda {
namespace {

constexpr int64_t most_columns = 256;
constexpr int64_t most_stages = 8;

}  // namespace

GemmPackedNumbers::GemmPackedNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  const FlatGeometry flat(shape);
  set_index(shape, flat);
  mixes_classes = shape.classes() > 1 && layout_of_values(problem) == Layout::nchw;
  pieces = WeightPieces(taps, problem.input.dtype);
  const GemmPackedNumbers empty = *this;
  // The taps of a stage decide the order of additions. They are chosen for a fixed number of samples, so that
  // results do not depend on the batch.
  constexpr int64_t some = 8;
  std::array<int64_t, 3> groups{taps, taps_of(shape, 1) * taps_of(shape, 2), taps_of(shape, 2)};
  if (classes_apart) groups.fill(1);
  GemmPackedNumbers best = empty;
  for (const int64_t group : groups) best.take_better(empty.cut_best(shape, flat, gpu, group, some));
  if (best.columns > 0)
    *this = empty.cut_best(shape, flat, gpu, best.group_taps, CutFor::instead_of(shape.samples));
}

int64_t GemmPackedNumbers::taps_of(const ThinShape& shape, size_t d) {
  int64_t most = 0;
  for (const ThinAxis::Class& own : shape.axes[d].classes) most = std::max(most, own.count);
  return most;
}

void GemmPackedNumbers::set_index(const ThinShape& shape, const FlatGeometry& flat) {
  conv_groups = shape.conv_groups;
  classes_apart = !classes_meet_alike(shape);
  classes = classes_apart ? shape.classes() : 1;
  rows = shape.channels * shape.classes() / classes;
  input_channels = round_up(shape.in_channels, 16);
  taps = taps_of(shape, 0) * taps_of(shape, 1) * taps_of(shape, 2);
  // Every tap of the kernel belongs to one class.
  class_taps = classes_apart ? static_cast<double>(shape.taps) / static_cast<double>(classes)
                             : static_cast<double>(taps);
  pitch = flat.pitch;
  plane = flat.plane;
  const ThinAxis& first = shape.axes[0];
  const int64_t out = first.classes[0].positions;
  sample = plane * std::max({out, first.in - std::min<int64_t>(flat.low[0], 0), out + flat.high[0]});
  last_positions = flat.positions;
  const auto shift = [&](const std::array<int64_t, max_spatial_rank>& offset) {
    return offset[0] * plane + offset[1] * pitch + offset[2];
  };
  margin = std::max<int64_t>(0, -shift(flat.low));
  behind = std::max<int64_t>(0, shift(flat.high));
}

GemmPackedNumbers GemmPackedNumbers::cut_best(const ThinShape& shape, const FlatGeometry& flat,
                                              const Gpu& gpu, int64_t group, int64_t samples) const {
  GemmPackedNumbers best = *this;
  for (const Groups by : {Groups::positions, Groups::channels, Groups::turns}) {
    if (by == Groups::channels && rows <= 64) continue;
    // In turn is slower where most time is spent on stores: 64 to 32 channels doubled at 64^3 take 0.64 ms
    // instead of 0.55.
    // Nor can they be where tiles have different numbers of steps.
    if (by == Groups::turns && shape.classes() > 1) continue;
    for (int64_t own = most_columns; own >= 32; own -= 8) {
      GemmPackedNumbers tried = *this;
      tried.cut(shape, flat, gpu, group, by, own, samples);
      best.take_better(tried);
    }
  }
  return best;
}

void GemmPackedNumbers::cut(const ThinShape& shape, const FlatGeometry& flat, const Gpu& gpu, int64_t group,
                            Groups by, int64_t own, int64_t samples) {
  group_taps = group;
  shared_by = by;
  tile_channels = by == Groups::channels ? 128 : 64;
  tile_positions = by == Groups::positions ? 2 * own : own;
  const auto reach = [&](size_t d) { return flat.high[d] - flat.low[d]; };
  window = tile_positions + (classes_apart ? 0 : reach(2));
  if (group > taps_of(shape, 2)) window += reach(1) * pitch;
  if (group > taps_of(shape, 1) * taps_of(shape, 2)) window += reach(0) * plane;
  // Few taps make a chunk of 16 channels a short one.
  chunk_channels = 16;
  while (group_taps * chunk_channels < 64 && input_channels % (2 * chunk_channels) == 0) chunk_channels *= 2;
  while (stages < most_stages && shared_bytes(stages + 1) <= gpu.shared_bytes_per_block) ++stages;
  if (stages < 3) return;
  columns = own;
  clocks = predict(samples, gpu);
}

double GemmPackedNumbers::predict(int64_t samples, const Gpu& gpu) const {
  const double terms = class_taps * static_cast<double>(input_channels);
  const bool turns = shared_by == Groups::turns;
  const bool in_groups = conv_groups > 1;
  const double products = terms * static_cast<double>(columns) / (turns ? 32 : 16);
  const double of_steps =
      class_taps / static_cast<double>(group_taps * chunk_channels) * static_cast<double>(input_channels);
  const double bytes = of_steps * static_cast<double>(x_bytes() + weight_stage_bytes());
  // Tiles of different groups share no x: 448 channels in 4 groups at 28 x 28 and 1232 in 11 at 14 x 14 take
  // 1.2 to 1.4 times as long.
  const double multiplied = (turns ? 1.04 : 1.0) * (in_groups ? 1.2 : 1.0) * products *
                            std::pow(1 + std::pow(bytes / products / 46, 4), 0.25);
  // A warp stores 16 rows of its columns; neighbouring classes make longer runs. Groups of 16 and 32 channels
  // (512 in 32 at 28 x 28, 128 in 4 at 32^3) take as long as groups of 64.
  const double stored = static_cast<double>(columns * (in_groups ? 64 : std::min<int64_t>(rows, 64))) / 64;
  const double after = mixes_classes ? 2000 + 32 * stored : 3000 + 51 * stored;
  const auto of_block =
      static_cast<double>(divide_up(tiles(Number(samples)) * channel_tiles(), gpu.multiprocessors));
  if (turns) return 2000 + of_block * std::max(multiplied, (multiplied + after) / 2) + after / 2;
  return 2000 + of_block * (multiplied + after);
}

int64_t GemmPackedNumbers::shared_bytes(int64_t count) const {
  return StructBytes()
      .add(count * round_up(x_bytes(), 128), 128)
      .add(count * weight_stage_bytes(), 128)
      .add(8 * 8 * 40 * 4, 16)
      .add((shared_by == Groups::turns ? 2 : 1) * tile_positions * 4, 4)
      .add(2 * count * 8, 8)
      .total();
}

}  // namespace onepass::cuda
