# ModelNew: the Model of s27.py, fused for sm_90a by onepass 0.1.0:
#   python -m onepass export s27.py -o s27.py --arch sm_90a
# It needs PyTorch and a CUDA toolkit: load_inline builds the kernels at the first call on a GPU.
#   block_1_tf32: thin_samples, conv3d(3,16,k=4) | hardswish | group_norm(4) | mean
#   block_1_f32: thin_samples, conv3d(3,16,k=4) | hardswish | group_norm(4) | mean
#
# The original file follows, then the kernels, then ModelNew at the end.

"""Workload s27: Conv3d -> HardSwish -> GroupNorm -> mean over depth, height and width."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, num_groups=4, bias=True):
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size, bias=bias)
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        x = self.conv(x)
        x = F.hardswish(x)
        x = self.group_norm(x)
        return torch.mean(x, dim=[2, 3, 4])


batch_size, in_channels, out_channels, kernel_size = 1024, 3, 16, 4
depth, height, width = 16, 32, 32


def get_inputs():
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size]


# ----------------------------------------------------------------------------------------------------
# The kernels
import functools
import threading

import torch
import torch.utils.cpp_extension

_CUDA_HEAD = r"""
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
"""

_DEVICE_CODE = r"""
// --------------------------------------------------------------------------------------------------
// Integers, element types, and vectors of elements between memory and registers. Arithmetic is always f32.

namespace onepass {

using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;

template <class A, class B>
constexpr bool is_same = false;

template <class A>
constexpr bool is_same<A, A> = true;

// Element types: how wide, and how 32 bits of storage become floats and back. Halves go in pairs.
struct f32 {
  static constexpr int bytes = 4;
};

struct f16 {
  static constexpr int bytes = 2;
  static __device__ __forceinline__ void unpack(uint32 bits, float& low, float& high) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high)
        : "r"(bits));
  }
  static __device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
};

struct bf16 {
  static constexpr int bytes = 2;
  static __device__ __forceinline__ void unpack(uint32 bits, float& low, float& high) {
    low = __uint_as_float(bits << 16);
    high = __uint_as_float(bits & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
};

// One element at an index.
template <class T>
__device__ __forceinline__ float load_one(const void* base, int64 index) {
  if constexpr (T::bytes == 4) {
    return static_cast<const float*>(base)[index];
  } else {
    float low, high;
    T::unpack(static_cast<const uint16*>(base)[index], low, high);
    return low;
  }
}

template <class T>
__device__ __forceinline__ void store_one(void* base, int64 index, float value) {
  if constexpr (T::bytes == 4) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16*>(base)[index] = static_cast<uint16>(T::pack(value, 0.0f));
  }
}

}  // namespace onepass

// --------------------------------------------------------------------------------------------------
// The pointwise stages on a GPU: the formulas of pointwise.def over the functions below, in f32.
//
// Errors, absolute, of values up to a few units: sigmoid 2e-7, normal_cdf 2e-7; the others are CUDA's own,
// within 2 ulp. sigmoid is 4 instructions and normal_cdf 15, where CUDA's expf and division, or erff, take 20
// to 30.

namespace onepass::pointwise {

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float ramp(float x) { return __saturatef(fmaf(x, 1.0f / 6.0f, 0.5f)); }

struct hardswish_stage {
  static __device__ __forceinline__ float value(float x, float p, float a, float b) {
    return x * ramp(x);
  }
};

}  // namespace onepass::pointwise

// --------------------------------------------------------------------------------------------------
// Sums over lanes, warps and blocks, and moments (count, mean, M2), always in the same order.

namespace onepass {

// The sum over `Lanes` neighbouring lanes (a power of two), in each of them.
template <int Lanes>
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// The sums of `Count` values over the block, in every thread. `scratch` holds Count * Threads / 32 floats and
// is free again after the next barrier of the block.
template <int Threads, int Count>
__device__ __forceinline__ void block_sum(float (&value)[Count], float* scratch) {
  constexpr int warps = Threads / 32;
#pragma unroll
  for (int i = 0; i < Count; ++i) value[i] = lanes_sum<32>(value[i]);
  if constexpr (warps > 1) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    __syncthreads();
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < Count; ++i) scratch[i * warps + warp] = value[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      value[i] = lanes_sum<32>(lane < warps ? scratch[i * warps + lane] : 0.0f);
    }
  }
}

// Elements seen so far as their count, mean and sum of squared distances from it.
struct Moments {
  float count = 0.0f;
  float mean = 0.0f;
  float m2 = 0.0f;

  // Takes in `n` elements of this mean and M2 (Chan). The quotient is a weight: its error of 1 ulp moves the
  // mean by that part of the distance between the two means.
  __device__ __forceinline__ void merge(float n, float other_mean, float other_m2) {
    const float total = count + n;
    float weight;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(total));
    weight *= n;
    const float distance = other_mean - mean;
    mean = fmaf(distance, weight, mean);
    m2 = fmaf(distance * distance, count * weight, m2 + other_m2);
    count = total;
  }
};

// The moments of the elements of `Threads` threads together; `elements` is their number. Two sums instead of
// a tree of merges: the mean first, then every thread's M2 moved to it. Lanes is 32 or less for a team inside
// a warp, else Threads.
template <int Lanes, int Threads>
__device__ __forceinline__ void team_moments(const Moments& own, float elements, float* scratch, float& mean,
                                             float& m2) {
  float sum[1] = {own.count * own.mean};
  if constexpr (Lanes <= 32) {
    sum[0] = lanes_sum<Lanes>(sum[0]);
  } else {
    block_sum<Threads>(sum, scratch);
  }
  mean = elements > 0.0f ? sum[0] / elements : 0.0f;
  const float distance = own.mean - mean;
  float square[1] = {fmaf(own.count * distance, distance, own.m2)};
  if constexpr (Lanes <= 32) {
    square[0] = lanes_sum<Lanes>(square[0]);
  } else {
    block_sum<Threads>(square, scratch);
  }
  m2 = square[0];
}

// --------------------------------------------------------------------------------------------------
// What the tail's kernels share: parameters, per-channel values, and the two ways to walk over a tile.
//
// A tail is  before-chain -> norm -> after-chain -> mean, each part optional. `Tail` is the problem,
// generated: types, sizes and the chains as structs (src/cuda/source.cc). A *row* is one channel of one
// sample. A *unit* is what shares a synchronisation: a slab where tensors are planar (channels before space),
// a sample where they are interleaved.

// Loads and stores that other blocks of the same launch wrote or will read: past the first-level cache.
__device__ __forceinline__ float load_shared_by_blocks(const float* address) { return __ldcg(address); }

__device__ __forceinline__ void wait_for(const uint32* flag, uint32 value) {
  uint32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (seen < value);
}

