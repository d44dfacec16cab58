// The page: its views, its address, and going from one place to another. Everything is drawn from `state`.

let ticket = 0;

// Goes to a view, step, row and token; what is not named stays. The last call wins.
async function go({ view = state.view, step = state.step?.step, row, token, pivot = null, how = "pushState" }) {
  const mine = (ticket += 1);
  const last = index.steps[index.steps.length - 1];
  const number_ = index.steps.includes(step) ? step : last;
  const chunk = state.step?.step === number_ ? state.step : await load(`step-${number_}`);
  const rows = chunk.responses;
  const here = chunk === state.step ? state.response : null;
  const response = rows.find((r) => r.row === row) || here || (rows.length ? mostTold(rows) : null);
  const detail = response === state.response ? state.detail : response && await load(`step-${number_}-row-${response.row}`);
  if (mine !== ticket) return;
  const moved = response !== state.response, before = state.step && placeNow();
  Object.assign(state, { view: Object.hasOwn(VIEWS, view) && VIEWS[view].available() ? view : "response", step: chunk, response, detail });
  if (moved || pivot !== null) Object.assign(state, { token: 0, pivot });
  if (token !== undefined) state.token = clamp(token, 0, Math.max(0, (response?.length || 1) - 1));
  // Another view, step or response is a place to come back to.
  remember(placeNow() === before || !before ? "replaceState" : how, placeNow());
  await draw();
  if (token !== undefined && state.view === "response" && detail) laid.node(state.token)?.scrollIntoView({ block: "center" });
}

async function draw() {
  drawHeader();
  for (const name of Object.keys(VIEWS)) $(`view-${name}`).hidden = name !== state.view;
  document.body.dataset.view = state.view;
  await VIEWS[state.view].draw();
}

function drawHeader() {
  const { step } = state, at = { step: step.step, row: state.response?.row };
  $("name").textContent = index.name;
  fill($("tabs"), Object.entries(VIEWS).filter(([, v]) => v.available()).map(([name, { title }]) =>
    el("a", { href: address({ view: name, ...at }), "aria-current": name === state.view ? "page" : null }, title)));
  fill($("method"), el("strong", null, step.method), step.about ? ` ${step.about}` : "");
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const settings = Object.entries(step.settings);
  fill($("settings-title"), "Settings", settings.filter(([name]) => ["alpha", "n0", "budget", "samples"].includes(name))
    .map(([name, value]) => el("span", { class: "chip" }, `${name} `, el("b", null, shown(value)))));
  fill($("settings"), settings.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, shown(value)))));
  $("config").textContent = index.config;
  $("config").hidden = !index.config;
  tell(index.left_out.length ? `Left out to keep the page small: ${index.left_out.join("; ")}. ` +
    "apportion inspect RUN --step N shows one step, --max-mb a larger page." : "");
}

function tell(words) {
  $("notice").hidden = !words;
  if ($("notice").textContent !== words) $("notice").textContent = words;
}

function drawSteps() {
  const chosen = $("step").value;
  fill($("step"), index.steps.map((step) => el("option", { value: step }, step)));
  if (chosen) $("step").value = chosen;
}

// A tracker shows the page in a frame that has no address of its own to change.
function remember(how, to) {
  try { history[how](null, "", to); } catch { /* the page works without one */ }
}

const asked = (hash) => {
  const found = Object.fromEntries(new URLSearchParams(hash.slice(1)));
  const whole = (text) => (/^\d{1,9}$/.test(text || "") ? Number(text) : undefined);
  return { view: found.view, step: whole(found.step), row: whole(found.row), token: whole(found.token), pivot: whole(found.pivot) ?? null };
};

async function visit(hash) {
  const to = asked(hash);
  await go({ ...to, view: to.view || state.view, how: "replaceState" }).catch(failed);
}

function follow(e) {
  const link = e.target.closest?.('a[href^="#view="]');
  if (!link || e.ctrlKey || e.metaKey || e.shiftKey || e.altKey) return;
  e.preventDefault();
  remember("pushState", link.getAttribute("href"));
  visit(link.getAttribute("href"));
}

function failed(error) {
  tell(`This could not be shown: ${error.message}`);
}

// A live page's new index: more steps and curves; the reader stays where he is.
async function apply(next, newest) {
  const first = !index?.steps.length;
  index = next;
  if (!next.steps.length) return tell("Waiting for the first recorded step.");
  chunks.clear();
  drawSteps();
  if (first) return visit(location.hash);
  if (newest) return go({ step: next.steps[next.steps.length - 1] }).catch(failed);
  drawHeader();
  if (state.view === "run" || state.view === "methods") await VIEWS[state.view].draw();
}

listen();
window.addEventListener("hashchange", () => visit(location.hash));
document.addEventListener("click", follow);
if ($("index")) {
  index = JSON.parse($("index").textContent);
  drawSteps();
  const to = asked(location.hash);
  go(to.step === undefined && to.row === undefined ? { ...index.start, view: to.view || index.start.view } : to).catch(failed);
} else {
  startLive(apply);
}
