# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of any plan, computed from the layouts alone, the text of `reshard-compile --emit=layout`.

An oracle: it shares no code with the compiler. It divides every dimension of every tensor into sets of positions that
the same index maps contain. A linear program finds what the busiest holder must send."""

import itertools
import re
from collections import Counter, defaultdict
from fractions import Fraction

ITEM = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp64": 8,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "u8": 1,
    "u16": 2,
    "u32": 4,
    "u64": 8,
    "bool": 1,
}

# Bytes of an element with its part of a scale, and whether the sender may quantize.
QUANTIZED = {
    "mxfp8": (1 + Fraction(1, 32), True),
    "block_fp8": (1 + Fraction(4, 128 * 128), True),
    "block_fp8_ue8m0": (1 + Fraction(1, 128 * 128), True),
    "nvfp4": (Fraction(1, 2) + Fraction(1, 16), False),
    "mxfp4": (Fraction(1, 2) + Fraction(1, 32), False),
    "int4": (Fraction(1, 2) + Fraction(2, 32), False),
}


def positions(text):
    """The logical positions of an index map as sorted disjoint ranges [(begin, end)]."""
    ranges = []
    for begin, end, step, count in re.findall(r"\[(\d+):(\d+)(?: step (\d+) x (\d+))? ->", text):
        ranges += [(int(begin) + i * int(step or 0), int(end) + i * int(step or 0)) for i in range(int(count or 1))]
    return tuple(sorted(ranges))


def numbers(text):
    """The numbers of a list of the IR text: `[0:3, 7]` gives [0, 1, 2, 7]."""
    result = []
    for first, last in re.findall(r"(\d+)(?::(\d+))?", text):
        result += range(int(first), int(last) if last else int(first) + 1)
    return result


class Endpoint:
    """An endpoint of the layout: world ranks by mesh rank, axes {name: (size, stride)}, shardings (axes, positions by
    coordinate) and params (presence, parts, form). The form is None if the memory has the bytes that are sent, else
    (bytes of an element in memory, whether the sender may convert)."""

    def __init__(self, line):
        self.ranks = numbers(re.search(r" ranks \[(.*?)\]", line)[1])
        self.axes, self.shardings, self.params = {}, [], []

    def coordinate(self, axes, mesh_rank):
        value = 0
        for axis in axes:
            size, stride = self.axes[axis]
            value = value * size + mesh_rank // stride % size
        return value

    def held(self, sharding, mesh_rank):
        axes, lists = self.shardings[sharding]
        return lists[self.coordinate(axes, mesh_rank)]


class Network:
    """The ranks of a job, their nodes and NICs, and the rates."""

    def __init__(self, text):
        head = re.search(r"world (\d+) .*ranks-per-node (\d+)", text)
        rates = re.search(r"^topology link (\d+) .*? nics (\d+) rate (\d+) .*copy (\d+)", text, re.MULTILINE)
        assert head and rates, "the job has no topology"
        self.world, self.per_node = int(head[1]), int(head[2])
        self.link_rate, self.nics, self.nic_rate, self.copy_rate = map(int, rates.groups())
        self.nodes = self.node(self.world - 1) + 1
        self.ranks_of, self.nics_of = defaultdict(list), defaultdict(set)  # by node
        for rank in range(self.world):
            self.ranks_of[self.node(rank)].append(rank)
            self.nics_of[self.node(rank)].add(self.nic(rank))

    def node(self, rank):
        return rank // self.per_node if self.per_node else 0

    def nic(self, rank):
        if not self.nics or not self.per_node:
            return rank
        return self.node(rank) * self.nics + rank % self.per_node * self.nics // self.per_node

    def link_of(self, rank):
        """The rate of the rank's link; 0 if there is no other rank on its node."""
        return self.link_rate if len(self.ranks_of[self.node(rank)]) > 1 else 0


def form(line):
    """The form of a param."""
    if stored := re.search(r" storage (\w+)", line):
        return Fraction(ITEM[stored[1]]), False
    if view := re.search(r" view elements (\w+)", line):
        return QUANTIZED[view[1]]
    return None


