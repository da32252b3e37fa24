// The row "thin_wgmma": a thin convolution whose block ends in a mean, by warpgroup products of sm_90a. An
// input plane is multiplied by all taps of the first dimension at once; only means leave the chip.
#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda/notes.h"
#include "cuda/thin/thin.h"
#include "onepass/cuda.h"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t lanes = 8;
constexpr int64_t strips = 4;       // of a tile: two of a warpgroup
constexpr int64_t consumers = 256;  // threads that multiply
constexpr int64_t producers = 128;  // threads that load
constexpr int64_t block_rows = 16;  // of the accumulators: a warp's
constexpr int64_t product_blocks = 4;
constexpr int64_t least_versions = 6;  // of dithered weights: these are off by a twelfth of a unit at most

// Of the spatial dimension whose neighbours lie nearest.
int64_t nearest_stride(const TensorSpec& spec) {
  return *std::min_element(spec.strides.begin() + 2, spec.strides.end());
}

// How a unit (8 / row_groups samples) is cut into tiles. On the batch depends only whether a cluster shares a
// unit, where there are few of them.
struct WgmmaNumbers {
  int64_t row_groups = lanes;  // lanes of a sample
  int64_t lane_rows = 1;       // output rows of a lane
  int64_t tile_rows = strips;  // of a lane, in a tile: 1, 2 or 4
  int64_t columns = 1;         // of a strip
  int64_t column_tiles = 1;
  int64_t tiles = 1;
  int64_t core_rows = 1;  // taps of the middle dimension in eight terms
  int64_t core_columns = lanes;
  int64_t core_channels = 1;
  int64_t starts = 1;  // rows of the window that a core begins at
  int64_t window_columns = 1;
  int64_t row_units = 1;         // that a row of the window takes
  bool columns_lie_near = true;  // nearest in memory
  int64_t row_bytes = 0;         // of the input: rows that lanes are parts of, where they are vectors
  bool loads_rows = false;       // a thread loads a whole one
  int64_t planes = 4;            // of the ring
  int64_t channel_blocks = 1;
  bool paired = false;  // two warps finish what a plane ends; A is kept for every turn
  int64_t input_parts = 1;
  int64_t weight_parts = 1;
  bool may_dither = false;  // weights of tf32, in "fast" numerics
  bool dithers = false;     // weights are halves that are right on average
  int64_t weight_sets = 1;  // that strips have: dithered weights of other versions
  int64_t slots = 1;
  int64_t tile_parts = 1;   // a cluster's blocks have some of the tiles,
  int64_t plane_parts = 1;  // and some planes of the output
  int64_t shared_bytes = 0;
  double clocks = 0;        // of a sample's pass, by one block
  double plane_clocks = 0;  // of a tile's plane

  WgmmaNumbers(const Problem& problem, const ThinShape& shape) {
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
  }

  int64_t samples() const { return lanes / row_groups; }
  int64_t parts() const { return tile_parts * plane_parts; }

  // The batch that few samples are planned for, so that neighbours have the same kernel and the same bits; 0
  // where they are many.
  static int64_t representative(int64_t batch) {
    if (batch <= 4) return 4;
    if (batch <= 16) return 14;
    return batch <= 64 ? 64 : 0;
  }

