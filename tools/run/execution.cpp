// SPDX-License-Identifier: Apache-2.0
// Runs a plan as reshard-exec does. Each phase is a type that the next ones read: PlannedRun, Processes, RunMemory,
// BoundMemory, Runs. At the end, report() reads them all, and execute() tells the other processes of a failure.
#include "tools/run/execution.h"

#include "base/atomic_file.h"
#include "base/hash.h"
#include "base/text.h"
#include "checkpoints/stored_format.h"
#include "command/terminal.h"
#include "executor/memory/copy_progress.h"
#include "executor/memory/file_copies.h"
#include "executor/rendezvous/launch.h"
#include "schema/holdings.h"
#include "tools/run/carried.h"
#include "tools/run/copy_journal.h"
#include "tools/run/memory.h"
#include "tools/run/new_folder.h"
#include "tools/run/processes.h"
#include "verify/check/compare.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <unistd.h>

namespace reshard::tools {

using namespace checkpoints;
using namespace command;
using namespace verify;

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

std::string sized(uint64_t bytes) { return humanBytes(static_cast<double>(bytes)); }

/// --synthesize --source=DIR: writes the files that a run without --synthesize reads.
void writeSource(PlannedRun &run) {
  const ExecutionOptions &options = run.options;
  if (options.traits().processes)
    throw Failure{kUsage, "--synthesize --source=DIR writes files from one process, expected --transport=" +
                              std::string(transports().front().name)};
  const std::unique_ptr<NewFolder> folder = valueOrThrow(NewFolder::open(options.source, NewFolder::ownNumber(), true));
  Memory memory(*run.plan);
  throwOnError(memory.createFiles(0, folder->temporary(), options.shardBytes), kFailure);
  const ResidentMemoryLimit limit({&memory}, options.memory);
  run.inTime("writing the source's files", "write", nullptr, [&](ProgressLine &progress) {
    forEachRank(memory, progress,
                [&](const MeshRankMemory &rank) { synthesize(*run.plan, rank, options.seed, run.threads); });
  });
  throwOnError(folder->commit());
  std::printf("  wrote %zu file(s) to %s\n", memory.rankMemories().size(), options.source.c_str());
}

/// What a run found in its files, for the report.
struct FilesFound {
  ModelFiles modelFiles;         // what --copy adds; in the first process only
  CarriedObjects carried;        // objects of the source that the targets receive
  std::set<std::string> omitted; // tensors of the files that this process reads and the plan does not use
  std::set<std::string> left;    // objects of the source that are left out
  size_t verified = 0;           // files of the source that have their hashes
  bool resumed = false;          // the target is the unfinished folder of an earlier run
};

/// The memory of both sides for the ranks of this process: allocated with --synthesize, else that of mapped files.
class RunMemory {
public:
  /// Opens the source's files and creates a folder with the target's. The first process creates the folder and what
  /// several processes write. A folder that is not finished is removed with this object, unless keep() was called.
  RunMemory(PlannedRun &run, Processes &processes)
      : run_(run), options_(run.options), endpoints_(*run.plan->manifest().endpoints()), processes_(processes),
        source_(*run.plan, processes.ranks()), target_(*run.plan, processes.ranks()) {
    checkArenas();
    source_.rename(options_.renames);
    if (options_.synthesize) {
      allocate();
    } else {
      openSource();
      openTarget();
    }
  }

  const Memory &source() const { return source_; }
  const Memory &target() const { return target_; }
  /// The source of all processes, if openWhole() has opened it.
  const Memory &whole() const { return whole_ ? *whole_ : source_; }
  /// All memory that is in files.
  std::vector<const Memory *> files() const {
    if (options_.synthesize)
      return {};
    return whole_ ? std::vector{&source_, &target_, &*whole_} : std::vector{&source_, &target_};
  }
  const FilesFound &found() const { return found_; }
  /// The journal of the copies that are on the device, with --resume; else null.
  CopyJournal *journal() const { return journal_.get(); }

  /// With --resume: from now on another run can continue this one.
  void keep() {
    openJournal(true);
    processes_.allReduceMin(0); // all processes have one
    folder_->keep();
  }

  /// Opens the files of the source that only other processes read, for checks.
  void openWhole() {
    if (processes_.ranks().empty())
      return;
    whole_.emplace(*run_.plan).rename(options_.renames);
    openSourceFiles(*whole_);
  }

