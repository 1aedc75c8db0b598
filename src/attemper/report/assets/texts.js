// What the page says, in the language that is chosen: messages are [key, values], see texts.py.

const LOCALES = { en: "en", zh: "zh-Hans" };
// A link to the page may choose it: page.html#zh.
let language = location.hash.slice(1) in LOCALES ? location.hash.slice(1) : navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";

function text(key, values = {}) {
  let found = DATA.texts[language][key];
  if (typeof found !== "string") found = (values.n ?? values.value) === 1 && found.one ? found.one : found.other;
  return found.replace(/\{(\w+)\}/g, (_, name) => say(values[name]));
}

function say(said) {
  if (Array.isArray(said)) return text(said[0], said[1]);
  if (typeof said === "number") return full(said);
  if (said && said.and) return joined(said.and.map(say));
  if (said && said.within) return say(said.within).toLowerCase();
  if (said && said.names) return said.names.map(say).join(text("list.names"));
  if (said && said.date) return dateText(said.date);
  return String(said ?? "");
}

function joined(parts) {
  if (parts.length < 3) return parts.join(text("list.two"));
  return `${parts.slice(0, -1).join(text("list.separator"))}${text("list.last")}${parts.at(-1)}`;
}

function dateText(iso) {
  const date = new Date(iso);
  if (Number.isNaN(date.getTime())) return iso;
  return `${new Intl.DateTimeFormat(LOCALES[language], { dateStyle: "medium", timeStyle: "short", timeZone: "UTC" }).format(date)} UTC`;
}

// Four significant digits, as text.number in Python.
function full(value) {
  if (value === null) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString(LOCALES[language]);
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// A share of less than a ten-thousandth is 0 for a reader: 3e-19 of log n says no more.
function withUnit(given, quantity) {
  const value = given !== null && quantity.low === 0 && quantity.high === 1 ? Number(given.toFixed(4)) : given;
  return value === null || !quantity.unit ? full(value) : text("unit.after", { value, unit: quantity.unit });
}

// As it stands within a sentence.
function titleOf(quantity) {
  return say({ within: quantity.title });
}

function ordinal(place) {
  if (language !== "en") return full(place);
  const tens = place % 100;
  const ending = tens >= 11 && tens <= 13 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[place % 10] || "th";
  return `${full(place)}${ending}`;
}

// Says the markup's own texts again: an element's with data-say, an attribute's with data-say-title and the like.
function translate() {
  document.documentElement.lang = LOCALES[language];
  for (const one of document.querySelectorAll("[data-say]")) one.textContent = say(JSON.parse(one.dataset.say));
  for (const one of document.querySelectorAll("[data-say-title][aria-label]")) one.setAttribute("aria-label", say(JSON.parse(one.getAttribute("data-say-title"))));
  for (const name of ["title", "aria-label"]) {
    for (const one of document.querySelectorAll(`[data-say-${name}]`)) one.setAttribute(name, say(JSON.parse(one.getAttribute(`data-say-${name}`))));
  }
  const other = language === "en" ? "zh" : "en";
  byId("language").lang = LOCALES[other];
  byId("language").textContent = DATA.texts[other]["language.name"];
}

function startLanguage(redraw) {
  byId("language").hidden = false;
  byId("language").addEventListener("click", () => {
    language = language === "en" ? "zh" : "en";
    translate();
    redraw();
  });
  translate();
}
