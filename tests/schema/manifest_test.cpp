// SPDX-License-Identifier: Apache-2.0
// The functions of manifest.h on manifests small enough to check by hand, and the manifests that checkManifest refuses.

#include "schema/checks.h"
#include "tests/schema/support.h"

#include <gtest/gtest.h>

#include <functional>

using namespace reshard;
using namespace reshard::schema;
using namespace reshard::test;

namespace {

/// A serialized manifest; owns its bytes.
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
  // 0: layers by stage; 1: experts; 2: the layers ≥ 1, which have experts, numbered from 0
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
  const std::vector<int64_t> expected = {0, 1, 0, 1, 2, 3, 2, 3}; // 2 · (mesh rank / 4 mod 2) + mesh rank mod 2
  for (int64_t meshRank = 0; meshRank < 8; ++meshRank)
    EXPECT_EQ(coordinate(endpoint, stageThenTensor, meshRank), expected[meshRank]) << meshRank;
  EXPECT_EQ(coordinate(endpoint, nullptr, 5), 0);
}

TEST(Manifest, IndexMapLooksUpPositions) {
  const std::vector<schema::IndexBlock> list = {{0, 100, 2, 3, 10, 2}, {2, 200, 3, 1, 0, 0}};
  const IndexMap map{list.data(), list.data() + list.size()};
  EXPECT_EQ(map.size(), 9);
  const std::vector<std::pair<int64_t, std::optional<int64_t>>> expected = {
      {0, 100},           {1, 101},  {2, 200},  {4, 202},           {5, std::nullopt},  {10, 102},         {11, 103},
      {12, std::nullopt}, {20, 104}, {21, 105}, {22, std::nullopt}, {30, std::nullopt}, {-1, std::nullopt}};
  for (const auto &[from, to] : expected)
    EXPECT_EQ(map.map(from), to) << from;
  EXPECT_EQ(IndexMap().size(), 0);
  EXPECT_EQ(IndexMap().map(0), std::nullopt);
}

TEST(Manifest, Instances) {
  const Read manifest(stages());
  ASSERT_EQ(checkManifest(*manifest).message(), "");
  const Endpoint &endpoint = manifest.endpoint(0);
  const Param &param = *endpoint.params()->Get(0);

  // Mesh rank 3: tp 1, ep 1, pp 0. Layers 0, 1, 2 have positions 0, 1, 2; 1 and 2 have experts. Experts 1, 3: positions
  // 0, 1.
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
  // Mesh rank 4: tp 0, ep 0, pp 1. Layers 3, 4 have positions 0, 1; experts 0, 2 have positions 0, 1.
  const std::vector<ParamInstance> there = instances(*manifest, endpoint, 0, 4);
  ASSERT_EQ(there.size(), 4u);
  EXPECT_EQ(there[0].name, "layers.0.experts.0.w");
  EXPECT_EQ(there[3].name, "layers.1.experts.2.w");
  EXPECT_EQ(there[3].bytes, 12 * 3 * 4);

  ManifestT other = stages();
  other.endpoints[0]->params[0]->name = "{layer}.w{expert.local}";
  const Read renamed(other);
  ASSERT_EQ(checkManifest(*renamed).message(), "");
  EXPECT_EQ(instances(*renamed, renamed.endpoint(0), 0, 4)[1].name, "3.w1");
}

