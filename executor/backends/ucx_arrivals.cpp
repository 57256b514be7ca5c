// SPDX-License-Identifier: Apache-2.0

#include "executor/backends/ucx_arrivals.h"

#include <algorithm>
#include <cstring>

namespace reshard::ucx {

void ArrivalQueue::reserve(size_t requests) {
  arrivals_.reserve(kWindow + requests);
  receives_.reserve(requests);
}

bool ArrivalQueue::add(Arrival arrival, const void *data, size_t bytes) {
  const Header &header = arrival.header;
  const bool known = std::any_of(arrivals_.begin(), arrivals_.end(),
                                 [&](const Arrival &each) { return each.header.number == header.number; });
  if (known || header.number < admitted_ || header.bytes > kMaxChannelBytes || arrivals_.size() >= kMaxArrivals)
    return false;
  if (arrival.descriptor) {
    if (header.id == kReadMe || bytes != std::max<uint64_t>(header.bytes, 1))
      return false;
  } else if (header.id == kReadMe) {
    if (bytes != 0)
      return false;
  } else {
    if (!inbox_)
      inbox_ = std::make_unique<Inbox>();
    bool(&used)[kWindow] = inbox_->used;
    arrival.place = static_cast<size_t>(std::find(std::begin(used), std::end(used), false) - std::begin(used));
    if (arrival.place == kWindow || bytes != header.bytes || bytes > kEagerBytes)
      return false;
    used[arrival.place] = true;
    if (bytes > 0)
      std::memcpy(inbox_->memory[arrival.place], data, bytes);
  }
  arrivals_.push_back(arrival);
  return true;
}

std::optional<ArrivalQueue::Match> ArrivalQueue::match() {
  // UCX may pass on messages of different lengths in another order than they were sent.
  while (true) {
    const auto next = std::find_if(arrivals_.begin(), arrivals_.end(),
                                   [&](const Arrival &each) { return each.header.number == admitted_; });
    if (next == arrivals_.end())
      return {};
    const auto receive = std::find_if(receives_.begin(), receives_.end(),
                                      [&](const Receive &each) { return each.tag == next->header.tag; });
    if (receive != receives_.end()) {
      const Match match{receive->request, *next};
      arrivals_.erase(next);
      receives_.erase(receive);
      ++admitted_;
      return match;
    }
    const auto later =
        std::find_if(arrivals_.begin(), next, [&](const Arrival &each) { return each.header.number > admitted_; });
    std::rotate(later, next, next + 1);
    ++admitted_;
  }
}

const Arrival *ArrivalQueue::find(uint32_t tag) const {
  const auto arrival = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival &each) {
    return each.header.tag == tag && each.header.number < admitted_;
  });
  return arrival == arrivals_.end() ? nullptr : &*arrival;
}

} // namespace reshard::ucx
