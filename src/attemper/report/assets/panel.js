// The numbers of one head.

function fillPanel() {
  const head = chosen.head;
  if (!head) return;
  const site = DATA.sites[head.site];
  byId("panel").hidden = false;
  byId("panel-title").textContent = capital(spoken(head));
  const name = element("bdi");
  name.append(element("code", site.name));
  byId("panel-site").replaceChildren(name, element("span", ` ${site.kind} attention, ${site.mode}`));
  byId("panel-site").title = site.name;
  byId("rank").textContent = rankText(head);
  byId("strip").setAttribute("aria-label", `All heads by ${quantity().title.toLowerCase()}. ${rankText(head)}`);
  fillAlarms(head);
  fillValues(head);
  const [rows, empty, nonfinite] = [head.rows, head.empty, head.nonfinite].map((many) => many.toLocaleString("en"));
  byId("rows").textContent = `${rows} rows measured; left out: ${empty} empty, ${nonfinite} with NaN or infinity.`;
  drawStrip(head);
  if (DATA.details) {
    drawHistogram(head);
    drawCurve(head);
  }
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function fillAlarms(head) {
  byId("panel-alarms").replaceChildren(...head.alarms.map((alarm) => {
    const line = element("li", undefined, alarm.level);
    line.append(element("span", cut(alarm.severity, 40), "severity"), " ", element("bdi", alarm.text));
    return line;
  }));
}

function fillValues(head) {
  const pairs = DATA.quantities.map((kind, at) => [kind.title, head.values[at], kind.unit, kind.meaning, at === chosen.quantity]);
  byId("values").replaceChildren(...pairs.map(([title, value, unit, meaning, current]) => {
    const pair = element("div", undefined, current ? "current" : "");
    pair.title = meaning;
    const number = element("dd", full(value));
    if (unit && value !== null) number.append(" ", element("small", unit));
    if (value === null) number.append(" ", element("small", "not measured", "none"));
    pair.append(element("dt", title), number);
    return pair;
  }));
}

function announce(text) {
  byId("live").textContent = text;
}

// Shows a head. On a narrow screen the panel is below the map: go there, unless told to stay.
function choose(head, { stay = false, focus = false } = {}) {
  chosen.head = head;
  for (const map of maps) {
    if (map.stack.sites.includes(head.site)) aim(map, head);
    place(map);
  }
  fillPanel();
  announce(`${summary(head)}. ${rankText(head)}`);
  if (focus) byId("panel-title").focus({ preventScroll: true });
  const below = byId("panel").offsetLeft <= byId("heads").offsetLeft;
  if (focus || (below && !stay)) byId("panel").scrollIntoView({ block: "start", behavior: calm() ? "auto" : "smooth" });
}

function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

// Back from the panel to the head's cell.
function back() {
  const map = maps.find(({ stack }) => stack.sites.includes(chosen.head.site));
  map.area.focus({ preventScroll: true });
  map.cursor.hidden = false;
  map.area.scrollIntoView({ block: "center", behavior: calm() ? "auto" : "smooth" });
}
