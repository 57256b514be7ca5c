"""The YAML in the documents: every whole job compiles, every key of the grammar stands in one of them, and the drawings of
docs/worked-examples.md are what the oracle computes. `docs_test.py --update` rewrites the drawings. RESHARD_BIN: the folder
of the commands."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "property"))

from oracle import Job  # noqa: E402

BIN = Path(os.environ.get("RESHARD_BIN", ROOT / "build" / "release")).resolve()
BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
FILE = re.compile(r"# FILE (\S+)\n")


def jobs():
    """(document, text, files beside it) of all whole jobs."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        files = {}
        for text in BLOCK.findall(path.read_text()):
            if named := FILE.match(text):
                files[named[1]] = text[named.end():]
            elif re.search(r"^version: 1", text, re.MULTILINE) and "model: models/" not in text:
                yield path.name, text, files


def drawing(text):
    """Who holds which rows, as the oracle sees it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        job = Job(file.name)
    names = {0: "z"}
    for tensor in job.model.tensors.values():
        short = tensor.name.split(".")[-1]
        for values, base in tensor.base.items():
            for row in range(tensor.shape[0]):
                names[base + row] = short + "".join(f"[{value}]" for value in values) + str(row)
    lines = []
    for endpoint, places in zip(job.endpoints, job.check()):
        for place, params in enumerate(places):
            for i, (name, held) in enumerate(params.items()):
                head = f"{endpoint.role:<7} rank {endpoint.ranks[place]}" if i == 0 else ""
                rows = " ".join(names[label] for label in held.labels.reshape(-1).tolist())
                lines.append(f"{head:<15} {name:<22} {rows}".rstrip())
    return "\n".join(lines) + "\n"


def drawn(text):
    """The document with its drawings made anew."""
    return re.sub(r"```yaml\n(.*?)```\n\n```drawing\n.*?```", lambda m: f"```yaml\n{m[1]}```\n\n```drawing\n{drawing(m[1])}```", text, flags=re.DOTALL)


def grammar():
    """The keys that the readers of the YAML ask for."""
    keys = set()
    for name in ("model", "layouts", "job", "mesh", "shard_rule", "read_pipeline", "where"):
        source = (ROOT / "compiler" / f"{name}.cpp").read_text()
        keys |= set(re.findall(r'(?:find|require|number)\("(\w+)"', source))
    keys |= set(re.findall(r"^SCHEME\((\w+),", (ROOT / "compiler" / "schemes.def").read_text(), re.MULTILINE))
    return keys - {"even"}  # the default; a name of `scheme`


class Documents(unittest.TestCase):
    def test_jobs_compile_and_use_every_key(self):
        used, count = set(), 0
        for document, text, files in jobs():
            with self.subTest(document=document, job=text[:200]), tempfile.TemporaryDirectory() as folder:
                for name, content in files.items():
                    (Path(folder) / name).write_text(content)
                path = Path(folder) / "job.yaml"
                path.write_text(text)
                done = subprocess.run([BIN / "reshard-compile", path, "-o", Path(folder) / "plan"], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stderr)
                checked = subprocess.run([BIN / "reshard-exec", Path(folder) / "plan", "--synthesize", "--check"], capture_output=True, text=True)
                self.assertEqual(checked.returncode, 0, checked.stderr)
            everything = text + "".join(files.values())
            used |= set(re.findall(r"(\w+)\"?:", everything)) | set(re.findall(r"scheme: (\w+)", everything))
            count += 1
        self.assertGreater(count, 8)
        self.assertEqual(sorted(grammar() - used), [], "no compiled job of the documents has these keys")

    def test_drawings(self):
        text = (ROOT / "docs" / "worked-examples.md").read_text()
        self.assertEqual(text.count("```drawing"), 6)
        self.assertTrue(drawn(text) == text, "docs/worked-examples.md is old: run tests/docs/docs_test.py --update")


if __name__ == "__main__":
    if "--update" in sys.argv:
        target = ROOT / "docs" / "worked-examples.md"
        target.write_text(drawn(target.read_text()))
    else:
        unittest.main()
