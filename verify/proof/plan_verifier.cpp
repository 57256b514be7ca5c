// SPDX-License-Identifier: Apache-2.0
// Follows the moves of each rank, compares each byte with the layouts, and divides the ranks among threads.
#include "verify/proof/plan_verifier.h"

#include "base/parallel.h"
#include "base/work_deadline.h"
#include "schema/flatbuffer_vectors.h"
#include "verify/layout/quantized_views.h"
#include "verify/proof/contents.h"
#include "verify/proof/known_proofs.h"
#include "verify/proof/replica_proofs.h"
#include "verify/proof/staged.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <tuple>

namespace reshard::verify {

namespace {

using namespace schema;

struct RankMove {
  uint32_t rank; // the move uses the buffer numbers of this rank
  Move move;
};

void sortByTarget(std::vector<RankMove> &moves) {
  std::sort(moves.begin(), moves.end(), [](const RankMove &a, const RankMove &b) {
    return std::tie(a.move.targetBuffer, a.move.targetOffset) < std::tie(b.move.targetBuffer, b.move.targetOffset);
  });
}

/// The first of these sorted moves that write a buffer.
template <class Iterator> std::span<const RankMove> movesOf(Iterator first, Iterator last, uint32_t buffer) {
  return {first,
          std::find_if(first, last, [&](const RankMove &rankMove) { return rankMove.move.targetBuffer != buffer; })};
}

/// The first of these sorted moves that write a range of buffers.
template <class Iterator> std::span<const RankMove> movesOf(Iterator first, Iterator last, const BufferRange &range) {
  return {first, std::find_if(first, last, [&](const RankMove &rankMove) {
            return rankMove.move.targetBuffer - range.first() >= range.count();
          })};
}

/// Proves ranks, one after the other. Each thread has its own.
class RankVerifier {
public:
  RankVerifier(const Plan &plan, const PairedPlan &paired)
      : plan_(plan), paired_(paired), stagedMoves_(plan, paired), contents_(plan.manifest()),
        replicas_(paired, plan.manifest(), contents_) {}

  /// Proves the params and the relays of a rank. Several ranks write a file, so the moves to files are only collected.
  /// Returns false after an error.
  bool verify(uint32_t rank) {
    if (const auto difference = replicas_.find(rank); !difference || !proveDifference(rank, *difference))
      prove(rank);
    if (result_.error.empty())
      checkRelays(rank);
    return result_.error.empty();
  }

  /// Proves one param of a file: the moves of all ranks, with the buffer numbers of rank 0.
  bool verifyFile(const BufferRange &range, std::span<const RankMove> moves) {
    checkRange(0, range, moves);
    return result_.error.empty();
  }

  /// The result of everything that it proved; after an error nothing more is to be proven.
  const VerifyResult &result() const { return result_; }
  std::vector<RankMove> &fileMoves() { return storage_; }
  const ReplicaProofs &replicas() const { return replicas_; }

private:
  /// A target buffer and all moves to it.
  struct WrittenBuffer {
    const Param &param;
    uint32_t rank, buffer;
    uint64_t bytes;
    std::span<const RankMove> moves;
    bool amax() const { return param.view() && param.view()->kind() == ViewKind::amax; }
  };

  /// Checks the moves to the params of a rank, and collects those to files.
  void prove(uint32_t rank) {
    const ReplicaProofs::Proof before{result_.moves, result_.bytes};
    moves_.clear();
    const Status status = stagedMoves_.forEachMove(rank, [&](const Move &move) {
      const BufferRange *run = bufferRangeOf(paired_.segment(rank), move.targetBuffer);
      const Endpoint &endpoint = *plan_.manifest().endpoints()->Get(run->endpoint());
      (endpoint.storage() ? storage_ : moves_).push_back({rank, move});
    });
    if (!status.ok())
      fail(status.message());
    if (result_.error.empty())
      checkRank(rank, moves_);
    if (result_.error.empty())
      replicas_.keep({result_.moves - before.moves, result_.bytes - before.bytes});
  }

