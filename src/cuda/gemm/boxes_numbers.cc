// The numbers of the row "gemm_boxes": a search over boxes, by predicted clocks.
#include "cuda/gemm/boxes_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace onepass::cuda {
namespace {

constexpr int64_t most_columns = 256;
constexpr int64_t most_sums = 160;  // of a thread
constexpr int64_t most_held_sums = 128;
constexpr int64_t most_x_stages = 6, most_weight_stages = 8;
constexpr int64_t most_box = 256;    // elements of a copy's dimension
constexpr int64_t stage_terms = 64;  // of input channels, that a stage of weights has at least
constexpr int64_t most_weight_stage_bytes = 40 << 10;

int64_t taps_of(const ThinShape& shape, size_t d) { return shape.axes[d].classes[0].count; }

// The parts of an axis that come of cutting it evenly, none larger than `most`.
std::vector<int64_t> even_parts(int64_t size, int64_t most) {
  std::vector<int64_t> parts;
  for (int64_t count = 1; count <= size; ++count) {
    const int64_t part = divide_up(size, count);
    if (part <= most && (parts.empty() || part != parts.back())) parts.push_back(part);
  }
  return parts;
}

}  // namespace

GemmBoxesNumbers::GemmBoxesNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  rows = shape.channels * shape.classes();
  input_channels = round_up(shape.in_channels, 16);
  chunk_channels = input_channels > 32 ? 64 : input_channels;
  taps = taps_of(shape, 0) * taps_of(shape, 1) * taps_of(shape, 2);
  piece_bytes =
      round_up(piece_rows * ((16 * taps * byte_size(problem.input.dtype) / 4) | 1) * 4, 8) + pack_threads * 8;
  const bool has_tail = shape.parts.norm != nullptr || shape.parts.mean;
  value_bytes = has_tail ? 4 : byte_size(problem.output.dtype);
  if (shape.parts.norm && !shape.parts.mean && !reads_tensors(shape.parts.before) && shape.classes() == 1)
    group_channels = shape.channels / shape.groups;
  const GemmBoxesNumbers empty = *this;
  if (group_channels > 0) {
    // Tiles decide the order in which moments are merged. They are chosen for a fixed number of samples, so
    // that results do not depend on the batch.
    constexpr int64_t some = 8;
    const GemmBoxesNumbers kept = empty.cut(shape, gpu, some, true);
    const GemmBoxesNumbers stored = empty.cut(shape, gpu, some, false);
    const Problem tail = *tail_after_convolution(problem);
    const double after = values_factor(tail) * tail_seconds_of_eight(tail) * gpu.clock() * 0.86;
    if (kept.clocks > 0 && (stored.clocks == 0 || kept.clocks < stored.clocks + after)) {
      *this = kept;
      clocks = predict(shape, gpu, shape.samples);
      return;
    }
  }
  const GemmBoxesNumbers best = empty.cut(shape, gpu, CutFor::instead_of(shape.samples), false);
  *this = best.clocks > 0 ? best : empty;
}

GemmBoxesNumbers GemmBoxesNumbers::cut(const ThinShape& shape, const Gpu& gpu, int64_t samples,
                                       bool holds) const {
  GemmBoxesNumbers best = *this;
  for (int64_t own = 0; own <= std::ssize(shape.axes); ++own) {
    // Positions of a window with a stride are as far apart as those of the output.
    const bool has_stride = std::any_of(shape.axes.begin() + own, shape.axes.end(), [](const ThinAxis& axis) {
      return axis.step > 1 && axis.classes[0].count > 1;
    });
    // A dimension of one tap is no other window.
    if (has_stride || (own > 0 && taps_of(shape, static_cast<size_t>(own - 1)) == 1)) continue;
    GemmBoxesNumbers tried = *this;
    tried.held = holds;
    if (holds) tried.value_bytes = 2;
    tried.split = own;
    for (size_t d = static_cast<size_t>(own); d < shape.axes.size(); ++d)
      tried.group_taps *= taps_of(shape, d);
    for (tried.products = 1; tried.products <= 2; ++tried.products) {
      for (int64_t count = 1; count <= divide_up(rows, 16); ++count) {
        tried.tile_channels = round_up(divide_up(rows, count), 16);
        if (tried.tile_channels > most_columns) continue;
        if (tried.products * tried.tile_channels / 2 > (holds ? most_held_sums : most_sums)) continue;
        if (count > 1 && tried.tile_channels < 64) break;
        if (holds && tried.tile_channels % group_channels != 0 && group_channels % tried.tile_channels != 0)
          continue;
        tried.try_boxes(shape, gpu, samples, best);
      }
    }
  }
  return best;
}

