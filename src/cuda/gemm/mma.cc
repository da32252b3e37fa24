// The row "gemm_mma": a wide convolution with all that follows it as an implicit matrix product by mma.sync,
// on every GPU from sm_80 on. One launch packs the weights, one convolves up to the norm, and one computes
// the norm and what follows it.
#include <algorithm>
#include <optional>
#include <sstream>

#include "cuda/gemm/mma_numbers.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass {

namespace cuda {
namespace {

constexpr int64_t pack_threads = 256;  // gemm/mma/pack.cuh

class GemmMma final : public Kernel {
 public:
  static std::string refusal(const Problem& problem);
  static double seconds(const Problem& problem, const PlanOptions& options);

  explicit GemmMma(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        numbers_(*wide_numbers<GemmMmaNumbers>(problem)),
        pack_(pack_source(), problem.device, pack_launch()),
        function_(source(), problem.device,
                  Launch{maximum(1, shape_.batch * numbers_.tiles(shape_)),
                         static_cast<uint32_t>(numbers_.tile.threads()), 1,
                         static_cast<uint32_t>(numbers_.shared_bytes)}),
        redo_(problem) {
    if (has_second()) finish_.emplace(problem, shape_, is_planar());
    const int64_t tiles_of_slab = numbers_.classes(shape_) * numbers_.position_tiles;
    control_ = regions_.add(shape_.batch * 4);
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ = regions_.add(shape_.batch * 4);
    scales_ = regions_.add((padded_channels() + 1) * 4);
    cleared_bytes_ = regions_.total();
    packed_ = regions_.add(numbers_.weight_bytes());
    parts_ =
        regions_.add(when(shape_.parts.norm, shape_.slabs() * (numbers_.spans(shape_) * tiles_of_slab * 16)));
    sums_ = regions_.add(when(shape_.parts.mean, shape_.rows() * (tiles_of_slab * 4)));
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
    values_ = regions_.add(when(has_own_values(), shape_.rows() * shape_.spatial * 4));
  }

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
  }

  std::string describe() const override {
    const GemmMmaNumbers& n = numbers_;
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms" << describe_groups(shape_) << ", "
        << (problem_.input.dtype != DType::f32 ? "operands as they are"
            : n.parts == 2                     ? "operands split in two of "
                                               : "operands rounded to ")
        << (problem_.input.dtype != DType::f32 ? ""
            : n.halves                         ? "f16"
                                               : "tf32")
        << '\n'
        << "tile: " << n.tile.rows() << " channels, a box of " << n.box[0] << "x" << n.box[1] << "x"
        << n.box[2] << " outputs (" << n.tile.positions() << "), " << n.tiles(shape_) << " tiles a sample\n"
        << "window: " << n.window() << " positions, 2 stages of " << n.chunk_channels() << " channels\n"
        << "weights: " << n.stages << " stages of " << n.group_taps << " taps\n"
        << "blocks: " << describe_blocks(shape_.batch * n.tiles(shape_), function_);
    if (finish_)
      out << "second: values " << (has_own_values() ? "of the workspace" : "of the output") << '\n';
    out << "then: thin_cores for samples whose values overflow f16 or are not finite\n"
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(problem_.input.dtype == DType::f32 && numbers_.parts == 1, rounding_note(problem_)) +
           where(problem_.input.dtype == DType::f32, note::redone) +
           notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    clear(at(workspace, control_), cleared_bytes_, stream, problem_.device);
    if (packs_classes()) {
      GemmMmaPackParameters pack;
      pack.weights = arguments.parameters[0];
      pack.packed = at(workspace, packed_);
      pack.only = at(workspace, marks_);
      pack.batch = shape_.batch;
      pack.launch(pack_, stream);
    } else {
      GemmPackParameters pack;
      pack.weights = arguments.parameters[0];
      pack.packed = at(workspace, packed_);
      pack.scales = at(workspace, scales_);
      pack.only = at(workspace, marks_);
      pack.batch = shape_.batch;
      pack.launch(pack_, stream);
    }
    void* const values = has_own_values() ? at(workspace, values_) : arguments.output;
    void* const statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    GemmMmaParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.values = values;
    p.statistics = statistics;
    p.control = at(workspace, control_);
    p.parts = at(workspace, parts_);
    p.sums = at(workspace, sums_);
    p.only = at(workspace, marks_);
    p.guard = at(workspace, guard_);
    p.packed = at(workspace, packed_);
    p.scales = at(workspace, scales_);
    p.batch = shape_.batch;
    p.parameter = arguments.parameters;
    p.launch(function_, stream);
    if (finish_) finish_->launch(arguments, values, statistics, stream);
    redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, marks_), stream);
  }

