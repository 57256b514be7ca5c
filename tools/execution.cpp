#include "tools/execution.h"

#include "executor/launch.h"
#include "executor/mappings.h"
#include "executor/reshard.h"
#include "tools/device_memory.h"
#include "tools/execution_options.h"
#include "tools/footprint.h"
#include "tools/guarded_exit.h"
#include "tools/memory.h"
#include "tools/model_files.h"
#include "tools/new_folder.h"
#include "tools/reference.h"
#include "tools/work_deadline.h"

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

namespace reshard::tools {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

/// Phases with their times, for --trace.
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

class Execution {
public:
  explicit Execution(const ExecutionOptions &options)
      : options_(options),
        threads_(options.threads ? options.threads : std::max(1u, std::thread::hardware_concurrency())) {}
  ~Execution() {
    if (options_.transport != "threads")
      guardExits(whileJoining()); // until the process ends: what waits for peers in MPI may be left behind
  }

  /// The exit code. What fails in one process fails in all of them, with the code of the cause, as far as they still
  /// hear of each other.
  int run() {
    int code = kFailure;
    try {
      code = steps();
      agree(0); // nobody ends before all have written what they write
      return code;
    } catch (const Agreed &all) {
      code = all.code;
      printError("reshard-exec", all.message);
    } catch (const Failure &own) {
      printError("reshard-exec", own.message);
      code = tell(own.code);
    } catch (const std::exception &exception) { // out of memory, mostly
      printError("reshard-exec", explain(exception));
      code = tell(kFailure);
    }
    try {
      agree(0);                 // the folder is gone: the launcher ends all processes after the first that fails
    } catch (const Failure &) { // others no longer answer
    }
    return code;
  }

private:
  /// What another process failed with.
  struct Agreed : Failure {};

  /// Makes a failure of this process known to the others: the code with which all of them end.
  int tell(int code) {
    try {
      if (!executor_ && options_.transport == "mpi")
        open(); // they are there already, or come
      agree(kFailed + (static_cast<int64_t>(code) << 32 | (ranks_.empty() ? 0 : ranks_[0])));
    } catch (const Agreed &all) { // always, where they answer
      return all.code;
    } catch (const Failure &) {
    }
    return code;
  }

