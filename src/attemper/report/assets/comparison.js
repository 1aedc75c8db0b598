// Sorts the table by the size of a statistic's change. Nothing here is built from names: rows are only moved.

function sortBy(column) {
  const body = byId("heads").tBodies[0];
  const size = (row) => Number(row.cells[3 + column].dataset.size);
  const rows = [...body.rows].sort((a, b) => size(b) - size(a) || 0);
  body.append(...rows);
  for (const head of document.querySelectorAll("#heads th[data-column]")) {
    head.setAttribute("aria-sort", Number(head.dataset.column) === column ? "descending" : "none");
  }
}

function startSorting() {
  for (const head of document.querySelectorAll("#heads th[data-column]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.title = text("compared.sort");
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortBy(Number(head.dataset.column)));
    head.append(button);
  }
}

function start() {
  startLanguage(applyTheme);
  startTheme(() => {});
  startSorting();
}
