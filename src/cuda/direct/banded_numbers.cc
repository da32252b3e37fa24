// The numbers of the row "banded": a search over tiles by estimated clocks.
#include "cuda/direct/banded_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "cuda/direct/row_copy.h"
#include "cuda/gemm/gemm.h"

namespace onepass::cuda {
namespace {

constexpr int64_t chunk = 8;            // inputs of 16 bytes, and cells of a segment
constexpr int64_t most_sums = 96;       // registers of a thread
constexpr int64_t most_band = 64;       // words of weights in registers
constexpr int64_t most_products = 512;  // unrolled: of an input channel and a plane of taps
constexpr int64_t most_registers = 200;
// An m16n8k16 of a multiprocessor: mma.sync reaches 62% of wgmma's rate on an H100 (published
// microbenchmarks), 2676 operations a clock.
constexpr double product_clocks = 1.53;

double number(int64_t value) { return static_cast<double>(value); }

// Products of 16 inputs that have all taps of eight neighbouring outputs.
int64_t products_along(const ThinAxis& axis) {
  const CellReach reach(axis);
  return divide_up(7 * axis.step + reach.highest - reach.lowest + 1, 16);
}

}  // namespace

// Tries tiles, and keeps the best.
struct BandedNumbers::Search : CellSearch {
  using CellSearch::CellSearch;

  int64_t products_x = products_along(shape.axes[2]);
  double chain_instructions =
      gemm_chain_instructions(shape.parts.after, bits_of(problem, problem.output.dtype));
  bool rows_aligned = has_aligned_rows();

  int64_t taps_y() const { return shape.axes[1].classes.size() > 1 ? 1 : reach[1].most_taps; }
  int64_t sums(const BandedNumbers& own) const { return own.outputs * own.rows * x_classes * 4; }
  int64_t band(const BandedNumbers& own) const { return own.outputs * taps_y() * x_classes * products_x * 2; }
  int64_t registers(const BandedNumbers& own) const { return 56 + sums(own) + band(own) + 4 * products_x; }
  // The rows of inputs that a warp loads for one plane and input.
  int64_t rows_read(const BandedNumbers& own) const {
    const int64_t all = (own.rows - 1) * shape.axes[1].step + reach[1].distance + 1;
    return std::min(all, own.rows * taps_y());
  }
  bool holds(const BandedNumbers& own) const {
    return sums(own) <= most_sums && band(own) <= most_band &&
           own.outputs * own.rows * taps_y() * x_classes * products_x <= most_products &&
           registers(own) <= most_registers;
  }

  // The tiles of warps that hold so many channels and rows.
  void try_boxes(BandedNumbers& best, BandedNumbers own) const {
    constexpr int64_t most_segments = 128;
    const int64_t slots_y = divide_up(cells[1], own.rows);
    for (const int64_t x : slot_counts(cells[2], own.positions, 32)) {
      for (const int64_t y : slot_counts(slots_y, 1, std::min<int64_t>(32, most_segments / x))) {
        for (const int64_t z : slot_counts(cells[0], 1, std::min<int64_t>(16, most_segments / (x * y)))) {
          own.slots = {z, y, x};
          // Warps without work: rows of A that no segment fills.
          if (own.segments() < 16 && (x < slots_of(2, own) || y < slots_y || z < cells[0])) continue;
          try_channels(best, own);
        }
      }
    }
  }

  int64_t slots_of(size_t d, const BandedNumbers& own) const {
    return divide_up(cells[d], d == 2 ? own.positions : 1);
  }

