// The row "tail_backward_strips": gradients with channels after space; strips of whole slabs of x and dy stay
// in shared memory.
#include <algorithm>
#include <cmath>
#include <sstream>

#include "cuda/row_numbers.h"
#include "cuda/tail/backward/backward.h"
#include "cuda/tail/strip_numbers.h"

namespace onepass {
namespace cuda {
namespace {

struct Numbers : StripNumbers {
  int threads_of_multiprocessor = 0;
  int input_bytes = 0, gradient_bytes = 0;  // of an element that is held
  int first_sums = 0, before_sums = 0;      // of a row, by part
  bool has_sums = false;                    // gradients of weights are wanted
  double moved = 0;                         // bytes of an element, through memory
  double of_element = 0;                    // instructions

  explicit Numbers(const BackwardProblem& problem) {
    const TailShape shape = backward_shape(problem);
    const BackwardWork work(problem, shape.parts);
    first_sums = 2 + work.after_sums;
    before_sums = work.before_sums;
    has_sums = work.third;
    input_bytes = static_cast<int>(byte_size(problem.forward.input.dtype));
    gradient_bytes = shape.parts.mean ? 0 : static_cast<int>(byte_size(problem.output_gradient.dtype));
    const double elements = static_cast<double>(shape.elements().value());
    moved = elements > 0 ? backward_bytes(problem, shape) / elements : 0;
    of_element = 30 + 0.6 * instructions_of_gradient(shape.parts, input_bytes == 2 ? 16 : 32);
    // Registers of a thread: 80 where vectors have four channels, else 128.
    threads_of_multiprocessor = shape.width > 4 || shape.parts.has_operands() ? 512 : 768;
    *this = best_strips(*this, shape, gpu_of(problem.forward.device));
  }

  int sums() const { return first_sums + before_sums; }  // of a row
  int64_t columns() const { return int64_t{strip} * sums(); }
  // Of the held tensors, the bytes of a vector: 4 at least are copied.
  int least_vector_bytes() const {
    return width * (gradient_bytes > 0 ? std::min(input_bytes, gradient_bytes) : input_bytes);
  }

  // The size of the kernel's `Shared`.
  int64_t shared_bytes() const {
    const int64_t x = int64_t{vectors} * threads * width * input_bytes;
    const int64_t given = gradient_bytes > 0 ? int64_t{vectors} * threads * width * gradient_bytes : 16;
    const int64_t parts = sets() * (strip / piece());
    const int64_t exchange = blocks > 1 ? slabs() * blocks : 1;
    const int64_t totals = has_sums ? round_up(columns(), 2) + threads : 3;
    const int64_t rows = has_sums ? int64_t{sets()} * strip * std::max(first_sums, before_sums) : 2;
    return round_up(round_up(x, 16) + round_up(given, 16) + (parts + 2 * exchange + slabs()) * 16 +
                        totals * 8 + 16 + rows * 4,
                    16);
  }

  int resident(const Gpu& gpu) const {
    return resident_blocks(gpu, shared_bytes(), threads_of_multiprocessor);
  }

  // The predicted time. A cluster asks for its next sample while it writes: memory waits for arithmetic only
  // where there is one sample.
  double weight(const TailShape& shape, const Gpu& gpu, int64_t batch) const {
    const double units = static_cast<double>(batch * strips(shape));
    const int per_multiprocessor = resident(gpu);
    const double rounds = std::ceil(units / clusters(gpu, per_multiprocessor));
    // Instructions of a multiprocessor's threads in a round. Fewer threads than these do not keep it busy.
    constexpr double of_vector = 40, of_thread = 800, least_threads = 384;
    const double here = std::min<double>(per_multiprocessor, std::ceil(units * blocks / gpu.multiprocessors));
    const double work = std::max(here * threads, least_threads) *
                        (vectors * (of_element * width + of_vector) + of_thread) /
                        (gpu.lanes() * gpu.clock());
    const double wait = blocks > 1 ? 4e-6 : 3e-6;
    // A cluster begins when all of its blocks have room. 16 blocks: 1.4 to 2 times what their work takes.
    const double gaps = (rounds - 1) * (blocks > 1 ? 3e-7 * blocks : 0);
    const double bytes = static_cast<double>(batch * shape.channels * shape.spatial) * moved;
    // Half of the multiprocessors reach the rate of all.
    const double used = std::min(1.0, 2 * units * blocks / gpu.multiprocessors);
    constexpr double of_copy = 1.25, launch = 6e-6;
    const double element = gradient_bytes > 0 ? std::min(input_bytes, gradient_bytes) : input_bytes;
    const double memory = of_copy * waste(shape, element) * bytes / (gpu.bytes_per_second * used);
    return launch + gaps + std::max(rounds * (wait + work), memory + rounds * wait / per_multiprocessor);
  }
};

class TailBackwardStrips final : public TailGradientKernel {
 public:
  static std::string refusal(const BackwardProblem& problem) {
    std::string reason = held_slab_refusal(problem, Order::interleaved);
    if (!reason.empty()) return reason;
    const auto numbers = numbers_of<Numbers>(problem);
    if (numbers->least_vector_bytes() < 4) {
      return "an odd number of channels has no vectors of 4 bytes to copy";
    }
    if (!numbers->fits()) return no_strip_fits(backward_shape(problem), gpu_of(problem.forward.device));
    return "";
  }

