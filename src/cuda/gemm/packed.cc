// The row "gemm_packed": a wide convolution of stride 1 as a matrix product over the positions of all samples
// (gemm/packed.cuh), then what follows it as a tail. For layers whose samples have too few tiles to fill a
// GPU.
#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "cuda/gemm/packed_numbers.h"
#include "cuda/gemm/workspace.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t threads = 384;  // gemm/packed.cuh
constexpr int64_t pack_threads = GemmPackedNumbers::pack_threads;
constexpr int64_t piece_rows = WeightPieces::rows;
constexpr int64_t least_taps = 3;  // else x is copied for too few products

class GemmPacked final : public WholeBlockKernel {
 public:
  explicit GemmPacked(const Problem& problem)
      : WholeBlockKernel(problem),
        numbers_(*wide_numbers<GemmPackedNumbers>(problem)),
        tail_problem_(*tail_after_convolution(problem)),
        tail_(build_tail(tail_problem_)),
        redo_(problem) {
    const GemmPackedNumbers& n = numbers_;
    const Device& device = problem.device;
    compile(std::vector<Source>{steps_source(), product_kernel_source()}, gpu_of(device).architecture);
    steps_.emplace(steps_source(), device,
                   Launch{1, static_cast<uint32_t>(pack_threads), 1, static_cast<uint32_t>(n.pieces.bytes),
                          false, true});
    product_.emplace(product_kernel_source(), device,
                     Launch{1, static_cast<uint32_t>(threads), 1,
                            static_cast<uint32_t>(n.shared_bytes(n.stages)), false, true});
    tiles_ = n.tiles(shape_.samples).called("tiles");
    length_ = n.length(shape_.samples).called("length");
    input_items_ =
        (divide_up(length_, pack_threads) * (n.conv_groups * n.input_channels / 16)).called("input_items");
    blocks_ = minimum(tiles_ * n.channel_tiles(), product_->resident_clusters());
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ = regions_.add(when(guards(), shape_.batch * 4));
    // Of weights alone, side by side: what a caller may keep.
    scales_ = regions_.add(when(guards(), (n.padded_channels() + 2) * 4));
    row_largest_ = regions_.add(when(guards(), n.padded_channels() * 4));
    row_sums_ = regions_.add(when(guards(), n.padded_channels() * 8));
    piece_marks_ = regions_.add(when(!guards(), weight_items() * 4));
    packed_weights_ = regions_.add(n.weight_bytes());
    packed_input_ = regions_.add(length_ * (n.conv_groups * n.input_channels * 2));
    values_ = regions_.add(shape_.rows() * shape_.spatial * 4);
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
    redo_memory_ = regions_.add(redo_.bytes());
  }

