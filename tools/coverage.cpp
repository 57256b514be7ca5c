#include "tools/coverage.h"

#include "tools/gathered.h"
#include "tools/quantize.h"
#include "tools/synthesize.h"
#include "tools/vectors.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <unordered_map>

namespace reshard::tools {

namespace {

using namespace schema;

/// Consecutive elements of one tensor at consecutive places of an instance; tensor 0 is padding.
struct Stretch {
  int64_t local, count;
  uint32_t tensor;
  int64_t logical;
};

const BufferRun *runOf(const Segment &segment, uint32_t buffer) {
  const auto &runs = all(segment.buffers());
  auto at =
      std::upper_bound(runs.begin(), runs.end(), buffer, [](uint32_t b, const BufferRun *r) { return b < r->first(); });
  return at == runs.begin() ? nullptr : *--at;
}

/// What the elements of instances are, by the layouts; remembers as long as memory allows.
class Contents {
public:
  explicit Contents(const Manifest &manifest) : manifest_(manifest) { tensors_[""] = 0; }

  const std::vector<Stretch> &of(const Segment &segment, uint32_t buffer) {
    const BufferRun &run = *runOf(segment, buffer);
    const uint32_t instance = buffer - run.first();
    const Key key{run.endpoint(), likePlace(run), run.param(), instance};
    if (const auto known = known_.find(key); known != known_.end())
      return known->second;
    if (kept_ > kMaxKept) {
      known_.clear();
      kept_ = 0;
    }
    std::vector<Stretch> stretches = make(run, instance);
    kept_ += stretches.size();
    return known_[key] = std::move(stretches);
  }

  const std::string &name(uint32_t tensor) const {
    for (const auto &[name, number] : tensors_)
      if (number == tensor)
        return name;
    return tensors_.begin()->first;
  }

  const ParamInstance &instance(const BufferRun &run, uint32_t number) {
    const uint64_t key = (uint64_t{run.endpoint()} << 56) ^ (uint64_t{run.place()} << 28) ^ run.param();
    auto [at, added] = instances_.try_emplace(key);
    if (added) {
      if (instances_.size() > 4096) { // rank by rank, so that a few places are enough
        instances_.clear();
        at = instances_.try_emplace(key).first;
      }
      at->second = instances(manifest_, *manifest_.endpoints()->Get(run.endpoint()), run.param(), run.place());
    }
    return at->second[number];
  }

private:
  using Key = std::array<uint32_t, 4>;           // endpoint, place, param, instance
  static constexpr size_t kMaxKept = 20'000'000; // half a gigabyte

  /// The first place seen where a param holds the same: replicas have the same coordinates in all that it depends on.
  uint32_t likePlace(const BufferRun &run) {
    const auto [at, added] = likePlace_.try_emplace({run.endpoint(), run.place(), run.param(), 0}, run.place());
    if (!added)
      return at->second;
    std::vector<int64_t> coordinates = likeness(*manifest_.endpoints()->Get(run.endpoint()), run.param(), run.place());
    coordinates.push_back(run.endpoint());
    return at->second = firstLike_.try_emplace(std::move(coordinates), run.place()).first->second;
  }

  std::vector<Stretch> make(const BufferRun &run, uint32_t number) {
    const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
    std::vector<Stretch> stretches;
    std::string last;
    uint32_t tensor = 0;
    auto put = [&](int64_t local, int64_t logical, int64_t count) {
      if (!stretches.empty()) {
        Stretch &back = stretches.back();
        if (back.tensor == tensor && back.local + back.count == local && (tensor == 0 || back.logical + back.count == logical)) {
          back.count += count;
          return;
        }
      }
      stretches.push_back({local, count, tensor, logical});
    };
    forEachRun(manifest_, endpoint, run.param(), run.place(), instance(run, number), [&](const ElementRun &r) {
      if (!r.tensor) {
        tensor = 0;
        last.clear();
      } else if (last != *r.tensor) {
        last = *r.tensor;
        tensor = tensors_.try_emplace(last, static_cast<uint32_t>(tensors_.size())).first->second;
      }
      if (r.localStep == 1 && r.logicalStep == 1)
        put(r.local, r.logical, r.count);
      else
        for (int64_t k = 0; k < r.count; ++k)
          put(r.local + k * r.localStep, r.logical + k * r.logicalStep, 1);
    });
    std::sort(stretches.begin(), stretches.end(), [](const Stretch &a, const Stretch &b) { return a.local < b.local; });
    return disjoint(std::move(stretches));
  }

