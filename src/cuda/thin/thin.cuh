// A thin convolution with its chains, norm and mean in one launch, on a mainloop that computes sums. The
// convolution's output is never in memory.
//
//   pass 1   x -> convolution -> before-chain -> moments of each channel's tiles; the last block of a sample
//            merges them
//   pass 2   x -> convolution -> before-chain -> norm -> after-chain -> y, or sums of y for a mean
//
// Pass 1 is left out without a norm, pass 2 where a mean follows the norm directly. Work is taken by ticket
// as in tail/streamed.cuh: pass 1 of a wave of samples, then pass 2 of the wave before. Moves x once or twice
// and y once.
//
// `Convolution` is the problem's, generated (src/cuda/thin/thin.cc); so is `Tail`. Three parts make a kernel:
//   Mainloop   computes a tile of sums and hands them to an epilogue, fragment by fragment. Mainloop::team
//              neighbouring lanes have the same rows (channels of samples). A tile has Mainloop::samples
//              samples.
//   Epilogue   MomentsEpilogue or ApplyEpilogue: the chain, then moments, sums or stores.
//   Thin       the tickets, and the merges by the last block of a sample.
#pragma once

#include "tail/tail.cuh"
#include "thin/parameters.cuh"

namespace onepass {

// The words behind those of the samples: redo_all in the first one marks all samples.
enum RedoWord : uint32 { redo_none = 0, redo_some = 1, redo_all = 2 };

// The factor of f32 elements that are split into f16 parts (thin/samples.cuh).
constexpr float thin_input_scale = 32.0f;

// A convolution in groups is as many convolutions, each of its own channels. A group of a sample is treated
// as a sample of its own, so that there are `groups` times as many.
template <class C>
__device__ __forceinline__ int group_of(int64 n) {
  return C::groups == 1 ? 0 : static_cast<int>(n % C::groups);
}
// Where a sample begins in a tensor with so many of its channels in a group.
template <class C>
__device__ __forceinline__ int64 origin(int64 n, int64 sample_stride, int64 channel_stride, int channels) {
  if constexpr (C::groups == 1) return n * sample_stride;
  return n / C::groups * sample_stride + n % C::groups * (channels * channel_stride);
}
template <class C>
__device__ __forceinline__ int64 input_origin(int64 n) {
  return origin<C>(n, C::input_stride(0), C::input_stride(1), static_cast<int>(C::in_channels));
}
// The same in the output, and in tensors that stages read.
template <class C>
__device__ __forceinline__ int64 output_origin(int64 n) {
  return origin<C>(n, C::stride(0), C::stride(1), static_cast<int>(C::channels));
}
// The weights of a group, whichever of their channels come first.
template <class C>
constexpr int64 group_weights = static_cast<int64>(C::in_channels) * C::channels* C::taps;

// One class of a dimension; `r` is the same in all threads.
template <class Convolution>
struct ThinClass {
  using C = Convolution;
  int r[3];
  int first[3];
  int base[3];
  int count[3];
  int positions[3];

  // Classes are numbered with the last dimension's running fastest.
  explicit __device__ __forceinline__ ThinClass(int index) {
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      constexpr int one = 1;
      const int of_dimension = static_cast<int>(C::classes(d));
      r[d] = of_dimension == one ? 0 : index % of_dimension;
      index /= of_dimension;
      first[d] = static_cast<int>(C::first(d, r[d]));
      base[d] = static_cast<int>(C::base(d, r[d]));
      count[d] = static_cast<int>(C::count(d, r[d]));
      positions[d] = static_cast<int>(C::positions(d, r[d]));
    }
  }

  __device__ __forceinline__ int all_positions() const { return positions[0] * positions[1] * positions[2]; }

  // Position `flat` of the class, with the last dimension running fastest.
  __device__ __forceinline__ void split(int flat, int (&j)[3]) const {
    const auto rest = static_cast<unsigned>(flat) / static_cast<unsigned>(positions[2]);
    j[2] = flat - static_cast<int>(rest) * positions[2];
    j[0] = static_cast<int>(rest / static_cast<unsigned>(positions[1]));
    j[1] = static_cast<int>(rest) - j[0] * positions[1];
  }

