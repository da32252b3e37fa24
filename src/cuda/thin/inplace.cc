// The row "thin_inplace": a thin convolution with chains and norm in one launch on tensor cores, each output
// computed once, stored, and normalised in place while it is in the second-level cache.
#include <algorithm>
#include <sstream>

#include "cuda/thin/mma.h"

namespace onepass {
namespace cuda {
namespace {

class ThinInplace final : public Kernel {
 public:
  explicit ThinInplace(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        numbers_(problem, shape_, gpu_of(problem.device), true),
        function_(source(), problem.device, launch_numbers()),
        lag_tiles_(lag_tiles()),
        workspace_(shape_, 1, numbers_.tiles, divide_up(numbers_.tiles, 32),
                   ring_samples() * (numbers_.kept_length * 4)),
        blocks_(clamp(shape_.batch * numbers_.tiles + lag_tiles_, 1, function_.resident_clusters())) {}

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override { return workspace_.bytes(); }

  std::string describe() const override {
    std::ostringstream out;
    out << numbers_.describe_convolution(problem_, shape_) << '\n'
        << "tile: " << numbers_.tile_y << " rows of " << numbers_.tile_x << " cells, " << numbers_.tiles
        << " tiles a sample, " << numbers_.stage_y << (numbers_.stage_y == 1 ? " row" : " rows")
        << " stored at a time\n"
        << "lag: " << lag_tiles_ << " tiles between the passes, values in "
        << (in_place() ? "the output\n" : "a ring of the workspace\n")
        << "blocks: " << describe_blocks(blocks_, function_) << "workspace: " << workspace_bytes()
        << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override { return numbers_.notes(problem_); }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    workspace_.clear(workspace, stream, problem_.device);
    ThinParameters p;
    workspace_.fill(p, arguments, workspace);
    p.wave_units = lag_tiles_;
    p.only_words = ring_samples();
    p.launch(function_, stream, blocks_);
  }

 private:
  Number resident_warps() const { return function_.resident_clusters() * numbers_.warps(); }

  // A share comes when all tiles of its sample are most likely there: those of the sample, and two of every
  // warp. (With one of them 4 to 16 channels, kernel 4, take 0.153 ms for 0.129 and 8 to 32 volumes of 64^3
  // 0.91 for 0.80; large tiles are up to 2% faster then, for more of what lies between is in the second-level
  // cache.)
  Number lag_tiles() const {
    return minimum(shape_.batch * numbers_.tiles, 2 * resident_warps() + numbers_.tiles).called("lag_tiles");
  }

  // Samples in the ring: those between the passes, and those of tiles that are being computed.
  Number ring_samples() const {
    if (in_place()) return 0;
    return minimum(shape_.batch, 1 + divide_up(lag_tiles_ + resident_warps(), numbers_.tiles))
        .called("ring_samples");
  }
  bool in_place() const { return problem_.output.dtype == DType::f32 && numbers_.kept_pitch == 0; }

  Source source() const {
    return {"onepass_thin_inplace",
            "#include \"thin/inplace.cuh\"\n" + tail_source(problem_) +
                numbers_.rest_source(problem_, shape_) + thin_source(problem_, shape_) +
                numbers_.source(Constants()
                                    .add("kept_pitch", numbers_.kept_pitch)
                                    .add("kept_length", numbers_.kept_length)
                                    .text()) +
                "using Agent = onepass::ThinInplace<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads) + ", " + std::to_string(512 / numbers_.threads) +
                ") onepass_thin_inplace(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char shared[];\n"
                "  auto& all = *reinterpret_cast<Agent::Shared*>(shared);\n"
                "  Agent{p, all, all.warp[threadIdx.x / 32]}.run();\n"
                "}\n"};
  }

  Launch launch_numbers() const {
    return {1, static_cast<uint32_t>(numbers_.threads), 1, static_cast<uint32_t>(numbers_.shared_bytes)};
  }

  Problem problem_;
  ThinShape shape_;
  MmaNumbers numbers_;
  Function function_;
  Number lag_tiles_;
  ThinWorkspace workspace_;
  Number blocks_;
};

std::string refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  reason = computed_once_refusal(shape);
  if (!reason.empty()) return reason;
  const MmaNumbers numbers(problem, shape, gpu_of(problem.device), true);
  // What the second pass adds to the index of an element before it compares.
  constexpr int64_t most_values = (int64_t{1} << 31) - 4096;
  if (numbers.kept_length >= most_values) return "a sample has too many elements, rows filled up to sectors";
  return mma_refusal(problem, numbers);
}

double seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const MmaNumbers numbers(problem, shape, gpu, true);
  // Values once each way and the output, most of it beside nothing else: the warps that move them do not
  // multiply meanwhile. H200, images of 256 x 256, 8 to 64 channels, kernel 5, tf32: 0.24 ms without the
  // second pass, 0.32 with it.
  const double values = static_cast<double>(numbers.kept_length) * 4 * static_cast<double>(shape.batch);
  const double moved = static_cast<double>(problem.input.byte_span()) +
                       0.5 * (2 * values + static_cast<double>(problem.output.byte_span()));
  const double launched = mma_seconds(problem, shape, numbers, 0);
  // Classes of a transposed convolution leave every few elements of a row: 64 to 32 channels, volumes of 64,
  // take 0.94 ms for 0.66, others up to 1.4 times what is counted, and one sample of s60 0.039 for 0.030.
  // Values of 16 bits go through a ring: images take 1.2 to 1.6 times what is counted, volumes and strides up
  // to 2.3 times.
  const bool is_hard = shape.axes[0].out > 1 || shape.axes[2].step > 1;
  const double spread = shape.classes() > 1 ? 1.45 : !numbers.is_short ? 1.0 : is_hard ? 1.75 : 1.3;
  return spread * (launched + 0.1 * (launched - 1.8e-5) + moved / gpu.bytes_per_second);
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_thin_inplace{
    "thin_inplace", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::ThinInplace>(problem);
    }};

}  // namespace onepass
