// The numbers of one head.

const MOST_SAID = 6; // alarms of a head that are told

function fillPanel() {
  const head = chosen.head;
  if (!head) return;
  const site = DATA.sites[head.site];
  byId("panel").hidden = false;
  byId("panel-title").textContent = capital(spoken(head));
  const name = element("bdi");
  name.append(element("code", site.name));
  byId("panel-site").replaceChildren(name, element("span", ` ${text("site.kind", { kind: site.kind, mode: site.mode })}`));
  byId("panel-site").title = site.name;
  byId("rank").textContent = rankText(head);
  byId("strip").setAttribute("aria-label", text("head.strip", { title: titleOf(quantity()), rank: rankText(head) }));
  fillAlarms(head);
  fillValues("values", head, false);
  if (byId("scores")) {
    byId("panel-role").textContent = capital(roleOf(head));
    fillValues("scores", head, true);
  }
  byId("numbers-at").textContent = DATA.run ? text("head.numbers_at", { step: stepNow() }) : text("head.numbers");
  byId("rows").textContent = chosen.column === null
    ? text("head.rows", { rows: head.rows, empty: head.empty, nonfinite: head.nonfinite })
    : text("head.rounded");
  if (DATA.run) drawCourse(head);
  if (DATA.pictures.length) drawPicture(head);
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
  byId("panel-alarms").replaceChildren(...head.alarms.slice(0, MOST_SAID).map((alarm) => {
    const line = element("li", undefined, `${alarm.level}${alarm.ended === null ? "" : " over"}`);
    line.append(element("span", cut(say(alarm.severity), 40), "severity"), " ");
    if (alarm.when) line.append(element("b", say(alarm.when)), " ");
    line.append(element("bdi", say(alarm.text)));
    const of = DATA.bases[alarm.of];
    if (of || alarm.more) {
      const more = element("details");
      more.append(element("summary", text("verdict.more_title")), ...[alarm.more, of].filter(Boolean).map((one) => element("p", say(one))));
      line.append(more);
    }
    return line;
  }));
}

// The numbers of a head, or its scores of roles.
function fillValues(id, head, ofRoles) {
  byId(id).replaceChildren(...DATA.quantities.flatMap((kind, at) => {
    if (kind.role !== ofRoles) return [];
    const value = valueOf(head, at);
    const pair = element("div", undefined, at === chosen.quantity ? "current" : "");
    pair.title = say(kind.meaning);
    const number = element("dd", full(ofRoles && value !== null ? Number(value.toFixed(2)) : value));
    if (kind.unit && value !== null) number.append(" ", element("small", say(kind.unit)));
    if (value === null) number.append(" ", element("small", ofRoles ? text("role.unknown", { needs: text(kind.title[1].role[0].replace(/name$/, "needs")) }) : text("head.none"), "none"));
    pair.append(element("dt", say(ofRoles ? kind.title[1].role : kind.title)), number);
    return pair;
  }));
}

function announce(text) {
  byId("live").textContent = text;
}

// Shows a head. On a narrow screen the panel is below the map: go there, unless told to stay.
function choose(head, { stay = false, focus = false } = {}) {
  chosen.head = head;
  byId("panel").dataset.chosen = JSON.stringify({ site: head.site, head: head.head });
  for (const map of maps) {
    if (map.stack.sites.includes(head.site)) aim(map, head);
    place(map);
  }
  if (DATA.run) markChosen();
  fillPanel();
  announce(`${summary(head)}. ${rankText(head)}`);
  if (focus) byId("panel-title").focus({ preventScroll: true });
  const below = isNarrowPage();
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

// Whether the panel stands below the map.
function isNarrowPage() {
  return byId("panel").offsetLeft <= byId("heads").offsetLeft;
}
