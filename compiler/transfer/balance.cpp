// SPDX-License-Identifier: Apache-2.0
// balance: chooses a source for every transfer that has none. Candidates follow the locality rule (candidates.h): the
// target's own rank, else its node, else all replicas. Transfers with the same candidates form a class. The fractional
// optimum over the classes (optimum.h) gives the bytes that each candidate sends to each class. The transfers of a
// class are assigned in that proportion, in the order of their targets. They are cut between tensors, or inside a
// tensor where whole tensors would miss the optimum by more than a fraction of 1 / kBalanceTolerance. Epochs (--keep)
// are planned one after the other, so that targets that joined earlier keep their sources.

#include "compiler/pass.h"
#include "compiler/transfer/candidates.h"
#include "compiler/transfer/lists.h"
#include "compiler/transfer/optimum.h"
#include "compiler/transfer/split.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// A cut may miss its position by the optimum divided by this. Errors do not add up: each class corrects those of the
/// classes before it.
constexpr int64_t kBalanceTolerance = 512;
/// Limits of the improvement after the assignment: the number of moves (or chains of moves), and the number of mesh
/// ranks that the search for one of them visits.
constexpr int kMoves = 64;
constexpr int kMaxVisited = 1 << 16;

class Balancer {
public:
  explicit Balancer(Module &module)
      : module_(module), layout_(module.layout), candidates_(module.layout), splitter_(module),
        load_(module.layout.endpoints[0].meshRanks()), all_(std::move(module.transfers.transfers)),
        count_(static_cast<uint32_t>(all_.size())) {
    for (const Endpoint &endpoint : layout_.endpoints) {
      firstTarget_.push_back(targets_);
      targets_ += endpoint.ranks.size();
    }
  }

  void run() {
    sortUnlessSorted(all_, [](const Transfer &a, const Transfer &b) { return a.overlap < b.overlap; });
    given_.reserve(count_);
    for (uint32_t i = 0; i < count_; ++i)
      if (all_[i].source != Transfer::kUnassigned)
        given_.push_back(i);
    for (uint32_t epoch = 0; epoch <= last(); ++epoch)
      run(epoch);
    order();
    module_.transfers.transfers = std::move(all_);
  }

private:
  uint32_t epochOf(const Transfer &transfer) const {
    return layout_.endpoints[module_.transfers.overlaps[transfer.overlap].endpoint].epoch(transfer.target);
  }

  uint32_t last() const {
    uint32_t last = 0;
    for (const Endpoint &endpoint : layout_.endpoints)
      for (uint32_t epoch : endpoint.epochs)
        last = std::max(last, epoch);
    return last;
  }

  int64_t bytesOf(const Transfer &transfer) const { return bytes(module_.transfers, transfer); }

