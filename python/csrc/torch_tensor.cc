// PyTorch's tensors through the stable C interface.
#include "torch_tensor.h"

#include <sys/mman.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace onepass::torch_binding {
namespace {

int32_t torch_number(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return aoti_torch_dtype_float32();
    case DType::f16:
      return aoti_torch_dtype_float16();
    case DType::bf16:
      return aoti_torch_dtype_bfloat16();
    case DType::f64:
      break;
  }
  return aoti_torch_dtype_float64();
}

std::string name_of(const Place& place) {
  if (place.type == aoti_torch_device_type_cpu()) return "cpu";
  if (place.type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(place.index);
  return "a device of another kind";
}

// PyTorch's own exception does not pass the stable interface, which prints its words. Programs that try a
// smaller batch look for the first words of this sentence.
[[noreturn]] void refuse_memory(int64_t bytes, const Place& place) {
  const bool is_cuda = place.type == aoti_torch_device_type_cuda();
  throw std::runtime_error(std::string(is_cuda ? "CUDA out of memory." : "Out of memory.") +
                           " PyTorch's allocator has no " + std::to_string(bytes) + " bytes on " +
                           name_of(place) + " for a tensor of onepass");
}

// Null where the memory does not suffice.
AtenTensorHandle empty_strided(const Shape& sizes, const Shape& strides, int32_t dtype, const Place& place) {
  AtenTensorHandle handle = nullptr;
  const auto failed = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                               strides.data(), dtype, place.type, place.index, &handle);
  return failed ? nullptr : handle;
}

// glibc maps larger memory anew for every tensor, and the system clears it at the first write to each page.
// hardswish | leaky_relu of 48 MB on two threads of a Xeon takes 23 ms with pages of 4 KiB, 13 with huge
// ones, eager 35 to 42.
constexpr int64_t least_huge_bytes = int64_t{32} << 20;
constexpr uintptr_t huge_page = uintptr_t{2} << 20;

// Asks for huge pages. Where the system has none, nothing changes.
void prefer_huge_pages(const Tensor& tensor, int64_t bytes) {
  if (bytes < least_huge_bytes || !tensor.is_cpu()) return;
  const auto address = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t begin = (address + huge_page - 1) / huge_page * huge_page;
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) / huge_page * huge_page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

Tensor made(AtenTensorHandle handle, int64_t bytes, const Place& place) {
  if (!handle) refuse_memory(bytes, place);
  Tensor tensor(handle);
  prefer_huge_pages(tensor, bytes);
  return tensor;
}

}  // namespace

DType dtype_of(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    case ScalarType::Double:
      return DType::f64;
    default:
      throw std::runtime_error("the tensors must be float32, float16, bfloat16 or float64");
  }
}

DType dtype_of(const Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

TensorSpec spec_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  return {dtype_of(tensor), Shape(sizes.begin(), sizes.end()), Shape(strides.begin(), strides.end())};
}

// c10/core/MemoryFormat.h: from the channels outwards no stride is smaller than what lies inside it. Strides
// that fit both formats are contiguous.
bool is_channels_last(const TensorSpec& spec) {
  const size_t rank = spec.sizes.size();
  if (rank < 4 || rank > 5 || spec.strides[1] == 0) return false;
  int64_t least = 0;
  const auto clears = [&](size_t d) {
    if (spec.strides[d] < least || (d == 0 && least == spec.strides[1])) return false;
    least = spec.strides[d] * (spec.sizes[d] > 1 ? spec.sizes[d] : 1);
    return true;
  };
  if (!clears(1)) return false;
  for (size_t d = rank - 1; d >= 2; --d) {
    if (!clears(d)) return false;
  }
  return clears(0);
}

Place place_of(const Tensor& tensor) {
  Place place;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &place.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &place.index));
  return place;
}

void require_cpu(const Tensor& tensor) {
  if (!tensor.is_cpu()) {
    throw std::runtime_error("the compiled library runs on the CPU: all tensors must be there");
  }
}

void require_place(const Tensor& tensor, const Place& input) {
  const Place place = place_of(tensor);
  if (place == input) return;
  throw std::runtime_error("all tensors must be on the input's device, " + name_of(input) + ": one is on " +
                           name_of(place));
}

Tensor empty(const TensorSpec& spec, const Place& place) {
  return made(empty_strided(spec.sizes, spec.strides, torch_number(spec.dtype), place), spec.byte_span(),
              place);
}

Tensor empty_bytes(size_t bytes, const Place& place) {
  const auto count = static_cast<int64_t>(bytes);
  return made(empty_strided({count}, {1}, aoti_torch_dtype_uint8(), place), count, place);
}

}  // namespace onepass::torch_binding
