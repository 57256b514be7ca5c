// SPDX-License-Identifier: Apache-2.0
// The context in which an endpoint's params are resolved: its axes, the names in expressions, the values of index
// variables on each mesh rank, and its table of shardings.
#pragma once

#include "compiler/frontend/frontend.h"
#include "compiler/resolve/interner.h"
#include "compiler/resolve/schemes.h"

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace reshard {

/// A rule's pipeline keys, evaluated.
struct Pipeline {
  int64_t interleave = 1; // model chunks of a rank
  std::optional<int64_t> first, last;
  std::optional<int64_t> embedding, loss;
  std::optional<std::vector<int64_t>> stages; // values of each virtual rank; a rank has stages / ranks model chunks
  std::string key = "stages";                 // the key that states `stages`: "stages" or "pattern"

  /// Whether the rule has no pipeline keys.
  bool plain() const { return interleave == 1 && !first && !last && !embedding && !loss && !stages; }
};

/// Values distributed over ranks in model chunks.
struct PipelineShards {
  DimensionShards shards;          // value -> slot on the rank, model chunk after model chunk
  std::vector<ir::IndexMap> local; // by rank: value -> model chunk * kModelChunkStride + ascending position in it
  int64_t modelChunks = 1;         // for each rank
};

/// Applies a scheme and a pipeline to n values over `ranks` ranks.
llvm::Expected<PipelineShards> applyPipeline(Scheme scheme, Pipeline pipeline, int64_t n, int64_t ranks);

/// A ShardRule with its axes found and its expressions evaluated.
struct ResolvedRule {
  std::vector<unsigned> axes;     // into Endpoint::axes, outermost first, without axes of size 1
  int64_t ranks = 1;              // product of their sizes
  std::vector<std::string> names; // all axes, as written
  Scheme scheme;
  Pipeline pipeline; // only for an index variable
  std::string over;  // the axes as written, for messages: "tp", "[dp, tp]"
  Location at;       // the location of the scheme if it is stated, else of the rule
};

class EndpointContext {
public:
  /// Fills axes, ranks, authority and placement of `endpoint`. Its shardings are added by `intern` only.
  EndpointContext(const Job &job, const EndpointDeclaration &declaration, const Allowed &allowed,
                  ir::Endpoint &endpoint, Diagnostics &diagnostics);

  const EndpointDeclaration &declaration() const { return declaration_; }
  ir::Endpoint &endpoint() { return endpoint_; }

  /// The names in expressions: `let` names, sizes of axes (1 if the mesh lacks it) and the layout's switches.
  const Environment &names() const { return names_; }

  /// Whether the endpoint is the source.
  bool source() const { return declaration_.role == "source"; }

  /// Whether a rule applies: it has no `when`, or one that is not 0.
  bool applies(const ShardRule &rule) const;

  /// The number of an axis, or -1 for a known axis that the mesh lacks (its size is 1). Nothing after an error.
  std::optional<int> axis(const std::string &name, Location at) const;

  /// Appends the presence rules of `at` or `authority` that exclude mesh ranks, with sorted coordinates. False after
  /// errors.
  bool coordinates(const AxisRules &rules, std::vector<ir::Presence> &presence) const;

  /// The coordinates that a rule of `at` or `authority` states for an axis of that size, ascending. Nothing after an
  /// error.
  std::optional<std::vector<int64_t>> coordinates(const std::string &axis, const AxisCoordinates &rule,
                                                  int64_t size) const;

  /// Resolves a rule. `noun` ("row", "value") is used in messages. Nothing after errors.
  std::optional<ResolvedRule> rule(const ShardRule &rule, const std::string &noun) const;

  /// The number of a sharding in the endpoint's table, new or of an equal one. A sharding with the same positions at
  /// all coordinates is stored without axes.
  unsigned intern(ir::Sharding sharding);

  /// The placement of an index variable: the rule's axes, and value -> slot in the order of the rule.
  struct VariablePlacement {
    bool hasRule = false; // false: every mesh rank has all values
    ResolvedRule rule;
    DimensionShards shards;
    std::vector<ir::IndexMap> local; // by rank: value -> model chunk * kModelChunkStride + position
    int64_t modelChunks = 1;         // for each rank
  };
  const VariablePlacement &placement(unsigned variable) const { return placements_[variable]; }

  /// The model chunks of a rank, which the layout's `chunks` turns into separate modules. Nothing if a rank has one.
  struct ModelChunks {
    ModelChunkNames names;
    std::string axis;             // the axis of the variable's rule
    int64_t ranks = 1, count = 1; // `count`: the model chunks of a rank
  };
  const std::optional<ModelChunks> &modelChunks() const { return modelChunks_; }

  /// The sharding value -> instance of a variable in a name, for the values in `exists`: dense and ascending.
  unsigned instanceSharding(unsigned variable, const ir::IndexMap &exists);

private:
  void readAxes(const Job &job);
  void addNames(const Job &job);
  void placeVariable(const Job &job, unsigned variable);
  void applyRule(const ir::IndexVariable &variable, ResolvedRule rule, VariablePlacement &placement);
  bool readPipeline(const ShardRule &rule, Pipeline &pipeline) const;
  void readModelChunks(const Job &job);

  const EndpointDeclaration &declaration_;
  const Allowed &allowed_;
  ir::Endpoint &endpoint_;
  Diagnostics &diagnostics_;
  bool listed_ = false;            // the layout lists its axes
  std::vector<std::string> known_; // axes that rules may use
  Environment names_;
  std::vector<VariablePlacement> placements_; // by index variable
  std::optional<ModelChunks> modelChunks_;
  std::unordered_multimap<size_t, unsigned> shardings_;                                  // by hash
  std::vector<std::unordered_map<ir::IndexMap, unsigned, ValueHash>> instanceShardings_; // by variable
};

} // namespace reshard
