// The same responses under several methods: a lane for each on one token axis, the text under two of them, how far
// every two agree over all responses, and where they differ most.
{
  const LANE = 46, LABEL = 132, VALUE = 92, GAP = 10, AXIS = 20; // px
  const SHADES = 6; // of a lane's tint

  // What is shown: the chunk of all responses, that of one, its lanes, the two methods, and the texts laid out.
  let all = null, own = null, chart = null, pair = null, texts = [];
  let turn = 0;

  VIEWS.methods = { title: "Methods", available: () => Boolean(index.compare), draw: async () => drawMethods() };

  const here = () => state.step.step === index.compare.step && state.detail;
  const names = () => all.methods.map((m) => m.name);
  const methodOf = (name) => all.methods.find((m) => m.name === name);
  const pairAt = (a, b) => all.pairs.findIndex((p) => (p.first === a && p.second === b) || (p.first === b && p.second === a));
  const rowOf = (row) => all.responses.find((r) => r.row === row);
  const at = (row, token) => address({ view: "methods", step: index.compare.step, row, token });

  async function drawMethods() {
    const mine = (turn += 1), { step } = index.compare, key = `compare-${step}`;
    const box = $("view-methods");
    const [summary, row] = await Promise.all([load(key), here() ? load(`${key}-row-${state.response.row}`).catch(() => null) : null]);
    if (mine !== turn) return;
    all = summary;
    own = row;
    if (!pair || !pair.every((name) => names().includes(name))) pair = firstPair();
    for (const text of texts) text.drop();
    texts = [];
    fill(box, el("div", { class: "compare" }, head(), own ? one() : elsewhere(),
      el("div", { class: `compare-more${names().length > 5 ? " many" : ""}` }, matrix(), furthest()), took()));
    if (own) lay();
  }

  // In the order in which they were asked for, the first two that both rank tokens.
  function firstPair() {
    const { first, second } = all.pairs.find((p) => p.rho.value !== null) || all.pairs[0];
    return [first, second];
  }

  const choose = (first, second) => {
    pair = [first, second];
    return drawMethods();
  };

  // --- choosing -----------------------------------------------------------------------------------------------

  function head() {
    const { step } = index.compare, p = all.pairs[pairAt(...pair)];
    const pick = (k, label) => el("label", null, `${label} `, el("select", { id: `compare-${k}`, change: (e) => {
      const other = pair[1 - k], chosen = e.target.value;
      const swapped = chosen === other ? pair[k] : other;
      choose(...(k ? [swapped, chosen] : [chosen, swapped])).then(() => $(`compare-${k}`).focus());
    } }, names().map((name) => el("option", { value: name, selected: name === pair[k] }, name))));
    return el("div", { class: "compare-head" },
      el("h2", null, `Step ${step} under ${plural(names().length, "method")}`),
      el("div", { class: "compare-pick" }, pick(0, "Compare"), pick(1, "with"), here() && own ? chooser(p) : null),
      el("p", { class: "reading" }, here() && own ? [farthest(p), " "] : null, sentence(p)));
  }

  function sentence(p) {
    const signs = `They give ${percent(p.sign.value)} of the tokens another sign (0 is a sign of its own), ${percent(p.opposite)} opposite ones.`;
    if (p.rho.value === null) return `Over the step, ${p.first} and ${p.second} have no rank correlation: ${p.rho.missing}. ${signs}`;
    const interval = p.rho.interval ? ` (95 % over prompts ${number(p.rho.interval[0])} … ${number(p.rho.interval[1])})` : "";
    const without = p.without ? ` In ${plural(p.without, "response")} one of the two is constant and ranks nothing.` : "";
    return `Over the step, ${p.first} and ${p.second} order the tokens of a response with a rank correlation of ${number(p.rho.value)}${interval}, ` +
      `the mean of ${plural(p.responses, "response")}. ${signs}${without}`;
  }

  // On the response at hand: the token where the two differ most, by rank where both vary, else by sign and size.
  function farthest(p) {
    const kept = trained();
    if (!kept.length) return null;
    const [a, b] = [p.first, p.second].map((name) => own[name].advantage);
    const size = (t) => (a[t] * b[t] < 0 ? 1e6 : 0) + Math.abs(a[t] - b[t]);
    const t = kept.reduce((most, each) => (size(each) > size(most) ? each : most));
    const words = state.detail.tokens.text[t].trim() || "a space";
    return [`On response ${state.response.row} they are farthest apart${a[t] * b[t] < 0 ? ", with opposite signs," : ""} at `,
      el("a", { href: at(state.response.row, t) }, `token ${t}`), ` “`, el("bdi", null, words), `”: ${p.first} ${figure(a[t])}, ${p.second} ${figure(b[t])}.`];
  }

  // Three decimals; what they would make 0, as short as it can be told.
  const figure = (a) => (a && Math.abs(a) < 5e-4 ? `${a > 0 ? "+" : ""}${short(a)}` : signed(a, 3));
  const hueOf = (a) => (a ? (a < 0 ? "neg" : "pos") : null);
  const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(share && share < 0.01 ? 1 : 0)} %`);

  // The responses, those on which the two agree least first.
  function chooser(p) {
    const k = all.pairs.indexOf(p), shown = new Map(state.step.responses.map((r) => [r.row, r]));
    const rows = all.responses.filter((r) => shown.has(r.row));
    rows.sort((a, b) => (a.rho[k] ?? 2) - (b.rho[k] ?? 2) || a.row - b.row);
    const now = rows.findIndex((r) => r.row === state.response.row);
    const to = (step, words) => el("button", { type: "button", disabled: !rows[now + step], id: step < 0 ? "compare-before" : "compare-after",
      title: step < 0 ? "The response on which they agree less" : "The response on which they agree more",
      click: () => go({ row: rows[now + step].row, token: 0 }).then(() => $(step < 0 ? "compare-before" : "compare-after").focus()) }, words);
    return el("span", { class: "compare-rows" }, el("label", null, "on response ",
      el("select", { id: "compare-row", change: (e) => go({ row: Number(e.target.value), token: 0 }).then(() => $("compare-row").focus()) },
        rows.map((r) => el("option", { value: r.row, selected: r.row === state.response.row },
          `${r.row} ${MARK[shown.get(r.row).verdict] || ""} · ρ ${number(r.rho[k])}`)))),
    to(-1, "‹ agree less"), to(1, "agree more ›"));
  }

  function elsewhere() {
    const { step } = index.compare;
    const there = index.steps.includes(step) && state.step.step !== step;
    return el("p", { class: "notice" }, there
      ? ["The methods were compared on another step. ", el("a", { href: address({ view: "methods", step }) }, `Go to step ${step}`)]
      : `This page does not hold the response; apportion inspect RUN --step ${step} --max-mb 100 makes one that does.`);
  }

  // --- one response -------------------------------------------------------------------------------------------

  function one() {
    const r = state.response;
    return el("article", { class: "compare-one" },
      el("h3", null, `Response ${r.row} `, verdict(r.verdict), el("small", null, ` reward ${short(r.reward)} · ${plural(r.length, "token")}`)),
      el("figure", { id: "compare-lanes", class: "cmp-lanes", tabindex: 0, role: "slider", "aria-valuemin": 0, "aria-orientation": "horizontal",
        "aria-valuemax": Math.max(0, r.length - 1), "aria-label": "Token, under every method", keydown: move }),
      el("p", { class: "quiet" }, "A bar above the line is a gain, below it a loss; its height, and the tint behind it, is the size on the ",
        el("b", null, "lane’s own scale"), ", whose end stands under the name: heights compare along a lane, not between lanes. ",
        "Between the first two: how far apart they rank a token, up to 1, upwards where ▲ ranks it higher; ",
        el("span", { class: "cmp-against" }, "marked"), " where their signs are opposite. ← → token, ↑ ↓ to the next change, Home, End."),
      el("div", { id: "compare-token", class: "card", "aria-live": "off" }),
      el("div", { class: "cmp-beside" }, pair.map((name, k) => el("section", null,
        el("h4", null, name, el("small", null, ` A from ${signed(extent(name)[0])} to ${signed(extent(name)[1])}`)),
        el("div", { class: "text", id: `compare-text-${k}`, dir: "auto", role: "group", "aria-label": `The response under ${name}` })))));
  }

  function extent(name) {
    const kept = trained().map((t) => own[name].advantage[t]);
    return kept.length ? [kept.reduce((m, a) => Math.min(m, a)), kept.reduce((m, a) => Math.max(m, a))] : [null, null];
  }

  function trained() {
    const gone = new Set(state.detail.tokens.masked);
    return state.detail.tokens.id.map((_, t) => t).filter((t) => !gone.has(t));
  }

  // [T] rank of each trained token from 0 to 1, equal values sharing the middle of their ranks; null where all are equal.
  function ranks(name) {
    const { advantage } = own[name], kept = trained();
    const order = [...kept].sort((a, b) => advantage[a] - advantage[b]), out = new Array(advantage.length).fill(null);
    if (order.length < 2 || advantage[order[0]] === advantage[order[order.length - 1]]) return null;
    for (let i = 0; i < order.length;) {
      let k = i;
      while (k + 1 < order.length && advantage[order[k + 1]] === advantage[order[i]]) k += 1;
      for (let j = i; j <= k; j++) out[order[j]] = (i + k) / 2 / (order.length - 1);
      i = k + 1;
    }
    return out;
  }

  // Draws what needs to know how wide it is.
  function lay() {
    const r = state.response, { tokens } = state.detail;
    chart = lanes(Math.max(420, Math.round($("compare-lanes").clientWidth)));
    fill($("compare-lanes"), chart.node);
    texts = pair.map((name, k) => {
      const box = $(`compare-text-${k}`), { advantage, segments } = own[name];
      const cut = (i) => el("span", { class: "cmp-mark", title: `Segment ${i + 1} of ${name}`, "aria-hidden": "true" });
      const laid = layText(box, { tokens, segments }, (t) => advantage[t], largest(name), () => -1, state.maths, { mark: cut, ended: r.finish === "stop" });
      const over = (e) => {
        const t = e.target.closest("[data-t]")?.dataset.t;
        if (t !== undefined) point(Number(t));
      };
      box.addEventListener("pointerover", over);
      box.addEventListener("click", over);
      return laid;
    });
    point(state.token);
  }

  // On paper every token has its colour.
  window.addEventListener("beforeprint", () => texts.forEach((text) => text.all()));

  const largest = (name) => Math.max(1e-12, ...extent(name).map((a) => Math.abs(a ?? 0)));

  let marked = [];

  // Moves the cursor: in the lanes, in both texts, and in words.
  function point(t) {
    const T = state.response.length;
    if (!T) return;
    state.token = t = clamp(t, 0, T - 1);
    chart.point(t);
    for (const node of marked) node?.classList.remove("here");
    marked = texts.map((text) => text.node(t));
    for (const node of marked) node?.classList.add("here");
    const words = state.detail.tokens.text[t], gone = state.detail.tokens.masked.includes(t);
    const shown = words === "" ? "(no text of its own)" : words.trim() === "" ? "white space" : `“${words}”`;
    const each = names().map((name) => `${name} ${figure(own[name].advantage[t])}`);
    const slider = $("compare-lanes");
    slider.setAttribute("aria-valuenow", t);
    slider.setAttribute("aria-valuetext", `Token ${t}, ${shown}${gone ? ", not trained" : ""}: ${each.join(", ")}`);
    fill($("compare-token"), el("b", null, `Token ${t} `), el("code", null, shown), gone ? " not trained" : "",
      names().map((name) => {
        const a = own[name].advantage[t], rank = chart.ranks.get(name)?.[t];
        return el("span", { class: pair.includes(name) ? "chosen" : null }, `${name} `, el("b", { class: hueOf(a) }, figure(a)),
          el("small", null, rank === null || rank === undefined ? "" : ` rank ${number(rank)}`));
      }));
  }

  function move(e) {
    const t = state.token, T = state.response.length;
    const change = (step) => {
      const same = (a, b) => names().every((name) => own[name].advantage[a] === own[name].advantage[b]);
      let k = t + step;
      while (k > 0 && k < T - 1 && same(k, t)) k += step;
      return k;
    };
    const to = { ArrowRight: () => t + 1, ArrowLeft: () => t - 1, ArrowDown: () => change(1), ArrowUp: () => change(-1),
      Home: () => 0, End: () => T - 1, PageDown: () => t + 10, PageUp: () => t - 10 }[e.key];
    if (!to || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    point(to());
  }

  // --- lanes --------------------------------------------------------------------------------------------------

  function lanes(width) {
    const T = Math.max(1, state.response.length), right = width - VALUE, by = new Map(names().map((name) => [name, ranks(name)]));
    const x = (t) => LABEL + (t / T) * (right - LABEL);
    const others = names().filter((name) => !pair.includes(name));
    const order = [pair[0], null, pair[1], ...others];
    const values = [], parts = [svg("defs", null, hatch("against-hatch"))];
    let top = 4;
    for (const [i, name] of order.entries()) {
      if (i === 3) top += GAP;
      parts.push(...(name === null ? gapLane(by, x, top, right) : lane(name, by.get(name), x, top, right)));
      const value = svg("text", { x: right + 8, y: top + LANE / 2 + 4, class: "cmp-value" });
      values.push([name, value]);
      parts.push(value);
      top += LANE + GAP;
    }
    const every = roundStep(T / 6);
    for (let t = 0; t < T - every / 2; t += every) parts.push(svg("text", { x: x(t), y: top + 8, class: "tick middle" }, t));
    parts.push(svg("text", { x: right, y: top + 8, class: "tick middle strong" }, plural(state.response.length, "token")));
    const cursor = svg("line", { y1: 0, y2: top - GAP / 2, class: "cursor" });
    const hit = svg("rect", { x: LABEL, y: 0, width: right - LABEL, height: top, class: "hit" });
    const node = svg("svg", { viewBox: `0 0 ${width} ${top + AXIS}`, "aria-hidden": "true" }, parts, cursor, hit);
    const follow = (e) => {
      const box = node.getBoundingClientRect();
      point(Math.floor((((e.clientX - box.left) * (width / box.width) - LABEL) / (right - LABEL)) * T));
    };
    hit.addEventListener("pointermove", follow);
    hit.addEventListener("pointerdown", follow);
    return { node, ranks: by, point(t) {
      cursor.setAttribute("x1", x(t + 0.5));
      cursor.setAttribute("x2", x(t + 0.5));
      for (const [name, value] of values) {
        const a = name === null ? apart(by, t) : own[name].advantage[t];
        value.textContent = name === null ? (a === null ? "–" : `${signed(a)} rank`) : figure(a);
        value.setAttribute("class", `cmp-value ${name === null ? "" : hueOf(a)}`);
      }
    } };
  }

  // Runs of tokens of one value: [start, end, value]; those that are not trained are in none.
  function runs(valueAt, T) {
    const gone = new Set(state.detail.tokens.masked), out = [];
    for (let t = 0; t < T; t++) {
      const value = gone.has(t) ? null : valueAt(t), last = out[out.length - 1];
      if (value === null) continue;
      if (last && last[1] === t && last[2] === value) last[1] = t + 1;
      else out.push([t, t + 1, value]);
    }
    return out;
  }

  const box = (x, start, end, y, height) =>
    `M${x(start).toFixed(1)},${y.toFixed(1)}H${x(end).toFixed(1)}v${height.toFixed(1)}H${x(start).toFixed(1)}Z`;

  function lane(name, rank, x, top, right) {
    const T = state.response.length, scale = largest(name), middle = top + LANE / 2;
    const tints = new Map(), bars = { pos: "", neg: "" };
    for (const [start, end, a] of runs((t) => own[name].advantage[t], T)) {
      const hue = a < 0 ? "neg" : "pos", size = Math.abs(a) / scale;
      const shade = `${hue} ${Math.ceil(size * SHADES)}`;
      tints.set(shade, (tints.get(shade) || "") + box(x, start, end, top, LANE));
      const height = Math.max(a ? 1 : 0, (size * LANE) / 2);
      bars[hue] += box(x, start, end, a < 0 ? middle : middle - height, height);
    }
    const cuts = own[name].segments.filter((s) => s.start > 0).map((s) => `M${x(s.start).toFixed(1)},${top}v${LANE}`).join("");
    return [
      svg("text", { x: 0, y: middle - 2, class: `cmp-name${pair.includes(name) ? " strong" : ""}` }, clip(name)),
      svg("text", { x: 0, y: middle + 14, class: "tick" }, rank ? `±${short(scale)}` : `constant ${signed(extent(name)[0])}`),
      svg("rect", { x: LABEL, y: top, width: right - LABEL, height: LANE, class: "cmp-lane" }),
      [...tints].map(([shade, d]) => svg("path", { d, class: `band ${shade.split(" ")[0]}`, "--a": (Number(shade.split(" ")[1]) / SHADES / 2).toFixed(3) })),
      svg("path", { d: bars.pos, class: "cmp-bar pos" }), svg("path", { d: bars.neg, class: "cmp-bar neg" }),
      svg("path", { d: cuts, class: "cmp-cut" }),
      svg("line", { x1: LABEL, x2: right, y1: middle, y2: middle, class: "cmp-zero" }),
    ].flat();
  }

  // The rank in the first method less that in the second; null where one of them ranks nothing.
  function apart(by, t) {
    const [a, b] = pair.map((name) => by.get(name)?.[t] ?? null);
    return a === null || b === null ? null : a - b;
  }

  function gapLane(by, x, top, right) {
    const T = state.response.length, middle = top + LANE / 2;
    let d = "", against = "";
    for (const [start, end, gap] of runs((t) => apart(by, t), T)) d += box(x, start, end, gap < 0 ? middle : middle - (gap * LANE) / 2, (Math.abs(gap) * LANE) / 2);
    const [a, b] = pair.map((name) => own[name].advantage);
    for (const [start, end, opposite] of runs((t) => (a[t] * b[t] < 0 ? 1 : null), T)) if (opposite) against += box(x, start, end, top, LANE);
    const ranked = pair.every((name) => by.get(name));
    return [
      svg("text", { x: 0, y: top + 11, class: "cmp-name" }, "rank apart"),
      ranked ? [svg("text", { x: 0, y: top + 27, class: "tick" }, `▲ ${clip(pair[0])}`), svg("text", { x: 0, y: top + 42, class: "tick" }, `▼ ${clip(pair[1])}`)]
        : svg("text", { x: 0, y: middle + 14, class: "tick" }, "one is constant"),
      svg("rect", { x: LABEL, y: top, width: right - LABEL, height: LANE, class: "cmp-lane apart" }),
      svg("path", { d: against, class: "cmp-against", fill: "url(#against-hatch)" }),
      svg("path", { d, class: "cmp-apart" }),
      svg("line", { x1: LABEL, x2: right, y1: middle, y2: middle, class: "cmp-zero" }),
    ].flat();
  }

  const clip = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);

  // --- tables -------------------------------------------------------------------------------------------------

  // Below the diagonal all responses, above it this one.
  function matrix() {
    const mine = own && rowOf(state.response.row), list = names();
    const cell = (i, k) => {
      if (i === k) return el("td", { class: "self" }, "–");
      const at_ = pairAt(list[i], list[k]), p = all.pairs[at_], one_ = k > i;
      const value = one_ ? (mine ? mine.rho[at_] : null) : p.rho.value, interval = one_ ? null : p.rho.interval;
      const a = value === null ? 0 : Math.abs(value), chosen = pair.includes(list[i]) && pair.includes(list[k]);
      const words = `${list[i]} with ${list[k]}${one_ ? ", this response" : ""}: ${value === null ? "no rank correlation" : number(value)}`;
      return el("td", { class: `cmp-rho ${value < 0 ? "neg" : "pos"}${chosen ? " chosen" : ""}${one_ ? " this" : ""}`, "--a": a.toFixed(3) },
        el("button", { type: "button", "aria-label": `${words}. Compare these two`, title: one_ ? words : `${words}; ${percent(p.sign.value)} of signs differ`,
          click: () => choose(list[i], list[k]) }, value === null ? "–" : signed(value),
        interval ? el("small", null, `${number(interval[0])} … ${number(interval[1])}`) : null));
    };
    return el("section", { class: "compare-matrix" }, el("h3", null, "Rank correlation of the token advantages"),
      el("p", { class: "quiet" }, "Spearman’s, inside a response. Below the diagonal: mean over all responses of the step, 95 % over prompts. ",
        own ? `Above it: response ${state.response.row} alone. ` : "", "Press a number to see the two."),
      el("div", { class: "cmp-wide", tabindex: 0, role: "region", "aria-label": "Rank correlations" }, el("table", null,
        el("thead", null, el("tr", null, el("td"), list.map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", null, list.map((name, i) => el("tr", null, el("th", { scope: "row" }, name), list.map((_, k) => (own || k <= i ? cell(i, k) : el("td")))))))));
  }

  function furthest() {
    const kept = new Set(state.step.step === index.compare.step ? state.step.responses.map((r) => r.row) : []);
    const rows = all.disagreements.map((d) => {
      const value = (name) => [`${name} `, el("b", { class: hueOf(d.advantage[name]) }, figure(d.advantage[name]))];
      const place = kept.has(d.row) || !kept.size
        ? el("a", { href: at(d.row, d.token), click: () => { pair = [d.high, d.low]; } }, `${d.row} · ${d.token}`) : `${d.row} · ${d.token}`;
      return el("tr", null, el("th", { scope: "row" }, place, d.alike ? el("small", null, ` +${d.alike}`) : null), el("td", { class: "snippet" }, d.snippet || "·"),
        el("td", null, number(d.gap)), el("td", null, value(d.high)), el("td", null, value(d.low)));
    });
    return el("section", { class: "compare-furthest" }, el("h3", null, "Where ranks differ most"),
      el("p", { class: "quiet" }, "Tokens side by side with the same values are one entry; +n: as many more responses open with the same tokens and differ alike."),
      rows.length ? el("div", { class: "cmp-wide scroll", tabindex: 0, role: "region", "aria-label": "Where ranks differ most" }, el("table", null,
        el("thead", null, el("tr", null, ["response · token", "text", "ranks apart", "highest", "lowest"].map((words) => el("th", { scope: "col" }, words)))),
        el("tbody", null, rows))) : el("p", null, "No token has two ranks to compare: in every response at least one of each two methods is constant, or they agree."));
  }

  // Where each method's credit is from, and what it took.
  function took() {
    const cost = (m, name) => (m.cost && m.cost[name] ? Math.round(m.cost[name]).toLocaleString("en") : "–");
    const settings = (m) => el("details", null, el("summary", null, plural(Object.keys(m.settings).length, "setting")),
      el("dl", null, Object.entries(m.settings).map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, typeof value === "string" ? value : JSON.stringify(value))))));
    return el("section", { class: "compare-took" }, el("h3", null, "Where each credit is from, and what it took"),
      el("div", { class: "cmp-wide", tabindex: 0, role: "region", "aria-label": "Where each credit is from" }, el("table", null,
        el("thead", null, el("tr", null, ["method", "credit", "tokens generated", "read forward", "backward", "seconds", "settings"].map((words) => el("th", { scope: "col" }, words)))),
        el("tbody", null, all.methods.map((m) => el("tr", null, el("th", { scope: "row" }, m.name), el("td", { class: "words" }, provenance(m)),
          ["generated", "forward", "backward"].map((name) => el("td", null, cost(m, name))),
          el("td", null, m.cost ? number(m.cost.seconds, 1) : "–"), el("td", { class: "words" }, settings(m))))))));
  }

  function provenance(m) {
    if (m.provenance === "recorded") {
      return `As the run was trained with.${m.reproduced === false ? " Today’s rules make another credit of its record, so the others may see another base than the run did." : ""}`;
    }
    const { reused, measured } = m.states;
    if (m.provenance === "assigned") return `Assigned from the record${reused ? `, with ${reused.toLocaleString("en")} of its measurements` : ""}.`;
    const part = reused ? ` ${reused.toLocaleString("en")} of ${(reused + measured).toLocaleString("en")} measurements are the record’s own.` : "";
    const own = m.statistics.filter((name) => name !== "ref_logprob");
    const filled = (own.length ? ` The record lacks ${own.join(" and ")}: those are this model’s.` : "") +
      (own.length < m.statistics.length ? " The reference is the model that the run started from." : "");
    if (!m.model) return `Judged by the run’s step verifier.${part}`;
    const gap = m.gap === null ? "; how far its log-probabilities are from the policy’s that wrote these responses is unknown, as none were recorded"
      : `, whose log-probabilities differ by ${short(m.gap.mean)} nats a token on average from the policy’s that wrote these responses`;
    return `Measured with ${m.model}${gap}.${part}${filled}`;
  }
}
