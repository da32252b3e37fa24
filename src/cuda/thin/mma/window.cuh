// The window of x that a warp has in shared memory for its tile.
#pragma once

#include "thin/mma/weights.cuh"

namespace onepass {

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::Window {
  const Warp warp;

  // Where a window begins in the input.
  struct Origin {
    int z, y, x;       // of the window's first row, behind `lead`
    const char* from;  // its address in channel 0; may lie outside the input
  };
  __device__ __forceinline__ Origin origin_of(const Tile& tile) const {
    const int z = tile.z * static_cast<int>(C::step(0)) + Terms::low(0);
    const int y = tile.y * static_cast<int>(C::step(1)) + Terms::low(1);
    const int x = tile.x * static_cast<int>(C::step(2)) + Terms::low(2);
    return {z, y, x,
            static_cast<const char*>(warp.p.input) + (tile.n * C::input_stride(0) + z * C::input_stride(2) +
                                                      y * C::input_stride(3) + x * C::input_stride(4)) *
                                                         Tail::Input::bytes};
  }
  static __device__ __forceinline__ bool has(int position, int64 size) {
    return static_cast<unsigned>(position) < static_cast<unsigned>(size);
  }

  // body(place in channel 0 of the window, whether it lies in the input, address) for the lane's positions of
  // the window. Rows go 32 neighbours at a time, then the remainders of all rows together.
  template <class Body>
  __device__ __forceinline__ void for_each_position(const Tile& tile, Body&& body) const {
    constexpr int bytes = Tail::Input::bytes;
    constexpr int left = Numbers::window_x % 32;
    const Origin o = origin_of(tile);
#pragma unroll
    for (int x = 0; x < Numbers::window_x - left; x += 32) {
      const bool has_x = has(o.x + x + warp.lane, C::input_size(2));
      const char* from = o.from + (x + warp.lane) * C::input_stride(4) * bytes;
      int i = lead + x + warp.lane;
#pragma unroll 1
      for (int z = o.z; z < o.z + Numbers::window_z; ++z) {
        const bool has_z = has_x && has(z, C::input_size(0));
#pragma unroll 4
        for (int y = 0; y < window_y; ++y) {
          body(i, has_z && has(o.y + y, C::input_size(1)), from);
          i += row_pitch;
          from += C::input_stride(3) * bytes;
        }
        from += (C::input_stride(2) - window_y * C::input_stride(3)) * bytes;
      }
    }
#pragma unroll 1
    for (int k = warp.lane; k < Numbers::window_z * window_y * left; k += 32) {
      const int row = k / (left > 0 ? left : 1);
      const int x = Numbers::window_x - left + (k - row * left);
      const int y = row % window_y, z = row / window_y;
      const int64 at = z * C::input_stride(2) + y * C::input_stride(3) + x * C::input_stride(4);
      body(row * row_pitch + lead + x,
           has(o.x + x, C::input_size(2)) && has(o.y + y, C::input_size(1)) && has(o.z + z, C::input_size(0)),
           o.from + at * bytes);
    }
  }

  // body(place in the window, bytes of it in the input, address) for the lane's vectors of the window,
  // several rows at a time. Channels are `plane_to` elements apart.
  template <int plane_to, class Body>
  __device__ __forceinline__ void for_each_vector(const Tile& tile, Body&& body) const {
    constexpr int bytes = Tail::Input::bytes;
    constexpr int of_row = row_pitch / input_width;
    constexpr int lanes = of_row < 32 ? of_row : 32;  // of a row
    constexpr int rows = 32 / lanes;
    const Origin o = origin_of(tile);
    const int own_row = warp.lane / lanes, own = warp.lane - own_row * lanes;
    if (own_row >= rows) return;
    // With few vectors all loops are unrolled: the bounds of a row are tested once for all channels.
    constexpr int rows_at_once = (window_y + rows - 1) / rows;
    constexpr bool all_at_once =
        (of_row + lanes - 1) / lanes * rows_at_once * Numbers::window_z * C::in_channels <= 32;
#pragma unroll
    for (int v = 0; v < of_row; v += lanes) {
      if (of_row % lanes != 0 && own + v >= of_row) break;
      const int x = o.x - lead + (own + v) * input_width;
      const int left = static_cast<int>(C::input_size(2)) - x;
      const int of_vector = x < 0 || left <= 0 ? 0 : left < input_width ? left * bytes : 16;
      const char* channel = o.from + ((own + v) * input_width - lead + own_row * C::input_stride(3)) * bytes;
      const int to = own_row * row_pitch + (own + v) * input_width;
#pragma unroll(all_at_once ? static_cast <int>(C::in_channels) : 1)
      for (int c = 0; c < C::in_channels; ++c) {
#pragma unroll(all_at_once ? Numbers::window_z : 1)
        for (int z = 0; z < Numbers::window_z; ++z) {
          const int of_plane = has(o.z + z, C::input_size(0)) ? of_vector : 0;
#pragma unroll(all_at_once ? rows_at_once : 4)
          for (int i = 0; i < rows_at_once; ++i) {
            const int y = i * rows;
            if (y + rows > window_y && y + own_row >= window_y) continue;
            body(
                to + c * plane_to + (z * window_y + y) * row_pitch,
                has(o.y + y + own_row, C::input_size(1)) ? of_plane : 0,
                channel + (c * C::input_stride(1) + z * C::input_stride(2) + y * C::input_stride(3)) * bytes);
          }
        }
      }
    }
  }
  static __device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
  }
  // Whether rows of the input are vectors: the same in all threads.
  __device__ __forceinline__ bool by_vectors() const {
    return Numbers::rows_are_vectors && reinterpret_cast<uint64>(warp.p.input) % 16 == 0;
  }

