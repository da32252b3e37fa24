// The row "tail_strips": channels after space; strips of whole slabs stay in shared memory between statistics
// and output.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "cuda/tail/slab_kernel.h"
#include "cuda/tail/strip_numbers.h"

namespace onepass {
namespace cuda {
namespace {

// How a strip is spread over the threads of a cluster.
struct Numbers : StripNumbers {
  int at_once = 2;  // vectors of a thread that are written together
  int threads_of_multiprocessor = 1024;
  bool mean = false;
  int input_bytes = 0;    // of an element
  double moved = 0;       // bytes of an element, through memory
  double of_element = 0;  // instructions
  static constexpr bool waits() { return true; }

  explicit Numbers(const Problem& problem) {
    const TailShape shape(problem);
    mean = shape.parts.mean;
    input_bytes = static_cast<int>(byte_size(problem.input.dtype));
    const int64_t again = before_bytes(problem, shape);
    moved = static_cast<double>(shape.element_bytes + again);
    of_element = 10 + instructions_of_value(shape.parts, byte_size(problem.output.dtype) == 2 ? 16 : 32);
    // What stages after the norm read is loaded for all of them before it is used.
    for (const TailParts::Stage& stage : shape.parts.after) {
      if (argument_kind(stage.pointwise.op) == ArgumentKind::tensor) at_once = 4;
    }
    // Registers: 64 of a thread, and more for each value that a channel has, for tensors before the norm, and
    // where each channel has sums of its own.
    const int64_t others = count_channel_values(shape.parts.before) +
                           count_channel_values(shape.parts.after) + (again > 0 ? 1 : 0) + (mean ? 1 : 0) +
                           (std::gcd(int64_t{shape.width}, shape.group_channels()) == 1 ? 1 : 0);
    if (shape.width > 4) threads_of_multiprocessor -= static_cast<int>(256 * std::min<int64_t>(2, others));
    *this = best_strips(*this, shape, gpu_of(problem.device));
  }

  // The size of the kernel's `Shared`.
  int64_t shared_bytes() const {
    const int64_t values = int64_t{vectors} * threads * width * input_bytes;
    const int64_t parts = sets() * (strip / piece());
    const int64_t exchange = blocks > 1 ? slabs() * blocks : 1;
    const int64_t sums = mean ? round_up(int64_t{sets()} * strip, 4) * 4 : 0;
    return values + (parts + exchange + slabs()) * 16 + 16 + sums;
  }

  int resident(const Gpu& gpu) const {
    return resident_blocks(gpu, shared_bytes(), threads_of_multiprocessor);
  }

  // Orders the numbers of a problem: of 13 tails with 40 sets of numbers each, the best here took 1.0 to 1.2
  // times the least on an H200. 2026-11-18.
  double weight(const TailShape& shape, const Gpu& gpu, int64_t batch) const {
    const double units = static_cast<double>(batch * strips(shape));
    const int per_multiprocessor = resident(gpu);
    const double rounds = std::ceil(units / clusters(gpu, per_multiprocessor));
    // Instructions of a multiprocessor's threads in a round. Fewer threads than these do not keep it busy.
    constexpr double of_vector = 20, of_thread = 400, least_threads = 768;
    const double here = std::min<double>(per_multiprocessor, std::ceil(units * blocks / gpu.multiprocessors));
    const double work = std::max(here * threads, least_threads) *
                        (vectors * (of_element * width + of_vector) + of_thread) /
                        (gpu.lanes() * gpu.clock());
    // From the first load to the first store: memory's latency and the sums.
    const double wait = blocks > 1 ? 3.5e-6 : 2.5e-6;
    // A cluster follows another when all of its blocks have room: tail_resident takes some 10 us for a slab
    // in 16 blocks.
    const double gaps = (rounds - 1) * (blocks > 1 ? 4e-7 * blocks : 0);
    const double bytes = static_cast<double>(batch * shape.channels * shape.spatial) * moved;
    // Half of the multiprocessors reach the rate of all.
    const double used = std::min(1.0, 2 * units * blocks / gpu.multiprocessors);
    constexpr double of_copy = 1.2, launch = 4e-6;
    const double memory = of_copy * waste(shape, input_bytes) * bytes / (gpu.bytes_per_second * used);
    return launch + gaps + std::max(rounds * (wait + work), memory + rounds * wait / per_multiprocessor);
  }

