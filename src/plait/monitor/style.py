"""How the report looks: one sheet, light and dark. Well-formed inside XML, so no `&` and no `<`."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --edge: #e4e3dd; --grid: #ecebe6; --axis: #b9b8b1;
  --ink: #1c1d1f; --soft: #5f6066; --faint: #8b8c92;
  --good: #1c7a4a; --good-bg: #e3f3ea; --warn: #8a5a00; --warn-bg: #fbf0d7; --bad: #b3261e; --bad-bg: #fbe6e4;
  --c0: #2463c9; --c1: #d0650d; --c2: #24845a; --c3: #8146c0; --c4: #bd3a72; --c5: #0d7f8c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121315; --card: #1a1b1e; --edge: #2b2d31; --grid: #26282c; --axis: #4b4d53;
    --ink: #ececea; --soft: #a9aab0; --faint: #7c7d84;
    --good: #6fd09b; --good-bg: #17321f; --warn: #e8bd62; --warn-bg: #362a10; --bad: #ff8f86; --bad-bg: #3c1b19;
    --c0: #6ea3ff; --c1: #ff9f52; --c2: #5fcf98; --c3: #bd92f5; --c4: #f387b1; --c5: #55c8d6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased;
}
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 40px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; margin: 4px 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 15px; font-weight: 600; margin: 0; }
h2 small { font-weight: 400; color: var(--faint); font-size: 13px; margin-left: 6px; }
.eyebrow { margin: 0; color: var(--faint); font-size: 13px; }
.sub { margin: 0; color: var(--soft); font-size: 14px;
  display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; }
.pill { display: inline-block; padding: 1px 9px; border-radius: 99px;
  font-size: 12px; font-weight: 600; white-space: nowrap; }
.pill.good { color: var(--good); background: var(--good-bg); }
.pill.warn { color: var(--warn); background: var(--warn-bg); }
.pill.bad { color: var(--bad); background: var(--bad-bg); }
.pill.calm { color: var(--soft); background: var(--grid); }
.facts { display: flex; flex-wrap: wrap; gap: 1px; margin: 28px 0 16px; padding: 0;
  background: var(--edge); border: 1px solid var(--edge); border-radius: 12px; overflow: hidden; }
.facts div { flex: 1 1 150px; background: var(--card); padding: 14px 18px 13px; }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd { margin: 2px 0 0; font-size: 24px; font-weight: 600; letter-spacing: -0.015em; line-height: 1.25; }
.facts dd.note { font-size: 12px; font-weight: 400; color: var(--faint); letter-spacing: 0; margin: 0; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 12px;
  padding: 18px 20px 16px; margin: 0 0 16px; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin-bottom: 16px; }
.pair .card { margin: 0; }
.pair .card:last-child:nth-child(odd) { grid-column: 1 / -1; }
@media (max-width: 760px) {
  main { padding: 28px 14px; }
  .pair { grid-template-columns: minmax(0, 1fr); }
  .wide .chart { min-width: 720px; }
}
.wide, .scroll { overflow-x: auto; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 22px;
  padding: 0; margin: 8px 0 0; font-size: 13px; color: var(--soft); }
.legend li { display: flex; align-items: center; gap: 8px; }
.legend b { font-weight: 500; color: var(--ink); }
.legend svg { width: 26px; height: 10px; flex: none; overflow: visible; }
.legend .keys { margin-left: auto; gap: 18px; }
.legend .keys span { display: flex; align-items: center; gap: 7px; }
.chart { display: block; width: 100%; height: auto; margin-top: 4px; overflow: visible; font-family: inherit; }
.chart text { fill: var(--soft); font-size: 12px; }
.chart .tick { fill: var(--faint); font-size: 11.5px; }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .axis { stroke: var(--axis); stroke-width: 1; }
.chart .resume { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 3 4; }
.chart .caption { fill: currentColor; font-weight: 500; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.chart .bad { fill: var(--bad); font-size: 14px; font-weight: 700; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); }
.c3 { color: var(--c3); } .c4 { color: var(--c4); } .c5 { color: var(--c5); }
.line { fill: none; stroke: currentColor; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
.line.dashed { stroke-width: 1.25; stroke-dasharray: 2 4; }
.area { fill: currentColor; opacity: 0.09; }
.point { fill: currentColor; }
.dot { fill: var(--card); stroke: currentColor; stroke-width: 1.75; }
.pale { opacity: 0.3; }
.stop rect { fill: transparent; }
.stop line { stroke: var(--axis); stroke-width: 1; }
.stop circle { fill: currentColor; stroke: var(--card); stroke-width: 1.5; }
.stop line, .stop circle, .stop text { visibility: hidden; pointer-events: none; }
.stop:hover line, .stop:hover circle, .stop:hover text { visibility: visible; }
.stop text { fill: var(--ink); font-weight: 500; white-space: pre; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 10px; }
th, td { text-align: left; padding: 7px 18px 7px 0; border-top: 1px solid var(--grid); vertical-align: top; }
thead th { border-top: 0; font-weight: 500; font-size: 13px; white-space: nowrap; }
thead th:not(.run) { color: var(--faint); }
thead th.run { font-weight: 600; font-size: 14px; }
thead th.run span { color: var(--ink); }
tbody th { font-weight: 400; color: var(--soft); white-space: nowrap; width: 1%; padding-right: 32px; }
tr.group th { color: var(--ink); font-weight: 600; padding-top: 18px; border-top: 0; }
tbody:first-of-type tr.group:first-child th { padding-top: 7px; }
td { overflow-wrap: anywhere; }
.compare td { width: 50%; }
td.n, th.n { text-align: right; white-space: nowrap; }
.saves td:first-child, .saves th:first-child { width: 1%; }
.said td { width: 45%; }
.said td.n { width: 1%; }
.said pre { margin: 0; padding: 0; background: none; }
img { max-width: 100%; border-radius: 8px; background: #ffffff; }
td:last-child, th:last-child { padding-right: 0; }
tr.differs td { font-weight: 600; }
.run i { display: inline-block; width: 9px; height: 9px; border-radius: 50%;
  background: currentColor; margin-right: 8px; }
code, pre { font-family: "JetBrains Mono", ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere;
  margin: 8px 0 0; padding: 14px 16px; background: var(--page); border-radius: 8px; }
figure { margin: 16px 0 0; }
figcaption { color: var(--soft); font-size: 13px; }
.quiet { color: var(--faint); }
td.quiet { white-space: nowrap; }
footer { color: var(--faint); font-size: 13px; margin-top: 24px; }
@media print { body { background: none; } .card, .facts { break-inside: avoid; } }
"""