// Adds one to a counter of the launch and says what it was. What this block wrote before its last barrier is
// visible to the one that sees the new count, and the other way round.
__device__ __forceinline__ uint32 count_up(uint32* counter) {
  uint32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Whether this block is the last of `count` to arrive; what the others wrote before is then visible.
__device__ __forceinline__ bool arrives_last(uint32* counter, uint32 count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(counter) == count - 1;
  __syncthreads();
  return last;
}

// Lets those that wait for the flag go on: what this thread wrote is visible to them.
__device__ __forceinline__ void release(uint32* flag, uint32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// The same for a block.
__device__ __forceinline__ void publish(uint32* flag, uint32 value) {
  __syncthreads();
  if (threadIdx.x == 0) release(flag, value);
}

// Work by ticket: pass 1 of wave 0; pass 1 of wave 1, pass 2 of wave 0; ... ; pass 2 of the last wave. So
// pass 2 finds in the second-level cache what pass 1 of its wave read, and waits only for lower tickets.
template <int FirstTiles, int SecondTiles>
struct Schedule {
  static_assert(FirstTiles + SecondTiles > 0);

  bool is_first;
  int64 unit;
  int tile;

  // All tickets of both passes; those of units that the last wave does not have do nothing.
  static __device__ __forceinline__ int64 tickets(int64 units, int64 wave_units) {
    return wave_units * FirstTiles +
           (units + wave_units - 1) / wave_units * wave_units * (FirstTiles + SecondTiles);
  }

  // Tickets are drawn from a 32-bit counter: 32 bits divide in a fifth of the instructions of 64.
  __device__ __forceinline__ Schedule(int64 drawn, int64 wave_units) {
    const auto units_of_wave = static_cast<uint32>(wave_units);
    const uint32 first_items = units_of_wave * FirstTiles;
    const uint32 segment = units_of_wave * (FirstTiles + SecondTiles);
    // Segment 0 has no second pass, so that its first passes stand at the end of a whole one.
    const uint32 ticket = static_cast<uint32>(drawn) + segment - first_items;
    uint32 wave = ticket / segment;
    uint32 item = ticket - wave * segment;
    is_first = FirstTiles > 0 && (wave == 0 || item < first_items);
    if (wave == 0) item -= segment - first_items;
    if (!is_first) {
      item -= first_items;
      --wave;
    }
    constexpr uint32 most_first = FirstTiles > 0 ? FirstTiles : 1;
    constexpr uint32 most_second = SecondTiles > 0 ? SecondTiles : 1;
    const uint32 of_wave = is_first ? item / most_first : item / most_second;
    unit = static_cast<int64>(wave) * units_of_wave + of_wave;
    tile = static_cast<int>(item - of_wave * (is_first ? most_first : most_second));
  }
};

// A block's tickets, drawn one at a time. Drawing the next one early would save its wait, but a ticket that
// is held back takes the place of a tile in flight: 1.25 times the time of s60's backward.
class Tickets {
 public:
  explicit __device__ __forceinline__ Tickets(uint32* counter) : counter_(counter) {}

  // The next ticket, in every thread.
  __device__ __forceinline__ int64 take() {
    __shared__ uint32 ticket;
    __syncthreads();  // all have read the one before
    if (threadIdx.x == 0) ticket = atomicAdd(counter_, 1u);
    __syncthreads();
    return ticket;
  }

 private:
  uint32* counter_;
};

// The channel values of one row, or of `Width` neighbouring rows where a vector runs over channels.
template <class Chain, int Rows>
struct ChannelValues {
  float value[Rows][Chain::channel_operands > 0 ? Chain::channel_operands : 1];

  template <class Parameters>
  __device__ __forceinline__ void load(const Parameters& p, int64 n, int64 c) {
#pragma unroll
    for (int i = 0; i < Rows; ++i) Chain::load_channel(p, n, c + i, value[i]);
  }
};

// The whole chunk, where a number of vectors is asked for.
struct All {};

// --------------------------------------------------------------------------------------------------
// A thin convolution and all that follows it in one launch, its output in no memory.
//
//   pass 1   x -> convolution -> before-chain -> moments of each channel's tiles; the last block of a sample
//            merges them
//   pass 2   x -> convolution -> before-chain -> norm -> after-chain -> y, or its sums where the block ends
//   in
//            a mean
//
// Pass 1 is left out without a norm, pass 2 where a mean follows the norm directly. Work is taken by ticket
// as in tail_streamed.cuh: pass 1 of a wave of samples, then pass 2 of the wave before. Moves x once or twice
// and y once.
//
// `Convolution` is the problem's, generated (src/cuda/thin.cc); so is `Tail`. Three parts make a kernel:
//   Mainloop   computes a tile of a sample's sums and hands them to an epilogue, fragment by fragment. It
//   says
//              how a warp's lanes share them: Mainloop::team neighbouring lanes have the same rows (channels
//              of samples), and a tile is one of Mainloop::samples samples.
//   Epilogue   MomentsEpilogue or ApplyEpilogue: the chain, and what becomes of its values.
//   Thin       the tickets, and what the last block of a sample does.

template <int Count>
struct ThinParameters {
  const void* input;
  void* output;
  float* statistics;  // [batch][groups][2]: mean, 1 / deviation
  uint32* control;    // zero: a ticket, then two counters and a flag for each sample
  float* parts;       // of channels, for each tile: count, mean, M2
  float* sums;        // of channels, for each tile
  uint32* only;   // where not null: a word for each sample, then one for all (RedoAll); others are left out
  uint32* guard;  // zero: what a mainloop found of each sample (thin_samples.cuh)
  int64 batch;
  int64 wave_units;
  const void* parameter[Count > 0 ? Count : 1];

  // Elements go one by one.
  __device__ __forceinline__ bool is_aligned(int) const { return false; }
};

// The word behind those of the samples.
enum RedoWord : uint32 { redo_none = 0, redo_some = 1, redo_all = 2 };

// What f32 elements are multiplied by where f16 parts stand for them (thin_samples.cuh).
constexpr float thin_input_scale = 32.0f;

// To nearest, ties to even, at 10 bits; what is not finite stays.
__device__ __forceinline__ float round_to_tf32(float x) {
#if __CUDA_ARCH__ >= 900
  uint32 bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
#else
  const uint32 bits = __float_as_uint(x);
  const uint32 rounded = (bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu;
  return (bits & 0x7f800000u) == 0x7f800000u ? x : __uint_as_float(rounded);
#endif
}

// One class of a dimension; `r` is the same in all threads.
template <class Convolution>
struct ThinClass {
  using C = Convolution;
  int r[3];
  int first[3];
  int base[3];
  int count[3];
  int positions[3];

  // Classes are numbered with the last dimension's running fastest.
  explicit __device__ __forceinline__ ThinClass(int index) {
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      constexpr int one = 1;
      const int of_dimension = static_cast<int>(C::classes(d));
      r[d] = of_dimension == one ? 0 : index % of_dimension;
      index /= of_dimension;
      first[d] = static_cast<int>(C::first(d, r[d]));
      base[d] = static_cast<int>(C::base(d, r[d]));
      count[d] = static_cast<int>(C::count(d, r[d]));
      positions[d] = static_cast<int>(C::positions(d, r[d]));
    }
  }

  __device__ __forceinline__ int all_positions() const { return positions[0] * positions[1] * positions[2]; }

  // Position `flat` of the class, with the last dimension running fastest.
  __device__ __forceinline__ void split(int flat, int (&j)[3]) const {
    const auto rest = static_cast<unsigned>(flat) / static_cast<unsigned>(positions[2]);
    j[2] = flat - static_cast<int>(rest) * positions[2];
    j[0] = static_cast<int>(rest / static_cast<unsigned>(positions[1]));
    j[1] = static_cast<int>(rest) - j[0] * positions[1];
  }

  // Where the output of a position lies in its channel.
  __device__ __forceinline__ int output_offset(const int (&j)[3]) const {
    int offset = 0;
#pragma unroll
    for (int d = 0; d < 3; ++d)
      offset += (r[d] + static_cast<int>(C::classes(d)) * j[d]) * static_cast<int>(C::stride(d + 2));
    return offset;
  }
};

// Which of a fragment's positions are the tile's: all, or those with a bit.
struct Mask {
  uint32 bits;
};

__device__ __forceinline__ bool has(int i, Mask mask) { return mask.bits >> i & 1u; }

__device__ __forceinline__ bool has(int, All) { return true; }

// A slot is a channel of one of the samples that a tile has.
template <class Tail, class Numbers>
__device__ __forceinline__ int channel_of(int slot) {
  return Numbers::slots == Tail::channels ? slot : slot % Tail::channels;
}

template <class Tail, class Numbers>
__device__ __forceinline__ int sample_of(int slot) {
  return Numbers::slots == Tail::channels ? 0 : slot / Tail::channels;
}

// Where an element lies in the output; a sample spans less than 2^31.
template <class Convolution, class Tail, class Numbers>
__device__ __forceinline__ int64 element_index(int64 n, int slot, int offset) {
  return (n + sample_of<Tail, Numbers>(slot)) * Convolution::stride(0) +
         (channel_of<Tail, Numbers>(slot) * static_cast<int>(Convolution::stride(1)) + offset);
}

// The norm of a channel of a sample, as one multiply-add.
template <class Tail>
struct ChannelNorm {
  float scale = 1.0f;
  float shift = 0.0f;

  template <class Parameters>
  __device__ __forceinline__ void load(const Parameters& p, int64 n, int channel) {
    if constexpr (Tail::has_norm) {
      constexpr int groups = Tail::channels / Tail::group_channels;
      const float* slab = p.statistics + 2 * (n * groups + channel / Tail::group_channels);
      scale = Tail::weight(p, channel) * load_shared_by_blocks(slab + 1);
      shift = fmaf(-load_shared_by_blocks(slab), scale, Tail::bias(p, channel));
    }
  }
  __device__ __forceinline__ float apply(float x) const { return Tail::has_norm ? fmaf(x, scale, shift) : x; }
};

// Slots of a thread, and what the before-chain takes of their channels.
template <class Tail, class Numbers, int Rows>
struct ThinRows {
  ChannelValues<typename Tail::Before, 1> before[Rows];
  int slot[Rows];
  bool in_range[Rows];

  __device__ __forceinline__ int channel(int r) const { return channel_of<Tail, Numbers>(slot[r]); }
  __device__ __forceinline__ int64 sample(int64 n, int r) const {
    return n + sample_of<Tail, Numbers>(slot[r]);
  }
  template <class Parameters>
  __device__ __forceinline__ ThinRows(const Parameters& p, int64 n, const int (&slots)[Rows],
                                      const bool (&are_in_range)[Rows]) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      slot[r] = slots[r];
      in_range[r] = are_in_range[r];
      before[r].load(p, sample(n, r), channel(r));
    }
  }
};

// What a mainloop does with its sums:
//   Epilogue epilogue{p, scratch, n}
//   auto rows = epilogue.begin(channel, in_range): a thread's rows are these channels; one that is not in
//   range
//     has a valid channel all the same, and nothing becomes of its values
//   epilogue.take(rows, h, offset, which): h[row][position], offset[position] in a channel, All or a Mask
//   epilogue.template finish<team>(rows): every thread of the block; the lanes of a team have the same
//   channels epilogue.store(tile): once, when all channels are finished
template <class Convolution, class Tail, class Numbers>
struct MomentsEpilogue {
  using Parameters = ThinParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  const Parameters& p;
  float* scratch;  // 3 * Numbers::warps * Numbers::slots floats
  int64 n;         // of slot 0

  template <int Rows>
  struct State : ThinRows<Tail, Numbers, Rows> {
    using ThinRows<Tail, Numbers, Rows>::ThinRows;
    float count = 0.0f;
    float mean[Rows] = {};
    float m2[Rows] = {};
  };

  template <int Rows>
  __device__ __forceinline__ State<Rows> begin(const int (&slot)[Rows], const bool (&in_range)[Rows]) const {
    return State<Rows>(p, n, slot, in_range);
  }

  template <int Rows, int Count, class Which>
  __device__ __forceinline__ void take(State<Rows>& rows, float (&h)[Rows][Count], const int (&offset)[Count],
                                       Which which) const {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!has(i, which)) continue;
        typename Before::template Tensors<1> tensors;
        tensors.load(p, element_index<Convolution, Tail, Numbers>(n, rows.slot[r], offset[i]));
        h[r][i] = Before::value(h[r][i], rows.before[r].value[0], tensors, 0);
      }
    }
    float added = Count;
    if constexpr (!is_same<Which, All>) added = static_cast<float>(__popc(which.bits));
    if (!is_same<Which, All> && added == 0.0f) return;
    const float total = rows.count + added;
    const float per_added = is_same<Which, All> ? 1.0f / Count : pointwise::reciprocal_fast(added);
    const float weight = added * pointwise::reciprocal_fast(total);
    const float spread = rows.count * weight;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Count; ++i) sum += has(i, which) ? h[r][i] : 0.0f;
      const float mean = Count == 1 ? h[r][0] : sum * per_added;
      float m2 = 0.0f;
      if constexpr (Count > 1) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
          const float distance = has(i, which) ? h[r][i] - mean : 0.0f;
          m2 = fmaf(distance, distance, m2);
        }
      }
      const float distance = mean - rows.mean[r];
      rows.mean[r] = fmaf(distance, weight, rows.mean[r]);
      rows.m2[r] = fmaf(distance * distance, spread, rows.m2[r] + m2);
    }
    rows.count = total;
  }

  template <int team, int Rows>
  __device__ __forceinline__ void finish(State<Rows>& rows) const {
    const int warp = threadIdx.x / 32;
    const float count = lanes_sum<team>(rows.count);
    __syncthreads();  // scratch is free
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      Moments own{rows.count, rows.mean[r], rows.m2[r]};
      float mean, m2;
      team_moments<team, Numbers::threads>(own, count, nullptr, mean, m2);
      if (rows.in_range[r] && threadIdx.x % team == 0) {
        float* place = scratch + (warp * Numbers::slots + rows.slot[r]) * 3;
        place[0] = count;
        place[1] = mean;
        place[2] = m2;
      }
    }
  }

  // After finish() of all channels: the block's moments of each.
  __device__ __forceinline__ void store(int tile) const {
    __syncthreads();
    for (int s = threadIdx.x; s < Numbers::slots; s += Numbers::threads) {
      if (n + sample_of<Tail, Numbers>(s) >= p.batch) break;
      Moments all;
      for (int warp = 0; warp < Numbers::warps; ++warp) {
        const float* place = scratch + (warp * Numbers::slots + s) * 3;
        if (place[0] > 0.0f) all.merge(place[0], place[1], place[2]);
      }
      float* part = p.parts + ((n * Tail::channels + s) * Numbers::tiles + tile) * 3;
      part[0] = all.count;
      part[1] = all.mean;
      part[2] = all.m2;
    }
  }
};

template <class Convolution, class Tail, class Numbers>
struct ApplyEpilogue {
  using Parameters = ThinParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  const Parameters& p;
  float* scratch;  // Numbers::warps * Numbers::slots floats
  int64 n;         // of slot 0

  template <int Rows>
  struct State : ThinRows<Tail, Numbers, Rows> {
    ChannelValues<After, 1> after[Rows];
    ChannelNorm<Tail> norm[Rows];
    float sum[Rows] = {};

