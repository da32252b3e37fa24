// A thin convolution whose block ends in a mean, on the tensor cores of sm_90a: warpgroup products whose
// columns are eight lanes of a position, and whose rows are the taps of the first dimension.
//
//   D[tap of dimension 0, channel][position, lane] += A[tap, channel][term] B[term][position, lane]
//
// An input plane is multiplied once, by all taps of the first dimension. Plane slot b of the accumulators
// belongs to output plane d with (d + turn) % taps == b, and A is read from a place that turns with the input
// plane. A slot is complete after its last tap: its warps apply the chain and start again from zeros. A warp
// has 16 channels of one slot, or, `paired`, eight channels of two slots. Then two warps share the outputs
// that a plane completes, in half the time, but A is in shared memory once for every turn. A warpgroup has
// two strips of a tile, half a turn apart: two of its warps finish outputs of the first strip, the others
// those of the second.
//
// A lane is a row group of a sample: lane (s, g) of position (r, w) is output row r + g * lane_rows of sample
// s. Elements of eight lanes lie side by side (a unit of 16 bytes), so that every tap is a legal start of a
// matrix (K x N with N contiguous, no swizzle). Eight terms, core_columns taps along the last dimension of
// core_rows taps along the middle one of core_channels input channels, are eight neighbouring units: channels
// lie side by side, and window row q is kept together with the core_rows - 1 rows that follow it at the
// distance of taps.
//
// A block has two warpgroups that multiply and one that loads: planes pass through a ring in shared memory.
// A unit (8 / row_groups samples) is one block's alone, or, where there are few of them, a cluster's, whose
// blocks have tiles or planes of it each: moments or sums of its channels never leave the chip, and the first
// block writes the means. Moves x once (halo columns of a tile come from the second-level cache).
//
// Precisions and scales are those of thin/samples.cuh. Samples whose values overflow f16 are computed again
// on CUDA cores (thin/cores.cuh). So are samples with values that are not finite, where products are padded.
//
// ThinWgmma has the kernel's types, sizes and shared memory. Its pieces are nested classes, each defined in
// its own file of wgmma/.
#pragma once

#include "device/barrier.cuh"
#include "thin/halves.cuh"

namespace onepass {

namespace warpgroup {

// A matrix descriptor: its start, the distance of matrices along K and, in the upper half, along M or N, in
// units of 16 bytes; no swizzle.
__device__ __forceinline__ uint32 descriptor(uint32 address, uint32 along_k) {
  return (address & 0x3ffffu) >> 4 | along_k << 16;
}
__device__ __forceinline__ uint64 wide(uint32 lower, uint32 upper) {
  return lower | static_cast<uint64>(upper) << 32;
}

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `Left` groups of products are in flight.
template <int Left>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Barriers of `threads` threads of the block; 0 is __syncthreads'.
template <int threads>
__device__ __forceinline__ void sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

}  // namespace warpgroup

// `Product` is generated (src/cuda/thin/wgmma.cc): multiply(d, a, b, accumulates) of 64 x 8 columns x 16.
template <class C, class Tail, class Numbers, class Product>
struct ThinWgmma {
  struct Weights;   // wgmma/weights.cuh: A as the tensor cores read it
  struct Elements;  // wgmma/elements.cuh: fills the ring, an element at a time
  struct Producer;  // wgmma/producer.cuh: fills the ring by whole rows, or elements
  struct Products;  // wgmma/products.cuh: the mainloop
  struct Outputs;   // wgmma/outputs.cuh: its epilogue
  struct Kernel;    // wgmma/kernel.cuh: roles of warps, ends of units

  using Input = typename Tail::Input;
  using Parameters = ThinWgmmaParameters<Tail::parameters>;
  using MomentsPass = MomentsEpilogue<C, Tail, Numbers, Parameters>;
  using ApplyPass = ApplyEpilogue<C, Tail, Numbers, Parameters>;
  static constexpr bool splits = Input::bytes == 4;
  static constexpr int input_parts = Numbers::input_parts;
  static constexpr int weight_parts = Numbers::weight_parts;
  // Whether partial sums are added up outside the tensor cores. With one tap in the first dimension there is
  // one part.
  static constexpr bool promotes = input_parts == 2 && C::kernel(0) > 1;
  static constexpr int weight_sets = Numbers::weight_sets;  // other versions, where weights are dithered
  static constexpr bool dithers = Numbers::dithers;

