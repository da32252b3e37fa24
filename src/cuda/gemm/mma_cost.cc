// What the row "gemm_mma" costs, fitted to 942 measurements of 44 problems on an H200 (docs/lab/gemm_mma.md).
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda/gemm/mma_numbers.h"

namespace onepass::cuda {
namespace {

double number(int64_t value) { return static_cast<double>(value); }

// Clocks of a scheduler for what a warp issues once.
namespace issue {
constexpr double product = 0.45, matrices = 0.43, joint = 2.2, group = 4.9, copy = 1.5;
constexpr double vector = 2.2, word_of_plane = 0.82, word_of_channels = 0.95, whole_vector = 17.7;
constexpr double place = 6.5;  // of a window or a tile
constexpr double copied = 3;   // of x; not measured: a dozen instructions
constexpr double value = 1.26, instruction = 0.115, moment = 2.2, row = 12.3, store = 1.43;
// `moment` was fitted as 4.4 to a kernel with twice the instructions for each value. Stores of vectors have
// half the instructions of single ones: for each value that is staged, and for each store.
constexpr double staged_value = 0.14, vector_store = 2.0;
// Not fitted: the chain after the norm in f32, as where values are read (in 16 bits it has half the
// instructions, as `instruction` says), two instructions of the norm and two of a sum, by four schedulers.
constexpr double second_chain = 0.7 / 4, norm = 0.5, sum = 0.5;
}  // namespace issue

// Shared memory and the first-level cache, 128 bytes a clock, and sectors of the second level.
namespace access {
constexpr double weights = 0.49, x = 1.0, staged = 0.9, load = 0.32, store = 3.06;
constexpr double weight_sector = 0.6, loaded_sector = 0.148, stored_sector = 1.22;
}  // namespace access

// Clocks that a block waits.
namespace block_wait {
constexpr double always = 990, place = 78, loads = 760, later_loads = 680, word = 6.6, group = 63;
constexpr double window = 250;  // that is copied while the one before is multiplied; not measured
constexpr double moments = 2400, slab = 690, merge = 710;
}  // namespace block_wait

// Of taps that are rows; not measured. Clocks of a scheduler, as those of `issue`; a block's waits as two of
// its `group`s, and 25 clocks for a load of shared memory and the sums after it.
namespace row_tap_work {
constexpr double issue = 0.35, barriers = 190, turn = 60;
}  // namespace row_tap_work

// Clocks that a warp waits.
namespace warp_wait {
constexpr double step = 68, product = 11.6, stores = 295, instruction = 0.91, value = 3.7, row = 430;
}  // namespace warp_wait

// Parts that work beside each other disturb each other.
constexpr double disturbance = 2.38;
// What other blocks, and other warps, do meanwhile.
constexpr double block_overlap = 0.57, warp_overlap = 0.42;
constexpr double memory_factor = 0.93, memory_disturbance = 1.6;
constexpr double launching = 1.1e-5, launching_again = 5e-6;

double output_bytes(const Problem& problem, const TailParts& parts) {
  return parts.mean ? 0 : number(byte_size(problem.output.dtype));
}

const std::vector<TailParts::Stage>& chain_of(const TailParts& parts) {
  return parts.norm != nullptr ? parts.before : parts.after;
}

// Elements that one load takes where channels lie side by side and are no whole vectors (`run` of
// gemm/mma/source.cuh).
int64_t elements_of_load(const Problem& problem, const ThinShape& shape) {
  int64_t run = 16 / byte_size(problem.input.dtype);
  const auto divides = [&] {
    for (size_t d = 0; d < problem.input.strides.size(); ++d) {
      if (d != 1 && problem.input.strides[d] % run != 0) return false;
    }
    return shape.in_channels % run == 0;
  };
  while (run > 1 && !divides()) run /= 2;
  return run;
}

}  // namespace

double GemmMmaNumbers::matrix_conflicts() const {
  if (copied_run > 0) return 1;
  int64_t waves = 0;
  for (int64_t first = 0; first < tile.positions(); first += 8) {
    // Positions of a matrix read different places, but those that only fill the tile.
    std::array<int64_t, 8> in_bank{};
    int64_t most = 1;
    bool fills = false;
    for (int64_t i = first; i < first + 8; ++i) {
      const int64_t row = i / box[2], plane = row / box[1];
      int64_t place = 0;
      if (plane < box[0]) {
        place = (plane * axes[1].entries + row - plane * box[1]) * axes[2].entries + i - row * box[2];
      } else if (std::exchange(fills, true)) {
        continue;
      }
      most = std::max(most, ++in_bank[static_cast<size_t>(place % 8)]);
    }
    waves += most;
  }
  return number(8 * waves) / number(tile.positions());
}

void GemmMmaNumbers::add_mainloop(Work& found, const Gpu& gpu) const {
  const double warps = number(tile.threads()) / 32;
  const double products = parts == 2 ? 3 : 1;
  const double joints = number(all_joints) / number(classes) * number(chunks);
  const double steps = joints * number(joint_vectors()) / 2;
  const double groups = std::ceil(joints / number(chunks * group_joints)) * number(chunks);
  const double row_products = steps * number(tile.row_tiles) * products;
  const double copies = joints * number(parts * joint_vectors() * tile.rows()) / 32;
  const double matrices = steps * number(parts * (tile.column_tiles / 2 + tile.row_tiles));
  found.issued += warps * (issue::product * row_products * number(tile.column_tiles) +
                           issue::matrices * matrices + issue::joint * joints + issue::group * groups) +
                  issue::copy * copies;
  found.multiplied += row_products * number(tile.column_tiles) * warps * 1024 / gpu.tensor_products();
  const double of_row = warps * steps * number(parts) / 4;  // two vectors of a row
  found.shared += access::weights * of_row * number(16 * tile.row_tiles) +
                  access::x * of_row * number(8 * tile.column_tiles) * matrix_conflicts() +
                  access::staged * copies * 4;
  found.moved += access::weight_sector * copies * 16;
  found.block_waits += block_wait::group * groups;
  found.warp_waits += warp_wait::step * steps + warp_wait::product * row_products;
}

void GemmMmaNumbers::add_source(Work& found, const Problem& problem, const ThinShape& shape) const {
  const double bytes = number(byte_size(problem.input.dtype));
  const bool interleaved = problem.input.strides[1] == 1;
  const bool whole = interleaved && shape.in_channels % of_vector == 0;
  const double staged = number(staged_vectors * chunks) / 32;
  const double words = staged * number(of_vector);
  if (copies()) {
    const double bytes_of_copy = copied_run > 0 ? 2 * number(copied_run) : 16;
    const double all = number(chunks * vectors * window()) * 16;  // bytes
    const double copied = all / bytes_of_copy / 32;               // by a warp at a time
    // Runs of eight channels share what finds them.
    found.issued += (copied_run > 0 ? issue::copied / 4 : issue::copied) * copied +
                    issue::place * number(window() + tile.positions()) / 32;
    // Written once, and passed on in sectors; pieces of them where runs are short.
    found.shared += all / 128 * (16 / bytes_of_copy + 1) / 2;
    found.moved += access::loaded_sector * all / 32;
    found.block_waits += block_wait::loads + block_wait::window * number(chunks - 1) +
                         block_wait::place * number(divide_up(window(), tile.threads()));
    return;
  }
  const double run = interleaved && !whole && span == 1 ? number(elements_of_load(problem, shape)) : 1;
  const double per_word = whole         ? issue::whole_vector / number(of_vector)
                          : interleaved ? issue::word_of_channels * (1 + 1 / run) / 2
                                        : issue::word_of_plane;
  found.issued +=
      issue::vector * staged + per_word * words + issue::place * number(window() + tile.positions()) / 32;
  // Lines of 128 bytes, and sectors, that 32 loads of one instruction meet.
  double lines = bytes / 4, sectors = bytes;
  if (interleaved && !whole) {
    const double apart = number(problem.input.strides.back()) * bytes * number(shape.axes[2].step);
    lines = std::clamp(32 / number(vectors) * apart / 128, 1.0, 32.0);
    sectors = std::clamp(32 / number(vectors) * apart / 32, 1.0, 32.0);
  } else if (!interleaved) {
    const double apart = bytes * number(shape.axes[2].step);
    const double breaks = 32 / std::max(1.0, number(axes[2].entries / shape.axes[2].step));
    lines = std::min(32.0, std::max(1.0, apart / 4) + breaks / 2);
    sectors = std::min(32.0, apart + 1 + breaks);
  }
  found.shared += access::load * words / run * lines + access::staged * staged * number(4 * parts);
  found.moved += access::loaded_sector * words / run * sectors;
  const double turns = number(staged_vectors) / number(tile.threads());
  const double rounds = std::ceil(turns / number(batch_vectors));
  found.block_waits += block_wait::loads * rounds + block_wait::later_loads * rounds * number(chunks - 1) +
                       block_wait::word * turns * (whole ? 1 : number(of_vector) / run) +
                       block_wait::place * number(divide_up(window(), tile.threads()));
}

void GemmMmaNumbers::add_row_taps(Work& found) const {
  const double warps = number(tile.threads()) / 32;
  const double taps = number(row_taps.count());
  const double stored = number(product_rows() * tile.positions()) / 64;  // of two values a lane
  const double adding = number(rows * box[0] * box[1] * own_columns()) / 32;
  const double of_column = number(row_taps.outputs);
  const Outputs own = outputs();
  const double collected =
      warps * number(own.row_tiles * own.column_tiles) * 2 * (rows * own.team <= 32 ? 1 : 2);
  found.issued +=
      row_tap_work::issue * (2 * stored + adding * (2 * taps + 3 * of_column + 20) + 2 * collected);
  found.shared += 2 * stored + adding * (taps + of_column * std::min(of_column, 8.0)) + collected;
  // Of a turn of the block: loads, sums one after another, stores.
  const double turns = std::ceil(32 * adding / number(tile.threads()));
  found.block_waits += row_tap_work::barriers + row_tap_work::turn * turns;
}

void GemmMmaNumbers::add_epilogue(Work& found, const Problem& problem, const ThinShape& shape,
                                  const Launched& launched) const {
  const int64_t all_rows = rows;
  const Outputs own = outputs();
  const double warps = number(tile.threads()) / 32;
  const double row_halves = all_rows <= 32 / own.team ? 1 : 2;         // of 16 rows
  const double values = number(own.row_tiles * own.column_tiles) * 4;  // of a thread
  const double computed = values * row_halves / 2;
  const double chain = gemm_chain_instructions(chain_of(shape.parts));
  const double pieces = number(own.row_tiles * own.column_tiles * own.team) / 16;  // 16 rows, 32 columns
  const double own_rows = number(own.row_tiles) * row_halves;
  found.issued += warps * computed * (issue::value + issue::instruction * chain);
  found.warp_waits +=
      warp_wait::stores * pieces + warp_wait::instruction * computed * chain + warp_wait::value * values;
  found.block_waits += block_wait::always;
  if (launched.stored_bytes > 0) add_stores(found, problem, shape, launched);
  if (launched.norms) {
    const double second = gemm_chain_instructions(shape.parts.after);
    const double each = problem.output.dtype == DType::f32 ? issue::second_chain : issue::instruction;
    found.issued += warps * (computed * (issue::norm + each * second) + issue::row * own_rows);
    found.warp_waits += warp_wait::instruction * computed * second + warp_wait::row * own_rows;
    if (launched.row_sums) {
      found.issued += warps * (issue::sum * computed + issue::row * own_rows);
      found.block_waits += block_wait::moments / 2;
    }
  }
  if (!launched.moments) return;
  const double runs = runs_of_moments(shape);
  found.issued += warps * (issue::moment * computed + issue::row * runs);
  found.warp_waits += warp_wait::row * runs;
  found.block_waits += block_wait::moments * (1 + 3 * runs / own_rows) / 4;
  if (shape.parts.norm == nullptr) return;
  const int64_t slab_rows = all_rows / shape.groups;
  const int64_t slabs =
      std::clamp<int64_t>(divide_up(std::min(tile.rows(), all_rows), slab_rows), 1, shape.groups);
  found.block_waits += block_wait::slab * number(divide_up(slabs, tile.threads() / 32));
}

double GemmMmaNumbers::runs_of_moments(const ThinShape& shape) const {
  const Outputs own = outputs();
  const int64_t row_halves = own.row_tiles * (rows * own.team <= 32 ? 1 : 2);
  if (shape.parts.norm == nullptr || shape.parts.mean_follows_norm()) return number(row_halves);
  const int64_t common = std::gcd(rows / shape.groups, tile.rows());
  if (common % 16 != 0) return number(row_halves);
  return number(row_halves / (2 * std::gcd(common / 16, own.row_tiles)));
}

bool GemmMmaNumbers::stores_vectors(const Problem& problem, double bytes) const {
  const int64_t width = 16 / static_cast<int64_t>(bytes);
  const Shape& strides = problem.output.strides;
  return !merges_classes && rows % width == 0 &&
         std::all_of(strides.begin(), strides.end(),
                     [&](int64_t stride) { return stride == 1 || stride % width == 0; });
}

void GemmMmaNumbers::add_stores(Work& found, const Problem& problem, const ThinShape& shape,
                                const Launched& launched) const {
  const double bytes = launched.stored_bytes;
  const int64_t all_rows = rows;
  const Outputs own = outputs();
  const double warps = number(tile.threads()) / 32;
  const double pieces = number(own.row_tiles * own.column_tiles * own.team) / 16;  // 16 rows, 32 columns
  const double row_outputs = number(own_columns() * row_taps.outputs);             // of the box
  const bool interleaved = !shape.parts.mean && problem.output.strides[1] == 1;
  const int64_t lanes = all_rows <= 4 ? 4 : all_rows <= 8 ? 8 : 16;  // of neighbouring rows
  const double stores = warps * pieces * number(interleaved ? lanes : std::min<int64_t>(16, all_rows));
  const double classes_apart = number(std::ssize(shape.axes[2].classes));
  double sectors = 0;
  if (!interleaved) {
    sectors = bytes * classes_apart + 1 + 32 / row_outputs;
  } else if (merges_classes) {
    sectors = 16;  // rows of a channel are classes, which lie apart
  } else if (classes_apart == 1 && all_rows <= 16) {
    sectors = bytes;
  } else {
    const bool cut = shape.channels * static_cast<int64_t>(bytes) % 32 != 0;
    sectors = 32 / number(lanes) * (number(std::min<int64_t>(16, all_rows)) * bytes / 32 + (cut ? 0.5 : 0));
  }
  const double lines =
      interleaved ? std::max(1.0, sectors / 4) : std::max(1.0, bytes * classes_apart / 4) + 16 / row_outputs;
  found.issued +=
      interleaved && stores_vectors(problem, bytes)
          ? warps * pieces * (issue::staged_value * 16 + issue::vector_store * number(lanes) * bytes / 16)
          : issue::store * stores;
  found.shared += access::store * stores * lines;
  found.moved += access::stored_sector * stores * sectors;
}

double GemmMmaNumbers::merging_clocks(const ThinShape& shape, const Launched& launched) const {
  const int64_t warps = tile.threads() / 32;
  const int64_t tiles_of_slab = tiles() / channel_tiles;
  int64_t turns = 0;  // of a warp, of four loads at a time
  if (launched.moments && shape.parts.norm != nullptr) {
    const int64_t slab_rows = rows / shape.groups;
    const int64_t merged = (divide_up(slab_rows, tile.rows()) + (spans(shape) > 1 ? 1 : 0)) * tiles_of_slab;
    const bool by_block = shape.groups < warps && spans(shape) * tiles_of_slab > 128;
    turns += by_block ? shape.groups * divide_up(merged, 128 * warps)
                      : divide_up(shape.groups, warps) * divide_up(merged, 128);
  }
  if (launched.row_sums) {
    // By the last block of a sample, or of a channel tile.
    const int64_t channels = launched.norms ? std::min(tile.rows(), shape.channels) : shape.channels;
    turns += tiles_of_slab >= 32 ? divide_up(channels, warps) * divide_up(tiles_of_slab, 128)
                                 : divide_up(channels, 32 * warps) * divide_up(tiles_of_slab, 4);
  }
  return block_wait::merge * number(turns);
}

GemmMmaNumbers::Work GemmMmaNumbers::product_work(const Problem& problem, const ThinShape& shape,
                                                  const Gpu& gpu) const {
  Work found;
  add_mainloop(found, gpu);
  add_source(found, problem, shape);
  if (row_taps.count() > 1) add_row_taps(found);
  return found;
}

std::vector<GemmMmaNumbers::Launched> GemmMmaNumbers::launches(const Work& product, const Problem& problem,
                                                               const ThinShape& shape) const {
  const double output = output_bytes(problem, shape.parts);
  const bool means = shape.parts.mean;
  std::vector<Launched> found;
  if (!has_second(shape)) {
    const bool sums = shape.parts.norm != nullptr || means;
    found = {{.moments = sums, .row_sums = means, .stored_bytes = output}};
  } else if (!recomputes) {
    found = {{.moments = true, .stored_bytes = 4}};
  } else {
    found = {{.moments = true}, {.norms = true, .row_sums = means, .stored_bytes = output}};
  }
  for (Launched& launched : found) {
    launched.work = product;
    add_epilogue(launched.work, problem, shape, launched);
    launched.work.set_busy();
  }
  return found;
}

void GemmMmaNumbers::Work::set_busy() {
  const auto power = [](double value) { return std::pow(value, disturbance); };
  busy = std::pow(power(issued) + power(shared) + power(moved) + power(multiplied), 1 / disturbance);
}

double GemmMmaNumbers::Work::clocks(double blocks, double warps) const {
  const double other_blocks = block_overlap * (blocks - 1) * busy;
  const double other_warps = warp_overlap * std::max(0.0, blocks - 4 / warps) * busy;
  return blocks * busy + block_waits * block_waits / (block_waits + other_blocks) +
         warp_waits * warp_waits / (warp_waits + other_warps);
}

double GemmMmaNumbers::seconds(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                               int64_t samples) const {
  const ThinShape own = row_taps.product(shape);
  return seconds(launches(product_work(problem, own, gpu), problem, own), problem, own, gpu, samples);
}

namespace {

// Few samples, and more. Small samples want short tiles in the first case, and tiles that read little in
// the second.
template <class Seconds>
double typical(const ThinShape& shape, Seconds&& seconds) {
  double product = 1;
  for (const int64_t samples : {8, 64, 512}) product *= seconds(samples * shape.conv_groups);
  return std::cbrt(product);
}

}  // namespace

double GemmMmaNumbers::score_of(const Work& product, const Problem& problem, const ThinShape& shape,
                                const Gpu& gpu) const {
  const std::vector<Launched> all = launches(product, problem, shape);
  return typical(shape, [&](int64_t samples) { return seconds(all, problem, shape, gpu, samples); });
}

double GemmMmaNumbers::whole_score(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const {
  const ThinShape own = row_taps.product(shape);
  const std::vector<Launched> all = launches(product_work(problem, own, gpu), problem, own);
  return typical(shape, [&](int64_t samples) {
    return seconds(all, problem, own, gpu, samples) + finish_seconds(problem, own, gpu, samples);
  });
}

double GemmMmaNumbers::finish_seconds(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                                      int64_t samples) const {
  if (!has_second(shape) || recomputes) return 0;
  const int64_t all_rows = samples * shape.channels;
  const double elements = number(all_rows * shape.spatial);
  const double bytes = elements * (4 + output_bytes(problem, shape.parts));
  // A mean after a chain is a block for each channel of a sample: 0.1 us for 256 positions by 256 threads
  // with a load each. By 1024 threads with eight it has not been measured: a microsecond for 8192 and the
  // chain.
  const double waves = number(divide_up(all_rows, int64_t{8} * gpu.multiprocessors));
  const double waves_of_many = number(divide_up(all_rows, gpu.multiprocessors));
  const double many = number(divide_up(shape.spatial, 8192));
  const double chain = gemm_chain_instructions(shape.parts.after);
  double averaged = 0;
  if (shape.parts.mean) {
    averaged = shape.spatial < 16384 ? 1e-7 * waves * number(divide_up(shape.spatial, 256))
                                     : waves_of_many * many * (1e-6 + 8192 * chain / (128 * gpu.clock()));
  }
  // Memory's rate, with 70% of which tensors of few channels are moved.
  const bool few = has_few_channels(shape);
  const double rate = gpu.bytes_per_second * (few ? 0.7 : 1.0);
  // Elements pass through the second chain at 128 instructions a clock.
  const double activated =
      few ? elements * issue::second_chain * chain / (32 * gpu.clock() * gpu.multiprocessors) : 0;
  constexpr double launched = 5e-6;
  return launched + std::max({bytes / rate, averaged, activated});
}

double GemmMmaNumbers::seconds(const std::vector<Launched>& launches, const Problem& problem,
                               const ThinShape& shape, const Gpu& gpu, int64_t samples) const {
  double all = 0;
  for (const Launched& launched : launches) all += launch_seconds(launched, problem, shape, gpu, samples);
  return all;
}

double GemmMmaNumbers::launch_seconds(const Launched& launched, const Problem& problem,
                                      const ThinShape& shape, const Gpu& gpu, int64_t samples) const {
  const Work& of_tile = launched.work;
  const double warps = number(tile.threads()) / 32;
  // Tiles of a multiprocessor, some at a time. Where they are few, the last ones do not fill it.
  const double tiles_each = number(samples * tiles()) / gpu.multiprocessors;
  const double blocks = std::min(number(blocks_wanted), std::max(1.0, tiles_each));
  const double turns = std::max(1.0, tiles_each / blocks), whole = std::floor(tiles_each / blocks);
  const double left = std::ceil(tiles_each - whole * blocks);
  double clocks = whole * of_tile.clocks(blocks, warps);
  if (whole >= 4) {
    clocks = turns * of_tile.clocks(blocks, warps) + of_tile.clocks(1, warps) / 2;
  } else if (left > 0) {
    clocks += of_tile.clocks(left, warps);
  }
  double inputs = number(shape.in_channels);
  for (const ThinAxis& axis : shape.axes) inputs *= number(axis.in);
  const double moved = number(samples) * (inputs * number(byte_size(problem.input.dtype)) +
                                          launched.stored_bytes * number(shape.channels * shape.spatial));
  const double computing = clocks / (0.885 * gpu.clock());  // of a GPU whose tensor cores are at work
  const double moving = memory_factor * moved / gpu.bytes_per_second;
  return std::pow(std::pow(computing, memory_disturbance) + std::pow(moving, memory_disturbance),
                  1 / memory_disturbance) +
         (launched.norms ? launching_again : launching) +
         merging_clocks(shape, launched) / (0.885 * gpu.clock());
}

}  // namespace onepass::cuda