  /// Proves a rank by its difference from a rank that is right: the outputs that only this rank has must write the
  /// bytes of the outputs that only the other one has, each byte once, with the right content. Returns false if they do
  /// not; then prove() finds the wrong byte.
  bool proveDifference(uint32_t rank, const ReplicaProofs::Difference &difference) {
    std::vector<RankMove> replaced;
    moves_.clear();
    auto collect = [&](uint32_t from, const std::vector<ReplicaProofs::Output> &outputs, std::vector<RankMove> &to) {
      return std::all_of(outputs.begin(), outputs.end(), [&](const ReplicaProofs::Output &output) {
        return paired_
            .forEachMove(from, output.step, output.number, [&](const Move &move) { to.push_back({rank, move}); })
            .ok();
      });
    };
    bool right =
        collect(rank, difference.outputs, moves_) && collect(difference.other, difference.outputsOfOther, replaced);
    sortByTarget(moves_);
    sortByTarget(replaced);
    auto other = replaced.begin();
    for (auto next = moves_.begin(); right && next != moves_.end();) {
      const std::span<const RankMove> here = movesOf(next, moves_.end(), next->move.targetBuffer);
      const auto others = movesOf(other, replaced.end(), next->move.targetBuffer);
      right = !others.empty() && sameBytes(here, others);
      next += static_cast<ptrdiff_t>(here.size());
      other += static_cast<ptrdiff_t>(others.size());
    }
    right = right && other == replaced.end();
    for (auto each = moves_.begin(); right && each != moves_.end(); ++each) {
      const BufferRange *range = bufferRangeOf(paired_.segment(rank), each->move.targetBuffer);
      const DType dtype = plan_.manifest().endpoints()->Get(range->endpoint())->params()->Get(range->param())->dtype();
      right = checkSource(rank, each->move, dtype) && checkContent(rank, each->move, itemBytes(dtype));
    }
    if (!right) {
      result_.error.clear();
      return false;
    }
    ++result_.replicas;
    result_.moves += difference.proof.moves + moves_.size() - replaced.size();
    result_.bytes += difference.proof.bytes;
    return true;
  }

  /// Whether moves to one buffer write exactly the bytes that other moves to it write, and each byte once. The other
  /// moves must write no byte twice.
  bool sameBytes(std::span<const RankMove> moves, std::span<const RankMove> others) {
    RegularSets written;
    uint64_t sum = 0;
    for (const RankMove &rankMove : moves) {
      if (!addTo(written, rankMove.move))
        return false;
      sum += rankMove.move.bytes();
    }
    written.finish();
    for (const RankMove &rankMove : others) {
      sum -= rankMove.move.bytes();
      NestSplitter splitter(written, work_);
      if (splitter.run(nestOf(rankMove.move), [](const Fragment &) { return true; }) != SplitStatus::done)
        return false;
    }
    return sum == 0;
  }

  std::string where(uint32_t rank, uint32_t buffer, uint64_t offset) {
    const BufferRange &run = *bufferRangeOf(paired_.segment(rank), buffer);
    const Endpoint &endpoint = *plan_.manifest().endpoints()->Get(run.endpoint());
    return endpoint.role()->str() + " " + meshRankName(endpoint, run.mesh_rank()) + " param '" +
           contents_.instance(run, buffer - run.first()).name + "' byte " + std::to_string(offset);
  }

  bool fail(const std::string &error) {
    if (result_.error.empty())
      result_.error = error;
    return false;
  }

  bool failFragmented(const std::string &where) {
    result_.tooLarge = result_.tooLarge || result_.error.empty();
    return fail(where + " cannot be proven: its writes and its layout have too many fragments to compare");
  }

  /// Checks all moves to the params of a rank: they must write each byte of a buffer once, with the right content.
  void checkRank(uint32_t rank, std::vector<RankMove> &moves) {
    sortByTarget(moves);
    auto next = moves.begin();
    for (const BufferRange *range : orEmpty(paired_.segment(rank).buffers())) {
      if (range->endpoint() == 0 || plan_.manifest().endpoints()->Get(range->endpoint())->storage())
        continue;
      const std::span<const RankMove> here = movesOf(next, moves.end(), *range);
      next += static_cast<ptrdiff_t>(here.size());
      if (!checkRange(rank, *range, here))
        return;
    }
  }

  /// Checks all moves to the buffers of a range, which are sorted.
  bool checkRange(uint32_t rank, const BufferRange &range, std::span<const RankMove> moves) {
    const Endpoint &endpoint = *plan_.manifest().endpoints()->Get(range.endpoint());
    const Param &param = *endpoint.params()->Get(range.param());
    if (param.derived() ? !derivedOnce(endpoint, range, rank)
                        : param.view() && !derivesOnly(endpoint, *param.view(), range, rank))
      return false;
    auto next = moves.begin();
    for (uint32_t i = 0; i < range.count(); ++i) {
      const uint32_t buffer = range.first() + i;
      const std::span<const RankMove> here = movesOf(next, moves.end(), buffer);
      next += static_cast<ptrdiff_t>(here.size());
      if (param.derived() && !here.empty())
        return fail(where(rank, buffer, here.front().move.targetOffset) +
                    " is written directly, but its param is derived: only its quantized view may be written");
      if (!param.derived() && !checkWrittenOnce({param, rank, buffer, range.bytes(), here}))
        return false;
      for (const RankMove &rankMove : here) {
        ++result_.moves;
        result_.bytes += rankMove.move.bytes();
        if (!checkSource(rank, rankMove.move, param.dtype()) ||
            !checkContent(rank, rankMove.move, itemBytes(param.dtype())))
          return false;
      }
    }
    return true;
  }

