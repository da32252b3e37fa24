# ModelNew: the Model of s60.py, fused for sm_90a by onepass 0.1.0:
#   python -m onepass export s60.py -o s60.py --arch sm_90a
# It needs PyTorch and a CUDA toolkit: load_inline builds the kernels at the first call on a GPU.
#   block_1_tf32: thin_mma, conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
#   block_1_f32: thin_mma, conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
#
# The original file follows, then the kernels, then ModelNew at the end.

"""Workload s60: ConvTranspose3d -> Swish -> GroupNorm -> HardSwish."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, groups, eps, bias=True):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=bias
        )
        self.group_norm = nn.GroupNorm(num_groups=groups, num_channels=out_channels, eps=eps)

    def forward(self, x):
        x = self.conv_transpose(x)
        x = torch.sigmoid(x) * x
        x = self.group_norm(x)
        return F.hardswish(x)


batch_size, in_channels, out_channels = 128, 3, 16
depth, height, width = 16, 32, 32
kernel_size, stride, padding, groups, eps = 3, 2, 1, 4, 1e-5


def get_inputs():
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, stride, padding, groups, eps]


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
using uint64 = unsigned long long;

// Element types: how wide, and how 32 bits of storage become floats and back. Halves go in pairs.
struct f32 {
  static constexpr int bytes = 4;
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

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float sigmoid(float x) {
  return reciprocal_fast(1.0f + exp2_fast(x * -1.4426950408889634f));
}

// NaN in the first operand comes out.
__device__ __forceinline__ float maximum(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float ramp(float x) { return __saturatef(fmaf(x, 1.0f / 6.0f, 0.5f)); }

struct swish_stage {
  static __device__ __forceinline__ float value(float x, float p, float a, float b) {
    return x * sigmoid(x);
  }
};

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

// Lets blocks that wait for the flag go on: all this block wrote is visible to them.
__device__ __forceinline__ void publish(uint32* flag, uint32 value) {
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

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

// --------------------------------------------------------------------------------------------------
// A thin convolution and its chains and norm in one launch, by tensor cores, each output computed twice.
//
//   pass 1   x -> convolution -> before-chain -> moments of a tile; the last tile of a sample merges them
//   pass 2   x -> convolution -> before-chain -> norm -> after-chain -> y
//
// A *cell* is one output position of every class (thin.h). A tile is one plane of cells, `tile_y` rows and
// `tile_x` cells of each. Its window of x lies in shared memory, four channels of a position side by side. A
// warp's item is 8 or 16 neighbouring cells: products of M = 16 output channels, N = 8 cells and K = twice
// (a tap, four input channels), of each class only its own taps. A lane then holds neighbours of a row in all
// its classes: rows are put together in shared memory, each with the 16-byte phase of where it goes, and
// leave in pieces of many rows.
//
// Work is taken by ticket: pass 1 of one tile, then pass 2 of the tile `lag` tickets before, so that stores
// run beside arithmetic at all times. Moves x twice (the second time from the second-level cache), y once.
//
// Products of tf32 operands are exact. Operands of 16 bits are tf32 numbers; f32 ones are rounded to it in
// that mode, and else split into two, which leaves 2^-22 of a term. Tiles with an element that is not finite,
// or so large that what follows might overflow, are summed term by term instead ("careful").

template <int Value>
struct Constant {
  static constexpr int value = Value;
  constexpr __device__ operator int() const { return Value; }
};

// body(Constant<0>{}), ..., body(Constant<Count - 1>{}).
template <int Count, int First = 0, class Body>
__device__ __forceinline__ void for_constant(Body&& body) {
  if constexpr (First < Count) {
    body(Constant<First>{});
    for_constant<Count, First + 1>(body);
  }
}

// D = A B + C, A 16 x 8 (or 16 x 4) of tf32 by rows, B by columns.
__device__ __forceinline__ void mma_k8(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                                       const float* c) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
}

__device__ __forceinline__ void mma_k4(float (&d)[4], const uint32 (&a)[4], uint32 b0, const float* c) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %8, %9, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The terms of each class, in pairs: what the products of one warp are.
template <class C>
struct ThinTerms {
  static constexpr int vectors = (C::in_channels + 3) / 4;  // of four input channels

  struct Term {
    int z, y, x;  // of the window, from the cell's first position
    int tap;
    int vector;
  };
  static constexpr __device__ int classes(int d) { return static_cast<int>(C::classes(d)); }
  static constexpr __device__ int count(int d, int r) { return static_cast<int>(C::count(d, r)); }
  static constexpr __device__ int offset(int d, int r, int m) {
    return static_cast<int>(C::base(d, r) + m * C::delta(d));
  }
  static constexpr __device__ int tap(int d, int r, int m) {
    return static_cast<int>(C::first(d, r) + m * C::tap_step(d));
  }
  // The lowest offset of all classes, and how far it is to the highest.
  static constexpr __device__ int low(int d) {
    int least = 1 << 30;
    for (int r = 0; r < classes(d); ++r) {
      for (int m = 0; m < count(d, r); ++m) least = offset(d, r, m) < least ? offset(d, r, m) : least;
    }
    return least == 1 << 30 ? 0 : least;
  }
  static constexpr __device__ int reach(int d) {
    int most = low(d);
    for (int r = 0; r < classes(d); ++r) {
      for (int m = 0; m < count(d, r); ++m) most = offset(d, r, m) > most ? offset(d, r, m) : most;
    }
    return most - low(d);
  }
  static constexpr __device__ int terms(int rz, int ry, int rx) {
    return count(0, rz) * count(1, ry) * count(2, rx) * vectors;
  }
  static constexpr __device__ Term term(int rz, int ry, int rx, int i) {
    const int vector = i % vectors;
    const int x = i / vectors % count(2, rx);
    const int y = i / vectors / count(2, rx) % count(1, ry);
    const int z = i / vectors / count(2, rx) / count(1, ry);
    return {
        offset(0, rz, z) - low(0), offset(1, ry, y) - low(1), offset(2, rx, x) - low(2),
        (tap(0, rz, z) * static_cast<int>(C::kernel(1)) + tap(1, ry, y)) * static_cast<int>(C::kernel(2)) +
            tap(2, rx, x),
        vector};
  }
  // Products of all classes before this one.
  static constexpr __device__ int products_before(int rz, int ry, int rx) {
    int sum = 0;
    for (int i = 0; i < (rz * classes(1) + ry) * classes(2) + rx; ++i) {
      sum += (terms(i / (classes(1) * classes(2)), i / classes(2) % classes(1), i % classes(2)) + 1) / 2;
    }
    return sum;
  }
  static constexpr int products = products_before(classes(0), 0, 0);
};

// The bits of an element.
template <int Bytes>
struct Bits {
  using Type = uint32;
};

template <>
struct Bits<2> {
  using Type = uint16;
};

template <class C, class Tail, class Numbers>
struct ThinMma {
  using Parameters = ThinParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Output = typename Tail::Output;
  using Terms = ThinTerms<C>;
  using Term = typename Terms::Term;

  static constexpr int threads = Numbers::threads;
  static constexpr int warps = Numbers::warps;
  static constexpr int channels = C::channels;
  static constexpr int row_tiles = (channels + 15) / 16;
  static constexpr int vectors = Terms::vectors;
  static constexpr int products = Terms::products;
  static constexpr int groups = channels / Tail::group_channels;
  static constexpr int classes_z = Terms::classes(0);
  static constexpr int classes_y = Terms::classes(1);
  static constexpr int classes_x = Terms::classes(2);
  static constexpr int out_z = static_cast<int>(C::output_size(0));
  static constexpr int out_y = static_cast<int>(C::output_size(1));
  static constexpr int out_x = static_cast<int>(C::output_size(2));
  static constexpr int cells_y = (out_y + classes_y - 1) / classes_y;
  static constexpr int tile_y = Numbers::tile_y;
  static constexpr int tile_x = Numbers::tile_x;
  static constexpr int spans = Numbers::spans;  // of 8 cells in an item
  static constexpr int columns = tile_x / (8 * spans);
  static constexpr int window_y = Numbers::window_y;
  static constexpr int window_x = Numbers::window_x;
  static constexpr int window = Numbers::window_z * window_y * window_x;  // positions
  static constexpr bool in_registers = Numbers::weights_in_registers;
  static constexpr bool splits = Numbers::splits;
  // In shared memory: the weights, unless they are in registers, then their rests, where they are split.
  static constexpr int first_rest = in_registers ? 0 : products * row_tiles;
  static constexpr int shared_weights = first_rest + (splits ? products * row_tiles : 0);

  // Rows on their way out: `stage_y` rows of cells at a time. A chunk is what is contiguous in the output:
  // all rows of a plane where a tile has whole rows, else one row.
  static constexpr int stage_rows = Numbers::stage_y * classes_y;
  static constexpr bool whole_rows = Numbers::tiles_x == 1;
  static constexpr int row_pitch = whole_rows ? out_x : Numbers::chunk_pitch;
  static constexpr int chunks_of_plane = whole_rows ? 1 : stage_rows;
  static constexpr int plane_pitch = Numbers::chunk_pitch * chunks_of_plane;
  static constexpr int channel_pitch = Numbers::channel_pitch;
  static constexpr int chunks = channels * classes_z * chunks_of_plane;
  static constexpr int width = 16 / Output::bytes;

  struct alignas(16) Shared {
    alignas(16) unsigned char stage[2][Numbers::stage_bytes];
    float4 x[vectors * window];
    uint32 weights[shared_weights > 0 ? shared_weights : 1][32][4];
    float moments[warps][row_tiles * 16][3];
    uint32 ticket;
  };
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);

  const Parameters& p;
  Shared& s;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int quad = lane / 4;  // of a product: the output channel, and that 8 further
  const int in_quad = lane % 4;

  struct Tile {
    int64 n;
    int index;    // within the sample
    int z, y, x;  // its first cell

    explicit __device__ __forceinline__ Tile(int64 i)
        : n(i / Numbers::tiles),
          index(static_cast<int>(i % Numbers::tiles)),
          z(index / (Numbers::tiles_x * Numbers::tiles_y)),
          y(index / Numbers::tiles_x % Numbers::tiles_y * tile_y),
          x(index % Numbers::tiles_x * tile_x) {}
  };

  template <class Body>
  static __device__ __forceinline__ void for_each_class(Body&& body) {
    for_constant<classes_z>([&](auto rz) {
      for_constant<classes_y>([&](auto ry) { for_constant<classes_x>([&](auto rx) { body(rz, ry, rx); }); });
    });
  }

  // --- Weights, as the products take them ---
  struct Weights {
    uint32 a[in_registers ? products * row_tiles : 1][4];
    float bias[row_tiles][4];  // as sums lie: two cells of a channel, two of that 8 further
  };

  static __device__ __forceinline__ float weight(const Parameters& p, int channel, int input, int tap) {
    if (channel >= channels || input >= C::in_channels) return 0.0f;
    const int index = C::transposed ? (input * channels + channel) * C::taps + tap
                                    : (channel * C::in_channels + input) * C::taps + tap;
    return load_one<typename C::Weight>(p.parameter[0], index);
  }
  static __device__ __forceinline__ float bias(const Parameters& p, int channel) {
    if constexpr (C::has_bias) return load_one<typename C::Bias>(p.parameter[1], channel);
    return 0.0f;
  }

  // A multiplicand as the tensor core takes it; the rest of it where it is split.
  static __device__ __forceinline__ uint32 operand(float x) {
    return __float_as_uint(C::rounds_to_tf32 || splits ? round_to_tf32(x) : x);
  }
  static __device__ __forceinline__ uint32 rest(float x) {
    return __float_as_uint(round_to_tf32(x - round_to_tf32(x)));
  }

  __device__ __forceinline__ void load_weights(Weights& w) const {
    for_each_class([&](auto rz_, auto ry_, auto rx_) {
      constexpr int rz = decltype(rz_)::value;
      constexpr int ry = decltype(ry_)::value;
      constexpr int rx = decltype(rx_)::value;
      constexpr int first = Terms::products_before(rz, ry, rx);
      for_constant<Terms::terms(rz, ry, rx)>([&](auto i_) {
        constexpr int i = decltype(i_)::value;
        constexpr Term t = Terms::term(rz, ry, rx, i);
        constexpr int place = i % 2 * 2;
        if constexpr (in_registers) {
          for_constant<2 * row_tiles>([&](auto half_) {
            constexpr int half = decltype(half_)::value;
            w.a[(first + i / 2) * row_tiles + half / 2][place + half % 2] =
                operand(weight(p, half * 8 + quad, t.vector * 4 + in_quad, t.tap));
          });
        }
        if (shared_weights > 0 && i % warps == warp) {
#pragma unroll 1
          for (int half = 0; half < 2 * row_tiles; ++half) {
            const float value = weight(p, half * 8 + quad, t.vector * 4 + in_quad, t.tap);
            const int to = (first + i / 2) * row_tiles + half / 2;
            if constexpr (!in_registers) s.weights[to][lane][place + half % 2] = operand(value);
            if constexpr (splits) s.weights[first_rest + to][lane][place + half % 2] = rest(value);
          }
        }
      });
    });
#pragma unroll
    for (int half = 0; half < 2 * row_tiles; ++half) {
      const int channel = half * 8 + quad;
      const float value = channel < channels ? bias(p, channel) : 0.0f;
      // The first product takes four registers in a row. Of two equal ones the compiler would keep one and
      // copy it for each product, one instruction an output; it does not know that the neighbour's is equal.
      w.bias[half / 2][half % 2 * 2] = value;
      w.bias[half / 2][half % 2 * 2 + 1] = __shfl_xor_sync(0xffffffffu, value, 1);
    }
    __syncthreads();
  }

  template <bool of_rest>
  __device__ __forceinline__ void take_weights(uint32 (&a)[4], const Weights& w, int index) const {
    if constexpr (in_registers && !of_rest) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = w.a[index][i];
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(s.weights[(of_rest ? first_rest : 0) + index][lane]);
      a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
  }

  // --- The largest |x| for which no tile needs care; NaN where a weight is not finite ---
  __device__ __forceinline__ float input_limit() const {
    constexpr float most = 1e30f;  // of a sum
    float largest = 0.0f;          // sum of a channel's |w|; NaN stays
    for (int channel = warp; channel < channels; channel += warps) {
      float sum = 0.0f;
      for (int i = lane; i < C::in_channels * C::taps; i += 32)
        sum += fabsf(weight(p, channel, i / C::taps, i % C::taps));
      largest = pointwise::maximum(lanes_sum<32>(sum), largest);
    }
    if (lane == 0) s.moments[warp][0][0] = largest;
    __syncthreads();
    for (int i = 0; i < warps; ++i) largest = pointwise::maximum(s.moments[i][0][0], largest);
    __syncthreads();
    return largest <= most ? most / pointwise::maximum(largest, 1.0f) : __int_as_float(0x7fffffff);
  }

  // --- The window of x ---
  // Whether the tile needs care.
  __device__ __forceinline__ bool load_window(const Tile& tile, float limit) const {
    using Input = typename Tail::Input;
    __syncthreads();  // nobody reads the one before
    // Of a thread's positions, `threads` apart, the coordinates go on by sums: quotients took 8 of 100
    // instructions of the kernel.
    constexpr int step_x = threads % window_x;
    constexpr int step_y = threads / window_x % window_y;
    constexpr int step_z = threads / (window_x * window_y);
    const int first_x = tile.x * static_cast<int>(C::step(2)) + Terms::low(2);
    const int first_y = tile.y * static_cast<int>(C::step(1)) + Terms::low(1);
    const int first_z = tile.z * static_cast<int>(C::step(0)) + Terms::low(0);
    int x = static_cast<int>(threadIdx.x) % window_x;
    int y = static_cast<int>(threadIdx.x) / window_x % window_y;
    int z = static_cast<int>(threadIdx.x) / (window_x * window_y);
    const char* sample = static_cast<const char*>(p.input) + tile.n * C::input_stride(0) * Input::bytes;
    float largest = 0.0f;
#pragma unroll 2
    for (int i = threadIdx.x; i < window; i += threads) {
      const bool inside = static_cast<unsigned>(first_x + x) < static_cast<unsigned>(C::input_size(2)) &&
                          static_cast<unsigned>(first_y + y) < static_cast<unsigned>(C::input_size(1)) &&
                          static_cast<unsigned>(first_z + z) < static_cast<unsigned>(C::input_size(0));
      const int at = (first_z + z) * static_cast<int>(C::input_stride(2)) +
                     (first_y + y) * static_cast<int>(C::input_stride(3)) +
                     (first_x + x) * static_cast<int>(C::input_stride(4));
#pragma unroll
      for (int vector = 0; vector < vectors; ++vector) {
        float v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          v[k] = 0.0f;
          if (vector * 4 + k >= C::in_channels) continue;
          if (inside) v[k] = load_one<Input>(sample, at + (vector * 4 + k) * C::input_stride(1));
          largest = pointwise::maximum(fabsf(v[k]), largest);
          if constexpr (C::rounds_to_tf32) v[k] = round_to_tf32(v[k]);
        }
        s.x[vector * window + i] = float4{v[0], v[1], v[2], v[3]};
      }
      x += step_x;
      y += step_y;
      z += step_z;
      if (x >= window_x) x -= window_x, ++y;
      if (y >= window_y) y -= window_y, ++z;
    }
    return __syncthreads_or(!(largest <= limit));
  }

  // What the lane's cells have of a term: channel `in_quad` of its vector.
  static constexpr int box_z = Terms::reach(0) + 1, box_y = Terms::reach(1) + 1, box_x = Terms::reach(2) + 1;
  static constexpr bool preloads = classes_z * classes_y > 1 && vectors* box_z* box_y* box_x* spans <= 32;
  struct Columns {
    const float* base;
    float value[preloads ? vectors * box_z * box_y * box_x : 1][spans];

    static __device__ __forceinline__ constexpr int place(const Term& t) {
      return ((t.vector * box_z + t.z) * box_y + t.y) * box_x + t.x;
    }
    __device__ __forceinline__ float from_shared(const Term& t, int span) const {
      return base[(((t.vector * Numbers::window_z + t.z) * window_y + t.y) * window_x + t.x +
                   span * 8 * static_cast<int>(C::step(2))) *
                  4];
    }
    __device__ __forceinline__ float at(const Term& t, int span) const {
      if constexpr (preloads) return value[place(t)][span];
      return from_shared(t, span);
    }
  };

  __device__ __forceinline__ Columns columns_of(int y, int column) const {
    Columns c;
    c.base = reinterpret_cast<const float*>(s.x) +
             (y * static_cast<int>(C::step(1)) * window_x +
              (column * spans * 8 + quad) * static_cast<int>(C::step(2))) *
                 4 +
             in_quad;
    if constexpr (preloads) {
#pragma unroll
      for (int i = 0; i < vectors * box_z * box_y * box_x; ++i) {
#pragma unroll
        for (int span = 0; span < spans; ++span)
          c.value[i][span] = c.from_shared(
              Term{i / (box_x * box_y) % box_z, i / box_x % box_y, i % box_x, 0, i / (box_x * box_y * box_z)},
              span);
      }
    }
    return c;
  }

  // --- Sums of the classes (rz, ry, all of x): [16 channels][class][8 cells], four a lane ---
  using Sums = float[row_tiles][classes_x][spans][4];

  template <int rz, int ry>
  __device__ __forceinline__ void convolve(Sums& sum, const Weights& w, const Columns& c) const {
    for_constant<classes_x>([&](auto rx_) {
      constexpr int rx = decltype(rx_)::value;
      constexpr int first = Terms::products_before(rz, ry, rx);
      constexpr int terms = Terms::terms(rz, ry, rx);
      if constexpr (terms == 0) {
        for_constant<row_tiles * spans>([&](auto i_) {
          constexpr int i = decltype(i_)::value;
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[i / spans][rx][i % spans][k] = w.bias[i / spans][k];
        });
      }
      if constexpr (splits) {
        convolve_split<rz, ry, rx>(sum, w, c);
        return;
      }
      for_constant<(terms + 1) / 2>([&](auto i_) {
        constexpr int i = decltype(i_)::value;
        constexpr bool both = 2 * i + 1 < terms;
        constexpr Term t = Terms::term(rz, ry, rx, 2 * i);
        constexpr Term u = Terms::term(rz, ry, rx, both ? 2 * i + 1 : 2 * i);
        uint32 b[spans][2];
        for_constant<spans>([&](auto span_) {
          constexpr int span = decltype(span_)::value;
          b[span][0] = __float_as_uint(c.at(t, span));
          if constexpr (both) b[span][1] = __float_as_uint(c.at(u, span));
        });
        for_constant<row_tiles>([&](auto m_) {
          constexpr int m = decltype(m_)::value;
          uint32 a[4];
          take_weights<false>(a, w, (first + i) * row_tiles + m);
          for_constant<spans>([&](auto span_) {
            constexpr int span = decltype(span_)::value;
            float(&d)[4] = sum[m][rx][span];
            if constexpr (both) {
              mma_k8(d, a, b[span][0], b[span][1], i == 0 ? w.bias[m] : d);
            } else {
              mma_k4(d, a, b[span][0], i == 0 ? w.bias[m] : d);
            }
          });
        });
      });
    });
  }

  // The same where x = x1 + x2, w = w1 + w2: small terms apart; the tensor core truncates its sums, so that
  // at most 64 terms are added in it.
  template <int rz, int ry, int rx>
  __device__ __forceinline__ void convolve_split(Sums& sum, const Weights& w, const Columns& c) const {
    constexpr int first = Terms::products_before(rz, ry, rx);
    constexpr int terms = Terms::terms(rz, ry, rx);
    constexpr int count = (terms + 1) / 2;
    constexpr int at_once = 8;
    const float zero[4] = {};
    for_constant<row_tiles>([&](auto m_) {
      constexpr int m = decltype(m_)::value;
      for_constant<spans>([&](auto span_) {
        constexpr int span = decltype(span_)::value;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[m][rx][span][k] = w.bias[m][k];
      });
    });
    for_constant<(count + at_once - 1) / at_once>([&](auto part_) {
      constexpr int part = decltype(part_)::value;
      constexpr int here = count - part * at_once < at_once ? count - part * at_once : at_once;
      float large[row_tiles][spans][4], small[row_tiles][spans][4];
      for_constant<here>([&](auto j_) {
        constexpr int j = decltype(j_)::value;
        constexpr int i = part * at_once + j;
        constexpr bool both = 2 * i + 1 < terms;
        constexpr Term t = Terms::term(rz, ry, rx, 2 * i);
        constexpr Term u = Terms::term(rz, ry, rx, both ? 2 * i + 1 : 2 * i);
        uint32 b[spans][2], b_rest[spans][2];
        for_constant<spans>([&](auto span_) {
          constexpr int span = decltype(span_)::value;
          b[span][0] = operand(c.at(t, span));
          b_rest[span][0] = rest(c.at(t, span));
          if constexpr (both) {
            b[span][1] = operand(c.at(u, span));
            b_rest[span][1] = rest(c.at(u, span));
          }
        });
        for_constant<row_tiles>([&](auto m_) {
          constexpr int m = decltype(m_)::value;
          uint32 a[4], a_rest[4];
          take_weights<false>(a, w, (first + i) * row_tiles + m);
          take_weights<true>(a_rest, w, (first + i) * row_tiles + m);
          for_constant<spans>([&](auto span_) {
            constexpr int span = decltype(span_)::value;
            float(&d)[4] = large[m][span];
            float(&e)[4] = small[m][span];
            if constexpr (both) {
              mma_k8(e, a, b_rest[span][0], b_rest[span][1], j == 0 ? zero : e);
              mma_k8(e, a_rest, b[span][0], b[span][1], e);
              mma_k8(d, a, b[span][0], b[span][1], j == 0 ? zero : d);
            } else {
              mma_k4(e, a, b_rest[span][0], j == 0 ? zero : e);
              mma_k4(e, a_rest, b[span][0], e);
              mma_k4(d, a, b[span][0], j == 0 ? zero : d);
            }
          });
        });
      });
      for_constant<row_tiles>([&](auto m_) {
        constexpr int m = decltype(m_)::value;
        for_constant<spans>([&](auto span_) {
          constexpr int span = decltype(span_)::value;
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[m][rx][span][k] += large[m][span][k] + small[m][span][k];
        });
      });
    });
  }

  // One sum, term by term, of the taps that meet an input. Static: an address of the agent would make all
  // its shared memory generic.
  static __device__ __noinline__ float careful_sum(const Parameters& p, int64 n, int channel, int rz, int ry,
                                                   int rx, int z, int y, int x) {
    if (channel >= channels) return 0.0f;
    const int r[3] = {rz, ry, rx};
    const int cell[3] = {z, y, x};
    float sum = bias(p, channel);
    for (int input = 0; input < C::in_channels; ++input) {
      float part = 0.0f;
      for (int i = 0; i < Terms::count(0, rz) * Terms::count(1, ry) * Terms::count(2, rx); ++i) {
        const int m[3] = {i / (Terms::count(2, rx) * Terms::count(1, ry)),
                          i / Terms::count(2, rx) % Terms::count(1, ry), i % Terms::count(2, rx)};
        int64 at = n * C::input_stride(0) + input * C::input_stride(1);
        int tap = 0;
        bool meets = true;
        for (int d = 0; d < 3; ++d) {
          const int position = cell[d] * static_cast<int>(C::step(d)) + Terms::offset(d, r[d], m[d]);
          meets &= position >= 0 && position < C::input_size(d);
          at += position * C::input_stride(d + 2);
          tap = tap * static_cast<int>(C::kernel(d)) + Terms::tap(d, r[d], m[d]);
        }
        if (!meets) continue;
        float a = weight(p, channel, input, tap);
        float b = load_one<typename Tail::Input>(p.input, at);
        if constexpr (C::rounds_to_tf32) a = round_to_tf32(a), b = round_to_tf32(b);
        part = fmaf(a, b, part);
      }
      sum += part;
    }
    return sum;
  }

  template <bool careful, int rz, int ry>
  __device__ __forceinline__ void sums_of(Sums& sum, const Weights& w, const Columns& c, const Tile& tile,
                                          int y, int column) const {
    if constexpr (!careful) {
      convolve<rz, ry>(sum, w, c);
    } else {
      for_constant<row_tiles>([&](auto m_) {
        constexpr int m = decltype(m_)::value;
        for_constant<classes_x>([&](auto rx_) {
          constexpr int rx = decltype(rx_)::value;
          for_constant<spans * 4>([&](auto i_) {
            constexpr int i = decltype(i_)::value;
            sum[m][rx][i / 4][i % 4] =
                careful_sum(p, tile.n, m * 16 + i % 4 / 2 * 8 + quad, rz, ry, rx, tile.z, tile.y + y,
                            tile.x + (column * spans + i / 4) * 8 + 2 * in_quad + i % 2);
          });
        });
      });
    }
  }

  // --- Chains ---
  template <class Chain>
  struct Operands {
    ChannelValues<Chain, 1> row[row_tiles][2];
    __device__ __forceinline__ void load(const Parameters& p, int64 n, int quad) {
#pragma unroll
      for (int half = 0; half < 2 * row_tiles; ++half) {
        const int channel = half * 8 + quad;
        row[half / 2][half % 2].load(p, n, channel < channels ? channel : 0);
      }
    }
  };

  template <class Chain>
  static __device__ __forceinline__ float apply(float x, const ChannelValues<Chain, 1>& own) {
    const typename Chain::template Tensors<1> none;
    return Chain::value(x, own.value[0], none, 0);
  }

  // Whether the lane's element (cell 2 in_quad + i of the last span, class rx) can lie beyond the row's end.
  static constexpr __device__ bool may_end(int i, int rx) {
    return ((Numbers::tiles_x * columns * spans - 1) * 8 + 6 + i) * classes_x + rx >= out_x;
  }
  static __device__ __forceinline__ bool ends(int cell, int i, int rx) {
    return may_end(i, rx) && (cell + i) * classes_x + rx >= out_x;
  }
  // Whether the output has all classes of a row of cells.
  static __device__ __forceinline__ bool is_inside(const Tile& tile, int y) {
    return (tile.z + 1) * classes_z <= out_z && (tile.y + y + 1) * classes_y <= out_y;
  }
  // Calls body(rz, ry) for the classes of the row that the output has.
  template <bool inside, class Body>
  static __device__ __forceinline__ void for_each_row(const Tile& tile, int y, Body&& body) {
    for_constant<classes_z>([&](auto rz_) {
      constexpr int rz = decltype(rz_)::value;
      if (inside || tile.z * classes_z + rz < out_z) {
        for_constant<classes_y>([&](auto ry_) {
          constexpr int ry = decltype(ry_)::value;
          if (inside || (tile.y + y) * classes_y + ry < out_y) body(rz_, ry_);
        });
      }
    });
  }

  // --- Pass 1: sums of distances from a pivot, which is the quad's first value of the channel ---
  struct Distances {
    float pivot[row_tiles][2] = {};
    float sum[row_tiles][2] = {};
    float square[row_tiles][2] = {};
    int count = 0;
  };

  template <bool careful>
  __device__ __forceinline__ void begin(Distances& own, const Weights& w, const Columns& c,
                                        const Operands<Before>& operands, const Tile& tile, int y,
                                        int column) const {
    Sums sum;
    sums_of<careful, 0, 0>(sum, w, c, tile, y, column);
    for_constant<row_tiles * 2>([&](auto half_) {
      constexpr int half = decltype(half_)::value;
      const float value = apply<Before>(sum[half / 2][0][0][half % 2 * 2], operands.row[half / 2][half % 2]);
      own.pivot[half / 2][half % 2] = __shfl_sync(0xffffffffu, value, lane & ~3);
    });
  }

  template <bool careful, bool inside>
  __device__ __forceinline__ void add(Distances& own, const Weights& w, const Columns& c,
                                      const Operands<Before>& operands, const Tile& tile, int y,
                                      int column) const {
    for_each_row<inside>(tile, y, [&](auto rz_, auto ry_) {
      constexpr int rz = decltype(rz_)::value;
      constexpr int ry = decltype(ry_)::value;
      Sums sum;
      sums_of<careful, rz, ry>(sum, w, c, tile, y, column);
      for_constant<spans>([&](auto span_) {
        constexpr int span = decltype(span_)::value;
        const int cell = tile.x + (column * spans + span) * 8 + 2 * in_quad;
        for_constant<classes_x>([&](auto rx_) {
          constexpr int rx = decltype(rx_)::value;
          for_constant<row_tiles * 2>([&](auto half_) {
            constexpr int half = decltype(half_)::value;
            constexpr int m = half / 2;
            constexpr int h = half % 2;
            float* pair = sum[m][rx][span] + 2 * h;
            pair[0] = apply<Before>(pair[0], operands.row[m][h]);
            pair[1] = apply<Before>(pair[1], operands.row[m][h]);
            for_constant<2>([&](auto i_) {
              constexpr int i = decltype(i_)::value;
              const float distance = pair[i] - own.pivot[m][h];
              if (!ends(cell, i, rx)) {
                own.sum[m][h] += distance;
                own.square[m][h] = fmaf(distance, distance, own.square[m][h]);
              }
            });
          });
          for_constant<2>([&](auto i_) {
            constexpr int i = decltype(i_)::value;
            own.count += !ends(cell, i, rx);
          });
        });
      });
    });
  }

  template <bool careful>
  __device__ __forceinline__ void measure(const Tile& tile, const Weights& w) const {
    Operands<Before> operands;
    operands.load(p, tile.n, quad);
    Distances own;
    const int rows = cells_y - tile.y < tile_y ? cells_y - tile.y : tile_y;
#pragma unroll 1
    for (int item = warp; item < rows * columns; item += warps) {
      const int y = item / columns;
      const int column = item % columns;
      const Columns c = columns_of(y, column);
      if (item == warp) begin<careful>(own, w, c, operands, tile, y, column);
      if (!careful && is_inside(tile, y)) {
        add<careful, true>(own, w, c, operands, tile, y, column);
      } else {
        add<careful, false>(own, w, c, operands, tile, y, column);
      }
    }
    const float count = lanes_sum<4>(static_cast<float>(own.count));
    const float per_element = 1.0f / count;
#pragma unroll
    for (int half = 0; half < 2 * row_tiles; ++half) {
      const float sum = lanes_sum<4>(own.sum[half / 2][half % 2]);
      const float square = lanes_sum<4>(own.square[half / 2][half % 2]);
      if (in_quad == 0) {
        float* to = s.moments[warp][half * 8 + quad];
        to[0] = count;
        to[1] = fmaf(sum, per_element, own.pivot[half / 2][half % 2]);
        to[2] = fmaf(-sum, sum * per_element, square);
      }
    }
    __syncthreads();
    for (int group = warp; group < groups; group += warps) {
      Moments all;
      for (int i = lane; i < warps * Tail::group_channels; i += 32) {
        const float* from =
            s.moments[i / Tail::group_channels][group * Tail::group_channels + i % Tail::group_channels];
        if (from[0] > 0.0f) all.merge(from[0], from[1], from[2]);
      }
      const float elements = lanes_sum<32>(all.count);
      float mean, m2;
      team_moments<32, threads>(all, elements, nullptr, mean, m2);
      if (lane == 0) {
        float* to = p.parts + ((tile.n * Numbers::tiles + tile.index) * groups + group) * 3;
        to[0] = elements;
        to[1] = mean;
        to[2] = m2;
      }
    }
    uint32* counters = p.control + 4 + tile.n * 4;
    if (arrives_last(counters, Numbers::tiles)) {
      merge(tile.n);
      publish(counters + 2, 1u);
    }
  }

  // The moments of a sample's slabs, a warp for each.
  __device__ __forceinline__ void merge(int64 n) const {
    for (int group = warp; group < groups; group += warps) {
      Moments all;
      for (int i = lane; i < Numbers::tiles; i += 32) {
        const float* from = p.parts + ((n * Numbers::tiles + i) * groups + group) * 3;
        all.merge(load_shared_by_blocks(from), load_shared_by_blocks(from + 1),
                  load_shared_by_blocks(from + 2));
      }
      constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
      float mean, m2;
      team_moments<32, threads>(all, elements, nullptr, mean, m2);
      if (lane == 0) {
        float* to = p.statistics + 2 * (n * groups + group);
        to[0] = mean;
        to[1] = 1.0f / sqrtf(m2 / elements + Tail::eps);
      }
    }
  }

  // --- Pass 2 ---
  struct Scales {
    float scale[row_tiles][2];
    float shift[row_tiles][2];
  };
  __device__ __forceinline__ void load_scales(Scales& own, int64 n) const {
    if constexpr (Tail::has_norm) {
#pragma unroll
      for (int half = 0; half < 2 * row_tiles; ++half) {
        const int channel = half * 8 + quad < channels ? half * 8 + quad : 0;
        const float* slab = p.statistics + 2 * (n * groups + channel / Tail::group_channels);
        const float scale = Tail::weight(p, channel) * load_shared_by_blocks(slab + 1);
        own.scale[half / 2][half % 2] = scale;
        own.shift[half / 2][half % 2] = fmaf(-load_shared_by_blocks(slab), scale, Tail::bias(p, channel));
      }
    }
  }

  // The place in the output of the first element of a tile's row.
  static __device__ __forceinline__ int64 output_index(const Tile& tile, int channel, int z, int y) {
    return (((tile.n * channels + channel) * out_z + z) * out_y + y) * out_x + tile.x * classes_x;
  }
  // Elements from the 16-byte boundary before it.
  __device__ __forceinline__ int phase(int64 index) const {
    return static_cast<int>((static_cast<uint32>(reinterpret_cast<uint64>(p.output) / Output::bytes) +
                             static_cast<uint32>(index)) %
                            width);
  }

  template <bool careful, bool inside>
  __device__ __forceinline__ void put(const Tile& tile, const Weights& w, const Operands<Before>& operands,
                                      const Operands<After>& after, const Scales& scales,
                                      unsigned char* buffer, int first_y, int y, int column) const {
    const Columns c = columns_of(first_y + y, column);
    const int first_row = (tile.y + first_y) * classes_y;
    for_each_row<inside>(tile, first_y + y, [&](auto rz_, auto ry_) {
      constexpr int rz = decltype(rz_)::value;
      constexpr int ry = decltype(ry_)::value;
      const int row = y * classes_y + ry;
      // 8 channels further the phase is the same: a vector has 4 or 8 elements.
      const int64 index =
          output_index(tile, quad, tile.z * classes_z + rz, first_row + (whole_rows ? 0 : row));
      unsigned char* to = buffer + (quad * channel_pitch + rz * plane_pitch + row * row_pitch + phase(index) +
                                    (column * spans * 8 + 2 * in_quad) * classes_x) *
                                       Output::bytes;
      Sums sum;
      sums_of<careful, rz, ry>(sum, w, c, tile, first_y + y, column);
      for_constant<spans>([&](auto span_) {
        constexpr int span = decltype(span_)::value;
        const int cell = tile.x + (column * spans + span) * 8 + 2 * in_quad;
        for_constant<classes_x>([&](auto rx_) {
          constexpr int rx = decltype(rx_)::value;
          for_constant<row_tiles * 2>([&](auto half_) {
            constexpr int half = decltype(half_)::value;
            constexpr int m = half / 2;
            constexpr int h = half % 2;
            float* pair = sum[m][rx][span] + 2 * h;
            pair[0] = apply<Before>(pair[0], operands.row[m][h]);
            pair[1] = apply<Before>(pair[1], operands.row[m][h]);
            for_constant<2>([&](auto i_) {
              constexpr int i = decltype(i_)::value;
              float value = pair[i];
              if constexpr (Tail::has_norm) value = fmaf(value, scales.scale[m][h], scales.shift[m][h]);
              value = apply<After>(value, after.row[m][h]);
              const bool in_range = channels % 16 == 0 || half * 8 + quad < channels;
              if (in_range && !ends(cell, i, rx))
                store_one<Output>(to, half * 8 * channel_pitch + (span * 8 + i) * classes_x + rx, value);
            });
          });
        });
      });
    });
  }

  template <bool careful>
  __device__ __forceinline__ void write(const Tile& tile, const Weights& w) const {
    Operands<Before> operands;
    Operands<After> after;
    Scales scales;
    operands.load(p, tile.n, quad);
    after.load(p, tile.n, quad);
    load_scales(scales, tile.n);
#pragma unroll 1
    for (int first_y = 0, turn = 0; first_y < tile_y; first_y += Numbers::stage_y, ++turn) {
      const int left = (cells_y - tile.y < tile_y ? cells_y - tile.y : tile_y) - first_y;
      if (left <= 0) break;
      const int rows = left < Numbers::stage_y ? left : Numbers::stage_y;
      unsigned char* buffer = s.stage[turn % 2];
#pragma unroll 1
      for (int item = warp; item < rows * columns; item += warps) {
        const int y = item / columns;
        const int column = item % columns;
        if (!careful && is_inside(tile, first_y + y)) {
          put<careful, true>(tile, w, operands, after, scales, buffer, first_y, y, column);
        } else {
          put<careful, false>(tile, w, operands, after, scales, buffer, first_y, y, column);
        }
      }
      send(tile, buffer, first_y, rows);
    }
  }

  // A chunk of a stage: where it lies in the buffer, where it goes, how long it is.
  struct Chunk {
    int from;  // all in elements
    int64 to;
    int length;
    int head;    // before the first whole vector
    int middle;  // in whole vectors
  };
  __device__ __forceinline__ Chunk chunk_of(const Tile& tile, int first_y, int rows, int i) const {
    const int channel = i / (classes_z * chunks_of_plane);
    const int rz = i / chunks_of_plane % classes_z;
    const int row = i % chunks_of_plane;
    const int z = tile.z * classes_z + rz;
    const int y = (tile.y + first_y) * classes_y + row;
    const int rows_left = z < out_z && row < rows * classes_y ? out_y - y : 0;
    const int left = whole_rows ? rows_left * out_x : rows_left > 0 ? out_x - tile.x * classes_x : 0;
    const int most = whole_rows ? rows * classes_y * out_x : tile_x * classes_x;
    Chunk chunk;
    chunk.to = output_index(tile, channel, z, y);
    const int shift = phase(chunk.to);
    chunk.from = channel * channel_pitch + rz * plane_pitch + row * row_pitch + shift;
    chunk.length = left < 0 ? 0 : left < most ? left : most;
    chunk.head = (width - shift) % width;
    chunk.head = chunk.head < chunk.length ? chunk.head : chunk.length;
    chunk.middle = (chunk.length - chunk.head) / width * width;
    return chunk;
  }

  // The rows of a stage to where they belong, a warp for each chunk. Bulk copies took 0.23 ms more on s60: a
  // hundred cycles for each, whatever its size. The buffer may be written again after the next stage's
  // barrier.
  __device__ __forceinline__ void send(const Tile& tile, const unsigned char* buffer, int first_y,
                                       int rows) const {
    using Element = typename Bits<Output::bytes>::Type;
    // Where a warp's chunks are the same one of channels so far apart that phases repeat, only addresses go
    // on.
    constexpr int of_channel = classes_z * chunks_of_plane;
    constexpr int further = warps / of_channel;  // channels
    constexpr bool alike = warps % of_channel == 0 && further * Tail::spatial % width == 0;
    __syncthreads();
    if (warp >= chunks) return;
    Chunk chunk = chunk_of(tile, first_y, rows, warp);
#pragma unroll 1
    for (int i = warp; i < chunks; i += warps) {
      if constexpr (!alike) chunk = chunk_of(tile, first_y, rows, i);
      const auto* from = reinterpret_cast<const Element*>(buffer) + chunk.from;
      auto* to = static_cast<Element*>(p.output) + chunk.to;
#pragma unroll 2
      for (int k = chunk.head + lane * width; k < chunk.head + chunk.middle; k += 32 * width)
        __stcs(reinterpret_cast<uint4*>(to + k), *reinterpret_cast<const uint4*>(from + k));
      const int behind = chunk.head + chunk.middle + lane;
      if (lane < chunk.head) to[lane] = from[lane];
      if (behind < chunk.length) to[behind] = from[behind];
      chunk.from += further * channel_pitch;
      chunk.to += further * Tail::spatial;
    }
  }

  // --- Work ---
  __device__ __forceinline__ uint32 take_ticket() const {
    __syncthreads();
    if (threadIdx.x == 0) s.ticket = atomicAdd(p.control, 1u);
    __syncthreads();
    return s.ticket;
  }

  __device__ __forceinline__ void run() const {
    Weights w;
    load_weights(w);
    const float limit = input_limit();
    const int64 tiles = p.batch * Numbers::tiles;
    const int64 lag = Tail::has_norm ? p.wave_units * Numbers::tiles : 0;
#pragma unroll 1
    for (int64 ticket = take_ticket(); ticket < tiles + lag; ticket = take_ticket()) {
      if (Tail::has_norm && ticket < tiles) {
        const Tile tile(ticket);
        if (load_window(tile, limit)) {
          measure<true>(tile, w);
          if constexpr (in_registers) load_weights(w);  // anew: not kept in memory over the calls there
        } else {
          measure<false>(tile, w);
        }
      }
      if (ticket >= lag) {
        const Tile tile(ticket - lag);
        if (Tail::has_norm && threadIdx.x == 0) wait_for(p.control + 4 + tile.n * 4 + 2, 1u);
        if (load_window(tile, limit)) {
          write<true>(tile, w);
          if constexpr (in_registers) load_weights(w);
        } else {
          write<false>(tile, w);
        }
      }
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
// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 tf32
//
// plan: thin_mma
//   convolution: 81 terms, 14 products of 8 classes, operands rounded to tf32, weights in registers
//   tile: 32 rows of 32 cells, 16 tiles a sample, 2 rows stored at a time
//   passes: 2
// ==================================================================================================

namespace block_1_tf32_thin_mma {
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
    const float x1 = pointwise::swish_stage::value(x0, 0.0f, 0.00000000f, 0.00000000f);
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
    const float x1 = pointwise::hardswish_stage::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 123039;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = false;
  static constexpr bool mean_follows_norm = false;
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
  static constexpr bool transposed = true;
  static constexpr bool rounds_to_tf32 = true;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 27;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 3ll : d == 1 ? 3ll : d == 2 ? 3ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 31ll : d == 1 ? 63ll : d == 2 ? 63ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? -1ll : d == 1 ? -1ll : d == 2 ? -1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 0ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 0ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 0 && r == 1 ? 1ll : d == 1 && r == 0 ? 0ll : d == 1 && r == 1 ? 1ll : d == 2 && r == 0 ? 0ll : d == 2 && r == 1 ? 1ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 2ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 2ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 2ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 16ll : d == 0 && r == 1 ? 15ll : d == 1 && r == 0 ? 32ll : d == 1 && r == 1 ? 31ll : d == 2 && r == 0 ? 32ll : d == 2 && r == 1 ? 31ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1968624ll : d == 1 ? 123039ll : d == 2 ? 3969ll : d == 3 ? 63ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  static constexpr int threads = 256;
  static constexpr int warps = 8;
  static constexpr int spans = 1;
  static constexpr int tile_y = 32;
  static constexpr int tile_x = 32;
  static constexpr int tiles_y = 1;
  static constexpr int tiles_x = 1;
  static constexpr int tiles = 16;
  static constexpr int stage_y = 2;
  static constexpr int chunk_pitch = 256;
  static constexpr int channel_pitch = 516;
  static constexpr int stage_bytes = 33024;
  static constexpr int shared_bytes = 103008;
  static constexpr int window_z = 2;
  static constexpr int window_y = 33;
  static constexpr int window_x = 33;
  static constexpr bool weights_in_registers = true;
  static constexpr bool splits = false;
};
using Agent = onepass::ThinMma<onepass::Convolution, onepass::Tail, Numbers>;
__global__ void __launch_bounds__(256, 2) onepass_thin_mma(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();
}

}  // namespace block_1_tf32_thin_mma
"""

