// How tiles of the row "gemm_boxes" leave: sums become the output, or f32 values for a tail.
#pragma once

#include "gemm/boxes/hold.cuh"
#include "gemm/packed/geometry.cuh"
#include "tail/tail.cuh"

namespace onepass {

namespace boxes {

// Four blocks of eight columns of a product's row lie in four lanes, each with a pair of every block. Gives
// each lane a block of its own: that of its place among the four.
__device__ __forceinline__ void transpose_quad(float (&v)[8], int place) {
#pragma unroll
  for (int b = 0; b < 8; b += 4) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float got = __shfl_xor_sync(0xffffffffu, place & 1 ? v[b + k] : v[b + 2 + k], 1);
      if (place & 1) {
        v[b + k] = got;
      } else {
        v[b + 2 + k] = got;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float got = __shfl_xor_sync(0xffffffffu, place & 2 ? v[k] : v[4 + k], 2);
    if (place & 2) {
      v[k] = got;
    } else {
      v[4 + k] = got;
    }
  }
}

// What a chain's tensors are loaded by: the parameters, and which of them lie on 16 bytes.
struct Operands {
  const void* const* parameter;
  uint64 aligned;
};

// Shared memory that values pass through on their way out.
template <BoxesStored stored, int rows, int columns>
struct Staging {};
template <int rows, int columns>
struct Staging<BoxesStored::sums, rows, columns> {
  alignas(16) float staged[gemm::consumer_warps][columns];
};
template <int rows, int columns>
struct Staging<BoxesStored::channels, rows, columns> {
  // Of each warp: 32 columns, and as many more that pairs of four rows lie in different banks.
  alignas(16) float staged[gemm::consumer_warps][8][40];
};
template <int rows, int columns>
struct Staging<BoxesStored::positions, rows, columns> {
  // Twice eight columns. Four more floats put the columns of four lanes eight banks apart.
  alignas(16) float staged[2][8][rows + 4];
  int2 places[rows];  // sample, and offset there; -1: nowhere
};

}  // namespace boxes

template <class C, class Tail, class Numbers, class Shared>
struct BoxesStore {
  using Parameters = BoxesParameters<Tail::parameters>;
  using Geometry = BoxGeometry<C, Numbers>;
  using Tile = typename Geometry::Tile;
  using Rows = PackedGemmGeometry<C, Numbers>;  // of weights: columns of the product
  using Output = typename Tail::Output;
  using Chain = typename Tail::After;
  using Hold = BoxesHold<C, Tail, Numbers>;
  static constexpr int columns = Numbers::tile_channels;
  static constexpr int sums = columns / 2;
  static constexpr int blocks = columns / 8;
  static constexpr int products = Numbers::products;
  static constexpr int tile_rows = 2 * 64 * products;
  static constexpr bool held = Numbers::held, twice = Numbers::twice;
  // The norm is here: values are held for it, or computed twice.
  static constexpr bool norms = held || twice;
  // The output is written here; else f32 values for a tail.
  static constexpr bool direct = norms || (!Tail::has_norm && !Tail::has_mean);

  const Parameters& p;
  Shared& s;

