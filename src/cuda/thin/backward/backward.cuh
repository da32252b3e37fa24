// The gradients of a thin convolution and all that follows it. The convolution is computed anew where its
// output is needed.
//
// With h the convolution's output, dh its gradient, z the norm's output and M elements in a slab:
//   pass 1   x -> h; dy -> dz; for each channel the sums of dz, of dz xhat and of what the after-chain reads.
//            The last block of a sample merges them to the slabs' means over M of gamma dz and gamma dz xhat
//   pass 2   x -> h -> dh as in tail/backward, a tile in shared memory at a time;
//            dweight[o, term] += sum over positions dh[o, q] x[term, q] by tensor cores; dh to a ring buffer
//   pass 3   dx: rows D[(input channel, last tap), q] = sum over outer taps and o of w dh[o, q] by tensor
//            cores, shifted and added to dx[input channel, i] as they are stored
// Pass 1 is left out without a norm, pass 3 where dx is not wanted, and unwanted products of pass 2.
//
// Work is taken by ticket, sample after sample: pass 1 of sample n, pass 2 of an earlier one, pass 3 of a
// still earlier one. So dy and dh come from the second-level cache. Blocks wait only for lower tickets. The
// ring buffer holds dh of a few samples: nothing of the convolution's size is in memory. Each ticket leaves
// its sums of dweight; the last block of a sample adds them. A second launch (ThinReduce) sums over the
// batch.
//
// Operands are f16 scaled by powers of two, tf32, or split in two with three products (strict f32, at most 64
// terms in the tensor core). dh is rounded as an operand is. For f16, a ticket of its own finds the scale of
// x, one sample ahead. x and dy are read twice, x once more for its scale. dh goes once each way through the
// second-level cache, dx is written once.
#pragma once

#include "thin/backward/input_gradient.cuh"
#include "thin/backward/passes.cuh"
#include "thin/backward/slabs.cuh"
#include "thin/backward/weights.cuh"

namespace onepass {

template <class Convolution, class Tail, class Numbers>
struct ThinBackward {
  using L = ThinBackwardLayout<Convolution, Tail, Numbers>;
  using Parameters = typename L::Parameters;
  using Shared = typename L::Shared;
  static constexpr bool halves = L::halves;

  const Parameters& p;
  Shared& s;

  static constexpr int second_tickets = Numbers::has_second ? Numbers::segments : 0;
  static constexpr int third_tickets =
      Numbers::wants_input ? Numbers::back_tiles(0) * Numbers::back_tiles(1) * Numbers::back_tiles(2) : 0;

  // The last ticket of pass 2 of a sample adds the parts of dweight. The sample keeps its place in the ring
  // buffers until then and until pass 3 is done.
  static constexpr bool merges = Numbers::wants_weight && Numbers::segments > 1;
  static constexpr uint32 third_done = third_tickets + (merges ? 1 : 0);

  // The flag of a sample.
  static constexpr uint32 x_measured = 1;
  static constexpr uint32 slabs_summed = 2;

  __device__ __forceinline__ uint32* counters(int64 n) const { return p.control + 4 + n * 4; }

  __device__ __forceinline__ void arrive(uint32* counter) const {
    __syncthreads();
    if (threadIdx.x == 0) count_up(counter);
  }

  __device__ __forceinline__ void run() const {
    const bool by_output = Numbers::may_read_output && p.output != nullptr;
    const int first_tickets = !Numbers::has_first ? 0 : by_output ? 1 : Numbers::segments;
    // The scale of x is found a sample ahead, or with pass 1 where the output replaces that.
    const int measure_tickets = halves && !by_output ? 1 : 0;
    const int of_sample = measure_tickets + first_tickets + second_tickets + third_tickets;
    const int64 first_lag = Numbers::has_first ? p.first_lag : 0;
    const int64 second_lag = Numbers::wants_input ? p.second_lag : 0;
    const int64 tickets = (p.batch + measure_tickets + first_lag + second_lag) * of_sample;
    ThinGradientWeights<L>{p, s}.prepare();
    const ThinGradientSlabs<L> slabs{p, s};
    const ThinGradientPasses<L> passes{p, s};
    const ThinInputGradient<L> input{p, s};
    uint32 planes = 0;  // that pass 3 has loaded
    Tickets own(p.control);
#pragma unroll 1
    for (int64 ticket = own.take(); ticket < tickets; ticket = own.take()) {
      auto sample = static_cast<int64>(static_cast<uint32>(ticket) / static_cast<uint32>(of_sample));
      int item = static_cast<int>(static_cast<uint32>(ticket) % static_cast<uint32>(of_sample));
      if constexpr (halves) {
        if (item < measure_tickets) {
          if (sample < p.batch) {
            slabs.measure(sample);
            publish(counters(sample) + 1, x_measured);
          }
          continue;
        }
        item -= measure_tickets;
        sample -= measure_tickets;
      }
      if (item < first_tickets) {
        if constexpr (Numbers::has_first) {
          if (sample < 0 || sample >= p.batch) continue;
          if constexpr (halves) {
            if (by_output) {
              slabs.measure(sample);
            } else if (threadIdx.x == 0) {
              wait_for(counters(sample) + 1, x_measured);
            }
          }
          // From the output alone. Where that is not accurate enough, this block does all of pass 1.
          bool is_done = false;
          if constexpr (Numbers::may_read_output) {
            is_done = by_output && slabs.output_is_enough(sample);
            if (is_done) slabs.finish_slabs_by_output(sample);
          }
          if (!is_done) {
            const int last = by_output ? Numbers::segments : item + 1;
#pragma unroll 1
            for (int segment = item; segment < last; ++segment) passes.template pass<false>(sample, segment);
            is_done = arrives_last(counters(sample), by_output ? 1 : Numbers::segments);
            if (is_done) slabs.finish_slabs(sample);
          }
          if (is_done) publish(counters(sample) + 1, slabs_summed);
        }
        continue;
      }
      item -= first_tickets;
      if (item < second_tickets) {
        if constexpr (second_tickets > 0) {
          const int64 n = sample - first_lag;
          if (n < 0 || n >= p.batch) continue;
          if (threadIdx.x == 0) {
            if (Numbers::has_first) wait_for(counters(n) + 1, slabs_summed);
            if (third_done > 0 && n >= p.ring_samples) wait_for(counters(n - p.ring_samples) + 3, third_done);
          }
          passes.template pass<true>(n, item);
          if constexpr (merges) {
            if (arrives_last(counters(n) + 2, second_tickets)) {
              passes.weights.merge(n);
              arrive(counters(n) + 3);
            }
          } else if constexpr (Numbers::wants_input) {
            arrive(counters(n) + 2);
          }
        }
        continue;
      }
      if constexpr (third_tickets > 0) {
        const int64 n = sample - first_lag - second_lag;
        if (n < 0 || n >= p.batch) continue;
        if (threadIdx.x == 0) wait_for(counters(n) + 2, second_tickets);
        input.back(n, item - second_tickets, planes);
        arrive(counters(n) + 3);
      }
    }
  }
};

}  // namespace onepass
