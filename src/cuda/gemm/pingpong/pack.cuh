// The launch before the ping-pong kernel: packs weights, builds the tensor map of x for bulk copies of boxes,
// and clears memory.
#pragma once

#include "gemm/pingpong/layout.cuh"
#include "gemm/source/pack.cuh"

namespace onepass::pingpong {

// Dimensions of the map, innermost first: [x][channel][y][z][sample].
template <class C, class Input, class Numbers>
struct TensorMap {
  struct alignas(128) Map {
    uint32 word[32];
  };

  // By one warp. Copies need x on 16 bytes; where it is not, all samples are computed again.
  static __device__ __forceinline__ void build(const PingpongPackParameters& p) {
#if __CUDA_ARCH__ >= 900
    const uint64 input = reinterpret_cast<uint64>(p.input) & ~uint64{15};
    const int64 batch = p.batch;
    __shared__ Map map;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    map.word[lane] = 0;
    __syncwarp();
    if (lane == 0) {
      const uint32 a = barrier::shared_address(&map);
      asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(a),
                   "l"(input)
                   : "memory");
      asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 4;" ::"r"(a) : "memory");
      dimension<0>(a, C::input_size(2), Numbers::raw_pitch);
      dimension<1>(a, C::in_channels, 8);
      dimension<2>(a, C::input_size(1), Numbers::copy_y);
      dimension<3>(a, C::input_size(0), 1);
      dimension<4>(a, batch, 1);
      stride<0>(a, C::input_stride(1));
      // A dimension of one element has no stride of its own.
      stride<1>(a, C::input_size(1) > 1 ? C::input_stride(3) : C::input_stride(1));
      stride<2>(a, C::input_size(0) > 1 ? C::input_stride(2) : C::input_stride(1));
      stride<3>(a, C::input_stride(0));
      // Any type of this width will do: all have the same zeros.
      constexpr int type = Input::bytes == 2 ? 1 : 2;
      asm volatile("tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], %1;" ::"r"(a), "n"(type)
                   : "memory");
      asm volatile("tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;" ::"r"(a)
                   : "memory");
      asm volatile("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], 0;" ::"r"(a) : "memory");
      asm volatile("tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;" ::"r"(a) : "memory");
    }
    __syncwarp();
    static_cast<uint32*>(p.map)[lane] = map.word[lane];
#endif
  }

 private:
#if __CUDA_ARCH__ >= 900
  template <int d>
  static __device__ __forceinline__ void dimension(uint32 a, int64 size, int box) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "r"(static_cast<uint32>(size))
                 : "memory");
    asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "r"(box)
                 : "memory");
    asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], %1, 1;" ::"r"(a), "n"(d)
                 : "memory");
  }
  template <int d>
  static __device__ __forceinline__ void stride(uint32 a, int64 elements) {
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "l"(elements * Input::bytes)
                 : "memory");
  }
#endif
};

template <class C, class Tail, class Numbers>
struct Pack {
  using Parameters = PingpongPackParameters;

  const Parameters& p;
  unsigned char* staged;  // weights

  __device__ __forceinline__ void run() const {
    allow_kernel_after();
    clear();
    GemmPack<C, Numbers, Parameters>{p, staged}.run();
    if (blockIdx.x == 0 && threadIdx.x < 32) TensorMap<C, typename Tail::Input, Numbers>::build(p);
  }

 private:
  // No other block writes to this memory.
  __device__ __forceinline__ void clear() const {
    auto* const to = static_cast<uint4*>(p.cleared);
    for (int64 i = int64{blockIdx.x} * blockDim.x + threadIdx.x; i < p.cleared_bytes / 16;
         i += int64{gridDim.x} * blockDim.x)
      to[i] = uint4{0, 0, 0, 0};
  }
};

}  // namespace onepass::pingpong