  // `first`: the warpgroup's first product.
  __device__ __forceinline__ void run(const Tile& tile, int channel_tile, int first,
                                      float (&d)[products][sums]) const {
    if constexpr (norms) {
      Hold::activate(p, tile, channel_tile, d);
      const Hold hold{p, s};
      if (held || p.pass == 0)
        hold.leave_parts(tile, channel_tile, rows_with_outputs(tile, channel_tile, first), d);
      if constexpr (held) {
        hold.await_statistics(tile, channel_tile);
      } else {
        if (p.pass == 0) return;
        hold.load_statistics(tile, channel_tile);
      }
    }
    if constexpr (Numbers::stored == BoxesStored::sums) {
      leave_sums(tile, channel_tile, first, d);
    } else if constexpr (Numbers::stored == BoxesStored::vectors) {
      store_vectors(tile, channel_tile, first, d);
    } else if constexpr (Numbers::stored == BoxesStored::channels) {
      store_channels(tile, channel_tile, first, d);
    } else {
      store_positions(tile, channel_tile, first, d);
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }
  __device__ __forceinline__ int samples() const {
    return static_cast<int>(p.batch) / static_cast<int>(C::groups);
  }
  // Of a lane's row in one half of a product.
  __device__ __forceinline__ typename Geometry::Target target(const Tile& tile, int channel_tile, int product,
                                                              int h) const {
    return Geometry::target(tile, Geometry::place(product, (warp() * 2 + h) * 8 + lane() / 4), samples(),
                            Rows::class_of_tile(channel_tile));
  }
  // The sample that chains know: a group of a sample is one of its own.
  static __device__ __forceinline__ int64 own_sample(int n, int row) {
    return static_cast<int64>(n) * C::groups + Rows::Rows::group(row);
  }

  // A bit for each of the thread's rows.
  __device__ __forceinline__ uint32 rows_with_outputs(const Tile& tile, int channel_tile, int first) const {
    uint32 has = 0;
#pragma unroll
    for (int i = 0; i < products; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        has |= (target(tile, channel_tile, first + i, h).offset >= 0 ? 1u : 0u) << (2 * i + h);
    }
    return has;
  }

  // Sums over the tile's positions of what the chain makes of values, for each channel: a block ends in a
  // mean.
  __device__ __forceinline__ void leave_sums(const Tile& tile, int channel_tile, int first,
                                             float (&d)[products][sums]) const {
    const uint32 has = rows_with_outputs(tile, channel_tile, first);
    const int n = Hold::sample_of(tile, channel_tile);
    gemm::consumers_sync();  // the tile's before are read
#pragma unroll
    for (int j = 0; j < blocks * 2; ++j) {
      const int column = Hold::column_of(j);
      const int channel = Hold::channel_of(channel_tile, column);
      const int own = channel - Hold::own_tile(channel_tile) * columns;
      const float2 line = affine(own, channel_tile * columns + own);
      ChannelValues<Chain, 1> values;
      values.load(p, n, channel);
      typename Chain::template Tensors<1> none;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float v =
              Chain::value(with_line(d[i][j / 2 * 4 + h * 2 + j % 2], line), values.value[0], none, 0);
          sum += has >> (2 * i + h) & 1u ? v : 0.0f;
        }
      }
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (lane() < 4) s.staged[threadIdx.x / 32][column] = sum;
      if (j % 4 == 3) asm volatile("" ::: "memory");  // of all columns at once values are spilled
    }
    gemm::consumers_sync();
    const int column = static_cast<int>(threadIdx.x);
    const int channel = Hold::own_tile(channel_tile) * columns + column;
    if (column >= columns || channel >= static_cast<int>(C::channels)) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < gemm::consumer_warps; ++w) sum += s.staged[w][column];
    const int of_row = Hold::box_of(tile) * Hold::classes + Rows::class_of_tile(channel_tile);
    p.sums[(static_cast<int64>(n) * C::channels + channel) * Numbers::sums_of_row + of_row] = sum;
  }

  // What a column's sums are multiplied by, and what is added: by the norm where values are held for it, else
  // by the convolution.
  __device__ __forceinline__ float2 affine(int column, int row) const {
    if constexpr (norms) return Hold{p, s}.affine(column, Rows::channel(row));
    const float bias = C::has_bias ? load_one<typename C::Bias>(p.parameter[1], Rows::channel(row)) : 0.0f;
    return {Numbers::guards ? __ldg(p.scales + row) : 1.0f, bias};
  }

  // Each lane gets eight neighbouring channels of its rows, four lanes 32 of them.
  __device__ __forceinline__ void store_vectors(const Tile& tile, int channel_tile, int first,
                                                float (&d)[products][sums]) const {
    const boxes::Operands operands{p.parameter, aligned_bits()};
    int n[products][2], offset[products][2];
#pragma unroll
    for (int i = 0; i < products; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const typename Geometry::Target own = target(tile, channel_tile, first + i, h);
        n[i][h] = own.n;
        offset[i][h] = own.offset;
      }
    }