_LAUNCHES_TF32 = r"""
namespace {

Kernel block_1_tf32_thin_mma_kernel("block_1_tf32_thin_mma",
    reinterpret_cast<const void*>(&block_1_tf32_thin_mma::onepass_thin_mma), 256, 1, 103008);

}  // namespace

int64_t block_1_tf32_workspace_bytes(int64_t batch, int device) {
  const int64_t offset_1 = divide_up((batch + 1) * 16, 256) * 256;
  const int64_t offset_2 = offset_1 + divide_up(batch * 3072, 256) * 256;
  return offset_2 + divide_up(batch * 32, 256) * 256;
}

void block_1_tf32(const void* input, void* output, const void* const* parameters,
                  char* workspace, int64_t batch, int device, cudaStream_t stream) {
  const int64_t resident = block_1_tf32_thin_mma_kernel.resident(device);
  const int64_t offset_1 = divide_up((batch + 1) * 16, 256) * 256;
  const int64_t offset_2 = offset_1 + divide_up(batch * 3072, 256) * 256;
  const int64_t lag_samples = std::min<int64_t>(batch, 1 + divide_up(resident, 16));
  check(cudaMemsetAsync(workspace, 0, offset_1, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                 // input
        word(output),                // output
        word(workspace + offset_2),  // statistics
        word(workspace),             // control
        word(workspace + offset_1),  // parts
        word(workspace + offset_2),  // sums
        0,                           // only
        word(workspace + offset_1),  // guard
        word(batch),                 // batch
        word(lag_samples),           // wave_units
        word(parameters[0]),         // parameter[0]
        word(parameters[1]),         // parameter[1]
        word(parameters[2]),         // parameter[2]
        word(parameters[3]),         // parameter[3]
    };
    static_assert(sizeof words == sizeof(block_1_tf32_thin_mma::Agent::Parameters));
    const int64_t blocks = clamp((batch + lag_samples) * 16, 1, resident);
    block_1_tf32_thin_mma_kernel.launch(words, blocks, device, stream);
  }
}
"""

