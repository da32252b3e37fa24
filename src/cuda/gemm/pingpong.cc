// The row "gemm_pingpong": a convolution of up to 64 output channels with its norm, held on the chip, on
// Hopper's tensor cores, the warpgroups of a block by turns; in one launch after a small one that packs the
// weights.
#include <algorithm>
#include <array>
#include <sstream>

#include "cuda/gemm/gemm.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"
#include "onepass/error.h"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t groups = 3;                    // warpgroups that multiply
constexpr int64_t threads = groups * 128 + 128;  // gemm/pingpong.cuh
constexpr int64_t converting_warps = 4;
constexpr int64_t mergers = 1;  // blocks that have no tile
constexpr int64_t tile_channels = 64;
constexpr int64_t most_columns = 528 / groups;  // of a warpgroup
constexpr int64_t most_steps = 6;               // of a converting warp for a copy, four registers each
constexpr int64_t most_bands = 16;              // of a window: each has two barriers

// f32 is rounded to f16, as to tf32; its outputs wait as integers of 20 bits.
bool rounds(const Problem& problem) { return problem.input.dtype == DType::f32; }

using Box = std::array<int64_t, max_spatial_rank>;

// How a sample is cut into boxes, and shared memory; nothing here depends on the batch.
struct PingpongNumbers {
  int64_t columns = 0;            // of a warpgroup; 0 where nothing fits
  bool store_rows = false;        // values leave a row of the box at a time
  int64_t held_words = 0;         // of a thread
  int64_t held_shared_words = 0;  // of those, in shared memory
  int64_t row_pitch = 0;          // of staged rows, in words
  Box box{1, 1, 1};               // outputs of a tile
  Box boxes{1, 1, 1};             // of a sample
  int64_t position_tiles = 1;
  int64_t pitch = 1, plane = 1;  // of a box's index of positions
  int64_t window_y = 1, window_z = 1;
  int64_t copies = 1, copy_y = 1;      // of eight channels: so many, of so many rows each
  int64_t bands = 1, band_copies = 1;  // rows that come and go together
  int64_t window = 1;                  // positions of x
  int64_t chunks = 1, taps = 1;
  int64_t raw_pitch = 1, raw_vectors = 1, raw_slots = 2 * converting_warps;
  int64_t shared_bytes = 0;
  double clocks_of_tile = 0;

  PingpongNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu) {
    const FlatGeometry flat(shape);
    const auto out = [&](size_t d) { return shape.axes[d].classes[0].positions; };
    double least = 0;
    for (int64_t z = 1; z <= std::min<int64_t>(out(0), 16); ++z) {
      int64_t before = 0;
      for (int64_t count = 1; count <= out(2); ++count) {
        const int64_t x = divide_up(out(2), count);
        if (x == before) continue;
        before = x;
        int64_t y = 0;
        while (y < out(1) && columns_of(flat, {z, y + 1, x}) <= most_columns) ++y;
        if (y == 0 || x < 8) continue;
        const Box tried{z, divide_up(out(1), divide_up(out(1), y)), x};
        const PingpongNumbers numbers(problem, shape, gpu, flat, tried);
        if (numbers.columns == 0) continue;
        const double clocks = numbers.clocks_of_tile * static_cast<double>(numbers.position_tiles) /
                              static_cast<double>(numbers.blocks_at_once(gpu));
        if (columns > 0 && clocks >= least) continue;
        *this = numbers;
        least = clocks;
      }
    }
  }

  int64_t weight_bytes() const { return chunks * taps * tile_channels * 32; }
  int64_t blocks_at_once(const Gpu& gpu) const {
    return (gpu.multiprocessors - mergers) / position_tiles * position_tiles;
  }
  double rounds(const ThinShape& shape, const Gpu& gpu) const {
    return static_cast<double>(divide_up(shape.batch * position_tiles, blocks_at_once(gpu)));
  }

 private:
  // Of each warp, on their way to memory: eight channels of a row of the box, or of 64 columns.
  int64_t value_words(int64_t bytes) const {
    if (bytes == 4) return 4;
    return store_rows ? round_up(8 * row_pitch + 3, 4) : 8 * (16 * bytes + 4);
  }
  // Of 32 bytes of eight channels, or 32 positions, each.
  int64_t steps_of_row(int64_t bytes) const {
    return bytes == 2 ? divide_up(raw_vectors, 4) : divide_up(raw_pitch, 32);
  }
  static int64_t columns_of(const FlatGeometry& flat, const Box& box) {
    return round_up(divide_up(flat.positions_of(box), groups), 8);
  }

  PingpongNumbers(const Problem& problem, const ThinShape& shape, const Gpu& gpu, const FlatGeometry& flat,
                  const Box& tried)
      : box(tried) {
    const int64_t bytes = byte_size(problem.input.dtype);
    const int64_t vector = 16 / bytes;
    for (const ThinAxis& axis : shape.axes) taps *= axis.classes[0].count;
    for (size_t d = 0; d < box.size(); ++d) {
      boxes[d] = divide_up(shape.axes[d].classes[0].positions, box[d]);
      position_tiles *= boxes[d];
    }
    if (position_tiles > gpu.multiprocessors - mergers) return;
    pitch = flat.pitch_of(box);
    plane = flat.plane_of(box);
    window_y = box[1] + flat.high[1] - flat.low[1];
    window_z = box[0] + flat.high[0] - flat.low[0];
    // Where elements are not rounded, those that are beside it have eight places more.
    window = window_z * window_y * pitch + (bytes == 2 ? 8 : 0);
    chunks = divide_up(shape.in_channels, 16);
    // A row begins at a vector of x. Rows of neighbouring channels, which are read together where elements
    // are not rounded, begin in different banks.
    raw_vectors = divide_up(pitch + vector - 1, vector);
    raw_pitch = (bytes == 2 && raw_vectors % 2 == 0 ? raw_vectors + 1 : raw_vectors) * vector;
    constexpr int64_t most_of_box = 256;
    if (std::max({raw_pitch, window_y, window_z}) > most_of_box) return;
    const int64_t own = columns_of(flat, box);
    store_rows =
        pitch % 8 == 0 && own % pitch == 0 && box[2] % 2 == 0 && shape.axes[2].classes[0].positions % 2 == 0;
    // Channels of a staged row lie as they do in memory, modulo 16 bytes.
    const int64_t out_bytes = byte_size(problem.output.dtype);
    row_pitch = pitch * out_bytes / 4;
    while (store_rows && bytes == 2 && (problem.output.strides[1] * out_bytes / 4 - row_pitch) % 4 != 0)
      ++row_pitch;
    const int64_t held = bytes == 2 ? own / 4 : own / 16 * 5 + own / 2 % 8 / 4 * 3;
    const int64_t most_own = bytes == 2 ? 34 : 38;
    int64_t least_waiting = std::max<int64_t>(0, held - most_own);
    // Of f32 rows are staged where values wait, in two parts, the first of which takes all lanes of a store.
    if (bytes == 4) {
      const int64_t eights = pitch / 8;
      const int64_t first = eights > 16 ? 16 : eights > 8 ? 8 : eights > 4 ? 4 : 2;
      row_pitch = 8 * std::min(first, eights - 1) + 8;
      store_rows = store_rows && eights > 1 && eights <= 2 * first && problem.output.strides[1] % 4 == 0 &&
                   row_pitch / 4 < held;
      if (store_rows) least_waiting = std::max(least_waiting, row_pitch / 4);
    }
    // At first the columns' places lie there: not all have room where rows are short.
    store_rows = store_rows && (bytes == 2 ? 4 * value_words(out_bytes) : 128 * least_waiting) >= own;
    const int64_t asked = round_up(16 * shape.groups / shape.channels, 2);  // statistics of a warp's slabs
    const int64_t fixed =
        round_up(chunks * 2 * window * 16, 128) + weight_bytes() + groups * 16 * value_words(out_bytes) +
        (least_waiting > 0 ? 0 : groups * 64) + (store_rows ? 2 : groups * own) * 4 + 64 * 16 +
        (2 * std::min(most_bands, window_z * window_y) + 1 + groups) * 8 +
        groups * (2 * shape.groups * 8 + 4 * 8 + 4 * 8 * asked) + groups * (own / pitch + 1) * 8 + 160;
    // Three copies have room for each converting warp, or two, if need be of fewer rows: those that are ahead
    // are what keeps products from waiting for memory. Of held values those that registers
    // have no room for beside sums wait in shared memory.
    const int64_t word_bytes = groups * 128 * 4;
    int64_t left = -1;
    for (copy_y = window_y; left < 0 && copy_y > 0; --copy_y) {
      if (window_y % copy_y != 0 || copy_y * steps_of_row(bytes) > most_steps) continue;
      copies = window_z * window_y / copy_y;
      if (chunks * 2 * copies < converting_warps) continue;  // each warp has something of every tile
      const int64_t raw_bytes = round_up(copy_y * 8 * raw_pitch * bytes, 128);
      for (raw_slots = 3 * converting_warps; raw_slots > converting_warps; raw_slots -= converting_warps) {
        left = gpu.shared_bytes_per_block - fixed - raw_slots * (raw_bytes + 8) - least_waiting * word_bytes;
        if (left >= 0) break;
      }
      if (left >= 0) break;
    }
    if (left < 0) return;
    // Beside products registers are short: as many more wait in shared memory as there is room for.
    const int64_t few_own = bytes == 2 ? 27 : 35;
    const int64_t more =
        std::min(left / word_bytes, std::max<int64_t>(0, std::min(held, most_own) - few_own));
    held_shared_words = least_waiting + more;
    left -= more * word_bytes;
    // As many rows as a warpgroup has: others are waited for no sooner.
    band_copies = std::max({own / pitch / copy_y, divide_up(copies, most_bands), int64_t{1}});
    // One where a converting warp would have some of a band in one tile and nothing in the next: a round of
    // the band's barriers that it does not see.
    if (chunks == 1 && copies % 2 != 0) band_copies = copies;
    bands = divide_up(copies, band_copies);
    held_words = held;
    shared_bytes = gpu.shared_bytes_per_block - left;
    columns = own;
    clocks_of_tile = predict(shape, bytes);
  }

  // Clocks of an H200, but for what passes through L2. A warpgroup's products and what it does with their
  // sums; or x, which is turned as warpgroups have multiplied it, or where they all meet the same rows when
  // the last one has, before the products of the others. `seconds` knows what has become of that.
  double predict(const ThinShape& shape, int64_t bytes) const {
    const auto n = static_cast<double>(columns);
    const double multiplied = static_cast<double>(chunks * taps) * n / 2 * 1.05;
    const double instructions =
        gemm_chain_instructions(shape.parts.before) + gemm_chain_instructions(shape.parts.after);
    // Outputs that do not leave by rows are stored by 4 bytes.
    const double own =
        multiplied + n / 2 * (3.6 * instructions + (store_rows ? 91 : 120) + (bytes == 4 ? 78 : 0)) + 1500;
    const auto steps = static_cast<double>(copy_y * steps_of_row(bytes));
    const auto all = static_cast<double>(divide_up(chunks * 2 * copies, converting_warps));
    return std::max(own, all * (550 + 75 * steps) + (bands > 1 ? 0 : 2 * multiplied));
  }
};

