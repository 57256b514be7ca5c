# SPDX-License-Identifier: Apache-2.0
"""Checks the words of code and documents: private words, one spelling, one name for one type, and comments that a
reader understands without the lines above. The rules are data; docs/glossary.md has the terms. It needs no build."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

root = Path(__file__).resolve().parents[2]
PRODUCTION = ("base/", "schema/", "ir/", "compiler/", "kernels/", "executor/", "include/", "checkpoints/", "verify/")
PRODUCTION += ("command/", "report/", "tools/")
CPP = (".h", ".hpp", ".cpp", ".cu")
TEXT = (*CPP, ".c", ".def", ".fbs", ".py", ".js", ".css", ".html", ".md")
# Texts that are not ours.
FOREIGN = ("LICENSE", "NOTICE", "THIRD_PARTY_NOTICES.md", "tests/fuzz/corpus/", "tests/architecture/words.py")

# Everywhere, in names too, word by word (coloredText is "colored text"): a pattern, and what to write instead. The
# C API, Python and YAML have American names (synchronize, initializer, optimizer), so all text has.
WORDS = {
    r"(colour|behaviour|neighbour|favour|honour|labour)\w*": "-or, as in color",
    r"(initial|final|optim|normal|organ|recogn|synchron|material|general|minim|maxim|quant|serial|special|visual|summar"
    r"|parallel|util)is(e|ed|es|er|ing|ation)": "-ize, as in initialize",
    r"(cancell|signall|labell|modell|travell)(ed|ing)(?! Error)": "one l, as in canceled",  # CancelledError is Python's
    r"analys(e|ed|ing)": "analyze",
    r"(centre|catalogue|licence|defence|grey|artefact|judgement|whilst|amongst)s?": "the American spelling",
    r"(though (it|they) be|nobody is there|in vain|is unlike|of whom|comes? to its deadline|thereof|wherein"
    r"|lest)": "plain words",
}
# Names of the C++ code, as a whole: a pattern, and what to write instead.
NAMES = {
    r"k(Most|Least)\w*": "kMax… or kMin…",
    r"told(_|[A-Z]\w*)?": "sent, informed, lastSent …",
    r"heard(_|[A-Z]\w*)?": "seen, lastSeen",
    r"greet(s|ed|ing)?(_|[A-Z]\w*)?|meet(_|[A-Z]\w*)?": "handshake, addPeer",
    r"births?(_|[A-Z]\w*)?": "incarnation",
    r"judge[sd]?(_|[A-Z]\w*)?": "check",
    r"\w*Shares?|shares?_": "part, offset, partial digest: what it is",
    r"TcpPlace|Place|Way|Stretch|Holders?|HolderRank|Face|Wire": "a term of docs/glossary.md",
    r"look(For|At|After|Around)\w*": "lookup, find, read",
}
# Types of one name at the level of a namespace, with the reason. Such a name is there once: a reader who searches it
# finds its definition.
SAME_TYPE = {"Loop": "around rows, in the IR and in the kernels; the IR's also steps from buffer to buffer"}
# A name that a class qualifies, as Node::Kind, may be there MAX_NESTED times, but for words that say nothing alone.
MAX_NESTED = 4
QUALIFIED = ("Kind", "State", "Loop")
# Exceptions are for the edge of commands and for C++ programs that use the library; all else returns a Status, a Result
# or an llvm::Expected. Patterns of files that may throw, with the reason of those that are neither.
THROWS = {
    r"command/.*|tools/\w+\.cpp|include/reshard/reshard\.hpp": "the edge",
    r"tools/run/(execution|planned_run|processes)\.(cpp|h)": "reshard-exec: a failure ends all processes of a run",
    r"base/work_deadline\.cpp": "a deadline ends work at any depth; WorkDeadline::run() returns it as a Status",
    r"base/yaml/parse\.cpp": "yaml-cpp calls back, and stops at an exception only; caught in the same file",
    r"ir/parse\.cpp": "an error of the text ends the recursive descent; caught in the same file",
    r"verify/check/tensor_values\.cpp": "no memory, as `new` reports it",
}
# A comment has a subject of its own: a reader need not keep the noun of three lines before. These begin without one.
HEADLESS = ("of", "that", "those", "whose", "which", "who")
# A .cpp file of more lines opens with what it does, in one to three sentences.
MAX_SILENT_LINES = 150


def files(endings: tuple[str, ...]) -> list[str]:
    git = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z", "-c", "-o", "--exclude-standard"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    kept = (f for f in listed if f.endswith(endings) and not f.startswith(FOREIGN))
    return sorted(f for f in kept if (root / f).exists())


def apart(text: str) -> str:
    """The words of names, apart: coloredText and colored_text are 'colored Text'."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).replace("_", " ")


