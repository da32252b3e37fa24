// Copies between panels and tensors of any type and strides, compiled once per SIMD target.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/transfer.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/cache_control.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "block/convert.h"
#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

// Loads, stores and single elements of each type, as f32 vectors of the tag's size.
struct F32 {
  using Element = float;
  template <class Tag>
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const Element* from) {
    return hn::LoadU(d, from);
  }
  template <class Tag>
  static HWY_INLINE void store(hn::Vec<Tag> v, Tag d, Element* to) {
    hn::StoreU(v, d, to);
  }
  static HWY_INLINE float get(const Element* from) { return *from; }
  static HWY_INLINE void put(float value, Element* to) { *to = value; }
};

struct F16 {
  using Element = uint16_t;
  template <class Tag>
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const Element* from) {
    const hn::Rebind<hwy::float16_t, Tag> half;
    return hn::PromoteTo(d, hn::LoadU(half, reinterpret_cast<const hwy::float16_t*>(from)));
  }
  template <class Tag>
  static HWY_INLINE void store(hn::Vec<Tag> v, Tag, Element* to) {
    const hn::Rebind<hwy::float16_t, Tag> half;
    hn::StoreU(hn::DemoteTo(half, v), half, reinterpret_cast<hwy::float16_t*>(to));
  }
  static HWY_INLINE float get(const Element* from) { return f16_value(*from); }
  static HWY_INLINE void put(float value, Element* to) { *to = f16_bits(value); }
};

struct Bf16 {
  using Element = uint16_t;
  template <class Tag>
  static HWY_INLINE hn::Vec<Tag> load(Tag d, const Element* from) {
    const hn::Rebind<uint16_t, Tag> half;
    const hn::RebindToUnsigned<Tag> wide;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(wide, hn::LoadU(half, from))));
  }
  // Rounds to nearest even (Highway 1.0.3 truncates); NaN stays NaN.
  template <class Tag>
  static HWY_INLINE void store(hn::Vec<Tag> v, Tag d, Element* to) {
    const hn::Rebind<uint16_t, Tag> half;
    const hn::RebindToUnsigned<Tag> wide;
    const hn::RebindToSigned<Tag> signed_wide;
    const auto bits = hn::BitCast(wide, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(wide, 1u));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(wide, 0x7fffu)));
    const auto quiet = hn::Or(bits, hn::Set(wide, 0x00400000u));
    const auto chosen = hn::IfThenElse(hn::RebindMask(wide, hn::IsNaN(v)), quiet, rounded);
    hn::StoreU(hn::DemoteTo(half, hn::BitCast(signed_wide, hn::ShiftRight<16>(chosen))), half, to);
    (void)d;
  }
  static HWY_INLINE float get(const Element* from) { return bf16_value(*from); }
  static HWY_INLINE void put(float value, Element* to) { *to = bf16_bits(value); }
};

using D4 = hn::FixedTag<float, 4>;
using V4 = hn::Vec<D4>;

HWY_INLINE void transpose(V4 (&v)[4]) {
  const D4 d;
  const V4 ab_low = hn::InterleaveLower(d, v[0], v[1]);
  const V4 ab_high = hn::InterleaveUpper(d, v[0], v[1]);
  const V4 cd_low = hn::InterleaveLower(d, v[2], v[3]);
  const V4 cd_high = hn::InterleaveUpper(d, v[2], v[3]);
  v[0] = hn::ConcatLowerLower(d, cd_low, ab_low);
  v[1] = hn::ConcatUpperUpper(d, cd_low, ab_low);
  v[2] = hn::ConcatLowerLower(d, cd_high, ab_high);
  v[3] = hn::ConcatUpperUpper(d, cd_high, ab_high);
}

template <class Type>
using Pointer = typename Type::Element*;

template <class Type>
HWY_INLINE void load_element_at(const TransferArguments& t, int64_t r, int64_t c) {
  t.panel[r * t.panel_stride + c] =
      Type::get(reinterpret_cast<Pointer<Type>>(t.tensor) + r * t.row_stride + c * t.col_stride);
}

