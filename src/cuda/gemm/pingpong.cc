// The row "gemm_pingpong": a convolution of up to 64 output channels with its norm, by wgmma with a ping-pong
// schedule. Values stay on the chip. One launch, after a small one that packs the weights.
#include <algorithm>
#include <sstream>

#include "cuda/gemm/pingpong_numbers.h"
#include "cuda/gemm/workspace.h"
#include "cuda/notes.h"
#include "onepass/error.h"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t groups = GemmPingpongNumbers::groups;
constexpr int64_t threads = GemmPingpongNumbers::threads;
constexpr int64_t mergers = GemmPingpongNumbers::mergers;
constexpr int64_t tile_channels = GemmPingpongNumbers::tile_channels;
constexpr int64_t converting_warps = GemmPingpongNumbers::converting_warps;

// f32 operands are rounded to f16, as to tf32; values are held as 20-bit integers.
bool rounds(const Problem& problem) { return problem.input.dtype == DType::f32; }

class GemmPingpong final : public WholeBlockKernel {
 public:
  explicit GemmPingpong(const Problem& problem)
      : WholeBlockKernel(problem),
        flat_(shape_),
        numbers_(*wide_numbers<GemmPingpongNumbers>(problem)),
        packing_(problem, shape_, tile_channels, numbers_.taps),
        pack_(pack_source(), problem.device, packing_.launch()),
        function_(
            source(), problem.device,
            {1, static_cast<uint32_t>(threads), 1, static_cast<uint32_t>(numbers_.shared_bytes), true, true}),
        redo_(problem) {
    // As many whole samples as fit at a time. An exported plan asks its own GPU. Where no sample fits there
    // is no block: a merger alone would wait for ever.
    function_.require_resident(numbers_.position_tiles + mergers);
    const Number samples =
        minimum(shape_.batch, divide(function_.resident_clusters() - mergers, numbers_.position_tiles));
    blocks_ = samples * numbers_.position_tiles + minimum(samples, 1) * mergers;
    packed_ = regions_.add(numbers_.weight_bytes());
    map_ = regions_.add(128);
    statistics_ = regions_.add(shape_.slabs() * 2 * 4);
    scales_ = regions_.add((tile_channels + 1) * 4);
    sums_ = regions_.add(tile_channels * 4);
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ =
        regions_.add(when(rounds(problem), shape_.batch * numbers_.position_tiles * converting_warps * 4));
    // Parts are read by pairs. Behind them are the results; a warp prefetches those of all its channels,
    // whether they exist or not.
    parts_ = regions_.add((shape_.slabs() * round_up(groups * numbers_.position_tiles, 2) +
                           shape_.batch * round_up(shape_.groups, 2) + tile_channels) *
                          8);
    counts_ = regions_.add(groups * numbers_.position_tiles * 4);
    // The counters of the redo kernel follow.
    cleared_bytes_ = marks_.bytes + guard_.bytes + parts_.bytes + counts_.bytes + (shape_.batch + 1) * 4 * 4;
  }

