// The history of a run: 8 bits a number, as differences from one column to the next; see history.py.

let HISTORY = null; // { far, bands, layers } once it is unpacked

// Levels 0 to 254 between a head's least and largest number; 255 is none.
class Series {
  constructor(levels, low, high) {
    [this.levels, this.low, this.high] = [levels, low, high];
  }

  at(column) {
    const level = this.levels[column];
    return level === 255 ? null : this.low + ((this.high - this.low) * level) / 254;
  }
}

class Exact {
  constructor(values, low, high) {
    [this.values, this.low, this.high] = [values, low, high];
  }

  at(column) {
    return Number.isNaN(this.values[column]) ? null : this.values[column];
  }
}

// A reader of the bytes in the order in which Python wrote them.
class Reader {
  constructor(buffer, columns) {
    [this.buffer, this.place, this.columns] = [buffer, 0, columns];
  }

  floats(many) {
    const found = new Float32Array(this.buffer.slice(this.place, this.place + 4 * many));
    this.place += 4 * many;
    return found;
  }

  series(low, high) {
    const levels = new Uint8Array(this.buffer, this.place, this.columns);
    for (let i = 1; i < levels.length; i += 1) levels[i] += levels[i - 1];
    this.place += this.columns;
    return new Series(levels, low, high);
  }

  band(low, high) {
    const [least, mean, largest] = [0, 1, 2].map(() => this.series(low, high));
    return { least, mean, largest };
  }
}

function readHistory(buffer) {
  const { columns, statistics, bands, exact } = DATA.run;
  const reader = new Reader(buffer, columns);
  const ends = DATA.sites.map((site) => statistics.map(() => reader.floats(2 * site.heads.length)));
  const exactly = exact.map(() => reader.floats(columns));
  const found = { far: new Map(), bands: new Map(), layers: new Map(), at: new Map(statistics.map((name, at) => [name, at])) };
  DATA.sites.forEach((site, s) => statistics.forEach((name, q) => {
    const known = ends[s][q].filter((end) => !Number.isNaN(end));
    found.layers.set(`${s} ${name}`, reader.band(Math.min(...known), Math.max(...known)));
    BY_SITE[s].forEach((head, h) => found.far.set(`${s} ${h} ${name}`, reader.series(ends[s][q][2 * h], ends[s][q][2 * h + 1])));
  }));
  for (const [s, h, q] of bands) {
    found.bands.set(`${s} ${h} ${statistics[q]}`, reader.band(ends[s][q][2 * h], ends[s][q][2 * h + 1]));
  }
  exact.forEach(([s, h, q], at) => {
    found.far.set(`${s} ${h} ${statistics[q]}`, new Exact(exactly[at], ends[s][q][2 * h], ends[s][q][2 * h + 1]));
  });
  return found;
}

function courseOf(head, at) {
  return HISTORY && (HISTORY.far.get(`${head.site} ${head.place} ${DATA.quantities[at].key}`) ?? null);
}

function bandOf(head, at) {
  return HISTORY && (HISTORY.bands.get(`${head.site} ${head.place} ${DATA.quantities[at].key}`) ?? null);
}

function layerBand(site, at) {
  return HISTORY && (HISTORY.layers.get(`${site} ${DATA.quantities[at].key}`) ?? null);
}

// The first steps of the columns of a site: sites that were sampled elsewhere have their own.
function axisOf(site) {
  return DATA.run.axes[DATA.run.axis[site]];
}

// The columns of the slider are those of the first axis; of another axis, the last column that begins no later.
function columnOf(site, column) {
  if (DATA.run.axis[site] === 0) return column;
  const step = DATA.run.axes[0][column];
  return Math.max(0, axisOf(site).findLastIndex((first) => first <= step));
}

// What was measured there, or last before: a site of evaluation is in few of the samples.
function pastValue(head, at, column) {
  const course = courseOf(head, at);
  if (!course) return null;
  const here = columnOf(head.site, column);
  for (let back = here; back >= 0; back -= 1) {
    const value = course.at(back);
    if (value !== null) return value;
    if (layerBand(head.site, at).mean.at(back) !== null) return null; // its neighbours have a number there
  }
  return null;
}

function pastEnds(head, at) {
  const course = courseOf(head, at);
  return course && !Number.isNaN(course.low) ? [course.low, course.high] : [];
}

function lastColumn() {
  return DATA.run.axes[0].length - 1;
}

function stepNow() {
  return chosen.column === null ? DATA.run.last : DATA.run.axes[0][chosen.column];
}

// Whether an alarm stands at the moment that is shown; of a column, within the samples it stands for.
function standsNow(alarm) {
  if (!DATA.run) return true;
  if (chosen.column === null) return alarm.ended === null;
  const next = DATA.run.axes[0][chosen.column + 1] ?? Infinity;
  return alarm.since < next && (alarm.ended === null || alarm.ended > DATA.run.axes[0][chosen.column]);
}

// What is drawn, as a file that says how exact it is.
function historyCsv() {
  const { axes, axis, statistics, samples, columns } = DATA.run;
  const lines = [
    `# ${columns} columns of ${samples} samples: of each column and head the sample farthest from the head's median`,
    "# numbers are rounded to 1/254 of the head's range; attemper export has every sample exactly",
    ["step", "site", "mode", "head", ...statistics].join(","),
  ];
  const kinds = statistics.map((name) => DATA.quantities.findIndex((kind) => kind.key === name));
  for (const head of HEADS) {
    const site = DATA.sites[head.site];
    const place = [csvText(site.name), csvText(say(site.mode)), head.head];
    axes[axis[head.site]].forEach((step, column) => {
      const values = kinds.map((at) => courseOf(head, at)?.at(column) ?? "");
      if (values.some((value) => value !== "")) lines.push([step, ...place, ...values.map((value) => (value === "" ? "" : Number(value.toPrecision(5))))].join(","));
    });
  }
  return `${lines.join("\n")}\n`;
}

// As text, with a quote before what a spreadsheet would calculate.
function csvText(name) {
  const plain = /^[=+\-@\t\r]/.test(name) ? `'${name}` : name;
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}
