"use strict";
// What the explorer and the gallery draw with: maps of numbers, tables, sections.

/** Return the size of a drawing: its own on the screen, what fits on paper. */
const sized = (width, height) => ({ width, height, viewBox: `0 0 ${width} ${height}` });

/** Return the bytes that a text in base64 stands for. */
function bytes(text) {
  if (!Uint8Array.prototype.setFromBase64) return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const made = new Uint8Array((text.length / 4) * 3 - /=*$/.exec(text.slice(-2))[0].length); // of its size from the start
  made.setFromBase64(text);
  return made;
}

const packed = []; // by number, the packed data read so far: a comment, later its bytes
const SETTLED = 8; // texts decoded at a time
const awaiting = []; // to be called when more of the page was read

/** Note what was read: comments behind the program. Of a page of 74 MB a copy of all at once would double its memory. */
function take(records) {
  const read = records.flatMap(({ addedNodes }) => [...addedNodes]);
  packed.push(...read.filter(({ nodeType }) => nodeType === Node.COMMENT_NODE));
  for (const go of awaiting.splice(0)) go();
}
new MutationObserver(take).observe(document.body, { childList: true });

/** Return the bytes under a number. Their text, which is a third larger, leaves the page. */
function packedBytes(i) {
  if (packed[i] instanceof Uint8Array) return packed[i];
  const comment = packed[i];
  packed[i] = bytes(comment.data);
  comment.data = ""; // a node that is removed keeps its text for a while
  comment.remove();
  return packed[i];
}

/** Decode what is still unused once the page is read, some at a time, so that the browser can free the old texts. */
function settle(next) {
  const end = Math.min(next + SETTLED, packed.length);
  for (let i = next; i < end; i++) packedBytes(i);
  if (end < packed.length) setTimeout(settle, 50, end);
}
addEventListener("load", () => setTimeout(settle, 50, 0));

/** Return the bytes that the page has packed under a number, once that part of the page is read. */
async function unpack(i) {
  while (i >= packed.length) await new Promise((go) => awaiting.push(go));
  const given = new ReadableStream({
    start(controller) {
      controller.enqueue(packedBytes(i));
      controller.close();
    },
  });
  const unpacked = new Response(given.pipeThrough(new DecompressionStream("deflate")));
  return new Uint8Array(await unpacked.arrayBuffer());
}

const SHARES = Float64Array.from({ length: 256 }, (_, i) => (i / 255) ** 2); // weights are kept as their square roots
const SIGNED = Float64Array.from({ length: 256 }, (_, i) => (i - 128) / 127);
/** Return a weight as a short text: two digits are what its 256 steps tell. */
const number = (share) => (share ? String(Number(share.toPrecision(2))) : "0");

const LONGEST = 22; // characters of a label
/** Return as much of a token as a label has room for. */
const shortened = (token) => (token.length > LONGEST ? `${[...token].slice(0, LONGEST - 1).join("")}…` : token);
/** Return how wide the longest label of some tokens is, about, in pixels. */
const labelWidth = (tokens) => 8 + 7 * Math.max(...tokens.map((token) => shortened(token).length));

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).split(",").map(Number);
}

/** Return a mixture of two colours as a canvas stores a pixel. */
function pixel(from, to, share) {
  const [red, green, blue] = [0, 1, 2].map((c) => Math.round(from[c] + (to[c] - from[c]) * share));
  return (255 << 24) | (blue << 16) | (green << 8) | red;
}

/** Draw a table of bytes into a canvas, one pixel each; what is masked is chequered. */
function paint(canvas, { rows, columns, values, shares, mask }) {
  const [height, width] = [rows.length, columns.length];
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const pixels = new Int32Array(image.data.buffer);
  const [none, most, least, masked] = ["--low", "--high", "--negative", "--masked"].map(color);
  const colors = Int32Array.from(shares, (share) => pixel(none, share < 0 ? least : most, Math.abs(share)));
  const chequers = [0.25, 0.6].map((share) => pixel(none, masked, share));
  for (let i = 0; i < pixels.length; i++) {
    pixels[i] = mask && !mask[i] ? chequers[(Math.floor(i / width) + (i % width)) % 2] : colors[values[i]];
  }
  context.putImageData(image, 0, 0);
  canvas.className = shade(); // print inverts what was drawn for dark mode
}

const shade = () => (matchMedia("screen and (prefers-color-scheme: dark)").matches ? "dark" : "");