  /// Parts may say the same of an element twice; of parts that contradict each other nothing is left.
  static std::vector<Stretch> disjoint(std::vector<Stretch> sorted) {
    size_t kept = 0;
    for (Stretch next : sorted) {
      if (kept > 0) {
        const Stretch &back = sorted[kept - 1];
        if (const int64_t shared = std::min(back.local + back.count - next.local, next.count); shared > 0) {
          const bool agree = back.tensor == next.tensor &&
                             (next.tensor == 0 || next.logical - back.logical == next.local - back.local);
          if (!agree)
            return {};
          next = {next.local + shared, next.count - shared, next.tensor, next.logical + shared};
          if (next.count == 0)
            continue;
        }
      }
      sorted[kept++] = next;
    }
    sorted.resize(kept);
    return sorted;
  }

  const Manifest &manifest_;
  std::unordered_map<std::string, uint32_t> tensors_;
  std::map<Key, std::vector<Stretch>> known_;
  std::map<Key, uint32_t> likePlace_; // instance 0
  std::map<std::vector<int64_t>, uint32_t> firstLike_;
  std::unordered_map<uint64_t, std::vector<ParamInstance>> instances_;
  size_t kept_ = 0;
};

/// The stretch that has element `local`; `last`, where there is one, was the answer for an element shortly before.
const Stretch *find(const std::vector<Stretch> &list, int64_t local, const Stretch *last) {
  auto has = [&](const Stretch &stretch) { return local >= stretch.local && local < stretch.local + stretch.count; };
  if (last) {
    if (has(*last))
      return last;
    if (last != &list.back() && has(last[1]))
      return last + 1;
  }
  const auto at =
      std::upper_bound(list.begin(), list.end(), local, [](int64_t l, const Stretch &s) { return l < s.local; });
  return at == list.begin() || !has(*std::prev(at)) ? nullptr : &*std::prev(at);
}

class Prover {
public:
  explicit Prover(const Plan &plan) : plan_(plan), paired_(plan), gathered_(plan, paired_), contents_(plan.manifest()) {}

  CoverageResult run(const std::function<void(double)> &progress) {
    result_.error = paired_.load();
    // A storage target is written by several ranks, so its rows are gathered first.
    for (uint32_t rank = 0; rank < plan_.world() && result_.error.empty(); ++rank) {
      rows_.clear();
      const std::string error = gathered_.forEachRow(rank, [&](const Row &row) {
        const BufferRun *run = runOf(paired_.segment(rank), row.targetBuffer);
        const Endpoint &endpoint = *plan_.manifest().endpoints()->Get(run->endpoint());
        (endpoint.storage() ? storage_ : rows_).push_back({rank, row});
      });
      if (!error.empty())
        fail(error);
      if (result_.error.empty())
        checkRank(rank, rows_, false);
      if (result_.error.empty())
        checkRelays(rank);
      progress(static_cast<double>(rank + 1) / plan_.world());
    }
    if (result_.error.empty())
      checkStorage();
    return result_;
  }

private:
  struct Placed {
    uint32_t rank; // whose buffer numbers the row uses
    Row row;
  };

  std::string where(uint32_t rank, uint32_t buffer, uint64_t offset) {
    const BufferRun &run = *runOf(paired_.segment(rank), buffer);
    const Endpoint &endpoint = *plan_.manifest().endpoints()->Get(run.endpoint());
    return endpoint.role()->str() + (endpoint.storage() ? " file " : " rank ") + std::to_string(endpoint.ranks()->Get(run.place())) + " param '" +
           contents_.instance(run, buffer - run.first()).name + "' byte " + std::to_string(offset);
  }

  bool fail(const std::string &error) {
    if (result_.error.empty())
      result_.error = error;
    return false;
  }

