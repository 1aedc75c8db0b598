// One attention picture: a heat map of queries by keys, and the tokens themselves.

class Sheet {
  // told(row, column): what is pointed at, none as null.
  constructor(name, told) {
    [this.canvas, this.queries, this.keys] = ["map", "queries", "keys"].map((part) => byId(`${name}-${part}`));
    [this.shown, this.row, this.told] = [null, null, told];
    this.canvas.addEventListener("pointermove", (event) => this.follow(event));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
  }

  async show(found, label) {
    found.weights ??= new Uint16Array(await unpack(found.packed, "deflate"));
    Object.assign(this, { shown: found, row: null });
    this.queries.replaceChildren(...found.tokens.map((token, row) => this.token(token, row, true)));
    this.keys.replaceChildren(...this.keyTokens.map((token, column) => this.token(token, column, false)));
    this.paint();
    this.canvas.setAttribute("aria-label", label);
  }

  token(token, place, isQuery) {
    const made = element("span", token, "token");
    made.title = `${place}`;
    if (isQuery) made.addEventListener("pointerenter", () => this.told(place, null));
    return made;
  }

  get keyTokens() {
    return this.shown.keys ?? this.shown.tokens;
  }

  get size() {
    return [this.shown.tokens.length, this.keyTokens.length];
  }

  weight(row, column) {
    return this.shown.weights[row * this.size[1] + column] / 65535;
  }

  paint() {
    const [rows, columns] = this.size;
    [this.canvas.width, this.canvas.height] = [columns, rows];
    const pen = this.canvas.getContext("2d");
    const image = pen.createImageData(columns, rows);
    for (let at = 0; at < rows * columns; at += 1) image.data.set([...tint(this.shown.weights[at] / 65535), 255], 4 * at);
    pen.putImageData(image, 0, 0);
    this.canvas.style.aspectRatio = `${columns} / ${rows}`;
  }

  // Keys take the colour of what this query gives them; without one, of what they receive in all, the most being 1.
  point(row, column = null) {
    this.row = row;
    const [rows, columns] = this.size;
    const received = Array.from({ length: columns }, (_, at) => {
      if (row !== null) return this.weight(row, at);
      let total = 0;
      for (let query = 0; query < rows; query += 1) total += this.weight(query, at);
      return total;
    });
    const largest = received.reduce((a, b) => Math.max(a, b), 1e-9);
    [...this.keys.children].forEach((token, at) => {
      const colour = tint(received[at] / (row === null ? largest : 1));
      token.style.backgroundColor = css(colour);
      token.style.color = inkOn(colour);
      token.classList.toggle("pointed", at === column);
      token.title = `${at}: ${full(received[at])}`;
    });
    [...this.queries.children].forEach((token, at) => token.classList.toggle("pointed", at === row));
    return row === null ? text("picture.mass") : this.said(row, column ?? received.indexOf(largest));
  }

  said(row, column) {
    return text("picture.row", { query: this.shown.tokens[row], place: row, key: this.keyTokens[column], at: column, weight: this.weight(row, column) });
  }

  follow(event) {
    const box = this.canvas.getBoundingClientRect();
    const [rows, columns] = this.size;
    const [row, column] = [((event.clientY - box.top) / box.height) * rows, ((event.clientX - box.left) / box.width) * columns].map(Math.floor);
    if (row >= 0 && row < rows && column >= 0 && column < columns) this.told(row, column);
  }

  press(event) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    this.told(Math.min(Math.max((this.row ?? -1) + step, 0), this.size[0] - 1), null, true);
  }
}

// The root of a weight: small ones stay visible. Grey is no number.
function tint(weight) {
  if (Number.isNaN(weight)) return [160, 160, 160];
  return viridis(Math.sqrt(Math.min(1, weight)));
}
