// The mainloop of the row "gemm_mma": weights by asynchronous copies, products by mma.sync.
#pragma once

#include "gemm/mma/source.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmMmaMainloop {
  using Source = GemmMmaSource<C, Tail, Numbers>;

  const GemmMmaBlock<C, Tail, Numbers> block;
  const Source source{block};

  static constexpr int joint_vectors = Numbers::joint_taps * Numbers::vectors;
  static constexpr int steps = joint_vectors / 2;  // products of a joint
  static constexpr bool splits = Source::splits;

  // First entry of the window that the tile's i-th position reads.
  static __device__ __forceinline__ int first_place(int i) {
    const int row = i / Numbers::box(2);
    int plane = row / Numbers::box(1);
    // Positions that only fill the tile read the first entry.
    if (plane >= Numbers::box(0)) return 0;
    return (plane * Numbers::entries(1) + row - plane * Numbers::box(1)) * Numbers::entries(2) + i -
           row * Numbers::box(2);
  }

  static constexpr int of_joint = Numbers::parts * joint_vectors * Numbers::tile_rows;  // vectors
  static constexpr int of_group = Numbers::group_joints * of_joint;

  // The groups of joints of a tile, chunk after chunk. The last one of a chunk may be partial.
  struct Groups {
    const uint4* from;    // the first vector of this thread
    const int of_chunk;   // vectors
    int left = of_chunk;  // of the chunk

    __device__ __forceinline__ int count() const {
      return Numbers::partial_groups && left < of_group ? left : of_group;
    }
    __device__ __forceinline__ void advance() {
      from += count();
      if constexpr (Numbers::partial_groups) left = left > of_group ? left - of_group : of_chunk;
    }
  };

  // Starts the copies of a group.
  __device__ __forceinline__ void send_weights(const Groups& group, int stage) const {
    const uint4* const from = group.from;
    const uint32 to = barrier::shared_address(&block.s.rings.weights[stage][0][0][0][0]) + block.thread * 16;
#pragma unroll
    for (int i = 0; i < (of_group + Numbers::threads - 1) / Numbers::threads; ++i) {
      if ((!Numbers::partial_groups && of_group % Numbers::threads == 0) ||
          i * Numbers::threads + block.thread < group.count())
        mma::copy_vector(to + i * Numbers::threads * 16, from + i * Numbers::threads);
    }
  }

  // Whether a lane has addresses of the second vector of a product.
  __device__ __forceinline__ bool has_second() const { return block.lane / 8 % 2 != 0; }
  // Where the vector of a lane in product `k` of a joint lies, from the first vector of the window: the shift
  // of its tap, and the vector of the tap. The two of one tap are neighbours, which `places` counts.
  __device__ __forceinline__ uint32 vector_of(int k, uint32 first_shift, uint32 second_shift) const {
    constexpr int vectors = Numbers::vectors;
    if constexpr (Numbers::joint_taps == 1) {
      return first_shift + static_cast<uint32>(2 * k * Numbers::window_pitch * 16);
    } else {
      const auto at = [&](int slot) {
        return (slot < vectors ? first_shift : second_shift) +
               static_cast<uint32>(slot % vectors * Numbers::window_pitch * 16);
      };
      return has_second() ? at(2 * k + 1) : at(2 * k);
    }
  }

  // The products of a joint, of one tap or two. `whole`: the second tap exists.
  __device__ __forceinline__ void multiply(GemmMmaSums<Numbers>& d, uint32 weights, uint32 x,
                                           uint32 first_shift, uint32 second_shift, bool whole,
                                           const uint32 (&places)[Numbers::column_tiles / 2]) const {
    constexpr uint32 weights_part = joint_vectors * Numbers::tile_rows * 16;
    constexpr uint32 x_part = Numbers::vectors * Numbers::window_pitch * 16;
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      uint32 b[Numbers::parts][Numbers::column_tiles / 2][4];
      const uint32 own_x = x + vector_of(k, first_shift, second_shift);
#pragma unroll
      for (int part = 0; part < Numbers::parts; ++part) {
#pragma unroll
        for (int j = 0; j < Numbers::column_tiles / 2; ++j) {
          if constexpr (Source::by_planes) {
            mma::load_turned_matrices(b[part][j], own_x + places[j]);
          } else {
            mma::load_matrices(b[part][j], own_x + places[j] + part * x_part);
          }
          if constexpr (Numbers::odd_taps) {
            // What the tap of zeros would meet may be infinite.
#pragma unroll
            for (int word = 0; word < 4; ++word) {
              if (2 * k + word % 2 >= Numbers::vectors && !whole) b[part][j][word] = 0;
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < Numbers::row_tiles; ++i) {
        uint32 a[Numbers::parts][4];
        const uint32 own = weights + (k * 2 * Numbers::tile_rows + i * 16) * 16;
#pragma unroll
        for (int part = 0; part < Numbers::parts; ++part)
          mma::load_matrices(a[part], own + part * weights_part);
          // Small products first.
#pragma unroll
        for (int product = splits ? 2 : 0; product >= 0; --product) {
          const int of_weights = product == 1 ? Numbers::parts - 1 : 0;
          const int of_x = product == 2 ? Numbers::parts - 1 : 0;
#pragma unroll
          for (int j = 0; j < Numbers::column_tiles; ++j)
            Numbers::Product::run(d[i][j], a[of_weights], &b[of_x][j / 2][j % 2 * 2]);
        }
      }
    }
  }

  static __device__ __forceinline__ void clear(GemmMmaSums<Numbers>& d) {
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Numbers::column_tiles; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) d[i][j][k] = 0.0f;
      }
    }
  }
  static __device__ __forceinline__ void add(GemmMmaSums<Numbers>& to, const GemmMmaSums<Numbers>& d) {
#pragma unroll
    for (int i = 0; i < Numbers::row_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < Numbers::column_tiles; ++j) {
#pragma unroll
        for (int k = 0; k < 4; ++k) to[i][j][k] += d[i][j][k];
      }
    }
  }

  __device__ __forceinline__ void convolve(const GemmMmaItem<C, Numbers>& item, const ThinClass<C>& own,
                                           GemmMmaSums<Numbers>& sums) const {
    using Geometry = GemmMmaGeometry<C, Numbers>;
    const int taps = own.count[0] * own.count[1] * own.count[2];
    const int joints = Geometry::joints(taps);
    Groups weights{static_cast<const uint4*>(block.p.packed) +
                       (static_cast<int64>(group_of<C>(item.n) * Geometry::joints_before(Geometry::classes) +
                                           Geometry::joints_before(item.class_index)) *
                            Numbers::channel_tiles +
                        static_cast<int64>(item.channel_tile) * joints) *
                           (Numbers::chunks * of_joint) +
                       block.thread,
                   joints * of_joint};
    const int groups = (joints + Numbers::group_joints - 1) / Numbers::group_joints;
    const int all = groups * Numbers::chunks;
    constexpr int ahead = Numbers::stages - 1;
    const bool in_vectors =
        (Source::takes_runs || Source::copies) && reinterpret_cast<uint64>(block.p.input) % 16 == 0;
    // Copies of x go with the first group of weights of the chunk before. There are at least `ahead` of them.
    if constexpr (Source::copies) {
      if (all > 0) source.copy(item, in_vectors, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      if (i < all) send_weights(weights, i);
      weights.advance();
      mma::commit();
    }
    float largest = 0.0f;
    typename Source::Vector x[Numbers::batch_vectors];
    constexpr int rounds = Source::copies ? 0 : Source::rounds;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
      source.load(item, in_vectors, 0, i, x);
      source.store(in_vectors, 0, x, largest);
    }
    uint32 places[Numbers::column_tiles / 2];
#pragma unroll
    for (int j = 0; j < Numbers::column_tiles / 2; ++j) {
      const int vector = (Numbers::joint_taps == 1 && has_second() ? Numbers::window_pitch : 0) * 16;
      const int first = block.first_column + j * 16 + block.lane / 16 * 8;
      // A lane has the address of a column's channels, or of a channel's columns.
      places[j] = static_cast<uint32>(
          vector + (Source::by_planes ? (block.lane % 8 * Numbers::window_pitch + first_place(first)) *
                                            Geometry::place_bytes
                                      : first_place(first + block.lane % 8) * Geometry::place_bytes));
    }
    const uint32 weights_begin =
        barrier::shared_address(&block.s.rings.weights[0][0][0][0][0]) +
        static_cast<uint32>(block.lane / 16 * Numbers::tile_rows + block.first_row + block.lane % 16) * 16;
    const uint32 x_begin = barrier::shared_address(&block.s.rings.x[0][0][0][0]);
    constexpr uint32 x_bytes = Numbers::parts * Numbers::vectors * Numbers::window_pitch * 16;
    // Split operands: at most 64 terms are summed in the tensor cores, which truncate.
    GemmMmaSums<Numbers> partial;
    GemmMmaSums<Numbers>& d = splits ? partial : sums;
    constexpr int most_terms = 64;
    constexpr int joint_terms = joint_vectors * Numbers::of_vector;
    constexpr int joints_together = most_terms / joint_terms > 0 ? most_terms / joint_terms : 1;
    clear(sums);
    if constexpr (splits) clear(partial);
    int together = 0;
    int step = 0;
    int stage = 0;
    constexpr int batches = Numbers::group_batches;  // of loads of x, during a group
#pragma unroll 1
    for (int chunk = 0; chunk < Numbers::chunks; ++chunk) {
      const uint32 window_begin = x_begin + (chunk % 2) * x_bytes;
      const bool more = chunk + 1 < Numbers::chunks;
#pragma unroll 1
      for (int group = 0; group < groups; ++group) {
        mma::wait<ahead - 1>();
        // This step's weights and window have arrived, and the stage of the step before is free.
        __syncthreads();
        const int free = stage == 0 ? ahead : stage - 1;
        if (step + ahead < all) send_weights(weights, free);
        weights.advance();
        if constexpr (Source::copies) {
          if (group == 0 && more) source.copy(item, in_vectors, chunk + 1, (chunk + 1) % 2);
        }
        mma::commit();
#pragma unroll
        for (int t = 0; t < Numbers::group_joints; ++t) {
          const int joint = group * Numbers::group_joints + t;
          // A single batch of loads overlaps with the whole group.
          const int number = group * batches + t;
          const bool loads = t < batches && more && number < rounds;
          if (loads) source.load(item, in_vectors, chunk + 1, number, x);
          if (!Numbers::partial_groups || joint < joints) {
            const int* shifts = block.s.tap_shifts + joint * Numbers::joint_taps;
            multiply(d, weights_begin + (stage * of_group + t * of_joint) * 16, window_begin,
                     static_cast<uint32>(shifts[0]), static_cast<uint32>(shifts[Numbers::joint_taps - 1]),
                     joint * Numbers::joint_taps + Numbers::joint_taps <= taps, places);
          }
          if (batches > 1 && loads) source.store(in_vectors, (chunk + 1) % 2, x, largest);
          if constexpr (splits) {
            if (++together == joints_together) {
              add(sums, partial);
              clear(partial);
              together = 0;
            }
          }
        }
        if (batches == 1 && more && group < rounds) source.store(in_vectors, (chunk + 1) % 2, x, largest);
        ++step;
        stage = stage == ahead ? 0 : stage + 1;
      }
      if (more && taps > 0) {
#pragma unroll 1
        for (int i = groups * batches; i < rounds; ++i) {
          source.load(item, in_vectors, chunk + 1, i, x);
          source.store(in_vectors, (chunk + 1) % 2, x, largest);
        }
      }
    }
    if constexpr (splits) add(sums, partial);
    if constexpr (Numbers::guards) {
      // Bits of magnitudes are ordered as the magnitudes are, and NaN is above infinity.
      const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
      if (block.lane == 0 && item.channel_tile == 0) atomicMax(block.p.guard + item.n, bits);
    } else if constexpr (splits) {
      if (!(largest <= most_split)) gemm::mark_sample(block.p, item.n);
    }
    mma::wait<0>();
  }
};

}  // namespace onepass
