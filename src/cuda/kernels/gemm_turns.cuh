// A wide convolution and its norm in one launch, the warpgroups of a block by turns: while one multiplies,
// the others finish.
//
// A tile is a box of outputs of one sample by all output channels (up to 64). Its window of x comes to shared
// memory by copies of boxes (a tensor map says how x lies; what is beside x arrives as zeros), some rows of
// eight channels at a time, and is turned there to what gemm.cuh has: [eight channels][position][8], so that
// every tap is a legal start of the right operand. All of a tile's x has room beside all weights: a chunk of
// the next tile's is turned when the last warpgroup has multiplied this one's.
//
//   three warpgroups  a third of the tile's positions each: products, the chain before the norm, moments
//   three warps       turn x: matrices of eight channels by eight positions (`ldmatrix`, `stmatrix`); each
//   has
//                     copies of its own and sends for them
//   one warp          takes moments to the other tiles and brings theirs
//
// The tiles of a sample are on the chip at a time, and each holds its values until it knows the moments of
// the others. It does not wait for them: values are finished and stored when the next tile's products, chain
// and moments have been computed. They are held as f16, distances from the mean of the warp's own part in its
// deviations, in registers and some of them in shared memory.
//
// Registers are what this is short of, and what is spilled costs a trip to L2: L1 has what shared memory
// leaves, and waiting for other blocks empties it. So nothing is loaded from memory in the loop over tiles,
// and values of the chain are begun a few at a time.
#pragma once

#include "gemm_pack.cuh"
#include "gemm_slabs.cuh"

namespace onepass {

template <int Count>
struct GemmTurnsParameters : GemmParameters<Count> {
  const void* map;  // of x
};

struct GemmTurnsPackParameters : GemmPackParameters {
  const void* input;
  void* map;
};

// How x lies, as copies of boxes want to know it: [x][channel][y][z][sample].
template <class C, class Input, class Numbers>
struct GemmTensorMap {
  struct alignas(128) Map {
    uint32 word[32];
  };

  // By one warp. Copies want x on 16 bytes; where it is not, all samples are left to be done again.
  static __device__ __forceinline__ void build(const GemmTurnsPackParameters& p) {
#if __CUDA_ARCH__ >= 900
    const uint64 input = reinterpret_cast<uint64>(p.input) & ~uint64{15};
    const int64 batch = p.batch;
    __shared__ Map map;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    map.word[lane] = 0;
    __syncwarp();
    if (lane == 0) {
      const uint32 a = barrier::shared_address(&map);
      asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(a),
                   "l"(input)
                   : "memory");
      asm volatile("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%0], 4;" ::"r"(a) : "memory");
      dimension<0>(a, C::input_size(2), Numbers::raw_pitch);
      dimension<1>(a, C::in_channels, 8);
      dimension<2>(a, C::input_size(1), Numbers::copy_y);
      dimension<3>(a, C::input_size(0), 1);
      dimension<4>(a, batch, 1);
      stride<0>(a, C::input_stride(1));
      // Dimensions of one element have none.
      stride<1>(a, C::input_size(1) > 1 ? C::input_stride(3) : C::input_stride(1));
      stride<2>(a, C::input_size(0) > 1 ? C::input_stride(2) : C::input_stride(1));
      stride<3>(a, C::input_stride(0));
      // Any type of 16 bits: zeros are the same.
      asm volatile("tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%0], 1;" ::"r"(a) : "memory");
      asm volatile("tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [%0], 0;" ::"r"(a)
                   : "memory");
      asm volatile("tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%0], 0;" ::"r"(a) : "memory");
      asm volatile("tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%0], 0;" ::"r"(a) : "memory");
    }
    __syncwarp();
    static_cast<uint32*>(p.map)[lane] = map.word[lane];
    if (lane == 0 && reinterpret_cast<uint64>(p.input) % 16 != 0)
      atomicMax(p.only + batch, static_cast<uint32>(redo_all));
#endif
  }

 private:
#if __CUDA_ARCH__ >= 900
  template <int d>
  static __device__ __forceinline__ void dimension(uint32 a, int64 size, int box) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "r"(static_cast<uint32>(size))
                 : "memory");
    asm volatile("tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "r"(box)
                 : "memory");
    asm volatile("tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%0], %1, 1;" ::"r"(a), "n"(d)
                 : "memory");
  }
  template <int d>
  static __device__ __forceinline__ void stride(uint32 a, int64 elements) {
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;" ::"r"(a), "n"(d),
                 "l"(elements * Input::bytes)
                 : "memory");
  }
#endif
};

// The shared memory of a block.
template <class C, class Tail, class Numbers>
struct alignas(128) GemmTurnsShared {
  using Input = typename Tail::Input;
  using Output = typename Tail::Output;
  static constexpr int slabs = GemmSlabs<C, Tail, Numbers>::slabs_of_sample;
  static constexpr int raw_bytes = Numbers::copy_y * 8 * Numbers::raw_pitch * Input::bytes;
  static constexpr int half_bytes =
      Numbers::window * 16;  // eight channels of a window, and eight more places
  static constexpr int weight_bytes = Numbers::taps * 64 * 32;
  // Values on their way to memory, of each warp: eight channels of a row of the box, or of 64 columns. Words
  // of a channel, so that others begin in other banks.
  static constexpr int block_pitch = 36;
  static constexpr int row_pitch = Numbers::pitch / 8 / 2 * 8 + 4;
  static constexpr int value_words = 8 * (Numbers::by_rows ? row_pitch : block_pitch);
  static_assert(!Numbers::by_rows || row_pitch >= Numbers::pitch / 2);

