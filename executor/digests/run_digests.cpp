// SPDX-License-Identifier: Apache-2.0
// Computes the digest of each part of a tensor that a rank class of a target holds, once from the source's memory and
// once from each target rank's, and compares them. A mismatch is searched, piece by piece, for its first index.
#include "executor/digests/run_digests.h"

#include "base/parallel.h"
#include "schema/flatbuffer_vectors.h"

#include <algorithm>
#include <set>

namespace reshard {

using namespace schema;

namespace {

constexpr size_t kNamed = 8;      // tensors, and ranks of each, that an error names
constexpr int64_t kPieces = 1024; // into which the search of a wrong element cuts its range

Pieces whole(int64_t elements) { return {0, elements, elements}; }

std::string joined(const std::vector<std::string> &names, const char *what) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kNamed); ++i)
    text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > kNamed)
    text += " and " + std::to_string(names.size() - kNamed) + " more " + what;
  return text;
}

/// "[2, 5]": the position of a row-major index.
std::string positionOf(int64_t index, const std::vector<int64_t> &shape) {
  std::string text;
  for (size_t d = shape.size(); d-- > 0; index /= shape[d])
    text = std::to_string(index % shape[d]) + (text.empty() ? "" : ", ") + text;
  return "[" + text + "]";
}

} // namespace

const Holdings &ProcessDigests::holdings(uint32_t endpoint) {
  if (const auto at = holdings_.find(endpoint); at != holdings_.end())
    return at->second;
  const auto covers = [&](uint32_t param, uint32_t) {
    return holdsElements(*this->endpoint(endpoint).params()->Get(param));
  };
  return holdings_.emplace(endpoint, holdingsOf(memory_.plan.manifest(), endpoint, covers, false)).first->second;
}

const Param &ProcessDigests::paramOf(uint32_t number, const Holding &holding) {
  return *endpoint(number).params()->Get(holdings(number).classOf(holding).param);
}

std::string ProcessDigests::paramName(uint32_t number, uint32_t param) const {
  return endpoint(number).role()->str() + " param '" + endpoint(number).params()->Get(param)->name()->str() + "'";
}

std::vector<std::string> ProcessDigests::withoutElements(uint32_t number) const {
  std::vector<std::string> names;
  const auto &params = orEmpty(endpoint(number).params());
  for (uint32_t param = 0; param < params.size(); ++param)
    if (!params.Get(param)->view() &&
        !holdsElements(*params.Get(param))) // a view's base params are params of their own
      names.push_back(paramName(number, param));
  return names;
}

Status ProcessDigests::load(uint32_t number, uint32_t meshRank, const Holding &holding, Loaded &loaded) {
  const uint32_t param = holdings(number).classOf(holding).param;
  const int64_t item = itemBytes(storageDtypeOf(*endpoint(number).params()->Get(param)));
  const std::byte *bound = memory_.bound(number, meshRank, param, holding.instance);
  if (!bound)
    return badBinding(endpoint(number).role()->str() + " " + meshRankName(endpoint(number), meshRank) + " param '" +
                      instances(memory_.plan.manifest(), endpoint(number), param, meshRank)[holding.instance].name +
                      "' is not bound: a digest needs all params");
  const auto [first, end] = holding.grid.places();
  loaded.memory = {bound + first * item, first, item, {}};
  loaded.bytes = static_cast<uint64_t>((end - first) * item);
  return {};
}

Status ProcessDigests::add(const PartGrid &grid, Loaded &loaded, const PlaceSet *except, const Pieces &pieces,
                           std::vector<CountedDigest> &sums) {
  if (Device *device = memory_.transport.device(); device && loaded.copy.empty()) {
    // The kernel has neither casts nor elements that do not count, and one digest.
    if (!except && !loaded.memory.cast && pieces.count() == 1)
      if (const std::optional<kernels::DigestTable> table = digestTableOf(grid, loaded.memory))
        return addOnDevice(*device, *table, grid.elements(), sums[0]);
    loaded.copy.resize(loaded.bytes);
    if (Status status = device->copy(loaded.copy.data(), loaded.memory.data, loaded.bytes); !status.ok())
      return status;
    loaded.memory.data = loaded.copy.data();
  }
  addElements(grid, loaded.memory, except, pieces, sums);
  return {};
}

