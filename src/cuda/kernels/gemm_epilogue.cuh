// What becomes of a tile's sums, for gemm.cuh: chains, moments, the norm, the output.
#pragma once

#include "gemm_staging.cuh"

namespace onepass {

// The columns of a thread: every fourth pair. Column i is i / 2 * 8 + i % 2 after the first. `offsets`: where
// columns of the tile lie in a channel.
template <class Geometry, int Columns, bool contiguous = Geometry::contiguous>
struct GemmColumns {
  const int* own;
  uint32 inside[(Columns + 31) / 32] = {};  // a bit for each that has an output

  __device__ __forceinline__ GemmColumns(const int* offsets, int, int column) : own(offsets + column) {
#pragma unroll
    for (int i = 0; i < Columns; i += 2) {
      const int2 pair = *reinterpret_cast<const int2*>(own + i / 2 * 8);
      inside[i / 32] |= (static_cast<uint32>(pair.x >= 0) | static_cast<uint32>(pair.y >= 0) << 1)
                        << (i % 32);
    }
  }
  __device__ __forceinline__ bool has(int i) const { return inside[i / 32] >> (i % 32) & 1u; }
  // Only of a column that has an output.
  __device__ __forceinline__ int offset(int i) const { return own[i / 2 * 8 + i % 2]; }
  __device__ __forceinline__ int count() const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < (Columns + 31) / 32; ++i) sum += __popc(inside[i]);
    return sum;
  }
};
template <class Geometry, int Columns>
struct GemmColumns<Geometry, Columns, true> {
  int first;
  int left;

  __device__ __forceinline__ GemmColumns(const int*, int tile_position, int column)
      : first(tile_position + column), left(Geometry::positions - first) {}
  __device__ __forceinline__ bool has(int i) const { return left > i / 2 * 8 + i % 2; }
  __device__ __forceinline__ int offset(int i) const { return first + i / 2 * 8 + i % 2; }
  __device__ __forceinline__ int count() const {
    const int whole = left <= 0 ? 0 : left / 8 * 2 + (left % 8 < 2 ? left % 8 : 2);
    return whole < Columns ? whole : Columns;
  }
};

// The slabs of a norm, of which each tile that has channels of one leaves a part.
template <class C, class Tail, class Numbers>
struct GemmSlabs {
  using Parameters = GemmParameters<Tail::parameters>;
  using Output = typename Tail::Output;
  static constexpr int group_rows = Tail::group_channels * GemmGeometry<C, Numbers>::classes;
  static constexpr int slabs_of_sample = Tail::channels / Tail::group_channels;
  // Channel tiles a slab may have channels in.
  static constexpr int spans = (group_rows - 1) / Numbers::tile_channels + 2;
  static constexpr bool one_span = Numbers::tile_channels % group_rows == 0;
  static constexpr int agents = Numbers::apart ? 2 : 1;  // that leave parts of a tile
  static constexpr int position_parts = Numbers::position_tiles * agents;

  const Parameters& p;

  // Where values are stored: a warp for each slab, after all tiles.
  __device__ __forceinline__ void run() const {
    const int64 own = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (own >= p.batch * slabs_of_sample) return;
    const int64 n = own / slabs_of_sample;
    finish(n, static_cast<int>(own - n * slabs_of_sample));
  }

  static __device__ __forceinline__ void merge(Moments& own, const float4& other) {
    if (other.x > 0.0f) own.merge(other.x, other.y, other.z);
  }
  __device__ __forceinline__ float4* part(int64 n, int slab, int channel_tile, int position) const {
    const int span = one_span ? 0 : channel_tile - slab * group_rows / Numbers::tile_channels;
    return p.parts + ((n * slabs_of_sample + slab) * (one_span ? 1 : spans) + span) * position_parts +
           position;
  }

  // By one warp: mean and 1 / deviation of a slab from all its parts.
  __device__ __forceinline__ float2 statistics(int64 n, int slab) const {
    const int first_tile = slab * group_rows / Numbers::tile_channels;
    const int last_tile = ((slab + 1) * group_rows - 1) / Numbers::tile_channels;
    const int count = (last_tile - first_tile + 1) * position_parts;
    const float4* parts = part(n, slab, first_tile, 0);
    constexpr float elements = static_cast<float>(Tail::group_channels * Tail::spatial);
    constexpr int of_lane = ((one_span ? 1 : spans) * position_parts + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float mean, m2;
    if constexpr (of_lane <= 8) {
      // All at once, the mean first: blocks wait for this.
      float4 own[of_lane];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < of_lane; ++i)
        own[i] = lane + 32 * i < count ? __ldcg(parts + lane + 32 * i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < of_lane; ++i) sum = fmaf(own[i].x, own[i].y, sum);
      mean = lanes_sum<32>(sum) / elements;
      m2 = 0.0f;
#pragma unroll
      for (int i = 0; i < of_lane; ++i) {
        const float distance = own[i].y - mean;
        m2 += fmaf(own[i].x * distance, distance, own[i].z);
      }
      m2 = lanes_sum<32>(m2);
    } else {
      Moments own;
#pragma unroll 4
      for (int i = lane; i < count; i += 32) merge(own, __ldcg(parts + i));
      team_moments<32, gemm::consumer_threads>(own, elements, nullptr, mean, m2);
    }
    return {mean, 1.0f / sqrtf(m2 / elements + Tail::eps)};
  }

