// All heads as small maps, and the one that is chosen large, with lines between its tokens.

const SITES = DATA.stacks.flatMap((stack) => stack.sites.map((site) => ({ ...site, kind: stack.kind })));
const MAPS = SITES.flatMap((site, row) => site.heads.map(([head, role], place) => ({ site, row, head, role, place })));
for (const site of SITES) site.maps = MAPS.filter((map) => map.site === site);
const WEIGHTS = Float32Array.from({ length: 256 }, (_, level) => (level === 255 ? NaN : Number(((level / DATA.steps) ** 2).toPrecision(2))));
const COLOURS = new Uint32Array(new Uint8Array(Array.from(WEIGHTS, (weight) => [...tint(weight), 255]).flat()).buffer); // four bytes each
const [GRID, LARGE] = [byId("grid"), byId("large")];

let chosenMap = 0;
let chosenRole = null;
let sheet = null;
let lines = null;

function sizeOf(site) {
  return [site.tokens.length, (site.keys ?? site.tokens).length];
}

async function unpackSite(site) {
  const bytes = new Uint8Array(await unpack(site.packed, "deflate"));
  const [rows, columns] = sizeOf(site);
  const size = rows * columns;
  for (const map of site.maps) map.levels = bytes.subarray(map.place * size, (map.place + 1) * size);
}

function layerText(site) {
  return site.label === "–" ? site.name : text("head.layer", { label: site.label });
}

function nameOf(map) {
  return text("head.spoken", { layer: layerText(map.site), head: map.head });
}

function roleOf(map) {
  return map.role === null ? "" : text(`role.${map.role}.name`);
}

// --- small maps ---

function startGrid() {
  for (const stack of DATA.stacks) {
    if (DATA.stacks.length > 1) {
      const title = element("h3");
      title.append(element("code", stack.name), " ", element("small"));
      title.lastChild.dataset.say = JSON.stringify([`kind.${stack.kind}`, {}]);
      GRID.append(title);
    }
    for (const site of SITES.filter((one) => stack.sites.some((own) => own.name === one.name) && one.kind === stack.kind)) {
      const line = element("div", undefined, "site-row");
      const maps = element("div", undefined, "site-maps");
      maps.append(...site.maps.map(smallMap));
      [line.title, site.line, site.shownName] = [site.name, line, element("p")];
      line.append(site.shownName, maps);
      GRID.append(line);
    }
  }
  GRID.addEventListener("keydown", moveInGrid);
  MAPS[0].button.tabIndex = 0;
  new ResizeObserver(fitGrid).observe(GRID);
  for (const button of document.querySelectorAll("[data-role]")) button.addEventListener("click", () => chooseRole(button.dataset.role));
}

function smallMap(map) {
  map.button = element("button", undefined, "small-map");
  [map.button.type, map.button.tabIndex] = ["button", -1];
  [map.canvas, map.shownRole, ...map.spoken] = [element("canvas"), element("span", "", "role"), ...[0, 1].map(() => element("span", "", "unseen"))];
  map.canvas.setAttribute("aria-hidden", "true");
  map.button.append(map.canvas, map.spoken[0], element("b", `${map.head}`), map.spoken[1], " ", map.shownRole);
  map.button.addEventListener("click", () => openMap(MAPS.indexOf(map)));
  return map.button;
}

function paintSmall(map) {
  const [rows, columns] = sizeOf(map.site);
  if (!rows || !columns) return;
  [map.canvas.width, map.canvas.height] = [columns, rows];
  const pen = map.canvas.getContext("2d");
  const image = pen.createImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let at = 0; at < pixels.length; at += 1) pixels[at] = COLOURS[map.levels[at]];
  pen.putImageData(image, 0, 0);
}

// A thousand canvases take seconds: those that are in view, or near it, are painted, and on paper all.
function paintInView() {
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      seen.unobserve(entry.target);
      SITES.find((site) => site.line === entry.target).maps.forEach(paintSmall);
      entry.target.classList.add("painted");
    }
  }, { rootMargin: "400px" });
  for (const site of SITES) seen.observe(site.line);
  window.addEventListener("beforeprint", () => MAPS.forEach(paintSmall));
}

// A row of maps for a layer where there is room; on a phone they go on below.
function fitGrid() {
  const most = Math.max(...SITES.map((site) => site.heads.length));
  const phone = window.innerWidth <= 600;
  const room = Math.floor((GRID.clientWidth - (phone ? 0 : 64)) / most) - 4;
  // On a phone as many in a row as are large enough for a finger and for the name of a role.
  const least = phone ? Math.floor((GRID.clientWidth + 4) / Math.max(1, Math.floor((GRID.clientWidth + 4) / 84))) - 4 : 34;
  const cell = Math.min(Math.max(room, least), 112);
  GRID.style.setProperty("--cell", `${cell}px`);
  GRID.classList.toggle("narrow", cell < 90);
  for (const site of SITES) site.line.style.imageRendering = 1.5 * sizeOf(site)[1] <= cell ? "pixelated" : "auto";
}

function isShown(map) {
  return chosenRole === null || map.role === chosenRole;
}