  /// Waits until the written files are on their device, so that no error of the device can follow.
  void sync() {
    if (!folder_ || options_.noSync)
      return;
    const double begin = now();
    if (journal_)
      throwOnError(journal_->finish(), kFailure);
    const bool shared = std::all_of(endpoints_.begin() + 1, endpoints_.end(), [](auto *e) { return e->storage(); });
    if (processes_.first() || !shared) // the first process can sync all files that are shared
      throwOnError(syncFolder(folder_->temporary()), kFailure);
    run_.trace.add("write to the device", begin);
  }

  /// Makes the target visible if it is right in all processes and no file of the source has changed. Returns whether.
  bool finish(bool right) {
    const Status unchanged = source_.unchanged();
    if (folder_ && !(right && unchanged.ok())) // nothing to resume
      folder_->discard();
    throwOnError(unchanged, kFailure);
    const bool allRight = processes_.allReduceMin(right) != 0;
    if (folder_ && !allRight)
      folder_->discard();
    if (folder_ && allRight) {
      throwOnError(folder_->commit());
      if (processes_.first() && !options_.noSync)
        throwOnError(syncFile(fs::absolute(folder_->path()).parent_path())
                         .withPrefix("'" + folder_->path() + "' is complete, but a loss of power may undo its name: "),
                     kFailure);
    }
    folder_.reset();
    return allRight;
  }

private:
  /// Refuses a limit of the memory that the arenas of this process leave no room in.
  void checkArenas() const {
    if (options_.memory == 0 || options_.device != "cpu") // a device has arenas of its own
      return;
    const std::vector<uint32_t> &ranks = processes_.ranks();
    uint64_t bytes = 0;
    for (uint32_t rank = 0; rank < run_.plan->world(); ++rank) {
      if (!ranks.empty() && std::find(ranks.begin(), ranks.end(), rank) == ranks.end())
        continue;
      std::shared_ptr<const schema::Segment> segment;
      throwOnError(run_.plan->segment(rank, segment), kUsage);
      bytes += ranks.empty() ? arenaHeadBytes(*segment) : segment->arena_bytes(); // one process has no messages
    }
    if (bytes > options_.memory / 2)
      throw Failure{kUsage, "--memory: the arenas of this process need " + std::to_string(bytes) +
                                " bytes, expected at most half of the limit of " + std::to_string(options_.memory) +
                                " bytes; compile the job with a smaller options.staging"};
  }

  void allocate() {
    const bool shared = !processes_.ranks().empty() && !options_.privateMemory;
    throwOnError(source_.allocate(0, shared), kFailure);
    for (uint32_t e = 1; e < endpoints_.size(); ++e)
      throwOnError(target_.allocate(e, shared), kFailure);
  }

  void openSourceFiles(Memory &memory) {
    throwOnError(memory.openFiles(0, run_.source, false, options_.allow.empty() ? nullptr : &found_.omitted), kUsage);
  }

  void openSource() {
    const bool oneHost = processes_.agree(static_cast<int64_t>(hostId() >> 2));
    for (uint32_t e = 1; e < endpoints_.size(); ++e)
      if (endpoints_.Get(e)->storage() && !oneHost) // hosts do not share the pages of mapped files
        throw Failure{kUsage, "the files of " + endpoints_.Get(e)->role()->str() +
                                  " are written by processes on several hosts, expected all processes on one host"};
    openSourceFiles(source_);
    if (processes_.first())
      printNotes(source_.notes());
    throwOnError(checkOutside(run_.target, run_.source), kUsage);
    if (!options_.copy.empty() && processes_.first())
      found_.modelFiles = valueOrThrow(findModelFiles(options_.copy));
    ObjectRules rules = options_.objects;
    rules.allowExtra = !options_.allow.empty();
    throwOnError(found_.carried.choose(*run_.plan, run_.source, source_.objects(), rules, found_.left), kUsage);
    verifySource();
  }

  /// The first process compares the files of a checkpoint with the hashes that it states.
  void verifySource() {
    if (!processes_.first() || !endpoints_.Get(0)->checkpoint() || !fs::is_directory(run_.source))
      return;
    const double begin = now();
    run_.inTime("the comparison with integrity.json", "compare with integrity.json", nullptr,
                [&](ProgressLine &progress) {
                  const auto at = [&](double fraction) { progress.at(fraction); };
                  found_.verified = valueOrThrow(verifyIntegrity(run_.source, run_.threads, at), kUsage);
                });
    if (found_.verified > 0)
      run_.trace.add("compare with integrity.json", begin);
  }

