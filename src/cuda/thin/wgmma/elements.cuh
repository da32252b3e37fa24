// Loads elements of x one by one into the ring of thin/wgmma.cuh, and guards their range.
#pragma once

#include "thin/wgmma.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class Product>
struct ThinWgmma<C, Tail, Numbers, Product>::Elements {
  const Block block;

  // --- Producers ---
  // A position in the order of staging: items of a plane, planes of a tile, tiles, repeats (passes and
  // channels), units.
  struct Place {
    int unit;
    int repeat = 0;
    int tile = 0;
    int plane = 0;
    int item = 0;

    __device__ __forceinline__ void advance() {
      if (items > 1 && ++item < items) return;
      item = 0;
      advance_plane();
    }
    __device__ __forceinline__ void advance_plane() {
      if (++plane < window_planes) return;
      plane = 0;
      if (++tile < part_tiles) return;
      tile = 0;
      if (++repeat < repeats) return;
      repeat = 0;
      unit += unit_step();
    }
  };

  // A thread's part of a chunk. Neighbouring threads have neighbouring channels of shared memory, but so few
  // that a load has whole sectors. 8 to 32 channels, kernel 3: 0.158 ms with eight and with four, 0.151 with
  // two, 0.160 with one.
  static constexpr int near_channels = core_channels < 2 ? core_channels : 2;
  // Neighbouring threads load neighbouring elements, but eight of them store to different banks.
  static constexpr bool rows_first = C::input_stride(3) < C::input_stride(4);
  static constexpr int near_columns = window_columns % 4 == 0 ? 4 : 1;
  struct Unit {
    int core_row, column, row, c;
    bool is_one;

    explicit __device__ __forceinline__ Unit(int chunk) {
      const int u = chunk * producers + static_cast<int>(threadIdx.x) - consumers;
      core_row = u / near_channels % core_rows;
      const int within = u / (near_channels * core_rows);  // columns, or some columns, rows and more columns
      if constexpr (rows_first) {
        row = within / near_columns % base_groups * core_rows + core_row;
        column = within / (near_columns * base_groups) % (window_columns / near_columns) * near_columns +
                 within % near_columns;
      } else {
        row = u / (pitch * window_columns) % base_groups * core_rows + core_row;
        column = within % window_columns;
      }
      c = u / (pitch * window_columns * base_groups) * core_channels +
          within / (window_columns * (rows_first ? base_groups : 1)) % (core_channels / near_channels) *
              near_channels +
          u % near_channels;
      is_one = u < units && row < row_bases;
    }
  };

  using Items = float[samples][loaded];

  static __device__ __forceinline__ float element(const Items& x, int s, int m) {
    return m < loaded ? x[s][m < loaded ? m : 0] : 0.0f;
  }

