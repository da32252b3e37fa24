// The norm, the chain after it and a mean, of values that another launch left in memory.
#pragma once

#include "gemm/store/finish.cuh"

namespace onepass {

// One block for each channel of each sample.
template <class Tail, class Numbers>
struct GemmMean {
  using Finish = GemmFinish<Tail, Numbers>;
  using Parameters = typename Finish::Parameters;
  const Parameters& p;

  __device__ __forceinline__ void run() const {
    __shared__ float scratch[Numbers::threads / 32];
    const int64 row = blockIdx.x;
    const int64 n = row / Tail::channels;
    const int c = static_cast<int>(row - n * Tail::channels);
    const typename Finish::Channel channel(p, n, c);
    const int64 first = Numbers::interleaved ? n * Tail::channels * Tail::spatial + c : row * Tail::spatial;
    constexpr int64 step = Numbers::interleaved ? Tail::channels : 1;
    float sum[1] = {0.0f};
    for (int64 i = threadIdx.x; i < Tail::spatial; i += Numbers::threads) {
      typename Tail::After::template Tensors<1> tensors;
      tensors.load(p, first + i * step);
      sum[0] += channel.value(p.values[first + i * step], tensors, 0);
    }
    block_sum<Numbers::threads>(sum, scratch);
    if (threadIdx.x == 0)
      store_one<typename Tail::Output>(p.output, row, sum[0] / static_cast<float>(Tail::spatial));
  }
};

}  // namespace onepass
