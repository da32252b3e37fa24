// The row "gemm_wgmma": a wide convolution with all that follows it as an implicit matrix product by Hopper's
// wgmma, in one launch after a small one that packs the weights.
#include <algorithm>
#include <optional>
#include <sstream>

#include "cuda/gemm/wgmma_numbers.h"
#include "cuda/notes.h"
#include "cuda/runtime/parameters.h"
#include "gemm/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t threads = 384;          // gemm/wgmma.cuh
constexpr int64_t moments_threads = 128;  // a warp for each slab

class GemmWgmma final : public Kernel {
 public:
  static std::string refusal(const Problem& problem);
  static double seconds(const Problem& problem, const PlanOptions& options);

  explicit GemmWgmma(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        flat_(shape_),
        numbers_(*wide_numbers<GemmWgmmaNumbers>(problem)),
        pack_(pack_source(), problem.device,
              {numbers_.padded_channels() / pack_channels(), 256, 1,
               static_cast<uint32_t>(packs_staged() ? pack_bytes(pack_channels()) : 0)}),
        function_(source(), problem.device, launch_numbers()),
        redo_(problem) {
    if (numbers_.stored) {
      finish_.emplace(problem, shape_, is_planar());
      moments_.emplace(moments_source(), problem.device,
                       Launch{divide_up(shape_.slabs(), moments_threads / 32), moments_threads});
    }
    const Number resident = function_.resident_clusters();
    const Number units = shape_.batch * (numbers_.channel_tiles / numbers_.unit_channel_tiles);
    // Twice as many tiles as run at a time: pass 2 of a wave then finds pass 1 done.
    wave_units_ =
        clamp(divide_up(2 * resident, numbers_.unit_tiles()), 1, maximum(1, units)).called("wave_units");
    blocks_ =
        clamp(shape_.batch * numbers_.tiles() * (numbers_.stored ? 1 : numbers_.passes(shape_)), 1, resident);
    // Held units begin together: as many as there is room for, whole.
    if (numbers_.held) {
      function_.require_resident(numbers_.unit_tiles());
      blocks_ = minimum(units, divide(resident, numbers_.unit_tiles())) * numbers_.unit_tiles();
    }
    const int64_t group_rows = GemmWgmmaNumbers::rows_of(shape_) / shape_.groups;
    const int64_t spans =
        numbers_.tile_channels % group_rows == 0 ? 1 : (group_rows - 1) / numbers_.tile_channels + 2;
    control_ = regions_.add(units * 4 * 4);
    marks_ = regions_.add((shape_.batch + 1) * 4);
    guard_ = regions_.add(shape_.batch * 4);
    scales_ = regions_.add((numbers_.padded_channels() + 1) * 4);
    cleared_bytes_ = regions_.total();
    packed_ = regions_.add(numbers_.weight_bytes());
    const int64_t agents = numbers_.apart ? 2 : 1;
    parts_ =
        regions_.add(when(shape_.parts.norm, shape_.slabs() * spans * numbers_.position_tiles * agents * 16));
    sums_ = regions_.add(when(shape_.parts.mean, shape_.rows() * numbers_.position_tiles * 4));
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
    values_ = regions_.add(when(has_own_values(), shape_.rows() * shape_.spatial * 4));
  }

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + redo_.workspace_bytes();
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.in_channels * numbers_.taps << " terms" << describe_groups(shape_)
        << ", "
        << (!guards()             ? "operands as they are"
            : numbers_.parts == 2 ? "operands split in two of f16"
                                  : "operands rounded to f16, as to tf32")
        << '\n'
        << "tile: " << numbers_.tile_channels << " channels, " << numbers_.tile_positions << " positions, "
        << numbers_.tiles() << " tiles a sample of " << flat_.positions << " positions"
        << (GemmWgmmaNumbers::is_empty(numbers_.box)
                ? ""
                : " (boxes of " + std::to_string(numbers_.box[0]) + "x" + std::to_string(numbers_.box[1]) +
                      "x" + std::to_string(numbers_.box[2]) + ")")
        << ", " << numbers_.unit_tiles() << " a unit\n"
        << "window: " << numbers_.windows.count << " of " << numbers_.windows.positions << " positions, "
        << numbers_.x_stages << " stages of " << numbers_.chunk_channels << " channels"
        << (numbers_.copies ? ", " + std::to_string(numbers_.raw_slots) + " copies of " +
                                  std::to_string(numbers_.slot_channels) + " channels ahead"
                            : "")
        << '\n'
        << "weights: " << (numbers_.weights_stay ? "all in shared memory, " : "") << numbers_.weight_stages
        << " stages of " << numbers_.group_taps << " taps\n"
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << numbers_.passes(shape_)
        << (numbers_.held      ? ", values held in registers"
            : has_own_values() ? ", values in memory between them"
            : numbers_.stored  ? ", values in the output between them"
                               : "")
        << (numbers_.late_vectors > 0 ? ", " + std::to_string(numbers_.late_vectors * 8) +
                                            " columns stored while the next tile is multiplied"
                                      : "")
        << '\n'
        << "then: thin_cores for samples whose values overflow f16\n"
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(guards() && numbers_.parts == 1, rounding_note(problem_)) + where(guards(), note::redone) +
           notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    clear(at(workspace, control_), cleared_bytes_, stream, problem_.device);
    GemmPackParameters pack;
    pack.weights = arguments.parameters[0];
    pack.packed = at(workspace, packed_);
    pack.scales = at(workspace, scales_);
    pack.only = at(workspace, marks_);
    pack.batch = shape_.batch;
    pack.launch(pack_, stream);
    void* const values = has_own_values() ? at(workspace, values_) : arguments.output;
    void* const statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    GemmParameters p;
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
    p.wave_units = wave_units_;
    p.parameter = arguments.parameters;
    p.launch(function_, stream, blocks_);
    if (finish_) {
      p.launch(*moments_, stream);
      finish_->launch(arguments, values, statistics, stream);
    }
    redo_.launch_marked(arguments, at(workspace, Region{regions_.total(), 0}), at(workspace, marks_), stream);
  }

