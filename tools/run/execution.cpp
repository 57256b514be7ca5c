// SPDX-License-Identifier: Apache-2.0
// Runs a plan as reshard-exec does: opens the memory and the transport, runs, checks the result, and reports failures
// to the other processes.
#include "tools/run/execution.h"

#include "base/atomic_file.h"
#include "base/hash.h"
#include "base/text.h"
#include "base/work_deadline.h"
#include "checkpoints/stored_checkpoint.h"
#include "checkpoints/stored_format.h"
#include "command/terminal.h"
#include "executor/load/load.h"
#include "executor/memory/file_copies.h"
#include "executor/rendezvous/launch.h"
#include "reshard/reshard.h"
#include "schema/holdings.h"
#include "tools/run/carried.h"
#include "tools/run/copy_journal.h"
#include "tools/run/execution_options.h"
#include "tools/run/guarded_exit.h"
#include "tools/run/memory.h"
#include "tools/run/new_folder.h"
#include "tools/run/run_progress.h"
#include "verify/check/compare.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <tuple>
#include <unistd.h>

namespace reshard::tools {

using namespace checkpoints;
using namespace command;
using namespace verify;

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

/// Activities with their times, for --trace.
class Trace {
public:
  void add(const std::string &name, double begin) {
    events_.push_back({{"name", name},
                       {"ph", "X"},
                       {"pid", 1},
                       {"tid", 1},
                       {"ts", (begin - start_) * 1e6},
                       {"dur", (now() - begin) * 1e6}});
  }
  std::string text() const { return Json{{"traceEvents", events_}, {"displayTimeUnit", "ms"}}.dump(1) + "\n"; }

private:
  double start_ = now();
  Json events_ = Json::array();
};

struct RunTime {
  double seconds;
};

std::vector<std::string> objectNames(const std::vector<ObjectSpec> &objects) {
  std::vector<std::string> names;
  names.reserve(objects.size());
  for (const ObjectSpec &object : objects)
    names.push_back(object.name);
  return names;
}

/// Whether several mesh ranks of the source hold the same elements.
bool heldTwice(const schema::Manifest &manifest) {
  const schema::Endpoint &source = *manifest.endpoints()->Get(0);
  for (uint32_t param = 0; source.params() && param < source.params()->size(); ++param)
    if (schema::holdsElements(*source.params()->Get(param)))
      for (const std::vector<uint32_t> &meshRanks : schema::RankClasses(source, param).meshRanks())
        if (meshRanks.size() > 1)
          return true;
  return false;
}

class Execution {
public:
  explicit Execution(const ExecutionOptions &options)
      : options_(options),
        threads_(options.threads ? options.threads : std::max(1u, std::thread::hardware_concurrency())) {}
  ~Execution() {
    if (options_.traits().processes)
      guardExits(whileJoining()); // until the process ends: a thread may still wait in MPI for peers
  }

  /// Returns the exit code. A failure in one process fails all processes with the same exit code, as long as they can
  /// still communicate.
  int run() {
    int code = kFailure;
    try {
      code = runSteps();
      waitForOutput();
      return code;
    } catch (const PeerFailure &all) {
      code = all.code;
      printError("reshard-exec", all.message);
    } catch (const Failure &own) {
      printError("reshard-exec", own.message);
      code = reportFailure(own.code, own.message);
    } catch (const std::exception &exception) { // usually out of memory
      printError("reshard-exec", explain(exception));
      code = reportFailure(kFailure, explain(exception));
    }
    try {
      allReduceMin(0); // wait until the folder is removed: the launcher kills all processes after the first failure
    } catch (const Failure &) {
      return code; // the other processes no longer answer
    }
    return code;
  }

private:
  /// The failure of another process.
  struct PeerFailure : Failure {};

  /// Reports a failure of this process to the others. Returns the code with which all processes exit.
  int reportFailure(int code, const std::string &reason) {
    if (!executor_ && options_.traits().rendezvous) { // the other processes wait in their open
      const reshard_options options = openOptions(options_, threads_);
      if (!plan_ || !options_.rank || *options_.rank < plan_->world()) [[maybe_unused]]
        const reshard_status sent =
            reshard_fail_open(options_.rank ? &*options_.rank : nullptr, &options, reason.c_str());
      return code;
    }
    try {
      if (!executor_ && options_.traits().launched())
        open(); // the other processes join or have joined
      allReduceMin(kFailed + (static_cast<int64_t>(code) << 32 | (ranks_.empty() ? 0 : ranks_[0])));
      return code;
    } catch (const PeerFailure &all) { // thrown whenever the others answer
      return all.code;
    } catch (const Failure &) {
      return code;
    }
  }

