// The run: learning curves, what the time and the tokens went into, and the most extreme credits. Each part is drawn
// again only where what it shows has changed, so that a live page leaves alone what the reader has opened or sorted.

VIEWS.run = (() => {
  const AXIS = { step: "step", tokens: "generated tokens", seconds: "wall-clock seconds" };
  const SIZE = { advantage: "|A|", moved: "|A − base|" };
  const TOP = 40; // extreme credits that are listed
  const COLUMNS = [["rank", "#"], ["advantage", "A"], ["moved", "A − base"], ["start", "tokens"], ["snippet", "text"], ["step", "step"],
    ["row", "response"], ["group", "group"], ["verdict", "verdict"], ["base", "base"], ["why", "why"]];
  const plots = new Map(), shown = new Map();
  const chosen = { axis: "step", by: "advantage", column: "rank", down: false };
  let parts = null;

  // Whether what a part shows is not what it showed last.
  function fresh(part, ...values) {
    const key = JSON.stringify(values);
    if (shown.get(part) === key) return false;
    shown.set(part, key);
    return true;
  }

  const choice = (name, legend, options, pick) => el("fieldset", { class: "switch" }, el("legend", null, legend),
    Object.entries(options).map(([value, words]) => el("label", null, el("input", { type: "radio", name, value,
      checked: value === chosen[name], autocomplete: "off", change: () => { chosen[name] = value; pick(); } }), ` ${words}`)));

  function make() {
    parts = { summary: el("ul", { class: "summary" }), legend: el("ul", { class: "kinds" }), note: el("p", { class: "quiet" }), key: el("div", { class: "curves" }),
      rest: el("div", { class: "curves" }), restTitle: el("summary"), time: el("section"), tokens: el("section"),
      axis: choice("axis", "Over", AXIS, draw), head: el("tr"), body: el("tbody"), told: el("p", { class: "quiet" }) };
    parts.more = el("details", { class: "more", toggle: draw }, parts.restTitle, parts.rest);
    parts.by = choice("by", "Ranked by", SIZE, () => { Object.assign(chosen, { column: "rank", down: false }); draw(); });
    fill(parts.head, COLUMNS.map(([name, words]) => el("th", { scope: "col" },
      el("button", { type: "button", click: () => sort(name) }, words))));
    fill($("view-run"), el("section", { class: "panel" }, el("h2", null, "Learning curves"), parts.summary, parts.axis, parts.legend, parts.note, parts.key),
      el("div", { class: "panels" }, parts.time, parts.tokens), el("section", { class: "panel" }, parts.more),
      el("section", { class: "panel" }, el("h2", null, "Most extreme credits"), parts.by, parts.told,
        el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Most extreme credits" }, el("table", { class: "extremes" }, el("thead", null, parts.head), parts.body))));
    // The rest is made when it is opened or printed.
    window.addEventListener("beforeprint", () => { if (!$("view-run").hidden) { parts.more.open = true; draw(); } });
    new ResizeObserver(() => requestAnimationFrame(() => { if (!$("view-run").hidden) draw(); })).observe(parts.key);
  }

  function draw() {
    if (!parts) make();
    const { curves } = index;
    for (const input of parts.axis.querySelectorAll("input")) {
      input.disabled = !curves.axes[input.value];
      input.parentNode.title = input.disabled ? "not logged" : "";
    }
    const runs = curves.kinds.map(({ label, runs: own }) => [label, own]);
    if (fresh("legend", runs)) fill(parts.legend, curves.kinds.map((kind, k) => el("li", null, swatch(k), " ", el("b", null, kind.label),
      el("span", { class: "quiet" }, ` ${seedsOf(kind)}`))));
    if (fresh("summary", runs, curves.kinds.map(({ spent }) => spent), curves.curves.find(accuracy))) {
      fill(parts.summary, curves.kinds.map((kind, k) => el("li", null, ...summary(curves, kind, k))));
    }
    if (fresh("note", runs, curves.averaged)) parts.note.textContent = words(curves);
    const predicted = new Map(curves.curves.filter(({ name }) => name.startsWith("predicted/")).map((c) => [c.name.slice(10), c]));
    const drawn = curves.curves.filter(({ name }) => !name.startsWith("predicted/"));
    // Where none is known to matter most, all come first.
    const first = drawn.some(({ key }) => key) ? drawn.filter(({ key }) => key) : drawn;
    const rest = drawn.filter((curve) => !first.includes(curve));
    drawCurves("key", first, predicted);
    parts.more.hidden = !rest.length;
    parts.restTitle.textContent = plural(rest.length, "more metric");
    if (parts.more.open) drawCurves("rest", rest, predicted);
    if (fresh("time", runs, index.beside, curves.kinds.map(({ phases }) => phases))) drawTime(curves.kinds);
    if (fresh("tokens", runs, curves.kinds.map(({ spent }) => spent))) drawTokens(curves.kinds);
    if (fresh("extremes", index.extremes, chosen.by, chosen.column, chosen.down)) drawExtremes();
  }

  // --- in a sentence ----------------------------------------------------------------------------------------------

  const accuracy = ({ name }) => name === "evaluation/accuracy";

  // What a kind of run came to and what it took, each seed's end averaged.
  function summary(curves, kind, k) {
    const ends = (curves.curves.find(accuracy)?.kinds[k]?.runs || []).filter((y) => y?.length > 1).map((y) => [y[0], y[y.length - 1]]);
    const mean = (list) => list.reduce((sum, v) => sum + v, 0) / list.length;
    const of = (name) => kind.runs.map((run) => run[name]).filter((v) => v !== null && v !== undefined);
    const { rollouts, probes } = kind.spent || {}, seconds = of("seconds");
    const parts_ = [ends.length && `held-out accuracy ${number(mean(ends.map(([a]) => a)), 3)} → ${number(mean(ends.map(([, b]) => b)), 3)}`,
      of("step").length && `${short(mean(of("step")))} steps`,
      rollouts && `${short(rollouts + (probes || 0))} generated tokens${probes ? ` (${short(rollouts)} in rollouts, ${short(probes)} in probes)` : ""}`,
      seconds.length && `${short(mean(seconds))} s of training`].filter(Boolean);
    return [el("b", null, kind.label), `: ${parts_.join(", ")}; ${kind.runs.length === 1 ? "one seed" : `means of ${kind.runs.length} seeds`}.`];
  }

  // --- learning curves --------------------------------------------------------------------------------------------

  function seedsOf({ runs }) {
    const names = runs.map(({ name }) => name).join(", ");
    return runs.length === 1 ? `${names}, one seed: no interval` : `${runs.length} seeds: ${names}`;
  }

  function words(curves) {
    const several = curves.kinds.some(({ runs }) => runs.length > 1);
    const alone = curves.curves.some(({ kinds }) => kinds.some((kind) => kind?.wilson));
    const predicted = curves.curves.some(({ name }) => name.startsWith("predicted/"));
    return [
      several && "Thick: mean over seeds, thinner where some have ended; thin: each seed; band: 95 % interval over seeds (Student’s t).",
      alone && "Held-out accuracy of one seed has Wilson’s 95 % interval over its responses.",
      several && "Over tokens and wall-clock each seed is interpolated, where all have got.",
      curves.averaged && "Long runs are drawn as averages of consecutive steps; the last step is its own.",
      curves.axes.seconds && "Wall-clock is training alone, without evaluations.",
      predicted && "Dotted: what was predicted before the run.", "The vertical line is the step you look at.",
    ].filter(Boolean).join(" ");
  }

  // One kind's part of a curve on an axis, as plot.js takes it; null where it is not there.
  function lineOf(curve, kind, k, axis) {
    const found = curve?.kinds[k], grid = kind.grids[curve?.grid];
    if (!found) return null;
    const seeds = found.runs.map((y, i) => ({ x: grid.runs[i][axis], y })).filter(({ x, y }) => x?.length && y);
    if (!found.mean) return seeds.length ? { label: kind.label, several: false, ...seeds[0], ...found.wilson, seeds: [] } : null;
    const x = grid.mean[axis], mean = found.mean[axis];
    return x?.length && mean ? { label: kind.label, several: true, x, y: mean.mean, low: mean.low, high: mean.high, n: mean.n, seeds } : null;
  }

  // Where the page's own run is at the step that is looked at.
  function placeOf(curve, kind, axis) {
    const grid = kind.grids[curve.grid].runs[0], y = curve.kinds[0]?.runs[0], step = state.step?.step;
    if (step === undefined || !grid.step?.length || !grid[axis] || !y) return null;
    const x = axis === "step" ? step : between({ x: grid.step, at: grid[axis] }, "at", step);
    if (x === null || x < grid[axis][0] || x > grid[axis][grid[axis].length - 1]) return null;
    return { x, y: between({ x: grid.step, y }, "y", step) };
  }

  function drawCurves(part, curves, predicted) {
    const { axis } = chosen, { kinds } = index.curves, box = parts[part];
    const names = curves.map(({ name }) => name);
    for (const curve of curves) {
      if (!plots.has(curve.name)) plots.set(curve.name, makePlot(curve.title, curve.name));
    }
    if (fresh(`${part} names`, names)) fill(box, names.length ? names.map((name) => plots.get(name).node) : el("p", { class: "quiet" }, "No metrics were logged."));
    const width = Math.round(box.firstElementChild.clientWidth) || 380;
    for (const curve of curves) {
      const lines = kinds.map((kind, k) => {
        const line = lineOf(curve, kind, k, axis), told = line && lineOf(predicted.get(curve.name), kind, k, axis);
        return line && { ...line, told: told && { x: told.x, y: told.y } };
      });
      const spec = { lines, unit: curve.unit, axis: AXIS[axis], width, here: placeOf(curve, kinds[0], axis),
        apart: curve.grid === "evaluation" };
      if (fresh(`curve ${curve.name}`, spec)) plots.get(curve.name).update(spec);
    }
  }

  // --- time and tokens --------------------------------------------------------------------------------------------

  // A bar for each kind, all on one scale, with a piece for each part.
  function bars(kinds, partsOf, names, unit) {
    const totals = kinds.map((kind) => names.reduce((sum, name) => sum + (partsOf(kind)[name] || 0), 0)), top = Math.max(...totals);
    return el("div", { class: "bars", "aria-hidden": "true" }, kinds.map((kind, k) => [el("span", { class: "bar-name" }, swatch(k), " ", kind.label),
      el("div", { class: "stack" }, names.map((name, i) => {
        const value = partsOf(kind)[name] || 0, share = top ? value / top : 0;
        return value ? el("span", { class: `piece p${i % 6}`, "--share": share, title: `${name} ${unit(value)}` }, share > 0.13 ? name : "") : null;
      }), el("span", { class: "whole" }, unit(totals[k])))]));
  }

  const seconds = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(3)} s`);
  const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
  const besides = (name, value) => (value !== null && name.startsWith("memory/") ? `${(value / 1e9).toFixed(3)} GB`
    : name.startsWith("seconds") ? seconds(value) : count(value));
  const key = (i) => el("span", { class: `piece key p${i % 6}`, "aria-hidden": "true" });

  function drawTime(kinds) {
    const { steps, rows } = index.beside, names = [...new Set(kinds.flatMap(({ phases }) => Object.keys(phases)))];
    parts.time.hidden = !rows.length && !names.length;
    const predicted = rows.some((row) => row.predicted !== null), more = kinds.length > 1 || kinds[0].runs.length > 1;
    const all = predicted ? "seconds, predicted phases" : "seconds, all phases";
    const head = [steps === 1 ? "the only step" : `a step, median of ${steps}`, "measured", ...(predicted ? ["predicted", "predicted / measured"] : []),
      ...(more ? kinds.map(({ label }) => label) : [])];
    const line = ({ name, measured, predicted: told, ratio }) => {
      const phase = name.startsWith("seconds/") ? name.slice(8) : null, i = names.indexOf(phase);
      return el("tr", null, el("th", { scope: "row" }, i < 0 ? null : key(i), phase || (name === "seconds" ? all : name)),
        el("td", null, besides(name, measured)), predicted ? [el("td", null, besides(name, told)), el("td", null, number(ratio))] : null,
        more ? kinds.map(({ phases }) => el("td", null, phase ? seconds(phases[phase])
          : name === "seconds" && !predicted ? seconds(Object.values(phases).reduce((a, b) => a + b, 0)) : "")) : null);
    };
    // Phases that only other kinds have.
    const others = names.filter((phase) => !rows.some(({ name }) => name === `seconds/${phase}`))
      .map((phase) => ({ name: `seconds/${phase}`, measured: null, predicted: null, ratio: null }));
    fill(parts.time, el("h2", null, predicted ? "Seconds by phase, predicted beside measured" : "Seconds by phase"),
      bars(kinds, ({ phases }) => phases, names, seconds),
      el("div", { class: "wide" }, el("table", { class: "figures" }, el("thead", null, el("tr", null, head.map((h) => el("th", { scope: "col" }, h)))),
        el("tbody", null, [...rows, ...others].map(line)))),
      el("p", { class: "quiet" }, `Measured: this run, ${index.name}. `, more ? "By kind: mean over seeds of their medians, as in the bars. " : "",
        predicted ? "Predicted from the configuration and the machine, before the run." : "No cost was predicted for this run; its log says why."));
  }

  function drawTokens(kinds) {
    const known = kinds.filter(({ spent }) => spent.rollouts !== undefined);
    parts.tokens.hidden = !known.length;
    fill(parts.tokens, el("h2", null, "Generated tokens of a whole run"), bars(kinds, ({ spent }) => spent, ["rollouts", "probes"], count),
      el("div", { class: "wide" }, el("table", { class: "figures" }, el("thead", null, el("tr", null,
        ["", "rollouts", "probes", "probes / rollouts"].map((h, i) => el("th", { scope: "col" }, i > 0 && i < 3 ? key(i - 1) : null, h)))),
      el("tbody", null, kinds.map(({ label, spent }) => el("tr", null, el("th", { scope: "row" }, label), el("td", null, count(spent.rollouts)),
        el("td", null, count(spent.probes)), el("td", null, number(spent.rollouts ? (spent.probes || 0) / spent.rollouts : null))))))),
      el("p", { class: "quiet" }, kinds.some(({ runs }) => runs.length > 1) ? "Means over seeds." : ""));
  }

  // --- extreme credits --------------------------------------------------------------------------------------------

  function sort(column) {
    Object.assign(chosen, { column, down: chosen.column === column && !chosen.down });
    draw();
  }

  function drawExtremes() {
    const { by, column, down } = chosen, size = (e) => (e[by] === null ? Infinity : Math.abs(e[by]));
    const rows = index.extremes.filter((e) => e.by.includes(by))
      .sort((a, b) => size(b) - size(a) || b.end - b.start - (a.end - a.start) || b.step - a.step).slice(0, TOP).map((e, i) => ({ ...e, rank: i + 1 }));
    const order = (a, b) => (a === null) - (b === null) || (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
    rows.sort((a, b) => (down ? -1 : 1) * order(a[column], b[column]) || a.rank - b.rank);
    COLUMNS.forEach(([name], i) => parts.head.children[i].setAttribute("aria-sort", name !== column ? "none" : down ? "descending" : "ascending"));
    parts.told.textContent = rows.length ? `The ${rows.length} largest ${SIZE[by]} of the last recorded steps, at most two of a response; adjacent tokens of equal advantage are one entry.`
      : by === "moved" && index.extremes.length ? "The method moved no credit away from the base advantage." : "No credit was recorded, or all of it is 0.";
    const tone = (v) => el("td", { class: v === null || Math.abs(v) < 0.005 ? "quiet" : v < 0 ? "neg" : "pos" }, v === null ? "not finite" : signed(v));
    const snippet = (text) => el("td", { class: "snippet" }, el("bdi", null, text));
    fill(parts.body, rows.map((e) => el("tr", null, el("td", null, e.rank), tone(e.advantage), tone(e.moved),
      el("td", null, el("a", { href: address({ view: "response", step: e.step, row: e.row, token: e.start }) },
        e.end - e.start === 1 ? `token ${e.start}` : `tokens ${e.start}–${e.end - 1}`)),
      snippet(e.snippet), el("td", null, e.step), el("td", null, e.row), snippet(e.group),
      el("td", null, verdict(e.verdict), ` ${e.verdict}`), el("td", null, signed(e.base)), el("td", { class: "reason" }, e.why || ""))));
  }

  return { title: "Run", available: () => true, draw: async () => draw() };
})();
