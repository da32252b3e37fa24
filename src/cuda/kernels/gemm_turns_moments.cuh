// gemm_turns.cuh: the chain before the norm, and moments.
#pragma once

#include "gemm_turns_exchange.cuh"

namespace onepass {

// Which columns of a warpgroup have an output where the box is whole.
template <class Geometry, class Numbers>
struct GemmTurnsBox {
  static constexpr __device__ bool has(int i) {
    const int y = i / Numbers::pitch;
    const int z = y / Geometry::rows_of_plane;
    return i % Numbers::pitch < Numbers::box_x && y - z * Geometry::rows_of_plane < Numbers::box_y &&
           z < Numbers::box_z;
  }
  // A bit for each eight columns of which some have none, in either warpgroup.
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
struct GemmTurnsMoments : GemmTurnsThread {
  using Parameters = GemmTurnsParameters<Tail::parameters>;
  using Shared = GemmTurnsShared<C, Tail, Numbers>;
  using Before = typename Tail::Before;
  using Twice = TurnsTwice<typename Before::Only>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Slabs = GemmSlabs<C, Tail, Numbers>;
  using Box = GemmTurnsBox<Geometry, Numbers>;
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

  __device__ __forceinline__ GemmTurnsExchange<C, Tail, Numbers> exchange() const { return {p}; }
  // That the block has of every sample.
  static __device__ __forceinline__ int position_tile() {
    return GemmItem<Tail, Numbers>(blockIdx.x, 1).position_tile;
  }

  // Which of the thread's columns have an output.
  struct Mask {
    uint32 bits[(2 * pairs + 31) / 32];
    bool whole;  // of the warp: all but those beside the box

    __device__ __forceinline__ bool has(int j, int e) const {
      return bits[(2 * j + e) / 32] >> ((2 * j + e) % 32) & 1u;
    }
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
        mask.bits[(2 * j + e) / 32] |= static_cast<uint32>(has) << ((2 * j + e) % 32);
        whole = whole && (has || !Box::has(first + 8 * j + e));
      }
    }
    mask.whole = __all_sync(0xffffffffu, whole);
    // The same of all slabs.
    const float elements = lanes_sum<slab_lanes>(static_cast<float>((3 - own_slabs) * count_of(mask)));
    if (lane == 0) s.elements[warp] = float2{elements, elements > 0.0f ? 1.0f / elements : 0.0f};
    if (lane == 0 && warp % 4 == 0) exchange().leave_count(position_tile(), group, elements);
    __syncwarp();
    return mask;
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
  };
  // Whether sum i has an output where the box is whole: known to the compiler but for a few.
  static __device__ __forceinline__ bool is_inside(const Mask& mask, int i) {
    return (gaps >> (i / 4) & 1u) == 0 || mask.has(i / 4, i % 2);
  }

  // Products are added to the bias, but where a tile has one chunk: the compiler would have each of them wait
  // for the one before.
  static constexpr bool bias_first = Numbers::chunks > 1;
  __device__ __forceinline__ void begin(float (&d)[sums]) const {
    float bias[2];
    load_bias(bias);
#pragma unroll
    for (int i = 0; i < sums; ++i) d[i] = bias[i / 2 % 2];
  }
  __device__ __forceinline__ void load_bias(float (&bias)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = s.channels[rows % 64 == 0 || row(h) < rows ? row(h) : 0].x;
  }

  // The chain, in place; and the values' sums, if the box is whole.
  __device__ __forceinline__ void activate(int64 n, const Mask& mask, float (&d)[sums], Sums& all) const {
    float bias[2];
    if constexpr (!bias_first) load_bias(bias);
    ChannelValues<Before, 1> values[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) values[h].load(p, n, rows % 64 == 0 || row(h) < rows ? row(h) : 0);
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if constexpr (!bias_first) d[i] += bias[i / 2 % 2];
      if constexpr (Twice::exists) {
        d[i] = Twice::value(d[i]);
      } else {
        typename Before::template Tensors<1> tensors;
        d[i] = Before::value(d[i], values[i / 2 % 2].value[0], tensors, 0);
      }
      if (is_inside(mask, i)) all.of(i) += d[i];
    }
  }

  // The moments of the warp's slabs, left for all tiles. Values become distances from their slab's mean;
  // `unit` is what f16 holds those of the thread's rows in: 1, or their deviation if it is far from that.
  __device__ __forceinline__ void leave_parts(uint32 tile, int64 n, const Mask& mask, float (&values)[sums],
                                              Sums& of_whole, float (&unit)[2]) const {
    float own[own_slabs], m2[own_slabs];
    const float2 elements = s.elements[warp];
    // Values are changed where both ways have met again, so that they are where they were.
    if (!mask.whole) add_up(mask, values, of_whole);
    of_whole.finish(own);
#pragma unroll
    for (float& mean : own) mean *= elements.y;
#pragma unroll
    for (int i = 0; i < sums; ++i) values[i] -= own[i / 2 % 2 % own_slabs];
    if (mask.whole) {
      add_up_squares<true>(mask, values, m2);
    } else {
      add_up_squares<false>(mask, values, m2);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Of as few elements as a part has none is further off than 200 deviations. Any unit that is about as
      // large will do.
      const float variance = m2[h % own_slabs] * elements.y;
      const bool is_near = variance > 0x1p-12f && variance < 0x1p+12f;
      unit[h] = is_near || !(variance > 1e-30f) ? 1.0f : variance * rsqrtf(variance);
    }
#pragma unroll
    for (int k = 0; k < own_slabs; ++k) {
      if (lane % slab_lanes == 0 && (rows % 64 == 0 || row(k) < rows)) {
        const uint32 slab = static_cast<uint32>(row(k)) / group_rows;
        exchange().leave_part(n, slab, position_tile(), group, own[k], m2[k]);
        s.held[tile & 1u][group][slab] = float2{own[k], unit[k]};
      }
    }
    __syncwarp();
  }
  // Asked again each time: answers for all columns would be kept in registers.
  static __device__ __forceinline__ Mask again(const Mask& mask) {
    Mask asked = mask;
#pragma unroll
    for (uint32& bits : asked.bits) asm volatile("" : "+r"(bits));
    return asked;
  }
  static __device__ __forceinline__ void add_up(const Mask& mask, const float (&values)[sums], Sums& all) {
    const Mask asked = again(mask);
    all = Sums{};
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if (asked.has(i / 4, i % 2)) all.of(i) += values[i];
    }
  }
  template <bool whole>
  static __device__ __forceinline__ void add_up_squares(const Mask& mask, const float (&distances)[sums],
                                                        float (&m2)[own_slabs]) {
    const Mask asked = again(mask);
    Sums squares;
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if (whole ? is_inside(asked, i) : asked.has(i / 4, i % 2))
        squares.of(i) = fmaf(distances[i], distances[i], squares.of(i));
    }
    squares.finish(m2);
  }
};

}  // namespace onepass
