// Everything can be read without this script; it adds sorting, filters and tooltips.

// --- the page's filters: head dimension, dtype, mask

const filtered = [...document.querySelectorAll("[data-d]")];
const filters = document.createElement("form");
filters.className = "filters";
for (const facet of ["d", "dtype", "mask"]) {
  const values = [...new Set(filtered.map(one => one.dataset[facet]).filter(Boolean))];
  if (values.length < 2) continue;
  values.sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
  const select = document.createElement("select");
  select.name = facet;
  select.append(new Option("all", ""), ...values.map(value => new Option(value, value)));
  const label = document.createElement("label");
  label.append(`${facet} `, select);
  filters.append(label);
}
if (filters.children.length) document.querySelector("nav").append(filters);
filters.addEventListener("change", () => {
  for (const one of filtered) {
    one.classList.toggle("filtered", [...filters.elements].some(select =>
      select.value && one.dataset[select.name] && one.dataset[select.name] !== select.value));
    if (one.tagName !== "TR") one.hidden = one.classList.contains("filtered");
  }
  document.querySelectorAll("table.sortable").forEach(showRows);
});

// --- a long table's own filter

const words = new WeakMap();

function showRows(table) {
  const typed = words.get(table);
  const wanted = (typed?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    const text = wanted.length ? row.textContent.toLowerCase() : "";
    row.hidden = row.classList.contains("filtered") || !wanted.every(word => text.includes(word));
    shown += !row.hidden;
  }
  if (typed) typed.nextSibling.textContent = `${shown} of ${table.tBodies[0].rows.length} rows`;
}

for (const table of document.querySelectorAll("table.sortable")) {
  if (table.tBodies[0].rows.length < 12) continue;
  const box = document.createElement("div");
  box.className = "rows-filter";
  const typed = document.createElement("input");
  typed.type = "search";
  typed.placeholder = "filter rows, e.g. causal 4096";
  typed.setAttribute("aria-label", `Filter: ${table.caption.textContent}`);
  box.append(typed, document.createElement("output"));
  table.closest(".scroll").before(box);
  words.set(table, typed);
  typed.addEventListener("input", () => showRows(table));
  showRows(table);
}

// --- sorting

const figure = text => parseFloat(text.replaceAll(",", ""));

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
      const figures = heading.classList.contains("n");
      const key = row => row.cells[column].textContent;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (!figures) return (up ? 1 : -1) * x.localeCompare(y, "en", {numeric: true});
        const [one, other] = [figure(x), figure(y)];
        // Cells without a figure stay at the end in either order.
        if (isNaN(one) || isNaN(other)) return isNaN(one) - isNaN(other);
        return up ? one - other : other - one;
      });
      body.append(...rows);
    });
  });
}

// --- tooltips: the titles of a chart's shapes, shown without delay and on touch screens too

const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
tip.setAttribute("role", "tooltip");
document.body.append(tip);
const tips = new WeakMap();
for (const title of document.querySelectorAll(".chart title")) {
  tips.set(title.parentNode, title.textContent);
  title.remove();
}
function show(event) {
  const text = tips.get(event.target);
  tip.hidden = text === undefined;
  if (tip.hidden) return;
  tip.textContent = text;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room)) + scrollX}px`;
  const above = event.clientY + 14 + tip.offsetHeight > innerHeight;
  tip.style.top = `${event.clientY + scrollY + (above ? -tip.offsetHeight - 10 : 14)}px`;
}
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, show);
