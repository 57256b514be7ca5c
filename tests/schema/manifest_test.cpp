// What a manifest says about a place, on manifests that one can check by hand, and what is refused before anything is
// read.

#include "tests/schema/support.h"

#include <gtest/gtest.h>

#include <functional>

using namespace reshard;
using namespace reshard::schema;
using namespace reshard::test;

namespace {

/// A serialized manifest that lives as long as this does.
class Read {
public:
  explicit Read(const ManifestT &manifest) : bytes_(serialized(manifest)) {}
  const Manifest &operator*() const { return *flatbuffers::GetSizePrefixedRoot<Manifest>(bytes_.data()); }
  const Manifest *operator->() const { return &**this; }
  const Endpoint &endpoint(uint32_t number) const { return *(*this)->endpoints()->Get(number); }

private:
  std::string bytes_;
};

std::unique_ptr<ShardingT> sharding(std::vector<uint32_t> axes,
                                    const std::vector<std::vector<schema::IndexBlock>> &lists) {
  auto result = std::make_unique<ShardingT>();
  result->axes = std::move(axes);
  result->first = {0};
  for (const std::vector<schema::IndexBlock> &list : lists) {
    result->blocks.insert(result->blocks.end(), list.begin(), list.end());
    result->first.push_back(static_cast<uint32_t>(result->blocks.size()));
  }
  return result;
}

/// Two stages (pp, slowest) × two expert ranks (ep) × 2 (tp, fastest): layers 0, 1, 2 and 3, 4; experts 0, 2 and 1, 3.
ManifestT stages() {
  Parts parts = tinyParts();
  ManifestT manifest = std::move(parts.manifest);
  manifest.world = 8;
  auto variable = [](const char *name, uint64_t size) {
    auto result = std::make_unique<VariableT>();
    result->name = name;
    result->size = size;
    return result;
  };
  manifest.variables.clear();
  manifest.variables.push_back(variable("layer", 5));
  manifest.variables.push_back(variable("expert", 4));
  manifest.tensor_patterns.clear();

  EndpointT &endpoint = *manifest.endpoints[0];
  endpoint.ranks = {0, 1, 2, 3, 4, 5, 6, 7};
  endpoint.axes.clear();
  for (const auto &[name, stride] : {std::pair("tp", 1), std::pair("ep", 2), std::pair("pp", 4)}) {
    endpoint.axes.push_back(std::make_unique<AxisT>());
    endpoint.axes.back()->name = name;
    endpoint.axes.back()->size = 2;
    endpoint.axes.back()->stride = stride;
  }
  endpoint.shardings.clear();
  // 0: where layers stand on a stage; 1: experts; 2: the layers ≥ 1 that have experts, numbered anew
  endpoint.shardings.push_back(sharding({2}, {{{0, 0, 3, 1, 0, 0}}, {{3, 0, 2, 1, 0, 0}}}));
  endpoint.shardings.push_back(sharding({1}, {{{0, 0, 1, 2, 2, 1}}, {{1, 0, 1, 2, 2, 1}}}));
  endpoint.shardings.push_back(sharding({2}, {{{1, 0, 2, 1, 0, 0}}, {{3, 0, 2, 1, 0, 0}}}));
  endpoint.placement = {0, 1};
  ParamT &param = *endpoint.params[0];
  param.name = "layers.{layer.local}.experts.{expert}.w";
  param.variables = {0, 1};
  param.instances = {2, 1};
  param.dtype = DType::fp32;
  param.shape[0]->axes = {2, 0}; // stage outermost, so coordinates (0,0) (0,1) (1,0) (1,1)
  param.shape[0]->at = {10, 11, 12, 13};
  param.shape[1]->axes = {};
  param.shape[1]->at = {3};
  param.parts.clear();

  EndpointT &target = *manifest.endpoints[1];
  target.placement = {0, 0};
  target.params.clear();
  return manifest;
}

} // namespace