  alignas(128) unsigned char x[Numbers::chunks][2 * half_bytes];
  alignas(128) unsigned char weights[Numbers::chunks][weight_bytes];
  alignas(128) unsigned char raw[Numbers::raw_slots][(raw_bytes + 127) / 128 * 128];
  alignas(16) uint32 values[4 * Numbers::groups][value_words];
  uint32 waiting[Numbers::waiting_words > 0 ? Numbers::waiting_words : 1][128 * Numbers::groups];
  int2 rows[Numbers::groups * ((Numbers::columns + Numbers::pitch - 1) /
                               Numbers::pitch)];  // of the box: where in a channel, pairs of outputs
  alignas(8) int offsets_after[Numbers::by_rows ? 2 : Numbers::groups * Numbers::columns];
  float2 held[2][Numbers::groups]
             [slabs];  // of slabs: what was taken off held values, what they were divided by
  float2 elements[4 * Numbers::groups];  // of a slab in a warp's columns, and 1 by that
  float4 channels[64];  // bias; weight and bias of the norm: a load from memory would be waited for each time
  // Of other tiles, of some slabs.
  alignas(16) float2 others[Numbers::merge_slabs][(Numbers::position_tiles + 1) / 2 * 2];
  // Of this tile and of the one before, whichever a warpgroup is at.
  float4 parts[2][Numbers::groups][slabs];  // of slabs, of each warpgroup: count, mean, M2
  float2 statistics[2][slabs];              // mean, 1 / deviation
  // Of each copy: its chunk, the eight channels' place in x and what is added for its rows, in bytes; and
  // where in x it comes from.
  uint4 copies[Numbers::chunks * 2 * Numbers::copies];
  int4 origins[Numbers::chunks * 2 * Numbers::copies];
  uint64 x_full[Numbers::chunks];
  uint64 x_empty[Numbers::chunks];
  uint64 weights_full[Numbers::chunks];
  uint64 raw_full[Numbers::raw_slots];
  uint64 parts_full[2];
  uint64 statistics_full[2];
  uint64 turn[Numbers::groups];

  __device__ __forceinline__ int* offsets() {
    if constexpr (Numbers::by_rows) {
      static_assert(sizeof(values) >= sizeof(int) * Numbers::groups * Numbers::columns);
      return reinterpret_cast<int*>(values);
    } else {
      return offsets_after;
    }
  }
};

// Turns x: what a copy left is [row][eight channels][raw_pitch].
template <class C, class Tail, class Numbers>
struct GemmTurnsStaging {
  using Input = typename Tail::Input;
  using Shared = GemmTurnsShared<C, Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  static constexpr int vector = 8;
  static_assert(Input::bytes == 2);
  // A step is four vectors of eight channels: four matrices.
  static constexpr int all = Numbers::copy_y * Numbers::raw_vectors;
  static constexpr int steps = (all + 3) / 4;
  static constexpr int at_once = steps <= 6 ? steps : (steps + 1) / 2;
  static_assert(Shared::raw_bytes <= 1 << 16 && Numbers::window <= 1 << 16);

  // Of each step: where this lane's row of a matrix lies in a copy, and where it goes in the window, in
  // bytes.
  uint32 from[steps];
  uint32 to[steps];

  // Where a tile's window begins in a row of x, at a vector.
  static __device__ __forceinline__ int first_of(const typename Geometry::Box& box) {
    return (box.first[2] + Geometry::low(2)) & ~(vector - 1);
  }

  // Copies begin at vectors of x, windows anywhere: the first places of a row are nowhere then, as are the
  // last. Those go to eight places behind the window.
  explicit __device__ __forceinline__ GemmTurnsStaging(int tile) {
    const typename Geometry::Box box(tile);
    const int shift = box.first[2] + Geometry::low(2) - first_of(box);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int own = i * 4 + lane / 8;
      const int row = own / Numbers::raw_vectors;
      const int first = (own - row * Numbers::raw_vectors) * vector;
      from[i] = own < all ? static_cast<uint32>((row * 8 + lane % 8) * Numbers::raw_pitch + first) * 2u : 0u;
      const int place = first + lane % 8 - shift;
      const bool inside = own < all && place >= 0 && place < Numbers::pitch;
      to[i] = inside ? static_cast<uint32>(row * Numbers::pitch + place) * 16u : nowhere;
    }
  }

  // Eight channels of a copy's rows, to the window that begins at x, `shift` bytes on. `before_storing` is
  // called once.
  template <class BeforeStoring>
  __device__ __forceinline__ void turn(uint32 raw, uint32 x, uint32 shift,
                                       BeforeStoring&& before_storing) const {
    const uint32 lane_nowhere = nowhere + threadIdx.x % 8 * 16;
#pragma unroll
    for (int begin = 0; begin < steps; begin += at_once) {
      uint32 word[at_once][4];
#pragma unroll
      for (int k = 0; k < at_once && begin + k < steps; ++k) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[k][0]), "=r"(word[k][1]), "=r"(word[k][2]), "=r"(word[k][3])
                     : "r"(raw + from[begin + k])
                     : "memory");
      }
      if (begin == 0) before_storing();
#pragma unroll
      for (int k = 0; k < at_once && begin + k < steps; ++k) {
        const uint32 moved = to[begin + k] + shift;
        const uint32 place = moved < lane_nowhere ? moved : lane_nowhere;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(x + place),
                     "r"(word[k][0]), "r"(word[k][1]), "r"(word[k][2]), "r"(word[k][3])
                     : "memory");
      }
    }
  }

 private:
  static constexpr uint32 nowhere = (Numbers::window - 8) * 16;
};

