// A tail of tensors with channels after space whose slabs stay on the chip: x is read once, y written once.
//
//   y = after(norm(before(x))), mean and variance over a group's channels at all positions of a sample
//
// A unit is a strip of a sample: `strip` neighbouring channels that are whole slabs, at every position. A
// cluster of `blocks` blocks holds it in shared memory as it lies in memory, each block a range of positions.
// A thread has one vector of `width` channels at every `lanes`-th position of its block. It copies them
// asynchronously, and no other thread reads them. The before-chain is computed twice, for the moments and for
// the output. Blocks exchange the moments of their slabs through distributed shared memory.
#pragma once

#include "device/barrier.cuh"
#include "tail/parameters.cuh"
#include "tail/tail.cuh"

namespace onepass {

// `Aligned`: all vectors of the launch lie on 16 bytes. Others are loaded by element and not asynchronously.
template <class Tail, class Numbers, bool Aligned>
struct TailStrips {
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;

  static constexpr int width = Numbers::width;
  static constexpr int threads = Numbers::threads;
  static constexpr int vectors = Numbers::vectors;  // of a thread
  static constexpr int blocks = Numbers::blocks;    // of the cluster
  static constexpr int strip = Numbers::strip;
  static constexpr int strips = Tail::channels / strip;
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int share = (spatial + blocks - 1) / blocks;  // positions of a block

  // A warp has `warp_columns` neighbouring vectors of some positions, a set of warps all of the strip.
  static constexpr int columns = strip / width;
  static constexpr int warp_columns = Numbers::warp_columns;
  static constexpr int warp_positions = 32 / warp_columns;
  static constexpr int set_warps = columns / warp_columns;
  static constexpr int sets = threads / 32 / set_warps;
  static constexpr int lanes = sets * warp_positions;  // positions that the block has at a time
  static_assert(set_warps * warp_columns * width == strip && sets * set_warps * 32 == threads);
  static_assert(vectors * lanes >= share && (vectors - 1) * lanes < share);

  // A vector's channels of one slab: `piece` of them beside each other, whatever the vector.
  static constexpr int common(int a, int b) { return b == 0 ? a : common(b, a % b); }
  static constexpr int rows = Tail::group_channels;
  static constexpr int piece = common(width, rows);
  static constexpr int pieces = width / piece;      // of a vector
  static constexpr int slab_pieces = rows / piece;  // at a position
  static constexpr int slabs = strip / rows;
  static_assert(slabs * rows == strip);

  // Copies are waited for in chunks: the first are summed while others arrive.
  static constexpr int chunks = vectors < 4 ? vectors : 4;
  static constexpr int chunk = (vectors + chunks - 1) / chunks;
  static constexpr int at_once = Numbers::at_once;  // vectors of a thread that are written together
  static constexpr int vector_bytes = width * Input::bytes;

  struct Shared {
    alignas(16) unsigned char values[vectors][threads][vector_bytes];
    float4 parts[sets][strip / piece];  // moments of a set's pieces: count, mean, M2, rest of the mean
    float4 exchange[blocks > 1 ? slabs : 1][blocks];  // moments of the cluster's blocks
    float4 norm[slabs];                               // mean, its rest, 1 / deviation
    uint64 received;                                  // what the cluster's blocks sent
  };

  const Parameters& p;
  Shared& shared;

  // What of a unit this thread has.
  struct Place {
    int block;
    int64 n;
    int channel;    // of the sample: the vector's first
    int column;     // of the strip
    int set;        // of warps
    int positions;  // of the block
    int mine;       // vectors
    int64 index;    // of the first one

    __device__ __forceinline__ Place() {
      const int64 unit = blockIdx.x / blocks;
      block = static_cast<int>(blockIdx.x % blocks);
      n = unit / strips;
      const int warp = threadIdx.x / 32;
      const int lane = threadIdx.x % 32;
      column = warp % set_warps * warp_columns + lane % warp_columns;
      set = warp / set_warps;
      channel = static_cast<int>(unit % strips) * strip + column * width;
      const int first = block * share;
      const int left = spatial - first;
      positions = left < 0 ? 0 : left < share ? left : share;
      const int own = set * warp_positions + lane / warp_columns;
      mine = positions > own ? (positions - own + lanes - 1) / lanes : 0;
      index = (n * spatial + first + own) * Tail::channels + channel;
    }
    __device__ __forceinline__ int64 index_of(int i) const {
      return index + static_cast<int64>(i) * (lanes * Tail::channels);
    }
  };

  // --- Copies ---
  __device__ __forceinline__ unsigned char* value(int i) const { return shared.values[i][threadIdx.x]; }

