// The numbers of the row "narrow": a search over tiles by estimated clocks. What the chosen tile costs is in
// narrow_cost.cc.
#include "cuda/direct/narrow_numbers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "cuda/direct/row_copy.h"

namespace onepass::cuda {
namespace {

constexpr int64_t most_sums = 32;            // of a thread
constexpr int64_t most_unrolled = 1024;      // multiply-adds of an input channel where rows are unrolled
constexpr int64_t most_row_unrolled = 1536;  // and of one row of taps
constexpr int64_t most_registers = 160;
constexpr int64_t chain_of_additions = 256;  // longer sums are made of parts

}  // namespace

// Tries tiles, and keeps the best.
struct NarrowNumbers::Search : CellSearch {
  using CellSearch::CellSearch;

  // The tiles of threads that hold so many channels and cells.
  void try_threads(NarrowNumbers& best, NarrowNumbers own) const {
    for (const int64_t most_threads : {128, 256}) {
      for (const int64_t x : slot_counts(cells[2], own.positions, most_threads)) {
        for (const int64_t y : slot_counts(cells[1], own.rows, std::min<int64_t>(32, most_threads / x))) {
          for (const int64_t z : slot_counts(cells[0], 1, std::min<int64_t>(8, most_threads / (x * y)))) {
            own.slots = {z, y, x};
            const int64_t left = most_threads / (x * y * z);
            own.output_slots = std::min(left, divide_up(shape.channels, own.outputs));
            own.groups = own.tile_outputs() == shape.channels
                             ? std::min(shape.conv_groups, left / own.output_slots)
                             : 1;
            own.threads = round_up(own.used_threads(), 32);
            try_inputs(best, own);
          }
        }
      }
    }
  }

  void try_inputs(NarrowNumbers& best, NarrowNumbers own) const {
    set_counts(own);
    for (own.inputs = shape.in_channels;; own.inputs = divide_up(own.inputs, 2)) {
      if (lay_out(own)) {
        const auto is_best = [&] { return best.threads == 0 || own.all_clocks < best.all_clocks; };
        predict(own, 1, 1);
        if (is_best()) {
          own.pad_window(shape, gpu.shared_bytes_per_block);
          predict(own, own.load_conflicts(shape), own.keep_conflicts(shape));
          if (is_best()) best = own;
        }
      }
      if (own.inputs == 1 || (own.groups > 1 && own.input_interleaved)) return;
    }
  }

  int64_t input_vector(const NarrowNumbers& own) const {
    if (own.input_interleaved)
      return channel_vector(own, vector_elements) == vector_elements ? vector_elements : 1;
    const auto divides = [](int64_t count) { return count % vector_elements == 0; };
    const ThinAxis& axis = shape.axes[2];
    const bool fits =
        input_aligned && divides(axis.in) && (own.tiles[2] == 1 || divides(own.cells(2) * axis.step));
    return fits ? vector_elements : 1;
  }

  // Sizes in shared memory; false where they do not fit.
  bool lay_out(NarrowNumbers& own) const {
    own.input_vector = input_vector(own);
    own.output_vector = output_vector(own);
    for (size_t d = 0; d < 3; ++d) {
      const int64_t distance = d == 2 ? reach[d].highest - reach[d].lowest : reach[d].distance;
      own.window[d] = (own.cells(d) - 1) * shape.axes[d].step + distance + 1;
    }
    own.segment = (own.positions - 1) * shape.axes[2].step + reach[2].highest - reach[2].lowest + 1;
    own.lowest_x = own.first_x = reach[2].lowest;
    own.most_taps_x = reach[2].most_taps;
    if (!own.input_interleaved) {
      own.first_x = floor_divide(own.lowest_x, own.input_vector) * own.input_vector;
      own.window[2] = round_up(own.window[2] + own.lowest_x - own.first_x, own.input_vector);
      const int64_t apart = own.positions * shape.axes[2].step;
      own.skew = own.slots[2] > 1 && apart % 2 == 0 ? apart : 0;
    }
    constexpr int64_t most = int64_t{1} << 20;  // so that no product overflows
    if (own.window[0] > most || own.window[1] > most || own.window[2] > most ||
        own.window[0] * own.window[1] > most || own.window[0] * own.window[1] * own.window[2] > most) {
      return false;
    }
    own.lay_window(0);
    own.lay_results(shape);
    return own.shared_bytes(shape) <= gpu.shared_bytes_per_block && registers(own) <= most_registers;
  }

  int64_t registers(const NarrowNumbers& own) const {
    const int64_t sums = own.outputs * own.rows * own.positions * x_classes;
    return 48 + sums * (own.part_inputs > 0 ? 2 : 1) + own.segment + 2 * own.outputs;
  }

