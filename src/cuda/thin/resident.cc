// The row "thin_resident": a thin convolution with chains and norm on tensor cores. Values are computed once
// and wait in the shared memory of a cluster.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/row_numbers.h"
#include "cuda/runtime/cut_for.h"
#include "cuda/thin/mma.h"

namespace onepass {
namespace cuda {
namespace {

double number(int64_t n) { return static_cast<double>(n); }

// How a sample is spread over clusters.
struct ResidentNumbers : MmaNumbers {
  int64_t unit_channels = 0;      // of a cluster: whole slabs
  int64_t sets = 1;               // of so many channels
  int64_t blocks = 0;             // of a cluster; 0: a unit does not fit
  int64_t of_multiprocessor = 1;  // resident blocks of a multiprocessor
  int64_t part_z = 1, part_y = 1, part_x = 1;
  int64_t run_pitch = 0, held_pitch = 0, all_bytes = 0;
  int64_t output_piece = 1;  // neighbouring channels stored at once
  bool channels_last = false;

  ResidentNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu)
      : MmaNumbers(problem, shape, gpu, Hold::in_cluster) {
    const int64_t group_channels = shape.channels / shape.groups;
    unit_channels = std::min(shape.channels, std::lcm(int64_t{16}, group_channels));
    sets = divide_up(shape.channels, unit_channels);
    row_tiles = divide_up(unit_channels, 16);
    channels_last = interleaved;
    interleaved = overlaps = holds_weights = false;
    piece = 1;  // nothing is put together by warps
    const int64_t width = 16 / byte_size(problem.output.dtype);
    if (channels_last && shape.channels % width == 0 && unit_channels % width == 0) output_piece = width;
    choose_spans(shape);
    cut(shape, gpu, width);
  }

  // Constants of the kernel besides those of MmaNumbers.
  std::string constants() const {
    return Constants()
        .add("blocks", blocks)
        .add("unit_channels", unit_channels)
        .add("part_z", part_z)
        .add("part_y", part_y)
        .add("part_x", part_x)
        .add("run_pitch", run_pitch)
        .add("held_pitch", held_pitch)
        .add("held_floats", unit_channels * held_pitch)
        .add("all_bytes", all_bytes)
        .add("output_piece", output_piece)
        .flag("channels_last", channels_last)
        .text();
  }

  static int64_t cells(const ThinShape& shape, size_t d) {
    return divide_up(shape.axes[d].out, std::ssize(shape.axes[d].classes));
  }
  int64_t part_tiles() const { return part_z * part_y * part_x; }
  // Rows of tiles; of one row, tiles.
  int64_t part_strips(const ThinShape& shape) const {
    return part_z * part_y * (shape.axes[1].out > 1 ? 1 : part_x);
  }

  // Instructions of a warp for a tile.
  double tile_instructions(const ThinShape& shape) const {
    const double spans = number(tile_y * tile_x) / 8;
    // Bank conflicts where neighbouring outputs read every other element.
    const double convolution = span_instructions(shape) * (shape.axes[2].step > 1 ? 2 : 1);
    const double outputs = span_outputs(shape) * (before_instructions(shape) + 8);
    return 500 + window_instructions(shape) + (prefetches ? 0 : 300) +
           number(row_tiles) * (spans * (convolution + outputs) + convolution + 100);
  }

  // The blocks of a cluster are in one GPC: an H200 has seven of 16 multiprocessors and some more.
  int64_t clusters_at_once(const Gpu& gpu, int64_t blocks_at_once) const {
    if (blocks <= 2) return gpu.multiprocessors * blocks_at_once / blocks;
    constexpr int64_t neighbours = 16;
    const int64_t with_clusters = gpu.multiprocessors * 10 / 11;
    return with_clusters / neighbours * (neighbours * blocks_at_once / blocks) +
           with_clusters % neighbours * blocks_at_once / blocks;
  }

