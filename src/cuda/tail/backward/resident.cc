// The row "tail_backward_resident": gradients of a tail whose slab, x and dy, stays on the chip.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "cuda/row_numbers.h"
#include "cuda/tail/backward/backward.h"

namespace onepass {
namespace cuda {
namespace {

// A thread has at most this many elements. Where dy of them is in its registers, the body is unrolled over
// them, so that it grows beyond what the instruction cache holds. 128 elements of bf16 took 1.5 times as long
// as 64.
constexpr int64_t held_values = 80;
constexpr int64_t most_values = 96;     // where dy is a value of the row
constexpr int64_t staged_values = 128;  // where the loops over them are loops
constexpr int threads_of_multiprocessor = 512;

// Vectors lie within rows, which may begin anywhere.
TailShape shape_of(const BackwardProblem& problem) {
  TailShape shape = backward_shape(problem);
  shape.width = shape.slab_width;
  return shape;
}

// How many chunks a thread's elements are cut into: fewer spill less, more begin earlier. H200, times the
// floor with 2, 3 and 4: s60 (64 elements) 1.32, 1.27, 1.24; s19 (68) 1.30, -, 1.59; s61
// (80) 1.41, 1.30, 1.50.
int chunks_of(int64_t elements) { return elements <= 64 ? 4 : elements <= 72 ? 2 : 3; }

// How a slab is spread over the warps of a cluster.
struct Numbers {
  int width = 1;
  int input_bytes = 0;     // of an element of x in shared memory
  int gradient_bytes = 0;  // of dy beside it; 0 where it is in registers or a value of the row
  int sums = 0;            // of a row
  int threads = 0;
  int vectors = 0;      // of a thread
  int blocks = 0;       // in a cluster; 0 where the slab fits none
  int64_t pieces = 1;   // of a row, each a warp's
  int chunk = 1;        // vectors of a thread that arrive together
  int lag = 1;          // chunks between the request of one and its arithmetic
  bool staged = false;  // dy waits in shared memory, not in registers; then there are no chunks
  int doubled = 0;      // vectors of a thread with two places there
  int kept = 0;         // with one there and one in registers
  // In the body of a loop: with one, s60 and s19 take 1.80 and 1.51 times their floor, with two 1.68
  // and 1.48.
  static constexpr int at_once = 2;

  explicit Numbers(const BackwardProblem& problem) {
    const TailShape shape = shape_of(problem);
    const bool mean = shape.parts.mean;
    const BackwardWork work(problem, shape.parts);
    width = shape.width;
    sums = work.first_sums + work.second_sums;
    input_bytes = static_cast<int>(byte_size(problem.forward.input.dtype));
    // With 16 bits dy waits beside x in shared memory.
    const auto dy_bytes = static_cast<int>(byte_size(problem.output_gradient.dtype));
    staged = (mean ? input_bytes : dy_bytes) == 2;
    gradient_bytes = staged && !mean ? dy_bytes : 0;
    if (!find(shape, gpu_of(problem.forward.device))) blocks = 0;
  }

  bool fits() const { return blocks > 0; }

  // The size of the kernel's `Shared`.
  int64_t shared_bytes() const {
    const int64_t warps = threads / 32;
    const int64_t elements = int64_t{vectors + doubled} * threads * width;
    const int64_t gradient = gradient_bytes > 0 ? elements * gradient_bytes : warps * 16;
    const int64_t senders = staged && blocks > 1 ? blocks : blocks * warps;
    const int64_t exchange = 2 * 16 * (senders + (staged ? warps : 1)) + 40;
    const int64_t arrivals = staged ? 4 : divide_up(vectors, chunk);
    return round_up(elements * input_bytes + gradient + exchange + warps * (arrivals + sums) * 8, 128);
  }