_KERNELS_F32 = r"""
// ==================================================================================================
// block_1_f32: forward
//
// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish @ 128x3x16x32x32 f32
//
// plan: thin_mma
//   convolution: 81 terms, 14 products of 8 classes, operands split in two, weights in registers and shared memory
//   tile: 16 rows of 32 cells, 32 tiles a sample, 2 rows stored at a time
//   passes: 2
// ==================================================================================================

namespace block_1_f32_thin_mma {
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
    const float x1 = pointwise::swish_stage::value(x0, 0.0f, 0.00000000f, 0.00000000f);
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
    const float x1 = pointwise::hardswish_stage::value(x0, 0.0f, 0.00000000f, 0.00000000f);
    return x1;
  }
};

// conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish
struct Tail {
  using Before = onepass::Before;
  using After = onepass::After;
  using Input = f32;
  using Output = f32;
  static constexpr int parameters = 4;
  static constexpr int channels = 16;
  static constexpr int group_channels = 4;
  static constexpr int64 spatial = 123039;
  static constexpr bool has_norm = true;
  static constexpr bool has_affine = true;
  static constexpr bool has_mean = false;
  static constexpr bool mean_follows_norm = false;
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
  static constexpr bool transposed = true;
  static constexpr bool rounds_to_tf32 = false;
  static constexpr int in_channels = 3;
  static constexpr int channels = 16;
  static constexpr int taps = 27;
  static constexpr __device__ int64 kernel(int d) { return d == 0 ? 3ll : d == 1 ? 3ll : d == 2 ? 3ll : 0ll; }
  static constexpr __device__ int64 input_size(int d) { return d == 0 ? 16ll : d == 1 ? 32ll : d == 2 ? 32ll : 0ll; }
  static constexpr __device__ int64 output_size(int d) { return d == 0 ? 31ll : d == 1 ? 63ll : d == 2 ? 63ll : 0ll; }
  static constexpr __device__ int64 step(int d) { return d == 0 ? 1ll : d == 1 ? 1ll : d == 2 ? 1ll : 0ll; }
  static constexpr __device__ int64 delta(int d) { return d == 0 ? -1ll : d == 1 ? -1ll : d == 2 ? -1ll : 0ll; }
  static constexpr __device__ int64 tap_step(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 0ll; }
  static constexpr __device__ int64 classes(int d) { return d == 0 ? 2ll : d == 1 ? 2ll : d == 2 ? 2ll : 1ll; }
  static constexpr __device__ int64 first(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 0ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 0ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 0ll : 0ll;
  }
  static constexpr __device__ int64 base(int d, int r) {
    return d == 0 && r == 0 ? 0ll : d == 0 && r == 1 ? 1ll : d == 1 && r == 0 ? 0ll : d == 1 && r == 1 ? 1ll : d == 2 && r == 0 ? 0ll : d == 2 && r == 1 ? 1ll : 0ll;
  }
  static constexpr __device__ int64 count(int d, int r) {
    return d == 0 && r == 0 ? 1ll : d == 0 && r == 1 ? 2ll : d == 1 && r == 0 ? 1ll : d == 1 && r == 1 ? 2ll : d == 2 && r == 0 ? 1ll : d == 2 && r == 1 ? 2ll : 0ll;
  }
  static constexpr __device__ int64 positions(int d, int r) {
    return d == 0 && r == 0 ? 16ll : d == 0 && r == 1 ? 15ll : d == 1 && r == 0 ? 32ll : d == 1 && r == 1 ? 31ll : d == 2 && r == 0 ? 32ll : d == 2 && r == 1 ? 31ll : 0ll;
  }
  static constexpr __device__ int64 input_stride(int d) { return d == 0 ? 49152ll : d == 1 ? 16384ll : d == 2 ? 1024ll : d == 3 ? 32ll : d == 4 ? 1ll : 0ll; }
  // Of the output and of tensors that stages read.
  static constexpr __device__ int64 stride(int d) { return d == 0 ? 1968624ll : d == 1 ? 123039ll : d == 2 ? 3969ll : d == 3 ? 63ll : d == 4 ? 1ll : 0ll; }
};
}  // namespace onepass

struct Numbers {
  static constexpr int threads = 256;
  static constexpr int warps = 8;
  static constexpr int spans = 1;
  static constexpr int tile_y = 16;
  static constexpr int tile_x = 32;
  static constexpr int tiles_y = 2;
  static constexpr int tiles_x = 1;
  static constexpr int tiles = 32;
  static constexpr int stage_y = 2;
  static constexpr int chunk_pitch = 256;
  static constexpr int channel_pitch = 516;
  static constexpr int stage_bytes = 33024;
  static constexpr int shared_bytes = 92768;
  static constexpr int window_z = 2;
  static constexpr int window_y = 17;
  static constexpr int window_x = 33;
  static constexpr bool weights_in_registers = true;
  static constexpr bool splits = true;
};
using Agent = onepass::ThinMma<onepass::Convolution, onepass::Tail, Numbers>;
__global__ void __launch_bounds__(256, 2) onepass_thin_mma(const __grid_constant__ Agent::Parameters p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Agent{p, *reinterpret_cast<Agent::Shared*>(shared)}.run();
}

}  // namespace block_1_f32_thin_mma
"""

