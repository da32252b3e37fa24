// The first launch of the row "thin_backward": tickets, and which of them wait for each other.
#pragma once

#include "thin/backward/input_gradient.cuh"
#include "thin/backward/passes.cuh"
#include "thin/backward/slabs.cuh"
#include "thin/backward/weights.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::Kernel {
  const Thread thread;

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

  __device__ __forceinline__ uint32* counters(int64 n) const { return thread.p.control + 4 + n * 4; }

  __device__ __forceinline__ void arrive(uint32* counter) const {
    __syncthreads();
    if (threadIdx.x == 0) count_up(counter);
  }

  __device__ __forceinline__ void run() const {
    const bool by_output = Numbers::may_read_output && thread.p.output != nullptr;
    const int first_tickets = !Numbers::has_first ? 0 : by_output ? 1 : Numbers::segments;
    // The scale of x is found a sample ahead, or with pass 1 where the output replaces that.
    const int measure_tickets = halves && !by_output ? 1 : 0;
    const int of_sample = measure_tickets + first_tickets + second_tickets + third_tickets;
    const int64 first_lag = Numbers::has_first ? thread.p.first_lag : 0;
    const int64 second_lag = Numbers::wants_input ? thread.p.second_lag : 0;
    const int64 tickets = (thread.p.batch + measure_tickets + first_lag + second_lag) * of_sample;
    Weights{{thread.p, thread.s}}.prepare();
    const Slabs slabs{{thread.p, thread.s}};
    const TilePasses passes{{thread.p, thread.s}};
    const InputGradient input{{thread.p, thread.s}};
    uint32 planes = 0;  // that pass 3 has loaded
    Tickets own(thread.p.control);
#pragma unroll 1
    for (int64 ticket = own.take(); ticket < tickets; ticket = own.take()) {
      auto sample = static_cast<int64>(static_cast<uint32>(ticket) / static_cast<uint32>(of_sample));
      int item = static_cast<int>(static_cast<uint32>(ticket) % static_cast<uint32>(of_sample));
      if constexpr (halves) {
        if (item < measure_tickets) {
          if (sample < thread.p.batch) {
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
          if (sample < 0 || sample >= thread.p.batch) continue;
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
          if (n < 0 || n >= thread.p.batch) continue;
          if (threadIdx.x == 0) {
            if (Numbers::has_first) wait_for(counters(n) + 1, slabs_summed);
            if (third_done > 0 && n >= thread.p.ring_samples)
              wait_for(counters(n - thread.p.ring_samples) + 3, third_done);
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
        if (n < 0 || n >= thread.p.batch) continue;
        if (threadIdx.x == 0) wait_for(counters(n) + 2, second_tickets);
        input.back(n, item - second_tickets, planes);
        arrive(counters(n) + 3);
      }
    }
  }
};

}  // namespace onepass
