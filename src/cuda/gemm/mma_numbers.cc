// The numbers of the row "gemm_mma": a search over tiles, by predicted clocks.
#include "cuda/gemm/mma_numbers.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace onepass::cuda {

WindowAxis::WindowAxis(const ThinAxis& axis, int64_t box) {
  int64_t taps = 1;
  for (const ThinAxis::Class& own : axis.classes) taps = std::max(taps, own.count);
  const int64_t spread = std::abs(axis.delta);
  const int64_t reach = (box - 1) * axis.step + (taps - 1) * spread + 1;
  // Every step-th place is a run of neighbours.
  width = divide_up(reach, axis.step);
  entries = width * std::min(axis.step, reach);
  if (taps * box < entries) {
    compact = true;
    width = box;
    unit = spread;
    entries = taps * box;
  }
}

namespace {

using Tile = GemmMmaNumbers::Tile;

// Four warps and eight. Short warp tiles in blocks of eight warps read more of shared memory, and wait less.
constexpr std::array<Tile, 26> tried_tiles{
    {{1, 4, 1, 2}, {1, 4, 1, 4}, {1, 4, 1, 8}, {1, 8, 1, 2}, {1, 8, 1, 4}, {1, 8, 1, 8}, {2, 4, 1, 2},
     {2, 4, 1, 4}, {2, 4, 1, 8}, {2, 8, 1, 2}, {2, 8, 1, 4}, {4, 4, 1, 2}, {4, 4, 1, 4}, {4, 4, 1, 8},
     {4, 8, 1, 2}, {4, 8, 1, 4}, {1, 4, 2, 4}, {2, 4, 2, 2}, {2, 4, 2, 4}, {2, 8, 2, 2}, {2, 8, 2, 4},
     {4, 4, 2, 2}, {4, 4, 2, 4}, {4, 8, 2, 2}, {4, 8, 2, 4}, {2, 4, 4, 2}}};

// Where taps are rows, a tile has all rows, and each warp too.
constexpr std::array<Tile, 24> tried_with_row_taps{
    {{1, 4, 1, 2}, {1, 4, 1, 4}, {1, 4, 1, 8}, {1, 8, 1, 2}, {1, 8, 1, 4}, {1, 8, 1, 8},
     {2, 4, 1, 2}, {2, 4, 1, 4}, {2, 4, 1, 8}, {2, 8, 1, 2}, {2, 8, 1, 4}, {2, 8, 1, 8},
     {3, 4, 1, 2}, {3, 4, 1, 4}, {3, 4, 1, 8}, {3, 8, 1, 4}, {4, 4, 1, 4}, {4, 4, 1, 8},
     {4, 8, 1, 4}, {5, 4, 1, 4}, {5, 4, 1, 8}, {6, 4, 1, 4}, {6, 4, 1, 8}, {8, 4, 1, 4}}};

// Whether a tile is of a size that may be the best for so many rows. Sums of two parts take twice the
// registers.
bool suits(const Tile& tile, int64_t rows, int64_t parts, bool has_all_rows) {
  if (parts == 2 && tile.row_tiles * tile.column_tiles > 16) return false;
  if (has_all_rows && tile.rows() < rows) return false;
  if (tile.rows() == 16 && rows > 64) return false;
  return tile.rows() < 2 * round_up(rows, 16);
}

// Elements of a run along x that one copy takes: all rows of x are whole runs. 0: single ones, or others.
int64_t run_of_planes(const Problem& problem) {
  const TensorSpec& x = problem.input;
  if (byte_size(x.dtype) != 2 || x.strides.back() != 1) return 0;
  for (int64_t run = 8; run > 1; run /= 2) {
    bool fits = x.sizes.back() % run == 0;
    for (size_t d = 0; d + 1 < x.strides.size(); ++d) fits &= x.strides[d] % run == 0;
    if (fits) return run;
  }
  return 0;
}

// Whether vectors of a position's channels may be copied as they lie.
bool has_vectors(const Problem& problem, const ThinShape& shape) {
  constexpr int64_t of_vector = 8;
  const TensorSpec& x = problem.input;
  if (byte_size(x.dtype) != 2 || x.strides[1] != 1 || shape.in_channels % of_vector != 0) return false;
  for (size_t d = 0; d < x.strides.size(); ++d) {
    if (d != 1 && x.strides[d] % of_vector != 0) return false;
  }
  return true;
}

// Whether no tap moves along x, and rows of boxes begin at whole runs.
bool stays_along_x(const ThinShape& shape, int64_t run) {
  const ThinAxis& x = shape.axes[2];
  return x.step == 1 && x.classes.size() == 1 && x.classes[0].count == 1 && x.classes[0].base % run == 0;
}

bool merges_classes_of(const ThinShape& shape) {
  return shape.classes() > 1 && !shape.parts.mean && classes_meet_alike(shape);
}

}  // namespace

