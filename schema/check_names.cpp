// SPDX-License-Identifier: Apache-2.0
// Groups the names of params by their skeletons, the names without numbers: only names with equal skeletons can be
// equal. These are compared on each mesh rank whose placements differ.
#include "schema/checks.h"

#include "schema/flatbuffer_vectors.h"
#include "schema/manifest.h"

#include <algorithm>
#include <compare>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace reshard::schema {
namespace {

constexpr int64_t kNameWork =
    64; // cost of building and looking up a name, in iterations of checkManifest's other loops
constexpr char kDigits = '\1';

/// A name with placeholders. Its skeleton has kDigits in place of consecutive digits and placeholders. Placeholders are
/// replaced by digits, so equal names have equal skeletons.
struct PlaceholderName {
  std::string skeleton;
  bool literal = true;                   // no placeholder
  bool touching = false;                 // adjacent placeholders: {a}{b} is 111 both for 1, 11 and for 11, 1
  std::vector<bool> value, local, chunk; // by variable of the owner: whether it contains {x}, {x.local}, {x.chunk}
};

class NameCheck {
public:
  NameCheck(const Manifest &manifest, int64_t &work, int64_t most) : manifest_(manifest), work_(work), most_(most) {}

  Status run() {
    if (variables() && tensors())
      for (uint32_t e = 0; e < manifest_.endpoints()->size() && params(*manifest_.endpoints()->Get(e)); ++e) {
      }
    return error_;
  }

private:
  bool fail(std::string text) {
    error_ = badPlan(std::move(text));
    return false;
  }
  bool spend(int64_t work) {
    work_ += work;
    return work_ <= most_ || fail(kTooMuch);
  }
  std::string variableName(uint32_t number) const { return manifest_.variables()->Get(number)->name()->str(); }

  bool variables() {
    std::unordered_set<std::string> names;
    for (uint32_t v = 0; v < sizeOf(manifest_.variables()); ++v) {
      const std::string name = variableName(v);
      if (name.empty() || name.find_first_of("{.}") != std::string::npos)
        return fail("index variable '" + name +
                    "' is empty or contains '{', '.' or '}', so no placeholder can name it");
      if (!names.insert(name).second)
        return fail("two index variables have the name '" + name + "'");
    }
    return true;
  }

  /// Parses a name. It must contain each variable once, as {x} or, if `positions`, as {x.local}; with `positions` it
  /// may also contain {x.chunk}.
  bool read(const std::string &name, const flatbuffers::Vector<uint32_t> *variables, bool positions,
            const std::string &owner, PlaceholderName &namePattern) {
    const size_t count = sizeOf(variables);
    namePattern.value.assign(count, false);
    namePattern.local = namePattern.chunk = namePattern.value;
    bool inDigits = false, placeholderInDigits = false;
    for (size_t i = 0; i < name.size(); ++i) {
      const char c = name[i];
      if (c != '{' && (c < '0' || c > '9')) {
        inDigits = placeholderInDigits = false;
        namePattern.skeleton += c;
        continue;
      }
      if (!inDigits)
        namePattern.skeleton += kDigits;
      inDigits = true;
      if (c != '{')
        continue;
      namePattern.literal = false;
      namePattern.touching = namePattern.touching || placeholderInDigits;
      placeholderInDigits = true;
      const size_t end = std::min(name.find('}', i), name.size());
      const std::string inside = name.substr(i + 1, end - i - 1);
      bool known = false;
      for (size_t v = 0; v < count && end < name.size(); ++v) {
        const std::string variable = variableName(variables->Get(v));
        auto is = [&](std::vector<bool> &found, const std::string &text) {
          if (inside != text)
            return;
          known = !found[v];
          found[v] = true;
        };
        is(namePattern.value, variable);
        if (positions) {
          is(namePattern.local, variable + ".local");
          is(namePattern.chunk, variable + ".chunk");
        }
        if (known)
          break;
      }
      if (!known)
        return fail(owner + " has '" + name.substr(i, end - i + 1) +
                    "' in its name, expected only placeholders of its own index variables, each once");
      i = end;
    }
    for (size_t v = 0; v < count; ++v)
      if (const std::string variable = variableName(variables->Get(v)); namePattern.value[v] == namePattern.local[v])
        return fail(owner + " has index variable '" + variable + "' " + (namePattern.value[v] ? "twice" : "missing") +
                    " in its name, expected '{" + variable + "}'" +
                    (positions ? " or '{" + variable + ".local}'" : "") + " once");
    return true;
  }