TEST(Manifest, DTypes) {
  EXPECT_EQ(itemBytes(DType::bf16), 2);
  EXPECT_EQ(itemBytes(DType::fp64), 8);
  EXPECT_EQ(itemBytes(DType::fp8_e5m2), 1);
  EXPECT_EQ(itemBytes(DType::boolean), 1);
  EXPECT_STREQ(dtypeName(DType::fp8_e4m3), "fp8_e4m3");
  EXPECT_STREQ(dtypeName(DType::boolean), "bool");
  EXPECT_STREQ(safetensorsName(DType::fp16), "F16");
  for (int type = 0; type <= static_cast<int>(DType::MAX); ++type) {
    EXPECT_EQ(dtypeFromSafetensors(safetensorsName(DType(type))), DType(type));
    EXPECT_STREQ(dtypeName(DType(type)), ir::name(ir::DType(type)));
    EXPECT_EQ(itemBytes(DType(type)), ir::itemBytes(ir::DType(type)));
  }
  EXPECT_EQ(dtypeFromSafetensors("F128"), std::nullopt);
  EXPECT_EQ(dtypeFromSafetensors(""), std::nullopt);
}

TEST(Manifest, Coordinates) {
  const Read manifest(stages());
  const Endpoint &endpoint = manifest.endpoint(0);
  const auto *stageThenTensor = endpoint.params()->Get(0)->shape()->Get(0)->axes();
  const std::vector<int64_t> expected = {0, 1, 0, 1, 2, 3, 2, 3}; // 2 · (place / 4 mod 2) + place mod 2
  for (int64_t meshRank = 0; meshRank < 8; ++meshRank)
    EXPECT_EQ(coordinate(endpoint, stageThenTensor, meshRank), expected[meshRank]) << meshRank;
  EXPECT_EQ(coordinate(endpoint, nullptr, 5), 0);
}

TEST(Manifest, RunsMap) {
  const std::vector<schema::IndexBlock> list = {{0, 100, 2, 3, 10, 2}, {2, 200, 3, 1, 0, 0}};
  const IndexMap runs{list.data(), list.data() + list.size()};
  EXPECT_EQ(runs.size(), 9);
  const std::vector<std::pair<int64_t, std::optional<int64_t>>> expected = {
      {0, 100},           {1, 101},  {2, 200},  {4, 202},           {5, std::nullopt},  {10, 102},         {11, 103},
      {12, std::nullopt}, {20, 104}, {21, 105}, {22, std::nullopt}, {30, std::nullopt}, {-1, std::nullopt}};
  for (const auto &[from, to] : expected)
    EXPECT_EQ(runs.map(from), to) << from;
  EXPECT_EQ(IndexMap().size(), 0);
  EXPECT_EQ(IndexMap().map(0), std::nullopt);
}

TEST(Manifest, Instances) {
  const Read manifest(stages());
  ASSERT_EQ(checkManifest(*manifest), "");
  const Endpoint &endpoint = manifest.endpoint(0);
  const Param &param = *endpoint.params()->Get(0);

  // Place 3: tp 1, ep 1, pp 0. Layers 0, 1, 2 stand there at 0, 1, 2; 1 and 2 have experts. Experts 1, 3 stand at 0, 1.
  EXPECT_EQ(instanceCount(endpoint, param, 3), 4);
  EXPECT_EQ(localShape(endpoint, param, 3), (std::vector<int64_t>{11, 3}));
  const std::vector<ParamInstance> here = instances(*manifest, endpoint, 0, 3);
  ASSERT_EQ(here.size(), 4u);
  const std::vector<std::string> names = {"layers.1.experts.1.w", "layers.1.experts.3.w", "layers.2.experts.1.w",
                                          "layers.2.experts.3.w"};
  for (uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(here[i].name, names[i]);
    EXPECT_EQ(here[i].param, 0u);
    EXPECT_EQ(here[i].instance, i);
    EXPECT_EQ(here[i].bytes, 11 * 3 * 4);
    EXPECT_EQ(here[i].shape, (std::vector<int64_t>{11, 3}));
    EXPECT_EQ(here[i].values, (std::vector<int64_t>{1 + i / 2, 1 + 2 * (i % 2)}));
  }
  // Place 4: tp 0, ep 0, pp 1. Layers 3, 4 stand at 0, 1; experts 0, 2 at 0, 1.
  const std::vector<ParamInstance> there = instances(*manifest, endpoint, 0, 4);
  ASSERT_EQ(there.size(), 4u);
  EXPECT_EQ(there[0].name, "layers.0.experts.0.w");
  EXPECT_EQ(there[3].name, "layers.1.experts.2.w");
  EXPECT_EQ(there[3].bytes, 12 * 3 * 4);

  ManifestT other = stages();
  other.endpoints[0]->params[0]->name = "{layer}.w{expert.local}";
  const Read renamed(other);
  ASSERT_EQ(checkManifest(*renamed), "");
  EXPECT_EQ(instances(*renamed, renamed.endpoint(0), 0, 4)[1].name, "3.w1");
}