GemmMmaNumbers::GemmMmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  const RowTaps none, taps(shape.axes[2]);
  GemmMmaNumbers again = *this;
  for (const bool half_empty : {false, true}) {
    // The windows of boxes that fill a tile may be too large.
    if (shared_bytes > 0) break;
    const auto search_with = [&](const ThinShape& product, const RowTaps& taken, int64_t run) {
      search(problem, product, gpu, taken, half_empty, run, again);
    };
    search_with(shape, none, 0);
    if (taps.count() > 1) search_with(taps.product(shape), taps, 0);
    const int64_t run = run_of_planes(problem);
    if (run == 0) continue;
    if (stays_along_x(shape, run)) search_with(shape, none, run);
    if (taps.count() > 1) {
      const RowTaps aligned = taps.aligned(run);
      const ThinShape product = aligned.product(shape);
      if (stays_along_x(product, run)) search_with(product, aligned, run);
    }
  }
  // Like tiles this does not follow the batch: a mean's sum has another order.
  if (again.shared_bytes > 0 && again.score < whole_score(problem, shape, gpu)) *this = again;
}

void GemmMmaNumbers::search(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                            const RowTaps& taken, bool half_empty, int64_t run, GemmMmaNumbers& again) {
  const int64_t own_parts = splits_operands(problem) ? 2 : 1;
  const bool takes_rows = taken.count() > 1;
  const bool merged = !takes_rows && merges_classes_of(shape);
  const int64_t own_rows = shape.channels * (merged ? shape.classes() : taken.count());
  const auto try_box = [&](const Tile& wanted, const Box& tried, bool spans) {
    int64_t before = 0;
    for (const int64_t most_vectors : {2, 4, 8}) {
      GemmMmaNumbers found(problem, shape, gpu, taken, wanted, tried, most_vectors, run, spans);
      if (spans && found.span == 1) return;
      if (std::exchange(before, found.vectors) == found.vectors || found.shared_bytes == 0) continue;
      const Work product = found.product_work(problem, shape, gpu);
      found.score = found.score_of(product, problem, shape, gpu);
      if (shared_bytes == 0 || found.score < score) *this = found;
      if (!has_second(shape)) continue;
      found.recomputes = true;
      found.score = found.score_of(product, problem, shape, gpu);
      if (again.shared_bytes == 0 || found.score < again.score) again = found;
    }
  };
  const auto try_tile = [&](const Tile& wanted) {
    if (!suits(wanted, own_rows, own_parts, takes_rows)) return;
    for (const Box& tried : boxes_of(shape, taken.halo, run > 0 ? 8 : 1, wanted.positions(), half_empty)) {
      try_box(wanted, tried, false);
      if (!takes_rows && run == 0) try_box(wanted, tried, true);
    }
  };
  if (takes_rows) {
    for (const Tile& wanted : tried_with_row_taps) try_tile(wanted);
  } else {
    for (const Tile& wanted : tried_tiles) try_tile(wanted);
  }
}