  /// Creates the folder of the targets, or continues that of an earlier run.
  void openTarget() {
    const bool first = processes_.first();
    const int64_t number = processes_.allReduceMin(first ? NewFolder::ownNumber() : INT64_MAX);
    folder_ = valueOrThrow(NewFolder::open(run_.target, number, first, options_.resume));
    auto path = [&](uint32_t e) {
      return folder_->temporary() + (endpoints_.size() > 2 ? "/" + endpoints_.Get(e)->role()->str() : "");
    };
    for (uint32_t e = 1; e < endpoints_.size() && first && !folder_->resumed(); ++e) {
      fs::create_directory(path(e));
      if (endpoints_.Get(e)->storage())
        throwOnError(target_.createFiles(e, path(e), options_.shardBytes, found_.carried.objects()), kFailure);
      if (endpoints_.Get(e)->checkpoint())
        throwOnError(copyModelFiles(found_.modelFiles, path(e)));
    }
    if (!processes_.agree(options_.resume))
      throw Failure{kUsage, "--resume is given to some processes only, expected all or none"};
    found_.resumed = processes_.allReduceMin(!folder_->resumed()) == 0; // the shared files exist
    if (found_.resumed)
      openJournal(false);
    for (uint32_t e = 1; e < endpoints_.size(); ++e)
      if (found_.resumed || (endpoints_.Get(e)->storage() && !first))
        throwOnError(target_.openFiles(e, path(e), true), kFailure);
      else if (!endpoints_.Get(e)->storage())
        throwOnError(target_.createFiles(e, path(e), options_.shardBytes), kFailure);
  }

  /// Opens the journal of this process's copies: that of the run to resume, or with `create` a new one.
  void openJournal(bool create) {
    const std::string folder = folder_->temporary();
    const std::string path = folder + "/" + kJournalPrefix + std::to_string(processes_.rank());
    std::error_code error;
    if (journal_ || (!create && !fs::exists(path, error)))
      return;
    const JournalRun run{.plan = run_.plan->digest(),
                         .transport = options_.traits().processes ? "processes" : "threads",
                         .rank = processes_.rank(),
                         .options = {{"max-shard-size", std::to_string(options_.shardBytes)},
                                     {"copied files", valueOrThrow(digestOf(found_.modelFiles))},
                                     {"objects", found_.carried.digest()},
                                     {"renamed tensors", options_.renames.text()}},
                         .files = journalFiles(source_),
                         .written = valueOrThrow(entriesOf(folder), kFailure)};
    journal_ = create ? valueOrThrow(CopyJournal::create(path, folder, run), kFailure)
                      : valueOrThrow(CopyJournal::open(path, folder, run), kUsage);
  }

  PlannedRun &run_;
  const ExecutionOptions &options_;
  const flatbuffers::Vector<flatbuffers::Offset<schema::Endpoint>> &endpoints_;
  Processes &processes_;
  Memory source_, target_;
  std::optional<Memory> whole_;
  std::unique_ptr<CopyJournal> journal_; // with --resume
  std::unique_ptr<NewFolder> folder_;    // null: the target is synthesized, or finished
  FilesFound found_;
};

/// What the executor reads and writes: the memory of a run, or its copy on the device.
class BoundMemory {
public:
  /// Binds all params, and stands in for the hooks and transforms of callers. This must outlive the executor.
  void bind(const PlannedRun &run, const Processes &processes, const RunMemory &memory) {
    setCallbacks(*run.plan, processes);
    if (run.options.device == "cuda") {
      openDevice(run.options);
      throwOnError(source_.emplace().mirror(*run.plan, memory.source(), *device_), kFailure);
      throwOnError(target_.emplace().mirror(*run.plan, memory.target(), *device_), kFailure);
    }
    bindRanks(run.plan->manifest(), processes, source_ ? source_->rankMemories() : memory.source().rankMemories());
    bindRanks(run.plan->manifest(), processes, target_ ? target_->rankMemories() : memory.target().rankMemories());
  }