Status ProcessDigests::forEachCounted(uint32_t number, const std::string *tensor, const Deadline &deadline,
                                      const std::function<Status(const Holding &, Loaded &, const PlaceSet *)> &work) {
  const Holdings &held = holdings(number);
  std::vector<const Holding *> mine;
  for (const Holding &holding : held.items)
    if ((!tensor || *held.tensors[holding.tensor].name == *tensor) &&
        memory_.local(number, held.classOf(holding).meshRanks[0]))
      mine.push_back(&holding);
  Status first;
  std::mutex mutex;
  parallelFor(mine.size(), memory_.threads, [&](size_t i) {
    const uint32_t meshRank = held.classOf(*mine[i]).meshRanks[0];
    Loaded loaded;
    Status status = passed(deadline) ? timedOut("timed out: not all digests were computed")
                                     : load(number, meshRank, *mine[i], loaded);
    if (status.ok()) {
      // An element that several holdings have counts in the first of them.
      std::optional<PlaceSet> except;
      for (const PartGrid &grid : held.heldEarlier(*mine[i])) {
        if (!except) {
          int64_t elements = 1;
          for (const int64_t length : localShape(endpoint(number), paramOf(number, *mine[i]), meshRank))
            elements *= length;
          except.emplace(elements);
        }
        except->add(grid);
      }
      status = work(*mine[i], loaded, except ? &*except : nullptr);
    }
    const std::lock_guard lock(mutex);
    if (first.ok())
      first = std::move(status);
  });
  return first;
}

Status ProcessDigests::addSource(const Bucket *only, const Pieces &pieces, std::vector<CountedDigest> &sums,
                                 const Deadline &deadline) {
  std::mutex mutex;
  const Holdings &source = holdings(0);
  const std::string *name = nullptr;
  if (only)
    name = tensorOf(*only).name;
  return forEachCounted(0, name, deadline, [&](const Holding &holding, Loaded &loaded, const PlaceSet *except) {
    const HeldTensor &tensor = source.tensors[holding.tensor];
    for (const auto &[number, first] : firstBucket_) {
      const Holdings &target = holdings_.at(number);
      const auto at = target.byName.find(*tensor.name);
      if (at == target.byName.end() || (only && only->endpoint != number))
        continue;
      for (const uint32_t item : target.tensors[at->second].holdings) {
        if (only && only->holding != item)
          continue;
        const std::optional<PartGrid> both = overlap(holding.grid, target.items[item].grid);
        if (!both)
          continue;
        loaded.memory.cast = castOf(*endpoint(number).params()->Get(target.classOf(target.items[item]).param));
        std::vector<CountedDigest> some(only ? sums.size() : 1);
        if (Status added = add(*both, loaded, except, only ? pieces : whole(tensor.elements), some); !added.ok())
          return added;
        const std::lock_guard lock(mutex);
        for (size_t i = 0; i < some.size(); ++i)
          sums[only ? i : first + item].add(some[i]);
      }
    }
    return Status();
  });
}

void ProcessDigests::makeBuckets() {
  if (buckets_.empty())
    for (uint32_t number = 1; number < memory_.plan.manifest().endpoints()->size(); ++number) {
      firstBucket_[number] = static_cast<uint32_t>(buckets_.size());
      for (uint32_t item = 0; item < holdings(number).items.size(); ++item)
        buckets_.push_back({number, item});
    }
  holdings(0); // before several threads read it
}

Status ProcessDigests::addTarget(const Bucket &bucket, uint32_t meshRank, const Pieces &pieces,
                                 std::vector<CountedDigest> &sums) {
  const Holding &holding = holdingOf(bucket);
  Loaded loaded;
  if (Status status = load(bucket.endpoint, meshRank, holding, loaded); !status.ok())
    return status;
  return add(holding.grid, loaded, nullptr, pieces, sums);
}

Status RunDigests::reportUndigested(std::vector<std::string> names, bool allowed) {
  undigested_ = std::move(names);
  if (undigested_.empty() || allowed)
    return {};
  return invalid("expected params that hold elements of tensors on both sides, found quantized or transformed ones: " +
                 joined(undigested_, "params"));
}

