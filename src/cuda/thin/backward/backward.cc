// The row "thin_backward": all gradients of a thin convolution with what follows it. Of tensors of the
// convolution's size only dy is read, and none is written: dh of a few samples is in a ring buffer that the
// second-level cache holds.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "cuda/notes.h"
#include "cuda/row_numbers.h"
#include "cuda/runtime/parameters.h"
#include "cuda/thin/backward/numbers.h"
#include "onepass/cuda.h"
#include "thin/backward/parameters.cuh"

namespace onepass {
namespace cuda {
namespace {

// The forward problem with the strides of the output's gradient for the output's: the output itself is read
// only before a mean.
Problem as_read(const BackwardProblem& problem, const TailParts& parts) {
  Problem forward = problem.forward;
  if (!parts.mean && parts.tensor_parameters().empty())
    forward.output.strides = problem.output_gradient.strides;
  return forward;
}

class ThinBackward final : public BackwardKernel {
 public:
  ThinBackward(const BackwardProblem& problem, std::shared_ptr<const ThinBackwardNumbers> numbers)
      : problem_(problem), numbers_(std::move(numbers)) {
    if (!work_.first && !work_.second) return;
    const std::string structs = tail_source(problem_) + thin_source(as_read(problem_, shape_.parts), shape_) +
                                numbers_->source(problem_);
    function_.emplace(source(structs), problem.forward.device,
                      Launch{1, static_cast<uint32_t>(numbers_->threads), 1,
                             static_cast<uint32_t>(numbers_->shared_bytes)});
    if (work_.sums) {
      reduce_blocks_ = (work_.weight ? numbers_->units * 4 * numbers_->slices : 0) + shape_.channels + 1;
      reduce_.emplace(reduce_source(structs), problem.forward.device,
                      Launch{1, static_cast<uint32_t>(numbers_->threads), 1, 0});
    }
    const Number resident = function_->resident_clusters();
    const int64_t of_sample = numbers_->tickets_of_sample();
    const Number& batch = shape_.batch;
    // A pass lags behind the one before by as many tickets as run at a time: what it waits for is mostly
    // done. Where the output replaces pass 1, which then takes no time, pass 3 lags half as many more behind
    // pass 2: s27 takes 1.35 ms, 1.61 with equal lags. Others are not measured.
    const bool replaces_first = work_.may_read_output;
    const bool lags_more = replaces_first && work_.input;
    const int64_t slow =
        of_sample - (replaces_first ? numbers_->segments : 0) - (lags_more && numbers_->halves ? 1 : 0);
    const Number lag = (divide_up(resident, slow) + 1).called("lag");
    first_lag_ = lags_more ? lag / 2 : lag;
    second_lag_ = (lags_more ? 3 * lag / 2 : lag).called("second_lag");
    ring_samples_ = minimum(batch, 2 * second_lag_ + 1).called("ring_samples");
    blocks_ = clamp(batch * of_sample, 1, resident);
    const Number tickets = batch * numbers_->segments;
    control_ = regions_.add((batch + 1) * 4 * 4);
    columns_ = regions_.add(numbers_->units * 4 * 4);
    peaks_ = regions_.add(when(numbers_->halves, batch * 4));
    cleared_bytes_ = regions_.total();
    scales_ = regions_.add(when(numbers_->halves, batch * 2 * 4));
    first_parts_ = regions_.add(tickets * shape_.channels * work_.first_sums() * 4);
    second_parts_ = regions_.add(tickets * shape_.channels * work_.second_sums() * 4);
    slab_sums_ = regions_.add(shape_.slabs() * 2 * 4);
    const bool merges = work_.weight && numbers_->segments > 1;
    weight_parts_ = regions_.add(when(merges, ring_samples_ * numbers_->segments * numbers_->units * 512));
    weight_samples_ = regions_.add(when(work_.weight, batch * numbers_->units * 512));
    slices_ = regions_.add(work_.weight ? numbers_->units * 128 * numbers_->slices * 8 : 0);
    ring_ = regions_.add(when(work_.input, ring_samples_ * numbers_->ring_bytes()));
  }

  size_t workspace_bytes() const override { return static_cast<size_t>(regions_.total().value()); }
  bool reads_statistics() const override { return shape_.parts.norm != nullptr && function_.has_value(); }