  // By one warp: the slab's statistics, and what is known then.
  __device__ __forceinline__ void finish(int64 n, int slab) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float2 statistics = this->statistics(n, slab);
    float* to = p.statistics + 2 * (n * slabs_of_sample + slab);
    if (lane == 0) {
      to[0] = statistics.x;
      to[1] = statistics.y;
    }
    for (int i = lane; i < Tail::group_channels; i += 32) {
      const int c = slab * Tail::group_channels + i;
      const float scale = Tail::weight(p, c) * statistics.y;
      if constexpr (Numbers::guards) gemm::judge<Tail, Numbers>(p, n, fabsf(scale));
      if constexpr (Tail::mean_follows_norm) {
        const float mean = row_sum(n * Tail::channels + c) / static_cast<float>(Tail::spatial);
        store_one<Output>(p.output, n * Tail::channels + c,
                          fmaf(mean - statistics.x, scale, Tail::bias(p, c)));
      }
    }
  }

  __device__ __forceinline__ float row_sum(int64 row) const {
    double total = 0.0;
    for (int i = 0; i < Numbers::position_tiles; ++i)
      total += static_cast<double>(__ldcg(p.sums + row * Numbers::position_tiles + i));
    return static_cast<float>(total);
  }
};

// What becomes of a tile's sums. A thread has two rows, and of each every fourth pair of columns.
template <class C, class Tail, class Numbers>
struct GemmEpilogue {
  using Parameters = GemmParameters<Tail::parameters>;
  using Geometry = GemmGeometry<C, Numbers>;
  using Shared = GemmShared<C, Tail, Numbers>;
  using Item = GemmItem<Tail, Numbers>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Output = typename Tail::Output;
  using Staging = GemmStaging<C, Tail, Numbers>;
  static constexpr int sums = Numbers::columns / 2;
  static constexpr int pairs = Numbers::columns / 8;  // of columns, in each row of a thread
  using Columns = GemmColumns<Geometry, 2 * pairs>;
  static constexpr int classes = Geometry::classes;
  static constexpr int rows = Geometry::rows;
  using Slabs = GemmSlabs<C, Tail, Numbers>;
  static constexpr int group_rows = Slabs::group_rows;
  static constexpr int slabs_of_sample = Slabs::slabs_of_sample;

  const Parameters& p;
  Shared& s;
  const Slabs slabs{p};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = warp / 4;

  // Where the warpgroups have their own positions, each goes its own way: what they merge is an agent's.
  static constexpr bool apart = Numbers::apart;
  static constexpr int agent_threads = apart ? 128 : gemm::consumer_threads;
  static constexpr int agent_warps = agent_threads / 32;
  static constexpr int agents = Slabs::agents;
  static constexpr uint32 unit_parts = Item::unit_tiles * agents;
  const int agent = apart ? group : 0;
  const int agent_thread = static_cast<int>(threadIdx.x) % agent_threads;
  const int agent_warp = warp % agent_warps;
  __device__ __forceinline__ void sync() const {
    if constexpr (apart) {
      gemm::group_sync(group);
    } else {
      gemm::consumers_sync();
    }
  }
  __device__ __forceinline__ int position_part(const Item& item) const {
    return item.position_tile * agents + agent;
  }

  __device__ __forceinline__ int row(int h) const {
    return (Numbers::groups_share_positions ? group * 64 : 0) + warp % 4 * 16 + lane / 4 + 8 * h;
  }
  // Of the tile's positions, the first that this warpgroup has.
  __device__ __forceinline__ int first_column() const {
    return Numbers::groups_share_positions ? 0 : group * Numbers::columns;
  }
  static __device__ __forceinline__ int tile_position(const Item& item) {
    return item.position_tile * Numbers::tile_positions;
  }
  static __device__ __forceinline__ int first_slab(const Item& item) {
    return item.channel_tile * Numbers::tile_channels / group_rows;
  }
  // The slabs that this tile has channels of.
  static __device__ __forceinline__ int slab_count(const Item& item) {
    const int end = (item.channel_tile + 1) * Numbers::tile_channels;
    const int last = ((end < rows ? end : rows) - 1) / group_rows;
    return last - first_slab(item) + 1;
  }

