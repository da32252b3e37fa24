// A tail in one launch and at most two passes over the tensor, for slabs of any size and both layouts.
//
//   pass 1   x -> before-chain -> moments of each row's pieces; the last block of a unit merges them
//   pass 2   x -> before-chain -> norm -> after-chain -> y, or its sums where the block ends in a mean
//
// Work is taken by ticket: pass 1 of a wave of units, then pass 2 of the wave before. Pass 2 so finds its x
// in the second-level cache, and waits only for lower tickets. Moves x twice (once from memory) and y once. A
// mean directly after the norm follows from the moments: pass 1 alone. Units of one tile take no tickets: a
// block, or a warp where units are small, runs both passes of its own.
#pragma once

#include "tail/parameters.cuh"
#include "tail/parts.cuh"
#include "tail/tail.cuh"

namespace onepass {

// `Aligned`: all vectors of the launch lie on 16 bytes, and no other path is in the loops.
template <class Tail, class Numbers, class Walk, bool Aligned>
struct TailStreamed {
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  static constexpr int part_floats = 4;  // count, mean, M2, what the mean has no bits for

  // Moments of a block's warps, or of its threads' rows.
  struct Shared {
    float scratch[part_floats *
                  (Numbers::interleaved ? Numbers::width * Numbers::threads : Numbers::threads / 32)];
  };

  using Parts = TileParts<Tail, Numbers, Walk>;
  static_assert(Parts::floats == part_floats);
  // A vector over channels has those of one slab.
  static constexpr bool is_of_one_slab = Numbers::interleaved && Tail::group_channels % Numbers::width == 0;

  const Parameters& p;
  float* scratch;

  // --- Pass 1 ---
  struct MomentsPass {
    const Parameters& p;
    float* scratch;

    template <int Rows>
    struct Row {
      ChannelValues<Before, Rows> before;
    };
    // A thread has one set of sums for all channels of its vectors: one slab's, whose means nobody wants.
    static constexpr bool is_joined = is_of_one_slab && !Tail::mean_follows_norm;

    // Distances from the mean of a thread's first vectors. 3 instructions an element, where merging each
    // chunk's moments takes 4 and a reciprocal.
    template <int Rows>
    struct Sums {
      static constexpr bool is_one = Rows == 1 || is_joined;
      float count = 0.0f;  // of each row
      PivotSums<is_one ? 2 : 1> row[is_one ? 1 : Rows];

      __device__ __forceinline__ ExactMoments moments(int r) const {
        float moved, m2, low;
        row[r].finish(count, moved, m2);
        const float mean = sum_and_rest(row[r].pivot, moved, low);
        return {count, mean, m2, low};
      }
    };

    template <int Rows>
    __device__ __forceinline__ Row<Rows> row(int64 n, int64 c) const {
      Row<Rows> row;
      row.before.load(p, n, c);
      return row;
    }