TEST(Manifest, Presence) {
  ManifestT manifest = stages();
  ParamT &param = *manifest.endpoints[0]->params[0];
  param.presence.push_back(std::make_unique<PresenceT>());
  param.presence[0]->axis = 2;
  param.presence[0]->coordinates = {1};
  const Read read(manifest);
  ASSERT_EQ(checkManifest(*read), "");
  const Endpoint &endpoint = read.endpoint(0);
  for (int64_t meshRank = 0; meshRank < 8; ++meshRank) {
    EXPECT_EQ(present(endpoint, *endpoint.params()->Get(0), meshRank), meshRank >= 4);
    EXPECT_EQ(instanceCount(endpoint, *endpoint.params()->Get(0), meshRank), meshRank >= 4 ? 4 : 0);
    EXPECT_EQ(instances(*read, endpoint, 0, meshRank).size(), meshRank >= 4 ? 4u : 0u);
  }
}

TEST(Manifest, AgreesWithTheIR) {
  const ir::Module module = tinyModule();
  const Read manifest(tinyParts().manifest);
  for (uint32_t e = 0; e < 2; ++e) {
    const ir::Endpoint &one = module.layout.endpoints[e];
    const Endpoint &other = manifest.endpoint(e);
    for (int64_t meshRank = 0; meshRank < one.meshRanks(); ++meshRank) {
      EXPECT_EQ(localShape(other, *other.params()->Get(0), meshRank), ir::localShape(one, one.params[0], meshRank));
      const std::vector<ParamInstance> list = instances(*manifest, other, 0, meshRank);
      ASSERT_EQ(static_cast<int64_t>(list.size()), ir::instances(one, one.params[0], meshRank));
      for (const ParamInstance &instance : list) {
        EXPECT_EQ(instance.name, ir::instanceName(module.layout, one, one.params[0], meshRank, instance.instance));
        EXPECT_EQ(instance.bytes, ir::localBytes(one, one.params[0], meshRank));
      }
    }
  }
  EXPECT_EQ(tensorName(*manifest, *manifest->tensor_patterns()->Get(0), {1}), "w1");
}

/// A second tensor pattern, of the variables `layer` and, new, `expert`.
TensorPatternT &addTensorPattern(Parts &p, const char *name) {
  p.manifest.variables.push_back(std::make_unique<VariableT>(*p.manifest.variables[0]));
  p.manifest.variables[1]->name = "expert";
  for (const auto &endpoint : p.manifest.endpoints)
    endpoint->placement.push_back(0);
  p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>(*p.manifest.tensor_patterns[0]));
  TensorPatternT &pattern = *p.manifest.tensor_patterns[1];
  pattern.name = name;
  pattern.variables = {0, 1};
  return pattern;
}

