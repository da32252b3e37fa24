// gemm_pingpong.cuh: x and weights on their way to shared memory, and x turned there.
#pragma once

#include "gemm/pingpong/bands.cuh"
#include "gemm/pingpong/exchange.cuh"
#include "gemm/pingpong/rounding.cuh"

namespace onepass {

// Turns x: what a copy left is [row][eight channels][raw_pitch].
template <class C, class Tail, class Numbers>
struct GemmPingpongStaging {
  using Input = typename Tail::Input;
  using Shared = GemmPingpongShared<C, Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  static constexpr int vector = 8;
  static_assert(Input::bytes == 2);
  // A step is four vectors of eight channels of a row: four matrices.
  static constexpr int row_steps = (Numbers::raw_vectors + 3) / 4;
  static constexpr int steps = Numbers::copy_y * row_steps;
  static_assert(Numbers::window <= 1 << 16);

  // Where this lane's row of a step's matrix lies in a copy, and where it goes in the window, in bytes: of
  // the first step. Others are known distances on.
  uint32 from;
  uint32 to;
  uint32 inside = 0;  // a bit for each step of a row: whether it goes there

  // Where a tile's window begins in a row of x, at a vector.
  static __device__ __forceinline__ int first_of(const typename Geometry::Box& box) {
    return (box.first[2] + Geometry::low(2)) & ~(vector - 1);
  }

  // Copies begin at vectors of x, windows anywhere: the first places of a row are nowhere then, as are the
  // last. Those go to eight places behind the window.
  explicit __device__ __forceinline__ GemmPingpongStaging(int tile) {
    const typename Geometry::Box box(tile);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = lane - (box.first[2] + Geometry::low(2) - first_of(box));
    from = static_cast<uint32>(lane % 8 * Numbers::raw_pitch + lane / 8 * vector) * 2u;
    to = static_cast<uint32>(first * 16);
#pragma unroll
    for (int k = 0; k < row_steps; ++k) {
      const bool has =
          4 * k + lane / 8 < Numbers::raw_vectors && first + 32 * k >= 0 && first + 32 * k < Numbers::pitch;
      inside |= static_cast<uint32>(has) << k;
    }
  }

  // Eight channels of a copy's rows.
  struct Words {
    uint32 value[steps][4];
  };
  __device__ __forceinline__ void load(uint32 raw, Words& to) const {
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / row_steps;
      uint32(&word)[4] = to.value[i];
      asm volatile(
          "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
          : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
          : "r"(raw + from + static_cast<uint32>(row * 16 * Numbers::raw_pitch + (i - row * row_steps) * 64))
          : "memory");
    }
  }
  // To the window that begins at x, `shift` bytes on.
  __device__ __forceinline__ void store(const Words& words, uint32 x, uint32 shift) const {
    const uint32 begin = x + shift + to;
    const uint32 beside = x + nowhere + threadIdx.x % 8 * 16;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const int row = i / row_steps;
      const int k = i - row * row_steps;
      const uint32 own = begin + static_cast<uint32>((row * Numbers::pitch + k * 32) * 16);
      const uint32(&word)[4] = words.value[i];
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       is_inside(k) || (inside >> k & 1u) != 0 ? own : beside),
                   "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                   : "memory");
    }
  }

 private:
  static constexpr uint32 nowhere = (Numbers::window - 8) * 16;
  // Whether all lanes have a place in this step of a row, wherever it begins.
  static constexpr __device__ bool is_inside(int k) { return k > 0 && 32 * k + 31 < Numbers::pitch; }
};

// Either, and only that has a meaning.
template <bool rounds, class C, class Tail, class Numbers>
struct GemmPingpongStagingOf {
  using Type = GemmPingpongStaging<C, Tail, Numbers>;
};
template <class C, class Tail, class Numbers>
struct GemmPingpongStagingOf<true, C, Tail, Numbers> {
  using Type = GemmPingpongRounding<C, Tail, Numbers>;
};