class GemmPingpong final : public Kernel {
 public:
  explicit GemmPingpong(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        flat_(shape_),
        numbers_(problem, shape_, gpu_of(problem.device)),
        pack_(pack_source(), problem.device,
              {tile_channels, 256, 1, static_cast<uint32_t>(packs_staged() ? pack_bytes() : 0)}),
        function_(source(), problem.device,
                  {1, static_cast<uint32_t>(threads), 1, static_cast<uint32_t>(numbers_.shared_bytes), true}),
        redo_(problem) {
    // Whole samples, as many as there is room for at a time. An exported plan asks its own GPU; where that
    // has no room for one there is no block, since a merger alone would wait for ever.
    function_.require_resident(numbers_.position_tiles + mergers);
    const Number samples =
        minimum(shape_.batch, divide(function_.resident_clusters() - mergers, numbers_.position_tiles));
    blocks_ = samples * numbers_.position_tiles + minimum(samples, 1) * mergers;
    packed_ = regions_.add(numbers_.weight_bytes());
    map_ = regions_.add(128);
    statistics_ = regions_.add(shape_.slabs() * 2 * 4);
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ =
        regions_.add(when(rounds(problem), shape_.batch * numbers_.position_tiles * converting_warps * 4));
    scales_ = regions_.add((tile_channels + 1) * 4);
    // Read by pairs; then what they come to: a warp asks for its channels' whether a sample has them or not.
    parts_ = regions_.add((shape_.slabs() * round_up(groups * numbers_.position_tiles, 2) +
                           shape_.batch * round_up(shape_.groups, 2) + tile_channels) *
                          8);
    counts_ = regions_.add(groups * numbers_.position_tiles * 4);
    // What is done again has its counters behind them.
    cleared_bytes_ = marks_.bytes + guard_.bytes + scales_.bytes + parts_.bytes + counts_.bytes +
                     (shape_.batch + 1) * 4 * 4;
  }

  // Chains are those of 16 bits in tf32 too; gelu has a term less where the output has 16, off by 2.9e-5.
  Accuracy accuracy() const override {
    const std::vector<Stage>& stages = problem_.block.stages();
    const bool has_gelu = std::any_of(stages.begin(), stages.end(), [](const Stage& stage) {
      const auto* pointwise = std::get_if<Pointwise>(&stage);
      return pointwise != nullptr && pointwise->op == Op::gelu;
    });
    if (rounds(problem_)) return {.held = Accuracy::Held::in_20_bits, .sigmoid = 0x1p-17};
    return {.held = Accuracy::Held::as_f16, .sigmoid = has_gelu ? 0x1p-15 : 0x1p-17};
  }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
  }

