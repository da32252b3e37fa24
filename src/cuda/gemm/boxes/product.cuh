// The product of the row "gemm_boxes": copies of boxes, wgmma, and what follows the convolution.
#pragma once

#include "gemm/boxes/hold.cuh"
#include "gemm/packed/weights.cuh"
#include "gemm/product/wgmma.cuh"
#include "tail/tail.cuh"

namespace onepass {

namespace boxes {

// Four blocks of eight columns of a product's row lie in four lanes, each with a pair of every block. Gives
// each lane a block of its own: that of its place among the four.
__device__ __forceinline__ void transpose_quad(float (&v)[8], int place) {
#pragma unroll
  for (int b = 0; b < 8; b += 4) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float got = __shfl_xor_sync(0xffffffffu, place & 1 ? v[b + k] : v[b + 2 + k], 1);
      if (place & 1) {
        v[b + k] = got;
      } else {
        v[b + 2 + k] = got;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float got = __shfl_xor_sync(0xffffffffu, place & 2 ? v[k] : v[4 + k], 2);
    if (place & 2) {
      v[k] = got;
    } else {
      v[4 + k] = got;
    }
  }
}

// What a chain's tensors are loaded by: the parameters, and which of them lie on 16 bytes.
struct Operands {
  const void* const* parameter;
  uint64 aligned;
};

}  // namespace boxes

template <class C, class Tail, class Numbers>
struct BoxesGemm {
  using Parameters = BoxesParameters<Tail::parameters>;
  using Geometry = BoxGeometry<C, Numbers>;
  using Rows = PackedGemmGeometry<C, Numbers>;  // of weights: columns of the product
  using Product = typename Numbers::Product;
  using Output = typename Tail::Output;
  using Chain = typename Tail::After;
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
  static constexpr int groups = Numbers::taps / Numbers::group_taps;
  static constexpr int steps_of_group = Numbers::group_taps / Numbers::stage_taps;
  static constexpr int terms = octets / 2;  // products of 16 terms a tap
  static constexpr int last_terms = (Numbers::input_channels - 1) / 16 % terms + 1;  // of the last chunk
  static constexpr bool held = Numbers::held;                                        // for the norm
  // The output is written here; else f32 values for a tail.
  static constexpr bool direct = held || (!Tail::has_norm && !Tail::has_mean);
  using Hold = BoxesHold<C, Tail, Numbers>;
  struct Nothing {};
  template <bool, class Of>
  struct SharedOf {
    using Type = Nothing;
  };
  template <class Of>
  struct SharedOf<true, Of> {
    using Type = typename Of::Shared;
  };
  struct Shared : SharedOf<held, Hold>::Type {
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
        body(typename Geometry::Tile(tile), static_cast<int>(static_cast<uint32>(i) - tile * channel_tiles));
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
      const auto* from = static_cast<const unsigned char*>(p.packed_weights) +
                         static_cast<int64>(channel_tile) * Numbers::chunks * Numbers::taps * tap_bytes;
#pragma unroll 1
      for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
          int at[3];
#pragma unroll
          for (int d = 0; d < 3; ++d)
            at[d] = tile.first[d] * static_cast<int>(C::step(d)) + Geometry::group_offset(d, group);
          barrier::wait(&s.x_empty[x.stage], x.round ^ 1u);
          barrier::expect(&s.x_full[x.stage], window_bytes);
          const int channel = chunk * Numbers::chunk_channels;
          copy_box(s.x[x.stage], channel, at[2], at[1], at[0], tile.n, &s.x_full[x.stage]);
          x.next();
#pragma unroll 1
          for (int step = 0; step < steps_of_group; ++step) {
            barrier::wait(&s.weights_empty[w.stage], w.round ^ 1u);
            barrier::expect(&s.weights_full[w.stage], weight_bytes);
            barrier::copy(s.weights[w.stage], from, weight_bytes, &s.weights_full[w.stage]);
            from += weight_bytes;
            w.next();
          }
        }
      }
    });
  }

  // By a warp: marks all samples where a weight is not finite, or where x does not lie on 16 bytes.
  __device__ __forceinline__ void gather_marks() const {
    uint32 any = reinterpret_cast<uint64>(p.input) % 16 != 0 ? redo_all : redo_none;
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
  __device__ __forceinline__ void multiply_chunk(Place& at, float (&d)[products][sums], int first) const {
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      barrier::wait(&s.x_full[at.x.stage], at.x.round);
      const uint32 x = barrier::shared_address(s.x[at.x.stage]);
#pragma unroll 1
      for (int step = 0; step < steps_of_group; ++step) {
        barrier::wait(&s.weights_full[at.w.stage], at.w.round);
        const uint32 w = barrier::shared_address(s.weights[at.w.stage]);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int t = 0; t < Numbers::stage_taps; ++t) {
          const uint32 own = x + Geometry::shift(step * Numbers::stage_taps + t) * position_bytes;
#pragma unroll
          for (int k = 0; k < count; ++k) {
            const uint64 b = wgmma::descriptor(w + (t * octets + 2 * k) * columns * 16, columns * 16);
#pragma unroll
            for (int i = 0; i < products; ++i) {
              Product::run(d[i], x_descriptor(own + Geometry::first_place(first + i) * position_bytes, k), b,
                           at.scale);
            }
            at.scale = 1;
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // The products before have finished: their stages are free.
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release_before(at);
        at.w_before = at.w.stage;
        at.x_before = step == steps_of_group - 1 ? at.x.stage : -1;
        at.w.next();
      }
      at.x.next();
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
      constexpr int whole = last_terms == terms ? Numbers::chunks : Numbers::chunks - 1;
#pragma unroll 1
      for (int chunk = 0; chunk < whole; ++chunk) multiply_chunk<terms>(at, d, first);
      if constexpr (last_terms != terms) multiply_chunk<last_terms>(at, d, first);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int k = 0; k < sums; ++k) asm volatile("" : "+f"(d[i][k])::"memory");
      }
      release_before(at);
      store(tile, channel_tile, first, d);
    });
  }

  // Each lane gets eight neighbouring channels of its rows, four lanes 32 of them.
  __device__ __forceinline__ void store(const typename Geometry::Tile& tile, int channel_tile, int first,
                                        float (&d)[products][sums]) const {
    constexpr int blocks = columns / 8;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    const int samples = static_cast<int>(p.batch);
    const boxes::Operands operands{p.parameter, aligned_bits()};
    int n[products][2], offset[products][2];
#pragma unroll
    for (int i = 0; i < products; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int place = Geometry::first_place(first + i) + (warp * 2 + h) * Geometry::step + lane / 4;
        const typename Geometry::Target target(tile, place, samples);
        n[i][h] = target.n;
        offset[i][h] = target.offset;
      }
    }
    if constexpr (held) {
      uint32 has = 0;
#pragma unroll
      for (int i = 0; i < products; ++i)
        has |= (offset[i][0] >= 0 ? 1u : 0u) << (2 * i) | (offset[i][1] >= 0 ? 2u : 0u) << (2 * i);
      Hold::activate(p, tile.n, channel_tile * columns, d);
      Hold{p, s}.leave_parts(tile, channel_tile, has, d);
    }