    __device__ __forceinline__ State(const Parameters& p, int64 n, const int (&slots)[Rows],
                                     const bool (&are_in_range)[Rows])
        : ThinRows<Tail, Numbers, Rows>(p, n, slots, are_in_range) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        after[r].load(p, this->sample(n, r), this->channel(r));
        norm[r].load(p, this->sample(n, r), this->channel(r));
      }
    }
  };

  template <int Rows>
  __device__ __forceinline__ State<Rows> begin(const int (&slot)[Rows], const bool (&in_range)[Rows]) const {
    return State<Rows>(p, n, slot, in_range);
  }

  template <int Rows, int Count, class Which>
  __device__ __forceinline__ void take(State<Rows>& rows, float (&h)[Rows][Count], const int (&offset)[Count],
                                       Which which) const {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        if (!has(i, which)) continue;
        const int64 index = element_index<Convolution, Tail, Numbers>(n, rows.slot[r], offset[i]);
        typename Before::template Tensors<1> before;
        typename After::template Tensors<1> after;
        before.load(p, index);
        after.load(p, index);
        float value = Before::value(h[r][i], rows.before[r].value[0], before, 0);
        value = After::value(rows.norm[r].apply(value), rows.after[r].value[0], after, 0);
        if constexpr (Tail::has_mean) {
          rows.sum[r] += value;
        } else if (rows.in_range[r]) {
          store_one<typename Tail::Output>(p.output, index, value);
        }
      }
    }
  }

  template <int team, int Rows>
  __device__ __forceinline__ void finish(State<Rows>& rows) const {
    if constexpr (Tail::has_mean) {
      __syncthreads();  // scratch is free
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const float sum = lanes_sum<team>(rows.sum[r]);
        if (rows.in_range[r] && threadIdx.x % team == 0)
          scratch[threadIdx.x / 32 * Numbers::slots + rows.slot[r]] = sum;
      }
    }
  }

  __device__ __forceinline__ void store(int tile) const {
    if constexpr (Tail::has_mean) {
      __syncthreads();
      for (int s = threadIdx.x; s < Numbers::slots; s += Numbers::threads) {
        if (n + sample_of<Tail, Numbers>(s) >= p.batch) break;
        float total = 0.0f;
        for (int warp = 0; warp < Numbers::warps; ++warp) total += scratch[warp * Numbers::slots + s];
        p.sums[(n * Tail::channels + s) * Numbers::tiles + tile] = total;
      }
    }
  }
};

template <class Convolution, class Tail, class Numbers, class Mainloop>
struct Thin {
  using Parameters = ThinParameters<Tail::parameters>;
  using MomentsPass = MomentsEpilogue<Convolution, Tail, Numbers>;
  using ApplyPass = ApplyEpilogue<Convolution, Tail, Numbers>;
  static constexpr int samples = Mainloop::samples;  // of a unit
  static constexpr int groups = Tail::channels / Tail::group_channels;
  static constexpr int first_tiles = Tail::has_norm ? Numbers::tiles : 0;
  static constexpr int second_tiles = Tail::mean_follows_norm ? 0 : Numbers::tiles;

  const Parameters& p;
  float* scratch;
  Mainloop mainloop;

  // --- Between the passes: a warp for each slab ---
  __device__ __forceinline__ void finish_moments(int64 first_sample) const {
    constexpr int per_slab = Tail::group_channels * Numbers::tiles;
    const int lane = threadIdx.x % 32;
    for (int s = threadIdx.x / 32; s < samples * groups; s += Numbers::warps) {
      const int64 slab = first_sample * groups + s;
      if (slab >= p.batch * groups) break;
      const float* parts = p.parts + slab * per_slab * 3;
      Moments own;
      for (int i = lane; i < per_slab; i += 32) {
        const float count = load_shared_by_blocks(parts + i * 3);
        if (count > 0.0f)
          own.merge(count, load_shared_by_blocks(parts + i * 3 + 1),
                    load_shared_by_blocks(parts + i * 3 + 2));
      }
      constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
      float mean, m2;
      team_moments<32, Numbers::threads>(own, elements, nullptr, mean, m2);
      const float rstd = 1.0f / sqrtf(m2 / elements + Tail::eps);
      if (lane == 0) {
        p.statistics[2 * slab] = mean;
        p.statistics[2 * slab + 1] = rstd;
      }
      if constexpr (Tail::mean_follows_norm) {
        for (int c = lane; c < Tail::group_channels; c += 32) {
          Moments row;
          for (int i = 0; i < Numbers::tiles; ++i) {
            const float* part = parts + (c * Numbers::tiles + i) * 3;
            const float count = load_shared_by_blocks(part);
            if (count > 0.0f) row.merge(count, load_shared_by_blocks(part + 1), 0.0f);
          }
          const int64 row_index = slab * Tail::group_channels + c;
          const int channel = static_cast<int>(row_index % Tail::channels);
          const float value =
              fmaf((row.mean - mean) * rstd, Tail::weight(p, channel), Tail::bias(p, channel));
          store_one<typename Tail::Output>(p.output, row_index, value);
        }
      }
    }
  }

  __device__ __forceinline__ void finish_mean(int64 first_sample) const {
    constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
    for (int s = threadIdx.x; s < samples * Tail::channels; s += Numbers::threads) {
      const int64 row = first_sample * Tail::channels + s;
      if (row >= p.batch * Tail::channels) break;
      double total = 0.0;
      for (int i = 0; i < Numbers::tiles; ++i)
        total += load_shared_by_blocks(p.sums + row * Numbers::tiles + i);
      store_one<typename Tail::Output>(p.output, row, static_cast<float>(total) * per_element);
    }
  }

  __device__ __forceinline__ void first(int64 unit, int tile, uint32* counters) const {
    MomentsPass pass{p, scratch, unit * samples};
    mainloop.run(p, unit * samples, tile, pass);
    pass.store(tile);
    if (arrives_last(counters, Numbers::tiles)) {
      finish_moments(unit * samples);
      mainloop.finish_samples(p, unit * samples);
      publish(counters + 2, 1u);
    }
  }

  __device__ __forceinline__ void second(int64 unit, int tile, uint32* counters) const {
    if constexpr (Tail::has_norm) {
      if (threadIdx.x == 0) wait_for(counters + 2, 1u);
      __syncthreads();
    }
    ApplyPass pass{p, scratch, unit * samples};
    mainloop.run(p, unit * samples, tile, pass);
    pass.store(tile);
    if constexpr (Tail::has_mean || (!Tail::has_norm && samples > 1)) {
      if (arrives_last(counters + 1, Numbers::tiles)) {
        if constexpr (Tail::has_mean) finish_mean(unit * samples);
        if constexpr (!Tail::has_norm) mainloop.finish_samples(p, unit * samples);
      }
    }
  }

  // Whether there is anything to do at all: asked before weights are loaded.
  static __device__ __forceinline__ bool has_work(const Parameters& p) {
    return p.only == nullptr || p.only[p.batch] != redo_none;
  }

  __device__ __forceinline__ void run() const {
    using Items = Schedule<first_tiles, second_tiles>;
    const int64 units = (p.batch + samples - 1) / samples;
    const int64 tickets = Items::tickets(units, p.wave_units);
    // A mainloop of several samples leaves words there, and heeds none.
    const bool all = samples > 1 || p.only == nullptr || p.only[p.batch] == redo_all;
    Tickets own(p.control);
#pragma unroll 1
    for (int64 ticket = own.take(); ticket < tickets; ticket = own.take()) {
      const Items item(ticket, p.wave_units);
      if (item.unit >= units || (!all && p.only[item.unit] == 0)) continue;
      uint32* counters = p.control + 4 + item.unit * 4;
      if (item.is_first) {
        if constexpr (first_tiles > 0) first(item.unit, item.tile, counters);
      } else {
        if constexpr (second_tiles > 0) second(item.unit, item.tile, counters);
      }
    }
  }
};

// --------------------------------------------------------------------------------------------------
// The mainloop of a thin convolution whose block ends in a mean, on tensor cores: the columns of a product
// are eight samples.
//
//   D[channel, sample] += A[channel, term] B[term, sample]   (m16n8k16, at one output position)
//
// Elements of eight samples lie side by side in shared memory (16 bytes a position), so that every tap of
// every position is a legal matrix row (ldmatrix.trans): nothing is shifted or kept twice, no position is
// wasted, and a thread's sums belong to the same channels and samples throughout. A term is (input channel,
// tap of the first and of the last dimension), 16 a product. The taps of the middle dimension slide: a window
// row's B serves all output rows that it meets, `Numbers::rows` of them at `Numbers::columns` columns in
// registers.
//
// A tile is a strip of output rows, over all columns and all of the first dimension, whose input planes pass
// through a ring in shared memory. Moves x (rows + halo) / rows times, mostly from the second-level cache,
// and writes means.
//
// Elements of 16 bits are multiplied as they are. f32 ones are split into f16 parts:
//   tf32   x as one (the same 10 bits as TF32), weights as two (22 bits: as good as exact)
//   f32    both as two, three products, sums moved to CUDA cores' f32 after each group of 16 terms times the
//          middle taps
// after multiplication by powers of two: weights of a channel to [2^13, 2^14), x by 2^5. What f16 has no room
// for is done again by thin_cores: samples with an element of 2047 or more (or not finite), and those with a
// channel in which nothing reaches 2^-6 and something is not exact in f16. Elsewhere an f16 denormal is off
// by at most 2^-24 of the channel's largest element.

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void load_matrices(uint32 address, uint32 (&b)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

// D += A B, 16 x 8 x 16.
template <class Half>
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& a, uint32 b0, uint32 b1) {
  if constexpr (is_same<Half, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  }
}