  // Where the output of a position lies in its channel.
  __device__ __forceinline__ int output_offset(const int (&j)[3]) const {
    int offset = 0;
#pragma unroll
    for (int d = 0; d < 3; ++d)
      offset += (r[d] + static_cast<int>(C::classes(d)) * j[d]) * static_cast<int>(C::stride(d + 2));
    return offset;
  }
};

// The positions of a fragment that belong to the tile: all, or those with a bit set.
struct Mask {
  uint32 bits;
};
__device__ __forceinline__ bool has(int i, Mask mask) { return mask.bits >> i & 1u; }
__device__ __forceinline__ bool has(int, All) { return true; }

// A slot is a channel of one of a tile's samples.
template <class Tail, class Numbers>
__device__ __forceinline__ int channel_of(int slot) {
  return Numbers::slots == Tail::channels ? slot : slot % Tail::channels;
}
template <class Tail, class Numbers>
__device__ __forceinline__ int sample_of(int slot) {
  return Numbers::slots == Tail::channels ? 0 : slot / Tail::channels;
}

// Where an element lies in the output; a sample spans less than 2^31.
template <class Convolution, class Tail, class Numbers>
__device__ __forceinline__ int64 element_index(int64 n, int slot, int offset) {
  return output_origin<Convolution>(n + sample_of<Tail, Numbers>(slot)) +
         (channel_of<Tail, Numbers>(slot) * static_cast<int>(Convolution::stride(1)) + offset);
}

// The norm of a channel of a sample.
template <class Tail>
struct ChannelNorm {
  float mean = 0.0f;
  float scale = 1.0f;
  float bias = 0.0f;

  template <class Parameters>
  __device__ __forceinline__ void load(const Parameters& p, int64 n, int channel) {
    if constexpr (Tail::has_norm) {
      constexpr int groups = Tail::channels / Tail::group_channels;
      const float* slab = p.statistics + 2 * (n * groups + channel / Tail::group_channels);
      const int own = Tail::channel(n, channel);
      mean = load_shared_by_blocks(slab);
      scale = Tail::weight(p, own) * load_shared_by_blocks(slab + 1);
      bias = Tail::bias(p, own);
    }
  }
  __device__ __forceinline__ float apply(float x) const {
    return Tail::has_norm ? normalise(x, mean, scale, bias) : x;
  }
};

// The slots of a thread, with the before-chain's operands of their channels.
template <class Tail, class Numbers, int Rows>
struct ThinRows {
  ChannelValues<typename Tail::Before, 1> before[Rows];
  int slot[Rows];
  bool in_range[Rows];

  __device__ __forceinline__ int channel(int r) const { return channel_of<Tail, Numbers>(slot[r]); }
  __device__ __forceinline__ int64 sample(int64 n, int r) const {
    return n + sample_of<Tail, Numbers>(slot[r]);
  }
  template <class Parameters>
  __device__ __forceinline__ ThinRows(const Parameters& p, int64 n, const int (&slots)[Rows],
                                      const bool (&are_in_range)[Rows]) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      slot[r] = slots[r];
      in_range[r] = are_in_range[r];
      before[r].load(p, sample(n, r), channel(r));
    }
  }
};

// body(row, position) for the values of a thread that count.
template <int Rows, int Count, class Which, class Body>
__device__ __forceinline__ void for_each_value(Which which, Body&& body) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (has(i, which)) body(r, i);
    }
  }
}

// What a mainloop does with its sums:
//   Epilogue epilogue{p, scratch, n}
//   auto rows = begin_rows(epilogue, slot, in_range): a thread's rows. A row that is not in range has a valid
//     slot, and its values are dropped.
//   epilogue.take(rows, h, offset, which): h[row][position], offset[position] in a channel, All or a Mask
//   epilogue.template finish<team>(rows): by every thread of the block
//   epilogue.store(tile): once, when all channels are finished
template <class Epilogue, int Rows>
__device__ __forceinline__ typename Epilogue::template State<Rows> begin_rows(const Epilogue& epilogue,
                                                                              const int (&slot)[Rows],
                                                                              const bool (&in_range)[Rows]) {
  return {epilogue.p, epilogue.n, slot, in_range};
}

