// The numbers of the row "narrow_backward": a search over tiles by predicted seconds.
#include "cuda/direct/narrow_backward_numbers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "block/adjoint.h"
#include "cuda/direct/row_copy.h"

namespace onepass::cuda {
namespace {

constexpr int64_t most_sums = 56;        // of a thread
constexpr int64_t most_unrolled = 1536;  // multiply-adds
constexpr int64_t most_held = 32;        // elements of u
constexpr int64_t most_registers = 168;
constexpr int64_t chain_of_additions = 256;

double number(int64_t value) { return static_cast<double>(value); }

}  // namespace

Problem weight_gradient_problem(const BackwardProblem& problem) {
  Problem other = problem.forward;
  const Conv& conv = *problem.forward.block.conv();
  if (!conv.transposed) {
    other.output = problem.output_gradient;
    return other;
  }
  other.block = Block({adjoint(conv, problem.forward.input.sizes, problem.output_gradient.sizes)});
  other.input = problem.output_gradient;
  other.output = problem.forward.input;
  other.parameters.resize(1);
  return other;
}

void StagedBox::lay(int64_t groups, int64_t pad) {
  if (interleaved) {
    strides[2] = (groups > 1 ? groups : channels) + pad;
    strides[1] = size[2] * strides[2];
  } else {
    strides[2] = 1;
    strides[1] = size[2] + (skew > 0 ? (size[2] - 1) / skew : 0) + pad;
  }
  strides[0] = size[1] * strides[1];
  const int64_t volume = size[0] * strides[0];
  const bool together = interleaved && groups == 1;
  c = together ? 1 : volume;
  g = together ? 0 : interleaved ? 1 : channels * volume;
  floats = round_up(volume * (together ? 1 : channels) * (interleaved ? 1 : groups), vector_elements);
}

int64_t StagedBox::place(int64_t group, int64_t channel, const std::array<int64_t, 3>& at) const {
  return group * g + channel * c + at[0] * strides[0] + at[1] * strides[1] +
         (skew > 0 ? at[2] + at[2] / skew : at[2]) * strides[2];
}

// Tries tiles, and keeps the best.
struct NarrowGradientNumbers::Search {
  const Problem& problem;
  const ThinShape& shape;
  const Gpu& gpu;
  int64_t samples;
  int64_t u_vector, v_vector;  // at most, of elements

  Search(const Problem& of, const ThinShape& its_shape, const Gpu& on)
      : problem(of),
        shape(its_shape),
        gpu(on),
        samples(CutFor::instead_of(its_shape.samples)),
        u_vector(most_vector(of.output)),
        v_vector(most_vector(of.input)) {}

  // Of four elements where they lie on their size. Eight of 16 bits took 1.1 to 1.3 times as long (H200).
  static int64_t most_vector(const TensorSpec& spec) {
    const size_t along = lies_interleaved(spec) ? 1 : spec.sizes.size() - 1;
    return is_aligned_except(spec, along) ? vector_elements : 1;
  }

  const ThinAxis& axis(size_t d) const { return shape.axes[d]; }

  // Rows of v from the first to the last that a thread's rows of u meet. They are unrolled, met or not: NVRTC
  // takes 0.3 s for a loop of 512, 64 s for one of 2000.
  static constexpr int64_t most_unrolled = 256;
  int64_t reach(const NarrowGradientNumbers& own) const {
    return (own.step_rows - 1) * axis(1).step + (own.taps_y - 1) * axis(1).delta + 1;
  }

  // Threads that hold such sums, in blocks of so many at most.
  void try_slots(NarrowGradientNumbers& best, NarrowGradientNumbers own, int64_t most_threads) const {
    own.tap_slots_z = divide_up(axis(0).kernel, own.taps_z);
    own.tap_slots_y = divide_up(axis(1).kernel, own.taps_y);
    const int64_t left = most_threads / (own.tap_slots_z * own.tap_slots_y);
    if (left == 0) return;
    own.u_slots = std::min(left, divide_up(shape.channels, own.u));
    own.v_slots = std::min(left / own.u_slots, divide_up(shape.in_channels, own.v));
    own.u_tiles = divide_up(shape.channels, own.u * own.u_slots);
    own.v_tiles = divide_up(shape.in_channels, own.v * own.v_slots);
    const bool whole = own.u_tiles * own.v_tiles == 1;
    const int64_t most_groups = whole ? left / (own.u_slots * own.v_slots) : 1;
    for (const int64_t groups : slot_counts(shape.conv_groups, 1, most_groups)) {
      own.groups = groups;
      own.group_tiles = divide_up(shape.conv_groups, groups);
      try_lanes(best, own, most_threads / own.items());
    }
  }

