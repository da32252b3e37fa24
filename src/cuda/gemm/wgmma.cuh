// The kernel of the row "gemm_wgmma": a wide convolution and all that follows it in one launch, as an
// implicit matrix product by Hopper's wgmma.
//
// The positions of a sample are one flat index. Rows and planes of x get pitches at which every tap is a
// shift of the index, whatever the padding; positions beyond the input are zero. A tile is `tile_positions`
// neighbours of that index, or of the index of a box of outputs, by `tile_channels` output channels. Its
// window of x lies in shared memory as 16-bit elements, [eight channels][position], 16 bytes a position. A
// product of 16 input channels then begins at a legal address for any tap. Weights are the left operand,
// positions the right.
//
//   three warps     convert x to 16 bits, to a ring buffer of `chunk_channels` input channels a stage. Dense
//   x
//                   with channels before space arrives by bulk copies of eight channels, in a ring of its
//                   own; else these warps load it, with a fourth
//   one warp        starts those copies, and copies of packed weights to a ring: a stage is a group of taps
//   two warpgroups  mainloop and epilogue, while the rings fill for the next tile
//
// With a norm, the tiles of a unit (channels of a sample that are whole slabs) do one of three things. They
// are all in flight at once, and each holds its values in registers until it has read the moments of the
// others
// ("held"). They store their values for another kernel ("stored", gemm/store/finish.cuh). Or there are two
// passes: pass 1 of a wave of units, then pass 2 of the wave before, which computes the values again.
//
// f32 operands are rounded to f16 for tf32, which is as exact, or split in two f16 otherwise: three products,
// and sums that leave the tensor cores, which truncate, after at most 64 terms. Samples whose values overflow
// f16 are marked and recomputed by another kernel.
//
// Tiles are assigned to blocks round robin, so that producers and consumers know them without communication.
// Blocks that wait for each other are launched cooperatively.
#pragma once

#include "gemm/product/mainloop.cuh"
#include "gemm/source/staging.cuh"
#include "gemm/store/epilogue.cuh"

namespace onepass {

// A position in the sequence of steps of all tiles of a block.
template <class Tail, class Numbers, int Steps>
struct GemmCursor {
  using Item = GemmItem<Tail, Numbers>;
  using Parameters = GemmParameters<Tail::parameters>;
  const Parameters& p;
  int64 index = blockIdx.x;
  int step = 0;
  bool more;
  Item item;

  explicit __device__ __forceinline__ GemmCursor(const Parameters& parameters)
      : p(parameters), item(blockIdx.x, parameters.wave_units) {
    settle();
  }
  // Says whether there is a new item.
  __device__ __forceinline__ bool next() {
    if (++step < Steps) return false;
    step = 0;
    index += gridDim.x;
    settle();
    return more;
  }

 private:
  __device__ __forceinline__ void settle() {
    const int64 count = Item::count(p.batch, p.wave_units);
    for (more = false; index < count; index += gridDim.x) {
      item = Item(index, p.wave_units);
      more = item.unit < p.batch * Item::units_of_sample;
      if (more) break;
    }
  }
};

// The block: what each warp does.
template <class C, class Tail, class Numbers>
struct Gemm {
  using Parameters = GemmParameters<Tail::parameters>;
  using Shared = GemmShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  static constexpr int threads = gemm::consumer_threads + gemm::staging_warps * 32;
  static constexpr int groups = Numbers::taps / Numbers::group_taps;
  static_assert(sizeof(Shared) == Numbers::shared_bytes);
  static_assert(Numbers::chunk_channels % 16 == 0 && Numbers::columns % 8 == 0);

  const Parameters& p;
  Shared& s;

  template <class Body>
  __device__ __forceinline__ void for_each_item(Body&& body) const {
    const int64 count = Item::count(p.batch, p.wave_units);
    const int64 units = p.batch * Item::units_of_sample;
#pragma unroll 1
    for (int64 i = blockIdx.x; i < count; i += gridDim.x) {
      const Item item(i, p.wave_units);
      if (item.unit < units) body(item);
    }
  }