 private:
  // Whether the norm waits for other tiles, with values in memory.
  bool has_second() const { return shape_.parts.norm && !shape_.parts.mean_follows_norm(); }
  // Values have no room in the output.
  bool has_own_values() const {
    return has_second() && (shape_.parts.mean || problem_.output.dtype != DType::f32);
  }
  // Values between the launches: dense, in one order or the other.
  bool is_planar() const {
    const Shape sizes = problem_.block.conv_output_shape(problem_.input.sizes);
    Shape dense = TensorSpec::dense(DType::f32, sizes).strides;
    dense.insert(dense.begin() + 2, 5 - dense.size(), 0);
    return strides() == dense;
  }
  // Whether 32 bits count the bytes of a sample of x.
  bool has_small_samples() const {
    int64_t last = 0;
    for (size_t d = 1; d < problem_.input.sizes.size(); ++d)
      last += (problem_.input.sizes[d] - 1) * problem_.input.strides[d];
    return (last + 1) * byte_size(problem_.input.dtype) <= int64_t{1} << 32;
  }
  // One class: packed as for gemm_wgmma, several channels to a block where they are many, since it writes 16
  // bytes of each; their weights once through shared memory where they fit.
  bool packs_classes() const { return numbers_.classes(shape_) > 1; }
  int64_t padded_channels() const {
    return shape_.conv_groups * numbers_.channel_tiles * numbers_.tile.rows();
  }
  int64_t pack_bytes(int64_t channels) const {
    return channels * shape_.in_channels * numbers_.most_taps * byte_size(problem_.parameters[0].dtype);
  }
  int64_t pack_channels() const {
    constexpr int64_t least_blocks = 256;
    const int64_t two_blocks_fit = gpu_of(problem_.device).shared_bytes_per_block * 31 / 64;
    for (const int64_t channels : {4, 2}) {
      if (padded_channels() / channels >= least_blocks && pack_bytes(channels) <= two_blocks_fit)
        return channels;
    }
    return 1;
  }
  bool packs_staged() const {
    return pack_bytes(pack_channels()) <= gpu_of(problem_.device).shared_bytes_per_block * 7 / 8;
  }
  Launch pack_launch() const {
    if (packs_classes()) {
      const int64_t vectors =
          padded_channels() * numbers_.chunks * numbers_.vectors * numbers_.classes(shape_);
      return {divide_up(vectors, pack_threads), pack_threads};
    }
    return {padded_channels() / pack_channels(), pack_threads, 1,
            static_cast<uint32_t>(packs_staged() ? pack_bytes(pack_channels()) : 0)};
  }

  // Strides of values, and of tensors that stages read.
  Shape strides() const {
    Shape list = problem_.output.strides;
    if (shape_.parts.mean) {
      list = TensorSpec::dense(DType::f32, problem_.block.conv_output_shape(problem_.input.sizes)).strides;
      for (const int index : shape_.parts.tensor_parameters())
        list = problem_.parameters[static_cast<size_t>(index)].strides;
    }
    // Batch and channel, then three spatial dimensions.
    list.insert(list.begin() + 2, 5 - list.size(), 0);
    return list;
  }

