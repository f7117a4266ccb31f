"""Rewrites a custom variant for lists of blocks. The kernel treats a row of blocks as a request, and numbers its
queries and listed keys. The variant refers to queries and keys of the whole matrix, so it is rewritten to read their
indices from two tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from quire.kernels.expression import indices_in
from quire.kernels.level_variant import with_places
from quire.kernels.trace import Tracer, Value
from quire.kernels.variant import Variant

#: The two tables, int32: the columns COLUMNS for each row of blocks, and the page numbers of all lists.
LISTS, PAGES = "rows_of_blocks", "pages_of_blocks"
#: q_idx, head: those of the row's first query in the matrix. first_page: where its list begins in PAGES. first_key: the
#: first key of the row's head among all keys. qo_len, kv_len: those of the matrix.
COLUMNS = ("q_idx", "head", "first_page", "first_key", "qo_len", "kv_len")


@lru_cache(maxsize=256)
def variant_of_blocks(variant: Variant, page_size: int, of_heads: bool) -> Variant:
    """The same variant over lists of pages. of_heads: each row of blocks belongs to one KV head."""
    expression = variant.expression
    reads = indices_in(expression.score) | indices_in(expression.mask)
    if not of_heads:
        reads -= {"head"}
    tables = [LISTS] if reads - {"request"} else []
    tables += [PAGES] if "kv_idx" in reads else []
    return with_places(variant, tables, lambda tracer: _places(tracer, reads, page_size)) if reads else variant


def _places(tracer: Tracer, reads: Collection[str], page_size: int) -> Mapping[str, Value]:
    """The expression that replaces each index of `reads`."""
    q_idx, head, kv_idx, row = (
        tracer.value("index", "int", value=name) for name in ("q_idx", "head", "kv_idx", "request")
    )

    def of_row(name: str) -> Value:
        return tracer.read(LISTS, (row, COLUMNS.index(name)))

    def key() -> Value:
        page = tracer.read(PAGES, of_row("first_page") + kv_idx // page_size)
        found: Value = page * page_size + kv_idx % page_size - of_row("first_key")
        return found

    places: dict[str, Callable[[], Value]] = {
        "q_idx": lambda: of_row("q_idx") + q_idx, "head": lambda: of_row("head") + head, "kv_idx": key,
        "request": lambda: tracer.constant(0), "qo_len": lambda: of_row("qo_len"), "kv_len": lambda: of_row("kv_len"),
    }  # fmt: skip
    return {name: places[name]() for name in reads}
