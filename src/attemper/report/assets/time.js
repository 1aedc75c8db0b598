// The step that is shown: a slider with the alarms of the run on it, and a button that plays.

const PLAY_MS = 80; // from one column to the next
let playing = null;

function showMoment(column) {
  chosen.column = column >= lastColumn() ? null : column;
  byId("moment").value = column;
  showStep();
  if (chosen.stretch) drawLegend();
  for (const map of maps) paintMap(map);
  fillPanel();
  drawLoss();
  drawPointer();
}

// Who wants no motion is shown a tenth of the run further at each press.
function playText() {
  if (calm()) return text("time.next");
  return text(playing === null ? "time.play" : "time.pause");
}

function showStep() {
  const isFirst = DATA.opens && chosen.column === nearestColumn(DATA.run.axis.indexOf(0), DATA.opens.step);
  const said = text(chosen.column === null ? "time.last" : isFirst ? "time.first" : "time.step", { step: stepNow() });
  byId("step").textContent = said;
  byId("moment").setAttribute("aria-valuetext", said);
  byId("play").textContent = playText();
}

function goTo(step) {
  if (Number.isFinite(step)) showMoment(nearestColumn(DATA.run.axis.indexOf(0), step));
}

function stop() {
  clearInterval(playing);
  playing = null;
  showStep();
}

function play() {
  if (playing !== null) return stop();
  if (calm()) return showMoment(chosen.column === null ? 0 : Math.min(lastColumn(), chosen.column + Math.max(1, Math.round(lastColumn() / 10))));
  let column = chosen.column ?? 0;
  playing = setInterval(() => {
    showMoment(column);
    if (column >= lastColumn()) stop();
    column += Math.max(1, Math.round(lastColumn() / 150));
  }, PLAY_MS);
  return showStep();
}

// Marks over the slider: where alarms begin, where the run was resumed. The slider's thumb is 16 wide.
function drawMarks() {
  const canvas = byId("marks");
  const ratio = window.devicePixelRatio || 1;
  const wide = canvas.clientWidth;
  [canvas.width, canvas.height] = [wide * ratio, canvas.clientHeight * ratio];
  const drawn = canvas.getContext("2d");
  drawn.scale(ratio, ratio);
  const steps = DATA.run.axes[0];
  const at = (step) => 8 + (nearestColumn(DATA.run.axis.indexOf(0), step) / Math.max(1, steps.length - 1)) * (wide - 16);
  for (const level of ["notice", "warning", "critical"]) {
    drawn.fillStyle = theme(LEVEL_COLOURS[level]);
    const tall = level === "notice" ? 6 : 11;
    for (const alarm of DATA.alarms) if (alarm.level === level) drawn.fillRect(at(alarm.since) - 1, 12 - tall, 2, tall);
  }
  drawn.strokeStyle = theme("--mark");
  drawn.setLineDash([2, 2]);
  for (const step of DATA.run.resumed) {
    drawn.beginPath();
    drawn.moveTo(at(step), 0);
    drawn.lineTo(at(step), 12);
    drawn.stroke();
  }
}

function drawTime() {
  if (!HISTORY) return;
  showStep();
  drawMarks();
  drawLoss();
  drawMultiples();
}

async function startTime() {
  if (!DATA.run.packed || !window.DecompressionStream) {
    byId("time").hidden = true;
    return;
  }
  HISTORY = readHistory(await unpack(DATA.run.packed, "deflate"));
  const slider = byId("moment");
  slider.max = lastColumn();
  slider.value = lastColumn();
  slider.disabled = byId("play").disabled = false;
  slider.addEventListener("input", () => {
    if (playing !== null) stop();
    showMoment(Number(slider.value));
  });
  byId("play").addEventListener("click", play);
  byId("step").removeAttribute("data-say");
  byId("play").removeAttribute("data-say");
  startMultiples();
  drawLegend();
  drawTime();
  fillPanel();
  if (DATA.opens) goTo(DATA.opens.step);
  if (quantity().low === null || quantity().high === null) drawMaps(); // the history has other ends
  document.documentElement.dataset.ready = "true";
}