  // ------------------------------------------------------------------------------------------------- possible
  // conflicts

  /// Groups of owners whose names may be equal: owners with equal skeletons, or with equal names if none of the group
  /// has a placeholder.
  class Groups {
  public:
    void add(uint32_t owner, std::string_view name, PlaceholderName namePattern) {
      groups_[std::move(namePattern.skeleton)].push_back({owner, name, namePattern.literal, namePattern.touching});
    }

    /// Calls visit(owners) for each group in which two names may be equal. Stops if visit returns false.
    bool forEach(const std::function<bool(const std::vector<uint32_t> &)> &visit) const {
      for (const auto &[skeleton, members] : groups_) {
        std::map<std::string_view, std::vector<uint32_t>> lists;
        const bool literal =
            std::all_of(members.begin(), members.end(), [](const Member &member) { return member.literal; });
        const bool touching =
            std::any_of(members.begin(), members.end(), [](const Member &member) { return member.touching; });
        for (const Member &member : members)
          lists[literal ? member.name : std::string_view()].push_back(member.owner);
        for (const auto &[name, owners] : lists)
          if ((owners.size() > 1 || touching) && !visit(owners))
            return false;
      }
      return true;
    }

  private:
    struct Member {
      uint32_t owner;
      std::string_view name;
      bool literal, touching;
    };
    std::unordered_map<std::string, std::vector<Member>> groups_;
  };

  bool tensors() {
    Groups groups;
    for (uint32_t f = 0; f < sizeOf(manifest_.tensor_patterns()); ++f) {
      const TensorPattern &pattern = *manifest_.tensor_patterns()->Get(f);
      PlaceholderName namePattern;
      if (!read(pattern.name()->str(), pattern.variables(), false, "tensor '" + pattern.name()->str() + "'",
                namePattern))
        return false;
      groups.add(f, pattern.name()->string_view(), std::move(namePattern));
    }
    return groups.forEach([&](const std::vector<uint32_t> &tensorPatterns) {
      std::unordered_set<std::string> names;
      return std::all_of(tensorPatterns.begin(), tensorPatterns.end(),
                         [&](uint32_t f) { return tensorNames(*manifest_.tensor_patterns()->Get(f), names); });
    });
  }

  /// Adds the names of all tensors of a pattern; fails if one is already in `names`.
  bool tensorNames(const TensorPattern &pattern, std::unordered_set<std::string> &names) {
    std::vector<std::vector<int64_t>> values(sizeOf(pattern.variables()));
    __int128 count = 1;
    for (size_t v = 0; v < values.size(); ++v) {
      int64_t size = 0;
      for (const IndexBlock *block : *pattern.exists()->Get(v)->blocks())
        size += block->length() * block->count();
      if (!spend(size))
        return false;
      for (const IndexBlock *block : *pattern.exists()->Get(v)->blocks())
        for (int64_t repetition = 0; repetition < block->count(); ++repetition)
          for (int64_t k = 0; k < block->length(); ++k)
            values[v].push_back(block->from() + repetition * block->from_step() + k);
      count *= size;
      if (count > most_)
        return spend(most_ + 1 - work_);
    }
    if (!spend(static_cast<int64_t>(count) * kNameWork))
      return false;
    std::vector<int64_t> at(values.size());
    for (int64_t n = 0; n < count; ++n) {
      int64_t rest = n;
      for (size_t v = values.size(); v-- > 0; rest /= static_cast<int64_t>(values[v].size()))
        at[v] = values[v][static_cast<size_t>(rest) % values[v].size()];
      if (const auto [name, added] = names.insert(tensorName(manifest_, pattern, at)); !added)
        return fail("two tensors have the name '" + *name + "'");
    }
    return true;
  }

  // --------------------------------------------------------------------------------------------------------- params

  bool params(const Endpoint &endpoint) {
    const std::string role = "endpoint '" + endpoint.role()->str() + "'";
    Groups groups;
    positions_.clear();
    lookedUp_.clear();
    for (uint32_t p = 0; p < sizeOf(endpoint.params()); ++p) {
      const Param &param = *endpoint.params()->Get(p);
      const std::string name = role + " param '" + param.name()->str() + "'";
      if (!stacks(param, name))
        return false;
      if (param.view()) { // has no name of its own
        if (!amaxNames(endpoint, param, name))
          return false;
        continue;
      }
      PlaceholderName namePattern;
      if (!read(param.name()->str(), param.variables(), true, name, namePattern) ||
          !positions(endpoint, param, namePattern, name))
        return false;
      groups.add(p, param.name()->string_view(), std::move(namePattern));
    }
    return groups.forEach([&](const std::vector<uint32_t> &owners) { return paramNames(endpoint, owners, role); });
  }