  void sourceToDevice() const { throwOnError(source_ ? source_->toDevice() : Status(), kFailure); }
  void targetToHost() const { throwOnError(target_ ? target_->toHost() : Status(), kFailure); }

private:
  void setCallbacks(const Plan &plan, const Processes &processes) {
    const auto refresh = [](void *, const char *, uint32_t) { return 0; }; // there is no engine
    for (const std::string &name : callbackNames(plan, &schema::Param::refresh))
      processes.throwOnError(reshard_set_hook(processes.executor(), name.c_str(), refresh, nullptr));
    reshard_transform copies = RESHARD_TRANSFORM_INITIALIZER;
    copies.prepare_send = [](void *bound, const reshard_transformed *param) {
      return static_cast<BoundMemory *>(bound)->convert(*param, true);
    };
    copies.finalize = [](void *bound, const reshard_transformed *param) {
      return static_cast<BoundMemory *>(bound)->convert(*param, false);
    };
    copies.user = this;
    for (const std::string &name : callbackNames(plan, &schema::Param::transform))
      processes.throwOnError(reshard_set_transform(processes.executor(), name.c_str(), &copies));
  }

  /// Replaces a caller's transform: copies from synthesized memory when sending, or into memory that is checked.
  int convert(const reshard_transformed &param, bool send) const {
    const auto at = transformed_.find({param.endpoint, param.rank, param.name});
    if (at == transformed_.end())
      return 1;
    if (param.bytes > 0)
      std::memcpy(send ? param.memory : at->second, send ? at->second : param.memory, param.bytes);
    return 0;
  }

  /// Opens the device of this process's rank, chosen as reshard_open does.
  void openDevice(const ExecutionOptions &options) {
    const Launch launch = options.traits().processes ? findLaunch() : Launch();
    device_ = valueOrThrow(
        reshard::openDevice(options.device, launch.localRank ? static_cast<int>(*launch.localRank) : -1), kFailure);
  }

  void bindRanks(const schema::Manifest &manifest, const Processes &processes, const RankMemories &memories) {
    for (const MeshRankMemory &memory : memories) {
      const schema::Endpoint &endpoint = *manifest.endpoints()->Get(memory.endpoint);
      const uint32_t rank = endpoint.ranks()->Get(memory.meshRank);
      for (uint32_t p = 0; p < memory.params.size(); ++p)
        for (const schema::ParamInstance &instance : schema::instances(manifest, endpoint, p, memory.meshRank))
          if (std::byte *pointer = memory.params[p][instance.instance]; schema::transformed(*endpoint.params()->Get(p)))
            transformed_[{memory.endpoint, rank, instance.name}] = pointer;
          else if (pointer)
            processes.throwOnError(reshard_bind(processes.executor(), memory.endpoint, rank, instance.name.c_str(),
                                                pointer, static_cast<uint64_t>(instance.bytes)));
    }
  }

  /// Memory of params with a transform, by endpoint, rank and name.
  std::map<std::tuple<uint32_t, uint32_t, std::string>, std::byte *> transformed_;
  std::unique_ptr<Device> device_; // has the params
  std::optional<DeviceMemory> source_, target_;
};

/// Synchronizes with the other processes, which must have the same plan, and allocates all that the runs need.
void prepare(PlannedRun &run, Processes &processes) {
  const bool samePlan =
      processes.agree(static_cast<int64_t>(std::stoull(run.plan->digest().substr(0, 15), nullptr, 16)));
  processes.unreachable(
      [&] { processes.throwOnError(reshard_prepare(processes.executor()), samePlan ? std::optional<int>() : kUsage); });
}

/// The progress line of a run that writes files: bytes, rate, time left, the tensor that is written.
class RunProgress {
public:
  /// `target`: the memory that the run writes.
  RunProgress(const Plan &plan, const Memory &target) {
    for (const MeshRankMemory &memory : target.rankMemories()) {
      const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(memory.endpoint);
      for (uint32_t p = 0; p < memory.params.size(); ++p)
        for (const schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, memory.meshRank))
          if (const std::byte *begin = memory.params[p][instance.instance])
            tensors_[begin] = instance.name;
    }
  }

