// A wide convolution and its norm in one launch, the warpgroups of a block by turns: while one multiplies,
// the others finish.
//
// A tile is a box of outputs of one sample by all output channels (up to 64). Its window of x comes to shared
// memory by copies of boxes (a tensor map says how x lies; what is beside x arrives as zeros), some rows of
// eight channels at a time, and is turned there to what gemm.cuh has: [eight channels][position][8], so that
// every tap is a legal start of the right operand. All of a tile's x has room beside all weights: rows of the
// next tile's are turned when the warpgroups that meet this one's have multiplied them.
//
//   three warpgroups  a third of the tile's positions each: products, the chain before the norm, moments
//   four warps        turn x: matrices of eight channels by eight positions (`ldmatrix`, `stmatrix`), or
//                     positions one by one, which are rounded; each has copies of its own and sends for them
//
// One block more has no tile and merges the moments of all.
//
// The tiles of a sample are on the chip at a time, and each holds its values until it knows the moments of
// the others. It does not wait for them: values are finished and stored when the next tile's products, chain
// and moments have been computed. They are held as distances from the mean of the warp's own part, as f16, in
// registers and in shared memory; of f32 as integers of 20 bits.
//
// Registers are what this is short of, and what is spilled costs a trip to L2: L1 has what shared memory
// leaves, and waiting for other blocks empties it. So nothing else is loaded from memory in the loop over
// tiles.
#pragma once

#include "gemm/pingpong/bands.cuh"
#include "gemm/pingpong/exchange.cuh"
#include "gemm/pingpong/moments.cuh"
#include "gemm/pingpong/outputs.cuh"
#include "gemm/pingpong/staging.cuh"

namespace onepass {

// The block: what each warp does.
template <class C, class Tail, class Numbers>
struct GemmPingpong {
  using Parameters = GemmPingpongParameters<Tail::parameters>;
  using Shared = GemmPingpongShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Bands = GemmPingpongBands<C, Numbers>;
  using Copies = GemmPingpongCopies<C, Tail, Numbers>;
  using Moments = GemmPingpongMoments<C, Tail, Numbers>;
  using Outputs = GemmPingpongOutputs<C, Tail, Numbers>;
  using Product = typename Numbers::Product;
  static constexpr int groups = Numbers::groups;  // warpgroups that multiply
  static_assert(groups == 3);
  static constexpr int consumers = 128 * groups;
  static constexpr int threads = consumers + pingpong::converting_warps * 32;
  static constexpr int columns = Numbers::columns;
  static constexpr int sums = columns / 2;
  static constexpr int pairs = columns / 8;
  static constexpr int rows = Geometry::rows;
  // Of a thread that multiplies, and of one that turns x.
  static constexpr int registers = Shared::direct ? 160 : 152;
  static constexpr int converting_registers = Shared::direct ? 32 : 56;
  static_assert(sizeof(Shared) <= Numbers::shared_bytes);

