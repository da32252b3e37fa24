// The gradient of a norm over slabs whose elements lie together, compiled once per SIMD target.
#include "cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/slab_gradient.cc"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "cpu/dispatch.h"
#include "cpu/isa.h"
#include "cpu/panel-inl.h"

#if !ONEPASS_TARGET_IS_EMULATED
HWY_BEFORE_NAMESPACE();
namespace onepass::cpu {
namespace HWY_NAMESPACE {

// Vectors of a slab in flight, and additions in one chain: see chain_length of gradient.cc.
constexpr int slab_vectors = 2;
constexpr int64_t slab_strip = 32 * slab_vectors * lanes;

// Of one slab.
template <bool kWeights>
class SlabNormBack {
 public:
  HWY_INLINE SlabNormBack(const SlabGradientArguments& arguments, int64_t slab)
      : s_(arguments),
        at_(slab * arguments.width),
        centre_(arguments.statistics[2 * slab]),
        rstd_(arguments.statistics[2 * slab + 1]) {}

  HWY_INLINE void run() {
    for (int64_t begin = 0; begin < s_.width; begin += slab_strip) {
      add_strip(begin, begin + slab_strip < s_.width ? begin + slab_strip : s_.width);
    }
    if (s_.dst == nullptr) return;
    const double factor = static_cast<double>(rstd_) / static_cast<double>(s_.width);
    store(static_cast<float>(factor * sum_), static_cast<float>(factor * product_));
  }

 private:
  // Sums over the slab of what each column gets times its weight.
  HWY_INLINE void add_strip(int64_t begin, int64_t end) {
    const D d;
    V sums[slab_vectors], products[slab_vectors];
    ONEPASS_UNROLL for (int v = 0; v < slab_vectors; ++v) sums[v] = products[v] = hn::Zero(d);
    const V centre = hn::Set(d, centre_);
    const V rstd = hn::Set(d, rstd_);
    int64_t c = at_ + begin;
    const int64_t last = at_ + end;
    const auto add = [&](int v, int64_t at) HWY_ATTR {
      const V g = hn::LoadU(d, s_.gradient + at);
      const V product = hn::Mul(g, hn::Mul(hn::Sub(hn::LoadU(d, s_.x + at), centre), rstd));
      add_to(s_.sums, at, g);
      add_to(s_.products, at, product);
      if constexpr (kWeights) {
        const V weight = hn::LoadU(d, s_.weights + at);
        sums[v] = hn::MulAdd(g, weight, sums[v]);
        products[v] = hn::MulAdd(product, weight, products[v]);
      } else {
        sums[v] = hn::Add(sums[v], g);
        products[v] = hn::Add(products[v], product);
      }
    };
    for (; c + slab_vectors * lanes <= last; c += slab_vectors * lanes) {
      ONEPASS_UNROLL for (int v = 0; v < slab_vectors; ++v) add(v, c + v * lanes);
    }
    for (; c + lanes <= last; c += lanes) add(0, c);
    sum_ += lane_sum(hn::Add(sums[0], sums[1]));
    product_ += lane_sum(hn::Add(products[0], products[1]));
    for (; c < last; ++c) {
      const float g = s_.gradient[c];
      const float product = g * ((s_.x[c] - centre_) * rstd_);
      if (s_.sums != nullptr) s_.sums[c] = s_.add ? s_.sums[c] + g : g;
      if (s_.products != nullptr) s_.products[c] = s_.add ? s_.products[c] + product : product;
      sum_ += kWeights ? g * s_.weights[c] : g;
      product_ += kWeights ? product * s_.weights[c] : product;
    }
  }

  HWY_INLINE void add_to(float* to, int64_t at, V value) const {
    const D d;
    if (to == nullptr) return;
    hn::StoreU(s_.add ? hn::Add(hn::LoadU(d, to + at), value) : value, d, to + at);
  }

  // dst = gradient * weight * rstd - offset - xhat * slope
  HWY_INLINE void store(float offset, float slope) const {
    const D d;
    const V centre = hn::Set(d, centre_);
    const V rstd = hn::Set(d, rstd_);
    const V offsets = hn::Set(d, offset);
    const V slopes = hn::Set(d, slope);
    int64_t c = at_;
    const int64_t last = at_ + s_.width;
    for (; c + lanes <= last; c += lanes) {
      const V scale = kWeights ? hn::Mul(rstd, hn::LoadU(d, s_.weights + c)) : rstd;
      const V xhat = hn::Mul(hn::Sub(hn::LoadU(d, s_.x + c), centre), rstd);
      const V taken = hn::MulAdd(xhat, slopes, offsets);
      hn::StoreU(hn::MulSub(hn::LoadU(d, s_.gradient + c), scale, taken), d, s_.dst + c);
    }
    for (; c < last; ++c) {
      const float scale = kWeights ? rstd_ * s_.weights[c] : rstd_;
      const float xhat = (s_.x[c] - centre_) * rstd_;
      s_.dst[c] = s_.gradient[c] * scale - (offset + xhat * slope);
    }
  }

