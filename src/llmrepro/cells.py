"""What the cells of the notebooks share: which names their parameters cells set, and tables to look at."""

import ast
from itertools import dropwhile, takewhile

from IPython.core.getipython import get_ipython
from IPython.display import display

from llmrepro import credentials
from llmrepro.markup import escaped, showable


def assigned_in_parameter_cells() -> set[str]:
    """Names assigned by the parameters cell last run and by the one papermill put after it: both begin
    `# Parameters`. Older ones do not count: a typo that was mended is forgotten."""
    shell = get_ipython()
    earlier = reversed(shell.user_ns.get("In", [])[:-1] if shell else [])
    cells = takewhile(_is_parameters, dropwhile(lambda source: not _is_parameters(source), earlier))
    found: set[str] = set()
    for node in (n for source in cells for n in ast.parse(source).body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def _is_parameters(source: str) -> bool:
    return source.startswith("# Parameters")


def table(title: str, rows: list[tuple[str, str]]) -> None:
    """Show label and value pairs; everything is escaped, for a recipe's text runs nowhere. A credential in them is
    not shown: what a cell shows is saved with its notebook."""
    rows = [(label, credentials.without(value)) for label, value in rows]
    body = "".join(
        f"<tr><th scope='row' style='text-align:left;vertical-align:top'>{escaped(k)}</th>"
        f"<td style='text-align:left'>{escaped(v)}</td></tr>"
        for k, v in rows
    )
    width = max((len(k) for k, _ in rows), default=0)
    plain = showable("\n".join([title, *(f"  {k:<{width}}  {v}" for k, v in rows)]))
    display(
        {
            "text/html": f"<table><caption style='text-align:left;font-weight:bold'>{escaped(title)}"
            f"</caption><tbody>{body}</tbody></table>",
            "text/plain": plain,
        },
        raw=True,
    )
