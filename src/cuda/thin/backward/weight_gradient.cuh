// dweight of a tile, from its window and its dh in shared memory.
#pragma once

#include "thin/backward/backward.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct ThinBackward<C, Tail, Numbers>::WeightGradient {
  const Thread thread;

  // The index of a fragment of f16 dh.
  static __device__ __forceinline__ int half_group(int class_index, int row_tile, int group) {
    return (class_index * row_tiles + row_tile) * dh_groups + group;
  }

  // A job is a row tile of output channels by a group of 8 entries, with a product for each row tap and
  // component. The sum is over the positions of dh in shared memory. Where there are fewer jobs than warps,
  // the positions of a job are cut into parts.
  static constexpr int job_parts = Numbers::job_parts;

  // A job's products of f16 operands, 16 positions at a time.
  template <int row_taps, class Sums>
  __device__ __forceinline__ void multiply_halves_of(Sums& sums, int class_index, int row_tile, int job,
                                                     int part) const {
    constexpr int column = static_cast<int>(C::step(2)) * vector;  // from a position's to the next one's
    constexpr int steps = Numbers::tile(2) / 16;
    constexpr int blocks = Numbers::tile(0) * (Numbers::tile(1) / chunk_rows);
    const Operand* window =
        thread.s.passes.window + thread.s.group_window[job * 8 + thread.quad] + 2 * thread.in_quad * column;
    const uint4* dh = &thread.s.passes.half_dh[half_group(class_index, row_tile, 0)][thread.lane];
#pragma unroll(chunk_rows > 1 ? 1 : 4)
    for (int item = part; item < blocks * steps; item += job_parts) {
      const int row = item / steps * chunk_rows;
      const int k = item % steps;
      const int j0 = row / Numbers::tile(1);
      const int j1 = row % Numbers::tile(1);
      const Operand* columns =
          window +
          (j0 * static_cast<int>(C::step(0)) * Numbers::window(1) + j1 * static_cast<int>(C::step(1))) *
              Terms::x_row_elements +
          k * 16 * column;
      uint4 a[chunk_rows];
#pragma unroll
      for (int i = 0; i < chunk_rows; ++i) a[i] = dh[((row + i) * steps + k) * 32];
#pragma unroll
      for (int at = 0; at < Terms::x_rows(row_taps); ++at) {
        const int x_row = Terms::first_x_row(row_taps) + at;
        if (!Terms::is_read(x_row, row_taps)) continue;
        const Operand* x = columns + x_row * Terms::x_row_elements;
        uint32 b[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Vector first = *reinterpret_cast<const Vector*>(x + i * 8 * column);
          const Vector other = *reinterpret_cast<const Vector*>(x + (i * 8 + 1) * column);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            b[i][c * 2] = low_halves(first.of[c], other.of[c]);
            b[i][c * 2 + 1] = high_halves(first.of[c], other.of[c]);
          }
        }
#pragma unroll
        for (int tap = 0; tap < row_taps; ++tap) {
          if (Terms::row_of(x_row, tap) < 0) continue;
#pragma unroll
          for (int c = 0; c < components; ++c)
            mma::multiply<mma::F16>(sums[tap].total[c], a[Terms::row_of(x_row, tap)], b[0][c], b[1][c]);
        }
      }
    }
  }

  template <int row_taps>
  __device__ __forceinline__ void multiply_job(const typename Terms::Class& own, int class_index, int job,
                                               int part, bool exists) const {
    ProductSums<splits, components> sums[row_taps];
    const int row_tile = row_tiles == 1 ? 0 : (job - own.job) / own.groups;
    if constexpr (halves) {
      if (exists) multiply_halves_of<row_taps>(sums, class_index, row_tile, job, part);
    } else if (exists) {
      const float* dh = thread.s.passes.dh[class_index][row_tile * 8 + thread.quad] + 4 * thread.in_quad;
      const float* window = thread.s.passes.window + thread.s.group_window[job * 8 + thread.quad] +
                            2 * thread.in_quad * static_cast<int>(C::step(2)) * vector;
      constexpr int steps = Numbers::tile(2) / 8;
#pragma unroll 1
      for (int block = 0; block < Numbers::tile(0) * (Numbers::tile(1) / chunk_rows); ++block) {
        const int row = block * chunk_rows;
        const int j0 = row / Numbers::tile(1);
        const int j1 = row % Numbers::tile(1);
        const float* rows_of_x = window + (j0 * static_cast<int>(C::step(0)) * Numbers::window(1) +
                                           j1 * static_cast<int>(C::step(1))) *
                                              Terms::x_row_elements;
#pragma unroll 1
        for (int k = part; k < steps; k += job_parts) {
          uint4 a[chunk_rows][parts];
#pragma unroll
          for (int i = 0; i < chunk_rows; ++i) {
            const uint4 bits =
                *reinterpret_cast<const uint4*>(dh + ((row + i) * Numbers::tile(2) + k * 8) * 2);
            if constexpr (splits) {
              split_tf32(bits, a[i][0], a[i][1]);
            } else {
              a[i][0] = bits;
            }
          }
          const float* columns = rows_of_x + k * 8 * static_cast<int>(C::step(2)) * vector;
#pragma unroll
          for (int at = 0; at < Terms::x_rows(row_taps); ++at) {
            const int x_row = Terms::first_x_row(row_taps) + at;
            if (!Terms::is_read(x_row, row_taps)) continue;
            const float* x = columns + x_row * Terms::x_row_elements;
            const Vector first = *reinterpret_cast<const Vector*>(x);
            const Vector other = *reinterpret_cast<const Vector*>(x + static_cast<int>(C::step(2)) * vector);
            float b[components][2];
#pragma unroll
            for (int i = 0; i < components; ++i) {
              b[i][0] = first.of[i];
              b[i][1] = other.of[i];
            }
#pragma unroll
            for (int tap = 0; tap < row_taps; ++tap) {
              if (Terms::row_of(x_row, tap) >= 0) sums[tap].add(a[Terms::row_of(x_row, tap)], b);
            }
          }
        }
      }
    }
    // The parts add to the sums in shared memory in turns, each beginning with other sums.
    const int unit = own.unit + (job - own.job) * (row_taps * components);
#pragma unroll
    for (int turn = 0; turn < job_parts; ++turn) {
      if (turn > 0) __syncthreads();
#pragma unroll
      for (int rest = 0; rest < job_parts; ++rest) {
        if (!exists || (rest + part + turn) % job_parts != 0) continue;
#pragma unroll
        for (int i = rest; i < row_taps * components; i += job_parts) {
          sums[i / components].finish();
          const auto& value = sums[i / components].total[i % components];
          float4& total = thread.s.passes.weight[unit + i][thread.lane];
          const float4 before = total;
          total = {before.x + value[0], before.y + value[1], before.z + value[2], before.w + value[3]};
        }
      }
    }
  }

  template <int row_taps = Terms::most_row_taps>
  __device__ __forceinline__ void multiply_class(const typename Terms::Class& own, int class_index, int job,
                                                 int part, bool exists) const {
    if constexpr (row_taps <= 1 || C::classes(1) == 1) {
      multiply_job<(row_taps > 1 ? row_taps : 1)>(own, class_index, job, part, exists);
    } else if constexpr (!Terms::has_row_taps(row_taps)) {
      multiply_class<row_taps - 1>(own, class_index, job, part, exists);
    } else if (own.row_taps == row_taps) {
      multiply_job<row_taps>(own, class_index, job, part, exists);
    } else {
      multiply_class<row_taps - 1>(own, class_index, job, part, exists);
    }
  }

  __device__ __forceinline__ void multiply() const {
#pragma unroll 1
    for (int first = 0; first < Numbers::jobs * job_parts; first += warps) {
      const int index = first + thread.warp;
      const bool exists = index < Numbers::jobs * job_parts;
      const int job = exists ? index / job_parts : 0;
      const int class_index = classes == 1 ? 0 : Terms::class_of_job(thread.s.of_class, job);
      multiply_class(thread.s.of_class[class_index], class_index, job, index % job_parts, exists);
    }
  }

  // Sums of dweight in memory: of each ticket of the samples in flight. merge() adds those of a sample.
  __device__ __forceinline__ float* parts_of(int64 n, int segment) const {
    return thread.p.weight_parts +
           (n % thread.p.ring_samples * Numbers::segments + segment) * (Numbers::units * 128);
  }
  __device__ __forceinline__ void store(int64 n, int segment, const SampleScales& scales) const {
    auto* to = reinterpret_cast<float4*>(
        Numbers::segments > 1 ? parts_of(n, segment) : thread.p.weight_samples + n * Numbers::units * 128);
    for (int i = threadIdx.x; i < Numbers::units * 32; i += threads) {
      float4 sum = thread.s.passes.weight[i / 32][i % 32];
      if constexpr (halves) {
        const float x = inverse_of_power(scales.x), dh = inverse_of_power(scales.dh);
        sum = {sum.x * x * dh, sum.y * x * dh, sum.z * x * dh, sum.w * x * dh};
      }
      to[i] = sum;
    }
  }
  __device__ __forceinline__ void merge(int64 n) const {
    const auto* from = reinterpret_cast<const float4*>(parts_of(n, 0));
    auto* to = reinterpret_cast<float4*>(thread.p.weight_samples + n * Numbers::units * 128);
#pragma unroll 1
    for (int i = threadIdx.x; i < Numbers::units * 32; i += threads) {
      double sum[4] = {};
#pragma unroll 8
      for (int segment = 0; segment < Numbers::segments; ++segment) {
        const float4 part = __ldcg(from + segment * (Numbers::units * 32) + i);
        sum[0] += part.x;
        sum[1] += part.y;
        sum[2] += part.z;
        sum[3] += part.w;
      }
      to[i] = {static_cast<float>(sum[0]), static_cast<float>(sum[1]), static_cast<float>(sum[2]),
               static_cast<float>(sum[3])};
    }
  }
};

}  // namespace onepass
