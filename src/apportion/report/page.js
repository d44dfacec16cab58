// The page: state, and one function for each part that draws it. Only the chosen response has elements.

const data = JSON.parse($("data").textContent);
for (const step of data.steps) for (const r of step.responses) r.tokens.masked = new Set(r.tokens.masked);
const state = { step: null, response: null, token: 0, pivot: null, tint: "advantage" };
let chart = null;

const responsesOf = (group) => state.step.responses.filter((r) => r.group === group);
const creditAt = (r) => (t) =>
  r.tokens.masked.has(t) ? 0 : r.tokens.advantage[t] - (state.tint === "moved" ? r.base : 0);
const scaleNow = () => state.step.scale[state.tint];
// The response whose advantage differs most along its tokens.
const mostTold = (rows) => rows.reduce((best, r) => (r.spread > best.spread ? r : best), rows[0]);
const segmentOf = (r, t) => r.segments.findIndex((s) => s.start <= t && t < s.end);

// --- choosing -----------------------------------------------------------------------------------------------

function chooseStep(number_, row) {
  state.step = data.steps.find((s) => s.step === number_) || data.steps[data.steps.length - 1];
  $("step").value = state.step.step;
  const groups = [...new Set(state.step.responses.map((r) => r.group))].sort((a, b) => a - b);
  fill($("group"), ...groups.map((g) => {
    const group = state.step.groups[g];
    const note = group.collapsed ? "σ = 0" : `μ ${number(group.mean)}`;
    return el("option", { value: g }, `${group.name} · ${note}`);
  }));
  const rows = state.step.responses;
  const widest = mostTold(rows);
  drawScale();
  drawInvariants();
  drawMetrics();
  if (rows.length) chooseResponse(rows.find((r) => r.row === row) || widest);
  else fill($("response-title"), "No responses were recorded in this step");
}

function chooseResponse(r) {
  state.response = r;
  state.token = 0;
  state.pivot = null;
  $("group").value = r.group;
  history.replaceState(null, "", `#step=${state.step.step}&row=${r.row}`);
  drawList();
  drawResponse();
}

function drawList() {
  const r = state.response, group = state.step.groups[r.group], members = responsesOf(r.group);
  fill($("group-note"), 
    el("span", null, `μ ${number(group.mean)}`),
    el("span", null, group.collapsed ? "" : `σ + ε ${number(r.divisor)}`),
    el("span", null, plural(members.reduce((n, m) => n + m.pivots, 0), "pivot")),
    group.collapsed ? el("strong", { class: "flat" }, "σ = 0: rewards are equal, nothing to compare") : null);
  $("prompt").textContent = group.prompt + (group.gold ? `\n\ngold answer: ${group.gold}` : "");
  fill($("list"), 
    el("div", { class: "row head", "aria-hidden": "true" },
      ["#", "r", "tokens", "pivots", "base A"].map((name) => el("span", null, name))),
    members.map((m) => el("div", {
      class: "row", role: "option", id: `row-${m.row}`, "aria-selected": String(m === r),
      "aria-label": `Response ${m.row}, ${m.verdict}, reward ${number(m.reward)}, ${m.length} tokens, ` +
        `${plural(m.pivots, "pivot")}, base advantage ${signed(m.base)}`,
      click: () => chooseResponse(m),
    }, el("span", null, m.row), el("span", null, verdict(m.verdict), m.verdict === "partial" ? short(m.reward) : ""),
      el("span", null, m.length, m.finish === "length" ? el("i", { title: "cut at the length limit" }, "✂") : ""),
      el("span", null, m.pivots), el("span", null, signed(m.base)), strip(m, creditAt(m), scaleNow()))));
  $("list").setAttribute("aria-activedescendant", `row-${r.row}`);
}

function moveInList(e) {
  const jump = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[e.key];
  if (!jump) return;
  e.preventDefault();
  const members = responsesOf(state.response.group);
  chooseResponse(members[clamp(members.indexOf(state.response) + jump, 0, members.length - 1)]);
  $(`row-${state.response.row}`).scrollIntoView({ block: "nearest" });
}

