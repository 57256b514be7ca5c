// SPDX-License-Identifier: Apache-2.0
// A maximum flow from send classes to groups of senders, for a load that begins at a lower bound and grows to the
// bound of each minimum cut until all bytes are carried.
#include "compiler/transfer/optimum.h"

#include "ir/index_map.h"

#include <algorithm>
#include <map>

namespace reshard {

namespace {

/// The maximum flow from classes to groups of senders. Capacities may grow between calls of maximize(), which continues
/// from the flow found so far.
class MaxFlow {
public:
  MaxFlow(const std::vector<int64_t> &supply, std::vector<std::vector<uint32_t>> groupsOf, size_t groups)
      : left_(supply), groupsOf_(std::move(groupsOf)), room_(groups), classesOf_(groups) {
    for (uint32_t c = 0; c < groupsOf_.size(); ++c) {
      flow_.emplace_back(groupsOf_[c].size());
      for (uint32_t i = 0; i < groupsOf_[c].size(); ++i)
        classesOf_[groupsOf_[c][i]].push_back({c, i});
    }
  }

  void grow(size_t group, int64_t by) { room_[group] += by; }

  /// Whether all supply is carried.
  bool maximize() {
    while (levels()) {
      next_.assign(groupsOf_.size(), 0);
      nextClass_.assign(room_.size(), 0);
      for (uint32_t c = 0; c < groupsOf_.size(); ++c)
        while (left_[c] > 0) {
          const int64_t sent = push(c, left_[c]);
          if (sent == 0)
            break;
          left_[c] -= sent;
        }
    }
    return std::all_of(left_.begin(), left_.end(), [](int64_t bytes) { return bytes == 0; });
  }

  /// After maximize(): the groups that classes with bytes left still reach. They are full, and no other group can take
  /// their load: they are the sender side of a minimum cut.
  std::vector<uint32_t> stuck() const {
    std::vector<uint32_t> result;
    for (uint32_t g = 0; g < room_.size(); ++g)
      if (groupLevel_[g] >= 0)
        result.push_back(g);
    return result;
  }

  bool reached(uint32_t c) const { return classLevel_[c] >= 0; }
  int64_t flow(uint32_t c, uint32_t i) const { return flow_[c][i]; }

private:
  /// Computes levels by a breadth-first search from the classes with bytes left. Returns whether it reached a group
  /// with room.
  bool levels() {
    classLevel_.assign(groupsOf_.size(), -1);
    groupLevel_.assign(room_.size(), -1);
    std::vector<uint32_t> classes;
    for (uint32_t c = 0; c < groupsOf_.size(); ++c)
      if (left_[c] > 0) {
        classLevel_[c] = 0;
        classes.push_back(c);
      }
    bool found = false;
    for (int level = 0; !classes.empty() && !found; ++level) {
      std::vector<uint32_t> following;
      for (uint32_t c : classes)
        for (uint32_t g : groupsOf_[c]) {
          if (groupLevel_[g] >= 0)
            continue;
          groupLevel_[g] = level;
          found = found || room_[g] > 0;
          for (const auto &[other, i] : classesOf_[g])
            if (classLevel_[other] < 0 && flow_[other][i] > 0) {
              classLevel_[other] = level + 1;
              following.push_back(other);
            }
        }
      classes = std::move(following);
    }
    return found;
  }

  /// Sends at most `bytes` along one path of ascending levels: from class `c` to a group with room, or to a full group
  /// whose other class sends as much to another group instead. Returns the bytes sent.
  int64_t push(uint32_t c, int64_t bytes) {
    for (uint32_t &i = next_[c]; i < groupsOf_[c].size(); ++i) {
      const uint32_t g = groupsOf_[c][i];
      if (groupLevel_[g] != classLevel_[c])
        continue;
      int64_t sent = std::min(bytes, room_[g]);
      room_[g] -= sent;
      for (uint32_t &k = nextClass_[g]; sent == 0 && k < classesOf_[g].size(); ++k) {
        const auto &[other, j] = classesOf_[g][k];
        if (classLevel_[other] != classLevel_[c] + 1 || flow_[other][j] == 0)
          continue;
        sent = push(other, std::min(bytes, flow_[other][j]));
        flow_[other][j] -= sent;
        if (sent > 0)
          break;
      }
      if (sent > 0) {
        flow_[c][i] += sent;
        return sent;
      }
    }
    return 0;
  }

  struct Use {
    uint32_t number, index;
  };
  std::vector<int64_t> left_;                   // by class
  std::vector<std::vector<uint32_t>> groupsOf_; // by class
  std::vector<std::vector<int64_t>> flow_;      // by class, by index into groupsOf_
  std::vector<int64_t> room_;                   // by group
  std::vector<std::vector<Use>> classesOf_;     // by group
  std::vector<int> classLevel_, groupLevel_;
  std::vector<uint32_t> next_, nextClass_; // first entries that are not exhausted in the current levels
};

/// Senders that occur in the same classes.
struct SenderGroup {
  std::vector<int32_t> senders;
  int64_t base = 0, capacity = 0; // sums
};

/// The senders, with what each sends already and how much it can send.
struct Senders {
  const std::vector<int64_t> &base, &capacities;