def read(text):
    """(tensor patterns, endpoints). A tensor pattern is (name, bytes of an element, index variables, shape)."""
    patterns, endpoints = [], []
    for line in text.splitlines():
        line = line.split(" //")[0]
        if line.startswith("tensor %"):
            name, dtype, shape, rest = re.match(r'tensor %\d+ "(.*?)" (\w+) \[([\d, ]*)\](.*)', line).groups()
            patterns.append(
                (name, ITEM[dtype], len(re.findall(r" for ", rest)), [int(n) for n in shape.split(",") if n.strip()])
            )
        elif line.startswith("endpoint"):
            endpoints.append(Endpoint(line))
        elif line.startswith("  axis"):
            name, size, stride = re.match(r"  axis (\S+) (\d+) stride (\d+)", line).groups()
            endpoints[-1].axes[name] = (int(size), int(stride))
        elif line.startswith("  sharding"):
            axes, rest = re.match(r"  sharding #\d+ over \((.*?)\)(?: unit \d+)? \| (.*)", line).groups()
            endpoints[-1].shardings.append(
                ([a.strip() for a in axes.split(",") if a], [positions(each) for each in rest.split(" | ")])
            )
        elif line.startswith("  param"):
            at = [(axis, numbers(list)) for axis, list in re.findall(r" at (\S+) \[(.*?)\]", line)]
            endpoints[-1].params.append((at, [], form(line)))
        elif line.startswith("    holds"):
            pattern, rest = re.match(r"    holds %(\d+)(.*)", line).groups()
            endpoints[-1].params[-1][1].append((int(pattern), [int(n) for n in re.findall(r"#(\d+) ->", rest)]))
    return patterns, endpoints


def rank_classes(endpoint, pattern):
    """[(positions of each dimension, bit mask of the ranks that hold them, form)]. Positions that several params hold
    are listed once for each."""
    result = []
    for at, parts, stored in endpoint.params:
        for held, shardings in parts:
            if held != pattern:
                continue
            boxes = Counter()
            for mesh_rank, rank in enumerate(endpoint.ranks):
                if all(endpoint.coordinate([axis], mesh_rank) in list for axis, list in at):
                    box = tuple(endpoint.held(sharding, mesh_rank) for sharding in shardings)
                    if all(box):
                        boxes[box] |= 1 << rank
            result += [(box, ranks, stored) for box, ranks in boxes.items()]
    return result


def refine(sets):
    """The number of positions in each combination of the sets: {bit mask of the sets that contain them: count}."""
    events = Counter()
    for ranges in sets:
        for begin, end in ranges:
            events.setdefault(begin, 0)
            events.setdefault(end, 0)
    cuts = sorted(events)
    index = {cut: i for i, cut in enumerate(cuts)}
    members = [0] * len(cuts)
    for number, ranges in enumerate(sets):
        for begin, end in ranges:
            for i in range(index[begin], index[end]):
                members[i] |= 1 << number
    result = Counter()
    for i, mask in enumerate(members[:-1]):
        if mask:
            result[mask] += cuts[i + 1] - cuts[i]
    return result


def bits(mask):
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def cells_of(boxes, dimensions):
    """The number of elements in each combination of boxes, which are a set of positions for each dimension: {bit mask
    of the boxes that contain them: count}."""
    found = Counter({(1 << len(boxes)) - 1: 1})
    for d in range(dimensions):
        distinct = sorted({box[d] for box in boxes})
        of_set = [0] * len(distinct)
        for b, box in enumerate(boxes):
            of_set[distinct.index(box[d])] |= 1 << b
        here = Counter()
        for mask, count in refine(distinct).items():
            here[sum(of_set[s] for s in bits(mask))] += count  # of_set are disjoint
        following = Counter()
        for (a, m), (b, n) in itertools.product(found.items(), here.items()):
            if a & b:
                following[a & b] += m * n
        found = following
    return found


class Cell:
    """Elements that the same ranks hold and the same ranks want: how many there are, the bytes that are sent, the bit
    mask of the holders and, for each rank that wants them, the forms of the params that they are for (several: two
    targets, tied params, index maps that repeat)."""

    def __init__(self, count, item, holders, wants):
        self.count, self.size, self.holders, self.wants = count, count * item, holders, wants
        self.lacking = {rank for rank in wants if not holders >> rank & 1}

    def forms(self, ranks):
        return {form for rank in ranks for form in self.wants[rank]}

    def least(self, wanters, converters):
        """The bytes of the narrowest form in which `wanters` can get the elements from outside: the converted form, if
        the sender may convert or if one of `converters` wants the elements in a converted form."""
        forms = self.forms(wanters)
        if None in forms or not (self.forms(converters) - {None} or all(sender for _, sender in forms)):
            return self.size
        return min(self.size, max(int(self.count * item) for item, _ in forms))


def cells(patterns, source, targets):
    """The cells of all targets."""
    for pattern, (_, item, variables, shape) in enumerate(patterns):
        held = rank_classes(source, pattern)
        wanted = [found for target in targets for found in rank_classes(target, pattern)]
        if not held or not wanted:
            continue
        for mask, count in cells_of([box for box, _, _ in held + wanted], variables + len(shape)).items():
            holders, wants = 0, defaultdict(list)
            for b in bits(mask):
                _, ranks, stored = (held + wanted)[b]
                if b < len(held):
                    holders |= ranks
                    continue
                for rank in bits(ranks):
                    wants[rank].append(stored)
            if wants:
                yield Cell(count, item, holders, wants)


