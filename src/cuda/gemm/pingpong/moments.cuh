// The first part of the ping-pong kernel's epilogue: the chain before the norm, and moments.
#pragma once

#include "gemm/pingpong/exchange.cuh"
#include "gemm/pingpong/held.cuh"

namespace onepass::pingpong {

// Which columns of a tile have an output in a whole box (one that the output does not cut off).
template <class L>
struct WholeBox {
  static constexpr __device__ bool has(int i) {
    const int y = i / L::Numbers::pitch;
    const int z = y / L::Geometry::rows_of_plane;
    return i % L::Numbers::pitch < L::Numbers::box_x &&
           y - z * L::Geometry::rows_of_plane < L::Numbers::box_y && z < L::Numbers::box_z;
  }
  // A bit for each eight columns of a warpgroup; set where a column has no output in some warpgroup.
  static constexpr __device__ uint64 gaps() {
    uint64 bits = 0;
    for (int i = 0; i < L::groups * L::columns; ++i) {
      if (!has(i)) bits |= uint64{1} << (i % L::columns / 8);
    }
    return bits;
  }
};

template <class L>
struct TileMoments {
  using Before = typename L::Tail::Before;
  using DoubledChain = Doubled<typename Before::Only, L::Output::bytes>;
  using Box = WholeBox<L>;
  static constexpr int columns = L::columns;
  static constexpr int sums = L::sums;
  static constexpr int pairs = L::pairs;
  static constexpr int group_rows = L::group_rows;
  static constexpr uint64 gaps = Box::gaps();

  const typename L::Parameters& p;
  Shared<L>& s;
  Thread thread;

  __device__ __forceinline__ Exchange<L> exchange() const { return {p}; }

