// The numbers of the row "gemm_boxes": a search over boxes, by predicted clocks.
#include "cuda/gemm/boxes_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace onepass::cuda {
namespace {

constexpr int64_t most_columns = 256;
constexpr int64_t most_sums = 160;          // of a thread
constexpr int64_t most_guarded_sums = 144;  // whose columns have factors, or whose tiles have classes
constexpr int64_t most_held_sums = 128;
constexpr int64_t most_x_stages = 6, most_weight_stages = 8;
constexpr int64_t most_box = 256;    // elements of a copy's dimension
constexpr int64_t stage_terms = 64;  // of input channels, that a stage of weights has at least
constexpr int64_t most_weight_stage_bytes = 40 << 10;

// Of the class with most.
int64_t taps_of(const ThinShape& shape, size_t d) {
  int64_t most = 0;
  for (const ThinAxis::Class& own : shape.axes[d].classes) most = std::max(most, own.count);
  return most;
}

// Of a class, the mean.
double mean_taps(const ThinShape& shape, size_t d) {
  int64_t sum = 0;
  for (const ThinAxis::Class& own : shape.axes[d].classes) sum += own.count;
  return static_cast<double>(sum) / static_cast<double>(shape.axes[d].classes.size());
}

// More are spilled.
int64_t most_sums_of(const GemmBoxesNumbers& n) {
  return n.held || n.twice || n.stored == GemmBoxesNumbers::Stored::sums ? most_held_sums
         : n.guards || n.classes_apart                                   ? most_guarded_sums
                                                                         : most_sums;
}

// Whether a tensor has its channels side by side and everything else on 16 bytes of two-byte elements.
bool lies_in_vectors(const TensorSpec& spec) {
  if (spec.strides[1] != 1) return false;
  for (size_t d = 0; d < spec.sizes.size(); ++d) {
    if (d != 1 && spec.sizes[d] > 1 && (spec.strides[d] % 8 != 0 || spec.strides[d] <= 0)) return false;
  }
  return true;
}

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

bool maps_read(const Problem& problem, const ThinShape& shape) {
  return byte_size(problem.input.dtype) == 2 && shape.conv_groups == 1 && shape.in_channels % 8 == 0 &&
         lies_in_vectors(problem.input);
}

GemmBoxesNumbers::GemmBoxesNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  conv_groups = shape.conv_groups;
  guards = problem.input.dtype == DType::f32;
  classes_apart = !classes_meet_alike(shape);
  classes = classes_apart ? shape.classes() : 1;
  rows = shape.channels * shape.classes() / classes;
  if (!maps_read(problem, shape)) copied_channels = round_up(shape.in_channels, 8);
  input_channels = round_up(shape.in_channels, 16);
  chunk_channels = input_channels > 32 ? 64 : input_channels;
  taps = taps_of(shape, 0) * taps_of(shape, 1) * taps_of(shape, 2);
  pieces = WeightPieces(taps, problem.parameters[0].dtype);
  const auto bytes_of = [&](const TensorSpec& spec) { return static_cast<double>(spec.byte_span()); };
  const TailParts& parts = shape.parts;
  if (parts.norm == nullptr && !parts.mean) {
    set_stored(problem.output, shape);
    value_bytes = byte_size(problem.output.dtype);
    const GemmBoxesNumbers best = cut(shape, gpu, CutFor::instead_of(shape.samples));
    if (best.clocks > 0) *this = best;
    return;
  }
  // Tiles decide the order in which moments are merged. They are chosen for a fixed number of samples, so
  // that results do not depend on the batch; so is what becomes of values.
  constexpr int64_t some = 8;
  const Problem tail = *tail_after_convolution(problem);
  const double eight = 8 / static_cast<double>(std::max<int64_t>(1, shape.samples));
  const double input = copies() ? static_cast<double>(copied_channels * conv_groups * some) * 2 *
                                      static_cast<double>(spatial_elements(problem.input.sizes))
                                : bytes_of(problem.input) * eight;
  const double output = bytes_of(problem.output) * eight;
  const double values = bytes_of(tail.input) * eight;
  const auto seconds = [&](const GemmBoxesNumbers& own, double moved) {
    return std::max(own.clocks / (gpu.clock() * 0.86), moved / gpu.bytes_per_second);
  };
  GemmBoxesNumbers stored_for_tail = *this;
  stored_for_tail.set_stored(tail.input, shape);
  const GemmBoxesNumbers left = stored_for_tail.cut(shape, gpu, some);
  double least =
      left.clocks > 0 ? seconds(left, input + values) + values_factor(tail) * tail_seconds_of_eight(tail) : 0;
  GemmBoxesNumbers best = left;
  const auto consider = [&](const GemmBoxesNumbers& tried, double moved, double launches) {
    const GemmBoxesNumbers own = tried.cut(shape, gpu, some);
    const double taken = own.clocks > 0 ? seconds(own, moved) + launches : 0;
    if (own.clocks == 0 || (least > 0 && taken >= least)) return;
    best = own;
    least = taken;
  };
  constexpr double launch = 3e-6;
  const bool can_sum = parts.mean && !reads_tensors(parts.after);
  GemmBoxesNumbers whole = *this;
  whole.value_bytes = can_sum ? 0 : byte_size(problem.output.dtype);
  if (can_sum) {
    whole.stored = Stored::sums;
  } else if (!parts.mean) {
    whole.set_stored(problem.output, shape);
  }
  if (parts.norm == nullptr) {
    whole.put_classes_apart(shape);
    if (can_sum) consider(whole, input, launch);
  } else if (!reads_tensors(parts.before)) {
    whole.group_channels = shape.channels / shape.groups;
    if (!parts.mean && shape.classes() == 1 && conv_groups == 1) {
      whole.held = true;
      consider(whole, input + output, 0);
      whole.held = false;
    }
    whole.twice = true;
    whole.put_classes_apart(shape);
    if (can_sum || !parts.mean) consider(whole, 2 * input + output, launch * (can_sum ? 3 : 2));
  }
  if (best.clocks == 0) return;
  // A tail merges moments by itself, so that tiles before it may follow the batch.
  *this = best.has_tail(shape) ? stored_for_tail.cut(shape, gpu, CutFor::instead_of(shape.samples)) : best;
  clocks = predict(shape, gpu, CutFor::instead_of(shape.samples));
}

