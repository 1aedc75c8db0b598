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

// Bytes that lie deflated in the page as base64.
async function unpack(base64, format) {
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream(format))).arrayBuffer();
}

const DATA = JSON.parse(byId("data").textContent);