  std::string describe() const override {
    const PingpongNumbers& n = numbers_;
    std::ostringstream out;
    out << "convolution: " << shape_.in_channels * n.taps << " terms, "
        << (rounds(problem_) ? "operands rounded to f16, as to tf32\n" : "operands as they are\n")
        << "tile: " << shape_.channels << " channels, boxes of " << n.box[0] << "x" << n.box[1] << "x"
        << n.box[2] << " outputs, " << n.position_tiles << " a sample, " << n.columns
        << " columns a warpgroup\n"
        << "window: " << n.window_z << "x" << n.window_y << "x" << n.pitch << " positions of "
        << 16 * n.chunks << " channels in " << n.bands << " bands, " << n.raw_slots
        << " copies of 8 channels and " << n.copy_y << " rows ahead\n"
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: 1, values held as "
        << (rounds(problem_) ? "integers of 20 bits, " : "f16, ") << n.held_words - n.held_shared_words
        << " words of a thread in registers, " << n.held_shared_words << " in shared memory\n"
        << "then: thin_cores, if x does not begin on 16 bytes"
        << (rounds(problem_) ? ", and for samples that f16 has no room for\n" : "\n")
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    if (rounds(problem_)) {
      return Notes{note::operands_rounded, note::held_in_20_bits, note::redone} +
             notes_of_chains(problem_.block, 16);
    }
    const std::vector<TailParts::Stage>& before = shape_.parts.before;
    const bool is_gelu = before.size() == 1 && before[0].pointwise.op == Op::gelu;
    return Notes{note::held_as_f16} +
           (is_gelu ? Notes{note::approximate_gelu} : notes_of_chains(problem_.block, 16));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    clear(at(workspace, marks_), cleared_bytes_, stream, problem_.device);
    PingpongPackParameters pack;
    pack.weights = arguments.parameters[0];
    pack.packed = at(workspace, packed_);
    pack.scales = at(workspace, scales_);
    pack.only = at(workspace, marks_);
    pack.batch = shape_.batch;
    pack.input = arguments.input;
    pack.map = at(workspace, map_);
    pack.launch(pack_, stream);
    PingpongParameters p;
    p.output = arguments.output;
    p.statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    p.parts = at(workspace, parts_);
    p.counts = at(workspace, counts_);
    p.only = at(workspace, marks_);
    p.guard = at(workspace, guard_);
    p.packed = at(workspace, packed_);
    p.scales = at(workspace, scales_);
    p.batch = shape_.batch;
    p.map = at(workspace, map_);
    p.parameter = arguments.parameters;
    p.launch(function_, stream, blocks_);
    redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, marks_), 1,
                        stream);
  }

 private:
  int64_t pack_bytes() const {
    return shape_.in_channels * numbers_.taps * byte_size(problem_.parameters[0].dtype);
  }
  bool is_bf16() const { return problem_.input.dtype == DType::bf16; }
  bool packs_staged() const { return pack_bytes() <= 200 << 10; }

  // `struct Numbers`.
  std::string numbers_source() const {
    const PingpongNumbers& n = numbers_;
    std::ostringstream out;
    out << "struct Numbers {\n  using Operand = onepass::" << (is_bf16() ? "bf16" : "f16")
        << ";\n  using Product = ::Product;\n"
        << "  static constexpr float steepness = " << std::showpoint << steepness(shape_.parts) << "f;\n"
        << Constants()
               .add("pitch", n.pitch)
               .add("plane", n.plane)
               .flag("boxed", true)
               .add("box_z", n.box[0])
               .add("box_y", n.box[1])
               .add("box_x", n.box[2])
               .add("boxes_y", n.boxes[1])
               .add("boxes_x", n.boxes[2])
               .add("positions", flat_.positions)
               .add("window_split", 0)
               .add("window", n.window)
               .add("windows", 1)
               .add("window_y", n.window_y)
               .add("window_z", n.window_z)
               .add("copies", n.copies)
               .add("copy_y", n.copy_y)
               .add("bands", n.bands)
               .add("band_copies", n.band_copies)
               .add("tile_positions", groups * n.columns)
               .add("groups", groups)
               .add("tile_channels", tile_channels)
               .add("columns", n.columns)
               .add("held_shared_words", n.held_shared_words)
               .add("row_pitch", n.row_pitch)
               .add("position_tiles", n.position_tiles)
               .add("padded_channels", tile_channels)
               .add("chunk_channels", 16)
               .add("chunks", n.chunks)
               .add("taps", n.taps)
               .add("parts", 1)
               .add("raw_pitch", n.raw_pitch)
               .add("raw_vectors", n.raw_vectors)
               .add("raw_slots", n.raw_slots)
               .flag("guards", rounds(problem_))
               .flag("store_rows", n.store_rows)
               .add("shared_bytes", n.shared_bytes)
               .add("pack_channels", 1)
               .flag("pack_staged", packs_staged())
               .text()
        << flat_.source() << "};\n";
    return out.str();
  }

  // Chains are those of 16 bits in tf32 too: 6e-6 does not show beside rounded operands.
  Source source() const {
    return {"onepass_gemm_pingpong",
            "#include \"gemm/pingpong.cuh\"\n" + tail_source(problem_, 16) + thin_source(problem_, shape_) +
                wgmma_source(numbers_.columns, is_bf16()) + numbers_source() +
                "using Agent = onepass::GemmPingpong<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(threads) +
                ", 1) onepass_gemm_pingpong(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char shared[];\n"
                "  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();\n"
                "}\n"};
  }

  Source pack_source() const {
    return {"onepass_gemm_pingpong_pack",
            "#include \"gemm/pingpong/map.cuh\"\n#include \"gemm/source/pack.cuh\"\nstruct Product;\n" +
                tail_source(problem_) + thin_source(problem_, shape_) + numbers_source() +
                "extern \"C\" __global__ void __launch_bounds__(256)\n"
                "onepass_gemm_pingpong_pack(const __grid_constant__ onepass::PingpongPackParameters p) {\n"
                "  extern __shared__ __align__(16) unsigned char staged[];\n"
                "  onepass::GemmPack<onepass::Convolution, Numbers, onepass::PingpongPackParameters>{p, "
                "staged}.run();\n"
                "  if (blockIdx.x == 0 && threadIdx.x < 32)\n"
                "    onepass::pingpong::TensorMap<onepass::Convolution, onepass::Tail::Input, "
                "Numbers>::build(p);\n"
                "}\n"};
  }

  Problem problem_;
  ThinShape shape_;
  FlatGeometry flat_;
  PingpongNumbers numbers_;
  Function pack_;
  Function function_;
  ThinCores redo_;
  Number blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region marks_, guard_, scales_, packed_, map_, parts_, counts_, statistics_;
};

