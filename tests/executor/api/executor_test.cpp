// SPDX-License-Identifier: Apache-2.0
// The C API's life cycle, on a compiled plan: the text of every error, torn targets and versions, no allocation in run.

#include "reshard/reshard.h"

#include "tests/executor/allocations.h"
#include "tests/verify/support.h"
#include "verify/check/check.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <new>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace reshard;
using namespace reshard::tools;
using namespace reshard::verify;
#ifdef COUNT_ALLOCATIONS
using reshard::tests::allocations, reshard::tests::counting;
#endif

namespace {

class ExecutorTest : public testing::Test {
public:
  void SetUp() override { compile({"model.let.hidden=64", "model.let.ffn=96", "model.index.layer=2"}); }
  void TearDown() override { reshard_close(executor_); }

  void compile(const std::vector<std::string> &overrides) {
    ASSERT_NO_FATAL_FAILURE(tests::compileFile(RESHARD_SOURCE_DIR "/examples/quickstart.yaml", path_, overrides));
    allocate();
  }
  void compileText(const std::string &yaml) {
    ASSERT_NO_FATAL_FAILURE(tests::compile(yaml, path_));
    allocate();
  }
  void allocate() {
    plan_ = tests::openPlan(path_);
    memory_ = std::make_unique<Memory>(*plan_);
    ASSERT_EQ(memory_->allocate(0).message(), "");
    ASSERT_EQ(memory_->allocate(1).message(), "");
  }

  void open(uint32_t threads = 2) {
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.threads = threads;
    ASSERT_EQ(reshard_open(path_.c_str(), nullptr, 0, &options, &executor_), RESHARD_OK) << reshard_error(executor_);
  }
  /// Binds everything but the source param `except`; or, if `alone` is given, only that source param.
  void bindAll(const std::string &except = {}, const std::string &alone = {}) {
    for (const MeshRankMemory &rankMemory : memory_->rankMemories())
      tests::bindAll(executor_, *plan_, rankMemory, [&](const std::string &name) {
        return alone.empty() ? rankMemory.endpoint > 0 || name != except : rankMemory.endpoint == 0 && name == alone;
      });
  }
  void openPrepared(uint32_t threads = 2) {
    open(threads);
    bindAll();
    ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
  }
  /// Runs with other values, all of which must arrive.
  void run(uint64_t seed) {
    fill(seed);
    ASSERT_EQ(reshard_run(executor_, 0, nullptr), RESHARD_OK) << error();
    EXPECT_EQ(mismatches(seed), 0u);
  }
  void closeExecutor() {
    reshard_close(executor_);
    executor_ = nullptr;
  }
  void fill(uint64_t seed) {
    for (const MeshRankMemory &rankMemory : memory_->rankMemories())
      if (rankMemory.endpoint == 0)
        synthesize(*plan_, rankMemory, seed, 1);
  }
  uint64_t mismatches(uint64_t seed) {
    uint64_t wrong = 0;
    for (const MeshRankMemory &rankMemory : memory_->rankMemories())
      if (rankMemory.endpoint > 0)
        wrong += check(*plan_, rankMemory, seed, 1).mismatches;
    return wrong;
  }
  std::string error() const { return reshard_error(executor_); }

  const tests::TemporaryFolder folder_;
  const std::string path_ = folder_ / "plan.rplan";
  std::unique_ptr<Plan> plan_;
  std::unique_ptr<Memory> memory_;
  reshard_executor *executor_ = nullptr;
};

} // namespace

TEST_F(ExecutorTest, MovesEveryByteWithAnyNumberOfThreads) {
  for (uint32_t threads : {1u, 2u, 5u}) {
    openPrepared(threads);
    for (uint64_t seed : {threads * 2ull, threads * 2ull + 1}) {
      fill(seed);
      EXPECT_GT(mismatches(seed), 0u);
      ASSERT_EQ(reshard_run(executor_, 0, nullptr), RESHARD_OK) << error();
      EXPECT_EQ(mismatches(seed), 0u);
    }
    EXPECT_EQ(reshard_version(executor_), 2u);
    EXPECT_EQ(reshard_target_state(executor_), RESHARD_COMPLETE);
    EXPECT_EQ(reshard_bytes(executor_), plan_->manifest().bytes_target());
    closeExecutor();
  }
}

