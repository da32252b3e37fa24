// The schedule "overlapped" of tail_staged, for 16-bit elements: the moments of one slab are exchanged while
// the next one is begun.
//
// A warp's part of a slab arrives by bulk copies, in three pieces:
//   doubled   has two places, for slabs in turn: that of the next slab is summed while the moments of this
//   one
//             are exchanged. It stays as it arrived, and the before-chain is computed again for the output;
//             or its result is computed once and waits in the same place (see `holds_f16`).
//   single    has one place, which is requested again as soon as the output is written
//   kept      results of the before-chain wait in registers: as one vector's output is written, the next
//             slab's takes its place
// Elements before the first vector and after the last one are kept by the first block, one a thread. Where
// the block ends in a mean, values are added up instead of stored.
#pragma once

#include "tail/staged/overlapped_moments.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct StagedOverlapped<Tail, Numbers>::Kernel {
  using Parameters = typename StagedOverlapped::Parameters;
  using Shared = typename StagedOverlapped::Shared;
  using Means = typename StagedOverlapped::Means;

  // The kernel's one copy of what it is given: with a second one registers are allocated differently.
  Pieces pieces;

  // A warp's part lies in two rows at most: the values of both are loaded at the beginning.
  static constexpr bool few_rows = S::vectors * 32 * S::width <= S::spatial;
  // Stands for a RowCursor then. `row` is what the current one has.
  template <class Values>
  struct TwoRows {
    int end;  // of the first
    const Values& first;
    const Values& second;
    Values& row;

    __device__ __forceinline__ bool covers(int begin, int last) {
      row = begin >= end ? second : first;
      return last <= end || begin >= end;
    }
    template <int Width, class F>
    __device__ __forceinline__ void visit(int position, F&& f) {
#pragma unroll
      for (int k = 0; k < Width; ++k) {
        row = position + k >= end ? second : first;
        f(k, k + 1);
      }
    }
  };

  // Whether the vectors [from, to) of the part are all there, the last of a full part aside, in one row.
  template <bool by_row, class R>
  static __device__ __forceinline__ bool is_plain(const Part& part, int from, int to, R& rows) {
    bool plain = part.full();
    if constexpr (by_row) {
      const bool covered = rows.covers(part.line_of(from), part.end_of(to));
      plain = plain && covered;
    }
    return plain;
  }
  // After lanes may have gone on to different rows.
  template <bool by_row, class R>
  static __device__ __forceinline__ void forget(R& rows) {
    if constexpr (by_row && !few_rows) rows.end = 0;
  }
  // The parts of vector i for f.
  template <bool by_row, class R, class F>
  static __device__ __forceinline__ void visit(const Part& part, int i, R& rows, F&& f) {
    if constexpr (by_row) {
      rows.template visit<S::width>(part.position_of(i), f);
    } else {
      f(0, S::width);
    }
  }

  // What the norm gets of vector i: the before-chain of what arrived. parts(f) calls f for parts in one row.
  template <class Parts>
  __device__ __forceinline__ void activate(const unsigned char* from, const Part& part, int i,
                                           const float* operands, Parts&& parts,
                                           float (&value)[S::width]) const {
    Packed<Input, S::width> packed;
    packed.load_shared(from);
    packed.unpack(value);
    typename Before::template Tensors<S::width> tensors;
    tensors.load(pieces.p, part.index_of(i));
    parts([&](int first, int last) {
#pragma unroll
      for (int k = 0; k < S::width; ++k) {
        if (k >= first && k < last) value[k] = Before::value(value[k], operands, tensors, k);
      }
    });
  }

  // Adds a vector to the sums. Its values become distances where those are held.
  static __device__ __forceinline__ void add(float (&value)[S::width], Sums& sums) {
#pragma unroll
    for (int k = 0; k < S::width; ++k) {
      const float distance = sums.add(value[k], k);
      if constexpr (holds_f16) value[k] = distance;
    }
  }
  // The same of a piece in shared memory, where it waits for the output.
  __device__ __forceinline__ void sum_vector(int piece, int i, float (&value)[S::width], Sums& sums) const {
    add(value, sums);
    if constexpr (holds_f16) {
      Packed<f16, S::width> packed;
      packed.pack(value);
      packed.store_shared(pieces.vector_of(piece, i));
    }
  }

  // Sums of a piece that is not kept.
  template <bool is_first, class R>
  __device__ __forceinline__ void sum_piece(const Part& part, int piece, R& rows, const float* operands,
                                            Sums& sums) const {
    const int from = first_of(piece), to = from + count_of(piece);
    const auto whole = [](auto&& f) { f(0, S::width); };
    const bool plain = is_plain<S::before_by_row>(part, from, to, rows);
    const auto careful = [&](int i, float(&value)[S::width]) {
      activate(
          pieces.vector_of(piece, i), part, i, operands,
          [&](auto&& f) { visit<S::before_by_row>(part, i, rows, f); }, value);
    };
    if constexpr (is_first) {
      float value[S::width] = {};
      if (plain) {
        activate(pieces.vector_of(piece, 0), part, 0, operands, whole, value);
      } else if (part.has(0)) {
        careful(0, value);
      }
      // As distances from the first one: of equal values the mean is that value.
      const float first = __shfl_sync(0xffffffffu, value[0], 0);
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < S::width; ++k) sum += distance_from(value[k], first);
      if (!plain && !part.has(0)) sum = 0.0f;
      const auto elements = static_cast<float>((part.count < 32 ? part.count : 32) * S::width);
      sums.pivot =
          fmaf(lanes_sum<32>(sum), part.count > 0 ? pointwise::reciprocal_fast(elements) : 0.0f, first);
      if (plain || part.has(0)) sum_vector(piece, 0, value, sums);
    }
    if (plain) {
#pragma unroll(at_once)
      for (int i = from + (is_first ? 1 : 0); i < to; ++i) {
        float value[S::width];
        activate(pieces.vector_of(piece, i), part, i, operands, whole, value);
        sum_vector(piece, i, value, sums);
      }
    } else {
#pragma unroll 1
      for (int i = from + (is_first ? 1 : 0); i < to; ++i) {
        if (!part.has(i)) continue;
        float value[S::width];
        careful(i, value);
        sum_vector(piece, i, value, sums);
      }
      forget<S::before_by_row>(rows);
    }
  }

  // What a row brings to the sums, and to the output.
  struct BeforeValues {
    float before[Before::channel_operands > 0 ? Before::channel_operands : 1];
  };
  struct RowValues : BeforeValues {
    float after[After::channel_operands > 0 ? After::channel_operands : 1];
    float scale, shift;  // of the norm; before its statistics are known, its weight and bias

    __device__ __forceinline__ void norm(float mean, float factor) {
      scale *= factor;
      shift = fmaf(-mean, scale, shift);
    }
  };
  __device__ __forceinline__ void load_before(int slab, int row, BeforeValues& values) const {
    const int channel = slab % S::groups * static_cast<int>(Tail::group_channels) + row;
    Before::load_channel(pieces.p, slab / S::groups, channel, values.before);
  }
  __device__ __forceinline__ void load_row(int slab, int row, RowValues& values) const {
    const int channel = slab % S::groups * static_cast<int>(Tail::group_channels) + row;
    values.scale = Tail::weight(pieces.p, channel);
    values.shift = Tail::bias(pieces.p, channel);
    After::load_channel(pieces.p, slab / S::groups, channel, values.after);
    Before::load_channel(pieces.p, slab / S::groups, channel, values.before);
  }
  static __device__ __forceinline__ int row_after(int row) {
    return row + 1 < static_cast<int>(Tail::group_channels) ? row + 1 : row;
  }

  // What waits for the output in shared memory.
  using Waiting = conditional<holds_f16, f16, Input>;
  using RowSums = typename Means::Sums;

  // Output of vector i, or what it adds to the sums for a mean. Raw: `value` is what arrived, else what the
  // norm gets. Plain: it lies in the row that the sums have entered, and on 16 bytes.
  template <bool is_raw, bool is_plain, class Parts>
  __device__ __forceinline__ void finish(const Part& part, int i, const RowValues& row, bool aligned,
                                         Parts&& parts, float (&value)[S::width], RowSums& means) const {
    const int64 index = part.index_of(i);
    typename Before::template Tensors<S::width> before;
    if constexpr (is_raw) before.load(pieces.p, index);
    typename After::template Tensors<S::width> after;
    after.load(pieces.p, index);
    parts([&](int first, int last) {
#pragma unroll
      for (int k = 0; k < S::width; ++k) {
        if (k >= first && k < last) {
          if constexpr (is_raw) value[k] = Before::value(value[k], row.before, before, k);
          value[k] = After::value(fmaf(value[k], row.scale, row.shift), row.after, after, k);
        }
      }
    });
    if constexpr (!Tail::has_mean) {
      Packed<typename Tail::Output, S::width> y;
      y.pack(value);
      y.store(pieces.p.output, index, is_plain || aligned);
    } else if constexpr (is_plain) {
      means.add_whole(part.line_of(i), value);
    } else {
      means.add(part.position_of(i), value);
    }
  }

  __device__ __forceinline__ bool output_is_aligned() const {
    return Tail::has_mean || is_aligned(pieces.p, aligned_output);
  }
  // A warp's part is one run, or each piece of it.
  template <bool of_part>
  __device__ __forceinline__ void begin_run(const Part& part, int slab, int piece, RowSums& means) const {
    if constexpr (of_part == S::few_rows) {
      const int warp = pieces.block * S::warps + pieces.warp();
      means.begin(pieces.p, slab, warp, of_part ? 0 : run_of(piece),
                  part.line_of(of_part ? 0 : first_of(piece)));
    }
  }
  template <bool of_part>
  __device__ __forceinline__ void finish_run(const Part& part, int piece, RowSums& means) const {
    if constexpr (of_part == S::few_rows)
      means.finish(part.end_of(of_part ? S::vectors : first_of(piece) + count_of(piece)));
  }

  // Output of a piece that is not kept. Halves: distances from `shift`, where they fit.
  template <class R>
  __device__ __forceinline__ void finish_piece(const Part& part, int slab, int piece, R& rows,
                                               const RowValues& row, float shift, bool fits,
                                               RowSums& means) const {
    constexpr bool by_row = S::after_by_row || S::before_by_row;
    const int from = first_of(piece), to = from + count_of(piece);
    const bool aligned = output_is_aligned();
    begin_run<false>(part, slab, piece, means);
    const bool plain = is_plain<by_row>(part, from, to, rows);
    const auto waiting = [&](int i, float(&value)[S::width]) {
      Packed<Waiting, S::width> packed;
      packed.load_shared(pieces.vector_of(piece, i));
      packed.unpack(value);
    };
    if (plain && aligned && (!holds_f16 || fits)) {
      means.enter(part.line_of(from));
#pragma unroll(at_once)
      for (int i = from; i < to; ++i) {
        float value[S::width];
        waiting(i, value);
        finish<!holds_f16, true>(
            part, i, row, true, [](auto&& f) { f(0, S::width); }, value, means);
      }
    } else {
#pragma unroll 1
      for (int i = from; i < to; ++i) {
        means.enter(part.line_of(i));
        if (!part.has(i)) continue;
        float value[S::width];
        if (!holds_f16 || fits) {
          waiting(i, value);
        } else {
          Packed<Input, S::width> packed;
          packed.load(pieces.p.input, part.index_of(i), true);
          packed.unpack(value);
          typename Before::template Tensors<S::width> tensors;
          tensors.load(pieces.p, part.index_of(i));
          visit<by_row>(part, i, rows, [&](int first, int last) {
#pragma unroll
            for (int k = 0; k < S::width; ++k) {
              if (k >= first && k < last) value[k] = Before::value(value[k], row.before, tensors, k) - shift;
            }
          });
          forget<by_row>(rows);
        }
        finish<!holds_f16, false>(
            part, i, row, aligned, [&](auto&& f) { visit<by_row>(part, i, rows, f); }, value, means);
      }
      forget<by_row>(rows);
    }
    finish_run<false>(part, piece, means);
  }

  __device__ __forceinline__ void run() const {
    const int slabs = static_cast<int>(pieces.p.batch) * S::groups;
    const int clusters = static_cast<int>(gridDim.x) / S::blocks;
    int slab = static_cast<int>(blockIdx.x) / S::blocks;  // the one that is summed
#if __CUDA_ARCH__ >= 900
    if (pieces.lane() == 0) {
      for (int i = 0; i < all_pieces; ++i) barrier::initialise(&pieces.shared.arrived[pieces.warp()][i]);
    }
    __syncwarp();
    Part next = pieces.part_of(slab);
    if (slab < slabs) {
      pieces.request(next, even_piece);
      if constexpr (single > 0) pieces.request(next, single_piece);
      pieces.request(next, kept_piece);
    }
    if (slab + clusters < slabs) pieces.request(pieces.part_of(slab + clusters), odd_piece);
    if (threadIdx.x == 0) {
      initialise_exchange<S::warps>(pieces.shared);
      pieces.shared.warps_counted = 0;
    }
    sync_cluster<S>();

    float h[kept][S::width];
#pragma unroll
    for (int i = 0; i < kept; ++i) {
#pragma unroll
      for (int k = 0; k < S::width; ++k) h[i][k] = 0.0f;
    }
    float edge = 0.0f;
    // Of the warp's part of the slab whose output is due: what its values were moved by, and their squares.
    float shift = 0.0f, square = 0.0f;
    Part part = next;
#pragma unroll 1
    for (int round = 0;; ++round, slab += clusters) {
      const bool has_current = round > 0;
      const bool more = slab < slabs;
      const int current = slab - clusters;
      const uint32 parity = round & 1;
      constexpr bool by_row = S::after_by_row || S::before_by_row;
      const int own_row = part.position / S::spatial;
      const int edge_position = has_current ? pieces.edge_of(part) : -1;
      RowValues row, row_0, row_1, edge_row;
      row.scale = row_0.scale = row_1.scale = edge_row.scale = 1.0f;
      row.shift = row_0.shift = row_1.shift = edge_row.shift = 0.0f;
      // The values of the warp's rows are on their way while sums are.
      if (by_row && has_current) {
        load_row(current, own_row, row_0);
        if (few_rows) load_row(current, row_after(own_row), row_1);
        if (edge_position >= 0) load_row(current, edge_position / S::spatial, edge_row);
      }
      Sums sums;
      BeforeValues before, before_0, before_1;
      auto next_rows = [&] {
        if constexpr (few_rows) {
          const int next_row = next.position / S::spatial;
          if (S::before_by_row && more) {
            load_before(slab, next_row, before_0);
            load_before(slab, row_after(next_row), before_1);
          }
          return TwoRows<BeforeValues>{(next_row + 1) * S::spatial, before_0, before_1, before};
        } else {
          return row_cursor<S::spatial, true>([&](int r) { load_before(slab, r, before); });
        }
      }();
      // Converted where it is used: the sums of all warps would wait for the one that waits for it.
      Packed<Input, 1> next_edge;
      if (more) {
        const int position = pieces.edge_of(next);
        if (position >= 0) next_edge.load(pieces.p.input, next.begin + position, false);
        const int piece = parity == 0 ? even_piece : odd_piece;
        pieces.wait(piece, round / 2 & 1);
        sum_piece<true>(next, piece, next_rows, before.before, sums);
      }

      float mean = 0.0f, rstd = 0.0f, factor = 0.0f;
      float moved_mean = 0.0f;  // from the shift
      auto rows = [&] {
        if constexpr (few_rows) {
          return TwoRows<RowValues>{(own_row + 1) * S::spatial, row_0, row_1, row};
        } else {
          return row_cursor<S::spatial, true>([&](int r) {
            load_row(current, r, row);
            row.norm(moved_mean, factor);
          });
        }
      }();
      RowSums means;
      Part second = next;  // the slab after the next
      if (slab + clusters < slabs) second = pieces.part_of(slab + clusters);
      if (has_current) {
        Statistics::receive(pieces.shared, round - 1, mean, rstd, factor);
        if (pieces.p.statistics != nullptr && pieces.block == 0 && threadIdx.x == 0) {
          pieces.p.statistics[2 * static_cast<int64>(current)] = mean;
          pieces.p.statistics[2 * static_cast<int64>(current) + 1] = rstd;
        }
        moved_mean = mean - shift;
        const bool fits = Statistics::fits_f16(square, rstd);
        row_0.norm(moved_mean, factor);
        row_1.norm(moved_mean, factor);
        row = row_0;
        if constexpr (!few_rows) {
          rows.row = own_row;
          rows.end = (own_row + 1) * S::spatial;
        }
        if (edge_position >= 0) {
          edge_row.norm(mean, factor);
          typename After::template Tensors<1> tensors;
          tensors.load(pieces.p, part.begin + edge_position);
          const float y =
              After::value(fmaf(edge, edge_row.scale, edge_row.shift), edge_row.after, tensors, 0);
          if constexpr (Tail::has_mean)
            edge = y;
          else
            store_one<typename Tail::Output>(pieces.p.output, part.begin + edge_position, y);
        }
        if constexpr (Tail::has_mean) {
          if (pieces.has_edges(part))
            Means::leave_edges(pieces.p, current, part.head, edge_position >= 0, edge);
        }
        begin_run<true>(part, current, kept_piece, means);
        if constexpr (single > 0) {
          finish_piece(part, current, single_piece, rows, row, shift, fits, means);
          if (more) pieces.request_again(next, single_piece);
        }
        const int piece = parity == 0 ? odd_piece : even_piece;
        finish_piece(part, current, piece, rows, row, shift, fits, means);
        begin_run<false>(part, current, kept_piece, means);
        if (slab + clusters < slabs) pieces.request_again(second, piece);
      }
      // Output of what is kept, and what takes its place.
      if (more) pieces.wait(kept_piece, parity);
      {
        const bool aligned = output_is_aligned();
        bool plain = aligned && has_current && more;
        if (has_current) plain = is_plain<S::after_by_row>(part, raw, S::vectors, rows) && plain;
        if (more) plain = is_plain<S::before_by_row>(next, raw, S::vectors, next_rows) && plain;
        const auto whole = [](auto&& f) { f(0, S::width); };
        if (plain) {
          means.enter(part.line_of(raw));
#pragma unroll
          for (int i = raw; i < S::vectors; ++i) {
            if (i < S::vectors - uncertain || part.has(i))
              finish<false, true>(part, i, row, true, whole, h[i - raw], means);
            if (i < S::vectors - uncertain || next.has(i)) {
              activate(pieces.vector_of(kept_piece, i), next, i, before.before, whole, h[i - raw]);
              add(h[i - raw], sums);
            }
          }
        } else {
#pragma unroll
          for (int i = raw; i < S::vectors; ++i) {
            if (has_current) means.enter(part.line_of(i));
            if (has_current && part.has(i)) {
              finish<false, false>(
                  part, i, row, aligned, [&](auto&& f) { visit<S::after_by_row>(part, i, rows, f); },
                  h[i - raw], means);
            }
            if (more && next.has(i)) {
              activate(
                  pieces.vector_of(kept_piece, i), next, i, before.before,
                  [&](auto&& f) { visit<S::before_by_row>(next, i, next_rows, f); }, h[i - raw]);
              add(h[i - raw], sums);
            }
          }
          forget<S::before_by_row>(next_rows);
        }
      }
      if (has_current) {
        finish_run<false>(part, kept_piece, means);
        finish_run<true>(part, kept_piece, means);
      }
      if (slab + clusters < slabs) pieces.request_again(second, kept_piece);
      if (!more) break;
      if constexpr (single > 0) {
        pieces.wait(single_piece, parity);
        sum_piece<false>(next, single_piece, next_rows, before.before, sums);
      }
      const int position = pieces.edge_of(next);
      if (position >= 0) {
        if constexpr (S::before_by_row) load_before(slab, position / S::spatial, before);
        typename Before::template Tensors<1> tensors;
        tensors.load(pieces.p, next.begin + position);
        edge = Before::value(next_edge.at(0), before.before, tensors, 0);
        sums.add(edge, 0);
      }
      const float own_square = Statistics::send(pieces, next, sums, round);
      if constexpr (holds_f16) {
        shift = sums.pivot;
        square = own_square;
      }
      part = next;
      next = second;
    }
    if constexpr (Tail::has_mean) {
      Means::write(pieces.p, pieces.block, slabs, clusters, [](int) { return spread(); });
    } else {
      leave_cluster<S>();
    }
#endif
  }
};

}  // namespace onepass