template <class Type>
HWY_INLINE void store_element_at(const TransferArguments& t, int64_t r, int64_t c) {
  Type::put(t.panel[r * t.panel_stride + c],
            reinterpret_cast<Pointer<Type>>(t.tensor) + r * t.row_stride + c * t.col_stride);
}

// Element by element: strided tensors and the edges of transposed ones.
template <class Type, bool kLoad>
void transfer_elements(const TransferArguments& t) {
  for (int64_t r = 0; r < t.rows; ++r) {
    for (int64_t c = 0; c < t.cols; ++c) {
      kLoad ? load_element_at<Type>(t, r, c) : store_element_at<Type>(t, r, c);
    }
  }
}

// The first of kStride interleaved vectors.
template <int kStride>
HWY_INLINE V load_every(const float* from) {
  const D d;
  V v[4];
  if constexpr (kStride == 2) hn::LoadInterleaved2(d, from, v[0], v[1]);
  if constexpr (kStride == 3) hn::LoadInterleaved3(d, from, v[0], v[1], v[2]);
  if constexpr (kStride == 4) hn::LoadInterleaved4(d, from, v[0], v[1], v[2], v[3]);
  return v[0];
}

// Every kStride-th f32 of a row. A vector of them is read with all elements between, up to the next one: it
// must exist.
template <int kStride>
void load_strided(const TransferArguments& arguments) {
  const TransferArguments t = arguments;
  for (int64_t r = 0; r < t.rows; ++r) {
    float* panel = t.panel + r * t.panel_stride;
    const float* tensor = reinterpret_cast<const float*>(t.tensor) + r * t.row_stride;
    int64_t c = 0;
    for (; c + lanes < t.cols; c += lanes) {
      hn::StoreU(load_every<kStride>(tensor + c * kStride), D(), panel + c);
    }
    for (; c < t.cols; ++c) panel[c] = tensor[c * kStride];
  }
}

// Two or three rows of f32 whose elements alternate in the tensor.
template <int kRows, bool kLoad>
void transfer_alternating(const TransferArguments& arguments) {
  const TransferArguments t = arguments;
  const D d;
  auto* tensor = reinterpret_cast<float*>(t.tensor);
  int64_t c = 0;
  for (; c + lanes <= t.cols; c += lanes) {
    V v[3];
    if constexpr (kLoad) {
      if constexpr (kRows == 2) hn::LoadInterleaved2(d, tensor + c * kRows, v[0], v[1]);
      if constexpr (kRows == 3) hn::LoadInterleaved3(d, tensor + c * kRows, v[0], v[1], v[2]);
      ONEPASS_UNROLL for (int r = 0; r < kRows; ++r) hn::StoreU(v[r], d, t.panel + r * t.panel_stride + c);
    } else {
      ONEPASS_UNROLL for (int r = 0; r < kRows; ++r) v[r] = hn::LoadU(d, t.panel + r * t.panel_stride + c);
      if constexpr (kRows == 2) hn::StoreInterleaved2(v[0], v[1], d, tensor + c * kRows);
      if constexpr (kRows == 3) hn::StoreInterleaved3(v[0], v[1], v[2], d, tensor + c * kRows);
    }
  }
  for (; c < t.cols; ++c) {
    for (int r = 0; r < kRows; ++r) {
      kLoad ? load_element_at<F32>(t, r, c) : store_element_at<F32>(t, r, c);
    }
  }
}

// The tensor's columns are contiguous, as the panel's are.
template <class Type, bool kLoad>
void transfer_rows(const TransferArguments& arguments) {
  const TransferArguments t = arguments;
  const D d;
  for (int64_t r = 0; r < t.rows; ++r) {
    float* panel = t.panel + r * t.panel_stride;
    Pointer<Type> tensor = reinterpret_cast<Pointer<Type>>(t.tensor) + r * t.row_stride;
    int64_t c = 0;
    for (; c + lanes <= t.cols; c += lanes) {
      if constexpr (kLoad) {
        hn::StoreU(Type::load(d, tensor + c), d, panel + c);
      } else {
        Type::store(hn::LoadU(d, panel + c), d, tensor + c);
      }
    }
    for (; c < t.cols; ++c) {
      if constexpr (kLoad) {
        panel[c] = Type::get(tensor + c);
      } else {
        Type::put(panel[c], tensor + c);
      }
    }
  }
}

