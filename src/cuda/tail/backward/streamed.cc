// The row "tail_backward": all gradients of a block without convolution in one launch.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "cuda/tail/backward/backward.h"

namespace onepass {
namespace cuda {
namespace {

constexpr int64_t control_words = 4;      // of the whole launch, and of each unit
constexpr int64_t reduced_channels = 32;  // by a block, the kernel's

class TailBackward final : public TailGradientKernel {
 public:
  static std::string refusal(const BackwardProblem& problem) { return tail_refusal(problem); }

  static double seconds(const BackwardProblem& problem, const PlanOptions&) {
    const TailShape shape = backward_shape(problem);
    const Gpu& gpu = gpu_of(problem.forward.device);
    // H200, times the floor: 1.66, 1.72, 1.69 for s60, s19 and s61 in f32 and 1.86, 1.87, 1.71 in bf16; s27,
    // where arithmetic counts, 1.9 and 2.8. What pass 1 has read is in memory again when pass 2 comes for it.
    const bool wide = byte_size(problem.forward.input.dtype) == 4;
    double times = 1.1;
    if (shape.parts.norm != nullptr) times = shape.parts.mean ? (wide ? 1.9 : 2.7) : (wide ? 1.75 : 1.85);
    if (shape.order == Order::interleaved) times *= 1.25;
    // Costly chains decide: mish and gelu of f16 take 3.3 times the floor. Dz is computed in both passes.
    const double instructions = 50 + instructions_of_gradient(shape.parts, 16);
    const double arithmetic = static_cast<double>(shape.elements().value()) * instructions /
                              (gpu.multiprocessors * gpu.lanes() * gpu.clock());
    const double memory = std::max(arithmetic, times * backward_bytes(problem, shape) / gpu.bytes_per_second);
    // A ticket takes this long whatever it moves, and then each byte of its input: 3.2 us for slabs of 528
    // elements in f32, 4.2 of 1280, 5.2 of 3136 (H200, 2026-11-17).
    constexpr double of_ticket = 3e-6, launch = 6e-6;
    const double of_byte = shape.order == Order::interleaved && wide ? 1.4e-10 : 2e-10;
    const BackwardWork work(problem, shape.parts);
    const StreamNumbers numbers = numbers_of(problem, shape);
    const double passes = (work.first ? 1 : 0) + (work.second ? 1 : 0);
    const double tiles =
        static_cast<double>(numbers.units(shape.batch).value()) * static_cast<double>(numbers.tiles_of_unit);
    const double tile_bytes =
        static_cast<double>(shape.elements().value() * byte_size(problem.forward.input.dtype)) /
        std::max(1.0, tiles);
    const bool alone = numbers.tiles_of_unit == 1;  // both passes are one ticket
    const double rounds =
        std::ceil((alone ? 1 : passes) * tiles / (gpu.multiprocessors * numbers.blocks_wanted));
    return launch + std::max(memory, rounds * (of_ticket + (alone ? passes : 1) * of_byte * tile_bytes));
  }

  explicit TailBackward(const BackwardProblem& problem)
      : TailGradientKernel(problem, backward_shape(problem)),
        work_(problem, shape_.parts),
        numbers_(numbers_of(problem, shape_)),
        function_(work_.is_empty() ? std::nullopt
                                   : std::optional<Function>(std::in_place, source(), problem.forward.device,
                                                             launch_numbers())) {
    if (work_.is_empty()) return;
    blocks_ = clamp(tickets(), 1, function_->resident_clusters());
    const Number parts = shape_.rows() * numbers_.pieces;
    control_ = regions_.add(control_bytes());
    const int moved = shape_.parts.norm != nullptr ? 1 : 0;  // sums of xhat
    parts_ = regions_.add(parts * (work_.first_sums + moved) * 4);
    sums_ = regions_.add(parts * work_.second_sums * 4);
    totals_ = regions_.add(shape_.rows() * (work_.first_sums + work_.second_sums + moved) * 4);
    slab_sums_ = regions_.add(shape_.slabs() * 2 * 4);
  }

  bool reads_statistics() const override { return shape_.parts.norm != nullptr && !work_.is_empty(); }

  std::string describe() const override {
    if (work_.is_empty()) return "passes: none, no gradient is wanted\n";
    std::ostringstream out;
    out << numbers_.describe() << "blocks: " << describe_blocks(blocks_, *function_)
        << "passes: " << (work_.first ? 1 : 0) + (work_.second ? 1 : 0)
        << (work_.third ? ", then sums over the batch" : "") << '\n'
        << describe_memory();
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return work_.is_empty() ? std::vector<std::string>{} : TailGradientKernel::numerics();
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    if (work_.is_empty()) return;
    TailBackwardParameters p;
    if (!set_arguments(p, arguments, stream)) return;
    p.control = at(workspace, control_);
    p.parts = at(workspace, parts_);
    p.sums = at(workspace, sums_);
    p.totals = at(workspace, totals_);
    p.slab_sums = at(workspace, slab_sums_);
    p.wave_units = numbers_.wave_units;
    clear(at(workspace, control_), control_bytes(), stream, problem_.forward.device);
    p.launch(*function_, stream, blocks_);
  }

 private:
  static StreamNumbers numbers_of(const BackwardProblem& problem, const TailShape& shape) {
    const int64_t bytes_read = byte_size(problem.forward.input.dtype) +
                               (shape.parts.mean ? 0 : byte_size(problem.output_gradient.dtype));
    return {shape, bytes_read, gpu_of(problem.forward.device), StreamNumbers::Units::strips,
            StreamNumbers::Leaves::channels};
  }

  Number control_bytes() const { return (numbers_.units(shape_.batch) + 1) * control_words * 4; }

  // The work in tickets; blocks take one after the other.
  Number tickets() const {
    const int64_t third = work_.third ? divide_up(shape_.channels, reduced_channels) : 0;
    if (numbers_.tiles_of_unit == 1) return numbers_.units(shape_.batch) + third;
    const Number tiles = numbers_.wave_units * numbers_.tiles_of_unit;
    const Number first = when(work_.first, tiles);
    const Number second = when(work_.second, tiles);
    return first + numbers_.waves(shape_.batch) * (first + second) + third;
  }

  Source source() const {
    return numbers_.kernel(
        "onepass_tail_backward",
        "#include \"tail/backward/streamed.cuh\"\n" +
            tail_source(problem_, bits_of(problem_.forward, problem_.input_gradient.dtype)),
        "TailBackward", "", "");
  }

  Launch launch_numbers() const {
    const int sums = std::max(work_.first_sums + 1, work_.second_sums);
    return {maximum(1, tickets()), static_cast<uint32_t>(numbers_.threads), 1,
            static_cast<uint32_t>(numbers_.scratch_floats(sums, 1) * 4)};
  }

  BackwardWork work_;
  StreamNumbers numbers_;
  std::optional<Function> function_;
  Number blocks_ = 1;
  Region control_, parts_, sums_, totals_, slab_sums_;
};

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_tail_backward =
    cuda::tail_backward_strategy<cuda::TailBackward>("tail_backward");

}  // namespace onepass
