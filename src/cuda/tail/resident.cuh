// A tail whose slab stays on the chip between its statistics and its output: x is read once, y written once.
//
// A slab of a planar tensor is a contiguous range. A cluster of `blocks` blocks holds it in registers, after
// the before-chain, each warp 32 * vectors neighbouring vectors. Blocks exchange mean and M2 through
// distributed shared memory. Elements before the first vector and after the last one are kept by the first
// block, one a thread.
#pragma once

#include "device/barrier.cuh"
#include "tail/slab.cuh"

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
  static constexpr int spatial = static_cast<int>(Tail::spatial);
  static constexpr int slab_elements = static_cast<int>(Tail::group_channels) * spatial;
  static constexpr int groups = Tail::channels / Tail::group_channels;

  struct Shared {
    uint64 received;            // what the cluster's blocks sent
    float warp[2][warps];       // mean and M2 of the warps
    float exchange[blocks][2];  // mean and M2 of the cluster's blocks
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

  // The thread's vectors through f, with the bounds that the share needs.
  template <bool plain, class F>
  static __device__ __forceinline__ void for_each_vector(const Share& share, F&& f) {
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      if (plain || i < share.mine) f(i);
    }
  }

  // Sums of a thread: distances from the mean of its first vector, which then stand for its values.
  using Sums = PivotSums<4>;

  // The norm from each thread's sums: within the warp, the block, the cluster. Each level is two sums: the
  // mean's distance from one of the parts', then M2 moved to it.
  __device__ __forceinline__ SlabNorm reduce(const Sums& sums, float count, const Range& range,
                                             int block) const {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    Moments own{count, 0.0f, 0.0f};
    float moved, m2;
    sums.finish(count, moved, own.m2);
    own.mean = sums.pivot + moved;
    float elements = range.elements(block * block_vectors + warp * warp_vectors, warp_vectors);
    float from;
    lanes_moments<32>(own, elements > 0.0f ? pointwise::reciprocal_fast(elements) : 0.0f, from, moved, m2);
    if constexpr (warps > 1) {
      if (lane == 0) {
        shared.warp[0][warp] = from + moved;
        shared.warp[1][warp] = m2;
      }
      __syncthreads();
      if (blocks == 1 || warp == 0) {
        elements = range.elements(block * block_vectors, block_vectors);
        Moments part;
        if (lane < warps) {
          part = {range.elements(block * block_vectors + lane * warp_vectors, warp_vectors),
                  shared.warp[0][lane], shared.warp[1][lane]};
        }
        lanes_moments<32>(part, elements > 0.0f ? 1.0f / elements : 0.0f, from, moved, m2);
      }
    }
    constexpr float per_element = 1.0f / static_cast<float>(slab_elements);
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      // Sent with a count of its bytes: a barrier of the cluster would first wait for all that was stored.
      if (threadIdx.x == 0) barrier::expect(&shared.received, blocks * 8);
      if (threadIdx.x < blocks) {
        barrier::send(shared.exchange[block], from + moved, m2, &shared.received, lane);
      }
      barrier::wait(&shared.received, 0);
      Moments part;
      if (lane < blocks) {
        part = {range.elements(lane * block_vectors, block_vectors), shared.exchange[lane][0],
                shared.exchange[lane][1]};
      }
      lanes_moments<32>(part, per_element, from, moved, m2);
    }
#endif
    return SlabNorm::of<Tail>(from, moved, m2, sums.pivot);
  }

  // The before-chain of the thread's vectors and their sums. What stays are distances from the pivot.
  template <bool plain>
  __device__ __forceinline__ void activate(const Share& share, const Range& range, int64 n, int first_channel,
                                           float (&h)[vectors][width], Sums& sums) const {
    float operands[Before::channel_operands > 0 ? Before::channel_operands : 1];
    const auto load_row = [&](int row) { Before::load_channel(p, n, first_channel + row, operands); };
    auto rows = row_cursor<spatial>(load_row);
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
      if (i == 0) sums.pivot = Sums::mean_of(h[0]);
#pragma unroll
      for (int k = 0; k < width; ++k) h[i][k] = sums.add(h[i][k], k);
    };
    Packed<Input, width> packed[vectors];
    for_each_vector<plain>(share,
                           [&](int i) { packed[i].load(p.input, range.begin + share.position_of(i), true); });
    for_each_vector<plain>(share, [&](int i) {
      packed[i].unpack(h[i]);
      one(i);
    });
  }

  // The norm and the after-chain of the thread's vectors, to the output. `load_row(row)` sets scale, shift,
  // operands.
  template <bool plain, class LoadRow>
  __device__ __forceinline__ void finish(const Share& share, const Range& range, const float& scale,
                                         const float& shift, const float* operands, const LoadRow& load_row,
                                         float (&h)[vectors][width]) const {
    constexpr bool by_row = Tail::has_affine || After::channel_operands > 0;
    auto rows = row_cursor<spatial>(load_row);
    for_each_vector<plain>(share, [&](int i) {
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
      y.store(p.output, range.begin + share.position_of(i), plain || is_aligned(p, aligned_output));
    });
  }

  __device__ __forceinline__ void run_slab(int64 slab, int block) const {
    const Range range = range_of(slab);
    const Share share(range, block);
    const int64 n = slab / groups;
    const int first_channel = static_cast<int>(slab % groups) * static_cast<int>(Tail::group_channels);
    const int thread = threadIdx.x;
    const bool plain = share.plain && is_aligned(p, aligned_output);

    float h[vectors][width];
    Sums sums;
    if (plain) {
      activate<true>(share, range, n, first_channel, h, sums);
    } else {
      activate<false>(share, range, n, first_channel, h, sums);
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
      if (share.mine == 0) sums.pivot = edge;
      edge = sums.add(edge, 0);
    }

    // The values of the warp's row are on their way while the sums are.
    float scale, shift;
    float operands[After::channel_operands > 0 ? After::channel_operands : 1];
    float weight = 1.0f, bias = 0.0f;
    const auto fetch_row = [&](int row) {
      weight = Tail::weight(p, first_channel + row);
      bias = Tail::bias(p, first_channel + row);
      After::load_channel(p, n, first_channel + row, operands);
    };
    if (plain) fetch_row(share.row);
    const SlabNorm norm =
        reduce(sums, static_cast<float>(share.mine * width + (has_edge ? 1 : 0)), range, block);
    if (p.statistics != nullptr && block == 0 && thread == 0) {
      p.statistics[2 * slab] = norm.mean;
      p.statistics[2 * slab + 1] = norm.rstd;
    }

    const auto scale_row = [&] {
      scale = weight * norm.factor;
      shift = fmaf(-norm.moved, scale, bias);
    };
    const auto load_row = [&](int row) {
      fetch_row(row);
      scale_row();
    };
    if (plain) {
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
  }

  __device__ __forceinline__ void run() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      if (threadIdx.x == 0) barrier::initialise(&shared.received);
      barrier::cluster_sync();  // no sums go to a block that has not started
    }
#endif
    run_slab(blockIdx.x / blocks, blockIdx.x % blocks);
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) barrier::cluster_sync();  // none leaves while others may write to it
#endif
  }
};

}  // namespace onepass
