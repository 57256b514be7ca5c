# SPDX-License-Identifier: Apache-2.0
"""reshard-inspect --format=html: the data of the page against the plan's other reports, against NumPy and against
recomputations from the steps and the trace, and, where Chromium is installed, the page itself: no console error, and a
click on each kind of thing, or a key, shows what it promises."""

import itertools
import json
import os
import re
import shutil
import subprocess
import unittest

import numpy as np

from commands import ROOT, FolderTest, run

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
#: The elements of `staged` are collected in the arena, since its shards end within blocks; those of
#: `norm` are forwarded.
STAGED = """version: 1
model:
  dtype: bf16
  index: {layer: 2}
  tensors: {"l.{layer}.staged": [96, 96], w: [512, 64], norm: [64]}
  layouts:
    train:
      axes: [tp]
      params:
        "m.{layer}": {holds: staged, shard: {1: {axis: tp, cyclic: 8}}}
        w: {holds: w, shard: {0: tp}}
        norm: {holds: norm, shard: {0: tp}}
    serve:
      axes: [tp]
      params:
        "m.{layer}": {holds: staged, quantize: {format: FORMAT, by: receiver}}
        w: {holds: w, shard: {1: {axis: tp, cyclic: 8}}}
        norm: {holds: norm}
source: {layout: train, mesh: {tp: 4}}
target: {layout: serve, mesh: {tp: 2}, ranks: 4..5}
options: {topology: {ranks_per_node: 2}, staging: LIMIT}
"""
#: Rank 1 relays half of the bytes through its arena, and the target ranks forward to each other.
RELAYED = """version: 1
model: {dtype: bf16, tensors: {w: {shape: [4096, 4096], shard: {0: tp}}, v: {shape: [4096, 64], shard: {1: tp}}}}
source: {mesh: {tp: 1}}
target: {mesh: {dp: 2}, ranks: 2..3}
options: {topology: {ranks_per_node: 2}}
"""
TOPOLOGY = """ranks_per_node: 2
link: {rate: 100GB/s, latency: 5us}
nics: {per_node: 2, rate: 10GB/s, latency: 50us}
copy: {rate: 200GB/s}
"""
#: Does what a reader does and writes what the page shows then into an attribute of the document.
CLICKS = """<script>
{
const shown = { errors: [] };
shown.cells = document.querySelectorAll("rect.cell").length;
shown.tensors = document.querySelectorAll("#list button").length;
window.addEventListener("error", event => shown.errors.push(event.message));
const text = id => document.getElementById(id).textContent;
const click = element => element.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const press = key =>
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const marks = id => document.querySelectorAll("#" + id + " .mark");
click(marks("matrix")[0]);
shown.click = text("cell");
marks("matrix")[0].focus();
press("ArrowDown");
shown.key = text("cell");
press("Escape");
shown.escape = text("cell");
for (const id of ["bars", "time", "arena"]) {
  shown[id] = { marks: marks(id).length, tabs: document.querySelectorAll("#" + id + " .mark[tabindex='0']").length };
  if (!shown[id].marks) continue;
  click(marks(id)[0]);
  shown[id].click = text(id + "-detail");
  marks(id)[0].focus();
  press("ArrowRight"); press("ArrowDown");
  shown[id].key = text(id + "-detail");
}
const search = document.getElementById("search");
search.value = "up"; search.dispatchEvent(new Event("input"));
shown.found = [...document.querySelectorAll("#list button")].map(button => button.textContent);
click(document.querySelector("#list button"));
shown.tensor = text("tensor");
shown.boxes = [...document.querySelectorAll("#tensor svg")].map(svg => svg.querySelectorAll(".mark").length);
shown.paths = [...document.querySelectorAll("#tensor svg")].map(svg => {
  click(svg.querySelector(".mark"));
  const lines = [...document.querySelectorAll("#paths tr.path")].map(row => row.textContent);
  const pieces = [...document.querySelectorAll("#tensor svg")].map(each => each.querySelectorAll(".piece").length);
  return { lines, pieces };
});
document.querySelector("#tensor svg .mark").focus();
press("ArrowDown");
shown.path_key = text("paths");
click(marks("matrix")[0]);
click(document.querySelector("#cell button"));
shown.linked = { search: search.value, tensor: text("tensor") };
search.value = "nothing has this"; search.dispatchEvent(new Event("input"));
shown.none = text("list");
document.documentElement.setAttribute("data-shown", JSON.stringify(shown));
}
</script>"""

