// A tail of many small slabs of a planar tensor, also one that ends in a mean: x waits in registers and is
// read once, y written once.
//
//   y = after(norm(before(x))), or its mean over a row
//
// `slab_threads` threads have a slab, `team` of them a row; a thread has `rows_each` rows, `vectors` of each.
// A block has `slabs` neighbouring slabs. Several blocks of a multiprocessor overlap loads, arithmetic and
// stores. In f32 the before-chain's values take the place of x; in 16 bits they would be rounded, and are
// computed twice.
#pragma once

#include "tail/parameters.cuh"
#include "tail/row_place.cuh"
#include "tail/tail.cuh"

namespace onepass {

// `Aligned`: all vectors of the launch lie on 16 bytes. `Edges`: rows have elements beside their vectors.
template <class Tail, class Numbers, bool Aligned, bool Edges>
struct TailSlabs {
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;

  using Place = RowPlace<Tail, Numbers, Edges>;
  static constexpr int edges = Place::edges;
  static constexpr int threads = Numbers::threads;
  static constexpr int team = Numbers::team;
  static constexpr int slab_threads = Numbers::slab_threads;
  static constexpr int slabs = threads / slab_threads;
  static constexpr int teams = slab_threads / team;  // of a slab
  static constexpr int rows = Tail::group_channels;
  static constexpr int groups = Tail::channels / rows;
  static constexpr bool holds = Input::bytes == 4;
  static_assert(Numbers::rows_each * teams >= rows && threads % 32 == 0);
  static_assert(slab_threads <= 32 || slabs == 1);

  struct Shared {
    float scratch[4 * threads / 32];
    float rows[teams][threads / 32];  // sums of a row's warps
  };

  const Parameters& p;
  Shared& shared;

  // What a thread has of its rows: `Count` pieces of `Width` elements a row.
  template <int Width, int Count>
  struct Held {
    Packed<Input, Width> x[Numbers::rows_each][Count > 0 ? Count : 1];
  };

  struct Row {
    float before[Before::channel_operands > 0 ? Before::channel_operands : 1];
    float after[After::channel_operands > 0 ? After::channel_operands : 1];
    float scale, bias;
  };

  // The values before the norm. `again`: the second time.
  template <bool again, int Width>
  __device__ __forceinline__ void activate(const Packed<Input, Width>& x, int64 index, const Row& row,
                                           float (&h)[Width]) const {
    x.unpack(h);
    if constexpr (again && holds) return;
    typename Before::template Tensors<Width> tensors;
    load_tensors<Aligned>(tensors, p, index);
#pragma unroll
    for (int k = 0; k < Width; ++k) h[k] = Before::value(h[k], row.before, tensors, k);
  }

  using Sums = PivotSums<2>;

  template <int Width>
  __device__ __forceinline__ void take(Packed<Input, Width>& x, int64 index, const Row& row, float& count,
                                       Sums& sums) const {
    float h[Width];
    activate<false>(x, index, row, h);
    if (count == 0.0f) sums.pivot = Sums::mean_of(h);
#pragma unroll
    for (int k = 0; k < Width; ++k) sums.add(h[k], k);
    count += static_cast<float>(Width);
    if constexpr (holds) x.pack(h);
  }

  template <int Width>
  __device__ __forceinline__ void write(Packed<Input, Width>& x, int64 index, const Row& row, float mean,
                                        float& sum) const {
    if constexpr (!holds) forget_floats(p, x);
    float h[Width];
    activate<true>(x, index, row, h);
    typename After::template Tensors<Width> tensors;
    load_tensors<Aligned>(tensors, p, index);
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      h[k] = After::value(normalise(h[k], mean, row.scale, row.bias), row.after, tensors, k);
      if constexpr (Tail::has_mean) sum += h[k];
    }
    if constexpr (!Tail::has_mean) {
      Packed<typename Tail::Output, Width> y;
      y.pack(h);
      y.store(p.output, index, Aligned || is_aligned(p, aligned_output));
    }
  }