  // 16-bit elements keep their bits.
  static __device__ __forceinline__ float load_element(const void* base, int64 index) {
    if constexpr (splits) return static_cast<const float*>(base)[index];
    return __uint_as_float(static_cast<const uint16*>(base)[index]);
  }
  static __device__ __forceinline__ void split_elements(float a, float b, uint32& high, uint32& low) {
    if constexpr (splits) return split_pair<C, Input>(a, b, high, low);
    high = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x5410);
    low = 0;
  }

  // Where a unit's elements of a tile lie: the first one of plane 0, and its rows in the input.
  struct Source {
    const char* first;
    int begin, end;
  };

  __device__ __forceinline__ Source source_of(const Place& place, const Unit& unit) const {
    const int tile = first_tile() + place.tile;
    const int i1 = tile / column_tiles * tile_rows * step1 + static_cast<int>(C::base(1, 0)) + unit.row;
    const int i2 = tile % column_tiles * tile_columns * step2 + static_cast<int>(C::base(2, 0)) + unit.column;
    const int64 index = static_cast<int64>(place.unit) * samples * C::input_stride(0) +
                        unit.c * C::input_stride(1) + (first_plane() + C::base(0, 0)) * C::input_stride(2) +
                        i1 * C::input_stride(3) + i2 * C::input_stride(4);
    constexpr int rows = static_cast<int>(C::input_size(1));
    const bool inside = unit.is_one && static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2));
    Source source{static_cast<const char*>(block.p.input) + index * Input::bytes, 0, 0};
    if constexpr (C::base(1, 0) < 0) source.begin = i1 < 0 ? (-i1 + shift - 1) / shift : 0;
    if (inside && i1 < rows) source.end = (rows - i1 + shift - 1) / shift;
    return source;
  }

  __device__ __forceinline__ void load(const Place& place, const Source& source, Items& x) const {
    const bool has_plane =
        static_cast<unsigned>(first_plane() + place.plane + static_cast<int>(C::base(0, 0))) <
        static_cast<unsigned>(C::input_size(0));
    const char* first = source.first + place.plane * (C::input_stride(2) * Input::bytes);
    const int end = has_plane ? source.end : 0;
#pragma unroll
    for (int s = 0; s < samples; ++s) {
#pragma unroll
      for (int m = 0; m < loaded; ++m) {
        const bool is_there = (has_all_rows ? end > 0 : m >= source.begin && m < end) &&
                              (samples == 1 || static_cast<int64>(place.unit) * samples + s < block.p.batch);
        x[s][m] =
            is_there ? load_element(first, s * C::input_stride(0) + m * shift * C::input_stride(3)) : 0.0f;
      }
    }
  }

  // Where a unit goes in a plane, in bytes, and its copies: a bit for each shift and row of a core.
  struct Target {
    uint32 offset;
    uint32 copies;

    Target() = default;
    explicit __device__ __forceinline__ Target(const Unit& unit)
        : offset(((unit.c / core_channels * starts + unit.row) * row_units + unit.column * pitch +
                  unit.c % core_channels) *
                 16),
          copies(0) {
#pragma unroll
      for (int m = 0; m <= shifts; ++m) {
#pragma unroll
        for (int i = 0; i < core_rows; ++i) {
          const int q = unit.row + m * shift - i * delta1;
          if (unit.is_one && q >= 0 && q < starts) copies |= 1u << (m * core_rows + i);
        }
      }
      // The loop has few registers: the compiler must not keep values derived from these two.
      asm volatile("" : "+r"(offset), "+r"(copies));
    }
  };
  static_assert((shifts + 1) * core_rows <= 32);

  static constexpr int guard_words = samples >= 4 ? 4 : samples;
  using Largest = uint32[guard_words];

  __device__ __forceinline__ void store(const Target& target, int slot, Items& x, Largest& largest) const {
    char* place = reinterpret_cast<char*>(block.shared.x[slot][0]) + target.offset;
    if constexpr (splits) {
#pragma unroll
      for (int s = 0; s < samples; ++s) {
#pragma unroll
        for (int m = 0; m < loaded; ++m) x[s][m] *= thin_input_scale;
      }
    }
#pragma unroll
    for (int m = 0; m <= shifts; ++m) {
      uint32 high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        split_elements(element(x, 2 * j / row_groups, 2 * j % row_groups + m),
                       element(x, (2 * j + 1) / row_groups, (2 * j + 1) % row_groups + m), high[j], low[j]);
        // A further shift adds one element, in the last lane of a sample.
        const bool has_new = (2 * j + 1) % row_groups == row_groups - 1 && row_groups - 1 + m < loaded;
        if (guards && (m == 0 || has_new)) {
          uint32& own = largest[j * guard_words / 4];
          own = __vmaxu2(own, high[j] & 0x7fff7fffu);
        }
      }
#pragma unroll
      for (int i = 0; i < core_rows; ++i) {
        if ((target.copies >> (m * core_rows + i) & 1u) == 0) continue;
        uint4* copy =
            reinterpret_cast<uint4*>(place + ((m * shift - i * delta1) * row_units + i * core_channels) * 16);
        *copy = uint4{high[0], high[1], high[2], high[3]};
        if constexpr (input_parts == 2) copy[plane_units] = uint4{low[0], low[1], low[2], low[3]};
      }
    }
  }

  // The slot of the ring that is filled next. The first time round slots are free.
  __device__ __forceinline__ void publish(int& slot, uint32& parity) const {
    barrier::release_to_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier::arrive(&block.shared.full[slot]);
    if (++slot == planes) {
      slot = 0;
      parity ^= 1;
    }
  }

  // The largest magnitudes of a thread's channel: 16-bit patterns, NaN above all.
  __device__ __forceinline__ void leave_largest(const Unit& unit, Largest& largest) const {
    if (unit.is_one) {
#pragma unroll
      for (int k = 0; k < guard_words; ++k) {
        const uint32 even = largest[k] & 0xffffu;
        const uint32 odd = largest[k] >> 16;
        if constexpr (samples == 8) {
          atomicMax(&block.shared.largest[unit.c][2 * k], even);
          atomicMax(&block.shared.largest[unit.c][2 * k + 1], odd);
        } else {
          atomicMax(&block.shared.largest[unit.c][k], max(even, odd));
        }
      }
    }
#pragma unroll
    for (int k = 0; k < guard_words; ++k) largest[k] = 0;
  }

  // The largest magnitude over all parts.
  __device__ __forceinline__ uint32 largest_of(int c, int s) const {
    uint32 result = block.shared.largest[c][s];
    for (int part = 1; part < parts; ++part)
      result = max(result, barrier::load_of_block(&block.shared.largest[c][s], part));
    return result;
  }

  // Marks the samples of a staged unit that are to be computed again; by all producers.
  __device__ __forceinline__ void judge(int64 n) const {
    constexpr uint32 not_finite = is_same<Input, bf16> ? 0x7f80u : 0x7c00u;
    constexpr uint32 least = 0x3800u;  // 0.5, of scaled elements
    const int warp = (static_cast<int>(threadIdx.x) - consumers) / 32;
    for (int s = warp; s < samples && n + s < block.p.batch; s += producers / 32) {
      bool redo = false;
      for (int c = 0; c < C::in_channels && !redo; ++c) {
        const uint32 largest = largest_of(c, s);
        redo = largest >= not_finite ||
               (splits && largest < least && !is_exact_in_f16<C, Input, input_parts>(block.p, n + s, c));
      }
      if (threadIdx.x % 32 == 0) {
        block.p.only[n + s] = redo ? 1u : 0u;
        if (redo) atomicMax(&block.shared.redo, static_cast<uint32>(redo_some));
      }
    }
  }

  // Ends a staged unit; by all producers. In a cluster the first block judges what all blocks found.
  __device__ __forceinline__ void end_unit(int64 n) const {
    if constexpr (parts > 1) {
      barrier::cluster_sync();
      if (guards && rank() == 0) judge(n);
      barrier::cluster_sync();
    } else if constexpr (guards) {
      warpgroup::sync<producers>(6);
      judge(n);
    }
    if constexpr (guards) {
      warpgroup::sync<producers>(6);
      for (int i = static_cast<int>(threadIdx.x) - consumers; i < C::in_channels * samples; i += producers)
        block.shared.largest[i / samples][i % samples] = 0;
      warpgroup::sync<producers>(6);
    }
  }

  // With few items to a plane a thread keeps their sources and targets in registers.
  static constexpr bool keeps_items = items > 1 && items <= 8;
  static constexpr int kept_in_flight = fitting < 1       ? 1
                                        : fitting > 4     ? (items < 4 ? items : 4)
                                        : fitting < items ? fitting
                                                          : items;

  __device__ __forceinline__ void produce_kept() const {
    constexpr int ahead_items = kept_in_flight;
    constexpr int round = (items + ahead_items - 1) / ahead_items * ahead_items;
    constexpr int unit_planes = repeats * part_tiles * window_planes;
    const auto end = static_cast<int>((block.p.batch + samples - 1) / samples);
    Place ahead{first_unit()};
    const char* plane_base = nullptr;  // of the sample's plane
    bool has_plane = false;
    int offset[items];   // of an item's first element, in elements
    uint32 rows[items];  // that there are: a bit each
    Target target[items];
    Largest largest[items] = {};
    Items x[ahead_items];
#pragma unroll
    for (int k = 0; k < items; ++k) target[k] = Target(Unit(k));
    const auto begin_plane = [&] {
      const int i0 = first_plane() + ahead.plane + static_cast<int>(C::base(0, 0));
      has_plane = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0)) && ahead.unit < end;
      plane_base = static_cast<const char*>(block.p.input) +
                   (static_cast<int64>(ahead.unit) * samples * C::input_stride(0) + i0 * C::input_stride(2)) *
                       Input::bytes;
      if (ahead.plane != 0) return;
      const int tile = first_tile() + ahead.tile;
