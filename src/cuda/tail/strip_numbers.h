// How rows cut a tensor with channels after space into strips that a block or cluster holds (strip.cuh).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>

#include "cuda/source.h"
#include "cuda/tail/tail.h"

namespace onepass::cuda {

// A strip's numbers are those of the best predicted times for 1 and for 64 samples together, whatever the
// batch is: sums have the same order in every batch. Times of 64 count twice: a percent of them is more.
struct StripNumbers {
  static constexpr int most_warps = 16;  // of a block
  int width = 1;
  int strip = 0;         // channels: whole slabs and vectors
  int warp_columns = 1;  // vectors of a position that a warp has
  int threads = 0;
  int vectors = 0;  // of a thread
  int blocks = 0;   // in a cluster; 0 where no strip fits one
  int64_t group_channels = 1;

  bool fits() const { return blocks > 0; }
  int64_t share(const TailShape& shape) const { return divide_up(shape.spatial, blocks); }  // positions
  int64_t strips(const TailShape& shape) const { return shape.channels / strip; }
  // Neighbouring channels of every vector that are in one slab.
  int64_t piece() const { return std::gcd(int64_t{width}, group_channels); }
  int set_warps() const { return strip / width / warp_columns; }
  int sets() const { return threads / 32 / set_warps(); }
  int64_t slabs() const { return strip / group_channels; }

  // Blocks of so much shared memory that a multiprocessor has room for.
  int resident_blocks(const Gpu& gpu, int64_t shared_bytes, int threads_of_multiprocessor) const {
    constexpr int64_t reserved = 1024;  // of each block, by the driver
    const int64_t by_memory = gpu.shared_bytes_per_multiprocessor / (shared_bytes + reserved);
    const int64_t by_threads = threads_of_multiprocessor / threads;
    return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>({by_memory, by_threads, 16})));
  }

  // Clusters that the GPU has at a time, of so many blocks a multiprocessor. They lie within GPCs, and one of
  // those has fewer multiprocessors.
  double clusters(const Gpu& gpu, int per_multiprocessor) const {
    return std::max(1, gpu.multiprocessors * per_multiprocessor / blocks - (blocks >= 8 ? 1 : 0));
  }

  // Bytes that are moved for each one that is asked for, of elements of `element` bytes: sectors of 32 bytes,
  // which memory gives in pairs.
  double waste(const TailShape& shape, double element) const {
    constexpr double sector = 32;
    const double position = strip * element;
    const double warp = warp_columns * width * element;
    double factor = strip == shape.channels ? 1.0 : 1.0 + sector / 4 / position;
    if (strip != shape.channels && std::fmod(position, sector) != 0) {
      factor *= (std::floor(position / sector) + 1) * sector / position;
    }
    return factor * std::max(1.0, sector / std::min(position * 32 / warp_columns, warp));
  }

  Constants constants() const {
    return Constants()
        .add("threads", threads, "width", width, "vectors", vectors, "blocks", blocks)
        .add("strip", strip, "warp_columns", warp_columns);
  }
};

// Tries all numbers: the best of those that fit, or none. `Row` is a StripNumbers that has shared_bytes() and
// weight(shape, batch), the predicted time.
template <class Row>
Row best_strips(Row row, const TailShape& shape, const Gpu& gpu) {
  constexpr int64_t most_vectors = 256;  // more of them fit no shared memory
  row.width = shape.width;
  row.group_channels = shape.group_channels();
  row.blocks = 0;
  Row best = row;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&] {
    if (row.shared_bytes() > gpu.shared_bytes_per_block) return;
    const double time = row.weight(shape, gpu, 1) * std::pow(row.weight(shape, gpu, 64), 2);
    if (time >= least) return;
    least = time;
    best = row;
  };
  for (int64_t groups = 1; groups <= shape.groups; ++groups) {
    const int64_t channels = groups * shape.group_channels();
    if (shape.groups % groups != 0 || channels % row.width != 0) continue;
    if (channels / row.width > 32 * Row::most_warps) break;
    row.strip = static_cast<int>(channels);
    const int columns = row.strip / row.width;
    row.warp_columns = std::min(32, columns & -columns);
    for (row.blocks = 1; row.blocks <= gpu.largest_cluster() && row.blocks <= shape.spatial;
         row.blocks *= 2) {
      for (int sets = 1; sets * row.set_warps() <= Row::most_warps; ++sets) {
        row.threads = sets * row.set_warps() * 32;
        row.vectors = static_cast<int>(
            std::min<int64_t>(most_vectors, divide_up(row.share(shape), sets * (32 / row.warp_columns))));
        if (row.vectors < most_vectors) consider();
      }
    }
  }
  return best;
}

inline std::string no_strip_fits(const TailShape& shape, const Gpu& gpu) {
  const int blocks = gpu.largest_cluster();
  return "no strip of whole slabs, of " + std::to_string(shape.group_channels()) + " channels and " +
         std::to_string(shape.spatial) + " positions each, fits the shared memory of " +
         (blocks > 1 ? "a cluster of " + std::to_string(blocks) + " blocks" : "one block");
}

}  // namespace onepass::cuda
