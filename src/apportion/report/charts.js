// Hand-written SVG: V̂ along a response, a strip of credit for the list, a line for each metric.

const PAD = { left: 40, right: 92, top: 24, value: 150, gap: 32, entropy: 44, bottom: 22 };

function hatch(id) {
  return svg("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("line", { x1: 0, x2: 0, y1: 0, y2: 5, class: "hatch-line" }));
}

// How far [0, 1] a credit is on the way to full colour, and which hue it takes.
function tintOf(credit, scale) {
  const a = clamp(Math.abs(credit) / scale, 0, 1);
  return { a: a.toFixed(3), hue: credit < 0 ? "neg" : "pos" };
}

// The value of each state from the prompt to the reward, as a step line with its errors, entropy beneath.
// `on.token(t)` and `on.pivot(position)` answer the pointer and the keyboard.
function valueChart(r, creditAt, scale, width, on) {
  const T = Math.max(1, r.length);
  const height = PAD.top + PAD.value + PAD.gap + PAD.entropy + PAD.bottom;
  const right = width - PAD.right;
  const x = (t) => PAD.left + (t / T) * (right - PAD.left);
  const known = r.segments.filter((s) => s.before !== null);
  const values = [0, 1, r.reward, r.mean, ...known.flatMap((s) => [s.before - s.stderr, s.before + s.stderr, s.after])]
    .filter((v) => v !== null);
  const low = Math.min(...values), high = Math.max(...values);
  const y = (v) => PAD.top + (1 - (v - low) / (high - low)) * PAD.value;
  const bottom = PAD.top + PAD.value;
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label":
    `Value over token position: ${known.map((s) => number(s.before)).join(", ")}, reward ${number(r.reward)}` });
  out.append(svg("defs", null, hatch("hatch")));

  for (const s of r.segments) {
    const { a, hue } = tintOf(creditAt(s.start), scale);
    const box = { x: x(s.start), y: PAD.top, width: x(s.end) - x(s.start), height: PAD.value };
    out.append(svg("rect", { ...box, class: `band ${hue}`, "--a": a }));
    if (s.noise) out.append(svg("rect", { ...box, class: "noise", fill: "url(#hatch)" }));
  }
  for (const v of [...new Set([low, (low + high) / 2, high])]) {
    out.append(svg("line", { x1: PAD.left, x2: right, y1: y(v), y2: y(v), class: "grid" }),
      svg("text", { x: PAD.left - 7, y: y(v) + 4, class: "tick end" }, number(v)));
  }
  out.append(svg("text", { x: PAD.left, y: 13, class: "axis-title" }, "V̂, chance of success (±1 standard error)"));
  if (r.mean !== null) {
    out.append(svg("line", { x1: PAD.left, x2: right, y1: y(r.mean), y2: y(r.mean), class: "mu" }));
  }

  // Each V̂ holds until the next state that was measured; the jump at a segment's end is its increment.
  let line = "", lastLabel = -Infinity;
  known.forEach((s, k) => {
    line += `${k ? "L" : "M"}${x(s.start)},${y(s.before)}H${x(s.end)}`;
    if (s.after === null) return;
    line += `V${y(s.after)}`;
    const at = x(s.end), final = k === known.length - 1;
    const jump = svg("line", { x1: at, x2: at, y1: y(s.before), y2: y(s.after),
      class: `jump ${s.increment < 0 ? "neg" : "pos"}${s.noise ? " noise" : ""}` });
    out.append(jump);
    if (at - Math.max(lastLabel, PAD.left + 10) > 46 && Math.abs(y(s.before) - y(s.after)) > 10 && !final) {
      lastLabel = at;
      out.append(svg("text", { x: at - 13, y: (y(s.before) + y(s.after)) / 2 + 4,
        class: `tick end increment ${s.increment < 0 ? "neg" : "pos"}` }, signed(s.increment)));
    }
  });
  out.append(svg("path", { d: line, class: "value" }));
  out.append(...ends(r, known, right, y));
  out.append(...entropyArea(r, x, bottom + PAD.gap, right));
  const every = roundStep(T / 6);
  for (let t = 0; t < T - every / 2; t += every) {
    out.append(svg("text", { x: x(t), y: height - 6, class: "tick middle" }, t));
  }
  out.append(svg("text", { x: right, y: height - 6, class: "tick middle strong" }, plural(r.length, "token")));

  const cursor = svg("line", { y1: PAD.top, y2: height - PAD.bottom, class: "cursor" });
  const hit = svg("rect", { x: PAD.left, y: PAD.top, width: right - PAD.left,
    height: height - PAD.top - PAD.bottom, class: "hit" });
  hit.addEventListener("pointermove", (e) => {
    const box = out.getBoundingClientRect();
    const t = ((e.clientX - box.left) * (width / box.width) - PAD.left) / (right - PAD.left);
    on.token(clamp(Math.floor(t * T), 0, T - 1));
  });
  out.append(cursor, hit);
  known.forEach((s) => out.append(...pivotMark(r, s, x, y, on)));
  return { node: out, point(t) {
    cursor.setAttribute("x1", x(t + 0.5));
    cursor.setAttribute("x2", x(t + 0.5));
  } };
}