template <class Convolution, class Tail, class Numbers, class Parameters>
struct MomentsEpilogue {
  using Before = typename Tail::Before;
  const Parameters& p;
  float* scratch;  // 3 * Numbers::warps * Numbers::slots floats
  int64 n;         // of slot 0

  template <int Rows>
  struct State : ThinRows<Tail, Numbers, Rows> {
    using ThinRows<Tail, Numbers, Rows>::ThinRows;
    float count = 0.0f;
    float mean[Rows] = {};
    float m2[Rows] = {};
  };

  template <int Rows, int Count, class Which>
  __device__ __forceinline__ void take(State<Rows>& rows, float (&h)[Rows][Count], const int (&offset)[Count],
                                       Which which) const {
    for_each_value<Rows, Count>(which, [&](int r, int i) {
      typename Before::template Tensors<1> tensors;
      tensors.load(p, element_index<Convolution, Tail, Numbers>(n, rows.slot[r], offset[i]));
      h[r][i] = Before::value(h[r][i], rows.before[r].value[0], tensors, 0);
    });
    float added = Count;
    if constexpr (!is_same<Which, All>) added = static_cast<float>(__popc(which.bits));
    if (!is_same<Which, All> && added == 0.0f) return;
    // Distances from the mean so far, at first from the first value: equal values have distance 0.
    if (rows.count == 0.0f) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
#pragma unroll
        for (int i = Count - 1; i >= 0; --i) rows.mean[r] = has(i, which) ? h[r][i] : rows.mean[r];
      }
    }
    rows.count += added;
    const float per_element = pointwise::reciprocal_fast(rows.count);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      float sum = 0.0f, square = 0.0f;
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const float distance = has(i, which) ? distance_from(h[r][i], rows.mean[r]) : 0.0f;
        sum += distance;
        square = fmaf(distance, distance, square);
      }
      const float moved = sum * per_element;
      rows.mean[r] += moved;
      // Rounding may leave equal values a little below zero.
      const float added_m2 = fmaf(-sum, moved, square);
      rows.m2[r] += added_m2 < 0.0f ? 0.0f : added_m2;
    }
  }

  template <int team, int Rows>
  __device__ __forceinline__ void finish(State<Rows>& rows) const {
    const int warp = threadIdx.x / 32;
    const float count = lanes_sum<team>(rows.count);
    __syncthreads();  // scratch is free
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      Moments own{rows.count, rows.mean[r], rows.m2[r]};
      float mean, m2;
      team_moments<team, Numbers::threads>(own, count, nullptr, mean, m2);
      if (rows.in_range[r] && threadIdx.x % team == 0) {
        float* place = scratch + (warp * Numbers::slots + rows.slot[r]) * 3;
        place[0] = count;
        place[1] = mean;
        place[2] = m2;
      }
    }
  }

  // After finish() of all channels: the block's moments of each.
  __device__ __forceinline__ void store(int tile) const {
    __syncthreads();
    for (int s = threadIdx.x; s < Numbers::slots; s += Numbers::threads) {
      if (n + sample_of<Tail, Numbers>(s) >= p.batch) break;
      Moments all;
      for (int warp = 0; warp < Numbers::warps; ++warp) {
        const float* place = scratch + (warp * Numbers::slots + s) * 3;
        if (place[0] > 0.0f) all.merge(place[0], place[1], place[2]);
      }
      float* part = p.parts + ((n * Tail::channels + s) * Numbers::tiles + tile) * 3;
      part[0] = all.count;
      part[1] = all.mean;
      part[2] = all.m2;
    }
  }
};

template <class Convolution, class Tail, class Numbers, class Parameters>
struct ApplyEpilogue {
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  const Parameters& p;
  float* scratch;  // Numbers::warps * Numbers::slots floats
  int64 n;         // of slot 0

  template <int Rows>
  struct State : ThinRows<Tail, Numbers, Rows> {
    ChannelValues<After, 1> after[Rows];
    ChannelNorm<Tail> norm[Rows];
    float sum[Rows] = {};

