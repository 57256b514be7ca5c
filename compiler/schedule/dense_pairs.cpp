// SPDX-License-Identifier: Apache-2.0
#include "compiler/schedule/dense_pairs.h"

namespace reshard {

void DensePairs::fill(const std::vector<bool> &sends, const std::vector<std::pair<uint32_t, uint32_t>> &pairs) {
  sends_ = sends;
  for (uint32_t port = 0; port < sends.size(); ++port) {
    std::vector<uint32_t> &side = ports_[sends[port]];
    number_.push_back(static_cast<uint32_t>(side.size()));
    side.push_back(port);
  }
  const size_t receivers = ports_[false].size(), senders = ports_[true].size();
  if (senders * receivers > kPlaces * pairs.size())
    return;
  numbers_.assign(senders * receivers, kNone);
  for (const bool side : {false, true})
    idle_[side].resize(ports_[side].size() / 64 + 1);
  for (uint32_t port = 0; port < sends.size(); ++port) {
    partners_.emplace_back(idle_[!sends[port]].size());
    setIdle(port, true);
  }
  for (uint32_t pair = 0; pair < pairs.size(); ++pair) {
    const auto [out, in] = pairs[pair];
    numbers_[place(out, number_[in])] = pair;
    setLeft(out, in, true);
  }
}

} // namespace reshard