    template <int Width, int Count, int Rows, class HowMany>
    __device__ __forceinline__ void chunk(const Row<Rows>& row, int64 index, int64 step, HowMany how_many,
                                          Sums<Rows>& sums) const {
      Packed<typename Tail::Input, Width> x[Count];
      typename Before::template Tensors<Width> tensors[Count];
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!is_in(i, how_many)) break;
        x[i].load(p.input, index + i * step, Aligned || is_aligned(p, aligned_input));
        load_tensors<Aligned>(tensors[i], p, index + i * step);
      }
      float h[Count][Width];
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!is_in(i, how_many)) break;
        x[i].unpack(h[i]);
#pragma unroll
        for (int k = 0; k < Width; ++k)
          h[i][k] = Before::value(h[i][k], row.before.value[Rows == 1 ? 0 : k], tensors[i], k);
      }
      // One set of sums for all, or element k of every vector is row k's.
      constexpr bool is_one = Sums<Rows>::is_one;
      constexpr int of_vector = is_one ? Width : 1;
      int vectors = Count;
      if constexpr (!is_same<HowMany, All>) vectors = how_many;
      const float count = static_cast<float>(vectors * of_vector);
      if (sums.count == 0.0f) {
        const float per_element =
            is_same<HowMany, All> ? 1.0f / (Count * of_vector) : pointwise::reciprocal_fast(count);
        constexpr int asked = is_one ? Count : 1;  // of several rows the first value is enough
#pragma unroll
        for (int r = 0; r < (is_one ? 1 : Rows); ++r) {
          const float first = h[0][r];
          float sum = 0.0f;
#pragma unroll
          for (int i = 0; i < asked; ++i) {
            if (!is_in(i, how_many)) break;
#pragma unroll
            for (int k = 0; k < of_vector; ++k) {
              if (i + k > 0) sum += distance_from(h[i][r + k], first);
            }
          }
          sums.row[r].pivot = fmaf(sum, per_element, first);
        }
      }
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!is_in(i, how_many)) break;
#pragma unroll
        for (int k = 0; k < Width; ++k) sums.row[is_one ? 0 : k].add(h[i][k], k);
      }
      sums.count += count;
    }

    template <int team, int Rows>
    __device__ __forceinline__ void finish(const Row<Rows>&, const Sums<Rows>& sums, int64 row_index,
                                           int piece, bool in_range) const {
      if constexpr (!Numbers::interleaved) {
        const ExactMoments own = sums.moments(0);
        float mean, low, m2;
        float count = own.count;
        if constexpr (team <= 32) {
          count = lanes_sum<team>(count);
        } else {
          float all[1] = {count};
          block_sum<Numbers::threads>(all, scratch);
          count = all[0];
        }
        team_moments<team, Numbers::threads>(own, count, scratch, mean, low, m2);
        if (in_range && threadIdx.x % team == 0)
          Parts{p.parts, p.sums, scratch}.store(row_index, piece, {count, mean, m2, low});
      } else if constexpr (is_joined) {
        Parts{p.parts, p.sums, scratch}.template leave_joined<team, Rows>(sums.moments(0), row_index, piece);
      } else {
        Parts{p.parts, p.sums, scratch}.template leave_rows<team, Rows>(sums, row_index, piece, in_range);
      }
    }
  };

  // --- Pass 2 ---
  struct ApplyPass {
    const Parameters& p;
    float* scratch;

    template <int Rows>
    struct Row {
      ChannelValues<Before, Rows> before;
      ChannelValues<After, Rows> after;
      float mean[is_of_one_slab ? 1 : Rows];
      float scale[Rows];
      float bias[Rows];
    };
    template <int Rows>
    using Sums = PlainSums<Numbers, Tail::has_mean ? 1 : 0, Rows>;

    template <int Rows>
    __device__ __forceinline__ Row<Rows> row(int64 n, int64 c) const {
      Row<Rows> row;
      row.before.load(p, n, c);
      row.after.load(p, n, c);
      if constexpr (Tail::has_norm) {
        float rstd = 0.0f, low = 0.0f;
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          if (r == 0 || !is_of_one_slab) {
            const int64 slab = n * (Tail::channels / Tail::group_channels) + (c + r) / Tail::group_channels;
            row.mean[r] = load_shared_by_blocks(p.statistics + 2 * slab);
            rstd = load_shared_by_blocks(p.statistics + 2 * slab + 1);
            low = load_shared_by_blocks(low_of(p, slab));
          }
          row.scale[r] = Tail::weight(p, c + r) * rstd;
          row.bias[r] = fmaf(-low, row.scale[r], Tail::bias(p, c + r));
        }
      }
      return row;
    }

    template <int Width, int Count, int Rows, class HowMany>
    __device__ __forceinline__ void chunk(const Row<Rows>& row, int64 index, int64 step, HowMany how_many,
                                          Sums<Rows>& sums) const {
      Packed<typename Tail::Input, Width> x[Count];
      typename Before::template Tensors<Width> before[Count];
      typename After::template Tensors<Width> after[Count];
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!is_in(i, how_many)) break;
        x[i].template load<true>(p.input, index + i * step, Aligned || is_aligned(p, aligned_input));
        load_tensors<Aligned>(before[i], p, index + i * step);
        load_tensors<Aligned>(after[i], p, index + i * step);
      }
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!is_in(i, how_many)) break;
        float value[Width];
        x[i].unpack(value);
