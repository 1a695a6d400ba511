"use strict";
// What all pages are made of.

const OF_SVG = new Set(["svg", "text", "line", "rect", "image", "g", "path", "circle", "title", "defs", "pattern"]);

/** Return an element of HTML or SVG. Texts among its children are set as text, never as HTML. */
function element(name, attributes = {}, ...children) {
  const made = OF_SVG.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
