// A thin convolution with its chains and norm in one launch, by tensor cores.
//
// A *hold* says where values wait until the statistics of the norm are known, and schedules the passes:
//   HoldByRecomputing   nowhere: every output is computed twice (hold/recompute.cuh)
//   HoldInOutput        in the output, or in a ring of the workspace (hold/in_output.cuh)
//   HoldInCluster       in the shared memory of a cluster (hold/in_cluster.cuh)
//
// A *cell* is one output position of every class (thin.h). A tile is `tile_y` rows of `tile_x` cells of a
// plane, and the work of one warp: its window of x lies in shared memory, channel by channel. A product has
// M = 16 output channels, N = 8 neighbouring cells and K = twice a *group* of four terms, of each class only
// its own taps; 16 output channels of the whole tile come before the next 16. A lane then holds neighbours of
// a row in all its classes. Rows are put together in shared memory, with the 16-byte phase of where they go,
// and stored as vectors. Where four neighbouring lanes have whole sectors of a row, or eight have those of a
// position (channels after space), they store them at once. Warps wait for each other only for statistics.
//
// ThinMma has the kernel's types, sizes and shared memory. Its pieces are nested classes, each defined in its
// own file of mma/ or hold/: they use these names as they are. They are plain objects, each with a copy of
// the warp's state (Warp).
//
// Products of tf32 operands are exact. Operands of 16 bits are tf32 numbers; f32 ones are rounded to it in
// that mode, and else split into two, which leaves 2^-22 of a term. Tiles with an element that is not finite,
// or so large that what follows might overflow, are summed term by term instead ("careful").
#pragma once

#include "thin/mma/terms.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class P>
struct ThinMma {
  // --- Pieces ---
  struct Chains;       // mma/chains.cuh: the before-chain, and how exactly a tile is computed
  struct Weights;      // mma/weights.cuh
  struct Window;       // mma/window.cuh
  struct Products;     // mma/products.cuh
  struct TileMoments;  // mma/moments.cuh
  struct Outputs;      // mma/outputs.cuh
  struct Send;         // mma/send.cuh
  struct Careful;      // mma/careful.cuh
  struct Statistics;   // mma/statistics.cuh
  struct Tickets;      // mma/tickets.cuh

  // --- What pieces hand to each other ---
  template <class Chain>
  struct Operands;   // of a lane's channels
  struct Fragments;  // weights of 16 channels
  struct Limits;     // of |x|, for each way
  template <int rz>
  struct Held;       // weights of one class of z in registers
  struct Columns;    // elements of the window
  struct Distances;  // sums of distances from a pivot
  // How a tile is computed, by the largest |x| of its window: by short forms of the chain, by exact ones, or
  // output by output.
  enum Way { narrow, wide, careful };

  // --- Holds ---
  struct Recompute;  // hold/recompute.cuh
  struct InOutput;   // hold/in_output.cuh
  struct InCluster;  // hold/in_cluster.cuh
  struct Cluster;    // hold/cluster_layout.cuh: sizes of InCluster

  using Parameters = P;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Output = typename Tail::Output;
  using Terms = ThinTerms<C>;
  using Term = typename Terms::Term;
  using Patterns = ThinPatterns<C, Numbers::plane, Numbers::window_y, Numbers::row_pitch>;

  static constexpr int threads = Numbers::threads;
  static constexpr int warps = Numbers::warps;
  static constexpr int channels = C::channels;
  static constexpr int row_tiles = Numbers::row_tiles;  // tiles of 16 channels in a block
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
  static constexpr int cells_x = (out_x + classes_x - 1) / classes_x;
  static constexpr int tile_y = Numbers::tile_y;
  static constexpr int tile_x = Numbers::tile_x;
  // An item is `spans` times 8 cells: neighbours of one row, or of several rows.
  static constexpr int spans_y = Numbers::spans_y;
  static constexpr int spans_x = Numbers::spans_x;
  static constexpr int spans = spans_y * spans_x;
  static constexpr int columns = tile_x / (8 * spans_x);
  static constexpr int halves = channels > 8 ? 2 : 1;  // of a product's 16 rows
  // A lane has row `quad` of each half. Where channels lie after space, the two rows are neighbouring
  // channels.
  static constexpr bool interleaved = Numbers::interleaved;
  static constexpr __device__ int row_channel(int half, int quad) {
    return interleaved && halves == 2 ? 2 * quad + half : half * 8 + quad;
  }
  // The window: rows begin `lead` elements early, at a vector of the input.
  static constexpr int window_y = Numbers::window_y;
  static constexpr int lead = Numbers::lead;
  static constexpr int row_pitch = Numbers::row_pitch;
  static constexpr int plane = Numbers::plane;
  static constexpr int window_words = C::in_channels * plane;
  static constexpr int input_width = 16 / Tail::Input::bytes;
  // 16-bit elements are copied asynchronously as vectors and converted afterwards. With `prefetches` the next
  // window has a place of its own and arrives while a pass runs. Otherwise it arrives after the pass, 16-bit
  // elements in the stage of the outputs.
  static constexpr bool prefetches = Numbers::prefetches;
  static constexpr bool is_short = Tail::Input::bytes == 2;
  static constexpr int raw_plane = Numbers::window_z * window_y * row_pitch;
  static constexpr int raw_elements = is_short && Numbers::rows_are_vectors ? C::in_channels * raw_plane : 0;
  static_assert(prefetches || raw_elements * 2 <= Numbers::stage_bytes);
  static constexpr int windows = prefetches && !is_short ? 2 : 1;
  static constexpr int patterns = Patterns::table.count > 0 ? Patterns::table.count : 1;
  static_assert(patterns < Patterns::most);
  static_assert(plane % 8 == 0 && row_pitch % input_width == 0);
  static constexpr bool in_registers = Numbers::weights_in_registers;
  static constexpr bool splits = Numbers::splits;
  // Shared memory holds the weights, unless one set of registers holds them all, then the low parts of split
  // weights.
  static constexpr bool shares_weights = !in_registers || row_tiles > 1;
  static constexpr int first_rest = shares_weights ? products * row_tiles : 0;
  static constexpr int shared_weights = first_rest + (splits ? products * row_tiles : 0);

