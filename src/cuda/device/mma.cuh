// Copies to shared memory and products of a warp that every GPU from sm_80 on has.
#pragma once

#include "device/types.cuh"

namespace onepass::mma {

// 16 bytes, past the first-level cache.
__device__ __forceinline__ void copy_vector(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// 4, 8 or 16 bytes, or zeros where there are none.
template <int Bytes>
__device__ __forceinline__ void copy_or_clear(uint32 to, const void* from, bool exists) {
  const uint32 bytes = exists ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(bytes)
                 : "memory");
  }
}
// What this thread has asked for since the last call is a group.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups of this thread are there, but the last `Pending`.
template <int Pending>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four matrices of eight rows of 16 bytes: lane l has the address of row l % 8 of matrix l / 8, and gets of
// each the word l % 4 of row l / 4.
__device__ __forceinline__ void load_matrices(uint32 (&word)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address)
               : "memory");
}

// The same of matrices of 16-bit elements, turned: a lane gets column l / 4 of rows 2 (l % 4) and the next.
__device__ __forceinline__ void load_turned_matrices(uint32 (&word)[4], uint32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address)
               : "memory");
}

// D += A B, A 16 rows and B 8 columns of 32 bytes each: 16 elements of two bytes, or eight of tf32.
struct Tf32 {
  static __device__ __forceinline__ void run(float (&d)[4], const uint32 (&a)[4], const uint32* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
struct F16 {
  static __device__ __forceinline__ void run(float (&d)[4], const uint32 (&a)[4], const uint32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
struct Bf16 {
  static __device__ __forceinline__ void run(float (&d)[4], const uint32 (&a)[4], const uint32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

// The same with A in a vector and B in two words.
template <class Product>
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& a, uint32 b0, uint32 b1) {
  const uint32 rows[4] = {a.x, a.y, a.z, a.w};
  const uint32 columns[2] = {b0, b1};
  Product::run(d, rows, columns);
}

}  // namespace onepass::mma