 private:
  bool find(const TailShape& shape, const Gpu& gpu) {
    const int64_t rows = std::max<int64_t>(1, divide_up(shape.spatial / width, 32));  // of 32 vectors
    const int64_t most = (staged ? staged_values : shape.parts.mean ? most_values : held_values) / width;
    for (blocks = 1; blocks <= gpu.largest_cluster(); blocks *= 2) {
      for (const int size : {128, 256, 512}) {
        threads = size;
        if (blocks > 1 && threads < threads_of_multiprocessor) continue;
        const int64_t all_pieces = int64_t{blocks} * threads / 32 / shape.group_channels();
        if (all_pieces < 1) continue;
        const int64_t share = divide_up(rows, all_pieces);
        if (share > most) continue;
        vectors = static_cast<int>(share);
        const int64_t room = gpu.shared_bytes_per_block * threads / threads_of_multiprocessor;
        doubled = kept = 0;
        if (staged) {
          // As many pieces as there are warps for: each has `share` vectors or one less.
          pieces = std::min(all_pieces, rows);
          chunk = vectors;
          // All warps have the doubled ones.
          doubled = static_cast<int>(rows / pieces);
          while (doubled > 0 && shared_bytes() > room) --doubled;
          // Where that is less than half, some of the others have a second place in registers. Elsewhere that
          // takes longer than it saves: their bodies follow each other, and are not a loop.
          constexpr int most_kept = 4;
          if (2 * doubled < vectors) kept = std::min(most_kept, vectors - doubled);
        } else {
          pieces = divide_up(rows, share);
          chunk = static_cast<int>(divide_up(share, chunks_of(share * width)));
        }
        if (shared_bytes() <= room) return true;
      }
    }
    return false;
  }
};

class TailBackwardResident final : public TailGradientKernel {
 public:
  static std::string refusal(const BackwardProblem& problem) {
    std::string reason = held_slab_refusal(problem);
    if (!reason.empty()) return reason;
    const TailShape shape = shape_of(problem);
    const Gpu& gpu = gpu_of(problem.forward.device);
    if (!gpu.has_clusters())
      return "it needs bulk copies and clusters, which are not used on " + gpu.architecture;
    if (shape.width == 1) return "a slab of a few elements has no 16 bytes to copy";
    if (!numbers_of<Numbers>(problem)->fits()) {
      return "a slab of " + std::to_string(shape.group_channels()) + " channels of " +
             std::to_string(shape.spatial) + " elements does not fit on " +
             std::to_string(gpu.largest_cluster()) + " multiprocessors";
    }
    return "";
  }

  static double seconds(const BackwardProblem& problem, const PlanOptions&) {
    const TailShape shape = shape_of(problem);
    const Gpu& gpu = gpu_of(problem.forward.device);
    const auto found = numbers_of<Numbers>(problem);
    const Numbers& numbers = *found;
    const double bytes = backward_bytes(problem, shape);
    const double clusters =
        std::max(1, gpu.multiprocessors * threads_of_multiprocessor / numbers.threads / numbers.blocks -
                        (numbers.blocks > 8 ? 1 : 0));
    const double rounds = std::ceil(static_cast<double>(shape.slabs().value()) / clusters);
    // What a slab takes a cluster whatever it moves: sums, then each element of a thread. H200: s60, s19, s61
    // and s27 in bf16 7.0, 7.3, 8.7 and 7.4 us; slabs of 800 and 3430 elements in f32, 4 and 12 of a thread,
    // 2.5 and 2.9 us (2026-11-17).
    constexpr double wait = 2.2e-6;
    const double element =
        numbers.staged ? (shape.parts.mean ? 5e-8 : 6.3e-8) : (shape.parts.mean ? 6e-8 : 8e-8);
    const double latency = rounds * (wait + element * numbers.vectors * shape.width);
    // H200: 1.24, 1.30, 1.30 and 1.45 times the floor for s60, s19, s61 and s27 in f32, 1.21 for slabs of
    // 34848 elements on one multiprocessor, in bf16 1.40, 1.40, 1.38 and 1.39. Where less than half has two
    // places, the rest is waited for: 1.6 to 1.86.
    const bool waits = numbers.staged && 2 * (numbers.doubled + numbers.kept) < numbers.vectors;
    const double memory = waits ? 1.7 : shape.parts.mean || numbers.staged ? 1.45 : 1.3;
    return 6e-6 + std::max(latency, memory * bytes / gpu.bytes_per_second);
  }

