// The source of gemm/wgmma.cuh: brings x to shared memory as 16-bit elements.
#pragma once

#include "gemm/gemm.cuh"

namespace onepass {

// Fills the ring of windows.
template <class C, class Tail, class Numbers>
struct GemmStaging {
  using Geometry = GemmGeometry<C, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Input = typename Tail::Input;
  using Operand = typename Numbers::Operand;
  static constexpr bool guards = Numbers::guards;
  static constexpr int threads = gemm::staging_warps * 32;
  static constexpr int window_positions = Geometry::window * Geometry::windows;
  static constexpr int rounds = (window_positions + threads - 1) / threads;
  static constexpr int halves = Numbers::chunk_channels / 8;

  // --- x by copies ---
  static constexpr int converters = gemm::converting_warps * 32;
  // 16-bit elements are read from shared memory by pairs, if every pair is contiguous in x or outside of it.
  static constexpr bool by_pairs =
      Input::bytes == 2 && Numbers::slot_channels == 8 && !Numbers::boxed && !Geometry::has_stride &&
      Geometry::pitch % 2 == 0 && Geometry::plane % 2 == 0 && Geometry::low(2) % 2 == 0 &&
      C::input_size(2) % 2 == 0 && Numbers::tile_positions % 2 == 0 && Geometry::window % 2 == 0;
  static constexpr int at_a_time = by_pairs ? 2 : 1;  // positions of a thread
  static constexpr int converting_rounds =
      (window_positions + converters * at_a_time - 1) / (converters * at_a_time);
  static constexpr int raw_channel_bytes = Geometry::runs * Numbers::raw_pitch * Input::bytes;
  static constexpr int vector = 16 / Input::bytes;
  static constexpr int slot_channels = Numbers::slot_channels;  // four or eight
  static constexpr int slots_of_half = 8 / slot_channels;

  const GemmParameters<Tail::parameters>& p;
  GemmShared<C, Tail, Numbers>& s;

  // The elements of a channel that a run of the tile's window reads, rounded to 16 bytes.
  struct Range {
    int first;
    int count;
    __device__ __forceinline__ Range(const Item& item, int run) {
      int from, to;
      Geometry::extent(item.position_tile, run, from, to);
      first = from / vector * vector;
      count = to > from ? (to + vector - 1) / vector * vector - first : 0;
    }
  };

  // Copies by vectors, for boxes with short runs: a bulk copy takes 75 clocks however short it is. These are
  // the vectors of each channel that the lanes of a warp copy.
  struct Vectors {
    static constexpr int of_run = Numbers::raw_pitch / vector;
    static constexpr int pieces = (Geometry::runs * of_run + 31) / 32;
    int from[pieces];  // elements; -1: nothing

    explicit __device__ __forceinline__ Vectors(const Item& item) {
#pragma unroll
      for (int i = 0; i < pieces; ++i) {
        const int at = 32 * i + static_cast<int>(threadIdx.x) % 32;
        const int run = at / of_run;
        const int own = at - run * of_run;
        const Range range(item, run < Geometry::runs ? run : 0);
        from[i] = run < Geometry::runs && own * vector < range.count ? range.first + own * vector : -1;
      }
    }
  };

  // One warp: copies the vectors of a slot's channels. The slot is free.
  __device__ __forceinline__ void send(const Item& item, const Vectors& vectors, int channel,
                                       Ring<Numbers::raw_slots>& ring) const {
    const int left = C::in_channels - channel;
    const auto* from = static_cast<const unsigned char*>(p.input) +
                       (input_origin<C>(item.n) + channel * C::input_stride(1)) * Input::bytes;
    uint32 to = barrier::shared_address(s.raw[ring.stage]) + static_cast<uint32>(threadIdx.x) % 32 * 16;
#pragma unroll 1
    for (int k = 0; k < slot_channels && k < left; ++k) {
#pragma unroll
      for (int i = 0; i < Vectors::pieces; ++i) {
        if (vectors.from[i] >= 0) barrier::copy_vector(to + i * 512, from + vectors.from[i] * Input::bytes);
      }
      from += C::input_stride(1) * Input::bytes;
      to += raw_channel_bytes;
    }
    barrier::arrive_with_vectors(&s.raw_full[ring.stage]);
    ring.next();
  }

  // The same by bulk copies: a run of a channel each.
  struct Bulks {
    static constexpr int pieces = (slot_channels * Geometry::runs + 31) / 32;
    int first[pieces];
    int count[pieces];
    int all;  // elements of a channel

