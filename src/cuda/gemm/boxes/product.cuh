// The product of the row "gemm_boxes": copies of boxes, wgmma, and what follows the convolution.
#pragma once

#include "gemm/boxes/store.cuh"
#include "gemm/packed/weights.cuh"
#include "gemm/product/wgmma.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct BoxesGemm {
  using Parameters = BoxesParameters<Tail::parameters>;
  using Geometry = BoxGeometry<C, Numbers>;
  using Rows = PackedGemmGeometry<C, Numbers>;  // of weights: columns of the product
  using Product = typename Numbers::Product;
  static constexpr int columns = Numbers::tile_channels;
  static constexpr int sums = columns / 2;
  static constexpr int products = Numbers::products;  // of 64 rows, of a warpgroup
  static constexpr int channel_tiles = Numbers::padded_channels / columns;
  static constexpr int octets = Numbers::chunk_channels / 8;
  static constexpr int x_stages = Numbers::x_stages, weight_stages = Numbers::weight_stages;
  // x: [position][channel], its 16-byte pieces swizzled by their address: a window may be read from any
  // position on.
  static constexpr int position_bytes = octets * 16;
  static constexpr int x_bytes = Numbers::stage_positions * octets * 16;
  static constexpr int window_bytes = Geometry::positions * octets * 16;
  static constexpr int tap_bytes = octets * columns * 16;
  static constexpr int weight_bytes = Numbers::stage_taps * tap_bytes;
  static constexpr int terms = octets / 2;  // products of 16 terms a tap
  static constexpr int last_terms = (Numbers::input_channels - 1) / 16 % terms + 1;  // of the last chunk
  static constexpr bool held = Numbers::held;                                        // for the norm
  using Hold = BoxesHold<C, Tail, Numbers>;
  static constexpr bool norms = held || Numbers::twice;
  struct Nothing {};
  template <bool, class Of>
  struct SharedOf {
    using Type = Nothing;
  };
  template <class Of>
  struct SharedOf<true, Of> {
    using Type = typename Of::Shared;
  };
  struct Shared : SharedOf<norms, Hold>::Type, boxes::Staging<Numbers::stored, 2 * 64 * products, columns> {
    alignas(1024) unsigned char x[x_stages][(x_bytes + 1023) / 1024 * 1024];
    alignas(128) unsigned char weights[weight_stages][weight_bytes];
    uint64 x_full[x_stages];
    uint64 x_empty[x_stages];
    uint64 weights_full[weight_stages];
    uint64 weights_empty[weight_stages];
  };
  static_assert(sizeof(Shared) == Numbers::shared_bytes);

  const Parameters& p;
  Shared& s;

  template <class Body>
  __device__ __forceinline__ void for_each_tile(Body&& body) const {
    const int64 count = p.tiles * channel_tiles;
#pragma unroll 1
    for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
      if constexpr (held) {
        // Tiles of a unit are neighbours: all run at the same time.
        constexpr uint32 unit_tiles = Hold::unit_tiles, units = Hold::units_of_sample;
        constexpr uint32 of_unit = Hold::unit_channel_tiles;
        const uint32 unit = static_cast<uint32>(i) / unit_tiles;
        const uint32 own = static_cast<uint32>(i) - unit * unit_tiles;
        body(typename Geometry::Tile(unit / units * Hold::sample_boxes + own / of_unit),
             static_cast<int>(unit % units * of_unit + own % of_unit));
      } else {
        const uint32 tile = static_cast<uint32>(i) / static_cast<uint32>(channel_tiles);
        body(typename Geometry::Tile(tile),
             Rows::in_turn(static_cast<int>(static_cast<uint32>(i) - tile * channel_tiles), tile));
      }
    }
  }

  __device__ __forceinline__ void copy_box(unsigned char* to, int channel, int x, int y, int z, int n,
                                           uint64* full) const {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(barrier::shared_address(to)),
        "l"(p.map), "r"(barrier::shared_address(full)), "r"(channel), "r"(x), "r"(y), "r"(z), "r"(n)
        : "memory");
  }

  // By one thread: the copies of all tiles.
  __device__ __forceinline__ void send() const {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(p.map) : "memory");
    Ring<x_stages> x;
    Ring<weight_stages> w;
    for_each_tile([&](const auto& tile, int channel_tile) {
      const typename Geometry::Class own(Rows::class_of_tile(channel_tile));
      const int groups = Geometry::groups(own), group_taps = Geometry::group_taps(own);
      const int samples = static_cast<int>(p.batch) / static_cast<int>(C::groups);
      const int n = channel_tile / Rows::group_tiles * samples + tile.n;
#pragma unroll 1
      for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
        const auto* from =
            static_cast<const unsigned char*>(p.packed_weights) +
            (static_cast<int64>(channel_tile) * Numbers::chunks + chunk) * Numbers::taps * tap_bytes;
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
          int at[3];
#pragma unroll
          for (int d = 0; d < 3; ++d)
            at[d] = tile.first[d] * static_cast<int>(C::step(d)) + Geometry::group_offset(d, group, own);
          barrier::wait(&s.x_empty[x.stage], x.round ^ 1u);
          barrier::expect(&s.x_full[x.stage], window_bytes);
          const int channel = chunk * Numbers::chunk_channels;
          copy_box(s.x[x.stage], channel, at[2], at[1], at[0], n, &s.x_full[x.stage]);
          x.next();
#pragma unroll 1
          for (int first = 0; first < group_taps; first += Numbers::stage_taps) {
            const int left = group_taps - first;
            const int bytes = (left < Numbers::stage_taps ? left : Numbers::stage_taps) * tap_bytes;
            barrier::wait(&s.weights_empty[w.stage], w.round ^ 1u);
            barrier::expect(&s.weights_full[w.stage], bytes);
            barrier::copy(s.weights[w.stage], from, bytes, &s.weights_full[w.stage]);
            from += bytes;
            w.next();
          }
        }
      }
    });
  }

  // By a warp: marks all samples where a weight is not finite, or where x is read as it lies and not on 16
  // bytes.
  __device__ __forceinline__ void gather_marks() const {
    uint32 any = !Numbers::copied && reinterpret_cast<uint64>(p.input) % 16 != 0 ? redo_all : redo_none;
    constexpr int items = PackedGemmWeightPieces<C, Numbers>::items;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x % 32); i < items; i += 32) any |= p.piece_marks[i];
    any = __reduce_or_sync(0xffffffffu, any);
    if (threadIdx.x % 32 == 0) p.only[p.batch] = any;
  }

  static __device__ __forceinline__ void release(uint64* empty) {
    if (threadIdx.x % 32 == 0) barrier::arrive(empty);
  }

  // The descriptor of 64 positions by 16 channels.
  static __device__ __forceinline__ uint64 x_descriptor(uint32 address, int term) {
    constexpr uint64 step = static_cast<uint64>(Geometry::step * position_bytes >> 4) << 32;
    // The modes of 128, 64 and 32 bytes are 1, 2 and 3 here, 3, 2 and 1 in tensor maps.
    return static_cast<uint64>((address + term * 32) >> 4) | uint64{1} << 16 | step |
           static_cast<uint64>(4 - Numbers::swizzle) << 62;
  }

  struct Place {
    Ring<x_stages> x;
    Ring<weight_stages> w;
    int x_before = -1, w_before = -1;  // stages whose products may still run
    int scale = 0;
  };

  // All taps of a chunk with so many products of 16 terms.
  template <int count>
  __device__ __forceinline__ void multiply_chunk(Place& at, float (&d)[products][sums], int first,
                                                 const typename Geometry::Class& own) const {
    const int groups = Geometry::groups(own), group_taps = Geometry::group_taps(own);
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      barrier::wait(&s.x_full[at.x.stage], at.x.round);
      const uint32 x = barrier::shared_address(s.x[at.x.stage]);
#pragma unroll 1
      for (int begin = 0; begin < group_taps; begin += Numbers::stage_taps) {
        barrier::wait(&s.weights_full[at.w.stage], at.w.round);
        const uint32 w = barrier::shared_address(s.weights[at.w.stage]);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        if constexpr (Rows::apart) {
          const int left = group_taps - begin;
          const int stage_taps = left < Numbers::stage_taps ? left : Numbers::stage_taps;
#pragma unroll 1
          for (int t = 0; t < stage_taps; ++t)
            multiply_tap<count>(at, d, first, x + Geometry::shift(begin + t, own) * position_bytes,
                                w + t * tap_bytes);
        } else {
#pragma unroll
          for (int t = 0; t < Numbers::stage_taps; ++t)
            multiply_tap<count>(at, d, first, x + Geometry::shift(begin + t) * position_bytes,
                                w + t * tap_bytes);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The products before have finished: their stages are free.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release_before(at);
        at.w_before = at.w.stage;
        at.x_before = begin + Numbers::stage_taps >= group_taps ? at.x.stage : -1;
        at.w.next();
      }
      at.x.next();
    }
  }
  template <int count>
  __device__ __forceinline__ void multiply_tap(Place& at, float (&d)[products][sums], int first, uint32 x,
                                               uint32 w) const {
#pragma unroll
    for (int k = 0; k < count; ++k) {
      const uint64 b = wgmma::descriptor(w + 2 * k * columns * 16, columns * 16);
#pragma unroll
      for (int i = 0; i < products; ++i)
        Product::run(d[i], x_descriptor(x + Geometry::first_place(first + i) * position_bytes, k), b,
                     at.scale);
      at.scale = 1;
    }
  }
  __device__ __forceinline__ void release_before(Place& at) const {
    if (at.w_before >= 0) release(&s.weights_empty[at.w_before]);
    if (at.x_before >= 0) release(&s.x_empty[at.x_before]);
    at.w_before = at.x_before = -1;
  }

  __device__ __forceinline__ void multiply() const {
    const int warpgroup = static_cast<int>(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0));
    const int first = warpgroup * products;
    Place at;
    for_each_tile([&](const auto& tile, int channel_tile) {
      float d[products][sums];
      // Without it the compiler keeps the sums of the tile before beside the values made of them.
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int k = 0; k < sums; ++k) d[i][k] = 0.0f;
      }
      at.scale = 0;
      const typename Geometry::Class own(Rows::class_of_tile(channel_tile));
      constexpr int whole = last_terms == terms ? Numbers::chunks : Numbers::chunks - 1;
#pragma unroll 1
      for (int chunk = 0; chunk < whole; ++chunk) multiply_chunk<terms>(at, d, first, own);
      if constexpr (last_terms != terms) multiply_chunk<last_terms>(at, d, first, own);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int k = 0; k < sums; ++k) asm volatile("" : "+f"(d[i][k])::"memory");
      }
      release_before(at);
      BoxesStore<C, Tail, Numbers, Shared>{p, s}.run(tile, channel_tile, first, d);
    });
  }

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      wgmma::initialise_ring<gemm::consumer_threads>(s.x_full, s.x_empty);
      wgmma::initialise_ring<gemm::consumer_threads>(s.weights_full, s.weights_empty);
    }
    __syncthreads();
    allow_kernel_after();
    wait_for_kernel_before();
    if (!Numbers::guards && blockIdx.x == 0 && threadIdx.x / 32 == gemm::consumer_warps + 1) gather_marks();
    wgmma::split_roles<gemm::consumer_threads, 40, 232>([&] { send(); }, [&] { multiply(); });
  }
};

}  // namespace onepass