  /// The name of an amax tensor must begin with the name of its base tensor: the tools find the base tensor by it.
  bool amaxNames(const Endpoint &endpoint, const Param &param, const std::string &name) {
    const QuantizedView &view = *param.view();
    if (view.kind() != ViewKind::amax || &endpoint != manifest_.endpoints()->Get(0))
      return true;
    const TensorPattern &of = *manifest_.tensor_patterns()->Get(
        static_cast<uint32_t>(endpoint.params()->Get(view.codes())->parts()->Get(view.part())->pattern()));
    for (uint32_t i = 0; i < sizeOf(param.parts()); ++i) {
      const int32_t number = param.parts()->Get(i)->pattern();
      if (number < 0)
        continue;
      const TensorPattern &pattern = *manifest_.tensor_patterns()->Get(static_cast<uint32_t>(number));
      if (!pattern.name()->str().starts_with(of.name()->str()))
        return fail(name + " holds the amax tensor '" + pattern.name()->str() +
                    "', expected a name that begins with '" + of.name()->str() + "', its base tensor");
    }
    return true;
  }

  /// An index variable of a tensor that is not in the param's name is stacked: it is a dimension of the param. Padding
  /// has no stacked variable.
  bool stacks(const Param &param, const std::string &name) {
    for (size_t i = 0; i < sizeOf(param.parts()); ++i) {
      const Part &part = *param.parts()->Get(i);
      for (size_t d = 0; part.pattern() < 0 && d < sizeOf(param.variables()); ++d)
        if (part.dimensions()->Get(d)->param() >= 0)
          return fail(name + " stacks an index variable of padding, expected none");
    }
    return true;
  }

  /// The positions that replace {x.local} must exist and differ: within each chunk if the name contains {x.chunk}, else
  /// over all chunks.
  bool positions(const Endpoint &endpoint, const Param &param, const PlaceholderName &namePattern,
                 const std::string &name) {
    for (size_t v = 0; v < namePattern.local.size(); ++v) {
      const uint32_t variable = param.variables()->Get(v), sharding = param.instances()->Get(v);
      if (lookedUp_.emplace(sharding, variable).second &&
          !lookUps(*endpoint.shardings()->Get(sharding),
                   *endpoint.shardings()->Get(endpoint.placement()->Get(variable))))
        return false;
      if (!namePattern.local[v])
        continue;
      const PositionsOf key{.sharding = sharding, .variable = variable, .chunk = namePattern.chunk[v]};
      const auto [known, added] = positions_.try_emplace(key, true);
      if (added && !distinctPositions(endpoint, key, nullptr, known->second))
        return false;
      bool good = known->second;
      // The mesh ranks with equal positions may not have the param.
      if (!good && !distinctPositions(endpoint, key, &param, good))
        return false;
      if (!good)
        return fail(name + " has '{" + variableName(variable) +
                    ".local}' in its name, which gives two of its instances the same name, or has no value for one");
    }
    return true;
  }

  /// Naming the instances of a mesh rank looks up each value among the index blocks of its variable's placement.
  bool lookUps(const Sharding &values, const Sharding &placement) {
    int64_t most = 0, longest = 0;
    const IndexBlock *list = reinterpret_cast<const IndexBlock *>(values.blocks()->Data());
    for (uint32_t c = 0; c + 1 < values.first()->size(); ++c)
      most = std::max(most, IndexMap{list + values.first()->Get(c), list + values.first()->Get(c + 1)}.size());
    for (uint32_t c = 0; c + 1 < placement.first()->size(); ++c)
      longest = std::max(longest, int64_t{placement.first()->Get(c + 1)} - placement.first()->Get(c));
    return spend(most * longest);
  }

  /// The positions of the values of a variable, as names contain them.
  struct PositionsOf {
    uint32_t sharding, variable;
    bool chunk; // whether the names contain {x.chunk}
    auto operator<=>(const PositionsOf &) const = default;
  };

