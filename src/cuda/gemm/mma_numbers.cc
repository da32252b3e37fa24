// The numbers of the row "gemm_mma": a search over tiles, by predicted clocks.
#include "cuda/gemm/mma_numbers.h"

#include <algorithm>
#include <numeric>

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
  for (const Tile& wanted : tiles) {
    for (const Box& tried : boxes_of(shape, wanted.positions())) {
      const GemmMmaNumbers found(problem, shape, gpu, wanted, tried);
      if (found.shared_bytes > 0 && (shared_bytes == 0 || found.clocks < clocks)) *this = found;
    }
  }
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
  // The first chunk's x is staged before the mainloop starts, so chunks are small.
  vectors = shape.in_channels <= 8 * of_vector ? 2 : 4;
  chunks = divide_up(shape.in_channels, chunk_channels());
  channel_tiles = divide_up(rows(shape), tile.rows());
  position_tiles = 1;
  for (size_t d = 0; d < box.size(); ++d) {
    axes[d] = WindowAxis(shape.axes[d], box[d]);
    boxes[d] = divide_up(positions_of(shape.axes[d]), box[d]);
    position_tiles *= boxes[d];
  }
  count_taps(shape);
  // Where neighbouring threads store neighbouring vectors of channels, those lie in different banks.
  const bool interleaved = problem.input.strides[1] == 1;
  window_pitch = interleaved ? round_up(window() - 8 / vectors, 8) + 8 / vectors : window();
  group_taps = 1;
  for (int64_t divisor = 2; divisor <= 4; ++divisor) {
    if (common_taps % divisor == 0) group_taps = divisor;
  }
  const int64_t turns = interleaved ? divide_up(window(), tile.threads() / vectors)
                                    : divide_up(window(), tile.threads()) * vectors;
  staged_vectors = turns * tile.threads();
  const int64_t of_group = divide_up(turns, std::max<int64_t>(1, least_taps / group_taps));
  const int64_t most_in_registers = parts == 2 || tile.column_tiles < 8 ? 2 : 4;
  batch_vectors = std::clamp<int64_t>(of_group, 1, most_in_registers);
  group_batches = std::clamp<int64_t>(divide_up(of_group, batch_vectors), 1, group_taps);
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
    blocks_wanted = std::clamp<int64_t>(
        std::min(all_registers / registers, gpu.shared_bytes_per_multiprocessor / (shared_bytes + 1024)), 1,
        4);
  }
  clocks = predict(problem, shape, gpu);
}

void GemmMmaNumbers::count_taps(const ThinShape& shape) {
  std::array<size_t, max_spatial_rank> r{};
  const auto taps_of = [&] {
    int64_t taps = 1;
    for (size_t d = 0; d < r.size(); ++d) taps *= shape.axes[d].classes[r[d]].count;
    return taps;
  };
  all_taps = most_taps = common_taps = 0;
  least_taps = taps_of();
  for (r[0] = 0; r[0] < shape.axes[0].classes.size(); ++r[0]) {
    for (r[1] = 0; r[1] < shape.axes[1].classes.size(); ++r[1]) {
      for (r[2] = 0; r[2] < shape.axes[2].classes.size(); ++r[2]) {
        if (merges_classes && r[0] + r[1] + r[2] > 0) continue;
        all_taps += taps_of();
        most_taps = std::max(most_taps, taps_of());
        least_taps = std::min(least_taps, taps_of());
        common_taps = std::gcd(common_taps, taps_of());
      }
    }
  }
}

int64_t GemmMmaNumbers::bytes_of_shared() const {
  const int64_t rings =
      2 * parts * vectors * window_pitch * 16 + stages * group_taps * parts * vectors * tile.rows() * 16;
  const int64_t finish = tile.warps_n * tile.rows() * 16 + tile.threads() / 32 * 16 * 40 * 4;
  return StructBytes()
      .add(std::max(rings, finish), 16)
      .add(4 * (window_pitch + tile.positions() + std::max<int64_t>(1, most_taps)), 4)
      .total();
}

double GemmMmaNumbers::predict(const Problem& problem, const ThinShape& shape, const Gpu& gpu) const {
  const auto bytes = static_cast<double>(byte_size(problem.input.dtype));
  const auto operand_bytes = 16 / static_cast<double>(of_vector);
  const auto taps = static_cast<double>(all_taps) / static_cast<double>(classes(shape));
  const auto outputs = static_cast<double>(tile.rows() * tile.positions());
  const auto products = parts == 2 ? 3.0 : 1.0;
  const double terms = taps * static_cast<double>(chunks * chunk_channels());
  const double multiplied = outputs * terms * products / gpu.tensor_products() / (operand_bytes == 2 ? 2 : 1);
  // 128 bytes of shared memory a clock: each warp reads its rows and its columns.
  const double warps = static_cast<double>(tile.threads()) / 32;
  const double read = warps * static_cast<double>(16 * tile.row_tiles + 8 * tile.column_tiles) * terms *
                      operand_bytes * static_cast<double>(parts) / 128;
  // Traffic through L2. Rows begin and end within sectors of 32 bytes.
  const auto in_sectors = [](int64_t row, double size) { return 1 + 32 / (static_cast<double>(row) * size); };
  const bool planar = problem.input.strides[1] != 1;
  const double x_bytes = static_cast<double>(window() * shape.in_channels) * bytes *
                         (planar ? in_sectors(axes[2].entries, bytes) : 1.0);
  const double moved =
      (x_bytes + static_cast<double>(tile.rows()) * terms * operand_bytes * static_cast<double>(parts)) / 32;
  const double staged = static_cast<double>(staged_vectors * chunks) * (of_vector == 8 ? 26 : 20) / 128;
  const double finished = outputs * 24 / 128 + outputs * 4 / 16 * (planar ? in_sectors(box[2], 4) : 1.0);
  // Four blocks of small tiles hide half of the time outside of the mainloop: s19 takes 0.89 ms (32 samples,
  // without the norm), and 1.07 with two blocks of twice the positions. Long sums leave little to hide, and
  // smaller tiles read more, so they have to be better by a twelfth.
  const bool small = parts == 1 && tile.column_tiles == 4;
  const double hidden = small && blocks_wanted >= 4 ? 0.57 : 1.0;
  const double all = 1.25 * std::max({multiplied, read, moved}) + (staged + finished + 2000) * hidden;
  return static_cast<double>(tiles(shape)) * all * (small ? 1.08 : 1.0) * (blocks_wanted > 1 ? 1.0 : 1.15);
}

}  // namespace onepass::cuda