  /// Checks that each byte of a buffer is written exactly once: the number of written bytes is right, and no byte is
  /// missing. For a quantized view of kind `amax`, the bytes are those in its layout.
  bool checkWrittenOnce(const WrittenBuffer &to) {
    known_.begin({to.bytes});
    for (const RankMove &rankMove : to.moves)
      known_.add(rankMove.move);
    if (!to.amax() && known_.writtenOnce())
      return true;
    RegularSets written;
    uint64_t sum = 0;
    for (const RankMove &rankMove : to.moves) {
      const Move &move = rankMove.move;
      if (!addTo(written, move))
        return failFragmented(where(to.rank, to.buffer, move.targetOffset));
      sum += move.bytes();
    }
    written.finish();
    uint64_t expected = to.bytes;
    std::vector<LoopNest> wanted = {{0, 0, 0, {{static_cast<int64_t>(to.bytes), 1, 0, 0}}}};
    if (to.amax()) {
      if (!contents_.of(paired_.segment(to.rank), to.buffer, wanted_))
        return failFragmented(where(to.rank, to.buffer, 0));
      const int64_t item = itemBytes(to.param.dtype());
      expected = static_cast<uint64_t>(wanted_.sets().positions() * item);
      wanted = nestsOf(wanted_.sets(), item);
    }
    uint64_t missing = to.bytes;
    for (const LoopNest &nest : wanted) {
      NestSplitter splitter(written, work_);
      const SplitStatus status = splitter.run(nest, [](const Fragment &) { return true; });
      if (status == SplitStatus::fragmented)
        return failFragmented(where(to.rank, to.buffer, 0));
      if (status == SplitStatus::missing)
        missing = std::min(missing, static_cast<uint64_t>(splitter.position()));
    }
    if (missing != to.bytes || sum != expected)
      return failCoverage(to, missing);
    if (!to.amax())
      known_.keepWrittenOnce();
    return true;
  }

  /// The bytes of elements of `item` bytes at the positions of sets.
  static std::vector<LoopNest> nestsOf(const RegularSets &sets, int64_t item) {
    std::vector<LoopNest> nests;
    for (const RegularSet &set : sets.list()) {
      nests.push_back({set.begin * item, 0, 0, {}});
      for (const RegularSet::Dimension &dimension : set.dimensions)
        nests.back().loops.push_back({dimension.count, dimension.step * item, 0, 0});
      nests.back().loops.push_back({item, 1, 0, 0});
    }
    return nests;
  }

  /// Reports the first byte that is never written, or is written twice, by listing all rows if there are few enough.
  /// `missing`: a byte that is never written, or the buffer's size if there is none.
  bool failCoverage(const WrittenBuffer &to, uint64_t missing) {
    constexpr uint64_t kMaxRows = 1 << 24;
    uint64_t count = 0, at = 0;
    for (const RankMove &rankMove : to.moves)
      count += rankMove.move.bytes() / rankMove.move.rowBytes;
    if (count > kMaxRows)
      return fail(where(to.rank, to.buffer, missing == to.bytes ? 0 : missing) +
                  (missing == to.bytes ? " or a later byte is written twice" : " is never written"));
    std::vector<std::pair<uint64_t, uint64_t>> rows; // offset, bytes
    for (const RankMove &rankMove : to.moves)
      forEachRow(rankMove.move, [&](const Move &row) { rows.emplace_back(row.targetOffset, row.rowBytes); });
    std::sort(rows.begin(), rows.end());
    rows.emplace_back(to.bytes, 0);
    for (const auto &[offset, length] : rows) {
      if (offset > at && uncoveredByLayout(to, at, offset))
        at = offset;
      if (offset != at)
        return fail(where(to.rank, to.buffer, std::min(at, offset)) +
                    (offset > at ? " is never written" : " is written twice"));
      at += length;
    }
    return fail(where(to.rank, to.buffer, 0) + " or a later byte is written outside its layout");
  }