#pragma unroll
        for (int k = 0; k < Width; ++k) {
          const int r = Rows == 1 ? 0 : k;
          value[k] = Before::value(value[k], row.before.value[r], before[i], k);
          if constexpr (Tail::has_norm)
            value[k] = normalise(value[k], row.mean[is_of_one_slab ? 0 : r], row.scale[r], row.bias[r]);
          value[k] = After::value(value[k], row.after.value[r], after[i], k);
          if constexpr (Tail::has_mean) sums.value[r][0] += value[k];
        }
        if constexpr (!Tail::has_mean) {
          Packed<typename Tail::Output, Width> y;
          y.pack(value);
          y.store(p.output, index + i * step, Aligned || is_aligned(p, aligned_output));
        }
      }
    }

    template <int team, int Rows>
    __device__ __forceinline__ void finish(const Row<Rows>&, Sums<Rows>& sums, int64 row_index, int piece,
                                           bool in_range) const {
      sums.template finish<team>(in_range, scratch, [&](int r, const float* total) {
        p.sums[Parts::place_of_sum(row_index + r, piece)] = total[0];
      });
    }
  };

  // --- Between the passes: the statistics of a unit's slabs ---
  static constexpr int per_slab = Tail::group_channels / Parts::part_channels * Walk::pieces;
  // What a slab's mean has no bits for: in its first part, which has been read then.
  static __device__ __forceinline__ float* low_of(const Parameters& p, int64 slab) {
    return p.parts + slab * per_slab * part_floats + 3;
  }

  static __device__ __forceinline__ ExactMoments load_part(const float* part) {
    return {load_shared_by_blocks(part), load_shared_by_blocks(part + 1), load_shared_by_blocks(part + 2),
            load_shared_by_blocks(part + 3)};
  }

  // Threads that have a unit together: a block, or one of its warps.
  static constexpr int unit_threads = Numbers::threads / Numbers::units_of_block;
  static __device__ __forceinline__ void sync_unit() {
    if constexpr (unit_threads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ void finish_moments(int64 unit) const {
    // All threads for the one slab of a planar unit, some lanes for each slab of an interleaved one.
    constexpr int team = Walk::slabs_of_unit == 1 ? unit_threads : lanes_for(per_slab);
    const int lane = threadIdx.x % team;
    for (int first = 0; first < Walk::slabs_of_unit; first += unit_threads / team) {
      const int s = first + threadIdx.x % unit_threads / team;
      const bool in_range = s < Walk::slabs_of_unit;
      const int64 slab = unit * Walk::slabs_of_unit + (in_range ? s : 0);
      const float* parts = p.parts + slab * per_slab * part_floats;
      ExactMoments own;
      if (in_range) {
#pragma unroll 4
        for (int i = lane; i < per_slab; i += team) {
          const ExactMoments part = load_part(parts + i * part_floats);
          if (part.count > 0.0f) own.merge(part);
        }
      }
      constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
      float mean, low, m2;
      team_moments<team, Numbers::threads>(own, elements, scratch, mean, low, m2);
      const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
      if (in_range && lane == 0) {
        p.statistics[2 * slab] = mean;
        p.statistics[2 * slab + 1] = rstd;
        if constexpr (!Tail::mean_follows_norm || Numbers::interleaved) *low_of(p, slab) = low;
      }
      if constexpr (Tail::mean_follows_norm && !Numbers::interleaved) {
        for (int c = lane; in_range && c < Tail::group_channels; c += team) {
          Moments row;
          for (int i = 0; i < Walk::pieces; ++i) {
            const ExactMoments part = load_part(parts + (c * Walk::pieces + i) * part_floats);
            if (part.count > 0.0f) row.merge(part.count, part.mean, 0.0f);
          }
          const int64 row_index = slab * Tail::group_channels + c;
          const int channel = static_cast<int>(row_index % Tail::channels);
          const float value =
              fmaf(((row.mean - mean) - low) * rstd, Tail::weight(p, channel), Tail::bias(p, channel));
          store_one<typename Tail::Output>(p.output, row_index, value);
        }
      }
    }
    if constexpr (Tail::mean_follows_norm && Numbers::interleaved) {
      __syncthreads();  // all statistics are there
      finish_normed_means(unit);
    }
  }

  // Interleaved, a mean directly after the norm: from the channels' means and the slabs' statistics.
  __device__ __forceinline__ void finish_normed_means(int64 unit) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
    const float* pivots = p.sums + unit * Walk::pieces * Walk::rows_of_unit;
    Parts{p.parts, p.sums, scratch}.template sum_pieces<true>(unit, [&](int c, double total) {
      const int64 row_index = unit * Walk::rows_of_unit + c;
      const int64 slab = row_index / Tail::group_channels;
      const int channel = static_cast<int>(row_index % Tail::channels);
      const float mean = load_shared_by_blocks(p.statistics + 2 * slab);
      const float rstd = load_shared_by_blocks(p.statistics + 2 * slab + 1);
      const float low = load_shared_by_blocks(low_of(p, slab));
      const float distance =
          fmaf(static_cast<float>(total), per_element, (load_shared_by_blocks(pivots + c) - mean) - low);
      const float value = fmaf(distance * rstd, Tail::weight(p, channel), Tail::bias(p, channel));
      store_one<typename Tail::Output>(p.output, row_index, value);
    });
  }

  __device__ __forceinline__ void finish_mean(int64 unit) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
    const auto give = [&](int r, double total) {
      store_one<typename Tail::Output>(p.output, unit * Walk::rows_of_unit + r,
                                       static_cast<float>(total) * per_element);
    };
    if constexpr (Numbers::interleaved) {
      Parts{p.parts, p.sums, scratch}.template sum_pieces<false>(unit, give);
    } else {
      for (int r = threadIdx.x % unit_threads; r < Walk::rows_of_unit; r += unit_threads) {
        const int64 row_index = unit * Walk::rows_of_unit + r;
        double total = 0.0;
        for (int i = 0; i < Walk::pieces; ++i)
          total += load_shared_by_blocks(p.sums + row_index * Walk::pieces + i);
        give(r, total);
      }
    }
  }

  static constexpr int tiles = Walk::tiles_of_unit;
  static constexpr int first_tiles = Tail::has_norm ? tiles : 0;
  static constexpr int second_tiles = Tail::mean_follows_norm ? 0 : tiles;

  __device__ __forceinline__ void first(int64 unit, int tile, uint32* counters) const {
    MomentsPass pass{p, scratch};
    Walk::run(p, unit, tile, pass);
    if (arrives_last(counters, tiles)) {
      finish_moments(unit);
      if constexpr (second_tiles > 0) publish(counters + 2, 1u);
    }
  }

  __device__ __forceinline__ void second(int64 unit, int tile, uint32* counters) const {
    if constexpr (Tail::has_norm) {
      if (threadIdx.x == 0) wait_for(counters + 2, 1u);
      __syncthreads();
    }
    ApplyPass pass{p, scratch};
    Walk::run(p, unit, tile, pass);
    if constexpr (Tail::has_mean) {
      if (arrives_last(counters + 1, tiles)) finish_mean(unit);
    }
  }

  // A unit is one tile: a block or a warp has it to itself, in both passes. The second finds x in the caches.
  static constexpr bool alone = tiles == 1;
  static_assert(alone || Numbers::units_of_block == 1);

  __device__ __forceinline__ void run_alone(int64 unit) const {
    if constexpr (Tail::has_norm) {
      MomentsPass pass{p, scratch};
      Walk::run(p, unit, 0, pass);
      sync_unit();  // all parts are there
      finish_moments(unit);
      sync_unit();
    }
    if constexpr (!Tail::mean_follows_norm) {
      ApplyPass pass{p, scratch};
      Walk::run(p, unit, 0, pass);
      if constexpr (Tail::has_mean) {
        sync_unit();
        finish_mean(unit);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    if constexpr (alone) {
      const int64 unit =
          static_cast<int64>(blockIdx.x) * Numbers::units_of_block + threadIdx.x / unit_threads;
      if (unit < Walk::units(p.batch)) run_alone(unit);
    } else {
      run_tickets(*this, Walk::units(p.batch), [](int64) { return false; });
    }
  }
};

}  // namespace onepass