  std::string numbers_source() const {
    const GemmMmaNumbers& n = numbers_;
    const auto table = [](const char* type, const char* name, const auto& value, size_t count) {
      std::ostringstream out;
      out << "  static constexpr __device__ " << type << ' ' << name << "(int d) { return ";
      for (size_t d = 0; d + 1 < count; ++d) out << "d == " << d << " ? " << value(d) << " : ";
      out << value(count - 1) << "; }\n";
      return out.str();
    };
    const TailParts& parts = shape_.parts;
    const std::vector<TailParts::Stage>& chain = parts.norm ? parts.before : parts.after;
    const bool reads_tensors = std::any_of(chain.begin(), chain.end(), [](const TailParts::Stage& stage) {
      return argument_kind(stage.pointwise.op) == ArgumentKind::tensor;
    });
    const Shape all_strides = strides();
    const bool is_bf16 = problem_.input.dtype == DType::bf16;
    const char* const product = is_bf16 ? "Bf16" : n.of_vector == 8 ? "F16" : "Tf32";
    std::ostringstream out;
    out << "struct Numbers {\n  using Product = onepass::mma::" << product
        << ";\n  using Operand = onepass::" << (is_bf16 ? "bf16" : "f16") << ";\n"
        << "  static constexpr float steepness = " << std::showpoint << steepness(parts) << "f;\n"
        << Constants()
               .add("threads", n.tile.threads())
               .add("row_tiles", n.tile.row_tiles)
               .add("column_tiles", n.tile.column_tiles)
               .add("warps_n", n.tile.warps_n)
               .add("tile_rows", n.tile.rows())
               .add("tile_positions", n.tile.positions())
               .flag("merges_classes", n.merges_classes)
               .add("boxes_y", n.boxes[1])
               .add("boxes_x", n.boxes[2])
               .add("position_tiles", n.position_tiles)
               .add("channel_tiles", n.channel_tiles)
               .add("spans", n.spans(shape_))
               .add("parts", n.parts)
               .add("vectors", n.vectors)
               .add("of_vector", n.of_vector)
               .flag("guards", n.halves)
               .add("padded_channels", padded_channels())
               .add("chunks", n.chunks)
               .add("stages", n.stages)
               .add("group_taps", n.group_taps)
               .add("batch_vectors", n.batch_vectors)
               .add("group_batches", n.group_batches)
               .flag("small_samples", has_small_samples())
               .add("window_pitch", n.window_pitch)
               .add("most_taps", std::max<int64_t>(1, n.most_taps))
               .flag("chain_reads_tensors", reads_tensors)
               .add("shared_bytes", n.shared_bytes)
               // Of gemm/source/pack.cuh alone.
               .add("tile_channels", n.tile.rows())
               .add("chunk_channels", n.chunk_channels())
               .add("taps", n.most_taps)
               .add("pack_channels", pack_channels())
               .flag("pack_staged", packs_staged())
               .text()
        << table(
               "int", "box", [&](size_t d) { return n.box[d]; }, 3)
        << table(
               "int", "entries", [&](size_t d) { return n.axes[d].entries; }, 3)
        << table(
               "int", "width", [&](size_t d) { return n.axes[d].width; }, 3)
        << table(
               "int", "unit", [&](size_t d) { return n.axes[d].unit; }, 3)
        << table(
               "bool", "compact", [&](size_t d) { return n.axes[d].compact ? "true" : "false"; }, 3)
        << table(
               "long long", "stride", [&](size_t d) { return std::to_string(all_strides[d]) + "ll"; }, 5)
        << "};\n";
    return out.str();
  }

  Source source() const {
    return {"onepass_gemm_mma",
            "#include \"gemm/mma.cuh\"\n" + tail_source(problem_, bits_of(problem_, problem_.output.dtype)) +
                thin_source(problem_, shape_) + numbers_source() +
                "using Agent = onepass::GemmMma<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.tile.threads()) + ", " + std::to_string(numbers_.blocks_wanted) +
                ") onepass_gemm_mma(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(16) unsigned char shared[];\n"
                "  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();\n"
                "}\n"};
  }

  Source pack_source() const {
    const std::string problem = tail_source(problem_) + thin_source(problem_, shape_) + numbers_source();
    if (packs_classes()) {
      return {"onepass_gemm_mma_pack",
              "#include \"gemm/mma/pack.cuh\"\n" + problem +
                  "extern \"C\" __global__ void __launch_bounds__(256)\n"
                  "onepass_gemm_mma_pack(const __grid_constant__ onepass::GemmMmaPackParameters p) {\n"
                  "  onepass::GemmMmaPack<onepass::Convolution, onepass::Tail, Numbers>{p}.run();\n"
                  "}\n"};
    }
    return {"onepass_gemm_pack",
            "#include \"gemm/source/pack.cuh\"\n#include \"device/mma.cuh\"\n" + problem +
                "extern \"C\" __global__ void __launch_bounds__(256)\n"
                "onepass_gemm_pack(const __grid_constant__ onepass::GemmPackParameters p) {\n"
                "  extern __shared__ __align__(16) unsigned char staged[];\n"
                "  onepass::GemmPack<onepass::Convolution, Numbers>{p, staged}.run();\n"
                "}\n"};
  }

