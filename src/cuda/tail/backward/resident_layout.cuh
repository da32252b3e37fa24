// tail_backward_resident: sizes, shared memory, and which part of a slab a warp has.
#pragma once

#include "device/barrier.cuh"
#include "tail/backward/element.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailBackwardResidentLayout {
  using Element = TailBackwardElement<Tail>;
  using Parameters = typename Element::Parameters;

  static constexpr int chunks = (Numbers::vectors + Numbers::chunk - 1) / Numbers::chunk;
  static_assert(Numbers::lag <= chunks);
  static constexpr int warps = Numbers::threads / 32;
  static constexpr int all_warps = Numbers::blocks * warps;
  static constexpr int warp_vectors = 32 * Numbers::vectors;
  static constexpr int vector_bytes = Numbers::width * Tail::Input::bytes;
  static constexpr int chunk_bytes = Numbers::chunk * 32 * vector_bytes;
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int rows = Tail::group_channels;
  static constexpr int groups = Tail::channels / rows;
  static_assert(rows * Numbers::pieces <= all_warps);
  static constexpr int row_vectors = (spatial / Numbers::width + 31) / 32;  // of a row, 32 beside each other

  static constexpr int after_sums = Element::after_sums;
  static constexpr int before_sums = Element::before_sums;
  static constexpr int total_sums = Element::total_sums;

  // In f32 dy waits in registers, where dz takes its place. Staged, it is in shared memory beside x and dz is
  // computed twice: nothing is held in registers and the loops over vectors stay loops, which the instruction
  // cache holds. Where the block ends in a mean, dy is a value of the row.
  static constexpr bool staged = Numbers::staged;
  static constexpr bool holds = !Tail::has_mean && !staged;
  static constexpr bool stages = !Tail::has_mean && staged;
  using Held = Packed<typename Tail::OutputGradient, Numbers::width>[holds ? Numbers::vectors : 1];
  static_assert(!holds || Tail::OutputGradient::bytes == 4);
  static constexpr int gradient_bytes =
      stages ? Numbers::width * Tail::OutputGradient::bytes : 0;  // of a vector

  // Staged, the first vectors have two places, for slabs in turn: those of the next slab are
  // there while the sums of this one are on their way. They arrive together, and the others after them.
  // The last ones have one place, and wait in registers for the output: as a vector's output is written, the
  // next slab's takes its place.
  static constexpr int doubled = staged ? Numbers::doubled : 0;
  static constexpr int kept = staged ? Numbers::kept : 0;
  static constexpr int single = Numbers::vectors - doubled - kept;
  static_assert(single >= 0);
  static constexpr int at_once = Numbers::at_once;
  enum Piece { even_piece, odd_piece, single_piece, kept_piece, all_pieces };
  static constexpr int arrivals = staged ? all_pieces : chunks;
  static constexpr int senders = staged && Numbers::blocks > 1 ? Numbers::blocks : all_warps;

  struct Shared {
    alignas(128) unsigned char stage[warps][(Numbers::vectors + doubled) * 32 * vector_bytes];
    alignas(
        128) unsigned char gradient[warps][stages ? (Numbers::vectors + doubled) * 32 * gradient_bytes : 16];
    float4 exchange[2][senders];  // sums of the cluster's warps, or blocks, by parity of the round
    float4 of_warps[2][staged ? warps : 1];
    uint64 warps_given[2];
    uint32 warps_counted;
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

  using Row = typename Element::Row;
  using Affine = typename Element::Affine;
  using Sums = typename Element::Sums;

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int place() const {
    return static_cast<int>(blockIdx.x % Numbers::blocks) * warps + warp();
  }
  __device__ __forceinline__ bool idle() const { return place() >= rows * Numbers::pieces; }
  __device__ __forceinline__ int own_row() const { return idle() ? 0 : place() / Numbers::pieces; }
  // Staged, the vectors of a row are spread over its pieces as evenly as can be; the last piece, which has
  // the row's edges too, has no more than others. A scheduler has every fourth warp of a block: where pieces
  // of more and of fewer vectors take turns, neighbours change places in every other four warps.
  __device__ __forceinline__ int piece() const {
    const int own = place() % Numbers::pieces;
    return staged && Numbers::pieces % 2 == 0 ? own ^ (place() / 4 & 1) : own;
  }
  static __device__ __forceinline__ int first_vector_of(int piece) {
    return staged ? (piece * row_vectors + Numbers::pieces - 1) / Numbers::pieces : piece * Numbers::vectors;
  }
  __device__ __forceinline__ int first_vector() const { return first_vector_of(piece()); }
  __device__ __forceinline__ int own_vectors() const {
    return staged ? first_vector_of(piece() + 1) - first_vector() : Numbers::vectors;
  }

  __device__ __forceinline__ int64 first_element(const Slab& slab) const {
    return (static_cast<int64>(slab.n) * Tail::channels + slab.group * rows + own_row()) * spatial;
  }

  static __device__ __forceinline__ int head_of(int64 position) {
    const int head = static_cast<int>(-position & (Numbers::width - 1));
    return head < spatial ? head : spatial;
  }

  template <bool plain>
  __device__ __forceinline__ Part part_of(const Slab& slab) const {
    Part part;
    const int64 begin = first_element(slab);
    const int head = head_of(begin + p.phase);
    const int first = first_vector() * 32 + lane();
    part.index = begin + head + static_cast<int64>(first) * Numbers::width;
    part.left = 0;
    part.edge = -1;
    if constexpr (!plain) {
      const int count = (spatial - head) / Numbers::width;
      part.left = idle() ? 0 : count - first;
      const int edges = spatial - count * Numbers::width;
      if (!idle() && piece() == Numbers::pieces - 1 && lane() < edges) {
        part.edge = begin + (lane() < head ? lane() : lane() + count * Numbers::width);
      }
    }
    return part;
  }

  // The same, staged, without the edge. Pieces that do not end their row have all of their vectors.
  __device__ __forceinline__ bool ends_row() const { return !idle() && piece() == Numbers::pieces - 1; }
  __device__ __forceinline__ Part staged_part_of(const Slab& slab) const {
    Part part;
    const int64 begin = first_element(slab);
    const int head = head_of(begin + p.phase);
    const int first = first_vector() * 32 + lane();
    part.index = begin + head + static_cast<int64>(first) * Numbers::width;
    part.left = idle()       ? 0
                : ends_row() ? (spatial - head) / Numbers::width - first
                             : (Numbers::vectors + 1) * 32;
    part.edge = -1;
    return part;
  }
  // The lane's element outside of vectors, of a piece that ends its row; -1 where it has none.
  __device__ __forceinline__ int64 edge_of(const Slab& slab) const {
    const int64 begin = first_element(slab);
    const int head = head_of(begin + p.phase);
    const int count = (spatial - head) / Numbers::width;
    const int edges = spatial - count * Numbers::width;
    return lane() < edges ? begin + (lane() < head ? lane() : lane() + count * Numbers::width) : -1;
  }

  __device__ __forceinline__ Row row_values(const Slab& slab) const {
    return Element::row_values(p, slab.n, slab.group, own_row());
  }
};

}  // namespace onepass
