// SPDX-License-Identifier: Apache-2.0
// balance: chooses a source for every transfer that has none. Candidates follow the locality rule (candidates.h): the
// target's own rank, else its node, else all replicas. Transfers with the same candidates form a class. The fractional
// optimum over the classes (optimum.h) gives the bytes that each candidate sends to each class. The transfers of a
// class are assigned in that proportion, in the order of their targets. They are cut between tensors, or inside a
// tensor where whole tensors would miss the optimum by more than a fraction of 1 / kTolerance. Epochs (--keep) are
// planned one after the other, so that targets that joined earlier keep their sources.

#include "compiler/pass.h"
#include "compiler/transfer/candidates.h"
#include "compiler/transfer/optimum.h"
#include "compiler/transfer/split.h"

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// A cut may miss its position by the optimum divided by this. Errors do not add up: each class corrects those of the
/// classes before it.
constexpr int64_t kTolerance = 512;
/// Limits of the improvement after the assignment: the number of moves (or chains of moves), and the number of mesh
/// ranks that the search for one of them visits.
constexpr int kMoves = 64;
constexpr int kMaxVisited = 1 << 16;

class Balancer {
public:
  explicit Balancer(Module &module)
      : module_(module), layout_(module.layout), candidates_(module.layout), splitter_(module),
        load_(module.layout.endpoints[0].meshRanks()) {}

  void run() {
    std::vector<Transfer> all = std::move(module_.transfers.transfers);
    module_.transfers.transfers.clear();
    std::stable_sort(all.begin(), all.end(),
                     [](const Transfer &a, const Transfer &b) { return a.overlap < b.overlap; });
    for (const Transfer &transfer : all)
      if (transfer.source != Transfer::kUnassigned)
        module_.transfers.transfers.push_back(transfer);
    for (uint32_t epoch = 0; epoch <= last(); ++epoch)
      run(all, epoch);
    order();
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

  void run(const std::vector<Transfer> &all, uint32_t epoch) {
    std::vector<SendClass> classes;
    std::vector<std::vector<Transfer>> unassigned; // by class
    std::map<std::vector<int32_t>, size_t> numbers;
    const Overlap *overlap = nullptr;
    std::map<const std::vector<int32_t> *, size_t> ofOverlap;
    for (const Transfer &transfer : all) {
      if (transfer.source != Transfer::kUnassigned || epochOf(transfer) != epoch)
        continue;
      if (overlap != &module_.transfers.overlaps[transfer.overlap]) {
        overlap = &module_.transfers.overlaps[transfer.overlap];
        candidates_.select(*overlap);
        ofOverlap.clear();
      }
      if (const auto own = candidates_.own(transfer.target)) {
        assign(transfer, *own); // a local copy adds nothing to the load
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
      classes[at->second].bytes += bytes(module_.transfers, transfer);
      unassigned[at->second].push_back(transfer);
    }
    const Optimum best = optimum(classes, load_);
    std::vector<int64_t> deficit(load_.size()); // by source mesh rank: bytes below its share of the optimum so far
    std::vector<size_t> order(classes.size());  // many candidates last: these classes can correct most deficits
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return classes[a].senders.size() < classes[b].senders.size(); });
    const size_t first = module_.transfers.transfers.size();
    const std::vector<int64_t> before = load_;
    for (size_t c : order)
      apportion(classes[c], unassigned[c], best.bytes[c], best.load / kTolerance, deficit);
    for (int moves = 0; moves < kMoves && rebalance(first, best.load); ++moves)
      ;
    useRoundRobinIfBetter(classes, unassigned, first, before);
  }

  /// A round-robin by target rank cuts no transfer and can be better than cuts at units. If it is, uses it instead of
  /// the assignment in transfers [first, end). `before`: the load without these transfers.
  void useRoundRobinIfBetter(const std::vector<SendClass> &classes,
                             const std::vector<std::vector<Transfer>> &unassigned, size_t first,
                             const std::vector<int64_t> &before) {
    std::vector<int64_t> load = before;
    auto meshRank = [&](size_t c, const Transfer &transfer) {
      const Endpoint &target = layout_.endpoints[module_.transfers.overlaps[transfer.overlap].endpoint];
      return classes[c].senders[static_cast<size_t>(target.ranks[transfer.target]) % classes[c].senders.size()];
    };
    for (size_t c = 0; c < classes.size(); ++c)
      for (const Transfer &transfer : unassigned[c])
        load[meshRank(c, transfer)] += bytes(module_.transfers, transfer);
    if (load.empty() || *std::max_element(load.begin(), load.end()) >= *std::max_element(load_.begin(), load_.end()))
      return;
    load_ = std::move(load);
    module_.transfers.transfers.resize(first);
    for (size_t c = 0; c < classes.size(); ++c)
      for (const Transfer &transfer : unassigned[c])
        assign(transfer, meshRank(c, transfer));
  }

  /// Reassigns the first bytes of a transfer from one source mesh rank to another.
  struct Move {
    int32_t from = -1, to = -1;
    size_t transfer = 0;
    size_t before = 0;             // 1 + the number of the move that adds load to `from`; 0: `from` is the busiest
    int64_t wanted = 0, bytes = 0; // bytes to move, and bytes that a cut at a unit moves
  };

