// SPDX-License-Identifier: Apache-2.0
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element of SVG or HTML with attributes and children. */
function make(name, attributes = {}, ...children) {
  const svg = ["svg", "rect", "text", "line", "path", "g"].includes(name);
  const element = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.map(child => child instanceof Node ? child : String(child)));
  return element;
}

// Numbers.
const count = n => n.toLocaleString("en");
const counted = (n, what) => count(n) + " " + what + (n === 1 ? "" : "s");
function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < 5) { n /= 1024; ++unit; }
  return (unit ? n.toFixed(n < 10 ? 2 : 1) : n) + " " + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit];
}
const seconds = s => s < 1e-3 ? (s * 1e6).toFixed(1) + " µs" : s < 1 ? (s * 1e3).toFixed(2) + " ms" : s.toFixed(3) + " s";
const sum = list => list.reduce((a, b) => a + b, 0);
const largest = list => list.reduce((a, b) => Math.max(a, b), 0);
/** The width of a label of a picture (svg text in the style), in pixels. */
const pen = document.createElement("canvas").getContext("2d");
pen.font = "11px system-ui, sans-serif";
const widthOf = text => Math.ceil(pen.measureText(text).width);
/** "4.0 MiB" as "4 MiB", for axes. */
const short = text => text.replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ");
/** Round positions of an axis from 0 to `most`: powers of two of bytes, or 1, 2 and 5 of each power of ten. */
function ticks(most, binary) {
  let step = binary ? 1 : 10 ** Math.floor(Math.log10(most / 5));
  for (let k = 0; most / step > 5.5; ++k) step *= binary ? 2 : [2, 2.5, 2][k % 3];
  return Array.from({ length: Math.floor(most / step * (1 + 1e-9)) + 1 }, (_, i) => i * step);
}

// Ranks.
const side = Math.ceil(data.world / data.group);
/** The ranks of row or column i of the matrix. */
const ranksOf = i => data.group === 1 ? "rank " + i : "ranks " + i * data.group + "–" + (Math.min(data.world, (i + 1) * data.group) - 1);
const nodes = Math.round(data.group / data.node);
const groupText = data.group === 1 ? "" : data.node > 1 ? "Each row is " + counted(nodes, "node") + " of " + data.node + " ranks. " : "Each row is " + data.group + " neighboring ranks. ";

/**
 * Makes marks of a picture usable by pointer and keyboard. marks: [{element, x, y, show}]; show() explains the mark and
 * returns a text for screen readers. A mark under the pointer is shown; one that is clicked or focused stays shown
 * until Escape. One mark can be reached with Tab, the others from it with the arrow keys. clear(): nothing is shown.
 */
