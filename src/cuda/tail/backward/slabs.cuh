// The gradients of a tail of many small slabs: x and dy wait in registers, are read once, and dx is written
// once. The formulas are those of element.cuh.
//
// `slab_threads` threads have a slab, `team` of them a row; a thread has `rows_each` rows, `vectors` of each.
// A block has `slabs` neighbouring groups of one sample, then the same of its next sample. Several blocks of
// a multiprocessor overlap loads, arithmetic and stores. A block leaves the sums of its rows over its
// samples; the last block of the same groups adds them up, always in the same order.
#pragma once

#include "tail/backward/element.cuh"
#include "tail/backward/segments.cuh"
#include "tail/row_place.cuh"

namespace onepass {

// `Aligned`: all vectors of the launch lie on 16 bytes. `Edges`: rows have elements beside their vectors.
template <class Tail, class Numbers, bool Aligned, bool Edges>
struct TailBackwardSlabs {
  using Element = TailBackwardElement<Tail>;
  using Parameters = typename Element::Parameters;

  using Place = RowPlace<Tail, Numbers, Edges>;
  static constexpr int edges = Place::edges;  // of a thread in a row
  static constexpr int slabs = Numbers::threads / Numbers::slab_threads;
  static constexpr int teams = Numbers::slab_threads / Numbers::team;  // of a slab
  static constexpr int rows = Element::rows;
  static constexpr int groups = Element::groups;
  static constexpr int chunks = (groups + slabs - 1) / slabs;  // of a sample's groups, each a block's
  static constexpr int block_rows = slabs * rows;
  static constexpr int spatial = Place::spatial;
  static constexpr int total_sums = Element::total_sums;
  static constexpr int lanes = Numbers::team < 32 ? Numbers::team : 32;  // of a row in one warp
  static constexpr int row_warps = Numbers::team / lanes;
  static constexpr int slab_lanes = Numbers::slab_threads < 32 ? Numbers::slab_threads : 32;
  static constexpr int slab_warps = Numbers::slab_threads / slab_lanes;
  static_assert(Numbers::rows_each * teams >= rows && Numbers::threads % 32 == 0);
  // In f32 dz takes the place of dy; in 16 bits it would be rounded, and is computed twice.
  static constexpr bool holds = !Tail::has_mean && Tail::OutputGradient::bytes == 4;

  struct Shared {
    float4 exchange[slabs][slab_warps];                                     // sums of a slab's warps
    float parts[row_warps][Tail::wants_sums ? block_rows : 1][total_sums];  // of a sample
    double totals[Tail::wants_sums ? block_rows : 1][total_sums];           // of the block's samples
    double lanes_of_sums[Tail::wants_sums ? Numbers::threads : 1];
  };

  const Parameters& p;
  Shared& shared;

  static __device__ __forceinline__ int own_slab() { return threadIdx.x / Numbers::slab_threads; }
  static __device__ __forceinline__ int lane() { return Place::lane(); }
  static __device__ __forceinline__ int row_warp() { return lane() / lanes; }
  static __device__ __forceinline__ int row_of(int r) { return Place::row_of(r); }

  static __device__ __forceinline__ void sync_slab() {
    if constexpr (slab_warps > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  // What a thread has of its rows: `Count` pieces of `Width` elements a row.
  template <int Width, int Count>
  struct Held {
    Packed<typename Tail::Input, Width> x[Numbers::rows_each][Count > 0 ? Count : 1];
    Packed<typename Tail::OutputGradient, Width> given[Tail::has_mean ? 1 : Numbers::rows_each]
                                                      [Count > 0 ? Count : 1];  // dy, or dz
  };

  template <int Width, int Count>
  __device__ __forceinline__ void load(Held<Width, Count>& held, int r, int i, int64 index) const {
    held.x[r][i].template load<true>(p.input, index, Aligned || is_aligned(p, aligned_input));
    if constexpr (!Tail::has_mean) {
      held.given[r][i].template load<true>(p.output_gradient, index,
                                           Aligned || is_aligned(p, aligned_output_gradient));
    }
  }

  template <int Width, int Count>
  static __device__ __forceinline__ void read_given(const Held<Width, Count>& held, int r, int i,
                                                    const typename Element::Row& row, float (&given)[Width]) {
    if constexpr (Tail::has_mean) {
#pragma unroll
      for (int k = 0; k < Width; ++k) given[k] = row.dy;
    } else {
      held.given[r][i].unpack(given);
    }
  }

  template <int Width, int Count>
  __device__ __forceinline__ void first(Held<Width, Count>& held, int r, int i, int64 index,
                                        const typename Element::Row& row,
                                        typename Element::Sums& sums) const {
    float x[Width], given[Width];
    held.x[r][i].unpack(x);
    read_given(held, r, i, row, given);
    typename Tail::Before::template Tensors<Width> before;
    load_tensors<Aligned>(before, p, index);
    typename Tail::After::template Tensors<Width> after;
    load_tensors<Aligned>(after, p, index);
    typename Tail::After::template TensorGradients<Width> gradients;
    float channel_gradients[Tail::After::channel_operands > 0 ? Tail::After::channel_operands : 1];
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      const float d = distance_from(Tail::Before::value(x[k], row.before, before, k), row.mean);
      const float dz = Element::normed_gradient(row, d, after, k, given[k], channel_gradients, gradients);
      Element::add(sums, dz, d, channel_gradients);
      given[k] = dz;
    }
    if constexpr (holds) held.given[r][i].pack(given);
    gradients.store(p, index);
  }

  template <int Width, int Count>
  __device__ __forceinline__ void second(Held<Width, Count>& held, int r, int i, int64 index,
                                         const typename Element::Row& row,
                                         const typename Element::Affine& affine, float* before_totals) const {
    float value[Width], given[Width];
    if constexpr (Tail::Input::bytes == 2) forget_floats(p, held.x[r][i]);
    if constexpr (!Tail::has_mean && Tail::OutputGradient::bytes == 2) forget_floats(p, held.given[r][i]);
    held.x[r][i].unpack(value);
    read_given(held, r, i, row, given);
    typename Tail::Before::template Tensors<Width> before;
    load_tensors<Aligned>(before, p, index);
    typename Tail::After::template Tensors<Width> after;
    if constexpr (!holds) load_tensors<Aligned>(after, p, index);
    typename Tail::Before::template TensorGradients<Width> gradients;
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      value[k] = Element::template second<Width, holds>(row, affine, value[k], given[k], before, after, k,
                                                        gradients, before_totals);
    }
    Packed<typename Tail::InputGradient, Width> dx;
    dx.pack(value);
    dx.store(p.input_gradient, index, Aligned || is_aligned(p, aligned_input_gradient));
    gradients.store(p, index);
  }

