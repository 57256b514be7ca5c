// A trainer and a server, two groups of processes. After each step of the trainer, the server receives its weights.
//     reshard-compile ../refit.yaml -o refit.rplan
//     mpirun -n 4 ./refit refit.rplan

#include <reshard/reshard.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace {

/// Returns the endpoint of a rank: 0 for the trainer, 1 for the server.
uint32_t endpointOf(const reshard::PlanFile &plan, uint32_t rank) {
  for (uint32_t number = 0; number < plan.summary().endpoints; ++number) {
    const reshard_endpoint endpoint = plan.endpoint(number);
    if (std::find(endpoint.ranks, endpoint.ranks + endpoint.rank_count, rank) != endpoint.ranks + endpoint.rank_count)
      return number;
  }
  throw std::runtime_error("rank " + std::to_string(rank) +
                           " is in no endpoint of the plan, expected one of the trainer or the server");
}

void refit(const std::string &path) {
  const reshard::PlanFile plan(path);
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  options.transport = "mpi";
  options.join_seconds = 60;
  reshard::Executor executor(path, options);
  const uint32_t rank = executor.ranks()[0], endpoint = endpointOf(plan, rank);
  std::vector<std::vector<float>> weights;
  for (const reshard_param &param : plan.params(endpoint, rank)) {
    weights.emplace_back(param.bytes / sizeof(float));
    executor.bind(endpoint, rank, param.name, weights.back().data(), param.bytes);
  }
  executor.prepare();
  for (int step = 1; step <= 5; ++step) {
    if (endpoint == 0)
      for (std::vector<float> &weight : weights)
        std::for_each(weight.begin(), weight.end(), [](float &element) { element += 1; }); // the optimizer step
    const auto began = std::chrono::steady_clock::now();
    executor.run(60);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    for (const std::vector<float> &weight : weights)
      if (std::count(weight.begin(), weight.end(), static_cast<float>(step)) != static_cast<ptrdiff_t>(weight.size()))
        throw std::runtime_error("rank " + std::to_string(rank) + " has wrong weights after step " +
                                 std::to_string(step));
    if (rank == plan.endpoint(endpoint).ranks[0])
      std::printf("%s rank %u: step %d, %.4f s, version %llu\n", plan.endpoint(endpoint).role, rank, step, seconds,
                  static_cast<unsigned long long>(executor.version()));
  }
}

} // namespace

int main(int argc, char **argv) {
  try {
    refit(argc > 1 ? argv[1] : "refit.rplan");
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "refit: %s\n", error.what());
    return 1;
  }
}
