// The gradients of a wide convolution of stride 1, as matrix products on Hopper's tensor cores.
//
// Both are sums over a convolution "v -> u" of stride 1 (the forward one, or, where that is transposed, its
// adjoint): tap t of u's position p lies at v's position p + shift(t) in one flat index of positions, in
// which rows, planes and samples have pitches that leave zeros between them wherever a tap can reach beyond
// (as gemm.cuh has it for a sample).
//
// First both tensors are packed: 16-bit elements, [eight channels][position][8], zeros where nothing is. f32
// elements are multiplied by a power of two, so that f16, which has tf32's ten bits, has room for them: one
// that fits what a part of the elements showed, and where that turns out not to fit the rest, another one by
// a second launch. A position is 16 bytes: it can be the start of an operand of either order.
//
//   GemmWeightGradient   G[u][v][t] = sum over p of U[u][p] V[v][p + shift(t)]: both operands have their
//                        channels contiguous and positions as terms. A block has 64 channels of u, some of v
//                        and some taps, for a part of all positions; V passes through a ring, so that a
//                        position is loaded once for all taps. Parts are added in a fixed order by
//                        GemmWeightSum.
//   GemmInputGradient    dx[c][p] = sum over o and t of W[c][o][t] DH[o][p +- shift(t)]: weights are the left
//                        operand, positions the columns; what gemm.cuh does, of packed positions.
#pragma once

#include "barrier.cuh"
#include "reduce.cuh"
#include "types.cuh"

namespace onepass {

namespace gradients {

// A place in a ring and how often it came round.
template <int Stages>
struct Ring {
  int stage = 0;
  uint32 round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      round ^= 1u;
    }
  }
};

// The power of two that takes `largest` (its bits) to [2^to, 2^(to + 1)).
__device__ __forceinline__ float scale_to(uint32 largest, int to) {
  if (largest == 0) return 1.0f;
  int exponent = to - (static_cast<int>(largest >> 23) - 127);
  exponent = exponent > 126 ? 126 : exponent < -126 ? -126 : exponent;
  return __uint_as_float(static_cast<uint32>(127 + exponent) << 23);
}

// What a packed tensor was multiplied by. `words`: the bits of the largest finite magnitude of a part of the
// elements, then of all of them.
struct Scale {
  float value;
  bool is_second;

  explicit __device__ __forceinline__ Scale(const uint32* words) {
    // Room for larger ones than were seen, and 22 bits below the largest before f16 drops some.
    value = scale_to(__ldcg(words), 8);
    const uint32 largest = __ldcg(words + 1);
    const float scaled = __uint_as_float(largest) * value;
    is_second = largest != 0 && !(scaled < 65504.0f && scaled >= 0x1p-2f);
    if (is_second) value = scale_to(largest, 14);
  }
};

// The largest finite magnitude, as bits.
__device__ __forceinline__ void keep_largest(uint32& largest, float x) {
  const uint32 bits = __float_as_uint(x) & 0x7fffffffu;
  largest = bits < 0x7f800000u && bits > largest ? bits : largest;
}

}  // namespace gradients

struct GemmPackedParameters {
  const void* tensor;
  void* packed;
  uint32* largest;  // two words, zero before the first launch
  float* sums;      // of each channel, for each part of the positions: where they are wanted
  int64 batch;
  int64 length;  // positions of eight channels
  int64 parts;   // of the positions
  int64 pass;    // 0: a look at a part of the elements; 1: packs them; 2: again, where they did not fit
};

// Packs a tensor. A piece of work is a part of the positions of `lanes` groups of eight channels: one, or,
// where channels lie side by side, some, so that a warp reads whole lines.
template <class T>
struct GemmPackTensor {
  static constexpr int threads = 256;
  static constexpr int lanes = T::lanes;
  static constexpr int at_once = threads / lanes;  // positions
  static constexpr bool scales = T::Type::bytes == 4;
  // Whether eight channels may be vectors.
  static constexpr bool vectors_fit = T::stride_c == 1 && T::channels % 8 == 0;
  using Operand = typename T::Operand;