    explicit __device__ __forceinline__ Bulks(const Item& item) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      int own = 0;
#pragma unroll
      for (int i = 0; i < pieces; ++i) {
        const int run = (32 * i + lane) / slot_channels;
        const Range range(item, run < Geometry::runs ? run : 0);
        first[i] = range.first;
        count[i] = run < Geometry::runs ? range.count : 0;
        if (lane % slot_channels == 0) own += count[i];
      }
      all = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<uint32>(own)));
    }
  };

  __device__ __forceinline__ void send(const Item& item, const Bulks& copies, int channel,
                                       Ring<Numbers::raw_slots>& ring) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int left = C::in_channels - channel;
    if (lane == 0) {
      barrier::expect(
          &s.raw_full[ring.stage],
          static_cast<uint32>(copies.all * (left < slot_channels ? left : slot_channels)) * Input::bytes);
    }
    __syncwarp();
    const int k = lane % slot_channels;
    const auto* from = static_cast<const unsigned char*>(p.input) +
                       (input_origin<C>(item.n) + (channel + k) * C::input_stride(1)) * Input::bytes;
#pragma unroll
    for (int i = 0; i < Bulks::pieces; ++i) {
      const int run = (32 * i + lane) / slot_channels;
      if (copies.count[i] == 0 || k >= left) continue;
      barrier::copy(s.raw[ring.stage] + k * raw_channel_bytes + run * Numbers::raw_pitch * Input::bytes,
                    from + copies.first[i] * Input::bytes,
                    static_cast<uint32>(copies.count[i]) * Input::bytes, &s.raw_full[ring.stage]);
    }
    ring.next();
  }

  static constexpr int senders = Numbers::by_vectors ? 32 : 1;  // that arrive when a slot is full
  using Copies = conditional<Numbers::by_vectors, Vectors, Bulks>;

  // The converting warps.
  __device__ __forceinline__ void convert_tile(const Item& item, Ring<Numbers::x_stages>& ring,
                                               Ring<Numbers::raw_slots>& raw) const {
    const int thread = static_cast<int>(threadIdx.x) - gemm::consumer_threads;
    uint32 at[converting_rounds];
    uint32 inside = 0;
#pragma unroll
    for (int r = 0; r < converting_rounds; ++r) {
      const int place = (r * converters + thread) * at_a_time;
      const int run = Geometry::run_of(place);
      const int offset = Geometry::source(item.position_tile, place);
      const bool has = offset >= 0 && place < window_positions;
      at[r] =
          has ? static_cast<uint32>(run * Numbers::raw_pitch + offset - Range(item, run).first) * Input::bytes
              : 0u;
      if (has) inside |= 1u << r;
    }
    float largest = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      barrier::wait(&s.x_empty[ring.stage], ring.round ^ 1u);
      unsigned char* const stage = s.x[ring.stage] + thread * at_a_time * 16;
#pragma unroll 1
      for (int slot = 0; slot < Numbers::chunk_channels / slot_channels; ++slot) {
        const int half = slot / slots_of_half;
        const int channel = chunk * Numbers::chunk_channels + slot * slot_channels;
        const bool exists = C::in_channels % Numbers::chunk_channels == 0 || channel < C::in_channels;
        if (exists) barrier::wait(&s.raw_full[raw.stage], raw.round);
        const unsigned char* const from = s.raw[raw.stage];
        unsigned char* const own = stage + slot % slots_of_half * 8;
        constexpr int at_once = by_pairs ? 4 : 24 / slot_channels;
#pragma unroll
        for (int first = 0; first < converting_rounds; first += at_once) {
          conditional<by_pairs, Pairs, Channels<slot_channels>> x[at_once];
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            if (first + i >= converting_rounds) break;
            x[i].load_copied(from + at[first + i], exists && (inside >> (first + i) & 1u), channel);
          }
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            const int r = first + i;
            if (r >= converting_rounds) break;
            if ((r + 1) * converters * at_a_time > window_positions &&
                (r * converters + thread) * at_a_time >= window_positions)
              break;
#pragma unroll
            for (int part = 0; part < Numbers::parts; ++part) {
              const int place = (part * halves + half) * window_positions + r * converters * at_a_time;
              x[i].pack(own + place * 16, largest, part == Numbers::parts - 1);
            }
          }
        }
        // Copies that overwrite the slot start after this barrier, when all reads have finished.
        if (exists) {
          __syncwarp();
          if (threadIdx.x % 32 == 0) barrier::arrive(&s.raw_empty[raw.stage]);
          raw.next();
        }
      }
      if constexpr (guards) {
        if (chunk == Numbers::chunks - 1) leave_guard(item, largest, gemm::converting_warps);
      }
      // Releases the stores to wgmma, once a chunk: the fence waits for all stores before it.
      barrier::release_to_copies();
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier::arrive(&s.x_full[ring.stage]);
      ring.next();
    }
  }

  // Eight channels of two neighbouring positions, of 16 bits each.
  struct Pairs {
    uint32 bits[8];

    __device__ __forceinline__ void load_copied(const unsigned char* from, bool inside, int channel) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const bool exists = inside && (C::in_channels % 8 == 0 || channel + k < C::in_channels);
        bits[k] = exists ? *reinterpret_cast<const uint32*>(from + k * raw_channel_bytes) : 0u;
      }
    }
    // Of eight lanes that store together, four begin with the second position. This avoids bank conflicts.
    __device__ __forceinline__ void pack(unsigned char* to, float&, bool) const {
      const bool second = threadIdx.x % 8 >= 4;
      store(to + (second ? 16 : 0), second ? 0x7632u : 0x5410u);
      store(to + (second ? 0 : 16), second ? 0x5410u : 0x7632u);
    }

   private:
    __device__ __forceinline__ void store(unsigned char* to, uint32 selector) const {
      *reinterpret_cast<uint4*>(to) =
          uint4{__byte_perm(bits[0], bits[1], selector), __byte_perm(bits[2], bits[3], selector),
                __byte_perm(bits[4], bits[5], selector), __byte_perm(bits[6], bits[7], selector)};
    }
  };

  // --- x by loads ---
  // Some channels of a position: first as loaded, then as 16 bits each.
  template <int Count>
  struct Channels {
    ElementBits<Input> bits[Count];

    // `from`: the channel's first element, the same in all threads; `bytes`: from there to the position.
    template <bool in_vectors>
    __device__ __forceinline__ void load(const unsigned char* from, uint32 bytes, bool inside, int channel) {
      using Word = ElementBits<Input>;
      if constexpr (in_vectors) {
        const auto* own = reinterpret_cast<const uint4*>(from + bytes);
#pragma unroll
        for (int v = 0; v < Input::bytes / 2; ++v) {
          const uint4 four = inside ? __ldg(own + v) : uint4{0, 0, 0, 0};
          const uint32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if constexpr (Input::bytes == 4) {
              bits[4 * v + k] = word[k];
            } else {
              bits[2 * k] = static_cast<Word>(word[k]);
              bits[2 * k + 1] = static_cast<Word>(word[k] >> 16);
            }
          }
        }
      } else {
        const auto* own = reinterpret_cast<const Word*>(from + bytes);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          const bool exists = inside && (C::in_channels % 8 == 0 || channel + k < C::in_channels);
          bits[k] = exists ? __ldg(own + k * C::input_stride(1)) : Word{0};
        }
      }
    }
    // From copies.
    __device__ __forceinline__ void load_copied(const unsigned char* from, bool inside, int channel) {
      using Word = ElementBits<Input>;
#pragma unroll
      for (int k = 0; k < Count; ++k) {
        const bool exists = inside && (C::in_channels % 8 == 0 || channel + k < C::in_channels);
        bits[k] = exists ? *reinterpret_cast<const Word*>(from + k * raw_channel_bytes) : Word{0};
      }
    }
    // Stores the part that one 16-bit number holds of each; what is left stays.
    __device__ __forceinline__ void pack(unsigned char* to, float& largest, bool is_last) {
      uint32 word[Count / 2];
      if constexpr (Input::bytes == 4) {
        float v[Count];
#pragma unroll
        for (int k = 0; k < Count; ++k) {
          v[k] = __uint_as_float(bits[k]);
          if (!is_last || Numbers::parts == 1) v[k] *= gemm::x_scale<Numbers>;
        }
#pragma unroll
        for (int k = 0; k < Count / 2; ++k) word[k] = pack_operands<C, Operand>(v[2 * k], v[2 * k + 1]);
        if (!is_last || Numbers::parts == 1) {
#pragma unroll
          for (int k = 0; k < Count; ++k) largest = gemm::largest_of(largest, v[k]);
        }
        if (!is_last) {
#pragma unroll
          for (int k = 0; k < Count / 2; ++k) {
            float low, high;
            Operand::unpack(word[k], low, high);
            bits[2 * k] = __float_as_uint(v[2 * k] - low);
            bits[2 * k + 1] = __float_as_uint(v[2 * k + 1] - high);
          }
        }
      } else {
#pragma unroll
        for (int k = 0; k < Count / 2; ++k)
          word[k] = static_cast<uint32>(bits[2 * k]) | static_cast<uint32>(bits[2 * k + 1]) << 16;
      }
      if constexpr (Count == 8) {
        *reinterpret_cast<uint4*>(to) = uint4{word[0], word[1], word[2], word[3]};
      } else {
        static_assert(Count == 4);
        *reinterpret_cast<uint2*>(to) = uint2{word[0], word[1]};
      }
    }
  };

  // Whether eight channels of a position may lie side by side, as vectors.
  static constexpr bool vectors_fit = C::input_stride(1) == 1 && C::in_channels % 8 == 0 &&
                                      C::input_stride(0) % 8 == 0 && C::input_stride(2) % 8 == 0 &&
                                      C::input_stride(3) % 8 == 0 && C::input_stride(4) % 8 == 0;

  // `send_weights(chunk)` is called by the last warp when it has staged a chunk.
  template <bool in_vectors, class SendWeights>
  __device__ __forceinline__ void tile(const Item& item, Ring<Numbers::x_stages>& ring,
                                       SendWeights&& send_weights) const {
    const int thread = static_cast<int>(threadIdx.x) - gemm::consumer_threads;
    const int64 sample = input_origin<C>(item.n);
    uint32 bytes[rounds];
    uint32 inside = 0;  // a bit for each round
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const int place = r * threads + thread;
      const int offset = place < window_positions ? Geometry::source(item.position_tile, place) : -1;
      bytes[r] = offset < 0 ? 0u : static_cast<uint32>(offset) * Input::bytes;
      if (offset >= 0) inside |= 1u << r;  // as a sum of shifted bits, ptxas 13.0 crashes for strides
    }
    float largest = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      barrier::wait(&s.x_empty[ring.stage], ring.round ^ 1u);
      unsigned char* const stage = s.x[ring.stage] + thread * 16;
      // Positions at a time: 32 loads on their way.
      constexpr int at_once = 2;
