// Elements of the page, and the data in it. Everything that came from a model's names is only ever set as text.

function byId(id) {
  return document.getElementById(id);
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function cut(text, longest) {
  return text.length <= longest ? text : `${text.slice(0, longest - 1)}…`;
}

const DATA = JSON.parse(byId("data").textContent);