  const GemmPackedParameters& p;

  __device__ __forceinline__ void run() const {
    if (scales && p.pass == 0) {
      glance();
    } else if (vectors_fit && reinterpret_cast<uint64>(p.tensor) % 16 == 0) {
      pack<vectors_fit>(p.pass == 2);
    } else {
      pack<false>(p.pass == 2);
    }
  }

 private:
  // Runs of 32 elements, evenly apart.
  __device__ __forceinline__ void glance() const {
    uint32 largest = 0;
    const int64 count = T::elements * p.batch;
    const int64 runs = (count + 31) / 32;
    const int64 looked = runs < T::glances ? runs : T::glances;
    const int64 apart = runs / looked;
    const int lane = threadIdx.x % 32;
    const int warps = static_cast<int>(gridDim.x) * (threads / 32);
#pragma unroll 4
    for (int i = blockIdx.x * (threads / 32) + threadIdx.x / 32; i < looked; i += warps) {
      const int64 at = i * apart * 32 + lane;
      if (at < count) gradients::keep_largest(largest, load_one<typename T::Type>(p.tensor, at));
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0 && largest != 0) atomicMax(p.largest, largest);
  }

  template <bool in_vectors>
  __device__ __forceinline__ void pack(bool is_second) const {
    float scale = 1.0f;
    if constexpr (scales) {
      if (is_second) {
        const gradients::Scale own(p.largest);
        if (!own.is_second) return;
        scale = own.value;
      } else {
        scale = gradients::scale_to(__ldcg(p.largest), 8);
      }
    }
    constexpr int pieces = T::groups / lanes;
    for (int64 i = blockIdx.x; i < p.parts * pieces; i += gridDim.x) {
      const int64 part = i / pieces;
      pack_part<in_vectors>(part, static_cast<int>(i - part * pieces) * lanes, scale, is_second);
    }
  }

  template <bool in_vectors>
  __device__ __forceinline__ void pack_part(int64 part, int first_group, float scale, bool is_second) const {
    const int group = first_group + static_cast<int>(threadIdx.x) % lanes;
    const int64 begin = part * T::part_positions + threadIdx.x / lanes;
    auto* const to = static_cast<uint4*>(p.packed) + group * p.length;
    float sum[8] = {};
    uint32 largest = 0;
#pragma unroll 2
    for (int r = 0; r < T::part_positions; r += at_once) {
      const int64 place = begin + r;
      if (place >= p.length) break;
      float x[8];
      load<in_vectors>(place - T::margin, group, x);
      if (scales && !is_second) {
#pragma unroll
        for (int k = 0; k < 8; ++k) gradients::keep_largest(largest, x[k]);
      }
      if constexpr (T::has_sums) {
#pragma unroll
        for (int k = 0; k < 8; ++k) sum[k] += x[k];
      }
      uint32 word[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) word[k] = Operand::pack(x[2 * k] * scale, x[2 * k + 1] * scale);
      to[place] = uint4{word[0], word[1], word[2], word[3]};
    }
    if (is_second) return;
    if constexpr (scales) {
      largest = __reduce_max_sync(0xffffffffu, largest);
      if (threadIdx.x % 32 == 0 && largest > __ldcg(p.largest + 1)) atomicMax(p.largest + 1, largest);
    }
    if constexpr (T::has_sums) leave_sums(part, first_group, sum);
  }

