// tail_backward_resident: how x and dy arrive. Bulk copies bring them to the warp's part of shared memory; dy
// in f32 is loaded into registers.
#pragma once

#include "tail/backward/resident_layout.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResidentCopies {
  using L = TailBackwardResidentLayout<Tail, Numbers>;
  using Held = typename L::Held;
  using Part = typename L::Part;

  // Requests `most` vectors of x from the warp's vector `first` on, and dy where it is staged; by one lane.
  template <bool plain, bool aligned = plain>
  static __device__ __forceinline__ void request(const L& block, const Part& part, int first, int most,
                                                 int place, uint64* arrived) {
#if __CUDA_ARCH__ >= 900
    if (block.lane() != 0) return;
    const int left = part.left - first * 32;
    const int own = plain || left > most * 32 ? most * 32 : left < 0 ? 0 : left;
    const auto bytes = static_cast<uint32>(own * L::vector_bytes);
    const bool copies_gradient = L::stages && (aligned || is_aligned(block.p, aligned_output_gradient));
    const auto more = static_cast<uint32>(copies_gradient ? own * L::gradient_bytes : 0);
    barrier::expect(arrived, bytes + more);  // a phase of 0 bytes is waited for too
    if (own > 0) {
      const int64 index = part.index + first * 32 * Numbers::width;
      barrier::copy(block.shared.stage[block.warp()] + place * 32 * L::vector_bytes,
                    static_cast<const char*>(block.p.input) + index * Tail::Input::bytes, bytes, arrived);
      if (copies_gradient) {
        barrier::copy(block.shared.gradient[block.warp()] + place * 32 * L::gradient_bytes,
                      static_cast<const char*>(block.p.output_gradient) + index * Tail::OutputGradient::bytes,
                      more, arrived);
      }
    }
#endif
  }
  template <bool plain>
  static __device__ __forceinline__ void request_chunk(const L& block, const Part& part, int c) {
    const int most = c < L::chunks - 1 ? Numbers::chunk : Numbers::vectors - (L::chunks - 1) * Numbers::chunk;
    request<plain>(block, part, c * Numbers::chunk, most, c * Numbers::chunk,
                   &block.shared.arrived[block.warp()][c]);
  }
  static __device__ __forceinline__ int first_of(int piece) {
    return piece == L::single_piece ? L::doubled : piece == L::kept_piece ? L::doubled + L::single : 0;
  }
  // The end of a piece of a warp that has `mine` vectors.
  static __device__ __forceinline__ int end_of(int piece, int mine) {
    const int end = piece == L::single_piece ? L::doubled + L::single
                    : piece == L::kept_piece ? Numbers::vectors
                                             : L::doubled;
    return mine < end ? mine : end;
  }
  static __device__ __forceinline__ int place_of(int piece) {
    return piece == L::even_piece     ? 0
           : piece == L::odd_piece    ? L::doubled
           : piece == L::single_piece ? 2 * L::doubled
                                      : 2 * L::doubled + L::single;
  }
  template <bool aligned>
  static __device__ __forceinline__ void request_piece(const L& block, const Part& part, int piece,
                                                       int mine) {
    if constexpr (L::stages && !aligned) {
      // Bulk copies need 16 bytes of alignment: each lane copies the vectors it reads again.
      if (!is_aligned(block.p, aligned_output_gradient)) {
        const int end = end_of(piece, mine);
#pragma unroll 1
        for (int i = first_of(piece); i < end; ++i) {
          if (!part.template has<false>(i)) continue;
          Packed<typename Tail::OutputGradient, Numbers::width> dy;
          dy.load(block.p.output_gradient, part.index + i * 32 * Numbers::width, false);
          dy.store_shared(gradient_at(block, piece, i));
        }
      }
    }
#if __CUDA_ARCH__ >= 900
    barrier::release_to_copies();
#endif
    __syncwarp();
    const int most = end_of(piece, mine) - first_of(piece);
    request<false, aligned>(block, part, first_of(piece), most > 0 ? most : 0, place_of(piece),
                            &block.shared.arrived[block.warp()][piece]);
  }
  static __device__ __forceinline__ const unsigned char* stage_at(const L& block, int piece, int i) {
    return block.shared.stage[block.warp()] +
           ((place_of(piece) + i - first_of(piece)) * 32 + block.lane()) * L::vector_bytes;
  }
  static __device__ __forceinline__ unsigned char* gradient_at(const L& block, int piece, int i) {
    return block.shared.gradient[block.warp()] +
           ((place_of(piece) + i - first_of(piece)) * 32 + block.lane()) * L::gradient_bytes;
  }

  template <bool plain, class F>
  static __device__ __forceinline__ void for_each_vector(const Part& part, int c, F&& f) {
#pragma unroll
    for (int i = 0; i < Numbers::vectors; ++i) {
      if (i >= c * Numbers::chunk && i < (c + 1) * Numbers::chunk && part.template has<plain>(i)) f(i);
    }
  }

  template <bool plain>
  static __device__ __forceinline__ void load_gradient(const L& block, const Part& part, int c, Held& held) {
    if constexpr (L::holds) {
      for_each_vector<plain>(part, c, [&](int i) {
        held[i].template load<true>(block.p.output_gradient, part.index + i * 32 * Numbers::width,
                                    plain || is_aligned(block.p, aligned_output_gradient));
      });
    }
  }
};

}  // namespace onepass
