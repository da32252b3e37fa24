// Planes of dh on their way from the ring buffer in memory to shared memory, for pass 3.
#pragma once

#include "device/barrier.cuh"
#include "thin/backward/backward.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Planes {
  const Thread thread;

  // The rows of a plane are contiguous: one bulk copy loads them.
#if __CUDA_ARCH__ >= 900
  static constexpr bool copies_whole =
      Numbers::back_columns == C::output_size(2) && Numbers::back_pitch == rows;
#else
  static constexpr bool copies_whole = false;
#endif

  __device__ __forceinline__ void load(const Operand* sample, int plane, int buffer, int first_row,
                                       int first_column) const {
    constexpr int in_vector = 16 / sizeof(Operand);
    constexpr int vectors = Numbers::back_columns * rows / in_vector;
    const int begin = first_row > 0 ? first_row : 0;
    int end = first_row + Numbers::back_window(1);
    end = end < static_cast<int>(C::output_size(1)) ? end : static_cast<int>(C::output_size(1));
    const Operand* from = sample + plane * ring_stride(0) + begin * ring_stride(1) + first_column * rows;
    Operand* to = thread.s.back_window.ring[buffer] +
                  (begin - first_row) * (Numbers::back_columns * Numbers::back_pitch);
    const int all = (end - begin) * vectors;
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) {
      if (threadIdx.x == 0) {
        barrier::acquire_for_copies();
        barrier::expect(thread.s.arrived + buffer, all * 16);
        barrier::copy(to, from, all * 16, thread.s.arrived + buffer);
      }
      return;
    }
#endif
#pragma unroll 4
    for (int i = threadIdx.x; i < all; i += threads) {
      const int row = i / vectors;
      const int column = i % vectors / (rows / in_vector);
      const int o = i % (rows / in_vector) * in_vector;
      if (first_column + column >= static_cast<int>(C::output_size(2))) continue;
      const Operand* source = from + row * ring_stride(1) + column * rows + o;
      Operand* target = to + (row * Numbers::back_columns + column) * Numbers::back_pitch + o;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       static_cast<uint32>(__cvta_generic_to_shared(target))),
                   "l"(source)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Planes are counted over all tiles of a block: the count of a plane gives its buffer and the barriers'
  // parity.
  static __device__ __forceinline__ int buffer_of(uint32 turn) {
    return static_cast<int>(turn % static_cast<uint32>(Numbers::back_buffers));
  }
  static __device__ __forceinline__ uint32 phase_of(uint32 turn) {
    return turn / static_cast<uint32>(Numbers::back_buffers) & 1u;
  }

  // Until the plane is visible to this thread. Where threads copy: until its own part is.
  __device__ __forceinline__ void wait(uint32 turn) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) {
      barrier::wait(thread.s.arrived + buffer_of(turn), phase_of(turn));
      return;
    }
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  // The first thread loads plane `turn` when all warps have released its buffer.
  __device__ __forceinline__ void replace(const Operand* sample, int plane, uint32 turn, int first_row,
                                          int first_column) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x != 0) return;
    const uint32 before = turn - static_cast<uint32>(Numbers::back_buffers);
    barrier::wait(thread.s.released + buffer_of(before), phase_of(before));
    load(sample, plane, buffer_of(turn), first_row, first_column);
#endif
  }
  __device__ __forceinline__ void release(uint32 turn) const {
#if __CUDA_ARCH__ >= 900
    barrier::release_to_copies();
    barrier::arrive(thread.s.released + buffer_of(turn));
#endif
  }
  // Copies after the next barrier may overwrite what this thread has read or written of shared memory.
  static __device__ __forceinline__ void release_to_copies() {
#if __CUDA_ARCH__ >= 900
    if constexpr (copies_whole) barrier::release_to_copies();
#endif
  }
};

}  // namespace onepass