GemmMmaNumbers::Outputs GemmMmaNumbers::outputs() const {
  if (row_taps.count() == 1) return {tile.row_tiles, tile.column_tiles, 4};
  // One or two rows, three or four: with fewer lanes a column, most would have none of them.
  const int64_t team = rows <= 2 ? 16 : rows <= 4 ? 8 : 4;
  const int64_t all = box[0] * box[1] * own_columns() * row_taps.outputs;
  const int64_t of_warp = round_up(divide_up(all, tile.warps_n), int64_t{32});
  return {divide_up(rows, int64_t{16}), of_warp / (2 * team), team};
}

int64_t GemmMmaNumbers::positions_of(const ThinAxis& axis) {
  int64_t most = 1;
  for (const ThinAxis::Class& own : axis.classes) most = std::max(most, own.positions);
  return most;
}

std::vector<GemmMmaNumbers::Box> GemmMmaNumbers::boxes_of(const ThinShape& shape, int64_t halo,
                                                          int64_t multiple, int64_t most, bool half_empty) {
  const auto out = [&](size_t d) { return positions_of(shape.axes[d]); };
  const auto even = [](int64_t all, int64_t part) { return divide_up(all, divide_up(all, part)); };
  std::vector<Box> found;
  for (int64_t z = 1; z <= std::min(out(0), most); z = z < 8 ? z + 1 : 2 * z) {
    int64_t before = 0;
    for (int64_t count = 1; count <= out(2); ++count) {
      const int64_t columns = round_up(divide_up(out(2), count) + halo, multiple);
      const int64_t x = std::min(columns - halo, out(2));  // with outputs
      if (x == before || z * columns > most) continue;
      before = x;
      if (x < std::min<int64_t>(out(2), 4)) break;
      for (int64_t y = std::min(out(1), most / (z * columns)); y > 0; y /= 2) {
        const Box box{even(out(0), z), even(out(1), y), columns};
        const bool whole = box[0] == out(0) && box[1] == out(1) && x == out(2);
        if (half_empty || whole || 2 * box[0] * box[1] * box[2] > most) found.push_back(box);
        if (!half_empty) break;
      }
    }
  }
  return found;
}

GemmMmaNumbers::GemmMmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                               const RowTaps& taken, const Tile& wanted, const Box& tried,
                               int64_t most_vectors, int64_t run, bool spans)
    : tile(wanted), conv_groups(shape.conv_groups), row_taps(taken), box(tried), copied_run(run) {
  merges_classes = row_taps.count() == 1 && merges_classes_of(shape);
  classes = merges_classes ? 1 : shape.classes();
  rows = shape.channels * (merges_classes ? shape.classes() : 1);
  halves = problem.input.dtype == DType::f32 && classes == 1;
  parts = splits_operands(problem) ? 2 : 1;
  copies_vectors = has_vectors(problem, shape);
  of_vector = halves ? 8 : 16 / byte_size(problem.input.dtype);
  if (spans) span = widest_span(shape, of_vector);
  cut_terms(shape, most_vectors);
  const ThinShape own = spanned(shape);
  channel_tiles = divide_up(product_rows(), tile.rows());
  position_tiles = 1;
  for (size_t d = 0; d < box.size(); ++d) {
    axes[d] = WindowAxis(own.axes[d], box[d]);
    boxes[d] = divide_up(positions_of(shape.axes[d]), d == 2 ? own_columns() : box[d]);
    position_tiles *= boxes[d];
  }
  cut_stages(problem);
  // A bit for each column of a thread.
  if (2 * outputs().column_tiles <= 32) fill_multiprocessor(gpu);
}

int64_t GemmMmaNumbers::widest_span(const ThinShape& shape, int64_t of_vector) {
  int64_t taps = 1;
  for (const ThinAxis::Class& own : shape.axes[2].classes) taps = std::max(taps, own.count);
  const int64_t most = std::min(taps, of_vector / shape.in_channels);
  return most < 2 ? 1 : divide_up(taps, divide_up(taps, most));
}

ThinShape GemmMmaNumbers::spanned(ThinShape shape) const {
  ThinAxis& x = shape.axes[2];
  x.delta *= span;
  for (ThinAxis::Class& own : x.classes) own.count = divide_up(own.count, span);
  shape.in_channels *= span;
  return shape;
}

