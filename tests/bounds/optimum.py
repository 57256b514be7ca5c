# SPDX-License-Identifier: Apache-2.0
"""The least time of any plan of a small job, by a linear program over the text of `reshard-compile --emit=layout`.

Bytes with the same holders and the same wanters are a class. A class fills a fraction of each edge between two ranks,
enough for a flow of one from its holders to each wanter (Edmonds: such fractions are a packing of trees, if every rank
wants what it forwards; if not, the result is a lower bound). Every rank may forward, also one that has no other part in
the job. Latencies are 0."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict

import lower_bounds
from lower_bounds import bits


class Network:
    """The ranks of a job, and the resources that an edge between two of them uses, with bytes per second."""

    def __init__(self, text: str) -> None:
        head = re.search(r"world (\d+) .*ranks-per-node (\d+)", text)
        rates = re.search(r"^topology link (\d+) .*? nics (\d+) rate (\d+) .*copy (\d+)", text, re.MULTILINE)
        assert head and rates, "the job has no topology"
        self.world, self.per_node = int(head[1]), int(head[2])
        self.link, self.nics, self.nic, self.copy = map(int, rates.groups())

    def node(self, rank: int) -> int:
        return rank // self.per_node

    def resources(self, sender: int, receiver: int) -> tuple[tuple[tuple[str, int], tuple[str, int]], int]:
        if self.node(sender) == self.node(receiver):
            return (("link out", sender), ("link in", receiver)), self.link
        nic_of = lambda rank: (
            self.node(rank) * self.nics + rank % self.per_node * self.nics // self.per_node if self.nics else rank
        )
        return (("NIC out", nic_of(sender)), ("NIC in", nic_of(receiver))), self.nic


def byte_classes(text: str) -> tuple[dict[tuple[int, int], int], Counter]:
    """Bytes by (mask of the ranks that hold them, mask of the ranks that want them from others), and the bytes that
    each rank copies from itself, also those of a second position of what it receives."""
    _, _, _, patterns, (source, *targets) = lower_bounds.read(text)
    classes: Counter = Counter()
    local: Counter = Counter()
    for pattern, (_, item, variables, shape) in enumerate(patterns):
        held = lower_bounds.rank_classes(source, pattern)
        wanted = [box for target in targets for box in lower_bounds.rank_classes(target, pattern)]
        if not held or not wanted:
            continue
        for mask, count in lower_bounds.cells_of([box for box, _ in held + wanted], variables + len(shape)).items():
            holders = wanters = 0
            for b in bits(mask):
                ranks = (held + wanted)[b][1]
                if b < len(held):
                    holders |= ranks
                    continue
                wanters |= ranks
                local.update(dict.fromkeys(bits(ranks), count * item))
            lacking = wanters & ~holders
            local.subtract(dict.fromkeys(bits(lacking), count * item))
            if lacking:
                classes[holders, lacking] += count * item
    return dict(classes), local


def optimum(text: str) -> float:
    """Seconds."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    network = Network(text)
    classes, local = byte_classes(text)
    copies = max(local.values(), default=0) / network.copy
    if not classes:
        return copies
    edges = list(itertools.permutations(range(network.world), 2))
    rows = {}  # of the resources
    for edge in edges:
        for resource in network.resources(*edge)[0]:
            rows.setdefault(resource, len(rows))
    # Variable 0 is the time, in seconds for `unit` bytes by NIC; then for each class the fractions of its edges, and
    # for each of its wanters the flow over these edges.
    unit = max(classes.values())
    most = [(row, 0, -1.0) for row in rows.values()]  # (row, column, value): the sum is at most 0
    equal, right = [], []  # and: the sum is equal to `right` of the row
    variables, row = 1, len(rows)
    for (holders, wanters), size in classes.items():
        usable = [edge for edge in edges if not holders >> edge[1] & 1]
        fraction = dict(zip(usable, itertools.count(variables)))
        variables += len(usable)
        for edge in usable:
            pair, rate = network.resources(*edge)
            most += [(rows[resource], fraction[edge], size / unit * network.nic / rate) for resource in pair]
        for wanter in bits(wanters):
            flow = dict(zip((edge for edge in usable if edge[0] != wanter), itertools.count(variables)))
            variables += len(flow)
            through = defaultdict(list)
            for edge, column in flow.items():
                most += [(row, column, 1.0), (row, fraction[edge], -1.0)]
                row += 1
                through[edge[1]].append((column, 1.0))
                through[edge[0]].append((column, -1.0))
            for rank, terms in through.items():
                if not holders >> rank & 1:
                    equal += [(len(right), *term) for term in terms]
                    right.append(float(rank == wanter))

    def matrix(entries: list[tuple[int, int, float]], height: int) -> object:
        at, columns, values = zip(*entries)
        return coo_matrix((values, (at, columns)), shape=(height, variables)).tocsr()

    found = linprog(
        [1.0] + [0.0] * (variables - 1),
        A_ub=matrix(most, row),
        b_ub=[0.0] * row,
        A_eq=matrix(equal, len(right)),
        b_eq=right,
        method="highs",
    )
    assert found.status == 0, found.message
    return max(copies, found.fun * unit / network.nic)