  static constexpr int row_groups = Numbers::row_groups;
  static constexpr int samples = 8 / row_groups;
  static constexpr int lane_rows = Numbers::lane_rows;
  static constexpr int tile_rows = Numbers::tile_rows;
  static constexpr int columns = Numbers::columns;  // of a strip
  static constexpr int strips = Numbers::strips;    // of a tile
  static constexpr int tile_columns = columns * strips / tile_rows;
  static constexpr int column_tiles = Numbers::column_tiles;
  static constexpr int tiles = Numbers::tiles;
  static constexpr int core_rows = Numbers::core_rows;
  static constexpr int core_columns = Numbers::core_columns;
  static constexpr int core_channels = Numbers::core_channels;
  static constexpr int pitch = core_rows * core_channels;  // of a column, in units
  static constexpr int starts = Numbers::starts;
  static constexpr int window_columns = Numbers::window_columns;
  static constexpr int row_units = Numbers::row_units;  // that a row of the window takes
  static constexpr int planes = Numbers::planes;        // of the ring
  static constexpr int producers = Numbers::producers;
  static constexpr int consumers = Numbers::consumers;
  static constexpr int consumer_warps = consumers / 32;
  static constexpr int warpgroups = consumers / 128;  // that multiply
  static_assert(strips == 2 * warpgroups);

  static constexpr int step1 = static_cast<int>(C::step(1));
  static constexpr int step2 = static_cast<int>(C::step(2));
  static constexpr int delta1 = static_cast<int>(C::delta(1));
  static constexpr int delta2 = static_cast<int>(C::delta(2));
  static_assert(core_columns == 1 || delta2 == 1, "columns of a core are neighbours");
  static constexpr int taps0 = static_cast<int>(C::kernel(0));
  static constexpr int taps1 = static_cast<int>(C::kernel(1));
  static constexpr int taps2 = static_cast<int>(C::kernel(2));
  static constexpr int groups1 = (taps1 + core_rows - 1) / core_rows;
  static constexpr int groups2 = (taps2 + core_columns - 1) / core_columns;
  static_assert(C::in_channels % core_channels == 0);
  static constexpr int cores = C::in_channels / core_channels * groups1 * groups2;
  static constexpr int steps = (cores + 1) / 2;  // products of a plane
  static constexpr bool fills_up = taps1 % core_rows != 0 || taps2 % core_columns != 0 || cores % 2 != 0;
  static constexpr bool guards = splits || fills_up;

  // --- The parts of a unit: a block of a cluster each ---
  static constexpr int tile_parts = Numbers::tile_parts;
  static constexpr int plane_parts = Numbers::plane_parts;
  static constexpr int parts = tile_parts * plane_parts;
  static constexpr int part_tiles = tiles / tile_parts;
  static constexpr int part_planes = (static_cast<int>(C::output_size(0)) + plane_parts - 1) / plane_parts;
  static constexpr int window_planes = part_planes + taps0 - 1;
  static_assert(tiles % tile_parts == 0);

  static constexpr int channel_blocks = Numbers::channel_blocks;  // of 16 rows, in a product
  static constexpr int channel_tiles = (C::channels + 16 * channel_blocks - 1) / (16 * channel_blocks);
  static constexpr bool paired = Numbers::paired;
  static_assert(!paired || taps0 >= 2);
  static constexpr int turns = paired ? taps0 : 1;  // that A is kept for
  static constexpr int weight_blocks = paired ? 4 : (taps0 - 1) * channel_blocks + 4;
  static constexpr uint32 weight_units = weight_blocks * 16;  // of a core
  static constexpr int state_rows = paired ? 1 : 2;           // channels of a thread
  static constexpr bool two_passes = Tail::has_norm && !Tail::mean_follows_norm;
  static constexpr int repeats = channel_tiles * (two_passes ? 2 : 1);