// Whether copies of boxes can read it: rows of neighbours, all strides of whole vectors of 16 bytes.
bool lies_for_boxes(const TensorSpec& input, const ThinShape& shape) {
  const int64_t vector = 16 / byte_size(input.dtype);
  for (size_t d = 0; d < max_spatial_rank; ++d) {
    if (shape.axes[d].in == 1) continue;
    const int64_t stride = ThinShape::spatial_stride(input, shape.order[d]);
    if (d == 2 ? stride != 1 : stride % vector != 0 || stride <= 0) return false;
  }
  return input.strides[0] % vector == 0 && input.strides[1] % vector == 0 && input.strides[1] > 0 &&
         shape.axes[2].in > 1;
}

std::string refusal(const Problem& problem) {
  std::string reason = wide_refusal(problem);
  if (!reason.empty()) return reason;
  if (problem.block.conv()->groups != 1) return "the convolution has groups";
  const Gpu& gpu = gpu_of(problem.device);
  if (gpu.architecture != "sm_90a") return "it needs wgmma, which sm_90a alone has";
  const ThinShape shape(problem);
  if (!shape.parts.norm || shape.parts.mean) return "it is for a block with a norm and no mean";
  if (problem.output.dtype != problem.input.dtype) return "the output is of another type";
  if (problem.numerics == Numerics::strict) return "strict: values before the norm are held as f32";
  if (rounds(problem) && !problem.rounds_to_tf32()) return "operands of f32 that are not rounded";
  if (shape.channels > tile_channels)
    return "more than " + std::to_string(tile_channels) + " output channels";
  if (shape.classes() > 1 || FlatGeometry(shape).has_stride(shape)) return "the convolution has a stride";
  if (16 % (shape.channels / shape.groups) != 0) return "groups that are not within 16 channels";
  for (const auto* stages : {&shape.parts.before, &shape.parts.after}) {
    for (const TailParts::Stage& stage : *stages) {
      if (argument_kind(stage.pointwise.op) == ArgumentKind::tensor) return "a stage reads a tensor";
    }
  }
  if (!lies_for_boxes(problem.input, shape)) return "rows of x are not whole vectors of 16 bytes";
  if (problem.output.strides != TensorSpec::dense(problem.output.dtype, problem.output.sizes).strides)
    return "the output has channels after space";
  if (PingpongNumbers(problem, shape, gpu).columns == 0)
    return "a sample, or the window of a tile, is too large to be held, or too small to be shared by warps";
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const PingpongNumbers numbers(problem, shape, gpu);
  const double bytes =
      static_cast<double>(problem.output.byte_span()) + static_cast<double>(problem.input.byte_span());
  // Tensor cores at work keep a GPU below its highest clock: 1.75 of 1.98 GHz.
  const double clock = gpu.flops / 256 / gpu.multiprocessors * 0.885;
  // The model is of the row as it first was, which took 1.40 ms of s19 in bf16; it takes 1.15 now, and 1.62
  // in tf32.
  const double clocks = 0.86 * numbers.clocks_of_tile;
  return 2.5e-5 + std::max(bytes / gpu.bytes_per_second, numbers.rounds(shape, gpu) * clocks / clock);
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_pingpong{
    "gemm_pingpong", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::GemmPingpong>(problem);
    }};

}  // namespace onepass