  int64_t capacity(int32_t sender) const { return capacities.empty() ? 1 : capacities[sender]; }
  /// The bytes with which a sender has a load.
  int64_t full(int32_t sender, int64_t load) const {
    int64_t bytes = 0;
    return __builtin_mul_overflow(load, capacity(sender), &bytes) ? INT64_MAX : bytes;
  }
};

struct SenderGroups {
  std::vector<SenderGroup> groups;
  std::vector<std::vector<uint32_t>> ofClass; // by class: its groups, ascending
};

SenderGroups groupSenders(const std::vector<SendClass> &classes, const Senders &senders) {
  std::map<int32_t, std::vector<uint32_t>> classesOf;
  for (uint32_t c = 0; c < classes.size(); ++c)
    for (int32_t sender : classes[c].senders)
      classesOf[sender].push_back(c);
  SenderGroups result;
  std::map<std::vector<uint32_t>, uint32_t> numbers;
  std::map<int32_t, uint32_t> groupOf;
  for (const auto &[sender, list] : classesOf) {
    const uint32_t group = numbers.try_emplace(list, static_cast<uint32_t>(result.groups.size())).first->second;
    if (group == result.groups.size())
      result.groups.emplace_back();
    result.groups[group].senders.push_back(sender);
    result.groups[group].base += senders.base[sender];
    result.groups[group].capacity += senders.capacity(sender);
    groupOf[sender] = group;
  }
  for (const SendClass &each : classes) {
    std::vector<uint32_t> list;
    list.reserve(each.senders.size());
    for (int32_t sender : each.senders)
      list.push_back(groupOf[sender]);
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    result.ofClass.push_back(std::move(list));
  }
  return result;
}

/// Raises the load of `result` to that of groups that share the bytes of the classes for which counts(class) holds: a
/// lower bound of the optimum.
template <class Counts>
void raise(Optimum &result, const std::vector<SendClass> &classes, const std::vector<SenderGroup> &groups,
           const std::vector<uint32_t> &among, Counts counts) {
  int64_t bytes = 0, capacity = 0;
  for (uint32_t g : among) {
    bytes += groups[g].base;
    capacity += groups[g].capacity;
  }
  for (uint32_t c = 0; c < classes.size(); ++c)
    if (counts(c))
      bytes += classes[c].bytes;
  if (capacity == 0 || ceilDivide(bytes, capacity) <= result.load)
    return;
  result.load = ceilDivide(bytes, capacity);
  result.busiestBytes = bytes;
  result.busiest.clear();
  for (uint32_t g : among)
    result.busiest.insert(result.busiest.end(), groups[g].senders.begin(), groups[g].senders.end());
  std::sort(result.busiest.begin(), result.busiest.end());
}

/// Divides the flow from classes to groups among the senders of each group. They are interchangeable: they are filled
/// up to the load of `result` one after the other, class by class.
void assignSenders(const std::vector<SendClass> &classes, const Senders &senders, const SenderGroups &groups,
                   const MaxFlow &flow, Optimum &result) {
  std::vector<size_t> filling(groups.groups.size());
  std::vector<int64_t> used(senders.base);
  for (uint32_t c = 0; c < classes.size(); ++c) {
    std::vector<int64_t> &bytes = result.bytes.emplace_back(classes[c].senders.size());
    for (uint32_t i = 0; i < groups.ofClass[c].size(); ++i) {
      const uint32_t g = groups.ofClass[c][i];
      for (int64_t left = flow.flow(c, i); left > 0;) {
        const int32_t sender = groups.groups[g].senders[filling[g]];
        const int64_t taken = std::min(left, senders.full(sender, result.load) - used[sender]);
        used[sender] += taken;
        left -= taken;
        bytes[std::lower_bound(classes[c].senders.begin(), classes[c].senders.end(), sender) -
              classes[c].senders.begin()] += taken;
        if (used[sender] == senders.full(sender, result.load))
          ++filling[g];
      }
    }
  }
}

} // namespace

Optimum optimum(const std::vector<SendClass> &classes, const std::vector<int64_t> &base,
                const std::vector<int64_t> &capacity) {
  const Senders senders{base, capacity};
  const SenderGroups groups = groupSenders(classes, senders);
  const size_t count = groups.groups.size();
  Optimum result;
  std::vector<uint32_t> everyGroup(count);
  for (uint32_t g = 0; g < count; ++g) {
    everyGroup[g] = g;
    for (int32_t sender : groups.groups[g].senders)
      if (const int64_t load = ceilDivide(base[sender], senders.capacity(sender)); load > result.load) {
        result.load = load;
        result.busiest = {sender};
        result.busiestBytes = base[sender];
      }
  }
  raise(result, classes, groups.groups, everyGroup, [](uint32_t) { return true; });

  std::vector<int64_t> supply;
  supply.reserve(classes.size());
  int64_t all = 0;
  for (const SendClass &each : classes) {
    supply.push_back(each.bytes);
    all += each.bytes;
  }
  MaxFlow flow(supply, groups.ofClass, count);
  std::vector<int64_t> room(count);
  while (true) {
    for (uint32_t g = 0; g < count; ++g) {
      int64_t now = 0; // the sum of what each sender can still take below `load`; more than all bytes is no use
      for (int32_t sender : groups.groups[g].senders)
        now = std::min(all, now + std::min(all, senders.full(sender, result.load) - base[sender]));
      flow.grow(g, now - room[g]);
      room[g] = now;
    }
    if (flow.maximize())
      break;
    raise(result, classes, groups.groups, flow.stuck(), [&](uint32_t c) { return flow.reached(c); });
  }
  assignSenders(classes, senders, groups, flow, result);
  return result;
}

} // namespace reshard