  /// All rows of one rank's own target buffers: they must tile each buffer, each with the right content.
  void checkRank(uint32_t rank, std::vector<Placed> &rows, bool storage) {
    const Segment &segment = paired_.segment(rank);
    std::sort(rows.begin(), rows.end(), [](const Placed &a, const Placed &b) {
      return std::tie(a.row.targetBuffer, a.row.targetOffset) < std::tie(b.row.targetBuffer, b.row.targetOffset);
    });
    size_t next = 0;
    for (const BufferRun *run : all(segment.buffers())) {
      const Endpoint &endpoint = *plan_.manifest().endpoints()->Get(run->endpoint());
      if (run->endpoint() == 0 || endpoint.storage() != storage)
        continue;
      const Param &param = *endpoint.params()->Get(run->param());
      if (param.made() ? !madeOnce(endpoint, *run, rank) : param.face() && !makes(endpoint, *param.face(), *run, rank))
        return;
      for (uint32_t i = 0; i < run->count(); ++i) {
        uint64_t at = 0;
        const uint32_t buffer = run->first() + i;
        for (; next < rows.size() && rows[next].row.targetBuffer == buffer; ++next) {
          const Row &row = rows[next].row;
          if (param.made()) {
            fail(where(rank, buffer, row.targetOffset) + " is written, but is made of what is written to a face");
            return;
          }
          if (row.targetOffset > at && nothingIn(param, rank, buffer, at, row.targetOffset))
            at = row.targetOffset;
          if (row.targetOffset != at) {
            fail(where(rank, buffer, std::min(at, row.targetOffset)) + (row.targetOffset > at ? " is never written" : " is written twice"));
            return;
          }
          at += row.bytes;
          ++result_.rows;
          result_.bytes += row.bytes;
          if (!checkSource(rank, row, param.dtype()) || !checkContent(rank, rows[next], itemBytes(param.dtype())))
            return;
        }
        if (at != run->bytes() && !param.made() && !nothingIn(param, rank, buffer, at, run->bytes())) {
          fail(where(rank, buffer, at) + " is never written");
          return;
        }
      }
    }
  }

  /// Whether no part of a face of largest magnitudes covers a range: those of tensors that a matrix has not, which are zero.
  bool nothingIn(const Param &param, uint32_t rank, uint32_t buffer, uint64_t begin, uint64_t end) {
    if (!param.face() || param.face()->kind() != FaceKind::amax)
      return false;
    const auto item = static_cast<uint64_t>(itemBytes(param.dtype()));
    const std::vector<Stretch> &stretches = contents_.of(paired_.segment(rank), buffer);
    return std::none_of(stretches.begin(), stretches.end(), [&](const Stretch &stretch) {
      const auto from = static_cast<uint64_t>(stretch.local) * item;
      return from < end && from + static_cast<uint64_t>(stretch.count) * item > begin;
    });
  }

  /// What is made of others has one face that makes it, which is proven like a param: each of its bytes is written, and becomes part of what it shows.
  bool madeOnce(const Endpoint &endpoint, const BufferRun &run, uint32_t rank) {
    int faces = 0;
    for (const Param *param : all(endpoint.params()))
      if (const Face *face = param->face()) {
        const std::vector<uint32_t> made = madeParams(*face);
        faces += static_cast<int>(std::count(made.begin(), made.end(), run.param()));
      }
    return faces == 1 || fail(where(rank, run.first(), 0) + " is made by way of " + std::to_string(faces) + " faces, expected one");
  }

  /// What a face makes is not written in another way.
  bool makes(const Endpoint &endpoint, const Face &face, const BufferRun &run, uint32_t rank) {
    for (const uint32_t made : madeParams(face))
      if (!endpoint.params()->Get(made)->made())
        return fail(where(rank, run.first(), 0) + " makes param '" + endpoint.params()->Get(made)->name()->str() + "', which has bytes of its own");
    return true;
  }

  /// A row comes from the source, as it was before the run, or from a target rank that passes it on, of which checkRelays sees that
  /// it was there. And bytes are only the same value in the same dtype.
  bool checkSource(uint32_t rank, const Row &row, DType dtype) {
    if (row.zero)
      return true;
    const BufferRun *from = runOf(paired_.segment(row.sourceRank), row.sourceBuffer);
    if (!from || plan_.manifest().endpoints()->Get(from->endpoint())->storage() > (from->endpoint() == 0))
      return fail(where(rank, row.targetBuffer, row.targetOffset) + " comes from " + (from ? "a written file" : "the arena") +
                  " of rank " + std::to_string(row.sourceRank) + ", not from the source or a target rank");
    const Param &param = *plan_.manifest().endpoints()->Get(from->endpoint())->params()->Get(from->param());
    // What is quantised, or made, does not stand as it came.
    if (from->endpoint() > 0 && (param.face() ? param.face()->kind() == FaceKind::elements : param.made()))
      return fail(where(rank, row.targetBuffer, row.targetOffset) + " is passed on by rank " + std::to_string(row.sourceRank) + ", where it is quantised");
    const DType found = param.dtype();
    return found == dtype || fail(where(rank, row.targetBuffer, row.targetOffset) + " is " + dtypeName(dtype) +
                                  ", but comes from " + dtypeName(found));
  }