  const SlabGradientArguments s_;
  const int64_t at_;  // the slab's first element
  const float centre_;
  const float rstd_;
  double sum_ = 0;
  double product_ = 0;
};

// --------------------------------------------------------------------------- one coefficient a channel

// Elements of a channel whose products are added in one go: chains of 32 on NEON.
constexpr int64_t channel_strip = 32 * 4 * lanes;

struct ChannelSums {
  float gradient = 0;
  float product = 0;  // with xhat
};

// Of a slab's elements. Their product with the gradient alone could underflow.
struct Normalised {
  V centre;
  V rstd;

  HWY_INLINE V operator()(V x) const { return hn::Mul(hn::Sub(x, centre), rstd); }
};

// At most a strip, of which `end - begin` is a vector at least or `begin` is behind one.
HWY_INLINE ChannelSums channel_sums(const float* x, const float* g, int64_t begin, int64_t end,
                                    const Normalised& xhat) {
  const D d;
  V sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  V product[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  const auto add = [&](int v, V gradient, V value) HWY_ATTR {
    sum[v] = hn::Add(sum[v], gradient);
    product[v] = hn::MulAdd(gradient, xhat(value), product[v]);
  };
  int64_t c = begin;
  for (; c + 4 * lanes <= end; c += 4 * lanes) {
    ONEPASS_UNROLL for (int v = 0; v < 4; ++v) {
      add(v, hn::LoadU(d, g + c + v * lanes), hn::LoadU(d, x + c + v * lanes));
    }
  }
  for (; c + lanes <= end; c += lanes) add(0, hn::LoadU(d, g + c), hn::LoadU(d, x + c));
  if (c < end) add(1, last_lanes(load_last(g, end), end - c), load_last(x, end));
  return {lane_sum(hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]))),
          lane_sum(hn::Add(hn::Add(product[0], product[1]), hn::Add(product[2], product[3])))};
}

// The same of a short row, in one chain.
HWY_INLINE ChannelSums short_sums(const float* x, const float* g, int64_t pixels, const Normalised& xhat) {
  const D d;
  V sum = hn::LoadU(d, g);
  V product = hn::Mul(sum, xhat(hn::LoadU(d, x)));
  int64_t c = lanes;
  for (; c + lanes <= pixels; c += lanes) {
    const V gradient = hn::LoadU(d, g + c);
    sum = hn::Add(sum, gradient);
    product = hn::MulAdd(gradient, xhat(hn::LoadU(d, x + c)), product);
  }
  if (c < pixels) {
    const V gradient = last_lanes(load_last(g, pixels), pixels - c);
    sum = hn::Add(sum, gradient);
    product = hn::MulAdd(gradient, xhat(load_last(x, pixels)), product);
  }
  return {lane_sum(sum), lane_sum(product)};
}

HWY_INLINE ChannelSums long_sums(const float* x, const float* g, int64_t pixels, const Normalised& xhat) {
  double sum = 0;
  double product = 0;
  for (int64_t begin = 0; begin < pixels; begin += channel_strip) {
    const int64_t end = begin + channel_strip < pixels ? begin + channel_strip : pixels;
    const ChannelSums part = channel_sums(x, g, begin, end, xhat);
    sum += part.gradient;
    product += part.product;
  }
  return {static_cast<float>(sum), static_cast<float>(product)};
}

// Sums of some channels, as vectors.
constexpr int64_t chunk_channels = 64;
struct ChannelChunk {
  HWY_ALIGN float sums[chunk_channels];
  HWY_ALIGN float products[chunk_channels];
};

// Adds `count` values to where they are kept, or puts them there.
HWY_INLINE void keep_values(const float* values, int64_t count, bool add, float* to) {
  if (to == nullptr) return;
  for (int64_t c = 0; c < count; ++c) to[c] = add ? to[c] + values[c] : values[c];
}

// The sum of values times weights; `count` values, and zeros up to a whole vector. Weights behind the last
// are another slab's.
template <bool kWeights>
HWY_INLINE float weighted_sum(const float* values, const float* weights, int64_t count) {
  const D d;
  V sum = hn::Zero(d);
  for (int64_t c = 0; c < count; c += lanes) {
    const V value = hn::Load(d, values + c);
    if constexpr (kWeights) {
      const auto own = hn::FirstN(d, static_cast<size_t>(count - c));
      sum = hn::MulAdd(value, hn::IfThenElseZero(own, hn::LoadU(d, weights + c)), sum);
    } else {
      sum = hn::Add(sum, value);
    }
  }
  return lane_sum(sum);
}

// Sums over a slab, of what each channel gets times its weight.
struct SlabTotals {
  double sum = 0;
  double product = 0;
};

