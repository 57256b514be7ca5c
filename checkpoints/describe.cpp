// SPDX-License-Identifier: Apache-2.0
// Splits the names of tensors at their numbers. Names that differ in numbers only form a pattern; tensors of a pattern
// with equal shapes and dtypes become one line with index variables, if their numbers form a product of sets.
#include "checkpoints/describe.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

namespace reshard::checkpoints {

namespace {

constexpr size_t kMaxVariables = 8; // the numbers of a name that become variables; further ones stay as they are

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
    if (const std::string number = part.substr(stem);
        (at > 0 || stem > 0) && digits(number) && name.variables.size() < kMaxVariables) {
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
    for (++at; at != values.end() && *at == last + 1; ++at)
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
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const unsigned next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    char escaped[5] = {};
    if (static_cast<unsigned char>(c) < ' ' || c == 127)
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned>(c));
    else if (c == '\xc2' && next >= 0x80 && next < 0xa0) { // UTF-8 of U+0080 to U+009F
      std::snprintf(escaped, sizeof escaped, "\\x%02x", next);
      ++i;
    }
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
  const bool text = name != "null" && name != "Null" && name != "NULL"; // YAML reads these as nothing
  return plain && text && std::isalpha(static_cast<unsigned char>(name[0])) ? name : quoted(name);
}

using ShapeAndType = std::pair<std::vector<int64_t>, schema::DType>;

/// Tensors of one pattern, shape and dtype.
struct TensorGroup {
  std::vector<std::string> names;
  std::vector<std::vector<int64_t>> values; // by tensor: the values of the pattern's variables
};

/// All tensors whose names differ in numbers only.
struct Pattern {
  std::vector<std::string> variables;
  std::map<ShapeAndType, TensorGroup> groups;
};

/// A line of `tensors`.
struct Line {
  std::string name; // with index variables
  ShapeAndType type;
  std::vector<std::string> variables;
  std::vector<std::set<int64_t>> values; // by variable
};

/// The values of each variable in a group of tensors.
std::vector<std::set<int64_t>> valuesOf(const TensorGroup &group, size_t variables) {
  std::vector<std::set<int64_t>> sets(variables);
  for (const auto &values : group.values)
    for (size_t v = 0; v < values.size(); ++v)
      sets[v].insert(values[v]);
  return sets;
}

/// The largest group of a pattern becomes a tensor pattern if its index values form a product of sets; all other
/// tensors get a line each.
void addLines(const std::string &name, const Pattern &pattern, std::vector<Line> &lines) {
  const auto most = std::max_element(pattern.groups.begin(), pattern.groups.end(), [](const auto &a, const auto &b) {
    return a.second.names.size() < b.second.names.size();
  });
  for (const auto &[type, group] : pattern.groups) {
    std::vector<std::set<int64_t>> values = valuesOf(group, pattern.variables.size());
    size_t product = 1;
    for (const auto &set : values)
      product *= set.size();
    if (&group == &most->second && product == group.names.size())
      lines.push_back({name, type, pattern.variables, std::move(values)});
    else
      for (const std::string &tensor : group.names)
        lines.push_back({tensor, type, {}, {}});
  }
}

std::string textOf(const Line &line, schema::DType usual, const std::map<std::string, int64_t> &sizes) {
  std::string where;
  for (size_t v = 0; v < line.variables.size(); ++v)
    if (const std::string &variable = line.variables[v];
        static_cast<int64_t>(line.values[v].size()) != sizes.at(variable))
      where += (where.empty() ? "" : ", ") + variable + ": " + ranges(line.values[v]);
  const auto &[shape, dtype] = line.type;
  const std::string text = "  " + key(line.name) + ": ";
  if (where.empty() && dtype == usual)
    return text + shapeText(shape) + "\n";
  return text + "{shape: " + shapeText(shape) +
         (dtype == usual ? "" : std::string(", dtype: ") + schema::dtypeName(dtype)) +
         (where.empty() ? "" : ", where: {" + where + "}") + "}\n";
}

} // namespace

std::string describeModel(const std::map<std::string, StoredTensor> &tensors, const std::string &origin,
                          const std::string &config) {
  std::map<std::string, Pattern> patterns;
  std::map<schema::DType, int64_t> dtypes; // tensors
  std::vector<std::string> braces;
  for (const auto &[name, tensor] : tensors) {
    if (name.find_first_of("{}") != std::string::npos) {
      braces.push_back(name);
      continue;
    }
    Name parts = read(name);
    Pattern &pattern = patterns[parts.pattern];
    pattern.variables = parts.variables;
    TensorGroup &group = pattern.groups[{tensor.shape, tensor.dtype}];
    group.names.push_back(name);
    group.values.push_back(parts.values);
    ++dtypes[tensor.dtype];
  }
  const auto most =
      std::max_element(dtypes.begin(), dtypes.end(), [](const auto &a, const auto &b) { return a.second < b.second; });
  const schema::DType usual = dtypes.empty() ? schema::DType::bf16 : most->first;
  std::vector<Line> lines;
  for (const auto &[name, pattern] : patterns)
    addLines(name, pattern, lines);
  std::map<std::string, int64_t> sizes; // by index variable
  for (const Line &line : lines)
    for (size_t v = 0; v < line.variables.size(); ++v)
      sizes[line.variables[v]] = std::max(sizes[line.variables[v]], *line.values[v].rbegin() + 1);

  std::string text = "# From the headers of " + quoted(origin) + ": " + std::to_string(tensors.size()) +
                     " tensors. Next steps: name the dimensions with `let`, and add `layouts` for other frameworks.\n";
  if (!config.empty())
    text += "config: " + quoted(config) + "\n";
  text += std::string("dtype: ") + schema::dtypeName(usual) + "\n";
  std::string index;
  for (const auto &[variable, size] : sizes)
    index += (index.empty() ? "" : ", ") + variable + ": " + std::to_string(size);
  if (!index.empty())
    text += "index: {" + index + "}\n";
  for (const std::string &name : braces)
    text += "# left out, because braces in the names of a model are index variables, which --rename=OLD=NEW removes: " +
            quoted(name) + "\n";
  text += "tensors:\n";
  for (const Line &line : lines)
    text += textOf(line, usual, sizes);
  return text;
}

} // namespace reshard::checkpoints
