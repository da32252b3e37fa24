// HoldInOutput: values wait for the norm in memory, most of them in the second-level cache. The row
// "thin_inplace": each output is computed once.
//
//   pass 1   x -> convolution -> before-chain -> values as they are, moments of a tile; the last tile of a
//            sample merges them
//   pass 2   values -> norm -> after-chain -> y
//
// Values between the passes are f32: nothing is rounded but the output. Where y is f32 and its rows are whole
// sectors (or channels lie after space), values lie in y itself and are normalised in place. Elsewhere they
// lie in a ring of samples in the workspace, with rows padded so that lanes store values as they compute
// them. Pass 2 goes over a sample in *shares*, as many as it has tiles, each between two lines of 128 bytes
// of y.
//
// A ticket is pass 1 of a tile, then pass 2 of the share `lag` tickets before, while the next tile's window
// arrives. The lag is a sample's tiles and twice as many as are computed at a time: what lies between the
// passes should fit the second-level cache. Moves x once and y once, and values once each way within that
// cache.
#pragma once

#include "thin/mma/careful.cuh"
#include "thin/mma/moments.cuh"
#include "thin/mma/outputs.cuh"
#include "thin/mma/statistics.cuh"
#include "thin/mma/tickets.cuh"
#include "thin/mma/window.cuh"

namespace onepass {

// The tail as pass 1 has it: values leave as f32.
template <class Tail>
struct KeptTail : Tail {
  using Final = typename Tail::Output;
  using Output = f32;
};

template <class C, class Tail, class Numbers, class P>
struct ThinMma<C, Tail, Numbers, P>::InOutput {
  using Parameters = P;
  using Output = typename Tail::Final;
  const Warp warp;
  const Weights weights{warp};
  const TileMoments moments{warp};
  const Outputs outputs{warp};

  static __device__ __forceinline__ void run(const Parameters& p, unsigned char* bytes) {
    InOutput{{p, *reinterpret_cast<Shared*>(bytes)}}.run();
  }

  // Rows of the ring are padded where rows of the output are not whole sectors.
  static constexpr bool fills_up = Numbers::kept_pitch > 0;
  static constexpr int row_pitch = fills_up ? Numbers::kept_pitch : out_x;
  static constexpr bool in_place = is_same<Output, f32> && !fills_up;
  static constexpr int elements = static_cast<int>(channels * Tail::spatial);  // of a sample
  // Elements of a vector that a lane stores. With padded rows, values and output lie differently, and lanes
  // load neighbouring elements.
  static constexpr int width = (fills_up ? 4 : 16) / Output::bytes;
  static_assert(Tail::has_norm && !Tail::has_mean && !prefetches);

  static __device__ __forceinline__ char* output_of(const Parameters& p, int64 n) {
    return static_cast<char*>(p.output) + n * elements * Output::bytes;
  }
  // Values of a sample between the passes. In the ring they have the 16-byte phase of the output.
  static __device__ __forceinline__ float* values_of(const Parameters& p, int64 n) {
    if constexpr (in_place) return reinterpret_cast<float*>(output_of(p, n));
    const auto phase = reinterpret_cast<uint64>(output_of(p, n)) / Output::bytes % width;
    return p.ring + n % p.ring_samples * Numbers::kept_length + (fills_up ? 0 : phase);
  }
  // The place of an element among them.
  static __device__ __forceinline__ int place_of(int element) {
    return fills_up ? element + element / out_x * (row_pitch - out_x) : element;
  }
  // Counts finished shares of a sample. Its place in the ring is free when all are finished.
  static __device__ __forceinline__ uint32* finished_shares(const Parameters& p, int64 n) {
    return p.control + 4 + n * 4 + 1;
  }

  // --- Pass 1: stores values, and sums their distances from the quad's first ---
  struct Kept {
    Operands<Before> before;
    Distances own;
    bool is_new = true;