_LAUNCHES_F32 = r"""
namespace {

Kernel block_1_f32_thin_mma_kernel("block_1_f32_thin_mma",
    reinterpret_cast<const void*>(&block_1_f32_thin_mma::onepass_thin_mma), 256, 1, 92768);

}  // namespace

int64_t block_1_f32_workspace_bytes(int64_t batch, int device) {
  const int64_t offset_1 = divide_up((batch + 1) * 16, 256) * 256;
  const int64_t offset_2 = offset_1 + divide_up(batch * 6144, 256) * 256;
  return offset_2 + divide_up(batch * 32, 256) * 256;
}

void block_1_f32(const void* input, void* output, const void* const* parameters,
                 char* workspace, int64_t batch, int device, cudaStream_t stream) {
  const int64_t resident = block_1_f32_thin_mma_kernel.resident(device);
  const int64_t offset_1 = divide_up((batch + 1) * 16, 256) * 256;
  const int64_t offset_2 = offset_1 + divide_up(batch * 6144, 256) * 256;
  const int64_t lag_samples = std::min<int64_t>(batch, 1 + divide_up(resident, 32));
  check(cudaMemsetAsync(workspace, 0, offset_1, stream), "clearing memory");
  {
    const uint64_t words[] = {
        word(input),                 // input
        word(output),                // output
        word(workspace + offset_2),  // statistics
        word(workspace),             // control
        word(workspace + offset_1),  // parts
        word(workspace + offset_2),  // sums
        0,                           // only
        word(workspace + offset_1),  // guard
        word(batch),                 // batch
        word(lag_samples),           // wave_units
        word(parameters[0]),         // parameter[0]
        word(parameters[1]),         // parameter[1]
        word(parameters[2]),         // parameter[2]
        word(parameters[3]),         // parameter[3]
    };
    static_assert(sizeof words == sizeof(block_1_f32_thin_mma::Agent::Parameters));
    const int64_t blocks = clamp((batch + lag_samples) * 32, 1, resident);
    block_1_f32_thin_mma_kernel.launch(words, blocks, device, stream);
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
  check_tensor("block_1_tf32", "parameter 0", parameters[0], {3, 16, 3, 3, 3}, at::kFloat,
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
  at::Tensor output = at::empty({batch, 16, 31, 63, 63}, input.options());
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

TORCH_LIBRARY_IMPL(onepass_s60_874bf473, CUDA, library) {
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
  check_tensor("block_1_f32", "parameter 0", parameters[0], {3, 16, 3, 3, 3}, at::kFloat,
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
  at::Tensor output = at::empty({batch, 16, 31, 63, 63}, input.options());
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

TORCH_LIBRARY_IMPL(onepass_s60_874bf473, CUDA, library) {
  library.impl("block_1_f32", run_block_1_f32);
}
"""