  // Chains are those of 16-bit outputs in tf32 too. With 16-bit outputs gelu has a term less: 2.9e-5 off.
  Accuracy accuracy() const override {
    const std::vector<Stage>& stages = problem_.block.stages();
    const bool has_gelu = std::any_of(stages.begin(), stages.end(), [](const Stage& stage) {
      const auto* pointwise = std::get_if<Pointwise>(&stage);
      return pointwise != nullptr && pointwise->op == Op::gelu;
    });
    const bool in_integers = rounds(problem_);
    return {.held = in_integers      ? Accuracy::Held::in_20_bits
                    : norms_in_f16() ? Accuracy::Held::normed_in_f16
                                     : Accuracy::Held::as_f16,
            .sigmoid = !in_integers && has_gelu ? 0x1p-15 : 0x1p-17,
            .cut_terms = cut_terms(problem_, shape_)};
  }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
  }

  std::string describe() const override {
    const GemmPingpongNumbers& n = numbers_;
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
        << (rounds(problem_) ? ", and for samples whose values overflow f16\n" : "\n")
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    if (rounds(problem_)) {
      return Notes{rounding_note(problem_), note::held_in_20_bits, note::redone} +
             notes_of_chains(problem_.block, 16);
    }
    const std::vector<TailParts::Stage>& before = shape_.parts.before;
    const bool is_gelu = before.size() == 1 && before[0].pointwise.op == Op::gelu;
    return Notes{norms_in_f16() ? note::normed_in_f16 : note::held_as_f16} +
           (is_gelu ? Notes{note::approximate_gelu} : notes_of_chains(problem_.block, 16));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    const LaunchChain chain;
    PingpongPackParameters pack;
    pack.weights = arguments.parameters[0];
    pack.packed = at(workspace, packed_);
    pack.scales = at(workspace, scales_);
    pack.sums = at(workspace, sums_);
    pack.batch = shape_.batch;
    pack.input = arguments.input;
    pack.map = at(workspace, map_);
    pack.cleared = at(workspace, marks_);
    pack.cleared_bytes = cleared_bytes_;
    pack.launch(pack_, stream);
    PingpongParameters p;
    p.output = arguments.output;
    p.statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    p.only = at(workspace, marks_);
    p.guard = at(workspace, guard_);
    p.packed = at(workspace, packed_);
    p.scales = at(workspace, scales_);
    p.batch = shape_.batch;
    p.parameter = arguments.parameters;
    p.parts = at(workspace, parts_);
    p.counts = at(workspace, counts_);
    p.sums = at(workspace, sums_);
    p.input = arguments.input;
    p.map = at(workspace, map_);
    p.launch(function_, stream, blocks_);
    redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, marks_), 1,
                        stream);
  }

 private:
  bool norms_in_f16() const { return problem_.output.dtype == DType::f16 && shape_.parts.after.empty(); }
  // `struct Numbers`.
  std::string numbers_source() const {
    const GemmPingpongNumbers& n = numbers_;
    const std::string constants =
        Constants()
            .add("pitch", n.pitch, "plane", n.plane, "positions", flat_.positions)
            .add("box_z", n.box[0], "box_y", n.box[1], "box_x", n.box[2])
            .add("boxes_y", n.boxes[1], "boxes_x", n.boxes[2])
            .flag("boxed", true, "store_rows", n.store_rows, "guards", rounds(problem_), "scales_x", false)
            .flag("has_after", !shape_.parts.after.empty())
            .add("window", n.window, "windows", 1, "window_split", 0)
            .add("window_y", n.window_y, "window_z", n.window_z)
            .add("copies", n.copies, "copy_y", n.copy_y, "bands", n.bands, "band_copies", n.band_copies)
            .add("tile_positions", groups * n.columns, "tile_channels", tile_channels)
            .add("groups", groups, "columns", n.columns, "position_tiles", n.position_tiles)
            .add("padded_channels", tile_channels, "chunk_channels", 16, "chunks", n.chunks)
            .add("taps", n.taps, "parts", 1)
            .add("held_shared_words", n.held_shared_words, "row_pitch", n.row_pitch)
            .add("raw_pitch", n.raw_pitch, "raw_vectors", n.raw_vectors, "raw_slots", n.raw_slots)
            .add("shared_bytes", n.shared_bytes)
            .text();
    return wide_numbers_source(problem_, shape_.parts, "::Product",
                               constants + packing_.constants() + flat_.source());
  }

  // Chains are those of 16-bit outputs in tf32 too: 6e-6 does not show beside rounded operands.
  Source source() const {
    return agent_kernel("onepass_gemm_pingpong",
                        "#include \"gemm/pingpong.cuh\"\n" +
                            wgmma_source(numbers_.columns, problem_.input.dtype == DType::bf16) + structs(16),
                        "GemmPingpong<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(threads) + ", 1", SharedAs::structure);
  }
  Source pack_source() const {
    return agent_kernel("onepass_gemm_pingpong_pack",
                        "#include \"gemm/pingpong/pack.cuh\"\nstruct Product;\n" + structs(32),
                        "pingpong::Pack<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(WeightPack::threads), SharedAs::bytes);
  }
  // Chains of so many bits.
  std::string structs(int bits) const {
    return tail_source(problem_, bits) + thin_source(problem_, shape_) + numbers_source();
  }

  FlatGeometry flat_;
  GemmPingpongNumbers numbers_;
  WeightPack packing_;
  Function pack_;
  Function function_;
  ThinCores redo_;
  Number blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region packed_, map_, statistics_, scales_, sums_, marks_, guard_, parts_, counts_;
};

// Whether a tensor map can describe x: contiguous rows, and strides that are multiples of 16 bytes.
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
  std::string reason = wgmma_refusal(problem);
  if (!reason.empty()) return reason;
  if (problem.block.conv()->groups != 1) return "the convolution has groups";
  const ThinShape shape(problem);
  if (!shape.parts.norm || shape.parts.mean) return "it is for a block with a norm and no mean";
  if (problem.output.dtype != problem.input.dtype) return "the output is of another type";
  if (problem.numerics == Numerics::strict) return "strict: values before the norm are held as f32";
  if (rounds(problem) && !problem.rounds_to_tf32()) return "operands of f32 that are not rounded";
  if (shape.channels > tile_channels)
    return "more than " + std::to_string(tile_channels) + " output channels";
  if (shape.classes() > 1 || FlatGeometry(shape).has_stride(shape)) return "the convolution has a stride";
  if (16 % (shape.channels / shape.groups) != 0) return "groups that are not within 16 channels";
  if (reads_tensors(shape.parts.before) || reads_tensors(shape.parts.after)) return "a stage reads a tensor";
  if (!lies_for_boxes(problem.input, shape)) return "rows of x are not whole vectors of 16 bytes";
  if (!lies_planar(problem.output)) return "the output has channels after space";
  if (wide_numbers<GemmPingpongNumbers>(problem)->columns == 0)
    return "a sample or the window of a tile is too large to be held, or too small to be shared by warps";
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const WideCost<GemmPingpongNumbers> cost(problem);
  // The model was calibrated when s19 in bf16 took 1.40 ms. It takes 1.15 now, and 1.62 in tf32.
  const double clocks = 0.86 * cost.numbers->clocks_of_tile * cost.numbers->rounds(cost.shape, cost.gpu);
  return 2.5e-5 + std::max(cost.moving_seconds(problem), clocks / cost.clock());
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_pingpong =
    cuda::row_of<cuda::GemmPingpong>("gemm_pingpong", cuda::refusal, cuda::seconds);

}  // namespace onepass
