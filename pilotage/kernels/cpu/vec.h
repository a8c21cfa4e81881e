// Sixteen fp32 lanes in compiler vector types: AVX-512 where the machine has it, narrower registers elsewhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace pilotage {

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out.bits = std::isnan(x) ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline f32x16 splat(float x) { return f32x16{} + x; }

inline f32x16 load16(const float* p) {
  f32x16 out;
  std::memcpy(&out, p, 64);
  return out;
}
inline f32x16 load16(const bf16* p) {
  u16x16 half;
  std::memcpy(&half, p, 32);
#if defined(__AVX512F__)
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}

inline void store16(float* p, f32x16 x) { std::memcpy(p, &x, 64); }
inline void store16(bf16* p, f32x16 x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &half, 32);
#else
  for (int i = 0; i < 16; ++i) from_float(x[i], p[i]);
#endif
}

// Thirty-two bf16 numbers, as they lie in memory; for fp32 two vectors of sixteen.
template <typename T>
struct Pack;

template <>
struct Pack<bf16> {
  u32x16 bits;
  static Pack load(const bf16* p) {
    Pack out;
    std::memcpy(&out.bits, p, 64);
    return out;
  }
};

template <>
struct Pack<float> {
  f32x16 first, second;
  static Pack load(const float* p) { return {load16(p), load16(p + 16)}; }
};

template <typename T>
inline Pack<T> load_first(const T* p, int n) {  // the first n of 32, the rest zero
  T padded[32] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return Pack<T>::load(padded);
}

// Adds the products of two packs to an accumulator whose lanes are summed at the end.
inline f32x16 dot(f32x16 sum, const Pack<bf16>& a, const Pack<bf16>& b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a.bits, (__m512bh)b.bits);
#else
  const u32x16 high = u32x16{} + 0xffff0000u;
  sum += (f32x16)(a.bits << 16) * (f32x16)(b.bits << 16);
  return sum + (f32x16)(a.bits & high) * (f32x16)(b.bits & high);
#endif
}
inline f32x16 dot(f32x16 sum, const Pack<float>& a, const Pack<float>& b) {
  sum += a.first * b.first;
  return sum + a.second * b.second;
}

inline float sum_lanes(f32x16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float out = 0;
  for (int i = 0; i < 16; ++i) out += x[i];
  return out;
#endif
}

inline float max_lanes(f32x16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float out = x[0];
  for (int i = 1; i < 16; ++i) out = x[i] > out ? x[i] : out;
  return out;
#endif
}

// The first n <= 16 bf16 numbers at p, each in the lower half of its lane.
inline u32x16 bits_of_16(const bf16* p, int n) {
  u16x16 half = {};
  std::memcpy(&half, p, n == 16 ? 32 : n * sizeof(bf16));
  return __builtin_convertvector(half, u32x16);
}

// Lane i of the result is the sum of the lanes of x[i]; the array is used up.
inline f32x16 sum_lanes_of_16(f32x16* x) {
#if defined(__AVX512F__)
  __m512 a[16];
  for (int i = 0; i < 8; ++i) {
    const __m512 low = (__m512)x[2 * i], high = (__m512)x[2 * i + 1];
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(low, high), _mm512_unpackhi_ps(low, high));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
    a[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 low = a[2 * i], high = a[2 * i + 1];
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }
  return (f32x16)_mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x88), _mm512_shuffle_f32x4(a[0], a[1], 0xdd));
#else
  f32x16 out;
  for (int i = 0; i < 16; ++i) out[i] = sum_lanes(x[i]);
  return out;
#endif
}

// exp to about 2 ulp for x <= 0 (softmax weights): 2^n times a polynomial; below -87 the result is 0.
inline f32x16 exp16(f32x16 x) {
  const f32x16 lowest = splat(-87.0f);
  const i32x16 alive = ~(x <= lowest);  // what is not a number stays so
  x = (f32x16)((i32x16)x & alive);
  const f32x16 rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 n = (x * 1.44269504088896341f + rounder) - rounder;
  f32x16 r = x - n * 0.693145751953125f;
  r = r - n * 1.428606765330187045e-06f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const i32x16 power = (__builtin_convertvector(n, i32x16) + 127) << 23;
  return (f32x16)((i32x16)(p * (f32x16)power) & alive);
}

}  // namespace pilotage