// --- the response -------------------------------------------------------------------------------------------

function drawResponse() {
  const r = state.response;
  fill($("response-title"), `Response ${r.row} `, verdict(r.verdict),
    el("small", null, `reward ${short(r.reward)} · ${plural(r.length, "token")} · ${plural(r.pivots, "pivot")} · ` +
      `base advantage ${signed(r.base)}${r.finish === "length" ? " · cut at the length limit" : ""}`));
  $("reading").textContent = r.reading;
  drawChart();
  drawText();
  drawSegments();
  fill($("checks"), ...r.checks.map((c) => check(`${c.name}: ${number(c.got, 4)} = ${number(c.expected, 4)}`, c.error)));
  drawToken(state.token);
  drawPivot();
}

function drawChart() {
  const r = state.response, width = Math.max(320, Math.round($("chart").clientWidth));
  chart = valueChart(r, creditAt(r), scaleNow(), width, { token: point, pivot: choosePivot });
  fill($("chart"), chart.node);
  chart.point(state.token);
}

function drawText() {
  const r = state.response, credit = creditAt(r), scale = scaleNow(), masked = r.tokens.masked;
  const starts = new Map(r.segments.map((s, k) => [s.start, k]));
  const parts = document.createDocumentFragment();
  r.tokens.text.forEach((text, t) => {
    if (starts.has(t)) parts.append(segmentMark(r, starts.get(t)));
    const value = masked.has(t) ? 0 : credit(t), { a, hue } = tintOf(value, scale);
    const breaks = text !== "" && text.trim() === "" && text.includes("\n");
    const kind = text === "" ? (t === r.length - 1 && r.finish === "stop" ? "eos" : "inner") : breaks ? "break" : "";
    parts.append(el("span", { class: `t ${hue} ${kind}${masked.has(t) ? " masked" : ""}`, id: `t${t}`,
      tabindex: t === state.token ? 0 : -1, "aria-describedby": "token", "--a": a }, text));
  });
  fill($("text"), parts);
  placeGutter();
}

const tag = (s) => [el("span", { class: "change" }, `${number(s.before)} → ${number(s.after)}`),
  el("b", { class: `${s.increment < 0 ? "neg" : "pos"}${s.noise ? " hatched" : ""}` }, signed(s.increment)),
  el("span", { class: "se" }, `± ${number(s.increment_stderr)}`)];

// In the text a number where a segment starts; on narrow screens and on paper its values stand there too.
function segmentMark(r, k) {
  const s = r.segments[k];
  const label = `Segment ${k + 1}: value ${number(s.before)} to ${number(s.after)}, ${signed(s.increment)} ` +
    `± ${number(s.increment_stderr)}${s.noise ? ", within one standard error" : ""}`;
  return el("button", { class: "mark", type: "button", title: label, "aria-label": label,
    click: () => choosePivot(s.start, true) }, el("span", { class: "n" }, k + 1), el("span", { class: "label" }, tag(s)));
}

// Brackets and labels beside the text, at the lines where their segments stand; a label never covers another.
function placeGutter() {
  const r = state.response, origin = $("text").getBoundingClientRect().top;
  let free = 0;
  const parts = r.segments.flatMap((s, k) => {
    const first = $(`t${s.start}`).getBoundingClientRect(), last = $(`t${s.end - 1}`).getClientRects();
    const top = first.top - origin, bottom = last[last.length - 1].bottom - origin, at = Math.max(top - 2, free);
    free = at + 26;
    const { a, hue } = tintOf(creditAt(r)(s.start), scaleNow());
    const place = (node, y, height) => {
      node.style.top = `${y}px`;
      if (height) node.style.height = `${height}px`;
      return node;
    };
    return [place(el("div", { class: `bracket ${hue}`, "--a": a }), top, Math.max(8, bottom - top)),
      place(el("div", { class: "seg", click: () => choosePivot(s.start, true) }, el("span", { class: "n" }, k + 1), tag(s)), at)];
  });
  fill($("gutter"), ...parts);
  $("text").style.minHeight = `${free}px`;
}