  /// Indivisible transfers that are large compared with the optimum can overload a sender. Moves part of the load of
  /// the busiest sender (of transfers [first, end)) to another candidate. If all candidates are too busy, they pass on
  /// load in turn, along the shortest chain of moves. Returns whether it found such a chain.
  bool rebalance(size_t first, int64_t optimum) {
    const auto busiest = static_cast<int32_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
    if (load_.empty() || load_[busiest] <= optimum + optimum / 128)
      return false;
    const std::vector<Transfer> &all = module_.transfers.transfers;
    std::vector<std::vector<size_t>> given(load_.size()); // transfers, by source mesh rank
    for (size_t i = first; i < all.size(); ++i)
      if (all[i].source >= 0)
        given[static_cast<size_t>(all[i].source)].push_back(i);
    std::vector<bool> seen(load_.size());
    seen[static_cast<size_t>(busiest)] = true;
    std::vector<Move> moves; // in breadth-first order
    int visited = 0;
    for (size_t m = 0; m == 0 || m <= moves.size(); ++m) {
      const int32_t meshRank = m == 0 ? busiest : moves[m - 1].to;
      const int64_t load = load_[meshRank] + (m == 0 ? 0 : moves[m - 1].bytes);
      for (size_t i : given[static_cast<size_t>(meshRank)]) {
        candidates_.select(module_.transfers.overlaps[all[i].overlap]);
        const std::vector<int32_t> &meshRanks = candidates_.preferred(all[i].target);
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
            const int64_t tensor = bytes(module_.transfers, all[i]) / all[i].count;
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
    splitter_.split(module_.transfers.transfers[transfer], wanted, 0, head, rest);
    for (const Transfer &range : head)
      move.bytes += bytes(module_.transfers, range);
    return move;
  }

  /// Applies the last move and the chain of moves before it. No mesh rank gives load twice, so each move has its own
  /// transfer.
  void apply(const std::vector<Move> &moves) {
    std::vector<Transfer> &all = module_.transfers.transfers;
    std::vector<size_t> gone;
    std::vector<Transfer> left;
    for (size_t m = moves.size();; m = moves[m - 1].before) {
      const Move &move = moves[m - 1];
      std::vector<Transfer> head;
      splitter_.split(all[move.transfer], move.wanted, 0, head, left);
      gone.push_back(move.transfer);
      for (const Transfer &range : head)
        assign(range, move.to);
      load_[move.from] -= move.bytes;
      load_[move.to] += move.bytes;
      if (move.before == 0)
        break;
    }
    std::sort(gone.rbegin(), gone.rend());
    for (size_t i : gone)
      all.erase(all.begin() + static_cast<ptrdiff_t>(i));
    all.insert(all.end(), left.begin(), left.end());
  }

  /// Assigns the transfers of a class to its senders, consecutive transfers to each.
  void apportion(const SendClass &each, std::vector<Transfer> transfers, const std::vector<int64_t> &wanted,
                 int64_t tolerance, std::vector<int64_t> &deficit) {
    std::stable_sort(transfers.begin(), transfers.end(), [&](const Transfer &a, const Transfer &b) {
      return std::make_tuple(module_.transfers.overlaps[a.overlap].endpoint, a.target) <
             std::make_tuple(module_.transfers.overlaps[b.overlap].endpoint, b.target);
    });
    std::deque<Transfer> left(transfers.begin(), transfers.end());
    int64_t carry = 0; // bytes by which the senders before are below their quota
    for (size_t i = 0; i < each.senders.size(); ++i) {
      const int32_t meshRank = each.senders[i];
      const bool final = std::all_of(wanted.begin() + static_cast<ptrdiff_t>(i) + 1, wanted.end(),
                                     [](int64_t bytes) { return bytes == 0; });
      if (wanted[i] == 0)
        continue;
      const int64_t quota = wanted[i] + deficit[meshRank] + carry;
      int64_t given = 0;
      while (!left.empty() && (final || given < quota)) {
        const Transfer next = left.front();
        const int64_t size = bytes(module_.transfers, next);
        left.pop_front();
        if (final || given + size <= quota) {
          assign(next, meshRank);
          given += size;
          continue;
        }
        std::vector<Transfer> head, rest;
        splitter_.split(next, quota - given, tolerance, head, rest);
        for (const Transfer &range : head) {
          assign(range, meshRank);
          given += bytes(module_.transfers, range);
        }
        left.insert(left.begin(), rest.begin(), rest.end());
        break;
      }
      carry = quota - given;
      deficit[meshRank] += wanted[i] - given;
      load_[meshRank] += given;
    }
  }

  void assign(Transfer transfer, int32_t meshRank) {
    transfer.source = meshRank;
    transfer.replicaGroup = Candidates::replicaGroupOf(module_.transfers.overlaps[transfer.overlap], meshRank);
    module_.transfers.transfers.push_back(transfer);
  }

  /// Sorts transfers by overlap, target, tensor and cut, and joins adjacent ones from the same source.
  void order() {
    std::vector<Transfer> &all = module_.transfers.transfers;
    std::sort(all.begin(), all.end(), [](const Transfer &a, const Transfer &b) {
      return std::tie(a.overlap, a.target, a.first, a.begin) < std::tie(b.overlap, b.target, b.first, b.begin);
    });
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
  std::vector<int64_t> load_; // bytes to send, by source mesh rank
};

} // namespace

llvm::Error balance(Module &module) {
  Balancer(module).run();
  return llvm::Error::success();
}

} // namespace reshard
