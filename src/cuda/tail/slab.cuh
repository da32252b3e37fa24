// What kernels share that hold a slab on the chip: the rows that vectors lie in, and the slab's norm.
#pragma once

#include "tail/parameters.cuh"
#include "tail/tail.cuh"

namespace onepass {

// The row (channel) of a slab that a thread is in. `load(row)` is called where the row changes; a thread's
// positions go upwards, so that this is rare. `wraps`: positions also go back to the beginning.
template <int spatial, bool wraps, class Load>
struct RowCursor {
  int row;
  int end;  // the position where the row ends
  Load load;

  __device__ __forceinline__ void find(int position) {
    row = position / spatial;
    end = row * spatial + spatial;
    load(row);
  }
  __device__ __forceinline__ void enter(int position) {
    if (position >= end || (wraps && position < end - spatial)) find(position);
  }
  // Whether the positions from `begin` to `last` lie in one row, which is entered.
  __device__ __forceinline__ bool covers(int begin, int last) {
    enter(begin);
    return last <= end;
  }

  // Calls f(first, last) for the parts [first, last) of the vector at `position` that lie in one row.
  template <int Width, class F>
  __device__ __forceinline__ void visit(int position, F&& f) {
    if (position + Width > end || (wraps && position < end - spatial)) {
      find(position);
      if (Width > 1 && position + Width > end) {
#pragma unroll
        for (int k = 0; k < Width; ++k) {
          if (position + k >= end) {
            ++row;
            end += spatial;
            load(row);
          }
          f(k, k + 1);
        }
        return;
      }
    }
    f(0, Width);
  }
};
template <int spatial, bool wraps = false, class Load>
__device__ __forceinline__ RowCursor<spatial, wraps, Load> row_cursor(Load load) {
  return {0, 0, load};
}

// Statistics of a slab as a thread applies them to distances from its pivot.
struct SlabNorm {
  float mean;
  float rstd;
  float moved;   // the mean's distance from the thread's pivot
  float factor;  // of the norm's weight

  // The slab's mean is `from + moved_from`.
  template <class Tail>
  static __device__ __forceinline__ SlabNorm of(float from, float moved_from, float m2, float pivot) {
    constexpr float per_element =
        1.0f / static_cast<float>(static_cast<int>(Tail::group_channels) * static_cast<int>(Tail::spatial));
    SlabNorm norm;
    norm.mean = from + moved_from;
    norm.rstd = rsqrtf(m2 * per_element + Tail::eps);
    norm.moved = (from - pivot) + moved_from;
    norm.factor = norm_factor<Tail>(norm.rstd, norm.mean, m2);
    return norm;
  }
};

}  // namespace onepass
