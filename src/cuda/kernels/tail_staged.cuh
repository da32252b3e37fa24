// A tail whose slab stays on the chip between its statistics and its output, in clusters that stay and take
// slab after slab: x is read once, y written once.
//
// A slab of a planar tensor is a contiguous range. Each warp of a cluster has its part of it, which arrives
// in its own ring in shared memory by bulk copies, chunk after chunk: what was read of one slab makes room
// for the next. After the before-chain values wait for the statistics in registers (`kept` vectors of a
// thread) and, where those do not hold the slab, in shared memory (`held`). Mean and M2 go from warps to
// their block and from blocks to all of the cluster, past the stores of the slab before. Elements before the
// first vector and after the last one are kept by the first block, one a thread.
#pragma once

#include "barrier.cuh"
#include "tail.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailStaged {
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;

  static constexpr int width = Numbers::width;
  static constexpr int threads = Numbers::threads;
  static constexpr int blocks = Numbers::blocks;
  static constexpr int warps = threads / 32;
  static constexpr int all_warps = warps * blocks;
  // Vectors of a thread: the first `held` of them wait in shared memory, the others in registers.
  static constexpr int vectors = Numbers::vectors;
  static constexpr int held = Numbers::held;
  static constexpr int kept = vectors - held;
  // They arrive by chunks of `chunk`; each warp has a ring of `slots` chunks.
  static constexpr int chunk = Numbers::chunk;
  static constexpr int chunks = (vectors + chunk - 1) / chunk;
  static constexpr int held_chunks = held / chunk;
  static constexpr int slots = Numbers::slots;
  static constexpr int chunk_bytes = chunk * 32 * width * Input::bytes;
  static_assert(kept > 0 && held % chunk == 0 && width % 4 == 0);
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int slab_elements = static_cast<int>(Tail::group_channels) * spatial;
  static constexpr int groups = Tail::channels / Tail::group_channels;
  static constexpr int lines = 4;  // partial sums of a thread: additions that do not wait for each other
  static constexpr bool after_by_row = Tail::has_affine || After::channel_operands > 0;

  struct Shared {
    alignas(128) unsigned char stage[warps][slots][chunk_bytes];
    float4 hold[held > 0 ? warps* held*(width / 4) * 32 : 1];
    uint64 arrived[warps][slots];
    // By parity of the round: elements, mean and M2 of the block's warps and of the cluster's blocks, and
    // what counts them.
    float4 of_warps[2][warps];
    float4 of_blocks[2][blocks];
    uint64 told[2];
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
    range.begin = static_cast<int64>(slab) * slab_elements;
    const int head = static_cast<int>(-(range.begin + p.phase) & (width - 1));
    range.head = head < slab_elements ? head : slab_elements;
    range.count = (slab_elements - range.head) / width;
    range.edges = slab_elements - range.count * width;
    const int rows = (range.count + 31) / 32;
    range.each = rows / all_warps;
    range.more = rows % all_warps;
    return range;
  }

  // A warp's way through the chunks of its slabs, in order: where the next one to come is asked for, where
  // the next one to be read lies.
  struct Ring {
    int slab;           // of the next chunk to ask for
    const char* from;   // that chunk
    int left;           // vectors of the slab from there on
    int next = 0;       // which chunk it is
    int slot = 0;       // of the next chunk to read
    uint32 parity = 0;  // of that slot's phase
  };

  __device__ __forceinline__ void enter(Ring& ring, int slabs) const {
    if (ring.slab >= slabs) return;
    const Range range = range_of(ring.slab);
    const int warp = block * warps + threadIdx.x / 32;
    const int first = range.first(warp);
    ring.left = range.first(warp + 1) - first;
    ring.from = static_cast<const char*>(p.input) +
                (range.begin + range.head + static_cast<int64>(first) * width) * Input::bytes;
  }

  // Asks for the next chunk, into the slot that was read last. By one lane; all of them count.
  __device__ __forceinline__ void ask(Ring& ring, int slot, int slabs, int clusters) const {
#if __CUDA_ARCH__ >= 900
    if (ring.slab >= slabs) return;
    const int warp = threadIdx.x / 32;
    const int own = ring.left < chunk * 32 ? ring.left : chunk * 32;
    if (threadIdx.x % 32 == 0) {
      const auto bytes = static_cast<uint32>(own * width * Input::bytes);
      // Nothing to come is waited for all the same: every chunk is one phase.
      barrier::expect(&shared.arrived[warp][slot], bytes);
      if (own > 0) barrier::copy(shared.stage[warp][slot], ring.from, bytes, &shared.arrived[warp][slot]);
    }
    ring.from += chunk_bytes;
    ring.left -= own;
    if (++ring.next == chunks) {
      ring.next = 0;
      ring.slab += clusters;
      enter(ring, slabs);
    }
#endif
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
      warp = block * warps + static_cast<int>(threadIdx.x / 32);
      const int lane = threadIdx.x % 32;
      const int first = range.first(warp);
      const int count = range.first(warp + 1) - first;
      begin = range.head + first * width;
      end = begin + count * width;
      position = begin + lane * width;
      mine = (count - lane + 31) / 32;
      elements = count * width + (warp == 0 ? range.edges : 0);
      full = count >= (vectors - 1) * 32;
    }

    __device__ __forceinline__ int position_of(int i) const { return position + i * 32 * width; }
    __device__ __forceinline__ int end_of(int c) const {
      const int chunk_end = begin + (c + 1) * chunk * 32 * width;
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
            slab / groups,
            slab % groups * static_cast<int>(Tail::group_channels),
            block == 0 && thread < range.edges,
            thread < range.head ? thread : thread + range.count * width};
  }

  // Chunk `c` of the thread's vectors through f; only the last vector of a full share can be missing.
  template <bool full, class F>
  static __device__ __forceinline__ void for_each_vector(const Share& share, int c, F&& f) {
#pragma unroll
    for (int j = 0; j < chunk; ++j) {
      const int i = c * chunk + j;
      if (i < vectors && ((full && i < vectors - 1) || i < share.mine)) f(i, j);
    }
  }

  // The row (channel) of the warp's next chunk, and what `load` gets for it.
  template <class Load>
  struct Rows {
    int row;
    int end;  // the position where the row ends
    Load load;

    __device__ __forceinline__ void enter(int position) {
      if (position < end) return;
      row = position / spatial;
      end = row * spatial + spatial;
      load(row);
    }

    // Calls f(first, last) for the parts [first, last) of the vector at `position` that lie in one row.
    template <class F>
    __device__ __forceinline__ void visit(int position, F&& f) {
      if (position + width > end) {
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

  // One chunk of vectors through f(vector, its place in the chunk, aligned, parts), where parts(g) calls
  // g(first, last) for parts of the vector in one row. Nearly all chunks are full and lie in one row: no
  // bound is asked for and no row looked up, so that the compiler has one long block to order.
  template <bool by_row, class R, class F>
  __device__ __forceinline__ void for_each_part(const Share& share, int c, bool aligned, R& rows,
                                                F&& f) const {
    bool plain = share.full && aligned;
    if constexpr (by_row) {
      rows.enter(share.begin + c * chunk * 32 * width);
      plain = plain && share.end_of(c) <= rows.end;
    }
    if (plain) {
      for_each_vector<true>(share, c, [&](int i, int j) { f(i, j, true, [&](auto&& g) { g(0, width); }); });
    } else {
      for_each_vector<false>(share, c, [&](int i, int j) {
        f(i, j, aligned, [&](auto&& g) {
          if constexpr (by_row) {
            rows.visit(share.position_of(i), g);
          } else {
            g(0, width);
          }
        });
      });
      if constexpr (by_row) rows.end = 0;  // lanes may have gone on to different rows
    }
  }

  // Vector `i` of the thread in shared memory.
  __device__ __forceinline__ float4* held_vector(int i) const {
    return shared.hold + (threadIdx.x / 32 * held + i) * (width / 4) * 32 + threadIdx.x % 32;
  }
  __device__ __forceinline__ void put(int i, const float (&h)[width]) const {
    float4* to = held_vector(i);
#pragma unroll
    for (int k = 0; k < width; k += 4) to[k / 4 * 32] = float4{h[k], h[k + 1], h[k + 2], h[k + 3]};
  }
  __device__ __forceinline__ void get(int i, float (&h)[width]) const {
    const float4* from = held_vector(i);
#pragma unroll
    for (int k = 0; k < width; k += 4) {
      const float4 v = from[k / 4 * 32];
      h[k] = v.x, h[k + 1] = v.y, h[k + 2] = v.z, h[k + 3] = v.w;
    }
  }

  // The squared distances of the thread's values from the mean, by place in the vector.
  template <bool full>
  __device__ __forceinline__ void add_squares(const float (&h)[kept][width], const Share& share, float mean,
                                              float (&squares)[lines]) const {
    const auto square = [&](const float(&value)[width]) {
#pragma unroll
      for (int k = 0; k < width; ++k) {
        const float distance = value[k] - mean;
        squares[k % lines] = fmaf(distance, distance, squares[k % lines]);
      }
    };
#pragma unroll 1
    for (int c = 0; c < held_chunks; ++c) {
      for_each_vector<full>(share, c, [&](int i, int) {
        float value[width];
        get(i, value);
        square(value);
      });
    }
#pragma unroll
    for (int c = held_chunks; c < chunks; ++c) {
      for_each_vector<full>(share, c, [&](int i, int) { square(h[i - held]); });
    }
  }

  // Mean and M2 of `count` parts together, the same in every lane, and the number of their elements: the
  // mean, then every part's M2 moved to it.
  template <int count>
  static __device__ __forceinline__ float merge(const float4* parts, float& mean, float& m2) {
    static_assert((count & (count - 1)) == 0 && count <= 32);
    const float4 own = parts[threadIdx.x % count];
    const float elements = lanes_sum<count>(own.x);
    mean = lanes_sum<count>(own.x * own.y) * (elements > 0.0f ? 1.0f / elements : 0.0f);
    const float distance = own.y - mean;
    m2 = lanes_sum<count>(fmaf(own.x * distance, distance, own.z));
    return elements;
  }

  // Mean and 1 / deviation of the slab from each thread's values: of the warp, of the block, of the cluster.
  __device__ __forceinline__ void reduce(const float (&h)[kept][width], const Share& share, float sum,
                                         float edge, bool has_edge, int round, float& mean,
                                         float& rstd) const {
    const int lane = threadIdx.x % 32;
    float elements = static_cast<float>(share.elements);
    mean = lanes_sum<32>(sum) * (elements > 0.0f ? pointwise::reciprocal_fast(elements) : 0.0f);
    float squares[lines] = {};
    if (has_edge) squares[0] = (edge - mean) * (edge - mean);
    if (share.full) {
      add_squares<true>(h, share, mean, squares);
    } else {
      add_squares<false>(h, share, mean, squares);
    }
    float m2 = 0.0f;
#pragma unroll
    for (int k = 0; k < lines; ++k) m2 += squares[k];
    m2 = lanes_sum<32>(m2);

    // The next round's sums of a warp come when it has read those of this one, and the ones after that when
    // all have given theirs of the next: two buffers suffice.
    constexpr float per_element = 1.0f / static_cast<float>(slab_elements);
#if __CUDA_ARCH__ >= 900
    const int parity = round & 1;
    const uint32 phase = round / 2 & 1;
    const int warp = threadIdx.x / 32;
    if (lane == 0) {
      shared.of_warps[parity][warp] = float4{elements, mean, m2, 0.0f};
      barrier::arrive(&shared.told[parity]);
    }
    if (blocks == 1 || warp == 0) {
      barrier::wait(&shared.told[parity], phase);
      elements = merge<warps>(shared.of_warps[parity], mean, m2);
    }
    if constexpr (blocks > 1) {
      // Sent with a count of its bytes: a barrier of the cluster would first wait for all that was stored.
      if (threadIdx.x == 0) barrier::expect(&shared.received[parity], blocks * 16);
      if (threadIdx.x < blocks) {
        barrier::send(&shared.of_blocks[parity][block], float4{elements, mean, m2, 0.0f},
                      &shared.received[parity], lane);
      }
      barrier::wait(&shared.received[parity], phase);
      merge<blocks>(shared.of_blocks[parity], mean, m2);
    }
#endif
    rstd = rsqrtf(m2 * per_element + Tail::eps);
  }

  // The before-chain of the thread's values and their sum.
  __device__ __forceinline__ void activate(const Place& place, int slabs, int clusters, Ring& ring,
                                           float (&h)[kept][width], float& edge, float& sum) const {
    const Share& share = place.share;
    const int64 begin = place.range.begin;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float sums[lines] = {};
    float operands[Before::channel_operands > 0 ? Before::channel_operands : 1];
    const auto load_row = [&](int row) {
      Before::load_channel(p, place.n, place.first_channel + row, operands);
    };
    auto rows = rows_of(load_row);
    const auto take = [&](int c, auto&& keep) {
#if __CUDA_ARCH__ >= 900
      barrier::wait(&shared.arrived[warp][ring.slot], ring.parity);
#endif
      const unsigned char* stage = shared.stage[warp][ring.slot] + lane * width * Input::bytes;
      for_each_part<(Before::channel_operands > 0)>(
          share, c, true, rows, [&](int i, int j, bool, auto&& parts) {
            Packed<Input, width> packed;
            packed.load_shared(stage + j * 32 * width * Input::bytes);
            float value[width];
            packed.unpack(value);
            typename Before::template Tensors<width> tensors;
            tensors.load(p, begin + share.position_of(i));
            parts([&](int from, int to) {
#pragma unroll
              for (int k = 0; k < width; ++k) {
                if (k >= from && k < to) value[k] = Before::value(value[k], operands, tensors, k);
              }
            });
#pragma unroll
            for (int k = 0; k < width; ++k) sums[k % lines] += value[k];
            keep(i, value);
          });
#if __CUDA_ARCH__ >= 900
      // A barrier of the warp alone lets loads be under way still when the copy begins.
      barrier::release_to_copies();
#endif
      __syncwarp();
      ask(ring, ring.slot, slabs, clusters);
      if (++ring.slot == slots) {
        ring.slot = 0;
        ring.parity ^= 1;
      }
    };
#pragma unroll 1
    for (int c = 0; c < held_chunks; ++c) {
      take(c, [&](int i, const float(&value)[width]) { put(i, value); });
    }
    // Vectors that are not there are set too: else their registers are taken from one slab to the next.
#pragma unroll
    for (int i = 0; i < kept; ++i) {
#pragma unroll
      for (int k = 0; k < width; ++k) h[i][k] = 0.0f;
    }
#pragma unroll
    for (int c = held_chunks; c < chunks; ++c) {
      take(c, [&](int i, const float(&value)[width]) {
#pragma unroll
        for (int k = 0; k < width; ++k) h[i - held][k] = value[k];
      });
    }
    if (place.has_edge) {
      load_row(place.edge_position / spatial);
      typename Before::template Tensors<1> tensors;
      tensors.load(p, begin + place.edge_position);
      edge = Before::value(load_one<Input>(p.input, begin + place.edge_position), operands, tensors, 0);
    }
    sum = edge;
#pragma unroll
    for (int k = 0; k < lines; ++k) sum += sums[k];
  }

  __device__ __forceinline__ void run_slab(int slab, int slabs, int clusters, int round, Ring& ring) const {
    float h[kept][width];
    float edge = 0.0f, sum;
    activate(place_of(slab), slabs, clusters, ring, h, edge, sum);
    float mean, rstd;
    float weight = 1.0f, bias = 0.0f;
    float operands[After::channel_operands > 0 ? After::channel_operands : 1];
    const auto ask_row = [&](const Place& place, int row) {
      weight = Tail::weight(p, place.first_channel + row);
      bias = Tail::bias(p, place.first_channel + row);
      After::load_channel(p, place.n, place.first_channel + row, operands);
    };
    {
      const Place place = place_of(slab);
      // The values of the warp's first row are on their way while the sums are.
      if constexpr (after_by_row) ask_row(place, place.share.begin / spatial);
      reduce(h, place.share, sum, edge, place.has_edge, round, mean, rstd);
    }
    if (p.statistics != nullptr && block == 0 && threadIdx.x == 0) {
      p.statistics[2 * static_cast<int64>(slab)] = mean;
      p.statistics[2 * static_cast<int64>(slab) + 1] = rstd;
    }

    const Place place = place_of(slab);
    const Share& share = place.share;
    const int64 begin = place.range.begin;
    float scale, shift;
    const auto scale_row = [&] {
      scale = weight * rstd;
      shift = fmaf(-mean, scale, bias);
    };
    scale_row();
    auto rows = rows_of([&](int row) {
      ask_row(place, row);
      scale_row();
    });
    rows.row = share.begin / spatial;
    rows.end = (rows.row + 1) * spatial;
    void* const output = static_cast<char*>(p.output) + (begin + share.position) * Tail::Output::bytes;
    const auto finish = [&](int c, auto&& value_of) {
      for_each_part<after_by_row>(
          share, c, p.is_aligned(aligned_output), rows, [&](int i, int, bool aligned, auto&& parts) {
            typename After::template Tensors<width> tensors;
            tensors.load(p, begin + share.position_of(i));
            float value[width];
            value_of(i, value);
            parts([&](int from, int to) {
#pragma unroll
              for (int k = 0; k < width; ++k) {
                if (k >= from && k < to) {
                  value[k] = After::value(fmaf(value[k], scale, shift), operands, tensors, k);
                }
              }
            });
            Packed<typename Tail::Output, width> y;
            y.pack(value);
            y.store(output, i * 32 * width, aligned);
          });
    };
#pragma unroll 1
    for (int c = 0; c < held_chunks; ++c) {
      finish(c, [&](int i, float(&value)[width]) { get(i, value); });
    }
#pragma unroll
    for (int c = held_chunks; c < chunks; ++c) {
      finish(c, [&](int i, float(&value)[width]) {
#pragma unroll
        for (int k = 0; k < width; ++k) value[k] = h[i - held][k];
      });
    }
    if (place.has_edge) {
      ask_row(place, place.edge_position / spatial);
      scale_row();
      typename After::template Tensors<1> tensors;
      tensors.load(p, begin + place.edge_position);
      store_one<typename Tail::Output>(p.output, begin + place.edge_position,
                                       After::value(fmaf(edge, scale, shift), operands, tensors, 0));
    }
  }

  __device__ __forceinline__ void run() const {
    const int slabs = static_cast<int>(p.batch) * groups;
    const int clusters = static_cast<int>(gridDim.x) / blocks;
    int slab = static_cast<int>(blockIdx.x) / blocks;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
      for (int slot = 0; slot < slots; ++slot) barrier::initialise(&shared.arrived[threadIdx.x / 32][slot]);
    }
    __syncwarp();
    Ring ring{slab};
    enter(ring, slabs);
    for (int slot = 0; slot < slots; ++slot) ask(ring, slot, slabs, clusters);
    if (threadIdx.x == 0) {
      for (int parity = 0; parity < 2; ++parity) {
        barrier::initialise(&shared.told[parity], warps);
        barrier::initialise(&shared.received[parity]);
      }
    }
    // No sums go to a block that has not started.
    if constexpr (blocks > 1) {
      barrier::cluster_sync();
    } else {
      __syncthreads();
    }
    int round = 0;
#pragma unroll 1
    for (; slab < slabs; slab += clusters, ++round) run_slab(slab, slabs, clusters, round, ring);
    if constexpr (blocks > 1) barrier::cluster_sync();  // none leaves while others may write to it
#endif
  }
};

}  // namespace onepass
