// What PyTorch takes around its own convolutions, as data (H200). The convolutions themselves: convolution.h.
#pragma once

namespace onepass::cuda::framework {

// A bias that PyTorch adds reads and writes the output by a kernel of its own, at this share of a copy's
// rate: 29% contiguous (conv1d(64,512,k=1) @ 64x64x1869 bf16), 57% with channels last (2026-11-19).
inline constexpr double bias_copy_share = 0.5;
// The gradient of a bias reads that of the output; a launch takes so long besides (2026-11-15).
inline constexpr double bias_gradient_seconds = 1e-5;

}  // namespace onepass::cuda::framework
