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
  __device__ __forceinline__ void load(const Parameters& p, int64 n, int c) {
    constexpr int slabs = Tail::channels / Tail::group_channels;
    const float* statistics = p.statistics + 2 * (n * slabs + c / Tail::group_channels);
    mean = __ldg(statistics);
    const int of_norm = Tail::channel(n, c);
    scale = Tail::weight(p, of_norm) * __ldg(statistics + 1);
    bias = Tail::bias(p, of_norm);
    values.load(p, n, c);
  }
  template <class Tensors>
  __device__ __forceinline__ float value(float x, const Tensors& tensors, int k) const {
    return Tail::After::value(normalise(x, mean, scale, bias), values.value[0], tensors, k);
  }
};

// `Numbers`: threads, whether channels come after space, how many elements a vector has, the threads of a row
// (interleaved: those along channels), and how many pieces a row (interleaved: a sample) is cut into.
template <class Tail, class Numbers>
struct GemmFinish {
  using Parameters = GemmFinishParameters<Tail::parameters>;
  using Channel = NormedChannel<Tail>;
  using Output = typename Tail::Output;
  static constexpr int width = Numbers::width;
  static constexpr int team = Numbers::team;
  static constexpr int lanes = Numbers::threads / team;  // rows of a block; interleaved: positions
  static constexpr int vectors = Numbers::vectors;       // of a thread at a time
  using Sums = PlainSums<Numbers, Tail::has_mean ? 1 : 0, Numbers::interleaved ? width : 1>;

  const Parameters& p;

  __device__ __forceinline__ void run() const {
    if (p.batch == 0) return;
    // What lies on 16 bytes of values lies on a whole vector of the output too, or stores are of elements.
    const uint64 phase = reinterpret_cast<uint64>(p.values) / f32::bytes % width;
    const bool aligned = reinterpret_cast<uint64>(p.output) / Output::bytes % width == phase;
    if constexpr (Numbers::interleaved) {
      run_interleaved(phase == 0, aligned);
    } else {
      run_planar(static_cast<int>(phase), aligned);
    }
  }

 private:
  // The values of `Count` vectors at a time, each of neighbours in memory: stored, or added to the sums.
  template <int Width, int Count, int Channels>
  __device__ __forceinline__ void chunk(const Channel (&channel)[Channels], int64 index, int64 step,
                                        int count, bool aligned_values, bool aligned, Sums& sums) const {
    Packed<f32, Width> x[Count];
    typename Tail::After::template Tensors<Width> tensors[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (i >= count) break;
      x[i].load(p.values, index + i * step, aligned_values);
      tensors[i].load(p, index + i * step);
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (i >= count) break;
      float value[Width];
      x[i].unpack(value);
#pragma unroll
      for (int k = 0; k < Width; ++k) {
        const int c = Channels == 1 ? 0 : k;
        value[k] = channel[c].value(value[k], tensors[i], k);
        if constexpr (Tail::has_mean) sums.value[c][0] += value[k];
      }
      if constexpr (!Tail::has_mean) {
        Packed<Output, Width> packed;
        packed.pack(value);
        packed.store(p.output, index + i * step, aligned);
      }
    }
  }

  __device__ __forceinline__ void finish(Sums& sums, bool in_range, int64 row, float* scratch) const {
    sums.template finish<team>(in_range, scratch, [&](int r, const float* total) {
      store_one<Output>(p.output, row + r, total[0] / static_cast<float>(Tail::spatial));
    });
  }

  // A team for each piece of a row: vectors as they lie on 16 bytes, and what is before and after them.
  __device__ __forceinline__ void run_planar(int phase, bool aligned) const {
    __shared__ float scratch[Numbers::threads / 32];
    const uint32 block = blockIdx.x / static_cast<uint32>(Numbers::pieces);
    const int piece = static_cast<int>(blockIdx.x - block * static_cast<uint32>(Numbers::pieces));
    const int64 own = static_cast<int64>(block) * lanes + threadIdx.x / team;
    const bool in_range = own < p.batch * Tail::channels;
    const int64 row = in_range ? own : 0;
    const int64 n = row / Tail::channels;
    Channel channel[1];
    channel[0].load(p, n, static_cast<int>(row - n * Tail::channels));
    const int64 begin = row * Tail::spatial;
    const int before = static_cast<int>(-(begin + phase) & (width - 1));
    const int head = before < Tail::spatial ? before : static_cast<int>(Tail::spatial);
    const int64 all = (Tail::spatial - head) / width;
    constexpr int64 piece_vectors = Numbers::piece_vectors;
    const int64 end = (piece + 1) * piece_vectors;
    const int64 last = Numbers::pieces > 1 && end < all ? end : all;
    const int lane = threadIdx.x % team;
    Sums sums;
    if (in_range) {
#pragma unroll 1
      for (int64 v = piece * piece_vectors + lane; v < last; v += vectors * team) {
        chunk<width, vectors>(channel, begin + head + v * width, team * width,
                              static_cast<int>((last - v + team - 1) / team), true, aligned, sums);
      }
      const int edges = static_cast<int>(Tail::spatial - all * width);
      for (int e = lane; piece == 0 && e < edges; e += team) {
        const int64 offset = e < head ? e : e + all * width;
        chunk<1, 1>(channel, begin + offset, 0, 1, true, true, sums);
      }
    }
    if constexpr (Tail::has_mean) finish(sums, in_range, row, scratch);
  }

  // A thread has some channels of a piece of a sample's positions. A mean: all positions, of a team's
  // channels.
  __device__ __forceinline__ void run_interleaved(bool aligned_values, bool aligned_both) const {
    __shared__ float scratch[Tail::has_mean ? width * Numbers::threads : 1];
    constexpr int columns = Tail::channels / width;
    constexpr int64 step = static_cast<int64>(lanes) * Tail::channels;
    const int64 n = blockIdx.x / static_cast<uint32>(Numbers::pieces);
    const int piece = static_cast<int>(blockIdx.x - n * Numbers::pieces);
    const int lane = threadIdx.x / team;
    const int first_column = Tail::has_mean ? piece * team : 0;
    const int64 first = Tail::has_mean ? 0 : piece * static_cast<int64>(Numbers::piece_positions);
    const int64 end = first + Numbers::piece_positions;
    const int64 last = !Tail::has_mean && end < Tail::spatial ? end : Tail::spatial;
    const bool aligned = aligned_values && aligned_both;
#pragma unroll 1
    for (int column = first_column + static_cast<int>(threadIdx.x % team);
         column - static_cast<int>(threadIdx.x % team) < columns; column += team) {
      const bool in_range = column < columns && lane < lanes;
      const int c = (in_range ? column : 0) * width;
      Channel channel[width];
#pragma unroll
      for (int k = 0; k < width; ++k) channel[k].load(p, n, c + k);
      Sums sums;
      if (in_range) {
#pragma unroll 1
        for (int64 position = first + lane; position < last; position += vectors * lanes) {
          chunk<width, vectors>(channel, (n * Tail::spatial + position) * Tail::channels + c, step,
                                static_cast<int>((last - position + lanes - 1) / lanes), aligned_values,
                                aligned, sums);
        }
      }
      if constexpr (Tail::has_mean) {
        finish(sums, in_range, n * Tail::channels + c, scratch);
        break;
      }
    }
  }
};

}  // namespace onepass
