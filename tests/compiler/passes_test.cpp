// The passes as one: random layouts, built directly, are lowered to steps, and the steps are played on labelled elements. Every
// target element must end with the label that its share says, however the passes got there.

#include "compiler/pass.h"
#include "compiler/staging.h"
#include "ir/text.h"
#include "tests/compiler/random_module.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

using namespace reshard;
using namespace reshard::ir;

namespace {

/// Memory of every instance of every place of an endpoint, one 64-bit label an element, by place and instance.
using Memory = std::vector<std::vector<std::vector<int64_t>>>;

/// What each element of an endpoint is, straight from the shares.
Memory labels(const Layout &layout, const Endpoint &endpoint) {
  Memory memory(endpoint.places());
  for (int64_t place = 0; place < endpoint.places(); ++place)
    for (const Param &param : endpoint.params) {
      const int64_t count = instances(endpoint, param, place);
      const std::vector<int64_t> shape = localShape(endpoint, param, place);
      int64_t elements = 1;
      for (int64_t n : shape)
        elements *= n;
      const size_t base = memory[place].size();
      memory[place].resize(base + count, std::vector<int64_t>(elements, -2));
      if (count == 0)
        continue;
      for (const Part &part : param.parts) {
        const Family &family = layout.families[part.family];
        // Walk all combinations of positions of all dimensions.
        std::function<void(size_t, int64_t, int64_t, int64_t)> walk = [&](size_t d, int64_t label, int64_t instance,
                                                                          int64_t offset) {
          if (d == family.rank()) {
            memory[place][base + instance][offset] = label;
            return;
          }
          const Share &share = endpoint.shares[part.dimensions[d].share];
          const bool variable = d < family.variables.size();
          const int64_t n = variable ? layout.variables[family.variables[d]].size : family.shape[d - family.variables.size()];
          for (const auto &[from, to] : expand(share.at[coordinate(endpoint, share.axes, place)])) {
            int64_t step = 0, stride = 0;
            if (part.dimensions[d].param >= 0) {
              stride = 1;
              for (size_t k = part.dimensions[d].param + 1; k < shape.size(); ++k)
                stride *= shape[k];
            } else {
              step = 1;
              for (size_t v = param.variables.size(); v-- > 0 && param.variables[v] != family.variables[d];) {
                const Share &inner = endpoint.shares[param.instances[v]];
                step *= size(inner.at[coordinate(endpoint, inner.axes, place)]);
              }
            }
            walk(d + 1, label * n + from, instance + to * step, offset + to * stride);
          }
        };
        walk(0, part.family, 0, 0);
      }
    }
  return memory;
}

/// Element offsets that an operand names, in order, as (buffer, element).
std::vector<std::pair<int64_t, int64_t>> elements(const RankSchedule &rank, const Operand &operand, int64_t item) {
  const OperandShape &shape = rank.shapes[operand.shape];
  std::vector<std::pair<int64_t, int64_t>> result;
  std::function<void(size_t, int64_t, int64_t)> walk = [&](size_t l, int64_t buffer, int64_t offset) {
    if (l == shape.loops.size()) {
      for (int64_t at = 0; at < shape.rowBytes; at += item)
        result.emplace_back(buffer, (offset + at) / item);
      return;
    }
    for (int64_t i = 0; i < shape.loops[l].count; ++i)
      walk(l + 1, buffer + i * shape.loops[l].bufferStep, offset + i * shape.loops[l].stride);
  };
  walk(0, operand.buffer, operand.offset);
  return result;
}

} // namespace

TEST(Passes, EveryElementArrives) {
  const int cases = std::getenv("RESHARD_FULL") ? 20000 : 1500;
  int withMessages = 0, withRounds = 0;
  for (int seed = 0; seed < cases; ++seed) {
    Module module = RandomModule(seed).module();
    const Memory source = labels(module.layout, module.layout.endpoints[0]);
    const Memory expected = labels(module.layout, module.layout.endpoints[1]);
    Memory found = expected;
    for (auto &place : found)
      for (auto &instance : place)
        std::fill(instance.begin(), instance.end(), -1);

    for (const PassInfo &pass : passes()) {
      const std::string error = pass.run(module);
      ASSERT_EQ(error, "") << "seed " << seed << " pass " << pass.name;
    }
    auto at = [&](const RankSchedule &rank, int64_t buffer) {
      for (const BufferRun &run : rank.buffers)
        if (buffer >= run.first && buffer < run.first + run.count) {
          size_t instance = buffer - run.first;
          for (unsigned p = 0; p < run.param; ++p)
            instance += instances(module.layout.endpoints[run.endpoint], module.layout.endpoints[run.endpoint].params[p],
                                  run.place);
          return std::make_tuple(run.endpoint, run.place, instance,
                                 itemBytes(module.layout.endpoints[run.endpoint].params[run.param].dtype));
        }
      ADD_FAILURE() << "no buffer " << buffer;
      return std::make_tuple(0u, 0, size_t{0}, int64_t{1});
    };
    std::map<uint32_t, std::vector<int64_t>> wire;
    auto read = [&](const RankSchedule &rank, const Operand &operand, std::vector<int64_t> &out) {
      const int64_t item = std::get<3>(at(rank, operand.buffer));
      for (const auto &[buffer, element] : elements(rank, operand, item)) {
        const auto [endpoint, place, instance, bytes] = at(rank, buffer);
        ASSERT_EQ(endpoint, 0u);
        out.push_back(source[place][instance].at(element));
      }
    };
    auto write = [&](const RankSchedule &rank, const Operand &operand, const std::vector<int64_t> &in, size_t &next) {
      const int64_t item = std::get<3>(at(rank, operand.buffer));
      for (const auto &[buffer, element] : elements(rank, operand, item)) {
        const auto [endpoint, place, instance, bytes] = at(rank, buffer);
        ASSERT_EQ(endpoint, 1u);
        ASSERT_EQ(found[place][instance].at(element), -1) << "written twice, seed " << seed;
        found[place][instance][element] = in.at(next++);
      }
    };
    std::map<std::pair<int32_t, uint32_t>, int64_t> staged; // what the limit bounds, again
    for (const RankSchedule &rank : module.schedule.ranks)
      for (const Step &step : rank.steps) {
        if (step.kind == StepKind::copy)
          for (size_t i = 0; i < step.inputs.size(); ++i) {
            std::vector<int64_t> values;
            size_t next = 0;
            read(rank, step.inputs[i], values);
            write(rank, step.outputs[i], values, next);
          }
        if (step.kind == StepKind::send) {
          ++withMessages;
          for (const Operand &operand : step.inputs)
            read(rank, operand, wire[step.message]);
        }
        if (step.staging >= 0)
          staged[{rank.rank, step.round}] += reshard::staged(step.bytes);
      }
    for (const RankSchedule &rank : module.schedule.ranks)
      for (const Step &step : rank.steps)
        if (step.kind == StepKind::recv) {
          size_t next = 0;
          for (const Operand &operand : step.outputs)
            write(rank, operand, wire.at(step.message), next);
          EXPECT_EQ(next, wire.at(step.message).size());
        }
    for (const auto &[key, bytes] : staged)
      if (module.layout.stagingLimit > 0) {
        EXPECT_LE(bytes, module.layout.stagingLimit);
      }
    withRounds += module.schedule.rounds > 1;
    ASSERT_EQ(found, expected) << "seed " << seed;
  }
  EXPECT_GT(withMessages, cases);
  EXPECT_GT(withRounds, cases / 50);
}
