// The gradients of a tail of tensors with channels after space whose slabs stay on the chip: x and dy are
// read once, dx is written once. The formulas are those of element.cuh.
//
// A cluster of blocks holds x and dy of a strip in shared memory as they lie in memory (tail/strip.cuh). A
// thread copies its vectors asynchronously, and no other thread reads them. It asks for those of its next
// sample as soon as it has written the gradient of this one's: the copies so run beside stores and
// arithmetic, and no barrier stands between. Blocks exchange the sums of their slabs through distributed
// shared memory. A cluster adds up the sums of its rows over its samples; the last one of a strip adds those
// of all clusters, always in the same order.
#pragma once

#include "device/barrier.cuh"
#include "tail/backward/parameters.cuh"
#include "tail/backward/segments.cuh"
#include "tail/strip.cuh"
#include "tail/tail.cuh"

namespace onepass {

// `Aligned`: all vectors of the launch lie on 16 bytes. Others are loaded by element and not asynchronously.
template <class Tail, class Numbers, bool Aligned>
struct TailBackwardStrips {
  using Parameters = TailBackwardParameters<Tail::parameters>;
  using Before = typename Tail::Before;
  using After = typename Tail::After;
  using Input = typename Tail::Input;
  using OutputGradient = typename Tail::OutputGradient;

  using S = Strip<Tail, Numbers>;
  using Place = typename S::Place;
  static constexpr int width = S::width;
  static constexpr int threads = S::threads;
  static constexpr int vectors = S::vectors;
  static constexpr int blocks = S::blocks;
  static constexpr int strip = S::strip;
  static constexpr int rows = S::rows;
  static constexpr int piece = S::piece;
  static constexpr int pieces = S::pieces;
  static constexpr int slabs = S::slabs;
  static constexpr int slab_pieces = S::slab_pieces;
  static constexpr int sets = S::sets;
  static constexpr int chunks = S::chunks;
  static constexpr int chunk = S::chunk;

  // Of a row: dz, dz xhat and the after-chain's in the first part, the before-chain's in the second.
  static constexpr int first_sums = 2 + Tail::after_sums;
  static constexpr int before_sums = Tail::before_sums;
  static constexpr int total_sums = first_sums + before_sums;
  static constexpr int row_parts = first_sums > before_sums ? first_sums : before_sums;
  static constexpr int sum_columns = strip * total_sums;  // of a segment of samples
  static constexpr bool wants_sums = Tail::wants_sums;

  static constexpr bool has_dy = !Tail::has_mean;
  // In f32 dz takes the place of dy; in 16 bits it would be rounded, and is computed twice.
  static constexpr bool holds = has_dy && OutputGradient::bytes == 4;
  static constexpr int x_bytes = width * Input::bytes;
  static constexpr int dy_bytes = width * OutputGradient::bytes;

  struct Shared {
    alignas(16) unsigned char x[vectors][threads][x_bytes];
    alignas(16) unsigned char given[has_dy ? vectors * threads * dy_bytes : 16];  // dy, or dz
    float4 parts[sets][strip / piece];  // sums of a set's pieces: gamma dz, gamma dz xhat, xhat
    float4 exchange[2][blocks > 1 ? slabs : 1][blocks];  // of two samples: sums of the cluster's blocks
    float4 means[slabs];                                 // the same sums over a slab's elements
    double totals[wants_sums ? (sum_columns + 1) / 2 * 2 : 2];
    double lanes_of_sums[wants_sums ? threads : 1];
    uint64 received[2];  // what the cluster's blocks sent
    float rows[wants_sums ? sets * strip * row_parts : 2];
  };

  const Parameters& p;
  Shared& shared;

  // --- Copies ---
  __device__ __forceinline__ unsigned char* x_at(int i) const { return shared.x[i][threadIdx.x]; }
  __device__ __forceinline__ unsigned char* given_at(int i) const {
    return shared.given + (i * threads + static_cast<int>(threadIdx.x)) * dy_bytes;
  }