// Of each half; NaN stays.
__device__ __forceinline__ uint32 larger_magnitude(uint32 a, uint32 b) {
  uint32 result;
  asm("{.reg .b32 m; abs.f16x2 m, %2; max.NaN.f16x2 %0, %1, m;}" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <class Convolution, class Tail, class Numbers>
struct SamplesMainloop {
  using C = Convolution;
  using Input = typename Tail::Input;
  static constexpr bool splits = Input::bytes == 4;
  static constexpr int samples = 8;
  static constexpr int team = 1;
  static constexpr int input_parts = Numbers::input_parts;
  static constexpr int weight_parts = Numbers::weight_parts;
  static constexpr int rows = Numbers::rows;
  static constexpr int columns = Numbers::columns;
  static constexpr int planes = Numbers::planes;
  static constexpr int window_rows = Numbers::window_rows;
  static constexpr int window_columns = Numbers::window_columns;
  static constexpr int plane_units = Numbers::plane_units;  // of 16 bytes: eight samples of a position
  static constexpr int middle_taps = static_cast<int>(C::kernel(1));
  static constexpr int outer_taps = static_cast<int>(C::kernel(0) * C::kernel(2));
  static constexpr int terms = C::in_channels * outer_taps;
  static constexpr int groups = (terms + 15) / 16;
  static constexpr int row_tiles = (C::channels + 15) / 16;
  static constexpr int span = static_cast<int>((C::kernel(0) - 1) * C::delta(0)) + 1;  // planes of an output
  static constexpr int step_of_rows = static_cast<int>(C::step(1));
  static_assert(input_parts == 1 || columns == 1, "a load of four matrices is two columns or two parts");

  static constexpr int scratch_floats = 3 * Numbers::warps * Numbers::slots;
  // What epilogues leave there is read before the next tile is staged, but after the last row tile.
  static constexpr bool scratch_in_ring =
      row_tiles == 1 && 4 * scratch_floats <= 16 * input_parts * planes * plane_units;

  struct Shared {
    uint4 x[input_parts][planes * plane_units];
    uint4 zero[terms % 16 == 0 ? 1 : window_rows * window_columns];
    uint4 weight[row_tiles][groups][middle_taps][weight_parts][32];
    float unscale[row_tiles * 16];
    float bias[row_tiles * 16];
    float own_scratch[scratch_in_ring ? 1 : scratch_floats];
    uint32 seen[C::in_channels][samples];

    __device__ __forceinline__ float* scratch() {
      return scratch_in_ring ? reinterpret_cast<float*>(x[0]) : own_scratch;
    }
  };

  Shared& shared;

  // --- Weights ---
  template <class Parameters>
  static __device__ __forceinline__ float weight_at(const Parameters& p, int o, int term, int t1) {
    if (o >= C::channels || term >= terms) return 0.0f;
    constexpr int last = static_cast<int>(C::kernel(2));
    const int c = term / outer_taps;
    const int t0 = term % outer_taps / last;
    const int t2 = term % last;
    const int tap = (t0 * middle_taps + t1) * last + t2;
    return load_one<typename C::Weight>(p.parameter[0], (o * C::in_channels + c) * C::taps + tap);
  }

  // The power of two that takes the channel's largest weight to [2^13, 2^14); flags what has none.
  template <class Parameters>
  static __device__ __forceinline__ void find_scales(const Parameters& p, Shared& shared) {
    const int lane = threadIdx.x % 32;
    for (int o = threadIdx.x / 32; o < row_tiles * 16; o += Numbers::warps) {
      uint32 largest = 0;
      if (o < C::channels) {
        for (int i = lane; i < C::in_channels * C::taps; i += 32) {
          const float w = load_one<typename C::Weight>(p.parameter[0], o * C::in_channels * C::taps + i);
          largest = max(largest, __float_as_uint(w) & 0x7fffffffu);
        }
      }
      largest = __reduce_max_sync(0xffffffffu, largest);
      const int exponent = static_cast<int>(largest >> 23) - 127;
      const bool fits = largest == 0 || (exponent > -100 && exponent < 128);
      if (splits && !fits && lane == 0) atomicMax(p.only + p.batch, static_cast<uint32>(redo_all));
      const int shift = splits && largest > 0 && fits ? 13 - exponent : 0;
      if (lane == 0) {
        shared.unscale[o] = splits ? ldexpf(1.0f / thin_input_scale, -shift) : 1.0f;
        float bias = 0.0f;
        if constexpr (C::has_bias)
          bias = o < C::channels ? load_one<typename C::Bias>(p.parameter[1], o) : 0.0f;
        shared.bias[o] = bias;
      }
    }
  }

  // Fragment A of a product: a lane has rows lane / 4 and 8 further, terms 2 (lane % 4) and 8 further.
  template <class Parameters>
  static __device__ __forceinline__ void load_weights(const Parameters& p, Shared& shared) {
    find_scales(p, shared);
    for (int i = threadIdx.x; i < C::in_channels * samples; i += Numbers::threads)
      shared.seen[i / samples][i % samples] = 0;
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.zero) / 16); i += Numbers::threads)
      shared.zero[i] = uint4{0, 0, 0, 0};
    __syncthreads();
    for (int i = threadIdx.x; i < row_tiles * groups * middle_taps * 32; i += Numbers::threads) {
      const int lane = i % 32;
      const int t1 = i / 32 % middle_taps;
      const int g = i / 32 / middle_taps % groups;
      const int tile = i / 32 / middle_taps / groups;
      uint32 high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int o = tile * 16 + lane / 4 + j % 2 * 8;
        const int term = g * 16 + lane % 4 * 2 + j / 2 * 8;
        const float scale = splits ? 1.0f / (shared.unscale[o] * thin_input_scale) : 1.0f;
        const float w0 = weight_at(p, o, term, t1) * scale;
        const float w1 = weight_at(p, o, term + 1, t1) * scale;
        split(w0, w1, high[j], low[j]);
      }
      shared.weight[tile][g][t1][0][lane] = uint4{high[0], high[1], high[2], high[3]};
      if constexpr (weight_parts == 2)
        shared.weight[tile][g][t1][weight_parts - 1][lane] = uint4{low[0], low[1], low[2], low[3]};
    }
    __syncthreads();
  }

  // A pair as 16-bit elements, and what is left of it.
  static __device__ __forceinline__ void split(float a, float b, uint32& high, uint32& low) {
    if constexpr (splits) {
      high = f16::pack(a, b);
      float ha, hb;
      f16::unpack(high, ha, hb);
      low = f16::pack(a - ha, b - hb);
    } else {
      high = Input::pack(a, b);
      low = 0;
    }
  }

  // --- The window ---
  // Window plane q of the strip that begins at output row `first_row` into its place in the ring.
  template <class Parameters>
  __device__ __forceinline__ void stage(const Parameters& p, int64 n, int first_row, int q, bool looks,
                                        uint32 (&largest)[4]) const {
    constexpr int units = C::in_channels * window_rows * window_columns;
    const int i0 = q + static_cast<int>(C::base(0, 0));
    const bool has_plane = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0));
    const int row_base = first_row * static_cast<int>(C::step(1)) + static_cast<int>(C::base(1, 0));
    uint4* plane = shared.x[0] + q % planes * plane_units;
    const int left = static_cast<int>(p.batch - n < samples ? p.batch - n : samples);
    constexpr int at_once = (units + Numbers::threads - 1) / Numbers::threads < 4
                                ? (units + Numbers::threads - 1) / Numbers::threads
                                : 3;  // loads in flight: eight each
#pragma unroll 1
    for (int base = 0; base < units; base += at_once * Numbers::threads) {
      const int first = base + static_cast<int>(threadIdx.x);
      float x[at_once][samples];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int u = first + k * Numbers::threads;
        const int c = u / (window_rows * window_columns);
        const int i1 = u / window_columns % window_rows + row_base;
        const int i2 = u % window_columns + static_cast<int>(C::base(2, 0));
        const bool inside = u < units && has_plane &&
                            static_cast<unsigned>(i1) < static_cast<unsigned>(C::input_size(1)) &&
                            static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2));
        const int64 index = n * C::input_stride(0) + c * C::input_stride(1) + i0 * C::input_stride(2) +
                            i1 * C::input_stride(3) + i2 * C::input_stride(4);
#pragma unroll
        for (int s = 0; s < samples; ++s)
          x[k][s] = inside && s < left ? load_one<Input>(p.input, index + s * C::input_stride(0)) : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int u = first + k * Numbers::threads;
        if (u < units) store_unit(x[k], plane + u, largest);
        if (looks) look(x[k], u);
      }
    }
  }

  __device__ __forceinline__ void store_unit(float (&x)[samples], uint4* place, uint32 (&largest)[4]) const {
    if constexpr (splits) {
#pragma unroll
      for (int s = 0; s < samples; ++s) x[s] *= thin_input_scale;
    }
    uint32 high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) split(x[2 * j], x[2 * j + 1], high[j], low[j]);
    *place = uint4{high[0], high[1], high[2], high[3]};
    if constexpr (input_parts == 2) place[planes * plane_units] = uint4{low[0], low[1], low[2], low[3]};
    if constexpr (splits) {
#pragma unroll
      for (int j = 0; j < 4; ++j) largest[j] = larger_magnitude(largest[j], high[j]);
    }
  }

  // Remembers the channels of samples in which something reaches the least magnitude. All lanes of a warp,
  // with neighbouring units, scaled where they are the plane's: the first lane of each channel speaks for it.
  __device__ __forceinline__ void look(const float (&x)[samples], int u) const {
    if constexpr (splits) {
      constexpr int channel_units = window_rows * window_columns;
      constexpr int in_plane = C::in_channels * channel_units;
      const int lane = threadIdx.x % 32;
      const uint32 starts = __ballot_sync(0xffffffffu, lane == 0 || u % channel_units == 0);
      const uint32 later = lane == 31 ? 0u : starts >> (lane + 1);  // channels that begin after this lane
      const uint32 from_here = 0xffffffffu << lane;
      const uint32 own = later == 0 ? from_here : from_here & ((1u << (lane + __ffs(later))) - 1u);
#pragma unroll
      for (int s = 0; s < samples; ++s) {
        const uint32 large = __ballot_sync(0xffffffffu, u < in_plane && fabsf(x[s]) >= 0.5f);
        if ((starts >> lane & 1u) != 0 && u < in_plane && (large & own) != 0)
          atomicOr(&shared.seen[u / channel_units][s], 1u);
      }
    }
  }

  // Leaves for finish_samples what this tile found: word 0 of a sample where f16 overflowed (or x did), then
  // one for each channel in which something reaches the least magnitude.
  template <class Parameters>
  __device__ __forceinline__ void leave_guard(const Parameters& p, int64 n,
                                              const uint32 (&largest)[4]) const {
    if constexpr (splits) {
      constexpr int words = C::in_channels + 1;
#pragma unroll
      for (int s = 0; s < samples; ++s) {
        const uint32 half = largest[s / 2] >> (s % 2 * 16) & 0x7fffu;
        if (half >= 0x7c00u && n + s < p.batch) p.guard[(n + s) * words] = 1;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < C::in_channels * samples; i += Numbers::threads) {
        const int c = i / samples;
        const int s = i % samples;
        if (shared.seen[c][s] && n + s < p.batch) p.guard[(n + s) * words + 1 + c] = 1;
        shared.seen[c][s] = 0;
      }
    }
  }

  // Whether f16 has this channel of a sample exactly; asked where none of its elements is large.
  template <class Parameters>
  static __device__ __forceinline__ bool is_exact(const Parameters& p, int64 n, int c) {
    constexpr int elements = static_cast<int>(C::input_size(0) * C::input_size(1) * C::input_size(2));
    bool exact = true;
    for (int i = threadIdx.x % 32; i < elements; i += 32) {
      const int i2 = i % static_cast<int>(C::input_size(2));
      const int i1 = i / static_cast<int>(C::input_size(2)) % static_cast<int>(C::input_size(1));
      const int i0 = i / static_cast<int>(C::input_size(1) * C::input_size(2));
      float x =
          load_one<Input>(p.input, n * C::input_stride(0) + c * C::input_stride(1) + i0 * C::input_stride(2) +
                                       i1 * C::input_stride(3) + i2 * C::input_stride(4)) *
          thin_input_scale;
      if (input_parts == 1) x = round_to_tf32(x);
      uint32 high, low;
      split(x, 0.0f, high, low);
      float h, l, none;
      f16::unpack(high, h, none);
      f16::unpack(low, l, none);
      exact &= input_parts == 1 ? h == x : h + l == x;
    }
    return __all_sync(0xffffffffu, exact);
  }

  // By the last block of a unit, a warp for each sample: what is to be done again.
  template <class Parameters>
  __device__ __forceinline__ void finish_samples(const Parameters& p, int64 n) const {
    if constexpr (splits) {
      constexpr int words = C::in_channels + 1;
      for (int s = threadIdx.x / 32; s < samples && n + s < p.batch; s += Numbers::warps) {
        const uint32* guard = p.guard + (n + s) * words;
        bool redo = __ldcg(guard) != 0;
        for (int c = 0; c < C::in_channels && !redo; ++c) {
          if (__ldcg(guard + 1 + c) == 0) redo = !is_exact(p, n + s, c);
        }
        if (redo && threadIdx.x % 32 == 0) {
          p.only[n + s] = 1;
          atomicMax(p.only + p.batch, static_cast<uint32>(redo_some));
        }
      }
    }
  }

  // --- Products ---
  // The lane's row of the matrices that group `g` multiplies at `column` of output plane `d`, in window row
  // 0.
  __device__ __forceinline__ uint32 matrix_row(int g, int d, int column) const {
    const int lane = threadIdx.x % 32;
    const int term = g * 16 + lane % 16;
    constexpr int last = static_cast<int>(C::kernel(2));
    const int c = term / outer_taps;
    const int t0 = term % outer_taps / last;
    const int t2 = term % last;
    const int slot = (d * static_cast<int>(C::step(0)) + t0 * static_cast<int>(C::delta(0))) % planes;
    const int second = lane / 16;  // column or part
    const int own_column = (column + (columns == 2 ? second : 0)) * static_cast<int>(C::step(2)) +
                           t2 * static_cast<int>(C::delta(2));
    const int part = input_parts == 2 ? second : 0;
    const uint4* row = shared.x[0] + part * planes * plane_units + slot * plane_units +
                       c * window_rows * window_columns + own_column;
    if (terms % 16 != 0 && term >= terms) row = shared.zero;
    return shared_address(row);
  }

  // The output rows that window row `i` meets by middle tap `t`; -1 where there is none.
  static constexpr __device__ int row_met(int i, int t) {
    const int distance = i - t * static_cast<int>(C::delta(1));
    const int step = static_cast<int>(C::step(1));
    return distance >= 0 && distance % step == 0 && distance / step < rows ? distance / step : -1;
  }

  __device__ __forceinline__ void convolve(int row_tile, int d, int column,
                                           float (&total)[columns][rows][4]) const {
    constexpr bool promotes = input_parts == 2;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      uint4 a[middle_taps][weight_parts];
#pragma unroll
      for (int t = 0; t < middle_taps; ++t) {
#pragma unroll
        for (int w = 0; w < weight_parts; ++w) a[t][w] = shared.weight[row_tile][g][t][w][lane];
      }
      float part[promotes ? columns : 1][promotes ? rows : 1][4] = {};
      const uint32 address = matrix_row(g, d, column);
#pragma unroll
      for (int i = 0; i < window_rows; ++i) {
        uint32 b[4];
        load_matrices(address + i * window_columns * 16, b);
#pragma unroll
        for (int t = 0; t < middle_taps; ++t) {
          const int r = row_met(i, t);
          if (r < 0) continue;
          if constexpr (promotes) {
            multiply<f16>(part[0][r], a[t][0], b[0], b[1]);
            multiply<f16>(part[0][r], a[t][1], b[0], b[1]);
            multiply<f16>(part[0][r], a[t][0], b[2], b[3]);
          } else {
#pragma unroll
            for (int w = 0; w < weight_parts; ++w) {
#pragma unroll
              for (int k = 0; k < columns; ++k) multiply<Input>(total[k][r], a[t][w], b[2 * k], b[2 * k + 1]);
            }
          }
        }
      }
      if constexpr (promotes) {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
#pragma unroll
          for (int j = 0; j < 4; ++j) total[0][r][j] += part[0][r][j];
        }
      }
    }
  }

  // One item: `columns` columns of the strip's rows. A thread's four slots are two channels of two samples.
  template <class Epilogue, class State>
  __device__ __forceinline__ void item(const Epilogue& epilogue, State& state, int row_tile, int d,
                                       int first_row, int column, const float (&unscale)[2],
                                       const float (&bias)[2]) const {
    float total[columns][rows][4] = {};
    convolve(row_tile, d, column, total);
    float h[4][columns * rows];
    int offset[columns * rows];
    uint32 valid = 0;
#pragma unroll
    for (int k = 0; k < columns; ++k) {
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const int i = k * rows + r;
#pragma unroll
        for (int j = 0; j < 4; ++j) h[j][i] = fmaf(total[k][r][j], unscale[j / 2], bias[j / 2]);
        const int q1 = first_row + r;
        const int q2 = column + k;
        offset[i] = d * static_cast<int>(C::stride(2)) + q1 * static_cast<int>(C::stride(3)) +
                    q2 * static_cast<int>(C::stride(4));
        valid |= (q1 < C::output_size(1) && q2 < C::output_size(2) ? 1u : 0u) << i;
      }
    }
    if (valid == (1u << columns * rows) - 1) {
      epilogue.take(state, h, offset, All{});
    } else {
      epilogue.take(state, h, offset, Mask{valid});
    }
  }

  template <class Parameters, class Epilogue>
  __device__ __forceinline__ void run(const Parameters& p, int64 n, int tile, Epilogue& epilogue) const {
    constexpr int items = static_cast<int>((C::output_size(2) + columns - 1) / columns);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int first_row = tile * rows;
    uint32 largest[4] = {};
#pragma unroll 1
    for (int row_tile = 0; row_tile < row_tiles; ++row_tile) {
      int slot[4];
      bool in_range[4];
      float unscale[2], bias[2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int o = row_tile * 16 + lane / 4 + j / 2 * 8;
        const int sample = lane % 4 * 2 + j % 2;
        in_range[j] = (C::channels % 16 == 0 || o < C::channels) && n + sample < p.batch;
        slot[j] = in_range[j] ? sample * C::channels + o : 0;
        unscale[j / 2] = shared.unscale[o];
        bias[j / 2] = shared.bias[o];
      }
      auto state = epilogue.begin(slot, in_range);
      constexpr int outputs = static_cast<int>(C::output_size(0));
      constexpr int step = static_cast<int>(C::step(0));
      int staged = 0;
#pragma unroll 1
      for (int d = 0; d < outputs; ++d) {
        const int begin = d * step;
        __syncthreads();  // nobody reads the planes any more that are replaced
        for (int q = staged > begin ? staged : begin; q < begin + span; ++q)
          stage(p, n, first_row, q, d == 0, largest);
        staged = begin + span;
        __syncthreads();
#pragma unroll 1
        for (int i = warp; i < items; i += Numbers::warps)
          item(epilogue, state, row_tile, d, first_row, i * columns, unscale, bias);
      }
      epilogue.template finish<team>(state);
    }
    leave_guard(p, n, largest);
  }
};

