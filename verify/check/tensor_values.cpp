// SPDX-License-Identifier: Apache-2.0
// Keeps the values of one tensor that several instances hold: long ranges where they are, others as copies.
#include "verify/check/tensor_values.h"

#include "base/text.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>

namespace reshard::verify {

using namespace schema;

namespace {
constexpr size_t kMapped = 1 << 20; // from this size, untouched pages save more time than two system calls cost

void *newPages(size_t bytes) {
  return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/// More pages for mapped memory, which may move. MAP_FAILED if there is no address space.
void *morePages(void *data, size_t from, size_t to) {
#ifdef __SANITIZE_THREAD__
  // ThreadSanitizer does not see mremap: it would report a race with the thread that had the new addresses before.
  void *grown = newPages(to);
  if (grown != MAP_FAILED) {
    std::memcpy(grown, data, from);
    ::munmap(data, from);
  }
  return grown;
#else
  return ::mremap(data, from, to, MREMAP_MAYMOVE);
#endif
}
} // namespace

LazyBuffer::~LazyBuffer() {
  if (bytes_ >= kMapped)
    ::munmap(data_, bytes_);
  else
    std::free(data_);
}

void LazyBuffer::grow(size_t bytes) {
  if (bytes <= bytes_)
    return;
  if (bytes < kMapped) {
    auto *small = static_cast<std::byte *>(std::realloc(data_, bytes));
    if (!small)
      throw std::bad_alloc();
    std::memset(small + bytes_, 0, bytes - bytes_);
    data_ = small;
    bytes_ = bytes;
    return;
  }
  void *grown = bytes_ >= kMapped ? morePages(data_, bytes_, bytes) : newPages(bytes);
  if (grown == MAP_FAILED)
    throw std::runtime_error("cannot assemble a tensor from the source's shards: no address space for " +
                             humanBytes(static_cast<double>(bytes)) + ": " + std::strerror(errno));
  if (data_ && bytes_ < kMapped) {
    std::memcpy(grown, data_, bytes_);
    std::free(data_);
  }
  data_ = static_cast<std::byte *>(grown);
  bytes_ = bytes;
}

void TensorValues::grow(int64_t end, int64_t item) {
  if (room_ >= end)
    return;
  const int64_t room = std::max(end, room_ + room_ / 2);
  copied_.grow(static_cast<size_t>(room / 8 + 1));
  bytes_.grow(static_cast<size_t>(room) * static_cast<size_t>(item));
  room_ = room;
}

void TensorValues::refer(const ElementRange &range, const std::byte *memory, int64_t item) {
  const std::byte *from = memory + range.local * item;
  const bool contiguous = range.count == 1 || (range.logicalStep == 1 && range.localStep == 1);
  if (contiguous && last_.count > 0 && range.logical == last_.end() && from == last_.data + last_.count * item) {
    last_.count += range.count;
    return;
  }
  addLast();
  if (contiguous)
    last_ = {range.logical, range.count, item, from};
  else
    put(range, memory, item, false);
}

void TensorValues::addLast() {
  if (last_.count * last_.item >= kMinReferred)
    runs_.push_back(last_);
  else if (last_.count > 0)
    copy(last_.first, last_.count, last_.data, last_.item);
  last_.count = 0;
}

bool TensorValues::finish() {
  addLast();
  std::stable_sort(runs_.begin(), runs_.end(), [](const Run &a, const Run &b) { return a.first < b.first; });
  size_t kept = 0;
  int64_t end = 0; // after the runs that are kept
  for (Run run : runs_) {
    if (const int64_t known = std::min(end - run.first, run.count); known > 0) {
      twice_ = true;
      run.first += known;
      run.count -= known;
      run.data += known * run.item;
    }
    for (int64_t at = run.first; at < run.end() && !twice_ && room_ > 0;) {
      const ValueSpan copies = copiedSpan(at, run.end() - at, run.item);
      twice_ = copies.data != nullptr;
      at += copies.count;
    }
    if (run.count == 0)
      continue;
    end = run.end();
    runs_[kept++] = run;
  }
  runs_.resize(kept);
  return twice_;
}

void TensorValues::put(const ElementRange &range, const std::byte *memory, int64_t item, bool agree) {
  const int64_t last = range.logical + (range.count - 1) * range.logicalStep;
  grow(std::max(range.logical, last) + 1, item); // once, not for each element
  if (range.logicalStep == 1 && range.localStep == 1)
    return putRun(range.logical, range.count, memory + range.local * item, item, agree);
  for (int64_t k = 0; k < range.count; ++k)
    putRun(range.logical + k * range.logicalStep, 1, memory + (range.local + k * range.localStep) * item, item, agree);
}

void TensorValues::putRun(int64_t first, int64_t count, const std::byte *from, int64_t item, bool agree) {
  for (int64_t k = 0; agree && conflict_ < 0 && k < count;) {
    const ValueSpan known = copiedSpan(first + k, count - k, item);
    const std::byte *here = from + k * item, *end = here + known.count * item;
    if (known.data && std::memcmp(here, known.data, static_cast<size_t>(known.count * item)) != 0)
      conflict_ = first + k + (std::mismatch(here, end, known.data).first - here) / item;
    k += known.count;
  }
  copy(first, count, from, item);
}

void TensorValues::copy(int64_t first, int64_t count, const std::byte *from, int64_t item) {
  grow(first + count, item);
  std::memcpy(&bytes_[first * item], from, static_cast<size_t>(count * item));
  copiedBytes_ += static_cast<size_t>(count * item);
  for (int64_t at = first, end = first + count; at < end;) {
    const int64_t bit = at % 8, take = std::min(8 - bit, end - at);
    const auto bits = static_cast<std::byte>(((1u << take) - 1) << bit);
    std::byte &known = copied_[at / 8];
    twice_ = twice_ || (known & bits) != std::byte{0};
    known |= bits;
    at += take;
  }
}

ValueSpan TensorValues::copiedSpan(int64_t element, int64_t most, int64_t item) const {
  const bool known = copied(element);
  int64_t count = 1;
  while (count < most) {
    const int64_t at = element + count;
    if (at >= room_ && !known)
      return {most, nullptr};
    // Eight elements at a time where all are alike.
    if (at % 8 == 0 && most - count >= 8 && at + 8 <= room_ && copied_[at / 8] == std::byte(known ? 0xFF : 0))
      count += 8;
    else if (copied(at) == known)
      ++count;
    else
      break;
  }
  return {count, known ? &bytes_[element * item] : nullptr};
}

ValueSpan TensorValues::span(int64_t element, int64_t most, int64_t item) const {
  const auto after = std::upper_bound(runs_.begin(), runs_.end(), element,
                                      [](int64_t wanted, const Run &run) { return wanted < run.first; });
  if (after != runs_.begin())
    if (const Run &run = *std::prev(after); element < run.end())
      return {std::min(most, run.end() - element), run.data + (element - run.first) * item};
  if (after != runs_.end())
    most = std::min(most, after->first - element);
  return copiedSpan(element, most, item);
}

} // namespace reshard::verify