  void try_lanes(NarrowGradientNumbers& best, NarrowGradientNumbers own, int64_t most) const {
    for (const int64_t x : slot_counts(axis(2).out, own.positions, most)) {
      for (const int64_t y : slot_counts(axis(1).out, own.step_rows, most / x)) {
        // As many as there is room for: fewer threads are tried by smaller blocks.
        const std::vector<int64_t> z = slot_counts(axis(0).out, 1, most / (x * y));
        own.slots = {z.back(), y, x};
        if (2 * own.lanes() <= most && own.lanes() < all_lanes(own)) continue;
        try_loops(best, own);
      }
    }
  }

  int64_t all_lanes(const NarrowGradientNumbers& own) const {
    return axis(0).out * divide_up(axis(1).out, own.step_rows) * divide_up(axis(2).out, own.positions);
  }

  void try_loops(NarrowGradientNumbers& best, NarrowGradientNumbers own) const {
    own.threads = round_up(own.lanes() * own.items(), 32);
    for (const int64_t y : {1, 2, 4, 8}) {
      if (y > 1 && (y - 1) * own.slots[1] * own.step_rows >= axis(1).out) break;
      for (const int64_t z : {1, 2, 4}) {
        if (z > 1 && (z - 1) * own.slots[0] >= axis(0).out) break;
        const int64_t terms = y * z * own.step_rows * own.positions;
        if (terms > chain_of_additions) break;
        own.loops_y = y;
        own.loops_z = z;
        own.fold_chunks = chain_of_additions / terms;
        if (!lay_out(own)) break;
        predict(own, 1, 1);
        if (best.threads > 0 && own.seconds >= best.seconds) continue;
        NarrowGradientNumbers padded = own;
        const auto [u_conflicts, v_conflicts] = pad(padded);
        predict(padded, u_conflicts, v_conflicts);
        if (best.threads == 0 || padded.seconds < best.seconds) best = padded;
      }
    }
  }

  static int64_t vector_of(const StagedBox& box, int64_t most, int64_t groups, int64_t group_channels,
                           int64_t all_groups, int64_t size, int64_t advance, int64_t tiles) {
    const auto divides = [](int64_t count) { return count % vector_elements == 0; };
    const bool fits = !box.interleaved ? divides(size) && (tiles == 1 || divides(advance))
                      : groups > 1     ? box.channels == group_channels && divides(groups * group_channels) &&
                                         divides(all_groups * group_channels)
                                   : divides(box.channels) && divides(group_channels);
    return fits ? most : 1;
  }

  // Sizes in shared memory; false where they do not fit.
  bool lay_out(NarrowGradientNumbers& own) const {
    const std::array<int64_t, 3> box = own.box();
    for (size_t d = 0; d < 3; ++d) {
      own.tiles[d] = divide_up(axis(d).out, box[d]);
      own.u_box.size[d] = box[d];
      own.v_box.size[d] = (box[d] - 1) * axis(d).step + (axis(d).kernel - 1) * axis(d).delta + 1;
    }
    own.segment = (own.positions - 1) * axis(2).step + (axis(2).kernel - 1) * axis(2).delta + 1;
    if (own.segment > most_unrolled || reach(own) > most_unrolled) return false;
    own.u_box.channels = own.u * own.u_slots;
    own.v_box.channels = own.v * own.v_slots;
    own.u_box.vector = vector_of(own.u_box, u_vector, own.groups, shape.channels, shape.conv_groups,
                                 axis(2).out, box[2], own.tiles[2]);
    own.v_box.vector = vector_of(own.v_box, v_vector, own.groups, shape.in_channels, shape.conv_groups,
                                 axis(2).in, box[2] * axis(2).step, own.tiles[2]);
    lay_row(own.u_box, 0, own.slots[2] > 1 ? own.positions : 0);
    lay_row(own.v_box, axis(2).classes[0].base, own.slots[2] > 1 ? own.positions * axis(2).step : 0);
    constexpr int64_t most = int64_t{1} << 20;  // so that no product overflows
    const auto& window = own.v_box.size;
    if (window[0] > most || window[1] > most || window[2] > most || window[0] * window[1] > most ||
        window[0] * window[1] * window[2] > most) {
      return false;
    }
    own.u_box.lay(own.groups, 0);
    own.v_box.lay(own.groups, 0);
    own.tree = 1;
    while (!own.v_box.interleaved && own.tree < 32 && own.lanes() % (2 * own.tree) == 0) own.tree *= 2;
    const int64_t of_sum = own.lanes() / own.tree * own.items();
    const int64_t room = (own.u_box.floats + own.v_box.floats) / of_sum;
    own.batch = std::min(own.sums(shape), room);
    return room > 0 && own.shared_bytes() <= gpu.shared_bytes_per_block && registers(own) <= most_registers;
  }

