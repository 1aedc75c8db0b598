// Lines between the tokens of a sheet, beside its map: from a query on the left to a key on the right.

const FAINTEST = 0.01; // a line of less weight would not be seen

class Lines {
  constructor(canvas, sheet) {
    [this.canvas, this.sheet] = [canvas, sheet];
  }

  // Of one query, or of one key; of all where both are null.
  draw(row, column) {
    const box = this.canvas.getBoundingClientRect();
    const scale = window.devicePixelRatio || 1;
    [this.canvas.width, this.canvas.height] = [box.width * scale, box.height * scale];
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    [pen.strokeStyle, pen.lineWidth] = [theme("--accent"), 2];
    const middles = (tokens) => [...tokens.children].map((one) => one.getBoundingClientRect()).map((one) => (one.top + one.bottom) / 2 - box.top);
    const [queries, keys] = [middles(this.sheet.queries), middles(this.sheet.keys)];
    const alone = row !== null || column !== null;
    for (const [query, from] of queries.entries()) {
      if (row !== null && row !== query) continue;
      for (const [key, to] of keys.entries()) {
        const weight = this.sheet.weight(query, key);
        if ((column !== null && column !== key) || !(weight >= FAINTEST)) continue;
        pen.globalAlpha = Math.min(1, alone ? Math.sqrt(weight) : weight);
        pen.beginPath();
        pen.moveTo(0, from);
        pen.bezierCurveTo(box.width / 2, from, box.width / 2, to, box.width, to);
        pen.stroke();
      }
    }
  }
}
