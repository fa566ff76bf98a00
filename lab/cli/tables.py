# SPDX-License-Identifier: Apache-2.0
"""Makes the tables that commands print."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table


def new_table(
    names: Sequence[str], *, boxed: bool, left: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()
) -> Table:
    """Returns a table with the columns `names`. They are right-justified, except for those in `left`.

    `boxed` draws lines around the table and its cells. In a log it should be false.
    """
    table = Table(box=box.ROUNDED if boxed else None, pad_edge=boxed)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