TEST_F(ExecutorTest, CallsHooksOfRefreshedParamsAfterEachRun) {
  compileText("version: 1\n"
              "model:\n"
              "  dtype: bf16\n"
              "  tensors: {a: [8, 2], b: [4]}\n"
              "  layouts:\n"
              "    train: {params: same}\n"
              "    serve: {params: {a: {holds: a, shard: {0: tp}, refresh: absorb}, b: {holds: b, at: {tp: last}, "
              "refresh: scale}}}\n"
              "source: {layout: train, mesh: {}}\n"
              "target: {layout: serve, mesh: {tp: 2}}\n");
  open();
  bindAll();
  EXPECT_EQ(reshard_prepare(executor_), RESHARD_BAD_BINDING);
  EXPECT_EQ(error(), "rank 0 param 'a' needs the hook 'absorb' after each run, which is not set");
  struct Seen {
    ExecutorTest *test;
    uint64_t seed = 1;
    std::vector<std::string> calls;
    int answer = 0;
  } seen{this, 1, {}, 0};
  const reshard_hook hook = [](void *user, const char *name, uint32_t rank) {
    Seen &all = *static_cast<Seen *>(user);
    all.calls.push_back(std::string(name) + " " + std::to_string(rank));
    EXPECT_EQ(all.test->mismatches(all.seed), 0u) << "the hook was called before the last byte arrived";
    return all.answer;
  };
  EXPECT_EQ(reshard_set_hook(executor_, "absorb", nullptr, nullptr), RESHARD_INVALID);
  ASSERT_EQ(reshard_set_hook(executor_, "absorb", hook, &seen), RESHARD_OK);
  ASSERT_EQ(reshard_set_hook(executor_, "scale", hook, &seen), RESHARD_OK);
  ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
  EXPECT_EQ(reshard_set_hook(executor_, "late", hook, &seen), RESHARD_INVALID);
  for (seen.seed = 1; seen.seed < 3; ++seen.seed) {
    seen.calls.clear();
    fill(seen.seed);
    ASSERT_EQ(reshard_run(executor_, 0, nullptr), RESHARD_OK) << error();
    EXPECT_EQ(seen.calls, (std::vector<std::string>{"absorb 0", "absorb 1", "scale 1"}));
  }
  seen.answer = 1;
  seen.seed = 2;
  EXPECT_EQ(reshard_run(executor_, 0, nullptr), RESHARD_FAILED);
  EXPECT_EQ(error(), "the hook 'absorb' failed on rank 0");
  EXPECT_EQ(reshard_target_state(executor_), RESHARD_TORN);
  EXPECT_EQ(reshard_version(executor_), 2u);
}

TEST_F(ExecutorTest, HooksMustNotCallTheirExecutor) {
  compileText("version: 1\n"
              "model:\n"
              "  dtype: bf16\n"
              "  tensors: {a: [8, 2]}\n"
              "  layouts:\n"
              "    train: {params: same}\n"
              "    serve: {params: {a: {holds: a, refresh: absorb}}}\n"
              "source: {layout: train, mesh: {}}\n"
              "target: {layout: serve, mesh: {}}\n");
  open();
  bindAll();
  struct Seen {
    ExecutorTest *test;
    bool closes = false;
    std::vector<std::string> errors;
  } seen{this, false, {}};
  const reshard_hook hook = [](void *user, const char *, uint32_t) {
    Seen &all = *static_cast<Seen *>(user);
    reshard_executor *const executor = all.test->executor_;
    for (const reshard_status status :
         {reshard_run(executor, 0, nullptr), reshard_replace(executor, all.test->path_.c_str(), nullptr, 0, nullptr)}) {
      EXPECT_EQ(status, RESHARD_INVALID);
      all.errors.push_back(reshard_error(executor));
    }
    if (all.closes)
      reshard_close(executor);
    return 0;
  };
  ASSERT_EQ(reshard_set_hook(executor_, "absorb", hook, &seen), RESHARD_OK);
  ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
  fill(1);
  ASSERT_EQ(reshard_run(executor_, 0, nullptr), RESHARD_OK) << error();
  ASSERT_EQ(seen.errors.size(), 2u);
  for (const std::string &each : seen.errors)
    EXPECT_EQ(each, "another call of this executor is in progress: a hook must not call its executor, and only one "
                    "thread may at a time");
  EXPECT_EQ(reshard_target_state(executor_), RESHARD_COMPLETE);
  seen.closes = true;
  EXPECT_EQ(reshard_run(executor_, 0, nullptr), RESHARD_FAILED);
  EXPECT_EQ(error(), "a hook has called reshard_close during the call; the executor is still open: close it after the "
                     "call");
  EXPECT_EQ(reshard_target_state(executor_), RESHARD_TORN);
  seen.closes = false;
  EXPECT_EQ(reshard_run(executor_, 0, nullptr), RESHARD_OK) << error();
}

