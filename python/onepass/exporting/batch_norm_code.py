"""What an exported file with batch norms has besides: scale and shift, from the statistics at each call."""

from __future__ import annotations

from onepass.exporting.binding import BINDING_HEAD

KERNEL = """\
// scale = weight / sqrt(variance + eps), shift = bias - mean * scale: a thread for a channel.
__global__ void scale_and_shift_kernel(const float* mean, const float* variance, const float* weight,
                                       const float* bias, float eps, float* scale, float* shift,
                                       long long channels) {
  const long long c = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= channels) return;
  const float factor = (weight ? weight[c] : 1.0f) / sqrtf(variance[c] + eps);
  scale[c] = factor;
  shift[c] = (bias ? bias[c] : 0.0f) - mean[c] * factor;
}
"""

LAUNCH = """\
void scale_and_shift(const float* mean, const float* variance, const float* weight, const float* bias,
                     double eps, float* scale, float* shift, int64_t channels, cudaStream_t stream) {
  constexpr int64_t threads = 128;
  const auto blocks = static_cast<unsigned>((channels + threads - 1) / threads);
  if (blocks == 0) return;
  scale_and_shift_kernel<<<blocks, threads, 0, stream>>>(mean, variance, weight, bias,
                                                         static_cast<float>(eps), scale, shift, channels);
  const cudaError_t result = cudaPeekAtLastError();
  if (result != cudaSuccess) {
    throw std::runtime_error(std::string("scale_and_shift: ") + cudaGetErrorString(result));
  }
}
"""

_BINDING = """\
#include <optional>

void scale_and_shift(const float* mean, const float* variance, const float* weight, const float* bias,
                     double eps, float* scale, float* shift, int64_t channels, cudaStream_t stream);

namespace {

using Optional = std::optional<at::Tensor>;

const float* address(const Optional& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<float>() : nullptr;
}

// Tensors are dense f32 vectors of one GPU: _scale_and_shift looks.
std::tuple<at::Tensor, at::Tensor> run_scale_and_shift(const at::Tensor& mean, const at::Tensor& variance,
                                                       const Optional& weight, const Optional& bias,
                                                       double eps) {
  const c10::cuda::CUDAGuard guard(mean.device());
  at::Tensor scale = at::empty(mean.sizes(), mean.options());
  at::Tensor shift = at::empty(mean.sizes(), mean.options());
  scale_and_shift(mean.const_data_ptr<float>(), variance.const_data_ptr<float>(), address(weight),
                  address(bias), eps, scale.mutable_data_ptr<float>(), shift.mutable_data_ptr<float>(),
                  mean.numel(), c10::cuda::getCurrentCUDAStream(mean.device().index()).stream());
  return {scale, shift};
}

}  // namespace

TORCH_LIBRARY_IMPL(@NAMESPACE@, CUDA, library) {
  library.impl("scale_and_shift", run_scale_and_shift);
}
"""

PYTHON = '''
# ----------------------------------------------------------------------------------------------------
# Batch norms in evaluation: a scale and a shift for each channel, in fp32.
_EXTENSIONS["batch_norm"] = (
    _BATCH_NORM_BINDING,
    [_CUDA_HEAD, _BATCH_NORM_KERNEL, _BATCH_NORM_LAUNCH],
)
_OPERATORS["scale_and_shift"] = (
    "batch_norm",
    "scale_and_shift(Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor)",
)
if not hasattr(getattr(torch.ops, _NAMESPACE), "scale_and_shift"):
    getattr(torch.ops, _NAMESPACE).exported.define(_OPERATORS["scale_and_shift"][1])


def _scale_and_shift(mean, variance, weight, bias, eps):
    """From the statistics as they are now: nothing is kept that a later change could leave out of date.

    One kernel computes both; PyTorch's operators do where gradients go through them or something traces.
    """
    given = [tensor for tensor in (mean, variance, weight, bias) if tensor is not None]
    statistics = torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)
    if statistics or any(t.dtype != torch.float32 or t.shape != mean.shape for t in given):
        return mean[:0], mean[:0]  # fits no kernel: PyTorch refuses such a norm, or computes it otherwise
    if _is_plain(mean, given) and not _unable("scale_and_shift", mean.device.index):
        return _operator("scale_and_shift")(mean, variance, weight, bias, eps)
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale
    return scale, shift if bias is None else shift + bias


def _batch_norm(module):
    parameters, buffers = module._parameters, module._buffers
    if "weight" in parameters:
        weight, bias = parameters["weight"], parameters["bias"]
    else:  # of a replica of the model, or computed
        weight, bias = module.weight, module.bias
    return _scale_and_shift(buffers["running_mean"], buffers["running_var"], weight, bias, module.eps)


def _is_plain(mean, given):
    if torch.compiler.is_compiling() or not mean.is_cuda or _wants_gradients(mean, given):
        return False
    dense = all(tensor.is_contiguous() and tensor.device == mean.device for tensor in given)
    return dense and not _unusual(mean, given)
'''


def binding_text(namespace: str) -> str:
    """The part that PyTorch calls."""
    return BINDING_HEAD + _BINDING.replace("@NAMESPACE@", namespace)
