// The norm and what follows it, also a mean, of values and statistics that another launch left in memory:
// read once, written once.
#pragma once

#include "device/types.cuh"
#include "gemm/parameters.cuh"
#include "tail/tail.cuh"

namespace onepass {

// The norm of a channel, and what the chain after it reads of the channel.
template <class Tail>
struct NormedChannel {
  float mean, scale, bias;
  ChannelValues<typename Tail::After, 1> values;

  template <class Parameters>
  __device__ __forceinline__ NormedChannel(const Parameters& p, int64 n, int c) {
    constexpr int slabs = Tail::channels / Tail::group_channels;
    const float* statistics = p.statistics + 2 * (n * slabs + c / Tail::group_channels);
    mean = __ldg(statistics);
    scale = Tail::weight(p, c) * __ldg(statistics + 1);
    bias = Tail::bias(p, c);
    values.load(p, n, c);
  }
  template <class Tensors>
  __device__ __forceinline__ float value(float x, const Tensors& tensors, int k) const {
    return Tail::After::value(normalise(x, mean, scale, bias), values.value[0], tensors, k);
  }
};

// `Numbers`: threads, pieces of a channel (of a sample, where channels come after space), whether they do.
template <class Tail, class Numbers>
struct GemmFinish {
  using Parameters = GemmFinishParameters<Tail::parameters>;
  using Channel = NormedChannel<Tail>;
  using Output = typename Tail::Output;
  static constexpr int width = 4;
  static constexpr int vectors = Numbers::piece / (Numbers::threads * width);  // of a thread
  static_assert(vectors * Numbers::threads * width == Numbers::piece);

  const Parameters& p;

  // A block for each piece; for a mean, one for each channel of each sample.
  __device__ __forceinline__ void run() const {
    if constexpr (Tail::has_mean) {
      run_mean();
    } else if constexpr (Numbers::interleaved) {
      run_interleaved();
    } else {
      run_planar();
    }
  }

 private:
  __device__ __forceinline__ void one(const Channel& channel, int64 index, float x) const {
    typename Tail::After::template Tensors<1> tensors;
    tensors.load(p, index);
    store_one<Output>(p.output, index, channel.value(x, tensors, 0));
  }

  __device__ __forceinline__ void run_planar() const {
    const uint32 row = blockIdx.x / static_cast<uint32>(Numbers::pieces);
    const int piece = static_cast<int>(blockIdx.x - row * static_cast<uint32>(Numbers::pieces));
    const uint32 n = row / static_cast<uint32>(Tail::channels);
    const Channel channel(p, n, static_cast<int>(row - n * static_cast<uint32>(Tail::channels)));
    const int64 begin = static_cast<int64>(row) * Tail::spatial;
    const int first = piece * Numbers::piece;
    const bool aligned = Tail::spatial % width == 0 && reinterpret_cast<uint64>(p.values) % 16 == 0 &&
                         reinterpret_cast<uint64>(p.output) % (width * Output::bytes) == 0;
    if (aligned) {
      float4 x[vectors];
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const int at = first + (i * Numbers::threads + static_cast<int>(threadIdx.x)) * width;
        if (at < Tail::spatial) x[i] = *reinterpret_cast<const float4*>(p.values + begin + at);
      }
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const int at = first + (i * Numbers::threads + static_cast<int>(threadIdx.x)) * width;
        if (at >= Tail::spatial) continue;
        typename Tail::After::template Tensors<width> tensors;
        tensors.load(p, begin + at);
        float value[width] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
        for (int k = 0; k < width; ++k) value[k] = channel.value(value[k], tensors, k);
        Packed<Output, width> packed;
        packed.pack(value);
        packed.store(p.output, begin + at, true);
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < vectors * width; ++i) {
        const int at = first + i * Numbers::threads + static_cast<int>(threadIdx.x);
        if (at < Tail::spatial) one(channel, begin + at, p.values[begin + at]);
      }
    }
  }

  __device__ __forceinline__ void run_interleaved() const {
    constexpr int64 sample = static_cast<int64>(Tail::channels) * Tail::spatial;
    const int64 first = static_cast<int64>(blockIdx.x) * Numbers::piece;
#pragma unroll 4
    for (int i = 0; i < vectors * width; ++i) {
      const int64 index = first + i * Numbers::threads + static_cast<int64>(threadIdx.x);
      if (index >= p.batch * sample) break;
      const int64 n = index / sample;
      const int c =
          static_cast<int>(static_cast<uint32>(index - n * sample) % static_cast<uint32>(Tail::channels));
      one(Channel(p, n, c), index, p.values[index]);
    }
  }

  __device__ __forceinline__ void run_mean() const {
    __shared__ float scratch[Numbers::threads / 32];
    const int64 row = blockIdx.x;
    const int64 n = row / Tail::channels;
    const int c = static_cast<int>(row - n * Tail::channels);
    const Channel channel(p, n, c);
    const int64 first = Numbers::interleaved ? n * Tail::channels * Tail::spatial + c : row * Tail::spatial;
    constexpr int64 step = Numbers::interleaved ? Tail::channels : 1;
    // Loads of a thread that are under way at a time; with one, a channel took 0.1 us for 256 positions.
    constexpr int at_once = 8;
    float sum[1] = {0.0f};
    for (int64 i = threadIdx.x; i < Tail::spatial; i += at_once * Numbers::threads) {
      float x[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int64 at = i + k * Numbers::threads;
        x[k] = at < Tail::spatial ? p.values[first + at * step] : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int64 at = i + k * Numbers::threads;
        if (at >= Tail::spatial) break;
        typename Tail::After::template Tensors<1> tensors;
        tensors.load(p, first + at * step);
        sum[0] += channel.value(x[k], tensors, 0);
      }
    }
    block_sum<Numbers::threads>(sum, scratch);
    if (threadIdx.x == 0) store_one<Output>(p.output, row, sum[0] / static_cast<float>(Tail::spatial));
  }
};

}  // namespace onepass