TEST_F(ExecutorTest, AnInterruptEndsARunAsItsDeadlineDoes) {
  compile({}); // 128 MiB
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.threads = 2;
  bool ends = true;
  options.interrupted = [](void *user) { return *static_cast<bool *>(user) ? 1 : 0; };
  options.interrupt_user = &ends;
  ASSERT_EQ(reshard_open(path_.c_str(), nullptr, 0, &options, &executor_), RESHARD_OK) << error();
  bindAll();
  ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
  fill(1);
  std::atomic<bool> stop = false;
  std::vector<std::thread> busy; // so that a run takes longer than the first pause
  for (unsigned i = 0; i < 8 * std::thread::hardware_concurrency(); ++i)
    busy.emplace_back([&] {
      while (!stop) {
      }
    });
  for (int attempt = 0; attempt < 1000 && reshard_run(executor_, 0, nullptr) == RESHARD_OK; ++attempt) {
  }
  stop = true;
  for (std::thread &each : busy)
    each.join();
  EXPECT_EQ(error(), "interrupted: timed out: not all copies were done");
  EXPECT_EQ(reshard_target_state(executor_), RESHARD_TORN);
  ends = false;
  run(1);
}

/// What is checked is what runs: the segments are copies.
TEST_F(ExecutorTest, APlanFileMayChangeWhileItIsOpen) {
  open();
  bindAll();
  std::ofstream(path_, std::ios::trunc) << std::string(100, 'x'); // as cp writes
  ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
  ASSERT_EQ(::truncate(path_.c_str(), 0), 0);
  run(1);
  EXPECT_EQ(reshard_opened_digest(executor_), plan_->digest());
  EXPECT_EQ(reshard_replace(executor_, path_.c_str(), nullptr, 0, nullptr), RESHARD_BAD_PLAN);
  EXPECT_EQ(error(), "'" + path_ + "': not a plan: the file is empty");
  run(2);
}