_NAMESPACE = "onepass_s60_874bf473"
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
        ((3, 16, 3, 3, 3), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
    ]),
    "block_1_f32": (torch.float32, (3, 16, 32, 32), torch.contiguous_format, [
        ((3, 16, 3, 3, 3), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
        ((16,), torch.contiguous_format),
    ]),
}
_NVCC = ["-O3", "-gencode=arch=compute_90a,code=sm_90a"]


def _fake_block_1_tf32(input, parameters):
    return torch.empty((input.shape[0], 16, 31, 63, 63), dtype=input.dtype, device=input.device)

def _fake_block_1_f32(input, parameters):
    return torch.empty((input.shape[0], 16, 31, 63, 63), dtype=input.dtype, device=input.device)


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
    """conv_transpose3d(3,16,k=3,s=2,p=1) | swish | group_norm(4) | hardswish"""
    parameters = [
        self.conv_transpose.weight,
        self.conv_transpose.bias,
        self.group_norm.weight,
        self.group_norm.bias,
    ]
    if not _wants_gradients(x, parameters):
        if _rounds_to_tf32() and _fits("block_1_tf32", x, parameters):
            return torch.ops.onepass_s60_874bf473.block_1_tf32(x, parameters)
        if not _rounds_to_tf32() and _fits("block_1_f32", x, parameters):
            return torch.ops.onepass_s60_874bf473.block_1_f32(x, parameters)
    conv_transpose = self.conv_transpose(x)
    sigmoid = torch.sigmoid(conv_transpose)
    mul = sigmoid * conv_transpose
    group_norm = self.group_norm(mul)
    return torch.nn.functional.hardswish(group_norm, inplace = False)

# What the kernels were written for: another model of the class runs as it was.
_SPECIALISED = {
    'conv_transpose': ('ConvTranspose3d(3, 16, kernel_size=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1))', {}),
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