  __device__ __forceinline__ void copy(int i, int64 index) const {
    if constexpr (Aligned) {
      const char* from = static_cast<const char*>(p.input) + index * Input::bytes;
      const uint32 to = barrier::shared_address(value(i));
      if constexpr (vector_bytes % 16 == 0) {
#pragma unroll
        for (int b = 0; b < vector_bytes; b += 16) {
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + b), "l"(from + b) : "memory");
        }
      } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(vector_bytes)
                     : "memory");
      }
    } else {
      Packed<Input, width> x;
      x.load(p.input, index, is_aligned(p, aligned_input));
      x.store_shared(value(i));
    }
  }

  __device__ __forceinline__ void copy_all(const Place& place) const {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
#pragma unroll 8
      for (int i = c * chunk; i < (c + 1) * chunk && i < vectors; ++i) {
        if (i < place.mine) copy(i, place.index_of(i));
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
  }

  // --- Moments ---
  using Sums = PivotSums<(piece > 1 ? piece / 2 : 1)>;
  using BeforeValues = ChannelValues<Before, width>;

  // The before-chain of vector `i`.
  __device__ __forceinline__ void activate(const Place& place, int i, const BeforeValues& before,
                                           float (&h)[width]) const {
    typename Before::template Tensors<width> tensors;
    load_tensors<Aligned>(tensors, p, place.index_of(i));
    Packed<Input, width> x;
    x.load_shared(value(i));
    x.unpack(h);
#pragma unroll
    for (int k = 0; k < width; ++k) h[k] = Before::value(h[k], before.value[k], tensors, k);
  }

  template <int c>
  __device__ __forceinline__ void take_chunks(const Place& place, const BeforeValues& before,
                                              Sums (&sums)[pieces]) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(chunks - 1 - c) : "memory");
    float h[width];
    if (c == 0 && place.mine > 0) {
      activate(place, 0, before, h);
#pragma unroll
      for (int j = 0; j < pieces; ++j) {
        float own[piece];
#pragma unroll
        for (int k = 0; k < piece; ++k) own[k] = h[j * piece + k];
        sums[j].pivot = Sums::mean_of(own);
      }
    }
    const int end = (c + 1) * chunk < place.mine ? (c + 1) * chunk : place.mine;
#pragma unroll 2
    for (int i = c * chunk; i < end; ++i) {
      activate(place, i, before, h);
#pragma unroll
      for (int k = 0; k < width; ++k) sums[k / piece].add(h[k], k % piece);
    }
    if constexpr (c + 1 < chunks) take_chunks<c + 1>(place, before, sums);
  }

  // The sum over the lanes of a warp that have the same channels, in each of them.
  static __device__ __forceinline__ float column_sum(float value) {
#pragma unroll
    for (int offset = 16; offset >= warp_columns; offset /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    return value;
  }

  // Moments of the warp's pieces, to shared memory: the mean first, as its distance from that of the first
  // position, then every lane's M2 moved to it. A lane has at most as many positions as those before it.
  __device__ __forceinline__ void leave_parts(const Place& place, const Sums (&sums)[pieces]) const {
    const float own_count = static_cast<float>(place.mine * piece);
    const float count = column_sum(own_count);
    const float per_element = count > 0.0f ? 1.0f / count : 0.0f;
#pragma unroll
    for (int j = 0; j < pieces; ++j) {
      ExactMoments own{own_count, 0.0f, 0.0f, 0.0f};
      float moved;
      sums[j].finish(own_count, moved, own.m2);
      own.mean = sum_and_rest(sums[j].pivot, moved, own.low);
      const float from = __shfl_sync(0xffffffffu, own.mean, threadIdx.x % warp_columns);
      const float distance = own_count > 0.0f ? own.distance(from) : 0.0f;
      moved = column_sum(own_count * distance) * per_element;
      const float m2 = column_sum(fmaf(own_count * (distance - moved), distance - moved, own.m2));
      if (threadIdx.x % 32 < warp_columns) {
        float low;
        const float mean = sum_and_rest(from, moved, low);
        shared.parts[place.set][place.column * pieces + j] = {count, mean, m2, low};
      }
    }
  }

  __device__ __forceinline__ void set_norm(const Place& place, int slab, float mean, float low,
                                           float m2) const {
    constexpr float elements = static_cast<float>(rows) * static_cast<float>(spatial);
    const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
    shared.norm[slab] = {mean, low, rstd, 0.0f};
    if (p.statistics != nullptr && place.block == 0) {
      const int64 index = blockIdx.x / blocks * static_cast<int64>(slabs) + slab;
      p.statistics[2 * index] = mean;
      p.statistics[2 * index + 1] = rstd;
    }
  }

  // f(slab, lane, in range) by `team` neighbouring lanes for each slab. All threads call it equally often.
  template <int team, class F>
  static __device__ __forceinline__ void for_each_slab(F&& f) {
    constexpr int teams = threads / team;
#pragma unroll 1
    for (int begin = 0; begin < slabs; begin += teams) {
      const int slab = begin + static_cast<int>(threadIdx.x) / team;
      f(slab < slabs ? slab : 0, static_cast<int>(threadIdx.x % team), slab < slabs);
    }
  }

  static constexpr int slab_parts = sets * slab_pieces;
  // Lanes that merge a slab's parts: as many as there are for all slabs at once.
  static constexpr int merge_team() {
    int team = 1;
    while (team < 32 && team < slab_parts && 2 * team * slabs <= threads) team *= 2;
    return team;
  }

  // The norm of each slab, in shared memory.
  __device__ __forceinline__ void reduce(const Place& place) const {
    __syncthreads();  // all parts are there
    constexpr int team = merge_team();
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      if (threadIdx.x == 0) barrier::expect(&shared.received, slabs * blocks * 16);
      __syncwarp();
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks have started
    }
#endif
    const float elements = static_cast<float>(rows * place.positions);
    const float per_element = elements > 0.0f ? 1.0f / elements : 0.0f;
    for_each_slab<team>([&](int slab, int lane, bool in_range) {
      ExactMoments own;
      for (int i = lane; in_range && i < slab_parts; i += team) {
        const float4 part = shared.parts[i / slab_pieces][slab * slab_pieces + i % slab_pieces];
        if (part.x > 0.0f) own.merge({part.x, part.y, part.z, part.w});
      }
      float from, moved, m2, low;
      lanes_moments<team>(own, per_element, from, moved, m2);
      const float mean = sum_and_rest(from, moved, low);
      if constexpr (blocks == 1) {
        if (in_range && lane == 0) set_norm(place, slab, mean, low, m2);
      } else {
#if __CUDA_ARCH__ >= 900
        for (int to = lane; in_range && to < blocks; to += team) {
          barrier::send(&shared.exchange[slab][place.block], float4{elements, mean, m2, low},
                        &shared.received, to);
        }
#endif
      }
    });
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      barrier::wait(&shared.received, 0);
      constexpr float per_slab = 1.0f / (static_cast<float>(rows) * static_cast<float>(spatial));
      for_each_slab<blocks>([&](int slab, int lane, bool in_range) {
        const float4 part = shared.exchange[slab][lane];
        float from, moved, m2, low;
        lanes_moments<blocks>(ExactMoments{part.x, part.y, part.z, part.w}, per_slab, from, moved, m2);
        const float mean = sum_and_rest(from, moved, low);
        if (in_range && lane == 0) set_norm(place, slab, mean, low, m2);
      });
    }