  // The mean of a row from its threads' sums, in one of them. All threads of the block call it.
  __device__ __forceinline__ void write_mean(int64 row_index, bool exists, float sum) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
    sum = lanes_sum<(team < 32 ? team : 32)>(sum);
    if constexpr (team > 32) {
      constexpr int warps = team / 32;
      float* const of_row = shared.rows[threadIdx.x / team];
      __syncthreads();  // the row before has been read
      if (threadIdx.x % 32 == 0) of_row[threadIdx.x % team / 32] = sum;
      __syncthreads();
      sum = 0.0f;
#pragma unroll
      for (int w = 0; w < warps; ++w) sum += of_row[w];
    }
    if (exists && threadIdx.x % team == 0) {
      store_one<typename Tail::Output>(p.output, row_index, sum * per_element);
    }
  }

  __device__ __forceinline__ void run() const {
    const int64 all = p.batch * groups;
    int64 slab = static_cast<int64>(blockIdx.x) * slabs + threadIdx.x / slab_threads;
    const bool in_range = slab < all;
    if (!in_range) slab = all - 1;
    const int64 n = slab / groups;
    const int first_channel = static_cast<int>(slab - n * groups) * rows;
    const int64 begin = slab * (static_cast<int64>(rows) * Tail::spatial);

    Held<Numbers::width, Numbers::vectors> held;
    Held<1, edges> beside;
#pragma unroll
    for (int r = 0; r < Numbers::rows_each; ++r) {
      const Place place(p, begin, r, in_range);
#pragma unroll
      for (int i = 0; i < Numbers::vectors; ++i) {
        if (place.has(i)) {
          held.x[r][i].template load<true>(p.input, place.index(i), Aligned || is_aligned(p, aligned_input));
        }
      }
#pragma unroll
      for (int e = 0; e < edges; ++e) {
        if (place.has_edge(e)) beside.x[r][e].load(p.input, place.edge(e), true);
      }
    }
    Row row[Numbers::rows_each];
#pragma unroll
    for (int r = 0; r < Numbers::rows_each; ++r) {
      const int of_slab = Place::row_of(r);
      const int c = first_channel + (rows % teams == 0 || of_slab < rows ? of_slab : 0);
      Before::load_channel(p, n, c, row[r].before);
      After::load_channel(p, n, c, row[r].after);
      row[r].scale = Tail::weight(p, c);
      row[r].bias = Tail::bias(p, c);
    }

    float count = 0.0f;
    Sums sums;
#pragma unroll
    for (int r = 0; r < Numbers::rows_each; ++r) {
      const Place place(p, begin, r, in_range);
#pragma unroll
      for (int i = 0; i < Numbers::vectors; ++i) {
        if (place.has(i)) take(held.x[r][i], place.index(i), row[r], count, sums);
      }
#pragma unroll
      for (int e = 0; e < edges; ++e) {
        if (place.has_edge(e)) take(beside.x[r][e], place.edge(e), row[r], count, sums);
      }
    }
    ExactMoments own{count, 0.0f, 0.0f, 0.0f};
    float moved, mean, low, m2;
    sums.finish(count, moved, own.m2);
    own.mean = sum_and_rest(sums.pivot, moved, own.low);
    constexpr float elements = static_cast<float>(rows) * static_cast<float>(Tail::spatial);
    team_moments<slab_threads, threads>(own, elements, shared.scratch, mean, low, m2);
    const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
    if (p.statistics != nullptr && in_range && threadIdx.x % slab_threads == 0) {
      p.statistics[2 * slab] = mean;
      p.statistics[2 * slab + 1] = rstd;
    }

#pragma unroll
    for (int r = 0; r < Numbers::rows_each; ++r) {
      const Place place(p, begin, r, in_range);
      row[r].scale *= rstd;
      row[r].bias = fmaf(-low, row[r].scale, row[r].bias);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Numbers::vectors; ++i) {
        if (place.has(i)) write(held.x[r][i], place.index(i), row[r], mean, sum);
      }
#pragma unroll
      for (int e = 0; e < edges; ++e) {
        if (place.has_edge(e)) write(beside.x[r][e], place.edge(e), row[r], mean, sum);
      }
      if constexpr (Tail::has_mean) {
        write_mean(slab * rows + Place::row_of(r), place.exists, sum);
      }
    }
  }
};

}  // namespace onepass
