// gemm_turns.cuh: x and weights on their way to shared memory, and x turned there.
#pragma once

#include "gemm_turns_shared.cuh"

namespace onepass {

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

// The copies of x that a converting warp has, one after another.
// Some rows of eight channels are a copy; each warp has copies of its own, and places for them, and sends for
// the next one as soon as it has loaded one.
template <class C, class Tail, class Numbers>
struct GemmTurnsCopies {
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

  int n;             // sample
  uint32 index;      // in the tile
  uint32 round = 0;  // of the tile
  uint32 count = 0;  // of the warp's

  explicit __device__ __forceinline__ GemmTurnsCopies(int first)
      : n(static_cast<int>(GemmItem<Tail, Numbers>(blockIdx.x, 1).n)), index(static_cast<uint32>(first)) {
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

// A converting warp.
template <class C, class Tail, class Numbers>
struct GemmTurnsConverter {
  using Parameters = GemmTurnsParameters<Tail::parameters>;
  using Shared = GemmTurnsShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Staging = GemmTurnsStaging<C, Tail, Numbers>;
  using Copies = GemmTurnsCopies<C, Tail, Numbers>;

  const Parameters& p;
  Shared& s;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  // One thread: copy `index` of a sample's tile, or of the next ones', if there is one.
  __device__ __forceinline__ void send(int n, uint32 index, int slot) const {
    Copies::to_tile(index, [&] { n += Copies::samples(); });
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

  __device__ __forceinline__ void run() const {
    const int own_warp = static_cast<int>(threadIdx.x) / 32 - 4 * Numbers::groups;
    const int first_slot = own_warp * Copies::warp_slots;
    Copies copy(own_warp);
    if (lane == 0) {
      asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(p.map) : "memory");
      for (int i = 0; i < Copies::warp_slots; ++i)
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
      if ((copy.index + gemm::converting_warps) / Copies::chunk_copies != place.x) {
        barrier::release_to_copies();
        __syncwarp();
        if (lane == 0) barrier::arrive(&s.x_full[place.x]);
      }
    }
  }
};

}  // namespace onepass