#pragma unroll
    for (int j = 0; j < blocks; j += 4) {
      const int column = (j + lane % 4) * 8;
      const int row = channel_tile * columns + column;
      const bool exists = column < columns && row < Rows::rows;
      const int own = exists ? row : 0;
      const int channel = Rows::channel_of(own);
      float scale[8], bias[8];  // the norm's where values are held for it, else the convolution's
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if constexpr (held) {
          const float2 line = Hold{p, s}.affine(exists ? column + k : 0, channel + k);
          scale[k] = line.x;
          bias[k] = line.y;
        } else {
          scale[k] = 1.0f;
          bias[k] = C::has_bias ? load_one<typename C::Bias>(p.parameter[1], channel + k) : 0.0f;
        }
      }
      const int64 of_row = Rows::value_offset(own);
      const auto index = [&](int i, int h) {
        return static_cast<int64>(n[i][h]) * Numbers::value_stride_n + offset[i][h] + of_row;
      };
      // All rows' at once: one after the other each would be waited for.
      typename Chain::template Tensors<8> tensors[products][2];
      if constexpr (direct) {
        const auto load = [&](const auto& from) {
#pragma unroll
          for (int i = 0; i < products; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
              if (exists && offset[i][h] >= 0) tensors[i][h].load(from, index(i, h));
          }
        };
        if (operands.aligned == aligned_tensors()) {
          load(AlignedOperands{p.parameter});
        } else {
          load(operands);
        }
      }
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float v[8];
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            v[2 * b] = j + b < blocks ? d[i][(j + b) * 4 + h * 2] : 0.0f;
            v[2 * b + 1] = j + b < blocks ? d[i][(j + b) * 4 + h * 2 + 1] : 0.0f;
          }
          boxes::transpose_quad(v, lane % 4);
          if (!exists || offset[i][h] < 0) continue;
