// Files that lie packed in the page: exact numbers, saved without asking anybody for them.

async function unpacked(kind) {
  const bytes = Uint8Array.from(atob(byId(`file-${kind}`).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

async function save(button) {
  const types = { csv: "text/csv", json: "application/json" };
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([await unpacked(button.dataset.kind)], { type: types[button.dataset.kind] }));
  link.download = button.dataset.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000); // a browser may ask where to save it first
}

function startDownloads() {
  if (!window.DecompressionStream) return;
  for (const button of document.querySelectorAll(".save")) {
    button.hidden = false;
    button.title = `Save every number of this page as ${button.dataset.kind.toUpperCase()}`;
    button.addEventListener("click", () => save(button));
  }
}
