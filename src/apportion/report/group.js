// The responses of one prompt side by side by progress, and above them all groups of the step.

VIEWS.group = { title: "Group", available: () => true, draw: drawGroupView };

const LANE = { height: 54, left: 14, pad: 9, rows: 60 };
const lanes = { sort: "reward", unit: "progress", mixed: false, watch: null, width: 0, most: 1 };
const SORTS = {
  reward: ["reward", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  row: ["row", () => 0],
  length: ["length", (a, b) => b.length - a.length],
  base: ["base advantage", (a, b) => (b.base ?? 0) - (a.base ?? 0)],
  continuations: ["continuations", (a, b) => (b.continuations ?? 0) - (a.continuations ?? 0)],
};
const NOTHING_TO_COMPARE = "Nothing to compare";

const percent = (x) => `${Math.round(100 * x)} %`;
const groupLink = (group, view = "group") => address({ view, step: state.step.step, row: group.rows[0] });
const responseLink = (r, token) => address({ view: "response", step: state.step.step, row: r.row, token });
// Rewards of 0 and 1 are wrong and right; others stand above or below the group's mean.
const isBinary = (members) => members.every((r) => r.verdict !== "partial");
const sideOf = (r, mean) => (r.reward === null || r.reward === mean ? 0 : r.reward > mean ? 1 : -1);

function drawGroupView() {
  const chosen = state.response && state.step.groups[state.response.group];
  const kept = $("group-table")?.scrollTop || 0;
  fill($("view-group"), el("section", { class: "groups", "aria-label": "All groups of the step" }, groupOverview()),
    chosen ? el("section", { class: "lanes-card", "aria-labelledby": "lanes-title" }, groupHead(chosen),
      el("div", { id: "lanes" })) : el("p", { class: "quiet" }, "No response of this step is in the page."));
  $("group-table").scrollTop = kept;
  showChosen();
  if (chosen) drawLanes();
}

// --- all groups of the step ---------------------------------------------------------------------------------

const groupsShown = () => state.step.groups.map((group, g) => ({ group, g }))
  .filter(({ group }) => !lanes.mixed || !group.collapsed);

function groupOverview() {
  const { groups } = state.step, mixed = groups.filter((group) => !group.collapsed).length;
  const binary = isBinary(state.step.responses);
  const toggle = el("input", { type: "checkbox", id: "mixed", checked: lanes.mixed, change: (e) => {
    lanes.mixed = e.target.checked;
    drawGroupView();
    $("mixed").focus();
  } });
  const head = ["group", "rewards", "μ", "pivots", "continuations"];
  lanes.most = Math.max(1, ...groups.map((group) => group.spent.continuations || 0));
  const body = el("tbody", { id: "group-rows", keydown: moveInGroups });
  const table = el("div", { id: "group-table", class: "group-table", scroll: () => moreGroups() },
    el("table", null, el("caption", null, `Groups of step ${state.step.step}`),
      el("thead", null, el("tr", null, head.map((name) => el("th", { scope: "col" }, name)))), body));
  const list = groupsShown();
  body.append(...list.slice(0, LANE.rows).map(groupRow));
  return [el("div", { class: "groups-bar" }, el("h2", null, `Step ${state.step.step}: ${plural(groups.length, "group")}`),
    el("label", null, toggle, binary ? " only groups with both right and wrong" : " only groups whose rewards differ",
      ` (${mixed} of ${groups.length})`)),
  list.length ? table : [el("p", { class: "quiet" }, "There is none."), table]];
}

function moreGroups(upTo = 0) {
  const body = $("group-rows"), box = $("group-table"), list = groupsShown();
  while (body.children.length < list.length &&
    (body.children.length <= upTo || box.scrollTop + box.clientHeight + 200 > box.scrollHeight)) {
    body.append(...list.slice(body.children.length, body.children.length + LANE.rows).map(groupRow));
  }
}

function showChosen() {
  const at = groupsShown().findIndex(({ g }) => g === state.response?.group);
  if (at < 0) return;
  moreGroups(at);
  const box = $("group-table"), row = $("group-rows").children[at];
  const top = row.offsetTop, above = box.querySelector("thead").offsetHeight;
  if (top - above < box.scrollTop) box.scrollTop = top - above;
  else if (top + row.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top + row.offsetHeight - box.clientHeight;
}

function groupRow({ group, g }) {
  const here = g === state.response?.group, members = responsesOf(g);
  const spent = group.spent, budget = group.budget;
  const label = groupLabel(group);
  const name = group.rows.length ? el("a", { href: groupLink(group), "aria-current": here ? "true" : null }, group.name)
    : el("span", { class: "quiet" }, `${group.name} (not in this page)`);
  return el("tr", { class: here ? "chosen" : "", click: (e) => {
    if (group.rows.length && !e.target.closest("a")) go({ view: "group", row: group.rows[0] }).catch(failed);
  } },
    el("th", { scope: "row" }, name),
    el("td", null, members.length ? tallyBar(members, group.mean) : plural(group.scored, "reward"),
      label ? el("strong", { class: "level" }, label) : null),
    el("td", null, number(group.mean)),
    el("td", null, spent.pivots),
    el("td", null, spent.continuations === null ? "not recorded" : [shareBar(spent.continuations, budget || lanes.most),
      budget === null ? spent.continuations : `${spent.continuations} of ${budget}`]));
}

const groupLabel = (group) => (!group.collapsed ? "" : group.scored < 2 ? NOTHING_TO_COMPARE : "σ = 0");

// ✓ and ✗ with their numbers, and a bar of both.
function tallyBar(members, mean) {
  const binary = isBinary(members);
  const kinds = binary ? ["correct", "wrong", "abstain"].map((v) => [v, MARK[v], members.filter((r) => r.verdict === v).length])
    : [["correct", "▲", 1], ["partial", "=", 0], ["wrong", "▼", -1]].map(([v, mark, side]) =>
      [v, mark, members.filter((r) => r.reward !== null && sideOf(r, mean) === side).length]);
  return [el("span", { class: "tally-bar", "aria-hidden": "true" }, kinds.filter(([, , n]) => n).map(([kind, , n]) =>
    el("i", { class: kind, "--n": n }))),
  kinds.filter(([, , n]) => n).map(([kind, mark, n]) => el("span", { class: "count" },
    el("span", { class: `verdict ${kind}`, "aria-hidden": "true" }, mark), n,
    el("span", { class: "unseen" }, ` ${binary ? { correct: "right", wrong: "wrong", abstain: "without a reward" }[kind]
      : { correct: "above the mean", partial: "at the mean", wrong: "below the mean" }[kind]} `)))];
}

const shareBar = (part, whole) => el("span", { class: "share", "aria-hidden": "true" },
  el("i", { "--w": whole ? clamp(part / whole, 0, 1).toFixed(3) : 0 }));

function moveInGroups(e) {
  const jump = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[e.key];
  if (!jump || e.target.tagName !== "A") return;
  e.preventDefault();
  if (e.key === "End") moreGroups(Infinity);
  const links = [...$("group-rows").querySelectorAll("a")], to = links.indexOf(e.target) + jump;
  links[clamp(to, 0, links.length - 1)].focus();
}

// --- the chosen group ---------------------------------------------------------------------------------------

function groupHead(group) {
  const members = responsesOf(state.response.group), { spent, budget } = group;
  const scored = members.find((r) => r.reward !== null && r.divisor !== null);
  const right = members.filter((r) => r.verdict === "correct").length;
  const facts = [["mean reward μ", number(group.mean)],
    ["divisor σ + ε", group.collapsed || !scored ? "–" : number(scored.divisor)],
    [isBinary(members) ? "right" : "reward 1", `${right} of ${group.scored}${group.scored ? `, ${percent(right / group.scored)}` : ""}`],
    ["pivots", spent.pivots],
    ["continuations", spent.continuations === null ? "not recorded" :
      `${spent.continuations}${budget === null ? "" : ` of ${budget} in the budget`}`],
    ["tokens of continuations", spent.tokens === null ? "not recorded" : spent.tokens.toLocaleString("en")]];
  return [el("h2", { id: "lanes-title" }, "Group ", el("bdi", null, group.name),
    el("small", null, ` ${plural(members.length, "response")} to one prompt`)),
  el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value)))),
  group.collapsed ? el("p", { class: "level-banner" }, el("strong", null, groupLabel(group)), ". ", levelWords(group)) : null,
  !group.collapsed && group.why ? el("p", { class: "why-banner" }, `No response has a pivot: ${group.why}.`) : null,
  el("details", { class: "prompt" }, el("summary", null, "Prompt and gold answer"),
    el("pre", { tabindex: 0, dir: "auto" }, group.prompt + (group.gold ? `\n\ngold answer: ${group.gold}` : "")))];
}

