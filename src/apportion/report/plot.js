// One chart of learning curves: a line and a band for each kind of run, and a crosshair for pointer and keyboard.
// A chart is made once and updated; what the reader has opened or focused stays.

const PLOT = { left: 50, right: 14, top: 8, bottom: 24, height: 176 };
const FEW_POINTS = 6; // up to so many points are marked each
const KINDS = 8; // colours with their dashes; more kinds begin again
const kindClass = (k) => `k${k % KINDS}`;

// The least of 1, 2 and 5 times a power of ten that is not below `size`.
function tickStep(size) {
  const ten = 10 ** Math.floor(Math.log10(size));
  return [1, 2, 5, 10].find((k) => k * ten >= size * (1 - 1e-9)) * ten;
}

// At most `most` round numbers inside a range, with their labels.
function ticks(low, high, most) {
  const step = tickStep((high - low) / most), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(Number((i * step).toPrecision(12)));
  return found.map((value) => ({ value, label: tickLabel(value, step) }));
}

function tickLabel(value, step) {
  const size = Math.abs(value);
  let text;
  if (value === 0) text = "0";
  else if (size >= 1e6) text = `${Number((value / 1e6).toPrecision(4))}M`;
  else if (size >= 1e4) text = `${Number((value / 1e3).toPrecision(4))}k`;
  else if (step < 1e-4) text = Number(value.toPrecision(6)).toExponential();
  else text = value.toFixed(Math.max(0, Math.round(-Math.log10(step) + 0.49)));
  return text.replaceAll("-", "−");
}

