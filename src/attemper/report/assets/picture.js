// The attention picture of the chosen head: a heat map of queries by keys, and the tokens themselves.

const picture = { shown: null, weights: null, row: null };

function pictureOf(head) {
  return DATA.pictures.find((one) => one.site === head.site && one.head === head.head);
}

async function drawPicture(head) {
  const found = pictureOf(head);
  byId("picture-none").hidden = Boolean(found);
  byId("picture-shown").hidden = !found;
  byId("picture-head").textContent = spoken(head);
  if (!found) return;
  found.weights ??= new Uint16Array(await unpack(found.packed, "deflate"));
  if (chosen.head !== head) return; // another one was chosen meanwhile
  Object.assign(picture, { shown: found, row: null });
  const keys = found.keys ?? found.tokens;
  byId("picture-size").textContent = text("picture.text", { queries: found.tokens.length, keys: keys.length });
  byId("picture-queries").replaceChildren(...found.tokens.map((token, row) => tokenOf(token, row, true)));
  byId("picture-keys").replaceChildren(...keys.map((token, column) => tokenOf(token, column, false)));
  paintPicture();
  pointRow(null);
}

function tokenOf(token, place, isQuery) {
  const made = element("span", token, "token");
  made.title = `${place}`;
  if (isQuery) made.addEventListener("pointerenter", () => pointRow(place));
  return made;
}

function pictureSize() {
  return [picture.shown.tokens.length, (picture.shown.keys ?? picture.shown.tokens).length];
}

function weightAt(row, column) {
  return picture.shown.weights[row * pictureSize()[1] + column] / 65535;
}

// The root of a weight: small ones stay visible.
function tint(weight) {
  return viridis(Math.sqrt(weight));
}

function paintPicture() {
  const canvas = byId("picture-map");
  const [rows, columns] = pictureSize();
  [canvas.width, canvas.height] = [columns, rows];
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(columns, rows);
  for (let at = 0; at < rows * columns; at += 1) image.data.set([...tint(picture.shown.weights[at] / 65535), 255], 4 * at);
  pen.putImageData(image, 0, 0);
  canvas.style.aspectRatio = `${columns} / ${rows}`;
  canvas.setAttribute("aria-label", text("picture.label", { head: spoken(chosen.head), queries: rows, keys: columns }));
}

// Keys take the colour of what this query gives them; without one, of what they receive in all, the most being 1.
function pointRow(row, column = null) {
  picture.row = row;
  const [rows, columns] = pictureSize();
  const received = Array.from({ length: columns }, (_, at) => {
    if (row !== null) return weightAt(row, at);
    let total = 0;
    for (let query = 0; query < rows; query += 1) total += weightAt(query, at);
    return total;
  });
  const most = row === null ? received.reduce((a, b) => Math.max(a, b), 1e-9) : 1;
  [...byId("picture-keys").children].forEach((token, at) => {
    const colour = tint(received[at] / most);
    token.style.backgroundColor = css(colour);
    token.style.color = inkOn(colour);
    token.classList.toggle("pointed", at === column);
    token.title = `${at}: ${full(received[at])}`;
  });
  [...byId("picture-queries").children].forEach((token, at) => token.classList.toggle("pointed", at === row));
  byId("picture-said").textContent = row === null ? text("picture.mass") : rowText(row, column ?? received.indexOf(received.reduce((a, b) => Math.max(a, b))));
}

function rowText(row, column) {
  const { tokens, keys } = picture.shown;
  return text("picture.row", { query: tokens[row], place: row, key: (keys ?? tokens)[column], at: column, weight: weightAt(row, column) });
}

function startPicture() {
  const canvas = byId("picture-map");
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const [rows, columns] = pictureSize();
    const [row, column] = [((event.clientY - box.top) / box.height) * rows, ((event.clientX - box.left) / box.width) * columns].map(Math.floor);
    if (row >= 0 && row < rows && column >= 0 && column < columns) pointRow(row, column);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    pointRow(Math.min(Math.max((picture.row ?? -1) + step, 0), pictureSize()[0] - 1));
    announce(byId("picture-said").textContent);
  });
  byId("picture").addEventListener("pointerleave", () => picture.shown && pointRow(null));
  byId("picture").hidden = false;
}