  int runSteps() {
    throwOnError(Plan::open(options_.plan, plan_), kUsage);
    throwOnError(checkOptions(options_, *plan_));
    source_ = sourceFolder(options_, *plan_);
    target_ = targetFolder(options_, *plan_);
    if (!options_.traits().processes) { // this process has all ranks, thus both sides of each message
      throwOnError(checkMessages(*plan_));
    }
    if (options_.synthesize && !options_.source.empty()) {
      writeSource();
      return kDone;
    }
    const double begin = now();
    open();
    checkArenas();
    Memory source(*plan_, ranks_), target(*plan_, ranks_);
    source.rename(options_.renames);
    std::unique_ptr<NewFolder> folder;
    if (options_.synthesize)
      allocate(source, target);
    else
      folder = openFolders(source, target);
    trace_.add("bind memory", begin);
    prepare(source, target);
    if (options_.resume) {
      openJournal(*folder, source, true);
      allReduceMin(0); // all processes have one
      folder->keep();
    }

    std::optional<Memory> whole; // the source of all processes
    if (!ranks_.empty() && !options_.synthesize && (options_.check || options_.checkReplicas)) {
      whole.emplace(*plan_).rename(options_.renames);
      throwOnError(whole->openFiles(0, source_, false, options_.allow.empty() ? nullptr : &omitted_), kUsage);
    }
    std::vector<const Memory *> files;
    if (!options_.synthesize)
      files = {&source, &target};
    if (whole)
      files.push_back(&*whole);
    const ResidentMemoryLimit limit(files, options_.memory);
    if (options_.checkReplicas && allReduceMin(!first() || replicasAgree(whole ? *whole : source, limit)) == 0)
      return kNegative;
    allReduceMin(0); // all processes reach the run
    reachable_ = false;
    runAll(source, target, limit);
    reachable_ = true;
    if (folder && !options_.noSync)
      syncFiles(*folder);
    if (!options_.synthesize && options_.check)
      checkFiles(whole ? *whole : source, target, limit);
    const Status unchanged = source.unchanged();
    const bool right = unchanged.ok() && result_.mismatches == 0 && result_.ambiguity.empty();
    if (folder && !right) // nothing to resume
      folder->discard();
    throwOnError(unchanged, kFailure);
    const bool allRight = allReduceMin(right) != 0;
    if (folder && !allRight)
      folder->discard();
    if (folder && allRight)
      commit(*folder);
    folder.reset();
    allReduceMin(0); // all processes are done: what each reports next stays true if another one is killed
    report();
    return allRight ? kDone : kNegative;
  }

  /// Refuses a limit of the memory that the arenas of this process leave no room in.
  void checkArenas() const {
    if (options_.memory == 0 || options_.device != "cpu") // a device has arenas of its own
      return;
    uint64_t bytes = 0;
    for (uint32_t rank = 0; rank < plan_->world(); ++rank) {
      if (!ranks_.empty() && std::find(ranks_.begin(), ranks_.end(), rank) == ranks_.end())
        continue;
      std::shared_ptr<const schema::Segment> segment;
      throwOnError(plan_->segment(rank, segment), kUsage);
      bytes +=
          ranks_.empty() ? arenaHeadBytes(*segment) : segment->arena_bytes(); // one process needs no slots for messages
    }
    if (bytes > options_.memory / 2)
      throw Failure{kUsage, "--memory: the arenas of this process need " + std::to_string(bytes) +
                                " bytes, expected at most half of the limit of " + std::to_string(options_.memory) +
                                " bytes; compile the job with a smaller options.staging"};
  }

  /// Opens the journal of this process's copies: that of the run to resume, or with `create` a new one.
  void openJournal(const NewFolder &folder, const Memory &source, bool create) {
    const std::string path = folder.temporary() + "/" + kJournalPrefix + std::to_string(ranks_.empty() ? 0 : ranks_[0]);
    std::error_code error;
    if (journal_ || (!create && !fs::exists(path, error)))
      return;
    Result<std::vector<std::string>> entries = entriesOf(folder.temporary());
    throwOnError(entries.status(), kFailure);
    const JournalRun run{.plan = plan_->digest(),
                         .transport = options_.traits().processes ? "processes" : "threads",
                         .rank = ranks_.empty() ? 0 : ranks_[0],
                         .options = {{"max-shard-size", std::to_string(options_.shardBytes)},
                                     {"copied files", valueOrThrow(digestOf(modelFiles_))},
                                     {"objects", carried_.digest()},
                                     {"renamed tensors", options_.renames.text()}},
                         .files = journalFiles(source),
                         .written = std::move(*entries)};
    Result<std::unique_ptr<CopyJournal>> journal =
        create ? CopyJournal::create(path, folder.temporary(), run) : CopyJournal::open(path, folder.temporary(), run);
    throwOnError(journal.status(), create ? kFailure : kUsage);
    journal_ = std::move(*journal);
  }

