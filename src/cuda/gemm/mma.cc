// The row "gemm_mma": a wide convolution with all that follows it as an implicit matrix product by mma.sync,
// on every GPU from sm_80 on. One launch packs the weights, one convolves up to the norm, and one computes
// the norm and what follows it, of values in memory or of values that it computes again.
#include <algorithm>
#include <sstream>

#include "cuda/gemm/mma_numbers.h"
#include "cuda/gemm/workspace.h"
#include "cuda/notes.h"

namespace onepass {

namespace cuda {
namespace {

class GemmMma final : public WholeBlockKernel {
 public:
  explicit GemmMma(const Problem& problem)
      : WholeBlockKernel(problem),
        numbers_(*wide_numbers<GemmMmaNumbers>(problem)),
        packing_(problem, shape_, padded_channels(), numbers_.most_whole_taps, numbers_.joint_taps,
                 numbers_.row_taps.count(), numbers_.span),
        pack_(pack_source(), problem.device, pack_launch()),
        function_(source(), problem.device,
                  Launch{maximum(1, shape_.batch * numbers_.tiles()),
                         static_cast<uint32_t>(numbers_.tile.threads()), 1,
                         static_cast<uint32_t>(numbers_.shared_bytes)}),
        workspace_(problem, shape_, sizes()) {}

  Accuracy accuracy() const override { return accuracy_of_products(problem_, shape_); }
  size_t workspace_bytes() const override { return workspace_.bytes(); }
  size_t packed_bytes() const override { return static_cast<size_t>(workspace_.packed_bytes()); }
  uint64_t packing() const override {
    return packing_of(pack_, pack_launch().blocks, workspace_.packed_bytes());
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
        << n.own_columns() * n.row_taps.outputs << " outputs (" << n.tile.positions() << "), " << n.tiles()
        << " tiles a sample\n"
        << "window: " << n.window() << " positions, "
        << (n.span > 1 ? std::to_string(n.span) + " taps of x in a vector, " : "")
        << (n.windows == 1 ? "one stage of " : "2 stages of ") << n.chunk_channels() << " channels"
        << (n.copied_run > 0   ? ", copied along x"
            : n.copies_vectors ? ", copied"
                               : "")
        << '\n'
        << "weights: " << n.stages << " stages of " << n.group_joints
        << (n.joint_taps == 2 ? " pairs of taps" : " taps") << '\n'
        << "blocks: " << describe_blocks(shape_.batch * n.tiles(), function_);
    if (n.row_taps.count() > 1)
      out << "rows: " << n.row_taps.count() << (n.row_taps.axis.classes[0].count > 1 ? " groups of" : "")
          << " taps along x of each channel, added from shared memory\n";
    if (n.recomputes) out << "second: the same launch computes values again\n";
    if (workspace_.finishes())
      out << "second: values " << (workspace_.own_values() ? "of the workspace" : "of the output") << '\n';
    out << "then: thin_cores for samples whose values " << (n.halves ? "overflow f16 or " : "")
        << "are not finite\n"
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
    workspace_.clear(arguments, workspace, stream);
    if (arguments.packed == nullptr) pack_weights(arguments, workspace, stream);
    GemmMmaParameters p;
    workspace_.fill(p, arguments, workspace);
    for (int again = 0; again <= (numbers_.recomputes ? 1 : 0); ++again) {
      p.again = again;
      p.launch(function_, stream);
    }
    workspace_.launch_rest(arguments, workspace, stream);
  }

  void launch_pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const override {
    workspace_.clear_packed(packed, stream);
    pack_weights(arguments_of_packing(parameters, packed), nullptr, stream);
  }