  static void lay_row(StagedBox& box, int64_t lowest, int64_t apart) {
    box.lowest_x = box.first_x = lowest;
    box.skew = 0;
    if (box.interleaved) return;
    box.first_x = floor_divide(lowest, box.vector) * box.vector;
    box.size[2] = round_up(box.size[2] + lowest - box.first_x, box.vector);
    if (apart % 2 == 0) box.skew = apart;
  }

  int64_t registers(const NarrowGradientNumbers& own) const {
    const int64_t row = std::min(own.segment, own.positions * axis(2).kernel);
    return 44 + 2 * own.sums(shape) + own.u * own.step_rows * own.positions + row;
  }

  // How many of a warp's addresses fall into the same bank, at worst.
  template <class Place>
  int64_t conflicts(const NarrowGradientNumbers& own, const Place& place) const {
    std::array<int64_t, 32> addresses{};
    size_t used = 0;
    for (int64_t thread = 0; thread < std::min<int64_t>(32, own.lanes() * own.items()); ++thread) {
      const bool items_first = own.v_box.interleaved;
      int64_t item = items_first ? thread % own.items() : thread / own.lanes();
      int64_t lane = items_first ? thread / own.items() : thread % own.lanes();
      const auto take = [](int64_t& rest, int64_t count) {
        return std::exchange(rest, rest / count) % count;
      };
      const int64_t u = take(item, own.u_slots) * own.u;
      const int64_t v = take(item, own.v_slots) * own.v;
      const int64_t group = take(item, own.groups);
      const int64_t y = take(item, own.tap_slots_y) * own.taps_y;
      const std::array<int64_t, 2> tap{item * own.taps_z, y};
      const int64_t at_x = take(lane, own.slots[2]) * own.positions;
      const int64_t at_y = take(lane, own.slots[1]) * own.step_rows;
      addresses[used++] = place(group, u, v, tap, std::array<int64_t, 3>{lane, at_y, at_x});
    }
    return most_in_a_bank(addresses, used);
  }

  int64_t u_conflicts(const NarrowGradientNumbers& own) const {
    return conflicts(own, [&](int64_t group, int64_t u, int64_t, const auto&, const auto& at) {
      return own.u_box.place(group, u, at);
    });
  }
  int64_t v_conflicts(const NarrowGradientNumbers& own) const {
    return conflicts(own, [&](int64_t group, int64_t, int64_t v, const auto& tap, const auto& at) {
      return own.v_box.place(group, v,
                             {at[0] * axis(0).step + tap[0] * axis(0).delta,
                              at[1] * axis(1).step + tap[1] * axis(1).delta, at[2] * axis(2).step});
    });
  }

  // The padding with the fewest, of u's box and then of v's.
  std::pair<int64_t, int64_t> pad(NarrowGradientNumbers& own) const {
    const auto pad_box = [&](StagedBox NarrowGradientNumbers::*member, auto count) {
      StagedBox& box = own.*member;
      const int64_t unit = box.interleaved ? std::min(box.vector, vector_elements) : 1;
      int64_t best = 0;
      int64_t least = std::numeric_limits<int64_t>::max();
      for (int64_t pad = 0; pad < 8 * unit && least > 1; pad += unit) {
        box.lay(own.groups, pad);
        const int64_t found = count();
        if (found >= least || own.shared_bytes() > gpu.shared_bytes_per_block) continue;
        best = pad;
        least = found;
      }
      box.lay(own.groups, best);
      return least;
    };
    const int64_t of_u = pad_box(&NarrowGradientNumbers::u_box, [&] { return u_conflicts(own); });
    const int64_t of_v = pad_box(&NarrowGradientNumbers::v_box, [&] { return v_conflicts(own); });
    return {of_u, of_v};
  }

  // Clocks and batches of loads to stage a box, and bytes that it takes from memory or L2.
  struct Staging {
    double clocks = 0, batches = 0, bytes = 0;
  };
  Staging stage(const NarrowGradientNumbers& own, StagedBox& box, const TensorSpec& spec) const {
    const int64_t element = byte_size(spec.dtype);
    const int64_t channels = own.groups * box.channels;
    const int64_t run = box.interleaved ? channels : box.size[2];
    const int64_t rows = box.size[0] * box.size[1] * (box.interleaved ? box.size[2] : channels);
    const RowCopy copy(run / box.vector, rows, box.vector * element, own.threads, 24,
                       5 + 3 * number(box.vector));
    box.lanes = copy.lanes;
    const double bytes = number(run * element);
    const bool whole = box.interleaved && channels == spec.sizes[1];
    const double sectors = whole ? 1 : box.vector > 1 ? std::ceil(bytes / 32) * 32 / bytes : 1 + 32 / bytes;
    return {copy.instructions * number(own.threads) / 32 / 4, number(copy.batches),
            number(box.elements(own.groups) * element) * sectors};
  }

