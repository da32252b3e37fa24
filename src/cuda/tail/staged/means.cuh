// Means over rows in tail_staged, where a row may be spread over vectors, warps and blocks of a cluster.
//
// A warp goes over its part of a slab in one run or in several, each upwards. Of every row that a run meets
// it leaves a sum in the workspace, in a place of its own. When a cluster has done all of its slabs, it adds
// up the sums of each row, in the order of warps and runs.
#pragma once

#include "tail/staged/by_memory.cuh"

namespace onepass {

// A warp's part as one run.
template <int vectors>
struct OneRun {
  static constexpr int count = 1;
  static constexpr __device__ __forceinline__ int first(int) { return 0; }
  static constexpr __device__ __forceinline__ int lines(int) { return vectors; }
};

// `Runs`: their number, and the first line of each and its lines.
template <class Tail, class Numbers, class Runs>
struct StagedMeans {
  using S = StagedSizes<Tail, Numbers>;
  static_assert(!Tail::has_mean || S::line <= S::spatial);  // a line lies in two rows at most

  // Rows that a run may meet.
  static constexpr __device__ __forceinline__ int rows_of(int run) {
    return Runs::lines(run) > 0 ? (Runs::lines(run) * S::line + S::spatial - 2) / S::spatial + 1 : 0;
  }
  // The places of a warp; those of its first runs.
  static constexpr __device__ __forceinline__ int places_before(int run) {
    int places = 0;
    for (int i = 0; i < run; ++i) places += rows_of(i);
    return places;
  }
  static constexpr int warp_places = places_before(Runs::count);
  // Of a slab: those of the cluster's warps, then sums of the elements before the vectors and after them.
  static constexpr int slab_places = S::all_warps * warp_places + 2;

  template <class Parameters>
  static __device__ __forceinline__ float* places_of(const Parameters& p, int slab) {
    return p.sums + static_cast<int64>(slab) * slab_places;
  }

  // The sums of a thread in a run: of the row that the run is in, and of the next one.
  class Sums {
   public:
    // Begins a run at this position of the slab. All lanes call what is no sum of a lane's own.
    template <class Parameters>
    __device__ __forceinline__ void begin(const Parameters& p, int slab, int warp, int run, int position) {
      if constexpr (Tail::has_mean) {
        end_ = (position / S::spatial + 1) * S::spatial;
        place_ = places_of(p, slab) + warp * warp_places + places_before(run);
        row_ = next_ = 0.0f;
      }
    }
    // The next line, or several that lie in one row, begins at this position.
    __device__ __forceinline__ void enter(int position) {
      if constexpr (Tail::has_mean && !S::few_rows) {
        if (position >= end_) leave_row();
      }
    }
    // A vector that lies in the row of the position that was entered.
    __device__ __forceinline__ void add_whole(int position, const float (&value)[S::width]) {
      if constexpr (Tail::has_mean) {
        float sum[S::width / 2];
#pragma unroll
        for (int k = 0; k < S::width / 2; ++k) sum[k] = value[k] + value[k + S::width / 2];
#pragma unroll
        for (int count = S::width / 4; count > 0; count /= 2) {
#pragma unroll
          for (int k = 0; k < count; ++k) sum[k] += sum[k + count];
        }
        if (S::few_rows && position >= end_) {
          next_ += sum[0];
        } else {
          row_ += sum[0];
        }
      }
    }
    // A vector at `position`, wherever a row ends.
    __device__ __forceinline__ void add(int position, const float (&value)[S::width]) {
      if constexpr (Tail::has_mean) {
#pragma unroll
        for (int k = 0; k < S::width; ++k) {
          if (position + k < end_) {
            row_ += value[k];
          } else {
            next_ += value[k];
          }
        }
      }
    }
    // Ends a run that has elements before this position.
    __device__ __forceinline__ void finish(int position) {
      if constexpr (Tail::has_mean) {
        leave_row();
        if (position > end_ - S::spatial) leave_row();
      }
    }

   private:
    __device__ __forceinline__ void leave_row() {
      const float sum = lanes_sum<32>(row_);
      if (threadIdx.x % 32 == 0) __stcg(place_, sum);
      ++place_;
      row_ = next_;
      next_ = 0.0f;
      end_ += S::spatial;
    }

    float row_, next_;
    int end_;  // of the row, in the slab
    float* place_;
  };