#pragma unroll
    for (int j = 0; j < blocks; j += 4) {
      const int column = (j + lane() % 4) * 8;
      const int row = channel_tile * columns + column;
      const bool exists = column < columns && Rows::exists(row);
      const int own = exists ? row : channel_tile * columns;
      const int channel = Rows::channel_of(Rows::Rows::in_group(own));
      float scale[8], bias[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float2 line = affine(exists ? column + k : k, own + k);
        scale[k] = line.x;
        bias[k] = line.y;
      }
      const int64 of_row = Rows::value_offset(own);
      const auto index = [&](int i, int h) {
        return static_cast<int64>(n[i][h]) * Numbers::value_stride_n + offset[i][h] + of_row;
      };
      // All rows' at once: one after the other each would be waited for.
      typename Chain::template Tensors<8> tensors[products][2];
      if constexpr (direct) {
        const auto load = [&](const auto& from) {
#pragma unroll
          for (int i = 0; i < products; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
              if (exists && offset[i][h] >= 0) tensors[i][h].load(from, index(i, h));
          }
        };
        if (operands.aligned == aligned_tensors()) {
          load(AlignedOperands{p.parameter});
        } else {
          load(operands);
        }
      }
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float v[8];
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            v[2 * b] = j + b < blocks ? d[i][(j + b) * 4 + h * 2] : 0.0f;
            v[2 * b + 1] = j + b < blocks ? d[i][(j + b) * 4 + h * 2 + 1] : 0.0f;
          }
          boxes::transpose_quad(v, lane() % 4);
          if (!exists || offset[i][h] < 0) continue;
#pragma unroll
          for (int k = 0; k < 8; ++k) v[k] = with_line(v[k], {scale[k], bias[k]});
          store_eight(v, tensors[i][h], own_sample(n[i][h], own), channel, index(i, h), operands);
        }
      }
    }
  }

  static __device__ __forceinline__ float with_line(float v, float2 line) {
    return norms || Numbers::guards ? fmaf(v, line.x, line.y) : v + line.y;
  }

  __device__ __forceinline__ void store_eight(float (&v)[8],
                                              const typename Chain::template Tensors<8>& tensors, int64 n,
                                              int channel, int64 index,
                                              const boxes::Operands& operands) const {
    if constexpr (direct) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        ChannelValues<Chain, 1> values;
        values.load(p, n, channel + k);
        v[k] = Chain::value(v[k], values.value[0], tensors, k);
      }
      Packed<Output, 8> packed;
      packed.pack(v);
      packed.store(p.output, index, is_aligned(operands, aligned_output));
    } else {
      auto* const to = reinterpret_cast<float4*>(p.values + index);
      to[0] = float4{v[0], v[1], v[2], v[3]};
      to[1] = float4{v[4], v[5], v[6], v[7]};
    }
  }

  // A column of a lane: a channel of one class.
  struct Column {
    int row;
    bool exists;
    float2 line;
    int64 offset;  // in a sample
  };
  __device__ __forceinline__ Column column_of(int channel_tile, int column) const {
    const int row = channel_tile * columns + column;
    const bool exists = column < columns && Rows::exists(row);
    const int own = exists ? row : channel_tile * columns;
    return {own, exists, affine(exists ? column : 0, own), Rows::value_offset(own)};
  }
  __device__ __forceinline__ void load_values(ChannelValues<Chain, 1>& values, int n, int row) const {
    if constexpr (direct) values.load(p, own_sample(n, row), Rows::channel_of(Rows::Rows::in_group(row)));
  }
  __device__ __forceinline__ void store_one_value(float v, const Column& own, int n, int offset,
                                                  const ChannelValues<Chain, 1>& values) const {
    const int64 index = static_cast<int64>(n) * Numbers::value_stride_n + offset + own.offset;
    v = with_line(v, own.line);
    if constexpr (direct) {
      typename Chain::template Tensors<1> tensors;
      tensors.load(boxes::Operands{p.parameter, 0}, index);
      store_one<Output>(p.output, index, Chain::value(v, values.value[0], tensors, 0));
    } else {
      p.values[index] = v;
    }
  }

  // Channels are neighbours that make no vectors: a lane has a channel, and a warp 32 of a position.
  __device__ __forceinline__ void store_channels(const Tile& tile, int channel_tile, int first,
                                                 float (&d)[products][sums]) const {
    float(&staged)[8][40] = s.staged[threadIdx.x / 32];
#pragma unroll
    for (int j = 0; j < blocks; j += 4) {
      const Column own = column_of(channel_tile, j * 8 + lane());
      ChannelValues<Chain, 1> values;
      if (Numbers::box_n == 1) load_values(values, tile.n, own.row);
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const typename Geometry::Target at = target(tile, channel_tile, first + i, h);
          __syncwarp();
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            if (j + b < blocks)
              *reinterpret_cast<float2*>(&staged[lane() / 4][8 * b + 2 * (lane() % 4)]) =
                  float2{d[i][(j + b) * 4 + h * 2], d[i][(j + b) * 4 + h * 2 + 1]};
          }
          __syncwarp();
#pragma unroll 2
          for (int r = 0; r < 8; ++r) {
            const int n = __shfl_sync(0xffffffffu, at.n, 4 * r);
            const int offset = __shfl_sync(0xffffffffu, at.offset, 4 * r);
            if (!own.exists || offset < 0) continue;
            if (Numbers::box_n > 1) load_values(values, n, own.row);
            store_one_value(staged[r][lane()], own, n, offset, values);
          }
        }
      }
    }
  }

  // Positions are neighbours: eight columns at a time pass through shared memory, and a warp writes a
  // column's positions of the whole tile. Columns that are classes of neighbouring positions go together.
  __device__ __forceinline__ void store_positions(const Tile& tile, int channel_tile, int first,
                                                  float (&d)[products][sums]) const {
    constexpr int together =
        !Rows::apart && !Rows::by_class && 8 % C::classes(2) == 0 ? static_cast<int>(C::classes(2)) : 1;
    gemm::consumers_sync();  // the tile's before is written
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < tile_rows) {
      const typename Geometry::Target at = Geometry::target(tile, Geometry::place(thread / 64, thread % 64),
                                                            samples(), Rows::class_of_tile(channel_tile));
      s.places[thread] = int2{at.n, at.offset};
    }
    const int all_warps = thread / 32;
    const int column = all_warps / together * together + lane() % together;
    const int first_row = (all_warps % together * tile_rows + lane()) / together;