  std::string describe() const override {
    if (!function_) return "passes: none, no gradient is wanted\n";
    const auto by = [](const ThinBackwardNumbers::Three& sizes) {
      return std::to_string(sizes[0]) + "x" + std::to_string(sizes[1]) + "x" + std::to_string(sizes[2]);
    };
    std::ostringstream out;
    out << "convolution: " << shape_.terms() << " terms in " << numbers_->steps << " steps of "
        << shape_.classes() << (shape_.classes() == 1 ? " class" : " classes") << ", computed "
        << (work_.first && work_.second ? "twice" : "once") << ", "
        << (numbers_->splits                                ? "operands split in two"
            : numbers_->halves                              ? "operands rounded to f16 and scaled"
            : problem_.forward.precision == Precision::tf32 ? "operands rounded to tf32"
                                                            : "gradients rounded to tf32")
        << '\n'
        << "tile: " << by(numbers_->tile) << " positions, " << numbers_->all_tiles() << " tiles and "
        << numbers_->segments << " tickets a sample\n";
    if (work_.input) {
      out << "input's gradient: tiles of " << by(numbers_->back_tile) << ", " << numbers_->all_back_tiles()
          << " a sample; ring of " << ring_samples_.value() << " samples, " << ring_.bytes.value()
          << " bytes\n";
    }
    out << "blocks: " << describe_blocks(blocks_.value(), *function_)
        << "passes: " << (work_.first ? 1 : 0) + (work_.second ? 1 : 0) + (work_.input ? 1 : 0)
        << (work_.may_read_output ? ", one less with the output" : "")
        << (reduce_ ? ", then sums over the batch" : "") << '\n'
        << "saved by forward: the input" << (shape_.parts.norm ? " and the statistics of each slab" : "")
        << '\n'
        << "workspace: " << workspace_bytes() << " bytes\n";
    return out.str();
  }

  std::vector<std::string> numerics() const override {
    return !function_ || numbers_->splits                  ? Notes{}
           : problem_.forward.precision == Precision::tf32 ? Notes{note::operands_rounded}
                                                           : Notes{note::gradients_rounded};
  }

  void launch(const BackwardArguments& arguments, void* workspace, Stream stream) const override {
    if (!function_) return;
    if (shape_.batch.value() == 0) {
      clear_gradients(problem_, arguments, stream);
      return;
    }
    ThinBackwardParameters p;
    p.input = arguments.input;
    p.output_gradient = arguments.output_gradient;
    p.output = arguments.output;
    p.statistics = arguments.statistics;
    p.control = at(workspace, control_);
    p.columns = at(workspace, columns_);
    p.peaks = at(workspace, peaks_);
    p.scales = at(workspace, scales_);
    p.first_parts = at(workspace, first_parts_);
    p.second_parts = at(workspace, second_parts_);
    p.slab_sums = at(workspace, slab_sums_);
    p.weight_parts = at(workspace, weight_parts_);
    p.weight_samples = at(workspace, weight_samples_);
    p.slices = at(workspace, slices_);
    p.ring = at(workspace, ring_);
    p.input_gradient = arguments.input_gradient;
    p.batch = shape_.batch;
    p.first_lag = first_lag_;
    p.second_lag = second_lag_;
    p.ring_samples = ring_samples_;
    p.parameter = arguments.parameters;
    p.gradient = arguments.parameter_gradients;
    clear(at(workspace, control_), cleared_bytes_, stream, problem_.forward.device);
    p.launch(*function_, stream, blocks_);
    if (reduce_) p.launch(*reduce_, stream, reduce_blocks_);
  }