  void try_channels(BandedNumbers& best, BandedNumbers own) const {
    constexpr int64_t most_items = 32;
    const int64_t of_channels = divide_up(own.segments(), 16);
    const int64_t all_slots = divide_up(shape.channels, own.outputs);
    for (const int64_t slots : slot_counts(all_slots, 1, most_items / of_channels)) {
      own.output_slots = slots;
      const int64_t most_groups =
          own.tile_outputs() >= shape.channels ? most_items / (of_channels * slots) : 1;
      for (const int64_t groups : slot_counts(shape.conv_groups, 1, most_groups)) {
        own.groups = groups;
        set_counts(own);
        for (const int64_t warps : {4, 8}) {
          if (warps > 4 && own.items() <= 4) continue;
          own.threads = 32 * std::min(warps, own.items());
          try_inputs(best, own);
        }
      }
    }
  }

  void try_inputs(BandedNumbers& best, BandedNumbers own) const {
    own.items_of_warp = divide_up(own.items(), own.threads / 32);
    for (own.inputs = shape.in_channels;; own.inputs = divide_up(own.inputs, 2)) {
      if (lay_out(own, false)) {
        const auto is_best = [&] { return best.threads == 0 || own.clocks < best.clocks; };
        predict(own);
        if (is_best() && lay_out(own, true)) {
          predict(own);
          if (is_best()) best = own;
        }
      }
      // Sums of several chunks stay in registers.
      if (own.inputs == 1 || own.items_of_warp > 1 || (own.groups > 1 && own.input_interleaved)) return;
    }
  }

  // Sizes in shared memory; false where they do not fit. `padded`: with the fewest conflicts.
  bool lay_out(BandedNumbers& own, bool padded) const {
    own.products_x = products_x;
    own.output_vector = own.is_late              ? output_vector(own)
                        : own.output_interleaved ? output_channel_vector(own, 16 / result_bytes(own))
                        : rows_aligned           ? 16 / result_bytes(own)
                                                 : 1;
    own.store_lanes = own.cells(2) * x_classes;  // of a row by elements: all lie in one run
    own.first_x = reach[2].lowest;
    for (const size_t d : {0, 1})
      own.window[d] = (own.cells(d) - 1) * shape.axes[d].step + reach[d].distance + 1;
    own.window_chunks = (own.slots[2] - 1) * shape.axes[2].step + 2 * products_x;
    own.window[2] = own.window_chunks * chunk;
    constexpr int64_t most = int64_t{1} << 18;  // so that no product overflows
    if (own.window[0] > most || own.window[1] > most || own.window[2] > most ||
        own.window[0] * own.window[1] > most || own.window[0] * own.window[1] * own.window[2] > most)
      return false;
    own.input_vector = own.input_interleaved ? channel_vector(own, 8) : 1;
    own.shift = own.input_interleaved ? -1 : shift(own);
    pad_window(own, padded);
    const int64_t planes = own.window[0] * own.window_strides[0];
    own.window_c = planes;
    own.window_g = own.inputs * planes;
    own.bands_at = own.groups * own.window_g * 2;
    const int64_t words = 2 * divide_up(7 * shape.axes[2].step + 16 * products_x, 2);
    const int64_t rows = shape.axes[0].kernel * shape.axes[1].kernel * x_classes;
    const int64_t band_bytes = round_up(own.channels() * own.inputs * rows * words * 4, 16);
    lay_results(own, padded);
    const int64_t staged = own.bands_at + band_bytes;
    const int64_t kept = own.result_floats * result_bytes(own);
    own.results_at = own.items_of_warp == 1 ? 0 : staged;
    own.shared = own.items_of_warp == 1 ? std::max(staged, kept) : staged + kept;
    return own.shared <= gpu.shared_bytes_per_block;
  }

  // Rows of A lie along x, then rows and planes apart; eight of them should be in different banks, so rows
  // and planes are padded by up to seven chunks. `lay(row, plane)` pads.
  template <class Lay, class Count>
  static int64_t pad(bool padded, const Lay& lay, const Count& conflicts) {
    lay(0, 0);
    if (!padded) return 1;
    int64_t least = 9;
    std::array<int64_t, 2> best{};
    for (int64_t plane = 0; plane < 8 && least > 1; ++plane) {
      for (int64_t row = 0; row < 8 && least > 1; ++row) {
        lay(row, plane);
        const int64_t found = conflicts();
        if (found >= least) continue;
        least = found;
        best = {row, plane};
      }
    }
    lay(best[0], best[1]);
    return least;
  }