template <bool kWeights>
HWY_INLINE SlabTotals slab_totals(const SlabGradientArguments& s, int64_t slab) {
  const D d;
  const int64_t pixels = s.pixels;
  const int64_t channels = s.width / pixels;
  const Normalised xhat{hn::Set(d, s.statistics[2 * slab]), hn::Set(d, s.statistics[2 * slab + 1])};
  const bool is_short = pixels < 8 * lanes;
  SlabTotals totals;
  ChannelChunk chunk;
  for (int64_t first = 0; first < channels; first += chunk_channels) {
    const int64_t count = channels - first < chunk_channels ? channels - first : chunk_channels;
    const int64_t at = slab * channels + first;
    const float* x = s.x + at * pixels;
    const float* g = s.gradient + at * pixels;
    for (int64_t c = 0; c < count; ++c, x += pixels, g += pixels) {
      const ChannelSums sums = is_short ? short_sums(x, g, pixels, xhat) : long_sums(x, g, pixels, xhat);
      chunk.sums[c] = sums.gradient;
      chunk.products[c] = sums.product;
    }
    for (int64_t c = count; c % lanes != 0; ++c) chunk.sums[c] = chunk.products[c] = 0;
    keep_values(chunk.sums, count, s.add, s.sums == nullptr ? nullptr : s.sums + at);
    keep_values(chunk.products, count, s.add, s.products == nullptr ? nullptr : s.products + at);
    const float* weights = kWeights ? s.weights + at : nullptr;
    totals.sum += weighted_sum<kWeights>(chunk.sums, weights, count);
    totals.product += weighted_sum<kWeights>(chunk.products, weights, count);
  }
  return totals;
}

// dst = gradient * weight * rstd - offset - xhat * slope. Everything is in local variables: what
// vectors are stored to may alias members of an object.
template <bool kWeights>
void store_channels(const SlabGradientArguments& s, int64_t slab, float offset_value, float slope_value) {
  const D d;
  const int64_t pixels = s.pixels;
  const int64_t channels = s.width / pixels;
  const int64_t whole = pixels - pixels % lanes;
  const float rstd = s.statistics[2 * slab + 1];
  const Normalised xhat{hn::Set(d, s.statistics[2 * slab]), hn::Set(d, rstd)};
  const V offset = hn::Set(d, offset_value);
  const V slope = hn::Set(d, slope_value);
  const float* x = s.x + slab * s.width;
  const float* g = s.gradient + slab * s.width;
  const float* weights = kWeights ? s.weights + slab * channels : nullptr;
  float* dst = s.dst + slab * s.width;
  for (int64_t channel = 0; channel < channels; ++channel, x += pixels, g += pixels, dst += pixels) {
    const V scale = hn::Set(d, kWeights ? rstd * weights[channel] : rstd);
    const auto value = [&](V gradient, V of_x) HWY_ATTR {
      return hn::MulSub(gradient, scale, hn::MulAdd(xhat(of_x), slope, offset));
    };
    // The last vector begins among elements that are overwritten where dst is the gradient.
    const V last = value(load_last(g, pixels), load_last(x, pixels));
    int64_t c = 0;
    for (; c + 4 * lanes <= pixels; c += 4 * lanes) {
      V result[4];
      ONEPASS_UNROLL for (int v = 0; v < 4; ++v) {
        result[v] = value(hn::LoadU(d, g + c + v * lanes), hn::LoadU(d, x + c + v * lanes));
      }
      ONEPASS_UNROLL for (int v = 0; v < 4; ++v) hn::StoreU(result[v], d, dst + c + v * lanes);
    }
    for (; c < whole; c += lanes) hn::StoreU(value(hn::LoadU(d, g + c), hn::LoadU(d, x + c)), d, dst + c);
    if (whole < pixels) hn::StoreU(last, d, dst + pixels - lanes);
  }
}

template <bool kWeights>
void channel_norm_back(const SlabGradientArguments& arguments) {
  const SlabGradientArguments s = arguments;
  for (int64_t slab = 0; slab < s.slabs; ++slab) {
    const SlabTotals totals = slab_totals<kWeights>(s, slab);
    if (s.dst == nullptr) continue;
    const double factor = s.statistics[2 * slab + 1] / static_cast<double>(s.width);
    store_channels<kWeights>(s, slab, static_cast<float>(factor * totals.sum),
                             static_cast<float>(factor * totals.product));
  }
}

void slab_norm_back(const SlabGradientArguments& s) {
  if (s.pixels > 0) return s.weights != nullptr ? channel_norm_back<true>(s) : channel_norm_back<false>(s);
  for (int64_t slab = 0; slab < s.slabs; ++slab) {
    s.weights != nullptr ? SlabNormBack<true>(s, slab).run() : SlabNormBack<false>(s, slab).run();
  }
}

void fill_slab_gradient(Isa& isa) { isa.slab_norm_back = &slab_norm_back; }

}  // namespace HWY_NAMESPACE
}  // namespace onepass::cpu
HWY_AFTER_NAMESPACE();
#endif
