// A tail whose slab stays on the chip between its statistics and its output: x is read once, y written once.
//
// A slab of a planar tensor is a contiguous range. A cluster of `blocks` blocks holds it in registers, after
// the before-chain, each warp 32 * vectors neighbouring vectors. Blocks exchange mean and M2 through
// distributed shared memory. With `staged` the clusters stay and take slab after slab: as soon as a warp has
// its vectors of one slab in registers, it sends for those of the next, which arrive in its part of shared
// memory. Elements before the first vector and after the last one are kept by the first block, one a thread.
#pragma once

#include "barrier.cuh"
#include "tail.cuh"

namespace onepass {

template <class Tail, class Numbers>
struct TailResident {
  using Parameters = TailParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;

  static constexpr int width = Numbers::width;
  static constexpr int threads = Numbers::threads;
  static constexpr int vectors = Numbers::vectors;
  static constexpr int blocks = Numbers::blocks;
  static constexpr int warps = threads / 32;
  static constexpr int warp_vectors = 32 * vectors;
  static constexpr int block_vectors = threads * vectors;
  // Staging goes by chunks of `chunk` vectors a thread; each warp has a ring of `slots` of them.
  static constexpr int chunk = Numbers::chunk;
  static constexpr int chunks = (vectors + chunk - 1) / chunk;
  static constexpr int slots = Numbers::slots;
  static constexpr int chunk_bytes = chunk * 32 * width * Input::bytes;
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int slab_elements = static_cast<int>(Tail::group_channels) * spatial;
  static constexpr int groups = Tail::channels / Tail::group_channels;

  struct Shared {
    alignas(128) unsigned char stage[warps][slots][Numbers::staged ? chunk_bytes : 16];
    uint64 arrived[warps][slots];
    uint64 received[2];            // what the cluster's blocks sent, by parity of the round
    float warp[2][warps];          // mean and M2 of the warps
    float exchange[2][blocks][2];  // mean and M2 of the cluster's blocks, by parity of the round
  };

  const Parameters& p;
  Shared& shared;

  // Where a slab's vectors lie.
  struct Range {
    int64 begin;  // the slab's first element
    int head;     // elements before its first vector
    int count;    // vectors
    int edges;    // elements outside of vectors

    // Elements that one warp of the cluster keeps, and one block; the first of each has the edges.
    __device__ __forceinline__ float elements(int first, int share) const {
      const int left = count - first;
      return static_cast<float>((left < 0       ? 0
                                 : left < share ? left
                                                : share) *
                                    width +
                                (first == 0 ? edges : 0));
    }
  };

  __device__ __forceinline__ Range range_of(int64 slab) const {
    Range range;
    range.begin = slab * slab_elements;
    const int head = static_cast<int>(-(range.begin + p.phase) & (width - 1));
    range.head = head < slab_elements ? head : slab_elements;
    range.count = (slab_elements - range.head) / width;
    range.edges = slab_elements - range.count * width;
    return range;
  }

  // A warp's way through the chunks of its slabs, in order: where the next one to come is asked for, where
  // the next one to be read lies.
  struct Ring {
    int64 slab;         // of the next chunk to ask for
    int next = 0;       // that chunk
    int slot = 0;       // of the next chunk to read
    uint32 parity = 0;  // of that slot's phase
  };

  // Asks for the next chunk, into the slot that was read last. By one lane; all of them count.
  __device__ __forceinline__ void ask(Ring& ring, int slot, int64 slabs, int64 clusters, int block) const {
#if __CUDA_ARCH__ >= 900
    if (ring.slab >= slabs) return;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
      const Range range = range_of(ring.slab);
      const int first = block * block_vectors + warp * warp_vectors + ring.next * chunk * 32;
      const int most = (ring.next == chunks - 1 ? vectors - ring.next * chunk : chunk) * 32;
      const int left = range.count - first;
      const int own = left < 0 ? 0 : left < most ? left : most;
      const auto bytes = static_cast<uint32>(own * width * Input::bytes);
      // Nothing to come is waited for all the same: every chunk is one phase.
      barrier::expect(&shared.arrived[warp][slot], bytes);
      if (own > 0) {
        const char* from = static_cast<const char*>(p.input) +
                           (range.begin + range.head + static_cast<int64>(first) * width) * Input::bytes;
        barrier::copy(shared.stage[warp][slot], from, bytes, &shared.arrived[warp][slot]);
      }
    }
    if (++ring.next == chunks) {
      ring.next = 0;
      ring.slab += clusters;
    }
#endif
  }

