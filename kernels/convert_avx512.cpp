// Compiled with AVX-512 F, BW, DQ and VL.
#include "kernels/convert_lanes.h"

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
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  using Register = __m512i;
  using HalfRegister = __m256i;

  static __m512 fromHalves(HalfRegister halves) { return _mm512_cvtph_ps(halves); }
  static HalfRegister toHalves(Register floats) { return _mm512_cvtps_ph(_mm512_castsi512_ps(floats), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static HalfRegister words(Register a) { return _mm512_cvtepi32_epi16(a); }
  static __m128i bytes(Register a) { return _mm512_cvtepi32_epi8(a); }
  static void store(std::byte *at, Register a, bool stream) {
    stream ? _mm512_stream_si512(reinterpret_cast<__m512i *>(at), a) : _mm512_storeu_si512(at, a);
  }
  static void store(std::byte *at, HalfRegister a, bool stream) {
    stream ? _mm256_stream_si256(reinterpret_cast<__m256i *>(at), a) : _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), a);
  }
  static void store(std::byte *at, __m128i a, bool stream) {
    stream ? _mm_stream_si128(reinterpret_cast<__m128i *>(at), a) : _mm_storeu_si128(reinterpret_cast<__m128i *>(at), a);
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