#: Labels that leave their picture or touch another one, and colors of boxes that the legend does not have or that mix.
LOOKS = """<script>
{
const shown = { outside: [], touching: [], colors: [], labels: 0, striped: 0 };
for (const svg of document.querySelectorAll("svg")) {
  const labels = [...svg.querySelectorAll("text")].map(each => (
    { text: each.textContent, ...(({ x, y, width, height }) => ({ x, y, width, height }))(each.getBBox()) }));
  shown.labels += labels.length;
  const width = svg.getBoundingClientRect().width;
  shown.outside.push(...labels.filter(each => each.x < 0 || each.x + each.width > width + 0.5).map(each => each.text));
  labels.forEach((a, i) => labels.slice(i + 1).forEach(b => {
    if (a.x < b.x + b.width + 2 && b.x < a.x + a.width + 2 && a.y + 3 < b.y + b.height - 3
        && b.y + 3 < a.y + a.height - 3) shown.touching.push(a.text + " and " + b.text);
  }));
}
for (const side of document.querySelectorAll("#tensor .sides > div")) {
  const legend = [...side.querySelectorAll("td")].map(each => each.getAttribute("style"));
  const boxes = [...side.querySelectorAll("svg .mark")];
  shown.colors.push(...boxes.filter(each => !legend.includes("color:" + each.getAttribute("fill"))
    || each.hasAttribute("fill-opacity")).map(each => each.getAttribute("fill")));
  for (const x of [100, 103, 106, 109, 112, 115]) for (const y of [30, 60, 90]) { // one box is painted at each place
    const svg = side.querySelector("svg"), point = svg.createSVGPoint();
    point.x = x + 0.4; point.y = y; // not at the border of stripes
    if (boxes.filter(each => each.isPointInFill(point)).length > 1) shown.colors.push("two at " + x + ", " + y);
  }
  shown.striped += boxes.filter(each => (each.getAttribute("d").match(/M/g) || []).length > 1).length;
}
document.documentElement.setAttribute("data-shown", JSON.stringify(shown));
}
</script>"""


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


