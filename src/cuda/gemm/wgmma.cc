// The row "gemm_wgmma": a wide convolution with all that follows it as an implicit matrix product by Hopper's
// wgmma, in one launch after a small one that packs the weights.
#include <algorithm>
#include <optional>
#include <sstream>

#include "cuda/gemm/wgmma_numbers.h"
#include "cuda/gemm/workspace.h"
#include "cuda/notes.h"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t threads = 384;          // gemm/wgmma.cuh
constexpr int64_t moments_threads = 128;  // a warp for each slab

class GemmWgmma final : public WholeBlockKernel {
 public:
  explicit GemmWgmma(const Problem& problem)
      : WholeBlockKernel(problem),
        flat_(shape_),
        numbers_(*wide_numbers<GemmWgmmaNumbers>(problem)),
        packing_(problem, shape_, numbers_.padded_channels(), numbers_.taps),
        pack_(WeightPack::source("struct Product;\n" + structs(32)), problem.device, packing_.launch()),
        function_(source(), problem.device, launch_numbers()),
        workspace_(problem, shape_, sizes()) {
    if (numbers_.stored) {
      moments_.emplace(moments_source(), problem.device,
                       Launch{divide_up(shape_.slabs(), moments_threads / 32), moments_threads});
    }
    const Number resident = function_.resident_clusters();
    // Twice as many tiles as run at a time: pass 2 of a wave then finds pass 1 done.
    wave_units_ =
        clamp(divide_up(2 * resident, numbers_.unit_tiles()), 1, maximum(1, units())).called("wave_units");
    blocks_ =
        clamp(shape_.batch * numbers_.tiles() * (numbers_.stored ? 1 : numbers_.passes(shape_)), 1, resident);
    // Held units begin together: as many as there is room for, whole.
    if (numbers_.held) {
      function_.require_resident(numbers_.unit_tiles());
      blocks_ = minimum(units(), divide(resident, numbers_.unit_tiles())) * numbers_.unit_tiles();
    }
  }