void GemmBoxesNumbers::set_stored(const TensorSpec& to, const ThinShape& shape) {
  stored = shape.channels % 8 == 0 && lies_in_vectors(to) ? Stored::vectors
           : to.strides[1] == 1 && to.sizes[1] > 1        ? Stored::channels
                                                          : Stored::positions;
}

void GemmBoxesNumbers::put_classes_apart(const ThinShape& shape) {
  if (shape.classes() == 1) return;
  classes_apart = true;
  classes = shape.classes();
  rows = shape.channels;
}

GemmBoxesNumbers GemmBoxesNumbers::cut(const ThinShape& shape, const Gpu& gpu, int64_t samples) const {
  GemmBoxesNumbers best = *this;
  for (int64_t own = 0; own <= std::ssize(shape.axes); ++own) {
    // Positions of a window with a stride are as far apart as those of the output.
    const bool has_stride = std::any_of(shape.axes.begin() + own, shape.axes.end(), [](const ThinAxis& axis) {
      return axis.step > 1 && axis.classes[0].count > 1;
    });
    // A dimension of one tap is no other window.
    if (has_stride || (own > 0 && taps_of(shape, static_cast<size_t>(own - 1)) == 1)) continue;
    GemmBoxesNumbers tried = *this;
    tried.split = own;
    for (size_t d = static_cast<size_t>(own); d < shape.axes.size(); ++d)
      tried.group_taps *= taps_of(shape, d);
    for (tried.products = 1; tried.products <= 2; ++tried.products) {
      for (int64_t count = 1; count <= divide_up(rows, 16); ++count) {
        tried.tile_channels = round_up(divide_up(rows, count), 16);
        if (tried.tile_channels > most_columns) continue;
        if (tried.products * tried.tile_channels / 2 > most_sums_of(*this)) continue;
        if (count > 1 && tried.tile_channels < 64) break;
        // Pieces of weights belong to one group.
        if (conv_groups > 1 && tried.tile_channels % WeightPieces::rows != 0) continue;
        if ((held || twice) && tried.tile_channels % group_channels != 0 &&
            group_channels % tried.tile_channels != 0)
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
    const bool of_one_sample = tried.held || tried.twice || tried.stored == Stored::sums;
    if (of_one_sample && tried.box_n > 1) return;
    if (tried.held && tried.unit_tiles() > gpu.multiprocessors) return;
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
          tried.box_n =
              whole ? std::clamp<int64_t>((most - used) / volume + 1, 1, std::max<int64_t>(1, samples)) : 1;
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
      tried.box_n = whole ? std::clamp<int64_t>(most_rows / (y * z), 1, std::max<int64_t>(1, samples)) : 1;
      consider(tried);
    }
  }
}

bool GemmBoxesNumbers::fit_stages(const Gpu& gpu) {
  // A stage of weights has several taps where a chunk has few channels.
  stage_taps = 1;
  while (stage_taps < group_taps &&
         (stage_taps * chunk_channels < stage_terms || (!classes_apart && group_taps % stage_taps != 0)))
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

double GemmBoxesNumbers::class_taps(const ThinShape& shape) const {
  return mean_taps(shape, 0) * mean_taps(shape, 1) * mean_taps(shape, 2);
}

double GemmBoxesNumbers::class_groups(const ThinShape& shape) const {
  double count = 1;
  for (size_t d = 0; std::cmp_less(d, split); ++d) count *= mean_taps(shape, d);
  return count;
}

double GemmBoxesNumbers::predict(const ThinShape& shape, const Gpu& gpu, int64_t samples) const {
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  const double terms = class_taps(shape) * number(input_channels / 16);
  // A product of few columns waits for its rows from shared memory.
  const double product = std::max(number(tile_channels) / 2, 16 + number(tile_channels) / 4);
  const double multiplied = terms * number(2 * products) * product + 40 * terms;
  const double loaded =
      number(chunks()) * (class_groups(shape) * number(window_positions() * chunk_channels * 2) +
                          class_taps(shape) * number(chunk_channels * tile_channels * 2));
  const double mainloop = std::max(multiplied, 500.0) *
                          std::pow(1 + std::pow(loaded / std::max(multiplied, 500.0) / 46, 4), 0.25);
  const double elements = number(2 * products * 64 * tile_channels);
  // Values that pass through shared memory leave one by one: a store of a warp takes as long for 16 bits as
  // for 32, and parts of sectors more (gemm_packed stores 10 bytes a clock so). Contiguous outputs take
  // longer: conv2d(192,1280,k=1) @ 32x192x128x72 bf16 2102 us, conv1d(64,1280,k=5) @ 256x64x208 tf32 415.
  const double one_by_one = stored == Stored::channels ? 12 : 4.5;
  const double leaving = stored == Stored::vectors ? number(value_bytes) / 28
                         : stored == Stored::sums  ? 0
                                                   : number(std::max<int64_t>(value_bytes, 3)) / one_by_one;
  const double after = 1200 + std::max(elements / 16 * (1 + gemm_chain_instructions(shape.parts.after) / 8),
                                       elements * leaving);
  const int64_t all = tiles(Number(samples)).value() * channel_tiles();
  // Moments take two passes over values, the chain before the norm one.
  const double before = elements / 16 * (1 + gemm_chain_instructions(shape.parts.before) / 8);
  if (twice)
    return 4000 + number(divide_up(all, gpu.multiprocessors)) * (2 * (mainloop + before) + 3000 + after);
  if (!held) return 2000 + number(divide_up(all, gpu.multiprocessors)) * (mainloop + after);
  // Blocks are those of whole units. A tile takes moments and waits for others: 9,000 to 16,000 clocks of 256
  // channels at 64 x 64, of 320, of 640 at 32 x 32 and of 64 at 24^3 (4 samples).
  const int64_t at_once = gpu.multiprocessors / unit_tiles() * unit_tiles();
  const double waited = 11000 + before;
  return 2000 + number(divide_up(all, at_once)) * (mainloop + after + waited);
}

int64_t GemmBoxesNumbers::stored_bytes() const {
  const int64_t places = 128 * products;
  return stored == Stored::vectors    ? 0
         : stored == Stored::sums     ? 8 * tile_channels * 4
         : stored == Stored::channels ? 8 * 8 * 40 * 4
                                      : 2 * 8 * (places + 4) * 4 + places * 8;
}

int64_t GemmBoxesNumbers::step_bytes() const {
  const int64_t positions = copied_elements / chunk_channels;
  return round_up(std::max(pieces.bytes, copies() ? positions * (chunk_channels / 2 + 1) * 4 : 0), 128);
}

int64_t GemmBoxesNumbers::shared_bytes() const {
  const bool norms = held || twice;
  const bool by_slab = norms && std::min(group_channels, tile_channels) % 8 == 0;
  const int64_t slabs = norms ? tile_channels / std::min(group_channels, tile_channels) : 0;
  return StructBytes()
      .add(norms ? (tile_channels + 2 * 8 * (by_slab ? slabs : tile_channels) + 2 * slabs) * 4 : 0, 8)
      .add(stored_bytes(), stored_bytes() > 0 ? 16 : 1)
      .add(x_stages * round_up(x_bytes(), 1024), 1024)
      .add(weight_stages * weight_stage_bytes(), 128)
      .add(2 * (x_stages + weight_stages) * 8, 8)
      .total();
}

}  // namespace onepass::cuda
