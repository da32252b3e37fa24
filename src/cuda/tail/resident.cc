// The row "tail_resident": a slab stays in registers between statistics and output.
#include <algorithm>
#include <sstream>

#include "cuda/tail/slab_kernel.h"

namespace onepass {
namespace cuda {
namespace {

// How a slab is spread over the threads of a cluster.
struct ResidentNumbers {
  int width = 1;
  int threads = 0;
  int vectors = 0;  // of a thread
  int blocks = 0;   // in a cluster; 0 where the slab fits none

  explicit ResidentNumbers(const Problem& problem) {
    const TailShape shape = TailShape::by_slabs(problem);
    width = shape.width;
    constexpr int64_t most_values = 24;  // of a thread
    const int64_t all = shape.slab_elements() / width;
    const int64_t most = std::max<int64_t>(1, most_values / width);
    for (int cluster = 1; cluster <= gpu_of(problem.device).largest_cluster(); cluster *= 2) {
      for (const int size : {32, 64, 128, 256}) {
        if (cluster > 1 && size < 256) continue;
        const int64_t all_threads = int64_t{cluster} * size;
        if (all_threads * most < all) continue;
        blocks = cluster;
        threads = size;
        vectors = static_cast<int>(std::max<int64_t>(1, divide_up(all, all_threads)));
        return;
      }
    }
  }

  bool fits() const { return blocks > 0; }
  // The size of the kernel's `Shared`.
  int64_t shared_bytes() const { return 8 + threads / 32 * 8 + blocks * 8; }
  static constexpr bool waits() { return true; }
};

class TailResident final : public SlabKernel<TailResident, ResidentNumbers> {
 public:
  static std::string refusal(const Problem& problem) {
    std::string reason = slab_refusal(problem);
    if (reason.empty() && !numbers_of<ResidentNumbers>(problem)->fits()) {
      reason = "a slab of " + std::to_string(TailShape(problem).slab_elements()) +
               " elements does not fit the registers of " +
               std::to_string(gpu_of(problem.device).largest_cluster()) + " blocks";
    }
    return reason;
  }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const TailShape shape(problem);
    const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
    // H200, times a copy: clusters wait for each other, 2.8 to 3.7.
    const double factor = numbers_of<ResidentNumbers>(problem)->blocks > 1 ? 3.0 : 1.4;
    // Blocks begin at this rate: 2 million slabs of 30 elements took 21 times the floor (2026-11-19).
    constexpr double of_block = 1.2e-9;
    return 4e-6 + of_block * static_cast<double>(shape.slabs()) +
           factor * bytes / gpu_of(problem.device).bytes_per_second;
  }

  explicit TailResident(const Problem& problem) : SlabKernel(problem, TailShape::by_slabs(problem)) {
    blocks_ = shape_.slabs() * numbers_.blocks;
  }

  static Source source(const Problem& problem, const TailShape& shape, const ResidentNumbers& numbers) {
    // Enough blocks on a multiprocessor to hide latency: 512 threads of 128 registers. With 768 of 80 the
    // values of a thread spill.
    const int blocks_wanted = 512 / numbers.threads;
    std::ostringstream out;
    out << "#include \"tail/resident.cuh\"\n"
        << tail_source(problem, bits_of(problem, problem.output.dtype))
        << Constants()
               .add("threads", numbers.threads, "width", shape.width)
               .add("vectors", numbers.vectors, "blocks", numbers.blocks)
               .numbers()
        << "using Agent = onepass::TailResident<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) == " << numbers.shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers.threads << ", " << blocks_wanted
        << ") onepass_tail_resident(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << wait_source() << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory)}.run();\n"
        << "}\n";
    return {"onepass_tail_resident", out.str()};
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in the registers of " << cluster_text() << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }
};

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_resident = cuda::tail_strategy<cuda::TailResident>("tail_resident");

}  // namespace onepass