  Accuracy accuracy() const override { return accuracy_of_products(problem_, shape_); }
  size_t workspace_bytes() const override { return workspace_.bytes(); }
  size_t packed_bytes() const override { return static_cast<size_t>(workspace_.packed_bytes()); }
  uint64_t packing() const override {
    return packing_of(pack_, packing_.launch().blocks, workspace_.packed_bytes());
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
        << (numbers_.held             ? ", values held in registers"
            : workspace_.own_values() ? ", values in memory between them"
            : numbers_.stored         ? ", values in the output between them"
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
    workspace_.clear(arguments, workspace, stream);
    if (arguments.packed == nullptr) pack_weights(arguments, workspace, stream);
    GemmParameters p;
    workspace_.fill(p, arguments, workspace);
    p.wave_units = wave_units_;
    p.launch(function_, stream, blocks_);
    if (moments_) p.launch(*moments_, stream);
    workspace_.launch_rest(arguments, workspace, stream);
  }

  void launch_pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const override {
    workspace_.clear_packed(packed, stream);
    pack_weights(arguments_of_packing(parameters, packed), nullptr, stream);
  }

 private:
  void pack_weights(const Arguments& arguments, void* workspace, Stream stream) const {
    GemmPackParameters pack;
    workspace_.fill_pack(pack, arguments, workspace);
    pack.scales = workspace_.scales_of(arguments, workspace);
    pack.launch(pack_, stream);
  }
  int64_t group_rows() const {
    return GemmWgmmaNumbers::rows_of(shape_) / std::max<int64_t>(1, shape_.groups);
  }
  // The rows of a warp are whole slabs.
  bool rows_are_slabs() const {
    return numbers_.held && numbers_.groups_share_positions && 16 % group_rows() == 0;
  }
  bool guards() const { return problem_.input.dtype == DType::f32; }
  Number units() const { return shape_.batch * (numbers_.channel_tiles / numbers_.unit_channel_tiles); }
  WideWorkspace::Sizes sizes() const {
    const GemmWgmmaNumbers& n = numbers_;
    const int64_t spans = n.tile_channels % group_rows() == 0 ? 1 : (group_rows() - 1) / n.tile_channels + 2;
    return {.control_words = units() * 4,
            .padded_channels = n.padded_channels(),
            .weight_bytes = n.weight_bytes(),
            .slab_parts = spans * n.position_tiles * (n.apart ? 2 : 1),
            .row_sums = n.position_tiles,
            .own_values = n.stored && problem_.output.dtype != DType::f32,
            .finishes = n.stored,
            .planar = lies_planar(problem_.output)};
  }

  // `struct Numbers`.
  std::string numbers_source() const {
    const GemmWgmmaNumbers& n = numbers_;
    const TailParts& parts = shape_.parts;
    const std::string constants =
        Constants()
            .add("pitch", n.pitch, "plane", n.plane, "positions", flat_.positions)
            .add("box_z", n.box[0], "box_y", n.box[1], "box_x", n.box[2])
            .add("boxes_y", n.boxes[1], "boxes_x", n.boxes[2])
            .flag("boxed", !GemmWgmmaNumbers::is_empty(n.box))
            .add("window", n.windows.positions, "windows", n.windows.count, "window_split", n.windows.split)
            .add("tile_positions", n.tile_positions, "tile_channels", n.tile_channels, "columns", n.columns)
            .flag("groups_share_positions", n.groups_share_positions, "apart", n.apart)
            .add("position_tiles", n.position_tiles, "channel_tiles", n.channel_tiles)
            .add("unit_channel_tiles", n.unit_channel_tiles, "padded_channels", n.padded_channels())
            .add("chunk_channels", n.chunk_channels, "chunks", n.chunks, "parts", n.parts)
            .add("taps", n.taps, "group_taps", n.group_taps, "stagger", n.stagger)
            .add("x_stages", n.x_stages, "x_stage_bytes", n.x_stage_bytes())
            .add("weight_stages", n.weight_stages, "weight_stage_bytes", n.weight_stage_bytes())
            .flag("weights_stay", n.weights_stay, "by_vectors", n.by_vectors, "copies", n.copies)
            .add("slot_channels", n.slot_channels, "raw_slots", n.raw_slots)
            .add("raw_pitch", n.raw_pitch, "raw_slot_bytes", n.raw_slot_bytes)
            .add("late_vectors", n.late_vectors, "late_pitch", n.late_pitch)
            .flag("rows_are_slabs", rows_are_slabs(), "has_after", !parts.after.empty())
            .flag("held", n.held, "stored", n.stored, "guards", guards(), "scales_x", guards())
            .flag("before_reads_tensors", reads_tensors(parts.before))
            .flag("after_reads_tensors", reads_tensors(parts.after))
            .add("shared_bytes", n.shared_bytes)
            .text();
    return wide_numbers_source(problem_, parts, "::Product",
                               constants + packing_.constants() + flat_.source());
  }
  // Chains of so many bits.
  std::string structs(int bits) const {
    return tail_source(problem_, bits) + thin_source(problem_, shape_) + numbers_source();
  }

  Source source() const {
    return agent_kernel("onepass_gemm_wgmma",
                        "#include \"gemm/wgmma.cuh\"\n" +
                            wgmma_source(numbers_.columns, problem_.input.dtype == DType::bf16) +
                            structs(bits_of(problem_, problem_.output.dtype)),
                        "Gemm<onepass::Convolution, onepass::Tail, Numbers>", std::to_string(threads) + ", 1",
                        SharedAs::structure);
  }

  Source moments_source() const {
    return agent_kernel("onepass_gemm_moments",
                        "#include \"gemm/store/epilogue.cuh\"\nstruct Product;\n" + structs(32),
                        "GemmSlabs<onepass::Convolution, onepass::Tail, Numbers>",
                        std::to_string(moments_threads), SharedAs::none);
  }

  Launch launch_numbers() const {
    const bool waits = shape_.parts.norm && !shape_.parts.mean_follows_norm() && !numbers_.stored;
    return {1, static_cast<uint32_t>(threads), 1, static_cast<uint32_t>(numbers_.shared_bytes), waits};
  }

  FlatGeometry flat_;
  GemmWgmmaNumbers numbers_;
  WeightPack packing_;
  Function pack_;
  Function function_;
  WideWorkspace workspace_;
  std::optional<Function> moments_;  // where values are stored between the passes
  Number wave_units_ = 1;
  Number blocks_ = 1;
};

std::string refusal(const Problem& problem) {
  std::string reason = wgmma_refusal(problem);
  if (!reason.empty()) return reason;
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

double seconds(const Problem& problem, const PlanOptions&) {
  const WideCost<GemmWgmmaNumbers> cost(problem);
  const GemmWgmmaNumbers& numbers = *cost.numbers;
  // Weights are read and packed before.
  const double packed = static_cast<double>(problem.parameters[0].byte_span() + numbers.weight_bytes());
  // What tiles take of their count: those of s19 and s61, one after the other many times, 0.72 to 0.78; where
  // there are a few rounds, values are stored and loaded again, or x is staged by loads, 0.93 to 1.1.
  const double rounds = numbers.rounds(cost.shape, cost.gpu);
  const bool steady = (numbers.held && numbers.copies) || numbers.parts == 2;
  const double taken = steady ? std::min(1.0, 0.72 + 0.9 / std::max(1.0, rounds)) : 1.0;
  return 2e-5 + 2 * packed / cost.gpu.bytes_per_second +
         std::max({cost.moving_seconds(problem), taken * rounds * numbers.clocks_of_tile / cost.clock(),
                   scattered_seconds(problem, cost.shape)});
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_wgmma =
    cuda::row_of<cuda::GemmWgmma>("gemm_wgmma", cuda::refusal, cuda::seconds);

}  // namespace onepass
