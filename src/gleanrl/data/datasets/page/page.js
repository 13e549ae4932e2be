"use strict";
// All texts of the data enter the page as text nodes or attributes, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const LIST = DATA.episodes, STEPS = DATA.steps, COUNT = LIST.number.length, PAGE = 25;
const $ = (id) => document.getElementById(id);

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}
const thousands = (value) => value.toLocaleString("en-US");
const number = (value) => (typeof value === "number" && !Number.isInteger(value) ? +value.toPrecision(5) : value);
const plural = (count, noun) => `${thousands(count)} ${noun}${count === 1 ? "" : "s"}`;
const scroll = (name, table) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, table);
const link = (episode, step) => el("a", { href: `#e${episode}s${step}` }, `episode ${episode}, step ${step}`);
function rows(header, body) {
  const head = el("thead", {}, el("tr", {}, ...header.map((text) => el("th", { scope: "col" }, text))));
  return el("table", {}, head, el("tbody", {}, ...body.map((line) => el("tr", {}, ...line.map((cell) =>
    cell instanceof Node && cell.tagName === "TD" ? cell : el("td", {}, cell))))));
}

// ---- charts
const charts = new Set();
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
function chart(parent, label, x, lines, names, options = {}) {
  const place = parent.appendChild(el("div", { role: "img", "aria-label": label }));
  const item = { place };
  const axis = (more) => ({ stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", ...more });
  item.draw = () => {
    if (item.plot) item.plot.destroy();
    item.plot = new uPlot({
      width: Math.max(place.clientWidth, 200), height: options.height || 150,
      scales: { x: { time: false, ...(options.range ? { range: options.range } : {}) }, y: options.bars ? { range: (u, low, high) => [0, high * 1.05 || 1] } : {} },
      axes: [axis({ size: 28, space: 55, ...(options.bars ? {} : { incrs: [1, 2, 5].flatMap((one) => [...Array(10).keys()].map((k) => one * 10 ** k)).sort((a, b) => a - b) }) }), axis({ size: 52, space: 28, values: (u, ticks) => ticks.map((tick) => `${+tick.toPrecision(4)}`) })],
      legend: { show: names.length > 1, live: false },
      cursor: { y: false, drag: { x: !options.bars, y: false }, points: { show: !options.bars } },
      series: [{}, ...lines.map((_, k) => ({
        label: names[k], stroke: colour(`c${k % 8}`), width: options.bars ? 0 : 1.5, dash: k < 8 ? undefined : [5, 3],
        ...(options.bars ? { fill: colour("c0"), paths: uPlot.paths.bars({ size: [0.9, 60], align: 0 }), points: { show: false } } : { points: { show: x.length < 3 } }),
      }))],
    }, [x, ...lines], place);
    if (options.ready) options.ready(item.plot);
  };
  charts.add(item);
  return item; // drawn once the layout is complete, which tells the width
}
let width = innerWidth;
const redraw = () => charts.forEach((item) => item.draw());
dark.addEventListener("change", redraw);
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
function histogram(parent, { name, edges, counts }) {
  parent = parent.appendChild(el("div"));
  parent.append(el("h3", {}, name));
  const middles = counts.map((_, k) => (edges[k] + edges[k + 1]) / 2);
  const label = `histogram of ${name}: ${number(edges[0])} to ${number(edges.at(-1))}`;
  const half = (edges[1] - edges[0]) / 2;
  chart(parent, label, middles, [counts], [name], { bars: true, height: 170, range: () => [middles[0] - half, middles.at(-1) + half] });
}

// ---- static parts
$("facts").append(...DATA.facts.map(([name, value]) => el("li", {}, el("b", {}, typeof value === "number" ? thousands(value) : value), ` ${name}`)));
document.querySelector("h1").append(DATA.name);
$("problems").append(DATA.problems.length ? el("ul", { class: "findings" }, ...DATA.problems.map((one) =>
  el("li", { class: one.kind }, el("b", {}, `${one.kind}: ${one.rule}`), ` ${one.message}. ${plural(one.rows, "row")}, first row ${one.slot}`,
    ...(one.at ? [" (", link(...one.at), ")"] : [])))) : el("p", {}, "verify found none."));
for (const one of DATA.histograms) histogram(document.querySelector("#distributions .pair"), one);
if (DATA.statistics.length) $("distributions").append(scroll("statistics", rows(["", "min", "mean", "median", "max", "not finite"], DATA.statistics)));
else $("distributions").append(el("p", { class: "note" }, DATA.reason || "Nothing is stored."));
const largest = Math.max(...DATA.columns.map((column) => column[3]), 0);
$("columns").append(scroll("columns", rows(["key", "dtype", "shape", "MB", "min", "mean", "max", "NaN", "constant"], DATA.columns.map((line) =>
  line.map((value, k) => (k === 3 ? el("td", { class: "bar", style: `--share: ${largest ? (100 * value) / largest : 0}%` }, number(value)) : value === null ? "" : number(value)))))));
if (DATA.priorities) {
  $("priorities").hidden = false;
  const pair = document.querySelector("#priorities .pair");
  if (DATA.priorities.histogram) histogram(pair, DATA.priorities.histogram);
  pair.append(el("div", {}, el("h3", {}, "largest"), scroll("largest priorities", rows(["row", "priority", ""], DATA.priorities.largest.map(([slot, value, at]) => [slot, number(value), at ? link(...at) : ""])))));
}

// ---- list of episodes
const columns = Object.keys(LIST).filter((name) => name !== "steps" && name !== "first");
const flags = DATA.flags, view = { order: [], page: 0, by: "number", down: false, current: -1 };
const search = el("input", { type: "search", id: "filter", placeholder: "return > 100, truncated", "aria-describedby": "hint" });
const body = el("tbody"), status = el("span", { class: "note", role: "status" });
const heads = columns.map((name) => el("th", { scope: "col", "data-name": name }, el("button", { type: "button", onclick: () => sortBy(name) }, name === "number" ? "episode" : name)));
const turn = (by) => { view.page += by; fill(); };
const back = el("button", { type: "button", onclick: () => turn(-1) }, "Previous page"), ahead = el("button", { type: "button", onclick: () => turn(1) }, "Next page");
$("episodes").append(
  el("label", { for: "filter" }, "Filter"), search,
  el("p", { class: "note", id: "hint" }, `Comparisons of ${columns.filter((name) => !flags.includes(name)).map((name) => (name === "number" ? "episode" : name)).join(", ")}${flags.length ? `, and ${flags.flatMap((flag) => [flag, `!${flag}`]).join(", ")}` : ""}.`,
    COUNT < DATA.count ? ` The list has ${thousands(COUNT)} of ${plural(DATA.count, "episode")}, sampled evenly.` : ""),
  scroll("episodes", el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body)), el("div", { class: "row" }, back, ahead, status));
search.addEventListener("input", () => { view.page = 0; choose(); });

const value = (name, row) => { const found = LIST[name][row]; return typeof found === "string" ? Number(found) : found; };
function tests(text) {
  const made = [];
  for (const term of text.split(/,|\band\b/).map((part) => part.trim()).filter(Boolean)) {
    const parts = /^(.*?)\s*(<=|>=|!=|==?|<|>)\s*(\S+)$/.exec(term);
    const known = (word) => columns.find((name) => (name === "number" ? "episode" : name).toLowerCase().startsWith(word.toLowerCase()) && word);
    if (parts) {
      const name = known(parts[1]), bound = Number(parts[3]), sign = parts[2];
      if (!name || Number.isNaN(bound)) return term;
      made.push((row) => { const found = value(name, row); return { "<": found < bound, ">": found > bound, "<=": found <= bound, ">=": found >= bound, "!=": found !== bound }[sign] ?? found === bound; });
    } else {
      const name = known(term.replace(/^!\s*/, "")), wanted = term[0] === "!" ? 0 : 1;
      if (!name || !flags.includes(name)) return term;
      made.push((row) => value(name, row) === wanted);
    }
  }
  return made;
}
function choose() {
  const made = tests(search.value), wrong = typeof made === "string";
  search.setAttribute("aria-invalid", wrong);
  view.wrong = wrong ? made : null;
  const side = view.down ? -1 : 1, key = (row) => { const found = value(view.by, row); return Number.isNaN(found) ? Infinity : found; };
  view.order = [...Array(COUNT).keys()].filter((row) => wrong || made.every((test) => test(row)));
  view.order.sort((a, b) => { const left = key(a), right = key(b); return left === right ? a - b : left < right ? -side : side; });
  fill();
}
function sortBy(name) {
  view.down = view.by === name && !view.down;
  view.by = name;
  view.page = 0;
  choose();
}
function fill() {
  const pages = Math.max(Math.ceil(view.order.length / PAGE), 1), show = (name, row) => (flags.includes(name) ? (LIST[name][row] ? "yes" : "no") : number(LIST[name][row]));
  view.page = Math.min(Math.max(view.page, 0), pages - 1);
  body.replaceChildren(...view.order.slice(view.page * PAGE, (view.page + 1) * PAGE).map((row) => {
    return el("tr", { "aria-current": LIST.number[row] === view.current && "true" }, ...columns.map((name) =>
      el("td", {}, name === "number" ? el("a", { href: `#e${LIST.number[row]}` }, LIST.number[row]) : show(name, row))));
  }));
  back.disabled = !view.page;
  ahead.disabled = view.page === pages - 1;
  status.textContent = view.wrong ? `“${view.wrong}” is no comparison and no flag.` : `${plural(view.order.length, "episode")}, page ${view.page + 1} of ${pages}`;
  for (const head of heads) head.setAttribute("aria-sort", head.dataset.name !== view.by ? "none" : view.down ? "descending" : "ascending");
}

// ---- one episode
const box = $("episode"), heading = box.querySelector("h2"), detail = box.appendChild(el("div"));
let own = [];
function open(wanted, step) {
  own.forEach((item) => { item.plot.destroy(); charts.delete(item); });
  own = [];
  const row = LIST.number.indexOf(wanted);
  if (row < 0) { heading.textContent = COUNT ? `Episode ${wanted} isn't in the list` : "No episode"; detail.replaceChildren(); return; }
  view.current = wanted;
  const held = STEPS.episodes.map((one) => one.number), at = LIST.steps[row];
  const jump = (to, text) => el("button", { type: "button", disabled: to === undefined, onclick: () => { location.hash = `e${to}`; } }, text);
  heading.textContent = `Episode ${wanted}`;
  const here = held.findIndex((other) => other >= wanted);
  const moves = el("div", { class: "row" }, jump(held[(here < 0 ? held.length : here) - 1], "Previous"), jump(held.find((other) => other > wanted), "Next"),
    el("span", { class: "note" }, held.length < DATA.count ? `The page has the steps of ${thousands(held.length)} of ${plural(DATA.count, "episode")}.` : ""));
  detail.replaceChildren(moves);
  fill();
  if (at < 0) { detail.append(el("p", {}, `The page has no steps of this episode, to stay small. The nearest one is episode ${held[Math.max(here, 0)]}.`)); return; }
  const found = STEPS.episodes[at], times = found.t, length = LIST.length[row];
  let now = 0;
  for (let k = 0; k < times.length; k++) if (Math.abs(times[k] - step) < Math.abs(times[now] - step)) now = k;
  const slider = el("input", { type: "range", id: "step", min: 0, max: times.length - 1, value: now, "aria-label": "step" });
  const counter = el("output", { for: "step" });
  detail.append(el("div", { class: "row" }, slider, counter));
  if (times.length < length) detail.append(el("p", { class: "note" }, `${thousands(times.length)} of ${plural(length, "step")}, sampled evenly.`));
  const pictures = DATA.frames.filter((camera) => camera.episodes[at]).map((camera) => {
    const picture = el("img", { alt: "" }), caption = el("figcaption");
    return { camera: camera.episodes[at], name: camera.name, picture, caption, whole: el("figure", {}, picture, caption) };
  });
  if (pictures.length) detail.append(el("div", { class: "frames" }, ...pictures.map((one) => one.whole)));
  const cells = STEPS.keys.map(() => el("td"));
  detail.append(scroll("values of the step", el("table", { class: "values" }, el("tbody", {}, ...STEPS.keys.map((key, k) => el("tr", {}, el("td", {}, key.name), cells[k]))))));
  const move = () => {
    now = Number(slider.value);
    counter.textContent = `step ${times[now]} of ${length}, row ${found.slots[now]}`;
    slider.setAttribute("aria-valuetext", counter.textContent);
    STEPS.keys.forEach((key, k) => {
      cells[k].textContent = found.values[k].map((line) => (key.text ? STEPS.texts[line[now]] : number(line[now]))).join(", ") + (key.more ? `, … (${key.more} more)` : "");
    });
    for (const { camera, name, picture, caption } of pictures) {
      let last = 0;
      camera.at.forEach((position, k) => { if (position <= now) last = k; });
      picture.src = camera.source[last];
      picture.alt = `${name} at step ${times[camera.at[last]]}`;
      caption.textContent = `${picture.alt}${camera.at.length < times.length ? ` (${camera.at.length} frames, sampled evenly)` : ""}`;
    }
    own.forEach((item) => mark(item.plot));
  };
  const mark = (plot) => plot.setCursor({ left: plot.valToPos(times[now], "x"), top: 10 }, false);
  STEPS.keys.forEach((key, k) => {
    if (key.text || key.flag) return;
    detail.append(el("h3", {}, key.name + (key.more ? `, the first ${found.values[k].length} values` : "")));
    const lines = found.values[k].map((line) => line.map((one) => (typeof one === "number" ? one : null)));
    const item = chart(detail, `${key.name} by step`, times, lines, lines.map((_, n) => String(n)), { ready: mark });
    item.place.addEventListener("click", () => { if (item.plot.cursor.idx != null) { slider.value = item.plot.cursor.idx; move(); } });
    own.push(item);
  });
  own.forEach((item) => item.draw());
  slider.addEventListener("input", move);
  move();
}
function follow() {
  const parts = /^#e(\d+)(?:s(\d+))?$/.exec(location.hash);
  open(parts ? Number(parts[1]) : STEPS.episodes.length ? STEPS.episodes[0].number : LIST.number[0], parts && parts[2] ? Number(parts[2]) : 0);
  if (parts) { box.focus({ preventScroll: true }); if (parts[2] || innerWidth < 1000) box.scrollIntoView(); }
}
addEventListener("hashchange", follow);
addEventListener("click", (event) => { const target = event.target.closest("a[href^='#e']"); if (target && target.hash === location.hash) follow(); });
choose();
redraw();
follow();
document.body.dataset.ready = "yes";
