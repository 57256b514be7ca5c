// SPDX-License-Identifier: Apache-2.0
// The compiler: the whole process from its start to the written file, on one core, without the proof of the plan, a
// cache between runs and fsync; the median of five runs (one run for the jobs of all models). Counters: peak memory,
// transfers, bytes of the plan, and nanoseconds per transfer and rank. Then the readers of the largest plans: a rank
// that opens, verifies and binds its segment, reshard-inspect, and reshard-diff of two different and of two equal
// plans.
//   bench-scale [--benchmark_filter=…]        RESHARD_BIN: the folder of the commands

#include "reshard/reshard.h"
#include "schema/manifest.h"

#include "executor/load/load.h"
#include "tests/lib/folder.h"

#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

using namespace reshard;

namespace {

constexpr const char *kTopology = "--set=options.topology=" RESHARD_SOURCE_DIR "/examples/topologies/h100x8.yaml";

std::string binaries() {
  const char *folder = std::getenv("RESHARD_BIN");
  return folder ? folder : RESHARD_SOURCE_DIR "/build/release";
}

/// The path of a temporary file, removed at exit.
std::string temporary(const std::string &name) {
  static const tests::TemporaryFolder folder;
  return folder / name;
}

[[noreturn]] void fail(const std::string &why) {
  std::fprintf(stderr, "bench-scale: %s\n", why.c_str());
  std::exit(1);
}

struct RunCost {
  double seconds = 0, peakMiB = 0;
};

/// Runs a command without its output and waits for it; `code` is the expected exit code.
RunCost run(std::vector<std::string> command, int code = 0) {
  std::vector<char *> arguments;
  arguments.reserve(command.size() + 1);
  for (std::string &word : command)
    arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const auto start = std::chrono::steady_clock::now();
  const pid_t child = fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stdout);
    std::freopen("/dev/null", "w", stderr);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  int status = 0;
  rusage usage{};
  if (wait4(child, &status, 0, &usage) != child || !WIFEXITED(status) || WEXITSTATUS(status) != code)
    fail("'" + command[0] + " " + command[1] + "' did not exit with code " + std::to_string(code));
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
          static_cast<double>(usage.ru_maxrss) / 1024};
}

std::vector<std::string> compileCommand(const std::string &job, const std::string &plan,
                                        const std::vector<std::string> &options) {
  std::vector<std::string> command = {
      binaries() + "/reshard-compile", job, "-o", plan, "--jobs=1", "--allow=missing", "--no-verify"};
  command.insert(command.end(), options.begin(), options.end());
  return command;
}

void compile(benchmark::State &state, const std::string &job, const std::vector<std::string> &options) {
  const std::string plan = temporary("plan");
  double peak = 0;
  for (auto _ : state) {
    std::filesystem::remove(plan);
    const RunCost cost = run(compileCommand(job, plan, options));
    state.SetIterationTime(cost.seconds);
    peak = std::max(peak, cost.peakMiB);
    std::unique_ptr<Plan> opened;
    if (const Status status = Plan::open(plan, opened); !status.ok())
      fail(status.message());
    const double transfers = static_cast<double>(opened->manifest().transfers());
    state.counters["transfers"] = transfers;
    state.counters["ranks"] = opened->world();
    state.counters["messages"] = static_cast<double>(opened->manifest().messages());
    state.counters["peak_MiB"] = peak;
    state.counters["plan_MiB"] = static_cast<double>(opened->container().bytes()) / (1 << 20);
    state.counters["plan_B_per_transfer"] = static_cast<double>(opened->container().bytes()) / transfers;
    state.counters["ns_each"] = cost.seconds * 1e9 / (transfers + opened->world());
  }
  std::filesystem::remove(plan);
}

