// A tail of 16-bit elements whose slab stays on the chip, in clusters that stay and take slab after slab: x
// is read once, y written once, and the sums of one slab are exchanged while the next one is begun.
//
// A slab of a planar tensor is a contiguous range. Each warp of a cluster has a part of it, which arrives in
// its own shared memory by bulk copies, in three pieces:
//   doubled   has two places, for slabs in turn: that of the next slab is summed while the sums of this one
//             are on their way. It stays as it came, and what the before-chain makes of it is computed again
//             for the output; or it is computed once and waits in the same place (see `halves`).
//   single    has one place, which is asked for again as soon as the output is written
//   kept      what the before-chain makes of it waits in registers: as one vector's output is written, the
//             next slab's takes its place
// Elements before the first vector and after the last one are kept by the first block, one a thread.
#pragma once

#include "device/barrier.cuh"
#include "tail/tail.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailOverlapped {
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;

  static constexpr int width = Numbers::width;
  static constexpr int threads = Numbers::threads;
  static constexpr int blocks = Numbers::blocks;
  static constexpr int warps = threads / 32;
  static constexpr int all_warps = warps * blocks;
  // Vectors of a thread, and of each piece.
  static constexpr int vectors = Numbers::vectors;
  static constexpr int doubled = Numbers::doubled;
  static constexpr int single = Numbers::single;
  static constexpr int raw = doubled + single;
  static constexpr int kept = vectors - raw;
  static_assert(doubled > 0 && kept > 1);
  // The last vectors, all of them kept, that a warp may not have in every lane though others do.
  static constexpr int uncertain = 2;
  static constexpr int at_once = Numbers::at_once;             // in the loops over what is not kept
  static constexpr int row_bytes = 32 * width * Input::bytes;  // of a warp's vectors beside each other
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int slab_elements = static_cast<int>(Tail::group_channels) * spatial;
  static constexpr int groups = Tail::channels / Tail::group_channels;
  static constexpr int lines = 4;  // partial sums of a thread: additions that do not wait for each other
  // What the before-chain makes of bf16, less the warp's shift, waits as f16: of an error of the output's
  // rounding it adds a quarter. Where that has no room for it, x is read again (see `fits_halves`).
  static constexpr bool halves = Numbers::halves;
  static_assert(!halves || Input::bytes == f16::bytes);
  static constexpr bool before_by_row = Before::channel_operands > 0;
  static constexpr bool after_by_row = Tail::has_affine || After::channel_operands > 0;

  // Where a warp's pieces lie: the doubled one of even and of odd rounds, the single one, the kept one.
  enum Piece { even_piece, odd_piece, single_piece, kept_piece, pieces };
  static constexpr int first_of(int piece) { return piece < 2 ? 0 : piece == single_piece ? doubled : raw; }
  static constexpr int count_of(int piece) {
    return piece < 2 ? doubled : piece == single_piece ? single : kept;
  }
  static constexpr int offset_of(int piece) {
    return (piece == even_piece     ? 0
            : piece == odd_piece    ? doubled
            : piece == single_piece ? 2 * doubled
                                    : 2 * doubled + single) *
           row_bytes;
  }

  struct Shared {
    alignas(128) unsigned char stage[warps][(vectors + doubled) * row_bytes];
    uint64 arrived[warps][pieces];
    // By parity of the round: elements, mean and M2 of the block's warps and of the cluster's blocks, and
    // what counts them.
    float4 of_warps[2][warps];
    float4 of_blocks[2][blocks];
    uint64 told[2];
    uint64 received[2];
    uint32 tellers;
  };

  const Parameters& p;
  Shared& shared;
  int block;  // of the cluster

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

  // The first vector of a warp of the cluster: the same in every slab. Only the last ones differ in what they
  // have of it.
  static __device__ __forceinline__ int first_vector(int warp) {
    constexpr int rows = (slab_elements / width + 31) / 32;
    constexpr int each = rows / all_warps, more = rows % all_warps;
    return (warp * each + (warp < more ? warp : more)) * 32;
  }

  // The warp's part of a slab.
  struct Part {
    int64 begin;   // the slab's first element
    int head;      // elements before its first vector
    int position;  // of the warp's first vector in the slab
    int count;     // vectors of the warp

    __device__ __forceinline__ int64 index_of(int i) const {
      return begin + position + (i * 32 + static_cast<int>(threadIdx.x % 32)) * width;
    }
    // All vectors but the uncertain ones are there in every lane.
    __device__ __forceinline__ bool full() const { return count >= (vectors - uncertain) * 32; }
    __device__ __forceinline__ bool has(int i) const {
      return i * 32 + static_cast<int>(threadIdx.x % 32) < count;
    }
  };
  __device__ __forceinline__ Part part_of(int slab) const {
    Part part;
    part.begin = static_cast<int64>(slab) * slab_elements;
    const int head = static_cast<int>(-(part.begin + p.phase) & (width - 1));
    part.head = head < slab_elements ? head : slab_elements;
    const int all = (slab_elements - part.head) / width;
    const int cluster_warp = block * warps + warp();
    const int first = first_vector(cluster_warp);
    const int end = first_vector(cluster_warp + 1);
    part.position = part.head + first * width;
    part.count = (end < all ? end : all) - (first < all ? first : all);
    return part;
  }

  // The element outside of vectors that a thread has; -1 where it has none.
  __device__ __forceinline__ int edge_of(const Part& part) const {
    const int all = (slab_elements - part.head) / width;
    const int thread = threadIdx.x;
    if (block != 0 || thread >= slab_elements - all * width) return -1;
    return thread < part.head ? thread : thread + all * width;
  }
  __device__ __forceinline__ int elements_of(const Part& part) const {
    const int all = (slab_elements - part.head) / width;
    return part.count * width + (block == 0 && warp() == 0 ? slab_elements - all * width : 0);
  }

  // Asks for a piece of a slab's part; by one lane.
  __device__ __forceinline__ void ask(const Part& part, int piece) const {
#if __CUDA_ARCH__ >= 900
    if (lane() != 0) return;
    const int left = part.count - first_of(piece) * 32;
    const int most = count_of(piece) * 32;
    const int own = left < 0 ? 0 : left < most ? left : most;
    const auto bytes = static_cast<uint32>(own * width * Input::bytes);
    uint64* arrived = &shared.arrived[warp()][piece];
    barrier::expect(arrived, bytes);  // nothing to come is waited for all the same
    if (own > 0) {
      barrier::copy(shared.stage[warp()] + offset_of(piece),
                    static_cast<const char*>(p.input) + part.index_of(first_of(piece)) * Input::bytes, bytes,
                    arrived);
    }
#endif
  }
  // The same where the warp has read last.
  __device__ __forceinline__ void ask_again(const Part& part, int piece) const {
#if __CUDA_ARCH__ >= 900
    // A barrier of the warp alone lets loads be under way still when the copy begins.
    barrier::release_to_copies();
#endif
    __syncwarp();
    ask(part, piece);
  }
  __device__ __forceinline__ void wait(int piece, uint32 phase) const {
#if __CUDA_ARCH__ >= 900
    barrier::wait(&shared.arrived[warp()][piece], phase);
#endif
  }
  // The lane's vector i of a piece.
  __device__ __forceinline__ unsigned char* vector_of(int piece, int i) const {
    return shared.stage[warp()] + offset_of(piece) + (i - first_of(piece)) * row_bytes +
           lane() * width * Input::bytes;
  }

  // The row (channel) that the warp is in, and what `load` gets for it.
  template <class Load>
  struct Rows {
    int row;
    int end;  // the position where the row ends
    Load load;

    // Whether the positions from `begin` to `last` lie in one row, which is then the one it is in.
    __device__ __forceinline__ bool covers(int begin, int last) {
      if (begin >= end || begin < end - spatial) {
        row = begin / spatial;
        end = row * spatial + spatial;
        load(row);
      }
      return last <= end;
    }

    // Calls f(first, last) for the parts [first, last) of the vector at `position` that lie in one row.
    template <class F>
    __device__ __forceinline__ void visit(int position, F&& f) {
      if (position + width > end || position < end - spatial) {
        row = position / spatial;
        end = row * spatial + spatial;
        load(row);
        if (position + width > end) {
#pragma unroll
          for (int k = 0; k < width; ++k) {
            if (position + k >= end) {
              ++row;
              end += spatial;
              load(row);
            }
            f(k, k + 1);
          }
          return;
        }
      }
      f(0, width);
    }
  };
  template <class Load>
  static __device__ __forceinline__ Rows<Load> rows_of(Load load) {
    return {0, 0, load};
  }

  // The same where a warp's part lies in two rows at most: their values are there from the beginning. `row`
  // is what the one has that it is in.
  static constexpr bool few_rows = vectors * 32 * width <= spatial;
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
    template <class F>
    __device__ __forceinline__ void visit(int position, F&& f) {
#pragma unroll
      for (int k = 0; k < width; ++k) {
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
      const int end = to * 32 < part.count ? to * 32 : part.count;
      const bool covered = rows.covers(part.position + from * 32 * width, part.position + end * width);
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
      rows.visit(part.position + (i * 32 + static_cast<int>(threadIdx.x % 32)) * width, f);
    } else {
      f(0, width);
    }
  }

  struct Sums {
    float shift = 0.0f;  // the mean of the warp's first vectors: squares are of distances from there
    float sum[lines] = {};
    float square[lines] = {};

    __device__ __forceinline__ void add(float value, int k) { add_distance(distance_from(value, shift), k); }
    __device__ __forceinline__ void add_distance(float distance, int k) {
      sum[k % lines] += distance;
      square[k % lines] = fmaf(distance, distance, square[k % lines]);
    }
    __device__ __forceinline__ void add(const float (&value)[width]) {
#pragma unroll
      for (int k = 0; k < width; ++k) add(value[k], k);
    }
    // Values become distances.
    __device__ __forceinline__ void add_and_move(float (&value)[width]) {
#pragma unroll
      for (int k = 0; k < width; ++k) {
        value[k] = distance_from(value[k], shift);
        add_distance(value[k], k);
      }
    }
  };

  // What the norm gets of vector i: the before-chain of what arrived. parts(f) calls f for parts in one row.
  template <class Parts>
  __device__ __forceinline__ void activate(const unsigned char* from, const Part& part, int i,
                                           const float* operands, Parts&& parts,
                                           float (&value)[width]) const {
    Packed<Input, width> packed;
    packed.load_shared(from);
    packed.unpack(value);
    typename Before::template Tensors<width> tensors;
    tensors.load(p, part.index_of(i));
    parts([&](int first, int last) {
#pragma unroll
      for (int k = 0; k < width; ++k) {
        if (k >= first && k < last) value[k] = Before::value(value[k], operands, tensors, k);
      }
    });
  }

  // Adds a vector of a piece that is not kept to the sums, and leaves it for the output.
  __device__ __forceinline__ void sum_vector(int piece, int i, float (&value)[width], Sums& sums) const {
    if constexpr (halves) {
      sums.add_and_move(value);
      Packed<f16, width> packed;
      packed.pack(value);
      packed.store_shared(vector_of(piece, i));
    } else {
      sums.add(value);
    }
  }

  static __device__ __forceinline__ void sum_kept(float (&value)[width], Sums& sums) {
    if constexpr (halves) {
      sums.add_and_move(value);
    } else {
      sums.add(value);
    }
  }

  // Sums of a piece that is not kept.
  template <bool is_first, class R>
  __device__ __forceinline__ void sum_piece(const Part& part, int piece, R& rows, const float* operands,
                                            Sums& sums) const {
    const int from = first_of(piece), to = from + count_of(piece);
    const auto whole = [](auto&& f) { f(0, width); };
    const bool plain = is_plain<before_by_row>(part, from, to, rows);
    const auto careful = [&](int i, float(&value)[width]) {
      activate(
          vector_of(piece, i), part, i, operands, [&](auto&& f) { visit<before_by_row>(part, i, rows, f); },
          value);
    };
    if constexpr (is_first) {
      float value[width] = {};
      if (plain) {
        activate(vector_of(piece, 0), part, 0, operands, whole, value);
      } else if (part.has(0)) {
        careful(0, value);
      }
      // As distances from the first one: of equal values the mean is that value.
      const float first = __shfl_sync(0xffffffffu, value[0], 0);
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < width; ++k) sum += distance_from(value[k], first);
      if (!plain && !part.has(0)) sum = 0.0f;
      const auto elements = static_cast<float>((part.count < 32 ? part.count : 32) * width);
      sums.shift =
          fmaf(lanes_sum<32>(sum), part.count > 0 ? pointwise::reciprocal_fast(elements) : 0.0f, first);
      if (plain || part.has(0)) sum_vector(piece, 0, value, sums);
    }
    if (plain) {
#pragma unroll at_once
      for (int i = from + (is_first ? 1 : 0); i < to; ++i) {
        float value[width];
        activate(vector_of(piece, i), part, i, operands, whole, value);
        sum_vector(piece, i, value, sums);
      }
    } else {
#pragma unroll 1
      for (int i = from + (is_first ? 1 : 0); i < to; ++i) {
        if (!part.has(i)) continue;
        float value[width];
        careful(i, value);
        sum_vector(piece, i, value, sums);
      }
      forget<before_by_row>(rows);
    }
  }

  // Mean and M2 of `count` parts together, the same in every lane, and the number of their elements.
  template <int count>
  static __device__ __forceinline__ float merge(const float4* parts, float& mean, float& m2) {
    static_assert((count & (count - 1)) == 0 && count <= 32);
    const float4 own = parts[threadIdx.x % count];
    const float elements = lanes_sum<count>(own.x);
    float from, moved;
    lanes_moments<count>(Moments{own.x, own.y, own.z}, elements > 0.0f ? 1.0f / elements : 0.0f, from, moved,
                         m2);
    mean = from + moved;
    return elements;
  }

  // The warp's elements, mean and M2 go to the block; the last warp sends the block's to the cluster. Returns
  // the sum of the warp's squares, from its shift.
  __device__ __forceinline__ float tell(const Part& part, const Sums& sums, int round) const {
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int k = 0; k < lines; ++k) sum += sums.sum[k], square += sums.square[k];
    sum = lanes_sum<32>(sum);
    square = lanes_sum<32>(square);
    float elements = static_cast<float>(elements_of(part));
    const float distance = sum * (elements > 0.0f ? pointwise::reciprocal_fast(elements) : 0.0f);
    float mean = sums.shift + distance;
    // Not below zero: what is left of a constant slab.
    float m2 = pointwise::maximum(fmaf(-distance, sum, square), 0.0f);