Result<std::vector<SideDigest>> RunDigests::side(uint32_t number, bool allowUndigested, const Deadline &deadline) {
  const Holdings &held = process_.holdings(number);
  Status status = reportUndigested(process_.withoutElements(number), allowUndigested);
  std::vector<SideDigest> found;
  for (const HeldTensor &tensor : held.tensors) {
    const DType dtype = storageDtypeOf(process_.paramOf(number, held.items[tensor.holdings[0]]));
    found.push_back({*tensor.name, dtype, tensor.shape, tensor.elements, {}});
    for (const uint32_t holding : tensor.holdings)
      if (const DType other = storageDtypeOf(process_.paramOf(number, held.items[holding]));
          other != dtype && status.ok())
        status = invalid("tensor '" + *tensor.name + "' is " + dtypeName(dtype) + " in one param and " +
                         dtypeName(other) + " in another, expected one dtype");
  }
  std::vector<CountedDigest> sums(held.tensors.size());
  std::mutex mutex;
  if (status.ok())
    status = process_.forEachCounted(
        number, nullptr, deadline, [&](const Holding &holding, ProcessDigests::Loaded &loaded, const PlaceSet *except) {
          std::vector<CountedDigest> one(1);
          Status added = process_.add(holding.grid, loaded, except, whole(held.tensors[holding.tensor].elements), one);
          const std::lock_guard lock(mutex);
          sums[holding.tensor].add(one[0]);
          return added;
        });
  if (status = agree(std::move(status), deadline); !status.ok())
    return status;
  if (status = reduce(sums, deadline); !status.ok())
    return status;
  for (size_t t = 0; t < found.size(); ++t)
    found[t].sum = sums[t];
  return found;
}

Status RunDigests::checkMoves() const {
  return process_.buckets().empty() && undigested_.empty()
             ? invalid("the plan moves no bytes: no target has a param with elements")
             : Status();
}

Status RunDigests::expect(const CheckOptions &options, const Deadline &deadline) {
  options_ = options;
  process_.makeBuckets();
  expected_.assign(process_.buckets().size(), {});
  if (Status status = agree(process_.addSource(nullptr, {}, expected_, deadline), deadline); !status.ok())
    return status;
  if (Status status = reduce(expected_, deadline); !status.ok())
    return status;
  std::set<std::string> names;
  for (const auto &[number, first] : process_.firstBucket()) {
    for (std::string &name : process_.withoutElements(number))
      names.insert(std::move(name));
    for (uint32_t item = 0; item < process_.holdings(number).items.size(); ++item)
      if (!process_.isDigested(process_.buckets()[first + item], expected_[first + item]))
        names.insert(process_.paramName(process_.buckets()[first + item]));
  }
  if (Status status = reportUndigested({names.begin(), names.end()}, options.allowUndigested); !status.ok())
    return status;
  if (Status status = checkMoves(); !status.ok())
    return status;
  if (options.changed && !last_.empty() && expected_ == last_)
    return invalid("the source has not changed since the last run that was checked: the digests of all its tensors are "
                   "the same");
  return {};
}

Status RunDigests::findWrong(std::vector<Wrong> &wrong, const Deadline &deadline) {
  std::vector<Wrong> all;
  for (uint32_t b = 0; b < process_.buckets().size(); ++b)
    if (const auto &bucket = process_.buckets()[b]; process_.isDigested(bucket, expected_[b]))
      for (const uint32_t meshRank : process_.heldOf(bucket).classOf(process_.holdingOf(bucket)).meshRanks)
        if (process_.memory().local(bucket.endpoint, meshRank))
          all.push_back({b, meshRank});
  Status first;
  std::mutex mutex;
  parallelFor(all.size(), process_.memory().threads, [&](size_t i) {
    const auto &bucket = process_.buckets()[all[i].bucket];
    std::vector<CountedDigest> found(1);
    Status status = passed(deadline)
                        ? timedOut("timed out: not all digests were computed")
                        : process_.addTarget(bucket, all[i].meshRank, whole(process_.tensorOf(bucket).elements), found);
    const std::lock_guard lock(mutex);
    if (!status.ok())
      first = first.ok() ? std::move(status) : first;
    else if (found[0] != expected_[all[i].bucket])
      wrong.push_back(all[i]);
  });
  std::sort(wrong.begin(), wrong.end(), [](const Wrong &a, const Wrong &b) {
    return std::pair(a.bucket, a.meshRank) < std::pair(b.bucket, b.meshRank);
  });
  return first;
}

Status RunDigests::compare(const Deadline &deadline) {
  std::vector<Wrong> wrong;
  if (Status status = agree(findWrong(wrong, deadline), deadline); !status.ok())
    return status;
  std::vector<uint64_t> counts(process_.buckets().size());
  for (const Wrong &each : wrong)
    ++counts[each.bucket];
  Result<std::vector<uint64_t>> all = process_.memory().transport.allReduceSum(std::move(counts), deadline);
  if (!all.ok())
    return all.status();
  if (std::all_of(all->begin(), all->end(), [](uint64_t count) { return count == 0; })) {
    last_ = expected_;
    return {};
  }
  const Result<std::string> text = describe(wrong, *all, deadline);
  return text.ok() ? failed("the targets differ from the source after the run: " + *text) : text.status();
}