  void at(const CopyProgress &progress) {
    if (!begin_ || progress.bytesDone < last_) { // a run begins; what an earlier process has done is skipped at once
      first_ = progress.bytesDone;
      begin_ = now();
    }
    last_ = progress.bytesDone;
    // "1.2 GiB of 3.4 GiB, 512.0 MiB/s, 5 s left, NAME"
    std::string text = sized(progress.bytesDone) + " of " + sized(progress.bytes);
    const double seconds = now() - *begin_, moved = static_cast<double>(progress.bytesDone - first_);
    if (moved > 0 && seconds > 0) {
      const double remaining = static_cast<double>(progress.bytes - progress.bytesDone);
      const auto left = static_cast<uint64_t>(std::ceil(remaining / (moved / seconds)));
      text += ", " + humanBytes(moved / seconds) + "/s, " +
              (left < 100 ? std::to_string(left) + " s" : std::to_string((left + 59) / 60) + " min") + " left";
    }
    const auto tensor = tensors_.upper_bound(progress.next);
    if (progress.next && tensor != tensors_.begin())
      text += ", " + printable(std::prev(tensor)->second);
    line_.at(progress.bytes ? static_cast<double>(progress.bytesDone) / static_cast<double>(progress.bytes) : 1, text);
  }

private:
  std::map<const std::byte *, std::string> tensors_; // by the begin of their memory
  ProgressLine line_{"copy"};
  std::optional<double> begin_;   // time of the first call in a run
  uint64_t first_ = 0, last_ = 0; // bytes at the first and the last call in a run
};

/// Runs a prepared plan, and checks its values before and after.
class Runs {
public:
  Runs(PlannedRun &run, const Processes &processes, const BoundMemory &bound, const RunMemory &memory)
      : run_(run), options_(run.options), processes_(processes), bound_(bound), memory_(memory),
        limit_(memory.files(), run.options.memory) {}

  /// Whether all source replicas are equal; prints the names of those that differ.
  bool replicasAgree() {
    if (options_.synthesize)
      fill(options_.seed, "synthesize");
    ReplicaResult result;
    run_.inTime("the comparison of replicas", "compare replicas", "compare replicas", [&](ProgressLine &progress) {
      const Memory &source = memory_.whole();
      const auto at = [&](double fraction) { progress.at(fraction); };
      result = compareReplicas(*run_.plan, source.rankMemories(), run_.threads, {at, [&] { limit_.check(); }});
      const StoredReplicaResult files =
          valueOrThrow(compareStoredReplicas(run_.source, source.storedReplicas(), run_.threads, at), kUsage);
      result.comparedBytes += files.comparedBytes;
      result.differences.insert(result.differences.end(), files.differences.begin(), files.differences.end());
    });
    constexpr size_t kShown = 20;
    for (size_t i = 0; i < result.differences.size() && i < kShown; ++i)
      printError("reshard-exec", result.differences[i]);
    if (result.differences.size() > kShown)
      printError("reshard-exec", "and " + std::to_string(result.differences.size() - kShown) + " more");
    for (const std::string &name : result.skipped)
      std::printf("  %-10s '%s' is held by several params of the source, at least one quantized: not compared with "
                  "each other\n",
                  "replicas", printable(name).c_str());
    if (result.comparedBytes == 0 && result.skipped.empty())
      std::printf("  %-10s the source has no replicas\n", "replicas");
    else if (result.differences.empty() && result.comparedBytes > 0)
      std::printf("  %-10s %12s compared, all equal\n", "replicas", sized(result.comparedBytes).c_str());
    return result.differences.empty();
  }

  /// Runs the plan --repeat times. With --check, synthesized values are moved twice, under two seeds: memory that a run
  /// does not write cannot be correct both times.
  void runAll() {
    std::optional<RunProgress> progress;
    const bool watched = !options_.synthesize && options_.device == "cpu";
    if (watched) {
      watch(progress);
      copyFiles();
    }
    const uint64_t seeds = options_.synthesize && options_.check ? 2 : 1;
    for (uint64_t s = 0; s < seeds; ++s) {
      if (options_.synthesize)
        fill(options_.seed + s, s == 0 ? "synthesize" : "synthesize again");
      bound_.sourceToDevice();
      for (uint64_t n = 0; n < (s == 0 ? options_.repeat : 1); ++n)
        runOnce(watched);
      bound_.targetToHost();
      if (seeds > 1)
        checkSynthesized(options_.seed + s);
    }
  }

  /// Compares the written files with the source's. Each process checks its own targets, and its part of the files that
  /// all processes write.
  void checkFiles() {
    run_.inTime("the check", "check", "check", [&](ProgressLine &progress) {
      const CompareProcess among =
          processes_.ranks().empty() ? CompareProcess() : CompareProcess{processes_.rank(), run_.plan->world()};
      CompareWatch watch{[&](double fraction) { progress.at(fraction); }, [&] { limit_.check(); }};
      if (options_.memory > 0)
        watch.copies = std::min(watch.copies, options_.memory / 4);
      result_ = compare(*run_.plan, memory_.whole().rankMemories(), memory_.target().rankMemories(), run_.threads,
                        watch, among);
    });
  }

