// The schedule "overlapped" of tail_staged: what of a slab a warp has, and how it arrives.
#pragma once

#include "tail/staged/means.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct StagedOverlapped {
  struct Pieces;      // the pieces of a warp's part of a slab in shared memory
  struct Statistics;  // staged/overlapped_moments.cuh
  struct Kernel;      // staged/overlapped.cuh

  using S = StagedSizes<Tail, Numbers>;
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  // Distances from the mean of the warp's first vectors, the warp's pivot.
  using Sums = PivotSums<S::accumulators>;

  // Vectors of a thread, and of each piece.
  static constexpr int doubled = Numbers::doubled;
  static constexpr int single = Numbers::single;
  static constexpr int raw = doubled + single;
  static constexpr int kept = S::vectors - raw;
  static_assert(doubled > 0 && kept > 1);
  // The last vectors of a thread, all of them kept, that some lanes may not have.
  static constexpr int uncertain = 2;
  static constexpr int at_once = Numbers::at_once;                // in the loops over what is not kept
  static constexpr int row_bytes = 32 * S::width * Input::bytes;  // of a warp's vectors beside each other
  // Results of the before-chain of bf16, less the warp's pivot, wait as f16: that adds a quarter of the
  // error of the output's rounding. Where they overflow f16, x is read again (see `fits_f16`).
  static constexpr bool holds_f16 = Numbers::holds_f16;
  static_assert(!holds_f16 || Input::bytes == f16::bytes);

  // Where a warp's pieces lie: the doubled one of even and of odd rounds, the single one, the kept one.
  enum Piece { even_piece, odd_piece, single_piece, kept_piece, all_pieces };
  static constexpr int first_of(int piece) { return piece < 2 ? 0 : piece == single_piece ? doubled : raw; }
  static constexpr int count_of(int piece) {
    return piece < 2 ? doubled : piece == single_piece ? single : kept;
  }
  static constexpr int offset_of(int piece) {
    return (piece == even_piece     ? 0
            : piece == odd_piece    ? doubled
            : piece == single_piece ? 2 * doubled
                                    : 2 * doubled + single) *
           row_bytes;
  }

  struct Shared {
    alignas(128) unsigned char stage[S::warps][(S::vectors + doubled) * row_bytes];
    uint64 arrived[S::warps][all_pieces];
    float4 of_warps[2][S::warps];  // by parity of the round: elements, mean, M2
    float4 of_blocks[2][S::blocks];
    uint64 warps_given[2];
    uint64 received[2];
    uint32 warps_counted;  // of all rounds: the last warp of each sends the block's moments
  };

  // How a slab is spread over warps: the same for every slab. Only the last warps' counts differ.
  static constexpr __device__ __forceinline__ typename S::Spread spread() {
    return S::Spread::of(S::slab_elements / S::width);
  }
  // The first vector of a warp of the cluster.
  static __device__ __forceinline__ int first_vector(int warp) {
    constexpr typename S::Spread all = spread();
    return all.first_vector(warp);
  }

  // A mean's runs: the pieces, or all of them as one where they lie in few rows.
  struct PieceRuns {
    static constexpr int count = S::few_rows ? 1 : 3;
    static constexpr __device__ __forceinline__ int first(int run) {
      return S::few_rows || run == 0 ? 0 : run == 1 ? doubled : raw;
    }
    static constexpr __device__ __forceinline__ int lines(int run) {
      return S::few_rows ? S::vectors : run == 0 ? doubled : run == 1 ? single : kept;
    }
  };
  using Means = StagedMeans<Tail, Numbers, PieceRuns>;
  static constexpr int run_of(int piece) { return piece < 2 ? 0 : piece == single_piece ? 1 : 2; }

  // The warp's part of a slab.
  struct Part {
    int64 begin;   // the slab's first element
    int head;      // elements before its first vector
    int position;  // of the warp's first vector in the slab
    int count;     // vectors of the warp

    __device__ __forceinline__ int line_of(int i) const { return position + i * S::line; }
    __device__ __forceinline__ int position_of(int i) const {
      return line_of(i) + static_cast<int>(threadIdx.x % 32) * S::width;
    }
    // One base for all vectors: from `position_of` it spills.
    __device__ __forceinline__ int64 index_of(int i) const {
      return begin + position + (i * 32 + static_cast<int>(threadIdx.x % 32)) * S::width;
    }
    // The position after the warp's vectors, those before vector `i` of a lane alone.
    __device__ __forceinline__ int end_of(int i) const {
      return position + (i * 32 < count ? i * 32 : count) * S::width;
    }
    // All vectors but the uncertain ones are there in every lane.
    __device__ __forceinline__ bool full() const { return count >= (S::vectors - uncertain) * 32; }
    __device__ __forceinline__ bool has(int i) const {
      return i * 32 + static_cast<int>(threadIdx.x % 32) < count;
    }
  };
};