Result<std::string> RunDigests::describe(const std::vector<Wrong> &mine, const std::vector<uint64_t> &counts,
                                         const Deadline &deadline) {
  std::vector<std::pair<uint32_t, uint32_t>> tensors; // endpoint, tensor
  std::vector<uint32_t> named(counts.size());         // by bucket: 1 + its place in `tensors`
  uint32_t first = 0;
  for (uint32_t b = static_cast<uint32_t>(counts.size()); b-- > 0;)
    if (counts[b] > 0)
      first = b;
  for (uint32_t b = first; b < counts.size(); ++b) {
    if (counts[b] == 0)
      continue;
    const auto &bucket = process_.buckets()[b];
    const std::pair tensor(bucket.endpoint, process_.holdingOf(bucket).tensor);
    const auto at = std::find(tensors.begin(), tensors.end(), tensor);
    named[b] = static_cast<uint32_t>(at - tensors.begin()) + 1;
    if (at == tensors.end())
      tensors.push_back(tensor);
  }
  const size_t most = std::min(tensors.size(), kNamed);
  size_t ranks = 0; // the number in the target with the most
  for (const auto &[number, bucket] : process_.firstBucket())
    ranks = std::max<size_t>(ranks, process_.endpoint(number).ranks()->size());
  std::vector<uint64_t> flags(most * ranks);
  for (const Wrong &each : mine)
    if (const uint32_t place = named[each.bucket]; place <= most)
      flags[(place - 1) * ranks + each.meshRank] = 1;
  const Result<std::vector<uint64_t>> all = process_.memory().transport.allReduceSum(std::move(flags), deadline);
  if (!all.ok())
    return all.status();
  std::string text;
  for (size_t t = 0; t < most; ++t) {
    const Endpoint &at = process_.endpoint(tensors[t].first);
    std::vector<std::string> names;
    for (uint32_t m = 0; m < at.ranks()->size(); ++m)
      if ((*all)[t * ranks + m] > 0)
        names.push_back(meshRankName(at, m));
    text += (t > 0 ? "; " : "") + std::string("tensor '") +
            *process_.holdings(tensors[t].first).tensors[tensors[t].second].name + "' is wrong on " + at.role()->str() +
            " " + joined(names, "ranks");
    if (t == 0 && options_.firstIndex) {
      const Result<std::string> index = firstIndex(mine, first, deadline);
      if (!index.ok())
        return index.status();
      text += ", " + *index;
    }
  }
  if (tensors.size() > most)
    text += "; and " + std::to_string(tensors.size() - most) + " more tensors are wrong";
  return text;
}

Result<std::string> RunDigests::firstIndex(const std::vector<Wrong> &mine, uint32_t number, const Deadline &deadline) {
  const auto &bucket = process_.buckets()[number];
  const HeldTensor &tensor = process_.tensorOf(bucket);
  const auto own = std::find_if(mine.begin(), mine.end(), [&](const Wrong &wrong) { return wrong.bucket == number; });
  const Result<int64_t> meshRank =
      process_.memory().transport.allReduceMin(own == mine.end() ? INT64_MAX : own->meshRank, deadline);
  if (!meshRank.ok())
    return meshRank.status();
  const auto at = static_cast<uint32_t>(*meshRank);
  Pieces pieces = whole(tensor.elements);
  while (pieces.end - pieces.begin > 1) {
    pieces.length = (pieces.end - pieces.begin + kPieces - 1) / kPieces;
    std::vector<CountedDigest> expected(pieces.count()), found(pieces.count());
    Status status = process_.addSource(&bucket, pieces, expected, deadline);
    const bool here = process_.memory().local(bucket.endpoint, at);
    if (status.ok() && here)
      status = process_.addTarget(bucket, at, pieces, found);
    if (status = agree(std::move(status), deadline); !status.ok())
      return status;
    if (status = reduce(expected, deadline); !status.ok())
      return status;
    const auto differs = std::mismatch(expected.begin(), expected.end(), found.begin()).first - expected.begin();
    const Result<int64_t> piece = process_.memory().transport.allReduceMin(here ? differs : INT64_MAX, deadline);
    if (!piece.ok())
      return piece.status();
    if (*piece >= static_cast<int64_t>(pieces.count()))
      return failed("the memory changed while it was checked");
    pieces.begin += *piece * pieces.length;
    pieces.end = std::min(pieces.end, pieces.begin + pieces.length);
  }
  return "first at index " + positionOf(pieces.begin, tensor.shape) + " on " +
         meshRankName(process_.endpoint(bucket.endpoint), at);
}

