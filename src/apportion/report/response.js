// One response: which, its value along the way, its text with the credit on it, its segments, a token, a pivot.

let chart = null, laid = null;

VIEWS.response = { title: "Response", available: () => true, draw: drawResponseView };

const creditAt = () => {
  const { advantage, masked } = state.detail.tokens, gone = new Set(masked);
  const base = state.tint === "moved" ? state.response.base : 0;
  return (t) => (gone.has(t) ? 0 : advantage[t] - base);
};
// The largest credit of the response itself, or what the step's colours saturate at.
function scaleNow() {
  const { low, high, base } = state.response ?? {}, less = state.tint === "moved" ? base : 0;
  return (state.own && Math.max(Math.abs(low - less), Math.abs(high - less))) || state.step.scale[state.tint];
}
const segmentOf = (t) => segmentAt(state.detail.segments, t);

function drawResponseView() {
  drawScale();
  drawInvariants();
  drawChooser();
  if (state.detail) drawResponse();
  else {
    fill($("response-title"), "No responses were recorded in this step");
    for (const id of ["reading", "chart", "text", "gutter", "segments", "checks", "token", "pivot"]) fill($(id));
  }
}

// --- choosing -----------------------------------------------------------------------------------------------

function drawChooser() {
  const { step, response: r } = state;
  $("step").value = step.step;
  fill($("group"), step.groups.map((group, g) => (group.rows.length ? el("option", { value: g },
    `${group.name} · ${group.collapsed ? "σ = 0" : `μ ${number(group.mean)}`}`) : null)));
  fill($("group-note"));
  fill($("list"));
  if (!r) return;
  $("group").value = r.group;
  $("row").value = r.row;
  $("row").setCustomValidity("");
  const group = step.groups[r.group], members = responsesOf(r.group);
  fill($("group-note"),
    el("span", null, `μ ${number(group.mean)}`),
    el("span", null, group.collapsed ? "" : `σ + ε ${number(r.divisor)}`),
    el("span", null, `${plural(group.spent.pivots, "state")} probed`),
    group.collapsed ? el("strong", { class: "flat" }, "σ = 0: rewards are equal, nothing to compare") : null);
  $("prompt").closest("details").open ||= group.prompt.length < 400;
  $("prompt").textContent = group.prompt + (group.gold ? `\n\ngold answer: ${group.gold}` : "");
  fill($("list"),
    el("div", { class: "row head", "aria-hidden": "true" },
      ["#", "r", "tokens", "pivots", "base A"].map((name) => el("span", null, name))),
    members.map((m) => el("div", {
      class: "row", role: "option", id: `row-${m.row}`, "aria-selected": String(m === r),
      "aria-label": `Response ${m.row}, ${m.verdict}, reward ${number(m.reward)}, ${m.length} tokens, ` +
        `${plural(m.pivots, "pivot")}, base advantage ${signed(m.base)}`,
      click: () => go({ row: m.row }).catch(failed),
    }, el("span", null, m.row), el("span", null, verdict(m.verdict), m.verdict === "partial" ? short(m.reward) : ""),
      el("span", null, m.length, m.finish === "length" ? el("i", { title: "cut at the length limit" }, "✂") : ""),
      el("span", null, m.pivots), el("span", null, signed(m.base)),
      strip(m, state.tint === "moved" ? m.base : 0, scaleNow()))));
  $("list").setAttribute("aria-activedescendant", `row-${r.row}`);
}

async function moveInList(e) {
  const jump = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[e.key];
  if (!jump || !state.response) return;
  e.preventDefault();
  const members = responsesOf(state.response.group);
  const { row } = members[clamp(members.indexOf(state.response) + jump, 0, members.length - 1)];
  // Walking down a list leaves no trail of places to come back to.
  await go({ row, how: "replaceState" }).catch(failed);
  $(`row-${state.response.row}`).scrollIntoView({ block: "nearest" });
}

// --- the response -------------------------------------------------------------------------------------------

function drawResponse() {
  const r = state.response, { checks } = state.detail;
  fill($("response-title"), `Response ${r.row} `, verdict(r.verdict),
    el("small", null, `reward ${short(r.reward)} · ${plural(r.length, "token")} · ${plural(r.pivots, "pivot")} · ` +
      `base advantage ${signed(r.base)}${r.finish === "length" ? " · cut at the length limit" : ""} · ` +
      `step ${state.step.step}, group ${state.step.groups[r.group].name}`));
  fill($("reading"), r.reading, r.pivots || !r.why || r.reading.includes(r.why.split(":")[0]) ? null : el("span", { class: "quiet" }, ` Why no pivot: ${r.why}.`));
  drawChart();
  drawText();
  drawSegments();
  fill($("checks"), checks.map((c) => check(`${c.name}: ${number(c.got, 4)} = ${number(c.expected, 4)}`, c.error)));
  drawToken(state.token);
  drawPivot();
}