// --------------------------------------------------------------------------------------------------
// The mainloop of a thin convolution on CUDA cores: any kernel, stride, padding, dilation, transposed or not.
//
//   y[o, q] = bias[o] + sum over input channels c of (sum over taps t  w[o, c, t] x[c, i(q, t)])
//
// A thread computes `channels_at_once` output channels of one position at a time. The weights lie in shared
// memory as f32, [chunk of channels][c][t][channel]; x comes from memory by way of the first-level cache.
// Taps that meet no input are left out of the sum.

template <class Convolution, class Tail, class Numbers>
struct CoresMainloop {
  using C = Convolution;
  static constexpr int at_once = Numbers::channels_at_once;
  static constexpr int chunks = (C::channels + at_once - 1) / at_once;
  static constexpr int samples = 1;
  static constexpr int team = 32;  // each lane has all channels of a chunk
  static constexpr int weight_floats = chunks * at_once * C::in_channels * C::taps;
  static constexpr int shared_floats = weight_floats + chunks * at_once;  // the bias

  const float* weights;  // shared

  template <class Parameters>
  static __device__ __forceinline__ void load_weights(const Parameters& p, float* weights) {
    for (int i = threadIdx.x; i < weight_floats; i += Numbers::threads) {
      const int o = i / (at_once * C::in_channels * C::taps) * at_once + i % at_once;
      const int term = i / at_once % (C::in_channels * C::taps);
      const int c = term / C::taps;
      const int t = term % C::taps;
      const int index =
          C::transposed ? (c * C::channels + o) * C::taps + t : (o * C::in_channels + c) * C::taps + t;
      float value = o < C::channels ? load_one<typename C::Weight>(p.parameter[0], index) : 0.0f;
      if constexpr (C::rounds_to_tf32) value = round_to_tf32(value);
      weights[i] = value;
    }
    for (int o = threadIdx.x; o < chunks * at_once; o += Numbers::threads) {
      float value = 0.0f;
      if constexpr (C::has_bias)
        value = o < C::channels ? load_one<typename C::Bias>(p.parameter[1], o) : 0.0f;
      weights[weight_floats + o] = value;
    }
    __syncthreads();
  }

  // The sums of `at_once` channels at one position; `sample` is where x of the sample begins, `own` the
  // chunk's weights.
  template <class Parameters>
  __device__ __forceinline__ void convolve(const Parameters& p, int64 sample, const ThinClass<C>& of_class,
                                           const int (&j)[3], const float* own, float (&sum)[at_once]) const {
    int begin[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) begin[d] = j[d] * static_cast<int>(C::step(d)) + of_class.base[d];
#pragma unroll 1
    for (int c = 0; c < C::in_channels; ++c) {
      float part[at_once] = {};
#pragma unroll 1
      for (int m0 = 0; m0 < of_class.count[0]; ++m0) {
        const int i0 = begin[0] + m0 * static_cast<int>(C::delta(0));
        if (static_cast<unsigned>(i0) >= static_cast<unsigned>(C::input_size(0))) continue;
        const int t0 = of_class.first[0] + m0 * static_cast<int>(C::tap_step(0));
#pragma unroll 1
        for (int m1 = 0; m1 < of_class.count[1]; ++m1) {
          const int i1 = begin[1] + m1 * static_cast<int>(C::delta(1));
          if (static_cast<unsigned>(i1) >= static_cast<unsigned>(C::input_size(1))) continue;
          const int t1 = of_class.first[1] + m1 * static_cast<int>(C::tap_step(1));
          const int64 row =
              sample + c * C::input_stride(1) + i0 * C::input_stride(2) + i1 * C::input_stride(3);
          const float* w = own +
                           ((c * static_cast<int>(C::kernel(0)) + t0) * static_cast<int>(C::kernel(1)) + t1) *
                               static_cast<int>(C::kernel(2)) * at_once +
                           of_class.first[2] * at_once;
#pragma unroll 4
          for (int m2 = 0; m2 < of_class.count[2]; ++m2, w += static_cast<int>(C::tap_step(2)) * at_once) {
            const int i2 = begin[2] + m2 * static_cast<int>(C::delta(2));
            if (static_cast<unsigned>(i2) >= static_cast<unsigned>(C::input_size(2))) continue;
            float x = load_one<typename Tail::Input>(p.input, row + i2 * C::input_stride(4));
            if constexpr (C::rounds_to_tf32) x = round_to_tf32(x);
#pragma unroll
            for (int k = 0; k < at_once; ++k) part[k] = fmaf(w[k], x, part[k]);
          }
        }
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) sum[k] += part[k];
    }
  }

  template <class Parameters>
  __device__ __forceinline__ void finish_samples(const Parameters&, int64) const {}

  template <class Parameters, class Epilogue>
  __device__ __forceinline__ void run(const Parameters& p, int64 n, int tile, Epilogue& epilogue) const {
    constexpr int tiles_of_class = Numbers::tiles_of_class;
    const ThinClass<C> of_class(tile / tiles_of_class);
    const int first = tile % tiles_of_class * Numbers::tile_positions;
    const int all = of_class.all_positions();
    const int last = first + Numbers::tile_positions < all ? first + Numbers::tile_positions : all;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      int slot[at_once];
      bool in_range[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        in_range[k] = C::channels % at_once == 0 || chunk * at_once + k < C::channels;
        slot[k] = in_range[k] ? chunk * at_once + k : 0;
      }
      auto rows = epilogue.begin(slot, in_range);
#pragma unroll 1
      for (int flat = first + static_cast<int>(threadIdx.x); flat < last; flat += Numbers::threads) {
        int j[3];
        of_class.split(flat, j);
        float sum[at_once] = {};
        convolve(p, n * C::input_stride(0), of_class, j, weights + chunk * at_once * C::in_channels * C::taps,
                 sum);
        float h[at_once][1];
#pragma unroll
        for (int k = 0; k < at_once; ++k) h[k][0] = sum[k] + weights[weight_floats + chunk * at_once + k];
        const int offset[1] = {of_class.output_offset(j)};
        epilogue.take(rows, h, offset, All{});
      }
      epilogue.template finish<team>(rows);
    }
  }
};

}  // namespace onepass
"""

_HOST_CODE = r"""
// Host code that all launches share. Plain pointers: nothing here knows of PyTorch.
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t clamp(int64_t value, int64_t low, int64_t high) { return std::min(std::max(value, low), high); }

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

// A kernel with the numbers of its launches. Attributes are set when a GPU first meets it.
class Kernel {
 public:
  Kernel(const char* name, const void* function, int threads, int cluster, int shared_bytes)
      : name_(name), function_(function), threads_(threads), cluster_(cluster), shared_bytes_(shared_bytes) {}