class Page(FolderTest):
    def page(self, job, *flags):
        self.write("job.yaml", job)
        self.call("reshard-compile job.yaml -o p.rplan --allow=missing")
        self.call("reshard-inspect p.rplan --format=html -o p.html", *flags)
        text = (self.folder / "p.html").read_text()
        self.assertEqual(
            re.findall(r"(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text),
            [],
            "the page needs no network",
        )
        return text

    def report(self, *flags):
        return json.loads(self.call("reshard-inspect p.rplan --format=json", *flags).stdout)

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
        self.assertEqual((data["group"], len(data["ranks"])), (1, data["world"]))
        self.assertEqual(sum(n for a, b, n, *_ in data["cells"] if a != b), self.report()["bytes"]["remote"])
        self.assertEqual(sum(cell[3] for cell in data["cells"]), self.report()["messages"])
        received = {
            rank: {
                step["message"]: [step["message"], step["round"], step["bytes"]]
                for step in own
                if step["kind"] == "recv"
            }
            for rank, own in steps.items()
        }
        for _, b, n, messages, patterns, parts in data["cells"]:
            self.assertEqual(sum(of for _, of in patterns), n)
            self.assertEqual(len(parts), messages)
            for part in parts:
                self.assertEqual(part, received[b][part[0]])
        sent = [sum(step["bytes"] for step in own if step["kind"] == "send") for own in steps.values()]
        self.assertEqual([entry[0] for entry in data["ranks"]], [[n, rank] for rank, n in enumerate(sent)])

    def test_holders(self):
        """The boxes of each rank are the elements that it has of the tensor."""
        data = data_of(self.page(JOB))
        rows = lambda a, b, n: [r for r in range(n) if a <= r < b]
        wanted = {  # tensor -> source rank -> rows; all columns
            "l.{layer}.q": {0: rows(0, 4, 8), 1: rows(4, 8, 8), 2: rows(0, 4, 8), 3: rows(4, 8, 8)},
            "l.{layer}.k": {0: [0, 1], 1: [2, 3], 2: [0, 1], 3: [2, 3]},
            "l.{layer}.e.{expert}.up": {0: [0, 1, 2], 1: [3, 4, 5]},
            "norm": {rank: list(range(6)) for rank in range(4)},
            "scale": {rank: [0] for rank in range(4)},
        }
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

    def check_pieces(self, data, item, complete):
        """Each element that a target rank holds arrives in one piece, from a rank that holds it, by messages that both
        ranks have. complete: the page draws all tensors, so the pieces of each message are all of its bytes."""
        steps = {
            (rank, step["kind"], step["message"]): step
            for rank in range(data["world"])
            for step in self.report(f"--rank={rank}")["steps"]
            if "message" in step
        }
        sent = {}
        for tensor in data["tensors"]:
            with self.subTest(tensor=tensor["name"]):
                self.assertFalse(tensor["left"])
                held = [self.painted(tensor, side) for side in range(len(data["endpoints"]))]
                arrived = {}
                for source, target, sender, receiver, message, round, relay, n, boxes, cut in tensor["pieces"]:
                    image = np.zeros((tensor["rows"], tensor["columns"]))
                    for r0, r1, c0, c1 in boxes:
                        image[r0:r1, c0:c1] += 1
                    self.assertFalse(cut)
                    self.assertEqual(image.sum() * item, n)
                    self.assertTrue((held[source[0]][source[1]] >= image).all(), "the sender holds the elements")
                    arrived[tuple(target)] = arrived.get(tuple(target), 0) + image
                    self.assertEqual([source[1], target[1]], [sender, receiver])
                    if message < 0:
                        self.assertEqual((sender, relay), (receiver, None))
                        continue
                    last, hops = sender, [] if relay is None else [[sender, relay[0], relay[1], relay[2]]]
                    hops.append([sender if relay is None else relay[0], receiver, message, round])
                    for a, b, number, at in hops:
                        self.assertEqual((steps[a, "send", number]["peer"], steps[b, "recv", number]["peer"]), (b, a))
                        self.assertEqual(steps[b, "recv", number]["round"], at)
                        self.assertEqual(a, last)
                        last = b
                        sent[number] = sent.get(number, 0) + n
                wanted = {(side, rank): image for side in range(1, len(held)) for rank, image in held[side].items()}
                self.assertEqual(sorted(arrived), sorted(wanted))
                for key, image in wanted.items():
                    np.testing.assert_array_equal(arrived[key], image)
        bytes = {number: step["bytes"] for (_, kind, number), step in steps.items() if kind == "recv"}
        self.assertTrue(all(n <= bytes[number] for number, n in sent.items()))
        if complete:
            self.assertEqual(sent, bytes)

    def test_pieces(self):
        self.check_pieces(data_of(self.page(JOB)), 4, False)
        data = data_of(self.page(JOB.replace(", ranks: 4..5", "")))  # copies inside ranks
        self.check_pieces(data, 4, False)
        self.assertTrue(any(piece[4] < 0 for tensor in data["tensors"] for piece in tensor["pieces"]))
        data = data_of(self.page(RELAYED))
        self.check_pieces(data, 2, True)
        pieces = [piece for tensor in data["tensors"] for piece in tensor["pieces"]]
        self.assertTrue(any(piece[6] for piece in pieces), "a rank relays")
        self.assertTrue(any(piece[0][0] == 1 for piece in pieces), "a target rank forwards")
        data = data_of(self.page(STAGED.replace("FORMAT", "mxfp8").replace("LIMIT", "1MiB")))
        self.check_pieces(data, 2, False)
        self.assertTrue(any(piece[0][0] == 1 for tensor in data["tensors"] for piece in tensor["pieces"]))

    def test_pieces_of_files(self):
        job = """version: 1
model:
  dtype: fp32
  tensors: {a: [8, 4], b: [6]}
  layouts:
    files: {params: {a: {holds: a}, b: {holds: b}}}
    live: {axes: [tp], params: {a: {holds: a, shard: {0: tp}}, b: {holds: b}}}
source: SOURCE
target: TARGET
"""
        live = "{layout: live, mesh: {tp: 2}}"
        pieces = [
            tensor["pieces"]
            for tensor in data_of(
                self.page(job.replace("SOURCE", "{layout: files, storage: x}").replace("TARGET", live))
            )["tensors"]
        ]
        # from, to, sender, receiver, message, round, relay, bytes, boxes, cut
        self.assertEqual(
            pieces[0],
            [
                [[0, 0], [1, rank], rank, rank, -1, -1, None, 64, [[4 * rank, 4 * rank + 4, 0, 4]], False]
                for rank in (0, 1)
            ],
        )
        for rank in (0, 1):  # from the file, or from the other rank, which reads it
            self.assertEqual(sum(piece[7] for piece in pieces[1] if piece[1] == [1, rank]), 24)
        self.assertEqual(sum(piece[7] for piece in pieces[1] if piece[0] == [0, 0]), 24, "each byte is read once")
        pieces = [
            tensor["pieces"]
            for tensor in data_of(
                self.page(job.replace("SOURCE", live).replace("TARGET", "{layout: files, storage: x}"))
            )["tensors"]
        ]
        self.assertEqual(
            [(piece[0], piece[1], piece[3], piece[8]) for piece in pieces[0]],
            [([0, rank], [1, 0], rank, [[4 * rank, 4 * rank + 4, 0, 4]]) for rank in (0, 1)],
        )
        self.assertEqual(sum(piece[7] for piece in pieces[1]), 24)

    def test_unusual_params(self):
        """Params of some stages, inner shards, no elements, more rank classes than are drawn, quantized ones."""
        data = data_of(
            self.page("""version: 1
model:
  dtype: bf16
  tensors: {"<!--<script>": [4, 4], inner: [4, 8, 6], none: [4, 0], none2: [0, 4], matrix: [64, 64]}
  layouts:
    train:
      axes: [tp, pp]
      params:
        head: {holds: "<!--<script>", shard: {0: tp}, at: {pp: last}}
        e: {holds: inner, shard: {2: tp}}
        n: {holds: none}
        n2: {holds: none2}
        m: {holds: matrix}
    serve:
      axes: [x]
      params:
        head: {holds: "<!--<script>"}
        e: {holds: inner}
        n: {holds: none}
        n2: {holds: none2}
        m: {holds: matrix, quantize: {format: mxfp8, by: receiver}}
source: {layout: train, mesh: {tp: 2, pp: 2}}
target: {layout: serve, mesh: {x: 1}, ranks: [4]}
""")
        )
        tensors = {tensor["name"]: tensor for tensor in data["tensors"]}
        head, inner = self.painted(tensors["<!--<script>"], 0), self.painted(tensors["inner"], 0)
        self.assertEqual(sorted(head), [2, 3])
        np.testing.assert_array_equal(inner[0], np.tile([1, 1, 1, 0, 0, 0], (4, 8)))
        np.testing.assert_array_equal(inner[0] + inner[1], np.ones((4, 48)))
        self.assertEqual(tensors["none"]["sides"], [{"holders": [], "left": 0}] * 2)
        self.assertEqual(sorted(self.painted(tensors["matrix"], 1)), [4])
        data = data_of(
            self.page(
                "version: 1\nmodel: {dtype: bf16, tensors: {w: {shape: [512], shard: {0: {axis: x, cyclic: 1}}}}}\n"
                "source: {mesh: {x: 100}}\ntarget: {mesh: {x: 1}}\n"
            )
        )
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
        self.write("job.yaml", job)
        self.call("reshard-compile job.yaml -o p.rplan")
        return self.call("reshard-inspect p.rplan --format=html -o p.html", *flags, code=None).stderr

    def test_time_line(self):
        data = data_of(self.page(JOB, f"--simulate={ROOT / 'examples/topologies/h100x8.yaml'}"))
        report = self.report(f"--simulate={ROOT / 'examples/topologies/h100x8.yaml'}")
        self.assertEqual(data["time"]["seconds"], report["seconds"])
        spans = [span for lane in data["time"]["lanes"] for span in lane["spans"]]
        self.assertTrue(
            all(
                begin >= 0 and length >= 0 and begin + length <= report["seconds"] * 1e9 + 2
                for _, begin, length, *_ in spans
            )
        )
        for kind in (1, 4):  # sent, received
            self.assertEqual(sum(n for each, *_, n in spans if each == kind), self.report()["bytes"]["remote"])

    def history(self, rank, trace):
        """A rank's arena: its size, and [begin, end, bytes] of everything in it, in ns, from
        the steps and the trace."""
        times = {}
        for event in trace:
            kind, message = event["name"].split()[:2]
            begin = round(event["ts"] * 1e3)
            if event["pid"] == rank or (kind == "transmit" and event["args"]["peer"] == rank):
                times.setdefault(kind if kind == "copy" else (kind, int(message)), []).append(
                    (begin, begin + round(event["dur"] * 1e3), event["args"]["bytes"], event["args"]["step"])
                )
        report, intervals, held = self.report(f"--rank={rank}"), [], []
        copies = {step: (begin, end) for begin, end, _, step in times.get("copy", [])}

        def positions(operand):
            at = np.array([operand["offset"]])
            for loop in operand["loops"]:
                at = (at[:, None] + loop["stride"] * np.arange(loop["count"])).ravel()
            return set((at[:, None] + np.arange(operand["row_bytes"])).ravel().tolist())

        for number, step in enumerate(report["steps"]):
            sends, receives = step["kind"] == "send", step["kind"] == "recv"
            of = {kind: times.get((kind, step.get("message")), []) for kind in ("pack", "transmit", "unpack")}
            if not (sends or receives):
                begin, end = copies[number]
            elif "staging" in step:
                first, last = (of["pack"], of["transmit"]) if sends else (of["transmit"], of["unpack"])
                intervals += [(a[0], b[1], a[2]) for a, b in zip(first, last, strict=True)]
                begin, end = of["unpack" if receives else "pack"][0][0], of["unpack" if receives else "pack"][-1][1]
            else:
                begin, end = of["transmit"][0][0], of["transmit"][-1][1]
            for operand in step["inputs"]:
                for each in held if operand["name"] == "arena" else ():
                    if each["at"] & positions(operand):
                        each["until"] = max(each["until"], end)
            for operand in step["outputs"]:
                if operand["name"] == "arena":
                    at = positions(operand)
                    intervals += [(each["from"], each["until"], each["bytes"]) for each in held if each["at"] & at]
                    held = [each for each in held if not each["at"] & at]
                    held.append({"at": at, "from": begin, "until": 0, "bytes": operand["bytes"]})
        intervals += [(each["from"], each["until"], each["bytes"]) for each in held]
        return report["arena_bytes"], intervals

    def check_arena(self, job, views=0):
        """views: bytes of the memory of quantized views on each rank, which are in use always."""
        self.write("t.yaml", TOPOLOGY)
        data = data_of(self.page(job, f"--simulate={self.folder / 't.yaml'}"))
        self.report(f"--simulate={self.folder / 't.yaml'}", f"--trace={self.folder / 'trace.json'}")
        trace = self.json("trace.json")["traceEvents"]
        self.assertEqual([lane["rank"] for lane in data["time"]["lanes"]], list(range(data["world"])))
        for lane in data["time"]["lanes"]:
            with self.subTest(rank=lane["rank"]):
                limit, intervals = self.history(lane["rank"], trace)
                self.assertEqual(lane["limit"], limit)
                self.assertLessEqual(lane["most"], limit)
                self.assertEqual(lane["most"], max(n for _, n in lane["arena"]))
                edges = sorted({t for begin, end, _ in intervals for t in (begin, end)})
                for a, b in itertools.pairwise(edges):
                    if b - a > 4:  # the trace rounds to nanoseconds
                        middle = (a + b) // 2
                        wanted = sum(n for begin, end, n in intervals if begin <= middle < end) + views
                        self.assertEqual([n for time, n in lane["arena"] if time <= middle][-1], wanted)
        return data

    def test_arena(self):
        data = self.check_arena(JOB)
        self.assertGreater(max(lane["most"] for lane in data["time"]["lanes"]), 0)
        data = self.check_arena(RELAYED)
        self.assertGreater(data["time"]["lanes"][1]["most"], 0, "rank 1 relays")
        data = self.check_arena(STAGED.replace("FORMAT", "mxfp8").replace("LIMIT", "64KiB"))
        self.assertEqual(data["staging"], 64 << 10)
        self.assertGreater(data["time"]["lanes"][4]["most"], 96 * 96 * 2, "the elements of a matrix are staged")
        self.check_arena(
            STAGED.replace("FORMAT", "nvfp4").replace("LIMIT", "64KiB"), views=2 * 64
        )  # the amax of two matrices

    def test_large_plans(self):
        job = (
            (ROOT / "examples/kimi-k2-2048-to-1024.yaml")
            .read_text()
            .replace("model: models", f"model: {ROOT / 'examples/models'}")
        )
        page = self.page(job)
        data = data_of(page)
        self.assertEqual((data["world"], data["group"], len(data["ranks"])), (3072, 48, 64))
        self.assertLess(len(page.encode()), 5 << 20)
        self.assertEqual(
            sum(n for a, b, n, *_ in data["cells"]), self.report()["bytes"]["remote"] + self.report()["bytes"]["local"]
        )
        for a, b, n, _, _, parts in data["cells"]:
            self.assertTrue(
                all(48 * a <= part[0] < 48 * (a + 1) and 48 * b <= part[1] < 48 * (b + 1) for part in parts)
            )
            self.assertLessEqual(sum(part[2] for part in parts), n)
        self.assertTrue(all(tensor["pieces"] for tensor in data["tensors"]))

    def test_nodes(self):
        """Above 64 ranks a row is a node, or several, also of the lanes of the time line."""
        job = (
            "version: 1\nmodel: {dtype: bf16, tensors: {w: {shape: [960, 64], shard: {0: x}}}}\n"
            "source: {mesh: {x: 96}}\ntarget: {mesh: {x: 40}, ranks: 96..135}\n"
            "options: {topology: {ranks_per_node: 8}}\n"
        )
        data = data_of(self.page(job))
        self.assertEqual((data["world"], data["node"], data["group"], len(data["ranks"])), (136, 8, 8, 17))
        data = data_of(self.page(job, f"--simulate={ROOT / 'examples/topologies/h100x8.yaml'}"))
        lanes = data["time"]["lanes"]
        self.assertEqual([lane["rank"] // 8 for lane in lanes], list(range(17)))
        self.assertTrue(all(lane["spans"] for lane in lanes))

    def test_many_boxes(self):
        """However many boxes and pieces a plan has, the page has at most 5 MiB."""
        tensors = ", ".join(
            f"w{i}: {{shape: [1024, 64], shard: {{0: {{axis: x, cyclic: 1}}}}}}"
            for i in range(24 if "RESHARD_FULL" not in os.environ else 120)
        )
        page = self.page(
            f"version: 1\nmodel: {{dtype: bf16, tensors: {{{tensors}}}}}\nsource: {{mesh: {{x: 60}}}}\n"
            f"target: {{mesh: {{x: 64}}}}\n"
        )
        self.assertLess(len(page.encode()), 5 << 20)
        data = data_of(page)
        self.assertTrue(all(tensor["left"] and tensor["pieces"] for tensor in data["tensors"]))

    def test_refusals(self):
        self.page(JOB)
        plan = self.folder / "p.rplan"
        for flags, text in (
            (["--format=html"], "--format=html needs -o=FILE"),
            (["-o", self.folder / "x.html"], "-o needs --format=html"),
            (
                ["--format=html", "-o", self.folder / "x.html", "--rank=0"],
                "expected only -o, --simulate and --timeout beside it",
            ),
            (["--format=html", "-o", plan], "p.rplan"),
        ):
            with self.subTest(flags=flags):
                self.assertIn(text, run("reshard-inspect", plan, *flags, code=2).stderr)
        self.assertFalse((self.folder / "x.html").exists())

    def shown(self, text, script):
        """What a script at the end of the page writes into an attribute of the document."""
        self.write("clicks.html", text.replace("</html>", script + "</html>"))
        done = subprocess.run(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={self.folder / 'profile'}",
                "--enable-logging=stderr",
                "--dump-dom",
                f"file://{self.folder / 'clicks.html'}",
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual([line for line in done.stderr.splitlines() if "CONSOLE" in line], [])
        return json.loads(re.search(r'data-shown="(.*?)"', done.stdout)[1].replace("&quot;", '"'))

    @unittest.skipUnless(CHROMIUM, "Chromium is not installed")
    def test_labels_and_colors(self):
        """No label is cut or touches another one, at 3,072 ranks either. Boxes of the same elements in two params are
        drawn in stripes, in colors of the legend."""
        job = """version: 1
model:
  dtype: bf16
  tensors: {e: [151936, 4]}
  layouts:
    two:
      axes: [tp, pp]
      params: {first: {holds: e, shard: {0: tp}, at: {pp: first}}, last: {holds: e, shard: {0: tp}, at: {pp: last}}}
    one: {axes: [x], params: {e: {holds: e, shard: {0: {axis: x, scheme: balanced}}}}}
source: {layout: two, mesh: {tp: 2, pp: 2}}
target: {layout: one, mesh: {x: RANKS}, ranks: 4..LAST}
options: {topology: {ranks_per_node: 8}}
"""
        for ranks in (4, 3068):
            with self.subTest(ranks=ranks):
                shown = self.shown(
                    self.page(
                        job.replace("RANKS", str(ranks)).replace("LAST", str(ranks + 3)),
                        f"--simulate={ROOT / 'examples/topologies/h100x8.yaml'}",
                    ),
                    LOOKS,
                )
                self.assertGreater(shown.pop("labels"), 20)
                self.assertEqual(shown, {"outside": [], "touching": [], "colors": [], "striped": 4})

    @unittest.skipUnless(CHROMIUM, "Chromium is not installed")
    def test_in_a_browser(self):
        text = self.page(JOB, f"--simulate={ROOT / 'examples/topologies/h100x8.yaml'}")
        shown = self.shown(text, CLICKS)
        data = data_of(text)
        self.assertEqual((shown["errors"], shown["cells"], shown["tensors"]), ([], len(data["cells"]), 5))
        first = data["cells"][0]
        self.assertIn(f"rank {first[0]} to rank {first[1]}", shown["click"])
        self.assertIn("q.{layer}", shown["click"])
        self.assertIn(f"message {first[5][0][0]}round {first[5][0][1]}", shown["click"])
        self.assertNotEqual(shown["key"], shown["click"])
        self.assertEqual(shown["escape"], "No cell is selected.")
        for chart, pattern in (
            ("bars", r"Rank 0 sends .*; its arena has "),
            ("time", r"Rank \d+, \w+.*: [\d.]+ K?i?B, .* to "),
            ("arena", r"Rank \d+, .* of its arena of .* in use\."),
        ):
            with self.subTest(chart=chart):
                self.assertGreater(shown[chart]["marks"], 4)
                self.assertEqual(shown[chart]["tabs"], 1, "one stop of the Tab key for each picture")
                self.assertRegex(shown[chart]["click"], pattern)
                self.assertNotEqual(shown[chart]["key"], shown[chart]["click"])
        self.assertEqual(shown["found"], ["l.{layer}.e.{expert}.up"])
        self.assertIn("l.0.e.0.up", shown["tensor"])
        up = next(tensor for tensor in data["tensors"] if tensor["name"] == "l.{layer}.e.{expert}.up")
        self.assertEqual(
            shown["boxes"], [sum(len(holder["boxes"]) for holder in side["holders"]) for side in up["sides"]]
        )
        piece = next(piece for piece in up["pieces"] if piece[0] == [0, 0])
        for paths in shown["paths"]:
            self.assertTrue(
                any(
                    line.startswith(f"rank 0 → rank {piece[1][1]}")
                    and f"message {piece[4]} in round {piece[5]}" in line
                    for line in paths["lines"]
                ),
                paths["lines"],
            )
            self.assertTrue(all(paths["pieces"]), "pieces are drawn on both sides")
        self.assertIn("source, ranks 1", shown["path_key"].replace("rank 1:", "ranks 1:"))
        self.assertEqual(shown["linked"]["search"], data["patterns"][first[4][0][0]])
        self.assertEqual(shown["none"], "No tensor has this in its name.")


if __name__ == "__main__":
    unittest.main()
