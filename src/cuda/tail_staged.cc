// The row "tail_staged": persistent clusters, a slab stays on the chip between statistics and output.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "cuda/tail.h"

namespace onepass {
namespace cuda {
namespace {

// How a slab is spread over the threads of a cluster; a block has a multiprocessor to itself.
struct StagedNumbers {
  static constexpr int threads = 512;  // of 128 registers
  static constexpr int warps = threads / 32;

  int blocks = 1;   // in a cluster
  int vectors = 0;  // of a thread
  int held = 0;     // of them in shared memory, the others in registers
  int chunk = 1;    // vectors of a thread that arrive together
  int slots = 0;    // chunks of a warp's ring

  int64_t shared_bytes(const TailShape& shape, int64_t input_bytes) const {
    const int64_t stage = slots * (int64_t{chunk} * threads * shape.width * input_bytes + warps * 8);
    const int64_t hold = std::max<int64_t>(int64_t{held} * threads * shape.width * 4, 16);
    return stage + hold + 128 + 32 + 2 * (blocks + warps) * 16;
  }
};

constexpr int64_t most_slabs = 1 << 30;

// Values that a thread of 128 registers keeps in them; wider vectors need more to be worked on.
int64_t kept_values(int width) { return width > 4 ? 64 : 80; }

// The smallest cluster that has room for a slab, and for a ring into which 0.3 of the next one arrives: with
// 0.24 s19's tail takes 1.29 ms, with 0.3 to 0.36 1.22. Clusters of 8 use 120 of an H200's 132
// multiprocessors, clusters of 16 only 112.
std::optional<StagedNumbers> staged_numbers(const TailShape& shape, const Gpu& gpu, int64_t input_bytes) {
  if (!gpu.has_clusters()) return std::nullopt;
  const int64_t rows = divide_up(shape.slab_elements() / shape.width, 32);
  for (int blocks = 1; blocks <= gpu.largest_cluster(); blocks *= 2) {
    StagedNumbers numbers;
    numbers.blocks = blocks;
    numbers.vectors =
        static_cast<int>(std::max<int64_t>(1, divide_up(rows, int64_t{blocks} * numbers.warps)));
    // Each chunk costs some 60 instructions: chunks as large as 2 KiB a warp.
    constexpr int64_t chunk_bytes = 2048;
    const int most = static_cast<int>(std::max<int64_t>(1, chunk_bytes / (32 * shape.width * input_bytes)));
    for (int chunk = std::min(most, numbers.vectors); chunk >= 1; --chunk) {
      const int64_t over = std::max<int64_t>(0, numbers.vectors - kept_values(shape.width) / shape.width);
      numbers.chunk = chunk;
      numbers.held = static_cast<int>(divide_up(over, chunk) * chunk);
      if (numbers.held >= numbers.vectors) continue;
      constexpr int most_slots = 16;
      numbers.slots = most_slots;
      while (numbers.slots > 0 && numbers.shared_bytes(shape, input_bytes) > gpu.shared_bytes_per_block) {
        --numbers.slots;
      }
      if (numbers.slots >= 2 && numbers.slots * chunk * 10 >= numbers.vectors * 3) return numbers;
    }
  }
  return std::nullopt;
}

// Vectors may run over the ends of rows here: only the slab's own ends count.
TailShape staged_shape(const Problem& problem) {
  TailShape shape(problem);
  shape.width = shape.slab_width;
  return shape;
}

std::optional<StagedNumbers> find_numbers(const Problem& problem) {
  return staged_numbers(staged_shape(problem), gpu_of(problem.device), byte_size(problem.input.dtype));
}

std::string refusal(const Problem& problem) {
  std::string reason = tail_refusal(problem);
  if (!reason.empty()) return reason;
  const TailShape shape = staged_shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.parts.mean) return "the block ends in a mean";
  if (shape.order != Order::planar) return "channels lie after space: a slab is not contiguous";
  if (!gpu.has_clusters()) {
    return "it needs bulk copies and clusters, which are not used on " + gpu.architecture;
  }
  if (shape.width == 1) return "a slab of a few elements has no 16 bytes to copy";
  if (shape.slabs() > most_slabs) return "it counts slabs in 32 bits";
  if (overlapped_takes(problem)) return "tail_overlapped takes it";
  if (!find_numbers(problem)) {
    return "a slab of " + std::to_string(shape.slab_elements()) + " elements does not fit " +
           std::to_string(gpu.largest_cluster()) + " blocks";
  }
  return "";
}

class TailStaged final : public Kernel {
 public:
  explicit TailStaged(const Problem& problem)
      : problem_(problem),
        shape_(staged_shape(problem)),
        numbers_(*find_numbers(problem)),
        function_(source(), problem.device, launch_numbers()),
        blocks_(minimum(shape_.slabs(), function_.resident_clusters()) * numbers_.blocks) {}

