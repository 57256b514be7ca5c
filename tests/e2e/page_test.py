# SPDX-License-Identifier: Apache-2.0
"""reshard-inspect --format=html: the data of the page against the plan's other reports and against NumPy, and, where
Chromium is installed, the page itself: no console error, and a click on each kind of thing shows what it promises."""

import json
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("lib",)]

import numpy as np  # noqa: E402
from commands import ROOT, FolderTest, run  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
JOB = """version: 1
model:
  dtype: fp32
  index: {layer: 2, expert: 4}
  tensors: {"l.{layer}.q": [8, 6], "l.{layer}.k": [4, 6], "l.{layer}.e.{expert}.up": [6, 5], norm: [6], scale: []}
  layouts:
    train:
      axes: [tp, ep]
      place: {expert: ep}
      params:
        "qk.{layer}": {concat: [q, k], shard: {0: tp}}
        "up.{layer}.{expert.local}": {holds: up, shard: {0: tp}}
        norm: {holds: norm}
        scale: {holds: scale}
    serve:
      axes: [tp]
      params:
        "q.{layer}": {holds: q, shard: {1: {axis: tp, cyclic: 1}}}
        "k.{layer}": {holds: k}
        "up.{layer}": {stack: expert, holds: up, shard: {1: tp}}
        norm: {holds: norm, shard: {0: tp}}
        scale: {holds: scale}
source: {layout: train, mesh: {tp: 2, ep: 2}}
target: {layout: serve, mesh: {tp: 2}, ranks: 4..5}
"""
#: Does what a reader does and writes what the page shows then into the title of the document.
CLICKS = """<script>
{
const shown = { errors: [], cells: document.querySelectorAll("rect.cell").length, tensors: document.querySelectorAll("#list button").length };
window.addEventListener("error", event => shown.errors.push(event.message));
const cell = document.querySelector("rect.cell");
cell.dispatchEvent(new MouseEvent("click", { bubbles: true }));
shown.click = document.getElementById("cell").textContent;
cell.focus();
cell.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true, cancelable: true }));
document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true }));
shown.key = document.getElementById("cell").textContent;
const search = document.getElementById("search");
search.value = "up"; search.dispatchEvent(new Event("input"));
shown.found = [...document.querySelectorAll("#list button")].map(button => button.textContent);
document.querySelector("#list button").click();
shown.tensor = document.getElementById("tensor").textContent;
shown.boxes = document.querySelectorAll("#tensor rect").length;
search.value = "nothing has this"; search.dispatchEvent(new Event("input"));
shown.none = document.getElementById("list").textContent;
shown.spans = document.querySelectorAll("#time rect").length;
document.documentElement.setAttribute("data-shown", JSON.stringify(shown));
}
</script>"""


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