// The least of 1, 2, 5, 10, 20, … that is not below `size`.
function roundStep(size) {
  const ten = 10 ** Math.floor(Math.log10(Math.max(1, size)));
  return [1, 2, 5, 10].find((k) => k * ten >= size) * ten;
}

// Labels at the right end: the reward and μ, kept apart.
function ends(r, known, right, y) {
  const parts = [];
  let mu = r.mean === null ? null : y(r.mean);
  if (r.reward !== null) {
    const at = y(r.reward);
    if (mu !== null && Math.abs(mu - at) < 15) mu = at + (mu < at ? -15 : 15);
    parts.push(svg("circle", { cx: right, cy: at, r: 6, class: `reward ${r.verdict}` }),
      svg("text", { x: right + 12, y: at + 4, class: "tick strong" }, `r = ${short(r.reward)} ${MARK[r.verdict] || ""}`));
  }
  if (mu !== null) parts.push(svg("text", { x: right + 12, y: mu + 4, class: "tick" }, `μ = ${number(r.mean)}`));
  if (!known.length) {
    parts.push(svg("text", { x: PAD.left + 10, y: PAD.top + 20, class: "tick" }, "No value was measured along this response"));
  }
  return parts;
}

function pivotMark(r, s, x, y, on) {
  if (!s.samples) return [];
  const number_ = r.segments.indexOf(s) + 1, cx = x(s.start), cy = y(s.before);
  const whisker = svg("path", { class: "error",
    d: `M${cx},${y(s.before - s.stderr)}V${y(s.before + s.stderr)}m-4,0h8M${cx - 4},${y(s.before - s.stderr)}h8` });
  const open = () => on.pivot(s.start, true);
  const mark = svg("g", { class: "pivot-mark", role: "button", tabindex: 0, "data-position": s.start,
    "aria-label": `Pivot ${number_} before token ${s.start}: value ${number(s.before)}, ${plural(s.samples, "continuation")}`,
    click: open, focus: () => on.pivot(s.start, false),
    keydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); open(); } } },
    svg("circle", { cx, cy, r: 9 }), svg("text", { x: cx, y: cy + 3.5 }, number_));
  return [whisker, mark];
}

// Entropy with one column a pixel at most, each as high as its highest token.
function entropyArea(r, x, top, right) {
  const entropy = r.tokens.entropy;
  const label = svg("text", { x: PAD.left, y: top - 6, class: "axis-title" }, "entropy, nats");
  if (!entropy) return [];
  const peak = Math.max(1e-9, entropy.reduce((m, h) => Math.max(m, h || 0), 0));
  const columns = Math.min(entropy.length, Math.floor(right - PAD.left));
  let d = `M${x(0)},${top + PAD.entropy}`;
  for (let c = 0; c < columns; c++) {
    const from = Math.floor((c * entropy.length) / columns), to = Math.floor(((c + 1) * entropy.length) / columns);
    let h = 0;
    for (let t = from; t < to; t++) h = Math.max(h, entropy[t] || 0);
    d += `L${x(from).toFixed(1)},${(top + (1 - h / peak) * PAD.entropy).toFixed(1)}H${x(to).toFixed(1)}`;
  }
  return [label, svg("path", { d: `${d}V${top + PAD.entropy}Z`, class: "entropy" }),
    svg("text", { x: PAD.left - 7, y: top + 9, class: "tick end" }, short(peak))];
}

// A response as one strip of credit less `base`, for a list.
function strip(r, base, scale) {
  const parts = r.strip.map(([start, end, value]) => {
    const { a, hue } = tintOf(value === null ? 0 : value - base, scale);
    return svg("rect", { x: start, y: 0, width: end - start, height: 1, class: `band ${hue}`, "--a": a });
  });
  const cuts = r.values.filter(([start, , , samples]) => samples && start).map(([start]) =>
    svg("line", { x1: start, x2: start, y1: 0, y2: 1, class: "cut" }));
  return svg("svg", { class: "strip", viewBox: `0 0 ${Math.max(1, r.length)} 1`, preserveAspectRatio: "none",
    "aria-hidden": "true" }, parts, cuts);
}
