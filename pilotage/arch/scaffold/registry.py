"""The in-tree table of served architectures, with one more line."""

from __future__ import annotations

import ast


def with_entry(text: str, architecture: str, path: str) -> tuple[str, str]:
    """Add an entry to the table `_IN_TREE` of `models/registry.py`.

    Args:
        text: the file.
        architecture: as in config.json.
        path: "module:Class".

    Returns:
        The changed file and a sentence for the user; the file as it was where the architecture is served already.
    """
    tree = ast.parse(text)
    assigned = next(
        node
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) == "_IN_TREE"
    )
    assert isinstance(assigned.value, ast.Tuple)
    served = {
        ast.literal_eval(e.args[0]): ast.literal_eval(e.args[1]) for e in assigned.value.elts if isinstance(e, ast.Call)
    }
    if architecture in served:
        if served[architecture] == path:
            return text, ""
        note = f"{architecture} is served by {served[architecture]}: the registry was left as it is"
        return text, f"{note}; the new package is reached by its module name only"
    lines = text.splitlines(keepends=True)
    after = assigned.value.elts[-1].end_lineno or assigned.lineno
    for element in assigned.value.elts:
        if isinstance(element, ast.Call) and ast.literal_eval(element.args[0]) > architecture:
            after = element.lineno - 1
            break
    lines.insert(after, f'    ModelEntry("{architecture}", "{path}"),\n')
    return "".join(lines), f"{architecture} was added to pilotage/models/registry.py"