  explicit TailBackwardResident(const BackwardProblem& problem)
      : TailGradientKernel(problem, shape_of(problem)),
        has_sums_(BackwardWork(problem, shape_.parts).third),
        numbers_(*numbers_of<Numbers>(problem)),
        function_(source(), problem.forward.device, launch_numbers()) {
    clusters_ = clamp(shape_.slabs(), 1, function_.resident_clusters()).called("clusters");
    // Groups that one cluster meets on its way.
    segments_ =
        (divide_up(divide_up(shape_.slabs(), clusters_), maximum(1, shape_.batch)) + 1).called("segments");
    if (!has_sums_) return;
    control_ = regions_.add(control_bytes());
    sums_ =
        regions_.add(clusters_ * segments_ * (numbers_.blocks * (numbers_.threads / 32) * numbers_.sums * 8));
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "slab: " << shape_.slab_elements() << " elements on " << numbers_.blocks
        << (numbers_.blocks > 1 ? " multiprocessors" : " multiprocessor") << ", a row in " << numbers_.pieces
        << (numbers_.pieces > 1 ? " pieces" : " piece") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << shape_.width << " elements"
        << (numbers_.staged ? ", " + std::to_string(numbers_.doubled) + " of them with two places" : "")
        << (numbers_.kept > 0 ? ", " + std::to_string(numbers_.kept) + " with one and registers" : "") << '\n'
        << "blocks: " << describe_blocks(clusters_ * numbers_.blocks, function_) << describe_memory();
    return out.str();
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    TailBackwardParameters p;
    if (!set_arguments(p, arguments, stream)) return;
    p.wave_units = segments_;
    if (has_sums_) {
      p.control = at(workspace, control_);
      p.parts = at(workspace, sums_);
      clear(at(workspace, control_), control_bytes(), stream, problem_.forward.device);
    }
    p.launch(function_, stream, clusters_ * numbers_.blocks);
  }

 private:
  int64_t control_bytes() const { return shape_.channels * 4; }  // how many warps have left their sums

  Source source() const {
    const std::string agent = "TailBackwardResident<onepass::Tail, Numbers>";
    const std::string numbers =
        Constants()
            .add("threads", numbers_.threads, "width", shape_.width, "vectors", numbers_.vectors)
            .add("blocks", numbers_.blocks, "pieces", numbers_.pieces)
            .add("chunk", numbers_.chunk, "lag", numbers_.lag)
            .flag("staged", numbers_.staged)
            .add("doubled", numbers_.doubled, "kept", numbers_.kept, "at_once", numbers_.at_once)
            .numbers();
    const std::string check = "static_assert(sizeof(onepass::" + agent +
                              "::Shared) == " + std::to_string(numbers_.shared_bytes()) + ");\n";
    const std::string tail = tail_source(problem_, bits_of(problem_.forward, problem_.input_gradient.dtype));
    return agent_kernel("onepass_tail_backward_resident",
                        "#include \"tail/backward/resident.cuh\"\n" + tail + numbers + check, agent,
                        std::to_string(numbers_.threads) + ", " +
                            std::to_string(threads_of_multiprocessor / numbers_.threads),
                        SharedAs::structure);
  }

  Launch launch_numbers() const {
    return {numbers_.blocks, static_cast<uint32_t>(numbers_.threads), static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.shared_bytes())};
  }

  bool has_sums_;  // gradients of weights are wanted
  Numbers numbers_;
  Function function_;
  Number clusters_;
  Number segments_;
  Region control_, sums_;
};

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_tail_backward_resident =
    cuda::tail_backward_strategy<cuda::TailBackwardResident>("tail_backward_resident");

}  // namespace onepass