  /// Waits until the written files are on their device, so that no error of the device can follow.
  void syncFiles(const NewFolder &folder) {
    const double begin = now();
    if (journal_)
      throwOnError(journal_->finish(), kFailure);
    bool shared = true; // the first process can sync all files
    for (uint32_t e = 1; e < plan_->manifest().endpoints()->size(); ++e)
      shared = shared && plan_->manifest().endpoints()->Get(e)->storage();
    if (first() || !shared)
      throwOnError(syncFolder(folder.temporary()), kFailure);
    trace_.add("write to the device", begin);
  }

  /// Makes the finished folder visible.
  void commit(NewFolder &folder) const {
    throwOnError(folder.commit());
    if (first() && !options_.noSync)
      throwOnError(syncFile(fs::absolute(folder.path()).parent_path())
                       .withPrefix("'" + folder.path() + "' is complete, but a loss of power may undo its name: "),
                   kFailure);
  }

  /// Waits until all processes have written their output, since the launcher kills all when the first one exits with an
  /// error. A process that is killed while it writes fails no other process.
  void waitForOutput() {
    try {
      allReduceMin(0);
    } catch (const PeerFailure &) {
      throw;
    } catch (const Failure &) {
      reachable_ = false;
    }
  }

  void allocate(Memory &source, Memory &target) {
    const bool shared = !ranks_.empty() && !options_.privateMemory;
    throwOnError(source.allocate(0, shared), kFailure);
    for (uint32_t e = 1; e < plan_->manifest().endpoints()->size(); ++e)
      throwOnError(target.allocate(e, shared), kFailure);
  }

  /// Binds the memory, or its copy on the device, and prepares the run.
  void prepare(const Memory &source, const Memory &target) {
    const double begin = now();
    if (options_.device == "cuda") {
      openDevice();
      throwOnError(sourceOnDevice_.emplace().mirror(*plan_, source, *device_), kFailure);
      throwOnError(targetOnDevice_.emplace().mirror(*plan_, target, *device_), kFailure);
    }
    bind(sourceOnDevice_ ? sourceOnDevice_->rankMemories() : source.rankMemories());
    bind(targetOnDevice_ ? targetOnDevice_->rankMemories() : target.rankMemories());
    const auto digest = static_cast<int64_t>(std::stoull(plan_->digest().substr(0, 15), nullptr, 16));
    const bool samePlan = allReduceMin(digest) == -allReduceMin(-digest);
    reachable_ = false; // during prepare and run the other processes wait in those calls, not in allReduceMin()
    if (const reshard_status status = reshard_prepare(executor_.get()); status != RESHARD_OK)
      throw Failure{samePlan && (status == RESHARD_TIMEOUT || status == RESHARD_FAILED) ? kFailure : kUsage,
                    reshard_error(executor_.get())};
    reachable_ = true;
    trace_.add("prepare", begin);
  }

  /// Runs the plan --repeat times. With --check, synthesized values are moved twice, under two seeds: memory that a run
  /// does not write cannot be correct both times.
  void runAll(const Memory &source, const Memory &target, const ResidentMemoryLimit &limit) {
    const int seeds = options_.synthesize && options_.check ? 2 : 1;
    std::optional<RunProgress> progress;
    const bool watched = !options_.synthesize && options_.device == "cpu";
    if (watched) {
      watchRun(target, progress, limit);
      copyFiles(source, target);
    }
    for (int s = 0; s < seeds; ++s) {
      if (options_.synthesize)
        fill(source, options_.seed + static_cast<uint64_t>(s), s == 0);
      if (sourceOnDevice_)
        throwOnError(sourceOnDevice_->toDevice(), kFailure);
      for (uint64_t n = 0; n < (s == 0 ? options_.repeat : 1); ++n)
        runOnce(watched);
      if (targetOnDevice_)
        throwOnError(targetOnDevice_->toHost(), kFailure);
      if (options_.synthesize && options_.check)
        checkSynthesized(target, options_.seed + static_cast<uint64_t>(s));
    }
  }

