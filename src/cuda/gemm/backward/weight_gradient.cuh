// The weights' gradient of a wide convolution, as parts of a sum over positions:
// G[u][v][t] = sum over p of U[u][p] V[v][p + shift(t)].
//
// A tile is 64 channels of u, `columns` of v and `warpgroup_taps` taps for each of three consumer warpgroups.
// One producer thread copies chunks of 128 positions into a ring buffer.
#pragma once

#include "gemm/backward/common.cuh"

namespace onepass {

template <class N>
struct GemmWeightGradient {
  using Parameters = GemmWeightGradientParameters;
  static constexpr int warpgroups = N::warpgroups;
  static constexpr int consumers = warpgroups * 128;
  static constexpr int chunk = N::chunk;  // positions
  static constexpr int u_octets = 8;      // of a tile
  static constexpr int v_octets = N::columns / 8;
  static constexpr int ring_positions = (N::stages + N::lag) * chunk;
  static constexpr int ring_pitch = ring_positions + 16;  // the first 16 are repeated at the end
  static constexpr int u_bytes = u_octets * chunk * 16;
  static constexpr int v_bytes = v_octets * chunk * 16;
  static constexpr int sums = N::columns / 2;
  static constexpr int taps = N::warpgroup_taps;
  static constexpr int block_taps = warpgroups * taps;
  static constexpr int tap_groups = (N::taps + block_taps - 1) / block_taps;
  static constexpr int u_tiles = (N::u_channels + 63) / 64;
  static constexpr int v_tiles = (N::v_channels + N::columns - 1) / N::columns;
  static constexpr int group_tiles = u_tiles * v_tiles * tap_groups;
  static constexpr int groups = N::conv_groups / N::merged_groups;
  static constexpr int tiles = groups * group_tiles;
  // Packed octets of a group of the convolution.
  static constexpr int group_u_octets = (N::u_channels + 15) / 16 * 2;
  static constexpr int group_v_octets = (N::v_channels + 15) / 16 * 2;
  static constexpr int tile_sums = consumers * taps * sums;

  struct Shared {
    alignas(128) unsigned char u[N::stages][u_bytes];
    alignas(128) unsigned char v[v_octets * ring_pitch * 16];
    uint64 full[N::stages];
    uint64 empty[N::stages];
  };
  static_assert(sizeof(Shared) == N::shared_bytes);

  const Parameters& p;
  Shared& s;

  struct Item {
    int group, u_tile, v_tile, tap_group;
    int64 begin, end;  // chunks
    int64 index;
    __device__ __forceinline__ Item(int64 i, const Parameters& p) : index(i) {
      const int64 split = i / tiles;
      int tile = static_cast<int>(i - split * tiles);
      group = groups == 1 ? 0 : tile / group_tiles;
      tile -= group * group_tiles;
      tap_group = tile % tap_groups;
      v_tile = tile / tap_groups % v_tiles;
      u_tile = tile / tap_groups / v_tiles;
      begin = split * p.chunks / p.splits;
      end = (split + 1) * p.chunks / p.splits;
    }
  };

  template <class Body>
  __device__ __forceinline__ void for_each_item(Body&& body) const {
    const int64 count = p.splits * tiles;
#pragma unroll 1
    for (int64 i = blockIdx.x; i < count; i += gridDim.x) body(Item(i, p));
  }

  // Taps that fill up the last group repeat the last tap.
  static __device__ __forceinline__ int shift(int tap) {
    return gradients::tap_shift<N>(tap < N::taps ? tap : N::taps - 1);
  }