class Page(FolderTest):
    def page(self, job, *flags):
        (self.folder / "job.yaml").write_text(job)
        run("reshard-compile", self.folder / "job.yaml", "-o", self.folder / "p.rplan", "--allow=missing")
        run("reshard-inspect", self.folder / "p.rplan", "--format=html", "-o", self.folder / "p.html", *flags)
        text = (self.folder / "p.html").read_text()
        self.assertEqual(re.findall(r'(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)', text), [], "the page needs no network")
        return text

    def report(self, *flags):
        return json.loads(run("reshard-inspect", self.folder / "p.rplan", "--format=json", *flags).stdout)

    def test_traffic(self):
        data = data_of(self.page(JOB))
        steps = {rank: self.report(f"--rank={rank}")["steps"] for rank in range(data["world"])}
        wanted = {}
        for rank, own in steps.items():
            for step in own:
                if step["kind"] != "send":
                    key = (step["peer"] if step["kind"] == "recv" else rank, rank)
                    wanted[key] = wanted.get(key, 0) + step["bytes"]
        self.assertEqual({(a, b): n for a, b, n, *_ in data["cells"]}, wanted)
        self.assertEqual(sum(n for a, b, n, *_ in data["cells"] if a != b), self.report()["bytes"]["remote"])
        self.assertEqual(sum(messages for *_, messages, _ in data["cells"]), self.report()["messages"])
        for *_, n, _, patterns in data["cells"]:
            self.assertEqual(sum(of for _, of in patterns), n)
        sent = [sum(step["bytes"] for step in own if step["kind"] == "send") for own in steps.values()]
        self.assertEqual([entry[0] for entry in data["ranks"]], sent)
        self.assertEqual(data["bounds"][1], max(entry[1] for entry in data["ranks"]), "a target rank receives what it lacks, once")
        self.assertLessEqual(data["bounds"][0], max(sent))

    def test_holders(self):
        """The boxes of each rank are the elements that it has of the tensor."""
        data = data_of(self.page(JOB))
        rows = lambda a, b, n: [r for r in range(n) if a <= r < b]  # noqa: E731
        wanted = {  # tensor -> source rank -> rows; all columns
            "l.{layer}.q": {0: rows(0, 4, 8), 1: rows(4, 8, 8), 2: rows(0, 4, 8), 3: rows(4, 8, 8)}, "l.{layer}.k": {0: [0, 1], 1: [2, 3], 2: [0, 1], 3: [2, 3]},
            "l.{layer}.e.{expert}.up": {0: [0, 1, 2], 1: [3, 4, 5]}, "norm": {rank: list(range(6)) for rank in range(4)}, "scale": {rank: [0] for rank in range(4)}}
        self.assertEqual([tensor["name"] for tensor in data["tensors"]], list(wanted))
        for tensor in data["tensors"]:
            with self.subTest(tensor=tensor["name"]):
                found = self.painted(tensor, 0)
                self.assertEqual(sorted(found), sorted(wanted[tensor["name"]]))
                for rank, image in found.items():
                    expected = np.zeros_like(image)
                    expected[wanted[tensor["name"]][rank]] = 1
                    np.testing.assert_array_equal(image, expected)
        q, up = (self.painted(data["tensors"][i], 1) for i in (0, 2))
        np.testing.assert_array_equal(q[4], np.tile([1, 0, 1, 0, 1, 0], (8, 1)))
        np.testing.assert_array_equal(q[5], 1 - q[4])
        np.testing.assert_array_equal(up[4], np.repeat([[1], [0]], [3, 3], axis=0) * np.ones((1, 5)))

    @staticmethod
    def painted(tensor, side):
        images = {}
        for holder in tensor["sides"][side]["holders"]:
            for rank in holder["ranks"]:
                image = images.setdefault(rank, np.zeros((tensor["rows"], tensor["columns"])))
                for r0, r1, c0, c1 in holder["boxes"]:
                    image[r0:r1, c0:c1] += 1
        return images

    def test_unusual_params(self):
        """Params of some stages, inner shards, no elements, more rank classes than are drawn, quantized ones."""
        data = data_of(self.page("""version: 1
model:
  dtype: bf16
  tensors: {"<!--<script>": [4, 4], inner: [4, 8, 6], none: [4, 0], none2: [0, 4], matrix: [64, 64]}
  layouts:
    train: {axes: [tp, pp], params: {head: {holds: "<!--<script>", shard: {0: tp}, at: {pp: last}}, e: {holds: inner, shard: {2: tp}}, n: {holds: none}, n2: {holds: none2}, m: {holds: matrix}}}
    serve: {axes: [x], params: {head: {holds: "<!--<script>"}, e: {holds: inner}, n: {holds: none}, n2: {holds: none2}, m: {holds: matrix, quantize: {format: mxfp8, by: receiver}}}}
source: {layout: train, mesh: {tp: 2, pp: 2}}
target: {layout: serve, mesh: {x: 1}, ranks: [4]}
"""))
        tensors = {tensor["name"]: tensor for tensor in data["tensors"]}
        head, inner = self.painted(tensors["<!--<script>"], 0), self.painted(tensors["inner"], 0)
        self.assertEqual(sorted(head), [2, 3])
        np.testing.assert_array_equal(inner[0], np.tile([1, 1, 1, 0, 0, 0], (4, 8)))
        np.testing.assert_array_equal(inner[0] + inner[1], np.ones((4, 48)))
        self.assertEqual(tensors["none"]["sides"], [{"holders": [], "left": 0}] * 2)
        self.assertEqual(sorted(self.painted(tensors["matrix"], 1)), [4])
        data = data_of(self.page("version: 1\nmodel: {dtype: bf16, tensors: {w: {shape: [512], shard: {0: {axis: x, cyclic: 1}}}}}\nsource: {mesh: {x: 100}}\ntarget: {mesh: {x: 1}}\n"))
        self.assertEqual(data["tensors"][0]["sides"][0]["left"], 36)

    def test_the_deadline(self):
        job = """version: 1
model: {dtype: u8, index: {layer: 5000, expert: 5000}, tensors: {"w.{layer}.{expert}": [1]},
        layouts: {one: {params: {w: {stack: [layer, expert], holds: "w.{layer}.{expert}"}}}}}
source: {layout: one, mesh: {}}
target: {layout: one, mesh: {}}
"""
        self.assertIn("the page did not finish within the deadline", self.refused(job, "--timeout=0.2"))

    def refused(self, job, *flags):
        (self.folder / "job.yaml").write_text(job)
        run("reshard-compile", self.folder / "job.yaml", "-o", self.folder / "p.rplan")
        return run("reshard-inspect", self.folder / "p.rplan", "--format=html", "-o", self.folder / "p.html", *flags, code=None).stderr

    def test_time_line(self):
        data = data_of(self.page(JOB, f"--simulate={ROOT / 'examples/topologies/h100x8.yaml'}"))
        report = self.report(f"--simulate={ROOT / 'examples/topologies/h100x8.yaml'}")
        self.assertEqual(data["time"]["seconds"], report["seconds"])
        spans = [span for lane in data["time"]["lanes"] for span in lane["spans"]]
        self.assertTrue(all(0 <= begin <= end <= report["seconds"] * 1.000001 for _, begin, end, *_ in spans))
        self.assertEqual(sum(n for kind, *_, n in spans if kind == 1), self.report()["bytes"]["remote"])

    def test_large_plans(self):
        job = (ROOT / "examples/kimi-k2-2048-to-1024.yaml").read_text().replace("model: models", f"model: {ROOT / 'examples/models'}")
        page = self.page(job)
        data = data_of(page)
        self.assertEqual((data["world"], data["group"]), (3072, 48))
        self.assertLess(len(page), 5 << 20)
        self.assertEqual(sum(n for a, b, n, *_ in data["cells"]), self.report()["bytes"]["remote"] + self.report()["bytes"]["local"])

    def test_refusals(self):
        self.page(JOB)
        plan = self.folder / "p.rplan"
        for flags, text in ((["--format=html"], "--format=html needs -o=FILE"), (["-o", self.folder / "x.html"], "-o needs --format=html"),
                            (["--format=html", "-o", self.folder / "x.html", "--rank=0"], "expected only -o, --simulate and --timeout beside it"),
                            (["--format=html", "-o", plan], "p.rplan")):
            with self.subTest(flags=flags):
                self.assertIn(text, run("reshard-inspect", plan, *flags, code=2).stderr)
        self.assertFalse((self.folder / "x.html").exists())

    @unittest.skipUnless(CHROMIUM, "Chromium is not installed")
    def test_in_a_browser(self):
        text = self.page(JOB, f"--simulate={ROOT / 'examples/topologies/h100x8.yaml'}")
        (self.folder / "clicks.html").write_text(text.replace("</html>", CLICKS + "</html>"))
        done = subprocess.run([CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.folder / 'profile'}", "--enable-logging=stderr", "--dump-dom",
                               f"file://{self.folder / 'clicks.html'}"], capture_output=True, text=True, timeout=120)
        self.assertEqual([line for line in done.stderr.splitlines() if "CONSOLE" in line], [])
        shown = json.loads(re.search(r'data-shown="(.*?)"', done.stdout)[1].replace("&quot;", '"'))
        data = data_of(text)
        self.assertEqual((shown["errors"], shown["cells"], shown["tensors"]), ([], len(data["cells"]), 5))
        first = data["cells"][0]
        self.assertIn(f"rank {first[0]} to rank {first[1]}", shown["click"])
        self.assertIn("q.{layer}", shown["click"])
        self.assertNotEqual(shown["key"], shown["click"])
        self.assertEqual(shown["found"], ["l.{layer}.e.{expert}.up"])
        self.assertIn("l.0.e.0.up", shown["tensor"])
        self.assertGreater(shown["boxes"], 4)
        self.assertEqual(shown["none"], "No tensor has this in its name.")
        self.assertGreater(shown["spans"], 4)


if __name__ == "__main__":
    unittest.main()