  int steps() {
    throwOnError(Plan::open(options_.plan, plan_), kUsage);
    const uint32_t endpoints = plan_->manifest().endpoints()->size();
    checkOptions(options_, *plan_);
    source_ = sourceFolder(options_, *plan_);
    target_ = targetFolder(options_, *plan_);
    if (options_.transport == "threads") // all ranks are here, and so are both sides of each message
      throwOnError(checkMessages(*plan_), kUsage);
    if (options_.synthesize && !options_.source.empty()) {
      writeSource();
      return kDone;
    }
    double begin = now();
    open();
    Memory source(*plan_, ranks_), target(*plan_, ranks_);
    std::unique_ptr<NewFolder> folder;
    if (options_.synthesize) {
      throwOnError(source.allocate(0, !ranks_.empty()), kFailure);
      for (uint32_t e = 1; e < endpoints; ++e)
        throwOnError(target.allocate(e, !ranks_.empty()), kFailure);
    } else {
      folder = openFolders(source, target);
    }
    trace_.add("bind memory", begin);

    begin = now();
    std::optional<DeviceMemory> sourceOnDevice, targetOnDevice;
    if (options_.device == "cuda") {
      openDevice();
      throwOnError(sourceOnDevice.emplace().mirror(*plan_, source, *device_), kFailure);
      throwOnError(targetOnDevice.emplace().mirror(*plan_, target, *device_), kFailure);
    }
    bind(sourceOnDevice ? sourceOnDevice->rankMemories() : source.rankMemories());
    bind(targetOnDevice ? targetOnDevice->rankMemories() : target.rankMemories());
    const auto digest = static_cast<int64_t>(std::stoull(plan_->digest().substr(0, 15), nullptr, 16));
    const bool samePlan = agree(digest) == -agree(-digest);
    answering_ = false; // in prepare and in runs the others wait for messages of those
    if (const reshard_status status = reshard_prepare(executor_.get()); status != RESHARD_OK)
      throw Failure{samePlan && (status == RESHARD_TIMEOUT || status == RESHARD_FAILED) ? kFailure : kUsage,
                    reshard_error(executor_.get())};
    answering_ = true;
    trace_.add("prepare", begin);
    const FootprintLimit limit(options_.synthesize ? std::vector<const Memory *>()
                                                   : std::vector<const Memory *>{&source, &target},
                               options_.memory);
    std::optional<Memory> whole; // the source of all processes
    if (!ranks_.empty() && !options_.synthesize && (options_.check || options_.checkReplicas))
      throwOnError(whole.emplace(*plan_).openFiles(0, source_, false, options_.allow.empty() ? nullptr : &omitted_),
                   kUsage);
    if (options_.checkReplicas && agree(!first() || replicasAgree(whole ? *whole : source)) == 0)
      return kNegative;

    agree(0); // all come to the run
    answering_ = false;
    // Under --check synthesised values come twice, from two seeds: a target that a run does not write cannot be right
    // both times.
    const int seeds = options_.synthesize && options_.check ? 2 : 1;
    for (int s = 0; s < seeds; ++s) {
      if (options_.synthesize)
        fill(source, target, options_.seed + static_cast<uint64_t>(s), s == 0);
      if (sourceOnDevice)
        throwOnError(sourceOnDevice->toDevice(), kFailure);
      for (uint64_t n = 0; n < (s == 0 ? options_.repeat : 1); ++n)
        runOnce();
      if (targetOnDevice)
        throwOnError(targetOnDevice->toHost(), kFailure);
      if (options_.synthesize && options_.check)
        checkSynthesized(target, options_.seed + static_cast<uint64_t>(s));
    }
    answering_ = true;
    if (!options_.synthesize && options_.check) {
      begin = now();
      const WorkDeadline deadline("the check", options_.timeout);
      ProgressLine progress("check");
      // Of the targets this process's; the first one's the files that all write.
      for (uint32_t e = 1; e < endpoints; ++e)
        if (plan_->manifest().endpoints()->Get(e)->storage() && !first())
          target.leave(e);
      result_ =
          compare(*plan_, whole ? *whole : source, target, threads_, [&](double fraction) { progress.at(fraction); });
      trace_.add("check", begin);
    }
    throwOnError(source.changed(), kFailure);
    const bool right = agree(result_.mismatches == 0 && result_.ambiguity.empty()) != 0;
    if (folder && right)
      folder->commit();
    folder.reset();
    report();
    return right ? kDone : kNegative;
  }

  /// Whether this process speaks for all.
  bool first() const { return ranks_.empty() || ranks_[0] == 0; }

  /// The least of what all processes say, each more than kFailed + 2^34. Throws where one of them has failed.
  int64_t agree(int64_t mine) {
    if (options_.transport == "threads" || !answering_)
      return mine;
    int64_t least = 0;
    if (reshard_all_reduce_min(executor_.get(), mine, &least) != RESHARD_OK) {
      answering_ = false;
      throw Failure{kFailure, reshard_error(executor_.get())};
    }
    if (const uint64_t said = static_cast<uint64_t>(least) - static_cast<uint64_t>(kFailed); said >> 32 <= kFailure)
      throw Agreed{{static_cast<int>(said >> 32),
                    "rank " + std::to_string(said & UINT32_MAX) + " failed; its own output says why"}};
    return least;
  }

  /// The source's files, and a folder with the targets'. The first process makes the folder, and the files that several
  /// write.
  std::unique_ptr<NewFolder> openFolders(Memory &source, Memory &target) {
    std::unique_ptr<NewFolder> folder;
    const int64_t number = agree(first() ? NewFolder::ownNumber() : INT64_MAX);
    const auto &endpoints = *plan_->manifest().endpoints();
    const auto host = static_cast<int64_t>(hostId() >> 2);
    const bool oneHost = agree(host) == -agree(-host);
    for (uint32_t e = 1; e < endpoints.size(); ++e)
      if (endpoints.Get(e)->storage() && !oneHost) // pages of mapped files are not shared by hosts
        throw Failure{kUsage, "the files of " + endpoints.Get(e)->role()->str() +
                                  " are written by processes of several hosts, expected one host"};
    auto path = [&](uint32_t e) {
      return folder->temporary() + (endpoints.size() > 2 ? "/" + endpoints.Get(e)->role()->str() : "");
    };
    throwOnError(source.openFiles(0, source_, false, options_.allow.empty() ? nullptr : &omitted_), kUsage);
    throwOnError(insideOf(target_, source_), kUsage);
    if (!options_.copy.empty() && first())
      modelFiles_ = findModelFiles(options_.copy);
    folder = std::make_unique<NewFolder>(target_, number, first());
    for (uint32_t e = 1; e < endpoints.size() && first(); ++e) {
      fs::create_directory(path(e));
      if (endpoints.Get(e)->storage())
        throwOnError(target.createFiles(e, path(e), options_.shardBytes), kFailure);
      if (endpoints.Get(e)->checkpoint())
        copyModelFiles(modelFiles_, path(e));
    }
    agree(0); // the files of all are there
    for (uint32_t e = 1; e < endpoints.size(); ++e)
      if (!endpoints.Get(e)->storage())
        throwOnError(target.createFiles(e, path(e), options_.shardBytes), kFailure);
      else if (!first())
        throwOnError(target.openFiles(e, path(e), true), kFailure);
    return folder;
  }