  void predict(NarrowGradientNumbers& own, int64_t u_conflicts, int64_t v_conflicts) const {
    const double warps = number(own.threads) / 32;
    const double rows = number(std::min(reach(own), own.step_rows * own.taps_y));
    const double row = number(std::min(own.segment, own.positions * axis(2).kernel));
    const double v_loads = number(own.v * own.taps_z) * rows * row;
    const double u_loads = number(own.u * own.step_rows * own.positions);
    const double multiply_adds = number(own.weight_sums(shape)) * number(own.step_rows * own.positions);
    const double issued = multiply_adds + v_loads + u_loads * (own.sums_bias ? 2 : 1) + 30;
    const double waves = v_loads * number(v_conflicts) + u_loads * number(u_conflicts);
    const double mainloop = number(own.loops_y * own.loops_z) * warps * std::max(issued / 4 / 0.65, waves);
    const Staging of_u = stage(own, own.u_box, problem.output);
    const Staging of_v = stage(own, own.v_box, problem.input);
    const double block = mainloop + (of_u.clocks + of_v.clocks) / 0.9;
    const double latency = 500 + 600 * (of_u.batches + of_v.batches);

    const int64_t by_registers =
        65536 / (own.threads * round_up(std::min<int64_t>(registers(own), most_registers), 8));
    const int64_t by_shared = gpu.shared_bytes_per_multiprocessor / (own.shared_bytes() + 1024);
    own.blocks_wanted =
        std::max<int64_t>(1, std::min({by_registers, by_shared, 2048 / own.threads, int64_t{16}}));
    own.wanted_splits = splits(own.channel_tiles(), gpu.multiprocessors * own.blocks_wanted);
    const int64_t chunks = std::max<int64_t>(1, samples * own.chunks_of_sample());
    const int64_t part_chunks = divide_up(chunks, std::min(chunks, own.wanted_splits));
    const int64_t parts = divide_up(chunks, part_chunks);
    const double of_one = std::ceil(number(own.channel_tiles() * parts) / gpu.multiprocessors);
    const double resident = std::min(of_one, number(own.blocks_wanted));
    const double of_chunk = std::max(block * resident, block / std::min(1.0, warps / 6) + latency);
    // The threads' sums at the end: shuffles and shared memory.
    const double end = 2000 + warps * resident * number(own.sums(shape)) * 16 / 4;
    const double computing =
        std::ceil(of_one / resident) * (number(part_chunks) * of_chunk + end) / gpu.clock();

    const double boxes = number(chunks * own.channel_tiles());
    const auto bytes_of = [](const TensorSpec& spec) {
      return number(element_count(spec.sizes) * byte_size(spec.dtype));
    };
    const double once = bytes_of(problem.input) + bytes_of(problem.output);
    const double of_parts = 2 * number(parts * weights_of(shape)) * 4;
    const double moving =
        (std::max(once, boxes * (of_u.bytes + of_v.bytes) / 1.4) + of_parts) / (0.75 * gpu.bytes_per_second);
    // The second launch: its loads follow each other.
    constexpr int64_t at_once = sum_threads / 32 * 8;
    const double adding = 5e-6 + 1e-6 * std::ceil(number(parts) / number(at_once));
    // 31 drawn problems took 0.9 to 1.8 times as long as this without the factor, 1.3 on average.
    own.seconds = 1.3 * (std::max(computing, moving) + 0.25 * std::min(computing, moving) + adding);
  }

