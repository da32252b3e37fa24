// The terms of a thin convolution as the products of its gradients count them.
#pragma once

#include "thin/thin.cuh"

namespace onepass {

// The window of x has vectors of input channels. An entry is such a vector and a tap. Where a chunk has
// several rows, an entry has taps of the first and last dimension alone; the taps between them are its row
// taps. A row of x is then loaded once for all output rows that read it. A step is four entries, one for each
// lane of a quad. A group is the eight entries that are the columns of a product of dweight.
template <class Convolution, class Numbers>
struct GradientTerms {
  using C = Convolution;
  static constexpr int classes = static_cast<int>(C::classes(0) * C::classes(1) * C::classes(2));
  static constexpr int row_tiles = (C::channels + 15) / 16;
  static constexpr int vector = Numbers::vector;
  static constexpr int products = Numbers::halves ? 1 : vector / 2;
  static constexpr int components = C::in_channels < vector ? C::in_channels : vector;  // that are channels
  static constexpr int vectors = (C::in_channels + vector - 1) / vector;
  static constexpr int weight_stride =
      C::transposed ? C::taps : C::in_channels * C::taps;  // of an output channel
  static constexpr int channel_stride = C::transposed ? C::channels * C::taps : C::taps;

  static constexpr int chunk_rows = Numbers::chunk_rows;
  static constexpr bool has_rows = chunk_rows > 1;
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
    int fragment;  // its first fragment of weights: [step][row tap][product]
    int job;       // its first product of dweight: [row tile][group]
    int groups;
    int unit;  // its first sum of dweight: [job][row tap][component]
  };

  // Entries of a class are ordered [vector of channels][first tap][last tap].
  struct Entry {
    int tap;      // -1 beyond the last entry
    int channel;  // the first of the vector
    int window;   // offset from a position's vector, without the plane
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

  // The class of a step, a fragment, a job or a unit.
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

  // Entries that pad a step or a group read what the last entry reads.
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
  // In elements, of a window whose ring buffer begins at plane `turn`.
  static __device__ __forceinline__ int window_of(int rest, int plane, int turn) {
    plane += turn;
    if (plane >= Numbers::window(0)) plane -= Numbers::window(0);
    return (rest + plane * (Numbers::window(1) * Numbers::window(2))) * vector;
  }

  // Rounded weights shift all sums of a channel alike, which shows after a norm and in long sums. Where the
  // last vector of channels has a free component, it compensates most of that at no cost: the mean of the
  // channels times what rounding drops of their weights. Only for forward passes with exact weights; else -1.
  static constexpr int spare = Numbers::compensates_weights && C::in_channels % vector != 0
                                   ? static_cast<int>(C::in_channels % vector)
                                   : -1;

  // Rows of x that the rows of a chunk read by `row_taps` row taps, counted from the first tap of the first
  // output row.
  static constexpr __device__ int first_x_row(int row_taps) {
    return C::delta(1) < 0 ? (row_taps - 1) * static_cast<int>(C::delta(1)) : 0;
  }
  static constexpr __device__ int x_rows(int row_taps) {
    const int delta = static_cast<int>(C::delta(1) < 0 ? -C::delta(1) : C::delta(1));
    return (chunk_rows - 1) * static_cast<int>(C::step(1)) + (row_taps - 1) * delta + 1;
  }
  // The output row that reads `x_row` by tap `tap`; -1 if there is none.
  static constexpr __device__ int row_of(int x_row, int tap) {
    const int distance = x_row - tap * static_cast<int>(C::delta(1));
    const int step = static_cast<int>(C::step(1));
    if (distance < 0 || distance % step != 0 || distance / step >= chunk_rows) return -1;
    return distance / step;
  }
  static constexpr __device__ bool is_read(int x_row, int row_taps) {
    for (int tap = 0; tap < row_taps; ++tap) {
      if (row_of(x_row, tap) >= 0) return true;
    }
    return false;
  }
  static constexpr int x_row_elements = Numbers::window(1) > 0 ? Numbers::window(2) * vector : 0;

  // The index of a weight without its output channel; -1 where there is none.
  static __device__ __forceinline__ int weight_index(const Entry& entry, int component) {
    const int channel = entry.channel + component;
    return entry.tap < 0 || channel >= C::in_channels ? -1 : channel * channel_stride + entry.tap;
  }
};

}  // namespace onepass