  Accuracy accuracy() const override {
    Accuracy own = tail_.kernel->accuracy();
    own.cut_terms = cut_terms(problem_, shape_);
    return own;
  }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + tail_.kernel->workspace_bytes();
  }

  size_t packed_bytes() const override {
    const Number bytes = scales_.bytes + row_largest_.bytes + row_sums_.bytes + piece_marks_.bytes;
    return static_cast<size_t>(bytes.value() + packed_weights_.bytes.value());
  }
  uint64_t packing() const override {
    return packing_of(*steps_, weight_items(), static_cast<int64_t>(packed_bytes()));
  }

  std::string describe() const override {
    const GemmPackedNumbers& n = numbers_;
    std::ostringstream out;
    out << "convolution: " << shape_.in_channels * n.taps << " terms"
        << (n.conv_groups == 1 ? "" : " in each of " + std::to_string(n.conv_groups) + " groups")
        << ", operands packed first, " << (guards() ? "rounded to f16, as to tf32" : "as they are") << '\n'
        << "tile: " << n.tile_channels << (n.classes_apart ? " channels of one class, " : " channels, ")
        << n.tile_positions << " positions of all samples, " << tiles_.value() * n.channel_tiles() << " tiles"
        << (n.shared_by == GemmPackedNumbers::Groups::turns ? ", warpgroups by turns\n" : "\n")
        << "stages: " << n.stages << " of " << n.chunk_channels << " channels, " << n.group_taps
        << " taps, a window of " << n.window << " positions\n"
        << "blocks: " << describe_blocks(blocks_, *product_) << "then: " << tail_.row
        << (guards() ? ", thin_cores for samples whose values overflow f16" : "") << '\n'
        << "workspace: " << workspace_bytes() << " bytes\n"
        << tail_.kernel->describe();
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(guards(), rounding_note(problem_)) + where(guards(), note::redone) +
           tail_.kernel->numerics();
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    const LaunchChain chain;
    const bool packs = arguments.packed == nullptr;
    if (guards()) {
      const Number own = marks_.bytes + guard_.bytes;
      clear(at(workspace, marks_), packs ? own + cleared_of_weights() : own, stream, problem_.device);
    }
    float* const statistics = arguments.statistics || !shape_.parts.norm
                                  ? arguments.statistics
                                  : static_cast<float*>(at(workspace, statistics_));
    void* const redo = at(workspace, redo_memory_);
    PackedGemmParameters p;
    p.input = arguments.input;
    p.values = at(workspace, values_);
    p.statistics = statistics;
    p.only = at(workspace, marks_);
    p.guard = at(workspace, guard_);
    p.packed_input = at(workspace, packed_input_);
    fill_weights(p, arguments, workspace);
    p.control = redo_.control(redo);
    p.batch = shape_.batch;
    p.length = length_;
    p.tiles = tiles_;
    p.parameter = arguments.parameters;
    if (packs) {
      launch_step(p, step_pack, input_items_ + weight_items(), stream);
      if (guards()) launch_step(p, step_pack_again, numbers_.padded_channels() / piece_rows, stream);
    } else {
      launch_step(p, step_pack_input, input_items_, stream);
    }
    p.step = int64_t{step_pack};
    p.launch(*product_, stream, blocks_);
    Arguments tail;
    tail.input = at(workspace, values_);
    tail.output = arguments.output;
    tail.statistics = statistics;
    tail.parameters.assign(arguments.parameters.end() - std::ssize(tail_problem_.parameters),
                           arguments.parameters.end());
    tail_.kernel->launch(tail, at(workspace, Region{regions_.total(), 0}), stream);
    if (guards()) launch_step(p, step_judge, shape_.batch, stream);
    redo_.launch_marked(arguments, redo, at(workspace, marks_), 1, stream);
  }

  void launch_pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const override {
    const LaunchChain chain;
    clear(packed, cleared_of_weights(), stream, problem_.device);
    PackedGemmParameters p;
    p.input = nullptr;
    p.values = nullptr;
    p.statistics = nullptr;
    p.only = nullptr;
    p.guard = nullptr;
    p.packed_input = nullptr;
    fill_weights(p, arguments_of_packing(parameters, packed), nullptr);
    p.control = nullptr;
    p.batch = 0;
    p.length = 0;
    p.tiles = 0;
    p.parameter = parameters;
    launch_step(p, step_pack_weights, weight_items(), stream);
    if (guards()) launch_step(p, step_pack_again, numbers_.padded_channels() / piece_rows, stream);
  }

 private:
  bool guards() const { return problem_.input.dtype == DType::f32; }
  // Bytes of weights that packing begins with as zeros, from scales_ on.
  Number cleared_of_weights() const { return scales_.bytes + row_largest_.bytes + row_sums_.bytes; }
  void fill_weights(PackedGemmParameters& p, const Arguments& arguments, void* workspace) const {
    const auto place = [&](const Region& region) { return packed_at(arguments, workspace, region, scales_); };
    p.scales = place(scales_);
    p.row_largest = place(row_largest_);
    p.row_sums = place(row_sums_);
    p.piece_marks = place(piece_marks_);
    p.packed_weights = place(packed_weights_);
  }
  void launch_step(PackedGemmParameters& p, PackedGemmStep step, const Number& blocks, Stream stream) const {
    p.step = int64_t{step};
    p.launch(*steps_, stream, blocks);
  }
  int64_t weight_items() const {
    return numbers_.pieces.count(numbers_.padded_channels(), numbers_.input_channels);
  }

  std::string structs() const {
    const GemmPackedNumbers& n = numbers_;
    // Dense: two and then three spatial dimensions, as the convolution's.
    const TensorSpec& values = tail_problem_.input;
    const auto stride = [&](size_t d) {
      const size_t rank = values.sizes.size() - 2;
      return d + rank < max_spatial_rank ? int64_t{0} : values.strides[2 + d + rank - max_spatial_rank];
    };
    const std::string constants =
        Constants()
            .add("pitch", n.pitch, "plane", n.plane, "sample", n.sample, "margin", n.margin)
            .add("taps", n.taps, "group_taps", n.group_taps, "parts", 1)
            .add("input_channels", n.input_channels, "chunk_channels", n.chunk_channels)
            .add("chunks", n.chunks(), "steps", n.steps(), "stages", n.stages)
            .add("columns", n.columns, "window", n.window)
            .add("tile_channels", n.tile_channels, "padded_channels", n.padded_channels())
            .flag("groups_share_positions", n.shared_by == GemmPackedNumbers::Groups::channels)
            .flag("groups_take_turns", n.shared_by == GemmPackedNumbers::Groups::turns)
            .flag("scales_x", false, "guards", guards())
            .flag("classes_apart", n.classes_apart)
            .add("part_taps", n.pieces.part_taps, "piece_bytes", n.pieces.bytes)
            .add("shared_bytes", n.shared_bytes(n.stages))
            .add("value_stride_n", values.strides[0], "value_stride_c", values.strides[1])
            .add("value_stride0", stride(0), "value_stride1", stride(1), "value_stride2", stride(2))
            .text();
    return tail_source(problem_) + thin_source(problem_, shape_) +
           wide_numbers_source(problem_, shape_.parts, "::Product", constants);
  }

  Source steps_source() const {
    return agent_kernel("onepass_gemm_packed_steps",
                        "#include \"gemm/packed.cuh\"\nstruct Product;\n" + structs(),
                        "PackedGemmSteps<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(pack_threads), SharedAs::structure);
  }
  Source product_kernel_source() const {
    return agent_kernel("onepass_gemm_packed",
                        "#include \"gemm/packed/product.cuh\"\n" +
                            wgmma_source(numbers_.columns, problem_.input.dtype == DType::bf16) + structs(),
                        "PackedGemm<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(threads) + ", 1", SharedAs::structure);
  }

  GemmPackedNumbers numbers_;
  Problem tail_problem_;
  BuiltTail tail_;
  ThinCores redo_;
  std::optional<Function> steps_, product_;
  Number tiles_, length_, input_items_;
  Number blocks_ = 1;
  Regions regions_;
  Region marks_, guard_, scales_, row_largest_, row_sums_, piece_marks_, packed_input_, packed_weights_,
      values_, statistics_, redo_memory_;
};

std::string refusal(const Problem& problem) {
  std::string reason = wgmma_refusal(problem);
  if (!reason.empty()) return reason;
  if (problem.input.dtype == DType::f32 && !problem.rounds_to_tf32())
    return "strict f32: products of f16 are not as exact";
  const ThinShape shape(problem);
  for (const ThinAxis& axis : shape.axes) {
    if (axis.step != 1) return "the convolution has a stride";
  }
  if (shape.taps < least_taps) return "a kernel of fewer than " + std::to_string(least_taps) + " taps";
  for (const ThinAxis& axis : shape.axes) {
    if (std::any_of(axis.classes.begin(), axis.classes.end(),
                    [](const ThinAxis::Class& own) { return own.count == 0; })) {
      return "outputs of the transposed convolution meet no tap";
    }
  }
  const std::optional<Problem> tail = tail_after_convolution(problem);
  if (!tail) return "nothing follows the convolution";
  if (tail_row(*tail) == nullptr) return "no row takes what follows the convolution";
  const auto found = wide_numbers<GemmPackedNumbers>(problem);
  const GemmPackedNumbers& numbers = *found;
  if (numbers.columns == 0) return "the window of a tile is too large";
  constexpr int64_t most = int64_t{1} << 31;  // positions, pieces of work, elements of the output
  const int64_t length = numbers.length(shape.samples);
  const int64_t channels = numbers.conv_groups * numbers.input_channels;
  if (length + numbers.sample >= most || length / pack_threads * (channels / 16) >= most / 2 ||
      shape.rows() * shape.spatial >= most) {
    return "more than 2^31 positions or outputs";
  }
  return "";
}

double seconds(const Problem& problem, const PlanOptions&) {
  const WideCost<GemmPackedNumbers> cost(problem);
  const GemmPackedNumbers& numbers = *cost.numbers;
  const Problem tail = *tail_after_convolution(problem);
  const bool guards = problem.input.dtype == DType::f32;
  const auto weights = static_cast<double>(problem.parameters[0].byte_span());
  const double packed = static_cast<double>(problem.input.byte_span()) +
                        static_cast<double>(numbers.length(cost.shape.samples) * numbers.conv_groups *
                                            numbers.input_channels * 2) +
                        weights + static_cast<double>(numbers.weight_bytes());
  // Below the highest clock: 1.7 of 1.98 GHz.
  double product = numbers.clocks / cost.clock(0.86);
  // Values of one class are every s-th element of a row: of s = 2 the product stored 0.7 TB/s, of 3 0.5.
  if (numbers.classes_apart && layout_of_values(problem) == Layout::nchw) {
    const auto values = static_cast<double>((cost.shape.rows() * cost.shape.spatial).value()) * 4;
    const auto apart = static_cast<double>(cost.shape.axes[2].classes.size());
    product = std::max(product, values * apart / (0.34 * cost.gpu.bytes_per_second));
  }
  return (guards ? 8e-6 : 3e-6) + 1.2 * packed / cost.gpu.bytes_per_second + product +
         values_factor(tail) * tail_row(tail)->seconds(tail, {});
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_packed =
    cuda::row_of<cuda::GemmPacked>("gemm_packed", cuda::refusal, cuda::seconds);

}  // namespace onepass
