// The text of a response, token by token. Far from the window it is plain text of the same shape, so that a long
// response costs what is seen of it.

const BLOCK = 256, AT_ONCE = 4000; // tokens: of a block of lines, and made before the first look

// Lays `detail`'s tokens into `box`. on.mark(k) makes the element that opens segment k.
// Returns {node(t), all(), marks}: the element of a token, all of them made, and the segments' marks.
function layText(box, detail, credit, scale, focused, maths, on) {
  const { text, masked } = detail.tokens, T = text.length;
  const gone = new Set(masked), nodes = new Array(T), marks = [], blocks = [];
  let made = 0;

  const observer = new IntersectionObserver((seen) => {
    for (const entry of seen) if (entry.isIntersecting) make(blocks[Number(entry.target.dataset.block)]);
  }, { rootMargin: "1200px 0px" });

  function make(block) {
    if (block.made) return;
    block.made = true;
    observer.unobserve(block.node);
    fill(block.node, block.pieces.map((piece) => piece.node
      || (piece.formula && formula(piece)) || tokens(piece)));
  }

  const tokens = ({ from, to, code }) => Array.from({ length: to - from }, (_, i) => token(from + i, text[from + i], code));

  function token(t, shown, code) {
    const { a, hue } = tintOf(gone.has(t) ? 0 : credit(t), scale);
    const node = document.createElement("span");
    const breaks = shown !== "" && shown.trim() === "" && shown.includes("\n");
    const kind = text[t] === "" ? (t === T - 1 && on.ended ? " eos" : " inner") : breaks ? " break" : "";
    node.className = `t ${hue}${kind}${gone.has(t) ? " masked" : ""}${code ? " code" : ""}`;
    node.dataset.t = t;
    node.tabIndex = t === focused() ? 0 : -1;
    node.setAttribute("aria-describedby", "token");
    node.style.setProperty("--a", a);
    node.append(shown);
    return (nodes[t] = node);
  }

  // A formula stands as it is set, over a strip of its tokens; what its first and last token have beside it, as text.
  function formula({ from, to, formula: { tex, display, head, tail } }) {
    const set = setFormula(tex, display);
    if (!set) return tokens({ from, to });
    const strip = el("span", { class: "under" });
    const inside = [];
    for (let t = from; t < to; t++) {
      const node = token(t, "");
      node.classList.remove("inner", "eos");
      node.style.flexGrow = Math.max(1, text[t].length);
      node.setAttribute("aria-label", text[t].trim() || "token");
      inside.push(node);
    }
    const at = Array.from({ length: to - from }, (_, i) => credit(from + i));
    const { a, hue } = tintOf(at.reduce((sum, x) => sum + x, 0) / at.length, scale);
    const side = (words, t) => (words ? el("span", { class: nodes[t].className, "--a": nodes[t].style.getPropertyValue("--a"), "data-of": t }, words) : null);
    return [side(head, from), el("span", { class: `formula ${hue}${display ? " display" : ""}`, "--a": a, title: tex }, set, fill(strip, inside)),
      side(tail, to - 1)];
  }

  const starts = new Map(detail.segments.map((s, k) => [s.start, k]));
  let pieces = [], size = 0;
  const close = () => {
    if (!pieces.length) return;
    const block = { pieces, made: false, from: made, node: el("div", { class: "lines", "data-block": blocks.length }) };
    fill(block.node, pieces.map((p) => p.node || text.slice(p.from, p.to).join("")));
    made += size;
    blocks.push(block);
    pieces = [];
    size = 0;
  };
  for (const piece of cutUp(text, starts, maths)) {
    if (piece.mark !== undefined) {
      marks[piece.mark] = on.mark(piece.mark);
      pieces.push({ node: marks[piece.mark] });
      continue;
    }
    pieces.push(piece);
    size += piece.to - piece.from;
    if ((size >= BLOCK && text[piece.to - 1].endsWith("\n")) || size >= 8 * BLOCK) close();
  }
  close();
  fill(box, blocks.map((b) => b.node));
  for (const block of blocks) {
    if (block.from < AT_ONCE) make(block);
    else observer.observe(block.node);
  }
  const blockOf = (t) => blocks.findLast((b) => b.from <= t);
  return {
    marks,
    node(t) {
      if (!nodes[t] && t < T) make(blockOf(t));
      return nodes[t];
    },
    all: () => blocks.forEach(make),
    drop: () => observer.disconnect(),
  };
}

// [{mark} | {from, to, code} | {from, to, formula}]: tokens in order, cut at segments, lines, code and formulas.
function cutUp(text, starts, maths) {
  const ends = [];
  let length = 0;
  for (const part of text) ends.push((length += part.length));
  const whole = text.join(""), found = regions(whole);
  const out = [];
  let t = 0, next = 0;
  const startOf = (i) => (i ? ends[i - 1] : 0);
  while (t < text.length) {
    if (starts.has(t)) out.push({ mark: starts.get(t) });
    while (next < found.length && found[next].end <= startOf(t)) next += 1;
    const region = found[next];
    if (region?.kind === "math" && maths && startOf(t) <= region.start && region.start < ends[t]) {
      let to = t + 1;
      while (to < text.length && startOf(to) < region.end) to += 1;
      // What a segment's start would cut stays as it was written, and so does what shares a token with the next one.
      const cut = Array.from({ length: to - t - 1 }, (_, i) => t + 1 + i).some((i) => starts.has(i));
      const shared = found[next + 1]?.start < ends[to - 1];
      if (!cut && !shared) {
        out.push({ from: t, to, formula: { ...region, head: whole.slice(startOf(t), region.start), tail: whole.slice(region.end, ends[to - 1]) } });
        t = to;
        continue;
      }
    }
    const code = Boolean(region && region.kind === "code" && region.start < ends[t]);
    const last = out[out.length - 1];
    if (last?.to === t && !last.formula && last.code === code && !text[t - 1].endsWith("\n") && !starts.has(t)
      && t - last.from < BLOCK) last.to = t + 1;
    else out.push({ from: t, to: t + 1, code });
    t += 1;
  }
  return out;
}
