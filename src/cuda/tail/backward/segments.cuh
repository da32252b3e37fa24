// Sums of rows that blocks leave, each over some samples, added up over the batch.
#pragma once

#include "device/types.cuh"

namespace onepass {

// `segments` sets of `columns` sums that lie beside each other in memory, added up to `to` by all threads of
// a block, in an order that follows from these numbers. Other blocks wrote them. `lanes_of_sums`: one for
// each thread. Ends with a barrier.
template <int columns, int threads>
__device__ __forceinline__ void sum_segments(const double* from, int segments, double* to,
                                             double* lanes_of_sums) {
  constexpr int split = columns < threads ? threads / columns : 1;  // threads of a sum
  const int part = static_cast<int>(threadIdx.x) / columns;
  for (int column = static_cast<int>(threadIdx.x) % columns; column < columns; column += threads) {
    double sum = 0.0;
    if (part < split) {
#pragma unroll 8
      for (int segment = part; segment < segments; segment += split) {
        sum += __ldcg(from + static_cast<int64>(segment) * columns + column);
      }
    }
    if constexpr (split > 1) {
      lanes_of_sums[threadIdx.x] = sum;
    } else if (part < split) {  // others have no column
      to[column] = sum;
    }
  }
  __syncthreads();
  if constexpr (split > 1) {
    if (threadIdx.x < columns) {
      double sum = 0.0;
      for (int i = 0; i < split; ++i) sum += lanes_of_sums[i * columns + threadIdx.x];
      to[threadIdx.x] = sum;
    }
    __syncthreads();
  }
}

}  // namespace onepass