// A value to four digits, and a whole number up to ten millions to the last.
function precise(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2).replaceAll("-", "−");
  if (size >= 1000) return Math.round(value).toLocaleString("en").replace("-", "−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

// Where a rising list passes x: the last index that is not beyond it, −1 before the first.
function lastAt(list, x) {
  let low = 0, high = list.length;
  while (low < high) { const middle = (low + high) >> 1; if (list[middle] <= x) low = middle + 1; else high = middle; }
  return low - 1;
}

// A column of a line at x, between its neighbours in proportion; nothing outside of it or where one is missing.
function between(line, column, x) {
  const i = lastAt(line.x, x), values = line[column];
  if (i < 0 || !values) return null;
  if (line.x[i] === x) return values[i];
  if (i + 1 >= line.x.length || values[i] === null || values[i + 1] === null) return null;
  return values[i] + ((x - line.x[i]) / (line.x[i + 1] - line.x[i])) * (values[i + 1] - values[i]);
}

const swatch = (k) => svg("svg", { class: `swatch ${kindClass(k)}`, viewBox: "0 0 34 10", "aria-hidden": "true" },
  svg("path", { d: "M1,5H33", class: "mean" }));

// makePlot(title, name) → { node, update(spec) }. A spec: `lines`, by kind null or { label, several, x, y, low, high, n,
// seeds: [{ x, y }], told: { x, y } }; `unit`, `axis` (its name), `width`, `here` ({ x, y } of the reader's step), `apart`
// for measurements with nothing known between them.
function makePlot(title, name) {
  let spec = null, frame = null, at = null;
  const unit = el("small", null), readout = el("div", { class: "readout" }), note = el("p", { class: "quiet" });
  const holder = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-valuemin": 0 });
  const numbers = el("div", { class: "numbers", tabindex: 0, role: "region", "aria-label": `${title || name} as a table` });
  const twin = el("details", { class: "twin" }, el("summary", null, "table"), numbers);
  const node = el("figure", { class: "curve" },
    el("figcaption", null, el("b", null, title || name), " ", unit, title ? el("code", null, name) : null),
    holder, readout, note, twin);

  function move(to) {
    at = to === null || !frame.places.length ? null : clamp(to, 0, frame.places.length - 1);
    const x = at === null ? null : frame.places[at];
    fill(frame.cursor, x === null ? null : crosshair(frame, spec.lines, x));
    const rows = valuesAt(spec, x), where = x === null ? "at the end" : `${spec.axis} ${precise(x)}`;
    fill(readout, rows.map(({ k, cells }) => [swatch(k), cells.map((text) => el("span", null, text))]), el("span", { class: "where" }, where));
    holder.setAttribute("aria-valuenow", at ?? Math.max(0, frame.places.length - 1));
    holder.setAttribute("aria-valuetext", `${where}: ${rows.map(({ cells }) => cells.filter(Boolean).join(" ")).join("; ")}`);
  }

  function update(next) {
    const x = at === null ? null : frame.places[at];
    spec = next;
    frame = frameOf(spec);
    unit.textContent = spec.unit ? `${spec.unit} ` : "";
    note.textContent = frame.clipped ? "An interval reaches beyond the frame." : "";
    fill(holder, drawPlot(spec, frame));
    holder.setAttribute("aria-valuemax", Math.max(0, frame.places.length - 1));
    holder.setAttribute("aria-label", `${title || name} over ${spec.axis}. ${summary(spec)}`);
    move(x === null ? null : lastAt(frame.places, x));
    if (twin.open) fill(numbers, tables(spec));
  }

  twin.addEventListener("toggle", () => fill(numbers, twin.open ? tables(spec) : null));
  holder.addEventListener("pointermove", (e) => {
    const box = holder.getBoundingClientRect(), x = frame.back((e.clientX - box.left) * (frame.width / box.width));
    const i = Math.max(0, lastAt(frame.places, x)), places = frame.places;
    move(i + 1 < places.length && places[i + 1] - x < x - places[i] ? i + 1 : i);
  });
  const leave = () => move(document.activeElement === holder && holder.matches(":focus-visible") ? at : null);
  holder.addEventListener("pointerleave", leave);
  holder.addEventListener("blur", () => move(null));
  holder.addEventListener("keydown", (e) => {
    const last = frame.places.length - 1, now = at ?? last;
    const to = { ArrowRight: at === null ? last : now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1,
      PageUp: now + 10, PageDown: now - 10, Home: 0, End: last, Escape: null }[e.key];
    if (to === undefined || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    move(to);
  });
  return { node, update };
}

// The scales of a chart. Intervals count up to the height of the lines beyond them; what is more is cut off and said. What
// is never negative has no room below 0, though a symmetric interval may reach there.
function frameOf({ lines, width, here }) {
  const drawn = lines.filter((line) => line?.x.length);
  const xs = drawn.flatMap((line) => [line, ...line.seeds].flatMap(({ x }) => [x[0], x[x.length - 1]]));
  const left = Math.min(...xs), right = Math.max(...xs);
  const of = (lists) => lists.reduce(([low, high], list) => list.reduce(([a, b], v) => (v === null ? [a, b]
    : [Math.min(a, v), Math.max(b, v)]), [low, high]), [Infinity, -Infinity]);
  let [low, high] = of([...drawn.flatMap((line) => [line.y, ...line.seeds.map(({ y }) => y), line.told?.y || []]), here ? [here.y] : []]);
  const [bandLow, bandHigh] = of(drawn.flatMap((line) => [line.low || [], line.high || []]));
  const least = low, room = high - low || Math.abs(high) || 1;
  const clipped = bandLow < low - room || bandHigh > high + room;
  low = Math.max(Math.min(low, bandLow), low - room);
  high = Math.min(Math.max(high, bandHigh), high + room);
  if (least >= 0 && low < 0.4 * high) low = 0;
  // Values that differ by rounding alone are one height.
  const pad = high - low > 1e-9 * Math.abs(high) ? 0.04 * (high - low) : Math.abs(high) * 0.1 || 0.5;
  const span = right - left || 1, inner = width - PLOT.left - PLOT.right, bottom = PLOT.top + PLOT.height;
  const y = { low: low === 0 && high > 0 ? 0 : low - pad, high: high + pad };
  const places = [...new Set(drawn.flatMap((line) => line.x))].sort((a, b) => a - b);
  return { drawn, left, right, y, width, bottom, places, clipped, cursor: svg("g"),
    px: (v) => PLOT.left + ((v - left) / span) * inner, back: (p) => left + ((p - PLOT.left) / inner) * span,
    py: (v) => bottom - ((v - y.low) / (y.high - y.low)) * PLOT.height };
}

let clips = 0;
function drawPlot({ lines, here, axis, apart }, f) {
  const out = svg("svg", { viewBox: `0 0 ${f.width} ${f.bottom + PLOT.bottom}`, "aria-hidden": "true" });
  if (!f.drawn.length) {
    out.append(svg("text", { x: PLOT.left, y: PLOT.top + 20, class: "tick" }, `not logged over ${axis}`));
    return out;
  }
  const clip = `clip-${(clips += 1)}`;
  out.append(svg("defs", null, svg("clipPath", { id: clip }, svg("rect", { x: PLOT.left - 6, y: PLOT.top - 6,
    width: f.width - PLOT.left - PLOT.right + 12, height: PLOT.height + 7.5 }))));
  for (const { value, label } of ticks(f.y.low, f.y.high, 4)) {
    out.append(svg("line", { x1: PLOT.left, x2: f.width - PLOT.right, y1: f.py(value), y2: f.py(value), class: value === 0 ? "zero" : "rule" }),
      svg("text", { x: PLOT.left - 7, y: f.py(value) + 4, class: "tick end" }, label));
  }
  const most = Math.max(2, Math.floor(f.width / 90));
  for (const { value, label } of f.right > f.left ? ticks(f.left, f.right, most) : [{ value: f.left, label: precise(f.left) }]) {
    out.append(svg("text", { x: f.px(value), y: f.bottom + 17, class: "tick middle" }, label));
  }
  const body = svg("g", { "clip-path": `url(#${clip})` });
  lines.forEach((line, k) => line?.x.length && body.append(svg("g", { class: kindClass(k) }, drawLine(line, k, f, apart))));
  if (here) {
    const x = f.px(here.x);
    body.append(svg("line", { x1: x, x2: x, y1: PLOT.top - 4, y2: f.bottom, class: "here" }),
      here.y === null ? "" : svg("circle", { cx: x, cy: f.py(here.y), r: 4, class: "here" }));
  }
  out.append(body, f.cursor);
  return out;
}

// One kind: its interval, its seeds, what was predicted of it, and the line itself.
function drawLine(line, k, f, apart) {
  const point = (x, y) => `${f.px(x).toFixed(1)},${f.py(y).toFixed(1)}`;
  const path = (x, y) => x.flatMap((v, i) => (y[i] === null ? [] : [point(v, y[i])])).join("L");
  const few = line.y.filter((v) => v !== null).length <= FEW_POINTS;
  const parts = [];
  if (line.low && apart) {
    // Single measurements: a whisker each, a little apart from those of the other kinds.
    const d = line.x.flatMap((x, i) => (line.low[i] === null ? [] :
      [`M${(f.px(x) + 3 * k).toFixed(1)},${f.py(line.low[i]).toFixed(1)}V${f.py(line.high[i]).toFixed(1)}`])).join("");
    parts.push(svg("path", { d, class: "whisker" }));
  } else if (line.low) {
    parts.push(...stretches(line.low).map(([a, b]) => {
      const x = line.x.slice(a, b), back = x.map((v, i) => point(v, line.low[a + i])).reverse();
      return svg("path", { d: `M${x.map((v, i) => point(v, line.high[a + i])).join("L")}L${back.join("L")}Z`, class: "interval" });
    }));
  }
  parts.push(...line.seeds.map(({ x, y }) => svg("path", { d: `M${path(x, y)}`, class: "seed" })));
  if (line.told) parts.push(svg("path", { d: `M${path(line.told.x, line.told.y)}`, class: "told" }));
  // Where some seeds have ended, or have not got the value, the mean goes on thinner.
  const all = Math.max(...(line.n || [0])), fewer = (line.n || []).map((n) => (n < all ? n : null));
  if (line.y.some((v) => v !== null)) {
    parts.push(svg("path", { d: `M${path(line.x, line.y.map((v, i) => (fewer[i] > 0 ? null : v)))}`, class: "mean" }));
  }
  parts.push(...stretches(fewer).map(([a, b]) => [Math.max(0, a - 1), b + 1]).map(([a, b]) =>
    svg("path", { d: `M${path(line.x.slice(a, b), line.y.slice(a, b))}`, class: "mean fewer" })));
  if (few || apart) line.x.forEach((x, i) => line.y[i] !== null && parts.push(svg("circle", { cx: f.px(x), cy: f.py(line.y[i]), r: 2.6, class: "dot" })));
  return parts;
}

// From and to of each run of entries that are not null.
function stretches(list) {
  const found = [];
  let start = null;
  [...list, null].forEach((v, i) => {
    if (v !== null && start === null) start = i;
    if (v === null && start !== null) { found.push([start, i]); start = null; }
  });
  return found;
}

function crosshair(f, lines, x) {
  return [svg("line", { x1: f.px(x), x2: f.px(x), y1: PLOT.top, y2: f.bottom, class: "cursor" }),
    lines.map((line, k) => {
      const y = line && between(line, "y", x);
      return y !== null && y !== undefined && svg("circle", { cx: f.px(x), cy: f.py(y), r: 4, class: `spot ${kindClass(k)}` });
    })];
}

// What each kind has at x, or at its own end: label, value, interval and number of seeds.
function valuesAt({ lines }, x) {
  return lines.flatMap((line, k) => {
    if (!line?.x.length) return [];
    const to = x ?? line.x[line.x.length - 1], low = between(line, "low", to), i = lastAt(line.x, to);
    return [{ k, cells: [line.label, precise(between(line, "y", to)),
      low === null ? "" : `${precise(low)} to ${precise(between(line, "high", to))}`,
      line.several && i >= 0 ? plural(line.n[i], "seed") : ""] }];
  });
}

function summary({ lines, axis }) {
  return lines.filter((line) => line?.x.length).map((line) => {
    const known = line.y.flatMap((v, i) => (v === null ? [] : [i])), a = known[0], b = known[known.length - 1];
    if (a === undefined) return `${line.label}: no value.`;
    const told = line.told ? `, predicted ${precise(line.told.y.findLast((v) => v !== null))}` : "";
    return `${line.label}: from ${precise(line.y[a])} at ${axis} ${precise(line.x[a])} to ${precise(line.y[b])} at ${precise(line.x[b])}${told}.`;
  }).join(" ");
}

function tables({ lines, axis }) {
  return lines.map((line) => line?.x.length && el("table", null, el("caption", null, line.label),
    el("thead", null, el("tr", null, [axis, line.several ? "mean" : "value", ...(line.low ? ["low", "high"] : []),
      ...(line.several ? ["n"] : [])].map((h) => el("th", { scope: "col" }, h)))),
    el("tbody", null, line.x.map((x, i) => el("tr", null, el("th", { scope: "row" }, precise(x)), el("td", null, precise(line.y[i])),
      line.low ? [el("td", null, precise(line.low[i])), el("td", null, precise(line.high[i]))] : null,
      line.several ? el("td", null, line.n[i]) : null)))));
}