function levelWords(group) {
  const plain = group.scored < 2 ? `${group.scored ? "Only one response has" : "No response has"} a reward.`
    : "All rewards of this group are equal, so there is nothing to tell its responses apart by.";
  const told = group.why && !group.why.startsWith("σ = 0") && group.scored > 1 ? ` No pivot: ${group.why}.` : "";
  const spent = group.spent.continuations === 0 ? " No continuation was spent here." : "";
  return plain + told + spent;
}

// --- lanes --------------------------------------------------------------------------------------------------

const laneMembers = () => {
  const members = responsesOf(state.response.group);
  return [...members].sort((a, b) => SORTS[lanes.sort][1](a, b) || a.row - b.row);
};

// Where token t of a response stands on the shared axis, from 0 to 1.
const laneAxis = (members) => {
  const longest = Math.max(1, ...members.map((r) => r.length));
  return lanes.unit === "progress" ? (r, t) => t / Math.max(1, r.length) : (r, t) => t / longest;
};

function drawLanes() {
  const members = laneMembers(), group = state.step.groups[state.response.group], x = laneAxis(members);
  const all = members.reduce((sum, r) => sum + (r.continuations || 0), 0);
  const list = el("div", { class: "lane-list", role: "list", keydown: moveInLanes });
  fill($("lanes"), laneControls(), list);
  lanes.watch?.disconnect();
  lanes.watch = new IntersectionObserver((seen) => seen.filter((s) => s.isIntersecting).forEach((s) => {
    lanes.watch.unobserve(s.target);
    s.target.draw();
  }), { rootMargin: "600px" });
  let side = null;
  const apart = lanes.sort === "reward" && !group.collapsed;
  members.forEach((r, k) => {
    const now = r.reward === null ? null : sideOf(r, group.mean);
    if (apart && (!k || now !== side)) list.append(laneDivider(members, group, now));
    side = now;
    list.append(lane(r, group, x, all));
  });
  // Plots are drawn for the width that their column has got.
  const column = list.querySelector(".lane-plot");
  lanes.width = Math.max(160, Math.round(column?.clientWidth || 600));
  $("lanes").insertBefore(laneSummary(members, group, x), list);
  for (const node of list.querySelectorAll(".lane")) lanes.watch.observe(node);
}