  // Over the threads of each group of channels, in order.
  __device__ __forceinline__ void leave_sums(int64 part, int first_group, float (&sum)[8]) const {
    constexpr int warps = threads / 32;
    __shared__ float scratch[8][lanes][warps];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
#pragma unroll
      for (int offset = 16; offset >= lanes; offset /= 2)
        sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], offset);
      if (lane < lanes) scratch[k][lane][threadIdx.x / 32] = sum[k];
    }
    __syncthreads();
    if (threadIdx.x < 8 * lanes) {
      const int k = static_cast<int>(threadIdx.x) % 8;
      const int own = static_cast<int>(threadIdx.x) / 8;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < warps; ++w) total += scratch[k][own][w];
      p.sums[((first_group + own) * 8 + k) * p.parts + part] = total;
    }
    __syncthreads();
  }

  // Eight channels of a flat position; zeros where nothing is.
  template <bool in_vectors>
  __device__ __forceinline__ void load(int64 flat, int group, float (&x)[8]) const {
    const auto whole = static_cast<uint32>(flat);
    const uint32 n = whole / static_cast<uint32>(T::sample);
    const uint32 in_sample = whole - n * static_cast<uint32>(T::sample);
    const uint32 z = in_sample / static_cast<uint32>(T::plane);
    const uint32 in_plane = in_sample - z * static_cast<uint32>(T::plane);
    const uint32 y = in_plane / static_cast<uint32>(T::pitch);
    const uint32 column = in_plane - y * static_cast<uint32>(T::pitch);
    const bool inside = flat >= 0 && n < static_cast<uint32>(p.batch) && z < static_cast<uint32>(T::size0) &&
                        y < static_cast<uint32>(T::size1) && column < static_cast<uint32>(T::size2);
    const int64 at = static_cast<int64>(n) * T::stride_n + group * 8 * T::stride_c + z * T::stride0 +
                     y * T::stride1 + column * T::stride2;
    if constexpr (in_vectors) {
      if (inside && group * 8 < T::channels) {
        Packed<typename T::Type, 8> vector;
        vector.load(p.tensor, at, true);
        vector.unpack(x);
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] = 0.0f;
      }
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const bool exists = inside && (T::channels == T::groups * 8 || group * 8 + k < T::channels);
        x[k] = exists ? load_one<typename T::Type>(p.tensor, at + k * T::stride_c) : 0.0f;
      }
    }
  }
};

// --- dweight ---

struct GemmWeightParameters {
  const void* u;  // packed
  const void* v;
  float* parts;
  int64 length;  // positions of eight channels
  int64 chunks;  // of positions
  int64 splits;
};

// N: what a problem's numbers are.
template <class N>
struct GemmWeightGradient {
  static constexpr int warpgroups = N::warpgroups;
  static constexpr int consumers = warpgroups * 128;
  static constexpr int chunk = N::chunk;  // positions
  static constexpr int u_groups = 8;
  static constexpr int v_groups = N::columns / 8;
  static constexpr int ring_positions = (N::stages + N::lag) * chunk;
  static constexpr int ring_pitch = ring_positions + 16;  // the first ones again at the end
  static constexpr int u_bytes = u_groups * chunk * 16;
  static constexpr int v_bytes = v_groups * chunk * 16;
  static constexpr int sums = N::columns / 2;
  static constexpr int taps = N::taps_each;
  static constexpr int block_taps = warpgroups * taps;
  static constexpr int tap_groups = (N::taps + block_taps - 1) / block_taps;
  static constexpr int u_tiles = (N::u_channels + 63) / 64;
  static constexpr int v_tiles = (N::v_channels + N::columns - 1) / N::columns;
  static constexpr int tiles = u_tiles * v_tiles * tap_groups;
  static constexpr int tile_sums = consumers * taps * sums;

  struct Shared {
    alignas(128) unsigned char u[N::stages][u_bytes];
    alignas(128) unsigned char v[v_groups * ring_pitch * 16];
    uint64 full[N::stages];
    uint64 empty[N::stages];
  };
  static_assert(sizeof(Shared) <= N::shared_bytes);

  const GemmWeightParameters& p;
  Shared& s;

