// How the row "thin_wgmma" cuts a unit of samples into tiles: a search by counted clocks.
#include "cuda/thin/wgmma.h"

#include <algorithm>
#include <optional>

#include "cuda/struct_bytes.h"

namespace onepass::cuda::wgmma {
namespace {

// The stride of the spatial dimension whose neighbours are nearest.
int64_t nearest_stride(const TensorSpec& spec) {
  return *std::min_element(spec.strides.begin() + 2, spec.strides.end());
}

}  // namespace

WgmmaNumbers::WgmmaNumbers(const Problem& problem, const ThinShape& shape) {
  const auto& [outer, middle, last] = shape.axes;
  const OperandParts parts(problem, shape);
  input_parts = parts.input;
  weight_parts = parts.weight;
  may_dither =
      problem.numerics == Numerics::fast && problem.precision == Precision::tf32 && averages_out(shape);
  channel_blocks =
      std::min(divide_up(shape.channels, block_rows), std::max<int64_t>(1, product_blocks / outer.kernel));
  choose_core(shape);
  columns_lie_near =
      ThinShape::spatial_stride(problem.input, shape.order[2]) == nearest_stride(problem.input);
  row_bytes = vector_row_bytes(problem, shape);
  WgmmaNumbers best = *this;  // of those that fit; the last one tried is the smallest
  bool any = false;
  const int64_t most = input_parts == 2 ? 13 : 16;  // accumulators that registers have room for
  const int64_t most_bytes = gpu_of(problem.device).shared_bytes_per_block;
  for (const int64_t of_sample : {8, 4, 2, 1}) {
    for (const int64_t rows : {4, 2, 1}) {
      for (int64_t width = std::min(most, last.out); width >= 1; --width) {
        WgmmaNumbers other = *this;
        other.cut(shape, most_bytes, of_sample, rows, width);
        const bool fits = other.shared_bytes <= most_bytes && other.copies(shape) <= 32;
        // A unit of one sample is the smallest: others gain only where that wastes rows.
        other.clocks *= 1.0 + 0.1 * static_cast<double>(other.samples() - 1);
        if (fits ? !any || other.clocks < best.clocks : !any) best = other;
        any |= fits;
      }
    }
  }
  const int64_t batch = representative(shape.batch.value());
  if (any && shape.passes() == 1 && batch > 0) share_units(problem, shape, batch, best);
  *this = best;
  if (this->parts() == 1) shared_bytes = bytes_of_shared(shape, weight_rows, 1);
}

int64_t WgmmaNumbers::bytes_of_shared(const ThinShape& shape, int64_t rows, int64_t part_slots) const {
  const int64_t steps = divide_up(cores_with(shape, core_channels, core_rows, core_columns), 2);
  const int64_t plane_units = shape.in_channels / core_channels * starts * row_units;
  const int64_t channel_tiles = divide_up(shape.channels, block_rows * channel_blocks);
  const int64_t all_channels = channel_tiles * channel_blocks * block_rows;
  return StructBytes()
      .add(planes * input_parts * plane_units * 16, 16)               // x
      .add(channel_tiles * steps * weight_parts * 2 * rows * 16, 16)  // weight
      .add((2 * planes + 1) * 8, 8)                                   // full, empty, prepared
      .add(2 * all_channels * 4, 4)                                   // unscale, bias
      .add(consumers / 32 * slots * 3 * 4, 4)                         // scratch
      .add(slots * 2 * 4, 4)                                          // moments
      .add(part_slots * 3 * 4, 4)                                     // part
      .add(shape.in_channels * samples() * 4, 4)                      // largest
      .add(2 * 4, 4)                                                  // redo, arrived
      .add(consumers / 128, 1)                                        // group_is_last
      .total();
}

double WgmmaNumbers::all_clocks(const ThinShape& shape, int64_t batch, const Gpu& gpu) const {
  const int64_t units = divide_up(batch, samples());
  // Clusters do not fill a GPC: an H200 runs 31 of 4 blocks, 15 of 8 and 7 of 16 at a time.
  const int64_t unfilled = parts() >= 8 ? 1 : parts() == 4 ? 2 : 0;
  const int64_t clusters = std::max<int64_t>(1, gpu.multiprocessors / parts() - unfilled);
  const int64_t planes_of_part = divide_up(shape.axes[0].out, plane_parts) + shape.axes[0].kernel - 1;
  const int64_t channel_tiles = divide_up(shape.channels, block_rows * channel_blocks);
  const int64_t tiles_of_part = tiles / tile_parts;
  const double of_part = static_cast<double>(channel_tiles * tiles_of_part * planes_of_part) *
                         (plane_clocks - spared_clocks(shape, planes_of_part));
  // The first plane arrives late, and blocks of a cluster wait for each other.
  const double waiting = parts() > 1 ? 9000 : 1000;
  return static_cast<double>(divide_up(units, clusters)) * (of_part + waiting);
}

void WgmmaNumbers::share_units(const Problem& problem, const ThinShape& shape, int64_t batch,
                               WgmmaNumbers& best) const {
  const Gpu& gpu = gpu_of(problem.device);
  for (int64_t blocks = 2; blocks <= gpu.largest_cluster(); blocks *= 2) {
    for (const int64_t of_sample : {8, 4}) {
      for (const int64_t rows : {4, 2, 1}) {
        for (int64_t width = std::min(best.columns, shape.axes[2].out); width >= 1; --width) {
          WgmmaNumbers other = *this;
          other.cut(shape, gpu.shared_bytes_per_block, of_sample, rows, width);
          if (other.shared_bytes > gpu.shared_bytes_per_block || other.copies(shape) > 32) continue;
          for (other.tile_parts = 1; other.tile_parts <= blocks; other.tile_parts *= 2) {
            other.plane_parts = blocks / other.tile_parts;
            if (other.tiles % other.tile_parts != 0 || other.plane_parts > shape.axes[0].out) continue;
            if (other.all_clocks(shape, batch, gpu) < best.all_clocks(shape, batch, gpu)) best = other;
          }
        }
      }
    }
  }
}

bool WgmmaNumbers::guards(const Problem& problem, const ThinShape& shape) const {
  const auto& [outer, middle, last] = shape.axes;
  const int64_t cores = cores_with(shape, core_channels, core_rows, core_columns);
  return problem.input.dtype == DType::f32 || middle.kernel % core_rows != 0 ||
         last.kernel % core_columns != 0 || cores % 2 != 0;
}

int64_t WgmmaNumbers::vector_row_bytes(const Problem& problem, const ThinShape& shape) {
  const int64_t element = byte_size(problem.input.dtype);
  const int64_t bytes = shape.axes[1].in * element;
  const bool are_vectors =
      std::all_of(problem.input.strides.begin(), problem.input.strides.end(),
                  [&](int64_t stride) { return stride == 1 || stride * element % 16 == 0; });
  const bool lie_near = ThinShape::spatial_stride(problem.input, shape.order[1]) == 1;
  return are_vectors && lie_near && bytes % 16 == 0 && bytes <= 128 ? bytes : 0;
}

void WgmmaNumbers::choose_core(const ThinShape& shape) {
  const auto& [outer, middle, last] = shape.axes;
  std::optional<std::pair<int64_t, int64_t>> best;
  for (int64_t rows = 1; rows <= lanes; rows *= 2) {
    for (int64_t of_channels = 1; rows * of_channels <= lanes; of_channels *= 2) {
      const int64_t wide = lanes / rows / of_channels;
      if (shape.in_channels % of_channels != 0 || (wide > 1 && last.delta != 1)) continue;
      const int64_t kept =
          ((strips - 1) * middle.step + (divide_up(middle.kernel, rows) - 1) * rows * middle.delta + 1) *
          rows;
      const std::pair<int64_t, int64_t> cost{cores_with(shape, of_channels, rows, wide), kept};
      if (best && cost >= *best) continue;
      best = cost;
      core_rows = rows;
      core_columns = wide;
      core_channels = of_channels;
    }
  }
}

void WgmmaNumbers::cut(const ThinShape& shape, int64_t most_bytes, int64_t of_sample, int64_t rows,
                       int64_t width) {
  const auto& [outer, middle, last] = shape.axes;
  row_groups = of_sample;
  lane_rows = divide_up(middle.out, row_groups);
  tile_rows = rows;
  columns = width;
  const int64_t tile_columns = columns * strips / tile_rows;
  column_tiles = divide_up(last.out, tile_columns);
  tiles = column_tiles * divide_up(lane_rows, tile_rows);
  const int64_t middle_cores = divide_up(middle.kernel, core_rows);
  const int64_t last_cores = divide_up(last.kernel, core_columns);
  starts = (tile_rows - 1) * middle.step + (middle_cores - 1) * core_rows * middle.delta + 1;
  window_columns = (tile_columns - 1) * last.step + (last_cores * core_columns - 1) * last.delta + 1;
  const int64_t window_rows = starts + (core_rows - 1) * middle.delta;
  loads_rows = row_bytes > 0 && row_groups == lanes && lane_rows <= tile_rows &&
               shape.in_channels * window_columns <= producers && window_rows * core_rows <= 32;
  // Units of neighbouring rows that are stored at the same time must lie in different banks.
  const int64_t near_channels = std::min<int64_t>(core_channels, 2);
  const bool collide =
      !loads_rows && core_rows > 1 && window_columns * core_rows * core_channels % (2 * near_channels) == 0;
  row_units = window_columns * core_rows * core_channels + (collide ? near_channels : 0);
  slots = samples() * shape.channels;
  const int64_t cores = cores_with(shape, core_channels, core_rows, core_columns);
  const int64_t steps = divide_up(cores, 2);
  const int64_t channel_tiles = divide_up(shape.channels, block_rows * channel_blocks);
  // With what a cluster needs: whether there is one is decided later.
  const auto bytes_with = [&](int64_t all_rows) { return bytes_of_shared(shape, all_rows, slots); };
  const int64_t paired_rows = outer.kernel * product_blocks * block_rows;
  if (may_dither) {
    for (weight_sets = strips; weight_sets > 1 && bytes_with(weight_sets * paired_rows) > most_bytes;)
      weight_sets /= 2;
    dithers =
        weight_sets * outer.kernel >= least_versions && bytes_with(weight_sets * paired_rows) <= most_bytes;
    if (!dithers) weight_sets = 1;
  }
  paired = dithers || (outer.kernel >= 2 && bytes_with(paired_rows) <= most_bytes);
  weight_rows = paired ? weight_sets * paired_rows
                       : ((outer.kernel - 1) * channel_blocks + product_blocks) * block_rows;
  shared_bytes = bytes_with(weight_rows);
  // Clocks of a plane at 1.65 GHz (an H200's at such work). Products take 4 clocks a column of a strip, or
  // the time to read A and B. Tensor cores wait for the epilogue and for the passing on of planes, and for
  // partial sums to be added. Loads that products do not hide come on top: x is loaded again for every
  // channel tile, at a higher price where loads are strided. (4 to 64 channels, kernel 3: 0.198 ms with them;
  // 0.189 without.) H200, s27: 0.184 ms with one product of f32 elements, 0.170 of 16 bits, 0.41 with three.
  const int64_t product_clocks = std::max(4 * columns, 16 + 2 * columns);
  const int64_t loaded_rows = shape.in_channels * std::min(window_rows, lane_rows * middle.step);
  const int64_t other_clocks = 250 + (input_parts == 2 ? 45 : 30) * columns +
                               (columns_lie_near ? 0 : 3 * (channel_tiles - 1) * loaded_rows) +
                               std::max<int64_t>(0, 27 * (loaded_rows - 16));
  plane_clocks = static_cast<double>(steps * products() * strips * product_clocks + other_clocks);
  const int64_t window_planes = outer.out + outer.kernel - 1;
  clocks = static_cast<double>(channel_tiles * tiles * window_planes) *
           (plane_clocks - spared_clocks(shape, window_planes)) / static_cast<double>(samples());
}

std::string WgmmaNumbers::source() const {
  return Constants()
      .add("threads", threads())
      .add("consumers", consumers)
      .add("producers", producers)
      .add("warps", consumers / 32)
      .add("consumer_registers", consumer_registers())
      .add("producer_registers", producer_registers())
      .add("most_elements", most_elements())
      .add("row_groups", row_groups)
      .add("lane_rows", lane_rows)
      .add("tile_rows", tile_rows)
      .add("columns", columns)
      .add("strips", strips)
      .add("column_tiles", column_tiles)
      .add("tiles", tiles)
      .add("core_rows", core_rows)
      .add("core_columns", core_columns)
      .add("core_channels", core_channels)
      .add("starts", starts)
      .add("window_columns", window_columns)
      .add("row_units", row_units)
      .add("planes", planes)
      .add("channel_blocks", channel_blocks)
      .add("input_parts", input_parts)
      .add("weight_parts", weight_parts)
      .add("slots", slots)
      .add("tile_parts", tile_parts)
      .add("plane_parts", plane_parts)
      .add("weight_sets", weight_sets)
      .flag("paired", paired)
      .flag("loads_rows", loads_rows)
      .add("most_row_words", most_row_words())
      .flag("dithers", dithers)
      .numbers();
}

int64_t WgmmaNumbers::representative(int64_t batch) {
  if (batch <= 4) return 4;
  if (batch <= 16) return 14;
  return batch <= 64 ? 64 : 0;
}

int64_t WgmmaNumbers::cores_with(const ThinShape& shape, int64_t channels, int64_t rows, int64_t columns) {
  return shape.in_channels / channels * divide_up(shape.axes[1].kernel, rows) *
         divide_up(shape.axes[2].kernel, columns);
}

bool WgmmaNumbers::averages_out(const ThinShape& shape) {
  const ThinAxis& outer = shape.axes[0];
  return outer.kernel >= 2 && outer.out >= 4 * outer.kernel && shape.spatial >= 512;
}

int64_t WgmmaNumbers::copies(const ThinShape& shape) const {
  const ThinAxis& middle = shape.axes[1];
  const int64_t rows = starts + (core_rows - 1) * middle.delta;
  return (1 + (rows - 1) / (lane_rows * middle.step)) * core_rows;
}

double WgmmaNumbers::spared_clocks(const ThinShape& shape, int64_t window_planes) const {
  const bool knows_slots = input_parts == 1 && shape.axes[0].kernel == planes && window_planes % planes == 0;
  return knows_slots ? static_cast<double>(80 + 10 * columns) : 0;
}

double WgmmaNumbers::cost(const ThinShape& shape, const Problem& problem) const {
  const int64_t batch = representative(shape.batch.value());
  return batch > 0 ? all_clocks(shape, batch, gpu_of(problem.device)) : clocks;
}

WgmmaPlan::WgmmaPlan(const Problem& problem) : WgmmaPlan(problem, ThinShape(problem)) {
  const ThinShape own = shape;
  ThinShape::Order order = own.order;
  while (std::next_permutation(order.begin(), order.end())) {
    // A plane is to have whole sectors of memory.
    const int64_t stride = ThinShape::spatial_stride(problem.input, order[0]);
    if (stride > 0 && stride == nearest_stride(problem.input)) continue;
    const WgmmaPlan other(problem, own.reordered(order));
    if (other.refusal(problem).empty() &&
        (!refusal(problem).empty() ||
         other.numbers.cost(other.shape, problem) < numbers.cost(shape, problem)))
      *this = other;
  }
}

std::string WgmmaPlan::refusal(const Problem& problem) const {
  const ThinAxis& outer = shape.axes[0];
  if (outer.step != 1 || outer.delta != 1 || outer.kernel > product_blocks)
    return "no dimension is without stride and dilation and has at most four taps";
  if (numbers.copies(shape) > 32) return "a row of the window is part of too many others";
  if (numbers.shared_bytes > gpu_of(problem.device).shared_bytes_per_block) {
    return "a window and the weights take " + std::to_string(numbers.shared_bytes) +
           " bytes of shared memory";
  }
  return "";
}

}  // namespace onepass::cuda::wgmma
