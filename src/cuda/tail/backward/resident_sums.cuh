// Sums of tail_backward_resident.cuh: of a slab over lanes, warps and blocks of a cluster, of rows over the
// samples, and the gradients of weights from them.
#pragma once

#include "tail/backward/resident_vectors.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResidentSums : TailBackwardResidentVectors<Tail, Numbers> {
  using Base = TailBackwardResidentVectors<Tail, Numbers>;
  using Base::after_sums;
  using Base::all_warps;
  using Base::before_sums;
  using Base::blocks;
  using Base::first_vector;
  using Base::groups;
  using Base::idle;
  using Base::lane;
  using Base::own_vectors;
  using Base::p;
  using Base::piece;
  using Base::pieces;
  using Base::place;
  using Base::rows;
  using Base::senders;
  using Base::shared;
  using Base::spatial;
  using Base::staged;
  using Base::total_sums;
  using Base::warp;
  using Base::warps;
  using Base::width;
  using typename Base::Affine;
  using typename Base::Row;
  using typename Base::Sums;

  // The warp's sums of a slab, in every lane: dz, then dz xhat, as far as `mean` was right.
  __device__ __forceinline__ void merge_lanes(const Row& row, Sums& sums) const {
    sums.distance = lanes_sum<32>(sums.distance) * row.rstd;
    if constexpr (Tail::mean_follows_norm) {
      // dz is the row's: only as many are in the sum as the piece has elements.
      sums.dz = row.dy * piece_elements();
      sums.product = row.dy * sums.distance;
    } else {
      sums.dz = lanes_sum<32>(sums.dz);
      sums.product = lanes_sum<32>(sums.product) * row.rstd;
    }
#pragma unroll
    for (int s = 0; s < after_sums; ++s) sums.after[s] = lanes_sum<32>(sums.after[s]);
  }

  // All pieces of a row count the same elements together whatever its head is.
  __device__ __forceinline__ float piece_elements() const {
    if (idle()) return 0.0f;
    const int begin = first_vector() * 32 * width;
    return static_cast<float>(piece() == pieces - 1 ? spatial - begin : own_vectors() * 32 * width);
  }

  __device__ __forceinline__ void send(const Row& row, const Sums& sums, int round) const {
#if __CUDA_ARCH__ >= 900
    uint64* received = &shared.received[round & 1];
    float4 sent =
        idle() ? float4{} : float4{row.gamma * sums.dz, row.gamma * sums.product, sums.distance, 0.0f};
    if constexpr (staged && blocks > 1) {
      // The last warp of the block sends the sums of all.
      const int parity = round & 1;
      if (threadIdx.x == 0) barrier::expect(received, blocks * 16);
      uint32 before = 0;
      if (lane() == 0) {
        shared.of_warps[parity][warp()] = sent;
        barrier::arrive(&shared.told[parity]);
        before = atomicAdd(&shared.tellers, 1u);
      }
      before = __shfl_sync(0xffffffffu, before, 0);
      if (before % warps != warps - 1) return;
      barrier::wait(&shared.told[parity], round / 2 & 1);  // nobody is waited for long: all have told
      sent = lane() < warps ? shared.of_warps[parity][lane()] : float4{};
      sent.x = lanes_sum<32>(sent.x);
      sent.y = lanes_sum<32>(sent.y);
      sent.z = lanes_sum<32>(sent.z);
      if (lane() < blocks) {
        barrier::send(&shared.exchange[parity][blockIdx.x % blocks], sent, received, lane());
      }
      return;
    }
    float4* own = &shared.exchange[round & 1][place()];
    if constexpr (blocks > 1) {
      if (threadIdx.x == 0) barrier::expect(received, all_warps * 16);
      if (lane() < blocks) barrier::send(own, sent, received, lane());
    } else if (lane() == 0) {  // where no cluster was launched, st.async is no legal instruction
      *own = sent;
      barrier::arrive(received);
    }
#endif
  }

  // The slab's means from what all warps have sent. The stored mean is rounded: by how much is the mean of
  // xhat, `shift`, and products are moved by it. Where the mean is a hundred deviations from zero, gradients
  // of weights are twenty times as exact.
  __device__ __forceinline__ Affine receive(const Row& row, int round, float& shift) const {
    const int parity = round & 1;
#if __CUDA_ARCH__ >= 900
    barrier::wait(&shared.received[parity], round / 2 & 1);
#endif
    constexpr bool is_power = (senders & (senders - 1)) == 0;
    constexpr int lanes = senders < 32 && is_power ? senders : 32;
    float sum = 0.0f, product = 0.0f, distance = 0.0f;
#pragma unroll
    for (int i = 0; i < (senders + 31) / 32; ++i) {
      if (senders % lanes == 0 || i * 32 + lane() < senders) {
        const float4 v = shared.exchange[parity][i * 32 + lane() % lanes];
        sum += v.x;
        product += v.y;
        distance += v.z;
      }
    }
    constexpr float per_element = 1.0f / static_cast<float>(static_cast<int64>(rows) * spatial);
    sum = lanes_sum<lanes>(sum) * per_element;
    product = lanes_sum<lanes>(product) * per_element;
    shift = lanes_sum<lanes>(distance) * per_element;
    product = fmaf(-shift, sum, product);
    Affine affine;
    affine.scale = row.rstd * row.gamma;
    affine.slope = -row.rstd * row.rstd * product;
    affine.offset = row.rstd * fmaf(shift, product, -sum);
    return affine;
  }

  __device__ __forceinline__ int64 first_slab(int64 cluster, int64 clusters) const {
    return cluster * (p.batch * groups) / clusters;
  }

  // Where a cluster's sums of a group lie.
  __device__ __forceinline__ double* sums_of(int64 cluster, int64 clusters, int64 group, int place) const {
    const int64 segment = group - first_slab(cluster, clusters) / p.batch;
    return reinterpret_cast<double*>(p.parts) +
           ((cluster * p.wave_units + segment) * all_warps + place) * total_sums;
  }

  // What the slab's own sums add to those of its row.
  __device__ __forceinline__ void add_totals(const Sums& sums, float shift) const {
    double* totals = shared.sums[warp()];
    if (Tail::wants_sums && lane() == 0) {
      totals[0] += static_cast<double>(sums.dz);
      totals[1] += static_cast<double>(fmaf(-shift, sums.dz, sums.product));
#pragma unroll
      for (int s = 0; s < after_sums; ++s) totals[2 + s] += static_cast<double>(sums.after[s]);
    }
  }
  __device__ __forceinline__ void add_before_totals(const float* before_totals) const {
    if (before_sums > 0) {
#pragma unroll
      for (int s = 0; s < before_sums; ++s) {
        const float total = lanes_sum<32>(before_totals[s]);
        if (lane() == 0) shared.sums[warp()][2 + after_sums + s] += static_cast<double>(total);
      }
    }
  }

  // The warp's sums over the samples of a group it has seen go to memory; the next group's begin.
  __device__ __forceinline__ void leave_sums(int group) const {
    __syncwarp();
    double* to = sums_of(blockIdx.x / blocks, gridDim.x / blocks, group, place());
    for (int s = lane(); s < total_sums; s += 32) {
      to[s] = shared.sums[warp()][s];
      shared.sums[warp()][s] = 0.0;
    }
    __syncwarp();
  }

  // Gradients of weights from what all clusters left, by the last block: a warp a channel, always in the same
  // order.
  __device__ __forceinline__ void reduce() const {
    const int64 clusters = gridDim.x / blocks;
    for (int64 c = warp(); c < Tail::channels; c += warps) {
      const int64 group = c / rows;
      const int first_place = static_cast<int>(c % rows) * pieces;
      double total[total_sums] = {};
      for (int64 cluster = 0; cluster < clusters; ++cluster) {
        const int64 begin = first_slab(cluster, clusters);
        const int64 end = first_slab(cluster + 1, clusters);
        if (end <= group * p.batch || begin >= (group + 1) * p.batch) continue;
        for (int i = lane(); i < pieces; i += 32) {
          const double* from = sums_of(cluster, clusters, group, first_place + i);
#pragma unroll
          for (int s = 0; s < total_sums; ++s) total[s] += __ldcg(from + s);
        }
      }
#pragma unroll
      for (int s = 0; s < total_sums; ++s) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
          total[s] += __shfl_xor_sync(0xffffffffu, total[s], offset);
        }
      }
      if (lane() == 0) {
        const auto channel_sum = [&](int i) { return static_cast<float>(total[i]); };
        const auto of_sample = [](int64, int) { return 0.0f; };  // such gradients are refused
        Tail::store_channel_gradients(p, c, channel_sum, of_sample);
      }
    }
  }
};

}  // namespace onepass
