// The row "tail_backward_slabs": gradients of a tail of many small slabs, x and dy in registers.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "cuda/row_numbers.h"
#include "cuda/tail/backward/backward.h"
#include "cuda/tail/slab_numbers.h"

namespace onepass {
namespace cuda {
namespace {

// Numbers of the problem alone, whatever the batch is.
struct Numbers : SlabNumbers {
  int sums = 0;  // of a row

  explicit Numbers(const BackwardProblem& problem) {
    const TailShape shape = backward_shape(problem);
    const BackwardWork work(problem, shape.parts);
    sums = work.first_sums + work.second_sums;
    const Element element{byte_size(problem.forward.input.dtype),
                          shape.parts.mean ? 0 : byte_size(problem.output_gradient.dtype), 40, 3};
    for (const Tier& tier : {Tier{36, 256, 768}, Tier{64, 512, 512}}) {
      search(shape, tier, element, false);
      if (team > 0 && shared_bytes(shape) <= most_shared_bytes) return;
    }
    team = 0;
  }

  int64_t chunks(const TailShape& shape) const { return divide_up(shape.groups, slabs()); }
  int64_t columns(const TailShape& shape) const { return slabs() * shape.group_channels() * sums; }

 private:
  static constexpr int64_t most_shared_bytes = 32 * 1024;  // a part of what blocks have without asking

  int64_t shared_bytes(const TailShape& shape) const {
    return columns(shape) * (8 + 4 * std::max(1, team / 32)) + threads * 8;
  }
};

class TailBackwardSlabs final : public TailGradientKernel {
 public:
  static std::string refusal(const BackwardProblem& problem) {
    std::string reason = held_slab_refusal(problem);
    if (!reason.empty()) return reason;
    if (!numbers_of<Numbers>(problem)->fits()) {
      const TailShape shape = backward_shape(problem);
      return "a slab of " + std::to_string(shape.group_channels()) + " channels of " +
             std::to_string(shape.spatial) + " elements does not fit the registers of a block";
    }
    return "";
  }

  static double seconds(const BackwardProblem& problem, const PlanOptions&) {
    const TailShape shape = backward_shape(problem);
    const Gpu& gpu = gpu_of(problem.forward.device);
    const auto found = numbers_of<Numbers>(problem);
    const Numbers& numbers = *found;
    // What a block takes for a sample: loads, sums and stores, then arithmetic. H200, 2026-11-17: 6.5 us for
    // 28 elements of f32 a thread in one block a multiprocessor, else 5.8 us, 4.6 for 16; 1.33 to 1.5 times
    // the floor where memory decides.
    const bool alone = numbers.blocks_wanted == 1;
    const double wait = alone ? 4e-6 : 3e-6, of_element = alone ? 1.1e-7 : 1e-7;
    constexpr double memory = 1.4, launch = 4e-6;
    const double at_once = gpu.multiprocessors * numbers.blocks_wanted;
    const double rounds =
        std::ceil(static_cast<double>(shape.batch.value() * numbers.chunks(shape)) / at_once);
    const double latency = rounds * (wait + of_element * numbers.rows_each * numbers.vectors * numbers.width);
    return launch + std::max(latency, memory * backward_bytes(problem, shape) / gpu.bytes_per_second);
  }

  explicit TailBackwardSlabs(const BackwardProblem& problem)
      : TailGradientKernel(problem, backward_shape(problem)),
        work_(problem, shape_.parts),
        numbers_(*numbers_of<Numbers>(problem)),
        function_(source(), problem.forward.device, launch_numbers()) {
    // A few waves of blocks: more of them leave more sums for the last one to add up.
    constexpr int64_t waves = 4;
    const Gpu& gpu = gpu_of(problem.forward.device);
    const int64_t chunks = numbers_.chunks(shape_);
    const int64_t most =
        std::max<int64_t>(1, divide_up(waves * gpu.multiprocessors * numbers_.blocks_wanted, chunks));
    samples_ = maximum(1, divide_up(shape_.batch, most)).called("samples_of_block");
    segments_ = maximum(1, divide_up(shape_.batch, samples_)).called("segments");
    if (!work_.third) return;
    control_ = regions_.add(chunks * 4);
    sums_ = regions_.add(segments_ * (chunks * numbers_.columns(shape_) * 8));
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in the registers of " << numbers_.slab_threads
        << " threads, " << numbers_.team << (numbers_.team > 1 ? " threads" : " thread") << " a row\n"
        << "thread: " << numbers_.rows_each << (numbers_.rows_each > 1 ? " rows, " : " row, ")
        << numbers_.vectors << " vectors of " << numbers_.width << " elements of each\n"
        << "block: " << numbers_.slabs() << (numbers_.slabs() > 1 ? " slabs of " : " slab of ")
        << samples_.value() << (samples_.value() > 1 ? " samples" : " sample") << '\n'
        << "blocks: " << describe_blocks(blocks(), function_) << describe_memory();
    return out.str();
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    TailBackwardParameters p;
    if (!set_arguments(p, arguments, stream)) return;
    p.wave_units = samples_;
    if (work_.third) {
      p.control = at(workspace, control_);
      p.parts = at(workspace, sums_);
      clear(at(workspace, control_), numbers_.chunks(shape_) * 4, stream, problem_.forward.device);
    }
    p.launch(function_, stream, blocks());
  }

 private:
  Number blocks() const { return segments_ * numbers_.chunks(shape_); }

  Source source() const {
    const bool has_edges = shape_.spatial % shape_.width != 0;
    const std::string agent = "onepass::TailBackwardSlabs<onepass::Tail, Numbers, ";
    std::ostringstream out;
    out << "#include \"tail/backward/slabs.cuh\"\n"
        << tail_source(problem_, bits_of(problem_.forward, problem_.input_gradient.dtype))
        << numbers_.constants().numbers() << "using Agent = " << agent << "true, "
        << (has_edges ? "true" : "false") << ">;\n"
        << "using Unaligned = " << agent << "false, true>;\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers_.threads << ", "
        << numbers_.blocks_wanted
        << ") onepass_tail_backward_slabs(const __grid_constant__ Agent::Parameters p) {\n"
        << "  __shared__ Agent::Shared shared;\n";
    if (numbers_.width > 1) {
      // Rows of whole vectors begin with one where the tensor does.
      out << "  if (!onepass::is_aligned(p, onepass::aligned_all)" << (has_edges ? "" : " || p.phase != 0")
          << ") {\n"
          << "    Unaligned{p, reinterpret_cast<Unaligned::Shared&>(shared)}.run();\n"
          << "    return;\n"
          << "  }\n";
    }
    out << "  Agent{p, shared}.run();\n"
        << "}\n";
    return {"onepass_tail_backward_slabs", out.str()};
  }

  Launch launch_numbers() const { return {1, static_cast<uint32_t>(numbers_.threads), 1, 0}; }

  BackwardWork work_;
  Numbers numbers_;
  Function function_;
  Number samples_;
  Number segments_;
  Region control_, sums_;
};

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_tail_backward_slabs =
    cuda::tail_backward_strategy<cuda::TailBackwardSlabs>("tail_backward_slabs");

}  // namespace onepass
