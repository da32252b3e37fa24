// The row "gemm_apart": a convolution by gemm_mma whose f32 output waits in memory, then a tail. It is for
// norms whose slabs have channels of several groups of the convolution: gemm_mma takes a group for a sample
// of its own, so that no slab may cross it.
#include <string>
#include <utility>
#include <vector>

#include "cuda/gemm/gemm.h"
#include "cuda/tail/tail.h"

namespace onepass {

extern const Strategy cuda_gemm_mma;

namespace cuda {
namespace {

const Strategy& product_row() { return cuda_gemm_mma; }

class GemmApart final : public Kernel {
 public:
  explicit GemmApart(const Problem& problem)
      : convolution_(convolution_before_tail(problem)),
        product_(product_row().build(convolution_, PlanOptions{})),
        tail_problem_(*tail_after_convolution(problem)),
        tail_(build_tail(tail_problem_)),
        samples_(ThinShape(convolution_).samples) {
    const Shape& sizes = tail_problem_.input.sizes;
    values_ = regions_.add(samples_ * (element_count({sizes.begin() + 1, sizes.end()}) * 4));
  }

  Accuracy accuracy() const override {
    Accuracy own = tail_.kernel->accuracy();
    const Accuracy product = product_->accuracy();
    own.cut_terms = product.cut_terms;
    own.tf32 = product.tf32;
    return own;
  }
  // The two kernels have one place: the tail begins when the product has ended.
  size_t workspace_bytes() const override {
    return static_cast<size_t>(regions_.total().value()) +
           std::max(product_->workspace_bytes(), tail_.kernel->workspace_bytes());
  }
  size_t packed_bytes() const override { return product_->packed_bytes(); }
  uint64_t packing() const override { return product_->packing(); }
  void launch_pack(const std::vector<const void*>& parameters, void* packed, Stream stream) const override {
    product_->launch_pack(parameters, packed, stream);
  }

  std::string describe() const override {
    return "product: " + std::string(product_row().name) + '\n' + product_->describe() +
           "then: " + tail_.row + '\n' + tail_.kernel->describe() +
           "workspace: " + std::to_string(workspace_bytes()) + " bytes\n";
  }
  std::vector<std::string> numerics() const override {
    std::vector<std::string> notes = product_->numerics();
    for (std::string& note : tail_.kernel->numerics()) notes.push_back(std::move(note));
    return notes;
  }

  void launch(const Arguments& arguments, void* workspace, Stream stream) const override {
    if (samples_ == 0) return;
    void* const values = at(workspace, values_);
    void* const rest = at(workspace, Region{regions_.total(), 0});
    Arguments product;
    product.input = arguments.input;
    product.output = values;
    product.packed = arguments.packed;
    product.parameters.assign(arguments.parameters.begin(),
                              arguments.parameters.begin() + std::ssize(convolution_.parameters));
    product_->launch(product, rest, stream);
    Arguments tail;
    tail.input = values;
    tail.output = arguments.output;
    tail.statistics = arguments.statistics;
    tail.parameters.assign(arguments.parameters.begin() + std::ssize(convolution_.parameters),
                           arguments.parameters.end());
    tail_.kernel->launch(tail, rest, stream);
  }

 private:
  Problem convolution_;
  std::shared_ptr<const Kernel> product_;
  Problem tail_problem_;
  BuiltTail tail_;
  Number samples_;
  Regions regions_;
  Region values_;
};

std::string refusal(const Problem& problem) {
  if (problem.block.conv() == nullptr) return "the block has no convolution";
  if (!tail_after_convolution(problem)) return "nothing follows the convolution";
  if (product_row().refusal(problem).empty()) return "gemm_mma takes the block whole";
  std::string reason = product_row().refusal(convolution_before_tail(problem));
  if (!reason.empty()) return reason;
  if (tail_row(*tail_after_convolution(problem)) == nullptr)
    return "no row takes what follows the convolution";
  return "";
}

double seconds(const Problem& problem, const PlanOptions& options) {
  const Problem tail = *tail_after_convolution(problem);
  constexpr double between = 2e-6;  // from one launch to the next
  return product_row().seconds(convolution_before_tail(problem), options) + between +
         values_factor(tail) * tail_row(tail)->seconds(tail, {});
}

}  // namespace
}  // namespace cuda

extern const Strategy cuda_gemm_apart =
    cuda::row_of<cuda::GemmApart>("gemm_apart", cuda::refusal, cuda::seconds);

}  // namespace onepass