    static constexpr int row_stride = row_pitch;
    static constexpr int64 channel_stride = fills_up ? out_z * out_y * row_pitch : Tail::spatial;
    static __device__ __forceinline__ int64 index(int channel, int z, int y, int x) {
      return fills_up ? ((channel * out_z + z) * out_y + y) * row_pitch + x
                      : output_index(0, channel, z, y, x);
    }
    static __device__ __forceinline__ char* sample(const Parameters& p, int64 n) {
      return reinterpret_cast<char*>(values_of(p, n));
    }
    template <Way way, int rz, int ry>
    __device__ __forceinline__ void begin(const Sums& sum) {
      if constexpr (rz == 0 && ry == 0) {
        if (!is_new) return;
        is_new = false;
        for_constant<halves>([&](auto half) {
          float first = sum[0][0][half * 2], second = sum[0][0][half * 2 + 1];
          Chains::template before<way, Chains::swish_terms(0, 0, 0)>(first, second, before.row[half]);
          own.pivot[half] = __shfl_sync(0xffffffffu, first, threadIdx.x % 32 & ~3);
        });
      }
    }
    __device__ __forceinline__ float finish(int half, float x, bool is_own) {
      const float distance = distance_from(x, own.pivot[half]);
      if (is_own) own.add(half, distance);
      return x;
    }
    // Read again soon: keep in L2.
    template <class Pieces>
    static __device__ __forceinline__ void store_piece(const Pieces& pieces, void* to, int index,
                                                       bool aligned) {
      if constexpr (Pieces::words == 4) {
        if (aligned) {
          store(static_cast<float*>(to) + index,
                uint4{pieces.word[0], pieces.word[1], pieces.word[2], pieces.word[3]});
          return;
        }
      } else if constexpr (Pieces::words == 2) {
        if (aligned) {
          store(static_cast<float*>(to) + index, uint2{pieces.word[0], pieces.word[1]});
          return;
        }
      }
      pieces.store(to, index, aligned);
    }
    template <class Vector>
    static __device__ __forceinline__ void store(void* to, Vector value) {
      __stcg(static_cast<Vector*>(to), value);
    }
  };

  template <Way way>
  __device__ __forceinline__ void keep(const Tile& tile, Fragments& w) const {
    const float count = lanes_sum<4>(static_cast<float>(moments.count_of(tile)));
#pragma unroll 1
    for (int m = 0; m < row_tiles; ++m) {
      if constexpr (row_tiles > 1) weights.load_weights(w, m);
      Kept kept;
      kept.before.load(warp.p, tile.n, m, warp.quad);
      outputs.template write<way>(tile, w, kept, m);
      moments.store_moments(kept.own, m, count);
    }
  }

  static __device__ __noinline__ void keep_carefully(const Parameters& p, const Tile tile) {
#pragma unroll 1
    for (int channel = 0; channel < channels; ++channel) {
      float* values = values_of(p, tile.n);
      Careful::for_each_stored(reinterpret_cast<char*>(values), tile, channel, [&](int z, int y, int x) {
        values[Kept::index(channel, z, y, x)] = Careful::value(p, tile.n, channel, z, y, x);
      });
    }
  }

  // --- Pass 2 ---
  static constexpr int step = 32 * width;  // elements of a warp's vectors
  using Tensors = typename After::template Tensors<width>;
  // Vectors of a lane in flight: 16 registers, more where stages read tensors.
  static constexpr int in_flight = (sizeof(Tensors) > 1 ? 8 : 16) / width;

  // Norm and after-chain of a channel.
  struct Channel {
    ChannelNorm<Tail> norm;
    ChannelValues<After, 1> after;

    Channel() = default;
    __device__ __forceinline__ Channel(const Parameters& p, int64 n, int channel) {
      norm.load(p, n, channel);
      after.load(p, n, channel);
    }
    template <class Operands>
    __device__ __forceinline__ float value(float x, const Operands& tensors, int k) const {
      return After::value(norm.apply(x), after.value[0], tensors, k);
    }
  };

