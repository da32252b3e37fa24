// The source of the row "gemm_mma": loads x to registers, converts it and stores it to the window; or copies
// it as it lies, where operands are of its type.
#pragma once

#include "gemm/mma/layout.cuh"

namespace onepass {

template <class C, class Tail, class Numbers>
struct GemmMmaSource {
  const GemmMmaBlock<C, Tail, Numbers> block;

  using Input = typename Tail::Input;
  using Word = ElementBits<Input>;
  using Item = GemmMmaItem<C, Numbers>;
  static constexpr bool splits = Numbers::parts == 2;
  static constexpr int window = GemmMmaGeometry<C, Numbers>::window;

  // A vector in registers: one element a word, or words as they lie in memory.
  struct Vector {
    uint32 word[Numbers::of_vector];
    int to;  // its index in the window; -1: none
  };
  static constexpr bool spans = Numbers::span > 1;
  static constexpr bool vectors_fit =
      !spans && C::input_stride(1) == 1 && C::in_channels % Numbers::of_vector == 0 &&
      C::input_stride(0) % Numbers::of_vector == 0 && C::input_stride(2) % Numbers::of_vector == 0 &&
      C::input_stride(3) % Numbers::of_vector == 0 && C::input_stride(4) % Numbers::of_vector == 0;
  static constexpr bool interleaved = C::input_stride(1) == 1;
  // Elements that one load takes where channels are no whole vectors: two of 6 f32, four of 12 in 16 bits.
  static constexpr __device__ bool runs_of(int elements) {
    return C::in_channels % elements == 0 && C::input_stride(0) % elements == 0 &&
           C::input_stride(2) % elements == 0 && C::input_stride(3) % elements == 0 &&
           C::input_stride(4) % elements == 0;
  }
  static constexpr int run = spans || !interleaved             ? 1
                             : Input::bytes == 2 && runs_of(8) ? 8
                             : runs_of(4)                      ? 4
                             : runs_of(2)                      ? 2
                                                               : 1;
  // Whether x may be read by more than an element at a time, where it begins at a multiple of 16 bytes.
  static constexpr bool takes_runs = vectors_fit || run > 1;
  // Neighbouring threads load neighbours in memory: entries of one vector of channels, or vectors of an
  // entry.
  static constexpr int places_at_once = interleaved ? Numbers::threads / Numbers::vectors : Numbers::threads;
  static constexpr int turns =
      (window + places_at_once - 1) / places_at_once * (interleaved ? 1 : Numbers::vectors);  // of a chunk
  static constexpr int rounds = (turns + Numbers::batch_vectors - 1) / Numbers::batch_vectors;

  // A run, to a word for each element.
  static __device__ __forceinline__ void load_run(const ElementBits<Input>* from, uint32* word) {
    constexpr int words = run * Input::bytes / 4;
    uint32 raw[words > 0 ? words : 1];
    if constexpr (words == 1) {
      raw[0] = *reinterpret_cast<const uint32*>(from);
    } else if constexpr (words == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      raw[0] = two.x, raw[1] = two.y;
    } else if constexpr (words == 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from);
      raw[0] = four.x, raw[1] = four.y, raw[2] = four.z, raw[3] = four.w;
    }
#pragma unroll
    for (int j = 0; j < run; ++j) {
      if constexpr (Input::bytes == 4) {
        word[j] = raw[j];
      } else {
        word[j] = j % 2 == 0 ? raw[j / 2] & 0xffffu : raw[j / 2] >> 16;
      }
    }
  }

  // The channels of neighbouring taps along x, the first of them at `column`. `row`: the row's offset.
  static __device__ __forceinline__ void load_span(const unsigned char* from, int row, int column,
                                                   uint32* word) {
    using Whole = typename C::Whole;
    constexpr auto channels = static_cast<int>(Whole::in_channels);
    const auto* const first = reinterpret_cast<const Word*>(from);
#pragma unroll
    for (int j = 0; j < channels * Numbers::span; ++j) {
      const int at = column + j / channels * static_cast<int>(Whole::delta(2));
      if (static_cast<unsigned>(at) >= static_cast<unsigned>(C::input_size(2))) continue;
      const int64 index = row + at * C::input_stride(4) + j % channels * C::input_stride(1);
      word[j] = first[index];
    }
  }