/// A forked process cannot use the executor of the other, whose threads and connections it does not have.
TEST_F(ExecutorTest, ForkedProcessesCannotUseIt) {
  openPrepared(3);
  run(1);
  const std::string text = "process " + std::to_string(::getpid()) + " opened the executor, and this is process ";
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(20); // ends a child that hangs
    int code = 0;
    auto expect = [&](int number, bool right) { code = code == 0 && !right ? number : code; };
    int64_t least = 0;
    uint64_t version = 0;
    size_t count = 1;
    const reshard_tensor_digest *digests = nullptr;
    reshard_transform transform = RESHARD_TRANSFORM_INITIALIZER;
    reshard_check check = RESHARD_CHECK_INITIALIZER;
    reshard_executor *const e = executor_;
    const std::function<reshard_status()> calls[] = {
        [&] { return reshard_run(e, 1, nullptr); },
        [&] { return reshard_run(e, 1, &check); },
        [&] { return reshard_replace(e, path_.c_str(), nullptr, 0, nullptr); },
        [&] { return reshard_bind(e, 0, 0, "a", nullptr, 0); },
        [&] { return reshard_set_hook(e, "a", [](void *, const char *, uint32_t) { return 0; }, nullptr); },
        [&] { return reshard_set_transform(e, "a", &transform); },
        [&] { return reshard_prepare(e); },
        [&] { return reshard_digest(e, 0, 0, 1, sizeof *digests, &digests, &count); },
        [&] { return reshard_enqueue(e, nullptr); },
        [&] { return reshard_all_reduce_min(e, 1, &least); },
        [&] { return reshard_publish(e, 1, 0); },
        [&] { return reshard_publish(e, 1, 1); },
        [&] { return reshard_release(e, 1); },
        [&] { return reshard_pull(e, 1, 1, nullptr, &version); },
        [&] { return reshard_pull(e, 1, 1, &check, &version); },
        [&] { return reshard_replicas(e, nullptr, sizeof(reshard_replica), 0, &count); }};
    int number = 1;
    for (const auto &call : calls)
      expect(number++, call() == RESHARD_INVALID && error().starts_with(text));
    expect(50, reshard_target_state(e) == RESHARD_EMPTY && reshard_version(e) == 0 && reshard_bytes(e) == 0 &&
                   reshard_pulls(e) == 0 && !reshard_stream(e) && reshard_bytes_by(e, RESHARD_LOCAL) == 0);
    count = 1;
    expect(51, !reshard_ranks(e, &count) && count == 0);
    count = 1;
    expect(55, std::string(reshard_opened_digest(e)).empty());
    expect(52, !reshard_undigested(e, &count) && count == 0);
    reshard_close(e); // has no effect
    expect(53, reshard_run(e, 1, nullptr) == RESHARD_INVALID);
    executor_ = nullptr;
    open(2); // an executor of its own
    bindAll();
    expect(54, reshard_prepare(executor_) == RESHARD_OK && reshard_run(executor_, 0, nullptr) == RESHARD_OK);
    reshard_close(executor_);
    ::_exit(code);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  run(2);
}

#ifdef COUNT_ALLOCATIONS
TEST_F(ExecutorTest, RunAllocatesNothing) {
  openPrepared();
  allocations = 0;
  counting = true;
  for (int i = 0; i < 1000; ++i)
    reshard_run(executor_, 60, nullptr);
  counting = false;
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(reshard_version(executor_), 1000u);
}
#endif

TEST_F(ExecutorTest, ATimeoutLeavesTheTargetsTornUntilALaterRun) {
  openPrepared();
  EXPECT_EQ(reshard_target_state(executor_), RESHARD_EMPTY);
  fill(1);
  EXPECT_EQ(reshard_run(executor_, 1e-9, nullptr), RESHARD_TIMEOUT);
  EXPECT_EQ(error(), "timed out: not all copies were done");
  EXPECT_EQ(reshard_target_state(executor_), RESHARD_TORN);
  EXPECT_EQ(reshard_version(executor_), 0u);
  EXPECT_EQ(reshard_run(executor_, 60, nullptr), RESHARD_OK);
  EXPECT_EQ(reshard_target_state(executor_), RESHARD_COMPLETE);
  EXPECT_EQ(mismatches(1), 0u);
}