 private:
  // The rows of a warp are whole slabs.
  bool rows_are_slabs() const {
    const int64_t group_rows = GemmWgmmaNumbers::rows_of(shape_) / std::max<int64_t>(1, shape_.groups);
    return numbers_.held && numbers_.groups_share_positions && 16 % group_rows == 0;
  }
  bool guards() const { return problem_.input.dtype == DType::f32; }
  // Values between the passes have no room in the output.
  bool has_own_values() const { return numbers_.stored && problem_.output.dtype != DType::f32; }
  // Packing: several channels to a block where they are many, since it writes 16 bytes of each; their weights
  // once through shared memory where they fit.
  int64_t pack_bytes(int64_t channels) const {
    return channels * shape_.in_channels * numbers_.taps * byte_size(problem_.parameters[0].dtype);
  }
  int64_t pack_channels() const {
    constexpr int64_t least_blocks = 256;
    constexpr int64_t two_blocks_fit = 110 << 10;
    for (const int64_t channels : {4, 2}) {
      if (numbers_.padded_channels() / channels >= least_blocks && pack_bytes(channels) <= two_blocks_fit)
        return channels;
    }
    return 1;
  }
  bool packs_staged() const { return pack_bytes(pack_channels()) <= 200 << 10; }
  bool is_planar() const {
    const TensorSpec& output = problem_.output;
    return output.strides == TensorSpec::dense(output.dtype, output.sizes).strides;
  }