function pick(picture, marks, clear) {
  let kept = -1, reachable = 0;
  marks.forEach((mark, i) => {
    mark.element.classList.add("mark");
    mark.element.setAttribute("tabindex", i ? -1 : 0);
    mark.element.setAttribute("role", "button");
    mark.element.mark = i;
  });
  const show = i => {
    for (const other of picture.querySelectorAll(".mark.on")) other.classList.remove("on");
    if (i < 0) return clear();
    marks[i].element.classList.add("on");
    marks[i].element.setAttribute("aria-label", marks[i].show());
  };
  const keep = i => {
    marks[reachable].element.setAttribute("tabindex", -1);
    marks[reachable = i].element.setAttribute("tabindex", 0);
    show(kept = i);
  };
  /** The nearest mark in a direction; the distance across counts more. */
  const next = (from, dx, dy) => {
    let best = -1, least = Infinity;
    marks.forEach((mark, i) => {
      const x = mark.x - marks[from].x, y = mark.y - marks[from].y, along = x * dx + y * dy, across = Math.abs(x * dy) + Math.abs(y * dx);
      if (along > 0.01 && along + 8 * across < least) { least = along + 8 * across; best = i; }
    });
    return best;
  };
  picture.addEventListener("pointerover", event => event.target.mark !== undefined && show(event.target.mark));
  picture.addEventListener("pointerleave", () => show(kept));
  picture.addEventListener("click", event => event.target.mark !== undefined && keep(event.target.mark));
  picture.addEventListener("focusin", event => event.target.mark !== undefined && event.target.mark !== kept && keep(event.target.mark));
  picture.addEventListener("keydown", event => {
    if (event.target.mark === undefined) return;
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const to = way ? next(event.target.mark, ...way) : { Enter: event.target.mark, " ": event.target.mark, Home: 0, End: marks.length - 1 }[event.key];
    if (event.key === "Escape") show(kept = -1);
    else if (to === undefined) return;
    else if (to >= 0) { keep(to); marks[to].element.focus(); }
    event.preventDefault();
  });
}
/** pick() for pictures whose marks are explained by one line of text. */
function pickLine(picture, marks, id) {
  const hint = marks.length ? "Point at a bar, click it, or move with the arrow keys, to see its numbers." : "";
  const line = text => $(id).replaceChildren(make("span", { class: text === hint ? "soft" : "" }, text));
  pick(picture, marks.map(mark => ({ ...mark, show: () => { line(mark.text()); return mark.text(); } })), () => line(hint));
  line(hint);
}
const key = (id, ...items) => $(id).replaceChildren(...items.map(([color, text, dashed]) =>
  make("span", {}, make("i", dashed ? { class: "dashed", style: "color: var(--" + color + ")" } : { style: "background: var(--" + color + ")" }), text)));

// The frame of charts with a row for each rank: names of rows at the left, an axis below.
const LEFT = widthOf("rank " + (data.world - 1)) + 12, RIGHT = widthOf("1023.9 MiB") + 8;
const WIDTH = Math.max(420, Math.min(1030, document.querySelector("main").clientWidth - LEFT - RIGHT - 4));
function chart(rows, height, label, most, format, binary) {
  const bottom = rows.length * height + 6, svg = make("svg", { width: LEFT + WIDTH + RIGHT, height: bottom + 22, role: "group", "aria-label": label });
  for (const at of ticks(most, binary)) {
    const x = LEFT + WIDTH * at / most;
    svg.append(make("line", { x1: x, x2: x, y1: 0, y2: bottom, stroke: "var(--line)" }), make("text", { x, y: bottom + 15, "text-anchor": at ? "middle" : "start" }, at ? short(format(at)) : "0"));
  }
  rows.forEach((rank, i) => (height >= 12 || i % 2 === 0) && svg.append(make("text", { x: LEFT - 6, y: i * height + height / 2 + 6, "text-anchor": "end" }, "rank " + rank)));
  return svg;
}

function showSummary() {
  $("title").textContent = (data.model || "plan") + ": " + data.endpoints.map(e => (e.layout || "no layout") + (e.storage ? " (files)" : "")).join(" → ");
  document.title = $("title").textContent;
  $("sub").textContent = data.digest + " · " + data.compiler;
  for (const [name, value] of [["to the targets", bytes(data.bytes.target)], ["between ranks", bytes(data.bytes.remote)], ["inside ranks", bytes(data.bytes.local)],
      ["of files", bytes(data.bytes.storage)], ["messages", count(data.messages)], ["rounds", count(data.rounds)], ["transfers", count(data.transfers)], ["ranks", count(data.world)]])
    $("figures").append(make("div", {}, make("b", {}, value), name));
  $("sides").append(make("tr", {}, ...["side", "layout", "mesh", "ranks"].map(t => make("th", {}, t))),
    ...data.endpoints.map(e => make("tr", {}, make("td", {}, e.role), make("td", {}, e.layout || "–"), make("td", { class: "mono" }, e.axes.map(a => a[0] + " " + a[1]).join(" · ") || "1"),
      make("td", {}, count(e.ranks) + (e.storage ? " files" : "") + (e.replicas ? ", of each of " + e.replicas + " replicas" : "")))));
}

