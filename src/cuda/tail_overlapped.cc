// The row "tail_overlapped": persistent clusters, slabs of 16 bits, the sums of one exchanged while the next
// is begun.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "cuda/tail.h"

namespace onepass {
namespace cuda {
namespace {

// How a slab is spread over the threads of a cluster; a block has a multiprocessor to itself.
struct OverlappedNumbers {
  static constexpr int threads = 512;  // of 128 registers
  static constexpr int warps = threads / 32;

  int blocks = 1;   // in a cluster
  int vectors = 0;  // of a thread
  int doubled = 0;  // vectors with two places
  int single = 0;   // with one
  int at_once = 4;  // in the body of a loop over those

  int64_t shared_bytes(const TailShape& shape, int64_t input_bytes) const {
    return int64_t{vectors + doubled} * threads * shape.width * input_bytes + warps * 32 + 128 + 48 +
           2 * (blocks + warps) * 16;
  }
};

constexpr int64_t most_slabs = 1 << 30;

// Of a thread. Of smaller slabs too little is on its way at a time: tail_staged has several in its ring.
constexpr int least_vectors = 8;
// In registers: 64 values of 128 registers, and less where a row has more than weight and bias.
int kept_vectors(const TailShape& shape) { return shape.parts.has_operands() ? 6 : 8; }

// The smallest cluster that has room for a slab, with two places for as much of it as there is room for.
std::optional<OverlappedNumbers> overlapped_numbers(const TailShape& shape, const Gpu& gpu,
                                                    int64_t input_bytes) {
  const int64_t rows = divide_up(shape.slab_elements() / shape.width, 32);
  for (int blocks = 1; blocks <= gpu.largest_cluster(); blocks *= 2) {
    OverlappedNumbers numbers;
    numbers.blocks = blocks;
    numbers.vectors = static_cast<int>(divide_up(rows, int64_t{blocks} * OverlappedNumbers::warps));
    if (numbers.vectors < least_vectors) return std::nullopt;
    const int others = std::max(1, numbers.vectors - kept_vectors(shape));
    for (numbers.doubled = others; numbers.doubled > 0; --numbers.doubled) {
      numbers.single = others - numbers.doubled;
      if (numbers.shared_bytes(shape, input_bytes) <= gpu.shared_bytes_per_block) return numbers;
    }
  }
  return std::nullopt;
}

// Vectors may run over the ends of rows here: only the slab's own ends count.
TailShape overlapped_shape(const Problem& problem) {
  TailShape shape(problem);
  shape.width = shape.slab_width;
  return shape;
}

std::optional<OverlappedNumbers> find_numbers(const Problem& problem) {
  return overlapped_numbers(overlapped_shape(problem), gpu_of(problem.device),
                            byte_size(problem.input.dtype));
}

std::string refusal(const Problem& problem) {
  std::string reason = tail_refusal(problem);
  if (!reason.empty()) return reason;
  const TailShape shape = overlapped_shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  if (shape.parts.norm == nullptr) return "the block has no norm";
  if (shape.parts.mean) return "the block ends in a mean";
  if (shape.order != Order::planar) return "channels lie after space: a slab is not contiguous";
  if (!gpu.has_clusters()) {
    return "it needs bulk copies and clusters, which are not used on " + gpu.architecture;
  }
  if (byte_size(problem.input.dtype) != 2) return "it is for elements of 16 bits";
  if (shape.width == 1) return "a slab of a few elements has no 16 bytes to copy";
  if (shape.slabs() > most_slabs) return "it counts slabs in 32 bits";
  if (!find_numbers(problem)) {
    return "a slab of " + std::to_string(shape.slab_elements()) +
           " elements is too small for it, or too large for " + std::to_string(gpu.largest_cluster()) +
           " blocks";
  }
  return "";
}

}  // namespace

bool overlapped_takes(const Problem& problem) { return refusal(problem).empty(); }

namespace {

class TailOverlapped final : public Kernel {
 public:
  explicit TailOverlapped(const Problem& problem)
      : problem_(problem),
        shape_(overlapped_shape(problem)),
        numbers_(*find_numbers(problem)),
        function_(source(), problem.device, launch_numbers()),
        blocks_(minimum(shape_.slabs(), function_.resident_clusters()) * numbers_.blocks) {}

  size_t workspace_bytes() const override { return 0; }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements in " << numbers_.blocks
        << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements, "
        << numbers_.doubled << " of them with two places, " << numbers_.single
        << " with one, the others in registers\n"
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
    out << precision_source(problem_.output.dtype) << "#include \"tail_overlapped.cuh\"\n"
        << tail_source(problem_)
        << Constants()
               .add("threads", numbers_.threads)
               .add("width", shape_.width)
               .add("blocks", numbers_.blocks)
               .add("vectors", numbers_.vectors)
               .add("doubled", numbers_.doubled)
               .add("single", numbers_.single)
               .add("at_once", numbers_.at_once)
               .numbers()
        << "using Agent = onepass::TailOverlapped<onepass::Tail, Numbers>;\n"
        << "static_assert(sizeof(Agent::Shared) <= " << shared_bytes() << ");\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers_.threads << ", "
        << "1) onepass_tail_overlapped(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << "  Agent{p, *reinterpret_cast<Agent::Shared*>(memory), static_cast<int>(blockIdx.x % "
        << numbers_.blocks << ")}.run();\n"
        << "}\n";
    return {"onepass_tail_overlapped", out.str()};
  }

  int64_t shared_bytes() const { return numbers_.shared_bytes(shape_, byte_size(problem_.input.dtype)); }

  Launch launch_numbers() const {
    return {static_cast<uint32_t>(numbers_.blocks), static_cast<uint32_t>(numbers_.threads),
            static_cast<uint32_t>(numbers_.blocks), static_cast<uint32_t>(shared_bytes())};
  }

  Problem problem_;
  TailShape shape_;
  OverlappedNumbers numbers_;
  Function function_;
  Number blocks_;
};

double seconds(const Problem& problem, const PlanOptions&) {
  const TailShape shape = overlapped_shape(problem);
  const Gpu& gpu = gpu_of(problem.device);
  const double bytes = static_cast<double>(shape.elements()) * static_cast<double>(shape.element_bytes);
  const OverlappedNumbers numbers = *find_numbers(problem);
  const double copy = 1.2 * bytes / gpu.bytes_per_second;
  // A slab takes a cluster some microseconds whatever its size, then time for each value of a thread. H200:
  // s60, s19 and s61 in bf16 9.3, 10 and 11.1 us. Clusters lie within GPCs, and one of those has fewer
  // multiprocessors.
  const double clusters = std::max(1, gpu.multiprocessors / numbers.blocks - (numbers.blocks >= 8 ? 1 : 0));
  const double rounds = std::ceil(static_cast<double>(shape.slabs()) / clusters);
  return 4e-6 + std::max(copy, rounds * (2e-6 + 5.7e-8 * numbers.vectors * shape.width));
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_tail_overlapped{
    "tail_overlapped", cuda::refusal, cuda::seconds,
    [](const Problem& problem, const PlanOptions&) -> std::shared_ptr<const Kernel> {
      return std::make_shared<const cuda::TailOverlapped>(problem);
    }};

}  // namespace onepass
