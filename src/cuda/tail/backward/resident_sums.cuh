// tail_backward_resident: sums of a slab over lanes, warps and blocks of a cluster, sums of rows over the
// samples, and the gradients of weights.
#pragma once

#include "tail/backward/resident_vectors.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResidentSums {
  using L = TailBackwardResidentLayout<Tail, Numbers>;

  // The warp's sums of a slab, in every lane: dz, then dz xhat, as far as `mean` was right.
  static __device__ __forceinline__ void merge_lanes(const L& block, const typename L::Row& row,
                                                     typename L::Sums& sums) {
    sums.distance = lanes_sum<32>(sums.distance) * row.rstd;
    if constexpr (Tail::mean_follows_norm) {
      // dz is the row's: only as many are in the sum as the piece has elements.
      sums.dz = row.dy * piece_elements(block);
      sums.product = row.dy * sums.distance;
    } else {
      sums.dz = lanes_sum<32>(sums.dz);
      sums.product = lanes_sum<32>(sums.product) * row.rstd;
    }
#pragma unroll
    for (int s = 0; s < L::after_sums; ++s) sums.after[s] = lanes_sum<32>(sums.after[s]);
  }

  // All pieces of a row count the same elements together whatever its head is.
  static __device__ __forceinline__ float piece_elements(const L& block) {
    if (block.idle()) return 0.0f;
    const int begin = block.first_vector() * 32 * Numbers::width;
    return static_cast<float>(block.piece() == Numbers::pieces - 1
                                  ? L::spatial - begin
                                  : block.own_vectors() * 32 * Numbers::width);
  }

  static __device__ __forceinline__ void send(const L& block, const typename L::Row& row,
                                              const typename L::Sums& sums, int round) {
#if __CUDA_ARCH__ >= 900
    uint64* received = &block.shared.received[round & 1];
    float4 sent =
        block.idle() ? float4{} : float4{row.gamma * sums.dz, row.gamma * sums.product, sums.distance, 0.0f};
    if constexpr (L::staged && Numbers::blocks > 1) {
      // The last warp of the block sends the sums of all.
      const int parity = round & 1;
      if (threadIdx.x == 0) barrier::expect(received, Numbers::blocks * 16);
      uint32 before = 0;
      if (block.lane() == 0) {
        block.shared.of_warps[parity][block.warp()] = sent;
        barrier::arrive(&block.shared.warps_given[parity]);
        before = atomicAdd(&block.shared.warps_counted, 1u);
      }
      before = __shfl_sync(0xffffffffu, before, 0);
      if (before % L::warps != L::warps - 1) return;
      barrier::wait(&block.shared.warps_given[parity], round / 2 & 1);  // a short wait: all have counted
      sent = block.lane() < L::warps ? block.shared.of_warps[parity][block.lane()] : float4{};
      sent.x = lanes_sum<32>(sent.x);
      sent.y = lanes_sum<32>(sent.y);
      sent.z = lanes_sum<32>(sent.z);
      if (block.lane() < Numbers::blocks) {
        barrier::send(&block.shared.exchange[parity][blockIdx.x % Numbers::blocks], sent, received,
                      block.lane());
      }
      return;
    }
    float4* own = &block.shared.exchange[round & 1][block.place()];
    if constexpr (Numbers::blocks > 1) {
      if (threadIdx.x == 0) barrier::expect(received, L::all_warps * 16);
      if (block.lane() < Numbers::blocks) barrier::send(own, sent, received, block.lane());
    } else if (block.lane() == 0) {  // where no cluster was launched, st.async is no legal instruction
      *own = sent;
      barrier::arrive(received);
    }
#endif
  }

  // The slab's means from what all warps have sent; `shift` is that of xhat.
  static __device__ __forceinline__ typename L::Affine receive(const L& block, const typename L::Row& row,
                                                               int round, float& shift) {
    const int parity = round & 1;
#if __CUDA_ARCH__ >= 900
    barrier::wait(&block.shared.received[parity], round / 2 & 1);
#endif
    constexpr bool is_power = (L::senders & (L::senders - 1)) == 0;
    constexpr int lanes = L::senders < 32 && is_power ? L::senders : 32;
    float sum = 0.0f, product = 0.0f, distance = 0.0f;
#pragma unroll
    for (int i = 0; i < (L::senders + 31) / 32; ++i) {
      if (L::senders % lanes == 0 || i * 32 + block.lane() < L::senders) {
        const float4 v = block.shared.exchange[parity][i * 32 + block.lane() % lanes];
        sum += v.x;
        product += v.y;
        distance += v.z;
      }
    }
    constexpr float per_element = 1.0f / static_cast<float>(static_cast<int64>(L::rows) * L::spatial);
    sum = lanes_sum<lanes>(sum) * per_element;
    product = lanes_sum<lanes>(product) * per_element;
    shift = lanes_sum<lanes>(distance) * per_element;
    return L::Element::affine_of(row, sum, product, shift);
  }

  static __device__ __forceinline__ int64 first_slab(const L& block, int64 cluster, int64 clusters) {
    return cluster * (block.p.batch * L::groups) / clusters;
  }

  // Where a cluster's sums of a group lie.
  static __device__ __forceinline__ double* sums_of(const L& block, int64 cluster, int64 clusters,
                                                    int64 group, int place) {
    const int64 segment = group - first_slab(block, cluster, clusters) / block.p.batch;
    return reinterpret_cast<double*>(block.p.parts) +
           ((cluster * block.p.wave_units + segment) * L::all_warps + place) * L::total_sums;
  }

  // What the slab's own sums add to those of its row.
  static __device__ __forceinline__ void add_totals(const L& block, const typename L::Sums& sums,
                                                    float shift) {
    double* totals = block.shared.sums[block.warp()];
    if (Tail::wants_sums && block.lane() == 0) {
      totals[0] += static_cast<double>(sums.dz);
      totals[1] += static_cast<double>(fmaf(-shift, sums.dz, sums.product));
#pragma unroll
      for (int s = 0; s < L::after_sums; ++s) totals[2 + s] += static_cast<double>(sums.after[s]);
    }
  }
  static __device__ __forceinline__ void add_before_totals(const L& block, const float* before_totals) {
    if (L::before_sums > 0) {
#pragma unroll
      for (int s = 0; s < L::before_sums; ++s) {
        const float total = lanes_sum<32>(before_totals[s]);
        if (block.lane() == 0)
          block.shared.sums[block.warp()][2 + L::after_sums + s] += static_cast<double>(total);
      }
    }
  }

  // The warp's sums over the samples of a group it has seen go to memory; the next group's begin.
  static __device__ __forceinline__ void leave_sums(const L& block, int group) {
    __syncwarp();
    double* to =
        sums_of(block, blockIdx.x / Numbers::blocks, gridDim.x / Numbers::blocks, group, block.place());
    for (int s = block.lane(); s < L::total_sums; s += 32) {
      to[s] = block.shared.sums[block.warp()][s];
      block.shared.sums[block.warp()][s] = 0.0;
    }
    __syncwarp();
  }

  // The clusters that meet slabs of a group: from the first to before the last.
  static __device__ __forceinline__ int first_cluster(const L& block, int64 clusters, int64 group) {
    const int64 slabs = block.p.batch * L::groups;
    return static_cast<int>(((group * block.p.batch + 1) * clusters + slabs - 1) / slabs) - 1;
  }
  static __device__ __forceinline__ int last_cluster(int64 clusters, int64 group) {
    return static_cast<int>(((group + 1) * clusters + L::groups - 1) / L::groups);
  }

  // Gradients of weights. A warp has left its sums for its row of every group on its way: the last warp that
  // does so for a channel adds up those of all, always in the same order. When the last block did it for all
  // channels, that took up to a thousand times as long as everything else.
  static __device__ __forceinline__ void reduce(const L& block, int first_group, int last_group) {
    if (block.idle()) return;
    const int64 clusters = gridDim.x / Numbers::blocks;
    __syncwarp();
#pragma unroll 1
    for (int begin = first_group; begin <= last_group; begin += 32) {
      const int group = begin + block.lane();
      bool is_last = false;
      if (group <= last_group) {
        const auto warps = static_cast<uint32>(
            (last_cluster(clusters, group) - first_cluster(block, clusters, group)) * Numbers::pieces);
        is_last = count_up(block.p.control + group * L::rows + block.own_row()) == warps - 1;
      }
      for (uint32 left = __ballot_sync(0xffffffffu, is_last); left != 0; left &= left - 1) {
        __syncwarp();
        reduce_channel(block, clusters, begin + __ffs(static_cast<int>(left)) - 1);
      }
    }
  }

  static __device__ __forceinline__ void reduce_channel(const L& block, int64 clusters, int group) {
    const int first = first_cluster(block, clusters, group);
    const int count = (last_cluster(clusters, group) - first) * Numbers::pieces;
    double total[L::total_sums] = {};
    for (int i = block.lane(); i < count; i += 32) {
      const double* from = sums_of(block, first + i / Numbers::pieces, clusters, group,
                                   block.own_row() * Numbers::pieces + i % Numbers::pieces);
#pragma unroll
      for (int s = 0; s < L::total_sums; ++s) total[s] += __ldcg(from + s);
    }
#pragma unroll
    for (int s = 0; s < L::total_sums; ++s) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        total[s] += __shfl_xor_sync(0xffffffffu, total[s], offset);
      }
    }
    if (block.lane() == 0) {
      const auto channel_sum = [&](int i) { return static_cast<float>(total[i]); };
      const auto of_sample = [](int64, int) { return 0.0f; };  // such gradients are refused
      Tail::store_channel_gradients(block.p, group * L::rows + block.own_row(), channel_sum, of_sample);
    }
  }
};

}  // namespace onepass