template <class Tail, class Numbers>
struct StagedOverlapped<Tail, Numbers>::Pieces {
  const Parameters& p;
  Shared& shared;
  int block;  // of the cluster

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

  __device__ __forceinline__ Part part_of(int slab) const {
    Part part;
    part.begin = static_cast<int64>(slab) * S::slab_elements;
    const int head = static_cast<int>(-(part.begin + p.phase) & (S::width - 1));
    part.head = head < S::slab_elements ? head : S::slab_elements;
    const int all = (S::slab_elements - part.head) / S::width;
    const int cluster_warp = block * S::warps + warp();
    const int first = first_vector(cluster_warp);
    const int end = first_vector(cluster_warp + 1);
    part.position = part.head + first * S::width;
    part.count = (end < all ? end : all) - (first < all ? first : all);
    return part;
  }

  // The element outside of vectors that a thread has; -1 where it has none.
  __device__ __forceinline__ int edge_of(const Part& part) const {
    const int all = (S::slab_elements - part.head) / S::width;
    const int thread = threadIdx.x;
    if (block != 0 || thread >= S::slab_elements - all * S::width) return -1;
    return thread < part.head ? thread : thread + all * S::width;
  }
  // Whether the warp has elements outside of vectors.
  __device__ __forceinline__ bool has_edges(const Part& part) const {
    return block == 0 && warp() == 0 && (part.head > 0 || (S::slab_elements - part.head) % S::width > 0);
  }
  __device__ __forceinline__ int elements_of(const Part& part) const {
    const int all = (S::slab_elements - part.head) / S::width;
    return part.count * S::width + (block == 0 && warp() == 0 ? S::slab_elements - all * S::width : 0);
  }

  // Requests a piece of a slab's part; by one lane.
  __device__ __forceinline__ void request(const Part& part, int piece) const {
#if __CUDA_ARCH__ >= 900
    if (lane() != 0) return;
    const int left = part.count - first_of(piece) * 32;
    const int most = count_of(piece) * 32;
    const int own = left < 0 ? 0 : left < most ? left : most;
    const auto bytes = static_cast<uint32>(own * S::width * Input::bytes);
    uint64* arrived = &shared.arrived[warp()][piece];
    barrier::expect(arrived, bytes);  // a phase of 0 bytes is waited for too
    if (own > 0) {
      barrier::copy(shared.stage[warp()] + offset_of(piece),
                    static_cast<const char*>(p.input) + part.index_of(first_of(piece)) * Input::bytes, bytes,
                    arrived);
    }
#endif
  }
  // The same where the warp has read before.
  __device__ __forceinline__ void request_again(const Part& part, int piece) const {
#if __CUDA_ARCH__ >= 900
    // With a barrier of the warp alone loads may still be in flight when the copy begins.
    barrier::release_to_copies();
#endif
    __syncwarp();
    request(part, piece);
  }
  __device__ __forceinline__ void wait(int piece, uint32 phase) const {
#if __CUDA_ARCH__ >= 900
    barrier::wait(&shared.arrived[warp()][piece], phase);
#endif
  }
  // The lane's vector i of a piece.
  __device__ __forceinline__ unsigned char* vector_of(int piece, int i) const {
    return shared.stage[warp()] + offset_of(piece) + (i - first_of(piece)) * row_bytes +
           lane() * S::width * Input::bytes;
  }
};

}  // namespace onepass