  __device__ __forceinline__ void copy(int i, int64 index) const {
    if constexpr (Aligned) {
      S::template copy<x_bytes>(barrier::shared_address(x_at(i)),
                                static_cast<const char*>(p.input) + index * Input::bytes);
      if constexpr (has_dy) {
        S::template copy<dy_bytes>(
            barrier::shared_address(given_at(i)),
            static_cast<const char*>(p.output_gradient) + index * OutputGradient::bytes);
      }
    } else {
      Packed<Input, width> x;
      x.load(p.input, index, is_aligned(p, aligned_input));
      x.store_shared(x_at(i));
      if constexpr (has_dy) {
        Packed<OutputGradient, width> dy;
        dy.load(p.output_gradient, index, is_aligned(p, aligned_output_gradient));
        dy.store_shared(given_at(i));
      }
    }
  }

  __device__ __forceinline__ void copy_all(const Place& place) const {
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
#pragma unroll 4
      for (int i = c * chunk; i < (c + 1) * chunk && i < vectors; ++i) {
        if (i < place.mine) copy(i, place.index_of(i));
      }
      S::commit();
    }
  }

  // --- The first part: dz and its sums ---
  // What a thread's channels have besides x and dy. `scale` is the norm's weight over the deviation.
  struct Row {
    ChannelValues<Before, width> before;
    ChannelValues<After, width> after;
    float scale[width], beta[width];
    float mean[pieces], rstd[pieces];
    float dy[has_dy ? 1 : width];  // where the block ends in a mean

    __device__ __forceinline__ Row(const Parameters& p, const Place& place) {
      before.load(p, place.n, place.channel);
      after.load(p, place.n, place.channel);
#pragma unroll
      for (int j = 0; j < pieces; ++j) {
        const int64 slab = (place.n * Tail::channels + place.channel + j * piece) / rows;
        mean[j] = p.statistics[2 * slab];
        rstd[j] = p.statistics[2 * slab + 1];
      }
#pragma unroll
      for (int k = 0; k < width; ++k) {
        scale[k] = Tail::weight(p, place.channel + k) * rstd[k / piece];
        beta[k] = Tail::bias(p, place.channel + k);
        if constexpr (Tail::has_mean) {
          constexpr float per_element = 1.0f / static_cast<float>(Tail::spatial);
          const int64 index =
              place.n * Tail::gradient_sample_stride + (place.channel + k) * Tail::gradient_channel_stride;
          dy[k] = load_one<OutputGradient>(p.output_gradient, index) * per_element;
        }
      }
    }
  };

  struct Sums {
    float dz[width] = {};
    float product[width] = {};  // of dz and the distance
    float after[width][Tail::after_sums > 0 ? Tail::after_sums : 1] = {};
    float distance[pieces] = {};
  };

  __device__ __forceinline__ void read(int i, const Row& row, float (&x)[width],
                                       float (&given)[width]) const {
    Packed<Input, width> packed;
    packed.load_shared(x_at(i));
    packed.unpack(x);
    if constexpr (has_dy) {
      Packed<OutputGradient, width> dy;
      dy.load_shared(given_at(i));
      dy.unpack(given);
    } else {
#pragma unroll
      for (int k = 0; k < width; ++k) given[k] = row.dy[k];
    }
  }

  static __device__ __forceinline__ float distance_of(float x, const Row& row,
                                                      const typename Before::template Tensors<width>& tensors,
                                                      int k) {
    return distance_from(Before::value(x, row.before.value[k], tensors, k), row.mean[k / piece]);
  }

  static constexpr int after_operands = After::channel_operands > 0 ? After::channel_operands : 1;
  static constexpr int before_operands = Before::channel_operands > 0 ? Before::channel_operands : 1;

