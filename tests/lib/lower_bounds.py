# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of any plan, computed from the layouts alone, the text of `reshard-compile --emit=layout`.

An oracle: it shares no code with the compiler. It divides every dimension of every tensor into sets of positions that
the same index maps contain."""

import itertools
import re
from collections import Counter

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
    coordinate) and params (presence, parts)."""

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


def read(text):
    """(world, ranks per node, NICs per node, tensor patterns, endpoints); 0: no topology. A tensor pattern is (name,
    bytes of an element, number of index variables, shape)."""
    head = re.search(r"world (\d+) .*ranks-per-node (\d+)", text)
    nics = re.search(r" nics (\d+) ", text)
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
            endpoints[-1].params.append((at, []))
        elif line.startswith("    holds"):
            pattern, rest = re.match(r"    holds %(\d+)(.*)", line).groups()
            endpoints[-1].params[-1][1].append((int(pattern), [int(n) for n in re.findall(r"#(\d+) ->", rest)]))
    return int(head[1]), int(head[2]), int(nics[1]) if nics else 0, patterns, endpoints


def rank_classes(endpoint, pattern):
    """[(positions of each dimension, bit mask of the ranks that hold them)]. Positions that several params hold are
    listed once for each."""
    result = []
    for at, parts in endpoint.params:
        for held, shardings in parts:
            if held != pattern:
                continue
            boxes = Counter()
            for mesh_rank, rank in enumerate(endpoint.ranks):
                if all(endpoint.coordinate([axis], mesh_rank) in list for axis, list in at):
                    box = tuple(endpoint.held(sharding, mesh_rank) for sharding in shardings)
                    if all(box):
                        boxes[box] |= 1 << rank
            result += boxes.items()
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


def cells(patterns, source, targets):
    """Yields (bytes, bit mask of the source ranks that hold them, target ranks that need them) for each target and each
    set of elements that the same ranks hold. A rank that needs the elements at two positions (tied params, index maps
    that repeat) is listed twice: they are sent twice."""
    for pattern, (_, item, variables, shape) in enumerate(patterns):
        held = rank_classes(source, pattern)
        for target in targets:
            wanted = rank_classes(target, pattern)
            boxes, ranks = zip(*held, *wanted) if held + wanted else ((), ())
            found = cells_of(boxes, variables + len(shape))
            sources = (1 << len(held)) - 1
            for mask, count in found.items():
                replicas = 0
                for b in bits(mask & sources):
                    replicas |= ranks[b]
                yield count * item, replicas, [rank for b in bits(mask & ~sources) for rank in bits(ranks[b])]


def lower_bounds(text):
    """The bounds of the report's `lower_bounds` and `bytes`, in bytes, by their names there."""
    world, per_node, nics, patterns, (source, *targets) = read(text)
    node = (lambda rank: rank // per_node) if per_node else (lambda rank: 0)
    nic = (lambda rank: node(rank) * nics + rank % per_node * nics // per_node) if nics else (lambda rank: rank)
    nics_of = {}
    for rank in range(world):
        nics_of.setdefault(node(rank), set()).add(nic(rank))
    taking_part = {rank for endpoint in (source, *targets) for rank in endpoint.ranks}
    local, into, into_node = Counter(), Counter(), Counter()
    for size, replicas, needers in cells(patterns, source, targets):
        lacking = [rank for rank in needers if not replicas >> rank & 1]
        local.update({rank: size * count for rank, count in Counter(needers).items() if replicas >> rank & 1})
        for rank in lacking:
            into[rank] += size
        for each in {node(rank) for rank in lacking} - {node(rank) for rank in bits(replicas)}:
            into_node[each] += size
    used = {each for rank in taking_part for each in nics_of[node(rank)]}
    up = lambda a, b: -(-a // b)
    return {
        "rank_local": max(local.values(), default=0),
        "rank_ingress": max(into.values(), default=0),
        "rank_mean": up(sum(into.values()), len(taking_part)),
        "nic_ingress": max((up(size, len(nics_of[each])) for each, size in into_node.items()), default=0),
        "nic_mean": up(sum(into_node.values()), len(used)),
        "between_nodes": sum(into_node.values()),
        "remote": sum(into.values()),
    }


def busiest_sender(text):
    """The least number of bytes that the busiest rank sends if every rank receives the elements that it lacks from a
    replica (no relays), by a linear program: (with replicas of the same node preferred, with any replica). The first is
    None if some node lacks elements."""
    from scipy.optimize import linprog

    world, per_node, _, patterns, (source, *targets) = read(text)
    node_of = lambda rank: sum(1 << r for r in range(world) if not per_node or r // per_node == rank // per_node)
    local, any_replica, lacks = Counter(), Counter(), False
    for size, replicas, needers in cells(patterns, source, targets):
        for rank in (rank for rank in needers if not replicas >> rank & 1):
            any_replica[replicas] += size
            local[replicas & node_of(rank) or replicas] += size
            lacks |= not replicas & node_of(rank)

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
