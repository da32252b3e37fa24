// The gradients of a tail in one launch and at most two passes, for both layouts.
//
// With h the norm's input, xhat = (h - mean) rstd, z its output and M elements in a slab:
//   pass 1   x, dy -> dz; for each row the sums of dz, of dz xhat, the gradients of what the after-chain
//            reads, and xhat
//   between  for each slab the means over M of gamma dz and of gamma dz xhat, by the last block of a unit
//   pass 2   dh = rstd (gamma dz - mean(gamma dz) - xhat mean(gamma dz xhat)), back through the
//            before-chain to dx
//   pass 3   row sums added over the batch: gradients of weights, in double and in order
// The stored mean is rounded, and the mean of xhat says by how much: sums of dz xhat are moved by it. Where
// the mean is a hundred deviations from zero, gradients of weights are twenty times as exact.
// Without a norm everything is pass 2 and the whole chain the after-chain. Tickets and waves as in
// tail/streamed.cuh; a unit of one tile is one ticket.
#pragma once

#include "tail/backward/parameters.cuh"
#include "tail/tail.cuh"

namespace onepass {

// `Aligned`: all vectors of the launch lie on 16 bytes, and no other path is in the loops.
template <class Tail, class Numbers, class Walk, bool Aligned>
struct TailBackward {
  using Parameters = TailBackwardParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  static constexpr int norm_sums = Tail::has_norm ? 2 : 0;
  static constexpr int after_sums = Tail::after_sums;
  static constexpr int before_sums = Tail::before_sums;
  // Sums of a row by pass: with a norm the first pass sums what is after it and the second what is before.
  static constexpr int first_sums = Tail::has_norm ? norm_sums + after_sums : 0;
  static constexpr int second_sums = Tail::has_norm ? before_sums : after_sums;
  static constexpr int total_sums = first_sums + second_sums;
  // The first pass has one more, of xhat, which stands last in the totals of a row.
  static constexpr int first_parts = Tail::has_norm ? first_sums + 1 : 0;
  static constexpr int row_totals = total_sums + (Tail::has_norm ? 1 : 0);
  static constexpr int groups = Tail::channels / Tail::group_channels;

  const Parameters& p;
  float* scratch;

  template <int Rows>
  struct RowValues {
    ChannelValues<Before, Rows> before;
    ChannelValues<After, Rows> after;
    float gamma[Rows], beta[Rows], mean[Rows], rstd[Rows];
    float sum[Rows], product[Rows];  // of the slab, pass 2
    float dy[Rows];                  // where the block ends in a mean
  };

  template <bool second, int Rows>
  static __device__ __forceinline__ RowValues<Rows> row_values(const Parameters& p, int64 n, int64 c) {
    RowValues<Rows> row;
    row.before.load(p, n, c);
    row.after.load(p, n, c);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if constexpr (Tail::has_norm) {
        const int64 slab = n * groups + (c + r) / Tail::group_channels;
        row.gamma[r] = Tail::weight(p, c + r);
        row.beta[r] = Tail::bias(p, c + r);
        row.mean[r] = p.statistics[2 * slab];
        row.rstd[r] = p.statistics[2 * slab + 1];
        if constexpr (second) {
          row.sum[r] = load_shared_by_blocks(p.slab_sums + 2 * slab);
          row.product[r] = load_shared_by_blocks(p.slab_sums + 2 * slab + 1);
        }
      }
      if constexpr (Tail::has_mean) {
        constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
        const int64 index = n * Tail::gradient_sample_stride + (c + r) * Tail::gradient_channel_stride;
        row.dy[r] = load_one<typename Tail::OutputGradient>(p.output_gradient, index) * per_element;
      }
    }
    return row;
  }

  template <bool second>
  struct Pass {
    const Parameters& p;
    float* scratch;
    static constexpr int sum_count = second ? second_sums : first_parts;

    template <int Rows>
    using Row = RowValues<Rows>;
    template <int Rows>
    using Sums = PlainSums<Numbers, sum_count, Rows>;

    template <int Rows>
    __device__ __forceinline__ Row<Rows> row(int64 n, int64 c) const {
      return row_values<second, Rows>(p, n, c);
    }

