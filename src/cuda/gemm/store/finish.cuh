// The norm and what follows it, of values and statistics that another launch left in memory: read once,
// written once.
#pragma once

#include "device/types.cuh"
#include "gemm/parameters.cuh"
#include "tail/tail.cuh"

namespace onepass {

// `Numbers`: threads, pieces of a channel (of a sample, where channels come after space), whether they do.
template <class Tail, class Numbers>
struct GemmFinish {
  using Parameters = GemmFinishParameters<Tail::parameters>;
  using After = typename Tail::After;
  using Output = typename Tail::Output;
  static constexpr int width = 4;
  static constexpr int vectors = Numbers::piece / (Numbers::threads * width);  // of a thread
  static constexpr int slabs = Tail::channels / Tail::group_channels;
  static_assert(vectors * Numbers::threads * width == Numbers::piece);

  const Parameters& p;

  // The norm of a channel, and what the chain reads of it.
  struct Channel {
    float mean, scale, bias;
    ChannelValues<After, 1> values;

    __device__ __forceinline__ Channel(const Parameters& p, int64 n, int c) {
      const float* statistics = p.statistics + 2 * (n * slabs + c / Tail::group_channels);
      mean = __ldg(statistics);
      scale = Tail::weight(p, c) * __ldg(statistics + 1);
      bias = Tail::bias(p, c);
      values.load(p, n, c);
    }
    template <class Tensors>
    __device__ __forceinline__ float value(float x, const Tensors& tensors, int k) const {
      return After::value(normalise(x, mean, scale, bias), values.value[0], tensors, k);
    }
  };

  // A block for each piece.
  __device__ __forceinline__ void run() const {
    if constexpr (Numbers::interleaved) {
      run_interleaved();
    } else {
      run_planar();
    }
  }

 private:
  __device__ __forceinline__ void one(const Channel& channel, int64 index, float x) const {
    typename After::template Tensors<1> tensors;
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
        typename After::template Tensors<width> tensors;
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
};

}  // namespace onepass
