// Light and dark: the system's choice until the button is pressed; remembered only while the page is open.

const system = matchMedia("(prefers-color-scheme: dark)");
let pressed = null;

function dark() {
  return pressed === null ? system.matches : pressed;
}

function applyTheme() {
  document.documentElement.dataset.theme = dark() ? "dark" : "light";
  byId("theme").textContent = text(dark() ? "page.light" : "page.dark");
}

function startTheme(redraw) {
  byId("theme").hidden = false;
  byId("theme").addEventListener("click", () => {
    pressed = !dark();
    applyTheme();
    redraw();
  });
  system.addEventListener("change", () => {
    applyTheme();
    redraw();
  });
  applyTheme();
}