  /// --synthesize --source=DIR: the files that a run from files would read.
  void writeSource() {
    if (options_.transport != "threads")
      throw Failure{kUsage, "--synthesize --source=DIR writes files from one process, expected transport 'threads'"};
    NewFolder folder(options_.source, NewFolder::ownNumber(), true);
    Memory memory(*plan_);
    throwOnError(memory.createFiles(0, folder.temporary(), options_.shardBytes), kFailure);
    const FootprintLimit limit({&memory}, options_.memory);
    const WorkDeadline deadline("writing the source's files", options_.timeout);
    ProgressLine progress("write");
    for (size_t i = 0; i < memory.rankMemories().size(); ++i) {
      synthesize(*plan_, memory.rankMemories()[i], options_.seed, threads_);
      progress.at(static_cast<double>(i + 1) / static_cast<double>(memory.rankMemories().size()));
    }
    folder.commit();
    std::printf("  wrote %zu file(s) to %s\n", memory.rankMemories().size(), options_.source.c_str());
  }

  /// Whether all source replicas are equal; those that are not are named.
  bool replicasAgree(const Memory &source) {
    if (options_.synthesize)
      fill(source, source, options_.seed, true);
    const double begin = now();
    const WorkDeadline deadline("the comparison of replicas", options_.timeout);
    ProgressLine progress("compare replicas");
    const ReplicaResult result =
        compareReplicas(*plan_, source, threads_, [&](double fraction) { progress.at(fraction); });
    trace_.add("compare replicas", begin);
    constexpr size_t kShown = 20;
    for (size_t i = 0; i < result.differences.size() && i < kShown; ++i)
      printError("reshard-exec", result.differences[i]);
    if (result.differences.size() > kShown)
      printError("reshard-exec", "and " + std::to_string(result.differences.size() - kShown) + " more");
    for (const std::string &name : result.skipped)
      std::printf(
          "  %-10s '%s' stands in several params of the source, one of them quantised: not compared with each other\n",
          "replicas", printable(name).c_str());
    if (result.comparedBytes == 0 && result.skipped.empty())
      std::printf("  %-10s nothing is held more than once\n", "replicas");
    else if (result.differences.empty() && result.comparedBytes > 0)
      std::printf("  %-10s %12s compared, all equal\n", "replicas",
                  humanBytes(static_cast<double>(result.comparedBytes)).c_str());
    return result.differences.empty();
  }

  /// With a deadline the main thread says who is missing.
  ExitPolicy whileJoining() const { return options_.timeout > 0 ? ExitPolicy::wait : ExitPolicy::fail; }