  // --- By asynchronous copies ---
  // Whole vectors of channels; or runs of neighbours of a channel, where no tap moves along x: then the
  // window has the channels of a vector one after another, and matrices are turned as they are read.
  static constexpr bool by_planes = Numbers::copied_run > 0;
  static constexpr bool copies = Numbers::copies_vectors || by_planes;

  // Copies the window of a chunk. `aligned`: x begins at a multiple of 16 bytes.
  __device__ __forceinline__ void copy(const Item& item, bool aligned, int chunk, int stage) const {
    constexpr int elements = by_planes ? Numbers::copied_run : Numbers::of_vector;  // of a copy
    constexpr int channels = Numbers::vectors * Numbers::of_vector;
    constexpr int runs = window / (by_planes ? elements : 1);
    const auto* from = static_cast<const Word*>(block.p.input) + input_origin<C>(item.n) +
                       static_cast<int64>(chunk * channels) * C::input_stride(1);
    Word* const to = reinterpret_cast<Word*>(&block.s.rings.x[stage][0][0][0]);
#pragma unroll 2
    for (int i = block.thread; i < Numbers::vectors * runs; i += Numbers::threads) {
      // Neighbouring threads copy neighbours in memory. A thread has all channels of a vector.
      const int vector = by_planes ? i / runs : i % Numbers::vectors;
      const int place = by_planes ? (i - vector * runs) * elements : i / Numbers::vectors;
      const int offset = block.s.sources[place];
      const int channel = chunk * channels + vector * Numbers::of_vector;
      const Word* const own =
          from + (offset < 0 ? 0 : vector * Numbers::of_vector * C::input_stride(1) + offset);
      // A vector takes as many bytes of the window with its channels as planes.
      Word* const begin = to + vector * Numbers::window_pitch * Numbers::of_vector;
      if constexpr (by_planes) {
#pragma unroll
        for (int k = 0; k < Numbers::of_vector; ++k) {
          const bool exists = offset >= 0 && (C::in_channels % channels == 0 || channel + k < C::in_channels);
          copy_run<elements>(begin + k * Numbers::window_pitch + place,
                             exists ? own + k * C::input_stride(1) : own, aligned, exists);
        }
      } else {
        const bool exists = offset >= 0 && channel < C::in_channels;
        copy_run<elements>(begin + place * Numbers::of_vector, exists ? own : from, aligned, exists);
      }
    }
  }

  // Zeros where nothing exists.
  template <int Elements>
  static __device__ __forceinline__ void copy_run(Word* to, const Word* from, bool aligned, bool exists) {
    if (aligned) {
      mma::copy_or_clear<Elements * Input::bytes>(barrier::shared_address(to), from, exists);
    } else {
#pragma unroll
      for (int k = 0; k < Elements; ++k) to[k] = exists ? from[k] : Word{0};
    }
  }