  struct Item {
    int u_tile, v_tile, tap_group;
    int64 begin, end;  // chunks
    int64 index;
    __device__ __forceinline__ Item(int64 i, const GemmWeightParameters& p) : index(i) {
      const int64 split = i / tiles;
      const int tile = static_cast<int>(i - split * tiles);
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

  // Where a tap lies from the position.
  static __device__ __forceinline__ int shift(int tap) {
    const int t = tap < N::taps ? tap : N::taps - 1;
    const int m2 = t % N::kernel2;
    const int m1 = t / N::kernel2 % N::kernel1;
    const int m0 = t / (N::kernel2 * N::kernel1);
    return (m0 * N::dilation0 - N::padding0) * N::plane + (m1 * N::dilation1 - N::padding1) * N::pitch +
           m2 * N::dilation2 - N::padding2;
  }

  // One thread. The ring of v begins anew with each item, when all of the one before is used.
  __device__ __forceinline__ void send() const {
    gradients::Ring<N::stages> ring, before;
    bool first = true;
    for_each_item([&](const Item& item) {
      if (!first) barrier::wait(&s.empty[before.stage], before.round);
      const auto* u = static_cast<const uint4*>(p.u) + item.u_tile * u_groups * p.length + N::margin;
      const auto* v = static_cast<const uint4*>(p.v) + item.v_tile * v_groups * p.length + N::margin +
                      shift(item.tap_group * block_taps);
      // Groups of channels that there are.
      const int u_left = (N::u_channels + 7) / 8 - item.u_tile * u_groups;
      const int v_left = (N::v_channels + 7) / 8 - item.v_tile * v_groups;
      const int u_count = u_left < u_groups ? u_left : u_groups;
      const int v_count = v_left < v_groups ? v_left : v_groups;
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
    gradients::Ring<N::stages> ring;
    const int thread = static_cast<int>(threadIdx.x);
    const int group = thread / 128;
    const int lane = thread % 32;
    const int warp = thread / 32 % 4;
    // Of a warp's 16 rows by 16 positions: four matrices of eight rows and positions.
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
        // What was read of U may be overwritten by copies.
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
    if (threadIdx.x == 0) {
      for (int i = 0; i < N::stages; ++i) {
        barrier::initialise(&s.full[i], 1);
        barrier::initialise(&s.empty[i], consumers / 32);
      }
    }
    __syncthreads();
    if (threadIdx.x >= consumers) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
      if (threadIdx.x == consumers) send();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
      multiply();
    }
  }
};

struct GemmWeightSumParameters {
  const float* parts;
  const float* sums;  // of channels, as GemmPackTensor leaves them; null where there are none
  const uint32* gradient_largest;
  const uint32* input_largest;
  void* weight;
  void* bias;
  int64 splits;
  int64 sum_parts;  // of positions, of which sums were left
};

// Adds up the parts. Many of them: eight warps take turns for 32 sums each. Few: a block has eight channels
// of u in a tile, and stores rows of the gradient as they lie. Then a block for each channel of the bias.
template <class N>
struct GemmWeightSum {
  using Gradient = GemmWeightGradient<N>;
  static constexpr int threads = 256;
  static constexpr int ways = threads / 32;
  static constexpr int row_sums = N::columns * Gradient::block_taps;
  static constexpr int64 step = static_cast<int64>(Gradient::tiles) * Gradient::tile_sums;  // of a part

  const GemmWeightSumParameters& p;

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
        rows(i / 8, i % 8, scale, other_scale, scratch);
    } else {
      for (int64 i = blockIdx.x; i < step / 32; i += N::weight_blocks)
        in_turns(i * 32, scale, other_scale, scratch[0]);
    }
  }

 private:
  struct Tile {
    int u, v, tap;  // the first of each
    explicit __device__ __forceinline__ Tile(int tile)
        : u(tile / Gradient::tap_groups / Gradient::v_tiles * 64),
          v(tile / Gradient::tap_groups % Gradient::v_tiles * N::columns),
          tap(tile % Gradient::tap_groups * Gradient::block_taps) {}
  };

  __device__ __forceinline__ void store(int u, int v, int tap, float sum) const {
    if (tap >= N::taps || u >= N::u_channels || v >= N::v_channels) return;
    store_one<typename N::Weight>(p.weight, (static_cast<int64>(u) * N::v_channels + v) * N::taps + tap, sum);
  }