  /// What a rank passes on must have been written by receives and copies that the send waits for; nothing is written twice, so it is still there.
  void checkRelays(uint32_t rank) {
    const Segment &segment = paired_.segment(rank);
    auto target = [&](const Operand &operand) {
      const BufferRun *run = runOf(segment, operand.buffer());
      return run && run->endpoint() > 0;
    };
    for (const Step *step : all(segment.steps())) {
      if (step->kind() != StepKind::send)
        continue;
      std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> read, written; // buffer, begin, end
      const auto note = [](auto &list) {
        return [&list](const Row &row) { list.emplace_back(row.targetBuffer, row.targetOffset, row.targetOffset + row.bytes); };
      };
      for (uint32_t i = 0; i < step->input_count(); ++i)
        if (const Operand &operand = *segment.operands()->Get(step->first_input() + i); target(operand))
          paired_.forEachRow(rank, operand, note(read));
      if (read.empty())
        continue;
      for (uint32_t i = 0; i < step->after_count(); ++i) {
        const Step &before = *segment.steps()->Get(segment.after()->Get(step->first_after() + i));
        for (uint32_t o = 0; o < before.output_count() && before.kind() != StepKind::send; ++o)
          paired_.forEachRow(rank, *segment.operands()->Get(before.first_output() + o), note(written));
      }
      std::sort(read.begin(), read.end());
      std::sort(written.begin(), written.end());
      size_t at = 0;
      for (const auto &[buffer, begin, end] : read) {
        uint64_t next = begin;
        while (at < written.size() && std::make_pair(std::get<0>(written[at]), std::get<2>(written[at])) <= std::make_pair(buffer, begin))
          ++at;
        for (size_t w = at; next < end && w < written.size() && std::get<0>(written[w]) == buffer && std::get<1>(written[w]) <= next; ++w)
          next = std::max(next, std::get<2>(written[w]));
        if (next < end) {
          fail(where(rank, buffer, next) + " is passed on to rank " + std::to_string(step->peer()) + " in round " + std::to_string(step->round()) +
               ", but no step that this waits for writes it");
          return;
        }
      }
    }
  }

  bool checkContent(uint32_t rank, const Placed &placed, int64_t item) {
    const Row &row = placed.row;
    // The target's stretches are copied: looking up the source may forget them.
    if (lastBuffer_ != row.targetBuffer || lastRank_ != rank) {
      expected_ = contents_.of(paired_.segment(rank), row.targetBuffer);
      lastBuffer_ = row.targetBuffer;
      lastRank_ = rank;
    }
    const std::vector<Stretch> *found = row.zero ? nullptr : &contents_.of(paired_.segment(row.sourceRank), row.sourceBuffer);
    if (row.targetOffset % item != 0 || row.bytes % item != 0 || row.sourceOffset % item != 0)
      return fail(where(rank, row.targetBuffer, row.targetOffset) + " is written in parts of elements");
    int64_t target = static_cast<int64_t>(row.targetOffset) / item, source = static_cast<int64_t>(row.sourceOffset) / item;
    auto failHere = [&](const std::string &why) {
      return fail(where(rank, row.targetBuffer, static_cast<uint64_t>(target * item)) + why);
    };
    const Stretch *want = nullptr, *have = nullptr;
    for (int64_t left = static_cast<int64_t>(row.bytes) / item; left > 0;) {
      want = find(expected_, target, want);
      if (!want)
        return failHere(" is in no part of its layout");
      if (row.zero ? want->tensor != 0 : want->tensor == 0)
        return failHere(row.zero ? " is zeroed but is no padding" : " is padding but is copied to");
      int64_t count = std::min(left, want->local + want->count - target);
      if (found) {
        have = find(*found, source, have);
        if (!have || have->tensor == 0)
          return failHere(" comes from the source's padding");
        const int64_t expected = want->logical + (target - want->local),
                      logical = have->logical + (source - have->local);
        if (have->tensor != want->tensor || logical != expected)
          return failHere(" must be tensor '" + contents_.name(want->tensor) + "' element " + std::to_string(expected) +
                          ", but comes from tensor '" + contents_.name(have->tensor) + "' element " +
                          std::to_string(logical) + " of rank " + std::to_string(row.sourceRank));
        count = std::min(count, have->local + have->count - source);
      }
      target += count;
      source += count;
      left -= count;
    }
    return true;
  }

