// How rows spread a small slab of a planar tensor over threads that hold it in registers (row_place.cuh).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cuda/source.h"
#include "cuda/tail/tail.h"

namespace onepass::cuda {

struct SlabNumbers {
  int width = 1;
  int team = 0;           // threads of a row; 0 where the slab does not fit
  int slab_threads = 0;   // of a slab
  int threads = 0;        // of a block
  int rows_each = 0;      // of a thread
  int vectors = 0;        // of a thread in a row
  int blocks_wanted = 1;  // that a multiprocessor should have room for

  // The registers that the values of a thread take, and the threads a multiprocessor then has. A few values
  // and many threads come first: less code, and more slabs in flight.
  struct Tier {
    int64_t words;
    int threads_of_slab;
    int threads_of_multiprocessor;
  };

  // What an element brings: bytes that are held of the input and beside it, instructions, sums of a row.
  struct Element {
    int64_t input_bytes = 0;
    int64_t gradient_bytes = 0;
    double instructions = 0;
    double sums = 0;
  };

  bool fits() const { return team > 0; }
  int64_t slabs() const { return threads / slab_threads; }  // of a block

  // The numbers of a tier; `team` is 0 where there are none. `whole`: slabs of more than a warp have a block
  // to themselves.
  void search(const TailShape& shape, const Tier& tier, const Element& element, bool whole) {
    width = shape.width;
    team = 0;
    double least = std::numeric_limits<double>::infinity();
    for (int of_row = 1; of_row <= tier.threads_of_slab; of_row *= 2) {
      for (int of_slab = of_row; of_slab <= tier.threads_of_slab; of_slab *= 2) {
        const double cost = try_teams(shape, of_row, of_slab, tier.words, element);
        if (cost >= least) continue;
        least = cost;
        team = of_row;
        slab_threads = of_slab;
      }
    }
    if (team == 0) return;
    constexpr int least_threads = 128;
    threads = whole && slab_threads > 32 ? slab_threads : std::max(slab_threads, least_threads);
    rows_each = static_cast<int>(divide_up(shape.group_channels(), slab_threads / team));
    vectors = vectors_of(shape, team);
    // Operands of chains take registers too.
    constexpr int threads_with_operands = 512;
    const int resident = shape.parts.has_operands()
                             ? std::min(threads_with_operands, tier.threads_of_multiprocessor)
                             : tier.threads_of_multiprocessor;
    blocks_wanted = std::max(1, resident / threads);
  }

  Constants constants() const {
    return Constants()
        .add("threads", threads, "width", width, "vectors", vectors)
        .add("team", team, "slab_threads", slab_threads)
        .add("rows_each", rows_each);
  }

 private:
  static int vectors_of(const TailShape& shape, int team) {
    return static_cast<int>(divide_up(std::max<int64_t>(1, shape.spatial / shape.width), team));
  }

  // Instructions of all threads of a slab; infinite where values do not fit or loads would not coalesce.
  static double try_teams(const TailShape& shape, int team, int slab_threads, int64_t most_words,
                          const Element& element) {
    constexpr double none = std::numeric_limits<double>::infinity();
    constexpr int64_t most_rows = 8;  // of a thread: their values are in registers too
    constexpr int64_t sector_bytes = 32;
    const auto words = [](int64_t bytes) { return divide_up(bytes, 4); };
    const int64_t row_vectors = std::max<int64_t>(1, shape.spatial / shape.width);
    if (team * shape.width * element.input_bytes < sector_bytes && team < row_vectors) return none;
    if (team >= 2 * row_vectors && team > 1) return none;
    const int64_t vectors = vectors_of(shape, team);
    const int64_t edges =
        shape.spatial % shape.width == 0 ? 0 : divide_up(2 * (int64_t{shape.width} - 1), team);
    const int64_t rows = divide_up(shape.group_channels(), slab_threads / team);
    const int64_t all_words =
        rows *
        (vectors * (words(shape.width * element.input_bytes) + words(shape.width * element.gradient_bytes)) +
         edges * (element.gradient_bytes > 0 ? 2 : 1));
    if (rows > most_rows || all_words > most_words) return none;
    constexpr double of_shuffle = 2, of_row = 30, of_slab = 60;
    const double steps = std::log2(team);
    return slab_threads *
           (of_slab + static_cast<double>(rows) *
                          (of_row + element.sums * of_shuffle * steps +
                           element.instructions * static_cast<double>(vectors * shape.width + edges)));
  }
};

}  // namespace onepass::cuda