  Problem problem_;
  ThinShape shape_;
  GemmMmaNumbers numbers_;
  Function pack_;
  Function function_;
  std::optional<GemmFinish> finish_;
  ThinCores redo_;
  Number cleared_bytes_;
  Regions regions_;
  Region control_, marks_, guard_, scales_, packed_, parts_, sums_, statistics_, values_;
};

bool lies_dense(const TensorSpec& spec, Layout layout) {
  return spec.strides == TensorSpec::dense(spec.dtype, spec.sizes, layout).strides;
}

std::string GemmMma::refusal(const Problem& problem) {
  std::string reason = wide_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  if (shape.parts.norm && !shape.parts.mean && !lies_dense(problem.output, Layout::nchw) &&
      !lies_dense(problem.output, Layout::nhwc)) {
    return "the output is not dense, and a norm waits for it";
  }
  if (shape.parts.norm && shape.parts.mean && !shape.parts.mean_follows_norm()) {
    for (const int index : shape.parts.tensor_parameters()) {
      const TensorSpec& spec = problem.parameters[static_cast<size_t>(index)];
      if (!lies_dense(spec, Layout::nchw) && !lies_dense(spec, Layout::nhwc))
        return "a tensor that a stage reads is not dense, and a norm and a mean follow";
    }
  }
  const auto found = wide_numbers<GemmMmaNumbers>(problem);
  const GemmMmaNumbers& numbers = *found;
  if (numbers.shared_bytes == 0) return "the window of a tile is too large";
  constexpr int64_t most_tiles = int64_t{1} << 31;
  if (shape.batch.value() * numbers.tiles(shape) >= most_tiles) return "too many tiles";
  return "";
}

double GemmMma::seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const auto found = wide_numbers<GemmMmaNumbers>(problem);
  const GemmMmaNumbers& numbers = *found;
  const auto samples = static_cast<double>(shape.batch.value());
  const auto tiles = numbers.tiles(shape);
  // Tiles that do not fill the GPU leave multiprocessors idle.
  const auto rounds = static_cast<double>(divide_up(shape.batch.value() * tiles, gpu.multiprocessors));
  const double clocks = numbers.clocks / static_cast<double>(tiles) * rounds;
  const double elements = samples * static_cast<double>(shape.channels) * static_cast<double>(shape.spatial);
  const auto input = static_cast<double>(problem.input.byte_span());
  const auto output = static_cast<double>(problem.output.byte_span());
  const bool second = shape.parts.norm && !shape.parts.mean_follows_norm();
  const double first_bytes = input + (second ? 4 * elements : output);
  const double second_bytes = second ? 4 * elements + output : 0;
  const double packed = static_cast<double>(problem.parameters[0].byte_span() + numbers.weight_bytes());
  // On an H200 tiles take 1.03 to 1.15 times as long as they are predicted to.
  const double own = (second ? 3e-5 : 2.5e-5) + (2 * packed + second_bytes) / gpu.bytes_per_second +
                     std::max({first_bytes / gpu.bytes_per_second, 1.1 * clocks / gpu.clock(),
                               numbers.merges_classes ? scattered_seconds(problem, shape) : 0.0});
  // On GPUs with wgmma, s19, s61 and layers of U-Nets take 1.4 to 2.2 times as long here as by wgmma, which
  // the models of both do not show. A layer that doubles an image takes 0.7 times as long. Groups are as
  // predicted.
  const bool has_wgmma = gpu.architecture == "sm_90a";
  return has_wgmma && shape.conv_groups == 1 ? 1.45 * own : own;
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_mma = cuda::row_of<cuda::GemmMma>("gemm_mma");

}  // namespace onepass