  // Scale and bias, then the chain before the norm, in place.
  __device__ __forceinline__ void activate(const Item& item, const Columns& columns, float (&d)[sums]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      const int own = c < rows ? c : 0;
      const int channel = own / classes;
      const float scale = Numbers::guards ? __ldg(p.scales + own) : 1.0f;
      float bias = 0.0f;
      if constexpr (C::has_bias) bias = load_one<typename C::Bias>(p.parameter[1], channel);
      ChannelValues<Before, 1> values;
      values.load(p, item.n, channel);
      const int64 begin = item.n * C::stride(0) + Geometry::row_offset(own);
#pragma unroll
      for (int i = 0; i < 2 * pairs; ++i) {
        float& value = d[i / 2 * 4 + h * 2 + i % 2];
        typename Before::template Tensors<1> tensors;
        if constexpr (Numbers::before_reads_tensors) {
          if (columns.has(i)) tensors.load(p, begin + columns.offset(i));
        }
        if constexpr (Numbers::guards) {
          value = fmaf(value, scale, bias);
        } else if constexpr (C::has_bias) {
          value += bias;
        }
        value = Before::value(value, values.value[0], tensors, 0);
      }
    }
  }

  // Four neighbouring columns lie side by side in the output, at offsets that are multiples of four.
  static constexpr bool vectors_fit =
      Geometry::contiguous && Tail::spatial % 4 == 0 && C::stride(1) % 4 == 0 && C::stride(0) % 4 == 0;
  static constexpr bool channels_last = C::stride(1) == 1 && C::stride(4) != 1;

  // The tile's values to memory: eight rows by 32 columns at a time through shared memory, so that a warp
  // writes whole lines. `again`: they are read again soon.
  template <class Type, bool again>
  __device__ __forceinline__ void store(void* to, const Item& item, const float (&d)[sums]) const {
    if constexpr (Type::bytes == 2 && vectors_fit) {
      store_halves<Type>(to, item, d);
      return;
    }
    float(&stage)[8][Shared::value_pitch] = s.stage(warp);
    int in_vectors = vectors_fit && reinterpret_cast<uint64>(to) % (4 * Type::bytes) == 0;
    const int first_row = item.channel_tile * Numbers::tile_channels + row(0) - lane / 4;
    const int first_position = tile_position(item) + first_column();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = first_row + 8 * h;
      const int64 begin = item.n * C::stride(0) + Geometry::row_offset(channel);
#pragma unroll
      for (int j = 0; j < pairs; j += 4) {
        constexpr int all = 32;
        const int columns = (pairs - j) * 8 < all ? (pairs - j) * 8 : all;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < columns / 8; ++k) {
          *reinterpret_cast<float2*>(&stage[lane / 4][8 * k + 2 * (lane % 4)]) =
              float2{d[(j + k) * 4 + h * 2], d[(j + k) * 4 + h * 2 + 1]};
        }
        __syncwarp();
        // Asked again each time: two loops would keep all values of both in registers.
        asm volatile("" : "+r"(in_vectors));
        if (vectors_fit && in_vectors) {
          const int column = lane % 8 * 4;
          const int position = first_position + j * 8 + column;
          const bool has = position < Geometry::positions && column < columns;
#pragma unroll
          for (int r = lane / 8; r < 8; r += 4) {
            const float4 four = *reinterpret_cast<const float4*>(&stage[r][column]);
            if (has && exists(channel + r)) {
              const float value[4] = {four.x, four.y, four.z, four.w};
              Packed<Type, 4> packed;
              packed.pack(value);
              put<Type, again>(to, begin + r * C::stride(1) + position, packed);
            }
          }
        } else {
          store_ones<Type>(to, channel, begin, first_position, j);
        }
      }
    }
  }
  // --- Values that leave beside products ---
  // A warp has all columns of its 16 rows. When a tile of 16-bit values ends, the first vectors of each row,
  // as many as there is room for, stay in shared memory and the others in registers. They go to memory 32 at
  // a time while the next tile is multiplied, those of registers through shared memory when it is free.
  static constexpr int late_vectors = Numbers::late_vectors;
  static constexpr int kept_vectors = late_vectors > 0 ? pairs - late_vectors : 0;
  static constexpr int late_steps = late_vectors / 2;  // 16 rows by 32 lanes
  static constexpr int all_steps = late_steps + (kept_vectors + 1) / 2;
  static_assert(late_vectors % 2 == 0 && kept_vectors <= late_vectors);

  struct Leaving {
    unsigned char* to = nullptr;  // of the first row
    int bytes = 0;                // of a row that has outputs
    int rows = 0;                 // that exist
    int step = all_steps;
    uint32 kept[2 * kept_vectors + 1];
  };

  __device__ __forceinline__ bool leaves_late() const {
    return late_vectors > 0 && reinterpret_cast<uint64>(p.output) % 16 == 0;
  }

  // By a warp: step `i` of a part of the rows, `vectors` of each.
  template <int vectors>
  __device__ __forceinline__ void put_vectors(const Leaving& leaving, int i) const {
    const int v = i * 32 + lane;
    const int r = v / vectors;
    const int column = (v - r * vectors) * 16;
    if (r < leaving.rows && column < leaving.bytes && (vectors % 2 == 0 || r < 16)) {
      const uint4 vector = *reinterpret_cast<const uint4*>(s.values[warp] + r * Numbers::late_pitch + column);
      __stcs(reinterpret_cast<uint4*>(leaving.to + r * (C::stride(1) * Output::bytes) + column), vector);
    }
  }
  // By a warp: the next step.
  __device__ __forceinline__ void put_some(Leaving& leaving) const {
    if (leaving.step >= all_steps) return;
    if (leaving.step < late_steps) {
      put_vectors<late_vectors>(leaving, leaving.step);
    } else if constexpr (kept_vectors > 0) {
      if (leaving.step == late_steps) {
        __syncwarp();
        put_words<kept_vectors>([&](int j, int h) { return leaving.kept[2 * j + h]; });
        leaving.to += late_vectors * 16;
        leaving.bytes -= late_vectors * 16;
      }
      put_vectors<kept_vectors>(leaving, leaving.step - late_steps);
    }
    ++leaving.step;
  }
  // By a warp: what lies in shared memory may be overwritten.
  __device__ __forceinline__ void put_rest(Leaving& leaving) const {
#pragma unroll 1
    while (leaving.step < all_steps) put_some(leaving);
    __syncwarp();
  }

  // `vectors` of the warp's rows to shared memory. `word(j, h)`: two neighbours of vector j in the thread's
  // row h.
  template <int vectors, class Word>
  __device__ __forceinline__ void put_words(Word&& word) const {
    // Rows begin in different banks if the vectors of a row are odd in number; if only their half is, the
    // last four rows take two vectors the other way round.
    constexpr int row_vectors = Numbers::late_pitch / 16;
    constexpr bool in_turn = row_vectors % 2 == 0;
    static_assert(row_vectors % 4 != 0);
    const int late = in_turn ? lane / 16 : 0;
    unsigned char* const own = s.values[warp] + lane / 4 * Numbers::late_pitch + lane % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < vectors; j += in_turn ? 2 : 1) {
        unsigned char* const place = own + h * 8 * Numbers::late_pitch + j * 16;
        const uint32 first = word(j, h);
        if (in_turn && j + 1 < vectors) {
          const uint32 second = word(j + 1, h);
          *reinterpret_cast<uint32*>(place + late * 16) = late ? second : first;
          *reinterpret_cast<uint32*>(place + 16 - late * 16) = late ? first : second;
        } else {
          *reinterpret_cast<uint32*>(place) = first;
        }
      }
    }
    __syncwarp();
  }

  // The tile's values, for later.
  __device__ __forceinline__ void keep(const Item& item, const float (&d)[sums], Leaving& leaving) const {
    const int first_row = item.channel_tile * Numbers::tile_channels + row(0) - lane / 4;
    const int first_position = tile_position(item) + first_column();
    leaving.to = static_cast<unsigned char*>(p.output) +
                 (item.n * C::stride(0) + first_row * C::stride(1) + first_position) * Output::bytes;
    leaving.bytes = (Geometry::positions - first_position) * Output::bytes;
    leaving.rows = rows - first_row;
    leaving.step = 0;
    const auto word = [&](int j, int h) { return Output::pack(d[j * 4 + h * 2], d[j * 4 + h * 2 + 1]); };
    put_words<late_vectors>(word);
#pragma unroll
    for (int j = 0; j < kept_vectors; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) leaving.kept[2 * j + h] = word(late_vectors + j, h);
    }
  }

  // The same of 16-bit elements that lie side by side: 64 columns at a time.
  template <class Type>
  __device__ __forceinline__ void store_halves(void* to, const Item& item, const float (&d)[sums]) const {
    constexpr bool by_eights = Tail::spatial % 8 == 0 && C::stride(1) % 8 == 0 && C::stride(0) % 8 == 0;
    constexpr int width = by_eights ? 8 : 4;  // of a lane's vector
    constexpr int lanes = 64 / width;         // that have a row
    constexpr int pitch = 64 + 8;             // words of eight rows lie in different banks
    static_assert(Shared::value_bytes >= 8 * pitch * 2);
    auto* const stage = reinterpret_cast<uint16*>(s.values[warp]);
    int in_vectors = reinterpret_cast<uint64>(to) % (width * 2) == 0;
    const int first_row = item.channel_tile * Numbers::tile_channels + row(0) - lane / 4;
    const int first_position = tile_position(item) + first_column();
    const int column = lane % lanes * width;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int channel = first_row + 8 * h;
      const int64 begin = item.n * C::stride(0) + Geometry::row_offset(channel);
#pragma unroll
      for (int j = 0; j < pairs; j += 8) {
        asm volatile("" : "+r"(in_vectors));
        if (in_vectors) {
          __syncwarp();
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            if (j + k >= pairs) break;
            *reinterpret_cast<uint32*>(stage + lane / 4 * pitch + 8 * k + 2 * (lane % 4)) =
                Type::pack(d[(j + k) * 4 + h * 2], d[(j + k) * 4 + h * 2 + 1]);
          }
          __syncwarp();
          const int position = first_position + j * 8 + column;
          const bool has = position < Geometry::positions && j * 8 + column < Numbers::columns;
#pragma unroll
          for (int r = 0; r < 8; r += 32 / lanes) {
            const int own = r + lane / lanes;
            Packed<Type, width> some;
            some.load(stage + own * pitch, column, true);
            if (has && exists(channel + own)) some.store(to, begin + own * C::stride(1) + position, true);
          }
        } else {
#pragma unroll
          for (int i = j; i < j + 8; i += 4) {
            if (i >= pairs) break;
            __syncwarp();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (i + k >= pairs) break;
              *reinterpret_cast<float2*>(&s.stage(warp)[lane / 4][8 * k + 2 * (lane % 4)]) =
                  float2{d[(i + k) * 4 + h * 2], d[(i + k) * 4 + h * 2 + 1]};
            }
            __syncwarp();
            store_ones<Type>(to, channel, begin, first_position, i);
          }
        }
      }
    }
  }
  // What lies in shared memory, one by one. A lane has a column; where channels are neighbours a row; where
  // classes are, those of a column.
  template <class Type>
  __device__ __forceinline__ void store_ones(void* to, int channel, int64 begin, int first_position,
                                             int j) const {
    const int columns = (pairs - j) * 8 < 32 ? (pairs - j) * 8 : 32;
    constexpr int side_by_side = 8 % C::classes(2) == 0 ? static_cast<int>(C::classes(2)) : 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int of_rows = (i * 32 + lane) % (32 * side_by_side);
      const int column = channels_last ? lane / 8 + 4 * i : of_rows / side_by_side;
      const int r = channels_last ? lane % 8 : i / side_by_side * side_by_side + of_rows % side_by_side;
      int offset;
      if constexpr (Geometry::contiguous) {
        offset = first_position + j * 8 + column;
        if (offset >= Geometry::positions) offset = -1;
      } else {
        offset = column < columns ? s.offsets[first_column() + j * 8 + column] : -1;
      }
      const float value = s.stage(warp)[r][column];
      if (offset >= 0 && column < columns && exists(channel + r))
        store_one<Type>(to, first_of(channel, begin, r) + offset, value);
    }
  }
  // Where the r-th row after one that begins at `begin` does.
  static __device__ __forceinline__ int64 first_of(int row, int64 begin, int r) {
    if constexpr (classes == 1) return begin + r * C::stride(1);
    return begin - Geometry::row_offset(row) + Geometry::row_offset(row + r);
  }
  static __device__ __forceinline__ bool exists(int row) {
    return rows % Numbers::tile_channels == 0 || row < rows;
  }
  template <class Type, bool again>
  static __device__ __forceinline__ void put(void* to, int64 index, const Packed<Type, 4>& four) {
    if constexpr (again) {
      __stcg(reinterpret_cast<uint4*>(static_cast<float*>(to) + index),
             uint4{four.word[0], four.word[1], four.word[2], four.word[3]});
    } else {
      four.store(to, index, true);
    }
  }

  // --- Moments ---
  // Of the tile's rows, left in shared memory; every consumer, and a barrier follows.
  __device__ __forceinline__ void row_moments(const Columns& columns, const float (&d)[sums]) const {
    const int count = columns.count();
    const float own_count = static_cast<float>(count);
    const float quad_count = lanes_sum<4>(own_count);
    const float per_count = count > 0 ? 1.0f / own_count : 0.0f;
    const bool all = __all_sync(0xffffffffu, count == 2 * pairs);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Moments own{own_count, 0.0f, 0.0f};
      if (all) {
        moments<true>(d, h, columns, per_count, own);
      } else {
        moments<false>(d, h, columns, per_count, own);
      }
      float mean, m2;
      team_moments<4, gemm::consumer_threads>(own, quad_count, nullptr, mean, m2);
      if (lane % 4 == 0) s.rows(group, warp % 4 * 16 + lane / 4 + 8 * h) = float4{quad_count, mean, m2, 0.0f};
    }
  }

  template <bool all>
  static __device__ __forceinline__ void moments(const float (&d)[sums], int h, const Columns& columns,
                                                 float per_count, Moments& own) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) {
      const float value = d[i / 2 * 4 + h * 2 + i % 2];
      sum[i % 4] += all || columns.has(i) ? value : 0.0f;
    }
    own.mean = ((sum[0] + sum[1]) + (sum[2] + sum[3])) * per_count;
    float m2[4] = {};