#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    // Sent with a count of its bytes: a barrier of the cluster would first wait for all that was stored.
    if (blocks > 1 && threadIdx.x == 0) barrier::expect(&shared.received[parity], blocks * 16);
    uint32 before = 0;
    if (lane() == 0) {
      shared.of_warps[parity][warp()] = float4{elements, mean, m2, 0.0f};
      barrier::arrive(&shared.told[parity]);
      if constexpr (blocks > 1) before = atomicAdd(&shared.tellers, 1u);
    }
    if constexpr (blocks > 1) {
      before = __shfl_sync(0xffffffffu, before, 0);
      if (before % warps == warps - 1) {
        barrier::wait(&shared.told[parity], round / 2 & 1);  // nobody is waited for long: all have told
        elements = merge<warps>(shared.of_warps[parity], mean, m2);
        if (lane() < blocks) {
          barrier::send(&shared.of_blocks[parity][block], float4{elements, mean, m2, 0.0f},
                        &shared.received[parity], lane());
        }
      }
    }
#endif
    return square;
  }

  // Whether f16 has room for all distances of a warp whose squares have this sum, and what it rounds where
  // they are small is small after the norm too: 2^-25 at most becomes 2^-12.
  static __device__ __forceinline__ bool fits_halves(float square, float rstd) {
    constexpr float largest = 65504.0f;
    return square <= largest * largest && rstd <= 8192.0f;
  }

  // The slab's mean, 1 / deviation, and what the norm's weight is multiplied by.
  __device__ __forceinline__ void receive(int round, float& mean, float& rstd, float& factor) const {
    float m2 = 0.0f;
    constexpr float per_element = 1.0f / static_cast<float>(slab_elements);
#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    const uint32 phase = round / 2 & 1;
    if constexpr (blocks == 1) {
      barrier::wait(&shared.told[parity], phase);
      merge<warps>(shared.of_warps[parity], mean, m2);
    } else {
      barrier::wait(&shared.received[parity], phase);
      merge<blocks>(shared.of_blocks[parity], mean, m2);
    }
#endif
    rstd = rsqrtf(m2 * per_element + Tail::eps);
    factor = norm_factor<Tail>(rstd, mean, m2);
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
    const int channel = slab % groups * static_cast<int>(Tail::group_channels) + row;
    Before::load_channel(p, slab / groups, channel, values.before);
  }
  __device__ __forceinline__ void load_row(int slab, int row, RowValues& values) const {
    const int channel = slab % groups * static_cast<int>(Tail::group_channels) + row;
    values.scale = Tail::weight(p, channel);
    values.shift = Tail::bias(p, channel);
    After::load_channel(p, slab / groups, channel, values.after);
    Before::load_channel(p, slab / groups, channel, values.before);
  }
  static __device__ __forceinline__ int row_after(int row) {
    return row + 1 < static_cast<int>(Tail::group_channels) ? row + 1 : row;
  }

  // What waits for the output in shared memory.
  template <bool yes, class A, class B>
  struct Choice {
    using Type = A;
  };
  template <class A, class B>
  struct Choice<false, A, B> {
    using Type = B;
  };
  using Waiting = typename Choice<halves, f16, Input>::Type;

  // Output of vector i. Raw: `value` is what arrived, else what the norm gets.
  template <bool is_raw, class Parts>
  __device__ __forceinline__ void finish(const Part& part, int i, const RowValues& row, bool aligned,
                                         Parts&& parts, float (&value)[width]) const {
    const int64 index = part.index_of(i);
    typename Before::template Tensors<width> before;
    if constexpr (is_raw) before.load(p, index);
    typename After::template Tensors<width> after;
    after.load(p, index);
    parts([&](int first, int last) {
#pragma unroll
      for (int k = 0; k < width; ++k) {
        if (k >= first && k < last) {
          if constexpr (is_raw) value[k] = Before::value(value[k], row.before, before, k);
          value[k] = After::value(fmaf(value[k], row.scale, row.shift), row.after, after, k);
        }
      }
    });
    Packed<typename Tail::Output, width> y;
    y.pack(value);
    y.store(p.output, index, aligned);
  }

  // Output of a piece that is not kept. Halves: distances from `shift`, where they fit.
  template <class R>
  __device__ __forceinline__ void finish_piece(const Part& part, int piece, R& rows, const RowValues& row,
                                               float shift, bool fits) const {
    constexpr bool by_row = after_by_row || before_by_row;
    const int from = first_of(piece), to = from + count_of(piece);
    const bool aligned = p.is_aligned(aligned_output);
    const bool plain = is_plain<by_row>(part, from, to, rows);
    const auto waiting = [&](int i, float(&value)[width]) {
      Packed<Waiting, width> packed;
      packed.load_shared(vector_of(piece, i));
      packed.unpack(value);
    };
    if (plain && aligned && (!halves || fits)) {
#pragma unroll at_once
      for (int i = from; i < to; ++i) {
        float value[width];
        waiting(i, value);
        finish<!halves>(
            part, i, row, true, [](auto&& f) { f(0, width); }, value);
      }
    } else {
#pragma unroll 1
      for (int i = from; i < to; ++i) {
        if (!part.has(i)) continue;
        float value[width];
        if (!halves || fits) {
          waiting(i, value);
        } else {
          Packed<Input, width> packed;
          packed.load(p.input, part.index_of(i), true);
          packed.unpack(value);
          typename Before::template Tensors<width> tensors;
          tensors.load(p, part.index_of(i));
          visit<by_row>(part, i, rows, [&](int first, int last) {
#pragma unroll
            for (int k = 0; k < width; ++k) {
              if (k >= first && k < last) value[k] = Before::value(value[k], row.before, tensors, k) - shift;
            }
          });
          forget<by_row>(rows);
        }
        finish<!halves>(
            part, i, row, aligned, [&](auto&& f) { visit<by_row>(part, i, rows, f); }, value);
      }
      forget<by_row>(rows);
    }
  }

  __device__ __forceinline__ void run() const {
    const int slabs = static_cast<int>(p.batch) * groups;
    const int clusters = static_cast<int>(gridDim.x) / blocks;
    int slab = static_cast<int>(blockIdx.x) / blocks;  // the one that is summed
#if __CUDA_ARCH__ >= 900
    if (lane() == 0) {
      for (int i = 0; i < pieces; ++i) barrier::initialise(&shared.arrived[warp()][i]);
    }
    __syncwarp();
    Part next = part_of(slab);
    if (slab < slabs) {
      ask(next, even_piece);
      if constexpr (single > 0) ask(next, single_piece);
      ask(next, kept_piece);
    }
    if (slab + clusters < slabs) ask(part_of(slab + clusters), odd_piece);
    if (threadIdx.x == 0) {
      for (int parity = 0; parity < 2; ++parity) {
        barrier::initialise(&shared.told[parity], warps);
        barrier::initialise(&shared.received[parity]);
      }
      shared.tellers = 0;
    }
    // No sums go to a block that has not started.
    if constexpr (blocks > 1) {
      barrier::cluster_sync();
    } else {
      __syncthreads();
    }

    float h[kept][width];
#pragma unroll
    for (int i = 0; i < kept; ++i) {
#pragma unroll
      for (int k = 0; k < width; ++k) h[i][k] = 0.0f;
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
      constexpr bool by_row = after_by_row || before_by_row;
      const int own_row = part.position / spatial;
      const int edge_position = has_current ? edge_of(part) : -1;
      RowValues row, row_0, row_1, edge_row;
      row.scale = row_0.scale = row_1.scale = edge_row.scale = 1.0f;
      row.shift = row_0.shift = row_1.shift = edge_row.shift = 0.0f;
      // The values of the warp's rows are on their way while sums are.
      if (by_row && has_current) {
        load_row(current, own_row, row_0);
        if (few_rows) load_row(current, row_after(own_row), row_1);
        if (edge_position >= 0) load_row(current, edge_position / spatial, edge_row);
      }
      Sums sums;
      BeforeValues before, before_0, before_1;
      auto next_rows = [&] {
        if constexpr (few_rows) {
          const int next_row = next.position / spatial;
          if (before_by_row && more) {
            load_before(slab, next_row, before_0);
            load_before(slab, row_after(next_row), before_1);
          }
          return TwoRows<BeforeValues>{(next_row + 1) * spatial, before_0, before_1, before};
        } else {
          return rows_of([&](int r) { load_before(slab, r, before); });
        }
      }();
      // Converted where it is used: the sums of all warps would wait for the one that waits for it.
      Packed<Input, 1> next_edge;
      if (more) {
        const int position = edge_of(next);
        if (position >= 0) next_edge.load(p.input, next.begin + position, false);
        const int piece = parity == 0 ? even_piece : odd_piece;
        wait(piece, round / 2 & 1);
        sum_piece<true>(next, piece, next_rows, before.before, sums);
      }

      float mean = 0.0f, rstd = 0.0f, factor = 0.0f;
      float moved_mean = 0.0f;  // from the shift
      auto rows = [&] {
        if constexpr (few_rows) {
          return TwoRows<RowValues>{(own_row + 1) * spatial, row_0, row_1, row};
        } else {
          return rows_of([&](int r) {
            load_row(current, r, row);
            row.norm(moved_mean, factor);
          });
        }
      }();
      Part second = next;  // the slab after the next
      if (slab + clusters < slabs) second = part_of(slab + clusters);
      if (has_current) {
        receive(round - 1, mean, rstd, factor);
        if (p.statistics != nullptr && block == 0 && threadIdx.x == 0) {
          p.statistics[2 * static_cast<int64>(current)] = mean;
          p.statistics[2 * static_cast<int64>(current) + 1] = rstd;
        }
        moved_mean = mean - shift;
        const bool fits = fits_halves(square, rstd);
        row_0.norm(moved_mean, factor);
        row_1.norm(moved_mean, factor);
        row = row_0;
        if constexpr (!few_rows) {
          rows.row = own_row;
          rows.end = (own_row + 1) * spatial;
        }
        if (edge_position >= 0) {
          edge_row.norm(mean, factor);
          typename After::template Tensors<1> tensors;
          tensors.load(p, part.begin + edge_position);
          store_one<typename Tail::Output>(
              p.output, part.begin + edge_position,
              After::value(fmaf(edge, edge_row.scale, edge_row.shift), edge_row.after, tensors, 0));
        }
        if constexpr (single > 0) {
          finish_piece(part, single_piece, rows, row, shift, fits);
          if (more) ask_again(next, single_piece);
        }
        const int piece = parity == 0 ? odd_piece : even_piece;
        finish_piece(part, piece, rows, row, shift, fits);
        if (slab + clusters < slabs) ask_again(second, piece);
      }
      // Output of what is kept, and what takes its place.
      if (more) wait(kept_piece, parity);
      {
        const bool aligned = p.is_aligned(aligned_output);
        bool plain = aligned && has_current && more;
        if (has_current) plain = is_plain<after_by_row>(part, raw, vectors, rows) && plain;
        if (more) plain = is_plain<before_by_row>(next, raw, vectors, next_rows) && plain;
        const auto whole = [](auto&& f) { f(0, width); };
        if (plain) {
#pragma unroll
          for (int i = raw; i < vectors; ++i) {
            if (i < vectors - uncertain || part.has(i)) finish<false>(part, i, row, true, whole, h[i - raw]);
            if (i < vectors - uncertain || next.has(i)) {
              activate(vector_of(kept_piece, i), next, i, before.before, whole, h[i - raw]);
              sum_kept(h[i - raw], sums);
            }
          }
        } else {
#pragma unroll
          for (int i = raw; i < vectors; ++i) {
            if (has_current && part.has(i)) {
              finish<false>(
                  part, i, row, aligned, [&](auto&& f) { visit<after_by_row>(part, i, rows, f); },
                  h[i - raw]);
            }
            if (more && next.has(i)) {
              activate(
                  vector_of(kept_piece, i), next, i, before.before,
                  [&](auto&& f) { visit<before_by_row>(next, i, next_rows, f); }, h[i - raw]);
              sum_kept(h[i - raw], sums);
            }
          }
          forget<before_by_row>(next_rows);
        }
      }
      if (slab + clusters < slabs) ask_again(second, kept_piece);
      if (!more) break;
      if constexpr (single > 0) {
        wait(single_piece, parity);
        sum_piece<false>(next, single_piece, next_rows, before.before, sums);
      }
      const int position = edge_of(next);
      if (position >= 0) {
        if constexpr (before_by_row) load_before(slab, position / spatial, before);
        typename Before::template Tensors<1> tensors;
        tensors.load(p, next.begin + position);
        edge = Before::value(next_edge.at(0), before.before, tensors, 0);
        sums.add(edge, 0);
      }
      const float own_square = tell(next, sums, round);
      if constexpr (halves) {
        shift = sums.shift;
        square = own_square;
      }
      part = next;
      next = second;
    }
    if constexpr (blocks > 1) barrier::cluster_sync();  // none leaves while others may write to it
#endif
  }
};

}  // namespace onepass
