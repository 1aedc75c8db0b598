// Starts the page, and draws it again when a control, the language, the theme or the width changes.

function buildCharts() {
  byId("charts").replaceChildren(...EXPERIMENT.charts.map((chart) => {
    const details = make("details", {}, make("summary", {}, text("numbers")), make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": text(`chart.${chart.key}`) }, make("table", { "data-chart": chart.key })));
    details.addEventListener("toggle", redraw);
    return make("figure", { id: `chart-${chart.key}` },
      make("figcaption", {}, make("h2", {}, text(`chart.${chart.key}`)), make("p", { class: "calm" }, text(`chart.${chart.key}.see`))),
      make("div", { class: "canvas" }), make("ul", { class: "legend" }), details);
  }));
}

function drawCharts() {
  for (const chart of EXPERIMENT.charts) {
    const figure = byId(`chart-${chart.key}`);
    if (!figure.clientWidth) return; // no layout yet: the observer below calls again
    const drawn = (chart.bars ? drawBars : drawCurves)(chart, figure.querySelector(".canvas"));
    if (figure.querySelector("details").open) fillTable(figure.querySelector("table"), chart, drawn);
  }
}

function fillNumbers() {
  const numbers = EXPERIMENT.numbers(at);
  byId("numbers").replaceChildren(...Object.entries(numbers).map(([key, value]) => make("li", {},
    make("span", { class: "name" }, text(`number.${key}`)),
    make("span", { class: "value" }, make("data", { value: String(value), "data-number": key }, shown(value)), make("small", {}, unit(`number.${key}.unit`))))));
  const words = {};
  for (const [key, value] of Object.entries({ ...numbers, ...at })) {
    words[key] = typeof value === "number" ? shown(value, 3) : optionText(`option.${key}`, value);
    if (typeof value === "number") words[`${key}_percent`] = `${shown(100 * value, 3)}%`;
  }
  byId("verdict").textContent = text(`verdict.${EXPERIMENT.verdict(numbers)}`, words);
}

function fillTexts() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : language;
  document.title = `${text("question")} – attemper`;
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = text(element.dataset.text);
  byId("tries").replaceChildren(...EXPERIMENT.tries.map((values, i) => {
    const button = make("button", { type: "button", class: "quiet" }, text(`try.${i + 1}`));
    button.addEventListener("click", () => set(values));
    return make("li", {}, button);
  }));
  byId("language").textContent = text("other_language");
  byId("language").lang = language === "en" ? "zh-CN" : "en";
}

function redraw() {
  fillNumbers();
  drawCharts();
}

function build() {
  fillTexts();
  buildControls();
  buildCharts();
  set(at);
}

for (const { key, start } of EXPERIMENT.controls) at[key] = start;
byId("language").hidden = false;
byId("language").addEventListener("click", () => {
  language = DATA.languages[(DATA.languages.indexOf(language) + 1) % DATA.languages.length];
  build();
  applyTheme();
});
byId("reset").addEventListener("click", () => set(Object.fromEntries(EXPERIMENT.controls.map(({ key, start }) => [key, start]))));
byId("play").hidden = false;
build();
startTheme(() => {});
new ResizeObserver(drawCharts).observe(byId("charts"));