#endif
    __syncthreads();
  }

  // --- Output ---
  // What a thread's channels have besides x.
  struct Row {
    ChannelValues<After, width> after;
    float mean[pieces];
    float scale[width];
    float bias[width];

    // Before the moments are known: their loads are on their way meanwhile.
    __device__ __forceinline__ void fetch(const Parameters& p, const Place& place) {
      after.load(p, place.n, place.channel);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        scale[k] = Tail::weight(p, place.channel + k);
        bias[k] = Tail::bias(p, place.channel + k);
      }
    }
    __device__ __forceinline__ void normalise(const Shared& shared, const Place& place) {
#pragma unroll
      for (int j = 0; j < pieces; ++j) {
        const float4 norm = shared.norm[(place.column * pieces + j) / slab_pieces];
        mean[j] = norm.x;
#pragma unroll
        for (int k = j * piece; k < (j + 1) * piece; ++k) {
          scale[k] *= norm.z;
          bias[k] = fmaf(-norm.y, scale[k], bias[k]);
        }
      }
    }
  };

  using AfterTensors = typename After::template Tensors<width>[at_once];
  __device__ __forceinline__ void load_after(const Place& place, int first, AfterTensors& tensors) const {
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i < place.mine) load_tensors<Aligned>(tensors[i], p, place.index_of(first + i));
    }
  }

  // `tensors`: those of the first vectors, which are on their way since before the moments were known.
  __device__ __forceinline__ void write(const Place& place, const BeforeValues& before, const Row& row,
                                        AfterTensors& tensors) const {
#pragma unroll 1
    for (int first = 0; first < place.mine; first += at_once) {
      if (first > 0) load_after(place, first, tensors);
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (first + i >= place.mine) break;
        float h[width];
        activate(place, first + i, before, h);
#pragma unroll
        for (int k = 0; k < width; ++k) {
          const float normed = onepass::normalise(h[k], row.mean[k / piece], row.scale[k], row.bias[k]);
          h[k] = After::value(normed, row.after.value[k], tensors[i], k);
        }
        Packed<typename Tail::Output, width> y;
        y.pack(h);
        y.store(p.output, place.index_of(first + i), Aligned || is_aligned(p, aligned_output));
      }
    }
  }

  __device__ __forceinline__ void run() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      // No moments go to a block that has not started. The others are waited for when there are some.
      if (threadIdx.x == 0) barrier::initialise(&shared.received);
      __syncwarp();
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    }
#endif
    const Place place;
    copy_all(place);
    BeforeValues before;
    before.load(p, place.n, place.channel);
    Row row;
    row.fetch(p, place);
    Sums sums[pieces];
    take_chunks<0>(place, before, sums);
    AfterTensors tensors;
    load_after(place, 0, tensors);
    leave_parts(place, sums);
    reduce(place);
#if __CUDA_ARCH__ >= 900
    // None leaves before all have what was sent to them. Nothing written is released: that would wait for it.
    if constexpr (blocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    row.normalise(shared, place);
    write(place, before, row, tensors);
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      __syncwarp();
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
#endif
  }
};

}  // namespace onepass
