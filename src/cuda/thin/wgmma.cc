// The row "thin_wgmma": a thin convolution whose block ends in a mean, by warpgroup products of sm_90a. An
// input plane is multiplied by all taps of the first dimension at once; only means leave the chip.
#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda/notes.h"
#include "cuda/row_numbers.h"
#include "cuda/thin/wgmma.h"
#include "onepass/cuda.h"

namespace onepass {
namespace cuda {
namespace {

// D (64 x 8 columns) = A (64 x 16, rows of K) B (16 x 8 columns, rows of N) (+ D).
std::string product_source(int64_t columns, DType type) {
  const std::string half = type == DType::bf16 ? "bf16" : "f16";
  const int64_t count = 4 * columns;
  std::ostringstream out;
  out << "struct Product {\n"
      << "  static __device__ __forceinline__ void multiply(float (&d)[" << count
      << "], onepass::uint64 a, onepass::uint64 b, bool accumulates) {\n"
      << "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %" << count + 2
      << ", 0; wgmma.mma_async.sync.aligned.m64n" << 8 * columns << "k16.f32." << half << '.' << half << " {";
  for (int64_t i = 0; i < count; ++i) out << (i > 0 ? ", %" : "%") << i;
  out << "}, %" << count << ", %" << count + 1 << ", p, 1, 1, 0, 1;}\"\n        : ";
  for (int64_t i = 0; i < count; ++i) out << (i > 0 ? ", " : "") << "\"+f\"(d[" << i << "])";
  out << "\n        : \"l\"(a), \"l\"(b), \"r\"(static_cast<int>(accumulates)));\n  }\n";
  // `so` is the same in a warp, which bra.uni says. Products are serialised where the compiler believes that
  // their accumulators are written on a divergent path.
  out << "  template <bool first, bool second>\n"
      << "  static __device__ __forceinline__ void begin_where(float (&d)[" << count
      << "], bool so, float a, float b) {\n";
  // The first eight of a warp's rows, the second eight, or both.
  const auto begin = [&](bool first, bool second) {
    std::vector<int64_t> which;
    for (int64_t i = 0; i < count; ++i) {
      if (i % 4 < 2 ? first : second) which.push_back(i);
    }
    const int64_t number = std::ssize(which);
    out << "    if constexpr (" << (first ? "first" : "!first") << " && " << (second ? "second" : "!second")
        << ")\n      asm volatile(\"{.reg .pred p; setp.eq.b32 p, %" << number << ", 0; @p bra.uni kept_%=; ";
    for (int64_t i = 0; i < number; ++i) {
      const bool of_first = which[static_cast<size_t>(i)] % 4 < 2;
      out << "mov.f32 %" << i << ", %" << number + (of_first ? 1 : 2) << "; ";
    }
    out << "kept_%=: }\"\n        : ";
    for (int64_t i = 0; i < number; ++i)
      out << (i > 0 ? ", " : "") << "\"+f\"(d[" << which[static_cast<size_t>(i)] << "])";
    out << "\n        : \"r\"(static_cast<int>(so)), \"f\"(a), \"f\"(b));\n";
  };
  begin(true, true);
  begin(true, false);
  begin(false, true);
  out << "  }\n};\n";
  return out.str();
}

using wgmma::WgmmaNumbers;
using wgmma::WgmmaPlan;

std::shared_ptr<const WgmmaPlan> plan_of(const Problem& problem) {
  return searched<WgmmaPlan>(problem, 0, [&] { return WgmmaPlan(problem); });
}

class ThinWgmma final : public Kernel {
 public:
  // Why it cannot take the problem; empty where it can.
  static std::string refusal(const Problem& problem);
  // Predicted time.
  static double seconds(const Problem& problem, const PlanOptions&);

  explicit ThinWgmma(const Problem& problem) : ThinWgmma(problem, *plan_of(problem)) {}

 private:
  ThinWgmma(const Problem& problem, const WgmmaPlan& plan)
      : problem_(problem),
        shape_(plan.shape),
        numbers_(plan.numbers),
        function_(source(), problem.device,
                  {numbers_.parts(), static_cast<uint32_t>(numbers_.threads()),
                   static_cast<uint32_t>(numbers_.parts()), static_cast<uint32_t>(numbers_.shared_bytes)}) {
    clusters_ = clamp(divide_up(shape_.batch, numbers_.samples()), 1, function_.resident_clusters());
    blocks_ = clusters_ * numbers_.parts();
    if (numbers_.guards(problem, shape_)) {
      redo_.emplace(problem);
      marks_ = regions_.add((shape_.batch + clusters_) * 4);
    }
    statistics_ = regions_.add(when(shape_.parts.norm, shape_.slabs() * 2 * 4));
  }

