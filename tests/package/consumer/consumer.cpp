// SPDX-License-Identifier: Apache-2.0
#include <reshard/reshard.hpp>

#include <iostream>

int main(int, char **argv) {
  const reshard::PlanFile plan(argv[1]);
  std::list<std::vector<char>> memory;
  reshard::Executor executor(argv[1]);
  for (uint32_t endpoint = 0; endpoint < plan.summary().endpoints; ++endpoint)
    for (uint32_t rank : executor.ranks())
      for (const reshard_param &param : plan.params(endpoint, rank))
        executor.bind(endpoint, rank, param.name, memory.emplace_back(param.bytes).data(), param.bytes);
  executor.prepare();
  executor.run(60);
  std::cout << plan.summary().target_bytes << " bytes, version " << executor.version() << "\n";
}
