// The row "thin_mma": a thin convolution with chains and norm in one launch on tensor cores, the output
// stored.
#include <algorithm>
#include <sstream>

#include "cuda/thin/mma.h"

namespace onepass {
namespace cuda {
namespace {

class ThinMma final : public Kernel {
 public:
  explicit ThinMma(const Problem& problem)
      : problem_(problem),
        shape_(problem),
        numbers_(problem, shape_, gpu_of(problem.device)),
        workspace_(shape_, 1, numbers_.tiles, divide_up(numbers_.tiles, 32)),  // sets of tiles
        function_(source(), problem.device, launch_numbers()) {
    const Number resident = function_.resident_clusters();
    // A tile's second pass comes when all tiles of its sample are most likely measured: every warp has one at
    // a time, and some are late. What is left of the last round of tickets makes that longer.
    const Number warps = resident * numbers_.warps();
    const Number least = minimum(shape_.batch, 1 + divide_up(warps, numbers_.tiles));
    const Number rounds = divide_up((shape_.batch + least) * numbers_.tiles, warps);
    lag_samples_ =
        when(shape_.parts.norm, minimum(shape_.batch, rounds * warps / numbers_.tiles - shape_.batch))
            .called("lag_samples");
    blocks_ = clamp((shape_.batch + lag_samples_) * numbers_.tiles, 1, resident);
  }

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override { return workspace_.bytes(); }

  std::string describe() const override {
    std::ostringstream out;
    out << numbers_.describe_convolution(problem_, shape_) << ", weights in "
        << (!numbers_.weights_in_registers ? "shared memory"
            : numbers_.splits              ? "registers and shared memory"
                                           : "registers")
        << '\n'
        << "tile: " << numbers_.tile_y << " rows of " << numbers_.tile_x << " cells, " << numbers_.tiles
        << " tiles a sample, " << numbers_.stage_y << (numbers_.stage_y == 1 ? " row" : " rows")
        << " stored at a time\n"
        << "lag: " << lag_samples_ << " samples between the passes\n"
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << shape_.passes() << '\n'
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override { return numbers_.notes(problem_); }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    workspace_.clear(workspace, stream, problem_.device);
    ThinParameters p;
    workspace_.fill(p, arguments, workspace);
    p.wave_units = lag_samples_;
    p.launch(function_, stream, blocks_);
  }

 private:
  Source source() const {
    return {"onepass_thin_mma",
            "#include \"thin/mma.cuh\"\n" + tail_source(problem_) + numbers_.rest_source(problem_, shape_) +
                thin_source(problem_, shape_) + numbers_.source() +
                "using Agent = onepass::ThinMma<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads) + ", " + std::to_string(512 / numbers_.threads) +
                ") onepass_thin_mma(const __grid_constant__ Agent::Parameters p) {\n"
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
  ThinWorkspace workspace_;
  Function function_;
  Number lag_samples_;
  Number blocks_ = 1;
};

std::string refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  if (shape.parts.mean) return "the block ends in a mean";
  if (!shape.parts.tensor_parameters().empty()) return "a stage reads a tensor";
  return mma_refusal(problem, MmaNumbers(problem, shape, gpu_of(problem.device)));
}

double seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const MmaNumbers numbers(problem, shape, gpu);
  const double bytes = static_cast<double>(problem.output.byte_span()) +
                       static_cast<double>(problem.input.byte_span()) * shape.passes();
  return mma_seconds(problem, shape, numbers, bytes / gpu.bytes_per_second);
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_thin_mma{
    "thin_mma", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::ThinMma>(problem);
    }};

}  // namespace onepass