/** What a cell of the matrix moves, as the contents of the panel beside it. */
function cellPanel([from, to, n, messages, patterns, parts], title) {
  const rest = n - sum(patterns.map(p => p[1])), table = (...rows) => make("table", {}, ...rows);
  const row = (first, ...others) => make("tr", {}, make("td", { class: "n" }, first), ...others.map(each => make("td", {}, each)));
  const search = pattern => { const link = make("button", { class: "link mono", type: "button" }, pattern); link.addEventListener("click", () => find(pattern)); return link; };
  const unlisted = n - sum(parts.map(p => p[2]));
  return [make("b", {}, title), make("p", {}, bytes(n) + (messages ? " in " + counted(messages, "message") : ", copied")),
    make("h3", {}, "Params"), table(...patterns.map(([pattern, of]) => row(bytes(of), search(data.patterns[pattern]))), ...(rest > 0 ? [row(bytes(rest), "others")] : [])),
    ...(parts.length ? [make("h3", {}, data.group === 1 ? "Messages" : "Pairs of ranks"), table(
      ...(data.group === 1 ? parts.map(([message, round, of]) => row(bytes(of), "message " + message, "round " + round))
        : parts.map(([a, b, of, m]) => row(bytes(of), a === b ? "inside rank " + a : "rank " + a + " to rank " + b, m ? counted(m, "message") : "copied"))),
      ...(unlisted > 0 ? [row(bytes(unlisted), "others")] : []))] : [])];
}

function showMatrix() {
  const size = Math.max(8, Math.min(34, Math.floor(560 / side))), left = Math.max(widthOf("from rank ↓"), widthOf(data.world - 1)) + 8, top = 34, most = Math.max(1, largest(data.cells.map(c => c[2])));
  const svg = make("svg", { width: left + side * size + 8, height: top + side * size + 4, role: "group", "aria-label": "bytes from each rank (row) to each rank (column)" });
  const every = Math.ceil(Math.max(14, widthOf(data.world - 1) + 8) / size); // labels do not touch
  svg.append(make("text", { x: left, y: 11 }, "to rank →"), make("text", { x: 0, y: top - 6 }, "from rank ↓"));
  for (let i = 0; i < side; i += every)
    svg.append(make("text", { x: left - 5, y: top + i * size + size / 2 + 4, "text-anchor": "end" }, i * data.group),
      make("text", { x: left + i * size + (size > 20 ? size / 2 : 0), y: top - 6, "text-anchor": size > 20 ? "middle" : "start" }, i * data.group));
  svg.append(make("rect", { x: left, y: top, width: side * size, height: side * size, fill: "none", stroke: "var(--line)" }));
  for (let i = data.node; data.group === 1 && data.node > 1 && i < side; i += data.node)
    svg.append(make("line", { x1: left + i * size, x2: left + i * size, y1: top, y2: top + side * size, stroke: "var(--line)" }),
      make("line", { x1: left, x2: left + side * size, y1: top + i * size, y2: top + i * size, stroke: "var(--line)" }));
  const marks = data.cells.map(cell => {
    const [from, to, n] = cell, own = from === to && data.group === 1, x = left + to * size, y = top + from * size;
    const title = own ? "Inside " + ranksOf(from) : from === to ? "Among " + ranksOf(from) : ranksOf(from) + " to " + ranksOf(to);
    const element = make("rect", { class: "cell", x: x + 0.5, y: y + 0.5, width: size - 1, height: size - 1, fill: own ? "var(--copy)" : "rgb(var(--heat))",
      "fill-opacity": (0.15 + 0.85 * Math.sqrt(n / most)).toFixed(3) });
    svg.append(element);
    return { element, x, y, show: () => { $("cell").replaceChildren(...cellPanel(cell, title)); return title + ": " + bytes(n); } };
  });
  $("matrix").append(svg);
  const clear = () => $("cell").replaceChildren(make("p", { class: "soft" }, "No cell is selected."));
  pick(svg, marks, clear);
  clear();
  $("matrix-note").textContent = data.cells.length ? groupText.replace("row is", "row and column is") +
    "Point at a cell, click it, or move with the arrow keys, to see what it transfers." : "No rank moves anything.";
  if (!data.cells.length) return;
  $("matrix-key").append(...[0.05, 0.25, 1].map(part => make("span", {}, make("i", { style: "background: rgba(var(--heat), " + (0.15 + 0.85 * Math.sqrt(part)) + ")" }), bytes(Math.round(most * part)))));
  if (data.group === 1 && data.cells.some(c => c[0] === c[1])) $("matrix-key").append(make("span", {}, make("i", { style: "background: var(--copy)" }), "inside a rank"));
}

