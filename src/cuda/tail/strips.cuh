// A tail of tensors with channels after space whose slabs stay on the chip: x is read once, y written once.
//
//   y = after(norm(before(x))), mean and variance over a group's channels at all positions of a sample
//
// A cluster of blocks holds a strip in shared memory as it lies in memory (tail/strip.cuh). A thread copies
// its vectors asynchronously, and no other thread reads them. The before-chain is computed twice, for the
// moments and for the output. Blocks exchange the moments of their slabs through distributed shared memory.
#pragma once

#include "device/barrier.cuh"
#include "tail/parameters.cuh"
#include "tail/strip.cuh"
#include "tail/tail.cuh"

namespace onepass {

// `Aligned`: all vectors of the launch lie on 16 bytes. Others are loaded by element and not asynchronously.
template <class Tail, class Numbers, bool Aligned>
struct TailStrips {
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;

  using S = Strip<Tail, Numbers>;
  using Place = typename S::Place;
  static constexpr int width = S::width;
  static constexpr int threads = S::threads;
  static constexpr int vectors = S::vectors;
  static constexpr int blocks = S::blocks;
  static constexpr int strip = S::strip;
  static constexpr int rows = S::rows;
  static constexpr int piece = S::piece;
  static constexpr int pieces = S::pieces;
  static constexpr int slabs = S::slabs;
  static constexpr int slab_pieces = S::slab_pieces;
  static constexpr int slab_parts = S::slab_parts;
  static constexpr int sets = S::sets;
  static constexpr int warp_columns = S::warp_columns;
  static constexpr int chunks = S::chunks;
  static constexpr int chunk = S::chunk;

  static constexpr int at_once = Numbers::at_once;  // vectors of a thread that are written together
  static constexpr int vector_bytes = width * Input::bytes;

  struct Shared {
    alignas(16) unsigned char values[vectors][threads][vector_bytes];
    float4 parts[sets][strip / piece];  // moments of a set's pieces: count, mean, M2, rest of the mean
    float4 exchange[blocks > 1 ? slabs : 1][blocks];              // moments of the cluster's blocks
    float4 norm[slabs];                                           // mean, its rest, 1 / deviation
    uint64 received;                                              // what the cluster's blocks sent
    float sums[Tail::has_mean ? (sets * strip + 3) / 4 * 4 : 2];  // of rows, where the block ends in a mean
  };

  const Parameters& p;
  Shared& shared;

  // --- Copies ---
  __device__ __forceinline__ unsigned char* value(int i) const { return shared.values[i][threadIdx.x]; }