  // A bit for each of the thread's columns that has an output, and one that says whether the warp's box is
  // whole.
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
    const int first = thread.group * columns + 2 * (thread.lane % 4);
#pragma unroll
    for (int j = 0; j < pairs; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool has = s.offsets()[first + 8 * j + e] >= 0;
        mask.set(2 * j + e, has);
        whole = whole && (has || !Box::has(first + 8 * j + e));
      }
    }
    // All slabs of the warp have the same count.
    const float elements = lanes_sum<slab_lanes>(static_cast<float>((3 - own_slabs) * count_of(mask)));
    whole = __all_sync(0xffffffffu, whole);
    if (thread.lane == 0)
      s.elements[thread.warp] = float2{elements > 0.0f ? 1.0f / elements : 0.0f, whole ? 1.0f : 0.0f};
    if (thread.lane == 0 && thread.warp % 4 == 0)
      exchange().publish_count(L::reload_tile_of_block(), thread.group, elements);
    __syncwarp();
    mask.set(2 * pairs, whole);
    return reload(mask);
  }
  // Reloads the bits at each use: the compiler would otherwise keep a predicate for each column in registers.
  // Kernels that store rows keep no mask; they compute it from the rows' lengths.
  static constexpr bool keeps_mask = !L::Numbers::store_rows;
  __device__ __forceinline__ Mask reload(const Mask& mask) const {
    Mask asked = mask;
    if constexpr (!keeps_mask) {
      constexpr int row_pairs = L::Numbers::pitch / 8;
      asked = Mask{};
#pragma unroll
      for (int r = 0; r < pairs / row_pairs; ++r) {
        const int left =
            s.rows[thread.group * (pairs / row_pairs) + r].y - thread.lane % 4;  // pairs, of four lanes
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

  // The thread's two rows lie in one slab or in two.
  static constexpr int own_slabs = group_rows == 16 ? 1 : 2;
  static constexpr int slab_lanes = group_rows == 16 ? 32 : 4 * group_rows;
  // Sums a value of each of the thread's slabs over the slab's lanes.
  static __device__ __forceinline__ void add_lanes(float (&value)[own_slabs]) {
#pragma unroll
    for (int offset = slab_lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (float& v : value) v += __shfl_xor_sync(0xffffffffu, v, offset);
    }
  }

  // Partial sums of each of the thread's slabs. Four independent chains hide the latency of additions.
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
  // Whether sum i has an output in a whole box. The compiler knows it for most columns. Where warpgroups have
  // whole rows, the lane decides.
  static constexpr bool by_lane = L::Numbers::store_rows && L::Numbers::box_z == 1 &&
                                  L::groups * columns == L::Numbers::box_y * L::Numbers::pitch;
  __device__ __forceinline__ bool is_inside(const Mask& mask, int i) const {
    if ((gaps >> (i / 4) & 1u) == 0) return true;
    if constexpr (by_lane)
      return i / 4 % (L::Numbers::pitch / 8) * 8 + thread.lane % 4 * 2 + i % 2 < L::Numbers::box_x;
    return mask.has(i / 4, i % 2);
  }

  // Accumulators start from the bias. Sums of f32 operands are scaled, and get their bias with the scale.
  static constexpr bool scales = L::Numbers::guards;
  static constexpr bool bias_first = !scales;
  __device__ __forceinline__ void begin(float (&d)[sums]) const {
    float bias[2];
    load_bias(bias);
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      // Each accumulator is set by its own instruction. Where the compiler copies one register to all, it
      // serialises the products.
      asm volatile("mov.b32 %0, %1;" : "=f"(d[i]) : "f"(bias[i / 2 % 2]));
    }
  }
  __device__ __forceinline__ void load_bias(float (&bias)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = s.channels[L::channel_of(thread.row(h))].x;
  }

  // Applies the chain in place, and sums the values as if the box were whole.
  __device__ __forceinline__ void activate(int64 n, const Mask& mask, float (&d)[sums], Sums& all) const {
    float bias[2], scale[2];
    if constexpr (scales) {
      load_bias(bias);
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[h] = s.channels[L::channel_of(thread.row(h))].w;
    }
    ChannelValues<Before, 1> values[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) values[h].load(p, n, L::channel_of(thread.row(h)));
    const Mask asked = keeps_mask || by_lane ? mask : reload(mask);
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if constexpr (scales) d[i] = fmaf(d[i], scale[i / 2 % 2], bias[i / 2 % 2]);
      if constexpr (DoubledChain::exists) {
        d[i] = DoubledChain::value(d[i]);
      } else {
        typename Before::template Tensors<1> tensors;
        d[i] = Before::value(d[i], values[i / 2 % 2].value[0], tensors, 0);
      }
      if (is_inside(asked, i)) all.of(i) += d[i];
    }
  }

  // Publishes the moments of the warp's slabs and turns values into distances from their part's mean. `unit`
  // is what held values of the thread's rows are divided by: 1, or the deviation where that is far from 1.
  // For f32 the largest distance becomes the largest 20-bit integer.
  __device__ __forceinline__ void publish_parts(uint32 tile, int64 n, const Mask& mask, float (&values)[sums],
                                                Sums& of_whole, float (&unit)[2]) const {
    float own[own_slabs], m2[own_slabs], most[own_slabs];
    const float2 elements = s.elements[thread.warp];
    const bool whole = keeps_mask ? mask.whole() : elements.y != 0.0f;
    // Values are changed only after both branches have joined, so that they stay in the same registers.
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
      if constexpr (L::is_f32) {
        // The lower bound is for values that are all equal, or nearly.
        unit[h] = fmaxf(most[h % own_slabs], 0x1p-100f) * (1.0f / HeldInt20::most);
        continue;
      }
      // In a part of so few elements no value is further than 200 deviations from the mean. Any unit of about
      // that size will do.
      float variance = m2[h % own_slabs] * elements.x;
      variance = variance > 0x1p+126f ? 0x1p+126f : variance;
      const bool is_near = variance > 0x1p-12f && variance < 0x1p+12f;
      unit[h] = is_near || !(variance > 0x1p-118f) ? 1.0f : variance * rsqrtf(variance);
    }
#pragma unroll
    for (int k = 0; k < own_slabs; ++k) {
      if (thread.lane % slab_lanes == 0 && L::has_row(thread.row(k))) {
        // Values that differ by less than the tensor cores' truncation (2^-16) count as equal.
        const float least = own[k] * 0x1p-16f;
        if (m2[k] <= least * least) m2[k] = 0.0f;
        const uint32 slab = static_cast<uint32>(thread.row(k)) / group_rows;
        exchange().publish_part(n, slab, L::reload_tile_of_block(), thread.group, own[k], m2[k]);
        s.held_scales[tile & 1u][thread.group][slab] = float2{own[k], unit[k]};
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void add_up(const Mask& mask, const float (&values)[sums], Sums& all) const {
    const Mask asked = reload(mask);
    all = Sums{};
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if (asked.has(i / 4, i % 2)) all.of(i) += values[i];
    }
  }
  template <bool whole>
  __device__ __forceinline__ void add_up_squares(const Mask& mask, const float (&distances)[sums],
                                                 float (&m2)[own_slabs], float (&most)[own_slabs]) const {
    const Mask asked = whole && by_lane ? mask : reload(mask);
    Sums squares, largest;
#pragma unroll
    for (int i = 0; i < sums; ++i) {
      if (whole ? is_inside(asked, i) : asked.has(i / 4, i % 2)) {
        squares.of(i) = fmaf(distances[i], distances[i], squares.of(i));
        if constexpr (L::is_f32) largest.of(i) = fmaxf(largest.of(i), fabsf(distances[i]));
      }
    }
    squares.finish(m2);
    if constexpr (L::is_f32) largest.finish_largest(most);
  }
};

}  // namespace onepass::pingpong