function showBars() {
  const height = 16, most = Math.max(1, largest(data.ranks.flatMap(r => [r[0][0], r[1][0]])));
  const svg = chart(data.ranks.map((_, i) => i * data.group), height, "bytes that each rank sends and receives", most, bytes, true), x = n => LEFT + WIDTH * n / most, marks = [];
  data.ranks.forEach((group, i) => [0, 1].forEach(k => {
    const [n, rank] = group[k], element = make("rect", { x: LEFT, y: i * height + 3 + k * 6, width: n ? Math.max(1, x(n) - LEFT) : 0, height: 5, fill: "var(--" + ["send", "receive"][k] + ")" });
    if (!n) return;
    svg.append(element);
    marks.push({ element, x: 8 * k, y: i * height + 6 * k, text: () => (data.group > 1 ? "Of " + ranksOf(i) + " rank " + rank : "Rank " + rank) + [" sends ", " receives "][k] + (data.group > 1 ? "most: " : "") + bytes(n) +
      "; its arena has " + bytes(data.ranks[i][3][0]) + "." });
  }));
  $("bars").append(svg);
  const busiest = k => bytes(largest(data.ranks.map(r => r[k][0])));
  $("bars-note").textContent = (data.group > 1 ? groupText + "Of each row the rank with most is drawn. " : "") + "The busiest rank sends " + busiest(0) + " and receives " + busiest(1) +
    ". Largest arena: " + bytes(largest(data.ranks.map(r => r[3][0]))) + ".";
  key("bars-key", ["send", "sent"], ["receive", "received"]);
  pickLine(svg, marks, "bars-detail");
}

const KINDS = [["pack", "pack"], ["send", "send"], ["unpack", "unpack"], ["copy", "copy"], ["receive", "receive"]], LANES = [2, 0, 2, 2, 1];
const lanesNote = time => data.group > 1 ? groupText + "Of each row the rank that is busy longest is drawn. " : "";
function showTime(time) {
  const height = 18, end = Math.max(time.seconds, time.bound || 0) || 1e-9, x = s => LEFT + WIDTH * s / end, marks = [];
  $("time-note").textContent = lanesNote(time) + "Simulated: " + seconds(time.seconds) + (data.endpoints.some(e => e.replicas) ? " for one engine replica" : "") +
    (time.bound === null ? "; the lower bound of all plans is unknown, because this one was compiled for other nodes: compile it with this topology (options.topology)." :
      "; lower bound of all plans " + seconds(time.bound) + "; this plan: " + (time.bound ? time.seconds / time.bound : 1).toFixed(3) + " ×.");
  key("time-key", ...KINDS, ...(time.bound === null ? [] : [["bad", "lower bound", true]]));
  const svg = chart(time.lanes.map(lane => lane.rank), height, "what each rank does over time", end, seconds, false);
  time.lanes.forEach((lane, i) => lane.spans.forEach(([kind, begin, length, peer, n]) => {
    const element = make("rect", { x: x(begin * 1e-9).toFixed(2), y: i * height + 4 + 4 * LANES[kind], width: Math.max(1, WIDTH * length * 1e-9 / end).toFixed(2), height: 4, fill: "var(--" + KINDS[kind][0] + ")" });
    svg.append(element);
    marks.push({ element, x: x(begin * 1e-9), y: i * height + 4 * LANES[kind], text: () => "Rank " + lane.rank + ", " + KINDS[kind][1] +
      (kind === 3 ? "" : peer < 0 ? ", several ranks" : [" for", " to", " from", "", " from"][kind] + " rank " + peer) + ": " + bytes(n) + ", " + seconds(begin * 1e-9) + " to " + seconds((begin + length) * 1e-9) + "." });
  }));
  if (time.bound !== null) svg.append(make("line", { class: "bound", x1: x(time.bound), x2: x(time.bound), y1: 0, y2: time.lanes.length * height + 6, stroke: "var(--bad)", "stroke-width": 1.5, "stroke-dasharray": "5 3" }));
  $("time").append(svg);
  pickLine(svg, marks, "time-detail");
  $("terms").append(...Object.entries(time.terms).map(([name, s]) => make("tr", {}, make("td", { class: "soft" }, "lower bound by " + name), make("td", { class: "n" }, seconds(s)))));
}