def least_load(classes, rates):
    """The least time in which every class can leave its senders: {senders: bytes}, {sender: bytes per second}."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    classes = {senders: size for senders, size in classes.items() if size}
    if not classes:
        return 0.0
    unit, fastest = max(classes.values()), max(rates.values())
    variables = [(number, sender) for number, senders in enumerate(classes) for sender in senders]
    rows = {sender: row for row, sender in enumerate(rates)}
    sent = [(rows[sender], column, 1.0) for column, (_, sender) in enumerate(variables)]
    sent += [(row, len(variables), -rates[sender] / fastest) for sender, row in rows.items()]
    whole = [(number, column, 1.0) for column, (number, _) in enumerate(variables)]

    def matrix(entries, height):
        at, columns, values = zip(*entries)
        return coo_matrix((values, (at, columns)), shape=(height, len(variables) + 1)).tocsr()

    found = linprog(
        [0.0] * len(variables) + [1.0],
        A_ub=matrix(sent, len(rows)),
        b_ub=[0.0] * len(rows),
        A_eq=matrix(whole, len(classes)),
        b_eq=[size / unit for size in classes.values()],
        method="highs",
    )
    assert found.status == 0, found.message
    return found.fun * unit / fastest


def exits(network, cell, wanting):
    """The links and NICs of which one must carry each byte of a cell: those of the holders, or the NICs of a node
    without ranks of `wanting`, whatever is less. What leads to no rank that lacks it is left out."""
    result = set()
    for node in {network.node(rank) for rank in bits(cell.holders)}:
        ranks = set(network.ranks_of[node])
        holders = {rank for rank in ranks if cell.holders >> rank & 1}
        reach = network.world - cell.holders.bit_count() > len(ranks - holders)  # by NIC
        of_holders = {("link", rank) for rank in holders if holders != ranks}
        of_holders |= {("NIC", network.nic(rank)) for rank in holders if reach}
        of_node = {("NIC", nic) for nic in network.nics_of[node] if reach}
        time = lambda used: sum(network.link_rate if kind == "link" else network.nic_rate for kind, _ in used)
        result |= of_node if of_node and not ranks & wanting and time(of_node) < time(of_holders) else of_holders
    return frozenset(result)


def node_rest(network, node, needs):
    """The seconds of the longest cut around a node's ranks without some that hold bytes: all that do, or all that hold
    one byte."""
    sets = {holders for holders, _ in needs if holders}
    longest = 0.0
    for holders in sets | {frozenset().union(*sets)} if sets else ():
        rest = set(network.ranks_of[node]) - holders
        rate = len(holders) * network.link_rate + len({network.nic(rank) for rank in rest}) * network.nic_rate
        size = sum(n for (holding, wanting), n in needs.items() if holding <= holders and not wanting <= holders)
        longest = max(longest, size / rate if rest else 0.0)
    return longest


def seconds(cut, network):
    """The time of a cut of the report's `lower_bounds`, without latencies."""
    rates = {"links": network.link_rate, "nics": network.nic_rate, "copies": network.copy_rate}
    return cut["bytes"] / sum(cut[name] * rate for name, rate in rates.items()) if cut["bytes"] else 0.0