  __device__ __forceinline__ float* parts_of(int warp, int r) const {
    return shared.parts[warp][own_slab() * rows + row_of(r)];
  }
  __device__ __forceinline__ double* totals_of(int r) const {
    return shared.totals[own_slab() * rows + row_of(r)];
  }
  // The thread that keeps the totals of its team's rows.
  static __device__ __forceinline__ bool leads() { return lane() == 0; }

  // The sums of a row over its team, as one value for each of its warps.
  __device__ __forceinline__ void leave(int r, bool exists, int i, float value) const {
    value = lanes_sum<lanes>(value);
    if (exists && lane() % lanes == 0) parts_of(row_warp(), r)[i] = value;
  }
  __device__ __forceinline__ float left(int r, int i) const {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < row_warps; ++w) sum += parts_of(w, r)[i];
    return sum;
  }

  // The slab's means of gamma dz, gamma dz xhat and xhat from a thread's sums.
  __device__ __forceinline__ float4 slab_means(float4 own) const {
    own.x = lanes_sum<slab_lanes>(own.x);
    own.y = lanes_sum<slab_lanes>(own.y);
    own.z = lanes_sum<slab_lanes>(own.z);
    if constexpr (slab_warps > 1) {
      if (threadIdx.x % 32 == 0) shared.exchange[own_slab()][threadIdx.x % Numbers::slab_threads / 32] = own;
      __syncthreads();
      own = shared.exchange[own_slab()][0];
#pragma unroll
      for (int w = 1; w < slab_warps; ++w) {
        const float4 other = shared.exchange[own_slab()][w];
        own.x += other.x;
        own.y += other.y;
        own.z += other.z;
      }
    }
    constexpr float per_element = 1.0f / static_cast<float>(static_cast<int64>(rows) * spatial);
    return {own.x * per_element, own.y * per_element, own.z * per_element, 0.0f};
  }