    __device__ __forceinline__ State(const Parameters& p, int64 n, const int (&slots)[Rows],
                                     const bool (&are_in_range)[Rows])
        : ThinRows<Tail, Numbers, Rows>(p, n, slots, are_in_range) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        after[r].load(p, this->sample(n, r), this->channel(r));
        norm[r].load(p, this->sample(n, r), this->channel(r));
      }
    }
  };

  template <int Rows, int Count, class Which>
  __device__ __forceinline__ void take(State<Rows>& rows, float (&h)[Rows][Count], const int (&offset)[Count],
                                       Which which) const {
    for_each_value<Rows, Count>(which, [&](int r, int i) {
      const int64 index = element_index<Convolution, Tail, Numbers>(n, rows.slot[r], offset[i]);
      typename Before::template Tensors<1> before;
      typename After::template Tensors<1> after;
      before.load(p, index);
      after.load(p, index);
      float value = Before::value(h[r][i], rows.before[r].value[0], before, 0);
      value = After::value(rows.norm[r].apply(value), rows.after[r].value[0], after, 0);
      if constexpr (Tail::has_mean) {
        rows.sum[r] += value;
      } else if (rows.in_range[r]) {
        store_one<typename Tail::Output>(p.output, index, value);
      }
    });
  }

  template <int team, int Rows>
  __device__ __forceinline__ void finish(State<Rows>& rows) const {
    if constexpr (Tail::has_mean) {
      __syncthreads();  // scratch is free
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const float sum = lanes_sum<team>(rows.sum[r]);
        if (rows.in_range[r] && threadIdx.x % team == 0)
          scratch[threadIdx.x / 32 * Numbers::slots + rows.slot[r]] = sum;
      }
    }
  }

  __device__ __forceinline__ void store(int tile) const {
    if constexpr (Tail::has_mean) {
      __syncthreads();
      for (int s = threadIdx.x; s < Numbers::slots; s += Numbers::threads) {
        if (n + sample_of<Tail, Numbers>(s) >= p.batch) break;
        float total = 0.0f;
        for (int warp = 0; warp < Numbers::warps; ++warp) total += scratch[warp * Numbers::slots + s];
        p.sums[(n * Tail::channels + s) * Numbers::tiles + tile] = total;
      }
    }
  }
};

template <class Convolution, class Tail, class Numbers, class Mainloop>
struct Thin {
  using Parameters = ThinParameters<Tail::parameters>;
  using MomentsPass = MomentsEpilogue<Convolution, Tail, Numbers, Parameters>;
  using ApplyPass = ApplyEpilogue<Convolution, Tail, Numbers, Parameters>;
  static constexpr int samples = Mainloop::samples;  // of a unit
  static constexpr int groups = Tail::channels / Tail::group_channels;
  static constexpr int first_tiles = Tail::has_norm ? Numbers::tiles : 0;
  static constexpr int second_tiles = Tail::mean_follows_norm ? 0 : Numbers::tiles;

  const Parameters& p;
  float* scratch;
  Mainloop mainloop;

  // --- Between the passes: a warp for each slab ---
  __device__ __forceinline__ void finish_moments(int64 first_sample) const {
    constexpr int per_slab = Tail::group_channels * Numbers::tiles;
    const int lane = threadIdx.x % 32;
    for (int s = threadIdx.x / 32; s < samples * groups; s += Numbers::warps) {
      const int64 slab = first_sample * groups + s;
      if (slab >= p.batch * groups) break;
      const float* parts = p.parts + slab * per_slab * 3;
      Moments own;
      for (int i = lane; i < per_slab; i += 32) {
        const float count = load_shared_by_blocks(parts + i * 3);
        if (count > 0.0f)
          own.merge(count, load_shared_by_blocks(parts + i * 3 + 1),
                    load_shared_by_blocks(parts + i * 3 + 2));
      }
      constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
      float mean, m2;
      team_moments<32, Numbers::threads>(own, elements, nullptr, mean, m2);
      const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
      if (lane == 0) {
        p.statistics[2 * slab] = mean;
        p.statistics[2 * slab + 1] = rstd;
      }
      if constexpr (Tail::mean_follows_norm) {
        for (int c = lane; c < Tail::group_channels; c += 32) {
          Moments row;
          for (int i = 0; i < Numbers::tiles; ++i) {
            const float* part = parts + (c * Numbers::tiles + i) * 3;
            const float count = load_shared_by_blocks(part);
            if (count > 0.0f) row.merge(count, load_shared_by_blocks(part + 1), 0.0f);
          }
          const int64 row_index = slab * Tail::group_channels + c;
          const int channel =
              Tail::channel(row_index / Tail::channels, static_cast<int>(row_index % Tail::channels));
          const float value =
              fmaf((row.mean - mean) * rstd, Tail::weight(p, channel), Tail::bias(p, channel));
          store_one<typename Tail::Output>(p.output, row_index, value);
        }
      }
    }
  }