int64_t GemmBoxesNumbers::swizzle() const { return chunk_channels == 64 ? 3 : chunk_channels == 32 ? 2 : 1; }

int64_t GemmBoxesNumbers::first_place(int64_t product) const {
  if (!patches) return product * 64;
  const int64_t row = product * 8;
  const int64_t plane = row / box[1];
  return ((plane / box[0] * window[0] + plane % box[0]) * window[1] + row % box[1]) * window[2];
}

void GemmBoxesNumbers::try_boxes(const ThinShape& shape, const Gpu& gpu, int64_t samples,
                                 GemmBoxesNumbers& best) const {
  const int64_t most = products * 128;
  const auto out = [&](size_t d) { return shape.axes[d].classes[0].positions; };
  const auto reach = [&](size_t d) {
    return std::cmp_less(d, split) ? 0 : (taps_of(shape, d) - 1) * std::abs(shape.axes[d].delta);
  };
  const auto consider = [&](GemmBoxesNumbers tried) {
    int64_t pitch = 1;
    tried.reach_positions = 0;
    for (size_t d = max_spatial_rank; d-- > 0;) {
      tried.boxes[d] = divide_up(out(d), tried.box[d]);
      tried.reach_positions += reach(d) * pitch;
      pitch *= tried.window[d];
      if ((tried.window[d] - 1) * shape.axes[d].step + 1 > most_box) return;
    }
    const int64_t last = tried.first_place(2 * products - 1) + (tried.patches ? 7 * tried.window[2] + 8 : 64);
    if (tried.held && (tried.box_n > 1 || tried.unit_tiles() > gpu.multiprocessors)) return;
    tried.stage_positions = round_up(std::max(tried.window_positions(), last + tried.reach_positions), 8);
    if (!tried.fit_stages(gpu)) return;
    tried.clocks = tried.predict(shape, gpu, samples);
    if (best.clocks == 0 || tried.clocks < best.clocks) best = tried;
  };
  for (const int64_t x : even_parts(out(2), most)) {
    for (const int64_t y : even_parts(out(1), most / x)) {
      for (const int64_t z : even_parts(out(0), most / x / y)) {
        const bool whole = x == out(2) && y == out(1) && z == out(0);
        GemmBoxesNumbers tried = *this;
        tried.box = {z, y, x};
        tried.window = {z + reach(0), y + reach(1), x + reach(2)};
        // Neighbours of the window: what lies between rows of outputs is multiplied too.
        const int64_t volume = tried.window[0] * tried.window[1] * tried.window[2];
        const int64_t used = ((z - 1) * tried.window[1] + y - 1) * tried.window[2] + x;
        if (used <= most) {
          tried.box_n = whole ? std::clamp<int64_t>((most - used) / volume + 1, 1, samples) : 1;
          consider(tried);
          if (tried.box_n > 1) {
            tried.box_n = 1;
            consider(tried);
          }
        }
      }
    }
  }
  // Boxes of eight columns, whose products are 8 x 8 positions.
  const int64_t most_rows = most / 8;
  for (int64_t y = 8; y <= most_rows && y < out(1) + 8; y += 8) {
    for (int64_t z = 1; z <= std::min(out(0), most_rows / y); ++z) {
      GemmBoxesNumbers tried = *this;
      tried.patches = true;
      tried.box = {z, y, 8};
      tried.window = {z + reach(0), y + reach(1), 8 + reach(2)};
      const bool whole = y >= out(1) && z == out(0);
      tried.box_n = whole ? std::clamp<int64_t>(most_rows / (y * z), 1, samples) : 1;
      consider(tried);
    }
  }
}