TEST(Manifest, Refusals) {
  struct Violation {
    const char *what;
    std::function<void(Parts &)> alter;
    const char *message;
  };
  constexpr int64_t kFar = int64_t{1} << 61;
  const char *impossible = "endpoint 'source' has a share with an impossible run";
  const std::vector<Violation> violations = {
      {"no world", [](Parts &p) { p.manifest.world = 0; }, "found a world of 0 ranks, expected 1 to 1048576"},
      {"a huge world", [](Parts &p) { p.manifest.world = UINT32_MAX; },
       "found a world of 4294967295 ranks, expected 1 to 1048576"},
      {"messages", [](Parts &p) { p.manifest.messages = UINT64_MAX; },
       "found 18446744073709551615 messages, expected fewer than 2^32"},
      {"a huge variable", [](Parts &p) { p.manifest.variables[0]->size = UINT64_MAX; },
       "index variable 'layer' has too many values"},
      {"no target", [](Parts &p) { p.manifest.endpoints.pop_back(); },
       "found 1 endpoints, expected a source and a target"},

      {"no such variable", [](Parts &p) { p.manifest.tensor_patterns[0]->variables[0] = 1; },
       "tensor 'w{layer}' refers to index variable 1, expected fewer than 1"},
      {"too many variables", [](Parts &p) { p.manifest.tensor_patterns[0]->variables.assign(65, 0); },
       "tensor 'w{layer}' has 65 index variables, expected at most 64"},
      {"no such dtype", [](Parts &p) { p.manifest.tensor_patterns[0]->dtype = DType(15); },
       "tensor 'w{layer}' has an unknown dtype"},
      {"exists too often", [](Parts &p) { p.manifest.tensor_patterns[0]->exists.push_back(sharding({}, {{}})); },
       "tensor 'w{layer}' says for how many variables it exists: found 2, expected 1"},
      {"exists by axis", [](Parts &p) { p.manifest.tensor_patterns[0]->exists[0]->axes = {0}; },
       "tensor 'w{layer}' exists by axis, expected the same everywhere"},
      {"exists beyond", [](Parts &p) { p.manifest.variables[0]->size = 1; },
       "tensor 'w{layer}' exists beyond the values of its variable"},
      {"too large", [](Parts &p) { p.manifest.tensor_patterns[0]->shape = {uint64_t{1} << 31, uint64_t{1} << 31}; },
       "tensor 'w{layer}' is too large"},
      {"far too large", [](Parts &p) { p.manifest.tensor_patterns[0]->shape = {UINT64_MAX, 2}; },
       "tensor 'w{layer}' is too large"},

      {"no places", [](Parts &p) { p.manifest.endpoints[0]->ranks.clear(); },
       "endpoint 'source' has 0 places, expected 1 to 16777216"},
      {"a rank beyond the world", [](Parts &p) { p.manifest.endpoints[1]->ranks[0] = 4; },
       "endpoint 'target' has rank 4, expected fewer than 4"},
      {"a rank twice", [](Parts &p) { p.manifest.endpoints[1]->ranks[0] = 2; }, "endpoint 'target' has rank 2 twice"},
      {"file numbers", [](Parts &p) { p.manifest.endpoints[1]->storage = true; },
       "endpoint 'target' has file number 1, expected 0"},
      {"a checkpoint of ranks", [](Parts &p) { p.manifest.endpoints[0]->checkpoint = true; },
       "endpoint 'source' is a checkpoint of 2 places, expected one place in storage"},
      {"no axis size", [](Parts &p) { p.manifest.endpoints[0]->axes[0]->size = 0; },
       "endpoint 'source' has axis 'tp' of size 0 and stride 1, expected 1 to 2^31 - 1"},
      {"no axis stride", [](Parts &p) { p.manifest.endpoints[0]->axes[0]->stride = 0; },
       "endpoint 'source' has axis 'tp' of size 2 and stride 0, expected 1 to 2^31 - 1"},
      {"a huge axis", [](Parts &p) { p.manifest.endpoints[0]->axes[0]->stride = UINT64_MAX; },
       "endpoint 'source' has axis 'tp' of size 2 and stride 18446744073709551615, expected 1 to 2^31 - 1"},

      {"no such axis", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->axes = {1}; },
       "endpoint 'source' refers to axis 1, expected fewer than 1"},
      {"axes that multiply to too much", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->axes.assign(64, 0); },
       "endpoint 'source' lists axes that multiply to too much"},
      {"too many axes", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->axes.assign(65, 0); },
       "endpoint 'source' lists 65 axes, expected at most 64"},
      {"bounds missing", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->axes = {0, 0}; },
       "endpoint 'source' has a share with 3 bounds, expected 5"},
      {"bounds that end elsewhere", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->first[2] = 1; },
       "endpoint 'source' has a share whose bounds do not cover its 2 runs"},
      {"bounds that begin elsewhere", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->first[0] = 1; },
       "endpoint 'source' has a share whose bounds do not cover its 2 runs"},
      {"bounds out of order", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->first[1] = 3; },
       "endpoint 'source' has a share with bounds out of order"},
      {"a run of nothing", [](Parts &p) { p.run(0, 1, 0).length = 0; }, impossible},
      {"a run of less", [](Parts &p) { p.run(0, 1, 0).length = -2; }, impossible},
      {"a run of too much", [](Parts &p) { p.run(0, 1, 0).length = kFar; }, impossible},
      {"no blocks", [](Parts &p) { p.run(0, 1, 0).count = 0; }, impossible},
      {"blocks that meet", [](Parts &p) { p.run(0, 1, 0) = {0, 0, 2, 2, 1, 2}; }, impossible},
      {"below zero", [](Parts &p) { p.run(0, 1, 0).from = -1; }, impossible},
      {"below zero on the other side", [](Parts &p) { p.run(0, 1, 0) = {0, 0, 1, 2, 1, -1}; }, impossible},
      {"too far", [](Parts &p) { p.run(0, 1, 0).from = kFar; }, impossible},
      {"too far by steps", [](Parts &p) { p.run(0, 1, 0) = {0, 0, 1, int64_t{1} << 40, int64_t{1} << 40, 1}; },
       impossible},
      {"too far by steps on the other side", [](Parts &p) { p.run(0, 1, 0) = {0, 0, 1, 3, 1, INT64_MAX}; }, impossible},
      {"positions that meet", [](Parts &p) { p.run(0, 1, 0) = {0, 0, 1, 2, 1, 0}; },
       "endpoint 'source' has a share that puts 2 positions in 1"},
      {"places too few variables", [](Parts &p) { p.manifest.endpoints[0]->placement.clear(); },
       "endpoint 'source' places index variables: found 0, expected 1"},
      {"no such placement", [](Parts &p) { p.manifest.endpoints[0]->placement[0] = 3; },
       "endpoint 'source' refers to share 3, expected fewer than 3"},

      {"presence by no axis",
       [](Parts &p) {
         p.param(0).presence.push_back(std::make_unique<PresenceT>());
         p.param(0).presence[0]->axis = 1;
       },
       "endpoint 'source' param 'weight{layer}' refers to axis 1, expected fewer than 1"},
      {"presence out of order",
       [](Parts &p) {
         p.param(0).presence.push_back(std::make_unique<PresenceT>());
         p.param(0).presence[0]->coordinates = {1, 0};
       },
       "endpoint 'source' param 'weight{layer}' lists coordinates out of order"},
      {"no such name variable", [](Parts &p) { p.param(0).variables[0] = 1; },
       "endpoint 'source' param 'weight{layer}' refers to index variable 1, expected fewer than 1"},
      {"too few numbered", [](Parts &p) { p.param(0).instances.clear(); },
       "endpoint 'source' param 'weight{layer}' numbers index variables: found 0, expected 1"},
      {"no such numbering", [](Parts &p) { p.param(0).instances[0] = 3; },
       "endpoint 'source' param 'weight{layer}' refers to share 3, expected fewer than 3"},
      {"numbers with a gap", [](Parts &p) { p.run(0, 0, 0).to = 1; },
       "endpoint 'source' param 'weight{layer}' does not number its instances from 0 without gaps"},
      {"numbers twice", [](Parts &p) { p.run(0, 0, 0) = {0, 1, 1, 2, 1, 0}; },
       "endpoint 'source' param 'weight{layer}' gives two values the same instance"},
      {"values twice",
       [](Parts &p) {
         *p.manifest.endpoints[0]->shardings[0] = *sharding({}, {{{0, 0, 1, 1, 0, 0}, {0, 1, 1, 1, 0, 0}}});
       },
       "endpoint 'source' param 'weight{layer}' gives one value two instances"},
      {"values that are not there", [](Parts &p) { p.run(0, 0, 0).from = 1; },
       "endpoint 'source' param 'weight{layer}' does not number its instances from 0 without gaps"},
      {"too many instances",
       [](Parts &p) {
         p.manifest.variables[0]->size = 4096;
         p.run(0, 0, 0).length = 4096;
         p.param(0).variables = {0, 0};
         p.param(0).instances = {0, 0};
       },
       "endpoint 'source' param 'weight{layer}' has too many instances, expected at most 4194304"},
      {"no such param dtype", [](Parts &p) { p.param(0).dtype = DType(200); },
       "endpoint 'source' param 'weight{layer}' has an unknown dtype"},
      {"stored as an integer", [](Parts &p) { p.param(0).storage_dtype = DType::i16; },
       "endpoint 'source' param 'weight{layer}' is stored in a dtype that its elements cannot be cast to"},
      {"stored as it comes", [](Parts &p) { p.param(0).storage_dtype = p.param(0).dtype; },
       "endpoint 'source' param 'weight{layer}' is stored in a dtype that its elements cannot be cast to"},
      {"transformed, and cast as well",
       [](Parts &p) {
         p.param(0).storage_dtype = DType::fp32;
         p.param(0).transform = "pack";
       },
       "endpoint 'source' param 'weight{layer}' has a transform where none may be"},
      {"transformed in files",
       [](Parts &p) {
         p.manifest.endpoints[0]->storage = true;
         p.param(0).transform = "pack";
       },
       "endpoint 'source' param 'weight{layer}' has a transform where none may be"},
      {"lengths missing", [](Parts &p) { p.param(0).shape[1]->axes = {0}; },
       "endpoint 'source' param 'weight{layer}' has lengths in dimension 1: found 1, expected 2"},
      {"a negative length", [](Parts &p) { p.param(0).shape[1]->at[0] = -6; },
       "endpoint 'source' param 'weight{layer}' has a negative length in dimension 1"},
      {"too large a param", [](Parts &p) { p.param(0).shape[1]->at[0] = kFar; },
       "endpoint 'source' param 'weight{layer}' is too large"},

      {"holds no such tensor", [](Parts &p) { p.param(0).parts[0]->pattern = 1; },
       "endpoint 'source' param 'weight{layer}' holds tensor 1, expected fewer than 1"},
      {"holds less than no tensor", [](Parts &p) { p.param(0).parts[0]->pattern = -2; },
       "endpoint 'source' param 'weight{layer}' holds tensor -2, expected fewer than 1"},
      {"of another dtype", [](Parts &p) { p.param(0).dtype = DType::fp16; },
       "endpoint 'source' param 'weight{layer}' is fp16, but 'w{layer}' comes as bf16"},
      {"dimensions missing", [](Parts &p) { p.param(0).parts[0]->dimensions.pop_back(); },
       "endpoint 'source' param 'weight{layer}' places dimensions of a tensor: found 2, expected 3"},
      {"a dimension by no share", [](Parts &p) { p.dimension(0, 0, 1).sharding = 3; },
       "endpoint 'source' param 'weight{layer}' refers to share 3, expected fewer than 3"},
      {"beyond the tensor", [](Parts &p) { p.manifest.tensor_patterns[0]->shape[0] = 3; },
       "endpoint 'source' param 'weight{layer}' holds positions beyond dimension 1 of 'w{layer}'"},
      {"in no dimension", [](Parts &p) { p.dimension(0, 0, 1).param = 2; },
       "endpoint 'source' param 'weight{layer}' places a tensor in dimension 2, expected fewer than 2"},
      {"below any dimension", [](Parts &p) { p.dimension(0, 0, 1).param = -2; },
       "endpoint 'source' param 'weight{layer}' places a tensor in dimension -2, expected fewer than 2"},
      {"a tensor's rows in the name", [](Parts &p) { p.dimension(0, 0, 1).param = -1; },
       "endpoint 'source' param 'weight{layer}' places dimension 1 of a tensor in its name, which has no such "
       "variable"},
      {"beyond the param", [](Parts &p) { p.param(0).shape[0]->at[0] = 1; },
       "endpoint 'source' param 'weight{layer}' holds positions beyond its own size"},
      {"beyond the padding", [](Parts &p) { p.param(1).shape[1]->at[0] = 3; },
       "endpoint 'target' param 'w.{layer}' holds positions beyond its own size"},

      {"sums of positions that meet",
       [](Parts &p) {
         p.param(0).shape[0]->at[0] = 7; // the furthest is 1 + 5
         p.dimension(0, 0, 2).param = 0;
       },
       "endpoint 'source' param 'weight{layer}' holds positions beyond its own size"},

      {"a variable that no placeholder names", [](Parts &p) { p.manifest.variables[0]->name = "layer.local"; },
       "index variable 'layer.local' cannot stand in a placeholder, expected a name without '{', '.' and '}'"},
      {"a variable without a name", [](Parts &p) { p.manifest.variables[0]->name = ""; },
       "index variable '' cannot stand in a placeholder, expected a name without '{', '.' and '}'"},
      {"a variable twice",
       [](Parts &p) {
         p.manifest.variables.push_back(std::make_unique<VariableT>(*p.manifest.variables[0]));
         for (const auto &endpoint : p.manifest.endpoints)
           endpoint->placement.push_back(0);
       },
       "found index variable 'layer' twice"},
      {"a tensor without its variable", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w"; },
       "tensor 'w' lacks index variable 'layer' in its name, or has it twice, expected '{layer}' once"},
      {"a tensor with its variable twice", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "{layer}w{layer}"; },
       "tensor '{layer}w{layer}' has '{layer}' in its name, expected each of its own index variables once"},
      {"a tensor's position", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w{layer.local}"; },
       "tensor 'w{layer.local}' has '{layer.local}' in its name, expected each of its own index variables once"},
      {"a placeholder of nothing", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w{layer}{}"; },
       "tensor 'w{layer}{}' has '{}' in its name, expected each of its own index variables once"},
      {"a placeholder without an end", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w{layer"; },
       "tensor 'w{layer' has '{layer' in its name, expected each of its own index variables once"},
      {"a variable of others", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w{layer}{expert}"; },
       "tensor 'w{layer}{expert}' has '{expert}' in its name, expected each of its own index variables once"},
      {"a param without its variable", [](Parts &p) { p.param(0).name = "weight"; },
       "endpoint 'source' param 'weight' lacks index variable 'layer' in its name, or has it twice, expected '{layer}' "
       "or '{layer.local}' once"},
      {"a param with a chunk alone", [](Parts &p) { p.param(0).name = "weight{layer.chunk}"; },
       "endpoint 'source' param 'weight{layer.chunk}' lacks index variable 'layer' in its name, or has it twice, "
       "expected '{layer}' or '{layer.local}' once"},
      {"value and position", [](Parts &p) { p.param(0).name = "weight{layer}.{layer.local}"; },
       "endpoint 'source' param 'weight{layer}.{layer.local}' lacks index variable 'layer' in its name, or has it "
       "twice, expected '{layer}' or '{layer.local}' once"},
      {"positions that are not there",
       [](Parts &p) {
         p.param(0).name = "weight{layer.local}";
         p.manifest.endpoints[0]->placement[0] = 3;
         p.manifest.endpoints[0]->shardings.push_back(sharding({}, {{{0, 0, 1, 1, 0, 0}}}));
       },
       "endpoint 'source' param 'weight{layer.local}' has '{layer.local}' in its name, which does not tell its "
       "instances apart"},
      {"positions in several chunks",
       [](Parts &p) {
         p.param(0).name = "weight{layer.local}";
         p.manifest.endpoints[0]->placement[0] = 3;
         p.manifest.endpoints[0]->shardings.push_back(sharding({}, {{{0, 0, 1, 2, 1, kChunkStride}}}));
       },
       "endpoint 'source' param 'weight{layer.local}' has '{layer.local}' in its name, which does not tell its "
       "instances apart"},
      {"tensors of one name",
       [](Parts &p) {
         p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>(*p.manifest.tensor_patterns[0]));
       },
       "two tensors have the name 'w0'"},
      {"a tensor of another's name",
       [](Parts &p) {
         p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>());
         p.manifest.tensor_patterns[1]->name = "w1";
       },
       "two tensors have the name 'w1'"},
      {"placeholders that touch",
       [](Parts &p) {
         p.manifest.variables[0]->size = 12;
         TensorPatternT &pattern = addTensorPattern(p, "e{layer}{expert}");
         pattern.exists.push_back(sharding({}, {{{0, 0, 12, 1, 0, 0}}}));
         pattern.exists[0] = sharding({}, {{{0, 0, 12, 1, 0, 0}}});
       },
       "two tensors have the name 'e110'"},
      {"params of one name",
       [](Parts &p) {
         p.manifest.endpoints[0]->params.push_back(std::make_unique<ParamT>(p.param(0)));
         p.param(0, 1).name = "weight{layer.local}";
       },
       "endpoint 'source' has two params of the name 'weight0' on rank 0"},
      {"params of one name in a file",
       [](Parts &p) {
         p.manifest.endpoints[1]->storage = true;
         p.manifest.endpoints[1]->ranks = {0, 1};
         p.manifest.endpoints[1]->params.push_back(std::make_unique<ParamT>(p.param(1)));
         p.param(1, 1).name = "w.1";
         p.param(1, 1).variables.clear();
         p.param(1, 1).instances.clear();
         p.param(1, 1).parts.clear();
       },
       "endpoint 'target' has two params of the name 'w.1' on file 0"},
      {"padding stacked",
       [](Parts &p) {
         p.param(1).shape[1]->at[0] = 6;
         p.dimension(1, 1, 0).param = 1;
       },
       "endpoint 'target' param 'w.{layer}' stacks 1 index variables of padding, expected none"},
      {"two variables stacked",
       [](Parts &p) {
         TensorPatternT &pattern = addTensorPattern(p, "e{layer}.{expert}");
         pattern.shape.clear();
         pattern.exists.push_back(sharding({}, {{{0, 0, 2, 1, 0, 0}}}));
         p.param(0).parts[0]->pattern = 1;
         p.param(0).parts[0]->dimensions = {{0, 0}, {0, 1}};
       },
       "endpoint 'source' param 'weight{layer}' stacks 2 index variables of 'e{layer}.{expert}', expected one at most"},
  };
  for (const Violation &violation : violations) {
    Parts parts = tinyParts();
    violation.alter(parts);
    EXPECT_EQ(checkManifest(*Read(parts.manifest)), violation.message) << violation.what;
  }
}