  static double seconds(const BackwardProblem& problem, const PlanOptions&) {
    const TailShape shape = backward_shape(problem);
    return numbers_of<Numbers>(problem)->weight(shape, gpu_of(problem.forward.device), shape.batch.value());
  }

  explicit TailBackwardStrips(const BackwardProblem& problem)
      : TailGradientKernel(problem, backward_shape(problem)),
        has_sums_(BackwardWork(problem, shape_.parts).third),
        numbers_(*numbers_of<Numbers>(problem)),
        function_(source(), problem.forward.device, launch_numbers()) {
    // A few waves of clusters, so that the last one is a small part: more of them leave more sums for the
    // last one to add up, and each waits for its first sample. With few blocks a multiprocessor that wait is
    // not hidden: they have three samples at least.
    constexpr double waves = 4;
    const Gpu& gpu = gpu_of(problem.forward.device);
    const auto most = static_cast<int64_t>(std::max(
        1.0, waves * numbers_.clusters(gpu, numbers_.resident(gpu)) / static_cast<double>(strips())));
    const Number least = numbers_.resident(gpu) <= 2 ? minimum(3, shape_.batch) : Number(1);
    samples_ = maximum(maximum(1, least), divide_up(shape_.batch, most)).called("samples_of_cluster");
    segments_ = maximum(1, divide_up(shape_.batch, samples_)).called("segments");
    if (!has_sums_) return;
    control_ = regions_.add(strips() * 4);
    sums_ = regions_.add(segments_ * (strips() * numbers_.columns() * 8));
  }

  std::string describe() const override {
    std::ostringstream out;
    out << "strip: " << numbers_.strip << " channels of " << shape_.spatial
        << " positions in the shared memory of " << numbers_.blocks
        << (numbers_.blocks > 1 ? " blocks of a cluster" : " block") << '\n'
        << "thread: " << numbers_.vectors << " vectors of " << numbers_.width << " channels; "
        << numbers_.warp_columns << " of a warp at a position\n"
        << "cluster: " << samples_.value() << (samples_.value() > 1 ? " samples" : " sample")
        << " of a strip\n"
        << "blocks: " << describe_blocks(blocks(), function_) << describe_memory();
    return out.str();
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    TailBackwardParameters p;
    if (!set_arguments(p, arguments, stream)) return;
    p.wave_units = samples_;
    if (has_sums_) {
      p.control = at(workspace, control_);
      p.parts = at(workspace, sums_);
      clear(at(workspace, control_), strips() * 4, stream, problem_.forward.device);
    }
    p.launch(function_, stream, blocks());
  }

 private:
  int64_t strips() const { return numbers_.strips(shape_); }
  Number blocks() const { return segments_ * (strips() * numbers_.blocks); }

  Source source() const {
    const std::string agent = "onepass::TailBackwardStrips<onepass::Tail, Numbers, ";
    std::ostringstream out;
    out << "#include \"tail/backward/strips.cuh\"\n"
        << tail_source(problem_, bits_of(problem_.forward, problem_.input_gradient.dtype))
        << numbers_.constants().numbers() << "using Agent = " << agent << "true>;\n"
        << "using Unaligned = " << agent << "false>;\n"
        << "static_assert(sizeof(Agent::Shared) == " << numbers_.shared_bytes()
        << " && sizeof(Unaligned::Shared) == sizeof(Agent::Shared));\n"
        << "extern \"C\" __global__ void __launch_bounds__(" << numbers_.threads << ", "
        << numbers_.resident(gpu_of(problem_.forward.device))
        << ") onepass_tail_backward_strips(const __grid_constant__ Agent::Parameters p) {\n"
        << "  extern __shared__ __align__(128) unsigned char memory[];\n"
        << "  if (onepass::is_aligned(p, onepass::aligned_all)) {\n"
        << "    Agent{p, *reinterpret_cast<Agent::Shared*>(memory)}.run();\n"
        << "  } else {\n"
        << "    Unaligned{p, *reinterpret_cast<Unaligned::Shared*>(memory)}.run();\n"
        << "  }\n"
        << "}\n";
    return {"onepass_tail_backward_strips", out.str()};
  }

  Launch launch_numbers() const {
    return {numbers_.blocks, static_cast<uint32_t>(numbers_.threads), static_cast<uint32_t>(numbers_.blocks),
            static_cast<uint32_t>(numbers_.shared_bytes())};
  }

  bool has_sums_;  // gradients of weights are wanted
  Numbers numbers_;
  Function function_;
  Number samples_;
  Number segments_;
  Region control_, sums_;
};

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_tail_backward_strips =
    cuda::tail_backward_strategy<cuda::TailBackwardStrips>("tail_backward_strips");

}  // namespace onepass
