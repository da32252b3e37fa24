// The row "gemm_pingpong": a convolution of up to 64 output channels with its norm, by wgmma with a ping-pong
// schedule. Values stay on the chip. One launch, after a small one that packs the weights.
#include <algorithm>
#include <sstream>

#include "cuda/gemm/pingpong_numbers.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"
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

class GemmPingpong final : public Kernel {
 public:
  static std::string refusal(const Problem& problem);
  static double seconds(const Problem& problem, const PlanOptions& options);

  explicit GemmPingpong(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        flat_(shape_),
        numbers_(*wide_numbers<GemmPingpongNumbers>(problem)),
        pack_(pack_source(), problem.device,
              {tile_channels, 256, 1, static_cast<uint32_t>(packs_staged() ? pack_bytes() : 0)}),
        function_(source(), problem.device,
                  {1, static_cast<uint32_t>(threads), 1, static_cast<uint32_t>(numbers_.shared_bytes), true}),
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
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ =
        regions_.add(when(rounds(problem), shape_.batch * numbers_.position_tiles * converting_warps * 4));
    scales_ = regions_.add((tile_channels + 1) * 4);
    // Parts are read by pairs. Behind them are the results; a warp prefetches those of all its channels,
    // whether they exist or not.
    parts_ = regions_.add((shape_.slabs() * round_up(groups * numbers_.position_tiles, 2) +
                           shape_.batch * round_up(shape_.groups, 2) + tile_channels) *
                          8);
    counts_ = regions_.add(groups * numbers_.position_tiles * 4);
    // The counters of the redo kernel follow.
    cleared_bytes_ = marks_.bytes + guard_.bytes + scales_.bytes + parts_.bytes + counts_.bytes +
                     (shape_.batch + 1) * 4 * 4;
  }

  // Chains are those of 16-bit outputs in tf32 too. With 16-bit outputs gelu has a term less: 2.9e-5 off.
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
    const GemmPingpongNumbers& n = numbers_;
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

  // Chains are those of 16-bit outputs in tf32 too: 6e-6 does not show beside rounded operands.
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
  GemmPingpongNumbers numbers_;
  Function pack_;
  Function function_;
  ThinCores redo_;
  Number blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region marks_, guard_, scales_, packed_, map_, parts_, counts_, statistics_;
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

std::string GemmPingpong::refusal(const Problem& problem) {
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
  if (wide_numbers<GemmPingpongNumbers>(problem)->columns == 0)
    return "a sample or the window of a tile is too large to be held, or too small to be shared by warps";
  return "";
}

double GemmPingpong::seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const auto found = wide_numbers<GemmPingpongNumbers>(problem);
  const GemmPingpongNumbers& numbers = *found;
  const double bytes =
      static_cast<double>(problem.output.byte_span()) + static_cast<double>(problem.input.byte_span());
  // Tensor cores at work keep a GPU below its highest clock: 1.75 of 1.98 GHz.
  const double clock = gpu.flops / 256 / gpu.multiprocessors * 0.885;
  // The model was calibrated when s19 in bf16 took 1.40 ms. It takes 1.15 now, and 1.62 in tf32.
  const double clocks = 0.86 * numbers.clocks_of_tile;
  return 2.5e-5 + std::max(bytes / gpu.bytes_per_second, numbers.rounds(shape, gpu) * clocks / clock);
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_pingpong = cuda::row_of<cuda::GemmPingpong>("gemm_pingpong");

}  // namespace onepass