Result<std::vector<CountedDigest>> RunDigests::sourceDigests() {
  process_.makeBuckets();
  std::vector<CountedDigest> sums(process_.buckets().size());
  Status status = process_.addSource(nullptr, {}, sums, {});
  return status.ok() ? Result(std::move(sums)) : status;
}

Result<RunDigests::RankBuckets> RunDigests::bucketsOf(uint32_t meshRank, bool allowUndigested) {
  process_.makeBuckets();
  RankBuckets found;
  std::set<uint32_t> sources;
  const Holdings &source = process_.holdings(0);
  for (uint32_t b = 0; b < process_.buckets().size(); ++b) {
    const auto &bucket = process_.buckets()[b];
    const std::vector<uint32_t> &holders = process_.heldOf(bucket).classOf(process_.holdingOf(bucket)).meshRanks;
    if (!std::binary_search(holders.begin(), holders.end(), meshRank))
      continue;
    found.numbers.push_back(b);
    if (const auto at = source.byName.find(*process_.tensorOf(bucket).name); at != source.byName.end())
      for (const uint32_t item : source.tensors[at->second].holdings)
        if (overlap(source.items[item].grid, process_.holdingOf(bucket).grid))
          sources.insert(source.classOf(source.items[item]).meshRanks[0]);
  }
  found.sources.assign(sources.begin(), sources.end());
  std::vector<std::string> names;
  for (const auto &[number, first] : process_.firstBucket())
    for (std::string &name : process_.withoutElements(number))
      names.push_back(std::move(name));
  if (Status status = reportUndigested(std::move(names), allowUndigested); !status.ok())
    return status;
  if (Status status = checkMoves(); !status.ok())
    return status;
  return found;
}

Status RunDigests::checkDigests(const RankBuckets &buckets, const std::vector<CountedDigest> &expected,
                                bool allowUndigested) {
  std::set<std::string> names(undigested_.begin(), undigested_.end());
  for (size_t i = 0; i < buckets.numbers.size(); ++i)
    if (const auto &bucket = process_.buckets()[buckets.numbers[i]]; !process_.isDigested(bucket, expected[i]))
      names.insert(process_.paramName(bucket));
  return reportUndigested({names.begin(), names.end()}, allowUndigested);
}

Result<std::string> RunDigests::compareRank(uint32_t meshRank, const RankBuckets &buckets,
                                            const std::vector<CountedDigest> &expected,
                                            const std::function<void()> &poll, const Deadline &deadline) {
  std::set<std::string> wrong;
  for (size_t i = 0; i < buckets.numbers.size(); ++i) {
    const auto &bucket = process_.buckets()[buckets.numbers[i]];
    if (!process_.isDigested(bucket, expected[i]))
      continue;
    poll();
    if (passed(deadline))
      return timedOut("timed out: not all digests were computed");
    const HeldTensor &tensor = process_.tensorOf(bucket);
    std::vector<CountedDigest> found(1);
    if (Status status = process_.addTarget(bucket, meshRank, whole(tensor.elements), found); !status.ok())
      return status;
    if (found[0] != expected[i])
      wrong.insert("'" + *tensor.name + "'");
  }
  return joined({wrong.begin(), wrong.end()}, "tensors");
}

Status RunDigests::agree(Status mine, const Deadline &deadline) {
  const Result<int64_t> worst =
      process_.memory().transport.allReduceMin(mine.ok() ? INT64_MAX : static_cast<int64_t>(mine.kind()), deadline);
  if (!mine.ok())
    return mine;
  if (!worst.ok())
    return worst.status();
  return *worst == INT64_MAX
             ? Status()
             : Status(static_cast<ErrorKind>(*worst), "the digests of another rank failed; see its error");
}

Status RunDigests::reduce(std::vector<CountedDigest> &sums, const Deadline &deadline) {
  std::vector<uint64_t> numbers;
  numbers.reserve(3 * sums.size());
  for (const CountedDigest &sum : sums)
    numbers.insert(numbers.end(), {sum.digest.sums[0], sum.digest.sums[1], sum.elements});
  const Result<std::vector<uint64_t>> all = process_.memory().transport.allReduceSum(std::move(numbers), deadline);
  if (all.ok())
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i] = {{{(*all)[3 * i], (*all)[3 * i + 1]}}, (*all)[3 * i + 2]};
  return all.status();
}

} // namespace reshard