  __device__ __forceinline__ void copy(int i, int64 index) const {
    if constexpr (Aligned) {
      S::template copy<vector_bytes>(barrier::shared_address(value(i)),
                                     static_cast<const char*>(p.input) + index * Input::bytes);
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
      S::commit();
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
    S::template wait_for_chunk<c>();
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

  // Moments of the warp's pieces, to shared memory: the mean first, as its distance from that of the first
  // position, then every lane's M2 moved to it. A lane has at most as many positions as those before it.
  __device__ __forceinline__ void leave_parts(const Place& place, const Sums (&sums)[pieces]) const {
    const float own_count = static_cast<float>(place.mine * piece);
    const float count = S::column_sum(own_count);
    const float per_element = count > 0.0f ? 1.0f / count : 0.0f;
#pragma unroll
    for (int j = 0; j < pieces; ++j) {
      ExactMoments own{own_count, 0.0f, 0.0f, 0.0f};
      float moved;
      sums[j].finish(own_count, moved, own.m2);
      own.mean = sum_and_rest(sums[j].pivot, moved, own.low);
      const float from = __shfl_sync(0xffffffffu, own.mean, threadIdx.x % warp_columns);
      const float distance = own_count > 0.0f ? own.distance(from) : 0.0f;
      moved = S::column_sum(own_count * distance) * per_element;
      const float m2 = S::column_sum(fmaf(own_count * (distance - moved), distance - moved, own.m2));
      if (S::leaves()) {
        float low;
        const float mean = sum_and_rest(from, moved, low);
        shared.parts[place.set][place.column * pieces + j] = {count, mean, m2, low};
      }
    }
  }

  __device__ __forceinline__ void set_norm(const Place& place, int slab, float mean, float low,
                                           float m2) const {
    constexpr float elements = static_cast<float>(rows) * static_cast<float>(Tail::spatial);
    const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
    shared.norm[slab] = {mean, low, rstd, 0.0f};
    if (p.statistics != nullptr && place.block == 0) {
      const int64 index = blockIdx.x / blocks * static_cast<int64>(slabs) + slab;
      p.statistics[2 * index] = mean;
      p.statistics[2 * index + 1] = rstd;
    }
  }

  // The norm of each slab, in shared memory.
  __device__ __forceinline__ void reduce(const Place& place) const {
    __syncthreads();  // all parts are there
    constexpr int team = S::merge_team();
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      if (threadIdx.x == 0) barrier::expect(&shared.received, slabs * blocks * 16);
      __syncwarp();
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks have started
    }
#endif
    const float elements = static_cast<float>(rows * place.positions);
    const float per_element = elements > 0.0f ? 1.0f / elements : 0.0f;
    S::template for_each_slab<team>([&](int slab, int lane, bool in_range) {
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
      constexpr float per_slab = 1.0f / (static_cast<float>(rows) * static_cast<float>(Tail::spatial));
      S::template for_each_slab<blocks>([&](int slab, int lane, bool in_range) {
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

  // Of a thread's rows, where the block ends in a mean.
  using RowSums = float[Tail::has_mean ? width : 1];

  // `tensors`: those of the first vectors, which are on their way since before the moments were known.
  __device__ __forceinline__ void write(const Place& place, const BeforeValues& before, const Row& row,
                                        AfterTensors& tensors, RowSums& sums) const {
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
          if constexpr (Tail::has_mean) sums[k] += h[k];
        }
        if constexpr (!Tail::has_mean) {
          Packed<typename Tail::Output, width> y;
          y.pack(h);
          y.store(p.output, place.index_of(first + i), Aligned || is_aligned(p, aligned_output));
        }
      }
    }
  }

  // The means of the strip's rows from sums of threads: warps, sets of them, then blocks, each of which
  // writes some rows.
  __device__ __forceinline__ void write_means(const Place& place, const RowSums& sums) const {
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const float sum = S::column_sum(sums[k]);
      if (S::leaves()) shared.sums[place.set * strip + place.column * width + k] = sum;
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < strip; c += threads) {
      float sum = 0.0f;
      for (int set = 0; set < sets; ++set) sum += shared.sums[set * strip + c];
      shared.sums[c] = sum;
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) barrier::cluster_sync();
#endif
    constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
    const int64 first = place.n * Tail::channels + (place.channel - place.column * width);
    for (int c = place.block * threads + static_cast<int>(threadIdx.x); c < strip; c += blocks * threads) {
      float sum = shared.sums[c];
#if __CUDA_ARCH__ >= 900
      if constexpr (blocks > 1) {
        sum = 0.0f;
        for (int b = 0; b < blocks; ++b) sum += barrier::load_of_block(&shared.sums[c], b);
      }
#endif
      store_one<typename Tail::Output>(p.output, first + c, sum * per_element);
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
    const Place place(blockIdx.x / blocks, static_cast<int>(blockIdx.x % blocks));
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
    if constexpr (blocks > 1 && !Tail::has_mean) {
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
#endif
    row.normalise(shared, place);
    RowSums sums_of_rows = {};
    write(place, before, row, tensors, sums_of_rows);
    if constexpr (Tail::has_mean) write_means(place, sums_of_rows);
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      __syncwarp();
      // Sums of rows have been read.
      if constexpr (Tail::has_mean) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
#endif
  }
};

}  // namespace onepass