  // Seconds for `batch` samples, fitted on an H200. All clusters compute, wait and store at the same time,
  // unless a multiprocessor has two blocks.
  double seconds(const ThinShape& shape, const Gpu& gpu, int64_t batch) const {
    const double units = number(batch * sets);
    const double at_once = std::min(units, number(clusters_at_once(gpu, of_multiprocessor)));
    const bool is_shared = at_once > number(clusters_at_once(gpu, 1));
    const double rounds = std::ceil(units / at_once);
    // Clocks of a warp for an instruction, with so many warps on a scheduler.
    const double warps_at_once =
        number(std::min(warps(), part_tiles())) / 4 * (is_shared ? number(of_multiprocessor) : 1);
    const double clocks = std::max(4.9, 1.6 * warps_at_once);
    const double compute =
        number(divide_up(part_tiles(), warps())) * tile_instructions(shape) * clocks / gpu.clock();
    const double bytes = at_once * number(blocks * unit_channels * held_pitch) * (is_short ? 2 : 4);
    const double store = std::max(3e-7, bytes / gpu.bytes_per_second);
    const double tensors = 1.5e-6 * static_cast<double>(shape.parts.tensor_parameters().size());
    const double strips = number(cells(shape, 0) * tiles_y * (shape.axes[1].out > 1 ? 1 : tiles_x));
    // Sums of all blocks, 32 strips at a time; weights at the beginning.
    const double waits = 4.2e-6 + 5e-7 * std::floor(strips / 32) + tensors;
    const double begin = 4.6e-6 + 1.6e-7 * number(products);
    // One block of 256 threads has twice the registers.
    const double overlap = is_shared ? 0.6 : threads == 256 && of_multiprocessor == 1 ? 0.62 : 0.75;
    return begin + rounds * (waits + overlap * compute + (is_shared ? 0.6 : 0.85) * store);
  }

 private:
  void choose_spans(const ThinShape& shape) {
    const int64_t classes_x = std::ssize(shape.axes[2].classes);
    constexpr int64_t most_products = 128;  // written out one after the other
    spans_x = spans_y = 1;
    if (shape.classes() == 1) {
      spans_y = std::clamp<int64_t>(most_products / std::max<int64_t>(products, 1), 1, splits ? 2 : 4);
      while (spans_y > 1 && (spans_y > shape.axes[1].out || spans_y == 3)) --spans_y;
    }
    if (spans_y == 1 && (!weights_in_registers || shape.classes() > 1) && classes_x <= 2) spans_x = 2;
  }

  // Bits depend on the tile alone. The tile is chosen for few and for many samples together, everything else
  // for the actual batch. `blocks` stays 0 where nothing fits.
  void cut(const ThinShape& shape, const Gpu& gpu, int64_t width) {
    constexpr int64_t few = 4, many = 64;
    const int64_t cells_x = cells(shape, 2), cells_y = cells(shape, 1);
    const ResidentNumbers none = *this;
    ResidentNumbers best = none;
    double least_few = 0, least_many = 0;
    const int64_t item_x = 8 * spans_x;
    for (int64_t pieces = 1; pieces <= divide_up(cells_x, item_x); pieces *= 2) {
      for (int64_t rows = spans_y; rows < 2 * round_up(cells_y, spans_y) && rows <= 32; rows *= 2) {
        ResidentNumbers tile = none;
        tile.lay_tile(shape, rows, round_up(divide_up(cells_x, pieces), item_x));
        const ResidentNumbers for_few = tile.spread(shape, gpu, width, few);
        if (for_few.blocks == 0) continue;
        const double seconds_few = for_few.seconds(shape, gpu, few);
        const double seconds_many = tile.spread(shape, gpu, width, many).seconds(shape, gpu, many);
        if (best.blocks > 0 && seconds_few / least_few + seconds_many / least_many >= 2) continue;
        best = for_few;
        least_few = seconds_few;
        least_many = seconds_many;
      }
    }
    *this = best.blocks > 0 ? best.spread(shape, gpu, width, planned_batch(shape)) : none;
  }

  // Batches up to this one have the same kernel.
  static int64_t planned_batch(const ThinShape& shape) {
    const int64_t batch = CutFor::instead_of(shape.batch);
    int64_t planned = 1;
    while (planned < batch && planned < 256) planned *= 4;
    return planned;
  }

