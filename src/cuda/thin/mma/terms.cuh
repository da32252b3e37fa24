// The terms of each class in groups of four, one for each lane of a quad. A group has four input channels of
// a tap. With one or two input channels it has four or two taps. (Not with many taps: a thread has an address
// for each pattern of four taps.)
#pragma once

#include "thin/thin.cuh"

namespace onepass {

template <int Value>
struct Constant {
  static constexpr int value = Value;
  constexpr __device__ operator int() const { return Value; }
};

// body(Constant<0>{}), ..., body(Constant<Count - 1>{}).
template <int Count, int First = 0, class Body>
__device__ __forceinline__ void for_constant(Body&& body) {
  if constexpr (First < Count) {
    body(Constant<First>{});
    for_constant<Count, First + 1>(body);
  }
}

// D = A B + C, A 16 x 8 (or 16 x 4) of tf32 by rows, B by columns.
__device__ __forceinline__ void mma_k8(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1,
                                       const float* c) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
}
__device__ __forceinline__ void mma_k4(float (&d)[4], const uint32 (&a)[4], uint32 b0, const float* c) {
  asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%7, %8, %9, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// The terms of each class in groups of four, a lane of a quad each: what the products of one warp are. A
// group has four input channels of a tap; where there are one or two, those of four or two taps (not of many:
// a thread has an address for each way in which four taps lie).
template <class C>
struct ThinTerms {
  static constexpr int vectors = (C::in_channels + 3) / 4;  // of four input channels
  static constexpr int taps_at_once = C::in_channels == 1 && C::taps <= 64 ? 4 : C::in_channels == 2 ? 2 : 1;

  struct Term {
    bool exists;
    int z, y, x;  // of the window, from the cell's first position
    int tap;
    int channel;
  };
  static constexpr __device__ int classes(int d) { return static_cast<int>(C::classes(d)); }
  static constexpr __device__ int count(int d, int r) { return static_cast<int>(C::count(d, r)); }
  static constexpr __device__ int offset(int d, int r, int m) {
    return static_cast<int>(C::base(d, r) + m * C::delta(d));
  }
  static constexpr __device__ int tap(int d, int r, int m) {
    return static_cast<int>(C::first(d, r) + m * C::tap_step(d));
  }
  // The lowest offset of all classes, and how far it is to the highest.
  static constexpr __device__ int low(int d) {
    int least = 1 << 30;
    for (int r = 0; r < classes(d); ++r) {
      for (int m = 0; m < count(d, r); ++m) least = offset(d, r, m) < least ? offset(d, r, m) : least;
    }
    return least == 1 << 30 ? 0 : least;
  }
  static constexpr __device__ int reach(int d) {
    int most = low(d);
    for (int r = 0; r < classes(d); ++r) {
      for (int m = 0; m < count(d, r); ++m) most = offset(d, r, m) > most ? offset(d, r, m) : most;
    }
    return most - low(d);
  }
  static constexpr __device__ int taps(int rz, int ry, int rx) {
    return count(0, rz) * count(1, ry) * count(2, rx);
  }
  // Of the class that has most.
  static constexpr __device__ int most_taps() {
    int most = 0;
    for (int i = 0; i < classes(0) * classes(1) * classes(2); ++i) {
      const int own = taps(i / (classes(1) * classes(2)), i / classes(2) % classes(1), i % classes(2));
      most = own > most ? own : most;
    }
    return most;
  }
  static constexpr __device__ int groups(int rz, int ry, int rx) {
    return (taps(rz, ry, rx) + taps_at_once - 1) / taps_at_once * vectors;
  }
  // The term of a lane of a quad. A term that does not exist reads the element of another term of its group:
  // it is finite, and its weight is zero.
  static constexpr __device__ Term term(int rz, int ry, int rx, int group, int lane) {
    const int first = group / vectors * taps_at_once;
    int i = first + (taps_at_once > 1 ? lane / static_cast<int>(C::in_channels) : 0);
    int channel = taps_at_once > 1 ? lane % static_cast<int>(C::in_channels) : group % vectors * 4 + lane;
    const bool exists = i < taps(rz, ry, rx) && channel < C::in_channels;
    if (i >= taps(rz, ry, rx)) i = first;
    if (channel >= C::in_channels) channel = static_cast<int>(C::in_channels) - 1;
    // The two groups of a product are in neighbouring registers. With several classes, a pair of planes gives
    // such groups in most of them.
    const bool planes_first = taps_at_once == 1 && classes(0) * classes(1) * classes(2) > 1;
    const int before_x = planes_first ? count(0, rz) : 1;
    const int x = i / before_x % count(2, rx);
    const int y = i / before_x / count(2, rx) % count(1, ry);
    const int z = planes_first ? i % count(0, rz) : i / count(2, rx) / count(1, ry);
    return {
        exists,
        offset(0, rz, z) - low(0),
        offset(1, ry, y) - low(1),
        offset(2, rx, x) - low(2),
        (tap(0, rz, z) * static_cast<int>(C::kernel(1)) + tap(1, ry, y)) * static_cast<int>(C::kernel(2)) +
            tap(2, rx, x),
        channel};
  }
  // Products of all classes before this one.
  static constexpr __device__ int products_before(int rz, int ry, int rx) {
    int sum = 0;
    for (int i = 0; i < (rz * classes(1) + ry) * classes(2) + rx; ++i) {
      sum += (groups(i / (classes(1) * classes(2)), i / classes(2) % classes(1), i % classes(2)) + 1) / 2;
    }
    return sum;
  }
  static constexpr int products = products_before(classes(0), 0, 0);
};

// Distances between the terms of a group in shared memory, given the pitches of channels, planes and rows.
// There are few different patterns.
template <class C, int Plane, int RowsOfPlane, int Row>
struct ThinPatterns {
  using Terms = ThinTerms<C>;
  static constexpr int most = 32;
  static constexpr __device__ int word(const typename Terms::Term& t) {
    return t.channel * Plane + (t.z * RowsOfPlane + t.y) * Row + t.x;
  }
  struct Table {
    int count = 0;
    int distance[most][4] = {};

    constexpr __device__ int find(int rz, int ry, int rx, int group) const {
      const int first = word(Terms::term(rz, ry, rx, group, 0));
      for (int i = 0; i < count; ++i) {
        bool same = true;
        for (int lane = 1; lane < 4; ++lane)
          same &= distance[i][lane] == word(Terms::term(rz, ry, rx, group, lane)) - first;
        if (same) return i;
      }
      return count;
    }
  };
  static constexpr __device__ Table make() {
    Table table;
    for (int i = 0; i < Terms::classes(0) * Terms::classes(1) * Terms::classes(2); ++i) {
      const int rz = i / (Terms::classes(1) * Terms::classes(2));
      const int ry = i / Terms::classes(2) % Terms::classes(1);
      const int rx = i % Terms::classes(2);
      for (int group = 0; group < Terms::groups(rz, ry, rx); ++group) {
        const int at = table.find(rz, ry, rx, group);
        if (at < table.count || at == most) continue;
        const int first = word(Terms::term(rz, ry, rx, group, 0));
        for (int lane = 0; lane < 4; ++lane)
          table.distance[at][lane] = word(Terms::term(rz, ry, rx, group, lane)) - first;
        ++table.count;
      }
    }
    return table;
  }
  static constexpr Table table = make();
};

}  // namespace onepass