TEST(Manifest, Presence) {
  ManifestT manifest = stages();
  ParamT &param = *manifest.endpoints[0]->params[0];
  param.presence.push_back(std::make_unique<PresenceT>());
  param.presence[0]->axis = 2;
  param.presence[0]->coordinates = {1};
  const Read read(manifest);
  ASSERT_EQ(checkManifest(*read).message(), "");
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

/// Adds a second tensor pattern, with the variables `layer` and `expert` (which is new).
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

/// Makes a cut through some NICs the lower bound.
void addCut(Parts &p, schema::CutKind kind, uint32_t nics) {
  p.manifest.lower_bounds = std::make_unique<schema::LowerBoundsT>();
  p.manifest.lower_bounds->cuts.push_back(std::make_unique<schema::CutT>());
  p.manifest.lower_bounds->cuts[0]->kind = kind;
  p.manifest.lower_bounds->cuts[0]->nics = nics;
}

TEST(Manifest, Refusals) {
  struct Violation {
    const char *what;
    std::function<void(Parts &)> alter;
    const char *message;
  };
  constexpr int64_t kFar = int64_t{1} << 61;
  const char *malformed =
      "endpoint 'source' has a sharding with an index block that is empty, overlaps itself, or is not "
      "within 0 to 1152921504606846976";
  const std::vector<Violation> violations = {
      {"no world", [](Parts &p) { p.manifest.world = 0; }, "found a world of 0 ranks, expected 1 to 1048576"},
      {"a huge world", [](Parts &p) { p.manifest.world = UINT32_MAX; },
       "found a world of 4294967295 ranks, expected 1 to 1048576"},
      {"messages", [](Parts &p) { p.manifest.messages = UINT64_MAX; },
       "found 18446744073709551615 messages, expected fewer than 2^32"},
      {"a cut of an unknown kind", [](Parts &p) { addCut(p, static_cast<schema::CutKind>(99), 1); },
       "cut 0 has the unknown kind 99"},
      {"a cut of nothing", [](Parts &p) { addCut(p, schema::CutKind::node_ingress, 0); },
       "cut 0 has no links, NICs or copies, expected at least one"},
      {"a huge variable", [](Parts &p) { p.manifest.variables[0]->size = UINT64_MAX; },
       "index variable 'layer' has 18446744073709551615 values, expected at most 1152921504606846976"},
      {"no target", [](Parts &p) { p.manifest.endpoints.pop_back(); },
       "found 1 endpoints, expected a source and at least one target"},

      {"no such variable", [](Parts &p) { p.manifest.tensor_patterns[0]->variables[0] = 1; },
       "tensor 'w{layer}' refers to index variable 1, expected fewer than 1"},
      {"too many variables", [](Parts &p) { p.manifest.tensor_patterns[0]->variables.assign(65, 0); },
       "tensor 'w{layer}' has 65 index variables, expected at most 64"},
      {"no such dtype", [](Parts &p) { p.manifest.tensor_patterns[0]->dtype = DType(15); },
       "tensor 'w{layer}' has the unknown dtype 15"},
      {"exists too often", [](Parts &p) { p.manifest.tensor_patterns[0]->exists.push_back(sharding({}, {{}})); },
       "tensor 'w{layer}' has existing values of index variables: found 2, expected 1"},
      {"exists by axis", [](Parts &p) { p.manifest.tensor_patterns[0]->exists[0]->axes = {0}; },
       "tensor 'w{layer}' has existing values that depend on a mesh axis, expected none to"},
      {"exists beyond", [](Parts &p) { p.manifest.variables[0]->size = 1; },
       "tensor 'w{layer}' exists for values beyond the 1 of its index variable"},
      {"too large", [](Parts &p) { p.manifest.tensor_patterns[0]->shape = {uint64_t{1} << 31, uint64_t{1} << 31}; },
       "tensor 'w{layer}' has more than 1152921504606846976 bytes"},
      {"far too large", [](Parts &p) { p.manifest.tensor_patterns[0]->shape = {UINT64_MAX, 2}; },
       "tensor 'w{layer}' has more than 1152921504606846976 bytes"},

      {"no mesh ranks", [](Parts &p) { p.manifest.endpoints[0]->ranks.clear(); },
       "endpoint 'source' has 0 mesh ranks, expected 1 to 16777216"},
      {"a rank beyond the world", [](Parts &p) { p.manifest.endpoints[1]->ranks[0] = 4; },
       "endpoint 'target' has rank 4, expected fewer than 4"},
      {"a rank twice", [](Parts &p) { p.manifest.endpoints[1]->ranks[0] = 2; }, "endpoint 'target' has rank 2 twice"},
      {"file numbers", [](Parts &p) { p.manifest.endpoints[1]->storage = true; },
       "endpoint 'target' has file number 1, expected 0"},
      {"a checkpoint of ranks", [](Parts &p) { p.manifest.endpoints[0]->checkpoint = true; },
       "endpoint 'source' is a checkpoint with 2 mesh ranks, not in storage, expected one, in storage"},
      {"a target whose format has whole tensors, in chunks",
       [](Parts &p) {
         p.manifest.endpoints[1]->ranks = {0, 1};
         p.manifest.endpoints[1]->storage = p.manifest.endpoints[1]->checkpoint = true;
         p.manifest.endpoints[1]->format = schema::StorageFormat::torch_save;
       },
       "endpoint 'target' is a checkpoint with 2 mesh ranks, expected one, in storage"},
      {"engine replicas of the source", [](Parts &p) { p.manifest.endpoints[0]->replicas = 2; },
       "endpoint 'source' has 2 engine replicas, expected them in the only target, with source and target on ranks"},
      {"too many engine replicas", [](Parts &p) { p.manifest.endpoints[1]->replicas = UINT32_MAX; },
       "endpoint 'target' has 4294967295 engine replicas, expected at most 65536"},
      {"engine replicas on a rank of the source", [](Parts &p) { p.manifest.endpoints[1]->replicas = 1; },
       "endpoint 'target' has engine replicas and rank 1, expected 2: consecutive ranks above those of the source"},
      {"engine replicas out of order",
       [](Parts &p) {
         p.manifest.endpoints[1]->replicas = 1;
         p.manifest.endpoints[1]->ranks = {3, 2};
       },
       "endpoint 'target' has engine replicas and rank 2, expected 4: consecutive ranks above those of the source"},
      {"engine replicas before idle ranks",
       [](Parts &p) {
         p.manifest.endpoints[1]->replicas = 1;
         p.manifest.endpoints[1]->ranks = {2, 3};
         p.manifest.world = 5;
       },
       "endpoint 'target' has engine replicas, and the world has 5 ranks, expected 4: the ranks of replica 0 are the "
       "last"},
      {"no axis size", [](Parts &p) { p.manifest.endpoints[0]->axes[0]->size = 0; },
       "endpoint 'source' has axis 'tp' of size 0 and stride 1, expected 1 to 2^31 - 1"},
      {"no axis stride", [](Parts &p) { p.manifest.endpoints[0]->axes[0]->stride = 0; },
       "endpoint 'source' has axis 'tp' of size 2 and stride 0, expected 1 to 2^31 - 1"},
      {"a huge axis", [](Parts &p) { p.manifest.endpoints[0]->axes[0]->stride = UINT64_MAX; },
       "endpoint 'source' has axis 'tp' of size 2 and stride 18446744073709551615, expected 1 to 2^31 - 1"},

      {"no such axis", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->axes = {1}; },
       "endpoint 'source' refers to axis 1, expected fewer than 1"},
      {"axes that multiply to too much", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->axes.assign(64, 0); },
       "endpoint 'source' lists axes with more than 1152921504606846976 coordinates"},
      {"too many axes", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->axes.assign(65, 0); },
       "endpoint 'source' lists 65 axes, expected at most 64"},
      {"bounds missing", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->axes = {0, 0}; },
       "endpoint 'source' has a sharding with 3 bounds, expected 5"},
      {"bounds that end elsewhere", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->first[2] = 1; },
       "endpoint 'source' has a sharding with bounds from 0 to 1, expected 0 to 2, the number of its index blocks"},
      {"bounds that begin elsewhere", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->first[0] = 1; },
       "endpoint 'source' has a sharding with bounds from 1 to 2, expected 0 to 2, the number of its index blocks"},
      {"bounds out of order", [](Parts &p) { p.manifest.endpoints[0]->shardings[1]->first[1] = 3; },
       "endpoint 'source' has a sharding whose bounds do not ascend"},
      {"a block of no positions", [](Parts &p) { p.block(0, 1, 0).length = 0; }, malformed},
      {"a block of a negative length", [](Parts &p) { p.block(0, 1, 0).length = -2; }, malformed},
      {"a block that is too long", [](Parts &p) { p.block(0, 1, 0).length = kFar; }, malformed},
      {"no repetitions", [](Parts &p) { p.block(0, 1, 0).count = 0; }, malformed},
      {"repetitions that overlap", [](Parts &p) { p.block(0, 1, 0) = {0, 0, 2, 2, 1, 2}; }, malformed},
      {"below zero", [](Parts &p) { p.block(0, 1, 0).from = -1; }, malformed},
      {"below zero on the other side", [](Parts &p) { p.block(0, 1, 0) = {0, 0, 1, 2, 1, -1}; }, malformed},
      {"too far", [](Parts &p) { p.block(0, 1, 0).from = kFar; }, malformed},
      {"too far by steps", [](Parts &p) { p.block(0, 1, 0) = {0, 0, 1, int64_t{1} << 40, int64_t{1} << 40, 1}; },
       malformed},
      {"too far by steps on the other side", [](Parts &p) { p.block(0, 1, 0) = {0, 0, 1, 3, 1, INT64_MAX}; },
       malformed},
      {"positions that coincide", [](Parts &p) { p.block(0, 1, 0) = {0, 0, 1, 2, 1, 0}; },
       "endpoint 'source' has a sharding that maps 2 positions to 1"},
      {"too few placements", [](Parts &p) { p.manifest.endpoints[0]->placement.clear(); },
       "endpoint 'source' has placements of index variables: found 0, expected 1"},
      {"no such placement", [](Parts &p) { p.manifest.endpoints[0]->placement[0] = 3; },
       "endpoint 'source' refers to sharding 3, expected fewer than 3"},

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
       "endpoint 'source' param 'weight{layer}' has a presence rule whose coordinates do not ascend"},
      {"no such name variable", [](Parts &p) { p.param(0).variables[0] = 1; },
       "endpoint 'source' param 'weight{layer}' refers to index variable 1, expected fewer than 1"},
      {"too few numbered", [](Parts &p) { p.param(0).instances.clear(); },
       "endpoint 'source' param 'weight{layer}' numbers its instances by index variables: found 0, expected 1"},
      {"no such numbering", [](Parts &p) { p.param(0).instances[0] = 3; },
       "endpoint 'source' param 'weight{layer}' refers to sharding 3, expected fewer than 3"},
      {"numbers with a gap", [](Parts &p) { p.block(0, 0, 0).to = 1; },
       "endpoint 'source' param 'weight{layer}' does not number its instances from 0 without gaps, one for each "
       "value"},
      {"numbers twice", [](Parts &p) { p.block(0, 0, 0) = {0, 1, 1, 2, 1, 0}; },
       "endpoint 'source' param 'weight{layer}' gives two index values the same instance"},
      {"values twice",
       [](Parts &p) {
         *p.manifest.endpoints[0]->shardings[0] = *sharding({}, {{{0, 0, 1, 1, 0, 0}, {0, 1, 1, 1, 0, 0}}});
       },
       "endpoint 'source' param 'weight{layer}' gives one index value two instances"},
      {"values that do not exist", [](Parts &p) { p.block(0, 0, 0).from = 1; },
       "endpoint 'source' param 'weight{layer}' does not number its instances from 0 without gaps, one for each "
       "value"},
      {"too many instances",
       [](Parts &p) {
         p.manifest.variables[0]->size = 4096;
         p.block(0, 0, 0).length = 4096;
         p.param(0).variables = {0, 0};
         p.param(0).instances = {0, 0};
       },
       "endpoint 'source' param 'weight{layer}' has more than 4194304 instances on a mesh rank"},
      {"no such param dtype", [](Parts &p) { p.param(0).dtype = DType(200); },
       "endpoint 'source' param 'weight{layer}' has the unknown dtype 200"},
      {"stored as an integer", [](Parts &p) { p.param(0).storage_dtype = DType::i16; },
       "endpoint 'source' param 'weight{layer}' has a storage dtype to which its elements cannot be cast, "
       "expected another float dtype of 32 bits or less, and no view"},
      {"stored in the dtype that is sent", [](Parts &p) { p.param(0).storage_dtype = p.param(0).dtype; },
       "endpoint 'source' param 'weight{layer}' has a storage dtype to which its elements cannot be cast, "
       "expected another float dtype of 32 bits or less, and no view"},
      {"no such overflow rule",
       [](Parts &p) {
         p.param(0).storage_dtype = DType::fp16;
         p.param(0).overflow = schema::OverflowRule(3);
       },
       "endpoint 'source' param 'weight{layer}' has the overflow rule 3, expected 0 to 2, only 0 without a storage "
       "dtype, and not 2 with fp8_e4m3, which has no infinity"},
      {"an overflow rule without a cast", [](Parts &p) { p.param(0).overflow = schema::OverflowRule::saturate; },
       "endpoint 'source' param 'weight{layer}' has the overflow rule 1, expected 0 to 2, only 0 without a storage "
       "dtype, and not 2 with fp8_e4m3, which has no infinity"},
      {"infinite fp8_e4m3",
       [](Parts &p) {
         p.param(0).storage_dtype = DType::fp8_e4m3;
         p.param(0).overflow = schema::OverflowRule::infinity;
       },
       "endpoint 'source' param 'weight{layer}' has the overflow rule 2, expected 0 to 2, only 0 without a storage "
       "dtype, and not 2 with fp8_e4m3, which has no infinity"},
      {"transformed and cast",
       [](Parts &p) {
         p.param(0).storage_dtype = DType::fp32;
         p.param(0).transform = "pack";
       },
       "endpoint 'source' param 'weight{layer}' has a transform, which a param in storage, with a storage "
       "dtype, with a view, or derived cannot have"},
      {"transformed in storage",
       [](Parts &p) {
         p.manifest.endpoints[0]->storage = true;
         p.param(0).transform = "pack";
       },
       "endpoint 'source' param 'weight{layer}' has a transform, which a param in storage, with a storage "
       "dtype, with a view, or derived cannot have"},
      {"lengths missing", [](Parts &p) { p.param(0).shape[1]->axes = {0}; },
       "endpoint 'source' param 'weight{layer}' has lengths in dimension 1: found 1, expected 2"},
      {"a negative length", [](Parts &p) { p.param(0).shape[1]->at[0] = -6; },
       "endpoint 'source' param 'weight{layer}' has the negative length -6 in dimension 1"},
      {"too large a param", [](Parts &p) { p.param(0).shape[1]->at[0] = kFar; },
       "endpoint 'source' param 'weight{layer}' has more than 1152921504606846976 bytes"},

      {"holds no such tensor", [](Parts &p) { p.param(0).parts[0]->pattern = 1; },
       "endpoint 'source' param 'weight{layer}' holds tensor 1, expected fewer than 1"},
      {"holds less than no tensor", [](Parts &p) { p.param(0).parts[0]->pattern = -2; },
       "endpoint 'source' param 'weight{layer}' holds tensor -2, expected fewer than 1"},
      {"of another dtype", [](Parts &p) { p.param(0).dtype = DType::fp16; },
       "endpoint 'source' param 'weight{layer}' has dtype fp16, expected bf16 as in tensor 'w{layer}'"},
      {"dimensions missing", [](Parts &p) { p.param(0).parts[0]->dimensions.pop_back(); },
       "endpoint 'source' param 'weight{layer}' has a part with dimensions: found 2, expected 3"},
      {"a dimension without a sharding", [](Parts &p) { p.dimension(0, 0, 1).sharding = 3; },
       "endpoint 'source' param 'weight{layer}' refers to sharding 3, expected fewer than 3"},
      {"beyond the tensor", [](Parts &p) { p.manifest.tensor_patterns[0]->shape[0] = 3; },
       "endpoint 'source' param 'weight{layer}' holds position 3 of dimension 1 of 'w{layer}', which has "
       "length 3"},
      {"in no dimension", [](Parts &p) { p.dimension(0, 0, 1).param = 2; },
       "endpoint 'source' param 'weight{layer}' has a tensor in its dimension 2, expected fewer than 2"},
      {"below any dimension", [](Parts &p) { p.dimension(0, 0, 1).param = -2; },
       "endpoint 'source' param 'weight{layer}' has a tensor in its dimension -2, expected fewer than 2"},
      {"a tensor's rows in the name", [](Parts &p) { p.dimension(0, 0, 1).param = -1; },
       "endpoint 'source' param 'weight{layer}' relates dimension 1 of a tensor to its name, which does not "
       "have that index variable"},
      {"beyond the param", [](Parts &p) { p.param(0).shape[0]->at[0] = 1; },
       "endpoint 'source' param 'weight{layer}' has a part that extends beyond the length of the param's "
       "dimension"},
      {"beyond the padding", [](Parts &p) { p.param(1).shape[1]->at[0] = 3; },
       "endpoint 'target' param 'w.{layer}' has a part that extends beyond the length of the param's "
       "dimension"},

      {"sums of positions that coincide",
       [](Parts &p) {
         p.param(0).shape[0]->at[0] = 7; // the last position is 1 + 5
         p.dimension(0, 0, 2).param = 0;
       },
       "endpoint 'source' param 'weight{layer}' has a part that extends beyond the length of the param's "
       "dimension"},

      {"a variable that no placeholder names", [](Parts &p) { p.manifest.variables[0]->name = "layer.local"; },
       "index variable 'layer.local' is empty or contains '{', '.' or '}', so no placeholder can name it"},
      {"a variable without a name", [](Parts &p) { p.manifest.variables[0]->name = ""; },
       "index variable '' is empty or contains '{', '.' or '}', so no placeholder can name it"},
      {"a variable twice",
       [](Parts &p) {
         p.manifest.variables.push_back(std::make_unique<VariableT>(*p.manifest.variables[0]));
         for (const auto &endpoint : p.manifest.endpoints)
           endpoint->placement.push_back(0);
       },
       "two index variables have the name 'layer'"},
      {"a tensor without its variable", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w"; },
       "tensor 'w' has index variable 'layer' missing in its name, expected '{layer}' once"},
      {"a tensor with its variable twice", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "{layer}w{layer}"; },
       "tensor '{layer}w{layer}' has '{layer}' in its name, expected only placeholders of its own index variables, "
       "each once"},
      {"a tensor's position", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w{layer.local}"; },
       "tensor 'w{layer.local}' has '{layer.local}' in its name, expected only placeholders of its own index "
       "variables, each once"},
      {"an empty placeholder", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w{layer}{}"; },
       "tensor 'w{layer}{}' has '{}' in its name, expected only placeholders of its own index variables, each once"},
      {"a placeholder without an end", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w{layer"; },
       "tensor 'w{layer' has '{layer' in its name, expected only placeholders of its own index variables, each once"},
      {"a variable of another pattern", [](Parts &p) { p.manifest.tensor_patterns[0]->name = "w{layer}{expert}"; },
       "tensor 'w{layer}{expert}' has '{expert}' in its name, expected only placeholders of its own index variables, "
       "each once"},
      {"a param without its variable", [](Parts &p) { p.param(0).name = "weight"; },
       "endpoint 'source' param 'weight' has index variable 'layer' missing in its name, expected '{layer}' or "
       "'{layer.local}' once"},
      {"a param with a chunk alone", [](Parts &p) { p.param(0).name = "weight{layer.chunk}"; },
       "endpoint 'source' param 'weight{layer.chunk}' has index variable 'layer' missing in its name, expected "
       "'{layer}' "
       "or '{layer.local}' once"},
      {"value and position", [](Parts &p) { p.param(0).name = "weight{layer}.{layer.local}"; },
       "endpoint 'source' param 'weight{layer}.{layer.local}' has index variable 'layer' twice in its name, expected "
       "'{layer}' or '{layer.local}' once"},
      {"positions that do not exist",
       [](Parts &p) {
         p.param(0).name = "weight{layer.local}";
         p.manifest.endpoints[0]->placement[0] = 3;
         p.manifest.endpoints[0]->shardings.push_back(sharding({}, {{{0, 0, 1, 1, 0, 0}}}));
       },
       "endpoint 'source' param 'weight{layer.local}' has '{layer.local}' in its name, which gives two of its "
       "instances the same name, or has no value for one"},
      {"positions in several chunks",
       [](Parts &p) {
         p.param(0).name = "weight{layer.local}";
         p.manifest.endpoints[0]->placement[0] = 3;
         p.manifest.endpoints[0]->shardings.push_back(sharding({}, {{{0, 0, 1, 2, 1, kChunkStride}}}));
       },
       "endpoint 'source' param 'weight{layer.local}' has '{layer.local}' in its name, which gives two of its "
       "instances the same name, or has no value for one"},
      {"two patterns with one name",
       [](Parts &p) {
         p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>(*p.manifest.tensor_patterns[0]));
       },
       "two tensors have the name 'w0'"},
      {"a tensor with the name of another",
       [](Parts &p) {
         p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>());
         p.manifest.tensor_patterns[1]->name = "w1";
       },
       "two tensors have the name 'w1'"},
      {"adjacent placeholders",
       [](Parts &p) {
         p.manifest.variables[0]->size = 12;
         TensorPatternT &pattern = addTensorPattern(p, "e{layer}{expert}");
         pattern.exists.push_back(sharding({}, {{{0, 0, 12, 1, 0, 0}}}));
         pattern.exists[0] = sharding({}, {{{0, 0, 12, 1, 0, 0}}});
       },
       "two tensors have the name 'e110'"},
      {"two params with one name",
       [](Parts &p) {
         p.manifest.endpoints[0]->params.push_back(std::make_unique<ParamT>(p.param(0)));
         p.param(0, 1).name = "weight{layer.local}";
       },
       "endpoint 'source' has two params with the name 'weight0' on rank 0"},
      {"two params with one name in a file",
       [](Parts &p) {
         p.manifest.endpoints[1]->storage = true;
         p.manifest.endpoints[1]->ranks = {0, 1};
         p.manifest.endpoints[1]->params.push_back(std::make_unique<ParamT>(p.param(1)));
         p.param(1, 1).name = "w.1";
         p.param(1, 1).variables.clear();
         p.param(1, 1).instances.clear();
         p.param(1, 1).parts.clear();
       },
       "endpoint 'target' has two params with the name 'w.1' on file 0"},
      {"stacked padding",
       [](Parts &p) {
         p.param(1).shape[1]->at[0] = 6;
         p.dimension(1, 1, 0).param = 1;
       },
       "endpoint 'target' param 'w.{layer}' stacks an index variable of padding, expected none"},
  };
  for (const Violation &violation : violations) {
    Parts parts = tinyParts();
    violation.alter(parts);
    EXPECT_EQ(checkManifest(*Read(parts.manifest)).message(), violation.message) << violation.what;
  }
}