  /// Whether no part of an `amax` view covers a range of bytes: the entries of tensors that the matrix does not have,
  /// which are zero.
  bool uncoveredByLayout(const WrittenBuffer &to, uint64_t begin, uint64_t end) {
    if (!to.amax())
      return false;
    const int64_t item = itemBytes(to.param.dtype());
    const bool known = contents_.of(paired_.segment(to.rank), to.buffer, wanted_);
    size_t hint = 0;
    Digits digits;
    for (uint64_t at = begin; known && at < end; at += static_cast<uint64_t>(item))
      if (wanted_.sets().find(static_cast<int64_t>(at) / item, digits, hint, work_))
        return false;
    return true;
  }

  /// Checks that a derived param has exactly one quantized view that writes it. The view is proven like a param, so all
  /// bytes of the derived param are written.
  bool derivedOnce(const Endpoint &endpoint, const BufferRange &run, uint32_t rank) {
    int views = 0;
    for (const Param *param : orEmpty(endpoint.params()))
      if (const QuantizedView *view = param->view()) {
        const std::vector<uint32_t> derived = derivedParams(*view);
        views += static_cast<int>(std::count(derived.begin(), derived.end(), run.param()));
      }
    return views == 1 || fail(where(rank, run.first(), 0) + " is derived from " + std::to_string(views) +
                              " quantized views, expected one");
  }

  /// Checks that the params behind a quantized view are marked as derived: they are written only through the view.
  bool derivesOnly(const Endpoint &endpoint, const QuantizedView &view, const BufferRange &run, uint32_t rank) {
    for (const uint32_t derived : derivedParams(view))
      if (!endpoint.params()->Get(derived)->derived())
        return fail(where(rank, run.first(), 0) + " is a quantized view of param '" +
                    endpoint.params()->Get(derived)->name()->str() + "', which is not marked as derived");
    return true;
  }

  /// Checks the origin of a move: the source, which runs do not change, or a target rank that relays it; checkRelays
  /// proves that the bytes arrived there first. The dtypes of both sides must be equal.
  bool checkSource(uint32_t rank, const Move &move, DType dtype) {
    if (move.zero)
      return true;
    const BufferRange *from = bufferRangeOf(paired_.segment(move.sourceRank), move.sourceBuffer);
    if (!from || plan_.manifest().endpoints()->Get(from->endpoint())->storage() > (from->endpoint() == 0))
      return fail(where(rank, move.targetBuffer, move.targetOffset) + " comes from " +
                  (from ? "a target file" : "the arena") + " of rank " + std::to_string(move.sourceRank) +
                  ", expected the source or the params of a target rank");
    const Param &param = *plan_.manifest().endpoints()->Get(from->endpoint())->params()->Get(from->param());
    // Quantized and derived params do not hold the bytes that arrived.
    if (from->endpoint() > 0 && (param.view() ? param.view()->kind() == ViewKind::elements : param.derived()))
      return fail(where(rank, move.targetBuffer, move.targetOffset) + " is relayed by rank " +
                  std::to_string(move.sourceRank) + ", which holds it quantized");
    const DType found = param.dtype();
    return found == dtype || fail(where(rank, move.targetBuffer, move.targetOffset) + " is " + dtypeName(dtype) +
                                  ", but comes from " + dtypeName(found));
  }