  // Parts for each tile of channels, so that few blocks of the last round are missing.
  static int64_t splits(int64_t tiles, int64_t resident) {
    int64_t best = 1;
    double most = 0;
    for (int64_t rounds = 1; rounds <= 4; ++rounds) {
      const int64_t own = std::max<int64_t>(1, resident * rounds / tiles);
      const double filled = number(tiles * own) / number(divide_up(tiles * own, resident) * resident);
      if (filled <= most + 0.03) continue;
      most = filled;
      best = own;
    }
    return best;
  }
};

NarrowGradientNumbers::NarrowGradientNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu,
                                             bool adds_bias)
    : sums_bias(adds_bias) {
  u_box.interleaved = lies_interleaved(problem.output);
  v_box.interleaved = lies_interleaved(problem.input);
  const Search search(problem, shape, gpu);
  const NarrowGradientNumbers empty = *this;
  NarrowGradientNumbers best = empty;
  const auto taps = [](int64_t kernel) {
    std::vector<int64_t> counts{kernel};
    if (kernel > 3) counts.push_back(divide_up(kernel, 2));
    if (kernel > 1) counts.push_back(1);
    return counts;
  };
  for (const int64_t of_u : {1, 2, 4, 8}) {
    if (of_u >= 2 * shape.channels) break;
    for (const int64_t of_v : {1, 2, 4, 8}) {
      if (of_v >= 2 * shape.in_channels) break;
      for (const int64_t of_z : taps(shape.axes[0].kernel)) {
        for (const int64_t of_y : taps(shape.axes[1].kernel)) {
          NarrowGradientNumbers own = empty;
          own.u = of_u;
          own.v = of_v;
          own.taps_z = of_z;
          own.taps_y = of_y;
          if (own.sums(shape) > most_sums) continue;
          for (const int64_t x : {1, 2, 4, 8}) {
            for (const int64_t y : {1, 2, 4}) {
              own.positions = x;
              own.step_rows = y;
              if ((x > 1 && x >= 2 * shape.axes[2].out) || y > shape.axes[1].out ||
                  of_u * x * y > most_held || own.weight_sums(shape) * x * y > most_unrolled ||
                  (y > 1 && of_y == 1))
                continue;
              for (const int64_t most : {128, 256}) search.try_slots(best, own, most);
            }
          }
        }
      }
    }
  }
  *this = best;
}

std::string NarrowGradientNumbers::source(const ThinShape& shape) const {
  const auto side = [&](const StagedBox& box) {
    const bool vectors = box.interleaved && box.vector > 1 && (groups == 1 || box.channels == 1) &&
                         box.strides[2] % vector_elements == 0;
    // What NarrowTypes asks of a tile: one of the box, of all channels that are staged.
    return Constants()
        .add("threads", threads, "slots", lanes() * items(), "groups", groups, "inputs", box.channels)
        .add("outputs", 1, "output_slots", 1, "positions", positions, "rows", step_rows * loops_y)
        .add("slots_z", slots[0] * loops_z, "slots_y", slots[1], "slots_x", slots[2])
        .add("tiles_z", tiles[0], "tiles_y", tiles[1], "tiles_x", tiles[2])
        .add("group_tiles", 1, "output_tiles", 1)
        .flag("input_interleaved", box.interleaved, "stages_vectors", vectors)
        .add("input_vector", box.vector, "stage_lanes", box.lanes)
        .add("window_size_z", box.size[0], "window_size_y", box.size[1], "window_size_x", box.size[2])
        .add("window_z", box.strides[0], "window_y", box.strides[1], "window_x", box.strides[2])
        .add("window_c", box.c, "window_g", box.g, "window_floats", box.floats, "skew", box.skew)
        .add("first_x", box.first_x, "lead", box.lowest_x - box.first_x);
  };
  Constants own = side(v_box);
  own.add("u", u, "v", v, "taps_z", taps_z, "taps_y", taps_y)
      .add("u_slots", u_slots, "v_slots", v_slots, "tap_slots_z", tap_slots_z, "tap_slots_y", tap_slots_y)
      .add("lanes_z", slots[0], "lanes_y", slots[1], "lanes_x", slots[2])
      .add("step_rows", step_rows, "loops_z", loops_z, "loops_y", loops_y, "segment", segment)
      .add("tree", tree, "batch", batch, "fold_chunks", fold_chunks)
      .add("weight_group_tiles", group_tiles, "u_tiles", u_tiles, "v_tiles", v_tiles)
      .add("weights", weights_of(shape))
      .flag("sums_bias", sums_bias);
  return own.numbers() + "struct OutputNumbers {\n" + side(u_box).text() + "};\n";
}

std::shared_ptr<const NarrowGradientNumbers> narrow_gradient_numbers(const BackwardProblem& problem) {
  return searched<NarrowGradientNumbers>(problem, 0, [&] {
    const Conv& conv = *problem.forward.block.conv();
    const Problem own = weight_gradient_problem(problem);
    const bool adds_bias = !conv.transposed && conv.bias && problem.wants_parameter(1);
    return NarrowGradientNumbers(own, ThinShape(own), gpu_of(own.device), adds_bias);
  });
}

}  // namespace onepass::cuda