  /// What the checks found in this process.
  const CheckResult &result() const { return result_; }
  bool right() const { return result_.mismatches == 0 && result_.ambiguity.empty(); }
  /// How long each run took.
  const std::vector<double> &seconds() const { return seconds_; }

private:
  /// Shows the progress of the copies, adds them to the journal and limits the memory. `progress` lives as long as the
  /// runs.
  void watch(std::optional<RunProgress> &progress) {
    CopyJournal *const journal = memory_.journal();
    CopyWatch watch;
    watch.copied = [this] { limit_.check(); };
    if (journal)
      watch.done = journal->found().done;
    if (processes_.first() && ::isatty(STDERR_FILENO))
      progress.emplace(*run_.plan, memory_.target());
    watch.at = [journal, &progress](const CopyProgress &copies) {
      if (progress)
        progress->at(copies);
      if (journal)
        journal->add({copies.done, copies.bytesDone});
    };
    throwOnError(watchCopies(*processes_.executor(), std::move(watch)).status(), kUsage);
  }

  /// Lets copies write the files without their mappings. Targets come first: not all files may be open at a time.
  void copyFiles() {
    std::vector<const MappedFile *> files = memory_.target().files();
    const std::vector<const MappedFile *> sources = memory_.source().files();
    files.insert(files.end(), sources.begin(), sources.end());
    throwOnError(copyThroughFiles(*processes_.executor(), files, !options_.noSync), kUsage);
  }

  /// Fills the source; `traced`: its name in the trace. Targets are not cleared: under the second seed they hold the
  /// values of the first, which the run must overwrite.
  void fill(uint64_t seed, const char *traced) {
    run_.inTime("the synthesis", "synthesize", traced, [&](ProgressLine &progress) {
      forEachRank(memory_.source(), progress,
                  [&](const MeshRankMemory &rank) { synthesize(*run_.plan, rank, seed, run_.threads); });
    });
  }

  void runOnce(bool watched) {
    const double begin = now();
    reshard_status status = RESHARD_OK;
    {
      std::optional<ElapsedLine> elapsed;
      if (!watched) // else the progress of the copies is shown
        elapsed.emplace("run");
      status = reshard_run(processes_.executor(), options_.timeout, nullptr);
    }
    seconds_.push_back(now() - begin);
    run_.trace.add("run " + std::to_string(seconds_.size()), begin);
    processes_.throwOnError(status, kFailure);
  }

  void checkSynthesized(uint64_t seed) {
    run_.inTime("the check", "check", "check", [&](ProgressLine &progress) {
      Reference reference(*run_.plan, seed);
      forEachRank(memory_.target(), progress,
                  [&](const MeshRankMemory &rank) { result_.add(check(*run_.plan, rank, reference, run_.threads)); });
    });
  }

  PlannedRun &run_;
  const ExecutionOptions &options_;
  const Processes &processes_;
  const BoundMemory &bound_;
  const RunMemory &memory_;
  const ResidentMemoryLimit limit_;
  CheckResult result_;
  std::vector<double> seconds_;
};

/// Whether several mesh ranks of the source, or several of its files, hold the same elements.
bool heldTwice(const Memory &memory, const schema::Endpoint &source) {
  if (!memory.storedReplicas().empty())
    return true;
  for (uint32_t param = 0; source.params() && param < source.params()->size(); ++param)
    if (schema::holdsElements(*source.params()->Get(param)))
      for (const std::vector<uint32_t> &meshRanks : schema::RankClasses(source, param).meshRanks())
        if (meshRanks.size() > 1)
          return true;
  return false;
}

/// `whose`: whose result it is; a wrong one of the only process needs no name.
void printCheck(const CheckResult &result, const std::string &whose, bool only) {
  const char *const prefix = only ? "" : whose.c_str();
  if (!result.ambiguity.empty())
    std::printf("  %scannot be checked: %s\n", prefix, printable(result.ambiguity).c_str());
  else if (result.mismatches == 0)
    std::printf("  %s%llu bytes right\n", whose.c_str(), static_cast<unsigned long long>(result.checkedBytes));
  else
    std::printf("  %s%llu elements WRONG; %s\n", prefix, static_cast<unsigned long long>(result.mismatches),
                printable(result.first).c_str());
}