  // Whether x arrives by copies, which need it on 16 bytes.
  __device__ __forceinline__ bool copies() const {
    return Numbers::copies && reinterpret_cast<uint64>(p.input) % 16 == 0;
  }

  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      if (blockIdx.x == 0) gemm::mark_by_weights<Numbers>(p);
      for (int i = 0; i < Numbers::x_stages; ++i) {
        barrier::initialise(&s.x_full[i], copies() ? gemm::converting_warps : gemm::staging_warps);
        barrier::initialise(&s.x_empty[i], gemm::consumer_warps);
      }
      for (int i = 0; i < Numbers::weight_stages; ++i) {
        barrier::initialise(&s.weights_full[i], 1);
        barrier::initialise(&s.weights_empty[i], gemm::consumer_warps);
      }
      for (int i = 0; i < Numbers::raw_slots; ++i) {
        barrier::initialise(&s.raw_full[i], GemmStaging<C, Tail, Numbers>::senders);
        barrier::initialise(&s.raw_empty[i], gemm::converting_warps);
      }
    }
    for (int t = static_cast<int>(threadIdx.x); t < Numbers::taps; t += threads)
      s.tap_shifts[t] = Geometry::tap_shift(t) * 16;
    __syncthreads();
  }

  // One thread. It waits only for stages of products whose x is already staged, so it cannot deadlock.
  __device__ __forceinline__ void send_weights(const Item& item, int chunk,
                                               Ring<Numbers::weight_stages>& ring) const {
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      barrier::wait(&s.weights_empty[ring.stage], ring.round ^ 1u);
      send_weights(item, chunk * groups + g, ring.stage);
      ring.next();
    }
  }

  // One thread: a group of taps.
  __device__ __forceinline__ void send_weights(const Item& item, int step, int stage) const {
    constexpr int bytes = Numbers::weight_stage_bytes;
    const int64 tile = group_of<C>(item.n) * Numbers::channel_tiles + item.channel_tile;
    const auto* from =
        static_cast<const unsigned char*>(p.packed) + (tile * Numbers::chunks * groups + step) * bytes;
    barrier::expect(&s.weights_full[stage], bytes);
    barrier::copy(s.weights[stage], from, bytes, &s.weights_full[stage]);
  }

  // By one warp: starts copies of x and of weights as soon as their stages are free.
  __device__ __forceinline__ void send() const {
    using Staging = GemmStaging<C, Tail, Numbers>;
    const Staging staging{p, s};
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Ring<Numbers::raw_slots> raw;
    Ring<Numbers::weight_stages> ring;
    constexpr int weight_steps = Numbers::chunks * groups;
    constexpr int x_steps = (C::in_channels + Numbers::slot_channels - 1) / Numbers::slot_channels;
    GemmCursor<Tail, Numbers, x_steps> x(p);
    GemmCursor<Tail, Numbers, weight_steps> weights(p);
    typename Staging::Copies copies(x.item);
#pragma unroll 1
    while (x.more || weights.more) {
      // Weights first, as many as fit: copies of x take longer to start and have more time.
#pragma unroll 1
      while (weights.more && gemm::has_room(&s.weights_empty[ring.stage], ring.round)) {
        if (lane == 0) send_weights(weights.item, weights.step, ring.stage);
        __syncwarp();
        ring.next();
        if (weights.next() && Numbers::weights_stay) weights.more = false;
      }
      if (x.more && gemm::has_room(&s.raw_empty[raw.stage], raw.round)) {
        staging.send(x.item, copies, x.step * Numbers::slot_channels, raw);
        if (x.next()) copies = typename Staging::Copies(x.item);
      }
    }
  }

  __device__ __forceinline__ void convert() const {
    const GemmStaging<C, Tail, Numbers> staging{p, s};
    Ring<Numbers::x_stages> x;
    Ring<Numbers::raw_slots> raw;
    for_each_item([&](const Item& item) { staging.convert_tile(item, x, raw); });
  }

  template <bool in_vectors>
  __device__ __forceinline__ void produce() const {
    const GemmStaging<C, Tail, Numbers> staging{p, s};
    Ring<Numbers::x_stages> x;
    Ring<Numbers::weight_stages> weights;
    bool first = true;
    for_each_item([&](const Item& item) {
      staging.template tile<in_vectors>(item, x, [&](int chunk) {
        if (!Numbers::weights_stay || first) send_weights(item, chunk, weights);
      });
      first = false;
    });
  }

  __device__ __forceinline__ void run() const {
    start();
    // Together they take what the launch gives a block of 384 threads: 168 registers each.
    constexpr bool many_sums = Numbers::columns > 256;
    if (threadIdx.x >= gemm::consumer_threads) {
      if constexpr (many_sums) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
      } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
      }
      constexpr bool vectors_fit = GemmStaging<C, Tail, Numbers>::vectors_fit;
      if (Numbers::copies && copies()) {
        if constexpr (Numbers::copies) {
          if (threadIdx.x < gemm::consumer_threads + gemm::converting_warps * 32) {
            convert();
          } else {
            send();
          }
        }
      } else if (vectors_fit && reinterpret_cast<uint64>(p.input) % 16 == 0) {
        produce<vectors_fit>();
      } else {
        produce<false>();
      }
    } else {
      if constexpr (many_sums) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
      } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
      }
      GemmMainloop<C, Tail, Numbers> mainloop{s, {}, {}};
      using Epilogue = GemmEpilogue<C, Tail, Numbers>;
      const Epilogue epilogue{{p, s}};
      typename Epilogue::Outputs::Deferred deferred;
      GemmSums<Numbers> d;
      for_each_item([&](const Item& item) {
        epilogue.prepare(item);
        mainloop.run(d, [&] {
          if constexpr (Epilogue::defers) epilogue.outputs.store_some(deferred);
        });
        epilogue.run(item, d, deferred);
      });
      if constexpr (Epilogue::defers) epilogue.outputs.store_rest(deferred);
    }
  }
};

}  // namespace onepass