  // The producer thread. The ring of v restarts with each item, once the item before is used up.
  __device__ __forceinline__ void send() const {
    Ring<N::stages> ring, before;
    bool first = true;
    for_each_item([&](const Item& item) {
      if (!first) barrier::wait(&s.empty[before.stage], before.round);
      const auto* u = static_cast<const uint4*>(p.u) +
                      (item.group * group_u_octets + item.u_tile * u_octets) * p.length + N::margin;
      const auto* v = static_cast<const uint4*>(p.v) +
                      (item.group * group_v_octets + item.v_tile * v_octets) * p.length + N::margin +
                      shift(item.tap_group * block_taps);
      // Octets that exist.
      const int u_left = (N::u_channels + 7) / 8 - item.u_tile * u_octets;
      const int v_left = (N::v_channels + 7) / 8 - item.v_tile * v_octets;
      const int u_count = u_left < u_octets ? u_left : u_octets;
      const int v_count = v_left < v_octets ? v_left : v_octets;
      int slot = 0;
#pragma unroll 1
      for (int64 i = item.begin; i < item.end; ++i) {
        barrier::wait(&s.empty[ring.stage], ring.round ^ 1u);
        int64 from = i == item.begin ? i : i + N::lag;
        uint32 bytes = static_cast<uint32>(u_count) * chunk * 16;
        for (int64 j = from; j <= i + N::lag; ++j)
          bytes += static_cast<uint32>(v_count) *
                   (chunk + ((j - item.begin) % (N::stages + N::lag) == 0 ? 16 : 0)) * 16;
        uint64* const full = &s.full[ring.stage];
        barrier::expect(full, bytes);
        for (int g = 0; g < u_count; ++g)
          barrier::copy(s.u[ring.stage] + g * chunk * 16, u + g * p.length + i * chunk, chunk * 16, full);
#pragma unroll 1
        for (; from <= i + N::lag; ++from) {
#pragma unroll 1
          for (int g = 0; g < v_count; ++g) {
            const auto* own = v + g * p.length + from * chunk;
            unsigned char* const row = s.v + g * ring_pitch * 16;
            barrier::copy(row + slot * chunk * 16, own, chunk * 16, full);
            if (slot == 0) barrier::copy(row + ring_positions * 16, own, 16 * 16, full);
          }
          if (++slot == N::stages + N::lag) slot = 0;
        }
        before = ring;
        ring.next();
      }
      first = false;
    });
  }

  __device__ __forceinline__ void multiply() const {
    Ring<N::stages> ring;
    const int thread = static_cast<int>(threadIdx.x);
    const int group = thread / 128;
    const int lane = thread % 32;
    const int warp = thread / 32 % 4;
    // ldmatrix: a warp's 16 rows by 16 positions are four matrices of 8 by 8.
    const uint32 own_u = barrier::shared_address(s.u[0]) +
                         ((2 * warp + (lane / 8 & 1)) * chunk + (lane / 16) * 8 + lane % 8) * 16;
    const uint32 v_begin = barrier::shared_address(s.v) >> 4;
    for_each_item([&](const Item& item) {
      float d[taps][sums];
      int at[taps];  // position of the ring
      const int first_tap = item.tap_group * block_taps;
#pragma unroll
      for (int t = 0; t < taps; ++t) at[t] = shift(first_tap + group * taps + t) - shift(first_tap);
      int scale = 0;
#pragma unroll 1
      for (int64 i = item.begin; i < item.end; ++i) {
        barrier::wait(&s.full[ring.stage], ring.round);
        const uint32 from_u = own_u + ring.stage * u_bytes;
#pragma unroll 1
        for (int half = 0; half < chunk; half += 64) {
          uint32 a[4][4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3])
                         : "r"(from_u + (half + k * 16) * 16)
                         : "memory");
          }
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int t = 0; t < taps; ++t) {
              const uint64 b = static_cast<uint64>(v_begin + at[t]) | static_cast<uint64>(128 >> 4) << 16 |
                               static_cast<uint64>(ring_pitch) << 32;
              N::Product::run(d[t], a[k], b, scale);
              at[t] += 16;
              at[t] = at[t] >= ring_positions ? at[t] - ring_positions : at[t];
            }
            scale = 1;
          }
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
          for (int t = 0; t < taps; ++t) {
#pragma unroll
            for (int j = 0; j < sums; ++j) asm volatile("" : "+f"(d[t][j])::"memory");
          }
        }
        // Copies may overwrite what was read of U.
        barrier::release_to_copies();
        __syncwarp();
        if (lane == 0) barrier::arrive(&s.empty[ring.stage]);
        ring.next();
      }
      float* const to = p.parts + item.index * tile_sums + group * (taps * sums * 128) + thread % 128;
#pragma unroll
      for (int t = 0; t < taps; ++t) {
#pragma unroll
        for (int j = 0; j < sums; ++j) to[(t * sums + j) * 128] = d[t][j];
      }
    });
  }

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) wgmma::initialise_ring<consumers>(s.full, s.empty);
    __syncthreads();
    wgmma::split_roles<consumers, 32, 160>([&] { send(); }, [&] { multiply(); });
  }
};

}  // namespace onepass