function laneControls() {
  const choose = (field, value, words) => el("button", { type: "button", "data-pick": `${field}-${value}`,
    "aria-pressed": String(lanes[field] === value), click: () => {
      lanes[field] = value;
      drawLanes();
      document.querySelector(`[data-pick="${field}-${value}"]`).focus();
    } }, words);
  return el("div", { class: "lane-bar" },
    el("div", { role: "group", "aria-label": "Sort by" }, el("span", null, "Sort by "),
      Object.entries(SORTS).map(([value, [words]]) => choose("sort", value, words))),
    el("div", { role: "group", "aria-label": "Horizontal axis" }, el("span", null, "Axis "),
      choose("unit", "progress", "progress"), choose("unit", "tokens", "tokens")),
    el("p", { class: "keys" }, "↑ ↓ lane, → ← its pivots, Enter opens"));
}

function laneDivider(members, group, side) {
  const n = members.filter((r) => (r.reward === null ? null : sideOf(r, group.mean)) === side).length;
  const binary = isBinary(members);
  const words = side === null ? "without a reward" : side > 0 ? (binary ? "✓ right" : "▲ above the mean")
    : side < 0 ? (binary ? "✗ wrong" : "▼ below the mean") : "at the mean";
  return el("p", { class: "lane-side", role: "presentation" }, `${words}, ${n}`);
}

