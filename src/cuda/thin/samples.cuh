// The mainloop of a thin convolution whose block ends in a mean, on tensor cores: the columns of a product
// are eight samples.
//
//   D[channel, sample] += A[channel, term] B[term, sample]   (m16n8k16, at one output position)
//
// Elements of eight samples lie side by side in shared memory (16 bytes a position). Every tap of every
// position is then a legal matrix row (ldmatrix.trans): nothing is shifted or stored twice. A thread's sums
// belong to the same channels and samples throughout. A term is (input channel, tap of the first and of the
// last dimension), 16 a product. The taps of the middle dimension slide: B of a window row serves all output
// rows that it meets, `Numbers::rows` of them at `Numbers::columns` columns in registers.
//
// A tile is a strip of output rows, over all columns and all of the first dimension, whose input planes pass
// through a ring in shared memory. Moves x (rows + halo) / rows times, mostly from the second-level cache,
// and writes means.
//
// Elements of 16 bits are multiplied as they are. f32 ones are split into f16 parts:
//   tf32   x as one (the same 10 bits as TF32), weights as two (22 bits: as good as exact)
//   f32    both as two, three products, sums moved to CUDA cores' f32 after each group of 16 terms times the
//          middle taps
// Operands are scaled by powers of two first: weights of a channel to [2^13, 2^14), x by 2^5. Samples whose
// values overflow f16 are computed again on CUDA cores: those with an element of 2047 or more, or not finite.
// So are samples with a channel in which nothing reaches 2^-6 and something is not exact in f16. Elsewhere an
// f16 denormal is off by at most 2^-24 of the channel's largest element.
#pragma once

#include "device/mma.cuh"
#include "thin/halves.cuh"