  /// Checks that the bytes of target params that a rank relays are written by receives and copies that the send waits
  /// for. No byte is written twice, so they are unchanged when sent.
  void checkRelays(uint32_t rank) {
    const Segment &segment = paired_.segment(rank);
    auto target = [&](const Operand &operand) {
      const BufferRange *run = bufferRangeOf(segment, operand.buffer());
      return run && run->endpoint() > 0;
    };
    for (const Step *step : orEmpty(segment.steps())) {
      if (step->kind() != StepKind::send)
        continue;
      std::vector<Move> read;
      std::map<uint32_t, RegularSets> written; // by buffer
      Status status;
      for (uint32_t i = 0; i < step->input_count() && status.ok(); ++i)
        if (const Operand &operand = *segment.operands()->Get(step->first_input() + i); target(operand))
          status = paired_.forEachMove(rank, operand, [&](const Move &move) { read.push_back(move); });
      for (const Move &move : read)
        written.try_emplace(move.targetBuffer);
      bool fits = true;
      for (uint32_t i = 0; i < step->after_count() && !read.empty(); ++i) {
        const Step &before = *segment.steps()->Get(segment.after()->Get(step->first_after() + i));
        for (uint32_t o = 0; o < before.output_count() && before.kind() != StepKind::send && status.ok(); ++o)
          status =
              paired_.forEachMove(rank, *segment.operands()->Get(before.first_output() + o), [&](const Move &move) {
                if (const auto at = written.find(move.targetBuffer); at != written.end())
                  fits = addTo(at->second, move) && fits;
              });
      }
      if (status.ok() && !fits) {
        failFragmented("rank " + std::to_string(rank) + ": a message that it relays");
        return;
      }
      if (!status.ok()) {
        fail(status.message());
        return;
      }
      for (auto &[buffer, sets] : written)
        sets.finish();
      for (const Move &move : read) {
        NestSplitter splitter(written[move.targetBuffer], work_);
        const SplitStatus split = splitter.run(nestOf(move), [](const Fragment &) { return true; });
        if (split == SplitStatus::done)
          continue;
        if (split == SplitStatus::fragmented)
          failFragmented(where(rank, move.targetBuffer, move.targetOffset));
        else
          fail(where(rank, move.targetBuffer, static_cast<uint64_t>(splitter.position())) + " is relayed to rank " +
               std::to_string(step->peer()) + " in round " + std::to_string(step->round()) +
               ", but no step that the send waits for writes it");
        return;
      }
    }
  }

  /// Checks that source and target layouts name the same tensor elements for a move. The move is split into fragments
  /// within which both layouts are regular; in each, first element and strides must be equal. A move between buffers of
  /// the same forms has the same fragments: only their tensors are compared again.
  bool checkContent(uint32_t rank, const Move &move, int64_t item) {
    if (!contents_.of(paired_.segment(rank), move.targetBuffer, wanted_) ||
        !(move.zero || contents_.of(paired_.segment(move.sourceRank), move.sourceBuffer, found_)))
      return failFragmented(where(rank, move.targetBuffer, move.targetOffset));
    known_.begin({wanted_.form(), move.zero ? 0 : found_.form()});
    known_.add(move);
    const auto sameTensor = [&](const KnownProofs::Tags &tags) {
      return wanted_.tensor(tags.wanted) == found_.tensor(tags.found);
    };
    if (const auto *known = known_.content(); known && std::all_of(known->begin(), known->end(), sameTensor))
      return true;
    const auto size = static_cast<uint64_t>(item);
    bool whole = move.targetOffset % size == 0 && move.rowBytes % size == 0 && move.sourceOffset % size == 0;
    for (const Move::Loop &loop : move.loops)
      whole = whole && loop.target % item == 0 && loop.source % item == 0;
    if (!whole)
      return fail(where(rank, move.targetBuffer, move.targetOffset) + " is written by a move that splits elements");
    std::vector<KnownProofs::Tags> tags;
    auto failAt = [&](int64_t element, const std::string &why) {
      return fail(where(rank, move.targetBuffer, static_cast<uint64_t>(element * item)) + why);
    };
    auto differ = [&](const Fragment &want, const Fragment &have, int64_t target, int64_t expected, int64_t logical) {
      return failAt(target, " must be tensor '" + contents_.name(wanted_.tensor(want.set->tag)) + "' element " +
                                std::to_string(expected) + ", but comes from tensor '" +
                                contents_.name(found_.tensor(have.set->tag)) + "' element " + std::to_string(logical) +
                                " of rank " + std::to_string(move.sourceRank));
    };
    NestSplitter byTarget(wanted_.sets(), work_);
    const SplitStatus status = byTarget.run(nestOf(move, item), [&](const Fragment &want) {
      if (move.zero != (want.set->tag == 0))
        return failAt(want.position, move.zero ? " is zeroed but is not padding" : " is padding but is not zeroed");
      if (move.zero)
        return true;
      LoopNest inner{want.counterpart, want.value, want.position, {}};
      for (auto loop = want.loops.rbegin(); loop != want.loops.rend(); ++loop)
        inner.loops.push_back({loop->count, loop->counterpart, loop->value, loop->origin});
      NestSplitter bySource(found_.sets(), work_);
      const SplitStatus within = bySource.run(inner, [&](const Fragment &have) {
        if (have.set->tag == 0)
          return failAt(have.origin, " comes from the source's padding");
        if (!sameTensor({want.set->tag, have.set->tag}) || have.value != have.counterpart)
          return differ(want, have, have.origin, have.counterpart, have.value);
        for (const Fragment::Loop &loop : have.loops)
          if (loop.counterpart != loop.value)
            return differ(want, have, have.origin + loop.origin, have.counterpart + loop.counterpart,
                          have.value + loop.value);
        if (const KnownProofs::Tags both{want.set->tag, have.set->tag}; tags.empty() || tags.back() != both)
          tags.push_back(both);
        return true;
      });
      if (within == SplitStatus::missing)
        return failAt(bySource.origin(), " comes from the source's padding");
      return within == SplitStatus::done || failFragmented(where(rank, move.targetBuffer, move.targetOffset));
    });
    if (status == SplitStatus::missing)
      return failAt(byTarget.position(), " is covered by no part of its layout");
    if (status != SplitStatus::done)
      return failFragmented(where(rank, move.targetBuffer, move.targetOffset));
    known_.keepContent(std::move(tags));
    return true;
  }

