// The terms of a thin convolution as the products of its gradients count them.
#pragma once

#include "thin/thin.cuh"

namespace onepass {

// The convolution's terms. The window of x has vectors of input channels; an entry is such a vector and a
// tap. Where a chunk has several rows, an entry has taps of the first and last dimension alone and meets
// every tap of the dimension between them ("row tap"), so that what is loaded of a row of x serves all rows
// of outputs that meet it. A step is four entries, one for each lane of a quad; a group is the eight entries
// that are the columns of a product of dweight.
template <class Convolution, class Numbers>
struct GradientTerms {
  using C = Convolution;
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr int row_tiles = (C::channels + 15) / 16;
  static constexpr int vector = Numbers::vector;
  static constexpr int products = Numbers::halves ? 1 : vector / 2;
  static constexpr int components = C::in_channels < vector ? C::in_channels : vector;  // that are ever real
  static constexpr int vectors = (C::in_channels + vector - 1) / vector;
  static constexpr int weight_stride =
      C::transposed ? C::taps : C::in_channels * C::taps;  // of an output channel
  static constexpr int channel_stride = C::transposed ? C::channels * C::taps : C::taps;

  static constexpr bool has_rows = Numbers::chunk_rows > 1;
  static constexpr int most_row_taps =
      has_rows ? static_cast<int>((C::kernel(1) + C::tap_step(1) - 1) / C::tap_step(1)) : 1;
  static constexpr __device__ bool has_row_taps(int count) {
    for (int r = 0; r < static_cast<int>(C::classes(1)); ++r) {
      if (C::count(1, r) == count) return true;
    }
    return false;
  }

  struct Class {
    int row_taps;
    int step;  // the first
    int steps;
    int fragment;  // the first of its operands: steps, their row taps, products
    int job;       // the first of its products of dweight: groups of a tile of rows, then those of the next
    int groups;
    int unit;  // the first of its sums of dweight: jobs, their row taps, components
  };

  // Entries of a class with the last tap running fastest, then the first, then the vector of channels.
  struct Entry {
    int tap;      // -1 beyond the last entry
    int channel;  // the first of the vector
    int window;   // from the window's vector of a position with j = 0, in the window's first plane
    int plane;    // of the window
  };

  static __device__ __forceinline__ int row_taps_of(const ThinClass<C>& own) {
    return has_rows ? own.count[1] : 1;
  }
  static __device__ __forceinline__ int entries_of(const ThinClass<C>& own) {
    const int outer = vectors * own.count[0] * own.count[2];
    return has_rows && own.count[1] > 0 ? outer : outer * own.count[1];
  }

  static __device__ void find_classes(Class* found) {
    int step = 0, fragment = 0, job = 0, unit = 0;
    for (int i = 0; i < classes; ++i) {
      const ThinClass<C> own(i);
      const int entries = entries_of(own);
      found[i] = {row_taps_of(own), step, (entries + 3) / 4, fragment, job, (entries + 7) / 8, unit};
      step += found[i].steps;
      fragment += found[i].steps * found[i].row_taps * products;
      job += found[i].groups * row_tiles;
      unit += units_of(found[i]);
    }
  }
  static __device__ __forceinline__ int units_of(const Class& own) {
    return own.groups * row_tiles * own.row_taps * components;
  }

  // The class that has a step, an operand, a job or a unit.
  static __device__ int class_of_step(const Class* found, int step) {
    int i = 0;
    while (step >= found[i].step + found[i].steps) ++i;
    return i;
  }
  static __device__ int class_of_fragment(const Class* found, int fragment) {
    int i = 0;
    while (fragment >= found[i].fragment + found[i].steps * found[i].row_taps * products) ++i;
    return i;
  }
  static __device__ int class_of_job(const Class* found, int job) {
    int i = 0;
    while (job >= found[i].job + found[i].groups * row_tiles) ++i;
    return i;
  }
  static __device__ int class_of_unit(const Class* found, int unit) {
    int i = 0;
    while (unit >= found[i].unit + units_of(found[i])) ++i;
    return i;
  }

  // What fills up a step or a group reads what the last entry reads.
  static __device__ Entry entry(int class_index, int index, int row_tap) {
    const ThinClass<C> own(class_index);
    const int entries = entries_of(own);
    int rest = index < entries ? index : entries - 1;
    int m[3];
    m[2] = rest % own.count[2];
    rest /= own.count[2];
    m[1] = row_tap;
    if constexpr (!has_rows) {
      m[1] = rest % own.count[1];
      rest /= own.count[1];
    }
    m[0] = rest % own.count[0];
    const int of_vectors = rest / own.count[0];
    int tap = 0;
    int at[3];
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      tap = tap * static_cast<int>(C::kernel(d)) + own.first[d] + m[d] * static_cast<int>(C::tap_step(d));
      at[d] = own.base[d] + m[d] * static_cast<int>(C::delta(d)) - Numbers::low(d);
    }
    return {index < entries ? tap : -1, of_vectors * vector,
            (of_vectors * Numbers::window(0) * Numbers::window(1) + at[1]) * Numbers::window(2) + at[2],
            at[0]};
  }
  // In elements, where the window's planes lie in a ring that begins at plane `turn`.
  static __device__ __forceinline__ int window_of(int rest, int plane, int turn) {
    plane += turn;
    if (plane >= Numbers::window(0)) plane -= Numbers::window(0);
    return (rest + plane * (Numbers::window(1) * Numbers::window(2))) * vector;
  }

  // Rounding weights moves all sums of a channel alike, and a norm and long sums let that show. Where the
  // last vector of channels is not full, the mean of its channels times what rounding drops of their weights
  // makes up for most of it, at no cost. Only where the forward had exact weights; -1 where there is no room.
  static constexpr int spare = Numbers::makes_up_for_weights && C::in_channels % vector != 0
                                   ? static_cast<int>(C::in_channels % vector)
                                   : -1;

  // The index of a weight without its output channel; -1 where there is none.
  static __device__ __forceinline__ int weight_index(const Entry& entry, int component) {
    const int channel = entry.channel + component;
    return entry.tap < 0 || channel >= C::in_channels ? -1 : channel * channel_stride + entry.tap;
  }
};

}  // namespace onepass