  /// Shows the progress of the copies, adds them to the journal and limits the memory. `progress` lives as long as the
  /// runs.
  void watchRun(const Memory &target, std::optional<RunProgress> &progress, const ResidentMemoryLimit &limit) {
    CopyWatch watch;
    watch.copied = [&limit] { limit.check(); };
    if (journal_)
      watch.done = journal_->found().done;
    if (first() && ::isatty(STDERR_FILENO))
      progress.emplace(*plan_, target);
    watch.at = [this, &progress](const CopyProgress &copies) {
      if (progress)
        progress->at(copies);
      if (journal_)
        journal_->add({copies.done, copies.bytesDone});
    };
    throwOnError(watchCopies(*executor_, std::move(watch)).status(), kUsage);
  }

  /// Lets copies write the files without their mappings. Targets come first: not all files may be open at a time.
  void copyFiles(const Memory &source, const Memory &target) {
    std::vector<const MappedFile *> files = target.files();
    const std::vector<const MappedFile *> sources = source.files();
    files.insert(files.end(), sources.begin(), sources.end());
    throwOnError(copyThroughFiles(*executor_, files, !options_.noSync), kUsage);
  }

  /// Compares the written files with the source's. Each process checks its own targets, and its part of the files that
  /// all processes write.
  void checkFiles(const Memory &source, const Memory &target, const ResidentMemoryLimit &limit) {
    const double begin = now();
    inTime("the check", [&] {
      ProgressLine progress("check");
      const CompareProcess among = ranks_.empty() ? CompareProcess() : CompareProcess{ranks_[0], plan_->world()};
      CompareWatch watch{[&](double fraction) { progress.at(fraction); }, [&] { limit.check(); }};
      if (options_.memory > 0)
        watch.copies = std::min(watch.copies, options_.memory / 4);
      result_ = compare(*plan_, source.rankMemories(), target.rankMemories(), threads_, watch, among);
    });
    trace_.add("check", begin);
  }

  /// Whether this process reports for all processes.
  bool first() const { return ranks_.empty() || ranks_[0] == 0; }

  /// All-reduce min over all processes. Each value must be greater than kFailed + 2^34. Throws PeerFailure if a process
  /// has failed.
  int64_t allReduceMin(int64_t mine) {
    if (!options_.traits().processes || !reachable_)
      return mine;
    int64_t least = 0;
    if (reshard_all_reduce_min(executor_.get(), mine, &least) != RESHARD_OK) {
      reachable_ = false;
      throw Failure{kFailure, reshard_error(executor_.get())};
    }
    if (const uint64_t codeAndRank = static_cast<uint64_t>(least) - static_cast<uint64_t>(kFailed);
        codeAndRank >> 32 <= kFailure)
      throw PeerFailure{{static_cast<int>(codeAndRank >> 32),
                         "rank " + std::to_string(codeAndRank & UINT32_MAX) + " failed; see the output of that rank"}};
    return least;
  }

  /// Opens the source's files and creates a folder for the targets. The first process creates the folder and the files
  /// that several processes write.
  std::unique_ptr<NewFolder> openFolders(Memory &source, Memory &target) {
    std::unique_ptr<NewFolder> folder;
    const int64_t number = allReduceMin(first() ? NewFolder::ownNumber() : INT64_MAX);
    const auto &endpoints = *plan_->manifest().endpoints();
    const auto host = static_cast<int64_t>(hostId() >> 2);
    const bool oneHost = allReduceMin(host) == -allReduceMin(-host);
    for (uint32_t e = 1; e < endpoints.size(); ++e)
      if (endpoints.Get(e)->storage() && !oneHost) // hosts do not share the pages of mapped files
        throw Failure{kUsage, "the files of " + endpoints.Get(e)->role()->str() +
                                  " are written by processes on several hosts, expected all processes on one host"};
    auto path = [&](uint32_t e) {
      return folder->temporary() + (endpoints.size() > 2 ? "/" + endpoints.Get(e)->role()->str() : "");
    };
    throwOnError(source.openFiles(0, source_, false, options_.allow.empty() ? nullptr : &omitted_), kUsage);
    if (first())
      printNotes(source.notes());
    throwOnError(checkOutside(target_, source_), kUsage);
    if (!options_.copy.empty() && first())
      modelFiles_ = valueOrThrow(findModelFiles(options_.copy));
    ObjectRules rules = options_.objects;
    rules.allowExtra = !options_.allow.empty();
    storedReplicas_ = !source.storedReplicas().empty();
    throwOnError(carried_.choose(*plan_, source_, source.objects(), rules, left_), kUsage);
    verifySource();
    folder = valueOrThrow(NewFolder::open(target_, number, first(), options_.resume));
    for (uint32_t e = 1; e < endpoints.size() && first() && !folder->resumed(); ++e) {
      fs::create_directory(path(e));
      if (endpoints.Get(e)->storage())
        throwOnError(target.createFiles(e, path(e), options_.shardBytes, carried_.objects()), kFailure);
      if (endpoints.Get(e)->checkpoint())
        throwOnError(copyModelFiles(modelFiles_, path(e)));
    }
    if (allReduceMin(options_.resume) != -allReduceMin(-int64_t{options_.resume}))
      throw Failure{kUsage, "--resume is given to some processes only, expected all or none"};
    resumed_ = allReduceMin(!folder->resumed()) == 0; // the shared files exist
    if (resumed_)
      openJournal(*folder, source, false);
    for (uint32_t e = 1; e < endpoints.size(); ++e)
      if (resumed_ || (endpoints.Get(e)->storage() && !first()))
        throwOnError(target.openFiles(e, path(e), true), kFailure);
      else if (!endpoints.Get(e)->storage())
        throwOnError(target.createFiles(e, path(e), options_.shardBytes), kFailure);
    return folder;
  }

