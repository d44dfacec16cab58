// What is beside a response: the token and the pivot that the reader is at, the laws of the step.

function point(t) {
  if (t === state.shown) return;
  // On narrow screens the card stands over the text, from when it is first asked for.
  document.body.dataset.pointed = "";
  drawToken(t);
}

let pointed = null;
function drawToken(t) {
  const r = state.response, { tokens: k, segments } = state.detail, s = segmentOf(t);
  pointed?.classList.remove("here");
  pointed = laid.node(t);
  pointed?.classList.add("here");
  chart.point(t);
  state.shown = t;
  if (!r.length) return fill($("token"), el("h3", null, "Empty response"));
  const at = (name, digits) => (k[name] ? number(k[name][t], digits) : "–");
  const A = k.advantage[t], off = k.masked.includes(t);
  const rows = [["of", plural(r.length, "token")], ["token id", k.id[t]],
    ["segment", s < 0 ? "–" : `${s + 1} of ${segments.length}`], ["entropy", `${at("entropy", 3)} nats`],
    ["old log-prob", `${at("logprob", 3)}${k.logprob && k.logprob[t] !== null && !off ? `  (p ${number(Math.exp(k.logprob[t]), 3)})` : ""}`]];
  const sum = [["base", signed(r.base, 3)], ...(k.weight ? [["× weight", at("weight", 3)]] : []),
    ["+ residual", k.residual ? signed(k.residual[t], 3) : "0"]];
  fill($("token"), 
    el("h3", null, `Token ${t} `, el("code", { class: "glyph" }, "“", el("bdi", null, glyph(k.text[t])), "”")),
    el("dl", null, rows.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value)))),
    el("dl", { class: "sum" }, sum.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))),
      el("div", { class: `total ${A < 0 ? "neg" : "pos"}` }, el("dt", null, "= advantage A"), el("dd", null, signed(A, 3)))),
    off ? el("p", { class: "quiet" }, "Masked: this token is not trained.") : null);
}

const glyph = (text) => (text === "" ? "(no text: end or part of a character)" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +$/, (m) => "␣".repeat(m.length)));

function choosePivot(position, move) {
  state.pivot = position;
  remember("replaceState", placeNow());
  drawPivot();
  if (move) $("pivot").focus({ preventScroll: window.matchMedia("(min-width: 1100px)").matches });
}