  const Plan &plan_;
  const PairedPlan &paired_;
  StagedMoves stagedMoves_;
  Contents contents_;
  ReplicaProofs replicas_;
  BufferContents wanted_, found_;
  KnownProofs known_;
  VerifyResult result_;
  std::vector<RankMove> moves_, storage_;
  uint64_t work_ = 0; // spent by all NestSplitters
};

/// Distributes the proof among threads.
class PlanVerifier {
public:
  PlanVerifier(const Plan &plan, unsigned threads, const std::function<void(double)> &progress)
      : plan_(plan), paired_(plan), threads_(threads), progress_(progress) {}

  VerifyResult run() {
    if (const Status status = paired_.load(threads_); !status.ok())
      return {status.message()};
    proveRanks();
    if (first_ == UINT32_MAX)
      proveFiles();
    for (const auto &verifier : idle_) {
      result_.moves += verifier->result().moves;
      result_.bytes += verifier->result().bytes;
      result_.replicas += verifier->result().replicas;
    }
    return result_;
  }

private:
  using Thread = std::unique_ptr<RankVerifier>;

  /// Calls work(verifier, item) for the items below `count`, in any order. The error that remains is that of the
  /// first item that has one.
  template <class Work> void forEach(size_t count, Work work) {
    parallelFor(count, threads_, [&](size_t item) {
      std::unique_lock lock(mutex_);
      Thread verifier = idle_.empty() ? nullptr : std::move(idle_.back());
      if (verifier)
        idle_.pop_back();
      lock.unlock();
      if (!verifier)
        verifier = std::make_unique<RankVerifier>(plan_, paired_);
      work(*verifier, item);
      lock.lock();
      if (verifier->result().error.empty())
        idle_.push_back(std::move(verifier));
    });
  }

  void failed(uint32_t item, const VerifyResult &result) {
    const std::lock_guard lock(mutex_);
    if (item < first_) {
      first_ = item;
      result_ = result;
    }
  }

  /// Ranks whose target buffers have the same elements, and which one thread proves one after the other, because the
  /// proof of the first one serves the others. A large group is divided.
  std::vector<std::vector<uint32_t>> groups() const {
    RankVerifier any(plan_, paired_);
    std::map<Digest, std::vector<uint32_t>> byTargets;
    for (uint32_t rank = 0; rank < plan_.world(); ++rank)
      byTargets[any.replicas().digestOf(rank)].push_back(rank);
    constexpr size_t kMinGroup = 8;                                                  // ranks of a divided group
    const size_t most = std::max(kMinGroup, plan_.world() / (4 * size_t{threads_})); // ranks of a group
    std::vector<std::vector<uint32_t>> groups;
    for (const auto &[digest, ranks] : byTargets) {
      const size_t parts = threads_ == 1 ? 1 : (ranks.size() + most - 1) / most;
      for (size_t part = 0; part < parts; ++part)
        groups.emplace_back(ranks.begin() + static_cast<ptrdiff_t>(ranks.size() * part / parts),
                            ranks.begin() + static_cast<ptrdiff_t>(ranks.size() * (part + 1) / parts));
    }
    std::sort(groups.begin(), groups.end()); // the lowest ranks first, for the first error
    return groups;
  }

  void proveRanks() {
    const std::vector<std::vector<uint32_t>> groups = this->groups();
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<uint32_t> done = 0;
    forEach(groups.size(), [&](RankVerifier &verifier, size_t group) {
      for (const uint32_t rank : groups[group]) {
        if (rank > first_)
          return;
        if (!verifier.verify(rank))
          return failed(rank, verifier.result());
        ++done;
        if (std::this_thread::get_id() == caller)
          progress_(static_cast<double>(done) / plan_.world());
      }
    });
  }