  // The elements outside of vectors: those of the first `head` lanes lie in the first row, the others' in the
  // last one. By the warp that has them.
  template <class Parameters>
  static __device__ __forceinline__ void leave_edges(const Parameters& p, int slab, int head, bool has_edge,
                                                     float value) {
    const int lane = threadIdx.x % 32;
    const float before = lanes_sum<32>(has_edge && lane < head ? value : 0.0f);
    const float after = lanes_sum<32>(has_edge && lane >= head ? value : 0.0f);
    if (lane == 0) {
      float* const places = places_of(p, slab) + S::all_warps * warp_places;
      __stcg(places, before);
      __stcg(places + 1, after);
    }
  }

  // Lanes of a warp that add up a row: of every warp that has elements of it, its runs.
  static constexpr int least_lines =
      S::slab_elements / S::line > S::all_warps ? S::slab_elements / S::line / S::all_warps : 1;
  static constexpr int team = lanes_for(Runs::count * (S::spatial / (least_lines * S::line) + 2));

  // The sum of one row of a slab, in all lanes of its team.
  template <class Parameters, class SpreadOf>
  static __device__ __forceinline__ float sum_row(const Parameters& p, int slab, int row, bool exists,
                                                  SpreadOf&& spread_of) {
    const int64 first = static_cast<int64>(slab) * S::slab_elements;
    const int head = static_cast<int>(-(first + p.phase) & (S::width - 1));
    const int count = (S::slab_elements - head) / S::width;
    const int vectors_end = head + count * S::width;
    const typename S::Spread spread = spread_of(count);
    const int begin = row * S::spatial, end = begin + S::spatial;
    const int first_warp = spread.warp_of((begin > head ? begin - head : 0) / S::line);
    const int last_warp = spread.warp_of(((end < vectors_end ? end : vectors_end) - 1 - head) / S::line);
    const int parts = exists ? (last_warp - first_warp + 1) * Runs::count : 0;
    const float* const places = places_of(p, slab);
    float sum = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x % team; i < parts; i += team) {
      const int warp = first_warp + i / Runs::count;
      const int run = i % Runs::count;
      const int line = spread.first_vector(warp) / 32 + Runs::first(run);
      const int last = spread.first_vector(warp + 1) / 32;
      const int last_of_run = line + Runs::lines(run) < last ? line + Runs::lines(run) : last;
      const int from = head + line * S::line;
      const int to = head + last_of_run * S::line < vectors_end ? head + last_of_run * S::line : vectors_end;
      if (from < to && from < end && to > begin) {
        sum +=
            load_shared_by_blocks(places + warp * warp_places + places_before(run) + row - from / S::spatial);
      }
    }
    if (exists && threadIdx.x % team == 0) {
      const float* const edges = places + S::all_warps * warp_places;
      if (row == 0 && head > 0) sum += load_shared_by_blocks(edges);
      if (end == S::slab_elements && vectors_end < end) sum += load_shared_by_blocks(edges + 1);
    }
    return lanes_sum<team>(sum);
  }

  // The means of the cluster's slabs. spread_of(vectors): how they are spread over warps.
  template <class Parameters, class SpreadOf>
  static __device__ __forceinline__ void write(const Parameters& p, int block, int slabs, int clusters,
                                               SpreadOf&& spread_of) {
    constexpr int rows = Tail::group_channels;
    constexpr float per_element = 1.0f / static_cast<float>(S::spatial);
    constexpr int teams = S::threads / team;
    if constexpr (S::by_memory) {
      sync_by_memory<S>(p);
    } else {
      sync_cluster<S>();
    }
    const int first_slab = static_cast<int>(blockIdx.x) / S::blocks;
    const int own_slabs = first_slab < slabs ? (slabs - first_slab + clusters - 1) / clusters : 0;
    const int64 all = static_cast<int64>(own_slabs) * rows;
#pragma unroll 1
    for (int64 i = block * teams; i < all; i += S::blocks * teams) {
      const int64 own = i + threadIdx.x / team;
      const bool exists = own < all;
      const int64 index = exists ? own : 0;
      const int slab = first_slab + static_cast<int>(index / rows) * clusters;
      const int row = static_cast<int>(index % rows);
      const float sum = sum_row(p, slab, row, exists, spread_of);
      if (exists && threadIdx.x % team == 0) {
        store_one<typename Tail::Output>(p.output, static_cast<int64>(slab) * rows + row, sum * per_element);
      }
    }
  }
};

}  // namespace onepass
