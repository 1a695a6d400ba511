"use strict";
// Draws what a row of weights takes from the patches of an image: the image in grey, and colour where the weights are.

const PICTURE = 240; // pixels of a side, of the large one

/** Return a canvas with an image's own pixels. */
function pixelsOf({ width, height, values }) {
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  const channels = values.length / (width * height);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = values[channels * i + (channels < 3 ? 0 : c)];
    pixels.data[4 * i + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Return the weights of a row by patch, without what precedes the patches, such as a class token. */
function patchShares({ columns, values, shares, side }, row) {
  const first = columns.length - side * side;
  return Array.from({ length: side * side }, (_, i) => shares[values[row * columns.length + first + i]]);
}

/** Return a picture of what a row takes: the larger a patch's weight, the more colour; the largest has full colour. */
function drawPatches(image, table, row, size) {
  const shares = patchShares(table, row);
  const most = Math.max(...shares) || 1;
  const canvas = element("canvas", { width: size, height: size, role: "img" });
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.filter = "grayscale(1) contrast(.7)";
  context.drawImage(image, 0, 0, size, size);
  context.filter = "none";
  const cell = size / table.side;
  shares.forEach((share, i) => {
    context.fillStyle = `rgba(230, 97, 1, ${(0.85 * share) / most})`;
    context.fillRect((i % table.side) * cell, Math.floor(i / table.side) * cell, cell, cell);
  });
  outlineRow(context, table, row, cell);
  canvas.setAttribute("aria-label", tellPatches(table, shares, row));
  return canvas;
}

/** Draw a frame around the patch that a row is itself. */
function outlineRow(context, { side, firstPatch }, row, cell) {
  const own = row - firstPatch;
  if (own < 0) return;
  for (const [color, width] of [
    ["#000", 4],
    ["#fff", 2],
  ]) {
    Object.assign(context, { strokeStyle: color, lineWidth: width });
    context.strokeRect((own % side) * cell, Math.floor(own / side) * cell, cell, cell);
  }
}

function tellPatches({ rows, columns, side }, shares, row) {
  const first = columns.length - side * side;
  const best = shares
    .map((share, i) => [share, i])
    .sort(([a], [b]) => b - a)
    .slice(0, 3);
  const told = best.map(([share, i]) => `${columns[first + i]} (${number(share)})`).join(", ");
  return `${rows[row]} takes most from the patches ${told}, by row and column`;
}

/** Return the image, and beside it what a row takes of it; below, the same for each row that is no patch itself. */
function pictures(image, table, row, choose) {
  const plain = element("canvas", { width: PICTURE, height: PICTURE, role: "img", "aria-label": "The image" });
  const context = plain.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(image, 0, 0, PICTURE, PICTURE);
  const large = drawPatches(image, table, row, PICTURE);
  const caption = element("figcaption", {}, large.getAttribute("aria-label"));
  const both = element("figure", { class: "picture" }, plain, large, caption);
  const named = table.rows.slice(0, table.firstPatch).map((name, i) => [name, i]);
  const strip = element("div", { class: "strip" });
  for (const [name, i] of named) {
    const drawn = drawPatches(image, table, i, 84);
    const label = `${name}: ${drawn.getAttribute("aria-label")}`;
    drawn.setAttribute("role", "presentation");
    drawn.removeAttribute("aria-label");
    const button = element("button", { class: "head", type: "button", "aria-pressed": i === row, "aria-label": label });
    button.append(drawn, element("span", { "aria-hidden": "true" }, name));
    button.addEventListener("click", () => choose(i));
    strip.append(button);
  }
  return named.length > 1 ? [both, strip] : [both];
}
