// tail_backward_resident: the arithmetic of both parts. The first turns x and dy into dz and its sums, the
// second into dx; by vectors, by chunks and pieces of them, and for the elements beside vectors.
#pragma once

#include "tail/backward/resident_copies.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResidentVectors {
  using L = TailBackwardResidentLayout<Tail, Numbers>;
  using Copies = TailBackwardResidentCopies<Tail, Numbers>;

  // The first part, of one vector: given dy, which dz replaces.
  using Arrived = Packed<typename Tail::Input, Numbers::width>;
  static __device__ __forceinline__ Arrived arrived_at(const unsigned char* from) {
    Arrived packed;
    packed.load_shared(from);
    return packed;
  }
  static __device__ __forceinline__ void first_of_vector(const L& block, int64 index, const Arrived& packed,
                                                         const typename L::Row& row,
                                                         float (&given)[Numbers::width],
                                                         typename L::Sums& sums) {
    float x[Numbers::width];
    packed.unpack(x);
    typename Tail::Before::template Tensors<Numbers::width> before;
    before.load(block.p, index);
    typename Tail::After::template Tensors<Numbers::width> after;
    after.load(block.p, index);
    typename Tail::After::template TensorGradients<Numbers::width> gradients;
    float channel_gradients[Tail::After::channel_operands > 0 ? Tail::After::channel_operands : 1];
#pragma unroll
    for (int k = 0; k < Numbers::width; ++k) {
      const float d = Tail::Before::value(x[k], row.before, before, k) - row.mean;
      if constexpr (Tail::mean_follows_norm) {
        sums.distance += d;
      } else {
        const float dz =
            L::Element::normed_gradient(row, d, after, k, given[k], channel_gradients, gradients);
        L::Element::add(sums, dz, d, channel_gradients);
        given[k] = dz;
      }
    }
    gradients.store(block.p, index);
  }

  // The second part, of one vector.
  static __device__ __forceinline__ void second_of_vector(const L& block, int64 index, const Arrived& packed,
                                                          const typename L::Row& row,
                                                          const typename L::Affine& affine,
                                                          const float (&given)[Numbers::width], bool aligned,
                                                          float* before_totals) {
    float value[Numbers::width];
    packed.unpack(value);
    typename Tail::Before::template Tensors<Numbers::width> before;
    before.load(block.p, index);
    typename Tail::After::template Tensors<Numbers::width> after;
    if constexpr (!L::holds) after.load(block.p, index);
    typename Tail::Before::template TensorGradients<Numbers::width> gradients;
#pragma unroll
    for (int k = 0; k < Numbers::width; ++k) {
      value[k] = L::Element::template second<Numbers::width, L::holds>(
          row, affine, value[k], given[k], before, after, k, gradients, before_totals);
    }
    Packed<typename Tail::InputGradient, Numbers::width> dx;
    dx.pack(value);
    dx.store(block.p.input_gradient, index, aligned);
    gradients.store(block.p, index);
  }

  // dy of a vector, or dz where that is held.
  static __device__ __forceinline__ void read_held(const L& block, const typename L::Row& row,
                                                   const typename L::Held& held, int i,
                                                   float (&given)[Numbers::width]) {
    if constexpr (L::holds) {
      held[i].unpack(given);
    } else {
#pragma unroll
      for (int k = 0; k < Numbers::width; ++k) given[k] = row.dy;
    }
  }
  // The two parts of one chunk, where nothing is staged.
  template <bool plain>
  static __device__ __forceinline__ void first(const L& block, const typename L::Part& part, int c,
                                               const typename L::Row& row, int round, typename L::Held& held,
                                               typename L::Sums& sums) {
#if __CUDA_ARCH__ >= 900
    barrier::wait(&block.shared.arrived[block.warp()][c], round & 1);
#endif
    Copies::template for_each_vector<plain>(part, c, [&](int i) {
      float given[Numbers::width];
      read_held(block, row, held, i, given);
      first_of_vector(
          block, part.index + i * 32 * Numbers::width,
          arrived_at(block.shared.stage[block.warp()] + (i * 32 + block.lane()) * L::vector_bytes), row,
          given, sums);
      if constexpr (L::holds) held[i].pack(given);
    });
  }
  template <bool plain>
  static __device__ __forceinline__ void second(const L& block, const typename L::Part& part, int c,
                                                const typename L::Row& row, const typename L::Affine& affine,
                                                const typename L::Held& held, float* before_totals) {
    Copies::template for_each_vector<plain>(part, c, [&](int i) {
      float given[Numbers::width];
      read_held(block, row, held, i, given);
      second_of_vector(
          block, part.index + i * 32 * Numbers::width,
          arrived_at(block.shared.stage[block.warp()] + (i * 32 + block.lane()) * L::vector_bytes), row,
          affine, given, plain || is_aligned(block.p, aligned_input_gradient), before_totals);
    });
  }

  // dy of a vector in shared memory, or the row's.
  static __device__ __forceinline__ void read_given(const L& block, const typename L::Row& row, int piece,
                                                    int i, float (&given)[Numbers::width]) {
    if constexpr (L::stages) {
      Packed<typename Tail::OutputGradient, Numbers::width> dy;
      dy.load_shared(Copies::gradient_at(block, piece, i));
      dy.unpack(given);
    } else {
#pragma unroll
      for (int k = 0; k < Numbers::width; ++k) given[k] = row.dy;
    }
  }
  // The vectors of a piece through f. The last ones of a warp, which others may have, are asked about one by
  // one; so are all where a tensor's vectors do not lie on 16 bytes.
  template <bool aligned, class F>
  static __device__ __forceinline__ void for_each_of_piece(const L& block, const typename L::Part& part,
                                                           int piece, int mine, F&& f) {
    constexpr int uncertain = 2;
    constexpr int least =
        Numbers::vectors - uncertain > L::doubled ? Numbers::vectors - uncertain : L::doubled;
    // Of those with one place, all where one body has them.
    constexpr bool has_all = L::single <= L::at_once || least > L::doubled + L::single;
    constexpr int certain = has_all ? L::doubled + L::single : least;
    const int to_end = (part.left + block.lane()) / 32;  // vectors that all lanes have
    const int full = to_end < mine ? to_end : mine;
    const bool is_single = piece == L::single_piece;
    int i = Copies::first_of(piece);
    if (aligned && full >= (is_single ? certain : L::doubled)) {
      if (is_single) {
#pragma unroll(L::at_once)
        for (i = L::doubled; i < certain; ++i) f(i);
      } else {
#pragma unroll(L::at_once)
        for (i = 0; i < L::doubled; ++i) f(i);
      }
    }
    const int end = Copies::end_of(piece, mine);
#pragma unroll 1
    for (; i < end; ++i) {
      if (part.template has<false>(i)) f(i);
    }
  }

  // What waits in registers: x, and dy or dz.
  struct Kept {
    Arrived x[L::kept > 0 ? L::kept : 1];
    Packed<typename Tail::OutputGradient, Numbers::width> given[L::kept > 0 && L::stages ? L::kept : 1];
  };
  // The second part of what is kept, where `part` has it, then the first part of the next slab's.
  template <bool aligned>
  static __device__ __forceinline__ void turn_kept(const L& block, Kept& waiting, int mine, bool has_part,
                                                   const typename L::Part& part, const typename L::Row& row,
                                                   const typename L::Affine& affine, float* before_totals,
                                                   bool has_next, const typename L::Part& next,
                                                   const typename L::Row& next_row, uint32 phase,
                                                   typename L::Sums& sums) {
    if constexpr (L::kept > 0) {
#if __CUDA_ARCH__ >= 900
      if (has_next) barrier::wait(&block.shared.arrived[block.warp()][L::kept_piece], phase);
#endif
#pragma unroll
      for (int i = Numbers::vectors - L::kept; i < Numbers::vectors; ++i) {
        Arrived& x = waiting.x[i - (Numbers::vectors - L::kept)];
        Packed<typename Tail::OutputGradient, Numbers::width>& held =
            waiting.given[L::stages ? i - (Numbers::vectors - L::kept) : 0];
        float given[Numbers::width];
        if (has_part && i < mine && part.template has<false>(i)) {
          if constexpr (L::stages) {
            held.unpack(given);
          } else {
#pragma unroll
            for (int k = 0; k < Numbers::width; ++k) given[k] = row.dy;
          }
          second_of_vector(block, part.index + i * 32 * Numbers::width, x, row, affine, given,
                           aligned || is_aligned(block.p, aligned_input_gradient), before_totals);
        }
        if (has_next && i < mine && next.template has<false>(i)) {
          x.load_shared(Copies::stage_at(block, L::kept_piece, i));
          if constexpr (L::stages) {
            held.load_shared(Copies::gradient_at(block, L::kept_piece, i));
            held.unpack(given);
          } else {
#pragma unroll
            for (int k = 0; k < Numbers::width; ++k) given[k] = next_row.dy;
          }
          first_of_vector(block, next.index + i * 32 * Numbers::width, x, next_row, given, sums);
        }
      }
    }
  }
  // The two parts of one piece, where it waits in shared memory.
  template <bool aligned>
  static __device__ __forceinline__ void first_of_piece(const L& block, const typename L::Part& part,
                                                        int piece, int mine, const typename L::Row& row,
                                                        uint32 phase, typename L::Sums& sums) {
#if __CUDA_ARCH__ >= 900
    barrier::wait(&block.shared.arrived[block.warp()][piece], phase);
#endif
    for_each_of_piece<aligned>(block, part, piece, mine, [&](int i) {
      float given[Numbers::width];
      read_given(block, row, piece, i, given);
      first_of_vector(block, part.index + i * 32 * Numbers::width,
                      arrived_at(Copies::stage_at(block, piece, i)), row, given, sums);
    });
  }
  template <bool aligned>
  static __device__ __forceinline__ void second_of_piece(const L& block, const typename L::Part& part,
                                                         int piece, int mine, const typename L::Row& row,
                                                         const typename L::Affine& affine,
                                                         float* before_totals) {
    for_each_of_piece<aligned>(block, part, piece, mine, [&](int i) {
      float given[Numbers::width];
      read_given(block, row, piece, i, given);
      second_of_vector(block, part.index + i * 32 * Numbers::width,
                       arrived_at(Copies::stage_at(block, piece, i)), row, affine, given,
                       aligned || is_aligned(block.p, aligned_input_gradient), before_totals);
    });
  }

  // The element beside the vectors that a lane may have, converted where it is used: it is asked for long
  // before, and the sums of all warps would wait for the one that waits for it.
  struct Edge {
    Packed<typename Tail::Input, 1> arrived;
    Packed<typename Tail::OutputGradient, 1> arrived_gradient;
    float x = 0.0f, given = 0.0f;  // dy, then dz where it is held
  };

  static __device__ __forceinline__ void load_edge(const L& block, int64 at, Edge& edge) {
    if (at < 0) return;
    edge.arrived.load(block.p.input, at, false);
    if constexpr (!Tail::has_mean) edge.arrived_gradient.load(block.p.output_gradient, at, false);
  }

  static __device__ __forceinline__ void first_edge(const L& block, int64 at, const typename L::Row& row,
                                                    Edge& edge, typename L::Sums& sums) {
    if (at < 0) return;
    typename Tail::Before::template Tensors<1> before;
    before.load(block.p, at);
    typename Tail::After::template Tensors<1> after;
    after.load(block.p, at);
    typename Tail::After::template TensorGradients<1> gradients;
    float channel_gradients[Tail::After::channel_operands > 0 ? Tail::After::channel_operands : 1];
    edge.x = edge.arrived.at(0);
    edge.given = Tail::has_mean ? row.dy : edge.arrived_gradient.at(0);
    const float d = Tail::Before::value(edge.x, row.before, before, 0) - row.mean;
    if constexpr (Tail::mean_follows_norm) {
      sums.distance += d;
    } else {
      const float dz =
          L::Element::normed_gradient(row, d, after, 0, edge.given, channel_gradients, gradients);
      L::Element::add(sums, dz, d, channel_gradients);
      if constexpr (L::holds) edge.given = dz;
      gradients.store(block.p, at);
    }
  }

  static __device__ __forceinline__ void second_edge(const L& block, int64 at, const typename L::Row& row,
                                                     const typename L::Affine& affine, const Edge& edge,
                                                     float* before_totals) {
    if (at < 0) return;
    typename Tail::Before::template Tensors<1> before;
    before.load(block.p, at);
    typename Tail::After::template Tensors<1> after;
    if constexpr (!L::holds) after.load(block.p, at);
    typename Tail::Before::template TensorGradients<1> gradients;
    const float dx = L::Element::template second<1, L::holds>(row, affine, edge.x, edge.given, before, after,
                                                              0, gradients, before_totals);
    store_one<typename Tail::InputGradient>(block.p.input_gradient, at, dx);
    gradients.store(block.p, at);
  }
};

}  // namespace onepass