#pragma unroll
      for (int k = 0; k < items; ++k) {
        const Unit unit(k);
        const int i1 = tile / column_tiles * tile_rows * step1 + static_cast<int>(C::base(1, 0)) + unit.row;
        const int i2 =
            tile % column_tiles * tile_columns * step2 + static_cast<int>(C::base(2, 0)) + unit.column;
        offset[k] =
            static_cast<int>(unit.c * C::input_stride(1) + i1 * C::input_stride(3) + i2 * C::input_stride(4));
        const bool inside =
            unit.is_one && static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2));
        rows[k] = 0;
#pragma unroll
        for (int m = 0; m < loaded; ++m) {
          if (inside && static_cast<unsigned>(i1 + m * shift) < static_cast<unsigned>(C::input_size(1)))
            rows[k] |= 1u << m;
        }
      }
    };
    const auto load_item = [&](int k, Items& to) {
      const uint32 present = has_plane ? rows[k] : 0;
      const char* first = plane_base + static_cast<int64>(offset[k]) * Input::bytes;
#pragma unroll
      for (int s = 0; s < samples; ++s) {
        const bool is_sample = samples == 1 || static_cast<int64>(ahead.unit) * samples + s < block.p.batch;
#pragma unroll
        for (int m = 0; m < loaded; ++m) {
          const bool is_there = (has_all_rows ? present : present >> m & 1u) != 0 && is_sample;
          to[s][m] =
              is_there ? load_element(first, s * C::input_stride(0) + m * shift * C::input_stride(3)) : 0.0f;
        }
      }
    };
    begin_plane();
