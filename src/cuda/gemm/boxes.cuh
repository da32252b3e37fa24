// The kernels of the row "gemm_boxes": a wide convolution of 16-bit tensors with channels last as a matrix
// product that reads x as it lies.
//
//   out[position][channel] = sum over taps and input channels of x[position + tap][c] w[channel][c][tap]
//
// A tile is a box of positions (rows of the product) by output channels. Copies of boxes (tensor maps) bring
// x: [position][channels of a chunk], with the box's halo, so that several taps are shifts within one window.
// Zeros outside x come from the copies. Weights are packed by the launch before, which builds the map too.
//
//   BoxesPack  packs weights, builds the tensor map
//   BoxesGemm  the product, and what follows it: the output, or f32 values for a tail
//   (gemm/boxes/product.cuh)
#pragma once

#include "gemm/boxes/geometry.cuh"
#include "gemm/packed/weights.cuh"

namespace onepass {

// Dimensions of the map, innermost first: [channel][x][y][z][sample].
template <class C, class Numbers>
struct BoxMap {
  struct alignas(128) Map {
    uint32 word[32];
  };

  // By one warp. Copies need x on 16 bytes; where it is not, all samples are marked to be done again.
  template <class Parameters>
  static __device__ __forceinline__ void build(const Parameters& p) {
#if __CUDA_ARCH__ >= 900
    __shared__ Map map;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    map.word[lane] = 0;
    __syncwarp();
    if (lane == 0) {
      const uint32 a = barrier::shared_address(&map);
      asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(a),
                   "l"(reinterpret_cast<uint64>(p.input) & ~uint64{15})
                   : "memory");
      asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 4;" ::"r"(a) : "memory");
      dimension<0>(a, C::in_channels, Numbers::chunk_channels, 1);
      dimension<1>(a, C::input_size(2), Numbers::window_x, static_cast<int>(C::step(2)));
      dimension<2>(a, C::input_size(1), Numbers::window_y, static_cast<int>(C::step(1)));
      dimension<3>(a, C::input_size(0), Numbers::window_z, static_cast<int>(C::step(0)));
      dimension<4>(a, p.batch, Numbers::box_n, 1);
      // A dimension of one element has no stride of its own.
      constexpr int64 any = (C::in_channels + 7) / 8 * 8;
      stride<0>(a, C::input_size(2) > 1 ? C::input_stride(4) : any);
      stride<1>(a, C::input_size(1) > 1 ? C::input_stride(3) : any);
      stride<2>(a, C::input_size(0) > 1 ? C::input_stride(2) : any);
      stride<3>(a, p.batch > 1 ? C::input_stride(0) : any);
      // Any type of this width will do: all have the same zeros.
      asm volatile("tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], 1;" ::"r"(a) : "memory");
      asm volatile("tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;" ::"r"(a)
                   : "memory");
      asm volatile("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], %1;" ::"r"(a),
                   "n"(Numbers::swizzle)
                   : "memory");
      asm volatile("tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;" ::"r"(a) : "memory");
    }
    __syncwarp();
    static_cast<uint32*>(p.map)[lane] = map.word[lane];
    __syncwarp();
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
#endif
  }

 private:
#if __CUDA_ARCH__ >= 900
  // A box of so many positions, `step` apart.
  template <int d>
  static __device__ __forceinline__ void dimension(uint32 a, int64 size, int box, int step) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "r"(static_cast<uint32>(size))
                 : "memory");
    asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "r"((box - 1) * step + 1)
                 : "memory");
    asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "r"(step)
                 : "memory");
  }
  template <int d>
  static __device__ __forceinline__ void stride(uint32 a, int64 elements) {
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "l"(elements * 2)
                 : "memory");
  }
#endif
};

// A block for each piece of weights. The first one also builds the map and clears the marks of samples: alone
// where weights are kept packed, and not where they are packed to be kept.
template <class C, class Tail, class Numbers>
struct BoxesPack {
  using Parameters = BoxesPackParameters<Tail::parameters>;
  using Pieces = PackedGemmWeightPieces<C, Numbers, BoxPlaces<Numbers>>;
  static constexpr int threads = 256;
  struct Team {
    static constexpr int threads = 256;
    int thread;
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    __device__ __forceinline__ int any(bool one) const { return __syncthreads_or(one); }
  };
  static_assert(Pieces::template bytes_of<Team>() <= Numbers::piece_bytes);
  struct alignas(128) Shared {
    unsigned char piece[Numbers::piece_bytes];
  };

  const Parameters& p;
  Shared& s;

  __device__ __forceinline__ void run() const {
    allow_kernel_after();
    wait_for_kernel_before();
    const int item = static_cast<int>(blockIdx.x);
    if (item == 0 && p.map != nullptr) {
      for (int64 i = threadIdx.x; i < p.batch; i += threads) p.only[i] = 0;
      for (int64 i = threadIdx.x; i < 4 * p.batch + 4; i += threads) p.control[i] = 0;
      for (int64 i = threadIdx.x; i < p.units; i += threads) p.arrived[i] = 0;
      if (threadIdx.x < 32) BoxMap<C, Numbers>::build(p);
    }
    if (p.packed_weights != nullptr) {
      Pieces::run(p, item / Pieces::chunks, item % Pieces::chunks, s.piece,
                  Team{static_cast<int>(threadIdx.x)});
    }
  }
};

}  // namespace onepass
