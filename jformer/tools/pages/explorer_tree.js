"use strict";
// Draws a beam search as a tree: time goes to the right, and a hypothesis stays on its line while it goes on alone.

const ROW = 24; // pixels from line to line
const GAP = 16; // between the steps
const nats = (thousandths) => (thousandths / 1000).toFixed(3).replace("-", "−");

/** Return the nodes of a search, each with its children, best first, those that were dropped only if asked for. */
function treeNodes(tree, withDropped) {
  const states = Object.keys(data.states);
  const nodes = tree.parent.map((parent, i) => ({
    parent,
    i,
    token: tree.tokens[tree.token[i]],
    logProb: tree.logProb[i],
    score: tree.score[i],
    state: states[tree.state[i]],
    rank: tree.rank[i],
    children: [],
    best: tree.rank[i] || Infinity,
    sum: 0,
  }));
  for (const node of nodes.slice(1)) {
    [node.up, node.depth] = [nodes[node.parent], (nodes[node.parent].depth || 0) + 1];
    node.sum = ["ended", "cut"].includes(node.state) ? node.up.sum + node.logProb : node.score; // which is penalised there
  }
  for (const node of nodes.slice(1).reverse()) node.up.best = Math.min(node.up.best, node.best);
  const shown = nodes.filter(({ state }) => withDropped || state !== "dropped");
  for (const node of shown.slice(1)) node.up.children.push(node);
  for (const { children } of shown) children.sort((a, b) => a.best - b.best || b.sum - a.sum);
  return shown;
}