def lower_bounds(text):
    """The seconds of the largest cut of each kind without latencies, by the names of the report's `lower_bounds`."""
    network = Network(text)
    patterns, (source, *targets) = read(text)
    several = network.nodes > 1
    local, into, into_node, out, out_of_nodes = Counter(), Counter(), Counter(), (Counter(), Counter()), Counter()
    leaving = []  # cells and their bytes
    needs = defaultdict(Counter)  # by node, then by its ranks that hold bytes and those that lack them
    for cell in cells(patterns, source, targets):
        for rank in cell.wants.keys() - cell.lacking:
            local[rank] += cell.size * len(cell.wants[rank])
        for rank in cell.lacking:
            into[rank] += cell.least([rank], cell.wants.keys() - {rank})
        if cell.lacking:
            leaving.append((cell, cell.least(cell.lacking, cell.wants.keys() - cell.lacking)))
        by_node = defaultdict(set)
        for rank in cell.wants:
            by_node[network.node(rank)].add(rank)
        holding = {network.node(rank) for rank in bits(cell.holders)}
        lacking = by_node.keys() - holding
        for node, ranks in by_node.items() if several else ():
            if wanting := ranks & cell.lacking:
                holders = frozenset(rank for rank in network.ranks_of[node] if cell.holders >> rank & 1)
                needs[node][holders, frozenset(wanting)] += min(
                    cell.least([rank], range(0)) if None in cell.wants[rank] else cell.least([rank], [rank])
                    for rank in wanting
                )
        for node in lacking:
            into_node[node] += cell.least(by_node[node], cell.wants.keys() - by_node[node])
        if lacking:
            wanters = {rank for node in lacking for rank in by_node[node]}
            out_of_nodes[frozenset(holding)] += cell.least(wanters, cell.wants.keys() - wanters)
    by_nic = defaultdict(list)  # what each rank lacks
    for rank, size in into.items():
        by_nic[network.nic(rank)].append((size, network.link_of(rank)))
    several_ranks = 0.0
    for sizes in by_nic.values():
        sizes.sort(reverse=True)
        for j in range(2, len(sizes) + 1 if several else 0):
            rate = network.nic_rate + sum(link for _, link in sizes[:j])
            several_ranks = max(several_ranks, sum(size for size, _ in sizes[:j]) / rate)
    for cell, size in leaving:
        out[0][exits(network, cell, cell.lacking)] += size
        out[1][exits(network, cell, into.keys())] += size
    rest = max((node_rest(network, node, found) for node, found in needs.items()), default=0.0)
    nic_rate = network.nic_rate if several else 0
    rates = {("link", rank): network.link_of(rank) for rank in range(network.world) if network.link_of(rank)}
    rates |= {("NIC", network.nic(rank)): nic_rate for rank in range(network.world) if several}
    node_rates = {node: len(nics) * network.nic_rate for node, nics in network.nics_of.items()}
    return {
        "local_copies": max(local.values(), default=0) / network.copy_rate,
        "rank_ingress": max((size / (network.link_of(rank) + nic_rate) for rank, size in into.items()), default=0.0),
        "shared_nic_ingress": several_ranks,
        "node_ingress": max((size / node_rates[node] for node, size in into_node.items()), default=0.0),
        "node_rest_ingress": rest,
        "rank_egress": max(least_load(classes, rates) for classes in out),
        "node_egress": least_load(out_of_nodes, node_rates),
    }


def differences(cuts, text):
    """{kind: (seconds of the report's cut, seconds by this module)} of the kinds that differ."""
    network = Network(text)
    found = {kind: (seconds(cuts[kind], network) if kind in cuts else 0.0, t) for kind, t in lower_bounds(text).items()}
    return {kind: pair for kind, pair in found.items() if abs(pair[0] - pair[1]) > 1e-6 * max(pair) + 1e-12}


def remote_bytes(text):
    """Bytes that ranks get from others, once for each position, and those that nodes lack."""
    network = Network(text)
    patterns, (source, *targets) = read(text)
    remote = between = 0
    for cell in cells(patterns, source, targets):
        remote += cell.size * sum(len(cell.wants[rank]) for rank in cell.lacking)
        holding = {network.node(rank) for rank in bits(cell.holders)}
        between += cell.size * len({network.node(rank) for rank in cell.wants} - holding)
    return {"remote": remote, "between_nodes": between}


def busiest_sender(text):
    """The least number of bytes that the busiest rank sends if every rank receives the elements that it lacks from a
    replica (no relays), by a linear program: (with replicas of the same node preferred, with any replica). The first is
    None if some node lacks elements."""
    from scipy.optimize import linprog

    patterns, (source, *targets) = read(text)
    world, per_node = map(int, re.search(r"world (\d+) .*ranks-per-node (\d+)", text).groups())
    node_of = lambda rank: sum(1 << r for r in range(world) if not per_node or r // per_node == rank // per_node)
    local, any_replica, lacks = Counter(), Counter(), False
    for cell in cells(patterns, source, targets):
        for rank in cell.lacking:
            size = cell.size * len(cell.wants[rank])
            any_replica[cell.holders] += size
            local[cell.holders & node_of(rank) or cell.holders] += size
            lacks |= not cell.holders & node_of(rank)

    def solve(sent):
        variables = [(number, rank) for number, replicas in enumerate(sent) for rank in bits(replicas)]
        if not variables:
            return 0
        fractions = [[float(number == n) for n, _ in variables] + [0.0] for number in range(len(sent))]
        loads = [[float(rank == r) for _, r in variables] + [-1.0] for rank in range(world)]
        found = linprog(
            [0.0] * len(variables) + [1.0],
            A_ub=loads,
            b_ub=[0.0] * world,
            A_eq=fractions,
            b_eq=list(sent.values()),
            method="highs",
        )
        assert found.status == 0, found.message
        return found.fun

    return None if lacks else solve(local), solve(any_replica)