  // The values of the channel that a vector lies in. A thread's vectors go upwards, so that they change
  // rarely.
  template <class Load>
  struct RowCursor {
    int row = 0;
    int end = 0;  // the position where the row ends
    Load load;

    // Calls f(first, last) for the parts [first, last) of the vector at `position` that lie in one row.
    template <int Width, class F>
    __device__ __forceinline__ void visit(int position, F&& f) {
      if (position + Width > end) {
        row = position / spatial;
        end = row * spatial + spatial;
        load(row);
        if (Width > 1 && position + Width > end) {
#pragma unroll
          for (int k = 0; k < Width; ++k) {
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
      f(0, Width);
    }
  };
  template <class Load>
  static __device__ __forceinline__ RowCursor<Load> cursor(Load load) {
    return {0, 0, load};
  }

  // What of a slab this thread keeps.
  struct Share {
    int first;     // the warp's first vector
    int position;  // of the thread's first vector in the slab
    int mine;      // vectors
    int row;       // of the warp's first vector
    // All of the warp's vectors are there and lie in one row: no bound is asked for and no row looked up, so
    // that the compiler has one long block to order. Else a branch around each vector: 25 instructions an
    // element instead of 15 on s60.
    bool plain;

    __device__ __forceinline__ Share(const Range& range, int block) {
      const int lane = threadIdx.x % 32;
      first = block * block_vectors + static_cast<int>(threadIdx.x / 32) * warp_vectors;
      position = range.head + (first + lane) * width;
      const int left = range.count - first - lane;
      mine = left <= 0 ? 0 : left > (vectors - 1) * 32 ? vectors : (left + 31) / 32;
      const int begin = range.head + first * width;
      row = begin / spatial;
      plain = range.count - first >= warp_vectors && begin + warp_vectors * width <= (row + 1) * spatial;
    }

    __device__ __forceinline__ int position_of(int i) const { return position + i * 32 * width; }
  };

  // The thread's vectors [first, last) through f, with the bounds that the share needs.
  template <bool plain, class F>
  static __device__ __forceinline__ void for_each_vector(const Share& share, int first, int last, F&& f) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      if (i >= first && i < last && (plain || i < share.mine)) f(i);
    }
  }

  // Mean and 1 / deviation of the slab from each thread's values: within the warp, the block, the cluster.
  // Each level is two sums: the mean, then M2 moved to it.
  __device__ __forceinline__ void reduce(const float (&h)[vectors][width], const Share& share, float sum,
                                         float edge, bool has_edge, const Range& range, int block, int round,
                                         float& mean, float& rstd) const {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float elements = range.elements(block * block_vectors + warp * warp_vectors, warp_vectors);
    mean = lanes_sum<32>(sum) * (elements > 0.0f ? pointwise::reciprocal_fast(elements) : 0.0f);
    float squares[width] = {};
    if (has_edge) squares[0] = (edge - mean) * (edge - mean);
    const auto square = [&](int i) {
#pragma unroll
      for (int k = 0; k < width; ++k) {
        const float distance = h[i][k] - mean;
        squares[k] = fmaf(distance, distance, squares[k]);
      }
    };
    if (share.mine == vectors) {
      for_each_vector<true>(share, 0, vectors, square);
    } else {
      for_each_vector<false>(share, 0, vectors, square);
    }
    float m2 = 0.0f;
#pragma unroll
    for (int k = 0; k < width; ++k) m2 += squares[k];
    m2 = lanes_sum<32>(m2);
    if constexpr (warps > 1) {
      if (lane == 0) {
        shared.warp[0][warp] = mean;
        shared.warp[1][warp] = m2;
      }
      __syncthreads();
      if (blocks == 1 || warp == 0) {
        const float own =
            lane < warps ? range.elements(block * block_vectors + lane * warp_vectors, warp_vectors) : 0.0f;
        elements = range.elements(block * block_vectors, block_vectors);
        merge(own, lane < warps ? shared.warp[0][lane] : 0.0f, lane < warps ? shared.warp[1][lane] : 0.0f,
              elements > 0.0f ? 1.0f / elements : 0.0f, mean, m2);
      }
    }
    constexpr float per_element = 1.0f / static_cast<float>(slab_elements);
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      // Sent with a count of its bytes: a barrier of the cluster would first wait for all that was stored.
      const int parity = round & 1;
      if (threadIdx.x == 0) barrier::expect(&shared.received[parity], blocks * 8);
      if (threadIdx.x < blocks) {
        barrier::send(shared.exchange[parity][block], mean, m2, &shared.received[parity], lane);
      }
      barrier::wait(&shared.received[parity], round / 2 & 1);
      const float own = lane < blocks ? range.elements(lane * block_vectors, block_vectors) : 0.0f;
      merge(own, lane < blocks ? shared.exchange[parity][lane][0] : 0.0f,
            lane < blocks ? shared.exchange[parity][lane][1] : 0.0f, per_element, mean, m2);
    }
#endif
    rstd = rsqrtf(m2 * per_element + Tail::eps);
  }

