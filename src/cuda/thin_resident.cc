// The row "thin_resident": a thin convolution with chains and norm on tensor cores, computed once, its slabs
// in the shared memory of a cluster until they are normalised.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "cuda/thin_mma.h"

namespace onepass {
namespace cuda {
namespace {

int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }
double number(int64_t n) { return static_cast<double>(n); }

// How a sample is spread over clusters; nothing here depends on the batch.
struct ResidentNumbers : MmaNumbers {
  int64_t unit_channels = 0;      // of a cluster: whole slabs
  int64_t sets = 1;               // of so many channels
  int64_t blocks = 0;             // of a cluster; 0: a unit does not fit
  int64_t of_multiprocessor = 1;  // blocks that it is to have room for
  int64_t part_z = 1, part_y = 1, part_x = 1;
  int64_t run_pitch = 0, held_pitch = 0, all_bytes = 0;
  int64_t output_piece = 1;  // neighbouring channels stored at once
  bool channels_last = false;

  ResidentNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu)
      : MmaNumbers(problem, shape, gpu) {
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

  std::string source() const {
    return MmaNumbers::source(Constants()
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
                                  .text());
  }

  int64_t part_tiles() const { return part_z * part_y * part_x; }

  // Instructions of a warp for a tile, and of a block for what it stores.
  double keep_instructions(const ThinShape& shape) const {
    const double spans = number(tile_y * tile_x) / 8;
    const double convolution = span_instructions(shape);
    const double outputs = span_outputs(shape) * (before_instructions(shape) + 6);
    return 350 + window_instructions(shape) + (prefetches ? 0 : 500) +
           number(row_tiles) * (spans * (convolution + outputs) + convolution + 100);
  }
  double store_instructions(const ThinShape& shape) const {
    return number(unit_channels * held_pitch) / 32 * (chain_instructions(shape.parts.after) + 3);
  }

  // Seconds for so many samples.
  double seconds(const ThinShape& shape, const Gpu& gpu, int64_t batch) const {
    // Clusters of 16 and of 8 leave multiprocessors without one.
    const double share = blocks > 8 ? 0.85 : blocks > 4 ? 0.91 : 1.0;
    const double places = gpu.multiprocessors * share;
    const double all_blocks = number(batch * sets * blocks);
    const double of_place = std::max(1.0, all_blocks / places);  // one after the other, or side by side
    const double side_by_side = std::min(number(of_multiprocessor), of_place);
    const double instructions =
        number(divide_up(part_tiles(), warps()) * warps()) * keep_instructions(shape) +
        store_instructions(shape);
    // Issue slots that are taken, of four a clock.
    const double taken = 4 * std::min(0.5, 0.035 * number(warps()) * side_by_side);
    // Until sums are exchanged and windows are there.
    const double waits = 2.5e-6;
    return of_place * instructions / (taken * gpu.clock()) + waits * std::ceil(of_place / side_by_side);
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

  // Tiles, parts and clusters: what takes least for a few samples. `blocks` stays 0 where nothing fits.
  void cut(const ThinShape& shape, const Gpu& gpu, int64_t width) {
    ResidentNumbers best = *this;
    double least = 0;
    const auto cells = [&](size_t d) {
      return divide_up(shape.axes[d].out, std::ssize(shape.axes[d].classes));
    };
    struct Residence {
      int64_t threads, blocks;
    };
    const auto take = [&](int64_t budget) {
      if (!lay(shape, width, budget)) return;
      constexpr int64_t some_samples = 8;
      const double cost = seconds(shape, gpu, some_samples);
      if (best.blocks > 0 && cost >= least) return;
      best = *this;
      least = cost;
    };
    for (const auto& [of_block, at_once] : {Residence{256, 2}, Residence{512, 1}, Residence{256, 1}}) {
      threads = of_block;
      of_multiprocessor = at_once;
      const int64_t budget =
          std::min(gpu.shared_bytes_per_block, gpu.shared_bytes_per_multiprocessor / at_once - 1024);
      const int64_t item_x = 8 * spans_x;
      for (int64_t pieces = 1; pieces <= divide_up(cells(2), item_x); pieces *= 2) {
        tile_x = round_up(divide_up(cells(2), pieces), item_x);
        tiles_x = divide_up(cells(2), tile_x);
        for (tile_y = spans_y; tile_y < 2 * round_up(cells(1), spans_y) && tile_y <= 32; tile_y *= 2) {
          tiles_y = divide_up(cells(1), tile_y);
          tiles = cells(0) * tiles_y * tiles_x;
          stage_y = tile_y;
          lay_window(shape, tile_y, tile_x);
          for (const bool sends_early : {false, true}) {
            prefetches = sends_early;
            if (!windows_fit(shape, budget)) continue;
            const int64_t most = gpu.largest_cluster();
            for (int64_t along_z = 1; along_z <= std::min(most, cells(0)); ++along_z) {
              part_z = divide_up(cells(0), along_z);
              for (int64_t along = 1; along <= std::min(most / along_z, tiles_y > 1 ? tiles_y : tiles_x);
                   ++along) {
                part_y = tiles_y > 1 ? divide_up(tiles_y, along) : 1;
                part_x = tiles_y > 1 || shape.axes[1].out > 1 ? tiles_x : divide_up(tiles_x, along);
                take(budget);
              }
            }
          }
        }
      }
    }
    *this = best;
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

  // How a part is held; whether it fits.
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
    all_bytes = round_up(shared_bytes, 16) + warps() * row_tiles * 16 * 3 * 4 +
                2 * (unit_channels / group_channels) * 3 * 4 + unit_channels * 2 * 4 + 64 +
                unit_channels * held_pitch * 4;
    return all_bytes <= budget;
  }
};

class ThinResident final : public Kernel {
 public:
  explicit ThinResident(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        numbers_(problem, shape_, gpu_of(problem.device)),
        function_(source(), problem.device, launch_numbers()),
        // Clusters of one set of channels take one sample after the other.
        samples_at_once_(clamp(function_.resident_clusters() / numbers_.sets, 1, maximum(1, shape_.batch))
                             .called("samples_at_once")),
        blocks_(samples_at_once_ * (numbers_.sets * numbers_.blocks)) {}

  size_t workspace_bytes() const override { return 0; }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms, " << numbers_.products << " products of "
        << shape_.classes() << (shape_.classes() == 1 ? " class" : " classes") << ", "
        << (numbers_.splits                         ? "operands split in two"
            : problem_.precision == Precision::tf32 ? "operands rounded to tf32"
                                                    : "operands as they are")
        << '\n'
        << "unit: " << numbers_.unit_channels << " channels of a sample in the shared memory of "
        << numbers_.blocks << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "part: " << numbers_.part_z << " x " << numbers_.part_y << " x " << numbers_.part_x << " tiles of "
        << numbers_.tile_y << " rows of " << numbers_.tile_x << " cells\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  void launch(const Arguments& arguments, void*, Stream stream) const override {
    if (shape_.batch == 0) return;
    Words words;
    words.add(arguments.input);
    words.add(arguments.output);
    words.add(arguments.statistics);
    for (int unused = 0; unused < 5; ++unused) words.add(nullptr);
    words.add(shape_.batch);
    words.add(samples_at_once_);
    words.add(int64_t{0});
    words.add(arguments.parameters);
    words.launch(function_, stream, blocks_);
  }

 private:
  Source source() const {
    std::string rest;
    if (numbers_.pairs) {
      const std::vector<TailParts::Stage>& before = shape_.parts.before;
      rest = chain_source("BeforeRest", {before.begin() + 1, before.end()}, problem_);
    }
    return {"onepass_thin_resident",
            "#include \"thin_resident.cuh\"\n" + tail_source(problem_) + rest +
                thin_source(problem_, shape_) + numbers_.source() +
                "using Agent = onepass::ThinResident<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads) + ", " + std::to_string(512 / numbers_.threads) +
                ") onepass_thin_resident(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char shared[];\n" +
                wait_source() +
                "  Agent(p, *reinterpret_cast<Agent::Shared*>(shared)).run();\n"
                "}\n"};
  }

  Launch launch_numbers() const {
    return {static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.threads),
            static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.all_bytes),
            false,
            true};
  }

  Problem problem_;
  ThinShape shape_;
  ResidentNumbers numbers_;
  Function function_;
  Number samples_at_once_;
  Number blocks_;
};

std::string refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.parts.mean) return "the block ends in a mean";
  for (const TailParts::Stage& stage : shape.parts.before) {
    const std::vector<int> tensors = shape.parts.tensor_parameters();
    if (std::find(tensors.begin(), tensors.end(), stage.parameter) != tensors.end())
      return "a stage before the norm reads a tensor";
  }
  if (!is_dense(problem.output, Layout::nchw) && !is_dense(problem.output, Layout::nhwc))
    return "the output does not lie dense with channels before or after space";
  const Gpu& gpu = gpu_of(problem.device);
  const ResidentNumbers numbers(problem, shape, gpu);
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
  const ResidentNumbers numbers(problem, shape, gpu);
  const double bytes = static_cast<double>(problem.output.byte_span()) +
                       static_cast<double>(problem.input.byte_span()) * number(numbers.sets);
  return 5e-6 + numbers.seconds(shape, gpu, shape.batch) + bytes / gpu.bytes_per_second;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_thin_resident{
    "thin_resident", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::ThinResident>(problem);
    }};

}  // namespace onepass