int64_t GemmMmaNumbers::registers() const {
  const int64_t sums = 4 * tile.row_tiles * tile.column_tiles * parts;
  // Loads of x live beside sums where there are several chunks. Kernels whose taps are rows spilled 40 to 108
  // bytes without room for two loads, and for the addresses of tiles of three rows by eight columns.
  const bool takes_rows = row_taps.count() > 1;
  const int64_t loads = chunks > 1 && !copies() && (batch_vectors > 2 || takes_rows) ? 16 : 0;
  const int64_t addresses = takes_rows && sums >= 96 ? 24 : 0;
  return (sums < 64 ? 48 : 56) + sums + loads + addresses;
}

void GemmMmaNumbers::fill_multiprocessor(const Gpu& gpu) {
  constexpr int64_t all_registers = 65536, most_warps = 32;
  const auto blocks_that_fit = [&] {
    const int64_t bytes = bytes_of_shared();
    return bytes > gpu.shared_bytes_per_block ? 0 : gpu.shared_bytes_per_multiprocessor / (bytes + 1024);
  };
  // More than two stages gain nothing (42 problems), so they take what more blocks leave.
  stages = 2;
  const int64_t most =
      std::min(all_registers / (registers() * tile.threads()), 32 * most_warps / tile.threads());
  blocks_wanted = std::min(most, blocks_that_fit());
  if (blocks_wanted == 0) return;
  // Four schedulers share the registers: warps of a multiprocessor are a multiple of four.
  const int64_t even = std::max<int64_t>(1, 128 / tile.threads());
  if (blocks_wanted > even) blocks_wanted -= blocks_wanted % even;
  // Copies of the next window go with the first group of a chunk, and have arrived after `stages` - 1 of
  // them.
  const int64_t groups = divide_up(std::max<int64_t>(1, least_joints), group_joints);
  const int64_t most_stages = copies() && chunks > 1 ? std::min<int64_t>(4, groups + 1) : 4;
  while (stages < most_stages) {
    ++stages;
    if (blocks_that_fit() >= blocks_wanted) continue;
    --stages;
    break;
  }
  shared_bytes = bytes_of_shared();
  // Of a single chunk all is loaded before there are sums: 3 to 10% less time than with four vectors.
  if (chunks == 1 && !copies() && all_registers / (tile.threads() * blocks_wanted) >= 128)
    batch_vectors = std::clamp<int64_t>(staged_vectors / tile.threads(), 1, 8);
}

bool GemmMmaNumbers::has_few_channels(const ThinShape& shape) {
  return std::min(shape.in_channels, shape.channels) < least_wide_channels;
}

std::vector<int64_t> GemmMmaNumbers::class_taps(const ThinShape& shape) const {
  std::vector<int64_t> all{1};
  for (const ThinAxis& axis : shape.axes) {
    std::vector<int64_t> longer;
    for (const int64_t taps : all) {
      for (const ThinAxis::Class& own : axis.classes) longer.push_back(taps * own.count);
    }
    all = std::move(longer);
  }
  if (merges_classes) all.resize(1);  // all are alike
  return all;
}

