// gemm_pingpong.cuh: the chain before the norm, and moments.
#pragma once

#include "gemm/pingpong/exchange.cuh"
#include "gemm/pingpong/held.cuh"

namespace onepass {

// Which columns of a warpgroup have an output where the box is whole.
template <class Geometry, class Numbers>
struct GemmPingpongBox {
  static constexpr __device__ bool has(int i) {
    const int y = i / Numbers::pitch;
    const int z = y / Geometry::rows_of_plane;
    return i % Numbers::pitch < Numbers::box_x && y - z * Geometry::rows_of_plane < Numbers::box_y &&
           z < Numbers::box_z;
  }
  // A bit for each eight columns of which some have none, in any warpgroup.
  static constexpr __device__ uint64 gaps() {
    uint64 bits = 0;
    for (int i = 0; i < Numbers::groups * Numbers::columns; ++i) {
      if (!has(i)) bits |= uint64{1} << (i % Numbers::columns / 8);
    }
    return bits;
  }
};

// What a warpgroup does with a tile's sums.
// The sum of the thread's pair j, row h and element e is number j * 4 + h * 2 + e.
template <class C, class Tail, class Numbers>
struct GemmPingpongMoments : GemmPingpongThread {
  using Parameters = GemmPingpongParameters<Tail::parameters>;
  using Shared = GemmPingpongShared<C, Tail, Numbers>;
  using Before = typename Tail::Before;
  using Twice = PingpongTwice<typename Before::Only, Tail::Output::bytes>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Slabs = GemmSlabs<C, Tail, Numbers>;
  using Box = GemmPingpongBox<Geometry, Numbers>;
  static constexpr int columns = Numbers::columns;
  static constexpr int sums = columns / 2;
  static constexpr int pairs = columns / 8;  // of columns, in each row of a thread
  static constexpr int group_rows = Slabs::group_rows;
  static constexpr int rows = Geometry::rows;
  static constexpr uint64 gaps = Box::gaps();
  static_assert(pairs <= 64);
  static_assert(16 % group_rows == 0 && Geometry::classes == 1);

  const Parameters& p;
  Shared& s;

  __device__ __forceinline__ GemmPingpongExchange<C, Tail, Numbers> exchange() const { return {p}; }
  // That the block has of every sample.
  // Asked again each time: a register less.
  static __device__ __forceinline__ int position_tile() {
    uint32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return static_cast<int>(block % Numbers::position_tiles);
  }

  // Which of the thread's columns have an output; and whether the warp's box is whole: all but those beside
  // it have.
  struct Mask {
    uint32 bits[(2 * pairs + 1 + 31) / 32];

    __device__ __forceinline__ bool bit(int i) const { return bits[i / 32] >> (i % 32) & 1u; }
    __device__ __forceinline__ void set(int i, bool value) {
      bits[i / 32] |= static_cast<uint32>(value) << (i % 32);
    }
    __device__ __forceinline__ bool has(int j, int e) const { return bit(2 * j + e); }
    __device__ __forceinline__ bool whole() const { return bit(2 * pairs); }
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
        mask.set(2 * j + e, has);
        whole = whole && (has || !Box::has(first + 8 * j + e));
      }
    }
    // The same of all slabs.
    const float elements = lanes_sum<slab_lanes>(static_cast<float>((3 - own_slabs) * count_of(mask)));
    whole = __all_sync(0xffffffffu, whole);
    if (lane == 0) s.elements[warp] = float2{elements > 0.0f ? 1.0f / elements : 0.0f, whole ? 1.0f : 0.0f};
    if (lane == 0 && warp % 4 == 0) exchange().leave_count(position_tile(), group, elements);
    __syncwarp();
    mask.set(2 * pairs, whole);
    return again(mask);
  }
  // Asked again each time: answers for all columns, or terms of the bits, would be kept in registers. Of
  // whole rows nothing is kept.
  static constexpr bool keeps_mask = !Numbers::by_rows;
  __device__ __forceinline__ Mask again(const Mask& mask) const {
    Mask asked = mask;
    if constexpr (!keeps_mask) {
      constexpr int row_pairs = Numbers::pitch / 8;
      asked = Mask{};
#pragma unroll
      for (int r = 0; r < pairs / row_pairs; ++r) {
        const int left = s.rows[group * (pairs / row_pairs) + r].y - lane % 4;  // pairs, of four lanes
        const uint32 own = left > 0 ? (left + 3) / 4 : 0;
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(asked.bits) / 4); ++i) {
          const int first = r * row_pairs * 2 - 32 * i;  // bit
          if (first > 31 || first + 2 * row_pairs <= 0) continue;
          const uint64 all = (uint64{1} << (2 * own)) - 1;
          asked.bits[i] |= static_cast<uint32>(first < 0 ? all >> -first : all << first);
        }
      }
    }
