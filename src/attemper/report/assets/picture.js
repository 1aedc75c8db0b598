// The attention picture of the chosen head of a scan.

let sheet = null;

function pictureOf(head) {
  return DATA.pictures.find((one) => one.site === head.site && one.head === head.head);
}

async function drawPicture(head) {
  const found = pictureOf(head);
  byId("picture-none").hidden = Boolean(found);
  byId("picture-shown").hidden = !found;
  byId("picture-head").textContent = spoken(head);
  if (!found) return;
  const [queries, keys] = [found.tokens.length, (found.keys ?? found.tokens).length];
  await sheet.show(found, text("picture.label", { head: spoken(head), queries, keys }));
  byId("picture-size").textContent = text("picture.text", { queries, keys });
  pointPicture(null);
}

function pointPicture(row, column = null, aloud = false) {
  const said = sheet.point(row, column);
  byId("picture-said").textContent = said;
  if (aloud) announce(said);
}

function startPicture() {
  sheet = new Sheet("picture", pointPicture);
  byId("picture").addEventListener("pointerleave", () => sheet.shown && pointPicture(null));
  byId("picture").hidden = false;
}
