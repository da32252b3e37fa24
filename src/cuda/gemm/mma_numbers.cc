// The numbers of the row "gemm_mma": a search over tiles, by predicted clocks.
#include "cuda/gemm/mma_numbers.h"

#include <algorithm>
#include <numeric>
#include <set>

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

GemmMmaNumbers::GemmMmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  const bool two = splits_operands(problem);
  const int64_t wide = two ? 4 : 8;
  const std::array<Tile, 7> tiles{{{4, wide, 1, 32 / wide},
                                   {4, wide, 2, 16 / wide},
                                   {4, wide, 1, 16 / wide},
                                   {2, wide, 1, 32 / wide},
                                   {1, wide, 1, 32 / wide},
                                   {4, wide, 2, 32 / wide},
                                   {4, 4, 1, 4}}};
  const std::array<Tile, 5> small_tiles{
      {{1, 4, 1, 4}, {1, 4, 1, 2}, {2, 4, 1, 4}, {2, 4, 1, 2}, {4, 4, 1, 2}}};
  std::vector<Tile> all(tiles.begin(), tiles.end());
  if (has_few_channels(shape)) all.insert(all.end(), small_tiles.begin(), small_tiles.end());
  for (const Tile& wanted : all) {
    for (const Box& tried : boxes_of(shape, wanted.positions())) {
      const GemmMmaNumbers found(problem, shape, gpu, wanted, tried);
      if (found.shared_bytes == 0) continue;
      if (shared_bytes == 0 || found.score(shape, gpu) < score(shape, gpu)) *this = found;
    }
  }
  if (shared_bytes > 0) measured_clocks = has_few_channels(shape) ? predict_few(problem, shape, gpu) : clocks;
}

int64_t GemmMmaNumbers::positions_of(const ThinAxis& axis) {
  int64_t most = 1;
  for (const ThinAxis::Class& own : axis.classes) most = std::max(most, own.positions);
  return most;
}

std::vector<GemmMmaNumbers::Box> GemmMmaNumbers::boxes_of(const ThinShape& shape, int64_t most) {
  const auto out = [&](size_t d) { return positions_of(shape.axes[d]); };
  const auto even = [](int64_t all, int64_t part) { return divide_up(all, divide_up(all, part)); };
  std::vector<Box> found;
  for (int64_t z = 1; z <= std::min(out(0), most); z = z < 8 ? z + 1 : 2 * z) {
    int64_t before = 0;
    for (int64_t count = 1; count <= out(2); ++count) {
      const int64_t x = divide_up(out(2), count);
      if (x == before || z * x > most) continue;
      before = x;
      if (x < std::min<int64_t>(out(2), 4)) break;
      found.push_back({even(out(0), z), even(out(1), most / (z * x)), x});
    }
  }
  return found;
}