TEST_F(ExecutorTest, RejectsWrongOptionsAndPlans) {
  const struct {
    const char *transport, *device, *error;
  } wrong[] = {{"smoke", nullptr, "unknown transport 'smoke', expected 'threads', 'mpi', 'ucx' or 'nccl'"},
               {nullptr, "tpu", "unknown device 'tpu', expected 'cpu' or 'cuda'"},
               {"mpi", "cuda", "transport 'mpi' does not run on device 'cuda', expected 'cpu'"},
               {"nccl", nullptr, "transport 'nccl' does not run on device 'cpu', expected 'cuda'"}};
  for (const auto &[transport, device, text] : wrong) {
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.transport = transport;
    options.device = device;
    EXPECT_EQ(reshard_open(path_.c_str(), nullptr, 0, &options, &executor_), RESHARD_INVALID);
    EXPECT_EQ(error(), text);
    reshard_close(executor_);
  }
  EXPECT_EQ(reshard_open("/nowhere.rplan", nullptr, 0, nullptr, &executor_), RESHARD_BAD_PLAN);
  EXPECT_NE(error().find("/nowhere.rplan"), std::string::npos);
  EXPECT_EQ(reshard_prepare(executor_), RESHARD_INVALID);
  EXPECT_EQ(error(), "the plan is not open");
  reshard_close(executor_);
  const uint32_t twice[] = {0, 0}, far[] = {99};
  EXPECT_EQ(reshard_open(path_.c_str(), twice, 0, nullptr, &executor_), RESHARD_INVALID);
  EXPECT_EQ(error(), "found an empty list of ranks, expected 1 or more; pass NULL for all ranks of the plan (or this "
                     "process's own with transport 'mpi', 'ucx' or 'nccl')");
  reshard_close(executor_);
  EXPECT_EQ(reshard_open(path_.c_str(), twice, 2, nullptr, &executor_), RESHARD_INVALID);
  EXPECT_EQ(error(), "rank 0 is given twice, expected distinct ranks");
  reshard_close(executor_);
  EXPECT_EQ(reshard_open(path_.c_str(), far, 1, nullptr, &executor_), RESHARD_INVALID);
  EXPECT_NE(error().find("no rank 99"), std::string::npos) << error();
  EXPECT_EQ(reshard_open(path_.c_str(), nullptr, 0, nullptr, nullptr), RESHARD_INVALID);
}

TEST_F(ExecutorTest, RejectsWrongBindings) {
  open();
  char memory[64 * 96 * 2];
  auto bind = [&](uint32_t endpoint, uint32_t rank, const char *name, void *at, uint64_t bytes) {
    return reshard_bind(executor_, endpoint, rank, name, at, bytes) == RESHARD_BAD_BINDING ? error()
                                                                                           : std::string("bound");
  };
  EXPECT_EQ(bind(5, 0, "x", memory, 1), "there is no endpoint 5, the plan has 2");
  EXPECT_EQ(bind(0, 8, "x", memory, 1), "source rank 8 is not in the plan");
  EXPECT_EQ(bind(0, 0, "layers.0.norn.weight", memory, 1),
            "source rank 0 has no param 'layers.0.norn.weight', did you mean 'layers.0.norm.weight'?");
  EXPECT_EQ(bind(0, 0, "layers.0.norm.weight", memory, 1),
            "source rank 0 param 'layers.0.norm.weight': found 1 bytes, expected 128");
  EXPECT_EQ(bind(0, 0, "layers.0.norm.weight", nullptr, 128),
            "source rank 0 param 'layers.0.norm.weight': the pointer is NULL");
  EXPECT_EQ(bind(0, 0, "layers.0.norm.weight", memory, 128), "bound");
  EXPECT_EQ(bind(0, 0, "layers.0.norm.weight", memory, 128),
            "source rank 0 param 'layers.0.norm.weight' is already bound");
  EXPECT_EQ(reshard_run(executor_, 0, nullptr), RESHARD_INVALID);
  EXPECT_EQ(error(), "run before prepare");
  EXPECT_EQ(reshard_prepare(executor_), RESHARD_BAD_BINDING);
  EXPECT_EQ(error(),
            "target rank 0 param 'layers.{layer}.up.weight': not all instances are bound: 2 of 2 are not, the first is "
            "'layers.0.up.weight'");
}

TEST_F(ExecutorTest, PreparesAgainAfterAMissingBinding) {
  open();
  bindAll("layers.0.up.weight");
  EXPECT_EQ(reshard_prepare(executor_), RESHARD_BAD_BINDING);
  EXPECT_EQ(error(),
            "source rank 0 param 'layers.{layer}.up.weight': not all instances are bound: 1 of 2 is not, the first is "
            "'layers.0.up.weight'");
  bindAll({}, "layers.0.up.weight");
  ASSERT_EQ(reshard_prepare(executor_), RESHARD_OK) << error();
  EXPECT_EQ(reshard_bytes(executor_),
            (8 * 64 + 2 * 64 * 96) * 2u * 2u); // the norm on each of 8 ranks, up and down once
  run(5);
}

