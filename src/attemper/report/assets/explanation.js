// The page of an explanation stands as it is: only its language and its colours change, and where its table is scrolled to.

function start() {
  startLanguage(applyTheme);
  startTheme(() => {});
  applyTheme();
  // The framed cell of a wide or long table is in view from the start.
  const first = document.querySelector("td.first");
  const box = first?.closest(".wide");
  box?.scrollTo(first.offsetLeft + first.offsetWidth - box.clientWidth, first.offsetTop + first.offsetHeight - box.clientHeight);
}