  void open() {
    reshard_options options{};
    options.transport = options_.transport.c_str();
    options.device = options_.device.c_str();
    options.threads = threads_;
    options.join_seconds = options_.timeout;
    options.no_local_shortcut = options_.noLocalShortcut;
    reshard_executor *executor = nullptr;
    if (options_.transport != "threads")
      guardExits(whileJoining());
    const reshard_status status = reshard_open(options_.plan.c_str(), nullptr, 0, &options, &executor);
    executor_.reset(executor);
    if (status != RESHARD_OK)
      throw Failure{status == RESHARD_FAILED || status == RESHARD_TIMEOUT ? kFailure : kUsage, reshard_error(executor)};
    guardExits(ExitPolicy::pass);
    if (options_.transport != "threads") {
      size_t count = 0;
      const uint32_t *ranks = reshard_ranks(executor, &count);
      ranks_.assign(ranks, ranks + count);
      answering_ = true;
    }
    if (!plan_) // it cannot be opened here, whatever the reason was
      return;
    for (const std::string &name :
         namesOf(*plan_, &schema::Param::refresh)) // there is no engine here that could do anything
      throwOnStatus(
          reshard_set_hook(executor, name.c_str(), [](void *, const char *, uint32_t) { return 0; }, nullptr));
    const auto send = [](void *execution, const reshard_transformed *param) {
      return static_cast<Execution *>(execution)->convert(*param, true);
    };
    const auto finalize = [](void *execution, const reshard_transformed *param) {
      return static_cast<Execution *>(execution)->convert(*param, false);
    };
    const reshard_transform copies{send, nullptr, finalize, this};
    for (const std::string &name : namesOf(*plan_, &schema::Param::transform))
      throwOnStatus(reshard_set_transform(executor, name.c_str(), &copies));
  }

  /// Of calls that do nothing else than to take what they are given.
  void throwOnStatus(reshard_status status) const {
    if (status != RESHARD_OK)
      throw Failure{status == RESHARD_FAILED ? kFailure : kUsage, reshard_error(executor_.get())};
  }

  /// In place of a caller's transform: a copy out of memory that is synthesised, or into memory that is checked.
  int convert(const reshard_transformed &param, bool send) const {
    const auto at = storages_.find({param.endpoint, param.rank, param.name});
    if (at == storages_.end())
      return 1;
    if (param.bytes > 0)
      std::memcpy(send ? param.memory : at->second, send ? at->second : param.memory, param.bytes);
    return 0;
  }

