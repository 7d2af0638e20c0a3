"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const get = id => document.getElementById(id), SVG = "http://www.w3.org/2000/svg";
const NAMES = { q: "Q", k: "K", v: "V", qkv: "Q, K, V together", js: "retrieval (JS)" };
const CELL_W = 22, CELL_H = 18, LEFT = 34, TOP = 6;
const unpacked = new Map();
let block = null, token = 0, drawn = 0;

// One text and transition: shares (C, H, T, R) in 16-bit steps, totals (C, T, R), sets (S, H, T, R) as bits.
async function open(key) {
  if (unpacked.has(key)) return unpacked.get(key);
  const { shape: [h, t, r], data: packed } = data.blocks[key];
  const bytes = Uint8Array.from(atob(packed), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const c = data.components.length, n = c * h * t * r, view = new DataView(buffer);
  const found = {
    h, t, r,
    share: (i, head, q, k) => view.getUint16(2 * (((i * h + head) * t + q) * r + k), true) / data.steps,
    total: (i, q, k) => view.getFloat32(2 * n + 4 * ((i * t + q) * r + k), true),
    inSet: (s, head, q, k) => {
      const bit = ((s * h + head) * t + q) * r + k;
      return (view.getUint8(2 * n + 4 * c * t * r + (bit >> 3)) >> (bit & 7)) & 1;
    },
  };
  unpacked.set(key, found);
  return found;
}

const blue = x => { // white to dark blue
  const stops = [[247, 251, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]];
  const at = Math.min(Math.max(x, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
  return `rgb(${stops[i].map((a, j) => Math.round(a + (at - i) * (stops[i + 1][j] - a))).join(",")})`;
};
const short = x => x === 0 ? "0" : x >= 1e-3 ? x.toPrecision(3) : x.toExponential(2);
const visible = s => s === "" ? "∅" : s.replace(/ /g, "␣").replace(/[\n\r]/g, "↵").replace(/\t/g, "⇥");

function add(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function fill(select, names, keep) {
  const old = select.value;
  select.replaceChildren(...names.map((name, i) => new Option(name, i)));
  if (keep && old !== "" && Number(old) < names.length) select.value = old;
}

function draw() {
  const svg = get("heat"), c = Number(get("component").value), k = Number(get("recipient").value);
  const set = Number(get("set").value), tokens = data.texts[get("text").value].tokens, { h, t } = block;
  const bottom = TOP + h * CELL_H;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${LEFT + t * CELL_W + 6} ${bottom + 78}`);
  svg.style.minWidth = `${Math.min(LEFT + t * CELL_W, 760)}px`;
  let top = 0, absent = false, undefined_ = 0;
  for (let q = 0; q < t; q++) for (let head = 0; head < h; head++) top = Math.max(top, block.share(c, head, q, k));
  for (let head = 0; head < h; head++)
    add(svg, "text", { x: LEFT - 6, y: TOP + head * CELL_H + 13, "text-anchor": "end" }, head);
  for (let q = 0; q < t; q++) {
    const total = block.total(c, q, k), x = LEFT + q * CELL_W;
    absent = absent || Number.isNaN(total);
    if (total === 0) undefined_++;
    for (let head = 0; head < h; head++) {
      const y = TOP + head * CELL_H;
      const colour = total > 0 ? blue(block.share(c, head, q, k) / (top || 1)) : "#d9d9d9";
      add(svg, "rect", { x, y, width: CELL_W, height: CELL_H, fill: colour, "data-q": q });
      if (set >= 0 && block.inSet(set, head, q, k))
        add(svg, "rect", { x: x + 1.5, y: y + 1.5, width: CELL_W - 3, height: CELL_H - 3, class: "set", "data-q": q });
    }
    const label = visible(tokens[q]), upright = label.length === 1 && label > "\u2e80", mid = x + CELL_W / 2;
    const place = upright ? { x: mid, y: bottom + 14, "text-anchor": "middle" }
      : { transform: `translate(${mid + 4},${bottom + 5}) rotate(-90)`, "text-anchor": "end" };
    add(svg, "text", { ...place, class: q < data.first_query ? "early" : "", "data-q": q },
      label.length > 10 ? label.slice(0, 9) + "…" : label);
  }
  const edge = LEFT + Math.min(data.first_query, t) * CELL_W;
  add(svg, "line", { x1: edge, x2: edge, y1: TOP, y2: bottom, class: "edge" });
  token = Math.min(token, t - 1);
  add(svg, "rect", { id: "chosen", y: TOP, width: CELL_W, height: h * CELL_H, class: "chosen" });
  const shown = absent ? "This recipient is linear: it has no retrieval distribution, so JS does not exist here."
    : undefined_ ? `${undefined_} of ${t} tokens: total influence exactly zero, shares undefined (grey).` : "";
  get("status").textContent = shown;
  get("scale").textContent = `Darkest: a share of ${short(top)} (largest in this view; equal shares would be ${short(1 / h)}). ` +
    `Left of the line: tokens before position ${data.first_query}, not part of the results.`;
  drawn++;
  show(token);
}

function show(q) {
  token = q;
  const c = Number(get("component").value), k = Number(get("recipient").value), { h } = block;
  const chosen = document.getElementById("chosen");
  chosen.setAttribute("x", LEFT + q * CELL_W);
  const total = block.total(c, q, k), name = data.components[c];
  get("token-title").textContent = `Token ${q}: ${visible(data.texts[get("text").value].tokens[q])}`;
  let squares = 0, largest = 0;
  const shares = Array.from({ length: h }, (_, head) => block.share(c, head, q, k));
  for (const p of shares) { squares += p * p; largest = Math.max(largest, p); }
  get("token-total").textContent = Number.isNaN(total) ? "no retrieval distribution"
    : `total ${short(total)}${name === "js" ? " nats" : ""}` +
      (total > 0 ? `, N_eff ${(1 / squares).toFixed(2)} of ${h}, N_eff/H ${(1 / squares / h).toFixed(3)}` : ", shares undefined");
  const cells = [];
  const cell = (text, kind) => {
    const node = document.createElement("span");
    node.textContent = text;
    if (kind) node.className = kind;
    cells.push(node);
  };
  for (const text of ["head", "share", "", "sets"]) cell(text, "soft");
  shares.forEach((p, head) => {
    cell(head, "head");
    const bar = document.createElement("i");
    bar.style.width = `${largest ? 100 * p / largest : 0}%`;
    cells.push(bar);
    cell(total > 0 ? `${(100 * p).toFixed(1)} %` : "–");
    cell(data.sets.filter((_, s) => block.inSet(s, head, q, k)).join(", "));
  });
  get("bars").replaceChildren(...cells);
  remember();
}

function remember() {
  const state = new URLSearchParams({ token });
  for (const id of ["text", "transition", "component", "recipient", "set"]) state.set(id, get(id).value);
  try { history.replaceState(null, "", `#${state}`); } catch { /* some browsers refuse it for local files */ }
}

async function refresh() {
  get("status").textContent = "Unpacking …";
  block = await open(`${get("text").value}/${get("transition").value}`);
  fill(get("recipient"), Array.from({ length: block.r }, (_, i) => i), true);
  draw();
}

async function start() {
  fill(get("text"), data.texts.map(text => text.id));
  fill(get("transition"), data.kinds.map((kind, i) => `${i}: ${kind}`));
  fill(get("component"), data.components.map(c => NAMES[c]));
  get("set").replaceChildren(new Option("none", -1), ...data.sets.map((s, i) => new Option(s + " half", i)));
  get("component").value = data.components.indexOf("qkv");
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const id of ["text", "transition", "component", "set"])
    if (wanted.has(id) && [...get(id).options].some(o => o.value === wanted.get(id))) get(id).value = wanted.get(id);
  const number = name => Math.max(0, Math.trunc(Number(wanted.get(name))) || 0);
  token = wanted.has("token") ? number("token") : data.first_query;
  await refresh();
  if (wanted.has("recipient") && number("recipient") < block.r) { get("recipient").value = number("recipient"); draw(); }
  for (const id of ["text", "transition"]) get(id).addEventListener("change", refresh);
  for (const id of ["component", "recipient", "set"]) get(id).addEventListener("change", draw);
  for (const event of ["pointermove", "click"]) get("heat").addEventListener(event, e => {
    const q = e.target.dataset ? e.target.dataset.q : undefined;
    if (q !== undefined && Number(q) !== token) show(Number(q));
  });
  get("heat").addEventListener("keydown", e => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (step) { e.preventDefault(); show(Math.min(Math.max(token + step, 0), block.t - 1)); }
  });
}

start().catch(error => { get("status").textContent = `This page cannot show its data: ${error.message}`; });