  // The channels of a vector's elements: one where channels lie before space. Otherwise a lane's channels
  // stay the same where a warp's vectors cover whole positions.
  struct OneChannel {
    Channel channel;
    __device__ __forceinline__ void move_to(const Parameters&, int64, int) {}
    __device__ __forceinline__ const Channel& of(int) const { return channel; }
  };
  struct Neighbours {
    static constexpr bool stays = step % channels == 0;
    Channel channel[width];

    __device__ __forceinline__ void load(const Parameters& p, int64 n, int element) {
#pragma unroll
      for (int k = 0; k < width; ++k) channel[k] = Channel(p, n, (element + k) % channels);
    }
    __device__ __forceinline__ void move_to(const Parameters& p, int64 n, int element) {
      if constexpr (!stays) load(p, n, element);
    }
    __device__ __forceinline__ const Channel& of(int k) const { return channel[k]; }
  };

  // Loads the values of a vector of the output.
  static __device__ __forceinline__ void load_values(float (&value)[width], const float* values,
                                                     int element) {
    if constexpr (fills_up) {
#pragma unroll
      for (int k = 0; k < width; ++k) value[k] = load_shared_by_blocks(values + place_of(element + k));
    } else {
#pragma unroll
      for (int k = 0; k < width; k += 4) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(values + element + k));
        value[k] = v.x, value[k + 1] = v.y, value[k + 2] = v.z, value[k + 3] = v.w;
      }
    }
  }

  // Elements `first` to `last` of sample `n`, whole vectors.
  template <class Channels>
  __device__ __forceinline__ void normalise_vectors(int64 n, int first, int last, Channels& of_vector) const {
    const float* values = values_of(warp.p, n);
    char* output = output_of(warp.p, n);
#pragma unroll 1
    for (int begin = first + warp.lane * width; begin < last; begin += in_flight * step) {
      float value[in_flight][width];
      Tensors tensors[in_flight];
#pragma unroll
      for (int i = 0; i < in_flight; ++i) {
        if (begin + i * step >= last) break;
        load_values(value[i], values, begin + i * step);
        tensors[i].load(warp.p, n * elements + begin + i * step);
      }
#pragma unroll
      for (int i = 0; i < in_flight; ++i) {
        if (begin + i * step >= last) break;
        of_vector.move_to(warp.p, n, begin + i * step);
#pragma unroll
        for (int k = 0; k < width; ++k) value[i][k] = of_vector.of(k).value(value[i][k], tensors[i], k);
        Packed<Output, width> packed;
        packed.pack(value[i]);
        packed.store(output, begin + i * step, true);
      }
    }
  }

  // Elements `first` to `last`. Those before the first vector and behind the last are loaded before the
  // vectors and stored after them. `vectors(first, last)`; `channel(element)`.
  template <class Vectors, class ChannelOf>
  __device__ __forceinline__ void normalise_run(int64 n, int first, int last, Vectors&& vectors,
                                                ChannelOf&& channel) const {
    char* output = output_of(warp.p, n);
    const auto phase = static_cast<int>(
        (reinterpret_cast<uint64>(output) / Output::bytes + static_cast<uint64>(first)) % width);
    const int left = last - first;
    const int head = phase == 0 ? 0 : width - phase < left ? width - phase : left;
    const int whole = (left - head) / width * width;
    const int edge = warp.lane < head ? first + warp.lane : first + whole + warp.lane;
    float value = 0.0f;
    if (edge < last) value = load_shared_by_blocks(values_of(warp.p, n) + place_of(edge));
    vectors(first + head, first + head + whole);
    if (edge < last) {
      typename After::template Tensors<1> tensors;
      tensors.load(warp.p, n * elements + edge);
      store_one<Output>(output, edge, channel(edge).value(value, tensors, 0));
    }
  }

  // Share `index` of a sample begins at a line of the output.
  static __device__ __forceinline__ int begin_of(const char* output, int index) {
    constexpr int line = 128 / Output::bytes;
    constexpr int64 length = (elements + Numbers::tiles - 1) / Numbers::tiles;
    const int64 begin = index * length;
    if (index == 0 || begin >= elements) return index == 0 ? 0 : elements;
    const auto phase = static_cast<int>(
        (reinterpret_cast<uint64>(output) / Output::bytes + static_cast<uint64>(begin)) % line);
    const int64 moved = begin + (line - phase) % line;
    return static_cast<int>(moved < elements ? moved : elements);
  }

  __device__ __forceinline__ void normalise(int64 share) const {
    const int64 n = share / Numbers::tiles;
    const int index = static_cast<int>(share % Numbers::tiles);
    const int begin = begin_of(output_of(warp.p, n), index), end = begin_of(output_of(warp.p, n), index + 1);
    if (warp.lane == 0) wait_for(warp.p.control + 4 + n * 4 + 2, 1u);
    __syncwarp();
    if constexpr (interleaved) {
      Neighbours neighbours;
      normalise_run(
          n, begin, end,
          [&](int first, int last) {
            if constexpr (Neighbours::stays) neighbours.load(warp.p, n, first + warp.lane * width);
            normalise_vectors(n, first, last, neighbours);
          },
          [&](int element) { return Channel(warp.p, n, element % channels); });
    } else {
      constexpr int spatial = static_cast<int>(Tail::spatial);
#pragma unroll 1
      for (int first = begin; first < end;) {
        const int channel = first / spatial;
        const int last = end - channel * spatial < spatial ? end : (channel + 1) * spatial;
        OneChannel own{Channel(warp.p, n, channel)};
        normalise_run(
            n, first, last, [&](int from, int to) { normalise_vectors(n, from, to, own); },
            [&](int) { return own.channel; });
        first = last;
      }
    }
    if constexpr (!in_place) {
      __syncwarp();
      if (warp.lane == 0) count_up(finished_shares(warp.p, n));
    }
  }

  // --- Schedule ---
  __device__ __forceinline__ void run() const {
    const Window window{warp};
    const Statistics statistics{warp};
    Tickets::prepare(warp, weights, window);
    const int64 tiles = warp.p.batch * Numbers::tiles;
    const int64 lag = warp.p.lag;
    const Tickets tickets{warp, tiles + lag};
    const auto broadcast = [](uint32 drawn) { return __shfl_sync(0xffffffffu, drawn, 0); };
    int64 ticket = broadcast(tickets.draw());
    if (ticket >= tiles + lag) return;
    if (ticket < tiles) window.send_for(Tile(ticket), warp.area.x);
    Fragments w;
    w.window = warp.area.x;
    Limits limits;
    bool has_weights = false;
#pragma unroll 1
    while (true) {
      const uint32 drawn = tickets.draw();
      int64 next;
      if (ticket < tiles) {
        // Loaded again after a careful tile: registers are not saved across its calls.
        if (!has_weights) limits = weights.input_limits(w);
        const Tile tile(ticket);
        if constexpr (!in_place) {
          if (warp.lane == 0 && tile.n >= warp.p.ring_samples)
            wait_for(finished_shares(warp.p, tile.n - warp.p.ring_samples), Numbers::tiles);
          __syncwarp();
        }
        const Way way = window.take(tile, limits, warp.area.x);
        if (Chains::narrows && way == narrow) {
          keep<narrow>(tile, w);
        } else if (way != careful) {
          keep<wide>(tile, w);
        }
        __syncwarp();
        next = broadcast(drawn);
        if (next < tiles) window.send_for(Tile(next), warp.area.x);
        if (way == careful) {
          Careful::measure(warp.p, warp.area, tile);
          keep_carefully(warp.p, tile);
        }
        statistics.merge(tile);
        has_weights = !in_registers || way != careful;
      } else {
        next = broadcast(drawn);
      }
      if (ticket >= lag) normalise(ticket - lag);
      if (next >= tiles + lag) return;
      ticket = next;
    }
  }
};

template <class C, class Tail, class Numbers>
using HoldInOutput =
    typename ThinMma<C, KeptTail<Tail>, Numbers, ThinMmaParameters<Tail::parameters>>::InOutput;

}  // namespace onepass