  void pad_window(BandedNumbers& own, bool padded) const {
    const auto lay = [&](int64_t row, int64_t plane) {
      own.window_strides = {0, (own.window_chunks + row) * chunk, 1};
      own.window_strides[0] = own.window[1] * own.window_strides[1] + plane * chunk;
    };
    own.conflicts = pad(padded, lay, [&] {
      return conflicts(own, {shape.axes[0].step * own.window_strides[0] / chunk,
                             shape.axes[1].step * own.window_strides[1] / chunk, shape.axes[2].step});
    });
  }

  // Of eight segments at a time, whose chunks lie so far apart for each cell, and segment along x.
  static int64_t conflicts(const BandedNumbers& own, const std::array<int64_t, 3>& apart) {
    int64_t worst = 1;
    for (int64_t first = 0; first < std::min<int64_t>(16, own.segments()); first += 8) {
      std::array<int64_t, 8> banks{};
      for (int64_t i = first; i < std::min(first + 8, own.segments()); ++i) {
        const int64_t x = i % own.slots[2];
        const int64_t y = i / own.slots[2] % own.slots[1] * own.rows;
        const int64_t z = i / own.slots[2] / own.slots[1];
        const int64_t at = x * apart[2] + y * apart[1] + z * apart[0];
        worst = std::max(worst, ++banks[static_cast<size_t>(at % 8)]);
      }
    }
    return worst;
  }

  // Where every row of the input begins on 16 bytes, all chunks of a tile begin alike.
  int64_t shift(const BandedNumbers& own) const {
    const auto& strides = problem.input.strides;
    for (size_t d = 0; d + 1 < strides.size(); ++d) {
      if (problem.input.sizes[d] > 1 && strides[d] % chunk != 0) return -1;
    }
    const int64_t from = own.first_x - floor_divide(own.first_x, chunk) * chunk;
    return from * 2;
  }

  int64_t result_bytes(const BandedNumbers& own) const {
    return own.is_late ? 4 : byte_size(problem.output.dtype);
  }

  void lay_results(BandedNumbers& own, bool padded) const {
    const int64_t outputs_x = own.cells(2) * x_classes;
    own.result_strides[2] = own.is_late && own.output_interleaved ? own.channels() | 1 : 1;
    const auto lay = [&](int64_t row, int64_t plane) {
      own.result_strides[1] = outputs_x * own.result_strides[2] + row * chunk;
      own.result_strides[0] = own.cells(1) * own.result_strides[1] + plane * chunk;
    };
    if (own.is_late) {
      lay(0, 0);
    } else {
      own.keep_conflicts = pad(padded, lay, [&] {
        return conflicts(own, {own.result_strides[0] / chunk, own.result_strides[1] / chunk, x_classes});
      });
    }
    const int64_t planes = own.cells(0) * own.result_strides[0];
    const bool together = own.is_late && own.output_interleaved;
    own.result_c = together ? 1 : planes;
    own.result_floats = planes * (together ? 1 : own.channels());
  }

  // Whether every row of the output begins on 16 bytes where the first does.
  bool has_aligned_rows() const {
    const TensorSpec& spec = problem.output;
    for (size_t d = 0; d + 1 < spec.sizes.size(); ++d) {
      if (spec.sizes[d] > 1 && spec.strides[d] * byte_size(spec.dtype) % 16 != 0) return false;
    }
    return true;
  }