// The next shown map from a place on, in a direction.
function nextMap(from, step, fits = () => true) {
  for (let at = from + step; at >= 0 && at < MAPS.length; at += step) if (isShown(MAPS[at]) && fits(MAPS[at])) return at;
  return from;
}

function moveInGrid(event) {
  const map = MAPS[chosenMap];
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const below = (other) => other.row !== map.row && other.place === map.place;
  takeFocus(nextMap(chosenMap, step, event.key.endsWith("t") ? undefined : below));
}

function takeFocus(place) {
  MAPS[chosenMap].button.tabIndex = -1;
  chosenMap = place;
  MAPS[place].button.tabIndex = 0;
  MAPS[place].button.focus();
}

function chooseRole(role) {
  chosenRole = chosenRole === role ? null : role;
  for (const map of MAPS) map.button.classList.toggle("other", !isShown(map));
  if (!isShown(MAPS[chosenMap])) {
    MAPS[chosenMap].button.tabIndex = -1;
    chosenMap = MAPS.findIndex(isShown);
    MAPS[chosenMap].button.tabIndex = 0;
  }
  sayRole();
}

function sayRole() {
  for (const button of document.querySelectorAll("[data-role]")) button.setAttribute("aria-pressed", String(button.dataset.role === chosenRole));
  byId("role-meaning").textContent = text(chosenRole === null ? "grid.roles_help" : `role.${chosenRole}.meaning`);
}

// --- the large map ---

function openMap(place) {
  chosenMap = place;
  LARGE.showModal();
  showMap();
}

async function showMap() {
  const map = MAPS[chosenMap];
  const [queries, keys] = sizeOf(map.site);
  if (!map.levels) await unpackSite(map.site);
  byId("large-title").replaceChildren(nameOf(map), " ", element("small", roleOf(map)));
  byId("large-site").textContent = map.site.padding.some(Boolean) ? text("grid.padding", { site: map.site.name }) : map.site.name;
  map.weights ??= Float32Array.from(map.levels, (level) => WEIGHTS[level] * 65535);
  if (!queries || !keys) return;
  await sheet.show({ tokens: map.site.tokens, keys: map.site.keys, weights: map.weights }, text("picture.label", { head: nameOf(map), queries, keys }));
  point(null);
}

function point(row, column = null, aloud = false) {
  const pointed = sheet.point(row, column);
  const key = row === null ? column : null;
  const said = key === null ? pointed : keyText(key);
  [...sheet.queries.children].forEach((token, query) => {
    const colour = key === null ? null : tint(sheet.weight(query, key));
    [token.style.backgroundColor, token.style.color] = colour === null ? ["", ""] : [css(colour), inkOn(colour)];
  });
  byId("large-said").textContent = said;
  lines.draw(row, key);
  if (!aloud) return;
  byId("live").textContent = said;
  sheet.queries.children[row].scrollIntoView({ block: "nearest" });
}

function keyText(column) {
  const given = sheet.shown.tokens.map((_, row) => sheet.weight(row, column));
  const place = given.reduce((best, weight, row) => (weight > given[best] ? row : best), 0);
  return text("grid.key", { key: sheet.keyTokens[column], at: column, query: sheet.shown.tokens[place], place, weight: given[place] });
}

function stepMap(step) {
  const place = nextMap(chosenMap, step);
  if (place === chosenMap) return;
  chosenMap = place;
  showMap();
}

function startLarge() {
  sheet = new Sheet("large", point);
  lines = new Lines(byId("large-lines"), sheet);
  sheet.keys.addEventListener("pointerover", (event) => {
    const column = [...sheet.keys.children].indexOf(event.target);
    if (column >= 0) point(null, column);
  });
  byId("large").addEventListener("pointerleave", () => sheet.shown && point(null));
  LARGE.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) stepMap(step);
    else if (!event.defaultPrevented && sheet.shown) sheet.press(event);
  });
  window.addEventListener("resize", () => sheet.shown && LARGE.open && point(null));
  if (!GRID) return;
  byId("previous").addEventListener("click", () => stepMap(-1));
  byId("next").addEventListener("click", () => stepMap(1));
  byId("close").addEventListener("click", () => LARGE.close());
  LARGE.addEventListener("click", (event) => event.target === LARGE && LARGE.close());
  LARGE.addEventListener("close", () => {
    for (const map of MAPS) map.button.tabIndex = -1;
    takeFocus(chosenMap);
  });
}

function redrawAll() {
  applyTheme();
  if (GRID) {
    for (const site of SITES) site.shownName.textContent = layerText(site);
    for (const map of MAPS) {
      // What stands before and behind the number of the head, which is in sight.
      text("head.spoken", { layer: layerText(map.site), head: "\0" }).split("\0").forEach((part, at) => (map.spoken[at].textContent = part));
      map.shownRole.textContent = roleOf(map);
    }
    sayRole();
  }
  if (LARGE.open && sheet.shown) showMap();
}

async function start() {
  if (GRID) startGrid();
  startLarge();
  startLanguage(redrawAll);
  startTheme(redrawAll);
  redrawAll();
  await Promise.all(SITES.map(unpackSite));
  if (GRID) paintInView();
  else if (MAPS.length) await showMap();
}
