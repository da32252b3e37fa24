// What the tail's kernels share: parameters, per-channel values, and the two ways to walk over a tile.
//
// A tail is  before-chain -> norm -> after-chain -> mean, each part optional. `Tail` is the problem,
// generated: types, sizes and the chains as structs (src/cuda/source.cc). A *row* is one channel of one
// sample. A *unit* is what shares a synchronisation: a slab where tensors are planar (channels before space),
// a sample where they are interleaved.
#pragma once

#include "device/aligned.cuh"
#include "device/pointwise.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"

namespace onepass {

// A kernel's AlignedBits; none where its parameters do not say them.
template <class Parameters>
__device__ __forceinline__ auto aligned_bits_of(const Parameters& p, int) -> decltype(p.aligned) {
  return p.aligned;
}
template <class Parameters>
__device__ __forceinline__ uint64 aligned_bits_of(const Parameters&, long) {
  return 0;
}
// Whether vectors of a tensor lie on 16 bytes, by its AlignedBit. Others are loaded element by element.
template <class Parameters>
__device__ __forceinline__ bool is_aligned(const Parameters& p, int bit) {
  return (aligned_bits_of(p, 0) >> bit) & 1;
}

// What a chain's tensors are loaded by where all vectors of the launch lie on 16 bytes. With a bit asked for
// at run time the loads of both ways write the same registers, and each vector waits for the one before.
struct AlignedOperands {
  const void* const* parameter;
  static constexpr uint64 aligned = ~uint64{0};
};
template <bool Aligned, class Tensors, class Parameters>
__device__ __forceinline__ void load_tensors(Tensors& tensors, const Parameters& p, int64 index) {
  if constexpr (Aligned) {
    tensors.load(AlignedOperands{p.parameter}, index);
  } else {
    tensors.load(p, index);
  }
}

// Loads and stores that other blocks of the same launch wrote or will read: past the first-level cache.
__device__ __forceinline__ float load_shared_by_blocks(const float* address) { return __ldcg(address); }

__device__ __forceinline__ void wait_for(const uint32* flag, uint32 value) {
  uint32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (seen < value);
}

// Adds one to a counter of the launch and says what it was. What this block wrote before its last barrier is
// visible to the one that sees the new count, and the other way round.
__device__ __forceinline__ uint32 count_up(uint32* counter) {
  uint32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Whether this block is the last of `count` to arrive; what the others wrote before is then visible.
__device__ __forceinline__ bool arrives_last(uint32* counter, uint32 count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(counter) == count - 1;
  __syncthreads();
  return last;
}

// Lets those that wait for the flag go on: what this thread wrote is visible to them.
__device__ __forceinline__ void release(uint32* flag, uint32 value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
// The same for a block.
__device__ __forceinline__ void publish(uint32* flag, uint32 value) {
  __syncthreads();
  if (threadIdx.x == 0) release(flag, value);
}

// Work by ticket: pass 1 of wave 0; pass 1 of wave 1, pass 2 of wave 0; ... ; pass 2 of the last wave. So
// pass 2 finds in the second-level cache what pass 1 of its wave read, and waits only for lower tickets.
template <int FirstTiles, int SecondTiles>
struct Schedule {
  static_assert(FirstTiles + SecondTiles > 0);

  bool is_first;
  int64 unit;
  int tile;

  // All tickets of both passes; those of units that the last wave does not have do nothing.
  static __device__ __forceinline__ int64 tickets(int64 units, int64 wave_units) {
    return wave_units * FirstTiles +
           (units + wave_units - 1) / wave_units * wave_units * (FirstTiles + SecondTiles);
  }

  // Tickets are drawn from a 32-bit counter: 32 bits divide in a fifth of the instructions of 64.
  __device__ __forceinline__ Schedule(int64 drawn, int64 wave_units) {
    const auto units_of_wave = static_cast<uint32>(wave_units);
    const uint32 first_items = units_of_wave * FirstTiles;
    const uint32 segment = units_of_wave * (FirstTiles + SecondTiles);
    // Segment 0 has no second pass, so that its first passes stand at the end of a whole one.
    const uint32 ticket = static_cast<uint32>(drawn) + segment - first_items;
    uint32 wave = ticket / segment;
    uint32 item = ticket - wave * segment;
    is_first = FirstTiles > 0 && (wave == 0 || item < first_items);
    if (wave == 0) item -= segment - first_items;
    if (!is_first) {
      item -= first_items;
      --wave;
    }
    constexpr uint32 most_first = FirstTiles > 0 ? FirstTiles : 1;
    constexpr uint32 most_second = SecondTiles > 0 ? SecondTiles : 1;
    const uint32 of_wave = is_first ? item / most_first : item / most_second;
    unit = static_cast<int64>(wave) * units_of_wave + of_wave;
    tile = static_cast<int>(item - of_wave * (is_first ? most_first : most_second));
  }
};

// A block's tickets, drawn one at a time. Drawing the next one early would save its wait, but a ticket that
// is held back takes the place of a tile in flight: 1.25 times the time of s60's backward.
class Tickets {
 public:
  explicit __device__ __forceinline__ Tickets(uint32* counter) : counter_(counter) {}

  // The next ticket, in every thread.
  __device__ __forceinline__ int64 take() {
    __shared__ uint32 ticket;
    __syncthreads();  // all have read the one before
    if (threadIdx.x == 0) ticket = atomicAdd(counter_, 1u);
    __syncthreads();
    return ticket;
  }

 private:
  uint32* counter_;
};

// Runs first(unit, tile, counters) and second(unit, tile, counters) of an agent, as tickets come. A unit has
// four words behind the launch's.
template <class Agent, class Skips>
__device__ __forceinline__ void run_tickets(const Agent& agent, int64 units, Skips&& skips) {
  using Items = Schedule<Agent::first_tiles, Agent::second_tiles>;
  const auto& p = agent.p;
  const int64 tickets = Items::tickets(units, p.wave_units);
  Tickets own(p.control);
#pragma unroll 1
  for (int64 ticket = own.take(); ticket < tickets; ticket = own.take()) {
    const Items item(ticket, p.wave_units);
    if (item.unit >= units || skips(item.unit)) continue;
    uint32* counters = p.control + 4 + item.unit * 4;
    if (item.is_first) {
      if constexpr (Agent::first_tiles > 0) agent.first(item.unit, item.tile, counters);
    } else {
      if constexpr (Agent::second_tiles > 0) agent.second(item.unit, item.tile, counters);
    }
  }
}

// The channel values of one row, or of `Width` neighbouring rows where a vector runs over channels.
template <class Chain, int Rows>
struct ChannelValues {
  float value[Rows][Chain::channel_operands > 0 ? Chain::channel_operands : 1];

  template <class Parameters>
  __device__ __forceinline__ void load(const Parameters& p, int64 n, int64 c) {
#pragma unroll
    for (int i = 0; i < Rows; ++i) Chain::load_channel(p, n, c + i, value[i]);
  }
};

// Lanes of a warp that share `count` pieces of work.
constexpr __device__ int lanes_for(int count) {
  int lanes = 1;
  while (lanes < 32 && lanes < count) lanes *= 2;
  return lanes;
}

// The whole chunk, where a number of vectors is asked for.
struct All {};
__device__ __forceinline__ bool is_in(int, All) { return true; }
__device__ __forceinline__ bool is_in(int i, int count) { return i < count; }

// Walks over one tile of planar tensors: rows of `Tail::spatial` neighbours, `team` threads a row. A row's
// elements before the first vector and after the last go one by one. Pass:
//   Pass::template Row<1> row(n, c); Pass::template Sums<1> sums
//   pass.template chunk<Width, Count, 1>(row, index of the first vector, distance to the next, how many,
//   sums)
//     All; or a number below Count for the last ones: loaded at once all the same.
//   pass.template finish<team, 1>(row, sums, row index, piece, in range)
template <class Tail, class Numbers>
struct PlanarWalk {
  static constexpr int rows_of_unit = Tail::group_channels;
  static constexpr int slabs_of_unit = 1;
  static constexpr int pieces = Numbers::pieces;
  static constexpr int tiles_of_unit =
      pieces > 1 ? rows_of_unit* pieces
                 : (rows_of_unit + Numbers::rows_per_tile - 1) / Numbers::rows_per_tile;
  static constexpr int groups = Tail::channels / Tail::group_channels;

  static __device__ __forceinline__ int64 units(int64 batch) { return batch * groups; }

  template <class Parameters, class Pass>
  static __device__ __forceinline__ void run(const Parameters& p, int64 unit, int tile, Pass& pass) {
    constexpr int team = Numbers::team;
    const int64 n = unit / groups;
    const int first_channel = static_cast<int>(unit % groups) * Tail::group_channels;
    if constexpr (pieces > 1) {
      row<team>(p, n, first_channel + tile / pieces, tile % pieces, true, pass);
    } else {
      constexpr int unit_threads = Numbers::threads / Numbers::units_of_block;
      constexpr int at_once = unit_threads / team;
      const int begin = tile * Numbers::rows_per_tile;
#pragma unroll 1
      for (int r = 0; r < Numbers::rows_per_tile; r += at_once) {
        const int own = begin + r + threadIdx.x % unit_threads / team;
        const bool in_range = own < rows_of_unit && own < begin + Numbers::rows_per_tile;
        row<team>(p, n, first_channel + (in_range ? own : begin), 0, in_range, pass);
      }
    }
  }

 private:
  template <int team, class Parameters, class Pass>
  static __device__ __forceinline__ void row(const Parameters& p, int64 n, int c, int piece, bool in_range,
                                             Pass& pass) {
    constexpr int width = Numbers::width;
    constexpr int64 spatial = Tail::spatial;
    const int lane = threadIdx.x % team;
    const int64 row_index = n * Tail::channels + c;
    const int64 begin = row_index * spatial;
    const auto own = pass.template row<1>(n, c);
    typename Pass::template Sums<1> sums;
    if (in_range) {
      const int head = head_elements(begin + p.phase);
      const int64 vectors = (spatial - head) / width;
      constexpr int64 piece_vectors = Numbers::piece_vectors;
      const int64 last = pieces > 1 && piece * piece_vectors + piece_vectors < vectors
                             ? piece * piece_vectors + piece_vectors
                             : vectors;
      int64 v = piece * piece_vectors + lane;
      constexpr int64 step = team;
      constexpr int count = Numbers::vectors_in_flight;
#pragma unroll 1
      for (; v + (count - 1) * step < last; v += count * step) {
        pass.template chunk<width, count, 1>(own, begin + head + v * width, step * width, All{}, sums);
      }
      if (v < last) {
        const int left = static_cast<int>((last - v + step - 1) / step);
        pass.template chunk<width, count, 1>(own, begin + head + v * width, step * width, left, sums);
      }
      if constexpr (width > 1) {
        const int edges = static_cast<int>(spatial - vectors * width);
        if (piece == 0) {
          for (int e = lane; e < edges; e += team) {
            const int64 offset = e < head ? e : e + vectors * width;
            pass.template chunk<1, 1, 1>(own, begin + offset, 0, All{}, sums);
          }
        }
      }
    }
    pass.template finish<team, 1>(own, sums, row_index, piece, in_range);
  }

  static __device__ __forceinline__ int head_elements(int64 position) {
    constexpr int width = Numbers::width;
    if constexpr (width == 1) return 0;
    const int head = (width - static_cast<int>(position % width)) % width;
    return head < Tail::spatial ? head : static_cast<int>(Tail::spatial);
  }
};

// The same for interleaved tensors (channels after space): a tile is a range of positions with the channels
// of a strip, which are whole slabs; a thread keeps `Width` channels and goes over positions.
template <class Tail, class Numbers>
struct InterleavedWalk {
  static constexpr int strip = Numbers::strip_channels;
  static constexpr int strips = Tail::channels / strip;
  static constexpr int rows_of_unit = strip;
  static constexpr int slabs_of_unit = strip / Tail::group_channels;
  static constexpr int pieces = Numbers::pieces;
  static constexpr int tiles_of_unit = pieces;

  static __device__ __forceinline__ int64 units(int64 batch) { return batch * strips; }

  template <class Parameters, class Pass>
  static __device__ __forceinline__ void run(const Parameters& p, int64 unit, int tile, Pass& pass) {
    constexpr int width = Numbers::width;
    constexpr int columns = Numbers::team;  // threads along channels
    constexpr int lanes = Numbers::threads / columns;
    constexpr int64 step = static_cast<int64>(lanes) * Tail::channels;
    constexpr int count = Numbers::vectors_in_flight;
    const int column = threadIdx.x % columns;
    const int lane = threadIdx.x / columns;
    const int64 n = unit / strips;
    const int first_channel = static_cast<int>(unit % strips) * strip;
    const int64 first = static_cast<int64>(tile) * Numbers::piece_positions;
    const int64 last =
        first + Numbers::piece_positions < Tail::spatial ? first + Numbers::piece_positions : Tail::spatial;
#pragma unroll 1
    for (int c = column * width; c - column * width < strip; c += columns * width) {
      const bool in_range = c < strip;
      const auto own = pass.template row<width>(n, first_channel + (in_range ? c : 0));
      typename Pass::template Sums<width> sums;
      if (in_range) {
        int64 position = first + lane;
        int64 index = (n * Tail::spatial + position) * Tail::channels + first_channel + c;
#pragma unroll 1
        for (; position + (count - 1) * lanes < last; position += count * lanes, index += count * step) {
          pass.template chunk<width, count, width>(own, index, step, All{}, sums);
        }
        if (position < last) {
          const int left = static_cast<int>((last - position + lanes - 1) / lanes);
          pass.template chunk<width, count, width>(own, index, step, left, sums);
        }
      }
      pass.template finish<columns, width>(own, sums, unit * strip + c, tile, in_range);
    }
  }
};

// Interleaved: how sums over the position lanes of a column come together. Lanes of a warp that have the same
// channels add first; then every holder of a sum, one a column in each warp or in each team of several,
// leaves it in shared memory and adds up some of the column's rows.
template <class Numbers, int team>
struct ColumnSplit {
  static constexpr int holders = Numbers::threads / (team < 32 ? 32 : team);
  template <int Rows>
  static constexpr int rows = (Rows + holders - 1) / holders;  // of a holder

  static __device__ __forceinline__ int holder() { return threadIdx.x / (team < 32 ? 32 : team); }
  static __device__ __forceinline__ bool holds() { return team >= 32 || threadIdx.x % 32 < team; }
  static __device__ __forceinline__ int place(int row, int holder) {
    return (row * holders + holder) * team + static_cast<int>(threadIdx.x % team);
  }

  static __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int offset = 16; offset >= team; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
  }

  // f(slot, row) for the rows of this holder.
  template <int Rows, class F>
  static __device__ __forceinline__ void for_each_row(F&& f) {
#pragma unroll
    for (int slot = 0; slot < rows<Rows>; ++slot) {
      const int row = slot * holders + holder();
      if (holds() && row < Rows) f(slot, row);
    }
  }
};

// Sums of a chunk, over the team of a row or over the position lanes of a column; `Count` for each row.
template <class Numbers, int Count, int Rows>
struct PlainSums {
  float value[Rows][Count > 0 ? Count : 1] = {};

  // Gives the totals of row `r` to store(r, totals) in one thread.
  template <int team, class Store>
  __device__ __forceinline__ void finish(bool in_range, float* scratch, Store&& store) {
    if constexpr (Count > 0 && Rows == 1 && !Numbers::interleaved) {
      if constexpr (team <= 32) {
#pragma unroll
        for (int i = 0; i < Count; ++i) value[0][i] = lanes_sum<team>(value[0][i]);
      } else {
        block_sum<Numbers::threads>(value[0], scratch);
      }
      if (in_range && threadIdx.x % team == 0) store(0, value[0]);
    } else if constexpr (Count > 0) {
      using Split = ColumnSplit<Numbers, team>;
      float total[Split::template rows<Rows>][Count];
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        __syncthreads();
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          const float own = Split::warp_sum(value[r][i]);
          if (Split::holds()) scratch[Split::place(r, Split::holder())] = own;
        }
        __syncthreads();
        Split::template for_each_row<Rows>([&](int slot, int r) {
          float sum = 0.0f;
#pragma unroll
          for (int holder = 0; holder < Split::holders; ++holder) sum += scratch[Split::place(r, holder)];
          total[slot][i] = sum;
        });
      }
      if (in_range) Split::template for_each_row<Rows>([&](int slot, int r) { store(r, total[slot]); });
    }
  }
};

}  // namespace onepass