  /// Proves the moves of all ranks into files, after translating their buffer numbers to those of rank 0.
  void proveFiles() {
    std::vector<RankMove> moves;
    for (const Thread &verifier : idle_) {
      std::move(verifier->fileMoves().begin(), verifier->fileMoves().end(), std::back_inserter(moves));
      verifier->fileMoves() = {};
    }
    const auto &ranges = orEmpty(paired_.segment(0).buffers());
    std::map<std::array<uint32_t, 3>, const BufferRange *> files;
    for (const BufferRange *range : ranges)
      if (range->endpoint() > 0 && plan_.manifest().endpoints()->Get(range->endpoint())->storage())
        files[{range->endpoint(), range->mesh_rank(), range->param()}] = range;
    for (RankMove &each : moves) {
      const BufferRange &range = *bufferRangeOf(paired_.segment(each.rank), each.move.targetBuffer);
      each.move.targetBuffer = each.move.targetBuffer - range.first() +
                               files.at({range.endpoint(), range.mesh_rank(), range.param()})->first();
      each.rank = 0;
    }
    sortByTarget(moves);
    std::vector<std::pair<const BufferRange *, std::span<const RankMove>>> work;
    auto next = moves.begin();
    for (const BufferRange *range : ranges)
      if (range->endpoint() > 0 && plan_.manifest().endpoints()->Get(range->endpoint())->storage()) {
        work.emplace_back(range, movesOf(next, moves.end(), *range));
        next += static_cast<ptrdiff_t>(work.back().second.size());
      }
    forEach(work.size(), [&](RankVerifier &verifier, size_t number) {
      const auto item = static_cast<uint32_t>(number);
      if (item < first_ && !verifier.verifyFile(*work[number].first, work[number].second))
        failed(item, verifier.result());
    });
  }

