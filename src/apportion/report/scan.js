// Where a response holds code and formulas. Code is left as it is; formulas can be set.

const FORMULA_LIMIT = 4000; // characters; what is longer is left as it was written
const OPENING = /\\\\|\\\$|```|`|\$\$|\$|\\\[|\\\(|\\boxed\s*\{|\\begin\{(equation|align|gather|multline|cases|[pbvBV]?matrix|aligned|array)(\*?)\}/g;

// [{start, end, kind: "code" | "math", tex, display}] in characters, rising, none inside another.
function regions(text) {
  const found = [];
  const pattern = new RegExp(OPENING);
  for (let m = pattern.exec(text); m; m = pattern.exec(text)) {
    const region = regionAt(text, m.index, m[0], m[1] && m[1] + m[2]);
    if (!region) continue;
    found.push(region);
    pattern.lastIndex = region.end;
  }
  return found;
}

function regionAt(text, start, open, environment) {
  const from = start + open.length;
  const until = (mark) => {
    const at = text.slice(from, from + FORMULA_LIMIT).indexOf(mark);
    return at < 0 ? -1 : from + at;
  };
  const math = (close, length, display) => {
    const tex = text.slice(from, close).trim();
    return close > from && tex !== "" && !/\n\s*\n/.test(tex)
      ? { start, end: close + length, kind: "math", tex, display } : null;
  };
  if (open === "\\\\" || open === "\\$") return null;
  if (open === "```") {
    const close = text.indexOf("```", from);
    return { start, end: close < 0 ? text.length : close + 3, kind: "code" };
  }
  if (open === "`") {
    const close = until("`");
    return close > from && !text.slice(from, close).includes("\n") ? { start, end: close + 1, kind: "code" } : null;
  }
  if (open === "$$") return math(until("$$"), 2, true);
  if (open === "\\[") return math(until("\\]"), 2, true);
  if (open === "\\(") return math(until("\\)"), 2, false);
  if (open === "$") {
    // As pandoc has it, so that "$5 and $6" are prices: no space inside the marks, no digit after them.
    const close = until("$");
    const priced = close < 0 || /\s/.test(text[from]) || /[\s\\]/.test(text[close - 1]) || /\d/.test(text[close + 1] || "");
    return priced ? null : math(close, 1, false);
  }
  if (environment) {
    const mark = `\\end{${environment}}`, close = until(mark);
    const region = close < 0 ? null : math(close, mark.length, true);
    return region && { ...region, tex: text.slice(start, region.end) };
  }
  const close = closingBrace(text, from);
  return close < 0 ? null : { start, end: close + 1, kind: "math", tex: text.slice(start, close + 1), display: false };
}

function closingBrace(text, from) {
  let depth = 1;
  for (let i = from; i < Math.min(text.length, from + FORMULA_LIMIT); i++) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "{") depth += 1;
    else if (text[i] === "}" && --depth === 0) return i;
  }
  return -1;
}

// Colour means credit here, and the policy refuses the style attributes that these would set.
const PLAIN = { "\\color": "\\@secondoftwo{#1}{}", "\\textcolor": "\\@secondoftwo{#1}{#2}", "\\colorbox": "\\@secondoftwo{#1}{\\text{#2}}",
  "\\fcolorbox": "\\@secondoftwo{#1#2}{\\fbox{#3}}", "\\pmb": "\\boldsymbol{#1}" };

// A formula as MathML, which browsers set by themselves; null where it is no LaTeX that the library knows, or has a
// link, a picture or HTML in it: that stays as it was written.
function setFormula(tex, display) {
  const box = document.createElement("span");
  const trust = () => { throw new Error("no links, pictures or HTML"); };
  try {
    katex.render(tex, box, { output: "mathml", displayMode: display, trust, strict: "ignore",
      maxExpand: 200, maxSize: 20, throwOnError: true, macros: { ...PLAIN } });
  } catch {
    return null;
  }
  return box.querySelector("math");
}
