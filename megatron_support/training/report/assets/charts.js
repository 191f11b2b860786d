"use strict";
// Small charts as inline SVG. Colours are CSS variables, so a change of theme needs no redrawing.

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const MARGIN = { top: 12, right: 12, bottom: 34, left: 52 };

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function html(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function number(value, percent = false) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (percent) return `${Number((100 * value).toPrecision(Math.abs(value) > 0.98 ? 6 : 3))}%`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

function niceTicks(low, high, wanted) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (Number.isFinite(value)) { if (value < low) low = value; if (value > high) high = value; }
  return low <= high ? [low, high] : [0, 1];
}

function padded([low, high], zero = false) {
  if (zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

// The frame of a chart: axes with ticks and labels, and functions from values to pixels.
function frame(width, { x, y, xLabel, yLabel, percent, xTicks, xFormat, height = HEIGHT, label }) {
  const yTicks = niceTicks(y[0], y[1], 4).map((tick) => ({ tick, text: number(tick, percent) }));
  const longest = Math.max(0, ...yTicks.map(({ text }) => text.length));
  const left = Math.max(MARGIN.left, 7 * longest + 24); // beside the label of the axis
  const inner = { left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const sx = (value) => inner.left + (value - x[0]) / (x[1] - x[0] || 1) * (inner.right - inner.left);
  const sy = (value) => inner.bottom - (value - y[0]) / (y[1] - y[0] || 1) * (inner.bottom - inner.top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label || "" });
  for (const { tick, text } of yTicks) {
    root.append(svg("line", { class: "gridline", x1: inner.left, x2: inner.right, y1: sy(tick), y2: sy(tick) }));
    root.append(svg("text", { x: inner.left - 7, y: sy(tick) + 4, "text-anchor": "end" }, text));
  }
  root.append(svg("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
  for (const tick of xTicks || niceTicks(x[0], x[1], Math.max(3, Math.floor(width / 90)))) {
    if (tick < x[0] || tick > x[1]) continue;
    root.append(svg("text", { x: sx(tick), y: inner.bottom + 15, "text-anchor": "middle" }, (xFormat || number)(tick)));
  }
  if (xLabel) root.append(svg("text", { class: "name", x: (inner.left + inner.right) / 2, y: height - 3, "text-anchor": "middle" }, xLabel));
  if (yLabel) root.append(svg("text", { class: "name", x: 0, y: 0, "text-anchor": "middle", transform: `translate(10 ${(inner.top + inner.bottom) / 2}) rotate(-90)` }, yLabel));
  return { root, sx, sy, inner, height };
}

// Draws now and whenever the width changes.
function mount(node, draw) {
  let drawn = 0;
  const redraw = () => {
    const width = Math.max(260, Math.round(node.clientWidth));
    if (width !== drawn) { drawn = width; node.replaceChildren(draw(width)); }
  };
  redraw();
  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(node);
}

const tip = {
  show(event, text) {
    const node = document.getElementById("tip");
    node.textContent = text;
    node.hidden = false;
    const box = node.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
    const y = event.clientY + 14 + box.height > innerHeight ? event.clientY - box.height - 14 : event.clientY + 14;
    node.style.left = `${Math.max(4, x)}px`;
    node.style.top = `${Math.max(4, y)}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};

function hover(node, text) {
  node.addEventListener("mousemove", (event) => tip.show(event, text));
  node.addEventListener("mouseleave", tip.hide);
}

function linePath(xs, values, sx, sy) {
  let path = "", pen = "M";
  xs.forEach((x, i) => {
    if (!Number.isFinite(values[i])) { pen = "M"; return; }
    path += `${pen}${sx(x).toFixed(1)},${sy(values[i]).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

// One vertical line at the same step in all charts over steps.
const crosshairs = [];
function crosshair({ root, sx, inner }, xs, lines) {
  const cross = svg("line", { class: "cross", y1: inner.top, y2: inner.bottom, visibility: "hidden" });
  const area = svg("rect", { x: inner.left, y: inner.top, width: Math.max(0, inner.right - inner.left), height: inner.bottom - inner.top, fill: "transparent" });
  const mine = (step) => {
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { cross.setAttribute("x1", sx(step)); cross.setAttribute("x2", sx(step)); }
  };
  crosshairs.push(mine);
  area.addEventListener("mousemove", (event) => {
    const box = root.getBoundingClientRect();
    const x = (event.clientX - box.left) * (root.viewBox.baseVal.width / box.width);
    let nearest = 0;
    xs.forEach((step, i) => { if (Math.abs(sx(step) - x) < Math.abs(sx(xs[nearest]) - x)) nearest = i; });
    crosshairs.forEach((move) => move(xs[nearest]));
    tip.show(event, `step ${xs[nearest]}\n${lines(nearest)}`);
  });
  area.addEventListener("mouseleave", () => { crosshairs.forEach((move) => move(null)); tip.hide(); });
  root.append(cross, area);
}

function stepRange(xs) { return xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [xs[0] - 1, xs[0] + 1]; }
function stepTicks(xs) { return niceTicks(...stepRange(xs), 6).filter(Number.isInteger); }

function lineChart(node, { steps, series, title, yLabel, percent, zero }) {
  mount(node, (width) => {
    const y = padded(extent(series.flatMap((s) => s.values)), zero);
    const f = frame(width, { x: stepRange(steps), y, xLabel: "step", yLabel, percent, xTicks: stepTicks(steps), label: `${title} over steps` });
    for (const s of series) {
      f.root.append(svg("path", { class: "line", d: linePath(steps, s.values, f.sx, f.sy), style: `stroke: var(--${s.color})` }));
      if (steps.length <= 12) steps.forEach((step, i) => {
        if (Number.isFinite(s.values[i])) f.root.append(svg("circle", { cx: f.sx(step), cy: f.sy(s.values[i]), r: 2.6, style: `fill: var(--${s.color})` }));
      });
    }
    crosshair(f, steps, (i) => series.map((s) => `${s.name}  ${number(s.values[i], percent)}`).join("\n"));
    return f.root;
  });
}

// Quantile bands around a median, with the clip window.
function fanChart(node, { steps, rows, levels, window: bounds, title }) {
  mount(node, (width) => {
    const column = (i) => rows.map((row) => row[i]);
    const last = levels.length - 1;
    const y = padded(extent([...rows.flatMap((row) => [row[1], row[last - 1]]), ...(bounds || [])]));
    const f = frame(width, { x: stepRange(steps), y, xLabel: "step", yLabel: "ratio", xTicks: stepTicks(steps), height: 230, label: title });
    const clamp = (value) => Math.min(Math.max(value, y[0]), y[1]);
    for (let i = 1; i < last / 2; i++) {
      const upper = linePath(steps, column(last - i).map(clamp), f.sx, f.sy);
      const lower = linePath([...steps].reverse(), column(i).map(clamp).reverse(), f.sx, f.sy).replace("M", "L");
      f.root.append(svg("path", { d: `${upper}${lower}Z`, style: "fill: var(--c1)", opacity: 0.13 + 0.09 * i }));
    }
    f.root.append(svg("path", { class: "line", d: linePath(steps, column(last / 2), f.sx, f.sy), style: "stroke: var(--c1)" }));
    for (const bound of bounds || []) f.root.append(svg("line", { class: "bound", x1: f.inner.left, x2: f.inner.right, y1: f.sy(bound), y2: f.sy(bound) }));
    const name = (level) => level === 0 ? "min" : level === 1 ? "max" : level === 0.5 ? "median" : `${Math.round(100 * level)}%`;
    crosshair(f, steps, (i) => levels.map((level, j) => `${name(level)}  ${number(rows[i][j])}`).reverse().join("\n"));
    return f.root;
  });
}

// Vertical bars, stacked; each of bars has a label and a value per series.
function barChart(node, { bars, series, title, xLabel, yLabel, percent, bounds, ticks, height = HEIGHT }) {
  mount(node, (width) => {
    const totals = bars.map((bar) => bar.values.reduce((sum, value) => sum + value, 0));
    const y = [0, (extent([...totals, 0])[1] || 1) * 1.08];
    const f = frame(width, { x: [0, bars.length || 1], y, xLabel, yLabel, percent, xTicks: [], height, label: title });
    const gap = bars.length > 60 ? 0 : bars.length > 25 ? 1 : 2;
    const every = Math.max(1, Math.ceil(bars.length / Math.max(4, Math.floor(width / 52))));
    bars.forEach((bar, i) => {
      let below = 0;
      const left = f.sx(i) + gap / 2, wide = Math.max(0.8, f.sx(i + 1) - f.sx(i) - gap);
      bar.values.forEach((value, j) => {
        const box = svg("rect", { class: "bar", x: left, width: wide, y: f.sy(below + value), height: Math.max(0, f.sy(below) - f.sy(below + value)), rx: gap ? 1.5 : 0, style: `fill: var(--${series[j].color})` });
        hover(box, bar.tip);
        f.root.append(box);
        below += value;
      });
      if (!ticks && i % every === 0) f.root.append(svg("text", { x: f.sx(i + 0.5), y: f.inner.bottom + 15, "text-anchor": "middle" }, bar.label));
    });
    for (const tick of ticks || []) f.root.append(svg("text", { x: f.sx(tick.at), y: f.inner.bottom + 15, "text-anchor": "middle" }, tick.label));
    for (const bound of bounds || []) {
      f.root.append(svg("line", { class: "bound", x1: f.sx(bound.at), x2: f.sx(bound.at), y1: f.inner.top, y2: f.inner.bottom }));
      f.root.append(svg("text", { x: f.sx(bound.at) + 4, y: f.inner.top + 8 }, bound.label));
    }
    return f.root;
  });
}

// A histogram: counts between edges, with ticks at round values.
function histogram(node, { edges, counts, title, xLabel, color = "c1", bounds = [], height = HEIGHT }) {
  const total = counts.reduce((sum, count) => sum + count, 0) || 1;
  const low = edges[0], high = edges[edges.length - 1];
  const at = (value) => (value - low) / (high - low || 1) * counts.length;
  barChart(node, {
    title, xLabel, yLabel: "count", height,
    series: [{ color }],
    bars: counts.map((count, i) => ({ values: [count], tip: `${number(edges[i])} to ${number(edges[i + 1])}\n${count} (${number(count / total, true)})` })),
    ticks: niceTicks(low, high, 6).map((value) => ({ at: at(value), label: number(value) })),
    bounds: bounds.filter((bound) => bound.value >= low && bound.value <= high).map((bound) => ({ at: at(bound.value), label: bound.label })),
  });
}

// Horizontal bars with names on the left.
function rowChart(node, { rows, title, xLabel, percent, color = "c1", series }) {
  const colors = series ? series.map((s) => s.color) : [color];
  mount(node, (width) => {
    const line = 21, left = Math.min(150, width * 0.36), height = rows.length * line + 36;
    const top = extent([0, ...rows.map((row) => row.values.reduce((sum, value) => sum + value, 0))])[1] || 1;
    const sx = (value) => left + value / top * (width - left - 58);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
    rows.forEach((row, i) => {
      const y = i * line + 4;
      root.append(svg("text", { class: "name", x: left - 8, y: y + 12, "text-anchor": "end" }, row.label));
      let from = 0;
      row.values.forEach((value, j) => {
        const box = svg("rect", { class: "bar", x: sx(from), y, width: Math.max(value > 0 ? 1 : 0, sx(from + value) - sx(from)), height: line - 6, rx: 2, style: `fill: var(--${colors[j]})` });
        hover(box, row.tip);
        root.append(box);
        from += value;
      });
      root.append(svg("text", { x: sx(from) + 6, y: y + 12 }, row.text ?? number(from, percent)));
    });
    root.append(svg("line", { class: "axis", x1: left, x2: left, y1: 0, y2: rows.length * line }));
    root.append(svg("text", { class: "name", x: left, y: rows.length * line + 18 }, xLabel));
    return root;
  });
}

// Points with a strip below for those that have no y.
function scatterChart(node, { points, xLabel, yLabel, title, strip, onPick }) {
  mount(node, (width) => {
    const height = Math.min(690, Math.max(320, width * 1.3));
    const inside = points.filter((point) => point.y !== null);
    const range = padded(extent([...inside.flatMap((p) => [p.x, p.y]), ...points.map((p) => p.x)]));
    const room = points.length > inside.length ? 30 : 0;
    const f = frame(width, { x: range, y: range, xLabel, yLabel, height: height, label: title });
    const floor = f.inner.bottom - room;
    const sy = (value) => floor - (value - range[0]) / (range[1] - range[0]) * (floor - f.inner.top);
    f.root.querySelectorAll(".gridline").forEach((line) => line.remove());
    f.root.querySelectorAll("text[text-anchor=end]").forEach((text) => text.remove());
    for (const tick of niceTicks(range[0], range[1], 5)) {
      f.root.append(svg("line", { class: "gridline", x1: f.inner.left, x2: f.inner.right, y1: sy(tick), y2: sy(tick) }));
      f.root.append(svg("text", { x: f.inner.left - 7, y: sy(tick) + 4, "text-anchor": "end" }, number(tick)));
    }
    f.root.append(svg("line", { class: "bound", x1: f.sx(range[0]), y1: sy(range[0]), x2: f.sx(range[1]), y2: sy(range[1]) }));
    if (room) {
      f.root.append(svg("line", { class: "axis", x1: f.inner.left, x2: f.inner.right, y1: floor, y2: floor }));
      f.root.append(svg("text", { x: f.inner.left - 7, y: floor + room / 2 + 4, "text-anchor": "end" }, "−∞"));
      f.root.append(svg("text", { x: f.inner.right - 4, y: floor + 12, "text-anchor": "end" }, strip));
    }
    for (const point of points) {
      const mark = svg("circle", { class: "point", cx: f.sx(point.x), cy: point.y === null ? floor + room * 0.62 : sy(point.y), r: point.y === null ? 4.2 : 2.8, style: `fill: var(--${point.color})`, "fill-opacity": point.y === null ? 0.9 : 0.45 });
      hover(mark, point.tip);
      mark.addEventListener("click", () => onPick(point));
      f.root.append(mark);
    }
    return f.root;
  });
}
