// The row "tail_staged": persistent clusters; a slab stays on the chip between statistics and output. It is
// spread over all threads of a cluster in vectors of 16 bytes, one block a multiprocessor.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>

#include "cuda/tail/slab_kernel.h"

namespace onepass {
namespace cuda {
namespace {

// Whether computing it again takes more than keeping it.
bool is_costly(Op op) {
  constexpr Op cheap[] = {Op::relu,     Op::relu6, Op::leaky_relu, Op::prelu,       Op::clamp,
                          Op::hardtanh, Op::mul,   Op::add,        Op::channel_mul, Op::channel_add};
  return std::ranges::find(cheap, op) == std::end(cheap);
}

// How a slab is spread over a cluster, and where its vectors wait for the statistics. The schedule
// "overlapped" comes first where it has numbers.
struct StagedNumbers {
  static constexpr int threads = 512;  // of 128 registers
  static constexpr int warps = threads / 32;

  int width = 1;
  int input_bytes = 0;  // of an element
  int blocks = 0;       // in a cluster; 0 where the slab fits none
  int vectors = 0;      // of a thread
  bool overlapped = false;

  // The schedule "ring".
  int held = 0;   // vectors of a thread in shared memory, as f32
  int chunk = 1;  // vectors of a thread that arrive together
  int slots = 0;  // chunks of a warp's ring

  // The schedule "overlapped".
  static constexpr int at_once = 4;  // vectors in the body of a loop over those in shared memory
  int doubled = 0;                   // vectors of a thread with two places in shared memory
  int single = 0;                    // with one; the others are in registers
  bool holds_f16 = false;            // results of the before-chain wait as f16

  explicit StagedNumbers(const Problem& problem) {
    const TailShape shape = TailShape::by_slabs(problem);
    const Gpu& gpu = gpu_of(problem.device);
    width = shape.width;
    input_bytes = static_cast<int>(byte_size(problem.input.dtype));
    if (!find_overlapped(problem, shape, gpu) && !find_ring(shape, gpu)) blocks = 0;
  }

  bool fits() const { return blocks > 0; }

  bool waits() const { return !overlapped; }
  // The size of the kernel's `Shared`.
  int64_t shared_bytes() const {
    const int64_t vector_bytes = int64_t{threads} * width * input_bytes;
    const int64_t exchange = 2 * (blocks + warps) * 16 + 4 * 8;
    constexpr int pieces = 4;
    const int64_t bytes = overlapped ? (vectors + doubled) * vector_bytes + warps * pieces * 8 + exchange + 4
                                     : (slots + held / chunk) * (chunk * vector_bytes + warps * 8) + exchange;
    return round_up(bytes, 128);
  }

  std::string describe() const {
    std::ostringstream out;
    if (overlapped) {
      out << doubled << " of them with two places, " << single << " with one, the others in registers"
          << (holds_f16 ? "; those wait as f16" : "");
    } else {
      out << held << " of them in shared memory\nstaging: " << slots << " chunks of " << chunk
          << " vectors a thread";
    }
    return out.str();
  }

  std::string source() const {
    Constants constants;
    constants.add("threads", threads).add("width", width).add("blocks", blocks).add("vectors", vectors);
    constants.flag("overlapped", overlapped);
    if (overlapped) {
      constants.add("doubled", doubled).add("single", single).add("at_once", at_once);
      constants.flag("holds_f16", holds_f16);
    } else {
      constants.add("held", held).add("chunk", chunk).add("slots", slots);
    }
    return constants.numbers();
  }

 private:
  void spread(const TailShape& shape, int cluster) {
    blocks = cluster;
    const int64_t rows = divide_up(shape.slab_elements() / width, 32);
    vectors = static_cast<int>(std::max<int64_t>(1, divide_up(rows, int64_t{blocks} * warps)));
  }

  // The smallest cluster that has room for a slab, with two places for as much of it as there is room for.
  bool find_overlapped(const Problem& problem, const TailShape& shape, const Gpu& gpu) {
    if (input_bytes != 2) return false;
    // Of smaller slabs too little is in flight at a time: the ring has several of them.
    constexpr int least_vectors = 8;
    overlapped = true;
    holds_f16 = problem.input.dtype == DType::bf16 && problem.output.dtype == DType::bf16 &&
                problem.numerics != Numerics::strict &&
                std::any_of(shape.parts.before.begin(), shape.parts.before.end(),
                            [](const TailParts::Stage& stage) { return is_costly(stage.pointwise.op); });
    // In registers: 64 values of 128 registers, less where a row has more than weight and bias. With f16 and
    // an after-chain more than 5 vectors spill: s60 takes 1.21, 1.22, 1.29 and 1.30 times its floor with 5,
    // 6, 7 and 8; s19, without one, 1.26, 1.25 and 1.20 with 6, 7 and 8.
    int kept_vectors = shape.parts.has_operands() ? 6 : 8;
    if (holds_f16 && !shape.parts.after.empty()) kept_vectors = 5;
    for (int cluster = 1; cluster <= gpu.largest_cluster(); cluster *= 2) {
      spread(shape, cluster);
      if (vectors < least_vectors) break;
      const int others = std::max(1, vectors - kept_vectors);
      for (doubled = others; doubled > 0; --doubled) {
        single = others - doubled;
        if (shared_bytes() <= gpu.shared_bytes_per_block) return true;
      }
    }
    overlapped = holds_f16 = false;
    return false;
  }

