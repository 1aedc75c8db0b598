// Files that lie packed in the page: exact numbers, saved without asking anybody for them.

async function unpacked(kind) {
  return unpack(byId(`file-${kind}`).textContent, "gzip");
}

async function fileOf(kind) {
  return DATA.run ? historyCsv() : unpacked(kind);
}

async function save(button) {
  const types = { csv: "text/csv", json: "application/json" };
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([await fileOf(button.dataset.kind)], { type: types[button.dataset.kind] }));
  link.download = button.dataset.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000); // a browser may ask where to save it first
}

function startDownloads() {
  if (!window.DecompressionStream) return;
  startTitles();
  for (const button of document.querySelectorAll(".save")) {
    button.hidden = false;
    button.addEventListener("click", () => save(button));
  }
}

function startTitles() {
  for (const button of document.querySelectorAll(".save")) button.title = text("page.save", { kind: button.dataset.kind.toUpperCase() });
}
