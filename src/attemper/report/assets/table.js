// All numbers as a table, made when it is first opened; a click on a column's title sorts by it.

const MOST_LINES = 1000; // more would keep the browser busy for seconds
let order = null; // { column, rising }

function columns() {
  return [
    { title: text("table.layer"), of: (head) => head.site, shown: (head) => layerOf(head, 40) },
    { title: text("table.head"), of: (head) => head.head },
    ...(byId("role") ? [{ title: text("role.filter"), of: (head) => head.role, shown: roleOf }] : []),
    ...DATA.quantities.map((kind, at) => ({ title: say(kind.title), unit: say(kind.unit), of: (head) => head.values[at] })),
    { title: text("table.rows"), of: (head) => head.rows },
  ];
}

function fillTable() {
  const shownColumns = columns();
  const table = element("table");
  const heading = element("tr");
  shownColumns.forEach((column, at) => {
    const cell = element("th");
    cell.scope = "col";
    const button = element("button", column.title, "sort");
    button.type = "button";
    if (column.unit) button.append(" ", element("small", column.unit));
    button.addEventListener("click", () => sortBy(at));
    cell.append(button);
    if (order && order.column === at) cell.setAttribute("aria-sort", order.rising ? "ascending" : "descending");
    heading.append(cell);
  });
  const head = element("thead");
  head.append(heading);
  const body = element("tbody");
  for (const one of sorted().slice(0, MOST_LINES)) body.append(line(one, shownColumns));
  table.append(head, body);
  byId("all-table").replaceChildren(table);
  const many = HEADS.filter(isShown).length;
  byId("all-more").hidden = many <= MOST_LINES;
  byId("all-more").textContent = text("table.more", { shown: MOST_LINES, n: many });
}

function line(head, shownColumns) {
  const row = element("tr");
  shownColumns.forEach((column, at) => {
    const cell = element("td");
    if (at === 1) {
      const button = element("button", String(head.head), "place");
      button.type = "button";
      button.setAttribute("aria-label", spoken(head));
      button.addEventListener("click", () => choose(head, { focus: true }));
      cell.append(button);
    } else cell.textContent = column.shown ? column.shown(head) : full(column.of(head));
    if (at === 0) cell.title = DATA.sites[head.site].name;
    row.append(cell);
  });
  return row;
}

// Heads without a number come last, whichever way.
function sorted() {
  const shown = HEADS.filter(isShown);
  if (!order) return shown;
  const { of } = columns()[order.column];
  return shown.sort((a, b) => {
    const [x, y] = [of(a), of(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return order.rising ? x - y : y - x;
  });
}

function sortBy(column) {
  order = { column, rising: !(order && order.column === column && order.rising) };
  fillTable();
  byId("all-table").querySelectorAll(".sort")[column].focus();
}

// What each number means, at the foot of the page: titles that show on hover alone help nobody with a finger.
function fillGlossary() {
  byId("glossary").replaceChildren(...DATA.quantities.map(({ title, meaning }) => {
    const entry = element("div");
    entry.append(element("dt", say(title)), element("dd", say(meaning)));
    return entry;
  }));
}

function startTable() {
  const all = byId("all");
  if (!all) return;
  all.hidden = false;
  all.addEventListener("toggle", () => {
    if (all.open && !byId("all-table").firstChild) fillTable();
  });
}