function lane(r, group, x, all) {
  const pivots = r.values.filter(([position, value, , samples]) => samples && position > 0 && value !== null);
  const spent = r.continuations === null ? "not recorded" : r.continuations;
  const share = r.continuations && all ? r.continuations / all : 0;
  const says = laneSays(r, pivots, share);
  const plot = el("div", { class: "lane-plot" });
  const node = el("div", { class: "lane", role: "listitem", "data-row": r.row },
    el("a", { class: "lane-name", href: responseLink(r), tabindex: r === state.response ? 0 : -1, "aria-label": says,
      title: "Open this response" }, el("b", null, `#${r.row}`), verdict(r.verdict),
      el("span", null, laneWord(r)), el("small", null, plural(r.length, "token"), r.finish === "length" ? " ✂ cut" : "",
        el("br"), ` base ${signed(r.base)}`)),
    plot,
    el("div", { class: "lane-end" }, el("span", { class: `end ${r.verdict}` }, MARK[r.verdict] || "·", ` r = ${short(r.reward)}`),
      el("span", { class: "spent", title: "Continuations sampled from states of this response, and their share of the group's" },
        shareBar(share, 1), ` ${spent}`, share ? el("small", null, ` ${percent(share)}`)
          : all && r.pivots && r.continuations === 0 ? el("small", null, " shared") : null)));
  node.draw = () => fill(plot, lanePlot(r, group, x, pivots),
    pivots.length || !r.why ? null : el("p", { class: "lane-why" }, el("b", null, "No pivot: "), r.why));
  return node;
}

const laneWord = (r) => (r.verdict === "partial" ? short(r.reward) : { correct: "right", wrong: "wrong", abstain: "no reward" }[r.verdict] || r.verdict);

function laneSays(r, pivots, share) {
  const line = pivots.map(([p, value]) => `${number(value)} at ${percent(p / Math.max(1, r.length))}`).join(", ");
  return `Response ${r.row}, ${laneWord(r)}, reward ${short(r.reward)}, ${plural(r.length, "token")}` +
    `${r.finish === "length" ? ", cut at the length limit" : ""}, base advantage ${signed(r.base)}, ` +
    (pivots.length ? `${plural(pivots.length, "pivot")}: value ${line}, ` : r.why ? `no pivot: ${r.why}, ` : "no pivot, ") +
    (r.continuations === null ? "continuations not recorded" : `${plural(r.continuations, "continuation")}` +
      (share ? `, ${percent(share)} of the group’s` : ""));
}

// The last value is followed by the reward where increments add up to it.
const endsAtReward = () => Object.keys(state.step.invariants).some((name) => name.split("/").pop() === "telescoping");
const laneRange = (r) => {
  const seen = [0, 1, r.reward, r.mean, ...r.values.map((v) => v[1])].filter((v) => v !== null);
  return [Math.min(...seen), Math.max(...seen)];
};

function lanePlot(r, group, x, pivots) {
  const W = lanes.width, H = LANE.height, [low, high] = laneRange(r);
  const at = (t) => LANE.left + x(r, t) * (W - LANE.left - LANE.pad);
  const y = (v) => LANE.pad + (1 - (v - low) / (high - low)) * (H - 2 * LANE.pad - 4);
  const base = state.tint === "moved" ? r.base : 0, scale = state.step.scale[state.tint];
  const out = svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "lane-svg" });
  for (const [start, end, value] of r.strip) {
    const { a, hue } = tintOf(value === null ? 0 : value - base, scale), width = Math.max(0.5, at(end) - at(start));
    out.append(svg("rect", { x: at(start), y: 2, width, height: H - 4, class: `band ${hue}`, "--a": a }),
      svg("line", { x1: at(start), x2: at(end), y1: H - 2, y2: H - 2, class: `edge ${hue}`, "--a": a }));
  }
  for (const v of [low, high]) {
    out.append(svg("line", { x1: at(0), x2: at(r.length), y1: y(v), y2: y(v), class: "grid" }),
      svg("text", { x: at(0) - 4, y: y(v) + 3.5, class: "lane-tick end" }, short(v)));
  }
  if (group.mean !== null) out.append(svg("line", { x1: at(0), x2: at(r.length), y1: y(group.mean), y2: y(group.mean), class: "lane-mu" }));
  const known = r.values.filter((v) => v[1] !== null);
  if (known.length) out.append(svg("path", { d: laneLine(r, known, at, y), class: "lane-value" }));
  if (r.reward !== null) out.append(laneEnd(r, at(r.length), y(r.reward)));
  pivots.forEach((pivot) => out.append(lanePivot(r, pivot, at, y)));
  return out;
}

