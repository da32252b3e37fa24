// Rates of PyTorch's own convolutions as data. choice/framework.cc predicts their time from these figures.
//
// All were measured on an H200 with cuDNN 9.19, tensors in the caller's layout. Rates are operations a
// second, a multiply-add counted as two. Each struct gives its date and the range of the measured figures.
#pragma once

#include <cstdint>

namespace onepass::cuda::framework {

// fp32 operations a second on CUDA cores of the GPU that the rates are of. Other GPUs scale by their own.
inline constexpr double measured_flops = 66.9e12;
// No convolution of cuDNN exceeds this share of the tensor cores' peak.
inline constexpr double most_of_tensor_peak = 0.8;

// A convolution with fewer channels is thin: cuDNN does not run it on tensor cores.
inline constexpr int64_t wide_channels = 16;
// A convolution in three dimensions with fewer channels is slower by the *_few rates.
inline constexpr int64_t few_channels = 64;

inline constexpr double launch_seconds = 5e-6;
// A convolution whose tensors are copied into another layout first takes so much longer besides the copies.
inline constexpr double thin_launch_seconds = 2e-5;
inline constexpr double backward_copy_seconds = 1e-5;
inline constexpr double bias_gradient_seconds = 1e-5;
// Copies into cuDNN's layout and back move this share of what a plain copy moves (2026-11-15).
inline constexpr double f32_copy_share = 0.8;
inline constexpr double short_copy_share = 0.5;
// Thin convolutions of fewer elements, input and output together, are not copied.
inline constexpr double copied_elements = 1e5;

// Wide convolutions without groups, of contiguous tensors with their copies (2026-11-15). Layers of U-Nets
// and decoders with 128 to 2560 channels run at 110 to 250 TFLOP/s in tf32 and 230 to 430 in 16 bits. Volumes
// of 32 channels run at 80 and 118. Transposed ones of 64 channels and more (s19, s61) run at 92 and 126, of
// 64 to 32 channels at 8 and 5.
struct WideRates {
  double ordinary, ordinary_few, transposed, transposed_few;
};
inline constexpr WideRates wide_tf32{200e12, 80e12, 95e12, 8e12};
inline constexpr WideRates wide_short{340e12, 118e12, 130e12, 5e12};
inline constexpr double wide_f32 = 45e12;
// Ordinary ones with channels last, in which cuDNN computes (2026-11-17, cudnn.benchmark). 34 layers of a VAE
// decoder and 84 of a diffusion U-Net with 128 to 1024 channels run at 585 to 810 TFLOP/s in 16 bits where
// they fill the GPU; layers of the benchmark at 210 to 350 in tf32. Taking 780 and the copies of x and y for
// contiguous tensors leaves out those of weights: 155 and 30 us were predicted where 300 were measured (2560
// to 1280 channels at 16x16).
inline constexpr double wide_last_tf32 = 300e12;
inline constexpr double wide_last_short = 780e12;

// Thin convolutions without groups (2026-11-15). s27 (3 to 16 channels in three dimensions) runs at 21
// TFLOP/s, s60, a transposed one, at 2.3. Two-dimensional ones run at 14 (8 to 8 channels, kernel 5) to 25 (8
// to 64, kernel 4).
struct ThinRates {
  double transposed, volume, other;
};
inline constexpr ThinRates thin{2.3e12, 21e12, 20e12};
// Their gradients (2026-11-15). They take 6 of the 10.4 ms of s60's step and 15 of the 19.4 ms of s27's, at
// the best settings. Without cudnn.benchmark s27's take 130 ms.
inline constexpr ThinRates thin_backward{1.7e12, 9e12, 60e12};

// A wide convolution runs in tiles of 128 channels by 128 positions. Contiguous, it splits sums where tiles
// are few (2026-11-15): two samples of 320 channels at 8^3, 24 tiles, take 65 us in tf32 and 40 in bf16, two
// to three times as long as at the full rate. With channels last the rate falls with the root of the filled
// part (2026-11-17): in bf16 8, 32 and 64 tiles are predicted to take 11, 18 and 14 us and take 11, 16
// and 16.
inline constexpr double tile_channels = 128;
inline constexpr double tile_positions = 128;
inline constexpr double most_splits = 2.5;

// Convolutions in groups of c channels, the rate per sqrt(c) (2026-11-17, ten layers of 16 to 112 channels a
// group). In 16 bits with channels last 45 to 49 TFLOP/s for 16 channels, 77 to 157 for 32, 24 to 185 for
// more. Rates in tf32 are two thirds of it. Without tensor cores 2 to 17. Transposed ones 2 in tf32, 6 to 9
// in 16 bits.
inline constexpr double grouped_tf32_per_root = 8e12;
inline constexpr double grouped_short_per_root = 12e12;
inline constexpr double grouped_f32 = 10e12;
inline constexpr double grouped_transposed_f32 = 2e12;
inline constexpr double grouped_transposed_short = 8e12;

// Gradients of wide convolutions without groups (2026-11-15, eleven layers). With channels last and 96
// channels and more 290 TFLOP/s for the input's and 155 for the weights' in tf32, 620 in 16 bits. Fewer
// channels give that much less.
inline constexpr double wide_input_gradient_tf32 = 290e12;
inline constexpr double wide_weight_gradient_tf32 = 155e12;
inline constexpr double wide_gradient_short = 620e12;
inline constexpr double full_gradient_channels = 96;

// Gradients of convolutions in groups of c channels, the rate per sqrt(c) (2026-11-17, eight layers). With
// channels last in 16 bits 71 to 79 TFLOP/s for 16 channels, 119 to 192 for 32, 130 to 370 for 64, 54 to 80
// for 112. Rates in tf32 are two thirds of it for the input's and a third for the weights'.
inline constexpr double grouped_input_gradient_tf32_per_root = 13e12;
inline constexpr double grouped_weight_gradient_tf32_per_root = 6e12;
inline constexpr double grouped_gradient_short_per_root = 20e12;
inline constexpr double grouped_gradient_short_most_channels = 64;
inline constexpr double grouped_gradient_short_beyond = 75e12;

// Gradients of convolutions in groups of fewer than 16 channels, of the input and of the weights (2026-11-19,
// 29 drawn problems that move 20 to 800 MB, the faster layout, cudnn.benchmark).
struct GradientRates {
  double input, weight;
};
// Depthwise images, stride 1, no dilation, an output a group: 5.1 to 6.2 TFLOP/s in f32, 5.1 to 12 in 16
// bits.
inline constexpr GradientRates depthwise_gradient_f32{5.6e12, 6e12};
inline constexpr GradientRates depthwise_gradient_short{9e12, 8e12};
// Other depthwise images: 0.9 to 2.2 and 1.0 to 2.2. In one dimension (31 taps) 2.7 to 3.0 and 1.4 to 1.5.
inline constexpr GradientRates depthwise_gradient_other{1.6e12, 1.7e12};
inline constexpr GradientRates depthwise_gradient_line{2.8e12, 1.5e12};
// Depthwise volumes: 2.1 to 2.8 and 0.9 to 1.6; with a stride 0.2 to 0.3 and 0.7 to 0.9, transposed 1.7 and
// 0.9.
inline constexpr GradientRates depthwise_gradient_volume{2.5e12, 1.2e12};
inline constexpr GradientRates depthwise_gradient_strided_volume{0.3e12, 0.9e12};
inline constexpr GradientRates depthwise_gradient_transposed_volume{1.7e12, 0.9e12};
// Groups of c channels in 16 bits, the rate over c * c: 0.44 to 0.66 and 0.19 to 0.57 for 2, 0.34 and 0.89
// for 4, 0.66 and 0.94 for 8. tf32 is taken to be half as fast.
inline constexpr double few_gradient_short_per_square = 0.6e12;
inline constexpr double few_gradient_tf32_per_square = 0.3e12;
// In f32 without tf32: images of 16 channels 9.8 and 8.7; volumes of 4 channels 2.2 and 0.67.
inline constexpr GradientRates grouped_gradient_f32{10e12, 9e12};
inline constexpr GradientRates grouped_gradient_f32_volume{2.2e12, 0.7e12};
// Without groups, images of one input or few outputs (2026-11-19): 16 to 3 channels 5.4 and 2.5 in tf32, 32
// to 2 6.5 and 1.6 in f32, 1 to 16 with 49 taps 3.7 and 8.7.
inline constexpr GradientRates few_gradient{5.5e12, 3e12};
inline constexpr int64_t few_gradient_channels = 8;

}  // namespace onepass::cuda::framework