/** Return a table of at most `most` rows and columns: each block's largest weight, masked where the whole block is. */
function shrunk(table, most) {
  const { rows, columns, values, mask } = table;
  const step = Math.ceil(Math.max(rows.length, columns.length) / most);
  if (step === 1) return table;
  const [high, wide] = [rows, columns].map((labels) => Math.ceil(labels.length / step));
  const made = { ...table, rows: { length: high }, columns: { length: wide }, values: new Uint8Array(high * wide) };
  if (mask) made.mask = new Uint8Array(high * wide);
  for (let row = 0, i = 0; row < rows.length; row++) {
    const start = Math.floor(row / step) * wide;
    for (let column = 0; column < columns.length; column++, i++) {
      const at = start + Math.floor(column / step);
      if (values[i] > made.values[at]) made.values[at] = values[i];
      if (mask) made.mask[at] |= mask[i];
    }
  }
  return made;
}

/** Return hatching over all masked cells, in one piece for each run of them in a row. */
function hatching({ rows, columns, mask, cell }, left, top) {
  const lines = element("path", { d: "M0 6L6 0", class: "hatch" });
  const pattern = element("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" }, lines);
  const runs = rows.flatMap((_, row) => {
    const cells = [...mask.subarray(row * columns.length, (row + 1) * columns.length)].join("");
    return [...cells.matchAll(/0+/g)].map(
      ({ index, 0: { length } }) =>
        `M${left + cell * index} ${top + cell * row}h${cell * length}v${cell}h${-cell * length}z`,
    );
  });
  return [element("defs", {}, pattern), element("path", { d: runs.join(""), fill: "url(#hatch)", class: "masked" })];
}

/** Return the names of rows and columns beside a map, as many as there is room for. */
function mapLabels({ rows, columns, cell }, left, top) {
  const step = Math.max(
    Math.ceil((cell < 14 ? 28 : 14) / cell),
    Math.ceil(Math.max(rows.length, columns.length) / 600),
  );
  const shown = (tokens) => tokens.map((token, i) => [shortened(token), i]).filter(([, i]) => i % step === 0);
  const beside = shown(rows).map(([text, i]) =>
    element("text", { x: left - 5, y: top + cell * (i + 0.5) + 4, "text-anchor": "end" }, text),
  );
  const above = shown(columns).map(([text, i]) => {
    const [x, y] = [left + cell * (i + 0.5) + 4, top - 5];
    return element("text", { x, y, transform: `rotate(-90 ${x} ${y})` }, text);
  });
  return [...beside, ...above];
}

/** Draw a table of bytes with a cursor; `place` remembers where it is, and `moved` is called with its row and column. */
function heatMap(table, place, moved) {
  const { rows, columns, cell } = table;
  const [left, top] = [labelWidth(rows), labelWidth(columns)];
  const [width, height] = [left + cell * columns.length, top + cell * rows.length];
  const canvas = document.createElement("canvas");
  paint(canvas, { ...table, mask: null });
  const map = element("svg", { class: "map", ...sized(width, height), tabindex: 0, role: "application" });
  map.setAttribute("aria-label", "Heat map; the arrow keys move from number to number");
  const area = { x: left, y: top, width: width - left, height: height - top, preserveAspectRatio: "none" };
  const cursor = element("rect", { class: "cursor", width: cell, height: cell });
  const picture = element("image", {
    ...area,
    href: canvas.toDataURL(),
    class: shade(),
    style: "image-rendering: pixelated",
  });
  map.append(picture, ...(table.mask ? hatching(table, left, top) : []), ...mapLabels(table, left, top), cursor);
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

/**
 * Return a table of numbers as a map with its title, and what the cursor reads.
 *
 * `values` are bytes in base64: 128 is zero, 1 and 255 are the largest magnitude, `most`. With `masked`, zeros are hatched.
 */
function numberMap({ name, axes, rows, columns, most, values, masked }) {
  const said = element("output", { "aria-live": "polite" });
  const cell = Math.min(18, Math.max(2, Math.floor(900 / columns.length)));
  const table = { rows, columns, values: bytes(values), shares: SIGNED, cell };
  if (masked) table.mask = table.values.map((step) => Number(step !== 128));
  const tell = (row, column) => {
    const step = table.values[row * columns.length + column];
    const value = (SIGNED[step] * most).toPrecision(2).replace("-", "−");
    const shown = masked ? (step === 128 ? "masked" : "may attend") : value;
    said.textContent = `${axes[0]} ${rows[row]}, ${axes[1]} ${columns[column]}: ${shown}`;
  };
  const map = element("div", { class: "scroll" }, heatMap(table, { row: 0, column: 0 }, tell));
  return [element("h3", {}, masked ? name : `${name}: ${axes[0]}s down, ${axes[1]}s across`), said, map];
}

/** Return a table whose cells are texts or elements; a number in it stays on one line. */
function tableOf(names, rows) {
  const cellOf = (cell) => element("td", /^−?[\d.]+$/.test(cell) ? { class: "figure" } : { dir: "auto" }, cell);
  const head = names.map((name) => element("th", { scope: "col" }, name));
  const body = rows.map((cells) => element("tr", {}, ...cells.map(cellOf)));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

/** Return a box that the keyboard can scroll, for content without focusable parts. */
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