  __device__ __forceinline__ void finish_mean(int64 first_sample) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
    for (int s = threadIdx.x; s < samples * Tail::channels; s += Numbers::threads) {
      const int64 row = first_sample * Tail::channels + s;
      if (row >= p.batch * Tail::channels) break;
      double total = 0.0;
      for (int i = 0; i < Numbers::tiles; ++i)
        total += load_shared_by_blocks(p.sums + row * Numbers::tiles + i);
      store_one<typename Tail::Output>(p.output, row, static_cast<float>(total) * per_element);
    }
  }

  __device__ __forceinline__ void first(int64 unit, int tile, uint32* counters) const {
    MomentsPass pass{p, scratch, unit * samples};
    mainloop.run(p, unit * samples, tile, pass);
    pass.store(tile);
    if (arrives_last(counters, Numbers::tiles)) {
      finish_moments(unit * samples);
      mainloop.finish_samples(p, unit * samples);
      publish(counters + 2, 1u);
    }
  }

  __device__ __forceinline__ void second(int64 unit, int tile, uint32* counters) const {
    if constexpr (Tail::has_norm) {
      if (threadIdx.x == 0) wait_for(counters + 2, 1u);
      __syncthreads();
    }
    ApplyPass pass{p, scratch, unit * samples};
    mainloop.run(p, unit * samples, tile, pass);
    pass.store(tile);
    if constexpr (Tail::has_mean || (!Tail::has_norm && samples > 1)) {
      if (arrives_last(counters + 1, Numbers::tiles)) {
        if constexpr (Tail::has_mean) finish_mean(unit * samples);
        if constexpr (!Tail::has_norm) mainloop.finish_samples(p, unit * samples);
      }
    }
  }

  // Whether any sample is to be computed; tested before weights are loaded.
  static __device__ __forceinline__ bool has_work(const Parameters& p) {
    if (p.only == nullptr) return true;
    uint32 any = redo_none;
    for (int64 i = threadIdx.x; i < p.only_words; i += Numbers::threads) any |= p.only[p.batch + i];
    return __syncthreads_or(static_cast<int>(any)) != 0;
  }

  // Adds the number of marked samples to the caller's counter, by the first block. A sample counts once,
  // however many groups of its convolution are marked. Sums of integers are the same in any order.
  static __device__ __forceinline__ void count_marked(const Parameters& p) {
    if (blockIdx.x != 0 || p.redone == nullptr || p.only == nullptr) return;
    constexpr int parts = Convolution::groups;
    const bool all = p.only[p.batch] == redo_all;
    uint32 count = 0;
    for (int64 n = threadIdx.x; n < p.batch / parts; n += Numbers::threads) {
      bool is_marked = all;
      for (int i = 0; i < parts && !is_marked; ++i) is_marked = p.only[n * parts + i] != 0;
      count += is_marked ? 1u : 0u;
    }
    count = __reduce_add_sync(0xffffffffu, count);
    if (threadIdx.x % 32 == 0 && count != 0) atomicAdd(p.redone, static_cast<uint64>(count));
  }

  __device__ __forceinline__ void run() const {
    // A mainloop of several samples writes these words and computes all samples.
    const bool all = samples > 1 || p.only == nullptr || p.only[p.batch] == redo_all;
    run_tickets(*this, (p.batch + samples - 1) / samples,
                [&](int64 unit) { return !all && p.only[unit] == 0; });
  }
};

}  // namespace onepass