  /// The device that this process's rank runs on, as reshard_open chooses it.
  void openDevice() {
    Launch launch;
    if (options_.transport == "nccl")
      launch = findLaunch();
    throwOnError(
        reshard::openDevice(options_.device, launch.localRank ? static_cast<int>(*launch.localRank) : -1, device_),
        kFailure);
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

  void fill(const Memory &source, const Memory &target, uint64_t seed, bool first) {
    const double begin = now();
    const WorkDeadline deadline("the synthesis", options_.timeout);
    ProgressLine progress("synthesize");
    for (size_t i = 0; i < source.rankMemories().size(); ++i) {
      synthesize(*plan_, source.rankMemories()[i], seed, threads_);
      progress.at(static_cast<double>(i + 1) / static_cast<double>(source.rankMemories().size()));
    }
    (void)target; // under the second seed it still holds the values of the first, all of which must change
    trace_.add(first ? "synthesize" : "synthesize again", begin);
  }

  void runOnce() {
    const double begin = now();
    const reshard_status status = reshard_run(executor_.get(), options_.timeout);
    runs_.push_back({now() - begin});
    trace_.add("run " + std::to_string(runs_.size()), begin);
    if (status != RESHARD_OK)
      throw Failure{kFailure, reshard_error(executor_.get())};
  }

  void checkSynthesized(const Memory &target, uint64_t seed) {
    const double begin = now();
    const WorkDeadline deadline("the check", options_.timeout);
    ProgressLine progress("check");
    Reference reference(*plan_, seed);
    for (size_t i = 0; i < target.rankMemories().size(); ++i) {
      result_.add(check(*plan_, target.rankMemories()[i], reference, threads_));
      progress.at(static_cast<double>(i + 1) / static_cast<double>(target.rankMemories().size()));
    }
    trace_.add("check", begin);
  }

  /// The bytes moved by each method, summed over all processes.
  Json bytesBy() {
    constexpr std::pair<const char *, reshard_method> kMethods[] = {
        {"local", RESHARD_LOCAL},
        {"shared_memory", RESHARD_SHARED_MEMORY},
        {"messages", RESHARD_MESSAGES},
        {"messages_inside_host", RESHARD_MESSAGES_INSIDE_HOST}};
    Json json;
    for (const auto &[name, method] : kMethods) {
      const auto mine = static_cast<int64_t>(reshard_bytes_by(executor_.get(), method));
      int64_t sum = ranks_.empty() ? mine : 0;
      for (uint32_t rank = 0; rank < plan_->world() && !ranks_.empty(); ++rank) // each says its own in turn
        sum += agree(rank == ranks_[0] ? mine : INT64_MAX);
      json[name] = sum;
    }
    return json;
  }

  void report() {
    if (!ranks_.empty()) // of several processes each has its own
      printCheck("rank " + std::to_string(ranks_[0]) + ": ");
    if (const uint64_t fallen = reshard_bytes_by(executor_.get(), RESHARD_MESSAGES_INSIDE_HOST); fallen > 0)
      std::printf("  rank %u: %s from ranks of this host come as messages, since their memory cannot be reached\n",
                  ranks_[0], humanBytes(static_cast<double>(fallen)).c_str());
    if (!omitted_.empty() &&
        (first() || !plan_->manifest().endpoints()->Get(0)->storage())) // a checkpoint is opened by all
      std::printf("  %-10s '%s'%s of the source's files, which the plan does not know\n", "left out",
                  printable(*omitted_.begin()).c_str(),
                  omitted_.size() > 1 ? (" and " + std::to_string(omitted_.size() - 1) + " more").c_str() : "");
    const bool wanted = agree(options_.report.empty()) == 0; // by any process
    const Json by = wanted ? bytesBy() : Json();
    if (!ranks_.empty() && ranks_[0] != 0)
      return; // the first one speaks of all
    const schema::Manifest &manifest = plan_->manifest();
    const uint64_t bytes = ranks_.empty() ? reshard_bytes(executor_.get()) : manifest.bytes_target();
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
                       {"checked_bytes", result_.checkedBytes},
                       {"mismatches", result_.mismatches},
                       {"refresh", namesOf(*plan_, &schema::Param::refresh)},
                       {"transform", namesOf(*plan_, &schema::Param::transform)},
                       {"omitted", omitted_},
                       {"copied", modelFiles_.names},
                       {"peak_rss_bytes", peakRssBytes()}};
    if (!options_.report.empty())
      throwOnError(writeFile(options_.report, json.dump(2) + "\n"), kFailure);
    if (!options_.trace.empty())
      throwOnError(writeFile(options_.trace, trace_.text()), kFailure);
    std::printf("  %-10s %12s in %u ranks\n", "moved", humanBytes(static_cast<double>(bytes)).c_str(), plan_->world());
    std::printf("  %-10s %12s\n", "local", humanBytes(static_cast<double>(manifest.bytes_local())).c_str());
    std::printf("  %-10s %12s in %llu messages\n", "remote",
                humanBytes(static_cast<double>(manifest.bytes_remote())).c_str(),
                static_cast<unsigned long long>(manifest.messages()));
    if (manifest.bytes_storage() > 0)
      std::printf("  %-10s %12s\n", "storage", humanBytes(static_cast<double>(manifest.bytes_storage())).c_str());
    if (!options_.copy.empty())
      std::printf("  %-10s %12zu file(s) of '%s', not %zu more: weights, folders, hidden ones\n", "copied",
                  modelFiles_.names.size(), options_.copy.c_str(), modelFiles_.skipped);
    const auto best = std::min_element(runs_.begin(), runs_.end(),
                                       [](const RunTime &a, const RunTime &b) { return a.seconds < b.seconds; });
    std::printf("  %-10s %10.4f s, %.2f GB/s%s\n", "time", best->seconds, fastest,
                runs_.size() > 1 ? " (fastest run)" : "");
    if (ranks_.empty())
      printCheck("all ");
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
      INT64_MIN; // plus an exit code and a rank: what a process that failed says in place of anything else

  const ExecutionOptions &options_;
  const unsigned threads_;
  bool answering_ = false; // the other processes come to the next agree()
  std::unique_ptr<Plan> plan_;
  std::string source_, target_; // folders
  std::vector<uint32_t> ranks_; // of this process; none: all
  std::map<std::tuple<uint32_t, uint32_t, std::string>, std::byte *>
      storages_;                   // behind transforms, by endpoint, rank and name
  std::unique_ptr<Device> device_; // of the params
  std::unique_ptr<reshard_executor, Close> executor_;
  std::vector<RunTime> runs_;
  ModelFiles modelFiles_;         // of the first process
  std::set<std::string> omitted_; // tensors of the source's files that the plan does not know; those of this process's
                                  // ranks, or of the checkpoint
  CheckResult result_;
  Trace trace_;
};

} // namespace

int execute(const ExecutionOptions &options) {
  watchSignals();
  return Execution(options).run();
}

} // namespace reshard::tools