GemmMmaNumbers::GemmMmaNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                               const Tile& wanted, const Box& tried)
    : tile(wanted), conv_groups(shape.conv_groups), box(tried) {
  merges_classes = shape.classes() > 1 && !shape.parts.mean && classes_meet_alike(shape);
  halves = problem.input.dtype == DType::f32 && classes(shape) == 1;
  parts = splits_operands(problem) ? 2 : 1;
  of_vector = halves ? 8 : 16 / byte_size(problem.input.dtype);
  cut_terms(shape);
  channel_tiles = divide_up(rows(shape), tile.rows());
  position_tiles = 1;
  for (size_t d = 0; d < box.size(); ++d) {
    axes[d] = WindowAxis(shape.axes[d], box[d]);
    boxes[d] = divide_up(positions_of(shape.axes[d]), box[d]);
    position_tiles *= boxes[d];
  }
  cut_stages(problem);
  // Two blocks share a multiprocessor where they fit.
  const int64_t half = gpu.shared_bytes_per_multiprocessor / 2 - 1024;
  for (const int64_t limit : {std::min(half, gpu.shared_bytes_per_block), gpu.shared_bytes_per_block}) {
    for (stages = 4; stages >= 2 && shared_bytes == 0; --stages) {
      const int64_t bytes = bytes_of_shared();
      if (bytes <= limit) shared_bytes = bytes;
    }
    if (shared_bytes > 0) break;
  }
  ++stages;  // the loop went one step too far
  // A thread needs 64 registers besides its sums, and takes more where there is room.
  const int64_t registers = (4 * tile.row_tiles * tile.column_tiles * parts + 64) * tile.threads();
  constexpr int64_t all_registers = 65536;
  if (registers > all_registers) shared_bytes = 0;
  if (shared_bytes > 0) {
    // Tiles of few channels are short: more of them hide the time outside of the mainloop.
    const int64_t most_blocks = has_few_channels(shape) ? std::max<int64_t>(4, 768 / tile.threads()) : 4;
    blocks_wanted = std::clamp<int64_t>(
        std::min(all_registers / registers, gpu.shared_bytes_per_multiprocessor / (shared_bytes + 1024)), 1,
        most_blocks);
    // Four schedulers share the registers: warps of a multiprocessor are a multiple of four.
    const int64_t even = std::max<int64_t>(1, 128 / tile.threads());
    if (blocks_wanted > even) blocks_wanted -= blocks_wanted % even;
  }
  clocks = predict(problem, shape, gpu);
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

void GemmMmaNumbers::cut_terms(const ThinShape& shape) {
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
  // The first chunk's x is staged before the mainloop starts, so chunks are small.
  vectors = joins ? of_tap : shape.in_channels <= 8 * of_vector ? 2 : 4;
  chunks = divide_up(shape.in_channels, chunk_channels());
  windows = chunks > 1 ? 2 : 1;
  padding = static_cast<double>((joins ? 2 * all_pairs : all_taps) * chunks * chunk_channels()) /
            static_cast<double>(std::max<int64_t>(1, all_taps) * shape.in_channels) *
            static_cast<double>(round_up(rows(shape), 16)) / static_cast<double>(rows(shape));
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

double GemmMmaNumbers::score(const ThinShape& shape, const Gpu& gpu) const {
  if (!has_few_channels(shape)) return clocks;
  constexpr int64_t samples = 8;
  const int64_t all = samples * conv_groups * tiles(shape);
  return clocks / static_cast<double>(tiles(shape)) *
         static_cast<double>(divide_up(all, gpu.multiprocessors));
}

int64_t GemmMmaNumbers::bytes_of_shared() const {
  const int64_t rings = windows * parts * vectors * window_pitch * 16 +
                        stages * group_joints * parts * joint_vectors() * tile.rows() * 16;
  const int64_t finish = tile.warps_n * tile.rows() * 16 + tile.threads() / 32 * 16 * 40 * 4;
  return StructBytes()
      .add(std::max(rings, finish), 16)
      .add(4 * (window_pitch + tile.positions() + std::max<int64_t>(1, most_joints) * joint_taps), 4)
      .total();
}

double GemmMmaNumbers::sectors_of_class(const Problem& problem, const ThinShape& shape) const {
  if (classes(shape) == 1) return 1;
  const auto apart = static_cast<double>(shape.axes[2].classes.size());
  constexpr double of_sector = 8;  // f32
  const bool interleaved = !shape.parts.mean && problem.output.strides[1] == 1;
  return std::clamp(of_sector / (interleaved ? static_cast<double>(shape.channels) : 1.0), 1.0, apart);
}

GemmMmaNumbers::Parts GemmMmaNumbers::parts_of(const Problem& problem, const ThinShape& shape,
                                               const Gpu& gpu) const {
  const auto bytes = static_cast<double>(byte_size(problem.input.dtype));
  const auto operand_bytes = 16 / static_cast<double>(of_vector);
  const auto taps = static_cast<double>(all_joints * joint_taps) / static_cast<double>(classes(shape));
  const auto outputs = static_cast<double>(tile.rows() * tile.positions());
  const auto products = parts == 2 ? 3.0 : 1.0;
  const double terms = taps * static_cast<double>(chunks * chunk_channels());
  Parts found;
  found.multiplied = outputs * terms * products / gpu.tensor_products() / (operand_bytes == 2 ? 2 : 1);
  // 128 bytes of shared memory a clock: each warp reads its rows and its columns.
  const double warps = static_cast<double>(tile.threads()) / 32;
  const double of_row = warps * terms * operand_bytes * static_cast<double>(parts) / 128;
  found.read_weights = of_row * static_cast<double>(16 * tile.row_tiles);
  found.read_x = of_row * static_cast<double>(8 * tile.column_tiles);
  // Traffic through L2. Rows begin and end within sectors of 32 bytes.
  const auto in_sectors = [](int64_t row, double size) { return 1 + 32 / (static_cast<double>(row) * size); };
  const bool planar = problem.input.strides[1] != 1;
  const double x_bytes = static_cast<double>(window() * shape.in_channels) * bytes *
                         (planar ? in_sectors(axes[2].entries, bytes) : 1.0);
  found.moved =
      (x_bytes + static_cast<double>(tile.rows()) * terms * operand_bytes * static_cast<double>(parts)) / 32;
  found.staged = static_cast<double>(staged_vectors * chunks) * (of_vector == 8 ? 26 : 20) / 128;
  // Rows that only fill a tile are not stored, and a mean of sums stores nothing.
  const bool few = has_few_channels(shape);
  const bool waits = shape.parts.norm && !shape.parts.mean_follows_norm();
  const auto value_bytes = waits || !few      ? 4.0
                           : shape.parts.mean ? 0.0
                                              : static_cast<double>(byte_size(problem.output.dtype));
  const double share =
      few ? static_cast<double>(rows(shape)) / static_cast<double>(channel_tiles * tile.rows()) : 1.0;
  const double stored = outputs * share * value_bytes * (planar ? in_sectors(box[2], 4) : 1.0);
  found.finished = outputs * 24 / 128 + stored / 16 * sectors_of_class(problem, shape);
  return found;
}

double GemmMmaNumbers::predict(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const {
  const Parts of = parts_of(problem, shape, gpu);
  // Four blocks of small tiles hide half of the time outside of the mainloop: s19 takes 0.89 ms (32 samples,
  // without the norm), and 1.07 with two blocks of twice the positions. Long sums leave little to hide, and
  // smaller tiles read more, so they have to be better by a twelfth.
  const bool small = parts == 1 && tile.column_tiles == 4;
  const double hidden = (small || has_few_channels(shape)) && has_many_blocks() ? 0.57 : 1.0;
  const double all = 1.25 * std::max({of.multiplied, of.read_weights + of.read_x, of.moved}) +
                     (of.staged + of.finished + 2000) * hidden;
  return static_cast<double>(tiles(shape)) * all * (small ? 1.08 : 1.0) * (blocks_wanted > 1 ? 1.0 : 1.15);
}

double GemmMmaNumbers::matrix_conflicts() const {
  int64_t waves = 0;
  for (int64_t first = 0; first < tile.positions(); first += 8) {
    std::array<std::set<int64_t>, 8> banks;
    size_t most = 1;
    for (int64_t i = first; i < first + 8; ++i) {
      const int64_t row = i / box[2], plane = row / box[1];
      const int64_t place =
          plane >= box[0]
              ? 0
              : (plane * axes[1].entries + row - plane * box[1]) * axes[2].entries + i - row * box[2];
      std::set<int64_t>& bank = banks[static_cast<size_t>(place % 8)];
      bank.insert(place);
      most = std::max(most, bank.size());
    }
    waves += static_cast<int64_t>(most);
  }
  return static_cast<double>(8 * waves) / static_cast<double>(tile.positions());
}

double GemmMmaNumbers::predict_few(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const {
  const Parts of = parts_of(problem, shape, gpu);
  // Places of one matrix in the same banks: 128 to 4 channels k5 by boxes of 4 along x, where it is two each,
  // took 3.0 ms (H200), and 1.6 were predicted without.
  const double busy =
      1.25 * std::max({of.multiplied, of.read_weights + of.read_x * matrix_conflicts(), of.moved});
  // A warp waits for its matrices and products, and for each batch of x. 256 to 6 channels k7 with one block
  // of four warps a multiprocessor took 1.85 ms, and 0.82 were predicted without.
  const double products = static_cast<double>(std::max<int64_t>(2, tile.row_tiles)) * (parts == 2 ? 3 : 1);
  const double steps =
      static_cast<double>(all_joints * chunks * joint_vectors()) / static_cast<double>(2 * classes(shape));
  const double batches =
      static_cast<double>(divide_up(staged_vectors / tile.threads(), batch_vectors) * chunks);
  const double waiting = (steps * (30 + 30 * products) + batches * 900) / static_cast<double>(blocks_wanted);
  // Rows of zeros are computed too, but for the second half of 16. softplus and tanh (8 to 48 channels k5)
  // took 1.04 ms, and 0.60 were predicted without.
  const double share = rows(shape) <= 8 ? 0.5 : 1.0;
  const double chain = gemm_chain_instructions(shape.parts.norm ? shape.parts.before : shape.parts.after);
  const double activated = static_cast<double>(tile.rows() * tile.positions()) * share * 0.7 * chain / 128;
  const double hidden = has_many_blocks() ? 0.57 : 1.0;
  const bool small = parts == 1 && tile.column_tiles == 4;
  return static_cast<double>(tiles(shape)) * (small ? 1.08 : 1.0) *
         (std::max(busy, waiting) + (of.staged + of.finished + 1500) * hidden + activated);
}

}  // namespace onepass::cuda