  // Of all units, one after the other on each cluster.
  double all_clocks(const ThinShape& shape, int64_t batch, const Gpu& gpu) const {
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

  // Of a plane, where a round of the slots is one of the ring: what its products read is known when the
  // kernel is compiled.
  double spared_clocks(const ThinShape& shape, int64_t window_planes) const {
    const bool knows_slots =
        input_parts == 1 && shape.axes[0].kernel == planes && window_planes % planes == 0;
    return knows_slots ? static_cast<double>(80 + 10 * columns) : 0;
  }

  // By which orders of the dimensions are compared: as the kernel, it is the same for neighbouring batches.
  double cost(const ThinShape& shape, const Problem& problem) const {
    const int64_t batch = representative(shape.batch.value());
    return batch > 0 ? all_clocks(shape, batch, gpu_of(problem.device)) : clocks;
  }

  // A cluster for each unit, of as many blocks as pay.
  void share_units(const Problem& problem, const ThinShape& shape, int64_t batch, WgmmaNumbers& best) const {
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
  int64_t threads() const { return consumers + producers; }
  int64_t products() const { return weight_parts + input_parts - 1; }

  // A launch of 384 threads has 168 registers for each. Parts of sums that are added up need more of them,
  // and leave fewer for elements on their way; two rows of f32 elements need more for these.
  int64_t consumer_registers() const { return input_parts == 2 ? 208 : has_long_rows() ? 192 : 200; }
  int64_t producer_registers() const { return 3 * 168 - 2 * consumer_registers(); }
  int64_t most_elements() const { return input_parts == 2 ? 18 : 36; }
  int64_t most_row_words() const { return input_parts == 2 ? 32 : has_long_rows() ? 64 : 48; }
  // And few enough columns that the others need no more.
  bool has_long_rows() const { return loads_rows && row_bytes > 96 && columns <= 13; }

  // Whether samples may have to be done again: f32 elements may not be halves, and what is not finite must
  // not be multiplied by the zeros that fill up a product.
  bool guards(const Problem& problem, const ThinShape& shape) const {
    const auto& [outer, middle, last] = shape.axes;
    const int64_t cores = cores_with(shape, core_channels, core_rows, core_columns);
    return problem.input.dtype == DType::f32 || middle.kernel % core_rows != 0 ||
           last.kernel % core_columns != 0 || cores % 2 != 0;
  }

  // Whether dithered weights are right on average. The planes that a strip ends take every version of its
  // turns often enough that what they have on average is the exact weight: numbers of times differ by one, so
  // that with four of each weights are off by a sixteenth of a unit of the last place, rounded to nearest by
  // half of one. And there are so many positions that what differs between them, 0.4 units a term, averages
  // out to a fiftieth of one.
  static bool averages_out(const ThinShape& shape) {
    const ThinAxis& outer = shape.axes[0];
    return outer.kernel >= 2 && outer.out >= 4 * outer.kernel && shape.spatial >= 512;
  }

  // What rows of lanes take where a thread can load them by vectors, into 32 registers; else 0.
  static int64_t vector_row_bytes(const Problem& problem, const ThinShape& shape) {
    const int64_t element = byte_size(problem.input.dtype);
    const int64_t bytes = shape.axes[1].in * element;
    const bool are_vectors =
        std::all_of(problem.input.strides.begin(), problem.input.strides.end(),
                    [&](int64_t stride) { return stride == 1 || stride * element % 16 == 0; });
    const bool lie_near = ThinShape::spatial_stride(problem.input, shape.order[1]) == 1;
    return are_vectors && lie_near && bytes % 16 == 0 && bytes <= 128 ? bytes : 0;
  }

  // Of a unit in a plane, as bits of a word.
  int64_t copies(const ThinShape& shape) const {
    const ThinAxis& middle = shape.axes[1];
    const int64_t rows = starts + (core_rows - 1) * middle.delta;
    return (1 + (rows - 1) / (lane_rows * middle.step)) * core_rows;
  }

  // The fewest cores, then the fewest rows kept, some of them more than once. Columns of a core are
  // neighbours.
  void choose_core(const ThinShape& shape) {
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
  static int64_t cores_with(const ThinShape& shape, int64_t channels, int64_t rows, int64_t columns) {
    return shape.in_channels / channels * divide_up(shape.axes[1].kernel, rows) *
           divide_up(shape.axes[2].kernel, columns);
  }

  void cut(const ThinShape& shape, int64_t most_bytes, int64_t of_sample, int64_t rows, int64_t width) {
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
    // Units of neighbouring rows that are stored at a time are not to lie in the same banks.
    const int64_t near_channels = std::min<int64_t>(core_channels, 2);
    const bool collide =
        !loads_rows && core_rows > 1 && window_columns * core_rows * core_channels % (2 * near_channels) == 0;
    row_units = window_columns * core_rows * core_channels + (collide ? near_channels : 0);
    slots = samples() * shape.channels;
    const int64_t cores = cores_with(shape, core_channels, core_rows, core_columns);
    const int64_t steps = divide_up(cores, 2);
    const int64_t plane_units = shape.in_channels / core_channels * starts * row_units;
    const int64_t channel_tiles = divide_up(shape.channels, block_rows * channel_blocks);
    const auto bytes_with = [&](int64_t all_weight_rows) {
      const int64_t weight_units = channel_tiles * steps * weight_parts * 2 * all_weight_rows;
      return 16 * (planes * input_parts * plane_units + weight_units) + 16 * planes +
             4 * (2 * channel_tiles * channel_blocks * block_rows + (consumers / 32 * 3 + 2 + 3) * slots +
                  shape.in_channels * samples()) +
             32;
    };
    const int64_t weight_rows = ((outer.kernel - 1) * channel_blocks + product_blocks) * block_rows;
    const int64_t paired_rows = outer.kernel * product_blocks * block_rows;
    if (may_dither) {
      for (weight_sets = strips; weight_sets > 1 && bytes_with(weight_sets * paired_rows) > most_bytes;)
        weight_sets /= 2;
      dithers =
          weight_sets * outer.kernel >= least_versions && bytes_with(weight_sets * paired_rows) <= most_bytes;
      if (!dithers) weight_sets = 1;
    }
    paired = dithers || (outer.kernel >= 2 && bytes_with(paired_rows) <= most_bytes);
    shared_bytes = bytes_with(paired ? weight_sets * paired_rows : weight_rows);
    // Of a plane, in clocks of 1.65 GHz (an H200's at such work): products, of which a strip's takes 4 a
    // column, or what reading A and B takes; finishing outputs and passing planes on, which tensor cores wait
    // for (an instruction of any warp takes a clock of theirs), and adding up parts of sums; and loads that
    // products do not hide: x comes anew for every channel tile, which strided loads make dearer (4 to 64
    // channels, kernel 3: 0.198 ms with them; once, without, 0.189). H200, s27: 0.184 ms with one product
    // of f32 elements, 0.170 of 16 bits, 0.41 with three.
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

  std::string source() const {
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
};

// D (64 x 8 columns) = A (64 x 16, rows of K) B (16 x 8 columns, rows of N) (+ D).
std::string product_source(int64_t columns, DType type) {
  const std::string half = type == DType::bf16 ? "bf16" : "f16";
  const int64_t count = 4 * columns;
  std::ostringstream out;
  out << "struct Product {\n"
      << "  static __device__ __forceinline__ void multiply(float (&d)[" << count
      << "], onepass::uint64 a, onepass::uint64 b, bool accumulates) {\n"
      << "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %" << count + 2
      << ", 0; wgmma.mma_async.sync.aligned.m64n" << 8 * columns << "k16.f32." << half << '.' << half << " {";
  for (int64_t i = 0; i < count; ++i) out << (i > 0 ? ", %" : "%") << i;
  out << "}, %" << count << ", %" << count + 1 << ", p, 1, 1, 0, 1;}\"\n        : ";
  for (int64_t i = 0; i < count; ++i) out << (i > 0 ? ", " : "") << "\"+f\"(d[" << i << "])";
  out << "\n        : \"l\"(a), \"l\"(b), \"r\"(static_cast<int>(accumulates)));\n  }\n";
  // `so` is the same for a warp. bra.uni says it, for products are serialised where their accumulators are
  // written on a path that the compiler takes for divergent.
  out << "  template <bool first, bool second>\n"
      << "  static __device__ __forceinline__ void begin_where(float (&d)[" << count
      << "], bool so, float a, float b) {\n";
  // The first eight of a warp's rows, the second, or both.
  const auto begin = [&](bool first, bool second) {
    std::vector<int64_t> which;
    for (int64_t i = 0; i < count; ++i) {
      if (i % 4 < 2 ? first : second) which.push_back(i);
    }
    const int64_t number = std::ssize(which);
    out << "    if constexpr (" << (first ? "first" : "!first") << " && " << (second ? "second" : "!second")
        << ")\n      asm volatile(\"{.reg .pred p; setp.eq.b32 p, %" << number << ", 0; @p bra.uni kept_%=; ";
    for (int64_t i = 0; i < number; ++i) {
      const bool of_first = which[static_cast<size_t>(i)] % 4 < 2;
      out << "mov.f32 %" << i << ", %" << number + (of_first ? 1 : 2) << "; ";
    }
    out << "kept_%=: }\"\n        : ";
    for (int64_t i = 0; i < number; ++i)
      out << (i > 0 ? ", " : "") << "\"+f\"(d[" << which[static_cast<size_t>(i)] << "])";
    out << "\n        : \"r\"(static_cast<int>(so)), \"f\"(a), \"f\"(b));\n";
  };
  begin(true, true);
  begin(true, false);
  begin(false, true);
  out << "  }\n};\n";
  return out.str();
}

// Rows of products are taps of the first dimension, columns lanes of the second and positions of the third:
// whichever order of the block's dimensions wastes least of them.
struct WgmmaPlan {
  ThinShape shape;
  WgmmaNumbers numbers;

  explicit WgmmaPlan(const Problem& problem) : WgmmaPlan(problem, ThinShape(problem)) {
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

  std::string refusal(const Problem& problem) const {
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

 private:
  WgmmaPlan(const Problem& problem, ThinShape of) : shape(std::move(of)), numbers(problem, shape) {}
};

class ThinWgmma final : public Kernel {
 public:
  explicit ThinWgmma(const Problem& problem) : ThinWgmma(problem, WgmmaPlan(problem)) {}

 private:
  ThinWgmma(const Problem& problem, const WgmmaPlan& plan)
      : problem_(problem),
        shape_(plan.shape),
        numbers_(plan.numbers),
        function_(source(), problem.device,
                  {numbers_.parts(), static_cast<uint32_t>(numbers_.threads()),
                   static_cast<uint32_t>(numbers_.parts()), static_cast<uint32_t>(numbers_.shared_bytes)}) {
    clusters_ = clamp(divide_up(shape_.batch, numbers_.samples()), 1, function_.resident_clusters());
    blocks_ = clusters_ * numbers_.parts();
    if (numbers_.guards(problem, shape_)) {
      redo_.emplace(problem);
      marks_ = regions_.add((shape_.batch + clusters_) * 4);
    }
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
  }

 public:
  // Weights of f32 are two halves, which have 22 bits, or dithered.
  Accuracy accuracy() const override {
    if (numbers_.dithers) return {.tf32 = Accuracy::Tf32::weights_dithered};
    return OperandParts(problem_, shape_).accuracy();
  }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + (redo_ ? redo_->workspace_bytes() : 0);
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms, " << numbers_.products()
        << " products of 16-bit parts\n"
        << "tile: " << numbers_.samples() << " samples, " << numbers_.row_groups << " x "
        << numbers_.tile_rows << " rows, " << numbers_.columns * strips / numbers_.tile_rows << " columns, "
        << numbers_.tiles << " tiles a unit\n"
        << (numbers_.parts() == 1 ? ""
                                  : "unit: " + std::to_string(numbers_.parts()) + " blocks of a cluster, " +
                                        std::to_string(numbers_.tile_parts) + " by tiles and " +
                                        std::to_string(numbers_.plane_parts) + " by planes\n")
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << shape_.passes() << '\n'
        << (redo_ ? "then: thin_cores for samples that f16 has no room for\n" : "")
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return (numbers_.dithers ? Notes{note::input_rounded, note::weights_dithered}
                             : parts_notes(problem_, shape_)) +
           where(redo_.has_value(), note::redone);
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    const LaunchChain chain;
    void* marks = redo_ ? at(workspace, marks_) : nullptr;
    void* redo_workspace = redo_ ? at(workspace, Region{regions_.total(), 0}) : nullptr;
    ThinParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    p.control = redo_ ? redo_->control(redo_workspace) : nullptr;
    p.parts = nullptr;
    p.sums = nullptr;
    p.only = marks;
    p.guard = nullptr;
    p.batch = shape_.batch;
    p.wave_units = 1;
    p.only_words = clusters_;
    p.redone = nullptr;
    p.parameter = arguments.parameters;
    p.launch(function_, stream, blocks_);
    if (redo_) redo_->launch_marked(arguments, redo_workspace, marks, clusters_, stream);
  }

 private:
  Source source() const {
    const std::string agent = "onepass::ThinWgmma<onepass::Convolution, onepass::Tail, Numbers, Product>";
    return {"onepass_thin_wgmma",
            "#include \"thin/wgmma.cuh\"\n" + tail_source(problem_) + thin_source(problem_, shape_) +
                numbers_.source() + product_source(numbers_.columns, problem_.input.dtype) +
                "using Agent = " + agent +
                ";\n"
                "static_assert(sizeof(Agent::Shared) <= " +
                std::to_string(numbers_.shared_bytes) +
                ");\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads()) +
                ", 1) onepass_thin_wgmma(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char bytes[];\n"
                "  Agent{p, *reinterpret_cast<Agent::Shared*>(bytes)}.run();\n"
                "}\n"};
  }

  Problem problem_;
  ThinShape shape_;
  WgmmaNumbers numbers_;
  Function function_;
  std::optional<ThinCores> redo_;
  Number clusters_ = 1;
  Number blocks_ = 1;
  Regions regions_;
  Region marks_, statistics_;
};

std::string refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (reason.empty()) reason = ties_refusal(problem);
  if (!reason.empty()) return reason;
  const Gpu& gpu = gpu_of(problem.device);
  if (gpu.compute_major != 9) return "warpgroup products are of sm_90a alone";
  if (!problem.block.has_mean()) return "the block does not end in a mean";
  if (problem.block.conv()->transposed) return "the convolution is transposed";
  if (problem.parameters[0].dtype != problem.input.dtype) return "the weights are of another type than x";
  reason = WgmmaPlan(problem).refusal(problem);
  return reason.empty() ? ThinCores::refusal(problem) : reason;
}

double seconds(const Problem& problem, const PlanOptions&) {
  const WgmmaPlan plan(problem);
  const ThinShape& shape = plan.shape;
  const WgmmaNumbers& numbers = plan.numbers;
  const Gpu& gpu = gpu_of(problem.device);
  const double hertz = 0.83 * gpu.flops / (256.0 * gpu.multiprocessors);
  return 1.2e-5 + shape.passes() * numbers.all_clocks(shape, shape.batch.value(), gpu) / hertz;
}

}  // namespace

bool dithers_weights(const Problem& problem) {
  return problem.numerics == Numerics::fast && refusal(problem).empty() && WgmmaPlan(problem).numbers.dithers;
}

}  // namespace cuda

extern const Strategy cuda_thin_wgmma{
    "thin_wgmma", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::ThinWgmma>(problem);
    }};

}  // namespace onepass
