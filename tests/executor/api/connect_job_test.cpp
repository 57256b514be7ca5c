// SPDX-License-Identifier: Apache-2.0
// The rendezvous of reshard_open: the caller's store, the options, and their errors.

#include "executor/api/connect_job.h"

#include "executor/rendezvous/address.h"
#include "tests/executor/callers_store.h"
#include "tests/lib/threads.h"
#include "tests/verify/support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

namespace reshard {
namespace {

using testing::HasSubstr;
using testing::StartsWith;
using tests::CallersStore;

class ConnectJobTest : public testing::Test {
public:
  void SetUp() override {
    for (const char *name : {"RESHARD_SECRET", "RANK", "WORLD_SIZE", "MASTER_ADDR", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
                             "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "RESHARD_PORT", "NCCL_COMM_ID"})
      unsetenv(name);
    ASSERT_NO_FATAL_FAILURE(tests::compile("version: 1\n"
                                           "model: {dtype: bf16, tensors: {w: {shape: [6], shard: {0: tp}}}}\n"
                                           "source: {mesh: {tp: 2}}\n"
                                           "target: {mesh: {}}\n",
                                           folder_ / "plan"));
  }
  static reshard_options with(const reshard_store &store) {
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.store = &store;
    return options;
  }
  /// The error text of an open.
  std::string open(const reshard_options &options, std::vector<uint32_t> ranks = {0}) {
    reshard_executor *executor = nullptr;
    reshard_open((folder_ / "plan").c_str(), ranks.empty() ? nullptr : ranks.data(), ranks.size(), &options, &executor);
    std::string error = reshard_error(executor);
    reshard_close(executor);
    return error;
  }
  /// The error text of the check before an open.
  std::string check(const reshard_options &options) {
    char text[1000] = "?";
    const reshard_status status = reshard_check_options(&options, text, sizeof text);
    EXPECT_EQ(status == RESHARD_OK, *text == '\0');
    return text;
  }

  tests::TemporaryFolder folder_;
  CallersStore callers_;
};

} // namespace

TEST_F(ConnectJobTest, ProcessesJoinOverTheCallersStore) {
  const reshard_store store = callers_.store();
  for (const char *secret : {static_cast<const char *>(nullptr), "a secret"}) {
    const auto helloOf = [](uint32_t rank) { // larger than the first buffer
      return std::string(10'000 + rank, static_cast<char>('a' + rank));
    };
    tests::onThreads(3, [&](uint32_t rank) {
      reshard_options options = with(store);
      options.secret = secret;
      const Result<JobConnection> connection = connectJob(options, "", {"plan", rank, 3}, deadlineIn(20));
      ASSERT_EQ(connection.status().message(), "");
      ASSERT_EQ(connection->rendezvous->join(helloOf(rank), deadlineIn(20)).message(), "");
      for (uint32_t other = 0; other < 3; ++other)
        EXPECT_EQ(*connection->rendezvous->hello(other, deadlineIn(20)), helloOf(other));
    });
  }
  callers_.fails = true;
  const reshard_options options = with(store);
  const Result<JobConnection> connection = connectJob(options, "", {"plan", 0, 3}, deadlineIn(20));
  ASSERT_TRUE(connection.ok());
  EXPECT_EQ(connection->rendezvous->join("", deadlineIn(20)).message(),
            "the caller's store could not set 'reshard/-/plan/0': its function returned 4");
}

TEST_F(ConnectJobTest, SecretsComeFromTheEnvironmentUnlessGiven) {
  const reshard_store store = callers_.store();
  reshard_options options = with(store);
  setenv("RESHARD_SECRET", "one", 1);
  const Result<JobConnection> one = connectJob(options, "", {"plan", 0, 1}, deadlineIn(20));
  ASSERT_TRUE(one.ok());
  ASSERT_TRUE(one->rendezvous->join("", deadlineIn(20)).ok());
  const std::string sealed = callers_.values["reshard/-/plan/hello/0"];
  options.secret = "two";
  const Result<JobConnection> two = connectJob(options, "", {"plan", 0, 1}, deadlineIn(20));
  ASSERT_TRUE(two.ok() && two->rendezvous->join("", deadlineIn(20)).ok());
  EXPECT_NE(callers_.values["reshard/-/plan/hello/0"], sealed);
  options.secret = ""; // perhaps of a variable that is not set: not "none"
  EXPECT_EQ(connectJob(options, "", {"plan", 0, 1}, deadlineIn(20)).status().message(),
            "secret: found \"\", expected 1 to 4096 bytes, or NULL for the one in RESHARD_SECRET");
  options.secret = nullptr;
  setenv("RESHARD_SECRET", "", 1);
  EXPECT_EQ(connectJob(options, "", {"plan", 0, 1}, deadlineIn(20)).status().message(),
            "RESHARD_SECRET: found \"\", expected 1 to 4096 bytes; unset it for no secret");
  unsetenv("RESHARD_SECRET");
  const Result<JobConnection> none = connectJob(options, "", {"plan", 0, 1}, deadlineIn(20));
  ASSERT_TRUE(none.ok() && none->rendezvous->join("", deadlineIn(20)).ok());
  EXPECT_EQ(callers_.values["reshard/-/plan/hello/0"].size() + kMacBytes, sealed.size());
}

/// Ranks with a GPU each meet at env:// unless the caller names a rendezvous.
TEST_F(ConnectJobTest, ARankOfNcclThatCannotOpenTellsTheOthers) {
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.transport = "nccl";
  options.device = "cuda";
  const uint32_t rank = 1;
  setenv("NCCL_COMM_ID", "127.0.0.1:1", 1); // NCCL itself finds rank 0, and there is no store
  EXPECT_EQ(reshard_fail_open(&rank, &options, "no checkpoint"), RESHARD_INVALID);
  unsetenv("NCCL_COMM_ID");
  EXPECT_EQ(reshard_fail_open(&rank, &options, "no checkpoint"), RESHARD_INVALID); // no launcher
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "2", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  const uint16_t port =
      nameOf(listenAt({"127.0.0.1", 0}, false, deadlineIn(20))->number()).port(); // no socket has it now
  setenv("RESHARD_PORT", std::to_string(port).c_str(), 1);
  std::thread fails([&] { EXPECT_EQ(reshard_fail_open(&rank, &options, "no checkpoint"), RESHARD_OK); });
  const Result<JobConnection> zero = connectJob(options, "env://", {"plan", 0, 2}, deadlineIn(20));
  EXPECT_EQ(zero.status().message(), "");
  if (zero.ok()) {
    EXPECT_THAT(zero->rendezvous->join("", deadlineIn(20)).message(), HasSubstr("rank 1: no checkpoint"));
  }
  fails.join();
}

/// An interrupt ends a wait without a deadline, and is asked on the thread of the call.
TEST_F(ConnectJobTest, InterruptsEndTheRendezvous) {
  const reshard_store store = callers_.store();
  struct Asked {
    int times = 0;
    std::thread::id thread = std::this_thread::get_id();
  } asked;
  Interrupt interrupt;
  interrupt.set(
      [](void *user) {
        auto &seen = *static_cast<Asked *>(user);
        EXPECT_EQ(seen.thread, std::this_thread::get_id());
        return ++seen.times == 3 ? 1 : 0;
      },
      &asked);
  interrupt.begin();
  reshard_options options = with(store);
  const Deadline deadline = deadlineIn(0, &interrupt);
  const Result<JobConnection> connection = connectJob(options, "", {"plan", 1, 2}, deadline);
  ASSERT_EQ(connection.status().message(), "");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(connection->rendezvous->join("", deadline).timedOut());
  EXPECT_EQ(asked.times, 3);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 3 * Interrupt::kPause - std::chrono::milliseconds(5));
}

/// A store whose calls take long, each of which succeeds, ends at the deadline.
TEST_F(ConnectJobTest, SlowStoresEndAtTheDeadline) {
  reshard_store store = callers_.store();
  store.set = [](void *user, const char *key, const void *value, size_t bytes) {
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    return CallersStore::set(user, key, value, bytes);
  };
  reshard_options options = with(store);
  const Deadline deadline = deadlineIn(0.1);
  const Result<JobConnection> connection = connectJob(options, "", {"plan", 0, 1}, deadline);
  ASSERT_EQ(connection.status().message(), "");
  const Status status = connection->rendezvous->join("", deadline);
  EXPECT_TRUE(status.timedOut());
  EXPECT_THAT(status.message(), testing::HasSubstr("of the caller's store"));
}

/// The check before open finds what open would, in the same words, and waits for nobody.
TEST_F(ConnectJobTest, OptionsAreCheckedBeforeOpen) {
  const std::string parent = folder_ / "none", expected = ", expected tcp://host:port, file:///folder or env://",
                    port = ", expected host:port or [IPv6 address]:port with a port of 1 to 65535";
  const std::pair<std::string, std::string> texts[] = {
      {"tpc://127.0.0.1:1", "rendezvous 'tpc://127.0.0.1:1': found the scheme 'tpc'" + expected},
      {"127.0.0.1:1", "rendezvous '127.0.0.1:1': found no scheme" + expected},
      {"", "rendezvous '': found no scheme" + expected},
      {"file://a", "rendezvous 'file://a': found a relative path" + expected},
      {"tcp://127.0.0.1", "rendezvous 'tcp://127.0.0.1': found '127.0.0.1'" + port},
      {"tcp://127.0.0.1:65536", "rendezvous 'tcp://127.0.0.1:65536': found '127.0.0.1:65536'" + port},
      {"file://" + parent + "/store", "cannot make the folder '" + parent +
                                          "/store': No such file or directory; expected a folder that all processes "
                                          "of the job share, or one to be made in such a folder"},
      {"env://a", "rendezvous 'env://a': found text after env://, expected none"},
      {"env://", "rendezvous 'env://': found no variable of a launcher, expected RANK, WORLD_SIZE, MASTER_ADDR and "
                 "MASTER_PORT, or the variables of srun or mpirun"},
      {"tcp://192.0.2.1:1", "the store at 192.0.2.1:1 needs a secret, since other machines can reach 192.0.2.1: give "
                            "all processes the same secret (RESHARD_SECRET), or trust the network with 'insecure' "
                            "(--insecure)"}};
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.transport = "ucx";
  for (const auto &[url, text] : texts) {
    options.rendezvous = url.c_str();
    EXPECT_EQ(check(options), text);
    EXPECT_EQ(open(options), text);
  }
  const std::string made = folder_ / "made", file = "file://" + made;
  for (const std::string &url : {file, std::string("tcp://127.0.0.1:1"), std::string("tcp://[::1]:1")}) {
    options.rendezvous = url.c_str();
    EXPECT_EQ(check(options), "");
  }
  EXPECT_EQ(std::filesystem::is_directory(made), true);
  options.secret = "";
  EXPECT_THAT(check(options), StartsWith("secret: found \"\""));
  options.secret = "a secret";
  options.rendezvous = "tcp://192.0.2.1:1";
  EXPECT_EQ(check(options), "");
  options.transport = "uxc";
  EXPECT_EQ(check(options), "unknown transport 'uxc', expected 'threads', 'mpi', 'ucx' or 'nccl'");
  EXPECT_EQ(reshard_check_options(nullptr, nullptr, 0), RESHARD_OK);
  char start[8];
  EXPECT_EQ(reshard_check_options(&options, start, sizeof start), RESHARD_INVALID);
  EXPECT_STREQ(start, "unknown");
}

TEST_F(ConnectJobTest, ContradictionsAreNamed) {
  const reshard_store store = callers_.store();
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.transport = "ucx";
  EXPECT_EQ(open(options), "transport 'ucx' needs a rendezvous: tcp://host:port, file:///folder, env://, or a store");
  options.rendezvous = "smoke://signals";
  EXPECT_EQ(open(options), "rendezvous 'smoke://signals': found the scheme 'smoke', expected tcp://host:port, "
                           "file:///folder or env://");
  EXPECT_THAT(open(options, {}), StartsWith("the rank of this process is unknown: pass exactly one rank to open"));
  EXPECT_THAT(open(options, {0, 1}), StartsWith("the rank of this process is unknown: pass exactly one rank to open"));
  EXPECT_EQ(open(options, {2}), "rank 2 is not in the plan, which has 2 ranks");
  options.rendezvous = "env://";
  EXPECT_THAT(open(options), StartsWith("rendezvous 'env://': found no variable of a launcher"));
  options.rendezvous = "env://a";
  EXPECT_EQ(open(options), "rendezvous 'env://a': found text after env://, expected none");
  options.store = &store;
  EXPECT_EQ(open(options), "found a rendezvous 'env://a' and a store, expected one of them");
  options.rendezvous = nullptr;
  for (const char *transport : {"threads", "mpi"}) {
    options.transport = transport;
    EXPECT_EQ(open(options), "transport '" + std::string(transport) +
                                 "' has no rendezvous, expected transport 'ucx' or 'nccl' with it");
  }
  options.transport = "ucx";
  EXPECT_EQ(check(options), "");
  reshard_store incomplete = callers_.store();
  incomplete.get = nullptr;
  options.store = &incomplete;
  EXPECT_EQ(open(options), "reshard_store.get is NULL, expected a function");
  incomplete.size = 0;
  EXPECT_THAT(open(options), HasSubstr("reshard_store.size: found 0, expected 32 or more"));
}

} // namespace reshard
