// The input's gradient of a wide convolution: dx[c][p] = sum over o and t of W[c][o][t] DH[o][p +- shift(t)].
//
// A tile is 64 channels by 512 positions, 256 for each of two consumer warpgroups. One producer thread copies
// windows of dh, and weights unless they are resident, into a ring buffer. One consumer runs behind the
// other, so that one stores while the other multiplies.
#pragma once

#include "gemm/backward/common.cuh"

namespace onepass {

template <class N>
struct GemmInputGradient {
  using Parameters = GemmInputGradientParameters;
  static constexpr int columns = N::columns;  // positions of a warpgroup
  static constexpr int tile_positions = 2 * columns;
  static constexpr int consumers = 256;
  static constexpr int window_bytes = 2 * N::window * 16;
  static constexpr int weight_bytes = N::group_taps * 2 * 64 * 16;
  static constexpr int group_tiles = (N::channels + 63) / 64;  // of channels
  static constexpr int channel_tiles = N::conv_groups * group_tiles;
  static constexpr int steps = N::tap_groups * N::chunks;  // of a tile
  static constexpr int weight_slots = N::weights_resident ? steps : N::stages;
  static constexpr int sums = columns / 2;

  struct Shared {
    alignas(128) unsigned char x[N::stages][window_bytes];
    alignas(128) unsigned char weights[weight_slots][weight_bytes];
    uint64 full[N::stages];
    uint64 empty[N::stages];
    uint64 weights_full;
    uint64 ahead;
  };
  static_assert(sizeof(Shared) == N::shared_bytes);

  const Parameters& p;
  Shared& s;

  // The least shift of a group of taps.
  static __device__ __forceinline__ int first_shift(int group) {
    return gradients::tap_shift<N, N::sign>(N::sign > 0 ? group * N::group_taps
                                                        : (group + 1) * N::group_taps - 1);
  }

  template <class Body>
  __device__ __forceinline__ void for_each_tile(Body&& body) const {
    const int64 count = p.tiles * channel_tiles;
#pragma unroll 1
    for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
      const int64 tile = i / channel_tiles;
      body(tile * tile_positions, static_cast<int>(i - tile * channel_tiles));
    }
  }

  __device__ __forceinline__ void send() const {
    Ring<N::stages> ring;
    if constexpr (N::weights_resident) {
      barrier::expect(&s.weights_full, steps * weight_bytes);
      for (int i = 0; i < steps; ++i)
        barrier::copy(s.weights[i], static_cast<const unsigned char*>(p.weights) + i * weight_bytes,
                      weight_bytes, &s.weights_full);
    }
    for_each_tile([&](int64 position, int channel_tile) {
      int step = 0;
      const int64 first = channel_tile / group_tiles * (2 * N::chunks) * p.length;
#pragma unroll 1
      for (int group = 0; group < N::tap_groups; ++group) {
        const auto* from =
            static_cast<const uint4*>(p.packed) + first + N::margin + position + first_shift(group);
#pragma unroll 1
        for (int chunk = 0; chunk < N::chunks; ++chunk, ++step) {
          barrier::wait(&s.empty[ring.stage], ring.round ^ 1u);
          barrier::expect(&s.full[ring.stage], window_bytes + (N::weights_resident ? 0 : weight_bytes));
          for (int g = 0; g < 2; ++g) {
            barrier::copy(s.x[ring.stage] + g * N::window * 16, from + (chunk * 2 + g) * p.length,
                          N::window * 16, &s.full[ring.stage]);
          }
          if constexpr (!N::weights_resident) {
            barrier::copy(s.weights[ring.stage],
                          static_cast<const unsigned char*>(p.weights) +
                              (static_cast<int64>(channel_tile) * steps + step) * weight_bytes,
                          weight_bytes, &s.full[ring.stage]);
          }
          ring.next();
        }
      }
    });
  }

  static __device__ __forceinline__ uint64 descriptor(uint32 address, uint32 leading) {
    return static_cast<uint64>(address >> 4) | static_cast<uint64>(leading >> 4) << 16 |
           static_cast<uint64>(128 >> 4) << 32;
  }