function drawChart() {
  const width = Math.max(320, Math.round($("chart").clientWidth));
  chart = valueChart({ ...state.response, ...state.detail }, creditAt(), scaleNow(), width, { token: point, pivot: choosePivot });
  fill($("chart"), chart.node);
  chart.point(state.token);
}

function drawText() {
  laid?.drop();
  laid = layText($("text"), state.detail, creditAt(), scaleNow(), () => state.token, state.maths,
    { mark: segmentMark, ended: state.response.finish === "stop" });
  placeGutter();
}

const tag = (s) => [el("span", { class: "change" }, `${number(s.before)} → ${number(s.after)}`),
  el("b", { class: `${s.increment < 0 ? "neg" : "pos"}${s.noise ? " hatched" : ""}` }, signed(s.increment)),
  el("span", { class: "se" }, `± ${number(s.increment_stderr)}`)];

// In the text a number where a segment starts; on narrow screens and on paper its values stand there too.
function segmentMark(k) {
  const s = state.detail.segments[k];
  const label = `Segment ${k + 1}: value ${number(s.before)} to ${number(s.after)}, ${signed(s.increment)} ` +
    `± ${number(s.increment_stderr)}${s.noise ? ", within one standard error" : ""}`;
  return el("button", { class: "mark", type: "button", title: label, "aria-label": label,
    click: () => choosePivot(s.start, true) }, el("span", { class: "n" }, k + 1), el("span", { class: "label" }, tag(s)));
}

// Brackets and labels beside the text, at the lines where their segments stand; a label never covers another.
function placeGutter() {
  const { segments } = state.detail, credit = creditAt(), scale = scaleNow();
  const box = $("text").getBoundingClientRect(), rects = laid.marks.map((mark) => mark.getBoundingClientRect());
  let free = 0;
  const parts = segments.flatMap((s, k) => {
    if (!rects[k]) return []; // it opens where another one does, or behind the text
    const top = rects[k].top - box.top, next = rects.slice(k + 1).find(Boolean);
    // A segment ends above the line on which the next one opens, unless that one opens in the middle of it.
    const end = !next ? box.bottom : next.left - box.left < 40 ? next.top : next.bottom;
    const at = Math.max(top - 2, free), { a, hue } = tintOf(credit(s.start), scale);
    free = at + 26;
    const place = (node, y, height) => {
      node.style.top = `${y}px`;
      if (height) node.style.height = `${height}px`;
      return node;
    };
    return [place(el("div", { class: `bracket ${hue}`, "--a": a }), top, Math.max(8, end - box.top - top - 4)),
      place(el("div", { class: "seg", click: () => choosePivot(s.start, true) }, el("span", { class: "n" }, k + 1), tag(s)), at)];
  });
  fill($("gutter"), ...parts);
  $("gutter").style.minHeight = `${free}px`;
}

function drawSegments() {
  const { segments, tokens } = state.detail;
  if (!segments.length) return fill($("segments"));
  const head = ["", "tokens", "text", "V̂ before → after", "increment ± SE", "continuations before it", "A"];
  const ruined = segments.reduce((worst, s) => (Math.abs(s.increment) > Math.abs(worst.increment) ? s : worst));
  fill($("segments"), el("details", { open: segments.length <= 12 }, el("summary", null, "Segments"),
    el("table", null, el("thead", null, el("tr", null, head.map((h) => el("th", { scope: "col" }, h)))),
      el("tbody", null, segments.map((s, k) => el("tr", { class: s === ruined ? "most" : "", click: () => choosePivot(s.start) }, el("th", { scope: "row" }, k + 1),
        el("td", null, `${s.start}–${s.end - 1}`), el("td", { class: "snippet" }, el("bdi", null, s.snippet)),
        el("td", null, `${number(s.before)} → ${number(s.after)}`),
        el("td", { class: s.noise ? "hatched" : "" }, `${signed(s.increment)} ± ${number(s.increment_stderr)}`,
          s.noise ? el("em", null, " noise?") : ""),
        el("td", null, s.samples ? el("button", { type: "button", click: () => choosePivot(s.start, true) }, s.samples)
          : s.start ? "–" : "μ"),
        el("td", null, signed(tokens.advantage[s.start]))))))));
}