void GemmMmaNumbers::cut_terms(const ThinShape& whole, int64_t most_vectors) {
  const ThinShape shape = spanned(whole);
  const std::vector<int64_t> taps = class_taps(shape);
  int64_t all_taps = 0, all_pairs = 0;
  for (const int64_t count : taps) {
    all_taps += count;
    all_pairs += divide_up(count, 2);
  }
  // A product has two vectors of terms. One or three vectors of a tap fill products with those of the next.
  const int64_t of_tap = divide_up(shape.in_channels, of_vector);
  const bool joins = (of_tap == 1 || of_tap == 3) && 2 * all_pairs * of_tap < all_taps * (of_tap + 1);
  joint_taps = joins ? 2 : 1;
  vectors = joins ? of_tap : std::min(most_vectors, round_up(of_tap, int64_t{2}));
  chunks = divide_up(shape.in_channels, chunk_channels());
  windows = chunks > 1 ? 2 : 1;
  const std::vector<int64_t> of_problem = class_taps(whole);
  most_whole_taps = *std::max_element(of_problem.begin(), of_problem.end());
  const int64_t problem_taps = std::accumulate(of_problem.begin(), of_problem.end(), int64_t{0});
  padding = static_cast<double>((joins ? 2 * all_pairs : all_taps) * chunks * chunk_channels()) /
            static_cast<double>(std::max<int64_t>(1, problem_taps) * whole.in_channels) *
            static_cast<double>(round_up(product_rows(), 16)) / static_cast<double>(product_rows());
  all_joints = most_joints = common_joints = 0;
  least_joints = divide_up(taps[0], joint_taps);
  for (const int64_t count : taps) {
    const int64_t joints = divide_up(count, joint_taps);
    all_joints += joints;
    most_joints = std::max(most_joints, joints);
    least_joints = std::min(least_joints, joints);
    common_joints = std::gcd(common_joints, joints);
    most_taps = std::max(most_taps, count);
    odd_taps |= count % joint_taps != 0;
  }
}

void GemmMmaNumbers::cut_stages(const Problem& problem) {
  // Where neighbouring threads store neighbouring vectors of channels, those lie in different banks.
  const bool interleaved = problem.input.strides[1] == 1;
  const int64_t apart = divide_up(8, vectors);
  window_pitch = interleaved ? round_up(window() - apart, 8) + apart : window();
  // Eight channels of a run lie in different banks.
  if (copied_run > 0) window_pitch = round_up(window(), int64_t{8}) + (window() / 8 % 2 == 0 ? 8 : 0);
  constexpr int64_t most_of_group = 4;
  for (int64_t divisor = 2; divisor <= most_of_group; ++divisor) {
    if (joint_taps == 1 && common_joints % divisor == 0) group_joints = divisor;
  }
  if (group_joints == 1) {
    // The last group of a class may have fewer. A stage has at most 16 KB.
    const int64_t joint_bytes = parts * joint_vectors() * tile.rows() * 16;
    const int64_t most = std::clamp<int64_t>(16384 / joint_bytes, 1, most_of_group);
    const int64_t joints = std::max<int64_t>(1, most_joints);
    group_joints = divide_up(joints, divide_up(joints, most));
  }
  const int64_t turns = interleaved ? divide_up(window(), tile.threads() / vectors)
                                    : divide_up(window(), tile.threads()) * vectors;
  staged_vectors = turns * tile.threads();
  if (copies()) return;
  if (chunks == 1) {
    // All of x is loaded before there are sums: registers are free.
    batch_vectors = std::clamp<int64_t>(turns, 1, 4);
    group_batches = 1;
    return;
  }
  const int64_t of_group = divide_up(turns, std::max<int64_t>(1, least_joints / group_joints));
  const int64_t most_in_registers = parts == 2 || tile.column_tiles < 8 ? 2 : 4;
  batch_vectors = std::clamp<int64_t>(of_group, 1, most_in_registers);
  group_batches = std::clamp<int64_t>(divide_up(of_group, batch_vectors), 1, group_joints);
}

int64_t GemmMmaNumbers::bytes_of_shared() const {
  const int64_t rings = windows * parts * vectors * window_pitch * 16 +
                        stages * group_joints * parts * joint_vectors() * tile.rows() * 16;
  const int64_t finish = tile.warps_n * tile.rows() * 16 + tile.threads() / 32 * 16 * 40 * 4;
  const int64_t added = row_taps.count() == 1
                            ? 0
                            : 4 * (product_rows() * (tile.positions() + 8) + rows * (output_positions() + 8));
  return StructBytes()
      .add(std::max({rings, finish, added}), 16)
      .add(4 * (window_pitch + (span > 1 ? window_pitch : 1) + output_positions() +
                std::max<int64_t>(1, most_joints) * joint_taps),
           4)
      .total();
}

}  // namespace onepass::cuda
