"""A schedule as a picture: one row a rank, one box an action, gaps where nobody works."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from plait.parallel.pipeline.schedule import Kind, ScheduleName, make_table, placement_of, resolve_virtual
from plait.parallel.pipeline.timeline import Span, bubble_of, length_of, simulate

_UNIT, _ROW, _LEFT, _TOP, _BOTTOM = 24, 30, 64, 54, 44
_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward, inputs",
    Kind.WEIGHT: "backward, weights",
}
_HUES = {Kind.FORWARD: 215, Kind.BACKWARD: 145, Kind.INPUT: 175, Kind.WEIGHT: 35}

_STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 11px; --ink: #1c1d1f; --soft: #5f6066; --idle: #ecebe6; }
text { fill: var(--ink); } .soft { fill: var(--soft); } .head { font-size: 14px; font-weight: 600; }
.idle { fill: var(--idle); } .box { stroke: #fff; stroke-width: 1; } .box + text { fill: #10131a; }
@media (prefers-color-scheme: dark) { svg { --ink: #ececea; --soft: #a9aab0; --idle: #26282c; }
  .box { stroke: #121315; } }
"""


def draw_schedule(word: ScheduleName, ranks: int, micro_batches: int, virtual: int | None = None) -> str:
    """The SVG text of a schedule over so many ranks, each with `virtual` stages.

    A box bears the number of its micro-batch, and is darker the later its stage comes among those of the rank; its
    full name is shown under the pointer. A backward pass is drawn twice as long as a forward pass.
    """
    per_rank = resolve_virtual(word, virtual)
    placement = placement_of(word, ranks, virtual)
    spans = simulate(make_table(word, ranks, micro_batches, virtual), len(placement))
    length = length_of(spans)
    width = _LEFT + round(length * _UNIT) + 16
    height = _TOP + ranks * _ROW + _BOTTOM
    many = f", {per_rank} stages each" if per_rank > 1 else ""
    title = f"{word}: {ranks} ranks{many}, {micro_batches} micro-batches, {bubble_of(spans):.1%} idle"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="head" x="8" y="24">{escape(title)}</text>',
    ]
    depth = [placement[:stage].count(rank) for stage, rank in enumerate(placement)]
    for rank, row in enumerate(spans):
        y = _TOP + rank * _ROW
        parts.append(f'<text class="soft" x="8" y="{y + 17}">rank {rank}</text>')
        parts.append(
            f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_px(length)}" height="{_ROW - 4}">'
            f"<title>idle</title></rect>"
        )
        parts += [_box(span, y, depth[span.action.stage], per_rank) for span in row]
    parts += _legend(spans, height - 18)
    parts.append("</svg>")
    return "\n".join(parts)


def _box(span: Span, y: int, depth: int, per_rank: int) -> str:
    action = span.action
    x = _LEFT + span.start * _UNIT
    lightness = 76 - 16 * depth / max(per_rank - 1, 1)
    where = f"stage {action.stage}, " if per_rank > 1 else ""
    words = f"{action}: {where}micro-batch {action.micro_batch}, {_WORDS[action.kind]}"
    width = (span.end - span.start) * _UNIT
    return (
        f'<g><title>{escape(words)}</title><rect class="box" x="{x:g}" y="{y}" width="{width:g}" '
        f'height="{_ROW - 4}" rx="3" fill="hsl({_HUES[action.kind]} 60% {lightness:g}%)"/>'
        f'<text x="{x + width / 2:g}" y="{y + 17}" text-anchor="middle">{action.micro_batch}</text></g>'
    )


def _legend(spans: Sequence[Sequence[Span]], y: int) -> list[str]:
    used = {span.action.kind for row in spans for span in row}
    parts, x = [], _LEFT
    for kind in Kind:
        if kind not in used:
            continue
        word = f"{kind}: {_WORDS[kind]}"
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="hsl({_HUES[kind]} 60% 76%)"/>')
        parts.append(f'<text class="soft" x="{x + 17}" y="{y}">{word}</text>')
        x += 34 + 6 * len(word)
    parts.append(f'<rect class="idle" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>')
    parts.append(f'<text class="soft" x="{x + 17}" y="{y}">idle</text>')
    return parts


def _px(length: float) -> str:
    return f"{length * _UNIT:g}"