TEST(Manifest, Allowed) {
  const std::vector<std::pair<const char *, std::function<void(Parts &)>>> changes = {
      {"nothing changed", [](Parts &) {}},
      {"numbers in another order", [](Parts &p) { p.run(0, 0, 0) = {0, 1, 1, 2, 1, -1}; }},
      {"a rank without rows",
       [](Parts &p) {
         p.manifest.endpoints[0]->shardings[1] = sharding({0}, {{{0, 0, 2, 1, 0, 0}}, {}});
         p.param(0).shape[0]->axes = {0};
         p.param(0).shape[0]->at = {2, 0};
       }},
      {"no tables at all",
       [](Parts &p) {
         for (const auto &endpoint : p.manifest.endpoints) {
           endpoint->params.clear();
           endpoint->shardings.resize(1);
           endpoint->shardings[0] = sharding({}, {{}});
           endpoint->axes.clear();
         }
         p.manifest.tensor_patterns.clear();
       }},
      {"storage",
       [](Parts &p) {
         p.manifest.endpoints[0]->storage = true;
         p.manifest.endpoints[0]->ranks = {0, 1};
       }},
      {"a checkpoint",
       [](Parts &p) {
         p.manifest.endpoints[0]->storage = p.manifest.endpoints[0]->checkpoint = true;
         p.manifest.endpoints[0]->ranks = {0};
       }},
      {"positions in several chunks, and the chunk",
       [](Parts &p) {
         p.param(0).name = "weight{layer.local}.{layer.chunk}";
         p.manifest.endpoints[0]->placement[0] = 3;
         p.manifest.endpoints[0]->shardings.push_back(sharding({}, {{{0, 0, 1, 2, 1, kChunkStride}}}));
       }},
      {"names that are alike but for a number",
       [](Parts &p) {
         p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>());
         p.manifest.tensor_patterns[1]->name = "w2";
         p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>());
         p.manifest.tensor_patterns[2]->name = "w01";
       }},
      {"params of one name on different ranks",
       [](Parts &p) {
         p.manifest.endpoints[0]->params.push_back(std::make_unique<ParamT>(p.param(0)));
         p.param(0, 1).name = "weight{layer.local}";
         for (uint32_t i : {0, 1}) {
           p.param(0, i).presence.push_back(std::make_unique<PresenceT>());
           p.param(0, i).presence[0]->coordinates = {i};
         }
       }},
  };
  for (const auto &[what, change] : changes) {
    Parts parts = tinyParts();
    change(parts);
    EXPECT_EQ(checkManifest(*Read(parts.manifest)), "") << what;
  }
}

// A few bytes can ask for a great deal of work; that is refused, soon.
TEST(Manifest, BoundedWork) {
  Parts parts = tinyParts();
  parts.manifest.variables[0]->size = uint64_t{1} << 50;
  parts.run(0, 0, 0).length = int64_t{1} << 50;
  EXPECT_EQ(checkManifest(*Read(parts.manifest)),
            "endpoint 'source' param 'weight{layer}' does not number its instances from 0 without gaps");

  parts = tinyParts();
  parts.manifest.variables[0]->size = 1 << 20;
  EndpointT &source = *parts.manifest.endpoints[0];
  source.axes[0]->size = 1000;
  source.shardings[1] = sharding({0}, std::vector<std::vector<schema::IndexBlock>>(1000, {{0, 0, 2, 1, 0, 0}}));
  source.shardings[0] = sharding({0}, std::vector<std::vector<schema::IndexBlock>>(1000, {{0, 0, 1 << 20, 1, 0, 0}}));
  EXPECT_EQ(checkManifest(*Read(parts.manifest)), "it is too large to be checked");
}
