// Light and dark: the system's choice until the button is pressed; remembered only while the page is open. Paper is light.

const system = matchMedia("(prefers-color-scheme: dark)");
const paper = matchMedia("print");
let pressed = null;

function dark() {
  return !paper.matches && (pressed === null ? system.matches : pressed);
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
  for (const media of [system, paper]) {
    media.addEventListener("change", () => {
      applyTheme();
      redraw();
    });
  }
  applyTheme();
}