  // How many clusters (blocks, where the cluster is 1) the GPU runs at a time.
  int64_t resident(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int& count = resident_[device];
    if (count == 0) count = prepare(device);
    return count;
  }

  // `parameters` are the bytes of the kernel's one parameter.
  void launch(const void* parameters, int64_t blocks, int device, cudaStream_t stream) {
    resident(device);
    cudaLaunchAttribute attribute;
    const cudaLaunchConfig_t config = configuration(blocks, stream, attribute);
    void* arguments[] = {const_cast<void*>(parameters)};
    check(cudaLaunchKernelExC(&config, function_, arguments), name_);
    check(cudaPeekAtLastError(), name_);
  }

 private:
  cudaLaunchConfig_t configuration(int64_t blocks, cudaStream_t stream,
                                   cudaLaunchAttribute& attribute) const {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads_);
    config.dynamicSmemBytes = shared_bytes_;
    config.stream = stream;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster_;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = cluster_ > 1 ? 1 : 0;
    return config;
  }

  int prepare(int device) {
    constexpr int portable_cluster = 8;
    check(cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_), name_);
    int count = 0;
    if (cluster_ > 1) {
      if (cluster_ > portable_cluster)
        check(cudaFuncSetAttribute(function_, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name_);
      cudaLaunchAttribute attribute;
      const cudaLaunchConfig_t config = configuration(cluster_, nullptr, attribute);
      check(cudaOccupancyMaxActiveClusters(&count, function_, &config), name_);
    } else {
      int multiprocessors = 0;
      check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), name_);
      check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, function_, threads_, shared_bytes_), name_);
      count *= multiprocessors;
    }
    if (count == 0) throw std::runtime_error(std::string(name_) + ": a block does not fit this GPU");
    return count;
  }

  const char* name_;
  const void* function_;
  int threads_;
  int cluster_;
  int shared_bytes_;
  std::mutex mutex_;
  std::map<int, int> resident_;  // by GPU
};

// Kernels take one struct of eight-byte members.
template <class T>
uint64_t word(T* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
inline uint64_t word(int64_t number) { return static_cast<uint64_t>(number); }

// Elements from the last boundary of a vector to the tensor's first.
int64_t phase_of(const void* tensor, int64_t element_bytes, int64_t vector_elements) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor) / element_bytes % vector_elements);
}

struct Vectors {
  int bit;  // of the result
  const void* tensor;
  int64_t element_bytes;
  int64_t elements;
};

// A bit for each tensor whose vectors lie on their boundaries where the input's do; bit 63: all of them.
int64_t aligned_bits(std::initializer_list<Vectors> tensors, int64_t phase, bool all = true) {
  uint64_t bits = 0;
  for (const Vectors& tensor : tensors) {
    const int64_t own = phase_of(tensor.tensor, tensor.element_bytes, tensor.elements);
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.tensor) % tensor.element_bytes == 0 &&
                         own == phase % tensor.elements;
    if (aligned) bits |= uint64_t{1} << tensor.bit;
    all = all && aligned;
  }
  return static_cast<int64_t>(bits | uint64_t{all} << 63);
}

}  // namespace
"""

_KERNELS_TF32 = r"""
// ==================================================================================================
// block_1_tf32: forward
//
// conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 tf32
//
// plan: thin_samples
//   convolution: 192 terms, 2 products of 16-bit parts
//   tile: 8 samples, 5 rows, 6 tiles a unit
//   passes: 1
//   then: thin_cores for samples that f16 has no room for
// ==================================================================================================

namespace block_1_tf32_thin_samples {
namespace onepass {
using namespace ::onepass;
}

namespace onepass {

struct Before {
  static constexpr int channel_operands = 0;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::hardswish_stage::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

struct After {
  static constexpr int channel_operands = 0;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    return x0;
  }
};

// conv3d(3,16,k=4) | hardswish | group_norm(4) | mean
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 10933;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = true;
  static constexpr bool mean_follows_norm = true;
  static constexpr float eps = 9.99999975e-06f;
  template <class P>
  static __device__ __forceinline__ float weight(const P& p, int64 c) {
    return load_one<f32>(p.parameter[2], c * 1);
  }
  template <class P>
  static __device__ __forceinline__ float bias(const P& p, int64 c) {
    return load_one<f32>(p.parameter[3], c * 1);
  }
};

}  // namespace onepass

namespace onepass {
struct Convolution {
  using Weight = f32;
  using Bias = f32;
  static constexpr bool has_bias = true;
  static constexpr bool transposed = false;
  static constexpr bool rounds_to_tf32 = true;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 64;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 4ll : d == 1 ? 4ll : d == 2 ? 4ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 13ll : d == 1 ? 29ll : d == 2 ? 29ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 1 && r == 0 ? 0ll : d == 2 && r == 0 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 1 && r == 0 ? 0ll : d == 2 && r == 0 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 4ll : d == 1 && r == 0 ? 4ll : d == 2 && r == 0 ? 4ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 13ll : d == 1 && r == 0 ? 29ll : d == 2 && r == 0 ? 29ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : d == 3 ? 1ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  static constexpr int threads = 256;
  static constexpr int warps = 8;
  static constexpr int rows = 5;
  static constexpr int columns = 2;
  static constexpr int input_parts = 1;
  static constexpr int weight_parts = 2;
  static constexpr int planes = 4;
  static constexpr int window_rows = 8;
  static constexpr int window_columns = 33;
  static constexpr int plane_units = 796;
  static constexpr int tiles = 6;
  static constexpr int slots = 128;
};
using Mainloop = onepass::SamplesMainloop<onepass::Convolution, onepass::Tail, Numbers>;
using Agent = onepass::Thin<onepass::Convolution, onepass::Tail, Numbers, Mainloop>;
static_assert(sizeof(Mainloop::Shared) <= 63488);
__global__ void __launch_bounds__(256, 2) onepass_thin_samples(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Mainloop::Shared*>(bytes);
  Mainloop::load_weights(p, shared);
  Agent{p, shared.scratch(), Mainloop{shared}}.run();
}

}  // namespace block_1_tf32_thin_samples

namespace block_1_tf32_thin_cores {
namespace onepass {
using namespace ::onepass;
}

namespace onepass {

struct Before {
  static constexpr int channel_operands = 0;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::hardswish_stage::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

struct After {
  static constexpr int channel_operands = 0;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    return x0;
  }
};

// conv3d(3,16,k=4) | hardswish | group_norm(4) | mean
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 10933;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = true;
  static constexpr bool mean_follows_norm = true;
  static constexpr float eps = 9.99999975e-06f;
  template <class P>
  static __device__ __forceinline__ float weight(const P& p, int64 c) {
    return load_one<f32>(p.parameter[2], c * 1);
  }
  template <class P>
  static __device__ __forceinline__ float bias(const P& p, int64 c) {
    return load_one<f32>(p.parameter[3], c * 1);
  }
};

}  // namespace onepass

namespace onepass {
struct Convolution {
  using Weight = f32;
  using Bias = f32;
  static constexpr bool has_bias = true;
  static constexpr bool transposed = false;
  static constexpr bool rounds_to_tf32 = true;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 64;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 4ll : d == 1 ? 4ll : d == 2 ? 4ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 13ll : d == 1 ? 29ll : d == 2 ? 29ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 1 && r == 0 ? 0ll : d == 2 && r == 0 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 1 && r == 0 ? 0ll : d == 2 && r == 0 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 4ll : d == 1 && r == 0 ? 4ll : d == 2 && r == 0 ? 4ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 13ll : d == 1 && r == 0 ? 29ll : d == 2 && r == 0 ? 29ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : d == 3 ? 1ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  static constexpr int threads = 256;
  static constexpr int warps = 8;
  static constexpr int channels_at_once = 16;
  static constexpr int tile_positions = 1024;
  static constexpr int tiles_of_class = 11;
  static constexpr int tiles = 11;
  static constexpr int slots = 16;
};
using Mainloop = onepass::CoresMainloop<onepass::Convolution, onepass::Tail, Numbers>;
using Agent = onepass::Thin<onepass::Convolution, onepass::Tail, Numbers, Mainloop>;
__global__ void __launch_bounds__(256, 2) onepass_thin_cores(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ float shared[];
  if (!Agent::has_work(p)) return;
  Mainloop::load_weights(p, shared);
  Agent{p, shared + Mainloop::shared_floats, Mainloop{shared}}.run();
}

}  // namespace block_1_tf32_thin_cores
"""

_LAUNCHES_TF32 = r"""
namespace {

Kernel block_1_tf32_thin_samples_kernel("block_1_tf32_thin_samples",
    reinterpret_cast<const void*>(&block_1_tf32_thin_samples::onepass_thin_samples), 256, 1, 63488);
Kernel block_1_tf32_thin_cores_kernel("block_1_tf32_thin_cores",
    reinterpret_cast<const void*>(&block_1_tf32_thin_cores::onepass_thin_cores), 256, 1, 13888);

}  // namespace

int64_t block_1_tf32_workspace_bytes(int64_t batch, int device) {
  const int64_t offset_1 = divide_up((divide_up(batch, 8) + 1) * 16, 256) * 256;
  const int64_t offset_2 = offset_1 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 1152, 256) * 256;
  const int64_t offset_5 = offset_4 + divide_up(batch * 384, 256) * 256;
  const int64_t offset_6 = offset_5 + divide_up(batch * 32, 256) * 256;
  const int64_t offset_1_2 = divide_up((batch + 1) * 16, 256) * 256;
  const int64_t offset_2_2 = offset_1_2 + divide_up(batch * 2112, 256) * 256;
  const int64_t number = offset_6 + (offset_2_2 + divide_up(batch * 704, 256) * 256);
  return number + divide_up(batch * 32, 256) * 256;
}

void block_1_tf32(const void* input, void* output, const void* const* parameters,
                  char* workspace, int64_t batch, int device, cudaStream_t stream) {
  const int64_t resident_thin_samples = block_1_tf32_thin_samples_kernel.resident(device);
  const int64_t resident_thin_cores = block_1_tf32_thin_cores_kernel.resident(device);
  const int64_t offset_1 = divide_up((divide_up(batch, 8) + 1) * 16, 256) * 256;
  const int64_t offset_2 = offset_1 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 1152, 256) * 256;
  const int64_t offset_5 = offset_4 + divide_up(batch * 384, 256) * 256;
  const int64_t offset_6 = offset_5 + divide_up(batch * 32, 256) * 256;
  const int64_t offset_1_2 = divide_up((batch + 1) * 16, 256) * 256;
  const int64_t offset_2_2 = offset_1_2 + divide_up(batch * 2112, 256) * 256;
  const int64_t number = offset_6 + (offset_2_2 + divide_up(batch * 704, 256) * 256);
  const int64_t number_2 = divide_up(batch, 8);
  check(cudaMemsetAsync(workspace, 0, offset_3, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                 // input
        word(output),                // output
        word(workspace + offset_5),  // statistics
        word(workspace),             // control
        word(workspace + offset_3),  // parts
        word(workspace + offset_4),  // sums
        word(workspace + offset_1),  // only
        word(workspace + offset_2),  // guard
        word(batch),                 // batch
        word(clamp(divide_up(resident_thin_samples * 2, 6), 1, std::max<int64_t>(1, number_2))),  // wave_units
        word(parameters[0]),         // parameter[0]
        word(parameters[1]),         // parameter[1]
        word(parameters[2]),         // parameter[2]
        word(parameters[3]),         // parameter[3]
    };
    static_assert(sizeof words == sizeof(block_1_tf32_thin_samples::Agent::Parameters));
    const int64_t blocks = clamp(number_2 * 6, 1, resident_thin_samples);
    block_1_tf32_thin_samples_kernel.launch(words, blocks, device, stream);
  }
  check(cudaMemsetAsync(workspace + offset_6, 0, offset_1_2, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                                // input
        word(output),                               // output
        word(workspace + number),                   // statistics
        word(workspace + offset_6),                 // control
        word(workspace + (offset_6 + offset_1_2)),  // parts
        word(workspace + (offset_6 + offset_2_2)),  // sums
        word(workspace + offset_1),                 // only
        word(workspace + (offset_6 + offset_1_2)),  // guard
        word(batch),                                // batch
        word(clamp(divide_up(resident_thin_cores * 2, 11), 1, std::max<int64_t>(1, batch))),  // wave_units
        word(parameters[0]),                        // parameter[0]
        word(parameters[1]),                        // parameter[1]
        word(parameters[2]),                        // parameter[2]
        word(parameters[3]),                        // parameter[3]
    };
    static_assert(sizeof words == sizeof(block_1_tf32_thin_cores::Agent::Parameters));
    const int64_t blocks = clamp(batch * 11, 1, resident_thin_cores);
    block_1_tf32_thin_cores_kernel.launch(words, blocks, device, stream);
  }
}
"""

_KERNELS_F32 = r"""
// ==================================================================================================
// block_1_f32: forward
//
// conv3d(3,16,k=4) | hardswish | group_norm(4) | mean @ 1024x3x16x32x32 f32
//
// plan: thin_samples
//   convolution: 192 terms, 3 products of 16-bit parts
//   tile: 8 samples, 5 rows, 6 tiles a unit
//   passes: 1
//   then: thin_cores for samples that f16 has no room for
// ==================================================================================================