  const Plan &plan_;
  PairedPlan paired_;
  const unsigned threads_;
  const std::function<void(double)> &progress_;
  std::mutex mutex_;
  std::vector<Thread> idle_;                 // threads without an error
  std::atomic<uint32_t> first_ = UINT32_MAX; // the first item (a rank, then a param of files) with an error
  VerifyResult result_;                      // its error
};

} // namespace

Status PairedPlan::load(unsigned threads) {
  segments_.resize(plan_.world());
  std::vector<Status> found(plan_.world());
  parallelFor(plan_.world(), threads, [&](size_t rank) {
    WorkDeadline::spend(1024);
    found[rank] = plan_.segment(static_cast<uint32_t>(rank), segments_[rank]);
  });
  for (Status &status : found)
    if (!status.ok())
      return std::move(status);
  sends_.resize(plan_.manifest().messages());
  for (uint32_t rank = 0; rank < plan_.world(); ++rank)
    for (const Step *step : orEmpty(segments_[rank]->steps()))
      if (step->kind() == StepKind::send)
        sends_[step->message()] = {rank, step};
  return checkMessages(plan_, segments_, threads);
}

uint64_t Move::bytes() const {
  uint64_t bytes = rowBytes;
  for (const Loop &loop : loops)
    bytes *= static_cast<uint64_t>(loop.count);
  return bytes;
}

LoopNest nestOf(const Move &move, int64_t item) {
  const int64_t target = static_cast<int64_t>(move.targetOffset) / item,
                source = static_cast<int64_t>(move.sourceOffset) / item;
  LoopNest nest{target, source, target, {}};
  for (const Move::Loop &loop : move.loops)
    nest.loops.push_back({loop.count, loop.target / item, loop.source / item, loop.target / item});
  nest.loops.push_back({static_cast<int64_t>(move.rowBytes) / item, 1, 1, 1});
  return nest;
}

bool addTo(RegularSets &sets, const Move &move) {
  RegularSet set{static_cast<int64_t>(move.targetOffset), 0, 0, {}, 0};
  for (const Move::Loop &loop : move.loops)
    set.dimensions.push_back({loop.count, loop.target, 0});
  set.dimensions.push_back({static_cast<int64_t>(move.rowBytes), 1, 0});
  return sets.add(std::move(set));
}

void forEachRow(const Move &move, const std::function<void(const Move &)> &visit) {
  Move row = move;
  row.loops.clear();
  std::vector<int64_t> at(move.loops.size());
  for (size_t l = at.size() + 1; l > 0;) {
    visit(row);
    auto go = [&](const Move::Loop &loop, int64_t times) {
      row.targetOffset += static_cast<uint64_t>(times * loop.target);
      row.sourceOffset += static_cast<uint64_t>(times * loop.source);
    };
    for (l = at.size(); l > 0; --l) {
      const Move::Loop &loop = move.loops[l - 1];
      if (++at[l - 1] < loop.count) {
        go(loop, 1);
        break;
      }
      at[l - 1] = 0;
      go(loop, 1 - loop.count);
    }
  }
}

Status PairedPlan::moves(const OperandPair &operands, const std::function<void(const Move &)> &visit) const {
  const auto &[from, fromRank, input, to, output, message] = operands;
  const Shape &target = *to.shapes()->Get(output.shape());
  const Shape &source = input ? *from->shapes()->Get(input->shape()) : target;
  if (source.row_bytes() != target.row_bytes() || source.loop_count() != target.loop_count())
    return failed("source and target shapes of an operand differ");
  struct BufferLoop {
    uint64_t count, at;
    int64_t targetStep, sourceStep, target, source;
  };
  std::vector<BufferLoop> bufferLoops;
  Move move;
  move.zero = !input;
  move.rowBytes = target.row_bytes();
  move.sourceRank = fromRank;
  move.message = message;
  for (uint32_t l = 0; l < target.loop_count(); ++l) {
    const Loop &t = *to.loops()->Get(target.first_loop() + l),
               &s = input ? *from->loops()->Get(source.first_loop() + l) : t;
    if (s.count() != t.count())
      return failed("source and target shapes of an operand differ");
    const int64_t sourceStep = input ? s.buffer_step() : 0, sourceStride = input ? s.stride() : 0;
    if (t.count() > 1 && (t.buffer_step() != 0 || sourceStep != 0))
      bufferLoops.push_back({t.count(), 0, t.buffer_step(), sourceStep, t.stride(), sourceStride});
    else if (t.count() > 1)
      move.loops.push_back({static_cast<int64_t>(t.count()), t.stride(), sourceStride});
  }
  while (true) {
    auto targetOffset = static_cast<int64_t>(output.offset()),
         sourceOffset = input ? static_cast<int64_t>(input->offset()) : 0;
    int64_t targetBuffer = output.buffer(), sourceBuffer = input ? input->buffer() : 0;
    for (const BufferLoop &loop : bufferLoops) {
      const auto at = static_cast<int64_t>(loop.at);
      targetOffset += at * loop.target;
      targetBuffer += at * loop.targetStep;
      sourceOffset += at * loop.source;
      sourceBuffer += at * loop.sourceStep;
    }
    move.targetBuffer = static_cast<uint32_t>(targetBuffer);
    move.targetOffset = static_cast<uint64_t>(targetOffset);
    move.sourceBuffer = static_cast<uint32_t>(sourceBuffer);
    move.sourceOffset = static_cast<uint64_t>(sourceOffset);
    WorkDeadline::spend(16);
    visit(move);
    size_t j = bufferLoops.size();
    while (j > 0 && ++bufferLoops[j - 1].at == bufferLoops[j - 1].count)
      bufferLoops[--j].at = 0;
    if (j == 0)
      return {};
  }
}

Status PairedPlan::forEachMove(uint32_t rank, uint32_t number, const std::function<void(const Move &)> &visit) const {
  const Step &step = *segments_[rank]->steps()->Get(number);
  Status status;
  for (uint32_t i = 0; step.kind() != StepKind::send && i < step.output_count() && status.ok(); ++i)
    status = forEachMove(rank, number, i, visit);
  return status;
}

Status PairedPlan::forEachMove(uint32_t rank, uint32_t number, uint32_t output,
                               const std::function<void(const Move &)> &visit) const {
  const Segment &to = *segments_[rank];
  const Step &step = *to.steps()->Get(number);
  const bool receive = step.kind() == StepKind::recv;
  const uint32_t fromRank = receive ? step.peer() : rank;
  const Segment *from = segments_[fromRank].get();
  const uint32_t firstInput = receive ? sends_[step.message()].step->first_input() : step.first_input();
  const Operand *input = step.kind() == StepKind::fill ? nullptr : from->operands()->Get(firstInput + output);
  Status status = moves({from, fromRank, input, to, *to.operands()->Get(step.first_output() + output),
                         receive ? step.message() : Move::kNone},
                        visit);
  return status.ok() ? Status() : std::move(status).withPrefix("rank " + std::to_string(rank) + ": ");
}

VerifyResult verifyPlan(const Plan &plan, const std::function<void(double)> &progress, unsigned jobs) {
  return PlanVerifier(plan, jobs ? jobs : std::max(1u, std::thread::hardware_concurrency()), progress).run();
}

} // namespace reshard::verify