  // `struct Numbers`.
  std::string numbers_source() const {
    const GemmWgmmaNumbers& n = numbers_;
    const TailParts& parts = shape_.parts;
    const auto reads_tensors = [](const std::vector<TailParts::Stage>& stages) {
      return std::any_of(stages.begin(), stages.end(), [](const TailParts::Stage& stage) {
        return argument_kind(stage.pointwise.op) == ArgumentKind::tensor;
      });
    };
    std::ostringstream out;
    out << "struct Numbers {\n  using Operand = onepass::"
        << (problem_.input.dtype == DType::bf16 ? "bf16" : "f16") << ";\n  using Product = ::Product;\n"
        << "  static constexpr float steepness = " << std::showpoint << steepness(parts) << "f;\n"
        << Constants()
               .add("pitch", n.pitch)
               .add("plane", n.plane)
               .flag("boxed", !GemmWgmmaNumbers::is_empty(n.box))
               .add("box_z", n.box[0])
               .add("box_y", n.box[1])
               .add("box_x", n.box[2])
               .add("boxes_y", n.boxes[1])
               .add("boxes_x", n.boxes[2])
               .add("positions", flat_.positions)
               .add("window_split", n.windows.split)
               .add("window", n.windows.positions)
               .add("windows", n.windows.count)
               .add("tile_positions", n.tile_positions)
               .add("tile_channels", n.tile_channels)
               .add("columns", n.columns)
               .flag("groups_share_positions", n.groups_share_positions)
               .add("position_tiles", n.position_tiles)
               .add("channel_tiles", n.channel_tiles)
               .add("unit_channel_tiles", n.unit_channel_tiles)
               .add("padded_channels", n.padded_channels())
               .add("chunk_channels", n.chunk_channels)
               .add("chunks", n.chunks)
               .add("taps", n.taps)
               .add("group_taps", n.group_taps)
               .add("parts", n.parts)
               .add("x_stages", n.x_stages)
               .add("x_stage_bytes", n.x_stage_bytes())
               .add("weight_stages", n.weight_stages)
               .add("weight_stage_bytes", n.weight_stage_bytes())
               .flag("weights_stay", n.weights_stay)
               .flag("by_vectors", n.by_vectors)
               .flag("copies", n.copies)
               .add("slot_channels", n.slot_channels)
               .add("raw_slots", n.raw_slots)
               .add("raw_pitch", n.raw_pitch)
               .add("raw_slot_bytes", n.raw_slot_bytes)
               .flag("apart", n.apart)
               .add("stagger", n.stagger)
               .add("late_vectors", n.late_vectors)
               .add("late_pitch", n.late_pitch)
               .flag("rows_are_slabs", rows_are_slabs())
               .flag("has_after", !parts.after.empty())
               .flag("held", n.held)
               .flag("stored", n.stored)
               .flag("guards", guards())
               .flag("before_reads_tensors", reads_tensors(parts.before))
               .flag("after_reads_tensors", reads_tensors(parts.after))
               .add("shared_bytes", n.shared_bytes)
               .add("pack_channels", pack_channels())
               .flag("pack_staged", packs_staged())
               .text()
        << flat_.source() << "};\n";
    return out.str();
  }

  Source source() const {
    return {"onepass_gemm_wgmma",
            "#include \"gemm/wgmma.cuh\"\n" +
                tail_source(problem_, bits_of(problem_, problem_.output.dtype)) +
                thin_source(problem_, shape_) +
                wgmma_source(numbers_.columns, problem_.input.dtype == DType::bf16) + numbers_source() +
                "using Agent = onepass::Gemm<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(threads) +
                ", 1) onepass_gemm_wgmma(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char shared[];\n"
                "  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();\n"
                "}\n"};
  }

  Source pack_source() const {
    return {"onepass_gemm_pack",
            "#include \"gemm/source/pack.cuh\"\nstruct Product;\n" + tail_source(problem_) +
                thin_source(problem_, shape_) + numbers_source() +
                "extern \"C\" __global__ void __launch_bounds__(256)\n"
                "onepass_gemm_pack(const __grid_constant__ onepass::GemmPackParameters p) {\n"
                "  extern __shared__ __align__(16) unsigned char staged[];\n"
                "  onepass::GemmPack<onepass::Convolution, Numbers>{p, staged}.run();\n"
                "}\n"};
  }

