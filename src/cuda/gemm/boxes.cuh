// The kernels of the row "gemm_boxes": a wide convolution as a matrix product of 16-bit operands whose x
// comes by tensor maps.
//
//   out[position][channel] = sum over taps and input channels of x[position + tap][c] w[channel][c][tap]
//
// A tile is a box of positions (rows of the product) by output channels. Copies of boxes (tensor maps) bring
// x: [position][channels of a chunk], with the box's halo, so that several taps are shifts within one window.
// Zeros outside x come from the copies. 16-bit tensors with channels last are read as they lie; of others the
// launch before makes a copy. It packs weights and builds the map too. A transposed convolution whose classes
// meet different elements has tiles of each class.
//
//   BoxesSteps  makes the copy, packs weights, builds the tensor map; f32: scales weights, judges samples;
//               merges what tiles leave for a norm or a mean
//   BoxesGemm   the product, and what follows it: the output, moments, sums, or f32 values for a tail
//   (gemm/boxes/product.cuh)
#pragma once

#include "gemm/boxes/copy.cuh"
#include "gemm/boxes/geometry.cuh"
#include "gemm/boxes/merge.cuh"
#include "gemm/packed/operands.cuh"

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
                   "l"(reinterpret_cast<uint64>(Numbers::copied ? p.packed_input : p.input) & ~uint64{15})
                   : "memory");
      asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 4;" ::"r"(a) : "memory");
      constexpr int copied = Numbers::copied_channels;
      dimension<0>(a, Numbers::copied ? copied : C::in_channels, Numbers::chunk_channels, 1);
      dimension<1>(a, C::input_size(2), Numbers::window_x, static_cast<int>(C::step(2)));
      dimension<2>(a, C::input_size(1), Numbers::window_y, static_cast<int>(C::step(1)));
      dimension<3>(a, C::input_size(0), Numbers::window_z, static_cast<int>(C::step(0)));
      dimension<4>(a, p.batch, Numbers::box_n, 1);
      if constexpr (Numbers::copied) {
        stride<0>(a, copied);
        stride<1>(a, copied * C::input_size(2));
        stride<2>(a, copied * C::input_size(2) * C::input_size(1));
        stride<3>(a, copied * C::input_size(2) * C::input_size(1) * C::input_size(0));
      } else {
        // A dimension of one element has no stride of its own.
        constexpr int64 any = (C::in_channels + 7) / 8 * 8;
        stride<0>(a, C::input_size(2) > 1 ? C::input_stride(4) : any);
        stride<1>(a, C::input_size(1) > 1 ? C::input_stride(3) : any);
        stride<2>(a, C::input_size(0) > 1 ? C::input_stride(2) : any);
        stride<3>(a, p.batch > 1 ? C::input_stride(0) : any);
      }
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

// All launches but the product are one kernel: several kernels take longer to compile. A launch that packs
// has a block for each piece of weights, then one for each item of x. Its first block also builds the map and
// clears marks and counters, but where weights are packed to be kept.
template <class C, class Tail, class Numbers>
struct BoxesSteps {
  using Parameters = BoxesStepParameters<Tail::parameters>;
  using Pieces = PackedGemmWeightPieces<C, Numbers, BoxPlaces<Numbers>>;
  using Team = gemm::PackTeam;
  using Copy = BoxesCopy<C, Tail, Numbers>;
  static_assert(Pieces::template bytes_of<Team>() <= Numbers::piece_bytes);
  static_assert(!Numbers::copied || Copy::shared_bytes <= Numbers::piece_bytes);
  struct alignas(128) Shared {
    unsigned char piece[Numbers::piece_bytes];
  };

  const Parameters& p;
  Shared& s;

  __device__ __forceinline__ void run() const {
    allow_kernel_after();
    wait_for_kernel_before();
    if (p.step == step_pack_again) {
      if constexpr (Numbers::guards) PackedGemmScales<C, Numbers, Pieces, Parameters>{p}.run();
    } else if (p.step == step_judge) {
      if constexpr (Numbers::guards) PackedGemmJudge<Tail, Numbers, Parameters>{p}.run();
    } else if (p.step == step_merge) {
      if constexpr (Numbers::twice) BoxesMerge<C, Tail, Numbers>::run(p);
    } else if (p.step == step_means) {
      if constexpr (Numbers::stored == BoxesStored::sums) BoxesMeans<C, Tail, Numbers>::run(p);
    } else {
      pack();
    }
  }

 private:
  __device__ __forceinline__ void pack() const {
    if (blockIdx.x == 0 && p.step != step_pack_weights) {
      clear();
      if (threadIdx.x < 32) BoxMap<C, Numbers>::build(p);
    }
    const int64 item = static_cast<int64>(blockIdx.x) + (p.step == step_pack_input ? Pieces::items : 0);
    if (item < Pieces::items) {
      Pieces::run(p, static_cast<int>(item), s.piece, Team{static_cast<int>(threadIdx.x)});
    } else if constexpr (Numbers::copied) {
      Copy::run(p, item - Pieces::items, reinterpret_cast<uint32*>(s.piece));
    }
  }
  __device__ __forceinline__ void clear() const {
    for (int64 i = threadIdx.x; i < p.units; i += Team::threads) p.arrived[i] = 0;
    if constexpr (!Numbers::guards) {
      // Else a judge of samples does it, whose marks are zeros before.
      for (int64 i = threadIdx.x; i < p.batch; i += Team::threads) p.only[i] = 0;
      for (int64 i = threadIdx.x; i < 4 * p.batch + 4; i += Team::threads) p.control[i] = 0;
    }
  }
};

}  // namespace onepass