  // The mean and M2 of a warp's lanes, each with `elements` of its own; per_element is 1 / their sum.
  static __device__ __forceinline__ void merge(float elements, float own_mean, float own_m2,
                                               float per_element, float& mean, float& m2) {
    mean = lanes_sum<32>(elements * own_mean) * per_element;
    const float distance = own_mean - mean;
    m2 = lanes_sum<32>(fmaf(elements * distance, distance, own_m2));
  }

  // The before-chain of the thread's vectors, from shared memory or from the input, and their sums.
  template <bool plain>
  __device__ __forceinline__ void activate(const Share& share, const Range& range, int64 n, int first_channel,
                                           int block, int64 slabs, int64 clusters, Ring& ring,
                                           float (&h)[vectors][width], float (&sums)[width]) const {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float operands[Before::channel_operands > 0 ? Before::channel_operands : 1];
    const auto load_row = [&](int row) { Before::load_channel(p, n, first_channel + row, operands); };
    auto rows = cursor(load_row);
    if constexpr (plain) load_row(share.row);
    const auto one = [&](int i) {
      typename Before::template Tensors<width> tensors;
      tensors.load(p, range.begin + share.position_of(i));
      const auto part = [&](int from, int to) {
#pragma unroll
        for (int k = 0; k < width; ++k) {
          if (k >= from && k < to) h[i][k] = Before::value(h[i][k], operands, tensors, k);
        }
      };
      if constexpr (!plain && Before::channel_operands > 0) {
        rows.template visit<width>(share.position_of(i), part);
      } else {
        part(0, width);
      }
#pragma unroll
      for (int k = 0; k < width; ++k) sums[k] += h[i][k];
    };
    if constexpr (Numbers::staged) {
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
#if __CUDA_ARCH__ >= 900
        barrier::wait(&shared.arrived[warp][ring.slot], ring.parity);
#endif
        const unsigned char* stage = shared.stage[warp][ring.slot] + lane * width * Input::bytes;
        for_each_vector<plain>(share, c * chunk, (c + 1) * chunk, [&](int i) {
          Packed<Input, width> packed;
          packed.load_shared(stage + (i - c * chunk) * 32 * width * Input::bytes);
          packed.unpack(h[i]);
          one(i);
        });
#if __CUDA_ARCH__ >= 900
        // A barrier of the warp alone lets loads be under way still when the copy begins.
        barrier::release_to_copies();
#endif
        __syncwarp();
        ask(ring, ring.slot, slabs, clusters, block);
        if (++ring.slot == slots) {
          ring.slot = 0;
          ring.parity ^= 1;
        }
      }
    } else {
      Packed<Input, width> packed[vectors];
      for_each_vector<plain>(share, 0, vectors, [&](int i) {
        packed[i].load(p.input, range.begin + share.position_of(i), true);
      });
      for_each_vector<plain>(share, 0, vectors, [&](int i) {
        packed[i].unpack(h[i]);
        one(i);
      });
    }
  }

  // The norm and the after-chain of the thread's vectors, to the output. `load_row(row)` sets scale, shift,
  // operands.
  template <bool plain, class LoadRow>
  __device__ __forceinline__ void finish(const Share& share, const Range& range, const float& scale,
                                         const float& shift, const float* operands, const LoadRow& load_row,
                                         float (&h)[vectors][width]) const {
    constexpr bool by_row = Tail::has_affine || After::channel_operands > 0;
    auto rows = cursor(load_row);
    for_each_vector<plain>(share, 0, vectors, [&](int i) {
      typename After::template Tensors<width> tensors;
      tensors.load(p, range.begin + share.position_of(i));
      const auto part = [&](int from, int to) {
#pragma unroll
        for (int k = 0; k < width; ++k) {
          if (k >= from && k < to) h[i][k] = After::value(fmaf(h[i][k], scale, shift), operands, tensors, k);
        }
      };
      if constexpr (!plain && by_row) {
        rows.template visit<width>(share.position_of(i), part);
      } else {
        part(0, width);
      }
      Packed<typename Tail::Output, width> y;
      y.pack(h[i]);
      y.store(p.output, range.begin + share.position_of(i), plain || p.is_aligned(aligned_output));
    });
  }

  __device__ __forceinline__ void run_slab(int64 slab, int64 slabs, int64 clusters, int block, int round,
                                           Ring& ring) const {
    const Range range = range_of(slab);
    const Share share(range, block);
    const int64 n = slab / groups;
    const int first_channel = static_cast<int>(slab % groups) * static_cast<int>(Tail::group_channels);
    const int thread = threadIdx.x;
    const bool plain = share.plain && p.is_aligned(aligned_output);

    float h[vectors][width];
    float sums[width] = {};
    if (plain) {
      activate<true>(share, range, n, first_channel, block, slabs, clusters, ring, h, sums);
    } else {
      activate<false>(share, range, n, first_channel, block, slabs, clusters, ring, h, sums);
    }
    float edge = 0.0f;
    const bool has_edge = block == 0 && thread < range.edges;
    const int edge_position = thread < range.head ? thread : thread + range.count * width;
    if (has_edge) {
      float operands[Before::channel_operands > 0 ? Before::channel_operands : 1];
      Before::load_channel(p, n, first_channel + edge_position / spatial, operands);
      typename Before::template Tensors<1> tensors;
      tensors.load(p, range.begin + edge_position);
      edge = Before::value(load_one<Input>(p.input, range.begin + edge_position), operands, tensors, 0);
    }
    float sum = edge;
#pragma unroll
    for (int k = 0; k < width; ++k) sum += sums[k];

    // The values of the warp's row are on their way while the sums are, where registers are left for them.
    constexpr bool early = vectors * width + width <= 84;
    float scale, shift;
    float operands[After::channel_operands > 0 ? After::channel_operands : 1];
    float weight = 1.0f, bias = 0.0f;
    const auto ask_row = [&](int row) {
      weight = Tail::weight(p, first_channel + row);
      bias = Tail::bias(p, first_channel + row);
      After::load_channel(p, n, first_channel + row, operands);
    };
    if (early && plain) ask_row(share.row);
    float mean, rstd;
    reduce(h, share, sum, edge, has_edge, range, block, round, mean, rstd);
    if (p.statistics != nullptr && block == 0 && thread == 0) {
      p.statistics[2 * slab] = mean;
      p.statistics[2 * slab + 1] = rstd;
    }

    const auto scale_row = [&] {
      scale = weight * rstd;
      shift = fmaf(-mean, scale, bias);
    };
    const auto load_row = [&](int row) {
      ask_row(row);
      scale_row();
    };
    if (plain) {
      if constexpr (!early) ask_row(share.row);
      scale_row();
      finish<true>(share, range, scale, shift, operands, load_row, h);
    } else {
      load_row(0);
      finish<false>(share, range, scale, shift, operands, load_row, h);
    }
    if (has_edge) {
      load_row(edge_position / spatial);
      typename After::template Tensors<1> tensors;
      tensors.load(p, range.begin + edge_position);
      store_one<typename Tail::Output>(p.output, range.begin + edge_position,
                                       After::value(fmaf(edge, scale, shift), operands, tensors, 0));
    }
    if constexpr (warps > 1 && blocks == 1) __syncthreads();  // all have read the sums of the warps
  }

  __device__ __forceinline__ void run() const {
    const int64 slabs = p.batch * groups;
    const int block = blockIdx.x % blocks;
    const int64 clusters = gridDim.x / blocks;
    int64 slab = blockIdx.x / blocks;
    Ring ring{slab};
#if __CUDA_ARCH__ >= 900
    if constexpr (Numbers::staged) {
      if (threadIdx.x % 32 == 0) {
        for (int slot = 0; slot < slots; ++slot) barrier::initialise(&shared.arrived[threadIdx.x / 32][slot]);
      }
      __syncwarp();
      for (int slot = 0; slot < slots; ++slot) ask(ring, slot, slabs, clusters, block);
    }
    if constexpr (blocks > 1) {
      if (threadIdx.x == 0) {
        barrier::initialise(&shared.received[0]);
        barrier::initialise(&shared.received[1]);
      }
      barrier::cluster_sync();  // no sums go to a block that has not started
    }
#endif
    int round = 0;
#pragma unroll 1
    for (; slab < slabs; slab += clusters, ++round) {
      run_slab(slab, slabs, clusters, block, round, ring);
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) barrier::cluster_sync();  // none leaves while others may write to it
#endif
  }
};

}  // namespace onepass