TEST_F(ExecutorTest, RejectsOverlappingBindings) {
  open();
  char memory[256];
  ASSERT_EQ(reshard_bind(executor_, 0, 0, "layers.0.norm.weight", memory, 128), RESHARD_OK);
  ASSERT_EQ(reshard_bind(executor_, 1, 0, "layers.0.norm.weight", memory + 127, 128), RESHARD_OK);
  EXPECT_EQ(reshard_prepare(executor_), RESHARD_BAD_BINDING);
  EXPECT_EQ(
      error(),
      "source rank 0 param 'layers.0.norm.weight' and target rank 0 param 'layers.0.norm.weight' overlap in memory");
}

TEST_F(ExecutorTest, BindTakesAsLongForTheLastRankAsForTheFirst) {
  compileText("{version: 1, model: {dtype: u8, tensors: {a: [8]}}, source: {mesh: {dp: 30000}}, target: {mesh: {}}}");
  const uint32_t some[] = {0};
  ASSERT_EQ(reshard_open(path_.c_str(), some, 1, nullptr, &executor_), RESHARD_OK);
  auto seconds = [&](uint32_t rank) {
    EXPECT_EQ(reshard_bind(executor_, 0, rank, "a", nullptr, 9), RESHARD_BAD_BINDING);
    EXPECT_EQ(error(), "source rank " + std::to_string(rank) + " param 'a': found 9 bytes, expected 8");
    const std::clock_t begin = std::clock(); // processor time
    for (int n = 0; n < 20000; ++n)
      reshard_bind(executor_, 0, rank, "a", nullptr, 9);
    return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  };
  const double first = seconds(0), last = seconds(29999);
  EXPECT_LT(last, 3 * first + 0.01);
}

TEST_F(ExecutorTest, RejectsOverlapInAFileThatIsMappedTwice) {
  const int file = memfd_create("twice", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(file, 8192), 0);
  char *maps[2];
  for (char *&map : maps)
    ASSERT_NE(map = static_cast<char *>(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)), MAP_FAILED);
  struct Case {
    const char *name; // a source param
    size_t source, target;
    bool shared;
  };
  for (const Case &each : {Case{"layers.0.norm.weight", 0, 127, true},
                           {"layers.0.norm.weight", 4000, 4100, true},
                           {"layers.0.norm.weight", 0, 128, false}}) {
    open();
    ASSERT_EQ(reshard_bind(executor_, 0, 0, each.name, maps[0] + each.source, 128), RESHARD_OK);
    ASSERT_EQ(reshard_bind(executor_, 1, 0, each.name, maps[1] + each.target, 128), RESHARD_OK);
    EXPECT_EQ(reshard_prepare(executor_), RESHARD_BAD_BINDING);
    const std::string names = "source rank 0 param 'layers.0.norm.weight' and target rank 0 param "
                              "'layers.0.norm.weight' overlap in a file that is mapped more than once";
    EXPECT_EQ(error() == names, each.shared) << error();
    closeExecutor();
  }
  for (char *map : maps)
    munmap(map, 8192);
  close(file);
}

TEST_F(ExecutorTest, TransportThreadsNeedsAllRanks) {
  const uint32_t one[] = {1};
  ASSERT_EQ(reshard_open(path_.c_str(), one, 1, nullptr, &executor_), RESHARD_OK);
  bindAll();
  EXPECT_EQ(reshard_prepare(executor_), RESHARD_FAILED);
  EXPECT_NE(error().find("which is not in this process; transport 'threads' needs all ranks of the plan"),
            std::string::npos)
      << error();
  EXPECT_EQ(reshard_prepare(executor_), RESHARD_INVALID);
  EXPECT_EQ(error(), "an earlier prepare failed part way; open a new executor");
}