  // The stage of rows: one class of z, all classes of y and x, `stage_y` rows of cells, 16 channels. A chunk
  // is what is contiguous in the output: the whole stage where tiles have whole rows, else a row of one class
  // of y.
  static constexpr bool whole_rows = Numbers::tiles_x == 1;
  static constexpr int stage_y = Numbers::stage_y;
  static_assert(stage_y % spans_y == 0 && tile_y % stage_y == 0);
  static constexpr bool is_direct = Numbers::piece > 0;  // without a stage
  static constexpr int width = 16 / Output::bytes;
  static constexpr int sector = 32 / Output::bytes;
  // The earlier tile writes a sector that two tiles share, and recomputes the later tile's part of it.
  static constexpr bool overlaps = Numbers::overlaps;
  static constexpr int chunk_elements = whole_rows ? stage_y * classes_y * out_x : tile_x * classes_x;
  static constexpr int chunk_pitch = Numbers::chunk_pitch;
  static constexpr int channel_pitch = Numbers::channel_pitch;
  static constexpr int staged_channels = channels < 16 ? channels : 16;

  struct alignas(16) WarpShared {
    alignas(16) unsigned char stage[Numbers::stage_bytes];
    alignas(16) float x[windows * window_words];
    alignas(16) uint16 raw[prefetches && raw_elements > 0 ? raw_elements : 8];
    float moments[row_tiles * 16][3];
  };
  struct alignas(16) Shared {
    WarpShared warp[warps];
    alignas(16) uint32 weights[shared_weights > 0 ? shared_weights : 1][32][4];
    uint32 drawn;
  };
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);

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
    __device__ __forceinline__ Tile(int64 sample, int first_z, int first_y, int first_x)
        : n(sample), index(0), z(first_z), y(first_y), x(first_x) {}
  };

  template <class Body>
  static __device__ __forceinline__ void for_each_class(Body&& body) {
    for_constant<classes_z>([&](auto rz) {
      for_constant<classes_y>([&](auto ry) { for_constant<classes_x>([&](auto rx) { body(rz, ry, rx); }); });
    });
  }

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

  static __device__ __forceinline__ int64 output_index(int64 n, int channel, int z, int y, int x) {
    return n * C::stride(0) + channel * C::stride(1) + z * C::stride(2) + y * C::stride(3) + x * C::stride(4);
  }

  // Sums are the convolution's times this factor. For a swish they are halved, which is exact: x sigmoid(x) =
  // h tanh(h) + h with h = x / 2.
  static constexpr float log2_e = 1.4426950408889634f;
  static constexpr float scale = Numbers::begins_with_swish ? 0.5f : 1.0f;

  // Sums of 16 channels of the classes (rz, ry, all of x): [class][8 cells], four a lane.
  using Sums = float[classes_x][spans][4];

  // The state of a warp; every piece has a copy. A hold makes it in place. Where a function returned it, nvcc
  // 13.0 turned the choice by `in_quad` in Products::columns_of into a switch and left it in the loops over
  // items: 7 more of 110 to 190 instructions, s60 took 2 to 4% longer.
  struct Warp {
    const Parameters& p;
    Shared& shared;
    const int first_channel = 0;  // of the block
    WarpShared& area = shared.warp[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    const int quad = lane / 4;  // output channel of a product; the lane has the one 8 further too
    const int in_quad = lane % 4;
  };
};

}  // namespace onepass
