// SPDX-License-Identifier: Apache-2.0
// Compiled with AVX-512 F, BW, DQ and VL.
#include "kernels/cpu/convert_lanes.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace reshard::kernels {

namespace {

struct Avx512 {
  static constexpr uint64_t kLanes = 16;
  typedef float Floats __attribute__((vector_size(64)));
  typedef uint32_t Bits __attribute__((vector_size(64)));
  typedef int32_t Integers __attribute__((vector_size(64)));
  typedef uint16_t Words __attribute__((vector_size(32)));
  typedef int16_t Shorts __attribute__((vector_size(32)));
  typedef uint16_t Pairs __attribute__((vector_size(64)));
  using Register = __m512i;
  using HalfRegister = __m256i;

  static Register widen(HalfRegister words) { return _mm512_cvtepu16_epi32(words); }
  static HalfRegister widenBytes(const std::byte *at) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
  }
  static __m512 fromHalves(HalfRegister halves) { return _mm512_cvtph_ps(halves); }
  static HalfRegister toHalves(Register floats) {
    return _mm512_cvtps_ph(_mm512_castsi512_ps(floats), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static HalfRegister words(Register a) { return _mm512_cvtepi32_epi16(a); }
  static __m128i bytes(Register a) { return _mm512_cvtepi32_epi8(a); }
  static HalfRegister pairBytes(Register a) { return _mm512_cvtepi16_epi8(a); }
  static bool anyBelow(Register a, Register b) { return _mm512_cmplt_epu16_mask(a, b) != 0; }
  static uint64_t pack(const std::byte *codes) {
    const __m128i pairs =
        _mm_maddubs_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(codes)), _mm_set1_epi16(0x1001));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs)));
  }
  static void unpack(std::byte *codes, uint64_t packed) {
    const __m128i pairs = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<long long>(packed)));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(codes),
                     _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16(pairs, 4)), _mm_set1_epi8(0xF)));
  }
  static void store(std::byte *at, Register a, bool stream) {
    stream ? _mm512_stream_si512(reinterpret_cast<__m512i *>(at), a) : _mm512_storeu_si512(at, a);
  }
  static void store(std::byte *at, HalfRegister a, bool stream) {
    stream ? _mm256_stream_si256(reinterpret_cast<__m256i *>(at), a)
           : _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), a);
  }
  static void store(std::byte *at, __m128i a, bool stream) {
    stream ? _mm_stream_si128(reinterpret_cast<__m128i *>(at), a)
           : _mm_storeu_si128(reinterpret_cast<__m128i *>(at), a);
  }
  static void store(std::byte *at, uint64_t a, bool stream) {
    if (stream)
      _mm_stream_si64(reinterpret_cast<long long *>(at), static_cast<long long>(a));
    else
      std::memcpy(at, &a, sizeof(a));
  }
};

} // namespace

constinit const ConvertKernels kConvertAvx512 = Rows<Lanes<Avx512>>::table();

} // namespace reshard::kernels

#endif
