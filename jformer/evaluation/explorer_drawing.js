"use strict";
// What the parts of the explorer draw with: elements, maps of numbers, sections. Texts are set as text, never as HTML.

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "text", "line", "rect", "image", "g", "path", "circle", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Return the bytes that a text in base64 stands for. */
const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

/** Return how wide the longest of some tokens is, about, in pixels. */
const labelWidth = (tokens) => Math.min(160, 8 + 7 * Math.max(...tokens.map((token) => token.length)));

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number);
}

/** Draw bytes into a canvas, one pixel each: 0 is nothing and 255 is all or, if signed, 128 is nothing. */
function paint(canvas, { rows, columns, values, signed }) {
  [canvas.width, canvas.height] = [columns.length, rows.length];
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(canvas.width, canvas.height);
  const [none, most, least] = ["--low", "--high", "--negative"].map(color);
  values.forEach((value, i) => {
    const share = signed ? (value - 128) / 127 : value / 255;
    const end = share < 0 ? least : most;
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = none[c] + (end[c] - none[c]) * Math.abs(share);
    pixels.data[4 * i + 3] = 255;
  });
  context.putImageData(pixels, 0, 0);
}

/** Return the names of rows and columns beside a map, as many as there is room for. */
function mapLabels({ rows, columns, cell }, left, top) {
  const step = Math.max(Math.ceil((cell < 14 ? 28 : 14) / cell), Math.ceil(Math.max(rows.length, columns.length) / 600));
  const shown = (labels) => labels.map((label, i) => [label, i]).filter(([, i]) => i % step === 0);
  const beside = shown(rows).map(([label, i]) =>
    element("text", { x: left - 5, y: top + cell * (i + 0.5) + 4, "text-anchor": "end" }, label),
  );
  const above = shown(columns).map(([label, i]) => {
    const [x, y] = [left + cell * (i + 0.5) + 4, top - 5];
    return element("text", { x, y, transform: `rotate(-90 ${x} ${y})` }, label);
  });
  return [...beside, ...above];
}

/** Draw a table of bytes with a cursor; `place` remembers where it is, and `moved` is called with its row and column. */
function heatMap(table, place, moved) {
  const { rows, columns, cell } = table;
  const [left, top] = [labelWidth(rows), labelWidth(columns)];
  const [width, height] = [left + cell * columns.length, top + cell * rows.length];
  const canvas = document.createElement("canvas");
  paint(canvas, table);
  const map = element("svg", { class: "map", width, height, tabindex: 0, role: "application" });
  map.setAttribute("aria-label", "Heat map; the arrow keys move from number to number");
  const area = { x: left, y: top, width: width - left, height: height - top, preserveAspectRatio: "none" };
  const cursor = element("rect", { class: "cursor", width: cell, height: cell });
  const picture = element("image", { ...area, href: canvas.toDataURL(), style: "image-rendering: pixelated" });
  map.append(picture, ...mapLabels(table, left, top), cursor);
  const move = (row, column) => {
    place.row = Math.max(0, Math.min(rows.length - 1, row));
    place.column = Math.max(0, Math.min(columns.length - 1, column));
    cursor.setAttribute("x", left + cell * place.column);
    cursor.setAttribute("y", top + cell * place.row);
    moved(place.row, place.column);
  };
  map.addEventListener("pointermove", (event) => {
    const box = map.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - left, event.clientY - box.top - top];
    if (x >= 0 && y >= 0) move(Math.floor(y / cell), Math.floor(x / cell));
  });
  map.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!steps) return;
    event.preventDefault();
    move(place.row + steps[0], place.column + steps[1]);
  });
  move(place.row, place.column);
  return map;
}

/** Return a table whose cells are texts or elements; a number in it stays on one line. */
function tableOf(names, rows) {
  const cellOf = (cell) => element("td", /^−?[\d.]+$/.test(cell) ? { class: "figure" } : {}, cell);
  const head = names.map((name) => element("th", { scope: "col" }, name));
  const body = rows.map((cells) => element("tr", {}, ...cells.map(cellOf)));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

/** Return a box that the keyboard scrolls: for what has no part that it reaches. */
function scrolled(id, ...children) {
  return element("div", { id, class: "scroll", tabindex: 0 }, ...children);
}

/** Return a section that is drawn when it is opened, by a name in the address or by hand. */
function section(id, title, draw) {
  const body = element("div");
  const details = element("details", { id }, element("summary", {}, title), body);
  details.refresh = () => body.replaceChildren(...(details.open ? draw() : []));
  details.addEventListener("toggle", details.refresh);
  return details;
}