  __device__ __forceinline__ void run_sample(int64 n, int group) const {
    const bool in_range = groups % slabs == 0 || group < groups;
    if (groups % slabs != 0 && !in_range) group = 0;
    const int64 begin = (n * Tail::channels + static_cast<int64>(group) * rows) * spatial;
    Held<Numbers::width, Numbers::vectors> held;
    Held<1, edges> beside;
#pragma unroll
    for (int r = 0; r < Numbers::rows_each; ++r) {
      const Place place(p, begin, r, in_range);
#pragma unroll
      for (int i = 0; i < Numbers::vectors; ++i) {
        if (place.has(i)) load(held, r, i, place.index(i));
      }
#pragma unroll
      for (int e = 0; e < edges; ++e) {
        if (place.has_edge(e)) load(beside, r, e, place.edge(e));
      }
    }
    typename Element::Row row[Numbers::rows_each];
#pragma unroll
    for (int r = 0; r < Numbers::rows_each; ++r) {
      row[r] = Element::row_values(p, n, group, rows % teams == 0 || row_of(r) < rows ? row_of(r) : 0);
    }

    float4 own{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < Numbers::rows_each; ++r) {
      const Place place(p, begin, r, in_range);
      typename Element::Sums sums;
#pragma unroll
      for (int i = 0; i < Numbers::vectors; ++i) {
        if (place.has(i)) first(held, r, i, place.index(i), row[r], sums);
      }
#pragma unroll
      for (int e = 0; e < edges; ++e) {
        if (place.has_edge(e)) first(beside, r, e, place.edge(e), row[r], sums);
      }
      sums.product *= row[r].rstd;
      sums.distance *= row[r].rstd;
      own.x = fmaf(row[r].gamma, sums.dz, own.x);
      own.y = fmaf(row[r].gamma, sums.product, own.y);
      own.z += sums.distance;
      if constexpr (Tail::wants_sums) {
        leave(r, place.exists, 0, sums.dz);
        leave(r, place.exists, 1, sums.product);
#pragma unroll
        for (int s = 0; s < Element::after_sums; ++s) leave(r, place.exists, 2 + s, sums.after[s]);
      }
    }
    const float4 means = slab_means(own);
    if (Tail::wants_sums && leads()) {
#pragma unroll
      for (int r = 0; r < Numbers::rows_each; ++r) {
        if (!Place(p, begin, r, in_range).exists) continue;
        const float dz = left(r, 0);
        totals_of(r)[0] += static_cast<double>(dz);
        totals_of(r)[1] += static_cast<double>(fmaf(-means.z, dz, left(r, 1)));
#pragma unroll
        for (int s = 2; s < 2 + Element::after_sums; ++s) totals_of(r)[s] += static_cast<double>(left(r, s));
      }
    }

#pragma unroll
    for (int r = 0; r < Numbers::rows_each; ++r) {
      const Place place(p, begin, r, in_range);
      const typename Element::Affine affine = Element::affine_of(row[r], means.x, means.y, means.z);
      float before_totals[Element::before_sums > 0 ? Element::before_sums : 1] = {};
#pragma unroll
      for (int i = 0; i < Numbers::vectors; ++i) {
        if (place.has(i)) second(held, r, i, place.index(i), row[r], affine, before_totals);
      }
#pragma unroll
      for (int e = 0; e < edges; ++e) {
        if (place.has_edge(e)) second(beside, r, e, place.edge(e), row[r], affine, before_totals);
      }
#pragma unroll
      for (int s = 0; s < Element::before_sums; ++s) {
        leave(r, place.exists, 2 + Element::after_sums + s, before_totals[s]);
      }
    }
    if constexpr (Element::before_sums > 0) {
      sync_slab();
#pragma unroll
      for (int r = 0; r < Numbers::rows_each; ++r) {
        if (!leads() || !Place(p, begin, r, in_range).exists) continue;
#pragma unroll
        for (int s = 2 + Element::after_sums; s < total_sums; ++s) {
          totals_of(r)[s] += static_cast<double>(left(r, s));
        }
      }
    }
  }

  // A chunk's sums over the samples of each block, which lie beside each other, added up over the blocks.
  __device__ __forceinline__ void reduce(int chunk, int segments) const {
    constexpr int columns = block_rows * total_sums;
    const double* from =
        reinterpret_cast<const double*>(p.parts) + static_cast<int64>(chunk) * segments * columns;
    sum_segments<columns, Numbers::threads>(from, segments, &shared.totals[0][0], shared.lanes_of_sums);
    for (int r = static_cast<int>(threadIdx.x); r < block_rows; r += Numbers::threads) {
      const int64 c = static_cast<int64>(chunk) * block_rows + r;
      const auto channel_sum = [&](int i) { return static_cast<float>(shared.totals[r][i]); };
      const auto of_sample = [](int64, int) { return 0.0f; };  // such gradients are refused
      if (c < Tail::channels) Tail::store_channel_gradients(p, c, channel_sum, of_sample);
    }
  }

  __device__ __forceinline__ void run() const {
    const auto segments = static_cast<int>(gridDim.x / chunks);
    const int chunk = static_cast<int>(blockIdx.x) / segments;
    const int segment = static_cast<int>(blockIdx.x) - chunk * segments;
    const int64 begin = segment * p.wave_units;
    const int64 end = begin + p.wave_units < p.batch ? begin + p.wave_units : p.batch;
    constexpr int columns = block_rows * total_sums;
    if constexpr (Tail::wants_sums) {
      for (int i = static_cast<int>(threadIdx.x); i < columns; i += Numbers::threads)
        (&shared.totals[0][0])[i] = 0.0;
      __syncthreads();
    }
#pragma unroll 1
    for (int64 n = begin; n < end; ++n) {
      run_sample(n, chunk * slabs + own_slab());
      sync_slab();  // what the slab's threads have exchanged is free again
    }
    if constexpr (Tail::wants_sums) {
      __syncthreads();
      double* to = reinterpret_cast<double*>(p.parts) + static_cast<int64>(blockIdx.x) * columns;
      for (int i = static_cast<int>(threadIdx.x); i < columns; i += Numbers::threads)
        to[i] = (&shared.totals[0][0])[i];
      if (arrives_last(p.control + chunk, static_cast<uint32>(segments))) reduce(chunk, segments);
    }
  }
};

}  // namespace onepass