  __device__ __forceinline__ void in_turns(int64 first, float scale, float other_scale,
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
      store(tile.u + thread / 32 * 16 + thread % 32 / 4 + j / 2 % 2 * 8,
            tile.v + j / 4 * 8 + thread % 4 * 2 + j % 2, tile.tap + rest / 128 / Gradient::sums,
            sum * scale * other_scale);
    }
    __syncthreads();
  }

  // Channels of u that lie together: eight rows of a warp's sixteen.
  __device__ __forceinline__ void rows(int tile_index, int eight, float scale, float other_scale,
                                       float (&scratch)[8][row_sums + 1]) const {
    const int lane = threadIdx.x % 32;
    const float* const from =
        p.parts + static_cast<int64>(tile_index) * Gradient::tile_sums + eight / 2 * 32 + lane;
    for (int i = threadIdx.x / 32; i < row_sums / 4; i += ways) {
      // Of a tap and eight channels of v, every second of a lane's two.
      const int e = i % 2;
      const int o = i / 2 % (N::columns / 8);
      const int tap = i / 2 / (N::columns / 8);
      const float* const own = from + (tap * Gradient::sums + o * 4 + eight % 2 * 2 + e) * 128;
      float sum = 0.0f;
      for (int s = 0; s < p.splits; ++s) sum += __ldcg(own + s * step);
      scratch[lane / 4][(o * 8 + lane % 4 * 2 + e) * Gradient::block_taps + tap] = sum * scale * other_scale;
    }
    __syncthreads();
    const Tile tile(tile_index);
    for (int i = threadIdx.x; i < 8 * row_sums; i += threads) {
      const int row = i / row_sums;
      const int at = i - row * row_sums;
      store(tile.u + eight * 8 + row, tile.v + at / Gradient::block_taps,
            tile.tap + at % Gradient::block_taps, scratch[row][at]);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void bias(int channel, float* scratch) const {
    float sum[1] = {};
    for (int64 i = threadIdx.x; i < p.sum_parts; i += threads) sum[0] += p.sums[channel * p.sum_parts + i];
    block_sum<threads>(sum, scratch);
    if (threadIdx.x == 0) store_one<typename N::Weight>(p.bias, channel, sum[0]);
  }
};

// --- dx ---

struct GemmInputParameters {
  const void* packed;   // dh
  const void* weights;  // as GemmPackAdjoint leaves them
  const float* scales;  // what a channel's sums are multiplied by
  const uint32* largest;
  void* output;
  int64 batch;
  int64 length;
  int64 tiles;  // of positions
};

struct GemmAdjointParameters {
  const void* weights;
  void* packed;
  float* scales;
};

// The weights as the left operand: [tile of 64 channels][tap group][16 channels of dh][tap][8 of them]
// [channel][8]. A block for each channel of dx, those that only fill a tile too.
template <class N>
struct GemmPackAdjoint {
  static constexpr int threads = 256;
  static constexpr int terms = N::in_channels * N::taps;

  const GemmAdjointParameters& p;

  static __device__ __forceinline__ int64 index(int o, int c, int t) {
    return N::weights_by_input ? (static_cast<int64>(c) * N::channels + o) * N::taps + t
                               : (static_cast<int64>(o) * N::in_channels + c) * N::taps + t;
  }

  __device__ __forceinline__ void run() const {
    __shared__ uint32 of_warp[threads / 32];
    const int o = static_cast<int>(blockIdx.x);
    const bool exists = o < N::channels;
    float scale = 1.0f;
    if constexpr (N::scales) {
      uint32 largest = 0;
      if (exists) {
        for (int i = threadIdx.x; i < terms; i += threads)
          gradients::keep_largest(
              largest, load_one<typename N::Weight>(p.weights, index(o, i / N::taps, i % N::taps)));
      }
      largest = __reduce_max_sync(0xffffffffu, largest);
      if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
      __syncthreads();
      for (int i = 0; i < threads / 32; ++i) largest = of_warp[i] > largest ? of_warp[i] : largest;
      scale = gradients::scale_to(largest, 13);
    }
    if (threadIdx.x == 0) p.scales[o] = 1.0f / scale;
    constexpr int eights = N::chunks * 2;
    for (int i = threadIdx.x; i < eights * N::taps; i += threads) {
      const int tap = i % N::taps;
      const int eight = i / N::taps;
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int c = eight * 8 + k;
        x[k] = exists && c < N::in_channels
                   ? load_one<typename N::Weight>(p.weights, index(o, c, tap)) * scale
                   : 0.0f;
      }
      const int64 place =
          ((static_cast<int64>(o / 64) * N::tap_groups + tap / N::group_taps) * N::chunks + eight / 2) *
              N::group_taps +
          tap % N::group_taps;
      using Operand = typename N::Operand;
      static_cast<uint4*>(p.packed)[(place * 2 + eight % 2) * 64 + o % 64] =
          uint4{Operand::pack(x[0], x[1]), Operand::pack(x[2], x[3]), Operand::pack(x[4], x[5]),
                Operand::pack(x[6], x[7])};
    }
  }
};

template <class N>
struct GemmInputGradient {
  static constexpr int columns = N::columns;  // positions of a warpgroup
  static constexpr int tile_positions = 2 * columns;
  static constexpr int consumers = 256;
  static constexpr int window_bytes = 2 * N::window * 16;
  static constexpr int weight_bytes = N::group_taps * 2 * 64 * 16;
  static constexpr int channel_tiles = (N::channels + 63) / 64;
  static constexpr int steps = N::tap_groups * N::chunks;  // of a tile
  static constexpr int weight_slots = N::weights_stay ? steps : N::stages;
  static constexpr int sums = columns / 2;