    template <int Width, int Count, int Rows, class HowMany>
    __device__ __forceinline__ void chunk(const Row<Rows>& row, int64 index, int64 step, HowMany how_many,
                                          Sums<Rows>& sums) const {
      Packed<typename Tail::Input, Width> x[Count];
      Packed<typename Tail::OutputGradient, Width> dy[Count];
      typename Before::template Tensors<Width> before[Count];
      typename After::template Tensors<Width> after[Count];
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!is_in(i, how_many)) break;
        x[i].template load<second>(p.input, index + i * step, Aligned || is_aligned(p, aligned_input));
        if constexpr (!Tail::has_mean) {
          dy[i].template load<second>(p.output_gradient, index + i * step,
                                      Aligned || is_aligned(p, aligned_output_gradient));
        }
        load_tensors<Aligned>(before[i], p, index + i * step);
        load_tensors<Aligned>(after[i], p, index + i * step);
      }
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!is_in(i, how_many)) break;
        float value[Width];
        x[i].unpack(value);
        typename Before::template TensorGradients<Width> before_gradients;
        typename After::template TensorGradients<Width> after_gradients;
#pragma unroll
        for (int k = 0; k < Width; ++k) {
          const int r = Rows == 1 ? 0 : k;
          const float g = Tail::has_mean ? row.dy[r] : dy[i].at(k);
          value[k] = element<Rows>(row, r, value[k], g, before[i], after[i], k, before_gradients,
                                   after_gradients, sums);
        }
        if constexpr (second) {
          if constexpr (Tail::wants_input) {
            Packed<typename Tail::InputGradient, Width> dx;
            dx.pack(value);
            dx.store(p.input_gradient, index + i * step, Aligned || is_aligned(p, aligned_input_gradient));
          }
          before_gradients.store(p, index + i * step);
          after_gradients.store(p, index + i * step);
        }
      }
    }

    // The gradient of one element, in pass 2; its sums in either.
    template <int Rows, class BeforeTensors, class AfterTensors, class BeforeGradients, class AfterGradients>
    __device__ __forceinline__ float element(const Row<Rows>& row, int r, float x, float g,
                                             const BeforeTensors& before, const AfterTensors& after, int k,
                                             BeforeGradients& before_gradients,
                                             AfterGradients& after_gradients, Sums<Rows>& sums) const {
      float channel_gradients[After::channel_operands > 0 ? After::channel_operands : 1];
      if constexpr (!Tail::has_norm) {
        const float dx =
            After::gradient(x, row.after.value[r], after, k, g, channel_gradients, after_gradients);
#pragma unroll
        for (int i = 0; i < second_sums; ++i) sums.value[r][i] += channel_gradients[i];
        return dx;
      } else {
        const float h = Before::value(x, row.before.value[r], before, k);
        const float xhat = (h - row.mean[r]) * row.rstd[r];
        const float z = fmaf(xhat, row.gamma[r], row.beta[r]);
        const float dz =
            After::gradient(z, row.after.value[r], after, k, g, channel_gradients, after_gradients);
        if constexpr (!second) {
          sums.value[r][0] += dz;
          sums.value[r][1] = fmaf(dz, xhat, sums.value[r][1]);
#pragma unroll
          for (int i = 0; i < after_sums; ++i) sums.value[r][norm_sums + i] += channel_gradients[i];
          sums.value[r][first_sums] += xhat;
          return 0.0f;
        } else {
          // rstd (gamma dz - sum - xhat product) in two instructions: the factors are the row's.
          const float dh = fmaf(row.rstd[r] * row.gamma[r], dz,
                                fmaf(xhat, -(row.rstd[r] * row.product[r]), -(row.rstd[r] * row.sum[r])));
          float before_channel_gradients[Before::channel_operands > 0 ? Before::channel_operands : 1];
          const float dx = Before::gradient(x, row.before.value[r], before, k, dh, before_channel_gradients,
                                            before_gradients);
#pragma unroll
          for (int i = 0; i < before_sums; ++i) sums.value[r][i] += before_channel_gradients[i];
          return dx;
        }
      }
    }

    template <int team, int Rows>
    __device__ __forceinline__ void finish(const Row<Rows>&, Sums<Rows>& sums, int64 row_index, int piece,
                                           bool in_range) const {
      float* parts = second ? p.sums : p.parts;
      sums.template finish<team>(in_range, scratch, [&](int r, const float* total) {
#pragma unroll
        for (int i = 0; i < sum_count; ++i) {
          parts[((row_index + r) * Walk::pieces + piece) * sum_count + i] = total[i];
        }
      });
    }
  };

  // The sums of a unit's rows over their pieces, into `totals`: `Place` says where each goes.
  template <int count, class Place>
  __device__ __forceinline__ void finish_rows(int64 unit, const float* parts, Place&& place) const {
    // As many lanes a row as there are pieces for.
    constexpr int team = Walk::pieces >= 32 ? 32 : Walk::pieces >= 16 ? 16 : Walk::pieces >= 8 ? 8 : 1;
    const int lane = threadIdx.x % team;
#pragma unroll 2
    for (int first = 0; first < Walk::rows_of_unit; first += Numbers::threads / team) {
      const int r = first + threadIdx.x / team;
      const bool in_range = r < Walk::rows_of_unit;
      const int64 row_index = unit * Walk::rows_of_unit + (in_range ? r : 0);
      const float* own = parts + row_index * Walk::pieces * count;
      double total[count] = {};
#pragma unroll 4
      for (int piece = lane; piece < Walk::pieces; piece += team) {
#pragma unroll
        for (int i = 0; i < count; ++i) total[i] += load_shared_by_blocks(own + piece * count + i);
      }
#pragma unroll
      for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int offset = team / 2; offset > 0; offset /= 2) {
          total[i] += __shfl_xor_sync(0xffffffffu, total[i], offset);
        }
        if (in_range && lane == 0) p.totals[row_index * row_totals + place(i)] = static_cast<float>(total[i]);
      }
    }
  }

  __device__ __forceinline__ void finish_slabs(int64 unit) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::group_channels * Tail::spatial);
    constexpr int team =
        Walk::slabs_of_unit == 1 ? Numbers::threads : lanes_for(static_cast<int>(Tail::group_channels));
    const int lane = threadIdx.x % team;
    __syncthreads();
    for (int first = 0; first < Walk::slabs_of_unit; first += Numbers::threads / team) {
      const int s = first + threadIdx.x / team;
      const bool in_range = s < Walk::slabs_of_unit;
      const int64 slab = unit * Walk::slabs_of_unit + (in_range ? s : 0);
      float sum[3] = {0.0f, 0.0f, 0.0f};
      for (int c = lane; in_range && c < Tail::group_channels; c += team) {
        const int64 row_index = slab * Tail::group_channels + c;
        const float gamma = Tail::weight(p, static_cast<int>(row_index % Tail::channels));
        const float* totals = p.totals + row_index * row_totals;
        sum[0] = fmaf(gamma, load_shared_by_blocks(totals), sum[0]);
        sum[1] = fmaf(gamma, load_shared_by_blocks(totals + 1), sum[1]);
        sum[2] += load_shared_by_blocks(totals + total_sums);
      }
      if constexpr (team <= 32) {
#pragma unroll
        for (float& value : sum) value = lanes_sum<team>(value);
      } else {
        block_sum<Numbers::threads>(sum, scratch);
      }
      const float shift = sum[2] * per_element;
      const float mean = sum[0] * per_element;
      const float product = fmaf(-shift, mean, sum[1] * per_element);
      if (in_range && lane == 0) {
        p.slab_sums[2 * slab] = fmaf(-shift, product, mean);
        p.slab_sums[2 * slab + 1] = product;
      }
      for (int c = lane; in_range && c < Tail::group_channels; c += team) {
        float* totals = p.totals + (slab * Tail::group_channels + c) * row_totals;
        totals[1] = fmaf(-shift, load_shared_by_blocks(totals), load_shared_by_blocks(totals + 1));
      }
    }
  }

  // Gradients of weights: 32 channels a block, a lane each, each the sum over the batch: a warp adds every so
  // many samples, then the warps' sums come together, always in the same order. One thread a channel took
  // 90 us for a batch of 1024.
  static constexpr int reduced_channels = 32;
  __device__ __forceinline__ void reduce(int item) const {
    constexpr int warps = Numbers::threads / 32;
    __shared__ double of_warps[warps][32];
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int64 c = static_cast<int64>(item) * reduced_channels + lane;
    const auto total = [&](int64 n, int i) {
      return load_shared_by_blocks(p.totals + (n * Tail::channels + c) * row_totals + i);
    };
    float sums[total_sums > 0 ? total_sums : 1];
#pragma unroll
    for (int i = 0; i < total_sums; ++i) {
      double sum = 0.0;
      if (c < Tail::channels) {
#pragma unroll 4
        for (int64 n = warp; n < p.batch; n += warps) sum += total(n, i);
      }
      __syncthreads();
      of_warps[warp][lane] = sum;
      __syncthreads();
      sum = 0.0;
      for (int w = 0; w < warps; ++w) sum += of_warps[w][lane];
      sums[i] = static_cast<float>(sum);
    }
    // One value per channel, or per sample and channel.
    const auto channel_sum = [&](int i) { return sums[i]; };
    if (warp == 0 && c < Tail::channels) Tail::store_channel_gradients(p, c, channel_sum, total);
    if (item == 0) store_single_gradients();
  }

  // A slope that all channels share: the sum over everything, by one block.
  __device__ __forceinline__ void store_single_gradients() const {
    Tail::for_each_single([&](int i, auto store) {
      double own = 0.0;
      for (int64 row = threadIdx.x; row < p.batch * Tail::channels; row += Numbers::threads) {
        own += load_shared_by_blocks(p.totals + row * row_totals + i);
      }
      __shared__ double all[Numbers::threads];
      __syncthreads();
      all[threadIdx.x] = own;
      __syncthreads();
      if (threadIdx.x == 0) {
        double sum = 0.0;
        for (int t = 0; t < Numbers::threads; ++t) sum += all[t];
        store(static_cast<float>(sum), p);
      }
    });
  }

  static constexpr int tiles = Walk::tiles_of_unit;
  static constexpr int first_tiles = Tail::has_norm ? tiles : 0;
  static constexpr int second_tiles = Tail::wants_second ? tiles : 0;
  static constexpr int third_items =
      Tail::wants_sums ? (Tail::channels + reduced_channels - 1) / reduced_channels : 0;

  __device__ __forceinline__ void arrive_finished() const {
    __syncthreads();
    if (threadIdx.x == 0) count_up(p.control + 1);
  }

  // The sums of pass 1, when all tiles of a unit have theirs.
  __device__ __forceinline__ void finish_first(int64 unit) const {
    finish_rows<first_parts>(unit, p.parts, [](int i) { return i < first_sums ? i : total_sums; });
    finish_slabs(unit);
  }
  // The sums of pass 2.
  __device__ __forceinline__ void finish_second(int64 unit) const {
    finish_rows<second_sums>(unit, p.sums, [](int i) { return first_sums + i; });
    arrive_finished();
  }

  __device__ __forceinline__ void first(int64 unit, int tile, uint32* counters) const {
    Pass<false> pass{p, scratch};
    Walk::run(p, unit, tile, pass);
    if (arrives_last(counters, tiles)) {
      finish_first(unit);
      publish(counters + 2, 1u);
      if constexpr (second_sums == 0) arrive_finished();
    }
  }

  __device__ __forceinline__ void second(int64 unit, int tile, uint32* counters) const {
    if constexpr (Tail::has_norm) {
      if (threadIdx.x == 0) wait_for(counters + 2, 1u);
      __syncthreads();
    }
    Pass<true> pass{p, scratch};
    Walk::run(p, unit, tile, pass);
    if constexpr (second_sums > 0) {
      if (arrives_last(counters + 1, tiles)) finish_second(unit);
    }
  }

  // A unit is one tile: a block has it to itself, and both passes are one ticket.
  static constexpr bool alone = tiles == 1;

  __device__ __forceinline__ void run_alone(int64 unit) const {
    if constexpr (first_tiles > 0) {
      Pass<false> pass{p, scratch};
      Walk::run(p, unit, 0, pass);
      __syncthreads();
      finish_first(unit);
      if constexpr (second_sums == 0) arrive_finished();
      __syncthreads();
    }
    if constexpr (second_tiles > 0) {
      Pass<true> pass{p, scratch};
      Walk::run(p, unit, 0, pass);
      if constexpr (second_sums > 0) {
        __syncthreads();
        finish_second(unit);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    using Items = Schedule<first_tiles, second_tiles>;
    const int64 units = Walk::units(p.batch);
    const int64 tickets = alone ? units : Items::tickets(units, p.wave_units);
    Tickets own(p.control);
    int64 ticket = own.take();
#pragma unroll 1
    for (; ticket < tickets; ticket = own.take()) {
      if constexpr (alone) {
        run_alone(ticket);
      } else {
        const Items item(ticket, p.wave_units);
        if (item.unit >= units) continue;
        uint32* counters = p.control + 4 + item.unit * 4;
        if (item.is_first) {
          if constexpr (first_tiles > 0) first(item.unit, item.tile, counters);
        } else {
          if constexpr (second_tiles > 0) second(item.unit, item.tile, counters);
        }
      }
    }
    if constexpr (third_items > 0) {
      if (ticket >= tickets + third_items) return;
      if (threadIdx.x == 0) wait_for(p.control + 1, static_cast<uint32>(units));
      __syncthreads();
#pragma unroll 1
      for (; ticket < tickets + third_items; ticket = own.take()) {
        reduce(static_cast<int>(ticket - tickets));
      }
    }
  }
};

}  // namespace onepass