#pragma unroll
    for (uint32& bits : asked.bits) asm volatile("" : "+r"(bits));
    return asked;
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
    __device__ __forceinline__ void finish_largest(float (&all)[own_slabs]) const {
#pragma unroll
      for (int k = 0; k < own_slabs; ++k)
        all[k] = fmaxf(fmaxf(sum[k][0], sum[k][1]), fmaxf(sum[k][2], sum[k][3]));
#pragma unroll
      for (int offset = slab_lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (float& v : all) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
      }
    }
  };
  // Whether sum i has an output where the box is whole: known to the compiler but for a few, and to the lane
  // where warpgroups have whole rows.
  static constexpr bool by_lane =
      Numbers::by_rows && Numbers::box_z == 1 && Numbers::groups * columns == Numbers::box_y * Numbers::pitch;
  __device__ __forceinline__ bool is_inside(const Mask& mask, int i) const {
    if ((gaps >> (i / 4) & 1u) == 0) return true;
    if constexpr (by_lane) return i / 4 % (Numbers::pitch / 8) * 8 + lane % 4 * 2 + i % 2 < Numbers::box_x;
    return mask.has(i / 4, i % 2);
  }

  // Products are added to the bias.
  // Scaled sums of f32 become what they are and get their bias at once.
  static constexpr bool scales = Numbers::guards;
  static constexpr bool bias_first = !scales;
  __device__ __forceinline__ void begin(float (&d)[sums]) const {
    float bias[2];
    load_bias(bias);
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      // A register of its own for each: where the compiler has one copied to all, it has products wait for
      // each other.
      asm volatile("mov.b32 %0, %1;" : "=f"(d[i]) : "f"(bias[i / 2 % 2]));
    }
  }
  __device__ __forceinline__ void load_bias(float (&bias)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = s.channels[rows % 64 == 0 || row(h) < rows ? row(h) : 0].x;
  }

  // The chain, in place; and the values' sums, if the box is whole.
  __device__ __forceinline__ void activate(int64 n, const Mask& mask, float (&d)[sums], Sums& all) const {
    float bias[2], scale[2];
    if constexpr (scales) {
      load_bias(bias);
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[h] = s.channels[rows % 64 == 0 || row(h) < rows ? row(h) : 0].w;
    }
    ChannelValues<Before, 1> values[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) values[h].load(p, n, rows % 64 == 0 || row(h) < rows ? row(h) : 0);
    const Mask asked = keeps_mask || by_lane ? mask : again(mask);
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if constexpr (scales) d[i] = fmaf(d[i], scale[i / 2 % 2], bias[i / 2 % 2]);
      if constexpr (Twice::exists) {
        d[i] = Twice::value(d[i]);
      } else {
        typename Before::template Tensors<1> tensors;
        d[i] = Before::value(d[i], values[i / 2 % 2].value[0], tensors, 0);
      }
      if (is_inside(asked, i)) all.of(i) += d[i];
    }
  }

  // The moments of the warp's slabs, left for all tiles. Values become distances from their slab's mean;
  // `unit` is what they wait in, of the thread's rows: 1 or their deviation, if that is far from 1; of f32
  // what makes the largest one an integer.
  __device__ __forceinline__ void leave_parts(uint32 tile, int64 n, const Mask& mask, float (&values)[sums],
                                              Sums& of_whole, float (&unit)[2]) const {
    float own[own_slabs], m2[own_slabs], most[own_slabs];
    const float2 elements = s.elements[warp];
    const bool whole = keeps_mask ? mask.whole() : elements.y != 0.0f;
    // Values are changed where both ways have met again, so that they are where they were.
    if (!whole) add_up(mask, values, of_whole);
    of_whole.finish(own);
#pragma unroll
    for (float& mean : own) mean *= elements.x;
#pragma unroll
    for (int i = 0; i < sums; ++i) values[i] -= own[i / 2 % 2 % own_slabs];
    if (whole) {
      add_up_squares<true>(mask, values, m2, most);
    } else {
      add_up_squares<false>(mask, values, m2, most);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (Shared::direct) {
        // No less where all values are the same, or nearly: what an integer is worth is what they are off by.
        unit[h] = fmaxf(most[h % own_slabs], 0x1p-100f) * (1.0f / pingpong::HeldInt20::most);
        continue;
      }
      // Of as few elements as a part has none is further off than 200 deviations. Any unit that is about as
      // large will do.
      float variance = m2[h % own_slabs] * elements.x;
      variance = variance > 0x1p+126f ? 0x1p+126f : variance;
      const bool is_near = variance > 0x1p-12f && variance < 0x1p+12f;
      unit[h] = is_near || !(variance > 0x1p-118f) ? 1.0f : variance * rsqrtf(variance);
    }
#pragma unroll
    for (int k = 0; k < own_slabs; ++k) {
      if (lane % slab_lanes == 0 && (rows % 64 == 0 || row(k) < rows)) {
        // Values that differ by less than tensor cores cut off sums (2^-16) are the same.
        const float least = own[k] * 0x1p-16f;
        if (m2[k] <= least * least) m2[k] = 0.0f;
        const uint32 slab = static_cast<uint32>(row(k)) / group_rows;
        exchange().leave_part(n, slab, position_tile(), group, own[k], m2[k]);
        s.held[tile & 1u][group][slab] = float2{own[k], unit[k]};
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void add_up(const Mask& mask, const float (&values)[sums], Sums& all) const {
    const Mask asked = again(mask);
    all = Sums{};
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if (asked.has(i / 4, i % 2)) all.of(i) += values[i];
    }
  }
  template <bool whole>
  __device__ __forceinline__ void add_up_squares(const Mask& mask, const float (&distances)[sums],
                                                 float (&m2)[own_slabs], float (&most)[own_slabs]) const {
    const Mask asked = whole && by_lane ? mask : again(mask);
    Sums squares, largest;
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if (whole ? is_inside(asked, i) : asked.has(i / 4, i % 2)) {
        squares.of(i) = fmaf(distances[i], distances[i], squares.of(i));
        if constexpr (Shared::direct) largest.of(i) = fmaxf(largest.of(i), fabsf(distances[i]));
      }
    }
    squares.finish(m2);
    if constexpr (Shared::direct) largest.finish_largest(most);
  }
};

}  // namespace onepass
