// One endpoint's ground: its axes, what expressions may name, its index variables' values by place, its table of
// shares.
#pragma once

#include "compiler/frontend/frontend.h"
#include "compiler/resolve/interner.h"
#include "compiler/resolve/pipelines.h"

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace reshard {

/// A ShardRule with its axes found and its expressions evaluated.
struct ResolvedRule {
  std::vector<unsigned> axes;     // into Endpoint::axes, outermost first; those of size 1 are left out
  int64_t ranks = 1;              // product of their sizes
  std::vector<std::string> names; // all of them, as written
  Scheme scheme;
  Pipeline pipeline; // of an index variable
  std::string over;  // the axes as written, for messages: "tp", "[dp, tp]"
  Location at;       // of the scheme where it is written, else of the rule
};

class EndpointContext {
public:
  /// Fills axes, ranks and placement of `endpoint`, whose shares and params are added through this.
  EndpointContext(const Job &job, const EndpointDeclaration &declaration, const Allowed &allowed,
                  ir::Endpoint &endpoint, Diagnostics &diagnostics);

  /// `let` names, sizes of known axes (an axis that the mesh lacks has size 1) and the layout's switches.
  const Environment &names() const { return names_; }

  /// Whether this is the source's side.
  bool source() const { return declaration_.role == "source"; }

  /// Whether a rule is there: it has no `when`, or one that is not 0.
  bool applies(const ShardRule &rule) const;

  /// The number of an axis, or -1 for a known one that the mesh lacks (its size is 1). Empty after an error.
  std::optional<int> axis(const std::string &name, Location at) const;

  /// What `at` or `authority` says, onto `presence`: rules that keep places out, coordinates sorted. False after
  /// errors.
  bool coordinates(const AxisRules &rules, std::vector<ir::Presence> &presence) const;

  /// The coordinates that a rule of `at` or `authority` says of an axis of that size, ascending. Empty after an error.
  std::optional<std::vector<int64_t>> coordinates(const std::string &axis, const AxisCoordinates &rule,
                                                  int64_t size) const;

  /// Empty after errors. `noun` is what messages call the things shared out.
  std::optional<ResolvedRule> rule(const ShardRule &rule, const std::string &noun) const;

  /// The number of an equal share, known or new. Shares that are the same everywhere depend on no axis.
  unsigned intern(ir::Sharding sharding);

  /// The values of an index variable by place: the rule's axes, and value -> slot in the order of the rule.
  struct VariablePlacement {
    bool hasRule = false; // false: every place has all values
    ResolvedRule rule;
    DimensionShards shards;
    std::vector<ir::IndexMap> local; // by rank: value -> position, ascending, by chunks (ir::kChunk)
    int64_t chunks = 1;              // of a rank
  };
  const VariablePlacement &placement(unsigned variable) const { return placements_[variable]; }

  /// The chunks of a rank, where it has several and the layout makes them modules of their own (`chunks`).
  struct ModelChunks {
    ChunkNames names;
    std::string axis; // of the variable's rule
    int64_t ranks = 1, chunks = 1;
  };
  const std::optional<ModelChunks> &modelChunks() const { return modelChunks_; }

  /// The share value -> instance of a variable in a name, for those values for which a tensor exists: dense, ascending.
  unsigned instanceSharding(unsigned variable, const ir::IndexMap &exists);

private:
  void readAxes(const Job &job);
  void addNames(const Job &job);
  void placeVariable(const Job &job, unsigned variable);
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