#pragma unroll
    for (int i = 0; i < 2 * pairs; ++i) {
      const float distance = d[i / 2 * 4 + h * 2 + i % 2] - own.mean;
      const float counted = all || columns.has(i) ? distance : 0.0f;
      m2[i % 4] = fmaf(counted, counted, m2[i % 4]);
    }
    own.m2 = (m2[0] + m2[1]) + (m2[2] + m2[3]);
  }

  // Where the rows of a warp are whole slabs, and no other warp has positions of them, it leaves their parts.
  static constexpr bool rows_are_slabs = Numbers::rows_are_slabs;
  __device__ __forceinline__ void leave_parts(const Item& item, const Columns& columns,
                                              const float (&d)[sums]) const {
    const int count = columns.count();
    if (__all_sync(0xffffffffu, count == 2 * pairs)) {
      leave_parts<true>(item, columns, count, d);
    } else {
      leave_parts<false>(item, columns, count, d);
    }
  }
  template <bool all>
  __device__ __forceinline__ void leave_parts(const Item& item, const Columns& columns, int count,
                                              const float (&d)[sums]) const {
    constexpr int sets = group_rows == 16 ? 1 : 2;  // of the thread's two rows
    constexpr int lanes = group_rows == 16 ? 32 : 4 * group_rows;
    const float elements = lanes_sum<lanes>(static_cast<float>((3 - sets) * count));
#pragma unroll
    for (int h = 0; h < sets; ++h) {
      const auto sum_of = [&](auto&& term) {
        float sum[8] = {};
#pragma unroll
        for (int i = 0; i < 2 * pairs; ++i) {
#pragma unroll
          for (int k = h; k < h + 3 - sets; ++k) {
            if (all || columns.has(i)) term(d[i / 2 * 4 + k * 2 + i % 2], sum[i % 4 + 4 * (k - h)]);
          }
        }
        return lanes_sum<lanes>(((sum[0] + sum[1]) + (sum[2] + sum[3])) +
                                ((sum[4] + sum[5]) + (sum[6] + sum[7])));
      };
      const float total = sum_of([](float value, float& sum) { sum += value; });
      const float mean = elements > 0.0f ? total / elements : 0.0f;
      const float m2 = sum_of([&](float value, float& sum) {
        const float distance = value - mean;
        sum = fmaf(distance, distance, sum);
      });
      const int first = item.channel_tile * Numbers::tile_channels + row(h);
      if (lane % lanes == 0 && exists(first))
        __stcg(slabs.part(item.n, first / group_rows, item.channel_tile, position_part(item)),
               float4{elements, mean, m2, 0.0f});
    }
  }

  // A warp for each slab of the tile: its rows here become one part.
  __device__ __forceinline__ void store_parts(const Item& item) const {
    const int begin = item.channel_tile * Numbers::tile_channels;
    const int count = slab_count(item);
    for (int i = agent_warp; i < count; i += agent_warps) {
      const int slab = first_slab(item) + i;
      int first = slab * group_rows - begin;
      int last = first + group_rows;
      first = first < 0 ? 0 : first;
      last = last < Numbers::tile_channels ? last : Numbers::tile_channels;
      Moments own;
      if constexpr (apart) {
        for (int r = first + lane; r < last; r += 32) slabs.merge(own, s.rows(group, r));
      } else if constexpr (Numbers::groups_share_positions) {
        for (int r = first + lane; r < last; r += 32) slabs.merge(own, s.rows(r / 64, r % 64));
      } else {
        for (int r = 2 * first + lane; r < 2 * last; r += 32) slabs.merge(own, s.rows(r % 2, r / 2));
      }
      const float elements = lanes_sum<32>(own.count);
      float mean, m2;
      team_moments<32, gemm::consumer_threads>(own, elements, nullptr, mean, m2);
      if (lane == 0)
        __stcg(slabs.part(item.n, slab, item.channel_tile, position_part(item)),
               float4{elements, mean, m2, 0.0f});
    }
    if constexpr (Tail::mean_follows_norm) {
      // The means of channels are wanted too.
      for (int r = static_cast<int>(threadIdx.x); r < Numbers::tile_channels; r += gemm::consumer_threads) {
        if (begin + r >= Tail::channels) break;
        float sum;
        if constexpr (Numbers::groups_share_positions) {
          sum = s.rows(r / 64, r % 64).x * s.rows(r / 64, r % 64).y;
        } else {
          sum = s.rows(0, r).x * s.rows(0, r).y + s.rows(1, r).x * s.rows(1, r).y;
        }
        p.sums[(item.n * Tail::channels + begin + r) * Numbers::position_tiles + item.position_tile] = sum;
      }
    }
  }
  // --- After the last tile of a unit ---
  __device__ __forceinline__ bool arrives_last(uint32* counter) const {
    sync();
    if (agent_thread == 0) s.last[agent] = count_up(counter) == unit_parts - 1;
    sync();
    return s.last[agent];
  }

  // All slabs of the unit, by the block that came last.
  __device__ __forceinline__ void finish_moments(const Item& item) const {
    const int first = Numbers::unit_channel_tiles == Numbers::channel_tiles ? 0 : first_slab(item);
    const int end =
        first + (Numbers::unit_channel_tiles == Numbers::channel_tiles ? slabs_of_sample : slab_count(item));
    for (int slab = first + agent_warp; slab < end; slab += agent_warps) slabs.finish(item.n, slab);
  }

  __device__ __forceinline__ void finish_mean(const Item& item) const {
    const int first = item.channel_tile / Numbers::unit_channel_tiles * Numbers::unit_channel_tiles *
                      Numbers::tile_channels;
    const int end = first + Numbers::unit_channel_tiles * Numbers::tile_channels;
    for (int c = first + static_cast<int>(threadIdx.x); c < end && c < Tail::channels;
         c += gemm::consumer_threads) {
      const int64 row = item.n * Tail::channels + c;
      store_one<Output>(p.output, row, slabs.row_sum(row) / static_cast<float>(Tail::spatial));
    }
  }

  // --- The norm and what follows ---
  // Statistics of the tile's slabs, in shared memory; every consumer.
  __device__ __forceinline__ void load_statistics(const Item& item) const {
    const int first = first_slab(item);
    const int count = slab_count(item);
    if constexpr (Numbers::held) {
      for (int i = agent_warp; i < count; i += agent_warps) {
        const float2 statistics = slabs.statistics(item.n, first + i);
        if (lane != 0) continue;
        s.statistics[agent][i] = statistics;
        if (position_part(item) == 0) {
          float* to = p.statistics + 2 * (item.n * slabs_of_sample + first + i);
          to[0] = statistics.x;
          to[1] = statistics.y;
        }
      }
    } else {
      for (int i = agent_thread; i < count; i += agent_threads) {
        const float* from = p.statistics + 2 * (item.n * slabs_of_sample + first + i);
        s.statistics[agent][i] = {load_shared_by_blocks(from), load_shared_by_blocks(from + 1)};
      }
    }
    sync();
  }

  // What the norm multiplies the thread's rows by and adds, read before other tiles are waited for. Not where
  // a chain follows, for whose registers there is no room then.
  static constexpr bool reads_affine_early = Numbers::held && !Numbers::has_after;
  struct Affine {
    float weight[2];
    float bias[2];
  };
  __device__ __forceinline__ Affine affine_of(const Item& item) const {
    Affine affine;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      const int channel = (c < rows ? c : 0) / classes;
      affine.weight[h] = Tail::weight(p, channel);
      affine.bias[h] = Tail::bias(p, channel);
    }
    return affine;
  }

  // The norm and the chain after it, in place; or the sums of rows, where they are what is wanted.
  __device__ __forceinline__ void apply(const Item& item, const Columns& columns, const Affine& affine,
                                        float (&d)[sums]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int c = item.channel_tile * Numbers::tile_channels + row(h);
      const bool in_range = c < rows;
      const int own = in_range ? c : 0;
      const int channel = own / classes;
      float scale = 1.0f, shift = 0.0f;
      if constexpr (Tail::has_norm) {
        const int slab = in_range ? c / group_rows - first_slab(item) : 0;
        const float2 statistics = s.statistics[agent][slab];
        scale = (reads_affine_early ? affine.weight[h] : Tail::weight(p, channel)) * statistics.y;
        shift = fmaf(-statistics.x, scale, reads_affine_early ? affine.bias[h] : Tail::bias(p, channel));
        if constexpr (Numbers::guards && Numbers::held) {
          if (item.position_tile == 0 && in_range && lane % 4 == 0) Staging::judge(p, item.n, fabsf(scale));
        }
      }
      ChannelValues<After, 1> values;
      values.load(p, item.n, channel);
      const int64 begin = item.n * C::stride(0) + Geometry::row_offset(own);
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * pairs; ++i) {
        float& value = d[i / 2 * 4 + h * 2 + i % 2];
        typename After::template Tensors<1> tensors;
        if constexpr (Numbers::after_reads_tensors) {
          if (columns.has(i)) tensors.load(p, begin + columns.offset(i));
        }
        if constexpr (Tail::has_norm) value = fmaf(value, scale, shift);
        value = After::value(value, values.value[0], tensors, 0);
        if constexpr (Tail::has_mean) total += columns.has(i) ? value : 0.0f;
      }
      if constexpr (Tail::has_mean) {
        total = lanes_sum<4>(total);
        if (lane % 4 == 0) s.rows(group, warp % 4 * 16 + lane / 4 + 8 * h).x = total;
      }
    }
    if constexpr (Tail::has_mean) {
      gemm::consumers_sync();
      const int begin = item.channel_tile * Numbers::tile_channels;
      for (int r = static_cast<int>(threadIdx.x); r < Numbers::tile_channels; r += gemm::consumer_threads) {
        if (begin + r >= Tail::channels) break;
        const float sum = Numbers::groups_share_positions ? s.rows(r / 64, r % 64).x
                                                          : s.rows(0, r % 64).x + s.rows(1, r % 64).x;
        p.sums[(item.n * Tail::channels + begin + r) * Numbers::position_tiles + item.position_tile] = sum;
      }
    }
  }

  // Where the tile's positions lie, before its products: every consumer.
  __device__ __forceinline__ void prepare(const Item& item) const {
    if constexpr (Geometry::contiguous) return;
    // Those of its own warpgroup, where each goes its own way.
    constexpr int count = apart ? Numbers::columns : Numbers::tile_positions;
    const int first = apart ? first_column() : 0;
    for (int i = agent_thread; i < count; i += agent_threads)
      s.offsets[first + i] = Geometry::target(item.position_tile, first + i);
  }

  __device__ __forceinline__ void run(const Item& item, float (&d)[sums], Leaving& leaving) const {
    uint32* counters = p.control + item.unit * 4;
    if constexpr (!Geometry::contiguous) sync();
    const Columns columns(s.offsets, tile_position(item), first_column() + 2 * (lane % 4));
    activate(item, columns, d);
    Affine affine{};
    if constexpr (Tail::has_norm) {
      if constexpr (reads_affine_early) affine = affine_of(item);
      if (Numbers::held || item.is_first) {
        if constexpr (late_vectors > 0) put_rest(leaving);
        if constexpr (rows_are_slabs) {
          leave_parts(item, columns, d);
        } else {
          row_moments(columns, d);
          if constexpr (Numbers::stored) store<f32, true>(p.values, item, d);
          sync();
          store_parts(item);
        }
        if constexpr (Numbers::held && !Tail::mean_follows_norm) {
          sync();
          if (agent_thread == 0) {
            gemm::arrive(counters);
            wait_for(counters, unit_parts);
          }
        } else if constexpr (Numbers::stored) {
          // Another launch merges them: a block does not wait for its stores here.
          sync();
          return;
        } else {
          if (arrives_last(counters)) {
            finish_moments(item);
            sync();
            if (agent_thread == 0) release(counters + 2, 1u);
          }
          return;
        }
      } else if (threadIdx.x == 0) {
        wait_for(counters + 2, 1u);
      }
      sync();
      load_statistics(item);
    }
    apply(item, columns, affine, d);
    if constexpr (Tail::has_mean) {
      if (arrives_last(counters + 1)) finish_mean(item);
    } else if (leaves_late()) {
      if constexpr (late_vectors > 0) keep(item, d, leaving);
    } else {
      store<Output, false>(p.output, item, d);
    }
    // What is in shared memory is free before the next tile writes there; where values are held, barriers
    // come before that.
    if constexpr (Tail::has_mean || !Geometry::contiguous || (Tail::has_norm && !Numbers::held)) sync();
  }
};

}  // namespace onepass
