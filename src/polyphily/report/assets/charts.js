"use strict";
// Draws the figures of a page from the numbers embedded in it. A figure has choices and a panel for
// every combination of their options. A type of chart is a function (panel, width, colours) -> svg.

const figures = JSON.parse(document.getElementById("figures").textContent);
const SEPARATOR = "|", FONT = 12, COLOURS = 8, PRINT_WIDTH = 660;
const SVG = "http://www.w3.org/2000/svg";

// Helpers ----------------------------------------------------------------------------------------

function node(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function html(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const measuring = document.createElement("canvas").getContext("2d");
function widthOf(text, size = FONT, weight = 400) {
  measuring.font = `${weight} ${size}px ${getComputedStyle(document.body).fontFamily}`;
  return measuring.measureText(text).width;
}

// Cut out the middle of a long name, since names tend to differ at their ends.
function shorten(text, room) {
  if (widthOf(text) <= room) return text;
  for (let kept = text.length - 2; kept > 1; kept--) {
    const head = Math.ceil(kept / 2), made = `${text.slice(0, head)}…${text.slice(text.length - kept + head)}`;
    if (widthOf(made) <= room) return made;
  }
  return "…";
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const series = Array.from({ length: COLOURS }, (_, i) => read(`c${i}`));
  const stops = [0, 1, 2, 3].map((i) => rgb(read(`r${i}`)));
  return {
    ink: read("ink"), soft: read("soft"), grid: read("grid"), rule: read("rule"),
    card: read("card"), faint: read("faint"),
    line: (slot) => series[slot % COLOURS],
    dash: (slot) => [null, "6 3", "2 3", "8 3 2 3"][Math.floor(slot / COLOURS) % 4],
    // If there are more classes than colours, colours repeat, paler each time.
    fill: (slot) => blend(rgb(series[slot % COLOURS]), rgb(read("card")),
      [0, 0.4, 0.65, 0.8][Math.min(Math.floor(slot / COLOURS), 3)]),
    ramp: (share) => {
      const at = Math.min(Math.max(share, 0), 1) * 3, i = Math.min(Math.floor(at), 2);
      return blend(stops[i], stops[i + 1], at - i);
    },
  };
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const blend = (a, b, t) =>
  "#" + a.map((v, i) => Math.round(v + (b[i] - v) * t).toString(16).padStart(2, "0")).join("");
function isDark(hex) {
  const [r, g, b] = rgb(hex).map((v) => (v / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.2;
}

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const wanted = Math.max(count, 3), power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power)
    .reduce((best, s) => (Math.abs(span / s - wanted) < Math.abs(span / best - wanted) ? s : best));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

function show(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Math.abs(value) >= 1e5
    ? Math.round(value).toLocaleString("en-US")
    : Number(value.toPrecision(digits)).toString();
}

function bytes(count) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000 || unit === "GB") return `${count < 10 && count % 1 ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1000;
  }
}

const scale = (a, b, from, to) => (value) => from + ((value - a) / (b - a || 1)) * (to - from);

function text(x, y, words, colour, more = {}) {
  return node("text", { x, y, fill: colour, "font-size": FONT, ...more }, words);
}

function canvas(width, height) {
  return node("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
}

// Draw a legend above a chart and return its height.
function legend(svg, series, width, colours, mark = "dot") {
  if (series.length < 2) return 0;
  let x = 0, y = 10;
  for (const { name, slot } of series) {
    const words = shorten(name, width - 24), step = widthOf(words) + 34;
    if (x + step - 16 > width && x > 0) { x = 0; y += 19; }
    const g = node("g", {});
    if (mark === "line") {
      g.append(node("line", { x1: x, x2: x + 14, y1: y, y2: y, stroke: colours.line(slot), "stroke-width": 2.5, "stroke-dasharray": colours.dash(slot) }));
    } else {
      g.append(node("rect", { x: x + 2, y: y - 5, width: 10, height: 10, rx: mark === "dot" ? 5 : 2, fill: mark === "dot" ? colours.line(slot) : colours.fill(slot) }));
    }
    g.append(text(x + 18, y + 4, words, colours.ink));
    svg.append(g);
    x += step;
  }
  return y + 16;
}

function frame(svg, box, x, y, panel, colours) {
  for (const tick of y.ticks) {
    const at = y.to(tick);
    svg.append(node("line", { x1: box.left, x2: box.right, y1: at, y2: at, stroke: colours.grid }));
    svg.append(text(box.left - 8, at + 4, show(tick, 12), colours.soft, { "text-anchor": "end" }));
  }
  for (const tick of x.ticks) {
    const at = x.to(tick);
    svg.append(node("line", { x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4, stroke: colours.faint }));
    svg.append(text(at, box.bottom + 18, show(tick, 12), colours.soft, { "text-anchor": "middle" }));
  }
  svg.append(node("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: colours.faint }));
  svg.append(text(box.right, box.bottom + 36, panel.x, colours.soft, { "text-anchor": "end" }));
  svg.append(text(box.left, box.top - 10, panel.y, colours.soft));
}

function range(values, pad = 0.04) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!(low <= high)) return [0, 1];
  const more = (high - low || Math.abs(high) || 1) * pad;
  return [low - more, high + more];
}

// Move labels apart vertically, as little as needed to keep them `gap` pixels apart.
function spreadLabels(places, gap, low, high) {
  const order = places.map((_, i) => i).sort((a, b) => places[a] - places[b]);
  const found = [...places];
  let last = -Infinity;
  for (const i of order) { found[i] = Math.max(found[i], last + gap); last = found[i]; }
  let next = high + gap;
  for (const i of order.reverse()) { found[i] = Math.min(found[i], next - gap); next = found[i]; }
  return found.map((v) => Math.max(v, low));
}

// Charts -----------------------------------------------------------------------------------------

function lines(panel, width, colours, tip) {
  const { series } = panel;
  const narrow = width < 620 || series.length > 14;
  const height = Math.round(Math.min(Math.max(width * 0.46, 280), 430));
  const svg = canvas(width, height);
  const above = narrow ? legend(svg, series, width, colours, "line") : 0;
  const names = series.map((s) => shorten(s.name, 190));
  const room = narrow ? 12 : Math.max(...names.map((n) => widthOf(n, FONT, 600))) + 18;
  const { baseline, light = [] } = panel;
  const all = series.flatMap((s) => [...(s.lo || s.y), ...(s.hi || s.y)]).concat(light.flatMap((s) => s.y));
  if (baseline) all.push(baseline.y);
  const [low, high] = range(all), most = range(series.concat(light).flatMap((s) => s.x), 0)[1];
  const box = { left: 44, right: width - room, top: above + 26, bottom: height - 44 };
  const least = panel.x === "rounds" ? Math.min(...series.map((s) => s.x[0])) : 0;
  const x = { to: scale(least, most, box.left, box.right), ticks: ticks(least, most, (box.right - box.left) / 90).filter((t) => panel.x !== "rounds" || Number.isInteger(t)) };
  const y = { to: scale(low, high, box.bottom, box.top), ticks: ticks(low, high, (box.bottom - box.top) / 50) };
  frame(svg, box, x, y, panel, colours);
  const drawPale = (xs, ys, more) => svg.append(node("path", { d: `M${xs.map((v, k) => `${x.to(v).toFixed(1)},${y.to(ys[k]).toFixed(1)}`).join("L")}`, fill: "none", stroke: colours.soft, "stroke-width": 1, ...more }));
  for (const s of light) drawPale(s.x, s.y, { opacity: 0.3 });
  if (panel.diagonal) {
    const a = Math.max(least, low), b = Math.min(most, high);
    if (a < b) drawPale([a, b], [a, b], { "stroke-dasharray": "1 4" });
  }
  if (baseline) {
    drawPale([least, most], [baseline.y, baseline.y], { "stroke-dasharray": "1 4" });
    const at = y.to(baseline.y);
    svg.append(text(box.left + 4, at - 5 < box.top + 8 ? at + 14 : at - 5, `${baseline.name} ${show(baseline.y)}`, colours.soft));
  }
  const ends = spreadLabels(series.map((s) => y.to(s.y.at(-1)) + 4), 15, box.top, box.bottom);
  series.forEach((s, i) => {
    const path = (ys) => s.x.map((v, k) => `${x.to(v).toFixed(1)},${y.to(ys[k]).toFixed(1)}`);
    if (s.lo) {
      svg.append(node("path", { d: `M${path(s.hi).join("L")}L${path(s.lo).reverse().join("L")}Z`, fill: colours.line(s.slot), opacity: 0.14, class: "band" }));
    }
    svg.append(node("path", { d: `M${path(s.y).join("L")}`, fill: "none", stroke: colours.line(s.slot), "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": colours.dash(s.slot), class: "mark" }));
    if (s.x.length === 1) svg.append(node("circle", { cx: x.to(s.x[0]), cy: y.to(s.y[0]), r: 3.5, fill: colours.line(s.slot) }));
    if (!narrow) {
      const at = x.to(s.x.at(-1));
      if (Math.abs(at - box.right) > 2 || Math.abs(ends[i] - 4 - y.to(s.y.at(-1))) > 6) {
        svg.append(node("path", { d: `M${at + 2},${y.to(s.y.at(-1))}L${box.right + 5},${ends[i] - 4}`, stroke: colours.line(s.slot), "stroke-width": 0.7, opacity: 0.6, fill: "none" }));
      }
      svg.append(text(box.right + 8, ends[i], names[i], colours.line(s.slot), { "font-weight": 600 }));
    }
  });
  const cross = node("line", { y1: box.top, y2: box.bottom, stroke: colours.faint, "stroke-dasharray": "2 3", visibility: "hidden" });
  const over = node("rect", { x: box.left, y: box.top, width: Math.max(box.right - box.left, 1), height: box.bottom - box.top, fill: "transparent" });
  over.addEventListener("pointermove", (event) => {
    const px = (event.offsetX * width) / svg.clientWidth;
    const value = least + ((px - box.left) / (box.right - box.left)) * (most - least);
    const near = series.map((s) => {
      let best = 0;
      s.x.forEach((v, k) => { if (Math.abs(v - value) < Math.abs(s.x[best] - value)) best = k; });
      return { s, k: best };
    });
    cross.setAttribute("x1", px); cross.setAttribute("x2", px); cross.setAttribute("visibility", "visible");
    near.sort((a, b) => b.s.y[b.k] - a.s.y[a.k]);
    tip.show(px, (event.offsetY * width) / svg.clientWidth, `${panel.x} ${show(value)}`,
      near.slice(0, 12).map(({ s, k }) => [colours.line(s.slot), `${s.name}  ${show(s.y[k])}${s.hi ? ` ± ${show(s.hi[k] - s.y[k], 2)}` : ""}`]));
  });
  over.addEventListener("pointerleave", () => { tip.hide(); cross.setAttribute("visibility", "hidden"); });
  svg.append(cross, over);
  return svg;
}

function points(panel, width, colours, tip) {
  const series = panel.series.filter((s) => s.points.length);
  const height = Math.round(Math.min(Math.max(width * 0.46, 290), 430));
  const svg = canvas(width, height);
  const above = legend(svg, series, width, colours);
  const box = { left: 44, right: width - 12, top: above + 26, bottom: height - 44 };
  const all = series.flatMap((s) => s.points);
  const [x0, x1] = range(all.map((p) => p[0]), 0.05), [y0, y1] = range(all.map((p) => p[1]), 0.06);
  const x = { to: scale(x0, x1, box.left, box.right), ticks: ticks(x0, x1, (box.right - box.left) / 90).filter((t) => panel.x !== "trial" || Number.isInteger(t)) };
  const y = { to: scale(y0, y1, box.bottom, box.top), ticks: ticks(y0, y1, (box.bottom - box.top) / 50) };
  frame(svg, box, x, y, panel, colours);
  const dots = [];
  for (const s of series) {
    for (const [a, b, name] of s.points) {
      const dot = node("circle", { cx: x.to(a), cy: y.to(b), r: 5, fill: colours.line(s.slot), "fill-opacity": 0.75, stroke: colours.card, "stroke-width": 1, class: "mark" });
      dots.push({ dot, name });
      dot.addEventListener("pointerenter", () => {
        for (const other of dots) other.dot.setAttribute("opacity", other.name === name ? 1 : 0.15);
        const same = series.flatMap((o) => o.points.filter((p) => p[2] === name).map((p) => [colours.line(o.slot), `${o.name}  ${show(p[1])}`, p[1]]));
        tip.show(x.to(a), y.to(b), `${name}, ${panel.x} ${show(a)}`, same.sort((p, q) => q[2] - p[2]));
      });
      dot.addEventListener("pointerleave", () => { tip.hide(); for (const other of dots) other.dot.setAttribute("opacity", 1); });
      svg.append(dot);
    }
  }
  if (series.length === 1 && all.length <= 20 && width >= 620) {
    for (const [a, b, name] of all) svg.append(text(x.to(a) + 8, y.to(b) + 4, name, colours.soft, { "font-size": 10.5 }));
  }
  return svg;
}

function strip(panel, width, colours, tip) {
  const { rows } = panel, step = 30;
  const left = Math.min(Math.max(...rows.map((r) => widthOf(r.name, FONT, 600))) + 14, width * 0.4);
  const height = rows.length * step + 50, svg = canvas(width, height);
  const box = { left, right: width - 12, bottom: rows.length * step };
  const [low, high] = range(rows.flatMap((r) => r.values.filter((v) => v !== null)), 0.03);
  const to = scale(low, high, box.left + 8, box.right);
  for (const tick of ticks(low, high, (box.right - box.left) / 80)) {
    svg.append(node("line", { x1: to(tick), x2: to(tick), y1: 0, y2: box.bottom, stroke: colours.grid }));
    svg.append(text(to(tick), box.bottom + 18, show(tick, 12), colours.soft, { "text-anchor": "middle" }));
  }
  svg.append(text(box.right, box.bottom + 38, panel.x, colours.soft, { "text-anchor": "end" }));
  rows.forEach((row, i) => {
    const y = i * step + step / 2, colour = colours.line(row.slot);
    svg.append(text(box.left - 8, y + 4, shorten(row.name, left - 10), colour, { "text-anchor": "end", "font-weight": 600 }));
    row.values.forEach((value, k) => {
      if (value === null) return;
      const dot = node("circle", { cx: to(value), cy: y, r: 5, fill: colour, "fill-opacity": 0.45, class: "mark" });
      dot.addEventListener("pointerenter", () => tip.show(to(value), y, row.labels[k], [[colour, `${row.name}  ${show(value)}`]]));
      dot.addEventListener("pointerleave", tip.hide);
      svg.append(dot);
    });
    if (row.mean !== null) svg.append(node("rect", { x: to(row.mean) - 1.5, y: y - 10, width: 3, height: 20, rx: 1, fill: colour }));
  });
  return svg;
}

function bars(panel, width, colours, tip) {
  const { names, series, stacked } = panel;
  const format = panel.format === "bytes" ? bytes : show;
  const left = Math.min(Math.max(...names.map((n) => widthOf(n))) + 12, width * 0.42);
  const thick = names.length > 30 ? 9 : series.length > 1 && !stacked ? 11 : 15;
  const group = stacked ? thick : thick * series.length, step = group + (names.length > 30 ? 4 : 9);
  const values = series.flatMap((s) => s.values.map((v) => v ?? 0));
  const sums = stacked ? names.map((_, k) => series.reduce((t, s) => t + s.values[k], 0)) : values;
  const low = Math.min(0, ...sums), high = Math.max(1e-9, ...sums);
  const probe = canvas(width, 10), above = legend(probe, series, width, colours, "box") + 4;
  const height = above + names.length * step + 46, svg = canvas(width, height);
  legend(svg, series, width, colours, "box");
  const labelled = !stacked && values.length <= 60;
  const box = { left, right: width - (labelled ? 62 : 12), top: above, bottom: above + names.length * step };
  const to = scale(low, high, box.left + (low < 0 && labelled ? 44 : 0), box.right);
  let free = -Infinity; // the end of the last label, where the next may begin
  for (const tick of ticks(low, high, (box.right - box.left) / 95)) {
    svg.append(node("line", { x1: to(tick), x2: to(tick), y1: box.top, y2: box.bottom, stroke: tick === 0 ? colours.faint : colours.grid }));
    const half = widthOf(format(tick)) / 2;
    if (to(tick) - half < free) continue;
    free = to(tick) + half + 8;
    svg.append(text(to(tick), box.bottom + 18, format(tick), colours.soft, { "text-anchor": "middle" }));
  }
  svg.append(text(box.right, box.bottom + 36, panel.x, colours.soft, { "text-anchor": "end" }));
  names.forEach((name, k) => {
    const y = box.top + k * step + 4, head = panel.notes ? `${name}, ${panel.notes[k]}` : name;
    svg.append(text(box.left - 8, y + group / 2 + 4, shorten(name, left - 10), colours.ink, { "text-anchor": "end", "font-size": names.length > 30 ? 10 : FONT }));
    let sum = 0;
    series.forEach((s, i) => {
      const value = s.values[k];
      if (value === null) return;
      const from = to(stacked ? sum : 0), end = to(stacked ? sum + value : value);
      const top = stacked ? y : y + i * thick;
      const bar = node("rect", { x: Math.min(from, end), y: top, width: Math.max(Math.abs(end - from), value ? 0.5 : 0), height: thick - (stacked ? 0 : 1), fill: colours.fill(s.slot), class: "mark" });
      bar.addEventListener("pointerenter", () => tip.show((from + end) / 2, top, head, [[colours.fill(s.slot), `${s.name}  ${format(value)}`]]));
      bar.addEventListener("pointerleave", tip.hide);
      svg.append(bar);
      if (labelled) svg.append(text(value < 0 ? end - 6 : end + 6, top + thick / 2 + 4, format(value), colours.soft, { "font-size": 11, "text-anchor": value < 0 ? "end" : "start" }));
      sum += value;
    });
  });
  return svg;
}

function matrix(panel, width, colours, tip, number = 0) {
  const values = panel.frames ? panel.frames[number].values : panel.values;
  const { rows, columns } = panel, plain = panel.plain_diagonal;
  const everything = panel.frames ? panel.frames.flatMap((f) => f.values) : values;
  const shown = everything.flatMap((row, i) => row.filter((v, j) => v !== null && !(plain && i % rows.length === j)));
  const high = panel.high ?? Math.max(1e-9, ...shown), low = Math.min(0, ...shown);
  const longest = (names) => Math.max(...names.map((n) => widthOf(n)));
  const left = Math.min(longest(rows) + 12, width * 0.3);
  const cell = Math.min((width - left - 2) / columns.length, Math.max(46, 210 / columns.length));
  const upright = longest(columns) + 8 > cell;
  const top = upright ? Math.min(longest(columns), 110) + 14 : 24;
  const small = cell < 13;
  const height = top + cell * rows.length + 52, svg = canvas(width, height);
  columns.forEach((name, j) => {
    if (small && j % Math.ceil(13 / cell)) return;
    const x = left + (j + 0.5) * cell;
    svg.append(upright
      ? text(0, 0, shorten(name, 110), colours.soft, { transform: `translate(${x + 4},${top - 7}) rotate(-90)` })
      : text(x, top - 8, name, colours.soft, { "text-anchor": "middle" }));
  });
  rows.forEach((name, i) => {
    if (!(small && i % Math.ceil(13 / cell))) {
      svg.append(text(left - 8, top + (i + 0.5) * cell + 4, shorten(name, left - 10), colours.soft, { "text-anchor": "end" }));
    }
    columns.forEach((column, j) => {
      const value = values[i][j], blank = value === null || (plain && i === j);
      const fill = blank ? colours.card : colours.ramp((value - low) / (high - low));
      const x = left + j * cell, y = top + i * cell, gap = cell > 8 ? 1 : 0;
      const square = node("rect", { x, y, width: cell - gap, height: cell - gap, fill, class: "mark" });
      const count = panel.counts ? `, ${show(panel.counts[i][j])} nodes` : "";
      square.addEventListener("pointerenter", () => tip.show(x + cell / 2, y, `${name} · ${column}`, [[fill, show(value) + count]]));
      square.addEventListener("pointerleave", tip.hide);
      svg.append(square);
      if (!blank && cell >= 32) {
        const label = text(x + cell / 2, y + cell / 2 + 3.5, value === 0 ? "0" : value.toFixed(high <= 10 ? 2 : high < 100 ? 1 : 0), isDark(fill) ? "#ffffff" : "#10161b", { "text-anchor": "middle", "font-size": 10.5, "pointer-events": "none" });
        svg.append(label);
      }
    });
  });
  const y = top + cell * rows.length + 20, wide = Math.min(220, width - left - 10);
  for (let i = 0; i < 44; i++) {
    svg.append(node("rect", { x: left + (i * wide) / 44, y, width: wide / 44 + 0.5, height: 8, fill: colours.ramp(i / 43) }));
  }
  svg.append(text(left, y + 23, show(low), colours.soft));
  svg.append(text(left + wide, y + 23, show(high), colours.soft, { "text-anchor": "end" }));
  if (width - left - wide > widthOf(panel.unit) + 24) {
    svg.append(text(left + wide + 14, y + 9, panel.unit, colours.soft));
  } else {
    const start = Math.min(left, Math.max(width - widthOf(panel.unit) - 2, 0));
    svg.append(text(start, y - 6, shorten(panel.unit, width), colours.soft));
  }
  return svg;
}

// Mean ranks on an axis; bars join methods that do not differ significantly.
function ranks(panel, width, colours, tip) {
  const { methods, groups } = panel, places = panel.ranks, count = methods.length;
  const words = methods.map((name, i) => `${shorten(name, width * 0.3)}  ${places[i].toFixed(2)}`);
  const half = Math.ceil(count / 2), step = 20, axis = 52;
  const longest = (list) => Math.max(0, ...list.map((w) => widthOf(w, FONT, 600)));
  const left = longest(words.slice(0, half)) + 22, right = width - longest(words.slice(half)) - 22;
  const low = Math.floor(Math.min(...places)), high = Math.max(low + 1, Math.ceil(Math.max(...places)));
  const to = scale(low, high, left, right), first = axis + 14 + groups.length * 9;
  const svg = canvas(width, first + half * step + 12);
  svg.append(node("line", { x1: to(low), x2: to(high), y1: axis, y2: axis, stroke: colours.ink }));
  for (let tick = low; tick <= high; tick++) {
    svg.append(node("line", { x1: to(tick), x2: to(tick), y1: axis - 5, y2: axis, stroke: colours.ink }));
    svg.append(text(to(tick), axis - 10, String(tick), colours.soft, { "text-anchor": "middle" }));
  }
  const end = Math.min(to(low + panel.difference), right);
  svg.append(node("line", { x1: to(low), x2: end, y1: 10, y2: 10, stroke: colours.soft, "stroke-width": 2 }));
  svg.append(text(to(low), 26, `critical difference ${show(panel.difference)}`, colours.soft, { "font-size": 11 }));
  groups.forEach(([a, b], i) => {
    svg.append(node("line", { x1: to(places[a]) - 3, x2: to(places[b]) + 3, y1: axis + 9 + i * 9, y2: axis + 9 + i * 9, stroke: colours.ink, "stroke-width": 4, class: "bar" }));
  });
  methods.forEach((name, i) => {
    const onLeft = i < half, y = first + (onLeft ? i : count - 1 - i) * step + 8;
    const x = to(places[i]), edge = onLeft ? left - 6 : right + 6, colour = colours.line(panel.slots[i]);
    const path = node("path", { d: `M${x},${axis}L${x},${y}L${edge},${y}`, fill: "none", stroke: colour, "stroke-width": 1.4, class: "mark" });
    const label = text(onLeft ? edge - 4 : edge + 4, y + 4, words[i], colour, { "text-anchor": onLeft ? "end" : "start", "font-weight": 600 });
    label.addEventListener("pointerenter", () => tip.show(x, axis, "mean rank", [[colour, `${name}  ${show(places[i])}`]]));
    label.addEventListener("pointerleave", tip.hide);
    svg.append(path, label);
  });
  return svg;
}

const KINDS = { lines, points, strip, bars, matrix, ranks };

// A panel without lines, dots or rows.
const isEmpty = (panel) =>
  !(panel.values || panel.frames || panel.rows || panel.methods) && !panel.series.some((s) => (s.x ?? s.points ?? s.values).length);

function emptyChart(panel, width, colours) {
  const svg = canvas(width, 80);
  svg.append(text(width / 2, 44, `no data to show: ${panel.y ?? panel.x} against ${panel.x}`, colours.soft, { "text-anchor": "middle", class: "mark" }));
  return svg;
}

// Figures: controls, drawing, saving -------------------------------------------------------------

function tooltip(place) {
  const box = html("div", { class: "tip", role: "status" });
  place.append(box);
  return {
    show(x, y, head, entries) {
      const wide = place.clientWidth;
      box.replaceChildren(html("b", {}, head), ...entries.flatMap(([colour, words]) => {
        const dot = html("i");
        dot.style.background = colour;
        return [html("br"), dot, words];
      }));
      const own = box.offsetWidth;
      box.style.left = `${Math.max(0, Math.min(x + 14, wide - own))}px`;
      box.style.top = `${y + 16}px`;
      box.style.opacity = 1;
    },
    hide() { box.style.opacity = 0; },
  };
}

function selector({ name, options }, chosen, changed) {
  if (options.length <= 4 && options.join("").length < 44) {
    const box = html("div", { class: "segments", role: "group", "aria-label": name });
    for (const option of options) {
      const button = html("button", { type: "button", "aria-pressed": option === chosen }, option);
      button.addEventListener("click", () => {
        for (const other of box.children) other.setAttribute("aria-pressed", other === button);
        changed(option);
      });
      box.append(button);
    }
    return box;
  }
  const select = html("select", { "aria-label": name });
  for (const option of options) select.append(html("option", { value: option }, option));
  select.value = chosen;
  select.addEventListener("change", () => changed(select.value));
  return select;
}

class Figure {
  constructor(element) {
    this.element = element;
    this.data = figures[element.dataset.figure];
    this.place = element.querySelector(".canvas");
    this.tip = tooltip(this.place);
    this.chosen = this.data.choices.map((choice) => choice.options[0]);
    this.number = null;
    this.slider = html("label", { class: "slider" });
    this.input = html("input", { type: "range", min: 0, step: 1, "aria-label": "round" });
    this.output = html("output");
    this.slider.append(this.input, this.output);
    this.input.addEventListener("input", () => { this.number = Number(this.input.value); this.draw(); });
    for (const button of element.querySelectorAll("[data-save]")) {
      button.addEventListener("click", () => this.save(button.dataset.save));
    }
    this.showControls();
    this.updateSlider();
  }

  showControls() {
    const made = this.data.choices.map((choice, i) =>
      selector(choice, this.chosen[i], (option) => { this.chosen[i] = option; this.updateSlider(); this.draw(); }));
    this.element.querySelector(".controls").replaceChildren(...made, this.slider);
  }

  get panel() { return this.data.panels[this.chosen.join(SEPARATOR)]; }

  updateSlider() {
    const frames = this.panel.frames;
    this.slider.hidden = !frames;
    this.slider.style.display = frames ? "" : "none";
    if (!frames) return;
    this.input.max = frames.length - 1;
    this.number = Math.min(this.number ?? frames.length - 1, frames.length - 1);
    this.input.value = this.number;
  }

  draw(width = Math.floor(this.place.clientWidth)) {
    const panel = this.panel;
    if (!width) return;
    const kind = isEmpty(panel) ? emptyChart : KINDS[this.data.kind];
    const svg = kind(panel, width, palette(), this.tip, this.number ?? 0);
    svg.setAttribute("aria-label", this.data.title);
    svg.setAttribute("font-family", getComputedStyle(document.body).fontFamily);
    if (panel.frames) this.output.textContent = panel.frames[this.number].name;
    this.place.querySelector("svg")?.remove();
    this.place.prepend(svg);
    this.tip.hide();
    this.width = width;
  }

  toSvg() {
    const svg = this.place.querySelector("svg").cloneNode(true);
    const { width, height } = svg.viewBox.baseVal, pad = 16;
    svg.setAttribute("xmlns", SVG);
    svg.setAttribute("viewBox", `${-pad} ${-pad} ${width + 2 * pad} ${height + 2 * pad}`);
    svg.setAttribute("width", width + 2 * pad);
    svg.setAttribute("height", height + 2 * pad);
    svg.prepend(node("title", {}, this.data.title),
      node("rect", { x: -pad, y: -pad, width: width + 2 * pad, height: height + 2 * pad, fill: palette().card }));
    return { source: new XMLSerializer().serializeToString(svg), width: width + 2 * pad, height: height + 2 * pad };
  }

  save(kind) {
    const { source, width, height } = this.toSvg();
    const round = this.panel.frames ? [this.panel.frames[this.number].name] : [];
    const name = [this.element.dataset.figure, ...this.chosen, ...round].join("-").replace(/[^\w.-]+/g, "-");
    const blob = new Blob([source], { type: "image/svg+xml" });
    if (kind === "svg") return download(blob, `${name}.svg`);
    const image = new Image();
    image.onload = () => {
      const sheet = document.createElement("canvas");
      sheet.width = width * 3;
      sheet.height = height * 3;
      const context = sheet.getContext("2d");
      context.scale(3, 3);
      context.drawImage(image, 0, 0, width, height);
      sheet.toBlob((png) => download(png, `${name}.png`));
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(source);
  }
}

function download(blob, name) {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Tables -----------------------------------------------------------------------------------------

// Sort a table by a column: numbers by size, largest first, then text; cells without a value last.
function sortBy(heading) {
  const place = heading.cellIndex, body = heading.closest("table").tBodies[0];
  const rising = heading.getAttribute("aria-sort") === "descending";
  const number = (row) => parseFloat(row.cells[place].textContent.replace(/^[−–]/, "-"));
  const text = (row) => row.cells[place].textContent;
  const order = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    const found = Number.isNaN(x) ? text(b).localeCompare(text(a)) : y - x;
    return rising ? -found : found;
  };
  body.append(...[...body.rows].sort(order));
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
}

function listen(place) {
  for (const heading of place.querySelectorAll("th[data-sort]")) {
    heading.addEventListener("click", () => sortBy(heading));
    heading.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      sortBy(heading);
    });
  }
}
listen(document);

// The page ---------------------------------------------------------------------------------------

const drawn = [...document.querySelectorAll("figure[data-figure]")].map((element) => new Figure(element));
let before, printing = false;
const drawAll = () => drawn.forEach((figure) => figure.draw());
drawAll();
new ResizeObserver(() => {
  if (printing) return;
  for (const figure of drawn) {
    if (Math.floor(figure.place.clientWidth) !== figure.width) figure.draw();
  }
}).observe(document.body);

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", drawAll);
document.querySelector(".theme").addEventListener("click", () => {
  const root = document.documentElement;
  const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  drawAll();
});

addEventListener("beforeprint", () => {
  before = document.documentElement.dataset.theme;
  printing = true;
  document.documentElement.dataset.theme = "light";
  drawn.forEach((figure) => figure.draw(PRINT_WIDTH));
});
addEventListener("afterprint", () => {
  printing = false;
  if (before) document.documentElement.dataset.theme = before;
  else delete document.documentElement.dataset.theme;
  drawAll();
});
