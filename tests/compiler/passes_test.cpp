// The passes as one: random layouts, built directly, are lowered to steps, and the steps are played on labelled elements. Every
// target element must end with the label that its share says, however the passes got there.

#include "compiler/pass.h"
#include "compiler/staging.h"
#include "ir/text.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>

using namespace reshard;
using namespace reshard::ir;

namespace {

class Generator {
public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  Module module() {
    Module module;
    Layout &layout = module.layout;
    layout.variables = {{"layer", pick(1, 5)}, {"expert", pick(1, 4)}};
    layout.topology.ranksPerNode = pick(0, 3);
    layout.stagingLimit = pick(0, 1) ? 0 : 1024 * pick(1, 4);
    const int families = pick(1, 3);
    for (int f = 0; f < families; ++f) {
      Family family;
      family.name = "t" + std::to_string(f);
      for (unsigned v = 0; v < 2; ++v)
        if (pick(0, 1)) {
          family.variables.push_back(v);
          family.name += ".{" + layout.variables[v].name + "}";
          family.exists.push_back(identity(layout.variables[v].size));
        }
      for (int d = pick(1, 2); d > 0; --d)
        family.shape.push_back(pick(1, 24));
      family.dtype = pick(0, 1) ? DType::bf16 : DType::fp32;
      layout.families.push_back(family);
    }
    layout.endpoints.push_back(endpoint(layout, "source", true));
    layout.endpoints.push_back(endpoint(layout, "target", false));
    for (const Endpoint &endpoint : layout.endpoints)
      for (int32_t rank : endpoint.ranks)
        layout.world = std::max<int64_t>(layout.world, rank + 1);
    return module;
  }

private:
  int pick(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random_); }

  /// n rows over `axes`: contiguous uneven, or dealt out in blocks, or whole.
  unsigned share(Endpoint &endpoint, int64_t n, std::vector<unsigned> axes) {
    Share share;
    share.axes = std::move(axes);
    int64_t k = 1;
    for (unsigned axis : share.axes)
      k *= endpoint.axes[axis].size;
    if (k == 1) {
      share.axes.clear();
      share.at = {identity(n)};
    } else if (pick(0, 1)) { // contiguous, uneven
      std::vector<int64_t> cuts = {0, n};
      for (int64_t i = 1; i < k; ++i)
        cuts.push_back(pick(0, static_cast<int>(n)));
      std::sort(cuts.begin(), cuts.end());
      for (int64_t i = 0; i < k; ++i)
        share.at.push_back(normalize({{cuts[i], 0, cuts[i + 1] - cuts[i], 1, 0, 0}}));
    } else { // block cyclic
      const int64_t block = pick(1, 3);
      for (int64_t i = 0; i < k; ++i) {
        Segments segments;
        int64_t local = 0;
        for (int64_t at = i * block; at < n; at += k * block) {
          const int64_t length = std::min(block, n - at);
          segments.push_back({at, local, length, 1, 0, 0});
          local += length;
        }
        share.at.push_back(normalize(segments));
      }
    }
    endpoint.shares.push_back(share);
    return static_cast<unsigned>(endpoint.shares.size() - 1);
  }

  std::vector<unsigned> someAxes(std::vector<unsigned> &left) {
    std::vector<unsigned> axes;
    while (!left.empty() && pick(0, 2) == 0) {
      axes.push_back(left.back());
      left.pop_back();
    }
    return axes;
  }

  Endpoint endpoint(const Layout &layout, const char *role, bool source) {
    Endpoint endpoint;
    endpoint.role = role;
    int64_t places = 1;
    for (const char *axis : {"a", "b", "c"}) {
      const int64_t size = pick(1, 3);
      endpoint.axes.push_back({axis, size, places});
      places *= size;
    }
    std::vector<int32_t> ranks(30);
    for (int32_t r = 0; r < 30; ++r)
      ranks[r] = r;
    if (pick(0, 1))
      std::shuffle(ranks.begin(), ranks.end(), random_);
    const int offset = pick(0, 3);
    for (int64_t p = 0; p < places; ++p)
      endpoint.ranks.push_back(ranks[offset + p > 29 ? p : offset + p]);
    std::vector<unsigned> axes = {0, 1, 2};
    std::shuffle(axes.begin(), axes.end(), random_);
    for (const IndexVariable &variable : layout.variables)
      endpoint.placement.push_back(share(endpoint, variable.size, pick(0, 1) ? someAxes(axes) : std::vector<unsigned>{}));
    for (unsigned f = 0; f < layout.families.size(); ++f)
      for (int copies = source ? pick(1, 2) : pick(0, 2); copies > 0; --copies)
        endpoint.params.push_back(param(layout, endpoint, f, axes, copies));
    return endpoint;
  }

  Param param(const Layout &layout, Endpoint &endpoint, unsigned f, std::vector<unsigned> axes, int number) {
    const Family &family = layout.families[f];
    Param param;
    param.name = "p" + std::to_string(f) + "." + std::to_string(number);
    param.dtype = family.dtype;
    Part part;
    part.family = static_cast<int>(f);
    int stacked = -1;
    std::vector<unsigned> order;
    for (unsigned v : family.variables)
      if (stacked < 0 && pick(0, 2) == 0)
        stacked = static_cast<int>(v);
      else
        order.push_back(v);
    std::shuffle(order.begin(), order.end(), random_);
    auto dense = [&](unsigned v) {
      Share values = endpoint.shares[endpoint.placement[v]];
      for (Segments &segments : values.at)
        segments = ir::dense(segments);
      endpoint.shares.push_back(values);
      return static_cast<unsigned>(endpoint.shares.size() - 1);
    };
    std::map<unsigned, unsigned> dense_;
    for (unsigned v : family.variables)
      dense_[v] = dense(v);
    for (unsigned v : order) {
      param.variables.push_back(v);
      param.instances.push_back(dense_[v]);
      param.name += ".{" + layout.variables[v].name + "}";
    }
    auto extent = [&](unsigned share) {
      Extent extent{endpoint.shares[share].axes, {}};
      for (const Segments &segments : endpoint.shares[share].at)
        extent.at.push_back(size(segments));
      return extent;
    };
    int next = 0;
    if (stacked >= 0) {
      param.shape.push_back(extent(dense_[stacked]));
      ++next;
    }
    for (unsigned v : family.variables)
      part.dimensions.push_back({dense_[v], static_cast<int>(v) == stacked ? 0 : -1});
    std::vector<int> places(family.shape.size());
    for (size_t d = 0; d < places.size(); ++d)
      places[d] = next + static_cast<int>(d);
    std::shuffle(places.begin(), places.end(), random_); // a permuted param
    param.shape.resize(next + places.size());
    for (size_t d = 0; d < family.shape.size(); ++d) {
      const unsigned s = share(endpoint, family.shape[d], someAxes(axes));
      part.dimensions.push_back({s, places[d]});
      param.shape[places[d]] = extent(s);
    }
    param.parts.push_back(part);
    return param;
  }

  std::mt19937_64 random_;
};

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
    Module module = Generator(seed).module();
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