#pragma unroll
          for (int k = 0; k < 8; ++k) v[k] = held ? fmaf(v[k], scale[k], bias[k]) : v[k] + bias[k];
          store_eight(v, tensors[i][h], n[i][h], channel, index(i, h), operands);
        }
      }
    }
  }

  __device__ __forceinline__ void store_eight(float (&v)[8],
                                              const typename Chain::template Tensors<8>& tensors, int n,
                                              int channel, int64 index,
                                              const boxes::Operands& operands) const {
    if constexpr (direct) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        ChannelValues<Chain, 1> values;
        values.load(p, n, channel + k);
        v[k] = Chain::value(v[k], values.value[0], tensors, k);
      }
      Packed<Output, 8> packed;
      packed.pack(v);
      packed.store(p.output, index, is_aligned(operands, aligned_output));
    } else {
      auto* const to = reinterpret_cast<float4*>(p.values + index);
      to[0] = float4{v[0], v[1], v[2], v[3]};
      to[1] = float4{v[4], v[5], v[6], v[7]};
    }
  }

  // All bits of aligned_bits.
  static constexpr __device__ uint64 aligned_tensors() {
    uint64 bits = uint64{1} << aligned_output;
    for (int i = 0; i < Tail::parameters && i < aligned_gradient - aligned_parameter; ++i)
      bits |= uint64{1} << (aligned_parameter + i);
    return bits;
  }
  // Which tensors lie on 16 bytes (AlignedBit).
  __device__ __forceinline__ uint64 aligned_bits() const {
    uint64 bits = static_cast<uint64>(reinterpret_cast<uint64>(p.output) % 16 == 0) << aligned_output;
#pragma unroll
    for (int i = 0; i < Tail::parameters && i < aligned_gradient - aligned_parameter; ++i) {
      bits |= static_cast<uint64>(reinterpret_cast<uint64>(p.parameter[i]) % 16 == 0)
              << (aligned_parameter + i);
    }
    return bits;
  }

  __device__ __forceinline__ void run() const {
    if (threadIdx.x == 0) {
      wgmma::initialise_ring<gemm::consumer_threads>(s.x_full, s.x_empty);
      wgmma::initialise_ring<gemm::consumer_threads>(s.weights_full, s.weights_empty);
    }
    __syncthreads();
    allow_kernel_after();
    wait_for_kernel_before();
    if (blockIdx.x == 0 && threadIdx.x / 32 == gemm::consumer_warps + 1) gather_marks();
    wgmma::split_roles<gemm::consumer_threads, 40, 232>([&] { send(); }, [&] { multiply(); });
  }
};

}  // namespace onepass