function drawSegments() {
  const r = state.response;
  if (!r.segments.length) return fill($("segments"));
  const head = ["", "tokens", "text", "V̂ before → after", "increment ± SE", "continuations", "A"];
  fill($("segments"), el("details", { open: r.segments.length <= 12 }, el("summary", null, "Segments"),
    el("table", null, el("thead", null, el("tr", null, head.map((h) => el("th", { scope: "col" }, h)))),
      el("tbody", null, r.segments.map((s, k) => el("tr", null, el("th", { scope: "row" }, k + 1),
        el("td", null, `${s.start}–${s.end - 1}`), el("td", { class: "snippet" }, el("bdi", null, s.snippet)),
        el("td", null, `${number(s.before)} → ${number(s.after)}`),
        el("td", { class: s.noise ? "hatched" : "" }, `${signed(s.increment)} ± ${number(s.increment_stderr)}`,
          s.noise ? el("em", null, " noise?") : ""),
        el("td", null, s.samples ? el("button", { type: "button", click: () => choosePivot(s.start, true) }, s.samples)
          : "known"),
        el("td", null, signed(r.tokens.advantage[s.start]))))))));
}

// --- details ------------------------------------------------------------------------------------------------

function point(t) {
  if (t === state.shown) return;
  drawToken(t);
}

function drawToken(t) {
  const r = state.response, k = r.tokens, s = segmentOf(r, t);
  document.querySelector(".t.here")?.classList.remove("here");
  $(`t${t}`)?.classList.add("here");
  chart.point(t);
  state.shown = t;
  if (!r.length) return fill($("token"), el("h3", null, "Empty response"));
  const at = (name, digits) => (k[name] ? number(k[name][t], digits) : "–");
  const A = k.advantage[t], off = k.masked.has(t);
  const rows = [["position", `${t} of ${r.length}`], ["token id", k.id[t]],
    ["segment", s < 0 ? "–" : `${s + 1} of ${r.segments.length}`], ["entropy", `${at("entropy", 3)} nats`],
    ["old log-prob", `${at("logprob", 3)}${k.logprob && !off ? `  (p ${number(Math.exp(k.logprob[t]), 3)})` : ""}`]];
  const sum = [["base", signed(r.base, 3)], ...(k.weight ? [["× weight", at("weight", 3)]] : []),
    ["+ residual", k.residual ? signed(k.residual[t], 3) : "0"]];
  fill($("token"), 
    el("h3", null, "Token ", el("code", { class: "glyph" }, el("bdi", null, glyph(k.text[t])))),
    el("dl", null, rows.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value)))),
    el("dl", { class: "sum" }, sum.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))),
      el("div", { class: `total ${A < 0 ? "neg" : "pos"}` }, el("dt", null, "= advantage A"), el("dd", null, signed(A, 3)))),
    off ? el("p", { class: "quiet" }, "Masked: this token is not trained.") : null);
}

const glyph = (text) => (text === "" ? "(no text: end or part of a character)" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +$/, (m) => "␣".repeat(m.length)));

function choosePivot(position, move) {
  state.pivot = position;
  drawPivot();
  if (move) $("pivot").focus({ preventScroll: window.matchMedia("(min-width: 1100px)").matches });
}