#pragma unroll 1
      for (int half = 0; half < halves; half += 2) {
        const int channel = chunk * Numbers::chunk_channels + half * 8;
        const bool exists = C::in_channels % Numbers::chunk_channels == 0 || channel < C::in_channels;
        const bool has_second = C::in_channels % 16 == 0 || channel + 8 < C::in_channels;
        const unsigned char* const from = static_cast<const unsigned char*>(p.input) +
                                          (sample + channel * C::input_stride(1)) * Input::bytes;
#pragma unroll
        for (int first = 0; first < rounds; first += at_once) {
          Channels<8> x[at_once][2];
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            if (first + i >= rounds) break;
            const bool has = inside >> (first + i) & 1u;
            x[i][0].template load<in_vectors>(from, bytes[first + i], exists && has, channel);
            x[i][1].template load<in_vectors>(from + 8 * C::input_stride(1) * Input::bytes, bytes[first + i],
                                              exists && has_second && has, channel + 8);
          }
          // Keeps the compiler from waiting between the loads.
          __syncwarp();
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
            const int r = first + i;
            if (r >= rounds) break;
            if ((r + 1) * threads > window_positions && r * threads + thread >= window_positions) break;
#pragma unroll
            for (int part = 0; part < Numbers::parts; ++part) {
              unsigned char* const to =
                  stage + ((part * halves + half) * window_positions + r * threads) * 16;
              const bool is_last = part == Numbers::parts - 1;
              x[i][0].pack(to, largest, is_last);
              x[i][1].pack(to + window_positions * 16, largest, is_last);
            }
          }
        }
      }
      barrier::release_to_copies();
      if constexpr (guards) {
        if (chunk == Numbers::chunks - 1) leave_guard(item, largest, gemm::staging_warps);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        barrier::arrive(&s.x_full[ring.stage]);
        if (thread == threads - 32) send_weights(chunk);
      }
      __syncwarp();
      ring.next();
    }
  }

  __device__ __forceinline__ void leave_guard(const Item& item, float largest, int warps) const {
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    if (threadIdx.x % 32 != 0) return;
    atomicMax(p.guard + item.n, bits);
    if constexpr (!Tail::has_norm) {
      // Without a norm no block waits for the sample's last tile: the last warp judges.
      if (item.channel_tile == 0 &&
          count_up(p.control + item.unit * 4 + 2) == static_cast<uint32>(Numbers::position_tiles * warps) - 1)
        gemm::judge<Tail, Numbers>(p, item.n, 1.0f);
    }
  }
};

}  // namespace onepass
