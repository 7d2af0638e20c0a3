"use strict";
// Sort a table by the column whose heading is pressed; numbers by value, missing values last.
for (const button of document.querySelectorAll("table.sortable th button")) {
  button.addEventListener("click", () => {
    const heading = button.closest("th"), table = heading.closest("table"), body = table.tBodies[0];
    const column = [...heading.parentNode.children].indexOf(heading);
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.v;
    const missing = v => v === "" || v === "–";
    const compare = (a, b) => {
      const x = Number(a), y = Number(b);
      return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
    };
    const rows = [...body.rows].sort((a, b) => {
      const v = value(a), w = value(b);
      if (missing(v) || missing(w)) return missing(v) - missing(w);
      return down ? -compare(v, w) : compare(v, w);
    });
    body.append(...rows);
  });
}
// A print shows what is folded away on the screen.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