  __device__ __forceinline__ void multiply() const {
    Ring<N::stages> ring;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int warpgroup = thread / 128;
    const uint32 x_begin = barrier::shared_address(s.x[0]) + warpgroup * columns * 16;
    const uint32 w_begin = barrier::shared_address(s.weights[0]);
    float unscale = 1.0f;
    if constexpr (N::scales) unscale = 1.0f / gradients::Scale(p.largest).value;
    if constexpr (N::weights_resident) barrier::wait(&s.weights_full, 0);
    // The second warpgroup begins `lag` steps after the first: while one stores, the other has the tensor
    // cores to itself.
    if (N::lag > 0 && warpgroup == 1) barrier::wait(&s.ahead, 0);
    int left = N::lag;
    for_each_tile([&](int64 position, int channel_tile) {
      float d[sums];
      int scale = 0, before = -1, step = 0;
#pragma unroll 1
      for (int group = 0; group < N::tap_groups; ++group) {
        const int low = first_shift(group);
#pragma unroll 1
        for (int chunk = 0; chunk < N::chunks; ++chunk, ++step) {
          barrier::wait(&s.full[ring.stage], ring.round);
          const uint32 x = x_begin + ring.stage * window_bytes;
          const uint32 w = w_begin + (N::weights_resident ? step : ring.stage) * weight_bytes;
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int t = 0; t < N::group_taps; ++t) {
            const uint32 own = N::tap_groups == 1
                                   ? gradients::tap_shift<N, N::sign>(t) - first_shift(0)
                                   : gradients::tap_shift<N, N::sign>(group * N::group_taps + t) - low;
            N::Product::run(d, descriptor(w + t * 2 * 64 * 16, 64 * 16),
                            descriptor(x + own * 16, N::window * 16), scale);
            scale = 1;
          }
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (lane == 0 && before >= 0) barrier::arrive(&s.empty[before]);
          if (N::lag > 0 && warpgroup == 0 && --left == 0 && lane == 0) barrier::arrive(&s.ahead);
          before = ring.stage;
          ring.next();
        }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(d[i])::"memory");
      if (lane == 0) barrier::arrive(&s.empty[before]);
      store(position + warpgroup * columns, channel_tile / group_tiles,
            channel_tile % group_tiles * 64 + thread / 32 % 4 * 16 + lane / 4, unscale, d);
    });
  }

  // A column of the products that steps through the flat index.
  struct Cursor {
    FlatPosition<N> at;
    int x;
    int64 row;    // offset of its row in the first channel
    bool inside;  // the row exists

    __device__ __forceinline__ Cursor(uint32 position, int64 batch)
        : at(position), x(static_cast<int>(at.x)) {
      find_row(batch);
    }
    __device__ __forceinline__ void find_row(int64 batch) {
      inside = at.n < static_cast<uint32>(batch) && at.z < static_cast<uint32>(N::size0) &&
               at.y < static_cast<uint32>(N::size1);
      row = static_cast<int64>(at.n) * N::stride_n + at.z * N::stride0 + at.y * N::stride1;
    }
    __device__ __forceinline__ void move(int columns, int64 batch) {
      x += columns;
      if (x < N::pitch) return;
      do {
        x -= N::pitch;
        if (++at.y == N::plane / N::pitch) {
          at.y = 0;
          if (++at.z == N::sample / N::plane) {
            at.z = 0;
            ++at.n;
          }
        }
      } while (x >= N::pitch);
      find_row(batch);
    }
    __device__ __forceinline__ bool exists() const { return inside && x < N::size2; }
  };

  // A thread has every fourth pair of columns. Pitches of rows are even: a pair lies in one row. `channel` is
  // counted within the convolution's group.
  __device__ __forceinline__ void store(int64 position, int group, int channel, float unscale,
                                        float (&d)[sums]) const {
    using Output = typename N::Output;
    float scale[2];
    bool has[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      has[h] = N::channels % 64 == 0 || channel + 8 * h < N::channels;
      scale[h] = has[h] ? p.scales[group * (group_tiles * 64) + channel + 8 * h] * unscale : 0.0f;
    }
    const int64 begin = (group * N::channels + channel) * static_cast<int64>(N::stride_c);
    if constexpr (N::quads_fit) {
      if (reinterpret_cast<uint64>(p.output) % 8 == 0) {
        store_quads(position, begin, scale, has, d);
        return;
      }
    }
    const bool paired = N::pairs_fit && reinterpret_cast<uint64>(p.output) % 8 == 0;
    Cursor cursor(static_cast<uint32>(position) + threadIdx.x % 4 * 2, p.batch);
#pragma unroll
    for (int j = 0; j < sums / 4; ++j) {
      if (cursor.exists()) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (!has[h]) continue;
          const float value[2] = {d[4 * j + 2 * h] * scale[h], d[4 * j + 2 * h + 1] * scale[h]};
          const int64 at = begin + cursor.row + h * 8 * N::stride_c + cursor.x * N::stride2;
          if (paired) {
            Packed<Output, 2> packed;
            packed.pack(value);
            packed.store(p.output, at, true);
          } else {
            store_one<Output>(p.output, at, value[0]);
            if (cursor.x + 1 < N::size2) store_one<Output>(p.output, at + N::stride2, value[1]);
          }
        }
      }
      cursor.move(8, p.batch);
    }
  }

  // 16-bit elements: lanes of a quad exchange pairs until each has four neighbours. Together they store a
  // whole sector.
  __device__ __forceinline__ void store_quads(int64 position, int64 begin, const float (&scale)[2],
                                              const bool (&has)[2], float (&d)[sums]) const {
    using Output = typename N::Output;
    const int lane = threadIdx.x % 4;
    const bool upper = lane >= 2;
    const bool odd = lane % 2 != 0;
    Cursor cursor(static_cast<uint32>(position) + lane * 4, p.batch);
#pragma unroll
    for (int i = 0; i < sums / 8; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = 8 * i + 2 * h;
        const uint32 a = Output::pack(d[at] * scale[h], d[at + 1] * scale[h]);
        const uint32 b = Output::pack(d[at + 4] * scale[h], d[at + 5] * scale[h]);
        // The lower two lanes take the first eight columns, the upper two the others. Then each takes four.
        const uint32 other = __shfl_xor_sync(0xffffffffu, upper ? a : b, 2);
        const uint32 low = upper ? other : a;
        const uint32 high = upper ? b : other;
        const uint32 neighbour = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
        if (cursor.exists() && has[h]) {
          Packed<Output, 4> packed;
          packed.word[0] = odd ? neighbour : low;
          packed.word[1] = odd ? high : neighbour;
          packed.store(p.output, begin + cursor.row + h * 8 * N::stride_c + cursor.x, true);
        }
      }
      cursor.move(16, p.batch);
    }
  }

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      wgmma::initialise_ring<consumers>(s.full, s.empty);
      barrier::initialise(&s.weights_full, 1);
      barrier::initialise(&s.ahead, 4);
    }
    __syncthreads();
    wgmma::split_roles<consumers, 40, 232>([&] { send(); }, [&] { multiply(); });
  }
};

}  // namespace onepass