function drawPivot() {
  const r = state.response, { segments, continuations, tokens } = state.detail, best = segments.filter((s) => s.samples);
  if (state.pivot === null && best.length) {
    const decisive = segments.reduce((a, b) => (Math.abs(b.increment) > Math.abs(a.increment) ? b : a));
    state.pivot = (decisive.samples ? decisive : best[0]).start;
  }
  for (const mark of document.querySelectorAll(".pivot-mark")) {
    mark.classList.toggle("chosen", Number(mark.dataset.position) === state.pivot);
  }
  const k = segments.findIndex((s) => s.start === state.pivot), s = segments[k];
  const found = s && continuations[String(s.start)];
  if (!s) return fill($("pivot"), el("h3", null, "No pivot here"), el("p", { class: "quiet" },
    "No continuation was sampled inside this response."));
  if (!s.samples) return fill($("pivot"), el("h3", null, `Start of segment ${k + 1}`), el("p", { class: "quiet" },
    s.start ? `Its value ${number(s.before)} was not measured by continuations.`
      : `Its value ${number(s.before)} is μ, the mean reward of the group’s ${plural(state.step.groups[r.group].scored, "response")}, as the method has it; ` +
        "no continuation was sampled there."));
  const lead = tokens.text.slice(Math.max(0, s.start - 40), s.start).join("").trimEnd().split("\n").pop();
  const [least, most] = s.chance;
  const agree = least === null ? null : el("p", { class: "quiet" },
    `Before this token the chance of success lies between ${number(least)} and ${number(most)} (95 %, Wilson)` +
    `${s.raw === 0 || s.raw === 1 ? "; that all agree is no certainty." : "."}`);
  const shared = found && found.row !== r.row ? el("p", { class: "quiet" },
    `Measured on response ${found.row}, which opens with the same tokens.`) : null;
  fill($("pivot"), 
    el("h3", null, `Pivot ${k + 1}`, el("small", null, ` before token ${s.start}`)),
    found ? el("p", { class: "tally", "aria-hidden": "true" }, found.items.map((c) => verdict(c.verdict))) : null,
    el("p", null, `Mean of ${plural(s.samples, "continuation")} `, el("b", null, number(s.raw)),
      s.raw === s.before ? "" : [", shrunk towards μ to ", el("b", null, number(s.before))], ` ± ${number(s.stderr)}`), agree, shared,
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

const check = (text, error) => {
  const good = error !== null && error <= 1e-4;
  return el("li", { class: good ? "good" : "bad" }, good ? "✓ " : "✗ ", text, el("small", null, ` error ${short(error)}`));
};

function drawInvariants() {
  const found = Object.entries(state.step.invariants);
  fill($("invariants"), el("h3", null, "Laws, largest error of the step"),
    found.length ? el("ul", { class: "checks" }, found.map(([name, error]) => check(Object.hasOwn(state.step.laws, name) ? state.step.laws[name] : name, error)))
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
    el("small", null, state.own ? "saturates at this response’s largest" : "saturates at the step’s 99th percentile"));
}


// --- keyboard and pointer -----------------------------------------------------------------------------------

// One token of the text is in the tab order: the one the reader is at, however he came there.
function standAt(t) {
  const before = laid.node(state.token);
  if (before) before.tabIndex = -1;
  state.token = clamp(t, 0, state.response.length - 1);
  const node = laid.node(state.token);
  if (node) node.tabIndex = 0;
  return node;
}

const focusToken = (t) => standAt(t)?.focus();

function moveInText(e) {
  if (!e.target.classList.contains("t")) return;
  const r = state.response, { segments } = state.detail, t = state.token, k = Math.max(0, segmentOf(t));
  const pieces = segments.length ? segments : [{ start: 0 }];
  const to = { ArrowRight: t + 1, ArrowLeft: t - 1, Home: 0, End: r.length - 1,
    ArrowDown: (pieces[k + 1] || { start: r.length - 1 }).start,
    ArrowUp: t > pieces[k].start ? pieces[k].start : (pieces[k - 1] || pieces[0]).start }[e.key];
  if (to !== undefined) { e.preventDefault(); focusToken(to); }
  if (e.key === "Enter" && segments[k]) choosePivot(segments[k].start, true);
}

// Of a token that a formula shares with the words beside it, those words answer too.
function tokenOf(e) {
  const { t, of } = e.target.dataset || {};
  return (t ?? of) === undefined ? null : Number(t ?? of);
}

function listen() {
  $("text").addEventListener("pointerover", (e) => { const t = tokenOf(e); if (t !== null) point(t); });
  $("text").addEventListener("pointerleave", () => point(state.token));
  $("text").addEventListener("focusin", (e) => { const t = tokenOf(e); if (t !== null) { standAt(t); point(t); } });
  $("text").addEventListener("click", (e) => { const t = tokenOf(e); if (t !== null) focusToken(t); });
  $("text").addEventListener("keydown", moveInText);
  $("list").addEventListener("keydown", moveInList);
  $("pivot").addEventListener("keydown", (e) => { if (e.key === "Escape" && state.pivot !== null) focusToken(state.pivot); });
  $("step").addEventListener("change", (e) => go({ step: Number(e.target.value) }).catch(failed));
  $("group").addEventListener("change", (e) => go({ row: mostTold(responsesOf(Number(e.target.value))).row }).catch(failed));
  $("row").addEventListener("change", (e) => chooseRow(e.target));
  $("maths").addEventListener("change", (e) => { state.maths = e.target.checked; drawText(); drawToken(state.token); });
  for (const radio of document.getElementsByName("tint")) {
    radio.addEventListener("change", () => { state.tint = radio.value; drawResponseView(); });
  }
  $("own").addEventListener("change", (e) => { state.own = e.target.checked; drawResponseView(); });
  // Width decides where lines break and how long the chart is; formulas that are set make a text longer.
  let width = 0, height = 0;
  new ResizeObserver(() => requestAnimationFrame(() => {
    const now = [$("response").clientWidth, $("text").clientHeight];
    if (!state.detail || !now[0]) return;
    if (now[0] !== width) { drawChart(); drawPivot(); }
    if (now[0] !== width || now[1] !== height) placeGutter();
    [width, height] = now;
  })).observe($("text"));
  window.addEventListener("beforeprint", () => {
    laid?.all();
    for (const d of document.querySelectorAll("main details")) d.open = true;
  });
}

function chooseRow(input) {
  const rows = state.step.responses.map((r) => r.row), row = Number(input.value);
  const there = input.value !== "" && rows.includes(row);
  input.setCustomValidity(there ? "" : `No response ${input.value} in this step: ${Math.min(...rows)} to ${Math.max(...rows)}`);
  input.reportValidity();
  if (there) go({ row }).catch(failed);
}
