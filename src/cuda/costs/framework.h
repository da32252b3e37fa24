// What PyTorch takes around its own convolutions, as data (H200). The convolutions themselves: convolution.h.
#pragma once

namespace onepass::cuda::framework {

// A bias that PyTorch adds reads and writes the output by a kernel of its own, at this share of a copy's
// rate: 30 to 60% with 1,869 to 46,720 positions in one channel (2026-11-19).
inline constexpr double bias_copy_share = 0.5;
// The gradient of a bias reads that of the output; a launch takes so long besides (2026-11-15).
inline constexpr double bias_gradient_seconds = 1e-5;

}  // namespace onepass::cuda::framework