/// What each process says of its own ranks.
void printOwn(const PlannedRun &run, const Processes &processes, const FilesFound &found) {
  if (const uint64_t bytes = reshard_bytes_by(processes.executor(), RESHARD_MESSAGES_INSIDE_HOST); bytes > 0)
    std::printf("  rank %u: %s from ranks on this host arrived as messages, because their memory cannot be mapped\n",
                processes.rank(), sized(bytes).c_str());
  // all processes open a checkpoint: one prints
  if (processes.first() || !run.plan->manifest().endpoints()->Get(0)->storage())
    for (const auto &[names, what] : {std::pair(&found.omitted, "tensor"), std::pair(&found.left, "object")})
      if (!names->empty())
        std::printf("  %-10s %s of the source: %s\n", "left out", counted(names->size(), what).c_str(),
                    printable(patternsOf(*names)).c_str());
  if (const size_t objects = found.carried.objects().size(); processes.first() && objects > 0)
    std::printf("  %-10s %12zu copied unchanged\n", "objects", objects);
}

/// `bytes`: those of one run. `fastest`: the rate of the fastest run in GB/s.
void printTotals(const PlannedRun &run, const RunMemory &memory, const std::vector<double> &seconds, uint64_t bytes,
                 double fastest) {
  const ExecutionOptions &options = run.options;
  const schema::Manifest &manifest = run.plan->manifest();
  const FilesFound &found = memory.found();
  std::printf("  %-10s %12s in %u ranks\n", "moved", sized(bytes).c_str(), run.plan->world());
  if (const uint32_t replicas = manifest.endpoints()->Get(1)->replicas(); replicas > 0)
    std::printf("  %-10s replica 0 of %u engine replicas: a run does not pull\n", "target", replicas);
  std::printf("  %-10s %12s\n", "local", sized(manifest.bytes_local()).c_str());
  std::printf("  %-10s %12s in %llu messages\n", "remote", sized(manifest.bytes_remote()).c_str(),
              static_cast<unsigned long long>(manifest.messages()));
  if (manifest.bytes_storage() > 0)
    std::printf("  %-10s %12s\n", "storage", sized(manifest.bytes_storage()).c_str());
  if (!options.synthesize && !options.checkReplicas && heldTwice(memory.source(), *manifest.endpoints()->Get(0)))
    std::printf("  %-10s of the source were not compared: --check-replicas compares them\n", "replicas");
  if (found.verified > 0)
    std::printf("  %-10s %12zu file(s) have the hashes in integrity.json\n", "verified", found.verified);
  if (!options.copy.empty())
    std::printf("  %-10s %12zu file(s) of --copy, except %zu others: weights, folders, hidden files\n", "copied",
                found.modelFiles.names.size(), found.modelFiles.skipped);
  std::printf("  %-10s %10.4f s, %.2f GB/s%s\n", "time", *std::min_element(seconds.begin(), seconds.end()), fastest,
              seconds.size() > 1 ? " (fastest run)" : "");
}

/// The bytes received by each method, summed over all processes.
Json bytesBy(Processes &processes) {
  constexpr std::pair<const char *, reshard_method> kMethods[] = {
      {"local", RESHARD_LOCAL},
      {"shared_memory", RESHARD_SHARED_MEMORY},
      {"messages", RESHARD_MESSAGES},
      {"messages_inside_host", RESHARD_MESSAGES_INSIDE_HOST}};
  Json json;
  for (const auto &[name, method] : kMethods)
    json[name] = processes.sum(reshard_bytes_by(processes.executor(), method));
  return json;
}