  void lay_tile(const ThinShape& shape, int64_t rows, int64_t cells_of_row) {
    tile_y = stage_y = rows;
    tile_x = cells_of_row;
    tiles_x = divide_up(cells(shape, 2), tile_x);
    tiles_y = divide_up(cells(shape, 1), tile_y);
    tiles = cells(shape, 0) * tiles_y * tiles_x;
    lay_window(shape, tile_y, tile_x);
  }

  // Spreads the tiles over warps, blocks and clusters, at least cost for `batch` samples; `blocks` is 0 where
  // nothing fits.
  ResidentNumbers spread(const ThinShape& shape, const Gpu& gpu, int64_t width, int64_t batch) const {
    ResidentNumbers best = *this;
    best.blocks = 0;
    double least = 0;
    struct Residence {
      int64_t threads, blocks;
    };
    ResidentNumbers own = *this;
    const int64_t planes = cells(shape, 0);
    const int64_t most = gpu.largest_cluster();
    for (const auto& [of_block, at_once] : {Residence{256, 2}, Residence{512, 1}, Residence{256, 1}}) {
      own.threads = of_block;
      own.of_multiprocessor = at_once;
      const int64_t budget =
          std::min(gpu.shared_bytes_per_block, gpu.shared_bytes_per_multiprocessor / at_once - 1024);
      for (const bool sends_early : {false, true}) {
        own.prefetches = sends_early;
        if (!own.windows_fit(shape, budget)) continue;
        for (int64_t along_z = 1; along_z <= std::min(most, planes); ++along_z) {
          own.part_z = divide_up(planes, along_z);
          // Rows of tiles; of one row, its tiles.
          const bool by_row = shape.axes[1].out > 1;
          const int64_t most_along = std::min(most / along_z, by_row ? tiles_y : tiles_x);
          for (int64_t along = 1; along <= most_along; ++along) {
            own.part_y = by_row ? divide_up(tiles_y, along) : 1;
            own.part_x = by_row ? tiles_x : divide_up(tiles_x, along);
            if (!own.lay(shape, width, budget)) continue;
            const double cost = own.seconds(shape, gpu, batch);
            if (best.blocks > 0 && cost >= least) continue;
            best = own;
            least = cost;
          }
        }
      }
    }
    return best;
  }

  bool windows_fit(const ThinShape& shape, int64_t budget) {
    stage_bytes = is_short && vectors && !prefetches
                      ? round_up(shape.in_channels * window_z * window_y * row_pitch * 2, 16)
                      : 16;
    const int64_t moment_bytes = row_tiles * 16 * 3 * 4;
    shared_bytes =
        weight_bytes() + warps() * round_up(stage_bytes + window_bytes(shape) + moment_bytes, 16) + 32;
    return shared_bytes < budget;
  }

  // Lays out the held values of a part; whether they fit.
  bool lay(const ThinShape& shape, int64_t width, int64_t budget) {
    const auto classes = [&](size_t d) { return std::ssize(shape.axes[d].classes); };
    const int64_t parts_x = divide_up(tiles_x, part_x);
    blocks =
        divide_up(divide_up(shape.axes[0].out, classes(0)), part_z) * divide_up(tiles_y, part_y) * parts_x;
    const int64_t planes = part_z * classes(0);
    const int64_t rows = std::min(part_y * tile_y * classes(1), shape.axes[1].out);
    const int64_t length = parts_x > 1 ? part_x * tile_x * classes(2) : rows * shape.axes[2].out;
    if (channels_last) {
      run_pitch = length;
      held_pitch = planes * run_pitch;
      while (held_pitch % 8 != 2) ++held_pitch;  // four channels of eight positions: all banks
    } else {
      run_pitch = round_up(length + width - 1, width);
      held_pitch = planes * run_pitch;
      if (held_pitch % (2 * width) == 0) held_pitch += width;
    }
    const int64_t group_channels = shape.channels / shape.groups;
    const int64_t groups = unit_channels / group_channels;
    all_bytes = round_up(shared_bytes, 16) + 2 * part_strips(shape) * groups * 16 +
                part_tiles() * groups * 12 + unit_channels * 4 * 4 + 64 + unit_channels * held_pitch * 4;
    return all_bytes <= budget;
  }
};

std::shared_ptr<const ResidentNumbers> numbers_of(const Problem& problem, const ThinShape& shape) {
  return searched<ResidentNumbers>(problem, CutFor::instead_of(0),
                                   [&] { return ResidentNumbers(problem, shape, gpu_of(problem.device)); });
}

class ThinResident final : public WholeBlockKernel {
 public:
  explicit ThinResident(const Problem& problem)
      : WholeBlockKernel(problem),
        numbers_(*numbers_of(problem, shape_)),
        function_(source(), problem.device, launch_numbers()),
        blocks_(clusters() * numbers_.blocks) {}

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override { return 0; }

