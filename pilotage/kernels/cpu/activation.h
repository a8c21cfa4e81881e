// Activations of sixteen numbers, by the number that `functional.native` gives their names.
#pragma once

#include "vec.h"

namespace pilotage {

enum class Activation : int64_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3 };

// 1 / (1 + exp(-x)) without cancellation at either end.
inline f32x16 sigmoid16(f32x16 x) {
  const i32x16 negative = x < f32x16{};
  const f32x16 small = exp16((f32x16)((i32x16)x | int32_t(0x80000000)));
  const f32x16 top = (f32x16)(((i32x16)small & negative) | ((i32x16)splat(1.0f) & ~negative));
  return top / (small + 1.0f);
}

// erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline f32x16 erf16(f32x16 x) {
  const i32x16 sign = (i32x16)x & int32_t(0x80000000);
  const f32x16 size = (f32x16)((i32x16)x & int32_t(0x7fffffff));
  const f32x16 t = 1.0f / (size * 0.3275911f + 1.0f);
  f32x16 p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  return (f32x16)((i32x16)(1.0f - p * t * exp16(-size * size)) ^ sign);
}

inline f32x16 activate16(f32x16 x, Activation activation) {
  switch (activation) {
    case Activation::kSilu: return x * sigmoid16(x);
    case Activation::kGelu: return x * 0.5f * (erf16(x * 0.70710678118654752f) + 1.0f);
    case Activation::kGeluTanh: return x * sigmoid16(x * (x * x * 0.044715f + 1.0f) * 1.5957691216057308f);
    case Activation::kRelu: {
      const i32x16 negative = x < f32x16{};  // NaN stays
      return (f32x16)((i32x16)x & ~negative);
    }
  }
  return x;
}

// bf16 and back: what an operator between two bf16 tensors would have seen.
inline f32x16 rounded16(f32x16 x) {
  alignas(32) bf16 half[16];
  store16(half, x);
  return load16(half);
}

// activation(gate) * up of 16 numbers, every step rounded as the definition rounds it.
inline f32x16 gated16(f32x16 gate, f32x16 up, Activation activation) {
  return rounded16(activate16(rounded16(gate), activation)) * rounded16(up);
}

}  // namespace pilotage
