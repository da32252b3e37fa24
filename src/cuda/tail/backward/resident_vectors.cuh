// The two parts of tail_backward_resident.cuh on elements: x and dy to dz and its sums, then to dx; of
// vectors, of chunks and pieces of them, and of what lies beside them.
#pragma once

#include "tail/backward/resident_copies.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResidentVectors : TailBackwardResidentCopies<Tail, Numbers> {
  using Base = TailBackwardResidentCopies<Tail, Numbers>;
  using Base::after_sums;
  using Base::at_once;
  using Base::before_sums;
  using Base::doubled;
  using Base::end_of;
  using Base::first_of;
  using Base::gradient_at;
  using Base::holds;
  using Base::kept;
  using Base::kept_piece;
  using Base::lane;
  using Base::p;
  using Base::shared;
  using Base::single;
  using Base::single_piece;
  using Base::stage_at;
  using Base::stages;
  using Base::vector_bytes;
  using Base::vectors;
  using Base::warp;
  using Base::width;
  using typename Base::Affine;
  using typename Base::After;
  using typename Base::Before;
  using typename Base::Folded;
  using typename Base::Held;
  using typename Base::Input;
  using typename Base::OutputGradient;
  using typename Base::Part;
  using typename Base::Row;
  using typename Base::Sums;

  // dz of an element of distance d, and what the after-chain's operands get.
  template <class Tensors, class Gradients>
  static __device__ __forceinline__ float normed_gradient(const Row& row, float d, const Tensors& tensors,
                                                          int k, float dy, float* channel_gradients,
                                                          Gradients& gradients) {
    if constexpr (Folded::exists) {
      const float scale = row.rstd * row.gamma * Folded::scale;
      return Folded::gradient(fmaf(d, scale, fmaf(row.beta, Folded::scale, Folded::shift)), dy);
    }
    const float z = fmaf(d, row.rstd * row.gamma, row.beta);
    return After::gradient(z, row.after, tensors, k, dy, channel_gradients, gradients);
  }

  static __device__ __forceinline__ void add(Sums& sums, float dz, float d, const float* channel_gradients) {
    sums.dz += dz;
    sums.product = fmaf(dz, d, sums.product);
    sums.distance += d;
#pragma unroll
    for (int s = 0; s < after_sums; ++s) sums.after[s] += channel_gradients[s];
  }

  // The first part, of one vector: given dy, which dz replaces.
  using Arrived = Packed<Input, width>;
  static __device__ __forceinline__ Arrived arrived_at(const unsigned char* from) {
    Arrived packed;
    packed.load_shared(from);
    return packed;
  }
  __device__ __forceinline__ void first_of_vector(int64 index, const Arrived& packed, const Row& row,
                                                  float (&given)[width], Sums& sums) const {
    float x[width];
    packed.unpack(x);
    typename Before::template Tensors<width> before;
    before.load(p, index);
    typename After::template Tensors<width> after;
    after.load(p, index);
    typename After::template TensorGradients<width> gradients;
    float channel_gradients[After::channel_operands > 0 ? After::channel_operands : 1];
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const float d = Before::value(x[k], row.before, before, k) - row.mean;
      if constexpr (Tail::mean_follows_norm) {
        sums.distance += d;
      } else {
        const float dz = normed_gradient(row, d, after, k, given[k], channel_gradients, gradients);
        add(sums, dz, d, channel_gradients);
        given[k] = dz;
      }
    }
    gradients.store(p, index);
  }

  // The second part, of one vector.
  __device__ __forceinline__ void second_of_vector(int64 index, const Arrived& packed, const Row& row,
                                                   const Affine& affine, const float (&given)[width],
                                                   bool aligned, float* before_totals) const {
    float value[width];
    packed.unpack(value);
    typename Before::template Tensors<width> before;
    before.load(p, index);
    typename After::template Tensors<width> after;
    if constexpr (!holds) after.load(p, index);
    typename Before::template TensorGradients<width> gradients;
#pragma unroll
    for (int k = 0; k < width; ++k) {
      value[k] = element<width>(row, affine, value[k], given[k], before, after, k, gradients, before_totals);
    }
    Packed<typename Tail::InputGradient, width> dx;
    dx.pack(value);
    dx.store(p.input_gradient, index, aligned);
    gradients.store(p, index);
  }

  // dy of a vector, or dz where that is held.
  __device__ __forceinline__ void read_held(const Row& row, const Held& held, int i,
                                            float (&given)[width]) const {
    if constexpr (holds) {
      held[i].unpack(given);
    } else {
#pragma unroll
      for (int k = 0; k < width; ++k) given[k] = row.dy;
    }
  }
  // The two parts of one chunk, where nothing is staged.
  template <bool plain>
  __device__ __forceinline__ void first(const Part& part, int c, const Row& row, int round, Held& held,
                                        Sums& sums) const {
#if __CUDA_ARCH__ >= 900
    barrier::wait(&shared.arrived[warp()][c], round & 1);
#endif
    this->template for_each_vector<plain>(part, c, [&](int i) {
      float given[width];
      read_held(row, held, i, given);
      first_of_vector(part.index + i * 32 * width,
                      arrived_at(shared.stage[warp()] + (i * 32 + lane()) * vector_bytes), row, given, sums);
      if constexpr (holds) held[i].pack(given);
    });
  }
  template <bool plain>
  __device__ __forceinline__ void second(const Part& part, int c, const Row& row, const Affine& affine,
                                         const Held& held, float* before_totals) const {
    this->template for_each_vector<plain>(part, c, [&](int i) {
      float given[width];
      read_held(row, held, i, given);
      second_of_vector(part.index + i * 32 * width,
                       arrived_at(shared.stage[warp()] + (i * 32 + lane()) * vector_bytes), row, affine,
                       given, plain || p.is_aligned(aligned_input_gradient), before_totals);
    });
  }

  // dy of a vector in shared memory, or the row's.
  __device__ __forceinline__ void read_given(const Row& row, int piece, int i, float (&given)[width]) const {
    if constexpr (stages) {
      Packed<OutputGradient, width> dy;
      dy.load_shared(gradient_at(piece, i));
      dy.unpack(given);
    } else {
#pragma unroll
      for (int k = 0; k < width; ++k) given[k] = row.dy;
    }
  }
  // The vectors of a piece through f. The last ones of a warp, which others may have, are asked about one by
  // one; so are all where a tensor's vectors do not lie on 16 bytes.
  template <bool aligned, class F>
  __device__ __forceinline__ void for_each_of_piece(const Part& part, int piece, int mine, F&& f) const {
    constexpr int uncertain = 2;
    constexpr int least = vectors - uncertain > doubled ? vectors - uncertain : doubled;
    // Of those with one place, all where one body has them.
    constexpr bool has_all = single <= at_once || least > doubled + single;
    constexpr int certain = has_all ? doubled + single : least;
    const int to_end = (part.left + lane()) / 32;  // vectors that all lanes have
    const int full = to_end < mine ? to_end : mine;
    const bool is_single = piece == single_piece;
    int i = first_of(piece);
    if (aligned && full >= (is_single ? certain : doubled)) {
      if (is_single) {
#pragma unroll at_once
        for (i = doubled; i < certain; ++i) f(i);
      } else {
#pragma unroll at_once
        for (i = 0; i < doubled; ++i) f(i);
      }
    }
    const int end = end_of(piece, mine);
#pragma unroll 1
    for (; i < end; ++i) {
      if (part.template has<false>(i)) f(i);
    }
  }

  // What waits in registers: x, and dy or dz.
  struct Kept {
    Arrived x[kept > 0 ? kept : 1];
    Packed<OutputGradient, width> given[kept > 0 && stages ? kept : 1];
  };
  // The second part of what is kept, where `part` has it, then the first part of the next slab's.
  template <bool aligned>
  __device__ __forceinline__ void turn_kept(Kept& waiting, int mine, bool has_part, const Part& part,
                                            const Row& row, const Affine& affine, float* before_totals,
                                            bool has_next, const Part& next, const Row& next_row,
                                            uint32 phase, Sums& sums) const {
    if constexpr (kept > 0) {
#if __CUDA_ARCH__ >= 900
      if (has_next) barrier::wait(&shared.arrived[warp()][kept_piece], phase);
#endif
#pragma unroll
      for (int i = vectors - kept; i < vectors; ++i) {
        Arrived& x = waiting.x[i - (vectors - kept)];
        Packed<OutputGradient, width>& held = waiting.given[stages ? i - (vectors - kept) : 0];
        float given[width];
        if (has_part && i < mine && part.template has<false>(i)) {
          if constexpr (stages) {
            held.unpack(given);
          } else {
#pragma unroll
            for (int k = 0; k < width; ++k) given[k] = row.dy;
          }
          second_of_vector(part.index + i * 32 * width, x, row, affine, given,
                           aligned || p.is_aligned(aligned_input_gradient), before_totals);
        }
        if (has_next && i < mine && next.template has<false>(i)) {
          x.load_shared(stage_at(kept_piece, i));
          if constexpr (stages) {
            held.load_shared(gradient_at(kept_piece, i));
            held.unpack(given);
          } else {
#pragma unroll
            for (int k = 0; k < width; ++k) given[k] = next_row.dy;
          }
          first_of_vector(next.index + i * 32 * width, x, next_row, given, sums);
        }
      }
    }
  }
  // The two parts of one piece, where it waits in shared memory.
  template <bool aligned>
  __device__ __forceinline__ void first_of_piece(const Part& part, int piece, int mine, const Row& row,
                                                 uint32 phase, Sums& sums) const {
#if __CUDA_ARCH__ >= 900
    barrier::wait(&shared.arrived[warp()][piece], phase);
#endif
    for_each_of_piece<aligned>(part, piece, mine, [&](int i) {
      float given[width];
      read_given(row, piece, i, given);
      first_of_vector(part.index + i * 32 * width, arrived_at(stage_at(piece, i)), row, given, sums);
    });
  }
  template <bool aligned>
  __device__ __forceinline__ void second_of_piece(const Part& part, int piece, int mine, const Row& row,
                                                  const Affine& affine, float* before_totals) const {
    for_each_of_piece<aligned>(part, piece, mine, [&](int i) {
      float given[width];
      read_given(row, piece, i, given);
      second_of_vector(part.index + i * 32 * width, arrived_at(stage_at(piece, i)), row, affine, given,
                       aligned || p.is_aligned(aligned_input_gradient), before_totals);
    });
  }

  // dx of an element; `given` is dz where it is held, else dy.
  template <int Width>
  static __device__ __forceinline__ float element(const Row& row, const Affine& affine, float x, float given,
                                                  const typename Before::template Tensors<Width>& before,
                                                  const typename After::template Tensors<Width>& after, int k,
                                                  typename Before::template TensorGradients<Width>& gradients,
                                                  float* before_totals) {
    const float d = Before::value(x, row.before, before, k) - row.mean;
    float dh;
    if constexpr (Tail::mean_follows_norm) {
      dh = fmaf(d, affine.slope, fmaf(affine.scale, row.dy, affine.offset));
    } else {
      float dz = given;
      if constexpr (!holds) {
        float unused[After::channel_operands > 0 ? After::channel_operands : 1];
        typename After::template TensorGradients<Width> ignored;
        dz = normed_gradient(row, d, after, k, given, unused, ignored);
      }
      dh = fmaf(affine.scale, dz, fmaf(d, affine.slope, affine.offset));
    }
    float channel_gradients[Before::channel_operands > 0 ? Before::channel_operands : 1];
    const float dx = Before::gradient(x, row.before, before, k, dh, channel_gradients, gradients);
#pragma unroll
    for (int s = 0; s < before_sums; ++s) before_totals[s] += channel_gradients[s];
    return dx;
  }

  // The element beside the vectors that a lane may have, converted where it is used: it is asked for long
  // before, and the sums of all warps would wait for the one that waits for it.
  struct Edge {
    Packed<Input, 1> arrived;
    Packed<OutputGradient, 1> arrived_gradient;
    float x = 0.0f, given = 0.0f;  // dy, then dz where it is held
  };

  __device__ __forceinline__ void load_edge(int64 at, Edge& edge) const {
    if (at < 0) return;
    edge.arrived.load(p.input, at, false);
    if constexpr (!Tail::has_mean) edge.arrived_gradient.load(p.output_gradient, at, false);
  }

  __device__ __forceinline__ void first_edge(int64 at, const Row& row, Edge& edge, Sums& sums) const {
    if (at < 0) return;
    typename Before::template Tensors<1> before;
    before.load(p, at);
    typename After::template Tensors<1> after;
    after.load(p, at);
    typename After::template TensorGradients<1> gradients;
    float channel_gradients[After::channel_operands > 0 ? After::channel_operands : 1];
    edge.x = edge.arrived.at(0);
    edge.given = Tail::has_mean ? row.dy : edge.arrived_gradient.at(0);
    const float d = Before::value(edge.x, row.before, before, 0) - row.mean;
    if constexpr (Tail::mean_follows_norm) {
      sums.distance += d;
    } else {
      const float dz = normed_gradient(row, d, after, 0, edge.given, channel_gradients, gradients);
      add(sums, dz, d, channel_gradients);
      if constexpr (holds) edge.given = dz;
      gradients.store(p, at);
    }
  }

  __device__ __forceinline__ void second_edge(int64 at, const Row& row, const Affine& affine,
                                              const Edge& edge, float* before_totals) const {
    if (at < 0) return;
    typename Before::template Tensors<1> before;
    before.load(p, at);
    typename After::template Tensors<1> after;
    if constexpr (!holds) after.load(p, at);
    typename Before::template TensorGradients<1> gradients;
    const float dx = element<1>(row, affine, edge.x, edge.given, before, after, 0, gradients, before_totals);
    store_one<typename Tail::InputGradient>(p.input_gradient, at, dx);
    gradients.store(p, at);
  }
};

}  // namespace onepass
