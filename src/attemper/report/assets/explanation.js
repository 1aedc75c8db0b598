// The page of an explanation stands as it is: only its language and its colours change.

function start() {
  startLanguage(applyTheme);
  startTheme(() => {});
  applyTheme();
}