/** Give every node its place, and return the size of the whole. */
function layOut(nodes) {
  const widths = [];
  for (const node of nodes) {
    node.label = node.depth ? node.token + ({ left: " …", cut: " ✂" }[node.state] || "") : "";
    if (node.state === "ended") node.label += ` ${nats(node.score)}`;
    if (node.rank) node.label = `${node.rank}: ${node.label}`;
    node.width = node.depth ? 14 + 7 * Math.min(24, [...node.label].length) : 10;
    widths[node.depth || 0] = Math.max(widths[node.depth || 0] || 0, node.width);
  }
  const starts = widths.map((_, depth) => 4 + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  let rows = 0;
  const waiting = [nodes[0]]; // by hand, as a search may have more steps than functions may call each other
  while (waiting.length) {
    const node = waiting.pop();
    [node.x, node.row] = [starts[node.depth || 0], node.up && node.up.children[0] === node ? node.up.row : rows++];
    waiting.push(...node.children.slice().reverse());
  }
  return [starts.at(-1) + widths.at(-1) + 4, rows * ROW + 8];
}

function drawNode(node) {
  const [y, middle] = [node.row * ROW + 6, node.row * ROW + 15];
  const kind = `node ${node.state}${node.best === 1 ? " answer" : ""}`;
  const group = element("g", { class: kind }, element("title", {}, node.depth ? describeNode(node) : "the beginning"));
  if (node.up) {
    const from = node.up.x + node.up.width;
    const bend = node.x - GAP / 2;
    const path = `M${from} ${node.up.row * ROW + 15}H${bend}V${middle}H${node.x}`;
    group.append(element("path", { class: "branch", d: path }));
  }
  group.append(element("rect", { class: "box", x: node.x, y, width: node.width, height: 19, rx: 5 }));
  if (!node.depth) return group;
  const probable = Math.exp(node.logProb / 1000) * (node.width - 8);
  group.append(
    element("rect", { class: "share", x: node.x + 4, y: y + 15, width: Math.min(probable, node.width - 8), height: 2 }),
  );
  group.append(element("text", { x: node.x + 7, y: y + 12 }, [...node.label].slice(0, 24).join("")));
  return group;
}

function describeNode(node) {
  const place = { 0: "", 1: ", the answer" }[node.rank] ?? `, output ${node.rank}`;
  const score = ["ended", "cut"].includes(node.state) ? `, score ${nats(node.score)}` : "";
  const path = node.best === 1 && node.rank !== 1 ? "; on the way to the answer" : "";
  const probability = Math.exp(node.logProb / 1000).toFixed(3);
  const numbers = `probability ${probability} (${nats(node.logProb)} nats), sum ${nats(node.sum)}${score}`;
  return `step ${node.depth}, ${node.token}: ${numbers}; ${data.states[node.state]}${place}${path}`;
}

/** Return the drawing of a search; `say` hears about the node that the arrow keys or the pointer chose. */
function drawTree(nodes, say) {
  const [width, height] = layOut(nodes);
  const drawing = element("svg", { class: "map tree", ...sized(width, height), tabindex: 0, role: "application" });
  drawing.setAttribute(
    "aria-label",
    "Tree of the search: left and right go along a hypothesis, up and down between those of a step",
  );
  const choose = (node) => {
    if (!node || !node.depth) return;
    for (const other of drawing.querySelectorAll(".chosen")) other.classList.remove("chosen");
    node.drawn.classList.add("chosen");
    drawing.chosen = node;
    say(describeNode(node));
  };
  const beside = (node, by) => {
    const step = nodes.filter(({ depth }) => depth === node.depth).sort((a, b) => a.row - b.row);
    return step[step.indexOf(node) + by];
  };
  for (const node of nodes) {
    node.drawn = drawNode(node);
    node.drawn.addEventListener("pointerenter", () => choose(node));
    drawing.append(node.drawn);
  }
  drawing.addEventListener("keydown", (event) => {
    const at = drawing.chosen;
    const to = {
      ArrowLeft: () => at.up,
      ArrowRight: () => at.children[0],
      ArrowUp: () => beside(at, -1),
      ArrowDown: () => beside(at, 1),
    };
    if (!to[event.key]) return;
    event.preventDefault();
    choose(to[event.key]());
    drawing.chosen.drawn.querySelector(".box").scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  choose(nodes[0].children[0]);
  return drawing;
}

/** Return the tokens from the first one to a node's. */
function tokensTo(node) {
  const tokens = [];
  for (let at = node; at.up; at = at.up) tokens.unshift(at.token);
  return tokens.join(" ");
}

function hypotheses(nodes) {
  const over = nodes.filter(({ state }) => ["ended", "cut", "left"].includes(state));
  const place = ({ rank }) => rank || Infinity; // two without a rank differ by NaN, which counts as no difference
  over.sort((a, b) => place(a) - place(b) || (a.state === "left") - (b.state === "left") || b.score - a.score);
  const score = (node) => (node.state === "left" ? "" : nats(node.score));
  const rows = over.map((node) => [
    String(node.rank || ""),
    tokensTo(node),
    nats(node.sum),
    score(node),
    data.states[node.state],
  ]);
  return tableOf(["rank", "tokens", "log-probability", "score", "what became of it"], rows);
}

/** Return what the section of searches shows: a tree and a table for each piece of the example. */
function searches(trees) {
  return trees.flatMap((tree, piece) => {
    const [said, scroll] = [element("output", { "aria-live": "polite" }), element("div", { class: "scroll" })];
    const box = element("input", { type: "checkbox", id: `dropped${piece}` });
    const show = () =>
      scroll.replaceChildren(
        drawTree(treeNodes(tree, box.checked), (text) => {
          said.textContent = text;
        }),
      );
    box.addEventListener("change", show);
    const label = ` show what was dropped: of ${tree.dropped} candidates the best of each step`;
    const control = element("p", {}, box, element("label", { for: box.id }, label));
    show();
    const name = trees.length > 1 ? [element("h3", {}, `Piece ${piece + 1} of ${trees.length}`)] : [];
    const table = scrolled(`hypotheses${piece}`, hypotheses(treeNodes(tree, false)));
    return [...name, control, said, scroll, element("h3", {}, "Hypotheses"), table];
  });
}
