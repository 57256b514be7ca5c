// SPDX-License-Identifier: Apache-2.0
// Compiled with AVX2.
#include "kernels/tensor_digest_words.h"

#if defined(__x86_64__)

#include <cstring>
#include <immintrin.h>

namespace reshard::kernels {

namespace {

__m256i load(const void *at) { return _mm256_loadu_si256(static_cast<const __m256i *>(at)); }

uint64_t total(__m256i sums) {
  uint64_t lanes[4];
  std::memcpy(lanes, &sums, sizeof lanes);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

} // namespace

WordSums sumWordsAvx2(const std::byte *data, uint64_t place, uint64_t count) {
  constexpr uint64_t kWords = 8;
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  uint64_t k = 0;
  for (; k + kWords <= count; k += kWords) {
    const __m256i words = load(data + 4 * k), odd = _mm256_srli_epi64(words, 32);
    for (size_t s = 0; s < 2; ++s) {
      const __m256i keys = load(&kPlaceKeys.of[s][place + k]);
      sums[s] = _mm256_add_epi64(
          sums[s], _mm256_add_epi64(_mm256_mul_epu32(words, keys), _mm256_mul_epu32(odd, _mm256_srli_epi64(keys, 32))));
    }
  }
  WordSums rest = sumWordsPortable(data + 4 * k, place + k, count - k);
  for (size_t s = 0; s < 2; ++s)
    rest.of[s] += total(sums[s]);
  return rest;
}

} // namespace reshard::kernels

#endif
