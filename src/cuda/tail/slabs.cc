// The row "tail_slabs": a tail of many small slabs, means too, x in registers.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "cuda/tail/slab_kernel.h"
#include "cuda/tail/slab_numbers.h"

namespace onepass {
namespace cuda {
namespace {

struct Numbers : SlabNumbers {
  static constexpr int blocks = 1;  // of a cluster
  static constexpr bool waits() { return true; }

  explicit Numbers(const Problem& problem) {
    const TailShape shape(problem);
    const Element element{byte_size(problem.input.dtype), 0, 20, shape.parts.mean ? 1.0 : 0.0};
    for (const Tier& tier : {Tier{20, 256, 1024}, Tier{48, 512, 512}}) {
      search(shape, tier, element, true);
      if (team > 0) return;
    }
  }

  // The size of the kernel's `Shared`.
  int64_t shared_bytes() const { return int64_t{threads / 32} * (16 + slab_threads / team * 4); }
};

class TailSlabs final : public SlabKernel<TailSlabs, Numbers> {
 public:
  static std::string refusal(const Problem& problem) {
    std::string reason = slab_refusal(problem, Order::planar, Means::held);
    if (reason.empty() && !numbers_of<Numbers>(problem)->fits()) {
      const TailShape shape(problem);
      reason = "a slab of " + std::to_string(shape.group_channels()) + " channels of " +
               std::to_string(shape.spatial) + " elements does not fit the registers of a block";
    }
    return reason;
  }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const TailShape shape(problem);
    const Gpu& gpu = gpu_of(problem.device);
    const auto found = numbers_of<Numbers>(problem);
    const Numbers& numbers = *found;
    // H200, 2026-11-19: 1.5 to 1.9 times the floor, 2.7 where rows are no whole vectors. A slab that has a
    // multiprocessor to itself takes 9 us for 48 elements a thread.
    const bool alone = numbers.blocks_wanted == 1;
    const double wait = alone ? 4e-6 : 1.5e-6, of_element = alone ? 1e-7 : 4e-8;
    const double memory = shape.spatial % shape.width == 0 ? 1.5 : 2.2;
    constexpr double launch = 4e-6;
    const double at_once = gpu.multiprocessors * numbers.blocks_wanted;
    const double blocks =
        std::ceil(static_cast<double>(shape.slabs().value()) / static_cast<double>(numbers.slabs()));
    const double latency = std::ceil(blocks / at_once) *
                           (wait + of_element * numbers.rows_each * numbers.vectors * numbers.width);
    const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
    return launch + std::max(latency, memory * bytes / gpu.bytes_per_second);
  }

  explicit TailSlabs(const Problem& problem) : SlabKernel(problem, TailShape(problem)) {
    blocks_ = divide_up(shape_.slabs(), numbers_.slabs());
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in the registers of " << numbers_.slab_threads
        << (numbers_.slab_threads > 1 ? " threads, " : " thread, ") << numbers_.team
        << (numbers_.team > 1 ? " threads" : " thread") << " a row\n"
        << "thread: " << numbers_.rows_each << (numbers_.rows_each > 1 ? " rows, " : " row, ")
        << numbers_.vectors << " vectors of " << numbers_.width << " elements of each\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  static Source source(const Problem& problem, const TailShape& shape, const Numbers& numbers) {
    const bool has_edges = shape.spatial % shape.width != 0;
    const std::string agent = "onepass::TailSlabs<onepass::Tail, Numbers, ";
    std::ostringstream out;
    out << "#include \"tail/slabs.cuh\"\n"
        << tail_source(problem, bits_of(problem, problem.output.dtype)) << numbers.constants().numbers()
        << "using Agent = " << agent << "true, " << (has_edges ? "true" : "false") << ">;\n"
        << "using Unaligned = " << agent << "false, true>;\n"
        << "static_assert(sizeof(Agent::Shared) == " << numbers.shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers.threads << ", "
        << numbers.blocks_wanted << ") onepass_tail_slabs(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << wait_source();
    if (numbers.width > 1) {
      // Rows of whole vectors begin with one where the tensor does.
      out << "  if (!onepass::is_aligned(p, onepass::aligned_all)" << (has_edges ? "" : " || p.phase != 0")
          << ") {\n"
          << "    Unaligned{p, *reinterpret_cast<Unaligned::Shared*>(memory)}.run();\n"
          << "    return;\n"
          << "  }\n";
    }
    out << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory)}.run();\n"
        << "}\n";
    return {"onepass_tail_slabs", out.str()};
  }
};

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_slabs = cuda::tail_strategy<cuda::TailSlabs>("tail_slabs");

}  // namespace onepass