  struct Shared {
    alignas(128) unsigned char x[N::stages][window_bytes];
    alignas(128) unsigned char weights[weight_slots][weight_bytes];
    uint64 full[N::stages];
    uint64 empty[N::stages];
    uint64 weights_full;
    uint64 ahead;
  };
  static_assert(sizeof(Shared) <= N::shared_bytes);

  const GemmInputParameters& p;
  Shared& s;

  static __device__ __forceinline__ int shift(int t) {
    const int m2 = t % N::kernel2;
    const int m1 = t / N::kernel2 % N::kernel1;
    const int m0 = t / (N::kernel2 * N::kernel1);
    return N::sign * ((m0 * N::dilation0 - N::padding0) * N::plane +
                      (m1 * N::dilation1 - N::padding1) * N::pitch + m2 * N::dilation2 - N::padding2);
  }
  // The least shift of a group of taps.
  static __device__ __forceinline__ int first_shift(int group) {
    return shift(N::sign > 0 ? group * N::group_taps : (group + 1) * N::group_taps - 1);
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
    gradients::Ring<N::stages> ring;
    if constexpr (N::weights_stay) {
      barrier::expect(&s.weights_full, steps * weight_bytes);
      for (int i = 0; i < steps; ++i)
        barrier::copy(s.weights[i], static_cast<const unsigned char*>(p.weights) + i * weight_bytes,
                      weight_bytes, &s.weights_full);
    }
    for_each_tile([&](int64 position, int channel_tile) {
      int step = 0;
#pragma unroll 1
      for (int group = 0; group < N::tap_groups; ++group) {
        const auto* from = static_cast<const uint4*>(p.packed) + N::margin + position + first_shift(group);
#pragma unroll 1
        for (int chunk = 0; chunk < N::chunks; ++chunk, ++step) {
          barrier::wait(&s.empty[ring.stage], ring.round ^ 1u);
          barrier::expect(&s.full[ring.stage], window_bytes + (N::weights_stay ? 0 : weight_bytes));
          for (int g = 0; g < 2; ++g) {
            barrier::copy(s.x[ring.stage] + g * N::window * 16, from + (chunk * 2 + g) * p.length,
                          N::window * 16, &s.full[ring.stage]);
          }
          if constexpr (!N::weights_stay) {
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
    gradients::Ring<N::stages> ring;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int warpgroup = thread / 128;
    const uint32 x_begin = barrier::shared_address(s.x[0]) + warpgroup * columns * 16;
    const uint32 w_begin = barrier::shared_address(s.weights[0]);
    float unscale = 1.0f;
    if constexpr (N::scales) unscale = 1.0f / gradients::Scale(p.largest).value;
    if constexpr (N::weights_stay) barrier::wait(&s.weights_full, 0);
    // One warpgroup begins some steps after the other and stays behind it: one stores while the other has the
    // tensor cores for itself.
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
          const uint32 w = w_begin + (N::weights_stay ? step : ring.stage) * weight_bytes;
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int t = 0; t < N::group_taps; ++t) {
            const uint32 own =
                N::tap_groups == 1 ? shift(t) - first_shift(0) : shift(group * N::group_taps + t) - low;
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
      store(position + warpgroup * columns, channel_tile * 64 + thread / 32 % 4 * 16 + lane / 4, unscale, d);
    });
  }

  // A position of the flat index that moves on.
  struct Cursor {
    uint32 n, z, y;
    int x;
    int64 row;    // where its row lies in the first channel
    bool inside;  // whether there is such a row

    __device__ __forceinline__ Cursor(uint32 position, int64 batch) {
      n = position / static_cast<uint32>(N::sample);
      const uint32 in_sample = position - n * static_cast<uint32>(N::sample);
      z = in_sample / static_cast<uint32>(N::plane);
      const uint32 in_plane = in_sample - z * static_cast<uint32>(N::plane);
      y = in_plane / static_cast<uint32>(N::pitch);
      x = static_cast<int>(in_plane - y * static_cast<uint32>(N::pitch));
      find_row(batch);
    }
    __device__ __forceinline__ void find_row(int64 batch) {
      inside = n < static_cast<uint32>(batch) && z < static_cast<uint32>(N::size0) &&
               y < static_cast<uint32>(N::size1);
      row = static_cast<int64>(n) * N::stride_n + z * N::stride0 + y * N::stride1;
    }
    __device__ __forceinline__ void move(int columns, int64 batch) {
      x += columns;
      if (x < N::pitch) return;
      do {
        x -= N::pitch;
        if (++y == N::plane / N::pitch) {
          y = 0;
          if (++z == N::sample / N::plane) {
            z = 0;
            ++n;
          }
        }
      } while (x >= N::pitch);
      find_row(batch);
    }
    __device__ __forceinline__ bool exists() const { return inside && x < N::size2; }
  };

  // Columns of a thread are every fourth pair; rows are even long, so that a pair lies in one of them.
  __device__ __forceinline__ void store(int64 position, int channel, float unscale, float (&d)[sums]) const {
    using Output = typename N::Output;
    float scale[2];
    bool has[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      has[h] = N::channels % 64 == 0 || channel + 8 * h < N::channels;
      scale[h] = has[h] ? p.scales[channel + 8 * h] * unscale : 0.0f;
    }
    const int64 begin = channel * static_cast<int64>(N::stride_c);
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

  // 16-bit elements: four neighbours of two pairs each of four lanes, so that these store a whole sector.
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
        // The lower two lanes get the first eight columns, the upper two the others; then each its four.
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
      for (int i = 0; i < N::stages; ++i) {
        barrier::initialise(&s.full[i], 1);
        barrier::initialise(&s.empty[i], consumers / 32);
      }
      barrier::initialise(&s.weights_full, 1);
      barrier::initialise(&s.ahead, 4);
    }
    __syncthreads();
    if (threadIdx.x >= consumers) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      if (threadIdx.x == consumers) send();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      multiply();
    }
  }
};

}  // namespace onepass
