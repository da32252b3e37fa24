// The schedule "ring" of tail_staged.
//
// A warp's part of a slab arrives by bulk copies, chunk after chunk. After the before-chain values wait for
// the statistics in registers (`kept` vectors of a thread). Their chunks come through a ring of slots: a slot
// that was read makes room for the next slab. Where registers do not hold the slab, the first `held` vectors
// wait where they arrived, as f32. They make room for those of the next slab when the output is written. So
// the next slab arrives while this one is summed and while it is written. Moments go from warps to their
// block and from blocks to the cluster, past the stores of the slab before. Elements before the first vector
// and after the last one are kept by the first block, one a thread. Where the block ends in a mean, values
// are added up instead of stored.
#pragma once

#include "tail/staged/ring_shares.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct StagedRing {
  using S = StagedSizes<Tail, Numbers>;
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  using Shares = RingShares<Tail, Numbers>;
  using Range = typename Shares::Range;
  using Share = typename Shares::Share;
  using Means = StagedMeans<Tail, Numbers, OneRun<S::vectors>>;

  // Vectors of a thread: the first `held` of them wait in shared memory, the others in registers.
  static constexpr int held = Numbers::held;
  static constexpr int kept = S::vectors - held;
  // They arrive by chunks of `chunk`; each warp has a ring of `slots` chunks.
  static constexpr int chunk = Numbers::chunk;
  static constexpr int chunks = (S::vectors + chunk - 1) / chunk;
  static constexpr int held_chunks = held / chunk;
  static constexpr int slots = Numbers::slots;
  static constexpr int chunk_bytes = chunk * 32 * S::width * Input::bytes;
  static_assert(kept > 0 && held % chunk == 0 && S::width % 4 == 0);
  // Held are results of the before-chain, or of 16 bits what arrived: the chain is computed again then.
  static constexpr bool holds_raw = Input::bytes != 4;
  using Waiting = conditional<holds_raw, Input, f32>;
  template <bool is>
  struct Flag {
    static constexpr bool value = is;
  };
  static constexpr bool finishes_raw = holds_raw && held > 0;
  static constexpr bool finishes_by_row = S::after_by_row || (finishes_raw && S::before_by_row);

  struct Shared {
    // A warp's ring, then its places of what is held.
    alignas(128) unsigned char stage[S::warps][slots + held_chunks][chunk_bytes];
    uint64 arrived[S::warps][slots + held_chunks];
    float4 of_warps[2][S::warps];  // by parity of the round: elements, mean, M2
    float4 of_blocks[2][S::by_memory ? 1 : S::blocks];
    uint64 warps_given[2];
    uint64 received[2];
  };

  const Parameters& p;
  Shared& shared;
  int block;  // of the cluster

  // A warp's way through the kept chunks of its slabs, in order: the next one to request, and the next one
  // to read.
  struct Ring {
    int slab;                // of the next chunk to request
    const char* from;        // that chunk
    int left;                // vectors of the slab from there on
    int next = held_chunks;  // which chunk it is
    int slot = 0;            // of the next chunk to read
    uint32 parity = 0;       // of that slot's phase
  };

  // The chunks of the warp's part of a slab from `first_chunk` on.
  __device__ __forceinline__ const char* chunks_of(int slab, int first_chunk, int& left) const {
    const Range range = Shares::range_of(p, slab);
    const int warp = block * S::warps + threadIdx.x / 32;
    const int first = range.first(warp);
    left = range.first(warp + 1) - first - first_chunk * chunk * 32;
    return static_cast<const char*>(p.input) +
           (range.begin + range.head + static_cast<int64>(first) * S::width) * Input::bytes +
           first_chunk * chunk_bytes;
  }

  __device__ __forceinline__ void enter(Ring& ring, int slabs) const {
    if (ring.slab < slabs) ring.from = chunks_of(ring.slab, held_chunks, ring.left);
  }

  // Requests a chunk of which `left` vectors are there, into a slot. By one lane.
  __device__ __forceinline__ void request(int slot, const char* from, int left) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 != 0) return;
    const int own = left < 0 ? 0 : left < chunk * 32 ? left : chunk * 32;
    const auto bytes = static_cast<uint32>(own * S::width * Input::bytes);
    const int warp = threadIdx.x / 32;
    // Every chunk is one phase of its barrier, one of 0 bytes too.
    barrier::expect(&shared.arrived[warp][slot], bytes);
    if (own > 0) barrier::copy(shared.stage[warp][slot], from, bytes, &shared.arrived[warp][slot]);
