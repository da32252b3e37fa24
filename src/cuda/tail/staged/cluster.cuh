// What both schedules of tail_staged share: sizes, and the exchange of moments within a cluster.
#pragma once

#include "device/barrier.cuh"
#include "tail/slab.cuh"

namespace onepass {

// Sizes of a slab and of the cluster that holds it.
template <class Tail, class Numbers>
struct StagedSizes {
  static constexpr int width = Numbers::width;
  static constexpr int threads = Numbers::threads;
  static constexpr int vectors = Numbers::vectors;  // of a thread
  static constexpr int blocks = Numbers::blocks;    // of the cluster
  // More blocks than a cluster has, which exchange their moments through memory. They are called one too.
  static constexpr bool by_memory = Numbers::by_memory;
  static constexpr int warps = threads / 32;  // of a block
  static constexpr int all_warps = warps * blocks;
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int slab_elements = static_cast<int>(Tail::group_channels) * spatial;
  static constexpr int groups = Tail::channels / Tail::group_channels;
  static constexpr int line = 32 * width;  // elements of a warp's vectors beside each other
  // A warp's part of a slab lies in two rows at most.
  static constexpr bool few_rows = vectors * line <= spatial;
  static constexpr bool before_by_row = Tail::Before::channel_operands > 0;
  static constexpr bool after_by_row =
      Tail::has_affine || Tail::After::channel_operands > 0 || Tail::has_mean;
  static constexpr int accumulators = 4;  // of a thread: additions that do not wait for each other

  // How `vectors` vectors are spread over the cluster's warps, by lines of 32.
  struct Spread {
    int each;  // lines of every warp, and one more of the first `more` warps
    int more;

    static constexpr __device__ __forceinline__ Spread of(int vectors) {
      return {(vectors + 31) / 32 / all_warps, (vectors + 31) / 32 % all_warps};
    }
    constexpr __device__ __forceinline__ int first_vector(int warp) const {
      return (warp * each + (warp < more ? warp : more)) * 32;
    }
    __device__ __forceinline__ int warp_of(int line) const {
      const int of_longer = more * (each + 1);
      return line < of_longer ? line / (each + 1) : more + (line - of_longer) / each;
    }
  };
};

// The barriers of a schedule's Shared that count the moments of its warps and of the cluster's blocks, two by
// parity of the round. Two buffers suffice: a warp gives its moments of the next round when it has read those
// of this one, and of the round after that when all have given theirs of the next. By one thread.
template <int warps, class Shared>
__device__ __forceinline__ void initialise_exchange(Shared& shared) {
#if __CUDA_ARCH__ >= 900
  for (int parity = 0; parity < 2; ++parity) {
    barrier::initialise(&shared.warps_given[parity], warps);
    barrier::initialise(&shared.received[parity]);
  }
#endif
}

// All threads of the cluster are here, and see what the others wrote. Nothing is sent to a block before.
template <class S>
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (S::blocks > 1 && !S::by_memory) {
    barrier::cluster_sync();
  } else {
    __syncthreads();
  }
#endif
}
// No block leaves while others may write to it.
template <class S>
__device__ __forceinline__ void leave_cluster() {
#if __CUDA_ARCH__ >= 900
  if constexpr (S::blocks > 1 && !S::by_memory) barrier::cluster_sync();
#endif
}

// Mean (as its distance `moved` from one of the parts', `from`) and M2 of `count` parts together, the same in
// every lane. Returns the number of their elements.
template <int count>
__device__ __forceinline__ float merge_parts(const float4* parts, float& from, float& moved, float& m2) {
  static_assert((count & (count - 1)) == 0 && count <= 32);
  const float4 own = parts[threadIdx.x % count];
  const float elements = lanes_sum<count>(own.x);
  lanes_moments<count>(Moments{own.x, own.y, own.z}, elements > 0.0f ? 1.0f / elements : 0.0f, from, moved,
                       m2);
  return elements;
}

}  // namespace onepass
