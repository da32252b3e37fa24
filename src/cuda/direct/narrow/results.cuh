// The end of narrow.cuh: sums wait in shared memory, pass through the chain and leave in whole rows.
#pragma once

#include "direct/narrow/staging.cuh"

namespace onepass {

template <class C, class Tail, class N>
struct NarrowTypes<C, Tail, N>::Results {
  const Parameters& p;
  float* results;  // shared

  __device__ __forceinline__ float bias(int channel) const {
    if constexpr (C::has_bias) return load_one<typename C::Bias>(p.parameter[1], channel);
    return 0.0f;
  }

  __device__ __forceinline__ void keep(const Tile& tile, const Slot& slot, const Sums& sums) const {
    float* to = results + (slot.group * group_outputs + slot.output) * N::result_c +
                slot.at[0] * N::result_z + slot.at[1] * N::result_y +
                skewed(slot.at[2] * x_classes, N::result_skew) * N::result_x;
#pragma unroll
    for (int o = 0; o < N::outputs; ++o) {
      const ResultChannel at(tile, slot.group * group_outputs + slot.output + o);
      const float added = at.in_range ? bias(at.channel) : 0.0f;
#pragma unroll
      for (int q = 0; q < N::rows; ++q) {
#pragma unroll
        for (int i = 0; i < cells; ++i)
          to[o * N::result_c + q * N::result_y + skewed(i, N::result_skew) * N::result_x] =
              sums[o][q][i] + added;
      }
    }
  }

  // The same where a weight is not finite: zeros outside the input must not meet it. One by one. `OnlyLost`:
  // of results that are there and are not finite.
  template <bool OnlyLost>
  __device__ void keep_careful(const Tile& tile) const {
    constexpr int count = channels * box[0] * box[1] * box_outputs;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += N::threads) {
      Parts parts{static_cast<unsigned>(i)};
      const int x = parts.take(box_outputs);
      const int y = parts.take(box[1]);
      const int z = parts.take(box[0]);
      const auto own = static_cast<int>(parts.rest);
      const int r[3] = {tile.r[0], tile.r[1], x % x_classes};
      const int cell[3] = {tile.cell[0] + z, tile.cell[1] + y, tile.cell[2] + x / x_classes};
      const ResultChannel at(tile, own);
      float& result = results[own * N::result_c + z * N::result_z + y * N::result_y +
                              skewed(x, N::result_skew) * N::result_x];
      if (OnlyLost && fabsf(result) <= largest_float) continue;
      result = at.in_range ? careful_sum(tile.n, at.channel, r, cell) + bias(at.channel) : 0.0f;
    }
  }

  __device__ float careful_sum(int64 n, int channel, const int (&r)[3], const int (&cell)[3]) const {
    const int group = channel / static_cast<int>(C::channels);
    const int output = channel % static_cast<int>(C::channels);
    const auto position = [&](int d, int m) {
      return static_cast<int>(cell[d] * C::step(d) + C::base(d, r[d]) + m * C::delta(d));
    };
    const auto is_inside = [&](int d, int at) {
      return static_cast<unsigned>(at) < static_cast<unsigned>(C::input_size(d));
    };
    const auto tap = [&](int d, int m) {
      return static_cast<int>((C::first(d, r[d]) + m * C::tap_step(d)) * C::tap_stride(d));
    };
    float sum = 0.0f;
#pragma unroll 1
    for (int c = 0; c < C::in_channels; ++c) {
#pragma unroll 1
      for (int m0 = 0; m0 < C::count(0, r[0]); ++m0) {
#pragma unroll 1
        for (int m1 = 0; m1 < C::count(1, r[1]); ++m1) {
#pragma unroll 1
          for (int m2 = 0; m2 < C::count(2, r[2]); ++m2) {
            const int at[3] = {position(0, m0), position(1, m1), position(2, m2)};
            if (!is_inside(0, at[0]) || !is_inside(1, at[1]) || !is_inside(2, at[2])) continue;
            const int64 index = n * C::input_stride(0) +
                                (static_cast<int64>(group) * C::in_channels + c) * C::input_stride(1) +
                                at[0] * C::input_stride(2) + at[1] * C::input_stride(3) +
                                at[2] * C::input_stride(4);
            const float x = load_one<Input>(p.input, index);
            sum = fmaf(Staging{p}.weight(group, output, c, tap(0, m0) + tap(1, m1) + tap(2, m2)),
                       C::rounds_to_tf32 ? round_operand<C>(x) : x, sum);
          }
        }
      }
    }
    return sum;
  }

  // What a chain's tensors are loaded by.
  struct Operands {
    const void* const* parameter;
    uint64 aligned;
  };

  // Whether vectors of the output, and of tensors that stages read, lie on 16 bytes.
  __device__ __forceinline__ bool are_aligned() const {
    auto bits = reinterpret_cast<uint64>(p.output);
#pragma unroll
    for (int i = 0; i < Tail::parameters; ++i) bits |= reinterpret_cast<uint64>(p.parameter[i]);
    return bits % 16 == 0;
  }

