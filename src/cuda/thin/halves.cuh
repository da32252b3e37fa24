// f32 elements as f16 parts: what kernels of blocks that end in a mean multiply.
#pragma once

#include "thin/thin.cuh"

namespace onepass {

// A pair as 16-bit elements, and their low parts.
template <class C, class Input>
__device__ __forceinline__ void split_pair(float a, float b, uint32& high, uint32& low) {
  if constexpr (Input::bytes == 4) {
    high = pack_operands<C, f16>(a, b);
    float ha, hb;
    f16::unpack(high, ha, hb);
    low = f16::pack(a - ha, b - hb);
  } else {
    high = Input::pack(a, b);
    low = 0;
  }
}

// Whether a channel of a sample is exact in f16; tested where all its elements are small. By a warp.
template <class C, class Input, int input_parts, class Parameters>
__device__ __forceinline__ bool is_exact_in_f16(const Parameters& p, int64 n, int c) {
  constexpr int elements = static_cast<int>(C::input_size(0) * C::input_size(1) * C::input_size(2));
  bool exact = true;
  for (int i = threadIdx.x % 32; i < elements; i += 32) {
    const int i2 = i % static_cast<int>(C::input_size(2));
    const int i1 = i / static_cast<int>(C::input_size(2)) % static_cast<int>(C::input_size(1));
    const int i0 = i / static_cast<int>(C::input_size(1) * C::input_size(2));
    float x =
        load_one<Input>(p.input, n * C::input_stride(0) + c * C::input_stride(1) + i0 * C::input_stride(2) +
                                     i1 * C::input_stride(3) + i2 * C::input_stride(4)) *
        thin_input_scale;
    if (input_parts == 1) x = round_operand<C>(x);
    uint32 high, low;
    split_pair<C, Input>(x, 0.0f, high, low);
    float h, l, none;
    f16::unpack(high, h, none);
    f16::unpack(low, l, none);
    exact &= input_parts == 1 ? h == x : h + l == x;
  }
  return __all_sync(0xffffffffu, exact);
}

}  // namespace onepass