  // By narrow's end.
  void set_late_store(BandedNumbers& own, Work& work) const {
    const int64_t outputs_x = own.cells(2) * x_classes;
    const RowCopy copy((own.output_interleaved ? own.channels() : outputs_x) / own.output_vector,
                       own.cells(0) * own.cells(1) * (own.output_interleaved ? outputs_x : own.channels()),
                       own.output_vector * byte_size(problem.output.dtype), own.threads, 22,
                       4 + number(own.output_vector) * (3 + chain_instructions));
    own.store_lanes = copy.lanes;
    // Sums are kept and read: two addresses of a bank where channels lie side by side.
    const double of_result = own.output_interleaved ? 5.0 : 3.0;
    work.kept = number(own.items() * 16 * chunk * x_classes * own.rows * own.outputs) * of_result / 32;
    work.store = copy.instructions * number(own.threads) / 128;
  }

  // Clocks of a multiprocessor. An instruction of a warp takes a quarter of one.
  void predict(BandedNumbers& own) const {
    const double items = number(own.items());
    const double warps = number(own.threads) / 32;
    const double planes = number(shape.in_channels) * reach[0].taps;
    const double taps = shape.axes[1].classes.size() > 1 ? reach[1].taps : number(taps_y());
    const double of_row = number(own.outputs * x_classes * products_x);
    const double products = planes * taps * number(own.rows) * of_row;
    const double loads = planes * number(products_x) * (own.rows == 1 ? taps : number(rows_read(own)));
    const double band_loads = planes * taps * of_row * 2;
    Work work;
    work.warps = warps;
    work.tensor = items * products * product_clocks;
    work.shared = items * (loads * 4 * number(own.conflicts) + band_loads);
    work.issued = items * (products + loads + band_loads + 12 * planes) / 4;
    work.chunks = number(divide_up(shape.in_channels, own.inputs));

    // Staging: instructions counted in banded/window.cuh, of a thread for a chunk. Chunks at the ends of rows
    // go by elements, in warps with others.
    const int64_t rows = own.window[0] * own.window[1];
    const int64_t pieces = own.groups * own.inputs / own.input_vector * rows * own.window_chunks;
    const double ends = std::min(1.0, 2.0 / number(own.tiles[2]));
    const double planar = (own.shift >= 0 ? 36 : 52) + 34 * ends;
    const double of_piece = own.input_interleaved ? 48 + 6.5 * number(own.input_vector) : planar;
    work.stage =
        work.chunks * (number(divide_up(pieces, 32)) * of_piece / 4 + number(pieces * own.input_vector) / 4);
    const int64_t together = own.input_vector >= 4 ? 1 : 4;
    work.batches = number(divide_up(pieces, own.threads * together));
    work.weights = work.chunks * number(own.channels() * own.inputs * shape.taps) * 40 / 128;

    const double sums = items * number(16 * chunk * x_classes * own.rows * own.outputs);
    if (own.is_late) {
      set_late_store(own, work);
    } else {
      const double kept_bytes = number(result_bytes(own));
      work.kept = sums * ((3 + chain_instructions) / 128 + number(own.keep_conflicts) * kept_bytes / 128);
      // Instructions counted in banded/store.cuh, of a thread for a vector; and vectors from shared memory.
      const int64_t vector = 16 / result_bytes(own);
      const double of_rows = number(own.channels() * own.cells(0) * own.cells(1));
      const double vectors = of_rows * number(own.cells(2) * x_classes / vector);
      const double of_channels = number(own.output_vector);
      const double stores = own.output_interleaved
                                ? vectors / of_channels * (40 + 5 * of_channels + 2 * number(vector))
                            : rows_aligned ? vectors * 34
                                           : (vectors + of_rows) * (60 + 3 * number(vector) * ends);
      work.store = stores / 128 + vectors * 16 / 128 * (own.output_interleaved || !rows_aligned ? 2 : 1);
    }

    const int64_t by_registers = 65536 / (own.threads * round_up(registers(own), 8));
    const int64_t resident =
        std::max<int64_t>(1, std::min({gpu.shared_bytes_per_multiprocessor / (own.shared + 1024),
                                       by_registers, 2048 / own.threads, int64_t{16}}));
    own.blocks_wanted = resident;
    const double blocks = number(samples) * number(own.tiles_of_sample());
    work.blocks = std::max(1.0, std::ceil(blocks / gpu.multiprocessors));
    work.resident = std::min(work.blocks, number(resident));
    own.work = work;
    count_traffic(own, number(own.groups * own.inputs * rows * own.window[2]) * work.chunks, blocks);
    own.clocks = own.seconds(problem, shape, gpu) * gpu.clock();
  }
};

BandedNumbers::BandedNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  input_interleaved = lies_interleaved(problem.input);
  output_interleaved = lies_interleaved(problem.output);
  positions = chunk;
  int64_t span = 1;
  for (size_t d = 1; d < problem.input.sizes.size(); ++d)
    span += (problem.input.sizes[d] - 1) * problem.input.strides[d];
  sample_elements = span;
  is_late = !shape.parts.tensor_parameters().empty();
  const Search search(problem, shape, gpu);
  products_x = search.products_x;
  rows_aligned = search.rows_aligned;
  if (products_x > most_products_x) return;
  const BandedNumbers empty = *this;
  BandedNumbers best = empty;
  for (const int64_t of_outputs : {1, 2, 3, 4, 6, 8}) {
    if (of_outputs > shape.channels) continue;
    for (const int64_t of_y : {1, 2, 3, 4, 5, 6, 7, 8}) {
      if (of_y > search.cells[1] || (of_y > 1 && shape.axes[1].classes.size() > 1)) continue;
      BandedNumbers own = empty;
      own.outputs = of_outputs;
      own.rows = of_y;
      if (search.holds(own)) search.try_boxes(best, own);
    }
  }
  *this = best;
}