  /// Sets `good` to whether positions exist and differ on each mesh rank (if `param` is given: where the rank has it).
  bool distinctPositions(const Endpoint &endpoint, const PositionsOf &of, const Param *param, bool &good) {
    const Sharding &values = *endpoint.shardings()->Get(of.sharding),
                   &placement = *endpoint.shardings()->Get(endpoint.placement()->Get(of.variable));
    std::set<std::pair<int64_t, int64_t>> seen; // coordinates
    const int64_t meshRanks = static_cast<int64_t>(endpoint.ranks()->size());
    if (!spend(meshRanks))
      return false;
    good = true;
    for (int64_t meshRank = 0; meshRank < meshRanks && good; ++meshRank) {
      if ((param && instanceCount(endpoint, *param, meshRank) == 0) ||
          !seen.emplace(coordinate(endpoint, values.axes(), meshRank), coordinate(endpoint, placement.axes(), meshRank))
               .second)
        continue;
      const IndexMap here = indexMap(endpoint, values, meshRank), placed = indexMap(endpoint, placement, meshRank);
      if (!spend(here.size() * (1 + (placed.end - placed.begin))))
        return false;
      std::vector<int64_t> numbers;
      for (const IndexBlock *block = here.begin; block != here.end && good; ++block)
        for (int64_t repetition = 0; repetition < block->count() && good; ++repetition)
          for (int64_t k = 0; k < block->length() && good; ++k) {
            const std::optional<int64_t> position = placed.map(block->from() + repetition * block->from_step() + k);
            good = position.has_value();
            numbers.push_back(of.chunk ? position.value_or(0) : position.value_or(0) % kChunkStride);
          }
      std::sort(numbers.begin(), numbers.end());
      good = good && std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end();
    }
    return true;
  }

  /// Compares the names of these params on each mesh rank. Mesh ranks with the same coordinates on all relevant axes
  /// have the same names, so one of them is checked.
  bool paramNames(const Endpoint &endpoint, const std::vector<uint32_t> &owners, const std::string &role) {
    std::set<uint32_t> axes;
    auto depend = [&](uint32_t sharding) {
      for (size_t i = 0; i < sizeOf(endpoint.shardings()->Get(sharding)->axes()); ++i)
        axes.insert(endpoint.shardings()->Get(sharding)->axes()->Get(i));
    };
    for (const uint32_t p : owners) {
      const Param &param = *endpoint.params()->Get(p);
      for (size_t i = 0; i < sizeOf(param.presence()); ++i)
        axes.insert(param.presence()->Get(i)->axis());
      for (size_t v = 0; v < sizeOf(param.variables()); ++v) {
        depend(param.instances()->Get(v));
        depend(endpoint.placement()->Get(param.variables()->Get(v)));
      }
    }
    std::set<std::vector<uint64_t>> seen;
    for (uint64_t meshRank = 0; meshRank < endpoint.ranks()->size(); ++meshRank) {
      std::vector<uint64_t> coordinates;
      coordinates.reserve(axes.size());
      for (const uint32_t axis : axes)
        coordinates.push_back(meshRank / endpoint.axes()->Get(axis)->stride() % endpoint.axes()->Get(axis)->size());
      if (!spend(1 + static_cast<int64_t>(axes.size())))
        return false;
      if (!seen.insert(std::move(coordinates)).second)
        continue;
      std::unordered_set<std::string> names;
      for (const uint32_t p : owners) {
        if (!spend((1 + instanceCount(endpoint, *endpoint.params()->Get(p), static_cast<int64_t>(meshRank))) *
                   kNameWork))
          return false;
        for (ParamInstance &instance : instances(manifest_, endpoint, p, static_cast<int64_t>(meshRank)))
          if (const auto [name, added] = names.insert(std::move(instance.name)); !added)
            return fail(role + " has two params with the name '" + *name + "' on " +
                        meshRankText(endpoint, endpoint.ranks()->Get(static_cast<uint32_t>(meshRank))));
      }
    }
    return true;
  }

  const Manifest &manifest_;
  int64_t &work_;
  const int64_t most_;
  std::map<PositionsOf, bool> positions_;            // whether they differ on every mesh rank
  std::set<std::pair<uint32_t, uint32_t>> lookedUp_; // (sharding, variable)
  Status error_;
};

} // namespace

Status checkNames(const Manifest &manifest, int64_t &work, int64_t most) {
  return NameCheck(manifest, work, most).run();
}

} // namespace reshard::schema
