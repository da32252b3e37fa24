// Packs weights for the row "gemm_mma" where classes of a transposed convolution are tiles of their own:
// vectors of 16 bytes,
//   [group][class][channel tile][chunk of input channels][joint][part][tap of the joint][vector][row of the
//   tile]
// and zeros where there is no channel or no tap. f32 weights are rounded to tf32, or split in two of it.
#pragma once

#include "gemm/mma/layout.cuh"

namespace onepass {

// `C` is the convolution as the mainloop sees it. A thread packs a vector of a row with all its taps, which
// are neighbours in memory.
template <class C, class Tail, class Numbers>
struct GemmMmaPack {
  using Parameters = GemmMmaPackParameters;
  static constexpr int threads = 256;
  using Geometry = GemmMmaGeometry<C, Numbers>;
  using Whole = typename C::Whole;
  using Weight = typename C::Weight;
  static constexpr int of_vector = 16 / Weight::bytes;
  static constexpr int padded_rows = Numbers::channel_tiles * Numbers::tile_rows;
  static constexpr int all_vectors = Numbers::chunks * Numbers::vectors;

  const Parameters& p;

  // Offset of the taps of an input and an output channel of a group.
  static __device__ __forceinline__ int64 first_of(int group, int o, int c) {
    return group * group_weights<Whole> + (C::transposed ? static_cast<int64>(c) * C::channels + o
                                                         : static_cast<int64>(o) * Whole::in_channels + c) *
                                              C::taps;
  }

  __device__ __forceinline__ void run() const {
    const int64 index = static_cast<int64>(blockIdx.x) * threads + threadIdx.x;
    const int row = static_cast<int>(index % padded_rows);
    const int vector = static_cast<int>(index / padded_rows % all_vectors);
    const int rest = static_cast<int>(index / padded_rows / all_vectors);
    if (rest >= C::groups * Geometry::classes) return;
    const int group = C::groups == 1 ? 0 : rest / Geometry::classes;
    const int of_tiles = rest - group * Geometry::classes;  // class of the tiles
    // A channel has a row for each of its classes, or for each tap along x.
    constexpr int of_channel = Geometry::row_classes * Numbers::row_taps;
    const int channel = row / of_channel;
    const int in_channel = row - channel * of_channel;
    const ThinClass<C> own(Numbers::merges_classes ? in_channel : of_tiles);
    const int first_x = own.first[2] + (Numbers::row_taps > 1 ? in_channel * own.count[2] : 0);
    const int taps = own.count[0] * own.count[1] * own.count[2];
    const int joints = Geometry::joints(taps);
    constexpr int of_tap = Numbers::vectors * Numbers::tile_rows;
    constexpr int of_part = Numbers::joint_taps * of_tap;
    constexpr int of_joint = Numbers::parts * of_part;
    const int channel_tile = row / Numbers::tile_rows;
    const int chunk = vector / Numbers::vectors;
    uint4* to = static_cast<uint4*>(p.packed) +
                (static_cast<int64>(group * Geometry::joints_before(Geometry::classes) +
                                    Geometry::joints_before(of_tiles)) *
                     Numbers::channel_tiles +
                 static_cast<int64>(channel_tile) * joints) *
                    (Numbers::chunks * of_joint) +
                static_cast<int64>(chunk) * joints * of_joint +
                vector % Numbers::vectors * Numbers::tile_rows + row % Numbers::tile_rows;
    bool finite = true;
    int t = 0;
    for (int m0 = 0; m0 < own.count[0]; ++m0) {
      for (int m1 = 0; m1 < own.count[1]; ++m1) {
        for (int m2 = 0; m2 < own.count[2]; ++m2, ++t) {
          const int of_row = static_cast<int>(
              ((own.first[0] + m0 * C::tap_step(0)) * C::kernel(1) + own.first[1] + m1 * C::tap_step(1)) *
                  C::kernel(2) +
              first_x);
          float value[of_vector];
#pragma unroll
          for (int k = 0; k < of_vector; ++k) {
            const int of_span = vector * of_vector + k;
            const int c = of_span % static_cast<int>(Whole::in_channels);
            const int tap = m2 * Numbers::span + of_span / static_cast<int>(Whole::in_channels);
            const bool exists = channel < C::channels && of_span < C::in_channels &&
                                tap < static_cast<int>(Whole::count(2, own.r[2]));
            value[k] = exists ? load_one<Weight>(p.weights,
                                                 first_of(group, channel, c) + of_row + tap * C::tap_step(2))
                              : 0.0f;
            finite &= fabsf(value[k]) <= most_split;
          }
          uint4* place =
              to + static_cast<int64>(t / Numbers::joint_taps) * of_joint + t % Numbers::joint_taps * of_tap;
          if constexpr (Weight::bytes == 2) {
            *place = {Weight::pack(value[0], value[1]), Weight::pack(value[2], value[3]),
                      Weight::pack(value[4], value[5]), Weight::pack(value[6], value[7])};
          } else {
#pragma unroll
            for (int part = 0; part < Numbers::parts; ++part) {
              uint32 word[4];
#pragma unroll
              for (int k = 0; k < 4; ++k) {
                const float rounded = round_operand<C>(value[k]);
                word[k] = __float_as_uint(rounded);
                value[k] -= rounded;
              }
              place[part * of_part] = {word[0], word[1], word[2], word[3]};
            }
          }
        }
      }
    }
    if (Numbers::odd_taps && taps % Numbers::joint_taps != 0) {
#pragma unroll
      for (int part = 0; part < Numbers::parts; ++part)
        to[static_cast<int64>(joints - 1) * of_joint + part * of_part + of_tap] = uint4{0, 0, 0, 0};
    }
    if (!finite) atomicMax(p.mark, static_cast<uint32>(redo_all));
  }
};

}  // namespace onepass