  __device__ __forceinline__ void first(const Place& place, int i, const Row& row, Sums& sums) const {
    const int64 index = place.index_of(i);
    typename Before::template Tensors<width> before;
    typename After::template Tensors<width> after;
    load_tensors<Aligned>(before, p, index);
    load_tensors<Aligned>(after, p, index);
    typename After::template TensorGradients<width> gradients;
    float x[width], given[width], channel_gradients[after_operands];
    read(i, row, x, given);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const float d = distance_of(x[k], row, before, k);
      const float z = fmaf(d, row.scale[k], row.beta[k]);
      const float dz =
          After::gradient(z, row.after.value[k], after, k, given[k], channel_gradients, gradients);
      sums.dz[k] += dz;
      sums.product[k] = fmaf(dz, d, sums.product[k]);
      sums.distance[k / piece] += d;
#pragma unroll
      for (int s = 0; s < Tail::after_sums; ++s) sums.after[k][s] += channel_gradients[s];
      given[k] = dz;
    }
    if constexpr (holds) {
      Packed<OutputGradient, width> dz;
      dz.pack(given);
      dz.store_shared(given_at(i));
    }
    gradients.store(p, index);
  }

  template <int c>
  __device__ __forceinline__ void take_chunks(const Place& place, const Row& row, Sums& sums) const {
    S::template wait_for_chunk<c>();
    const int end = (c + 1) * chunk < place.mine ? (c + 1) * chunk : place.mine;
#pragma unroll 1
    for (int i = c * chunk; i < end; ++i) first(place, i, row, sums);
    if constexpr (c + 1 < chunks) take_chunks<c + 1>(place, row, sums);
  }

  // Sums of the warp's pieces and rows, to shared memory.
  __device__ __forceinline__ void leave_parts(const Place& place, const Row& row, const Sums& sums) const {
#pragma unroll
    for (int j = 0; j < pieces; ++j) {
      float4 own{0.0f, 0.0f, sums.distance[j] * row.rstd[j], 0.0f};
#pragma unroll
      for (int k = j * piece; k < (j + 1) * piece; ++k) {
        own.x = fmaf(row.scale[k], sums.dz[k], own.x);
        own.y = fmaf(row.scale[k] * row.rstd[j], sums.product[k], own.y);
      }
      own = {S::column_sum(own.x), S::column_sum(own.y), S::column_sum(own.z), 0.0f};
      if (S::leaves()) shared.parts[place.set][place.column * pieces + j] = own;
    }
    if constexpr (wants_sums) {
#pragma unroll
      for (int k = 0; k < width; ++k) {
        leave(place, k, 0, sums.dz[k]);
        leave(place, k, 1, sums.product[k] * row.rstd[k / piece]);
#pragma unroll
        for (int s = 0; s < Tail::after_sums; ++s) leave(place, k, 2 + s, sums.after[k][s]);
      }
    }
  }

  __device__ __forceinline__ float& row_part(int set, int channel, int s) const {
    return shared.rows[(set * strip + channel) * row_parts + s];
  }
  __device__ __forceinline__ void leave(const Place& place, int k, int s, float value) const {
    value = S::column_sum(value);
    if (S::leaves()) row_part(place.set, place.column * width + k, s) = value;
  }

  // --- Sums of slabs ---
  template <int lanes>
  static __device__ __forceinline__ float4 lanes_sums(const float4& own) {
    return {lanes_sum<lanes>(own.x), lanes_sum<lanes>(own.y), lanes_sum<lanes>(own.z), 0.0f};
  }

  __device__ __forceinline__ void set_means(int slab, const float4& sum) const {
    constexpr float per_element = 1.0f / (static_cast<float>(rows) * static_cast<float>(Tail::spatial));
    shared.means[slab] = {sum.x * per_element, sum.y * per_element, sum.z * per_element, 0.0f};
  }

  // The means of each slab, in shared memory. `sample`: the how many-th of the cluster's.
  __device__ __forceinline__ void reduce(const Place& place, uint32 sample) const {
    __syncthreads();  // all parts are there
    constexpr int team = S::merge_team();
    const uint32 turn = sample % 2;
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      if (threadIdx.x == 0) barrier::expect(&shared.received[turn], slabs * blocks * 16);
      __syncwarp();
      if (sample == 0)
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all have started
    }
#endif
    S::template for_each_slab<team>([&](int slab, int lane, bool in_range) {
      float4 own{0.0f, 0.0f, 0.0f, 0.0f};
      for (int i = lane; in_range && i < S::slab_parts; i += team) {
        const float4 part = shared.parts[i / slab_pieces][slab * slab_pieces + i % slab_pieces];
        own = {own.x + part.x, own.y + part.y, own.z + part.z, 0.0f};
      }
      own = lanes_sums<team>(own);
      if constexpr (blocks == 1) {
        if (in_range && lane == 0) set_means(slab, own);
      } else {
#if __CUDA_ARCH__ >= 900
        for (int to = lane; in_range && to < blocks; to += team) {
          barrier::send(&shared.exchange[turn][slab][place.block], own, &shared.received[turn], to);
        }
#endif
      }
    });
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      // Two places: a block that has all sums of this sample may send those of the next before others have
      // read this one's. It cannot be two samples ahead.
      barrier::wait(&shared.received[turn], sample / 2 % 2);
      S::template for_each_slab<blocks>([&](int slab, int lane, bool in_range) {
        const float4 sum = lanes_sums<blocks>(shared.exchange[turn][slab][lane]);
        if (in_range && lane == 0) set_means(slab, sum);
      });
    }