function drawPivot() {
  const r = state.response, best = r.segments.filter((s) => s.samples);
  if (state.pivot === null && best.length) {
    const decisive = r.segments.reduce((a, b) => (Math.abs(b.increment) > Math.abs(a.increment) ? b : a));
    state.pivot = (decisive.samples ? decisive : best[0]).start;
  }
  for (const mark of document.querySelectorAll(".pivot-mark")) {
    mark.classList.toggle("chosen", Number(mark.dataset.position) === state.pivot);
  }
  const k = r.segments.findIndex((s) => s.start === state.pivot), s = r.segments[k];
  const found = s && r.continuations[String(s.start)];
  if (!s) return fill($("pivot"), el("h3", null, "No pivot here"), el("p", { class: "quiet" },
    "No continuation was sampled inside this response."));
  if (!s.samples) return fill($("pivot"), el("h3", null, `Start of segment ${k + 1}`), el("p", { class: "quiet" },
    `Its value ${number(s.before)} is known and not measured: ${s.start ? "no continuation" : "the group’s mean reward μ"}.`));
  const lead = r.tokens.text.slice(Math.max(0, s.start - 40), s.start).join("").trimEnd().split("\n").pop();
  const agree = s.stderr === 0 ? el("p", { class: "quiet" },
    `All ${s.samples} agree, so no spread was seen. That is not the same as no doubt.`) : null;
  const shared = found && found.row !== r.row ? el("p", { class: "quiet" },
    `Measured on response ${found.row}, which opens with the same tokens.`) : null;
  fill($("pivot"), 
    el("h3", null, `Pivot ${k + 1}`, el("small", null, ` before token ${s.start}`)),
    found ? el("p", { class: "tally", "aria-hidden": "true" }, found.items.map((c) => verdict(c.verdict))) : null,
    el("p", null, `Mean of ${plural(s.samples, "continuation")} `, el("b", null, number(s.raw)),
      s.raw === s.before ? "" : [", shrunk to ", el("b", null, number(s.before))], ` ± ${number(s.stderr)}`), agree, shared,
    el("p", { class: "lead" }, el("bdi", null, `…${lead}`), " ▸"),
    found ? el("ol", { class: "continuations" }, alike(found.items).map(({ c, times }) => el("li", { class: c.verdict },
      el("header", null, verdict(c.verdict), ` ${c.verdict}`, c.verdict === "partial" ? ` ${short(c.reward)}` : "",
        times > 1 ? el("b", null, ` ×${times}`) : "",
        { length: " · cut", decided: " · ended as decided" }[c.finish] ?? "", c.rescued ? " · rescued" : ""),
      el("pre", { dir: "auto" }, c.text.trim() === "" ? "(nothing more)" : c.text))))
      : el("p", { class: "quiet" }, "Its continuations are not in the run folder."));
}

// Continuations that say the same are shown once with their number; the rarer verdicts are not buried.
function alike(items) {
  const kinds = new Map();
  for (const c of items) {
    const key = JSON.stringify([c.text, c.verdict, c.reward, c.finish, c.rescued]);
    if (!kinds.has(key)) kinds.set(key, { c, times: 0 });
    kinds.get(key).times += 1;
  }
  return [...kinds.values()];
}

// --- the step and the run -----------------------------------------------------------------------------------

const check = (text, error) => {
  const good = error <= 1e-4;
  return el("li", { class: good ? "good" : "bad" }, good ? "✓ " : "✗ ", text, el("small", null, ` error ${short(error)}`));
};

function drawInvariants() {
  const found = Object.entries(state.step.invariants);
  fill($("invariants"), el("h3", null, "Laws, largest error of the step"),
    found.length ? el("ul", { class: "checks" }, found.map(([name, error]) => check(data.invariant_names[name] || name, error)))
      : el("p", { class: "quiet" }, "This method declares none."),
    el("p", { class: "quiet" }, Object.entries(state.step.counts).map(([name, n]) => `${name.replaceAll("_", " ")} ${n}`).join(" · ")));
}

function drawScale() {
  const top = scaleNow();
  const cells = Array.from({ length: 21 }, (_, i) => (i - 10) / 10).map((v) => {
    const { a, hue } = tintOf(v, 1);
    return el("span", { class: `t ${hue}`, "--a": a, "aria-hidden": "true" }, "\u00a0");
  });
  fill($("scale"), el("span", null, `−${short(top)}`), el("span", { class: "cells" }, cells), el("span", null, `+${short(top)}`),
    el("small", null, "saturates at the step’s 99th percentile"));
}