  // Padding of the window is zero at all times.
  __device__ __forceinline__ void clear() const {
    for (int i = warp.lane; i < windows * window_words; i += 32) warp.area.x[i] = 0.0f;
    __syncwarp();
  }

  __device__ __forceinline__ unsigned char* raw() const {
    return prefetches ? reinterpret_cast<unsigned char*>(warp.area.raw) : warp.area.stage;
  }

  // Starts the copy of a tile's window; no lane reads the old one any more. Positions outside the input
  // become zeros.
  __device__ __forceinline__ void send_for(const Tile& tile, float* x) const {
    if (by_vectors()) {
      for_each_vector<is_short ? raw_plane : plane>(tile, [&](int to, int bytes, const char* from) {
        const void* place = is_short ? static_cast<const void*>(raw() + to * 2) : x + to;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(place)), "l"(from),
                     "r"(bytes)
                     : "memory");
      });
    } else if constexpr (!is_short) {
      for_each_position(tile, [&](int to, bool inside, const char* from) {
        const int bytes = inside ? 4 : 0;
#pragma unroll
        for (int c = 0; c < C::in_channels; ++c) {
          asm volatile(
              "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(x + c * plane + to)),
              "l"(from + c * C::input_stride(1) * 4), "r"(bytes)
              : "memory");
        }
      });
    }
  }

  // Waits for the window, converts it, and says how the tile is computed.
  __device__ __forceinline__ Way take(const Tile& tile, const Limits& limits, float* x) const {
    float largest = 0.0f;
    if (is_short && !by_vectors()) {
      for_each_position(tile, [&](int to, bool inside, const char* from) {
#pragma unroll
        for (int c = 0; c < C::in_channels; ++c) {
          float value = 0.0f;
          if (inside) value = load_one<typename Tail::Input>(from, c * C::input_stride(1));
          largest = pointwise::maximum(fabsf(value), largest);
          x[c * plane + to] = value;
        }
      });
    } else {
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncwarp();
      const auto take = [&](const void* from, float* to) {
        float v[input_width];
        Packed<typename Tail::Input, input_width> packed;
        packed.load_shared(from);
        packed.unpack(v);
#pragma unroll
        for (int k = 0; k < input_width; ++k) {
          largest = pointwise::maximum(fabsf(v[k]), largest);
          if constexpr (C::rounds_to_tf32) v[k] = round_operand<C>(v[k]);
        }
        if constexpr (is_short || C::rounds_to_tf32) {
#pragma unroll
          for (int k = 0; k < input_width; k += 4)
            *reinterpret_cast<float4*>(to + k) = float4{v[k], v[k + 1], v[k + 2], v[k + 3]};
        }
      };
      if constexpr (is_short && plane == raw_plane) {
        // Lanes behind the end take the last vector again: no branches.
        constexpr int last = window_words - input_width;
#pragma unroll 1
        for (int first = 0; first < window_words; first += 32 * input_width) {
          const int i = first + warp.lane * input_width < last ? first + warp.lane * input_width : last;
          take(raw() + i * 2, x + i);
        }
      } else if constexpr (is_short) {
#pragma unroll 1
        for (int c = 0; c < C::in_channels; ++c) {
#pragma unroll 2
          for (int i = warp.lane * 8; i < raw_plane; i += 32 * 8)
            take(raw() + (c * raw_plane + i) * 2, x + c * plane + i);
        }
      } else {
#pragma unroll 2
        for (int i = warp.lane * 4; i < window_words; i += 32 * 4) take(x + i, x + i);
      }
    }
    __syncwarp();
    if (Chains::narrows && __all_sync(0xffffffffu, largest <= limits.narrow)) return narrow;
    return __all_sync(0xffffffffu, largest <= limits.wide) ? wide : careful;
  }
};

}  // namespace onepass