  /// The first process compares the files of a checkpoint with the hashes that it states.
  void verifySource() {
    const schema::Endpoint &source = *plan_->manifest().endpoints()->Get(0);
    if (!first() || !source.checkpoint() || !fs::is_directory(source_))
      return;
    const double begin = now();
    inTime("the comparison with integrity.json", [&] {
      ProgressLine progress("compare with integrity.json");
      verified_ =
          valueOrThrow(verifyIntegrity(source_, threads_, [&](double fraction) { progress.at(fraction); }), kUsage);
    });
    if (verified_ > 0)
      trace_.add("compare with integrity.json", begin);
  }

  /// --synthesize --source=DIR: writes the files that a run without --synthesize reads.
  void writeSource() {
    if (options_.traits().processes)
      throw Failure{kUsage, "--synthesize --source=DIR writes files from one process, expected --transport=" +
                                std::string(transports().front().name)};
    const std::unique_ptr<NewFolder> folder =
        valueOrThrow(NewFolder::open(options_.source, NewFolder::ownNumber(), true));
    Memory memory(*plan_);
    throwOnError(memory.createFiles(0, folder->temporary(), options_.shardBytes), kFailure);
    const ResidentMemoryLimit limit({&memory}, options_.memory);
    synthesizeAll(memory, options_.seed, "writing the source's files", "write");
    throwOnError(folder->commit());
    std::printf("  wrote %zu file(s) to %s\n", memory.rankMemories().size(), options_.source.c_str());
  }

  /// Whether all source replicas are equal; prints the names of those that differ.
  bool replicasAgree(const Memory &source, const ResidentMemoryLimit &limit) {
    if (options_.synthesize)
      fill(source, options_.seed, true);
    const double begin = now();
    ReplicaResult result;
    inTime("the comparison of replicas", [&] {
      ProgressLine progress("compare replicas");
      const auto at = [&](double fraction) { progress.at(fraction); };
      result = compareReplicas(*plan_, source.rankMemories(), threads_, {at, [&] { limit.check(); }});
      const StoredReplicaResult files =
          valueOrThrow(compareStoredReplicas(source_, source.storedReplicas(), threads_, at), kUsage);
      result.comparedBytes += files.comparedBytes;
      result.differences.insert(result.differences.end(), files.differences.begin(), files.differences.end());
    });
    trace_.add("compare replicas", begin);
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
      std::printf("  %-10s %12s compared, all equal\n", "replicas",
                  humanBytes(static_cast<double>(result.comparedBytes)).c_str());
    return result.differences.empty();
  }

  /// With a deadline, other threads must not end the process: the main thread names the missing ranks first.
  ExitPolicy whileJoining() const { return options_.timeout > 0 ? ExitPolicy::wait : ExitPolicy::fail; }

  void open() {
    const reshard_options options = openOptions(options_, threads_);
    reshard_executor *executor = nullptr;
    if (options_.traits().processes)
      guardExits(whileJoining());
    const reshard_status status = reshard_open(options_.plan.c_str(), options_.rank ? &*options_.rank : nullptr,
                                               options_.rank ? 1 : 0, &options, &executor);
    executor_.reset(executor);
    if (status != RESHARD_OK)
      throw Failure{status == RESHARD_FAILED || status == RESHARD_TIMEOUT ? kFailure : kUsage, reshard_error(executor)};
    guardExits(ExitPolicy::pass);
    if (options_.traits().processes) {
      size_t count = 0;
      const uint32_t *ranks = reshard_ranks(executor, &count);
      ranks_.assign(ranks, ranks + count);
      reachable_ = true;
    }
    if (!plan_) // this process could not open the plan; reportFailure() reports that failure
      return;
    for (const std::string &name :
         namesOf(*plan_, &schema::Param::refresh)) // no engine exists here, so hooks do nothing
      throwOnStatus(
          reshard_set_hook(executor, name.c_str(), [](void *, const char *, uint32_t) { return 0; }, nullptr));
    const auto send = [](void *execution, const reshard_transformed *param) {
      return static_cast<Execution *>(execution)->convert(*param, true);
    };
    const auto finalize = [](void *execution, const reshard_transformed *param) {
      return static_cast<Execution *>(execution)->convert(*param, false);
    };
    reshard_transform copies = RESHARD_TRANSFORM_INITIALIZER;
    copies.prepare_send = send;
    copies.finalize = finalize;
    copies.user = this;
    for (const std::string &name : namesOf(*plan_, &schema::Param::transform))
      throwOnStatus(reshard_set_transform(executor, name.c_str(), &copies));
  }