  __device__ __forceinline__ void load(const Item& item, bool in_vectors, int chunk, int number,
                                       Vector (&x)[Numbers::batch_vectors]) const {
    using Offset = conditional<Numbers::small_samples, uint32, int64>;  // in bytes
    constexpr Offset channel_bytes = static_cast<Offset>(C::input_stride(1) * Input::bytes);
    const unsigned char* from =
        static_cast<const unsigned char*>(block.p.input) +
        (input_origin<typename C::Whole>(item.n) +
         static_cast<int64>(chunk * Numbers::vectors * Numbers::of_vector) * C::input_stride(1)) *
            Input::bytes;
#pragma unroll
    for (int k = 0; k < Numbers::batch_vectors; ++k) {
#pragma unroll
      for (int j = 0; j < Numbers::of_vector; ++j) x[k].word[j] = 0;
      x[k].to = -1;
      const int turn = number * Numbers::batch_vectors + k;
      const int vector = interleaved ? block.thread % Numbers::vectors : turn % Numbers::vectors;
      const int place = interleaved ? turn * places_at_once + block.thread / Numbers::vectors
                                    : turn / Numbers::vectors * places_at_once + block.thread;
      if (turn >= turns || place >= window) continue;
      // Threads that are left over where vectors do not divide them.
      if (interleaved && block.thread / Numbers::vectors >= places_at_once) continue;
      x[k].to = vector * Numbers::window_pitch + place;
      const int offset = block.s.sources[place];
      const int channel = (chunk * Numbers::vectors + vector) * Numbers::of_vector;
      if (offset < 0) continue;
      if constexpr (spans) {
        if (vector == 0) load_span(from, offset, block.s.columns[place], x[k].word);
        continue;
      }
      const auto* first = reinterpret_cast<const Word*>(
          from + (static_cast<Offset>(vector * Numbers::of_vector) * channel_bytes +
                  static_cast<Offset>(offset) * static_cast<Offset>(Input::bytes)));
      if (vectors_fit && in_vectors) {
        if (channel >= C::in_channels) continue;
#pragma unroll
        for (int j = 0; j < Numbers::of_vector * Input::bytes / 4; j += 4) {
          const uint4 four = *reinterpret_cast<const uint4*>(first + j);
          x[k].word[j] = four.x, x[k].word[j + 1] = four.y, x[k].word[j + 2] = four.z,
          x[k].word[j + 3] = four.w;
        }
        continue;
      }
      constexpr bool whole_chunks = C::in_channels % (Numbers::vectors * Numbers::of_vector) == 0;
      if constexpr (run > 1 && !vectors_fit) {
        if (in_vectors) {
#pragma unroll
          for (int j = 0; j < Numbers::of_vector; j += run) {
            if (whole_chunks || channel + j < C::in_channels) load_run(first + j, x[k].word + j);
          }
          continue;
        }
      }
#pragma unroll
      for (int j = 0; j < Numbers::of_vector; ++j) {
        if (whole_chunks || channel + j < C::in_channels) x[k].word[j] = first[j * C::input_stride(1)];
      }
    }
  }

  // Converts and stores to the window of a stage. `largest` collects the largest magnitude that is rounded to
  // f16 or split, NaN where there is one.
  __device__ __forceinline__ void store(bool in_vectors, int stage, const Vector (&x)[Numbers::batch_vectors],
                                        float& largest) const {
#pragma unroll
    for (int k = 0; k < Numbers::batch_vectors; ++k) {
      if (x[k].to < 0) continue;
      const uint32(&word)[Numbers::of_vector] = x[k].word;
      constexpr int part_vectors = Numbers::vectors * Numbers::window_pitch;
      uint4* const to = &block.s.rings.x[stage][0][0][0] + x[k].to;
      if constexpr (Input::bytes == 2) {
        uint4 four;
        if (vectors_fit && in_vectors) {
          four = {word[0], word[1], word[2], word[3]};
        } else {
          four = {word[0] | word[1] << 16, word[2] | word[3] << 16, word[4] | word[5] << 16,
                  word[6] | word[7] << 16};
        }
        *to = four;
      } else {
        float value[Numbers::of_vector];
#pragma unroll
        for (int j = 0; j < Numbers::of_vector; ++j) {
          value[j] = __uint_as_float(word[j]);
          if constexpr (Numbers::guards) value[j] *= gemm::x_scale<Numbers>;
          if constexpr (Numbers::guards || splits) largest = gemm::largest_of(largest, value[j]);
        }
#pragma unroll
        for (int part = 0; part < Numbers::parts; ++part) {
          uint32 operand[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if constexpr (Numbers::guards) {
              operand[j] = pack_operands<C, f16>(value[2 * j], value[2 * j + 1]);
              if constexpr (splits) {
                float first, second;
                f16::unpack(operand[j], first, second);
                value[2 * j] -= first;
                value[2 * j + 1] -= second;
              }
            } else {
              const float rounded = round_operand<C>(value[j]);
              operand[j] = __float_as_uint(rounded);
              if constexpr (splits) value[j] -= rounded;
            }
          }
          to[part * part_vectors] = {operand[0], operand[1], operand[2], operand[3]};
        }
      }
    }
  }
};

}  // namespace onepass