// Short columns of a tensor, which the processor does not fetch ahead: so many are, in software.
constexpr int64_t columns_ahead = 8, fetched_rows = 64, line_bytes = 64;

// The tensor's rows are contiguous: blocks of 4 x 4 change orientation in registers. The last block of a row
// or column overlaps the one before.
template <class Type, bool kLoad>
void transfer_transposed(const TransferArguments& arguments) {
  const TransferArguments t = arguments;
  const D4 d;
  for (int64_t at = 0; at < t.cols; at += 4) {
    const int64_t c = std::min(at, t.cols - 4);
    Pointer<Type> tensor[4];
    for (int i = 0; i < 4; ++i)
      tensor[i] = reinterpret_cast<Pointer<Type>>(t.tensor) + (c + i) * t.col_stride;
    if constexpr (kLoad) {
      constexpr int64_t line = line_bytes / static_cast<int64_t>(sizeof(*tensor[0]));
      if (t.rows <= fetched_rows && c + columns_ahead + 4 <= t.cols) {
        for (int64_t i = columns_ahead; i < columns_ahead + 4; ++i) {
          for (int64_t r = 0; r < t.rows; r += line) hwy::Prefetch(tensor[0] + i * t.col_stride + r);
        }
      }
    }
    const auto block = [&](int64_t r) HWY_ATTR {
      float* panel = t.panel + r * t.panel_stride + c;
      V4 v[4];
      if constexpr (kLoad) {
        ONEPASS_UNROLL for (int i = 0; i < 4; ++i) v[i] = Type::load(d, tensor[i] + r);
        transpose(v);
        ONEPASS_UNROLL for (int i = 0; i < 4; ++i) hn::StoreU(v[i], d, panel + i * t.panel_stride);
      } else {
        ONEPASS_UNROLL for (int i = 0; i < 4; ++i) v[i] = hn::LoadU(d, panel + i * t.panel_stride);
        transpose(v);
        ONEPASS_UNROLL for (int i = 0; i < 4; ++i) Type::store(v[i], d, tensor[i] + r);
      }
    };
    for (int64_t r = 0; r + 4 <= t.rows; r += 4) block(r);
    if (t.rows % 4 != 0) block(t.rows - 4);
  }
}

template <class Type, bool kLoad>
void transfer_of(const TransferArguments& t) {
  if (t.col_stride == 1 || t.cols == 1) return transfer_rows<Type, kLoad>(t);
  if (t.row_stride == 1 && t.rows >= 4 && t.cols >= 4) return transfer_transposed<Type, kLoad>(t);
  if constexpr (std::is_same_v<Type, F32>) {
    const bool alternate = t.row_stride == 1 && t.col_stride == t.rows;
    if (alternate && t.rows == 2) return transfer_alternating<2, kLoad>(t);
    if (alternate && t.rows == 3) return transfer_alternating<3, kLoad>(t);
  }
  if constexpr (kLoad && std::is_same_v<Type, F32>) {
    if (t.col_stride == 2) return load_strided<2>(t);
    if (t.col_stride == 3) return load_strided<3>(t);
    if (t.col_stride == 4) return load_strided<4>(t);
  }
  transfer_elements<Type, kLoad>(t);
}

template <bool kLoad>
void transfer(const TransferArguments& t) {
  if (t.dtype == DType::f16) return transfer_of<F16, kLoad>(t);
  if (t.dtype == DType::bf16) return transfer_of<Bf16, kLoad>(t);
  transfer_of<F32, kLoad>(t);
}

void fill_transfers(Isa& isa) {
  isa.load = &transfer<true>;
  isa.store = &transfer<false>;
}

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif
