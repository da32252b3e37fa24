// Keys of the plan cache.
#include "plan_cache.h"

namespace onepass::torch_binding {

PlanKey::PlanKey(std::string_view block, int threads) {
  bytes_.reserve(block.size() + 512);
  bytes_ = block;
  bytes_.push_back('\0');
  add(threads);
}

void PlanKey::add(int64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }

void PlanKey::add(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  add(static_cast<int64_t>(tensor.scalar_type()) * 64 + static_cast<int64_t>(sizes.size()));
  for (const int64_t size : sizes) add(size);
  for (const int64_t stride : tensor.strides()) add(stride);
}

void PlanKey::add(const std::string& text) {
  add(static_cast<int64_t>(text.size()));
  bytes_.append(text);
}

}  // namespace onepass::torch_binding