  void run(uint32_t epoch) {
    std::vector<SendClass> classes;
    std::vector<std::vector<uint32_t>> unassigned; // by class: numbers of transfers
    std::map<std::vector<int32_t>, size_t> numbers;
    const Overlap *overlap = nullptr;
    std::map<const std::vector<int32_t> *, size_t> ofOverlap;
    for (uint32_t i = 0; i < count_; ++i) {
      const Transfer &transfer = all_[i];
      if (transfer.source != Transfer::kUnassigned || epochOf(transfer) != epoch)
        continue;
      if (overlap != &module_.transfers.overlaps[transfer.overlap]) {
        overlap = &module_.transfers.overlaps[transfer.overlap];
        candidates_.select(*overlap);
        ofOverlap.clear();
      }
      if (const auto own = candidates_.own(transfer.target)) {
        assign(i, *own); // a local copy adds nothing to the load
        continue;
      }
      const std::vector<int32_t> &meshRanks = candidates_.preferred(transfer.target);
      auto [at, added] = ofOverlap.try_emplace(&meshRanks);
      if (added) {
        at->second = numbers.try_emplace(meshRanks, classes.size()).first->second;
        if (at->second == classes.size()) {
          classes.push_back({meshRanks, 0});
          unassigned.emplace_back();
        }
      }
      classes[at->second].bytes += bytesOf(transfer);
      unassigned[at->second].push_back(i);
    }
    const Optimum best = optimum(classes, load_);
    std::vector<int64_t> deficit(load_.size()); // by source mesh rank: bytes below its share of the optimum so far
    std::vector<size_t> order(classes.size());  // many candidates last: these classes can correct most deficits
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return classes[a].senders.size() < classes[b].senders.size(); });
    const size_t first = given_.size();
    const std::vector<int64_t> before = load_;
    for (size_t c : order)
      apportion(classes[c], unassigned[c], best.bytes[c], best.load / kBalanceTolerance, deficit);
    for (int moves = 0; moves < kMoves && rebalance(first, best.load); ++moves)
      ;
    useRoundRobinIfBetter(classes, unassigned, first, before);
  }

  /// A round-robin by target rank cuts no transfer and can be better than cuts at units. If it is, uses it instead of
  /// the assignment in given_[first, end). `before`: the load without these transfers.
  void useRoundRobinIfBetter(const std::vector<SendClass> &classes,
                             const std::vector<std::vector<uint32_t>> &unassigned, size_t first,
                             const std::vector<int64_t> &before) {
    std::vector<int64_t> load = before;
    auto meshRank = [&](size_t c, uint32_t number) {
      const Transfer &transfer = all_[number];
      const Endpoint &target = layout_.endpoints[module_.transfers.overlaps[transfer.overlap].endpoint];
      return classes[c].senders[static_cast<size_t>(target.ranks[transfer.target]) % classes[c].senders.size()];
    };
    for (size_t c = 0; c < classes.size(); ++c)
      for (uint32_t number : unassigned[c])
        load[meshRank(c, number)] += bytesOf(all_[number]);
    if (load.empty() || *std::max_element(load.begin(), load.end()) >= *std::max_element(load_.begin(), load_.end()))
      return;
    load_ = std::move(load);
    given_.resize(first);
    for (size_t c = 0; c < classes.size(); ++c)
      for (uint32_t number : unassigned[c])
        assign(number, meshRank(c, number));
  }

  /// Reassigns the first bytes of a transfer from one source mesh rank to another.
  struct Move {
    int32_t from = -1, to = -1;
    size_t transfer = 0;           // in given_
    size_t before = 0;             // 1 + the number of the move that adds load to `from`; 0: `from` is the busiest
    int64_t wanted = 0, bytes = 0; // bytes to move, and bytes that a cut at a unit moves
  };

  /// Indivisible transfers that are large compared with the optimum can overload a sender. Moves part of the load of
  /// the busiest sender (of given_[first, end)) to another candidate. If all candidates are too busy, they pass on
  /// load in turn, along the shortest chain of moves. Returns whether it found such a chain.
  bool rebalance(size_t first, int64_t optimum) {
    const auto busiest = static_cast<int32_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
    if (load_.empty() || load_[busiest] <= optimum + optimum / 128)
      return false;
    std::vector<std::vector<size_t>> given(load_.size()); // in given_, by source mesh rank
    for (size_t i = first; i < given_.size(); ++i)
      if (const int32_t source = all_[given_[i]].source; source >= 0)
        given[static_cast<size_t>(source)].push_back(i);
    std::vector<bool> seen(load_.size());
    seen[static_cast<size_t>(busiest)] = true;
    std::vector<Move> moves; // in breadth-first order
    int visited = 0;
    for (size_t m = 0; m == 0 || m <= moves.size(); ++m) {
      const int32_t meshRank = m == 0 ? busiest : moves[m - 1].to;
      const int64_t load = load_[meshRank] + (m == 0 ? 0 : moves[m - 1].bytes);
      for (size_t i : given[static_cast<size_t>(meshRank)]) {
        const Transfer &transfer = all_[given_[i]];
        candidates_.select(module_.transfers.overlaps[transfer.overlap]);
        const std::vector<int32_t> &meshRanks = candidates_.preferred(transfer.target);
        const int32_t idlest = *std::min_element(meshRanks.begin(), meshRanks.end(),
                                                 [&](int32_t a, int32_t b) { return load_[a] < load_[b]; });
        const Move last = split(meshRank, idlest, i, m, (load - load_[idlest]) / 2);
        if (load - last.bytes < load_[busiest] && load_[idlest] + last.bytes < load_[busiest] &&
            !leadsTo(moves, m, idlest)) {
          moves.push_back(last);
          apply(moves);
          return true;
        }
        for (int32_t to : meshRanks)
          if (!seen[static_cast<size_t>(to)] && ++visited < kMaxVisited) {
            // One tensor, or the smallest part that can be cut: `to` must pass on as much.
            const int64_t tensor = bytesOf(transfer) / transfer.count;
            const Move next = split(meshRank, to, i, m, tensor);
            if (load - next.bytes >= load_[busiest])
              continue;
            seen[static_cast<size_t>(to)] = true;
            moves.push_back(next);
            if (load_[to] + next.bytes < load_[busiest]) {
              apply(moves);
              return true;
            }
          }
      }
    }
    return false;
  }

  /// Whether a mesh rank gives or takes load in the chain of moves that ends with move m, counted from 1.
  static bool leadsTo(const std::vector<Move> &moves, size_t m, int32_t meshRank) {
    for (; m > 0; m = moves[m - 1].before)
      if (moves[m - 1].to == meshRank || moves[m - 1].from == meshRank)
        return true;
    return false;
  }

  Move split(int32_t from, int32_t to, size_t transfer, size_t before, int64_t wanted) {
    Move move{from, to, transfer, before, wanted, 0};
    std::vector<Transfer> head, rest;
    splitter_.split(all_[given_[transfer]], wanted, 0, head, rest);
    for (const Transfer &range : head)
      move.bytes += bytesOf(range);
    return move;
  }

  /// Applies the last move and the chain of moves before it. No mesh rank gives load twice, so each move has its own
  /// transfer.
  void apply(const std::vector<Move> &moves) {
    std::vector<size_t> gone;
    std::vector<Transfer> left;
    for (size_t m = moves.size();; m = moves[m - 1].before) {
      const Move &move = moves[m - 1];
      std::vector<Transfer> head;
      splitter_.split(all_[given_[move.transfer]], move.wanted, 0, head, left);
      gone.push_back(move.transfer);
      for (const Transfer &range : head)
        assign(part(range), move.to);
      load_[move.from] -= move.bytes;
      load_[move.to] += move.bytes;
      if (move.before == 0)
        break;
    }
    std::sort(gone.rbegin(), gone.rend());
    for (size_t i : gone)
      given_.erase(given_.begin() + static_cast<ptrdiff_t>(i));
    for (const Transfer &range : left)
      given_.push_back(part(range));
  }

  /// Assigns the transfers of a class to its senders, consecutive transfers to each, in the order of their targets.
  void apportion(const SendClass &each, const std::vector<uint32_t> &numbers, const std::vector<int64_t> &wanted,
                 int64_t tolerance, std::vector<int64_t> &deficit) {
    const std::vector<uint32_t> order = orderBy(numbers.size(), targets_, [&](uint32_t i) {
      const Transfer &transfer = all_[numbers[i]];
      return firstTarget_[module_.transfers.overlaps[transfer.overlap].endpoint] + static_cast<size_t>(transfer.target);
    });
    size_t next = 0;
    std::vector<uint32_t> rest; // parts of a transfer that was cut, which precede the next transfer, in reverse order
    int64_t carry = 0;          // bytes by which the senders before are below their quota
    for (size_t i = 0; i < each.senders.size(); ++i) {
      const int32_t meshRank = each.senders[i];
      const bool final = std::all_of(wanted.begin() + static_cast<ptrdiff_t>(i) + 1, wanted.end(),
                                     [](int64_t bytes) { return bytes == 0; });
      if (wanted[i] == 0)
        continue;
      const int64_t quota = wanted[i] + deficit[meshRank] + carry;
      int64_t given = 0;
      while ((!rest.empty() || next < order.size()) && (final || given < quota)) {
        const uint32_t number = rest.empty() ? numbers[order[next++]] : rest.back();
        if (!rest.empty())
          rest.pop_back();
        const int64_t size = bytesOf(all_[number]);
        if (final || given + size <= quota) {
          assign(number, meshRank);
          given += size;
          continue;
        }
        std::vector<Transfer> head, tail;
        splitter_.split(all_[number], quota - given, tolerance, head, tail);
        for (const Transfer &range : head) {
          assign(part(range), meshRank);
          given += bytesOf(range);
        }
        for (; !tail.empty(); tail.pop_back())
          rest.push_back(part(tail.back()));
        break;
      }
      carry = quota - given;
      deficit[meshRank] += wanted[i] - given;
      load_[meshRank] += given;
    }
  }

  /// Adds a part of a transfer; returns its number.
  uint32_t part(const Transfer &transfer) {
    all_.push_back(transfer);
    return static_cast<uint32_t>(all_.size() - 1);
  }

  void assign(uint32_t number, int32_t meshRank) {
    Transfer &transfer = all_[number];
    transfer.source = meshRank;
    transfer.replicaGroup = Candidates::replicaGroupOf(module_.transfers.overlaps[transfer.overlap], meshRank);
    given_.push_back(number);
  }

  /// Removes transfers that were cut, sorts the others and the parts by overlap, target, tensor and cut, and joins
  /// adjacent ones from the same source.
  void order() {
    std::vector<Transfer> &all = all_;
    std::vector<bool> given(all.size());
    for (uint32_t number : given_)
      given[number] = true;
    size_t left = 0, whole = 0; // remaining transfers; how many of them are uncut
    for (size_t number = 0; number < all.size(); ++number)
      if (given[number]) {
        all[left++] = all[number];
        whole = number < count_ ? left : whole;
      }
    all.resize(left);
    auto before = [](const Transfer &a, const Transfer &b) {
      return std::tie(a.overlap, a.target, a.first, a.begin) < std::tie(b.overlap, b.target, b.first, b.begin);
    };
    const auto parts = all.begin() + static_cast<ptrdiff_t>(whole);
    std::sort(parts, all.end(), before);
    if (!std::is_sorted(all.begin(), parts, before))
      std::stable_sort(all.begin(), parts, before);
    std::inplace_merge(all.begin(), parts, all.end(), before);
    size_t tail = 0;
    for (size_t i = 1; i < all.size(); ++i) {
      Transfer &last = all[tail];
      const Transfer &next = all[i];
      const bool same = last.overlap == next.overlap && last.target == next.target && last.source == next.source &&
                        last.replicaGroup == next.replicaGroup && last.route == next.route;
      if (same && !last.cut() && !next.cut() && last.first + last.count == next.first)
        last.count += next.count;
      else if (same && last.cut() && next.cut() && last.first == next.first && last.end == next.begin)
        last.end = next.end;
      else
        all[++tail] = next;
    }
    if (!all.empty())
      all.resize(tail + 1);
  }

  Module &module_;
  const Layout &layout_;
  Candidates candidates_;
  Splitter splitter_;
  std::vector<int64_t> load_;       // bytes to send, by source mesh rank
  std::vector<Transfer> all_;       // the transfers of the module, then parts of them
  const uint32_t count_;            // how many transfers the module has
  std::vector<uint32_t> given_;     // numbers of the transfers and parts that have a source, in the order of assignment
  std::vector<size_t> firstTarget_; // by endpoint: the mesh ranks of the endpoints before it
  size_t targets_ = 0;              // mesh ranks of all endpoints
};

} // namespace

llvm::Error balance(Module &module) {
  Balancer(module).run();
  return llvm::Error::success();
}

} // namespace reshard
