"""The gallery of masks and scores: declared here, written to docs/gallery.md and docs/pictures/mask-*.svg.

    python tests/gallery.py   # writes them

The lines of an entry are what its page shows and what its picture is drawn from: they define mask_mod or score_mod, as
quire.flex_attention takes them. Speeds are those of the newest benchmarks/results/*-variants.json, which
benchmarks/variants.py measured beside torch's compiled flex_attention.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURES = ROOT / "docs" / "gallery.md", ROOT / "docs" / "pictures"
LEN, CELL = 64, 4  #: queries and keys of a picture, and the size of one
SHADES = 8  #: of scores
HEAD = 1  #: whose score is drawn


class Entry(NamedTuple):
    """A mask or a score."""

    name: str  #: of the picture
    title: str
    text: str
    code: str
    row: str = ""  #: of the results: "prefill: ROW" beside "prefill: flex: ROW"
    variant: str = ""  #: of quire.variants that is the same


ENTRIES = (
    Entry("sliding", "Sliding window", "Each query sees the nearest keys of the past. Both comparisons run as the "
          "kernels' own mask: the window is a number, and another one compiles nothing.", """
def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 16)
""", "window 1024"),
    Entry("sinks", "Attention sinks", "A window, and the first keys of all (Xiao et al., 2023). Sinks without keys, as "
          "gpt-oss has them, are a logit for each head: `sinks=` of `run()`.", """
def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx <= 16) | (kv_idx < 4))
"""),
    Entry("prefix", "Prefix-LM", "All see the prefix, and causally the rest (Raffel et al., 2020).", """
prefix = torch.tensor([20])  # of each request


def mask_mod(b, h, q_idx, kv_idx):
    return (kv_idx < prefix[b]) | (q_idx >= kv_idx)
""", "prefix-lm 1024", "prefix_lm"),
    Entry("documents", "Documents", "Several documents in one sequence, none of which sees another.", """
document = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 22, 8, 24]))


def mask_mod(b, h, q_idx, kv_idx):
    return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)
""", "12 documents", "document_mask"),
    Entry("tree", "Tree of drafts", "Tokens that are guessed form a tree behind those that are known; each sees the "
          "known ones and its ancestors (Miao et al., 2023).", """
parent = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 6]  # of each guessed token; 52 tokens are known
is_ancestor = torch.eye(64, dtype=torch.bool)
for node in range(1, len(parent)):
    is_ancestor[node] |= is_ancestor[parent[node]]


def mask_mod(b, h, q_idx, kv_idx):
    node, other = (q_idx - 52).clamp(min=0), (kv_idx - 52).clamp(min=0)
    is_known = kv_idx < 52
    return torch.where(q_idx < 52, q_idx >= kv_idx, is_known | is_ancestor[node, other])
""", variant="tree_mask"),
    Entry("natten", "Neighbourhoods (NATTEN)", "In a picture of 8 x 8 tokens, each sees a square around it, which is "
          "moved inside at the borders (Hassani et al., 2023).", """