  std::string describe() const override {
    std::ostringstream out;
    out << numbers_.describe_convolution(problem_, shape_) << '\n'
        << "unit: " << numbers_.unit_channels << " channels of a sample in the shared memory of "
        << numbers_.blocks << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "part: " << numbers_.part_z << " x " << numbers_.part_y << " x " << numbers_.part_x << " tiles of "
        << numbers_.tile_y << " rows of " << numbers_.tile_x << " cells\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_rounding(problem_) +
           notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void*, Stream stream) const override {
    if (shape_.batch == 0) return;
    ThinClusterParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.statistics = arguments.statistics;
    p.batch = shape_.batch;
    p.parameter = arguments.parameters;
    p.launch(function_, stream, blocks_);
  }

 private:
  // No more clusters than have a unit in every round. Where possible none has units of two sets.
  Number clusters() const {
    const Number units = maximum(1, shape_.batch * numbers_.sets).called("units");
    const Number resident = maximum(1, function_.resident_clusters()).called("clusters_at_once");
    const Number rounds = divide_up(units, resident);
    return minimum(resident, round_up(divide_up(units, rounds), numbers_.sets));
  }

  Source source() const {
    return mma_source(Hold::in_cluster, problem_, shape_, numbers_,
                      tail_source(problem_, bits_of(problem_, problem_.output.dtype)), numbers_.constants(),
                      numbers_.of_multiprocessor);
  }

  Launch launch_numbers() const {
    return {static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.threads),
            static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.all_bytes),
            false,
            true};
  }

  ResidentNumbers numbers_;
  Function function_;
  Number blocks_;
};

std::string refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  reason = computed_once_refusal(shape);
  if (!reason.empty()) return reason;
  if (!is_dense(problem.output, Layout::nchw) && !is_dense(problem.output, Layout::nhwc))
    return "the output does not lie dense with channels before or after space";
  const Gpu& gpu = gpu_of(problem.device);
  const std::shared_ptr<const ResidentNumbers> found = numbers_of(problem, shape);
  const ResidentNumbers& numbers = *found;
  constexpr int64_t most_products = 256;
  if (numbers.products > most_products)
    return std::to_string(numbers.products) + " products of 8 cells, more than " +
           std::to_string(most_products);
  if (numbers.blocks == 0) {
    return std::to_string(numbers.unit_channels) + " channels of " + std::to_string(shape.spatial) +
           " elements, which are whole slabs, do not fit the shared memory of " +
           std::to_string(gpu.largest_cluster()) + (gpu.largest_cluster() > 1 ? " blocks" : " block");
  }
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const std::shared_ptr<const ResidentNumbers> numbers = numbers_of(problem, shape);
  // 16-bit elements are two of a word: 1 to 1.3 times the count.
  return (numbers->is_short ? 1.15 : 1.0) * numbers->seconds(shape, gpu, shape.batch) +
         static_cast<double>(problem.input.byte_span()) / gpu.bytes_per_second;
}

}  // namespace
}  // namespace cuda

extern constexpr Strategy cuda_thin_resident =
    cuda::row_of<cuda::ThinResident>("thin_resident", cuda::refusal, cuda::seconds);

}  // namespace onepass
