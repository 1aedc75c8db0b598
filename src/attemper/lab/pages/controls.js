// What every page of the lab has: sliders and choices, the texts of a language, numbers as people read them.

const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const SIZES_OF_HEADS = Array.from({ length: 10 }, (_, i) => 2 ** (i + 1));
const TEMPERATURES = DATA.temperatures;

const slider = (key, values, start) => ({ key, values, start });
const choice = (key, options, start) => ({ key, options, start });
const sorted = (row) => [...row].sort((a, b) => b - a);

// A function that is asked once; its answer never changes.
function once(make) {
  let made;
  return () => (made ??= make());
}

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "rect", "circle", "text", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Texts. The language is that of the link, page.html#zh, or else the browser's, until the button is pressed.
let language = [location.hash.slice(1), ...navigator.languages.map((tag) => tag.slice(0, 2))].find((tag) => DATA.languages.includes(tag)) || "en";

function text(key, values = {}) {
  const found = DATA.texts[key];
  if (!found) throw new Error(`no text ${key}`);
  return found[language].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

const has = (key) => key in DATA.texts;

const exponential = (value) => {
  const [digits, power] = value.toExponential().split("e");
  return `${digits}e${power.replace("+", "")}`;
};

// A few digits; very large and very small numbers with their power of ten.
function shown(value, digits = 4) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return exponential(Number(value.toPrecision(3)));
  const whole = Number.isInteger(value); // sizes and counts are exact
  return value.toLocaleString(language === "zh" ? "zh-CN" : "en", whole ? {} : { maximumSignificantDigits: digits });
}

// The state of the page: the value of every control.
const at = {};

// The place of the nearest of a slider's values: by their ratio, or by their difference where 0 is among them.
function nearest(values, value) {
  const far = (one) => (values[0] > 0 ? Math.abs(Math.log(one / Math.max(value, 1e-300))) : Math.abs(one - value));
  return values.reduce((best, one, i) => (far(one) < far(values[best]) ? i : best), 0);
}

function set(values) {
  for (const control of EXPERIMENT.controls) {
    if (!(control.key in values)) continue;
    at[control.key] = control.values ? control.values[nearest(control.values, values[control.key])] : values[control.key];
  }
  for (const control of EXPERIMENT.controls) showControl(control);
  redraw();
}

function showControl(control) {
  const value = at[control.key];
  if (!control.values) {
    for (const input of document.getElementsByName(control.key)) input.checked = input.value === value;
    return;
  }
  const input = byId(`control-${control.key}`);
  input.value = control.values.indexOf(value);
  const said = `${shown(value)}${unit(`control.${control.key}.unit`)}`;
  input.setAttribute("aria-valuetext", said);
  byId(`value-${control.key}`).textContent = said;
}

const unit = (key) => (has(key) ? ` ${text(key)}` : "");
const optionText = (key, option) => (has(`${key}.${option}`) ? text(`${key}.${option}`) : option);

function buildControls() {
  byId("controls").replaceChildren(...EXPERIMENT.controls.map((control) => {
    const name = text(`control.${control.key}`);
    if (control.values) return buildSlider(control, name);
    const options = control.options.map((option) => {
      const input = make("input", { type: "radio", name: control.key, value: option });
      input.addEventListener("change", () => set({ [control.key]: option }));
      return make("label", {}, input, make("span", {}, optionText(`option.${control.key}`, option)));
    });
    return make("fieldset", {}, make("legend", {}, name), make("div", { class: "options" }, ...options));
  }));
}

function buildSlider(control, name) {
  const id = `control-${control.key}`;
  const input = make("input", { type: "range", id, min: 0, max: control.values.length - 1, step: 1 });
  input.addEventListener("input", () => set({ [control.key]: control.values[Number(input.value)] }));
  const value = make("output", { id: `value-${control.key}`, for: id });
  return make("div", { class: "slider" }, make("label", { for: id }, name), value, input);
}