/// Prints what all processes have done; the first one writes the report and the trace. All processes call it.
void report(const PlannedRun &run, Processes &processes, const RunMemory &memory, const Runs &all) {
  const ExecutionOptions &options = run.options;
  const FilesFound &found = memory.found();
  const bool only = processes.ranks().empty();
  if (options.check && !only) // each process prints its own result
    printCheck(all.result(), "rank " + std::to_string(processes.rank()) + ": ", only);
  printOwn(run, processes, found);
  const bool wanted = processes.allReduceMin(options.report.empty()) == 0; // by some process
  const Json by = wanted ? bytesBy(processes) : Json();
  const uint64_t resumed = options.resume ? processes.sum(memory.journal()->found().bytes) : 0;
  const uint64_t checkedBytes = wanted ? processes.sum(all.result().checkedBytes) : 0,
                 mismatches = wanted ? processes.sum(all.result().mismatches) : 0;
  if (!processes.first())
    return; // the first process prints for all
  const uint64_t bytes = (only ? reshard_bytes(processes.executor()) : run.plan->manifest().bytes_target()) - resumed;
  Json runs = Json::array(), objects = Json::array();
  double fastest = 0;
  for (const double seconds : all.seconds()) {
    const double rate = seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0;
    runs.push_back({{"seconds", seconds}, {"bytes", bytes}, {"gb_per_s", rate}});
    fastest = std::max(fastest, rate);
  }
  for (const ObjectSpec &object : found.carried.objects())
    objects.push_back(object.name);
  const Json json = {{"digest", run.plan->digest()},
                     {"transport", options.transport},
                     {"device", options.device},
                     {"ranks", run.plan->world()},
                     {"threads", run.threads},
                     {"runs", runs},
                     {"bytes_by", by},
                     {"checked_bytes", checkedBytes},
                     {"mismatches", mismatches},
                     {"refresh", callbackNames(*run.plan, &schema::Param::refresh)},
                     {"transform", callbackNames(*run.plan, &schema::Param::transform)},
                     {"resumed_bytes", resumed},
                     {"omitted", found.omitted},
                     {"omitted_objects", found.left},
                     {"objects", objects},
                     {"copied", found.modelFiles.names},
                     {"peak_rss_bytes", peakRssBytes()}};
  if (!options.report.empty())
    throwOnError(writeFile(options.report, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"), kFailure);
  if (!options.trace.empty())
    throwOnError(writeFile(options.trace, run.trace.text()), kFailure);
  if (options.resume)
    std::printf("  %-10s %12s%s\n", "resumed", sized(resumed).c_str(),
                found.resumed ? " were written by an earlier run" : ": there was no unfinished target");
  printTotals(run, memory, all.seconds(), bytes, fastest);
  if (options.check && only)
    printCheck(all.result(), "all ", only);
}

/// All phases of a run, in their order. Returns the exit code.
int runPhases(PlannedRun &run, Processes &processes, BoundMemory &bound) {
  const ExecutionOptions &options = run.options;
  run.open();
  if (options.synthesize && !options.source.empty()) {
    writeSource(run);
    return kDone;
  }
  double begin = now();
  processes.join();
  RunMemory memory(run, processes);
  run.trace.add("bind memory", begin);
  begin = now();
  bound.bind(run, processes, memory);
  prepare(run, processes);
  run.trace.add("prepare", begin);
  if (options.resume)
    memory.keep();
  if (!options.synthesize && (options.check || options.checkReplicas))
    memory.openWhole();

  Runs runs(run, processes, bound, memory);
  if (options.checkReplicas && processes.allReduceMin(!processes.first() || runs.replicasAgree()) == 0)
    return kNegative;
  processes.allReduceMin(0); // all processes reach the run
  processes.unreachable([&] { runs.runAll(); });
  memory.sync();
  if (!options.synthesize && options.check)
    runs.checkFiles();
  const bool right = memory.finish(runs.right());
  processes.allReduceMin(0); // all processes are done: what each reports next stays true if another one is killed
  report(run, processes, memory, runs);
  return right ? kDone : kNegative;
}

} // namespace

int execute(const ExecutionOptions &options) {
  watchSignals();
  PlannedRun run(options);
  BoundMemory bound; // outlives the executor of `processes`
  Processes processes(run);
  int code = kFailure;
  try {
    code = runPhases(run, processes, bound);
    processes.finish();
    return code;
  } catch (const PeerFailure &all) {
    code = all.code;
    printError("reshard-exec", all.message);
  } catch (const Failure &own) {
    printError("reshard-exec", own.message);
    code = processes.fail(own.code, own.message);
  } catch (const std::exception &exception) { // usually out of memory
    printError("reshard-exec", explain(exception));
    code = processes.fail(kFailure, explain(exception));
  }
  try {
    processes.allReduceMin(0); // wait until the folder is removed: the launcher kills all after the first failure
  } catch (const Failure &) {  // the other processes no longer answer
  }
  return code;
}

} // namespace reshard::tools