  /// For calls that only store their arguments, so a failure is wrong usage.
  void throwOnStatus(reshard_status status) const {
    if (status != RESHARD_OK)
      throw Failure{status == RESHARD_FAILED ? kFailure : kUsage, reshard_error(executor_.get())};
  }

  /// Replaces a caller's transform: copies from synthesized memory when sending, or into memory that is checked.
  int convert(const reshard_transformed &param, bool send) const {
    const auto at = storages_.find({param.endpoint, param.rank, param.name});
    if (at == storages_.end())
      return 1;
    if (param.bytes > 0)
      std::memcpy(send ? param.memory : at->second, send ? at->second : param.memory, param.bytes);
    return 0;
  }

  /// Opens the device of this process's rank, chosen as reshard_open does.
  void openDevice() {
    Launch launch;
    if (options_.traits().processes)
      launch = findLaunch();
    Result<std::unique_ptr<Device>> device =
        reshard::openDevice(options_.device, launch.localRank ? static_cast<int>(*launch.localRank) : -1);
    throwOnError(device.status(), kFailure);
    device_ = std::move(*device);
  }

  void bind(const std::vector<MeshRankMemory> &rankMemories) {
    for (const MeshRankMemory &rankMemory : rankMemories) {
      const schema::Endpoint &endpoint = *plan_->manifest().endpoints()->Get(rankMemory.endpoint);
      for (uint32_t p = 0; p < rankMemory.params.size(); ++p)
        for (const schema::ParamInstance &instance :
             schema::instances(plan_->manifest(), endpoint, p, rankMemory.meshRank))
          if (schema::transformed(*endpoint.params()->Get(p)))
            storages_[{rankMemory.endpoint, endpoint.ranks()->Get(rankMemory.meshRank), instance.name}] =
                rankMemory.params[p][instance.instance];
          else if (std::byte *pointer = rankMemory.params[p][instance.instance]; pointer)
            throwOnStatus(reshard_bind(executor_.get(), rankMemory.endpoint, endpoint.ranks()->Get(rankMemory.meshRank),
                                       instance.name.c_str(), pointer, static_cast<uint64_t>(instance.bytes)));
    }
  }

  /// Does work of this process within its deadline.
  template <class Work> void inTime(const char *what, const Work &work) const {
    throwOnError(WorkDeadline::run(what, options_.timeout, [&] {
      work();
      return Status();
    }));
  }

  void synthesizeAll(const Memory &memory, uint64_t seed, const char *what, const char *activity) const {
    inTime(what, [&] {
      ProgressLine progress(activity);
      for (size_t i = 0; i < memory.rankMemories().size(); ++i) {
        synthesize(*plan_, memory.rankMemories()[i], seed, threads_);
        progress.at(static_cast<double>(i + 1) / static_cast<double>(memory.rankMemories().size()));
      }
    });
  }

  /// Fills the source. Targets are not cleared: under the second seed they hold the values of the first, which the run
  /// must overwrite.
  void fill(const Memory &source, uint64_t seed, bool first) {
    const double begin = now();
    synthesizeAll(source, seed, "the synthesis", "synthesize");
    trace_.add(first ? "synthesize" : "synthesize again", begin);
  }

  void runOnce(bool watched) {
    const double begin = now();
    reshard_status status = RESHARD_OK;
    {
      std::optional<ElapsedLine> elapsed;
      if (!watched) // else the progress of the copies is shown
        elapsed.emplace("run");
      status = reshard_run(executor_.get(), options_.timeout, nullptr);
    }
    runs_.push_back({now() - begin});
    trace_.add("run " + std::to_string(runs_.size()), begin);
    if (status != RESHARD_OK)
      throw Failure{kFailure, reshard_error(executor_.get())};
  }