namespace onepass {

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void load_matrices(uint32 address, uint32 (&b)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

// D += A B, 16 x 8 x 16.
template <class Half>
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& a, uint32 b0, uint32 b1) {
  if constexpr (is_same<Half, bf16>) {
    mma::multiply<mma::Bf16>(d, a, b0, b1);
  } else {
    mma::multiply<mma::F16>(d, a, b0, b1);
  }
}

// Of each half; NaN stays.
__device__ __forceinline__ uint32 larger_magnitude(uint32 a, uint32 b) {
  uint32 result;
  asm("{.reg .b32 m; abs.f16x2 m, %2; max.NaN.f16x2 %0, %1, m;}" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <class Convolution, class Tail, class Numbers>
struct SamplesMainloop {
  using C = Convolution;
  using Input = typename Tail::Input;
  static constexpr bool splits = Input::bytes == 4;
  static constexpr int samples = 8;
  static constexpr int team = 1;
  static constexpr int input_parts = Numbers::input_parts;
  static constexpr int weight_parts = Numbers::weight_parts;
  static constexpr int rows = Numbers::rows;
  static constexpr int columns = Numbers::columns;
  static constexpr int planes = Numbers::planes;
  static constexpr int window_rows = Numbers::window_rows;
  static constexpr int window_columns = Numbers::window_columns;
  static constexpr int plane_units = Numbers::plane_units;  // of 16 bytes: eight samples of a position
  static constexpr int middle_taps = static_cast<int>(C::kernel(1));
  static constexpr int outer_taps = static_cast<int>(C::kernel(0) * C::kernel(2));
  static constexpr int terms = C::in_channels * outer_taps;
  static constexpr int groups = (terms + 15) / 16;
  static constexpr int row_tiles = (C::channels + 15) / 16;
  static constexpr int span = static_cast<int>((C::kernel(0) - 1) * C::delta(0)) + 1;  // planes of an output
  static constexpr int step_of_rows = static_cast<int>(C::step(1));
  static_assert(input_parts == 1 || columns == 1, "a load of four matrices is two columns or two parts");

  static constexpr int scratch_floats = 3 * Numbers::warps * Numbers::slots;
  // Epilogues read it before the next tile is staged, but after the last row tile.
  static constexpr bool scratch_in_ring =
      row_tiles == 1 && 4 * scratch_floats <= 16 * input_parts * planes * plane_units;

  struct Shared {
    uint4 x[input_parts][planes * plane_units];
    uint4 zero[terms % 16 == 0 ? 1 : window_rows * window_columns];
    uint4 weight[row_tiles][groups][middle_taps][weight_parts][32];
    float unscale[row_tiles * 16];
    float bias[row_tiles * 16];
    float own_scratch[scratch_in_ring ? 1 : scratch_floats];
    uint32 seen[C::in_channels][samples];

    __device__ __forceinline__ float* scratch() {
      return scratch_in_ring ? reinterpret_cast<float*>(x[0]) : own_scratch;
    }
  };

  Shared& shared;

  // --- Weights ---
  template <class Parameters>
  static __device__ __forceinline__ float weight_at(const Parameters& p, int o, int term, int t1) {
    if (o >= C::channels || term >= terms) return 0.0f;
    constexpr int last = static_cast<int>(C::kernel(2));
    const int c = term / outer_taps;
    const int t0 = term % outer_taps / last;
    const int t2 = term % last;
    const int tap = (t0 * middle_taps + t1) * last + t2;
    return load_one<typename C::Weight>(p.parameter[0], (o * C::in_channels + c) * C::taps + tap);
  }

  // Finds the power of two that scales the channel's largest weight to [2^13, 2^14). Flags channels without
  // one.
  template <class Parameters>
  static __device__ __forceinline__ void find_scales(const Parameters& p, Shared& shared) {
    const int lane = threadIdx.x % 32;
    for (int o = threadIdx.x / 32; o < row_tiles * 16; o += Numbers::warps) {
      uint32 largest = 0;
      if (o < C::channels) {
        for (int i = lane; i < C::in_channels * C::taps; i += 32) {
          const float w = load_one<typename C::Weight>(p.parameter[0], o * C::in_channels * C::taps + i);
          largest = max(largest, __float_as_uint(w) & 0x7fffffffu);
        }
      }
      largest = __reduce_max_sync(0xffffffffu, largest);
      const int exponent = static_cast<int>(largest >> 23) - 127;
      const bool fits = largest == 0 || (exponent > -100 && exponent < 128);
      if (splits && !fits && lane == 0) atomicMax(p.only + p.batch, static_cast<uint32>(redo_all));
      const int shift = splits && largest > 0 && fits ? 13 - exponent : 0;
      if (lane == 0) {
        shared.unscale[o] = splits ? ldexpf(1.0f / thin_input_scale, -shift) : 1.0f;
        float bias = 0.0f;
        if constexpr (C::has_bias)
          bias = o < C::channels ? load_one<typename C::Bias>(p.parameter[1], o) : 0.0f;
        shared.bias[o] = bias;
      }
    }
  }

  // Fragment A of a product: a lane has rows lane / 4 and 8 further, terms 2 (lane % 4) and 8 further.
  template <class Parameters>
  static __device__ __forceinline__ void load_weights(const Parameters& p, Shared& shared) {
    find_scales(p, shared);
    for (int i = threadIdx.x; i < C::in_channels * samples; i += Numbers::threads)
      shared.seen[i / samples][i % samples] = 0;
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(shared.zero) / 16); i += Numbers::threads)
      shared.zero[i] = uint4{0, 0, 0, 0};
    __syncthreads();
    for (int i = threadIdx.x; i < row_tiles * groups * middle_taps * 32; i += Numbers::threads) {
      const int lane = i % 32;
      const int t1 = i / 32 % middle_taps;
      const int g = i / 32 / middle_taps % groups;
      const int tile = i / 32 / middle_taps / groups;
      uint32 high[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int o = tile * 16 + lane / 4 + j % 2 * 8;
        const int term = g * 16 + lane % 4 * 2 + j / 2 * 8;
        const float scale = splits ? 1.0f / (shared.unscale[o] * thin_input_scale) : 1.0f;
        const float w0 = weight_at(p, o, term, t1) * scale;
        const float w1 = weight_at(p, o, term + 1, t1) * scale;
        split_pair<C, Input>(w0, w1, high[j], low[j]);
      }
      shared.weight[tile][g][t1][0][lane] = uint4{high[0], high[1], high[2], high[3]};
      if constexpr (weight_parts == 2)
        shared.weight[tile][g][t1][weight_parts - 1][lane] = uint4{low[0], low[1], low[2], low[3]};
    }
    __syncthreads();
  }

  // --- The window ---
  // Stages window plane q of the strip that begins at output row `first_row`.
  template <class Parameters>
  __device__ __forceinline__ void stage(const Parameters& p, int64 n, int first_row, int q, bool looks,
                                        uint32 (&largest)[4]) const {
    constexpr int units = C::in_channels * window_rows * window_columns;
    const int i0 = q + static_cast<int>(C::base(0, 0));
    const bool has_plane = static_cast<unsigned>(i0) < static_cast<unsigned>(C::input_size(0));
    const int row_base = first_row * static_cast<int>(C::step(1)) + static_cast<int>(C::base(1, 0));
    uint4* plane = shared.x[0] + q % planes * plane_units;
    const int left = static_cast<int>(p.batch - n < samples ? p.batch - n : samples);
    constexpr int at_once = (units + Numbers::threads - 1) / Numbers::threads < 4
                                ? (units + Numbers::threads - 1) / Numbers::threads
                                : 3;  // loads in flight: eight each
#pragma unroll 1
    for (int base = 0; base < units; base += at_once * Numbers::threads) {
      const int first = base + static_cast<int>(threadIdx.x);
      float x[at_once][samples];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int u = first + k * Numbers::threads;
        const int c = u / (window_rows * window_columns);
        const int i1 = u / window_columns % window_rows + row_base;
        const int i2 = u % window_columns + static_cast<int>(C::base(2, 0));
        const bool inside = u < units && has_plane &&
                            static_cast<unsigned>(i1) < static_cast<unsigned>(C::input_size(1)) &&
                            static_cast<unsigned>(i2) < static_cast<unsigned>(C::input_size(2));
        const int64 index = n * C::input_stride(0) + c * C::input_stride(1) + i0 * C::input_stride(2) +
                            i1 * C::input_stride(3) + i2 * C::input_stride(4);
#pragma unroll
        for (int s = 0; s < samples; ++s)
          x[k][s] = inside && s < left ? load_one<Input>(p.input, index + s * C::input_stride(0)) : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int u = first + k * Numbers::threads;
        if (u < units) store_unit(x[k], plane + u, largest);
        if (looks) look(x[k], u);
      }
    }
  }

