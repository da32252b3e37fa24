// The gradients of a tail whose slab stays on the chip: x and dy are read once, dx is written once.
//
// With h the norm's input, d = h - mean, xhat = d rstd and z the norm's output:
//   first    x, dy -> dz, and for each row the sums of dz, dz d, d and of what the after-chain reads
//   between  for each slab the means over M of gamma dz and of gamma dz xhat, by the warps of a cluster
//   second   dh = rstd (gamma dz - mean(gamma dz) - xhat mean(gamma dz xhat)), back to dx
// Clusters are persistent and take slab after slab, group by group. A row is cut into `pieces`, one a warp:
// the warp has the same piece in every slab. x waits in the warp's part of shared memory, dy (then dz, where
// it is f32) in registers. When the second part has done a chunk, the chunk of the next slab is requested;
// `lag` chunks later the first part begins with it. So loads, arithmetic and stores of neighbouring slabs
// overlap, and only the sums of a slab are waited for. Warps send theirs to all blocks of the cluster; no
// barrier of a block is in the loop. Staged (16 bits), dy waits beside x and there are no chunks: see
// run_staged_slabs. Some shared memory is left unused where possible: the first-level cache, which loads of
// dy need, has the rest.
#pragma once

#include "tail/backward/resident_sums.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResident {
  using L = TailBackwardResidentLayout<Tail, Numbers>;
  using Copies = TailBackwardResidentCopies<Tail, Numbers>;
  using Vectors = TailBackwardResidentVectors<Tail, Numbers>;
  using Totals = TailBackwardResidentSums<Tail, Numbers>;
  using Held = typename L::Held;
  using Slab = typename L::Slab;
  using Part = typename L::Part;
  using Row = typename L::Row;
  using Affine = typename L::Affine;
  using Sums = typename L::Sums;
  using Parameters = typename L::Parameters;
  using Shared = typename L::Shared;
  using Kept = typename Vectors::Kept;
  using Edge = typename Vectors::Edge;

  L block;  // what it is given: parameters, shared memory, the place in the cluster

  template <bool plain>
  __device__ __forceinline__ void run_slabs(Slab slab) const {
    Held held;
    Edge edge;
    Sums sums;
    Part part = block.template part_of<plain>(slab);
#pragma unroll
    for (int c = 0; c < L::chunks; ++c) Copies::template request_chunk<plain>(block, part, c);
    Row row = block.row_values(slab);
#pragma unroll
    for (int c = 0; c < L::chunks; ++c) Copies::template load_gradient<plain>(block, part, c, held);
    if constexpr (!plain) {
      Vectors::load_edge(block, part.edge, edge);
      Vectors::first_edge(block, part.edge, row, edge, sums);
    }
#pragma unroll
    for (int c = 0; c < L::chunks; ++c) Vectors::template first<plain>(block, part, c, row, 0, held, sums);
    Totals::merge_lanes(block, row, sums);
    Totals::send(block, row, sums, 0);

#pragma unroll 1
    for (int round = 0;; ++round) {
      const bool more = slab.left > 1;
      Slab next = slab;
      if (more) next.step(static_cast<int>(block.p.batch));
      const Part next_part = block.template part_of<plain>(next);
      const Row next_row = block.row_values(next);
      float shift;
      const Affine affine = Totals::receive(block, row, round, shift);
      Totals::add_totals(block, sums, shift);
      sums = Sums();
      float before_totals[L::before_sums > 0 ? L::before_sums : 1] = {};
      if constexpr (!plain) {
        Vectors::second_edge(block, part.edge, row, affine, edge, before_totals);
        if (more) Vectors::load_edge(block, next_part.edge, edge);
      }
#pragma unroll
      for (int c = 0; c < L::chunks; ++c) {
        Vectors::template second<plain>(block, part, c, row, affine, held, before_totals);
        if (more) {
          Copies::template load_gradient<plain>(block, next_part, c, held);
#if __CUDA_ARCH__ >= 900
          barrier::release_to_copies();
#endif
          __syncwarp();
          Copies::template request_chunk<plain>(block, next_part, c);
          if (c >= Numbers::lag)
            Vectors::template first<plain>(block, next_part, c - Numbers::lag, next_row, round + 1, held,
                                           sums);
        }
      }
      Totals::add_before_totals(block, before_totals);
      if (Tail::wants_sums && (!more || next.group != slab.group)) Totals::leave_sums(block, slab.group);
      if (!more) break;
#pragma unroll
      for (int c = L::chunks - Numbers::lag; c < L::chunks; ++c) {
        Vectors::template first<plain>(block, next_part, c, next_row, round + 1, held, sums);
      }
      if constexpr (!plain) Vectors::first_edge(block, next_part.edge, next_row, edge, sums);
      slab = next;
      part = next_part;
      row = next_row;
      Totals::merge_lanes(block, row, sums);
      Totals::send(block, row, sums, round + 1);
    }
  }

  // The same, staged: what is doubled of the next slab is summed while the sums of
  // this one are on their way. A row's values are asked for a slab ahead.
  template <bool aligned>
  __device__ __forceinline__ void run_staged_slabs(Slab slab) const {
    const int mine = block.own_vectors();
    const auto batch = static_cast<int>(block.p.batch);
    constexpr bool has_single = L::single > 0;
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
    Row row = block.row_values(slab);
    Row next_row = block.row_values(next);
    Part part = block.staged_part_of(slab);
    Part next_part = block.staged_part_of(next);
    const bool has_edges = block.ends_row();
    Kept waiting;
    {
      Copies::template request_piece<aligned>(block, part, L::even_piece, mine);
      if (has_single) Copies::template request_piece<aligned>(block, part, L::single_piece, mine);
      if (L::kept > 0) Copies::template request_piece<aligned>(block, part, L::kept_piece, mine);
      if (next.left > 0) Copies::template request_piece<aligned>(block, next_part, L::odd_piece, mine);
      if (has_edges) {
        Vectors::load_edge(block, block.edge_of(slab), edge);
        Vectors::first_edge(block, block.edge_of(slab), row, edge, sums);
      }
      Vectors::template first_of_piece<aligned>(block, part, L::even_piece, mine, row, 0, sums);
      if (has_single)
        Vectors::template first_of_piece<aligned>(block, part, L::single_piece, mine, row, 0, sums);
      float unused[L::before_sums > 0 ? L::before_sums : 1] = {};
      Vectors::template turn_kept<aligned>(block, waiting, mine, false, part, row, Affine{}, unused, true,
                                           part, row, 0, sums);
      if (L::kept > 0 && next.left > 0)
        Copies::template request_piece<aligned>(block, next_part, L::kept_piece, mine);
      Totals::merge_lanes(block, row, sums);
      Totals::send(block, row, sums, 0);
    }

#pragma unroll 1
    for (int round = 0;; ++round) {
      const bool more = next.left > 0;
      const int own_piece = (round & 1) == 0 ? L::even_piece : L::odd_piece;
      Sums next_sums;
      Edge next_edge;
      if (more) {
        if (has_edges) Vectors::load_edge(block, block.edge_of(next), next_edge);
        Vectors::template first_of_piece<aligned>(block, next_part, own_piece ^ 1, mine, next_row,
                                                  (round + 1) / 2 & 1, next_sums);
      }
      float shift;
      const Affine affine = Totals::receive(block, row, round, shift);
      Totals::add_totals(block, sums, shift);
      float before_totals[L::before_sums > 0 ? L::before_sums : 1] = {};
      if (has_edges) Vectors::second_edge(block, block.edge_of(slab), row, affine, edge, before_totals);
      if (has_single) {
        Vectors::template second_of_piece<aligned>(block, part, L::single_piece, mine, row, affine,
                                                   before_totals);
        if (more) Copies::template request_piece<aligned>(block, next_part, L::single_piece, mine);
      }
      const Slab current = slab;
      slab = next;
      step();
      const Row later_row = block.row_values(next);
      Vectors::template second_of_piece<aligned>(block, part, own_piece, mine, row, affine, before_totals);
      const Part later_part = block.staged_part_of(next);
      if (next.left > 0) Copies::template request_piece<aligned>(block, later_part, own_piece, mine);
      Vectors::template turn_kept<aligned>(block, waiting, mine, true, part, row, affine, before_totals, more,
                                           next_part, next_row, (round + 1) & 1, next_sums);
      if (L::kept > 0 && next.left > 0)
        Copies::template request_piece<aligned>(block, later_part, L::kept_piece, mine);
      Totals::add_before_totals(block, before_totals);
      if (Tail::wants_sums && (!more || slab.group != current.group))
        Totals::leave_sums(block, current.group);
      if (!more) break;
      if (has_single) {
        Vectors::template first_of_piece<aligned>(block, next_part, L::single_piece, mine, next_row,
                                                  (round + 1) & 1, next_sums);
      }
      if (has_edges) Vectors::first_edge(block, block.edge_of(slab), next_row, next_edge, next_sums);
      edge = next_edge;
      row = next_row;
      next_row = later_row;
      part = next_part;
      next_part = later_part;
      sums = next_sums;
      Totals::merge_lanes(block, row, sums);
      Totals::send(block, row, sums, round + 1);
    }
  }

  __device__ __forceinline__ void run() const {
    const int64 clusters = gridDim.x / Numbers::blocks;
    const int64 cluster = blockIdx.x / Numbers::blocks;
    for (int s = block.lane(); s < L::total_sums; s += 32) block.shared.sums[block.warp()][s] = 0.0;
#if __CUDA_ARCH__ >= 900
    if (block.lane() == 0) {
      for (int c = 0; c < L::arrivals; ++c) barrier::initialise(&block.shared.arrived[block.warp()][c]);
    }
    if (threadIdx.x == 0) {
      constexpr int arrivals_of_round = Numbers::blocks > 1 ? 1 : L::warps;
      block.shared.warps_counted = 0;
      barrier::initialise(&block.shared.received[0], arrivals_of_round);
      barrier::initialise(&block.shared.received[1], arrivals_of_round);
      barrier::initialise(&block.shared.warps_given[0], L::warps);
      barrier::initialise(&block.shared.warps_given[1], L::warps);
    }
    if constexpr (Numbers::blocks > 1) {
      barrier::cluster_sync();  // no sums go to a block that has not started
    } else {
      __syncthreads();
    }
#endif
    // All pieces of a row but the last have all of their vectors in every slab.
    const bool plain =
        !block.idle() && block.piece() < Numbers::pieces - 1 && is_aligned(block.p, aligned_all);
    const int64 begin = Totals::first_slab(block, cluster, clusters);
    const Slab slab{static_cast<int>(begin % block.p.batch), static_cast<int>(begin / block.p.batch),
                    static_cast<int>(Totals::first_slab(block, cluster + 1, clusters) - begin)};
    if constexpr (L::staged) {
      if (is_aligned(block.p, aligned_all)) {
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
    if constexpr (Numbers::blocks > 1) barrier::cluster_sync();  // none leaves while others may write to it
#endif
    if constexpr (Tail::wants_sums) {
      if (slab.left > 0)
        Totals::reduce(block, slab.group, static_cast<int>((begin + slab.left - 1) / block.p.batch));
    }
  }
};

}  // namespace onepass