  void checkSynthesized(const Memory &target, uint64_t seed) {
    const double begin = now();
    inTime("the check", [&] {
      ProgressLine progress("check");
      Reference reference(*plan_, seed);
      for (size_t i = 0; i < target.rankMemories().size(); ++i) {
        result_.add(check(*plan_, target.rankMemories()[i], reference, threads_));
        progress.at(static_cast<double>(i + 1) / static_cast<double>(target.rankMemories().size()));
      }
    });
    trace_.add("check", begin);
  }

  /// The sum of a number over all processes.
  int64_t sum(uint64_t mine) {
    int64_t all = ranks_.empty() ? static_cast<int64_t>(mine) : 0;
    for (uint32_t rank = 0; rank < plan_->world() && !ranks_.empty(); ++rank) // each rank contributes in turn
      all += allReduceMin(rank == ranks_[0] ? static_cast<int64_t>(mine) : INT64_MAX);
    return all;
  }

  /// The bytes received by each method, summed over all processes.
  Json bytesBy() {
    constexpr std::pair<const char *, reshard_method> kMethods[] = {
        {"local", RESHARD_LOCAL},
        {"shared_memory", RESHARD_SHARED_MEMORY},
        {"messages", RESHARD_MESSAGES},
        {"messages_inside_host", RESHARD_MESSAGES_INSIDE_HOST}};
    Json json;
    for (const auto &[name, method] : kMethods)
      json[name] = sum(reshard_bytes_by(executor_.get(), method));
    return json;
  }