  __device__ __forceinline__ void store_unit(float (&x)[samples], uint4* place, uint32 (&largest)[4]) const {
    if constexpr (splits) {
#pragma unroll
      for (int s = 0; s < samples; ++s) x[s] *= thin_input_scale;
    }
    uint32 high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) split_pair<C, Input>(x[2 * j], x[2 * j + 1], high[j], low[j]);
    *place = uint4{high[0], high[1], high[2], high[3]};
    if constexpr (input_parts == 2) place[planes * plane_units] = uint4{low[0], low[1], low[2], low[3]};
    if constexpr (splits) {
#pragma unroll
      for (int j = 0; j < 4; ++j) largest[j] = larger_magnitude(largest[j], high[j]);
    }
  }

  // Notes the channels of samples in which an element reaches the least magnitude. By all lanes of a warp,
  // which have neighbouring units, scaled. The first lane of each channel writes.
  __device__ __forceinline__ void look(const float (&x)[samples], int u) const {
    if constexpr (splits) {
      constexpr int channel_units = window_rows * window_columns;
      constexpr int in_plane = C::in_channels * channel_units;
      const int lane = threadIdx.x % 32;
      const uint32 starts = __ballot_sync(0xffffffffu, lane == 0 || u % channel_units == 0);
      const uint32 later = lane == 31 ? 0u : starts >> (lane + 1);  // channels that begin after this lane
      const uint32 from_here = 0xffffffffu << lane;
      const uint32 own = later == 0 ? from_here : from_here & ((1u << (lane + __ffs(later))) - 1u);
#pragma unroll
      for (int s = 0; s < samples; ++s) {
        const uint32 large = __ballot_sync(0xffffffffu, u < in_plane && fabsf(x[s]) >= 0.5f);
        if ((starts >> lane & 1u) != 0 && u < in_plane && (large & own) != 0)
          atomicOr(&shared.seen[u / channel_units][s], 1u);
      }
    }
  }

  // Leaves the findings of a tile for finish_samples: word 0 of a sample where f16 (or x) overflowed, then a
  // word for each channel with an element of the least magnitude.
  template <class Parameters>
  __device__ __forceinline__ void leave_guard(const Parameters& p, int64 n,
                                              const uint32 (&largest)[4]) const {
    if constexpr (splits) {
      constexpr int words = C::in_channels + 1;
#pragma unroll
      for (int s = 0; s < samples; ++s) {
        const uint32 half = largest[s / 2] >> (s % 2 * 16) & 0x7fffu;
        if (half >= 0x7c00u && n + s < p.batch) p.guard[(n + s) * words] = 1;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < C::in_channels * samples; i += Numbers::threads) {
        const int c = i / samples;
        const int s = i % samples;
        if (shared.seen[c][s] && n + s < p.batch) p.guard[(n + s) * words + 1 + c] = 1;
        shared.seen[c][s] = 0;
      }
    }
  }

  // Marks the samples that are to be computed again; by the last block of a unit, a warp for each sample.
  template <class Parameters>
  __device__ __forceinline__ void finish_samples(const Parameters& p, int64 n) const {
    if constexpr (splits) {
      constexpr int words = C::in_channels + 1;
      for (int s = threadIdx.x / 32; s < samples && n + s < p.batch; s += Numbers::warps) {
        const uint32* guard = p.guard + (n + s) * words;
        bool redo = __ldcg(guard) != 0;
        for (int c = 0; c < C::in_channels && !redo; ++c) {
          if (__ldcg(guard + 1 + c) == 0) redo = !is_exact_in_f16<C, Input, input_parts>(p, n + s, c);
        }
        if (redo && threadIdx.x % 32 == 0) {
          p.only[n + s] = 1;
          atomicMax(p.only + p.batch, static_cast<uint32>(redo_some));
        }
      }
    }
  }

  // --- Products ---
  // The lane's row of the matrices that group `g` multiplies at `column` of output plane `d`, in window row
  // 0.
  __device__ __forceinline__ uint32 matrix_row(int g, int d, int column) const {
    const int lane = threadIdx.x % 32;
    const int term = g * 16 + lane % 16;
    constexpr int last = static_cast<int>(C::kernel(2));
    const int c = term / outer_taps;
    const int t0 = term % outer_taps / last;
    const int t2 = term % last;
    const int slot = (d * static_cast<int>(C::step(0)) + t0 * static_cast<int>(C::delta(0))) % planes;
    const int second = lane / 16;  // column or part
    const int own_column = (column + (columns == 2 ? second : 0)) * static_cast<int>(C::step(2)) +
                           t2 * static_cast<int>(C::delta(2));
    const int part = input_parts == 2 ? second : 0;
    const uint4* row = shared.x[0] + part * planes * plane_units + slot * plane_units +
                       c * window_rows * window_columns + own_column;
    if (terms % 16 != 0 && term >= terms) row = shared.zero;
    return shared_address(row);
  }

  // The output rows that window row `i` meets by middle tap `t`; -1 where there is none.
  static constexpr __device__ int row_met(int i, int t) {
    const int distance = i - t * static_cast<int>(C::delta(1));
    const int step = static_cast<int>(C::step(1));
    return distance >= 0 && distance % step == 0 && distance / step < rows ? distance / step : -1;
  }

  __device__ __forceinline__ void convolve(int row_tile, int d, int column,
                                           float (&total)[columns][rows][4]) const {
    constexpr bool promotes = input_parts == 2;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int g = 0; g < groups; ++g) {
      uint4 a[middle_taps][weight_parts];
#pragma unroll
      for (int t = 0; t < middle_taps; ++t) {
#pragma unroll
        for (int w = 0; w < weight_parts; ++w) a[t][w] = shared.weight[row_tile][g][t][w][lane];
      }
      float part[promotes ? columns : 1][promotes ? rows : 1][4] = {};
      const uint32 address = matrix_row(g, d, column);
#pragma unroll
      for (int i = 0; i < window_rows; ++i) {
        uint32 b[4];
        load_matrices(address + i * window_columns * 16, b);
#pragma unroll
        for (int t = 0; t < middle_taps; ++t) {
          const int r = row_met(i, t);
          if (r < 0) continue;
          if constexpr (promotes) {
            multiply<f16>(part[0][r], a[t][0], b[0], b[1]);
            multiply<f16>(part[0][r], a[t][1], b[0], b[1]);
            multiply<f16>(part[0][r], a[t][0], b[2], b[3]);
          } else {
#pragma unroll
            for (int w = 0; w < weight_parts; ++w) {
#pragma unroll
              for (int k = 0; k < columns; ++k) multiply<Input>(total[k][r], a[t][w], b[2 * k], b[2 * k + 1]);
            }
          }
        }
      }
      if constexpr (promotes) {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
#pragma unroll
          for (int j = 0; j < 4; ++j) total[0][r][j] += part[0][r][j];
        }
      }
    }
  }

  // One item: `columns` columns of the strip's rows. A thread's four slots are two channels of two samples.
  template <class Epilogue, class State>
  __device__ __forceinline__ void item(const Epilogue& epilogue, State& state, int row_tile, int d,
                                       int first_row, int column, const float (&unscale)[2],
                                       const float (&bias)[2]) const {
    float total[columns][rows][4] = {};
    convolve(row_tile, d, column, total);
    float h[4][columns * rows];
    int offset[columns * rows];
    uint32 valid = 0;
#pragma unroll
    for (int k = 0; k < columns; ++k) {
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const int i = k * rows + r;
#pragma unroll
        for (int j = 0; j < 4; ++j) h[j][i] = fmaf(total[k][r][j], unscale[j / 2], bias[j / 2]);
        const int q1 = first_row + r;
        const int q2 = column + k;
        offset[i] = d * static_cast<int>(C::stride(2)) + q1 * static_cast<int>(C::stride(3)) +
                    q2 * static_cast<int>(C::stride(4));
        valid |= (q1 < C::output_size(1) && q2 < C::output_size(2) ? 1u : 0u) << i;
      }
    }
    if (valid == (1u << columns * rows) - 1) {
      epilogue.take(state, h, offset, All{});
    } else {
      epilogue.take(state, h, offset, Mask{valid});
    }
  }

  template <class Parameters, class Epilogue>
  __device__ __forceinline__ void run(const Parameters& p, int64 n, int tile, Epilogue& epilogue) const {
    constexpr int items = static_cast<int>((C::output_size(2) + columns - 1) / columns);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int first_row = tile * rows;
    uint32 largest[4] = {};
#pragma unroll 1
    for (int row_tile = 0; row_tile < row_tiles; ++row_tile) {
      int slot[4];
      bool in_range[4];
      float unscale[2], bias[2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int o = row_tile * 16 + lane / 4 + j / 2 * 8;
        const int sample = lane % 4 * 2 + j % 2;
        in_range[j] = (C::channels % 16 == 0 || o < C::channels) && n + sample < p.batch;
        slot[j] = in_range[j] ? sample * C::channels + o : 0;
        unscale[j / 2] = shared.unscale[o];
        bias[j / 2] = shared.bias[o];
      }
      auto state = begin_rows(epilogue, slot, in_range);
      constexpr int outputs = static_cast<int>(C::output_size(0));
      constexpr int step = static_cast<int>(C::step(0));
      int staged = 0;
#pragma unroll 1
      for (int d = 0; d < outputs; ++d) {
        const int begin = d * step;
        __syncthreads();  // the planes that are replaced are read
        for (int q = staged > begin ? staged : begin; q < begin + span; ++q)
          stage(p, n, first_row, q, d == 0, largest);
        staged = begin + span;
        __syncthreads();
#pragma unroll 1
        for (int i = warp; i < items; i += Numbers::warps)
          item(epilogue, state, row_tile, d, first_row, i * columns, unscale, bias);
      }
      epilogue.template finish<team>(state);
    }
    leave_guard(p, n, largest);
  }
};

}  // namespace onepass
