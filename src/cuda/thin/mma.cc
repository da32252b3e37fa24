// The rows "thin_mma" and "thin_inplace": a thin convolution with chains and norm in one launch on tensor
// cores, the output stored. One computes every output twice; the other computes it once, keeps it in memory
// and normalises it while it is in the second-level cache.
#include <algorithm>
#include <sstream>

#include "cuda/row_numbers.h"
#include "cuda/thin/mma.h"

namespace onepass {
namespace cuda {
namespace {

template <Hold hold>
class ThinMma final : public WholeBlockKernel {
 public:
  // Why it cannot take the problem; empty where it can.
  static std::string refusal(const Problem& problem);
  // Predicted time.
  static double seconds(const Problem& problem, const PlanOptions&);

  explicit ThinMma(const Problem& problem)
      : WholeBlockKernel(problem),
        numbers_(*numbers_of(problem, shape_)),
        function_(
            source(), problem.device,
            {1, static_cast<uint32_t>(numbers_.threads), 1, static_cast<uint32_t>(numbers_.shared_bytes)}),
        lag_(hold == Hold::recompute ? lag_samples() : lag_tiles()),
        workspace_(shape_, 1, numbers_.tiles, divide_up(numbers_.tiles, 32),  // sets of tiles
                   ring_samples() * (numbers_.kept_length * 4)),
        blocks_(hold == Hold::recompute
                    ? clamp((shape_.batch + lag_) * numbers_.tiles, 1, function_.resident_clusters())
                    : clamp(shape_.batch * numbers_.tiles + lag_, 1, function_.resident_clusters())) {}

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
        << "lag: " << lag_ << (hold == Hold::recompute ? " samples" : " tiles")
        << " between the passes, values "
        << (hold == Hold::recompute ? "computed in both\n"
            : in_place()            ? "in the output\n"
                                    : "in a ring of the workspace\n")
        << "blocks: " << describe_blocks(blocks_, function_) << "passes: " << shape_.passes() << '\n'
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override { return numbers_.notes(problem_); }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (shape_.batch == 0) return;
    workspace_.clear(workspace, stream, problem_.device);
    ThinMmaParameters p;
    workspace_.fill(p, arguments, workspace);
    p.ring_samples = ring_samples();
    p.lag = lag_;
    p.launch(function_, stream, blocks_);
  }

 private:
  static std::shared_ptr<const MmaNumbers> numbers_of(const Problem& problem, const ThinShape& shape) {
    return searched<MmaNumbers>(problem, 0,
                                [&] { return MmaNumbers(problem, shape, gpu_of(problem.device), hold); });
  }

  Number resident_warps() const { return function_.resident_clusters() * numbers_.warps(); }

  // Pass 2 of a tile comes when all tiles of its sample are most likely measured: every warp has one at a
  // time, and some are late. The rest of the last round of tickets is added.
  Number lag_samples() const {
    const Number warps = resident_warps();
    const Number least = minimum(shape_.batch, 1 + divide_up(warps, numbers_.tiles));
    const Number rounds = divide_up((shape_.batch + least) * numbers_.tiles, warps);
    return when(shape_.parts.norm, minimum(shape_.batch, rounds * warps / numbers_.tiles - shape_.batch))
        .called("lag_samples");
  }

  // A share comes when all tiles of its sample are most likely there: those of the sample, and two of every
  // warp. (With one of them 4 to 16 channels, kernel 4, take 0.153 ms instead of 0.129, and 8 to 32 volumes
  // of 64^3 0.91 instead of 0.80. Large tiles are up to 2% faster then: more values are in the second-level
  // cache.)
  Number lag_tiles() const {
    return minimum(shape_.batch * numbers_.tiles, 2 * resident_warps() + numbers_.tiles).called("lag_tiles");
  }