  // 46 tails took 0.5 to 1.5 times as long, a fifth off in the mean.
  double seconds(const TailShape& shape, const Gpu& gpu, int64_t batch) const {
    return 0.82 * weight(shape, gpu, batch) - 1.5e-6;
  }

 private:
  static int64_t count_channel_values(const std::vector<TailParts::Stage>& stages) {
    return std::ranges::count_if(stages, [](const TailParts::Stage& stage) {
      return stage.parameter >= 0 && argument_kind(stage.pointwise.op) != ArgumentKind::tensor;
    });
  }

  // Tensors that stages before the norm read, of one element: they are read twice.
  static int64_t before_bytes(const Problem& problem, const TailShape& shape) {
    int64_t bytes = 0;
    for (const TailParts::Stage& stage : shape.parts.before) {
      if (argument_kind(stage.pointwise.op) != ArgumentKind::tensor) continue;
      bytes += byte_size(problem.parameters[static_cast<size_t>(stage.parameter)].dtype);
    }
    return bytes;
  }
};

class TailStrips final : public SlabKernel<TailStrips, Numbers> {
 public:
  static std::string refusal(const Problem& problem) {
    std::string reason = slab_refusal(problem, Order::interleaved, Means::held);
    if (!reason.empty()) return reason;
    const TailShape shape(problem);
    if (shape.width * byte_size(problem.input.dtype) < 4) {
      return "an odd number of channels has no vectors of 4 bytes to copy";
    }
    if (!numbers_of<Numbers>(problem)->fits()) return no_strip_fits(shape, gpu_of(problem.device));
    return "";
  }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const TailShape shape(problem);
    return numbers_of<Numbers>(problem)->seconds(shape, gpu_of(problem.device), shape.batch.value());
  }

  explicit TailStrips(const Problem& problem) : SlabKernel(problem, TailShape(problem)) {
    blocks_ = shape_.batch * (numbers_.strips(shape_) * numbers_.blocks);
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "strip: " << numbers_.strip << " channels of " << shape_.spatial
        << " positions in the shared memory of " << cluster_text() << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << numbers_.width << " channels; "
        << numbers_.warp_columns << " of a warp at a position\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  static Source source(const Problem& problem, const TailShape&, const Numbers& numbers) {
    const std::string agent = "onepass::TailStrips<onepass::Tail, Numbers, ";
    std::ostringstream out;
    out << "#include \"tail/strips.cuh\"\n"
        << tail_source(problem, bits_of(problem, problem.output.dtype))
        << numbers.constants().add("at_once", numbers.at_once).numbers() << "using Agent = " << agent
        << "true>;\n"
        << "using Unaligned = " << agent << "false>;\n"
        << "static_assert(sizeof(Agent::Shared) == " << numbers.shared_bytes()
        << " && sizeof(Unaligned::Shared) == sizeof(Agent::Shared));\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers.threads << ", "
        << numbers.resident(gpu_of(problem.device))
        << ") onepass_tail_strips(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << wait_source() << "  if (onepass::is_aligned(p, onepass::aligned_all)) {\n"
        << "    Agent{p, *reinterpret_cast<Agent::Shared*>(memory)}.run();\n"
        << "  } else {\n"
        << "    Unaligned{p, *reinterpret_cast<Unaligned::Shared*>(memory)}.run();\n"
        << "  }\n"
        << "}\n";
    return {"onepass_tail_strips", out.str()};
  }
};

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_strips = cuda::tail_strategy<cuda::TailStrips>("tail_strips");

}  // namespace onepass
