// The second part of the ping-pong kernel's epilogue: statistics, the norm and the chain after it.
#pragma once

#include "gemm/pingpong/exchange.cuh"
#include "gemm/pingpong/held.cuh"

namespace onepass::pingpong {

// Scale and shift of the thread's two rows, for held values.
struct Affine {
  float scale[2];
  float shift[2];
  uint32 exponent;  // HeldInt20::exponent
  // The same as pairs of f16, where the whole warp computes its outputs in f16 (Norm::fits_f16).
  bool in_f16;
  uint32 scales[2];
  uint32 shifts[2];
};

// Whether a held pair may become a pair of outputs by one instruction, with scale and shift rounded to f16.
// By way of f32 it takes five, and s19 1.4% longer.
template <class L>
constexpr bool norms_in_f16 = is_same<typename L::Output, f16> && !L::Numbers::has_after;

template <class L>
struct Norm {
  using After = typename L::Tail::After;
  using Format = typename Hold<L>::Format;

  const typename L::Parameters& p;
  Shared<L>& s;
  const Thread& thread;

  // Starts to copy the statistics of the warp's slabs, some time before they are needed.
  __device__ __forceinline__ void prefetch(int64 n) const {
    if (2 * thread.lane < Shared<L>::warp_slabs)
      Exchange<L>{p}.prefetch(n, first_slab() + 2 * static_cast<uint32>(thread.lane),
                              barrier::shared_address(&s.statistics[thread.warp][2 * thread.lane]));
  }

  // Waits for the statistics of a tile's sample.
  __device__ __forceinline__ Affine wait(uint32 tile, int64 n) const {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    const Exchange<L> exchange{p};
    Affine affine;
    if constexpr (L::is_f32) {
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(affine.exponent)
                   : "r"(barrier::shared_address(&s.exponent))
                   : "memory");
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool exists = L::has_row(thread.row(h));
      const int channel = exists ? thread.row(h) : 0;
      const uint32 slab = static_cast<uint32>(channel) / L::group_rows;
      const float2 all =
          exchange.wait(n, slab, s.statistics[thread.warp][(slab - first_slab()) % Shared<L>::warp_slabs]);
      // Rows beyond the output are not stored; the first slab's entry belongs to another warp.
      float2 held{0.0f, 0.0f};
      if (exists) held = s.held_scales[tile & 1u][thread.group][slab];
      const float4 of_channel = s.channels[channel];
      const float scale = of_channel.y * all.y;
      affine.scale[h] = scale * held.y;
      affine.shift[h] = fmaf(held.x - all.x, scale, of_channel.z);
      if constexpr (L::is_f32) affine.shift[h] = fmaf(-Format::origin, affine.scale[h], affine.shift[h]);
    }
    if constexpr (norms_in_f16<L>) {
      bool fits = true;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        fits = fits && fits_f16(affine.scale[h], affine.shift[h], s.channels[L::channel_of(thread.row(h))].y);
        affine.scales[h] = f16::pack(affine.scale[h], affine.scale[h]);
        affine.shifts[h] = f16::pack(affine.shift[h], affine.shift[h]);
      }
      affine.in_f16 = __all_sync(0xffffffffu, fits);
    }
    return affine;
  }

  // What the chain after the norm reads of the thread's row h.
  __device__ __forceinline__ ChannelValues<After, 1> channel_values(int64 n, int h) const {
    ChannelValues<After, 1> channel;
    channel.load(p, n, L::channel_of(thread.row(h)));
    return channel;
  }
  // The output of a held value in the thread's row h.
  static __device__ __forceinline__ float value(float held, const Affine& affine, int h,
                                                const ChannelValues<After, 1>& channel) {
    typename After::template Tensors<1> tensors;
    return After::value(fmaf(held, affine.scale[h], affine.shift[h]), channel.value[0], tensors, 0);
  }

 private:
  // Whether f16 holds scale and shift with all bits, and the shift's error is small beside that of held
  // values: these are normalised to about `weight`.
  static __device__ __forceinline__ bool fits_f16(float scale, float shift, float weight) {
    constexpr float least = 0x1p-14f, most = 0x1p+13f;
    const float of_scale = fabsf(scale), of_weight = fabsf(weight);
    return (of_scale >= least || of_scale == 0.0f) && of_scale <= most && of_weight >= least &&
           of_weight <= most && fabsf(shift) <= 2.0f * of_weight;
  }
  // The even slab that the warp's prefetched ones begin with.
  __device__ __forceinline__ uint32 first_slab() const {
    return static_cast<uint32>(thread.first_row()) / L::group_rows & ~1u;
  }
};

// What a thread stores of a tile: held values, and the norm that they wait for.
template <class L>
struct HeldTile {
  const typename L::Parameters& p;
  Shared<L>& s;
  const Thread& thread;
  const Norm<L> norm{p, s, thread};
  const Hold<L> hold{s, thread};
};

// Whether two neighbouring columns are always side by side in the output, or both outside of it.
template <class L>
constexpr bool pairs_fit = L::Numbers::box_x % 2 == 0 && L::Numbers::pitch % 2 == 0 &&
                           L::C::output_size(2) % 2 == 0 && L::C::stride(0) % 2 == 0 &&
                           L::C::stride(1) % 2 == 0 && L::C::stride(2) % 2 == 0 && L::C::stride(3) % 2 == 0;

// Values are stored in pieces: eight channels of a row of the box, or of 64 columns.
template <class L>
struct Pieces {
  static constexpr int pairs = L::Numbers::store_rows ? L::Numbers::pitch / 8 : 8;  // of a lane in a piece
  static constexpr int runs = (L::pairs + pairs - 1) / pairs;                       // pieces of a row
  static constexpr __device__ int pairs_of(int run) {
    return L::pairs - run * pairs < pairs ? L::pairs - run * pairs : pairs;
  }
};

}  // namespace onepass::pingpong
