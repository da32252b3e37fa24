// The producer warps of the ping-pong kernel: they copy x to shared memory and convert it to the window.
#pragma once

#include "gemm/pingpong/bands.cuh"
#include "gemm/pingpong/exchange.cuh"
#include "gemm/pingpong/round.cuh"
#include "gemm/pingpong/transpose.cuh"

namespace onepass::pingpong {

// The position of a warp in the sequence of its copies of x. A copy is some rows of eight channels. Each warp
// has every fourth copy and stages of its own for them.
template <class L>
struct CopyCursor {
  static constexpr uint32 row_copies = 2 * L::Numbers::chunks;  // of all channels
  static constexpr uint32 tile_copies = L::Numbers::copies * row_copies;
  static constexpr uint32 warp_slots = L::Numbers::raw_slots / converting_warps;
  // A warp that skipped a band in one tile would mistake the phase of the band's barrier. So each warp has
  // copies of every tile, and of a band in every tile or in none.
  static_assert(tile_copies >= converting_warps);
  static_assert(tile_copies % converting_warps == 0 || Bands<L>::least_copies() >= converting_warps);

  // Reduces an index that may lie in the next tile or a later one; `next` is called for each tile passed.
  template <class Next>
  static __device__ __forceinline__ void to_tile(uint32& index, Next&& next) {
    if constexpr (tile_copies >= L::Numbers::raw_slots) {
      if (index >= tile_copies) {
        index -= tile_copies;
        next();
      }
    } else {
      while (index >= tile_copies) {
        index -= tile_copies;
        next();
      }
    }
  }

  int n;                  // sample
  uint32 index;           // in the tile
  uint32 round = 0;       // phase of the tile's barriers
  uint32 slot = 0;        // stage, of the warp's
  uint32 slot_round = 0;  // phase of its barrier

  explicit __device__ __forceinline__ CopyCursor(int first)
      : n(L::first_sample()), index(static_cast<uint32>(first)) {
    to_tile(index, [&] { to_next(); });
  }
  __device__ __forceinline__ void next() {
    index += converting_warps;
    to_tile(index, [&] { to_next(); });
    if (++slot == warp_slots) {
      slot = 0;
      slot_round ^= 1u;
    }
  }
  __device__ __forceinline__ void to_next() {
    n += L::samples();
    round ^= 1u;
  }
};

// A converting warp.
template <class L>
struct Source {
  static constexpr bool rounds = L::Input::bytes == 4;
  using Conversion = conditional<rounds, Round<L>, Transpose<L>>;
  using Cursor = CopyCursor<L>;

  const typename L::Parameters& p;
  Shared<L>& s;
  const int tile = L::tile_of_block();
  const typename L::Geometry::Box box{tile};
  const bool is_leader = is_elected();
  const uint64 policy = cache_policy();

  static __device__ __forceinline__ bool is_elected() {
    uint32 own;
    asm volatile("{\n.reg .pred own;\nelect.sync _|own, 0xffffffff;\nselp.u32 %0, 1, 0, own;\n}" : "=r"(own));
    return own != 0;
  }

  // Neighbouring tiles read the halo that they share at different times. s19 in f32 takes 1.60 ms with
  // evict_unchanged, 1.75 with evict_first and 1.65 with the other policies.
  static __device__ __forceinline__ uint64 cache_policy() {
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }

  // Starts copy `index` of a sample's tile, or of a later tile's, if there is one.
  __device__ __forceinline__ void send(int n, uint32 index, uint32 slot) const {
    Cursor::to_tile(index, [&] { n += L::samples(); });
    const uint32 number = index / Cursor::row_copies;
    const uint32 eight = index - number * Cursor::row_copies;
    const uint32 row = number * L::Numbers::copy_y;
    const uint32 z = L::Numbers::window_z == 1 ? 0 : row / L::Numbers::window_y;
    if (n < static_cast<int>(p.batch) && is_leader) {
      barrier::expect(&s.raw_full[slot], Shared<L>::raw_bytes);
      asm volatile(
          "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
          "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(barrier::shared_address(s.raw[slot])),
          "l"(p.map), "r"(barrier::shared_address(&s.raw_full[slot])), "r"(Conversion::Row::first_of(box)),
          "r"(eight * 8),
          "r"(box.first[1] + L::Geometry::low(1) + static_cast<int>(row - z * L::Numbers::window_y)),
          "r"(box.first[0] + L::Geometry::low(0) + static_cast<int>(z)), "r"(n), "l"(policy)
          : "memory");
    }
  }

  // By one thread: all weights, once.
  __device__ __forceinline__ void send_weights() const {
    constexpr int bytes = Shared<L>::weight_bytes;
    barrier::expect(&s.weights_full, L::Numbers::chunks * bytes);
#pragma unroll 1
    for (int i = 0; i < L::Numbers::chunks; ++i)
      barrier::copy(s.weights[i], static_cast<const unsigned char*>(p.packed) + i * bytes, bytes,
                    &s.weights_full);
  }

  __device__ __forceinline__ void run() const {
    // The shuffle tells the compiler that this is uniform: copies are then started from uniform registers.
    const uint32 own_warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - 4 * L::groups;
    const uint32 first_slot = own_warp * Cursor::warp_slots;
    Cursor copy(static_cast<int>(own_warp));
    if (is_leader)
      asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(p.map) : "memory");
    for (uint32 i = 0; i < Cursor::warp_slots; ++i)
      send(copy.n, copy.index + i * converting_warps, first_slot + i);
    if (own_warp == 0 && is_leader) send_weights();
    Conversion conversion(tile);
    bool is_new = true;  // the warp's first copy of a band
#pragma unroll 1
    while (copy.n < static_cast<int>(p.batch)) {
      const uint32 slot = first_slot + copy.slot;
      const Cursor own = copy;
      const uint32 number = own.index / Cursor::row_copies;
      const uint32 eight = own.index - number * Cursor::row_copies;
      const uint32 band = own.index / Bands<L>::copies;
      copy.next();
      barrier::wait_asleep(&s.raw_full[slot], own.slot_round);
      typename Conversion::Words words;
      conversion.load(barrier::shared_address(s.raw[slot]), words);
      if (is_new) barrier::wait_asleep(&s.x_empty[band], own.round ^ 1u);
      conversion.store(words, barrier::shared_address(s.x) + eight * Shared<L>::half_bytes,
                       number * (L::Numbers::copy_y * L::Numbers::pitch * 16));
      // The stores above depend on the loads, so the stage is free. Only a rounded step that no lane stores
      // has no such dependence; the barrier is for it.
      __syncwarp();
      send(own.n, own.index + L::Numbers::raw_slots, slot);
      // After the warp's last copy of the band its stores are released to wgmma.
      is_new = copy.index / Bands<L>::copies != band || copy.n != own.n;
      if (is_new) {
        barrier::release_to_copies();
        __syncwarp();
        if (is_leader) barrier::arrive(&s.x_full[band]);
        if constexpr (rounds) {
          if (copy.n != own.n) {
            const uint32 bits = conversion.take_largest();
            if (is_leader) Exchange<L>{p}.publish_largest(own.n, tile, own_warp, bits);
          }
        }
      }
    }
  }
};

}  // namespace onepass::pingpong