  // Samples in the ring: those between the passes, and those of tiles that are being computed.
  Number ring_samples() const {
    if (hold == Hold::recompute || in_place()) return 0;
    return minimum(shape_.batch, 1 + divide_up(lag_ + resident_warps(), numbers_.tiles))
        .called("ring_samples");
  }
  bool in_place() const { return problem_.output.dtype == DType::f32 && numbers_.kept_pitch == 0; }

  Source source() const {
    const std::string kept =
        Constants().add("kept_pitch", numbers_.kept_pitch).add("kept_length", numbers_.kept_length).text();
    return mma_source(hold, problem_, shape_, numbers_, tail_source(problem_),
                      hold == Hold::recompute ? "" : kept, 512 / numbers_.threads);
  }

  MmaNumbers numbers_;
  Function function_;
  Number lag_;  // between the passes of a tile: samples where values are recomputed, else tiles
  ThinWorkspace workspace_;
  Number blocks_;
};

template <>
std::string ThinMma<Hold::recompute>::refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  if (shape.parts.mean) return "the block ends in a mean";
  if (!shape.parts.tensor_parameters().empty()) return "a stage reads a tensor";
  return mma_refusal(problem, *numbers_of(problem, shape));
}

template <>
double ThinMma<Hold::recompute>::seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const double bytes = static_cast<double>(problem.output.byte_span()) +
                       static_cast<double>(problem.input.byte_span()) * shape.passes();
  return mma_seconds(problem, shape, *numbers_of(problem, shape),
                     bytes / gpu_of(problem.device).bytes_per_second);
}

template <>
std::string ThinMma<Hold::in_output>::refusal(const Problem& problem) {
  std::string reason = thin_refusal(problem);
  if (!reason.empty()) return reason;
  const ThinShape shape(problem);
  reason = computed_once_refusal(shape);
  if (!reason.empty()) return reason;
  const std::shared_ptr<const MmaNumbers> numbers = numbers_of(problem, shape);
  // Pass 2 adds this much at most to an element's index before it compares.
  constexpr int64_t most_values = (int64_t{1} << 31) - 4096;
  if (numbers->kept_length >= most_values) return "a sample has too many elements, rows filled up to sectors";
  return mma_refusal(problem, *numbers);
}

template <>
double ThinMma<Hold::in_output>::seconds(const Problem& problem, const PlanOptions&) {
  const ThinShape shape(problem);
  const std::shared_ptr<const MmaNumbers> numbers = numbers_of(problem, shape);
  // Values once each way and the output, mostly not overlapped: the warps that move them do not multiply.
  // H200, images of 256 x 256, 8 to 64 channels, kernel 5, tf32: 0.24 ms without pass 2, 0.32 with it.
  const double values = static_cast<double>(numbers->kept_length) * 4 * static_cast<double>(shape.batch);
  const double moved = static_cast<double>(problem.input.byte_span()) +
                       0.5 * (2 * values + static_cast<double>(problem.output.byte_span()));
  const double launched = mma_seconds(problem, shape, *numbers, 0);
  // Classes of a transposed convolution store every other element of a row: 64 to 32 channels, volumes of 64,
  // take 0.94 ms instead of 0.66. Others take up to 1.4 times the count, and one sample of s60 0.039 instead
  // of 0.030. 16-bit values go through a ring: images take 1.2 to 1.6 times the count, volumes and strides up
  // to 2.3 times.
  const bool is_hard = shape.axes[0].out > 1 || shape.axes[2].step > 1;
  const double spread = shape.classes() > 1 ? 1.45 : !numbers->is_short ? 1.0 : is_hard ? 1.75 : 1.3;
  return spread * (launched + 0.1 * (launched - 1.8e-5) + moved / gpu_of(problem.device).bytes_per_second);
}

}  // namespace
}  // namespace cuda

extern constexpr Strategy cuda_thin_mma = cuda::row_of<cuda::ThinMma<cuda::Hold::recompute>>("thin_mma");
extern constexpr Strategy cuda_thin_inplace =
    cuda::row_of<cuda::ThinMma<cuda::Hold::in_output>>("thin_inplace");

}  // namespace onepass