#pragma unroll
    for (int k = 0; k < ahead_items; ++k) load_item(k, x[k]);
    if constexpr (!all_prepare) barrier::wait(&block.shared.prepared, 0);
    int slot = 0;
    uint32 parity = 1;
#pragma unroll 1
    for (int unit = first_unit(); unit < end; unit += unit_step()) {
#pragma unroll 1
      for (int i = 0; i < unit_planes; ++i) {
#pragma unroll
        for (int k = 0; k < round; ++k) {
          if (k == 0) barrier::wait(&block.shared.empty[slot], parity);
          if (k < items)
            store(target[k < items ? k : 0], slot, x[k % ahead_items], largest[k < items ? k : 0]);
          if (k == items - 1) {
            publish(slot, parity);
          }
          const int next = (k + ahead_items) % round;
          if (next == 0) {
            ahead.advance_plane();
            begin_plane();
          }
          if (next < items) load_item(next < items ? next : 0, x[k % ahead_items]);
        }
      }
      if constexpr (guards) {
#pragma unroll
        for (int k = 0; k < items; ++k) leave_largest(Unit(k), largest[k]);
      }
      end_unit(static_cast<int64>(unit) * samples);
    }
    if (guards && threadIdx.x == consumers && rank() == 0)
      block.p.only[block.p.batch + first_unit()] = block.shared.redo;
  }

  __device__ __forceinline__ void produce() const {
    if constexpr (keeps_items) return produce_kept();
    const auto end = static_cast<int>((block.p.batch + samples - 1) / samples);
    Place ahead{first_unit()};
    Items x[in_flight][item_chunks];
    Source source[item_chunks];
    const auto load_ahead = [&](Items(&to)[item_chunks]) {
      if (ahead.unit >= end) return;
#pragma unroll
      for (int j = 0; j < item_chunks; ++j) {
        if (items > 1 || ahead.plane == 0) source[j] = source_of(ahead, Unit(ahead.item * item_chunks + j));
        load(ahead, source[j], to[j]);
      }
      ahead.advance();
    };
#pragma unroll
    for (int k = 0; k < in_flight; ++k) load_ahead(x[k]);
    if constexpr (!all_prepare) barrier::wait(&block.shared.prepared, 0);
    int slot = 0;
    uint32 parity = 1;
    Largest largest[item_chunks] = {};
    Target target[item_chunks];
#pragma unroll
    for (int j = 0; j < item_chunks; ++j) target[j] = Target(Unit(j));
#pragma unroll 1
    for (int unit = first_unit(); unit < end; unit += unit_step()) {
      int item = 0;
#pragma unroll 1
      for (int i = 0; i < unit_items; i += in_flight) {
#pragma unroll
        for (int k = 0; k < in_flight; ++k) {
          if (items == 1 || item == 0) barrier::wait(&block.shared.empty[slot], parity);
#pragma unroll
          for (int j = 0; j < item_chunks; ++j) {
            if constexpr (items > 1) target[j] = Target(Unit(item * item_chunks + j));
            store(target[j], slot, x[k][j], largest[j]);
            if constexpr (guards && items > 1) leave_largest(Unit(item * item_chunks + j), largest[j]);
          }
          item = item + 1 == items ? 0 : item + 1;
          if (item == 0) {
            publish(slot, parity);
          }
          load_ahead(x[k]);
        }
      }
      if constexpr (guards && items == 1) {
#pragma unroll
        for (int j = 0; j < item_chunks; ++j) leave_largest(Unit(j), largest[j]);
      }
      end_unit(static_cast<int64>(unit) * samples);
    }
    if (guards && threadIdx.x == consumers && rank() == 0)
      block.p.only[block.p.batch + first_unit()] = block.shared.redo;
  }
};

}  // namespace onepass
