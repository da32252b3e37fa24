// Where the threads of a small slab of a planar tensor find their elements: several rows each, in registers.
#pragma once

#include "device/types.cuh"

namespace onepass {

// `slab_threads` threads have a slab, `team` of them a row; a thread has `rows_each` rows, `vectors` of each.
// `Edges`: rows have elements beside their vectors.
template <class Tail, class Numbers, bool Edges>
struct RowPlace {
  static constexpr int edges =
      Edges ? (2 * (Numbers::width - 1) + Numbers::team - 1) / Numbers::team : 0;  // of a thread in a row
  static constexpr int teams = Numbers::slab_threads / Numbers::team;              // of a slab
  static constexpr int rows = Tail::group_channels;
  static constexpr int spatial = static_cast<int>(Tail::spatial);

  int64 begin;
  int head;   // elements before the first vector
  int count;  // vectors
  bool exists;

  static __device__ __forceinline__ int lane() { return threadIdx.x % Numbers::team; }
  // The thread's `r`-th row in its slab.
  static __device__ __forceinline__ int row_of(int r) {
    return r * teams + static_cast<int>(threadIdx.x % Numbers::slab_threads / Numbers::team);
  }

  // Of the slab whose first element is `first`.
  template <class Parameters>
  __device__ __forceinline__ RowPlace(const Parameters& p, int64 first, int r, bool in_range)
      : begin(first + row_of(r) * spatial),
        head(0),
        exists(in_range && (rows % teams == 0 || row_of(r) < rows)) {
    if constexpr (Edges) {
      const int before = static_cast<int>(-(begin + p.phase) & (Numbers::width - 1));
      head = before < spatial ? before : spatial;
    }
    count = (spatial - head) / Numbers::width;
  }

  __device__ __forceinline__ bool has(int i) const {
    // Only the last vector of a thread may be missing.
    return exists && (i < Numbers::vectors - 1 || (!Edges && spatial / Numbers::width % Numbers::team == 0) ||
                      i * Numbers::team + lane() < count);
  }
  __device__ __forceinline__ int64 index(int i) const {
    return begin + head + (i * Numbers::team + lane()) * Numbers::width;
  }
  __device__ __forceinline__ bool has_edge(int e) const {
    return exists && e * Numbers::team + lane() < spatial - count * Numbers::width;
  }
  __device__ __forceinline__ int64 edge(int e) const {
    const int at = e * Numbers::team + lane();
    return begin + (at < head ? at : at + count * Numbers::width);
  }
};

// What waits between the parts is 16-bit words, not the floats that the first part made of them: a bit that
// the compiler does not know keeps it from holding those, which spills hundreds of bytes.
template <class Parameters, class Words>
__device__ __forceinline__ void forget_floats(const Parameters& p, Words& words) {
  const auto zero = static_cast<uint32>(p.batch >> 32);
#pragma unroll
  for (uint32& word : words.word) word ^= zero;
}

}  // namespace onepass
