// A page that is served while its run is written: asks for the state of the run, and draws itself again as samples come.
(() => {
  "use strict";
  const SECONDS = 2, BETWEEN = 10, CALM = 5; // between two questions; between two new pages; after the reader's last touch
  const TEXTS = JSON.parse(document.currentScript.dataset.texts); // language -> key -> text
  const shown = JSON.parse(document.currentScript.dataset.look);
  const opened = performance.now();
  let touched = -Infinity;
  for (const event of ["pointerdown", "keydown", "wheel"]) addEventListener(event, () => (touched = performance.now()), { passive: true });

  const bar = document.createElement("div");
  bar.id = "live-bar";
  bar.setAttribute("role", "status");
  Object.assign(bar.style, {
    position: "fixed", left: "50%", bottom: "14px", transform: "translateX(-50%)", zIndex: "20", maxWidth: "calc(100vw - 24px)",
    padding: "7px 16px", borderRadius: "999px", background: "#201c28", color: "#ffffff", font: "13.5px/1.5 system-ui, sans-serif",
    boxShadow: "0 2px 10px rgba(0, 0, 0, 0.3)", border: "1px solid #807a8b",
  });
  document.body.append(bar);

  function say(key, look = shown) {
    const language = document.documentElement.lang.startsWith("zh") ? "zh" : "en";
    const values = { ...look, reason: look.gone };
    const number = (value) => (value ?? "–").toLocaleString(document.documentElement.lang);
    const text = TEXTS[language][`live.${key}`].replace(/\{(\w+)\}/g, (_, name) => number(values[name]));
    if (bar.firstChild?.textContent !== text) bar.replaceChildren(document.createTextNode(text));
    if (key === "gone") bar.style.background = "#8f1d10";
    if (key !== "fresh" || bar.childElementCount) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = TEXTS[language]["live.show"];
    Object.assign(button.style, { marginLeft: "12px", padding: "2px 12px", borderRadius: "999px", border: "1px solid #ffffff", background: "none", color: "#ffffff", font: "inherit", cursor: "pointer" });
    button.addEventListener("click", reload);
    bar.append(button);
  }

  // What the reader has set goes over to the new page: language, theme, the chosen head, and every control with a name.
  const controls = () => [...document.querySelectorAll("select[id], input[id]")].filter((one) => !["search", "file"].includes(one.type));
  function reload() {
    const values = Object.fromEntries(controls().map((one) => [one.id, one.type === "checkbox" ? one.checked : one.value]));
    const { lang, dataset } = document.documentElement;
    const chosen = document.getElementById("panel")?.dataset.chosen;
    sessionStorage.setItem("attemper-live", JSON.stringify({ lang, theme: dataset.theme, values, chosen }));
    location.reload();
  }
  function restore() {
    const kept = sessionStorage.getItem("attemper-live");
    sessionStorage.removeItem("attemper-live");
    if (!kept) return;
    const { lang, theme, values, chosen } = JSON.parse(kept);
    if (lang !== document.documentElement.lang) document.getElementById("language")?.click();
    if (theme !== document.documentElement.dataset.theme) document.getElementById("theme")?.click();
    for (const one of controls()) {
      const value = values[one.id];
      // A slider of steps goes on to the newest step.
      if (value === undefined || one.type === "range" || value === (one.type === "checkbox" ? one.checked : one.value)) continue;
      if (one.type === "checkbox") one.checked = value;
      else one.value = value;
      one.dispatchEvent(new Event("input", { bubbles: true }));
      one.dispatchEvent(new Event("change", { bubbles: true }));
    }
    if (chosen) document.getElementById("panel").dispatchEvent(new CustomEvent("choose", { detail: JSON.parse(chosen) }));
  }

  async function ask() {
    let look;
    try {
      look = await (await fetch("state", { cache: "no-store" })).json();
    } catch {
      say("stopped");
      return;
    }
    if (look.gone) say("gone", look);
    else if (look.samples !== shown.samples || look.step !== shown.step) {
      const now = performance.now();
      if (now - opened > 1000 * BETWEEN && now - touched > 1000 * CALM && !document.hidden) reload();
      else say("fresh", look);
    } else say(!look.samples ? "waiting" : look.live ? "live" : "ended", look);
  }

  restore();
  say(!shown.samples ? "waiting" : shown.live ? "live" : "ended");
  ask();
  setInterval(ask, 1000 * SECONDS);
})();
