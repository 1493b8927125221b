// Small helpers to make elements and to write numbers. Everything is set as text, nothing as HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Term and value pairs; what is not known is left out by giving null.
export function fillList(list, pairs) {
  const known = pairs.filter(([, value]) => value !== null);
  while (list.children.length > known.length) list.lastElementChild.remove();
  known.forEach(([term, value], i) => {
    if (!list.children[i]) list.append(make("div", "", make("dt"), make("dd")));
    setText(list.children[i].children[0], term);
    setText(list.children[i].children[1], value);
  });
}

export const whole = (value) => Math.round(value).toLocaleString("en");

export const percent = (part, of) => (of > 0 ? `${((100 * part) / of).toFixed(part === of ? 0 : 1)} %` : null);

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 10000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

export function rate(bytesPerSecond) {
  if (bytesPerSecond >= 1e9) return `${(bytesPerSecond / 1e9).toFixed(2)} GB/s`;
  return `${(bytesPerSecond / 1e6).toFixed(1)} MB/s`;
}

export const rankName = (address, globalRank) => `${address} rank ${globalRank}`;
