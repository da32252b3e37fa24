// What searches for tiles of cells share.
#include "cuda/direct/cell_tile.h"

#include <algorithm>
#include <cmath>

#include "cuda/direct/cell_row.h"
#include "cuda/direct/row_copy.h"

namespace onepass::cuda {

CellReach::CellReach(const ThinAxis& axis) {
  bool is_first = true;
  for (const ThinAxis::Class& own : axis.classes) {
    taps += static_cast<double>(own.count) / static_cast<double>(axis.classes.size());
    most_taps = std::max(most_taps, own.count);
    if (own.count == 0) continue;
    const int64_t last = own.base + (own.count - 1) * axis.delta;
    const auto [low, high] = std::minmax(own.base, last);
    lowest = is_first ? low : std::min(lowest, low);
    highest = is_first ? high : std::max(highest, high);
    distance = std::max(distance, high - low);
    is_first = false;
  }
}

CellSearch::CellSearch(const Problem& of, const ThinShape& its_shape, const Gpu& on)
    : problem(of),
      shape(its_shape),
      gpu(on),
      samples(CutFor::instead_of(its_shape.samples)),
      reach{CellReach(shape.axes[0]), CellReach(shape.axes[1]), CellReach(shape.axes[2])},
      x_classes(std::ssize(shape.axes[2].classes)) {
  for (size_t d = 0; d < 3; ++d) cells[d] = divide_up(shape.axes[d].out, std::ssize(shape.axes[d].classes));
  const auto along = [](const TensorSpec& spec) {
    return lies_interleaved(spec) ? size_t{1} : spec.sizes.size() - 1;
  };
  input_aligned = is_aligned_except(problem.input, along(problem.input));
  output_aligned = is_aligned_except(problem.output, along(problem.output));
  for (const int index : shape.parts.tensor_parameters())
    output_aligned &=
        is_aligned_except(problem.parameters[static_cast<size_t>(index)], along(problem.output));
  chain_stages = static_cast<double>(shape.parts.after.size());
}

void CellSearch::set_counts(CellTile& own) const {
  own.classes = 1;
  for (size_t d = 0; d < 3; ++d) {
    own.tiles[d] = divide_up(cells[d], own.cells(d));
    if (d < 2) own.classes *= std::ssize(shape.axes[d].classes);
  }
  own.group_tiles = divide_up(shape.conv_groups, own.groups);
  own.output_tiles = divide_up(shape.channels, own.tile_outputs());
}

int64_t CellSearch::channel_vector(const TensorSpec& spec, int64_t own, int64_t all, int64_t most) {
  for (int64_t vector = most; vector > 1; vector /= 2) {
    bool fits = spec.strides[1] == 1 && own % vector == 0 && all % vector == 0;
    for (size_t d = 0; d < spec.sizes.size(); ++d)
      fits &= d == 1 || spec.sizes[d] == 1 || spec.strides[d] % vector == 0;
    if (fits) return vector;
  }
  return 1;
}

int64_t CellSearch::channel_vector(const CellTile& own, int64_t most) const {
  if (own.groups > 1 && own.inputs != shape.in_channels) return 1;
  return own.groups > 1 ? channel_vector(problem.input, own.groups * shape.in_channels,
                                         shape.conv_groups * shape.in_channels, most)
                        : channel_vector(problem.input, own.inputs, shape.in_channels, most);
}

int64_t CellSearch::output_channel_vector(const CellTile& own, int64_t most) const {
  return own.groups > 1
             ? channel_vector(problem.output, own.channels(), shape.conv_groups * shape.channels, most)
             : channel_vector(problem.output, own.tile_outputs(), shape.channels, most);
}

int64_t CellSearch::output_vector(const CellTile& own) const {
  const auto divides = [](int64_t count) { return count % vector_elements == 0; };
  bool fits = output_aligned;
  if (own.output_interleaved) {
    fits &= own.groups > 1
                ? divides(own.groups * shape.channels) && divides(shape.conv_groups * shape.channels)
                : divides(own.tile_outputs()) && divides(shape.channels);
  } else {
    fits &= divides(shape.axes[2].out) && divides(own.cells(2) * x_classes);
  }
  return fits ? vector_elements : 1;
}

double CellSearch::bytes_of(const TensorSpec& spec) const {
  const Shape sizes(spec.sizes.begin() + 1, spec.sizes.end());
  return static_cast<double>(samples) * static_cast<double>(element_count(sizes) * byte_size(spec.dtype));
}

void CellSearch::count_traffic(CellTile& own, double staged, double blocks) const {
  const auto sectors = [](int64_t elements, int64_t bytes, bool whole, bool aligned) {
    const auto run = static_cast<double>(elements * bytes);
    return whole ? 1.0 : aligned ? std::ceil(run / 32) * 32 / run : (run + 32) / run;
  };
  const int64_t in_bytes = byte_size(problem.input.dtype);
  const int64_t out_bytes = byte_size(problem.output.dtype);
  const double read =
      blocks * staged * static_cast<double>(in_bytes) *
      (own.input_interleaved
           ? sectors(own.groups * own.inputs, in_bytes,
                     own.groups * own.inputs == shape.conv_groups * shape.in_channels, own.input_vector > 1)
           : sectors(own.window[2], in_bytes, false, own.input_vector > 1));
  const double once = bytes_of(problem.input);
  const double written = bytes_of(problem.output);
  const double stored =
      written *
      (own.output_interleaved
           ? sectors(own.channels(), out_bytes, own.channels() == shape.conv_groups * shape.channels,
                     own.output_vector > 1)
           : sectors(own.cells(2) * x_classes, out_bytes, own.tiles[2] == 1, own.output_vector > 1));
  const double tensors = written * static_cast<double>(shape.parts.tensor_parameters().size());
  own.traffic = {
      .bytes = once + written + tensors, .read = read + tensors, .written = written, .stored = stored};
}

double CellTile::moving_seconds(const Problem& problem, const Gpu& gpu) const {
  // Rows that are written by elements touch one more sector with each instruction: 8 to 32 channels k1 with
  // rows of 493 floats took 224 us, and 137 were predicted without.
  const auto run = static_cast<double>(store_lanes * byte_size(problem.output.dtype));
  const double stored =
      !output_interleaved && output_vector == 1 ? traffic.written * (run + 32) / run : traffic.stored;
  // Halos and parts of sectors are of L2.
  return std::max(traffic.bytes, (traffic.read + stored) / 1.4) / (0.75 * gpu.bytes_per_second);
}

void describe_tile(std::ostringstream& out, const CellTile& tile) {
  out << "tile: " << tile.groups << " groups, " << tile.tile_outputs() << " channels each, a box of "
      << tile.cells(0) << "x" << tile.cells(1) << "x" << tile.cells(2) << " cells, " << tile.tiles_of_sample()
      << " tiles a sample\n";
}

Problem cell_problem(const Problem& problem) {
  const TailParts parts(problem.block, problem.input.sizes);
  if (parts.norm == nullptr && !parts.mean) return problem;
  return convolution_before_tail(problem);
}

Constants CellTile::constants() const {
  Constants all;
  all.add("threads", threads, "groups", groups, "outputs", outputs, "output_slots", output_slots)
      .add("positions", positions, "rows", rows)
      .add("slots_z", slots[0], "slots_y", slots[1], "slots_x", slots[2], "inputs", inputs)
      .add("tiles_z", tiles[0], "tiles_y", tiles[1], "tiles_x", tiles[2])
      .add("group_tiles", group_tiles, "output_tiles", output_tiles)
      .flag("input_interleaved", input_interleaved, "output_interleaved", output_interleaved)
      .add("input_vector", input_vector, "output_vector", output_vector, "store_lanes", store_lanes)
      .add("window_size_z", window[0], "window_size_y", window[1], "window_size_x", window[2])
      .add("window_z", window_strides[0], "window_y", window_strides[1], "window_x", window_strides[2])
      .add("window_c", window_c, "window_g", window_g, "first_x", first_x)
      .add("result_z", result_strides[0], "result_y", result_strides[1], "result_x", result_strides[2])
      .add("result_c", result_c, "result_skew", result_skew);
  return all;
}

}  // namespace onepass::cuda