#pragma unroll
    for (int j = 0; j < blocks; ++j) {
      float(&staged)[8][tile_rows + 4] = s.staged[j % 2];
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = (first + i) * 64 + (warp() * 2 + h) * 8 + lane() / 4;
          staged[2 * (lane() % 4)][r] = d[i][j * 4 + h * 2];
          staged[2 * (lane() % 4) + 1][r] = d[i][j * 4 + h * 2 + 1];
        }
      }
      gemm::consumers_sync();
      const Column own = column_of(channel_tile, j * 8 + column);
      ChannelValues<Chain, 1> values;
      if (Numbers::box_n == 1) load_values(values, tile.n, own.row);
      if (own.exists) {
#pragma unroll 4
        for (int k = 0; k < tile_rows / 32; ++k) {
          const int r = first_row + k * (32 / together);
          const int2 place = s.places[r];
          if (place.y < 0) continue;
          if (Numbers::box_n > 1) load_values(values, place.x, own.row);
          store_one_value(staged[column][r], own, place.x, place.y, values);
        }
      }
    }
  }

  // All bits of aligned_bits.
  static constexpr __device__ uint64 aligned_tensors() {
    uint64 bits = uint64{1} << aligned_output;
    for (int i = 0; i < Tail::parameters && i < aligned_gradient - aligned_parameter; ++i)
      bits |= uint64{1} << (aligned_parameter + i);
    return bits;
  }
  // Which tensors lie on 16 bytes (AlignedBit).
  __device__ __forceinline__ uint64 aligned_bits() const {
    uint64 bits = static_cast<uint64>(reinterpret_cast<uint64>(p.output) % 16 == 0) << aligned_output;
#pragma unroll
    for (int i = 0; i < Tail::parameters && i < aligned_gradient - aligned_parameter; ++i) {
      bits |= static_cast<uint64>(reinterpret_cast<uint64>(p.parameter[i]) % 16 == 0)
              << (aligned_parameter + i);
    }
    return bits;
  }
};

}  // namespace onepass
