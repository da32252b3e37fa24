// The schedule "ring" of tail_staged: what of a slab a warp and a thread have.
#pragma once

#include "tail/staged/means.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct RingShares {
  using S = StagedSizes<Tail, Numbers>;

  // Where a slab's vectors lie.
  struct Range {
    int64 begin;  // the slab's first element
    int head;     // elements before its first vector
    int count;    // vectors
    int edges;    // elements outside of vectors
    typename S::Spread spread;

    // The first vector of a warp of the cluster.
    __device__ __forceinline__ int first(int warp) const {
      const int vector = spread.first_vector(warp);
      return vector < count ? vector : count;
    }
  };

  template <class Parameters>
  static __device__ __forceinline__ Range range_of(const Parameters& p, int slab) {
    Range range;
    range.begin = static_cast<int64>(slab) * S::slab_elements;
    const int head = static_cast<int>(-(range.begin + p.phase) & (S::width - 1));
    range.head = head < S::slab_elements ? head : S::slab_elements;
    range.count = (S::slab_elements - range.head) / S::width;
    range.edges = S::slab_elements - range.count * S::width;
    range.spread = S::Spread::of(range.count);
    return range;
  }

  // What of a slab this thread keeps.
  struct Share {
    int warp;      // of the cluster
    int begin;     // position of the warp's first element in the slab
    int end;       // of the first one that is the next warp's
    int position;  // of the thread's first vector
    int mine;      // vectors of the thread
    int elements;  // of the warp; the first one has the edges
    bool full;     // all vectors but the last are there in every lane

    __device__ __forceinline__ Share(const Range& range, int block) {
      warp = block * S::warps + static_cast<int>(threadIdx.x / 32);
      const int lane = threadIdx.x % 32;
      const int first = range.first(warp);
      const int count = range.first(warp + 1) - first;
      begin = range.head + first * S::width;
      end = begin + count * S::width;
      position = begin + lane * S::width;
      mine = (count - lane + 31) / 32;
      elements = count * S::width + (warp == 0 ? range.edges : 0);
      full = count >= (S::vectors - 1) * 32;
    }

    __device__ __forceinline__ int position_of(int i) const { return position + i * S::line; }
    __device__ __forceinline__ int line_of(int i) const { return begin + i * S::line; }
    __device__ __forceinline__ int end_of(int c) const {
      const int chunk_end = begin + (c + 1) * Numbers::chunk * S::line;
      return chunk_end < end ? chunk_end : end;
    }
  };
};

}  // namespace onepass
