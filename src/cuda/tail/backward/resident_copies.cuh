// How x and dy of tail_backward_resident.cuh arrive: by bulk copies into the warp's part of shared memory, dy
// in f32 in registers.
#pragma once

#include "tail/backward/resident_layout.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResidentCopies : TailBackwardResidentLayout<Tail, Numbers> {
  using Base = TailBackwardResidentLayout<Tail, Numbers>;
  using Base::chunk;
  using Base::chunks;
  using Base::doubled;
  using Base::even_piece;
  using Base::gradient_bytes;
  using Base::holds;
  using Base::kept_piece;
  using Base::lane;
  using Base::odd_piece;
  using Base::p;
  using Base::shared;
  using Base::single;
  using Base::single_piece;
  using Base::stages;
  using Base::vector_bytes;
  using Base::vectors;
  using Base::warp;
  using Base::width;
  using typename Base::Held;
  using typename Base::Input;
  using typename Base::OutputGradient;
  using typename Base::Part;

  // Sends for `most` vectors of x from the warp's vector `first` on, and for dy where it is staged; by one
  // lane.
  template <bool plain, bool aligned = plain>
  __device__ __forceinline__ void ask(const Part& part, int first, int most, int place,
                                      uint64* arrived) const {
#if __CUDA_ARCH__ >= 900
    if (lane() != 0) return;
    const int left = part.left - first * 32;
    const int own = plain || left > most * 32 ? most * 32 : left < 0 ? 0 : left;
    const auto bytes = static_cast<uint32>(own * vector_bytes);
    const bool copies_gradient = stages && (aligned || p.is_aligned(aligned_output_gradient));
    const auto more = static_cast<uint32>(copies_gradient ? own * gradient_bytes : 0);
    barrier::expect(arrived, bytes + more);  // nothing to come is waited for all the same
    if (own > 0) {
      const int64 index = part.index + first * 32 * width;
      barrier::copy(shared.stage[warp()] + place * 32 * vector_bytes,
                    static_cast<const char*>(p.input) + index * Input::bytes, bytes, arrived);
      if (copies_gradient) {
        barrier::copy(shared.gradient[warp()] + place * 32 * gradient_bytes,
                      static_cast<const char*>(p.output_gradient) + index * OutputGradient::bytes, more,
                      arrived);
      }
    }
#endif
  }
  template <bool plain>
  __device__ __forceinline__ void ask_chunk(const Part& part, int c) const {
    const int most = c < chunks - 1 ? chunk : vectors - (chunks - 1) * chunk;
    ask<plain>(part, c * chunk, most, c * chunk, &shared.arrived[warp()][c]);
  }
  static __device__ __forceinline__ int first_of(int piece) {
    return piece == single_piece ? doubled : piece == kept_piece ? doubled + single : 0;
  }
  // The end of a piece of a warp that has `mine` vectors.
  static __device__ __forceinline__ int end_of(int piece, int mine) {
    const int end = piece == single_piece ? doubled + single : piece == kept_piece ? vectors : doubled;
    return mine < end ? mine : end;
  }
  static __device__ __forceinline__ int place_of(int piece) {
    return piece == even_piece     ? 0
           : piece == odd_piece    ? doubled
           : piece == single_piece ? 2 * doubled
                                   : 2 * doubled + single;
  }
  template <bool aligned>
  __device__ __forceinline__ void ask_piece(const Part& part, int piece, int mine) const {
    if constexpr (stages && !aligned) {
      // What bulk copies cannot take: each lane puts what it reads again.
      if (!p.is_aligned(aligned_output_gradient)) {
        const int end = end_of(piece, mine);
#pragma unroll 1
        for (int i = first_of(piece); i < end; ++i) {
          if (!part.template has<false>(i)) continue;
          Packed<OutputGradient, width> dy;
          dy.load(p.output_gradient, part.index + i * 32 * width, false);
          dy.store_shared(gradient_at(piece, i));
        }
      }
    }
#if __CUDA_ARCH__ >= 900
    barrier::release_to_copies();
#endif
    __syncwarp();
    const int most = end_of(piece, mine) - first_of(piece);
    ask<false, aligned>(part, first_of(piece), most > 0 ? most : 0, place_of(piece),
                        &shared.arrived[warp()][piece]);
  }
  __device__ __forceinline__ const unsigned char* stage_at(int piece, int i) const {
    return shared.stage[warp()] + ((place_of(piece) + i - first_of(piece)) * 32 + lane()) * vector_bytes;
  }
  __device__ __forceinline__ unsigned char* gradient_at(int piece, int i) const {
    return shared.gradient[warp()] + ((place_of(piece) + i - first_of(piece)) * 32 + lane()) * gradient_bytes;
  }

  template <bool plain, class F>
  static __device__ __forceinline__ void for_each_vector(const Part& part, int c, F&& f) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      if (i >= c * chunk && i < (c + 1) * chunk && part.template has<plain>(i)) f(i);
    }
  }

  template <bool plain>
  __device__ __forceinline__ void load_gradient(const Part& part, int c, Held& held) const {
    if constexpr (holds) {
      for_each_vector<plain>(part, c, [&](int i) {
        held[i].template load<true>(p.output_gradient, part.index + i * 32 * width,
                                    plain || p.is_aligned(aligned_output_gradient));
      });
    }
  }
};

}  // namespace onepass
