// The page's data and its state. Chunks lie in the page, compressed, or a live page's server has them.

let index = null;
const VIEWS = {};
// step and detail are chunks, response is its entry in the step's chunk.
const state = { view: "response", step: null, response: null, detail: null, token: 0, pivot: null,
  tint: "advantage", own: false, maths: true };

const KEPT_CHUNKS = 200;
const chunks = new Map();

// The chunk of a key, as a promise. Asked for again it is the same object, as long as it is kept.
function load(key) {
  let found = chunks.get(key);
  if (found) chunks.delete(key);
  else found = index.live ? fetchChunk(key) : unpack(key);
  chunks.set(key, found);
  found.catch(() => chunks.delete(key));
  for (const old of chunks.keys()) {
    if (chunks.size <= KEPT_CHUNKS) break;
    chunks.delete(old);
  }
  return found;
}

async function unpack(key) {
  // The page draws while the rest of it is still being read.
  if (!$(key)?.nextSibling && document.readyState === "loading") {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  }
  const node = $(key);
  if (node?.type !== "application/gzip") throw new Error(`${key} is not in this page`);
  const bytes = Uint8Array.from(atob(node.textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const responsesOf = (group) => state.step.responses.filter((r) => r.group === group);
// The response whose advantage differs most along its tokens.
const mostTold = (rows) => rows.reduce((best, r) => (r.spread > best.spread ? r : best), rows[0]);
const segmentAt = (segments, t) => segments.findIndex((s) => s.start <= t && t < s.end);
const placeNow = () => address({ view: state.view, step: state.step.step, row: state.response?.row, pivot: state.pivot });
const address = (to) => `#${new URLSearchParams(Object.entries(to).filter(([, v]) => v !== undefined && v !== null))}`;
