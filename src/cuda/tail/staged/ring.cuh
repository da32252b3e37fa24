// The schedule "ring" of tail_staged.
//
// A warp's part of a slab arrives by bulk copies, chunk after chunk. After the before-chain values wait for
// the statistics in registers (`kept` vectors of a thread). Their chunks come through a ring of slots: a slot
// that was read makes room for the next slab. Where registers do not hold the slab, the first `held` vectors
// wait where they arrived, as f32. They make room for those of the next slab when the output is written. So
// the next slab arrives while this one is summed and while it is written. Moments go from warps to their
// block and from blocks to the cluster, past the stores of the slab before. Elements before the first vector
// and after the last one are kept by the first block, one a thread.
#pragma once

#include "tail/staged/cluster.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct StagedRing {
  using S = StagedSizes<Tail, Numbers>;
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;

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
  static_assert(held == 0 || Input::bytes == 4);

  struct Shared {
    // A warp's ring, then its places of what is held.
    alignas(128) unsigned char stage[S::warps][slots + held_chunks][chunk_bytes];
    uint64 arrived[S::warps][slots + held_chunks];
    float4 of_warps[2][S::warps];  // by parity of the round: elements, mean, M2
    float4 of_blocks[2][S::blocks];
    uint64 warps_given[2];
    uint64 received[2];
  };

  const Parameters& p;
  Shared& shared;
  int block;  // of the cluster

  // Where a slab's vectors lie.
  struct Range {
    int64 begin;  // the slab's first element
    int head;     // elements before its first vector
    int count;    // vectors
    int edges;    // elements outside of vectors
    int each;     // vectors of a lane in every warp, and one more in the first `more` warps
    int more;

    // The first vector of a warp of the cluster.
    __device__ __forceinline__ int first(int warp) const {
      const int vector = (warp * each + (warp < more ? warp : more)) * 32;
      return vector < count ? vector : count;
    }
  };

  __device__ __forceinline__ Range range_of(int slab) const {
    Range range;
    range.begin = static_cast<int64>(slab) * S::slab_elements;
    const int head = static_cast<int>(-(range.begin + p.phase) & (S::width - 1));
    range.head = head < S::slab_elements ? head : S::slab_elements;
    range.count = (S::slab_elements - range.head) / S::width;
    range.edges = S::slab_elements - range.count * S::width;
    const int rows = (range.count + 31) / 32;
    range.each = rows / S::all_warps;
    range.more = rows % S::all_warps;
    return range;
  }

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
    const Range range = range_of(slab);
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

  // What of a slab this thread keeps.
  struct Share {
    int warp;      // of the cluster
    int begin;     // position of the warp's first element in the slab
    int end;       // of the first one that is the next warp's
    int position;  // of the thread's first vector
    int mine;      // vectors of the thread
    int elements;  // of the warp; the first one has the edges
    bool full;     // all vectors but the last are there in every lane

    __device__ __forceinline__ Share(const Range& range, int block) {
      warp = block * S::warps + static_cast<int>(threadIdx.x / 32);
      const int lane = threadIdx.x % 32;
      const int first = range.first(warp);
      const int count = range.first(warp + 1) - first;
      begin = range.head + first * S::width;
      end = begin + count * S::width;
      position = begin + lane * S::width;
      mine = (count - lane + 31) / 32;
      elements = count * S::width + (warp == 0 ? range.edges : 0);
      full = count >= (S::vectors - 1) * 32;
    }

    __device__ __forceinline__ int position_of(int i) const { return position + i * 32 * S::width; }
    __device__ __forceinline__ int end_of(int c) const {
      const int chunk_end = begin + (c + 1) * chunk * 32 * S::width;
      return chunk_end < end ? chunk_end : end;
    }
  };

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
    const Range range = range_of(slab);
    const int thread = threadIdx.x;
    return {range,
            Share(range, block),
            slab / S::groups,
            slab % S::groups * static_cast<int>(Tail::group_channels),
            block == 0 && thread < range.edges,
            thread < range.head ? thread : thread + range.count * S::width};
  }

  // Chunk `c` of the thread's vectors through f; only the last vector of a full share can be missing.
  template <bool full, class F>
  static __device__ __forceinline__ void for_each_vector(const Share& share, int c, F&& f) {
#pragma unroll
    for (int j = 0; j < chunk; ++j) {
      const int i = c * chunk + j;
      if (i < S::vectors && ((full && i < S::vectors - 1) || i < share.mine)) f(i, j);
    }
  }

  // One chunk of vectors through f(vector, its place in the chunk, aligned, parts), where parts(g) calls
  // g(first, last) for parts of the vector in one row. Nearly all chunks are full and lie in one row: no
  // bound is asked for and no row looked up, so that the compiler has one long block to order.
  template <bool by_row, class R, class F>
  __device__ __forceinline__ void for_each_part(const Share& share, int c, bool aligned, R& rows,
                                                F&& f) const {
    bool plain = share.full && aligned;
    if constexpr (by_row) {
      rows.enter(share.begin + c * chunk * 32 * S::width);
      plain = plain && share.end_of(c) <= rows.end;
    }
    if (plain) {
      for_each_vector<true>(share, c,
                            [&](int i, int j) { f(i, j, true, [&](auto&& g) { g(0, S::width); }); });
    } else {
      for_each_vector<false>(share, c, [&](int i, int j) {
        f(i, j, aligned, [&](auto&& g) {
          if constexpr (by_row) {
            rows.template visit<S::width>(share.position_of(i), g);
          } else {
            g(0, S::width);
          }
        });
      });
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
  __device__ __forceinline__ SlabNorm reduce(const Sums& sums, const Share& share, bool has_edge,
                                             int round) const {
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
    if (lane == 0) {
      shared.of_warps[parity][warp] = float4{elements, from + moved, m2, 0.0f};
      barrier::arrive(&shared.warps_given[parity]);
    }
    if (S::blocks == 1 || warp == 0) {
      barrier::wait(&shared.warps_given[parity], phase);
      elements = merge_parts<S::warps>(shared.of_warps[parity], from, moved, m2);
    }
    if constexpr (S::blocks > 1) {
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
      for_each_part<S::before_by_row>(share, c, true, rows, [&](int i, int j, bool, auto&& parts) {
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
      });
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
        Packed<f32, S::width> packed;
        packed.pack(value);
        packed.store_shared(held_vector(i));
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
    const auto fetch_row = [&](const Place& place, int row) {
      weight = Tail::weight(p, place.first_channel + row);
      bias = Tail::bias(p, place.first_channel + row);
      After::load_channel(p, place.n, place.first_channel + row, operands);
    };
    {
      const Place place = place_of(slab);
      // The values of the warp's first row are loaded while sums are exchanged.
      if constexpr (S::after_by_row) fetch_row(place, place.share.begin / S::spatial);
      norm = reduce(sums, place.share, place.has_edge, round);
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
    const auto finish = [&](int c, auto&& value_of) {
      for_each_part<S::after_by_row>(
          share, c, is_aligned(p, aligned_output), rows, [&](int i, int, bool aligned, auto&& parts) {
            typename After::template Tensors<S::width> tensors;
            tensors.load(p, begin + share.position_of(i));
            float value[S::width];
            value_of(i, value);
            parts([&](int from, int to) {
#pragma unroll
              for (int k = 0; k < S::width; ++k) {
                if (k >= from && k < to) {
                  value[k] = After::value(fmaf(value[k], scale, shift), operands, tensors, k);
                }
              }
            });
            Packed<typename Tail::Output, S::width> y;
            y.pack(value);
            store(y, output, i * 32 * S::width, aligned);
          });
    };
    if constexpr (held > 0) {
      const bool more = slab + clusters < slabs;
      int left = 0;
      const char* next = more ? chunks_of(slab + clusters, 0, left) : nullptr;
#pragma unroll 1
      for (int c = 0; c < held_chunks; ++c) {
        finish(c, [&](int i, float(&value)[S::width]) {
          Packed<f32, S::width> packed;
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
      finish(c, [&](int i, float(&value)[S::width]) {
#pragma unroll
        for (int k = 0; k < S::width; ++k) value[k] = h[i - held][k];
      });
    }
    if (place.has_edge) {
      fetch_row(place, place.edge_position / S::spatial);
      scale_row();
      typename After::template Tensors<1> tensors;
      tensors.load(p, begin + place.edge_position);
      store_one<typename Tail::Output>(p.output, begin + place.edge_position,
                                       After::value(fmaf(edge, scale, shift), operands, tensors, 0));
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
    start_cluster<S::blocks>();
    int round = 0;
#pragma unroll 1
    for (; slab < slabs; slab += clusters, ++round) run_slab(slab, slabs, clusters, round, ring);
    leave_cluster<S::blocks>();
#endif
  }
};

}  // namespace onepass