namespace block_1_f32_thin_samples {
namespace onepass {
using namespace ::onepass;
}

namespace onepass {

struct Before {
  static constexpr int channel_operands = 0;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::hardswish_stage::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

struct After {
  static constexpr int channel_operands = 0;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    return x0;
  }
};

// conv3d(3,16,k=4) | hardswish | group_norm(4) | mean
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 10933;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = true;
  static constexpr bool mean_follows_norm = true;
  static constexpr float eps = 9.99999975e-06f;
  template <class P>
  static __device__ __forceinline__ float weight(const P& p, int64 c) {
    return load_one<f32>(p.parameter[2], c * 1);
  }
  template <class P>
  static __device__ __forceinline__ float bias(const P& p, int64 c) {
    return load_one<f32>(p.parameter[3], c * 1);
  }
};

}  // namespace onepass

namespace onepass {
struct Convolution {
  using Weight = f32;
  using Bias = f32;
  static constexpr bool has_bias = true;
  static constexpr bool transposed = false;
  static constexpr bool rounds_to_tf32 = false;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 64;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 4ll : d == 1 ? 4ll : d == 2 ? 4ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 13ll : d == 1 ? 29ll : d == 2 ? 29ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 1 && r == 0 ? 0ll : d == 2 && r == 0 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 1 && r == 0 ? 0ll : d == 2 && r == 0 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 4ll : d == 1 && r == 0 ? 4ll : d == 2 && r == 0 ? 4ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 13ll : d == 1 && r == 0 ? 29ll : d == 2 && r == 0 ? 29ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : d == 3 ? 1ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  static constexpr int threads = 256;
  static constexpr int warps = 8;
  static constexpr int rows = 5;
  static constexpr int columns = 1;
  static constexpr int input_parts = 2;
  static constexpr int weight_parts = 2;
  static constexpr int planes = 4;
  static constexpr int window_rows = 8;
  static constexpr int window_columns = 32;
  static constexpr int plane_units = 772;
  static constexpr int tiles = 6;
  static constexpr int slots = 128;
};
using Mainloop = onepass::SamplesMainloop<onepass::Convolution, onepass::Tail, Numbers>;
using Agent = onepass::Thin<onepass::Convolution, onepass::Tail, Numbers, Mainloop>;
static_assert(sizeof(Mainloop::Shared) <= 111360);
__global__ void __launch_bounds__(256, 2) onepass_thin_samples(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Mainloop::Shared*>(bytes);
  Mainloop::load_weights(p, shared);
  Agent{p, shared.scratch(), Mainloop{shared}}.run();
}

}  // namespace block_1_f32_thin_samples

namespace block_1_f32_thin_cores {
namespace onepass {
using namespace ::onepass;
}

namespace onepass {

struct Before {
  static constexpr int channel_operands = 0;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    const float x1 = pointwise::hardswish_stage::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

struct After {
  static constexpr int channel_operands = 0;
  template <class P>
  static __device__ __forceinline__ void load_channel(const P& p, int64 n, int64 c, float* value) {
  }
  template <int Width>
  struct Tensors {
    template <class P>
    __device__ __forceinline__ void load(const P& p, int64 index) {
    }
  };
  template <int Width>
  static __device__ __forceinline__ float value(float x0, const float* channel, const Tensors<Width>& t, int k) {
    return x0;
  }
};

// conv3d(3,16,k=4) | hardswish | group_norm(4) | mean
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 10933;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = true;
  static constexpr bool mean_follows_norm = true;
  static constexpr float eps = 9.99999975e-06f;
  template <class P>
  static __device__ __forceinline__ float weight(const P& p, int64 c) {
    return load_one<f32>(p.parameter[2], c * 1);
  }
  template <class P>
  static __device__ __forceinline__ float bias(const P& p, int64 c) {
    return load_one<f32>(p.parameter[3], c * 1);
  }
};

}  // namespace onepass

namespace onepass {
struct Convolution {
  using Weight = f32;
  using Bias = f32;
  static constexpr bool has_bias = true;
  static constexpr bool transposed = false;
  static constexpr bool rounds_to_tf32 = false;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 64;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 4ll : d == 1 ? 4ll : d == 2 ? 4ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 13ll : d == 1 ? 29ll : d == 2 ? 29ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 1 && r == 0 ? 0ll : d == 2 && r == 0 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 1 && r == 0 ? 0ll : d == 2 && r == 0 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 4ll : d == 1 && r == 0 ? 4ll : d == 2 && r == 0 ? 4ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 13ll : d == 1 && r == 0 ? 29ll : d == 2 && r == 0 ? 29ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : d == 3 ? 1ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  static constexpr int threads = 256;
  static constexpr int warps = 8;
  static constexpr int channels_at_once = 16;
  static constexpr int tile_positions = 1024;
  static constexpr int tiles_of_class = 11;
  static constexpr int tiles = 11;
  static constexpr int slots = 16;
};
using Mainloop = onepass::CoresMainloop<onepass::Convolution, onepass::Tail, Numbers>;
using Agent = onepass::Thin<onepass::Convolution, onepass::Tail, Numbers, Mainloop>;
__global__ void __launch_bounds__(256, 2) onepass_thin_cores(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ float shared[];
  if (!Agent::has_work(p)) return;
  Mainloop::load_weights(p, shared);
  Agent{p, shared + Mainloop::shared_floats, Mainloop{shared}}.run();
}

}  // namespace block_1_f32_thin_cores
"""

_LAUNCHES_F32 = r"""
namespace {

Kernel block_1_f32_thin_samples_kernel("block_1_f32_thin_samples",
    reinterpret_cast<const void*>(&block_1_f32_thin_samples::onepass_thin_samples), 256, 1, 111360);
Kernel block_1_f32_thin_cores_kernel("block_1_f32_thin_cores",
    reinterpret_cast<const void*>(&block_1_f32_thin_cores::onepass_thin_cores), 256, 1, 13888);

}  // namespace

int64_t block_1_f32_workspace_bytes(int64_t batch, int device) {
  const int64_t offset_1 = divide_up((divide_up(batch, 8) + 1) * 16, 256) * 256;
  const int64_t offset_2 = offset_1 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 1152, 256) * 256;
  const int64_t offset_5 = offset_4 + divide_up(batch * 384, 256) * 256;
  const int64_t offset_6 = offset_5 + divide_up(batch * 32, 256) * 256;
  const int64_t offset_1_2 = divide_up((batch + 1) * 16, 256) * 256;
  const int64_t offset_2_2 = offset_1_2 + divide_up(batch * 2112, 256) * 256;
  const int64_t number = offset_6 + (offset_2_2 + divide_up(batch * 704, 256) * 256);
  return number + divide_up(batch * 32, 256) * 256;
}

void block_1_f32(const void* input, void* output, const void* const* parameters,
                 char* workspace, int64_t batch, int device, cudaStream_t stream) {
  const int64_t resident_thin_samples = block_1_f32_thin_samples_kernel.resident(device);
  const int64_t resident_thin_cores = block_1_f32_thin_cores_kernel.resident(device);
  const int64_t offset_1 = divide_up((divide_up(batch, 8) + 1) * 16, 256) * 256;
  const int64_t offset_2 = offset_1 + divide_up((batch + 1) * 4, 256) * 256;
  const int64_t offset_3 = offset_2 + divide_up(batch * 16, 256) * 256;
  const int64_t offset_4 = offset_3 + divide_up(batch * 1152, 256) * 256;
  const int64_t offset_5 = offset_4 + divide_up(batch * 384, 256) * 256;
  const int64_t offset_6 = offset_5 + divide_up(batch * 32, 256) * 256;
  const int64_t offset_1_2 = divide_up((batch + 1) * 16, 256) * 256;
  const int64_t offset_2_2 = offset_1_2 + divide_up(batch * 2112, 256) * 256;
  const int64_t number = offset_6 + (offset_2_2 + divide_up(batch * 704, 256) * 256);
  const int64_t number_2 = divide_up(batch, 8);
  check(cudaMemsetAsync(workspace, 0, offset_3, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                 // input
        word(output),                // output
        word(workspace + offset_5),  // statistics
        word(workspace),             // control
        word(workspace + offset_3),  // parts
        word(workspace + offset_4),  // sums
        word(workspace + offset_1),  // only
        word(workspace + offset_2),  // guard
        word(batch),                 // batch
        word(clamp(divide_up(resident_thin_samples * 2, 6), 1, std::max<int64_t>(1, number_2))),  // wave_units
        word(parameters[0]),         // parameter[0]
        word(parameters[1]),         // parameter[1]
        word(parameters[2]),         // parameter[2]
        word(parameters[3]),         // parameter[3]
    };
    static_assert(sizeof words == sizeof(block_1_f32_thin_samples::Agent::Parameters));
    const int64_t blocks = clamp(number_2 * 6, 1, resident_thin_samples);
    block_1_f32_thin_samples_kernel.launch(words, blocks, device, stream);
  }
  check(cudaMemsetAsync(workspace + offset_6, 0, offset_1_2, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                                // input
        word(output),                               // output
        word(workspace + number),                   // statistics
        word(workspace + offset_6),                 // control
        word(workspace + (offset_6 + offset_1_2)),  // parts
        word(workspace + (offset_6 + offset_2_2)),  // sums
        word(workspace + offset_1),                 // only
        word(workspace + (offset_6 + offset_1_2)),  // guard
        word(batch),                                // batch
        word(clamp(divide_up(resident_thin_cores * 2, 11), 1, std::max<int64_t>(1, batch))),  // wave_units
        word(parameters[0]),                        // parameter[0]
        word(parameters[1]),                        // parameter[1]
        word(parameters[2]),                        // parameter[2]
        word(parameters[3]),                        // parameter[3]
    };
    static_assert(sizeof words == sizeof(block_1_f32_thin_cores::Agent::Parameters));
    const int64_t blocks = clamp(batch * 11, 1, resident_thin_cores);
    block_1_f32_thin_cores_kernel.launch(words, blocks, device, stream);
  }
}
"""

_BINDING_TF32 = r"""
// What PyTorch calls: checks, memory from its allocator, its current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <string>
#include <tuple>
#include <vector>