  size_t workspace_bytes() const override { return 0; }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in " << numbers_.blocks
        << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements, " << numbers_.held
        << " of them in shared memory\n"
        << "staging: " << numbers_.slots << " chunks of " << numbers_.chunk << " vectors a thread\n"
        << "blocks: " << describe_blocks(blocks_, function_);
    return out.str();
  }

  void launch(const Arguments& arguments, void*, Stream stream) const override {
    if (shape_.elements() == 0) return;
    const Alignment alignment(shape_, problem_, arguments);
    Words words;
    words.add(arguments.input);
    words.add(arguments.output);
    words.add(arguments.statistics);
    for (int unused = 0; unused < 3; ++unused) words.add(nullptr);
    words.add(alignment.bits());
    words.add(alignment.phase());
    words.add(shape_.batch);
    words.add(int64_t{1});
    words.add(arguments.parameters);
    words.launch(function_, stream, blocks_);
  }

 private:
  Source source() const {
    std::ostringstream out;
    out << precision_source(problem_.output.dtype) << "#include \"tail_staged.cuh\"\n"
        << tail_source(problem_)
        << Constants()
               .add("threads", numbers_.threads)
               .add("width", shape_.width)
               .add("blocks", numbers_.blocks)
               .add("vectors", numbers_.vectors)
               .add("held", numbers_.held)
               .add("chunk", numbers_.chunk)
               .add("slots", numbers_.slots)
               .numbers()
        << "using Agent = onepass::TailStaged<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) <= " << shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers_.threads << ", "
        << "1) onepass_tail_staged(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << wait_source()
        << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory), static_cast<int>(blockIdx.x % "
        << numbers_.blocks << ")}.run();\n"
        << "}\n";
    return {"onepass_tail_staged", out.str()};
  }

  int64_t shared_bytes() const { return numbers_.shared_bytes(shape_, byte_size(problem_.input.dtype)); }

  Launch launch_numbers() const {
    return {static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.threads),
            static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(shared_bytes()),
            false,
            true};
  }

  Problem problem_;
  TailShape shape_;
  StagedNumbers numbers_;
  Function function_;
  Number blocks_;
};

double seconds(const Problem& problem, const PlanOptions&) {
  const TailShape shape = staged_shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
  const StagedNumbers numbers = *find_numbers(problem);
  // H200: 1.16 to 1.28 times a copy in f32.
  const double copy = 1.25 * bytes / gpu.bytes_per_second;
  // A slab takes a cluster some microseconds whatever its size, then time for each value of a thread: what
  // counts in 16 bits. Clusters lie within GPCs, and one of those has fewer multiprocessors.
  const double clusters = std::max(1, gpu.multiprocessors / numbers.blocks - (numbers.blocks >= 8 ? 1 : 0));
  // Of one cluster the first slab's loads and the last one's stores have nothing beside them.
  const double rounds =
      std::ceil(static_cast<double>(shape.slabs()) / clusters) + (numbers.blocks > 1 ? 1 : 0);
  return 4e-6 + std::max(copy, rounds * (2e-6 + 6.5e-8 * numbers.vectors * shape.width));
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_staged{
    "tail_staged", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::TailStaged>(problem);
    }};

}  // namespace onepass