function showArena(time) {
  const height = 26, end = time.seconds || 1e-9, limit = largest(time.lanes.map(lane => lane.limit)), x = ns => LEFT + WIDTH * ns * 1e-9 / end, marks = [];
  const staging = data.staging ? "options.staging allows " + bytes(data.staging) + ". " : "";
  if (!limit) { $("arena-note").textContent = staging + "No rank of this plan needs an arena: all messages are sent and received in place."; return; }
  const fullest = time.lanes.reduce((a, b) => b.most > a.most ? b : a);
  $("arena-note").textContent = lanesNote(time) + "Bytes of the arena that are in use, in the simulated time. All rows have one scale, up to " + bytes(limit) + ". " + staging +
    "Most are in use on rank " + fullest.rank + ": " + bytes(fullest.most) + " of " + bytes(fullest.limit) + ".";
  key("arena-key", ["arena", "in use"], ["bad", "size of the rank's arena, its limit", true]);
  const svg = chart(time.lanes.map(lane => lane.rank), height, "bytes of each rank's arena in use over time", end, seconds, false);
  time.lanes.forEach((lane, i) => {
    const bottom = i * height + height, y = n => bottom - (height - 6) * n / limit;
    svg.append(make("line", { x1: LEFT, x2: LEFT + WIDTH, y1: bottom, y2: bottom, stroke: "var(--line)" }));
    lane.arena.forEach(([begin, n], p) => {
      const until = p + 1 < lane.arena.length ? lane.arena[p + 1][0] : Math.round(end * 1e9);
      if (!n || until <= begin) return;
      const element = make("rect", { x: x(begin).toFixed(2), y: y(n).toFixed(2), width: Math.max(0.6, x(until) - x(begin)).toFixed(2), height: (bottom - y(n)).toFixed(2), fill: "var(--arena)" });
      svg.append(element);
      marks.push({ element, x: x(begin), y: bottom, text: () => "Rank " + lane.rank + ", " + seconds(begin * 1e-9) + " to " + seconds(until * 1e-9) + ": " + bytes(n) + " of its arena of " + bytes(lane.limit) + " in use." });
    });
    if (lane.limit) svg.append(make("line", { class: "limit", x1: LEFT, x2: LEFT + WIDTH, y1: y(lane.limit), y2: y(lane.limit), stroke: "var(--bad)", "stroke-dasharray": "5 3" }),
      make("text", { x: LEFT + WIDTH + 4, y: y(lane.limit) + 8 }, short(bytes(lane.limit))));
  });
  $("arena").append(svg);
  pickLine(svg, marks, "arena-detail");
}