 private:
  Source source(const std::string& structs) const {
    return {"onepass_thin_backward",
            "#include \"thin/backward/kernel.cuh\"\n" + structs +
                "using Agent = onepass::ThinBackward<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "static_assert(sizeof(Agent::Shared) == " +
                std::to_string(numbers_->shared_bytes) +
                ");\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_->threads) + ", " + std::to_string(numbers_->blocks) +
                ") onepass_thin_backward(const __grid_constant__ Agent::Parameters p) {\n"
                "  extern __shared__ __align__(128) unsigned char shared[];\n"
                "  Agent::Kernel{{p, *reinterpret_cast<Agent::Shared*>(shared)}}.run();\n"
                "}\n"};
  }
  Source reduce_source(const std::string& structs) const {
    return {"onepass_thin_reduce",
            "#include \"thin/backward/reduce.cuh\"\n" + structs +
                "using Agent = onepass::ThinBackward<onepass::Convolution, onepass::Tail, Numbers>;\n"
                "extern \"C\" __global__ void __launch_bounds__(" +
                std::to_string(numbers_->threads) +
                ") onepass_thin_reduce(const __grid_constant__ Agent::Parameters p) {\n"
                "  Agent::Reduce{p}.run();\n"
                "}\n"};
  }

  BackwardProblem problem_;
  std::shared_ptr<const ThinBackwardNumbers> numbers_;
  const ThinShape& shape_ = numbers_->shape;
  const ThinBackwardWork& work_ = numbers_->work;
  std::optional<Function> function_;
  std::optional<Function> reduce_;
  Number first_lag_ = 1, second_lag_ = 1;
  Number ring_samples_ = 1;
  Number blocks_ = 1;
  Number reduce_blocks_ = 1;
  Number cleared_bytes_;
  Regions regions_;
  Region control_, columns_, peaks_, scales_, first_parts_, second_parts_, slab_sums_, weight_parts_,
      weight_samples_, slices_, ring_;
};

bool have_equal_strides(const TensorSpec& a, const TensorSpec& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.sizes[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

struct ThinBackwardRow {
  static std::string refusal(const BackwardProblem& problem);
  static double seconds(const BackwardProblem& problem, const PlanOptions&);
  static std::shared_ptr<const BackwardKernel> build(const BackwardProblem& problem, const PlanOptions&) {
    return std::make_shared<const ThinBackward>(problem, numbers_of<ThinBackwardNumbers>(problem));
  }

 private:
  static std::string gradient_refusal(const BackwardProblem& problem, const TailParts& parts);
};

std::string ThinBackwardRow::gradient_refusal(const BackwardProblem& problem, const TailParts& parts) {
  const Problem& forward = problem.forward;
  if (problem.output_gradient.dtype == DType::f64 ||
      (problem.wants_input() && problem.input_gradient.dtype == DType::f64))
    return "f64 is not computed on the GPU";
  for (size_t i = 0; i < forward.parameters.size(); ++i) {
    if (problem.wants_parameter(i) && problem.parameter_gradients[i].dtype == DType::f64)
      return "f64 is not computed on the GPU";
  }
  if (!parts.tensor_parameters().empty() && !have_equal_strides(problem.output_gradient, forward.output))
    return "the output's gradient lies otherwise than the tensors that stages read";
  for (const int i : parts.tensor_parameters()) {
    const auto index = static_cast<size_t>(i);
    if (problem.wants_parameter(index) &&
        !have_equal_strides(problem.parameter_gradients[index], forward.parameters[index]))
      return "the gradient of a tensor that a stage reads lies otherwise than the tensor";
  }
  return "";
}

// The kernel left the gradient of such inputs unwritten: of the first plane with k=2, p=2 in its dimension.
bool has_inputs_without_outputs(const Problem& forward) {
  const Conv& conv = *forward.block.conv();
  if (!conv.transposed) return false;
  const Shape output = forward.block.conv_output_shape(forward.input.sizes);
  for (size_t d = 0; d < static_cast<size_t>(conv.rank); ++d) {
    const int64_t last = (forward.input.sizes[d + 2] - 1) * conv.stride[d] - conv.padding_before[d];
    if ((conv.kernel[d] - 1) * conv.dilation[d] < conv.padding_before[d] || last >= output[d + 2])
      return true;
  }
  return false;
}

std::string ThinBackwardRow::refusal(const BackwardProblem& problem) {
  std::string reason = thin_refusal(problem.forward);
  if (reason.empty()) reason = ties_refusal(problem.forward);
  if (!reason.empty()) return reason;
  if (problem.wants_input() && has_inputs_without_outputs(problem.forward))
    return "padding cuts off all outputs that an input meets";
  reason = gradient_refusal(problem, ThinShape(problem.forward).parts);
  if (!reason.empty()) return reason;
  const auto numbers = numbers_of<ThinBackwardNumbers>(problem);
  if (numbers->shared_bytes == 0) return "weights, a window and a tile of gradients do not fit shared memory";
  constexpr int64_t most_tickets = int64_t{1} << 31;
  if (numbers->shape.batch.value() > most_tickets / 16 / std::max<int64_t>(1, numbers->tickets_of_sample()))
    return "the batch has more tiles than tickets can count";
  return "";
}

double ThinBackwardRow::seconds(const BackwardProblem& problem, const PlanOptions&) {
  const auto numbers = numbers_of<ThinBackwardNumbers>(problem);
  const ThinShape& shape = numbers->shape;
  const ThinBackwardWork& work = numbers->work;
  const Gpu& gpu = gpu_of(problem.forward.device);
  const auto outputs = static_cast<double>((shape.rows() * shape.spatial).value());
  const auto multiply_adds = static_cast<double>(problem.forward.conv_multiply_adds());
  const double passes = (work.first && !work.may_read_output ? 1 : 0) + (work.second ? 1 : 0);
  const double weight = work.weight ? 1 : 0;
  const double input = work.input ? 1 : 0;
  // H200, s60 and s27 in tf32, operands as f16: 0.49 and 0.55 ms a pass, 0.20 and 0.36 more for dweight,
  // 0.27 and 0.69 for dx; as tf32 0.46, 0.85, 0.35, 0.56, 0.71 and 1.02; in f32 2.6 and 9.8 ms.
  double of_output = (1.65 * passes + 1.3 * weight + 2.65 * input) * (numbers->splits ? 1.2 : 1);
  double of_product = (0.016 * passes + 0.01 * weight + 0.016 * input) * (numbers->splits ? 4 : 1);
  if (numbers->halves) {
    of_output = 1.86 * passes + 0.72 * weight + 0.91 * input;
    of_product = 0.0063 * passes + 0.0067 * weight + 0.0153 * input;
  }
  // Of a convolution alone with 16 inputs dweight and dx took 4 and 9 times as long, with 32 both took 130
  // times as long; with 8 as long (2026-11-19).
  const double many = std::pow(std::max(1.0, static_cast<double>(shape.in_channels) / 8), 3.5);
  return 2e-5 + many * 1e-12 * (outputs * of_output + multiply_adds * of_product) * 66.9e12 / gpu.flops;
}

}  // namespace
}  // namespace cuda

extern const BackwardStrategy cuda_thin_backward{"thin_backward", cuda::ThinBackwardRow::refusal,
                                                 cuda::ThinBackwardRow::seconds,
                                                 cuda::ThinBackwardRow::build};

}  // namespace onepass