 public:
  // Weights of f32 are two halves, which have 22 bits, or dithered.
  Accuracy accuracy() const override {
    if (numbers_.dithers) return {.tf32 = Accuracy::Tf32::weights_dithered};
    return OperandParts(problem_, shape_).accuracy();
  }
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) + (redo_ ? redo_->workspace_bytes() : 0);
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms, " << numbers_.products()
        << " products of 16-bit parts\n"
        << "tile: " << numbers_.samples() << " samples, " << numbers_.row_groups << " x "
        << numbers_.tile_rows << " rows, " << numbers_.columns * wgmma::strips / numbers_.tile_rows
        << " columns, " << numbers_.tiles << " tiles a unit\n"
        << (numbers_.parts() == 1 ? ""
                                  : "unit: " + std::to_string(numbers_.parts()) + " blocks of a cluster, " +
                                        std::to_string(numbers_.tile_parts) + " by tiles and " +
                                        std::to_string(numbers_.plane_parts) + " by planes\n")
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << shape_.passes() << '\n'
        << (redo_ ? "then: thin_cores for samples that f16 has no room for\n" : "")
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return (numbers_.dithers ? Notes{note::input_rounded, note::weights_dithered}
                             : parts_notes(problem_, shape_)) +
           where(redo_.has_value(), note::redone);
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    const LaunchChain chain;
    void* marks = redo_ ? at(workspace, marks_) : nullptr;
    void* redo_workspace = redo_ ? at(workspace, Region{regions_.total(), 0}) : nullptr;
    ThinWgmmaParameters p;
    p.input = arguments.input;
    p.output = arguments.output;
    p.statistics =
        arguments.statistics ? static_cast<void*>(arguments.statistics) : at(workspace, statistics_);
    p.control = redo_ ? redo_->control(redo_workspace) : nullptr;
    p.only = marks;
    p.batch = shape_.batch;
    p.parameter = arguments.parameters;
    p.launch(function_, stream, blocks_);
    if (redo_) redo_->launch_marked(arguments, redo_workspace, marks, clusters_, stream);
  }

 private:
  Source source() const {
    return {"onepass_thin_wgmma",
            "#include \"thin/wgmma/kernel.cuh\"\n" + tail_source(problem_) + thin_source(problem_, shape_) +
                numbers_.source() + product_source(numbers_.columns, problem_.input.dtype) +
                "using Agent = onepass::ThinWgmma<onepass::Convolution, onepass::Tail, Numbers, Product>;\n"
                "static_assert(sizeof(Agent::Shared) == " +
                std::to_string(numbers_.shared_bytes) +
                ");\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_.threads()) +
                ", 1) onepass_thin_wgmma(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char bytes[];\n"
                "  Agent::Kernel{{p, *reinterpret_cast<Agent::Shared*>(bytes)}}.run();\n"
                "}\n"};
  }

  Problem problem_;
  ThinShape shape_;
  WgmmaNumbers numbers_;
  Function function_;
  std::optional<ThinCores> redo_;
  Number clusters_ = 1;
  Number blocks_ = 1;
  Regions regions_;
  Region marks_, statistics_;
};

std::string ThinWgmma::refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const Gpu& gpu = gpu_of(problem.device);
  if (gpu.compute_major != 9) return "warpgroup products are of sm_90a alone";
  if (!problem.block.has_mean()) return "the block does not end in a mean";
  if (problem.block.conv()->transposed) return "the convolution is transposed";
  if (problem.parameters[0].dtype != problem.input.dtype) return "the weights are of another type than x";
  reason = plan_of(problem)->refusal(problem);
  return reason.empty() ? ThinCores::refusal(problem) : reason;
}

double ThinWgmma::seconds(const Problem& problem, const PlanOptions&) {
  const std::shared_ptr<const WgmmaPlan> plan = plan_of(problem);
  const ThinShape& shape = plan->shape;
  const WgmmaNumbers& numbers = plan->numbers;
  const Gpu& gpu = gpu_of(problem.device);
  const double hertz = 0.83 * gpu.flops / (256.0 * gpu.multiprocessors);
  return 1.2e-5 + shape.passes() * numbers.all_clocks(shape, shape.batch.value(), gpu) / hertz;
}

}  // namespace

bool dithers_weights(const Problem& problem) {
  return problem.numerics == Numerics::fast && ThinWgmma::refusal(problem).empty() &&
         plan_of(problem)->numbers.dithers;
}

}  // namespace cuda

extern constexpr Strategy cuda_thin_wgmma = cuda::row_of<cuda::ThinWgmma>("thin_wgmma");

}  // namespace onepass
