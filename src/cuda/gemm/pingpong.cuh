// The kernel of the row "gemm_pingpong": a wide convolution and its norm in one launch, with a ping-pong
// schedule. While one warpgroup of a block multiplies, the others run their epilogues.
//
// A tile is a box of outputs of one sample by all output channels (up to 64). Bulk copies bring its window of
// x to shared memory, some rows of eight channels at a time; a tensor map describes x, and elements outside
// it arrive as zeros. The window is converted to [eight channels][position][8], so that every tap is a legal
// start address of the right operand (gemm/gemm.cuh). All of a tile's x and all weights fit in shared memory.
// Rows of the next tile are converted as soon as the warpgroups that read them have multiplied.
//
//   three warpgroups  a third of the tile's positions each: mainloop, chain before the norm, moments, store
//   four warps        convert x: 16-bit matrices by ldmatrix and stmatrix, f32 rounded position by position;
//                     each warp starts its own copies
//
// One extra block has no tile and merges the moments of all blocks (gemm/pingpong/exchange.cuh).
//
// All tiles of a sample are in flight at once, and each holds its values until it knows the statistics of the
// others. It does not wait for them: the values are normalised and stored after the next tile's mainloop,
// chain and moments. They are held as distances from the mean of the warp's own part, in registers and shared
// memory: as f16, or as 20-bit integers where outputs are f32.
//
// Registers are the scarce resource, and a spill costs a trip to L2: shared memory leaves little L1, and
// waiting for other blocks evicts it. So the loop over tiles loads nothing else from memory.
#pragma once

#include "gemm/pingpong/mainloop.cuh"
#include "gemm/pingpong/moments.cuh"
#include "gemm/pingpong/source.cuh"
#include "gemm/pingpong/store_16.cuh"
#include "gemm/pingpong/store_f32.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmPingpong {
  using L = pingpong::Layout<C, Tail, Numbers>;
  using Parameters = typename L::Parameters;
  using Shared = pingpong::Shared<L>;
  using Thread = pingpong::Thread;
  using Source = pingpong::Source<L>;
  using Mainloop = pingpong::Mainloop<L>;
  using Moments = pingpong::TileMoments<L>;
  using Hold = pingpong::Hold<L>;
  using Store16 = conditional<Numbers::store_rows, pingpong::StoreRows16<L>, pingpong::StoreColumns16<L>>;
  using Store = conditional<L::is_f32, pingpong::StoreF32<L>, Store16>;
  // Registers of a consumer thread and of a converting one.
  static constexpr int registers = L::is_f32 ? 160 : 152;
  static constexpr int converting_registers = L::is_f32 ? 32 : 56;
  static_assert(sizeof(Shared) == Numbers::shared_bytes);

  const Parameters& p;
  Shared& s;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = static_cast<int>(threadIdx.x) / 128;

  __device__ __forceinline__ void run() const {
    allow_kernel_after();
    if (L::is_merger()) {
      wait_for_kernel_before();
      pingpong::Exchange<L>{p}.run();
      return;
    }
    start();
    // Together they take what the launch gives a block of 512 threads: 128 registers each.
    if (threadIdx.x >= L::consumers) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(converting_registers));
      Source{p, s}.run();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
      // The first warpgroup has the first turn.
      if (group == L::groups - 1 && lane == 0) barrier::arrive(&s.turn[0]);
      consume();
    }
  }

 private:
  // Barriers, parameters of channels, and the offsets of the tile's positions.
  __device__ __forceinline__ void start() const {
    using Bands = pingpong::Bands<L>;
    if (threadIdx.x == 0) {
      for (int i = 0; i < Bands::count; ++i) {
        barrier::initialise(&s.x_full[i], min(Bands::copies_of(i), pingpong::converting_warps));
        barrier::initialise(&s.x_empty[i], 4 * Bands::readers(i));
      }
      barrier::initialise(&s.weights_full, 1);
      for (int i = 0; i < Numbers::raw_slots; ++i) barrier::initialise(&s.raw_full[i], 1);
      for (int i = 0; i < L::groups; ++i) barrier::initialise(&s.turn[i], 4);
      s.exponent = pingpong::HeldInt20::exponent;
    }
    const int tile = L::tile_of_block();
    for (int i = static_cast<int>(threadIdx.x); i < L::groups * L::columns; i += L::threads)
      s.offsets()[i] = L::Geometry::target(tile, i);
    wait_for_kernel_before();
    for (int c = static_cast<int>(threadIdx.x); c < L::rows; c += L::threads) {
      float bias = 0.0f;
      if constexpr (C::has_bias) bias = load_one<typename C::Bias>(p.parameter[1], c);
      s.channels[c] =
          float4{bias, Tail::weight(p, c), Tail::bias(p, c), Numbers::guards ? __ldg(p.scales + c) : 1.0f};
    }
    __syncthreads();
    // The last outputs of a row may lie outside of the output.
    if constexpr (Numbers::store_rows) {
      for (int r = static_cast<int>(threadIdx.x); r < L::groups * L::columns / Numbers::pitch;
           r += L::threads) {
        const int* const of_row = s.offsets() + r * Numbers::pitch;
        int count = 0;
        while (count < Numbers::box_x / 2 && of_row[2 * count] >= 0) ++count;
        s.rows[r] = int2{count > 0 ? of_row[0] : 0, count};
      }
      __syncthreads();
    }
  }

  // A warpgroup's loop over tiles. A tile is stored after the next one's moments: by then the statistics of
  // its sample have arrived.
  __device__ __forceinline__ void consume() const {
    const typename Moments::Mask mask = Moments{p, s, Thread::reload()}.mask();
    // Offsets of columns lie where outputs are staged: all warps have read them now.
    if constexpr (Numbers::store_rows) asm volatile("bar.sync 1, 384;" ::: "memory");
    const auto batch = static_cast<int>(p.batch);
    typename Hold::Registers held;
    uint32 tile = 0;  // of the block
    int n = L::first_sample();
#pragma unroll 1
    for (; n < batch; n += L::samples(), ++tile) {
      float d[L::sums];
      if constexpr (Moments::bias_first) Moments{p, s, Thread::reload()}.begin(d);
      Mainloop{s, lane, group}.template run<Moments::bias_first>(tile, d);
      typename Moments::Sums all;
      const Moments moments{p, s, Thread::reload()};
      moments.activate(n, mask, d, all);
      float unit[2];
      moments.publish_parts(tile, n, mask, d, all, unit);
      if (tile > 0) prefetch(n - L::samples());
      const Thread thread = Thread::reload();
      tile |= pingpong::opaque_zero();  // else values are packed too early, and registers spill
      typename Hold::Words words;
      Hold::pack(d, unit, words);
      if (tile > 0) store(thread, tile - 1, n - L::samples(), held);
      Hold{s, thread}.hold(words, held);
    }
    const Thread thread = Thread::reload();
    pingpong::Norm<L>{p, s, thread}.prefetch(n - L::samples());
    store(thread, tile - 1, n - L::samples(), held);
  }
  __device__ __forceinline__ void store(const Thread& thread, uint32 tile, int64 n,
                                        const typename Hold::Registers& held) const {
    const pingpong::HeldTile<L> of{p, s, thread};
    Store{of}.run(n, held, of.norm.wait(tile, n));
  }
  __device__ __forceinline__ void prefetch(int64 n) const {
    const Thread thread = Thread::reload();
    pingpong::Norm<L>{p, s, thread}.prefetch(n);
  }
};

}  // namespace onepass