// Tensors. A piece is [from, to, sender, receiver, message, round, relay, bytes, boxes, cut]; a box is [row, row end, column, column end].
const hue = i => "hsl(" + (i * 137.5) % 360 + " 55% 62%)";
function holdersOf(holder, e) {
  const shown = holder.ranks.slice(0, 6), more = holder.ranks.length - shown.length + holder.more, what = data.endpoints[e].storage ? "file" : "rank";
  return what + (holder.ranks.length > 1 ? "s " : " ") + shown.join(", ") + (more ? " and " + count(more) + " more" : "");
}
const meet = (a, b) => a[0] < b[1] && b[0] < a[1] && a[2] < b[3] && b[2] < a[3];
const span = (name, begin, end) => end - begin === 1 ? name + " " + begin : name + "s " + begin + "–" + (end - 1);
const boxText = ([r0, r1, c0, c1]) => span("row", r0, r1) + ", " + span("column", c0, c1);
const placeOf = ([endpoint, number]) => (data.endpoints[endpoint].storage ? "file " : "rank ") + number;
const anyMeet = (boxes, others) => boxes.some(a => others.some(b => meet(a, b)));
const same = (a, b) => a[0] === b[0] && a[1] === b[1];

/** The pieces of a tensor that a box of a holder on side e consists of, or of which it is the source, and those before
    and after them where ranks forward. */
function piecesOf(tensor, e, holder, box) {
  const of = end => end[0] === e && holder.ranks.includes(end[1]);
  const found = tensor.pieces.filter(piece => of(piece[e ? 1 : 0]) && anyMeet(piece[8], [box])), all = new Set(found);
  for (const piece of all) // grows while it is read
    for (const other of tensor.pieces)
      if (!all.has(other) && (e ? same(other[1], piece[0]) : same(other[0], piece[1])) && piece[e ? 0 : 1][0] > 0 && anyMeet(other[8], piece[8])) all.add(other);
  return [...all];
}
/** One line: from where to where, which elements, by which messages, through which rank. */
function pathText([from, to, sender, receiver, message, round, relay, n, boxes, cut]) {
  const reads = data.endpoints[from[0]].storage ? ", read by rank " + sender : "", writes = data.endpoints[to[0]].storage ? ", written by rank " + receiver : "";
  const way = message < 0 ? "copied inside rank " + receiver : relay ?
    "message " + relay[1] + " in round " + relay[2] + " to the arena of rank " + relay[0] + ", which forwards it by message " + message + " in round " + round :
    "message " + message + " in round " + round;
  return [placeOf(from) + (from[0] ? " (forwards)" : "") + reads + " → " + placeOf(to) + writes, bytes(n), boxes.length === 1 && !cut ? boxText(boxes[0]) : (cut ? "more than " : "") + boxes.length + " boxes", way];
}

/** For each holder [slot, slots]: holders whose boxes meet have different ones of the same slots. */
function slotsOf(holders) {
  const boxes = holders.flatMap((holder, h) => holder.boxes.map(box => ({ box, h }))), distinct = d => new Set(boxes.map(each => each.box[d])).size;
  const along = distinct(0) >= distinct(2) ? 0 : 2, others = holders.map(() => new Set());
  let before = [];
  for (const each of boxes.sort((a, b) => a.box[along] - b.box[along])) {
    before = before.filter(other => other.box[along + 1] > each.box[along]);
    for (const other of before) if (other.h !== each.h && meet(other.box, each.box)) { others[other.h].add(each.h); others[each.h].add(other.h); }
    before.push(each);
  }
  const result = [];
  holders.forEach((_, first) => {
    if (result[first]) return;
    const group = new Set([first]);
    for (const h of group) for (const other of others[h]) group.add(other); // grows while it is read
    for (const h of group) {
      const taken = [...others[h]].map(other => result[other] && result[other][0]);
      let slot = 0;
      while (taken.includes(slot)) ++slot;
      result[h] = [slot];
    }
    const slots = 1 + largest([...group].map(h => result[h][0]));
    for (const h of group) result[h].push(slots);
  });
  return result;
}
/** The outline of a box at {x, y, width, height}: whole, or of several slots the stripes of one, so that colors of boxes that meet do not mix. */
function outline({ x, y, width, height }, [slot, slots]) {
  const STRIPE = 5, bar = (from, to) => "M" + from.toFixed(2) + " " + y.toFixed(2) + "H" + to.toFixed(2) + "V" + (y + height).toFixed(2) + "H" + from.toFixed(2) + "Z";
  const bars = [];
  for (let from = (Math.floor(x / STRIPE / slots) * slots + slot) * STRIPE; slots > 1 && from < x + width; from += STRIPE * slots)
    if (from + STRIPE > x) bars.push(bar(Math.max(x, from), Math.min(x + width, from + STRIPE)));
  return bars.join("") || bar(x + width * slot / slots, x + width * (slot + 1) / slots); // a narrow box has a part of its width
}