  // A row of the tile's results, in memory and in shared memory.
  struct ResultRow {
    int64 index = 0;
    int place = 0;
    int channel = 0;  // of the output, where the row has one
    bool in_range = true;

    __device__ __forceinline__ ResultRow(const Tile& tile, int row) {
      Parts parts{static_cast<unsigned>(row)};
      const auto go_along = [&](int d, int at, int q) {
        in_range &= q < static_cast<int>(C::output_size(d));
        index += q * C::stride(d + 2);
        place += at;
      };
      index = tile.n * C::stride(0);
      if constexpr (N::output_interleaved) {
        const int x = parts.take(box_outputs);
        go_along(2, skewed(x, N::result_skew) * N::result_x, tile.cell[2] * x_classes + x);
      }
      const int y = parts.take(box[1]);
      go_along(1, y * N::result_y, tile.r[1] + static_cast<int>(C::classes(1)) * (tile.cell[1] + y));
      const int z = parts.take(box[0]);
      go_along(0, z * N::result_z, tile.r[0] + static_cast<int>(C::classes(0)) * (tile.cell[0] + z));
      if constexpr (!N::output_interleaved) {
        const auto own = static_cast<int>(parts.rest);
        const ResultChannel at(tile, own);
        in_range &= at.in_range;
        channel = at.channel;
        index += channel * C::stride(1);
        place += own * N::result_c;
      }
    }
  };

  // A vector of every row of results.
  struct ResultVector {
    int64 index;
    int first;
    int channel = 0;
    bool in_range;

    __device__ __forceinline__ ResultVector(const Tile& tile, int i) : first(i * N::output_vector) {
      if constexpr (N::output_interleaved) {
        const ResultChannel at(tile, first);
        in_range = at.in_range;
        channel = at.channel;
        index = channel * C::stride(1);
      } else {
        const int q = tile.cell[2] * x_classes + first;
        in_range = q < static_cast<int>(C::output_size(2));
        index = q * C::stride(4);
      }
    }

    static __device__ __forceinline__ int place(int at) {
      return N::output_interleaved ? at * N::result_c : skewed(at, N::result_skew) * N::result_x;
    }
  };

  // A vector of results from shared memory.
  __device__ __forceinline__ void load(int row, const ResultVector& own,
                                       float (&value)[N::output_vector]) const {
    if constexpr (N::keeps_vectors) {
      const float4 v = *reinterpret_cast<const float4*>(results + row + ResultVector::place(own.first));
      value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
    } else {
#pragma unroll
      for (int e = 0; e < N::output_vector; ++e) value[e] = results[row + ResultVector::place(own.first + e)];
    }
  }

  template <bool Aligned>
  __device__ __forceinline__ void store(const Tile& tile) const {
    constexpr int vector = N::output_vector;
    constexpr int vectors = (N::output_interleaved ? channels : box_outputs) / vector;
    constexpr int count = box[0] * box[1] * (N::output_interleaved ? box_outputs : channels);
    using Copy = Rows<vectors, N::store_lanes>;
    using Values = ChannelValues<After, N::output_interleaved ? vector : 1>;
    const Operands operands{p.parameter, Aligned ? ~uint64{0} : 0};
    if (Copy::first() >= Copy::at_once) return;
    Values values[N::output_interleaved ? Copy::steps : 1];
    if constexpr (N::output_interleaved) {
#pragma unroll
      for (int k = 0; k < Copy::steps; ++k) {
        const ResultVector own(tile, Copy::vector(k));
        if (Copy::has(k) && own.in_range) values[k].load(p, tile.n, own.channel);
      }
    }
#pragma unroll 1
    for (int i = Copy::first(); i < count; i += Copy::at_once) {
      const ResultRow row(tile, i);
      if (!row.in_range) continue;
      if constexpr (!N::output_interleaved) values[0].load(p, tile.n, row.channel);
      typename After::template Tensors<vector> tensors[Copy::steps];
#pragma unroll
      for (int k = 0; k < Copy::steps; ++k) {
        const ResultVector own(tile, Copy::vector(k));
        if (Copy::has(k) && own.in_range) tensors[k].load(operands, row.index + own.index);
      }
#pragma unroll
      for (int k = 0; k < Copy::steps; ++k) {
        const ResultVector own(tile, Copy::vector(k));
        if (!Copy::has(k) || !own.in_range) continue;
        float y[vector], value[vector];
        load(row.place, own, value);
#pragma unroll
        for (int e = 0; e < vector; ++e) {
          const float h = value[e];
          y[e] = After::value(h, values[N::output_interleaved ? k : 0].value[N::output_interleaved ? e : 0],
                              tensors[k], e);
        }
        Packed<Output, vector> packed;
        packed.pack(y);
        packed.store(p.output, row.index + own.index, Aligned);
      }
    }
  }

  __device__ __forceinline__ void store(const Tile& tile) const {
    if (N::output_vector > 1 && are_aligned()) {
      store<true>(tile);
    } else {
      store<false>(tile);
    }
  }
};

}  // namespace onepass
