// Adds the parts of dweight that gemm/backward/weight_gradient.cuh leaves, and the sums of dbias, in a fixed
// order.
#pragma once

#include "gemm/backward/weight_gradient.cuh"

namespace onepass {

// With eight parts or more, the eight warps of a block share the parts of 32 sums. With fewer, a block has
// eight channels of u of a tile and stores contiguous rows of the gradient. One more block for each channel
// of the bias.
template <class N>
struct GemmWeightSum {
  using Parameters = GemmWeightSumParameters;
  using Gradient = GemmWeightGradient<N>;
  static constexpr int threads = 256;
  static constexpr int ways = threads / 32;
  static constexpr int row_sums = N::columns * Gradient::block_taps;
  static constexpr int64 step = static_cast<int64>(Gradient::tiles) * Gradient::tile_sums;  // of a part

  const Parameters& p;

  __device__ __forceinline__ void run() const {
    __shared__ float scratch[8][row_sums + 1];
    static_assert(8 * (row_sums + 1) >= ways * 32);
    if (static_cast<int>(blockIdx.x) >= N::weight_blocks) {
      if (p.bias != nullptr) bias(static_cast<int>(blockIdx.x) - N::weight_blocks, scratch[0]);
      return;
    }
    float scale = 1.0f;
    float other_scale = 1.0f;
    if constexpr (N::scales) {
      scale = 1.0f / gradients::Scale(p.gradient_largest).value;
      other_scale = 1.0f / gradients::Scale(p.input_largest).value;
    }
    if (p.splits < ways) {
      for (int i = blockIdx.x; i < Gradient::tiles * 8; i += N::weight_blocks)
        sum_rows(i / 8, i % 8, scale, other_scale, scratch);
    } else {
      for (int64 i = blockIdx.x; i < step / 32; i += N::weight_blocks)
        sum_by_warps(i * 32, scale, other_scale, scratch[0]);
    }
  }

 private:
  struct Tile {
    int group, u, v, tap;  // the first of each
    explicit __device__ __forceinline__ Tile(int index)
        : group(Gradient::groups == 1 ? 0 : index / Gradient::group_tiles),
          u((index - group * Gradient::group_tiles) / Gradient::tap_groups / Gradient::v_tiles * 64),
          v(index / Gradient::tap_groups % Gradient::v_tiles * N::columns),
          tap(index % Gradient::tap_groups * Gradient::block_taps) {}
  };

  // Of groups merged into one product, only what a group has with its own v is stored.
  __device__ __forceinline__ void store(int group, int u, int v, int tap, float sum) const {
    if (tap >= N::taps || u >= N::u_channels || v >= N::v_channels) return;
    constexpr int own_u = N::u_channels / N::merged_groups;
    constexpr int own_v = N::v_channels / N::merged_groups;
    if (N::merged_groups > 1 && u / own_u != v / own_v) return;
    const int64 row = static_cast<int64>(group) * N::u_channels + u;
    const int column = N::merged_groups == 1 ? v : v % own_v;
    store_one<typename N::Weight>(p.weight, (row * own_v + column) * N::taps + tap, sum);
  }

  __device__ __forceinline__ void sum_by_warps(int64 first, float scale, float other_scale,
                                               float* scratch) const {
    const int lane = threadIdx.x % 32;
    const int way = threadIdx.x / 32;
    const int64 element = first + lane;
    float sum = 0.0f;
#pragma unroll 8
    for (int64 s = way; s < p.splits; s += ways) sum += __ldcg(p.parts + s * step + element);
    scratch[way * 32 + lane] = sum;
    __syncthreads();
    if (way == 0) {
#pragma unroll
      for (int i = 1; i < ways; ++i) sum += scratch[i * 32 + lane];
      const Tile tile(static_cast<int>(element / Gradient::tile_sums));
      const int rest = static_cast<int>(element % Gradient::tile_sums);
      const int thread = rest % 128;
      const int j = rest / 128 % Gradient::sums;
      store(tile.group, tile.u + thread / 32 * 16 + thread % 32 / 4 + j / 2 % 2 * 8,
            tile.v + j / 4 * 8 + thread % 4 * 2 + j % 2, tile.tap + rest / 128 / Gradient::sums,
            sum * scale * other_scale);
    }
    __syncthreads();
  }

  // Eight channels of u: half of a warp's sixteen rows.
  __device__ __forceinline__ void sum_rows(int tile_index, int octet, float scale, float other_scale,
                                           float (&scratch)[8][row_sums + 1]) const {
    const int lane = threadIdx.x % 32;
    const float* const from =
        p.parts + static_cast<int64>(tile_index) * Gradient::tile_sums + octet / 2 * 32 + lane;
    for (int i = threadIdx.x / 32; i < row_sums / 4; i += ways) {
      // A lane has two neighbouring channels of each octet of v; `e` is which of them.
      const int e = i % 2;
      const int o = i / 2 % (N::columns / 8);
      const int tap = i / 2 / (N::columns / 8);
      const float* const own = from + (tap * Gradient::sums + o * 4 + octet % 2 * 2 + e) * 128;
      float sum = 0.0f;
      for (int s = 0; s < p.splits; ++s) sum += __ldcg(own + s * step);
      scratch[lane / 4][(o * 8 + lane % 4 * 2 + e) * Gradient::block_taps + tap] = sum * scale * other_scale;
    }
    __syncthreads();
    const Tile tile(tile_index);
    for (int i = threadIdx.x; i < 8 * row_sums; i += threads) {
      const int row = i / row_sums;
      const int at = i - row * row_sums;
      store(tile.group, tile.u + octet * 8 + row, tile.v + at / Gradient::block_taps,
            tile.tap + at % Gradient::block_taps, scratch[row][at]);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void bias(int channel, float* scratch) const {
    float sum[1] = {};
    // The channel's place among the packed ones.
    constexpr int octets = (N::out_channels + 15) / 16 * 2;
    const int group = N::conv_groups == 1 ? 0 : channel / N::out_channels;
    const int packed = channel + group * (octets * 8 - N::out_channels);
    for (int64 i = threadIdx.x; i < p.sum_parts; i += threads) sum[0] += p.sums[packed * p.sum_parts + i];
    block_sum<threads>(sum, scratch);
    if (threadIdx.x == 0) store_one<typename N::Weight>(p.bias, channel, sum[0]);
  }
};

}  // namespace onepass