function picture(tensor, holders, e, show) {
  const left = 6 + Math.max(widthOf("row 0"), widthOf(count(tensor.rows - 1))), top = 16, width = 300, height = Math.max(28, Math.min(300, tensor.columns > 1 ? width * tensor.rows / tensor.columns : 120));
  const svg = make("svg", { width: left + width + 4, height: top + height + 4, role: "group", "aria-label": data.endpoints[e].role + ": who holds which rows and columns of " + tensor.example }), marks = [];
  const place = ([r0, r1, c0, c1], least) => ({ x: left + width * c0 / tensor.columns, y: top + height * r0 / tensor.rows, width: Math.max(least, width * (c1 - c0) / tensor.columns), height: Math.max(least, height * (r1 - r0) / tensor.rows) });
  svg.append(make("text", { x: left, y: 11 }, "column 0"), make("text", { x: left + width, y: 11, "text-anchor": "end" }, count(tensor.columns - 1)), make("text", { x: left - 4, y: top + 9, "text-anchor": "end" }, "row 0"),
    ...(tensor.rows > 1 ? [make("text", { x: left - 4, y: top + height, "text-anchor": "end" }, count(tensor.rows - 1))] : []), make("rect", { x: left, y: top, width, height, fill: "none", stroke: "var(--line)" }));
  const slots = slotsOf(holders);
  holders.forEach((holder, h) => holder.boxes.forEach(box => {
    const at = place(box, 1), element = make("path", { d: outline(at, slots[h]), fill: hue(h), stroke: "var(--page)", "stroke-width": Math.min(at.width, at.height) > 8 ? 0.6 : 0 });
    svg.append(element);
    marks.push({ element, x: at.x + at.width / 2, y: at.y + at.height / 2, show: () => show(holder, box) });
  }));
  const overlay = make("g", { class: "pieces" });
  svg.append(overlay);
  return { svg, marks, draw: boxes => overlay.replaceChildren(...boxes.map(box => make("rect", { ...place(box, 2), class: "piece" }))) };
}

