// Bulk copies that arrive in shared memory, what waits for them, and clusters.
#pragma once

#include "device/types.cuh"

namespace onepass {

namespace barrier {

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

#if __CUDA_ARCH__ >= 900
// A phase of the barrier ends with `arrivals` of them, and all bytes they expect.
__device__ __forceinline__ void initialise(uint64* barrier, uint32 arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What this thread wrote before is visible to those that wait.
__device__ __forceinline__ void arrive(uint64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void expect(uint64* barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(uint64* barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// The same by a warp beside which others compute: it does not ask all the time.
__device__ __forceinline__ void wait_asleep(uint64* barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end_%=;\n"
      "nanosleep.u32 64;\n"
      "bra again_%=;\n"
      "end_%=:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy(void* to, const void* from, uint32 bytes, uint64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// 16 bytes, past the first-level cache.
__device__ __forceinline__ void copy_vector(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Arrives when the vectors this thread has asked for are there.
__device__ __forceinline__ void arrive_with_vectors(uint64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// What this thread has read of shared memory is read before a bulk copy that is asked for later overwrites
// it.
__device__ __forceinline__ void release_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What this thread has seen of global memory, other blocks' writes that it waited for among it, is seen by
// its bulk copies too.
__device__ __forceinline__ void acquire_for_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Lanes may come apart from each other: the barrier takes whole warps.
__device__ __forceinline__ void cluster_sync() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void prefetch(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

// What another block of the cluster has where this one has `own`.
template <class Word>
__device__ __forceinline__ Word load_of_block(const Word* own, uint32 block) {
  static_assert(sizeof(Word) == 4);
  uint32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
  if constexpr (is_same<Word, float>) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
  } else {
    uint32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
  }
}

__device__ __forceinline__ float4 load_of_block(const float4* own, uint32 block) {
  uint32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Sends two floats to another block of the cluster, to the place of this block's own, and counts their eight
// bytes at its barrier.
__device__ __forceinline__ void send(float* own, float x, float y, uint64* barrier, uint32 block) {
  uint32 address, remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(barrier)), "r"(block));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
      "f"(x), "f"(y), "r"(remote)
      : "memory");
}

// The same of four floats and their sixteen bytes.
__device__ __forceinline__ void send(float4* own, float4 v, uint64* barrier, uint32 block) {
  uint32 address, remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(block));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(barrier)), "r"(block));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(remote)
      : "memory");
}
#endif

}  // namespace barrier

}  // namespace onepass