  void report() {
    if (!ranks_.empty()) // each process prints its own result
      printCheck("rank " + std::to_string(ranks_[0]) + ": ");
    if (const uint64_t bytesAsMessages = reshard_bytes_by(executor_.get(), RESHARD_MESSAGES_INSIDE_HOST);
        bytesAsMessages > 0)
      std::printf("  rank %u: %s from ranks on this host arrived as messages, because their memory cannot be mapped\n",
                  ranks_[0], humanBytes(static_cast<double>(bytesAsMessages)).c_str());
    if (first() || !plan_->manifest().endpoints()->Get(0)->storage()) // all processes open a checkpoint: one prints
      for (const auto &[names, what] : {std::pair(&omitted_, "tensor"), std::pair(&left_, "object")})
        if (!names->empty())
          std::printf("  %-10s %s of the source: %s\n", "left out", counted(names->size(), what).c_str(),
                      printable(patternsOf(*names)).c_str());
    if (first() && !carried_.objects().empty())
      std::printf("  %-10s %12zu copied unchanged\n", "objects", carried_.objects().size());
    const bool wanted = allReduceMin(options_.report.empty()) == 0; // by some process
    const Json by = wanted ? bytesBy() : Json();
    const auto resumed = static_cast<uint64_t>(options_.resume ? sum(journal_->found().bytes) : 0);
    const int64_t checkedBytes = wanted ? sum(result_.checkedBytes) : 0,
                  mismatches = wanted ? sum(result_.mismatches) : 0;
    if (!ranks_.empty() && ranks_[0] != 0)
      return; // the first process prints for all
    const uint64_t bytes =
        (ranks_.empty() ? reshard_bytes(executor_.get()) : plan_->manifest().bytes_target()) - resumed;
    Json runs = Json::array();
    double fastest = 0;
    for (const RunTime &run : runs_) {
      const double rate = run.seconds > 0 ? static_cast<double>(bytes) / run.seconds / 1e9 : 0;
      runs.push_back({{"seconds", run.seconds}, {"bytes", bytes}, {"gb_per_s", rate}});
      fastest = std::max(fastest, rate);
    }
    const Json json = {{"digest", plan_->digest()},
                       {"transport", options_.transport},
                       {"device", options_.device},
                       {"ranks", plan_->world()},
                       {"threads", threads_},
                       {"runs", runs},
                       {"bytes_by", by},
                       {"checked_bytes", checkedBytes},
                       {"mismatches", mismatches},
                       {"refresh", namesOf(*plan_, &schema::Param::refresh)},
                       {"transform", namesOf(*plan_, &schema::Param::transform)},
                       {"resumed_bytes", resumed},
                       {"omitted", omitted_},
                       {"omitted_objects", left_},
                       {"objects", objectNames(carried_.objects())},
                       {"copied", modelFiles_.names},
                       {"peak_rss_bytes", peakRssBytes()}};
    if (!options_.report.empty())
      throwOnError(writeFile(options_.report, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"),
                   kFailure);
    if (!options_.trace.empty())
      throwOnError(writeFile(options_.trace, trace_.text()), kFailure);
    if (options_.resume)
      std::printf("  %-10s %12s%s\n", "resumed", humanBytes(static_cast<double>(resumed)).c_str(),
                  resumed_ ? " were written by an earlier run" : ": there was no unfinished target");
    printTotals(bytes, fastest);
    if (ranks_.empty())
      printCheck("all ");
  }

  /// `bytes`: those of one run. `fastest`: the rate of the fastest run in GB/s.
  void printTotals(uint64_t bytes, double fastest) const {
    const schema::Manifest &manifest = plan_->manifest();
    std::printf("  %-10s %12s in %u ranks\n", "moved", humanBytes(static_cast<double>(bytes)).c_str(), plan_->world());
    if (const uint32_t replicas = manifest.endpoints()->Get(1)->replicas(); replicas > 0)
      std::printf("  %-10s replica 0 of %u engine replicas: a run does not pull\n", "target", replicas);
    std::printf("  %-10s %12s\n", "local", humanBytes(static_cast<double>(manifest.bytes_local())).c_str());
    std::printf("  %-10s %12s in %llu messages\n", "remote",
                humanBytes(static_cast<double>(manifest.bytes_remote())).c_str(),
                static_cast<unsigned long long>(manifest.messages()));
    if (manifest.bytes_storage() > 0)
      std::printf("  %-10s %12s\n", "storage", humanBytes(static_cast<double>(manifest.bytes_storage())).c_str());
    if (!options_.synthesize && !options_.checkReplicas && (storedReplicas_ || heldTwice(manifest)))
      std::printf("  %-10s of the source were not compared: --check-replicas compares them\n", "replicas");
    if (verified_ > 0)
      std::printf("  %-10s %12zu file(s) have the hashes in integrity.json\n", "verified", verified_);
    if (!options_.copy.empty())
      std::printf("  %-10s %12zu file(s) of --copy, except %zu others: weights, folders, hidden files\n", "copied",
                  modelFiles_.names.size(), modelFiles_.skipped);
    const auto best = std::min_element(runs_.begin(), runs_.end(),
                                       [](const RunTime &a, const RunTime &b) { return a.seconds < b.seconds; });
    std::printf("  %-10s %10.4f s, %.2f GB/s%s\n", "time", best->seconds, fastest,
                runs_.size() > 1 ? " (fastest run)" : "");
  }

  void printCheck(const std::string &whose) const {
    if (options_.check && !result_.ambiguity.empty())
      std::printf("  %scannot be checked: %s\n", ranks_.empty() ? "" : whose.c_str(),
                  printable(result_.ambiguity).c_str());
    else if (options_.check && result_.mismatches == 0)
      std::printf("  %s%llu bytes right\n", whose.c_str(), static_cast<unsigned long long>(result_.checkedBytes));
    else if (options_.check)
      std::printf("  %s%llu elements WRONG; %s\n", ranks_.empty() ? "" : whose.c_str(),
                  static_cast<unsigned long long>(result_.mismatches), printable(result_.first).c_str());
  }

  struct Close {
    void operator()(reshard_executor *executor) const { reshard_close(executor); }
  };

  static constexpr int64_t kFailed =
      INT64_MIN; // a failed process contributes this, plus its exit code and rank, to allReduceMin()

  const ExecutionOptions &options_;
  const unsigned threads_;
  bool reachable_ = false; // the other processes will call allReduceMin() next
  std::unique_ptr<Plan> plan_;
  std::string source_, target_; // folders
  std::vector<uint32_t> ranks_; // this process's; empty: all
  std::map<std::tuple<uint32_t, uint32_t, std::string>, std::byte *>
      storages_;                   // memory of params with a transform, by endpoint, rank and name
  std::unique_ptr<Device> device_; // holds the params
  std::optional<DeviceMemory> sourceOnDevice_, targetOnDevice_;
  std::unique_ptr<reshard_executor, Close> executor_;
  std::vector<RunTime> runs_;
  std::unique_ptr<CopyJournal> journal_; // with --resume
  bool storedReplicas_ = false;          // the source's files have parts of tensors twice
  size_t verified_ = 0;                  // files of the source that have their hashes
  bool resumed_ = false;                 // the target is the unfinished folder of an earlier run
  ModelFiles modelFiles_;                // set in the first process only
  std::set<std::string> omitted_; // tensors in the source's files that the plan does not use, of this process's ranks
                                  // or of the checkpoint
  std::set<std::string> left_;    // its objects that are left out
  CarriedObjects carried_;
  CheckResult result_;
  Trace trace_;
};

} // namespace

int execute(const ExecutionOptions &options) {
  watchSignals();
  return Execution(options).run();
}

} // namespace reshard::tools
