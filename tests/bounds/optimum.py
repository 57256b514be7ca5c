# SPDX-License-Identifier: Apache-2.0
"""The least time of any plan of a small job, by a linear program over the text of `reshard-compile --emit=layout`.

Bytes with the same holders and the same wanters are a class. A class fills a fraction of each edge between two ranks,
enough for a flow of one from its holders to each wanter (Edmonds: such fractions are a packing of trees, if every rank
wants what it forwards; if not, the result is a lower bound). Every rank may forward, also one that has no other part in
the job. Latencies are 0."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import lower_bounds
from lower_bounds import Network, bits


def resources(network: Network, sender: int, receiver: int) -> tuple[tuple[tuple[str, int], tuple[str, int]], int]:
    """What an edge between two ranks uses, and its bytes per second."""
    if network.node(sender) == network.node(receiver):
        return (("link out", sender), ("link in", receiver)), network.link_rate
    return (("NIC out", network.nic(sender)), ("NIC in", network.nic(receiver))), network.nic_rate


def byte_classes(text: str) -> tuple[dict[tuple[int, int], int], Counter]:
    """Bytes by (mask of the ranks that hold them, mask of the ranks that want them from others), and the bytes that
    each rank copies from itself, also those of a second position of what it receives."""
    patterns, (source, *targets) = lower_bounds.read(text)
    classes: Counter = Counter()
    local: Counter = Counter()
    for cell in lower_bounds.cells(patterns, source, targets):
        for rank, forms in cell.wants.items():
            local[rank] += cell.size * (len(forms) - (rank in cell.lacking))
        if cell.lacking:
            classes[cell.holders, sum(1 << rank for rank in cell.lacking)] += cell.size
    return dict(classes), local


def optimum(text: str) -> float:
    """Seconds."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    network = Network(text)
    classes, local = byte_classes(text)
    copies = max(local.values(), default=0) / network.copy_rate
    if not classes:
        return copies
    edges = list(itertools.permutations(range(network.world), 2))
    rows = {}  # of the resources
    for edge in edges:
        for resource in resources(network, *edge)[0]:
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
            pair, rate = resources(network, *edge)
            most += [(rows[resource], fraction[edge], size / unit * network.nic_rate / rate) for resource in pair]
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
    return max(copies, found.fun * unit / network.nic_rate)