  // --- Rows of the window: `shift` further is the same row of the next lane ---
  static constexpr int shift = lane_rows * step1;
  static constexpr int window_rows = starts + (core_rows - 1) * delta1;
  static constexpr int row_bases = window_rows < shift ? window_rows : shift;
  static constexpr int base_groups = (row_bases + core_rows - 1) / core_rows;
  static constexpr int shifts = (window_rows - 1) / shift;
  // Values that a unit has of a sample, and how many can lie in the input: rows below it are zeros.
  static constexpr int values = row_groups + shifts;
  static constexpr int rows_below = static_cast<int>((C::input_size(1) - C::base(1, 0) + shift - 1) / shift);
  static constexpr int loaded = values < rows_below ? values : rows_below;
  // Whether those rows lie in the input for every tile, as they mostly do without padding.
  static constexpr int last_row = (lane_rows - 1) / tile_rows * tile_rows * step1 +
                                  static_cast<int>(C::base(1, 0)) + row_bases - 1 + (loaded - 1) * shift;
  static constexpr bool has_all_rows = C::base(1, 0) >= 0 && last_row < C::input_size(1);
  static constexpr int units = C::in_channels * base_groups * window_columns * core_rows;
  static constexpr int chunks = (units + producers - 1) / producers;
  static constexpr int plane_units = C::in_channels / core_channels * starts * row_units;
  // A thread loads an item at a time: its units of a plane, or one of them where they are many. As many items
  // are in flight as registers allow.
  static constexpr int most_elements = Numbers::most_elements;
  static constexpr int item_chunks = chunks * samples * loaded <= most_elements ? chunks : 1;
  static constexpr int items = chunks / item_chunks;  // of a plane
  static constexpr int unit_items = repeats * part_tiles * window_planes * items;
  static constexpr int fitting = most_elements / (item_chunks * samples * loaded);
  static constexpr int in_flight = fitting >= 4 && unit_items % 4 == 0   ? 4
                                   : fitting >= 3 && unit_items % 3 == 0 ? 3
                                   : fitting >= 2 && unit_items % 2 == 0 ? 2
                                                                         : 1;

  struct Shared {
    uint4 x[planes][input_parts][plane_units];
    uint4 weight[channel_tiles][weight_sets][turns][steps][weight_parts][2][weight_blocks * 16];
    uint64 full[planes];
    uint64 empty[planes];
    uint64 prepared;  // the ring is free, and the weights are prepared
    float unscale[channel_tiles * channel_blocks * 16];
    float bias[channel_tiles * channel_blocks * 16];
    float scratch[consumer_warps][Numbers::slots][3];
    float moments[Numbers::slots][2];
    float part[parts > 1 ? Numbers::slots : 1][3];  // the block's moments, or sums, of its part
    uint32 largest[C::in_channels][samples];
    uint32 redo;     // RedoWord of the block's samples
    uint32 arrived;  // warpgroups at the ends of passes
    bool group_is_last[warpgroups];
  };

  // What every piece has a copy of.
  struct Block {
    const Parameters& p;
    Shared& shared;
  };

  static_assert(parts == 1 || !two_passes, "blocks of a cluster do not wait for a norm");

  static __device__ __forceinline__ int rank() {
    return parts == 1 ? 0 : static_cast<int>(blockIdx.x) % parts;
  }
  static __device__ __forceinline__ int first_tile() { return rank() % tile_parts * part_tiles; }
  static __device__ __forceinline__ int first_plane() { return rank() / tile_parts * part_planes; }
  // Clusters, or blocks, take units by turns.
  static __device__ __forceinline__ int first_unit() { return static_cast<int>(blockIdx.x) / parts; }
  static __device__ __forceinline__ int unit_step() { return static_cast<int>(gridDim.x) / parts; }

  // With one tap in the first dimension every plane is an output: its first product does not accumulate.
  static constexpr bool begins_always = taps0 == 1;
  // Otherwise sums of 16-bit elements begin at the bias and need no scale: they are the outputs.
  static constexpr bool begins_with_bias = !splits && !begins_always;

  // Consumers prepare the weights while the producers' first elements arrive. Where partial sums are added up
  // all threads do it: producers have few registers and would spill elements.
  static constexpr bool all_prepare = input_parts == 2 && parts == 1;

  using Sums = float[columns * 4];  // of a strip

  // Planes that a warpgroup has multiplied.
  struct Ring {
    uint32 count = 0;

    __device__ __forceinline__ uint32 slot() const { return count % planes; }
    __device__ __forceinline__ uint32 parity() const { return count / planes % 2; }
  };
  static_assert(planes == 2 || planes == 4 || planes == 8);

  // A value that the compiler knows to be the same in all lanes: descriptors are computed once for a warp.
  static __device__ __forceinline__ uint32 uniform(uint32 value) {
    return __shfl_sync(0xffffffffu, value, 0);
  }
};

}  // namespace onepass