TEST(Manifest, Allowed) {
  const std::vector<std::pair<const char *, std::function<void(Parts &)>>> changes = {
      {"nothing changed", [](Parts &) {}},
      {"numbers in another order", [](Parts &p) { p.block(0, 0, 0) = {0, 1, 1, 2, 1, -1}; }},
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
      {"positions in several chunks, with the chunk in the name",
       [](Parts &p) {
         p.param(0).name = "weight{layer.local}.{layer.chunk}";
         p.manifest.endpoints[0]->placement[0] = 3;
         p.manifest.endpoints[0]->shardings.push_back(sharding({}, {{{0, 0, 1, 2, 1, kChunkStride}}}));
       }},
      {"names that differ in a number only",
       [](Parts &p) {
         p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>());
         p.manifest.tensor_patterns[1]->name = "w2";
         p.manifest.tensor_patterns.push_back(std::make_unique<TensorPatternT>());
         p.manifest.tensor_patterns[2]->name = "w01";
       }},
      {"two params with one name on different ranks",
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
    EXPECT_EQ(checkManifest(*Read(parts.manifest)).message(), "") << what;
  }
}

// A few bytes can ask for very much work. The check must refuse that quickly.
TEST(Manifest, BoundedWork) {
  Parts parts = tinyParts();
  parts.manifest.variables[0]->size = uint64_t{1} << 50;
  parts.block(0, 0, 0).length = int64_t{1} << 50;
  EXPECT_EQ(checkManifest(*Read(parts.manifest)).message(),
            "endpoint 'source' param 'weight{layer}' does not number its instances from 0 without gaps, one for each "
            "value");

  parts = tinyParts();
  parts.manifest.variables[0]->size = 1 << 20;
  EndpointT &source = *parts.manifest.endpoints[0];
  source.axes[0]->size = 1000;
  source.shardings[1] = sharding({0}, std::vector<std::vector<schema::IndexBlock>>(1000, {{0, 0, 2, 1, 0, 0}}));
  source.shardings[0] = sharding({0}, std::vector<std::vector<schema::IndexBlock>>(1000, {{0, 0, 1 << 20, 1, 0, 0}}));
  EXPECT_EQ(checkManifest(*Read(parts.manifest)).message(), kTooMuch);
}
