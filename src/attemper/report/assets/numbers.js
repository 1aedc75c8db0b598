// The heads of the page, and their numbers.

// A head is an array in the file, to keep it small: see FIELDS of document.py.
const HEADS = DATA.sites.flatMap((site, at) =>
  site.heads.map(([head, rows, empty, nonfinite, values, histogram, curve], place) => ({
    site: at, place, head, rows, empty, nonfinite, values, histogram, curve, alarms: [], role: site.roles?.[place] ?? null,
  })),
);

const BY_SITE = DATA.sites.map(() => []);
for (const head of HEADS) BY_SITE[head.site].push(head);

for (const alarm of DATA.alarms) {
  alarm.severity ??= [`severity.${alarm.level}`];
  alarm.since ??= null;
  alarm.ended ??= null;
  for (const head of BY_SITE[alarm.site] || []) {
    if (alarm.head === null || alarm.head === head.head) head.alarms.push(alarm);
  }
}

const STACK_OF = [];
DATA.stacks.forEach((stack, at) => stack.sites.forEach((site) => (STACK_OF[site] = at)));

// What the person chose; select boxes and clicks change it, everything else reads it.
// column: a place in the history of a run; null: the last sample.
// role: a place among the roles, -1: heads without one; null: all heads.
const chosen = { quantity: 0, stretch: false, head: null, column: null, role: null };

function isShown(head) {
  return chosen.role === null || head.role === chosen.role;
}

// "previous-token head"; of a head without a role what it is, too; empty where no role was read.
function roleOf(head) {
  if (head.role === null) return "";
  return head.role < 0 ? text("role.none") : say(DATA.roles[head.role]);
}

// As much as fits in a cell.
function short(value) {
  const size = Math.abs(value);
  if (size >= 10000) return `${Math.round(value / 1000)}k`;
  if (size >= 1000) return `${(value / 1000).toFixed(1)}k`;
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  return value.toFixed(2);
}

// As much as fits in a narrow cell: three characters, four with a sign.
function shortest(value) {
  const size = Math.abs(value);
  if (size >= 1000) return `${Math.round(value / 1000)}k`;
  if (size >= 9.95) return value.toFixed(0);
  if (size >= 0.995) return value.toFixed(1);
  return value.toFixed(2).replace("0.", ".");
}

function quantity() {
  return DATA.quantities[chosen.quantity];
}

// A number of a head at the moment that is shown: exact of the last sample, from the history of a run before.
function valueOf(head, at = chosen.quantity) {
  return chosen.column === null ? head.values[at] : pastValue(head, at, chosen.column);
}

function alarmsOf(head) {
  return head.alarms.filter(standsNow);
}

function isBroken(head) {
  return chosen.column === null ? head.nonfinite > 0 : alarmsOf(head).some((alarm) => alarm.level === "critical");
}

// "A3": the letter only where there are several stacks; the name where a site has no number.
function layerOf(head, longest = 60) {
  const site = DATA.sites[head.site];
  return site.label === "–" ? cut(site.name, longest) : `${DATA.stacks[STACK_OF[head.site]].letter}${site.label}`;
}

// "layer A3, head 5"
function spoken(head) {
  const named = DATA.sites[head.site].label === "–";
  return text("head.spoken", { layer: named ? layerOf(head) : ["head.layer", { label: layerOf(head) }], head: head.head });
}

// A head's place when all heads with a number are sorted: { place, of }, ties share the better place.
function rankOf(head) {
  const value = valueOf(head);
  if (value === null) return null;
  const known = HEADS.map((other) => valueOf(other)).filter((other) => other !== null);
  const ahead = known.filter((other) => (quantity().ascending ? other < value : other > value)).length;
  return { place: ahead + 1, of: known.length };
}

function rankText(head) {
  const rank = rankOf(head);
  const title = titleOf(quantity());
  if (!rank) return text("head.no_place", { title });
  const values = { place: ordinal(rank.place), superlative: quantity().superlative, n: rank.of, title };
  const said = [rank.place === 1 ? "head.first" : "head.rank", values];
  return chosen.column === null ? say(said) : text("head.rank_at", { step: stepNow(), said });
}
