// SPDX-License-Identifier: Apache-2.0
// A whole run over MPI, compared with other methods for the same moves, on the same memory, touched before, alternately
// in one run: one MPI_Alltoallw with derived datatypes; one MPI_Isend and MPI_Irecv for each transfer, either created
// each time or persistent; and, for block-cyclic matrices, ScaLAPACK's pdgemr2d. reshard runs over transports mpi and,
// where it is built, ucx. All processes run the same benchmarks with the same number of iterations; the first one
// reports. There is a barrier before and after each measurement.
//   mpirun -n 4 bench-mpi [--private-memory] [--rounds=N]
// --private-memory: sources and targets are no shared mappings, so that other processes cannot map them.
//   tests/bench/ucx.py build/release/bench-mpi

#ifdef RESHARD_SCALAPACK
#include "tests/bench/scalapack.h"
#endif

#include "compiler/compile.h"
#include "reshard/reshard.h"
#include "schema/flatbuffer_vectors.h"
#include "tests/lib/folder.h"
#include "tests/verify/bound.h"
#include "tools/run/memory.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <mpi.h>
#include <optional>
#include <string_view>

using namespace reshard;
using namespace reshard::tools;
using namespace reshard::verify;
using namespace reshard::schema;

namespace {

int rank = 0, size = 1;
bool privateMemory = false;
int rounds = 11;

[[noreturn]] void fail(const std::string &why) {
  std::fprintf(stderr, "bench-mpi: rank %d: %s\n", rank, why.c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

/// The transports that run a plan, and reshard's names for them in the report.
struct TransportName {
  const char *name, *transport;
};
constexpr TransportName kTransportNames[] = {{"ours", "mpi"}, {"ucx", "ucx"}};

/// How many of the transports this build has.
size_t transportCount() {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const bool ucx = std::filesystem::exists(folder / "libreshard_ucx.so") ||
                   std::filesystem::exists(folder.parent_path() / "libreshard_ucx.so");
  return ucx ? 2 : 1;
}

/// One job: the plan, this rank's memory, and the same moves as MPI datatypes.
struct Case {
  std::unique_ptr<Plan> plan;
  std::unique_ptr<Memory> memory;
  std::vector<reshard_executor *> executors; // by transport
  std::shared_ptr<const Segment> segment;
  std::vector<MPI_Datatype> sends, receives; // by peer, for MPI_Alltoallw; includes local copies
  struct One {
    int peer, tag;
    bool send;
    MPI_Datatype type;
  };
  std::vector<One> ones; // this rank's side of each transfer
  uint64_t bytes = 0;

  explicit Case(const std::string &yaml) {
    std::optional<tests::TemporaryFolder> folder; // of rank 0, for all
    std::string path;
    if (rank == 0) {
      path = folder.emplace() / "plan";
      std::FILE *file = std::fopen((path + ".yaml").c_str(), "w");
      std::fputs(yaml.c_str(), file);
      std::fclose(file);
      CompileResult result;
      Diagnostics diagnostics;
      if (!compileJob(path + ".yaml", {}, result, diagnostics) ||
          errorToBool(writePlan(result.module, *result.ranks, result.statistics, path).takeError()))
        fail(diagnostics.text());
    }
    path.resize(4096);
    MPI_Bcast(path.data(), static_cast<int>(path.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    path.resize(std::strlen(path.c_str()));
    if (const Status status = Plan::open(path, plan); !status.ok())
      fail(status.message());
    if (static_cast<int>(plan->world()) != size)
      fail("found " + std::to_string(size) + " processes, expected mpirun -n " + std::to_string(plan->world()));
    if (const Status status = plan->segment(static_cast<uint32_t>(rank), segment); !status.ok())
      fail(status.message());
    memory = std::make_unique<Memory>(*plan, std::vector<uint32_t>{static_cast<uint32_t>(rank)});
    for (uint32_t e : {0u, 1u})
      if (const Status status = memory->allocate(e, !privateMemory); !status.ok())
        fail(status.message());
    for (size_t w = 0; w < transportCount(); ++w)
      open(path, kTransportNames[w]);
    bytes = plan->manifest().bytes_target();
    describe();
    MPI_Barrier(MPI_COMM_WORLD);
  }

  void open(const std::string &path, const TransportName &way) {
    reshard_executor *&executor = executors.emplace_back();
    const std::string folder = path + ".rendezvous";
    const std::string url = "file://" + folder;
    std::filesystem::create_directories(folder);
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.transport = way.transport;
    const bool meets = std::string(way.transport) == "ucx";
    options.rendezvous = meets ? url.c_str() : nullptr;
    const auto own = static_cast<uint32_t>(rank);
    if (reshard_open(path.c_str(), meets ? &own : nullptr, meets, &options, &executor) != RESHARD_OK)
      fail(reshard_error(executor));
    for (const MeshRankMemory &rankMemory : memory->rankMemories())
      tests::forEachBound(*plan, rankMemory, [&](const ParamInstance &instance, std::byte *at) {
        if (reshard_bind(executor, rankMemory.endpoint, own, instance.name.c_str(), at,
                         static_cast<uint64_t>(instance.bytes)) != RESHARD_OK)
          fail(reshard_error(executor));
      });
    if (reshard_prepare(executor) != RESHARD_OK)
      fail(reshard_error(executor));
  }

  std::byte *pointer(int64_t buffer) const {
    for (const BufferRange *run : orEmpty(segment->buffers()))
      if (buffer >= run->first() && buffer < run->first() + run->count())
        for (const MeshRankMemory &rankMemory : memory->rankMemories())
          if (rankMemory.endpoint == run->endpoint() && rankMemory.meshRank == run->mesh_rank())
            return rankMemory.params[run->param()][static_cast<size_t>(buffer - run->first())];
    fail("buffer " + std::to_string(buffer) + " is not in the segment");
  }

  /// Returns an operand as a datatype of absolute addresses: nested vectors; loops over buffers are expanded.
  MPI_Datatype type(const Operand &operand) const {
    const schema::Shape &shape = *segment->shapes()->Get(operand.shape());
    std::vector<MPI_Datatype> parts;
    std::vector<MPI_Aint> at;
    uint32_t inner = shape.loop_count();
    while (inner > 0 && segment->loops()->Get(shape.first_loop() + inner - 1)->buffer_step() == 0)
      --inner;
    MPI_Datatype row;
    MPI_Type_contiguous(static_cast<int>(shape.row_bytes()), MPI_BYTE, &row);
    for (uint32_t l = shape.loop_count(); l-- > inner;) {
      const schema::Loop &loop = *segment->loops()->Get(shape.first_loop() + l);
      MPI_Datatype next;
      MPI_Type_create_hvector(static_cast<int>(loop.count()), 1, loop.stride(), row, &next);
      row = next;
    }
    std::vector<uint64_t> index(inner);
    while (true) {
      int64_t buffer = operand.buffer(), offset = static_cast<int64_t>(operand.offset());
      for (uint32_t l = 0; l < inner; ++l) {
        const schema::Loop &loop = *segment->loops()->Get(shape.first_loop() + l);
        buffer += static_cast<int64_t>(index[l]) * loop.buffer_step();
        offset += static_cast<int64_t>(index[l]) * loop.stride();
      }
      MPI_Aint address;
      MPI_Get_address(pointer(buffer) + offset, &address);
      at.push_back(address);
      parts.push_back(row);
      uint32_t l = inner;
      while (l > 0 && ++index[l - 1] == segment->loops()->Get(shape.first_loop() + l - 1)->count())
        index[--l] = 0;
      if (l == 0)
        break;
    }
    return join(at, parts);
  }
  static MPI_Datatype join(const std::vector<MPI_Aint> &at, const std::vector<MPI_Datatype> &parts) {
    MPI_Datatype type;
    MPI_Type_create_struct(static_cast<int>(parts.size()), std::vector<int>(parts.size(), 1).data(), at.data(),
                           parts.data(), &type);
    MPI_Type_commit(&type);
    return type;
  }

  void describe() {
    std::map<std::pair<bool, int>, std::map<std::pair<uint32_t, uint32_t>, MPI_Datatype>>
        byPeer; // (message, operand) -> type; the order is the same on both sides
    for (const Step *step : orEmpty(segment->steps())) {
      if (step->kind() == StepKind::fill)
        continue;
      const bool local = step->kind() == StepKind::copy;
      const int peer = local ? rank : static_cast<int>(step->peer());
      for (const bool send : {true, false})
        for (uint32_t i = 0; i < (send ? step->input_count() : step->output_count()); ++i) {
          const uint32_t first = send ? step->first_input() : step->first_output();
          const MPI_Datatype one = type(*segment->operands()->Get(first + i));
          byPeer[{send, peer}][{local ? 0 : step->message(), i}] = one;
          ones.push_back(
              {peer, local ? (1 << 20) + static_cast<int>(i) : static_cast<int>(step->message()), send, one});
        }
    }
    for (const bool send : {true, false})
      for (int peer = 0; peer < size; ++peer) {
        std::vector<MPI_Datatype> parts;
        for (const auto &[key, one] : byPeer[{send, peer}])
          parts.push_back(one);
        (send ? sends : receives)
            .push_back(parts.empty() ? MPI_BYTE : join(std::vector<MPI_Aint>(parts.size()), parts));
        (send ? sendCounts : receiveCounts).push_back(parts.empty() ? 0 : 1);
      }
    zeros.assign(static_cast<size_t>(size), 0);
    requests.resize(ones.size());
  }
  std::vector<int> sendCounts, receiveCounts, zeros;
  std::vector<MPI_Request> requests;

  void ours(reshard_executor *executor) {
    if (reshard_run(executor, 0, nullptr) != RESHARD_OK)
      fail(reshard_error(executor));
  }
  void alltoallw() {
    MPI_Alltoallw(MPI_BOTTOM, sendCounts.data(), zeros.data(), sends.data(), MPI_BOTTOM, receiveCounts.data(),
                  zeros.data(), receives.data(), MPI_COMM_WORLD);
  }
  void oneByOne() {
    for (size_t i = 0; i < ones.size(); ++i)
      if (ones[i].send)
        MPI_Isend(MPI_BOTTOM, 1, ones[i].type, ones[i].peer, ones[i].tag, MPI_COMM_WORLD, &requests[i]);
      else
        MPI_Irecv(MPI_BOTTOM, 1, ones[i].type, ones[i].peer, ones[i].tag, MPI_COMM_WORLD, &requests[i]);
    MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
  }
  /// The same with persistent requests.
  void persistent() {
    if (kept.empty()) {
      kept.resize(ones.size());
      for (size_t i = 0; i < ones.size(); ++i)
        if (ones[i].send)
          MPI_Send_init(MPI_BOTTOM, 1, ones[i].type, ones[i].peer, ones[i].tag, MPI_COMM_WORLD, &kept[i]);
        else
          MPI_Recv_init(MPI_BOTTOM, 1, ones[i].type, ones[i].peer, ones[i].tag, MPI_COMM_WORLD, &kept[i]);
    }
    MPI_Startall(static_cast<int>(kept.size()), kept.data());
    MPI_Waitall(static_cast<int>(kept.size()), kept.data(), MPI_STATUSES_IGNORE);
  }
  std::vector<MPI_Request> kept;
};

/// A method to run the moves of a job.
struct Method {
  std::string name;
  std::function<void()> move;
  bool own = false; // reshard's
};

/// Checks that all methods leave the same bytes in the targets.
void compare(Case &job, const std::vector<Method> &methods) {
  auto each = [&](bool target, auto visit) {
    for (const MeshRankMemory &rankMemory : job.memory->rankMemories())
      if ((rankMemory.endpoint > 0) == target)
        tests::forEachBound(*job.plan, rankMemory, [&](const ParamInstance &instance, std::byte *at) {
          visit(reinterpret_cast<uint16_t *>(at), static_cast<size_t>(instance.bytes) / 2);
        });
  };
  uint32_t value = static_cast<uint32_t>(rank) + 1;
  each(false, [&](uint16_t *at, size_t count) {
    for (size_t i = 0; i < count; ++i)
      at[i] = static_cast<uint16_t>((value = value * 1664525 + 1013904223) >> 16);
  });
  uint64_t expected = 0;
  for (const Method &method : methods) {
    each(true, [](uint16_t *at, size_t count) { std::fill(at, at + count, uint16_t{0}); });
    MPI_Barrier(MPI_COMM_WORLD);
    method.move();
    uint64_t sum = 0;
    each(true, [&](const uint16_t *at, size_t count) {
      for (size_t i = 0; i < count; ++i)
        sum = (sum ^ at[i]) * 0x100000001b3u;
    });
    if (&method != &methods[0] && sum != expected)
      fail(method.name + " leaves other bytes in the targets than " + methods[0].name);
    expected = sum;
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

/// Returns the time of the slowest process.
template <class Move> double timed(Move move) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  move();
  double mine = MPI_Wtime() - begin, all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return all;
}

/// Runs all methods alternately. Reports medians, and for each of reshard's the ratio to the best of MPI's methods; for
/// transport ucx also that to transport mpi.
void paired(benchmark::State &state, const Case &job, const std::vector<Method> &methods) {
  std::vector<std::vector<double>> times(methods.size());
  for (int warm = 0; warm < 2; ++warm)
    for (const Method &method : methods)
      method.move();
  for (auto _ : state) {
    for (size_t w = 0; w < methods.size(); ++w)
      times[w].push_back(timed(methods[w].move));
    state.SetIterationTime(times[0].back());
  }
  double best = std::numeric_limits<double>::infinity();
  std::vector<double> medians;
  for (size_t w = 0; w < methods.size(); ++w) {
    std::sort(times[w].begin(), times[w].end());
    medians.push_back(times[w][times[w].size() / 2]);
    state.counters[methods[w].name + "_GB/s"] = static_cast<double>(job.bytes) / medians[w] / 1e9;
    best = methods[w].own ? best : std::min(best, medians[w]);
  }
  state.counters["ratio_to_best"] = best / medians[0];
  if (methods[1].own) {
    state.counters["ucx_ratio_to_best"] = best / medians[1];
    state.counters["ucx_ratio_to_ours"] = medians[0] / medians[1];
  }
}

constexpr int kMatrix = 4096;
std::map<std::string, std::array<int, 4>> cyclicBlocks; // block sizes of block-cyclic jobs, by the job's text

/// A job for a matrix of fp64: from blocks of one size over the axes x and y to blocks of another size.
std::string cyclic(int rows, int columns, const std::string &mesh, int newRows, int newColumns,
                   const std::string &newMesh) {
  auto layout = [](int r, int c) {
    return "{params: same, shard: {w: {0: {axis: x, cyclic: " + std::to_string(r) +
           "}, 1: {axis: y, cyclic: " + std::to_string(c) + "}}}}";
  };
  const std::string size = std::to_string(kMatrix);
  std::string text = "version: 1\nmodel: {dtype: fp64, tensors: {w: [" + size + ", " + size +
                     "]}, layouts: {a: " + layout(rows, columns) + ", b: " + layout(newRows, newColumns) +
                     "}}\nsource: {layout: a, mesh: " + mesh + "}\ntarget: {layout: b, mesh: " + newMesh + "}\n";
  cyclicBlocks[text] = {rows, columns, newRows, newColumns};
  return text;
}

#ifdef RESHARD_SCALAPACK
std::function<void()> scalapack(const Case &job, const std::array<int, 4> &blocks) {
  auto local = [&](uint32_t endpoint) {
    for (const MeshRankMemory &rankMemory : job.memory->rankMemories())
      if (rankMemory.endpoint == endpoint)
        return reinterpret_cast<double *>(rankMemory.params[0][0]);
    fail("this rank has no matrix of the endpoint");
  };
  return ScalapackMove(*job.plan, {kMatrix, kMatrix}, {{blocks[0], blocks[1]}, {"x", "y"}, local(0)},
                       {{blocks[2], blocks[3]}, {"x", "y"}, local(1)}, static_cast<uint32_t>(rank));
}
#endif

/// Takes an argument of this program; false for one of the benchmark library.
bool isOwn(std::string_view argument) {
  constexpr std::string_view kRounds = "--rounds=";
  if (argument == "--private-memory")
    privateMemory = true;
  else if (argument.starts_with(kRounds))
    rounds = std::max(1, std::atoi(argument.substr(kRounds.size()).data()));
  else
    return false;
  return true;
}

/// A reporter without output, for all processes but the first.
class Silent : public benchmark::BenchmarkReporter {
public:
  bool ReportContext(const Context &) override { return true; }
  void ReportRuns(const std::vector<Run> &) override {}
};

} // namespace

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  argc = static_cast<int>(std::remove_if(argv + 1, argv + argc, [](const char *argument) { return isOwn(argument); }) -
                          argv);
  const std::string models = "version: 1\nmodel: {extend: " RESHARD_SOURCE_DIR "/examples/models/";
  const std::pair<const char *, std::string> jobs[] = {
      {"rows", "version: 1\nmodel: {dtype: bf16, tensors: {w: {shape: [16384, 8192], shard: {0: tp}}}}\nsource: {mesh: "
               "{tp: 4}}\ntarget: {mesh: {tp: 4}, ranks: [1, 2, 3, 0]}\n"},
      {"columns-to-rows", "version: 1\nmodel: {dtype: bf16, tensors: {w: [8192, 8192]}, layouts: {c: {params: same, "
                          "shard: {w: {1: tp}}}, r: {params: same, shard: {w: {0: tp}}}}}\n"
                          "source: {layout: c, mesh: {tp: 4}}\ntarget: {layout: r, mesh: {tp: 4}}\n"},
      {"block-cyclic-2x2-to-4x1", cyclic(64, 64, "{x: 2, y: 2}", 48, 80, "{x: 4, y: 1}")},
      {"block-cyclic-4x1-to-1x4", cyclic(32, 128, "{x: 4, y: 1}", 128, 32, "{x: 1, y: 4}")},
      {"qwen3-0.6b", models + "qwen3-0.6b.yaml}\nsource: {layout: megatron, mesh: {megatron: {tp: 2, pp: 2}}}\ntarget: "
                              "{layout: vllm, mesh: {tp: 4}}\n"},
      {"qwen3-0.6b-tp4-tp2", models + "qwen3-0.6b.yaml}\nsource: {layout: megatron, mesh: {megatron: {tp: "
                                      "4}}}\ntarget: {layout: vllm, mesh: {tp: 2}}\n"},
      {"qwen3-0.6b-fsdp",
       models + "qwen3-0.6b.yaml}\nsource: {layout: fsdp2, mesh: {fsdp: 4}}\ntarget: {layout: vllm, mesh: {tp: 4}}\n"},
      {"qwen3-30b-a3b-2-layers",
       models + "qwen3-30b-a3b.yaml, let: {layers: 2}}\nsource: {layout: megatron, mesh: {megatron: {tp: 2, ep: 4, dp: "
                "2}}}\ntarget: {layout: vllm, mesh: {tp: 4}}\n"},
      {"llama3-8b-2-layers", models + "llama3-8b.yaml, let: {layers: 2}}\nsource: {layout: megatron, mesh: {megatron: "
                                      "{tp: 4}}}\ntarget: {layout: vllm, mesh: {tp: 2, dp: 2}}\n"},
  };
  for (const auto &[name, yaml] : jobs)
    benchmark::RegisterBenchmark(name,
                                 [text = yaml](benchmark::State &state) {
                                   const auto job = std::make_unique<Case>(text);
                                   std::vector<Method> methods;
                                   for (size_t w = 0; w < transportCount(); ++w)
                                     methods.push_back(
                                         {kTransportNames[w].name, [&job, w] { job->ours(job->executors[w]); }, true});
                                   methods.push_back({"alltoallw", [&] { job->alltoallw(); }});
                                   methods.push_back({"one_by_one", [&] { job->oneByOne(); }});
                                   methods.push_back({"persistent", [&] { job->persistent(); }});
#ifdef RESHARD_SCALAPACK
                                   if (const auto blocks = cyclicBlocks.find(text); blocks != cyclicBlocks.end())
                                     methods.push_back({"pdgemr2d", scalapack(*job, blocks->second)});
#endif
                                   compare(*job, methods);
                                   paired(state, *job, methods);
                                   for (reshard_executor *executor : job->executors)
                                     reshard_close(executor);
                                 })
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(rounds);
  benchmark::Initialize(&argc, argv);
  Silent silent;
  if (rank == 0)
    benchmark::RunSpecifiedBenchmarks();
  else
    benchmark::RunSpecifiedBenchmarks(&silent);
  MPI_Finalize();
  return 0;
}
