// SPDX-License-Identifier: Apache-2.0
// Compiled with AVX2.
#include "kernels/tensor_digest_words.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace reshard::kernels {

namespace {

constexpr uint64_t kWords = PlaceKeys::kVectorWords;
constexpr uint64_t kPrefetchBytes = 1024; // between rows of a few KiB the CPU's own prefetching begins anew

__m256i load(const void *at) { return _mm256_loadu_si256(static_cast<const __m256i *>(at)); }

/// The first `count` words, then zeros; reads no other memory.
__m256i loadFirst(const std::byte *at, uint64_t count) {
  alignas(32) static constexpr int32_t kMask[2 * kWords] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_maskload_epi32(reinterpret_cast<const int *>(at), load(&kMask[kWords - count]));
}

void add(__m256i (&sums)[2], __m256i words, uint64_t place) {
  const __m256i odd = _mm256_srli_epi64(words, 32);
  for (size_t s = 0; s < 2; ++s) {
    const __m256i keys = load(&kPlaceKeys.of[s][place]);
    sums[s] = _mm256_add_epi64(
        sums[s], _mm256_add_epi64(_mm256_mul_epu32(words, keys), _mm256_mul_epu32(odd, _mm256_srli_epi64(keys, 32))));
  }
}

__m128i halves(__m256i sums) { return _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)); }

} // namespace

WordSums sumWordsAvx2(const std::byte *data, uint64_t place, uint64_t count) {
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  uint64_t k = 0;
  for (; k + kWords <= count; k += kWords) {
    _mm_prefetch(reinterpret_cast<const char *>(data + 4 * k + kPrefetchBytes), _MM_HINT_T0);
    add(sums, load(data + 4 * k), place + k);
  }
  if (k < count)
    add(sums, loadFirst(data + 4 * k, count - k), place + k);
  const __m128i first = halves(sums[0]), second = halves(sums[1]);
  WordSums total;
  _mm_storeu_si128(reinterpret_cast<__m128i *>(total.of),
                   _mm_add_epi64(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second)));
  return total;
}

} // namespace reshard::kernels

#endif
