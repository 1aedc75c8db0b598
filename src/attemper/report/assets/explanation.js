// The page of an explanation stands as it is: only its language and its colours change, and where its table is scrolled to.

function start() {
  startLanguage(applyTheme);
  startTheme(() => {});
  applyTheme();
  // The framed cell of a wide or long table is in view from the start.
  const first = document.querySelector("td.first");
  const box = first?.closest(".wide");
  // Its column stands beside the first one, which stays: no heading is cut at the left.
  box?.scrollTo(first.offsetLeft - first.parentElement.firstElementChild.offsetWidth, first.offsetTop + first.offsetHeight - box.clientHeight);
}