int64_t block_1_tf32_workspace_bytes(int64_t batch, int device);
void block_1_tf32(const void* input, void* output, const void* const* parameters,
                  char* workspace, int64_t batch, int device, cudaStream_t stream);

namespace {

constexpr int64_t any = -1;  // the batch

void check_tensor(const char* op, const char* what, const at::Tensor& tensor, at::IntArrayRef sizes,
                  at::ScalarType type, at::MemoryFormat format, const at::Device& device) {
  bool fits = tensor.device() == device && tensor.scalar_type() == type &&
              tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous(format);
  for (size_t d = 0; fits && d < sizes.size(); ++d) fits = sizes[d] == any || tensor.size(d) == sizes[d];
  TORCH_CHECK(fits, op, ": ", what, " must be a dense ", type, " tensor on ", device, " of sizes ", sizes,
              " (-1: any), is ", tensor.scalar_type(), " on ", tensor.device(), " of sizes ", tensor.sizes(),
              " and strides ", tensor.strides());
}

void check_cuda(const char* op, const at::Tensor& input) {
  TORCH_CHECK(input.is_cuda(), op, ": the input must be on a GPU, is on ", input.device());
}

at::Tensor run_block_1_tf32(const at::Tensor& input, at::TensorList parameters) {
  check_cuda("block_1_tf32", input);
  check_tensor("block_1_tf32", "the input", input, {any, 3, 16, 32, 32}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  TORCH_CHECK(parameters.size() == 4, "block_1_tf32: takes 4 parameters, got ", parameters.size());
  check_tensor("block_1_tf32", "parameter 0", parameters[0], {16, 3, 4, 4, 4}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32", "parameter 1", parameters[1], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32", "parameter 2", parameters[2], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_tf32", "parameter 3", parameters[3], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  std::array<const void*, 4> addresses{};
  for (size_t i = 0; i < 4; ++i) addresses[i] = parameters[i].const_data_ptr();
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t batch = input.size(0);
  at::Tensor output = at::empty({batch, 16}, input.options());
  if (batch == 0) return output;
  const int device = input.device().index();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const int64_t workspace_bytes = block_1_tf32_workspace_bytes(batch, device);
  const at::Tensor workspace = at::empty({workspace_bytes}, input.options().dtype(at::kByte));
  block_1_tf32(input.const_data_ptr(), output.mutable_data_ptr(), addresses.data(),
               static_cast<char*>(workspace.mutable_data_ptr()), batch, device, stream);
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(onepass_s27_1d484c41, CUDA, library) {
  library.impl("block_1_tf32", run_block_1_tf32);
}
"""

_BINDING_F32 = r"""
// What PyTorch calls: checks, memory from its allocator, its current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <initializer_list>
#include <string>
#include <tuple>
#include <vector>

int64_t block_1_f32_workspace_bytes(int64_t batch, int device);
void block_1_f32(const void* input, void* output, const void* const* parameters,
                 char* workspace, int64_t batch, int device, cudaStream_t stream);

namespace {

constexpr int64_t any = -1;  // the batch

void check_tensor(const char* op, const char* what, const at::Tensor& tensor, at::IntArrayRef sizes,
                  at::ScalarType type, at::MemoryFormat format, const at::Device& device) {
  bool fits = tensor.device() == device && tensor.scalar_type() == type &&
              tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.is_contiguous(format);
  for (size_t d = 0; fits && d < sizes.size(); ++d) fits = sizes[d] == any || tensor.size(d) == sizes[d];
  TORCH_CHECK(fits, op, ": ", what, " must be a dense ", type, " tensor on ", device, " of sizes ", sizes,
              " (-1: any), is ", tensor.scalar_type(), " on ", tensor.device(), " of sizes ", tensor.sizes(),
              " and strides ", tensor.strides());
}

void check_cuda(const char* op, const at::Tensor& input) {
  TORCH_CHECK(input.is_cuda(), op, ": the input must be on a GPU, is on ", input.device());
}

at::Tensor run_block_1_f32(const at::Tensor& input, at::TensorList parameters) {
  check_cuda("block_1_f32", input);
  check_tensor("block_1_f32", "the input", input, {any, 3, 16, 32, 32}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  TORCH_CHECK(parameters.size() == 4, "block_1_f32: takes 4 parameters, got ", parameters.size());
  check_tensor("block_1_f32", "parameter 0", parameters[0], {16, 3, 4, 4, 4}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_f32", "parameter 1", parameters[1], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_f32", "parameter 2", parameters[2], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  check_tensor("block_1_f32", "parameter 3", parameters[3], {16}, at::kFloat,
               at::MemoryFormat::Contiguous, input.device());
  std::array<const void*, 4> addresses{};
  for (size_t i = 0; i < 4; ++i) addresses[i] = parameters[i].const_data_ptr();
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t batch = input.size(0);
  at::Tensor output = at::empty({batch, 16}, input.options());
  if (batch == 0) return output;
  const int device = input.device().index();
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  const int64_t workspace_bytes = block_1_f32_workspace_bytes(batch, device);
  const at::Tensor workspace = at::empty({workspace_bytes}, input.options().dtype(at::kByte));
  block_1_f32(input.const_data_ptr(), output.mutable_data_ptr(), addresses.data(),
              static_cast<char*>(workspace.mutable_data_ptr()), batch, device, stream);
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(onepass_s27_1d484c41, CUDA, library) {
  library.impl("block_1_f32", run_block_1_f32);
}
"""

_NAMESPACE = "onepass_s27_1d484c41"
# What each extension is built of, when one of its operators is first called.
_EXTENSIONS = {
    "tf32": (_BINDING_TF32, [_CUDA_HEAD, _DEVICE_CODE, _KERNELS_TF32, _HOST_CODE, _LAUNCHES_TF32]),
    "f32": (_BINDING_F32, [_CUDA_HEAD, _DEVICE_CODE, _KERNELS_F32, _HOST_CODE, _LAUNCHES_F32]),
}
_OPERATORS = {  # name: (extension, schema)
    "block_1_tf32": ("tf32", "block_1_tf32(Tensor input, Tensor[] parameters) -> Tensor"),
    "block_1_f32": ("f32", "block_1_f32(Tensor input, Tensor[] parameters) -> Tensor"),
}
# What each takes: type, sizes after the batch, order in memory; the same of its parameters.
_FITTING = {
    "block_1_tf32": (torch.float32, (3, 16, 32, 32), torch.contiguous_format, [
        ((16, 3, 4, 4, 4), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
    ]),
    "block_1_f32": (torch.float32, (3, 16, 32, 32), torch.contiguous_format, [
        ((16, 3, 4, 4, 4), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
    ]),
}
_NVCC = ["-O3", "-gencode=arch=compute_90a,code=sm_90a"]


def _fake_block_1_tf32(input, parameters):
    return torch.empty((input.shape[0], 16), dtype=input.dtype, device=input.device)

def _fake_block_1_f32(input, parameters):
    return torch.empty((input.shape[0], 16), dtype=input.dtype, device=input.device)


_building = threading.RLock()
_stubs = {}  # of each extension that is not built yet: registrations that build it


def _build(extension):
    """Compiles and loads an extension, which registers its operators for CUDA."""
    with _building:
        stub = _stubs.pop(extension, None)
        if stub is None:
            return
        stub._destroy()
        binding, cuda = _EXTENSIONS[extension]
        torch.utils.cpp_extension.load_inline(
            name=f"{_NAMESPACE}_{extension}",
            cpp_sources=[binding],
            cuda_sources=list(cuda),
            extra_cuda_cflags=_NVCC,
            is_python_module=False,
            no_implicit_headers=True,
        )


def _register():
    """Declares the operators, which torch.compile then knows; the first call of one builds its extension."""
    namespace = getattr(torch.ops, _NAMESPACE)
    if hasattr(namespace, "exported"):  # the same file, imported under another name
        return
    namespace.exported = library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # kept
    for name, (extension, schema) in _OPERATORS.items():
        library.define(schema)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", globals()[f"_fake_{name}"], lib=library)
        if extension not in _stubs:
            _stubs[extension] = torch.library.Library(_NAMESPACE, "IMPL", "CUDA")

        def build_and_run(*args, _name=name, _extension=extension):
            _build(_extension)
            return getattr(getattr(torch.ops, _NAMESPACE), _name)(*args)

        _stubs[extension].impl(name, build_and_run)


_register()


# ----------------------------------------------------------------------------------------------------
# When a kernel runs: every other call runs the original code.


_capabilities = {}  # of GPUs, by index


@torch.compiler.assume_constant_result
def _is_built_for(device):
    if device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities[device] == (9, 0)


@torch.compiler.assume_constant_result
def _rounds_to_tf32():
    """PyTorch's switch for convolutions at the call; torch.compile keeps what it is at the trace."""
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


def _wants_gradients(x, parameters):
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))


def _fits(name, x, parameters):
    """Whether these are tensors of the type, the sizes and the order in memory that the kernel is for."""
    dtype, sizes, memory_format, wanted = _FITTING[name]
    if not x.is_cuda or x.dtype != dtype or x.shape[1:] != sizes or torch.is_autocast_enabled("cuda"):
        return False
    if not x.is_contiguous(memory_format=memory_format) or not _is_built_for(x.device.index):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    for parameter, (shape, order) in zip(parameters, wanted):
        first = x.shape[:1] if shape[:1] == (-1,) else shape[:1]
        if parameter.shape[:1] != first or parameter.shape[1:] != shape[1:] or parameter.dtype != dtype:
            return False
        if parameter.device != x.device or not parameter.is_contiguous(memory_format=order):
            return False
    return True


def _is_as_specialised(model):
    """Whether the model's modules are what the kernels were written for."""
    for path, (text, flags) in _SPECIALISED.items():
        try:
            module = model.get_submodule(path)
        except AttributeError:
            return False
        if text and f"{type(module).__name__}({module.extra_repr()})" != text:
            return False
        if any(getattr(module, name, None) != value for name, value in flags.items()):
            return False
    return True

def _run_1(self, x):
    """conv3d(3,16,k=4) | hardswish | group_norm(4) | mean"""
    parameters = [self.conv.weight, self.conv.bias, self.group_norm.weight, self.group_norm.bias]
    if not _wants_gradients(x, parameters):
        if _rounds_to_tf32() and _fits("block_1_tf32", x, parameters):
            return torch.ops.onepass_s27_1d484c41.block_1_tf32(x, parameters)
        if not _rounds_to_tf32() and _fits("block_1_f32", x, parameters):
            return torch.ops.onepass_s27_1d484c41.block_1_f32(x, parameters)
    conv = self.conv(x)
    hardswish = torch.nn.functional.hardswish(conv, inplace = False)
    group_norm = self.group_norm(hardswish)
    return torch.mean(group_norm, dim = [2, 3, 4])

# What the kernels were written for: another model of the class runs as it was.
_SPECIALISED = {
    'conv': ('Conv3d(3, 16, kernel_size=(4, 4, 4), stride=(1, 1, 1))', {}),
    'group_norm': ('GroupNorm(4, 16, eps=1e-05, affine=True)', {}),
}


class ModelNew(Model):
    """Model with its block in one pass over memory: same parameters, same results."""

    @functools.wraps(Model.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._fused = _is_as_specialised(self)

    def forward(self, x):
        if not self._fused:
            return super().forward(x)
        return _run_1(self, x)