function laneLine(r, known, at, y) {
  const steps = known.map(([position, value]) => `${at(position).toFixed(1)},${y(value).toFixed(1)}`);
  const after = endsAtReward() && r.reward !== null ? `V${y(r.reward).toFixed(1)}` : "";
  return `M${steps[0]}${known.slice(1).map(([position], k) => `H${at(position).toFixed(1)}L${steps[k + 1]}`).join("")}` +
    `H${at(r.length).toFixed(1)}${after}`;
}

// Right is a disc, wrong a cross, what lies between a ring.
function laneEnd(r, cx, cy) {
  if (r.verdict === "wrong") {
    return svg("path", { d: `M${cx - 5},${cy - 5}L${cx + 5},${cy + 5}M${cx + 5},${cy - 5}L${cx - 5},${cy + 5}`, class: "end-mark wrong" });
  }
  return svg("circle", { cx, cy, r: 5, class: `end-mark ${r.verdict}` });
}

function lanePivot(r, [position, value, stderr, samples], at, y) {
  const cx = at(position), cy = y(value);
  const open = (e) => {
    if (e.ctrlKey || e.metaKey || e.shiftKey) return;
    e.preventDefault();
    state.pivot = position;
    go({ view: "response", row: r.row, token: position, pivot: position }).catch(failed);
  };
  const words = `Pivot of response ${r.row} before token ${position}: value ${number(value)} ± ${number(stderr)}, ` +
    `${plural(samples, "continuation")}`;
  return svg("a", { class: "lane-pivot", href: responseLink(r, position), tabindex: -1, "aria-label": words, click: open },
    svg("title", null, words),
    stderr ? svg("path", { class: "lane-error", d: `M${cx},${y(value - stderr)}V${y(value + stderr)}` }) : null,
    svg("circle", { cx, cy, r: 11, class: "lane-target" }), svg("circle", { cx, cy, r: 4.5 }));
}

function moveInLanes(e) {
  const row = e.target.closest(".lane");
  if (!row || e.altKey || e.ctrlKey || e.metaKey) return;
  const along = { ArrowRight: 1, ArrowLeft: -1 }[e.key], jump = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[e.key];
  if (!along && !jump) return;
  e.preventDefault();
  if (along) {
    const stops = [row.querySelector(".lane-name"), ...row.querySelectorAll(".lane-pivot")];
    return stops[clamp(stops.indexOf(e.target.closest("a")) + along, 0, stops.length - 1)].focus();
  }
  const all = [...e.currentTarget.querySelectorAll(".lane")];
  const next = all[clamp(all.indexOf(row) + jump, 0, all.length - 1)].querySelector(".lane-name");
  for (const name of e.currentTarget.querySelectorAll(".lane-name")) name.tabIndex = name === next ? 0 : -1;
  next.focus();
}

// --- right and wrong on the way -----------------------------------------------------------------------------

// V̂ of a response at a place of the shared axis, before its reward; null where it has none or has ended.
function valueAlong(r, place, x) {
  if (place > x(r, r.length) + 1e-9) return null;
  let found = null;
  for (const [position, value] of r.values) {
    if (x(r, position) > place + 1e-9) break;
    found = value;
  }
  return found;
}

const meanOf = (values) => (values.length ? values.reduce((sum, v) => sum + v, 0) / values.length : null);