  Source moments_source() const {
    return {"onepass_gemm_moments",
            "#include \"gemm/store/epilogue.cuh\"\nstruct Product;\n" + tail_source(problem_) +
                thin_source(problem_, shape_) + numbers_source() +
                "using Agent = onepass::GemmSlabs<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(moments_threads) +
                ") onepass_gemm_moments(const __grid_constant__ Agent::Parameters p) {\n"
                "  Agent{p}.run();\n"
                "}\n"};
  }

  Launch launch_numbers() const {
    const bool waits = shape_.parts.norm && !shape_.parts.mean_follows_norm() && !numbers_.stored;
    return {1, static_cast<uint32_t>(threads), 1, static_cast<uint32_t>(numbers_.shared_bytes), waits};
  }

  Problem problem_;
  ThinShape shape_;
  FlatGeometry flat_;
  GemmWgmmaNumbers numbers_;
  Function pack_;
  Function function_;
  // Where values are stored between the passes.
  std::optional<Function> moments_;
  std::optional<GemmFinish> finish_;
  ThinCores redo_;
  Number wave_units_ = 1;
  Number blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region control_, marks_, guard_, scales_, packed_, parts_, sums_, statistics_, values_;
};

std::string GemmWgmma::refusal(const Problem& problem) {
  std::string reason = wide_refusal(problem);
  if (!reason.empty()) return reason;
  const Gpu& gpu = gpu_of(problem.device);
  if (gpu.architecture != "sm_90a") return "it needs wgmma, which sm_90a alone has";
  const ThinShape shape(problem);
  if (!classes_meet_alike(shape))
    return "outputs of the transposed convolution meet different elements, by its stride";
  if (shape.classes() > 1 && shape.parts.mean)
    return "the transposed convolution has a stride, and a mean follows";
  constexpr int64_t most = int64_t{1} << 30;  // positions, and elements of a sample of x: bytes are 32 bits
  if (FlatGeometry(shape).plane * (shape.axes[0].out + shape.axes[0].kernel) >= most ||
      problem.input.byte_span() / std::max<int64_t>(1, shape.samples.value()) >= 4 * most) {
    return "a sample of the input is too large";
  }
  if (wide_numbers<GemmWgmmaNumbers>(problem)->columns == 0) return "the window of a tile is too large";
  return "";
}

double GemmWgmma::seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const auto found = wide_numbers<GemmWgmmaNumbers>(problem);
  const GemmWgmmaNumbers& numbers = *found;
  const double bytes =
      static_cast<double>(problem.output.byte_span()) + static_cast<double>(problem.input.byte_span());
  // Tensor cores at work keep a GPU below its highest clock: 1.75 of 1.98 GHz.
  const double clock = gpu.flops / 256 / gpu.multiprocessors * 0.885;
  // Weights are read and packed before.
  const double packed = static_cast<double>(problem.parameters[0].byte_span() + numbers.weight_bytes());
  // What tiles take of their count: those of s19 and s61, one after the other many times, 0.72 to 0.78; where
  // there are a few rounds, or values are stored and loaded again, 0.93 to 1.1.
  const double rounds = numbers.rounds(shape, gpu);
  const bool steady = numbers.held || numbers.parts == 2;
  const double taken = steady ? std::min(1.0, 0.72 + 0.9 / std::max(1.0, rounds)) : 1.0;
  return 2e-5 + 2 * packed / gpu.bytes_per_second +
         std::max({bytes / gpu.bytes_per_second, taken * rounds * numbers.clocks_of_tile / clock,
                   scattered_seconds(problem, shape)});
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_wgmma = cuda::row_of<cuda::GemmWgmma>("gemm_wgmma");

}  // namespace onepass