def code(line: str) -> str:
    """A line of C++ without its strings and its comment."""
    return re.sub(r'"(\\.|[^"\\])*"', '""', line).partition("//")[0]


problems: list[str] = []
looked = 0

words = re.compile("|".join(rf"\b({pattern})\b" for pattern in WORDS), re.IGNORECASE)
names = re.compile("|".join(rf"\b({pattern})\b" for pattern in NAMES))
throws = re.compile(r"\b(throw\w*|valueOrThrow)\b(?!;)")  # not `throw;`, which passes on what `new` threw
edge = re.compile("|".join(THROWS))
throwing: set[str] = set()
for name in files(TEXT):
    looked += 1
    for line, content in enumerate((root / name).read_text(errors="replace").splitlines(), 1):
        if found := words.search(apart(content)):
            instead = next(plain for word, plain in WORDS.items() if re.fullmatch(word, found[0], re.IGNORECASE))
            problems.append(f"{name}:{line}: '{found[0]}': write {instead}")
        if name.endswith(CPP) and name.startswith(PRODUCTION) and (found := throws.search(code(content))):
            throwing.add(name)
            if not edge.fullmatch(name):
                problems.append(f"{name}:{line}: '{found[0]}': return a Status, a Result or an llvm::Expected")
        if name.endswith(CPP) and (found := names.search(code(content))):
            instead = next(plain for word, plain in NAMES.items() if re.fullmatch(word, found[0]))
            problems.append(f"{name}:{line}: '{found[0]}': write {instead}")

definition = re.compile(
    r"(\s*)(?:template <[^>]+> )?(?:struct|class|enum class|enum|union) (?:alignas\([^)]*\) )?"
    r"(\w+)(?: final)?\s*(?::[^:][^;(){}]*)?(?:{|$)"
)
defined: dict[str, list[str]] = defaultdict(list)
qualified: dict[str, list[str]] = defaultdict(list)
for name in files(CPP):
    if not name.startswith(PRODUCTION):
        continue
    lines = (root / name).read_text().splitlines()
    if name.endswith(".cpp") and len(lines) > MAX_SILENT_LINES and not lines[1].startswith("//"):
        problems.append(f"{name}:2: say in one to three sentences what these {len(lines)} lines do")
    for line, (before, content) in enumerate(zip(["", *lines], lines), 1):
        comment = re.search(r"(?<![:\w])//[/<]* (\w+)", content)
        continued = re.match(r"\s*//", before) and re.match(r"\s*//", content)
        if comment and comment[1].lower() in HEADLESS and not continued:
            problems.append(f"{name}:{line}: a comment that begins with '{comment[1]}': give it a subject")
        if found := definition.match(code(content)):
            (qualified if found[1] else defined)[found[2]].append(f"{name}:{line}")
for kind, places in sorted(defined.items()):
    if len(places) > 1 and kind not in SAME_TYPE:
        problems.append(f"{places[-1]}: type {kind} is also defined at {', '.join(places[:-1])}: name what differs")
for kind, places in sorted(qualified.items()):
    if len(places) + len(defined[kind]) > MAX_NESTED and kind not in QUALIFIED:
        problems.append(f"{places[-1]}: type {kind} is also defined at {', '.join(defined[kind] + places[:-1])}")
for kind in SAME_TYPE:
    if len(defined[kind]) < 2:
        problems.append(f"SAME_TYPE: {kind} is defined once only; remove it")

for pattern in THROWS:
    if not any(re.fullmatch(pattern, name) for name in throwing):
        problems.append(f"THROWS: {pattern} throws nothing; remove it")

print("\n".join(problems))
if looked < 400:
    print(f"looked at {looked} files only")
    sys.exit(1)
print(f"{looked} files, {len(problems)} problems")
sys.exit(1 if problems else 0)
