// The row "tail_resident": a slab stays in registers between statistics and output.
#include <algorithm>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/row_numbers.h"
#include "cuda/runtime/parameters.h"
#include "cuda/tail/tail.h"
#include "tail/parameters.cuh"

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
};

class TailResident final : public Kernel {
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
    return 4e-6 + factor * bytes / gpu_of(problem.device).bytes_per_second;
  }

  explicit TailResident(const Problem& problem)
      : problem_(problem),
        shape_(TailShape::by_slabs(problem)),
        numbers_(*numbers_of<ResidentNumbers>(problem)),
        function_(source(), problem.device, launch_numbers()),
        blocks_(shape_.slabs() * numbers_.blocks) {}

  Accuracy accuracy() const override { return accuracy_of_chains(problem_); }
  size_t workspace_bytes() const override { return 0; }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in the registers of " << numbers_.blocks
        << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return notes_of_chains(problem_.block, bits_of(problem_, problem_.output.dtype));
  }

  void launch(const Arguments& arguments, void*, Stream stream) const override {
    launch_slabs<TailParameters>(function_, blocks_, shape_, problem_, arguments, stream);
  }

 private:
  Source source() const {
    std::ostringstream out;
    out << "#include \"tail/resident.cuh\"\n"
        << tail_source(problem_, bits_of(problem_, problem_.output.dtype))
        << Constants()
               .add("threads", numbers_.threads, "width", shape_.width)
               .add("vectors", numbers_.vectors, "blocks", numbers_.blocks)
               .numbers()
        << "using Agent = onepass::TailResident<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) == " << numbers_.shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers_.threads << ", " << blocks_wanted()
        << ") onepass_tail_resident(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << wait_source() << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory)}.run();\n"
        << "}\n";
    return {"onepass_tail_resident", out.str()};
  }

  // Enough blocks on a multiprocessor to hide latency: 512 threads of 128 registers. With 768 of 80 the
  // values of a thread spill.
  int blocks_wanted() const { return 512 / numbers_.threads; }

  Launch launch_numbers() const {
    return {static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.threads),
            static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.shared_bytes()),
            false,
            true};
  }

  Problem problem_;
  TailShape shape_;
  ResidentNumbers numbers_;
  Function function_;
  Number blocks_;
};

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_resident = cuda::tail_strategy<cuda::TailResident>("tail_resident");

}  // namespace onepass