// Which columns of a warpgroup have an output where the box is whole.
template <class Geometry, class Numbers>
struct GemmTurnsBox {
  static constexpr __device__ bool has(int i) {
    const int y = i / Numbers::pitch;
    const int z = y / Geometry::rows_of_plane;
    return i % Numbers::pitch < Numbers::box_x && y - z * Geometry::rows_of_plane < Numbers::box_y &&
           z < Numbers::box_z;
  }
  // A bit for each eight columns of which some have none, in either warpgroup.
  static constexpr __device__ uint64 gaps() {
    uint64 bits = 0;
    for (int i = 0; i < Numbers::groups * Numbers::columns; ++i) {
      if (!has(i)) bits |= uint64{1} << (i % Numbers::columns / 8);
    }
    return bits;
  }
};

// The block: what each warp does.
template <class C, class Tail, class Numbers>
struct GemmTurns {
  using Parameters = GemmTurnsParameters<Tail::parameters>;
  using Input = typename Tail::Input;
  using Output = typename Tail::Output;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Shared = GemmTurnsShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Staging = GemmTurnsStaging<C, Tail, Numbers>;
  using Slabs = GemmSlabs<C, Tail, Numbers>;
  using Product = typename Numbers::Product;
  static constexpr int groups = Numbers::groups;  // warpgroups that multiply
  static_assert(groups == 3);
  static constexpr int consumers = 128 * groups;
  static constexpr int threads = consumers + gemm::staging_warps * 32;
  static constexpr int columns = Numbers::columns;
  static constexpr int sums = columns / 2;
  static constexpr int pairs = columns / 8;                     // of columns, in each row of a thread
  static constexpr int waiting_words = Numbers::waiting_words;  // of a thread's held ones, in shared memory
  static constexpr int group_rows = Slabs::group_rows;
  static constexpr int warp_slabs = 16 / group_rows;
  static constexpr int rows = Geometry::rows;
  using Box = GemmTurnsBox<Geometry, Numbers>;
  static constexpr uint64 gaps = Box::gaps();
  static_assert(pairs <= 64);
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);
  static_assert(16 % group_rows == 0 && Geometry::classes == 1);

  const Parameters& p;
  Shared& s;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp / 4;

  // A thread has two rows, and of each every fourth pair of columns: the sum of pair j, row h and element e
  // is number j * 4 + h * 2 + e.
  //
  // Values that wait for the moments of other tiles.
  // Those that registers have no room for lie in shared memory, the last ones.
  struct Held {
    static constexpr int own = 2 * pairs - waiting_words;  // in registers
    uint32 value[own];                                     // of pair j and row h, number 2 * j + h
  };

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Numbers::chunks; ++i) {
        barrier::initialise(&s.x_full[i],
                            chunk_copies < gemm::converting_warps ? chunk_copies : gemm::converting_warps);
        barrier::initialise(&s.x_empty[i], 4 * groups);
        barrier::initialise(&s.weights_full[i], 1);
      }
      for (int i = 0; i < Numbers::raw_slots; ++i) barrier::initialise(&s.raw_full[i], 1);
      for (int i = 0; i < 2; ++i) {
        barrier::initialise(&s.parts_full[i], 4 * groups);
        barrier::initialise(&s.statistics_full[i], 1);
      }
      for (int i = 0; i < groups; ++i) barrier::initialise(&s.turn[i], 4);
    }
    for (int c = static_cast<int>(threadIdx.x); c < rows; c += threads) {
      float bias = 0.0f;
      if constexpr (C::has_bias) bias = load_one<typename C::Bias>(p.parameter[1], c);
      s.channels[c] = float4{bias, Tail::weight(p, c), Tail::bias(p, c), 0.0f};
    }
    // A block has the same tile of every sample.
    const Item item(blockIdx.x, 1);
    const typename Geometry::Box box(item.position_tile);
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(tile_copies); i += threads) {
      const int eight = i / Numbers::copies;  // channels
      const int row = i % Numbers::copies * Numbers::copy_y;
      const int z = row / Numbers::window_y;
      s.copies[i] =
          uint4{static_cast<uint32>(eight / 2),
                barrier::shared_address(s.x[eight / 2]) + static_cast<uint32>(eight % 2 * Shared::half_bytes),
                static_cast<uint32>(row * Numbers::pitch * 16), 0u};
      s.origins[i] = int4{Staging::first_of(box), eight * 8,
                          box.first[1] + Geometry::low(1) + row - z * Numbers::window_y,
                          box.first[0] + Geometry::low(0) + z};
    }
    for (int i = static_cast<int>(threadIdx.x); i < groups * columns; i += threads)
      s.offsets()[i] = Geometry::target(item.position_tile, i);
    __syncthreads();
    // Outputs at the end of a row may have no place.
    if constexpr (Numbers::by_rows) {
      for (int r = static_cast<int>(threadIdx.x); r < groups * columns / Numbers::pitch; r += threads) {
        const int* const of_row = s.offsets() + r * Numbers::pitch;
        int count = 0;
        while (count < Numbers::box_x / 2 && of_row[2 * count] >= 0) ++count;
        s.rows[r] = int2{count > 0 ? of_row[0] : 0, count};
      }
      __syncthreads();
    }
  }

  template <class Body>
  __device__ __forceinline__ void for_each_item(Body&& body) const {
    const int64 count = Item::count(p.batch, 1);
#pragma unroll 1
    for (int64 i = blockIdx.x; i < count; i += gridDim.x) body(Item(i, 1));
  }

  // --- x and weights ---
  // Some rows of eight channels of x are a copy; each converting warp has copies of its own, and places for
  // them, and sends for the next one as soon as it has loaded one.
  static constexpr uint32 chunk_copies = 2 * Numbers::copies;
  static constexpr uint32 tile_copies = Numbers::chunks * chunk_copies;
  static constexpr int warp_slots = Numbers::raw_slots / gemm::converting_warps;
  // Each warp has something of every tile, else it would take a barrier's round for the one before.
  static_assert(tile_copies >= gemm::converting_warps);
  // An index that may be one of tiles after this one.
  template <class Next>
  static __device__ __forceinline__ void to_tile(uint32& index, Next&& next) {
    if constexpr (tile_copies >= Numbers::raw_slots) {
      if (index >= tile_copies) {
        index -= tile_copies;
        next();
      }
    } else {
#pragma unroll 1
      for (; index >= tile_copies; index -= tile_copies) next();
    }
  }
  struct Copies {
    int n;             // sample
    uint32 index;      // in the tile
    uint32 round = 0;  // of the tile
    uint32 count = 0;  // of the warp's

    explicit __device__ __forceinline__ Copies(int first)
        : n(static_cast<int>(Item(blockIdx.x, 1).n)), index(static_cast<uint32>(first)) {
      to_tile(index, [&] { to_next(); });
    }
    // That a block passes from one tile to the next.
    static __device__ __forceinline__ int samples() {
      return static_cast<int>(gridDim.x) / Numbers::position_tiles;
    }
    __device__ __forceinline__ void next() {
      index += gemm::converting_warps;
      to_tile(index, [&] { to_next(); });
      ++count;
    }
    __device__ __forceinline__ void to_next() {
      n += samples();
      round ^= 1u;
    }
    __device__ __forceinline__ int slot() const { return static_cast<int>(count % warp_slots); }
    __device__ __forceinline__ uint32 slot_round() const { return count / warp_slots & 1u; }
  };

  // One thread: copy `index` of a sample's tile, or of the next ones', if there is one.
  __device__ __forceinline__ void send(int n, uint32 index, int slot) const {
    to_tile(index, [&] { n += Copies::samples(); });
    if (n >= static_cast<int>(p.batch)) return;
    const int4 origin = s.origins[index];
    barrier::expect(&s.raw_full[slot], Shared::raw_bytes);
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
        "%4, %5, %6, %7}], [%2];" ::"r"(barrier::shared_address(s.raw[slot])),
        "l"(p.map), "r"(barrier::shared_address(&s.raw_full[slot])), "r"(origin.x), "r"(origin.y),
        "r"(origin.z), "r"(origin.w), "r"(n)
        : "memory");
  }

  // One thread.
  __device__ __forceinline__ void send_weights() const {
#pragma unroll 1
    for (int i = 0; i < Numbers::chunks; ++i) {
      barrier::expect(&s.weights_full[i], Shared::weight_bytes);
      barrier::copy(s.weights[i], static_cast<const unsigned char*>(p.packed) + i * Shared::weight_bytes,
                    Shared::weight_bytes, &s.weights_full[i]);
    }
  }

  __device__ __forceinline__ void convert() const {
    const int own_warp = warp - 4 * groups;
    const int first_slot = own_warp * warp_slots;
    Copies copy(own_warp);
    if (lane == 0) {
      asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(p.map) : "memory");
      for (int i = 0; i < warp_slots; ++i)
        send(copy.n, copy.index + static_cast<uint32>(i * gemm::converting_warps), first_slot + i);
      if (own_warp == 0) send_weights();
    }
    const Staging staging(Item(blockIdx.x, 1).position_tile);
