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

#include "barrier.cuh"
#include "tail.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResident {
  using Parameters = TailBackwardParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Folded = pointwise::Folded<typename After::Only>;
  using Input = typename Tail::Input;
  using OutputGradient = typename Tail::OutputGradient;

  static constexpr int width = Numbers::width;
  static constexpr int threads = Numbers::threads;
  static constexpr int vectors = Numbers::vectors;
  static constexpr int blocks = Numbers::blocks;
  static constexpr int pieces = Numbers::pieces;
  static constexpr int chunk = Numbers::chunk;
  static constexpr int lag = Numbers::lag;
  static constexpr int chunks = (vectors + chunk - 1) / chunk;
  static_assert(lag <= chunks);
  static constexpr int warps = threads / 32;
  static constexpr int all_warps = blocks * warps;
  static constexpr int warp_vectors = 32 * vectors;
  static constexpr int vector_bytes = width * Input::bytes;
  static constexpr int chunk_bytes = chunk * 32 * vector_bytes;
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int rows = Tail::group_channels;
  static constexpr int groups = Tail::channels / rows;
  static_assert(rows * pieces <= all_warps);
  static constexpr int row_vectors = (spatial / width + 31) / 32;  // of a row, 32 beside each other

  // Of a row: dz, dz xhat, the after-chain's, the before-chain's.
  static constexpr int after_sums = Tail::after_sums;
  static constexpr int before_sums = Tail::before_sums;
  static constexpr int total_sums = 2 + after_sums + before_sums;

  // In f32 dy waits in registers, where dz takes its place. Staged, it is in shared memory beside x and dz is
  // computed twice: nothing is held in registers and the loops over vectors stay loops, which the instruction
  // cache holds. Where the block ends in a mean, dy is a value of the row.
  static constexpr bool staged = Numbers::staged;
  static constexpr bool holds = !Tail::has_mean && !staged;
  static constexpr bool stages = !Tail::has_mean && staged;
  using Held = Packed<OutputGradient, width>[holds ? vectors : 1];
  static_assert(!holds || OutputGradient::bytes == 4);
  static constexpr int gradient_bytes = stages ? width * OutputGradient::bytes : 0;  // of a vector

  // Staged, the first vectors have two places, for slabs in turn: those of the next slab are
  // there while the sums of this one are on their way. They arrive together, and the others after them.
  // The last ones have one place, and wait in registers for the output: as a vector's output is written, the
  // next slab's takes its place.
  static constexpr int doubled = staged ? Numbers::doubled : 0;
  static constexpr int kept = staged ? Numbers::kept : 0;
  static constexpr int single = vectors - doubled - kept;
  static_assert(single >= 0);
  static constexpr int at_once = Numbers::at_once;
  enum Piece { even_piece, odd_piece, single_piece, kept_piece, all_pieces };
  static constexpr int arrivals = staged ? all_pieces : chunks;
  static constexpr int senders = staged && blocks > 1 ? blocks : all_warps;

  struct Shared {
    alignas(128) unsigned char stage[warps][(vectors + doubled) * 32 * vector_bytes];
    alignas(128) unsigned char gradient[warps][stages ? (vectors + doubled) * 32 * gradient_bytes : 16];
    float4 exchange[2][senders];  // sums of the cluster's warps, or blocks, by parity of the round
    float4 of_warps[2][staged ? warps : 1];
    uint64 told[2];
    uint32 tellers;
    uint64 arrived[warps][arrivals];
    uint64 received[2];
    double sums[warps][total_sums];  // of the warp's row, over the samples so far
  };

  const Parameters& p;
  Shared& shared;

  // A slab on a cluster's way, group by group, so that a warp's row stays the same channel for many samples.
  struct Slab {
    int n, group;
    int left;  // slabs from here to the end of the way

    __device__ __forceinline__ void step(int batch) {
      --left;
      if (++n == batch) {
        n = 0;
        ++group;
      }
    }
  };

  // The warp's part of a slab.
  struct Part {
    int64 index;  // of the lane's first vector
    int left;     // vectors of the piece from there on, in steps of 32
    int64 edge;   // the lane's element outside of vectors, -1 where it has none

    template <bool plain>
    __device__ __forceinline__ bool has(int i) const {
      return plain || i * 32 < left;
    }
  };

  // What a slab's row brings.
  struct Row {
    float before[Before::channel_operands > 0 ? Before::channel_operands : 1];
    float after[After::channel_operands > 0 ? After::channel_operands : 1];
    float gamma, beta, mean, rstd;
    float dy;  // where the block ends in a mean
  };

  // dh = scale dz + slope d + offset
  struct Affine {
    float scale, slope, offset;
  };

  struct Sums {
    float dz = 0.0f, product = 0.0f, distance = 0.0f;
    float after[after_sums > 0 ? after_sums : 1] = {};
  };

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int place() const {
    return static_cast<int>(blockIdx.x % blocks) * warps + warp();
  }
  __device__ __forceinline__ bool idle() const { return place() >= rows * pieces; }
  __device__ __forceinline__ int own_row() const { return idle() ? 0 : place() / pieces; }
  // Staged, the vectors of a row are spread over its pieces as evenly as can be; the last piece, which has
  // the row's edges too, has no more than others. A scheduler has every fourth warp of a block: where pieces
  // of more and of fewer vectors take turns, neighbours change places in every other four warps.
  __device__ __forceinline__ int piece() const {
    const int own = place() % pieces;
    return staged && pieces % 2 == 0 ? own ^ (place() / 4 & 1) : own;
  }
  static __device__ __forceinline__ int first_vector_of(int piece) {
    return staged ? (piece * row_vectors + pieces - 1) / pieces : piece * vectors;
  }
  __device__ __forceinline__ int first_vector() const { return first_vector_of(piece()); }
  __device__ __forceinline__ int own_vectors() const {
    return staged ? first_vector_of(piece() + 1) - first_vector() : vectors;
  }

  __device__ __forceinline__ int64 first_element(const Slab& slab) const {
    return (static_cast<int64>(slab.n) * Tail::channels + slab.group * rows + own_row()) * spatial;
  }

  static __device__ __forceinline__ int head_of(int64 position) {
    const int head = static_cast<int>(-position & (width - 1));
    return head < spatial ? head : spatial;
  }

  template <bool plain>
  __device__ __forceinline__ Part part_of(const Slab& slab) const {
    Part part;
    const int64 begin = first_element(slab);
    const int head = head_of(begin + p.phase);
    const int first = first_vector() * 32 + lane();
    part.index = begin + head + static_cast<int64>(first) * width;
    part.left = 0;
    part.edge = -1;
    if constexpr (!plain) {
      const int count = (spatial - head) / width;
      part.left = idle() ? 0 : count - first;
      const int edges = spatial - count * width;
      if (!idle() && piece() == pieces - 1 && lane() < edges) {
        part.edge = begin + (lane() < head ? lane() : lane() + count * width);
      }
    }
    return part;
  }

  // The same, staged, without the edge. Pieces that do not end their row have all of their vectors.
  __device__ __forceinline__ bool ends_row() const { return !idle() && piece() == pieces - 1; }
  __device__ __forceinline__ Part staged_part_of(const Slab& slab) const {
    Part part;
    const int64 begin = first_element(slab);
    const int head = head_of(begin + p.phase);
    const int first = first_vector() * 32 + lane();
    part.index = begin + head + static_cast<int64>(first) * width;
    part.left = idle() ? 0 : ends_row() ? (spatial - head) / width - first : (vectors + 1) * 32;
    part.edge = -1;
    return part;
  }
  // The lane's element outside of vectors, of a piece that ends its row; -1 where it has none.
  __device__ __forceinline__ int64 edge_of(const Slab& slab) const {
    const int64 begin = first_element(slab);
    const int head = head_of(begin + p.phase);
    const int count = (spatial - head) / width;
    const int edges = spatial - count * width;
    return lane() < edges ? begin + (lane() < head ? lane() : lane() + count * width) : -1;
  }

  __device__ __forceinline__ Row row_values(const Slab& slab) const {
    Row row;
    const int64 n = slab.n;
    const int64 c = slab.group * rows + own_row();
    Before::load_channel(p, n, c, row.before);
    After::load_channel(p, n, c, row.after);
    row.gamma = Tail::weight(p, c);
    row.beta = Tail::bias(p, c);
    row.mean = p.statistics[2 * (n * groups + slab.group)];
    row.rstd = p.statistics[2 * (n * groups + slab.group) + 1];
    if constexpr (Tail::has_mean) {
      constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
      row.dy = load_one<OutputGradient>(
                   p.output_gradient, n * Tail::gradient_sample_stride + c * Tail::gradient_channel_stride) *
               per_element;
    }
    return row;
  }

  // Sends for `most` vectors of x from the warp's vector `first` on, and for dy where it is staged; by one
  // lane.
  template <bool plain, bool aligned = plain>
  __device__ __forceinline__ void ask(const Part& part, int first, int most, int place,
                                      uint64* arrived) const {
#if __CUDA_ARCH__ >= 900
    if (lane() != 0) return;
    const int left = part.left - first * 32;
    const int own = plain || left > most * 32 ? most * 32 : left < 0 ? 0 : left;
    const auto bytes = static_cast<uint32>(own * vector_bytes);
    const bool copies_gradient = stages && (aligned || p.is_aligned(aligned_output_gradient));
    const auto more = static_cast<uint32>(copies_gradient ? own * gradient_bytes : 0);
    barrier::expect(arrived, bytes + more);  // nothing to come is waited for all the same
    if (own > 0) {
      const int64 index = part.index + first * 32 * width;
      barrier::copy(shared.stage[warp()] + place * 32 * vector_bytes,
                    static_cast<const char*>(p.input) + index * Input::bytes, bytes, arrived);
      if (copies_gradient) {
        barrier::copy(shared.gradient[warp()] + place * 32 * gradient_bytes,
                      static_cast<const char*>(p.output_gradient) + index * OutputGradient::bytes, more,
                      arrived);
      }
    }
#endif
  }
  template <bool plain>
  __device__ __forceinline__ void ask_chunk(const Part& part, int c) const {
    const int most = c < chunks - 1 ? chunk : vectors - (chunks - 1) * chunk;
    ask<plain>(part, c * chunk, most, c * chunk, &shared.arrived[warp()][c]);
  }
  static __device__ __forceinline__ int first_of(int piece) {
    return piece == single_piece ? doubled : piece == kept_piece ? doubled + single : 0;
  }
  // The end of a piece of a warp that has `mine` vectors.
  static __device__ __forceinline__ int end_of(int piece, int mine) {
    const int end = piece == single_piece ? doubled + single : piece == kept_piece ? vectors : doubled;
    return mine < end ? mine : end;
  }
  static __device__ __forceinline__ int place_of(int piece) {
    return piece == even_piece     ? 0
           : piece == odd_piece    ? doubled
           : piece == single_piece ? 2 * doubled
                                   : 2 * doubled + single;
  }
  template <bool aligned>
  __device__ __forceinline__ void ask_piece(const Part& part, int piece, int mine) const {
    if constexpr (stages && !aligned) {
      // What bulk copies cannot take: each lane puts what it reads again.
      if (!p.is_aligned(aligned_output_gradient)) {
        const int end = end_of(piece, mine);
#pragma unroll 1
        for (int i = first_of(piece); i < end; ++i) {
          if (!part.template has<false>(i)) continue;
          Packed<OutputGradient, width> dy;
          dy.load(p.output_gradient, part.index + i * 32 * width, false);
          dy.store_shared(gradient_at(piece, i));
        }
      }
    }
#if __CUDA_ARCH__ >= 900
    barrier::release_to_copies();
#endif
    __syncwarp();
    const int most = end_of(piece, mine) - first_of(piece);
    ask<false, aligned>(part, first_of(piece), most > 0 ? most : 0, place_of(piece),
                        &shared.arrived[warp()][piece]);
  }
  __device__ __forceinline__ const unsigned char* stage_at(int piece, int i) const {
    return shared.stage[warp()] + ((place_of(piece) + i - first_of(piece)) * 32 + lane()) * vector_bytes;
  }
  __device__ __forceinline__ unsigned char* gradient_at(int piece, int i) const {
    return shared.gradient[warp()] + ((place_of(piece) + i - first_of(piece)) * 32 + lane()) * gradient_bytes;
  }

  template <bool plain, class F>
  static __device__ __forceinline__ void for_each_vector(const Part& part, int c, F&& f) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      if (i >= c * chunk && i < (c + 1) * chunk && part.template has<plain>(i)) f(i);
    }
  }

  template <bool plain>
  __device__ __forceinline__ void load_gradient(const Part& part, int c, Held& held) const {
    if constexpr (holds) {
      for_each_vector<plain>(part, c, [&](int i) {
        held[i].template load<true>(p.output_gradient, part.index + i * 32 * width,
                                    plain || p.is_aligned(aligned_output_gradient));
      });
    }
  }

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
    for_each_vector<plain>(part, c, [&](int i) {
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
    for_each_vector<plain>(part, c, [&](int i) {
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

  template <bool plain>
  __device__ __forceinline__ void run_slabs(Slab slab) const {
    Held held;
    Edge edge;
    Sums sums;
    Part part = part_of<plain>(slab);
#pragma unroll
    for (int c = 0; c < chunks; ++c) ask_chunk<plain>(part, c);
    Row row = row_values(slab);
#pragma unroll
    for (int c = 0; c < chunks; ++c) load_gradient<plain>(part, c, held);
    if constexpr (!plain) {
      load_edge(part.edge, edge);
      first_edge(part.edge, row, edge, sums);
    }
#pragma unroll
    for (int c = 0; c < chunks; ++c) first<plain>(part, c, row, 0, held, sums);
    merge_lanes(row, sums);
    send(row, sums, 0);

#pragma unroll 1
    for (int round = 0;; ++round) {
      const bool more = slab.left > 1;
      Slab next = slab;
      if (more) next.step(static_cast<int>(p.batch));
      const Part next_part = part_of<plain>(next);
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
        second<plain>(part, c, row, affine, held, before_totals);
        if (more) {
          load_gradient<plain>(next_part, c, held);
#if __CUDA_ARCH__ >= 900
          barrier::release_to_copies();
#endif
          __syncwarp();
          ask_chunk<plain>(next_part, c);
          if (c >= lag) first<plain>(next_part, c - lag, next_row, round + 1, held, sums);
        }
      }
      add_before_totals(before_totals);
      if (Tail::wants_sums && (!more || next.group != slab.group)) leave_sums(slab.group);
      if (!more) break;
#pragma unroll
      for (int c = chunks - lag; c < chunks; ++c) {
        first<plain>(next_part, c, next_row, round + 1, held, sums);
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
      ask_piece<aligned>(part, even_piece, mine);
      if (has_single) ask_piece<aligned>(part, single_piece, mine);
      if (kept > 0) ask_piece<aligned>(part, kept_piece, mine);
      if (next.left > 0) ask_piece<aligned>(next_part, odd_piece, mine);
      if (has_edges) {
        load_edge(edge_of(slab), edge);
        first_edge(edge_of(slab), row, edge, sums);
      }
      first_of_piece<aligned>(part, even_piece, mine, row, 0, sums);
      if (has_single) first_of_piece<aligned>(part, single_piece, mine, row, 0, sums);
      float unused[before_sums > 0 ? before_sums : 1] = {};
      turn_kept<aligned>(waiting, mine, false, part, row, Affine{}, unused, true, part, row, 0, sums);
      if (kept > 0 && next.left > 0) ask_piece<aligned>(next_part, kept_piece, mine);
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
        first_of_piece<aligned>(next_part, own_piece ^ 1, mine, next_row, (round + 1) / 2 & 1, next_sums);
      }
      float shift;
      const Affine affine = receive(row, round, shift);
      add_totals(sums, shift);
      float before_totals[before_sums > 0 ? before_sums : 1] = {};
      if (has_edges) second_edge(edge_of(slab), row, affine, edge, before_totals);
      if (has_single) {
        second_of_piece<aligned>(part, single_piece, mine, row, affine, before_totals);
        if (more) ask_piece<aligned>(next_part, single_piece, mine);
      }
      const Slab current = slab;
      slab = next;
      step();
      const Row later_row = row_values(next);
      second_of_piece<aligned>(part, own_piece, mine, row, affine, before_totals);
      const Part later_part = staged_part_of(next);
      if (next.left > 0) ask_piece<aligned>(later_part, own_piece, mine);
      turn_kept<aligned>(waiting, mine, true, part, row, affine, before_totals, more, next_part, next_row,
                         (round + 1) & 1, next_sums);
      if (kept > 0 && next.left > 0) ask_piece<aligned>(later_part, kept_piece, mine);
      add_before_totals(before_totals);
      if (Tail::wants_sums && (!more || slab.group != current.group)) leave_sums(current.group);
      if (!more) break;
      if (has_single) {
        first_of_piece<aligned>(next_part, single_piece, mine, next_row, (round + 1) & 1, next_sums);
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
