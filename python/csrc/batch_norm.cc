// A batch norm in evaluation as a scale and a shift per channel, computed anew in every call: nothing is kept
// that an in-place change of the statistics, or the replay of a graph, could leave out of date.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "boxed.h"
#include "cuda_stream.h"
#include "onepass/cuda.h"
#include "onepass/error.h"
#include "plan_cache.h"
#include "torch_tensor.h"

namespace onepass::torch_binding {
namespace {

using Optional = std::optional<Tensor>;

// PyTorch's own call of a contiguous tensor takes a microsecond.
Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The statistics and the affine part of a norm: contiguous, of one type, length and place.
struct Norm {
  Tensor mean;
  Tensor variance;
  Optional weight;
  Optional bias;
  DType dtype;
  int64_t channels;
  Place place;

  Norm(const Tensor& given_mean, const Tensor& given_variance, const Optional& given_weight,
       const Optional& given_bias)
      : mean(dense(given_mean)),
        variance(dense(given_variance)),
        dtype(dtype_of(mean)),
        channels(mean.numel()),
        place(place_of(mean)) {
    check(variance);
    if (given_weight) check(weight.emplace(dense(*given_weight)));
    if (given_bias) check(bias.emplace(dense(*given_bias)));
  }

  // f64 where the norm is, else f32: in 16 bits they would lose what a large mean needs.
  std::tuple<Tensor, Tensor> result() const {
    const auto spec = TensorSpec::dense(dtype == DType::f64 ? DType::f64 : DType::f32, {channels});
    return {empty(spec, place), empty(spec, place)};
  }

 private:
  void check(const Tensor& tensor) const {
    require_place(tensor, place);
    if (tensor.dim() == 1 && tensor.numel() == channels && dtype_of(tensor) == dtype) return;
    throw Error("batch norm: statistics, weight and bias must be vectors of one length and one type");
  }
};

const void* address(const Optional& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

template <class Element, class Computed>
void compute(const Norm& norm, double eps, const Tensor& scales, const Tensor& shifts) {
  const auto* mean = static_cast<const Element*>(norm.mean.const_data_ptr());
  const auto* variance = static_cast<const Element*>(norm.variance.const_data_ptr());
  const auto* weight = static_cast<const Element*>(address(norm.weight));
  const auto* bias = static_cast<const Element*>(address(norm.bias));
  auto* scale = static_cast<Computed*>(scales.mutable_data_ptr());
  auto* shift = static_cast<Computed*>(shifts.mutable_data_ptr());
  const auto added = static_cast<Computed>(eps);
  for (int64_t c = 0; c < norm.channels; ++c) {
    const auto deviation = std::sqrt(static_cast<Computed>(variance[c]) + added);
    scale[c] = (weight ? static_cast<Computed>(weight[c]) : Computed{1}) / deviation;
    shift[c] =
        (bias ? static_cast<Computed>(bias[c]) : Computed{0}) - static_cast<Computed>(mean[c]) * scale[c];
  }
}

std::tuple<Tensor, Tensor> on_cpu(const Tensor& mean, const Tensor& variance, const Optional& weight,
                                  const Optional& bias, double eps) {
  const Norm norm(mean, variance, weight, bias);
  auto [scale, shift] = norm.result();
  switch (norm.dtype) {
    case DType::f32:
      compute<float, float>(norm, eps, scale, shift);
      break;
    case DType::f16:
      compute<c10::Half, float>(norm, eps, scale, shift);
      break;
    case DType::bf16:
      compute<c10::BFloat16, float>(norm, eps, scale, shift);
      break;
    case DType::f64:
      compute<double, double>(norm, eps, scale, shift);
      break;
  }
  return {scale, shift};
}

std::tuple<Tensor, Tensor> on_cuda(const Tensor& mean, const Tensor& variance, const Optional& weight,
                                   const Optional& bias, double eps) {
  static PlanCache<cuda::ScaleAndShift> cache;
  const Norm norm(mean, variance, weight, bias);
  const int device = norm.place.index;
  PlanKey key("scale_and_shift", device);
  key.add(static_cast<int64_t>(norm.dtype));
  const auto kernel = cache.get(key, [&] { return cuda::ScaleAndShift(norm.dtype, Device::cuda(device)); });
  auto [scale, shift] = norm.result();
  kernel->run({norm.mean.const_data_ptr(), norm.variance.const_data_ptr(), address(norm.weight),
               address(norm.bias), static_cast<float*>(scale.mutable_data_ptr()),
               static_cast<float*>(shift.mutable_data_ptr()), norm.channels, eps},
              current_stream(device));
  return {scale, shift};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(onepass, library) {
  library.def(
      "scale_and_shift(Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, library) { library.impl("scale_and_shift", boxed<on_cpu>); }

STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, library) { library.impl("scale_and_shift", boxed<on_cuda>); }

}  // namespace onepass::torch_binding
