// The gradients of a tail whose slab stays on the chip: x and dy are read once, dx is written once.
//
// With h the norm's input, d = h - mean, xhat = d rstd and z the norm's output:
//   first    x, dy -> dz, and for each row the sums of dz, dz d, d and of what the after-chain reads
//   between  for each slab the means over M of gamma dz and of gamma dz xhat, by the warps of a cluster
//   second   dh = rstd (gamma dz - mean(gamma dz) - xhat mean(gamma dz xhat)), back to dx
// Clusters stay and take slab after slab, group by group. A row is cut into `pieces`, each a warp's: that
// warp has the piece in every slab. x waits in the warp's part of shared memory, where bulk copies put it, dy
// (then dz, where it is f32) in registers. As the second part is done with a chunk, the chunk of the next
// slab is sent for, and `lag` chunks later the first part begins with that: loads, arithmetic and stores of
// neighbouring slabs run together, and only the sums of a slab are waited for. Warps send theirs to all
// blocks of the cluster themselves; no barrier of a block is in the loop.
// Staged (16 bits), dy waits beside x and there are no chunks: see run_staged_slabs.
// Shared memory is left over where it can be: loads of dy pass through what the first-level cache has of it.
#pragma once

#include "tail/backward/resident_sums.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResident : TailBackwardResidentSums<Tail, Numbers> {
  using Base = TailBackwardResidentSums<Tail, Numbers>;
  using Base::add_before_totals;
  using Base::add_totals;
  using Base::arrivals;
  using Base::before_sums;
  using Base::blocks;
  using Base::chunks;
  using Base::edge_of;
  using Base::ends_row;
  using Base::even_piece;
  using Base::first_edge;
  using Base::first_slab;
  using Base::idle;
  using Base::kept;
  using Base::kept_piece;
  using Base::lag;
  using Base::lane;
  using Base::leave_sums;
  using Base::load_edge;
  using Base::merge_lanes;
  using Base::odd_piece;
  using Base::own_vectors;
  using Base::p;
  using Base::piece;
  using Base::pieces;
  using Base::receive;
  using Base::reduce;
  using Base::row_values;
  using Base::second_edge;
  using Base::send;
  using Base::shared;
  using Base::single;
  using Base::single_piece;
  using Base::staged;
  using Base::staged_part_of;
  using Base::total_sums;
  using Base::warp;
  using Base::warps;
  using typename Base::Affine;
  using typename Base::Edge;
  using typename Base::Held;
  using typename Base::Kept;
  using typename Base::Part;
  using typename Base::Row;
  using typename Base::Slab;
  using typename Base::Sums;

  template <bool plain>
  __device__ __forceinline__ void run_slabs(Slab slab) const {
    Held held;
    Edge edge;
    Sums sums;
    Part part = this->template part_of<plain>(slab);
#pragma unroll
    for (int c = 0; c < chunks; ++c) this->template ask_chunk<plain>(part, c);
    Row row = row_values(slab);
#pragma unroll
    for (int c = 0; c < chunks; ++c) this->template load_gradient<plain>(part, c, held);
    if constexpr (!plain) {
      load_edge(part.edge, edge);
      first_edge(part.edge, row, edge, sums);
    }
#pragma unroll
    for (int c = 0; c < chunks; ++c) this->template first<plain>(part, c, row, 0, held, sums);
    merge_lanes(row, sums);
    send(row, sums, 0);

#pragma unroll 1
    for (int round = 0;; ++round) {
      const bool more = slab.left > 1;
      Slab next = slab;
      if (more) next.step(static_cast<int>(p.batch));
      const Part next_part = this->template part_of<plain>(next);
      const Row next_row = row_values(next);
      float shift;
      const Affine affine = receive(row, round, shift);
      add_totals(sums, shift);
      sums = Sums();
      float before_totals[before_sums > 0 ? before_sums : 1] = {};
      if constexpr (!plain) {
        second_edge(part.edge, row, affine, edge, before_totals);
        if (more) load_edge(next_part.edge, edge);
      }
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        this->template second<plain>(part, c, row, affine, held, before_totals);
        if (more) {
          this->template load_gradient<plain>(next_part, c, held);
#if __CUDA_ARCH__ >= 900
          barrier::release_to_copies();
#endif
          __syncwarp();
          this->template ask_chunk<plain>(next_part, c);
          if (c >= lag) this->template first<plain>(next_part, c - lag, next_row, round + 1, held, sums);
        }
      }
      add_before_totals(before_totals);
      if (Tail::wants_sums && (!more || next.group != slab.group)) leave_sums(slab.group);
      if (!more) break;
#pragma unroll
      for (int c = chunks - lag; c < chunks; ++c) {
        this->template first<plain>(next_part, c, next_row, round + 1, held, sums);
      }
      if constexpr (!plain) first_edge(next_part.edge, next_row, edge, sums);
      slab = next;
      part = next_part;
      row = next_row;
      merge_lanes(row, sums);
      send(row, sums, round + 1);
    }
  }

  // The same, staged: what is doubled of the next slab is summed while the sums of
  // this one are on their way. A row's values are asked for a slab ahead.
  template <bool aligned>
  __device__ __forceinline__ void run_staged_slabs(Slab slab) const {
    const int mine = own_vectors();
    const auto batch = static_cast<int>(p.batch);
    constexpr bool has_single = single > 0;
    Slab next = slab;
    const auto step = [&] {
      if (next.left > 1) {
        next.step(batch);
      } else {
        next.left = 0;
      }
    };
    step();
    Edge edge;
    Sums sums;
    Row row = row_values(slab);
    Row next_row = row_values(next);
    Part part = staged_part_of(slab);
    Part next_part = staged_part_of(next);
    const bool has_edges = ends_row();
    Kept waiting;
    {
      this->template ask_piece<aligned>(part, even_piece, mine);
      if (has_single) this->template ask_piece<aligned>(part, single_piece, mine);
      if (kept > 0) this->template ask_piece<aligned>(part, kept_piece, mine);
      if (next.left > 0) this->template ask_piece<aligned>(next_part, odd_piece, mine);
      if (has_edges) {
        load_edge(edge_of(slab), edge);
        first_edge(edge_of(slab), row, edge, sums);
      }
      this->template first_of_piece<aligned>(part, even_piece, mine, row, 0, sums);
      if (has_single) this->template first_of_piece<aligned>(part, single_piece, mine, row, 0, sums);
      float unused[before_sums > 0 ? before_sums : 1] = {};
      this->template turn_kept<aligned>(waiting, mine, false, part, row, Affine{}, unused, true, part, row, 0,
                                        sums);
      if (kept > 0 && next.left > 0) this->template ask_piece<aligned>(next_part, kept_piece, mine);
      merge_lanes(row, sums);
      send(row, sums, 0);
    }

#pragma unroll 1
    for (int round = 0;; ++round) {
      const bool more = next.left > 0;
      const int own_piece = (round & 1) == 0 ? even_piece : odd_piece;
      Sums next_sums;
      Edge next_edge;
      if (more) {
        if (has_edges) load_edge(edge_of(next), next_edge);
        this->template first_of_piece<aligned>(next_part, own_piece ^ 1, mine, next_row, (round + 1) / 2 & 1,
                                               next_sums);
      }
      float shift;
      const Affine affine = receive(row, round, shift);
      add_totals(sums, shift);
      float before_totals[before_sums > 0 ? before_sums : 1] = {};
      if (has_edges) second_edge(edge_of(slab), row, affine, edge, before_totals);
      if (has_single) {
        this->template second_of_piece<aligned>(part, single_piece, mine, row, affine, before_totals);
        if (more) this->template ask_piece<aligned>(next_part, single_piece, mine);
      }
      const Slab current = slab;
      slab = next;
      step();
      const Row later_row = row_values(next);
      this->template second_of_piece<aligned>(part, own_piece, mine, row, affine, before_totals);
      const Part later_part = staged_part_of(next);
      if (next.left > 0) this->template ask_piece<aligned>(later_part, own_piece, mine);
      this->template turn_kept<aligned>(waiting, mine, true, part, row, affine, before_totals, more,
                                        next_part, next_row, (round + 1) & 1, next_sums);
      if (kept > 0 && next.left > 0) this->template ask_piece<aligned>(later_part, kept_piece, mine);
      add_before_totals(before_totals);
      if (Tail::wants_sums && (!more || slab.group != current.group)) leave_sums(current.group);
      if (!more) break;
      if (has_single) {
        this->template first_of_piece<aligned>(next_part, single_piece, mine, next_row, (round + 1) & 1,
                                               next_sums);
      }
      if (has_edges) first_edge(edge_of(slab), next_row, next_edge, next_sums);
      edge = next_edge;
      row = next_row;
      next_row = later_row;
      part = next_part;
      next_part = later_part;
      sums = next_sums;
      merge_lanes(row, sums);
      send(row, sums, round + 1);
    }
  }

  __device__ __forceinline__ void run() const {
    const int64 clusters = gridDim.x / blocks;
    const int64 cluster = blockIdx.x / blocks;
    for (int s = lane(); s < total_sums; s += 32) shared.sums[warp()][s] = 0.0;
#if __CUDA_ARCH__ >= 900
    if (lane() == 0) {
      for (int c = 0; c < arrivals; ++c) barrier::initialise(&shared.arrived[warp()][c]);
    }
    if (threadIdx.x == 0) {
      constexpr int tellers = blocks > 1 ? 1 : warps;
      shared.tellers = 0;
      barrier::initialise(&shared.received[0], tellers);
      barrier::initialise(&shared.received[1], tellers);
      barrier::initialise(&shared.told[0], warps);
      barrier::initialise(&shared.told[1], warps);
    }
    if constexpr (blocks > 1) {
      barrier::cluster_sync();  // no sums go to a block that has not started
    } else {
      __syncthreads();
    }
#endif
    // All pieces of a row but the last have all of their vectors in every slab.
    const bool plain = !idle() && piece() < pieces - 1 && p.is_aligned(aligned_all);
    const int64 begin = first_slab(cluster, clusters);
    const Slab slab{static_cast<int>(begin % p.batch), static_cast<int>(begin / p.batch),
                    static_cast<int>(first_slab(cluster + 1, clusters) - begin)};
    if constexpr (staged) {
      if (p.is_aligned(aligned_all)) {
        run_staged_slabs<true>(slab);
      } else {
        run_staged_slabs<false>(slab);
      }
    } else if (plain) {
      run_slabs<true>(slab);
    } else {
      run_slabs<false>(slab);
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) barrier::cluster_sync();  // none leaves while others may write to it
#endif
    if constexpr (Tail::wants_sums) {
      if (arrives_last(p.control, gridDim.x)) reduce();
    }
  }
};

}  // namespace onepass