  // The smallest cluster that has room for a slab, and for a ring into which 0.3 of the next one arrives:
  // with 0.24 s19's tail takes 1.29 ms, with 0.3 to 0.36 1.22. Clusters of 8 use 120 of an H200's 132
  // multiprocessors, clusters of 16 only 112.
  bool find_ring(const TailShape& shape, const Gpu& gpu) {
    for (int cluster = 1; cluster <= gpu.largest_cluster(); cluster *= 2) {
      spread(shape, cluster);
      // Each chunk costs some 60 instructions: chunks as large as 2 KiB a warp.
      constexpr int chunk_bytes = 2048;
      const int most = std::max(1, chunk_bytes / (32 * width * input_bytes));
      for (chunk = std::min(most, vectors); chunk >= 1; --chunk) {
        // Values that a thread keeps in registers: as few as leave the ring its part (s60 with 15 vectors of
        // 31 takes 0.563 ms, with 19 0.574, with 11 and a ring of two chunks 0.572); wider vectors need more
        // registers to be worked on.
        for (const int64_t kept_values : {64, 80}) {
          if (width > 4 && kept_values > 64) continue;
          const int64_t over = std::max<int64_t>(0, vectors - kept_values / width);
          held = static_cast<int>(divide_up(over, chunk) * chunk);
          if (held >= vectors || (held > 0 && input_bytes != 4)) continue;
          constexpr int most_slots = 16;
          slots = most_slots;
          while (slots > 0 && shared_bytes() > gpu.shared_bytes_per_block) --slots;
          if (slots >= 2 && slots * chunk * 10 >= vectors * 3) return true;
        }
      }
    }
    return false;
  }
};

class TailStaged final : public SlabKernel<TailStaged, StagedNumbers> {
 public:
  static std::string refusal(const Problem& problem) {
    std::string reason = slab_refusal(problem);
    if (!reason.empty()) return reason;
    const TailShape shape = TailShape::by_slabs(problem);
    const Gpu& gpu = gpu_of(problem.device);
    constexpr int64_t most_slabs = 1 << 30;
    if (!gpu.has_clusters()) {
      return "it needs bulk copies and clusters, which are not used on " + gpu.architecture;
    }
    if (shape.width == 1) return "a slab of a few elements has no 16 bytes to copy";
    if (shape.slabs() > most_slabs) return "it counts slabs in 32 bits";
    if (!numbers_of<StagedNumbers>(problem)->fits()) {
      return "a slab of " + std::to_string(shape.slab_elements()) +
             " elements has too little for each thread, or too much for " +
             std::to_string(gpu.largest_cluster()) + " blocks";
    }
    return "";
  }

  static double seconds(const Problem& problem, const PlanOptions&) {
    const TailShape shape(problem);
    const Gpu& gpu = gpu_of(problem.device);
    const auto numbers = numbers_of<StagedNumbers>(problem);
    const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
    // H200: 1.15 to 1.22 times a copy in f32.
    const double copy = 1.2 * bytes / gpu.bytes_per_second;
    // A slab takes a cluster some microseconds whatever its size, then time for each value of a thread. H200,
    // overlapped: a slab of s60 and s19 in bf16 takes 8.2 and 9.0 us, of s61 11.1.
    const double value = !numbers->overlapped ? 6.5e-8 : numbers->holds_f16 ? 5.1e-8 : 5.7e-8;
    const double slab = 2e-6 + value * numbers->vectors * numbers->width;
    // Clusters lie within GPCs, and one of those has fewer multiprocessors.
    const int blocks = numbers->blocks;
    const double clusters = std::max(1, gpu.multiprocessors / blocks - (blocks >= 8 ? 1 : 0));
    double rounds = std::ceil(static_cast<double>(shape.slabs()) / clusters);
    // In the ring of a cluster the first slab's loads and the last one's stores overlap with nothing.
    if (!numbers->overlapped && blocks > 1) rounds += 1;
    return 4e-6 + std::max(copy, rounds * slab);
  }

  explicit TailStaged(const Problem& problem) : SlabKernel(problem, TailShape::by_slabs(problem)) {
    blocks_ = minimum(shape_.slabs(), function_.resident_clusters()) * numbers_.blocks;
  }

  static Source source(const Problem& problem, const TailShape&, const StagedNumbers& numbers) {
    std::ostringstream out;
    out << "#include \"tail/staged.cuh\"\n"
        << tail_source(problem, bits_of(problem, problem.output.dtype)) << numbers.source()
        << "using Agent = onepass::TailStaged<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) == " << numbers.shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers.threads
        << ", 1) onepass_tail_staged(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << (numbers.waits() ? wait_source() : "")
        << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory), static_cast<int>(blockIdx.x % "
        << numbers.blocks << ")}.run();\n"
        << "}\n";
    return {"onepass_tail_staged", out.str()};
  }

  Accuracy accuracy() const override {
    Accuracy own = SlabKernel::accuracy();
    if (numbers_.holds_f16) own.held = Accuracy::Held::as_f16;
    return own;
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in " << cluster_text() << '\n'
        << "schedule: " << (numbers_.overlapped ? "overlapped" : "ring") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements, "
        << numbers_.describe() << '\n'
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return where(numbers_.holds_f16, note::held_as_f16) + SlabKernel::numerics();
  }
};

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_staged = cuda::tail_strategy<cuda::TailStaged>("tail_staged");

}  // namespace onepass
