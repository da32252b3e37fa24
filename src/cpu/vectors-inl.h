// Vectors of floats of the SIMD target at hand. Compiled once per target.

#if defined(ONEPASS_CPU_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ONEPASS_CPU_VECTORS_INL_H_
#undef ONEPASS_CPU_VECTORS_INL_H_
#else
#define ONEPASS_CPU_VECTORS_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace onepass::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

}  // namespace onepass::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