 private:
  void pack_weights(const Arguments& arguments, void* workspace, Stream stream) const {
    if (packs_classes()) {
      GemmMmaPackParameters pack;
      workspace_.fill_pack(pack, arguments, workspace);
      pack.launch(pack_, stream);
    } else {
      GemmPackParameters pack;
      workspace_.fill_pack(pack, arguments, workspace);
      pack.scales = workspace_.scales_of(arguments, workspace);
      pack.launch(pack_, stream);
    }
  }
  // Whether the norm waits for other tiles, with values in memory.
  bool keeps_values() const { return GemmMmaNumbers::has_second(shape_) && !numbers_.recomputes; }
  WideWorkspace::Sizes sizes() const {
    const int64_t tiles_of_slab = numbers_.classes * numbers_.position_tiles;
    const int64_t counters = 1 + (numbers_.recomputes && shape_.parts.mean ? numbers_.channel_tiles : 0);
    return {.control_words = shape_.batch * counters,
            .padded_channels = padded_channels(),
            .weight_bytes = numbers_.weight_bytes(),
            .slab_parts = numbers_.spans(shape_) * tiles_of_slab,
            .row_sums = numbers_.sums_rows(shape_) ? tiles_of_slab : 0,
            .own_values = keeps_values() && (shape_.parts.mean || problem_.output.dtype != DType::f32),
            .finishes = keeps_values(),
            .planar = is_planar()};
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
  // One class is packed as for gemm_wgmma.
  bool packs_classes() const { return numbers_.classes > 1; }
  int64_t padded_channels() const {
    return shape_.conv_groups * numbers_.channel_tiles * numbers_.tile.rows();
  }
  Launch pack_launch() const {
    if (!packs_classes()) return packing_.launch();
    const int64_t vectors = padded_channels() * numbers_.chunks * numbers_.vectors * numbers_.classes;
    return {divide_up(vectors, WeightPack::threads), WeightPack::threads};
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
    const auto table = [](const char* type, const char* name, size_t count, const auto& value) {
      std::ostringstream out;
      out << "  static constexpr __device__ " << type << ' ' << name << "(int d) { return ";
      for (size_t d = 0; d + 1 < count; ++d) out << "d == " << d << " ? " << value(d) << " : ";
      out << value(count - 1) << "; }\n";
      return out.str();
    };
    const TailParts& parts = shape_.parts;
    const Shape all_strides = strides();
    const GemmMmaNumbers::Outputs outputs = n.outputs();
    const char* const product = problem_.input.dtype == DType::bf16 ? "Bf16"
                                : n.of_vector == 8                  ? "F16"
                                                                    : "Tf32";
    const std::string constants =
        Constants()
            .add("threads", n.tile.threads(), "warps_n", n.tile.warps_n)
            .add("row_tiles", n.tile.row_tiles, "column_tiles", n.tile.column_tiles)
            .add("tile_rows", n.tile.rows(), "tile_positions", n.tile.positions(), "team", 4)
            .add("own_columns", n.own_columns(), "column_outputs", n.row_taps.outputs)
            .add("output_row_tiles", outputs.row_tiles, "output_column_tiles", outputs.column_tiles)
            .add("output_team", outputs.team, "output_positions", n.output_positions())
            .flag("merges_classes", n.merges_classes, "small_samples", has_small_samples())
            .add("boxes_y", n.boxes[1], "boxes_x", n.boxes[2], "position_tiles", n.position_tiles)
            .add("channel_tiles", n.channel_tiles, "spans", n.spans(shape_))
            .add("parts", n.parts, "vectors", n.vectors, "of_vector", n.of_vector)
            .add("padded_channels", padded_channels(), "chunks", n.chunks, "stages", n.stages)
            .add("group_joints", n.group_joints, "most_joints", std::max<int64_t>(1, n.most_joints))
            .flag("odd_taps", n.odd_taps, "partial_groups", n.has_partial_groups())
            .add("windows", n.windows)
            .add("batch_vectors", n.batch_vectors, "group_batches", n.group_batches)
            .add("window_pitch", n.window_pitch, "shared_bytes", n.shared_bytes)
            .flag("scales_x", n.halves, "guards", n.halves, "copies_vectors", n.copies_vectors)
            .add("copied_run", n.copied_run)
            .flag("chain_reads_tensors", reads_tensors(parts.norm ? parts.before : parts.after))
            .flag("recomputes", n.recomputes, "second_chain_reads_tensors", reads_tensors(parts.after))
            // Of gemm/source/pack.cuh alone.
            .add("tile_channels", n.tile.rows(), "chunk_channels", n.chunk_channels(), "taps", n.most_taps)
            .text();
    return wide_numbers_source(
        problem_, parts, std::string("onepass::mma::") + product,
        "  using OfKernel = Numbers;\n" + constants + packing_.constants() + n.row_taps.source() +
            table("int", "box", 3, [&](size_t d) { return n.box[d]; }) +
            table("int", "entries", 3, [&](size_t d) { return n.axes[d].entries; }) +
            table("int", "width", 3, [&](size_t d) { return n.axes[d].width; }) +
            table("int", "unit", 3, [&](size_t d) { return n.axes[d].unit; }) +
            table("bool", "compact", 3, [&](size_t d) { return n.axes[d].compact ? "true" : "false"; }) +
            table("long long", "stride", 5, [&](size_t d) { return std::to_string(all_strides[d]) + "ll"; }));
  }
  // Chains of so many bits.
  std::string structs(int bits) const {
    return tail_source(problem_, bits) + thin_source(problem_, numbers_.row_taps.product(shape_)) +
           numbers_source();
  }

  // The convolution as the mainloop sees it.
  static std::string spanned() {
    return "using Spanned = onepass::SpannedConvolution<onepass::Convolution, Numbers::span>;\n";
  }

  Source source() const {
    return agent_kernel(
        "onepass_gemm_mma",
        "#include \"gemm/mma.cuh\"\n" + structs(bits_of(problem_, problem_.output.dtype)) + spanned(),
        "GemmMma<Spanned, onepass::Tail, Numbers>",
        std::to_string(numbers_.tile.threads()) + ", " + std::to_string(numbers_.blocks_wanted),
        SharedAs::structure);
  }

  Source pack_source() const {
    if (!packs_classes()) return WeightPack::source("#include \"device/mma.cuh\"\n" + structs(32));
    return agent_kernel("onepass_gemm_mma_pack", "#include \"gemm/mma/pack.cuh\"\n" + structs(32) + spanned(),
                        "GemmMmaPack<Spanned, onepass::Tail, Numbers>", std::to_string(WeightPack::threads),
                        SharedAs::none);
  }

  GemmMmaNumbers numbers_;
  WeightPack packing_;
  Function pack_;
  Function function_;
  WideWorkspace workspace_;
};

// A group of few channels pays for whole vectors of inputs and 16 rows of outputs.
constexpr double most_padding = 9;

std::string refusal(const Problem& problem) {
  std::string reason = product_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  if (shape.parts.norm && !shape.parts.mean && !lies_dense(problem.output))
    return "the output is not dense, and a norm waits for it";
  if (shape.parts.norm && shape.parts.mean && !shape.parts.mean_follows_norm()) {
    for (const int index : shape.parts.tensor_parameters()) {
      if (!lies_dense(problem.parameters[static_cast<size_t>(index)]))
        return "a tensor that a stage reads is not dense, and a norm and a mean follow";
    }
  }
  const auto found = wide_numbers<GemmMmaNumbers>(problem);
  const GemmMmaNumbers& numbers = *found;
  if (numbers.padding > most_padding) {
    return "products would be " + std::to_string(static_cast<int64_t>(numbers.padding)) +
           " times as many with zeros that fill vectors and rows";
  }
  if (numbers.shared_bytes == 0) return "the window of a tile is too large";
  constexpr int64_t most_tiles = int64_t{1} << 31;
  if (shape.batch.value() * numbers.tiles() >= most_tiles) return "too many tiles";
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const WideCost<GemmMmaNumbers> cost(problem);
  const ThinShape& shape = cost.shape;
  const Gpu& gpu = cost.gpu;
  const GemmMmaNumbers& numbers = *cost.numbers;
  const double packed = static_cast<double>(problem.parameters[0].byte_span() + numbers.weight_bytes());
  return 5e-6 + 2 * packed / gpu.bytes_per_second +
         numbers.seconds(problem, shape, gpu, shape.batch.value()) +
         numbers.finish_seconds(problem, shape, gpu, shape.batch.value());
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_mma = cuda::row_of<cuda::GemmMma>("gemm_mma", cuda::refusal, cuda::seconds);

}  // namespace onepass