/// Two jobs of each model at 1024 ranks: from Megatron's layout to the engine's, and from FSDP's layout to the
/// engine's.
std::string modelJob(const std::string &model, const std::string &source, const std::string &target) {
  const std::string path = temporary(model + "-" + source + ".yaml");
  const bool uneven = model == "deepseek-v3" || model == "kimi-k2"; // 61 layers
  const std::string mesh = source == "megatron" ? "{megatron: {tp: 2, pp: 2, dp: 256, ep: 8}}" : "{fsdp: 1024}";
  std::ofstream(path) << "version: 1\nmodel: " RESHARD_SOURCE_DIR "/examples/models/" << model
                      << ".yaml\nsource: {layout: " << source << ", mesh: " << mesh
                      << (source == "megatron" && uneven ? ", place: {layer: {axis: pp, sizes: [31, 30]}, expert: ep}"
                                                         : "")
                      << "}\ntarget: {layout: " << target
                      << ", mesh: {tp: 4, dp: 256, views: [{ep: 8, copy: 128}]}, ranks: 1024..2047}\n";
  return path;
}

/// A model of 20,000 tensors without index variables.
std::string longJob() {
  const std::string path = temporary("long.yaml");
  std::ofstream file(path);
  file << "version: 1\nmodel:\n  dtype: bf16\n  tensors:\n";
  for (int i = 0; i < 20'000; ++i)
    file << "    model.layers." << i / 20 << ".block." << i % 20 << ".weight: {shape: [128, 64], shard: {0: tp}}\n";
  file << "source: {mesh: {tp: 4}}\ntarget: {mesh: {tp: 8}}\n";
  return path;
}

/// kimi-k2 on a growing number of ranks; instances and data parallel copies grow together.
std::string seriesJob(int copies) {
  const std::string path = temporary("series-" + std::to_string(copies) + ".yaml"), half = std::to_string(copies / 2);
  std::ofstream(path)
      << "version: 1\nmodel: " RESHARD_SOURCE_DIR
         "/examples/models/kimi-k2.yaml\nsource: {layout: megatron, mesh: {megatron: {tp: 8, pp: 16, dp: "
      << copies << ", ep: " << std::min(128, 8 * copies)
      << ", etp: 1}}, place: {layer: {axis: pp, sizes: [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3]}, expert: "
         "ep}}\n"
      << "target: {layout: vllm, mesh: {tp: 8, dp: 16, instance: " << half << ", views: [{ep: 128, instance: " << half
      << "}]}, ranks: " << 128 * copies << ".." << 192 * copies - 1 << "}\n";
  return path;
}

// Readers of a plan.

struct Plans {
  std::string a = temporary("a"), b = temporary("b"), copy = temporary("copy");
  Plans() {
    const std::string job = RESHARD_SOURCE_DIR "/examples/kimi-k2-2048-to-1024.yaml";
    run(compileCommand(job, a, {}));
    run(compileCommand(job, b, {"--set=options.staging=64MiB"}));
    std::filesystem::copy_file(a, copy);
  }
};

const Plans &plans() {
  static const Plans all;
  return all;
}

/// Opens a plan and binds the segment of the first target rank.
void openAndBind(benchmark::State &state) {
  constexpr uint32_t kRank = 2048;
  struct Instance {
    uint32_t endpoint;
    std::string name;
    uint64_t bytes;
  };
  std::vector<Instance> instances;
  uint64_t most = 0;
  {
    std::unique_ptr<Plan> plan;
    if (const Status status = Plan::open(plans().a, plan); !status.ok())
      fail(status.message());
    for (uint32_t e = 0; e < plan->manifest().endpoints()->size(); ++e) {
      const schema::Endpoint &endpoint = *plan->manifest().endpoints()->Get(e);
      for (uint32_t meshRank = 0; meshRank < endpoint.ranks()->size(); ++meshRank)
        if (endpoint.ranks()->Get(meshRank) == kRank)
          for (uint32_t p = 0; p < endpoint.params()->size(); ++p)
            for (const schema::ParamInstance &each : schema::instances(plan->manifest(), endpoint, p, meshRank)) {
              instances.push_back({e, each.name, static_cast<uint64_t>(each.bytes)});
              most = std::max(most, static_cast<uint64_t>(each.bytes));
            }
    }
  }
  // Reserved address space that is never touched: bind does not read memory.
  void *memory = mmap(nullptr, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  const uint32_t ranks[] = {kRank};
  for (auto _ : state) {
    reshard_executor *executor = nullptr;
    if (reshard_open(plans().a.c_str(), ranks, 1, nullptr, &executor) != RESHARD_OK)
      fail(reshard_error(executor));
    for (const Instance &each : instances)
      if (reshard_bind(executor, each.endpoint, kRank, each.name.c_str(), memory, each.bytes) != RESHARD_OK)
        fail(reshard_error(executor));
    reshard_close(executor);
  }
  munmap(memory, most);
  state.counters["params"] = static_cast<double>(instances.size());
}

void command(benchmark::State &state, const std::vector<std::string> &words, int code) {
  for (auto _ : state)
    state.SetIterationTime(run(words, code).seconds);
}

} // namespace

int main(int argc, char **argv) {
  auto once = [](benchmark::internal::Benchmark *bench) {
    bench->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(1);
  };
  auto median = [](benchmark::internal::Benchmark *bench) {
    bench->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(1)->Repetitions(5)->ReportAggregatesOnly();
  };
  for (const char *job :
       {"qwen3-30b-a3b-32-to-16", "kimi-k2-256-to-128", "kimi-k2-2048-to-1024", "clusters/kimi-k2-16384-to-8192"})
    for (const bool nodes : {false, true})
      median(benchmark::RegisterBenchmark((std::string("compile/") + job + (nodes ? "/h100x8" : "")).c_str(), compile,
                                          std::string(RESHARD_SOURCE_DIR "/examples/") + job + ".yaml",
                                          nodes ? std::vector<std::string>{kTopology} : std::vector<std::string>{}));
  std::vector<std::string> written;
  for (const int copies : {2, 4, 8, 16}) {
    written.push_back(seriesJob(copies));
    median(benchmark::RegisterBenchmark(("series/" + std::to_string(128 * copies)).c_str(), compile, written.back(),
                                        std::vector<std::string>{}));
  }
  for (const char *model : {"llama3-70b", "llama3-405b", "qwen2.5-72b", "qwen3-32b", "qwen3-235b-a22b", "mixtral-8x7b",
                            "deepseek-v3", "kimi-k2", "glm-4.5", "gpt-oss-120b", "nemotron-h-8b"})
    for (const char *source : {"megatron", "fsdp2"}) {
      written.push_back(modelJob(model, source, "vllm"));
      once(benchmark::RegisterBenchmark((std::string("compile-1024/") + model + "/" + source).c_str(), compile,
                                        written.back(), std::vector<std::string>{}));
    }
  written.push_back(longJob());
  median(benchmark::RegisterBenchmark("yaml/20000-tensors/layout", [job = written.back()](benchmark::State &state) {
    command(state, {binaries() + "/reshard-compile", job, "--emit=layout", "-o", "/dev/null"}, 0);
  }));
  median(benchmark::RegisterBenchmark("yaml/20000-tensors/plan", compile, written.back(), std::vector<std::string>{}));
  benchmark::RegisterBenchmark("read/open-verify-bind", openAndBind)->Unit(benchmark::kMillisecond);
  median(benchmark::RegisterBenchmark("read/inspect", [](benchmark::State &state) {
    command(state, {binaries() + "/reshard-inspect", plans().a}, 0);
  }));
  median(benchmark::RegisterBenchmark("read/diff", [](benchmark::State &state) {
    command(state, {binaries() + "/reshard-diff", plans().a, plans().b}, 1);
  }));
  median(benchmark::RegisterBenchmark("read/diff-equal", [](benchmark::State &state) {
    command(state, {binaries() + "/reshard-diff", plans().a, plans().copy}, 0);
  }));
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  for (const std::string &path : written)
    std::filesystem::remove(path);
  return 0;
}
