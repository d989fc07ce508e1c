"""How deep a compiler recurses into a schema at most, references followed.

    #  ->  properties/a  ->  $ref: #/$defs/x  ->  items  ->  $ref: #/$defs/x      depth 4: a node is entered once

Owns: the bound. Pure, linear, never recursive itself. A chain of references is flat in the text, so no limit on the
text's nesting bounds it, and a compiler that recurses along it overruns its stack: the process is gone.
"""

from collections.abc import Sequence

from common.engine.structured_output.json_schema import Schema, children, is_schema, resolve

_Edges = Sequence[Sequence[int]]


def deepest(root: Schema) -> int:
    """An upper bound of the nodes on any path that enters each node once.

    Exact where references form no cycle; nodes on cycles with each other (a strongly connected component) count all.
    """
    edges = _edges(root)
    component_of, num_components = _components(edges)
    # Components come leaves first, so what a component leads to is known before it.
    sizes, below = [0] * num_components, [0] * num_components
    for component in component_of:
        sizes[component] += 1
    depths = [0] * num_components
    for node in sorted(range(len(edges)), key=component_of.__getitem__):
        component = component_of[node]
        for child in edges[node]:
            if component_of[child] != component:
                below[component] = max(below[component], depths[component_of[child]])
        depths[component] = sizes[component] + below[component]
    return depths[component_of[0]]


def _edges(root: Schema) -> _Edges:
    """For each node, by number (0 is the root), the numbers of its sub-schemas and of what it refers to."""
    numbers, nodes, edges = {id(root): 0}, [root], []
    for node in nodes:
        below = [child for _, child in children(node)]
        reference = node.get("$ref")
        target = resolve(root, reference) if isinstance(reference, str) else None
        if is_schema(target):
            below.append(target)
        for child in below:
            if id(child) not in numbers:
                numbers[id(child)] = len(nodes)
                nodes.append(child)
        edges.append([numbers[id(child)] for child in below])
    return edges


def _components(edges: _Edges) -> tuple[list[int], int]:
    """Strongly connected component of each node, numbered leaves first, and how many there are.

    Source: Tarjan 1972, with an explicit stack.
    """
    order: list[int | None] = [None] * len(edges)
    lowest, component_of = [0] * len(edges), [-1] * len(edges)
    open_nodes: list[int] = []
    path, num_seen, num_components = [(0, 0)], 0, 0
    while path:
        node, next_edge = path.pop()
        if order[node] is None:
            order[node] = lowest[node] = num_seen
            num_seen += 1
            open_nodes.append(node)
        if next_edge:
            lowest[node] = min(lowest[node], lowest[edges[node][next_edge - 1]])
        for place in range(next_edge, len(edges[node])):
            child = edges[node][place]
            seen = order[child]
            if seen is None:
                path += [(node, place + 1), (child, 0)]
                break
            if component_of[child] < 0:
                lowest[node] = min(lowest[node], seen)
        else:
            if lowest[node] == order[node]:
                _close(node, open_nodes, component_of, num_components)
                num_components += 1
    return component_of, num_components


def _close(root: int, open_nodes: list[int], component_of: list[int], number: int) -> None:
    """Everything seen since `root` and still open is one component."""
    while True:
        node = open_nodes.pop()
        component_of[node] = number
        if node == root:
            return
