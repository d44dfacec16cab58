"use strict";
// Live pages only: the index is asked for again and again, chunks when a view wants them. What is new is handed to the
// page, which keeps the reader's place; nothing here moves it, unless the reader asks to follow the newest step.

// Milliseconds: between two questions, once the run has finished, at most when questions fail, for one answer to come,
// and between two sentences that are read out.
const EVERY = 2000, FINISHED = 15000, SLOWEST = 15000, PATIENCE = 30000, HUSH = 10000;

async function fetchChunk(key) {
  const answer = await fetch(`/chunk/${key}`, { cache: "no-cache" });
  if (!answer.ok) throw new Error(`${key}: the server answers ${answer.status}`);
  return answer.json();
}

// Calls apply(index, follow) with the first index and with each one that differs from the last. `follow`: there is a
// new step, and the reader asked to be taken to it.
function startLive(apply) {
  const says = el("span", { class: "live-state", role: "status" }, "connecting.");
  const news = el("span", { class: "live-news", role: "status", "aria-live": "polite" });
  const box = el("input", { type: "checkbox", autocomplete: "off" });
  fill($("live"), el("label", null, box, " follow the newest step"), " · ", says, " ", news);
  const announce = announcer(news);
  let newest = null, known = null, tag = null, misses = 0, timer = 0, asking = false;

  // Written only where it changes, as it is read out.
  const show = (words) => { if (says.textContent !== words) says.textContent = words; };
  const condition = () => known.finished ? "finished."
    : newest === null ? "waiting for the first recorded step." : "live: new steps appear here.";

  async function ask() {
    if (asking) return;
    asking = true;
    clearTimeout(timer);
    let fresh = null;
    try {
      const answer = await fetch("/index.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {},
        signal: AbortSignal.timeout(PATIENCE) });
      if (answer.status !== 304) {
        if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
        fresh = await answer.json();
        tag = answer.headers.get("ETag");
      }
      misses = 0;
    } catch {
      misses += 1;
    }
    asking = false;
    const last = fresh?.steps[fresh.steps.length - 1] ?? null, grown = last !== null && last !== newest;
    if (grown && known) announce(`step ${last} recorded`);
    if (fresh) [known, newest] = [fresh, last];
    show(misses ? "connection lost, trying again." : condition());
    plan();
    if (fresh) apply(fresh, box.checked && grown);
  }

  function plan() {
    clearTimeout(timer);
    if (document.hidden) return;
    timer = setTimeout(ask, misses ? Math.min(SLOWEST, EVERY * 2 ** misses) : known?.finished ? FINISHED : EVERY);
  }

  box.addEventListener("change", () => {
    if (box.checked && newest !== null && state.step?.step !== newest) go({ step: newest }).catch(failed);
  });
  document.addEventListener("visibilitychange", () => { if (document.hidden) clearTimeout(timer); else ask(); });
  ask();
}

// Shows a sentence at once, and those that come within HUSH of it not before its end; of these only the last.
function announcer(node) {
  let next = null, hushed = false;
  const speak = () => {
    hushed = next !== null;
    if (!hushed) return;
    node.textContent = next;
    next = null;
    setTimeout(speak, HUSH);
  };
  return (words) => {
    next = words;
    if (!hushed) speak();
  };
}
