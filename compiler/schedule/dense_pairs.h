// SPDX-License-Identifier: Apache-2.0
// Which ports of a link tier can be matched, if most senders send to most receivers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace reshard {

/// The pairs of a tier in which most senders send to most receivers, as bits: a port with a thousand pairs finds the
/// unmatched partners to which it has bytes left in a few words, where a list of its pairs would wait for memory at
/// each of them.
class DensePairs {
public:
  static constexpr uint32_t kNone = UINT32_MAX;

  /// Takes the pairs of a tier, each a sending and a receiving port, which all have bytes left, and its ports, all
  /// unmatched: whether they send. Does nothing if the pairs are too few for the ports.
  void fill(const std::vector<bool> &sends, const std::vector<std::pair<uint32_t, uint32_t>> &pairs);

  bool empty() const { return numbers_.empty(); }
  void setIdle(uint32_t port, bool idle) { set(idle_[sends_[port]], number_[port], idle); }
  void setLeft(uint32_t out, uint32_t in, bool left) {
    set(partners_[out], number_[in], left);
    set(partners_[in], number_[out], left);
  }

  /// The pair of a port and a partner; kNone if there is none, or if it has no bytes left.
  uint32_t find(uint32_t port, uint32_t partner) const {
    const uint32_t number = number_[partner];
    return partners_[port][number / 64] >> (number % 64) & 1 ? numbers_[place(port, number)] : kNone;
  }

  /// Calls visit(pair, partner) for the unmatched partners to which a port has bytes left, until it returns true: in
  /// the order of their numbers from `begin` on, then those before it. Returns the number after that of the last one,
  /// or `begin` if visit returned true for none.
  template <class Visit> uint32_t visit(uint32_t port, uint32_t begin, Visit visit) const;

private:
  /// The most places of the table of numbers for each pair: it then needs no more memory than the pairs.
  static constexpr size_t kPlaces = 8;

  /// The place in numbers_ of a port and the partner of this number.
  size_t place(uint32_t port, uint32_t partner) const {
    const size_t receivers = ports_[false].size(), own = number_[port];
    return sends_[port] ? own * receivers + partner : partner * receivers + own;
  }

  static void set(std::vector<uint64_t> &bits, uint32_t at, bool value) {
    const uint64_t bit = uint64_t{1} << (at % 64);
    bits[at / 64] = value ? bits[at / 64] | bit : bits[at / 64] & ~bit;
  }

  std::vector<bool> sends_;                     // by port
  std::vector<uint32_t> number_;                // by port: its number among the ports of its side
  std::vector<uint32_t> ports_[2];              // receiving, sending: by that number
  std::vector<uint64_t> idle_[2];               // bits by number: unmatched
  std::vector<std::vector<uint64_t>> partners_; // by port, bits by number of the partner: the pair has bytes left
  std::vector<uint32_t> numbers_;               // by sender and receiver: the number of the pair
};

inline void DensePairs::fill(const std::vector<bool> &sends, const std::vector<std::pair<uint32_t, uint32_t>> &pairs) {
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

template <class Visit> uint32_t DensePairs::visit(uint32_t port, uint32_t begin, Visit visit) const {
  const std::vector<uint64_t> &idle = idle_[!sends_[port]], &left = partners_[port];
  const std::vector<uint32_t> &partners = ports_[!sends_[port]];
  const size_t words = idle.size(), first = begin / 64;
  const uint64_t before = (uint64_t{1} << (begin % 64)) - 1; // bits before `begin` in its word
  for (size_t i = 0; i <= words; ++i) {
    const size_t word = (first + i) % words;
    uint64_t bits = idle[word] & left[word] & (i == 0 ? ~before : i == words ? before : ~uint64_t{0});
    for (; bits != 0; bits &= bits - 1) {
      const auto number = static_cast<uint32_t>(word * 64 + static_cast<size_t>(std::countr_zero(bits)));
      if (visit(numbers_[place(port, number)], partners[number]))
        return number + 1;
    }
  }
  return begin;
}

} // namespace reshard