bool GemmBoxesNumbers::fit_stages(const Gpu& gpu) {
  // A stage of weights has several taps where a chunk has few channels.
  stage_taps = 1;
  while (stage_taps < group_taps &&
         (stage_taps * chunk_channels < stage_terms || group_taps % stage_taps != 0))
    ++stage_taps;
  if (weight_stage_bytes() > most_weight_stage_bytes) return false;
  const auto fits = [&] { return shared_bytes() <= gpu.shared_bytes_per_block; };
  // A window of few taps is waited for as often as weights.
  const bool alike = group_taps < 3 * stage_taps;
  x_stages = alike ? 3 : 2;
  weight_stages = 3;
  if (!fits()) return false;
  while (true) {
    GemmBoxesNumbers more = *this;
    if (alike && more.x_stages < most_x_stages) ++more.x_stages;
    if (more.weight_stages < most_weight_stages) ++more.weight_stages;
    if ((more.x_stages == x_stages && more.weight_stages == weight_stages) ||
        more.shared_bytes() > gpu.shared_bytes_per_block) {
      return true;
    }
    *this = more;
  }
}

double GemmBoxesNumbers::predict(const ThinShape& shape, const Gpu& gpu, int64_t samples) const {
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  const int64_t terms = taps * input_channels / 16;
  // A product of few columns waits for its rows from shared memory.
  const double product = std::max(number(tile_channels) / 2, 16 + number(tile_channels) / 4);
  const double multiplied = number(terms * 2 * products) * product + 40 * number(terms);
  const int64_t groups = taps / group_taps;
  const double loaded = number(chunks() * (groups * window_positions() * chunk_channels * 2 +
                                           taps * chunk_channels * tile_channels * 2));
  const double mainloop = std::max(multiplied, 500.0) *
                          std::pow(1 + std::pow(loaded / std::max(multiplied, 500.0) / 46, 4), 0.25);
  const double elements = number(2 * products * 64 * tile_channels);
  const double after = 1200 + std::max(elements / 16 * (1 + gemm_chain_instructions(shape.parts.after) / 8),
                                       elements * number(value_bytes) / 28);
  const int64_t all = tiles(Number(samples)).value() * channel_tiles();
  if (!held) return 2000 + number(divide_up(all, gpu.multiprocessors)) * (mainloop + after);
  // Blocks are those of whole units. A tile takes moments and waits for others: 9,000 to 16,000 clocks of 256
  // channels at 64 x 64, of 320, of 640 at 32 x 32 and of 64 at 24^3 (4 samples).
  const int64_t at_once = gpu.multiprocessors / unit_tiles() * unit_tiles();
  const double waited = 11000 + elements / 16 * (1 + gemm_chain_instructions(shape.parts.before) / 8);
  return 2000 + number(divide_up(all, at_once)) * (mainloop + after + waited);
}

int64_t GemmBoxesNumbers::shared_bytes() const {
  const bool by_slab = held && std::min(group_channels, tile_channels) % 8 == 0;
  const int64_t slabs = held ? tile_channels / std::min(group_channels, tile_channels) : 0;
  return StructBytes()
      .add(held ? (tile_channels + 2 * 8 * (by_slab ? slabs : tile_channels) + 2 * slabs) * 4 : 0, 8)
      .add(x_stages * round_up(x_bytes(), 1024), 1024)
      .add(weight_stages * weight_stage_bytes(), 128)
      .add(2 * (x_stages + weight_stages) * 8, 8)
      .total();
}

}  // namespace onepass::cuda