#pragma unroll 1
    for (; copy.n < static_cast<int>(p.batch); copy.next()) {
      const int slot = first_slot + copy.slot();
      const uint4 place = s.copies[copy.index];
      barrier::wait_asleep(&s.raw_full[slot], copy.slot_round());
      staging.turn(barrier::shared_address(s.raw[slot]), place.y, place.z,
                   [&] { barrier::wait_asleep(&s.x_empty[place.x], copy.round ^ 1u); });
      // What the slot had has been loaded, else it could not be stored.
      if (lane == 0) send(copy.n, copy.index + Numbers::raw_slots, slot);
      __syncwarp();
      // The warp's last copy of the chunk: what was written is read by products.
      if ((copy.index + gemm::converting_warps) / chunk_copies != place.x) {
        barrier::release_to_copies();
        __syncwarp();
        if (lane == 0) barrier::arrive(&s.x_full[place.x]);
      }
    }
  }

  // --- Statistics ---
  // One warp takes the parts of all slabs to the other tiles and brings theirs: it has nothing else on its
  // way to memory, which others would wait for before they say that their parts are there.
  __device__ __forceinline__ void exchange() const {
    gemm::Ring<2> ring;
    for_each_item([&](const Item& item) {
      barrier::wait_asleep(&s.parts_full[ring.stage], ring.round);
      const auto& parts = s.parts[ring.stage];
      for (int slab = lane; slab < Slabs::slabs_of_sample; slab += 32) {
        Moments own{parts[0][slab].x, parts[0][slab].y, parts[0][slab].z};
#pragma unroll
        for (int g = 1; g < groups; ++g) slabs().merge(own, parts[g][slab]);
        __stcg(part(item.n, slab, item.position_tile), float2{own.mean, own.m2});
      }
      __syncwarp();
      if (lane == 0) {
        gemm::arrive(p.control + item.n);
        wait_for(p.control + item.n, static_cast<uint32>(Numbers::position_tiles));
      }
      __syncwarp();
      for (int first = 0; first < Slabs::slabs_of_sample; first += Numbers::merge_slabs) {
        fetch(item.n, first);
        merge(item, first, s.statistics[ring.stage]);
      }
      __syncwarp();
      if (lane == 0) barrier::arrive(&s.statistics_full[ring.stage]);
      ring.next();
    });
  }
  // Of a slab, what a tile has: mean and M2. Two tiles are copied at a time.
  static constexpr int part_pairs = (Numbers::position_tiles + 1) / 2;
  static constexpr int part_pitch = 2 * part_pairs;
  __device__ __forceinline__ float2* part(int64 n, int slab, int tile) const {
    return reinterpret_cast<float2*>(p.parts) + (n * Slabs::slabs_of_sample + slab) * part_pitch + tile;
  }
  // Of how many elements.
  static __device__ __forceinline__ float elements_of(int tile) {
    if constexpr (Geometry::outputs(0) % Numbers::box_z == 0 && Geometry::outputs(1) % Numbers::box_y == 0 &&
                  Geometry::outputs(2) % Numbers::box_x == 0)
      return static_cast<float>(Tail::group_channels * Numbers::box_z * Numbers::box_y * Numbers::box_x);
    const typename Geometry::Box box(tile);
    constexpr int sizes[3] = {Numbers::box_z, Numbers::box_y, Numbers::box_x};
    int count = Tail::group_channels;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      const int left = Geometry::outputs(d) - box.first[d];
      count *= left < sizes[d] ? left : sizes[d];
    }
    return static_cast<float>(count);
  }
  // By one warp: parts of `merge_slabs` slabs to shared memory, all of them on their way at once.
  __device__ __forceinline__ void fetch(int64 n, int first) const {
    const int left = Slabs::slabs_of_sample - first;
    const int count = (left < Numbers::merge_slabs ? left : Numbers::merge_slabs) * part_pairs;
    const auto* const from = reinterpret_cast<const float4*>(part(n, first, 0));
    const uint32 to = barrier::shared_address(s.others);
    __syncwarp();
    for (int i = lane; i < count; i += 32)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + static_cast<uint32>(i) * 16u),
                   "l"(from + i)
                   : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
  }
  // Lanes that merge a slab's parts together.
  static constexpr int team = 32 / Numbers::merge_slabs;
  // Sums of distances from the first part's mean, and of their squares: in one pass. That mean is one of
  // them, so that it is no further from the mean of all than the root of their number in deviations.
  __device__ __forceinline__ void merge(const Item& item, int first, float2* statistics) const {
    constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
    const int slab = first + lane / team;
    const bool exists = slab < Slabs::slabs_of_sample;
    const float2* const parts = s.others[exists ? lane / team : 0];
    const float origin = parts[0].x;
    float sum = 0.0f, square = 0.0f;
#pragma unroll 4
    for (int tile = lane % team; tile < Numbers::position_tiles; tile += team) {
      const float count = elements_of(tile);
      const float distance = parts[tile].x - origin;
      sum = fmaf(count, distance, sum);
      square += fmaf(count * distance, distance, parts[tile].y);
    }
    sum = lanes_sum<team>(sum) / elements;
    square = lanes_sum<team>(square) / elements;
    const float2 all{origin + sum, 1.0f / sqrtf(fmaxf(fmaf(-sum, sum, square), 0.0f) + Tail::eps)};
    if (exists && lane % team == 0) {
      statistics[slab] = all;
      if (item.position_tile == 0) {
        float* to = p.statistics + 2 * (item.n * Slabs::slabs_of_sample + slab);
        to[0] = all.x;
        to[1] = all.y;
      }
    }
  }
  __device__ __forceinline__ const Slabs slabs() const { return Slabs{p}; }

  // --- Products ---
  // Of an operand by rows of 16 bytes, eight of them together, the next eight channels `leading` bytes on.
  // `begin` is its address in 16 bytes and the distance, which are its lower half.
  static __device__ __forceinline__ uint64 descriptor(uint32 begin, int bytes) {
    return static_cast<uint64>(128 >> 4) << 32 | (begin + static_cast<uint32>(bytes >> 4));
  }

  // When all products are under way the next warpgroup has its turn.
  __device__ __forceinline__ void multiply(uint32 tile, float (&d)[sums]) const {
    const uint32 round = tile & 1u;
    barrier::wait(&s.turn[group], round);
    uint32 x_begin = (barrier::shared_address(s.x[0]) >> 4) + group * columns +
                     (static_cast<uint32>(Shared::half_bytes >> 4) << 16);
    uint32 weights_begin = (barrier::shared_address(s.weights[0]) >> 4) | 64u << 16;
#pragma unroll
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      barrier::wait(&s.x_full[chunk], round);
      barrier::wait(&s.weights_full[chunk], 0u);
      // Descriptors are computed again: those of all products would be kept in registers.
      asm volatile("" : "+r"(x_begin), "+r"(weights_begin));
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int t = 0; t < Numbers::taps; ++t) {
        Product::run(d, descriptor(weights_begin, chunk * Shared::weight_bytes + t * 64 * 32),
                     descriptor(x_begin, chunk * 2 * Shared::half_bytes + Geometry::tap_shift(t) * 16),
                     chunk + t > 0 ? 1 : 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (chunk > 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (lane == 0) barrier::arrive(&s.x_empty[chunk - 1]);
      }
    }
    if (lane == 0) barrier::arrive(&s.turn[group == groups - 1 ? 0 : group + 1]);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0) barrier::arrive(&s.x_empty[Numbers::chunks - 1]);
