// Colours: viridis for values (lightness rises throughout, so it reads without colour vision), hatching for none.

const VIRIDIS = [
  [68, 1, 84], [72, 26, 108], [71, 47, 125], [65, 68, 135], [57, 86, 140], [49, 104, 142], [42, 120, 142], [35, 136, 142],
  [31, 152, 139], [34, 168, 132], [53, 183, 121], [84, 197, 104], [122, 209, 81], [165, 219, 54], [210, 226, 27], [253, 231, 37],
];

// 0 to 1 as [red, green, blue].
function viridis(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[low].map((channel, i) => Math.round(channel + (VIRIDIS[low + 1][i] - channel) * (at - low)));
}

function css(rgb) {
  return `rgb(${rgb.join(",")})`;
}

// Black or white, whichever has more contrast: never below 4.5 to 1, by the formula of WCAG.
function inkOn(rgb) {
  const [r, g, b] = rgb.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// The values that the ends of the scale stand for: the quantity's own range, or what was found.
function range() {
  const { low, high, logarithmic } = quantity();
  const known = knownValues();
  if (!known.length) return { low: low ?? 0, high: high ?? 1, logarithmic };
  const least = known.reduce((a, b) => Math.min(a, b));
  const most = known.reduce((a, b) => Math.max(a, b));
  const bottom = chosen.stretch || low === null ? least : Math.min(low, least);
  const top = chosen.stretch || high === null ? most : Math.max(high, most);
  return { low: bottom, high: top > bottom ? top : bottom + 1, logarithmic: logarithmic && bottom > 0 };
}

// Of a run over all its steps, so that a colour means the same at each.
function knownValues() {
  const past = HISTORY ? HEADS.flatMap((head) => pastEnds(head, chosen.quantity)) : [];
  return [...past, ...HEADS.map((head) => head.values[chosen.quantity])].filter((value) => value !== null);
}

function shareOf(value, { low, high, logarithmic }) {
  if (logarithmic) return Math.log(value / low) / Math.log(high / low);
  return (value - low) / (high - low);
}

function valueAt(share, { low, high, logarithmic }) {
  return logarithmic ? low * (high / low) ** share : low + (high - low) * share;
}

// The colour a style sheet gives to a name, so that the charts follow the theme.
function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// What all charts share: no motion, and the letters of the page.
function still() {
  return { animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily } };
}

// Diagonal lines, for cells without a colour of the scale. ECharts stretches a square of side 2 to the cell, and the
// pattern with it: shrunk here by as much.
function hatch(line, ground, wide, tall) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = ground;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = line;
  pen.lineWidth = 1.6;
  for (const shift of [-8, 0, 8]) {
    pen.beginPath();
    pen.moveTo(shift - 1, 9);
    pen.lineTo(shift + 9, -1);
    pen.stroke();
  }
  return { image: tile, repeat: "repeat", scaleX: 2 / wide, scaleY: 2 / tall };
}

function drawLegend() {
  const ends = range();
  byId("ticks").replaceChildren(
    ...[0, 0.25, 0.5, 0.75, 1].map((share) => element("span", full(Number(valueAt(share, ends).toPrecision(3))))),
  );
  const { title, unit, meaning } = quantity();
  const named = unit && !say(title).endsWith(say(unit)) ? ["heads.named", { title, unit }] : title;
  byId("scale-name").textContent = ends.logarithmic ? text("heads.logarithmic", { name: named }) : say(named);
  byId("meaning").textContent = say(meaning);
}