  // Clocks of a multiprocessor. An instruction of a warp takes a quarter of one, an access to shared memory
  // one for each address in the same bank.
  void predict(NarrowNumbers& own, int64_t load_conflicts, int64_t keep_conflicts) const {
    const auto number = [](int64_t value) { return static_cast<double>(value); };
    const ThinAxis& y = shape.axes[1];
    const auto warps = number(own.threads) / 32;
    const double inputs = number(shape.in_channels);
    const double chunks = number(divide_up(shape.in_channels, own.inputs));
    const double taps_x = number(shape.axes[2].kernel);
    const double planes = inputs * reach[0].taps;
    const double products_rows = planes * reach[1].taps * number(own.rows);
    const double read_rows = own.rows == 1 ? planes * reach[1].taps
                                           : planes * number((own.rows - 1) * y.step + reach[1].distance + 1);
    const double multiply_adds = products_rows * taps_x * number(own.positions * own.outputs);
    const double x_loads = read_rows * std::min(number(own.segment), number(own.positions) * taps_x);
    const double weight_loads = planes * reach[1].taps * taps_x;
    // Lanes have different channels where they lie together.
    const int64_t lanes = own.input_interleaved ? std::min<int64_t>(32, own.groups * own.output_slots) : 1;
    const double weight_waves =
        weight_loads * std::max(number(divide_up(own.outputs, 4)), number(lanes * own.outputs) / 32);
    const double issued = multiply_adds + x_loads + weight_loads * number(divide_up(own.outputs, 4)) +
                          8 * (own.rows == 1 ? read_rows : planes) + 12 * inputs;
    const double compute =
        warps * std::max(issued / 4, x_loads * number(load_conflicts) + weight_waves) / 0.8 +
        warps * number(own.outputs * own.rows * own.positions * x_classes * keep_conflicts);

    const int64_t element = byte_size(problem.input.dtype);
    const int64_t positions_yz = own.window[0] * own.window[1];
    const int64_t staged_channels = own.groups * own.inputs;
    const RowCopy stage_copy((own.input_interleaved ? staged_channels : own.window[2]) / own.input_vector,
                             positions_yz * (own.input_interleaved ? own.window[2] : staged_channels),
                             own.input_vector * element, own.threads, 24, 5 + 3 * number(own.input_vector));
    own.stage_lanes = stage_copy.lanes;
    const double staged = number(own.groups * own.inputs * own.window[0] * own.window[1] * own.window[2]);
    const double stage = chunks * stage_copy.instructions * warps / 4;
    const double weights = chunks * number(own.channels() * own.inputs * shape.taps) * 30 / 128;
    const int64_t outputs_x = own.cells(2) * x_classes;
    const RowCopy store_copy(
        (own.output_interleaved ? own.channels() : outputs_x) / own.output_vector,
        own.cells(0) * own.cells(1) * (own.output_interleaved ? outputs_x : own.channels()),
        own.output_vector * byte_size(problem.output.dtype), own.threads, 22,
        4 + number(own.output_vector) * (3 + 8 * chain_stages));
    own.store_lanes = store_copy.lanes;
    const double store = store_copy.instructions * warps / 4;

    const int64_t shared = own.shared_bytes(shape) + 1024;
    const int64_t by_registers = 65536 / (own.threads * round_up(registers(own), 8));
    const int64_t resident = std::max<int64_t>(1, std::min({gpu.shared_bytes_per_multiprocessor / shared,
                                                            by_registers, 2048 / own.threads, int64_t{16}}));
    own.blocks_wanted = resident;
    own.clocks = compute + stage + weights + store;
    const double blocks = number(samples) * number(own.tiles_of_sample());
    const double of_one = std::max(1.0, std::ceil(blocks / gpu.multiprocessors));
    // Loads of a block wait about 1000 clocks, which other blocks fill.
    const double latency = 1000 * chunks + 1500;
    const double at_once = std::min(of_one, number(resident));
    const double rounds = std::ceil(of_one / at_once);
    const double filled = std::max(own.clocks * at_once, own.clocks / std::min(1.0, warps / 6) + latency);
    const double computing = rounds * filled;
    const double chained = number(own.channels() * own.cells(0) * own.cells(1) * outputs_x) * 8 / 128;
    own.work = {.warps = warps,
                .issued = issued,
                .x_loads = x_loads,
                .weight_loads = weight_waves,
                .copies = stage + weights + store - chained * chain_stages,
                .chunks = chunks,
                .batches = number(stage_copy.batches),
                .resident = at_once,
                .blocks = of_one};
    count_traffic(own, staged * chunks, blocks);
    // Halos and parts of sectors are of L2, at 1.6 times memory's rate.
    const double bytes = std::max(own.traffic.bytes, (own.traffic.read + own.traffic.stored) / 1.6);
    const double moving = bytes / gpu.bytes_per_second * gpu.clock();
    own.all_clocks = std::max(computing, moving) + 0.25 * std::min(computing, moving);
  }
};

NarrowNumbers::NarrowNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
  input_interleaved = lies_interleaved(problem.input);
  output_interleaved = lies_interleaved(problem.output);
  if (shape.terms() > chain_of_additions) part_inputs = std::max<int64_t>(1, chain_of_additions / shape.taps);
  const Search search(problem, shape, gpu);
  const ThinAxis& y = shape.axes[1];
  const NarrowNumbers empty = *this;
  NarrowNumbers best = empty;
  for (const int64_t of_outputs : {1, 2, 3, 4, 6, 8}) {
    if (of_outputs > shape.channels) continue;
    for (int64_t of_x = 1; of_x <= 8; ++of_x) {
      const int64_t wasted = round_up(search.cells[2], of_x) - search.cells[2];
      if (of_x > search.cells[2] || (of_x % 4 != 0 && of_x > 2 && wasted > 0)) continue;
      for (const int64_t of_y : {1, 2, 4}) {
        const int64_t sums = of_outputs * of_x * of_y * search.x_classes;
        const int64_t unrolled = sums * y.kernel * shape.axes[2].kernel;
        if (of_y > 1 &&
            (y.classes.size() > 1 || y.kernel == 1 || of_y > search.cells[1] || unrolled > most_unrolled))
          continue;
        if (sums > most_sums || sums / of_y * shape.axes[2].kernel > most_row_unrolled) continue;
        NarrowNumbers own = empty;
        own.outputs = of_outputs;
        own.positions = of_x;
        own.rows = of_y;
        search.try_threads(best, own);
      }
    }
  }
  *this = best;
}