  const Parameters& p;
  Shared& s;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = static_cast<int>(threadIdx.x) / 128;

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Bands::count; ++i) {
        barrier::initialise(&s.x_full[i], min(Bands::copies_of(i), pingpong::converting_warps));
        barrier::initialise(&s.x_empty[i], 4 * Bands::readers(i));
      }
      barrier::initialise(&s.weights_full, 1);
      for (int i = 0; i < Numbers::raw_slots; ++i) barrier::initialise(&s.raw_full[i], 1);
      for (int i = 0; i < groups; ++i) barrier::initialise(&s.turn[i], 4);
    }
    for (int c = static_cast<int>(threadIdx.x); c < rows; c += threads) {
      float bias = 0.0f;
      if constexpr (C::has_bias) bias = load_one<typename C::Bias>(p.parameter[1], c);
      s.channels[c] =
          float4{bias, Tail::weight(p, c), Tail::bias(p, c), Numbers::guards ? __ldg(p.scales + c) : 1.0f};
    }
    // A block has the same tile of every sample.
    const Item item(blockIdx.x, 1);
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

  // --- Products ---
  // Of an operand by rows of 16 bytes, eight of them together. `begin` is the descriptor's lower half: the
  // operand's address and how far on the next eight channels are, in 16 bytes.
  static __device__ __forceinline__ uint64 descriptor(uint32 begin, int bytes) {
    return static_cast<uint64>(128 >> 4) << 32 | (begin + static_cast<uint32>(bytes >> 4));
  }

  // When all products are under way the next warpgroup has its turn.
  __device__ __forceinline__ void multiply(uint32 tile, float (&d)[sums]) const {
    const uint32 round = tile & 1u;
    barrier::wait(&s.turn[group], round);
    // The same in all lanes, as the compiler knows then: descriptors are made in uniform registers, for each
    // product.
    const uint32 x_begin =
        __shfl_sync(0xffffffffu,
                    (barrier::shared_address(s.x[0]) >> 4) + static_cast<uint32>(group * columns), 0) +
        (static_cast<uint32>(Shared::half_bytes >> 4) << 16);
    const uint32 weights_begin =
        __shfl_sync(0xffffffffu, barrier::shared_address(s.weights[0]) >> 4, 0) | 64u << 16;
    const int own = __shfl_sync(0xffffffffu, group, 0);
    int here = Bands::first_band(own, 0);  // those before have come
    int gone = here;                       // those before are met no more
    barrier::wait(&s.weights_full, 0u);
#pragma unroll
    for (int i = 0; i < Bands::tap_rows; ++i) {
#pragma unroll 1
      for (; here <= Bands::last_band(own, i); ++here) barrier::wait(&s.x_full[here], round);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
#pragma unroll
        for (int t = Bands::first_tap(i); t < Bands::first_tap(i) + Bands::taps_of_row; ++t) {
          Product::run(d, descriptor(weights_begin, chunk * Shared::weight_bytes + t * 64 * 32),
                       descriptor(x_begin, chunk * 2 * Shared::half_bytes + Geometry::tap_shift(t) * 16),
                       Moments::bias_first || i + chunk > 0 || t > Bands::first_tap(0) ? 1 : 0);
        }
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (i > 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release(gone, Bands::first_band(own, i));
      }
    }
    if (lane == 0) barrier::arrive(&s.turn[group == groups - 1 ? 0 : group + 1]);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release(gone, here);
#pragma unroll
    for (int i = 0; i < sums; ++i) asm volatile("" : "+f"(d[i])::"memory");
  }

  // Bands from `from` to before `to`, by a warp that has read them.
  __device__ __forceinline__ void release(int& from, int to) const {
#pragma unroll 1
    for (; from < to; ++from) {
      if (lane == 0) barrier::arrive(&s.x_empty[from]);
    }
  }

  // Asked again each time: what follows from it would be kept in registers.
  static __device__ __forceinline__ uint32 thread() {
    uint32 own;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(own));
    return own;
  }

  // A warpgroup. A tile's values are finished when the next one's have been multiplied: by then the moments
  // of other tiles have come.
  __device__ __forceinline__ void consume() const {
    const typename Moments::Mask mask = Moments{{thread()}, p, s}.mask();
    // Outputs on their way lie where places of columns are till now.
    if constexpr (Numbers::by_rows) asm volatile("bar.sync 1, 384;" ::: "memory");
    const auto batch = static_cast<int>(p.batch);
    typename Outputs::Held held;
    uint32 tile = 0;  // of the block
    int n = static_cast<int>(Item(blockIdx.x, 1).n);
#pragma unroll 1
    for (; n < batch; n += Copies::samples(), ++tile) {
      float d[sums];
      if constexpr (Moments::bias_first) Moments{{thread()}, p, s}.begin(d);
      multiply(tile, d);
      typename Moments::Sums all;
      const Moments moments{{thread()}, p, s};
      moments.activate(n, mask, d, all);
      float unit[2];
      moments.leave_parts(tile, n, mask, d, all, unit);
      if (tile > 0) Outputs{{thread()}, p, s}.ask(n - Copies::samples());
      const Outputs outputs{{thread()}, p, s};
      tile |= pingpong::opaque_zero();  // else it packs so early that registers do not suffice
      typename Outputs::Words words;
      outputs.pack(d, unit, words);
      if (tile > 0) outputs.finish(tile - 1, n - Copies::samples(), held);
      outputs.hold(words, held);
    }
    const Outputs outputs{{thread()}, p, s};
    outputs.ask(n - Copies::samples());
    outputs.finish(tile - 1, n - Copies::samples(), held);
  }

  __device__ __forceinline__ void run() const {
    if (GemmPingpongExchange<C, Tail, Numbers>::is_merger()) {
      GemmPingpongExchange<C, Tail, Numbers>{p}.run();
      return;
    }
    start();
    // Together what the launch gives a block of 512 threads: 128 each.
    if (threadIdx.x >= consumers) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(converting_registers));
      GemmPingpongConverter<C, Tail, Numbers>{p, s}.run();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
      // The first turn is the first warpgroup's.
      if (group == groups - 1 && lane == 0) barrier::arrive(&s.turn[0]);
      consume();
    }
  }
};

}  // namespace onepass