  /// Rows into files, from all ranks: buffer numbers are those of rank 0.
  void checkStorage() {
    bool any = false;
    for (uint32_t e = 1; e < plan_.manifest().endpoints()->size(); ++e)
      any = any || plan_.manifest().endpoints()->Get(e)->storage();
    if (!any)
      return;
    for (Placed &placed : storage_) {
      const BufferRun &run = *runOf(paired_.segment(placed.rank), placed.row.targetBuffer);
      const uint32_t instance = placed.row.targetBuffer - run.first();
      for (const BufferRun *other : all(paired_.segment(0).buffers()))
        if (other->endpoint() == run.endpoint() && other->place() == run.place() && other->param() == run.param()) {
          placed.row.targetBuffer = other->first() + instance;
          break;
        }
      placed.rank = 0;
    }
    checkRank(0, storage_, true);
  }

  const Plan &plan_;
  PairedPlan paired_;
  Gathered gathered_;
  Contents contents_;
  CoverageResult result_;
  std::vector<Placed> rows_, storage_;
  std::vector<Stretch> expected_;
  uint32_t lastBuffer_ = 0, lastRank_ = UINT32_MAX;
};

} // namespace

std::string PairedPlan::load() {
  segments_.resize(plan_.world());
  for (uint32_t rank = 0; rank < plan_.world(); ++rank)
    if (std::string error = plan_.segment(rank, segments_[rank]); !error.empty())
      return error;
  sends_.resize(plan_.manifest().messages());
  for (uint32_t rank = 0; rank < plan_.world(); ++rank)
    for (const Step *step : all(segments_[rank]->steps()))
      if (step->kind() == StepKind::send)
        sends_[step->message()] = {rank, step};
  return checkMessages(plan_);
}

std::string PairedPlan::rows(const Segment *from, uint32_t fromRank, const Operand *input, const Segment &to, const Operand &output,
                             const std::function<void(const Row &)> &visit) const {
  const Shape &target = *to.shapes()->Get(output.shape());
  const Shape &source = input ? *from->shapes()->Get(input->shape()) : target;
  if (source.row_bytes() != target.row_bytes() || source.loop_count() != target.loop_count())
    return "an operand differs between its two sides";
  const uint32_t loops = target.loop_count();
  uint64_t at[16] = {};
  Row row;
  row.zero = !input;
  row.bytes = target.row_bytes();
  row.sourceRank = fromRank;
  while (true) {
    int64_t targetOffset = static_cast<int64_t>(output.offset()), sourceOffset = input ? static_cast<int64_t>(input->offset()) : 0;
    int64_t targetBuffer = output.buffer(), sourceBuffer = input ? input->buffer() : 0;
    for (uint32_t l = 0; l < loops; ++l) {
      const Loop &t = *to.loops()->Get(target.first_loop() + l);
      targetOffset += static_cast<int64_t>(at[l]) * t.stride();
      targetBuffer += static_cast<int64_t>(at[l]) * t.buffer_step();
      if (input) {
        const Loop &s = *from->loops()->Get(source.first_loop() + l);
        if (s.count() != t.count())
          return "an operand differs between its two sides";
        sourceOffset += static_cast<int64_t>(at[l]) * s.stride();
        sourceBuffer += static_cast<int64_t>(at[l]) * s.buffer_step();
      }
    }
    row.targetBuffer = static_cast<uint32_t>(targetBuffer);
    row.targetOffset = static_cast<uint64_t>(targetOffset);
    row.sourceBuffer = static_cast<uint32_t>(sourceBuffer);
    row.sourceOffset = static_cast<uint64_t>(sourceOffset);
    visit(row);
    uint32_t l = loops;
    while (l > 0 && ++at[l - 1] == to.loops()->Get(target.first_loop() + l - 1)->count())
      at[--l] = 0;
    if (l == 0)
      return {};
  }
}

std::string PairedPlan::forEachRow(uint32_t rank, uint32_t number, const std::function<void(const Row &)> &visit) const {
  const Segment &to = *segments_[rank];
  const Step &step = *to.steps()->Get(number);
  if (step.kind() == StepKind::send)
    return {};
  const bool receive = step.kind() == StepKind::recv;
  const uint32_t fromRank = receive ? step.peer() : rank;
  const Segment *from = segments_[fromRank];
  const uint32_t firstInput = receive ? sends_[step.message()].step->first_input() : step.first_input();
  for (uint32_t i = 0; i < step.output_count(); ++i) {
    const Operand *input = step.kind() == StepKind::fill ? nullptr : from->operands()->Get(firstInput + i);
    if (std::string error = rows(from, fromRank, input, to, *to.operands()->Get(step.first_output() + i), visit); !error.empty())
      return "rank " + std::to_string(rank) + ": " + error;
  }
  return {};
}

CoverageResult prove(const Plan &plan, const std::function<void(double)> &progress) { return Prover(plan).run(progress); }

} // namespace reshard::tools