ThinShape banded_shape(const Problem& problem) {
  ThinShape natural(problem);
  if (!lies_interleaved(problem.input) || !lies_interleaved(problem.output)) return natural;
  const auto work = [&](size_t d) {
    const ThinAxis& axis = natural.axes[d];
    const int64_t cells = divide_up(axis.out, std::ssize(axis.classes));
    return number(products_along(axis) * round_up(cells, chunk)) / number(cells);
  };
  size_t best = 2;
  for (const size_t d : {1, 0}) {
    if (natural.spatial_stride(problem.input, d) > 0 && work(d) < 0.999 * work(best)) best = d;
  }
  if (best == 2) return natural;
  return natural.reordered(best == 1 ? ThinShape::Order{0, 2, 1} : ThinShape::Order{1, 2, 0});
}

double BandedNumbers::seconds(const Problem& problem, const ThinShape&, const Gpu& gpu) const {
  // Shares of rates that narrow reaches (narrow_cost.cc); its own are not measured yet.
  const double mainloop = std::max({work.tensor / 0.8, work.shared / 0.8, work.issued / 0.65});
  const double block = mainloop + work.copies() / 0.9;
  const double latency = work.chunks * (400 + 600 * work.batches) + 1500;
  const double rounds = std::ceil(work.blocks / work.resident);
  const double computing =
      rounds * std::max(block * work.resident, block / std::min(1.0, work.warps / 6) + latency) / gpu.clock();
  const double moving = moving_seconds(problem, gpu);
  return std::max(computing, moving) + 0.25 * std::min(computing, moving);
}

std::string BandedNumbers::source(const ThinShape&) const {
  const bool keeps_vectors = is_late && !output_interleaved && output_vector == vector_elements &&
                             result_strides[1] % vector_elements == 0;
  return constants()
      .add("products_x", products_x, "window_chunks", window_chunks, "items_of_warp", items_of_warp)
      .add("bands_at", bands_at, "results_at", results_at, "shift", shift)
      .add("sample_elements", sample_elements)
      .flag("keeps_vectors", keeps_vectors, "is_late", is_late, "rows_aligned", rows_aligned)
      .numbers();
}

}  // namespace onepass::cuda
