"""The table and the picture of `benchmarks/plan.py compare`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any


def compare(measured_file: Path, predicted_file: Path, *, plot: Path | None) -> None:
    """Print run by run how far the plan was off, and the two other estimates; draw measured over predicted."""
    measured, predicted = json.loads(measured_file.read_text()), json.loads(predicted_file.read_text())
    rows = [(name, measured[name], predicted[name]) for name in predicted if "seconds" in measured.get(name, {})]
    columns = ("run", "peak GiB, measured", "predicted", "off", "DeepSpeed's estimate", "Accelerate's")
    print(f"| {' | '.join((*columns, 's/step', 'predicted', 'off'))} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, real, plan in rows:
        print(
            f"| {name} | {real['allocated']:.2f} | {plan['allocated']:.2f} | {off(real, plan, 'allocated'):+.1%} "
            f"| {plan['deepspeed']:.1f} ({plan['deepspeed'] / real['allocated'] - 1:+.0%}) "
            f"| {plan['accelerate']:.1f} ({plan['accelerate'] / real['allocated'] - 1:+.0%}) "
            f"| {real['seconds']:.3f} | {plan['seconds']:.3f} | {off(real, plan, 'seconds'):+.0%} |"
        )
    for key, word in (("allocated", "peak"), ("reserved", "reserved"), ("seconds", "step time")):
        errors = [abs(off(real, plan, key)) for _, real, plan in rows]
        print(f"{word}: median error {median(errors):.2%}, worst {max(errors):.2%}, {len(rows)} runs")
    short = [name for name, real, plan in rows if plan["needed"] < real["allocated"]]
    print(f"runs that need more than the plan said they would: {short or 'none'}")
    if plot is not None:
        plot.write_text(picture([(real["allocated"], plan["allocated"]) for _, real, plan in rows]))


def off(real: dict[str, Any], plan: dict[str, Any], key: str) -> float:
    """How far the plan is from what was measured."""
    return float(plan[key] / real[key] - 1)


def picture(points: list[tuple[float, float]]) -> str:
    """Measured against predicted memory, with the line on which they are equal."""
    size, edge, top = 420, 50, max(max(point) for point in points) * 1.08
    scale = (size - 2 * edge) / top

    def x(value: float) -> float:
        return edge + value * scale

    def y(value: float) -> float:
        return size - edge - value * scale

    ticks = range(0, int(top) + 1, 20)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
        f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(top)}" y2="{y(top)}" stroke="#999" stroke-dasharray="4 3"/>',
        f'<path d="M{x(0)} {y(top)}V{y(0)}H{x(top)}" fill="none" stroke="#333"/>',
    ]
    for tick in ticks:
        lines.append(f'<text x="{x(tick):.1f}" y="{size - edge + 18}" text-anchor="middle">{tick}</text>')
        lines.append(f'<text x="{edge - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    lines += [
        f'<circle cx="{x(real):.1f}" cy="{y(plan):.1f}" r="4" fill="#2b6cb0" fill-opacity="0.7"/>'
        for real, plan in points
    ]
    lines.append(f'<text x="{size / 2}" y="{size - 12}" text-anchor="middle">measured peak, GiB</text>')
    turned = f'x="14" y="{size / 2}" text-anchor="middle" transform="rotate(-90 14 {size / 2})"'
    lines.append(f"<text {turned}>predicted peak, GiB</text>")
    return "\n".join([*lines, "</svg>\n"])