def mask_mod(b, h, q_idx, kv_idx):
    x, y = (q_idx // 8).clamp(1, 6), (q_idx % 8).clamp(1, 6)
    return ((x - kv_idx // 8).abs() <= 1) & ((y - kv_idx % 8).abs() <= 1)
"""),
    Entry("sta", "Sliding tiles (STA)", "Neighbourhoods of whole tiles, here 2 x 4 tokens in a picture of 8 x 8, so "
          "that KV tiles are full or empty (Zhang et al., 2025).", """
def mask_mod(b, h, q_idx, kv_idx):
    row, column = (q_idx // 16).clamp(1, 2), q_idx // 8 % 2
    return ((row - kv_idx // 16).abs() <= 1) & (column == kv_idx // 8 % 2)
"""),
    Entry("alibi", "ALiBi", "A bias that falls with the distance, steeper for some heads (Press et al., 2022).", """
slopes = quire.get_alibi_slopes(8)


def score_mod(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)
""", "alibi", "alibi"),
    Entry("t5", "Relative bias of T5", "A bias for each bucket of distances: one for each near distance, one for each "
          "octave of far ones (Raffel et al., 2020).", """
bias = torch.linspace(0, -4, 16)[:, None] * torch.ones(8)  # of each bucket and head


def score_mod(score, b, h, q_idx, kv_idx):
    past = (q_idx - kv_idx).clamp(min=0)
    octave = torch.log2(past.clamp(min=1) / 8.0).floor().to(torch.int32)
    bucket = torch.where(past < 8, past, (8 + octave).clamp(max=15))
    return score + bias[bucket, h]
""", variant="t5_bias"),
    Entry("cap", "Soft cap", "Scores approach a limit (Gemma 2). The picture has scores from -60 on the left to 60 on "
          "the right, before the cap.", """
def score_mod(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)
""", "soft cap", "soft_cap"),
)  # fmt: skip

INTRO = """# A gallery of masks and scores

`quire.flex_attention` takes these functions, as torch's flex_attention does. Dark is what a query (a line) sees of the
keys (the columns), or a high score. `quire.variants` has some of them for all other calls
([custom variants](variants.md)). `python tests/gallery.py` writes this page, and draws its pictures by calling the
functions.

Speeds: {machine}, 2 x 8192 tokens, 32 query and 8 KV heads of 128 dims, in bfloat16. Quire with a variant,
planned; torch's compiled flex_attention beside it.

```python
import torch
import quire
from torch.nn.attention.flex_attention import create_block_mask

query, key, value = (torch.randn(1, 8, 64, 64) for _ in range(3))
```
"""


def functions(entry: Entry) -> dict[str, Any]:
    """What the lines of an entry define."""
    import quire

    names: dict[str, Any] = {"torch": torch, "quire": quire}
    exec(compile(entry.code, entry.name, "exec"), names)
    return names


def drawn(entry: Entry) -> Tensor:
    """The shade of each query and key, from 0 to 1."""
    names = functions(entry)
    i, j = torch.arange(LEN)[:, None].expand(LEN, LEN), torch.arange(LEN).expand(LEN, LEN)
    place = torch.tensor(0), torch.tensor(HEAD)
    if "mask_mod" in names:
        return names["mask_mod"](*place, i, j).float()
    scores = torch.linspace(-60, 60, LEN).expand(LEN, LEN) if entry.name == "cap" else torch.zeros(LEN, LEN)
    found = names["score_mod"](scores, *place, i, j)
    is_seen = (j <= i) | (entry.name == "cap")
    low, high = found[is_seen].min(), found[is_seen].max()
    return torch.where(is_seen, 0.1 + 0.9 * (found - low) / (high - low), 0.0)


def picture(entry: Entry) -> str:
    """SVG: a path for each shade, of the runs of equal cells of each line."""
    size, shades = LEN * CELL, (drawn(entry) * SHADES).round().int().tolist()
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(shades):
        begin = 0
        for column in range(1, LEN + 1):
            if column == LEN or line[column] != line[begin]:
                width = (column - begin) * CELL
                paths.setdefault(line[begin], []).append(f"M{begin * CELL} {row * CELL}h{width}v{CELL}h-{width}z")
                begin = column
    body = "\n".join(
        f'<path fill="#0d9488" fill-opacity="{shade / SHADES:.3f}" d="{"".join(runs)}"/>'
        for shade, runs in sorted(paths.items())
        if shade
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 -1 {size + 2} {size + 2}" width="{size + 2}" role="img" '
        f'shape-rendering="crispEdges"><title>{entry.title}: queries downwards, keys to the right</title>\n'
        f'{body}\n<rect x="-.5" y="-.5" width="{size + 1}" height="{size + 1}" fill="none" stroke="currentColor" '
        f'stroke-opacity=".3"/>\n</svg>\n'
    )


def results() -> dict[str, Any]:
    """The newest results of benchmarks/variants.py."""
    newest = max((ROOT / "benchmarks" / "results").glob("*-variants.json"))
    return json.loads(newest.read_text(encoding="utf-8"))


def speed(entry: Entry, measured: dict[str, Any]) -> str:
    """A line about the speed of an entry."""
    times = {row["name"]: row["us"] for row in measured["rows"]}
    ours, theirs = (times.get(f"prefill: {kind}{entry.row}") for kind in ("", "flex: "))
    if ours is None:
        return "Speed: not measured yet."
    if theirs is None:
        return f"Speed: {ours:,.0f} µs; torch's was not measured."
    return f"Speed: {ours:,.0f} µs, torch's {theirs:,.0f} µs: {theirs / ours:.1f} times."


def sections() -> Iterator[str]:
    """The page, section by section."""
    measured = results()
    yield INTRO.format(machine=f"{measured['device']}, {measured['date'][:10]}, torch {measured['torch']}")
    for entry in ENTRIES:
        call = "o = quire.flex_attention(query, key, value, score_mod)"
        if "mask_mod" in functions(entry):
            call = (
                'block_mask = create_block_mask(mask_mod, None, None, 64, 64, device="cpu")\n'
                "o = quire.flex_attention(query, key, value, block_mask=block_mask)"
            )
        also = f" Ready-made for the other calls: `quire.variants.{entry.variant}`." if entry.variant else ""
        yield (
            f'## {entry.title}\n\n{entry.text}{also}\n\n--8<-- "mask-{entry.name}.svg"\n\n'
            f"```python\n{entry.code.strip()}\n\n\n{call}\n```\n\n{speed(entry, measured)}\n"
        )


def files() -> dict[Path, str]:
    """What is written where."""
    return {
        PAGE: "\n".join(sections()), **{PICTURES / f"mask-{entry.name}.svg": picture(entry) for entry in ENTRIES}
    }  # fmt: skip


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