function showTensor(tensor, button) {
  for (const other of $("list").querySelectorAll("button")) { other.setAttribute("aria-selected", other === button); other.setAttribute("tabindex", other === button ? 0 : -1); }
  const paths = make("div", { id: "paths", "aria-live": "polite" }), pictures = [], LINES = 24;
  const clear = () => {
    for (const each of pictures) if (each) each.draw([]);
    paths.replaceChildren(make("p", { class: "soft" }, "No box is selected." + (tensor.left ? " The page has the paths to some ranks only: it has no room for all." : "")));
  };
  const show = (e, holder, box) => {
    const pieces = piecesOf(tensor, e, holder, box), title = data.endpoints[e].role + ", " + holdersOf(holder, e) + ": " + boxText(box);
    pictures.forEach((each, s) => each && each.draw(pieces.filter(p => s === p[0][0] || s === p[1][0]).flatMap(p => p[8])));
    const without = e ? holder.ranks.filter(rank => !pieces.some(p => same(p[1], [e, rank]))) : [];
    paths.replaceChildren(make("p", {}, make("b", {}, title)),
      ...(pieces.length ? [make("div", { class: "wide" }, make("table", {}, make("tr", {}, ...["path", "bytes", "elements", "by"].map((t, i) => make("th", { class: i === 1 ? "n" : "" }, t))),
        ...pieces.slice(0, LINES).map(piece => make("tr", { class: "path" }, ...pathText(piece).map((text, i) => make("td", { class: i === 1 ? "n" : "" }, text))))))] :
        e ? [] : [make("p", { class: "soft" }, "No rank that is drawn takes elements from here" + (tensor.left ? ", as far as the page has paths." : ": other ranks hold the same, or no target needs them."))]),
      ...(pieces.length > LINES ? [make("p", { class: "soft" }, "and " + count(pieces.length - LINES) + " more pieces")] : []),
      ...(without.length || (e && holder.more) ? [make("p", { class: "soft" }, "The page has no paths to " + [...(without.length ? [(without.length > 1 ? "ranks " : "rank ") + without.join(", ")] : []),
        ...(holder.more ? [count(holder.more) + (without.length ? " more" : " other ranks") + " of this group"] : [])].join(" and ") + ".")] : []));
    return title;
  };
  const sides = tensor.sides.map(({ holders, left }, e) => {
    if (holders.length) {
      pictures[e] = picture(tensor, holders, e, (holder, box) => show(e, holder, box));
      pick(pictures[e].svg, pictures[e].marks, clear);
    }
    return make("div", {}, make("b", {}, data.endpoints[e].role + " " + data.endpoints[e].layout), ...(holders.length ? [make("div", { class: "wide" }, pictures[e].svg)] : [make("p", { class: "soft" }, "No rank has it.")]),
      ...(left ? [make("p", { class: "soft" }, count(left) + " more groups of ranks are not drawn.")] : []),
      ...(holders.some(h => h.cut) ? [make("p", { class: "soft" }, "Only the first boxes of each group are drawn.")] : []),
      make("div", { class: "legend" }, make("table", {}, ...holders.map((holder, h) => make("tr", {}, make("td", { style: "color:" + hue(h) }, "■"), make("td", {}, holdersOf(holder, e)), make("td", { class: "mono" }, holder.param))))));
  });
  $("tensor").replaceChildren(make("p", {}, make("b", { class: "mono" }, tensor.example), " " + tensor.dtype + ", " + count(tensor.rows) + " × " + count(tensor.columns)), make("div", { class: "sides" }, ...sides), paths);
  clear();
}
function search() {
  const text = $("search").value.toLowerCase(), found = data.tensors.filter(t => t.name.toLowerCase().includes(text) || t.sides.some(s => s.holders.some(h => h.param.toLowerCase().includes(text))));
  $("list").replaceChildren(...found.map((tensor, i) => {
    const button = make("button", { role: "option", type: "button", "aria-selected": false, tabindex: i ? -1 : 0 }, tensor.name);
    button.addEventListener("click", () => showTensor(tensor, button));
    return button;
  }));
  if (!found.length) $("list").append(make("p", { class: "soft" }, "No tensor has this in its name."));
}
/** Searches for the tensors of a param, and shows the first. */
function find(param) {
  $("search").value = param;
  search();
  const first = $("list").querySelector("button");
  if (first) first.click();
  $("search").scrollIntoView({ block: "center" });
}
function showTensors() {
  $("search").addEventListener("input", search);
  $("list").addEventListener("keydown", event => {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key], to = next && event.target[next];
    if (to) { event.preventDefault(); to.click(); to.focus(); }
  });
  search();
  if (data.tensors.length) showTensor(data.tensors[0], $("list").querySelector("button"));
}

showSummary();
showMatrix();
showBars();
if (data.time) { showTime(data.time); showArena(data.time); }
else for (const id of ["time-note", "arena-note"]) $(id).textContent = "Not simulated. Add --simulate=TOPOLOGY for the times on a cluster.";
showTensors();
