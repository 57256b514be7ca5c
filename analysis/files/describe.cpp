#include "analysis/files/describe.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

namespace reshard::analysis {

namespace {

/// A tensor name split at its numbers. A number is a component between dots, or the suffix of weightN and biasN.
struct Name {
  std::string pattern;                // with {variable}
  std::vector<std::string> variables; // one for each number in the name
  std::vector<int64_t> values;
};

bool digits(const std::string &text) {
  return !text.empty() && text.size() < 7 && text.find_first_not_of("0123456789") == std::string::npos &&
         (text.size() == 1 || text[0] != '0');
}

/// "layers" -> "layer", "h" -> "h", "local_experts" -> "expert"; if the name is taken, a number is appended.
std::string variableOf(std::string part, const std::vector<std::string> &taken) {
  part.erase(std::remove_if(part.begin(), part.end(),
                            [](char c) { return !std::isalnum(static_cast<unsigned char>(c)) && c != '_'; }),
             part.end());
  if (part.starts_with("local_"))
    part.erase(0, 6);
  if (part.size() > 1 && part.ends_with('s'))
    part.pop_back();
  if (part.empty() || std::isdigit(static_cast<unsigned char>(part[0])))
    part = "index";
  std::string name = part;
  for (int n = 2; std::find(taken.begin(), taken.end(), name) != taken.end(); ++n)
    name = part + std::to_string(n);
  return name;
}

Name read(const std::string &text) {
  Name name;
  std::string before;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find('.', at), text.size());
    std::string part = text.substr(at, end - at);
    if (at > 0)
      name.pattern += '.';
    const size_t stem = part.starts_with("weight") ? 6 : part.starts_with("bias") ? 4 : 0;
    if (const std::string number = part.substr(stem); (at > 0 || stem > 0) && digits(number)) {
      const std::string variable = variableOf(stem > 0 ? part.substr(0, stem) : before, name.variables);
      name.pattern += part.substr(0, stem) + "{" + variable + "}";
      name.variables.push_back(variable);
      name.values.push_back(std::stoll(number));
    } else {
      name.pattern += part;
    }
    before = part;
    at = end + 1;
  }
  return name;
}

/// "0..3", "[0, 2..5]".
std::string ranges(const std::set<int64_t> &values) {
  std::string text;
  int runs = 0;
  for (auto at = values.begin(); at != values.end();) {
    const int64_t first = *at;
    int64_t last = first;
    while (++at != values.end() && *at == last + 1)
      ++last;
    text += (runs++ ? ", " : "") + std::to_string(first) + (last > first ? ".." + std::to_string(last) : "");
  }
  return runs == 1 ? text : "[" + text + "]";
}

std::string shapeText(const std::vector<int64_t> &shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d)
    text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

/// In double quotes, with control characters escaped.
std::string quoted(const std::string &text) {
  std::string result = "\"";
  for (char c : text) {
    char escaped[5] = {};
    if (static_cast<unsigned char>(c) < ' ' || c == 127)
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned>(c));
    result += escaped[0] ? escaped : c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  }
  return result + "\"";
}

/// A YAML key in block style, quoted if YAML would read it as something else.
std::string key(const std::string &name) {
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-' || c == '{' || c == '}' ||
           c == '/';
  });
  return plain && std::isalpha(static_cast<unsigned char>(name[0])) ? name : quoted(name);
}

/// Tensors of one pattern, shape and dtype.
struct Group {
  std::vector<std::string> names;
  std::vector<std::vector<int64_t>> values;
};

} // namespace

std::string describeModel(const TensorViews &tensors, const std::string &origin, const std::string &config) {
  using Key = std::pair<std::vector<int64_t>, schema::DType>;
  std::map<std::string, std::map<Key, Group>> patterns;
  std::map<std::string, std::vector<std::string>> variables; // of each pattern
  std::map<schema::DType, int64_t> dtypes;                   // tensors
  for (const auto &[name, view] : tensors) {
    Name parts = read(name);
    Group &group = patterns[parts.pattern][{view.shape, view.dtype}];
    group.names.push_back(name);
    group.values.push_back(parts.values);
    variables[parts.pattern] = parts.variables;
    ++dtypes[view.dtype];
  }
  const auto usual =
      std::max_element(dtypes.begin(), dtypes.end(), [](const auto &a, const auto &b) { return a.second < b.second; });

  // The largest group of a pattern becomes the tensor pattern if its index values form a product of sets; all other
  // tensors get a line each.
  struct Line {
    std::string name;
    Key key;
    std::vector<std::set<int64_t>> where; // by variable of the pattern
  };
  std::vector<Line> lines;
  std::map<std::string, int64_t> sizes;
  for (const auto &[pattern, groups] : patterns) {
    const auto mostNames = std::max_element(groups.begin(), groups.end(), [](const auto &a, const auto &b) {
      return a.second.names.size() < b.second.names.size();
    });
    for (const auto &[each, group] : groups) {
      std::vector<std::set<int64_t>> sets(variables[pattern].size());
      for (const auto &values : group.values)
        for (size_t v = 0; v < values.size(); ++v)
          sets[v].insert(values[v]);
      size_t product = 1;
      for (const auto &set : sets)
        product *= set.size();
      if (&group == &mostNames->second && product == group.names.size()) {
        for (size_t v = 0; v < sets.size(); ++v)
          sizes[variables[pattern][v]] = std::max(sizes[variables[pattern][v]], *sets[v].rbegin() + 1);
        lines.push_back({pattern, each, std::move(sets)});
      } else {
        for (const std::string &name : group.names)
          lines.push_back({name, each, {}});
      }
    }
  }

  std::string text = "# From the headers of " + quoted(origin) + ": " + std::to_string(tensors.size()) +
                     " tensors. Next steps: name the dimensions with `let`, and add `layouts` for other frameworks.\n";
  if (!config.empty())
    text += "config: " + quoted(config) + "\n";
  text += std::string("dtype: ") + (dtypes.empty() ? "bf16" : schema::dtypeName(usual->first)) + "\n";
  std::string index;
  for (const auto &[variable, size] : sizes)
    index += (index.empty() ? "" : ", ") + variable + ": " + std::to_string(size);
  if (!index.empty())
    text += "index: {" + index + "}\n";
  text += "tensors:\n";
  for (const Line &line : lines) {
    std::string where;
    for (size_t v = 0; v < line.where.size(); ++v) {
      const std::string &variable = variables[line.name][v];
      if (static_cast<int64_t>(line.where[v].size()) != sizes[variable])
        where += (where.empty() ? "" : ", ") + variable + ": " + ranges(line.where[v]);
    }
    const bool dtype = line.key.second != usual->first;
    text += "  " + key(line.name) + ": ";
    if (where.empty() && !dtype)
      text += shapeText(line.key.first);
    else
      text += "{shape: " + shapeText(line.key.first) +
              (dtype ? std::string(", dtype: ") + schema::dtypeName(line.key.second) : "") +
              (where.empty() ? "" : ", where: {" + where + "}") + "}";
    text += "\n";
  }
  return text;
}

} // namespace reshard::analysis