#endif
  }

  // Requests the next chunk of the ring, into the slot that was read last. All lanes count.
  __device__ __forceinline__ void request(Ring& ring, int slot, int slabs, int clusters) const {
    if (ring.slab >= slabs) return;
    request(slot, ring.from, ring.left);
    ring.from += chunk_bytes;
    ring.left -= chunk * 32;
    if (++ring.next == chunks) {
      ring.next = held_chunks;
      ring.slab += clusters;
      enter(ring, slabs);
    }
  }

  // The warp has read what a copy that is requested now overwrites.
  static __device__ __forceinline__ void release() {
#if __CUDA_ARCH__ >= 900
    // With a barrier of the warp alone loads may still be in flight when the copy begins.
    barrier::release_to_copies();
#endif
    __syncwarp();
  }

  // Where a slab lies, and what of it is this thread's. Made again for each phase: registers that would keep
  // it hold values of the slab.
  struct Place {
    Range range;
    Share share;
    int n;
    int first_channel;
    bool has_edge;
    int edge_position;
  };
  __device__ __forceinline__ Place place_of(int slab) const {
    asm volatile("" : "+r"(slab));  // the compiler does not see that it is the same slab
    const Range range = Shares::range_of(p, slab);
    const int thread = threadIdx.x;
    return {range,
            Share(range, block),
            slab / S::groups,
            slab % S::groups * static_cast<int>(Tail::group_channels),
            block == 0 && thread < range.edges,
            thread < range.head ? thread : thread + range.count * S::width};
  }

  // Chunk `c` of the thread's vectors through f; only the last vector of a full share can be missing. Before
  // those of a share that is not, enter(position) in all lanes.
  template <bool full, class F, class Enter>
  static __device__ __forceinline__ void for_each_vector(const Share& share, int c, F&& f, Enter&& enter) {
#pragma unroll
    for (int j = 0; j < chunk; ++j) {
      const int i = c * chunk + j;
      if (!full && i < S::vectors) enter(share.line_of(i));
      if (i < S::vectors && ((full && i < S::vectors - 1) || i < share.mine)) f(i, j);
    }
  }

  // One chunk of vectors through f(vector, its place in the chunk, plain, parts), where parts(g) calls
  // g(first, last) for parts of the vector in one row. Nearly all chunks are plain, full and in one row: no
  // bound is asked for and no row looked up, so that the compiler has one long block to order.
  // enter(position) in all lanes where a plain chunk begins, or a line of another one.
  template <bool by_row, class R, class F, class Enter>
  __device__ __forceinline__ void for_each_part(const Share& share, int c, bool aligned, R& rows, F&& f,
                                                Enter&& enter) const {
    bool plain = share.full && aligned;
    if constexpr (by_row) {
      rows.enter(share.line_of(c * chunk));
      plain = plain && share.end_of(c) <= rows.end;
    }
    if (plain) {
      enter(share.line_of(c * chunk));
      const auto whole = [](auto&& g) { g(0, S::width); };
      for_each_vector<true>(
          share, c, [&](int i, int j) { f(i, j, true, whole); }, enter);
    } else {
      const auto one = [&](int i, int j) {
        f(i, j, false, [&](auto&& g) {
          if constexpr (by_row) {
            rows.template visit<S::width>(share.position_of(i), g);
          } else {
            g(0, S::width);
          }
        });
      };
      for_each_vector<false>(share, c, one, enter);
      if constexpr (by_row) rows.end = 0;  // lanes may have gone on to different rows
    }
  }

  // Where vector `i` of the thread arrives and waits, one of those that are held.
  __device__ __forceinline__ unsigned char* held_vector(int i) const {
    return shared.stage[threadIdx.x / 32][slots] + (i * 32 + threadIdx.x % 32) * (S::width * Input::bytes);
  }

  // Sums of a thread: distances from the mean of a vector of its own, and their squares. That vector is one
  // of 37 at most: whatever the values are, their mean is no more than 6 deviations away from it. Distances
  // stand for the values then.
  using Sums = PivotSums<S::accumulators>;

  // The norm from each thread's sums: of the warp, of the block, of the cluster.
  __device__ __forceinline__ SlabNorm reduce(const Sums& sums, const Place& place, int slab,
                                             int round) const {
    const Share& share = place.share;
    const bool has_edge = place.has_edge;
    const int lane = threadIdx.x % 32;
    float elements = static_cast<float>(share.elements);
    Moments own{static_cast<float>(share.mine * S::width + (has_edge ? 1 : 0)), 0.0f, 0.0f};
    float from, moved, m2;
    sums.finish(own.count, moved, own.m2);
    own.mean = sums.pivot + moved;
    lanes_moments<32>(own, elements > 0.0f ? pointwise::reciprocal_fast(elements) : 0.0f, from, moved, m2);

#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    const uint32 phase = round / 2 & 1;
    const int warp = threadIdx.x / 32;
    if (lane == 0) shared.of_warps[parity][warp] = float4{elements, from + moved, m2, 0.0f};
    if constexpr (S::blocks == 1) {
      __syncthreads();
    } else if (lane == 0) {
      barrier::arrive(&shared.warps_given[parity]);
    }
    if (S::blocks == 1 || warp == 0) {
      if constexpr (S::blocks > 1) barrier::wait(&shared.warps_given[parity], phase);
      elements = merge_parts<S::warps>(shared.of_warps[parity], from, moved, m2);
    }
    if constexpr (S::by_memory) {
      if (warp == 0) {
        const auto count_of = [&](int b) {
          const int vectors = place.range.first((b + 1) * S::warps) - place.range.first(b * S::warps);
          return static_cast<float>(vectors * S::width + (b == 0 ? place.range.edges : 0));
        };
        exchange_by_memory<S>(p, slab, block, count_of, from, moved, m2);
        if (lane == 0) {
          shared.of_blocks[parity][0] = float4{from, moved, m2, 0.0f};
          barrier::arrive(&shared.received[parity]);
        }
      }
      barrier::wait(&shared.received[parity], phase);
      const float4 all = shared.of_blocks[parity][0];
      from = all.x, moved = all.y, m2 = all.z;
    } else if constexpr (S::blocks > 1) {
      // Sent with a count of its bytes: a barrier of the cluster would first wait for all that was stored.
      if (threadIdx.x == 0) barrier::expect(&shared.received[parity], S::blocks * 16);
      if (threadIdx.x < S::blocks) {
        barrier::send(&shared.of_blocks[parity][block], float4{elements, from + moved, m2, 0.0f},
                      &shared.received[parity], lane);
      }
      barrier::wait(&shared.received[parity], phase);
      merge_parts<S::blocks>(shared.of_blocks[parity], from, moved, m2);
    }
#endif
    return SlabNorm::of<Tail>(from, moved, m2, sums.pivot);
  }

  // A whole vector goes past the first-level cache, but not out of the second at once: 1% of s60, 2% of s61.
  static __device__ __forceinline__ void store(const Packed<typename Tail::Output, S::width>& y, void* output,
                                               int index, bool aligned) {
    if constexpr (Packed<typename Tail::Output, S::width>::words == 4) {
      if (aligned) {
        __stcg(reinterpret_cast<uint4*>(static_cast<char*>(output) + index * Tail::Output::bytes),
               uint4{y.word[0], y.word[1], y.word[2], y.word[3]});
        return;
      }
    }
    y.store(output, index, aligned);
  }

  // The before-chain of the thread's values and their sums.
  __device__ __forceinline__ void activate(const Place& place, int slabs, int clusters, int round, Ring& ring,
                                           float (&h)[kept][S::width], float& edge, Sums& sums) const {
    const Share& share = place.share;
    const int64 begin = place.range.begin;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float operands[Before::channel_operands > 0 ? Before::channel_operands : 1];
    const auto load_row = [&](int row) {
      Before::load_channel(p, place.n, place.first_channel + row, operands);
    };
    auto rows = row_cursor<S::spatial>(load_row);
    // A chunk that lies at `stage`.
    const auto take = [&](int c, const unsigned char* stage, auto&& keep) {
      const auto one = [&](int i, int j, bool, auto&& parts) {
        Packed<Input, S::width> packed;
        packed.load_shared(stage + (j * 32 + lane) * S::width * Input::bytes);
        float value[S::width];
        packed.unpack(value);
        typename Before::template Tensors<S::width> tensors;
        tensors.load(p, begin + share.position_of(i));
        parts([&](int from, int to) {
#pragma unroll
          for (int k = 0; k < S::width; ++k) {
            if (k >= from && k < to) value[k] = Before::value(value[k], operands, tensors, k);
          }
        });
        if (i == held || (i == 0 && share.mine <= held)) sums.pivot = Sums::mean_of(value);
#pragma unroll
        for (int k = 0; k < S::width; ++k) value[k] = sums.add(value[k], k);
        keep(i, value);
      };
      for_each_part<S::before_by_row>(share, c, true, rows, one, [](int) {});
    };
    // Vectors that are not there are set too: else their registers are taken from one slab to the next.
#pragma unroll
    for (int i = 0; i < kept; ++i) {
#pragma unroll
      for (int k = 0; k < S::width; ++k) h[i][k] = 0.0f;
    }
    // Chunks of the ring were requested before those that are held: they are taken first.
#pragma unroll
    for (int c = held_chunks; c < chunks; ++c) {
#if __CUDA_ARCH__ >= 900
      barrier::wait(&shared.arrived[warp][ring.slot], ring.parity);
#endif
      take(c, shared.stage[warp][ring.slot], [&](int i, const float(&value)[S::width]) {
#pragma unroll
        for (int k = 0; k < S::width; ++k) h[i - held][k] = value[k];
      });
      release();
      request(ring, ring.slot, slabs, clusters);
      if (++ring.slot == slots) {
        ring.slot = 0;
        ring.parity ^= 1;
      }
    }
    rows.end = 0;
#pragma unroll 1
    for (int c = 0; c < held_chunks; ++c) {
#if __CUDA_ARCH__ >= 900
      barrier::wait(&shared.arrived[warp][slots + c], round & 1);
#endif
      take(c, shared.stage[warp][slots + c], [&](int i, const float(&value)[S::width]) {
        if constexpr (!holds_raw) {
          Packed<f32, S::width> packed;
          packed.pack(value);
          packed.store_shared(held_vector(i));
        }
      });
    }
    if (place.has_edge) {
      load_row(place.edge_position / S::spatial);
      typename Before::template Tensors<1> tensors;
      tensors.load(p, begin + place.edge_position);
      edge = Before::value(load_one<Input>(p.input, begin + place.edge_position), operands, tensors, 0);
    }
    if (place.has_edge) {
      if (share.mine == 0) sums.pivot = edge;
      edge = sums.add(edge, 0);
    }
  }

  __device__ __forceinline__ void run_slab(int slab, int slabs, int clusters, int round, Ring& ring) const {
    float h[kept][S::width];
    float edge = 0.0f;
    Sums sums;
    activate(place_of(slab), slabs, clusters, round, ring, h, edge, sums);
    SlabNorm norm;
    float weight = 1.0f, bias = 0.0f;
    float operands[After::channel_operands > 0 ? After::channel_operands : 1];
    float again[Before::channel_operands > 0 ? Before::channel_operands : 1];  // of the before-chain
    const auto fetch_row = [&](const Place& place, int row) {
      weight = Tail::weight(p, place.first_channel + row);
      bias = Tail::bias(p, place.first_channel + row);
      After::load_channel(p, place.n, place.first_channel + row, operands);
      if constexpr (finishes_raw) Before::load_channel(p, place.n, place.first_channel + row, again);
    };
    {
      const Place place = place_of(slab);
      // The values of the warp's first row are loaded while sums are exchanged.
      if constexpr (finishes_by_row) fetch_row(place, place.share.begin / S::spatial);
      norm = reduce(sums, place, slab, round);
    }
    if (p.statistics != nullptr && block == 0 && threadIdx.x == 0) {
      p.statistics[2 * static_cast<int64>(slab)] = norm.mean;
      p.statistics[2 * static_cast<int64>(slab) + 1] = norm.rstd;
    }

    const Place place = place_of(slab);
    const Share& share = place.share;
    const int64 begin = place.range.begin;
    float scale, shift;
    const auto scale_row = [&] {
      scale = weight * norm.factor;
      shift = fmaf(-norm.moved, scale, bias);
    };
    scale_row();
    auto rows = row_cursor<S::spatial>([&](int row) {
      fetch_row(place, row);
      scale_row();
    });
    rows.row = share.begin / S::spatial;
    rows.end = (rows.row + 1) * S::spatial;
    void* const output = static_cast<char*>(p.output) + (begin + share.position) * Tail::Output::bytes;
    const bool aligned = Tail::has_mean || is_aligned(p, aligned_output);
    typename Means::Sums means;
    means.begin(p, slab, share.warp, 0, share.begin);
    // `raw`: what waits is what arrived.
    const auto finish = [&](int c, auto raw, auto&& value_of) {
      constexpr bool is_raw = decltype(raw)::value;
      const auto one = [&](int i, int, bool plain, auto&& parts) {
        typename Before::template Tensors<S::width> before;
        if constexpr (is_raw) before.load(p, begin + share.position_of(i));
        typename After::template Tensors<S::width> tensors;
        tensors.load(p, begin + share.position_of(i));
        float value[S::width];
        value_of(i, value);
        parts([&](int from, int to) {
#pragma unroll
          for (int k = 0; k < S::width; ++k) {
            if (k >= from && k < to) {
              if constexpr (is_raw)
                value[k] = distance_from(Before::value(value[k], again, before, k), sums.pivot);
              value[k] = After::value(fmaf(value[k], scale, shift), operands, tensors, k);
            }
          }
        });
        if constexpr (!Tail::has_mean) {
          Packed<typename Tail::Output, S::width> y;
          y.pack(value);
          store(y, output, i * S::line, plain || aligned);
        } else if (plain) {
          means.add_whole(share.line_of(i), value);
        } else {
          means.add(share.position_of(i), value);
        }
      };
      for_each_part<finishes_by_row>(share, c, aligned, rows, one,
                                     [&](int position) { means.enter(position); });
    };
    if constexpr (held > 0) {
      const bool more = slab + clusters < slabs;
      int left = 0;
      const char* next = more ? chunks_of(slab + clusters, 0, left) : nullptr;
#pragma unroll 1
      for (int c = 0; c < held_chunks; ++c) {
        finish(c, Flag<finishes_raw>{}, [&](int i, float(&value)[S::width]) {
          Packed<Waiting, S::width> packed;
          packed.load_shared(held_vector(i));
          packed.unpack(value);
        });
        if (more) {
          release();
          request(slots + c, next, left);
          next += chunk_bytes;
          left -= chunk * 32;
        }
      }
    }
#pragma unroll
    for (int c = held_chunks; c < chunks; ++c) {
      finish(c, Flag<false>{}, [&](int i, float(&value)[S::width]) {
#pragma unroll
        for (int k = 0; k < S::width; ++k) value[k] = h[i - held][k];
      });
    }
    if (place.has_edge) {
      fetch_row(place, place.edge_position / S::spatial);
      scale_row();
      typename After::template Tensors<1> tensors;
      tensors.load(p, begin + place.edge_position);
      edge = After::value(fmaf(edge, scale, shift), operands, tensors, 0);
      if constexpr (!Tail::has_mean) {
        store_one<typename Tail::Output>(p.output, begin + place.edge_position, edge);
      }
    }
    if constexpr (Tail::has_mean) {
      means.finish(share.end);
      if (share.warp == 0 && place.range.edges > 0)
        Means::leave_edges(p, slab, place.range.head, place.has_edge, edge);
    }
  }

  __device__ __forceinline__ void run() const {
    const int slabs = static_cast<int>(p.batch) * S::groups;
    const int clusters = static_cast<int>(gridDim.x) / S::blocks;
    int slab = static_cast<int>(blockIdx.x) / S::blocks;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < slots + held_chunks; ++slot)
        barrier::initialise(&shared.arrived[threadIdx.x / 32][slot]);
    }
    __syncwarp();
    Ring ring{slab};
    enter(ring, slabs);
    for (int slot = 0; slot < slots; ++slot) request(ring, slot, slabs, clusters);
    if (held > 0 && slab < slabs) {
      int left;
      const char* from = chunks_of(slab, 0, left);
      for (int c = 0; c < held_chunks; ++c) request(slots + c, from + c * chunk_bytes, left - c * chunk * 32);
    }
    if (threadIdx.x == 0) initialise_exchange<S::warps>(shared);
    sync_cluster<S>();
    int round = 0;
#pragma unroll 1
    for (; slab < slabs; slab += clusters, ++round) run_slab(slab, slabs, clusters, round, ring);
    if constexpr (Tail::has_mean) {
      Means::write(p, block, slabs, clusters, [](int vectors) { return S::Spread::of(vectors); });
    } else {
      leave_cluster<S>();
    }
#endif
  }
};

}  // namespace onepass