#pragma unroll
    for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(d[i])::"memory");
  }

  // --- The chain before the norm, and moments ---
  __device__ __forceinline__ int row(int h) const { return warp % 4 * 16 + lane / 4 + 8 * h; }

  // Which of the thread's columns have an output.
  struct Mask {
    uint32 bits[(2 * pairs + 31) / 32];
    bool whole;  // of the warp: all but those beside the box

    __device__ __forceinline__ bool has(int j, int e) const {
      return bits[(2 * j + e) / 32] >> ((2 * j + e) % 32) & 1u;
    }
  };
  __device__ __forceinline__ Mask mask() const {
    Mask mask{};
    bool whole = true;
    const int first = group * columns + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < pairs; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool has = s.offsets()[first + 8 * j + e] >= 0;
        mask.bits[(2 * j + e) / 32] |= static_cast<uint32>(has) << ((2 * j + e) % 32);
        whole = whole && (has || !Box::has(first + 8 * j + e));
      }
    }
    mask.whole = __all_sync(0xffffffffu, whole);
    // The same of all slabs.
    const float elements = lanes_sum<slab_lanes>(static_cast<float>((3 - own_slabs) * count_of(mask)));
    if (lane == 0) s.elements[warp] = float2{elements, elements > 0.0f ? 1.0f / elements : 0.0f};
    __syncwarp();
    return mask;
  }
  static __device__ __forceinline__ int count_of(const Mask& mask) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(mask.bits) / 4); ++i) count += __popc(mask.bits[i]);
    return count;
  }

  // Which of the thread's two rows lie in which of its slabs: of one, or of two.
  static constexpr int own_slabs = group_rows == 16 ? 1 : 2;
  static constexpr int slab_lanes = group_rows == 16 ? 32 : 4 * group_rows;
  // A value of every slab of the thread, summed over the slab's lanes.
  static __device__ __forceinline__ void add_lanes(float (&value)[own_slabs]) {
#pragma unroll
    for (int offset = slab_lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (float& v : value) v += __shfl_xor_sync(0xffffffffu, v, offset);
    }
  }

  // Sums of each of the thread's slabs, as some that do not wait for each other.
  struct Sums {
    static constexpr int lines = 4;
    float sum[own_slabs][lines] = {};

    __device__ __forceinline__ float& of(int i) {
      return sum[i / 2 % 2 % own_slabs][(i % 2 + i / 4 * 2) % lines];
    }
    __device__ __forceinline__ void finish(float (&all)[own_slabs]) const {
#pragma unroll
      for (int k = 0; k < own_slabs; ++k) all[k] = (sum[k][0] + sum[k][1]) + (sum[k][2] + sum[k][3]);
      add_lanes(all);
    }
  };
  // Whether sum i has an output where the box is whole: known to the compiler but for a few.
  static __device__ __forceinline__ bool is_inside(const Mask& mask, int i) {
    return (gaps >> (i / 4) & 1u) == 0 || mask.has(i / 4, i % 2);
  }

  // Bias, then the chain, in place; and the values' sums, if the box is whole. Some values at a time: what is
  // added to those after the next depends on what became of these (`nothing` is zero, which the compiler does
  // not know), else so many are begun at once that registers do not suffice.
  __device__ __forceinline__ void activate(int64 n, const Mask& mask, uint32 nothing, float (&d)[sums],
                                           Sums& all) const {
    constexpr int at_once = 7;
    float bias[2][2];
    ChannelValues<Before, 1> values[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = row(h) < rows ? row(h) : 0;
      bias[0][h] = bias[1][h] = s.channels[channel].x;
      values[h].load(p, n, channel);
    }
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      const int h = i / 2 % 2;
      float& added = bias[i / at_once % 2][h];
      if (i % at_once < 2 && i >= 2 * at_once)
        added = __uint_as_float(__float_as_uint(added) | (__float_as_uint(d[i - at_once - 2]) & nothing));
      typename Before::template Tensors<1> tensors;
      d[i] = Before::value(d[i] + added, values[h].value[0], tensors, 0);
      if (is_inside(mask, i)) all.of(i) += d[i];
    }
  }

  // The moments of the warp's slabs, left for all tiles; `mean` and `deviation` of the thread's rows.
  __device__ __forceinline__ void leave_parts(uint32 tile, const Mask& mask, const float (&values)[sums],
                                              Sums& of_whole, float (&mean)[2], float (&deviation)[2]) const {
    float own[own_slabs], m2[own_slabs];
    const float2 elements = s.elements[warp];
    if (mask.whole) {
      add_up<true>(mask, elements.y, values, of_whole, own, m2);
    } else {
      add_up<false>(mask, elements.y, values, of_whole, own, m2);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mean[h] = own[h % own_slabs];
      // Any that is about as large will do.
      const float variance = m2[h % own_slabs] * elements.y;
      deviation[h] = variance > 1e-30f ? variance * rsqrtf(variance) : 1.0f;
    }
#pragma unroll
    for (int k = 0; k < own_slabs; ++k) {
      if (lane % slab_lanes == 0 && row(k) < rows) {
        s.parts[tile & 1u][group][row(k) / group_rows] = float4{elements.x, own[k], m2[k], 0.0f};
        s.held[tile & 1u][group][row(k) / group_rows] = float2{mean[k], deviation[k]};
      }
    }
    __syncwarp();
    if (lane == 0) barrier::arrive(&s.parts_full[tile & 1u]);
  }
  template <bool whole>
  __device__ __forceinline__ void add_up(const Mask& mask, float per_element, const float (&values)[sums],
                                         Sums& all, float (&own)[own_slabs], float (&m2)[own_slabs]) const {
    Sums squares;
    // Asked again each time: answers for all columns would be kept in registers.
    Mask asked = mask;
#pragma unroll
    for (uint32& bits : asked.bits) asm volatile("" : "+r"(bits));
    if constexpr (!whole) {
      all = Sums{};
#pragma unroll
      for (int i = 0; i < sums; ++i) {
        if (asked.has(i / 4, i % 2)) all.of(i) += values[i];
      }
    }
    all.finish(own);
#pragma unroll
    for (float& mean : own) mean *= per_element;
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      const float distance = values[i] - own[i / 2 % 2 % own_slabs];
      if (whole ? is_inside(asked, i) : asked.has(i / 4, i % 2))
        squares.of(i) = fmaf(distance, distance, squares.of(i));
    }
    squares.finish(m2);
  }

  // --- The norm, the chain after it and the output ---
  // What the thread's rows are multiplied by and what is added then.
  struct Norm {
    float scale[2];
    float shift[2];
  };
  __device__ __forceinline__ Norm norm(uint32 tile) const {
    barrier::wait(&s.statistics_full[tile & 1u], tile >> 1 & 1u);
    Norm norm;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = row(h) < rows ? row(h) : 0;
      const float2 own = s.statistics[tile & 1u][channel / group_rows];
      const float2 held = s.held[tile & 1u][group][channel / group_rows];
      const float4 affine = s.channels[channel];
      const float scale = affine.y * own.y;
      norm.scale[h] = scale * held.y;
      norm.shift[h] = fmaf(held.x - own.x, scale, affine.z);
    }
    return norm;
  }

  __device__ __forceinline__ uint32 held_word(const Held& held, int i) const {
    return i < Held::own ? held.value[i] : s.waiting[i - Held::own][threadIdx.x];
  }

  // A pair of columns of the thread's row h, done.
  static __device__ __forceinline__ void finished(uint32 word, const Norm& norm,
                                                  const ChannelValues<After, 1>& values, int h,
                                                  float (&two)[2]) {
    f16::unpack(word, two[0], two[1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      typename After::template Tensors<1> tensors;
      two[e] = After::value(fmaf(two[e], norm.scale[h], norm.shift[h]), values.value[0], tensors, 0);
    }
  }

  // Two neighbouring columns lie side by side in the output, or neither has an output.
  static constexpr bool pairs_fit = Numbers::box_x % 2 == 0 && Numbers::pitch % 2 == 0 &&
                                    C::output_size(2) % 2 == 0 && C::stride(0) % 2 == 0 &&
                                    C::stride(1) % 2 == 0 && C::stride(2) % 2 == 0 && C::stride(3) % 2 == 0;

  // Two neighbours.
  static __device__ __forceinline__ void put(unsigned char* begin, int2 offsets, uint32 word, bool in_pairs) {
    auto* const to = reinterpret_cast<uint16*>(begin);
    if (in_pairs) {
      if (offsets.x >= 0) __stcs(reinterpret_cast<uint32*>(to + offsets.x), word);
    } else {
      if (offsets.x >= 0) to[offsets.x] = static_cast<uint16>(word);
      if (offsets.y >= 0) to[offsets.y] = static_cast<uint16>(word >> 16);
    }
  }

  // The held values leave eight channels of 64 columns at a time through shared memory, so that a warp writes
  // whole lines.
  static constexpr int block_pairs = 8;
  static constexpr int blocks = (pairs + block_pairs - 1) / block_pairs;

  __device__ __forceinline__ void put_block(int block, int64 n, const Held& held, const Norm& norm) const {
    constexpr int pitch = Shared::block_pitch;
    constexpr int64 row_bytes = C::stride(1) * Output::bytes;
    uint32* const stage = s.values[warp];
    const int first_row = warp % 4 * 16;
    const int first = block * block_pairs;
    const bool has = first * 8 + 2 * lane < columns;
    const int2 offsets =
        *reinterpret_cast<const int2*>(s.offsets() + group * columns + first * 8 + (has ? 2 * lane : 0));
    const bool in_pairs = pairs_fit && reinterpret_cast<uint64>(p.output) % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ChannelValues<After, 1> values;
      values.load(p, n, row(h) < rows ? row(h) : 0);
      __syncwarp();
#pragma unroll
      for (int k = 0; k < block_pairs; ++k) {
        if (first + k >= pairs) break;
        float two[2];
        finished(held_word(held, 2 * (first + k) + h), norm, values, h, two);
        stage[lane / 4 * pitch + 4 * k + lane % 4] = Output::pack(two[0], two[1]);
      }
      __syncwarp();
      unsigned char* to = static_cast<unsigned char*>(p.output) + n * C::stride(0) * Output::bytes +
                          (first_row + 8 * h) * row_bytes;
#pragma unroll 2
      for (int r = 0; r < 8; ++r) {
        if (rows % 64 != 0 && first_row + 8 * h + r >= rows) break;
        if (has) put(to, offsets, stage[r * pitch + lane], in_pairs);
        to += row_bytes;
      }
    }
  }

  // The same of a row of the box, two neighbours at a time, by whole sectors of memory but for the row's
  // first and last: parts of sectors cost more.
  static_assert(!Numbers::by_rows || pairs_fit);
  __device__ __forceinline__ void put_row(int box_row, int64 n, const Held& held, const Norm& norm) const {
    constexpr int row_bytes = static_cast<int>(C::stride(1) * Output::bytes);
    uint32* const stage = s.values[warp];
    const int first_row = warp % 4 * 16;
    const int2 row = s.rows[group * (columns / Numbers::pitch) + box_row];
    const int bytes = row.y * 4;
    // Of the sample: a sector's begin, and offsets from there.
    const uint64 sample =
        reinterpret_cast<uint64>(p.output) + static_cast<uint64>(n) * (C::stride(0) * Output::bytes);
    unsigned char* const sector = reinterpret_cast<unsigned char*>(sample & ~uint64{31});
    const uint32 begin = (static_cast<uint32>(sample) & 31u) + static_cast<uint32>(row.x * Output::bytes) +
                         static_cast<uint32>(first_row * row_bytes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ChannelValues<After, 1> values;
      values.load(p, n, this->row(h) < rows ? this->row(h) : 0);
      __syncwarp();
      // All words before the first is stored: the compiler does not know that they lie elsewhere.
      uint32 words[Numbers::pitch / 8];
#pragma unroll
      for (int k = 0; k < Numbers::pitch / 8; ++k)
        words[k] = held_word(held, 2 * (box_row * (Numbers::pitch / 8) + k) + h);
#pragma unroll
      for (int k = 0; k < Numbers::pitch / 8; ++k) {
        float two[2];
        finished(words[k], norm, values, h, two);
        stage[lane / 4 * Shared::row_pitch + 4 * k + lane % 4] = Output::pack(two[0], two[1]);
      }
      __syncwarp();
      if (reinterpret_cast<uint64>(p.output) % 4 != 0) {
        put_elements(n, first_row + 8 * h, row, stage);
        continue;
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        if (rows % 64 != 0 && first_row + 8 * h + r >= rows) break;
        const uint32 to = begin + static_cast<uint32>((8 * h + r) * row_bytes);
        const uint32 lane_to = (to & ~31u) + static_cast<uint32>(lane * 4);
        const uint32 u = lane_to - to;  // negative before the row
        const uint32 from = barrier::shared_address(stage + r * Shared::row_pitch) + u;
        put_pieces(sector + lane_to, from, u, bytes);
      }
    }
  }
  // Where the output is not on 4 bytes: eight channels from `first` on.
  __device__ __forceinline__ void put_elements(int64 n, int first, int2 row, const uint32* stage) const {
#pragma unroll 1
    for (int r = 0; r < 8 && first + r < rows; ++r) {
      uint16* const to =
          static_cast<uint16*>(p.output) + n * C::stride(0) + (first + r) * C::stride(1) + row.x;
      const auto* const from = reinterpret_cast<const uint16*>(stage + r * Shared::row_pitch);
#pragma unroll 1
      for (int i = lane; i < 2 * row.y; i += 32) to[i] = from[i];
    }
  }
  // A word of each 128 bytes of a row, if it has one there: `u` bytes from its begin, of `bytes`. Loaded it
  // is from wherever it would be.
  static __device__ __forceinline__ void put_pieces(unsigned char* to, uint32 from, uint32 u, int bytes) {
    asm volatile(
        "{\n.reg .pred has;\n.reg .b32 word;\nsetp.lt.u32 has, %0, %1;\n"
        "ld.shared.b32 word, [%2];\n@has st.global.cs.b32 [%3], word;\n}" ::"r"(u),
        "r"(bytes), "r"(from), "l"(to)
        : "memory");
    put_pieces_from<128>(to, from, u, bytes);
  }
  template <int first>
  static __device__ __forceinline__ void put_pieces_from(unsigned char* to, uint32 from, uint32 u,
                                                         int bytes) {
    if constexpr (first < Numbers::box_x * Output::bytes + 28) {
      asm volatile(
          "{\n.reg .pred has;\n.reg .b32 word;\nsetp.lt.s32 has, %0, %1;\n"
          "ld.shared.b32 word, [%2 + %4];\n@has st.global.cs.b32 [%3 + %4], word;\n}" ::"r"(u),
          "r"(bytes - first), "r"(from), "l"(to), "n"(first)
          : "memory");
      put_pieces_from<first + 128>(to, from, u, bytes);
    }
  }

  // --- A warpgroup ---
  // A tile's values are finished when the next one's have been multiplied: by then the moments of other tiles
  // have come.
  __device__ __forceinline__ void consume() const {
    const Mask mask = this->mask();
    const auto batch = static_cast<int>(p.batch);
    Held held;
    const uint32 nothing = threadIdx.y;
    // One more than there are tiles: the last one has the values of the one before to finish alone.
    uint32 tile = 0;  // of the block
#pragma unroll 1
    for (int n = static_cast<int>(Item(blockIdx.x, 1).n);; n += Copies::samples(), ++tile) {
      // As halves first: that makes room for what finishing takes.
      uint32 halves[2 * pairs];
      if (n < batch) {
        float d[sums];
        float mean[2], deviation[2];
        multiply(tile, d);
        Sums all;
        activate(n, mask, nothing, d, all);
        leave_parts(tile, mask, d, all, mean, deviation);
        pack(d, mean, deviation, halves);
      }
      if (tile > 0) finish(tile - 1, n - Copies::samples(), held);
      if (n >= batch) break;
      hold(halves, held);
    }
  }

  static __device__ __forceinline__ void pack(const float (&d)[sums], const float (&mean)[2],
                                              const float (&deviation)[2], uint32 (&halves)[2 * pairs]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float per = pointwise::reciprocal_fast(deviation[h]);
      const float shift = -mean[h] * per;
#pragma unroll
      for (int j = 0; j < pairs; ++j)
        halves[2 * j + h] =
            f16::pack(fmaf(d[j * 4 + h * 2], per, shift), fmaf(d[j * 4 + h * 2 + 1], per, shift));
    }
  }
  // Those held before have been stored.
  __device__ __forceinline__ void hold(const uint32 (&halves)[2 * pairs], Held& held) const {
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) {
      if (i < Held::own) {
        held.value[i] = halves[i];
      } else {
        s.waiting[i - Held::own][threadIdx.x] = halves[i];
      }
    }
  }

  __device__ __forceinline__ void finish(uint32 tile, int64 n, const Held& held) const {
    const Norm norm = this->norm(tile);
    if constexpr (Numbers::by_rows) {
#pragma unroll
      for (int r = 0; r < columns / Numbers::pitch; ++r) put_row(r, n, held, norm);
    } else {
#pragma unroll
      for (int b = 0; b < blocks; ++b) put_block(b, n, held, norm);
    }
  }

  __device__ __forceinline__ void run() const {
    start();
    // Together what the launch gives a block of 512 threads: 128 each.
    if (threadIdx.x >= consumers) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
      if (threadIdx.x < consumers + gemm::converting_warps * 32) {
        convert();
      } else {
        exchange();
      }
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
      // The first turn is the first warpgroup's.
      if (group == groups - 1 && lane == 0) barrier::arrive(&s.turn[0]);
      consume();
    }
  }
};

}  // namespace onepass
