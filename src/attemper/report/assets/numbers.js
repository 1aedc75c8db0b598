// The data of the page, and numbers as text. Everything that came from a model's names is only ever set as text.

const DATA = JSON.parse(document.getElementById("data").textContent);

// A head is an array in the file, to keep it small: see FIELDS of document.py.
const HEADS = DATA.sites.flatMap((site, at) =>
  site.heads.map(([head, rows, empty, nonfinite, values, histogram, curve], place) => ({
    site: at, place, head, rows, empty, nonfinite, values, histogram, curve, alarms: [],
  })),
);

const BY_SITE = DATA.sites.map(() => []);
for (const head of HEADS) BY_SITE[head.site].push(head);

for (const alarm of DATA.alarms) {
  for (const head of BY_SITE[alarm.site] || []) {
    if (alarm.head === null || alarm.head === head.head) head.alarms.push(alarm);
  }
}

const STACK_OF = [];
DATA.stacks.forEach((stack, at) => stack.sites.forEach((site) => (STACK_OF[site] = at)));

// What the person chose; select boxes and clicks change it, everything else reads it.
const chosen = { quantity: 0, stretch: false, head: null };

function byId(id) {
  return document.getElementById(id);
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Four significant digits, as display.number in Python.
function full(value) {
  if (value === null) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
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

function withUnit(value, quantity) {
  return value === null || !quantity.unit ? full(value) : `${full(value)} ${quantity.unit}`;
}

function ordinal(place) {
  const tens = place % 100;
  const ending = tens >= 11 && tens <= 13 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[place % 10] || "th";
  return `${place.toLocaleString("en")}${ending}`;
}

function cut(text, longest) {
  return text.length <= longest ? text : `${text.slice(0, longest - 1)}…`;
}

function quantity() {
  return DATA.quantities[chosen.quantity];
}

function valueOf(head) {
  return head.values[chosen.quantity];
}

// "layer A3, head 5": the letter only where there are several stacks; the name where it has no number.
function spoken(head) {
  const site = DATA.sites[head.site];
  const layer = site.label === "–" ? cut(site.name, 60) : `layer ${DATA.stacks[STACK_OF[head.site]].letter}${site.label}`;
  return `${layer}, head ${head.head}`;
}

// A head's place when all heads with a number are sorted: { place, of }, ties share the better place.
function rankOf(head) {
  const value = valueOf(head);
  if (value === null) return null;
  const known = HEADS.map(valueOf).filter((other) => other !== null);
  const ahead = known.filter((other) => (quantity().ascending ? other < value : other > value)).length;
  return { place: ahead + 1, of: known.length };
}

function rankText(head) {
  const rank = rankOf(head);
  if (!rank) return `No ${quantity().title.toLowerCase()}: this head has no place.`;
  const place = rank.place === 1 ? "The" : `${ordinal(rank.place)}`;
  return `${place} ${quantity().superlative} of ${rank.of.toLocaleString("en")} by ${quantity().title.toLowerCase()}.`;
}