#endif
    __syncthreads();
  }

  // Adds a sample's sums of rows to those of the block. The stored mean is rounded: by how much is the mean
  // of xhat, and products are moved by it.
  template <int begin, int count>
  __device__ __forceinline__ void add_totals() const {
    for (int i = static_cast<int>(threadIdx.x); i < strip * count; i += threads) {
      const int channel = i / count;
      const int s = i - channel * count;
      float sum = 0.0f, dz = 0.0f;
      for (int set = 0; set < sets; ++set) {
        sum += row_part(set, channel, s);
        if (begin + s == 1) dz += row_part(set, channel, 0);
      }
      if (begin + s == 1) sum = fmaf(-shared.means[channel / rows].z, dz, sum);
      shared.totals[channel * total_sums + begin + s] += static_cast<double>(sum);
    }
  }

  // --- The second part: dx ---
  // dh = scale dz + slope d + offset
  struct Affine {
    float slope[pieces], offset[pieces];

    __device__ __forceinline__ Affine(const Shared& shared, const Place& place, const Row& row) {
#pragma unroll
      for (int j = 0; j < pieces; ++j) {
        const float4 mean = shared.means[(place.column * pieces + j) / slab_pieces];
        const float product = fmaf(-mean.z, mean.x, mean.y);
        slope[j] = -row.rstd[j] * product;
        offset[j] = fmaf(mean.z, product, -mean.x);
      }
    }
  };
  struct BeforeSums {
    float value[width][before_sums > 0 ? before_sums : 1] = {};
  };

  __device__ __forceinline__ void second(const Place& place, int i, const Row& row, const Affine& affine,
                                         BeforeSums& sums) const {
    const int64 index = place.index_of(i);
    typename Before::template Tensors<width> before;
    typename After::template Tensors<width> after;
    load_tensors<Aligned>(before, p, index);
    if constexpr (!holds) load_tensors<Aligned>(after, p, index);
    typename Before::template TensorGradients<width> gradients;
    float x[width], given[width];
    read(i, row, x, given);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const float d = distance_of(x[k], row, before, k);
      float dz = given[k];
      if constexpr (!holds) {
        float unused[after_operands];
        typename After::template TensorGradients<width> ignored;
        const float z = fmaf(d, row.scale[k], row.beta[k]);
        dz = After::gradient(z, row.after.value[k], after, k, dz, unused, ignored);
      }
      const float dh = fmaf(row.scale[k], dz, fmaf(d, affine.slope[k / piece], affine.offset[k / piece]));
      float channel_gradients[before_operands];
      x[k] = Before::gradient(x[k], row.before.value[k], before, k, dh, channel_gradients, gradients);
#pragma unroll
      for (int s = 0; s < before_sums; ++s) sums.value[k][s] += channel_gradients[s];
    }
    Packed<typename Tail::InputGradient, width> dx;
    dx.pack(x);
    dx.store(p.input_gradient, index, Aligned || is_aligned(p, aligned_input_gradient));
    gradients.store(p, index);
  }

  // `more`: a sample follows, whose vectors are asked for in the places of this one's.
  __device__ __forceinline__ void write(const Place& place, const Row& row, const Affine& affine, bool more,
                                        BeforeSums& sums) const {
    constexpr int64 sample = Tail::spatial * Tail::channels;
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      const int end = (c + 1) * chunk < place.mine ? (c + 1) * chunk : place.mine;
#pragma unroll 1
      for (int i = c * chunk; i < end; ++i) {
        second(place, i, row, affine, sums);
        if (more) copy(i, place.index_of(i) + sample);
      }
      if (more) S::commit();
    }
  }

  __device__ __forceinline__ void run_sample(const Place& place, uint32 sample, bool more) const {
    const Row row(p, place);
    Sums sums;
    take_chunks<0>(place, row, sums);
    leave_parts(place, row, sums);
    reduce(place, sample);
    if constexpr (wants_sums) add_totals<0, first_sums>();
    const Affine affine(shared, place, row);
    BeforeSums before;
    write(place, row, affine, more, before);
    if constexpr (before_sums > 0) {
      __syncthreads();  // the first part's sums of rows have been read
#pragma unroll
      for (int k = 0; k < width; ++k) {
#pragma unroll
        for (int s = 0; s < before_sums; ++s) leave(place, k, s, before.value[k][s]);
      }
      __syncthreads();
      add_totals<first_sums, before_sums>();
    }
    if constexpr (wants_sums) __syncthreads();  // sums of rows have been read
  }

  // --- Gradients of weights ---
  static __device__ __forceinline__ double double_of(float low, float high) {
    return __hiloint2double(__float_as_int(high), __float_as_int(low));
  }

  // The cluster's sums to memory, each block some of them. The last block of the strip adds up all.
  __device__ __forceinline__ void finish(int of_sample, int segment, int segments, int block) const {
    double* all = reinterpret_cast<double*>(p.parts) + static_cast<int64>(of_sample) * segments * sum_columns;
    double* to = all + static_cast<int64>(segment) * sum_columns;
    if constexpr (blocks == 1) {
      for (int i = static_cast<int>(threadIdx.x); i < sum_columns; i += threads) to[i] = shared.totals[i];
    } else {
#if __CUDA_ARCH__ >= 900
      barrier::cluster_sync();
      for (int i = block * threads + static_cast<int>(threadIdx.x); 2 * i < sum_columns;
           i += blocks * threads) {
        double sum[2] = {0.0, 0.0};
        for (int b = 0; b < blocks; ++b) {
          const float4 pair = barrier::load_of_block(reinterpret_cast<const float4*>(shared.totals) + i, b);
          sum[0] += double_of(pair.x, pair.y);
          sum[1] += double_of(pair.z, pair.w);
        }
        to[2 * i] = sum[0];
        if (2 * i + 1 < sum_columns) to[2 * i + 1] = sum[1];
      }
      barrier::cluster_sync();  // none leaves before its sums have been read
#endif
    }
    if (!arrives_last(p.control + of_sample, static_cast<uint32>(segments * blocks))) return;
    sum_segments<sum_columns, threads>(all, segments, shared.totals, shared.lanes_of_sums);
    for (int r = static_cast<int>(threadIdx.x); r < strip; r += threads) {
      const auto channel_sum = [&](int i) { return static_cast<float>(shared.totals[r * total_sums + i]); };
      const auto each_sample = [](int64, int) { return 0.0f; };  // such gradients are refused
      Tail::store_channel_gradients(p, static_cast<int64>(of_sample) * strip + r, channel_sum, each_sample);
    }
  }

  __device__ __forceinline__ void run() const {
    const int cluster = static_cast<int>(blockIdx.x) / blocks;
    const int block = static_cast<int>(blockIdx.x) % blocks;
    const int segments = static_cast<int>(gridDim.x) / (blocks * S::strips);
    const int segment = cluster / S::strips;
    const int of_sample = cluster - segment * S::strips;  // which strip
    const int64 begin = segment * p.wave_units;
    const int64 end = begin + p.wave_units < p.batch ? begin + p.wave_units : p.batch;
#if __CUDA_ARCH__ >= 900
    if constexpr (blocks > 1) {
      // No sums go to a block that has not started. The others are waited for when there are some.
      if (threadIdx.x == 0) {
        barrier::initialise(&shared.received[0]);
        barrier::initialise(&shared.received[1]);
      }
      __syncwarp();
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    }
#endif
    if constexpr (wants_sums) {
      for (int i = static_cast<int>(threadIdx.x); i < sum_columns; i += threads) shared.totals[i] = 0.0;
    }
    Place place(begin * S::strips + of_sample, block);
    copy_all(place);
#pragma unroll 1
    for (int64 n = begin; n < end; ++n) {
      run_sample(place, static_cast<uint32>(n - begin), n + 1 < end);
      ++place.n;
      place.index += Tail::spatial * Tail::channels;
    }
    if constexpr (wants_sums) {
      __syncthreads();
      finish(of_sample, segment, segments, block);
    } else if constexpr (blocks > 1) {
#if __CUDA_ARCH__ >= 900
      // None leaves before all have what was sent to them. The barrier takes whole warps.
      __syncwarp();
      asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
    }
  }
};

}  // namespace onepass