// Mean V̂ of right and of wrong responses on the lanes' own axis; the axis alone where nothing was measured.
function laneSummary(members, group, x) {
  const told = members.filter((r) => r.values.some(([p, v, , n]) => n && p > 0 && v !== null));
  const W = lanes.width, top = 8, bottom = told.length ? 92 : 0, H = bottom + 26;
  const longest = Math.max(1, ...members.map((r) => r.length)), byShare = lanes.unit === "progress";
  const at = (place) => LANE.left + place * (W - LANE.left - LANE.pad);
  const where = (place) => (byShare ? percent(place) : `token ${Math.round(place * longest)}`);
  const axis = [0, 0.25, 0.5, 0.75, 1].map((place) => svg("text", { x: at(place), y: H - 8,
    class: `lane-tick ${place === 0 ? "" : place === 1 ? "end" : "middle"}` }, byShare ? percent(place) : Math.round(place * longest)));
  if (!told.length) {
    return el("div", { class: "lane lane-summary", "aria-hidden": "true" }, el("span"),
      el("div", { class: "lane-plot" }, svg("svg", { viewBox: `0 0 ${W} ${H}` }, axis)), el("span"));
  }
  const sides = [1, -1].map((side) => told.filter((r) => sideOf(r, group.mean) === side));
  const places = Array.from({ length: 101 }, (_, k) => k / 100);
  const curves = sides.map((rows) => places.map((place) => meanOf(rows.map((r) => valueAlong(r, place, x)).filter((v) => v !== null))));
  const seen = [0, 1, ...curves.flat()].filter((v) => v !== null), low = Math.min(...seen), high = Math.max(...seen);
  const y = (v) => top + (1 - (v - low) / (high - low)) * (bottom - top);
  const names = isBinary(members) ? ["right", "wrong"] : ["above the mean", "below the mean"];
  const marks = isBinary(members) ? [MARK.correct, MARK.wrong] : ["▲", "▼"];
  const parting = widest(curves), lacking = names.filter((_, k) => !sides[k].length);
  // One response a side says nothing of its kind.
  const few = sides.some((rows) => rows.length < 2);
  const said = few && !lacking.length ? `${sides[0].length} ${names[0]} and ${sides[1].length} ${names[1]} have a pivot: too few to say where they part.` : lacking.length ? `No response that is ${lacking.join(" or ")} has a pivot, so there is nothing to compare here.`
    : parting === null ? "Their mean V̂ does not part before the rewards."
      : `They part most between ${where(parting.from)} and ${where(parting.to)}: ` +
        `the gap in mean V̂ goes from ${number(parting.before)} to ${number(parting.after)}.`;
  const out = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img",
    "aria-label": `Mean V̂ of responses with a pivot, ${names[0]} and ${names[1]}. ${said}` });
  if (parting && !few) out.append(svg("rect", { x: at(parting.from), y: top, width: at(parting.to) - at(parting.from), height: bottom - top, class: "parting" }));
  for (const v of [low, high]) {
    out.append(svg("line", { x1: at(0), x2: at(1), y1: y(v), y2: y(v), class: "grid" }),
      svg("text", { x: at(0) - 4, y: y(v) + 3.5, class: "lane-tick end" }, short(v)));
  }
  if (group.mean !== null) {
    out.append(svg("line", { x1: at(0), x2: at(1), y1: y(group.mean), y2: y(group.mean), class: "lane-mu" }),
      svg("text", { x: at(0) + 4, y: y(group.mean) - 4, class: "lane-tick" }, "μ"));
  }
  curves.forEach((curve, k) => {
    const points = curve.map((v, i) => [places[i], v]).filter((p) => p[1] !== null);
    if (points.length) out.append(svg("path", { class: `side ${k ? "wrong" : "correct"}`,
      d: points.map(([p, v], i) => `${i ? `H${at(p).toFixed(1)}V` : `M${at(p).toFixed(1)},`}${y(v).toFixed(1)}`).join("") }));
  });
  out.append(...axis);
  return el("figure", { class: "lane lane-summary" },
    el("figcaption", null, el("b", null, "Mean V̂"), el("small", null, "of responses with a pivot"),
      sides.map((rows, k) => el("span", { class: `side-key ${k ? "wrong" : "correct"}` }, `${marks[k]} ${names[k]} (${rows.length})`))),
    el("div", { class: "lane-plot" }, out), el("p", { class: "lane-end parting-words" }, said));
}

// The tenth of the axis in which the gap between both curves grows most; null where it never grows.
function widest([right, wrong]) {
  const gap = (k) => (right[k] === null || wrong[k] === null ? null : right[k] - wrong[k]);
  let best = null;
  for (let k = 0; k < 100; k += 10) {
    const before = gap(k), after = gap(k + 10);
    if (before === null || after === null) continue;
    if (after - before > 1e-9 && (!best || after - before > best.after - best.before)) {
      best = { from: k / 100, to: (k + 10) / 100, before, after };
    }
  }
  return best;
}

window.addEventListener("beforeprint", () => {
  if (state.view !== "group") return;
  if ($("group-rows")) moreGroups(Infinity);
  for (const node of document.querySelectorAll(".lane-list .lane")) node.draw();
});
new ResizeObserver(() => requestAnimationFrame(() => {
  const column = document.querySelector(".lane-list .lane-plot");
  if (state.view === "group" && column && Math.abs(Math.max(160, Math.round(column.clientWidth)) - lanes.width) > 1) drawLanes();
})).observe($("view-group"));
