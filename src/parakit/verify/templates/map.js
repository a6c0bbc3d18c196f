"use strict";
const cells = JSON.parse(document.getElementById("cells").textContent);
const table = document.querySelector("#map table");
const about = document.getElementById("about");
const rows = [...table.tBodies[0].rows];
const depth = (row) => Number(row.dataset.depth);

function refresh() {
  let folded = Infinity;  // Depth of the outermost folded row that we are in.
  for (const row of rows) {
    if (depth(row) <= folded) folded = Infinity;
    row.hidden = depth(row) > folded;
    const fold = row.querySelector(".fold");
    if (!fold) continue;
    const closed = row.classList.contains("folded");
    fold.setAttribute("aria-expanded", String(!closed));
    if (closed && folded === Infinity) folded = depth(row);
    for (const cell of row.querySelectorAll("td[data-all]")) {
      for (const [name, on] of [[cell.dataset.own, !closed], [cell.dataset.all, closed]])
        if (name) cell.classList.toggle(name, on);
    }
  }
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function describe(cell) {
  const [title, tensors, more] = cells[cell.dataset.at];
  const found = document.createElement("table");
  const head = found.createTHead().insertRow();
  for (const name of ["tensor", "error", "tolerance", "ratio", "wrong on"]) head.append(element("th", name));
  const body = found.createTBody();
  for (const line of tensors) {
    const row = body.insertRow();
    if (line[5]) row.className = "wrong";
    for (const text of line.slice(0, 5)) row.append(element("td", text));
  }
  about.replaceChildren(element("h3", title), found);
  if (more) about.append(element("p", `and ${more} more, nearer to the reference`));
}

function choose(cell, focus) {
  for (const other of table.querySelectorAll("td.chosen")) {
    other.classList.remove("chosen");
    other.tabIndex = -1;
  }
  cell.classList.add("chosen");
  cell.tabIndex = 0;
  describe(cell);
  if (focus) cell.focus();
}

function step(cell, down, right) {
  let row = rows.indexOf(cell.parentElement), column = cell.cellIndex;
  for (;;) {
    row += down;
    column += right;
    const next = rows[row]?.cells[column];
    if (!next || column < 1) return;
    if (next.dataset.at && !rows[row].hidden) return choose(next, true);
  }
}

const STEPS = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
table.addEventListener("click", (event) => {
  const cell = event.target.closest("td[data-at]");
  if (cell) return choose(cell, true);
  if (!event.target.closest(".fold")) return;
  event.target.closest("tr").classList.toggle("folded");
  refresh();
});
table.addEventListener("mouseover", (event) => {
  const cell = event.target.closest("td[data-at]");
  if (cell) describe(cell);
});
table.addEventListener("mouseleave", () => {
  const chosen = table.querySelector("td.chosen");
  if (chosen) describe(chosen);
});
table.addEventListener("keydown", (event) => {
  const cell = event.target.closest("td[data-at]");
  if (!cell || !STEPS[event.key]) return;
  event.preventDefault();
  step(cell, ...STEPS[event.key]);
});
for (const [id, folded] of [["open-all", false], ["fold-all", true]])
  document.getElementById(id)?.addEventListener("click", () => {
    for (const row of rows) if (row.querySelector(".fold")) row.classList.toggle("folded", folded);
    refresh();
  });
const start = table.querySelector(`td[data-at="${shown}"]`);
if (start) choose(start, false);
