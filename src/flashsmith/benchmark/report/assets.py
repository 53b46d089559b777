"""The page's style sheet and its script: all there is, nothing is fetched."""

from __future__ import annotations

from flashsmith.benchmark.charts import DARK, LIGHT

_COLOURS = "--surface: {surface}; --ink: {ink}; --muted: {muted}; --line: {grid}; --bad: {bad};"


def style_sheet() -> str:
    """CSS for screens, light and dark, and for paper."""
    light, dark = (_COLOURS.format(**vars(theme)) for theme in (LIGHT, DARK))
    return (
        f":root {{ color-scheme: light dark; {light} --page: #f4f5f7; --good: #0a6b3d;"
        " --low: #8a5a00; --mark: #fdecea; }\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} --page: #121419;"
        " --good: #5fd39a; --low: #e0b15a; --mark: #3a1f1e; } }\n" + _RULES
    )


_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header, main, footer { max-width: 84rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
p { margin: 0.5rem 0; max-width: 75ch; }
.sub, figcaption, caption, footer { color: var(--muted); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; list-style: none; padding: 0;
  margin: 1rem 0 0; }
a { color: inherit; text-underline-offset: 0.2em; }
a:focus-visible, button:focus-visible, .scroll:focus-visible { outline: 2px solid currentColor;
  outline-offset: 2px; }
dl.key { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 0.75rem;
  margin: 1.25rem 0; }
dl.key div, figure, .scroll, .note { background: var(--surface); border: 1px solid var(--line);
  border-radius: 6px; }
dl.key div { padding: 0.75rem 1rem; }
dl.key dt { color: var(--muted); font-size: 0.85rem; }
dl.key dd { margin: 0; font-size: 1.35rem; font-weight: 600; line-height: 1.3; }
dl.key dd small { display: block; font-size: 0.8rem; font-weight: 400; color: var(--muted); }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(34rem, 100%), 1fr)); }
figure { margin: 0; padding: 0.75rem; }
figure.wide { grid-column: 1 / -1; }
figure picture { display: block; overflow-x: auto; }
figure img { display: block; max-width: 100%; min-width: 20rem; height: auto; }
figure.wide img { min-width: 48rem; }
figcaption { font-size: 0.85rem; margin-top: 0.5rem; }
.scroll { overflow-x: auto; margin: 0.75rem 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; }
caption { text-align: left; padding: 0.6rem 0.75rem; }
th, td { padding: 0.3rem 0.6rem; text-align: left; white-space: nowrap;
  border-top: 1px solid var(--line); }
th { vertical-align: bottom; font-weight: 600; white-space: normal; }
th button { all: unset; cursor: pointer; text-decoration: underline dotted var(--muted);
  text-underline-offset: 0.25em; }
th[aria-sort="ascending"] button::after { content: "\\00a0\\2191"; }
th[aria-sort="descending"] button::after { content: "\\00a0\\2193"; }
td.figure, th.figure { text-align: right; font-variant-numeric: tabular-nums; }
td.code, code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: 0.94em; }
td.wrap { white-space: normal; min-width: 22rem; }
.good { color: var(--good); }
dd.good, .bad { font-weight: 600; }
.low { color: var(--low); }
details { margin: 0.75rem 0; }
ol.changes { padding-left: 1.5rem; font-size: 0.85rem; }
ol.changes li { margin: 0.15rem 0; }
.bad { color: var(--bad); }
.faint { color: var(--muted); }
.note { padding: 0.6rem 1rem; margin: 0.75rem 0; }
.note.alarm { border-color: var(--bad); background: var(--mark); color: var(--bad); }
footer { padding-top: 2.5rem; padding-bottom: 2rem; font-size: 0.85rem; }
@media print {
  :root { --page: #ffffff; }
  body { font-size: 10pt; }
  nav { display: none; }
  figure, tr, dl.key div { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; border: 0; }
  figure img, figure.wide img { min-width: 0; }
  .charts { grid-template-columns: 1fr 1fr; }
  table { font-size: 6.5pt; }
  th, td { padding: 0.1rem 0.25rem; white-space: normal; }
  td.code { overflow-wrap: anywhere; }
  td.wrap { min-width: 0; }
  th button { text-decoration: none; }
}
"""

# Sorting is all there is to do; without the script the tables stand in the order of the file.
SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const figures = heading.classList.contains("figure");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const empty = (row) => figures && row.cells[column].dataset.value === undefined;
      const rows = [...body.rows].sort((a, b) => {
        // What has no figure stays at the end, whichever way.
        if (empty(a) || empty(b)) return empty(a) - empty(b);
        const order = figures ? key(a) - key(b)
          : key(a).localeCompare(key(b), "en", {numeric: true});
        return up ? order : -order;
      });
      body.append(...rows);
    });
  });
}
"""