int64_t NarrowNumbers::shared_bytes(const ThinShape& shape) const {
  return 4 * std::max(window_floats + weight_floats(shape), result_floats);
}

void NarrowNumbers::lay_window(int64_t pad) {
  weight_t = channels() % 8 == 0 ? channels() + 4 : channels();
  if (input_interleaved) {
    window_strides[2] = (groups > 1 ? groups : inputs) + pad;
    window_strides[1] = window[2] * window_strides[2];
  } else {
    window_strides[2] = 1;
    window_strides[1] = window[2] + (skew > 0 ? (window[2] - 1) / skew : 0) + pad;
  }
  window_strides[0] = window[1] * window_strides[1];
  const int64_t volume = window[0] * window_strides[0];
  const bool inputs_together = input_interleaved && groups == 1;
  window_c = inputs_together ? 1 : volume;
  window_g = inputs_together ? 0 : input_interleaved ? 1 : inputs * volume;
  window_floats =
      round_up(volume * (inputs_together ? 1 : inputs) * (input_interleaved ? 1 : groups), vector_elements);
}

void NarrowNumbers::pad_window(const ThinShape& shape, int64_t most_bytes) {
  const int64_t unit = input_interleaved ? input_vector : 1;
  int64_t best = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t pad = 0; pad < 8 * unit && least > 1; pad += unit) {
    lay_window(pad);
    const int64_t found = load_conflicts(shape);
    if (found >= least || shared_bytes(shape) > most_bytes) continue;
    best = pad;
    least = found;
  }
  lay_window(best);
}

void NarrowNumbers::lay_results(const ThinShape& shape) {
  const int64_t classes_x = std::ssize(shape.axes[2].classes);
  const int64_t of_thread = positions * classes_x;
  result_skew = !input_interleaved && slots[2] > 1 && of_thread % 2 == 0 ? of_thread : 0;
  const int64_t outputs_x = cells(2) * classes_x;
  const int64_t row = outputs_x + (result_skew > 0 ? (outputs_x - 1) / result_skew : 0);
  result_strides[2] = !output_interleaved ? 1 : input_interleaved ? channels() : channels() | 1;
  result_strides[1] = row * result_strides[2];
  result_strides[0] = cells(1) * result_strides[1];
  result_c = output_interleaved ? 1 : cells(0) * result_strides[0];
  result_floats = cells(0) * result_strides[0] * (output_interleaved ? 1 : channels());
}

std::string NarrowNumbers::source(const ThinShape& shape) const {
  const bool stages_vectors = input_interleaved && input_vector == vector_elements &&
                              (groups == 1 || inputs == 1) && window_strides[2] % vector_elements == 0;
  return constants()
      .add("slots", used_threads(), "part_inputs", part_inputs)
      .flag("stages_vectors", stages_vectors, "keeps_vectors", false)
      .add("stage_lanes", stage_lanes, "window_floats", window_floats, "skew", skew)
      .add("lowest_x", lowest_x, "lead", lowest_x - first_x, "segment", segment)
      .add("most_taps_x", most_taps_x, "weight_t", weight_t, "weight_c", weight_c(shape))
      .numbers();
}

std::shared_ptr<const NarrowNumbers> narrow_numbers(const Problem& problem) {
  return searched<NarrowNumbers>(
      problem, 0, [&] { return NarrowNumbers(problem, ThinShape(problem), gpu_of(problem.device)); });
}

}  // namespace onepass::cuda