const FIRST = ["reward", "credit/acr", "p99", "probe/ratio"];
function drawMetrics() {
  const { step, series } = data.metrics;
  const rank = (name) => { const i = FIRST.findIndex((word) => name.includes(word)); return i < 0 ? FIRST.length : i; };
  const names = Object.keys(series).filter((n) => !n.startsWith("predicted/")).sort((a, b) => rank(a) - rank(b));
  const draw = (list) => list.map((n) => metricChart(n, step, series[n], state.step.step, series[`predicted/${n}`]));
  const main = names.filter((name) => rank(name) < FIRST.length).slice(0, 8), rest = names.filter((n) => !main.includes(n));
  const open = $("metrics").querySelector("details")?.open;
  fill($("metrics"), ...draw(main.length ? main : rest),
    ...(main.length && rest.length ? [el("details", { open }, el("summary", null, plural(rest.length, "more metric")),
      el("div", { class: "metrics" }, draw(rest)))] : []));
  if (!names.length) fill($("metrics"), el("p", { class: "quiet" }, "No metrics were logged."));
}

// --- keyboard and pointer -----------------------------------------------------------------------------------

function focusToken(t) {
  $(`t${state.token}`)?.setAttribute("tabindex", -1);
  state.token = clamp(t, 0, state.response.length - 1);
  const node = $(`t${state.token}`);
  node?.setAttribute("tabindex", 0);
  node?.focus();
}

function moveInText(e) {
  if (!e.target.classList.contains("t")) return;
  const r = state.response, t = state.token, k = Math.max(0, segmentOf(r, t));
  const pieces = r.segments.length ? r.segments : [{ start: 0 }];
  const to = { ArrowRight: t + 1, ArrowLeft: t - 1, Home: 0, End: r.length - 1,
    ArrowDown: (pieces[k + 1] || { start: r.length - 1 }).start,
    ArrowUp: t > pieces[k].start ? pieces[k].start : (pieces[k - 1] || pieces[0]).start }[e.key];
  if (to !== undefined) { e.preventDefault(); focusToken(to); }
  if (e.key === "Enter" && r.segments[k]) choosePivot(r.segments[k].start, true);
}

const tokenOf = (e) => (e.target.classList?.contains("t") ? Number(e.target.id.slice(1)) : null);
$("text").addEventListener("pointerover", (e) => { const t = tokenOf(e); if (t !== null) point(t); });
$("text").addEventListener("pointerleave", () => point(state.token));
$("text").addEventListener("focusin", (e) => { const t = tokenOf(e); if (t !== null) { state.token = t; point(t); } });
$("text").addEventListener("click", (e) => { const t = tokenOf(e); if (t !== null) focusToken(t); });
$("text").addEventListener("keydown", moveInText);
$("list").addEventListener("keydown", moveInList);
$("step").addEventListener("change", (e) => chooseStep(Number(e.target.value)));
$("group").addEventListener("change", (e) => {
  const members = responsesOf(Number(e.target.value));
  chooseResponse(mostTold(members));
});
for (const radio of document.getElementsByName("tint")) {
  radio.addEventListener("change", () => { state.tint = radio.value; drawScale(); drawList(); drawChart(); drawText(); drawPivot(); });
}

function start() {
  const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const step = asked.step === undefined ? data.start.step : Number(asked.step);
  chooseStep(step, asked.row === undefined ? data.start.row : Number(asked.row));
}

fill($("step"), ...data.steps.map((s) => el("option", { value: s.step }, s.step)));
start();
window.addEventListener("hashchange", start);
window.addEventListener("beforeprint", () => { for (const d of document.querySelectorAll("main details")) d.open = true; });
// Width decides where lines break and how long the chart is.
let width = $("response").clientWidth;
new ResizeObserver(() => requestAnimationFrame(() => {
  if ($("response").clientWidth === width) return;
  width = $("response").clientWidth;
  drawChart();
  placeGutter();
  drawPivot();
})).observe($("response"));