// The copies of x that a converting warp has, one after another.
// Some rows of eight channels are a copy; each warp has copies of its own, and places for them, and sends for
// the next one as soon as it has loaded one.
template <class C, class Tail, class Numbers>
struct GemmPingpongCopies {
  static constexpr uint32 row_copies = 2 * Numbers::chunks;  // of all channels
  static constexpr uint32 tile_copies = Numbers::copies * row_copies;
  static constexpr uint32 warp_slots = Numbers::raw_slots / pingpong::converting_warps;
  // Each warp has something of every tile; and of a band in every tile or in none, else it would take a
  // barrier's round for the one before.
  static_assert(tile_copies >= pingpong::converting_warps);
  static_assert(tile_copies % pingpong::converting_warps == 0 ||
                GemmPingpongBands<C, Numbers>::least_copies() >= pingpong::converting_warps);
  // An index that may be one of the next tile, or of one after it.
  template <class Next>
  static __device__ __forceinline__ void to_tile(uint32& index, Next&& next) {
    if constexpr (tile_copies >= Numbers::raw_slots) {
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
  uint32 round = 0;       // of the tile
  uint32 slot = 0;        // of the warp's
  uint32 slot_round = 0;  // how often that came round

  explicit __device__ __forceinline__ GemmPingpongCopies(int first)
      : n(static_cast<int>(GemmItem<Tail, Numbers>(blockIdx.x, 1).n)), index(static_cast<uint32>(first)) {
    to_tile(index, [&] { to_next(); });
  }
  // That a block passes from one tile to the next.
  static __device__ __forceinline__ int samples() {
    return GemmPingpongExchange<C, Tail, Numbers>::samples();
  }
  __device__ __forceinline__ void next() {
    index += pingpong::converting_warps;
    to_tile(index, [&] { to_next(); });
    if (++slot == warp_slots) {
      slot = 0;
      slot_round ^= 1u;
    }
  }
  __device__ __forceinline__ void to_next() {
    n += samples();
    round ^= 1u;
  }
};

// A converting warp.
template <class C, class Tail, class Numbers>
struct GemmPingpongConverter {
  using Parameters = GemmPingpongParameters<Tail::parameters>;
  using Shared = GemmPingpongShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Geometry = GemmGeometry<C, Numbers>;
  static constexpr bool rounds = Tail::Input::bytes == 4;
  using Staging = typename GemmPingpongStagingOf<rounds, C, Tail, Numbers>::Type;
  using Copies = GemmPingpongCopies<C, Tail, Numbers>;
  using Bands = GemmPingpongBands<C, Numbers>;

  const Parameters& p;
  Shared& s;
  const int tile = Item(blockIdx.x, 1).position_tile;  // that the block has of every sample
  const typename Geometry::Box box{tile};
  const bool is_first = is_elected();
  const uint64 policy = passing();

  static __device__ __forceinline__ bool is_elected() {
    uint32 own;
    asm volatile("{\n.reg .pred own;\nelect.sync _|own, 0xffffffff;\nselp.u32 %0, 1, 0, own;\n}" : "=r"(own));
    return own != 0;
  }

  // Neighbours read what they share at other times. To keep x no longer than it must (`evict_first`)
  // took 1.75 ms for s19 in f32, as others do 1.65, and this 1.60.
  static __device__ __forceinline__ uint64 passing() {
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }

  // Copy `index` of a sample's tile, or of the next one's, if there is one.
  __device__ __forceinline__ void send(int n, uint32 index, uint32 slot) const {
    Copies::to_tile(index, [&] { n += Copies::samples(); });
    const uint32 number = index / Copies::row_copies;
    const uint32 eight = index - number * Copies::row_copies;
    const uint32 row = number * Numbers::copy_y;
    const uint32 z = Numbers::window_z == 1 ? 0 : row / Numbers::window_y;
    if (n < static_cast<int>(p.batch) && is_first) {
      barrier::expect(&s.raw_full[slot], Shared::raw_bytes);
      asm volatile(
          "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
          "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(barrier::shared_address(s.raw[slot])),
          "l"(p.map), "r"(barrier::shared_address(&s.raw_full[slot])), "r"(Staging::first_of(box)),
          "r"(eight * 8),
          "r"(box.first[1] + Geometry::low(1) + static_cast<int>(row - z * Numbers::window_y)),
          "r"(box.first[0] + Geometry::low(0) + static_cast<int>(z)), "r"(n), "l"(policy)
          : "memory");
    }
  }

  // One thread.
  __device__ __forceinline__ void send_weights() const {
    barrier::expect(&s.weights_full, Numbers::chunks * Shared::weight_bytes);
#pragma unroll 1
    for (int i = 0; i < Numbers::chunks; ++i)
      barrier::copy(s.weights[i], static_cast<const unsigned char*>(p.packed) + i * Shared::weight_bytes,
                    Shared::weight_bytes, &s.weights_full);
  }

  __device__ __forceinline__ void run() const {
    // The compiler knows then that the warp has one: copies are sent for from uniform registers.
    const uint32 own_warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - 4 * Numbers::groups;
    const uint32 first_slot = own_warp * Copies::warp_slots;
    Copies copy(static_cast<int>(own_warp));
    if (is_first)
      asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(p.map) : "memory");
    for (uint32 i = 0; i < Copies::warp_slots; ++i)
      send(copy.n, copy.index + i * pingpong::converting_warps, first_slot + i);
    if (own_warp == 0 && is_first) send_weights();
    Staging staging(tile);
    bool is_new = true;  // the warp's first copy of a band
#pragma unroll 1
    while (copy.n < static_cast<int>(p.batch)) {
      const uint32 slot = first_slot + copy.slot;
      const Copies own = copy;
      const uint32 number = own.index / Copies::row_copies;
      const uint32 eight = own.index - number * Copies::row_copies;
      const uint32 band = own.index / Bands::copies;
      copy.next();
      barrier::wait_asleep(&s.raw_full[slot], own.slot_round);
      typename Staging::Words words;
      staging.load(barrier::shared_address(s.raw[slot]), words);
      if (is_new) barrier::wait_asleep(&s.x_empty[band], own.round ^ 1u);
      staging.store(words, barrier::shared_address(s.x) + eight * Shared::half_bytes,
                    number * (Numbers::copy_y * Numbers::pitch * 16));
      // What the slot had has been loaded, else it could not be stored (of a step that no lane stores,
      // rounded).
      __syncwarp();
      send(own.n, own.index + Numbers::raw_slots, slot);
      // The warp's last copy of the band: what was written is read by products.
      is_new = copy.index / Bands::copies != band || copy.n != own.n;
      if (is_new) {
        barrier::release_to_copies();
        __syncwarp();
        if (is_first) barrier::arrive(&s.x_full[band]);
        if constexpr (rounds) {
          if (copy.n != own.n) {
            const uint32 bits = staging.take_largest();
            if (is_first)
              GemmPingpongExchange<C, Tail, Numbers>{p}.leave_largest(own.n, tile, own_warp, bits);
          }
        }
      }
    }
  }
};

}  // namespace onepass
