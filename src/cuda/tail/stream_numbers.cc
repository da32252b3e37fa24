// How a pass by tickets over a tail is cut into tiles, and the kernel that goes over them.
#include <algorithm>
#include <numeric>
#include <sstream>

#include "cuda/tail/tail.h"

namespace onepass::cuda {

namespace {

int64_t power_of_two_above(int64_t value) {
  int64_t power = 1;
  while (power < value) power *= 2;
  return power;
}

// The fewest channels that are whole slabs and vectors, of which a position's bytes are some sectors
// together.
int64_t strip_of(const TailShape& shape, int64_t bytes_of_element) {
  constexpr int64_t least_bytes = 256;
  constexpr int64_t least_elements = 4096;  // of a unit: 1440 took 1.6 times as long as whole samples
  for (int64_t groups = 1; groups < shape.groups; ++groups) {
    const int64_t channels = groups * shape.group_channels();
    const bool is_large =
        channels * bytes_of_element >= least_bytes && channels * shape.spatial >= least_elements;
    if (shape.groups % groups == 0 && channels % shape.width == 0 && is_large) return channels;
  }
  return shape.channels;
}

}  // namespace

StreamNumbers::StreamNumbers(const TailShape& shape, int64_t bytes_of_element, const Gpu& gpu,
                             Units units_are, Leaves leaves)
    : order(shape.order), width(shape.width), strip_channels(shape.channels) {
  vectors_in_flight = width >= 8 ? 2 : width == 1 ? 8 : 4;
  // Loads of a thread in a tile, one after the other: each tile costs a ticket, a sum over the block and an
  // arrival. 1, 2, 4 and 8: 0.350, 0.280, 0.220 and 0.213 ms for s27's tail, 0.95, 0.81, 0.77 and 0.76 for
  // s60's.
  constexpr int64_t chunks = 4;
  const int64_t tile_elements = chunks * int64_t{threads} * width * vectors_in_flight;
  int64_t unit_elements = 0;
  if (order == Order::planar) {
    const int64_t vectors = shape.spatial / width;
    constexpr int64_t most_vectors_of_lane = 16;
    team = vectors > 32 * most_vectors_of_lane
               ? threads
               : static_cast<int>(
                     std::min<int64_t>(32, power_of_two_above(divide_up(vectors, vectors_in_flight))));
    piece_vectors = chunks * int64_t{threads} * vectors_in_flight;
    pieces = team == threads ? std::max<int64_t>(1, divide_up(vectors, piece_vectors)) : 1;
    const int64_t at_once = threads / team;
    rows_per_tile =
        std::min(divide_up(shape.group_channels(), at_once),
                 std::max<int64_t>(1, tile_elements / std::max<int64_t>(1, shape.spatial * at_once))) *
        at_once;
    units_per_sample = shape.groups;
    unit_elements = shape.slab_elements();
    tiles_of_unit =
        pieces > 1 ? shape.group_channels() * pieces : divide_up(shape.group_channels(), rows_per_tile);
  } else {
    cut_interleaved(shape, bytes_of_element, units_are, leaves, tile_elements);
    units_per_sample = shape.channels / strip_channels;
    unit_elements = strip_channels * shape.spatial;
    tiles_of_unit = pieces;
  }
  // As many as the compiler has registers for without spilling: 64 a thread on sm_90 for tiles of one
  // row, 80 for others and before, more after it and where operands or values of several channels take them.
  if (order == Order::planar && !shape.parts.has_operands() && gpu.compute_major <= 9) {
    blocks_wanted = gpu.compute_major == 9 && rows_per_tile == 1 ? 4 : 3;
  }
  // Two waves and the output of one are in the second-level cache at a time. Of parts a wave is work for all
  // multiprocessors all the same: the second pass would wait for the first one.
  constexpr int64_t cache_share = 3;
  const int64_t cached = gpu.l2_bytes / cache_share / std::max<int64_t>(1, unit_elements * bytes_of_element);
  const bool of_parts = order == Order::interleaved && leaves == Leaves::parts;
  const int64_t busy = of_parts ? divide_up(3 * int64_t{gpu.multiprocessors} / 2, tiles_of_unit) : 1;
  wave_units = clamp(std::max(cached, busy), 1, maximum(1, units(shape.batch))).called("wave_units");
}

void StreamNumbers::cut_interleaved(const TailShape& shape, int64_t bytes_of_element, Units units_are,
                                    Leaves leaves, int64_t tile_elements) {
  if (units_are == Units::strips) strip_channels = strip_of(shape, bytes_of_element);
  const int64_t vectors = strip_channels / width;
  const bool is_of_strips = units_are == Units::strips;
  team = static_cast<int>(std::min<int64_t>(threads, power_of_two_above(vectors)));
  int64_t piece_elements = 0;
  if (leaves == Leaves::parts) {
    fit_team(vectors);
    part_channels = std::gcd(shape.group_channels(), int64_t{team} * width);
    // A tile leaves little behind: as many of a unit as the GPU takes at a time, none shorter than hides its
    // ticket and its sums over the block.
    constexpr int64_t tiles_at_once = 256, most_tiles_of_piece = 2;
    piece_elements = std::clamp(strip_channels * shape.spatial / tiles_at_once, tile_elements,
                                most_tiles_of_piece * tile_elements);
  } else {
    // Long pieces where one block adds up all channels of a sample; with strips it has few, and the more
    // tiles a wave has, the fewer blocks wait. 25 positions of 320 channels a piece took 7.6 times the floor,
    // one thread a row. Pieces of a half, a quarter and twice the size: s61's backward 1.08, 1.46 and 1.02 of
    // the time, s60's 0.90, 0.95 and 1.09.
    piece_elements = (is_of_strips ? 2 : 4) * tile_elements;
  }
  piece_positions = std::max<int64_t>(16 * (threads / team), piece_elements / strip_channels);
  pieces = divide_up(shape.spatial, piece_positions);
  // One block merges what all pieces of a unit leave: 470,000 parts of 60 MB took 32 times the floor. A mean
  // reads sums of channels, by vectors: 100,000 in some 5 us.
  constexpr int64_t most_parts = 16384, most_sums = 98304, least_pieces = 64;
  int64_t most_pieces = std::max(least_pieces, most_parts / (strip_channels / part_channels));
  if (leaves == Leaves::parts && shape.parts.mean)
    most_pieces = std::min(most_pieces, std::max(least_pieces, most_sums / strip_channels));
  if (pieces > most_pieces) {
    piece_positions = divide_up(shape.spatial, most_pieces);
    pieces = divide_up(shape.spatial, piece_positions);
  }
  // Where both passes read one tensor of 16 bits, twice as many loads in flight: s60, s19, s61 and s27 take
  // 0.83, 0.85, 0.86 and 0.82 of the time. With dy beside it s60 would spill,
  // and sums of eight channels beside a chain.
  const bool has_room = !shape.parts.mean || shape.parts.before.empty() ||
                        shape.group_channels() % width == 0 || leaves == Leaves::channels;
  if (width >= 8 && bytes_of_element <= 2 && has_room) vectors_in_flight = 4;
}

// Threads along channels that all have some: of 320 vectors, teams of 256 left three of eight threads idle.
void StreamNumbers::fit_team(int64_t vectors) {
  const auto used = [vectors](int64_t columns) {
    return static_cast<double>(vectors) / static_cast<double>(round_up(vectors, columns));
  };
  if (vectors <= 32 || used(team) == 1.0) return;
  constexpr int64_t least_threads = 160;
  constexpr double enough = 0.89;
  for (int64_t rounds = 1; rounds * 32 <= vectors; ++rounds) {
    for (int64_t columns = divide_up(vectors, rounds); columns <= threads && used(columns) > enough;
         ++columns) {
      int64_t block = threads / columns * columns;
      while (block % 32 != 0) block -= columns;
      if (block < least_threads || used(columns) <= used(team)) continue;
      team = static_cast<int>(columns);
      threads = static_cast<int>(block);
      if (threads <= 192) blocks_wanted = 3;
      return;
    }
  }
}

Source StreamNumbers::kernel(const std::string& name, const std::string& text, const std::string& agent,
                             const std::string& checks, const std::string& first) const {
  return {name, text + source() + "using Agent = onepass::" + agent +
                    "<onepass::Tail, Numbers, Walk, true>;\nusing Unaligned = onepass::" + agent +
                    "<onepass::Tail, UnalignedNumbers, UnalignedWalk, false>;\n" + checks +
                    "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(threads) + ", " +
                    std::to_string(blocks_wanted) + ") " + name +
                    "(const __grid_constant__ Agent::Parameters p) {\n"
                    "  extern __shared__ float scratch[];\n" +
                    first +
                    "  if (is_aligned(p, onepass::aligned_all)) {\n"
                    "    Agent{p, scratch}.run();\n"
                    "  } else {\n"
                    "    Unaligned{p, scratch}.run();\n"
                    "  }\n"
                    "}\n"};
}

std::string StreamNumbers::source() const {
  const std::string numbers = Constants()
                                  .flag("interleaved", order == Order::interleaved)
                                  .add("threads", threads)
                                  .add("width", width)
                                  .add("vectors_in_flight", vectors_in_flight)
                                  .add("team", team)
                                  .add("pieces", pieces)
                                  .add("piece_vectors", piece_vectors)
                                  .add("piece_positions", piece_positions)
                                  .add("rows_per_tile", rows_per_tile)
                                  .add("strip_channels", strip_channels)
                                  .add("part_channels", part_channels)
                                  .add("units_of_block", units_of_block)
                                  .numbers();
  // One vector at a time where the tensors do not lie on 16 bytes: rare, and it must not cost registers.
  const char* walk = order == Order::planar ? "PlanarWalk" : "InterleavedWalk";
  std::ostringstream out;
  out << numbers << "struct UnalignedNumbers : Numbers {\n  static constexpr int vectors_in_flight = 1;\n};\n"
      << "using Walk = onepass::" << walk << "<onepass::Tail, Numbers>;\n"
      << "using UnalignedWalk = onepass::" << walk << "<onepass::Tail, UnalignedNumbers>;\n";
  return out.str();
}

std::string StreamNumbers::wave_text() const {
  const std::string units = order == Order::planar ? " slabs"
                            : units_per_sample == 1
                                ? " samples"
                                : " strips of " + std::to_string(strip_channels) + " channels";
  return "wave: " + std::to_string(wave_units.value()) + units + " between the passes\n";
}

std::string StreamNumbers::describe() const {
  std::ostringstream out;
  out << "order: " << (order == Order::planar ? "channels before space" : "channels after space") << '\n'
      << "vector: " << width << " elements, " << vectors_in_flight << " a thread in flight\n"
      << "tile: "
      << (pieces > 1 ? "a piece of " + std::to_string(pieces) : std::to_string(rows_per_tile) + " rows")
      << ", " << team << " threads " << (order == Order::planar ? "a row" : "along channels") << '\n'
      << (tiles_of_unit > 1    ? wave_text()
          : units_of_block > 1 ? "unit: one tile, both passes by one warp\n"
                               : "unit: one tile, both passes by one block\n");
  return out.str();
}

int64_t StreamNumbers::scratch_floats(int64_t count, int64_t at_once) const {
  return order == Order::planar ? std::max<int64_t>(count, 2) * (threads / 32) : at_once * width * threads;
}

}  // namespace onepass::cuda
